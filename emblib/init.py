"""Initializers: the first values of the rows of tables.

In a dynamic table an initial element is a function of the seed, the table, the key and the
position. So a row starts with the same values on every device and rank, also when its key returns
after an eviction. `ByRows` is for the other tables of a collection.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, SupportsFloat

# Minimum probability of the interval of a TruncatedNormal, because values far in a tail are drawn
# inexactly; not measured.
_MIN_PROBABILITY = 1e-3


@dataclass(frozen=True)
class Uniform:
    """Draw uniformly from [low, high); the default is +-1/sqrt(capacity).

    Rounding to the dtype of the table may give a value just outside the interval.

    Raises:
        ValueError: only one of the bounds is set, or they are not finite with low < high.

    Example:
        >>> emblib.init.Uniform(-0.1, 0.1)
        Uniform(low=-0.1, high=0.1)
    """

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(
                f"low and high of Uniform must be given together, got {self.low!r} and "
                f"{self.high!r}; leave both out for +-1/sqrt(capacity)"
            )
        if self.low is not None and self.high is not None:
            _check_interval(self, self.low, self.high)


@dataclass(frozen=True)
class Normal:
    """Draw from the normal distribution with this mean and standard deviation.

    Raises:
        ValueError: a number is not finite, or `std` is negative.

    Example:
        >>> emblib.DynamicSpec(1_000, 16, initializer=emblib.init.Normal(std=0.01)).initializer
        Normal(mean=0.0, std=0.01)
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        check_finite(self, "mean", "std")
        if self.std < 0:
            raise ValueError(f"std of Normal must be >= 0, got {self.std}")


@dataclass(frozen=True)
class TruncatedNormal:
    """Draw from the normal distribution truncated to [low, high], then round to the table's dtype.

    The default interval is two standard deviations to either side of the mean.

    Raises:
        ValueError: a number is not finite, `std` is not positive, `low` is not below `high`, or
            less than a thousandth of the distribution is in the interval.

    Example:
        >>> emblib.init.TruncatedNormal(std=0.01, low=-0.02, high=0.02)
        TruncatedNormal(mean=0.0, std=0.01, low=-0.02, high=0.02)
    """

    mean: float = 0.0
    std: float = 1.0
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        check_finite(self, "mean", "std")
        if self.std <= 0:
            raise ValueError(f"std of TruncatedNormal must be > 0, got {self.std}")
        _check_interval(self, *self.bounds)
        below_low, below_high = self.probabilities
        probability = below_high - below_low
        if probability < _MIN_PROBABILITY:
            raise ValueError(
                f"low and high of TruncatedNormal must hold at least {_MIN_PROBABILITY} of the "
                f"distribution, got {probability:.3g} in {self.bounds}; use Uniform for a far tail"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """Return `low` and `high`, or their defaults."""
        return (
            self.mean - 2.0 * self.std if self.low is None else self.low,
            self.mean + 2.0 * self.std if self.high is None else self.high,
        )

    @property
    def probabilities(self) -> tuple[float, float]:
        """Return the probabilities of the normal distribution below `low` and below `high`."""
        low, high = (
            0.5 * math.erfc((self.mean - bound) / (self.std * math.sqrt(2.0)))
            for bound in self.bounds
        )
        return low, high


@dataclass(frozen=True)
class Constant:
    """Set every element to one number.

    Raises:
        ValueError: the number is not finite.

    Example:
        >>> spec = emblib.DynamicSpec(100, 4, initializer=emblib.init.Constant(0.5))
        >>> table = emblib.HashTable(spec)
        >>> table.find_or_insert(torch.tensor([7]))[0]
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        check_finite(self, "value")


@dataclass(frozen=True)
class KeyModulo:
    """Set every element to the unsigned key modulo 100000, so that tests see which row was read.

    Example:
        >>> spec = emblib.DynamicSpec(100, 2, initializer=emblib.init.KeyModulo())
        >>> table = emblib.HashTable(spec)
        >>> table.find_or_insert(torch.tensor([7, 100_007]))[0]
        tensor([[7., 7.],
                [7., 7.]])
    """


Initializer = Uniform | Normal | TruncatedNormal | Constant | KeyModulo


def check_initializer(name: str, value: Any) -> None:
    """Raise TypeError unless a value is an `Initializer`."""
    if not isinstance(value, Initializer):
        choices = ", ".join(cls.__name__ for cls in Initializer.__args__)
        raise TypeError(f"{name} must be an instance of one of {choices}, got {value!r}")


def check_finite(spec: Any, *names: str) -> None:
    """Convert fields of a frozen dataclass to float; raise ValueError unless they are finite."""
    for name in names:
        value = getattr(spec, name)
        if not _is_finite(value):
            class_name = type(spec).__name__
            raise ValueError(f"{name} of {class_name} must be a finite number, got {value!r}")
        object.__setattr__(spec, name, float(value))


def _is_finite(value: Any) -> bool:
    """Return whether a value is a number whose float is finite."""
    if not isinstance(value, SupportsFloat) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except (OverflowError, TypeError, ValueError, RuntimeError):  # too large, or several numbers
        return False


def _check_interval(spec: Any, low: float, high: float) -> None:
    """Raise ValueError unless low < high are finite; convert `spec.low` and `.high` to float."""
    if not (_is_finite(low) and _is_finite(high) and low < high):
        raise ValueError(
            f"low and high of {type(spec).__name__} must be finite and low < high, got {low} and "
            f"{high}; for one value use Constant"
        )
    for name in ("low", "high"):
        bound = getattr(spec, name)
        object.__setattr__(spec, name, None if bound is None else float(bound))


@dataclass(frozen=True)
class ByRows:
    """Fill a table block by block: an `init_fn` that never needs the whole table.

    A rank of a sharded table fills only the blocks of its own rows; with any other `init_fn` each
    rank fills the whole table. Before each block torch's generators are seeded by the table and the
    number of the block, so that values do not depend on the plan on one kind of device.

    Args:
        function: function of a tensor `[n, embedding_dim]` to fill and the range of its n rows in
            the table. It may be called in any order, and on several ranks for one block.

    Raises:
        TypeError: `function` cannot be called.

    Example:
        >>> pretrained = torch.arange(12.0).view(6, 2)  # in practice, a memory-mapped file
        >>> def copy_block(block, rows):
        ...     block.copy_(pretrained[rows.start : rows.stop])
        >>> config = emblib.EmbeddingBagConfig(6, 2, "item", init_fn=emblib.init.ByRows(copy_block))
        >>> emblib.EmbeddingBagCollection([config]).embedding_bags["item"].weight[4]
        tensor([8., 9.], grad_fn=<SelectBackward0>)
    """

    function: Callable[[Any, range], object]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                "function of ByRows must be a function of a block and a range of rows, got "
                f"{self.function!r}"
            )

    def __call__(self, weight: Any) -> None:
        """Fill a whole table `[rows, dim]` as one block; torch's generators are not seeded."""
        self.function(weight, range(weight.shape[0]))
