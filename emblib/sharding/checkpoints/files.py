"""The directory of a checkpoint: whole or as it was before, however the writers end.

The format is that of torch.distributed.checkpoint: files that its metadata names. Here every save
gives its files names of their own, so that an older checkpoint in the directory stands until the
new metadata is renamed into the place of the old; then files that no metadata names are deleted.
"""

import contextlib
import dataclasses
import os
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from emblib.sharding.checkpoints.state_trees import CheckpointError
from emblib.sharding.groups_of_ranks import Ranks
from emblib.tables.files import flush_directory

METADATA = ".metadata"
_DATA = "*.distcp"


class _Renaming(FileSystem):
    """Files that are replaced by renaming alone, so that there is no moment without one."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Leave it to the renaming that follows."""


class Writer(dcp.FileSystemWriter):
    """Writes one checkpoint beside what the directory holds, then puts it in its place."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _Renaming()
        self._token = uuid.uuid4().hex[:12]

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Make the directory."""
        Path(self.path).mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Give the files of all ranks names that no earlier save has used."""
        return [
            dataclasses.replace(
                plan,
                storage_data=dataclasses.replace(
                    plan.storage_data, prefix=f"{self._token}{plan.storage_data.prefix}"
                ),
            )
            for plan in super().prepare_global_plan(plans)
        ]

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Commit, then delete what is not of this checkpoint."""
        super().finish(metadata, results)
        directory = Path(self.path)
        flush_directory(directory)
        named = {info.relative_path for info in metadata.storage_data.values()}
        for file in directory.glob(_DATA):
            if file.name not in named:
                file.unlink(missing_ok=True)


def read_metadata(path: Path) -> Metadata:
    """What a checkpoint holds.

    Raises:
        CheckpointError: there is none, or its writers were interrupted.
    """
    if not (path / METADATA).is_file():
        state = "no whole checkpoint in it" if path.is_dir() else "no such directory"
        raise CheckpointError(f"cannot load {path}: there is {state}")
    return dcp.FileSystemReader(path).read_metadata()


def write(state: dict[str, Any], path: Path, ranks: Ranks) -> None:
    """Save a nested state dict; all ranks call this."""
    with _quiet():
        dcp.save(
            state,
            storage_writer=Writer(path),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


def read(state: dict[str, Any], path: Path, ranks: Ranks) -> None:
    """Fill a flat state dict in place; all ranks call this."""
    with _quiet():
        dcp.load(
            state,
            storage_reader=dcp.FileSystemReader(path),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without being told that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
