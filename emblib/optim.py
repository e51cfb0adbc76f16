"""Optimizers that run fused into the backward pass, as frozen descriptions.

Each dataclass names a functor of `csrc/optim/optimizers.h`, lists the state it keeps beside the
weights, and packs its numbers into the `hyper` vector the kernels read: learning rate, step, then
its own parameters in the functor's order. All states are float32 and start at zero.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class State:
    """One state tensor: `per_row` has one entry a row, otherwise it is as long as the row."""

    name: str
    per_row: bool = False


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimizers; `lr` is the learning rate (> 0 or 0, finite)."""

    lr: float

    name: ClassVar[str] = ""
    states: ClassVar[tuple[State, ...]] = ()

    def __post_init__(self) -> None:
        check_learning_rate(self.lr)
        object.__setattr__(self, "lr", float(self.lr))

    def parameters(self) -> tuple[float, ...]:
        """The numbers that follow learning rate and step in the hyper vector."""
        return ()

    def hyper(self, device: torch.device | str | None = None) -> Tensor:
        """Float64 `(lr, step = 0, *parameters)` on `device`."""
        values = (self.lr, 0.0, *self.parameters())
        return torch.tensor(values, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class SGD(Optimizer):
    """`w -= lr * g`, once per distinct row."""

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """`s += g*g; w -= lr * g / (sqrt(s) + eps)`, element by element (Duchi et al., 2011)."""

    eps: float = 1e-8

    name: ClassVar[str] = "adagrad"
    states: ClassVar[tuple[State, ...]] = (State("sum"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_eps(self.eps)

    def parameters(self) -> tuple[float, ...]:
        """`(eps,)`."""
        return (self.eps,)


@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """`s += mean(g*g); w -= lr * g / (sqrt(s) + eps)`, one `s` a row (FBGEMM's default)."""

    eps: float = 1e-8

    name: ClassVar[str] = "rowwise_adagrad"
    states: ClassVar[tuple[State, ...]] = (State("sum", per_row=True),)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_eps(self.eps)

    def parameters(self) -> tuple[float, ...]:
        """`(eps,)`."""
        return (self.eps,)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam on the rows a batch touches (Kingma & Ba, 2015; lazy as `torch.optim.SparseAdam`)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    name: ClassVar[str] = "adam"
    states: ClassVar[tuple[State, ...]] = (State("exp_avg"), State("exp_avg_sq"))

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_eps(self.eps)
        pair = isinstance(self.betas, tuple) and len(self.betas) == 2
        if not pair or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be a tuple of two numbers in [0, 1), got {self.betas}")

    def parameters(self) -> tuple[float, ...]:
        """`(beta1, beta2, eps)`."""
        return (*self.betas, self.eps)


@dataclass(frozen=True)
class External(Optimizer):
    """No fused update: backward leaves a gradient for an optimizer of your own."""

    lr: float = 0.0

    name: ClassVar[str] = "external"


FUSED: dict[str, type[Optimizer]] = {cls.name: cls for cls in (SGD, Adagrad, RowwiseAdagrad, Adam)}
"""The optimizers that backward can apply, by the name of their functor."""


def check_learning_rate(lr: float) -> None:
    """Raise ValueError unless `lr` is a number >= 0 that is finite in float32."""
    _check_number("the learning rate", lr)


def _check_eps(eps: float) -> None:
    _check_number("eps", eps)


_LARGEST = torch.finfo(torch.float32).max


def _check_number(name: str, value: float) -> None:
    """The kernels compute in float32; not `isfinite` alone, since 1e300 would become infinite."""
    if isinstance(value, str) or not (math.isfinite(value) and 0.0 <= value <= _LARGEST):
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
