"""FBGEMM's modules as contenders: for training (on the device, managed, cached), for inference."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from experiments.config.schema import Optimizer
from experiments.contenders.base import EPS, OneModule, State, Task, Unsupported, fill_, read_rows
from experiments.contenders.served import Feature, PackedTables
from experiments.workloads.workload import Batch

OPTIMIZERS = {
    Optimizer.sgd: EmbOptimType.EXACT_SGD,
    Optimizer.adagrad: EmbOptimType.EXACT_ADAGRAD,
    Optimizer.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
COLUMN_MULTIPLE = 4  # FBGEMM's kernels need D divisible by this


class Fbgemm(OneModule):
    """One FBGEMM module with all tables at `location` and the optimizer fused into backward.

    Ids and offsets have `id_type`, because FBGEMM's update is faster with int32. Bounds are
    checked as by default, with a warning; emblib's default is the same.
    """

    location: ClassVar[EmbeddingLocation] = EmbeddingLocation.DEVICE

    def __init__(self, task: Task) -> None:
        check_dims(task)
        if task.device.type != "cuda" and self.location is not EmbeddingLocation.DEVICE:
            raise Unsupported("FBGEMM has tables in managed memory on CUDA only")
        super().__init__(task)
        self.id_type = id_type(task)
        for seed, weights in enumerate(self.module.split_embedding_weights()):
            fill_(weights.data, seed)

    def _module(self) -> Any:
        task = self.task
        cuda = task.device.type == "cuda"
        location = self.location if cuda else EmbeddingLocation.HOST
        compute_device = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.dim, location, compute_device) for shape in task.shapes],
            optimizer=OPTIMIZERS[task.optimizer],
            learning_rate=task.lr,
            eps=EPS,
            device=task.device,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        """Return further arguments of the module."""
        return {}

    def nbytes(self) -> dict[str, int]:
        return {
            "weights": sum(weights.nbytes for weights in self.module.split_embedding_weights()),
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
    """Raise Unsupported unless COLUMN_MULTIPLE divides the dimension of every table."""
    refused_dims = sorted({shape.dim for shape in task.shapes if shape.dim % COLUMN_MULTIPLE})
    if refused_dims:
        raise Unsupported(f"FBGEMM needs D divisible by {COLUMN_MULTIPLE}, got {refused_dims[0]}")


def id_type(task: Task) -> torch.dtype:
    """Return torch.int32 if it can number the rows of all tables together, else torch.int64."""
    fits_int32 = sum(shape.rows for shape in task.shapes) <= torch.iinfo(torch.int32).max
    return torch.int32 if fits_int32 else torch.int64


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
        cache = sum(
            buffer.nbytes for name, buffer in buffers if name.startswith(("lxu_", "cache_"))
        )
        return super().nbytes() | {"cache": cache}


class FbgemmLFU(FbgemmLRU):
    """FBGEMM's tables in host memory, behind its LFU cache in device memory."""

    algorithm = CacheAlgorithm.LFU


class ServedFp32(PackedTables):
    """FBGEMM's IntNBitTableBatchedEmbeddingBagsCodegen on the CPU.

    Ids and offsets are int32, which is the default of that class.
    """

    bits = 32
    type: ClassVar[SparseType] = SparseType.FP32

    def prepare(self, batch: Batch) -> Feature:
        return batch.indices.int(), batch.offsets.int()

    def lookup(self, prepared: Feature) -> Tensor:
        return self.module(*prepared)

    def nbytes(self) -> int:
        return sum(
            tensor.nbytes for table in self.packed_tables for tensor in table if tensor is not None
        )

    def _pack(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the bytes of the rows, and the bytes of their scales and offsets or None."""
        return rows.view(torch.uint8), None

    def _load(self, packed_tables: list[tuple[Tensor, Tensor | None]]) -> None:
        host = EmbeddingLocation.HOST
        self.module = IntNBitTableBatchedEmbeddingBagsCodegen(
            [
                (f"table{number}", shape.rows, shape.dim, self.type, host)
                for number, shape in enumerate(self.shapes)
            ],
            device="cpu",
            output_dtype=SparseType.FP32,
        )
        self.module.initialize_weights()
        self.module.assign_embedding_weights(packed_tables)
        self.packed_tables = self.module.split_embedding_weights()


class ServedInt8(ServedFp32):
    """ServedFp32 with rows of 8-bit integers."""

    bits, type = 8, SparseType.INT8

    def _pack(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, self.bits)
        return fused[:, :-4].contiguous(), fused[:, -4:].contiguous()


class ServedInt4(ServedInt8):
    """ServedFp32 with rows of 4-bit integers."""

    bits, type = 4, SparseType.INT4
