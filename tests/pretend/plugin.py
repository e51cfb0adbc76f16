"""A pytest plugin that runs tests of a GPU on the pretend GPU: `pytest -p tests.pretend.plugin`.

Where torch sees a real GPU it does nothing. Its settings come from the environment
(`torch_cuda.Settings.from_environment`). After each test everything that is pending runs; an error
that no call has raised fails the test.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.pretend import torch_cuda

gpu = None
if not torch.cuda.is_available():
    gpu = torch_cuda.install(torch_cuda.Settings.from_environment())


def pytest_report_header() -> str:
    """Name the settings, with which a failure is reproduced."""
    return f"pretend GPU: {'off, there is a real one' if gpu is None else gpu.settings}"


def pytest_sessionstart() -> None:
    """Take SIGSEGV back from pytest's own fault handler."""
    if gpu is not None:
        gpu.catch_faults()


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    if gpu is not None and (error := gpu.settle()):
        pytest.fail(f"the pretend GPU found: {error}", pytrace=False)


@pytest.fixture
def pretend_gpu() -> torch_cuda.PretendGpu:
    """The devices; skips where a real GPU is used."""
    if gpu is None:
        pytest.skip("needs the pretend GPU")
    return gpu
