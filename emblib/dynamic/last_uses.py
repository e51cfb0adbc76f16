"""Thresholds of admission and times to live per feature, for tables that several features read.

A missing key is admitted once its count reaches the least threshold (`PerFeature`) of the features
that use it in the batch.

A key is alive as long as some feature that used it did so within the ttl of that feature. The ttls
of a table in ascending order are its *levels*. The stamp of a key is its last use by any feature,
level 0. For each further level the table records the last use by a feature of that level or above,
in 8 bytes per row. A key expires if its last use of each level is too old for the ttl of the level.
Tables whose features agree have one level and no further memory. A use writes the tick of its
batch, so the order within a batch does not matter.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from emblib.columns import HashCounter, HashEntryColumn
from emblib.dynamic.hash_index import HashIndex
from emblib.ops.effects import Effects
from emblib.ops.hash import InsertedBatch, Keys, segments_of, tables_of
from emblib.specs import DynamicSpec, PerFeature
from emblib.tables import memory


def check_features(specs: Sequence[DynamicSpec], feature_tables: Sequence[int]) -> None:
    """Raise ValueError for a table with values per feature that has another number of features."""
    for t, spec in enumerate(specs):
        num_features = list(feature_tables).count(t)
        threshold = None if spec.admission is None else spec.admission.threshold
        for name, value in (("ttl", spec.ttl), ("threshold", threshold)):
            if isinstance(value, PerFeature) and len(value.values) != num_features:
                raise ValueError(
                    f"{name} of table {spec.name or t!r} has {len(value.values)} values, and "
                    f"{num_features} features read the table: give one per feature, in their order"
                )


def values_by_feature(by_table: Sequence[Any], feature_tables: Sequence[int]) -> list[Any]:
    """Return the value of each feature, from one value or `PerFeature` per table.

    `check_features` must have accepted them: a `PerFeature` has a value for each feature.
    """
    values = [
        iter(value.values) if isinstance(value, PerFeature) else repeat(value) for value in by_table
    ]
    return [next(values[table]) for table in feature_tables]


class LastUses:
    """The last uses of the levels above the first, by slot of each table.

    The owner of the tables holds its lock around every call.

    Args:
        specs: the tables.
        feature_tables: the table of each feature.
        device: the device of the tables.

    Attributes:
        num_further_levels: number of levels above the first, by table.
        buffer: int64, a `[rows, width]` block per table, 0 for no use, then a spare element.
        layout: int64 `[T, 1, 2]`, `buffer` as a row buffer, see `RowBuffers.layout`.
    """

    def __init__(
        self, specs: Sequence[DynamicSpec], feature_tables: Sequence[int], device: torch.device
    ) -> None:
        self._specs, self._feature_tables = tuple(specs), list(feature_tables)
        self.num_further_levels = [len(spec.lifetimes) - 1 for spec in specs]
        self._first_elements = [0]
        for spec, num_levels in zip(specs, self.num_further_levels, strict=True):
            self._first_elements.append(self._first_elements[-1] + spec.rows * num_levels)
        num_elements = self._first_elements[-1] + 1  # with a spare one
        self.buffer = memory.reserve(num_elements, torch.int64, device)
        element_bytes = self.buffer.itemsize
        layout = [
            [[first_element * element_bytes, num_levels * element_bytes]]
            for first_element, num_levels in zip(
                self._first_elements, self.num_further_levels, strict=False
            )
        ]
        self.layout = torch.tensor(layout, device=device)
        self._table_layout = torch.tensor(
            list(zip(self._first_elements, self.num_further_levels, strict=False)), device=device
        ).view(-1, 2)
        ttls = values_by_feature([spec.ttl for spec in specs], feature_tables)
        levels = [
            specs[table].lifetimes.index(ttl)
            for table, ttl in zip(feature_tables, ttls, strict=True)
        ]
        self._levels = torch.tensor(levels, dtype=torch.int64, device=device)

    def view(self, table: int) -> Tensor:
        """Return the last uses of a table by slot, int64 `[rows, levels - 1]`, as a view."""
        num_rows, num_levels = self._specs[table].rows, self.num_further_levels[table]
        return self.buffer[self._first_elements[table] : self._first_elements[table + 1]].view(
            num_rows, num_levels
        )

    def note(self, index: HashIndex, keys: Keys, inserted: InsertedBatch) -> None:
        """Write the tick of an inserted batch, `index.clock`, as the last use of its keys.

        The uses of evicted keys in their slots are cleared. Repeating the call before the next
        batch changes nothing.
        """
        tables, levels = tables_of(keys), self._levels[segments_of(keys)]
        slots = inserted.slots
        first_element, num_levels = self._table_layout[tables].unbind(1)
        first_uses, spare_element = first_element + slots * num_levels, self.buffer.numel() - 1
        is_new = torch.zeros_like(slots, dtype=torch.bool)
        if inserted.misses is not None and slots.numel():
            is_new = inserted.misses.groups >= 0
        for level in range(1, max(self.num_further_levels) + 1):
            # Positions without this level write to the spare element.
            has_level = (slots >= 0) & (level <= num_levels)
            positions = first_uses + level - 1
            self.buffer.index_fill_(0, torch.where(has_level & is_new, positions, spare_element), 0)
            is_used = has_level & (levels >= level)
            positions = torch.where(is_used, positions, spare_element)
            self.buffer.scatter_(0, positions, index.clock.expand(positions.numel()))

    def expire(
        self,
        index: HashIndex,
        table: int,
        slots: slice,
        first_alive_ticks: Sequence[int],
        effects: Effects,
    ) -> Tensor:
        """Remove the keys whose last use of every level is too old; return them, int64 `[n]`.

        Args:
            index: the keys.
            table: number of the table.
            slots: slots of the table to search; those beyond its capacity are ignored.
            first_alive_ticks: first tick of use with which a key is alive, by level.
            effects: native calls that were made before an interruption.

        The host waits for the device.
        """
        entries = index.table_entries(table)[slots]
        stamps = entries[:, HashEntryColumn.STAMP]
        is_old = (index.table_tags(table)[slots] != 0) & (stamps < first_alive_ticks[0])
        uses = self.view(table)[slots][: is_old.numel()]
        for level, tick in enumerate(first_alive_ticks[1:]):
            is_old &= uses[:, level] < tick
        # A copy: after an interruption the keys may be gone already.
        old_keys = entries[is_old, HashEntryColumn.KEY]
        keys: Tensor = effects.call_once(torch.ops.aten.clone.default, old_keys)
        index.erase(Keys.from_ids(keys, table), effects)
        counts = keys.new_zeros(index.counters.shape)
        counts[table, HashCounter.EXPIRED] = keys.numel()
        counts[table, HashCounter.ERASED] = -keys.numel()
        effects.call_once(torch.ops.aten.add_.Tensor, index.counters, counts)
        return keys

    def snapshot(self, capacities: Sequence[int]) -> list[Tensor]:
        """Copy the last uses of the slots in use, by table, to the CPU."""
        return [self.view(t)[:num_rows].cpu().clone() for t, num_rows in enumerate(capacities)]

    def restore(self, snapshot: Sequence[Tensor]) -> None:
        """Write what `snapshot` returned for tables of the same levels and rows."""
        for t, uses in enumerate(snapshot):
            self.view(t)[: uses.size(0)] = uses.to(self.buffer.device)

    def nbytes(self, capacities: Sequence[int]) -> int:
        """Return the bytes of the slots in use; `capacities` has their number by table."""
        sizes = zip(capacities, self.num_further_levels, strict=True)
        return self.buffer.itemsize * sum(num_rows * num_levels for num_rows, num_levels in sizes)

    def copy_to(self, device: torch.device, capacities: Sequence[int]) -> "LastUses":
        """Return a copy on a device; `capacities` has the number of rows in use by table."""
        return _rebuild(self._specs, self._feature_tables, device, self.snapshot(capacities))

    def only_in_use(self, capacities: Sequence[int]) -> "LastUses":
        """Return an object whose copies and pickles are `LastUses` of the slots in use alone."""
        return _UsesOfSlotsInUse(self, capacities)  # type: ignore[return-value]


class _UsesOfSlotsInUse:
    """Replacement of `LastUses` in a state to copy or pickle, see `LastUses.only_in_use`."""

    def __init__(self, uses: LastUses, capacities: Sequence[int]) -> None:
        self._uses, self._capacities = uses, list(capacities)

    def __reduce__(self) -> tuple[Any, ...]:
        uses = self._uses
        rows = uses.snapshot(self._capacities)
        return _rebuild, (uses._specs, uses._feature_tables, str(uses.buffer.device), rows)  # noqa: SLF001 - of the same file

    def __deepcopy__(self, memo: dict[int, object]) -> LastUses:
        return self._uses.copy_to(self._uses.buffer.device, self._capacities)


def _rebuild(
    specs: Sequence[DynamicSpec],
    feature_tables: Sequence[int],
    device: torch.device | str,
    snapshot: Sequence[Tensor],
) -> LastUses:
    uses = LastUses(specs, feature_tables, torch.device(device))
    uses.restore(snapshot)
    return uses
