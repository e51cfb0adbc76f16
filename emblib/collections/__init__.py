"""Collections: tables of any storage behind keyed features, in as few modules as possible."""

from emblib.collections.configs import EmbeddingBagConfig, EmbeddingConfig, TableConfig
from emblib.collections.feature_processors import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedProcessor,
)
from emblib.collections.groups import SliceGroup, TableGroups
from emblib.collections.modules import EmbeddingBagCollection, EmbeddingCollection
from emblib.collections.shared import (
    SharedTable,
    SharedTables,
    duplicate_tables,
    share_tables,
)

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FeatureProcessedEmbeddingBagCollection",
    "PositionWeightedModule",
    "PositionWeightedProcessor",
    "SharedTable",
    "SharedTables",
    "SliceGroup",
    "TableConfig",
    "TableGroups",
    "duplicate_tables",
    "share_tables",
]
