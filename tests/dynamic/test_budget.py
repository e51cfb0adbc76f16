"""One memory budget over many dynamic tables: never exceeded, and used where it helps."""

import copy
import gc
import pickle
import threading
from pathlib import Path

import pytest
import torch

from emblib import (
    BackingStore,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Eviction,
    HostRows,
    KeyedJaggedTensor,
    MemoryBudget,
    OnInsertFailure,
    duplicate_tables,
    init,
    optim,
    share_tables,
)
from emblib.dynamic.saving import snapshots
from emblib.storage import Hash
from tests.interrupts import each_line

DIM = 4
BUCKET_BYTES = 32 * (DIM * 4 + 1 + 16 + 2 + 8)  # weights, then tag, entry, queue and version


def tables(
    *names: str, capacity: int = 1024, initial: int = 32, **options: object
) -> DynamicEmbeddingBags:
    specs = [
        DynamicSpec(
            capacity, DIM, name=name, initial_capacity=initial, initializer=init.KeyModulo()
        )
        for name in names or "ab"
    ]
    return DynamicEmbeddingBags(specs, optim.SGD(0.1), seed=1, **options)  # type: ignore[arg-type]


def budget_of(rows: int, *modules: DynamicEmbeddingBags, **options: float) -> MemoryBudget:
    budget = MemoryBudget(rows // 32 * BUCKET_BYTES, **options)  # type: ignore[arg-type]
    for module in modules:
        budget.attach(module)
    return budget


def train(bags: DynamicEmbeddingBags, *ids: torch.Tensor) -> None:
    lengths = torch.tensor([0, *(len(part) for part in ids)])
    bags(torch.cat(ids), lengths.cumsum(0)).sum().backward()


def drawn(step: int, table: int, distinct: int, count: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + table)
    return torch.randint(distinct, (count,), generator=generator)


def check(budget: MemoryBudget, *modules: DynamicEmbeddingBags) -> None:
    """Check that the budget is kept, and that its limits are those that the tables have."""
    in_use = sum(sum(module.nbytes().values()) for module in modules)
    assert in_use <= budget.used() <= budget.nbytes
    rows = [module.capacity(t) for module in modules for t in range(len(module.tables))]
    limits = [table.rows for table in budget.tables()]
    assert all(r <= limit for r, limit in zip(rows, limits, strict=True))


def hit_rate(bags: DynamicEmbeddingBags) -> float:
    """Return the hit rate over all tables since the last call."""
    counts = bags.stats().values()
    rate = sum(c["hits"] for c in counts) / sum(c["lookups"] for c in counts)
    bags.reset_stats()
    return rate


def test_traffic_that_shifts_takes_the_rows_with_it() -> None:
    """The table with many keys gets the rows; a fixed split keeps half of them unused."""
    rows = 1024
    shared, fixed = tables(), tables(capacity=rows // 2, initial=rows // 2)
    budget = budget_of(rows, shared, interval=8, share=1 / 8)
    rates = []
    for step in range(480):
        wide = int(step >= 240)
        ids = [drawn(step, t, 1000 if t == wide else 90) for t in range(2)]
        train(shared, *ids)
        train(fixed, *ids)
        check(budget, shared)
        if step % 240 == 119:
            hit_rate(shared)
            hit_rate(fixed)
        if step % 240 == 239:
            rates.append((hit_rate(shared), hit_rate(fixed)))
            capacities = [shared.capacity(t) for t in range(2)]
            assert capacities[wide] >= 768
            assert sum(capacities) > 960
    assert all(ours > theirs + 0.1 for ours, theirs in rates), rates


def test_tables_of_equal_pressure_keep_their_rows() -> None:
    bags = tables()
    budget = budget_of(512, bags, interval=8)
    seen = []
    for step in range(320):
        train(bags, *(drawn(step, t, 700) for t in range(2)))
        check(budget, bags)
        if step >= 160:
            seen.append([bags.capacity(t) for t in range(2)])
    assert all(capacities == seen[0] for capacities in seen)
    assert sum(seen[0]) == 512


def test_two_modules_and_their_ends() -> None:
    """A module that is deleted, or cleared, gives its bytes back."""
    first, second = tables("a"), tables("b")
    budget = budget_of(256, first, second, interval=4)
    for step in range(8):
        train(first, drawn(step, 0, 2000))
        train(second, drawn(step, 1, 2000))
        check(budget, first, second)
    names = [table.name for table in budget.tables()]
    assert names == ["a", "b"]
    assert first.capacity(0) + second.capacity(0) == 256
    assert second.capacity(0) < 224
    first.clear()
    for step in range(8, 16):
        train(first, torch.arange(8))
        train(second, drawn(step, 1, 2000))
        check(budget, first, second)
    assert (first.capacity(0), second.capacity(0)) == (32, 224)
    del first
    gc.collect()
    assert [table.name for table in budget.tables()] == ["b"]
    train(second, drawn(16, 1, 2000))
    check(budget, second)
    assert second.capacity(0) == 256


def test_the_result_is_that_of_the_sequence_of_steps() -> None:
    def run() -> tuple[list[int], torch.Tensor]:
        bags = tables()
        budget_of(512, bags, interval=8)
        for step in range(100):
            train(bags, drawn(step, 0, 1000), drawn(step, 1, 60))
        keys = bags.index.export(0).keys
        return [bags.capacity(t) for t in range(2)], bags.table_rows(0)["weight"][
            bags.find(0, keys)
        ]

    (capacities, rows), (again, rows_again) = run(), run()
    assert capacities == again
    assert torch.equal(rows, rows_again)


def test_outputs_with_a_store_do_not_depend_on_the_budget() -> None:
    bags = tables("a", "b", backing=BackingStore(HostRows(5_000, seed=1)))
    large = tables("a", "b", capacity=8192)
    budget = budget_of(320, bags, interval=4, share=1 / 4)
    demoted = 0
    for step in range(60):
        wide = step // 20 % 2
        ids = [drawn(step, t, 600 if t == wide else 40) for t in range(2)]
        offsets = torch.tensor([0, 64, 128])
        outputs = [module(torch.cat(ids), offsets) for module in (bags, large)]
        assert torch.equal(*outputs)
        for out in outputs:
            out.sum().backward()
        check(budget, bags)
        demoted = sum(stats.demoted for stats in bags.tier_stats().values())
    assert demoted > 100


@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.LRU_LFU, Eviction.NONE])
def test_other_evictions(eviction: Eviction) -> None:
    specs = [
        DynamicSpec(1024, DIM, name=name, initial_capacity=32, eviction=eviction) for name in "ab"
    ]
    bags = DynamicEmbeddingBags(specs, optim.SGD(0.1), seed=1)
    budget = MemoryBudget(40_000, interval=4)
    budget.attach(bags)
    for step in range(80):
        wide = step // 40
        before = bags.capacity(1 - wide)
        train(bags, *(drawn(step, t, 900 if t == wide else 30) for t in range(2)))
        check(budget, bags)
        if eviction is Eviction.NONE:
            assert bags.capacity(1 - wide) >= before  # it never shrinks


def test_checkpoints_load_as_far_as_the_budget_allows(tmp_path: Path) -> None:
    source = tables()
    for step in range(20):
        train(source, *(drawn(step, t, 2000) for t in range(2)))
    bags = tables()
    budget = budget_of(256, bags)
    bags.load_state_dict(source.state_dict())
    check(budget, bags)
    assert bags.size(0) + bags.size(1) > 200
    source.save(tmp_path / "dump")
    bags.load(tmp_path / "dump")
    check(budget, bags)
    bags.reserve(0, 1000)
    check(budget, bags)
    snapshots.save(source, tmp_path / "snapshot")
    with pytest.raises(ValueError, match="a memory budget limits these tables"):
        snapshots.load(bags, tmp_path / "snapshot")
    other = tables()
    other.load_state_dict(bags.state_dict())
    assert other.size(0) == bags.size(0)
    copied = copy.deepcopy(bags)  # belongs to no budget, so it grows
    for step in range(20):
        train(copied, *(drawn(step, t, 2000) for t in range(2)))
    assert copied.capacity(0) == 1024
    check(budget, bags)


def test_a_model_that_has_its_budget_can_be_copied() -> None:
    model = torch.nn.Module()
    model.bags = tables()
    model.budget = budget_of(256, model.bags, interval=5)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        budget = copied.budget
        assert (budget.nbytes, budget.interval) == (model.budget.nbytes, 5)
        assert budget.tables() == []
        budget.attach(copied.bags)
        train(copied.bags, drawn(0, 0, 2000), drawn(0, 1, 2000))
        check(budget, copied.bags)


def test_keys_without_a_slot_are_due_to_the_budget() -> None:
    spec = DynamicSpec(
        1024,
        DIM,
        name="a",
        initial_capacity=32,
        eviction=Eviction.NONE,
        on_insert_failure=OnInsertFailure.RAISE,
    )
    bags = DynamicEmbeddingBags([spec], optim.SGD(0.1))
    budget_of(64, bags)
    with pytest.raises(RuntimeError, match=r"'a' of 64 rows in a memory budget .* larger budget"):
        train(bags, torch.arange(200))


def test_wrong_use(tmp_path: Path) -> None:
    bags = tables()
    budget = budget_of(128, bags)
    with pytest.raises(ValueError, match=r"\['a', 'b'\] belong to a memory budget already"):
        MemoryBudget(10**9).attach(bags)
    with pytest.raises(ValueError, match=r"use \d+ bytes already, and the budget of \d+ has"):
        budget.attach(tables("c", "d", initial=512))
    assert [table.name for table in budget.tables()] == ["a", "b"]
    with pytest.raises(ValueError, match="the model has none"):
        budget.attach(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="takes a module, got list"):
        budget.attach([bags])  # type: ignore[arg-type]
    assert repr(budget).endswith("interval=64, share=0.0625, ratio=1.5)")
    for options in (
        {"share": 0.0},
        {"share": 0.6},
        {"share": "0.1"},
        {"ratio": 1.0},
        {"ratio": None},
        {"interval": 0},
    ):
        with pytest.raises(ValueError, match=rf"{next(iter(options))} must be"):
            MemoryBudget(100, **options)  # type: ignore[arg-type]
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="a memory budget is for tables on the CPU"):
            budget.attach(tables("e", device="cuda"))
        with pytest.raises(RuntimeError, match="belong to a memory budget, which is for the CPU"):
            bags.to("cuda")


def test_tables_that_cannot_grow_count_too() -> None:
    bags = DynamicEmbeddingBags(
        [DynamicSpec(64, DIM, name="fixed"), DynamicSpec(512, DIM, name="b", initial_capacity=32)],
        optim.SGD(0.1),
        seed=1,
    )
    budget = budget_of(160, bags)
    train(bags, torch.arange(200), torch.arange(200))
    check_bytes = sum(bags.nbytes().values())
    assert check_bytes <= budget.used() == budget.nbytes
    assert [(t.name, t.rows) for t in budget.tables()] == [("b", 96)]


def test_fallback_rows_count() -> None:
    spec = DynamicSpec(1024, DIM, initial_capacity=32, fallback_rows=500)
    bags = DynamicEmbeddingBags([spec], optim.Adagrad(0.1))
    nbytes = sum(bags.nbytes().values())
    assert nbytes > 500 * 2 * DIM * 4
    assert bags.statistics(0).nbytes == nbytes
    with pytest.raises(ValueError, match="bytes already"):
        MemoryBudget(nbytes - 1).attach(bags)
    budget = MemoryBudget(nbytes + 4 * 32 * 100)
    budget.attach(bags)
    for step in range(4):
        train(bags, drawn(step, 0, 5000, 256))
        check(budget, bags)


def test_a_collection_has_one_budget() -> None:
    configs = [
        EmbeddingBagConfig(1024, DIM, name, [f"f_{name}"], storage=Hash(initial_capacity=32))
        for name in "ab"
    ]
    model = EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1))
    budget = MemoryBudget(256 // 32 * BUCKET_BYTES)
    budget.attach(model)
    ids = torch.arange(1000)
    batch = KeyedJaggedTensor(["f_a", "f_b"], ids, lengths=torch.tensor([900, 100]))
    model(batch).values().sum().backward()
    assert sum(table.capacity() for table in model.tables.values()) <= 256
    assert budget.used() <= budget.nbytes
    assert [table.name for table in budget.tables()] == ["a", "b"]


def test_tables_of_a_budget_are_not_replaced() -> None:
    """New modules would be in no budget, although `attach` was called."""
    hashed = EmbeddingBagConfig(1024, DIM, "a", ["a"], storage=Hash(initial_capacity=64))
    item = EmbeddingBagConfig(16, DIM, "item", ["item"])
    first, second = (
        EmbeddingBagCollection(c, optimizer=optim.SGD(0.1)) for c in ([hashed, item], [item])
    )
    model = torch.nn.ModuleDict({"first": first, "second": second})
    budget = MemoryBudget(1 << 20)
    budget.attach(model)
    used, groups = budget.used(), first.groups
    for replace in (
        lambda: first.set_optimizers({"item": optim.Adam(0.1)}),
        lambda: share_tables(model),
    ):
        with pytest.raises(ValueError, match="table 'a' is in a memory budget"):
            replace()
    assert first.groups is groups
    assert budget.used() == used > 0
    assert duplicate_tables(model) == {"item": ["first", "second"]}


def test_threads_share_a_budget() -> None:
    modules = [tables(name) for name in "ab"]
    budget = budget_of(512, *modules, interval=4)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(60):
                train(modules[number], drawn(step, number, 1500 if (step < 30) == number else 40))
                assert budget.used() <= budget.nbytes
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    check(budget, *modules)


def test_an_interrupted_step_keeps_the_budget() -> None:
    """At any line of a step in which one table shrinks for another."""

    def make() -> tuple[DynamicEmbeddingBags, MemoryBudget]:
        bags = tables(capacity=256)
        budget = budget_of(192, bags, interval=6, share=1 / 4)
        for step in range(5):
            train(bags, torch.arange(96) if step == 0 else torch.arange(4), drawn(step, 1, 900))
        return bags, budget

    bags, budget = make()
    capacity = bags.capacity(0)
    train(bags, torch.arange(4), drawn(5, 1, 900))
    assert bags.capacity(0) < capacity
    for attempt in each_line(step=19):
        bags, budget = make()
        with attempt:
            train(bags, torch.arange(4), drawn(5, 1, 900))
        check(budget, bags)
        for step in range(6, 9):
            train(bags, torch.arange(4), drawn(step, 1, 900))
            check(budget, bags)
        keys = bags.index.export(1).keys
        assert keys.unique().numel() == keys.numel() == bags.size(1)
        assert bool((bags.find(1, keys) >= 0).all()), attempt.where
