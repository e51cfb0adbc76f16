"""Migration of a model: its embeddings become tables of emblib, in place."""

from emblib.migration.base import (
    Bags,
    Left,
    MigratedTable,
    NotMigrated,
    Replaced,
    TorchWeight,
    Trained,
    TrainingMemory,
    chosen_rows,
    optimizer_for,
)
from emblib.migration.checks import Difference, MigrationCost, Speed, Times
from emblib.migration.model import Migration, migrate
from emblib.migration.torch_modules import (
    MigratedEmbedding,
    MigratedEmbeddingBag,
    check_weight,
    refuse_skipped_ids,
)

__all__ = [
    "Bags",
    "Difference",
    "Left",
    "MigratedEmbedding",
    "MigratedEmbeddingBag",
    "MigratedTable",
    "Migration",
    "MigrationCost",
    "NotMigrated",
    "Replaced",
    "Speed",
    "Times",
    "TorchWeight",
    "Trained",
    "TrainingMemory",
    "check_weight",
    "chosen_rows",
    "migrate",
    "optimizer_for",
    "refuse_skipped_ids",
]
