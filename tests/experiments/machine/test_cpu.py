"""The CPU as the kernel's files and psutil show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.machine import cpu as cpu_module
from experiments.machine.cpu import Cpu, CpuTime, last_level_cache_bytes, mean_mhz
from tests.experiments.fake_system import FakeSystem, put


def test_the_cpu_as_the_kernel_shows_it(cpu: Cpu) -> None:
    assert cpu.last_level_cache() == 24 << 20  # shared: counted once
    assert cpu.governor() == "performance"
    assert cpu.num_throttled() == 6
    assert cpu.cpuinfo("model name") == "EPYC 9"
    assert cpu.instructions() == {"fpu", "avx2"}
    assert not cpu.is_virtual()
    assert cpu.has_boost() is None
    put(cpu, "sys/devices/system/cpu/cpufreq/boost", "1")
    assert cpu.has_boost() is True
    put(cpu, "sys/devices/system/cpu/intel_pstate/no_turbo", "1")
    assert cpu.has_boost() is False
    assert cpu.quota_cores() is None
    put(cpu, "sys/fs/cgroup/cpu.max", "150000 100000")
    assert cpu.quota_cores() == 1.5


def test_two_last_level_caches_count_both(cpu: Cpu) -> None:
    for core in (0, 1):
        put(cpu, f"sys/devices/system/cpu/cpu{core}/cache/index1/shared_cpu_list", str(core))
    assert cpu.last_level_cache() == 48 << 20


def test_where_a_system_shows_nothing_nothing_is_known(tmp_path: Path) -> None:
    bare = Cpu(tmp_path)
    assert (bare.last_level_cache(), bare.governor(), bare.has_boost()) == (None,) * 3
    assert (bare.num_throttled(), bare.quota_cores(), bare.cpuinfo("flags")) == (None, None, "")
    assert last_level_cache_bytes() >= 1 << 18


def test_the_frequency_is_that_of_the_usable_cores(
    system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mean_mhz() == 2500.0
    monkeypatch.setattr(cpu_module, "usable_cores", lambda: [1])
    assert mean_mhz() == 3000.0
    system.mhz = []
    assert mean_mhz() is None


def test_what_others_computed_is_what_was_not_ours(system: FakeSystem) -> None:
    time = CpuTime()
    system.spend(user=20.0, softirq=10.0, idle=8.0, iowait=2.0)  # 20 s on two cores
    system.own += 10.0
    assert time.usage_by_others() == (0.0, pytest.approx(1.0))
    system.own += 21.0
    assert time.usage_by_others() == (0.0, 0.0)
    short = CpuTime()
    assert short.usage_by_others() == (None, None)
    system.spend(user=0.01)
    assert short.usage_by_others() == (0.0, None)  # a tick is not a measure
