"""A model's collections become sharded ones, by a plan."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from emblib.collections import EmbeddingBagCollection, EmbeddingCollection
from emblib.optim import Optimizer
from emblib.sharding import boxes
from emblib.sharding.boxes import Rule, TableSharding, World
from emblib.sharding.groups_of_ranks import Ranks
from emblib.sharding.layout import shape_of
from emblib.sharding.plan import ModulePlan, ShardingPlan, construct_plan
from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
from emblib.sharding.sharded_sequences import ShardedEmbeddingCollection
from emblib.sharding.sharded_tables import GradientReduction
from emblib.sharding.wire import Wire

SHARDED: dict[type[nn.Module], type[nn.Module]] = {
    EmbeddingBagCollection: ShardedEmbeddingBagCollection,
    EmbeddingCollection: ShardedEmbeddingCollection,
}
"""What each kind of collection becomes."""

_MAKE_RULES: tuple[Any, ...] = (
    *(boxes.data_parallel, boxes.table_wise, boxes.row_wise, boxes.column_wise),
    *(boxes.table_row_wise, boxes.table_column_wise, boxes.grid, boxes.custom),
)

Rules = Mapping[str, Mapping[str, Rule | TableSharding]]


def collections_of(module: nn.Module) -> dict[str, nn.Module]:
    """The collections of a model that can be sharded, by their paths in it."""
    return {path: part for path, part in module.named_modules() if type(part) in SHARDED}


def construct_module_plan(
    collection: nn.Module, rules: Mapping[str, Rule | TableSharding], world: World
) -> dict[str, TableSharding]:
    """The plan of one collection from a rule for each of its tables, e.g. `row_wise()`.

    Raises:
        ValueError: a table without a rule, a rule without a table, or boxes that do not fit.
    """
    configs = _configs(collection)
    shapes = {}
    for config in configs:
        rule = rules.get(config.name)
        kind = rule.kind if isinstance(rule, TableSharding) else None
        shapes[config.name] = shape_of(config, kind)
    made = {name: _as_rule(name, rule) for name, rule in rules.items()}
    return construct_plan(shapes, made, world)


def shard(
    module: nn.Module,
    plan: ShardingPlan | Rules,
    ranks: Ranks | None = None,
    *,
    optimizer: Optimizer | None = None,
    wire: Wire | None = None,
    gradients: GradientReduction = GradientReduction.MEAN,
) -> nn.Module:
    """Replace every collection that the plan names by its sharded form, and return the model.

    Weights and optimizer state are kept; what is on `meta` gets first values that do not depend on
    the plan. All ranks call this together. The other parts of the model stay as they are.

    Args:
        module: a model, which is changed, or one collection, which is not.
        plan: a `ShardingPlan`, or {path of a collection: {table: rule}}; the path of the module
            itself is "".
        ranks: the processes; left out, all.
        optimizer: of tables that have none of their own; left out, that of their collection.
        wire: how rows and gradients are encoded on their way.
        gradients: whether gradients of tables are the mean or the sum over ranks.

    Raises:
        ValueError: a path that is no collection, or a plan for another number of ranks.
    """
    ranks = Ranks.of(ranks)
    world = World(ranks.size, ranks.local_size)
    modules: Mapping[str, Any] = plan.modules if isinstance(plan, ShardingPlan) else plan
    if isinstance(plan, ShardingPlan) and plan.world.size != ranks.size:
        raise ValueError(
            f"the plan is for {plan.world.size} ranks, and these are {ranks.size}: plan again"
        )
    found = collections_of(module)
    _check_plan(modules)
    unknown = sorted(modules.keys() - found.keys())
    if unknown:
        raise ValueError(
            f"a plan names collections by their paths: {unknown} are none; there are "
            f"{sorted(found)}"
        )
    for path, tables in modules.items():
        own = construct_module_plan(found[path], tables, world)
        make: Any = SHARDED[type(found[path])]
        sharded = make(
            *(found[path], own, ranks), wire=wire, gradients=gradients, optimizer=optimizer
        )
        sharded.train(found[path].training)
        if not path:
            return sharded
        module.set_submodule(path, sharded)
    return module


def _configs(collection: Any) -> Any:
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


def _check_plan(modules: Any) -> None:
    if not isinstance(modules, Mapping) or not all(isinstance(path, str) for path in modules):
        raise TypeError(
            "a plan must be a ShardingPlan (ShardingPlan.load(path) reads one) or "
            f"{{path of a collection: {{table: rule}}}}, got {modules!r}"
        )


def _as_rule(name: str, rule: Rule | TableSharding) -> Callable[..., TableSharding]:
    if isinstance(rule, TableSharding):
        return lambda shape, world: rule
    if not callable(rule) or rule in _MAKE_RULES:
        raise TypeError(
            f"table {name}: a rule is made by a call, e.g. row_wise() or table_wise(0), got "
            f"{getattr(rule, '__name__', repr(rule))}"
        )
    return rule


__all__ = ["SHARDED", "ModulePlan", "collections_of", "construct_module_plan", "shard"]
