"""Records of a change log: the rows that changed up to a step, as bytes with checksums.

A record is a prefix of 72 bytes, then its body. All numbers are little-endian.

| bytes | prefix |
| --- | --- |
| 4 | `EMBC` |
| 2, 2 | version of the format; kind (`RecordKind`) |
| 4, 4 | rank, and number of ranks |
| 8, 8 | generation, the number of runs so far; sequence, the number of records so far |
| 8, 8 | step, int64; seconds since 1970 on the trainer's clock, float64 |
| 8, 4 | bytes of the body; CRC-32 of the body |
| 8, 4 | zeros; CRC-32 of the prefix up to here |

The body is the length of a header (8 bytes), the header in JSON, and the tensors that it lists,
each from a multiple of 8 bytes on. The header is {"tables": [...], "run": ...}: one object per
change, and the id of the run, which older records lack. The "name" of a change is the table. Its
"numbers" are `first_column`, `dim`, `tick` and `hash_key` of the `TableChange`. Its "tensors" list
name, dtype and shape of each tensor. Nothing is pickled.
"""

import json
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAGIC = b"EMBC"
VERSION = 1
_FIELDS = struct.Struct("<4sHHIIQQqdQI8x")  # see `_Prefix`
_CRC = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
PREFIX_BYTES = _FIELDS.size + _CRC.size
_ALIGNMENT = 8
_STATE_PREFIX, _FALLBACK_PREFIX = "state.", "fallback."  # prefixes of names of tensors in a header
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.int64,
        torch.int32,
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )
}


class LogError(ValueError):
    """A change log is damaged, incomplete, or of other tables.

    Example:
        >>> issubclass(emblib.online.LogError, ValueError)
        True
    """


class RecordKind(IntEnum):
    """Content of a record: changes, or all rows."""

    DELTA = 0
    SNAPSHOT = 1  # all rows, of tables that may have been replaced: every follower loads it
    COMPACTION = 2  # all rows after the delta of the same step; followers with the delta skip it


class _Prefix(NamedTuple):
    """The fields of a prefix, in their order, without its checksum."""

    magic: bytes
    version: int
    kind: int
    rank: int
    num_ranks: int
    generation: int
    sequence: int
    step: int
    time: float
    body_bytes: int
    body_crc: int

    @classmethod
    def from_bytes(cls, data: bytes) -> "_Prefix":
        """Return the prefix that data begins with; it is not checked."""
        return cls(*_FIELDS.unpack(data[: _FIELDS.size]))


class TableChange(NamedTuple):
    """The changed rows of one table or shard; tensors are on the CPU, of a dtype in `_DTYPES`.

    Attributes:
        keys: int64 `[n]`, distinct rows or keys.
        weight: rows `[n, columns]`.
        removed: int64 `[m]`, keys that are not in the table any more.
        states: optimizer states of these rows, by name.
        first_column: column of the table at which the columns of `weight` begin.
        dim: columns of the whole table.
        stamps: int64 `[n]`, tick of the last use of a key; None for tables by row number.
        scores: int64 `[n]`, eviction scores; None for tables without.
        tick: tick of a dynamic table; 0 for others.
        hash_key: key of the hash of a dynamic table; None for others, or if shards differ.
        hyperparams: hyperparameters of the optimizer, float64; None without states.
        fallback: all fallback rows of the shard, by name, see `emblib.dynamic.saving.fallback`;
            empty without.
    """

    keys: Tensor
    weight: Tensor
    removed: Tensor
    states: dict[str, Tensor]
    first_column: int
    dim: int
    stamps: Tensor | None = None
    scores: Tensor | None = None
    tick: int = 0
    hash_key: int | None = None
    hyperparams: Tensor | None = None
    fallback: Mapping[str, Tensor] = {}

    @property
    def is_keyed(self) -> bool:
        """Return whether the table is dynamic."""
        return self.stamps is not None

    def rows(self) -> dict[str, Tensor]:
        """Return weights and states by name."""
        return {"weight": self.weight, **self.states}


class Record(NamedTuple):
    """The changes of the tables of one rank up to a step.

    Attributes:
        kind: whole tables, or changes since the previous record.
        rank: rank of the trainer that wrote it.
        num_ranks: number of ranks of the trainer.
        generation: number of runs so far, with the one of this record.
        sequence: number of records so far, with this one.
        step: training step up to which the tables are recorded.
        time: seconds since 1970 on the trainer's clock.
        tables: changes by name of the table, one per shard that the rank has.
        run: id of the run: of the records from one snapshot of a log to the next; "" in records of
            earlier versions.
    """

    kind: RecordKind
    rank: int
    num_ranks: int
    generation: int
    sequence: int
    step: int
    time: float
    tables: dict[str, list[TableChange]]
    run: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """Return generation and step, which order records: steps may go back at a snapshot.

        A delta and the compaction that follows it have the same key.
        """
        return self.generation, self.step

    @property
    def is_whole(self) -> bool:
        """Return whether the record has all rows."""
        return self.kind is not RecordKind.DELTA


_OPTIONAL = ("stamps", "scores", "hyperparams")  # tensors of `TableChange` that may be None


def encode(record: Record) -> bytes:
    """Return the bytes of a record.

    Raises:
        RuntimeError: the machine is big-endian.
    """
    if sys.byteorder != "little":
        raise RuntimeError("change logs are little-endian: write them on a little-endian machine")
    tables, tensors = [], list[Tensor]()
    for table_name, changes in record.tables.items():
        for change in changes:
            tensors_by_name = _tensors_of(change)
            tensor_entries = [
                [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
                for name, tensor in tensors_by_name.items()
            ]
            numbers = [change.first_column, change.dim, change.tick, change.hash_key]
            tables.append({"name": table_name, "numbers": numbers, "tensors": tensor_entries})
            tensors.extend(tensors_by_name.values())
    run = {"run": record.run} if record.run else {}
    header_bytes = json.dumps({"tables": tables, **run}).encode()
    begin = PREFIX_BYTES + _LENGTH.size + _aligned(len(header_bytes))
    data = bytearray(begin + sum(_aligned(tensor.nbytes) for tensor in tensors))
    _LENGTH.pack_into(data, PREFIX_BYTES, len(header_bytes))
    offset = PREFIX_BYTES + _LENGTH.size
    data[offset : offset + len(header_bytes)] = header_bytes
    offset = begin
    for tensor in tensors:
        if tensor.numel():
            target = torch.frombuffer(data, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            target.copy_(tensor.detach().view(-1))
        offset += _aligned(tensor.nbytes)
    body = memoryview(data)[PREFIX_BYTES:]
    prefix = _Prefix(
        magic=MAGIC,
        version=VERSION,
        kind=record.kind,
        rank=record.rank,
        num_ranks=record.num_ranks,
        generation=record.generation,
        sequence=record.sequence,
        step=record.step,
        time=record.time,
        body_bytes=len(body),
        body_crc=zlib.crc32(body),
    )
    _FIELDS.pack_into(data, 0, *prefix)
    _CRC.pack_into(data, _FIELDS.size, zlib.crc32(data[: _FIELDS.size]))
    return bytes(data)


def _tensors_of(change: TableChange) -> dict[str, Tensor]:
    """Return the tensors of a change by their names in a header."""
    tensors = {"keys": change.keys, "weight": change.weight, "removed": change.removed}
    tensors |= {_STATE_PREFIX + name: rows for name, rows in change.states.items()}
    tensors |= {name: tensor for name in _OPTIONAL if (tensor := getattr(change, name)) is not None}
    return tensors | {_FALLBACK_PREFIX + name: rows for name, rows in change.fallback.items()}


def _aligned(nbytes: int) -> int:
    """Return a number of bytes rounded up to a multiple of 8."""
    return nbytes + -nbytes % _ALIGNMENT


def body_bytes(prefix: bytes, location: str) -> int:
    """Return the bytes of the body behind a prefix of `PREFIX_BYTES`.

    Raises:
        LogError: it is not a prefix of a record, or of another version; the message begins with
            `location`.
    """
    fields = prefix[: _FIELDS.size]
    (crc,) = _CRC.unpack(prefix[_FIELDS.size : PREFIX_BYTES])
    if zlib.crc32(fields) != crc or not fields.startswith(MAGIC):
        raise LogError(f"{location} is damaged: no record begins here; {_REMEDY}")
    version = _Prefix.from_bytes(fields).version
    if version != VERSION:
        raise LogError(
            f"{location} has version {version} of the format, this emblib reads version {VERSION}: "
            "update the older of trainer and follower"
        )
    return _Prefix.from_bytes(fields).body_bytes


_REMEDY = "start the trainer's log in another place, or copy the log again from where it is whole"


def is_complete(data: bytes) -> bool:
    """Return whether the body behind a valid prefix is the one that was written.

    `data` must begin with a prefix of `PREFIX_BYTES`; the body may be cut off.
    """
    prefix, body = _Prefix.from_bytes(data), memoryview(data)[PREFIX_BYTES:]
    return len(body) == prefix.body_bytes and zlib.crc32(body) == prefix.body_crc


def decode(data: bytes, location: str) -> Record:
    """Return the record in `data`; its tensors share one copy of `data`.

    Raises:
        LogError: it is cut off, damaged, or of another version; the message begins with `location`.
    """
    if len(data) < PREFIX_BYTES:
        raise LogError(f"{location} is truncated; {_REMEDY}")
    body_bytes(data[:PREFIX_BYTES], location)
    if not is_complete(data):
        raise LogError(f"{location} is damaged: the checksum of a record is wrong; {_REMEDY}")
    prefix = _Prefix.from_bytes(data)
    tables: dict[str, list[TableChange]] = {}
    try:
        body = memoryview(bytearray(data))[PREFIX_BYTES:]
        header, tensors_offset = _read_header(body)
        for name, change in _read_tables(body, header, tensors_offset):
            tables.setdefault(name, []).append(change)
        return Record(
            kind=RecordKind(prefix.kind),
            rank=prefix.rank,
            num_ranks=prefix.num_ranks,
            generation=prefix.generation,
            sequence=prefix.sequence,
            step=prefix.step,
            time=prefix.time,
            tables=tables,
            run=str(header.get("run", "")),
        )
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise LogError(f"{location} is malformed ({error}); {_REMEDY}") from error


def _read_header(body: memoryview) -> tuple[dict[str, Any], int]:
    """Return the header in the body of a record, and the first byte of the tensors behind it."""
    (header_bytes,) = _LENGTH.unpack(body[: _LENGTH.size])
    header: dict[str, Any] = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + header_bytes]))
    return header, _LENGTH.size + _aligned(header_bytes)


def _read_tables(
    body: memoryview, header: dict[str, Any], offset: int
) -> Iterator[tuple[str, TableChange]]:
    """Yield the changes of each table in the body of a record, as views of it from `offset` on."""
    for table in header["tables"]:
        tensors: dict[str, Tensor] = {}
        for name, dtype_name, shape in table["tensors"]:
            dtype = _DTYPES[dtype_name]
            count = torch.Size(shape).numel()
            flat = (
                torch.frombuffer(body, dtype=dtype, count=count, offset=offset) if count else None
            )
            tensors[name] = (
                torch.empty(shape, dtype=dtype, device="cpu") if flat is None else flat.view(shape)
            )
            offset += _aligned(count * dtype.itemsize)
        first_column, dim, tick, hash_key = table["numbers"]
        yield (
            table["name"],
            TableChange(
                tensors["keys"],
                tensors["weight"],
                tensors["removed"],
                _with_prefix(tensors, _STATE_PREFIX),
                first_column,
                dim,
                tick=tick,
                hash_key=hash_key,
                **{name: tensors[name] for name in _OPTIONAL if name in tensors},
                fallback=_with_prefix(tensors, _FALLBACK_PREFIX),
            ),
        )


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
