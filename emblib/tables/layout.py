"""Where each table of a module lies: its memory tier, its place there, and its linear row ids.

The pure part of `TableBatchedEmbeddingBags`: numbers only, no memory. `csrc/core/dtype.h` (Feature)
and `csrc/core/place.h` are its other half.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from emblib.specs import Placement, TableSpec

DEVICE, HOST, DISK, CACHE = range(4)  # memory tiers, in the order of the `weights` of an op
TIERS = 4

_TIER_OF = {
    Placement.DEVICE: DEVICE,
    Placement.HOST: DEVICE,
    Placement.MANAGED: HOST,
    Placement.MANAGED_CACHING: HOST,
    Placement.DISK: DISK,
}
# Linear row ids ascend in this order: cached rows are the last ones, those on disk the very last.
_ORDER = {
    Placement.DEVICE: 0,
    Placement.HOST: 0,
    Placement.MANAGED: 1,
    Placement.MANAGED_CACHING: 2,
    Placement.DISK: 3,
}


class TablePlace(NamedTuple):
    """A table in its tier: first element, first linear row, rows, dim, tier, first row state."""

    weight_offset: int
    row_base: int
    rows: int
    dim: int
    tier: int
    state_base: int
    cache_stride: int

    def feature(self, column: int) -> tuple[int, ...]:
        """A row of the `features` tensor, for output columns from `column` on."""
        return (*self[:4], column, *self[4:])


@dataclass(frozen=True)
class TableLayout:
    """The places of the tables of a module, and how much each tier holds."""

    places: tuple[TablePlace, ...]
    elements: tuple[int, ...]  # by tier, without the cache
    rows: tuple[int, ...]  # by tier, without the cache
    total_rows: int
    first_cached_row: int
    first_disk_row: int
    cache_stride: int  # elements between the rows of the cache; 0 if nothing is cached

    @property
    def cached_rows(self) -> int:
        """Rows of all tables that stand behind a cache."""
        return self.total_rows - self.first_cached_row

    def by_row(self) -> list[tuple[int, ...]]:
        """The places in `features` format by ascending linear row."""
        return [p.feature(0) for p in sorted(self.places, key=lambda p: (p.row_base, p.rows))]


def lay_out(tables: Sequence[TableSpec]) -> TableLayout:
    """Tables of a tier one after the other in the order given, rows numbered by placement."""
    elements, rows = [0] * (TIERS - 1), [0] * (TIERS - 1)
    cached = [spec.dim for spec in tables if spec.placement.cached]
    stride = -(-max(cached, default=0) // 4) * 4  # rows of the cache begin at 16 bytes, at least 8
    starts: dict[int, tuple[int, int]] = {}
    for t, spec in enumerate(tables):
        tier = _TIER_OF[spec.placement]
        starts[t] = elements[tier], rows[tier]
        elements[tier] += spec.rows * spec.dim
        rows[tier] += spec.rows
    places: dict[int, TablePlace] = {}
    row_base = 0
    first: dict[int, int | None] = {2: None, 3: None}
    for t in sorted(starts, key=lambda t: _ORDER[tables[t].placement]):
        spec = tables[t]
        order = _ORDER[spec.placement]
        if order in first and first[order] is None:
            first[order] = row_base
        offset, state_base = starts[t]
        places[t] = TablePlace(
            weight_offset=offset,
            row_base=row_base,
            rows=spec.rows,
            dim=spec.dim,
            tier=_TIER_OF[spec.placement],
            state_base=state_base,
            cache_stride=stride if spec.placement.cached else 0,
        )
        row_base += spec.rows
    first_disk = row_base if first[3] is None else first[3]
    return TableLayout(
        places=tuple(places[t] for t in range(len(tables))),
        elements=tuple(elements),
        rows=tuple(rows),
        total_rows=row_base,
        first_cached_row=first_disk if first[2] is None else first[2],
        first_disk_row=first_disk,
        cache_stride=stride,
    )
