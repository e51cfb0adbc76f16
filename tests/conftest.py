"""The device fixture: tests of operations run on the CPU, and on CUDA where there is one."""

import os

# Before torch starts its threads: on a busy machine spinning at barriers costs more than the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that is present."""
    return torch.device(request.param)


@pytest.fixture
def thread_counts() -> list[int]:
    """Thread counts whose results must have the same bits; restores the setting afterwards."""
    before = torch.get_num_threads()
    yield [1, 2, 3, 7]
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests run last, so that a mistake shows soon."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
