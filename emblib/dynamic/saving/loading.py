"""Entries in and out of one dynamic table: exported as they are, imported into any capacity."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.dynamic.hash_index import HashIndex, ValueRows
from emblib.dynamic.saving import cuckoo
from emblib.dynamic.saving import entries as of_entries
from emblib.dynamic.saving.dump_tables import rows_at_a_time
from emblib.dynamic.saving.dumps import Progress, Report
from emblib.dynamic.saving.entries import WEIGHT, Chosen, Entries
from emblib.ops import codes
from emblib.ops import hash as hash_ops
from emblib.ops.hash import SCORED, TABLE_FIELDS, Keys

_AT_ONCE = 1 << 22  # keys that are placed by one call
_NEVER = 1 << 62  # no clock comes to that
_SIZE = TABLE_FIELDS.index("size")


class Target(NamedTuple):
    """One table of an index, and where its rows are.

    Attributes:
        index: which has its keys.
        table: its number there.
        name: what it is called in progress and errors.
        views: rows by slot, `weight` first, then states; as many as the table may have.
        rows: the same as the index moves them when the table grows; None where it does not.
        initial_state: what states are where entries come without them.
        hash_key: what the hash of a table that is replaced depends on then; None: what it does now.
    """

    index: HashIndex
    table: int
    name: str
    views: Mapping[str, Tensor]
    rows: ValueRows | None = None
    initial_state: float = 0.0
    hash_key: int | None = None


class Loaded(NamedTuple):
    """What became of entries.

    Attributes:
        loaded: those that are in the table now.
        left_out: those that found no place, the least of them by the order of eviction.
        displaced: entries of the table that gave way to them.
    """

    loaded: int
    left_out: int
    displaced: int


def export(target: Target, since: int | None = None) -> Entries:
    """The entries of a table, or those used at tick `since` or later, by ascending slot.

    Keys, stamps and scores are copies on the CPU; rows are copied when they are asked for.
    """
    found = target.index.export(target.table, since)
    rows = {name: Chosen(view, found.slots) for name, view in target.views.items()}
    scores = None if found.scores is None else found.scores.cpu()
    return Entries(found.keys.cpu(), found.stamps.cpu(), scores, rows)


def check(target: Target, entries: Entries) -> None:
    """Raise ValueError where entries do not fit a table, before anything is written."""
    _check_rows(target, entries)
    if target.index.order in SCORED and entries.scores is None and len(entries):
        raise ValueError(
            f"the order of {target.name!r} is {target.index.order!r}, which needs a score for each "
            "key, and these entries have none; give them with dataclasses.replace(entries, "
            "scores=...)"
        )
    if len(entries) and not 0 <= int(entries.stamps.min()) <= entries.newest_stamp() < _NEVER:
        raise ValueError(
            f"stamps are ticks in [0, 2^62), those for {target.name!r} are in "
            f"[{int(entries.stamps.min())}, {entries.newest_stamp()}]"
        )
    entries.check_distinct()


def _check_rows(target: Target, entries: Entries) -> None:
    unknown = sorted(entries.rows.keys() - target.views.keys())
    missing = sorted(target.views.keys() - entries.rows.keys())
    if unknown or (missing and len(entries.rows) > 1) or WEIGHT not in entries.rows:
        raise ValueError(
            f"entries of {target.name!r} must have the rows {list(target.views)}, or the weight "
            f"alone, which leaves states at their first value; got {list(entries.rows)}"
        )
    for name, rows in entries.rows.items():
        wanted = tuple(target.views[name].shape[1:])
        if tuple(rows.shape[1:]) != wanted:
            raise ValueError(
                f"{name} of {target.name!r} must have rows of shape {list(wanted)}, got "
                f"{list(rows.shape[1:])}; it is of another table or optimizer"
            )


def replace(target: Target, entries: Entries, report: Report | None = None) -> Loaded:
    """Let a table have these entries and no others; the best of them where not all fit.

    The best are those that would be evicted last. A table takes as many as it has rows, unless some
    of its buckets are those of fewer keys than they have slots.
    """
    check(target, entries)
    index, table = target.index, target.table
    index.empty(table, target.hash_key)
    return _put(target, entries, report, _place_anew)


def put(target: Target, entries: Entries, report: Report | None = None) -> Loaded:
    """Write entries over those of a table that have their keys, and add the others.

    Where both buckets of a key are full, entries move to their other buckets, so that a table which
    follows another one of its size has room for all that this has. What still finds no place takes
    that of what the table would evict.
    """
    check(target, entries)
    return _put(target, entries, report, _place_among)


def _put(
    target: Target,
    entries: Entries,
    report: Report | None,
    place: Callable[[Target, Entries], tuple[Tensor, int]],
) -> Loaded:
    index, table = target.index, target.table
    counters = index.counters[table].clone()
    tick = max(index.tick, entries.newest_stamp())
    index.set_tick(tick + 1)  # to what is placed now, everything that was there may give way
    try:
        # No more than the table may have: the rest finds no place however it grows.
        index.reserve(table, index.size(table) + len(entries), target.rows)
        slots, displaced = place(target, entries)
        _write(target, entries, slots, report)
    finally:
        index.counters[table] = counters
        index.set_tick(tick)
    left_out = int((slots < 0).sum())
    return Loaded(len(entries) - left_out, left_out, displaced)


def _place_anew(target: Target, entries: Entries) -> tuple[Tensor, int]:
    """A slot for the best entries in a table that is empty, -1 for the others."""
    index, table = target.index, target.table
    device = index.tags.device
    order = of_entries.best_first(entries, index.order).cpu()
    best = order[: index.capacity(table)]
    keys = entries.keys[best]
    slots = torch.cat([
        _place_some(index, table, part.to(device), "none")[0] for part in keys.split(_AT_ONCE)
    ])  # fmt: skip
    if bool((slots < 0).any()):
        hash_key = index.hash_key(table)
        slots = cuckoo.make_room(keys, slots, index.buckets(table), hash_key)
        there = slots >= 0
        at = slots[there].to(device)
        tags = index.table_tags(table)
        tags.zero_()
        tags[at] = cuckoo.tags_of(keys[there], hash_key).to(device)
        index.table_entries(table)[at, 0] = keys[there].to(device)
        index.tables[table, _SIZE] = int(there.sum())
    placed = torch.full_like(order, -1)
    placed[best] = slots
    return placed, 0


def _place_among(target: Target, entries: Entries) -> tuple[Tensor, int]:
    """A slot for every entry, -1 for none, and how many gave way."""
    index, table = target.index, target.table
    device = index.tags.device
    slots = index.find(Keys.of(entries.keys.to(device), table)).cpu()
    order = of_entries.best_first(entries, index.order).cpu()
    missing = order[slots[order] < 0]
    displaced = 0
    for part in missing.split(_AT_ONCE):
        slots[part] = _place_some(index, table, entries.keys[part].to(device), "none")[0]
        index.has_come(table, slots[part])
    refused = missing[slots[missing] < 0]
    if refused.numel() and index.size(table) < index.capacity(table):
        displaced = _rearrange(target, entries.keys[refused])
        slots = index.find(Keys.of(entries.keys.to(device), table)).cpu()
        refused = refused[slots[refused] < 0]
    for part in refused.split(_AT_ONCE) if index.order != "none" else ():
        placed, number = _place_some(index, table, entries.keys[part].to(device), index.order)
        index.has_come(table, placed)
        slots[part], displaced = placed, displaced + number
    if displaced:  # among them may be entries that were found above
        slots = index.find(Keys.of(entries.keys.to(device), table)).cpu()
    return slots, displaced


def _rearrange(target: Target, refused: Tensor) -> int:
    """Move entries to their other buckets until keys that were refused have slots as well.

    Returns how many entries of the table have none any more, because not all could be placed.
    """
    index, table = target.index, target.table
    there = index.export(table)
    device, held = there.keys.device, there.slots.numel()
    keys = torch.cat([there.keys.cpu(), refused])
    before = torch.cat([there.slots.cpu(), torch.full_like(refused, -1)])
    hash_key = index.hash_key(table)
    after = cuckoo.make_room(keys, before, index.buckets(table), hash_key)
    moved = ((before >= 0) & (after >= 0) & (after != before)).nonzero().view(-1)
    source, goal = before[moved].to(device), after[moved].to(device)
    entries, tags = index.table_entries(table), index.table_tags(table)
    with torch.no_grad():
        for view in (*index.views_by_slot(table), *target.views.values()):
            view[goal] = view[source]  # the right side is a copy, so slots may change places
    placed = (after >= 0).nonzero().view(-1)
    tags.zero_()
    tags[after[placed].to(device)] = cuckoo.tags_of(keys[placed], hash_key).to(device)
    new = placed[placed >= held]
    at = after[new].to(device)
    entries[at, 0] = keys[new].to(device)
    entries[at, 1] = index.tick
    index.tables[table, _SIZE] = placed.numel()
    index.version += 1
    index.has_come(table, at)
    return int((after[:held] < 0).sum())


def _place_some(index: HashIndex, table: int, keys: Tensor, order: str) -> tuple[Tensor, int]:
    """Slots of keys that are not there, on the CPU, and how many gave way to them."""
    index.version += 1
    device, count = keys.device, keys.numel()
    first = torch.arange(count, device=device)
    ends = torch.zeros(len(index.specs) + 1, dtype=torch.int64, device=device)
    ends[table + 1 :] = count
    given = torch.zeros(len(index.specs), dtype=torch.int64, device=device)
    placed = hash_ops.Placed(
        *hash_ops.hash_place_(
            *(index.tensors(), keys, first, torch.ones_like(first), ends, None, given),
            *(codes.HASH_ORDER[order], codes.NEWCOMER["wins"]),
        )
    )
    return placed.slots.cpu(), int((placed.status == hash_ops.EVICTING).sum())


def _write(target: Target, entries: Entries, slots: Tensor, report: Report | None) -> None:
    """Stamps, scores and rows of the entries that have a slot."""
    index, device = target.index, target.index.tags.device
    there = (slots >= 0).nonzero().view(-1)
    scores = entries.scores if index.order in SCORED else None
    index.set_entries(
        target.table,
        slots[there].to(device),
        entries.stamps[there].to(device),
        None if scores is None else scores[there].to(device),
    )
    with torch.no_grad():
        for name, view in target.views.items():
            rows, done = entries.rows.get(name), 0
            for part in there.split(rows_at_a_time(view)):
                at = slots[part].to(view.device)
                if rows is None:
                    view[at] = target.initial_state
                else:
                    view[at] = rows[part].to(view)
                done += part.numel()
                if report is not None:
                    report(Progress(target.name, done, there.numel()))


def erase(target: Target, keys: Tensor) -> int:
    """Remove those of the keys that are there; how many these were."""
    before = target.index.size(target.table)
    target.index.erase(Keys.of(keys.to(target.index.tags.device), target.table))
    return before - target.index.size(target.table)


def absent(target: Target, keys: Tensor) -> Tensor:
    """Those of the keys that are not there, on the CPU."""
    found = target.index.find(Keys.of(keys.to(target.index.tags.device), target.table))
    return keys.cpu()[found.cpu() < 0]
