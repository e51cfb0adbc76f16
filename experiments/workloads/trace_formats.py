"""The formats of trace files: their tables, and their lookups in blocks of samples.

A reader yields blocks: for each table the ids of some samples and how many each sample has. It
reads on only when the next block is asked for, so that the start of a large file costs what the
start costs.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
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
from experiments.workloads.distributions import Ids


class TraceError(ValueError):
    """A trace file cannot be used; the message says why and what to do."""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert a library's error about a damaged file to a TraceError."""
    try:
        yield
    except (EOFError, OSError, UnicodeError, csv.Error, zlib.error) as error:
        raise TraceError(
            f"{path.name} is damaged, or not in the format that it was said to be in ({error})"
        ) from error


def text(path: Path) -> IO[str]:
    """Open a file as text, compressed or not, without a byte-order mark."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", newline="", encoding="utf-8-sig")
    return open(path, newline="", encoding="utf-8-sig")


def torch_load(path: Path) -> Any:
    """Load tensors that stay on disk until they are used; compressed files are unpacked first."""
    if path.suffix != ".gz":
        return _mapped(path, path.name)
    with tempfile.NamedTemporaryFile(suffix=".pt") as whole, gzip.open(path) as packed:
        while block := packed.read(1 << 22):
            whole.write(block)
        whole.flush()
        return _mapped(Path(whole.name), path.name)  # the mapping outlives the file's name


def _mapped(path: Path, name: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # written before torch's files were archives: those cannot be mapped
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise _no_tensors(name, error) from error
    except Exception as error:
        raise _no_tensors(name, error) from error


def _no_tensors(name: str, error: Exception) -> TraceError:
    said = str(error).partition("\n")[0].partition(". ")[0]  # then torch advises to trust the file
    return TraceError(f"{name} is not a file of torch.save with tensors ({said or 'it is empty'})")


Integers = NDArray[Any]  # of any width; hashed ids may need all 64 bits
CRITEO_DENSE, CRITEO_TABLES = 13, 26
SEPARATORS = re.compile(r"[\s,;|\[\]]+")


class Bags(NamedTuple):
    """Lookups of some samples in one table."""

    ids: Integers
    lengths: Ids


@dataclass(frozen=True)
class Column:
    """A table of a trace; 0 rows: the file does not say how many it has."""

    name: str
    rows: int = 0


class Reader(ABC):
    """One trace file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def columns(self) -> list[Column]:
        """Return the file's tables."""

    @abstractmethod
    def blocks(self, names: Sequence[str], size: int) -> Iterator[list[Bags]]:
        """Yield lookups of the named tables, about `size` samples at a time."""

    def places(self, names: Sequence[str]) -> list[int]:
        """Return the positions of the named tables among `columns()`."""
        every = [column.name for column in self.columns()]
        return [every.index(name) for name in names]


class Dlrm(Reader):
    """A tuple (indices, offsets, lengths) of torch.save, as dlrm_datasets has it; .gz as well.

    Feature-major: bag t*B + b is table t, sample b; `lengths` is [T, B].
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        content = torch_load(path)
        good = isinstance(content, tuple | list) and len(content) >= 3
        tensors = [x for x in content[:3] if isinstance(x, Tensor)] if good else []
        if len(tensors) < 3 or tensors[2].dim() != 2:
            raise TraceError(
                f"{path.name} is not in the layout of dlrm_datasets: it must hold the tensors "
                f"(indices, offsets [T*B + 1], lengths [T, B]), got {_summary(content)}"
            )
        if any(x.is_floating_point() or x.is_complex() or x.dtype is torch.bool for x in tensors):
            kinds = ", ".join(str(x.dtype) for x in tensors)
            raise TraceError(f"{path.name}: all three tensors must have integers, got {kinds}")
        self.indices, self.offsets, self.lengths = tensors
        self.tables, self.samples = self.lengths.shape
        if self.offsets.numel() != self.tables * self.samples + 1:
            raise TraceError(
                f"{path.name}: offsets must have T*B + 1 = {self.tables * self.samples + 1} "
                f"entries (lengths is {self.tables} × {self.samples}), got {self.offsets.numel()}"
            )
        ends, lookups = (int(self.offsets[0]), int(self.offsets[-1])), self.indices.numel()
        if self.indices.dim() != 1 or ends != (0, lookups):
            raise TraceError(
                f"{path.name}: offsets must go from 0 to the number of indices, {lookups}, got "
                f"{ends[0]} to {ends[1]} and indices {list(self.indices.shape)}"
            )

    def columns(self) -> list[Column]:
        """Return t0, t1, ...; their numbers of rows are not in the file."""
        return [Column(f"t{t}") for t in range(self.tables)]

    def blocks(self, names: Sequence[str], size: int) -> Iterator[list[Bags]]:
        """Yield slices of the mapped tensors."""
        places = self.places(names)
        for start in range(0, self.samples, size):
            end = min(start + size, self.samples)
            yield [self._bags(t, start, end) for t in places]

    def _bags(self, table: int, start: int, end: int) -> Bags:
        first = table * self.samples
        ends = self.offsets[first + start : first + end + 1].to(torch.int64)
        lengths, said = ends.diff(), self.lengths[table, start:end].to(torch.int64)
        if not torch.equal(lengths, said) or bool((lengths < 0).any()):
            raise TraceError(
                f"{self.path.name}: offsets and lengths disagree in table {table}, between samples "
                f"{start} and {end}"
            )
        ids = self.indices[int(ends[0]) : int(ends[-1])]
        return Bags(ids.numpy(), lengths.numpy())


class Recorded(Reader):
    """A file of emblib.TraceRecorder."""

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

    def columns(self) -> list[Column]:
        """Return the tables as the recorder named them, with their rows."""
        return [Column(f.name, f.rows) for f in self.trace.features]

    def blocks(self, names: Sequence[str], size: int) -> Iterator[list[Bags]]:
        """Yield slices up to the shortest feature's end."""
        places = self.places(names)
        samples = min(len(self.starts[f]) - 1 for f in places)
        for start in range(0, samples, size):
            end = min(start + size, samples)
            yield [self._bags(f, start, end) for f in places]

    def _bags(self, feature: int, start: int, end: int) -> Bags:
        ends = self.starts[feature][start : end + 1]
        return Bags(self.trace.ids[feature][ends[0] : ends[-1]].numpy(), np.diff(ends))


class Criteo(Reader):
    """Lines of label, 13 numbers and 26 categories in hexadecimal, separated by tabs; .gz as well.

    An empty category is an empty bag. A test set's lines have no label.
    """

    def columns(self) -> list[Column]:
        """Return C1 to C26, hashed ids of 32 bits."""
        return [Column(f"C{c}") for c in range(1, CRITEO_TABLES + 1)]

    def blocks(self, names: Sequence[str], size: int) -> Iterator[list[Bags]]:
        """Yield blocks of lines."""
        places = self.places(names)
        with text(self.path) as file:
            block = _Block(len(places))
            for number, line in enumerate(file, 1):
                fields = line.rstrip("\r\n").split("\t")
                first = len(fields) - CRITEO_TABLES
                if first not in (CRITEO_DENSE, CRITEO_DENSE + 1):
                    raise TraceError(
                        f"{self.path.name} line {number}: a line of Criteo's has 40 fields (39 "
                        f"without the label) separated by tabs, got {len(fields)}"
                    )
                try:
                    block.add([_hashed(fields[first + p]) for p in places])
                except ValueError as error:
                    raise TraceError(
                        f"{self.path.name} line {number}: a category must be hexadecimal ({error})"
                    ) from error
                if block.samples == size:
                    yield block.take()
            if block.samples:
                yield block.take()


class Csv(Reader):
    """A line of names, then one line per sample.

    A column has an id, or ids separated by blanks, ';' or '|', or a list in brackets. An empty
    field is an empty bag. .gz as well.
    """

    def columns(self) -> list[Column]:
        """Return the columns as the first line names them."""
        with text(self.path) as file:
            names = next(csv.reader(file), [])
        if not names or any(not n.strip() or re.fullmatch(r"-?\d+", n.strip()) for n in names):
            raise TraceError(
                f"{self.path.name}: the first line must name the columns, one a table, got "
                f"{','.join(names)[:60]!r}"
            )
        if len(names) == 1 and SEPARATORS.search(names[0].strip()):
            raise TraceError(
                f"{self.path.name}: columns are separated by commas, got one named {names[0]!r}"
            )
        return [Column(name.strip()) for name in names]

    def blocks(self, names: Sequence[str], size: int) -> Iterator[list[Bags]]:
        """Yield blocks of lines."""
        places, width = self.places(names), len(self.columns())
        with text(self.path) as file:
            block, lines = _Block(len(places)), csv.reader(file)
            next(lines)
            for fields in lines:
                if not fields:  # an empty line
                    if width > 1:
                        continue
                    fields = [""]
                if len(fields) != width:
                    raise TraceError(
                        f"{self.path.name} line {lines.line_num}: there are {width} columns, got "
                        f"{len(fields)} fields; lists with commas need quotes"
                    )
                try:
                    block.add([_ids(fields[p]) for p in places])
                except ValueError as error:
                    raise TraceError(
                        f"{self.path.name} line {lines.line_num}: ids must be integers ({error}); "
                        "name the columns that have them with workload.columns=[...]"
                    ) from error
                if block.samples == size:
                    yield block.take()
            if block.samples:
                yield block.take()


class Parquet(Reader):
    """A row per sample; integer columns have one id a sample, columns of integer lists a bag."""

    def columns(self) -> list[Column]:
        """Return the columns of integers and of lists of integers."""
        types = _parquet_types()
        schema = self._file().schema_arrow
        found = [Column(f.name) for f in schema if _holds_ids(types, f.type)]
        if not found:
            had = ", ".join(f"{f.name}: {f.type}" for f in schema)
            raise TraceError(
                f"{self.path.name}: no column has integers or lists of integers; it has {had}"
            )
        return found

    def _file(self) -> Any:
        _parquet_types()
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(self.path)
        except (OSError, pyarrow.lib.ArrowInvalid) as error:
            raise TraceError(f"{self.path.name} is not a parquet file ({error})") from error

    def blocks(self, names: Sequence[str], size: int) -> Iterator[list[Bags]]:
        """Yield row groups as pyarrow reads them."""
        for batch in self._file().iter_batches(batch_size=size, columns=list(names)):
            found = [_arrow_bags(batch.column(name)) for name in names]
            for name, bags in zip(names, found, strict=True):
                if bags.ids.dtype.kind not in "iu":
                    raise TraceError(f"{self.path.name}: a list in column {name} misses an id")
            yield found


def _parquet_types() -> Any:
    try:
        import pyarrow.types
    except ImportError as error:
        raise TraceError("parquet files need pyarrow: pip install pyarrow") from error
    return pyarrow.types


def _holds_ids(types: Any, kind: Any) -> bool:
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind))


def _arrow_bags(column: Any) -> Bags:
    """Convert an arrow column to bags; a missing value is an empty bag."""
    types = _parquet_types()
    if types.is_integer(column.type):
        return Bags(
            column.drop_null().to_numpy(zero_copy_only=False),
            column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64),
        )
    lengths = np.array([0 if n is None else n for n in _value_lengths(column)], np.int64)
    return Bags(column.flatten().to_numpy(zero_copy_only=False), lengths)


def _value_lengths(column: Any) -> list[int | None]:
    import pyarrow.compute

    return list(pyarrow.compute.list_value_length(column).to_pylist())


class _Block:
    """Samples that are collected one by one into a block."""

    def __init__(self, tables: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(tables)]
        self.lengths: list[list[int]] = [[] for _ in range(tables)]
        self.samples = 0

    def add(self, sample: Sequence[Sequence[int]]) -> None:
        for ids, lengths, bag in zip(self.ids, self.lengths, sample, strict=True):
            ids.extend(bag)
            lengths.append(len(bag))
        self.samples += 1

    def take(self) -> list[Bags]:
        """Return the block's lookups and empty it."""
        found = [
            Bags(_integers(ids), np.array(lengths, np.int64))
            for ids, lengths in zip(self.ids, self.lengths, strict=True)
        ]
        self.__init__(len(self.ids))  # type: ignore[misc]
        return found


def _integers(values: list[int]) -> Integers:
    """Convert to int64, or uint64 where ids need the last bit."""
    try:
        if any(v > 2**63 - 1 for v in values):
            return np.array(values, np.uint64)
        return np.array(values, np.int64)
    except OverflowError:
        raise TraceError(
            f"ids must fit 64 bits, signed or not, got {min(values)} to {max(values)}"
        ) from None


def _hashed(text: str) -> list[int]:
    if not text:
        return []
    if not text.isalnum():  # int() takes signs, blanks and underscores
        raise ValueError(repr(text))
    return [int(text, 16)]


def _ids(text: str) -> list[int]:
    return [int(word) for word in SEPARATORS.split(text) if word]


def _summary(content: Any) -> str:
    if isinstance(content, tuple | list):
        parts = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in content]
        return f"{len(parts)} entries {json.dumps(parts[:4])}"
    return type(content).__name__


READERS: dict[Format, Callable[[Path], Reader]] = {
    Format.dlrm: Dlrm,
    Format.criteo: Criteo,
    Format.parquet: Parquet,
    Format.csv: Csv,
    Format.emblib: Recorded,
}
