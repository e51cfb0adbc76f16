"""The files of a DiskStore: one owner at a time, sizes as promised, mapped as tensors."""

import errno
import fcntl
import mmap
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

LOCK = "lock"


class MappedFile:
    """One mapped file: `count` numbers of a dtype, by its name."""

    def __init__(self, path: Path, dtype: str, count: int) -> None:
        self.path, self.count = path, count
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.nbytes = count * self.dtype.itemsize

    def create(self) -> None:
        """All zeros, whatever was there; takes no room before it is written to."""
        self.path.unlink(missing_ok=True)
        with open(self.path, "xb") as file:
            file.truncate(self.nbytes)
            os.fsync(file.fileno())

    def map(self, maps: list[mmap.mmap]) -> Tensor:
        """The file as a tensor; its mapping is added to `maps`."""
        size = self.path.stat().st_size if self.path.exists() else None
        if size != self.nbytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise RuntimeError(
                f"{self.path} {found}, its tables have {self.nbytes} bytes; delete the directory "
                "and start from a checkpoint"
            )
        if not self.count:
            return torch.empty(0, dtype=self.dtype)
        with open(self.path, "r+b") as file:
            maps.append(mmap.mmap(file.fileno(), self.nbytes))
        maps[-1].madvise(mmap.MADV_RANDOM)  # a row is a page or two: do not read its neighbours
        return torch.frombuffer(maps[-1], dtype=self.dtype)


def zeros(count: int) -> Tensor:
    """uint8 zeros that take memory, and time, only where they are written to."""
    if not count:
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)


def make_directory(directory: Path) -> None:
    """With its parents, unless it is there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the directory of DISK tables cannot be made ({error.strerror})",
            str(directory),
        ) from error


def lock(directory: Path) -> int:
    """The open lock file, which nobody else has while it is open."""
    try:
        handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise OSError(
            error.errno,
            f"DISK tables need a directory that can be written to ({error.strerror})",
            str(directory),
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise OSError(
            error.errno,
            f"DISK tables have one owner; these are open in process {holder} ({error.strerror}); "
            "end it, or delete the module that has them",
            str(directory),
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def make_room(directory: Path, nbytes: int) -> None:
    """Raise OSError unless `nbytes` fit: a mapping that finds no room ends the process."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise OSError(
            errno.ENOSPC,
            f"DISK tables of {nbytes} bytes do not fit, {free} are free; name another directory",
            str(directory),
        )


def flush_directory(directory: Path) -> None:
    """Make names that were given to files survive the end of the machine."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
