"""Separate passes: counters of caches, and energy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    if device.type == "cuda":
        nvml = Nvml.open(device)
        found = nvml and energy_pass(
            phase, pool, nvml.joules, partial(torch.cuda.synchronize, device), seconds=seconds
        )
    else:
        found = energy_pass(phase, pool, Cpu().joules, lambda: None, seconds=seconds)
    return found.describe() if found else {}


@dataclass(frozen=True)
class Energy:
    """Joules of one call, uncertain by `give` for the age of the two readings."""

    joules: float
    give: float
    seconds: float
    calls: int

    def describe(self) -> dict[str, Any]:
        """Return the entries of the record."""
        return {
            "joules_per_call": self.joules,
            "give": self.give,
            "window_s": round(self.seconds, 3),
            "calls": self.calls,
        }


def energy_pass(
    phase: Phase,
    pool: int,
    joules: Callable[[], float | None],
    finish: Callable[[], object],
    *,
    seconds: float = ENERGY_SECONDS,
    now: Callable[[], float] = time.perf_counter,
) -> Energy | None:
    """Repeat passes over the pool for at least `seconds`; None where energy is not counted.

    `finish` waits for the device. Both readings may be as old as the counter is between two
    renewals, so the result is uncertain by that much power.
    """
    finish()
    before, start, calls = joules(), now(), 0
    if before is None:
        return None
    while now() - start < seconds:
        for number in range(pool):
            phase(number)
        finish()
        calls += pool
    after, window = joules(), now() - start
    if after is None or after <= before or not calls:
        return None
    each = (after - before) / calls
    return Energy(each, each * RENEWAL_SECONDS / window, window, calls)
