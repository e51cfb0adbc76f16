"""Dynamic modules that threads train, and forks of them: `python -m tests.dynamic.thread_steps`.

That runs what forks, in a process of its own with one thread: a fork of one that has threads of
OpenMP may hang.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emblib import BackingStore, DynamicEmbeddingBags, DynamicSpec, optim
from emblib.checkpoints import table_entries
from emblib.dynamic.tiers.disk import DiskRows
from emblib.dynamic.tiers.host import HostRows
from emblib.dynamic.tiers.sqlite import SqliteRows
from emblib.dynamic.tiers.store import RowStore, StoredRows
from emblib.init import KeyModulo
from tests.dynamic.tier_cases import prefetched
from tests.thread_cases import held_elsewhere, in_fork

KEYS, DIM, LOOKUPS, STEP = 400, 4, 24, 1024.0
STORES: dict[str, Callable[[Path], RowStore]] = {
    "host": lambda directory: HostRows(4 * KEYS),
    "disk": lambda directory: DiskRows(directory / "rows"),
    "sqlite": lambda directory: SqliteRows(directory / "rows.db"),
}


def make(capacity: int = 4 * KEYS, **options: object) -> DynamicEmbeddingBags:
    """A table whose rows begin with their key everywhere and are trained by multiples of STEP."""
    spec = DynamicSpec(capacity, DIM, name="t", initializer=KeyModulo(), **options)
    return DynamicEmbeddingBags([spec], optim.SGD(1.0))


def make_tiered(store: RowStore, *, write_behind: bool = False) -> DynamicEmbeddingBags:
    """The same with most rows in the lower tier."""
    spec = DynamicSpec(64, DIM, name="t", initializer=KeyModulo())
    backing = BackingStore(store, write_behind=write_behind)
    return prefetched(DynamicEmbeddingBags([spec], optim.SGD(1.0), backing=backing))


def one_each(keys: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of bags with one key each."""
    return keys, torch.arange(keys.numel() + 1)


def drawn(seed: int, part: int = 0, parts: int = 1) -> Tensor:
    """Keys that are `part` modulo `parts`; new ones come with every seed."""
    generator = torch.Generator().manual_seed(seed)
    last = min(KEYS, 80 + 12 * (seed % 100)) // parts
    return torch.randint(last, (LOOKUPS,), generator=generator) * parts + part


def train(module: torch.nn.Module, keys: Tensor, grad: float = STEP) -> None:
    out = module(*one_each(keys))
    out.backward(torch.full_like(out, grad))


def steps(module: DynamicEmbeddingBags, part: int, count: int = 30) -> Callable[[], None]:
    """Training of the keys that are `part` modulo 2."""

    def work() -> None:
        for step in range(count):
            train(module, drawn(step, part, 2), grad=STEP * (step % 4 + 1))

    return work


def rows_of(module: DynamicEmbeddingBags) -> dict[int, list[float]]:
    """Rows by key."""
    entries = table_entries(module, 0)
    rows = entries.rows["weight"][torch.arange(len(entries))]
    return dict(zip(entries.keys.tolist(), rows.tolist(), strict=True))


def a_fork_leaves_the_store_alone(directory: Path, store: str) -> None:
    """It goes on with a store in memory, which is its own, and is refused those in files."""
    module = make_tiered(STORES[store](directory))
    steps(module, 0, 10)()
    module.flush()
    steps(module, 1, 10)()
    module.prefetch(*one_each(drawn(3)))
    before = rows_of(module)
    held = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}

    def work() -> None:
        if store == "host":
            module.prefetch(*one_each(drawn(11)))
            steps(module, 0, 12)()
            module.flush()
            module.close()
            return
        for use in (module.flush, steps(module, 0, 12), lambda: rows_of(module), module.clear):
            with pytest.raises(RuntimeError, match="not open in this process"):
                use()
        module.close()
        module.__dict__.clear()
        gc.collect()

    assert in_fork(work) == ""
    assert {path: path.read_bytes() for path in held} == held
    assert rows_of(module) == before
    steps(module, 1, 3)()
    before = rows_of(module)
    module.flush()
    module.close()
    if store != "host":
        opened = make_tiered(STORES[store](directory))
        assert rows_of(opened) == before
        opened.close()


def a_fork_refuses_tables_that_another_thread_was_in() -> None:
    module = make()

    def work() -> None:
        with pytest.raises(RuntimeError, match="another thread was using this module"):
            train(module, drawn(1))
        with pytest.raises(RuntimeError, match="another thread was using this module"):
            module.state_dict()

    with held_elsewhere(module._lock):
        assert in_fork(work) == ""
    train(module, drawn(1))


class SlowRows(HostRows):
    """A store that takes half of the rows, and a while later the others."""

    is_within_put = threading.Event()

    def put(self, table: int, rows: StoredRows) -> StoredRows:
        half = torch.arange(rows.keys.numel()) % 2 == 0
        super().put(table, rows.at(half))
        self.is_within_put.set()
        time.sleep(0.05)
        return super().put(table, rows.at(~half))


def a_fork_waits_for_rows_that_move() -> None:
    """Both processes have all rows then."""
    store = SlowRows(4 * KEYS)
    module, serial = make_tiered(store, write_behind=True), make()
    for step in range(6):
        for trained in (serial, module):
            store.is_within_put.clear()
            train(trained, drawn(step))
    assert store.is_within_put.wait(60)

    def work() -> None:
        assert rows_of(module) == rows_of(serial)
        for trained in (serial, module):
            steps(trained, 1, 6)()
        assert rows_of(module) == rows_of(serial)

    assert in_fork(work) == ""
    work()


def main(directory: Path) -> None:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    a_fork_refuses_tables_that_another_thread_was_in()
    print("another thread: as promised")
    a_fork_waits_for_rows_that_move()
    print("moving rows: as promised")
    for store in STORES:
        (directory / store).mkdir(parents=True)
        a_fork_leaves_the_store_alone(directory / store, store)
        print(f"{store}: as promised")


if __name__ == "__main__":
    main(Path(sys.argv[2]))
