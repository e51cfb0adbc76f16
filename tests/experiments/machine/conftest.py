"""A CPU of two cores that only pretends."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.machine import preflight
from experiments.machine.cpu import Cpu
from tests.experiments.fake_system import FakeSystem, put


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    return FakeSystem(monkeypatch)


@pytest.fixture
def cpu(tmp_path: Path, system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> Cpu:
    """Two cores that share a cache, in a tree of files; the native library is up to date."""
    monkeypatch.setattr(preflight, "newer_source", lambda device: None)
    found = Cpu(tmp_path)
    for core in (0, 1):
        put(found, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor", "performance")
        put(found, f"sys/devices/system/cpu/cpu{core}/thermal_throttle/core_throttle_count", "3")
        for index, (level, size, shared) in enumerate([(1, "32K", core), (3, "24M", "0-1")]):
            folder = f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            put(found, f"{folder}/level", str(level))
            put(found, f"{folder}/size", size)
            put(found, f"{folder}/shared_cpu_list", str(shared))
    put(found, "proc/cpuinfo", "processor\t: 0\nmodel name\t: EPYC 9\nflags\t\t: fpu avx2\n")
    return found
