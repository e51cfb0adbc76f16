"""FBGEMM's SplitTableBatchedEmbeddingBagsCodegen: the module that emblib's tables replace."""

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
from experiments.contenders.base import OneModule, State, Task, Unsupported, fill_, read_rows
from experiments.workloads.workload import Batch

OPTIMIZERS = {
    Optimizer.sgd: EmbOptimType.EXACT_SGD,
    Optimizer.adagrad: EmbOptimType.EXACT_ADAGRAD,
    Optimizer.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
COLUMN_MULTIPLE = 4  # its rows are whole groups of so many columns


class Fbgemm(OneModule):
    """FBGEMM: every table in one call, the optimizer fused into backward.

    Ids are int32 where all rows can be counted with it, which makes its update faster. The bounds
    check stays at its default, to warn, which is emblib's default too.
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
            eps=1e-8,
            device=task.device,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        return {}

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Lay out feature-major ids and offsets."""
        device = self.task.device
        kind = id_type(self.task)
        return (
            batch.indices.to(device, kind),
            batch.offsets.to(device, kind),
            batch.gradient.to(device),
        )

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of rows and of optimizer state."""
        return {
            "weights": sum(w.nbytes for w in self.module.split_embedding_weights()),
            "optimizer_state": sum(
                state.nbytes for states in self.module.split_optimizer_states() for state in states
            ),
        }

    def observe(self, batch: Batch) -> State:
        """Return the touched rows of each table."""
        if self.task.device.type == "cuda":
            self.module.flush()  # rows that a cache holds
            torch.cuda.synchronize()
        return read_rows(self.module.split_embedding_weights(), batch, self.task)


def check_dims(task: Task) -> None:
    """Raise Unsupported where FBGEMM's kernels cannot hold a row."""
    odd = sorted({s.dim for s in task.shapes if s.dim % COLUMN_MULTIPLE})
    if odd:
        raise Unsupported(f"FBGEMM needs D divisible by {COLUMN_MULTIPLE}, got {odd[0]}")


def id_type(task: Task) -> torch.dtype:
    """Return the smallest type that numbers the rows of all tables."""
    small = sum(s.rows for s in task.shapes) <= torch.iinfo(torch.int32).max
    return torch.int32 if small else torch.int64


class FbgemmManaged(Fbgemm):
    """Its tables in host memory, read by its kernels where they are."""

    location = EmbeddingLocation.MANAGED


class FbgemmLRU(Fbgemm):
    """Its tables in host memory, behind its cache in the memory of the device.

    Cache hits are not counted: counting costs FBGEMM a kernel in every step.
    """

    location = EmbeddingLocation.MANAGED_CACHING
    algorithm: ClassVar[CacheAlgorithm] = CacheAlgorithm.LRU

    def _options(self) -> dict[str, Any]:
        return {"cache_algorithm": self.algorithm, "cache_load_factor": self.task.cache}

    def nbytes(self) -> dict[str, int]:
        """Return the bytes with those of the cache: rows, their ids and their recency."""
        held = (b for n, b in self.module.named_buffers() if n.startswith(("lxu_", "cache_")))
        return super().nbytes() | {"cache": sum(buffer.nbytes for buffer in held)}


class FbgemmLFU(FbgemmLRU):
    """Its tables in host memory, behind its LFU cache."""

    algorithm = CacheAlgorithm.LFU
