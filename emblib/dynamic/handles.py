"""Handles: one object per dynamic table, for everything but lookups, wherever its shards are.

`table_handles()["user"]` of a `DynamicEmbeddingBags`, of a collection, of a sharded collection or
of a model is a `DynamicTable`. It reaches the table through its shards: a table in one process has
one, a sharded table one per block of keys, of which this rank has some. Methods of a sharded table
are collectives over all its ranks and treat the table as a whole; `local` is the handle of the
shards of this rank alone, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from emblib.dynamic import keys as routing
from emblib.dynamic import shrinking, sweeps, training
from emblib.dynamic import state as dynamic_state
from emblib.dynamic.eviction import custom_score_for, step_for
from emblib.dynamic.saving import checkpoint, fallback, table_dumps
from emblib.dynamic.saving.dumps import DumpError, Part, Report
from emblib.dynamic.saving.entries import Changes, Entries, concatenate
from emblib.dynamic.saving.loading import Loaded
from emblib.dynamic.saving.table_dumps import ChangeSet
from emblib.dynamic.state import DynamicState
from emblib.dynamic.statistics import TableStatistics, checked_remember
from emblib.dynamic.tiers.store import TierStats
from emblib.specs import DynamicSpec, check_count

T = TypeVar("T")


class ShardLocation(Protocol):
    """Current location of a shard: table `index` of `module`; it changes if the shard moves."""

    @property
    def module(self) -> Any:
        """Return the module that looks the shard up."""

    @property
    def index(self) -> int:
        """Return the number of the shard in its module."""


class RankLinks(Protocol):
    """The ranks of a sharded table (an `emblib.sharding.RankGroup`)."""

    rank: int
    size: int

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""


class TableChanges(NamedTuple):
    """The changes of a table since a training step.

    Attributes:
        since: first step of the changes.
        until: the step to pass to `changes_since` the next time.
        entries: keys used or written at `since` or later, with their rows.
        removed: keys that left since then and are absent, int64 `[n]`.
        changes: content for `apply_changes`: entries, removed keys, hyperparameters, hash keys and
            fallback rows.
    """

    since: int
    until: int
    entries: Entries
    removed: Tensor
    changes: ChangeSet


@dataclass(frozen=True)
class DynamicTable:
    """A dynamic table as a whole, wherever its shards are.

    If the table is sharded over several ranks, methods are collectives: all ranks call them. An
    error on one rank is raised there, and as a RuntimeError on all others. Each rank passes any
    keys, possibly none, and gets results for these keys, on the CPU. Other arguments must be equal
    on all ranks, and results about the whole table are equal. Keys are int64, uint64 or int32 `[n]`
    on any device. Methods wait for the device.

    Properties, `local_shards`, `reserve` and options (`set_score`, `set_step`, `set_clock`,
    `track_evictions`, `track_statistics`) do not communicate, but must be used in the same way on
    all ranks. A rank without shards checks the arguments of options too. `local` acts on the shards
    of this rank alone, possibly none.

    Each shard is used under the lock of its module, so threads may call methods; a method is not
    atomic over several shards. Get a handle with `tables[name]`, after the model has its optimizers
    and is sharded.

    Attributes:
        name: name of the table.
        shards: the shards of this process, by number.
        owners: the rank that has each shard.
        ranks: the ranks that act together; None for this process alone.
        spec: the spec of the table, by which all ranks check scores, steps and ttls alike; None
            checks none.
    """

    name: str
    shards: Mapping[int, ShardLocation]
    owners: Sequence[int] = (0,)
    ranks: RankLinks | None = None
    spec: DynamicSpec | None = None

    @property
    def is_sharded(self) -> bool:
        """Return whether methods are collectives over several ranks."""
        return self.ranks is not None and self.ranks.size > 1

    @property
    def local(self) -> DynamicTable:
        """Return a handle of the shards of this rank alone."""
        return DynamicTable(self.name, self.shards, self.owners)

    def __repr__(self) -> str:
        ranks_text = f" over {self.ranks.size} ranks" if self.is_sharded and self.ranks else ""
        return f"DynamicTable({self.name!r}, {len(self.owners)} shard(s){ranks_text})"

    # Counts

    def size(self) -> int:
        """Return the number of keys, in all tiers."""
        return sum(self._map_shards("size", dynamic_state.size))

    def capacity(self) -> int:
        """Return the number of rows in use now; rows in a backing store do not count."""
        return sum(self._map_shards("capacity", dynamic_state.capacity))

    def stats(self) -> dict[str, int]:
        """Return counts by name since the last reset, see `DynamicEmbeddingBags.stats`."""
        return _sum_counts(
            self._map_shards("stats", lambda state, index: state.index.stats()[index])
        )

    def tier_stats(self) -> TierStats | None:
        """Return counts of both tiers since the last reset; None without a backing store."""

        def shard_stats(state: DynamicState, index: int) -> dict[str, int] | None:
            counts = dynamic_state.tier_stats(state)
            return asdict(counts[state.table_names[index]]) if counts else None

        all_stats = [
            stats for stats in self._map_shards("tier_stats", shard_stats) if stats is not None
        ]
        return TierStats(**_sum_counts(all_stats)) if all_stats else None

    def track_statistics(self, *, remember: int = 0) -> None:
        """Count more in `statistics`, see `DynamicEmbeddingBags.track_statistics`.

        Tables of one module are tracked together. Raises TypeError or ValueError unless `remember`
        is an int in [0, 2^40].
        """
        checked_remember(remember)
        for _, state, _ in self.local_shards():
            dynamic_state.track_statistics(state, remember=remember)

    def statistics(self) -> TableStatistics:
        """Return the numbers of the whole table since the last reset, added up over its shards.

        `local.statistics()` returns the numbers of the shards of this rank.

        Raises:
            ValueError: `local` is of a rank without a shard.
        """
        return TableStatistics.merged(self._map_shards("statistics", dynamic_state.statistics))

    def statistics_by_rank(self) -> list[TableStatistics | None]:
        """Return the numbers of each rank's shards, on all ranks; None for a rank without one."""

        def merge_local() -> TableStatistics | None:
            return self.local.statistics() if self.shards else None

        return self._run_on_all_ranks("statistics_by_rank", merge_local)

    def bucket_fill(self) -> list[int]:
        """Return how many buckets of the fast tier have 0, 1, ... 32 keys; [] without a shard."""
        fill_by_shard = self._map_shards("bucket_fill", dynamic_state.bucket_fill)
        return [sum(counts) for counts in zip(*fill_by_shard, strict=True)]

    def step(self) -> int:
        """Return the number of training forwards of its module, those before a load included."""
        return max(self._map_shards("step", lambda state, index: state.index.tick), default=0)

    # Keys

    def contains(self, keys: Tensor) -> Tensor:
        """Return which keys are in the table, in any tier, bool `[n]` on the CPU."""
        return self._ask_owners("contains", keys, dynamic_state.contains, default=False)

    def erase(self, keys: Tensor) -> Tensor:
        """Remove keys with their rows; return which were present, bool `[n]`.

        Of a key that repeats, on any rank, only one position is true.
        """
        return self._ask_owners("erase", keys, training.erase, default=False)

    def key_status(self, keys: Tensor) -> Tensor:
        """Return the `KeyStatus` of keys in the last training forward, uint8 `[n]`.

        Keys that were not in that batch are `KeyStatus.ABSENT`.

        Raises:
            RuntimeError: there was no training forward, or its ids were overwritten since.
        """
        absent_code = int(routing.KeyStatus.ABSENT)
        return self._ask_owners("key_status", keys, dynamic_state.status_of, default=absent_code)

    # Eviction

    def set_score(self, score: int) -> None:
        """Set the score that keys get from the next batch on, for `Eviction.CUSTOM`.

        Raises:
            ValueError: the table has another eviction, or the score is not an int64.
            TypeError: the score is not an int.
        """
        for _, state, index in self.local_shards():
            dynamic_state.set_eviction_score(state, {index: score})
        if self.spec is not None and not self.shards:
            custom_score_for(self.name, self.spec.eviction, score)

    def set_key_scores(self, keys: Tensor, scores: Tensor | int) -> Tensor:
        """Set scores of single keys, for `CUSTOM` and `STEP`; return which are present, bool `[n]`.

        Keys of a batch never evict each other, so a call right after the forward has the effect of
        scores per lookup. E.g. with one feature of ids and one of their scores, pass the values of
        both features. A key that occurs more than once, on any rank, gets the largest of its
        scores; the next batch that uses it assigns the score of that batch again.

        Args:
            keys: keys of this rank.
            scores: integers `[n]`, or one number for all.

        Raises:
            TypeError: scores are not integers.
            ValueError: eviction is not by assigned scores, or another number of scores than of
                keys.
        """
        assign = dynamic_state.assign_key_scores
        return self._ask_owners("set_key_scores", keys, assign, default=False, scores=[scores])

    def track_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `DynamicEmbeddingBags.track_optimizer_state` of the modules of the shards."""
        track = training.track_optimizer_state
        self._map_shards("track_optimizer_state", lambda state, _: track(state, optimizer))

    def set_step(self, step: int) -> None:
        """Set the step that keys get from the next batch, for `Eviction.STEP`.

        Raises:
            ValueError: the table has another eviction, or the step is not in [-2^63, 2^62).
            TypeError: the step is not an int.
        """
        for _, state, index in self.local_shards():
            dynamic_state.set_eviction_step(state, index, step)
        if self.spec is not None and not self.shards:
            step_for(self.name, self.spec.eviction, step)

    def score(self) -> int | None:
        """Return the score of the next batch; None if eviction assigns none, or none was set."""
        scores = self._map_shards("score", dynamic_state.eviction_score)
        return scores[0] if scores else None

    def expire_keys(self) -> int:
        """Remove all keys whose time to live is over now; return how many, over all shards.

        Raises:
            ValueError: the table has no ttl, or the clock returned a number that is not a time.
            Exception: the clock or the backing store raised it.
        """
        counts = self._map_shards("expire_keys", sweeps.expire_keys)
        return sum(count for shard_counts in counts for count in shard_counts.values())

    def skip_pause(self, duration: timedelta | None = None) -> None:
        """Leave a pause out of the ages of keys, see `DynamicEmbeddingBags.skip_pause`.

        The tables of one module share it: call it for one of them only.

        Raises:
            ValueError: no table of the module has a ttl that is a time, of a table over several
                ranks this table has none, or the pause is negative.
            TypeError: the pause is not a `datetime.timedelta`.
        """
        self._check_timed_ttl()
        skip = dynamic_state.skip_pause
        self._map_shards("skip_pause", lambda state, index: skip(state, duration))

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Set the clock by which keys expire, in seconds; the tables of one module share it.

        Raises:
            ValueError: no table of the module has a ttl that is a time, or, of a table over several
                ranks, this table has none.
            TypeError: the clock is not a function.
        """
        dynamic_state.check_clock(clock)
        self._check_timed_ttl()
        for _, state, _ in self.local_shards():
            dynamic_state.set_clock(state, clock)

    def _check_timed_ttl(self) -> None:
        """Raise ValueError if a table over several ranks has no ttl that is a time.

        The tables that share a module differ between ranks, so they cannot decide.
        """
        if self.is_sharded and self.spec is not None and not self.spec.is_timed:
            raise ValueError(
                f"table {self.name!r} has no ttl that is a time: a clock and pauses have no effect "
                "on it; give it DynamicSpec(ttl=datetime.timedelta(...))"
            )

    def reserve(self, rows: int) -> None:
        """Grow the table to the size that `rows` keys need, at most to its capacity.

        Each shard grows to its part; in a memory budget as far as bytes are free.

        Raises:
            TypeError: `rows` is not an int.
            ValueError: `rows` is negative.
        """
        rows_per_shard = self._rows_per_shard(rows)
        for _, state, index in self.local_shards():
            dynamic_state.reserve(state, index, rows_per_shard)

    def shrink(self, rows: int) -> int:
        """Shrink the table to `rows` rows, and return how many keys were evicted, over all shards.

        Each shard shrinks to its part, see `DynamicEmbeddingBags.shrink`.

        Raises:
            TypeError: `rows` is not an int.
            ValueError: `rows` is below `initial_capacity`, both rounded up to multiples of 32 per
                shard; the table is on CUDA; or it evicts no keys.
        """
        counts = self._map_shards(
            "shrink",
            lambda state, index: shrinking.shrink(state, index, self._rows_per_shard(rows)),
        )
        return sum(counts)

    def _rows_per_shard(self, rows: int) -> int:
        """Return the rows of each shard if the table has `rows`, rounded up."""
        return -(-check_count("rows", rows, minimum=0) // len(self.owners))

    def track_evictions(self, max_keys: int = 1 << 24) -> None:
        """Record keys that leave from now on, at most `max_keys` per shard.

        Tables of one module are tracked together. If they are tracked already, nothing changes.
        Raises TypeError or ValueError unless `max_keys` is an int of at least 1.
        """
        check_count("max_keys", max_keys)
        for _, state, _ in self.local_shards():
            dynamic_state.track_evictions(state, max_keys)

    def evicted(self, since: int) -> Tensor:
        """Return the keys that left at training step `since` or later and are still absent; int64.

        Raises:
            RuntimeError: `track_evictions` was not called.
            TypeError: the step is not an int.
            ValueError: the record does not reach back to this step, or the table has not reached
                it.
        """
        removed = partial(table_dumps.removed_since, since=since)
        return _cat_or_empty(self._map_shards("evicted", removed))

    # Content

    def entries(self, since: int | None = None) -> Entries:
        """Return copies on the CPU of all entries, or of those used at step `since` or later.

        Every rank gets all entries of a sharded table; `save` writes a table of any size.

        Raises:
            TypeError, ValueError: `since` is not an int >= 0.
        """
        shard_entries = self._map_shards(
            "entries", lambda state, index: checkpoint.table_entries(state, index, since).on_cpu()
        )
        return concatenate(shard_entries).on_cpu() if shard_entries else _no_entries()

    def fallback_rows(self) -> dict[str, Tensor]:
        """Return copies of the fallback rows of the whole table, on all ranks; {} if it has none.

        `keys` int64 `[n]` name the rows in checkpoints; `weight` `[n, dim]` and the states of the
        optimizer are the rows. Keys with `checkpoints.owner(keys, n) == f` share row f.
        """

        def shard_rows(state: DynamicState, index: int, number: int) -> dict[str, Tensor]:
            return fallback.rows_of_shard(fallback.rows_of(state, index), number, len(self.owners))

        rows_of_shards = self._map_numbered_shards("fallback_rows", shard_rows)
        return {
            key: torch.cat([rows[key] for rows in rows_of_shards])
            for key in (rows_of_shards or [{}])[0]
        }

    def set_entries(self, entries: Entries) -> Loaded:
        """Replace the entries; every shard takes those it owns. The eviction log restarts.

        For other rows use `dataclasses.replace(entries(), keys=..., stamps=..., rows=...)`.

        Raises:
            TypeError: the argument is not `Entries`.
            ValueError: the entries do not fit; then nothing is changed.
        """

        def check(state: DynamicState, index: int, number: int) -> None:
            checkpoint.check_entries(state, index, self._owned_entries(entries, number))

        def write(state: DynamicState, index: int, number: int) -> Loaded:
            return checkpoint.set_table_entries(state, index, self._owned_entries(entries, number))

        self._map_numbered_shards("set_entries", check)
        return _sum_loaded(self._map_numbered_shards("set_entries", write))

    def changes_since(self, step: int) -> TableChanges:
        """Return the entries used at training step `step` or later, and the keys that left.

        Every rank gets the changes of all shards. With `save(directory, since=step)` each rank
        instead writes the changes of its own shards.

        Raises:
            RuntimeError: `track_evictions` was not called, or `local` has no shard.
            TypeError: the step is not an int.
            ValueError: the record of removed keys does not reach back to this step, or the table
                has not reached it.
        """

        def shard_changes_since(state: DynamicState, index: int, number: int) -> ChangeSet:
            change_set = table_dumps.changes_since(state, step, [index])
            (changes,) = change_set.tables.values()
            (rows,) = change_set.fallback_rows.values()
            return change_set._replace(
                tables={self.name: Changes(changes.upserts.on_cpu(), changes.removed)},
                fallback_rows={self.name: fallback.rows_of_shard(rows, number, len(self.owners))},
            )

        shard_changes = self._map_numbered_shards("changes_since", shard_changes_since)
        if not shard_changes:
            raise RuntimeError(f"this rank has no shard of table {self.name!r}: ask all ranks")
        changes = _merge_changes(self.name, shard_changes)
        table_changes = changes.tables[self.name]
        return TableChanges(
            step, changes.until, table_changes.upserts, table_changes.removed, changes
        )

    def apply_changes(self, changes: TableChanges) -> Loaded:
        """Apply the changes of another table to this copy of it; a warning counts lost keys.

        The eviction log restarts.

        Raises:
            TypeError: the argument is not `TableChanges`.
            ValueError: this table has not reached the first step of the changes, or is past the
                last, or the changes do not fit it.
        """

        def owned_changes(state: DynamicState, index: int, number: int) -> ChangeSet:
            if not isinstance(changes, TableChanges):
                raise TypeError(f"changes must be TableChanges, got {type(changes).__name__}")
            (table_changes,) = changes.changes.tables.values()
            fallback_rows = next(iter(changes.changes.fallback_rows.values()), {})
            removed = table_changes.removed[self._is_owned(table_changes.removed, number)]
            owned_part = Changes(self._owned_entries(table_changes.upserts, number), removed)
            rows = fallback.rows_of_shard(fallback_rows, number, len(self.owners))
            name = state.table_names[index]
            return changes.changes._replace(tables={name: owned_part}, fallback_rows={name: rows})

        def check(state: DynamicState, index: int, number: int) -> None:
            table_dumps.check_changes(state, owned_changes(state, index, number))

        def apply(state: DynamicState, index: int, number: int) -> Loaded:
            shard_changes = owned_changes(state, index, number)
            (loaded,) = table_dumps.apply_changes(state, shard_changes).values()
            return loaded

        self._map_numbered_shards("apply_changes", check)
        return _sum_loaded(self._map_numbered_shards("apply_changes", apply))

    def save(
        self, directory: str | Path, *, since: int | None = None, report: Report | None = None
    ) -> int:
        """Save the table to a directory, or its changes since a training step.

        Each rank writes its shards, 16 MiB at a time. If it is cut short between the ranks, a dump
        that it replaces is lost. See `DynamicEmbeddingBags.save` for arguments and errors.

        Returns:
            The step to pass as `since` the next time.

        Raises:
            ValueError: tables of one module share admission counters, scores or times.
            DumpError: ranks have written to directories that they do not share; on all ranks.
        """
        identity = str(self.step())

        def save_shard(state: DynamicState, index: int, number: int) -> int:
            return table_dumps.save_table(
                state,
                index,
                directory,
                name=self.name,
                since=since,
                part=Part(number, len(self.owners)),
                identity=identity,
                report=report,
            )

        step = min(self._map_numbered_shards("save", save_shard), default=0)
        if self.is_sharded:
            self._run_on_all_ranks("save", lambda: self._check_parts(Path(directory)))
        return step

    def _check_parts(self, directory: Path) -> None:
        """Raise DumpError if this rank has written a part and does not see those of others."""
        num_parts = len(self.owners)
        for number in range(num_parts) if self.shards else ():
            path = directory / Part(number, num_parts).manifest
            if not path.is_file():
                raise DumpError(
                    f"rank {self.owners[number]} has written {path.name}, which is not in "
                    f"{directory.absolute()} of this rank: all ranks must save to the same "
                    "directory, on a file system that they share"
                )

    def load(self, directory: str | Path, report: Report | None = None) -> Loaded:
        """Load what `save` wrote with any number of shards; apply it if it is a dump of changes.

        A dump of a module with this table is accepted as well. Everything is checked on all ranks
        before the first shard is changed. The hyperparameters, which tables of one module share,
        are loaded from a dump of changes, and from a whole dump that has made more steps. So is the
        step count; a warning tells of keys of other tables that expire by it.

        Raises:
            DumpError: there is no whole dump, or it is damaged.
            ValueError: it is of another table or optimizer, or of changes that do not follow.
        """
        dumps: dict[int, table_dumps.TableDump] = {}

        def read(state: DynamicState, index: int, number: int) -> None:
            part = Part(number, len(self.owners))
            dumps[number] = table_dumps.read_table(
                state, index, directory, name=self.name, part=part
            )

        def write(state: DynamicState, index: int, number: int) -> Loaded:
            return table_dumps.set_table(state, index, dumps[number], report)

        self._map_numbered_shards("load", read)
        return _sum_loaded(self._map_numbered_shards("load", write))

    def flush(self) -> None:
        """Commit the shards to their backing stores and wait until that is done on all ranks.

        Tables of one module are committed together; without a store this does nothing.
        """
        self._map_shards("flush", lambda state, index: dynamic_state.flush(state))

    # Shards and ranks

    def local_shards(self) -> Iterator[tuple[int, DynamicState, int]]:
        """Yield the number of each shard of this process, its state, and its table in that state.

        Raises:
            RuntimeError: the table is on meta, where it has no memory.
        """
        for number, location in sorted(self.shards.items()):
            if not hasattr(location.module, "state"):
                raise RuntimeError(
                    f"table {self.name!r} has no memory on meta: move its module with "
                    "to_empty(device=...) or shard it first"
                )
            yield number, location.module.state, location.index

    def _gather(self, method: str, value: T) -> list[T]:
        """Gather values of all ranks, after checking that all call the same method."""
        if self.ranks is None:
            return [value]
        calls = self.ranks.gather_objects((f"{method} of {self.name!r}", value))
        methods = [rank_method for rank_method, _ in calls]
        if len(set(methods)) > 1:
            raise RuntimeError(
                "all ranks call the same method of the same table together, and these are called, "
                f"by rank: {', '.join(methods)}; `local` acts on the shards of one rank"
            )
        return [value for _, value in calls]

    def _run_on_all_ranks(self, method: str, function: Callable[[], T]) -> list[T]:
        """Return the results of all ranks; raise on every rank if one fails."""
        error, value = None, None
        try:
            value = function()
        except Exception as raised:
            error = raised
        local_problem = None if error is None else f"{type(error).__name__}: {error}"
        results = self._gather(method, (local_problem, value))
        if error is not None:
            raise error
        for rank, (problem, _) in enumerate(results):
            if problem is not None:
                raise RuntimeError(f"table {self.name!r}: rank {rank} failed with {problem}")
        return [result for _, result in results]  # type: ignore[misc]

    def _map_numbered_shards(
        self, method: str, function: Callable[[DynamicState, int, int], T]
    ) -> list[T]:
        """Return `function(state, index, number)` of every shard, on all ranks by number.

        Each call holds the lock of the module of the shard.
        """
        call = dynamic_state.of_state(function)
        results_by_rank = self._run_on_all_ranks(
            method,
            lambda: {
                number: call(state, index, number) for number, state, index in self.local_shards()
            },
        )
        result_by_shard = {
            number: value for values in results_by_rank for number, value in values.items()
        }
        return [result_by_shard[number] for number in sorted(result_by_shard)]

    def _map_shards(self, method: str, function: Callable[[DynamicState, int], T]) -> list[T]:
        """Return `function(state, index)` of every shard, on all ranks, by number of the shard."""
        return self._map_numbered_shards(method, lambda state, index, _: function(state, index))

    def _is_owned(self, keys: Tensor, number: int) -> Tensor:
        """Return which keys shard `number` owns, bool `[n]`."""
        return routing.owner(keys, len(self.owners)) == number

    def _owned_entries(self, entries: Entries, number: int) -> Entries:
        """Return the entries whose keys shard `number` owns."""
        if not isinstance(entries, Entries):
            raise TypeError(
                f"entries must be those of entries(), Entries, got {type(entries).__name__}; "
                "dataclasses.replace(entries(), keys=..., stamps=..., rows=...) has other rows"
            )
        return entries.owned(number, len(self.owners))

    def _ask_owners(
        self,
        method: str,
        keys: Tensor,
        query: Callable[..., Tensor],
        default: bool | int,
        scores: Sequence[Any] = (),
    ) -> Tensor:
        """Return the answer of the shard that owns each key; `default` without such a shard here.

        `query(state, table index, keys)` is called for the keys of each shard. `scores` is empty,
        or has one item, the scores of `keys`; then `query` gets one score per key as well.
        """
        columns_by_rank = self._run_on_all_ranks(method, lambda: _keys_with_scores(keys, *scores))
        columns = [torch.cat(column) for column in zip(*columns_by_rank, strict=True)]
        all_keys, num_keys = columns[0], [keys.numel() for keys, *_ in columns_by_rank]
        owner = routing.owner(all_keys, len(self.owners))

        def answers() -> Tensor:
            dtype = torch.bool if isinstance(default, bool) else torch.uint8
            answers_by_key = torch.full_like(all_keys, default, dtype=dtype)
            for number, state, index in self.local_shards():
                columns_of_rank = [column[owner == number] for column in columns]
                answers_by_key[owner == number] = query(state, index, *columns_of_rank).cpu()
            return answers_by_key

        answers_by_rank = self._run_on_all_ranks(method, answers)
        if self.ranks is None:
            return answers_by_rank[0]
        begin, num_local = sum(num_keys[: self.ranks.rank]), num_keys[self.ranks.rank]
        local_keys = slice(begin, begin + num_local)
        local_answers = torch.stack([rank_answers[local_keys] for rank_answers in answers_by_rank])
        rank_of_key = torch.tensor(self.owners, device="cpu")[owner[local_keys]]
        return local_answers[rank_of_key, torch.arange(num_local, device="cpu")]


def _keys_with_scores(keys: Tensor, *scores: Tensor | int) -> list[Tensor]:
    """Return keys and, if there are `scores`, one per key; int64 `[n]` each, on the CPU.

    Raises:
        TypeError, ValueError: see `DynamicTable.set_key_scores`.
    """
    columns = [routing.as_keys(keys).detach().cpu().view(-1)]
    num_keys = columns[0].numel()
    for values in map(routing.as_scores, scores):
        if values.dim() and values.numel() != num_keys:
            raise ValueError(
                f"scores must be one number, or one per key = {num_keys}, got {values.numel()}"
            )
        columns.append(values.cpu().reshape(-1).expand(num_keys).contiguous())
    return columns


def _no_entries() -> Entries:
    """Return no entries, for a rank without a shard."""
    no_keys = torch.empty(0, dtype=torch.int64, device="cpu")
    return Entries(no_keys, no_keys, None, {"weight": torch.empty(0, 0, device="cpu")})


def _merge_changes(name: str, shard_changes: Sequence[ChangeSet]) -> ChangeSet:
    """Merge the changes of all shards into one `ChangeSet`."""
    table_changes = [change.tables[name] for change in shard_changes]
    changes = Changes(
        concatenate([shard_table.upserts for shard_table in table_changes]).on_cpu(),
        torch.cat([shard_table.removed for shard_table in table_changes]),
    )
    first_changes = shard_changes[0]
    shard_keys = [
        None if change.hash_keys is None else change.hash_keys.tolist() for change in shard_changes
    ]
    is_one_hash = all(hash_keys == shard_keys[0] for hash_keys in shard_keys)
    all_rows = [change.fallback_rows[name] for change in shard_changes]
    rows = {key: torch.cat([shard_rows[key] for shard_rows in all_rows]) for key in all_rows[0]}
    return first_changes._replace(
        until=min(change.until for change in shard_changes),
        tables={name: changes},
        hash_keys=first_changes.hash_keys if is_one_hash else None,
        fallback_rows={name: rows},
    )


def _cat_or_empty(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def _sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up counts by name."""
    total_by_name: dict[str, int] = {}
    for shard_counts in counts:
        for name, count in shard_counts.items():
            total_by_name[name] = total_by_name.get(name, 0) + count
    return total_by_name


def _sum_loaded(reports: Sequence[Loaded]) -> Loaded:
    """Add up the numbers of entries that shards loaded."""
    names = Loaded._fields
    return Loaded(**{name: sum(getattr(report, name) for report in reports) for name in names})
