"""The peak memory of a call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from experiments.machine import memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_peak_of_a_call_on_the_cpu() -> None:
    peak = memory.peak_bytes(lambda: torch.ones(16 << 20).sum(), CPU)  # 64 MiB
    if peak is None:
        pytest.skip("this system does not let a process reset its peak")
    assert 60 << 20 <= peak <= 96 << 20
    assert (memory.peak_bytes(lambda: None, CPU) or 0) < 4 << 20


def test_the_peak_of_a_call_on_a_gpu_is_above_what_was_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(used=100, peak=900)  # the peak of earlier calls

    def work() -> None:
        gpu.used, gpu.peak = 110, max(gpu.peak, 150)

    answers = {
        "synchronize": lambda device: None,
        "memory_allocated": lambda device: gpu.used,
        "max_memory_allocated": lambda device: gpu.peak,
        "reset_peak_memory_stats": lambda device: setattr(gpu, "peak", gpu.used),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert memory.peak_bytes(work, CUDA) == 50
    assert memory.peak_bytes(lambda: None, CUDA) == 0
