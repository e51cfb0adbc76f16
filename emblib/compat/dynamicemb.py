"""NVIDIA's DynamicEmb over emblib's dynamic tables: the same names, arguments and defaults.

Change the import and keep the code:

    from emblib.compat.dynamicemb import DynamicEmbDump, DynamicEmbTableOptions
    from emblib.compat.dynamicemb.planner import DynamicEmbParameterConstraints
    from emblib.compat.dynamicemb.shard import DynamicEmbeddingCollectionSharder

or keep the imports, too:

    import emblib.compat.dynamicemb
    emblib.compat.dynamicemb.install()  # before anything imports dynamicemb

`docs/dynamicemb.md` says what each option is here. What differs: it runs on a CPU; what a new row
starts with follows from the seed and its key; one batch has one result, on any number of threads;
options that DynamicEmb drops silently have their effect or raise. What there is not: its inference
tables. The planner and sharders are used with `emblib.compat.torchrec`.
"""

import sys as _sys
from types import ModuleType as _ModuleType

from emblib.compat.dynamicemb_dump import (
    DynamicEmbDump,
    DynamicEmbLoad,
    get_score,
    incremental_dump,
    set_score,
)
from emblib.compat.dynamicemb_planner import (
    DEFAULT_BUCKET_CAPACITY,
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
    align_to_table_size,
    complete_initializer_args,
    get_constraint_capacity,
    get_planner,
    get_sharded_table_capacity,
    get_table_value_bytes,
)
from emblib.compat.dynamicemb_sharders import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicEmbParameterSharding,
)
from emblib.compat.dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from emblib.compat.dynamicemb_types import (
    BATCH_SIZE_PER_DUMP,
    BUCKET_ALIGNMENT,
    MAX_BUCKET_CAPACITY,
    AdmissionStrategy,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from emblib.compat.fbgemm_types import BoundsCheckMode, EmbOptimType, WeightDecayMode
from emblib.compat.torchrec_types import data_type_to_dtype

_MODULES = {
    "batched_dynamicemb_tables": "BatchedDynamicEmbeddingTablesV2",
    "dump_load": "DynamicEmbDump DynamicEmbLoad",
    "dynamicemb_config": (
        "BATCH_SIZE_PER_DUMP DEFAULT_BUCKET_CAPACITY DynamicEmbCheckMode DynamicEmbEvictStrategy "
        "DynamicEmbPoolingMode DynamicEmbScoreStrategy DynamicEmbTableOptions align_to_table_size "
        "complete_initializer_args data_type_to_dtype get_constraint_capacity "
        "get_sharded_table_capacity get_table_value_bytes"
    ),
    "embedding_admission": "FrequencyAdmissionStrategy KVCounter",
    "get_planner": "get_planner",
    "incremental_dump": "get_score incremental_dump set_score",
    "optimizer": "EmbOptimType",
    "planner": (
        "DynamicEmbParameterConstraints DynamicEmbParameterSharding DynamicEmbeddingEnumerator "
        "DynamicEmbeddingShardingPlanner get_planner"
    ),
    "shard": "DynamicEmbeddingBagCollectionSharder DynamicEmbeddingCollectionSharder",
    "types": (
        "AdmissionStrategy BUCKET_ALIGNMENT DynamicEmbInitializerArgs DynamicEmbInitializerMode "
        "MAX_BUCKET_CAPACITY"
    ),
}
"""The modules of DynamicEmb that users import from, and their names."""


def _make_modules() -> dict[str, _ModuleType]:
    made = {}
    for module, names in _MODULES.items():
        one = _ModuleType(f"{__name__}.{module}", f"Names of DynamicEmb's module {module}.")
        vars(one).update({name: globals()[name] for name in names.split()})
        _sys.modules[one.__name__] = made[module] = one
    return made


_modules = _make_modules()


def install() -> None:
    """Let `import dynamicemb` import this module, and its submodules.

    Raises:
        RuntimeError: the real dynamicemb was imported before.
    """
    known = _sys.modules.get("dynamicemb")
    if known is not None and known is not _sys.modules[__name__]:
        raise RuntimeError("dynamicemb was imported already: call install() before")
    _sys.modules["dynamicemb"] = _sys.modules[__name__]
    _sys.modules.update({f"dynamicemb.{name}": module for name, module in _modules.items()})


def uninstall() -> None:
    """Undo the effect of `install`."""
    for name in ["dynamicemb", *(f"dynamicemb.{name}" for name in _modules)]:
        _sys.modules.pop(name, None)


__all__ = [
    "BATCH_SIZE_PER_DUMP",
    "BUCKET_ALIGNMENT",
    "DEFAULT_BUCKET_CAPACITY",
    "MAX_BUCKET_CAPACITY",
    "AdmissionStrategy",
    "BatchedDynamicEmbeddingTablesV2",
    "BoundsCheckMode",
    "DynamicEmbCheckMode",
    "DynamicEmbDump",
    "DynamicEmbEvictStrategy",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbLoad",
    "DynamicEmbParameterConstraints",
    "DynamicEmbParameterSharding",
    "DynamicEmbPoolingMode",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "DynamicEmbeddingBagCollectionSharder",
    "DynamicEmbeddingCollectionSharder",
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
    "EmbOptimType",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "WeightDecayMode",
    "align_to_table_size",
    "complete_initializer_args",
    "data_type_to_dtype",
    "get_constraint_capacity",
    "get_planner",
    "get_score",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
    "incremental_dump",
    "install",
    "set_score",
    "uninstall",
]
