"""Tables of emblib, FBGEMM and `nn.EmbeddingBag` with one interface, on a CPU or a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import emblib
from tests.bench.gpu.bench import Shape

LR = 0.01
PASSES = ("forward", "sgd", "adagrad", "rowwise_adagrad", "adam")
OPTIMIZERS: dict[str, Any] = {
    "sgd": emblib.optim.SGD,
    "adagrad": emblib.optim.Adagrad,
    "rowwise_adagrad": emblib.optim.RowwiseAdagrad,
    "adam": emblib.optim.Adam,
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
STATES = {"forward": 0, "sgd": 0, "adagrad": 1, "rowwise_adagrad": 0, "adam": 2}  # per element


class NotOffered(Exception):
    """A peer has no such optimizer, or is not installed."""


class Emblib:
    """emblib.TableBatchedEmbeddingBags, 16-bit rows rounded stochastically."""

    def __init__(self, shape: Shape, work: str, dtype: str, device: torch.device) -> None:
        kind = OPTIMIZERS["sgd" if work == "forward" else work]
        half = dtype == "fp16"
        self.module = emblib.TableBatchedEmbeddingBags(
            [emblib.TableSpec(shape.rows, shape.dim)] * shape.tables,
            kind(LR),
            precision=emblib.Precision(
                weights=DTYPES[dtype],
                stochastic_rounding=emblib.StochasticRounding(seed=1) if half else None,
            ),
            device=device,
        )

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Look up without recording gradients."""
        with torch.no_grad():
            out: Tensor = self.module(ids, offsets)
        return out

    def step(self, ids: Tensor, offsets: Tensor, grad: Tensor) -> None:
        """Look up, go backward and update."""
        self.module(ids, offsets).backward(grad)


class Fbgemm(Emblib):
    """FBGEMM's SplitTableBatchedEmbeddingBagsCodegen with its defaults and float32 outputs."""

    def __init__(self, shape: Shape, work: str, dtype: str, device: torch.device) -> None:
        configs, common, training = fbgemm()
        cuda = device.type == "cuda"
        types = {
            "forward": "EXACT_SGD",
            "sgd": "EXACT_SGD",
            "adagrad": "EXACT_ADAGRAD",
            "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
            "adam": "ADAM",
        }
        if work == "adam" and not cuda:
            raise NotOffered("FBGEMM has no Adam on the CPU")
        location = common.EmbeddingLocation.DEVICE if cuda else common.EmbeddingLocation.HOST
        compute = common.ComputeDevice.CUDA if cuda else common.ComputeDevice.CPU
        self.module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.dim, location, compute)] * shape.tables,
            optimizer=configs.EmbOptimType[types[work]],
            learning_rate=LR,
            weights_precision=configs.SparseType["FP16" if dtype == "fp16" else "FP32"],
            output_dtype=configs.SparseType.FP32,
            device=device,
        )
        self.module.init_embedding_weights_uniform(-0.01, 0.01)


class EmbeddingBag(Emblib):
    """One `nn.EmbeddingBag` per table, sparse gradients and an optimizer of torch.optim."""

    def __init__(self, shape: Shape, work: str, dtype: str, device: torch.device) -> None:
        kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "forward": torch.optim.SGD,
            "sgd": torch.optim.SGD,
            "adagrad": torch.optim.Adagrad,
            "adam": torch.optim.SparseAdam,
        }
        if work not in kinds:
            raise NotOffered("torch.optim has no row-wise Adagrad")
        self.bags = [
            torch.nn.EmbeddingBag(
                shape.rows,
                shape.dim,
                mode="sum",
                sparse=True,
                include_last_offset=True,
                dtype=DTYPES[dtype],
                device=device,
            )
            for _ in range(shape.tables)
        ]
        self.offsets = torch.arange(0, shape.batch * shape.length + 1, shape.length, device=device)
        self.optimizer = kinds[work]([bag.weight for bag in self.bags], lr=LR)

    def _look_up(self, ids: Tensor) -> Tensor:
        parts = ids.view(len(self.bags), -1)
        outputs = [bag(part, self.offsets) for bag, part in zip(self.bags, parts, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Look up table by table."""
        with torch.no_grad():
            return self._look_up(ids)

    def step(self, ids: Tensor, offsets: Tensor, grad: Tensor) -> None:
        """Run autograd, then the optimizer."""
        out = self._look_up(ids)
        out.backward(grad.to(out.dtype))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


CONTENDERS: dict[str, type[Emblib]] = {
    "emblib": Emblib,
    "fbgemm": Fbgemm,
    "torch": EmbeddingBag,
}


def fbgemm() -> tuple[Any, Any, Any]:
    """Return FBGEMM's modules of configurations, common types and training; or NotOffered."""
    try:
        return (
            importlib.import_module("fbgemm_gpu.split_embedding_configs"),
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common"),
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training"),
        )
    except (ImportError, OSError) as error:
        raise NotOffered(f"FBGEMM cannot be imported: {error}") from error
