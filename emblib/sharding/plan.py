"""Sharding plans: the sharding of every table of a model, which can be saved as JSON."""

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from emblib.sharding import sharding_types
from emblib.sharding.layout import Config, shape_of
from emblib.sharding.sharding_types import (
    ParameterSharding,
    Rule,
    Shard,
    ShardingType,
    TableShape,
    World,
)
from emblib.storage import Storage, kinds
from emblib.tables.durable_files import load_json, save_json

ModulePlan = Mapping[str, ParameterSharding]
"""The sharding of each table of one collection, by name."""

_RULE_MAKERS: tuple[Any, ...] = (
    sharding_types.data_parallel,
    sharding_types.table_wise,
    sharding_types.row_wise,
    sharding_types.column_wise,
    sharding_types.table_row_wise,
    sharding_types.table_column_wise,
    sharding_types.grid,
    sharding_types.custom,
)
_VERSION = 1


@dataclass(frozen=True)
class ShardingPlan:
    """The plan of each collection by its path in the model, for a world of a given size.

    `str(plan)` formats the plan as a table; `save` and `load` store it as JSON. `plan[path]` raises
    KeyError if the plan has no such collection.

    Args:
        modules: {path of a collection: {table: sharding}}, which is copied.
        world: the world that the plan is for, a `World` or a `RankGroup`.

    Raises:
        TypeError: `modules` is not such a mapping, e.g. because a table has a rule; or `world` has
            no ints `size` and `local_size`.
        ValueError: `world` has a number below 1.

    Example:
        >>> model = torch.nn.Sequential(
        ...     emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "item")])
        ... )
        >>> world = emblib.sharding.World(size=2, local_size=2)
        >>> rules = {"item": emblib.sharding.row_wise()}
        >>> tables = emblib.sharding.construct_module_plan(model[0], rules, world)
        >>> plan = emblib.sharding.ShardingPlan({"0": tables}, world)
        >>> plan.save("plan.json")
        >>> emblib.sharding.ShardingPlan.load("plan.json") == plan
        True
    """

    modules: Mapping[str, ModulePlan]
    world: World

    def __post_init__(self) -> None:
        object.__setattr__(self, "world", _check_world(self.world))
        if not isinstance(self.modules, Mapping) or not all(
            isinstance(tables, Mapping) for tables in self.modules.values()
        ):
            raise TypeError(
                "the modules of a ShardingPlan must be {path: {table: ParameterSharding}}, got "
                f"{self.modules!r}"
            )
        for tables in self.modules.values():
            for table, sharding in tables.items():
                if not isinstance(sharding, ParameterSharding):
                    raise TypeError(
                        f"table {table} of a ShardingPlan must have a ParameterSharding, got "
                        f"{sharding!r}: construct_module_plan makes them from rules"
                    )
        views = {path: MappingProxyType(dict(tables)) for path, tables in self.modules.items()}
        object.__setattr__(self, "modules", MappingProxyType(views))

    def __getitem__(self, path: str) -> ModulePlan:
        if path not in self.modules:
            raise KeyError(f"the plan has no collection at {path!r}; it has {list(self.modules)}")
        return self.modules[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __reduce__(self) -> Any:
        return ShardingPlan, ({path: dict(plan) for path, plan in self.modules.items()}, self.world)

    def to_json(self) -> str:
        """Return the plan as JSON, with modules and tables in their order in the plan.

        Raises:
            ValueError: a table has a storage that plans cannot have, such as `Hash`.
        """
        modules = {
            path: {name: _sharding_to_json(sharding) for name, sharding in tables.items()}
            for path, tables in self.modules.items()
        }
        return json.dumps({"version": _VERSION, "world": list(self.world), "modules": modules})

    @classmethod
    def from_json(cls, text: str) -> "ShardingPlan":
        """Return the plan that `to_json` wrote.

        Whether shards fit their tables is checked when the plan is used.

        Raises:
            ValueError: `text` is not JSON that `to_json` wrote, or is of another version.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"a plan must be the JSON that to_json made, got {text[:40]!r}"
            ) from error
        if not isinstance(values, dict) or values.get("version") != _VERSION:
            version = values.get("version") if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"a plan must be of version {_VERSION}, got {version!r}")
        try:
            modules = {
                path: {name: _sharding_from_json(sharding) for name, sharding in tables.items()}
                for path, tables in values["modules"].items()
            }
            return cls(modules, World(*map(operator.index, values["world"])))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"a plan must be what to_json made, whole; got {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON with a checksum, atomically.

        Raises:
            OSError: the file cannot be written, see `durable_files.saving`.
            ValueError: see `to_json`.
        """
        save_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "ShardingPlan":
        """Read a plan that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged, or has no plan.
        """
        return cls.from_json(load_json(path))

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("module", "table", "sharding", "storage", "ranks", "shards")
        ]
        for path, tables in self.modules.items():
            rows += [
                (path or "(the model)", name, *_table_cells(sharding))
                for name, sharding in tables.items()
            ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        rows.insert(1, tuple("-" * width for width in widths))
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


def _check_world(world: Any) -> World:
    """Return the `World` of a world or a `RankGroup`; TypeError or ValueError for other values."""
    try:
        size, local_size = operator.index(world.size), operator.index(world.local_size)
    except (AttributeError, TypeError):
        raise TypeError(f"world must be World(size, local_size), got {world!r}") from None
    checked_world = World(size, local_size)
    _ = checked_world.num_nodes  # raises ValueError
    return checked_world


def plan_from_configs(
    configs: Sequence[Config], rules: Mapping[str, Rule | ParameterSharding], world: World
) -> dict[str, ParameterSharding]:
    """Make the plan of one collection from the configurations of its tables.

    Args:
        configs: configurations of the tables.
        rules: a rule or a sharding per table, by name.
        world: the ranks.

    Raises:
        ValueError: a table has no rule, a rule has no table, shards do not fit their table, a
            storage cannot be sharded, or `world` has a number below 1.
        TypeError: an entry of `rules` is not a rule, or a rule returned no sharding; `rules` is not
            a mapping; or `world` has no ints `size` and `local_size`.
    """
    world = _check_world(world)
    if not isinstance(rules, Mapping):
        raise TypeError(
            "the plan of a collection must be {table: rule}, e.g. {'t': row_wise()}, got "
            f"{rules!r}; emblib.sharding.shard takes plans of models"
        )
    shapes = {}
    for config in configs:
        rule = rules.get(config.name)
        storage = rule.storage if isinstance(rule, ParameterSharding) else None
        shapes[config.name] = shape_of(config, storage)
    return plan_from_shapes(
        shapes, {name: _as_rule(name, rule) for name, rule in rules.items()}, world
    )


def _as_rule(name: str, rule: Rule | ParameterSharding) -> Rule:
    """Return a rule for a rule or a sharding; raise TypeError for any other value."""
    if isinstance(rule, ParameterSharding):
        return lambda shape, world: rule
    if isinstance(rule, Mapping):
        raise TypeError(
            f"the plan of a collection is {{table: rule}}, but {name!r} has {list(rule)}: a plan "
            "of a model, {path: {table: rule}}, is for emblib.sharding.shard"
        )
    if not callable(rule) or rule in _RULE_MAKERS:
        raise TypeError(
            f"table {name}: a rule is made by a call, e.g. row_wise() or table_wise(0), got "
            f"{getattr(rule, '__name__', repr(rule))}"
        )
    return rule


def plan_from_shapes(
    shapes: Mapping[str, TableShape], rules: Mapping[str, Rule], world: World
) -> dict[str, ParameterSharding]:
    """Make the plan of one collection from the shapes of its tables and one rule per table.

    Raises:
        ValueError: a table has no rule, a rule has no table, or shards do not tile their table; or
            a rule raised it.
        TypeError: a rule returned another value than a `ParameterSharding`, or raised it.
    """
    missing_tables, unknown_tables = shapes.keys() - rules.keys(), rules.keys() - shapes.keys()
    if missing_tables or unknown_tables:
        raise ValueError(
            "a plan needs a rule for exactly the tables of its collection: missing are "
            f"{sorted(missing_tables)}, unknown are {sorted(unknown_tables)}"
        )
    plan = {name: rules[name](shape, world) for name, shape in shapes.items()}
    for name, sharding in plan.items():
        if not isinstance(sharding, ParameterSharding):
            raise TypeError(
                f"table {name}: a rule must return a ParameterSharding, got {sharding!r}"
            )
        sharding.check(name, shapes[name], world.size)
    return plan


def _table_cells(sharding: ParameterSharding) -> tuple[str, str, str, str]:
    """Return the cells of a table's row in the text of a plan."""
    storage = "as configured" if sharding.storage is None else _format_storage(sharding.storage)
    if sharding.is_replicated:
        return sharding.type.value, storage, "all", "a replica each"
    shapes = [f"{rows} x {columns}" for rows, columns in (shard.shape for shard in sharding.shards)]
    distinct_shapes = sorted(set(shapes), key=shapes.index)
    shape_counts = ", ".join(f"{shapes.count(shape)} of {shape}" for shape in distinct_shapes[:3])
    omitted = f", ... {len(shapes)} in all" if len(distinct_shapes) > 3 else ""
    return sharding.type.value, storage, format_ranks(sharding.ranks), shape_counts + omitted


def format_ranks(ranks: Sequence[int], max_ranges: int | None = None) -> str:
    """Format ascending ranks as ranges: `0-3, 6` for 0, 1, 2, 3, 6.

    Of more than `max_ranges` ranges, the others are replaced by `...`; None formats all.
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [
        str(first) if first == last else f"{first}-{last}" for first, last in ranges[:max_ranges]
    ]
    return ", ".join([*texts, "..."] if len(texts) < len(ranges) else texts)


def _format_storage(storage: Storage) -> str:
    """Format a storage with its options; those that are None or () are left out."""
    storage_fields: Any = storage
    values = [
        getattr(storage, field.name)
        for field in fields(storage_fields)
        if getattr(storage, field.name) not in (None, ())
    ]
    texts = (str(value.value if isinstance(value, Enum) else value) for value in values)
    return f"{type(storage).__name__}({', '.join(texts)})"


def _plan_storages() -> dict[str, Any]:
    """Return the storages that plans can have, by their names in plans."""
    return {name: kind for name, kind in kinds().items() if kind.is_alternative}


def _sharding_to_json(sharding: ParameterSharding) -> dict[str, Any]:
    """Return a sharding as JSON values; raise ValueError for a storage that plans cannot have."""
    storage = sharding.storage
    if storage is not None and not storage.is_alternative:
        names = sorted(kind.__name__ for kind in _plan_storages().values())
        raise ValueError(f"a plan can have the storages {names}, got {storage!r}")
    return {  # with the names of version 1: "boxes" are shards, "kind" is the storage
        "type": sharding.type.value,
        "boxes": [[shard.rank, *shard.rows, *shard.columns] for shard in sharding.shards],
        "kind": None
        if storage is None
        else {"name": storage.plan_name, **_to_json_value(asdict(storage))},
    }


def _to_json_value(value: Any) -> Any:
    """Convert a field of a storage, or a mapping of its fields, to a JSON value."""
    if isinstance(value, Mapping):
        return {name: _to_json_value(field_value) for name, field_value in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype | Path):
        return str(value).removeprefix("torch.")
    return value


def _sharding_from_json(values: Mapping[str, Any]) -> ParameterSharding:
    """Return the sharding of the JSON values that `_sharding_to_json` returned."""
    storage: Any = None
    if values["kind"] is not None:
        options = {
            name: tuple(option) if isinstance(option, list) else option
            for name, option in values["kind"].items()
        }
        storage = _plan_storages()[str(options.pop("name"))].from_plan(options)
    boxes = [map(operator.index, box) for box in values["boxes"]]
    shards = tuple(
        Shard(rank, (first_row, end_row), (first_column, end_column))
        for rank, first_row, end_row, first_column, end_column in boxes
    )
    return ParameterSharding(ShardingType(values["type"]), shards, storage)
