"""What the planner does with models and alternatives, and what it says if nothing fits."""

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from emblib import optim
from emblib.collections import EmbeddingBagCollection, EmbeddingCollection
from emblib.collections.configs import EmbeddingBagConfig, EmbeddingConfig
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.planner import (
    PlanError,
    Planner,
    Prediction,
    Reservation,
    TableConstraints,
    TableWorkload,
    Topology,
    collective_plan,
    feasible,
    simulate,
)
from emblib.sharding.planner.enumerate import enumerate_options
from emblib.sharding.planner.report import predict
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ParameterSharding, Shard, ShardingType
from emblib.specs import Placement
from emblib.storage import Dense, Hash, Storage, TensorTrain
from tests.sharding import worlds
from tests.sharding.planner_cases import MB, planner_of, random_works

EXACTLY_TABLE_WISE = TableConstraints(sharding_types=(ShardingType.TABLE_WISE,))


# Models


def _model() -> torch.nn.Module:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            bags = [EmbeddingBagConfig(1000 * (t + 1), 32, f"t{t}") for t in range(3)]
            self.bags = EmbeddingBagCollection(bags, optimizer=optim.SGD(0.1))
            sequences = [EmbeddingConfig(500, 16, "t0", ("a", "b"))]
            self.sequences = EmbeddingCollection(sequences, optimizer=optim.Adam(0.1))
            self.dense = torch.nn.Linear(100, 10)

    return Model()


def test_a_model_with_two_collections() -> None:
    constraints = {
        "t0": EXACTLY_TABLE_WISE,
        "sequences.t0": TableConstraints(pooling_factor=(2.0, 5.0)),
    }
    found = Planner(Topology(2), 64, constraints).solve(_model())
    assert set(found.plan) == {"bags", "sequences"}
    assert list(found.plan["bags"]) == ["t0", "t1", "t2"]
    assert found.plan["bags"]["t0"].type is ShardingType.TABLE_WISE
    works = {table.workload.name: table.workload for table in found.tables}
    assert works["sequences.t0"].ids_per_example == 7.0
    assert isinstance(works["sequences.t0"].optimizer, optim.Adam)
    again = ShardingPlan.from_json(found.plan.to_json())
    assert again == found.plan
    assert Planner(Topology(2), 64, constraints).predict(_model(), again).step_s == found.step_s


def test_dense_parameters_are_reserved_for() -> None:
    planner = Planner(Topology(1, memory=1 << 30), 64, reservation=Reservation(0.5, 1000, 4.0))
    free_memory = planner.solve(_model()).ranks[0].free_memory.device
    assert free_memory == (1 << 30) * 0.5 - 1000 - 4 * (100 * 10 + 10) * 4


def test_the_optimizer_of_the_call_counts_as_that_of_the_collection() -> None:
    def model(optimizer: optim.Optimizer | None) -> torch.nn.Module:
        tables = [EmbeddingBagConfig(20_000, 128, "item")]
        return EmbeddingBagCollection(tables, optimizer=optimizer, device="meta")

    planner, rowwise = Planner(Topology(2), 512), optim.RowwiseAdagrad(0.1)
    expected = planner.solve(model(rowwise))
    assert planner.solve(model(None)).plan[""]["item"].type is ShardingType.COLUMN_WISE
    for source in (model(None), model(optim.SGD(0.1))):
        solved = planner.solve(source, optimizer=rowwise)
        assert str(solved) == str(expected)
        assert str(planner.predict(source, solved.plan, optimizer=rowwise)) == str(expected)
    (simulated,) = simulate(planner, model(None), [2], optimizer=rowwise)
    assert str(simulated.prediction) == str(expected)
    tables = [EmbeddingBagConfig(20_000, 128, "item", optimizer=rowwise)]
    own = EmbeddingBagCollection(tables, device="meta")
    assert str(planner.solve(own, optimizer=optim.Adam(0.1))) == str(expected)


def _plan_together(ranks: RankGroup) -> str:
    model = _model()
    max_trials = 1000 if ranks.rank == 0 else 1
    return collective_plan(model, Planner(Topology(2), 64, max_trials=max_trials), ranks).to_json()


def _fail_together(ranks: RankGroup) -> tuple[str, ...]:
    try:
        collective_plan(_model(), Planner(Topology(2, memory=1 << 16), 64), ranks)
    except PlanError as error:
        return error.tables
    return ()


def test_collective_plan() -> None:
    plans = worlds.run(2, _plan_together)
    assert plans[0] == plans[1]
    failures = worlds.run(2, _fail_together)
    assert failures[0] == failures[1] != ()


# Alternatives


def _large(kinds: tuple[Dense | TensorTrain, ...], rows: int = 20_000) -> list[TableWorkload]:
    constraints = TableConstraints(storages=kinds)
    small = TableWorkload(
        "", EmbeddingBagConfig(1000, 64, "small"), optim.SGD(0.1), False, 16, 1.0, constraints
    )
    config = EmbeddingBagConfig(rows, 64, "large")
    return [small, TableWorkload("", config, optim.SGD(0.1), False, 16, 1.0, constraints)]


def test_a_tensor_train_where_a_table_does_not_fit() -> None:
    kind = TensorTrain((8, 8))
    tight = planner_of(Topology(2, memory=2 * MB)).solve_workloads(_large((kind,)))
    kinds = [table.sharding.storage for table in tight.tables]
    assert kinds == [None, kind]
    assert tight.fits
    roomy = planner_of(Topology(2, memory=20 * MB)).solve_workloads(_large((kind,)))
    assert [table.sharding.storage for table in roomy.tables] == [None, None]


def test_a_cached_placement_where_a_table_does_not_fit() -> None:
    kind = Dense(Placement.MANAGED_CACHING)
    topology = Topology(2, memory=3 * MB // 2, host_memory=64 * MB, device="cuda")
    found = planner_of(topology).solve_workloads(_large((kind,)))
    assert [table.sharding.storage for table in found.tables] == [None, kind]
    assert found.fits
    assert any(rank.nbytes.host for rank in found.ranks)
    assert "MANAGED_CACHING" not in str(found.plan)
    assert ShardingPlan.from_json(found.plan.to_json()) == found.plan


def test_nothing_is_moved_to_the_host_unasked() -> None:
    topology = Topology(2, memory=MB, host_memory=1 << 40, device="cuda")
    with pytest.raises(PlanError, match=r"storages=\(Dense\(Placement.MANAGED_CACHING\)"):
        planner_of(topology).solve_workloads(_large(()))


# Errors


def test_an_error_says_what_is_short_and_what_to_do() -> None:
    works = random_works(1, 4)
    with pytest.raises(PlanError) as caught:
        planner_of(Topology(2, memory=MB)).solve_workloads(works)
    error = caught.value
    largest = max(works, key=lambda w: w.config.num_embeddings * w.config.embedding_dim)
    assert largest.name in str(error)
    assert "short" in str(error)
    assert error.missing_nbytes > 0
    assert len(error.remedies) >= 3
    assert all(way in str(error) for way in error.remedies)
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.tables, copied.missing_nbytes, copied.remedies) == (
        error.tables,
        error.missing_nbytes,
        error.remedies,
    )


def test_an_error_names_the_table_that_fits_nowhere() -> None:
    config = EmbeddingBagConfig(100_000, 64, "giant")
    small = EmbeddingBagConfig(1000, 64, "small")
    works = [
        TableWorkload("", small, optim.SGD(0.1), False, 16, 1.0),
        TableWorkload("", config, optim.SGD(0.1), False, 16, 1.0, EXACTLY_TABLE_WISE),
    ]
    with pytest.raises(
        PlanError, match=r"giant .* fits nowhere.*allow row_wise for giant"
    ) as caught:
        planner_of(Topology(4, memory=16 * MB)).solve_workloads(works)
    assert caught.value.tables == ("giant",)
    assert caught.value.missing_nbytes == pytest.approx(100_000 * 64 * 4 - 16 * MB, rel=0.01)


DENSE, CACHED = Dense(), Dense(Placement.MANAGED_CACHING)


def _table(name: str, nbytes: int, storage: Storage = DENSE) -> TableWorkload:
    config = EmbeddingBagConfig(nbytes // 256, 64, name, storage=storage)
    return TableWorkload("", config, optim.SGD(0.1), False, 16, 1.0)


def test_host_memory_is_no_device_memory() -> None:
    topology = Topology(2, memory=7 * MB, host_memory=64 * MB, device="cuda")
    works = [_table("a", 10 * MB), _table("b", 10 * MB), _table("cached", 12 * MB, CACHED)]
    with pytest.raises(PlanError, match=r"and 12\.00 MiB of host memory at least, 8\.\d+ MiB more"):
        planner_of(topology).solve_workloads(works)
    too_large = planner_of(Topology(2, memory=7 * MB, host_memory=4 * MB, device="cuda"))
    with pytest.raises(PlanError, match=r"at least 4\.00 MiB of host memory short") as caught:
        too_large.solve_workloads([_table("cached", 12 * MB, CACHED)])
    assert caught.value.missing_nbytes == 4 * MB


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("storage", [DENSE, CACHED, TensorTrain((64, 64))], ids=str)
def test_remedies_are_storages_that_the_table_may_have(storage: Storage, is_shared: bool) -> None:
    topology = Topology(2, memory=MB // 4, host_memory=MB, device="cuda")
    table = _table("t", 400 * MB, storage)
    readers = (dataclasses.replace(table, path="sequences"),) * is_shared
    with pytest.raises(PlanError) as caught:
        planner_of(topology).solve_workloads([dataclasses.replace(table, readers=readers)])
    remedy = next((r for r in caught.value.remedies if "storage" in r), "")
    assert ("Dense(Placement.MANAGED_CACHING)" in remedy) == (storage is DENSE)
    assert ("TensorTrain" in remedy) == (type(storage) is Dense and not is_shared)


def test_blocks_for_the_device_memory_of_ranks_fit_their_host_memory() -> None:
    memory = (7 * MB, 9 * MB)
    topology = Topology(2, memory=memory, host_memory=8 * MB, device="cuda")
    with pytest.raises(PlanError, match=r"at least 4\.00 MiB of host memory short"):
        planner_of(topology).solve_workloads([_table("cached", 20 * MB, CACHED)])


def test_hash_tables_have_no_other_storage() -> None:
    config = EmbeddingBagConfig(100_000, 64, "t", storage=Hash())
    constraints = TableConstraints(storages=(TensorTrain((8, 8)),))
    works = [TableWorkload("", config, optim.SGD(0.1), False, 16, 1.0, constraints)]
    with pytest.raises(ValueError, match=r"table t is a hash table, which cannot have another"):
        planner_of(Topology(2, memory=10 * MB)).solve_workloads(works)


def test_an_alternative_may_be_the_only_storage_with_a_plan() -> None:
    whole = TensorTrain((8, 8), dim_factors=(1, 8, 8))  # its columns cannot be cut
    config = EmbeddingBagConfig(1000, 64, "t", storage=whole)
    constraints = TableConstraints((ShardingType.COLUMN_WISE,), (Dense(),))
    works = [TableWorkload("", config, optim.SGD(0.1), False, 16, 1.0, constraints)]
    plan = planner_of(Topology(2)).solve_workloads(works).plan
    assert plan.modules[""]["t"].storage == Dense()


def test_the_search_for_any_plan_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicated tables have no groups, whose placements alone were counted."""
    monkeypatch.setattr(feasible, "_MAX_STEPS", 50)
    depths = []
    place_from = feasible._Search.place_from

    def counted(search: Any, number: int) -> bool:
        depths.append(number)
        return place_from(search, number)

    monkeypatch.setattr(feasible._Search, "place_from", counted)
    constraints = TableConstraints((ShardingType.DATA_PARALLEL,), (TensorTrain((16, 16)),))
    works = [
        dataclasses.replace(_table(f"t{i}", 700 * 256), constraints=constraints) for i in range(16)
    ]
    model = planner_of(Topology(2)).model(works)
    smallest = min(
        option.common_cost.nbytes.device for option in enumerate_options(works[0], model)
    )
    # Rank 0 lacks a few bytes, which shows only with the last tables.
    least = Topology(2, memory=(int(16 * smallest) - 8, 1 << 36))
    with pytest.raises(PlanError):
        planner_of(least).solve_workloads(works)
    assert 0 < len(depths) <= 51


def test_a_reservation_that_leaves_nothing() -> None:
    planner = Planner(Topology(2, memory=MB), 16, reservation=Reservation(nbytes=2 * MB))
    with pytest.raises(PlanError, match="nothing is left for tables on rank 0"):
        planner.solve_workloads(random_works(0, 2))
    # A share of 10 % of one byte leaves 0.9 bytes.
    with pytest.raises(PlanError, match="nothing is left for tables on rank 0"):
        Planner(Topology(2, memory=1), 16).solve_workloads(random_works(0, 2))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="must divide world_size = 6"):
        Topology(6, 4)
    with pytest.raises(ValueError, match="one per rank = 2"):
        Topology(2, memory=(1, 2, 3))
    with pytest.raises(TypeError, match="must be an int, got '16GB'"):
        Topology(2, memory="16GB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a sequence, got 'row_wise'"):
        TableConstraints(sharding_types="row_wise")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="storages must be TensorTrain"):
        TableConstraints(storages=(TensorTrain,))  # type: ignore[arg-type]
    assert TableConstraints(storages=TensorTrain((4, 4))).storages == (TensorTrain((4, 4)),)  # type: ignore[arg-type]
    for make in (Topology, Topology.detect):
        with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
            make(2, device="tpu")
        with pytest.raises(ValueError, match="world_size must be >= 1"):
            make(0)
    with pytest.raises(ValueError, match="not there: \\['nope'\\]"):
        Planner(Topology(2), 16, {"nope": TableConstraints()}).plan(_model())
    with pytest.raises(TypeError, match="of table 't' must be TableConstraints, got dict"):
        Planner(Topology(2), 16, {"t": {"pooling_factor": 2.0}})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="constraints must be a dict"):
        Planner(Topology(2), 16, [TableConstraints()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"reservation must be None or a Reservation.*got 0.2"):
        Planner(Topology(2), 4, reservation=0.2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got 'fp16'"):
        Planner(Topology(2), 4, comm_precision="fp16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a Topology, got 2"):
        Planner(2, 16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a ShardingPlan.* got dict"):
        Planner(Topology(2), 16).predict(_model(), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to plan"):
        Planner(Topology(2), 16).plan(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="nothing to plan"):
        Planner(Topology(2), 64).solve_workloads([])
    with pytest.raises(ValueError, match="one per feature = 2"):
        Planner(Topology(2), 16, {"sequences.t0": TableConstraints(pooling_factor=(1.0,))}).plan(
            _model()
        )
    with pytest.raises(ValueError, match="share must be in"):
        Reservation(share=1.0)
    by_columns = TableConstraints(sharding_types=(ShardingType.COLUMN_WISE,))
    with pytest.raises(ValueError, match="can hold it: \\['column_wise'\\] on 1 nodes"):
        Planner(Topology(1), 16, {"bags.t0": by_columns}).plan(_model())


def test_a_plan_for_another_world_is_refused() -> None:
    works = random_works(0, 2)
    found: Prediction = planner_of(Topology(2)).solve_workloads(works)
    planner = planner_of(Topology(4))
    with pytest.raises(ValueError, match="plan again"):
        predict(works, found.plan, planner.model(works), planner.free_memory())
    lacking = ShardingPlan({"": {"t0": found.plan[""]["t0"]}}, found.plan.world)
    with pytest.raises(ValueError, match="the plan has no table t1"):
        predict(works, lacking, planner_of(Topology(2)).model(works), planner.free_memory()[:2])


def test_any_boxes_can_be_predicted() -> None:
    config = EmbeddingBagConfig(1000, 64, "t")
    works = [TableWorkload("", config, optim.SGD(0.1), False, 16, 1.0)]
    shards = (
        Shard(1, (0, 300), (0, 64)),
        Shard(0, (300, 1000), (0, 16)),
        Shard(1, (300, 1000), (16, 64)),
    )
    plan = ShardingPlan(
        {"": {"t": ParameterSharding(ShardingType.CUSTOM, shards)}}, Topology(2).world
    )
    planner = planner_of(Topology(2))
    told = predict(works, plan, planner.model(works), planner.free_memory())
    weights = [700 * 16 * 4, (300 * 64 + 700 * 48) * 4]
    for rank, least in zip(told.ranks, weights, strict=True):
        assert least < rank.nbytes.device < least + 100_000
