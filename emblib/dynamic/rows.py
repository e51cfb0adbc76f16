"""Where the rows of dynamic tables lie: weights and optimizer states, by slot of the index.

Each kind of value is one flat tensor, a plane, with the tables one after the other, each with room
for its capacity; how much of that is in use follows the index (see `emblib.dynamic.arena`). This is
the layout of `emblib.ops.tbe`, so that lookups and updates are those of plain tables.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.dynamic import arena
from emblib.dynamic.saving import snapshots
from emblib.dynamic.saving.entries import WEIGHT
from emblib.dynamic_specs import SLOTS, Constant, DynamicSpec
from emblib.ops import initial
from emblib.optim import State
from emblib.specs import Precision


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
            arena.reserve(first[-1], dtype, device, used / max(self.total_rows, 1))
            for first, dtype in zip(firsts, self.dtypes, strict=True)
        ]

    def use(self, planes: Sequence[Tensor], table: int, before: int, now: int) -> None:
        """A table is about to have `now` rows in use, it had `before`."""
        for number, plane in enumerate(planes):
            width = self.width(table, number)
            arena.use(plane, self.first(table, number), before * width, now * width)

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
        tables = snapshots.check_list("rows", snapshot, len(self.specs), "table")
        for t, (parts, rows) in enumerate(zip(tables, capacities, strict=True)):
            what = f"rows of table {t}"
            parts = snapshots.check_list(what, parts, len(self.planes), f"entry of {self.planes}")
            for p, (name, dtype) in enumerate(zip(self.planes, self.dtypes, strict=True)):
                shape = (rows,) if self._per_row[p] else (rows, self.width(t, p))
                snapshots.check_tensor(f"{name} of table {t}", parts[p], dtype, shape)

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
        if spec.most_buckets >= 1 << 31:
            raise ValueError(
                f"a table has fewer than 2^31 buckets of {SLOTS} rows, got {spec.most_buckets}; "
                "choose a smaller capacity"
            )
