"""`shard`: replace the collections of a model by sharded ones, according to a plan."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

from torch import nn

from emblib.collections import EmbeddingBagCollection, EmbeddingCollection, duplicate_tables
from emblib.collections.optimizers.in_backward import trained_configs
from emblib.optim import Optimizer
from emblib.sharding import fingerprint
from emblib.sharding.codecs import CommPrecision, check_comm_precision
from emblib.sharding.parameters import mark_as_replicas
from emblib.sharding.plan import ModulePlan, ShardingPlan, plan_from_configs
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
from emblib.sharding.sharded_sequences import ShardedEmbeddingCollection
from emblib.sharding.sharded_tables import GradientReduction
from emblib.sharding.sharding_types import ParameterSharding, Rule, World
from emblib.sharding.shared_shards import SharedTablesOfModel, check_plans_of_shared
from emblib.specs import check_module
from emblib.tables.parameters import caller_level

SHARDED: dict[type[nn.Module], type[nn.Module]] = {
    EmbeddingBagCollection: ShardedEmbeddingBagCollection,
    EmbeddingCollection: ShardedEmbeddingCollection,
}
"""The sharded form of each collection class; `sharded_form` finds that of a subclass."""

Rules = Mapping[str, Mapping[str, Rule | ParameterSharding]]
"""{path of a collection: {table: rule or sharding}}."""


def collections_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the collections of a model by path, with those of subclasses.

    A collection at several paths is listed under the first. The model itself has the path "".

    Raises:
        TypeError: `module` is not an `nn.Module`.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "item")])
        >>> list(emblib.sharding.collections_of(torch.nn.Sequential(bags, torch.nn.Linear(4, 1))))
        ['0']
    """
    check_module("the model", module)
    classes = tuple(SHARDED)
    return {path: child for path, child in module.named_modules() if isinstance(child, classes)}


def construct_module_plan(
    collection: nn.Module, rules: Mapping[str, Rule | ParameterSharding], world: World
) -> dict[str, ParameterSharding]:
    """Make the plan of one collection from a rule per table, e.g. `row_wise()`.

    Args:
        collection: an `EmbeddingBagCollection` or `EmbeddingCollection`.
        rules: a rule or a sharding for each of its tables, by name.
        world: the ranks.

    Raises:
        ValueError: a table has no rule, a rule has no table, shards do not fit their table, a
            storage cannot be sharded, or `world` has a number below 1.
        TypeError: `collection` is not a collection; or see `plan_from_configs`.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "item")])
        >>> world = emblib.sharding.World(size=2, local_size=2)
        >>> rules = {"item": emblib.sharding.row_wise()}
        >>> emblib.sharding.construct_module_plan(bags, rules, world)["item"].shards[1].rows
        (4, 8)
    """
    return plan_from_configs(_configs_of(collection), rules, world)


def shard(
    module: nn.Module,
    plan: ShardingPlan | Rules,
    ranks: RankGroup | None = None,
    *,
    optimizer: Optimizer | None = None,
    comm_precision: CommPrecision | None = None,
    gradients: GradientReduction = GradientReduction.MEAN,
) -> nn.Module:
    """Replace every collection that the plan names by its sharded form, and return the model.

    Weights and optimizer states are kept, and frozen tables stay frozen. Tables on `meta` get
    initial values that do not depend on the plan. A shared table is sharded once for all
    collections that read it. All ranks call this together, and compare their arguments before
    memory is allocated. The other parts of the model do not change. If it raises, the model does
    not change.

    Args:
        module: a model, which is modified, or one collection, which is not.
        plan: a `ShardingPlan`, or {path of a collection: {table: rule}}; the path of the module
            itself is "". A collection with several paths is named by one of them, and replaced
            at all of them.
        ranks: the processes; by default all.
        optimizer: optimizer of tables whose configuration has none; None uses the optimizer of
            their collection.
        comm_precision: codecs of rows and gradients in transit; None for float32.
        gradients: whether gradients of tables are the mean or the sum over ranks.

    Raises:
        ValueError: a path of the plan is not that of a collection; the plan is for another number
            of ranks, or does not fit its tables; the plan has two plans for one collection or
            shared table; a collection that the plan leaves out reads a shared table of the plan;
            or plans, tables or settings differ between ranks.
        TypeError: `module`, the plan or a setting has a wrong type, or a collection has what its
            sharded form would lack: methods changed by a subclass or on the instance, additional
            modules, parameters or buffers, or hooks.
        RuntimeError: another rank raised one of these errors.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "item")])
        >>> model = torch.nn.Sequential(bags)
        >>> ranks = emblib.sharding.RankGroup.single()  # under torchrun: init_distributed()
        >>> rules = {"0": {"item": emblib.sharding.row_wise()}}
        >>> model = emblib.sharding.shard(model, rules, ranks, optimizer=emblib.optim.SGD(0.1))
        >>> type(model[0]).__name__
        'ShardedEmbeddingBagCollection'
    """
    ranks = RankGroup.from_value(ranks)
    selected_collections = fingerprint.agree(
        ranks,
        lambda: _select_collections(module, plan, ranks),
        lambda selected: fingerprint.merge_descriptions(
            {
                "": fingerprint.settings_of(
                    ranks, comm_precision=check_comm_precision(comm_precision), gradients=gradients
                )
            },
            _describe(module, plan, selected, optimizer),
        ),
    )
    _warn_of_duplicates(module)
    modules, shared = [], SharedTablesOfModel()
    for collection in selected_collections:
        sharded = collection.sharded_class(
            collection.source,
            collection.plan,
            ranks,
            comm_precision=comm_precision,
            gradients=gradients,
            optimizer=optimizer,
            shared=shared.shards_by_name(collection.source),
        )
        sharded.train(collection.source.training)
        if collection.source is module:
            return sharded
        modules.append(sharded)
    # Replace only after all are constructed: if one fails, the model does not change.
    for collection, sharded in zip(selected_collections, modules, strict=True):
        _replace(module, collection.source, sharded)
    mark_as_replicas(module, ranks)
    return module


def _warn_of_duplicates(module: nn.Module) -> None:
    """Warn of tables that several collections have under one name, each with its own rows."""
    for name, paths in duplicate_tables(module).items():
        warnings.warn(
            f"emblib: the collections {paths} each have a table {name!r} of equal size. These are "
            "separate tables, with separate rows, optimizer states and entries in checkpoints: if "
            "one is meant, call emblib.share_tables(model) first, or make it with "
            "emblib.SharedTables; if not, other names tell them apart",
            stacklevel=caller_level(),
        )


@dataclass(frozen=True)
class _SelectedCollection:
    """A collection of a plan, its path in the model, and the class of its sharded form."""

    path: str
    source: Any
    plan: dict[str, ParameterSharding]
    sharded_class: Any


def _select_collections(
    module: nn.Module, plan: ShardingPlan | Rules, ranks: RankGroup
) -> list[_SelectedCollection]:
    """Return the collections of a plan, each once, even with several paths.

    Raises:
        ValueError, TypeError: see `shard`.
    """
    if isinstance(plan, ShardingPlan) and plan.world.size != ranks.size:
        raise ValueError(
            f"the plan is for {plan.world.size} ranks, but there are {ranks.size}: plan again"
        )
    plans = _plans_by_path(plan)
    collections_by_path = _collections_by_path(module, plans)
    unknown_paths = sorted(plans.keys() - collections_by_path.keys())
    if unknown_paths:
        raise ValueError(
            f"a plan names collections by their paths: {unknown_paths} are not paths of "
            f"collections, which are {sorted(collections_by_path)}"
        )
    world = World(ranks.size, ranks.local_size)
    selected_by_id: dict[int, _SelectedCollection] = {}
    for path, rules in plans.items():
        source = collections_by_path[path]
        collection = _SelectedCollection(
            path, source, construct_module_plan(source, rules, world), sharded_form(source, path)
        )
        first_collection = selected_by_id.setdefault(id(source), collection)
        if first_collection.plan != collection.plan:
            raise ValueError(
                f"{first_collection.path!r} and {path!r} are paths of one collection, but the plan "
                "has different rules for them: name one of the paths, or make two collections"
            )
    unselected_collections = {
        path: child
        for path, child in collections_by_path.items()
        if id(child) not in selected_by_id
    }
    check_plans_of_shared(
        [(selected.path, selected.source, selected.plan) for selected in selected_by_id.values()],
        unselected_collections,
    )
    return list(selected_by_id.values())


def _describe(
    module: nn.Module,
    plan: ShardingPlan | Rules,
    selected_collections: list[_SelectedCollection] | None,
    optimizer: Optimizer | None,
) -> dict[str, dict[str, Any]]:
    """Describe the collections at the paths of a plan, for the comparison of ranks.

    `selected_collections` is the result of `_select_collections`; None if it failed, e.g. because
    of a path without a collection, which is then left out.
    """
    plan_paths = list(_plans_by_path(plan))
    collections_by_path = _collections_by_path(module, plan_paths)
    plans = {collection.path: collection.plan for collection in selected_collections or ()}
    description: dict[str, dict[str, Any]] = {
        "": {"collections": [path or "(the model)" for path in plan_paths]}
    }
    first_readers: dict[int, str] = {}  # path of the first reader, by id() of a shared table
    for path in plan_paths:
        source: Any = collections_by_path.get(path)
        if source is None:
            continue
        configs, default = trained_configs(source, optimizer), optimizer or source.optimizer
        description = fingerprint.merge_descriptions(
            description,
            fingerprint.collection_description(source, configs, plans.get(path), default, path),
            {
                f"table {name}{f' of {path}' if path else ''}": {
                    "shared_first_by": first_readers.setdefault(id(table), path)
                }
                for name, table in source.shared_tables().items()
            },
        )
    return description


def _collections_by_path(module: nn.Module, plan_paths: Iterable[str]) -> dict[str, Any]:
    """Return the collections of a model by path.

    A collection at several paths has several entries. A path through a module that is itself at
    several paths is included only if it is the first one or in `plan_paths`.
    """
    collections_by_path = collections_of(module)
    collection_ids = {id(collection) for collection in collections_by_path.values()}
    for parent_path, parent in module.named_modules():
        for name, child in parent._modules.items():
            if child is not None and id(child) in collection_ids:
                collections_by_path.setdefault(
                    f"{parent_path}.{name}" if parent_path else name, child
                )
    for parent_path in plan_paths:
        with suppress(AttributeError):
            child = module.get_submodule(parent_path)
            if id(child) in collection_ids:
                collections_by_path.setdefault(parent_path, child)
    return collections_by_path


def _replace(module: nn.Module, source: nn.Module, sharded: nn.Module) -> None:
    """Replace `source` by `sharded` at all of its paths."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child is source:
                setattr(parent, name, sharded)


def sharded_form(source: nn.Module, path: str = "") -> Any:
    """Return the class of the sharded form of a collection, which is at `path` of its model.

    Raises:
        TypeError: `source` is not a collection, or has what the sharded form would lack: methods
            that a subclass or the instance has changed, modules, parameters or buffers in addition
            to its tables, or hooks.
    """
    source_class = type(source)
    base_class = next(filter(SHARDED.__contains__, source_class.__mro__), None)
    if base_class is None:
        names = ", ".join(sorted({sharded_class.__name__ for sharded_class in SHARDED}))
        raise TypeError(f"what is sharded must be one of {names}, got {source_class.__name__}")
    subclasses = source_class.__mro__[: source_class.__mro__.index(base_class)]
    changed_names = sorted(
        {
            name
            for subclass in subclasses
            for name in vars(subclass)
            if hasattr(base_class, name) and (not name.startswith("__") or name == "__call__")
        }
        - _HARMLESS_NAMES
    )
    if changed_names:
        raise TypeError(
            f"the collection{f' at {path!r}' if path else ''} is a {source_class.__name__}, "
            f"a subclass of {base_class.__name__} that changes {', '.join(changed_names)}, "
            "which its sharded form would not do: put the collection into a module that does it, "
            "or leave it out of the plan"
        )
    _check_instance(source, base_class, path)
    return SHARDED[base_class]


_HARMLESS_NAMES = {"extra_repr"}  # methods that a subclass may change
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _check_instance(source: Any, base: type[nn.Module], path: str) -> None:
    """Raise TypeError for attributes of a collection that its sharded form would lack."""
    subject = f"the collection{f' at {path!r}' if path else ''}"
    methods = sorted(name for name in vars(source) if isfunction(getattr(base, name, None)))
    if methods:
        raise TypeError(
            f"{subject} has {', '.join(methods)} set on the instance, which its sharded form would "
            "not have: put the collection into a module that does it, or set it after sharding"
        )
    tables = {source.handles_name, "groups"}
    extra_names = sorted({*source._modules, *source._parameters, *source._buffers} - tables)
    if extra_names:
        raise TypeError(
            f"{subject} has {', '.join(extra_names)} besides its tables, which its sharded form "
            "would not have: put the collection into a module that has them"
        )
    hooks = [name for name in _HOOKS if getattr(source, name)]
    if hooks:
        raise TypeError(
            f"{subject} has hooks ({', '.join(hooks)}), which its sharded form would not have: "
            "register them after sharding, or on a module around the collection"
        )


def _configs_of(collection: Any) -> Any:
    """Return the configurations of a collection; raise TypeError for any other value."""
    if not isinstance(collection, tuple(SHARDED)):
        raise TypeError(
            "a plan of tables is made for one EmbeddingBagCollection or EmbeddingCollection, got "
            f"{type(collection).__name__}; collections_of(model) finds those of a model"
        )
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    embeddings: Any = collection
    return embeddings.embedding_configs()


def _plans_by_path(plan: Any) -> Mapping[str, Any]:
    """Return the plan of the tables of each collection, by its path."""
    plans = plan.modules if isinstance(plan, ShardingPlan) else plan
    if not isinstance(plans, Mapping) or not all(isinstance(path, str) for path in plans):
        raise TypeError(
            "a plan must be a ShardingPlan (ShardingPlan.load(path) reads one) or "
            f"{{path of a collection: {{table: rule}}}}, got {plans!r}"
        )
    return plans


__all__ = ["SHARDED", "ModulePlan", "collections_of", "construct_module_plan", "shard"]
