"""Hash tables with a store behind them in sharded collections: training, checkpoints, restarts.

The fast tier has a fraction of the keys, so most rows move between the tiers in every step. The
oracle is one table that holds all of them, in one process.
"""

import copy
import gc
import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from emblib import (
    BackingStore,
    DiskRows,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    HostRows,
    KeyedJaggedTensor,
    SqliteRows,
    optim,
)
from emblib.dynamic import DynamicTable, StoreShard
from emblib.dynamic.keys import owner
from emblib.sharding import (
    DistributedModelParallel,
    GradientReduction,
    PrefetchTrainPipelineSparseDist,
    checkpoints,
    row_wise,
)
from emblib.sharding.ranks import RankGroup
from emblib.storage import Hash, TableSlice
from tests.sharding import worlds
from tests.sharding.sharded_cases import joined

FAST, KEYS, BATCH = 96, 400, 24
STORES = {
    "host": lambda path: HostRows(10 * KEYS),
    "disk": lambda path: DiskRows(path / "rows"),
    "sqlite": lambda path: SqliteRows(path / "rows.db"),
}


def backing(kind: str, path: Path) -> BackingStore | None:
    return None if kind == "none" else BackingStore(STORES[kind](path))


def collection(kind: str, path: Path, *, device: str = "cpu") -> EmbeddingBagCollection:
    """A table of keys of which the fast tier has a fourth, and one of rows."""
    torch.manual_seed(7)
    capacity = 16 * KEYS if kind == "none" else FAST
    low, high = -0.05, 0.05  # bounds by default depend on the capacity
    tables = [
        EmbeddingBagConfig(
            capacity,
            4,
            "user",
            ["u"],
            weight_init_min=low,
            weight_init_max=high,
            storage=Hash(backing=backing(kind, path)),
        ),
        EmbeddingBagConfig(16, 4, "country", ["c"]),
    ]
    return EmbeddingBagCollection(tables, device, optimizer=optim.Adam(0.05))


def model_of(ranks: RankGroup, kind: str, path: Path) -> DistributedModelParallel:
    plan = {"": {"user": row_wise(), "country": row_wise()}}
    return DistributedModelParallel(
        collection(kind, path, device="meta"), ranks, plan=plan, gradients=GradientReduction.SUM
    )


def batch(rank: int, step: int) -> KeyedJaggedTensor:
    """The batch of a rank; there are those of two ranks, the others have none."""
    if rank > 1:
        none = torch.zeros(0, dtype=torch.int64)
        return KeyedJaggedTensor(["u", "c"], none, lengths=none)
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(KEYS, (2, 2 * BATCH), generator=generator)
    ids[1] %= 16
    lengths = torch.full((2 * BATCH,), 2)
    return KeyedJaggedTensor(["u", "c"], ids.view(-1), lengths=lengths)


def train(model: Any, ranks: RankGroup, steps: range) -> None:
    """Train with the batches of this rank; every step has those of two ranks in all."""
    for step in steps:
        share = [batch(r, step) for r in range(max(2, ranks.size)) if r % ranks.size == ranks.rank]
        model(joined(share).to(ranks.device)).values().sum().backward()


def content(table: DynamicTable) -> dict[int, Any]:
    found = table.entries()
    assert len(set(found.keys.tolist())) == len(found), "a key is there twice"
    rows = {name: part.double() for name, part in found.rows.items()}
    columns = [found.stamps.view(-1, 1).double(), *(part.flatten(1) for part in rows.values())]
    return dict(zip(found.keys.tolist(), torch.cat(columns, 1).tolist(), strict=True))


def assert_same(found: dict[int, Any], wanted: dict[int, Any]) -> None:
    assert found.keys() == wanted.keys()
    keys = sorted(wanted)
    if keys:
        a, b = (torch.tensor([rows[key] for key in keys]) for rows in (found, wanted))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def oracle(steps: int, path: Path) -> dict[int, Any]:
    """The content of one table in one process after some steps."""
    model = collection("none", path)
    train(model, RankGroup.single(), range(steps))
    return content(model.tables["user"])


def train_beside_oracle(ranks: RankGroup, kind: str, path: Path) -> None:
    model, whole = model_of(ranks, kind, path), collection("none", path).to(ranks.device)
    user = model.tables["user"]
    for step in range(4):
        batches = [batch(rank, step).to(ranks.device) for rank in range(2)]
        outputs = whole(joined(batches))["u"].split(BATCH)
        own = model(batches[ranks.rank])["u"]  # the other table is drawn elsewhere
        torch.testing.assert_close(own, outputs[ranks.rank], rtol=1e-5, atol=1e-6)
        own.sum().backward()
        torch.cat(outputs).sum().backward()
        assert_same(content(user), content(whole.tables["user"]))
    stats = user.tier_stats()
    assert user.size() > 2 * FAST
    assert stats.demoted > 0
    assert stats.promoted > 0
    assert stats.dropped == 0
    keys = user.local.entries().keys
    assert bool((owner(keys, ranks.size) == ranks.rank).all())
    model.eval()
    again, wanted = model(batches[ranks.rank])["u"], whole.eval()(joined(batches))["u"]
    torch.testing.assert_close(again, wanted.split(BATCH)[ranks.rank], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", STORES)
def test_a_table_larger_than_its_fast_tier(kind: str, tmp_path: Path) -> None:
    worlds.run(2, train_beside_oracle, kind, tmp_path)


def train_save_and_die(ranks: RankGroup, kind: str, path: Path) -> None:
    """Save after three steps, and be killed in the backward pass of the fifth."""
    model = model_of(ranks, kind, path)
    train(model, ranks, range(2))
    model.tables["user"].flush()
    train(model, ranks, range(2, 3))
    state = {"model": model, "tables": model.fused_optimizer}
    checkpoints.save(state, path / "step_3", ranks)
    train(model, ranks, range(3, 4))
    out = model(batch(ranks.rank, 4).to(ranks.device)).values()
    if ranks.rank == 1:
        out.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    out.sum().backward()


def resume(ranks: RankGroup, kind: str, path: Path) -> list[dict[int, Any]]:
    """The content as loaded, and after two more steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are stores of another number of shards
        model = model_of(ranks, kind, path)
    state = {"model": model, "tables": model.fused_optimizer}
    checkpoints.load(state, path / "step_3", ranks)
    user = model.tables["user"]
    loaded = content(user)
    keys = user.local.entries().keys
    assert bool((owner(keys, ranks.size) == ranks.rank).all())
    train(model, ranks, range(3, 5))
    user.flush()
    return [loaded, content(user)]


@pytest.mark.parametrize("kind", STORES)
def test_killed_and_resumed_at_another_world_size(kind: str, tmp_path: Path) -> None:
    """Every key is there once, with the row of the checkpoint, and training goes on from it."""
    with pytest.raises(worlds.RankError, match="the process died"):
        worlds.run(2, train_save_and_die, kind, tmp_path)
    wanted = [oracle(3, tmp_path), oracle(5, tmp_path)]
    for size in (3, 1, 2):  # at 2 the stores have the rows of the last flush, which are replaced
        for found in worlds.run(size, resume, kind, tmp_path):
            for one, other in zip(found, wanted, strict=True):
                assert_same(one, other)


def reopen(ranks: RankGroup, path: Path, steps: int) -> tuple[int, dict[int, Any], list[str]]:
    """The step and content found in the stores, and warnings, before some steps and a flush."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = model_of(ranks, "disk", path)
    user = model.tables["user"]
    found = user.step(), content(user), [str(w.message) for w in told if "stores" in str(w.message)]
    train(model, ranks, range(steps))
    user.flush()
    return found


def test_stores_in_files_keep_the_last_flush(tmp_path: Path) -> None:
    (step, empty, told), *_ = worlds.run(2, reopen, tmp_path, 3)
    assert (step, empty, told) == (0, {}, [])
    (step, kept, told), *_ = worlds.run(2, reopen, tmp_path, 0)
    assert step == 3
    assert_same(kept, oracle(3, tmp_path))
    assert told == []
    first, *others = worlds.run(3, reopen, tmp_path, 0)
    assert first[:2] == (0, {})
    assert "for [2] shards, this model has 3" in first[2][0]
    assert [other[2] for other in others] == [[], []]


def test_an_unsharded_source_with_files(tmp_path: Path) -> None:
    """Its rows become those of the shards; where it has none, the shards keep what they have."""
    ranks = RankGroup.single()

    def sharded(source: Any) -> DistributedModelParallel:
        plan = {"": {"user": row_wise(), "country": row_wise()}}
        return DistributedModelParallel(source, ranks, plan=plan)

    source = collection("disk", tmp_path)
    train(source, ranks, range(2))
    before = content(source.tables["user"])
    model = sharded(source)
    assert_same(content(model.tables["user"]), before)
    model.tables["user"].flush()
    del model, source
    gc.collect()
    model = sharded(collection("disk", tmp_path))
    assert_same(content(model.tables["user"]), before)
    assert model.tables["user"].step() == 2
    with pytest.raises(BlockingIOError) as caught:
        collection("disk", tmp_path), collection("disk", tmp_path)
    assert "device='meta'" in caught.value.__notes__[0]


def test_what_needs_a_second_owner_is_refused(tmp_path: Path) -> None:
    made = collection("host", tmp_path)
    for change in (made.quantized, lambda: made.set_optimizers({"country": optim.SGD(0.1)})):
        with pytest.raises(ValueError, match="'user' has a backing store, which has one owner"):
            change()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(made)
    with pytest.raises(TypeError, match="a method for_shard"):
        Hash(backing=BackingStore(Unsharded(10)))
    with pytest.raises(TypeError, match="backing must be a BackingStore"):
        Hash(backing=HostRows(10))
    with pytest.raises(ValueError, match="a store of one table has one capacity"):
        Hash(backing=BackingStore(HostRows([10, 20]))).backing.for_shard(StoreShard("user"))


def test_bytes_that_a_planner_counts(tmp_path: Path) -> None:
    """Rows in host memory count there, those in files do not, and a shard has its share."""

    def nbytes(kind: str, device: str, **part: Any) -> Any:
        storage = Hash(backing=backing(kind, tmp_path))
        config = EmbeddingBagConfig(FAST, 4, "user", storage=storage)
        whole = TableSlice.whole(config)
        return storage.nbytes(replace(whole, **part), optim.Adam(0.1), device)

    plain, host, disk = (nbytes(kind, "cpu") for kind in ("none", "host", "disk"))
    row = 4 * (4 + 8)  # weights and two moments
    assert disk == plain
    assert host.device == plain.device + 10 * KEYS * (row + 33)
    on_gpu, half = nbytes("host", "cuda"), nbytes("host", "cuda", rows=(0, FAST // 2))
    assert on_gpu.host == 2 * half.host == 10 * KEYS * (row + 33)
    without = nbytes("none", "cuda")
    assert on_gpu.device == without.device + (1 << 16) * row
    assert plain.device == without.device + 2 * FAST, "eviction queues, on the CPU alone"


class Unsharded(HostRows):
    """A store as users write one, which cannot make others."""

    for_shard = None


def pipelined(ranks: RankGroup, path: Path, *, prefetches: bool) -> dict[int, Any]:
    model = model_of(ranks, "disk", path)
    batches = [batch(ranks.rank, step) for step in range(5)]
    if not prefetches:
        for one in batches:
            model(one.to(ranks.device)).values().sum().backward()
    else:
        pipeline = PrefetchTrainPipelineSparseDist(
            model,
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1),
            ranks.device,
            forward=lambda one: (model(one).values().sum(), None),
        )
        feed = iter(batches)
        for _ in batches:
            pipeline.progress(feed)
        assert model.tables["user"].tier_stats().prefetched > 0
    return content(model.tables["user"])


def prefetch(ranks: RankGroup, path: Path) -> None:
    assert_same(
        pipelined(ranks, path / "with", prefetches=True),
        pipelined(ranks, path / "without", prefetches=False),
    )


def test_prefetched_in_a_pipeline(tmp_path: Path) -> None:
    worlds.run(2, prefetch, tmp_path)


def sequences(ranks: RankGroup, path: Path) -> None:
    table = EmbeddingConfig(FAST, 4, "user", ["u"], storage=Hash(backing=backing("disk", path)))
    made = EmbeddingCollection([table], "meta", optimizer=optim.SGD(0.1))
    model = DistributedModelParallel(made, ranks, plan={"": {"user": row_wise()}})
    for step in range(4):
        out = model(batch(ranks.rank, step).to(ranks.device))
        out["u"].values().sum().backward()
    assert model.tables["user"].size() > FAST


def test_sequences(tmp_path: Path) -> None:
    worlds.run(2, sequences, tmp_path)
