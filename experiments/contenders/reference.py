"""emblib.reference's tensor trains as a contender: plain PyTorch, without native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from emblib.reference import tt
from experiments.contenders.base import State, Task, Unsupported
from experiments.contenders.tables import OPTIMIZERS
from experiments.contenders.torch_bag import Prepared, TableByTable
from experiments.contenders.tt import expect_tt, tt_specs
from experiments.workloads.workload import Batch

STEP = 1  # element of `Optimizer.hyperparams` with the number of the step


class ReferenceTT(TableByTable):
    """Tensor trains by torch.bmm on the gathered slices of each lookup, for all tables."""

    def __init__(self, task: Task) -> None:
        """Draw the cores, [table][core], and zero states, [table][core][state of the rule]."""
        super().__init__(task)
        if len(task.shapes) > task.tt_tables:
            raise Unsupported("the reference TT contender compresses every table; raise tt.tables")
        self.rule = OPTIMIZERS[task.optimizer](task.lr)
        self.hyperparams = self.rule.hyperparams(task.device)
        self.specs = tt_specs(task, task.shapes)
        self.cores: list[list[Tensor]] = []
        self.states: list[list[list[Tensor]]] = []
        generator = torch.Generator(task.device).manual_seed(0)
        states = self.rule.states
        for spec in self.specs:
            ranks = spec.full_ranks
            shapes = zip(spec.row_factors, ranks, spec.dim_factors, ranks[1:], strict=False)
            cores = [
                torch.randn(p, r * q * s, device=task.device, generator=generator) * 0.1
                for p, r, q, s in shapes
            ]
            self.cores.append([c.requires_grad_() for c in cores])
            self.states.append(
                [
                    [torch.zeros_like(c.detach()[:, 0] if s.per_row else c) for s in states]
                    for c in cores
                ]
            )

    def _lookup(self, prepared: Prepared) -> Tensor:
        features, _ = prepared
        outputs = [
            tt.lookup(cores, spec.rows, spec.row_factors, spec.dim_factors, ids, offsets)
            for cores, spec, (ids, offsets) in zip(self.cores, self.specs, features, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def step(self, prepared: Prepared) -> None:
        """Run autograd to dense core gradients, then reference.tt.update_rows_."""
        leaves = [c for cores in self.cores for c in cores]
        _, gradient_of_output = prepared
        gradients = torch.autograd.grad(self._lookup(prepared), leaves, gradient_of_output)
        states = [s for table in self.states for s in table]
        self.hyperparams[STEP] += 1
        with torch.no_grad():
            for core, state, gradient in zip(leaves, states, gradients, strict=True):
                tt.update_rows_(core, state, self.hyperparams, self.rule.name, gradient)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of cores and their state; gathered slices count in peak memory only."""
        return {
            "weights": sum(c.nbytes for cores in self.cores for c in cores),
            "optimizer_state": sum(s.nbytes for t in self.states for c in t for s in c),
        }

    def observe(self, batch: Batch) -> State:
        return [c.detach().cpu().clone() for cores in self.cores for c in cores]

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        return expect_tt(batch, before, self.task, self.specs)
