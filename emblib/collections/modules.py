"""Collections: modules that look up the features of a batch in their tables.

`EmbeddingBagCollection` pools bags and `EmbeddingCollection` returns one vector per id. Their base
`TableCollection` has the tables: by name, with state dicts, optimizers and initial values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from emblib.attribute_errors import shows_attribute_errors
from emblib.collections.checked_batch import check_ids, checked_batch
from emblib.collections.column_order import (
    ColumnOrder,
    bounds_of_means,
    bounds_output,
    clip_blocks,
)
from emblib.collections.configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    TableConfig,
    TableFeature,
    table_features,
)
from emblib.collections.fused_states import (
    FusedTableEntry,
    check_optimizer_state,
    fused_tables,
    load_optimizer_state,
    optimizer_state,
)
from emblib.collections.groups import SliceKey, TableGroups
from emblib.collections.shared import SharedTable, SharedTables
from emblib.dynamic import DynamicTable, DynamicTables
from emblib.grad_mode import without_gradients
from emblib.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from emblib.jagged.jagged_tensor import as_normal_tensor, drop_first
from emblib.jagged.keyed_layout import num_padding_of
from emblib.ops.autograd import UpdateRule
from emblib.optim import Optimizer
from emblib.specs import BoundsCheck, Pooling, check_bool
from emblib.storage import Quantized, TableHandle, TableSlice
from emblib.storage.base import has_hyperparams
from emblib.storage.handles import TableHandles
from emblib.storage.initial_values import without_initial_values
from emblib.tables import optimizer_hooks, state_dicts
from emblib.tables.graph_break import can_read_numbers, is_in_export, run_uncompiled


def _check_tables_argument(tables: Any, kind: type[TableConfig]) -> tuple[Any, ...]:
    """Return configurations as a tuple; raise TypeError for a single one or another type."""
    if isinstance(tables, TableConfig | str) or not isinstance(tables, Iterable):
        raise TypeError(
            f"tables must be a list of {kind.__name__}, also for one table, got {tables!r}"
        )
    return tuple(tables)


def _check_device(device: Any) -> None:
    if isinstance(device, bool):  # TorchRec has is_weighted at this position
        raise TypeError(
            f"device must be None, a torch.device or its name, got {device}; is_weighted is given "
            f"by name, is_weighted={device}"
        )


class TableCollection(nn.Module):
    """Base of collections: tables by name, looked up by the features that read them.

    `groups` does the lookups. The handles of the tables are submodules under `handles_name`, so
    parameters and state dicts have one entry per table. A collection is as thread-safe as its
    tables (docs/threads.md).

    A subclass names its handles and the class of its configurations, and passes its arguments,
    which `EmbeddingBagCollection` describes with their errors.
    """

    handles_name: ClassVar[str]
    config_type: ClassVar[type[TableConfig]]
    configs: tuple[Any, ...]
    groups: TableGroups

    def __init__(
        self,
        tables: Sequence[TableConfig],
        device: torch.device | str | None,
        optimizer: Optimizer | None,
        shared: SharedTables | None = None,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
    ) -> None:
        super().__init__()
        self.bounds_check = BoundsCheck(bounds_check)
        self.configs = _check_tables_argument(tables, self.config_type)
        self._check_tables()
        _check_device(device)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizer must be None or one of emblib.optim, e.g. optim.SGD(lr=0.01), got "
                f"{optimizer!r}; for one of torch.optim leave it out and give it the parameters"
            )
        self.optimizer = optimizer
        if shared is not None and not isinstance(shared, SharedTables):
            raise TypeError(f"shared must be None or SharedTables(...), got {shared!r}")
        self._shared = {} if shared is None else shared.read_by(self.configs)
        self._units = table_features(self.configs)
        self._set_groups(self._make_groups(device, None))

    def _check_tables(self) -> None:
        kind, names = self.config_type, set()
        for config in self.configs:
            if not isinstance(config, kind):
                raise TypeError(
                    f"the tables of {type(self).__name__} must be of {kind.__name__}, got "
                    f"{config!r}"
                )
            if config.name in names:
                raise ValueError(
                    f"tables of a collection must differ in name, got {config.name!r} twice"
                )
            names.add(config.name)

    def _make_groups(
        self, device: torch.device | str | None, seeds: Mapping[str, int] | None
    ) -> TableGroups:
        """Build the modules of the tables; `seeds` has the seed of initial values of each table.

        If `seeds` is None they are drawn from torch's generator.
        """
        return TableGroups(
            [TableSlice.whole(config) for config in self.configs],
            [unit.table for unit in self._units],
            pooling=self._table_pooling(),
            optimizer=self.optimizer,
            device=device,
            seeds=seeds,
            shared={
                SliceKey.of(TableSlice.whole(config)): self._shared[config.name]
                for config in self.configs
                if config.name in self._shared
            },
        )

    def _table_pooling(self) -> Pooling:
        """Return the pooling of the table modules; NONE for one vector per id."""
        return Pooling.NONE

    def _set_groups(self, groups: TableGroups) -> None:
        """Install groups; register the handles first, so that parameters have the tables' names."""
        handles = zip([config.name for config in self.configs], groups.handles, strict=True)
        for name in (self.handles_name, "groups"):
            self._modules.pop(name, None)
        self.add_module(self.handles_name, TableHandles(dict(handles)))
        self._set_handle_owners()
        groups.set_bounds_check(self.bounds_check, [unit.feature for unit in self._units])
        self.groups = groups
        # Whether the host splits ids or their vectors, and not only the kernels.
        self._is_split = not groups.has_one_module or groups.pooling is Pooling.NONE
        is_keyed = [config.storage.is_keyed for config in self.configs]
        self._has_keyed, self._all_keyed = any(is_keyed), all(is_keyed)
        self._features_in_order = [self._units[unit].feature for unit in groups.order]
        # The keys of the last batch, the positions of `_features_in_order` among them, and these
        # positions on the GPU, or None if no batch on a GPU needed them.
        self._permutation: tuple[list[str], list[int], Tensor | None] = ([], [], None)

    def _set_handle_owners(self) -> None:
        for name, handle in self.handles().items():
            handle.set_owner(self, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_handle_owners()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Check the state dict entries of all tables, before the first one is written."""
        if not state_dicts.refuse_invalid(self, state_dict, prefix, arguments[-1]):
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    # Batches

    def _is_in_order(self, features: Any) -> bool:
        """Return whether a batch has exactly the features of `groups`, in the same order."""
        if is_in_export() and self._has_keyed:
            raise RuntimeError(
                "torch.export takes no collection with hash tables: export "
                "emblib.inference.for_inference(collection), which keeps the rows as they are, or "
                "in a format that is smaller"
            )
        return (
            isinstance(features, KeyedJaggedTensor) and features.keys() == self._features_in_order
        )

    def _breaks_graph(self, features: Any) -> bool:
        """Return whether a graph is being compiled and must end before the lookup.

        It must if tables need Python, or the host needs numbers that it would read in the graph,
        such as where to split the batch. A graph that contained the code around them would break
        once per nested call, and its pieces would be compiled again as batches change.
        """
        if not torch.compiler.is_dynamo_compiling() or is_in_export():
            return False
        needs_numbers = self._is_split or not self._is_in_order(features)
        return self.groups.breaks_graphs or (needs_numbers and not can_read_numbers())

    def _checked(self, features: Any) -> KeyedJaggedTensor:
        """Return the batch with only the features that tables read, in the order of `groups`.

        Where ids are selected by numbers on the host, these are checked; kernels check the rest.
        """
        if self._is_in_order(features):
            check_ids(features.values(), allow_uint64=self._all_keyed)
            return checked_batch(features, self.bounds_check) if self._is_split else features
        batch = KeyedJaggedTensor.adopt(features)
        check_ids(batch.values(), allow_uint64=self._all_keyed)
        return self._in_order(checked_batch(batch, self.bounds_check))

    def _in_order(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Select the features that tables read, in the order of `groups`."""
        keys, positions, gpu_positions = self._permutation
        if keys != batch.keys():
            position_by_key = batch.index_per_key()
            missing_features = sorted(set(self._features_in_order) - set(position_by_key))
            if missing_features:
                raise KeyError(
                    "the batch must have the features of all tables: missing are "
                    f"{missing_features}, there are {batch.keys()}"
                )
            positions, gpu_positions = (
                [position_by_key[feature] for feature in self._features_in_order],
                None,
            )
        device = batch.device()
        if device.type == "cuda" and (gpu_positions is None or gpu_positions.device != device):
            # On the device, because a captured graph needs it.
            position_tensor = torch.tensor(positions, dtype=torch.int64, device="cpu")
            gpu_positions = as_normal_tensor(lambda tensor: tensor.to(device), position_tensor)
        self._permutation = (list(batch.keys()), positions, gpu_positions)
        return batch.permute(positions, gpu_positions if device.type == "cuda" else None)

    def _sample_weights(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the weights of a batch, float32 `[L]`; raise ValueError if it has none."""
        weights = batch.weights_or_none()
        if weights is None:
            raise ValueError(
                "this collection is weighted, so batches must have weights: make the "
                "KeyedJaggedTensor with weights=..., or the collection with is_weighted=False"
            )
        return weights if weights.dtype is torch.float32 else weights.float()

    def _id_counts(self, batch: KeyedJaggedTensor) -> list[int] | None:
        """Return the number of ids per group, without padding before them.

        None if the host does not know it or needs none, and for a batch with padding.
        """
        ids_per_feature = batch.length_per_key_or_none()
        active = self.groups.active
        if ids_per_feature is None or len(active) == 1 or num_padding_of(batch):
            return None
        ends = [0, *accumulate(ids_per_feature)]  # no sum(), which torch.export.save does not write
        unit_bounds = accumulate((len(slice_group.units) for slice_group in active), initial=0)
        return [ends[end] - ends[begin] for begin, end in pairwise(unit_bounds)]

    # Tables

    @property
    def device(self) -> torch.device:
        """Return the device of the tables."""
        return self.groups.device

    def shared_tables(self) -> Mapping[str, SharedTable]:
        """Return the tables that other collections read too, by name."""
        return dict(self._shared)

    def handles(self) -> Mapping[str, TableHandle]:
        """Return the handle of each table, by its name."""
        handles: Any = self._modules[self.handles_name]
        return dict(handles.items())

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of `weights`, `optimizer_state` and other memory of all tables."""
        return self.groups.nbytes()

    @property
    @shows_attribute_errors
    def tables(self) -> DynamicTables:
        """Return the handles of dynamic tables, by name (docs/dynamic.md#handles)."""
        return self.table_handles()

    def table_handles(self) -> DynamicTables:
        """Return the handles of dynamic tables, by name."""
        handles = self.handles()
        is_keyed_by_name = {config.name: config.storage.is_keyed for config in self.configs}
        return DynamicTables(
            {
                name: DynamicTable(name, {0: handles[name]})
                for name in is_keyed_by_name
                if is_keyed_by_name[name]
            },
            {
                c.name: type(c.storage).__name__
                for c in self.configs
                if not is_keyed_by_name[c.name]
            },
        )

    def reset_parameters(self, seeds: Mapping[str, int] | None = None) -> None:
        """Draw initial values from one seed per table; None draws seeds from torch's generator.

        Hash tables are emptied; optimizer states, steps and learning rates are reset. A shared
        table changes for all collections that read it. Call it also after `to_empty` of a
        collection that was constructed on `meta`.

        Raises:
            KeyError: `seeds` lacks a table; nothing is changed then.
        """
        self.groups.reset_parameters(seeds)

    def set_optimizers(self, optimizers: Mapping[str, Optimizer | None]) -> None:
        """Change the optimizers of tables: their weights are kept, their optimizer states reset.

        The optimizer of a shared table changes for all collections that read it. The other tables
        keep their states, steps and learning rates; a table whose new optimizer equals that of one
        of them has its step and learning rate.

        New modules replace the old ones, so the memory of all tables is needed twice for a moment,
        and a `FusedOptimizer` that was made before has no effect. The parameters stay the same
        objects, and frozen tables stay frozen.

        Args:
            optimizers: optimizer per table name. None uses the optimizer of the collection; a
                shared table, which many collections read, has none then and gets dense gradients.

        Raises:
            KeyError: there is no such table.
            TypeError: `optimizers` is not a dict, or an optimizer is not of `emblib.optim`.
            ValueError: a table does not support the optimizer; or the collection has a hash table
                with a backing store or in a memory budget. In each case nothing is changed.
        """
        if not isinstance(optimizers, Mapping):
            raise TypeError(f"optimizers must be a dict {{table: optimizer}}, got {optimizers!r}")
        names = {config.name for config in self.configs}
        unknown_names = sorted(optimizers.keys() - names)
        if unknown_names:
            raise KeyError(f"there are no tables {unknown_names}; there are {sorted(names)}")
        unshared_names = optimizers.keys() - self._shared.keys()
        if unshared_names:
            self.check_replaceable()
        # All memory is made before the first table changes.
        installs = [
            self._shared[name].prepare_optimizer(optimizer)
            for name, optimizer in optimizers.items()
            if name in self._shared
        ]
        configs = self.configs
        if unshared_names:
            self.configs = tuple(
                replace(config, optimizer=optimizers[config.name])
                if config.name in unshared_names
                else config
                for config in configs
            )
            try:
                make_groups = without_initial_values(self._make_groups)
                groups = make_groups(self.device, self.groups.seeds)
            except BaseException:
                self.configs = configs
                raise
        for install in installs:
            install()
        if unshared_names:
            self._replace_groups(groups, names - unshared_names)

    def check_replaceable(self) -> None:
        """Raise ValueError if a table cannot move to a new module, see `set_optimizers`."""
        for config in self.configs:
            config.storage.check_copyable(config)
        for handle in self.groups.handles:
            handle.check_replaceable()

    def read_shared(self, tables: Mapping[str, SharedTable]) -> None:
        """Read shared tables in place of the tables of this collection with the same names.

        New modules are made, as by `set_optimizers`; other tables keep their rows and states.
        """
        self._shared = {**self._shared, **tables}
        groups = without_initial_values(self._make_groups)(self.device, self.groups.seeds)
        self._replace_groups(groups, {config.name for config in self.configs})

    @without_gradients
    def _replace_groups(self, groups: TableGroups, trained_names: Collection[str]) -> None:
        """Install new groups of the same tables, with the rows of the present ones.

        Unshared tables in `trained_names` keep their optimizer states, steps and learning rates.
        """
        old_groups = self.groups
        groups.set_output_dtype(old_groups.output_dtype)
        for i, handle in groups.unshared_handles() if old_groups.device.type != "meta" else ():
            table_slice, source = groups.slices[i], old_groups.handles[i]
            if table_slice.config.name in trained_names:
                block = (0, 1) if table_slice.storage.is_keyed else None
                table_slice.storage.copy_slice(table_slice, source, handle, block)
                if has_hyperparams(source.module):
                    for module in handle.fused_modules():
                        module.load_hyperparams(source.module.hyperparams)
        groups.adopt(old_groups)
        groups.train(self.training)
        self._set_groups(groups)

    def quantized(self, bits: int | Mapping[str, int] = 8) -> Self:
        """Return a collection for inference with the same rows, quantised.

        Dense tables and tensor trains are quantised, other tables copied. The new collection is in
        evaluation mode; `init_fn` is not called. Besides this collection, it needs memory for the
        result and for 65,536 rows.

        Args:
            bits: bits per stored value, 8, 4 or 2, for all tables; or a mapping from table name to
                bits; tables that it does not name stay as they are.

        Raises:
            KeyError: there is no such table.
            TypeError: `bits` has a value that is not an int.
            ValueError: bits are not 8, 4 or 2, or a hash table has a backing store.
        """
        for config in self.configs:
            config.storage.check_copyable(config)
        quantized = without_initial_values(self._with_configs)(self.quantized_configs(bits))
        quantized.groups.set_output_dtype(self.groups.output_dtype)
        quantized.copy_rows(self)
        return quantized.eval()

    def quantized_configs(self, bits: int | Mapping[str, int] = 8) -> list[Any]:
        """Return the configurations of `quantized(bits)`; raise its errors for `bits`."""
        names = [config.name for config in self.configs]
        bits_by_table = dict(bits) if isinstance(bits, Mapping) else dict.fromkeys(names, bits)
        unknown_names = sorted(bits_by_table.keys() - set(names))
        if unknown_names:
            raise KeyError(f"there are no tables {unknown_names}; there are {sorted(names)}")
        return [
            replace(config, storage=Quantized(bits_by_table[config.name]), optimizer=None)
            if config.storage.has_dense_rows and config.name in bits_by_table
            else config
            for config in self.configs
        ]

    def copy_rows(self, source: TableCollection) -> None:
        """Copy the rows of a collection with the same tables; quantised tables quantise them."""
        source_storage = {config.name: config.storage for config in source.configs}
        handles: Mapping[str, Any] = self.handles()
        for config in self.configs:
            handle, source_handle = handles[config.name], source.handles()[config.name]
            if isinstance(config.storage, Quantized) and source_storage[config.name].has_dense_rows:
                first_row = 0
                for block in source_handle.dense_blocks():
                    handle.module.write_rows(handle.index, block, first_row)
                    first_row += len(block)
            else:
                handle.load_state_dict(source_handle.state_dict())
                optimizer_hooks.copy_decayed(source_handle, handle)

    def _with_configs(self, configs: Sequence[Any]) -> Self:
        """Return a new collection with other tables and the options of this one."""
        raise NotImplementedError

    # Fused optimizers, see emblib.collections.optimizers.HasFusedTables

    def fused_tables(self) -> list[FusedTableEntry]:
        """Return the tables with a fused optimizer, deferred ones included."""
        return fused_tables(self.handles_name, self.handles())

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer states of each parameter, as views, and a copy of `hyper`."""
        return optimizer_state(self.groups, self.handles_name, self.handles())

    def check_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise the KeyError or ValueError of `load_optimizer_state`; write nothing."""
        check_optimizer_state(self.groups, self.handles_name, self.handles(), state)

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the result of `optimizer_state`.

        Raises:
            KeyError: a parameter or one of its states is missing.
            ValueError: a state has another shape, or the optimizer cannot have the hyperparameters.
                Nothing is written in either case.
        """
        load_optimizer_state(self.groups, self.handles_name, self.handles(), state)

    def extra_repr(self) -> str:
        """Return the sizes of the tables."""
        return ", ".join(
            f"{c.name}: {c.num_embeddings} x {c.embedding_dim}" for c in self.configs[:4]
        ) + (f", ... {len(self.configs)} tables" if len(self.configs) > 4 else "")


class EmbeddingBagCollection(TableCollection):
    """Look up the features of a batch in tables, and pool the bags of each feature.

    Tables may differ in storage, dtype and optimizer; those that agree share a module. Without an
    `optimizer` tables leave dense gradients on their parameters, for `torch.optim`. With a fused
    optimizer, of the collection or of a table, backward updates the rows of the batch at once and
    stores no gradient, unless it is `deferred` (see `TableBatchedEmbeddingBags`, and
    `emblib.collections.optimizers` for learning rates and states).

    State dicts have `embedding_bags.<table>.weight` for a dense table, `.cores.<k>` for a tensor
    train, with a cache of rows `.cache.<name>` and `.counts.<name>` too, and `.keys`, `.weight` and
    other entries by key for a hash table. States of fused optimizers are in the state dict of
    `FusedOptimizer`; those of hash tables and cached rows are saved with the keys.

    Args:
        tables: configurations of the tables; the columns of the output follow their order.
        device: device of the tables; None is torch's default device.
        is_weighted: whether batches have weights, which scale the rows.
        optimizer: optimizer of `emblib.optim` for tables whose configuration has none. None leaves
            dense gradients on the parameters, for an optimizer of `torch.optim`.
        shared: tables that other collections read too; `tables` names those that this one reads.
        bounds_check: reaction to invalid ids and lengths, see `BoundsCheck`.

    Raises:
        TypeError: an argument has another type.
        ValueError: two tables or two outputs have the same name, a table differs from the shared
            table of its name, or a table does not support its optimizer.

    Example:
        >>> user = emblib.EmbeddingBagConfig(1_000, 16, "user")
        >>> item = emblib.EmbeddingBagConfig(500, 8, "item")
        >>> bags = emblib.EmbeddingBagCollection([user, item], optimizer=emblib.optim.Adagrad(0.1))
        >>> batch = emblib.KeyedJaggedTensor(  # 2 features of 2 samples
        ...     ["user", "item"], torch.tensor([7, 8, 3, 1, 4]), lengths=torch.tensor([1, 1, 3, 0])
        ... )
        >>> pooled = bags(batch)
        >>> pooled.values().shape, pooled["item"].shape
        (torch.Size([2, 24]), torch.Size([2, 8]))
        >>> pooled.values().sum().backward()  # updates 5 rows
    """

    handles_name = "embedding_bags"
    config_type = EmbeddingBagConfig
    configs: tuple[EmbeddingBagConfig, ...]

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        device: torch.device | str | None = None,
        *,
        is_weighted: bool = False,
        optimizer: Optimizer | None = None,
        shared: SharedTables | None = None,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
    ) -> None:
        check_bool("is_weighted", is_weighted)
        self._weighted = is_weighted
        super().__init__(tables, device, optimizer, shared, bounds_check)

    def _table_pooling(self) -> Pooling:
        """Return MEAN if all tables use it; otherwise SUM, and means are divided afterwards."""
        are_means = [config.pooling is Pooling.MEAN for config in self.configs]
        return Pooling.MEAN if are_means and all(are_means) else Pooling.SUM

    def _set_groups(self, groups: TableGroups) -> None:
        super()._set_groups(groups)
        self._names = [unit.name for unit in self._units]
        self._columns = list(groups.dims)
        divides = [self._needs_division(unit) for unit in self._units]
        self._bounded_means = [
            u
            for u, unit in enumerate(self._units)
            if divides[u] and bounds_output(self.configs[unit.table])
        ]
        groups.returns_sums_of_means = any(divides)
        groups.set_output_dtype(groups.output_dtype)
        needs_order = any(divides) or groups.order != list(range(len(self._units)))
        self._column_order = ColumnOrder(groups, divides) if needs_order else None

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled rows `[B, sum of dims]`: one block of columns per feature.

        They are float32 unless `groups.set_output_dtype` sets another dtype. Blocks follow the
        order of the configurations. A feature of several tables has one block per table,
        `feature@table`. Features without a table are ignored. Where features differ in their bags
        (variable batch sizes), the inverse indices expand the blocks to the whole batch.

        Raises:
            KeyError: the batch lacks a feature of a table.
            RuntimeError: a parameter was replaced, as by `torch.func.functional_call`; an id or
                length is invalid, with `BoundsCheck.FATAL`, for some lengths also with WARNING (see
                `BoundsCheck`); or `torch.export` of a collection with hash tables.
            TypeError: ids are not int32 or int64, nor uint64 for hash tables only.
            ValueError: ids are not one-dimensional, the collection is weighted and the batch is
                not, or features differ in their bags and the batch has no inverse indices.
        """
        if self._breaks_graph(features):
            return self._forward_uncompiled(features)
        batch, groups = self._checked(features), self.groups
        if not self._units or (batch.values().is_meta and not batch.variable_stride_per_key()):
            # Nothing is looked up, or there is no data: only the shape counts.
            shape = batch.stride(), sum(self._columns)
            output = torch.empty(shape, dtype=groups.output_dtype, device=batch.device())
            return KeyedTensor(self._names, self._columns, output)
        if batch.variable_stride_per_key():
            return KeyedTensor(self._names, self._columns, self._expand(batch))
        weights = self._sample_weights(batch) if self._weighted else None
        if groups.has_one_module:
            output = groups.forward(batch.values(), batch.offsets(), weights)
        else:
            id_counts = self._id_counts(batch)
            output = groups.forward(batch.values(), batch.offsets(), weights, id_counts=id_counts)
        if self._column_order is not None:
            output = self._column_order(output, batch)
            output = clip_blocks(output, self._columns, self._mean_rules()).to(groups.output_dtype)
        return KeyedTensor(self._names, self._columns, output)

    _forward_uncompiled = run_uncompiled(forward)

    def _needs_division(self, unit: TableFeature) -> bool:
        """Return whether the lookup returns sums of a feature whose output are means."""
        is_mean = self.configs[unit.table].pooling is Pooling.MEAN
        return is_mean and self.groups.pooling is Pooling.SUM

    def _mean_rules(self) -> list[UpdateRule | None]:
        """Return the bounds of the gradients of means that are divided after the lookup."""
        if not (self._bounded_means and torch.is_grad_enabled()):
            return []
        optimizers = {}
        for u in self._bounded_means:
            module, _ = self.groups.module_of(self._units[u].table)
            if has_hyperparams(module):
                optimizers[u] = module.optimizer
        return bounds_of_means(optimizers, len(self._units))

    def _expand(self, batch: KeyedJaggedTensor) -> Tensor:
        """Look up features of different batch sizes; expand them to `[B, columns]`."""
        strides, groups = batch.stride_per_key(), self.groups
        weights = self._sample_weights(batch) if self._weighted else None
        output = groups(
            batch.values(),
            batch.offsets(),
            weights,
            batch_sizes=[[stride] for stride in strides],
            id_counts=self._id_counts(batch),
        )
        row_by_feature, inverse_indices = _inverse_indices_of(batch)
        dims = [groups.dims[unit_index] for unit_index in groups.order]
        blocks = output.split([stride * dim for stride, dim in zip(strides, dims, strict=True)])
        lengths = batch.lengths().split(strides)
        blocks_by_unit: list[Tensor] = [output] * len(dims)
        rules = self._mean_rules() or [None] * len(dims)
        for position, unit_index in enumerate(groups.order):
            unit, block = self._units[unit_index], blocks[position].view(-1, dims[position])
            if self._needs_division(unit):
                block = block / lengths[position].clamp(min=1).unsqueeze(1)
                block = clip_blocks(block, [block.shape[1]], [rules[unit_index]])
            if inverse_indices is not None:
                block = block.index_select(0, inverse_indices[row_by_feature[unit.feature]])
            blocks_by_unit[unit_index] = block
        return torch.cat(blocks_by_unit, 1).to(groups.output_dtype)

    def _with_configs(self, configs: Sequence[EmbeddingBagConfig]) -> Self:
        return type(self)(
            configs,
            device=self.device,
            is_weighted=self._weighted,
            optimizer=self.optimizer,
            bounds_check=self.bounds_check,
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configurations of the tables."""
        return list(self.configs)

    _embedding_bag_configs = property(embedding_bag_configs)  # programs for TorchRec read it

    def is_weighted(self) -> bool:
        """Return whether batches have weights."""
        return self._weighted


def _inverse_indices_of(batch: KeyedJaggedTensor) -> tuple[dict[str, int], Tensor | None]:
    """Return {feature: row of the inverse indices}, and the indices `[F, B]`; else ({}, None)."""
    inverse_indices = batch.inverse_indices_or_none()
    if inverse_indices is not None:
        return {key: row for row, key in enumerate(inverse_indices[0])}, inverse_indices[1]
    if len(set(batch.stride_per_key())) > 1:
        raise ValueError(
            "features that differ in their bags need inverse indices to become one batch, got "
            f"{batch.stride_per_key()} bags: make the KeyedJaggedTensor with inverse_indices="
        )
    return {}, None


class EmbeddingCollection(TableCollection):
    """Look up every id of the features of a batch: one vector per id, as jagged as the ids.

    Storage, optimizers, parameters and errors are as in `EmbeddingBagCollection`; state dicts have
    `embeddings.<table>.weight` and so on. Tables may differ in their dims.

    Args:
        tables: configurations of the tables.
        device: device of the tables; None is torch's default device.
        need_indices: whether the result has the ids as its weights.
        optimizer: optimizer of `emblib.optim` for tables whose configuration has none. None leaves
            dense gradients on the parameters, for an optimizer of `torch.optim`.
        shared: tables that other collections read too; `tables` names those that this one reads.
        bounds_check: reaction to invalid ids and lengths, see `BoundsCheck`.

    Example:
        >>> history = emblib.EmbeddingCollection([emblib.EmbeddingConfig(1_000, 16, "item")])
        >>> batch = emblib.KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1])
        ... )
        >>> vectors = history(batch)["item"]
        >>> vectors.values().shape, vectors.lengths()
        (torch.Size([3, 16]), tensor([2, 1]))
    """

    handles_name = "embeddings"
    config_type = EmbeddingConfig
    configs: tuple[EmbeddingConfig, ...]

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        *,
        need_indices: bool = False,
        optimizer: Optimizer | None = None,
        shared: SharedTables | None = None,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
    ) -> None:
        check_bool("need_indices", need_indices)
        self._need_indices = need_indices
        super().__init__(tables, device, optimizer, shared, bounds_check)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the vectors `[L, D]` by feature; `feature@table` if several tables have it.

        They are float32 unless `groups.set_output_dtype` sets another dtype. Features follow the
        order of the configurations; features without a table are ignored.

        Raises:
            KeyError, RuntimeError, TypeError: see `EmbeddingBagCollection.forward`.
            ValueError: ids are not one-dimensional.
        """
        if self._breaks_graph(features):
            return self._forward_uncompiled(features)
        batch = self._checked(features)
        vectors = self._vectors(batch)
        lengths = batch.lengths().split(batch.stride_per_key())
        ids: Sequence[Tensor | None] = [None] * len(vectors)
        if self._need_indices:
            batch_ids = drop_first(batch.values(), num_padding_of(batch))
            ids = batch_ids.split(batch.length_per_key())
        vectors_by_name = {}
        for position in self._positions:
            name = self._names_in_order[position]
            vectors_by_name[name] = JaggedTensor.from_valid(
                vectors[position], ids[position], lengths[position], None
            )
        return vectors_by_name

    _forward_uncompiled = run_uncompiled(forward)

    def _vectors(self, batch: KeyedJaggedTensor) -> Sequence[Tensor]:
        """Return the vectors of each feature, `[L, D]`, in the order of the modules."""
        groups, ids_per_feature = self.groups, batch.length_per_key()
        values, offsets = batch.values(), batch.offsets()
        batch_sizes = None
        if batch.variable_stride_per_key():
            batch_sizes = [[stride] for stride in batch.stride_per_key()]
        if groups.has_one_module:
            output = groups.forward(values, offsets, batch_sizes=batch_sizes)
            return drop_first(output, num_padding_of(batch)).split(ids_per_feature)
        id_counts = self._id_counts(batch)
        outputs = groups.outputs(values, offsets, batch_sizes=batch_sizes, id_counts=id_counts)
        vectors: list[Tensor] = []
        for slice_group, output in zip(groups.active, outputs, strict=True):
            vectors += output.split(ids_per_feature[len(vectors) :][: len(slice_group.units)])
        return vectors

    def _set_groups(self, groups: TableGroups) -> None:
        super()._set_groups(groups)
        self._names_in_order = [self._units[unit].name for unit in groups.order]
        self._positions = sorted(range(len(groups.order)), key=groups.order.__getitem__)

    def _with_configs(self, configs: Sequence[EmbeddingConfig]) -> Self:
        return type(self)(
            configs,
            device=self.device,
            need_indices=self._need_indices,
            optimizer=self.optimizer,
            bounds_check=self.bounds_check,
        )

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configurations of the tables."""
        return list(self.configs)

    _embedding_configs = property(embedding_configs)  # programs for TorchRec read it

    def need_indices(self) -> bool:
        """Return whether the result has the ids as its weights."""
        return self._need_indices
