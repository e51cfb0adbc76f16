"""TorchRec's types for tables: data types, poolings, configurations, quantisation."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import GenericAlias
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib import Pooling, StochasticRounding
from emblib import collections as emblib_collections
from emblib.collections import optimizers
from emblib.compat.fbgemm_types import PoolingMode, SparseType
from emblib.optim import Optimizer
from emblib.storage import Dense, Quantized


class Interface(ABCMeta):
    """Type of interfaces, whose instances are also those of emblib's classes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        kinds = cls.__dict__.get("emblib_classes", ())
        return super().__instancecheck__(instance) or isinstance(instance, kinds)


class Subscripted:
    """Base of TorchRec's generic classes: `Name[...]` is a base class, and a hint of types."""

    __class_getitem__: Any = classmethod(GenericAlias)


class DataType(Enum):
    """Type of numbers; rows have FP32, FP16, BF16, INT8 or INT4, others raise in a configuration.

    It is equal to the torch dtype of a configuration.

    A configuration of quantised rows has the INT8 or INT4 itself.
    """

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"
    NFP8 = "NFP8"

    def __str__(self) -> str:
        return self.value

    def __eq__(self, other: object) -> bool:
        return self is other or (other is not None and other is _DTYPES.get(self.value))

    def __hash__(self) -> int:
        return hash(_DTYPES.get(self.value, self.value))

    @property
    def itemsize(self) -> float:
        """Return the bytes per value, as a dtype does."""
        return _BITS[self] / 8 if self in _BITS else data_type_to_dtype(self).itemsize


PoolingType = Pooling
"""emblib's enum, so that `==` and `is` work with the values of configurations."""

_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
_BITS = {DataType.INT8: 8, DataType.INT4: 4}
_TYPES = {bits: data_type for data_type, bits in _BITS.items()}


def data_type_to_dtype(data_type: DataType | torch.dtype) -> torch.dtype:
    """Return the dtype of a type that is not quantised; a dtype is returned as it is.

    Raises:
        ValueError: a quantised type, which has none.
    """
    if isinstance(data_type, torch.dtype):
        return data_type
    found = _DTYPES.get(DataType(data_type).value)
    if found is None:
        raise ValueError(f"{data_type} is quantised and has no dtype; use one of {list(_DTYPES)}")
    return found


def _shared(
    data_type: DataType | torch.dtype,
    feature_names: Sequence[str],
    storage: Any,
    pruned: int | None,
    *,
    need_pos: bool,
) -> dict[str, Any]:
    """Convert the arguments that both configurations have."""
    if pruned is not None:
        raise ValueError("num_embeddings_post_pruning is not supported: prune the table beforehand")
    if need_pos:
        raise ValueError(
            "need_pos is not supported: use emblib.collections.FeatureProcessedEmbeddingBag"
            "Collection with a PositionWeightedModule"
        )
    if data_type in _BITS:
        storage = Quantized(_BITS[DataType(data_type)]) if storage is None else storage
        data_type = torch.float32
    storage = Dense() if storage is None else storage
    return {
        "data_type": data_type_to_dtype(data_type),
        "feature_names": tuple(feature_names),
        "storage": storage,
    }


def _set_quantised_type(config: Any) -> None:
    """Set the data type of a configuration with quantised rows to INT8 or INT4."""
    if isinstance(config.storage, Quantized):
        object.__setattr__(config, "data_type", _TYPES[config.storage.bits])


@dataclass
class BaseEmbeddingConfig(metaclass=Interface):
    """Base of TorchRec's configurations; those of emblib's collections are instances, too."""

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Callable[[Tensor], Any] | None = None
    need_pos: bool = False
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: Any = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    emblib_classes = (emblib_collections.TableConfig,)

    def num_features(self) -> int:
        """Return the number of features that read the table."""
        return len(self.feature_names)


@dataclass
class EmbeddingTableConfig(BaseEmbeddingConfig):
    """TorchRec's configuration of a table in a group of tables."""

    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    has_feature_processor: bool = False
    embedding_names: list[str] = field(default_factory=list)

    emblib_classes = (emblib_collections.TableConfig,)


class EmbeddingBagConfig(emblib_collections.EmbeddingBagConfig):
    """`emblib.collections.EmbeddingBagConfig` with TorchRec's arguments.

    `storage`, `optimizer` and `rounding` are emblib's: the storage of the rows, the table's
    optimizer, and how updates of rows in 16 bits are rounded.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str = "",
        data_type: DataType | torch.dtype = DataType.FP32,
        feature_names: Sequence[str] = (),
        weight_init_max: float | None = None,
        weight_init_min: float | None = None,
        num_embeddings_post_pruning: int | None = None,
        init_fn: Callable[[Tensor], Any] | None = None,
        need_pos: bool = False,
        pooling: PoolingType = PoolingType.SUM,
        storage: Any = None,
        optimizer: Optimizer | None = None,
        rounding: StochasticRounding | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            name,
            weight_init_min=weight_init_min,
            weight_init_max=weight_init_max,
            init_fn=init_fn,
            optimizer=optimizer,
            rounding=rounding,
            pooling=pooling,
            **_shared(
                data_type, feature_names, storage, num_embeddings_post_pruning, need_pos=need_pos
            ),
        )
        _set_quantised_type(self)


class EmbeddingConfig(emblib_collections.EmbeddingConfig):
    """`emblib.collections.EmbeddingConfig` with TorchRec's arguments, see `EmbeddingBagConfig`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str = "",
        data_type: DataType | torch.dtype = DataType.FP32,
        feature_names: Sequence[str] = (),
        weight_init_max: float | None = None,
        weight_init_min: float | None = None,
        num_embeddings_post_pruning: int | None = None,
        init_fn: Callable[[Tensor], Any] | None = None,
        need_pos: bool = False,
        storage: Any = None,
        optimizer: Optimizer | None = None,
        rounding: StochasticRounding | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            name,
            weight_init_min=weight_init_min,
            weight_init_max=weight_init_max,
            init_fn=init_fn,
            optimizer=optimizer,
            rounding=rounding,
            **_shared(
                data_type, feature_names, storage, num_embeddings_post_pruning, need_pos=need_pos
            ),
        )
        _set_quantised_type(self)


# Of FBGEMM's tables, and no question here: caches may always be prefetched, ids are always checked.
IDLE = {"prefetch_pipeline", "bounds_check_mode"}


def optimizer_of(fused_params: Mapping[str, Any] | None) -> Optimizer | None:
    """Return the optimizer of a sharder's `fused_params`; None if they have no optimizer arguments.

    Raises:
        ValueError: something that would have no effect.
    """
    if not fused_params:
        return None
    found = optimizers.from_fused_params(fused_params)
    unknown = sorted(found.rest.keys() - IDLE)
    if unknown:
        raise ValueError(
            f"fused_params {unknown} have no effect here: the storage of a table selects the "
            "memory of its rows and their cache, e.g. "
            "storage=Dense(Placement.MANAGED_CACHING, CacheConfig())"
        )
    return found.optimizer


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """Return the data type of a dtype.

    Raises:
        ValueError: a dtype that rows cannot have.
    """
    known = {torch.uint8: DataType.INT8, torch.int8: DataType.INT8, torch.qint8: DataType.INT8}
    known |= {torch.quint8: DataType.INT8, torch.quint4x2: DataType.INT4}
    known |= {value: DataType(name) for name, value in _DTYPES.items()}
    if dtype not in known:
        raise ValueError(f"rows have one of {[str(one) for one in known]}, got {dtype}")
    return known[dtype]


def data_type_to_sparse_type(data_type: DataType) -> SparseType:
    """Return FBGEMM's name of a data type, from `emblib.compat.fbgemm`."""
    return SparseType[DataType(data_type).value]


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """Return `sum` or `mean`.

    Raises:
        ValueError: no pooling.
    """
    if pooling_type is PoolingType.NONE:
        raise ValueError("pooling must be SUM or MEAN to be the mode of an nn.EmbeddingBag")
    return PoolingType(pooling_type).value


def pooling_type_to_pooling_mode(pooling_type: PoolingType) -> PoolingMode:
    """Return FBGEMM's name of a pooling, from `emblib.compat.fbgemm`."""
    return PoolingMode[PoolingType(pooling_type).name]


class QuantConfig(NamedTuple):
    """Dtypes of quantised collections, as observers of `torch.ao.quantization`.

    `activation().dtype` is the dtype of outputs and `weight().dtype` that of rows, except for the
    tables of `per_table_weight_dtype`.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: dict[str, torch.dtype] | None = None
