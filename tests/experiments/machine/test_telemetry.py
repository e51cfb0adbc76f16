"""What is seen of a machine while and before it is measured, with our own NVML and /proc."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments.config.schema import UsageError
from experiments.machine import flags, preflight, telemetry
from experiments.machine.cpu import Cpu, Ticks, cores_of_others, last_level_cache_bytes
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
    watch.look()  # the thread saw heat, which is over when the race asks
    assert watch.check() == ["hw_thermal"]
    assert watch.check() == []
    assert watch.check() == ["sw_power_cap"]
    watch.stop()
    assert watch.summary()["throttle"] == ["hw_thermal", "sw_power_cap"]


def test_steady_clocks_are_no_flag() -> None:
    watch = NvmlTelemetry(opened(**{"GetClockInfo:1": [1980, 1965, 1980]}))
    for _ in range(3):
        watch.look()
    assert watch.flags() == []


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cpu:
    """Two cores that share a cache, in a tree of files."""
    found = Cpu(tmp_path)
    monkeypatch.setattr(Cpu, "usable_cores", lambda self: [0, 1])
    for core in (0, 1):
        put(found, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor", "performance")
        put(found, f"sys/devices/system/cpu/cpu{core}/thermal_throttle/core_throttle_count", "3")
        for index, (level, size, shared) in enumerate([(1, "32K", core), (3, "24M", "0-1")]):
            folder = f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            put(found, f"{folder}/level", str(level))
            put(found, f"{folder}/size", size)
            put(found, f"{folder}/shared_cpu_list", str(shared))
    info = "processor\t: {}\nflags\t\t: avx2{}\ncpu MHz\t\t: {}\n"
    put(found, "proc/cpuinfo", info.format(0, "", 2000) + info.format(1, "", 3000))
    put(found, "proc/loadavg", "0.50 0.40 0.30 2/345 6789")
    put(found, "proc/stat", stat())
    return found


def put(cpu: Cpu, path: str, text: str) -> None:
    file = cpu.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def stat(busy: int = 0, idle: int = 0, stolen: int = 0) -> str:
    """Ticks of /proc/stat: a hundred a second and core."""
    return f"cpu  {1000 + busy} 0 0 {5000 + idle} 0 0 0 {stolen} 0 0\ncpu0 1 2 3"


def test_the_cpu_as_the_kernel_shows_it(cpu: Cpu) -> None:
    assert cpu.last_level_cache() == 24 << 20  # shared: counted once
    assert cpu.governor() == "performance"
    assert cpu.mhz() == 2500.0
    assert cpu.throttled() == 6
    assert cpu.load() == 0.5
    assert cpu.ticks() == Ticks(60.0, 10.0, 0.0)
    assert not cpu.hypervisor()
    assert cpu.quota() is None
    put(cpu, "sys/fs/cgroup/cpu.max", "150000 100000")
    assert cpu.quota() == 1.5
    put(cpu, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    assert cpu.huge_pages() == "madvise"


def test_two_last_level_caches_count_both(cpu: Cpu) -> None:
    for core in (0, 1):
        put(cpu, f"sys/devices/system/cpu/cpu{core}/cache/index1/shared_cpu_list", str(core))
    assert cpu.last_level_cache() == 48 << 20


def test_where_a_system_shows_nothing_nothing_is_known(tmp_path: Path) -> None:
    bare = Cpu(tmp_path)
    assert (bare.last_level_cache(), bare.governor(), bare.mhz(), bare.ticks()) == (None,) * 4
    assert (bare.throttled(), bare.load(), bare.huge_pages(), bare.quota()) == (None,) * 4
    assert last_level_cache_bytes() >= 1 << 18
    watch = telemetry.CpuTelemetry(bare, now=lambda: 0.0)
    watch.start()
    assert watch.check() == []
    watch.stop()
    assert (watch.summary(), watch.flags()) == ({}, [])


def test_what_others_computed_is_what_was_not_ours() -> None:
    before, after = Ticks(60.0, 10.0, 0.0), Ticks(100.0, 40.0, 0.0)
    seconds = 40.0 / (torch.multiprocessing.cpu_count() or 1)
    assert cores_of_others(before, after, own=10.0) == pytest.approx(20.0 / seconds)
    assert cores_of_others(before, after, own=31.0) == 0.0
    assert (
        cores_of_others(before, Ticks(60.01, 10.01, 0.0), own=0.0) is None
    )  # a tick is no measure
    assert cores_of_others(None, after, own=0.0) is None


def test_a_race_on_the_cpu_tells_of_stolen_and_shared_time(cpu: Cpu) -> None:
    own = iter([1.0, 5.0])
    watch = telemetry.CpuTelemetry(cpu, now=lambda: 0.0, own=lambda: next(own))
    watch.start()
    put(cpu, "proc/stat", stat(busy=2500, idle=1000, stolen=100))
    watch.stop()
    found = watch.summary()
    assert found["stolen"] == pytest.approx(100 / 3600, abs=1e-4)
    assert found["cores_of_others"] > 0.25
    assert found["load"] == [0.5, 0.5, 0.5]
    assert found["cpu_mhz"] == [2500, 2500, 2500]
    assert watch.flags() == ["stolen_time", "busy"]


def test_a_core_that_was_slowed_for_its_heat_is_told_once(cpu: Cpu) -> None:
    watch = telemetry.CpuTelemetry(cpu, now=lambda: 0.0)
    watch.start()
    assert watch.check() == []
    put(cpu, "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count", "4")
    assert watch.check() == ["cpu_thermal"]
    assert watch.check() == []
    watch.stop()
    assert watch.summary()["throttle"] == ["cpu_thermal"]


def test_a_fit_machine_has_no_flags(cpu: Cpu) -> None:
    found = preflight.check(CPU, cpu=cpu, threads=2, sleep=lambda seconds: None)
    assert found.flags == ()
    assert found.fit
    assert found.describe()["governor"] == "performance"


def test_what_is_wrong_with_a_cpu_becomes_flags(cpu: Cpu) -> None:
    put(cpu, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave")
    put(cpu, "proc/cpuinfo", "processor : 0\nflags : avx2 hypervisor\n")
    put(cpu, "sys/fs/cgroup/cpu.max", "100000 100000")

    def work_of_others(seconds: float) -> None:
        put(cpu, "proc/stat", stat(busy=3000, idle=1000))

    found = preflight.check(CPU, cpu=cpu, threads=3, sleep=work_of_others)
    assert set(found.flags) == {"busy", "governor", "virtual", "quota", "threads"}
    assert not found.fit
    with pytest.raises(UsageError, match=r"not fit .* \(cpupower .*Without device.strict=true"):
        preflight.demand(found.describe())


def test_being_virtual_is_no_reason_to_refuse(cpu: Cpu) -> None:
    put(cpu, "proc/cpuinfo", "processor : 0\nflags : avx2 hypervisor\n")
    found = preflight.check(CPU, cpu=cpu, threads=2, sleep=lambda seconds: None)
    assert (found.flags, found.fit) == (("virtual",), True)
    preflight.demand(found.describe())


def test_what_is_wrong_with_a_gpu_becomes_flags(cpu: Cpu) -> None:
    def look(gpu: Nvml) -> set[str]:
        found = preflight.check(CUDA, cpu=cpu, nvml=gpu, threads=2, sleep=lambda seconds: None)
        assert found.fit is (not found.flags)
        return set(found.flags)

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
    assert (found.flags, found.fit) == (("nvml_absent",), True)
    assert isinstance(telemetry.telemetry_for(CUDA), telemetry.NoTelemetry)
    assert isinstance(telemetry.telemetry_for(CPU), telemetry.CpuTelemetry)


def test_every_flag_that_is_raised_is_explained() -> None:
    """Flags are strings in the modules that raise them."""
    raised = set()
    for module in (preflight, telemetry, race, race, telemetry):
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
