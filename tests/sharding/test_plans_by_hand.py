"""Wrong plans, ranks, wires and paths are told as what they are, before anything is sharded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    optim,
)
from emblib.sharding import (
    INT8,
    DistributedModelParallel,
    ParameterSharding,
    RankGroup,
    Shard,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardingPlan,
    ShardingType,
    World,
    checkpoints,
    column_wise,
    construct_module_plan,
    custom,
    grid,
    row_wise,
    table_row_wise,
    table_wise,
)
from emblib.sharding.sharding_types import TableShape
from emblib.specs import CacheConfig, CachePolicy, MultiPassPrefetch, Placement, Verify
from emblib.storage import Dense

GOOD = {"bags": {"a": row_wise(), "b": table_wise(0)}}


def model() -> nn.Module:
    tables = [EmbeddingBagConfig(10, 4, "a"), EmbeddingBagConfig(20, 4, "b")]
    return nn.ModuleDict({"bags": EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1))})


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (
            {"bags": {"a": row_wise, "b": row_wise()}},
            r"table a: a rule is made by a call.*row_wise$",
        ),
        ({"bags": {"a": "row_wise", "b": row_wise()}}, "a call.*got 'row_wise'"),
        ("plan.json", r"ShardingPlan.load\(path\) reads one.*got 'plan.json'"),
        ([], "a plan must be a ShardingPlan"),
    ],
)
def test_plans(plan: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        DistributedModelParallel(model(), plan=plan)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"comm_precision": "fp16"}, r"None or a CommPrecision, e.g. CommPrecision\(forward=FP16"),
        ({"ranks": 3}, "ranks must be a RankGroup, a process group"),
        ({"wrap": "fsdp"}, "'fully_shard'"),
    ],
)
def test_options(options: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        DistributedModelParallel(model(), plan=GOOD, **options)


@pytest.mark.parametrize("text", ["hello", "{}", "[]", '{"version": 1, "world": [1, 1]}'])
def test_files_that_are_no_plans(text: str) -> None:
    with pytest.raises(ValueError, match="a plan must be"):
        ShardingPlan.from_json(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[0, 0, 10, 0, 4]", "[0, 0, 10]"),
        ("[0, 0, 10, 0, 4]", '["0", 0, 10, 0, 4]'),
        ('"world": [1, 1]', '"world": ["1", 1]'),
        ('"table_wise"', '"table_unwise"'),
    ],
)
def test_values_that_are_not_of_a_plan(old: str, new: str) -> None:
    sharding = ParameterSharding(ShardingType.TABLE_WISE, (Shard(0, (0, 10), (0, 4)),))
    text = ShardingPlan({"bags": {"a": sharding}}, World(1, 1)).to_json()
    assert old in text
    with pytest.raises(ValueError, match="a plan must be what to_json made"):
        ShardingPlan.from_json(text.replace(old, new))


def test_a_grid_needs_a_node() -> None:
    with pytest.raises(ValueError, match="grid needs at least one node"):
        grid([])(TableShape(8, 8), World(2, 2))


@pytest.mark.parametrize(
    "cache",
    [
        CacheConfig(),
        CacheConfig(
            policy=CachePolicy.LFU,
            sets=8,
            dtype=torch.float16,
            passes=MultiPassPrefetch(passes=3),
            verify=Verify.OPEN,
        ),
    ],
)
def test_a_plan_with_a_cache_can_be_read_again(cache: CacheConfig) -> None:
    storage = Dense(Placement.MANAGED_CACHING, cache)
    sharding = ParameterSharding(
        ShardingType.TABLE_WISE, (Shard(0, (0, 10), (0, 4)),), storage=storage
    )
    plan = ShardingPlan({"bags": {"a": sharding}}, World(1, 1))
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_the_directory_of_a_cache_is_a_string_in_a_plan() -> None:
    storage = Dense(Placement.DISK, CacheConfig(directory=Path("tables")))
    sharding = ParameterSharding(
        ShardingType.TABLE_WISE, (Shard(0, (0, 10), (0, 4)),), storage=storage
    )
    plan = ShardingPlan({"bags": {"a": sharding}}, World(1, 1))
    read: Any = ShardingPlan.from_json(plan.to_json())["bags"]["a"].storage
    assert read == Dense(Placement.DISK, CacheConfig(directory="tables"))


def test_a_plan_with_a_cache_of_an_unknown_dtype_is_no_plan() -> None:
    storage = Dense(Placement.MANAGED_CACHING, CacheConfig(dtype=torch.float16))
    sharding = ParameterSharding(
        ShardingType.TABLE_WISE, (Shard(0, (0, 10), (0, 4)),), storage=storage
    )
    text = ShardingPlan({"bags": {"a": sharding}}, World(1, 1)).to_json()
    with pytest.raises(ValueError, match="a plan must be what to_json made"):
        ShardingPlan.from_json(text.replace('"float16"', '"float17"'))


def _sources() -> dict[type[nn.Module], nn.Module]:
    bags = [EmbeddingBagConfig(10, 4, "a"), EmbeddingBagConfig(20, 4, "b")]
    sequences = [EmbeddingConfig(10, 4, "a"), EmbeddingConfig(20, 4, "b")]
    return {
        ShardedEmbeddingBagCollection: EmbeddingBagCollection(bags, optimizer=optim.SGD(0.1)),
        ShardedEmbeddingCollection: EmbeddingCollection(sequences, optimizer=optim.SGD(0.1)),
    }


@pytest.mark.parametrize("kind", _sources(), ids=lambda kind: kind.__name__)
def test_a_sharded_collection_takes_rules(kind: Any) -> None:
    source, ranks = _sources()[kind], RankGroup.single()
    made = kind(source, {"a": row_wise(), "b": table_wise(0)}, ranks)
    assert made.plan == construct_module_plan(source, GOOD["bags"], World(1, 1))


@pytest.mark.parametrize("kind", _sources(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({"a": row_wise, "b": row_wise()}, "table a: a rule is made by a call"),
        ({"a": None, "b": row_wise()}, "table a: a rule is made by a call.*got None"),
        ({"a": lambda shape, world: 3, "b": row_wise()}, "must return a ParameterSharding, got 3"),
        (row_wise(), "the plan of a collection must be {table: rule}"),
        ([row_wise(), row_wise()], "the plan of a collection must be {table: rule}"),
        (GOOD, "for emblib.sharding.shard"),
    ],
)
def test_a_sharded_collection_refuses_what_is_no_plan(kind: Any, plan: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        kind(_sources()[kind], plan, RankGroup.single())


def test_paths_of_a_plan() -> None:
    plan = DistributedModelParallel(model(), plan=GOOD).plan
    assert ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(KeyError, match=r"no collection at 'bag'; it has \['bags'\]"):
        plan["bag"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda state: checkpoints.save(torch.nn.Linear(1, 1), "x"), "must be a dict.*got Linear"),
        (lambda state: checkpoints.load(state, None), "latest.* gives None"),
    ],
)
def test_checkpoints(call: Callable[[Any], None], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        call({"step": 1})


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (row_wise([0, 4]), r"ranks must be in \[0, 4\), at least one, got \[0, 4\]"),
        (row_wise([]), "at least one, got"),
        (column_wise([0, -1]), r"ranks must be in \[0, 4\)"),  # one block of 4 columns: on rank 0
        (grid([0, 2]), r"node must be in \[0, 2\)"),
        (
            custom([Shard(0, (0, 8), (0, 2)), Shard(0, (0, 4), (2, 4)), Shard(1, (4, 8), (2, 4))]),
            r"overlap in rows must be cut at the same ones, got rows \(0, 4\) and \(0, 8\)",
        ),
    ],
)
def test_rules_refuse_ranks_that_a_narrow_table_would_not_use(rule: Any, error: str) -> None:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item")])
    with pytest.raises(ValueError, match=error):
        construct_module_plan(bags, {"item": rule}, World(size=4, local_size=2))


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (row_wise(2), "ranks must be ints, in a list or tuple, got 2"),  # type: ignore[arg-type]
        (row_wise("01"), "ranks must be ints"),  # type: ignore[arg-type]
        (column_wise([0, 1], sizes=[2.0, 2.0]), "sizes must be ints"),  # type: ignore[list-item]
        (grid([0.0]), "nodes must be ints"),  # type: ignore[list-item]
        (table_row_wise("a"), "node must be an int, got 'a'"),  # type: ignore[arg-type]
        (table_wise(1.0), "all ints, got Shard.rank=1.0"),  # type: ignore[arg-type]
        (custom([Shard(0, (0, 8.0), (0, 4))]), "all ints"),  # type: ignore[arg-type]
        (custom([Shard(0, (0, 4, 8), (0, 4))]), "all ints"),  # type: ignore[arg-type]
    ],
)
def test_rules_refuse_numbers_that_are_no_ints(rule: Any, error: str) -> None:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item")])
    with pytest.raises(TypeError, match=error):
        construct_module_plan(bags, {"item": rule}, World(size=4, local_size=2))


def test_ranks_may_be_a_tensor() -> None:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item")])
    world = World(size=2, local_size=2)
    sharding = construct_module_plan(bags, {"item": row_wise(torch.tensor([1, 0]))}, world)["item"]  # type: ignore[arg-type]
    plan = ShardingPlan({"": {"item": sharding}}, world)
    assert ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(TypeError, match="custom takes a list of Shard"):
        custom(sharding.shards[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: DistributedModelParallel("net"), "model must be an nn.Module, got str"),  # type: ignore[arg-type]
        (
            lambda: DistributedModelParallel(model(), plan=GOOD, optimizer=torch.optim.SGD),  # type: ignore[arg-type]
            "must be None or one of emblib.optim.*SGD",
        ),
        (lambda: DistributedModelParallel(model(), planner=3), "planner must be None or a Planner"),  # type: ignore[arg-type]
        (
            lambda: ShardingPlan({"": {"a": row_wise()}}, World(1, 1)),  # type: ignore[dict-item]
            "table a of a ShardingPlan must have a ParameterSharding",
        ),
        (
            lambda: ShardedEmbeddingCollection(model().get_submodule("bags"), {}),
            "only an unsharded EmbeddingCollection .* got EmbeddingBagCollection",
        ),
        (
            lambda: ShardedEmbeddingBagCollection(
                ShardedEmbeddingBagCollection(model().get_submodule("bags"), GOOD["bags"]),
                GOOD["bags"],
            ),
            "only an unsharded EmbeddingBagCollection .* got ShardedEmbeddingBagCollection",
        ),
        (
            lambda: construct_module_plan(model(), GOOD["bags"], World(2, 2)),
            "made for one EmbeddingBagCollection or EmbeddingCollection, got",
        ),
        (lambda: ShardingPlan({"bags": [row_wise()]}, World(2, 2)), "must be {path: {table: "),  # type: ignore[dict-item]
        (lambda: ShardingPlan({}, 2), "world must be World"),  # type: ignore[arg-type]
        (lambda: RankGroup(3), "a process group, a DeviceMesh, or None .* got 3"),  # type: ignore[arg-type]
        (lambda: INT8(row_dim=8.0), "row_dim must be an int, got 8.0"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_type(call: Callable[[], Any], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        call()


def test_a_sharding_type_may_be_a_string() -> None:
    sharding = ParameterSharding("table_wise", table_wise(0)(TableShape(8, 4), World(1, 1)).shards)  # type: ignore[arg-type]
    assert sharding == table_wise(0)(TableShape(8, 4), World(1, 1))
    assert ParameterSharding("data_parallel").is_replicated  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ShardingType must be one of"):
        ParameterSharding("rows")  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", [row_wise(), grid(), table_row_wise(0)])
def test_a_world_needs_ranks(rule: Any) -> None:
    with pytest.raises(ValueError, match="at least one rank, and one per node"):
        construct_module_plan(model().get_submodule("bags"), {"a": rule, "b": rule}, World(4, 0))
