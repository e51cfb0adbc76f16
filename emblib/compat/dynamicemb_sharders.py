"""DynamicEmb's sharders, which make tables dynamic, and its functions of sharded tables.

In DynamicEmb, a table becomes dynamic when its collection is sharded, if the plan says so. Here
`prepare` gives such a table hash storage before that; then the collection is sharded like others.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from emblib import BackingStore, DynamicEmbeddingBags, HostRows, optim
from emblib import collections as emblib_collections
from emblib.checkpoints import owner
from emblib.compat import dynamicemb_arguments
from emblib.compat.dynamicemb_functions import DynamicEmbTables
from emblib.compat.dynamicemb_tables import split_tiers
from emblib.compat.dynamicemb_types import DynamicEmbTableOptions
from emblib.compat.fbgemm_types import SparseType
from emblib.compat.torchrec_sharders import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    ranks_of,
    replace_child,
)
from emblib.compat.torchrec_sharding import ParameterSharding, ShardingEnv
from emblib.dynamic.saving import dynamicemb_files
from emblib.dynamic.saving.dynamicemb import export_dynamicemb
from emblib.dynamic.saving.dynamicemb_files import DynamicEmbTable
from emblib.dynamic.saving.entries import Entries, concatenate
from emblib.optim import Optimizer
from emblib.sharding import RankGroup, fingerprint
from emblib.sharding.checkpoints.saved_tables import StateOfTables
from emblib.sharding.checkpoints.sharded_table import KeyedRows
from emblib.storage import Hash

DYNAMICEMB_KERNEL = "DynamicEmb"
"""The `customized_compute_kernel` of dynamic tables."""


@dataclass
class DynamicEmbParameterSharding(ParameterSharding):
    """Sharding of a dynamic table: row-wise over all ranks, by keys.

    Attributes:
        customized_compute_kernel: name of the kernel, for programs that read it.
        dist_type: rule that routes keys to the files of ranks in dumps.
        dynamicemb_options: options of the table, with `dim` and `max_capacity` set.
    """

    compute_kernel: str = "customized_kernel"
    customized_compute_kernel: str | None = DYNAMICEMB_KERNEL
    dist_type: str = "roundrobin"
    dynamicemb_options: DynamicEmbTableOptions = field(default_factory=DynamicEmbTableOptions)

    def to_emblib(self) -> Any:
        """Return emblib's form of the sharding, for a collection that `prepare` returned."""
        names = [f.name for f in fields(ParameterSharding) if f.name != "compute_kernel"]
        return ParameterSharding(**{name: getattr(self, name) for name in names}).to_emblib()


@dataclass(frozen=True)
class DynamicEmbHash(Hash):
    """Hash storage of a table that a plan of DynamicEmb made dynamic, with DynamicEmb's options."""

    options: DynamicEmbTableOptions | None = field(default=None, compare=False, repr=False)


def hash_storage(
    options: DynamicEmbTableOptions,
    name: str,
    rule: Optimizer,
    world_size: int,
    *,
    initial_state: float = 0.0,
    device: torch.device | str = "cpu",
) -> tuple[int, DynamicEmbHash]:
    """Return the number of rows of a table on the devices of all ranks, and its storage.

    Args:
        options: options of the table, with `dim` and `max_capacity` set.
        name: name of the table.
        rule: optimizer, whose states take memory.
        world_size: number of ranks.
        initial_state: initial value of the optimizer states of a new row.
        device: device of the tables.

    Raises:
        NotImplementedError: an option is not supported, or `training` is False.
        TypeError, ValueError: an option is missing or invalid, see `dynamicemb_arguments.spec`.
    """
    if not options.training:
        raise NotImplementedError(
            f"table {name!r} has training=False, which keeps no optimizer state: in a sharded "
            "collection leave it out and call eval(), or use BatchedDynamicEmbeddingTablesV2"
        )
    spec = dynamicemb_arguments.spec(options, name, initial_state)
    (fast_spec,), split_store = split_tiers([options], [spec], rule, torch.device(device))
    backing = split_store
    if split_store is not None and options.external_storage is None:
        store: Any = split_store.store
        (rows_per_rank,) = store.capacity
        host_rows = HostRows(rows_per_rank * world_size, store.eviction)
        backing = BackingStore(host_rows, split_store.mode)
    names = {f.name for f in fields(Hash)} & {f.name for f in fields(fast_spec)}
    storage = DynamicEmbHash(
        **{field_name: getattr(fast_spec, field_name) for field_name in names},
        backing=backing,
        options=options,
    )
    return fast_spec.rows * world_size, storage


def dynamic_config(
    config: Any, sharding: DynamicEmbParameterSharding, rule: Optimizer, **more: Any
) -> Any:
    """Return the configuration of a table with hash storage of the capacity in the plan.

    Args:
        config: configuration of the table.
        sharding: sharding of the table; `ranks` has one entry per rank.
        rule: optimizer of the table, if its configuration has none.
        more: keyword arguments of `hash_storage`.
    """
    world_size = len(sharding.ranks or ())
    num_rows, storage = hash_storage(
        sharding.dynamicemb_options, config.name, config.optimizer or rule, world_size, **more
    )
    data_type = sharding.dynamicemb_options.embedding_dtype or config.data_type
    config_class = (
        emblib_collections.EmbeddingBagConfig
        if isinstance(config, emblib_collections.EmbeddingBagConfig)
        else emblib_collections.EmbeddingConfig
    )
    values = {f.name: getattr(config, f.name) for f in fields(config_class)}
    values |= {"num_embeddings": num_rows, "storage": storage, "data_type": data_type}
    values |= {"weight_init_min": None, "weight_init_max": None, "init_fn": None}
    return config_class(**values)


def _has_dynamic(shardings: Mapping[str, Any]) -> bool:
    return any(isinstance(each, DynamicEmbParameterSharding) for each in shardings.values())


class _DynamicSharder:
    """Base of both sharders: what they add to TorchRec's sharders for dynamic tables."""

    optimizer: Optimizer | None
    module_type: Any  # class of collections that it shards
    initial_state: float  # initial value of the optimizer states of a new row
    options: dict[str, Any]

    def prepare(self, module: nn.Module, plan: Any) -> nn.Module:
        """Replace the collections with dynamic tables in the plan by ones with hash storage.

        The model is changed in place and returned. If `module` is itself such a collection, it does
        not change, and the new collection is returned.

        Raises:
            ValueError: such a collection is not on the meta device: its rows would be lost.
        """
        for path, tables in plan.plan.items():
            collection = module.get_submodule(path)
            if not _has_dynamic(tables) or not isinstance(collection, self.module_type):
                continue
            dynamic_collection = self.dynamic_collection(collection, tables)
            if not path:
                return dynamic_collection
            replace_child(module, collection, dynamic_collection)
        return module

    def dynamic_collection(self, collection: Any, tables: Mapping[str, Any]) -> nn.Module:
        """Return a collection on the meta device whose dynamic tables have hash storage.

        Args:
            collection: collection on the meta device.
            tables: sharding of each table, by name.

        Raises:
            ValueError: `collection` is on another device.
        """
        if collection.device.type != "meta":
            raise ValueError(
                "a collection with dynamic tables has no rows before it is sharded: make it with "
                "device=torch.device('meta')"
            )
        rule = self.optimizer or collection.optimizer or optim.SGD(0.0)
        configs = [
            dynamic_config(config, tables[config.name], rule, initial_state=self.initial_state)
            if isinstance(tables.get(config.name), DynamicEmbParameterSharding)
            else config
            for config in collection.configs
        ]
        options: dict[str, Any] = {"device": "meta", "optimizer": collection.optimizer}
        if isinstance(collection, emblib_collections.EmbeddingBagCollection):
            options["is_weighted"] = collection.is_weighted()
            return EmbeddingBagCollection(configs, **options)
        options["need_indices"] = collection.need_indices()
        return EmbeddingCollection(configs, **options)

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Return the sharded collection, see `ModuleSharder.shard`. All ranks must call this.

        Raises:
            ValueError: `module` has dynamic tables, and is not on the meta device.
        """
        parent: Any = super()
        if _has_dynamic(params):
            ranks = ranks_of(env, device)
            module = fingerprint.agree(ranks, lambda: self.dynamic_collection(module, params))
        sharded: nn.Module = parent.shard(module, params, env, device, module_fqn)
        self.finish(sharded)
        return sharded

    def finish(self, model: nn.Module) -> None:
        """Make `torch.save` leave the rows of dynamic tables out of state dicts of a sharded model.

        `DistributedModelParallel` calls this after it has sharded the model.
        """
        for module in model.modules():
            if dynamic_tables_in(module) is not None:
                module.register_state_dict_post_hook(_leave_rows_to_dump)


class RowsLeftToDump(KeyedRows):
    """Rows of a dynamic table in a state dict, which pickling and `copy.deepcopy` drop.

    DynamicEmb's state dicts do not have the rows either: `DynamicEmbDump` writes them.
    `emblib.sharding.checkpoints.save` writes all rows.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        warnings.warn(
            "rows of dynamic tables are not in what torch.save writes, as in DynamicEmb: use "
            "DynamicEmbDump for them, or emblib.sharding.checkpoints.save for the whole model",
            stacklevel=2,
        )
        return torch.empty(0, *self.size()[1:], dtype=self.dtype, device="cpu").__reduce_ex__(
            protocol
        )


def _leave_rows_to_dump(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the rows of dynamic tables in a state dict by `RowsLeftToDump`."""
    tables = dynamic_tables_in(module)
    assert tables is not None
    prefixes = tuple(f"{prefix}{module.handles_name}.{name}." for name in tables.table_names)
    for key, value in state.items():
        if key.startswith(prefixes) and isinstance(value, KeyedRows):
            state[key] = RowsLeftToDump(
                value.size(), value.shards, value.parts, value.ranks, value.dtype
            )


def _split_params(fused_params: Mapping[str, Any] | None) -> tuple[dict[str, Any], Any]:
    """Return `fused_params` without two of DynamicEmb's, and the initial optimizer state.

    Raises:
        ValueError: `output_dtype` is not float32.
    """
    params = dict(fused_params or {})
    output = params.pop("output_dtype", None)
    if output not in (None, SparseType.FP32, torch.float32):
        raise ValueError(f"output_dtype must be FP32, got {output}: lookups return float32")
    return params, params.pop("initial_accumulator_value", 0.0)


class DynamicEmbeddingCollectionSharder(_DynamicSharder, EmbeddingCollectionSharder):
    """Sharder of embedding collections with dynamic tables, with TorchRec's arguments.

    `fused_params` may have `initial_accumulator_value`, the initial optimizer state of a new row.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
        use_index_dedup: bool = False,
    ) -> None:
        params, self.initial_state = _split_params(fused_params)
        super().__init__(params, qcomm_codecs_registry, use_index_dedup)


class DynamicEmbeddingBagCollectionSharder(_DynamicSharder, EmbeddingBagCollectionSharder):
    """Sharder of embedding bag collections with dynamic tables, with TorchRec's arguments.

    `fused_params` may have `initial_accumulator_value`, the initial optimizer state of a new row.
    """

    def __init__(
        self, fused_params: Mapping[str, Any] | None = None, qcomm_codecs_registry: Any = None
    ) -> None:
        params, self.initial_state = _split_params(fused_params)
        super().__init__(params, qcomm_codecs_registry)


# Functions of sharded tables


class ShardedCollectionTables(DynamicEmbTables):
    """The dynamic tables of a sharded collection, whose keys emblib's hash routes to ranks.

    In a dump `dist_type` routes keys to the files of ranks, as DynamicEmb's loader expects.
    Therefore the rows of each file are gathered from all ranks, one file after the other.
    """

    def __init__(self, collection: Any) -> None:
        self._ranks: RankGroup = collection.ranks
        self._options = {
            config.name: config.storage.options
            for config in collection.configs
            if isinstance(config.storage, DynamicEmbHash)
        }
        tables = collection.tables
        self._shards = {name: tables[name].shards for name in self._options}

    @property
    def table_names(self) -> list[str]:
        """Names of the tables."""
        return list(self._options)

    @property
    def reads_own_files(self) -> bool:
        """False: files are routed by another rule than tables, so ranks read all files."""
        return False

    def table_module_of(self, name: str) -> tuple[DynamicEmbeddingBags, int]:
        """Return the module that has this rank's shard of a table, and the shard's number there."""
        (shard,) = self._shards[name].values()
        return shard.module, shard.index

    def options_of(self, name: str) -> DynamicEmbTableOptions:
        """Return the options of a table; those that were None have their defaults."""
        options = self._options[name]
        assert options is not None
        return options

    def owns(self, keys: Tensor) -> Tensor:
        """Return whether each key is on this rank, bool `[N]`."""
        return owner(keys, self._ranks.size) == self._ranks.rank

    def select_owned(self, name: str, ranks: RankGroup, dump: DynamicEmbTable) -> DynamicEmbTable:
        """Return the entries of a dump whose keys belong to this rank, by emblib's hash."""
        return dump.owned(self.owns)

    def saved_entries(
        self, name: str, ranks: RankGroup, leave_out: Sequence[str]
    ) -> DynamicEmbTable:
        """Return the entries that `dist_type` routes to the file of this rank; a collective."""
        module, index = self.table_module_of(name)
        entries = fingerprint.agree(
            ranks, lambda: export_dynamicemb(module, index, {}, leave_out=leave_out)
        )
        if ranks.size == 1:
            return entries
        dist_type = self.dist_type(name)
        received_parts: list[DynamicEmbTable] = []
        for rank in range(ranks.size):
            routed = entries.owned(partial(_is_routed_to, rank, ranks.size, dist_type))
            parts = ranks.gather_objects(replace(routed, entries=_on_cpu(routed.entries)))
            if rank == ranks.rank:
                received_parts = parts
        counts = [part.counts for part in received_parts if part.counts is not None]
        counts_by_kind = [torch.cat(parts) for parts in zip(*counts, strict=True)]
        return DynamicEmbTable(
            concatenate([part.entries for part in received_parts]),
            entries.arguments,
            (counts_by_kind[0], counts_by_kind[1]) if counts_by_kind else None,
        )


def _is_routed_to(rank: int, world_size: int, dist_type: str, keys: Tensor) -> Tensor:
    """Return whether `dist_type` routes each key to a rank, bool `[N]`."""
    return dynamicemb_files.owner_ranks(keys, world_size, dist_type) == rank


def _on_cpu(entries: Entries) -> Entries:
    """Return entries with rows in tensors on the CPU, which can be sent to other ranks."""
    positions = torch.arange(len(entries), device="cpu")
    rows = {name: rows[positions].cpu() for name, rows in entries.rows.items()}
    return Entries(entries.keys, entries.stamps, entries.scores, rows)


def dynamic_tables_in(module: nn.Module) -> ShardedCollectionTables | None:
    """Return the dynamic tables of a sharded collection; None for any other module."""
    if not isinstance(module, StateOfTables):
        return None
    collection: Any = module
    if not any(isinstance(config.storage, DynamicEmbHash) for config in collection.configs):
        return None
    return ShardedCollectionTables(collection)
