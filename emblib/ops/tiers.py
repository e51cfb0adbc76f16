"""Rows that move between a dynamic table and the store behind it, on the CPU.

Rows that move between the tiers are packed, uint8 `[n, row_bytes]`: a packed row has the bytes of a
row in all row buffers, weights, then optimizer states. A row that moves is copied twice: from its
tier into a packed matrix, and from the matrix into the other tier.

- `tier_swap_(row_buffers, slots, status, evicted, found, rows, first_overflow)` moves the rows of
  one table after the insertion of a batch. `row_buffers` are matrices by slot. `slots` int64
  `[n]`, `status` uint8 `[n]` and `evicted` int64 `[n, 3]` are results of `hash_insert_` for the
  table's misses. `found` int64 `[m]` are the misses that have a row in the
  store, in any order, and `rows` uint8 `[m, row_bytes]` these rows. The rows of evicted keys are
  copied out of their slots before stored rows are written there. Refused misses get the overflow
  rows from `first_overflow` on. Returns the new slots and status by miss (`HIT` for stored rows,
  else `NEW` for refused misses), keys, stamps and scores of evicted keys, int64 `[3, k]`, their
  rows, the refused misses, and the slots of `found`. A stored row whose slot is -1 is not written
- `tier_insert_batch_(index, row_buffers, features, ids, offsets, tables, batch_scores, order,
  insert_policy, layout, rules, seed, store_indices, records, store_orders, first_overflow,
  overflow, changes_stores)` inserts a training batch like `hash_insert_batch_` into tables in front
  of stores in host memory: missing keys that are in the store get their rows from there, and the
  rows of evicted keys are copied out. With `changes_stores` it then does what `tier_put_` does with
  the promoted keys and evicted rows; without, the stores are only read. Per table, one after the
  other, `store_indices` has the six tensors of an index, `records` uint8 `[S, 16 + row_bytes]`
  stamp, score and row by slot of that index, `store_orders` the number of its order,
  `first_overflow` the first overflow row, and `overflow`, int64 `[m, 3]`, keys, stamps and scores
  of the first m overflow rows, which are put into the store before the insertion; none without
  `changes_stores`. Returns an empty list, with nothing changed, if it cannot process the batch;
  else the first eight results of `hash_insert_batch_` and, if keys were missing or overflow rows
  put, the fields of `InsertedMisses` and, per table, of `SwappedMisses`
- `tier_find_batch_(index, row_buffers, features, ids, offsets, tables, fallback, layout, rules,
  store_indices, records, store_orders, first_overflow)` finds the keys of a batch in such tables.
  Rows of keys without a slot that are in the store are copied into overflow rows, whose numbers
  are returned as slots. Returns the results of `hash_find_batch`, and, if a key has no slot, keys,
  stamps and scores of the overflow rows of each table, int64 `[r, 3]`. Returns an empty list, with
  overflow rows in any state, where `hash_find_batch` does, if a table has more such keys than
  overflow rows, or too many lookups for one thread
- `tier_put_(store_index, records, lifted, entries, rows, order)` removes the keys `lifted`, int64
  `[m]`, from such a store and puts rows into it: `entries` int64 `[n, 3]` has keys, which are
  distinct, stamps and scores, `rows` is uint8 `[n, row_bytes]`. If both buckets of a key are full,
  the row in them that `order` ranks lowest is evicted, except for rows of the same call; if only
  these are in the buckets, the new row is dropped. Returns entries and rows that were evicted or
  dropped
- `tier_read(records, slots, row_bytes)` reads records of a store, uint8 `[S, stride]`: some words
  of 8 bytes, then the bytes of a row; either may be missing. Returns the positions of slots that
  are not -1, their words, int64 `[words, m]`, and rows, uint8 `[m, row_bytes]`
- `tier_write_(records, slots, words, values)` writes records to distinct slots; -1 is none

The definition is `emblib.reference.tiers`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.ops.hash import hash_find_batch, hash_insert_batch_


class InsertedMisses(NamedTuple):
    """The misses of a batch that `tier_insert_batch_` inserted.

    Attributes:
        status: uint8 `[L]`, status of the key at each position: `HIT`, `STORED` for a row of the
            store, `NEW` for a new row in an empty slot or an overflow row, else `EVICTING`.
        counts: int64 `[T, 6]`, the numbers of misses that were in the store, that were new, of rows
            promoted, demoted, and served in overflow rows, and of rows that the store dropped when
            overflow rows were written back.
    """

    status: Tensor
    counts: Tensor


class SwappedMisses(NamedTuple):
    """The rows of one table that `tier_insert_batch_` moved.

    The first three are empty if the op has changed the stores, the last one if it has not.

    Attributes:
        demoted: int64 `[k, 3]`, keys, stamps and scores of the evicted rows.
        demoted_rows: uint8 `[k, row_bytes]`, these rows.
        promoted: int64 `[p]`, keys that have a slot and are still in the store.
        refused: int64 `[r, 3]`, keys, stamps and scores of the misses in overflow rows, in their
            order.
        dropped: int64 `[d]`, keys of the rows that the store dropped for evicted rows, or of these.
    """

    demoted: Tensor
    demoted_rows: Tensor
    promoted: Tensor
    refused: Tensor
    dropped: Tensor


tier_swap_ = torch.ops.emblib.tier_swap_.default
tier_insert_batch_ = torch.ops.emblib.tier_insert_batch_.default
tier_find_batch_ = torch.ops.emblib.tier_find_batch_.default
tier_put_ = torch.ops.emblib.tier_put_.default
tier_read = torch.ops.emblib.tier_read.default
tier_write_ = torch.ops.emblib.tier_write_.default


@torch.library.register_fake("emblib::tier_swap_")
def _(
    row_buffers: list[Tensor],
    slots: Tensor,
    status: Tensor,
    evicted: Tensor,
    found: Tensor,
    rows: Tensor,
    first_overflow: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    num_demoted, num_refused = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        torch.empty_like(slots),
        torch.empty_like(status),
        slots.new_empty(3, num_demoted),
        rows.new_empty(num_demoted, rows.size(1)),
        slots.new_empty(num_refused),
        torch.empty_like(found),
    )


@torch.library.register_fake("emblib::tier_insert_batch_")
def _(
    index: list[Tensor],
    row_buffers: list[Tensor],
    features: Tensor,
    ids: Tensor,
    offsets: Tensor,
    *rest: Any,
) -> list[Tensor]:
    results: list[Tensor] = hash_insert_batch_(
        index, row_buffers, features, ids, offsets, *rest[:7]
    )
    return results


@torch.library.register_fake("emblib::tier_find_batch_")
def _(
    index: list[Tensor],
    row_buffers: list[Tensor],
    features: Tensor,
    ids: Tensor,
    offsets: Tensor,
    tables: Tensor,
    *rest: Any,
) -> list[Tensor]:
    results: list[Tensor] = hash_find_batch(index, features, ids, offsets, tables, None)
    return results


@torch.library.register_fake("emblib::tier_put_")
def _(
    store_index: list[Tensor],
    records: Tensor,
    lifted: Tensor,
    entries: Tensor,
    rows: Tensor,
    order: int,
) -> tuple[Tensor, Tensor]:
    num_dropped = torch.library.get_ctx().new_dynamic_size()
    return entries.new_empty(num_dropped, 3), rows.new_empty(num_dropped, rows.size(1))


@torch.library.register_fake("emblib::tier_read")
def _(records: Tensor, slots: Tensor, row_bytes: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = torch.library.get_ctx().new_dynamic_size()
    return (
        slots.new_empty(num_rows),
        slots.new_empty((records.size(1) - row_bytes) // 8, num_rows),
        records.new_empty(num_rows, row_bytes),
    )
