"""Collect the names of `emblib.compat.torchrec` from all modules that stand for TorchRec's."""

from types import ModuleType
from typing import Any

from emblib import collections, jagged
from emblib.collections import optimizers
from emblib.compat import (
    fbgemm_types,
    torchrec_comms,
    torchrec_dense,
    torchrec_dist_data,
    torchrec_managed,
    torchrec_model,
    torchrec_optim,
    torchrec_planner,
    torchrec_quant,
    torchrec_script,
    torchrec_sharders,
    torchrec_sharding,
    torchrec_types,
    torchrec_utils,
)
from emblib.compat.torchrec_names import MODULES, RAISES
from emblib.sharding import awaitables, codecs, planner

# Modules that implement names. If several have a name (an imported one counts), the first one has
# TorchRec's form of it.
_IMPLEMENTING_MODULES: tuple[ModuleType, ...] = (
    torchrec_optim,
    torchrec_types,
    torchrec_comms,
    torchrec_dense,
    torchrec_dist_data,
    torchrec_utils,
    torchrec_managed,
    torchrec_sharders,
    torchrec_sharding,
    torchrec_planner,
    torchrec_model,
    torchrec_quant,
    torchrec_script,
    fbgemm_types,
    optimizers,
    awaitables,
    jagged,
    collections,
)
# Implementations that have another name than TorchRec's, by TorchRec's name.
_IMPLEMENTATION_OF_NAME: dict[str, Any] = {
    "BaseEmbeddingSharder": torchrec_sharders.ModuleSharder,
    "BaseQuantEmbeddingSharder": torchrec_quant.QuantEmbeddingBagCollectionSharder.__base__,
    "EmbeddingPlannerBase": torchrec_planner.EmbeddingShardingPlanner,
    "GenericMeta": type,
    "LazyNoWait": awaitables.LazyReadyAwaitable,
    "NoOpQuantizedCommCodec": codecs.FP32,
    "NoWait": awaitables.ReadyAwaitable,
    "PlannerError": planner.PlanError,
    "ShardedEmbeddingModule": torchrec_sharders.ShardedModule,
    "ShardingPlanner": torchrec_planner.EmbeddingShardingPlanner,
}
_NAMES_OF_FBGEMM = ("EmbOptimType",)  # a value in `fused_params`, which TorchRec users import


def find_implementations() -> dict[str, Any]:
    """Return the implementation of each name in `MODULES`, by emblib's name of it.

    Names in `RAISES`, and names without an implementation, are left out.
    """
    entries = [entry.rpartition("=")[2] for text in MODULES.values() for entry in text.split()]
    values_by_name: dict[str, Any] = {}
    for name in dict.fromkeys([*entries, *_NAMES_OF_FBGEMM]):
        if name in _IMPLEMENTATION_OF_NAME:
            values_by_name[name] = _IMPLEMENTATION_OF_NAME[name]
            continue
        source = next((module for module in _IMPLEMENTING_MODULES if name in vars(module)), None)
        if source is not None and name not in RAISES:
            values_by_name[name] = vars(source)[name]
    return values_by_name
