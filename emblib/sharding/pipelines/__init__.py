"""Training loops that overlap copies, the input_dist, prefetching and computing."""

from emblib.sharding.pipelines.base import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from emblib.sharding.pipelines.batches import empty_batch
from emblib.sharding.pipelines.loading import (
    AssumeEqual,
    DrainAll,
    Progress,
    StopAtShortest,
    UnevenInputs,
)

__all__ = [
    "AssumeEqual",
    "DrainAll",
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "Progress",
    "StopAtShortest",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "UnevenInputs",
    "empty_batch",
]
