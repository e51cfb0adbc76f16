"""The tables by row number in a model, on this rank, wherever they are, and all lookups.

Dynamic tables have handles (`emblib.dynamic.handles.tables_of`). Others are tables of a module, or
slices of a `TableGroups`, whose modules are no submodules of the model.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from emblib.collections.groups import TableGroups
from emblib.dynamic import DynamicEmbeddingBags
from emblib.inference import InferenceEmbeddingBags
from emblib.sharding.sharded_tables import ShardedTables
from emblib.tables import QuantizedEmbeddingBags, TableBatchedEmbeddingBags


@dataclass(frozen=True)
class PlainTable:
    """Rows and columns of a table: table `number` of `module`.

    Attributes:
        name: name of the table.
        module: module with its memory.
        number: number of the table there.
        first_row: row of the whole table that is row 0 here.
        first_column: column of the whole table that is column 0 here.
        dim: columns of the whole table.
        is_keyed: whether ids are keys, of a dynamic table.
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
        """Return what two readers of one table have in common."""
        return id(self.module), self.number

    @property
    def num_rows(self) -> int:
        """Return the number of rows here."""
        return int(self.module.tables[self.number].rows)

    @property
    def num_columns(self) -> int:
        """Return the number of columns here."""
        return int(self.module.tables[self.number].dim)


@dataclass
class ModelTables:
    """The tables of a model by row number.

    Attributes:
        tables: the tables, each once.
        calls: the modules that look up tables, dynamic ones too, with the table of each feature.
        others: kinds of tables that have no rows of their own, by table name.
        rank: this rank.
        num_ranks: number of ranks over which the model is sharded.
    """

    tables: list[PlainTable] = field(default_factory=list)
    calls: list[tuple[Any, list[PlainTable]]] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)
    rank: int = 0
    num_ranks: int = 1

    def add(self, tables: list[PlainTable]) -> None:
        """Add tables, except for those that are here already."""
        identities = {table.identity for table in self.tables}
        self.tables += [table for table in tables if table.identity not in identities]


def find_tables(model: nn.Module) -> ModelTables:
    """Return the tables of a model by row number.

    Raises:
        ValueError: the collections of the model are sharded over different numbers of ranks.
    """
    model_tables = ModelTables()
    sharded = [part for part in model.modules() if isinstance(part, ShardedTables)]
    places = {(part.ranks.rank, part.ranks.size) for part in sharded}
    if len(places) > 1:
        raise ValueError(
            f"the collections of the model are sharded over different ranks, {sorted(places)}: "
            "make a change log of each collection"
        )
    if places:
        ((model_tables.rank, model_tables.num_ranks),) = places
    replicas = {
        id(part.replicated.groups)
        for part in sharded
        if part.replicated is not None and part.ranks.rank > 0
    }
    inside: list[str] = []
    for path, part in model.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in inside):
            continue
        if isinstance(part, TableGroups):
            if id(part) not in replicas:
                _add_groups(model_tables, part)
        elif isinstance(part, InferenceEmbeddingBags):
            inside.append(path)
        elif isinstance(part, DynamicEmbeddingBags):
            inside.append(path)
            tables = [PlainTable("", part, t, 0, 0, 0, is_keyed=True) for t in part.feature_tables]
            model_tables.calls.append((part, tables))
        elif isinstance(part, TableBatchedEmbeddingBags | QuantizedEmbeddingBags):
            inside.append(path)
            specs = zip(part.table_names, part.tables, strict=True)
            tables = [PlainTable(n, part, t, 0, 0, s.dim) for t, (n, s) in enumerate(specs)]
            model_tables.add(tables)
            model_tables.calls.append((part, [tables[t] for t in part.feature_tables]))
        elif hasattr(part, "cores"):
            inside.append(path)
            model_tables.others |= dict.fromkeys(
                getattr(part, "table_names", [path]), "tensor trains"
            )
    return model_tables


def _add_groups(model_tables: ModelTables, groups: TableGroups) -> None:
    """Add the tables of a collection, and the calls that read them."""
    tables: dict[int, PlainTable] = {}
    for i, part in enumerate(groups.slices):
        name, (module, number) = part.config.name, groups.module_of(i)
        if part.storage.is_keyed:
            tables[i] = PlainTable(name, module, number, 0, 0, 0, is_keyed=True)
            continue
        if not isinstance(module, TableBatchedEmbeddingBags | QuantizedEmbeddingBags):
            model_tables.others[name] = type(part.storage).__name__
            continue
        begin, dim = part.columns[0], part.config.embedding_dim
        tables[i] = PlainTable(name, module, number, part.rows[0], begin, dim)
    for info in groups.groups:
        if all(s in tables for s in info.slices):
            model_tables.add([tables[s] for s in info.slices if not tables[s].is_keyed])
            units = [tables[groups.reads[unit]] for unit in info.units]
            model_tables.calls.append((info.module, units))
