"""Passes over the batches that are not timed: the counters of a cache, the energy of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from experiments.machine.cpu import Cpu
from experiments.machine.telemetry import Nvml
from experiments.timing.clock import Phase

RENEWAL_SECONDS = 0.1  # maximum age of a reading of an energy counter: assumed, not measured


def counting_pass(
    phase: Phase, pool: int, reset: Callable[[], object], counters: Callable[[], Mapping[str, int]]
) -> dict[str, int]:
    """Run every batch once; return the counts of the cache, which starts with its present rows.

    Args:
        phase: call on a batch, by its number.
        pool: number of batches.
        reset: function that sets the counters to 0; the rows in the cache stay.
        counters: function that returns the counts by name, and waits for the device. {} if there
            is no cache: then nothing is run and {} returned.
    """
    if not counters():
        return {}
    reset()
    for number in range(pool):
        phase(number)
    return dict(counters())


def energy(phase: Phase, pool: int, device: torch.device, seconds: float) -> dict[str, Any]:
    """Measure the energy of a call for `seconds`, see `energy_pass`; {} if it is unknown.

    The counter is that of the GPU, or of all CPU packages, whatever else runs there meanwhile.
    """
    if device.type != "cuda":
        return energy_pass(phase, pool, Cpu().joules, lambda: None, seconds=seconds)
    nvml, finish = Nvml.open(device), partial(torch.cuda.synchronize, device)
    return energy_pass(phase, pool, nvml.joules, finish, seconds=seconds) if nvml else {}


def energy_pass(
    phase: Phase,
    pool: int,
    joules: Callable[[], float | None],
    finish: Callable[[], object],
    *,
    seconds: float,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Repeat passes over the pool for at least `seconds`; return the energy of a call.

    Args:
        phase: call on a batch, by its number.
        pool: number of batches.
        joules: function that reads the energy counter; it returns None if there is none.
        finish: function that waits for the device.
        seconds: minimum duration.
        now: clock in seconds.

    Returns:
        `joules_per_call`; `uncertainty_joules`, its uncertainty, because a reading of the counter
        may be RENEWAL_SECONDS old; `window_s`, the measured duration; `calls`, the number of calls.
        Empty without a counter, if it has not advanced or started again from 0, and for an empty
        pool.
    """
    finish()
    joules_before, start, calls = joules(), now(), 0
    if joules_before is None:
        return {}
    while now() - start < seconds:
        for number in range(pool):
            phase(number)
        finish()
        calls += pool
    joules_after, window = joules(), now() - start
    if joules_after is None or joules_after <= joules_before or not calls:
        return {}
    joules_per_call = (joules_after - joules_before) / calls
    return {
        "joules_per_call": joules_per_call,
        "uncertainty_joules": joules_per_call * RENEWAL_SECONDS / window,
        "window_s": round(window, 3),
        "calls": calls,
    }
