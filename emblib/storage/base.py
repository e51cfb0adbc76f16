"""Storage kinds: the interface that every way to store a table implements.

A `Storage` describes how the rows of one table are stored. Its methods serve four callers. A
collection groups tables (`group_key`), makes their modules and handles, and reads their memory
(`views`). Sharding asks where a table can be cut (`cut_units`) and copies slices. Checkpoints ask
for the layout of the tensors (`parameter_layouts`). The planner asks for bytes and times. A new
kind of storage is one file with one subclass, and one call of `register`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    Self,
    SupportsIndex,
    TypeGuard,
    TypeVar,
)

import torch
from torch import Tensor

from emblib.ops import autograd
from emblib.optim import External, Gradient, Optimizer
from emblib.specs import Pooling, Precision, StochasticRounding, TableSpec

if TYPE_CHECKING:
    from emblib.storage.handles import TableHandle

Span = tuple[int, int]  # a range (begin, end), without its end
KeyBlock = tuple[int, int]  # (number, count): block `number` of `count` blocks of keys, by hash


class TableDescription(Protocol):
    """The configuration of one table, as its storage sees it (a `TableConfig`)."""

    @property
    def name(self) -> str:
        """Return the name of the table."""

    @property
    def num_embeddings(self) -> int:
        """Return the number of rows, or the capacity of a hash table."""

    @property
    def embedding_dim(self) -> int:
        """Return the length of a row."""

    @property
    def data_type(self) -> torch.dtype:
        """Return the dtype of the stored rows; quantised tables do not use it."""

    @property
    def rounding(self) -> StochasticRounding | None:
        """Return how updates of 16-bit rows are rounded; None rounds to nearest."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the bounds (low, high) of the uniform initial values."""

    @property
    def has_bounds(self) -> bool:
        """Return whether the user set `bounds`; otherwise they follow from the number of rows."""

    @property
    def init_fn(self) -> Callable[[Tensor], Any] | None:
        """Return the user's function that writes initial values in place, or None."""

    @property
    def optimizer(self) -> Optimizer | None:
        """Return the optimizer of this table; None uses the optimizer of its collection."""

    @property
    def storage(self) -> Storage:
        """Return how the rows are stored."""

    def spec(self) -> Any:
        """Return the spec of the whole table, e.g. a `TableSpec`, for a table module."""


@dataclass(frozen=True)
class TableSlice:
    """Rows and columns of a table: `rows` and `columns` are ranges (begin, end).

    The rows of a hash table are capacity for keys, not a range of keys. Its keys are divided by
    hash: `key_block` is the block of keys of this slice, None if the table is not sharded. A
    tensor train can be cut only between slices of its first core, see `emblib.storage.TensorTrain`.

    Raises:
        TypeError: a range is not two ints.
        ValueError: a range is empty or outside of the table; or the storage refuses the slice.

    Example:
        >>> table = emblib.EmbeddingBagConfig(1_000, 16, "item")
        >>> emblib.storage.TableSlice(table, rows=(0, 500), columns=(0, 16)).dim
        16
    """

    config: TableDescription
    rows: Span
    columns: Span
    key_block: KeyBlock | None = None

    @staticmethod
    def whole(config: TableDescription) -> TableSlice:
        """Return the slice that is the whole table."""
        return TableSlice(config, (0, config.num_embeddings), (0, config.embedding_dim))

    def __post_init__(self) -> None:
        sizes = (self.config.num_embeddings, self.config.embedding_dim)
        for name, bounds, size in zip(
            ("rows", "columns"), (self.rows, self.columns), sizes, strict=True
        ):
            is_pair = isinstance(bounds, tuple | list) and len(bounds) == 2
            if not is_pair or not all(isinstance(bound, SupportsIndex) for bound in bounds):
                raise TypeError(f"{name} of a slice must be two ints, got {bounds!r}")
            begin, end = map(operator.index, bounds)
            object.__setattr__(self, name, (begin, end))
            if not 0 <= begin < end <= size:
                raise ValueError(
                    f"{name} of a slice of {self.config.name!r} must be a range that is not empty "
                    f"within [0, {size}), got [{begin}, {end})"
                )
        self.storage.check_slice(self)

    @property
    def storage(self) -> Storage:
        """Return how the rows are stored."""
        return self.config.storage

    @property
    def is_whole(self) -> bool:
        """Return whether the slice is the whole table."""
        return (self.num_rows, self.dim) == (self.config.num_embeddings, self.config.embedding_dim)

    @property
    def has_all_columns(self) -> bool:
        """Return whether the slice has whole rows."""
        return self.columns == (0, self.config.embedding_dim)

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return self.rows[1] - self.rows[0]

    @property
    def dim(self) -> int:
        """Return the number of columns."""
        return self.columns[1] - self.columns[0]

    @property
    def spec(self) -> Any:
        """Return the spec of a table that has the rows and columns of this slice only."""
        return self.spec_named(self.config.name)

    def spec_named(self, name: str) -> Any:
        """Return the spec of this slice under another name."""
        return self.storage.slice_spec(self, name)

    def view_of(self, table: Tensor) -> Tensor:
        """Return the view of this slice in the whole table's tensor `[rows, dim]` or `[rows]`."""
        rows = table[self.rows[0] : self.rows[1]]
        return rows if rows.dim() == 1 else rows[:, self.columns[0] : self.columns[1]]


class TableModule(Protocol):
    """Module that stores, looks up and updates tables, the result of `Storage.make_module`."""

    training: bool

    @property
    def optimizer(self) -> Optimizer:
        """Return the optimizer of all its tables."""

    def __call__(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Look up a batch: pooled bags, or one vector per id.

        `ids` is `[L]`, `offsets` `[F * B + 1]`, `weights` float32 `[L]` or None for ones; the
        output is `[B, columns]`, or `[L, dim]` without pooling. `batch_sizes` has the batch sizes
        of each feature, by rank; offsets then are `[bags + 1]`, and pooled outputs are flat.
        """

    def train(self, mode: Any = True) -> Any:
        """Set the training mode."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the memory, as `nn.Module` does."""

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of `weights`, `optimizer_state` and other memory it has, by name."""


class TrainedModule(TableModule, Protocol):
    """Table module with an optimizer; quantised tables are modules without one."""

    @property
    def hyperparams(self) -> Tensor:
        """Return the optimizer's numbers, float64 on the device, see `Optimizer.hyperparams`."""

    def load_hyperparams(self, values: Tensor) -> None:
        """Overwrite `hyperparams` with saved values."""

    def set_step(self, step: int) -> None:
        """Continue counting updates from `step`."""


def has_hyperparams(module: TableModule) -> TypeGuard[TrainedModule]:
    """Return whether a module has `hyperparams`: not quantised tables, nor hash tables on meta."""
    return hasattr(module, "hyperparams")


def precision_of(table_slice: TableSlice) -> Precision:
    """Return dtype and rounding of the stored rows; equal for all slices of a trained module."""
    config = table_slice.config
    rounding = None if config.data_type is torch.float32 else config.rounding
    return Precision(weights=config.data_type, stochastic_rounding=rounding)


class CutUnits(NamedTuple):
    """Granularity of sharding: cuts are at multiples of `rows` rows and `columns` columns.

    Example:
        >>> dense = emblib.storage.Dense()
        >>> dense.cut_units(emblib.EmbeddingBagConfig(1_000, 16, "item"))
        CutUnits(rows=1, columns=1)
    """

    rows: int = 1
    columns: int = 1


class TensorLayout(NamedTuple):
    """One tensor of a table in a checkpoint.

    Attributes:
        size: size of the tensor of the whole table, `[rows, width]`.
        dtype: dtype of its elements.
        region: maps rows and columns of a slice of the table to rows and columns of this tensor;
            None for a tensor that every slice has in full.
    """

    size: tuple[int, int]
    dtype: torch.dtype
    region: Callable[[Span, Span], tuple[Span, Span]] | None


def same_region(rows: Span, columns: Span) -> tuple[Span, Span]:
    """Map a slice of a table to the same rows and columns of a tensor `[rows, dim]`."""
    return rows, columns


class MemoryBytes(NamedTuple):
    """Bytes of a table in device memory, host memory and on disk; predictions may have fractions.

    Example:
        >>> emblib.storage.MemoryBytes(device=1 << 20, host=1 << 30)
        MemoryBytes(device=1048576, host=1073741824, disk=0)
    """

    device: float
    host: float = 0
    disk: float = 0

    def times(self, factor: float) -> MemoryBytes:
        """Return `factor` times these bytes."""
        return MemoryBytes(*(factor * count for count in self))


class RowTimes(Protocol):
    """Nanoseconds that a machine takes for one row, from the planner's cost model.

    `row_bytes` are the bytes of a row that the operation reads and writes, `ids` the number of
    lookups in the slice per step.
    """

    @property
    def device(self) -> str:
        """Return "cpu" or "cuda"."""

    @property
    def costs(self) -> Any:
        """Return the `Calibration`: `hash_ns`, `tt_ns`, `arrange_ns`, `disk_bytes_per_s`, ..."""

    def lookup_row_ns(self, table_slice: TableSlice, row_bytes: float, ids: float) -> float:
        """Return the time to add a row to its bag; rows that the processor caches take less."""

    def update_row_ns(self, table_slice: TableSlice, row_bytes: float, ids: float) -> float:
        """Return the time to update one row; rows that the processor caches take less."""

    def cached_lookup_ns(self, row_bytes: float) -> float:
        """Return the time to add a row to its bag if the processor caches the whole table."""

    def cached_update_ns(self, row_bytes: float) -> float:
        """Return the time to update one row if the processor caches the whole table."""


class Storage:
    """Base of storage kinds: frozen dataclasses whose fields are the choices of the user.

    A subclass sets `plan_name` and implements `make_module`, `make_handle`, `views` and `reset`;
    `emblib.storage.register` makes it known to plans and files. The other methods
    default to a dense table whose parameter `weight` is `[rows, dim]` and can be cut anywhere; a
    subclass overrides those that differ. Modules are called with `(ids, offsets, weights,
    batch_sizes=...)`, like `TableBatchedEmbeddingBags`.
    """

    plan_name: ClassVar[str]
    """Name of this kind in saved plans; unique."""
    is_alternative: ClassVar[bool] = False
    """Whether a plan may choose it in place of the configured storage."""
    is_keyed: ClassVar[bool] = False
    """Whether ids are keys: shards are then chosen by the hash of a key, not by its row."""
    is_trained: ClassVar[bool] = True
    """Whether the rows can be trained."""
    shares_parameters: ClassVar[bool] = False
    """Whether slices have parameters in common, whose gradients are summed over the slices."""
    updates_need_rows: ClassVar[bool] = False
    """Whether an update must compute the looked-up rows again."""
    has_dense_rows: ClassVar[bool] = True
    """Whether `TableHandle.dense_rows` gives the rows as floats, e.g. to quantise them."""

    # Configuration

    @property
    def counts_uses(self) -> bool:
        """Return whether the module takes `counts`, how often each id of a batch was used."""
        return False

    def check_table(self, table: TableDescription) -> None:
        """Raise ValueError for a table configuration that this storage does not support."""

    @classmethod
    def from_plan(cls, values: Mapping[str, Any]) -> Self:
        """Return the storage with these fields: JSON values whose lists became tuples."""
        return cls(**values)

    def spec(self, rows: int, dim: int, name: str) -> Any:
        """Return the spec of a table of this storage, for a table module."""
        return TableSpec(rows, dim, name)

    def check_slice(self, table_slice: TableSlice) -> None:
        """Raise ValueError for a slice that this storage cannot store separately."""

    def can_divide(self, num_shards: int) -> bool:
        """Return whether a table can have this number of shards, cut at `cut_units`."""
        return True

    def slice_spec(self, table_slice: TableSlice, name: str) -> Any:
        """Return the spec of a table that has only this slice."""
        return self.spec(table_slice.num_rows, table_slice.dim, name)

    # Modules

    def group_key(
        self, table_slice: TableSlice, number: int, optimizer: Optimizer, pooling: Pooling
    ) -> Hashable:
        """Return a key that is equal for slices that can share a module.

        Args:
            table_slice: slice of a table.
            number: index of the slice among the slices of this rank. With it in the key, the
                slice gets a module of its own.
            optimizer: optimizer of the slice.
            pooling: SUM or MEAN; NONE for one vector per id.
        """
        return number

    def make_module(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> TableModule:
        """Return the module of slices with equal group keys.

        Args:
            slices: the slices.
            feature_tables: index into `slices` for each feature of the module.
            optimizer: optimizer of the slices.
            pooling: SUM or MEAN; NONE for one vector per id.
            seeds: seeds of the initial values, one per slice.
            device: device of the memory; may be meta.
        """
        raise NotImplementedError

    def is_placeholder(self, module: TableModule) -> bool:
        """Return whether `module` stands on meta for a module that cannot be on meta."""
        return False

    def make_handle(self, module: TableModule, index: int) -> TableHandle:
        """Return the handle of table `index` of a module: a child module of the collection."""
        raise NotImplementedError

    def views(self, module: Any) -> list[dict[str, Tensor]]:
        """Return parameters (or packed rows) and optimizer states of each table, as views."""
        raise NotImplementedError

    def reset(self, module: Any, seeds: Sequence[int]) -> None:
        """Draw the initial values of all tables of a module again, one seed per table."""
        raise NotImplementedError

    def check_copyable(self, table: TableDescription) -> None:
        """Raise ValueError for a table whose rows cannot be copied to a second module."""

    # Sharding

    def check_sharded(self, table: TableDescription) -> None:
        """Raise ValueError for a table that cannot be sharded."""

    def cut_units(self, table: TableDescription) -> CutUnits:
        """Return the granularity at which sharding may cut a table."""
        return CutUnits()

    def copy_slice(
        self,
        table_slice: TableSlice,
        source: TableHandle,
        target: TableHandle,
        key_block: KeyBlock | None,
    ) -> None:
        """Copy a slice of the whole table `source`, and its optimizer states, into `target`.

        Only parameters and states that both tables have are copied.

        Args:
            table_slice: the slice that `target` has.
            source: the whole table, of the same storage.
            target: the table to write.
            key_block: block of keys that `target` owns, for keyed storage; None for other storage.
        """
        source_views, target_views = source.views(), target.views()
        for name in target_views.keys() & source_views.keys():
            target_views[name].copy_(table_slice.view_of(source_views[name]))

    def resumes(self, source: TableHandle, target: TableHandle) -> bool:
        """Return whether `target` has opened rows of an earlier process that `source` lacks.

        The caller then copies nothing to `target`. The default is False.
        """
        return False

    # Checkpoints

    def parameter_layouts(self, table: TableDescription) -> dict[str, TensorLayout]:
        """Return the layout of each parameter of a table in checkpoints, by name."""
        size = (table.num_embeddings, table.embedding_dim)
        return {"weight": TensorLayout(size, table.data_type, same_region)}

    def state_views(self, parameter: str, optimizer: Optimizer) -> dict[str, str]:
        """Return {state: its key in `views`} for each optimizer state of a parameter.

        States that are saved with the table and not with its optimizer are left out.
        """
        return {state.name: state.name for state in optimizer.states}

    def metadata_entries(self, table: TableDescription) -> dict[str, Tensor]:
        """Return the entries of a state dict that describe the table and are not loaded into it."""
        return {}

    def check_entries(self, table: TableDescription, entries: Mapping[str, Tensor]) -> None:
        """Raise ValueError for entries that a table of another layout saved."""

    # Planner

    def nbytes(
        self, table_slice: TableSlice, optimizer: Optimizer | None, device: str
    ) -> MemoryBytes:
        """Return the bytes of a slice: rows and optimizer states, without memory that batches need.

        Without an optimizer, or with one whose gradients are dense, the gradient counts as well.

        Args:
            table_slice: the slice.
            optimizer: optimizer of the table; None counts no states.
            device: "cpu" or "cuda".
        """
        itemsize = table_slice.config.data_type.itemsize
        bytes_of_states = state_bytes(optimizer, table_slice.num_rows, table_slice.dim, itemsize)
        return MemoryBytes(table_slice.num_rows * table_slice.dim * itemsize + bytes_of_states)

    def lookup_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return the nanoseconds to look up `ids` rows of a slice."""
        bytes_per_row = table_slice.dim * table_slice.config.data_type.itemsize
        return ids * times.lookup_row_ns(table_slice, bytes_per_row, ids)

    def update_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return the nanoseconds to update `ids` rows of a slice."""
        bytes_per_row = row_bytes(optimizer, table_slice.dim, table_slice.config.data_type.itemsize)
        ns_per_row = times.update_row_ns(table_slice, bytes_per_row, ids)
        return ids * ns_per_row + dense_gradient_ns(table_slice, optimizer, times)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return the names in order; repeated ones get a number appended, to make all distinct."""
    used_names: set[str] = set(names)
    assigned: set[str] = set()
    unique_names = []
    for name in names:
        unique_name, number = name, 1
        while unique_name in assigned or (unique_name != name and unique_name in used_names):
            number += 1
            unique_name = f"{name}_{number}"
        assigned.add(unique_name)
        unique_names.append(unique_name)
    return unique_names


StorageClass = TypeVar("StorageClass", bound=type[Storage])
_storage_classes: dict[str, type[Storage]] = {}


def register(storage: StorageClass) -> StorageClass:
    """Register a class of storage under its `plan_name`, and return it; usable as a decorator.

    Raises:
        ValueError: another kind has this name.
    """
    known_storage = _storage_classes.setdefault(storage.plan_name, storage)
    if known_storage is not storage:
        raise ValueError(
            f"{storage.__name__}.plan_name {storage.plan_name!r} is that of "
            f"{known_storage.__name__}: choose another"
        )
    return storage


def kinds() -> dict[str, type[Storage]]:
    """Return the registered kinds of storage by `plan_name`.

    Example:
        >>> emblib.storage.kinds()["Hashed"] is emblib.storage.Hashed
        True
    """
    return dict(_storage_classes)


# Bytes and times, for several kinds of storage

_STATE_ITEMSIZE = Precision().states.itemsize
_GRADIENT_PASSES = 2  # backward writes a dense gradient, its optimizer reads it; not measured


def is_fused(optimizer: Optimizer | None) -> bool:
    """Return whether tables store the optimizer's states and run its updates; False for None."""
    return optimizer is not None and autograd.is_fused(optimizer)


def state_bytes(optimizer: Optimizer | None, num_rows: int, dim: int, itemsize: int) -> int:
    """Return the bytes of the optimizer states of rows.

    Without an optimizer, or with one that gets dense gradients, return the bytes of the dense
    gradient instead. `itemsize` is the bytes of a weight and of its gradient.
    """
    if optimizer is None or _has_dense_gradient(optimizer):
        return num_rows * dim * itemsize
    return sum(
        num_rows * (torch.float32.itemsize if state.per_row else dim * _STATE_ITEMSIZE)
        for state in optimizer.states
    )


def row_bytes(optimizer: Optimizer | None, dim: int, itemsize: int) -> int:
    """Return the bytes that the update of a row reads and writes.

    With a fused optimizer these are the row and its optimizer states, otherwise the row alone.
    """
    return dim * itemsize + (state_bytes(optimizer, 1, dim, itemsize) if is_fused(optimizer) else 0)


def dense_gradient_ns(
    table_slice: TableSlice, optimizer: Optimizer | None, times: RowTimes
) -> float:
    """Return the nanoseconds to write and read the dense gradient of a slice.

    0 for an optimizer that gets no dense gradient. Without an optimizer the gradient is dense.
    """
    if optimizer is not None and not _has_dense_gradient(optimizer):
        return 0.0
    gradient_bytes = table_slice.num_rows * table_slice.dim * table_slice.config.data_type.itemsize
    return _GRADIENT_PASSES * gradient_bytes * float(times.costs.arrange_ns)


def _has_dense_gradient(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, External) and optimizer.gradient is Gradient.DENSE
