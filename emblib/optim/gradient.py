"""SGD, LARS, and gradients handed out to an optimizer of your own."""

from dataclasses import dataclass
from typing import ClassVar

from emblib.optim.base import L2, Optimizer, State, check_number
from emblib.specs import Choice


@dataclass(frozen=True)
class SGD(Optimizer):
    """`w -= lr * g`, once per distinct row."""

    functor: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class LARS(Optimizer):
    """Momentum SGD whose learning rate follows the norms of row and gradient (You et al., 2017).

    `a = lr * eta * |w| / (|g| + rate * |w|); m = momentum * m + a * (g + rate * w); w -= m`, with
    the rate of `weight_decay=L2(rate)`. A row of zeros, which has no ratio, takes `a = lr`.
    """

    momentum: float = 0.9
    eta: float = 0.001

    functor: ClassVar[str] = "lars"
    kept: ClassVar[tuple[State, ...]] = (State("momentum_buffer"),)
    decays: ClassVar[tuple[type, ...]] = (L2,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eta", self.eta)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")

    def parameters(self) -> tuple[float, ...]:
        """`(momentum, eta, rate of the weight decay)`."""
        return (self.momentum, self.eta, self._rate())

    def _decay_head(self) -> tuple[float, float]:
        return (0.0, 0.0)


class Gradient(Choice):
    """The form of a gradient that is handed out: SPARSE has the rows of the batch, DENSE all."""

    SPARSE = "sparse"
    DENSE = "dense"


@dataclass(frozen=True)
class External(Optimizer):
    """No fused update: backward leaves a gradient for an optimizer of your own."""

    lr: float = 0.0
    gradient: Gradient = Gradient.SPARSE

    functor: ClassVar[str] = "external"
    decays: ClassVar[tuple[type, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr != 0.0:
            raise ValueError(
                f"External has no learning rate, got {self.lr}; give it to your own optimizer"
            )
        object.__setattr__(self, "gradient", Gradient(self.gradient))
