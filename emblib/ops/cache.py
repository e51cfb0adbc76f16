"""The ops of the software cache: plan which rows a batch needs, move rows, find rows.

The cache is 32-way set-associative; slot `set * 32 + way` holds one row of any table, with its
optimizer state. Linear row r can be in one set only, `(finalise(r) >> 32) * sets >> 32` with the
finaliser of MurmurHash3 (Appleby, 2011). Cached tables have the highest linear rows of a module.

Shapes and dtypes, with L lookups, U distinct rows (see `emblib.ops.tbe.Groups`), T tables, S slots:

- `tags` int64 `[sets, 32]`: the linear row of each slot, -1 if it is empty
- `stamps` int64 `[sets, 32]`, -1 if the slot is empty. LRU: number of the batch that used the slot
  last. LFU: the lookups of its row so far, shifted left by 32, plus the low 32 bits of that number
- `counts` int32, LFU: `[cached rows]`, lookups so far of each row, up to 2^31 - 1. The count of a
  row in the cache is in its stamp; its entry here is out of date. LRU: not read, may be `[0]`
- `counters` int64 `[T + 1, 8]`, see `COUNTERS`; one row per table, then the totals
- `clock` int64 `[2]`: number of the batch, number of the oldest batch in flight
- `tables` int64 `[T, 8]`: `features` of all tables by ascending linear row (column unused)
- `rows`, `segments`, `lookups`, `count`: of the batch, as `tbe_group` returns them
- `row_slots` int32 `[L]`: slot of each distinct row, -1 for a row that is not in the cache (or of a
  table without cache) and from `count` on
- `evicted` int64 `[L]`: for a row that is fetched into its slot, the row that was in the slot, -1
  if the slot was empty; -2 for a row that does not move, and from `count` on
- `weights`: four tensors (device, host, disk, cache); `states`: the optimizer's states of every
  tier, tier after tier; tensors of unused tiers are empty. States are as long as the weights or
  have one entry per row
- `hyper` float64, of the optimizer: step and seed of stochastic rounding

`cache_plan_` plans a batch; its policy is a number of `emblib.ops.codes.CACHE_POLICY`. It probes
all distinct rows, and stamps hits. The missing rows of a set take its empty ways first. Then LRU
replaces the least recently used row. LFU replaces the row with the fewest lookups, at equal lookups
the most recently used one. LRU assigns ways to the missing rows in ascending order, LFU by
descending lookups. Rows used by a batch in flight are not replaced, and LFU does not replace a row
by a row with fewer lookups. A row that gets no way stays in the tier of its table and is read from
there.

`cache_evictions` (only on the CPU) returns the `evicted` of a plan and changes nothing.

`cache_move_` then writes back the evicted rows and fetches the new ones, with their states.
Where cache and tier have different dtypes, values are rounded: to nearest when fetched, and when
written back stochastically if the seed is not negative. `cache_flush_` writes back all rows in the
cache, which stay there.

On a GPU the `hyper` of `cache_move_` may be empty if nothing is rounded stochastically. The op then
reads no step, so updates may count steps at the same time.

`postponed` lists the rows that a prefetch must not fetch yet. Updates of earlier batches in flight
write rows that got no way directly to their tables; a prefetch at the same time could fetch such a
row before its update. `postponed` is empty (no such list), `[clock, conflicts]` or `[clock,
conflicts, rows, slots, count]`:

- `conflicts` int64 `[sets]`: the last batch with a row that got no way in this set; `cache_move_`
  writes it
- `rows` int64 `[L]`, `slots` int32 `[L]`, `count` int32 `[1]` (0 before the call): the rows that
  took a way in a set in which a row of a batch in flight got none. The call does not fetch them

Another `cache_move_`, after the updates, fetches the listed rows. Its rows, row_slots and count are
these tensors, and its `evicted` is empty: no row is evicted.

`cache_prefetch_` is a whole prefetch in one call, so that no interrupt comes between its parts. It
checks the batch if `check` is not None, groups it, advances the clock (the oldest batch in flight
is then `lag` batches before this one), plans and moves. `cache` is `[tags, stamps, counts,
counters, clock, conflicts]`. With a `check`, it returns nothing for an invalid batch on the CPU.
Else it returns rows, segments, lookups, bags and count (`Groups`), `row_slots`, and the slot of
every lookup; then, if `postpones`, the rows, slots and count of `postponed`; then, on a GPU with a
`check`, the repaired offsets.

`cache_locate` returns the current `row_slots` of a batch and changes nothing. It is called before a
batch is used, because another plan may have fetched rows of the batch since its own plan, or, if
the cache does not know which batches are in flight, evicted them. `cache_lookup_slots` returns the
slot of the row of every lookup, int32 `[L]`, -1 for none.

Results depend on neither the number of threads nor the device. The definition is
`emblib.reference.cache`.
"""

from typing import Any

import torch
from torch import Tensor

from emblib.columns import CacheCounter

WAYS = 32
EMPTY = -1  # in `tags` and `stamps`

COUNTERS = tuple(column.name.lower() for column in CacheCounter)

plan_ = torch.ops.emblib.cache_plan_.default
evictions = torch.ops.emblib.cache_evictions.default  # on the CPU only
locate = torch.ops.emblib.cache_locate.default
lookup_slots = torch.ops.emblib.cache_lookup_slots.default
move_ = torch.ops.emblib.cache_move_.default
flush_ = torch.ops.emblib.cache_flush_.default
prefetch_ = torch.ops.emblib.cache_prefetch_.default


@torch.library.register_fake("emblib::cache_plan_")
def _(
    tags: Tensor,
    stamps: Tensor,
    counts: Tensor,
    counters: Tensor,
    clock: Tensor,
    tables: Tensor,
    rows: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.numel(), dtype=torch.int32), rows.new_empty(rows.numel())


@torch.library.register_fake("emblib::cache_evictions")
def _(
    tags: Tensor,
    stamps: Tensor,
    counts: Tensor,
    counters: Tensor,
    clock: Tensor,
    tables: Tensor,
    rows: Tensor,
    *rest: Any,
) -> Tensor:
    return rows.new_empty(rows.numel())


@torch.library.register_fake("emblib::cache_locate")
def _(tags: Tensor, tables: Tensor, rows: Tensor, count: Tensor) -> Tensor:
    return rows.new_empty(rows.numel(), dtype=torch.int32)


@torch.library.register_fake("emblib::cache_lookup_slots")
def _(row_slots: Tensor, segments: Tensor, lookups: Tensor, count: Tensor) -> Tensor:
    return row_slots.new_empty(lookups.numel())


@torch.library.register_fake("emblib::cache_prefetch_")
def _(
    weights: list[Tensor],
    states: list[Tensor],
    hyper: Tensor,
    cache: list[Tensor],
    tables: Tensor,
    policy: int,
    lag: int,
    postpones: bool,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_layout: Tensor | None,
    total_rows: int,
    repaired: bool,
    check: int | None,
    violations: Tensor,
) -> list[Tensor]:
    num_lookups = indices.numel()
    rows = indices.new_empty(num_lookups, dtype=torch.int64)
    sizes = (num_lookups + 1, num_lookups, num_lookups, 1, num_lookups, num_lookups)
    results = [rows, *(rows.new_empty(n, dtype=torch.int32) for n in sizes)]
    if postpones:
        slots, count = (rows.new_empty(n, dtype=torch.int32) for n in (num_lookups, 1))
        results.extend([torch.empty_like(rows), slots, count])
    if indices.is_cuda and check is not None:
        results.append(offsets.new_empty(offsets.numel(), dtype=torch.int32))
    return results
