"""Eviction from dynamic tables: scores of batches, expiry by age, and a log of evicted keys.

A *step* trains one batch. A *tick* is the number of a step; the stamp of a key is the tick of its
last use.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.columns import HashEntryColumn
from emblib.dynamic.hash_index import MAX_TICK
from emblib.dynamic.keys import checked_score
from emblib.ops import hash
from emblib.ops.effects import Effects
from emblib.ops.hash import InsertedBatch
from emblib.specs import DynamicSpec, Eviction, check_count
from emblib.tables import state_dicts

_STEPS_END = 3 * (MAX_TICK // 2)  # exclusive, of saved counts: no training reaches it from 2^62


def custom_score_for(table: str, eviction: Eviction, score: Any) -> int:
    """Return a score for a table with `Eviction.CUSTOM` as an int.

    Raises:
        ValueError: the table, which `table` names, has another eviction, or the score does not fit
            into int64.
        TypeError: the score is not an int.
    """
    if eviction is not Eviction.CUSTOM:
        raise ValueError(
            f"only tables with Eviction.CUSTOM take scores, table {table!r} has {eviction}"
        )
    return checked_score(score)


def step_for(table: str, eviction: Eviction, step: Any) -> int:
    """Return a step for a table with `Eviction.STEP` as an int.

    Raises:
        ValueError: the table, which `table` names, has another eviction, or the step is not in
            [-2^63, 2^62).
        TypeError: the step is not an int.
    """
    if eviction is not Eviction.STEP:
        raise ValueError(
            f"only tables with Eviction.STEP count steps, table {table!r} has {eviction}"
        )
    if (number := checked_score(step)) >= MAX_TICK:
        raise ValueError(f"steps must be below 2^62, so that counts go on, got {number}")
    return number


class EvictionScores(nn.Module):
    """Scores that each table assigns to the keys of its next training batch.

    Tables with `Eviction.STEP` assign a count of training batches. It starts at 1 or at a number
    below 2^62 that `set_steps` sets, so that it never overflows. Tables with `Eviction.CUSTOM`
    assign the number that was last passed to `set_custom`. The owner must hold its lock around
    every call, and pass numbers of tables that exist. `by_table` and loading wait for the device.

    Args:
        specs: the tables.
        device: device of the scores.
    """

    values: Tensor  # int64 `[T]`, scores of the next batch; 0 for tables that assign none
    is_set: Tensor  # bool `[T]`, whether a score was set; true for tables with STEP
    increments: Tensor  # int64 `[T]`, per training batch: 1 for tables with STEP, else 0

    def __init__(self, specs: Sequence[DynamicSpec], device: torch.device) -> None:
        super().__init__()
        self._names = [spec.name or str(t) for t, spec in enumerate(specs)]
        self._evictions = [spec.eviction for spec in specs]
        self._unset_tables = {
            t for t, eviction in enumerate(self._evictions) if eviction is Eviction.CUSTOM
        }
        is_step_table = [eviction is Eviction.STEP for eviction in self._evictions]
        increments = torch.tensor(is_step_table, dtype=torch.int64, device=device)
        self.register_buffer("increments", increments, persistent=False)
        self.register_buffer("values", increments.clone())
        self.register_buffer("is_set", increments.bool())

    def batch_scores(self) -> Tensor:
        """Return a copy of the scores of the next batch, int64 `[T]`.

        Raises:
            RuntimeError: no score was set for a table with `Eviction.CUSTOM`.
        """
        if self._unset_tables:
            names = [self._names[t] for t in sorted(self._unset_tables)]
            raise RuntimeError(
                f"tables with Eviction.CUSTOM need a score before their first batch, got none for "
                f"{names}; call set_eviction_score(...) of the module, or set_score(...) of a "
                "handle or of DynamicEmb's names"
            )
        return self.values.clone()

    def advance(self, effects: Effects | None = None) -> None:
        """Count one training batch, unless `effects` of an interrupted batch has counted it."""
        effects = Effects() if effects is None else effects
        effects.call_once(torch.ops.aten.add_.Tensor, self.values, self.increments)

    def set_custom(self, scores: int | Mapping[int, int]) -> None:
        """Set the scores of CUSTOM tables: one score for all of them, or by number of the table.

        Raises:
            ValueError: a table is not CUSTOM, there is none, or a score does not fit into int64.
            TypeError: a score is not an int.
        """
        if not isinstance(scores, Mapping):
            scores = {
                t: scores
                for t, eviction in enumerate(self._evictions)
                if eviction is Eviction.CUSTOM
            }
            if not scores:
                raise ValueError(
                    "scores are set for tables with Eviction.CUSTOM, and no table has it"
                )
        checked_scores = {
            table: custom_score_for(self._names[table], self._evictions[table], score)
            for table, score in scores.items()
        }
        for table, score in checked_scores.items():
            self.values[table].fill_(score)
            self.is_set[table].fill_(True)
        self._unset_tables -= set(scores)

    def set_steps(self, steps: Mapping[int, int]) -> None:
        """Set the counts of STEP tables, by number of the table: the scores of their next batch.

        Raises:
            ValueError: a table is not STEP, or a step is not in [-2^63, 2^62).
            TypeError: a step is not an int.
        """
        checked_steps = {
            table: step_for(self._names[table], self._evictions[table], step)
            for table, step in steps.items()
        }
        for table, step in checked_steps.items():
            self.values[table].fill_(step)

    def resume_steps(self, steps: Sequence[int]) -> None:
        """Set the counts of STEP tables to saved ones, one per table; skip other tables."""
        for t, eviction in enumerate(self._evictions):
            if eviction is Eviction.STEP:
                self.values[t].fill_(steps[t])

    def continue_steps(self, table: int, stamps: Tensor, scores: Tensor | None) -> None:
        """Have a STEP table count on from entries that were written into it; else do nothing.

        Without this, keys of later batches would rank below these entries. The count becomes at
        least one more than the score of the batch that used entries last; `set_key_scores` may have
        raised scores of single keys, so that score is the lowest one with the newest stamp.

        Args:
            table: number of the table.
            stamps: stamps of the entries, int64 `[n]`.
            scores: scores of the entries, int64 `[n]`, or None.
        """
        if self._evictions[table] is not Eviction.STEP or scores is None or not stamps.numel():
            return
        last_step = int(scores[stamps == stamps.max()].min())
        self.values[table].clamp_(min=min(last_step + 1, MAX_TICK))

    def copy_scores(self, table: int, source: "EvictionScores", source_table: int) -> None:
        """Copy the score of the next batch of a table of another module with the same eviction.

        Nothing is copied if it assigns none, or if none was set.
        """
        eviction = self._evictions[table]
        is_set = source_table not in source._unset_tables  # noqa: SLF001 - of the same class
        is_same = source._evictions[source_table] is eviction  # noqa: SLF001
        if eviction.order == "assigned" and is_same and is_set:
            self.values[table].copy_(source.values[source_table])
            self.is_set[table].fill_(True)
            self._unset_tables.discard(table)

    def restart_steps(self) -> None:
        """Restart the counts of STEP tables at 1; scores of CUSTOM tables stay."""
        for t, eviction in enumerate(self._evictions):
            if eviction is Eviction.STEP:
                self.values[t].fill_(1)

    def by_table(self) -> list[int | None]:
        """Return the score of the next batch per table; None if unset or unused.

        Reads the device.
        """
        return [
            None if t in self._unset_tables or eviction.order != "assigned" else value
            for t, (eviction, value) in enumerate(
                zip(self._evictions, self.values.tolist(), strict=True)
            )
        ]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        if state_dicts.refuse_invalid(self, state_dict, prefix, arguments[-1]):
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        is_set = self.is_set.tolist()
        custom_tables = [
            t for t, eviction in enumerate(self._evictions) if eviction is Eviction.CUSTOM
        ]
        self._unset_tables = {t for t in custom_tables if not is_set[t]}

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the scores in a state dict."""
        targets = state_dicts.loadable_tensors(self, prefix)
        entry_messages = list(state_dicts.entry_problems(state_dict, targets))
        yield from entry_messages
        values = state_dict.get(f"{prefix}values")
        if values is not None and not entry_messages and not values.is_meta:
            steps = values[self.increments.to(values.device) > 0]
            if bool((steps >= _STEPS_END).any()):
                yield f"{prefix}values: steps must be below {_STEPS_END}, got {steps}"


_SWEEPS_PER_TTL = 8  # sweeps over a table per ttl in steps
_SWEEPS_PER_TIMED_TTL = 16  # sweeps over a table per ttl that is a time
_PAIRS_PER_TTL = 16  # (tick, time) pairs per ttl that is a time
# Without a clock that was set back, a list has at most 2 * _PAIRS_PER_TTL + 3 pairs.
_MAX_PAIRS = 40
_MICROSECOND = timedelta(microseconds=1)
_NO_PAIR = MAX_TICK + 1, 0  # unused element of `Expiry.times`
_MAX_SECONDS = 1e12  # exclusive; in microseconds it is below 2^62


class Sweep(NamedTuple):
    """Buckets of one table that a step searches for expired keys; some may not be in use.

    Attributes:
        table: number of the table.
        first_bucket: first bucket that is searched.
        num_buckets: number of buckets that are searched.
        first_alive_ticks: one tick per time to live of the table (`DynamicSpec.lifetimes`). A key
            expires if it is too old for each of these times: its last use by a feature with this
            or a longer time to live was before the tick.
    """

    table: int
    first_bucket: int
    num_buckets: int
    first_alive_ticks: tuple[int, ...]


class Expiry(nn.Module):
    """Choose the keys that expire: which buckets a step searches, and for which age.

    Stamps are ticks. For a table whose `ttl` is a time, a list of (tick, time) pairs converts times
    to ticks: keys with a stamp up to the tick of a pair were last used at the time of the pair or
    earlier. The list is short: two pairs with one pair between them are at least a 16th of the ttl
    apart, unless the clock was set back. Of the pairs older than the ttl only the newest is kept. A
    table whose features have different times to live has one list per time (`lifetimes`). `times`
    has the pairs of all lists, with 2^62 - tick in place of the tick. The element-wise maximum of
    `times` over ranks is then valid for the keys of all ranks.

    Every bucket of a table is searched at least once per eighth of its shortest ttl in steps, or
    16th of its shortest ttl in time, or in every step if steps are longer. So a key that is not
    evicted stays for at least its ttl after its last use. It is removed at most max(ttl / 8, one
    step) after that; if the ttl is a time, at most ttl / 8 plus one pause between two steps. Until
    then lookups find the key, and a use resets its age. If the clock was set back, keys look
    younger, not older.

    Before a step the owner sets `now_us` from `read_clock`; it holds its lock around every call.

    Args:
        specs: the tables.

    Attributes:
        clock: function that returns the time in seconds.
        now_us: time of the current step in microseconds.
    """

    times: Tensor  # int64 `[N, 40, 2]` on the CPU, N lists of pairs

    def __init__(self, specs: Sequence[DynamicSpec]) -> None:
        super().__init__()
        self.clock: Callable[[], float] = time.time
        self.now_us = 0
        self._max_buckets = [spec.max_buckets for spec in specs]
        self._lifetimes = [spec.lifetimes for spec in specs]
        # The shortest time to live, in steps or as a time, of each table that has one.
        shortest = {t: lifetimes[0] for t, lifetimes in enumerate(self._lifetimes)}
        self._shortest_lifetimes = {t: ttl for t, ttl in shortest.items() if ttl is not None}
        # For each list of pairs, the table and the ttl in microseconds.
        self._timed_ttls = [
            (t, ttl // _MICROSECOND)
            for t, lifetimes in enumerate(self._lifetimes)
            for ttl in lifetimes
            if isinstance(ttl, timedelta)
        ]
        # For each table with a ttl that is a time: the next bucket to search, and the time by which
        # the buckets before it were due. The unit of that time is a microsecond ÷ (16 × buckets of
        # the table), so that no time is rounded.
        self._progress: dict[int, tuple[int, int]] = {}
        times = torch.tensor(
            [[_NO_PAIR] * _MAX_PAIRS] * len(self._timed_ttls), dtype=torch.int64, device="cpu"
        )
        self.register_buffer("times", times.view(-1, _MAX_PAIRS, 2))

    @property
    def has_timed_ttls(self) -> bool:
        """Return whether the ttl of a table is a time."""
        return bool(self._timed_ttls)

    def read_clock(self) -> int:
        """Return the time of the clock in microseconds; 0 without a call of it if no ttl is a time.

        Raises:
            ValueError: the clock returned a number outside of [0, 1e12).
            Exception: the clock raised it, or returned no number.
        """
        if not self._timed_ttls:
            return 0
        seconds = float(self.clock())
        if not 0 <= seconds < _MAX_SECONDS:
            raise ValueError(
                f"a clock must return seconds in [0, {_MAX_SECONDS:.0e}), e.g. time.time(), got "
                f"{seconds}"
            )
        return int(seconds * 1e6)

    def first_alive_ticks(self, table: int, tick: int) -> tuple[int, ...]:
        """Return, per lifetime of a table, the lowest stamp of keys that are alive at `tick`.

        For lifetimes that are times, it is the lowest stamp of keys alive at `now_us`. Results of
        the second and later lifetimes are at least 1, since stamp 0 means no use.
        """
        list_indices = self._list_indices(table)
        ticks = []
        for ttl in self._lifetimes[table]:
            if isinstance(ttl, timedelta):
                list_index = list_indices.pop(0)
                expired_us = self.now_us - self._timed_ttls[list_index][1]
                pairs = self._pairs(list_index)
                first_ticks = (
                    pair_tick + 1 for pair_tick, time_us in pairs if time_us <= expired_us
                )
                ticks.append(max(first_ticks, default=0))
            else:
                ticks.append(0 if ttl is None else tick - ttl)
        return ticks[0], *(max(first_tick, 1) for first_tick in ticks[1:])

    def _list_indices(self, table: int) -> list[int]:
        """Return the numbers of the lists of a table."""
        return [list_index for list_index, (t, _) in enumerate(self._timed_ttls) if t == table]

    def sweeps(self, tick: int) -> list[Sweep]:
        """Return the sweeps of step `tick`, to be run after the insertion of its batch."""
        sweeps = []
        for table, ttl in self._shortest_lifetimes.items():
            max_buckets = self._max_buckets[table]
            if isinstance(ttl, timedelta):
                first_bucket, _, num_buckets = self._due_buckets(table, ttl)
            else:
                num_buckets = -(-max_buckets // max(1, ttl // _SWEEPS_PER_TTL))
                first_bucket = tick % -(-max_buckets // num_buckets) * num_buckets
                num_buckets = min(num_buckets, max_buckets - first_bucket)
            num_to_end = min(num_buckets, max_buckets - first_bucket)
            # After the last bucket the search continues with bucket 0.
            for begin, num_searched in ((first_bucket, num_to_end), (0, num_buckets - num_to_end)):
                if num_searched:
                    first_ticks = self.first_alive_ticks(table, tick)
                    sweeps.append(Sweep(table, begin, num_searched, first_ticks))
        return sweeps

    def all_sweeps(self, tick: int) -> list[Sweep]:
        """Return sweeps at `tick` of all buckets of the tables with a ttl."""
        return [
            Sweep(table, 0, self._max_buckets[table], self.first_alive_ticks(table, tick))
            for table in self._shortest_lifetimes
        ]

    def advance(self, tick: int) -> None:
        """Record that the sweeps of step `tick` are done; a repeated call changes nothing."""
        for table, ttl in self._shortest_lifetimes.items():
            if isinstance(ttl, timedelta):
                first_bucket, due_time, num_buckets = self._due_buckets(table, ttl)
                max_buckets = self._max_buckets[table]
                if num_buckets == max_buckets:
                    due_time = self.now_us * _SWEEPS_PER_TIMED_TTL * max_buckets
                else:  # the time by which these buckets were due
                    due_time += num_buckets * (ttl // _MICROSECOND)
                self._progress[table] = (first_bucket + num_buckets) % max_buckets, due_time
        self.record_time(tick)

    def _due_buckets(self, table: int, ttl: timedelta) -> tuple[int, int, int]:
        """Return the next bucket to search, the time by which it was due, and how many are due.

        The time has the unit of `_progress`.
        """
        max_buckets = self._max_buckets[table]
        now = self.now_us * _SWEEPS_PER_TIMED_TTL * max_buckets
        first_bucket, due_time = self._progress.get(table, (0, now))
        due_time = min(due_time, now)
        num_due = (now - due_time) // (ttl // _MICROSECOND)
        return first_bucket, due_time, min(num_due, max_buckets)

    def record_time(self, tick: int) -> None:
        """Record that keys with stamps up to `tick` were used no later than `now_us`."""
        if not self._timed_ttls:
            return
        now_us, lists = self.now_us, self.times.tolist()
        for list_index, (_, ttl_us) in enumerate(self._timed_ttls):
            # If the clock was set back, times after `now_us` are lowered to it.
            pairs = [
                (pair_tick, min(time_us, now_us))
                for pair_tick, time_us in self._pairs(list_index)
                if pair_tick <= tick
            ]
            if not pairs or pairs[-1][0] < tick:
                # The new pair replaces the last one if the last but one is less than a 16th of the
                # ttl ago.
                if len(pairs) > 1 and (now_us - pairs[-2][1]) * _PAIRS_PER_TTL < ttl_us:
                    pairs.pop()
                pairs.append((tick, now_us))
            while len(pairs) > 1 and pairs[1][1] <= now_us - ttl_us:
                pairs.pop(0)
            newest_pairs = [
                (MAX_TICK - pair_tick, time_us) for pair_tick, time_us in pairs[-_MAX_PAIRS:]
            ]
            lists[list_index] = [_NO_PAIR] * (_MAX_PAIRS - len(newest_pairs)) + newest_pairs
        # Another tensor: state dicts have the old one.
        self.times = torch.tensor(lists, device="cpu")

    def _pairs(self, list_index: int) -> list[tuple[int, int]]:
        """Return the (tick, time in microseconds) pairs of a list, both ascending."""
        coded_pairs = self.times[list_index].tolist()
        return [(MAX_TICK - code, time_us) for code, time_us in coded_pairs if code <= MAX_TICK]

    def skip_pause(self, duration: timedelta | None) -> None:
        """Subtract a pause from the ages of keys of tables whose ttl is a time.

        There must be such a table (`has_timed_ttls`). Ages in steps stay.

        Args:
            duration: the pause, >= 0; None for the time since the last step.

        Raises:
            ValueError, Exception: see `read_clock`.
        """
        tick_codes, times_us = self.times.unbind(-1)
        if duration is None:
            pause_us = max(self.read_clock() - int(times_us.max()), 0)
        else:
            pause_us = min(duration // _MICROSECOND, MAX_TICK)
        # At most 2^62, so that repeated pauses do not overflow.
        shifted_us = times_us.clamp(max=MAX_TICK - pause_us) + pause_us
        shifted_us = torch.where(tick_codes <= MAX_TICK, shifted_us, 0)
        self.times = torch.stack([tick_codes, shifted_us], dim=-1)

    def forget_times(self, table: int | None = None) -> None:
        """Forget the times of a table, or (None) of all tables.

        For a ttl that is a time, keys then count as used at the next step. Ages in steps stay,
        since they follow from stamps.
        """
        times = self.times.clone()
        times[slice(None) if table is None else self._list_indices(table)] = torch.tensor(
            _NO_PAIR, device="cpu"
        )
        self.times = times

    def copy_times(self, table: int, source: "Expiry", source_table: int) -> None:
        """Copy the clock, and the times of a table, of another module; the caller copies entries.

        If this table has more ttls, the times of its surplus ttls stay.
        """
        times = self.times.clone()
        list_indices = self._list_indices(table)
        source_indices = source._list_indices(source_table)  # noqa: SLF001 - of the same class
        for list_index, source_index in zip(list_indices, source_indices, strict=False):
            times[list_index] = source.times[source_index]
        self.times, self.clock = times, source.clock

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return self  # times stay on the CPU

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        if not state_dicts.refuse_invalid(self, state_dict, prefix, arguments[-1]):
            self.times = self.times.clone()
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the times in a state dict."""
        yield from state_dicts.count_problems(
            state_dict, state_dicts.loadable_tensors(self, prefix)
        )


class _LoggedKeys(NamedTuple):
    """Keys that left a table at one tick, int64 `[n]` on the CPU."""

    tick: int
    keys: Tensor
    num_logged_in_total: (
        int  # total of the table's keys that were logged, up to and including these
    )


class EvictionLog:
    """Record the keys that left each table, by tick.

    Beyond `max_keys` per table, the log drops the keys of the oldest ticks. Keys stay in the log
    when they are inserted again, so a reader must check which of them are in the table. Recording
    keys of a CUDA table waits for the device.

    `expect` announces a call that removes keys, and `record` logs the keys after it. After an
    exception in between, the log lacks keys, so it counts as complete only from the next tick on.
    The owner of the tables holds its lock around every call.

    Args:
        num_tables: the number of tables.
        tick: the tick from which on the log is complete.
        max_keys: maximum number of keys per table, 8 bytes each in host memory.

    Attributes:
        is_returned: whether `track_evictions` has returned the log to the program.

    Raises:
        TypeError: `max_keys` is not an int.
        ValueError: `max_keys` is below 1.
    """

    is_returned = False

    def __init__(self, num_tables: int, tick: int, max_keys: int = 1 << 24) -> None:
        self._max_keys = check_count("max_keys", max_keys)
        self._logs: list[deque[_LoggedKeys]] = [deque() for _ in range(num_tables)]
        self._complete_from_ticks = [tick] * num_tables
        # By table, the tick of an expected call whose keys are not recorded yet.
        self._expected_ticks: dict[int, int] = {}

    def restart(self, tick: int) -> None:
        """Clear the log; it is complete from this tick on."""
        self._complete_from_ticks = [tick] * len(self._logs)
        for log in self._logs:
            log.clear()
        self._expected_ticks = {}

    def expect(self, table: int, tick: int) -> None:
        """Announce a call that removes keys at `tick`; a call of `record` must follow."""
        self._complete_from_ticks[table] = self.complete_from(table)
        self._expected_ticks[table] = tick

    def record(self, table: int, keys: Tensor, tick: int) -> None:
        """Record keys, int64 `[n]`, that left a table at `tick`.

        Ticks must not decrease from call to call, which is not checked. After `expect`, call it
        even if no keys were removed.
        """
        log = self._logs[table]
        if keys.numel():
            num_before = log[-1].num_logged_in_total if log else 0
            log.append(_LoggedKeys(tick, keys.detach().cpu().clone(), num_before + keys.numel()))
        self._expected_ticks.pop(table, None)
        while (
            log
            and log[-1].num_logged_in_total - log[0].num_logged_in_total + log[0].keys.numel()
            > self._max_keys
        ):
            self._complete_from_ticks[table] = max(
                self._complete_from_ticks[table], log[0].tick + 1
            )
            log.popleft()

    def record_all(self, keys: Tensor, ends: Sequence[int], tick: int) -> None:
        """Record keys of all tables, concatenated as int64 `[n]`; `ends` has the end per table."""
        begin = 0
        for table, end in enumerate(ends):
            self.record(table, keys[begin:end], tick)
            begin = end

    def record_batch(self, inserted: InsertedBatch, tick: int) -> None:
        """Record the keys that the insertion of a batch with misses evicted."""
        assert inserted.misses is not None
        assert inserted.result is not None
        is_evicting = inserted.result.status == hash.EVICTING
        num_before = torch.cat([is_evicting.new_zeros(1, dtype=torch.int64), is_evicting.cumsum(0)])
        ends = num_before[inserted.misses.offsets[1:]].tolist()
        self.record_all(inserted.result.evicted[is_evicting, HashEntryColumn.KEY], ends, tick)

    def complete_from(self, table: int) -> int:
        """Return the lowest tick from which on the log has all evictions of a table."""
        expected_tick = self._expected_ticks.get(table)
        return max(
            self._complete_from_ticks[table], -1 if expected_tick is None else expected_tick + 1
        )

    def since(self, table: int, tick: int) -> Tensor:
        """Return the distinct keys that left at `tick` or later, ascending, int64 on the CPU.

        Raises:
            ValueError: the log is not complete from `tick` on.
        """
        if tick < self.complete_from(table):
            raise ValueError(
                f"the log has evictions from tick {self.complete_from(table)} on, not from {tick} "
                "on; save a whole dump, and save changes more often or keep a longer log"
            )
        keys = [logged.keys for logged in self._logs[table] if logged.tick >= tick]
        return torch.cat(keys).unique() if keys else torch.empty(0, dtype=torch.int64, device="cpu")
