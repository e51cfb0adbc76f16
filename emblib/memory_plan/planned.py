"""The tables of a memory plan, and their importances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from emblib.collections.configs import TableConfig
from emblib.collections.optimizers.fused import trained_configs
from emblib.optim import Optimizer
from emblib.sharding.shard import collections_of


def planned_tables(
    tables: nn.Module | Sequence[TableConfig], optimizer: Optimizer | None
) -> list[tuple[str, TableConfig, Optimizer | None]]:
    """Return path, configuration and optimizer of each table of a model, or of a list.

    Raises:
        TypeError: something else in the list.
        ValueError: no tables, or shared ones.
    """
    planned: list[tuple[str, TableConfig, Any]]
    if not isinstance(tables, nn.Module):
        for config in tables:
            if not isinstance(config, TableConfig):
                raise TypeError(
                    "tables must be a model, or a list of EmbeddingBagConfig or EmbeddingConfig, "
                    f"got {config!r}"
                )
        planned = [("", config, config.optimizer or optimizer) for config in tables]
    else:
        collections: dict[str, Any] = dict(collections_of(tables))
        shared = {
            name for collection_ in collections.values() for name in collection_.shared_tables()
        }
        if shared:
            raise ValueError(
                f"the tables {sorted(shared)} are shared by collections and stay dense: give "
                "plan_memory the configurations of the other tables, and a budget without the "
                "bytes of these"
            )
        planned = [
            (path, config, config.optimizer or collection.optimizer)
            for path, collection in collections.items()
            for config in trained_configs(collection)
        ]
    if not planned:
        raise ValueError("there are no tables: the model has no collection, or the list is empty")
    return planned


def importances_of(
    tables: Sequence[tuple[str, TableConfig, Optimizer | None]],
    importance: Mapping[str, float] | None,
) -> list[float]:
    """Return the importance of each table: that by `path.name`, by name, or 1.

    Raises:
        ValueError: a name that no table has, or an importance that is negative or not finite.
    """
    by_name, known_names = dict(importance or {}), set()
    importances = []
    for path, config, _ in tables:
        path_name = f"{path}.{config.name}"
        known_names |= {path_name, config.name}
        importances.append(float(by_name.get(path_name, by_name.get(config.name, 1.0))))
    if unknown := sorted(by_name.keys() - known_names):
        raise ValueError(
            f"importance of tables that are not there: {unknown}; have {sorted(known_names)}"
        )
    if not all(math.isfinite(number) and number >= 0 for number in importances):
        raise ValueError(f"importance must be finite numbers >= 0, got {importance}")
    return importances
