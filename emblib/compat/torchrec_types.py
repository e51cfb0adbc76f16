"""TorchRec's types that describe tables: data types, poolings, configurations, quantisation."""

from __future__ import annotations

import math
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from types import GenericAlias
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib import Pooling
from emblib import collections as emblib_collections
from emblib.collections import optimizers
from emblib.compat.fbgemm_types import BoundsCheckMode, as_member
from emblib.compat.torchrec_names import RUN_TORCHREC_ITSELF
from emblib.optim import Optimizer
from emblib.storage import Dense, Quantized


class Interface(ABCMeta):
    """Metaclass of interfaces: instances of the classes in `emblib_classes` count as instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        emblib_classes = cls.__dict__.get("emblib_classes", ())
        return super().__instancecheck__(instance) or isinstance(instance, emblib_classes)


class Subscripted:
    """Base of TorchRec's generic classes: `Name[...]` can be a base class or a type hint."""

    __class_getitem__: Any = classmethod(GenericAlias)


class DataType(Enum):
    """Type of numbers; rows can have FP32, FP16, BF16, INT8 or INT4.

    A configuration of emblib has a torch dtype as its `data_type`. FP32, FP16 and BF16 are equal to
    their dtypes, so that comparisons work. Configurations of quantised rows have INT8 or INT4.
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
        """Return the bytes per value; raise ValueError if rows cannot have the type."""
        return _BITS[self] / 8 if self in _BITS else data_type_to_dtype(self).itemsize


PoolingType = Pooling
"""emblib's enum, so that `==` and `is` work with the values of configurations."""

_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
_BITS = {DataType.INT8: 8, DataType.INT4: 4}
_TYPE_OF_BITS = {bits: data_type for data_type, bits in _BITS.items()}


def data_type_to_dtype(data_type: DataType | torch.dtype) -> torch.dtype:
    """Return the dtype of FP32, FP16 or BF16; return a dtype unchanged.

    Raises:
        ValueError: the type is unknown, quantised or an integer.
    """
    if isinstance(data_type, torch.dtype):
        return data_type
    dtype = _DTYPES.get(DataType(data_type).value)
    if dtype is None:
        raise ValueError(
            f"{data_type} is quantised or an integer, and no dtype of rows; use one of "
            f"{list(_DTYPES)}"
        )
    return dtype


@dataclass
class BaseEmbeddingConfig(metaclass=Interface):
    """Record with the fields of TorchRec's base of configurations, which emblib does not read.

    The configurations of emblib's collections count as instances of it.
    """

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

    def get_weight_init_max(self) -> float:
        """Return the largest initial weight."""
        default = math.sqrt(1 / self.num_embeddings)
        return default if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Return the smallest initial weight."""
        default = -math.sqrt(1 / self.num_embeddings)
        return default if self.weight_init_min is None else self.weight_init_min


@dataclass
class EmbeddingTableConfig(BaseEmbeddingConfig):
    """Record with the fields of TorchRec's configuration of a table in a group of tables."""

    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    has_feature_processor: bool = False
    embedding_names: list[str] = field(default_factory=list)

    emblib_classes = (emblib_collections.TableConfig,)


# Arguments of TorchRec's configurations that raise, and what to use instead.
_REMEDY_BY_OPTION = {
    "num_embeddings_post_pruning": "prune the table beforehand",
    "need_pos": "use emblib.collections.FeatureProcessedEmbeddingBagCollection with a "
    "PositionWeightedModule",
    "use_virtual_table": "give the table storage=Hash(), which takes any 64-bit ids",
    "virtual_table_eviction_policy": "storage=Hash(...) has the eviction",
    "total_num_buckets": "storage=Hash() has no buckets, and any number of ranks loads its rows",
    "enable_embedding_update": "load_state_dict and the handles of tables update rows",
    "stash_weights": "storage=Dense(Placement.MANAGED_CACHING) keeps rows in host memory",
    "input_dim": "num_embeddings has it",
}


class _FeatureNames(tuple[str, ...]):
    """Tuple of feature names that is equal to a list of them, and can be added to a list."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, list) else other)

    def __radd__(self, other: list[str]) -> list[str]:
        return [*other, *self]


class _Config:
    """Base of configurations with TorchRec's arguments, whose fields may be assigned.

    Args:
        num_embeddings: number of rows.
        embedding_dim: number of columns.
        name: name of the table.
        data_type: type of the rows: FP32, FP16, BF16 or its dtype, INT8 or INT4.
        feature_names: features that read the table.
        weight_init_max: upper bound of the uniform initial values; None is emblib's default.
        weight_init_min: lower bound; None is emblib's default.
        storage: storage of the rows; None follows from `data_type`.
        options: further fields of emblib's class, e.g. `pooling`, `init_fn`, `optimizer` and
            `rounding`, and arguments of TorchRec, which must be None or False.

    Raises:
        ValueError: an argument has an invalid value, or one of TorchRec is set that emblib does not
            have; the message says what to use instead.
    """

    # Defaults of arguments of TorchRec that only raise here; models read them.
    need_pos = use_virtual_table = enable_embedding_update = stash_weights = False
    num_embeddings_post_pruning = input_dim = total_num_buckets = None
    virtual_table_eviction_policy = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str = "",
        data_type: DataType | torch.dtype = DataType.FP32,
        feature_names: Sequence[str] = (),
        weight_init_max: float | None = None,
        weight_init_min: float | None = None,
        *,
        storage: Any = None,
        **options: Any,
    ) -> None:
        unsupported = {
            option: options.pop(option) for option in _REMEDY_BY_OPTION if option in options
        }
        passed_options = [
            option for option, value in unsupported.items() if value not in (None, False)
        ]
        if passed_options:
            ways_out = "; ".join(
                f"{option} is not supported: {_REMEDY_BY_OPTION[option]}"
                for option in passed_options
            )
            raise ValueError(f"{ways_out}. {RUN_TORCHREC_ITSELF}")
        is_quantised = data_type in _BITS
        if storage is None:
            storage = Quantized(_BITS[DataType(data_type)]) if is_quantised else Dense()
        super().__init__(  # type: ignore[call-arg]
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            name=name,
            data_type=torch.float32 if is_quantised else data_type_to_dtype(data_type),
            feature_names=feature_names,
            weight_init_max=weight_init_max,
            weight_init_min=weight_init_min,
            storage=storage,
            **options,
        )
        if isinstance(storage, Quantized):
            object.__setattr__(self, "data_type", _TYPE_OF_BITS[storage.bits])
        names = _FeatureNames(self.feature_names)  # type: ignore[attr-defined]
        object.__setattr__(self, "feature_names", names)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a field, with the checks of the constructor; an error changes no field.

        A program may attach other attributes of its own, as to TorchRec's configurations.

        Raises:
            AttributeError: the name is new, and looks like a field that was mistyped.
        """
        current_fields = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        if name not in current_fields and name not in _REMEDY_BY_OPTION:
            similar_names = get_close_matches(name, current_fields, 1, 0.9)
            if similar_names and not hasattr(self, name):
                raise AttributeError(
                    f"{type(self).__name__} has no field {name!r}, did you mean "
                    f"{similar_names[0]!r}? An attribute of your own needs a name less similar"
                )
            object.__setattr__(self, name, value)
            return
        was_quantised = isinstance(current_fields["storage"], Quantized)
        if name == "data_type" and (was_quantised or value in _BITS):
            current_fields["storage"] = None
        new_config = type(self)(**{**current_fields, name: value})
        for field_name in current_fields:
            object.__setattr__(self, field_name, getattr(new_config, field_name))

    def num_features(self) -> int:
        """Return the number of features that read the table."""
        return len(self.feature_names)  # type: ignore[attr-defined]

    def get_weight_init_min(self) -> float:
        """Return the lower bound of the uniform initial values."""
        return self.bounds[0]  # type: ignore[attr-defined]

    def get_weight_init_max(self) -> float:
        """Return the upper bound of the uniform initial values."""
        return self.bounds[1]  # type: ignore[attr-defined]


class EmbeddingBagConfig(_Config, emblib_collections.EmbeddingBagConfig):
    """`emblib.collections.EmbeddingBagConfig` with TorchRec's arguments."""


class EmbeddingConfig(_Config, emblib_collections.EmbeddingConfig):
    """`emblib.collections.EmbeddingConfig` with TorchRec's arguments."""


# `fused_params` that are ignored: any cache may be prefetched, and ids are always checked. Of the
# modes of checks FATAL raises ValueError.
IGNORED_FUSED_PARAMS = {"prefetch_pipeline", "bounds_check_mode"}


def optimizer_of(fused_params: Mapping[str, Any] | None) -> Optimizer | None:
    """Return the optimizer that a sharder's `fused_params` describe; None if they have none.

    Raises:
        TypeError: `gradient_clipping` is text.
        ValueError: a parameter would have no effect, or `bounds_check_mode` is FATAL.
    """
    if not fused_params:
        return None
    fused = optimizers.from_fused_params(fused_params)
    unknown_names = sorted(fused.table_arguments.keys() - IGNORED_FUSED_PARAMS)
    if unknown_names:
        raise ValueError(
            f"fused_params {unknown_names} have no effect here: the storage of a table selects the "
            "memory of its rows and their cache, e.g. "
            "storage=Dense(Placement.MANAGED_CACHING, CacheConfig())"
        )
    mode = fused_params.get("bounds_check_mode")
    if mode is not None and as_member(BoundsCheckMode, mode).name.endswith("FATAL"):
        raise ValueError(
            "fused_params cannot make invalid ids raise (bounds_check_mode FATAL): make the "
            "collection with bounds_check=BoundsCheck.FATAL, and leave bounds_check_mode out"
        )
    return fused.optimizer


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """Return the data type of a dtype; uint8, int8 and their quantised dtypes are INT8.

    Raises:
        ValueError: rows cannot have the dtype.
    """
    data_types = {torch.uint8: DataType.INT8, torch.int8: DataType.INT8, torch.qint8: DataType.INT8}
    data_types |= {torch.quint8: DataType.INT8, torch.quint4x2: DataType.INT4}
    data_types |= {value: DataType(name) for name, value in _DTYPES.items()}
    if dtype not in data_types:
        raise ValueError(
            f"rows have one of {[str(valid_dtype) for valid_dtype in data_types]}, got {dtype}"
        )
    return data_types[dtype]


class QuantConfig(NamedTuple):
    """Dtypes of quantised collections, in the form of observers of `torch.ao.quantization`.

    Attributes:
        activation: callable; `activation().dtype` is the dtype of outputs.
        weight: callable; `weight().dtype` is the dtype of rows.
        per_table_weight_dtype: dtype of the rows of some tables, by name, which replaces `weight`.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: dict[str, torch.dtype] | None = None
