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
    ComposedLookup,
    ComposedTable,
    component_features,
    component_pooling,
)
from emblib.tables import QuantizedEmbeddingBags


def composed_key(storage: ComposedStorage, dim: int, pooling: Pooling) -> Hashable:
    """Return a key; tables can share a `ComposedEmbeddingBags` if their keys are equal.

    Tables whose rows are not pooled by the lookup of components (`pooling` NONE, or rows that are
    multiplied) also need equal dims.
    """
    needs_equal_dims = component_pooling(storage.combine_mode, pooling) is Pooling.NONE
    dims = (dim, storage.num_stored_columns(dim)) if needs_equal_dims else ()
    return type(storage), storage.combine_mode, storage.row_components, dims


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
    """Return the arguments `pooling` and `feature_tables` of the module of the components' rows.

    `feature_tables` has the table of each feature, `pooling` is that of the composed tables.

    Raises:
        ValueError: there are no tables, or their `composed_key`s differ.
    """
    composed_tables = _composed_tables(tables, storages, pooling)
    return {
        "pooling": component_pooling(storages[0].combine_mode, pooling),
        "feature_tables": component_features(composed_tables, feature_tables),
    }


def _composed_tables(
    tables: Sequence[TableSpec], storages: Sequence[ComposedStorage], pooling: Pooling
) -> list[ComposedTable]:
    """Return the tables as a lookup sees them; raise ValueError unless one lookup can have them."""
    keys = {
        composed_key(storage, spec.dim, pooling)
        for spec, storage in zip(tables, storages, strict=True)
    }
    if len(keys) != 1:
        names = [spec.name for spec in tables]
        raise ValueError(
            f"composed tables of one lookup must be of one kind, and of one dim if rows are not "
            f"pooled, and at least one: got {names} of {len(keys)} kinds"
        )
    return [
        storage.lookup_table(spec.rows, spec.dim)
        for spec, storage in zip(tables, storages, strict=True)
    ]


class ComposedEmbeddingBags(ComposedLookup):
    """Look up F features in T >= 1 read-only tables whose ids share rows.

    `forward` is that of `ComposedLookup`.

    Args:
        rows: module of the rows of all components: its tables are `component_specs`, its pooling
            and feature tables `lookup_options`, its `bounds_check` is NONE.
        tables: number of ids (`rows`), dim and name of each table.
        storages: storage of each table; the `composed_key`s of all tables must be equal.
        feature_tables: index of the table of each feature.
        pooling: pooling of all features.
        bounds_check: reaction to invalid indices and offsets, see `BoundsCheck`.
        output_dtype: float32, float16 or bfloat16.

    Attributes:
        rows: module of the rows of all components.

    Raises:
        ValueError: there are no tables, or their `composed_key`s differ.
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
        super().__init__(_composed_tables(tables, storages, pooling), feature_tables, pooling)
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
