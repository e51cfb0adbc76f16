"""Adam and LAMB, and their variants with one second moment per row."""

from dataclasses import dataclass
from typing import Any, ClassVar

from emblib.optim.base import Decoupled, Optimizer, State, check_number, number_or_nan

_ELEMENTWISE_STATES = (State("exp_avg"), State("exp_avg_sq"))
_ROWWISE_STATES = (State("exp_avg"), State("exp_avg_sq", per_row=True))


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam on the rows a batch touches (Kingma & Ba, 2015; lazy as `torch.optim.SparseAdam`).

    With `m` and `v` the bias-corrected moments: `w -= lr * m / (sqrt(v) + eps)`. A weight decay of
    `Decoupled(rate)` makes it AdamW.

    Args:
        betas: decay rates of the first and the second moment, in [0, 1).
        eps: constant that is added to the root, >= 0.

    Example:
        >>> [state.name for state in emblib.optim.Adam(lr=0.01, betas=(0.9, 0.99)).states]
        ['exp_avg', 'exp_avg_sq']
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    functor: ClassVar[str] = "adam"
    base_states: ClassVar[tuple[State, ...]] = _ELEMENTWISE_STATES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps)
        _check_betas(self.betas)

    def parameters(self) -> tuple[float, ...]:
        """Return `(beta1, beta2, eps)`."""
        return (*self.betas, self.eps)

    def _unpack_fields(self, numbers: tuple[float, ...]) -> dict[str, Any]:
        beta1, beta2, eps = numbers
        return {"betas": (beta1, beta2), "eps": eps}


@dataclass(frozen=True)
class PartialRowwiseAdam(Adam):
    """Adam whose second moment is one number per row: the moving average of `mean(g*g)`.

    Example:
        >>> [(state.name, state.per_row) for state in emblib.optim.PartialRowwiseAdam(0.01).states]
        [('exp_avg', False), ('exp_avg_sq', True)]
    """

    functor: ClassVar[str] = "partial_rowwise_adam"
    base_states: ClassVar[tuple[State, ...]] = _ROWWISE_STATES


@dataclass(frozen=True)
class LAMB(Optimizer):
    """Adam whose steps are scaled to the norm of the row (You et al., 2020).

    With `m` and `v` the bias-corrected moments: `r = m / (sqrt(v) + eps) + rate * w; w -= lr * |w|
    / |r| * r`, with the rate of `weight_decay=Decoupled(rate)`. If a norm is 0, `|w| / |r|` is 1.

    Args:
        betas: decay rates of the first and the second moment, in [0, 1).
        eps: constant that is added to the root, >= 0.

    Example:
        >>> [state.name for state in emblib.optim.LAMB(lr=0.01).states]
        ['exp_avg', 'exp_avg_sq']
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    functor: ClassVar[str] = "lamb"
    base_states: ClassVar[tuple[State, ...]] = _ELEMENTWISE_STATES
    decays: ClassVar[tuple[type, ...]] = (Decoupled,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps)
        _check_betas(self.betas)

    def parameters(self) -> tuple[float, ...]:
        """Return `(beta1, beta2, eps, rate of the weight decay)`."""
        return (*self.betas, self.eps, self._functor_decay_rate())

    def _unpack_fields(self, numbers: tuple[float, ...]) -> dict[str, Any]:
        beta1, beta2, eps, rate = numbers
        decay = self._make_decay(Decoupled, rate)
        return {"betas": (beta1, beta2), "eps": eps, "weight_decay": decay}

    def _kernel_decay_rates(self) -> tuple[float, float]:
        return (0.0, 0.0)


@dataclass(frozen=True)
class PartialRowwiseLAMB(LAMB):
    """LAMB whose second moment is one number per row: the moving average of `mean(g*g)`.

    Example:
        >>> [(state.name, state.per_row) for state in emblib.optim.PartialRowwiseLAMB(0.01).states]
        [('exp_avg', False), ('exp_avg_sq', True)]
    """

    functor: ClassVar[str] = "partial_rowwise_lamb"
    base_states: ClassVar[tuple[State, ...]] = _ROWWISE_STATES


def _check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless `betas` is a tuple of two numbers in [0, 1)."""
    is_pair = isinstance(betas, tuple) and len(betas) == 2
    if not is_pair or not all(0.0 <= number_or_nan(beta) < 1.0 for beta in betas):
        raise ValueError(f"betas must be a tuple of two numbers in [0, 1), got {betas}")
