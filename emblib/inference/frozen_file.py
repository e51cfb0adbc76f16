"""Frozen files: named tensors, written once, checked, and mapped by any number of processes.

    magic (8 bytes) | version, CRC-32 and bytes of the header (uint32, uint32, uint64) | header
    sections, each from a multiple of 4096 bytes on

The header is a JSON object: `kind` and `config` describe the tensors, `sections` has `name`,
`dtype`, `shape`, first byte (`begin`), `nbytes` and `crc32` of each tensor, and `nbytes` is the
size of the file. A file is complete or absent: it is written under another name, synced, and
renamed. Nothing in it is unpickled.
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

MAGIC = b"\x93emblib\n"  # no text, so that a transfer in text mode damages it
VERSION = 1
ALIGNMENT = 4096  # a page, so that sections may be advised and shared separately
_PREFIX = struct.Struct("<8sIIQ")
_BLOCK_BYTES = 1 << 24  # bytes that are checked and written at a time
_MAX_HEADER_BYTES = 1 << 30  # bytes; a longer one is damage
_NUMBER_BYTES = 32  # bytes to reserve in the header per number that is not known yet
_REMEDY = "freeze the tables again, or copy the file again"


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
        OSError: the file could not be written, and `path` has its old content; or only the sync of
            its directory failed, and `path` has the new one.
    """
    tensors_on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sections: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "begin": 0,
            "nbytes": tensor.nbytes,
            "crc32": _checksum(_bytes_of(tensor)),
        }
        for name, tensor in tensors_on_cpu.items()
    ]
    header: dict[str, Any] = {"kind": kind, "config": config, "sections": sections, "nbytes": 0}
    num_unknown = len(sections) + 1  # `begin` of sections and `nbytes` of the file are 0 so far
    end = _PREFIX.size + len(_json(header)) + _NUMBER_BYTES * num_unknown
    for section in sections:
        section["begin"] = begin = _align(end)
        end = begin + section["nbytes"]
    header["nbytes"] = end
    header_bytes = _json(header)
    with saving(Path(path).expanduser()) as file:
        file.write(_PREFIX.pack(MAGIC, VERSION, zlib.crc32(header_bytes), len(header_bytes)))
        file.write(header_bytes)
        for section, tensor in zip(sections, tensors_on_cpu.values(), strict=True):
            file.write(bytes(section["begin"] - file.tell()))
            _write_blocks(file, _bytes_of(tensor))
        file.write(bytes(end - file.tell()))


def _json(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True).encode()


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU; the tensor must outlive the view."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _write_blocks(file: BinaryIO, content: memoryview) -> None:
    for begin in range(0, len(content), _BLOCK_BYTES):
        file.write(content[begin : begin + _BLOCK_BYTES])


def _checksum(content: memoryview) -> int:
    crc = 0
    for begin in range(0, len(content), _BLOCK_BYTES):
        crc = zlib.crc32(content[begin : begin + _BLOCK_BYTES], crc)
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
        ValueError: the file does not begin as a frozen file, e.g. because it is empty, or its
            version is another one.
    """
    path = Path(path).expanduser()
    with open(path, "rb") as file:
        header = _read_header(path, file)
        file_bytes = os.fstat(file.fileno()).st_size
        _check_size(path, header, file_bytes)
        memory = mmap.mmap(file.fileno(), file_bytes, access=mmap.ACCESS_COPY)
    tensors = {}
    for section in header["sections"]:
        name, begin, nbytes = section["name"], section["begin"], section["nbytes"]
        content = memoryview(memory)[begin : begin + nbytes]
        if verify and _checksum(content) != section["crc32"]:
            raise ChecksumError(
                f"{path} is damaged: the checksum of its section {name!r} is wrong; {_REMEDY}"
            )
        dtype = getattr(torch, section["dtype"])
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        if nbytes:
            num_elements = nbytes // dtype.itemsize
            tensor = torch.frombuffer(memory, dtype=dtype, count=num_elements, offset=begin)
        tensors[name] = tensor.view(section["shape"])
    memory.madvise(mmap.MADV_RANDOM)  # a lookup reads one or two pages: no reading ahead
    return FrozenFile(header["kind"], header["config"], tensors)


def _read_header(path: Path, file: BinaryIO) -> dict[str, Any]:
    """Return the header of a frozen file; raises the errors of `read`."""
    prefix = file.read(_PREFIX.size)
    if not prefix or not prefix.startswith(MAGIC[: len(prefix)]):
        raise ValueError(f"{path} is not a frozen file of emblib: it does not begin as one")
    if len(prefix) < _PREFIX.size:
        raise ChecksumError(f"{path} is truncated in its header; {_REMEDY}")
    _, version, crc, num_bytes = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version} of the format, this emblib reads version {VERSION}: "
            "open it with the emblib that wrote it, and freeze the tables again"
        )
    header_bytes = file.read(num_bytes) if num_bytes <= _MAX_HEADER_BYTES else b""
    if len(header_bytes) < num_bytes:
        raise ChecksumError(f"{path} is truncated in its header; {_REMEDY}")
    if zlib.crc32(header_bytes) != crc:
        raise ChecksumError(f"{path} is damaged: the checksum of its header is wrong; {_REMEDY}")
    header: dict[str, Any] = json.loads(header_bytes)
    return header


def _check_size(path: Path, header: dict[str, Any], file_bytes: int) -> None:
    """Raise ChecksumError unless a file has the size in its header."""
    for section in header["sections"]:
        end = section["begin"] + section["nbytes"]
        if end > file_bytes:
            raise ChecksumError(
                f"{path} is truncated: its section {section['name']!r} ends at byte {end}, the "
                f"file at {file_bytes}; {_REMEDY}"
            )
    if file_bytes != header["nbytes"]:
        raise ChecksumError(
            f"{path} is damaged: it has {file_bytes} bytes instead of {header['nbytes']}; {_REMEDY}"
        )
