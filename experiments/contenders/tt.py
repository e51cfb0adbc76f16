"""Tensor trains for the largest tables, plain tables for the others, as in TT-Rec."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import emblib
from experiments.contenders.base import (
    Contender,
    State,
    Task,
    first_update,
    join_columns,
    pool_rows,
    split_gradient,
)
from experiments.contenders.registry import Unsupported
from experiments.contenders.tables import BatchedTables, optimizer_of
from experiments.workloads.workload import Batch, TableShape


class TTTables(Contender):
    """emblib's trains for the `task.tt_tables` largest tables, plain tables for the others.

    The output has the columns of the plain tables, then the columns of the compressed tables, each
    in the order of the task.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        tables = range(len(task.shapes))
        largest_first = sorted(tables, key=lambda table: -task.shapes[table].rows)
        self.compressed = sorted(largest_first[: task.tt_tables])
        self.plain = [table for table in tables if table not in self.compressed]
        self.trains = self._build_trains([task.shapes[table] for table in self.compressed])
        plain_task = dataclasses.replace(
            task, shapes=tuple(task.shapes[table] for table in self.plain)
        )
        self.plain_tables = BatchedTables(plain_task) if self.plain else None

    def _build_trains(self, shapes: Sequence[TableShape]) -> Any:
        """Build the module of the compressed tables from their shapes."""
        return emblib.TableBatchedTTEmbeddingBags(
            tt_specs(self.task, shapes), optimizer_of(self.task), device=self.task.device
        )

    def _batch_of_tables(self, batch: Batch, tables: Sequence[int]) -> Batch:
        """Return the lookups and gradients of some tables of a batch, as a batch."""
        features = [batch.feature(table) for table in tables]
        lengths = torch.cat([offsets.diff() for _, offsets in features])
        columns = split_gradient(batch, self.task.shapes)
        return Batch(
            torch.cat([indices for indices, _ in features]),
            torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            torch.cat([columns[table] for table in tables], dim=1),
        )

    def prepare(self, batch: Batch) -> Any:
        """Return the plain tables' prepared batch or None, the trains' arguments, the gradient."""
        device = self.task.device
        columns = split_gradient(batch, self.task.shapes)
        compressed = self._batch_of_tables(batch, self.compressed)
        plain_batch = (
            self.plain_tables.prepare(self._batch_of_tables(batch, self.plain))
            if self.plain_tables
            else None
        )
        gradients = [columns[table] for table in (*self.plain, *self.compressed)]
        ids, offsets = compressed.indices.to(device), compressed.offsets.to(device)
        return plain_batch, (ids, offsets), torch.cat(gradients, dim=1).to(device)

    def _lookup(self, prepared: Any) -> Tensor:
        plain_batch, arguments_of_trains, _ = prepared
        outputs = []
        if self.plain_tables:
            ids, offsets, _ = plain_batch
            outputs.append(self.plain_tables.module(ids, offsets))
        outputs.append(self.trains(*arguments_of_trains))
        return join_columns(outputs)

    def forward(self, prepared: Any) -> Tensor:
        with torch.no_grad():
            return self._lookup(prepared)

    def step(self, prepared: Any) -> None:
        _, _, gradient = prepared
        self._lookup(prepared).backward(gradient)

    def flops(self, batch: Batch) -> dict[str, float]:
        """Count two operations per multiply-add of the trains' products."""
        compressed = self._batch_of_tables(batch, self.compressed)
        device = self.task.device
        work_by_table = self.trains.work(
            compressed.indices.to(device), compressed.offsets.to(device)
        )
        forward = 2.0 * sum(work.forward for work in work_by_table)
        backward = 2.0 * sum(work.backward for work in work_by_table)
        return {"forward": forward, "step": forward + backward}

    def nbytes(self) -> dict[str, int]:
        modules = [self.trains] + ([self.plain_tables] if self.plain_tables else [])
        sizes = [module.nbytes() for module in modules]
        return {
            name: sum(sizes_of_module[name] for sizes_of_module in sizes)
            for name in ("weights", "optimizer_state")
        }

    def observe(self, batch: Batch) -> State:
        """Return the touched rows of the plain tables, then all cores."""
        rows = (
            self.plain_tables.observe(self._batch_of_tables(batch, self.plain))
            if self.plain_tables
            else []
        )
        return rows + [core.detach().cpu().clone() for core in self.trains.cores]

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        outputs: list[Tensor] = []
        plain_state: State = []
        plain_before, tt_before = before[: len(self.plain)], before[len(self.plain) :]
        if self.plain_tables:
            output, plain_state = self.plain_tables.expect(
                self._batch_of_tables(batch, self.plain), plain_before
            )
            outputs.append(output)
        output, cores = expect_tt(
            self._batch_of_tables(batch, self.compressed), tt_before, self.task, self.trains.tables
        )
        return torch.cat([*outputs, output], dim=1), plain_state + cores


def tt_specs(task: Task, shapes: Sequence[TableShape]) -> list[emblib.TTSpec]:
    """Return a tensor train per shape; emblib chooses the factors that the task leaves empty.

    The rank of a table is at most what its cores can use, so small tables may get less than
    `task.rank`.

    Raises:
        Unsupported: no table can use the task's rank, so the contender's name would be wrong.
            Shrunk tables are exempt, because the report says that they are shrunk.
    """
    specs = [_tt_spec(task, shape) for shape in shapes]
    usable = max((rank for spec in specs for rank in spec.ranks), default=task.rank)
    if usable < task.rank and not task.shrunk:
        raise Unsupported(
            f"rank {task.rank} is more than the cores of these tables can use, which is {usable}: "
            f"choose sweep.rank and tt.ranks up to {usable}"
        )
    return specs


def tt_specs_of_all(task: Task) -> list[emblib.TTSpec]:
    """Return the tensor train of every table; raise Unsupported if the task has plain tables."""
    if len(task.shapes) > task.tt_tables:
        raise Unsupported("this contender compresses every table; raise tt.tables")
    return tt_specs(task, task.shapes)


def _tt_spec(task: Task, shape: TableShape) -> emblib.TTSpec:
    num_cores = len(task.dim_factors) or (3 if shape.dim >= 8 else 2)  # a factor of D per core
    ranks = (task.rank,) * (num_cores - 1)
    spec = emblib.TTSpec(shape.rows, shape.dim, ranks, task.row_factors, task.dim_factors)
    return spec.usable()


def expect_tt(
    batch: Batch, before: State, task: Task, specs: Sequence[emblib.TTSpec]
) -> tuple[Tensor, State]:
    """Compute `Contender.expect` for tensor trains with autograd; the state is all cores.

    The features of `batch` are the tables of `specs`; `before` has their cores, table by table.
    """
    outputs, expected_cores, remaining_cores = [], [], list(before)
    gradients = batch.gradient.split([spec.dim for spec in specs], dim=1)
    for table, spec in enumerate(specs):
        num_cores = len(spec.row_factors)
        leaves = [core.clone().requires_grad_() for core in remaining_cores[:num_cores]]
        remaining_cores = remaining_cores[num_cores:]
        indices, offsets = batch.feature(table)
        output = pool_rows(rows_of_ids(leaves, indices, spec), torch.arange(len(indices)), offsets)
        outputs.append(output.detach())
        gradients_of_cores = torch.autograd.grad(output, leaves, gradients[table])
        expected_cores += [
            first_update(task.optimizer, core.detach(), core_gradient, task.lr)
            for core, core_gradient in zip(leaves, gradients_of_cores, strict=True)
        ]
    return torch.cat(outputs, dim=1), expected_cores


def rows_of_ids(cores: Sequence[Tensor], indices: Tensor, spec: emblib.TTSpec) -> Tensor:
    """Return the rows [L, D] of ids [L]: products of the cores' slices, [R_k, q_k * R_k+1] each.

    Core k is [p_k, R_k * q_k * R_k+1].
    """
    ranks = spec.full_ranks
    row = torch.ones(len(indices), 1, 1)
    quotient = indices
    digits = []
    for p in reversed(spec.row_factors[1:]):
        digits.append(quotient % p)
        quotient = quotient // p
    num_columns = 1
    for k, digit in enumerate([quotient, *reversed(digits)]):
        slices = cores[k].view(cores[k].size(0), ranks[k], -1)[digit]
        num_columns *= spec.dim_factors[k]
        row = torch.bmm(row, slices).view(len(indices), num_columns, ranks[k + 1])
    return row.view(len(indices), num_columns)
