"""Native calls keep no memory: malloc's own count before and after many calls."""

import contextlib
import ctypes
import gc
import random
from collections.abc import Callable

import pytest
import torch

import emblib
from tests.fuzz.calls import CALLS

CALLS_COUNTED = 2_500
BUDGET = 2.0  # bytes per call; what a call leaves behind is 16 at least


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
    if found is not None:
        found.restype = _Mallinfo2
    return found


MALLINFO = _mallinfo2()
pytestmark = pytest.mark.skipif(MALLINFO is None, reason="this C library has no mallinfo2")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny calls take no other threads anyway; a pool that starts would count as a leak."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bytes_in_use() -> int:
    """Bytes that malloc has handed out, in all arenas and by mmap."""
    assert MALLINFO is not None
    gc.collect()
    info = MALLINFO()
    return info.uordblks + info.hblkhd


def left_behind(call: Callable[[], object], count: int) -> float:
    """Bytes per call that are still in use after `count` calls: the least of three rounds.

    Caches of torch and Python fill up in the first; a leak is there in each.
    """
    for _ in range(count // 10):
        call()
    rounds = []
    for _ in range(3):
        before = bytes_in_use()
        for _ in range(count // 3):
            call()
        rounds.append((bytes_in_use() - before) / (count // 3))
    return min(rounds)


@pytest.mark.parametrize("op", sorted(CALLS))
def test_calls_leave_nothing_behind(op: str) -> None:
    arguments = CALLS[op](random.Random(1)).arguments
    function = getattr(torch.ops.emblib, op).default
    assert left_behind(lambda: function(*arguments), CALLS_COUNTED) < BUDGET


@pytest.mark.parametrize("op", sorted(CALLS))
def test_refused_calls_leave_nothing_behind(op: str) -> None:
    """The arguments of an op are handed over before it looks at them: it frees them in any case."""
    arguments = [*CALLS[op](random.Random(1)).arguments]
    wrong = torch.zeros(2, 2, 2, dtype=torch.complex64)
    at = next(k for k, a in enumerate(arguments) if isinstance(a, torch.Tensor | list))
    arguments[at] = wrong if isinstance(arguments[at], torch.Tensor) else [wrong]
    function = getattr(torch.ops.emblib, op).default

    def refused() -> None:
        with contextlib.suppress(RuntimeError):  # `advise_huge_pages_` takes any tensor
            function(*arguments)

    assert left_behind(refused, CALLS_COUNTED // 5) < BUDGET


def _bags() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 100, (40,)), torch.arange(0, 41, 4)


def _tables(placement: emblib.Placement) -> torch.nn.Module:
    spec = emblib.TableSpec(100, 8, placement=placement)
    return emblib.TableBatchedEmbeddingBags([spec], emblib.optim.RowwiseAdagrad(0.1))


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "plain": lambda: _tables(emblib.Placement.DEVICE),
    "cached": lambda: _tables(emblib.Placement.MANAGED_CACHING),
    "tensor_train": lambda: emblib.TTEmbeddingBag(
        emblib.TTSpec(100, 8, (4, 4)), emblib.optim.SGD(0.1)
    ),
    "dynamic": lambda: emblib.DynamicEmbeddingBags(
        [emblib.DynamicSpec(64, 8)], emblib.optim.Adam(0.1)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODULES)
def test_training_steps_leave_nothing_behind(kind: str) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()

    def step() -> None:
        indices, offsets = _bags()
        module(indices, offsets).sum().backward()

    assert left_behind(step, 1_500) < 2 * BUDGET
