"""Snapshots of dynamic tables, slot by slot: they restore a module byte for byte.

Only the next sweep by the clock is not in them: it begins with bucket 0. They restore only modules
with the same tables, optimizer, precision and admission, without a backing store. A module's `save`
writes entries instead, which fit tables of any capacity; its `load` reads both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from emblib.dynamic.saving import dumps
from emblib.dynamic.saving.checkpoint import mismatch_errors_of
from emblib.dynamic.state import DynamicState, StateOwner, of_state
from emblib.grad_mode import without_gradients

_ENTRIES = ("index", "rows", "hyper", "admission", "scores")


@of_state
def take(state: DynamicState) -> dict[str, Any]:
    """Copy the state of a module, slot by slot, without rows that are not in use.

    The snapshot is a tree of dicts, lists and tensors: "index" (`HashIndex.snapshot`, on the CPU),
    "rows" (`RowLayout.snapshot`, on the device), "hyper" (hyperparameters), "admission"
    (`Admission.snapshot` or None), "scores" (state dict or None), "expiry" (state dict, where a ttl
    is a time) and "last_uses" (`LastUses.snapshot`, where tables have levels).

    Raises:
        RuntimeError: the module has a backing store.
    """
    _check_no_backing(state)
    admission, scores = state.admission, state.scores
    score_states = None if scores is None else scores.state_dict()
    snapshot = {
        "index": state.index.snapshot(),
        "rows": state.layout.snapshot(state.row_buffers, state.capacities()),
        "hyper": state.hyperparams.clone(),
        "admission": None if admission is None else admission.snapshot(),
        "scores": score_states and {name: value.clone() for name, value in score_states.items()},
        **_times_of(state),
    }
    if state.last_uses is not None:
        snapshot["last_uses"] = state.last_uses.snapshot(state.capacities())
    return snapshot


def _times_of(state: DynamicState) -> dict[str, Any]:
    """Return the entry of the times by which keys expire; {} unless a ttl is a time."""
    expiry = state.child_modules().get("expiry")
    return {} if expiry is None else {"expiry": expiry.state_dict()}


@of_state
def restore(state: DynamicState, snapshot: Mapping[str, Any]) -> None:
    """Restore a snapshot byte for byte.

    Raises:
        ValueError: dims, capacities, loads, eviction, optimizer, precision or admission differ, the
            snapshot is malformed, or a memory budget limits the tables; nothing is changed.
        RuntimeError: the module has a backing store.
    """
    _check_no_backing(state)
    if state.budget is not None:
        raise ValueError(
            "a snapshot is slot by slot, and a memory budget limits these tables to fewer slots; "
            "load a state_dict or a dump instead, which fit any number of rows"
        )
    _check(state, snapshot)
    state.complete(lambda: _restore_parts(state, snapshot))


@without_gradients
def _restore_parts(state: DynamicState, snapshot: Mapping[str, Any]) -> None:
    """Restore each part of a module from a snapshot that was checked."""
    state.index.restore(snapshot["index"])
    state.layout.restore(state.row_buffers, snapshot["rows"])
    if state.last_uses is not None:
        state.last_uses.restore(snapshot["last_uses"])
    state.load_hyperparams(snapshot["hyper"])
    if state.admission is not None:
        state.admission.restore(snapshot["admission"])
    if state.scores is not None:
        state.scores.load_state_dict(snapshot["scores"])
    if state.expiry is not None:
        state.expiry.forget_times()
        if "expiry" in snapshot:
            state.expiry.load_state_dict(snapshot["expiry"])
    state.restart_eviction_log()


def save(state: DynamicState | StateOwner, directory: str | Path) -> None:
    """Write a snapshot to a directory, which then holds all of it or its old content.

    Raises RuntimeError if the module has a backing store.
    """
    dumps.write(directory, take(state))


def load(state: DynamicState | StateOwner, directory: str | Path) -> None:
    """Restore the snapshot in a directory.

    Raises:
        DumpError: there is no whole snapshot, it is damaged, or it is of another module (then the
            error is a ValueError too); nothing is changed.
        RuntimeError: the module has a backing store.
    """
    snapshot = dumps.read(directory)
    with mismatch_errors_of(directory):
        restore(state, snapshot)


def _check(state: DynamicState, snapshot: Any) -> None:
    """Raise ValueError unless all entries of a snapshot fit a module."""
    entries = dumps.check_entries("the snapshot", snapshot, _ENTRIES)
    capacities = state.index.check_snapshot(entries["index"])
    state.layout.check_snapshot(entries["rows"], capacities)
    dumps.check_tensor("hyper", entries["hyper"], state.hyperparams.dtype, state.hyperparams.shape)
    state.check_hyperparams(entries["hyper"])
    for name, child in (("admission", state.admission), ("scores", state.scores)):
        dumps.check_presence(name, entries[name], child)
    dumps.check_presence("last_uses", entries.get("last_uses"), state.last_uses)
    if state.last_uses is not None:
        uses = dumps.check_list("last_uses", entries["last_uses"], len(capacities), "table")
        for t, (rows, width) in enumerate(
            zip(capacities, state.last_uses.num_further_levels, strict=True)
        ):
            dumps.check_tensor(f"last_uses of table {t}", uses[t], torch.int64, (rows, width))
    if state.admission is not None:
        state.admission.check_snapshot(entries["admission"])
    if state.scores is not None:
        dumps.check_state("scores", entries["scores"], state.scores.state_dict())
    if "expiry" in entries:
        dumps.check_presence("expiry", entries["expiry"], state.child_modules().get("expiry"))
        dumps.check_state("expiry", entries["expiry"], state.child_modules()["expiry"].state_dict())


def _check_no_backing(state: DynamicState) -> None:
    """Raise RuntimeError if a module has a backing store."""
    if state.backing is not None:
        raise RuntimeError(
            "a snapshot is slot by slot, and rows in a backing store have no slots; use state_dict "
            "or save instead, which have the rows of both tiers"
        )
