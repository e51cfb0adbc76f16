"""torch.nn.EmbeddingBag, one module per table, sparse gradients and a torch.optim optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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

Prepared = tuple[list[tuple[Tensor, Tensor]], Tensor]


class TorchBags(Contender):
    """torch.nn.EmbeddingBag per table; the outputs are concatenated as a model needs them."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if task.optimizer is Optimizer.rowwise_adagrad:
            raise Unsupported("torch.optim has no row-wise Adagrad")
        self.bags = [
            nn.EmbeddingBag(
                s.rows,
                s.dim,
                mode="sum",
                sparse=True,
                include_last_offset=True,
                _weight=fill_(torch.empty(s.rows, s.dim, device=task.device), seed),
            )
            for seed, s in enumerate(task.shapes)
        ]
        weights = [bag.weight for bag in self.bags]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(weights, lr=task.lr)
            if task.optimizer is Optimizer.sgd
            else torch.optim.Adagrad(weights, lr=task.lr, eps=1e-8)
        )

    def prepare(self, batch: Batch) -> Prepared:
        """Lay out ids and offsets per table."""
        device = self.task.device
        features = [batch.feature(f) for f in range(len(self.bags))]
        return [(i.to(device), o.to(device)) for i, o in features], batch.gradient.to(device)

    def _lookup(self, prepared: Prepared) -> Tensor:
        outputs = [b(i, o) for b, (i, o) in zip(self.bags, prepared[0], strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def forward(self, prepared: Prepared) -> Tensor:
        """Look up with one embedding_bag call per table, then concatenate."""
        with torch.no_grad():
            return self._lookup(prepared)

    def step(self, prepared: Prepared) -> None:
        """Run autograd to sparse gradients, then the optimizer."""
        self._lookup(prepared).backward(prepared[1])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of weights and of Adagrad's dense sums."""
        state = sum(
            value.numel() * value.element_size()
            for values in self.optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor) and value.dim() > 0
        )
        return {"weights": sum(b.weight.nbytes for b in self.bags), "optimizer_state": state}

    def observe(self, batch: Batch) -> State:
        """Return the touched rows of each table."""
        ids = touched(batch, self.task)
        return [
            b.weight.detach()[i.to(self.task.device)].cpu()
            for b, i in zip(self.bags, ids, strict=True)
        ]

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        """Compute with plain tables."""
        return expect_tables(batch, before, self.task)
