"""Embedding tables for recommender systems: table-batched and tensor-train, on CPU and CUDA."""

from emblib import jagged, ops, optim, reference, trace
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
from emblib.trace import LookupTrace, TracedFeature, TraceRecorder

__version__ = "0.1.0"

__all__ = [
    "BoundsCheck",
    "Cache",
    "CachePolicy",
    "LookupTrace",
    "MultiPass",
    "Placement",
    "Pooling",
    "Precision",
    "StochasticRounding",
    "TTEmbeddingBag",
    "TTSpec",
    "TableBatchedEmbeddingBags",
    "TableSpec",
    "TraceRecorder",
    "TracedFeature",
    "jagged",
    "ops",
    "optim",
    "reference",
    "trace",
]
