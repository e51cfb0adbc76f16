"""Reserved memory: zeros, at no cost before they are written, and kept as long as someone looks."""

import gc
import pickle
from pathlib import Path

import pytest
import torch

from emblib.tables import memory

CPU = torch.device("cpu")
STATUS = Path("/proc/self/statm")


def _resident_mb() -> float:
    return int(STATUS.read_text().split()[1]) * 4096 / 1e6


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("numel", [0, 1, 1000, 3_000_001])
@pytest.mark.parametrize("used_share", [0.0, 1.0])
def test_zeros(device: torch.device, dtype: torch.dtype, numel: int, used_share: float) -> None:
    tensor = memory.reserve(numel, dtype, device, used_share)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((numel,), dtype, device.type)
    assert not tensor.any()
    tensor.fill_(3)
    assert (tensor == 3).all()


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
def test_costs_what_is_written() -> None:
    before = _resident_mb()
    tensor = memory.reserve(1 << 38, torch.float32, CPU)  # 1 TB
    memory.advise_growth(tensor, 0, 0, 1000)
    memory.advise_growth(tensor, 1 << 30, 0, 4_000_000)
    tensor[:1000] = 1.0
    tensor[1 << 30 : (1 << 30) + 4_000_000] = 2.0
    tensor[-1] = 3.0
    assert _resident_mb() - before < 60
    views = [tensor[:1000], tensor[-1:]]
    del tensor
    gc.collect()
    assert (views[0] == 1.0).all()
    assert views[1].item() == 3.0, "the memory lives as long as a view of it"
    del views
    gc.collect()
    assert _resident_mb() - before < 30


def test_use_takes_any_range() -> None:
    """It is advice only: nothing is written, and no range is too small or at a wrong place."""
    for numel in (1, 1000, 5_000_000):
        tensor = memory.reserve(numel, torch.float32, CPU)
        for before, now in ((0, 0), (0, numel), (numel // 2, numel), (numel, numel // 2)):
            memory.advise_growth(tensor, 0, before, now)
        memory.advise_growth(tensor, numel // 3, 0, numel - numel // 3)
        assert not tensor.any()


def test_small_ones_are_ordinary_tensors() -> None:
    tensor = memory.reserve(10, torch.float32, CPU)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), torch.zeros(10))


def test_too_large_is_told() -> None:
    with pytest.raises(MemoryError, match="smaller capacity"):
        memory.reserve(1 << 60, torch.float32, CPU)
