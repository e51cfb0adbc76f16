"""Frozen descriptions of tables, their options as enums, and checks of arguments.

First what all tables share, then tensor-train tables, then dynamic tables.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from emblib.init import Initializer, Uniform, check_finite, check_initializer
from emblib.tt import shapes

_LOG = logging.getLogger(__name__)

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Choice(Enum):
    """An enum of lower-case words; the error for an unknown value lists the valid ones."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        choices = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{cls.__name__} must be one of {choices}, got {value!r}")


class Pooling(Choice):
    """Operation that combines the rows of a bag into one vector; NONE returns one per lookup.

    `Pooling("MEAN")`, in capitals as in TorchRec, is accepted as well.

    Example:
        >>> ids, offsets = torch.tensor([1, 2, 2]), torch.tensor([0, 2, 3])  # bags (1, 2) and (2,)
        >>> for pooling in (emblib.Pooling.MEAN, emblib.Pooling.NONE):
        ...     bags = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(3, 4)], pooling=pooling)
        ...     print(bags(ids, offsets).shape)
        torch.Size([2, 4])
        torch.Size([3, 4])
    """

    SUM = "sum"
    MEAN = "mean"
    NONE = "none"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if isinstance(value, str) and value in cls.__members__:
            return cls[value]
        return super()._missing_(value)


class BoundsCheck(Choice):
    """Reaction to out-of-bounds indices and offsets: raise, warn, or ignore them.

    In every mode the kernels repair invalid input as they read it (index -1 is skipped, any other
    invalid index reads row 0, or zeros from a table without rows, offsets are clamped), so nothing
    is ever read outside a table. FATAL raises before anything is written, WARNING warns, IGNORE
    repairs silently. Inside `torch.compile`, WARNING counts in the module's `bounds_violations`
    instead.

    On CUDA no mode makes the host wait. WARNING counts on the device; one of the next 16 or so
    lookups warns of what was counted, and so does `emblib.report_bounds_violations(model)`. FATAL
    runs the same kernels and ends them as a failed device assert does: nothing after them runs, the
    next call that waits for the device raises, and the process cannot use CUDA any more.

    Offsets that do not begin with 0, or that lack the last entry, would skip ids or a bag: on the
    CPU, compiled or not, WARNING raises RuntimeError for them; on CUDA it counts such ids and
    offsets too. Ids of -1 before the first offset are padding, which may be skipped. NONE checks
    nothing: it equals IGNORE for offsets that never decrease, and is memory-safe but otherwise
    unspecified for others.

    Example:
        >>> tables, check = [emblib.TableSpec(rows=3, dim=4)], emblib.BoundsCheck
        >>> bags = emblib.TableBatchedEmbeddingBags(tables, bounds_check=check.IGNORE)
        >>> bag = torch.tensor([0, 1])
        >>> torch.equal(bags(torch.tensor([7]), bag), bags(torch.tensor([0]), bag))
        True
        >>> bags = emblib.TableBatchedEmbeddingBags(tables, bounds_check=check.FATAL)
        >>> bags(torch.tensor([7]), bag)
        Traceback (most recent call last):
            ...
        RuntimeError: ...indices of feature 0 must be in [0, 3), or -1 for a pruned one, got 7...
    """

    FATAL = "fatal"
    WARNING = "warning"
    IGNORE = "ignore"
    NONE = "none"


class Placement(Choice):
    """The memory in which the rows of a table are stored.

    ======================  ==========================  ============================
    placement               module on the CPU           module on a GPU
    ======================  ==========================  ============================
    DEVICE                  in its memory               in its memory
    HOST                    as DEVICE                   not there: use MANAGED
    MANAGED                 as DEVICE                   pinned host memory that the
                                                        kernels read in place, as
                                                        CUDA tensors
    MANAGED_CACHING         as MANAGED, behind a cache  as MANAGED, behind a cache
                            in memory                   in the memory of the GPU
    DISK                    a memory-mapped file,       not there: use
                            behind a cache in memory    MANAGED_CACHING
    ======================  ==========================  ============================

    Example:
        >>> placement = emblib.Placement.MANAGED_CACHING
        >>> table = emblib.TableSpec(rows=1_000, dim=16, placement=placement)
        >>> bags = emblib.TableBatchedEmbeddingBags([table], emblib.optim.SGD(0.1))
        >>> bags(torch.tensor([3, 14, 15]), torch.tensor([0, 2, 3])).shape
        torch.Size([2, 16])
        >>> placement.cached
        True
    """

    DEVICE = "device"
    HOST = "host"
    MANAGED = "managed"
    MANAGED_CACHING = "managed_caching"
    DISK = "disk"

    @property
    def cached(self) -> bool:
        """Return whether the table is behind a software cache."""
        return self in (Placement.MANAGED_CACHING, Placement.DISK)


@dataclass(frozen=True)
class TableSpec:
    """A dense table of `rows` vectors of length `dim`.

    Every index is out of bounds of a table without rows, such as the shard of a small table on some
    rank.

    Example:
        >>> emblib.TableSpec(rows=1_000, dim=16, name="item")
        TableSpec(rows=1000, dim=16, name='item', placement=<Placement.DEVICE: 'device'>)
    """

    rows: int
    dim: int
    name: str = ""
    placement: Placement = Placement.DEVICE

    def __post_init__(self) -> None:
        _set_counts(self, "rows", minimum=0)
        _set_counts(self, "dim")
        object.__setattr__(self, "placement", Placement(self.placement))
        if not isinstance(self.name, str) or "." in self.name:
            raise ValueError(f"name must be a string without dots, got {self.name!r}")


@dataclass(frozen=True)
class StochasticRounding:
    """Round values that are stored in 16 bits up or down at random, without bias.

    The random numbers come from a counter-based generator (Philox) and depend only on `seed`, step,
    row and column: they are the same on any number of threads, on any device, and with any cache.
    Rows are numbered over the module, ordered by placement.

    Example:
        >>> to_nearest = emblib.Precision(weights=torch.bfloat16)
        >>> on_average = emblib.Precision(
        ...     weights=torch.bfloat16, stochastic_rounding=emblib.StochasticRounding(seed=7)
        ... )
        >>> for precision in (to_nearest, on_average):  # 100 updates of +0.003 of a row of ones
        ...     table = emblib.TableBatchedEmbeddingBags(
        ...         [emblib.TableSpec(1, 64)], emblib.optim.SGD(0.003), precision=precision
        ...     )
        ...     _ = table.table_weights()[0].fill_(1)
        ...     for _ in range(100):
        ...         (-table(torch.tensor([0]), torch.tensor([0, 1])).sum()).backward()
        ...     print(f"{table.table_weights()[0].float().mean():.1f}")
        1.0
        1.3
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, SupportsIndex):
            raise TypeError(f"seed must be an int, got {self.seed!r}")
        if not 0 <= self.seed < 2**53:
            raise ValueError(f"seed must be in [0, 2^53), got {self.seed}")


class MatmulPrecision(Choice):
    """Minimum precision of matrix products on a GPU's tensor cores.

    FLOAT32 is as exact as float32 arithmetic: each product is computed as three TF32 products. TF32
    rounds operands to 11 significant bits and BF16 to 8, a relative error of up to 2^-11 and 2^-8
    per operand, for less work. Sums are float32 in any case. A device may be more exact: the CPU,
    and products that do not use tensor cores, compute in float32.

    Example:
        >>> precision = emblib.Precision(matmul=emblib.MatmulPrecision.TF32)
        >>> bag = emblib.TTEmbeddingBag(emblib.TTSpec(1_000, 16, ranks=(8, 8)), precision=precision)
        >>> bag(torch.tensor([[3, 14]])).shape
        torch.Size([1, 16])
    """

    FLOAT32 = "float32"
    TF32 = "tf32"
    BF16 = "bf16"


@dataclass(frozen=True)
class Precision:
    """The dtypes of a table: float32, float16 or bfloat16 each. Sums are float32 in any case.

    Args:
        weights: dtype of the stored rows, or of the cores of tensor trains.
        output: dtype of the output of `forward`.
        states: dtype of optimizer states that are as long as a row (of a core); states of one
            number per row are float32.
        stochastic_rounding: how updates of weights and states that are not float32 are rounded;
            None rounds to nearest, which drops updates below half a unit in the last place.
        matmul: precision of the products of tensor-train cores on a GPU; unused by other tables.

    Example:
        >>> precision = emblib.Precision(weights=torch.bfloat16, output=torch.bfloat16)
        >>> bags = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(10, 4)], precision=precision)
        >>> bags(torch.tensor([3]), torch.tensor([0, 1])).dtype
        torch.bfloat16
    """

    weights: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    states: torch.dtype = torch.float32
    stochastic_rounding: StochasticRounding | None = None
    matmul: MatmulPrecision = MatmulPrecision.FLOAT32

    def __post_init__(self) -> None:
        object.__setattr__(self, "matmul", MatmulPrecision(self.matmul))
        for name in ("weights", "output", "states"):
            check_float_dtype(f"Precision.{name}", getattr(self, name))
        rounding = self.stochastic_rounding
        if rounding is not None and not isinstance(rounding, StochasticRounding):
            raise TypeError(
                "Precision.stochastic_rounding must be None or a StochasticRounding(seed=...), "
                f"got {rounding!r}"
            )


class CachePolicy(Choice):
    """Row that a full set evicts: the least recently (LRU) or least frequently used (LFU).

    Among rows that were used equally often, LFU evicts the one that was used last.

    Example:
        >>> emblib.CacheConfig(emblib.CachePolicy.LFU, load_factor=0.1).policy
        <CachePolicy.LFU: 'lfu'>
    """

    LRU = "lru"
    LFU = "lfu"


class Verify(Choice):
    """Time at which the pages of tables in files are verified against their checksums.

    TOUCH verifies a page before its first use after opening, OPEN verifies all pages at opening,
    which reads the whole files. OFF accepts the files unchecked, damaged ones included; the next
    flush then writes new checksums.

    Example:
        >>> emblib.CacheConfig(directory="tables", verify=emblib.Verify.OPEN).verify
        <Verify.OPEN: 'open'>
    """

    TOUCH = "touch"
    OPEN = "open"
    OFF = "off"


@dataclass(frozen=True)
class MultiPassPrefetch:
    """Prefetch a large batch in several passes, which bounds the memory for grouping it.

    A batch of at least `min_lookups` lookups is prefetched in up to `passes` parts.

    Example:
        >>> passes = emblib.MultiPassPrefetch(passes=4, min_lookups=1 << 20)
        >>> emblib.CacheConfig(load_factor=0.1, passes=passes).passes
        MultiPassPrefetch(passes=4, min_lookups=1048576)
    """

    passes: int = 12
    min_lookups: int = 6_000_000

    def __post_init__(self) -> None:
        _set_counts(self, "passes", "min_lookups")


@dataclass(frozen=True)
class CacheConfig:
    """The cache of the MANAGED_CACHING and DISK tables of a module: 32-way set-associative.

    Args:
        policy: policy that selects the row to evict.
        load_factor: fraction of the rows of those tables that fits into the cache, in (0, 1].
        sets: number of sets of 32 rows; 0 follows from `load_factor`.
        reserved_bytes: bytes of GPU memory to leave free when the cache is allocated.
        dtype: dtype of the cached rows; None is the dtype of the weights.
        directory: directory of the DISK tables, one per module. It is created if it is missing;
            otherwise the tables in it are opened.
        passes: division of very large batches into several prefetches, or None.
        verify: time at which the files of DISK tables are verified against their checksums, see
            `Verify`.

    Example:
        >>> table = emblib.TableSpec(1_000, 16, placement=emblib.Placement.MANAGED_CACHING)
        >>> cache = emblib.CacheConfig(load_factor=0.2)  # up to 200 rows, in sets of 32
        >>> bags = emblib.TableBatchedEmbeddingBags([table], emblib.optim.SGD(0.1), cache=cache)
        >>> for _ in range(2):  # the second lookup finds its rows in the cache
        ...     pooled = bags(torch.tensor([3, 14]), torch.tensor([0, 2]))
        >>> bags.cache_stats().unique, bags.cache_stats().unique_misses
        (4, 2)
    """

    policy: CachePolicy = CachePolicy.LRU
    load_factor: float = 0.2
    sets: int = 0
    reserved_bytes: int = 0
    dtype: torch.dtype | None = None
    directory: str | Path | None = None
    passes: MultiPassPrefetch | None = None
    verify: Verify = Verify.TOUCH

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", CachePolicy(self.policy))
        object.__setattr__(self, "verify", Verify(self.verify))
        if not 0.0 < self.load_factor <= 1.0:
            raise ValueError(f"load_factor must be in (0, 1], got {self.load_factor}")
        for name in ("sets", "reserved_bytes"):
            object.__setattr__(self, name, check_count(name, getattr(self, name), minimum=0))
        if self.passes is not None and not isinstance(self.passes, MultiPassPrefetch):
            raise TypeError(
                f"passes must be None or a MultiPassPrefetch(passes=...), got {self.passes!r}"
            )
        if self.dtype is not None:
            check_float_dtype("CacheConfig.dtype", self.dtype)


class IdOrder(Choice):
    """Row of a tensor train that an id reads: its own, or that of a bijection."""

    AS_GIVEN = "as_given"
    PERMUTED = "permuted"


@dataclass(frozen=True)
class TTSpec:
    """A table of `rows` vectors of length `dim`, stored as 2 to 4 tensor-train cores.

    `ranks` are the inner ranks (one less than there are cores). `row_factors` must multiply to at
    least `rows` and `dim_factors` to exactly `dim`; by default `emblib.tt.shapes` chooses them.

    Ids near each other share core slices. With `ids="permuted"` a bijection, drawn from `seed`,
    maps ids to rows: better if ids are in random order or in order of frequency (see
    `emblib.tt.shapes`).

    Example:
        >>> spec = emblib.TTSpec(rows=1_000_000, dim=64, ranks=(16, 16))
        >>> spec.row_factors, spec.dim_factors
        ((100, 100, 100), (4, 4, 4))
        >>> spec.numel, spec.rows * spec.dim
        (115200, 64000000)
    """

    rows: int
    dim: int
    ranks: tuple[int, ...]
    row_factors: tuple[int, ...] = field(default=())
    dim_factors: tuple[int, ...] = field(default=())
    name: str = ""
    ids: IdOrder = IdOrder.AS_GIVEN
    seed: int = 0

    def __post_init__(self) -> None:
        _set_counts(self, "rows", "dim")
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "ids", IdOrder(self.ids))
        object.__setattr__(self, "seed", check_count("seed", self.seed, minimum=0))
        cores = len(self.ranks) + 1
        if not 2 <= cores <= 4:
            raise ValueError(f"ranks must have 1 to 3 entries (2 to 4 cores), got {self.ranks}")
        for rank in self.ranks:
            check_count("each rank", rank)
        rows = tuple(self.row_factors or ()) or shapes.row_factors(self.rows, cores)
        dims = tuple(self.dim_factors or ()) or shapes.dim_factors(self.dim, cores)
        object.__setattr__(self, "row_factors", rows)
        object.__setattr__(self, "dim_factors", dims)
        for name, factors in (("row_factors", rows), ("dim_factors", dims)):
            if len(factors) != cores:
                raise ValueError(
                    f"{name} must have one entry per core = {cores} (ranks has {cores - 1}), "
                    f"got {factors}"
                )
            for factor in factors:
                check_count(f"each of {name}", factor)
        if math.prod(rows) < self.rows:
            raise ValueError(f"row_factors {rows} multiply to {math.prod(rows)} < rows {self.rows}")
        if math.prod(dims) != self.dim:
            raise ValueError(f"dim_factors {dims} must multiply to dim {self.dim}")

    @property
    def full_ranks(self) -> tuple[int, ...]:
        """Return the ranks with the 1 at both ends: core k is `[p_k, R_k * q_k * R_{k+1}]`."""
        return (1, *self.ranks, 1)

    @property
    def permutation(self) -> tuple[int, int]:
        """Return multiplier and offset: id i has row `(multiplier * i + offset) % rows`."""
        if self.ids is IdOrder.AS_GIVEN:
            return shapes.AS_GIVEN
        return shapes.permutation(self.rows, self.seed)

    @property
    def numel(self) -> int:
        """Return the number of values of the cores."""
        full_ranks = self.full_ranks
        factors = zip(self.row_factors, self.dim_factors, full_ranks, full_ranks[1:], strict=False)
        return sum(p * left_rank * q * right_rank for p, q, left_rank, right_rank in factors)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the cores in float32; in 16 bits they are half."""
        return torch.float32.itemsize * self.numel

    def usable(self) -> TTSpec:
        """Return this table with ranks lowered to those that its cores can use."""
        max_ranks = shapes.most_ranks(self.row_factors, self.dim_factors)
        ranks = tuple(min(rank, top) for rank, top in zip(self.ranks, max_ranks, strict=True))
        if ranks == self.ranks:
            return self
        _LOG.info(
            "ranks %s of table %r are more than its cores can use, they are %s now",
            self.ranks,
            self.name,
            ranks,
        )
        return replace(self, ranks=ranks)

    @classmethod
    def for_bytes(
        cls,
        rows: int,
        dim: int,
        nbytes: int,
        *,
        cores: int = 3,
        like: TTSpec | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> TTSpec:
        """Return the table of the largest ranks whose cores take at most `nbytes` in `dtype`.

        All ranks are equal, except that ranks which cores cannot use are lowered. `like` gives the
        factors and the number of cores instead of `emblib.tt.shapes`.

        Raises:
            ValueError: cores of rank 1 take more; another dtype than those of `Precision.weights`.

        Example:
            >>> emblib.TTSpec.for_bytes(1_000_000, 64, 1 << 20).ranks
            (24, 24)
        """
        check_float_dtype("dtype", dtype)
        smallest = cls(rows, dim, (1,) * (cores - 1)) if like is None else like
        values = nbytes // dtype.itemsize
        max_ranks = shapes.most_ranks(smallest.row_factors, smallest.dim_factors)

        def of_rank(rank: int) -> TTSpec:
            return replace(smallest, ranks=tuple(min(rank, top) for top in max_ranks))

        if of_rank(1).numel > values:
            raise ValueError(
                f"a tensor train of {rows} x {dim} takes at least "
                f"{of_rank(1).numel * dtype.itemsize} bytes with "
                f"{len(max_ranks) + 1} cores, more than {nbytes}; use more cores, or raise the "
                "bytes"
            )
        low, high = 1, max(max_ranks)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if of_rank(middle).numel <= values else (low, middle - 1)
        return of_rank(low)


def brief(choice: Any) -> str:
    """Format a dataclass as a constructor call with the arguments that differ from defaults."""
    fields_shown = [
        f"{f.name}={getattr(choice, f.name)!r}"
        for f in fields(choice)
        if f.default is MISSING or getattr(choice, f.name) != f.default
    ]
    return f"{type(choice).__name__}({', '.join(fields_shown)})"


def check_float_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless `dtype` is one that tables and outputs can have."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, got {dtype}")


def check_count(name: str, value: SupportsIndex, *, minimum: int = 1) -> int:
    """Return `value` as an int; raise TypeError for others, ValueError below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an int, got {value!r}")
    number = operator.index(value)
    if number < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {number}")
    return number


def _set_counts(spec: Any, *names: str, minimum: int = 1) -> None:
    """Check fields of a frozen dataclass, and convert NumPy integers to plain ints."""
    for name in names:
        object.__setattr__(spec, name, check_count(name, getattr(spec, name), minimum=minimum))


SLOTS = 32
"""Slots of a bucket: capacities are rounded up to a multiple of it."""


class Eviction(Choice):
    """The eviction order: a new key replaces the key of a full bucket with the least value.

    ========  ==========================================================
    LRU       the step it was last used in
    LFU       how often it was used
    LRU_LFU   how often it was used, then the step it was last used in
    STEP      the step number that the module counts for each table
    CUSTOM    the score that you set, see `DynamicEmbeddingBags`
    NONE      no eviction: a full table rejects new keys
    ========  ==========================================================

    Ties evict the smaller key. Keys of the current batch are never evicted.

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
        """Return the order by which the index ranks its entries."""
        return "assigned" if self in (Eviction.STEP, Eviction.CUSTOM) else self.value


class InsertPolicy(Choice):
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

    ALWAYS_EVICT = "wins"
    EVICT_IF_LOWER = "competes"


class OnInsertFailure(Choice):
    """Reaction of a training forward to keys of its batch that found no slot.

    In every mode such a key reads `DynamicSpec.default_value`, is not trained, and is counted in
    `stats()`. WARN warns and RAISE raises at the end of that forward; on CUDA both wait for the
    device.

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
    """Count up to `capacity` keys (rounded up to 32); keys with the lowest counts are evicted.

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
    """Count keys in a count-min sketch of `depth` rows of `width` counters; counts may be too high.

    With `halve_every` each counter is halved once in that many batches, so that the counts of rare
    keys fade. None halves none.

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
        if self.halve_every is not None:
            object.__setattr__(self, "halve_every", check_count("halve_every", self.halve_every))


@dataclass(frozen=True)
class FrequencyAdmission:
    """Admit a key once it was used `threshold` times, the current batch included.

    Args:
        threshold: number of uses, duplicates within a batch included.
        counter: counts the uses of keys without a row.
        reads: initializer of the values that such a key reads in training, which are not trained;
            None reads `DynamicSpec.default_value`.
        rule: function of keys and their counts, int64 `[n]` on the device of the tables, that
            returns which keys to admit, bool `[n]`, in place of the threshold. It must depend on
            its arguments only, and makes the host wait for a GPU; None compares with the threshold.

    Example:
        >>> admission = emblib.FrequencyAdmission(threshold=2, counter=emblib.ExactCounter(100))
        >>> bags = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(100, 4, admission=admission)])
        >>> for _ in range(2):  # the second use of key 7 admits it
        ...     pooled = bags(torch.tensor([7]), torch.tensor([0, 1]))
        ...     print(emblib.KeyStatus(int(bags.key_status()[0])).name)
        NOT_ADMITTED
        NEW
    """

    threshold: int
    counter: ExactCounter | CountMinSketch
    reads: Initializer | None = None
    rule: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", check_count("threshold", self.threshold))
        if self.rule is not None and not callable(self.rule):
            raise TypeError(f"rule must be a function of keys and counts, got {self.rule!r}")
        if not isinstance(self.counter, ExactCounter | CountMinSketch):
            raise TypeError(
                "counter must be an ExactCounter(capacity) or a CountMinSketch(width), got "
                f"{self.counter!r}"
            )
        if self.reads is not None:
            check_initializer("reads", self.reads)


@dataclass(frozen=True)
class DynamicSpec:
    """Describe a table of rows of length `dim`, keyed by arbitrary 64-bit ids.

    Args:
        capacity: maximum number of rows; rounded up to a multiple of 32.
        dim: elements per row.
        name: name of the table in checkpoints; the initial values of rows depend on it.
        initial_capacity: rows to start with; the table grows up to `capacity` as keys are inserted.
            None starts with `capacity`.
        max_load: load, in keys per row in use, above which a table grows. Up to the default all
            keys found slots in tests of all sizes; above it some are evicted early.
        eviction: order in which keys are evicted when both buckets of a new key are full.
        insert_policy: condition for a new key to evict another: always, or only one that ranks
            lower.
        initializer: first values of a row, a function of seed, table, key and element.
        initial_state: first value of the optimizer states of a row.
        default_value: value of all elements that a key without a row reads: a key that is not in
            the table in lookups without gradients, and one that was not inserted in training.
        admission: requirement for a key to be inserted; None inserts all keys.
        ttl: number of steps without use after which a key expires; None: never.
        on_insert_failure: reaction of a training forward to keys that found no slot.

    Example:
        >>> spec = emblib.DynamicSpec(capacity=1_000, dim=16, name="item", initial_capacity=64)
        >>> bags = emblib.DynamicEmbeddingBags([spec], emblib.optim.Adagrad(0.1))
        >>> pooled = bags(torch.arange(500), torch.tensor([0, 500]))
        >>> bags.size(0), bags.capacity(0)
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
    ttl: int | None = field(default=None, kw_only=True)
    on_insert_failure: OnInsertFailure = field(default=OnInsertFailure.IGNORE, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("capacity", "dim"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        for name in ("initial_capacity", "ttl"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_count(name, value))
        if self.initial_capacity is not None and self.initial_capacity > self.capacity:
            raise ValueError(
                f"initial_capacity must be at most capacity = {self.capacity}, got "
                f"{self.initial_capacity}"
            )
        if not isinstance(self.name, str) or "." in self.name:
            raise ValueError(f"name must be a string without dots, got {self.name!r}")
        object.__setattr__(self, "eviction", Eviction(self.eviction))
        object.__setattr__(self, "insert_policy", InsertPolicy(self.insert_policy))
        policy = OnInsertFailure(self.on_insert_failure)
        object.__setattr__(self, "on_insert_failure", policy)
        check_finite(self, "max_load", "initial_state", "default_value")
        if not 0.0 < self.max_load <= 1.0:
            raise ValueError(f"max_load must be in (0, 1], got {self.max_load}")
        check_initializer("initializer", self.initializer)
        if self.admission is not None and not isinstance(self.admission, FrequencyAdmission):
            raise TypeError(
                "admission must be None or a FrequencyAdmission(threshold, counter), got "
                f"{self.admission!r}"
            )

    @property
    def max_buckets(self) -> int:
        """Return the number of buckets at full capacity."""
        return -(-self.capacity // SLOTS)

    @property
    def rows(self) -> int:
        """Return the number of rows for which memory is reserved: `capacity`, rounded up."""
        return self.max_buckets * SLOTS

    @property
    def buckets(self) -> int:
        """Return the initial number of buckets."""
        capacity = self.capacity if self.initial_capacity is None else self.initial_capacity
        return -(-capacity // SLOTS)

    @property
    def max_load_1024ths(self) -> int:
        """Return `max_load` in 1024ths, as the index stores it."""
        return max(1, round(self.max_load * 1024))
