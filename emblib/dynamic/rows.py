"""Rows of dynamic tables: weights and optimizer states by slot of the index.

Weights are one flat tensor, and so is each optimizer state; such a tensor is a *row buffer*. It has
the tables one after the other, each with memory reserved for its capacity, of which the rows of the
index's slots are in use (see `emblib.tables.memory`). Behind the capacity of each table are its
rows without a slot: the overflow rows of a backing store, then the fallback rows, which keys
without a row share. Dense tables have the same layout, so the ops of `emblib.ops.tbe` look up and
update rows.
`RowInitializer` writes new rows, and `TrainingUpdate` finds the rows of a batch in its backward.
"""

import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from emblib.columns import FeatureRow, InitialLayoutColumn
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.keys import range_indices
from emblib.dynamic.saving import dumps
from emblib.dynamic.saving.entries import WEIGHT
from emblib.init import Constant
from emblib.ops import autograd, hash
from emblib.ops.hash import InsertedBatch, Keys, tables_of
from emblib.optim import State
from emblib.specs import SLOTS_PER_BUCKET, DynamicSpec, Precision
from emblib.tables import memory
from emblib.tables.base import table_number
from emblib.tables.bounds_report import is_padded
from emblib.tables.locks import ModuleLock
from emblib.tables.parameters import version_of


class RowLayout:
    """Describe the row buffers of some tables: `weight`, then the states of the optimizer.

    The layout owns no memory; the module owns the buffers.

    Args:
        specs: specs of the tables.
        table_names: names of the tables, on which the initial values of rows depend.
        states: the states of the optimizer.
        precision: dtypes of weights and states.
        overflow_rows: number of rows per table behind its rows with slots; they have no slot.

    Attributes:
        specs: argument `specs`, as a tuple.
        table_names: argument `table_names`, as a list.
        overflow_rows: argument `overflow_rows`.
        buffer_names: names of the P buffers: `weight`, then the states.
        dtypes: dtypes of the buffers.
        has_fallback: whether a table has fallback rows.
        total_rows: rows of all tables, overflow and fallback rows included.
        stride: elements from one default row to the next, see `default_row_layout`.
    """

    def __init__(
        self,
        specs: Sequence[DynamicSpec],
        table_names: Sequence[str],
        states: Sequence[State],
        precision: Precision,
        overflow_rows: int = 0,
    ) -> None:
        self.specs, self.overflow_rows = tuple(specs), overflow_rows
        self.table_names = list(table_names)
        self.buffer_names = (WEIGHT, *(state.name for state in states))
        self._per_row = (False, *(state.per_row for state in states))
        dtypes = (torch.float32 if state.per_row else precision.states for state in states)
        self.dtypes = (precision.weights, *dtypes)
        self._random_streams = [zlib.crc32(name.encode()) for name in table_names]
        self.has_fallback = any(spec.fallback_rows for spec in specs)
        self._first_rows, self._first_elements = [0], [0]
        for t, spec in enumerate(specs):
            num_rows = self._num_rows(t)
            self._first_rows.append(self._first_rows[-1] + num_rows)
            self._first_elements.append(self._first_elements[-1] + num_rows * spec.dim)
        self.total_rows = self._first_rows[-1]
        # Elements between default rows: a multiple of 4, so that kernels can load vectors.
        self.stride = -(-max((spec.dim for spec in specs), default=0) // 4) * 4

    def first_fallback_row(self, table: int) -> int:
        """Return the row of a table at which its fallback rows begin, also if it has none."""
        return self.specs[table].rows + self.overflow_rows

    def _num_rows(self, table: int) -> int:
        """Return how many rows a table has in the buffers: slots, overflow and fallback rows."""
        return self.first_fallback_row(table) + self.specs[table].fallback_rows

    def table_number(self, table: int | str) -> int:
        """Return the number of a table that is given by number or name.

        Raises:
            KeyError, IndexError: there is no such table.
            TypeError: `table` is neither a number nor a name.
        """
        return table_number(self.table_names, table)

    def width(self, table: int, buffer: int) -> int:
        """Return the elements per row of a table in buffer number `buffer`."""
        return 1 if self._per_row[buffer] else self.specs[table].dim

    def has_one_per_row(self, buffer: int) -> bool:
        """Return whether a buffer has one number per row."""
        return self._per_row[buffer]

    def row_bytes(self, table: int) -> int:
        """Return the bytes per row of all buffers together."""
        return sum(self.width(table, p) * dtype.itemsize for p, dtype in enumerate(self.dtypes))

    def first_element(self, table: int, buffer: int) -> int:
        """Return the index of a table's first element in a buffer."""
        return (self._first_rows if self._per_row[buffer] else self._first_elements)[table]

    def first_row(self, table: int) -> int:
        """Return the number of a table's row 0 among the rows of all tables."""
        return self._first_rows[table]

    def feature_row(self, table: int, column: int) -> FeatureRow:
        """Return a table's row of the `features` tensor, for output columns from `column` on."""
        spec, first_row = self.specs[table], self._first_rows[table]
        return FeatureRow(
            weight_offset=self._first_elements[table],
            row_base=first_row,
            rows=self._num_rows(table),
            dim=spec.dim,
            column=column,
            state_base=first_row,
            cache_stride=self.stride,
        )

    def allocate(self, device: torch.device) -> list[Tensor]:
        """Allocate the buffers, filled with zeros."""
        used_rows = sum(spec.buckets for spec in self.specs) * SLOTS_PER_BUCKET
        buffer_sizes = (
            (self._first_rows if per_row else self._first_elements)[-1] for per_row in self._per_row
        )
        return [
            memory.reserve(num_elements, dtype, device, used_rows / max(self.total_rows, 1))
            for num_elements, dtype in zip(buffer_sizes, self.dtypes, strict=True)
        ]

    def advise_growth(
        self, buffers: Sequence[Tensor], table: int, rows_before: int, rows_now: int
    ) -> None:
        """Request huge pages for the growth of a table from `rows_before` to `rows_now` rows."""
        for p, buffer in enumerate(buffers):
            width = self.width(table, p)
            memory.advise_growth(
                buffer, self.first_element(table, p), rows_before * width, rows_now * width
            )

    def views(self, buffers: Sequence[Tensor], table: int) -> dict[str, Tensor]:
        """Return views of the rows of a table by name, `[rows, dim]` or `[rows]`, in use or not."""
        return self._views(buffers, table, 0, self.specs[table].rows)

    def fallback_views(self, buffers: Sequence[Tensor], table: int) -> dict[str, Tensor]:
        """Return views of the fallback rows of a table by name, `[rows, dim]` or `[rows]`."""
        first_row = self.first_fallback_row(table)
        return self._views(buffers, table, first_row, self.specs[table].fallback_rows)

    def _views(
        self, buffers: Sequence[Tensor], table: int, first_row: int, num_rows: int
    ) -> dict[str, Tensor]:
        """Return views of `num_rows` rows from `first_row` of a table on, by name of the buffer."""
        views = {}
        for p, (name, buffer) in enumerate(zip(self.buffer_names, buffers, strict=True)):
            width = self.width(table, p)
            begin = self.first_element(table, p) + first_row * width
            rows = buffer[begin : begin + num_rows * width]
            views[name] = rows if self._per_row[p] else rows.view(num_rows, width)
        return views

    def byte_layout(self, device: torch.device) -> Tensor:
        """Return `RowBuffers.layout`: first byte and bytes per row, by table and buffer."""
        layout = [
            [
                (self.first_element(t, p) * dtype.itemsize, self.width(t, p) * dtype.itemsize)
                for p, dtype in enumerate(self.dtypes)
            ]
            for t in range(len(self.specs))
        ]
        return self._stack_fields(layout, 2, torch.int64, device)

    def initial_layout(self, device: torch.device) -> Tensor:
        """Return the layout of `initial_rows_`, int64 `[T, P, 5]`, see `InitialLayoutColumn`."""
        layout = [
            [
                (
                    self.first_element(t, p),
                    self.width(t, p),
                    self._num_rows(t),
                    self.width(t, p),
                    self._random_streams[t],
                )
                for p in range(len(self.buffer_names))
            ]
            for t in range(len(self.specs))
        ]
        return self._stack_fields(layout, 5, torch.int64, device)

    def initial_rules(self, device: torch.device) -> Tensor:
        """Return the rules of `initial_rows_`, float64 `[T, P, 7]`, see `InitialRuleColumn`."""
        rules = [
            [
                hash.rule_of(Constant(spec.initial_state) if p else spec.initializer, spec)
                for p in range(len(self.buffer_names))
            ]
            for spec in self.specs
        ]
        return self._stack_fields(rules, 7, torch.float64, device)

    def default_row_layout(self, num_rows: int, device: torch.device) -> Tensor:
        """Return the layout of `initial_rows_` for `num_rows` default rows, int64 `[T, 1, 5]`.

        A default row is what keys without a row read; all tables share one matrix of them, with
        `stride` elements per row.
        """
        layout = [
            [(0, self.stride, num_rows, spec.dim, stream)]
            for spec, stream in zip(self.specs, self._random_streams, strict=True)
        ]
        return self._stack_fields(layout, 5, torch.int64, device)

    def _stack_fields(
        self,
        fields_of_tables: Sequence[Any],
        num_fields: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return a tensor `[T, P, num_fields]` of `num_fields` numbers per table and buffer."""
        num_buffers = len(fields_of_tables[0]) if fields_of_tables else 0
        return (
            torch.tensor(fields_of_tables, dtype=dtype, device="cpu")
            .view(len(self.specs), num_buffers, num_fields)
            .to(device)
        )

    def snapshot(self, buffers: Sequence[Tensor], capacities: Sequence[int]) -> list[list[Tensor]]:
        """Copy rows on their device, by table and buffer: the rows in use, then the fallback rows.

        `capacities` has the number of rows in use of each table.
        """
        return [
            [
                torch.cat([view[:num_rows].detach(), fallback_view.detach()])
                for view, fallback_view in zip(
                    self.views(buffers, t).values(),
                    self.fallback_views(buffers, t).values(),
                    strict=True,
                )
            ]
            for t, num_rows in enumerate(capacities)
        ]

    def check_snapshot(self, snapshot: Any, capacities: Sequence[int]) -> None:
        """Raise ValueError unless `restore` takes a snapshot of tables with these rows in use."""
        tables = dumps.check_list("rows", snapshot, len(self.specs), "table")
        for t, (buffers, rows_in_use) in enumerate(zip(tables, capacities, strict=True)):
            num_rows = rows_in_use + self.specs[t].fallback_rows
            buffers = dumps.check_list(
                f"rows of table {t}",
                buffers,
                len(self.buffer_names),
                f"entry of {self.buffer_names}",
            )
            for p, (name, dtype) in enumerate(zip(self.buffer_names, self.dtypes, strict=True)):
                shape = (num_rows,) if self._per_row[p] else (num_rows, self.width(t, p))
                dumps.check_tensor(f"{name} of table {t}", buffers[p], dtype, shape)

    def restore(self, buffers: Sequence[Tensor], snapshot: Sequence[Sequence[Tensor]]) -> None:
        """Write the rows of a snapshot into newly allocated buffers.

        The caller must call `check_snapshot` for a snapshot that it did not make.
        """
        for t, saved_rows in enumerate(snapshot):
            views = self.views(buffers, t).values()
            fallback_views = self.fallback_views(buffers, t).values()
            num_used = saved_rows[0].shape[0] - self.specs[t].fallback_rows
            self.advise_growth(buffers, t, 0, num_used)
            for view, fallback_view, saved_buffer in zip(
                views, fallback_views, saved_rows, strict=True
            ):
                view[:num_used] = saved_buffer[:num_used].to(view.device)
                fallback_view.copy_(saved_buffer[num_used:])

    def nbytes(self, capacities: Sequence[int]) -> Iterator[int]:
        """Yield the bytes in use of each buffer, if tables have these rows in use."""
        for p, dtype in enumerate(self.dtypes):
            yield sum(
                (num_rows + self.specs[t].fallback_rows) * self.width(t, p) * dtype.itemsize
                for t, num_rows in enumerate(capacities)
            )


def check_capacity(specs: Sequence[DynamicSpec]) -> None:
    """Raise ValueError if a table has more slots than an index can number."""
    for spec in specs:
        if spec.max_buckets >= 1 << 31:
            raise ValueError(
                f"a table has fewer than 2^31 buckets of {SLOTS_PER_BUCKET} rows, got "
                f"{spec.max_buckets}; choose a smaller capacity"
            )


class BatchReads(NamedTuple):
    """The rows that the lookups of a batch read: rows of their tables, or default rows.

    Attributes:
        indices: int64 `[L]`, rows of tables; -1 for none, which reads zeros; 0 where a default row
            is read.
        slots: int32 `[L]`, index in `default_rows` of the row that is read instead, -1 for none;
            None is -1 for all.
        default_rows: flat rows of `RowLayout.stride` elements each; None if `slots` is.
        is_fallback: bool `[L]`, the lookups that read fallback rows; None if none does, and from
            `one_op.find_in_one_op`, after which no backward needs it.
    """

    indices: Tensor
    slots: Tensor | None = None
    default_rows: Tensor | None = None
    is_fallback: Tensor | None = None

    def applied_to(self, batch: autograd.Lookup) -> autograd.Lookup:
        """Return `batch` with these rows as the rows that it reads."""
        return batch._replace(
            indices=self.indices, slots=self.slots, default_rows=self.default_rows
        )

    def with_defaults(self, slots: Tensor, default_rows: Tensor) -> "BatchReads":
        """Return reads in which lookups without a row read default rows."""
        indices = self.indices.where(self.indices >= 0, 0)
        return self._replace(indices=indices, slots=slots, default_rows=default_rows)

    def with_slots(self, slots: Tensor) -> "BatchReads":
        """Return the same reads with the keys at new slots, int64 `[L]`."""
        if self.slots is None:
            return self._replace(indices=slots)
        return self._replace(indices=torch.where(self.slots < 0, slots, 0))


class RowInitializer(nn.Module):
    """Write the initial values of new rows, and choose what keys without a row read.

    A key without a row reads a fallback row, if its table has any. Otherwise it reads random
    values, if this training lookup did not admit it and the admission names an initializer for such
    keys; else the table's default value.

    Args:
        layout: layout of the rows.
        seed: seed of their initial values.
        device: device of the rows.

    Attributes:
        draws_unadmitted: whether keys that are not admitted read random values in some table.
    """

    row_layout: Tensor  # int64 `[T, P, 5]`, see `InitialLayoutColumn`
    rules: Tensor  # float64 `[T, P, 7]`, see `InitialRuleColumn`
    default_values: Tensor  # `[T, stride]`, in the dtype of the weights
    unadmitted_layout: Tensor  # int64 `[T, 1, 5]`, of default rows for keys that were not admitted
    unadmitted_rules: Tensor  # float64 `[T, 1, 7]`, of these rows
    fallback: Tensor  # int64 `[T, 2]`, first fallback row and number of them

    def __init__(self, layout: RowLayout, seed: int, device: torch.device) -> None:
        super().__init__()
        self.seed = seed
        specs = layout.specs
        initializers = [spec.admission.reads if spec.admission else None for spec in specs]
        self.draws_unadmitted = any(initializer is not None for initializer in initializers)
        self._default_is_zero = all(spec.default_value == 0.0 for spec in specs)
        self._has_one_default = len({spec.default_value for spec in specs}) == 1
        unadmitted_rules = [
            [hash.rule_of(initializer or Constant(spec.default_value), spec)]
            for spec, initializer in zip(specs, initializers, strict=True)
        ]
        default_values = torch.tensor([spec.default_value for spec in specs], device="cpu").view(
            -1, 1
        )
        default_values = default_values.expand(-1, layout.stride).to(layout.dtypes[0])
        self._stride, self._has_fallback = layout.stride, layout.has_fallback
        fallback = [
            (layout.first_fallback_row(t), spec.fallback_rows) for t, spec in enumerate(specs)
        ]
        for name, tensor in (
            ("row_layout", layout.initial_layout(device)),
            ("rules", layout.initial_rules(device)),
            ("default_values", default_values.contiguous().to(device)),
            ("unadmitted_layout", layout.default_row_layout(0, device)),
            (
                "unadmitted_rules",
                torch.tensor(unadmitted_rules, dtype=torch.float64, device="cpu").view(-1, 1, 7),
            ),
            ("fallback", torch.tensor(fallback, dtype=torch.int64, device="cpu").view(-1, 2)),
        ):
            self.register_buffer(name, tensor.to(device), persistent=False)

    def arguments(self) -> tuple[Tensor, Tensor, int]:
        """Return layout, rules and seed of `initial_rows_`, which are equal for all batches."""
        return self.row_layout, self.rules, self.seed

    def write_(
        self, buffers: list[Tensor], keys: Keys, inserted: InsertedBatch, slots: Tensor
    ) -> None:
        """Write initial values into the rows in `slots`, int64 `[L]` by miss, -1 for none.

        `inserted` must have misses.
        """
        misses = inserted.misses
        assert misses is not None
        hash.initial_rows_(
            buffers,
            self.row_layout,
            self.rules,
            keys.ids,
            misses.first,
            misses.offsets,
            slots,
            self.seed,
        )

    def write_fallback_(self, buffers: list[Tensor]) -> None:
        """Write initial values into the fallback rows, as for the keys -1, -2, ... in order."""
        if not self._has_fallback:
            return
        first_rows, num_rows = self.fallback.unbind(1)
        offsets = torch.cat([num_rows.new_zeros(1), num_rows.cumsum(0)])
        tables = torch.arange(num_rows.numel(), device=num_rows.device).repeat_interleave(num_rows)
        positions = torch.arange(tables.numel(), device=num_rows.device)
        row_indices = positions - offsets[tables]
        hash.initial_rows_(
            buffers,
            self.row_layout,
            self.rules,
            -1 - row_indices,
            positions,
            offsets,
            first_rows[tables] + row_indices,
            self.seed,
        )

    def with_fallback(self, keys: Keys, slots: Tensor) -> BatchReads:
        """Return reads of the slots of a batch, in which keys without one read fallback rows."""
        if not self._has_fallback:
            return BatchReads(slots)
        first_rows, num_rows = self.fallback[tables_of(keys)].unbind(1)
        is_fallback = (slots < 0) & (num_rows > 0)
        if is_padded():  # ids before the first bag are not lookups
            is_fallback &= torch.arange(slots.numel(), device=slots.device) >= keys.starts[0]
        rows = first_rows + range_indices(keys.ids, num_rows)
        return BatchReads(torch.where(is_fallback, rows, slots), is_fallback=is_fallback)

    def reads_of_inserted(self, keys: Keys, inserted: InsertedBatch) -> BatchReads:
        """Return the rows that the lookups of an inserted batch read."""
        if inserted.misses is None:
            return BatchReads(inserted.slots)
        reads = self.with_fallback(keys, inserted.slots)
        slots = reads.indices
        if not self.draws_unadmitted or inserted.result is None or not slots.numel():
            return self.with_default_rows(keys, reads)
        status, groups = inserted.result.status, inserted.misses.groups
        is_unadmitted = status == hash.NOT_ADMITTED
        drawn_rows = self._draw_rows(keys, inserted, is_unadmitted)
        miss_indices = groups.clamp(min=0).long()
        is_drawn = (groups >= 0) & is_unadmitted[miss_indices]
        drawn_slots = self.default_values.size(0) + miss_indices
        default_slots = torch.where(is_drawn, drawn_slots, self._default_slots(keys, slots))
        default_rows = torch.cat([self.default_values.view(-1), drawn_rows])
        return reads.with_defaults(default_slots.to(torch.int32), default_rows)

    def reads_of_slots(self, keys: Keys, slots: Tensor) -> BatchReads:
        """Return the rows that the lookups of a batch read without insertion.

        `slots`, int64 `[L]`, has the slot of each position, -1 for none.
        """
        return self.with_default_rows(keys, self.with_fallback(keys, slots))

    def with_default_rows(self, keys: Keys, reads: BatchReads) -> BatchReads:
        """Return reads in which keys without a row read the default value of their table."""
        if self._default_is_zero:
            return reads
        default_slots = self._default_slots(keys, reads.indices)
        return reads.with_defaults(default_slots, self.default_values.view(-1))

    def _default_slots(self, keys: Keys, indices: Tensor) -> Tensor:
        """Return rows of `default_values` by position, int32 `[L]`, -1 where an index is >= 0."""
        if self._has_one_default:  # row 0 serves all tables
            return (indices >= 0).to(torch.int32).neg_()
        return torch.where(indices < 0, tables_of(keys), -1).to(torch.int32)

    def _draw_rows(self, keys: Keys, inserted: InsertedBatch, is_unadmitted: Tensor) -> Tensor:
        """Draw flat default rows by miss, `[L * stride]`, for the keys that were not admitted."""
        assert inserted.misses is not None
        num_misses = is_unadmitted.numel()
        rows = self.default_values.new_zeros(num_misses * self._stride)
        layout = self.unadmitted_layout.clone()
        layout[:, :, InitialLayoutColumn.ROWS].fill_(num_misses)
        indices = torch.arange(num_misses, device=rows.device)
        hash.initial_rows_(
            [rows],
            layout,
            self.unadmitted_rules,
            keys.ids,
            inserted.misses.first,
            inserted.misses.offsets,
            torch.where(is_unadmitted, indices, -1),
            self.seed,
        )
        return rows


class BackingSearch(Protocol):
    """The part of a `BackingTier` that training updates use."""

    generation: int  # changes whenever overflow rows are assigned to other keys

    def search(self, keys: Keys) -> Tensor:
        """Return the slots of keys, int64 `[L]`; keys in the backing store get overflow rows."""

    def will_update(self) -> None:
        """Record that backward is about to update overflow rows."""


class TrainingUpdate:
    """Update hooks of a training lookup: find the rows of its batch again in backward.

    After the forward a table may grow, which moves rows, and keys may be evicted. So if the index
    has changed, backward looks up the slots again. Keys that left in between, even if they were
    inserted again, are not updated; each backward adds their lookups to `dropped_updates`. The
    index is watched as long as the autograd graph exists, since backward may run more than once.

    A forward through `emblib.ops.autograd` sets `batch` and `has_weight_gradient`; a forward
    through `KeyedLookup` may set `groups`. The callers of methods hold `lock`.

    Args:
        lock: lock of the tables, which backward takes around the update.
        index: index of the tables.
        keys: keys of the batch.
        slots: int64 `[L]`, their rows after the forward, -1 for none; fallback rows included.
        reads: rows that the forward read.
        dropped_updates: int64 `[1]`, counter to which lookups of lost rows are added.
        backing: backing tier, which is referenced weakly; None for none.
    """

    def __init__(
        self,
        lock: ModuleLock,
        index: HashIndex,
        keys: Keys,
        slots: Tensor,
        reads: BatchReads,
        dropped_updates: Tensor,
        backing: BackingSearch | None = None,
    ) -> None:
        self.lock = lock
        self._index, self._keys, self._slots, self.reads = index, keys, slots, reads
        self._version, self._dropped_updates = index.versions.current, dropped_updates
        # Weak, so that the graph of an output does not keep a deleted module's store open.
        self._backing = None if backing is None else weakref.ref(backing)
        self._generation = 0 if backing is None else backing.generation
        self._ids_version = version_of(keys.ids)  # which may be the caller's tensor
        index.versions.watch(self)
        self.batch: autograd.Lookup | None = None
        # The lookups by row, the fields of `tbe.Groups`, if the insertion of the batch made them.
        self.groups: list[Tensor] | None = None
        self.has_weight_gradient = False  # whether sample weights get a gradient

    @classmethod
    def from_repetition(cls, first_update: "TrainingUpdate | None", keys: Keys) -> "TrainingUpdate":
        """Return the update of a forward that backward repeats, which reads the same rows.

        Args:
            first_update: update of the first forward; None if it is not known.
            keys: keys of the repetition.

        Raises:
            RuntimeError: the first forward is unknown or had other keys, or a row that it read has
                been evicted since.
        """
        if first_update is None or not first_update.has_keys(keys):
            raise RuntimeError(
                "backward repeats a checkpointed forward with other lookups in dynamic tables than "
                "it had: a function in torch.utils.checkpoint.checkpoint must look up the same ids "
                "both times, in the same order and mode"
            )
        slots, is_lost = first_update.present_slots()
        if is_lost is not None and bool(is_lost.any()):
            raise RuntimeError(
                "backward repeats a checkpointed forward, but keys that it looked up have left the "
                "table since: run backward before the next training forward, choose a larger "
                "capacity, or leave the tables outside of torch.utils.checkpoint"
            )
        backing = None if first_update._backing is None else first_update._backing_tier()  # noqa: SLF001 - of the same class
        return cls(
            first_update.lock,
            first_update._index,  # noqa: SLF001 - of the same class
            keys,
            slots,
            first_update.reads.with_slots(slots),
            first_update._dropped_updates,  # noqa: SLF001 - of the same class
            backing,
        )

    def has_keys(self, keys: Keys) -> bool:
        """Return whether a batch has the same keys; on CUDA only their number is compared."""
        ids, other_ids = self._keys.ids, keys.ids
        return ids.shape == other_ids.shape and (ids.is_cuda or torch.equal(ids, other_ids))

    def _backing_tier(self) -> BackingSearch:
        assert self._backing is not None
        backing = self._backing()
        assert backing is not None
        return backing

    def is_stale(self) -> bool:
        """Return whether rows may have moved since the forward."""
        if self._index.versions.current != self._version:
            return True
        return self._backing is not None and self._backing_tier().generation != self._generation

    def before_update(self) -> autograd.RowLocations:
        """Return the rows to update and the rows that were read; see `locate` for the error."""
        batch = self.batch
        assert batch is not None
        slots, indices = self.locate()
        groups = autograd.groups_of(batch._replace(indices=slots))
        self._note_update()
        return autograd.RowLocations(groups, None, self.reads.slots, indices)

    def slots_to_update(self) -> tuple[Tensor, list[Tensor] | None]:
        """Return the current slots `[L]` that backward updates, -1 for none, and their groups.

        Groups are None if they have to be computed; see `locate` for the error.
        """
        groups = None if self.is_stale() else self.groups
        slots, _ = self.locate()
        self._note_update()
        return slots, groups

    def _note_update(self) -> None:
        if self._backing is not None:
            self._backing_tier().will_update()

    def locate(self) -> tuple[Tensor, Tensor]:
        """Return the current slots of the batch, -1 for none, and the rows it reads; `[L]`.

        The number of lookups whose keys have left is added to `dropped_updates`.

        Raises:
            RuntimeError: sample weights get a gradient, which needs a row that has left; or see
                `present_slots`.
        """
        slots, is_lost = self.present_slots()
        if is_lost is None:
            return slots, self.reads.indices
        if self.has_weight_gradient and bool(is_lost.any()):
            raise RuntimeError(
                "the gradient of per_sample_weights needs the rows that forward read, but keys of "
                "the batch have left the table since; run backward before the next training forward"
            )
        self._dropped_updates += is_lost.sum()
        return slots, self.reads.with_slots(slots).indices

    def present_slots(self) -> tuple[Tensor, Tensor | None]:
        """Return current slots, int64 `[L]`, and which lookups lost their rows, bool `[L]`.

        The second is None if no row can have moved. With a backing store, keys in the store get
        copies in overflow rows.

        Raises:
            RuntimeError: rows may have moved, and the ids of the batch were overwritten.
        """
        if not self.is_stale():
            return self._slots, None
        if version_of(self._keys.ids) != self._ids_version:
            raise RuntimeError(
                "the ids of a batch were changed in place before its backward, which needs them "
                "because keys were inserted or removed since: pass the batch a copy of the ids"
            )
        if self._backing is None:
            current_slots = self._index.find(self._keys)
        else:
            current_slots = self._backing_tier().search(self._keys)
        if self.reads.is_fallback is not None:
            current_slots = torch.where(self.reads.is_fallback, self._slots, current_slots)
        has_left = self._index.versions.has_left(
            self._index, self._keys, current_slots, self._version, self.reads.is_fallback
        )
        slots = torch.where((self._slots < 0) | has_left, -1, current_slots)
        is_lost = (self._slots >= 0) & (slots < 0)
        if self.reads.slots is not None:
            is_lost &= self.reads.slots < 0  # the others read default rows
        return slots, is_lost

    def after_update(self) -> None:
        """Do nothing: the update changed no slot."""


class WeightGradient:
    """Find the rows of a batch again in backward for the gradient of its sample weights alone.

    Args:
        batch: the lookup, with the rows that its forward read.
        update: the update of its keys, which finds their rows; no row is updated.
    """

    def __init__(self, batch: autograd.Lookup, update: TrainingUpdate) -> None:
        self.lock = update.lock
        self._batch, self._update = batch, update
        update.has_weight_gradient = True

    def before_update(self) -> autograd.RowLocations:
        """Return the rows that were read; see `TrainingUpdate.locate` for the error."""
        _, indices = self._update.locate()
        return autograd.RowLocations(
            autograd.groups_of(self._batch), None, self._batch.slots, indices
        )

    def after_update(self) -> None:
        """Do nothing: no row was updated."""
