"""The tables that a memory plan is made for, and how much each of them counts."""

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
    found: list[tuple[str, TableConfig, Any]]
    if not isinstance(tables, nn.Module):
        for config in tables:
            if not isinstance(config, TableConfig):
                raise TypeError(
                    "tables must be a model, or a list of EmbeddingBagConfig or EmbeddingConfig, "
                    f"got {config!r}"
                )
        found = [("", config, config.optimizer or optimizer) for config in tables]
    else:
        collections: dict[str, Any] = dict(collections_of(tables))
        shared = {name for one in collections.values() for name in one.shared_tables()}
        if shared:
            raise ValueError(
                f"the tables {sorted(shared)} are shared by collections and stay dense: give "
                "plan_memory the configurations of the other tables, and a budget without the "
                "bytes of these"
            )
        found = [
            (path, config, config.optimizer or collection.optimizer)
            for path, collection in collections.items()
            for config in trained_configs(collection)
        ]
    if not found:
        raise ValueError("there are no tables: the model has no collection, or the list is empty")
    return found


def importances_of(
    found: Sequence[tuple[str, TableConfig, Optimizer | None]],
    importance: Mapping[str, float] | None,
) -> list[float]:
    """Return the importance of each table: that by `path.name`, by name, or 1.

    Raises:
        ValueError: a name of no table, or a number that is no importance.
    """
    given, known = dict(importance or {}), set()
    importances = []
    for path, config, _ in found:
        own = f"{path}.{config.name}"
        known |= {own, config.name}
        importances.append(float(given.get(own, given.get(config.name, 1.0))))
    if unknown := sorted(given.keys() - known):
        raise ValueError(
            f"importance of tables that are not there: {unknown}; have {sorted(known)}"
        )
    if not all(math.isfinite(number) and number >= 0 for number in importances):
        raise ValueError(f"importance must be finite numbers >= 0, got {importance}")
    return importances
