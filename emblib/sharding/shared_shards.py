"""Shared tables over ranks: the shards that several sharded collections read.

`SharedTableShards` has the shards of one shared table on this rank. Each shard is made by the first
collection that reads it. `SharedTablesOfModel` has the `SharedTableShards` of all collections that
one call of `shard` replaces.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from emblib.collections.groups import SliceKey
from emblib.collections.shared import SharedEntry, SharedTable
from emblib.sharding.sharding_types import ParameterSharding
from emblib.storage import Dense, TableSlice

SharedShards = Mapping[str, "SharedTableShards"]
"""The shared tables of a collection, by name."""


def check_source(source: Any, kind: type[nn.Module]) -> None:
    """Raise TypeError unless the source of a sharded collection is a collection of `kind`."""
    if not isinstance(source, kind):
        raise TypeError(
            f"only an unsharded {kind.__name__} can be sharded here, got {type(source).__name__}; "
            "emblib.sharding.shard shards all collections of a model"
        )


def check_shared_shards(source: Any, shared: SharedShards) -> None:
    """Raise TypeError unless `shared` is a mapping with all shared tables that `source` reads."""
    if not isinstance(shared, Mapping) or not all(
        isinstance(shards, SharedTableShards) for shards in shared.values()
    ):
        raise TypeError(f"shared must have SharedTableShards by table name, got {shared!r}")
    names = sorted(source.shared_tables().keys() - shared.keys())
    if names:
        raise TypeError(
            f"the collection reads shared tables {names}, so it cannot be sharded by itself: shard "
            "the model with all collections that read them, with emblib.sharding.shard or "
            "DistributedModelParallel; without shared=, each collection has its own table"
        )


class SharedTableShards:
    """One shared table over ranks: its shards on this rank, and its entry in state dicts."""

    def __init__(self) -> None:
        self.entry = SharedEntry()
        self._shards: dict[SliceKey, SharedTable] = {}

    def shard_of(
        self, table_slice: TableSlice, make_shard: Callable[[TableSlice], SharedTable]
    ) -> SharedTable:
        """Return the shard with the rows and columns of `table_slice`.

        The first call for these rows and columns makes it by `make_shard(table_slice)`; later calls
        return the same object.
        """
        key = SliceKey.of(table_slice)
        if key not in self._shards:
            self._shards[key] = make_shard(table_slice)
        return self._shards[key]


class SharedTablesOfModel:
    """The shared tables of the collections that one call of `shard` replaces."""

    def __init__(self) -> None:
        # By id() of the table. An entry keeps its table alive, because Python may reuse the id of a
        # freed object.
        self._shards_by_table_id: dict[int, tuple[SharedTable, SharedTableShards]] = {}

    def shards_by_name(self, source: Any) -> dict[str, SharedTableShards]:
        """Return the shards of the shared tables of an unsharded collection, by table name."""
        return {
            name: self._shards_by_table_id.setdefault(id(table), (table, SharedTableShards()))[1]
            for name, table in source.shared_tables().items()
        }


def check_plans_of_shared(
    sharded_collections: Sequence[tuple[str, Any, Mapping[str, ParameterSharding]]],
    other_collections: Mapping[str, Any],
) -> None:
    """Check that a plan can shard the shared tables of a model.

    Args:
        sharded_collections: path, unsharded collection and plan of each collection that is
            replaced.
        other_collections: the other collections of the model, by path.

    Raises:
        ValueError: a collection outside the plan reads a shared table of the plan, or two
            collections of the plan shard one table in different ways, or in a storage that is not
            `Dense`.
    """
    readers_by_table: dict[int, list[tuple[str, SharedTable, ParameterSharding]]] = {}
    for path, source, plan in sharded_collections:
        for name, table in source.shared_tables().items():
            readers_by_table.setdefault(id(table), []).append((path, table, plan[name]))
    for readers in readers_by_table.values():
        first_path, table, sharding = readers[0]
        name = table.config.name
        for path, _, other_sharding in readers[1:]:
            if other_sharding != sharding:
                raise ValueError(
                    f"the collections {first_path!r} and {path!r} read one shared table {name!r}, "
                    f"but the plan shards it in two ways, {_describe_sharding(sharding)} and "
                    f"{_describe_sharding(other_sharding)}: give both the same rule; or construct "
                    "the collections without shared=, for a table each"
                )
        if type(sharding.storage) not in (type(None), Dense):
            raise ValueError(
                f"the plan stores the shared table {name!r} as {sharding.storage}, but shared "
                "tables must be Dense: leave that out of its constraints, or give one collection "
                "all features of the table"
            )
        unsharded_readers = [
            path
            for path, collection in other_collections.items()
            if table in collection.shared_tables().values()
        ]
        if unsharded_readers or _has_other_readers(
            table, [source for _, source, _ in sharded_collections]
        ):
            raise ValueError(
                f"the shared table {name!r} is read by "
                + (
                    f"the collections {unsharded_readers}, which"
                    if unsharded_readers
                    else "other collections, which"
                )
                + " the plan does not shard, and would be two tables afterwards: shard all "
                "collections that read it in one call, or none of them"
            )


def _has_other_readers(table: SharedTable, sources: Sequence[Any]) -> bool:
    """Return whether collections other than `sources` read a table."""
    modules = {module for source in sources for module in source.groups.table_modules()}
    if all(reader in modules for reader in table.readers()):
        return False
    gc.collect()  # frees deleted collections that are in reference cycles
    return not all(reader in modules for reader in table.readers())


def _describe_sharding(sharding: ParameterSharding) -> str:
    """Describe a sharding in an error message."""
    ranks = f" on ranks {list(sharding.ranks)}" if sharding.shards else ""
    storage = "" if sharding.storage is None else f" as {sharding.storage}"
    return f"{sharding.type.value}{ranks}{storage}"
