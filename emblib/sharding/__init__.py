"""Shard collections over the ranks of a process group: plans, sharded modules and pipelines."""

from emblib.sharding.codecs import BF16, FP8, FP16, FP32, INT8, CommPrecision
from emblib.sharding.dense import DDP, FullyShard
from emblib.sharding.failures import RankFailure, detect_rank_failures, init_distributed
from emblib.sharding.model_parallel import DistributedModelParallel
from emblib.sharding.parameters import clip_grad_norm_
from emblib.sharding.pipelines import (
    AssumeEqual,
    DrainAll,
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    Progress,
    StopAtShortest,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    empty_batch,
)
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.ranks import RankGroup
from emblib.sharding.replicas import ReplicatedModelParallel
from emblib.sharding.shard import collections_of, construct_module_plan, shard
from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
from emblib.sharding.sharded_sequences import ShardedEmbeddingCollection
from emblib.sharding.sharded_tables import GradientReduction
from emblib.sharding.sharding_types import (
    ParameterSharding,
    Shard,
    ShardingType,
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
    "AssumeEqual",
    "CommPrecision",
    "DistributedModelParallel",
    "DrainAll",
    "EvalPipelineSparseDist",
    "FullyShard",
    "GradientReduction",
    "ParameterSharding",
    "PrefetchTrainPipelineSparseDist",
    "Progress",
    "RankFailure",
    "RankGroup",
    "ReplicatedModelParallel",
    "Shard",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingPlan",
    "ShardingType",
    "StopAtShortest",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "World",
    "clip_grad_norm_",
    "collections_of",
    "column_wise",
    "construct_module_plan",
    "custom",
    "data_parallel",
    "detect_rank_failures",
    "empty_batch",
    "grid",
    "init_distributed",
    "row_wise",
    "shard",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
]
