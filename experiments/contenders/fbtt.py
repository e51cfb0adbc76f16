"""FBTT-Embedding's tensor trains, one TTEmbeddingBag per compressed table, as a user built them.

`tt_embeddings_ops` is imported; the environment variable EMBLIB_FBTT names its folder, which also
has the extension `tt_embeddings` (docs/peers.md). Tables, ranks and factors are those of emblib's
trains, so that both have the same cores; other tables are emblib's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import emblib
from experiments.config.schema import Optimizer
from experiments.contenders.base import EPS, Task, Unsupported
from experiments.contenders.tt import TTTables, tt_specs
from experiments.workloads.workload import Batch, TableShape

VARIABLE = "EMBLIB_FBTT"
Feature = tuple[Tensor, Tensor]


def library() -> Any:
    """Import FBTT's Python file, from the folder of the environment variable first."""
    folder = os.environ.get(VARIABLE, "")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("tt_embeddings_ops")


LIBRARY = library()  # imported with the module, so that the registry reports what does not load


class Trains:
    """One TTEmbeddingBag per table, with the part of emblib's interface that TTTables uses."""

    def __init__(self, tables: Sequence[emblib.TTSpec], task: Task) -> None:
        kinds = {Optimizer.sgd: "SGD", Optimizer.adagrad: "EXACT_ADAGRAD"}
        if task.optimizer not in kinds:
            raise Unsupported("FBTT has SGD and Adagrad; every other name is Adagrad there")
        self.tables = list(tables)
        self.modules = [
            LIBRARY.TTEmbeddingBag(
                spec.rows,
                spec.dim,
                list(spec.ranks),
                list(spec.row_factors),
                list(spec.dim_factors),
                optimizer=LIBRARY.OptimType[kinds[task.optimizer]],
                learning_rate=task.lr,
                eps=EPS,
                sparse=True,
                use_cache=False,
                weight_dist="uniform",
            ).to(task.device)
            for spec in tables
        ]

    def __call__(self, features: Sequence[Feature]) -> Tensor:
        """Look up table by table and concatenate: [B, sum D]."""
        outputs = [m(*feature) for m, feature in zip(self.modules, features, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    @property
    def cores(self) -> list[Tensor]:
        """Return the cores of every table, [p_k, R_k * q_k * R_k+1], which is emblib's order."""
        return [core.view(core.shape[-2:]) for m in self.modules for core in m.tt_cores]

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of cores and of Adagrad's sums."""
        states = [s for m in self.modules for s in m.optimizer_state]
        return {
            "weights": sum(core.nbytes for core in self.cores),
            "optimizer_state": sum(state.nbytes for state in states),
        }


class FbttTables(TTTables):
    """FBTT for the largest tables, emblib's plain tables for the rest."""

    def _build_trains(self, shapes: Sequence[TableShape]) -> Any:
        if self.task.device.type != "cuda":
            raise Unsupported("FBTT needs a GPU")
        return Trains(tt_specs(self.task, shapes), self.task)

    def prepare(self, batch: Batch) -> Any:
        """Lay out ids and offsets of each compressed table."""
        rest, _, gradient = super().prepare(batch)
        device = self.task.device
        features = [batch.feature(f) for f in self.compressed]
        return rest, ([(i.to(device), o.to(device)) for i, o in features],), gradient

    def flops(self, batch: Batch) -> dict[str, float]:
        """Count nothing: FBTT multiplies for every lookup, not for distinct rows."""
        return {}
