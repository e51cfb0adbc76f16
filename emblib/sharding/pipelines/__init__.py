"""Training loops that overlap copies, the exchange of ids, prefetching and computing."""

from emblib.sharding.pipelines.base import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from emblib.sharding.pipelines.batches import empty_batch
from emblib.sharding.pipelines.loading import Ends, Equal, Longest, Progress, Shortest

__all__ = [
    "Ends",
    "Equal",
    "Longest",
    "PrefetchTrainPipelineSparseDist",
    "Progress",
    "Shortest",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "empty_batch",
]
