"""`find_tables`: the tables of a model whose ids are row numbers, and the modules that look up.

The tables of this rank are tables of a submodule, or slices of a `TableGroups`, whose modules are
not submodules of the model. Dynamic tables, whose ids are keys, have handles instead
(`emblib.dynamic.tables_of`).
"""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from emblib.collections.groups import TableGroups
from emblib.dynamic import DynamicEmbeddingBags
from emblib.inference import InferenceEmbeddingBags
from emblib.inference.composed import ComposedEmbeddingBags
from emblib.sharding import RankGroup
from emblib.sharding.sharded_tables import ShardedTables
from emblib.tables import QuantizedEmbeddingBags, TableBatchedEmbeddingBags


@dataclass(frozen=True)
class PlainTable:
    """A table, or a shard of rows or columns of it, that is table `number` of `module`.

    `ModelTables.calls` has dynamic tables too, of which only `module`, `number` and `is_keyed` have
    a meaning.

    Attributes:
        name: name of the whole table.
        module: module with the memory of the shard.
        number: index in `module.tables`.
        first_row: row of the whole table that is row 0 of the shard.
        first_column: column of the whole table that is column 0 of the shard.
        dim: columns of the whole table.
        is_keyed: whether the table is dynamic, so that ids are keys.
    """

    name: str
    module: Any
    number: int
    first_row: int
    first_column: int
    dim: int
    is_keyed: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        """Return `id(module)` and the table's number: equal for two objects of one table."""
        return id(self.module), self.number

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the shard."""
        return int(self.module.tables[self.number].rows)

    @property
    def num_columns(self) -> int:
        """Return the number of columns of the shard."""
        return int(self.module.tables[self.number].dim)


@dataclass
class ModelTables:
    """The tables of a model whose ids are row numbers, and its lookups.

    Attributes:
        tables: the tables, each once, without dynamic ones.
        calls: the modules that look up tables, dynamic ones too, with the table of each feature.
        other_kinds: kind, e.g. "tensor trains", by name of the tables of other kinds.
        ranks: the ranks over which the model is sharded.
    """

    tables: list[PlainTable] = field(default_factory=list)
    calls: list[tuple[Any, list[PlainTable]]] = field(default_factory=list)
    other_kinds: dict[str, str] = field(default_factory=dict)
    ranks: RankGroup = field(default_factory=RankGroup.single)

    def add(self, tables: list[PlainTable]) -> None:
        """Add those tables that `self.tables` lacks."""
        identities = {table.identity for table in self.tables}
        self.tables += [table for table in tables if table.identity not in identities]


def find_tables(model: nn.Module) -> ModelTables:
    """Return the tables and lookups of a model on this rank; change nothing.

    A table of which every rank has a replica is listed on rank 0 only. `InferenceEmbeddingBags`,
    whose ids an index may map to rows, are not listed.

    Raises:
        ValueError: this rank has another number, or is one of another number of ranks, in two
            collections of the model.
    """
    model_tables = ModelTables()
    sharded = [module for module in model.modules() if isinstance(module, ShardedTables)]
    ranks_and_sizes = {(module.ranks.rank, module.ranks.size) for module in sharded}
    if len(ranks_and_sizes) > 1:
        raise ValueError(
            "the collections of the model are sharded over different ranks, "
            f"{sorted(ranks_and_sizes)}: make a change log of each collection"
        )
    if sharded:
        model_tables.ranks = sharded[0].ranks
    replica_ids = {  # of groups whose tables rank 0 lists
        id(module.replicated.groups)
        for module in sharded
        if module.replicated is not None and module.ranks.rank > 0
    }
    outer_paths: list[str] = []  # of modules that are taken as a whole, with their submodules
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in outer_paths):
            continue
        if isinstance(module, TableGroups):
            if id(module) not in replica_ids:
                _add_groups(model_tables, module)
        elif _add_tables_of(model_tables, module, path):
            outer_paths.append(path)
    return model_tables


def _add_tables_of(model_tables: ModelTables, module: Any, path: str) -> bool:
    """Add the tables and calls of a module, at `path` in the model; return whether it has any."""
    if isinstance(module, InferenceEmbeddingBags):
        return True
    if isinstance(module, ComposedEmbeddingBags):
        kinds = [type(storage).__name__ for storage in module.storages]
        model_tables.other_kinds |= dict(zip(module.table_names, kinds, strict=True))
        return True
    if isinstance(module, DynamicEmbeddingBags):
        tables = [PlainTable("", module, t, 0, 0, 0, is_keyed=True) for t in module.feature_tables]
        model_tables.calls.append((module, tables))
        return True
    if isinstance(module, TableBatchedEmbeddingBags | QuantizedEmbeddingBags):
        specs = zip(module.table_names, module.tables, strict=True)
        tables = [
            PlainTable(name, module, t, 0, 0, spec.dim) for t, (name, spec) in enumerate(specs)
        ]
        model_tables.add(tables)
        model_tables.calls.append((module, [tables[t] for t in module.feature_tables]))
        return True
    if hasattr(module, "cores"):
        names = getattr(module, "table_names", [path])
        model_tables.other_kinds |= dict.fromkeys(names, "tensor trains")
        return True
    return False


def _add_groups(model_tables: ModelTables, groups: TableGroups) -> None:
    """Add the tables of a collection, and the calls that read them."""
    tables: dict[int, PlainTable] = {}
    for i, table_slice in enumerate(groups.slices):
        name, (module, number) = table_slice.config.name, groups.module_of(i)
        if table_slice.storage.is_keyed:
            tables[i] = PlainTable(name, module, number, 0, 0, 0, is_keyed=True)
            continue
        if not isinstance(module, TableBatchedEmbeddingBags | QuantizedEmbeddingBags):
            model_tables.other_kinds[name] = type(table_slice.storage).__name__
            continue
        first_column, dim = table_slice.columns[0], table_slice.config.embedding_dim
        tables[i] = PlainTable(name, module, number, table_slice.rows[0], first_column, dim)
    for group in groups.groups:
        if all(i in tables for i in group.slices):
            model_tables.add([tables[i] for i in group.slices if not tables[i].is_keyed])
            unit_tables = [tables[groups.slice_of_unit[unit]] for unit in group.units]
            model_tables.calls.append((group.module, unit_tables))
