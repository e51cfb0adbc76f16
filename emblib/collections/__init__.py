"""Collections: tables of any kind behind keyed features, in as few kernels as their kinds allow."""

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
from emblib.collections.kernels import TableSlice
from emblib.collections.modules import EmbeddingBagCollection, EmbeddingCollection

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
