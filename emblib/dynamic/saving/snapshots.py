"""Snapshots of dynamic tables, slot by slot: they restore a module byte for byte.

They fit modules of the same tables, optimizer, precision and admission only. `save` of a module
writes entries instead, which fit any capacity; `load` of a module reads both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from emblib.dynamic.saving import dumps
from emblib.dynamic.saving.checkpoint import naming, restart_eviction_log
from emblib.tables.locks import atomic

if TYPE_CHECKING:
    from emblib.dynamic.module import DynamicEmbeddingBags

_ENTRIES = ("index", "rows", "hyper", "admission", "scores")


@atomic
def take(module: "DynamicEmbeddingBags") -> dict[str, Any]:
    """Copy the state of a module, slot by slot, without rows that are not in use.

    Raises:
        RuntimeError: the module has a backing store.
    """
    _refuse_backing(module)
    admission, scores = module.admission, module.scores
    state = None if scores is None else scores.state_dict()
    return {
        "index": module.index.snapshot(),
        "rows": module.rows.snapshot(module.row_buffers(), _capacities(module)),
        "hyper": module.hyperparams.clone(),
        "admission": None if admission is None else admission.snapshot(),
        "scores": None if state is None else {name: part.clone() for name, part in state.items()},
    }


@atomic
def restore(module: "DynamicEmbeddingBags", snapshot: Mapping[str, Any]) -> None:
    """Restore the state of which a snapshot was taken, byte for byte.

    Raises:
        ValueError: it is of tables of other dims, capacities, loads or eviction, of another
            optimizer, precision or admission, or is malformed; nothing is changed.
        RuntimeError: the module has a backing store.
    """
    _refuse_backing(module)
    _check(module, snapshot)
    module.complete(lambda: _write(module, snapshot))


@torch.no_grad()
def _write(module: "DynamicEmbeddingBags", snapshot: Mapping[str, Any]) -> None:
    module.index.restore(snapshot["index"])
    module.rows.restore(module.row_buffers(), snapshot["rows"])
    module.hyperparams.copy_(snapshot["hyper"])
    if module.admission is not None:
        module.admission.restore(snapshot["admission"])
    if module.scores is not None:
        module.scores.load_state_dict(snapshot["scores"])
    restart_eviction_log(module)


def save(module: "DynamicEmbeddingBags", directory: str | Path) -> None:
    """Write a snapshot to a directory, which then holds all of it or its old content."""
    dumps.write(directory, take(module))


def load(module: "DynamicEmbeddingBags", directory: str | Path) -> None:
    """Restore the snapshot in a directory.

    Raises:
        DumpError: there is no whole snapshot, it is damaged, or it is of another module (then the
            error is a ValueError too); nothing is changed.
    """
    snapshot = dumps.read(directory)
    with naming(directory):
        restore(module, snapshot)


def _check(module: "DynamicEmbeddingBags", snapshot: Any) -> None:
    """Raise ValueError unless all entries of a snapshot fit a module."""
    parts = dumps.check_entries("the snapshot", snapshot, _ENTRIES)
    capacities = module.index.check_snapshot(parts["index"])
    module.rows.check_snapshot(parts["rows"], capacities)
    dumps.check_tensor("hyper", parts["hyper"], module.hyperparams.dtype, module.hyperparams.shape)
    for name, present in (("admission", module.admission), ("scores", module.scores)):
        dumps.check_presence(name, parts[name], present)
    if module.admission is not None:
        module.admission.check_snapshot(parts["admission"])
    if module.scores is not None:
        dumps.check_state("scores", parts["scores"], module.scores.state_dict())


def _capacities(module: "DynamicEmbeddingBags") -> list[int]:
    return [module.index.capacity(t) for t in range(len(module.tables))]


def _refuse_backing(module: "DynamicEmbeddingBags") -> None:
    if module.backing is not None:
        raise RuntimeError(
            "a snapshot is slot by slot, and rows in a backing store have no slots; use state_dict "
            "or save instead, which have the rows of both tiers"
        )
