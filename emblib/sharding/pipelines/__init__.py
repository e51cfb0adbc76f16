"""Training loops that overlap copies, the exchange of ids, prefetching and computing."""

from emblib.sharding.pipelines.base import TrainPipelineBase
from emblib.sharding.pipelines.batches import empty_batch
from emblib.sharding.pipelines.loading import Ends, Equal, Longest, Shortest
from emblib.sharding.pipelines.reporting import Progress
from emblib.sharding.pipelines.sparse_dist import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineSparseDist,
)

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
