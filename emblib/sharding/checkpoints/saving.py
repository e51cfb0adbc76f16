"""Save nested state dicts over ranks: synchronously, in the background, or as one plain file."""

import atexit
import copy
import json
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.sharding.checkpoints.sharded_table import (
    KeyedRows,
    RowStates,
    ShardedTable,
    gather_state,
)
from emblib.sharding.checkpoints.state_trees import (
    expand_state_dicts,
    leaves,
    map_values,
    run_on_all_ranks,
)
from emblib.sharding.checkpoints.values import checked_values
from emblib.sharding.ranks import RankGroup, subgroup
from emblib.tables.calling_thread import CallingThread
from emblib.tables.durable_files import save_archive, saving

NOTES = "emblib"
"""The entry of a checkpoint for metadata: a JSON text, as a uint8 tensor."""

Group = RankGroup | dist.ProcessGroup | dist.DeviceMesh | None
"""What `RankGroup.from_value` takes: None is all processes, or this process alone."""


def save(state: Mapping[str, Any], path: str | Path, ranks: Group = None) -> None:
    """Write `state` to the directory `path`, durably; a collective over `ranks`.

    Even if a writer is killed, the directory has either the new checkpoint or the previous one. Any
    number of ranks can load it with any plan (`load`), and so can torch.distributed.checkpoint.
    Values that differ between ranks are those of the first rank that has them.

    Args:
        state: modules, optimizers, nested state dicts of tensors, and small values, by name. Small
            values are numbers, text, and all else that `torch.load(weights_only=True)` admits.
            NumPy scalars become Python numbers. Modules and optimizers must be values of `state`
            itself, not of a nested dict.
        path: directory of the checkpoint, created if missing; on a file system that all ranks
            share. "~" is the home directory, in the other functions too.
        ranks: the ranks that save; by default all processes, or this process alone.

    Raises:
        TypeError: `state` is not a dict, `path` is not a path, or a value could not be loaded
            again, because it needs a class that may run code.
        ValueError: `state` has an entry named "emblib", which `NOTES` reserves; or a tensor is
            sparse, nested, or on the meta device.
        CheckpointError: a rank could not write, e.g. to a full disk, or wrote to another directory
            than the first rank; two values have one dotted name; or another rank raised one of the
            errors above. `path` keeps its checkpoint, unless only the cleanup after the rename of
            the new metadata failed; see `files.write`.
    """
    ranks = RankGroup.from_value(ranks)
    content, path = run_on_all_ranks(
        ranks, lambda: (_with_column_cuts(expand_state_dicts(state)), Path(path).expanduser())
    )
    _write(content, path, ranks)


def async_save(state: Mapping[str, Any], path: str | Path, ranks: Group = None) -> "Future[None]":
    """Copy `state` to host memory and write it in the background; a collective over `ranks`.

    Returns a future, whose `result()` waits until all ranks have written. Saves over the same
    process group are written one after the other, over a gloo group of their own, so that their
    collectives do not mix with those of training. Pending saves are completed when the process
    exits. If it is killed, `path` keeps its previous checkpoint.

    Arguments are those of `save`, and so are the errors: `result()` raises CheckpointError if a
    rank could not write, all others are raised here.
    """
    ranks = RankGroup.from_value(ranks)
    content, path = run_on_all_ranks(
        ranks,
        lambda: (
            map_values(_with_column_cuts(expand_state_dicts(state)), _copy_to_host),
            # The process may change its directory meanwhile.
            Path(path).expanduser().absolute(),
        ),
    )
    background = _background_writer(ranks)
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # other ranks would wait for a cancelled save
    background.thread.submit(_write_in_background, future, content, path, background.ranks)
    return future


def export(state: Mapping[str, Any], path: str | Path, ranks: Group = None) -> None:
    """Write `state` with full tables as one file; a collective over `ranks`.

    Rank 0 gathers the tables in its host memory, which must have room for all of them, and replaces
    the file atomically. `load_export` reads the file and compares its checksums; `torch.load` reads
    it without comparing. Unsharded modules load its content, and so do sharded ones.

    Arguments are as for `save`, but `path` is a file, whose directory is created if missing, the
    name "emblib" is not reserved, and tensors may be sparse or nested.

    Raises:
        TypeError: `state` is not a dict, a value could not be loaded again, because it needs a
            class that may run code, or, on rank 0, `path` is not a path.
        ValueError: a tensor is on the meta device.
        OSError: this is rank 0 and it could not write.
        CheckpointError: another rank raised one of these.
    """
    ranks = RankGroup.from_value(ranks)
    content = gather_state(
        run_on_all_ranks(ranks, lambda: checked_values(expand_state_dicts(state)))
    )
    run_on_all_ranks(
        ranks,
        lambda: _write_file(content, Path(path).expanduser()) if ranks.rank == 0 else None,
    )


def _with_column_cuts(content: dict[str, Any]) -> dict[str, Any]:
    """Return a checked copy of the content; with `RowStates`, add an entry `NOTES` of their cuts.

    Raises:
        TypeError: a value could not be loaded again.
        ValueError: the content has an entry with the name `NOTES`, or a tensor that is not dense or
            has no memory.
    """
    content = checked_values(content)
    if NOTES in content:
        raise ValueError(
            f"{NOTES!r} is the entry for the metadata of a checkpoint: take another name"
        )
    cuts_by_name = {}
    for leaf in leaves(content):
        if isinstance(leaf.value, RowStates):
            cuts_by_name[leaf.name] = leaf.value.cuts
        elif isinstance(leaf.value, Tensor) and (
            leaf.value.layout is not torch.strided or leaf.value.is_nested
        ):
            raise ValueError(
                f"{leaf.name} must be a dense tensor, got a sparse or nested one: save the tensors "
                "that it is made of, or use export"
            )
    if cuts_by_name:
        text = json.dumps({"cuts": cuts_by_name}, sort_keys=True).encode()
        content[NOTES] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return content


def _copy_to_host(value: Any) -> Any:
    """Return a copy of a value in host memory, which training does not change."""
    if isinstance(value, KeyedRows):
        return value  # a copy already: `state_dict` creates it
    if isinstance(value, ShardedTable):
        return value.map(_copy_to_host)
    if isinstance(value, Tensor):
        value = value.detach()
        return value.clone() if value.device.type == "cpu" else value.cpu()
    return copy.deepcopy(value)


class _BackgroundWriter(NamedTuple):
    """The thread that writes asynchronous saves, and the ranks over a process group of its own."""

    ranks: RankGroup
    thread: CallingThread


_BACKGROUND_WRITERS: dict[Any, _BackgroundWriter] = {}  # by process group, until the process exits


def _background_writer(ranks: RankGroup) -> _BackgroundWriter:
    """Return the background writer of these ranks; a collective at the first call."""
    writer = _BACKGROUND_WRITERS.get(ranks.group)
    if writer is None:
        group = None if ranks.group is None else subgroup(ranks)
        background_ranks = (
            RankGroup.single() if group is None else RankGroup(group, local_size=ranks.local_size)
        )
        writer = _BackgroundWriter(background_ranks, CallingThread())
        atexit.register(writer.thread.stop)  # completes pending saves
        _BACKGROUND_WRITERS[ranks.group] = writer
    return writer


def _write_in_background(
    future: "Future[None]", content: dict[str, Any], path: Path, ranks: RankGroup
) -> None:
    try:
        _write(content, path, ranks)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _write(content: dict[str, Any], path: Path, ranks: RankGroup) -> None:
    """Write a checkpoint and wait until all ranks have written it; a collective."""
    from emblib.sharding.checkpoints.files import write

    write(content, path, ranks)
    ranks.barrier()


def _write_file(content: Any, path: Path) -> None:
    """Write one file for `torch.load`, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with saving(path) as file:
        save_archive(content, file)
