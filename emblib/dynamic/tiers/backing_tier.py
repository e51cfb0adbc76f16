"""What stands behind the dynamic tables of a module, and how rows move between the two tiers.

A table is the union of its tiers: each key is in one of them. The rows of the lower tier take part
in every batch as those of the fast one do, so no result depends on how many rows the fast tier
holds, as long as nothing leaves the last one.

A row of the lower tier that a batch needs is promoted: it gets a slot like a new key, and what
gives way is demoted, with optimizer state, stamp and score. Where it finds no slot (it competes and
ranks below all it could replace, or the batch itself fills its buckets) it is served in place: the
batch reads and updates a copy in rows behind those of its table, `RowLayout.beside` of them, and
the copy goes back before the store is asked again. So does the row of a new key that finds no slot.
"""

import json
import weakref
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emblib.dynamic.hash_index import Inserted
from emblib.dynamic.saving.entries import Entries
from emblib.dynamic.tiers.store import BATCH, Found, Rows, StagedRows, StoredTable, Tiers, TierStats
from emblib.ops import hash
from emblib.ops.hash import Keys, Misses, tables_of

if TYPE_CHECKING:
    from emblib.dynamic.module import DynamicEmbeddingBags

_COUNTED = ("lfu", "lru_lfu")
_COUNTERS = [field.name for field in fields(TierStats)][2:]


class LowerTier:
    """The lower tier of a module; a `TrainingHook` of its training steps."""

    def __init__(self, module: "DynamicEmbeddingBags", tiers: Tiers) -> None:
        self._module = weakref.ref(module)  # so that its end closes the store at once
        layout = module.rows
        tables = [
            StoredTable(name, layout.row_bytes(t)) for t, name in enumerate(module.table_names)
        ]
        self.store = StagedRows(tiers.store, tables)
        self.generation = 0  # of the copies that are served in place
        self._copies = [Rows.none(table.row_bytes) for table in tables]
        self._copies_differ = False
        self._widths = [table.row_bytes for table in tables]
        self._found: list[Found] = []
        self._down: list[Rows] = []
        self._up: dict[int, Tensor] = {}  # keys that moved up and that the store did not let go of
        self._given: Tensor | None = None  # scores of the batch at hand, where they are assigned
        self.reset_stats()
        if self.store.note:
            self._resume(json.loads(self.store.note))

    @property
    def module(self) -> "DynamicEmbeddingBags":
        """Whose lower tier this is."""
        module = self._module()
        assert module is not None
        return module

    def _planes(self) -> list[list[str]]:
        """What the bytes of a row are."""
        layout = self.module.rows
        kinds = zip(layout.planes, layout.dtypes, strict=True)
        named = [[name, str(dtype).removeprefix("torch.")] for name, dtype in kinds]
        return [[self.module.optimizer.name], *named]

    def _resume(self, note: dict[str, Any]) -> None:
        module = self.module
        if note["planes"] != self._planes():
            self.store.close()
            raise ValueError(
                f"the store holds rows of {note['planes']} (optimizer, then values and dtypes), "
                f"this module has {self._planes()}; name another store, and move the rows with "
                "state_dict from a module that fits"
            )
        module.index.set_tick(int(note["tick"]))
        module.hyperparams.copy_(torch.tensor(note["hyper"], dtype=torch.float64))

    def reset_stats(self) -> None:
        """Count from zero."""
        self._counts = [dict.fromkeys(_COUNTERS, 0) for _ in self._widths]

    def stats(self) -> dict[str, TierStats]:
        """By table (reads the device)."""
        lines = self.module.index.stats()
        named = zip(self.module.table_names, lines, self._counts, strict=True)
        return {
            name: TierStats(lookups=line["lookups"], hits=line["hits"], **counts)
            for name, line, counts in named
        }

    # Before a batch gets its slots

    def known(self, keys: Keys, misses: Misses) -> Tensor:
        """Which misses have a row below, bool `[L]` by miss; they need no admission."""
        self.settle()
        self.generation += 1
        ends, known = misses.ends.tolist(), torch.zeros(keys.ids.numel(), dtype=torch.bool)
        missing = keys.ids[misses.first].cpu()
        for t in range(len(self._widths)):
            self._check_room(t, ends[t + 1] - ends[t])
        self._found = []
        self._given = None if self.module.scores is None else self.module.scores.given()
        for t, counts in enumerate(self._counts):
            mine = missing[ends[t] : ends[t + 1]]
            staged = self.store.staged_reads
            found = self._read(t, mine, forget=True)
            self._found.append(found)
            known[ends[t] + found.positions] = True
            counts["found_below"] += found.positions.numel()
            counts["staged"] += self.store.staged_reads - staged
            counts["new"] += mine.numel() - found.positions.numel()
        return known.to(keys.ids.device)

    def _check_room(self, table: int, count: int) -> None:
        most = self.module.rows.beside
        if count > most:
            raise RuntimeError(
                f"a batch may have {most} ids of a table that are not in the fast "
                f"tier, got {count} of {self.module.table_names[table]!r}; choose smaller batches, "
                "or a larger Tiers(beside=...)"
            )

    def _read(self, table: int, keys: Tensor, *, forget: bool = False) -> Found:
        """The rows of keys that are below and have not expired; `forget` those that have."""
        found = self.store.read(table, keys)
        ttl = self.module.tables[table].ttl
        if ttl is None:
            return found
        lives = found.rows.stamps >= self.module.index.tick - ttl
        if forget:
            self.store.erase(table, found.rows.keys[~lives])
        return Found(found.positions[lives], found.rows.at(lives))

    def admit(self, keys: Keys, misses: Misses) -> None:
        """Counts go on where they were: rows below bring theirs with them."""
        if self.module.index.order not in _COUNTED:
            return
        ends, totals = misses.ends.tolist(), misses.totals
        for t, found in enumerate(self._found):
            at = (ends[t] + found.positions).to(totals.device)
            below = found.rows.scores.to(totals.device)
            totals[at] = below + torch.minimum(totals[at], hash.MAX_USES - below)

    # Once it has them

    def leaving(self, keys: Keys, inserted: Inserted) -> None:
        """Copy rows that gave way, and give those that found no slot a row beside."""
        misses, placed = inserted.misses, inserted.placed
        assert misses is not None
        assert placed is not None
        ends, status = misses.ends.tolist(), placed.status
        tick = self.module.index.tick
        self._down, self._copies = [], []
        for t in range(len(self._widths)):
            mine = slice(ends[t], ends[t + 1])
            gone = status[mine] == hash.EVICTING
            words = placed.evicted[mine][gone].cpu().T
            self._down.append(Rows.of(words, self._gather(t, placed.slots[mine][gone])))
            refused = ends[t] + (status[mine] == hash.REFUSED).nonzero().view(-1)
            placed.slots[refused] = self._beside(t, refused.numel()).to(placed.slots.device)
            kept = keys.ids[misses.first[refused]].cpu()
            scores = self._scores(t, misses.totals[refused].cpu())
            nothing = torch.empty(kept.numel(), 0, dtype=torch.uint8)
            self._copies.append(Rows(kept, torch.full_like(kept, tick), scores, nothing))
            counts = self._counts[t]
            counts["demoted"] += self._down[-1].keys.numel()
            counts["served_below"] += kept.numel()
        status[status == hash.REFUSED] = hash.NEW
        inserted.slots.copy_(hash.spread(inserted.slots, placed.slots, misses.groups))
        self._copies_differ = any(rows.keys.numel() for rows in self._copies)

    def _scores(self, table: int, totals: Tensor) -> Tensor:
        """Of rows that are served in place, as a slot would have them."""
        order = self.module.index.order
        if order == "assigned":
            assert self._given is not None
            return self._given[table].cpu().expand_as(totals).clone()
        return totals if order in _COUNTED else torch.zeros_like(totals)

    def arriving(self, keys: Keys, inserted: Inserted) -> None:
        """Write the rows that were below over first values, and take in those that gave way."""
        misses, placed = inserted.misses, inserted.placed
        assert misses is not None
        assert placed is not None
        ends = misses.ends.tolist()
        for t, found in enumerate(self._found):
            slots = placed.slots[ends[t] : ends[t + 1]].cpu()[found.positions]
            placed.status[(ends[t] + found.positions).to(placed.status.device)] = hash.HIT
            there = slots >= 0
            self._scatter(t, slots[there], found.rows.values[there])
            up = there & (slots < self.module.tables[t].rows)
            self._up[t] = found.rows.keys[up]
            self._counts[t]["promoted"] += int(up.sum())
        self._found = []
        try:
            self._lift()
        finally:
            self._demote()

    def _lift(self) -> None:
        """Let go of rows that moved up; those that the store keeps are tried again before it is
        asked for anything else."""
        for t in list(self._up):
            self.store.lift(t, self._up[t])
            del self._up[t]

    def _demote(self) -> None:
        """What the store cannot take stays in memory, to be committed with the rest."""
        down, self._down = self._down, []
        failed: Exception | None = None
        for t, rows in enumerate(down):
            try:
                self._put(t, rows)
            except Exception as error:
                self.store.keep(t, rows)
                failed = error
        if failed is not None:
            raise failed

    def _put(self, table: int, rows: Rows, *, is_copies: bool = False) -> None:
        if not rows.keys.numel():
            return
        left = self.store.put(table, rows).keys
        if not is_copies:  # a row that is served in place comes back
            left = left[~torch.isin(left, self._copies[table].keys)]
        self._counts[table]["left"] += left.numel()
        if self.module.removals is not None:
            self.module.removals.tell(table, left, self.module.index.tick)

    # Rows that are served in place

    def search(self, keys: Keys) -> Tensor:
        """The slots of keys as they are; those below get copies beside their table."""
        slots = self.module.index.find(keys)
        missing = slots < 0
        if not bool(missing.any()):
            return slots
        self.settle()
        self.generation += 1
        tables = tables_of(keys)
        for t in range(len(self._widths)):
            at = (missing & (tables == t)).nonzero().view(-1)
            distinct, groups = keys.ids[at].cpu().unique(return_inverse=True)
            found = self._read(t, distinct)
            self._check_room(t, found.positions.numel())
            beside = torch.full_like(distinct, -1)
            beside[found.positions] = self._beside(t, found.positions.numel())
            self._scatter(t, beside[found.positions], found.rows.values)
            slots[at] = beside[groups].to(slots.device)
            self._copies[t] = found.rows
        return slots

    def settle(self) -> None:
        """Put copies that were served in place back, if they may differ from what is below."""
        self._lift()
        if not self._copies_differ:
            return
        for t, rows in enumerate(self._copies):
            if rows.keys.numel():
                values = self._gather(t, self._beside(t, rows.keys.numel()))
                self._put(t, rows._replace(values=values), is_copies=True)
        self._copies_differ = False

    def will_update(self) -> None:
        """The copies are about to be trained."""
        self._copies_differ = True

    def forget_copies(self) -> None:
        """Before rows change behind them."""
        self.settle()
        self.generation += 1
        self._copies = [Rows.none(width) for width in self._widths]

    def _beside(self, table: int, count: int) -> Tensor:
        first = self.module.tables[table].rows
        return torch.arange(first, first + count)

    # Rows as bytes

    def _parts(self, table: int) -> Iterator[Tensor]:
        """Each plane of a table, rows beside included, as `[rows, width]`."""
        layout = self.module.rows
        rows = self.module.tables[table].rows + layout.beside
        for number, plane in enumerate(self.module.planes()):
            first, width = layout.first(table, number), layout.width(table, number)
            yield plane[first : first + rows * width].view(rows, width)

    def _gather(self, table: int, slots: Tensor) -> Tensor:
        slots = slots.to(self.module.hyperparams.device)
        parts = [part[slots].view(torch.uint8) for part in self._parts(table)]
        return torch.cat(parts, dim=1).cpu()

    def _scatter(self, table: int, slots: Tensor, values: Tensor) -> None:
        at, slots = 0, slots.to(self.module.hyperparams.device)
        for part in self._parts(table):
            width = part.shape[1] * part.itemsize
            mine = values[:, at : at + width].contiguous().view(part.dtype)
            part[slots] = mine.to(part.device)
            at += width

    def read_plane(self, table: int, plane: int, keys: Tensor) -> Tensor:
        """One kind of value of keys that are below, `[n, dim]` or `[n]`."""
        layout = self.module.rows
        found = self.store.read(table, keys)
        if found.positions.numel() < keys.numel():
            raise RuntimeError(
                "entries are read before training goes on, and rows of "
                f"{self.module.table_names[table]!r} have moved since; ask for the entries again"
            )
        values = torch.empty(keys.numel(), self._widths[table], dtype=torch.uint8)
        values[found.positions] = found.rows.values
        widths = [layout.width(table, p) * d.itemsize for p, d in enumerate(layout.dtypes)]
        first = sum(widths[:plane])
        mine = values[:, first : first + widths[plane]].contiguous().view(layout.dtypes[plane])
        return mine.view(-1) if layout.per_row(plane) else mine

    def load(self, table: int, entries: Entries) -> int:
        """Put entries below; how many others, or of these, left for it."""
        layout, parts = self.module.rows, []
        for number, (name, dtype) in enumerate(zip(layout.planes, layout.dtypes, strict=True)):
            shape = (len(entries), layout.width(table, number))
            rows = entries.rows.get(name)
            if rows is None:
                part = torch.full(shape, self.module.tables[table].initial_state, dtype=dtype)
            else:
                part = rows[torch.arange(len(entries))].to("cpu", dtype).view(shape)
            parts.append(part.contiguous().view(torch.uint8))
        scores = torch.zeros_like(entries.keys) if entries.scores is None else entries.scores
        columns = (entries.keys.cpu(), entries.stamps.cpu(), scores.cpu())
        return self.store.put(table, Rows(*columns, torch.cat(parts, dim=1))).keys.numel()

    # All rows

    def above(self, table: int) -> Iterator[Rows]:
        """The rows of the fast tier, in batches."""
        found = self.module.index.export(table)
        scores = torch.zeros_like(found.keys) if found.scores is None else found.scores
        columns = (found.keys, found.stamps, scores, found.slots)
        for keys, stamps, some, slots in zip(*(c.split(BATCH) for c in columns), strict=True):
            if keys.numel():
                yield Rows(keys.cpu(), stamps.cpu(), some.cpu(), self._gather(table, slots))

    def flush(self) -> None:
        """Commit both tiers."""
        self.settle()
        module = self.module
        numbers = {"tick": module.index.tick, "hyper": module.hyperparams.tolist()}
        note = json.dumps({"planes": self._planes(), **numbers})
        self.store.flush([self.above(t) for t in range(len(self._widths))], note)

    def fetch(self, keys: Keys) -> None:
        """Have the rows of a coming batch that are below in memory soon."""
        missing = self.module.index.find(keys) < 0
        tables = tables_of(keys)
        for t in range(len(self._widths)):
            self.store.fetch(t, keys.ids[missing & (tables == t)].cpu().unique())

    def erase(self, table: int, keys: Tensor) -> Tensor:
        """Forget keys that are below; bool by key, where one was (once a key)."""
        self.forget_copies()
        keys = keys.cpu()
        distinct, groups = keys.unique(return_inverse=True)
        firsts = torch.full_like(distinct, keys.numel())
        firsts.scatter_reduce_(0, groups, torch.arange(keys.numel()), "amin")
        here = torch.zeros(keys.numel(), dtype=torch.bool)
        here[firsts] = self.store.erase(table, distinct)
        return here

    def expire(self, table: int, before: int) -> Tensor:
        """Forget rows below that were last used before a tick; returns their keys."""
        self.settle()
        gone = self.store.expire(table, before)
        if torch.isin(self._copies[table].keys, gone).any():
            self.forget_copies()
        return gone

    def clear(self) -> None:
        """Forget all rows below."""
        self._copies_differ = False
        self._up = {}
        self.forget_copies()
        for t in range(len(self._widths)):
            self.store.clear(t)
