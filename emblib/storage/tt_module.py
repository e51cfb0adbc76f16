"""Tensor trains in a collection: the module of several tables, and their handles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from emblib.attribute_errors import shows_attribute_errors
from emblib.ops import autograd
from emblib.optim import Optimizer
from emblib.specs import Pooling, TTSpec
from emblib.storage.base import TableModule, TableSlice, precision_of
from emblib.storage.handles import TableHandle, register_with_optimizer
from emblib.storage.initial_values import seeded
from emblib.tables import TableBatchedTTEmbeddingBags, state_dicts
from emblib.tables.tt import Cores
from emblib.tt import layout_entry
from emblib.tt.initializers import CoreLayout, dense_row_std, find_initializer
from emblib.tt.shapes import check_ranks


def core_views(module: Any, table: int) -> dict[str, Tensor]:
    """Return the cores of a table, `cores.0`, ..., and their states, `<state>.0`, ..., as views."""
    views = {f"cores.{k}": core.detach() for k, core in enumerate(module.table_cores(table))}
    for k, states in enumerate(module.core_optimizer_states(table)):
        views.update({f"{name}.{k}": state for name, state in states.items()})
    return views


class TTModule(TableBatchedTTEmbeddingBags):
    """Module of whole tensor trains, or of one slice of a train that is cut.

    The initial values of a slice are a slice of those that the whole table has for the same seed.
    Each table gets a `TTHandle`. Once every table has one, the module reads the cores from the
    handles, where torch may replace parameters; its own `cores` is then a second list of them.

    Args:
        slices: slice of each table of the module; all with the same dtypes and `matmul`.
        feature_tables: index into `slices` for each feature.
        optimizer: optimizer of the cores.
        pooling: pooling of every feature.
        seeds: seed of the initial values of each table.
        device: device of the cores.
    """

    def __init__(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        self._slices, self.seeds = tuple(slices), tuple(seeds)
        self._cores_of_handles: dict[int, Cores] = {}
        storage: Any = slices[0].storage
        super().__init__(
            [table_slice.spec for table_slice in slices],
            optimizer,
            pooling=pooling,
            feature_tables=feature_tables,
            precision=replace(precision_of(slices[0]), matmul=storage.matmul),
            device=device,
        )

    def redraw(self, seeds: Sequence[int]) -> None:
        """Set the seeds, one per table, and draw the initial values; optimizer states become 0."""
        self.seeds = tuple(seeds)
        self.reset_parameters()

    def register_cores(self, table: int, cores: Cores) -> None:
        """Read the cores of a table from `cores`, the list of its handle, from now on."""
        self._cores_of_handles[table] = cores

    def replace_cores(self, table: int, cores: Cores) -> None:
        """Replace a table's cores by those of a handle, and drop the gradients of these."""
        self.register_cores(table, cores)
        for k, core in zip(self.core_numbers(table), cores, strict=True):
            self.cores[k] = core
            core.grad = None

    def restore_trained(self, table: int, cores: Cores) -> None:
        """Make the cores of a table require gradients, unless the table is frozen.

        Does nothing if backward leaves gradients: `requires_grad` of the cores is then the state.
        """
        if autograd.updates_in_backward(self.optimizer):
            for k, core in zip(self.core_numbers(table), cores, strict=True):
                core.requires_grad_(k not in self.frozen_cores)

    def mark_cores(self) -> None:
        """Make all cores notify this module when they are frozen."""
        self._mark_parameters()

    def _all_cores(self) -> list[nn.Parameter]:
        """Return the cores of all tables, from the handles once every table has one."""
        if len(self._cores_of_handles) < len(self.tables):
            return super()._all_cores()
        return [
            core for t in range(len(self.tables)) for core in self._cores_of_handles[t].as_list()
        ]

    def _check_ranks(self) -> None:
        # The ranks that cores can use depend on the whole table, not on how it is cut.
        for table_slice in self._slices:
            table_spec = table_slice.config.spec()
            check_ranks(table_spec.ranks, table_spec.row_factors, table_spec.dim_factors)

    def _draw(self, table: int) -> Sequence[Tensor]:
        """Draw the initial cores of the whole table, and return the cores of the slice.

        On meta nothing is drawn, and the cores of the module are returned.
        """
        table_slice, device = self._slices[table], self.features.device
        if device.type == "meta":
            return self.table_cores(table)
        storage: Any = table_slice.storage
        table_spec, cpu = table_slice.config.spec(), torch.device("cpu")
        layout = CoreLayout(
            table_spec.row_factors, table_spec.dim_factors, table_spec.full_ranks, cpu
        )
        with seeded(cpu, self.seeds[table]):
            values = find_initializer(storage.init)(layout, dense_row_std(table_spec.rows))
        cores: list[Tensor] = storage.cores_of(table_slice, values)
        return cores


class TTHandle(TableHandle):
    """Handle of a tensor train: parameters `cores.0`, ...; its state dict has the layout too."""

    checks_parameters = False  # the cores are the memory, not views of it
    module: TTModule

    def attach(self, module: TableModule, index: int) -> None:
        """Attach to table `index` of `module`, and register its cores."""
        super().attach(module, index)
        assert isinstance(module, TTModule)
        self.cores = Cores(module.table_cores(index))
        module.register_cores(index, self.cores)

    @property
    def spec(self) -> TTSpec:
        """Return rows, dim, ranks and factors of the table."""
        spec: TTSpec = self.module.tables[self.index]
        return spec

    def bind(self) -> None:
        """Register the cores with this handle."""
        module: TTModule = self.module
        module.restore_trained(self.index, self.cores)
        for core in self.cores:
            register_with_optimizer(core, self, module.optimizer)
        module.mark_cores()

    def dense_rows(self) -> Tensor:
        """Compute all rows, float32 `[rows, dim]`."""
        rows: Tensor = self.module.to_dense(self.index)
        return rows

    def dense_blocks(self) -> Iterator[Tensor]:
        """Compute all rows, and yield them in blocks, in order."""
        yield from self.module.dense_blocks(self.index)

    def adopt(self, other: TTHandle) -> None:
        """Take over the cores of another handle without gradients and optimizer states."""
        self.cores = other.cores
        self.module.replace_cores(self.index, other.cores)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}{layout_entry.NAME}"] = layout_entry.from_spec(self.spec)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        unexpected, errors = arguments[-2:]
        problems: list[str] = []
        self._refuses_load_on_meta(state_dict, prefix, problems)
        if state_dicts.refuse_invalid(self, state_dict, prefix, errors, problems):
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if f"{prefix}{layout_entry.NAME}" in unexpected:
            unexpected.remove(f"{prefix}{layout_entry.NAME}")

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield a message per problem of the layout of a state dict; loading checks the cores."""
        problem = layout_entry.describe_mismatch(state_dict, prefix, [self.spec], self.cores)
        if problem:
            yield problem
        layout_entries = {prefix + layout_entry.NAME: layout_entry.from_spec(self.spec)}
        yield from state_dicts.entry_problems(state_dict, layout_entries)

    @property
    @shows_attribute_errors
    def _names_in_checkpoints(self) -> SimpleNamespace:
        return SimpleNamespace(**{layout_entry.NAME: layout_entry.from_spec(self.spec)})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` which attribute a key begins with."""
        return {layout_entry.NAME: "_names_in_checkpoints"}
