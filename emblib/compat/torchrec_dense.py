"""TorchRec's dense modules, which recommenders put around their collections.

Parameters have TorchRec's names, so that state dicts of its models load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


class SwishLayerNorm(nn.Module):
    """Multiply the input by the sigmoid of its layer norm over the last dimensions."""

    def __init__(
        self, input_dims: int | list[int] | torch.Size, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled input."""
        scaled: Tensor = input * self.norm(input)
        return scaled


class Perceptron(nn.Module):
    """A linear layer and an activation.

    Args:
        in_size: columns of the input.
        out_size: columns of the output.
        bias: whether the layer has one.
        activation: a module or a function of tensors.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def forward(self, input: Tensor) -> Tensor:
        """Return the activation of the layer's output."""
        return self._activation_fn(self._linear(input))


_ACTIVATIONS: dict[str, Activation] = {"relu": torch.relu, "sigmoid": torch.sigmoid}


class MLP(nn.Module):
    """Perceptrons one after another.

    Args:
        in_size: columns of the input.
        layer_sizes: columns of the output of each layer.
        bias: whether the layers have one.
        activation: "relu", "sigmoid", "swish_layernorm", a function of tensors, a module, of which
            every layer has a copy, or a class or function that makes one.
        device: device of the parameters.
        dtype: dtype of the parameters.
        activation_on_last: whether the last layer has the activation.

    Raises:
        ValueError: another name.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: Any = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        sizes, layers = [in_size, *layer_sizes], []
        for number, (before, after) in enumerate(pairwise(sizes), 1):
            is_last = number == len(layer_sizes)
            chosen: Activation = nn.Identity()
            if activation_on_last or not is_last:
                chosen = _activation(activation, after, device)
            layers.append(Perceptron(before, after, bias, chosen, device, dtype))
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the last layer."""
        out: Tensor = self._mlp(input)
        return out


def _activation(given: Any, size: int, device: torch.device | None) -> Activation:
    """Return the activation of a layer with `size` outputs."""
    if given == "swish_layernorm":
        return SwishLayerNorm(size, device=device)
    if isinstance(given, str):
        if given not in _ACTIVATIONS:
            raise ValueError(
                f"activation must be {', '.join(map(repr, _ACTIVATIONS))}, 'swish_layernorm', a "
                f"function or a module, got {given!r}"
            )
        return _ACTIVATIONS[given]
    if isinstance(given, nn.Module):
        return deepcopy(given)
    try:
        made = given()
    except TypeError:
        made = None  # it takes a tensor
    result: Activation = made if isinstance(made, nn.Module) else given
    return result


def _matrices(count: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(
        nn.Parameter(nn.init.xavier_normal_(torch.empty(*shape))) for _ in range(count)
    )


def _zeros(count: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.zeros(*shape)) for _ in range(count))


class CrossNet(nn.Module):
    """Cross layers `x0 * (W x + b) + x` of a matrix W each (DCN v2).

    Args:
        in_features: columns of the input N.
        num_layers: the number of layers.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self.kernels = _matrices(num_layers, in_features, in_features)
        self.bias = _zeros(num_layers, in_features, 1)

    def forward(self, input: Tensor) -> Tensor:
        """Return `[B, N]`."""
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            crossed = input * (crossed @ kernel.t() + bias.view(-1)) + crossed
        return crossed


class LowRankCrossNet(nn.Module):
    """Cross layers `x0 * (W V x + b) + x` of two narrow matrices each (DCN v2).

    Args:
        in_features: columns of the input N.
        num_layers: the number of layers.
        low_rank: rows of V and columns of W, at least 1.
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        if low_rank < 1:
            raise ValueError(f"low_rank must be >= 1, got {low_rank}")
        self.W_kernels = _matrices(num_layers, in_features, low_rank)
        self.V_kernels = _matrices(num_layers, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features)

    def forward(self, input: Tensor) -> Tensor:
        """Return `[B, N]`."""
        crossed = input
        for wide, narrow, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            crossed = input * (crossed @ narrow.t() @ wide.t() + bias) + crossed
        return crossed


class VectorCrossNet(nn.Module):
    """Cross layers `x0 * (w . x) + b + x` of a vector w each (DCN).

    Args:
        in_features: columns of the input N.
        num_layers: the number of layers.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self.kernels = _matrices(num_layers, in_features, 1)
        self.bias = _zeros(num_layers, in_features, 1)

    def forward(self, input: Tensor) -> Tensor:
        """Return `[B, N]`."""
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            crossed = input * (crossed @ kernel) + bias.view(-1) + crossed
        return crossed


def _side_by_side(embeddings: Sequence[Tensor]) -> Tensor:
    return torch.cat([rows.flatten(1) for rows in embeddings], 1)


class DeepFM(nn.Module):
    """The deep part of DeepFM: a module over all embeddings side by side."""

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Return the output of the module for embeddings `[B, N, D]` of any N and D."""
        out: Tensor = self.dense_module(_side_by_side(embeddings))
        return out


class FactorizationMachine(nn.Module):
    """The second-order part of DeepFM: half the square of the sum less the sum of squares."""

    def forward(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Return `[B, 1]` for embeddings `[B, N, D]` of any N and D."""
        values = _side_by_side(embeddings)
        total = values.sum(1, keepdim=True)
        return (total.square() - values.square().sum(1, keepdim=True)) * 0.5
