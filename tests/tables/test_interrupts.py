"""A step or lookup of a cached table that is interrupted at any line has happened, or has not."""

import copy
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emblib import (
    CacheConfig,
    CachePolicy,
    MultiPassPrefetch,
    Placement,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from tests import nightly
from tests.interrupts import each_line, interrupting

ROWS, DIM, LOOKUPS = 200, 4, 40
KINDS = {
    "lru": CacheConfig(sets=2),
    "lfu": CacheConfig(CachePolicy.LFU, sets=2),
    "passes": CacheConfig(sets=2, passes=MultiPassPrefetch(3, 1)),
    "disk": CacheConfig(sets=2),
}


# Of the lines of a call every n-th is interrupted; all of them take minutes.
STEPS = {
    "lru": nightly.number(13, 7),
    "lfu": nightly.number(13, 7),
    "passes": nightly.number(43, 23),
    "disk": nightly.number(127, 61),
}


def make(kind: str, directory: Path) -> TableBatchedEmbeddingBags:
    placement = Placement.DISK if kind == "disk" else Placement.MANAGED_CACHING
    options = vars(KINDS[kind]) | ({"directory": directory} if kind == "disk" else {})
    torch.manual_seed(0)
    module = TableBatchedEmbeddingBags(
        [TableSpec(ROWS, DIM, "t", placement)], optim.Adam(0.1), cache=CacheConfig(**options)
    )
    for step in range(4):
        train(module, step)
    return module


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS, (LOOKUPS,), generator=generator), torch.arange(LOOKUPS + 1)


BATCH = batch(100)


def train(module: TableBatchedEmbeddingBags, step: int) -> None:
    module(*batch(step)).sum().backward()


def serve(module: TableBatchedEmbeddingBags) -> None:
    with torch.no_grad():
        module(*BATCH)


CALLS: dict[str, Callable[[TableBatchedEmbeddingBags], object]] = {
    "train": lambda module: module(*BATCH).sum().backward(),
    "serve": serve,
    "prefetch": lambda module: module.prefetch(*BATCH),
    "flush": lambda module: module.flush(),
    "state_dict": lambda module: module.state_dict(),
}


def cached(module: TableBatchedEmbeddingBags) -> dict[str, Tensor]:
    """Which rows are cached, and how often or when they were used."""
    assert module.row_cache is not None
    buffers = module.row_cache.named_buffers()
    return {n: t.clone() for n, t in buffers if n in ("tags", "stamps", "counts")}


def values(module: TableBatchedEmbeddingBags) -> dict[str, Tensor]:
    """The numbers of a module as the next call finds them; nothing is moved."""
    cache = module.row_cache
    assert cache is not None
    slots = (cache.tags.view(-1) >= 0).nonzero().squeeze(1)
    rows = cache.tags.view(-1)[slots]
    found = {"hyper": module.hyperparams.clone()}
    tensors = (cache.weights, *cache.states)
    for (name, view), here in zip(module.table_views()[0].items(), tensors, strict=True):
        found[name] = view.detach().clone()
        found[name][rows] = here.view(-1, cache.layout.stride)[slots, :DIM]
    return found


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def later(module: TableBatchedEmbeddingBags, call: str) -> dict[str, Tensor]:
    """What becomes of a module that goes on."""
    if call == "prefetch":  # whether it happened or not, the batch is the next one
        module(*BATCH).sum().backward()
    for step in (7, 8):
        train(module, step)
    serve(module)
    module.flush()
    return values(module)


class Modules:
    """Equal modules of one kind."""

    def __init__(self, kind: str, base: Path) -> None:
        self.kind, self._base, self._number = kind, base, 0
        self._first = make(kind, base / "first")

    def new(self) -> TableBatchedEmbeddingBags:
        """Return another one."""
        if self.kind != "disk":
            return copy.deepcopy(self._first)
        self._number += 1
        return make(self.kind, self._base / str(self._number))


def check(
    modules: Modules, call: str, exception: type[BaseException], first: int, step: int
) -> None:
    """Interrupt a call at every `step`-th line."""
    undone, done = modules.new(), modules.new()
    CALLS[call](done)
    states = [(values(m), cached(m)) for m in (undone, done)]
    ends = [later(m, call) for m in (undone, done)]
    for attempt in each_line(exception, first=first, step=step):
        module = modules.new()
        with attempt:
            CALLS[call](module)
        now = (values(module), cached(module))
        fits = [equal(now[0], rows) for rows, _ in states]
        assert any(fits), attempt.where
        if modules.kind != "passes":
            assert any(equal(now[1], tags) for _, tags in states), attempt.where
        end = later(module, call)
        fits_later = [equal(end, rows) for rows in ends]
        assert any(a and b for a, b in zip(fits, fits_later, strict=True)), attempt.where
        assert module.row_cache is not None
        assert not module.row_cache._in_flight, attempt.where


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_has_happened_or_not(kind: str, call: str, tmp_path: Path) -> None:
    step = 2 if (kind, call) == ("lru", "train") else STEPS[kind]
    check(Modules(kind, tmp_path), call, KeyboardInterrupt, first=1, step=step)


@pytest.mark.parametrize("call", ["train", "prefetch"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_memory_has_happened_or_not(kind: str, call: str, tmp_path: Path) -> None:
    check(Modules(kind, tmp_path), call, MemoryError, first=5, step=3 * STEPS[kind])


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_real_signals_end_training_between_steps(kind: str, tmp_path: Path) -> None:
    modules = Modules(kind, tmp_path)
    twin, expected = modules.new(), []
    start = twin.step
    for step in range(100):
        expected.append(values(twin))
        train(twin, step)
    num_interrupted = 0
    for attempt in range(12):
        module = modules.new()

        def work(module: TableBatchedEmbeddingBags = module) -> None:
            for step in range(99):
                train(module, step)

        num_interrupted += interrupting(0.001 + attempt * 0.0023, work)
        assert equal(values(module), expected[module.step - start]), attempt
        assert is_free(module), "an interrupted step keeps no lock"
    assert num_interrupted, "no signal came in time"


def is_free(module: TableBatchedEmbeddingBags) -> bool:
    """Return whether another thread can enter the lock of a module."""
    entered: list[bool] = []
    lock = module._lock
    other = threading.Thread(target=lambda: entered.append(lock.acquire(blocking=False)))
    other.start()
    other.join()
    return entered == [True]


@pytest.mark.parametrize("call", ["flush", "train"])
def test_files_lead_back_to_a_commit_after_an_interrupt(call: str, tmp_path: Path) -> None:
    """An interrupted call, more training, and the end of the process."""
    modules = Modules("disk", tmp_path)
    commits = []
    for is_done in (False, True):
        module = modules.new()
        module.flush()
        train(module, 5)
        if is_done and call == "flush":
            module.flush()
        name = f"commit{is_done}"
        commits.append(values(reopened(module, tmp_path / name)))
    assert not equal(*commits) or call == "train"
    for attempt in each_line(step=STEPS["disk"]):
        module = modules.new()
        module.flush()
        train(module, 5)
        with attempt:
            CALLS[call](module)
        for step in (7, 8, 9):
            train(module, step)
        found = values(reopened(module, tmp_path / "copy"))
        assert any(equal(found, commit) for commit in commits), attempt.where


def reopened(module: TableBatchedEmbeddingBags, directory: Path) -> TableBatchedEmbeddingBags:
    """Return the module that another process would open if the one of `module` was killed."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(module.cache.directory, directory)
    return TableBatchedEmbeddingBags(
        module.tables, module.optimizer, cache=CacheConfig(sets=2, directory=directory)
    )
