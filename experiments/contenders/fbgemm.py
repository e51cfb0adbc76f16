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
from experiments.contenders.base import (
    Contender,
    State,
    Task,
    Unsupported,
    expect_tables,
    fill_,
    touched,
)
from experiments.workloads.workload import Batch

Prepared = tuple[Tensor, Tensor, Tensor]

OPTIMIZERS = {
    Optimizer.sgd: EmbOptimType.EXACT_SGD,
    Optimizer.adagrad: EmbOptimType.EXACT_ADAGRAD,
    Optimizer.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
LANES = 4  # its rows are whole groups of so many columns


class Fbgemm(Contender):
    """FBGEMM: every table in one call, the optimizer fused into backward.

    Ids are int32 where all rows can be counted with it, which makes its update faster. The bounds
    check stays at its default, to warn, which is emblib's default too.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        check_dims(task)
        self.module = self._module()
        for seed, weights in enumerate(self.module.split_embedding_weights()):
            fill_(weights.data, seed)

    def _module(self) -> Any:
        """Build plain tables in the memory of the device."""
        cuda = self.task.device.type == "cuda"
        return self._tables(EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST)

    def _tables(self, location: EmbeddingLocation, **options: Any) -> Any:
        task = self.task
        cuda = task.device.type == "cuda"
        compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(s.rows, s.dim, location, compute) for s in task.shapes],
            optimizer=OPTIMIZERS[task.optimizer],
            learning_rate=task.lr,
            eps=1e-8,
            device=task.device,
            **options,
        )

    def prepare(self, batch: Batch) -> Prepared:
        """Lay out feature-major ids and offsets."""
        device = self.task.device
        kind = id_type(self.task)
        return (
            batch.indices.to(device, kind),
            batch.offsets.to(device, kind),
            batch.gradient.to(device),
        )

    def forward(self, prepared: Prepared) -> Tensor:
        """Look up with one call."""
        with torch.no_grad():
            output: Tensor = self.module(prepared[0], prepared[1])
        return output

    def step(self, prepared: Prepared) -> None:
        """Run forward and backward(), which updates the tables."""
        self.module(prepared[0], prepared[1]).backward(prepared[2])

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
        weights = self.module.split_embedding_weights()
        ids = touched(batch, self.task)
        return [w.detach()[i.to(w.device)].cpu() for w, i in zip(weights, ids, strict=True)]

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        """Compute with plain tables."""
        return expect_tables(batch, before, self.task)


def check_dims(task: Task) -> None:
    """Raise Unsupported where FBGEMM's kernels cannot hold a row."""
    odd = sorted({s.dim for s in task.shapes if s.dim % LANES})
    if odd:
        raise Unsupported(f"FBGEMM needs D divisible by {LANES}, got {odd[0]}")


def id_type(task: Task) -> torch.dtype:
    """Return the smallest type that numbers the rows of all tables."""
    small = sum(s.rows for s in task.shapes) <= torch.iinfo(torch.int32).max
    return torch.int32 if small else torch.int64


class FbgemmManaged(Fbgemm):
    """Its tables in host memory, read by its kernels where they are."""

    def _module(self) -> Any:
        _need_cuda(self.task)
        return self._tables(EmbeddingLocation.MANAGED)


class FbgemmLRU(Fbgemm):
    """Its tables in host memory, behind its cache in the memory of the device.

    What the cache serves is not counted: counting costs FBGEMM a kernel in every step.
    """

    algorithm: ClassVar[CacheAlgorithm] = CacheAlgorithm.LRU

    def _module(self) -> Any:
        _need_cuda(self.task)
        return self._tables(
            EmbeddingLocation.MANAGED_CACHING,
            cache_algorithm=self.algorithm,
            cache_load_factor=self.task.cache,
        )

    def nbytes(self) -> dict[str, int]:
        """Return the bytes with those of the cache: rows, their ids and their recency."""
        held = (b for n, b in self.module.named_buffers() if n.startswith(("lxu_", "cache_")))
        return super().nbytes() | {"cache": sum(buffer.nbytes for buffer in held)}


class FbgemmLFU(FbgemmLRU):
    """The same with the other policy."""

    algorithm = CacheAlgorithm.LFU


def _need_cuda(task: Task) -> None:
    if task.device.type != "cuda":
        raise Unsupported("FBGEMM has tables in managed memory on CUDA only")
