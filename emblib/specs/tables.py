"""Descriptions that tables of every kind share, and those of dense tables."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch

from emblib.specs.checks import (
    OptionEnum,
    check_float_dtype,
    check_table_name,
    normalise_counts,
    normalise_dim,
)


class Pooling(OptionEnum):
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


class BoundsCheck(OptionEnum):
    """Reaction to out-of-bounds indices and offsets: raise, warn, or ignore them.

    In every mode the kernels repair invalid input as they read it (index -1 is skipped, any other
    invalid index reads row 0, or zeros from a table without rows, offsets are clamped), so nothing
    is ever read outside a table. FATAL raises before anything is written, WARNING warns, IGNORE
    repairs silently. Inside `torch.compile`, WARNING counts in the module's `bounds_violations`
    instead.

    On CUDA no mode makes the host wait. WARNING counts on the device; one of the next 16 or so
    lookups warns of the counted violations, and so does `emblib.report_bounds_violations(model)`.
    FATAL runs the same kernels and ends them as a failed device assert does: nothing after them
    runs, the next call that waits for the device raises, and the process cannot use CUDA any more.

    Offsets that do not begin with 0, or that lack the last entry, would skip ids or a bag. On the
    CPU, compiled or not, WARNING raises RuntimeError for them; on CUDA it counts such ids and
    offsets too. Ids of -1 before the first offset are padding, which may be skipped. NONE checks
    nothing. For offsets that never decrease it equals IGNORE; for other offsets it is memory-safe,
    and its results are unspecified.

    In a collection, the check of lengths does not depend on the order of keys, on the tables or on
    the ranks. If lengths do not add up to the number of ids, FATAL raises. The other modes clamp
    offsets and add the ids that are in no bag to the last bag. WARNING also warns, and with a
    single feature it raises for ids after the last bag. A negative length would move ids to other
    bags. FATAL raises for it, and so does WARNING on the CPU in code that is not compiled; IGNORE
    and NONE treat its bag as empty.

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
        RuntimeError: ...indices of feature 0, table 'table_0' must be in [0, 3), or -1 for a ...
    """

    FATAL = "fatal"
    WARNING = "warning"
    IGNORE = "ignore"
    NONE = "none"


class Placement(OptionEnum):
    """The memory in which the rows of a table are stored.

    ======================  ==========================  ============================
    placement               module on the CPU           module on a GPU
    ======================  ==========================  ============================
    DEVICE                  in its memory               in its memory
    HOST                    as DEVICE                   unsupported: use MANAGED
    MANAGED                 as DEVICE                   pinned host memory that the
                                                        kernels read in place, as
                                                        CUDA tensors
    MANAGED_CACHING         as MANAGED, behind a cache  as MANAGED, behind a cache
                            in memory                   in GPU memory
    DISK                    a memory-mapped file,       unsupported: use
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

    Args:
        rows: number of rows, >= 0.
        dim: elements per row, 1 to 2^25.
        name: name of the table in state dicts, without dots; "" names it by its position.
        placement: the memory of the rows.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is out of range, `name` is not a string or has dots, or `placement` is
            unknown.

    Example:
        >>> emblib.TableSpec(rows=1_000, dim=16, name="item")
        TableSpec(rows=1000, dim=16, name='item', placement=<Placement.DEVICE: 'device'>)
    """

    rows: int
    dim: int
    name: str = ""
    placement: Placement = Placement.DEVICE

    def __post_init__(self) -> None:
        normalise_counts(self, "rows", minimum=0)
        normalise_dim(self)
        object.__setattr__(self, "placement", Placement(self.placement))
        check_table_name(self.name)


@dataclass(frozen=True)
class StochasticRounding:
    """Round values that are stored in 16 bits up or down at random, without bias.

    The random numbers come from a counter-based generator (Philox) and depend only on `seed`, step,
    tensor, row and column. So they do not depend on the number of threads, on the device, or on a
    cache with the dtype of the table. With a cache of another dtype, rows are rounded when they are
    written back, so results depend on the time of write-backs. Rows are numbered over the module,
    ordered by placement.

    Raises:
        TypeError: `seed` is not an int.
        ValueError: `seed` is outside [0, 2^53).

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
        object.__setattr__(self, "seed", operator.index(self.seed))
        if not 0 <= self.seed < 2**53:
            raise ValueError(f"seed must be in [0, 2^53), got {self.seed}")


class MatmulPrecision(OptionEnum):
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
    """The dtypes of a table, each float32, float16 or bfloat16. Sums are float32 in any case.

    Args:
        weights: dtype of the stored rows, or of the cores of tensor trains.
        output: dtype of the output of `forward`.
        states: dtype of optimizer states with one element per element of a row (of a core); states
            with one number per row are float32.
        stochastic_rounding: how updates of weights and states that are not float32 are rounded;
            None rounds to nearest, which drops updates below half a unit in the last place.
        matmul: precision of the products of tensor-train cores on a GPU; unused by other tables.

    Raises:
        TypeError: `stochastic_rounding` has another type.
        ValueError: a dtype is not float32, float16 or bfloat16, or `matmul` is unknown.

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
