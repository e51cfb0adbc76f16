"""Adagrad, row-wise Adagrad, and variants that depend on how often a row was seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from emblib.columns import Hyper
from emblib.grad_mode import without_gradients
from emblib.optim.base import (
    L2,
    AdagradW,
    Decoupled,
    Optimizer,
    State,
    WeightDecay,
    check_number,
    number_or_nan,
)
from emblib.specs import OptionEnum, check_count

_LAST_EXACT_STEP = 1 << 24  # up to here float32 represents every integer: a step is its own code
_LAST_EXACT_BITS = 0x4B800000  # 2^24 as float32
_MAX_FLOAT_BITS = 0x7F7FFFFF  # the largest finite float32
LAST_STEP = _LAST_EXACT_STEP + _MAX_FLOAT_BITS - _LAST_EXACT_BITS
"""The last step that `prev_iter` can encode, about 8.9e8; later steps are encoded as this one."""


def decode_steps(prev_iter: Tensor) -> Tensor:
    """Return the steps, int64, that a state `prev_iter` encodes (csrc/optim/rowwise_adagrad.h).

    Up to 2^24 the float32 values are the steps. Beyond, where float32 cannot represent every
    integer, each further step is encoded as the next larger float.

    Example:
        >>> prev_iter = emblib.optim.encode_steps(torch.tensor([3, 1 << 25]))
        >>> emblib.optim.decode_steps(prev_iter)
        tensor([       3, 33554432])
    """
    code = prev_iter.to(torch.float32)
    steps_beyond = (code.view(torch.int32) - _LAST_EXACT_BITS).clamp(min=0)
    return code.clamp(0, _LAST_EXACT_STEP).long() + torch.where(code > 0, steps_beyond, 0)


def encode_steps(steps: Tensor) -> Tensor:
    """Return the float32 state `prev_iter` of integer steps >= 0, see `decode_steps`.

    Steps beyond `LAST_STEP` become `LAST_STEP`.

    Example:
        >>> emblib.optim.encode_steps(torch.tensor([3]))
        tensor([3.])
    """
    steps_beyond = steps.clamp(_LAST_EXACT_STEP, LAST_STEP) - _LAST_EXACT_STEP
    bits = (steps_beyond + _LAST_EXACT_BITS).to(torch.int32)
    return torch.where(steps <= _LAST_EXACT_STEP, steps.to(torch.float32), bits.view(torch.float32))


class TailRate(OptionEnum):
    """Learning rate of the rows seen more often than `Counter.threshold`.

    `c` is the count of the row, `bound` a field of the `Counter`. `largest` is the largest count of
    a row of the module plus 1, measured every `Counter.update_every` steps; it is 1 before. EQUAL
    leaves the rate unchanged. RAISED multiplies it by `(largest / (c + 1)) ** bound`, clamped to
    [1, 10]; LOWERED by `((c + 1) / largest) ** bound`, clamped to [0.1, 1]. BY_COUNT replaces the
    step size by `lr / (sqrt(bound * c) + eps)`.

    Example:
        >>> counter = emblib.optim.Counter(tail=emblib.optim.TailRate.BY_COUNT, threshold=10)
        >>> emblib.optim.RowwiseAdagrad(0.1, counter=counter).counter.tail
        <TailRate.BY_COUNT: 'of_count'>
    """

    EQUAL = "equal"
    RAISED = "raised"
    LOWERED = "lowered"
    BY_COUNT = "of_count"


# The index is the code in csrc/optim/rowwise_adagrad.h; EQUAL is -1.
_TAILS = (TailRate.RAISED, TailRate.LOWERED, TailRate.BY_COUNT)
_DECAYS = (None, L2, Decoupled, AdagradW)


@dataclass(frozen=True)
class RelativeThreshold:
    """A threshold of `floor(fraction_of_largest * largest)`.

    `largest` is that of `TailRate`. `Counter` checks that the fraction is finite.

    Example:
        >>> emblib.optim.Counter(threshold=emblib.optim.RelativeThreshold(0.5)).threshold
        RelativeThreshold(fraction_of_largest=0.5)
    """

    fraction_of_largest: float


def _check_finite(name: str, value: Any) -> None:
    if not math.isfinite(number_or_nan(value)):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


@dataclass(frozen=True)
class Counter:
    """Updates that depend on how often a row was seen (FBGEMM's counter-based regularization).

    Args:
        halflife: steps after which an occurrence counts half; 0 counts only the last occurrence,
            a negative one counts all fully. `Decoupled` or `L2` decay multiplies rows by
            `1 - halflife / count * rate * a`, so rows grow if `halflife` < 0; `a` is the learning
            rate for `Decoupled`, for `L2` the step size without `tail`. The penalty of `L2` is
            added to the gradients only in the state `sum`.
        start: step after which rows decay and rates are adjusted; <= 0 begins with the first step.
        bound: exponent or factor of `tail` (see `TailRate`), or bound of the rate of `AdagradW`.
        tail: learning rate of the rows above the threshold; not used by `AdagradW` with a
            `halflife` of -1 or -2.
        threshold: a count, or a `RelativeThreshold` of the largest.
        update_every: steps between updates of the largest count; <= 0 never updates it.

    Raises:
        ValueError: a number is not finite; `bound` and a count as threshold may be infinite.

    Example:
        >>> counter = emblib.optim.Counter(halflife=1_000, tail=emblib.optim.TailRate.BY_COUNT)
        >>> [state.name for state in emblib.optim.RowwiseAdagrad(0.1, counter=counter).states]
        ['sum', 'prev_iter', 'row_counter']
    """

    halflife: float = -1.0
    start: int = -1
    bound: float = 1.0
    tail: TailRate = TailRate.EQUAL
    threshold: float | RelativeThreshold = 0.0
    update_every: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "tail", TailRate(self.tail))
        numbers = {name: getattr(self, name) for name in ("halflife", "start", "update_every")}
        if isinstance(self.threshold, RelativeThreshold):
            numbers["threshold"] = self.threshold.fraction_of_largest
        elif self.threshold != math.inf:
            numbers["threshold"] = self.threshold
        if self.bound != math.inf:
            numbers["bound"] = self.bound
        for name, number in numbers.items():
            _check_finite(name, number)

    def parameters(self, decay: WeightDecay | None) -> tuple[float, ...]:
        """Return the numbers in the order of the functor (csrc/optim/rowwise_adagrad.h).

        These are halflife, code and rate of the decay, start, bound, code of the tail, threshold,
        whether it is relative, and the largest count plus 1, which is 1 at first.
        """
        tail_code = float(_TAILS.index(self.tail)) if self.tail in _TAILS else -1.0
        decay_rate = 0.0 if decay is None else float(decay.rate)
        decay_code = float(_DECAYS.index(None if decay is None else type(decay)))
        numbers = (self.halflife, decay_code, decay_rate, float(self.start), self.bound, tail_code)
        if isinstance(self.threshold, RelativeThreshold):
            return (*numbers, self.threshold.fraction_of_largest, 1.0, 1.0)
        return (*numbers, self.threshold, 0.0, 1.0)

    def with_parameters(self, numbers: Sequence[float]) -> "Counter":
        """Return this counter with the numbers that `parameters` returned."""
        halflife, _, _, start, bound, tail, threshold, is_relative, _ = numbers
        return replace(
            self,
            halflife=halflife,
            start=int(start),
            bound=bound,
            tail=TailRate.EQUAL if tail < 0 else _TAILS[int(tail)],
            threshold=RelativeThreshold(threshold) if is_relative else threshold,
        )


@dataclass(frozen=True)
class CowClip:
    """Clip the norm of a row's gradient by its count (Zheng et al., "CowClip", 2022).

    The norm is at most `count * max(coefficient * norm of the row, lower_bound)`. With the defaults
    of both, 0, gradients are clipped to zero.

    Args:
        halflife: steps after which an occurrence counts half, as in `Counter`.
        coefficient: factor of the norm of the row in the bound, >= 0.
        lower_bound: minimum of the bound per occurrence, >= 0.

    Raises:
        ValueError: a number is not finite, or `coefficient` or `lower_bound` is negative.

    Example:
        >>> clip = emblib.optim.CowClip(coefficient=1.0, lower_bound=1e-4)
        >>> [state.name for state in emblib.optim.RowwiseAdagrad(0.1, counter=clip).states]
        ['sum', 'prev_iter', 'row_counter']
    """

    halflife: float = -1.0
    coefficient: float = 0.0
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        _check_finite("halflife", self.halflife)
        check_number("coefficient", self.coefficient)
        check_number("lower_bound", self.lower_bound)


@dataclass(frozen=True)
class GlobalDecay:
    """Decoupled decay of all rows at every step, applied when a row is seen again.

    Args:
        rate: rate of the decay.
        start: first step at which a row is decayed for the steps it missed; before it, a row decays
            only at the steps that update it.
        lower_bound: the minimum of the combined factor of missed steps, in [0, 1].

    Raises:
        ValueError: a number is not finite, `rate` is negative, or `lower_bound` is outside [0, 1].

    Example:
        >>> decay = emblib.optim.GlobalDecay(rate=1e-3)
        >>> [state.name for state in emblib.optim.RowwiseAdagrad(0.1, global_decay=decay).states]
        ['sum', 'prev_iter']
    """

    rate: float
    start: int = 0
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        check_number("rate", self.rate)
        _check_finite("start", self.start)
        check_number("lower_bound", self.lower_bound)
        if self.lower_bound > 1.0:
            raise ValueError(f"lower_bound is a factor <= 1, got {self.lower_bound}")

    def scale(self, prev_iter: Tensor, step: Tensor | int, lr: Tensor | float) -> Tensor:
        """Return the decay factors of rows that were last updated at step `prev_iter`, `[n]`.

        A factor is `max(lower_bound, (1 - lr * rate) ** (step - previous - 1))`, with `previous`
        decoded from `prev_iter` (`decode_steps`). It is 1 for rows not updated since `start` and
        for steps before it, and has the dtype of `prev_iter`. `step` is that of the coming update.
        Steps after `LAST_STEP`, which `prev_iter` cannot encode, are not counted as missed, nor are
        they in the update. The host does not wait for the device.
        """
        current_step = torch.as_tensor(step, dtype=torch.float64, device=prev_iter.device)
        rate = torch.as_tensor(lr, dtype=torch.float64, device=prev_iter.device) * self.rate
        previous = decode_steps(prev_iter)
        num_missed_steps = current_step.clamp(max=LAST_STEP) - previous - 1
        factor = ((1 - rate).clamp(min=0) ** num_missed_steps.clamp(min=0)).clamp(
            min=self.lower_bound
        )
        is_decayed = (previous > 0) & (num_missed_steps > 0) & (current_step >= self.start)
        return torch.where(is_decayed, factor, 1.0).to(prev_iter.dtype)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """`s += g*g; w -= lr * g / (sqrt(s) + eps)`, element by element (Duchi et al., 2011).

    Args:
        eps: constant that is added to the root; by default FBGEMM's, `torch.optim` has 1e-10.

    Example:
        >>> optimizer = emblib.optim.Adagrad(lr=0.5)
        >>> bags = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(4, 2)], optimizer)
        >>> weight = bags.table_weights()[0].fill_(1)
        >>> (7 * bags(torch.tensor([2]), torch.tensor([0, 1])).sum()).backward()  # sqrt(s) = 7
        >>> weight[2]
        tensor([0.5000, 0.5000])
    """

    eps: float = 1e-8

    functor: ClassVar[str] = "adagrad"
    base_states: ClassVar[tuple[State, ...]] = (State("sum"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps)

    def parameters(self) -> tuple[float, ...]:
        """Return `(eps,)`."""
        return (self.eps,)

    def _unpack_fields(self, numbers: tuple[float, ...]) -> dict[str, Any]:
        return {"eps": numbers[0]}


@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """`s += mean(g*g); w -= lr * g / (sqrt(s) + eps)`, one `s` per row (FBGEMM's default).

    Args:
        eps: constant that is added to the root.
        counter: a `Counter` or `CowClip`, with which updates depend on the count of a row; or None.
        max_norm: maximum norm to which rows are scaled after their step; 0 does not scale.
        global_decay: decay of all rows at every step, or None; with it `weight_decay` and `counter`
            must be None, and `deferred` False.

    Raises:
        TypeError: `counter` or `global_decay` has another type.
        ValueError: a number or combination is not allowed, such as `AdagradW` without a `Counter`.

    Example:
        >>> optimizer = emblib.optim.RowwiseAdagrad(0.1, max_norm=1.0)
        >>> bags = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(1_000, 64)], optimizer)
        >>> bags.nbytes()["weights"] // bags.nbytes()["optimizer_state"]  # one number per row
        64
    """

    eps: float = 1e-8
    counter: Counter | CowClip | None = None
    max_norm: float = 0.0
    global_decay: GlobalDecay | None = None

    functor: ClassVar[str] = "rowwise_adagrad"
    base_states: ClassVar[tuple[State, ...]] = (State("sum", per_row=True),)
    decays: ClassVar[tuple[type, ...]] = (L2, Decoupled, AdagradW)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps)
        check_number("max_norm", self.max_norm)
        for name, kinds in (("counter", (Counter, CowClip)), ("global_decay", (GlobalDecay,))):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                choices = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
                raise TypeError(f"{name} must be None or {choices}, got {value!r}")
        if isinstance(self.weight_decay, AdagradW) and not isinstance(self.counter, Counter):
            raise ValueError(
                "weight_decay AdagradW counts how often rows are seen: give counter=Counter() too, "
                "or take Decoupled(rate)"
            )
        if self.global_decay is not None and self.deferred:
            raise ValueError(
                "global_decay decays rows as lookups read them, for the step that their backward "
                "makes: leave deferred out, or choose another weight decay"
            )
        if self.global_decay is not None and (self.weight_decay or self.counter):
            raise ValueError(
                "global_decay is the weight decay: weight_decay and counter must be None, got "
                f"{self.weight_decay!r} and {self.counter!r}"
            )

    def _unpack_fields(self, numbers: tuple[float, ...]) -> dict[str, Any]:
        if self.name == "rowwise_adagrad":
            return {"eps": numbers[0]}
        fields: dict[str, Any] = {"eps": numbers[0], "max_norm": numbers[1]}
        variant_numbers = numbers[2:]
        if isinstance(self.counter, Counter):
            fields["counter"] = self.counter.with_parameters(variant_numbers)
            decay_class = _DECAYS[int(variant_numbers[1])]
            fields["weight_decay"] = (
                None if decay_class is None else decay_class(variant_numbers[2])
            )
        elif isinstance(self.counter, CowClip):
            fields["counter"] = CowClip(*variant_numbers)
        elif self.global_decay is not None:
            fields["global_decay"] = GlobalDecay(
                variant_numbers[0], int(variant_numbers[2]), variant_numbers[1]
            )
        return fields

    @property
    def name(self) -> str:
        """Return the name of the plain functor or of the requested variant."""
        if isinstance(self.counter, Counter):
            return "rowwise_adagrad_counter"
        if isinstance(self.counter, CowClip):
            return "rowwise_adagrad_cowclip"
        if self.global_decay is not None:
            return "rowwise_adagrad_global_decay"
        return "rowwise_adagrad_max_norm" if self.max_norm > 0 else "rowwise_adagrad"

    @property
    def states(self) -> tuple[State, ...]:
        """Return `sum`, then `prev_iter` with a global decay or counter, then `row_counter`."""
        previous, count = State("prev_iter", per_row=True), State("row_counter", per_row=True)
        if self.counter is not None:
            return (*self.base_states, previous, count)
        return self.base_states if self.global_decay is None else (*self.base_states, previous)

    def parameters(self) -> tuple[float, ...]:
        """Return `(eps,)`, and for a variant max_norm and the numbers of the variant."""
        if self.name == "rowwise_adagrad":
            return (self.eps,)
        common = (self.eps, self.max_norm)
        if isinstance(self.counter, Counter):
            return (*common, *self.counter.parameters(self.weight_decay))
        if self.counter is not None:
            cow_clip = self.counter
            return (*common, cow_clip.halflife, cow_clip.coefficient, cow_clip.lower_bound)
        if self.global_decay is not None:
            decay = self.global_decay
            return (*common, decay.rate, decay.lower_bound, float(decay.start))
        return common

    def _kernel_decay_rates(self) -> tuple[float, float]:
        return (0.0, 0.0) if isinstance(self.counter, Counter) else super()._kernel_decay_rates()


class EmaReset(OptionEnum):
    """Treatment of the moving average after a step that updated it: KEEP it, or CLEAR it to zero.

    With CLEAR, a step that replaces the weights without updating the average writes zeros.

    Example:
        >>> optimizer = emblib.optim.EnsembleRowwiseAdagrad(0.1, slow=emblib.optim.EmaReset.CLEAR)
        >>> optimizer.slow
        <EmaReset.CLEAR: 'clear'>
    """

    KEEP = "keep"
    CLEAR = "clear"


@dataclass(frozen=True)
class EnsembleRowwiseAdagrad(Optimizer):
    """Row-wise Adagrad with a moving average of the weights that periodically replaces them.

    Args:
        eps: constant that is added to the root.
        average_every: steps between updates of the average.
        swap_every: steps between replacements of the weights by the average, which is zero before
            its first update.
        start: last step at which an update copies the weights, instead of averaging.
        keep: weight of the old average in an update, in [0, 1].
        slow: treatment of the average after a step that updated it, see `EmaReset`.

    Raises:
        TypeError: `average_every` or `swap_every` is not an int.
        ValueError: a number is out of range or not finite, or `slow` is unknown.

    Example:
        >>> optimizer = emblib.optim.EnsembleRowwiseAdagrad(0.1, swap_every=1_000)
        >>> [state.name for state in optimizer.states]
        ['sparse_ema', 'sum']
    """

    eps: float = 1e-8
    average_every: int = 10000
    swap_every: int = 10000
    start: int = 0
    keep: float = 0.6
    slow: EmaReset = EmaReset.KEEP

    functor: ClassVar[str] = "ensemble_rowwise_adagrad"
    base_states: ClassVar[tuple[State, ...]] = (State("sparse_ema"), State("sum", per_row=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps)
        object.__setattr__(self, "slow", EmaReset(self.slow))
        for name in ("average_every", "swap_every"):
            check_count(name, getattr(self, name))
        _check_finite("start", self.start)
        _check_finite("keep", self.keep)
        if not 0.0 <= self.keep <= 1.0:
            raise ValueError(f"keep must be in [0, 1], got {self.keep}")

    def parameters(self) -> tuple[float, ...]:
        """Return `(eps,)`."""
        return (self.eps,)

    def _unpack_fields(self, numbers: tuple[float, ...]) -> dict[str, Any]:
        return {"eps": numbers[0]}


@without_gradients
def ensemble_(
    optimizer: EnsembleRowwiseAdagrad,
    step: int,
    weights: Sequence[Tensor],
    slow: Sequence[Tensor],
) -> None:
    """Update the averages, replace weights by them, or both, at forward number `step` (from 1).

    An average is updated before it replaces weights. `weights` are views of the tables, `slow` of
    their states `sparse_ema`: `[rows, dim]` each, in the same order. Both are written in place.
    """
    is_averaged, is_swapped = step % optimizer.average_every == 0, step % optimizer.swap_every == 0
    if not (is_averaged or is_swapped):
        return
    keep = 0.0 if step <= optimizer.start else optimizer.keep
    for weight, ema in zip(weights, slow, strict=True):
        if is_averaged:
            ema.lerp_(weight.to(ema), 1.0 - keep)
        if is_swapped:
            weight.copy_(ema)
        if is_averaged and optimizer.slow is EmaReset.CLEAR:
            ema.zero_()


def count_largest_(
    optimizer: RowwiseAdagrad, step: int, hyper: Tensor, counters: Sequence[Tensor]
) -> None:
    """Write the largest row count plus 1 to `hyper` if `step` is a multiple of `update_every`.

    `hyper` are the hyperparameters, float64, see `emblib.columns.Hyper`; `counters` are the states
    `row_counter`, `[rows]` each. Without a `Counter` this does nothing.
    """
    counter = optimizer.counter
    if not isinstance(counter, Counter) or counter.update_every <= 0:
        return
    if step % counter.update_every == 0:
        largest_counts = [count.max() for count in counters if count.numel() > 0]
        hyper_index = Hyper.OPTIMIZER_ARGS + len(optimizer.parameters()) - 1
        hyper[hyper_index] = 1.0 + (
            torch.stack([count.to(hyper) for count in largest_counts]).max()
            if largest_counts
            else 0.0
        )
