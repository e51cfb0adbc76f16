"""Embedding tables for recommender systems: table-batched and tensor-train, on CPU and CUDA."""

from emblib import jagged, ops, optim, reference
from emblib.specs import (
    BoundsCheck,
    Cache,
    CachePolicy,
    MultiPass,
    Placement,
    Pooling,
    Precision,
    StochasticRounding,
    TableSpec,
    TTSpec,
)
from emblib.tables import TableBatchedEmbeddingBags, TTEmbeddingBag

__version__ = "0.1.0"

__all__ = [
    "BoundsCheck",
    "Cache",
    "CachePolicy",
    "MultiPass",
    "Placement",
    "Pooling",
    "Precision",
    "StochasticRounding",
    "TTEmbeddingBag",
    "TTSpec",
    "TableBatchedEmbeddingBags",
    "TableSpec",
    "jagged",
    "ops",
    "optim",
    "reference",
]
