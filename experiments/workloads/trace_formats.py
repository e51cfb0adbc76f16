"""The formats of trace files: their tables, and their lookups in blocks of samples.

A reader yields blocks; a block has, per table, the ids of some samples and the number of ids per
sample. Blocks are read one by one, so that the first batches of a large file cost little.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import re
import shutil
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import emblib
from experiments.config.schema import Format


class TraceError(ValueError):
    """A trace file cannot be used; the message names the fault."""


@contextmanager
def converting_read_errors(path: Path) -> Iterator[None]:
    """Return a context that converts errors about a damaged or unreadable file to TraceError."""
    try:
        yield
    except TraceError:
        raise
    except (EOFError, OSError, ValueError, csv.Error, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not of a library
            raise TraceError(f"{path.name} cannot be read ({error.strerror})") from error
        raise TraceError(
            f"{path.name} is damaged, or has another format than workload.format says ({error})"
        ) from error


def open_text(path: Path) -> IO[str]:
    """Open a UTF-8 text file, plain or .gz, without its byte-order mark; the caller closes it.

    Raises:
        OSError: the file cannot be read; a damaged .gz raises when it is read.
    """
    if path.suffix == ".gz":
        return gzip.open(path, "rt", newline="", encoding="utf-8-sig")
    return open(path, newline="", encoding="utf-8-sig")


def torch_load(path: Path) -> Any:
    """Load a file of torch.save, mapped into memory if its format allows it.

    A .gz is unpacked to a temporary file first.

    Raises:
        TraceError: the file has another format.
        OSError, EOFError, zlib.error: a .gz is damaged, or the disk is full.
    """
    if path.suffix != ".gz":
        return _mapped(path, path.name)
    with tempfile.NamedTemporaryFile(suffix=".pt") as unpacked, gzip.open(path) as packed:
        shutil.copyfileobj(packed, unpacked, 1 << 22)
        unpacked.flush()
        return _mapped(Path(unpacked.name), path.name)  # the mapping outlives the file's name


def _mapped(path: Path, name: str) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files of old versions of torch are not archives, so they cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]  # the rest is unsafe advice
        raise TraceError(
            f"{name} is not a file of torch.save with tensors ({reason or 'it is empty'})"
        ) from error


Integers = NDArray[Any]  # integers of any type; hashed ids may need uint64
Lengths = NDArray[np.int64]
NUM_CRITEO_DENSE, NUM_CRITEO_TABLES = 13, 26
SEPARATORS = re.compile(r"[\s,;|\[\]]+")
HEXADECIMAL = re.compile(r"(0[xX])?[0-9a-fA-F]+")


class TableLookups(NamedTuple):
    """The lookups of some samples in one table: ids [lookups], and lookups per sample [samples]."""

    ids: Integers
    lengths: Lengths


@dataclass(frozen=True)
class TraceTable:
    """A table of a trace; `rows` is None if the file does not state their number."""

    name: str
    rows: int | None = None


class Reader(ABC):
    """A reader of a trace file.

    `__init__` raises TraceError for a missing file. For a file of another layout `__init__`,
    `tables` or iterating `blocks` raises it. Damage within the layout may raise errors of libraries
    instead, so callers wrap every use of a Reader in `converting_read_errors`.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise TraceError(f"there is no file '{path}'")
        self.path = path

    @abstractmethod
    def tables(self) -> list[TraceTable]:
        """Return the file's tables, in the order of the file."""

    @abstractmethod
    def blocks(self, names: Sequence[str], size: int) -> Iterator[list[TableLookups]]:
        """Yield blocks of up to `size` samples, a list with one entry per named table each."""

    def positions(self, names: Sequence[str]) -> list[int]:
        """Return the positions of the named tables, all of which must be in `tables()`."""
        all_names = [table.name for table in self.tables()]
        return [all_names.index(name) for name in names]


class MappedReader(Reader):
    """A reader of tensors, of which at least the ids may be mapped into memory.

    Attributes:
        samples: number of samples of each table; the trace ends with the shortest of the requested
            tables.
    """

    samples: list[int]

    @abstractmethod
    def _bags(self, table: int, start: int, end: int) -> TableLookups:
        """Return the lookups of the samples [start, end) in a table."""

    def blocks(self, names: Sequence[str], size: int) -> Iterator[list[TableLookups]]:
        tables = self.positions(names)
        num_samples = min(self.samples[table] for table in tables)
        for start in range(0, num_samples, size):
            yield [self._bags(table, start, min(start + size, num_samples)) for table in tables]


class LineReader(Reader):
    """A reader of a text file with one line per sample."""

    @abstractmethod
    def _samples(self, tables: Sequence[int]) -> Iterator[list[list[int]]]:
        """Yield per line the ids of each table."""

    def blocks(self, names: Sequence[str], size: int) -> Iterator[list[TableLookups]]:
        samples = self._samples(self.positions(names))
        while block := list(itertools.islice(samples, size)):
            yield [
                TableLookups(
                    _integers(list(itertools.chain.from_iterable(bags))),
                    np.array([len(ids) for ids in bags], np.int64),
                )
                for bags in zip(*block, strict=True)
            ]


class DlrmReader(MappedReader):
    """A reader of a file of dlrm_datasets: torch.save of (indices, offsets, lengths), or its .gz.

    Bag t * B + b is sample b of table t; `lengths` is [T, B].
    """

    def __init__(self, path: Path) -> None:
        """Map the three tensors and check that their shapes fit together."""
        super().__init__(path)
        content = torch_load(path)
        has_three_entries = isinstance(content, tuple | list) and len(content) >= 3
        tensors = [x for x in content[:3] if isinstance(x, Tensor)] if has_three_entries else []
        if len(tensors) < 3 or tensors[2].dim() != 2:
            raise TraceError(
                f"{path.name} is not in the layout of dlrm_datasets: it must hold the tensors "
                f"(indices, offsets [T*B + 1], lengths [T, B]), got {_summary(content)}"
            )
        if any(x.is_floating_point() or x.is_complex() or x.dtype is torch.bool for x in tensors):
            dtypes = ", ".join(str(x.dtype) for x in tensors)
            raise TraceError(f"{path.name}: all three tensors must have integers, got {dtypes}")
        self.indices, self.offsets, self.lengths = tensors
        num_tables, num_samples = self.lengths.shape
        self.samples = [num_samples] * num_tables
        if self.offsets.numel() != num_tables * num_samples + 1:
            raise TraceError(
                f"{path.name}: offsets must have T*B + 1 = {num_tables * num_samples + 1} entries "
                f"(lengths is {num_tables} × {num_samples}), got {self.offsets.numel()}"
            )
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        num_indices = self.indices.numel()
        if self.indices.dim() != 1 or (first, last) != (0, num_indices):
            raise TraceError(
                f"{path.name}: offsets must go from 0 to the number of indices, {num_indices}, got "
                f"{first} to {last} and indices {list(self.indices.shape)}"
            )

    def tables(self) -> list[TraceTable]:
        """Return t0, t1, ...; the file does not state their rows."""
        return [TraceTable(f"t{t}") for t in range(len(self.samples))]

    def _bags(self, table: int, start: int, end: int) -> TableLookups:
        first_bag = table * self.samples[table]
        offsets = self.offsets[first_bag + start : first_bag + end + 1].to(torch.int64)
        lengths, stated_lengths = offsets.diff(), self.lengths[table, start:end].to(torch.int64)
        if not torch.equal(lengths, stated_lengths) or bool((lengths < 0).any()):
            raise TraceError(
                f"{self.path.name}: offsets and lengths disagree in table {table}, between samples "
                f"{start} and {end}"
            )
        ids = self.indices[int(offsets[0]) : int(offsets[-1])]
        return TableLookups(ids.numpy(), lengths.numpy())


class RecordedReader(MappedReader):
    """A reader of a file of emblib.TraceRecorder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.trace = emblib.LookupTrace.load(path)
        except ValueError as error:
            raise TraceError(str(error)) from error
        self.starts = [
            np.concatenate([[0], np.cumsum(lengths.numpy(), dtype=np.int64)])
            for lengths in self.trace.lengths
        ]
        self.samples = [len(starts) - 1 for starts in self.starts]

    def tables(self) -> list[TraceTable]:
        return [TraceTable(f.name, f.rows) for f in self.trace.features]

    def _bags(self, table: int, start: int, end: int) -> TableLookups:
        offsets = self.starts[table][start : end + 1]
        ids = self.trace.ids[table][offsets[0] : offsets[-1]]
        return TableLookups(ids.numpy(), np.diff(offsets))


class CriteoReader(LineReader):
    """A reader of Criteo's files: lines of label, 13 numbers, 26 hexadecimal categories; or .gz.

    Tabs separate the fields. An empty category is an empty bag. Lines of a test set have no label.
    """

    def tables(self) -> list[TraceTable]:
        """Return C1 to C26; their ids should be hashes of 32 bits, which is not checked."""
        return [TraceTable(f"C{c}") for c in range(1, NUM_CRITEO_TABLES + 1)]

    def _samples(self, tables: Sequence[int]) -> Iterator[list[list[int]]]:
        """Yield the bags of the tables, sample by sample; a bag has one id or is empty."""
        with open_text(self.path) as file:
            for number, line in enumerate(file, 1):
                fields = line.rstrip("\r\n").split("\t")
                first_category = len(fields) - NUM_CRITEO_TABLES
                if first_category not in (NUM_CRITEO_DENSE, NUM_CRITEO_DENSE + 1):
                    raise TraceError(
                        f"{self.path.name} line {number}: a line of Criteo's has 40 fields (39 "
                        f"without the label) separated by tabs, got {len(fields)}"
                    )
                categories = [fields[first_category + t] for t in tables]
                # int() also accepts signs, blanks and underscores.
                if invalid_categories := [
                    c for c in categories if c and not HEXADECIMAL.fullmatch(c)
                ]:
                    raise TraceError(
                        f"{self.path.name} line {number}: a category must be hexadecimal, got "
                        f"{invalid_categories[0]!r}"
                    )
                yield [[int(c, 16)] if c else [] for c in categories]


class CsvReader(LineReader):
    """A reader of CSV files, plain or .gz: a line of names, then one line per sample.

    Commas separate the fields. A field has an id, several ids separated by blanks, ';' or '|', or a
    list in brackets. In a quoted field commas separate ids too. An empty field is an empty bag. An
    empty line is an empty bag in a file of one column; in other files it is skipped.
    """

    def tables(self) -> list[TraceTable]:
        with open_text(self.path) as file:
            names = next(csv.reader(file), [])
        if not names or any(not n.strip() or re.fullmatch(r"-?\d+", n.strip()) for n in names):
            raise TraceError(
                f"{self.path.name}: the first line must name the columns, one per table, got "
                f"{','.join(names)[:60]!r}"
            )
        if len(names) == 1 and SEPARATORS.search(names[0].strip()):
            raise TraceError(
                f"{self.path.name}: columns are separated by commas, got one named {names[0]!r}"
            )
        return [TraceTable(name.strip()) for name in names]

    def _samples(self, tables: Sequence[int]) -> Iterator[list[list[int]]]:
        """Yield the bags of the tables, sample by sample."""
        num_columns = len(self.tables())
        with open_text(self.path) as file:
            lines = csv.reader(file)
            next(lines)
            for fields in lines:
                if not fields:  # an empty line
                    if num_columns > 1:
                        continue
                    fields = [""]
                if len(fields) != num_columns:
                    raise TraceError(
                        f"{self.path.name} line {lines.line_num}: there are {num_columns} columns, "
                        f"got {len(fields)} fields; lists with commas need quotes"
                    )
                words_by_table = (SEPARATORS.split(fields[t]) for t in tables)
                try:
                    if any("_" in fields[t] for t in tables):  # `int` ignores it
                        raise ValueError("an underscore is not a digit")
                    bags = [[int(word) for word in words if word] for words in words_by_table]
                except ValueError as error:
                    raise TraceError(
                        f"{self.path.name} line {lines.line_num}: ids must be integers ({error}); "
                        "name the columns that have them with workload.columns=[...]"
                    ) from error
                yield bags


class ParquetReader(Reader):
    """A reader of parquet files with one row per sample.

    Tables are the columns of integers and of lists of integers.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise TraceError("parquet files need pyarrow: pip install pyarrow") from error
        try:
            self.schema = pyarrow.parquet.ParquetFile(path).schema_arrow
        except (OSError, pyarrow.lib.ArrowInvalid) as error:
            raise TraceError(f"{path.name} is not a parquet file ({error})") from error

    def tables(self) -> list[TraceTable]:
        """Return the columns with ids."""
        from pyarrow import types

        list_tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        columns = [
            TraceTable(field.name)
            for field in self.schema
            if types.is_integer(
                field.type.value_type
                if any(test(field.type) for test in list_tests)
                else field.type
            )
        ]
        if not columns:
            columns_in_file = ", ".join(f"{f.name}: {f.type}" for f in self.schema)
            raise TraceError(
                f"{self.path.name}: no column has integers or lists of integers; it has "
                f"{columns_in_file}"
            )
        return columns

    def blocks(self, names: Sequence[str], size: int) -> Iterator[list[TableLookups]]:
        """Yield the batches of pyarrow; a null is an empty bag, and raises within a list."""
        import pyarrow.compute
        import pyarrow.parquet
        import pyarrow.types

        file = pyarrow.parquet.ParquetFile(self.path)
        for batch in file.iter_batches(batch_size=size, columns=list(names)):
            block = []
            for name in names:
                column = batch.column(name)
                if pyarrow.types.is_integer(column.type):
                    ids, lengths = column.drop_null(), column.is_valid()
                else:
                    ids = column.flatten()
                    lengths = pyarrow.compute.list_value_length(column).fill_null(0)
                if ids.null_count:
                    raise TraceError(f"{self.path.name}: a list in column {name} has a null")
                counts = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
                block.append(TableLookups(ids.to_numpy(zero_copy_only=False), counts))
            yield block


def _integers(values: list[int]) -> Integers:
    """Convert to int64, or to uint64 if an id exceeds the range of int64."""
    try:
        if any(value > 2**63 - 1 for value in values):
            return np.array(values, np.uint64)
        return np.array(values, np.int64)
    except OverflowError:
        raise TraceError(
            f"ids must fit 64 bits, signed or not, got {min(values)} to {max(values)}"
        ) from None


def _summary(content: Any) -> str:
    if isinstance(content, tuple | list):
        parts = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in content]
        return f"{len(parts)} entries {json.dumps(parts[:4])}"
    return type(content).__name__


READERS: dict[Format, Callable[[Path], Reader]] = {
    Format.dlrm: DlrmReader,
    Format.criteo: CriteoReader,
    Format.parquet: ParquetReader,
    Format.csv: CsvReader,
    Format.emblib: RecordedReader,
}
