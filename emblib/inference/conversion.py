"""Conversion of trained tables to read-only ones, and what it costs in accuracy."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.dynamic import DynamicEmbeddingBags
from emblib.inference.indexed import InferenceEmbeddingBags, RowIndex
from emblib.specs import BoundsCheck, TableSpec
from emblib.tables import QuantizedEmbeddingBags, RowFormat
from emblib.tables.quantized import FloatTables, Formats

_CHUNK = 1 << 16  # rows that are compared at a time
_FORMAT_OF = {
    torch.float32: RowFormat.FP32,
    torch.float16: RowFormat.FP16,
    torch.bfloat16: RowFormat.BF16,
}

ReadOnly = QuantizedEmbeddingBags | InferenceEmbeddingBags


def for_inference(
    source: Any, formats: Formats | None = None, *, output_dtype: torch.dtype | None = None
) -> ReadOnly:
    """Copy trained tables into read-only ones.

    Keys of dynamic tables become an index before rows in the order of the keys, and those without a
    row read the default value. Of dynamic tables that are sharded over ranks, all ranks call this
    together, and each gets all rows.

    Args:
        source: `DynamicEmbeddingBags`, sharded or not, with or without a backing store, or what
            `QuantizedEmbeddingBags.from_float` takes: modules of plain and tensor-train tables,
            `nn.EmbeddingBag`, `nn.Embedding`, matrices.
        formats: format of the rows of all tables, or of each; None keeps the dtype of the rows.
        output_dtype: dtype of the output; None is that of the source.

    Raises:
        TypeError: another source.
        ValueError: rows that the format does not hold.

    Example:
        >>> bags = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(1_000, 16, name="item")])
        >>> ids, offsets = torch.tensor([2**62, -7, 12]), torch.tensor([0, 2, 3])
        >>> pooled = bags(ids, offsets)  # inserts 3 keys
        >>> served = emblib.inference.for_inference(bags, "int8")
        >>> bool(torch.allclose(served(ids, offsets), bags.eval()(ids, offsets), atol=0.02))
        True
    """
    if isinstance(source, QuantizedEmbeddingBags | InferenceEmbeddingBags):
        raise TypeError("the tables are read-only already; convert those that they were made of")
    if isinstance(source, DynamicEmbeddingBags):
        return _of_dynamic(source, formats, output_dtype)
    if formats is None:
        formats = _formats_of(FloatTables.of(source))
    return QuantizedEmbeddingBags.from_float(source, formats=formats, output_dtype=output_dtype)


def _formats_of(tables: FloatTables) -> list[RowFormat]:
    """Return the formats that keep the dtypes of the rows."""
    return [_FORMAT_OF[dtype] for dtype in tables.dtypes()]


def _of_dynamic(
    source: DynamicEmbeddingBags, formats: Formats | None, output_dtype: torch.dtype | None
) -> InferenceEmbeddingBags:
    specs, tensors, indexes = [], [], []
    for keys, weights, spec in _dynamic_tables(source):
        default = weights.new_full((1, spec.dim), spec.default_value)
        reads_zeros = spec.default_value == 0.0
        indexes.append(RowIndex.of_keys(keys, missing=-1 if reads_zeros else keys.numel()))
        tensors.append(weights if reads_zeros else torch.cat([weights, default]))
        specs.append(TableSpec(max(tensors[-1].size(0), 1), spec.dim, spec.name))
    tables = FloatTables(
        specs,
        tensors,
        source.pooling,
        source.feature_tables,
        source.output_dtype if output_dtype is None else output_dtype,
        source.hyperparams.device,
    )
    rows = QuantizedEmbeddingBags.from_float(
        tables,
        formats=_formats_of(tables) if formats is None else formats,
        bounds_check=BoundsCheck.WARNING,
        include_last_offset=source.include_last_offset,
    )
    return InferenceEmbeddingBags(rows, indexes)


def _dynamic_tables(source: DynamicEmbeddingBags) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """Yield keys, rows and spec of each dynamic table, in the order of the keys."""
    handles = source.table_handles()
    for name, spec in zip(source.table_names, source.tables, strict=True):
        entries = handles[name].entries()
        order = entries.keys.argsort()
        yield entries.keys[order], entries.rows["weight"][order].detach(), spec


class QuantizationError(NamedTuple):
    """Errors that the format of a table causes.

    Attributes:
        table: name of the table.
        format: format of its rows.
        rows: number of rows that were compared.
        nbytes: bytes of the read-only table without its index.
        largest: largest error of a value.
        rms: root mean square of the errors.
        relative: norm of the errors of pooled outputs, sums of `bag` rows drawn at random, divided
            by the norm of these outputs.
    """

    table: str
    format: RowFormat
    rows: int
    nbytes: int
    largest: float
    rms: float
    relative: float


def quantization_errors(
    source: nn.Module | Any, served: ReadOnly, *, bag: int = 16, seed: int = 0
) -> list[QuantizationError]:
    """Compare the rows of read-only tables with those that they were made of.

    Args:
        source: the trained tables, as they were given to `for_inference`.
        served: the tables that it returned.
        bag: rows of a pooled output.
        seed: seed of the draw of bags.

    Raises:
        ValueError: tables of other sizes.

    Example:
        >>> weights = torch.randn(1_000, 16, generator=torch.Generator().manual_seed(0))
        >>> served = emblib.inference.for_inference({"item": weights}, "int4")
        >>> (error,) = emblib.inference.quantization_errors({"item": weights}, served)
        >>> error.table, error.nbytes, 0.05 < error.relative < 0.1
        ('item', 12000, True)
    """
    rows = served.rows if isinstance(served, InferenceEmbeddingBags) else served
    dynamic, tables = [], None
    if isinstance(source, DynamicEmbeddingBags):
        dynamic = [weights for _, weights, _ in _dynamic_tables(source)]
    else:
        tables = FloatTables.of(source)
    errors = []
    generator = torch.Generator().manual_seed(seed)
    for table, name in enumerate(rows.table_names):
        blocks = dynamic[table].split(_CHUNK) if tables is None else tables.blocks(table)
        sums = _ErrorSums(generator, bag)
        for block in blocks:
            if sums.rows + block.size(0) > rows.tables[table].rows:
                raise ValueError(f"table {name!r} has fewer rows than the source: was it pruned?")
            sums.add(block, rows.dense_rows(table, sums.rows, block.size(0)))
        errors.append(sums.result(name, rows, table))
    return errors


class _ErrorSums:
    """Sums of the errors of a table, over its blocks of rows."""

    def __init__(self, generator: torch.Generator, bag: int) -> None:
        self._generator, self._bag = generator, bag
        self.rows = self._values = 0
        self._largest = self._squares = self._pooled_errors = self._pooled = 0.0

    def add(self, exact: Tensor, served: Tensor) -> None:
        """Add a block of rows and what is served for it."""
        exact = exact.detach().double().cpu()
        error = served.double().cpu() - exact
        self.rows += exact.size(0)
        self._values += exact.numel()
        if exact.numel():
            self._largest = max(self._largest, float(error.abs().amax()))
        self._squares += float(error.square().sum())
        order = torch.randperm(exact.size(0), generator=self._generator)
        bags = order[: len(order) // self._bag * self._bag].view(-1, self._bag)
        self._pooled_errors += float(error[bags].sum(1).square().sum())
        self._pooled += float(exact[bags].sum(1).square().sum())

    def result(self, name: str, rows: QuantizedEmbeddingBags, table: int) -> QuantizationError:
        """Return the errors of the table."""
        nbytes = rows.table_views()[table]["packed"].nbytes
        rms = (self._squares / max(self._values, 1)) ** 0.5
        relative = (self._pooled_errors / self._pooled) ** 0.5 if self._pooled else 0.0
        format = rows.formats[table]
        return QuantizationError(name, format, self.rows, nbytes, self._largest, rms, relative)
