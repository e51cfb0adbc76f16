"""Checkpoints of sharded modules, which load with any other plan and number of ranks."""

from emblib.sharding.checkpoints.loading import latest, load, load_export
from emblib.sharding.checkpoints.saving import async_save, export, save
from emblib.sharding.checkpoints.sharded_table import KeyedRows, RowStates, ShardedTable
from emblib.sharding.checkpoints.state_trees import CheckpointError

__all__ = [
    "CheckpointError",
    "KeyedRows",
    "RowStates",
    "ShardedTable",
    "async_save",
    "export",
    "latest",
    "load",
    "load_export",
    "save",
]
