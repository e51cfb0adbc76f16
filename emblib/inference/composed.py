"""Read-only tables whose ids share rows: quotient-remainder, hashed and narrow tables.

The rows of their components are in one `QuantizedEmbeddingBags`, in any format; a lookup maps ids
to them and combines them as the trained table does (`emblib.storage.composed_lookup`).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.specs import BoundsCheck, Pooling, TableSpec
from emblib.storage.composed import ComposedStorage
from emblib.storage.composed_lookup import (
    Combine,
    ComposedLookup,
    ComposedTable,
    component_features,
    component_pooling,
)
from emblib.tables import QuantizedEmbeddingBags


def composed_key(storage: ComposedStorage, dim: int, pooling: Pooling) -> Hashable:
    """Return a key that is equal for tables that one `ComposedEmbeddingBags` can have."""
    unpooled = pooling is Pooling.NONE or storage.combine_mode is Combine.MULTIPLY
    widths = (dim, storage.num_stored_columns(dim)) if unpooled else ()
    return type(storage), storage.combine_mode, storage.row_components, widths


def component_names(tables: Sequence[TableSpec], storages: Sequence[ComposedStorage]) -> list[str]:
    """Return the names `table.component` of the components of all tables."""
    return [
        f"{spec.name}.{component.name}"
        for spec, storage in zip(tables, storages, strict=True)
        for component in storage.components(spec.rows)
    ]


def component_specs(
    tables: Sequence[TableSpec], storages: Sequence[ComposedStorage]
) -> list[TableSpec]:
    """Return the specs of the components of all tables; their names have no dots."""
    names = iter(component_names(tables, storages))
    return [
        TableSpec(
            component.rows, storage.num_stored_columns(spec.dim), next(names).replace(".", "_")
        )
        for spec, storage in zip(tables, storages, strict=True)
        for component in storage.components(spec.rows)
    ]


def lookup_options(
    tables: Sequence[TableSpec],
    storages: Sequence[ComposedStorage],
    feature_tables: Sequence[int],
    pooling: Pooling,
) -> dict[str, Any]:
    """Return `pooling` and `feature_tables` of the module of the rows of the components."""
    return {
        "pooling": component_pooling(storages[0].combine_mode, pooling),
        "feature_tables": component_features(_lookups(tables, storages), feature_tables),
    }


def _lookups(
    tables: Sequence[TableSpec], storages: Sequence[ComposedStorage]
) -> list[ComposedTable]:
    return [
        storage.lookup_table(spec.rows, spec.dim)
        for spec, storage in zip(tables, storages, strict=True)
    ]


class ComposedEmbeddingBags(ComposedLookup):
    """Look up F features in T read-only tables whose ids share rows.

    Args:
        rows: module of the rows of all components: its tables are `component_specs`, its pooling
            and feature tables `lookup_options`, its `bounds_check` is NONE.
        tables: number of ids (`rows`), dim and name of each table.
        storages: storage of each table; their `composed_key` must be equal.
        feature_tables: index of the table of each feature.
        pooling: pooling of all features.
        bounds_check: reaction to invalid indices and offsets, see `BoundsCheck`.
        output_dtype: float32, float16 or bfloat16.

    Attributes:
        rows: module of the rows of all components.
    """

    include_last_offset = True

    def __init__(
        self,
        rows: QuantizedEmbeddingBags,
        tables: Sequence[TableSpec],
        storages: Sequence[ComposedStorage],
        *,
        feature_tables: Sequence[int],
        pooling: Pooling,
        bounds_check: BoundsCheck,
        output_dtype: torch.dtype,
    ) -> None:
        super().__init__(_lookups(tables, storages), feature_tables, pooling)
        self.rows, self.tables, self.storages = rows, tuple(tables), tuple(storages)
        self.feature_tables = tuple(feature_tables)
        self.table_names = [spec.name for spec in tables]
        self.bounds_check, self.output_dtype = bounds_check, output_dtype
        self.make_mapping_tensors(rows.packed.device)

    @property
    def components(self) -> QuantizedEmbeddingBags:
        """Return the module of all components."""
        return self.rows

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the rows, `weights`."""
        return self.rows.nbytes()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.make_mapping_tensors(self.rows.packed.device)
        return self

    def extra_repr(self) -> str:
        """Return names and sizes of the tables, and their storage."""
        sizes = (f"{spec.name}: {spec.rows} x {spec.dim}" for spec in self.tables)
        return f"[{', '.join(sizes)}] {self.storages[0]}"
