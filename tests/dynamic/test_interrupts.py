"""Calls of dynamic tables that an exception ends at any line: all or nothing in every tier."""

import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from emblib import (
    BackingStore,
    DiskRows,
    DynamicEmbeddingBags,
    DynamicSpec,
    HashTable,
    HostRows,
    RowStore,
    SqliteRows,
    TierMode,
    checkpoints,
    init,
    optim,
)
from emblib.dynamic.saving.table_dumps import apply_changes, changes_since
from emblib.specs import CountMinSketch, ExactCounter, FrequencyAdmission
from emblib.tables.changes import CompletingLock
from tests import nightly
from tests.dynamic.tier_cases import prefetched
from tests.interrupts import interrupt_at_line, interrupting

DIM, CAPACITY, KEYS, BATCH = 4, 32, 150, 20
STORES = ("none", "host", "disk", "sqlite")
BEHIND = "_behind"  # of stores with write_behind


class Trained:
    """A module of one table, and what its rows must be.

    SGD with rate 1 and gradient 1: the row of key k is k minus the number of its updates.
    """

    def __init__(
        self,
        store: str,
        directory: Path,
        mode: TierMode = TierMode.CACHING,
        **fields: Any,
    ) -> None:
        backings: dict[str, Callable[[], RowStore]] = {
            "host": lambda: HostRows(1000, seed=1),
            "disk": lambda: DiskRows(directory / "rows"),
            "sqlite": lambda: SqliteRows(directory / "rows.db"),
        }
        kind, behind = store.removesuffix(BEHIND), store.endswith(BEHIND)
        backing = (
            BackingStore(backings[kind](), mode, write_behind=behind) if kind in backings else None
        )
        spec = DynamicSpec(CAPACITY, DIM, name="t", initializer=init.KeyModulo(), **fields)
        self.module = DynamicEmbeddingBags([spec], optim.SGD(1.0), seed=1, backing=backing)
        if self.module.state.backing is not None:
            prefetched(self.module)
        self.keeps_keys = store != "none"
        self.rows: dict[int, float] = {}
        self._batches = itertools.count()
        self.keys = torch.empty(0)  # of the last step

    def batch(self) -> torch.Tensor:
        """Return the keys of another batch, which are distinct."""
        generator = torch.Generator().manual_seed(next(self._batches))
        return torch.randperm(KEYS, generator=generator)[:BATCH]

    def step(self, keys: torch.Tensor | None = None) -> None:
        """Train a batch."""
        self.keys = keys = self.batch() if keys is None else keys
        self.module(keys, torch.arange(keys.numel() + 1)).sum().backward()

    def read(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the rows of keys as evaluation reads them."""
        with torch.no_grad():
            return self.module(keys, torch.arange(keys.numel() + 1))

    def entries(self) -> dict[int, float]:
        """Return the rows by key, each with the number that all its columns must have."""
        entries = checkpoints.table_entries(self.module, 0)
        weights = entries.rows["weight"][torch.arange(len(entries))]
        assert entries.keys.unique().numel() == len(entries), "a key is in the table twice"
        assert len(entries) == self.module.size(0)
        assert torch.equal(weights, weights[:, :1].expand(-1, DIM)), "a row is torn"
        return dict(zip(entries.keys.tolist(), weights[:, 0].tolist(), strict=True))

    def check(self, used: torch.Tensor | None = None, erased: torch.Tensor | None = None) -> None:
        """Check the rows after a step with the keys `used`, or after `erased` ones were removed."""
        gc.collect()  # drops graphs of an interrupted step
        assert torch.is_grad_enabled()
        found, batch = self.entries(), set() if used is None else set(used.tolist())
        before = {key: self.rows.get(key, float(key)) for key in found}
        steps = {before[key] - found[key] for key in batch & found.keys()}
        assert steps in (set(), {0.0}, {1.0}), "some rows of a batch were updated, some not"
        others = found.keys() - batch
        assert all(found[key] == before[key] for key in others), "a row is another one"
        new = batch - self.rows.keys()
        assert new <= found.keys() or not new & found.keys(), "some keys of a batch were inserted"
        if self.keeps_keys:
            gone = self.rows.keys() - found.keys()
            asked = set() if erased is None else set(erased.tolist()) & self.rows.keys()
            assert gone in (set(), asked), "keys are lost"
        assert found.keys() <= self.rows.keys() | batch
        self.rows = found
        keys = torch.tensor(sorted(found), dtype=torch.int64)
        values = torch.tensor([found[key] for key in sorted(found)])
        assert torch.equal(self.read(keys), values[:, None].expand(-1, DIM))

    def warm_up(self) -> None:
        """Fill the tiers."""
        for _ in range(6):
            self.step()
            self.check(self.keys)


@pytest.fixture(params=(*STORES, "host" + BEHIND, "disk" + BEHIND))
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trained]:
    """Yield trained tables over each store."""
    tables = Trained(request.param, tmp_path)
    tables.warm_up()
    yield tables
    tables.module.close()


def interrupted(
    call: Callable[[], object],
    first: int = 1,
    stride: int = 1,
    exception: type[BaseException] = KeyboardInterrupt,
) -> Iterator[None]:
    """Make a call again and again, ended by an exception at its lines, until it is not reached."""
    for line in itertools.count(first, stride):
        with interrupt_at_line(line, exception) as interrupt:
            call()
        yield
        if interrupt.where is None:
            return


@pytest.mark.parametrize(
    ("exception", "first", "stride"),
    [(KeyboardInterrupt, 1, nightly.number(7, 3)), (MemoryError, 2, 17)],
)
def test_steps(trained: Trained, exception: type[BaseException], first: int, stride: int) -> None:
    for _ in interrupted(trained.step, first, stride, exception):
        trained.check(trained.keys)


def test_other_calls(trained: Trained) -> None:
    """Evaluation, flush, erasure and prefetch; training goes on in between."""
    keys = torch.empty(0)

    def erase() -> None:
        nonlocal keys
        keys = trained.batch()
        trained.module.erase(0, keys)

    for _ in interrupted(erase, 1, nightly.number(13, 5)):
        trained.check(erased=keys)
        trained.step(keys)
        trained.check(keys)
    everything = torch.arange(0, KEYS, 2)
    for call in (
        lambda: trained.read(everything),
        trained.module.flush,
        lambda: trained.module.prefetch(everything, torch.arange(everything.numel() + 1)),
    ):
        for _ in interrupted(call, 1, nightly.number(17, 7)):
            trained.check()
            trained.step()
            trained.check(trained.keys)


def test_interrupted_completion(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second exception ends the completion of the first call; the next call makes it."""

    def interrupted_again(self: CompletingLock, depth: int) -> None:
        raise KeyboardInterrupt

    lines = itertools.count(1, 7)
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(CompletingLock, "_finish", interrupted_again)
            with interrupt_at_line(next(lines)) as interrupt:
                trained.step()
        trained.check(trained.keys)
        if interrupt.where is None:
            return


@pytest.mark.parametrize("store", ["none", "host"])
@pytest.mark.parametrize(
    "fields",
    [
        {"eviction": "lfu"},
        {"eviction": "step"},
        {"ttl": 4},
        {"eviction": "lfu", "admission": FrequencyAdmission(2, ExactCounter(256))},
        {"admission": FrequencyAdmission(2, CountMinSketch(64, 2, halve_every=4))},
    ],
)
def test_scores_expiry_and_admission(store: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Counts of keys go on as in tables whose steps were not interrupted."""
    tables, other = Trained(store, tmp_path, **fields), Trained(store, tmp_path, **fields)
    for _ in interrupted(tables.step, 1, 11):
        gc.collect()
        done, other_keys = tables.module.num_training_steps, other.batch()
        assert torch.equal(tables.keys, other_keys)
        if done > other.module.num_training_steps:  # inserted, whether or not it was updated
            other.step(other_keys)
        state, expected = tables.module.state_dict(), other.module.state_dict()
        for name in expected.keys() - {"t.weight", "hyper"}:
            assert torch.equal(state[name], expected[name]), name


@pytest.mark.parametrize("store", ["none", "host"])
def test_growth_and_expiry(store: str, tmp_path: Path) -> None:
    """Keys that expire leave both tiers, and tables grow, in interrupted steps too."""
    tables = Trained(store, tmp_path, ttl=8, initial_capacity=None if store == "host" else 16)
    tables.keeps_keys = False
    for _ in interrupted(tables.step, 1, 9):
        tables.check(tables.keys)


def test_rows_served_in_place(tmp_path: Path) -> None:
    """Rows that are trained in the store, since they rank below those with slots."""
    tables = Trained("host", tmp_path, mode=TierMode.HYBRID, eviction="lfu")
    tables.warm_up()
    for _ in interrupted(tables.step, 1, 7):
        tables.check(tables.keys)
    assert tables.module.tier_stats()["t"].served_in_place


def test_eviction_log(tmp_path: Path) -> None:
    """The log of evicted keys is complete: a copy that follows by changes is equal."""
    tables = Trained("none", tmp_path)
    tables.module.track_evictions()
    follower = Trained("none", tmp_path)
    tick = 0

    def erase() -> None:
        tables.module.erase(0, tables.batch())

    for call, stride in ((tables.step, 13), (erase, 3)):
        for _ in interrupted(call, 1, stride):
            changes = changes_since(tables.module, tick)
            apply_changes(follower.module, changes)
            tick = changes.until
            assert follower.entries() == tables.entries()


def test_loads(trained: Trained) -> None:
    """A load that is interrupted is made completely."""
    before = trained.module.state_dict()
    keys = trained.batch()
    trained.step(keys)
    after = trained.module.state_dict()
    for state in (before, after):
        for _ in interrupted(partial(trained.module.load_state_dict, state), 1, 29):
            found = trained.module.state_dict()
            assert any(
                all(torch.equal(found[name], other[name]) for name in other)
                for other in (before, after)
            )
        assert all(torch.equal(trained.module.state_dict()[name], state[name]) for name in state)


def test_hash_table() -> None:
    table = HashTable(DynamicSpec(CAPACITY, DIM), seed=1)
    batches = itertools.count()
    keys = torch.empty(0)

    def assign() -> None:
        nonlocal keys
        keys = torch.randperm(KEYS, generator=torch.Generator().manual_seed(next(batches)))[:BATCH]
        table.insert_or_assign(keys, keys[:, None].expand(-1, DIM).float())

    for _ in range(6):
        assign()
    for _ in interrupted(assign):
        rows = [rows for rows in table.export()]
        there = torch.cat([part.keys for part in rows])
        assert there.unique().numel() == there.numel() == table.size()
        assert torch.equal(
            torch.cat([part.values for part in rows]), there[:, None].expand(-1, DIM)
        )


@pytest.mark.parametrize("store", [*STORES[1:], "host" + BEHIND, "sqlite" + BEHIND])
def test_signals(store: str, tmp_path: Path) -> None:
    """Ctrl-C at any time of training."""

    def train() -> None:
        for _ in range(300):
            step()

    tables = Trained(store, tmp_path)
    tables.warm_up()
    keys = torch.empty(0)

    def step() -> None:
        nonlocal keys
        keys = tables.batch()
        trained_before.append(keys)
        tables.step(keys)
        # At once: an interrupt between two keys would leave half of the expectation.
        rows = tables.rows
        tables.rows = rows | {key: rows.get(key, float(key)) - 1 for key in keys.tolist()}
        trained_before.pop()

    trained_before: list[torch.Tensor] = []
    for trial in range(6):
        # An exception that Python raises in a destructor is lost, and the work ends by itself.
        while not interrupting(0.01 + 0.007 * trial, train):
            pass
        tables.check(trained_before.pop() if trained_before else None)
    tables.module.close()
