"""Ceilings of memory, what a call needs of it, and what is measured in passes of their own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments.machine import bandwidth, environment
from experiments.machine.cpu import Cpu
from experiments.machine.telemetry import Nvml
from experiments.timing import memory, passes
from tests.experiments.fake_nvml import FakeNvml, healthy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_ceilings_are_there_for_every_row_size() -> None:
    found = bandwidth.measure(CPU, seconds=0.0)
    assert list(found["gather_gb_s"]) == ["64", "128", "256", "512"]
    assert all(0.01 < x < 1e5 for x in [found["copy_gb_s"], *found["gather_gb_s"].values()])
    assert found["threads"] == torch.get_num_threads()
    assert found["table_bytes"] == bandwidth.SMALL_TABLE
    assert "launch_us" not in found


def test_tables_are_larger_than_the_caches_but_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bandwidth, "last_level_cache_bytes", lambda: 100 << 20)
    monkeypatch.setattr(bandwidth, "available_bytes", lambda device: 1 << 40)
    assert bandwidth.table_bytes(CPU) == 800 << 20
    monkeypatch.setattr(bandwidth, "available_bytes", lambda device: 1 << 30)
    assert bandwidth.table_bytes(CPU) == 102 << 20  # a tenth, in whole MiB
    monkeypatch.setattr(bandwidth, "available_bytes", lambda device: 1 << 20)
    assert bandwidth.table_bytes(CPU) == bandwidth.SMALL_TABLE


def test_bandwidth_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is said to take a second."""
    monkeypatch.setattr(bandwidth, "best", lambda work, device, seconds: work() is None or 1.0)
    flat = torch.ones(1 << 14)  # 64 KiB: 1024 rows of 64 bytes
    assert bandwidth.copy_bandwidth(flat) == 2 * 65536
    moved, summed = 2 * 128 * 64, (1 + 1 / 32) * 128 * 64
    assert bandwidth.gather_bandwidth(flat, 64) == max(moved, summed)


def test_the_best_of_at_least_three_counts() -> None:
    clock = iter([0.0, 0.0, 4.0, 4.0, 6.0, 6.0, 9.0, 9.0])
    calls = []
    best = bandwidth.best(lambda: calls.append(1), CPU, 0.0, lambda: next(clock))
    assert (best, len(calls)) == (2.0, 3)


def test_as_many_runs_as_fit_in_the_time() -> None:
    clock = iter(x / 2 for x in range(100))
    calls = []
    bandwidth.best(lambda: calls.append(1), CPU, 10.0, lambda: next(clock))
    # Half a second from reading to reading: two for each of the first three, which end at 3 s, and
    # three for each of those that begin at 3.5, 5, 6.5, 8 and 9.5 s.
    assert len(calls) == 8


def test_memory_of_a_call_on_the_cpu() -> None:
    found = memory.measure(lambda: torch.ones(16 << 20).sum(), CPU)  # 64 MiB
    assert found["rss"] > 64 << 20
    if "peak" not in found:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert 60 << 20 <= found["peak"] <= 96 << 20
    assert memory.measure(lambda: None, CPU)["peak"] < 4 << 20


class FakeCuda(SimpleNamespace):
    """torch.cuda as far as the memory pass asks it."""

    used, reserved, most, retries, other = 100, 1000, 100, 0, 0

    def run(self) -> None:
        """A call that allocates 50 bytes, makes torch reserve 500, and 30 beside torch."""
        self.used, self.most, self.reserved = 110, 150, 1500
        self.retries, self.other = self.retries + 2, 30


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    answers = {
        "synchronize": lambda device: None,
        "memory_allocated": lambda device: fake.used,
        "max_memory_allocated": lambda device: fake.most,
        "max_memory_reserved": lambda device: fake.reserved,
        "reset_peak_memory_stats": lambda device: setattr(fake, "most", fake.used),
        "memory_stats": lambda device: {"num_alloc_retries": fake.retries},
        "mem_get_info": lambda device: (10_000 - fake.reserved - fake.other, 10_000),
        "host_memory_stats": lambda: {"allocated_bytes.peak": 4096},
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=2500)
    library = FakeNvml({"GetComputeRunningProcesses": [[mine]]})
    monkeypatch.setattr(Nvml, "open", lambda device=None: Nvml(library, 0))
    return fake


def test_memory_of_a_call_on_a_gpu_is_told_by_all_who_count(cuda: FakeCuda) -> None:
    cuda.retries = 5
    found = memory.measure(cuda.run, CUDA)
    assert found.pop("rss") > 0
    assert found == {
        "peak": 50,
        "allocated": 150,
        "reserved": 1500,
        "driver": 530,  # with what torch did not allocate
        "process": 2500,
        "pinned": 4096,
        "alloc_retries": 2,
    }
    assert memory.measure(lambda: None, CUDA)["peak"] == 0


def test_what_nobody_counts_is_left_out(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "open", lambda device=None: None)
    monkeypatch.delattr(torch.cuda, "host_memory_stats")
    assert not {"process", "pinned"} & memory.measure(cuda.run, CUDA).keys()


def test_counters_are_read_after_every_batch_was_seen_once() -> None:
    seen: list[int] = [9, 9]
    found = passes.counting_pass(seen.append, 3, seen.clear, lambda: {"lookups": len(seen)})
    assert seen == [0, 1, 2]
    assert found == {"lookups": 3}


def test_energy_of_a_call_with_what_is_uncertain_about_it() -> None:
    time, log = [0.0], []

    def phase(number: int) -> None:
        log.append(number)
        time[0] += 0.25

    joules = iter([1000.0, 1300.0])
    found = passes.energy_pass(
        phase, 4, lambda: next(joules), lambda: None, seconds=2.0, now=lambda: time[0]
    )
    assert log == [0, 1, 2, 3] * 2
    assert found["joules_per_call"] == 300.0 / 8
    assert found["give"] == pytest.approx(300.0 / 8 * 0.1 / 2.0)
    assert (found["window_s"], found["calls"]) == (2.0, 8)


@pytest.mark.parametrize("readings", [[None], [1000.0, 1000.0], [1000.0, None]])
def test_no_energy_where_the_counter_stands_still(readings: list[float | None]) -> None:
    joules, time = iter(readings), iter(range(100))
    found = passes.energy_pass(
        lambda number: None, 1, lambda: next(joules), lambda: None, now=lambda: next(time)
    )
    assert found == {}


def test_energy_of_a_processor_is_that_of_its_packages(tmp_path: Path) -> None:
    assert Cpu(tmp_path).joules() is None
    for name, energy in (("intel-rapl:0", 3_000_000), ("intel-rapl:1", 4_500_000)):
        for zone, value in ((name, energy), (f"{name}:0", 9_000_000)):  # a part is in its package
            (tmp_path / "sys/class/powercap" / zone).mkdir(parents=True)
            (tmp_path / "sys/class/powercap" / zone / "energy_uj").write_text(f"{value}\n")
    assert Cpu(tmp_path).joules() == 7.5


def test_energy_on_a_gpu_is_asked_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml({"GetTotalEnergyConsumption": [5_000_000, 5_600_000]})
    monkeypatch.setattr(Nvml, "open", lambda device=None: Nvml(library, 0))
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    found = passes.energy(lambda number: None, 3, CUDA, seconds=0.0)
    assert waited
    assert found == {}  # no time, no call
    library.answers["GetTotalEnergyConsumption"] = [5_000_000, 5_600_000]
    found = passes.energy(lambda number: None, 3, CUDA, seconds=1e-6)
    assert found["joules_per_call"] == pytest.approx(600 / found["calls"])
    monkeypatch.setattr(Nvml, "open", lambda device=None: None)
    assert passes.energy(lambda number: None, 3, CUDA) == {}


def test_what_nvml_knows_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(healthy())
    library.nvmlSystemGetDriverVersion = lambda: "580.65"  # type: ignore[attr-defined]
    monkeypatch.setattr(Nvml, "open", lambda device=None: Nvml(library, 0))
    h100 = SimpleNamespace(
        name="H100", total_memory=80, multi_processor_count=132, major=9, minor=0, uuid="1"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: h100.name)
    found = environment.describe(CUDA, [])["gpu"]
    assert (found["driver"], found["sm_clock_mhz"]) == ("580.65", 1980)
    assert found["power_limit_w"] == 700.0
    monkeypatch.setattr(Nvml, "open", lambda device=None: None)
    assert environment.describe(CUDA, [])["gpu"]["nvml"] == "unavailable"
