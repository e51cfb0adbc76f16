"""Read and write the files of a dynamic table of NVIDIA's DynamicEmb.

A table `t` of a directory is, for every rank of W, raw little-endian numbers without a header:

- `t_emb_keys.rank_<r>.world_size_<W>`: int64 `[N]`
- `t_emb_values...`: float32 `[N, D]`, whatever the dtype of the table
- `t_emb_scores...`: int64 `[N]`, or `[N, 2]` for the compound strategy. With LRU alone a timestamp
  is saved as an age, the time since the last use; all other scores are saved unchanged
- `t_emb_opt_values...` (earlier `t_opt_values...`): float32 `[N, S]`, the optimizer states of a row
  one after the other, first those as long as a row
- `t_counter_keys...`, `t_counter_frequencies...`: int64, keys that were not admitted, their counts
- `t_opt_args.json`: numbers of the optimizer, `evict_strategy`, `dist_type`, `step_score`

The format cannot show that a file was truncated. So a reader compares the sizes of the files, and
raises if some ranks have a file that others lack. A writer first stages the files of all tables and
ranks in `.t.new`. Then it moves the old files of all tables to `.t.old`, and the new ones into
place. Keys are moved out first and in last, because neither emblib nor DynamicEmb reads a table
without keys. So a killed process leaves each table old, new, or without the keys of some ranks, so
that it cannot be read.

emblib writes one more entry to `t_opt_args.json`, `emblib_dump`: an id of the call that wrote the
table, and the names of all tables that the call wrote. Loading compares these entries, see
`check_one_dump`; DynamicEmb ignores them.
"""

import contextlib
import glob
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.dynamic.saving.dump_tables import rows_at_a_time
from emblib.dynamic.saving.dumps import DumpError, Part, entry_of
from emblib.dynamic.saving.entries import LAST_USES, WEIGHT, Entries, Rows
from emblib.reference.random import finalise
from emblib.tables.durable_files import flush_directory, replacing

_STRATEGIES = {
    "lru": "EvictStrategy.KLru",
    "lfu": "EvictStrategy.KLfu",
    "assigned": "EvictStrategy.KCustomized",
    "none": "EvictStrategy.KCustomized",
}
_NAME = "{table}_{item}.rank_{rank}.world_size_{world_size}"
_PADDED_STATE_WIDTH = 4  # float32 numbers that DynamicEmb uses for a state of one number per row
_NUMBERS_PER_WRITE = 1 << 20  # bounds the memory of a write; not measured


@dataclass(frozen=True)
class DynamicEmbTable:
    """A table in DynamicEmb's files.

    Args:
        entries: entries in emblib's form. States are written in their order: states as long as a
            row must come before those of one number per row (not checked).
        arguments: content of `t_opt_args.json`.
        counts: keys and counts of an admission counter, int64 `[n]` each; None without one.
    """

    entries: Entries
    arguments: Mapping[str, Any] = field(default_factory=dict)
    counts: tuple[Tensor, Tensor] | None = None

    def owned(self, is_owned: Callable[[Tensor], Tensor]) -> "DynamicEmbTable":
        """Return the entries and counts of a rank; `is_owned` maps keys to bool, one per key."""
        owned_rows = is_owned(self.entries.keys).nonzero().view(-1)
        counts = self.counts
        if counts is not None:
            is_counted_owned = is_owned(counts[0])
            counts = (counts[0][is_counted_owned], counts[1][is_counted_owned])
        return DynamicEmbTable(self.entries.view(owned_rows), self.arguments, counts)


@dataclass(frozen=True)
class Layout:
    """Layout of the files of a table of DynamicEmb, besides its dims.

    Args:
        order: order of eviction: none, lru, lfu, lru_lfu or assigned.
        has_uses_first: whether the first of two columns of scores has the uses, and the second the
            times, as with the strategy (LFU, TIMESTAMP); False is the reverse.
    """

    order: str
    has_uses_first: bool = False


def write(
    directory: str | Path, name: str, layout: Layout, table: DynamicEmbTable, tick: int
) -> None:
    """Write a table as rank 0 of 1, which any number of ranks can load.

    If the number of ranks differs, DynamicEmb's loader keeps the keys with `key % W == rank`, as
    its "roundrobin" router does for keys >= 0.

    Args:
        directory: directory of the collection, created with its parents if missing.
        name: name of the table; existing files are replaced once all new ones are written.
        layout: layout of the table.
        table: table to write. Its `arguments` get `dist_type` and `evict_strategy` if they lack
            them: "roundrobin", and the strategy of the order, none for lru_lfu. DynamicEmb loads
            optimizer states only if they have `lr` and the optimizer's other arguments.
        tick: the current tick, from which ages count.

    Raises:
        OSError: the files cannot be written or moved; see `commit` for which are there then.
    """
    discard(directory, name)
    try:
        stage(directory, name, layout, table, tick)
        commit([(directory, name)], 1)
    except BaseException:
        discard(directory, name)
        raise


def stage(
    directory: str | Path,
    name: str,
    layout: Layout,
    table: DynamicEmbTable,
    tick: int,
    *,
    part: Part = Part(),  # noqa: B008
) -> None:
    """Stage the files of a rank for `commit`; see `write`.

    `discard` must have deleted the files that an earlier call has staged, once for all ranks.
    """
    entries, order = table.entries, layout.order
    staging_directory = _staging_directory(directory, name)
    staging_directory.mkdir(parents=True, exist_ok=True)

    def path(item: str) -> Path:
        return staging_directory / file_name(name, item, *part)

    _write_numbers(path("emb_keys"), entries.keys)
    _write_rows(path("emb_values"), [entries.rows[WEIGHT]], len(entries))
    states = [rows for key, rows in entries.rows.items() if key not in (WEIGHT, LAST_USES)]
    if states:
        _write_rows(path("emb_opt_values"), states, len(entries))
    _write_numbers(path("emb_scores"), _score_columns(entries, layout, tick))
    if table.counts is not None:
        _write_numbers(path("counter_keys"), table.counts[0])
        _write_numbers(path("counter_frequencies"), table.counts[1])
    if part.rank == 0:
        arguments = {"dist_type": "roundrobin", **table.arguments}
        if order in _STRATEGIES:
            arguments.setdefault("evict_strategy", _STRATEGIES[order])
        with replacing(staging_directory / f"{name}_opt_args.json") as file:
            file.write(json.dumps(arguments, indent=4).encode())
    flush_directory(staging_directory)


def commit(tables: Sequence[tuple[str | Path, str]], world_size: int) -> None:
    """Replace the files of tables by the files that all ranks staged; one rank calls this.

    If an exception ends the call before the new files are in place and synced, the old ones are
    restored, and staged files may be lost: call `discard`, and stage again before the next
    `commit`. Later exceptions leave the new files in place. The old files of an earlier, killed
    call, in `.t.old`, are removed first.

    Args:
        tables: directory and name of each.
        world_size: the number of ranks that staged files.

    Raises:
        DumpError: the keys of a rank are missing; the old files stay.
        OSError: a file could not be moved or synced; see above which are in place then, as far as
            they can be restored.
    """
    moves = [_FileMove.from_staged(Path(folder).expanduser(), name) for folder, name in tables]
    for move in moves:
        for rank in range(world_size):
            if file_name(move.name, "emb_keys", rank, world_size) not in move.new_files:
                raise DumpError(
                    f"{move.staging_directory} has no files of rank {rank} of {world_size}: all "
                    "ranks must write to one directory, on a file system that all of them see"
                )
    for move in moves:
        shutil.rmtree(move.old_directory, ignore_errors=True)
        move.old_directory.mkdir()
    try:
        for step in (_FileMove.take_old, _FileMove.put_values, _FileMove.put_keys):
            for move in moves:
                step(move)
            for move in moves:
                flush_directory(move.directory)
    except BaseException:
        for undo in (_FileMove.remove_new, _FileMove.put_back_old):
            for move in moves:
                undo(move)
        raise
    for move in moves:
        shutil.rmtree(move.old_directory, ignore_errors=True)
        shutil.rmtree(move.staging_directory, ignore_errors=True)
        flush_directory(move.directory)


@dataclass(frozen=True)
class _FileMove:
    """Files of one table: `commit` replaces `old_files` by the staged `new_files`."""

    directory: Path
    name: str
    staging_directory: Path
    old_directory: Path
    old_files: Sequence[str]
    new_files: Sequence[str]

    @classmethod
    def from_staged(cls, directory: Path, name: str) -> "_FileMove":
        """Return the move of the staged files of a table into its directory; nothing is moved."""
        staging_directory = _staging_directory(directory, name)
        old_files, new_files = (
            _files_of(folder, name) if folder.is_dir() else ()
            for folder in (directory, staging_directory)
        )
        return cls(
            directory, name, staging_directory, directory / f".{name}.old", old_files, new_files
        )

    def take_old(self) -> None:
        """Move the old files aside."""
        for file in self.old_files:
            os.rename(self.directory / file, self.old_directory / file)

    def put_values(self) -> None:
        """Move the staged files into place, except those of keys."""
        self._move_new_files(file for file in self.new_files if not _is_key_file(file))

    def put_keys(self) -> None:
        """Move the staged files of keys into place, which makes the table readable."""
        self._move_new_files(file for file in self.new_files if _is_key_file(file))

    def _move_new_files(self, files: Iterator[str]) -> None:
        for file in files:
            os.rename(self.staging_directory / file, self.directory / file)

    def remove_new(self) -> None:
        """Delete the new files that were moved into place, but no old file of the same name.

        Errors are ignored, so that as many old files as possible are restored.
        """
        for file in self.new_files:
            if file not in self.old_files or (self.old_directory / file).exists():
                with contextlib.suppress(OSError):
                    (self.directory / file).unlink(missing_ok=True)

    def put_back_old(self) -> None:
        """Move the old files back; errors are ignored, so that as many as possible return."""
        for file in reversed(self.old_files):
            with contextlib.suppress(OSError):
                if (self.old_directory / file).exists():
                    os.rename(self.old_directory / file, self.directory / file)
        with contextlib.suppress(OSError):
            self.old_directory.rmdir()  # fails, and stays, if a file could not be put back


def discard(directory: str | Path, name: str) -> None:
    """Delete the staged files of a table that were not committed."""
    shutil.rmtree(_staging_directory(directory, name), ignore_errors=True)


def _staging_directory(directory: str | Path, name: str) -> Path:
    """Return the directory in which the files of a table are staged."""
    return Path(directory).expanduser() / f".{name}.new"


def read(
    directory: str | Path,
    name: str,
    dim: int,
    states: Mapping[str, Sequence[int]],
    layout: Layout,
    *,
    rank: int | None = None,
) -> DynamicEmbTable:
    """Return the entries of a table; rows of one file are mapped, those of several are copied.

    Args:
        directory: directory of the collection, not of the whole dump.
        name: name of the table.
        dim: dim of the table, which no file contains.
        states: shape per row of each optimizer state, `(dim,)` or `()`, in order; empty to skip
            them. If no rank has a file of states, the result has none.
        layout: layout of the table that takes the entries. Times become stamps 1, 2, ... from the
            oldest to the newest.
        rank: the rank whose files are read, in [0, `saved_world_size`), which is not checked; None
            reads the files of all ranks, concatenated.

    Raises:
        DumpError: a rank lacks its keys, or a file that another rank has; a file is damaged or of
            another size; or states belong to another optimizer.
    """
    directory = Path(directory).expanduser()
    files = _TableFiles(directory, name, saved_world_size(directory, name), rank)
    keys, values = files.read("emb_keys", torch.int64), files.read("emb_values", torch.float32)
    scores = files.read("emb_scores", torch.int64)
    state_values = files.read("emb_opt_values", torch.float32) if states else None
    if state_values is None and states and _may_have_earlier_states(directory, name):
        state_values = files.read("opt_values", torch.float32)
    assert keys is not None
    if values is None or values.numel() != keys.numel() * dim:
        num_values = 0 if values is None else values.numel()
        raise DumpError(
            f"{directory} has {num_values} values for {keys.numel()} keys of {name!r} of dim "
            f"{dim}; the dump is cut short, or the table has another dim"
        )
    rows: dict[str, Rows] = {WEIGHT: values.view(-1, dim)}
    if states and state_values is not None:
        rows.update(_split_states(state_values, keys.numel(), states, name))
    arguments = arguments_of(directory, name)
    strategy = arguments.get("evict_strategy", _STRATEGIES.get(layout.order))
    has_ages = str(strategy).endswith("KLru")
    stamps, new_scores = _stamps_and_scores(
        scores, keys.numel(), layout, has_ages=has_ages, name=name
    )
    counted_keys = files.read("counter_keys", torch.int64)
    counts = files.read("counter_frequencies", torch.int64)
    if (counted_keys is None) != (counts is None) or (
        counted_keys is not None and counts is not None and counted_keys.shape != counts.shape
    ):
        raise DumpError(
            f"{directory} has {_length(counted_keys)} keys of an admission counter of {name!r} and "
            f"{_length(counts)} counts; the dump is not whole"
        )
    return DynamicEmbTable(
        Entries(keys, stamps, new_scores, rows),
        arguments,
        None if counted_keys is None or counts is None else (counted_keys, counts),
    )


def file_name(table: str, item: str, rank: int | str = 0, world_size: int | str = 1) -> str:
    """Return the name of a rank's file of an item, e.g. emb_keys, of a table."""
    return _NAME.format(table=table, item=item, rank=rank, world_size=world_size)


def _files_of(directory: Path, table: str) -> list[str]:
    """Return the existing files of a table, the keys first."""
    items = "emb_keys|emb_values|emb_scores|emb_opt_values|counter_(keys|frequencies)"
    if _may_have_earlier_states(directory, table):
        items += "|opt_values"
    suffixes = rf"({items})\.rank_\d+\.world_size_\d+|opt_args\.json"
    pattern = re.compile(rf"{re.escape(table)}_({suffixes})")
    names = [name for name in os.listdir(directory) if pattern.fullmatch(name)]
    return sorted(names, key=lambda name: not _is_key_file(name))


def _may_have_earlier_states(directory: Path, table: str) -> bool:
    """Return whether files `<table>_opt_values` are states of this table, by their earlier name.

    `a_emb_opt_values` are the states of a table `a` if the directory has one.
    """
    other_table = table.removesuffix("_emb")
    keys = file_name(glob.escape(other_table), "emb_keys", "*", "*")
    return other_table == table or not any(directory.glob(keys))


def _is_key_file(file: str) -> bool:
    return file.rpartition(".rank_")[0].endswith("_emb_keys")


def _score_columns(entries: Entries, layout: Layout, tick: int) -> Tensor:
    """Return the scores as DynamicEmb stores them: int64 `[n]`, for lru_lfu `[n, 2]`."""
    if layout.order == "lru":
        return tick - entries.stamps
    if layout.order == "lru_lfu" and entries.scores is not None:
        columns = [entries.stamps, entries.scores]
        return torch.stack(columns[::-1] if layout.has_uses_first else columns, 1)
    return torch.zeros_like(entries.keys) if entries.scores is None else entries.scores


def _write_numbers(path: Path, numbers: Tensor) -> None:
    """Write the elements of a tensor in their dtype."""
    _write_blocks(path, numbers.reshape(-1).split(_NUMBERS_PER_WRITE))


def _write_rows(path: Path, rows: Sequence[Rows], num_rows: int) -> None:
    """Write the rows of tensors, concatenated per row, as float32."""
    block_rows = min(rows_at_a_time(tensor) for tensor in rows)

    def rows_at(index: Tensor) -> Tensor:
        parts = [tensor[index].detach().cpu().float() for tensor in rows]
        return torch.cat([part[:, None] if part.dim() == 1 else part for part in parts], 1)

    _write_blocks(
        path, (rows_at(index) for index in torch.arange(num_rows, device="cpu").split(block_rows))
    )


def _write_blocks(path: Path, blocks: Iterable[Tensor]) -> None:
    """Write the elements of tensors to a file under a temporary name, then rename it."""
    with replacing(path) as file:
        for block in blocks:
            elements = block.cpu().contiguous().reshape(-1)
            if elements.numel():
                buffer = bytearray(elements.numel() * elements.dtype.itemsize)
                torch.frombuffer(buffer, dtype=elements.dtype).copy_(elements)
                file.write(buffer)


def saved_world_size(directory: str | Path, name: str) -> int:
    """Return the number of ranks that dumped a table.

    Raises:
        DumpError: there is none, or the keys of a rank are missing.
    """
    directory = Path(directory).expanduser()
    pattern = re.compile(rf"{re.escape(name)}_emb_keys\.rank_(\d+)\.world_size_(\d+)")
    names = os.listdir(directory) if directory.is_dir() else []
    ranks = [match.groups() for file in names if (match := pattern.fullmatch(file))]
    if not ranks:
        raise DumpError(
            f"{directory} has no keys of a table {name!r}; name the directory of its collection"
            + _interruption_hint(directory, name)
        )
    world_sizes = {int(size) for _, size in ranks}
    num_ranks = max(world_sizes)
    if len(world_sizes) > 1 or {int(rank) for rank, _ in ranks} != set(range(num_ranks)):
        raise DumpError(
            f"{directory} has {len(ranks)} files of keys of {name!r}, of {sorted(world_sizes)} "
            "ranks; the dump is not whole" + _interruption_hint(directory, name)
        )
    return num_ranks


def _interruption_hint(directory: Path, name: str) -> str:
    """Return the sentence of an error that says where an interrupted `commit` left old files."""
    old_directory = directory / f".{name}.old"
    if not old_directory.is_dir():
        return ""
    text = ". Writing over a dump was cut short there; the old one's files are in"
    return f"{text} {old_directory}"


def owner_ranks(keys: Tensor, world_size: int, dist_type: str) -> Tensor:
    """Return the rank that DynamicEmb's routers of a `dist_type` send each key to, int64.

    Raises:
        ValueError: `dist_type` is neither roundrobin nor hash_roundrobin.
    """
    if dist_type == "hash_roundrobin":
        keys = finalise(keys)
    elif dist_type != "roundrobin":
        raise ValueError(
            f"keys follow from dist_type roundrobin and hash_roundrobin, got "
            f"{dist_type!r}; load on as many ranks as dumped"
        )
    # The remainder of keys as unsigned numbers: a negative int64 means itself plus 2^64.
    return (keys % world_size + (keys < 0) * (2**64 % world_size)) % world_size


def arguments_of(directory: str | Path, name: str) -> dict[str, Any]:
    """Return the arguments saved with a table; {} if there is no file of them.

    Raises:
        DumpError: the file is damaged.
    """
    return _read_arguments(arguments_path(directory, name))


def arguments_path(directory: str | Path, name: str) -> Path:
    """Return the path of the file that `arguments_of` reads."""
    return Path(directory).expanduser() / f"{name}_opt_args.json"


_DUMP = "emblib_dump"


def dump_argument(tables: Sequence[str]) -> dict[str, Any]:
    """Return the `t_opt_args.json` entry that identifies tables written by one call.

    Args:
        tables: unique names of all tables that the call writes.
    """
    return {_DUMP: {"id": uuid.uuid4().hex, "tables": list(tables)}}


class _DumpEntry(NamedTuple):
    """The entry `emblib_dump` of a table; None and no tables if it has none."""

    identity: str | None = None
    tables: Sequence[str] = ()


def check_one_dump(arguments: Mapping[str, tuple[Path, Mapping[str, Any]]]) -> None:
    """Raise DumpError if tables that one call wrote together are mixed with another call's.

    A table that was later written alone is accepted. So are tables without the entry, as DynamicEmb
    writes them, unless the entry of another loaded table names them.

    Args:
        arguments: path and content of the `t_opt_args.json` of each table that is loaded, by the
            name that it has in `dump_argument`.

    Raises:
        DumpError: the tables are of different dumps, or the entry is malformed.
    """
    entries: dict[str, _DumpEntry] = {}
    for table, (path, content) in arguments.items():
        entries[table] = _DumpEntry()
        if _DUMP in content:
            saved_entry = entry_of(path, content, _DUMP, dict)
            names = entry_of(path, saved_entry, "tables", list)
            if not all(type(name) is str for name in names):
                raise DumpError(f"{path} is malformed: 'tables' of {_DUMP!r} must be names")
            entries[table] = _DumpEntry(entry_of(path, saved_entry, "id", str), names)
    for table, entry in entries.items():
        for name in entry.tables:
            other_entry = entries.get(name, entry)  # a table that is not loaded is not compared
            is_of_other_dump = other_entry.identity != entry.identity
            if is_of_other_dump and (other_entry.identity is None or table in other_entry.tables):
                raise DumpError(
                    f"{arguments[table][0]} and {arguments[name][0]} are of different dumps, "
                    f"{entry.identity} and {other_entry.identity}, but one call wrote both tables: "
                    "a copy of the dump was cut short, or files of two dumps were mixed; take "
                    "another dump, or load one table at a time with table_names"
                )


@dataclass(frozen=True)
class _TableFiles:
    """The files of a table, for `rank` or, if None, for all ranks."""

    directory: Path
    name: str
    world_size: int
    rank: int | None

    def read(self, item: str, dtype: torch.dtype) -> Tensor | None:
        """Return the values of the ranks, concatenated, flat; None if no rank has a file.

        Raises:
            DumpError: some ranks have a file and others do not, even if these are not read.
        """
        ranks = range(self.world_size)
        paths = [
            self.directory / file_name(self.name, item, rank, self.world_size) for rank in ranks
        ]
        missing_paths = [path for path in paths if not path.exists()]
        if len(missing_paths) == len(paths):
            return None
        if missing_paths:
            raise DumpError(
                f"{missing_paths[0]} is missing, of {self.world_size} ranks {len(missing_paths)} "
                "have no such file; the dump is not whole, take another one"
            )
        if self.rank is not None:
            return _map_numbers(paths[self.rank], dtype)
        parts = [_map_numbers(path, dtype) for path in paths]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _map_numbers(path: Path, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a file, flat and mapped; raise DumpError if it is cut short."""
    nbytes = path.stat().st_size
    if nbytes % dtype.itemsize:
        raise DumpError(f"{path} has {nbytes} bytes, which are no {dtype} numbers; it is cut short")
    num_numbers = nbytes // dtype.itemsize
    if not num_numbers:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.from_file(str(path), size=num_numbers, dtype=dtype)


def _length(numbers: Tensor | None) -> int:
    return 0 if numbers is None else numbers.numel()


def _split_states(
    numbers: Tensor, num_keys: int, states: Mapping[str, Sequence[int]], name: str
) -> dict[str, Tensor]:
    """Split a file of `num_keys` rows by columns into states by name, `[num_keys, *shape]`.

    `states` are the expected shapes per row; `name` is the name of the table, for the error.

    Raises:
        DumpError: the rows have another length.
    """
    widths = [math.prod(shape) for shape in states.values()]
    expected_columns = sum(widths)
    width = numbers.numel() // num_keys if num_keys else expected_columns
    is_padded = width == _PADDED_STATE_WIDTH and expected_columns == 1
    if numbers.numel() != num_keys * width or not (is_padded or width == expected_columns):
        raise DumpError(
            f"the optimizer states of {name!r} have {width} numbers per row, those of this table "
            f"{dict(zip(states, widths, strict=True))}; load without states, or into a table of "
            "the same optimizer"
        )
    columns = numbers.view(num_keys, width)[:, :expected_columns].split(widths, 1)
    return {
        key: column if shape else column.reshape(-1)
        for (key, shape), column in zip(states.items(), columns, strict=True)
    }


def _read_arguments(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} without it; raise DumpError if it is damaged."""
    if not path.exists():
        return {}
    try:
        arguments = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path} is damaged: it cannot be read ({error})") from error
    if not isinstance(arguments, dict):
        raise DumpError(f"{path} is damaged: it holds no arguments")
    return arguments


def _stamps_and_scores(
    scores: Tensor | None, num_keys: int, layout: Layout, *, has_ages: bool, name: str
) -> tuple[Tensor, Tensor | None]:
    """Return stamps and scores, int64 `[num_keys]`; stamps are 1 without times of use.

    `scores` are as in the files, None without one; with `has_ages` they are times since the last
    use. Eviction by the result has the order of DynamicEmb's strategy; scores are None for orders
    that have none.

    Raises:
        DumpError: the number of scores is wrong.
    """
    order, ones = layout.order, torch.ones(num_keys, dtype=torch.int64, device="cpu")
    needs_scores = order in ("lfu", "lru_lfu", "assigned")
    if scores is None:
        return ones, ones if needs_scores else None
    if num_keys and scores.numel() == 2 * num_keys:
        columns = scores.view(num_keys, 2).unbind(1)
        times, uses = columns[::-1] if layout.has_uses_first else columns
        return _dense_ranks(times), uses.clone() if needs_scores else None
    if scores.numel() != num_keys:
        raise DumpError(
            f"{name!r} has {scores.numel()} scores for {num_keys} keys; it is cut short"
        )
    if has_ages:
        stamps = _dense_ranks(-scores)
        return stamps, stamps.clone() if needs_scores else None
    if order == "lru":
        return _dense_ranks(scores), None
    return ones, scores if needs_scores else None


def _dense_ranks(times: Tensor) -> Tensor:
    """Return the dense ranks 1, 2, ... of times, int64 `[n]`; equal times have equal ranks."""
    return torch.unique(times, sorted=True, return_inverse=True)[1] + 1
