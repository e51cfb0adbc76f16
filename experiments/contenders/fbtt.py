"""FBTT-Embedding's tensor trains as a contender: one TTEmbeddingBag per compressed table.

The user builds FBTT's extension `tt_embeddings` and names its folder, which also has the module
`tt_embeddings_ops`, in the environment variable EMBLIB_FBTT (docs/peers.md). Tables, ranks and
factors are those of emblib's trains, so that both have the same cores; plain tables are emblib's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

import emblib
from experiments.config.schema import Optimizer
from experiments.contenders.base import EPS, Task, Unsupported, join_columns
from experiments.contenders.tt import TTTables, tt_specs
from experiments.workloads.workload import Batch, TableShape

Feature = tuple[Tensor, Tensor]  # ids and offsets

if (folder := os.environ.get("EMBLIB_FBTT", "")) and folder not in sys.path:
    sys.path.insert(0, folder)
# Loaded with this file, so that the registry reports a failure.
LIBRARY: Any = importlib.import_module("tt_embeddings_ops")


class Trains:
    """One TTEmbeddingBag per table, behind the interface of emblib's trains that TTTables uses."""

    def __init__(self, tables: Sequence[emblib.TTSpec], task: Task) -> None:
        optimizer_names = {Optimizer.sgd: "SGD", Optimizer.adagrad: "EXACT_ADAGRAD"}
        if task.optimizer not in optimizer_names:
            raise Unsupported("FBTT has SGD and Adagrad; every other name is Adagrad there")
        self.tables = list(tables)
        self.modules = [
            LIBRARY.TTEmbeddingBag(
                spec.rows,
                spec.dim,
                list(spec.ranks),
                list(spec.row_factors),
                list(spec.dim_factors),
                optimizer=LIBRARY.OptimType[optimizer_names[task.optimizer]],
                learning_rate=task.lr,
                eps=EPS,
                sparse=True,
                use_cache=False,
                weight_dist="uniform",
            ).to(task.device)
            for spec in tables
        ]

    def __call__(self, features: Sequence[Feature]) -> Tensor:
        """Look up the (ids, offsets) of each table and concatenate the outputs: [B, sum D]."""
        return join_columns(
            [module(*feature) for module, feature in zip(self.modules, features, strict=True)]
        )

    @property
    def cores(self) -> list[Tensor]:
        """Return the cores of all tables in emblib's layout, [p_k, R_k * q_k * R_k+1] each."""
        return [core.view(core.shape[-2:]) for module in self.modules for core in module.tt_cores]

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the cores ("weights") and of Adagrad's sums ("optimizer_state")."""
        states = [state for module in self.modules for state in module.optimizer_state]
        return {
            "weights": sum(core.nbytes for core in self.cores),
            "optimizer_state": sum(state.nbytes for state in states),
        }


class FbttTables(TTTables):
    """FBTT's trains for the largest tables, emblib's plain tables for the others."""

    def _build_trains(self, shapes: Sequence[TableShape]) -> Any:
        if self.task.device.type != "cuda":
            raise Unsupported("FBTT needs a GPU")
        return Trains(tt_specs(self.task, shapes), self.task)

    def prepare(self, batch: Batch) -> Any:
        arguments, _, gradient = super().prepare(batch)
        device = self.task.device
        features = [batch.feature(table) for table in self.compressed]
        return (
            arguments,
            ([(ids.to(device), offsets.to(device)) for ids, offsets in features],),
            gradient,
        )

    def flops(self, batch: Batch) -> dict[str, float]:
        """Count nothing: FBTT's operations depend on lookups, which emblib's count does not."""
        return {}
