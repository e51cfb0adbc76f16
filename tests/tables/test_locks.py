"""What modules of plain, cached, tensor-train and quantised tables promise to threads and forks."""

import copy
import gc
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import (
    CacheConfig,
    CachePolicy,
    LookupTrace,
    Placement,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    TraceRecorder,
    TTEmbeddingBag,
    TTSpec,
    optim,
)
from emblib.tables.cache import BatchInFlight
from tests.tables import forks
from tests.tables.kills import run_alone
from tests.thread_cases import Meeting, held_elsewhere, together

ROWS, DIM, LOOKUPS = 96, 8, 12
CACHED = [
    (Placement.MANAGED_CACHING, CachePolicy.LRU),
    (Placement.MANAGED_CACHING, CachePolicy.LFU),
    (Placement.DISK, CachePolicy.LRU),
]
cached = pytest.mark.parametrize(("placement", "policy"), CACHED)


def make(
    directory: Path,
    placement: Placement = Placement.MANAGED_CACHING,
    policy: CachePolicy = CachePolicy.LRU,
    optimizer: optim.Optimizer | None = None,
) -> TableBatchedEmbeddingBags:
    """A table of which a third fits into the cache; row r begins with r everywhere."""
    module = TableBatchedEmbeddingBags(
        [TableSpec(ROWS, DIM, "t", placement)],
        optim.RowwiseAdagrad(0.5) if optimizer is None else optimizer,
        cache=CacheConfig(
            policy, sets=1, directory=directory if placement is Placement.DISK else None
        ),
    )
    start = torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, DIM)
    with torch.no_grad(), module.overwriting():
        module.table_views()[0]["weight"].copy_(start)
    return module


def widen(module: TableBatchedEmbeddingBags) -> TableBatchedEmbeddingBags:
    """Let threads meet between the decisions of a cache and what follows from them."""
    assert module.prefetching_cache is not None
    Meeting().after(module.prefetching_cache, "start")
    return module


def one_each(rows: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of bags with one row each."""
    return rows, torch.arange(rows.numel() + 1)


def drawn(seed: int, part: int = 0, parts: int = 1) -> Tensor:
    """Rows that are `part` modulo `parts`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(ROWS // parts, (LOOKUPS,), generator=generator) * parts + part


def train(module: torch.nn.Module, rows: Tensor, grad: float = 1.0) -> None:
    out = module(*one_each(rows))
    out.backward(torch.full_like(out, grad))


@cached
def test_two_threads_train_their_rows_as_one_does(
    tmp_path: Path, placement: Placement, policy: CachePolicy
) -> None:
    both, serial = (make(tmp_path / name, placement, policy) for name in ("both", "serial"))
    widen(both)

    def steps(module: TableBatchedEmbeddingBags, part: int) -> Callable[[], None]:
        def work() -> None:
            for step in range(40):
                train(module, drawn(step, part, 2), grad=0.1 * (step + 1))

        return work

    together(steps(both, 0), steps(both, 1))
    steps(serial, 0)()
    steps(serial, 1)()
    assert both.step == serial.step == 80
    for name, tensor in both.state_dict().items():
        assert torch.equal(tensor, serial.state_dict()[name]), name


@cached
def test_threads_that_read_see_their_rows_and_change_none(
    tmp_path: Path, placement: Placement, policy: CachePolicy
) -> None:
    module = widen(make(tmp_path, placement, policy))
    before = module.table_weights()[0].clone()

    def work(part: int) -> None:
        for step in range(30):
            rows = drawn(97 * step + part)
            with torch.no_grad():
                out = module(*one_each(rows))
            assert torch.equal(out, before[rows])

    together(*(lambda part=part: work(part) for part in range(4)))
    assert torch.equal(module.table_weights()[0], before)


@cached
def test_a_reader_beside_training_sees_whole_rows(
    tmp_path: Path, placement: Placement, policy: CachePolicy
) -> None:
    """Odd rows are trained by multiples of ROWS, so that each tells which row it is."""
    module = widen(make(tmp_path, placement, policy, optim.SGD(1.0)))
    done = threading.Event()

    def write() -> None:
        try:
            for step in range(40):
                train(module, drawn(step, 1, 2), grad=float(ROWS))
        finally:
            done.set()

    together(write, lambda: read_until(done, module))


def read_until(done: threading.Event, module: TableBatchedEmbeddingBags) -> None:
    """Look rows up that others move, or train by multiples of ROWS."""
    step = 0
    while not done.is_set():
        rows, step = drawn(1000 + step), step + 1
        with torch.no_grad():
            out = module(*one_each(rows))
        assert torch.equal(out % ROWS, rows[:, None].expand_as(out).float()), "other rows"
        assert torch.equal(out, out[:, :1].expand_as(out)), "half of an update"


def test_a_lookup_reads_its_slots_before_others_get_them(tmp_path: Path) -> None:
    module = make(tmp_path)
    Meeting().before(module, "_read")
    done = threading.Event()

    def empty() -> None:
        for _ in range(40):
            module.table_weights()
        done.set()

    together(empty, *(lambda: read_until(done, module) for _ in range(2)))


def test_a_lookup_without_gradients_ends_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, is_free = make(tmp_path), []
    after_update = BatchInFlight.after_update

    def check(flight: BatchInFlight) -> None:
        thread = threading.Thread(
            target=lambda: is_free.append(flight.lock.acquire(blocking=False))
        )
        thread.start()
        thread.join()
        after_update(flight)

    monkeypatch.setattr(BatchInFlight, "after_update", check)
    with torch.no_grad():
        module(torch.arange(3), torch.arange(4))
    assert is_free == [False]


@cached
def test_emptying_the_cache_beside_training_loses_no_update(
    tmp_path: Path, placement: Placement, policy: CachePolicy
) -> None:
    """Between the flush of a cache and its reset nothing may change there."""
    module, serial = (make(tmp_path / name, placement, policy) for name in ("both", "serial"))
    assert module.row_cache is not None
    Meeting().before(module.row_cache, "reset")
    done = threading.Event()

    def steps(trained: TableBatchedEmbeddingBags) -> None:
        for step in range(60):
            train(trained, drawn(step))

    def write() -> None:
        try:
            steps(module)
        finally:
            done.set()

    def look() -> None:
        while not done.is_set():
            module.table_weights()
            assert module.cache_stats().calls <= 60
            module.state_dict()

    together(write, look)
    steps(serial)
    assert torch.equal(module.table_weights()[0], serial.table_weights()[0])


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.MANAGED_CACHING])
def test_new_numbers_beside_training_lose_no_step(tmp_path: Path, placement: Placement) -> None:
    module = make(tmp_path, placement, optimizer=optim.Adam(0.1))
    done = threading.Event()

    def steps() -> None:
        try:
            for step in range(200):
                train(module, drawn(step))
        finally:
            done.set()

    def change() -> None:
        while not done.is_set():
            module.set_hyperparameters(eps=1e-6)

    together(steps, change)
    assert module.step == 200


@pytest.mark.parametrize("change", ["set_learning_rate", "set_step", "set_hyperparameters"])
def test_numbers_of_a_cached_table_wait_for_its_lock(tmp_path: Path, change: str) -> None:
    module = make(tmp_path)
    arguments: dict[str, object] = {"lr": 0.25} if change != "set_step" else {"step": 7}
    with held_elsewhere(module._lock):
        thread = threading.Thread(target=getattr(module, change), kwargs=arguments)
        thread.start()
        thread.join(0.05)
        assert (module.learning_rate, module.step) == (0.5, 0)
    thread.join()
    assert (module.learning_rate, module.step) != (0.5, 0)


def test_batches_may_be_prefetched_and_trained_by_different_threads(tmp_path: Path) -> None:
    module, serial = (make(tmp_path, optimizer=optim.SGD(1.0)) for _ in range(2))
    widen(module)
    done = threading.Event()
    batches = [one_each(drawn(step)) for step in range(30)]
    room, ready = threading.Semaphore(2), threading.Semaphore(0)

    def prefetch() -> None:
        for batch in batches:
            room.acquire()
            module.prefetch(*batch)
            ready.release()

    def steps() -> None:
        try:
            for batch in batches:
                ready.acquire()
                out = module(*batch)
                room.release()
                out.backward(torch.full_like(out, ROWS))
        finally:
            done.set()

    together(prefetch, steps, lambda: read_until(done, module))
    for rows, _ in batches:
        train(serial, rows, grad=float(ROWS))
    assert torch.equal(module.table_weights()[0], serial.table_weights()[0])


def test_a_graph_dropped_within_a_call_of_the_cache_is_let_go_after_it(tmp_path: Path) -> None:
    """As the garbage collector may do at any point, in any thread."""
    module = make(tmp_path)
    cache = module.row_cache
    assert cache is not None
    outs = [module(*one_each(drawn(step))) for step in range(3)]
    prefetch, flying = cache.prefetch, []

    def drop_graphs_and_prefetch(*args: Any, **options: Any) -> Any:
        fetch = prefetch(*args, **options)
        outs.pop()
        elsewhere = threading.Thread(target=outs.pop)
        elsewhere.start()
        elsewhere.join()
        gc.collect()
        flying.append(len(cache._in_flight))
        return fetch

    object.__setattr__(cache, "prefetch", drop_graphs_and_prefetch)
    out = module(*one_each(drawn(3)))
    object.__setattr__(cache, "prefetch", prefetch)
    assert flying == [4], "nothing is let go between the plan of a batch and its lookup"
    out.sum().backward()
    with torch.no_grad():
        module(*one_each(drawn(4)))
    assert len(cache._in_flight) == 1
    outs.clear()
    with torch.no_grad():
        module(*one_each(drawn(5)))
    assert not cache._in_flight
    now, oldest = cache.clock.tolist()
    assert oldest == now, "rows of batches that ended may be evicted"


def test_copies_have_locks_of_their_own(tmp_path: Path) -> None:
    module = make(tmp_path)
    train(module, drawn(1))
    with held_elsewhere(module._lock):
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        for twin in copies:
            assert twin._prefetching_cache is not None
            assert twin._prefetching_cache.lock is twin._lock is not module._lock
            train(twin, drawn(2))
    train(module, drawn(2))
    for twin in copies:
        assert torch.equal(twin.table_weights()[0], module.table_weights()[0])


@pytest.mark.parametrize("kind", ["device", "tt", "quantised"])
def test_tables_without_a_cache_are_read_by_many_threads(kind: str) -> None:
    spec = TableSpec(ROWS, DIM, "t")
    module: torch.nn.Module = TableBatchedEmbeddingBags([spec])
    if kind == "tt":
        module = TTEmbeddingBag(TTSpec(ROWS, DIM, ranks=(4,)))
    elif kind == "quantised":
        module = QuantizedEmbeddingBags.from_float(torch.randn(ROWS, DIM))
    with torch.no_grad():
        expected = module(*one_each(torch.arange(ROWS)))

    def read(part: int) -> None:
        for step in range(40):
            rows = drawn(31 * step + part)
            with torch.no_grad():
                assert torch.equal(module(*one_each(rows)), expected[rows])

    together(*(lambda part=part: read(part) for part in range(4)))


def test_threads_train_their_rows_of_a_plain_table_without_a_lock() -> None:
    modules = [TableBatchedEmbeddingBags([TableSpec(ROWS, DIM)], optim.SGD(0.5)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())

    def steps(module: TableBatchedEmbeddingBags, part: int) -> None:
        for step in range(60):
            train(module, drawn(step, part, 2), grad=0.1 * step)

    with held_elsewhere(modules[0]._lock):
        together(lambda: steps(modules[0], 0), lambda: steps(modules[0], 1))
    steps(modules[1], 0)
    steps(modules[1], 1)
    assert torch.equal(modules[0].table_weights()[0], modules[1].table_weights()[0])


def test_a_trace_of_two_threads_keeps_the_features_of_a_call_together() -> None:
    """Both features of a call have the same ids, so the records of both must be alike."""
    module = TableBatchedEmbeddingBags([TableSpec(ROWS, DIM), TableSpec(ROWS, DIM)])

    def calls(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(20):
            ids = torch.tensor([chance.randrange(ROWS) for _ in range(4)])
            module(torch.cat([ids, ids]), torch.arange(9))

    recorder, meeting = TraceRecorder(module, calls=40), Meeting()

    class Slow(dict[str, list[object]]):
        def setdefault(self, *arguments: object) -> list[object]:
            meeting.wait()
            return super().setdefault(*arguments)

    recorder._recorded = Slow()
    with recorder:
        together(*(lambda seed=seed: calls(seed) for seed in range(3)))
    trace: LookupTrace = recorder.trace
    assert [ids.numel() for ids in trace.ids] == [160, 160], "as many calls as were asked for"
    assert torch.equal(*trace.ids)


def test_forks(tmp_path: Path) -> None:
    """A module of its own for the child, or a refusal; nothing for tables on disk."""
    assert run_alone(forks, "all", tmp_path).count("as promised") == 3
