"""Passes that are not timed: the counters of caches, and the energy of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from experiments.machine.cpu import Cpu
from experiments.machine.telemetry import Nvml
from experiments.timing.clock import Phase

ENERGY_SECONDS = 2.0  # shorter windows hold too few of the driver's readings
RENEWAL_SECONDS = 0.1  # how old the driver's energy counter may be


def counting_pass(
    phase: Phase,
    pool: int,
    reset: Callable[[], object],
    counters: Callable[[], Mapping[str, int]],
) -> dict[str, int]:
    """Return what a cache counts over every batch once, starting from its present content."""
    reset()
    for number in range(pool):
        phase(number)
    return dict(counters())


def energy(
    phase: Phase, pool: int, device: torch.device, seconds: float = ENERGY_SECONDS
) -> dict[str, Any]:
    """Return the joules of one call on this device; empty where no counter exists."""
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
    seconds: float = ENERGY_SECONDS,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Repeat passes over the pool for at least `seconds`; return the entries of the record.

    `joules` is the energy counter, and `finish` waits for the device. Each reading may be as old as
    the time between two renewals of the counter, so joules per call are uncertain by `give`, the
    share of that time in the window. Empty where energy is not counted.
    """
    finish()
    before, start, calls = joules(), now(), 0
    if before is None:
        return {}
    while now() - start < seconds:
        for number in range(pool):
            phase(number)
        finish()
        calls += pool
    after, window = joules(), now() - start
    if after is None or after <= before or not calls:
        return {}
    each = (after - before) / calls
    return {
        "joules_per_call": each,
        "give": each * RENEWAL_SECONDS / window,
        "window_s": round(window, 3),
        "calls": calls,
    }
