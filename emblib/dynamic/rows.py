"""Where the rows of dynamic tables lie: weights and optimizer states, by slot of the index.

Each kind of value is one flat tensor, a plane, with the tables one after the other, each with room
for its capacity; how much of that is in use follows the index (see `emblib.tables.memory`). This is
the layout of `emblib.ops.tbe`, so that lookups and updates are those of plain tables.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from emblib.dynamic.hash_index import HashIndex, Inserted
from emblib.dynamic.saving import dumps
from emblib.dynamic.saving.entries import WEIGHT
from emblib.ops import autograd, hash, tbe
from emblib.ops import hash as initial
from emblib.ops.hash import Keys, Misses, tables_of
from emblib.optim import State
from emblib.specs import SLOTS, Constant, DynamicSpec, Precision
from emblib.tables import memory
from emblib.tables.locks import ModuleLock


class RowLayout:
    """The planes of some tables: `weight`, then the states of the optimizer. Numbers only.

    Args:
        specs: the tables.
        names: what they are called; first values of rows go by it.
        states: what the optimizer keeps.
        precision: dtypes of weights and states.
        beside: rows behind those of each table that no slot of the index has.
    """

    def __init__(
        self,
        specs: Sequence[DynamicSpec],
        names: Sequence[str],
        states: Sequence[State],
        precision: Precision,
        beside: int = 0,
    ) -> None:
        self.specs, self.beside = tuple(specs), beside
        self.planes = (WEIGHT, *(state.name for state in states))
        self._per_row = (False, *(state.per_row for state in states))
        kept = (torch.float32 if state.per_row else precision.states for state in states)
        self.dtypes = (precision.weights, *kept)
        self._streams = [zlib.crc32(name.encode()) for name in names]
        self.total_rows = sum(spec.rows + beside for spec in specs)
        self._first_rows, self._first_elements = [0], [0]
        for spec in specs:
            rows = spec.rows + beside
            self._first_rows.append(self._first_rows[-1] + rows)
            self._first_elements.append(self._first_elements[-1] + rows * spec.dim)
        # Rows that are read in place of a table's begin at 16 bytes, at least 8.
        self.stride = -(-max((spec.dim for spec in specs), default=0) // 4) * 4

    def width(self, table: int, plane: int) -> int:
        """Elements of a row."""
        return 1 if self._per_row[plane] else self.specs[table].dim

    def per_row(self, plane: int) -> bool:
        """Whether a row has one number there."""
        return self._per_row[plane]

    def row_bytes(self, table: int) -> int:
        """Bytes of a row in all planes together."""
        return sum(
            self.width(table, plane) * dtype.itemsize for plane, dtype in enumerate(self.dtypes)
        )

    def first(self, table: int, plane: int) -> int:
        """The element of a plane at which a table begins."""
        return (self._first_rows if self._per_row[plane] else self._first_elements)[table]

    def first_row(self, table: int) -> int:
        """The linear row of a table's row 0."""
        return self._first_rows[table]

    def feature(self, table: int, column: int) -> tuple[int, ...]:
        """A row of the `features` tensor, for output columns from `column` on."""
        spec, first = self.specs[table], self._first_rows[table]
        return (
            *(self._first_elements[table], first, spec.rows + self.beside, spec.dim),
            *(column, 0, first, self.stride),
        )

    def allocate(self, device: torch.device) -> list[Tensor]:
        """The planes, in zeros."""
        used = sum(spec.buckets for spec in self.specs) * SLOTS
        firsts = (
            self._first_rows if per_row else self._first_elements for per_row in self._per_row
        )
        return [
            memory.reserve(first[-1], dtype, device, used / max(self.total_rows, 1))
            for first, dtype in zip(firsts, self.dtypes, strict=True)
        ]

    def use(self, planes: Sequence[Tensor], table: int, before: int, now: int) -> None:
        """A table is about to have `now` rows in use, it had `before`."""
        for number, plane in enumerate(planes):
            width = self.width(table, number)
            memory.use(plane, self.first(table, number), before * width, now * width)

    def views(self, planes: Sequence[Tensor], table: int) -> dict[str, Tensor]:
        """The rows of a table by plane, `[rows, dim]` or `[rows]`, in use or not."""
        spec, views = self.specs[table], {}
        for number, (name, plane) in enumerate(zip(self.planes, planes, strict=True)):
            first, width = self.first(table, number), self.width(table, number)
            part = plane[first : first + spec.rows * width]
            views[name] = part if self._per_row[number] else part.view(spec.rows, spec.dim)
        return views

    def moves(self, device: torch.device) -> Tensor:
        """What `ValueRows` needs to know."""
        places = [
            [
                (self.first(t, p) * dtype.itemsize, self.width(t, p) * dtype.itemsize)
                for p, dtype in enumerate(self.dtypes)
            ]
            for t in range(len(self.specs))
        ]
        return self._tensor(places, 2, torch.int64, device)

    def initial_layout(self, device: torch.device) -> Tensor:
        """Where `initial_rows_` writes."""
        places = [
            [
                (
                    *(self.first(t, p), self.width(t, p), spec.rows + self.beside),
                    *(self.width(t, p), self._streams[t]),
                )
                for p in range(len(self.planes))
            ]
            for t, spec in enumerate(self.specs)
        ]
        return self._tensor(places, 5, torch.int64, device)

    def initial_rules(self, device: torch.device) -> Tensor:
        """What `initial_rows_` writes."""
        rules = [
            [
                initial.rule_of(Constant(spec.initial_state) if p else spec.initializer, spec)
                for p in range(len(self.planes))
            ]
            for spec in self.specs
        ]
        return self._tensor(rules, 7, torch.float64, device)

    def beside_layout(self, rows: int, device: torch.device) -> Tensor:
        """Where `initial_rows_` writes rows that are read in place of a table's: row by miss."""
        places = [
            [(0, self.stride, rows, spec.dim, stream)]
            for spec, stream in zip(self.specs, self._streams, strict=True)
        ]
        return self._tensor(places, 5, torch.int64, device)

    def _tensor(
        self, rows: Sequence[Any], fields: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        planes = len(rows[0]) if rows else 0
        return torch.tensor(rows, dtype=dtype).view(len(self.specs), planes, fields).to(device)

    def snapshot(self, planes: Sequence[Tensor], capacities: Sequence[int]) -> list[list[Tensor]]:
        """Copies of the rows in use, by table and plane."""
        return [
            [view[:rows].detach().clone() for view in self.views(planes, t).values()]
            for t, rows in enumerate(capacities)
        ]

    def check_snapshot(self, snapshot: Any, capacities: Sequence[int]) -> None:
        """Raise ValueError unless `restore` takes a snapshot of tables of these rows in use."""
        tables = dumps.check_list("rows", snapshot, len(self.specs), "table")
        for t, (parts, rows) in enumerate(zip(tables, capacities, strict=True)):
            what = f"rows of table {t}"
            parts = dumps.check_list(what, parts, len(self.planes), f"entry of {self.planes}")
            for p, (name, dtype) in enumerate(zip(self.planes, self.dtypes, strict=True)):
                shape = (rows,) if self._per_row[p] else (rows, self.width(t, p))
                dumps.check_tensor(f"{name} of table {t}", parts[p], dtype, shape)

    def restore(self, planes: Sequence[Tensor], snapshot: Sequence[Sequence[Tensor]]) -> None:
        """Write the rows of a snapshot into planes none of which is in use yet."""
        for t, parts in enumerate(snapshot):
            views = self.views(planes, t).values()
            for part in parts[:1]:
                self.use(planes, t, 0, part.shape[0])
            for view, part in zip(views, parts, strict=True):
                view[: part.shape[0]] = part.to(view.device)

    def nbytes(self, capacities: Sequence[int]) -> Iterator[int]:
        """Bytes in use, plane by plane."""
        for plane, dtype in enumerate(self.dtypes):
            yield sum(
                rows * self.width(t, plane) * dtype.itemsize for t, rows in enumerate(capacities)
            )


def check_capacity(specs: Sequence[DynamicSpec]) -> None:
    """Raise ValueError where the tables have more slots than an index can number."""
    for spec in specs:
        if spec.max_buckets >= 1 << 31:
            raise ValueError(
                f"a table has fewer than 2^31 buckets of {SLOTS} rows, got {spec.max_buckets}; "
                "choose a smaller capacity"
            )


class TrainingHook(Protocol):
    """What takes part in the training steps of a module, beside its index and its rows.

    `admit` comes before keys get places, `leaving` when they have them, with the rows of keys that
    gave way as they were, and `arriving` once all new rows hold their first values.
    """

    def admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """Which of the missing keys may have a place, bool `[L]` by miss, or None for all."""

    def leaving(self, keys: Keys, inserted: Inserted) -> None:
        """Keys gave way (`inserted.placed.evicted`); the rows of new keys are still theirs."""

    def arriving(self, keys: Keys, inserted: Inserted) -> None:
        """New keys have their first values, which may be overwritten."""


class Reads(NamedTuple):
    """What the lookups of a batch read: rows of their tables, or rows beside them.

    `indices` int64 `[L]` with -1 for nothing (zeros); where `slots` int32 `[L]` is not -1, that row
    of `beside` is read in its place.
    """

    indices: Tensor
    slots: Tensor | None = None
    beside: Tensor | None = None


class Step:
    """A batch from its forward to its backward (the update hooks of `emblib.ops.autograd`).

    Rows move when a table grows, and keys leave. So what forward found is looked up again if the
    index has changed since: what has left in between is not updated, even if it has come again, and
    counted in `dropped_updates`. It watches the index while its graph exists, which may go backward
    again.
    """

    def __init__(
        self,
        lock: ModuleLock,
        index: HashIndex,
        keys: Keys,
        slots: Tensor,
        reads: Reads,
        lost: Tensor,
    ) -> None:
        self.lock = lock
        self._index, self._keys, self._slots, self._reads = index, keys, slots, reads
        self._version, self._lost = index.version, lost
        index.watch(self)
        self.batch: autograd.Lookup | None = None
        self.weighted = False  # whether sample weights get a gradient

    def is_stale(self) -> bool:
        """Whether rows may be elsewhere than forward found them."""
        return self._index.version != self._version

    def find(self) -> Tensor:
        """Where the rows are now."""
        return self._index.find(self._keys)

    def before_update(self) -> autograd.RowLocations:
        """The rows that are updated, and those that are read."""
        batch = self.batch
        assert batch is not None
        slots, indices = self.locate()
        groups = tbe.group(batch.features, slots, batch.offsets, batch.total_rows, batch.bag_layout)
        return autograd.RowLocations(groups, None, self._reads.slots, indices)

    def locate(self) -> tuple[Tensor, Tensor]:
        """Return where the rows of forward are now, -1 for none, and what its lookups read.

        Raises:
            RuntimeError: sample weights get a gradient, which needs a row that has left.
        """
        if not self.is_stale():
            return self._slots, self._reads.indices
        found = self.find()
        left = self._index.has_left(self._keys, found, self._version)
        slots = torch.where((self._slots < 0) | left, -1, found)
        lost = (self._slots >= 0) & (slots < 0)
        if self._reads.slots is not None:
            lost &= self._reads.slots < 0  # others were read beside the table
        if self.weighted and bool(lost.any()):
            raise RuntimeError(
                "the gradient of per_sample_weights needs the rows that forward read, but keys of "
                "the batch have left the table since; run backward before the next training forward"
            )
        self._lost += lost.sum()
        return slots, slots if self._reads.slots is None else self._where_read(slots)

    def _where_read(self, slots: Tensor) -> Tensor:
        assert self._reads.slots is not None
        return torch.where(self._reads.slots < 0, slots, 0)

    def after_update(self) -> None:
        """Nothing is left to do."""


class Reading:
    """A batch whose rows are read again in backward, and not updated."""

    def __init__(self, batch: autograd.Lookup, step: Step) -> None:
        self.lock = step.lock
        self._batch, self._step = batch, step
        step.weighted = True

    def before_update(self) -> autograd.RowLocations:
        """The rows that forward read, where they are now."""
        _, indices = self._step.locate()
        return autograd.RowLocations(
            autograd.groups_of(self._batch), None, self._batch.slots, indices
        )

    def after_update(self) -> None:
        """Nothing is left to do."""


class RowInitializer(nn.Module):
    """Writes the rows of new keys, and says what keys without a row read.

    Args:
        layout: of the rows.
        seed: of their values.
        device: where they are.
    """

    places: Tensor
    rules: Tensor
    missing: Tensor
    unadmitted_places: Tensor
    unadmitted_rules: Tensor

    def __init__(self, layout: RowLayout, seed: int, device: torch.device) -> None:
        super().__init__()
        self.seed = seed
        specs = layout.specs
        reads = [spec.admission.reads if spec.admission else None for spec in specs]
        self._drawn = any(initializer is not None for initializer in reads)
        self._zeros = not self._drawn and all(spec.missing == 0.0 for spec in specs)
        rules = [
            [initial.rule_of(Constant(spec.missing) if x is None else x, spec)]
            for spec, x in zip(specs, reads, strict=True)
        ]
        missing = torch.tensor([spec.missing for spec in specs]).view(-1, 1)
        missing = missing.expand(-1, layout.stride).to(layout.dtypes[0])
        self._stride = layout.stride
        for name, tensor in (
            ("places", layout.initial_layout(device)),
            ("rules", layout.initial_rules(device)),
            ("missing", missing.contiguous().to(device)),
            ("unadmitted_places", layout.beside_layout(0, device)),
            ("unadmitted_rules", torch.tensor(rules, dtype=torch.float64).view(-1, 1, 7)),
        ):
            self.register_buffer(name, tensor.to(device), persistent=False)

    def write_(self, planes: list[Tensor], keys: Keys, inserted: Inserted) -> None:
        """First values into the rows of the keys that found a place."""
        misses, placed = inserted.misses, inserted.placed
        assert misses is not None
        assert placed is not None
        initial.initial_rows_(
            *(planes, self.places, self.rules, keys.ids, misses.first, misses.ends),
            *(placed.slots, self.seed),
        )

    def reads(self, keys: Keys, inserted: Inserted) -> Reads:
        """What the lookups of a batch read."""
        slots = inserted.slots
        if self._zeros or inserted.misses is None:
            return Reads(slots)
        beside = torch.where(slots < 0, tables_of(keys), -1)
        rows = self.missing.view(-1)
        if self._drawn and inserted.placed is not None and slots.numel():
            status, groups = inserted.placed.status, inserted.misses.groups
            waiting = status == hash.NOT_ADMITTED
            rows = torch.cat([rows, self._draw(keys, inserted, waiting)])
            numbers = groups.clamp(min=0).long()
            drawn = (groups >= 0) & waiting[numbers]
            beside = torch.where(drawn, self.missing.size(0) + numbers, beside)
        return Reads(slots.where(slots >= 0, 0), beside.to(torch.int32), rows)

    def searched(self, keys: Keys, slots: Tensor) -> Reads:
        """What the lookups of a batch read that was only searched."""
        if self._zeros:
            return Reads(slots)
        beside = torch.where(slots < 0, tables_of(keys), -1).to(torch.int32)
        return Reads(slots.where(slots >= 0, 0), beside, self.missing.view(-1))

    def _draw(self, keys: Keys, inserted: Inserted, waiting: Tensor) -> Tensor:
        """Rows by miss, those of waiting keys drawn as their tables say."""
        assert inserted.misses is not None
        count = waiting.numel()
        rows = self.missing.new_zeros(count * self._stride)
        places = self.unadmitted_places.clone()
        places[:, :, 2].fill_(count)
        numbers = torch.arange(count, device=rows.device)
        initial.initial_rows_(
            *([rows], places, self.unadmitted_rules, keys.ids, inserted.misses.first),
            *(inserted.misses.ends, torch.where(waiting, numbers, -1), self.seed),
        )
        return rows
