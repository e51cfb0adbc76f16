"""DynamicEmb's way to shard: constraints, planner, sharder, model, dumps; at one and two ranks.

`example` follows the steps that DynamicEmb documents for a training script, written here with
emblib's modules in place of dynamicemb, torchrec and fbgemm_gpu.
"""

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import DiskRows, DynamicEmbeddingBags, DynamicSpec, optim
from emblib.compat import dynamicemb
from emblib.compat.dynamicemb import (
    DynamicEmbDump,
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbLoad,
    DynamicEmbParameterConstraints,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
    FrequencyAdmissionStrategy,
    KVCounter,
    get_planner,
    get_score,
    get_sharded_table_capacity,
    get_table_value_bytes,
    incremental_dump,
    set_score,
)
from emblib.compat.dynamicemb_dump import modules_of
from emblib.compat.dynamicemb_functions import arguments_in_dumps
from emblib.compat.dynamicemb_sharders import (
    DynamicEmbHash,
    DynamicEmbParameterSharding,
    RowsLeftToDump,
)
from emblib.compat.fbgemm_types import SparseType
from emblib.compat.torchrec import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    HeuristicalStorageReservation,
    KeyedJaggedTensor,
    ShardingEnv,
    ShardingType,
    Topology,
)
from emblib.dynamic.saving import dynamicemb_files
from emblib.sharding import checkpoints
from emblib.sharding.ranks import RankGroup
from tests.sharding import worlds

DIM, PATH = 8, "model.embeddings"


class Model(nn.Module):
    """Vectors of users and films, and a score of their sum."""

    def __init__(self, tables: list[EmbeddingConfig]) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables, device=torch.device("meta"))
        self.over = nn.Sequential(nn.Linear(DIM, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        """One number per example."""
        found = self.embeddings(kjt)
        vectors = sum(found[key].values() for key in ("user", "film"))
        return self.over(vectors).squeeze(1)


def configs() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(500, DIM, "users", feature_names=["user"]),
        EmbeddingConfig(300, DIM, "films", feature_names=["film"]),
    ]


def sharder(**more: Any) -> DynamicEmbeddingCollectionSharder:
    fused = {
        "output_dtype": SparseType.FP32,
        "optimizer": EmbOptimType.ADAM,
        "learning_rate": 0.05,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0,
        "eps": 1e-3,
        "prefetch_pipeline": False,
        **more,
    }
    return DynamicEmbeddingCollectionSharder(fused_params=fused, use_index_dedup=True)


def planner_of(
    tables: list[EmbeddingConfig], ranks: RankGroup, options: Any, share: float
) -> DynamicEmbeddingShardingPlanner:
    constraints = {}
    for config in tables:
        nbytes = get_table_value_bytes(config, EmbOptimType.ADAM, ranks.size, 128)
        constraints[config.name] = DynamicEmbParameterConstraints(
            sharding_types=[ShardingType.ROW_WISE.value],
            enforce_hbm=True,
            use_dynamicemb=True,
            dynamicemb_options=DynamicEmbTableOptions(
                global_hbm_for_values=int(nbytes * share),
                initializer_args=DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.NORMAL),
                **options,
            ),
        )
    topology = Topology(
        world_size=ranks.size,
        local_world_size=ranks.local_size,
        compute_device="cpu",
        hbm_cap=1 << 30,
        ddr_cap=1 << 33,
        intra_host_bw=450e9,
        inter_host_bw=25e9,
    )
    return DynamicEmbeddingShardingPlanner(
        eb_configs=tables,
        topology=topology,
        constraints=constraints,
        batch_size=16,
        enumerator=DynamicEmbeddingEnumerator(topology=topology, constraints=constraints),
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
        debug=True,
    )


def make(ranks: RankGroup, share: float = 1.0, **options: Any) -> DistributedModelParallel:
    torch.manual_seed(1)
    options.setdefault("score_strategy", DynamicEmbScoreStrategy.STEP)
    tables, sharders = configs(), [sharder()]
    model = Model(tables)
    planner = planner_of(tables, ranks, options, share)
    plan = planner.collective_plan(model, sharders, ranks.group)
    assert isinstance(plan.plan["embeddings"]["users"], DynamicEmbParameterSharding)
    return DistributedModelParallel(
        module=model,
        env=ShardingEnv(ranks),
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,
    )


def batch(ranks: RankGroup, step: int) -> tuple[KeyedJaggedTensor, Tensor]:
    """This rank's part of a batch of 32 examples."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(-(2**62), 2**62, (2, 40), generator=generator)
    ids[0] %= 97  # users come again
    labels = torch.rand(32, generator=generator)
    share = slice(32 // ranks.size * ranks.rank, 32 // ranks.size * (ranks.rank + 1))
    mine = ids[:, share]
    lengths = torch.ones(mine.numel(), dtype=torch.int64)
    return KeyedJaggedTensor(["user", "film"], mine.reshape(-1), lengths=lengths), labels[share]


def train(model: nn.Module, ranks: RankGroup, steps: range) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # tables get no gradient
    losses = []
    model.train()
    for step in steps:
        kjt, labels = batch(ranks, step)
        loss = nn.functional.mse_loss(model(kjt), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rows_of(model: nn.Module, table: str) -> dict[int, list[float]]:
    """The rows of a table on all ranks."""
    found = model.tables[table].entries()
    rows = found.rows["weight"]
    return dict(zip(found.keys.tolist(), rows.tolist(), strict=True))


def assert_close(found: dict[int, list[float]], wanted: dict[int, list[float]]) -> None:
    assert found.keys() == wanted.keys()
    keys = sorted(wanted)
    one, other = (torch.tensor([rows[key] for key in keys]) for rows in (found, wanted))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def example(ranks: RankGroup, path: Path) -> dict[str, dict[int, list[float]]]:
    """Train, dump increments and the whole model, load it into another one, and train both."""
    model = make(ranks)
    assert get_score(model) == {PATH: {"users": 1, "films": 1}}
    train(model, ranks, range(3))
    scores = get_score(model)
    assert scores == {PATH: {"users": 4, "films": 4}}
    train(model, ranks, range(3, 4))
    changes, after = incremental_dump(model, scores, ranks.group)
    kjt_users = torch.cat(ranks.gather_objects(batch(ranks, 3)[0]["user"].values()))
    assert changes[PATH]["users"][0].tolist() == kjt_users.unique().tolist()
    assert after == {PATH: {"users": 5, "films": 5}}
    DynamicEmbDump(str(path), model, optim=True, pg=ranks.group)
    file = path.parent / f"model_{ranks.size}_{ranks.rank}.pt"
    with pytest.warns(UserWarning, match="rows of dynamic tables are not in what torch.save"):
        torch.save(model.state_dict(), file)
    other = make(ranks)
    other.to(torch.device("cpu"))
    other.load_state_dict(torch.load(file, weights_only=True), strict=False)
    assert rows_of(other, "users") == {}
    DynamicEmbLoad(str(path), other, optim=True, pg=ranks.group)
    for name in ("users", "films"):
        assert rows_of(other, name) == rows_of(model, name)
    assert train(other, ranks, range(4, 6)) == train(model, ranks, range(4, 6))
    model.eval()
    with torch.inference_mode():
        assert torch.isfinite(model(batch(ranks, 9)[0])).all()
    return {name: rows_of(model, name) for name in ("users", "films")}


def test_the_documented_steps_at_one_and_two_ranks(tmp_path: Path) -> None:
    (alone,) = worlds.run(1, example, tmp_path / "one")
    for found in worlds.run(2, example, tmp_path / "two"):
        for name, rows in found.items():
            assert rows.keys() == alone[name].keys()
    assert (tmp_path / "two" / PATH / "users_emb_keys.rank_1.world_size_2").exists()


def checkpoint(ranks: RankGroup, path: Path, steps: int) -> dict[int, list[float]]:
    """emblib's checkpoints have the rows of dynamic tables, for any number of ranks."""
    model = make(ranks)
    if steps:
        train(model, ranks, range(steps))
        checkpoints.save({"model": model}, path, ranks)
    else:
        checkpoints.load({"model": model}, path, ranks)
    return rows_of(model, "users")


def test_checkpoints_have_the_rows(tmp_path: Path) -> None:
    saved, *_ = worlds.run(2, checkpoint, tmp_path / "c", 2)
    for found in worlds.run(3, checkpoint, tmp_path / "c", 0):
        assert found == saved


def load_elsewhere(ranks: RankGroup, path: Path) -> dict[int, list[float]]:
    model = make(ranks)
    DynamicEmbLoad(str(path), model, optim=True, pg=ranks.group)
    return rows_of(model, "users")


def dump(ranks: RankGroup, path: Path) -> dict[int, list[float]]:
    model = make(ranks, dist_type="hash_roundrobin")
    train(model, ranks, range(3))
    DynamicEmbDump(str(path), model, pg=ranks.group)
    return rows_of(model, "users")


def test_dumps_have_each_key_where_their_loader_expects_it(tmp_path: Path) -> None:
    """In the file of the rank of `dist_type`, whatever rank has it here; any ranks load them."""
    saved, *_ = worlds.run(2, dump, tmp_path)
    keys: list[int] = []
    for rank in range(2):
        file = tmp_path / PATH / f"users_emb_keys.rank_{rank}.world_size_2"
        of_rank = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.int64)
        owner = dynamicemb_files.owner_ranks(of_rank, 2, "hash_roundrobin")
        assert (owner == rank).all()
        keys += of_rank.tolist()
    assert sorted(keys) == sorted(saved)
    for size in (1, 3):
        for found in worlds.run(size, load_elsewhere, tmp_path):
            assert_close(found, saved)


def with_tiers(ranks: RankGroup, path: Path) -> None:
    """A tenth of the rows are in memory of the device; outputs are those of all of them."""
    small, large = (make(ranks, share, caching=share < 1) for share in (0.1, 1.0))
    for step in range(6):
        one, other = (train(model, ranks, range(step, step + 1)) for model in (small, large))
        torch.testing.assert_close(one, other)
    assert small.tables["films"].tier_stats().demoted > 0
    assert large.tables["films"].tier_stats() is None
    assert_close(rows_of(small, "films"), rows_of(large, "films"))
    (_, _, tables), *_ = modules_of(small)
    tables.flush()
    tables.dump(str(path / "own"), optim=True, pg=ranks.group)
    before = rows_of(small, "films")
    train(small, ranks, range(6, 7))
    tables.load(str(path / "own"), optim=True, pg=ranks.group)
    assert_close(rows_of(small, "films"), before)
    keys, values = tables.export_keys_values("films", "cpu", batch_size=7)
    own = {key: row for key, row in before.items() if tables.owns(torch.tensor([key])).item()}
    assert_close(dict(zip(keys.tolist(), values.tolist(), strict=True)), own)


def test_budgets_with_and_without_tiers(tmp_path: Path) -> None:
    worlds.run(2, with_tiers, tmp_path)


def with_external_storage(ranks: RankGroup, path: Path) -> dict[int, list[float]]:
    """Rows that the device evicts are in the store, a part per table and rank."""
    small, large = make(ranks, 0.1, external_storage=DiskRows(path / "store")), make(ranks)
    for step in range(6):
        one, other = (train(model, ranks, range(step, step + 1)) for model in (small, large))
        torch.testing.assert_close(one, other)
    assert small.tables["films"].tier_stats().demoted > 0
    assert_close(rows_of(small, "films"), rows_of(large, "films"))
    DynamicEmbDump(str(path / "dump"), small, optim=True, pg=ranks.group)
    again = make(ranks, 0.1, external_storage=DiskRows(path / "again"))
    DynamicEmbLoad(str(path / "dump"), again, optim=True, pg=ranks.group)
    assert_close(rows_of(again, "films"), rows_of(small, "films"))
    return rows_of(small, "films")


def test_external_storage_at_one_and_two_ranks(tmp_path: Path) -> None:
    (alone,) = worlds.run(1, with_external_storage, tmp_path / "one")
    for found in worlds.run(2, with_external_storage, tmp_path / "two"):
        assert found.keys() == alone.keys()
    parts = [sorted(p.name for p in (tmp_path / n / "store").iterdir()) for n in ("one", "two")]
    assert (len(parts[0]), len(parts[1])) == (2, 4), parts


def fill(ranks: RankGroup) -> int:
    model = make(ranks, score_strategy=DynamicEmbScoreStrategy.CUSTOMIZED)
    set_score(model, 5)
    assert get_score(model) == {PATH: {"users": 5, "films": 5}}
    (_, _, tables), *_ = modules_of(model)
    tables.fill_tables(0.9)
    users = model.tables["users"]
    wanted = int(get_sharded_table_capacity(configs()[0], ranks.size, 128) * 0.9)
    assert users.local.size() == wanted
    assert set(users.entries().scores.tolist()) == {5}
    return users.size()


def test_tables_are_filled() -> None:
    assert worlds.run(2, fill) == [2 * int(256 * 0.9)] * 2


def admit(ranks: RankGroup) -> None:
    model = make(
        ranks,
        score_strategy=DynamicEmbScoreStrategy.LFU,
        admit_strategy=FrequencyAdmissionStrategy(threshold=2),
        admission_counter=KVCounter(capacity=1024),
    )
    assert model.module.embeddings.dedup
    train(model, ranks, range(2))
    users = torch.cat([batch(RankGroup.single(), step)[0]["user"].values() for step in range(2)])
    keys, counts = users.unique(return_counts=True)
    assert sorted(rows_of(model, "users")) == keys[counts >= 2].tolist()


def test_options_of_a_plan_have_their_effect() -> None:
    worlds.run(2, admit)


def pooled(ranks: RankGroup) -> None:
    """A planner from `get_planner`; one table is dynamic, one row-wise, one on every rank."""
    tables = [EmbeddingBagConfig(1000, DIM, name, feature_names=[name]) for name in ("a", "b", "c")]
    model = EmbeddingBagCollection(tables, device=torch.device("meta"))
    options = {"a": DynamicEmbTableOptions()}
    planner = get_planner(tables, {"c"}, options, torch.device("cpu"), pg=ranks.group)
    sharders = [
        DynamicEmbeddingBagCollectionSharder(
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
        )
    ]
    plan = planner.collective_plan(model, sharders, ranks.group)
    assert [plan.plan[""][t].sharding_type for t in "abc"] == [
        "row_wise",
        "row_wise",
        "data_parallel",
    ]
    assert options["a"].max_capacity == 512
    assert (options["a"].initializer_args.lower, options["a"].dim) == (-(0.001**0.5), DIM)
    made = DistributedModelParallel(model, ShardingEnv(ranks), plan=plan, sharders=sharders)
    storages = {c.name: c.storage for c in made.module.embedding_bag_configs()}
    assert isinstance(storages["a"], DynamicEmbHash)
    ids = torch.tensor([2**62, -5, 3, 4, 5, 6])
    out = made(KeyedJaggedTensor(["a", "b", "c"], ids, lengths=torch.full((6,), 1)))
    out.values().sum().backward()
    assert made.tables["a"].contains(torch.tensor([2**62, 3])).tolist() == [True, False]
    again = EmbeddingBagCollection(tables, device=torch.device("meta"))
    alone = sharders[0].shard(again, plan.plan[""], ShardingEnv(ranks))
    assert alone.tables["a"].size() == 0
    assert isinstance(alone.state_dict()["embedding_bags.a.weight"], RowsLeftToDump)
    (shard,) = alone.state_dict()["embedding_bags.b.weight"].local_shards()
    assert shard.tensor.shape == (500, DIM)
    assert alone.create_context() is not None


def test_get_planner_and_bags() -> None:
    worlds.run(2, pooled)


def test_wrong_use_is_refused() -> None:
    options = DynamicEmbTableOptions()
    with pytest.raises(ValueError, match="row-wise over all ranks"):
        DynamicEmbParameterConstraints(
            sharding_types=["table_wise"], use_dynamicemb=True, dynamicemb_options=options
        )
    with pytest.raises(ValueError, match=r"without a constraint are \['films'\]"):
        DynamicEmbeddingShardingPlanner(
            eb_configs=configs(), constraints={"users": DynamicEmbParameterConstraints()}
        )
    with pytest.raises(NotImplementedError, match="enumerates and searches in one"):
        DynamicEmbeddingEnumerator(topology=Topology(1, "cpu")).enumerate(nn.Linear(1, 1), [])
    with pytest.raises(ValueError, match="lookups return float32"):
        sharder(output_dtype=SparseType.FP16)
    ranks = RankGroup.single()
    with pytest.raises(NotImplementedError, match="training=False"):
        make(ranks, training=False)
    plan = planner_of(configs(), ranks, {}, 1.0).collective_plan(Model(configs()), [sharder()])
    loaded = Model(configs()).to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"make it with device=torch\.device"):
        DistributedModelParallel(loaded, ShardingEnv(ranks), plan=plan, sharders=[sharder()])


def test_capacities_and_bytes() -> None:
    (users, _), align = configs(), dynamicemb.align_to_table_size
    assert [align(n) for n in (0, 1, 16, 17)] == [16, 16, 16, 32]
    assert get_sharded_table_capacity(users, 2, 128) == 256
    assert get_sharded_table_capacity(users, 3, dynamicemb.MAX_BUCKET_CAPACITY) == 176
    with pytest.raises(ValueError, match="multiple of 16"):
        get_sharded_table_capacity(users, 2, 100)
    assert get_table_value_bytes(users, EmbOptimType.ADAM, 2, 128) == 512 * (3 * 4 * DIM)
    row = 2 * DIM + 4  # float16, and one sum
    count = dynamicemb.get_constraint_capacity
    kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    assert count(300 * row, torch.float16, DIM, kind, 128) == 256
    with pytest.warns(UserWarning, match="rounded up to one bucket"):
        assert count(100 * row, torch.float16, DIM, kind, 128) == 128
    assert count(47 * row, torch.float16, DIM, kind, dynamicemb.MAX_BUCKET_CAPACITY) == 32
    with pytest.raises(ValueError, match="multiple of 16"):
        count(100 * row, torch.float16, DIM, kind, 0)
    with pytest.raises(ValueError, match="dim must be >= 1"):
        count(100, torch.float32, 0, kind)
    with pytest.raises(ValueError, match="alignment must be >= 1"):
        align(5, 0)
    with pytest.raises(TypeError, match="data_parallel_embedding_table_names must be a sequence"):
        get_planner([users], "users", {}, torch.device("cpu"))
    given = DynamicEmbInitializerArgs(lower=-3.0)
    assert dynamicemb.complete_initializer_args(given).upper == 1.0
    completed = dynamicemb.complete_initializer_args(given, embedding_config=users)
    assert (completed.lower, completed.upper) == (-3.0, 500**-0.5)


def test_a_topology_decides_the_ranks_of_a_plan() -> None:
    options = DynamicEmbTableOptions(global_hbm_for_values=1 << 20)
    constraint = DynamicEmbParameterConstraints(use_dynamicemb=True, dynamicemb_options=options)
    planner = DynamicEmbeddingShardingPlanner(
        topology=Topology(4, "cpu"), constraints={"users": constraint}
    )
    planner.plan(Model(configs()), [sharder()])
    users = configs()[0]
    assert options.max_capacity == get_sharded_table_capacity(users, 4)
    assert options.local_hbm_for_values == 1 << 18


def test_optimizers_without_a_name_in_dumps_are_refused() -> None:
    bags = DynamicEmbeddingBags([DynamicSpec(64, 4)], optim.LAMB(0.1))
    with pytest.raises(NotImplementedError, match="has no LAMB"):
        arguments_in_dumps(bags, 0, DynamicEmbTableOptions())


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.Adam(0.1, weight_decay=optim.L2(0.5)),
        optim.SGD(0.1, weight_decay=optim.Decoupled(0.5)),
    ],
)
def test_decay_without_a_name_in_dumps_is_refused(optimizer: optim.Optimizer) -> None:
    bags = DynamicEmbeddingBags([DynamicSpec(64, 4)], optimizer)
    with pytest.raises(NotImplementedError, match=r"\(rate=0.5\) of (Adam|SGD)"):
        arguments_in_dumps(bags, 0, DynamicEmbTableOptions())


def test_uninstalling_leaves_a_real_module(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("dynamicemb")
    monkeypatch.setitem(sys.modules, "dynamicemb", real)
    dynamicemb.uninstall()
    assert sys.modules["dynamicemb"] is real


def test_their_imports() -> None:
    from emblib.compat.dynamicemb.shard import (  # type: ignore[import-not-found]
        DynamicEmbeddingCollectionSharder as Shortened,
    )

    assert Shortened is DynamicEmbeddingCollectionSharder
    with warnings.catch_warnings():
        dynamicemb.install()
        try:
            import dynamicemb as installed  # type: ignore[import-not-found]
            from dynamicemb.planner import (  # type: ignore[import-not-found]
                DynamicEmbeddingShardingPlanner as Installed,
            )
        finally:
            dynamicemb.uninstall()
    assert installed is dynamicemb
    assert Installed is DynamicEmbeddingShardingPlanner
