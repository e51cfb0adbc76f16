"""Collections spread over the ranks of a process group."""

from emblib.sharding.codecs import BF16, FP8, FP16, FP32, INT8
from emblib.sharding.dense import DDP, FullyShard
from emblib.sharding.exchange import Wire
from emblib.sharding.failures import RankFailure, guarded, launched
from emblib.sharding.model_parallel import DistributedModelParallel
from emblib.sharding.parameters import clip_grad_norm_
from emblib.sharding.pipelines import (
    Equal,
    Longest,
    PrefetchTrainPipelineSparseDist,
    Progress,
    Shortest,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    empty_batch,
)
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.ranks import Ranks
from emblib.sharding.shard import collections_of, construct_module_plan, shard
from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
from emblib.sharding.sharded_sequences import ShardedEmbeddingCollection
from emblib.sharding.sharded_tables import GradientReduction
from emblib.sharding.sharding_types import (
    Box,
    ShardingType,
    TableSharding,
    World,
    column_wise,
    custom,
    data_parallel,
    grid,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)

__all__ = [
    "BF16",
    "DDP",
    "FP8",
    "FP16",
    "FP32",
    "INT8",
    "Box",
    "DistributedModelParallel",
    "Equal",
    "FullyShard",
    "GradientReduction",
    "Longest",
    "PrefetchTrainPipelineSparseDist",
    "Progress",
    "RankFailure",
    "Ranks",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingPlan",
    "ShardingType",
    "Shortest",
    "TableSharding",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "Wire",
    "World",
    "clip_grad_norm_",
    "collections_of",
    "column_wise",
    "construct_module_plan",
    "custom",
    "data_parallel",
    "empty_batch",
    "grid",
    "guarded",
    "launched",
    "row_wise",
    "shard",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
]
