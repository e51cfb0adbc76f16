"""torch.nn.EmbeddingBag, one module per table, sparse gradients and a torch.optim optimizer."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from experiments.config.schema import Optimizer
from experiments.contenders.base import (
    EPS,
    Contender,
    State,
    Task,
    Unsupported,
    fill_,
    join_columns,
    optimizer_bytes,
    read_rows,
)
from experiments.workloads.workload import Batch

# (ids, offsets) per feature, and the gradient of the output; all on the device
Prepared = tuple[list[tuple[Tensor, Tensor]], Tensor]


class TableByTable(Contender):
    """Base of contenders that look up tables one after the other and concatenate the outputs."""

    def prepare(self, batch: Batch) -> Prepared:
        device = self.task.device
        features = [batch.feature(table) for table in range(len(self.task.shapes))]
        return [
            (ids.to(device), offsets.to(device)) for ids, offsets in features
        ], batch.gradient.to(device)

    @abstractmethod
    def _lookup(self, prepared: Prepared) -> Tensor:
        """Return the pooled rows of all tables, [B, sum D], as autograd records them."""

    def forward(self, prepared: Prepared) -> Tensor:
        with torch.no_grad():
            return self._lookup(prepared)


class TorchOptimized(TableByTable):
    """Base of contenders whose parameters torch.optim updates."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if task.optimizer is Optimizer.rowwise_adagrad:
            raise Unsupported("torch.optim has no row-wise Adagrad")
        self.weights = self._build()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.weights, lr=task.lr)
            if task.optimizer is Optimizer.sgd
            else torch.optim.Adagrad(self.weights, lr=task.lr, eps=EPS)
        )

    @abstractmethod
    def _build(self) -> list[Tensor]:
        """Build the tables on the task's device; return the parameters to train."""

    def step(self, prepared: Prepared) -> None:
        _, gradient = prepared
        self._lookup(prepared).backward(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of weights and of Adagrad's sums, without gradients."""
        return {
            "weights": sum(weights.nbytes for weights in self.weights),
            "optimizer_state": optimizer_bytes(self.optimizer.state.values()),
        }


class TorchBags(TorchOptimized):
    """torch.nn.EmbeddingBag per table, with sparse gradients."""

    def _build(self) -> list[Tensor]:
        device = self.task.device
        self.bags = [
            nn.EmbeddingBag(
                shape.rows,
                shape.dim,
                mode="sum",
                sparse=True,
                include_last_offset=True,
                _weight=fill_(torch.empty(shape.rows, shape.dim, device=device), seed),
            )
            for seed, shape in enumerate(self.task.shapes)
        ]
        return [bag.weight for bag in self.bags]

    def _lookup(self, prepared: Prepared) -> Tensor:
        features, _ = prepared
        return join_columns(
            [bag(*feature) for bag, feature in zip(self.bags, features, strict=True)]
        )

    def observe(self, batch: Batch) -> State:
        return read_rows(self.weights, batch, self.task)
