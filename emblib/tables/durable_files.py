"""Calls that change the files of a store or order those changes, and checksummed manifests.

Every store in files writes through these functions, so a test can record the calls and replay what
a power failure may leave of them. Changes through a mapping need no call; they are ordered by
`sync_map` and `sync_file` like all others.
"""

import contextlib
import json
import mmap
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHECKSUM = "checksum"


class SyncError(OSError):
    """A sync failed: part of what was written may be lost, whatever a second sync reports.

    Linux marks pages as clean when their write-back fails and reports the failure once. So the
    store that gets this error must not sync again; it is opened anew and recovers.
    """


class SyncGuard:
    """Refuses further changes of what a directory holds after a sync of it failed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._failure = ""

    def check(self) -> None:
        """Raise RuntimeError if a sync failed."""
        if self._failure:
            raise RuntimeError(
                f"{self._directory} cannot be written to any more: a sync failed "
                f"({self._failure}), and the system may report the next one as a success though "
                "what was to be written is lost. Open the directory in a new module: it goes back "
                "to the last commit"
            )

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Remember a `SyncError` that passes."""
        try:
            yield
        except SyncError as error:
            self._failure = str(error)
            raise


class ChecksumError(RuntimeError):
    """Bytes of a file are not those that were written to it."""


def open_file(path: Path) -> int:
    """Open a file for reading and writing; create it if it does not exist."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def write_at(handle: int, data: memoryview, at: int) -> int:
    """Write at a position; return the number of bytes written, which may be fewer."""
    return os.pwrite(handle, data, at)


def resize(handle: int, size: int) -> None:
    """Cut a file, or extend it by zeros."""
    os.ftruncate(handle, size)


def allocate(handle: int, begin: int, size: int) -> None:
    """Reserve disk space for `size` bytes; new ones are zeros."""
    os.posix_fallocate(handle, begin, size)


def rename(old: Path, new: Path) -> None:
    """Give a file the name of another one, which it replaces."""
    os.replace(old, new)


def remove(path: Path) -> None:
    """Remove a file unless it is missing."""
    path.unlink(missing_ok=True)


def sync_file(handle: int, path: Path) -> None:
    """Return when all that was written to a file is on the disk, also through a mapping."""
    _fsync(handle, path)


def sync_map(mapped: mmap.mmap, path: Path) -> None:
    """Return when all that was written to a mapping of a file is on the disk."""
    try:
        mapped.flush()
    except OSError as error:
        raise _sync_error(error, path) from error


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory, as they are now, are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        _fsync(handle, directory)
    finally:
        os.close(handle)


def _fsync(handle: int, path: Path) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        raise _sync_error(error, path) from error


def _sync_error(error: OSError, path: Path) -> SyncError:
    return SyncError(error.errno, f"sync failed: {error.strerror}", str(path))


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content`, which JSON can hold, with its checksum."""
    return {**content, _CHECKSUM: json_checksum(content)}


def unseal(content: dict[str, Any]) -> dict[str, Any]:
    """Return what was given to `seal`.

    Raises:
        ValueError: it is not what was sealed.
    """
    rest = {key: value for key, value in content.items() if key != _CHECKSUM}
    if content.get(_CHECKSUM) != json_checksum(rest):
        raise ValueError("its content does not match its checksum")
    return rest


def json_checksum(content: dict[str, Any]) -> int:
    """Return the CRC-32 of what JSON makes of `content`, whatever the order of its keys."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
