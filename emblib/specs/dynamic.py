"""Description of dynamic tables: capacity, eviction, insertion and admission of keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import Tensor

from emblib.init import Initializer, Uniform, check_finite, check_initializer
from emblib.specs.checks import (
    OptionEnum,
    check_count,
    check_table_name,
    normalise_counts,
    normalise_dim,
)

SLOTS_PER_BUCKET = 32
"""Number of slots of a bucket; capacities are rounded up to a multiple of it."""


class Eviction(OptionEnum):
    """Value by which keys are evicted: the key with the lowest value is evicted first.

    A key may be in either of two buckets of 32 slots. A new key evicts another one only if both of
    its buckets are full: the key with the lowest value in them.

    ========  =================================================================
    LRU       training batch of the last use
    LFU       number of uses
    LRU_LFU   number of uses, then training batch of the last use
    STEP      step of the last use, which the module counts per table
    CUSTOM    score that you set for the last use, then its training batch
    NONE      none: no key is evicted, and new keys of full buckets are refused
    ========  =================================================================

    Of keys with equal values the smallest key is evicted first. Keys of the current batch are never
    evicted.

    Example:
        >>> spec = emblib.DynamicSpec(capacity=32, dim=4, eviction=emblib.Eviction.LFU)
        >>> table = emblib.HashTable(spec)
        >>> often = torch.arange(16)
        >>> for keys in (often, often, often + 16, often + 32):  # 48 keys for 32 slots
        ...     _ = table.find_or_insert(keys)
        >>> bool(table.contains(often).all()), bool(table.contains(often + 16).any())
        (True, False)
    """

    LRU = "lru"
    LFU = "lfu"
    LRU_LFU = "lru_lfu"
    STEP = "step"
    CUSTOM = "custom"
    NONE = "none"

    @property
    def order(self) -> str:
        """Return the name of the order by which the index ranks its entries (`emblib.ops.hash`)."""
        return "assigned" if self in (Eviction.STEP, Eviction.CUSTOM) else self.value


class InsertPolicy(OptionEnum):
    """Condition for evicting the lowest-ranked key: always, or if the new key ranks above it.

    Example:
        >>> for policy in emblib.InsertPolicy:
        ...     spec = emblib.DynamicSpec(32, 4, eviction=emblib.Eviction.LFU, insert_policy=policy)
        ...     table = emblib.HashTable(spec)
        ...     _ = table.find_or_insert(torch.arange(32), scores=2)  # full, with 2 uses each
        ...     _ = table.find_or_insert(torch.tensor([99]))  # 1 use
        ...     print(policy.name, bool(table.contains(torch.tensor([99]))))
        ALWAYS_EVICT True
        EVICT_IF_LOWER False
    """

    ALWAYS_EVICT = "wins"  # the new key replaces the lowest-ranked key
    EVICT_IF_LOWER = "competes"  # a new key that ranks below the lowest-ranked key is refused


class OnInsertFailure(OptionEnum):
    """Reaction of a training forward to keys of its batch that found no slot.

    In every mode such a key reads `DynamicSpec.default_value` and is not trained, unless there are
    `fallback_rows`, and is counted in `stats()`. WARN warns and RAISE raises at the end of that
    forward; on CUDA both wait for the device.

    Example:
        >>> spec = emblib.DynamicSpec(
        ...     32, 4, eviction=emblib.Eviction.NONE, on_insert_failure=emblib.OnInsertFailure.RAISE
        ... )
        >>> bags = emblib.DynamicEmbeddingBags([spec])
        >>> pooled = bags(torch.arange(32), torch.tensor([0, 32]))  # the table is full
        >>> bags(torch.tensor([99]), torch.tensor([0, 1]))
        Traceback (most recent call last):
            ...
        RuntimeError: emblib: 1 keys found no slot in table 'table_0' of capacity 32...
    """

    IGNORE = "ignore"
    WARN = "warning"
    RAISE = "error"


@dataclass(frozen=True)
class ExactCounter:
    """Count the uses of up to `capacity` keys.

    `capacity` must be an int (else TypeError) of at least 1 (else ValueError), and is rounded up to
    a multiple of 32. In a full counter a new key evicts the key that was used least recently, and
    that key's count is lost. So give it room for the keys without a row that come between the first
    use of a key and the one that reaches the threshold.

    Example:
        >>> admission = emblib.FrequencyAdmission(threshold=3, counter=emblib.ExactCounter(100))
        >>> admission.counter
        ExactCounter(capacity=100)
    """

    capacity: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "capacity", check_count("capacity", self.capacity))


@dataclass(frozen=True)
class CountMinSketch:
    """Count the uses of keys in a count-min sketch; counts may be too high.

    The sketch has `depth` rows with `width` counters each. Each counter is halved once per
    `halve_every` batches, so that old counts fade; None never halves them. All numbers must be ints
    (else TypeError) of at least 1, `width` must be below 2^31 and `width * depth` below 2^60 (else
    ValueError).

    Example:
        >>> counter = emblib.CountMinSketch(width=1 << 16, depth=4, halve_every=1_000)
        >>> emblib.FrequencyAdmission(threshold=3, counter=counter).counter
        CountMinSketch(width=65536, depth=4, halve_every=1000)
    """

    width: int
    depth: int = 4
    halve_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("width", "depth"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if self.width >= 2**31:
            raise ValueError(f"width of CountMinSketch must be below 2^31, got {self.width}")
        if self.width * self.depth >= 2**60:
            raise ValueError(
                "a CountMinSketch must have fewer than 2^60 counters, got depth * width = "
                f"{self.depth} * {self.width}"
            )
        if self.halve_every is not None:
            object.__setattr__(self, "halve_every", check_count("halve_every", self.halve_every))


@dataclass(frozen=True, init=False)
class PerFeature:
    """Give one value to each feature that reads a table, in the order of the features.

    `FrequencyAdmission.threshold` and `DynamicSpec.ttl` take it for tables that features share. A
    module with features raises ValueError if a table has another number of values than features.

    Args:
        values: the values, at least one. The ttl of a feature may be None: a key that this feature
            has used does not expire.

    Raises:
        ValueError: there are no values.

    Example:
        >>> spec = emblib.DynamicSpec(100, 4, ttl=emblib.PerFeature(1, 100))
        >>> bags = emblib.DynamicEmbeddingBags([spec], feature_tables=[0, 0])
        >>> for ids in ([7, 8], [9, 9], [9, 9], [9, 9]):  # 7 and 8 are ids of one feature each
        ...     pooled = bags(torch.tensor(ids), torch.tensor([0, 1, 2]))
        >>> bags.find(0, torch.tensor([7, 8])) >= 0
        tensor([False,  True])
    """

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        if not values:
            raise ValueError("PerFeature needs a value per feature, got none")
        object.__setattr__(self, "values", values)

    def __repr__(self) -> str:
        return f"PerFeature({', '.join(map(repr, self.values))})"


@dataclass(frozen=True)
class FrequencyAdmission:
    """Admit a key once it was used `threshold` times, the current batch included.

    Args:
        threshold: number of uses; repeated uses in one batch count. With a `PerFeature`, the lowest
            threshold of the features that use the key in the batch applies.
        counter: counter of the uses of keys without a row.
        reads: initializer of the values that keys without a row read in training; these values are
            not trained. With None such keys read `DynamicSpec.default_value`.
        rule: function that replaces the comparison with the threshold. From keys and their counts,
            int64 `[n]` on the device of the tables, it returns which keys to admit, bool `[n]`. Its
            result must depend on nothing else. If it raises, it is called once more, and the
            forward raises its exception. With a rule the host waits for the GPU. None compares
            counts with the threshold.

    Raises:
        TypeError: an argument has another type.
        ValueError: a threshold is below 1, or `rule` is set together with thresholds per feature.

    Example:
        >>> admission = emblib.FrequencyAdmission(threshold=2, counter=emblib.ExactCounter(100))
        >>> bags = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(100, 4, admission=admission)])
        >>> for _ in range(2):  # the second use of key 7 admits it
        ...     pooled = bags(torch.tensor([7]), torch.tensor([0, 1]))
        ...     print(emblib.KeyStatus(int(bags.key_status()[0])).name)
        NOT_ADMITTED
        NEW
    """

    threshold: int | PerFeature
    counter: ExactCounter | CountMinSketch
    reads: Initializer | None = None
    rule: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.threshold, PerFeature):
            counts = [check_count("threshold", value) for value in self.threshold.values]
            object.__setattr__(self, "threshold", PerFeature(*counts))
        else:
            object.__setattr__(self, "threshold", check_count("threshold", self.threshold))
        if self.rule is not None and not callable(self.rule):
            raise TypeError(f"rule must be a function of keys and counts, got {self.rule!r}")
        if self.rule is not None and isinstance(self.threshold, PerFeature):
            raise ValueError(
                "rule replaces the thresholds, so those per feature have no effect: leave one out"
            )
        if not isinstance(self.counter, ExactCounter | CountMinSketch):
            raise TypeError(
                "counter must be an ExactCounter(capacity) or a CountMinSketch(width), got "
                f"{self.counter!r}"
            )
        if self.reads is not None:
            check_initializer("reads", self.reads)

    @property
    def max_threshold(self) -> int:
        """Return the threshold, or the largest one of the features."""
        if isinstance(self.threshold, PerFeature):
            return int(max(self.threshold.values))
        return self.threshold


def check_ttl(ttl: Any) -> Any:
    """Check a time to live and return it: a positive int (steps) or timedelta, None, or PerFeature.

    Raises TypeError for another type, ValueError if it is not positive or mixes steps with time.
    """
    if isinstance(ttl, PerFeature):
        ttls = [check_ttl(value) for value in ttl.values]
        if any(isinstance(value, PerFeature) for value in ttls):
            raise TypeError(f"ttl must have one value per feature, got {ttl}")
        if len({type(value) for value in ttls if value is not None}) > 1:
            raise ValueError(f"ttl of all features must be in steps, or of all in time, got {ttl}")
        return PerFeature(*ttls)
    if isinstance(ttl, timedelta):
        if ttl <= timedelta(0):
            raise ValueError(f"ttl must be a positive time, got {ttl}")
        return ttl
    try:
        return None if ttl is None else check_count("ttl", ttl)
    except TypeError:
        raise TypeError(f"ttl must be None, an int (steps) or a timedelta, got {ttl!r}") from None


@dataclass(frozen=True)
class DynamicSpec:
    """Describe a table of rows of length `dim`, keyed by arbitrary 64-bit ids.

    Args:
        capacity: maximum number of rows; rounded up to a multiple of 32, as `initial_capacity` is.
        dim: elements per row.
        name: name of the table in checkpoints, without dots; "" names it by its position. The
            initial values of rows depend on it.
        initial_capacity: rows to start with; the table grows up to `capacity` as keys are inserted.
            None starts with `capacity`.
        max_load: load, in keys per row in use, above which a table begins to double its rows, in
            steps, while its keys grow by another quarter (the last time to `capacity`, less than
            four times the rows); so the load falls before it rises again. The default 0.8 is the
            highest load at which tests of all sizes found a slot for every key; above it some keys
            are evicted early.
        eviction: order in which keys are evicted when both buckets of a new key are full.
        insert_policy: condition for a new key to evict the lowest-ranked key, see `InsertPolicy`.
        initializer: first values of a row, a function of seed, table, key and element.
        initial_state: first value of the optimizer states of a row, >= 0.
        default_value: value of all elements that a key without a row reads. In training these are
            keys that were not inserted, in lookups without gradients keys not in the table.
        admission: requirement for a key to be inserted; None inserts all keys.
        ttl: time without use after which a key expires. An int counts training forwards of the
            module, a `datetime.timedelta` is wall-clock time; with None keys do not expire. With a
            `PerFeature` each feature has its own ttl: a key expires when the ttls of all features
            that have used it are over.
        on_insert_failure: reaction of a training forward to keys that found no slot.
        fallback_rows: number of additional rows that keys without a row share. A hash of the key
            selects the row that it reads and, in training, updates. With 0, such keys read
            `default_value`.

    Raises:
        TypeError: `capacity`, `dim`, `initial_capacity`, `fallback_rows` or a step of `ttl` is not
            an int; or `initializer` or `admission` has another type.
        ValueError: a number is out of range or not finite, `name` is not a string or has
            dots, or an option is unknown; or `fallback_rows` is set together with a `default_value`
            other than 0 or with `FrequencyAdmission.reads`, which would have no effect.

    Example:
        >>> spec = emblib.DynamicSpec(capacity=1_000, dim=16, name="item", initial_capacity=64)
        >>> bags = emblib.DynamicEmbeddingBags([spec], emblib.optim.Adagrad(0.1))
        >>> pooled = bags(torch.arange(500), torch.tensor([0, 500]))
        >>> bags.size(0), bags.capacity(0)  # 64 rows at first; grown, by 32 at a time
        (500, 992)
    """

    capacity: int
    dim: int
    name: str = field(default="", kw_only=True)
    initial_capacity: int | None = field(default=None, kw_only=True)
    max_load: float = field(default=0.8, kw_only=True)
    eviction: Eviction = field(default=Eviction.LRU, kw_only=True)
    insert_policy: InsertPolicy = field(default=InsertPolicy.ALWAYS_EVICT, kw_only=True)
    initializer: Initializer = field(default=Uniform(), kw_only=True)
    initial_state: float = field(default=0.0, kw_only=True)
    default_value: float = field(default=0.0, kw_only=True)
    admission: FrequencyAdmission | None = field(default=None, kw_only=True)
    ttl: int | timedelta | PerFeature | None = field(default=None, kw_only=True)
    on_insert_failure: OnInsertFailure = field(default=OnInsertFailure.IGNORE, kw_only=True)
    fallback_rows: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        normalise_counts(self, "capacity")
        normalise_dim(self)
        if self.initial_capacity is not None:
            count = check_count("initial_capacity", self.initial_capacity)
            object.__setattr__(self, "initial_capacity", count)
        object.__setattr__(self, "ttl", check_ttl(self.ttl))
        if self.initial_capacity is not None and self.initial_capacity > self.capacity:
            raise ValueError(
                f"initial_capacity must be at most capacity = {self.capacity}, got "
                f"{self.initial_capacity}"
            )
        check_table_name(self.name)
        object.__setattr__(self, "eviction", Eviction(self.eviction))
        object.__setattr__(self, "insert_policy", InsertPolicy(self.insert_policy))
        policy = OnInsertFailure(self.on_insert_failure)
        object.__setattr__(self, "on_insert_failure", policy)
        check_finite(self, "max_load", "initial_state", "default_value")
        if self.initial_state < 0.0:
            raise ValueError(
                f"initial_state must be >= 0, got {self.initial_state}: optimizers take the root "
                "of a state"
            )
        if not 0.0 < self.max_load <= 1.0:
            raise ValueError(f"max_load must be in (0, 1], got {self.max_load}")
        check_initializer("initializer", self.initializer)
        if self.admission is not None and not isinstance(self.admission, FrequencyAdmission):
            raise TypeError(
                "admission must be None or a FrequencyAdmission(threshold, counter), got "
                f"{self.admission!r}"
            )
        self._check_fallback_rows()

    def _check_fallback_rows(self) -> None:
        rows = check_count("fallback_rows", self.fallback_rows, minimum=0)
        object.__setattr__(self, "fallback_rows", rows)
        if rows >= 1 << 31:
            raise ValueError(f"fallback_rows must be below 2^31, got {rows}")
        has_unadmitted_values = self.admission is not None and self.admission.reads is not None
        if rows and (has_unadmitted_values or self.default_value != 0.0):
            raise ValueError(
                "keys without a row read one of fallback_rows, so default_value and "
                "FrequencyAdmission(reads=...) have no effect: leave them or fallback_rows out"
            )

    @property
    def lifetimes(self) -> tuple[int | timedelta | None, ...]:
        """Return the distinct times to live of the features, ascending; None, no expiry, is last.

        Without a `PerFeature` there is one.
        """
        if not isinstance(self.ttl, PerFeature):
            return (self.ttl,)
        finite = {value for value in self.ttl.values if value is not None}
        return (*sorted(finite), *((None,) if None in self.ttl.values else ()))

    @property
    def is_timed(self) -> bool:
        """Return whether keys expire by the clock."""
        return isinstance(self.lifetimes[0], timedelta)

    @property
    def max_buckets(self) -> int:
        """Return the number of buckets at full capacity."""
        return -(-self.capacity // SLOTS_PER_BUCKET)

    @property
    def rows(self) -> int:
        """Return the maximum number of rows: `capacity`, rounded up to a multiple of 32."""
        return self.max_buckets * SLOTS_PER_BUCKET

    @property
    def buckets(self) -> int:
        """Return the number of buckets at the start, before the table grows up to `max_buckets`."""
        capacity = self.capacity if self.initial_capacity is None else self.initial_capacity
        return -(-capacity // SLOTS_PER_BUCKET)

    @property
    def max_load_1024ths(self) -> int:
        """Return `max_load` in 1024ths, as the index stores it."""
        return max(1, round(self.max_load * 1024))
