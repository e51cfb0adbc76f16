"""Frozen files: named tensors, written once, checked, and mapped by any number of processes.

    magic (8 bytes) | version, CRC-32 and bytes of the header (uint32, uint32, uint64) | header
    sections, each from a multiple of 4096 bytes on

The header is a JSON object: `kind` and `config` say what the tensors are, `sections` has `name`,
`dtype`, `shape`, first byte (`begin`), `nbytes` and `crc32` of each, and `nbytes` is the size of
the file. A file is complete or absent: it is written under another name, synced, and renamed.
Nothing in it is unpickled.
"""

import ctypes
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from emblib.tables.durable_files import ChecksumError, saving

MAGIC = b"\x93emblib\n"  # no text: a transfer as text changes it
VERSION = 1
ALIGNMENT = 4096  # a page, so that sections may be advised and shared separately
_PREFIX = struct.Struct("<8sIIQ")
_BLOCK = 1 << 24  # bytes that are checked and written at a time
_MAX_HEADER = 1 << 30  # bytes; a longer one is damage
_DIGITS_PER_NUMBER = 32  # bytes that a number may add to the header, which is sized with zeros
_WAY_OUT = "freeze the tables again, or copy the file again"


class FrozenFile(NamedTuple):
    """The content of a frozen file.

    Attributes:
        kind: kind of the tables, see `emblib.inference.frozen`.
        config: description of the tables, as JSON values.
        tensors: tensors by name, in the mapped memory of the file.
    """

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def write(
    path: str | Path, kind: str, config: dict[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file that replaces `path` when it is complete and synced to the disk.

    Args:
        path: path of the file.
        kind: kind of the tables.
        config: description of the tables, as JSON values.
        tensors: tensors by name, on any device.

    Raises:
        OSError: the file could not be written; `path` has its old content, or the new one if only
            the sync of its directory failed.
    """
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sections: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "begin": 0,
            "nbytes": tensor.nbytes,
            "crc32": _checksum(_bytes(tensor)),
        }
        for name, tensor in content.items()
    ]
    header: dict[str, Any] = {"kind": kind, "config": config, "sections": sections, "nbytes": 0}
    numbers = len(sections) + 1  # `begin` of each section, and `nbytes` of the file, are 0 so far
    end = _PREFIX.size + len(_json(header)) + _DIGITS_PER_NUMBER * numbers
    for section in sections:
        section["begin"] = begin = _align(end)
        end = begin + section["nbytes"]
    header["nbytes"] = end
    text = _json(header)
    with saving(path) as file:
        file.write(_PREFIX.pack(MAGIC, VERSION, zlib.crc32(text), len(text)))
        file.write(text)
        for section, tensor in zip(sections, content.values(), strict=True):
            file.write(bytes(section["begin"] - file.tell()))
            _write(file, _bytes(tensor))
        file.write(bytes(end - file.tell()))


def _json(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True).encode()


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU; the tensor must outlive the view."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _write(file: BinaryIO, content: memoryview) -> None:
    for begin in range(0, len(content), _BLOCK):
        file.write(content[begin : begin + _BLOCK])


def _checksum(content: memoryview) -> int:
    crc = 0
    for begin in range(0, len(content), _BLOCK):
        crc = zlib.crc32(content[begin : begin + _BLOCK], crc)
    return crc


def read(path: str | Path, *, verify: bool = True) -> FrozenFile:
    """Map a file. Processes share its pages; a write to a tensor changes the writer's copy alone.

    Args:
        path: path of the file, which may be replaced or removed while it is mapped, not changed.
        verify: whether to check all sections, which reads the whole file; else only the header and
            the size of the file are checked.

    Raises:
        ChecksumError: the file is truncated, or the header or a section that is checked is altered.
        OSError: the file cannot be read, or mapped.
        ValueError: the file does not begin as a frozen file, or its version is another one.
    """
    path = Path(path)
    with open(path, "rb") as file:
        header = _read_header(path, file)
        size = os.fstat(file.fileno()).st_size
        _check_size(path, header, size)
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    tensors = {}
    for section in header["sections"]:
        name, begin, nbytes = section["name"], section["begin"], section["nbytes"]
        content = memoryview(memory)[begin : begin + nbytes]
        if verify and _checksum(content) != section["crc32"]:
            raise ChecksumError(
                f"{path} is damaged: the checksum of its section {name!r} is wrong; {_WAY_OUT}"
            )
        dtype = getattr(torch, section["dtype"])
        tensor = torch.empty(0, dtype=dtype)
        if nbytes:
            count = nbytes // dtype.itemsize
            tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
        tensors[name] = tensor.view(section["shape"])
    memory.madvise(mmap.MADV_RANDOM)  # a lookup reads a page or two: do not read their neighbours
    return FrozenFile(header["kind"], header["config"], tensors)


def _read_header(path: Path, file: BinaryIO) -> dict[str, Any]:
    """Return the header of a frozen file; raises the errors of `read`."""
    prefix = file.read(_PREFIX.size)
    if not prefix.startswith(MAGIC):
        raise ValueError(f"{path} is no frozen file of emblib: it does not begin as one")
    if len(prefix) < _PREFIX.size:
        raise ChecksumError(f"{path} is truncated in its header; {_WAY_OUT}")
    _, version, crc, length = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version} of the format, this emblib reads version {VERSION}: "
            "open it with the emblib that wrote it, and freeze the tables again"
        )
    text = file.read(length) if length <= _MAX_HEADER else b""
    if len(text) < length:
        raise ChecksumError(f"{path} is truncated in its header; {_WAY_OUT}")
    if zlib.crc32(text) != crc:
        raise ChecksumError(f"{path} is damaged: the checksum of its header is wrong; {_WAY_OUT}")
    header: dict[str, Any] = json.loads(text)
    return header


def _check_size(path: Path, header: dict[str, Any], size: int) -> None:
    for section in header["sections"]:
        end = section["begin"] + section["nbytes"]
        if end > size:
            raise ChecksumError(
                f"{path} is truncated: its section {section['name']!r} ends at byte {end}, the "
                f"file at {size}; {_WAY_OUT}"
            )
    if size != header["nbytes"]:
        raise ChecksumError(
            f"{path} is damaged: it has {size} bytes instead of {header['nbytes']}; {_WAY_OUT}"
        )
