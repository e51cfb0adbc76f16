"""Enums and option objects of FBGEMM's training module, with its names and values."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from emblib.compat.checks import check_flags

_Member = TypeVar("_Member", bound=enum.Enum)


def as_member(kind: type[_Member], value: Any) -> _Member:
    """Convert `value`, a member, a plain value or FBGEMM's enum member, to a member of `kind`.

    Raises:
        ValueError: no member has the value, or it is a member of an enum with another name.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, enum.Enum):
        if type(value).__name__ != kind.__name__:  # its number means something else
            raise ValueError(f"{value!r} is not a valid {kind.__name__}")
        value = value.value
    return kind(value)


class _NamedIntEnum(enum.IntEnum):
    """Base of enums whose members can be parsed from their lower-case names."""

    @classmethod
    def str_values(cls) -> list[str]:
        """Return the names that `from_str` parses."""
        return [member.name.lower() for member in cls]

    @classmethod
    def from_str(cls, key: str) -> Any:
        """Return the member with the lower-case name `key`; raise ValueError if there is none."""
        for member in cls:
            if member.name.lower() == key:
                return member
        raise ValueError(f"{cls.__name__} must be one of {cls.str_values()}, got {key!r}")


class EmbeddingLocation(_NamedIntEnum):
    """Memory of a table."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4

    @classmethod
    def from_device_and_clf(
        cls, device: torch.device, cache_load_factor: float
    ) -> "EmbeddingLocation":
        """Return HOST on a CPU; on a GPU MANAGED for 0, DEVICE for 1, MANAGED_CACHING for others.

        Raises:
            ValueError: the device is of another type, or the load factor is outside [0, 1].
        """
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be a CPU or a CUDA device, got {device}")
        if not 0 <= cache_load_factor <= 1:
            raise ValueError(f"cache_load_factor must be in [0, 1], got {cache_load_factor}")
        if device.type == "cpu":
            return cls.HOST
        if cache_load_factor == 0:
            return cls.MANAGED
        return cls.DEVICE if cache_load_factor == 1 else cls.MANAGED_CACHING


class ComputeDevice(enum.IntEnum):
    """Device of the lookups."""

    CPU = 0
    CUDA = 1
    MTIA = 2

    @classmethod
    def get_available(cls) -> "ComputeDevice":
        """Return CUDA if torch has a GPU, else CPU."""
        return cls.CUDA if torch.cuda.is_available() else cls.CPU


class PoolingMode(_NamedIntEnum):
    """Pooling of the rows of a bag."""

    SUM = 0
    MEAN = 1
    NONE = 2

    def do_pooling(self) -> bool:
        """Return whether a lookup returns one vector per bag; for NONE it returns one per id."""
        return self is not PoolingMode.NONE


BoundsCheckMode = enum.IntEnum(
    "BoundsCheckMode", "FATAL WARNING IGNORE NONE V2_IGNORE V2_WARNING V2_FATAL", start=0
)
"""Handling of invalid input; here V2_FATAL is the same as FATAL, and so on."""


CacheAlgorithm = enum.Enum("CacheAlgorithm", "LRU LFU", start=0)
"""Eviction policy of the cache."""


class EmbOptimType(enum.Enum):
    """Optimizers; tables can have those of `fbgemm_arguments.SUPPORTED_OPTIMIZERS`."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    SHAMPOO = "shampoo"
    SHAMPOO_V2 = "shampoo_v2"
    MADGRAD = "madgrad"
    EXACT_ROWWISE_WEIGHTED_ADAGRAD = "exact_row_wise_weighted_adagrad"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    ROWWISE_RMSPROP_AR = "row_wise_rmsprop_ar"
    NONE = "none"

    def __str__(self) -> str:
        return self.value


OptimType = EmbOptimType


class _Format(NamedTuple):
    """Properties of a number format in FBGEMM."""

    code: int
    bits: int  # per number
    dim_divisor: int  # number that divides the dim of rows in FBGEMM's layout
    dtype: torch.dtype  # that stores the format


_FORMATS = {
    "fp32": _Format(0, 32, 1, torch.float32),
    "fp16": _Format(1, 16, 2, torch.float16),
    "int8": _Format(2, 8, 4, torch.uint8),
    "int4": _Format(3, 4, 8, torch.quint4x2),
    "int2": _Format(4, 2, 16, torch.quint2x4),
    "bf16": _Format(5, 16, 2, torch.bfloat16),
    "fp8": _Format(6, 8, 4, torch.uint8),
    "mx4": _Format(7, 4, 8, torch.uint8),
    "nfp8": _Format(8, 8, 4, torch.float8_e4m3fn),
}
"""The formats by the values of `SparseType`."""
# FBGEMM's `as_int` returns 7 for MX4 and 8 for NFP8, but its `from_int` reads 8 as MX4, 9 as NFP8.
_FIRST_SHIFTED_CODE = 7


class SparseType(enum.Enum):
    """Number formats; emblib trains tables of FP32, FP16 or BF16."""

    FP32 = "fp32"
    FP16 = "fp16"
    FP8 = "fp8"
    NFP8 = "nfp8"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    BF16 = "bf16"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value

    @staticmethod
    def from_int(ty: int) -> "SparseType":
        """Return the format of a code: 0 to 6, 8 for MX4 or 9 for NFP8.

        `as_int` returns the same codes up to 6, but 7 for MX4 and 8 for NFP8. FBGEMM has the same
        difference.

        Raises:
            ValueError: the code is unknown.
        """
        for value, number_format in _FORMATS.items():
            if number_format.code + (number_format.code >= _FIRST_SHIFTED_CODE) == ty:
                return SparseType(value)
        raise ValueError(f"the code of a SparseType must be 0 to 6, 8 or 9, got {ty}")

    def as_int(self) -> int:
        """Return FBGEMM's code of the format, 0 to 8; `from_int` reads 7 and 8 differently."""
        return _FORMATS[self.value].code

    @staticmethod
    def from_dtype(dtype: torch.dtype, is_mx: bool = False) -> "SparseType":
        """Return the format of a torch dtype; uint8 and int8 are INT8, with `is_mx` uint8 is MX4.

        Raises:
            TypeError: `is_mx` is text.
            ValueError: no format has the dtype; with `is_mx` none has int8.
        """
        check_flags(is_mx=is_mx)
        if dtype == torch.uint8 and is_mx:
            return SparseType.MX4
        if dtype in (torch.uint8, torch.int8) and not is_mx:
            return SparseType.INT8
        if dtype == torch.float8_e4m3fnuz:  # E4M3 of AMD's GPUs
            return SparseType.NFP8
        for value, number_format in _FORMATS.items():
            if number_format.dtype == dtype:
                return SparseType(value)
        raise ValueError(f"no SparseType has the dtype {dtype}")

    def as_dtype(self) -> torch.dtype:
        """Return the torch dtype that stores the format."""
        return _FORMATS[self.value].dtype

    def bit_rate(self) -> int:
        """Return the number of bits per number."""
        return _FORMATS[self.value].bits

    def align_size(self) -> int:
        """Return the number that must divide the dim of a row in FBGEMM's layout."""
        return _FORMATS[self.value].dim_divisor

    def is_float(self) -> bool:
        """Return whether the format is a floating-point format."""
        return self.value in ("fp32", "fp16", "fp8", "bf16", "nfp8")

    def default_config(self) -> "QuantizationConfig":
        """Return new options of the format: FP8 has 4 exponent bits of bias 7, others have none."""
        return FP8QuantizationConfig(4, 7) if self is SparseType.FP8 else QuantizationConfig()


ELEMENT_SIZE = {
    SparseType(value): number_format.bits // 8
    for value, number_format in _FORMATS.items()
    if number_format.bits >= 8
}
"""Bytes per value of the formats with whole bytes."""


class QuantizationConfig:
    """Options of a number format by name, in `config`; this base class has none."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """Return -1, as FBGEMM does for a format without options."""
        return -1


class FP8QuantizationConfig(QuantizationConfig):
    """Options of FP8: `exponent_bits`, `exponent_bias`, and the largest value, `max_position`."""

    def __init__(self, exponent_bits: int, exponent_bias: int) -> None:
        super().__init__()
        largest_exponent = 2**exponent_bits - 2 - exponent_bias
        self.config = {
            "exponent_bits": exponent_bits,
            "exponent_bias": exponent_bias,
            "max_position": 2**largest_exponent * (2 - 2.0 ** (exponent_bits - 7)),
        }

    def get(self, name: str) -> Any:
        """Return an option; raise RuntimeError if `name` is none of the three."""
        if name not in self.config:
            raise RuntimeError(f"{name} must be set in config")
        return self.config[name]


WeightDecayMode = enum.IntEnum(
    "WeightDecayMode", "NONE L2 DECOUPLE COUNTER COWCLIP DECOUPLE_GLOBAL", start=0
)
"""How `weight_decay` is applied."""


CounterWeightDecayMode = enum.IntEnum(
    "CounterWeightDecayMode", "NONE L2 DECOUPLE ADAGRADW", start=0
)
"""How counter-based regularisation and CowClip apply `weight_decay`."""


StepMode = enum.IntEnum("StepMode", "NONE USE_COUNTER USE_ITER", start=0)
"""Whether ENSEMBLE_ROWWISE_ADAGRAD clears its average after each update of it: only NONE does."""


LearningRateMode = enum.IntEnum(
    "LearningRateMode", "EQUAL TAIL_ID_LR_INCREASE TAIL_ID_LR_DECREASE COUNTER_SGD", start=-1
)
"""How the learning rate depends on the counter of a row."""


GradSumDecay = enum.IntEnum("GradSumDecay", "NO_DECAY CTR_DECAY", start=-1)
"""How the counter decays Adagrad's sum; CTR_DECAY raises, because FBGEMM does not define it."""


class UVMCacheStatsIndex(enum.IntEnum):
    """Positions of the counts in the result of `get_uvm_cache_stats()`."""

    num_calls = 0
    num_requested_indices = 1
    num_unique_indices = 2
    num_unique_misses = 3
    num_conflict_unique_misses = 4
    num_conflict_misses = 5


@dataclass(frozen=True)
class TailIdThreshold:
    """Count above which the learning rate of a row changes, see `LearningRateMode`.

    It is `val`, or with `is_ratio` `val` times the maximum count of the rows.
    """

    val: float = 0
    is_ratio: bool = False

    def __post_init__(self) -> None:
        check_flags(is_ratio=self.is_ratio)


@dataclass(frozen=True)
class CounterBasedRegularizationDefinition:
    """Options of WeightDecayMode.COUNTER."""

    counter_weight_decay_mode: CounterWeightDecayMode = CounterWeightDecayMode.NONE
    counter_halflife: int = -1
    adjustment_iter: int = -1
    adjustment_ub: float = 1.0
    learning_rate_mode: LearningRateMode = LearningRateMode.EQUAL
    grad_sum_decay: GradSumDecay = GradSumDecay.NO_DECAY
    tail_id_threshold: TailIdThreshold = field(default_factory=TailIdThreshold)
    max_counter_update_freq: int = 1000


@dataclass(frozen=True)
class CowClipDefinition:
    """Options of WeightDecayMode.COWCLIP."""

    counter_weight_decay_mode: CounterWeightDecayMode = CounterWeightDecayMode.NONE
    counter_halflife: int = -1
    weight_norm_coefficient: float = 0.0
    lower_bound: float = 0.0


@dataclass(frozen=True)
class GlobalWeightDecayDefinition:
    """Options of WeightDecayMode.DECOUPLE_GLOBAL."""

    start_iter: int = 0
    lower_bound: float = 0.0


@dataclass(frozen=True)
class UserEnabledConfigDefinition:
    """Options of EXACT_SGD; tables refuse `use_rowwise_bias_correction`, an option of ADAM."""

    use_rowwise_bias_correction: bool = False
    use_writeback_bwd_prehook: bool = False
    writeback_first_feature_only: bool = False
    precompute_writeback: bool = False

    def __post_init__(self) -> None:
        check_flags(**vars(self))


@dataclass(frozen=True)
class EnsembleModeDefinition:
    """Options of ENSEMBLE_ROWWISE_ADAGRAD."""

    step_ema: float = 10000
    step_swap: float = 10000
    step_start: float = 0
    step_ema_coef: float = 0.6
    step_mode: StepMode = StepMode.USE_ITER


@dataclass(frozen=True)
class EmainplaceModeDefinition:
    """Options of EMAINPLACE_ROWWISE_ADAGRAD."""

    step_ema: float = 10
    step_start: float = 0
    step_ema_coef: float = 0.6


class MultiPassPrefetchConfig(NamedTuple):
    """Split the prefetch of a large batch into passes.

    Attributes:
        num_passes: maximum number of passes, >= 1.
        min_splitable_pass_size: minimum number of lookups of a batch that is split, >= 1. In FBGEMM
            it is the minimum of each pass but the last.
    """

    num_passes: int = 12
    min_splitable_pass_size: int = 6 * 1024 * 1024


class RecordCacheMetrics(NamedTuple):
    """Choice of the cache misses that are counted: per batch, and per table."""

    record_cache_miss_counter: bool
    record_tablewise_cache_miss: bool


class VBEMetadata(NamedTuple):
    """Layout of a batch whose features or ranks have different numbers of bags.

    Attributes:
        B_offsets: first bag of each feature, and the number of bags, int32 `[F + 1]`.
        output_offsets_feature_rank: first output element of each rank and feature, rank after rank,
            and the number of elements, int64 `[ranks * F + 1]`.
        B_offsets_rank_per_feature: first bag of each rank within each feature, int32 `[F, ranks +
            1]`.
        max_B: maximum number of bags of a feature.
        max_B_feature_rank: maximum number of bags of a feature and rank.
        output_size: number of output elements.
        vbe_output: tensor that the output is written to.
        vbe_output_offsets: first element there of each rank and feature, `[ranks, F]`.

    Without batch sizes per feature, tensors are None and numbers -1. `from_batch_sizes` leaves
    `vbe_output` and its offsets None.
    """

    B_offsets: Tensor | None = None
    output_offsets_feature_rank: Tensor | None = None
    B_offsets_rank_per_feature: Tensor | None = None
    max_B: int = -1
    max_B_feature_rank: int = -1
    output_size: int = -1
    vbe_output: Tensor | None = None
    vbe_output_offsets: Tensor | None = None

    @classmethod
    def from_batch_sizes(
        cls, sizes: Sequence[Sequence[int]] | None, dims: Sequence[int]
    ) -> "VBEMetadata":
        """Return the layout of a batch, with tensors on the CPU.

        Args:
            sizes: number of bags per feature and rank, `[F][ranks]`, with F and ranks >= 1; None
                for equal numbers.
            dims: columns of each feature, `[F]`.

        Raises:
            ValueError: `sizes` has not F lists of equal length, at least 1.
            TypeError: its elements are not lists.
        """
        if sizes is None:
            return cls()
        numbers_of_ranks = {len(sizes_of_feature) for sizes_of_feature in sizes}
        if len(sizes) != len(dims) or len(numbers_of_ranks) != 1 or 0 in numbers_of_ranks:
            raise ValueError(
                f"batch_size_per_feature_per_rank must be [F][ranks], of {len(dims)} features, got "
                f"{sizes}"
            )
        bags = torch.tensor(sizes, device="cpu")
        elements = (bags * torch.tensor(dims, device="cpu").unsqueeze(1)).t().flatten()
        first_output = functional.pad(elements.cumsum(0), (1, 0))
        return cls(
            functional.pad(bags.sum(1).cumsum(0), (1, 0)).int(),
            first_output,
            functional.pad(bags.cumsum(1), (1, 0)).int(),
            int(bags.sum(1).max()),
            int(bags.max()),
            int(first_output[-1]),
        )


@dataclass
class RESParams:
    """Options of raw embedding streaming, which emblib does not have; they are ignored."""

    res_server_port: int = 0
    res_store_shards: int = 1
    table_names: list[str] = field(default_factory=list)
    table_offsets: list[int] = field(default_factory=list)
    table_sizes: list[int] = field(default_factory=list)
    res_chunk_size: int = 500000
    res_num_consumers: int = 8
    res_num_uvm_hit_copy_threads: int = 4
    res_num_hbm_copy_threads: int = 4
    res_enabled_tables: list[str] = field(default_factory=list)
    enable_hbm_streaming: bool = False
    res_hbm_drain_interval: int = 1
    res_use_copy_done_token: bool = False
