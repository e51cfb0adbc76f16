"""Small modules of DynamicEmb's kind, and how the tests drive them."""

from typing import Any

import torch
from torch import Tensor

from emblib.compat.dynamicemb import (
    BatchedDynamicEmbeddingTablesV2,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
)

DEBUG = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.DEBUG)
MODULE_ARGUMENTS = {
    "learning_rate",
    "optimizer",
    "pooling_mode",
    "table_names",
    "eps",
    "device",
    "weight_decay",
    "initial_accumulator_value",
    "feature_table_map",
    "beta1",
    "beta2",
    "output_dtype",
    "enforce_hbm",
}


def options(**changes: Any) -> DynamicEmbTableOptions:
    """Of a table of 32 rows of 4, whose new rows are their keys."""
    given = {"dim": 4, "max_capacity": 32, "initializer_args": DEBUG, **changes}
    return DynamicEmbTableOptions(**given)


def one_table(**changes: Any) -> BatchedDynamicEmbeddingTablesV2:
    """A module of one table, without pooling; arguments are of the module or of the table."""
    module = {k: changes.pop(k) for k in MODULE_ARGUMENTS & changes.keys()}
    module.setdefault("pooling_mode", DynamicEmbPoolingMode.NONE)
    return BatchedDynamicEmbeddingTablesV2([options(**changes)], **module)


def look_up(module: BatchedDynamicEmbeddingTablesV2, ids: Any, **more: Any) -> Tensor:
    """A batch of bags of one id."""
    ids = torch.as_tensor(ids)
    return module(ids, torch.arange(ids.numel() + 1), **more)


def keys_of(module: BatchedDynamicEmbeddingTablesV2) -> list[int]:
    """What the first table holds."""
    return sorted(module.bags.index.export(0).keys.tolist())


def rows_of(module: BatchedDynamicEmbeddingTablesV2, ids: Any, **more: Any) -> Tensor:
    """What is read of ids, changing nothing."""
    was = module.training
    module.eval()
    with torch.no_grad():
        rows = look_up(module, ids, **more)
    module.train(was)
    return rows
