"""The planner's search: against greedy placing, against exhaustive search; and its errors."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from emblib import optim
from emblib.collections.configs import EmbeddingBagConfig
from emblib.sharding.layout import shape_of
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.planner import (
    PlanError,
    Planner,
    TableConstraints,
    TableWorkload,
    Topology,
)
from emblib.sharding.planner.enumerate import Domain, Option, ShardGroup, enumerate_options
from emblib.sharding.planner.estimate import Load
from emblib.sharding.planner.feasible import _Search
from emblib.sharding.planner.report import predict
from emblib.sharding.planner.search import (
    PlacedOption,
    Problem,
    RankCosts,
    improve_best,
    starting_plans,
)
from emblib.sharding.planner.topology import MemoryNeed
from emblib.sharding.sharding_types import ShardingType
from emblib.storage import (
    Combine,
    Dense,
    Hash,
    Hashed,
    MemoryBytes,
    Narrow,
    Quantized,
    QuotientRemainder,
    Storage,
    TensorTrain,
)
from tests.sharding.planner_cases import MB, planner_of, random_works


def _topology(seed: int, memory: int = 1 << 33) -> Topology:
    chance = random.Random(seed)
    world, local = chance.choice([(1, 1), (2, 2), (4, 4), (4, 2), (8, 4), (16, 8)])
    return Topology(
        world,
        local,
        memory=memory,
        device=chance.choice(["cpu", "cuda"]),
        max_ranks_at_once=chance.choice([None, 2]),
    )


# Never worse than greedy table-wise placing


def _greedy_table_wise(planner: Planner, works: Sequence[TableWorkload]) -> ShardingPlan | None:
    """Longest processing time first: each table whole, on the rank that has least to do."""
    model, free_memory = planner.model(works), planner.free_memory()
    whole = [
        next(o for o in enumerate_options(work, model) if o.type is ShardingType.TABLE_WISE)
        for work in works
    ]
    world = planner.topology.world_size
    order = sorted(range(len(works)), key=lambda t: -whole[t].seconds(world))
    spent, taken = [0.0] * world, [0.0] * world
    common = sum(option.common_cost.nbytes.device for option in whole)
    ranks: dict[int, int] = {}
    for t in order:
        load = whole[t].groups[0].loads[0]
        free = [
            r
            for r in range(world)
            if taken[r] + load.nbytes.device + common <= free_memory[r].device
        ]
        if not free:
            return None
        ranks[t] = min(free, key=lambda r: spent[r])
        spent[ranks[t]] += sum(load.seconds)
        taken[ranks[t]] += load.nbytes.device
    tables = {
        work.config.name: whole[t].sharding(work, planner.topology, (ranks[t],))
        for t, work in enumerate(works)
    }
    return ShardingPlan({"": tables}, planner.topology.world)


@pytest.mark.parametrize("batch", range(4))
def test_never_worse_than_greedy_table_wise(batch: int) -> None:
    compared = better = 0
    for seed in range(batch * 25, batch * 25 + 25):
        works = random_works(seed, 1 + seed % 17)
        planner = planner_of(_topology(seed))
        found = planner.solve_workloads(works)
        assert found.fits
        greedy = _greedy_table_wise(planner, works)
        if greedy is None:
            continue
        other = predict(works, greedy, planner.model(works), planner.free_memory())
        assert found.step_s <= other.step_s * (1 + 1e-9), seed
        compared += 1
        better += found.step_s < other.step_s * 0.999
    assert compared == 25
    assert better > 0


def test_tight_memory_is_never_exceeded() -> None:
    planned = 0
    for seed in range(40):
        works = random_works(seed, 3 + seed % 9)
        planner = planner_of(_topology(seed, memory=(8 + 3 * (seed % 7) ** 2) * MB))
        try:
            found = planner.solve_workloads(works)
        except PlanError:
            continue
        planned += 1
        assert found.fits
        for rank in found.ranks:
            assert rank.nbytes.device <= rank.free_memory.device
    assert planned > 10


@pytest.mark.parametrize(("seed", "world"), [(2, 2), (5, 3), (22, 2), (46, 3)])
def test_moves_count_what_a_table_costs_every_rank(seed: int, world: int) -> None:
    """Large batches: local moves looked only at the memory of the shards that they moved."""
    works = random_works(seed, 6, batch=8192)
    nbytes = sum(w.config.num_embeddings * w.config.embedding_dim * 4 for w in works)
    assert planner_of(Topology(world, memory=2 * nbytes // world)).solve_workloads(works).fits


# Feasible wherever there is a plan


def _small_problem(seed: int) -> tuple[Planner, list[TableWorkload]]:
    """2 to 4 tables on 2 or 3 ranks that hardly fit, which may be spread in two ways."""
    chance = random.Random(seed)
    world = chance.choice([2, 3])
    ways = [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE]
    works = []
    for t in range(chance.randint(2, 4)):
        types = tuple(sorted(set(chance.choices(ways, k=2)), key=ways.index))
        config = EmbeddingBagConfig(chance.randint(1000, 9000), 64, f"t{t}")
        works.append(
            TableWorkload(
                "", config, optim.SGD(0.1), False, 16, 1.0, TableConstraints(sharding_types=types)
            )
        )
    whole = sum(work.config.num_embeddings * 64 * 4 for work in works)
    memory = tuple(int(whole / world * chance.uniform(0.8, 1.3)) + MB // 8 for _ in range(world))
    topology = Topology(world, memory=memory)
    return planner_of(topology), works


def _all_choices(option: Option, loads: RankCosts) -> Iterator[PlacedOption]:
    places = [range(loads.num_targets(group)) for group in option.groups]
    for targets in itertools.product(*places):
        if len(set(targets)) == len(targets) or option.groups[0].domain is Domain.WORLD:
            yield PlacedOption(option, targets)


def _exists(planner: Planner, works: Sequence[TableWorkload]) -> bool:
    """By trying everything."""
    model = planner.model(works)
    loads = RankCosts(model, planner.free_memory(), is_weighted=False)
    choices = [
        [c for option in enumerate_options(work, model) for c in _all_choices(option, loads)]
        for work in works
    ]
    for plan in itertools.product(*choices):
        for choice in plan:
            loads.add(choice)
        fits = loads.all_ranks_fit()
        for choice in plan:
            loads.add(choice, -1)
        if fits:
            return True
    return False


def test_nodes_are_alike_where_each_of_their_ranks_is() -> None:
    """Else the search for any plan would try one of two nodes and give up."""
    model = planner_of(Topology(6, 2, memory=MB)).model(random_works(0, 2))
    rooms = [MemoryBytes(MB * device) for device in (4, 1, 4, 3, 4, 1)]
    search = _Search(RankCosts(model, rooms, is_weighted=False), [], [[0.0] * 4])
    members = (Load((0.0, 0.0, 0.0, 0.0), MemoryNeed(10, 10)),) * 2
    assert list(search._targets(ShardGroup(Domain.NODE, members), [])) == [0, 1]
    assert list(search._targets(ShardGroup(Domain.RANK, members[:1]), [])) == [0, 1, 2, 3]


def test_feasible_wherever_a_plan_exists() -> None:
    outcomes = []
    for seed in range(60):
        planner, works = _small_problem(seed)
        exists = _exists(planner, works)
        try:
            found = planner.solve_workloads(works)
        except PlanError:
            assert not exists, seed
        else:
            assert exists, seed
            assert found.fits
        outcomes.append(exists)
    assert 10 < sum(outcomes) < 50


def test_rows_are_cut_to_the_room_where_nothing_else_fits() -> None:
    works = [TableWorkload("", EmbeddingBagConfig(10_000, 64, "t"), optim.SGD(0.1), False, 16, 1.0)]
    found = planner_of(Topology(2, memory=(2 * MB // 3, 2 * MB))).solve_workloads(works)
    sharding = found.tables[0].sharding
    assert found.fits
    assert sharding.type is ShardingType.CUSTOM
    rows = {shard.rank: shard.shape[0] for shard in sharding.shards}
    assert rows[0] < 10_000 / 2 < rows[1]
    sharding.check("t", shape_of(works[0].config), 2)


# The same every time, for any order


def test_the_same_problem_gives_the_same_plan() -> None:
    works = random_works(3, 30)
    plans = [planner_of(Topology(4, 2)).solve_workloads(works).plan.to_json() for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.slow
def test_hundreds_of_tables_on_sixty_four_ranks() -> None:
    planner = Planner(Topology(64, 8, memory=1 << 36, device="cuda"), 1024)
    works = random_works(0, 300, batch=1024)
    found = planner.solve_workloads(works)
    greedy = _greedy_table_wise(planner, works)
    assert greedy is not None
    assert (
        found.step_s <= predict(works, greedy, planner.model(works), planner.free_memory()).step_s
    )


# Boxes


@pytest.mark.parametrize("seed", range(6))
def test_plans_tile_their_tables_and_cost_what_the_search_said(seed: int) -> None:
    works = random_works(seed, 12)
    topology = Topology(8, 4, device="cuda", max_ranks_at_once=None if seed % 2 else 2)
    for sharding_type in ShardingType:
        if sharding_type is ShardingType.CUSTOM:
            continue
        limited = [
            TableWorkload(
                w.path,
                w.config,
                optim.SGD(0.1),
                False,
                w.batch_size,
                w.ids_per_example,
                TableConstraints(sharding_types=(sharding_type, ShardingType.TABLE_WISE)),
            )
            for w in works
        ]
        model = planner_of(topology).model(limited)
        loads = RankCosts(model, topology.capacity(), is_weighted=False)
        shardings = {}
        for t, work in enumerate(limited):
            options = [o for o in enumerate_options(work, model) if o.type is sharding_type]
            option = (options or enumerate_options(work, model))[-1]
            targets = tuple(
                (t + u) % loads.num_targets(group) for u, group in enumerate(option.groups)
            )
            loads.add(PlacedOption(option, targets))
            sharding = option.sharding(work, topology, targets)
            sharding.check(work.name, shape_of(work.config), 8)
            shardings[work.config.name] = sharding
        plan = ShardingPlan({"": shardings}, topology.world)
        told = predict(limited, plan, model, topology.capacity())
        assert told.step_s == pytest.approx(loads.step_s())
        for r, rank in enumerate(told.ranks):
            assert rank.nbytes.combining == pytest.approx(
                loads.nbytes[0][r] + loads.common_nbytes[0]
            )


def test_optimizers_that_see_whole_rows_are_not_cut_by_columns() -> None:
    def found(optimizer: optim.Optimizer) -> set[ShardingType]:
        work = TableWorkload("", EmbeddingBagConfig(100, 64, "t"), optimizer, False, 16, 1.0)
        return {
            option.type for option in enumerate_options(work, planner_of(Topology(4)).model([work]))
        }

    for optimizer in (optim.SGD(0.1), optim.Adagrad(0.1), optim.Adam(0.1), optim.FTRL(0.1)):
        assert ShardingType.COLUMN_WISE in found(optimizer)
    assert ShardingType.COLUMN_WISE not in found(optim.RowwiseAdagrad(0.1))
    assert ShardingType.COLUMN_WISE not in found(optim.LAMB(0.1))


def test_no_column_shard_is_narrower_than_min_partition() -> None:
    every_type = tuple(ShardingType)
    for dim, min_partition in ((68, 17), (36, 9), (10, 2), (64, 16), (100, 24)):
        constraints = TableConstraints(every_type, min_partition=min_partition)
        config = EmbeddingBagConfig(100, dim, "t")
        work = TableWorkload("", config, optim.SGD(0.1), False, 16, 1.0, constraints)
        topology = Topology(16, 4)
        types = set()
        for option in enumerate_options(work, planner_of(topology).model([work])):
            num_groups = len(option.groups)
            shards = option.sharding(work, topology, range(num_groups)).shards
            assert min((shard.shape[1] for shard in shards), default=dim) >= min_partition
            types.add(option.type)
        assert types >= {ShardingType.COLUMN_WISE, ShardingType.GRID}


@pytest.mark.parametrize("max_trials", [1, 2, 7])
def test_no_more_placements_are_tried_than_allowed(max_trials: int) -> None:
    planner = planner_of(Topology(4), max_trials=max_trials)
    works = random_works(seed=3, count=6)
    model = planner.model(works)
    options = [enumerate_options(work, model) for work in works]
    problem = Problem(model, planner.free_memory(), options, max_trials=max_trials)
    improve_best(problem, starting_plans(problem))
    assert problem.num_tried == max_trials


def test_dynamic_tables_are_cut_by_keys_alone() -> None:
    config = EmbeddingBagConfig(1000, 64, "t", storage=Hash())
    work = TableWorkload("", config, optim.SGD(0.1), False, 16, 1.0)
    options = enumerate_options(work, planner_of(Topology(4, 2)).model([work]))
    assert {option.type for option in options} == {
        ShardingType.TABLE_WISE,
        ShardingType.ROW_WISE,
        ShardingType.TABLE_ROW_WISE,
    }


def test_fallback_rows_are_not_cut() -> None:
    config = EmbeddingBagConfig(1000, 64, "t", storage=Hash(fallback_rows=6))
    work = TableWorkload("", config, optim.SGD(0.1), False, 16, 1.0)
    options = enumerate_options(work, planner_of(Topology(4, 2)).model([work]))
    types = {option.type for option in options}
    assert types == {ShardingType.TABLE_WISE, ShardingType.TABLE_ROW_WISE}  # not over 4 ranks


STORAGES = (
    Dense(),
    Hash(),
    TensorTrain((4, 4)),
    Quantized(4),
    Hashed(100, 2),
    QuotientRemainder(30, Combine.CONCATENATE),
    Narrow(16),
)


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: type(storage).__name__)
def test_tables_are_cut_where_their_storage_allows_a_slice(storage: Storage) -> None:
    config = EmbeddingBagConfig(1000, 128, "t", storage=storage)
    optimizer = optim.SGD(0.1) if storage.is_trained else None
    every_type = TableConstraints(sharding_types=tuple(ShardingType))
    for constraints in (TableConstraints(), every_type):
        work = TableWorkload("", config, optimizer, False, 64, 1.0, constraints)
        assert enumerate_options(work, planner_of(Topology(16, 8)).model([work]))
