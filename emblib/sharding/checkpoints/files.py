"""Write and read the directory of a checkpoint, so that it always has a complete checkpoint.

The format is that of torch.distributed.checkpoint: data files (`*.distcp`), and a metadata file
that names them. Every save gives its data files new names, so the checkpoint in the directory stays
valid until the new metadata file replaces the old one by a rename. Then all data files that the new
one does not name are deleted. A save that fails deletes its own data files, unless the rename may
have happened; files that stay, also those of a killed process, are deleted by the next save.

The metadata file also has checksums of the data files (`checksums.py`). It is unpickled without
running code of it (`unpickling.py`), and so are values that are not tensors (`values.py`).
"""

import contextlib
import dataclasses
import io
import itertools
import pickle
import uuid
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from emblib.sharding.checkpoints import checksums, unpickling, values
from emblib.sharding.checkpoints.checksums import CheckedStream, FileSums, SummingStream
from emblib.sharding.checkpoints.state_trees import CheckpointError
from emblib.sharding.fingerprint import ranks_text
from emblib.sharding.ranks import RankGroup
from emblib.tables.durable_files import flush_directory, raising_write_errors, replacing

METADATA = ".metadata"
_DATA_FILES = "*.distcp"
_SUMS_INDEX = MetadataIndex("emblib.checksums")  # key of a rank's checksums among its write results


class _SummedFiles(FileSystem):
    """A file system that computes checksums of the files that it writes.

    Attributes:
        sums_by_file: checksums of each file by name, from when it is closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums_by_file: dict[str, FileSums] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file to write."""
        with super().create_stream(path, mode) as stream:
            summing_stream = SummingStream(stream)
            with raising_write_errors(summing_stream) as raising_stream:
                yield raising_stream
            self.sums_by_file[Path(path).name] = summing_stream.sums


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes a checkpoint next to the current one of its directory, then replaces that one.

    A writer serves one save. torch calls its methods but `discard` in their order here:
    `prepare_global_plan` and `finish` on the coordinator, which is the first rank, the others on
    every rank.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = self._files = _SummedFiles()
        self._token = uuid.uuid4().hex[:12]  # the files of all ranks begin with the coordinator's
        self._may_be_committed = False

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Create the directory; return the plan as it is."""
        Path(self.path).mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Return the plans of all ranks with names of files that no earlier save has used."""
        return [
            dataclasses.replace(
                plan,
                storage_data=dataclasses.replace(
                    plan.storage_data, prefix=f"{self._token}{plan.storage_data.prefix}"
                ),
            )
            for plan in super().prepare_global_plan(plans)
        ]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write this rank's files; return a future of the results and the files' checksums."""
        results = super().write_data(plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, WriteResult(_SUMS_INDEX, 0, self._files.sums_by_file)])
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Commit the checkpoint: write its metadata file, then delete files that it does not name.

        The metadata is written here, not by torch: versions of torch differ in the object that they
        write, and in the files that they sync before the rename.

        Args:
            metadata: metadata of the checkpoint; its `storage_data` and `storage_meta` are set.
            results: results of `write_data` of each rank.

        Raises:
            CheckpointError: a rank has written its files elsewhere.
            OSError: a file could not be written, synced or deleted; see `write`.
        """
        metadata.storage_data = {}
        sums_by_file: dict[str, FileSums] = {}
        for result in itertools.chain.from_iterable(results):
            if result.index == _SUMS_INDEX:
                sums_by_file.update(result.storage_data)
            else:
                metadata.storage_data[result.index] = result.storage_data
        metadata.storage_meta = self.storage_meta()
        # Ranks that write nothing may have an empty file.
        used_names = {info.relative_path for info in metadata.storage_data.values()}
        sums_by_file = {name: sums for name, sums in sums_by_file.items() if name in used_names}
        directory = Path(self.path)
        flush_directory(directory)
        _check_files(directory, used_names)
        with replacing(directory / METADATA) as file:
            file.write(checksums.add_footer(pickle.dumps(metadata), sums_by_file))
            file.flush()  # a full disk fails here, before the checkpoint may be committed
            self._may_be_committed = True
        flush_directory(directory)
        for path in directory.glob(_DATA_FILES):
            if path.name not in used_names:
                path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the files of a save that failed, as far as possible, unless it may be committed.

        Only the coordinator finds the files of all ranks; on other ranks nothing is deleted.
        """
        if self._may_be_committed:
            return
        for path in Path(self.path).glob(f"{self._token}{_DATA_FILES}"):
            with contextlib.suppress(OSError):
                path.unlink()


def _check_files(directory: Path, names: Collection[str]) -> None:
    """Raise CheckpointError unless the directory, as this rank sees it, has files of all names."""
    # A listing, because NFS may remember for a while that a file of this name was absent.
    if missing_names := set(names).difference(path.name for path in directory.iterdir()):
        raise CheckpointError(
            f"a rank has written {min(missing_names)}, which is not in {directory.absolute()} of "
            "the first rank: all ranks must save to the same directory, on a file system that they "
            "share"
        )


class _CheckedFiles(FileSystem):
    """A file system that compares files with their checksums as they are read.

    `sums_by_file` has the checksums of all files by name; with None nothing is compared.
    """

    def __init__(self, sums_by_file: dict[str, FileSums] | None) -> None:
        super().__init__()
        self._sums_by_file = sums_by_file

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file to read."""
        path = Path(path)
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, which the checkpoint names; {checksums.REMEDY}"
            )
        with super().create_stream(path, mode) as stream:
            if self._sums_by_file is None:
                yield stream
                return
            checked_stream = CheckedStream(cast(Any, stream), path, self._sums_by_file[path.name])
            yield io.BufferedReader(checked_stream)


class Reader(dcp.FileSystemReader):
    """Reads one checkpoint. The constructor reads and checks its metadata.

    Args:
        path: directory of the checkpoint.

    Attributes:
        metadata: metadata of the checkpoint, checked.
        has_checksums: whether files are compared with checksums as they are read.

    Raises:
        CheckpointError: there is no checkpoint, or its metadata is damaged, is of another version
            of emblib, or names classes that a checkpoint does not need. A missing data file, and
            with checksums a damaged one, is an error only when it is read.
        OSError: the file of the metadata cannot be read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not (path / METADATA).is_file():
            state = "no whole checkpoint in it" if path.is_dir() else "no such directory"
            raise CheckpointError(f"cannot load {path}: there is {state}")
        metadata_path = path / METADATA
        pickled, sums_by_file = checksums.split_footer(metadata_path.read_bytes(), metadata_path)
        self.metadata = unpickling.read_metadata(pickled, metadata_path)
        self.has_checksums = sums_by_file is not None
        self.fs = _CheckedFiles(sums_by_file)
        self._check_extents(sums_by_file)

    def _check_extents(self, sums_by_file: dict[str, FileSums] | None) -> None:
        """Raise CheckpointError if the metadata refers to bytes beyond the end of a file."""
        end_by_file: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            end = info.offset + info.length
            end_by_file[info.relative_path] = max(end, end_by_file.get(info.relative_path, 0))
        for name, end in end_by_file.items():
            path = Path(self.path) / name
            if sums_by_file is not None:
                nbytes = sums_by_file[name].nbytes if name in sums_by_file else -1
            elif path.is_file():
                nbytes = path.stat().st_size
            else:
                continue  # a missing file is reported when it is read
            if end > nbytes:
                raise CheckpointError(
                    f"{Path(self.path) / METADATA} is damaged: it refers to byte {end} of {name}, "
                    f"which has {max(nbytes, 0)} bytes; {checksums.REMEDY}"
                )

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Read the items in the order of their offsets, so that a block is usually read once."""
        storage_data = self.metadata.storage_data
        items = sorted(plan.items, key=lambda item: storage_data[item.storage_index].offset)
        return super().read_data(dataclasses.replace(plan, items=items), planner)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return the metadata of the checkpoint."""
        return self.metadata


class _Planner(dcp.DefaultLoadPlanner):
    """Loads into a flat state dict, without running code of pickled values."""

    def __init__(self, path: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._path = path

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one value into the state dict."""
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = values.read_value(value, name, self._path)


def write(state: dict[str, Any], path: Path, ranks: RankGroup) -> None:
    """Save a nested state dict as the checkpoint of directory `path`; a collective over `ranks`.

    The first rank that has a value writes it.

    Raises:
        CheckpointError: a rank failed, for example because its disk is full; on every rank. The
            directory has its old checkpoint, or the new one if a step after the commit failed: the
            sync of the directory, or the deletion of files that are not named any more.
        BaseException: torch's CheckpointException, if a rank was interrupted.
    """
    writer = CheckpointWriter(path)
    with _ignore_single_process_warning(), _errors_of_ranks(ranks):
        try:
            dcp.save(
                state,
                storage_writer=writer,
                # torch would spread the values over ranks, whose values may differ: BatchNorm's.
                planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        except BaseException:
            writer.discard()  # after all ranks have written: torch waits for them
            raise


def read(state: dict[str, Any], reader: Reader, ranks: RankGroup) -> None:
    """Fill a flat state dict in place; a collective over `ranks`.

    Args:
        state: tensors to read into, by name; other values are replaced by the saved ones.
        reader: reader of the checkpoint.
        ranks: the ranks that read, each with its own `state`.

    Raises:
        CheckpointError: a file is damaged, a value names classes that are not admitted, or `state`
            has an entry that the checkpoint lacks or that has another size; on every rank.
        BaseException: torch's CheckpointException, if a rank was interrupted.
    """
    with _ignore_single_process_warning(), _errors_of_ranks(ranks):
        dcp.load(
            state,
            storage_reader=reader,
            planner=_Planner(Path(reader.path)),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


@contextlib.contextmanager
def _errors_of_ranks(ranks: RankGroup) -> Iterator[None]:
    """Raise CheckpointError for torch's CheckpointException, which is not an Exception.

    It names the ranks that failed. If one of its causes is not an Exception, e.g. a
    KeyboardInterrupt, it is raised unchanged.
    """
    try:
        yield
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        if not all(isinstance(failure, Exception) for failure in failures):
            raise
        ranks_by_message: dict[str, list[int]] = {}
        for rank, (failure, _) in sorted(error.failures.items()):
            message = str(failure)
            if not isinstance(failure, CheckpointError):
                message = f"{type(failure).__name__}: {message}"
            ranks_by_message.setdefault(message, []).append(rank)
        messages = [
            message if ranks.size == 1 else f"{ranks_text(failed_ranks)}: {message}"
            for message, failed_ranks in ranks_by_message.items()
        ]
        raise CheckpointError("; ".join(messages)) from error


@contextlib.contextmanager
def _ignore_single_process_warning() -> Iterator[None]:
    """Suppress torch's warning that the process group has one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
