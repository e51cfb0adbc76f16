"""Operators that map ids to the rows that pruning left in inference tables.

A table has an array or a hash map, or neither if its ids are rows. The array has the row of each
id, -1 for a pruned row. A slot of the hash map has an id and its row; id -1 marks a free slot. The
search for an id begins at the slot of its hash and goes slot by slot; slot 0 follows the last slot.
"""

import torch
from torch import Tensor

from emblib.compat.fbgemm_operators.checks import check
from emblib.compat.fbgemm_operators.registry import SymInt, operator
from emblib.compat.fbgemm_operators.remapping import mix, unsigned_modulo

_FREE = -1
_UINT32_MASK = 0xFFFFFFFF


def _first_slots(ids: Tensor, num_slots: Tensor) -> Tensor:
    """Return the slot at which the search for each id begins, by MurmurHash3's final mix.

    int32 ids are mixed in 32 bits, other ids in 64 bits.
    """
    if ids.dtype != torch.int32:
        return unsigned_modulo(mix(ids), num_slots)
    bits = ids.long() & _UINT32_MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = ((bits ^ (bits >> shift)) * factor) & _UINT32_MASK
    return (bits ^ (bits >> 16)) % num_slots


def _map_ranges(ids: Tensor, offsets: Tensor, map_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each id, the first entry of its table's map and the map's number of entries.

    `offsets` are `[T * B + 1]`, `map_offsets` `[T + 1]`. Others raise RuntimeError.
    """
    num_tables = map_offsets.numel() - 1
    check(
        ids.dtype == offsets.dtype and num_tables > 0 and (offsets.numel() - 1) % num_tables == 0,
        f"offsets must have B * T + 1 entries for T = {num_tables} tables and the dtype of "
        f"indices, got {offsets.numel()} of {offsets.dtype} for {ids.dtype}",
    )
    batch_size = (offsets.numel() - 1) // num_tables
    ids_per_table = offsets[::batch_size].diff() if batch_size else offsets.new_zeros(num_tables)
    table_of_id = torch.arange(num_tables, device=ids.device)
    table_of_id = table_of_id.repeat_interleave(ids_per_table, output_size=ids.numel())
    starts = map_offsets.to(ids.device).long()
    return starts[table_of_id], starts.diff()[table_of_id]


def _map_by_array(ids: Tensor, array_starts: Tensor, array_sizes: Tensor, rows: Tensor) -> Tensor:
    """Return the row of each id, -1 for ids outside the array of their table.

    Args:
        ids: int32 or int64 `[L]`.
        array_starts: first entry of the array of each id, `[L]`.
        array_sizes: entries of the array of each id, `[L]`; 0 for ids that stay as they are.
        rows: the arrays, concatenated.
    """
    if not rows.numel():
        return ids.clone()
    is_in_array = (ids >= 0) & (ids < array_sizes)
    mapped_rows = rows[torch.where(is_in_array, array_starts + ids, 0)].to(ids.dtype)
    return torch.where(array_sizes > 0, torch.where(is_in_array, mapped_rows, _FREE), ids)


@operator("embedding_bag_rowwise_prune")
def embedding_bag_rowwise_prune(
    weight: Tensor,
    indicator: Tensor,
    threshold: float,
    compressed_indices_dtype: torch.dtype,
    abs: bool = True,
    min_num_rows: SymInt = 0,
    min_save_ratio: float | None = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the rows whose indicator exceeds a threshold, and the map of all rows to them.

    With `abs` the absolute value of the indicator counts. At least `min_num_rows` rows stay, if
    there are as many. Pruning must pay: `min_num_rows` rows and the map must need less than
    `min_save_ratio` of the memory of `weight`, at 4 bytes per number. Otherwise all rows and a map
    of the single entry 0 are returned. `min_save_ratio=None` prunes without this test.

    Raises:
        RuntimeError: the threshold is negative, or the indicator does not have one entry per row.
    """
    check(threshold >= 0, f"threshold must not be negative, got {threshold}")
    check(indicator.numel() == len(weight), f"indicator must have {len(weight)} entries")
    is_kept = (indicator.abs() if abs else indicator) > threshold
    num_missing = min(min_num_rows, len(weight)) - int(is_kept.sum())
    if num_missing > 0:  # FBGEMM keeps the last rows below the threshold, so that enough stay
        is_kept[(~is_kept).nonzero()[-num_missing:, 0]] = True
    num_columns, dtype = weight.size(1), compressed_indices_dtype
    if min_save_ratio is not None and not (
        4 * (len(weight) + min_num_rows * num_columns) < min_save_ratio * 4 * weight.numel()
    ):
        return weight, torch.zeros(1, dtype=dtype, device="cpu")
    rows = torch.where(is_kept, is_kept.cumsum(0) - 1, _FREE)
    return weight[is_kept], rows.to(dtype)


@operator("pruned_array_lookup")
def pruned_array_lookup(
    indices: Tensor, offsets: Tensor, index_remappings: Tensor, index_remappings_offsets: Tensor
) -> Tensor:
    """Return the row of each id by the arrays of the tables.

    Ids outside their array get row -1; ids of a table without entries stay as they are. `offsets`
    are `[T * B + 1]` in the dtype of `indices`. `index_remappings` are the concatenated arrays; the
    array of table t begins at entry `index_remappings_offsets[t]`.
    """
    array_starts, array_sizes = _map_ranges(indices, offsets, index_remappings_offsets)
    return _map_by_array(indices, array_starts, array_sizes, index_remappings)


@operator("pruned_hashmap_insert", writes="hash_table")
def pruned_hashmap_insert(
    indices: Tensor,
    dense_indices: Tensor,
    offsets: Tensor,
    hash_table: Tensor,
    hash_table_offsets: Tensor,
) -> None:
    """Insert ids and their rows one after the other, except for ids of row -1.

    Ids of a table without slots are ignored.

    Args:
        indices: ids, distinct in each table.
        dense_indices: row of each id.
        offsets: `[T * B + 1]`.
        hash_table: slots `[S, 2]` of all tables; written.
        hash_table_offsets: first slot of each table, and the end.

    Raises:
        RuntimeError: offsets do not fit, or the slots of a table are full; nothing is written.
    """
    map_starts, capacities = _map_ranges(indices, offsets, hash_table_offsets)
    is_stored = (dense_indices != _FREE) & (capacities > 0)
    start_slots = _first_slots(indices, capacities.clamp(min=1))
    entries = hash_table.tolist()
    insertions = torch.stack(
        [indices.long(), dense_indices.long(), map_starts, capacities, start_slots]
    )[:, is_stored]
    for id_, row, map_start, num_slots, start_slot in insertions.t().tolist():
        for step in range(num_slots):
            position = map_start + (start_slot + step) % num_slots
            if entries[position][0] in (_FREE, id_):
                entries[position] = [id_, row]
                break
        else:
            check(False, f"a hash map of {num_slots} slots is full: give it more")
    hash_table.copy_(
        torch.tensor(entries, dtype=hash_table.dtype, device="cpu").view_as(hash_table)
    )


@operator("pruned_hashmap_lookup")
def pruned_hashmap_lookup(
    indices: Tensor, offsets: Tensor, hash_table: Tensor, hash_table_offsets: Tensor
) -> Tensor:
    """Return the row of each id, -1 for ids that are not in the map.

    Ids of a table without slots are returned as they are. The arguments are as in
    `pruned_hashmap_insert`. Waits for a GPU.
    """
    map_starts, capacities = _map_ranges(indices, offsets, hash_table_offsets)
    rows = torch.where(capacities > 0, torch.full_like(indices, _FREE), indices)
    undecided = torch.arange(indices.numel(), device=indices.device)[capacities > 0]
    start_slots = _first_slots(indices, capacities.clamp(min=1))
    for step in range(int(capacities.max()) if capacities.numel() else 0):
        if not undecided.numel():
            break
        entries = hash_table[
            map_starts[undecided] + (start_slots[undecided] + step) % capacities[undecided]
        ]
        is_hit = entries[:, 0] == indices[undecided]
        rows[undecided[is_hit]] = entries[is_hit, 1].to(indices.dtype)
        undecided = undecided[
            ~is_hit & (entries[:, 0] != _FREE) & (step + 1 < capacities[undecided])
        ]
    return rows


class PrunedMap:
    """Maps from ids to rows, one per table, as FBGEMM's class `PrunedMapCPU`."""

    def insert(self, indices: Tensor, dense_indices: Tensor, offsets: Tensor, T: int) -> None:
        """Set the row of each id of `T` tables, and discard the maps of earlier calls.

        `indices` are ids `[L]`; `dense_indices` are their rows `[L]`, -1 for pruned rows; `offsets`
        are `[T * B + 1]`.
        """
        num_slots = 2 * offsets[:: max((offsets.numel() - 1) // T, 1)].long().diff()
        # A table without slots would map every id to itself.
        map_offsets = torch.nn.functional.pad(num_slots.clamp(min=1).cumsum(0), (1, 0))
        self._map = torch.full((int(map_offsets[-1]), 2), _FREE, device="cpu"), map_offsets
        pruned_hashmap_insert(indices, dense_indices, offsets, *self._map)

    def lookup(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Return the row of each id, -1 for ids without one; call it after `insert`."""
        return pruned_hashmap_lookup(indices, offsets, *self._map)
