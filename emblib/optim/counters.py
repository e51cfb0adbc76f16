"""Variants of row-wise Adagrad that follow how often, or how long ago, a row was seen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from emblib.optim.base import L2, AdagradW, Decoupled, WeightDecay, check_number
from emblib.specs import Choice

_LAST_PLAIN, _BITS_OF_LAST_PLAIN, _BITS_OF_LARGEST = 1 << 24, 0x4B800000, 0x7F7FFFFF
LAST_STEP = _LAST_PLAIN + _BITS_OF_LARGEST - _BITS_OF_LAST_PLAIN
"""The last step that `prev_iter` tells from the next, about 8.9e8; it stays there."""


def decode_steps(prev_iter: Tensor) -> Tensor:
    """Return the steps, int64, that a state `prev_iter` stands for (csrc/optim/step_number.h).

    Up to 2^24 the float32 values are the steps; from there on each step is the next float, so that
    one float per row counts exactly.
    """
    code = prev_iter.to(torch.float32)
    beyond = (code.view(torch.int32) - _BITS_OF_LAST_PLAIN).clamp(min=0)
    return code.clamp(0, _LAST_PLAIN).long() + torch.where(code > 0, beyond, 0)


def encode_steps(steps: Tensor) -> Tensor:
    """Return the float32 state `prev_iter` of steps >= 0, see `decode_steps`."""
    bits = (steps.clamp(_LAST_PLAIN, LAST_STEP) - _LAST_PLAIN + _BITS_OF_LAST_PLAIN).to(torch.int32)
    return torch.where(steps <= _LAST_PLAIN, steps.to(torch.float32), bits.view(torch.float32))


class TailRate(Choice):
    """Learning rate of the rows seen more often than `Counter.threshold`, `c` being the count.

    EQUAL changes nothing; RAISED multiplies by `(largest / (c + 1)) ** bound`, within [1, 10];
    LOWERED by `((c + 1) / largest) ** bound`, within [0.1, 1]; OF_COUNT takes
    `lr / (sqrt(bound * c) + eps)`.
    """

    EQUAL = "equal"
    RAISED = "raised"
    LOWERED = "lowered"
    OF_COUNT = "of_count"


@dataclass(frozen=True)
class Share:
    """A threshold as a share of the largest count."""

    of_largest: float


@dataclass(frozen=True)
class Counter:
    """Updates that depend on how often a row was seen (FBGEMM's counter-based regularization).

    Args:
        halflife: > 0: each time counts half after so many steps; 0: only the last one counts; < 0:
            all count. An `L2` or `Decoupled` decay is multiplied by `halflife / count`.
        start: the first step after which decay and rates are adjusted; <= 0: from the beginning.
        bound: exponent, factor or bound of the adjustments.
        tail: learning rate of the rows above the threshold.
        threshold: a count, or a `Share` of the largest.
        update_every: steps after which the largest count is looked up anew.
    """

    halflife: float = -1.0
    start: int = -1
    bound: float = 1.0
    tail: TailRate = TailRate.EQUAL
    threshold: float | Share = 0.0
    update_every: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "tail", TailRate(self.tail))

    def parameters(self, decay: WeightDecay | None) -> tuple[float, ...]:
        """In the order of the functor, the largest count (1 at first) last."""
        kinds = {type(None): 0.0, L2: 1.0, Decoupled: 2.0, AdagradW: 3.0}
        tails = (TailRate.RAISED, TailRate.LOWERED, TailRate.OF_COUNT)
        tail = float(tails.index(self.tail)) if self.tail in tails else -1.0
        rate = 0.0 if decay is None else float(decay.rate)
        own = (self.halflife, kinds[type(decay)], rate, float(self.start), self.bound, tail)
        if isinstance(self.threshold, Share):
            return (*own, self.threshold.of_largest, 1.0, 1.0)
        return (*own, self.threshold, 0.0, 1.0)


@dataclass(frozen=True)
class CowClip:
    """Clip the gradient of a row to `count * max(coefficient * norm of the row, lower_bound)`.

    `halflife` is that of the count, as in `Counter` (Zheng et al., "CowClip", 2022).
    """

    halflife: float = -1.0
    coefficient: float = 0.0
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        check_number("coefficient", self.coefficient)
        check_number("lower_bound", self.lower_bound)


@dataclass(frozen=True)
class GlobalDecay:
    """Decoupled decay of all rows at every step, applied when a row is seen again.

    Args:
        rate: of the decay.
        start: the first step that it holds for.
        lower_bound: the least factor that missed steps make in one go, at most 1.
    """

    rate: float
    start: int = 0
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        check_number("rate", self.rate)
        check_number("lower_bound", self.lower_bound)
        if self.lower_bound > 1.0:
            raise ValueError(f"lower_bound is a factor <= 1, got {self.lower_bound}")

    def scale(self, prev_iter: Tensor, step: Tensor | int, lr: Tensor | float) -> Tensor:
        """What rows last updated at step `prev_iter` are multiplied by when read at `step`.

        `max(lower_bound, (1 - lr * rate) ** (step - previous - 1))`, and 1 for rows never updated
        and for steps before `start`; in the dtype of `prev_iter`, which `decode_steps` reads.
        `step` is that of the update that the forward pass precedes. From `LAST_STEP` on, where
        `prev_iter` stays, no missed steps are counted, as in the update. Nothing is read back from
        the device.
        """
        now = torch.as_tensor(step, dtype=torch.float64, device=prev_iter.device)
        rate = torch.as_tensor(lr, dtype=torch.float64, device=prev_iter.device) * self.rate
        previous = decode_steps(prev_iter)
        missed = now.clamp(max=LAST_STEP) - previous - 1
        factor = ((1 - rate).clamp(min=0) ** missed.clamp(min=0)).clamp(min=self.lower_bound)
        holds = (previous > 0) & (missed > 0) & (now >= self.start)
        return torch.where(holds, factor, 1.0).to(prev_iter.dtype)
