"""NVIDIA's DynamicEmb, implemented by emblib's dynamic tables, with the same names and arguments.

Change the import and keep the code:

    from emblib.compat.dynamicemb import DynamicEmbDump, DynamicEmbTableOptions
    from emblib.compat.dynamicemb.planner import DynamicEmbParameterConstraints
    from emblib.compat.dynamicemb.shard import DynamicEmbeddingCollectionSharder

or keep the imports, too:

    import emblib.compat.dynamicemb
    emblib.compat.dynamicemb.install()  # before anything imports dynamicemb

`docs/dynamicemb.md` says what every option does here. Differences from DynamicEmb: tables also run
on a CPU; the initial values of a row depend on the seed and the key only; the result of a batch
does not depend on the number of threads; options that DynamicEmb silently ignores either take
effect here or raise. DynamicEmb's inference tables are missing. The planner and the sharders work
with `emblib.compat.torchrec`.
"""

import sys as _sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from emblib.compat import dynamicemb_dump as _dynamicemb_dump
from emblib.compat import dynamicemb_helpers as _dynamicemb_helpers
from emblib.compat import dynamicemb_planner as _dynamicemb_planner
from emblib.compat import dynamicemb_sharders as _dynamicemb_sharders
from emblib.compat import dynamicemb_tables as _dynamicemb_tables
from emblib.compat import dynamicemb_types as _dynamicemb_types
from emblib.compat import fbgemm_types as _fbgemm_types
from emblib.compat import torchrec_types as _torchrec_types
from emblib.compat.dynamicemb_helpers import RAISES as _RAISES

_NAMES_BY_MODULE = {
    "batched_dynamicemb_tables": (
        "BatchedDynamicEmbeddingTablesV2 encode_checkpoint_file_path "
        "encode_counter_checkpoint_file_path encode_meta_json_file_path find_files"
    ),
    "dump_load": (
        "DynamicEmbDump DynamicEmbLoad check_emb_collection_modules find_sharded_modules "
        "get_dynamic_emb_module"
    ),
    "dynamicemb_config": (
        "BATCH_SIZE_PER_DUMP DEBUG_EMB_INITIALIZER_MOD DEFAULT_BUCKET_CAPACITY DEFAULT_INDEX_TYPE "
        "DynamicEmbCheckMode DynamicEmbEvictStrategy DynamicEmbInitializerArgs "
        "DynamicEmbInitializerMode DynamicEmbKernel DynamicEmbPoolingMode DynamicEmbScoreStrategy "
        "DynamicEmbTableOptions ScoreStrategy align_to_table_size complete_initializer_args "
        "data_type_to_dtype data_type_to_dyn_emb dtype_to_bytes dyn_emb_to_torch "
        "get_constraint_capacity get_sharded_table_capacity get_table_value_bytes "
        "string_to_evict_strategy"
    ),
    "embedding_admission": "FrequencyAdmissionStrategy KVCounter MultiTableKVCounter",
    "exportable_tables": (
        "InferenceEmbeddingCollection InferenceLinearBucketTable "
        "apply_inference_embedding_collection create_inference_embedding_collection"
    ),
    "get_planner": "get_planner",
    "incremental_dump": "get_score incremental_dump set_score",
    "initializer": (
        "BaseDynamicEmbInitializer ConstantInitializer DebugInitializer NormalInitializer "
        "TruncatedNormalInitializer UniformInitializer create_initializer_from_args"
    ),
    "optimizer": (
        "AdaGradDynamicEmbeddingOptimizer AdamDynamicEmbeddingOptimizer "
        "BaseDynamicEmbeddingOptimizer EmbOptimType OptimizerArgs "
        "RowWiseAdaGradDynamicEmbeddingOptimizer SGDDynamicEmbeddingOptimizer "
        "get_optimizer_ckpt_state_dim get_optimizer_state_dim"
    ),
    "planner": (
        "DynamicEmbParameterConstraints DynamicEmbParameterSharding DynamicEmbeddingEnumerator "
        "DynamicEmbeddingShardingPlanner get_planner"
    ),
    "planner.enumerators": "DynamicEmbeddingEnumerator",
    "planner.planner": (
        "DynamicEmbParameterConstraints DynamicEmbParameterSharding DynamicEmbeddingShardingPlanner"
    ),
    "shard": (
        "DynamicEmbeddingBagCollectionSharder DynamicEmbeddingCollectionSharder "
        "ShardedDynamicEmbeddingBagCollection ShardedDynamicEmbeddingCollection"
    ),
    "shard.embedding": (
        "DynamicEmbeddingCollectionContext DynamicEmbeddingCollectionSharder "
        "ShardedDynamicEmbeddingCollection"
    ),
    "shard.embeddingbag": (
        "DynamicEmbeddingBagCollectionSharder ShardedDynamicEmbeddingBagCollection"
    ),
    "types": (
        "AdmissionStrategy BUCKET_ALIGNMENT COUNTER_TYPE Cache CopyMode Counter "
        "DEMB_TABLE_ALIGN_SIZE DynamicEmbInitializerArgs DynamicEmbInitializerMode EMBEDDING_TYPE "
        "KEY_TYPE MAX_BUCKET_CAPACITY MemoryType OPT_STATE_TYPE SCORE_TYPE Storage"
    ),
    "utils": "DTYPE_NUM_BYTES TORCHREC_TYPES torch_to_dyn_emb",
}
"""The names of each module of DynamicEmb that users import from, by the path below `dynamicemb`."""
# Names of the module `dynamicemb` itself that no module below it has.
_TOP_LEVEL_ONLY_NAMES = "BoundsCheckMode DynamicEmbDataType WeightDecayMode"
# Modules that implement names. If several define a name, the first in this order is used: it has
# DynamicEmb's form.
_IMPLEMENTING_MODULES: tuple[_ModuleType, ...] = (
    _dynamicemb_helpers,
    _dynamicemb_dump,
    _dynamicemb_planner,
    _dynamicemb_sharders,
    _dynamicemb_tables,
    _dynamicemb_types,
    _fbgemm_types,
    _torchrec_types,
)


def _find_implementations() -> dict[str, _Any]:
    """Return {name: implementation} for all names but those in `_RAISES`, sorted by name."""
    texts = (*_NAMES_BY_MODULE.values(), _TOP_LEVEL_ONLY_NAMES)
    names = {name for text in texts for name in text.split()}
    implementations = {
        name: next(vars(m)[name] for m in _IMPLEMENTING_MODULES if name in vars(m))
        for name in names - _RAISES.keys()
    }
    return dict(sorted(implementations.items()))


def _make_modules() -> dict[str, _ModuleType]:
    """Make the modules of `_NAMES_BY_MODULE` below this one, and register them in `sys.modules`.

    Return {path below this module: module}.
    """
    objects = _implementations | _RAISES
    modules: dict[str, _ModuleType] = {}
    for path, names in _NAMES_BY_MODULE.items():
        module = _ModuleType(f"{__name__}.{path}", f"Names of DynamicEmb's module {path}.")
        vars(module).update({name: objects[name] for name in names.split()})
        parent, _, last_name = path.rpartition(".")
        if parent:
            modules[parent].__path__ = []
            setattr(modules[parent], last_name, module)
        else:
            # The functions `get_planner` and `incremental_dump`, which have names of modules, stay.
            globals().setdefault(last_name, module)
        _sys.modules[module.__name__] = modules[path] = module
    return modules


_implementations = _find_implementations()
globals().update(_implementations | _RAISES)
_modules = _make_modules()

if _TYPE_CHECKING:  # type checkers cannot see the names of `_NAMES_BY_MODULE`

    def __getattr__(name: str) -> _Any: ...


def install() -> None:
    """Make `import dynamicemb` import this module, and its submodules; a second call does nothing.

    Raises:
        RuntimeError: the real dynamicemb was imported before.
    """
    imported_module = _sys.modules.get("dynamicemb")
    if imported_module is not None and imported_module is not _sys.modules[__name__]:
        raise RuntimeError("dynamicemb was imported already: call install() before")
    _sys.modules["dynamicemb"] = _sys.modules[__name__]
    _sys.modules.update({f"dynamicemb.{name}": module for name, module in _modules.items()})


def uninstall() -> None:
    """Undo `install`; do nothing if nothing, or the real dynamicemb, is installed."""
    if _sys.modules.get("dynamicemb") is not _sys.modules[__name__]:
        return
    for name in ["dynamicemb", *(f"dynamicemb.{name}" for name in _modules)]:
        _sys.modules.pop(name, None)


__all__ = ["install", "uninstall", *_implementations]
