"""Read-only tables: the interface of their contenders, emblib's inference tables and PyTorch's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import emblib
from experiments.contenders.base import join_columns
from experiments.workloads.workload import Batch, TableShape

Feature = tuple[Tensor, Tensor]  # ids [lookups] and offsets [B + 1] of one table


class ServedTables(ABC):
    """Read-only tables with one feature each, in one format. `lookup` is timed.

    Several threads call `lookup` at once. `open` is timed too, as a part of a cold start.

    Attributes:
        bits: bits per value; 32 for float32.
    """

    bits: ClassVar[int]

    def __init__(self, shapes: Sequence[TableShape]) -> None:
        self.shapes = tuple(shapes)

    @abstractmethod
    def fill(self, weights: Sequence[Tensor]) -> None:
        """Convert trained tables, float32 [rows, dim] each, to the format, for `lookup`.

        Tables that need no conversion are used without a copy: the caller must not change them.
        """

    def prepare(self, batch: Batch) -> Any:
        """Return the ids and offsets of a request, as `lookup` takes them."""
        return batch.indices, batch.offsets

    @abstractmethod
    def lookup(self, prepared: Any) -> Tensor:
        """Return the sums of the rows of each bag, float32 [B, sum D]."""

    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of all rows."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the tables of `fill` to a file."""

    @abstractmethod
    def open(self, path: Path) -> None:
        """Open a file for `lookup`; `save` of an object with equal shapes wrote it.

        `fill` need not have been called.
        """


class Fp32(ServedTables):
    """emblib's inference tables, frozen into a file that is opened by mapping it."""

    bits = 32
    format: ClassVar[str] = "float32"

    def fill(self, weights: Sequence[Tensor]) -> None:
        rows_by_name = {f"table{number}": rows for number, rows in enumerate(weights)}
        self.tables: Any = emblib.inference.for_inference(rows_by_name, self.format)

    def lookup(self, prepared: Feature) -> Tensor:
        return self.tables(*prepared)

    def nbytes(self) -> int:
        return sum(self.tables.nbytes().values())

    def save(self, path: Path) -> None:
        emblib.freeze(self.tables, path)

    def open(self, path: Path) -> None:
        self.tables = emblib.open_frozen(path)


class Int8(Fp32):
    """emblib's inference tables with rows of 8-bit integers."""

    bits, format = 8, "int8"


class Int4(Fp32):
    """emblib's inference tables with rows of 4-bit integers."""

    bits, format = 4, "int4"


class PackedTables(ServedTables):
    """Base of tables that are converted one by one, and stored in a file of torch.save.

    Attributes:
        packed_tables: converted tables; set by `_load`.
    """

    packed_tables: list[Any]

    def fill(self, weights: Sequence[Tensor]) -> None:
        self._load([self._pack(rows) for rows in weights])

    def save(self, path: Path) -> None:
        torch.save(self.packed_tables, path)

    def open(self, path: Path) -> None:
        self._load(torch.load(path))

    @abstractmethod
    def _pack(self, rows: Tensor) -> Any:
        """Return a table in the format."""

    @abstractmethod
    def _load(self, packed_tables: list[Any]) -> None:
        """Make converted tables ready for lookups."""


class TorchFp32(PackedTables):
    """torch.nn.EmbeddingBag, one per table."""

    bits = 32

    def prepare(self, batch: Batch) -> list[Feature]:
        return [batch.feature(table) for table in range(len(self.shapes))]

    def lookup(self, prepared: list[Feature]) -> Tensor:
        return join_columns(
            [self._lookup_table(table, *feature) for table, feature in enumerate(prepared)]
        )

    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.packed_tables)

    def _pack(self, rows: Tensor) -> Tensor:
        return rows

    def _load(self, packed_tables: list[Tensor]) -> None:
        self.packed_tables = packed_tables
        self.bags = [
            nn.EmbeddingBag.from_pretrained(table, mode="sum", include_last_offset=True)
            for table in packed_tables
        ]

    def _lookup_table(self, table: int, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.bags[table](ids, offsets)


class TorchInt8(TorchFp32):
    """The operators of torch.ao.nn.quantized.EmbeddingBag, one call per table, 8 bits."""

    bits = 8
    operator_prefix: ClassVar[str] = "embedding_bag_byte"

    def _pack(self, rows: Tensor) -> Tensor:
        return getattr(torch.ops.quantized, f"{self.operator_prefix}_prepack")(rows)

    def _load(self, packed_tables: list[Tensor]) -> None:
        self.packed_tables = packed_tables
        self.operator = getattr(torch.ops.quantized, f"{self.operator_prefix}_rowwise_offsets")

    def _lookup_table(self, table: int, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.operator(self.packed_tables[table], ids, offsets, include_last_offset=True)


class TorchInt4(TorchInt8):
    """PyTorch's quantised operators, one call per table, 4 bits."""

    bits, operator_prefix = 4, "embedding_bag_4bit"
