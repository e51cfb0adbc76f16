"""Operators that map ids to the rows of pruned inference tables.

A table has an array or a hash map, or neither if its ids are rows. The array has the row of each
id, or -1 if the row was pruned. A slot of the hash map has an id and its row; id -1 marks a free
slot. The search for an id begins at the slot of its hash and continues slot by slot; slot 0 follows
the last slot.
"""

import torch
from torch import Tensor

from emblib.compat.fbgemm_operators.checks import check
from emblib.compat.fbgemm_operators.registry import SymInt, operator
from emblib.compat.fbgemm_operators.remapping import mix, unsigned_modulo

_NO_ROW = -1  # row of an id that was pruned
_FREE_KEY = -1  # key of a free slot of a map
_UINT32_MASK = 0xFFFFFFFF


def _first_slots(ids: Tensor, num_slots: Tensor) -> Tensor:
    """Return the slot at which the search for each id begins, `[L]`: a hash modulo `num_slots`.

    The hash is MurmurHash3's final mix, of 32 bits for int32 ids, of 64 bits for others.
    """
    if ids.dtype != torch.int32:
        return unsigned_modulo(mix(ids), num_slots)
    bits = ids.long() & _UINT32_MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = ((bits ^ (bits >> shift)) * factor) & _UINT32_MASK
    return (bits ^ (bits >> 16)) % num_slots


def _map_ranges(ids: Tensor, offsets: Tensor, map_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each id, the first entry of its table's map and the map's number of entries.

    Args:
        ids: int32 or int64 `[L]`.
        offsets: `[T * B + 1]`, in the dtype of the ids.
        map_offsets: first entry of the map of each table, and the end, `[T + 1]`.

    Raises:
        RuntimeError: `offsets` have another dtype, or do not fit T tables.
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
    """Return the row of each id, -1 for an id outside the array of its table.

    Args:
        ids: int32 or int64 `[L]`.
        array_starts: first entry of the array of each id, `[L]`.
        array_sizes: number of entries of this array, `[L]`; 0 for ids that stay as they are.
        rows: the arrays, concatenated.
    """
    if not rows.numel():
        return ids.clone()
    is_in_array = (ids >= 0) & (ids < array_sizes)
    mapped_rows = rows[torch.where(is_in_array, array_starts + ids, 0)].to(ids.dtype)
    return torch.where(array_sizes > 0, torch.where(is_in_array, mapped_rows, _NO_ROW), ids)


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
    """Return the rows whose indicator exceeds a threshold, and their new numbers.

    Args:
        weight: rows `[N, D]`.
        indicator: importance of each row, `[N]`.
        threshold: rows above it stay.
        compressed_indices_dtype: dtype of the new numbers.
        abs: whether the absolute value of the indicator is compared.
        min_num_rows: number of rows that stay in any case, if there are as many.
        min_save_ratio: share of the memory of `weight` below which `min_num_rows` rows and the new
            numbers must remain, counted as 4 bytes per number; None for no such condition.

    Returns:
        the rows that stay, and for each old row its new number or -1, `[N]`. If the condition does
        not hold, all rows and the single number 0 are returned.

    Raises:
        RuntimeError: the threshold is negative, or the indicator does not have one entry per row.
    """
    check(threshold >= 0, f"threshold must not be negative, got {threshold}")
    check(indicator.numel() == len(weight), f"indicator must have {len(weight)} entries")
    is_kept = (indicator.abs() if abs else indicator) > threshold
    num_missing = min(min_num_rows, len(weight)) - int(is_kept.sum())
    if num_missing > 0:  # as in FBGEMM, the last rows below the threshold stay, too
        is_kept[(~is_kept).nonzero()[-num_missing:, 0]] = True
    num_columns = weight.size(1)
    if min_save_ratio is not None and not (
        4 * (len(weight) + min_num_rows * num_columns) < min_save_ratio * 4 * weight.numel()
    ):
        return weight, torch.zeros(1, dtype=compressed_indices_dtype, device="cpu")
    rows = torch.where(is_kept, is_kept.cumsum(0) - 1, _NO_ROW)
    return weight[is_kept], rows.to(compressed_indices_dtype)


@operator("pruned_array_lookup")
def pruned_array_lookup(
    indices: Tensor, offsets: Tensor, index_remappings: Tensor, index_remappings_offsets: Tensor
) -> Tensor:
    """Return the row of each id by the arrays of the tables, `[L]`.

    An id outside its array gets row -1. An id of a table without an array stays as it is.

    Args:
        indices: ids, int32 or int64 `[L]`.
        offsets: `[T * B + 1]`, in the dtype of `indices`.
        index_remappings: the arrays of all tables, concatenated.
        index_remappings_offsets: first entry of the array of each table, and the end, `[T + 1]`.

    Raises:
        RuntimeError: `offsets` have another dtype, or do not fit T tables.
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
    """Insert ids and their rows into the hash maps, in order. Waits for a GPU.

    Ids of row -1, and ids of a table without slots, are not inserted. The row of an id that is in
    the map is replaced.

    Args:
        indices: ids, int32 or int64 `[L]`.
        dense_indices: row of each id, `[L]`; -1 if the row was pruned.
        offsets: `[T * B + 1]`, in the dtype of `indices`.
        hash_table: slots of all tables, `[S, 2]`; written.
        hash_table_offsets: first slot of each table, and the end, `[T + 1]`.

    Raises:
        RuntimeError: `offsets` have another dtype or do not fit T tables, or the slots of a table
            are full; nothing is written.
    """
    map_starts, capacities = _map_ranges(indices, offsets, hash_table_offsets)
    is_stored = (dense_indices != _NO_ROW) & (capacities > 0)
    start_slots = _first_slots(indices, capacities.clamp(min=1))
    entries = hash_table.tolist()
    insertions = torch.stack(
        [indices.long(), dense_indices.long(), map_starts, capacities, start_slots]
    )[:, is_stored]
    for id_, row, map_start, num_slots, start_slot in insertions.t().tolist():
        for step in range(num_slots):
            position = map_start + (start_slot + step) % num_slots
            if entries[position][0] in (_FREE_KEY, id_):
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
    """Return the row of each id, `[L]`, -1 for ids that are not in the map. Waits for a GPU.

    An id of a table without slots stays as it is. Arguments and errors are as in
    `pruned_hashmap_insert`.
    """
    map_starts, capacities = _map_ranges(indices, offsets, hash_table_offsets)
    rows = torch.where(capacities > 0, torch.full_like(indices, _NO_ROW), indices)
    open_searches = torch.arange(indices.numel(), device=indices.device)[capacities > 0]
    start_slots = _first_slots(indices, capacities.clamp(min=1))
    for step in range(int(capacities.max()) if capacities.numel() else 0):
        if not open_searches.numel():
            break
        entries = hash_table[
            map_starts[open_searches]
            + (start_slots[open_searches] + step) % capacities[open_searches]
        ]
        is_hit = entries[:, 0] == indices[open_searches]
        rows[open_searches[is_hit]] = entries[is_hit, 1].to(indices.dtype)
        open_searches = open_searches[
            ~is_hit & (entries[:, 0] != _FREE_KEY) & (step + 1 < capacities[open_searches])
        ]
    return rows


class PrunedMap:
    """Hash maps from ids to rows, one per table, with the interface of FBGEMM's `PrunedMapCPU`."""

    def insert(self, indices: Tensor, dense_indices: Tensor, offsets: Tensor, T: int) -> None:
        """Make new maps of `T` tables, which replace those of an earlier call.

        Args:
            indices: ids, int32 or int64 `[L]`.
            dense_indices: row of each id, `[L]`; -1 if the row was pruned.
            offsets: `[T * B + 1]`, in the dtype of `indices`.
            T: number of tables, at least 1; else RuntimeError is raised.
        """
        check(T > 0, f"T must be > 0, got {T}")
        num_slots = 2 * offsets[:: max((offsets.numel() - 1) // T, 1)].long().diff()
        # A table without slots would map every id to itself.
        map_offsets = torch.nn.functional.pad(num_slots.clamp(min=1).cumsum(0), (1, 0))
        self._map = torch.full((int(map_offsets[-1]), 2), _FREE_KEY, device="cpu"), map_offsets
        pruned_hashmap_insert(indices, dense_indices, offsets, *self._map)

    def lookup(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Return the row of each id, -1 for ids without one; RuntimeError before `insert`."""
        check(hasattr(self, "_map"), "there are no maps yet: call insert first")
        return pruned_hashmap_lookup(indices, offsets, *self._map)
