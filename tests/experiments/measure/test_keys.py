"""Tables of keys: the calls, what is timed, wrong results that are detected, and the report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments import configure
from experiments.config.schema import (
    Config,
    Distribution,
    KeysConfig,
    Mode,
    Order,
    TimingConfig,
    WorkloadConfig,
)
from experiments.config.sweep import Arm, Cell
from experiments.contenders import registry
from experiments.contenders.key_checks import verify_key_table
from experiments.contenders.keys import KeyTable, KeyTask
from experiments.contenders.registry import WrongResult
from experiments.machine import bandwidth
from experiments.measure import growth, keys
from experiments.measure.cache import run_keys
from experiments.measure.keys import FilledTable, Operation, fill
from experiments.measure.session import Session
from experiments.timing.call_clock import CallClock, TimedCall
from experiments.timing.clock import SampleTask, UnsupportedMode
from experiments.workloads import cache_bounds
from experiments.workloads.cache_bounds import RowTrace
from experiments.workloads.keys import KeyCalls, KeySpace, values_of

CPU = torch.device("cpu")
SPACE = KeySpace(Order.permuted, 3)
WORK = WorkloadConfig(distribution=Distribution.uniform, B=50, L=2)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_an_arm_whose_calls_cannot_be_prepared_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operations_of = keys._operations

    def operations(cell: Cell, filled: FilledTable, session: Session) -> Any:
        if filled.table.task.num_resident == 32:
            raise MemoryError("no memory for the calls")
        return operations_of(cell, filled, session)

    monkeypatch.setattr(keys, "_operations", operations)
    work = WorkloadConfig(T=1, E=64, D=4, B=8, L=1)
    arms = Arm("scored", load=0.5), Arm("scored", load=0.25)
    config = Config(name="x", timing=TimingConfig(pool=2, warmup=0, max_rounds=1))
    cell = Cell("sweep", "", work, arms, keys=KeysConfig(operations=["find_slots"]))
    records = keys.keys_cell(cell, Session(config, CPU, "run"), 0.1)
    assert [record["status"] for record in records] == ["oom", "ok"]


def test_an_arm_whose_memory_cannot_be_measured_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_table, built = growth._build_table, []

    def build(cell: Cell, arm: Arm, session: Session) -> KeyTable:
        built.append(arm.contender)
        if arm.contender == "scored_growing" and built.count("scored_growing") > 1:
            raise MemoryError("no memory for a second table")
        return build_table(cell, arm, session)

    monkeypatch.setattr(growth, "_build_table", build)
    work = WorkloadConfig(T=1, E=64, D=4, B=8, L=1)
    arms = Arm("scored_growing"), Arm("scored")
    cell = Cell("sweep", "", work, arms, keys=KeysConfig())
    records = growth.growth_cell(cell, Session(Config(name="x"), CPU, "run"), 0.0)
    assert [record["status"] for record in records] == ["oom", "ok"]


def test_a_table_that_lost_keys_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = growth._verify_filled

    def lose_keys(table: KeyTable, space: KeySpace, num_total: int) -> None:
        if type(table) is growing:
            raise WrongResult("after growth 1 keys are not there")
        verify(table, space, num_total)

    growing = type(registry.build("scored_growing", KeyTask(64, 4, CPU, 48, 1)))
    monkeypatch.setattr(growth, "_verify_filled", lose_keys)
    work = WorkloadConfig(T=1, E=64, D=4, B=8, L=1)
    arms = Arm("scored_growing"), Arm("scored")
    cell = Cell("sweep", "", work, arms, keys=KeysConfig())
    records = growth.growth_cell(cell, Session(Config(name="x"), CPU, "run"), 0.0)
    stops = [(record["status"], record["stop_reason"]) for record in records]
    assert stops == [("wrong", ""), ("ok", "filled")]


class Plain(KeyTable):
    """A dict: what every table must agree with."""

    operations = (
        "find",
        "find_slots",
        "find_or_insert",
        "find_or_insert_slots",
        "insert_or_assign",
        "insert_and_evict",
    )
    has_erase = True

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        self.rows: dict[int, Tensor] = {}
        self.slots: dict[int, int] = {}

    def nbytes(self) -> int:
        return 0

    def fill(self, keys: Tensor, values: Tensor) -> None:
        self.insert_or_assign((keys, values))

    def find_slots(self, prepared: Any) -> Tensor:
        return torch.tensor([self.slots.get(k, -1) for k in prepared[0].tolist()])

    def find(self, prepared: Any) -> Tensor:
        zero = torch.zeros(self.task.dim)
        return torch.stack([self.rows.get(k, zero) for k in prepared[0].tolist()])

    def find_or_insert_slots(self, prepared: Any) -> Tensor:
        self.find_or_insert((prepared[0], torch.zeros(len(prepared[0]), self.task.dim)))
        return self.find_slots(prepared)

    def find_or_insert(self, prepared: Any) -> Tensor:
        for key, value in zip(prepared[0].tolist(), prepared[1], strict=True):
            self._put(key, self.rows.get(key, value))
        return self.find(prepared)

    def insert_or_assign(self, prepared: Any) -> None:
        for key, value in zip(prepared[0].tolist(), prepared[1], strict=True):
            self._put(key, value)

    def insert_and_evict(self, prepared: Any) -> Tensor:
        self.insert_or_assign(prepared)
        return torch.empty(0, dtype=torch.int64)

    def erase(self, keys: Tensor) -> None:
        for key in keys.tolist():
            self.rows.pop(key, None)
            self.slots.pop(key, None)

    def size(self) -> int:
        return len(self.rows)

    def _put(self, key: int, value: Tensor) -> None:
        self.rows[key] = value.clone()
        self.slots.setdefault(key, len(self.slots))


def task(slots: int = 640, resident: int = 480) -> KeyTask:
    return KeyTask(slots, 4, CPU, resident)


def filled(kind: type[KeyTable], resident: int = 480) -> KeyTable:
    table = kind(task(resident=resident))
    keys = SPACE.key_range(0, resident)
    table.fill(keys, values_of(keys, 4))
    return table


@pytest.mark.parametrize("name", ["sorted_keys", "lines", "scored"])
def test_a_table_counts_the_keys_that_it_got_not_those_of_the_plan(name: str) -> None:
    table = registry.build(name, task())
    for first in (0, 100):
        keys = SPACE.key_range(first, 100)
        table.fill(keys, values_of(keys, 4))
    table.prepare(keys, values_of(keys, 4))
    assert table.size() == 200


def test_a_key_that_was_filled_twice_counts_once() -> None:
    table = registry.build("sorted_keys", task())
    keys = SPACE.key_range(0, 100)
    for _ in range(2):
        table.fill(keys, values_of(keys, 4))
    assert table.size() == 100


# Keys and calls


@pytest.mark.parametrize("order", Order)
def test_different_numbers_have_different_keys(order: Order) -> None:
    keys = KeySpace(order, 5).key_range(0, 100_000)
    assert len(keys.unique()) == len(keys)
    assert torch.equal(KeySpace(order, 5).key_range(40, 3), keys[40:43])
    if order is Order.permuted:
        assert (keys < 0).any()
        assert not torch.equal(KeySpace(order, 6).key_range(0, 10), keys[:10])


def test_values_tell_their_key() -> None:
    keys = SPACE.key_range(0, 5000)
    values = values_of(keys, 3)
    assert values.shape == (5000, 3)
    assert len(values[:, 0].unique()) > 4990
    assert torch.equal(values[:, 2], values[:, 0] + 2)


def test_calls_have_the_share_of_keys_that_are_there_and_new_ones_every_time() -> None:
    calls = KeyCalls(WORK, KeysConfig(hits=0.6), 480, 3, inserts=True)
    there = set(
        calls.space.key_range(420, 60).tolist()
    )  # the last ones, so that a full table has them
    every = set(calls.space.key_range(0, 480).tolist())
    first, second = calls.next(4), calls.next(0)
    for call in (first, second):
        assert len(call.keys) == 100
        assert set(call.keys.tolist()) & every == there
        assert set(call.keys.tolist()) - every == set(call.new_keys.tolist())
    assert not set(first.new_keys.tolist()) & set(second.new_keys.tolist())
    assert first.keys.tolist() != second.keys.tolist()
    assert torch.equal(first.values, values_of(first.keys, 4))
    assert second.values.shape == (100, 0)


def test_keys_that_are_only_looked_up_are_drawn_from_all() -> None:
    reads = KeyCalls(WORK, KeysConfig(hits=1.0), 480, 3, inserts=False)
    seen = set(torch.cat([reads.next(0).keys for _ in range(50)]).tolist())
    assert seen == set(reads.space.key_range(0, 480).tolist())
    skewed = WorkloadConfig(distribution=Distribution.zipf, s=1.3, B=5000, L=1)
    keys = KeyCalls(skewed, KeysConfig(hits=1.0), 480, 3, inserts=False).next(0).keys
    assert keys.unique(return_counts=True)[1].max() > 500


# The clock


class Slow(TimedCall):
    """Preparing takes 1000, the call 7."""

    def __init__(self, clock: list[int]) -> None:
        self.clock = clock

    def prepare(self, number: int) -> int:
        self.clock[0] += 1000
        return number

    def call(self, ready: int) -> None:
        self.clock[0] += 7


def test_only_the_call_is_timed_and_the_rest_is_its_cost() -> None:
    now = [0]
    clock = CallClock(CPU, Mode.hot, lambda: now[0])
    phase = clock.adapt(Slow(now), 4)
    (reading,) = clock.read([SampleTask(lambda: [phase(0), phase(1)])])
    assert reading.seconds == pytest.approx(14e-9)
    assert reading.cost_s == pytest.approx(2014e-9)
    with pytest.raises(TypeError, match="times TimedCalls, got function"):  # would read as 0 s
        clock.adapt(lambda number: None, 4)
    with pytest.raises(UnsupportedMode, match="no mode graph"):
        CallClock(CPU, Mode.graph)


def test_what_a_call_added_is_taken_out_before_the_next() -> None:
    table = filled(Plain)
    calls = KeyCalls(WORK, KeysConfig(hits=0.6), 480, 3, inserts=True)
    built = FilledTable(table, calls)
    operation = Operation(built, "insert_or_assign", 2)
    for number in range(3):
        ready = operation.prepare(number)
        assert table.size() == 480
        operation.call(ready)
        assert table.size() == 520
    reads = Operation(built, "find_slots", 2)
    assert reads.prepare(0) is reads.prepare(0)  # made once
    assert table.size() == 480


# Who is right


@pytest.mark.parametrize("name", [n for n, e in registry.entries().items() if e.keyed])
def test_tables_of_keys_answer_what_was_put_in(name: str) -> None:
    entry = registry.find(name)
    if missing := entry.missing():
        pytest.skip(missing)
    # The hash differs per process: in fewer slots, a new key evicts another key now and then.
    table = entry.load()(task(slots=1280))
    calls = KeyCalls(WORK, KeysConfig(), 480, 3, inserts=True)
    assert fill(table, calls) == 480
    assert table.size() == 480
    verify_key_table(table, calls.space, calls.space.key_range(0, 480))
    table.reset_after_checks()
    assert table.size() == 480
    assert table.nbytes() >= 480 * 8


@pytest.mark.parametrize("name", ["scored", "scored_lfu"])
@pytest.mark.parametrize("seed", range(4))
def test_a_full_table_takes_more_keys_than_it_has_slots(name: str, seed: int) -> None:
    torch.manual_seed(seed)  # of the hash: by a few, a bucket is still not full at the end
    table = registry.find(name).load()(task(320, 320))
    calls = KeyCalls(WORK, KeysConfig(), 320, seed, inserts=True)
    put = fill(table, calls)
    assert put > 320
    assert table.size() == 320
    used = table.find_slots(
        (calls.space.key_range(put - calls.num_present, calls.num_present), None)
    )
    assert (used >= 0).all()


def test_keys_that_the_checks_evict_are_no_errors() -> None:
    table, keys = registry.build("scored", task(slots=256)), SPACE.key_range(0, 1024)
    table.fill(keys, values_of(keys, 4))
    present = keys[table.find_slots((keys, None)) != table.absent]
    assert len(present) == 256
    verify_key_table(table, SPACE, present)


class Forgetful(Plain):
    """Does not find the first key of a call."""

    def find_slots(self, prepared: Any) -> Tensor:
        slots = super().find_slots(prepared)
        slots[0] = -1
        return slots


class Crowded(Plain):
    """Two keys share a slot."""

    def find_slots(self, prepared: Any) -> Tensor:
        return super().find_slots(prepared) // 2


class Inventive(Plain):
    """Finds keys that are not there."""

    def find_slots(self, prepared: Any) -> Tensor:
        return super().find_slots(prepared).abs()


class Stale(Plain):
    """Assigns nothing to keys that are there."""

    def insert_or_assign(self, prepared: Any) -> None:
        self.find_or_insert(prepared)


class Overwriting(Plain):
    """Writes what it should only find."""

    def find_or_insert(self, prepared: Any) -> Tensor:
        self.insert_or_assign(prepared)
        return self.find(prepared)


class Keeping(Plain):
    """Erases nothing."""

    def erase(self, keys: Tensor) -> None:
        pass


class Lying(Plain):
    """Report keys as evicted that are still there."""

    def insert_and_evict(self, prepared: Any) -> Tensor:
        super().insert_and_evict(prepared)
        evicted: Tensor = prepared[0][:1]
        return evicted


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (Forgetful, "present key is not found"),
        (Crowded, "one slot"),
        (Inventive, "absent key is found"),
        (Stale, "find: values differ"),
        (Overwriting, "find_or_insert: values differ"),
        (Keeping, "erase"),
        (Lying, "evicted is still present"),
    ],
)
def test_a_wrong_table_is_found_out(wrong: type[KeyTable], what: str) -> None:
    verify_key_table(filled(Plain), SPACE, SPACE.key_range(0, 480))
    with pytest.raises(WrongResult, match=what):
        verify_key_table(filled(wrong), SPACE, SPACE.key_range(0, 480))


# Ceilings and ideals


def test_lines_hold_their_numbers() -> None:
    for huge in (False, True):
        found = bandwidth.CacheLines(1 << 20, huge=huge)
        positions = found.positions(torch.tensor([0, -1, 2**62, 7]))
        for read in (found.read_by_torch, found.read_by_numpy):
            assert torch.equal(read(positions) * bandwidth.WORDS_PER_LINE, positions)


def brute(batches: list[list[int]], capacity: int, policy: cache_bounds.Policy) -> list[int]:
    """Hits of distinct rows, batch by batch: the program as it is defined, one key at a time."""
    held: dict[int, list[int]] = {}  # row -> count, batch
    found = []
    for number, batch in enumerate(batches):
        first = list(dict.fromkeys(batch))
        found.append(sum(row in held for row in first))
        for row in batch:
            if row in held:
                held[row][0] += 1
                held[row][1] = number
        for row in [r for r in first if r not in held]:
            if len(held) >= capacity:
                lru = policy is cache_bounds.Policy.exact_lru
                victims = [(v[1 if lru else 0], k) for k, v in held.items() if v[1] < number]
                if not victims:
                    continue
                del held[min(victims)[1]]
            held[row] = [batch.count(row), number]
    return found


@pytest.mark.parametrize("policy", cache_bounds.Policy)
def test_exact_caches_follow_the_program_and_so_does_a_table_of_one_bucket(
    policy: cache_bounds.Policy,
) -> None:
    rng = np.random.default_rng(1)
    batches = [rng.zipf(1.3, 24) % 90 for _ in range(60)] + [np.arange(70)] * 2
    got = cache_bounds.run_policy(RowTrace.of(batches, 0), 32, policy)
    assert got.row_hits == brute([b.tolist() for b in batches], 32, policy)
    config = configure.load(["+experiment=eviction_quality", "device=cpu"])
    name = policy.name.replace("exact", "scored")
    table = run_keys(name, batches, 32, Session(config, CPU, "test"))
    assert table["row_hits"] == got.row_hits
    assert table["lookup_hits"] == got.lookup_hits
