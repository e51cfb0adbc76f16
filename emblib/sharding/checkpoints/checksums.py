"""Checksums of the files of a checkpoint, stored as a footer of its metadata file.

The file `.metadata` is a pickle of torch.distributed.checkpoint, which ignores bytes after the
pickle. The footer there has the size of every data file, a CRC-32 per block of each, and a checksum
of the metadata file itself. So one rename commits the metadata with all checksums. Data files are
compared block by block as they are read.
"""

import io
import json
import struct
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from emblib.sharding.checkpoints.state_trees import CheckpointError

VERSION = 1
BLOCK_BYTES = 1 << 22
# Number of blocks in memory. Torch reads the end of an item, then its beginning, so an item that
# spans two blocks needs both.
_RECENT_BLOCKS = 4
_FORMAT = "emblib.checkpoint"
# The last byte differs by two bits from the last byte of a pickle. So one flipped bit cannot turn a
# footer into the end of metadata without a footer.
_MAGIC = b"emblib \n"
_TAIL = struct.Struct("<QI8s")  # bytes of the JSON text, CRC-32 of all before it, magic
_END_OF_PICKLE = b"."
REMEDY = "load another checkpoint, e.g. an older one"


@dataclass
class FileSums:
    """Size of one file, and a CRC-32 per block of `BLOCK_BYTES`; the last block may be shorter."""

    nbytes: int = 0
    crc32: list[int] = field(default_factory=list)


def add_footer(pickled: bytes, files: dict[str, FileSums]) -> bytes:
    """Return the content of `.metadata`: the pickle and the footer with the sums of `files`."""
    content = {
        "format": _FORMAT,
        "version": VERSION,
        "block_bytes": BLOCK_BYTES,
        "files": {name: asdict(sums) for name, sums in files.items()},
    }
    text = json.dumps(content).encode()
    metadata = pickled + text + struct.pack("<Q", len(text))
    return metadata + struct.pack("<I8s", zlib.crc32(metadata), _MAGIC)


def split_footer(data: bytes, path: Path) -> tuple[bytes, dict[str, FileSums] | None]:
    """Return the pickle and the sums of the files, which are None if `data` has no footer.

    `path` is the file of `data`, for messages.

    Raises:
        CheckpointError: the file is damaged, or has the footer of another version of emblib.
    """
    if data.endswith(_END_OF_PICKLE):
        return data, None
    if not data.endswith(_MAGIC) or len(data) < _TAIL.size:
        raise CheckpointError(f"{path} is damaged: its end is missing; {REMEDY}")
    length, crc, _ = _TAIL.unpack(data[-_TAIL.size :])
    # The checksum covers the pickle, the text, and its length: the first 8 bytes of the tail.
    if zlib.crc32(memoryview(data)[: 8 - _TAIL.size]) != crc:
        raise CheckpointError(f"{path} is damaged: its checksum is wrong; {REMEDY}")
    start = len(data) - _TAIL.size - length
    try:
        if start < 0:
            raise ValueError(f"it has {length} bytes")
        return data[:start], _parse_files(json.loads(data[start : -_TAIL.size]), path)
    except CheckpointError:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: what follows its metadata cannot be read "
            f"({type(error).__name__}: {error}); {REMEDY}"
        ) from error


def _parse_files(content: dict[str, Any], path: Path) -> dict[str, FileSums]:
    """Return the sums of the files in the parsed JSON of a footer.

    Raises CheckpointError for another format or version; AttributeError, KeyError, TypeError or
    ValueError for JSON that is not a footer.
    """
    if (content["format"], content["version"]) != (_FORMAT, VERSION):
        raise CheckpointError(
            f"{path} is of {content['format']} version {content['version']}, this emblib reads "
            f"version {VERSION}: load it with the emblib that saved it"
        )
    if content["block_bytes"] != BLOCK_BYTES:
        raise CheckpointError(
            f"{path} has checksums of blocks of {content['block_bytes']} bytes, this emblib reads "
            f"{BLOCK_BYTES}: load it with the emblib that saved it"
        )
    files = {name: FileSums(**sums) for name, sums in content["files"].items()}
    for name, sums in files.items():
        numbers = [sums.nbytes, *sums.crc32]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"sums of {name} are not numbers")
        if len(sums.crc32) != -(-sums.nbytes // BLOCK_BYTES):
            raise ValueError(f"{name} has {sums.nbytes} bytes and {len(sums.crc32)} checksums")
    return files


class SummingStream:
    """An output stream that computes the checksums of its content while it is written.

    The caller must only append: after a seek or a truncation the checksums are wrong. All other
    attributes are those of `stream`, whose `write` must write all bytes that it gets.

    Attributes:
        sums: size and checksums of the bytes so far.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.sums = stream, FileSums()

    def write(self, data: Any) -> int:
        """Write all of `data` and add it to the sums; return its number of bytes."""
        remaining = memoryview(data).cast("B")
        num_bytes = len(remaining)
        self._stream.write(remaining)
        sums = self.sums
        while remaining:
            bytes_left_in_block = BLOCK_BYTES - sums.nbytes % BLOCK_BYTES
            chunk, remaining = remaining[:bytes_left_in_block], remaining[bytes_left_in_block:]
            if bytes_left_in_block == BLOCK_BYTES:
                sums.crc32.append(0)
            sums.crc32[-1] = zlib.crc32(chunk, sums.crc32[-1])
            sums.nbytes += len(chunk)
        return num_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class CheckedStream(io.RawIOBase):
    """An input file whose blocks are compared with their checksums before they are returned.

    Args:
        file: the file, open for reading; the caller closes it.
        path: path of the file, for messages.
        sums: size and checksums that were saved.

    Raises:
        CheckpointError: the file has another size.
    """

    def __init__(self, file: BinaryIO, path: Path, sums: FileSums) -> None:
        super().__init__()
        self._file, self._path, self._sums = file, path, sums
        self._position = 0
        self._blocks: dict[int, memoryview] = {}  # by number, the most recently used block last
        size = file.seek(0, io.SEEK_END)
        if size != sums.nbytes:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes, {sums.nbytes} were saved; {REMEDY}"
            )

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, which must not be negative (not checked), and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._sums.nbytes}[
            whence
        ]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`, or as much of it as the file has left; return the number of bytes.

        Raises:
            CheckpointError: a block has another checksum than when it was saved.
        """
        target = memoryview(buffer).cast("B")
        num_read = 0
        while num_read < len(target) and self._position < self._sums.nbytes:
            number, offset = divmod(self._position, BLOCK_BYTES)
            chunk = self._verified_block(number)[offset : offset + len(target) - num_read]
            target[num_read : num_read + len(chunk)] = chunk
            num_read += len(chunk)
            self._position += len(chunk)
        return num_read

    def _verified_block(self, number: int) -> memoryview:
        """Return a block; read and compare it unless it is cached."""
        block = self._blocks.pop(number, None)
        if block is None:
            start = number * BLOCK_BYTES
            self._file.seek(start)
            block = memoryview(self._file.read(BLOCK_BYTES))
            if zlib.crc32(block) != self._sums.crc32[number]:
                raise CheckpointError(
                    f"{self._path} is damaged: bytes {start} to {start + len(block)} have another "
                    f"checksum than when they were saved; {REMEDY}"
                )
            if len(self._blocks) == _RECENT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[number] = block
        return block
