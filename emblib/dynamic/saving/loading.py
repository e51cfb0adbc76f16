"""Export the entries of one dynamic table, and import them into a table of any capacity.

Entries are inserted with the native op first, in blocks. If some entries find both buckets full
although the table has empty slots, `assign_slots` computes a better assignment by cuckoo hashing. A
waiting entry gets the slot of another entry, which moves to its other bucket. Rounds of such moves
are vectorised. For the last few entries the shortest chains of moves are searched one by one.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from emblib.columns import HashEntryColumn, HashTableColumn
from emblib.dynamic.hash_index import MAX_TICK, HashIndex, RowBuffers
from emblib.dynamic.saving import entries as entries_module
from emblib.dynamic.saving.dump_tables import rows_at_a_time
from emblib.dynamic.saving.dumps import DumpProgress, Report
from emblib.dynamic.saving.entries import LAST_USES, WEIGHT, Entries, Rows, SelectedRows
from emblib.grad_mode import without_gradients
from emblib.ops import codes, hash
from emblib.ops.hash import SLOTS_PER_BUCKET, Keys
from emblib.reference.random import GOLDEN_RATIO, mix

# Not measured.
_ENTRIES_PER_ROUND = 1 << 12  # waiting entries that try to get a slot in one round
_MAX_IDLE_ROUNDS = 50  # consecutive rounds without a new assignment, before `search`


def buckets_of(keys: Tensor, num_buckets: int, hash_key: int) -> Tensor:
    """Return the two buckets of each key, int64 `[2, N]`; see csrc/hash/args.h."""
    mixed_keys = mix(keys ^ hash_key)
    hashes = torch.stack([mixed_keys & 0x7FFFFFFF, mixed_keys * GOLDEN_RATIO >> 33 & 0x7FFFFFFF])
    mask = (1 << (num_buckets - 1).bit_length()) - 1
    masked_hashes = hashes & mask
    return torch.where(masked_hashes < num_buckets, masked_hashes, masked_hashes & mask >> 1)


def tags_of(keys: Tensor, hash_key: int) -> Tensor:
    """Return the byte in `tags` that marks a slot of each key, uint8 `[N]`."""
    return (1 + ((mix(keys ^ hash_key) >> 40 & 0xFFFF) * 255 >> 16)).to(torch.uint8)


def assign_slots(keys: Tensor, slots: Tensor, num_buckets: int, hash_key: int) -> Tensor:
    """Assign slots to the entries of a table, so that as many as possible have one.

    Tensors are on the CPU; none is changed.

    Args:
        keys: int64 `[N]`, distinct, the most important first.
        slots: int64 `[N]`, the current slot of each key, in one of its buckets, or -1.
        num_buckets: number of buckets of the table.
        hash_key: hash key of the table.

    Returns:
        The slot of each key, int64 `[N]`, -1 for none. Keys that had a slot may have another one,
        or none. The result depends only on the arguments.
    """
    assignment = _Assignment(buckets_of(keys, num_buckets, hash_key), slots.clone(), num_buckets)
    waiting_entries = (slots < 0).nonzero().view(-1)
    num_idle_rounds = round_index = 0
    while (
        waiting_entries.numel()
        and num_idle_rounds < _MAX_IDLE_ROUNDS
        and int(assignment.num_free.sum())
    ):
        round_index += 1
        block, later_entries = (
            waiting_entries[:_ENTRIES_PER_ROUND],
            waiting_entries[_ENTRIES_PER_ROUND:],
        )
        is_settled = assignment.assign_within_one_move(block, round_index)
        unsettled_entries = block[~is_settled]
        if unsettled_entries.numel() and not bool(is_settled.any()):
            num_idle_rounds += 1
            unsettled_entries = assignment.swap_neighbours(unsettled_entries, round_index)
        else:
            num_idle_rounds = 0
        waiting_entries = torch.cat([unsettled_entries, later_entries])
    for entry in waiting_entries.sort().values.tolist():
        if not int(assignment.num_free.sum()):
            break
        assignment.search(entry)
    return assignment.slots


class _Assignment:
    """The assignment of entries to slots. Entries are numbers in [0, N).

    Args:
        bucket_pairs: int64 `[2, N]`, the buckets of each entry; it is changed.
        slots: int64 `[N]`, the slot of each entry, -1 for none; it is changed.
        num_buckets: number of buckets.

    Attributes:
        slots: the slots so far.
        num_free: int64 `[buckets]`, number of empty slots.
    """

    def __init__(self, bucket_pairs: Tensor, slots: Tensor, num_buckets: int) -> None:
        self._bucket_pairs, self.slots = bucket_pairs, slots
        self._entry_in_slot = torch.full(
            (num_buckets, SLOTS_PER_BUCKET), -1, device="cpu"
        )  # by slot, -1 for empty
        placed_entries = (slots >= 0).nonzero().view(-1)
        self._entry_in_slot.view(-1)[slots[placed_entries]] = placed_entries
        self.num_free = (self._entry_in_slot < 0).sum(1)
        # By bucket, whether no chain of moves leads from it to an empty slot. Such a bucket stays
        # closed, since no entry of another bucket moves into it.
        self._is_closed = torch.zeros(num_buckets, dtype=torch.bool, device="cpu")

    def assign_within_one_move(self, waiting_entries: Tensor, round_index: int) -> Tensor:
        """Assign slots to waiting entries by at most one move each; return which got one, bool."""
        buckets = self._bucket_pairs[:, waiting_entries].T
        neighbours = self._entry_in_slot[buckets].reshape(waiting_entries.numel(), -1)
        # The bucket that each neighbour could move to; empty slots need no move.
        is_empty = neighbours < 0
        other_buckets = self._other_bucket(neighbours.clamp(min=0))
        other_buckets = buckets.repeat_interleave(SLOTS_PER_BUCKET, 1).where(
            is_empty, other_buckets
        )
        has_room = self.num_free[other_buckets] > 0
        column = (_random_ints(has_room.shape, round_index) * has_room).argmax(1, keepdim=True)
        neighbour = neighbours.gather(1, column)[:, 0]
        target_buckets = other_buckets.gather(1, column)[:, 0]  # bucket of an empty slot
        is_settled = has_room.gather(1, column)[:, 0]
        is_settled &= _first_of_each(target_buckets, has_room.any(1))
        needs_move = is_settled & (neighbour >= 0)
        moving_entries = neighbour[needs_move]
        freed_slots = self.slots[moving_entries]
        self._put_in_empty(moving_entries, target_buckets[needs_move])
        self._occupy(waiting_entries[needs_move], freed_slots)
        needs_no_move = is_settled & (neighbour < 0)
        self._put_in_empty(waiting_entries[needs_no_move], target_buckets[needs_no_move])
        return is_settled

    def swap_neighbours(self, waiting_entries: Tensor, round_index: int) -> Tensor:
        """Give waiting entries slots of others; return the entries that then wait, int64 `[n]`."""
        offsets = _random_ints((waiting_entries.numel(),), round_index) % SLOTS_PER_BUCKET
        slots = self._bucket_pairs[0, waiting_entries] * SLOTS_PER_BUCKET + offsets
        is_first = _first_of_each(slots, torch.ones_like(waiting_entries, dtype=torch.bool))
        displaced_entries = self._entry_in_slot.view(-1)[slots[is_first]]
        self.slots[displaced_entries] = -1
        self._occupy(waiting_entries[is_first], slots[is_first])
        # Waiting entries try their other bucket in the next round.
        self._bucket_pairs[:, waiting_entries] = self._bucket_pairs[:, waiting_entries].flip(0)
        return torch.cat([displaced_entries, waiting_entries[~is_first]])

    def search(self, entry: int) -> None:
        """Assign a slot to a waiting entry by the shortest chain of moves, if there is one."""
        is_visited, mover_into = self._is_closed.clone(), torch.full_like(self.num_free, -1)
        frontier = self._bucket_pairs[:, entry].unique()
        frontier = frontier[~is_visited[frontier]]
        mover_into[frontier] = entry  # the entry that moves into each bucket of the chain
        while frontier.numel():
            is_visited[frontier] = True
            buckets_with_room = frontier[self.num_free[frontier] > 0]
            if buckets_with_room.numel():
                self._shift(int(buckets_with_room[0]), mover_into, entry)
                return
            entries_in_frontier = self._entry_in_slot[frontier].view(-1)
            next_buckets = self._other_bucket(entries_in_frontier)
            is_unvisited = ~is_visited[next_buckets]
            mover_into.scatter_reduce_(
                0,
                next_buckets[is_unvisited],
                entries_in_frontier[is_unvisited],
                "amin",
                include_self=False,
            )
            frontier = next_buckets[is_unvisited].unique()
        self._is_closed = is_visited

    def _shift(self, bucket: int, mover_into: Tensor, entry: int) -> None:
        """Move every entry of a chain to the slot that the next one frees."""
        moving_entry = int(mover_into[bucket])
        slot = bucket * SLOTS_PER_BUCKET + int((self._entry_in_slot[bucket] < 0).int().argmax())
        self.num_free[bucket] -= 1
        while moving_entry != entry:
            freed_slot = int(self.slots[moving_entry])
            self._occupy(
                torch.tensor([moving_entry], device="cpu"), torch.tensor([slot], device="cpu")
            )
            slot, moving_entry = freed_slot, int(mover_into[freed_slot // SLOTS_PER_BUCKET])
        self._occupy(torch.tensor([entry], device="cpu"), torch.tensor([slot], device="cpu"))

    def _other_bucket(self, entries: Tensor) -> Tensor:
        """Return the alternative bucket of each entry, int64 `[n]`."""
        return (
            self._bucket_pairs[0, entries]
            + self._bucket_pairs[1, entries]
            - self.slots[entries] // SLOTS_PER_BUCKET
        )

    def _put_in_empty(self, entries: Tensor, buckets: Tensor) -> None:
        """Put entries into the first empty slots of distinct buckets."""
        first_empty = (self._entry_in_slot[buckets] < 0).int().argmax(1)
        self._occupy(entries, buckets * SLOTS_PER_BUCKET + first_empty)
        self.num_free[buckets] -= 1

    def _occupy(self, entries: Tensor, slots: Tensor) -> None:
        """Record that entries are in these slots now."""
        self._entry_in_slot.view(-1)[slots] = entries
        self.slots[entries] = slots


def _first_of_each(values: Tensor, is_valid: Tensor) -> Tensor:
    """Return which elements are the first valid ones of their value, bool `[n]`."""
    positions = torch.arange(values.numel(), device="cpu")
    num_values = int(values.max()) + 1 if values.numel() else 0
    first_positions = torch.full((num_values,), values.numel(), device="cpu")
    first_positions.scatter_reduce_(0, values[is_valid], positions[is_valid], "amin")
    return is_valid & (first_positions[values] == positions)


def _random_ints(shape: tuple[int, ...], step: int) -> Tensor:
    """Return positive pseudo-random int64 that are the same on every machine."""
    num_values = 1
    for size in shape:
        num_values *= size
    seeds = torch.arange(num_values, device="cpu") + (step << 40)
    return (mix(seeds) >> 2 & 0x3FFFFFFFFFFFFFFF).view(shape) + 1


_KEYS_PER_CALL = 1 << 22  # keys that one call inserts, which bounds its memory; not measured


def _run_once(function: Callable[[], None]) -> None:
    """Call a function: the default of `TableTarget.complete`."""
    function()


class TableTarget(NamedTuple):
    """One table of an index, with its row buffers; its user must hold the lock of the tables.

    Attributes:
        index: index with the keys of the table.
        table: number of the table in `index`.
        name: name of the table in progress and error messages.
        views: rows by slot up to the maximum capacity: `weight`, then optimizer states.
        rows: the same rows, which the index moves when the table grows; None if it cannot grow.
        initial_state: value of optimizer states of entries that have none.
        last_uses: int64 `[rows, n]` by slot, see `emblib.dynamic.last_uses`; None without.
        hash_key: hash key that a replaced table gets; None keeps the current one.
        complete: function that runs a function, and once more if it is interrupted; the default
            runs it once.
    """

    index: HashIndex
    table: int
    name: str
    views: Mapping[str, Tensor]
    rows: RowBuffers | None = None
    initial_state: float = 0.0
    last_uses: Tensor | None = None
    hash_key: int | None = None
    complete: Callable[[Callable[[], None]], None] = _run_once


class Loaded(NamedTuple):
    """The result of loading entries.

    Attributes:
        loaded: number of entries that are not `left_out`.
        left_out: number of entries that found no slot. With a backing store, the number of rows
            that the store dropped, which may be rows that it had before.
        displaced: number of entries that the table had before, and no longer has, without those
            whose keys were loaded again; 0 with a backing store.
    """

    loaded: int
    left_out: int
    displaced: int


def export(target: TableTarget, since: int | None = None) -> Entries:
    """Return the entries of a table, or those used at tick `since` or later, by ascending slot.

    Keys, stamps, scores and last uses are copies on the CPU. Other rows are copied when they are
    indexed, so index them before the table changes.
    """
    entries = target.index.export(target.table, since)
    rows: dict[str, Rows] = {
        name: SelectedRows(view, entries.slots) for name, view in target.views.items()
    }
    if target.last_uses is not None and target.last_uses.size(1):
        rows[LAST_USES] = target.last_uses[entries.slots].cpu()
    scores = None if entries.scores is None else entries.scores.cpu()
    return Entries(entries.keys.cpu(), entries.stamps.cpu(), scores, rows)


def check(target: TableTarget, entries: Entries) -> None:
    """Raise ValueError if entries do not fit a table, before anything is written."""
    _check_rows(target, entries)
    if target.index.has_scores and entries.scores is None and len(entries):
        raise ValueError(
            f"the order of {target.name!r} is {target.index.order!r}, which needs a score for each "
            "key, and these entries have none; give them with dataclasses.replace(entries, "
            "scores=...)"
        )
    counts = entries.scores if target.index.order in ("lfu", "lru_lfu") else None
    if counts is not None and len(entries) and int(counts.min()) < 0:
        raise ValueError(
            f"scores of {target.name!r} are numbers of lookups, got {int(counts.min())}"
        )
    if len(entries) and not 0 <= int(entries.stamps.min()) <= entries.newest_stamp() < MAX_TICK:
        raise ValueError(
            f"stamps are ticks in [0, 2^62), those for {target.name!r} are in "
            f"[{int(entries.stamps.min())}, {entries.newest_stamp()}]"
        )
    entries.check_distinct()


def _check_rows(target: TableTarget, entries: Entries) -> None:
    """Raise ValueError unless names, shapes and last uses of rows fit a table."""
    names = entries.rows.keys() - {LAST_USES}  # ignored if they are of a table with another ttl
    unknown_names = sorted(names - target.views.keys())
    missing_names = sorted(target.views.keys() - names)
    if unknown_names or (missing_names and len(names) > 1) or WEIGHT not in names:
        raise ValueError(
            f"entries of {target.name!r} must have the rows {list(target.views)}, or the weight "
            f"alone, which leaves states at their first value; got {list(entries.rows)}"
        )
    uses = entries.rows.get(LAST_USES)
    if uses is not None and uses.dtype != torch.int64:
        raise ValueError(f"{LAST_USES} of {target.name!r} are ticks in int64, got {uses.dtype}")
    if _has_levels_of(uses, target):
        newest_stamp = max(entries.newest_stamp(), 1)
        for block in torch.arange(len(entries), device="cpu").split(_KEYS_PER_CALL):
            values = uses[block]
            if values.numel() and not 0 <= int(values.min()) <= int(values.max()) <= newest_stamp:
                raise ValueError(
                    f"{LAST_USES} of {target.name!r} must be ticks up to its newest stamp "
                    f"{newest_stamp}, got {int(values.min())} to {int(values.max())}"
                )
    for name in sorted(names):
        rows = entries.rows[name]
        expected_shape = tuple(target.views[name].shape[1:])
        if tuple(rows.shape[1:]) != expected_shape:
            raise ValueError(
                f"{name} of {target.name!r} must have rows of shape {list(expected_shape)}, got "
                f"{list(rows.shape[1:])}; it is of another table or optimizer"
            )


def _has_levels_of(uses: Rows | None, target: TableTarget) -> TypeGuard[Rows]:
    """Return whether saved last uses have the levels of a table; others are ignored."""
    last_uses = target.last_uses
    if last_uses is None or uses is None or not last_uses.size(1):
        return False
    return tuple(uses.shape[1:]) == tuple(last_uses.shape[1:])


def replace(target: TableTarget, entries: Entries, report: Report | None = None) -> Loaded:
    """Replace the entries of a table; if not all fit, keep those that would be evicted last.

    If there are more entries than slots, only the best are tried; a few of these may find no slot.
    The tick becomes at least the newest stamp; counters stay. Raises ValueError for entries that do
    not fit, before anything is written.
    """
    check(target, entries)
    return replace_unchecked(target, entries, report)


def replace_unchecked(
    target: TableTarget, entries: Entries, report: Report | None = None
) -> Loaded:
    """Replace the entries of a table by others, which the caller has checked; see `replace`."""
    target.index.clear_table(target.table, target.hash_key)
    return _write_entries(target, entries, report, _place_all)


def put(target: TableTarget, entries: Entries, report: Report | None = None) -> Loaded:
    """Overwrite the entries of keys that are in a table, and insert the others.

    If both buckets of a key are full, entries move to their other buckets, so that a copy of a
    table has room for all of its entries. Keys that still find no slot evict entries, as with
    `InsertPolicy.ALWAYS_EVICT`, or are left out if the table evicts none or new entries fill both
    buckets. Raises ValueError for entries that do not fit, before anything is written.
    """
    check(target, entries)
    return _write_entries(target, entries, report, _place_missing)


def _write_entries(
    target: TableTarget,
    entries: Entries,
    report: Report | None,
    place: Callable[[TableTarget, Entries], tuple[Tensor, int]],
) -> Loaded:
    """Write entries into a table, in the slots that `place` chooses."""
    index, table = target.index, target.table
    counters = index.counters[table].clone()
    tick = max(index.tick, entries.newest_stamp())
    index.set_tick(tick + 1)  # all older entries may be evicted by those inserted now
    try:
        # `reserve` grows the table at most to its capacity.
        index.reserve(table, index.size(table) + len(entries), target.rows)
        slots, num_displaced = place(target, entries)
        _write(target, entries, slots, report)
    finally:
        index.counters[table] = counters
        index.set_tick(tick)
    num_left_out = int((slots < 0).sum())
    return Loaded(len(entries) - num_left_out, num_left_out, num_displaced)


def _place_all(target: TableTarget, entries: Entries) -> tuple[Tensor, int]:
    """Insert entries into an empty table; return their slots, int64 `[N]`, and 0 evictions.

    Slots are on the CPU, -1 for entries that are left out.
    """
    index, table = target.index, target.table
    device = index.tags.device
    order = entries_module.best_first(entries, index.order).cpu()
    best_entries = order[: index.capacity(table)]
    keys = entries.keys[best_entries]
    slots = torch.cat(
        [
            _insert_block(index, table, key_block.to(device), "none")
            for key_block in keys.split(_KEYS_PER_CALL)
        ]
    )
    if bool((slots < 0).any()):
        hash_key = index.hash_key(table)
        slots = assign_slots(keys, slots, index.buckets(table), hash_key)
        has_slot = slots >= 0
        new_slots = slots[has_slot].to(device)
        index.forget_queues(table)
        tags = index.table_tags(table)
        tags.zero_()
        tags[new_slots] = tags_of(keys[has_slot], hash_key).to(device)
        index.table_entries(table)[new_slots, HashEntryColumn.KEY] = keys[has_slot].to(device)
        index.tables[table, HashTableColumn.SIZE] = int(has_slot.sum())
    slot_of_entry = torch.full_like(order, -1)
    slot_of_entry[best_entries] = slots
    return slot_of_entry, 0


def _place_missing(target: TableTarget, entries: Entries) -> tuple[Tensor, int]:
    """Insert entries that are missing; return all slots, int64 `[N]`, and how many others left.

    Slots are on the CPU, -1 for entries that are left out.
    """
    index, table = target.index, target.table
    device = index.tags.device
    slots = index.find(Keys.from_ids(entries.keys.to(device), table)).cpu()
    order = entries_module.best_first(entries, index.order).cpu()
    missing_entries = order[slots[order] < 0]
    num_others = index.size(table) - (len(entries) - missing_entries.numel())
    for block in missing_entries.split(_KEYS_PER_CALL):
        slots[block] = _insert_block(index, table, entries.keys[block].to(device), "none")
        index.versions.note_inserted(index, table, slots[block])
    refused_entries = missing_entries[slots[missing_entries] < 0]
    if not refused_entries.numel():
        return slots, 0
    if index.size(table) < index.capacity(table):
        _rearrange(target, entries.keys[refused_entries])
        slots = index.find(Keys.from_ids(entries.keys.to(device), table)).cpu()
        refused_entries = refused_entries[slots[refused_entries] < 0]
    for block in refused_entries.split(_KEYS_PER_CALL) if index.order != "none" else ():
        block_slots = _insert_block(index, table, entries.keys[block].to(device), index.order)
        index.versions.note_inserted(index, table, block_slots)
    # Entries whose slots were found above may have been evicted since.
    slots = index.find(Keys.from_ids(entries.keys.to(device), table)).cpu()
    return slots, num_others - (index.size(table) - int((slots >= 0).sum()))


def _rearrange(target: TableTarget, refused_keys: Tensor) -> None:
    """Move entries to their other buckets until refused keys have slots as well.

    If not all fit, entries of the table lose their slot, possibly some that the same import has
    just inserted.
    """
    index, table = target.index, target.table
    exported = index.export(table)
    device, num_slots = exported.keys.device, exported.slots.numel()
    keys = torch.cat([exported.keys.cpu(), refused_keys])
    slots_before = torch.cat([exported.slots.cpu(), torch.full_like(refused_keys, -1)])
    hash_key = index.hash_key(table)
    slots_after = assign_slots(keys, slots_before, index.buckets(table), hash_key)
    is_moved = (slots_before >= 0) & (slots_after >= 0) & (slots_after != slots_before)
    moved_entries = is_moved.nonzero().view(-1)
    old_slots, moved_slots = (
        slots_before[moved_entries].to(device),
        slots_after[moved_entries].to(device),
    )
    placed_entries = (slots_after >= 0).nonzero().view(-1)
    new_entries = placed_entries[placed_entries >= num_slots]
    new_slots = slots_after[new_entries].to(device)
    # All values are computed before the first write, so an interrupted write can be repeated.
    views = [*index.views_by_slot(table), *(view.detach() for view in target.views.values())]
    if target.last_uses is not None:
        views.append(target.last_uses)
    rows = [view[old_slots] for view in views]
    tags = torch.zeros_like(index.table_tags(table))
    new_tags = tags_of(keys[placed_entries], hash_key).to(device)
    tags[slots_after[placed_entries].to(device)] = new_tags
    tick = index.tick

    def write() -> None:
        index.versions.advance()
        index.forget_queues(table)
        for view, values in zip(views, rows, strict=True):
            view[moved_slots] = values
        index.table_tags(table).copy_(tags)
        entries = index.table_entries(table)
        entries[new_slots, HashEntryColumn.KEY] = keys[new_entries].to(device)
        entries[new_slots, HashEntryColumn.STAMP] = tick
        index.tables[table, HashTableColumn.SIZE] = placed_entries.numel()
        index.versions.note_inserted(index, table, new_slots)

    target.complete(write)


def _insert_block(index: HashIndex, table: int, keys: Tensor, order: str) -> Tensor:
    """Insert missing keys; return their slots, int64 on the CPU, -1 for keys without one."""
    index.versions.advance()
    device, num_keys = keys.device, keys.numel()
    positions = torch.arange(num_keys, device=device)
    offsets = torch.zeros(len(index.specs) + 1, dtype=torch.int64, device=device)
    offsets[table + 1 :] = num_keys
    batch_scores = torch.zeros(len(index.specs), dtype=torch.int64, device=device)
    result = hash.InsertResult(
        *hash.hash_insert_(
            index.tensors(),
            keys,
            positions,
            torch.ones_like(positions),
            offsets,
            None,
            batch_scores,
            codes.HASH_ORDER[order],
            codes.INSERT_POLICY["wins"],
        )[:3]
    )
    slots: Tensor = result.slots.cpu()
    return slots


@without_gradients
def _write(target: TableTarget, entries: Entries, slots: Tensor, report: Report | None) -> None:
    """Write stamps, scores and rows of the entries that have a slot."""
    index, device = target.index, target.index.tags.device
    placed_entries = (slots >= 0).nonzero().view(-1)
    scores = entries.scores if index.has_scores else None
    index.set_entries(
        target.table,
        slots[placed_entries].to(device),
        entries.stamps[placed_entries].to(device),
        None if scores is None else scores[placed_entries].to(device),
    )
    if target.last_uses is not None and target.last_uses.size(1):
        uses = entries.rows.get(LAST_USES)
        if _has_levels_of(uses, target):
            values = uses[placed_entries]
        else:  # the feature is not known: write the stamp to every level; 0 would mean no use
            values = entries.stamps[placed_entries][:, None].clamp(min=1)
        target.last_uses[slots[placed_entries].to(device)] = values.to(device)
    for name, view in target.views.items():
        rows, num_written = entries.rows.get(name), 0
        for block in placed_entries.split(rows_at_a_time(view)):
            block_slots = slots[block].to(view.device)
            if rows is None:
                view[block_slots] = target.initial_state
            else:
                view[block_slots] = rows[block].to(view)
            num_written += block.numel()
            if report is not None:
                report(DumpProgress(target.name, num_written, placed_entries.numel()))


def erase(target: TableTarget, keys: Tensor) -> int:
    """Remove keys, int64 `[n]`; return how many distinct ones were in the table."""
    size_before = target.index.size(target.table)
    target.index.erase(Keys.from_ids(keys.to(target.index.tags.device), target.table))
    return size_before - target.index.size(target.table)


def absent_keys(target: TableTarget, keys: Tensor) -> Tensor:
    """Return the keys that are not in the table, int64 `[n]` on the CPU."""
    slots = target.index.find(Keys.from_ids(keys.to(target.index.tags.device), target.table))
    return keys.cpu()[slots.cpu() < 0]
