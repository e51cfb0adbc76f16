"""Removal of keys whose time to live is over: in the sweeps of a step, or all at once.

`emblib.dynamic.eviction.Expiry` chooses the buckets of a sweep, and which keys in them expired.
"""

from __future__ import annotations

from collections.abc import Sequence

from emblib.dynamic.eviction import Expiry, Sweep
from emblib.dynamic.state import DynamicState, of_state
from emblib.ops.effects import Effects
from emblib.specs import SLOTS_PER_BUCKET


class StepExpiry:
    """The removal of expired keys that ends a training step, which `run` makes or completes.

    Args:
        state: the tables.
        expiry: attribute `expiry` of the tables, whose clock is read.

    Raises:
        ValueError: the clock returned a number that is not a time.
        Exception: the clock raised it.
    """

    def __init__(self, state: DynamicState, expiry: Expiry) -> None:
        self._state, self._expiry = state, expiry
        self._time_us = expiry.read_clock()
        self._effects = Effects()
        self._sweeps: list[Sweep] | None = None

    def set_time(self) -> None:
        """Set the time of the step, before its batch is inserted."""
        self._expiry.now_us = self._time_us

    def run(self) -> None:
        """Remove the keys that expired in the buckets that are due, after the insertion."""
        state, tick = self._state, self._state.index.tick
        if self._sweeps is None:
            self._sweeps = self._expiry.sweeps(tick)
        if state.eviction_log is None and state.backing is None and state.last_uses is None:
            self._effects.restart()
            for table, first_bucket, num_buckets, ticks in self._sweeps:
                state.index.free_expired(table, ticks[0], first_bucket, num_buckets, self._effects)
        else:  # the removed keys are recorded
            _run_sweeps(state, self._sweeps, self._effects)
        self._expiry.advance(tick)


def _run_sweeps(state: DynamicState, sweeps: Sequence[Sweep], effects: Effects) -> list[int]:
    """Remove the keys that expired in some buckets; return the number of keys per sweep.

    The backing store of a table is searched in the sweep that begins with bucket 0.
    """
    effects.restart()
    counts = []
    for table, first_bucket, num_buckets, ticks in sweeps:
        if state.last_uses is None or len(ticks) == 1:
            keys = state.index.expire(table, ticks[0], first_bucket, num_buckets, effects)
        else:
            slots = slice(
                first_bucket * SLOTS_PER_BUCKET, (first_bucket + num_buckets) * SLOTS_PER_BUCKET
            )
            keys = state.last_uses.expire(state.index, table, slots, ticks, effects)
        state.record_evictions(table, keys)
        counts.append(keys.numel())
    if state.backing is not None:
        for sweep_index, sweep in enumerate(sweeps):
            if sweep.first_bucket == 0:
                counts[sweep_index] += state.backing.expire(sweep.table, sweep.first_alive_ticks[0])
    return counts


@of_state
def expire_keys(state: DynamicState, table: int | str | None = None) -> dict[str, int]:
    """Remove all keys whose time to live is over now, without waiting for training to find them.

    Call it between steps, e.g. while a server is idle, or after a checkpoint was loaded.

    Args:
        state: the tables.
        table: number or name of the table; None is all tables with a ttl.

    Returns:
        The number of removed keys by table name, in both tiers.

    Raises:
        ValueError: the table has no ttl; without `table`, no table has one; or the clock returned a
            number that is not a time.
        KeyError, IndexError: there is no such table.
        Exception: the clock or the backing store raised it.
    """
    table_number = None if table is None else state.table_number(table)
    expiry, tick, effects, sweeps = state.expiry, state.index.tick, Effects(), list[Sweep]()
    if expiry is not None:
        expiry.now_us = expiry.read_clock()
        expiry.record_time(tick)
        sweeps = expiry.all_sweeps(tick)
    sweeps = [sweep for sweep in sweeps if table_number in (None, sweep.table)]
    if expiry is None or not sweeps:
        names = state.table_names
        subject = names if table_number is None else repr(names[table_number])
        raise ValueError(f"{subject} without ttl: keys expire in tables with DynamicSpec(ttl=...)")
    names = [state.table_names[sweep.table] for sweep in sweeps]
    counts = state.complete(lambda: _run_sweeps(state, sweeps, effects))
    return dict(zip(names, counts, strict=True))
