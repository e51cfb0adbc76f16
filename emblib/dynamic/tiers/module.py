"""Dynamic tables in two tiers: fast memory in front of a store of any size."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from emblib.dynamic.admission import missing_of
from emblib.dynamic.hash_index import Inserted
from emblib.dynamic.keys import as_keys
from emblib.dynamic.module import DynamicEmbeddingBags
from emblib.dynamic.rows import Reads, RowLayout, Step
from emblib.dynamic.saving import loading
from emblib.dynamic.saving.dumps import Progress, Report
from emblib.dynamic.saving.entries import Changes, Chosen, Entries, Joined, best_first
from emblib.dynamic.saving.loading import Loaded, Target
from emblib.dynamic.tiers.backing_tier import LowerTier
from emblib.dynamic.tiers.store import BATCH, TierMode, Tiers, TierStats
from emblib.ops.hash import Keys, Misses
from emblib.optim import External, Optimizer
from emblib.specs import DynamicSpec, InsertPolicy, Pooling, Precision
from emblib.tables.graph_break import graph_break
from emblib.tables.locks import atomic


class TieredEmbeddingBags(DynamicEmbeddingBags):
    """`DynamicEmbeddingBags` whose rows may be in two tiers: each key is in one of them.

    `DynamicSpec.capacity` is that of the fast tier. Whatever gives way there moves down with its
    optimizer state, and moves up again when it is used: nothing is lost but what leaves the last
    tier, and until something does the outputs and updates are those of one large table, bit for
    bit (stochastic rounding aside). Evaluation reads both tiers and moves nothing. `stats` counts
    what the fast tier had to do, `tier_stats` what both had; to `key_status` a key that was below
    is one that was there.

    A store that outlives the process is committed by `flush`, and a module that opens it goes on
    from there: rows, states, step and optimizer numbers, but no counts of admission and no scores
    that are still to be given.

    Threads may share a module as they may `DynamicEmbeddingBags`; a forked process may not use a
    store in files (docs/threads.md).

    Args:
        tables: as in `DynamicEmbeddingBags`; `newcomer` follows `tiers.mode`.
        tiers: the lower tier. It belongs to this module alone.
        optimizer, pooling, feature_tables, precision, seed, device: as there.

    Raises:
        BlockingIOError: the store is open elsewhere.
        ValueError: the store holds other tables; `optim.External`.
    """

    lower: LowerTier | None = None

    def __init__(
        self,
        tables: Sequence[DynamicSpec],
        tiers: Tiers,
        optimizer: Optimizer | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        precision: Precision | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
    ) -> None:
        if not isinstance(tiers, Tiers):
            raise TypeError(f"tiers must be Tiers, e.g. Tiers(HostRows(1_000_000)), got {tiers!r}")
        if isinstance(optimizer, External):
            raise ValueError(
                "optim.External keeps its state outside, where it would not move with the rows; "
                "use a fused optimizer, or tables without a lower tier"
            )
        self.tiers = tiers
        self._device = torch.empty(0, device=device).device
        specs = (tables,) if isinstance(tables, DynamicSpec) else tables
        caching = tiers.mode is TierMode.CACHING
        newcomer = InsertPolicy.ALWAYS_EVICT if caching else InsertPolicy.EVICT_IF_LOWER
        super().__init__(
            [replace(spec, newcomer=newcomer) for spec in specs],
            optimizer,
            pooling=pooling,
            feature_tables=feature_tables,
            precision=precision,
            seed=seed,
            device=device,
            include_last_offset=include_last_offset,
        )
        self.lower = LowerTier(self, tiers)
        self.followers.append(self.lower)

    def _row_layout(self) -> RowLayout:
        beside = self.tiers.rows_beside(self._device)
        states = self.optimizer.states
        return RowLayout(self.tables, self.table_names, states, self.precision, beside)

    def _below(self) -> LowerTier:
        assert self.lower is not None
        return self.lower

    # A batch

    def _search(self, keys: Keys) -> Tensor:
        return self._below().search(keys)

    def _decide(self, keys: Keys, misses: Misses) -> Tensor | None:
        """What admission says; keys that have a row below are not its business."""
        known = self._below().known(keys, misses)
        if self.admission is None:
            return None
        missing = missing_of(keys.ids, misses)
        count = missing.keys.numel()
        tables = torch.where(known[:count], len(self.tables), missing.tables)
        admitted = known.clone()
        admitted[:count] |= self.admission.decide(missing._replace(tables=tables))
        return admitted

    def _log_evicted(self, inserted: Inserted) -> None:
        """What gives way moves down; the lower tier tells what leaves."""

    def _step(self, keys: Keys, slots: Tensor, reads: Reads) -> Step:
        return _Step(
            self._below(), self._lock, self.index, keys, slots, reads, self.dropped_updates
        )

    def _expire(self) -> None:
        super()._expire()
        tick = self.index.tick
        for sweep in self._expiry.sweeps(tick):
            if sweep.first_bucket == 0:
                gone = self._below().expire(sweep.table, sweep.before)
                if self.removals is not None:
                    self.removals.tell(sweep.table, gone, tick)

    @graph_break
    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Have the rows of a coming batch that are in the lower tier read by another thread.

        It changes no result and moves nothing between the tiers; a batch that was not prefetched is
        read when `forward` gets it.
        """
        with torch.no_grad(), self._lock:
            keys, _ = self._batch(as_keys(indices), offsets, batch_sizes)
            self._below().fetch(keys)

    # Both tiers

    @atomic
    def flush(self) -> None:
        """Commit both tiers to the store; returns when that is done.

        For `DiskRows` and `SqliteRows` this is the point that a crash leads back to.
        """
        with torch.no_grad():
            self._below().flush()

    @atomic
    def close(self) -> None:
        """Let go of the store; what was not flushed is undone there. The module is of no use then.

        Without it the store is let go of with the module.
        """
        self._below().store.close()

    @atomic
    def tier_stats(self) -> dict[str, TierStats]:
        """By table what the tiers had to do since construction or `reset_stats`."""
        with torch.no_grad():
            self._below().settle()
        return self._below().stats()

    @atomic
    def reset_stats(self) -> None:
        """Count from zero."""
        super().reset_stats()
        self._below().reset_stats()

    @atomic
    def size(self, table: int) -> int:
        """How many keys a table has in both tiers (reads the device)."""
        with torch.no_grad():
            self._below().settle()
        return super().size(table) + self._below().store.size(table)

    @atomic
    def erase(self, table: int, ids: Tensor) -> Tensor:
        """Remove keys with their rows; bool by position, where one was there (once a key)."""
        with torch.no_grad():
            ids = as_keys(ids)
            below = self._below().erase(table, ids)
            if self.removals is not None:
                self.removals.tell(table, ids.cpu()[below], self.index.tick)
            above = super().erase(table, ids)
        return above | below.to(above.device)

    @atomic
    def clear(self) -> None:
        """Forget all keys, in both tiers; tables have their initial capacity again."""
        super().clear()
        if self.lower is not None:
            self.lower.clear()

    @atomic
    def table_entries(self, table: int | str, since: int | None = None) -> Entries:
        """As in `DynamicEmbeddingBags`, of both tiers."""
        table = self.table_number(table)
        with torch.no_grad():
            self._below().settle()
        above, below = super().table_entries(table, since), _Below(self._below(), table, since)
        scores = None if above.scores is None else torch.cat([above.scores, below.scores])
        rows = {
            name: Joined([above.rows[name], _BelowPlane(below, number)])
            for number, name in enumerate(self.rows.planes)
        }
        keys, stamps = (
            torch.cat(pair) for pair in ((above.keys, below.keys), (above.stamps, below.stamps))
        )
        return Entries(keys, stamps, scores, rows)

    @atomic
    def set_table_entries(
        self,
        table: int | str,
        entries: Entries,
        report: Report | None = None,
        *,
        hash_key: int | None = None,
    ) -> Loaded:
        """As in `DynamicEmbeddingBags`; all entries go to the lower tier, the fast one is empty."""
        table = self.table_number(table)
        loading.check(self._target(table), entries)
        lower = self._below()
        with torch.no_grad():
            lower.forget_copies()
            lower.store.clear(table)
            self.index.empty(table, hash_key)
        return self._load_below(table, entries, report)

    def _load_below(self, table: int, entries: Entries, report: Report | None) -> Loaded:
        """Put entries into the lower tier whose keys the fast one has not.

        The best come last: what comes later displaces what is there.
        """
        self.index.set_tick(max(self.index.tick, entries.newest_stamp()))
        left = done = 0
        order = best_first(entries, self.index.order).cpu()
        with torch.no_grad():
            for part in reversed(order.split(BATCH)):
                left += self._below().load(table, entries.take(part))
                done += part.numel()
                if report is not None:
                    report(Progress(self.table_names[table], done, len(entries)))
        return Loaded(len(entries) - left, left, 0)

    def _absent(self, table: int, keys: Tensor) -> Tensor:
        keys = super()._absent(table, keys)
        here = torch.zeros(keys.numel(), dtype=torch.bool)
        here[self._below().store.read(table, keys).positions] = True
        return keys[~here]

    def _change(self, target: Target, changes: Changes, report: Report | None) -> Loaded:
        """What changed begins below, in whichever tier it was."""
        table, (upserts, removed) = target.table, changes
        self._below().erase(table, removed)
        loading.erase(target, torch.cat([removed, upserts.keys]))
        return self._load_below(table, upserts, report)

    @atomic
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.lower is not None:
            with torch.no_grad():
                self.lower.forget_copies()
        return super()._apply(fn, recurse)

    def snapshot(self) -> dict[str, Any]:
        """Not there: slots are of the fast tier alone."""
        raise RuntimeError(
            "a snapshot is slot by slot, and rows of the lower tier have no slots; take state_dict "
            "instead, which has the rows of both tiers"
        )

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Not there either: keys of the lower tier would stay beside those of the snapshot."""
        raise RuntimeError(
            "a snapshot is of a module without a lower tier and does not fit one with it; load a "
            "state_dict or a dump instead"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a module with a lower tier cannot be copied or pickled, as its store has one owner; "
            "make a module with another store and load the state_dict of this one into it"
        )


class _Step(Step):
    """A step whose keys may be in either tier: none of them is ever lost."""

    def __init__(self, lower: LowerTier, *arguments: Any) -> None:
        super().__init__(*arguments)
        # A step lives as long as the graph of its output, which must not keep the store open.
        self._lower_tier, self._generation = weakref.ref(lower), lower.generation

    @property
    def _lower(self) -> LowerTier:
        lower = self._lower_tier()
        assert lower is not None
        return lower

    def is_stale(self) -> bool:
        """Whether rows may be elsewhere by now."""
        return super().is_stale() or self._lower.generation != self._generation

    def find(self) -> Tensor:
        """Where they are now."""
        return self._lower.search(self._keys)

    def before_update(self) -> Any:
        """As for any step; copies are put back later."""
        places = super().before_update()
        self._lower.will_update()
        return places


class _Below:
    """The entries of the lower tier of a table; rows are read when they are asked for."""

    def __init__(self, lower: LowerTier, table: int, since: int | None) -> None:
        self.lower, self.table = lower, table
        columns: list[list[Tensor]] = [[torch.empty(0, dtype=torch.int64)] for _ in range(3)]
        for rows in lower.store.iterate(table):
            used = rows if since is None else rows.at(rows.stamps >= since)
            for column, part in zip(columns, used, strict=False):
                column.append(part)
        self.keys, self.stamps, self.scores = (torch.cat(column) for column in columns)


class _BelowPlane(Chosen):
    """One kind of value of the rows below."""

    def __init__(self, below: _Below, plane: int) -> None:
        layout = below.lower.module.rows
        self._below, self._plane = below, plane
        self.dtype = layout.dtypes[plane]
        shape = () if layout.per_row(plane) else (layout.width(below.table, plane),)
        self.shape = (below.keys.numel(), *shape)

    def __getitem__(self, index: Tensor) -> Tensor:
        return self._below.lower.read_plane(
            self._below.table, self._plane, self._below.keys[index.to("cpu")]
        )
