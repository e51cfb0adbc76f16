"""Saving nested state dicts over ranks: at once or in the background, and as one plain file."""

import copy
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.sharding.checkpoints.sharded_table import (
    KeyedRows,
    RowStates,
    ShardedTable,
    whole_state,
)
from emblib.sharding.checkpoints.state_trees import agreed, leaves, mapped, resolved
from emblib.sharding.checkpoints.values import checked_values
from emblib.sharding.ranks import RankGroup, subgroup
from emblib.tables.durable_files import save_archive, saving

NOTES = "emblib"
"""The entry of a checkpoint that tells what its tensors do not: a JSON text, as bytes."""

Group = RankGroup | dist.ProcessGroup | dist.DeviceMesh | None


def save(state: Mapping[str, Any], path: str | Path, ranks: Group = None) -> None:
    """Write `state` to the directory `path`; all ranks call this, and it is there when it returns.

    The directory holds all of it then, or what it held before, whenever a writer is killed. Any
    number of ranks loads it with any plan (`load`), and so does torch.distributed.checkpoint.

    Args:
        state: modules, optimizers, nested state dicts of tensors, and small values, by name:
            numbers, text, and whatever else `torch.load` admits by itself. Numpy's scalars become
            Python's numbers.
        path: made if it is not there; on a file system that all ranks share.
        ranks: who saves; by default all processes, or this one alone.

    Raises:
        TypeError: a value would not be loaded, as it needs a class that may run code.
        CheckpointError: a rank could not write, e.g. to a full disk; `path` holds what it held.
    """
    from emblib.sharding.checkpoints.files import write

    ranks = RankGroup.of(ranks)
    content = agreed(ranks, lambda: _with_notes(resolved(state)))
    write(content, Path(path), ranks)
    ranks.barrier()


def async_save(state: Mapping[str, Any], path: str | Path, ranks: Group = None) -> "Future[None]":
    """Copy `state` to host memory, and write it while training goes on; all ranks call this.

    The future's `result()` waits, and raises what `save` would. Saves of the same ranks are written
    one after the other, over a gloo group of their own, so that they do not meet the collectives of
    training. What was not written when the process ends is, unless it is killed; then `path` holds
    what it held before.
    """
    ranks = RankGroup.of(ranks)
    content = agreed(ranks, lambda: mapped(_with_notes(resolved(state)), _copied))
    background = _background(ranks)
    return background.executor.submit(_write, content, Path(path), background.ranks)


def export(state: Mapping[str, Any], path: str | Path, ranks: Group = None) -> None:
    """Write `state` with whole tables as one file; all ranks call this.

    Rank 0 gathers the tables in its host memory and writes the file, which then is all of it or
    what it was before. `load_export` reads it and compares its checksums; `torch.load` reads it
    without. Unsharded modules load what is in it, and so do sharded ones.
    """
    ranks = RankGroup.of(ranks)
    whole = whole_state(agreed(ranks, lambda: checked_values(resolved(state))), ranks)
    agreed(ranks, lambda: _write_file(whole, Path(path)) if ranks.rank == 0 else None)


def _with_notes(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content, checked, and where the tables are cut whose states go by columns."""
    content = checked_values(content)
    if NOTES in content:
        raise ValueError(
            f"{NOTES!r} is the name of what a checkpoint tells of itself: take another"
        )
    cuts = {
        leaf.name: leaf.value.cuts for leaf in leaves(content) if isinstance(leaf.value, RowStates)
    }
    if cuts:
        text = json.dumps({"cuts": cuts}, sort_keys=True).encode()
        content[NOTES] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return content


def _copied(value: Any) -> Any:
    """A copy in host memory that training does not change."""
    if isinstance(value, KeyedRows):
        return value  # made for this state dict
    if isinstance(value, ShardedTable):
        return value.map(_copied)
    if isinstance(value, Tensor):
        value = value.detach()
        return value.clone() if value.device.type == "cpu" else value.cpu()
    return copy.deepcopy(value)


class _Background(NamedTuple):
    """Who writes behind the back of training: one thread, and a group for it."""

    ranks: RankGroup
    executor: ThreadPoolExecutor


_BACKGROUNDS: dict[Any, _Background] = {}


def _background(ranks: RankGroup) -> _Background:
    """Made at the first call for these ranks, which is a collective."""
    found = _BACKGROUNDS.get(ranks.group)
    if found is None:
        group = None if ranks.group is None else subgroup(ranks)
        alone = (
            RankGroup.single() if group is None else RankGroup(group, local_size=ranks.local_size)
        )
        found = _Background(alone, ThreadPoolExecutor(1, "emblib-checkpoint"))
        _BACKGROUNDS[ranks.group] = found
    return found


def _write(content: dict[str, Any], path: Path, ranks: RankGroup) -> None:
    from emblib.sharding.checkpoints.files import write

    write(content, path, ranks)
    ranks.barrier()


def _write_file(whole: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with saving(path) as file:
        save_archive(whole, file)
