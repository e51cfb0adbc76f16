"""DynamicTables: the handles of the dynamic tables of a module or model, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from emblib.dynamic.handles import DynamicTable
from emblib.specs import DynamicSpec


class DynamicTables(Mapping[str, DynamicTable]):
    """The dynamic tables of a module or model, by name.

    If several collections of a model have a table of one name, these are listed as `path.name`.
    Every table of a model can be looked up by its path.

    Args:
        tables: tables by name.
        other_storages: kind of storage of each table that is not dynamic, by name, for errors;
            None for none.
    """

    def __init__(
        self, tables: Mapping[str, DynamicTable], other_storages: Mapping[str, str] | None = None
    ) -> None:
        self._tables, self._other_storages = dict(tables), dict(other_storages or {})
        self._table_by_path: dict[str, DynamicTable] = {}

    @classmethod
    def merge(cls, tables_by_path: Mapping[str, DynamicTables]) -> DynamicTables:
        """Merge the tables of several modules, given by the module's path in the model."""
        all_names = [
            name
            for tables in tables_by_path.values()
            for name in (*tables, *tables._other_storages)  # noqa: SLF001 - of the same class
        ]
        merged = cls({})
        for path, tables in tables_by_path.items():
            prefix = f"{path}." if path else ""
            for name, table in tables.items():
                merged._table_by_path[prefix + name] = table
                merged._tables[name if all_names.count(name) == 1 else prefix + name] = table
            for name, kind in tables._other_storages.items():  # noqa: SLF001 - of the same class
                merged._other_storages.setdefault(name, kind)
                merged._other_storages[prefix + name] = kind
        return merged

    def __getitem__(self, name: str) -> DynamicTable:
        """Return the handle of a table.

        Raises:
            KeyError: there is no such dynamic table; the message lists those that exist.
        """
        table = self._tables.get(name) or self._table_by_path.get(name)
        if table is None:
            raise KeyError(self._missing_table_message(name))
        return table

    def _missing_table_message(self, name: str) -> str:
        """Return the message of the KeyError for a name without a table."""
        paths = [path for path in self._table_by_path if path.endswith(f".{name}")]
        if len(paths) > 1:
            return f"several collections have a table {name!r}: name one of {sorted(paths)}"
        if name in self._other_storages:
            return (
                f"table {name!r} is stored as {self._other_storages[name]}, and handles are of "
                f"dynamic tables (storage=Hash()), here {sorted(self._tables)}; other tables have "
                "parameters and optimizer states only"
            )
        names = [*self._tables, *self._table_by_path, *self._other_storages]
        close_names = difflib.get_close_matches(str(name), names, 3, 0.6)
        suggestion = ", ".join(map(repr, dict.fromkeys(close_names)))
        hint = f"; did you mean {suggestion}?" if suggestion else ""
        return f"there is no table {name!r}, the dynamic tables are {sorted(self._tables)}{hint}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return f"DynamicTables({', '.join(self._tables)})"


class _ShardOfModule:
    """The location of a table of a `DynamicEmbeddingBags`."""

    def __init__(self, module: Any, index: int) -> None:
        self.module, self.index = module, index


def handles_of(module: Any) -> DynamicTables:
    """Return the handle of each table of a `DynamicEmbeddingBags`, by name."""
    names = enumerate(module.table_names)
    return DynamicTables(
        {name: DynamicTable(name, {0: _ShardOfModule(module, t)}) for t, name in names}
    )


class TableSpecs(tuple[DynamicSpec, ...]):
    """The specs of the tables of a module, by number."""

    def __getitem__(self, index: Any) -> Any:
        """Return a spec by its number; raise TypeError for a name, for which there are handles."""
        if isinstance(index, str):
            raise TypeError(
                f"tables are specs by number: the handle of a table is table_handles()[{index!r}]"
            )
        return super().__getitem__(index)


def tables_of(model: nn.Module) -> DynamicTables:
    """Return the dynamic tables of a model by name, wherever they are in it.

    In a model over ranks, handles are collectives, and names are the same on all ranks. Names in a
    `DistributedModelParallel` are those in the model inside it.
    """
    inner: Any = model.module if getattr(model, "wraps_module", False) else model
    tables_by_path: dict[str, DynamicTables] = {}
    for path, module in inner.named_modules():
        is_covered = any(not outer or path.startswith(f"{outer}.") for outer in tables_by_path)
        if not is_covered and hasattr(module, "table_handles"):
            tables_by_path[path] = module.table_handles()
    return DynamicTables.merge(tables_by_path)
