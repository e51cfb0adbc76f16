"""Dumps of dynamic tables in a directory: whole tables, or their changes since a tick."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.dynamic import keys
from emblib.dynamic.hash_index import MAX_TICK
from emblib.dynamic.saving.dumps import (
    DumpError,
    DumpProgress,
    Part,
    PartReader,
    Report,
    Writer,
    entry_of,
    read_parts,
)
from emblib.dynamic.saving.entries import Entries, Rows, combine, concatenate

_BLOCK_BYTES = 1 << 24  # bytes of rows per write; not measured


class DumpedTable(NamedTuple):
    """A table in a dump.

    Attributes:
        name: name of the table.
        order: order of eviction: none, lru, lfu, lru_lfu or assigned.
        entries: the entries; in a dump of changes those used or written since.
        removed: int64 `[n]`, keys that were removed since; empty in a dump of whole tables.
    """

    name: str
    order: str
    entries: Entries
    removed: Tensor


class Dump(NamedTuple):
    """The content of a dump for one rank.

    Attributes:
        tables: the tables by name.
        clock: largest tick of the parts.
        since: first tick of a dump of changes; None for whole tables.
        numbers: hyperparameters of the optimizer, of the first part.
        other_tensors: other tensors that the writer saved, by name, joined over the parts for the
            rank.
    """

    tables: dict[str, DumpedTable]
    clock: int
    since: int | None
    numbers: list[float]
    other_tensors: dict[str, Tensor]


class Header(NamedTuple):
    """The metadata of a part, see `Dump`.

    `identity` is a text that all parts of one dump share; they share `since`, too.
    """

    identity: str
    clock: int
    since: int | None = None
    numbers: Sequence[float] = ()


def write(
    directory: str | Path,
    tables: Sequence[DumpedTable],
    header: Header,
    part: Part = Part(),  # noqa: B008
    report: Report | None = None,
    other_tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a part; its rows are read and written 16 MiB at a time.

    Args:
        directory: directory of the dump.
        tables: tables, with the entries of this part.
        header: metadata of the dump.
        part: rank and number of parts.
        report: function that is called as rows are written; None for none.
        other_tensors: other tensors to save, by name; `entries.combine` joins them for a reader.

    Raises:
        ValueError, BlockingIOError, OSError: see `dumps.Writer`.
        Exception: `report` raised it; an older dump stays.
    """
    with Writer(directory, part) as writer:
        table_entries = [_write_table(writer, table, report) for table in tables]
        arrays = {
            key: _write_array(writer, tensor) for key, tensor in (other_tensors or {}).items()
        }
        header_entry = {**header._asdict(), "numbers": list(header.numbers)}
        writer.commit({**header_entry, "tables": table_entries, "others": arrays})


def _write_table(writer: Writer, table: DumpedTable, report: Report | None) -> dict[str, Any]:
    """Write the arrays of a table, sorted by route; return its entry of the manifest."""
    entries = table.entries
    order = keys.canonical_order(entries.keys).cpu()
    removed = table.removed.cpu()
    removed = removed[keys.canonical_order(removed)]
    columns = {"keys": entries.keys, "stamps": entries.stamps, "scores": entries.scores}
    arrays = {
        name: _write_array(writer, column.cpu()[order])
        for name, column in columns.items()
        if column is not None
    }
    rows = {}
    for name, column_rows in entries.rows.items():
        progress = None if report is None else (table.name, report)
        rows[name] = _write_rows(writer, column_rows, order, progress)
    return {
        "name": table.name,
        "order": table.order,
        "arrays": arrays,
        "rows": rows,
        "removed": _write_array(writer, removed),
    }


def _write_array(writer: Writer, tensor: Tensor) -> dict[str, Any]:
    """Write a whole tensor; return its entry of the manifest."""
    with writer.array(tensor.dtype, tuple(tensor.shape)) as array:
        array.append(tensor)
    return array.description


def _write_rows(
    writer: Writer, rows: Rows, order: Tensor, progress: tuple[str, Report] | None
) -> dict[str, Any]:
    """Write rows in the given order, in blocks; return their entry of the manifest.

    `progress` is the name of the table and the function that gets the number of written rows.
    """
    num_written = 0
    with writer.array(rows.dtype, (order.numel(), *rows.shape[1:])) as array:
        for index in order.split(rows_at_a_time(rows)):
            array.append(rows[index])
            num_written += index.numel()
            if progress is not None:
                progress[1](DumpProgress(progress[0], num_written, order.numel()))
    return array.description


def rows_at_a_time(rows: Rows) -> int:
    """Return how many of these rows fit in 16 MiB, at least 1."""
    row_bytes = rows.dtype.itemsize
    for size in rows.shape[1:]:
        row_bytes *= size
    return max(_BLOCK_BYTES // max(row_bytes, 1), 1)


def read(directory: str | Path, rank: int = 0, world_size: int = 1) -> Dump:
    """Return a rank's entries of a dump with any number of parts.

    Rows are mapped: they are read and copied when they are indexed. All checksums are compared
    first.

    Raises:
        DumpError: the dump is incomplete or damaged.
    """
    parts = read_parts(directory)
    for part in parts:
        _check_content(part)
    for part in parts:
        part.verify()
    names = list(
        dict.fromkeys(
            table_entry["name"] for part in parts for table_entry in part.content["tables"]
        )
    )
    tables = {name: _read_table(parts, name, rank, world_size) for name in names}
    content = parts[0].content
    clock = max(part.content["clock"] for part in parts)
    other_tensors = [
        {key: part.array(value) for key, value in part.content["others"].items()} for part in parts
    ]
    joined_tensors = combine(other_tensors, rank, world_size)
    return Dump(tables, clock, content["since"], content["numbers"], joined_tensors)


def read_header(directory: str | Path) -> Header:
    """Return the header of a dump without reading its tables; `clock` is the largest of its parts.

    Raises:
        DumpError: there is no complete dump of tables.
    """
    parts = read_parts(directory)
    for part in parts:
        _check_content(part)
    content = parts[0].content
    clock = max(part.content["clock"] for part in parts)
    return Header(content["identity"], clock, content["since"], content["numbers"])


def _check_content(part: PartReader) -> None:
    """Raise DumpError unless a manifest has the form that `write` produces.

    Which arrays the entries of a table need is checked when they are read.
    """
    path, content = part.path, part.content
    if "tree" in content:
        raise DumpError(f"{path.parent} holds a snapshot, not a dump of entries")
    entry_of(path, content, "identity", str)
    clock = entry_of(path, content, "clock", int)
    since = entry_of(path, content, "since", int, type(None))
    numbers = entry_of(path, content, "numbers", list)
    if not 0 <= clock < MAX_TICK or not 0 <= (since or 0) < MAX_TICK:
        raise DumpError(
            f"{path} is malformed: 'clock' and 'since' are ticks in [0, 2^62), are "
            f"{clock} and {since}"
        )
    if not all(type(number) in (int, float) for number in numbers):
        raise DumpError(f"{path} is malformed: 'numbers' must be a list of numbers")
    for value in entry_of(path, content, "others", dict).values():
        part.array(value)
    for table in entry_of(path, content, "tables", list):
        name = entry_of(path, table, "name", str)
        entry_of(path, table, "order", str)
        arrays = entry_of(path, table, "arrays", dict)
        columns = [entry_of(path, arrays, column, dict) for column in ("keys", "stamps")]
        columns += [entry_of(path, table, "removed", dict), *arrays.values()]
        for array in map(part.array, columns):
            if array.dtype != torch.int64 or array.dim() != 1:
                raise DumpError(
                    f"{path} is malformed: 'arrays' and 'removed' of table {name!r} must be int64, "
                    f"one number per key, one is {array.dtype} {list(array.shape)}"
                )
        for key, value in entry_of(path, table, "rows", dict).items():
            if not part.array(value).dim():
                raise DumpError(f"{path} is malformed: {key!r} of table {name!r} has no rows")


def _read_table(parts: Sequence[PartReader], name: str, rank: int, world_size: int) -> DumpedTable:
    """Return the entries of a table that a rank owns, from all parts of a dump."""
    owned_entries, removed_blocks, order = [], [], "none"
    for part in parts:
        for table in part.content["tables"]:
            if table["name"] != name:
                continue
            arrays = {key: part.array(value) for key, value in table["arrays"].items()}
            rows = {key: part.array(value) for key, value in table["rows"].items()}
            columns = (arrays["keys"], arrays["stamps"], arrays.get("scores"))
            try:
                part_entries = Entries(*columns, rows)
            except (ValueError, TypeError) as error:
                raise DumpError(f"{part.path} is malformed: table {name!r}: {error}") from error
            owned_entries.append(part_entries.owned(rank, world_size))
            removed_keys = part.array(table["removed"])
            removed_blocks.append(removed_keys[keys.owner(removed_keys, world_size) == rank])
            order = table["order"]
    try:
        entries = concatenate(owned_entries)
    except ValueError as error:
        raise DumpError(f"{parts[0].path.parent} is malformed: table {name!r}: {error}") from error
    return DumpedTable(name, order, entries, torch.cat(removed_blocks))
