"""TensorLy-Torch's FactorizedEmbedding as a tensor train, its rows pooled by torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from tltorch import FactorizedEmbedding
from torch import Tensor
from torch.nn import functional

import emblib
from experiments.config.schema import Optimizer
from experiments.contenders.base import Contender, State, Task, Unsupported
from experiments.contenders.tt import expect_tt, tt_specs
from experiments.workloads.workload import Batch


class FactorizedTables(Contender):
    """TensorLy-Torch: a row per distinct id, by batched products of the cores' slices; autograd.

    It has no bags. Ids are made distinct before they are looked up and the rows are pooled after,
    which on skewed ids is several times faster than a row for each lookup. The cores have emblib's
    shapes, their gradients are dense and torch.optim updates them.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if len(task.shapes) > task.tt_tables:
            raise Unsupported("this contender compresses every table; raise tt.tables")
        if task.optimizer is Optimizer.rowwise_adagrad:
            raise Unsupported("torch.optim has no row-wise Adagrad")
        self.specs = tt_specs(task, task.shapes)
        self.modules = [_embedding(spec, task.device) for spec in self.specs]
        generator = torch.Generator(task.device).manual_seed(0)
        for module in self.modules:
            for core in module.weight.factors:
                core.data.normal_(0.0, 0.1, generator=generator)
        cores = [core for module in self.modules for core in module.weight.factors]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(cores, lr=task.lr)
            if task.optimizer is Optimizer.sgd
            else torch.optim.Adagrad(cores, lr=task.lr, eps=1e-8)
        )

    def prepare(self, batch: Batch) -> Any:
        """Lay out ids and offsets per table."""
        device = self.task.device
        features = [batch.feature(f) for f in range(len(self.modules))]
        parts = [(i.to(device), o.to(device)) for i, o in features]
        return parts, batch.gradient.to(device)

    def _lookup(self, prepared: Any) -> Tensor:
        outputs = []
        for module, (indices, offsets) in zip(self.modules, prepared[0], strict=True):
            distinct, place = torch.unique(indices, return_inverse=True)
            rows = module(distinct.cpu())  # numpy takes the ids apart, so the host must have them
            outputs.append(
                functional.embedding_bag(place, rows, offsets, mode="sum", include_last_offset=True)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def forward(self, prepared: Any) -> Tensor:
        """Look up table by table, then concatenate."""
        with torch.no_grad():
            return self._lookup(prepared)

    def step(self, prepared: Any) -> None:
        """Run autograd to the cores, then the optimizer."""
        self._lookup(prepared).backward(prepared[1])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of cores and Adagrad's sums; a batch's rows show in the peak."""
        kept = (value for state in self.optimizer.state.values() for value in state.values())
        return {
            "weights": sum(c.nbytes for module in self.modules for c in module.weight.factors),
            "optimizer_state": sum(v.nbytes for v in kept if isinstance(v, Tensor) and v.dim() > 0),
        }

    def observe(self, batch: Batch) -> State:
        """Return all cores in emblib's layout: [p, R * q * R'] for its [R, p, q, R']."""
        return [
            core.detach().permute(1, 0, 2, 3).flatten(1).cpu().clone()
            for module in self.modules
            for core in module.weight.factors
        ]

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        """Compute the chain of core products with autograd."""
        return expect_tt(batch, before, self.task, self.specs)


def _embedding(spec: emblib.TTSpec, device: torch.device) -> Any:
    """Build the module with the cores of `spec`; it has a row per index of its factors."""
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
