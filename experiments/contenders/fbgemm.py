"""FBGEMM's SplitTableBatchedEmbeddingBagsCodegen as contenders: on the device, managed, cached."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from experiments.config.schema import Optimizer
from experiments.contenders.base import EPS, OneModule, State, Task, Unsupported, fill_, read_rows
from experiments.workloads.workload import Batch

OPTIMIZERS = {
    Optimizer.sgd: EmbOptimType.EXACT_SGD,
    Optimizer.adagrad: EmbOptimType.EXACT_ADAGRAD,
    Optimizer.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
COLUMN_MULTIPLE = 4  # FBGEMM's kernels need D divisible by this


class Fbgemm(OneModule):
    """One FBGEMM module with all tables on the device and the optimizer fused into backward.

    Ids and offsets are int32 if that suffices for the rows of all tables, because FBGEMM's update
    is then faster. The bounds check has its default, a warning, as emblib's.
    """

    location: ClassVar[EmbeddingLocation] = EmbeddingLocation.DEVICE

    def __init__(self, task: Task) -> None:
        check_dims(task)
        if task.device.type != "cuda" and self.location is not EmbeddingLocation.DEVICE:
            raise Unsupported("FBGEMM has tables in managed memory on CUDA only")
        super().__init__(task)
        for seed, weights in enumerate(self.module.split_embedding_weights()):
            fill_(weights.data, seed)

    def _module(self) -> Any:
        task = self.task
        cuda = task.device.type == "cuda"
        location = self.location if cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(s.rows, s.dim, location, compute) for s in task.shapes],
            optimizer=OPTIMIZERS[task.optimizer],
            learning_rate=task.lr,
            eps=EPS,
            device=task.device,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        return {}

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        device = self.task.device
        kind = id_type(self.task)
        return (
            batch.indices.to(device, kind),
            batch.offsets.to(device, kind),
            batch.gradient.to(device),
        )

    def nbytes(self) -> dict[str, int]:
        return {
            "weights": sum(w.nbytes for w in self.module.split_embedding_weights()),
            "optimizer_state": sum(
                state.nbytes for states in self.module.split_optimizer_states() for state in states
            ),
        }

    def observe(self, batch: Batch) -> State:
        if self.task.device.type == "cuda":
            self.module.flush()  # writes the rows of a cache to the tables
            torch.cuda.synchronize()
        return read_rows(self.module.split_embedding_weights(), batch, self.task)


def check_dims(task: Task) -> None:
    """Raise Unsupported if the rows of a table are not multiples of COLUMN_MULTIPLE columns."""
    odd = sorted({s.dim for s in task.shapes if s.dim % COLUMN_MULTIPLE})
    if odd:
        raise Unsupported(f"FBGEMM needs D divisible by {COLUMN_MULTIPLE}, got {odd[0]}")


def id_type(task: Task) -> torch.dtype:
    """Return torch.int32 if it can number the rows of all tables together, else torch.int64."""
    small = sum(s.rows for s in task.shapes) <= torch.iinfo(torch.int32).max
    return torch.int32 if small else torch.int64


class FbgemmManaged(Fbgemm):
    """FBGEMM's tables in host memory, which its kernels read over the bus (managed memory)."""

    location = EmbeddingLocation.MANAGED


class FbgemmLRU(Fbgemm):
    """FBGEMM's tables in host memory, behind its LRU cache in device memory.

    Cache hits are not counted, because counting costs FBGEMM one more kernel per step.
    """

    location = EmbeddingLocation.MANAGED_CACHING
    algorithm: ClassVar[CacheAlgorithm] = CacheAlgorithm.LRU

    def _options(self) -> dict[str, Any]:
        return {"cache_algorithm": self.algorithm, "cache_load_factor": self.task.cache}

    def nbytes(self) -> dict[str, int]:
        """Return the bytes, where the cache consists of rows, their ids and their recency."""
        buffers = self.module.named_buffers()
        cache = sum(b.nbytes for name, b in buffers if name.startswith(("lxu_", "cache_")))
        return super().nbytes() | {"cache": cache}


class FbgemmLFU(FbgemmLRU):
    """FBGEMM's tables in host memory, behind its LFU cache in device memory."""

    algorithm = CacheAlgorithm.LFU
