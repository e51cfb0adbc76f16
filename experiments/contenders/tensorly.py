"""TensorLy-Torch's FactorizedEmbedding as a tensor train, its rows pooled by torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from tltorch import FactorizedEmbedding
from torch import Tensor
from torch.nn import functional

import emblib
from experiments.contenders.base import State, join_columns
from experiments.contenders.torch_bag import Prepared, TorchOptimized
from experiments.contenders.tt import expect_tt, tt_specs_of_all
from experiments.workloads.workload import Batch


class FactorizedTables(TorchOptimized):
    """TensorLy-Torch's module per table, trained by autograd and torch.optim.

    The library has no bags: distinct ids are looked up, and torch pools the rows. On skewed ids
    that is several times faster than one row per lookup. The cores have the ranks and factors of
    emblib's, and dense gradients.
    """

    def _build(self) -> list[Tensor]:
        device = self.task.device
        self.specs = tt_specs_of_all(self.task)
        self.modules = [_embedding(spec, device) for spec in self.specs]
        generator = torch.Generator(device).manual_seed(0)
        cores = [core for module in self.modules for core in module.weight.factors]
        for core in cores:
            core.data.normal_(0.0, 0.1, generator=generator)
        return cores

    def _lookup(self, prepared: Prepared) -> Tensor:
        outputs = []
        features, _ = prepared
        for module, (indices, offsets) in zip(self.modules, features, strict=True):
            distinct, inverse = torch.unique(indices, return_inverse=True)
            rows = module(distinct.cpu())  # the library factors the ids with numpy, on the host
            outputs.append(
                functional.embedding_bag(
                    inverse, rows, offsets, mode="sum", include_last_offset=True
                )
            )
        return join_columns(outputs)

    def observe(self, batch: Batch) -> State:
        """Return all cores, converted from [R, p, q, R'] to emblib's [p, R * q * R']."""
        return [core.detach().permute(1, 0, 2, 3).flatten(1).cpu().clone() for core in self.weights]

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        return expect_tt(batch, before, self.task, self.specs)


def _embedding(spec: emblib.TTSpec, device: torch.device) -> Any:
    """Build the module with the cores of `spec`; its rows are the product of the row factors."""
    return FactorizedEmbedding(
        math.prod(spec.row_factors),
        math.prod(spec.dim_factors),
        auto_tensorize=False,
        tensorized_num_embeddings=tuple(spec.row_factors),
        tensorized_embedding_dim=tuple(spec.dim_factors),
        factorization="blocktt",
        rank=tuple(spec.full_ranks),
        device=device,
    )
