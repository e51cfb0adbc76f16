"""The device fixture: tests of operations run on the CPU, and on CUDA where there is one."""

import gc
import os
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

# Before torch starts its threads: on a busy machine spinning at barriers costs more than the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from tests import compile_cache, nightly

# Keep what Inductor compiles by content: its first kernel takes ten seconds of processor time. Its
# caches of graphs are off, because their digests leave out the code of emblib.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache.inductor_folder()))
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
# Else it compiles and runs a program to learn whether the instructions of this processor work.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

pytest_plugins = ["tests.light_hooks", "tests.quick_close", "tests.whole_files"]

# With "cuda:1" the current device is another: code without a device guard fails.
CUDA = os.environ.get("EMBLIB_TEST_CUDA", "cuda")
DEVICES = ["cpu", *([CUDA] if torch.cuda.is_available() else [])]
# For tests that compile for the CPU with Inductor, whose code includes Python's headers.
needs_python_headers = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="needs Python.h (on Debian: apt-get install python3-dev)",
)


@pytest.fixture(params=DEVICES, ids=lambda name: name.partition(":")[0])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that is present."""
    return torch.device(request.param)


@pytest.fixture
def on_device(device: torch.device) -> Iterator[None]:
    """Make tensors on the device of the test by default."""
    with device:
        yield


@pytest.fixture
def seeded_on_device(on_device: None) -> None:
    """Seed torch, and make tensors on the device of the test by default."""
    torch.manual_seed(0)


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Return a list of the waits of the host for CUDA devices; it is filled at the end.

    On the pretend GPU (docs/pretend_gpu.md) each names the operation and the line of Python.
    """
    waits: list[str] = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits += [str(w.message) for w in seen if "synchronizing CUDA operation" in str(w.message)]


@contextmanager
def _error_on_host_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_host_waits() -> Callable[[], AbstractContextManager[None]]:
    """A context in which RuntimeError is raised where the host waits for a CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU or the pretend GPU")
    return _error_on_host_waits


@pytest.fixture
def thread_counts() -> list[int]:
    """Thread counts whose results must have the same bits; restores the setting afterwards."""
    before = torch.get_num_threads()
    yield [1, 2, 3, 7]
    torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests of a session without garbage collection; they exist until its end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Name the run in processes that share its tests, not in a session that a test starts."""
    os.environ.pop("EMBLIB_TEST_WORLDS", None)
    if hasattr(config, "workerinput"):
        os.environ["EMBLIB_TEST_WORLDS"] = config.workerinput["testrunuid"]
    else:
        _use_own_temporary_folder(config)


def _use_own_temporary_folder(config: pytest.Config) -> None:
    """Have all processes of a run make their temporary files in a folder that the run removes.

    Examples of docstrings and killed processes leave such files. `tmp_path` stays where it is.
    """
    former = os.environ.get("TMPDIR")
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.TemporaryDirectory(prefix="emblib-tests-", ignore_cleanup_errors=True)
    os.chmod(folder.name, 0o755)  # tests of permissions become another user
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name

    def restore() -> None:
        folder.cleanup()
        tempfile.tempdir = None
        os.environ.pop("TMPDIR")
        if former is not None:
            os.environ["TMPDIR"] = former

    config.add_cleanup(restore)


_file: Path | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exclude what exists before the first test of a file from garbage collection.

    A full collection that looks through all modules of a session takes a quarter of a second, and
    tests of interrupts and leaks need thousands of collections. Ranks end before a file without
    them: each group of four that waits takes 2 % of a processor, because gloo polls.
    """
    global _file
    if item.path != _file:
        _file = item.path
        gc.collect()
        gc.freeze()
        worlds = sys.modules.get("tests.sharding.worlds")
        if worlds is not None and not hasattr(getattr(item, "module", None), "worlds"):
            worlds.rest()


def _torch_state() -> dict[str, object]:
    """Return the settings of torch that hold for all that runs later in this process."""
    return {
        "torch functions of subclasses": torch._C._is_torch_function_enabled(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


@pytest.fixture(autouse=True)
def _same_torch_state() -> Iterator[None]:
    """Fail a test that leaves torch in another state: tests after it would fail instead."""
    before, with_gradients = _torch_state(), torch.is_grad_enabled()
    yield
    after = _torch_state()
    torch.set_grad_enabled(with_gradients)
    assert after == before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests run last, so that a mistake shows soon."""
    nightly.mark(items)
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
