"""Tables for inference: conversion of trained tables, pruning, and frozen files."""

from emblib.inference.conversion import (
    QuantizationError,
    for_inference,
    quantization_errors,
)
from emblib.inference.frozen import freeze, open_frozen
from emblib.inference.host_rows import HostEmbeddingBags
from emblib.inference.indexed import InferenceEmbeddingBags, RowIndex, prune, top_rows
from emblib.inference.served import (
    InferenceEmbeddingBagCollection,
    InferenceEmbeddingCollection,
)

__all__ = [
    "HostEmbeddingBags",
    "InferenceEmbeddingBagCollection",
    "InferenceEmbeddingBags",
    "InferenceEmbeddingCollection",
    "QuantizationError",
    "RowIndex",
    "for_inference",
    "freeze",
    "open_frozen",
    "prune",
    "quantization_errors",
    "top_rows",
]
