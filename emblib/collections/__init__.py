"""Collections: tables of any kind behind keyed features, in as few kernels as their kinds allow."""

from emblib.collections.bags import EmbeddingBagCollection
from emblib.collections.configs import (
    Dynamic,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Kind,
    Plain,
    Quantized,
    TableConfig,
    TensorTrain,
)
from emblib.collections.feature_processors import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedProcessor,
)
from emblib.collections.groups import GroupInfo, TableGroups
from emblib.collections.sequences import EmbeddingCollection
from emblib.collections.slices import TableSlice

__all__ = [
    "Dynamic",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FeatureProcessedEmbeddingBagCollection",
    "GroupInfo",
    "Kind",
    "Plain",
    "PositionWeightedModule",
    "PositionWeightedProcessor",
    "Quantized",
    "TableConfig",
    "TableGroups",
    "TableSlice",
    "TensorTrain",
]
