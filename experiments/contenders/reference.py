"""emblib.reference's tensor trains as a contender: plain PyTorch, without native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from emblib.optim import Hyper
from emblib.reference import tt
from experiments.contenders.base import State, Task, join_columns
from experiments.contenders.tables import optimizer_of
from experiments.contenders.torch_bag import Prepared, TableByTable
from experiments.contenders.tt import expect_tt, tt_specs_of_all
from experiments.workloads.workload import Batch


class ReferenceTT(TableByTable):
    """Tensor trains by torch.bmm on the gathered slices of each lookup, for all tables."""

    def __init__(self, task: Task) -> None:
        """Draw the cores, [table][core], and zero states, [core][state of the rule]."""
        super().__init__(task)
        self.rule = optimizer_of(task)
        self.hyperparams = self.rule.hyperparams(task.device)
        self.specs = tt_specs_of_all(task)
        self.cores: list[list[Tensor]] = []
        generator = torch.Generator(task.device).manual_seed(0)
        for spec in self.specs:
            ranks = spec.full_ranks
            shapes = zip(spec.row_factors, ranks, spec.dim_factors, ranks[1:], strict=False)
            cores = [
                torch.randn(p, r * q * s, device=task.device, generator=generator) * 0.1
                for p, r, q, s in shapes
            ]
            self.cores.append([core.requires_grad_() for core in cores])
        self.parameters = [core for cores in self.cores for core in cores]
        self.states = [
            [torch.zeros_like(core.detach()[:, 0] if s.per_row else core) for s in self.rule.states]
            for core in self.parameters
        ]

    def _lookup(self, prepared: Prepared) -> Tensor:
        features, _ = prepared
        return join_columns(
            [
                tt.lookup(cores, spec.rows, spec.row_factors, spec.dim_factors, *feature)
                for cores, spec, feature in zip(self.cores, self.specs, features, strict=True)
            ]
        )

    def step(self, prepared: Prepared) -> None:
        """Run autograd to dense core gradients, then reference.tt.update_rows_."""
        _, gradient_of_output = prepared
        output = self._lookup(prepared)
        gradients = torch.autograd.grad(output, self.parameters, gradient_of_output)
        self.hyperparams[Hyper.STEP] += 1
        with torch.no_grad():
            for core, state, gradient in zip(self.parameters, self.states, gradients, strict=True):
                tt.update_rows_(core, state, self.hyperparams, self.rule.name, gradient)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of cores and states, without gathered slices and dense gradients."""
        return {
            "weights": sum(core.nbytes for core in self.parameters),
            "optimizer_state": sum(state.nbytes for states in self.states for state in states),
        }

    def observe(self, batch: Batch) -> State:
        return [core.detach().cpu().clone() for core in self.parameters]

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        return expect_tt(batch, before, self.task, self.specs)
