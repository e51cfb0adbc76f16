"""What a call needs of memory, by all who count it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from experiments.machine import memory
from experiments.machine.telemetry import Nvml
from tests.experiments.fake_nvml import FakeNvml

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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
        """A call that allocates 50 bytes, makes torch reserve 500, and 30 outside torch."""
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
