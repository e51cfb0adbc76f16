"""Conversion of trained tables to read-only ones, and what it costs in accuracy."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from emblib.collections import EmbeddingBagCollection, EmbeddingCollection
from emblib.dynamic import CachedTTEmbeddingBags, DynamicEmbeddingBags
from emblib.inference.composed import ComposedEmbeddingBags, component_names
from emblib.inference.indexed import InferenceEmbeddingBags
from emblib.inference.served import (
    FORMAT_OF,
    InferenceCollection,
    InferenceEmbeddingBagCollection,
    InferenceEmbeddingCollection,
    ReadOnly,
    RowsByKey,
    convert,
    is_collection,
    readers_of,
)
from emblib.specs import BoundsCheck, DynamicSpec, TableSpec, check_count
from emblib.tables import QuantizedEmbeddingBags, RowFormat
from emblib.tables.quantized import FloatTables, Formats

_BLOCK_ROWS = 1 << 16  # rows that are compared at a time

# The runs of the change logs of a module, and whether their logs are open. The run of a closed log
# goes on to name the rows until another log begins: what follows in its sink is a snapshot.
_log_runs: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()

Collections = InferenceEmbeddingBagCollection | InferenceEmbeddingCollection


@overload
def for_inference(
    source: EmbeddingBagCollection,
    formats: Formats | None = None,
    *,
    output_dtype: torch.dtype | None = None,
) -> InferenceEmbeddingBagCollection: ...
@overload
def for_inference(
    source: EmbeddingCollection,
    formats: Formats | None = None,
    *,
    output_dtype: torch.dtype | None = None,
) -> InferenceEmbeddingCollection: ...
@overload
def for_inference(
    source: Any, formats: Formats | None = None, *, output_dtype: torch.dtype | None = None
) -> ReadOnly: ...
def for_inference(
    source: Any, formats: Formats | None = None, *, output_dtype: torch.dtype | None = None
) -> ReadOnly | Collections:
    """Copy trained tables into read-only ones, with the pooling, features and checks of the source.

    Keys of dynamic tables become an index before rows in the order of the keys; keys without a row
    read the default value, or their fallback row. Of a sharded collection all ranks must call this
    together, and each gets all rows; its tables must be dynamic ones.

    Args:
        source: `DynamicEmbeddingBags`, with or without a backing store; `CachedTTEmbeddingBags`;
            a source of `QuantizedEmbeddingBags.from_float` (a module of dense or tensor-train
            tables, `nn.EmbeddingBag`, `nn.Embedding` or a matrix); or a collection, whose result
            takes the same batches.
        formats: format of the rows of all tables, or of each; None keeps the dtype of the rows
            (float32 for one that no format has), or their format where they are quantised already.
        output_dtype: float32, float16 or bfloat16; None is the output dtype of `source`.

    Raises:
        TypeError: `source` or `formats` has another type, the tables are read-only already, or a
            table has rows on other ranks.
        ValueError: a format is unknown or does not hold the rows, quantised rows have another one,
            there is not one format per table, or `output_dtype` is another dtype.

    Example:
        >>> bags = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(1_000, 16, name="item")])
        >>> ids, offsets = torch.tensor([2**62, -7, 12]), torch.tensor([0, 2, 3])
        >>> pooled = bags(ids, offsets)  # inserts 3 keys
        >>> served = emblib.inference.for_inference(bags, "int8")
        >>> bool(torch.allclose(served(ids, offsets), bags.eval()(ids, offsets), atol=0.02))
        True
    """
    if isinstance(source, ReadOnly | InferenceCollection):
        raise TypeError("the tables are read-only already; convert those that they were made of")
    modules = source.modules() if isinstance(source, nn.Module) else ()
    runs = {run for module in modules for run in _log_runs.get(module, ())}
    served = _convert(source, formats, output_dtype)
    for part in served.parts if isinstance(served, InferenceCollection) else [served]:
        _rows_module(part).log_runs = tuple(sorted(runs))
    return served


def begin_log_run(model: nn.Module, run: str) -> None:
    """Note that a change log of a model begins a run."""
    for module in model.modules():
        open_runs = [known for known, is_open in _log_runs.get(module, {}).items() if is_open]
        _log_runs[module] = dict.fromkeys([*open_runs, run], True)


def end_log_run(model: nn.Module, run: str) -> None:
    """Note that a change log of a model ended a run: it begins another, or is closed."""
    for module in model.modules():
        if run in _log_runs.get(module, {}):
            _log_runs[module][run] = False


def _convert(
    source: Any, formats: Formats | None, output_dtype: torch.dtype | None
) -> ReadOnly | Collections:
    """See `for_inference`."""
    if isinstance(source, DynamicEmbeddingBags):
        return _convert_dynamic(source, formats, output_dtype)
    if is_collection(source):
        return convert(source, formats, output_dtype)
    tables = _float_tables(source)
    return QuantizedEmbeddingBags.from_float(
        tables,
        formats=_formats_of(tables) if formats is None else formats,
        output_dtype=output_dtype,
        bounds_check=getattr(source, "bounds_check", BoundsCheck.WARNING),
        include_last_offset=getattr(source, "include_last_offset", True),
    )


def _float_tables(source: Any) -> FloatTables:
    """Describe the tables of a module whose ids are row numbers."""
    if not isinstance(source, CachedTTEmbeddingBags):
        return FloatTables.from_source(source)
    blocks: Any = source  # yields rows as tensor trains do, stored ones included
    return FloatTables(
        [TableSpec(spec.rows, spec.dim, spec.name) for spec in source.tables],
        blocks,
        source.pooling,
        source.feature_tables,
        source.precision.output,
        source.features.device,
    )


def _formats_of(tables: FloatTables) -> list[RowFormat]:
    """Return the formats that keep the dtypes of the rows; float32 for a dtype without a format."""
    return [FORMAT_OF.get(dtype, RowFormat.FP32) for dtype in tables.dtypes()]


def _convert_dynamic(
    source: DynamicEmbeddingBags, formats: Formats | None, output_dtype: torch.dtype | None
) -> InferenceEmbeddingBags:
    """Copy the rows of dynamic tables in the order of their keys, and make an index of the keys."""
    specs, tensors, indexes = [], [], []
    for rows_by_key, spec in _dynamic_tables(source):
        index, rows = rows_by_key.make_index()
        indexes.append(index)
        tensors.append(rows)
        specs.append(TableSpec(max(rows.size(0), 1), spec.dim, spec.name))
    tables = FloatTables(
        specs,
        tensors,
        source.pooling,
        source.feature_tables,
        source.output_dtype if output_dtype is None else output_dtype,
        source.hyperparams.device,
    )
    quantized = QuantizedEmbeddingBags.from_float(
        tables,
        formats=_formats_of(tables) if formats is None else formats,
        bounds_check=BoundsCheck.WARNING,
        include_last_offset=source.include_last_offset,
    )
    return InferenceEmbeddingBags(quantized, indexes)


def _dynamic_tables(source: DynamicEmbeddingBags) -> Iterator[tuple[RowsByKey, DynamicSpec]]:
    """Yield keys with rows, and the spec, of each dynamic table."""
    handles = source.table_handles()
    for name, spec in zip(source.table_names, source.tables, strict=True):
        yield RowsByKey.of(handles[name], spec.default_value), spec


class QuantizationError(NamedTuple):
    """The errors of a table's rows, which its format causes.

    Attributes:
        table: name of the table; of a component, `table.component`, where ids share rows.
        format: format of its rows.
        rows: number of rows that were compared.
        nbytes: bytes of the read-only table without its index.
        largest: largest error of a value; it is 0 for equal infinities, and for NaN in both.
        rms: root mean square of the errors.
        relative: norm of the errors of pooled outputs, sums of `bag` rows drawn at random, divided
            by the norm of these outputs; 0 if that norm is 0, or there are fewer than `bag` rows;
            NaN if one of these outputs is.
    """

    table: str
    format: RowFormat
    rows: int
    nbytes: int
    largest: float
    rms: float
    relative: float


def quantization_errors(
    source: nn.Module | Any, served: ReadOnly | Collections, *, bag: int = 16, seed: int = 0
) -> list[QuantizationError]:
    """Compare the rows of read-only tables with the rows that they were made of.

    Args:
        source: the trained tables, the argument of `for_inference`.
        served: the result of `for_inference`.
        bag: rows of a pooled output, >= 1.
        seed: seed of the draw of bags.

    Raises:
        TypeError: `for_inference` does not take the source, the tables are not read-only ones of
            its kind, or `bag` is not an int.
        ValueError: the tables differ in size, in number or, in collections, in name; or `bag` is
            below 1.

    Example:
        >>> weights = torch.randn(1_000, 16, generator=torch.Generator().manual_seed(0))
        >>> served = emblib.inference.for_inference({"item": weights}, "int4")
        >>> (error,) = emblib.inference.quantization_errors({"item": weights}, served)
        >>> error.table, error.nbytes, 0.05 < error.relative < 0.1
        ('item', 12000, True)
    """
    check_count("bag", bag)
    errors = []
    generator = torch.Generator().manual_seed(seed)
    for name, blocks, module, table, num_shared in _tables_to_compare(source, served):
        sums, dim = _ErrorSums(generator, bag), module.tables[table].dim
        for block in blocks:
            if block.size(1) != dim:
                raise ValueError(f"table {name!r} has dim {dim}, in the source {block.size(1)}")
            if sums.num_rows + block.size(0) > module.tables[table].rows:
                raise ValueError(f"table {name!r} has fewer rows than the source: was it pruned?")
            sums.add(block, module.dense_rows(table, sums.num_rows, block.size(0)))
        if max(sums.num_rows + num_shared, 1) < module.tables[table].rows:
            raise ValueError(f"table {name!r} has more rows than the source: is it of another one?")
        errors.append(sums.result(name, module, table))
    return errors


def _tables_to_compare(
    source: Any, served: ReadOnly | Collections
) -> Iterator[tuple[str, Iterable[Tensor], QuantizedEmbeddingBags, int, int]]:
    """Yield each table: name, blocks of trained rows, module, and its index in the module.

    The last entry is the number of stored rows that keys without a row share; these rows are not
    compared.
    """
    if not isinstance(served, ReadOnly | InferenceCollection):
        raise TypeError(f"served must be a result of for_inference, got {type(served).__name__}")
    if isinstance(served, InferenceCollection):
        if not is_collection(source):
            raise TypeError(
                f"source must be a collection, as served is, got {type(source).__name__}"
            )
        readers = readers_of(source)
        for part in served.parts:
            module = _rows_module(part)
            any_part: Any = part
            names = module.table_names
            if isinstance(part, ComposedEmbeddingBags):
                names = component_names(any_part.tables, any_part.storages)
            for table, name in enumerate(names):
                if name not in readers:
                    raise ValueError(f"the source has no table {name!r}, only {sorted(readers)}")
                rows_by_key = readers[name].rows_by_key
                num_shared = 0 if rows_by_key is None else rows_by_key.shared_rows.size(0)
                yield name, readers[name].blocks(), module, table, num_shared
        return
    module = _rows_module(served)
    tables = None if isinstance(source, DynamicEmbeddingBags) else _float_tables(source)
    num_tables = len(source.tables if tables is None else tables.specs)
    if num_tables != len(module.tables):
        raise ValueError(f"the source has {num_tables} tables, served are {len(module.tables)}")
    if tables is None:
        for table, (rows_by_key, _) in enumerate(_dynamic_tables(source)):
            num_shared = rows_by_key.shared_rows.size(0)
            blocks = rows_by_key.rows.split(_BLOCK_ROWS)
            yield module.table_names[table], blocks, module, table, num_shared
        return
    for table, name in enumerate(module.table_names):
        yield name, tables.blocks(table), module, table, 0


def _rows_module(part: Any) -> QuantizedEmbeddingBags:
    """Return the module that stores the rows of read-only tables."""
    rows: QuantizedEmbeddingBags = getattr(part, "rows", part)
    return rows


class _ErrorSums:
    """Sums of the errors of a table, over its blocks of rows; `bag` rows are pooled at a time."""

    def __init__(self, generator: torch.Generator, bag: int) -> None:
        self._generator, self._bag = generator, bag
        self.num_rows = self._num_values = 0
        # The largest error, and sums of squares.
        self._max_error = self._error_squares = 0.0
        self._pooled_error_squares = self._pooled_squares = 0.0

    def add(self, exact: Tensor, served: Tensor) -> None:
        """Add the trained and the read-only values, `[n, dim]`, of a block of rows."""
        exact, served = exact.detach().double().cpu(), served.double().cpu()
        # The difference of equal infinities is NaN, as that of NaN and NaN is.
        is_equal = (exact == served) | (exact.isnan() & served.isnan())
        errors = (served - exact).masked_fill(is_equal, 0.0)
        self.num_rows += exact.size(0)
        self._num_values += exact.numel()
        if exact.numel():
            self._max_error = max(self._max_error, float(errors.abs().amax()))
        self._error_squares += float(errors.square().sum())
        order = torch.randperm(exact.size(0), generator=self._generator, device="cpu")
        bags = order[: len(order) // self._bag * self._bag].view(-1, self._bag)
        self._pooled_error_squares += float(errors[bags].sum(1).square().sum())
        self._pooled_squares += float(exact[bags].sum(1).square().sum())

    def result(self, name: str, module: QuantizedEmbeddingBags, table: int) -> QuantizationError:
        """Return the errors of the table."""
        nbytes = module.table_views()[table]["packed"].nbytes
        rms = (self._error_squares / max(self._num_values, 1)) ** 0.5
        relative = 0.0
        if self._pooled_squares:
            relative = (self._pooled_error_squares / self._pooled_squares) ** 0.5
        format = module.formats[table]
        return QuantizationError(
            name, format, self.num_rows, nbytes, self._max_error, rms, relative
        )
