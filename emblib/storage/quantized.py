"""Quantised storage: rows of 8, 4 or 2 bits per value, for inference."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from emblib.attribute_errors import shows_attribute_errors
from emblib.ops import quant
from emblib.optim import NO_UPDATE, Optimizer
from emblib.specs import Pooling, check_count
from emblib.storage.base import (
    CutUnits,
    KeyBlock,
    MemoryBytes,
    RowTimes,
    Storage,
    TableDescription,
    TableModule,
    TableSlice,
    TensorLayout,
    distinct_names,
)
from emblib.storage.handles import TableHandle
from emblib.storage.initial_values import draw, skips_initial_values
from emblib.tables import QuantizedEmbeddingBags, state_dicts
from emblib.tables.quantized import FORMER_ENTRIES, pack_former_rows

_BLOCK_ROWS = 1 << 16  # rows that are drawn as floats at a time; with an `init_fn` all rows are


@dataclass(frozen=True)
class Quantized(Storage):
    """Rows of 8, 4 or 2 bits per value, with a scale and an offset per row; they cannot be trained.

    Args:
        bits: bits per value: 8, 4 or 2.

    Raises:
        TypeError: `bits` is not an int.
        ValueError: `bits` is another number.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(1_000, 16, "item")])
        >>> served = bags.quantized(bits=4)
        >>> served.embedding_bag_configs()[0].storage
        Quantized(bits=4)
    """

    bits: int = 8

    plan_name: ClassVar[str] = "Quantized"
    is_trained: ClassVar[bool] = False
    has_dense_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_count("bits", self.bits))
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits must be 8, 4 or 2, got {self.bits}")

    def check_table(self, table: TableDescription) -> None:
        """Raise ValueError for a table with an optimizer."""
        if table.optimizer is not None:
            raise ValueError(
                f"a quantised table is not trained: optimizer of {table.name!r} must be None, got "
                f"{table.optimizer!r}"
            )

    def check_slice(self, table_slice: TableSlice) -> None:
        """Raise ValueError for a slice that lacks columns: a row has one scale."""
        if not table_slice.has_all_columns:
            raise ValueError(
                f"quantised table {table_slice.config.name!r} is not divided by columns, got "
                f"columns {table_slice.columns} of {table_slice.config.embedding_dim}: a row has "
                "one scale"
            )

    # Modules

    def group_key(
        self, table_slice: TableSlice, number: int, optimizer: Optimizer, pooling: Pooling
    ) -> Hashable:
        """Return a key that is equal for tables that can share a module."""
        return ("quantized", self.bits, table_slice.dim if pooling is Pooling.NONE else 0)

    def make_module(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> TableModule:
        """Return the module of slices with equal group keys."""
        return QuantizedModule(slices, feature_tables, self.bits, pooling, seeds, device)

    def make_handle(self, module: TableModule, index: int) -> TableHandle:
        """Return the handle of a table, which has no parameters."""
        return QuantizedHandle(self, module, index)

    def views(self, module: Any) -> list[dict[str, Tensor]]:
        """Return the packed rows of each table, by the name "packed", see `emblib.ops.quant`."""
        views: list[dict[str, Tensor]] = module.table_views()
        return views

    def reset(self, module: Any, seeds: Sequence[int]) -> None:
        """Draw the initial values of all tables of a module again."""
        module.redraw(seeds)

    # Sharding, checkpoints, planner

    def cut_units(self, table: TableDescription) -> CutUnits:
        """Allow cuts between any rows, not between columns: a row has one scale."""
        return CutUnits(1, table.embedding_dim)

    def copy_slice(
        self,
        table_slice: TableSlice,
        source: TableHandle,
        target: TableHandle,
        key_block: KeyBlock | None,
    ) -> None:
        """Copy the rows of a slice of the whole table `source` into `target`."""
        begin, end = table_slice.rows
        target.views()["packed"].copy_(source.views()["packed"][begin:end])

    def parameter_layouts(self, table: TableDescription) -> dict[str, TensorLayout]:
        """Return the layout of the one tensor `packed`; a slice has some of its rows."""
        width = quant.row_bytes(table.embedding_dim, self.bits)
        size = (table.num_embeddings, width)
        return {"packed": TensorLayout(size, torch.uint8, lambda rows, _: (rows, (0, width)))}

    def nbytes(
        self, table_slice: TableSlice, optimizer: Optimizer | None, device: str
    ) -> MemoryBytes:
        """Return the bytes of the packed rows, each with scale and offset, and of padding."""
        return MemoryBytes(quant.table_bytes(table_slice.num_rows, table_slice.dim, self.bits))

    def update_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return 0: quantised rows are not trained."""
        return 0.0


class QuantizedModule(QuantizedEmbeddingBags):
    """Module of quantised tables.

    Initial values are those of float32 dense tables with the same seeds, quantised.
    """

    optimizer: Optimizer = NO_UPDATE  # nothing is trained

    def __init__(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        bits: int,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        self._slices, self._seeds = list(slices), list(seeds)
        names = distinct_names([table_slice.config.name for table_slice in slices])
        specs = [
            table_slice.spec_named(name) for table_slice, name in zip(slices, names, strict=True)
        ]
        super().__init__(specs, bits, pooling=pooling, feature_tables=feature_tables, device=device)

    def redraw(self, seeds: Sequence[int]) -> None:
        """Draw the initial values again, one seed per table."""
        self._seeds = list(seeds)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values of all tables, unless on meta or in `without_initial_values`."""
        super().reset_parameters()
        if self.packed.is_meta or skips_initial_values():
            return
        for table, (table_slice, seed) in enumerate(zip(self._slices, self._seeds, strict=True)):
            block_rows = (
                table_slice.num_rows if table_slice.config.init_fn is not None else _BLOCK_ROWS
            )
            for first_row in range(*table_slice.rows, block_rows):
                block = replace(
                    table_slice, rows=(first_row, min(first_row + block_rows, table_slice.rows[1]))
                )
                values = self.packed.new_empty(block.num_rows, block.dim, dtype=torch.float32)
                draw(block, values, seed)
                self.write_rows(table, values, first_row - table_slice.rows[0])


class QuantizedHandle(TableHandle):
    """Handle of a quantised table: its rows are the buffer `packed`; it has no parameters.

    A state dict that is loaded may instead have the `weight` `[rows, dim]` of a dense table, which
    is then quantised, or the `values` and `scales` of a quantised table from before 0.1.0.
    """

    module: QuantizedModule

    def bind(self) -> None:
        """Make `packed` a view of the memory that the module has now."""
        for name, view in self.views().items():
            self.register_buffer(name, view, persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_buffers": {}}

    def adopt(self, other: QuantizedHandle) -> None:
        """Copy the rows of another handle with the same `bits`, rows and dim."""
        views = other.views()
        for name, view in self.views().items():
            view.copy_(views[name])

    @property
    @shows_attribute_errors
    def _names_in_checkpoints(self) -> SimpleNamespace:
        return SimpleNamespace(**self.views())

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` which attribute a key begins with."""
        return dict.fromkeys(self.views(), "_names_in_checkpoints")

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination.update({prefix + name: view for name, view in self.views().items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        _, _, missing_keys, unexpected_keys, errors = arguments
        if state_dicts.refuse_invalid(self, state_dict, prefix, errors):
            return
        if self._refuses_load_on_meta(state_dict, prefix, errors):
            return
        entries = state_dicts.entries_under(prefix, state_dict)
        views = self.views()
        if set(entries) == {"weight"}:
            self.module.write_rows(self.index, entries["weight"])
            return
        if set(entries) == set(FORMER_ENTRIES):
            entries = {"packed": self._pack_former_entries(entries)}
        missing_keys.extend(prefix + name for name in sorted(views.keys() - entries.keys()))
        unexpected_keys.extend(prefix + name for name in sorted(entries.keys() - views.keys()))
        for name in views.keys() & entries.keys():
            views[name].copy_(entries[name])

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the table in a state dict."""
        entries = state_dicts.entries_under(prefix, state_dict)
        spec, float_tensor = self.module.tables[self.index], torch.empty(0, device="cpu")
        if set(entries) == {"weight"}:
            weight, shape = entries["weight"], (spec.rows, spec.dim)
            problem = state_dicts.tensor_problem(weight, float_tensor, shape)
            try:
                if not problem:
                    self.module.check_values(self.index, weight)
            except ValueError as error:
                problem = str(error)
            if problem:
                yield f"{prefix}weight: {problem}"
            return
        if set(entries) == set(FORMER_ENTRIES):
            try:
                state_dict = {f"{prefix}packed": self._pack_former_entries(entries)}
            except ValueError as error:
                yield f"{prefix.removesuffix('.')}: {error}"
                return
        targets = {prefix + name: view for name, view in self.views().items()}
        yield from state_dicts.entry_problems(state_dict, targets)

    def _pack_former_entries(self, entries: Mapping[str, Any]) -> Tensor:
        """Convert `values` and `scales` from before 0.1.0 to packed rows, uint8."""
        values, scales = (entries[name] for name in FORMER_ENTRIES)
        dim = self.module.tables[self.index].dim
        return pack_former_rows(values, scales, dim, self.module.format_code)
