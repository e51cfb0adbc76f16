"""Dumps in a directory: arrays in files, complete or absent even if the writer is killed.

A dump has one part per rank. A part is a manifest, `part_<rank>_of_<world size>.json`, and the
files that it names, each with the elements of one array in the byte order of the machine. Writing
the manifest is the commit: all arrays are on the disk before it is renamed into place. A writer
that ends earlier may leave files that no manifest names; the next writer of the part deletes them.
A part of an older dump stays valid until the new manifest replaces its own. So if ranks are cut
short between their commits, the directory holds neither dump.

Manifest and arrays have checksums. A reader requires every part, all with the same `identity`, so
that parts of different dumps are not combined after an interrupt.
"""

import contextlib
import itertools
import json
import mmap
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.tables.durable_files import (
    flush_directory,
    json_checksum,
    lock_file,
    make_directory,
    name_file,
    open_fresh,
    replace_json,
)

_FORMAT = 1
_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
_CHUNK_BYTES = 1 << 24  # bytes that are copied or checked at a time; not measured


class DumpError(RuntimeError):
    """The directory holds no complete dump, or the dump is damaged."""


class DumpMismatchError(DumpError, ValueError):
    """The dump does not fit the module that loads it: its tables differ, or it is damaged."""


class Part(NamedTuple):
    """The rank of a part, and the number of parts of its dump."""

    rank: int = 0
    world_size: int = 1

    @property
    def name(self) -> str:
        """Return the prefix of the part's file names."""
        return f"part_{self.rank:05d}_of_{self.world_size:05d}"

    @property
    def manifest(self) -> str:
        """Return the name of the part's manifest."""
        return f"{self.name}.json"


class DumpProgress(NamedTuple):
    """The progress of saving or loading: `done` of `total` rows of `table`.

    Row buffers are counted separately, one after the other, except on the way into a backing store.
    """

    table: str
    done: int
    total: int


Report = Callable[[DumpProgress], None]
"""Function that is called after each block of rows.

If it raises, a save ends; a load finishes without it, and then raises its exception.
"""


def entry_of(path: Path, tree: Any, name: str, *kinds: type) -> Any:
    """Return an entry of a manifest, after checking its type.

    Raises:
        DumpError: the manifest at `path` has no entry `name` of one of these types in `tree`.
    """
    type_names = " or ".join(kind.__name__ for kind in kinds)
    if not isinstance(tree, dict):
        raise DumpError(f"{path} is malformed: there is {_abbreviate(tree)} where {name!r} must be")
    if name not in tree:
        raise DumpError(f"{path} is malformed: it lacks {name!r}, which must be {type_names}")
    if type(tree[name]) not in kinds:
        raise DumpError(
            f"{path} is malformed: {name!r} must be {type_names}, is {_abbreviate(tree[name])}"
        )
    return tree[name]


def _abbreviate(value: Any) -> str:
    """Return the text of a value, cut short for a message."""
    return repr(value)[:60]


class Writer:
    """A writer of one part of a dump, as a context manager; readers see the part after `commit`.

    Leaving the context by an exception deletes the arrays that no manifest names. Only one thread
    may call a writer; not checked. Several parts may be written at the same time.

    Args:
        directory: directory of the dump, created with its parents if it does not exist. It may hold
            an older dump of the same number of parts, which stays valid until the first part of
            this one is committed.
        part: the rank and the number of parts.

    Raises:
        ValueError: the directory holds a dump of another number of parts, or other files; or the
            rank is not below the number of parts.
        BlockingIOError: this part is being written by another writer.
        OSError: the directory cannot be written to.
    """

    def __init__(self, directory: str | Path, part: Part = Part()) -> None:  # noqa: B008
        if not 0 <= part.rank < part.world_size:
            raise ValueError(f"a part needs 0 <= rank < world_size, got {part}")
        self.directory = Path(directory).expanduser()
        self.part = part
        make_directory(self.directory, "a dump")
        self._check_directory()
        self._lock = lock_file(
            self.directory / f"{part.name}.lock",
            "parts of a dump",
            "wait for it, or name another directory",
        )
        self._names: list[str] = []
        self._generation = 1 + max(
            (
                int(match[1])
                for name in self._files_of_part()
                if (match := _ARRAY_FILE.search(name))
            ),
            default=0,
        )

    def _check_directory(self) -> None:
        """Raise ValueError if the directory has other files, or a dump of other parts."""
        for name in sorted(os.listdir(self.directory)):
            match = _PART_FILE.match(name)
            if match is None:
                raise ValueError(
                    f"the directory of a dump must be empty or hold one already; {self.directory} "
                    f"holds {name}: name another one, e.g. a new one in it"
                )
            if int(match[2]) != self.part.world_size:
                raise ValueError(
                    f"{self.directory} holds a dump of {int(match[2])} parts, this one has "
                    f"{self.part.world_size}: name another directory, or delete that one"
                )

    def _files_of_part(self) -> list[str]:
        """Return the names of the files of this part, committed or not."""
        return [name for name in os.listdir(self.directory) if name.startswith(self.part.name)]

    @contextlib.contextmanager
    def array(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator["ArrayWriter"]:
        """Open a writer of one array, which is durable when the context ends.

        Raises:
            RuntimeError: at the end, where the number of elements differs from `shape`.
        """
        name = f"{self.part.name}.{self._generation}.{len(self._names)}.bin"
        self._names.append(name)
        writer = ArrayWriter(self.directory / name, dtype, shape)
        try:
            yield writer
            writer.flush()
        finally:
            writer.close()

    def commit(self, content: dict[str, Any]) -> None:
        """Make the part valid, replacing an older one atomically, whose files are then deleted.

        `content` is a JSON object, in which each array is represented by its
        `ArrayWriter.description`.
        """
        manifest = {
            **content,
            "part": list(self.part),
            "format": _FORMAT,
            "byteorder": sys.byteorder,
        }
        flush_directory(self.directory)
        path = self.directory / self.part.manifest
        replace_json(path, {"content": manifest, "checksum": json_checksum(manifest)})
        flush_directory(self.directory)
        self._delete_files(keep={path.name, *self._names})

    def _delete_files(self, keep: set[str]) -> None:
        """Delete the files of this part except `keep` and its lock."""
        for name in self._files_of_part():
            if name not in keep and not name.endswith(".lock"):
                os.unlink(self.directory / name)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Delete uncommitted arrays after an exception, and release the lock of the part."""
        try:
            if kind is not None:
                manifest = _manifest_names(self.directory / self.part.manifest)
                self._delete_files(keep={self.part.manifest, *manifest})
        finally:
            os.close(self._lock)


class ArrayWriter:
    """A writer of the file of one array, which appends elements; see `Writer.array`."""

    def __init__(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.path, self.dtype, self.shape = path, dtype, shape
        self._handle = open_fresh(path, os.O_WRONLY | os.O_TRUNC)
        self._num_written, self._crc = 0, 0  # bytes so far, and their CRC-32

    def append(self, numbers: Tensor) -> None:
        """Append a tensor of any shape and device, converted to the dtype of the array."""
        elements = numbers.detach().reshape(-1)
        for chunk in elements.split(max(_CHUNK_BYTES // self.dtype.itemsize, 1)):
            if not chunk.numel():
                continue
            buffer = bytearray(chunk.numel() * self.dtype.itemsize)
            torch.frombuffer(buffer, dtype=self.dtype).copy_(chunk)
            self._crc = zlib.crc32(buffer, self._crc)
            try:
                _write_all(self._handle, buffer, self._num_written)
            except OSError as error:
                name_file(error, self.path)
                raise
            self._num_written += len(buffer)

    def flush(self) -> None:
        """Flush the array to the disk; raise RuntimeError if elements of it are missing."""
        nbytes = self.dtype.itemsize
        for length in self.shape:
            nbytes *= length
        if self._num_written != nbytes:
            raise RuntimeError(
                f"an array of shape {list(self.shape)} has {nbytes} bytes, "
                f"{self._num_written} were written"
            )
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    @property
    def description(self) -> dict[str, Any]:
        """Return the entry of the array in the manifest."""
        return {
            "file": self.path.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "crc32": self._crc,
        }


class PartReader:
    """A reader of one part of a complete dump.

    Args:
        path: path of the manifest.

    Attributes:
        content: content of the manifest, see `Writer.commit`.
        part: rank and number of parts.

    Raises:
        DumpError: the manifest is damaged, or is of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            manifest = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise DumpError(f"{path} is damaged: it cannot be read ({error})") from error
        self.content: dict[str, Any] = entry_of(path, manifest, "content", dict)
        if entry_of(path, manifest, "checksum", int) != json_checksum(self.content):
            raise DumpError(f"{path} is damaged: its checksum is wrong")
        format_and_order = tuple(
            entry_of(path, self.content, name, kind)
            for name, kind in (("format", int), ("byteorder", str))
        )
        part = entry_of(path, self.content, "part", list)
        if [type(number) for number in part] != [int, int] or not 0 <= part[0] < part[1]:
            raise DumpError(
                f"{path} is malformed: 'part' must be a rank and a number of ranks above it, is "
                f"{_abbreviate(part)}"
            )
        self.part = Part(*part)
        if path.name != self.part.manifest:
            raise DumpError(
                f"{path} is malformed: its 'part' is {part}, which would be {self.part.manifest}"
            )
        if format_and_order != (_FORMAT, sys.byteorder):
            raise DumpError(
                f"{path} is of format {format_and_order[0]}, {format_and_order[1]}-endian;"
                f" this version on this machine reads {_FORMAT}, {sys.byteorder}-endian"
            )

    def array(self, description: dict[str, Any]) -> Tensor:
        """Return the array of a description in `content`, mapped: values are read on access.

        The tensor is a private copy: writing to it does not change the file.

        Raises:
            DumpError: the file is missing, has another size, or does not belong to this part.
        """
        try:
            name, shape = description["file"], description["shape"]
            if description["dtype"] not in _DTYPES or type(description["crc32"]) is not int:
                raise ValueError("no such dtype or checksum")
            dtype: torch.dtype = getattr(torch, description["dtype"])
            nbytes = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
            is_file_of_part = os.path.basename(name) == name and name.startswith(self.part.name)
            is_file_of_part = is_file_of_part and "\0" not in name
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise DumpError(f"{self.path} is damaged: {description} is not an array") from error
        if not is_file_of_part:
            raise DumpError(f"{self.path} is damaged: {name!r} is not a file of {self.part.name}")
        path = self.path.parent / name
        file_bytes = path.stat().st_size if path.exists() else None
        if file_bytes != nbytes:
            size_text = "is missing" if file_bytes is None else f"has {file_bytes} bytes"
            raise DumpError(f"{path} {size_text}, its array has {nbytes}; the dump is damaged")
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(mapped, dtype=dtype).view(shape)

    def verify(self) -> None:
        """Read every array and compare its checksum.

        Raises:
            DumpError: a checksum is wrong, or see `array`.
        """
        for description in _descriptions(self.content):
            array_bytes = self.array(description).reshape(-1).view(torch.uint8)
            crc = 0
            for chunk in array_bytes.split(_CHUNK_BYTES):
                buffer = bytearray(chunk.numel())
                if buffer:
                    torch.frombuffer(buffer, dtype=torch.uint8).copy_(chunk)
                crc = zlib.crc32(buffer, crc)
            if crc != description["crc32"]:
                path = self.path.parent / description["file"]
                raise DumpError(f"{path} is damaged: its checksum is wrong; take another dump")


def read_parts(directory: str | Path) -> list[PartReader]:
    """Return readers of all parts of the dump in a directory, by rank.

    Raises:
        DumpError: there is none, a part is missing, its manifest is damaged, or parts are of
            different dumps.
    """
    directory = Path(directory).expanduser()
    paths = sorted(directory.glob("part_*_of_*.json")) if directory.is_dir() else []
    if not paths:
        raise DumpError(f"{directory} holds no whole dump; name the directory of one")
    parts = [PartReader(path) for path in paths]
    world_size = parts[0].part.world_size
    ranks = {part.part.rank for part in parts}
    # At most eight are listed: a damaged manifest may claim any number of ranks.
    missing_ranks = list(
        itertools.islice((rank for rank in range(world_size) if rank not in ranks), 8)
    )
    if missing_ranks:
        raise DumpError(
            f"{directory} holds part of a dump: of {world_size} parts those of ranks "
            f"{missing_ranks} are missing, so it was cut short; take an older one"
        )
    if len(parts) > world_size:
        raise DumpError(
            f"{directory} holds parts of more than one dump, {[path.name for path in paths]}; "
            "delete those that do not belong to the one to read"
        )
    identities = {_dump_identity(part.content) for part in parts}
    if len(identities) > 1:
        raise DumpError(
            f"the parts in {directory} are of different dumps, {sorted(identities)}: writing over "
            "one was cut short between two ranks; take an older one, and write each into a "
            "directory of its own"
        )
    return parts


def _dump_identity(content: dict[str, Any]) -> str:
    """Return a text that all parts of one dump have in common."""
    since = content.get("since")
    identity = str(content.get("identity"))
    return identity if since is None else f"{identity} (changes since {since})"


_PART_FILE = re.compile(r"part_(\d{5})_of_(\d{5})\.")
_ARRAY_FILE = re.compile(r"\.(\d+)\.\d+\.bin$")


def _descriptions(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the descriptions of all arrays that a manifest names."""
    if isinstance(tree, dict):
        if "crc32" in tree:
            yield tree
        else:
            for branch in tree.values():
                yield from _descriptions(branch)
    elif isinstance(tree, list):
        for branch in tree:
            yield from _descriptions(branch)


def _manifest_names(path: Path) -> set[str]:
    """Return the files of the existing dump, if it is readable."""
    if not path.exists():
        return set()
    try:
        content = PartReader(path).content
    except DumpError:
        return set()
    return {description["file"] for description in _descriptions(content)}


def _write_all(handle: int, data: bytes | bytearray, offset: int) -> None:
    """Write all bytes to a file, from byte `offset` on, in as many calls as needed."""
    remaining = memoryview(data)
    while remaining:
        num_written = os.pwrite(handle, remaining, offset)
        remaining, offset = remaining[num_written:], offset + num_written


def write(directory: str | Path, tree: Any) -> None:
    """Write a snapshot, a tree of dicts, lists, tensors and None, replacing an older dump.

    Raises:
        ValueError, BlockingIOError, OSError: see `Writer`, for a dump of one part.
    """
    with Writer(directory) as writer:
        tree_entry = _write_tree(writer, tree)
        writer.commit({"identity": "snapshot", "tree": tree_entry})


def _write_tree(writer: Writer, tree: Any) -> Any:
    """Write the tensors of a tree of dicts and lists; return its description for the manifest."""
    if isinstance(tree, dict):
        return {"dict": {name: _write_tree(writer, branch) for name, branch in tree.items()}}
    if isinstance(tree, list):
        return {"list": [_write_tree(writer, branch) for branch in tree]}
    if tree is None:
        return {"none": None}
    assert isinstance(tree, Tensor)
    with writer.array(tree.dtype, tuple(tree.shape)) as array:
        array.append(tree)
    return {"tensor": array.description}


def holds_snapshot(directory: str | Path) -> bool:
    """Return whether the dump in a directory is a snapshot.

    Raises:
        DumpError: there is no whole dump, or it is damaged.
    """
    return any("tree" in part.content for part in read_parts(directory))


def read(directory: str | Path) -> Any:
    """Read the snapshot in a directory; its tensors are mapped, private copies of the files.

    Raises:
        DumpError: there is none, or it is damaged, or it is a dump of another kind.
    """
    part = read_parts(directory)[0]
    if "tree" not in part.content:
        raise DumpError(f"{directory} holds a dump of entries, not a snapshot")
    part.verify()
    return _read_tree(part, part.content["tree"])


def _read_tree(part: PartReader, tree: Any) -> Any:
    """Return the tree that `_write_tree` described."""
    kind = next(iter(tree)) if isinstance(tree, dict) and len(tree) == 1 else ""
    if kind == "dict":
        branches = entry_of(part.path, tree, kind, dict)
        return {name: _read_tree(part, branch) for name, branch in branches.items()}
    if kind == "list":
        return [_read_tree(part, branch) for branch in entry_of(part.path, tree, kind, list)]
    if kind == "none":
        return None
    return part.array(entry_of(part.path, tree, "tensor", dict))


def check_entries(name: str, tree: Any, expected_names: Collection[str]) -> Mapping[str, Any]:
    """Return `tree`; raise ValueError unless it is a dict that has all `expected_names`."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{name} must be a dict, got {type(tree).__name__}")
    if missing_names := sorted(set(expected_names) - tree.keys()):
        raise ValueError(f"{name} lacks {missing_names}")
    return tree


def check_list(name: str, tree: Any, length: int, unit: str) -> Sequence[Any]:
    """Return `tree`; raise ValueError unless it is a list with `length` entries, one per `unit`."""
    if not isinstance(tree, list | tuple) or len(tree) != length:
        actual_length = len(tree) if isinstance(tree, list | tuple) else type(tree).__name__
        raise ValueError(f"{name} must be a list of {length}, one per {unit}, got {actual_length}")
    return tree


def check_presence(name: str, tree: Any, expected: Any) -> None:
    """Raise ValueError unless snapshot and module both have the part `name`, or neither."""
    if (tree is None) != (expected is None):
        saved_text, current_text = (
            "none" if value is None else "some" for value in (tree, expected)
        )
        raise ValueError(
            f"{name}: there is {saved_text} in the snapshot, {current_text} in this module"
        )


def check_tensor(name: str, value: Any, dtype: torch.dtype, shape: Sequence[int | None]) -> Tensor:
    """Return `value`; raise ValueError unless it is a tensor of a dtype and shape.

    A size of None matches any.
    """
    type_name = type(value).__name__
    if isinstance(value, Tensor):
        has_type = value.dtype == dtype and value.dim() == len(shape)
        sizes = zip(shape, value.shape, strict=False)
        if has_type and all(expected_size in (size, None) for expected_size, size in sizes):
            return value
        type_name = f"{value.dtype} {list(value.shape)}"
    raise ValueError(
        f"{name} must be {dtype} {list(shape)}, got {type_name}; it is of other tables, of another "
        "optimizer or precision, or damaged"
    )


def check_state(name: str, state: Any, expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a state dict has exactly the `expected` keys, dtypes and shapes."""
    check_entries(name, state, expected)
    if unknown_names := sorted(state.keys() - expected.keys()):
        raise ValueError(f"{name} has {unknown_names}, which this module has not")
    for key, tensor in expected.items():
        check_tensor(f"{name}.{key}", state[key], tensor.dtype, tensor.shape)
