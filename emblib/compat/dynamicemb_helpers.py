"""DynamicEmb's helpers: names of types and files, sizes of states, and the tables of a model.

Programs that use DynamicEmb, e.g. its examples, import these from its submodules. emblib does not
have the objects that drive DynamicEmb's kernels: storages, caches, optimizers and initializers.
Their names can be imported, and raise when they are used (`RAISES`).
"""

from __future__ import annotations

import enum
import glob
from pathlib import Path
from typing import Any

import torch
from torch import nn

from emblib import sharding
from emblib.compat import dynamicemb_arguments, torchrec_sharders, torchrec_types
from emblib.compat.dynamicemb_dump import modules_of
from emblib.compat.dynamicemb_functions import DynamicEmbTables
from emblib.compat.dynamicemb_sharders import DYNAMICEMB_KERNEL, DynamicEmbHash
from emblib.compat.dynamicemb_tables import num_state_values
from emblib.compat.dynamicemb_types import DynamicEmbEvictStrategy
from emblib.compat.fbgemm_types import EmbOptimType, as_member
from emblib.compat.raising import raising_class
from emblib.dynamic.saving import dynamicemb_files
from emblib.dynamic.saving.dumps import DumpError
from emblib.sharding.dense import unwrapped

# Dtypes

KEY_TYPE = SCORE_TYPE = COUNTER_TYPE = DEFAULT_INDEX_TYPE = torch.int64
EMBEDDING_TYPE = OPT_STATE_TYPE = torch.float32
DEBUG_EMB_INITIALIZER_MOD = 100000
"""Divisor of initializers of mode DEBUG: the initial value is the key modulo this number."""

TORCHREC_TYPES = {
    torchrec_sharders.EmbeddingBagCollection,
    torchrec_sharders.EmbeddingCollection,
}


class DynamicEmbDataType(enum.Enum):
    """DynamicEmb's names of dtypes."""

    Float32 = torch.float32
    BFloat16 = torch.bfloat16
    Float16 = torch.float16
    Int64 = torch.int64
    UInt64 = torch.uint64
    Int32 = torch.int32
    UInt32 = torch.uint32


DTYPE_NUM_BYTES = {
    member.value: member.value.itemsize
    for member in DynamicEmbDataType
    if member.value.is_floating_point
}


def torch_to_dyn_emb(torch_dtype: torch.dtype) -> DynamicEmbDataType:
    """Return DynamicEmb's name of a dtype.

    Raises:
        ValueError: DynamicEmb does not have the dtype.
    """
    return DynamicEmbDataType(torch_dtype)


def dyn_emb_to_torch(data_type: DynamicEmbDataType) -> torch.dtype:
    """Return the dtype of a name of DynamicEmb."""
    return DynamicEmbDataType(data_type).value


def data_type_to_dyn_emb(data_type: Any) -> DynamicEmbDataType:
    """Return DynamicEmb's name of a data type of TorchRec, or of a dtype.

    Raises:
        ValueError: the type is quantised or an integer, or DynamicEmb does not have it.
    """
    return torch_to_dyn_emb(torchrec_types.data_type_to_dtype(data_type))


def dtype_to_bytes(dtype: torch.dtype) -> int:
    """Return the bytes per number of a dtype."""
    return dtype.itemsize


# Optimizers and eviction


def string_to_evict_strategy(strategy_str: str) -> DynamicEmbEvictStrategy:
    """Return the eviction order of a name, e.g. "KLru"; dumps have "EvictStrategy.KLru".

    Raises:
        ValueError: the name is unknown.
    """
    strategy_of_name = {f"K{s.name.title().replace('_', '')}": s for s in DynamicEmbEvictStrategy}
    if strategy_str not in strategy_of_name:
        raise ValueError(
            f"an eviction strategy is one of {list(strategy_of_name)}, got {strategy_str!r}"
        )
    return strategy_of_name[strategy_str]


def get_optimizer_state_dim(
    optimizer_type: EmbOptimType, dim: int, dtype: torch.dtype | None = None
) -> int:
    """Return how many numbers of optimizer state a row has in memory.

    The result is that of `get_optimizer_ckpt_state_dim`, which has the arguments and errors.
    DynamicEmb pads the state of row-wise Adagrad to 16 bytes; emblib does not pad it.
    """
    return get_optimizer_ckpt_state_dim(optimizer_type, dim, dtype)


def get_optimizer_ckpt_state_dim(
    optimizer_type: EmbOptimType, dim: int, dtype: torch.dtype | None = None
) -> int:
    """Return how many numbers of optimizer state a row has in a dump.

    Args:
        optimizer_type: optimizer of the table.
        dim: length of a row.
        dtype: ignored: states are float32.

    Raises:
        NotImplementedError: dynamic tables cannot have the optimizer.
    """
    rule = dynamicemb_arguments.default_optimizer(as_member(EmbOptimType, optimizer_type))
    return num_state_values(rule, dim)


# Files of dumps

# Names of items in the names of files, by the suffixes that `find_files` takes.
_ITEM_OF_SUFFIX = {
    "emb_keys": "emb_keys",
    "emb_values": "emb_values",
    "emb_scores": "emb_scores",
    "opt_values": "emb_opt_values",
    "counter_keys": "counter_keys",
    "counter_frequencies": "counter_frequencies",
}


def encode_meta_json_file_path(root_path: str, table_name: str) -> str:
    """Return the path of the JSON file with the options and hyperparameters of a table."""
    return str(dynamicemb_files.arguments_path(root_path, table_name))


def encode_checkpoint_file_path(
    root_path: str, table_name: str, rank: int, world_size: int, item: str
) -> str:
    """Return the path of a rank's file with an item of a table.

    `item` is "keys", "values", "scores" or "opt_values".

    Raises:
        ValueError: `item` is another one.
    """
    return _item_path(root_path, table_name, rank, world_size, f"emb_{item}")


def encode_counter_checkpoint_file_path(
    root_path: str, table_name: str, rank: int, world_size: int, item: str
) -> str:
    """Return the path of a rank's file with the counts of admission of a table.

    `item` is "keys" or "frequencies".

    Raises:
        ValueError: `item` is another one.
    """
    return _item_path(root_path, table_name, rank, world_size, f"counter_{item}")


def _item_path(root: str, table: str, rank: int, world_size: int, item: str) -> str:
    if item not in _ITEM_OF_SUFFIX.values():
        raise ValueError(f"a dump has no {item!r}; it has {list(_ITEM_OF_SUFFIX.values())}")
    folder = Path(root).expanduser()
    return str(folder / dynamicemb_files.file_name(table, item, rank, world_size))


def find_files(root_path: str, table_name: str, suffix: str) -> tuple[list[str], int]:
    """Return the files of an item of a table, in the order of the ranks, and the number of ranks.

    Args:
        root_path: directory of the dump.
        table_name: name of the table.
        suffix: name of the item, e.g. "emb_keys", a key of `_ITEM_OF_SUFFIX`.

    Returns:
        the paths, and the number of ranks that dumped; `[]` and 0 if there are no files.

    Raises:
        DumpError: some of the files are missing, or the dump has no keys, or keys of dumps of
            different numbers of ranks.
        ValueError: `suffix` is unknown.
    """
    if suffix not in _ITEM_OF_SUFFIX:
        raise ValueError(f"suffix must be one of {list(_ITEM_OF_SUFFIX)}, got {suffix!r}")
    item = _ITEM_OF_SUFFIX[suffix]
    pattern = dynamicemb_files.file_name(glob.escape(table_name), item, "*", "*")
    if not any(Path(root_path).expanduser().glob(pattern)):
        return [], 0
    world_size = dynamicemb_files.saved_world_size(root_path, table_name)
    paths = [
        _item_path(root_path, table_name, rank, world_size, item) for rank in range(world_size)
    ]
    if missing_paths := [path for path in paths if not Path(path).exists()]:
        raise DumpError(f"the dump is not whole: {', '.join(missing_paths)} is missing")
    return paths, world_size


# The tables of a model


def find_sharded_modules(module: nn.Module, path: str = "") -> list[tuple[str, str, nn.Module]]:
    """Return path, name and module of each sharded collection in a model.

    A path begins with `path` and "model", without a dot between them; the path within `module`
    follows.
    """
    collection_classes = (
        sharding.ShardedEmbeddingBagCollection,
        sharding.ShardedEmbeddingCollection,
    )
    return [
        (name, name.rpartition(".")[2], submodule)
        for name, submodule in unwrapped(module).named_modules(prefix=f"{path}model")
        if isinstance(submodule, collection_classes)
    ]


def get_dynamic_emb_module(model: nn.Module) -> list[DynamicEmbTables]:
    """Return the modules of dynamic tables in a model, also those of sharded collections."""
    return [tables for _, _, tables in modules_of(model)]


def check_emb_collection_modules(
    module: nn.Module, ret_list: list[Any], visited: set[int] | None = None
) -> None:
    """Append the result of `get_dynamic_emb_module` to a list, unless the module was visited.

    Args:
        module: model or part of one.
        ret_list: list, which is extended.
        visited: set of the ids of visited modules, to which that of `module` is added; None is an
            empty set.
    """
    visited = set() if visited is None else visited
    if id(module) not in visited:
        visited.add(id(module))
        ret_list += get_dynamic_emb_module(module)


DynamicEmbKernel = DYNAMICEMB_KERNEL
DynamicEmbeddingCollectionContext = torchrec_sharders.EmbeddingCollectionContext


class _ShardedDynamic(type):
    """Metaclass whose classes have emblib's sharded dynamic collections as instances."""

    emblib_class: type

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, cls.emblib_class):
            return False
        collection: Any = instance
        return any(isinstance(member.storage, DynamicEmbHash) for member in collection.configs)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__name__} is made by its sharder's shard(), or by DistributedModelParallel"
        )


class ShardedDynamicEmbeddingCollection(metaclass=_ShardedDynamic):
    """Sharded embedding collections with dynamic tables, for `isinstance`."""

    emblib_class = sharding.ShardedEmbeddingCollection


class ShardedDynamicEmbeddingBagCollection(metaclass=_ShardedDynamic):
    """Sharded embedding bag collections with dynamic tables, for `isinstance`."""

    emblib_class = sharding.ShardedEmbeddingBagCollection


_NAMES_OF_REASON = (
    (
        "a storage is an emblib.RowStore, e.g. HostRows, DiskRows or SQLiteRows; pass it to "
        "emblib.DynamicEmbeddingBags as BackingStore(store, mode)",
        "Storage Cache CopyMode",
    ),
    (
        "pass KVCounter(capacity), from which emblib makes the counter on the device; emblib's "
        "counters are emblib.ExactCounter and emblib.CountMinSketch",
        "Counter MultiTableKVCounter MemoryType",
    ),
    (
        "the module's arguments choose the optimizer, which runs in emblib's kernels; "
        "the module has set_learning_rate() and opt_args()",
        "OptimizerArgs BaseDynamicEmbeddingOptimizer SGDDynamicEmbeddingOptimizer "
        "AdamDynamicEmbeddingOptimizer AdaGradDynamicEmbeddingOptimizer "
        "RowWiseAdaGradDynamicEmbeddingOptimizer",
    ),
    (
        "DynamicEmbInitializerArgs chooses the initial values, which emblib's kernels write; "
        "emblib's initializers are in emblib.init",
        "BaseDynamicEmbInitializer NormalInitializer TruncatedNormalInitializer "
        "UniformInitializer ConstantInitializer DebugInitializer create_initializer_from_args",
    ),
    (
        "for inference, call eval() of the model; torch.export takes emblib's modules, see "
        "docs/dynamic.md",
        "InferenceEmbeddingCollection InferenceLinearBucketTable "
        "apply_inference_embedding_collection create_inference_embedding_collection",
    ),
)
RAISES = {
    name: raising_class(name, reason, "DynamicEmb")
    for reason, names in _NAMES_OF_REASON
    for name in names.split()
}
"""Names that can be imported, and raise when they are used, with advice."""
