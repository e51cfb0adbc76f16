"""Migration of a model: its embeddings become tables of emblib, in place."""

from emblib.migration.base import (
    Bags,
    Left,
    Memory,
    NotMigrated,
    Replaced,
    Table,
    TorchWeight,
    Trained,
    chosen_rows,
    optimizer_for,
)
from emblib.migration.checks import Difference, Prediction, Speed, Times
from emblib.migration.model import Migration, migrate
from emblib.migration.torch_modules import (
    MigratedEmbedding,
    MigratedEmbeddingBag,
    check_weight,
)

__all__ = [
    "Bags",
    "Difference",
    "Left",
    "Memory",
    "MigratedEmbedding",
    "MigratedEmbeddingBag",
    "Migration",
    "NotMigrated",
    "Prediction",
    "Replaced",
    "Speed",
    "Table",
    "Times",
    "TorchWeight",
    "Trained",
    "check_weight",
    "chosen_rows",
    "migrate",
    "optimizer_for",
]
