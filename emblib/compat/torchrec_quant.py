"""TorchRec's inference: quantised collections, also over several devices; models for serving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emblib import BoundsCheck, sharding
from emblib import collections as emblib_collections
from emblib.compat import torchrec_script
from emblib.compat.checks import check_flags, check_names
from emblib.compat.fbgemm_types import BoundsCheckMode, as_member
from emblib.compat.torchrec_dist_data import rank_device
from emblib.compat.torchrec_sharding import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from emblib.compat.torchrec_types import (
    DataType,
    QuantConfig,
    Subscripted,
    data_type_to_dtype,
    dtype_to_data_type,
)
from emblib.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from emblib.sharding.shard import SHARDED
from emblib.storage import Dense, Quantized
from emblib.storage.initial_values import without_initial_values

_BITS_PER_VALUE = {DataType.INT8: 8, DataType.INT4: 4}


def _with_data_type(config: Any, data_type: DataType | torch.dtype) -> Any:
    """Return a copy of `config` without an optimizer, whose rows have `data_type`.

    Raises:
        ValueError: rows cannot have the type.
    """
    row_type = data_type if isinstance(data_type, DataType) else dtype_to_data_type(data_type)
    if row_type in _BITS_PER_VALUE:
        return replace(config, storage=Quantized(_BITS_PER_VALUE[row_type]), optimizer=None)
    return replace(config, storage=Dense(), data_type=data_type_to_dtype(row_type), optimizer=None)


_USE_STATE_DICT = (
    "it lays out FBGEMM's tables; load_state_dict takes the `values` and `scales` of each table"
)


def _refuse(name: str, value: object, reason: str = _USE_STATE_DICT) -> None:
    """Raise ValueError if `value` is set; `reason` says what to use instead."""
    if value:
        names = f" {value}" if isinstance(value, list) else ""
        raise ValueError(f"{name}{names} must be left out: {reason}")


_PRUNED_ROWS = "__emb_name_to_num_rows_post_pruning"  # attribute that set_pruning_data sets
_IGNORED_OPTIONS = (  # options of FBGEMM's memory
    "register_tbes",
    "quant_state_dict_split_scale_bias",
    "row_alignment",
    "cache_features_order",
)


def _supported_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without those that are ignored; ValueError for quantised weights."""
    unsupported = "table_name_to_quantized_weights"
    _refuse(unsupported, options.pop(unsupported, None))
    return {option: value for option, value in options.items() if option not in _IGNORED_OPTIONS}


# `fused_params` without an effect here: they lay out FBGEMM's tables in memory and in state dicts
# (torchrec.distributed.fused_params), or have the output dtype, which is that of the collection.
_IGNORED_FUSED_PARAMS = (
    "__register_lengths_to_offsets_lookup",
    "__register_quant_state_dict_split_scale_bias",
    "__register_tbe_row_alignment",
    "__register_tbes_in_named_modules",
    "output_dtype",
)
_BOUNDS_CHECK_MODE = "__register_tbe_bounds_check_mode"


def _check_fused_params(fused_params: Mapping[str, Any] | None, module: Any) -> None:
    """Raise ValueError for `fused_params` that would change the lookups of a collection.

    The mode of bounds checks may be FATAL only if `module` has it; ids are always checked.
    """
    others = dict(fused_params or {})
    mode = others.pop(_BOUNDS_CHECK_MODE, None)
    is_fatal = mode is not None and as_member(BoundsCheckMode, mode).name.endswith("FATAL")
    if is_fatal and module.bounds_check is not BoundsCheck.FATAL:
        raise ValueError(
            f"fused_params[{_BOUNDS_CHECK_MODE!r}] cannot make invalid ids raise: make the "
            "collection that is quantised with bounds_check=BoundsCheck.FATAL"
        )
    _refuse("fused_params", sorted(others.keys() - set(_IGNORED_FUSED_PARAMS)))


class _Quantised:
    """Base of quantised collections, which are in eval mode from the start."""

    groups: Any
    eval: Any
    # Name of an argument that only one kind of collection has, and of the method that reads it.
    _option_name: ClassVar[str]

    def _prepare_for_inference(self, output_dtype: torch.dtype) -> None:
        self.groups.set_output_dtype(output_dtype)
        self.eval()

    def output_dtype(self) -> torch.dtype:
        """Return the dtype of the output."""
        dtype: torch.dtype = self.groups.output_dtype
        return dtype

    __prepare_scriptable__ = torchrec_script.scriptable

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> Any:
        """Return the quantised form of a collection, on the same device.

        Args:
            module: collection with an attribute `qconfig`, a `QuantConfig` or one of torch.
            use_precomputed_fake_quant: ignored.

        Raises:
            ValueError: the collection has no `qconfig`, rows cannot have its dtype, or TorchRec's
                `set_pruning_data` was called.
        """
        qconfig = getattr(module, "qconfig", None)
        if qconfig is None:
            raise ValueError(
                f"{type(module).__name__} has no qconfig: set module.qconfig = QuantConfig(...), "
                "or call quantize_dynamic with a qconfig_spec that has its class"
            )
        dtype_of_table = getattr(qconfig, "per_table_weight_dtype", None) or {}
        _refuse(
            "set_pruning_data",
            getattr(module, _PRUNED_ROWS, None),
            "rows cannot be cut off: quantise a collection whose tables have fewer rows",
        )
        weight_dtype, output_dtype = qconfig.weight().dtype, qconfig.activation().dtype
        configs = [
            _with_data_type(config, dtype_of_table.get(config.name, weight_dtype))
            for config in module.configs
        ]
        options = {cls._option_name: getattr(module, cls._option_name)()}
        options["bounds_check"] = module.bounds_check
        quantised_class: Any = cls
        quantised = without_initial_values(quantised_class)(
            configs, device=module.device, output_dtype=output_dtype, **options
        )
        quantised.copy_rows(module)
        return quantised


class QuantEmbeddingBagCollection(_Quantised, emblib_collections.EmbeddingBagCollection):
    """A quantised `EmbeddingBagCollection` with TorchRec's arguments, for inference.

    Args:
        tables: configurations of the tables, of INT8, INT4 or a float type.
        is_weighted: whether batches have weights.
        device: device of the tables; None is torch's default device.
        output_dtype: dtype of the pooled output.
        bounds_check: reaction to invalid ids, see `BoundsCheck`.
        options: options of FBGEMM's memory, which are ignored; `table_name_to_quantized_weights`
            raises ValueError.
    """

    _option_name = "is_weighted"

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float,
        *,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        **options: Any,
    ) -> None:
        super().__init__(
            tables,
            device,
            is_weighted=is_weighted,
            bounds_check=bounds_check,
            **_supported_options(options),
        )
        self._prepare_for_inference(output_dtype)


class QuantEmbeddingCollection(_Quantised, emblib_collections.EmbeddingCollection):
    """A quantised `EmbeddingCollection` with TorchRec's arguments, for inference.

    With `need_indices` the results have the ids as weights. The other arguments are those of
    `QuantEmbeddingBagCollection`.
    """

    _option_name = "need_indices"

    def __init__(
        self,
        tables: Sequence[Any],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float,
        *,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        **options: Any,
    ) -> None:
        super().__init__(
            tables,
            device,
            need_indices=need_indices,
            bounds_check=bounds_check,
            **_supported_options(options),
        )
        self._prepare_for_inference(output_dtype)


SHARDED[QuantEmbeddingBagCollection] = sharding.ShardedEmbeddingBagCollection
SHARDED[QuantEmbeddingCollection] = sharding.ShardedEmbeddingCollection


# Devices of one process


def _device_of(name: str, parameter: ParameterSharding, world_size: int) -> int:
    """Return the number of the device of a table.

    Raises:
        ValueError: the sharding is not TABLE_WISE on one device, or the device does not exist.
    """
    ranks = sorted(set(parameter.ranks or [0]))
    if parameter.sharding_type != ShardingType.TABLE_WISE.value or len(ranks) != 1:
        raise ValueError(
            f"table {name}: the devices of one process take whole tables, table_wise(rank), got "
            f"{parameter.sharding_type} on {ranks}; over processes (from_process_group) quantised "
            "tables are divided by rows as well"
        )
    if not 0 <= ranks[0] < world_size:
        raise ValueError(f"table {name} is on device {ranks[0]} of {world_size}")
    return ranks[0]


class _ShardedOverDevices(Subscripted, nn.Module):
    """Base of quantised collections over the devices of one process, which have whole tables.

    Rows are copied, but for a collection whose tables are all on its own device, which is the only
    part itself; those of a collection on `meta` have initial values. A *part*, of `parts`, is
    an unsharded collection of the tables on one device.

    Args:
        module: the quantised collection.
        table_name_to_parameter_sharding: sharding of each table, `table_wise(device number)`.
        env: result of `ShardingEnv.from_local(world_size, rank)`.
        fused_params: options of FBGEMM's tables, see `_QuantSharder`.
        device: device of the results, whose type the other devices have; None is that of `module`.

    Raises:
        ValueError: a table is not on one device, or `fused_params` would change the lookups.
    """

    is_leaf_of_traces: ClassVar[bool] = True

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_fused_params(fused_params, module)
        device = module.device if device is None else torch.device(device)
        self._device, self.configs = device, module.configs
        self._plan = dict(table_name_to_parameter_sharding)
        device_of_table = {
            config.name: _device_of(config.name, self._plan[config.name], env.world_size)
            for config in self.configs
        }
        used_devices = sorted(set(device_of_table.values()))
        self._part_index_of_table = {
            name: used_devices.index(device_number)
            for name, device_number in device_of_table.items()
        }
        self.parts = nn.ModuleList(
            self._make_part(module, device_of_table, device_number)
            for device_number in used_devices
        )

    def _make_part(
        self, module: Any, device_of_table: Mapping[str, int], device_number: int
    ) -> nn.Module:
        """Return the part on device `device_number`: `module` itself if nothing must be copied."""
        device = rank_device(self._device.type, device_number)
        if len(set(device_of_table.values())) == 1 and device.type == module.device.type == "cpu":
            return module
        configs = [
            config for config in self.configs if device_of_table[config.name] == device_number
        ]
        if module.device.type == "meta":
            return self._make_collection(module, configs, device)
        part = without_initial_values(self._make_collection)(module, configs, device)
        part.copy_rows(module)
        return part

    def _make_collection(self, module: Any, configs: Sequence[Any], device: torch.device) -> Any:
        """Return a collection on `device` with the options of `module` and the tables `configs`."""
        raise NotImplementedError

    def _outputs(self, features: KeyedJaggedTensor) -> Iterator[tuple[str, Any]]:
        """Yield name and result of each table and feature, in the order of the configurations."""
        batch = KeyedJaggedTensor.adopt(features)
        results = [iter(self._blocks(part, batch)) for part in self.parts]
        keys = [key for config in self.configs for key in config.feature_names]
        for config in self.configs:
            for key in config.feature_names:
                name = key if keys.count(key) == 1 else f"{key}@{config.name}"
                yield name, next(results[self._part_index_of_table[config.name]])

    def _blocks(self, part: Any, batch: KeyedJaggedTensor) -> Any:
        """Return the results of a part, moved to `self.device`: one per table and feature of it."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Device of the results."""
        return self._device

    def tbes_configs(self) -> dict[nn.Module, Any]:
        """Return the configurations of the tables in each module with kernels."""
        configs_by_module: dict[nn.Module, Any] = {}
        for part in self.parts:
            groups: Any = part.groups
            for group in groups.groups:
                configs_by_module[group.module] = [groups.slices[i].config for i in group.slices]
        return configs_by_module

    def copy(self, device: torch.device) -> Any:
        """Return this module: the tables stay on their devices."""
        return self

    def __prepare_scriptable__(self) -> nn.Module:
        if len(self.parts) > 1:
            raise TypeError(
                f"TorchScript takes collections on one device, not a {type(self).__name__} on "
                f"{len(self.parts)}: export the model with torch.export"
            )
        return torchrec_script.scriptable(self.parts[0])


class ShardedQuantEmbeddingBagCollection(_ShardedOverDevices):
    """A quantised `EmbeddingBagCollection` over the devices of one process."""

    def _make_collection(self, module: Any, configs: Sequence[Any], device: torch.device) -> Any:
        is_weighted, dtype = module.is_weighted(), module.groups.output_dtype
        return QuantEmbeddingBagCollection(
            configs, is_weighted, device, dtype, bounds_check=module.bounds_check
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled rows, as the unsharded collection does."""
        if len(self.parts) == 1:
            part: Any = self.parts[0]
            result: KeyedTensor = part(KeyedJaggedTensor.adopt(features).to(part.device))
            return result.to(self._device)
        names, blocks = zip(*self._outputs(features), strict=True)
        return KeyedTensor(names, [block.shape[1] for block in blocks], torch.cat(blocks, 1))

    def _blocks(self, part: Any, batch: KeyedJaggedTensor) -> Any:
        result = part(batch.to(part.device, non_blocking=True))
        return result.values().to(self._device).split(result.length_per_key(), 1)

    def embedding_bag_configs(self) -> list[Any]:
        """Return the configurations of the tables."""
        return list(self.configs)


class ShardedQuantEmbeddingCollection(_ShardedOverDevices):
    """A quantised `EmbeddingCollection` over the devices of one process."""

    def _make_collection(self, module: Any, configs: Sequence[Any], device: torch.device) -> Any:
        need_indices, dtype = module.need_indices(), module.groups.output_dtype
        return QuantEmbeddingCollection(
            configs, device, need_indices, dtype, bounds_check=module.bounds_check
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return one vector per id, by feature, as the unsharded collection does."""
        return dict(self._outputs(features))

    def _blocks(self, part: Any, batch: KeyedJaggedTensor) -> Any:
        result = part(batch.to(part.device, non_blocking=True))
        return [jagged.to(self._device) for jagged in result.values()]

    def embedding_configs(self) -> list[Any]:
        """Return the configurations of the tables."""
        return list(self.configs)


class _QuantSharder(Subscripted):
    """Base of sharders of quantised collections.

    Args:
        fused_params: options of FBGEMM's tables. Those of their memory and of state dicts have no
            effect; `shard` raises for others.
        shardable_params: names of the tables for `shardable_parameters`; None is all.
    """

    module_type: ClassVar[Any]
    _class_over_devices: ClassVar[Any]
    _class_over_ranks: ClassVar[Any]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        shardable_params: Sequence[str] | None = None,
    ) -> None:
        self.fused_params = None if fused_params is None else dict(fused_params)
        self._shardable_names = None
        if shardable_params is not None:
            self._shardable_names = set(check_names("shardable_params", shardable_params))
        self.optimizer = self.comm_precision = None

    def shardable_parameters(self, module: Any) -> dict[str, Tensor]:
        """Return the packed rows, uint8, of each quantised table that was selected, by name."""
        return {
            name: handle.views()["packed"]
            for name, handle in module.handles().items()
            if (self._shardable_names is None or name in self._shardable_names)
            and "packed" in handle.views()
        }

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Return the collection over the devices of a process, or over ranks, which all call this.

        Args:
            module: quantised collection.
            params: sharding of each table.
            env: environment with the devices or the ranks.
            device: device of the results over devices of a process; ignored over ranks.
            module_fqn: ignored.

        Raises:
            ValueError: the environment cannot have the sharding of a table, or `fused_params` would
                change the lookups.
        """
        _check_fused_params(self.fused_params, module)
        if env.is_local:
            over_devices: nn.Module = self._class_over_devices(module, params, env, None, device)
            return over_devices
        plan = {name: parameter.to_emblib() for name, parameter in params.items()}
        over_ranks: nn.Module = self._class_over_ranks(module, plan, env.ranks)
        return over_ranks.eval()

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the values of TABLE_WISE and ROW_WISE; the latter is for ranks only."""
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the value of the kernel of quantised tables."""
        return ["quant"]


class QuantEmbeddingBagCollectionSharder(_QuantSharder):
    """Sharder of quantised embedding bag collections."""

    module_type = QuantEmbeddingBagCollection
    _class_over_devices = ShardedQuantEmbeddingBagCollection
    _class_over_ranks = sharding.ShardedEmbeddingBagCollection


class QuantEmbeddingCollectionSharder(_QuantSharder):
    """Sharder of quantised embedding collections."""

    module_type = QuantEmbeddingCollection
    _class_over_devices = ShardedQuantEmbeddingCollection
    _class_over_ranks = sharding.ShardedEmbeddingCollection


def local_plan(module: nn.Module, world_size: int, capacity: int | None = None) -> ShardingPlan:
    """Return a plan of the quantised tables of a model over the devices of one process.

    In the order of their sizes, the largest first, each table is placed on the device that has the
    fewest bytes so far.

    Args:
        module: model with quantised collections.
        world_size: number of devices.
        capacity: maximum bytes of tables per device; None for no limit.

    Raises:
        ValueError: a device would have more bytes than `capacity`.
    """
    sharder = _QuantSharder()
    collections = _quantised_collections(module)
    bytes_of_tables = {
        (path, name): rows.numel()
        for path, collection in collections.items()
        for name, rows in sharder.shardable_parameters(collection).items()
    }
    for path, collection in collections.items():
        for config in collection.configs:
            # Tables that are not quantised count as float32.
            bytes_of_tables.setdefault(
                (path, config.name), config.num_embeddings * config.embedding_dim * 4
            )
    bytes_of_devices = [0] * world_size
    plans: dict[str, dict[str, ParameterSharding]] = {path: {} for path in collections}
    largest_first = sorted(bytes_of_tables.items(), key=lambda item: (-item[1], item[0]))
    for (path, name), table_bytes in largest_first:
        device_number = bytes_of_devices.index(min(bytes_of_devices))
        bytes_of_devices[device_number] += table_bytes
        plans[path][name] = ParameterSharding(
            ShardingType.TABLE_WISE.value, "quant", [device_number]
        )
    if capacity is not None and max(bytes_of_devices) > capacity:
        raise ValueError(
            f"the tables take {max(bytes_of_devices)} bytes on one of {world_size} devices, more "
            f"than the {capacity} bytes for tables: use more devices, or INT4"
        )
    return ShardingPlan(
        {path: EmbeddingModuleShardingPlan(tables) for path, tables in plans.items()}
    )


def _quantised_collections(module: nn.Module) -> dict[str, Any]:
    """Return the quantised collections of a model, by path."""
    quantised_classes = (QuantEmbeddingBagCollection, QuantEmbeddingCollection)
    return {
        path: submodule
        for path, submodule in module.named_modules()
        if isinstance(submodule, quantised_classes)
    }


def _stored_rows(model: nn.Module) -> dict[str, Tensor]:
    """Return the rows of each table in the quantised collections of a model, by name."""
    return {
        name: next(iter(handle.views().values()))
        for collection in _quantised_collections(model).values()
        for name, handle in collection.handles().items()
    }


def get_table_to_weights_from_tbe(model: nn.Module) -> dict[str, tuple[Tensor, None]]:
    """Return (rows as they are stored, None) of each table of a quantised model, by name."""
    return {name: (rows, None) for name, rows in _stored_rows(model).items()}


def assign_weights_to_tbe(
    model: nn.Module, table_to_weight: Mapping[str, tuple[Tensor, None]]
) -> None:
    """Copy rows from `get_table_to_weights_from_tbe` into the tables of a quantised model.

    Raises:
        ValueError: the model has other tables, or rows have another shape or dtype.
    """
    rows_by_table = _stored_rows(model)
    if rows_by_table.keys() != table_to_weight.keys():
        raise ValueError(
            f"table_to_weight must have the tables {sorted(rows_by_table)} of the model, got "
            f"{sorted(table_to_weight)}: get_table_to_weights_from_tbe returns them"
        )
    for name, rows in rows_by_table.items():
        values = table_to_weight[name][0]
        if values.shape != rows.shape or values.dtype != rows.dtype:
            raise ValueError(
                f"table {name}: rows are {rows.dtype} {tuple(rows.shape)}, got {values.dtype} "
                f"{tuple(values.shape)}: take them from a model with equal tables and dtypes"
            )
        rows.copy_(values)


# Models

_QUANTISED_CLASSES = {
    emblib_collections.EmbeddingBagCollection: QuantEmbeddingBagCollection,
    emblib_collections.EmbeddingCollection: QuantEmbeddingCollection,
}


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: Sequence[Any] | None = None,
    additional_mapping: Mapping[Any, Any] | None = None,
    output_dtype: torch.dtype = torch.float,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """Replace the embedding bag collections of a model by quantised ones, and return the model.

    As in TorchRec, collections for sequences (`EmbeddingCollection`) stay, unless
    `additional_qconfig_spec_keys` has their class. If `module` is itself a collection, its
    quantised form is returned.

    Args:
        module: the model, or one collection.
        dtype: dtype of the stored rows.
        inplace: whether to change `module`; if not, a copy is changed.
        additional_qconfig_spec_keys: further classes to quantise: collections, or keys of
            `additional_mapping`.
        additional_mapping: quantised class, with a method `from_float`, of further classes.
        output_dtype: dtype of the output of lookups.
        per_table_weight_dtype: dtype of the rows of some tables, by name, instead of `dtype`.

    Raises:
        ValueError: rows cannot have a dtype, or `additional_mapping` does not have a class.
    """
    check_flags(inplace=inplace)
    observer = torch.ao.quantization.PlaceholderObserver
    qconfig = QuantConfig(
        observer.with_args(dtype=output_dtype),
        observer.with_args(dtype=dtype),
        dict(per_table_weight_dtype or {}),
    )
    default_classes: list[Any] = [emblib_collections.EmbeddingBagCollection]
    if isinstance(module, emblib_collections.EmbeddingCollection):
        default_classes.append(type(module))
    mapping: dict[Any, Any] = dict(additional_mapping or {})
    unmapped = []
    for key in (*default_classes, *(additional_qconfig_spec_keys or ())):
        quantised = [made for cls, made in _QUANTISED_CLASSES.items() if issubclass(key, cls)]
        if key not in mapping and not quantised:
            unmapped.append(key)
        elif key not in mapping:
            mapping[key] = quantised[0]
    if unmapped:
        raise ValueError(
            f"additional_mapping must have the quantised class of each of {unmapped}, of "
            "additional_qconfig_spec_keys"
        )
    module = module if inplace else deepcopy(module)

    def quantise(submodule: nn.Module) -> nn.Module | None:
        float_class = next((cls for cls in mapping if isinstance(submodule, cls)), None)
        if float_class is None or type(submodule) in mapping.values():
            return None
        submodule.qconfig = qconfig  # type: ignore[assignment]
        quantised_child: nn.Module = mapping[float_class].from_float(submodule)
        return quantised_child

    quantised_root = quantise(module)
    if quantised_root is not None:
        return quantised_root
    quantised_children: dict[nn.Module, nn.Module | None] = {}
    for parent in list(module.modules()):
        # Unlike `named_children`, this has a child that is there under two names twice.
        for name, child in list(parent.named_modules(remove_duplicate=False)):
            if not name or "." in name:
                continue
            if child not in quantised_children:
                quantised_children[child] = quantise(child)
            quantised_child = quantised_children[child]
            if quantised_child is not None:
                setattr(parent, name, quantised_child)
    return module


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, Any] | None = None,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = torch.int8,
    quantization_dtype: torch.dtype = torch.int8,
    output_dtype: torch.dtype = torch.float,
) -> nn.Module:
    """Quantise the collections of a model in place, and return the model.

    Args:
        model: the model, or one collection, whose quantised form is returned.
        quantization_mapping: argument that must be None or empty.
        per_table_weight_dtype: dtype of the rows of some tables, by name.
        fp_weight_dtype: dtype that must be int8.
        quantization_dtype: dtype of the rows of all other tables.
        output_dtype: dtype of the output of lookups.

    Raises:
        ValueError: `quantization_mapping` or another `fp_weight_dtype` is passed, or rows cannot
            have a dtype.
    """
    _refuse("quantization_mapping", quantization_mapping, "quantize_embeddings takes one")
    _refuse(
        "fp_weight_dtype",
        fp_weight_dtype is not torch.int8,
        "weights of feature processors are not quantised",
    )
    return quantize_embeddings(
        model,
        quantization_dtype,
        inplace=True,
        additional_qconfig_spec_keys=[emblib_collections.EmbeddingCollection],
        output_dtype=output_dtype,
        per_table_weight_dtype=per_table_weight_dtype,
    )


class PredictFactory:
    """Base of factories of models for serving."""

    def create_predict_module(self) -> nn.Module:
        """Return the model; a subclass must define this."""
        raise NotImplementedError(f"{type(self).__name__} must define create_predict_module")

    def batching_metadata(self) -> dict[str, Any]:
        """Return how each input is batched; a subclass must define this."""
        raise NotImplementedError(f"{type(self).__name__} must define batching_metadata")

    def result_metadata(self) -> str:
        """Return the type of the results; a subclass must define this."""
        raise NotImplementedError(f"{type(self).__name__} must define result_metadata")


class PredictModule(nn.Module):
    """Base of models for serving, which run on one device in inference mode.

    Args:
        module: the model, which is put into eval mode.
        device: device of the model; None is that of its first parameter or buffer, at the first
            call.
    """

    def __init__(self, module: nn.Module, device: str | None = None) -> None:
        super().__init__()
        self._module, self._device = module, None if device is None else torch.device(device)
        self._module.eval()

    @property
    def predict_module(self) -> nn.Module:
        """The model that is served."""
        return self._module

    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """Return the prediction for a batch; a subclass must define this."""
        raise NotImplementedError(f"{type(self).__name__} must define predict_forward")

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Run `predict_forward` in inference mode, with the model's GPU as the current one."""
        if self._device is None:
            tensors = (*self._module.parameters(), *self._module.buffers())
            self._device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        with torch.inference_mode():
            if self._device.type == "cpu":
                return self.predict_forward(batch)
            with torch.cuda.device(self._device):
                return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the model."""
        return self._module.state_dict(*args, **kwargs)
