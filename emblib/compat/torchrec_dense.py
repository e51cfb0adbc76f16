"""TorchRec's dense modules, for the parts of a recommender other than its collections.

Parameters have TorchRec's names, so that state dicts of TorchRec load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from emblib.compat.checks import check_flags

Activation = Callable[[Tensor], Tensor]


class SwishLayerNorm(nn.Module):
    """Module that multiplies its input by the sigmoid of the input's layer norm.

    Args:
        input_dims: sizes of the last dimensions, over which the norm is computed.
        device: device of the parameters; None is torch's default device.
    """

    def __init__(
        self, input_dims: int | list[int] | torch.Size, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled input, in its shape."""
        output: Tensor = input * self.norm(input)
        return output


class Perceptron(nn.Module):
    """A linear layer and an activation.

    Args:
        in_size: number of columns of the input.
        out_size: number of columns of the output.
        bias: whether the layer adds a bias.
        activation: module or function of a tensor.
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
        check_flags(bias=bias)
        self._linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def forward(self, input: Tensor) -> Tensor:
        """Return the activation of the layer's output, `[..., out_size]`."""
        return self._activation_fn(self._linear(input))


_ACTIVATIONS: dict[str, Activation] = {"relu": torch.relu, "sigmoid": torch.sigmoid}


class MLP(nn.Module):
    """Sequence of perceptrons.

    Args:
        in_size: number of columns of the input.
        layer_sizes: number of columns of the output of each layer.
        bias: whether the layers add a bias.
        activation: activation of the layers: "relu", "sigmoid", "swish_layernorm", a function of a
            tensor, a module, of which every layer has a copy, or a class or function without
            arguments that returns a module.
        device: device of the parameters.
        dtype: dtype of the linear layers and of the norms of "swish_layernorm".
        activation_on_last: whether the last layer has an activation.

    Raises:
        ValueError: `activation` is another name.
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
        check_flags(bias=bias, activation_on_last=activation_on_last)
        sizes, layers = [in_size, *layer_sizes], []
        for layer_number, (in_columns, out_columns) in enumerate(pairwise(sizes), 1):
            is_last = layer_number == len(layer_sizes)
            layer_activation: Activation = nn.Identity()
            if activation_on_last or not is_last:
                layer_activation = _activation_of_layer(activation, out_columns, device, dtype)
            layers.append(
                Perceptron(in_columns, out_columns, bias, layer_activation, device, dtype)
            )
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the last layer; the input itself if there is none."""
        out: Tensor = self._mlp(input)
        return out


def _activation_of_layer(
    activation: Any, num_columns: int, device: torch.device | None, dtype: torch.dtype
) -> Activation:
    """Return the activation of a layer with `num_columns` outputs; see `MLP` for the arguments."""
    if activation == "swish_layernorm":
        return SwishLayerNorm(num_columns, device=device).to(dtype)
    if isinstance(activation, str):
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation must be {', '.join(map(repr, _ACTIVATIONS))}, 'swish_layernorm', a "
                f"function or a module, got {activation!r}"
            )
        return _ACTIVATIONS[activation]
    if isinstance(activation, nn.Module):
        return deepcopy(activation)
    try:
        constructed = activation()  # a class, or a function that returns a module
    except TypeError:
        constructed = None  # a function of a tensor
    result: Activation = constructed if isinstance(constructed, nn.Module) else activation
    return result
