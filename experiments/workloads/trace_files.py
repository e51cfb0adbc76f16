"""A trace file as a workload: its tables, its checksum, and batches of its samples."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from zipfile import is_zipfile

import numpy as np

import emblib
from experiments.config.schema import Format, Ids, WorkloadConfig
from experiments.workloads.trace_formats import (
    READERS,
    Integers,
    Reader,
    TableLookups,
    TraceTable,
    converting_read_errors,
)
from experiments.workloads.trace_formats import TraceError as TraceError

SUFFIXES = {
    ".parquet": Format.parquet,
    ".pq": Format.parquet,
    ".csv": Format.csv,
    ".tsv": Format.criteo,
    ".txt": Format.criteo,
}
LENGTH_SAMPLES = 4096  # number of first samples from which the mean length of bags is computed


@dataclasses.dataclass(frozen=True)
class TableBags:
    """The bags of one table in a batch.

    Attributes:
        ids: rows, int64 [lookups].
        lengths: lookups per sample, int64 [B].
        num_folded: number of ids that were outside the table.
    """

    ids: np.ndarray
    lengths: np.ndarray
    num_folded: int = 0


def resolve(workload: WorkloadConfig, *, sized: bool) -> WorkloadConfig:
    """Return a workload completed by the tables of its trace file.

    Set are sha256, columns, sizes (0: unknown), T, E (the largest size) and L (the mean number of
    ids per bag of the first samples, up to LENGTH_SAMPLES of them, rounded, at least 1).

    Args:
        workload: workload with distribution=trace.
        sized: True if tables will be built: the number of their rows must then be known.

    Raises:
        TraceError: the file is missing, damaged or empty; it has another sha256 than the workload;
            its tables do not fit columns, T or sizes; or their rows are unknown.
    """
    path = _path(workload)
    sha256 = _checksum(path, path.stat().st_size, path.stat().st_mtime_ns)
    if workload.sha256 and workload.sha256 != sha256:
        raise TraceError(
            f"{path.name} is another file: its sha256 is {sha256}, workload.sha256 asks for "
            f"{workload.sha256}"
        )
    columns = _chosen_columns(workload)
    if not columns:
        raise TraceError(f"{path.name} has no tables")
    sizes = workload.sizes or [workload.E or column.rows or 0 for column in columns]
    if len(sizes) != len(columns):
        raise TraceError(
            f"workload.sizes must have one entry per table: {path.name} has {len(columns)}"
            f"{' that were chosen' if workload.columns or workload.T else ''}, got {len(sizes)}"
        )
    if sized and not all(sizes):
        unsized_table = next(
            column.name for column, rows in zip(columns, sizes, strict=True) if not rows
        )
        raise TraceError(
            f"{path.name} does not say how many rows table {unsized_table} has: give workload.E=N "
            "(an id of N or more is then an error), or workload.E=N workload.ids=fold (rows are "
            "ids modulo N)"
        )
    names = [column.name for column in columns]
    first_block = next(_blocks(workload, names, LENGTH_SAMPLES), None)
    if first_block is None or not len(first_block[0].lengths):
        raise TraceError(f"{path.name} has no samples")
    return dataclasses.replace(
        workload,
        sha256=sha256,
        columns=names,
        sizes=sizes,
        T=len(columns),
        E=max(sizes),
        L=max(1, round(float(np.mean([bags.lengths.mean() for bags in first_block])))),
    )


def batches(
    workload: WorkloadConfig, rows_of_tables: Sequence[int], num_batches: int
) -> Iterator[list[TableBags]]:
    """Yield batches of B consecutive samples, each a list with one entry per table.

    Args:
        workload: workload of a trace.
        rows_of_tables: rows of each table. 0 leaves the ids of a table unchecked; ids beyond int64
            then wrap around.
        num_batches: maximum number of batches; a short file has fewer.

    Raises:
        TraceError: an id is outside its table, with ids=exact, or the file is damaged.
    """
    names = workload.columns or [column.name for column in _chosen_columns(workload)]
    blocks = _regroup(_blocks(workload, names, workload.B), workload.B)
    for block in itertools.islice(blocks, num_batches):
        yield [
            _checked_rows(bags, num_rows, name, workload)
            for bags, num_rows, name in zip(block, rows_of_tables, names, strict=True)
        ]


def _regroup(
    blocks: Iterator[list[TableLookups]], num_samples: int
) -> Iterator[list[TableLookups]]:
    """Regroup blocks into blocks of `num_samples` samples; drop an incomplete last one."""
    pending_bags: list[TableLookups] = []
    for block in blocks:
        if pending_bags and len(pending_bags[0].lengths):
            pairs = zip(pending_bags, block, strict=True)
            block = [TableLookups(*map(np.concatenate, zip(*pair, strict=True))) for pair in pairs]
        pending_bags = block
        while len(pending_bags[0].lengths) >= num_samples:
            ends = [int(bags.lengths[:num_samples].sum()) for bags in pending_bags]
            tables_and_ends = list(zip(pending_bags, ends, strict=True))
            yield [
                TableLookups(bags.ids[:end], bags.lengths[:num_samples])
                for bags, end in tables_and_ends
            ]
            pending_bags = [
                TableLookups(bags.ids[end:], bags.lengths[num_samples:])
                for bags, end in tables_and_ends
            ]


def _checked_rows(
    bags: TableLookups, num_rows: int, name: str, workload: WorkloadConfig
) -> TableBags:
    """Return bags with ids in [0, num_rows): fold other ids or raise; 0 rows accept every id."""
    ids: Integers = bags.ids
    if not num_rows:
        return TableBags(ids.astype(np.int64), bags.lengths)
    outside_ids = ids[(ids < 0) | (ids >= num_rows)]
    if len(outside_ids) and workload.ids is Ids.exact:
        raise TraceError(
            f"{Path(workload.file).name}: table {name} has {num_rows:,} rows and the trace looks "
            f"up id {outside_ids[0]}; give workload.E=N with N beyond the largest id, or "
            "workload.ids=fold for ids modulo the rows"
        )
    if len(outside_ids):
        ids = np.mod(ids, np.asarray(num_rows, ids.dtype if ids.itemsize == 8 else np.int64))
    return TableBags(ids.astype(np.int64), bags.lengths, len(outside_ids))


def _path(workload: WorkloadConfig) -> Path:
    path = Path(workload.file).expanduser()
    if not path.is_file():
        raise TraceError(f"workload.file: there is no file '{workload.file}'")
    return path.resolve()


@cache
def _checksum(path: Path, num_bytes: int, modified_ns: int) -> str:
    """Return the file's sha256, which is cached until size or time of the file change."""
    return emblib.trace.sha256(path)


def _chosen_columns(workload: WorkloadConfig) -> list[TraceTable]:
    """Return the columns of the workload: the named ones, the first T, or all."""
    with converting_read_errors(_path(workload)):
        columns = _open(workload).tables()
    names = [column.name for column in columns]
    if repeated_names := [name for name in names if names.count(name) > 1]:
        raise TraceError(
            f"{Path(workload.file).name} has two tables named '{repeated_names[0]}': rename one"
        )
    if workload.columns:
        by_name = {column.name: column for column in columns}
        for name in workload.columns:
            if name not in by_name:
                similar_names = difflib.get_close_matches(name, by_name, 1, 0.4)
                hint = f" Did you mean '{similar_names[0]}'?" if similar_names else ""
                raise TraceError(
                    f"workload.columns: {Path(workload.file).name} has no table '{name}'.{hint} "
                    f"There is: {', '.join(list(by_name)[:30])}{', ...' * (len(by_name) > 30)}"
                )
        columns = [by_name[name] for name in workload.columns]
    if len(columns) < workload.T:
        raise TraceError(
            f"workload.T must be at most {len(columns)}, the tables of {Path(workload.file).name}, "
            f"got {workload.T}; 0 means all"
        )
    return columns[: workload.T] if workload.T else columns


def _open(workload: WorkloadConfig) -> Reader:
    path = _path(workload)
    file_format = _resolve_format(path, workload.format)
    return _reader(path, file_format, path.stat().st_size, path.stat().st_mtime_ns)


def _blocks(
    workload: WorkloadConfig, names: Sequence[str], num_samples: int
) -> Iterator[list[TableLookups]]:
    with converting_read_errors(_path(workload)):
        yield from _open(workload).blocks(names, num_samples)


@cache
def _reader(path: Path, file_format: Format, num_bytes: int, modified_ns: int) -> Reader:
    """Return the reader of a file, which is cached until size or time of the file change."""
    return READERS[file_format](path)


def _resolve_format(path: Path, requested: Format) -> Format:
    """Return the requested format; derive `auto` from the name, for .pt from the content."""
    if requested is not Format.auto:
        return requested
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    by_suffix = SUFFIXES.get(suffixes[-1] if suffixes else "")
    if by_suffix is not None:
        return by_suffix
    if suffixes and suffixes[-1] in (".pt", ".pth"):
        return Format.emblib if path.suffix != ".gz" and _is_recorded_trace(path) else Format.dlrm
    raise TraceError(
        f"workload.format: the name of {path.name} does not tell its format; give one of "
        f"{', '.join(f.value for f in Format if f is not Format.auto)}"
    )


def _is_recorded_trace(path: Path) -> bool:
    if not is_zipfile(path):
        return False
    try:
        emblib.LookupTrace.load(path)
    except ValueError as error:
        if "is damaged" in str(error):
            raise TraceError(str(error)) from error
        return False
    return True
