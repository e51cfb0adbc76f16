"""What is seen of a machine while and before it is measured, with our own NVML and /proc."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from experiments.config.schema import UsageError
from experiments.machine import cpu as cpu_module
from experiments.machine import flags, preflight, telemetry
from experiments.machine.cpu import Cpu, CpuTime, last_level_cache_bytes, mean_mhz
from experiments.machine.telemetry import Nvml, NvmlTelemetry, reasons
from experiments.paths import ROOT
from experiments.timing import race
from tests.experiments.fake_nvml import FakeNvml, NotSupported, healthy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def opened(**answers: object) -> Nvml:
    found = Nvml.open(None, FakeNvml(healthy() | answers))
    assert found is not None
    return found


def test_only_what_slows_a_gpu_is_a_reason() -> None:
    assert reasons(0x1 | 0x2 | 0x10 | 0x100) == []  # idle, set by the user, sync boost, display
    assert reasons(0x4) == ["sw_power_cap"]
    assert reasons(0x8 | 0x40 | 0x80 | 0x20) == [
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
    assert reasons(found.mask() or 0) == ["sw_thermal"]


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
        "energy_j": 600.0,
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


class FakeSystem:
    """The system as psutil and os see it: seconds by state, and what this process used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        states = ("user", "nice", "system", "irq", "softirq", "steal", "idle", "iowait")
        self.spent = dict.fromkeys(states, 10.0)
        self.own = 1.0
        self.mhz = [2000.0, 3000.0]
        answers = {
            "cpu_times": lambda: SimpleNamespace(_asdict=self.spent.copy().copy),
            "cpu_freq": lambda percpu: [SimpleNamespace(current=mhz) for mhz in self.mhz],
            "getloadavg": lambda: (0.5, 0.4, 0.3),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(psutil, name, answer)
        process = lambda: SimpleNamespace(user=self.own, system=0.0)  # noqa: E731
        monkeypatch.setattr(cpu_module.os, "times", process)
        monkeypatch.setattr(cpu_module.os, "cpu_count", lambda: 2)
        for module in (cpu_module, preflight):
            monkeypatch.setattr(module, "usable_cores", lambda: [0, 1])

    def spend(self, **seconds: float) -> None:
        for state, value in seconds.items():
            self.spent[state] += value


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> FakeSystem:
    return FakeSystem(monkeypatch)


@pytest.fixture
def cpu(tmp_path: Path, system: FakeSystem) -> Cpu:
    """Two cores that share a cache, in a tree of files."""
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


def put(cpu: Cpu, path: str, text: str) -> None:
    file = cpu.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_the_cpu_as_the_kernel_shows_it(cpu: Cpu) -> None:
    assert cpu.last_level_cache() == 24 << 20  # shared: counted once
    assert cpu.governor() == "performance"
    assert cpu.throttled() == 6
    assert cpu.info("model name") == "EPYC 9"
    assert cpu.instructions() == {"fpu", "avx2"}
    assert not cpu.virtual()
    assert cpu.boost() is None
    put(cpu, "sys/devices/system/cpu/cpufreq/boost", "1")
    assert cpu.boost() is True
    put(cpu, "sys/devices/system/cpu/intel_pstate/no_turbo", "1")
    assert cpu.boost() is False
    assert cpu.quota() is None
    put(cpu, "sys/fs/cgroup/cpu.max", "150000 100000")
    assert cpu.quota() == 1.5


def test_the_frequency_is_that_of_the_usable_cores(
    system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mean_mhz() == 2500.0
    monkeypatch.setattr(cpu_module, "usable_cores", lambda: [1])
    assert mean_mhz() == 3000.0
    system.mhz = []
    assert mean_mhz() is None


def test_two_last_level_caches_count_both(cpu: Cpu) -> None:
    for core in (0, 1):
        put(cpu, f"sys/devices/system/cpu/cpu{core}/cache/index1/shared_cpu_list", str(core))
    assert cpu.last_level_cache() == 48 << 20


def test_where_a_system_shows_nothing_nothing_is_known(tmp_path: Path, system: FakeSystem) -> None:
    bare = Cpu(tmp_path)
    assert (bare.last_level_cache(), bare.governor(), bare.joules(), bare.boost()) == (None,) * 4
    assert (bare.throttled(), bare.quota(), bare.info("flags")) == (None, None, "")
    assert last_level_cache_bytes() >= 1 << 18
    system.mhz = []
    watch = telemetry.CpuTelemetry(bare)
    watch.start()
    assert watch.check() == []
    watch.stop()
    assert (watch.summary(), watch.flags()) == ({"load": [0.5, 0.5, 0.5]}, [])


def test_what_others_computed_is_what_was_not_ours(system: FakeSystem) -> None:
    time = CpuTime()
    system.spend(user=20.0, softirq=10.0, idle=8.0, iowait=2.0)  # 20 s on two cores
    system.own += 10.0
    assert time.shares() == (0.0, pytest.approx(1.0))
    system.own += 21.0
    assert time.shares() == (0.0, 0.0)
    short = CpuTime()
    assert short.shares() == (None, None)
    system.spend(user=0.01)
    assert short.shares() == (0.0, None)  # a tick is no measure


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
        preflight.demand(found)


def test_being_virtual_is_no_reason_to_refuse(cpu: Cpu) -> None:
    put(cpu, "proc/cpuinfo", "processor : 0\nflags : avx2 hypervisor\n")
    found = preflight.check(CPU, cpu=cpu, threads=2, sleep=lambda seconds: None)
    assert (found["flags"], found["fit"]) == (["virtual"], True)
    preflight.demand(found)


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
    assert type(telemetry.telemetry_for(CUDA)) is telemetry.Telemetry  # observes nothing
    assert isinstance(telemetry.telemetry_for(CPU), telemetry.CpuTelemetry)


def test_every_flag_that_is_raised_is_explained() -> None:
    """Flags are strings in the modules that raise them."""
    raised = set()
    for module in (preflight, telemetry, race):
        text = Path(module.__file__ or "").read_text()
        raised |= {flag for flag in flags.EXPLAINED if f'"{flag}"' in text}
    assert raised == flags.EXPLAINED.keys()  # none is explained that nobody raises
    for flag in raised:
        assert flags.explain(flag) != flag
        assert flags.remedy(flag)
    assert (flags.explain("unheard_of"), flags.remedy("unheard_of")) == ("unheard_of", "")


def test_the_page_on_timing_explains_the_same_flags() -> None:
    lines = (ROOT / "docs/timing.md").read_text().splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| `")]
    table = {flag.strip(" `"): meaning.strip() for flag, meaning in rows}
    reasons_to_stop = {"precise", "stabilised", "max_rounds", "budget", "failed"}
    explained = {flag: flags.explain(flag) for flag in flags.EXPLAINED}
    assert {k: v for k, v in table.items() if k not in reasons_to_stop} == explained
