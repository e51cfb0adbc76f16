"""Handles of tables that are sharded by key, against one process with the batches of all ranks."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    KeyedJaggedTensor,
    KeyStatus,
    PerFeature,
    TraceRecorder,
    optim,
)
from emblib.dynamic import DynamicTable, TableStatistics, tables_of
from emblib.sharding import (
    DistributedModelParallel,
    GradientReduction,
    checkpoints,
    row_wise,
    table_wise,
)
from emblib.sharding.ranks import RankGroup, subgroup
from emblib.storage import Hash
from tests.sharding import worlds
from tests.sharding.sharded_cases import joined

PLAN = {"user": row_wise(), "whole": table_wise(0), "country": row_wise()}


def source() -> EmbeddingBagCollection:
    torch.manual_seed(5)
    tables = [
        EmbeddingBagConfig(4096, 4, "user", ["u"], storage=Hash()),
        EmbeddingBagConfig(256, 8, "whole", ["w"], storage=Hash(eviction=Eviction.CUSTOM)),
        EmbeddingBagConfig(16, 4, "country", ["c"]),
    ]
    return EmbeddingBagCollection(tables, optimizer=optim.Adam(0.1))


def batch(rank: int, step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(40, (3, 12), generator=generator) - 20
    ids[2] = ids[2].abs() % 16
    return KeyedJaggedTensor(["u", "w", "c"], ids.view(-1), lengths=torch.full((12,), 3))


class Trained:
    """A sharded model and its oracle, after some steps."""

    def __init__(self, ranks: RankGroup, steps: int = 3) -> None:
        self.ranks, self.oracle = ranks, source().to(ranks.device)
        self.model = DistributedModelParallel(
            copy.deepcopy(self.oracle), ranks, plan={"": PLAN}, gradients=GradientReduction.SUM
        )
        for tables in (self.model.tables, self.oracle.tables):
            tables["whole"].set_score(11)
        for step in range(steps):
            self.train(step)

    def train(self, step: int) -> None:
        batches = [batch(rank, step).to(self.ranks.device) for rank in range(self.ranks.size)]
        self.model(batches[self.ranks.rank]).values().sum().backward()
        self.oracle(joined(batches)).values().sum().backward()


def content(table: DynamicTable) -> dict[int, Any]:
    """Row and stamp by key, rounded: sums of gradients have another order over ranks."""
    found = table.entries()
    rows = found.rows["weight"]
    values = zip(found.stamps.tolist(), rows.tolist(), strict=True)
    rounded = [(stamp, [round(x, 3) for x in row]) for stamp, row in values]
    return dict(zip(found.keys.tolist(), rounded, strict=True))


def scores_of(table: DynamicTable) -> dict[int, int]:
    found = table.entries()
    return dict(zip(found.keys.tolist(), found.scores.tolist(), strict=True))


def ask_and_change(ranks: RankGroup) -> None:
    """What all ranks ask together is answered as by one process."""
    case = Trained(ranks)
    for name in ("user", "whole"):
        table, oracle = case.model.tables[name], case.oracle.tables[name]
        assert table.is_sharded == (ranks.size > 1)
        assert table.size() == oracle.size() > 10
        assert table.stats() == oracle.stats()
        assert table.step() == oracle.step() == 3
        assert table.score() == oracle.score()
        assert content(table) == content(oracle)
        sizes = ranks.gather_objects(table.local.size())
        assert sum(sizes) == table.size()
        assert name == "user" or sizes[1:] == [0] * (ranks.size - 1)
        by_rank = table.statistics_by_rank()
        assert by_rank[ranks.rank] == (table.local.statistics() if table.shards else None)
        assert table.statistics() == TableStatistics.merged([s for s in by_rank if s is not None])
        assert (table.statistics().hits, table.statistics().keys) == (
            oracle.statistics().hits,
            oracle.size(),
        )
        # Each rank asks for other keys, the last one for none.
        last = ranks.rank == ranks.size - 1 and ranks.size > 1
        keys = torch.arange(-25 + ranks.rank, 0 if last else 25, 1 + ranks.rank)
        keys = keys[:0] if last else keys
        assert torch.equal(table.contains(keys), oracle.contains(keys))
        status = table.key_status(keys)
        assert torch.equal(status, oracle.key_status(keys))
        assert last or {KeyStatus.HIT, KeyStatus.ABSENT} <= set(status.tolist())
        if name == "whole":
            both = [torch.tensor([-3, r, 1000]) for r in range(ranks.size)]
            found = [table.set_key_scores(both[ranks.rank], 50 + ranks.rank)]
            found.append(oracle.set_key_scores(both[ranks.rank], 50 + ranks.rank))
            for rank, keys in enumerate(both):
                oracle.set_key_scores(keys[1:], 50 + rank)
            oracle.set_key_scores(both[0][:1], 49 + ranks.size)  # the largest of all ranks
            assert torch.equal(*found)
            assert scores_of(table) == scores_of(oracle)
        mine = torch.tensor([ranks.rank, -1, 1000])
        for_all = torch.cat(ranks.gather_objects(mine))
        at = slice(3 * ranks.rank, 3 * ranks.rank + 3)
        assert torch.equal(table.erase(mine), oracle.erase(for_all).cpu()[at])
        assert content(table) == content(oracle)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_answers_are_those_of_one_process(size: int) -> None:
    worlds.run(size, ask_and_change)


def send_changes(ranks: RankGroup) -> None:
    case = Trained(ranks)
    user, oracle = case.model.tables["user"], case.oracle.tables["user"]
    user.track_evictions()
    copies = [source().to(ranks.device) for _ in range(2)]
    step = user.step()
    whole = user.entries()
    for one in copies:
        one.tables["user"].set_entries(whole)
        one.groups.module_of(0)[0].index.set_tick(step)
    follower = DistributedModelParallel(
        copies[0], ranks, plan={"": PLAN}, gradients=GradientReduction.SUM
    )
    case.train(3)
    user.erase(torch.tensor([3, ranks.rank]))
    oracle.erase(torch.tensor([3, *range(ranks.size)]))
    changes = user.changes_since(step)
    assert {3, *range(ranks.size)} <= set(changes.removed.tolist())
    assert set(user.evicted(step).tolist()) == set(changes.removed.tolist())
    for table in (follower.tables["user"], copies[1].tables["user"]):
        assert table.apply_changes(changes).left_out == 0
        assert content(table) == content(oracle) == content(user)


def test_changes_reach_copies_on_any_number_of_ranks() -> None:
    worlds.run(2, send_changes)


def save(ranks: RankGroup, directory: Path) -> dict[int, Any]:
    case = Trained(ranks)
    case.model.tables["user"].track_evictions()
    step = case.model.tables["user"].save(directory / "whole")
    case.train(3)
    case.model.tables["user"].erase(torch.tensor([5]))
    case.model.tables["user"].save(directory / "changes", since=step)
    case.model.tables["whole"].save(directory / "one_rank")
    return content(case.model.tables["user"])


def load(ranks: RankGroup, directory: Path) -> dict[int, Any]:
    model = DistributedModelParallel(source().to(ranks.device), ranks, plan={"": PLAN})
    tables = model.tables
    tables["user"].load(directory / "whole")
    tables["user"].load(directory / "changes")
    loaded = tables["whole"].load(directory / "one_rank")
    assert loaded.loaded == tables["whole"].size() > 0
    assert tables["whole"].score() == 11  # it is part of the dump
    return content(tables["user"])


def test_dumps_are_read_on_any_number_of_ranks(tmp_path: Path) -> None:
    saved, *_ = worlds.run(3, save, tmp_path)
    for size in (1, 2):
        for loaded in worlds.run(size, load, tmp_path):
            assert loaded == saved


def fail_alone(ranks: RankGroup, directory: Path) -> list[str]:
    """The errors that this rank saw."""
    model = DistributedModelParallel(source().to(ranks.device), ranks, plan={"": PLAN})
    path = directory / "file" if ranks.rank == 0 else directory / "dump"
    if ranks.rank == 0:
        path.write_text("no directory")
    errors = []
    for act in (
        lambda: model.tables["user"].save(path),
        lambda: model.tables["user"].changes_since(0),
        lambda: model.tables["usre"],
        lambda: model.tables["country"],
        lambda: model.tables["user"].contains(torch.tensor([1.0 if ranks.rank == 0 else 1])),
        lambda: model.tables["user"].set_key_scores(torch.tensor([1]), [2] * (2 - ranks.rank)),
        lambda: model.tables["user"].save(directory / f"rank{ranks.rank}"),
    ):
        try:
            act()
        except Exception as error:
            errors.append(str(error))
    assert model.tables["user"].size() == 0  # the ranks are still in step
    return errors


WRONG_SETTINGS: list[tuple[str, Any]] = [
    ("set_score", 1.5),
    ("set_score", 2**63),
    ("set_step", 3),  # `whole` has Eviction.CUSTOM
    ("set_clock", 7),
    ("set_clock", float),  # it has no ttl
    ("skip_pause", None),
    ("track_optimizer_state", torch.optim.SGD([torch.zeros(1)])),  # of other parameters
    ("track_evictions", 0),
]


def set_wrongly(ranks: RankGroup) -> list[str]:
    """The types of the errors of wrong settings; `whole` has its only shard on one of the ranks."""
    model = DistributedModelParallel(source().to(ranks.device), ranks, plan={"": PLAN})
    whole = model.tables["whole"]
    errors = []
    for name, argument in WRONG_SETTINGS:
        try:
            getattr(whole, name)(argument)
        except (TypeError, ValueError) as error:
            errors.append(type(error).__name__)
        except RuntimeError as error:  # of a collective, on the rank without a shard
            errors.append("ValueError" if "failed with ValueError" in str(error) else str(error))
    try:
        model.tables["user"].set_score(3)  # it has Eviction.LRU
    except ValueError:
        errors.append("set_score of user")
    try:
        whole.track_statistics(remember=-1)
    except ValueError:
        errors.append("track_statistics")
    try:  # a wrong argument of one rank
        model.tables["user"].shrink(None if ranks.rank else 4096)
    except (TypeError, RuntimeError) as error:
        errors.append(type(error).__name__)
    assert whole.size() == 0  # the ranks are still in step
    return errors


def test_wrong_settings_raise_on_ranks_without_a_shard_too() -> None:
    first, second = worlds.run(2, set_wrongly)
    assert first == [
        *("TypeError", "ValueError", "ValueError", "TypeError", "ValueError"),
        *("ValueError", "ValueError", "ValueError"),
        *("set_score of user", "track_statistics", "RuntimeError"),
    ]
    assert second == [*first[:-1], "TypeError"]


def grow_and_shrink(ranks: RankGroup) -> tuple[list[int], int]:
    """Capacities and sizes of a table that grows in advance and shrinks by its parts."""
    config = EmbeddingBagConfig(4096, 4, "user", ["u"], storage=Hash(initial_capacity=32))
    full = replace(config, storage=Hash(initial_capacity=4096))
    starts_full = EmbeddingBagCollection([full], optimizer=optim.Adam(0.1))
    model = DistributedModelParallel(starts_full, ranks, plan={"": {"user": row_wise()}})
    assert model.tables["user"].capacity() == 4096
    tables = EmbeddingBagCollection([config], optimizer=optim.Adam(0.1))
    model = DistributedModelParallel(tables, ranks, plan={"": {"user": row_wise()}})
    user = model.tables["user"]
    user.reserve(512)
    numbers = [user.capacity()]
    ids = torch.arange(400) + 1000 * ranks.rank
    model(KeyedJaggedTensor(["u"], ids, lengths=torch.ones_like(ids))).values().sum().backward()
    numbers.append(user.size())
    evicted = user.shrink(256)
    return [*numbers, user.capacity(), user.size()], evicted


def test_a_sharded_table_grows_and_shrinks_by_its_parts() -> None:
    first, second = worlds.run(2, grow_and_shrink)
    assert first == second
    (reserved, before, capacity, after), evicted = first
    assert reserved >= 512
    assert (before, capacity) == (800, 256)
    assert after == before - evicted <= capacity


def out_of_step(ranks: RankGroup) -> str:
    """The error where ranks call different methods."""
    model = DistributedModelParallel(source().to(ranks.device), ranks, plan={"": PLAN})
    try:
        if ranks.rank == 0:
            model.tables["user"].contains(torch.tensor([1]))
        else:
            model.tables["whole"].size()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_call_different_methods_are_told() -> None:
    for message in worlds.run(2, out_of_step):
        assert "all ranks call the same method of the same table together" in message
        assert "contains of 'user'" in message
        assert "size of 'whole'" in message


def state_of_one_rank(ranks: RankGroup, use: str) -> str:
    """The error where rank 0 alone asks for the state, or a size, and the others go on."""
    ranks = RankGroup(subgroup(ranks))  # the test may leave it unfit
    model = DistributedModelParallel(source(), ranks, plan={"": PLAN})
    country = model.state_dict()["embedding_bags.country.weight"]
    try:
        if ranks.rank > 0:
            model(batch(ranks.rank, 0))
        elif use == "full tensor":
            country.full_tensor()
        elif use == "state dict":
            model.state_dict()
        elif use == "checkpoint":
            checkpoints.save({"model": model}, "unused", ranks)
        else:
            model.tables["user"].size()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.skipif(worlds.ON_GPUS, reason="ranks on GPUs compare no headers")
@pytest.mark.parametrize("use", ["state dict", "full tensor", "checkpoint", "size"])
def test_a_state_of_one_rank_alone_raises_on_all(use: str) -> None:
    """As in `if rank == 0: torch.save(model.state_dict(), ...)`."""
    for message in worlds.run(2, state_of_one_rank, use):
        assert "the ranks of a process group must call the same collectives" in message
        assert "All ranks must make a checkpoint" in message


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = worlds.run(2, fail_alone, tmp_path)
    assert "rank 0 failed" not in first[0]
    assert "rank 0 failed with" in second[0]
    assert "call track_evictions" in first[1]
    assert "did you mean 'user'" in first[2]
    assert "is stored as Dense" in first[3]
    assert first[4].startswith("keys must be int64, uint64 or int32")
    assert "rank 0 failed with TypeError" in second[4]
    assert first[5].startswith("scores must be one number, or one per key = 1, got 2")
    assert "rank 0 failed with ValueError" in second[5]
    for errors in (first, second):
        assert "all ranks must save to the same directory" in errors[6]
    assert len(first) == len(second) == 7


def rules_of_features(ranks: RankGroup) -> None:
    """Thresholds and ttls per feature, and fallback rows, are those of one process."""
    admission = FrequencyAdmission(PerFeature(1, 3), ExactCounter(512))
    storage = Hash(ttl=PerFeature(2, 40), admission=admission, fallback_rows=12, seed=1)
    tables = [EmbeddingBagConfig(4096, 4, "user", ["bought", "seen"], storage=storage)]
    oracle = EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1)).to(ranks.device)
    model = DistributedModelParallel(
        copy.deepcopy(oracle),
        ranks,
        plan={"": {"user": row_wise()}},
        gradients=GradientReduction.SUM,
    )
    one, other = model.tables["user"], oracle.tables["user"]
    one.track_evictions()
    for step in range(10):
        batches = []
        for rank in range(ranks.size):
            generator = torch.Generator().manual_seed(100 * step + rank)
            ids = (torch.rand(12, generator=generator) ** 2 * 60).long() - 20
            lengths = torch.full((4,), 3)
            batches.append(KeyedJaggedTensor(["bought", "seen"], ids, lengths=lengths))
        batches = [batch.to(ranks.device) for batch in batches]
        model(batches[ranks.rank]).values().sum().backward()
        oracle(joined(batches)).values().sum().backward()
    assert one.expire_keys() == other.expire_keys()
    assert content(one) == content(other)
    assert one.stats()["expired"] == other.stats()["expired"] > 0
    rows, expected = one.fallback_rows(), other.fallback_rows()
    assert torch.equal(rows["keys"], expected["keys"])
    torch.testing.assert_close(rows["weight"], expected["weight"])
    follower = EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1))
    follower.tables["user"].apply_changes(one.changes_since(0))
    assert torch.equal(follower.tables["user"].fallback_rows()["weight"], rows["weight"])
    uses = one.entries().rows["last_uses"]
    copied = follower.tables["user"].entries()
    order, order_there = one.entries().keys.argsort(), copied.keys.argsort()
    assert torch.equal(copied.rows["last_uses"][order_there], uses[order])


@pytest.mark.parametrize("world", [1, 3])
def test_rules_of_features(world: int) -> None:
    worlds.run(world, rules_of_features)


def test_names_in_a_model_over_ranks_are_those_in_the_model() -> None:
    """Handles, change logs and traces name tables as the unsharded model does."""
    model = nn.ModuleDict({"left": source(), "right": source()})
    names = list(tables_of(model))
    traced = _traced_tables(model)
    plan = {"left": PLAN, "right": PLAN}
    sharded = DistributedModelParallel(model, RankGroup.single(), plan=plan)
    assert "left.user" in names
    assert list(tables_of(sharded)) == list(sharded.tables) == names
    assert _traced_tables(sharded) == traced
    assert "left.user" in traced


def _traced_tables(model: Any) -> set[str]:
    with TraceRecorder(model) as recorder:
        for collection in getattr(model, "module", model).values():
            collection.eval()(batch(0, 0))
    return {feature.table for feature in recorder.trace.features}
