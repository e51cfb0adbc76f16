"""File operations of stores, and files that are replaced as a whole.

In this order: errors, calls of the system, JSON with a checksum, parts of stores (mapped files,
locks, checks of directories), files that are replaced or saved, stores in forked processes.

Stores and dumps in emblib's own formats make their changes through the calls of the system here, so
a test can record the calls and replay what a power failure may leave on the disk. Writes through a
memory mapping need no call; `sync_map` and `sync_file` order them with the others.
"""

import contextlib
import errno
import fcntl
import json
import lzma
import mmap
import os
import shutil
import struct
import uuid
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from emblib.ops import pages

_CHECKSUM = "checksum"  # key of the checksum of a sealed manifest


class SyncError(OSError):
    """A sync failed: some writes may be lost, even if a second sync succeeds.

    Linux marks pages as clean when their write-back fails, and reports the failure once. So a store
    that gets this error must not sync again; opening it again restores its last commit.
    """


class SyncGuard:
    """Refuses further changes of the files of a directory once a sync has failed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._failure = ""

    @property
    def has_failed(self) -> bool:
        """Return whether a sync has failed within `watch`."""
        return bool(self._failure)

    def check(self) -> None:
        """Raise RuntimeError if `has_failed`."""
        if self._failure:
            raise RuntimeError(
                f"{self._directory} cannot be written to any more: a sync failed "
                f"({self._failure}), and the system may report the next one as a success though "
                "what was to be written is lost. Open the directory in a new module: it goes back "
                "to the last commit"
            )

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Context whose `SyncError` is re-raised, and makes `check` raise from then on."""
        try:
            yield
        except SyncError as error:
            self._failure = str(error)
            raise


class ChecksumError(RuntimeError):
    """The bytes of a file are not those that were written to it."""


def open_without_links(path: Path, flags: int) -> int:
    """Open a file whose name emblib chose, in a directory of the user; create it if missing.

    `flags` are those of `os.open`. Symbolic links are refused: another user who may write to the
    directory could place one under that name, and emblib would overwrite its target. The directory
    itself may be a link.

    Raises:
        OSError: the file is a symbolic link, or cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(
            errno.ELOOP,
            "a file that emblib writes is a symbolic link, which is not followed; remove the link, "
            "or make its directory a link to where the files shall be",
            str(path),
        ) from error


def open_fresh(path: Path, flags: int) -> int:
    """Open a file whose old content does not matter, such as a lock or a new version of a file.

    The file is created if it is missing, but not truncated. A symbolic link under its name is
    removed; the target of the link does not change.
    """
    try:
        return open_without_links(path, flags)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    remove(path)
    return open_without_links(path, flags)


def open_file(path: Path) -> int:
    """Open a file for reading and writing; create it if missing, see `open_without_links`."""
    return open_without_links(path, os.O_RDWR)


def write_at(handle: int, data: memoryview, offset: int) -> int:
    """Write at a position; return the number of bytes written, which may be fewer."""
    return os.pwrite(handle, data, offset)


def fetch_rows(path: Path, data: Tensor, rows: Tensor, row_bytes: int, first_byte: int = 0) -> bool:
    """Read the pages of rows of a mapped file that are about to be used, many at a time.

    Without this call, page faults read the pages one after the other, and a failing read ends the
    process. A probe of some of the pages decides: if they are in memory, nothing is read, and the
    result is False. If pages were read, it is True.

    Args:
        path: path of the file, for errors.
        data: bytes of the file from its first one on, as mapped.
        rows: rows of the file, int64 `[n]`; -1 for none.
        row_bytes: bytes per row.
        first_byte: position of row 0.

    Raises:
        OSError: a page cannot be read.
    """
    unreadable, num_ranges = pages.fetch_pages(data, rows, row_bytes, first_byte)
    if unreadable.numel():
        raise OSError(
            errno.EIO,
            f"the bytes at {int(unreadable[0])} cannot be read: the file was cut off while it was "
            "open, or the disk failed. Open the directory again: it goes back to the last commit "
            "or says what is lost",
            str(path),
        )
    return bool(num_ranges)


def resize(handle: int, num_bytes: int) -> None:
    """Truncate a file to `num_bytes` bytes, or extend it with zeros."""
    os.ftruncate(handle, num_bytes)


def allocate(handle: int, first_byte: int, num_bytes: int) -> None:
    """Reserve disk space for `num_bytes` from `first_byte` on; a file that grows has zeros."""
    os.posix_fallocate(handle, first_byte, num_bytes)


def rename(old: Path, new: Path) -> None:
    """Rename a file, replacing any file of the new name."""
    os.replace(old, new)


def remove(path: Path) -> None:
    """Remove a file unless it is missing."""
    path.unlink(missing_ok=True)


def sync_file(handle: int, path: Path) -> None:
    """Wait until all writes to a file, also through a mapping, are on the disk."""
    _fsync(handle, path)


def sync_map(mapped: mmap.mmap, path: Path) -> None:
    """Wait until all writes through a mapping of a file are on the disk."""
    try:
        mapped.flush()
    except OSError as error:
        raise _sync_error(error, path) from error


def sync_directory(directory: Path) -> None:
    """Wait until the current names in a directory are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        _fsync(handle, directory)
    finally:
        os.close(handle)


def _fsync(handle: int, path: Path) -> None:
    """Sync a file or directory to the disk; raise SyncError if that fails."""
    try:
        os.fsync(handle)
    except OSError as error:
        raise _sync_error(error, path) from error


def _sync_error(error: OSError, path: Path) -> SyncError:
    """Return the error of a failed sync of a file or directory."""
    return SyncError(error.errno, f"sync failed: {error.strerror}", str(path))


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content`, which JSON must be able to hold, with its checksum as a further entry."""
    return {**content, _CHECKSUM: json_checksum(content)}


def unseal(content: dict[str, Any]) -> dict[str, Any]:
    """Return the argument of `seal` from its result, which may have been written as JSON.

    Raises:
        ValueError: the checksum is missing or wrong.
    """
    entries = {key: value for key, value in content.items() if key != _CHECKSUM}
    if content.get(_CHECKSUM) != json_checksum(entries):
        raise ValueError("its content does not match its checksum")
    return entries


def json_checksum(content: dict[str, Any]) -> int:
    """Return the CRC-32 of `content` as JSON with sorted keys."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


LOCK = "lock"  # name of the lock file; its content is the id of the process that has the lock
_MAX_PID_BYTES = 20  # digits of an int64
_CRC = "crc32"  # key of the checksum that `save_json` appends
_NEW_SUFFIX = ".new"  # suffix of the new version of a file, until it replaces the file


class MappedFile:
    """A file of numbers of one dtype, to be mapped into memory.

    Args:
        path: path of the file.
        dtype: name of a torch dtype, such as "float32".
        num_elements: number of numbers.

    Attributes:
        nbytes: length of the file in bytes.
        mapped: the mapping; None before `map`, and for a file without numbers.
    """

    def __init__(self, path: Path, dtype: str, num_elements: int) -> None:
        self.path, self.num_elements = path, num_elements
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.nbytes = num_elements * self.dtype.itemsize
        self.mapped: mmap.mmap | None = None

    def create(self) -> None:
        """Create a sparse file of zeros, which replaces any other; it takes space once written."""
        remove(self.path)
        handle = open_file(self.path)
        try:
            resize(handle, self.nbytes)
            sync_file(handle, self.path)
        finally:
            os.close(handle)

    def fits(self) -> bool:
        """Return whether the file exists and has `nbytes` bytes."""
        return self.path.exists() and self.path.stat().st_size == self.nbytes

    def map(self) -> Tensor:
        """Map the file, and return it as a tensor `[num_elements]` of its dtype.

        Raises:
            RuntimeError: the file is missing, or has another length.
        """
        if not self.fits():
            file_bytes = self.path.stat().st_size if self.path.exists() else None
            size_text = "is missing" if file_bytes is None else f"has {file_bytes} bytes"
            raise RuntimeError(
                f"{self.path} {size_text}, its tables have {self.nbytes} bytes; delete the "
                "directory and start from a checkpoint"
            )
        if not self.num_elements:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        handle = open_file(self.path)
        try:
            self.mapped = mmap.mmap(handle, self.nbytes)
        finally:
            os.close(handle)
        self.mapped.madvise(mmap.MADV_RANDOM)  # a row is a page or two: do not read its neighbours
        return torch.frombuffer(self.mapped, dtype=self.dtype)

    def sync(self) -> None:
        """Wait until all writes through the mapping are on the disk."""
        if self.mapped is not None:
            sync_map(self.mapped, self.path)

    def alias(self) -> Tensor:
        """Return another tensor over the mapping of `map`, with its own version counter."""
        if self.mapped is None:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        return torch.frombuffer(self.mapped, dtype=self.dtype)


def lazy_zeros(num_bytes: int) -> Tensor:
    """Return uint8 zeros `[num_bytes]` that take memory only where written; forks get copies."""
    if not num_bytes:
        return torch.zeros(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


def make_directory(directory: Path, content: str) -> None:
    """Create a directory and its parents if missing; `content` names its content in errors.

    Raises:
        OSError: the directory cannot be created, or the path is a file.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the directory of {content} cannot be made ({error.strerror})",
            str(directory),
        ) from error


def check_directory(directory: Path, content: str, known_file: str) -> None:
    """Raise ValueError if a directory has files besides a lock and an unfinished `known_file`."""
    unknown_files = sorted(set(os.listdir(directory)) - {LOCK, known_file + _NEW_SUFFIX})
    if unknown_files:
        raise ValueError(
            f"the directory of {content} must be empty or hold them already; {directory} "
            f"holds {', '.join(unknown_files[:4])}{' and more' if len(unknown_files) > 4 else ''}: "
            "name another one, e.g. a new one in it"
        )


def lock_file(
    path: Path,
    content: str,
    remedy: str = "end it, or delete the module that has them; or name another directory, for a "
    "table that is sharded in the storage of its plan",
) -> int:
    """Lock a file exclusively and return its handle, which holds the lock until it is closed.

    Args:
        path: path of the file, which is created if missing.
        content: name of the directory's content, for errors.
        remedy: advice in the error if another process has the lock.

    Raises:
        BlockingIOError: another handle has the lock, in this process or another one.
        OSError: the file cannot be opened for writing.
    """
    try:
        handle = open_fresh(path, os.O_RDWR)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{content} need a directory that can be written to ({error.strerror})",
            str(path.parent),
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(handle, _MAX_PID_BYTES, 0).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise OSError(
            error.errno,
            f"{content} have one owner; these are open in process {holder} ({error.strerror}); "
            f"{remedy}",
            str(path.parent),
        ) from error
    with contextlib.suppress(OSError):  # a full disk; only error messages need the process id
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def check_free_space(directory: Path, nbytes: int) -> None:
    """Raise OSError unless the disk of DISK tables has `nbytes` free bytes.

    On a full disk a write to a mapping kills the process.
    """
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < nbytes:
        raise OSError(
            errno.ENOSPC,
            f"DISK tables of {nbytes} bytes do not fit, {free_bytes} are free; name another "
            "directory",
            str(directory),
        )


def name_file(error: BaseException, path: Path) -> None:
    """Add a path to an OSError that names no file, as those of writes do, e.g. on a full disk."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


@contextlib.contextmanager
def replacing(path: Path, new_path: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the context ends; its content is then on the disk.

    If the context raises, `path` stays as it is. The replacement survives a power failure once the
    caller has called `flush_directory`.

    Args:
        path: path of the file that is replaced.
        new_path: path of the new file until then. None is `path` with a suffix, the same every
            time, for directories with a single writer.

    Raises:
        OSError: it could not be written; `path` has its old content.
    """
    new_path = path.with_name(path.name + _NEW_SUFFIX) if new_path is None else new_path
    try:
        with os.fdopen(open_fresh(new_path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            yield file
            file.flush()
            sync_file(file.fileno(), new_path)
        rename(new_path, path)
    except BaseException as error:
        remove(new_path)
        name_file(error, path)
        raise


@contextlib.contextmanager
def saving(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path`, or the target of a link there, when the context ends.

    The content is written to a file with a unique name in the same directory, so several processes
    may save one path; the last one wins. At the end the file is synced and renamed, and its
    directory synced. If the context raises, the file is removed.

    Raises:
        OSError: the file could not be written, and `path` has its old content; or only the sync of
            its directory failed, and `path` has the new one.
    """
    target = Path(os.path.realpath(path))  # follow links
    if not target.parent.exists():
        folder = str(target.parent)
        raise FileNotFoundError(errno.ENOENT, f"cannot save {target.name}: no such folder", folder)
    new_path = target.with_name(f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}{_NEW_SUFFIX}")
    with replacing(target, new_path) as file:
        yield file
    flush_directory(target.parent)


def save_json(path: str | Path, text: str) -> None:
    """Save the text of a JSON object, which must have no entry `crc32`; append its checksum so.

    Raises:
        OSError: as `saving` does.
    """
    content = json.loads(text)
    comma = ", " if content else ""
    with saving(path) as file:
        entries = text.rstrip()[:-1].rstrip()
        file.write(f'{entries}{comma}"{_CRC}": {json_checksum(content)}}}\n'.encode())


def load_json(path: str | Path) -> str:
    """Return the object that `save_json` got, as JSON; of a file without checksum, its text.

    Raises:
        ValueError: the checksum is wrong.
        OSError: the file cannot be read.
    """
    text = Path(path).read_text(errors="replace")
    try:
        content = json.loads(text)
    except ValueError:
        return text  # the caller checks its content
    if not isinstance(content, dict) or _CRC not in content:
        return text
    saved_checksum = content.pop(_CRC)
    if saved_checksum != json_checksum(content):
        raise ValueError(
            f"{path} is damaged: its checksum is wrong; save or copy it again. If it was edited, "
            f"delete its entry {_CRC!r}"
        )
    return json.dumps(content)


class _RecordingStream:
    """An output stream that records the first error of its writes, `error`; else as `stream`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.error: BaseException | None = None

    def write(self, data: Any) -> Any:
        """Write `data`; return what the stream returns."""
        try:
            return self._stream.write(data)
        except BaseException as error:
            self.error = self.error or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def raising_write_errors(stream: Any) -> Iterator[Any]:
    """Yield `stream` for `torch.save`, and raise the error of a write that failed as it is.

    When a write fails, torch tries to end its archive, and raises a RuntimeError about positions.
    """
    recording = _RecordingStream(stream)
    try:
        yield recording
    except RuntimeError:
        if recording.error is None:
            raise
        raise recording.error from None


def save_archive(content: Any, file: BinaryIO) -> None:
    """Write a file for `torch.load`, a zip archive, with a checksum of each of its parts.

    Meanwhile `torch.save` in other threads writes checksums, too: the option is of the process.
    """
    crc32_before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        with raising_write_errors(file) as stream:
            torch.save(content, stream)
    finally:
        torch.serialization.set_crc32_options(crc32_before)


def check_archive(path: str | Path) -> None:
    """Verify the checksums in a file of `torch.save`, which `torch.load` does not verify.

    Raises:
        ValueError: a checksum is wrong, or the file is no such archive.
        OSError: the file cannot be opened.
    """
    archive_errors = (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        struct.error,
        EOFError,
        OSError,
        RuntimeError,
        ValueError,
        LookupError,
    )
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                damaged_member = archive.testzip()
        except archive_errors as error:
            raise ValueError(f"it is not a whole archive of torch.save ({error})") from error
    if damaged_member is not None:
        raise ValueError(f"the checksum of its part {damaged_member} is wrong")


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file by `content` as JSON; if that raises OSError, the old file stays.

    No checksum is added: pass the result of `seal`. The caller must call `flush_directory`.
    """
    with replacing(path) as file:
        file.write(json.dumps(content, indent=1).encode())


@contextlib.contextmanager
def raising_content_errors(path: Path) -> Iterator[None]:
    """Context for reading a file of `replace_json`: errors of its content become RuntimeError."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"{path} cannot be read ({error}); it is written by emblib alone: delete the "
            "directory and start from a checkpoint"
        ) from error


class Closable(Protocol):
    """A store that is open in one process."""

    def close(self) -> None:
        """Close the store, so that another process can open it."""


_closed_by_forks: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_in_forks(store: Closable) -> None:
    """Have a store closed in forked processes, which else keep its lock after the parent's end."""
    _closed_by_forks.add(store)


def _close_stores() -> None:
    """Close all stores of the parent, in a forked child."""
    for store in list(_closed_by_forks):
        store.close()


os.register_at_fork(after_in_child=_close_stores)


def flush_directory(directory: Path) -> None:
    """Sync a directory, so that renames in it survive a power failure.

    Stores import this function by name. It calls `sync_directory` of this module, which a test can
    replace to record the call.
    """
    sync_directory(directory)
