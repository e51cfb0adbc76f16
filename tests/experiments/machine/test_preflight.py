"""What is checked of a machine before it is measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from experiments.config.schema import UsageError
from experiments.machine import preflight
from experiments.machine.cpu import Cpu
from experiments.machine.telemetry import Nvml
from tests.experiments.fake_nvml import FakeNvml, healthy
from tests.experiments.fake_system import FakeSystem, put

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def opened(**answers: object) -> Nvml:
    found = Nvml.open(None, FakeNvml(healthy() | answers))
    assert found is not None
    return found


def test_a_fit_machine_has_no_flags(cpu: Cpu) -> None:
    found = preflight.check(CPU, cpu=cpu, threads=2, sleep=lambda seconds: None)
    assert found["flags"] == []
    assert found["fit"]
    assert found["governor"] == "performance"


def test_what_is_wrong_with_a_cpu_becomes_flags(cpu: Cpu, system: FakeSystem) -> None:
    put(cpu, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave")
    put(cpu, "proc/cpuinfo", "processor : 0\nflags : avx2 hypervisor\n")
    put(cpu, "sys/fs/cgroup/cpu.max", "100000 100000")

    def work_of_others(seconds: float) -> None:
        system.spend(user=30.0, idle=10.0)

    found = preflight.check(CPU, cpu=cpu, threads=3, sleep=work_of_others)
    assert set(found["flags"]) == {"busy", "governor", "virtual", "quota", "threads"}
    assert not found["fit"]
    with pytest.raises(UsageError, match=r"not fit .* \(cpupower .*Without device.strict=true"):
        preflight.require_fit(found)


def test_being_virtual_is_no_reason_to_refuse(cpu: Cpu) -> None:
    put(cpu, "proc/cpuinfo", "processor : 0\nflags : avx2 hypervisor\n")
    found = preflight.check(CPU, cpu=cpu, threads=2, sleep=lambda seconds: None)
    assert (found["flags"], found["fit"]) == (["virtual"], True)
    preflight.require_fit(found)


def test_what_is_wrong_with_a_gpu_becomes_flags(cpu: Cpu) -> None:
    def look(gpu: Nvml) -> set[str]:
        found = preflight.check(CUDA, cpu=cpu, nvml=gpu, threads=2, sleep=lambda seconds: None)
        assert found["fit"] is (not found["flags"])
        return set(found["flags"])

    assert look(opened()) == set()
    bad = {
        "GetTemperature:0": 80,
        "GetPowerManagementLimit": 400_000,
        "GetMigMode": [[1, 1]],
        "GetCurrentClocksEventReasons": 0x40,
        "GetComputeRunningProcesses": [
            [SimpleNamespace(pid=p, usedGpuMemory=None) for p in (7, 8)]
        ],
    }
    assert look(opened(**bad)) == {"hot", "power_limit", "mig", "slowed", "other_processes"}


def test_a_gpu_that_nobody_can_watch_is_a_flag(cpu: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "open", lambda device=None, library=None: None)
    found = preflight.check(CUDA, cpu=cpu, threads=2, sleep=lambda seconds: None)
    assert (found["flags"], found["fit"]) == (["nvml_absent"], True)
