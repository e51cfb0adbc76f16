"""The tables of one sharded collection: the base of pooled and sequence collections.

`ShardedTables` makes the shards of this rank and fills them from the unsharded collection. It has
two stages of a sharded lookup: `input_request` returns the batch to send, `look_up_rows` looks up
the received ids. `ReplicatedTables` looks up the tables of which every rank has a replica.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from emblib.attribute_errors import shows_attribute_errors
from emblib.collections.checked_batch import check_ids, checked_batch
from emblib.collections.column_order import bounds_output
from emblib.collections.fused_states import RemoteOptimizer
from emblib.collections.groups import SliceKey, TableGroups, group_slices
from emblib.collections.optimizers.gradient_norms import GradientShare
from emblib.collections.optimizers.in_backward import trained_configs
from emblib.collections.shared import SharedTable
from emblib.grad_mode import without_gradients
from emblib.jagged import KeyedJaggedTensor
from emblib.jagged.keyed_layout import num_padding_of
from emblib.ops import autograd
from emblib.ops.derivatives import refuse_transforms
from emblib.optim import Optimizer
from emblib.sharding import fingerprint
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable
from emblib.sharding.codecs import CommPrecision, check_comm_precision
from emblib.sharding.input_dist import (
    IncomingBatch,
    InputDist,
    LocalBatch,
)
from emblib.sharding.input_messages import InputRequest
from emblib.sharding.layout import (
    CollectionLayout,
    Config,
    TableShard,
    block_routing,
    lay_out,
    send_ids_to_replicas,
    shape_of,
    slices_of,
    with_storage,
)
from emblib.sharding.parameters import ShardHandle
from emblib.sharding.plan import plan_from_configs
from emblib.sharding.ranks import RankGroup, invoke_on_rank_and_broadcast_result
from emblib.sharding.replicated_tables import ReplicatedTables, select_features
from emblib.sharding.sharding_types import ParameterSharding, Rule, Shard, World, table_wise
from emblib.sharding.shared_shards import SharedShards, check_shared_shards, check_source
from emblib.sharding.table_hyperparams import TableHyperparams
from emblib.sharding.tensor_train import share_cores
from emblib.specs import BoundsCheck, OptionEnum, Pooling, check_bool
from emblib.storage import TableSlice
from emblib.storage.base import has_hyperparams
from emblib.storage.initial_values import new_seeds


def common_seeds(
    slices: Iterable[TableSlice], source: TableGroups, ranks: RankGroup
) -> Mapping[str, int]:
    """Return a seed per table, the same on all ranks, which all call this.

    Initial values depend on it, and the hash of keys. Dynamic tables keep the seed that they have
    in `source` on rank 0, so that the hash of their keys stays the same.
    """
    all_slices = list(slices)

    def make_seeds() -> dict[str, int]:
        keyed_tables = [
            table_slice.config.name for table_slice in all_slices if table_slice.storage.is_keyed
        ]
        return new_seeds(all_slices) | {name: source.seeds[name] for name in keyed_tables}

    return invoke_on_rank_and_broadcast_result(ranks, 0, make_seeds)


def freeze_like(groups: TableGroups, source: TableGroups) -> None:
    """Freeze the shards whose tables are frozen in `source`, which has the whole tables.

    Shards of shared tables do not change. A parameter of a shard without a counterpart of the same
    name in the table, because their storages differ, is frozen if all parameters of the table are.
    """
    names = [table_slice.config.name for table_slice in source.slices]
    handles_by_table = dict(zip(names, source.handles, strict=True))
    for index, handle in groups.unshared_handles():
        whole_parameters = handles_by_table[groups.slices[index].config.name].named_parameters()
        is_trained_by_name = {name: parameter.requires_grad for name, parameter in whole_parameters}
        for name, parameter in handle.named_parameters():
            if not is_trained_by_name.get(name, any(is_trained_by_name.values())):
                parameter.requires_grad_(False)


@without_gradients
def copy_whole_tables(
    groups: TableGroups, source: TableGroups, blocks: Mapping[str, tuple[int, int]]
) -> None:
    """Copy weights and optimizer states of the whole tables into the shards of `groups`.

    Shards of frozen tables are frozen. Nothing else happens if the source is on `meta`. Shards of
    shared tables do not change. Tables that resume rows of an earlier process (`Storage.resumes`)
    keep them. A shard keeps its initial values if its storage is of another kind than that of the
    table. Hyperparameters are copied if the optimizers are equal.

    Args:
        groups: shards of tables.
        source: the whole tables.
        blocks: (number, count) by table name: a hash table gets block `number` of `count` equal
            blocks of keys. Other tables have no entry.
    """
    freeze_like(groups, source)
    if source.device.type == "meta":
        return
    source_index_by_table = {
        table_slice.config.name: index for index, table_slice in enumerate(source.slices)
    }
    for index, handle in groups.unshared_handles():
        table_slice = groups.slices[index]
        name = table_slice.config.name
        source_handle = source.handles[source_index_by_table[name]]
        if table_slice.storage.resumes(source_handle, handle):
            continue
        if type(source.slices[source_index_by_table[name]].storage) is type(table_slice.storage):
            table_slice.storage.copy_slice(table_slice, source_handle, handle, blocks.get(name))
        source_module, module = source_handle.module, handle.module
        if (
            has_hyperparams(module)
            and has_hyperparams(source_module)
            and module.optimizer == source_module.optimizer
        ):
            module.load_hyperparams(source_module.hyperparams)


@without_gradients
def broadcast_replicas(groups: TableGroups, ranks: RankGroup) -> None:
    """Copy the replicated tables of rank 0, with their hyperparameters, to all ranks.

    All ranks call this.
    """
    if ranks.size == 1:
        return
    tensors = [view for views in groups.all_views() for view in views.values()]
    modules = {id(module): module for module, _ in map(groups.module_of, range(len(groups.slices)))}
    hyperparams = [module.hyperparams for module in modules.values() if has_hyperparams(module)]
    for tensor in (*tensors, *hyperparams):
        buffer = tensor.contiguous()
        dist.broadcast(buffer, ranks.global_rank(0), group=ranks.group)
        if buffer is not tensor:
            tensor.copy_(buffer)


class GradientReduction(OptionEnum):
    """Reduction of the gradients of a table over ranks.

    MEAN divides by the number of ranks, as `DistributedDataParallel` does for dense parameters: a
    step minimizes the mean of the losses of all ranks. SUM does not divide.

    Example:
        >>> emblib.sharding.GradientReduction("sum")
        <GradientReduction.SUM: 'sum'>
    """

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class LocalShard:
    """A shard of a table on this rank: slice `index` of `groups`.

    `table` is the name of the table. A replica has a `shard` of rank -1 with the whole table.
    """

    table: str
    shard: Shard
    groups: TableGroups
    index: int


@dataclass(frozen=True)
class CollectionSettings:
    """The checked arguments of a sharded collection, equal on all ranks."""

    configs: tuple[Config, ...]
    plan: dict[str, ParameterSharding]
    optimizer: Optimizer | None
    comm_precision: CommPrecision
    gradients: GradientReduction


def agree_on_settings(
    source: Any,
    plan: Mapping[str, Rule | ParameterSharding],
    ranks: RankGroup,
    *,
    comm_precision: CommPrecision | None,
    gradients: GradientReduction,
    optimizer: Optimizer | None,
    shared: SharedShards,
    kind: type[nn.Module],
    dedup: bool = False,
) -> CollectionSettings:
    """Check the arguments of a sharded collection, and that they are equal on all ranks.

    All ranks call this. The arguments are those of `ShardedEmbeddingCollection`; `kind` is the
    class that `source` must have.

    Raises:
        ValueError: tables, plans, optimizers or settings differ between ranks or are wrong here, or
            a table is in a memory budget.
        TypeError: the source or a setting is of a wrong type, or `shared` lacks a table.
        RuntimeError: another rank raised one of these errors.
    """

    def check() -> CollectionSettings:
        check_bool("dedup", dedup)
        check_source(source, kind)
        check_shared_shards(source, shared)
        for handle in source.groups.handles:
            handle.check_replaceable()
        default_optimizer = optimizer or source.optimizer
        reduction = GradientReduction(gradients)
        configs = trained_configs(source, optimizer)
        shardings = plan_from_configs(configs, plan, World(ranks.size, ranks.local_size))
        return CollectionSettings(
            configs=configs,
            plan=shardings,
            optimizer=default_optimizer,
            comm_precision=check_comm_precision(comm_precision),
            gradients=reduction,
        )

    def describe(settings: CollectionSettings | None) -> fingerprint.Description:
        if settings is None:
            return {}
        common = {
            "": fingerprint.settings_of(
                ranks,
                comm_precision=settings.comm_precision,
                gradients=gradients,
                dedup=dedup,
            )
        }
        tables = fingerprint.collection_description(
            source, settings.configs, settings.plan, settings.optimizer
        )
        return fingerprint.merge_descriptions(common, tables)

    return fingerprint.agree(ranks, check, describe)


class ShardedTables(nn.Module):
    """Tables sharded over ranks, and the input dist of their batches.

    All ranks must construct it together, with equal arguments; `agree_on_settings` compares them.

    Args:
        source: the unsharded collection. Its weights and optimizer states are copied; replicated
            tables are copied from rank 0. On `meta`, initial values are drawn from seeds of rank 0,
            so that they do not depend on the plan.
        configs: the tables of the collection.
        plan: the sharding of each table, by name.
        ranks: the processes.
        pooled: whether rows are pooled.
        optimizer: optimizer of tables whose configuration has none.
        gradients: how table gradients are reduced over ranks.
        shared: the shards of tables that other collections read too, by table name.

    Attributes:
        scale: factor of the gradients of tables, 1 / ranks for the mean.
        layout: the units of all ranks.
        groups: the shards of this rank, without replicas.
        replicated: the replicated tables; None without any, and on one rank.
        hyperparams: hyperparameters of tables, which ranks compare in backward.

    Raises:
        ValueError: the plan does not fit the tables, or only some replicated tables have a fused
            optimizer.
        RuntimeError: another rank could not make its shards.
    """

    def __init__(
        self,
        source: Any,
        configs: Sequence[Config],
        plan: Mapping[str, ParameterSharding],
        ranks: RankGroup,
        *,
        pooled: bool,
        optimizer: Optimizer | None,
        gradients: GradientReduction,
        shared: SharedShards,
    ) -> None:
        super().__init__()
        self.ranks, self.plan, self.shared = ranks, dict(plan), dict(shared)
        is_mean = GradientReduction(gradients) is GradientReduction.MEAN
        self.scale = 1.0 / ranks.size if is_mean else 1.0
        self.configs = tuple(configs)
        self._is_weighted = pooled and source.is_weighted()
        self._bounds_check = source.bounds_check
        self._all_keyed = all(config.storage.is_keyed for config in configs)
        self._check_plan()
        pooling = Pooling.SUM if pooled else Pooling.NONE

        # Units are in the order in which `TableGroups` returns their rows.
        def arrange(slices: Sequence[TableSlice], slice_of_unit: Sequence[int]) -> list[int]:
            group_specs = group_slices(slices, slice_of_unit, optimizer, pooling, shared)
            return [unit for group_spec in group_specs for unit in group_spec.units]

        layout = lay_out(self.configs, self._effective_plan(), ranks.size, arrange, pooled=pooled)
        seeds = common_seeds(map(TableSlice.whole, self.configs), source.groups, ranks)
        local_layout, replicated = layout.ranks[ranks.rank], layout.replicated

        def make_groups(
            shards: Sequence[TableShard], blocks: Mapping[str, tuple[int, int]]
        ) -> TableGroups:
            return self._make_groups(source, shards, blocks, pooling, optimizer, seeds)

        def allocate() -> tuple[TableGroups, TableGroups | None]:
            groups = make_groups(local_layout.shards, self._key_blocks(local_layout.shards))
            share_cores(groups, local_layout.shards, self.configs, self._effective_plan(), ranks)
            return groups, make_groups(replicated.shards, {}) if replicated.shards else None

        # If a rank has not enough memory, all ranks raise, rather than wait in the next collective.
        self.groups, replicas = fingerprint.agree(ranks, allocate)
        self.replicated = None
        if replicas is not None:
            broadcast_replicas(replicas, ranks)
            is_synchronised = _is_fused(replicas)
            if is_synchronised:
                layout = send_ids_to_replicas(layout)
            self.replicated = ReplicatedTables(
                layout, replicas, ranks, is_synchronised=is_synchronised
            )
        # The final layout: `send_ids_to_replicas` has added units to it.
        self.layout, self._local_layout = layout, layout.ranks[ranks.rank]
        routing = block_routing(self.configs, layout)
        self._input_dist = InputDist(layout, routing, ranks, self.scale, pooled=pooled)
        self._keys = [feature.key for feature in layout.features]
        self._order_by_keys: dict[tuple[str, ...], list[int]] = {}
        self.hyperparams = self._table_hyperparams()

    layout: CollectionLayout

    def _make_groups(
        self,
        source: Any,
        shards: Sequence[TableShard],
        blocks: Mapping[str, tuple[int, int]],
        pooling: Pooling,
        optimizer: Optimizer | None,
        seeds: Mapping[str, int],
    ) -> TableGroups:
        """Return the tables of some shards, filled from `source`; see `copy_whole_tables`."""

        # A shard of a shared table is made by the first collection that reads it.
        def make_shared(table_slice: TableSlice) -> SharedTable:
            table = SharedTable(table_slice, self.ranks.device, seeds)
            copy_whole_tables(table.groups, source.groups, {})
            return table

        slices = slices_of(self.configs, self.plan, shards)
        groups = TableGroups(
            slices,
            self._shards_of_units(shards),
            pooling=pooling,
            optimizer=optimizer,
            device=self.ranks.device,
            seeds=seeds,
            shared={
                SliceKey.of(table_slice): self.shared[table_slice.config.name].shard_of(
                    table_slice, make_shared
                )
                for table_slice in slices
                if table_slice.config.name in self.shared
            },
        )
        groups.set_bounds_check(source.bounds_check, self._features_of(shards))
        copy_whole_tables(groups, source.groups, blocks)
        return groups

    def _check_plan(self) -> None:
        names = {config.name for config in self.configs}
        if names != set(self.plan):
            raise ValueError(
                f"a plan must have exactly the tables of its collection: missing are "
                f"{sorted(names - set(self.plan))}, unknown are {sorted(set(self.plan) - names)}"
            )
        for config in self.configs:
            sharding = self.plan[config.name]
            shape = shape_of(config, sharding.storage)
            sharding.check(config.name, shape, self.ranks.size)
            _check_keyed(config, sharding, self.ranks.size)

    def _effective_plan(self) -> dict[str, ParameterSharding]:
        """Return the plan; with one rank, replicated tables become table-wise."""
        if self.ranks.size > 1:
            return self.plan
        return {
            config.name: table_wise(0)(shape_of(config), World(1, 1))
            if self.plan[config.name].is_replicated
            else self.plan[config.name]
            for config in self.configs
        }

    def _shards_of_units(self, shards: Sequence[TableShard]) -> list[int]:
        """Return the index in `shards` of the shard that each unit reads."""
        features = [config.feature_names for config in self.configs]
        return [index for index, shard in enumerate(shards) for _ in features[shard.table]]

    def _features_of(self, shards: Sequence[TableShard]) -> list[str]:
        """Return the name of each unit's feature."""
        return [name for shard in shards for name in self.configs[shard.table].feature_names]

    def _key_blocks(self, table_shards: Sequence[TableShard]) -> dict[str, tuple[int, int]]:
        """Return the `blocks` of `copy_whole_tables` for these shards."""
        blocks, plan = {}, self._effective_plan()
        for table_shard in table_shards:
            config = self.configs[table_shard.table]
            if config.storage.is_keyed:
                shards = sorted(plan[config.name].shards, key=lambda shard: shard.rows)
                blocks[config.name] = (shards.index(table_shard.shard), len(shards))
        return blocks

    def local_shards(self) -> list[LocalShard]:
        """Return the table shards on this rank, including replicas."""
        shards_and_groups = [(self._local_layout.shards, self.groups)]
        if self.replicated is not None:
            shards_and_groups.append((self.layout.replicated.shards, self.replicated.groups))
        return [
            LocalShard(self.configs[table_shard.table].name, table_shard.shard, groups, index)
            for table_shards, groups in shards_and_groups
            for index, table_shard in enumerate(table_shards)
        ]

    def _table_hyperparams(self) -> TableHyperparams:
        modules = [
            (
                shard.table,
                shard.groups.module_of(shard.index)[0],
                shard.groups.handles[shard.index],
            )
            for shard in self.local_shards()
        ]
        optimizers = {
            config.name: config.optimizer or self.groups.optimizer for config in self.configs
        }
        bounded_means = [
            self.configs[feature.table].name
            for feature in self.layout.features
            if feature.is_mean and bounds_output(self.configs[feature.table])
        ]
        return TableHyperparams(
            self._effective_plan(), modules, self.ranks, optimizers, bounded_means
        )

    def handles(self) -> list[ShardHandle]:
        """Return the handle of each shard on this rank, with the shares of its gradients."""
        shard_handles = []
        for local_shard in self.local_shards():
            first_share = other_share = GradientShare.SHARD
            if self.replicated is not None and local_shard.groups is self.replicated.groups:
                first_share = other_share = GradientShare.REPLICA
            elif self.ranks.rank != min(
                shard.rank for shard in self._effective_plan()[local_shard.table].shards
            ):
                other_share = GradientShare.COUNTED_ELSEWHERE  # cores that all shards have
            handle = local_shard.groups.handles[local_shard.index]
            shard_handles.append(ShardHandle(local_shard.table, handle, first_share, other_share))
        return shard_handles

    def storage_config(self, table: str) -> Config:
        """Return the configuration of a table with the storage that the plan selects.

        Raises:
            KeyError: there is no table of this name.
        """
        configs = {config.name: config for config in self.configs}
        if table not in configs:
            raise KeyError(f"there is no table {table!r}; the tables are {', '.join(configs)}")
        return with_storage(configs[table], self.plan[table].storage)

    def remote_optimizer(self, table: str) -> RemoteOptimizer | None:
        """Return the optimizer of a table that no module on this rank updates, else None."""
        return self.hyperparams.remotes.get(table)

    # One batch

    @property
    @shows_attribute_errors
    def counts_uses(self) -> bool:
        """Return whether one of the tables counts the uses of its ids."""
        return any(self.storage_config(name).storage.counts_uses for name in self.plan)

    def input_request(
        self, features: KeyedJaggedTensor | None, use_counts: Mapping[str, Tensor] | None = None
    ) -> InputRequest | Awaitable[IncomingBatch]:
        """Return the batch to send, or the batch to look up if nothing needs to be sent.

        It sends nothing. If it raises, `start_joint_input_dist` lets the other ranks raise too.

        Args:
            features: the batch; None for a rank that has none.
            use_counts: number of uses that each id stands for, int64 `[L]` by key of a feature;
                None if each id stands for one use. Ignored if no table counts uses.

        Raises:
            KeyError: the batch lacks a feature.
            TypeError: `features` is not a batch, or the dtype of its values is not one of ids.
            ValueError: values have another number of dimensions than 1; or see the subclass.
            RuntimeError: the collection is on meta; lengths do not fit the ids, see
                `checked_batch`; or with `BoundsCheck.FATAL` and several ranks an id is outside its
                table.
            NotImplementedError: the batch is in a transform of `torch.func`, see
                `refuse_transforms`.
        """
        if features is None:
            return InputRequest(self._input_dist, None)
        inputs = self._to_local_batch(features)
        if use_counts is not None and self.counts_uses:
            inputs = inputs._replace(use_counts=torch.cat([use_counts[key] for key in self._keys]))
        if self._is_local:
            return DeferredAwaitable(lambda: self._incoming_batch(inputs))
        return InputRequest(self._input_dist, inputs)

    @property
    def _is_local(self) -> bool:
        """Return whether this rank looks up every batch itself, so that nothing is sent."""
        has_all_features = len(self._local_layout.units) == len(self.layout.features)
        return self.ranks.size == 1 and self._input_dist.has_whole_tables and has_all_features

    def _to_local_batch(self, features: KeyedJaggedTensor) -> LocalBatch:
        """Check a batch, and return the features of the tables in the order of the layout."""
        if self._input_dist.features.is_meta:
            raise RuntimeError(
                "the sharded collection is on meta, where it has no memory: move it with "
                "to_empty(device=...) and load its weights, or shard the model again"
            )
        if not isinstance(features, KeyedJaggedTensor):
            features = KeyedJaggedTensor.adopt(features)
        features = self.check_batch(features)
        keys = features.keys()
        if keys != self._keys:
            features = features.permute(self._order(tuple(keys)))
        inputs = LocalBatch(
            features.values(),
            features.lengths(),
            features.offsets(),
            self._weights(features),
            features.stride_per_key(),
            features.length_per_key,
            features.variable_stride_per_key(),
            self._inverse(features),
        )
        if self._bounds_check is BoundsCheck.FATAL and self.ranks.size > 1:
            self._refuse_invalid_ids(inputs)
        return inputs

    def _refuse_invalid_ids(self, inputs: LocalBatch) -> None:
        """Raise RuntimeError for an id outside its table, as kernels do, before ids are sent.

        Otherwise the kernels of another rank would raise, and this rank would wait for that rank.
        The host waits for a GPU.
        """
        for feature, (begin, end) in zip(
            self.layout.features, pairwise(inputs.starts().tolist()), strict=True
        ):
            config = self.configs[feature.table]
            if config.storage.is_keyed:
                continue
            ids = inputs.ids[begin:end].long()  # torch would wrap a bound beyond int32
            invalid_ids = ids[(ids < -1) | (ids >= config.num_embeddings)]
            if len(invalid_ids):
                raise RuntimeError(
                    f"bounds_check: indices of feature {feature.key!r}, table {config.name!r} must "
                    f"be in [0, {config.num_embeddings}), or -1 for a pruned one, got "
                    f"{int(invalid_ids[0])}; with BoundsCheck.WARNING it would read row 0"
                )

    def check_batch(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Check the ids and lengths of a batch, before any are sent; return a batch to use.

        If one module of this rank looks up the whole batch, its kernels check the lengths instead.

        Raises:
            TypeError, ValueError, RuntimeError: see `check_ids` and `checked_batch`.
        """
        check_ids(features.values(), allow_uint64=self._all_keyed)
        unit_features = [unit.feature for unit in self._local_layout.units]
        is_sorted = unit_features == sorted(unit_features)
        is_whole = self._is_local and is_sorted and features.keys() == self._keys
        if is_whole and self.groups.has_one_module and self.groups.pooling is not Pooling.NONE:
            return features
        batch = checked_batch(features, self._bounds_check)
        if not num_padding_of(batch):
            return batch
        return batch.permute(range(len(batch.keys())))  # views, without the padding in front

    def _weights(self, features: KeyedJaggedTensor) -> Tensor | None:
        """Return the weights of a batch in float32; None if the collection is not weighted."""
        weights = features.weights_or_none() if self._is_weighted else None
        refuse_transforms("the weights of a batch", weights, features.values())
        return weights if weights is None or weights.dtype is torch.float32 else weights.float()

    def _inverse(self, features: KeyedJaggedTensor) -> list[Tensor] | None:
        """Return the inverse indices of each feature, `[B]`; None for a batch without any."""
        inverse = features.inverse_indices_or_none()
        if inverse is None:
            return None
        keys, indices = inverse
        return [indices[keys.index(key)] for key in self._keys]

    def _order(self, keys: tuple[str, ...]) -> list[int]:
        """Return the index of each feature in `keys`; raise KeyError if one is missing."""
        if keys not in self._order_by_keys:
            missing_keys = sorted(set(self._keys) - set(keys))
            if missing_keys:
                raise KeyError(f"the batch has no features {missing_keys}; it has {list(keys)}")
            self._order_by_keys[keys] = [keys.index(key) for key in self._keys]
        return self._order_by_keys[keys]

    def _incoming_batch(self, inputs: LocalBatch) -> IncomingBatch:
        """Return the batch of a lookup without communication."""
        unit_features = [unit.feature for unit in self._local_layout.units]
        ids, offsets, weights = inputs.ids, inputs.offsets, inputs.weights
        use_counts = inputs.use_counts
        if unit_features != sorted(unit_features):
            order = self._input_dist.unit_features
            ids, offsets, weights = select_features(inputs, unit_features, order)
            if use_counts is not None:
                counts_as_ids = inputs._replace(ids=use_counts, weights=None)
                use_counts, _, _ = select_features(counts_as_ids, unit_features, order)
        return IncomingBatch(
            inputs=inputs,
            sent=None,
            ids=ids,
            offsets=offsets,
            weights=weights,
            bag_counts=[[inputs.bag_counts[feature]] for feature in unit_features],
            is_by_unit=inputs.is_variable,
            ids_per_segment=offsets,  # not used
            num_ids=[ids.numel()],
            num_replicated_ids=0,
            use_counts=use_counts,
        )

    def look_up_rows(self, received: IncomingBatch) -> Tensor:
        """Look up the received ids in the shards of this rank.

        In training dynamic tables insert new ids.

        Returns:
            Pooled rows of the bags of all ranks, `[bags, columns]`, rank after rank; flat if
            `received.is_by_unit`, then for each rank unit after unit. Without pooling `[L, dim]`,
            unit after unit.

        Raises:
            ValueError: the collection is weighted and no rank's batch has weights.
        """
        # Checked only now, after the input_dist: no rank waits if another one raises here.
        if self._is_weighted and received.weights is None:
            raise ValueError(
                "this collection is weighted, so batches must have weights: make the "
                "KeyedJaggedTensor with weights=..., or the collection with is_weighted=False"
            )
        use_counts = received.use_counts
        if len(received.bag_counts) == len(self._local_layout.units):
            ids, offsets, weights = received.ids, received.offsets, received.weights
        else:
            ids, offsets, weights = self._without_replicas(received)
            use_counts = None if use_counts is None else use_counts[: ids.numel()]
        if not self._local_layout.units and weights is not None and weights.requires_grad:
            # The other ranks exchange gradients of weights in backward, so this rank must too.
            return weights[:0].view(0, 0)
        batch_sizes = (
            received.bag_counts[: len(self._local_layout.units)] if received.is_by_unit else None
        )
        return self.groups(ids, offsets, weights, batch_sizes=batch_sizes, use_counts=use_counts)

    def prefetch(self, received: IncomingBatch) -> None:
        """Prefetch the rows that `look_up_rows` will look up for this batch into caches."""
        ids, offsets = received.ids, received.offsets
        if len(received.bag_counts) > len(self._local_layout.units):
            ids, offsets, _ = self._without_replicas(received)
        batch_sizes = (
            received.bag_counts[: len(self._local_layout.units)] if received.is_by_unit else None
        )
        self.groups.prefetch(ids, offsets, batch_sizes=batch_sizes)

    def _without_replicas(self, received: IncomingBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ids, offsets and weights of a batch without those of replicated tables."""
        num_bags = sum(map(sum, received.bag_counts[: len(self._local_layout.units)]))
        num_ids = received.ids.numel() - received.num_replicated_ids
        weights = received.weights
        return (
            received.ids[:num_ids],
            received.offsets[: num_bags + 1],
            None if weights is None else weights[:num_ids],
        )


def _check_keyed(config: Config, sharding: ParameterSharding, world_size: int) -> None:
    """Raise ValueError for a sharding that keyed storage does not support."""
    is_keyed = config.storage.is_keyed
    if sharding.storage is not None and is_keyed != sharding.storage.is_keyed:
        raise ValueError(
            f"table {config.name}: a plan cannot make a table a hash table or a hash table another "
            f"one, got {sharding.storage} for {config.storage}: change the storage of its "
            "configuration"
        )
    if is_keyed and sharding.is_replicated and world_size > 1:
        raise ValueError(
            f"table {config.name}: replicas of a hash table would each insert other keys, so it "
            "cannot be data_parallel; use table_wise(rank), or row_wise() to divide its keys"
        )


def _is_fused(groups: TableGroups) -> bool:
    """Return whether all optimizers are fused; raise ValueError if only some are."""
    are_fused = {autograd.is_fused(slice_group.module.optimizer) for slice_group in groups.groups}
    if len(are_fused) > 1:
        raise ValueError(
            "replicated tables of one collection must all have a fused optimizer, or none of them"
        )
    return are_fused == {True}
