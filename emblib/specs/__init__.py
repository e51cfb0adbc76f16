"""Frozen descriptions of tables, their options as enums, and checks of arguments."""

from emblib.specs.caches import CacheConfig, CachePolicy, MultiPassPrefetch, Verify
from emblib.specs.checks import (
    FLOAT_DTYPES,
    OptionEnum,
    check_bool,
    check_count,
    check_counts,
    check_float_dtype,
    check_sequence,
    format_config,
)
from emblib.specs.dynamic import (
    SLOTS_PER_BUCKET,
    CountMinSketch,
    DynamicSpec,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    InsertPolicy,
    OnInsertFailure,
    PerFeature,
)
from emblib.specs.tables import (
    BoundsCheck,
    MatmulPrecision,
    Placement,
    Pooling,
    Precision,
    StochasticRounding,
    TableSpec,
)
from emblib.specs.tensor_trains import IdOrder, TTSpec, check_cores

__all__ = [
    "FLOAT_DTYPES",
    "SLOTS_PER_BUCKET",
    "BoundsCheck",
    "CacheConfig",
    "CachePolicy",
    "CountMinSketch",
    "DynamicSpec",
    "Eviction",
    "ExactCounter",
    "FrequencyAdmission",
    "IdOrder",
    "InsertPolicy",
    "MatmulPrecision",
    "MultiPassPrefetch",
    "OnInsertFailure",
    "OptionEnum",
    "PerFeature",
    "Placement",
    "Pooling",
    "Precision",
    "StochasticRounding",
    "TTSpec",
    "TableSpec",
    "Verify",
    "check_bool",
    "check_cores",
    "check_count",
    "check_counts",
    "check_float_dtype",
    "check_sequence",
    "format_config",
]
