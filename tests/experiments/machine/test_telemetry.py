"""What is seen of a machine while it is measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments.machine import telemetry
from experiments.machine.cpu import Cpu
from experiments.machine.telemetry import Nvml, NvmlTelemetry, reason_names
from tests.experiments.fake_nvml import FakeNvml, NotSupported, healthy
from tests.experiments.fake_system import FakeSystem, put

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def opened(**answers: object) -> Nvml:
    found = Nvml.open(None, FakeNvml(healthy() | answers))
    assert found is not None
    return found


def test_only_what_slows_a_gpu_is_a_reason() -> None:
    assert (
        reason_names(0x1 | 0x2 | 0x10 | 0x100) == []
    )  # idle, set by the user, sync boost, display
    assert reason_names(0x4) == ["sw_power_cap"]
    assert reason_names(0x8 | 0x40 | 0x80 | 0x20) == [
        "hw_slowdown",
        "sw_thermal",
        "hw_thermal",
        "hw_power_brake",
    ]


def test_without_a_library_or_a_driver_there_is_nothing_to_see() -> None:
    assert Nvml.open(None, FakeNvml({"init": NotSupported("no driver")})) is None
    assert Nvml.open(None, SimpleNamespace()) is None


def test_the_device_is_the_one_that_torch_means(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(uuid="1234-abcd")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    library = FakeNvml(healthy())
    Nvml.open(torch.device("cuda", 3), library)
    assert library.handles == ["GPU-1234-abcd"]


def test_a_slice_of_a_gpu_is_found_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(uuid="55")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    library = FakeNvml({"absent": ["GPU-55"]})
    nvml_of_slice = Nvml.open(torch.device("cuda", 0), library)
    assert nvml_of_slice is not None
    assert library.handles == ["MIG-55"]


def test_older_drivers_know_the_reasons_by_another_name() -> None:
    library = FakeNvml({"GetCurrentClocksThrottleReasons": 0x20})
    found = Nvml.open(None, library)
    assert found is not None
    assert reason_names(found.reason_bits() or 0) == ["sw_thermal"]


def test_what_a_driver_does_not_tell_is_left_out() -> None:
    silent = Nvml.open(None, FakeNvml())
    assert silent is not None
    assert silent.settings() == {}
    watch = NvmlTelemetry(silent, pause=lambda seconds: True)
    watch.start()
    assert watch.check() == []
    watch.stop()
    assert (watch.summary(), watch.flags()) == ({}, [])


def test_settings_are_in_watts_and_words() -> None:
    found = opened(GetCurrentClocksEventReasons=0x4).settings()
    assert found["power_limit_w"] == 700.0
    assert found["reasons"] == ["sw_power_cap"]
    assert (found["ecc"], found["mig"], found["persistence"]) == (True, False, True)


def test_a_race_is_summed_up_by_what_the_thread_saw() -> None:
    looks = iter([False, False, True])
    gpu = opened(**{"GetClockInfo:1": [1980, 1950, 1500], "GetPowerUsage": [300_000, 500_000]})
    watch = NvmlTelemetry(gpu, pause=lambda seconds: next(looks))
    watch.start()
    assert watch._thread is not None
    watch._thread.join()  # the script ends it
    watch.stop()
    assert watch.summary() == {
        "sm_mhz": [1500, 1950, 1980],
        "memory_mhz": [2619, 2619, 2619],
        "temperature_c": [40, 40, 40],
        "power_w": [300, 500, 500],
    }
    assert watch.flags() == ["clocks_varied"]


def test_what_slowed_the_gpu_between_two_checks_is_told_once() -> None:
    gpu = opened(GetCurrentClocksEventReasons=[0x1, 0x40, 0x1, 0x1, 0x4, 0x1])
    watch = NvmlTelemetry(gpu, pause=lambda seconds: True)
    assert watch.check() == []
    watch.sample()  # the thread saw heat, which is over when the race asks
    assert watch.check() == ["hw_thermal"]
    assert watch.check() == []
    assert watch.check() == ["sw_power_cap"]
    watch.stop()
    assert watch.summary()["throttle"] == ["hw_thermal", "sw_power_cap"]


def test_steady_clocks_are_no_flag() -> None:
    watch = NvmlTelemetry(opened(**{"GetClockInfo:1": [1980, 1965, 1980]}))
    for _ in range(3):
        watch.sample()
    assert watch.flags() == []


def test_a_race_on_the_cpu_tells_of_stolen_and_shared_time(cpu: Cpu, system: FakeSystem) -> None:
    watch = telemetry.CpuTelemetry(cpu)
    watch.start()
    system.spend(user=25.0, idle=10.0, steal=1.0)
    system.own += 4.0
    watch.stop()
    found = watch.summary()
    assert found["stolen"] == pytest.approx(1 / 36, abs=1e-4)
    assert found["cores_of_others"] == pytest.approx(21 / 18, abs=0.01)
    assert found["load"] == [0.5, 0.5, 0.5]
    assert found["cpu_mhz"] == [2500, 2500, 2500]
    assert watch.flags() == ["stolen_time", "busy"]


def test_a_core_that_was_slowed_for_its_heat_is_told_once(cpu: Cpu) -> None:
    watch = telemetry.CpuTelemetry(cpu)
    watch.start()
    assert watch.check() == []
    put(cpu, "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count", "4")
    assert watch.check() == ["cpu_thermal"]
    assert watch.check() == []
    watch.stop()
    assert watch.summary()["throttle"] == ["cpu_thermal"]


def test_where_a_system_shows_nothing_only_the_load_is_watched(
    tmp_path: Path, system: FakeSystem
) -> None:
    system.mhz = []
    watch = telemetry.CpuTelemetry(Cpu(tmp_path))
    watch.start()
    assert watch.check() == []
    watch.stop()
    assert (watch.summary(), watch.flags()) == ({"load": [0.5, 0.5, 0.5]}, [])


def test_each_device_has_the_telemetry_that_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "open", lambda device=None, library=None: None)
    assert type(telemetry.telemetry_for(CUDA)) is telemetry.Telemetry  # observes nothing
    assert isinstance(telemetry.telemetry_for(CPU), telemetry.CpuTelemetry)
