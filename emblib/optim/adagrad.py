"""Adagrad and row-wise Adagrad with its variants."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from emblib.optim.base import (
    HYPER_HEAD,
    L2,
    AdagradW,
    Decoupled,
    Optimizer,
    State,
    check_number,
)
from emblib.optim.counters import Counter, CowClip, GlobalDecay
from emblib.specs import Choice, check_count


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """`s += g*g; w -= lr * g / (sqrt(s) + eps)`, element by element (Duchi et al., 2011)."""

    eps: float = 1e-8

    functor: ClassVar[str] = "adagrad"
    kept: ClassVar[tuple[State, ...]] = (State("sum"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps)

    def parameters(self) -> tuple[float, ...]:
        """`(eps,)`."""
        return (self.eps,)


@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """`s += mean(g*g); w -= lr * g / (sqrt(s) + eps)`, one `s` a row (FBGEMM's default).

    Args:
        eps: added to the root.
        counter: None, or how steps and decay depend on how often a row is seen.
        max_norm: > 0: rows are scaled to a norm of at most this after their step.
        global_decay: None, or decay that also reaches rows that are seen seldom; then
            `weight_decay` and `counter` must be None.
    """

    eps: float = 1e-8
    counter: Counter | CowClip | None = None
    max_norm: float = 0.0
    global_decay: GlobalDecay | None = None

    functor: ClassVar[str] = "rowwise_adagrad"
    kept: ClassVar[tuple[State, ...]] = (State("sum", per_row=True),)
    decays: ClassVar[tuple[type, ...]] = (L2, Decoupled, AdagradW)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps)
        check_number("max_norm", self.max_norm)
        if isinstance(self.weight_decay, AdagradW) and not isinstance(self.counter, Counter):
            raise ValueError(
                "weight_decay AdagradW counts how often rows are seen: give counter=Counter() too, "
                "or take Decoupled(rate)"
            )
        if self.global_decay is not None and (self.weight_decay or self.counter):
            raise ValueError(
                "global_decay is the weight decay: weight_decay and counter must be None, got "
                f"{self.weight_decay!r} and {self.counter!r}"
            )

    @property
    def name(self) -> str:
        """The plain functor, or the one of the variant that is asked for."""
        if isinstance(self.counter, Counter):
            return "rowwise_adagrad_counter"
        if isinstance(self.counter, CowClip):
            return "rowwise_adagrad_cowclip"
        if self.global_decay is not None:
            return "rowwise_adagrad_global_decay"
        return "rowwise_adagrad_max_norm" if self.max_norm > 0 else "rowwise_adagrad"

    @property
    def states(self) -> tuple[State, ...]:
        """`sum`; with a global decay or a counter the step of the last update; the count."""
        previous, count = State("prev_iter", per_row=True), State("row_counter", per_row=True)
        if self.counter is not None:
            return (*self.kept, previous, count)
        return self.kept if self.global_decay is None else (*self.kept, previous)

    def parameters(self) -> tuple[float, ...]:
        """`(eps,)`, and with any variant max_norm and the numbers of the variant."""
        if self.name == "rowwise_adagrad":
            return (self.eps,)
        norms = (self.eps, self.max_norm)
        if isinstance(self.counter, Counter):
            return (*norms, *self.counter.parameters(self.weight_decay))
        if self.counter is not None:
            return (*norms, self.counter.halflife, self.counter.coefficient,
                    self.counter.lower_bound)  # fmt: skip
        if self.global_decay is not None:
            decay = self.global_decay
            return (*norms, decay.rate, decay.lower_bound, float(decay.start))
        return norms

    def _decay_head(self) -> tuple[float, float]:
        return (0.0, 0.0) if isinstance(self.counter, Counter) else super()._decay_head()


class SlowWeights(Choice):
    """What becomes of the moving average after a row of steps was added: KEEP it or CLEAR it."""

    KEEP = "keep"
    CLEAR = "clear"


@dataclass(frozen=True)
class EnsembleRowwiseAdagrad(Optimizer):
    """Row-wise Adagrad with a moving average of the weights that replaces them now and then.

    Args:
        eps: added to the root.
        average_every: steps after which the weights enter the average.
        swap_every: steps after which the average becomes the weights.
        start: up to this step the average is a copy of the weights.
        keep: how much of the average stays when the weights enter.
        slow: whether the average is cleared afterwards.
    """

    eps: float = 1e-8
    average_every: int = 10000
    swap_every: int = 10000
    start: int = 0
    keep: float = 0.6
    slow: SlowWeights = SlowWeights.KEEP

    functor: ClassVar[str] = "ensemble_rowwise_adagrad"
    kept: ClassVar[tuple[State, ...]] = (State("sparse_ema"), State("sum", per_row=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps)
        object.__setattr__(self, "slow", SlowWeights(self.slow))
        for name in ("average_every", "swap_every"):
            check_count(name, getattr(self, name))
        if not 0.0 <= self.keep <= 1.0:
            raise ValueError(f"keep must be in [0, 1], got {self.keep}")

    def parameters(self) -> tuple[float, ...]:
        """`(eps,)`."""
        return (self.eps,)


def ensemble_(
    optimizer: EnsembleRowwiseAdagrad,
    step: int,
    weights: Sequence[Tensor],
    slow: Sequence[Tensor],
) -> None:
    """What happens at forward number `step` (from 1): weights enter the averages, or become them.

    `weights` and `slow` are views of the tables and of their states `sparse_ema`.
    """
    average, swap = step % optimizer.average_every == 0, step % optimizer.swap_every == 0
    if not (average or swap):
        return
    keep = 0.0 if step <= optimizer.start else optimizer.keep
    with torch.no_grad():
        for fast, ema in zip(weights, slow, strict=True):
            if average:
                ema.lerp_(fast.to(ema), 1.0 - keep)
            if swap:
                fast.copy_(ema)
            if average and optimizer.slow is SlowWeights.CLEAR:
                ema.zero_()


def count_largest_(
    optimizer: RowwiseAdagrad, step: int, hyper: Tensor, counters: Sequence[Tensor]
) -> None:
    """At every `Counter.update_every`-th step: the largest count of all rows, plus one, to `hyper`.

    `counters` are the states `row_counter`; only those in host memory make a GPU wait.
    """
    counter = optimizer.counter
    if not isinstance(counter, Counter) or counter.update_every <= 0:
        return
    if step % counter.update_every == 0:
        kept = [count for count in counters if count.numel() > 0]
        if hyper.is_cuda and any(count.is_cpu for count in kept):
            torch.cuda.synchronize(hyper.device)  # kernels may still write to them in place
        largest = [count.max() for count in kept]
        at = HYPER_HEAD + len(optimizer.parameters()) - 1
        hyper[at] = 1.0 + (torch.stack([x.to(hyper) for x in largest]).max() if largest else 0.0)
