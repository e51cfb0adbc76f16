"""The tables of a memory plan, and their importances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from torch import nn

from emblib.collections.configs import TableConfig
from emblib.collections.optimizers.in_backward import trained_configs
from emblib.optim import Optimizer
from emblib.sharding.shard import collections_of


class ConfiguredTable(NamedTuple):
    """A table to plan.

    Attributes:
        path: path of its collection in the model; "" if there is no model.
        config: configuration of the table before planning.
        optimizer: optimizer of emblib or of torch that trains it; None for none.
    """

    path: str
    config: TableConfig
    optimizer: Any

    @property
    def path_name(self) -> str:
        """Return `path.name`; the name alone if there is no model."""
        return f"{self.path}.{self.config.name}" if self.path else self.config.name


def planned_tables(
    tables: nn.Module | Sequence[TableConfig], optimizer: Optimizer | None
) -> list[ConfiguredTable]:
    """Return the tables of the collections of a model, or of a list.

    Args:
        tables: a model, or configurations.
        optimizer: optimizer of tables whose configuration has none; None is that of their
            collection, or none for a list.

    Raises:
        TypeError: `tables` is neither a model nor a list of configurations.
        ValueError: there are no tables, collections share tables, or two tables have the same
            `path_name`.
    """
    if not isinstance(tables, nn.Module):
        configs = list(tables) if isinstance(tables, Iterable) else []  # any iterable is read once
        wrong_values: list[Any] = [
            config for config in configs if not isinstance(config, TableConfig)
        ]
        if wrong_values or not isinstance(tables, Iterable):
            raise TypeError(
                "tables must be a model, or a list of EmbeddingBagConfig or EmbeddingConfig, got "
                f"{(wrong_values[0] if wrong_values else tables)!r}"
            )
        all_tables = [
            ConfiguredTable("", config, config.optimizer or optimizer) for config in configs
        ]
    else:
        collections: dict[str, Any] = dict(collections_of(tables))
        shared_names = {
            name for collection in collections.values() for name in collection.shared_tables()
        }
        if shared_names:
            raise ValueError(
                f"the tables {sorted(shared_names)} are shared by collections and stay dense: give "
                "plan_memory the configurations of the other tables, and a budget without the "
                "bytes of these"
            )
        all_tables = [
            ConfiguredTable(path, config, config.optimizer or optimizer or collection.optimizer)
            for path, collection in collections.items()
            for config in trained_configs(collection)
        ]
    if not all_tables:
        raise ValueError("there are no tables: the model has no collection, or the list is empty")
    names = [table.path_name for table in all_tables]
    if len(set(names)) < len(names):
        raise ValueError(f"tables of a plan must differ in name, got {sorted(names)}")
    return all_tables


def importances_of(
    tables: Sequence[ConfiguredTable],
    importance: Mapping[str, float] | None,
) -> list[float]:
    """Return the importance of each table: by its `path.name`, else by its name, else 1.0.

    Raises:
        TypeError: `importance` is not a dict, or has a value that is not a number.
        ValueError: no table has one of the names, or an importance is negative or not finite.
    """
    if importance is not None and not isinstance(importance, Mapping):
        raise TypeError(f"importance must be a dict of numbers by table, got {importance!r}")
    importance_by_name, known_names = dict(importance or {}), set()
    for name, number in importance_by_name.items():
        if not isinstance(number, Real) or isinstance(number, bool):
            raise TypeError(f"the importance of {name!r} must be a number, got {number!r}")
    importances = []
    for table in tables:
        name = table.config.name
        known_names |= {table.path_name, name}
        importances.append(
            float(importance_by_name.get(table.path_name, importance_by_name.get(name, 1.0)))
        )
    if unknown_names := sorted(importance_by_name.keys() - known_names):
        raise ValueError(
            f"importance of tables that are not there: {unknown_names}; have {sorted(known_names)}"
        )
    if not all(math.isfinite(number) and number >= 0 for number in importances):
        raise ValueError(f"importance must be finite numbers >= 0, got {importance}")
    return importances
