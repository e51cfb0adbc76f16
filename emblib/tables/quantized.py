"""Quantised tables: T read-only tables of 2 to 32 bits per value, looked up in one kernel.

All rows are in one uint8 buffer `packed`, table after table. A row has a scale and an offset in
float16 before its numbers, or is floats alone; the format of its table decides. Kernels dequantise
rows as they pool them. `FloatTables` describes what `QuantizedEmbeddingBags.from_float` converts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.attribute_errors import shows_attribute_errors
from emblib.columns import FeatureColumn, FeatureRow, RowFormatCode
from emblib.ops import codes, quant
from emblib.ops.derivatives import refuse_transforms
from emblib.ops.one_call import c_function
from emblib.specs import (
    FLOAT_DTYPES,
    BoundsCheck,
    OptionEnum,
    Placement,
    Pooling,
    TableSpec,
    check_bool,
    check_float_dtype,
    check_sequence,
)
from emblib.tables import base, batches, optimizer_hooks, state_dicts
from emblib.tables.base import check_features, table_numbers, warn_of_dtype
from emblib.tables.parameters import refuse_averages
from emblib.tables.short_calls import LookupBoundsCheck, can_serve_inputs
from emblib.tables.tbe import TableBatchedEmbeddingBags
from emblib.tables.tt import TableBatchedTTEmbeddingBags

_lookup_checked = c_function(quant.quant_lookup_checked_)
_BLOCK_ROWS = 1 << 16  # rows that are quantised or dequantised at a time
FORMER_ENTRIES = ("values", "scales")
"""The entries of a table in state dicts from before 0.1.0."""


class RowFormat(OptionEnum):
    """Format of the rows of a table that is not trained.

    INT2, INT4 and INT8 are integers between the minimum and the maximum of a row, FP8_E4M3 and
    FP8_E5M2 floats of 8 bits with 3 or 2 bits of mantissa; their rows begin with a scale and an
    offset in float16. Rows of FP16, BF16 and FP32 are floats alone.

    Example:
        >>> tables = [emblib.TableSpec(100, 16, "item"), emblib.TableSpec(100, 16, "user")]
        >>> served = emblib.QuantizedEmbeddingBags(tables, formats=["int4", "float8_e4m3"])
        >>> served.formats
        (<RowFormat.INT4: 'int4'>, <RowFormat.FP8_E4M3: 'float8_e4m3'>)
    """

    INT2 = "int2"
    INT4 = "int4"
    INT8 = "int8"
    FP8_E4M3 = "float8_e4m3"
    FP8_E5M2 = "float8_e5m2"
    FP16 = "float16"
    BF16 = "bfloat16"
    FP32 = "float32"

    @property
    def code(self) -> int:
        """Return the code that ops take, see `emblib.ops.quant`."""
        return RowFormatCode[self.name]


Formats = RowFormat | str | Sequence[RowFormat | str]
"""One format for all tables, or one per table."""


def formats_of(num_tables: int, bits: int | None, formats: Formats | None) -> tuple[RowFormat, ...]:
    """Return the format of each table: integers of `bits` bits, or `formats`; INT8 for neither.

    Raises:
        TypeError: `formats` is neither a format nor a sequence.
        ValueError: both arguments are set, `bits` or a format is unknown, or there is not one
            format per table.
    """
    if formats is None:
        bits = 8 if bits is None else bits
        if bits not in (2, 4, 8):
            raise ValueError(f"bits must be 8, 4 or 2, got {bits!r}; formats= has the other ones")
        return (RowFormat(f"int{bits}"),) * num_tables
    if bits is not None:
        raise ValueError(f"pass bits or formats, got both, {bits} and {formats!r}")
    if isinstance(formats, RowFormat | str):
        return (RowFormat(formats),) * num_tables
    if not isinstance(formats, Sequence):
        raise TypeError(
            "formats must be a RowFormat or its name, e.g. 'int8' or 'float16', or a sequence with "
            f"one per table, got {formats!r}"
        )
    if len(formats) != num_tables:
        raise ValueError(f"formats must have one entry per table, {num_tables}, got {len(formats)}")
    return tuple(RowFormat(format) for format in formats)


class _TableLocation(NamedTuple):
    """The bytes and rows of a table in the memory of a module.

    Attributes:
        begin: first byte of the table.
        first_row: rows of the tables before it.
        rows, dim: shape of the table.
        format_code: code of the format, see `emblib.columns.RowFormatCode`.
        row_bytes: bytes of a row.
    """

    begin: int
    first_row: int
    rows: int
    dim: int
    format_code: int
    row_bytes: int

    def feature(self, column: int, *, is_mixed: bool) -> FeatureRow:
        """Return the row of `features` of a feature of this table."""
        return FeatureRow(
            weight_offset=self.begin,
            row_base=self.first_row,
            rows=self.rows,
            dim=self.dim,
            column=column,
            tier=self.format_code if is_mixed else 0,
            state_base=self.first_row,
        )

    def view(self, packed: Tensor) -> Tensor:
        """Return the view `[rows, row_bytes]` of this table in the module's `packed`."""
        num_bytes = self.rows * self.row_bytes
        return packed[self.begin : self.begin + num_bytes].view(self.rows, self.row_bytes)


class QuantizedEmbeddingBags(nn.Module):
    """Look up F features in T quantised tables at once, and pool them into `[B, sum D]`.

    A row of integers is a scale and an offset in float16 and D numbers, side by side in memory;
    value = scale * number + offset. A value is off by up to half a scale, about the difference
    between the largest and the smallest value of its row over 510 with 8 bits, or 30 with 4
    (`emblib.ops.quant` has the bounds of all formats). Sums are float32. Rows are zeros until
    `write_rows`, `from_float` or `load_state_dict` fill them; nothing here has a gradient. Any
    number of threads may look up at the same time, as long as none writes (docs/threads.md).

    Args:
        tables: rows, dim and name of each table; their placement must be DEVICE.
        bits: bits per integer, 8, 4 or 2; None is 8 unless there are `formats`.
        pooling: SUM, MEAN, or NONE for one vector per lookup (needs one dim for all tables).
        feature_tables: the table of each feature; by default feature i reads table i.
        output_dtype: float32, float16 or bfloat16.
        bounds_check: reaction to invalid indices and offsets, see `BoundsCheck`.
        device: device of the tables and their lookups; None is torch's default device.
        include_last_offset: False for offsets without their last entry, the number of indices, as
            `nn.EmbeddingBag` takes them.
        formats: format of the rows of all tables, or of each, instead of `bits`.

    Raises:
        TypeError: a table is not a `TableSpec`, or `formats` is neither a format nor a sequence.
        ValueError: `bits` or a format is unknown, or both are set; a placement is not DEVICE, the
            output dtype is unknown, table names are equal, dims differ without pooling, or a
            feature reads a missing table.

    Example:
        >>> trained = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(1_000, 64, "item")])
        >>> served = emblib.QuantizedEmbeddingBags.from_float(trained, bits=8)
        >>> ids, offsets = torch.tensor([3, 14, 15]), torch.tensor([0, 2, 3])
        >>> bool(torch.allclose(served(ids, offsets), trained(ids, offsets), atol=1e-3))
        True
        >>> sum(served.nbytes().values()), trained.nbytes()["weights"]
        (68032, 256000)
    """

    packed: Tensor  # uint8 `[bytes]`, rows of all tables
    features: Tensor  # int64 `[F, 8]`, see `FeatureColumn`
    bounds_violations: Tensor  # int64 `[2]`, invalid indices and offsets so far
    _feature_rows: list[FeatureRow]  # the values of `features`
    _lookup_check: LookupBoundsCheck | None = None
    feature_labels: list[str] | None = None  # names for messages, which a collection sets
    log_runs: tuple[str, ...] = ()  # `ChangeLog.run` of the logs whose rows these are

    def __init__(
        self,
        tables: Sequence[TableSpec],
        bits: int | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        output_dtype: torch.dtype = torch.float32,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
        formats: Formats | None = None,
    ) -> None:
        super().__init__()
        check_bool("include_last_offset", include_last_offset)
        self.include_last_offset = include_last_offset
        self.tables = (tables,) if isinstance(tables, TableSpec) else tuple(tables)
        self.formats = formats_of(len(self.tables), bits, formats)
        # `RowFormatCode` of all tables; < 0 if they differ, and then `features` has the codes.
        self.format_code = quant.format_argument(format.code for format in self.formats)
        self.pooling = Pooling(pooling)
        self.feature_tables = table_numbers(feature_tables, len(self.tables))
        self.output_dtype = output_dtype
        self.bounds_check = BoundsCheck(bounds_check)
        check_float_dtype("output_dtype", output_dtype)
        self._check_arguments()
        self.table_names = base.table_names([spec.name for spec in self.tables])
        device = torch.empty(0, device=device).device
        ops.require_kernels(device)
        self._lay_out()
        self._allocate(device)

    def _check_arguments(self) -> None:
        for t, spec in enumerate(self.tables):
            if not isinstance(spec, TableSpec):
                raise TypeError(f"tables[{t}] must be a TableSpec, got {spec!r}")
            if spec.placement is not Placement.DEVICE:
                raise ValueError(
                    f"quantised tables are on the device of the module, tables[{t}] asks for "
                    f"{spec.placement}: move the module with .to(device)"
                )
        check_features(self.tables, self.feature_tables, self.pooling)

    def _lay_out(self) -> None:
        """Assign each table its bytes in `packed`, and each feature its columns."""
        self._locations: list[_TableLocation] = []
        first_byte = first_row = 0
        for spec, format in zip(self.tables, self.formats, strict=True):
            self._locations.append(
                _TableLocation(
                    begin=first_byte,
                    first_row=first_row,
                    rows=spec.rows,
                    dim=spec.dim,
                    format_code=format.code,
                    row_bytes=quant.row_bytes(spec.dim, format.code),
                )
            )
            first_byte += quant.table_bytes(spec.rows, spec.dim, format.code)
            first_row += spec.rows
        self._num_bytes, self.total_rows = first_byte, first_row
        self._dims = [self.tables[t].dim for t in self.feature_tables]
        is_unpooled = self.pooling is Pooling.NONE
        self.output_dim = max(self._dims, default=0) if is_unpooled else sum(self._dims)
        column, self._feature_rows = 0, []
        for t in self.feature_tables:
            location = self._locations[t]
            self._feature_rows.append(location.feature(column, is_mixed=self.format_code < 0))
            column += 0 if is_unpooled else location.dim

    def _allocate(self, device: torch.device) -> None:
        """Allocate the packed rows and the buffers on a device."""
        packed = ops.empty_table((self._num_bytes,), torch.uint8, device)
        self.register_buffer("packed", packed, persistent=False)
        violations = torch.zeros(2, dtype=torch.int64, device=device)
        self.register_buffer("bounds_violations", violations, persistent=False)
        self.register_buffer("features", self._make_features(device), persistent=False)
        self.reset_parameters()

    def _make_features(self, device: torch.device) -> Tensor:
        """Return `features`, int64 `[F, 8]`, on a device."""
        return torch.tensor(self._feature_rows, dtype=torch.int64, device=device).view(
            -1, len(FeatureColumn)
        )

    def reset_parameters(self) -> None:
        """Zero all rows and the counts of violations, also after `to_empty` of a module on meta."""
        self.packed.zero_()
        self.bounds_violations.zero_()

    def with_rows(
        self, rows: Sequence[int], *, device: torch.device | str | None = None
    ) -> "QuantizedEmbeddingBags":
        """Return tables of zeros with other numbers of rows, and without `feature_labels`.

        Args:
            rows: rows of each table, a sequence; ValueError for another number of tables.
            device: device of the result; None uses the device of these tables.
        """
        rows = check_sequence("rows", rows, "[100]")
        if len(rows) != len(self.tables):
            raise ValueError(f"rows must be one number per table, {len(self.tables)}, got {rows}")
        specs = [
            TableSpec(num_rows, spec.dim, spec.name)
            for num_rows, spec in zip(rows, self.tables, strict=True)
        ]
        return QuantizedEmbeddingBags(
            specs,
            pooling=self.pooling,
            feature_tables=self.feature_tables,
            output_dtype=self.output_dtype,
            bounds_check=self.bounds_check,
            device=self.packed.device if device is None else device,
            include_last_offset=self.include_last_offset,
            formats=self.formats,
        )

    @classmethod
    def from_float(
        cls,
        source: "nn.Module | Tensor | Mapping[str, Tensor] | FloatTables",
        bits: int | None = None,
        *,
        output_dtype: torch.dtype | None = None,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        device: torch.device | str | None = None,
        include_last_offset: bool | None = None,
        formats: Formats | None = None,
    ) -> "QuantizedEmbeddingBags":
        """Quantise the rows of `source`.

        Besides the source, it needs memory for the result and for 65,536 rows.

        Args:
            source: `TableBatchedEmbeddingBags`, `TableBatchedTTEmbeddingBags`, `TTEmbeddingBag`,
                `nn.EmbeddingBag` (sum or mean) or `nn.Embedding` (pooling NONE), whose tables,
                features and pooling are kept; a matrix `[R, D]`, or several by name, which are
                pooled by SUM; or `FloatTables`.
            bits: bits per integer, 8, 4 or 2; None is 8 unless there are `formats`.
            output_dtype: dtype of the output; None keeps the dtype of a table module, else float32.
            bounds_check: reaction to invalid input, as in the constructor.
            device: device of the copy; None uses the device of the source.
            include_last_offset: form of the offsets, as in the constructor; None keeps the form of
                the source, and is True for a source without offsets.
            formats: format of the rows of all tables, or of each, instead of `bits`.

        Raises:
            TypeError: the source is of another class, has a `max_norm`, or is a bag with
                `padding_idx` or of mode max.
            ValueError: see the constructor and `write_rows`.
        """
        if include_last_offset is None:
            include_last_offset = getattr(source, "include_last_offset", True)
        tables = FloatTables.from_source(source)
        quantized = cls(
            tables.specs,
            bits,
            pooling=tables.pooling,
            feature_tables=tables.feature_tables,
            output_dtype=tables.output_dtype if output_dtype is None else output_dtype,
            bounds_check=bounds_check,
            device=tables.device if device is None else device,
            include_last_offset=include_last_offset,
            formats=formats,
        )
        for table in range(len(tables.specs)):
            first_row = 0
            for block in tables.blocks(table):
                quantized.write_rows(table, block, first_row)
                first_row += len(block)
        return quantized

    def table_number(self, table: int | str) -> int:
        """Return the number of a table that is given by number or name.

        Raises:
            KeyError, IndexError: there is no such table.
            TypeError: neither a number nor a name.
        """
        return base.table_number(self.table_names, table)

    def write_rows(self, table: int | str, weights: Tensor, first_row: int = 0) -> None:
        """Quantise `weights` `[rows, dim]` into a table, from `first_row` on.

        They are of any real dtype and on any device. If an error is raised, nothing is written.

        Raises:
            KeyError, IndexError: there is no such table, see `table_number`.
            TypeError: `weights` is not a tensor, or `table` is neither a number nor a name.
            ValueError: the rows have another dim, are out of range, complex or sparse; or values
                are not finite or exceed the range of float16, +-65504, unless the format is BF16 or
                FP32.
        """
        batches.check_tensor("weights", weights)
        table = self.table_number(table)
        location = self._locations[table]
        if weights.dim() != 2 or weights.size(1) != location.dim:
            raise ValueError(
                f"weights must be [rows, {location.dim}] for table {self.table_names[table]!r}, "
                f"got {list(weights.shape)}"
            )
        if weights.is_complex():
            raise ValueError(f"weights must be real, got {weights.dtype}")
        if weights.layout is not torch.strided:
            raise ValueError(f"weights must be dense, got {weights.layout}")
        end_row = first_row + weights.size(0)
        self._check_rows(table, first_row, end_row)
        weights = weights.detach()
        self.check_values(table, weights)
        packed = location.view(self.packed)[first_row:end_row]
        dtype = weights.dtype if weights.dtype in FLOAT_DTYPES else torch.float32
        blocks = zip(packed.split(_BLOCK_ROWS), weights.split(_BLOCK_ROWS), strict=True)
        for packed_block, weights_block in blocks:
            values = weights_block.to(packed_block.device, dtype).contiguous()
            quant.quantize_rows_(packed_block, values, location.format_code)

    def check_values(self, table: int, weights: Tensor) -> None:
        """Raise ValueError if `weights`, `[rows, dim]`, exceed the range of a table's format."""
        # Codes ascend: formats with a scale, then FP16, then those with the range of float32.
        if self._locations[table].format_code > RowFormatCode.FP16:
            return
        try:
            for block in weights.split(_BLOCK_ROWS):
                _check_range(block)
        except ValueError as error:
            raise ValueError(f"table {self.table_names[table]!r}: {error}") from None

    def _check_rows(self, table: int, first_row: int, end_row: int) -> None:
        """Raise ValueError unless a table has the rows `[first_row, end_row)`."""
        num_rows = self._locations[table].rows
        if not 0 <= first_row <= end_row <= num_rows:
            raise ValueError(
                f"rows {first_row} to {end_row} are out of range of table "
                f"{self.table_names[table]!r} of {num_rows} rows"
            )

    def use_memory(self, packed: Tensor) -> None:
        """Use `packed`, uint8 `[bytes of all rows]`, as the memory of the module, without a copy.

        Lookups raise RuntimeError unless it is contiguous. The counts of violations start from 0.

        Raises:
            ValueError: `packed` has another dtype or size.
        """
        if packed.dtype != torch.uint8 or tuple(packed.shape) != (self._num_bytes,):
            raise ValueError(
                f"packed must be uint8 [{self._num_bytes}], got {packed.dtype} {list(packed.shape)}"
            )
        self.packed = packed
        self.bounds_violations = torch.zeros(2, dtype=torch.int64, device=packed.device)
        self.features = self._make_features(packed.device)

    def table_views(self) -> list[dict[str, Tensor]]:
        """Return per table its rows, `packed` uint8 `[rows, row_bytes]`, as views.

        `packed[:, :4].view(torch.float16)` is scale and offset of each row of integers or of 8-bit
        floats.
        """
        return [{"packed": location.view(self.packed)} for location in self._locations]

    def to_dense(self, table: int | str) -> Tensor:
        """Dequantise a table to float32 `[rows, dim]`; see `table_number` for errors."""
        table = self.table_number(table)
        num_rows, first_row = self._locations[table].rows, 0
        dense = torch.empty(
            num_rows, self._locations[table].dim, dtype=torch.float32, device=self.packed.device
        )
        for block in self.dense_blocks(table):
            dense[first_row : first_row + len(block)] = block
            first_row += len(block)
        return dense

    def dense_blocks(self, table: int | str) -> Iterator[Tensor]:
        """Yield the dequantised rows of a table, float32 `[n, dim]`, in order."""
        table = self.table_number(table)
        num_rows = self._locations[table].rows
        for first_row in range(0, num_rows, _BLOCK_ROWS):
            yield self.dense_rows(table, first_row, min(_BLOCK_ROWS, num_rows - first_row))

    def dense_rows(self, table: int | str, first_row: int, count: int) -> Tensor:
        """Dequantise `count` rows of a table to float32 `[count, dim]`.

        Raises:
            KeyError, IndexError, TypeError: there is no such table, see `table_number`.
            ValueError: a row is out of range of the table.
        """
        table = self.table_number(table)
        location, device = self._locations[table], self.packed.device
        self._check_rows(table, first_row, first_row + count)
        feature_row = location.feature(0, is_mixed=False)
        return quant.quant_lookup(
            self.packed,
            torch.tensor([feature_row], dtype=torch.int64, device=device),
            torch.arange(first_row, first_row + count, device=device),
            torch.tensor([0, count], device=device),
            None,
            None,
            codes.POOLING["none"],
            location.format_code,
            location.dim,
            torch.float32,
        )

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Pool embeddings to `[B, sum D]`, or `[L, D]` for pooling NONE, in `output_dtype`.

        Arguments are those of `TableBatchedEmbeddingBags`; with `batch_sizes` pooled rows are flat,
        as there.

        Raises:
            TypeError: indices, offsets or weights are not tensors, or `batch_sizes` are not ints.
            RuntimeError: a dtype, a device or the number of offsets is wrong; an index or offset is
                invalid, in mode FATAL; or there are weights without pooling, or weights that
                require a gradient where gradients are enabled.
            ValueError: `batch_sizes` do not fit.
        """
        refuse_transforms("per_sample_weights", per_sample_weights, indices, offsets)
        if per_sample_weights is not None:
            batches.check_tensor("per_sample_weights", per_sample_weights)
            if per_sample_weights.requires_grad:
                if torch.is_grad_enabled():
                    raise RuntimeError(
                        "quantised tables give per_sample_weights no gradient: look up under "
                        "torch.no_grad(), or give per_sample_weights.detach()"
                    )
                per_sample_weights = per_sample_weights.detach()
        if not self.include_last_offset:
            offsets = batches.append_last_offset(indices, offsets)
        if batch_sizes is None and not torch.compiler.is_compiling():
            device = self.features.device
            if can_serve_inputs(device, indices, offsets, per_sample_weights):
                out = self._look_up_at_once(indices, offsets, per_sample_weights)
                if out is not None:
                    return out
        bag_layout, output_dim = self.lay_out_bags(offsets, batch_sizes)
        offsets = batches.check_bounds(self, indices, offsets, self.features, bag_layout)
        return quant.quant_lookup(
            self.packed,
            self.features,
            indices,
            offsets,
            bag_layout,
            per_sample_weights,
            codes.POOLING[self.pooling.value],
            self.format_code,
            output_dim,
            self.output_dtype,
        )

    def lay_out_bags(
        self, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> tuple[Tensor | None, int]:
        """Return `bag_layout` and `output_dim` of a batch, see `batches.lay_out_bags`."""
        device = self.features.device
        return batches.lay_out_bags(self.pooling, self._dims, offsets, batch_sizes, device)

    def _look_up_at_once(
        self, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None
    ) -> Tensor | None:
        """Check and look up a batch in one op; return None for an invalid one on the CPU.

        `indices` is `[L]`, `offsets` `[F * B + 1]`, `sample_weights` float32 `[L]` or None.
        """
        lookup_check = self._lookup_check
        if lookup_check is None or not lookup_check.matches(self):
            self._lookup_check = lookup_check = LookupBoundsCheck(self)
        check = lookup_check.begin() if lookup_check.counts_violations else lookup_check.check
        outputs = _lookup_checked(
            self.packed,
            self.features,
            indices,
            offsets,
            sample_weights,
            codes.POOLING[self.pooling.value],
            self.format_code,
            self.output_dim,
            self.output_dtype,
            check.mode,
            check.violations,
        )
        if lookup_check.counts_violations:
            lookup_check.end(self, check)
        return outputs[0] if outputs else None

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the `weights`: numbers, scales, offsets and the padding of rows."""
        return {"weights": self.packed.nbytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        refuse_averages(of_buffers=True)
        super().__setstate__(state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        warn_of_dtype(fn, "bits= for the rows and output_dtype= for the output")
        super()._apply(ops.keep_dtype(fn), recurse)
        self.features = self._make_features(self.packed.device)
        return self

    def _target_views(self) -> dict[str, Tensor]:
        return dict(base.state_entries(self.table_names, self.table_views()))

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination.update({prefix + key: view for key, view in self._target_views().items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        metadata, _, missing_keys, unexpected_keys, errors = arguments
        targets = self._target_views()
        problems: list[str] = []
        packed_state = self._with_packed_rows(state_dict, prefix, problems)
        if state_dicts.refuse_invalid(self, packed_state, prefix, errors, problems):
            return
        sources = state_dicts.select_entries(
            targets, packed_state, prefix, missing_keys, unexpected_keys
        )
        if self.packed.is_meta and sources:
            if metadata.get(state_dicts.ASSIGN):
                self.to_empty(device=next(iter(sources.values())).device)
                self.reset_parameters()
                targets = self._target_views()
            else:
                state_dicts.warn_of_meta(prefix, sources)
        self.log_runs = ()
        for key, value in state_dicts.without_shared_memory(sources, targets).items():
            targets[key].copy_(value)

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the module in a state dict."""
        targets = {prefix + key: view for key, view in self._target_views().items()}
        return state_dicts.entry_problems(state_dict, targets)

    def _with_packed_rows(
        self, state_dict: dict[str, Any], prefix: str, problems: list[str]
    ) -> dict[str, Any]:
        """Return the state dict with packed rows in place of entries from before 0.1.0.

        Entries that cannot be packed are left out, and `problems` gets a message for each table.
        """
        entries = dict(state_dict)
        for name, location in zip(self.table_names, self._locations, strict=True):
            former_keys = [f"{prefix}{name}.{entry}" for entry in FORMER_ENTRIES]
            if not all(key in entries for key in former_keys):
                continue
            values, scales = (entries.pop(key) for key in former_keys)
            try:
                entries[f"{prefix}{name}.packed"] = pack_former_rows(
                    values, scales, location.dim, location.format_code
                )
            except ValueError as error:
                problems.append(f"{prefix}{name}: {error}")
        return entries

    @property
    @shows_attribute_errors
    def _tables_by_name(self) -> SimpleNamespace:
        """Return the tables by their names in state dicts."""
        views = zip(self.table_names, self.table_views(), strict=True)
        return SimpleNamespace(**{name: SimpleNamespace(**tensors) for name, tensors in views})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Map the first part of a key for `torch.distributed.checkpoint.state_dict`."""
        return dict.fromkeys(self.table_names, "_tables_by_name")

    def extra_repr(self) -> str:
        """Describe tables and options."""
        sizes = ", ".join(
            f"{name}: {spec.rows} x {spec.dim}"
            for name, spec in zip(self.table_names[:4], self.tables, strict=False)
        )
        omitted = f", ... {len(self.tables)} tables" if len(self.tables) > 4 else ""
        formats = ", ".join(dict.fromkeys(format.value for format in self.formats))
        return f"[{sizes}{omitted}], {formats}, pooling={self.pooling.value}"


def _check_range(weights: Tensor) -> None:
    """Raise ValueError unless all values are finite and in the range of float16."""
    if weights.numel() == 0 or weights.is_meta:
        return
    largest = float((weights if weights.is_floating_point() else weights.float()).abs().amax())
    if not largest <= quant.MAX_MAGNITUDE:  # true for NaN, too
        limit = int(quant.MAX_MAGNITUDE)
        raise ValueError(
            f"rows must be finite and within +-{limit}, the range of float16, to be quantised, got "
            f"{largest}; weights.nan_to_num().clamp(-{limit}, {limit}) makes them so"
        )


def pack_former_rows(values: Tensor, scales: Tensor, dim: int, format_code: int) -> Tensor:
    """Pack the rows of a state dict from before 0.1.0, which had the scales in another tensor.

    The values are quantised again, so their error is at most about one scale.

    Args:
        values: the numbers, uint8 `[rows, bytes]`.
        scales: scale and offset of each row, float32 `[rows, 2]`.
        dim: number of values of a row.
        format_code: code of the format of `values` and of the result: INT4 or INT8.

    Returns:
        Rows of scale, offset and numbers, uint8 `[rows, bytes]`, on the device of `values`.

    Raises:
        ValueError: the format is neither INT4 nor INT8; `values` or `scales` is not a tensor, or
            has another dtype or shape; or a value exceeds the range of float16.
    """
    if not isinstance(values, Tensor) or not isinstance(scales, Tensor):
        raise ValueError(f"values and scales must be tensors, got {values!r} and {scales!r}")
    if values.dtype is not torch.uint8:
        raise ValueError(f"values must be uint8, got {values.dtype}")
    if format_code not in (RowFormatCode.INT4, RowFormatCode.INT8):
        raise ValueError(
            "the rows are from before 0.1.0, which had 4 or 8 bits per value: load them into a "
            "module of this format, and quantise its dense rows again"
        )
    bits = quant.bits_of(format_code)
    num_rows, row_bytes = scales.size(0) if scales.dim() > 0 else 0, -(-dim * bits // 8)
    if tuple(values.shape) != (num_rows, row_bytes) or tuple(scales.shape) != (num_rows, 2):
        raise ValueError(
            f"size mismatch: values {tuple(values.shape)} and scales {tuple(scales.shape)} are not "
            f"of rows of {dim} values with {bits} bits, but [rows, {row_bytes}] and [rows, 2] are"
        )
    packed = torch.empty(
        num_rows, quant.row_bytes(dim, format_code), dtype=torch.uint8, device=values.device
    )
    for first_row in range(0, num_rows, _BLOCK_ROWS):
        block = slice(first_row, first_row + _BLOCK_ROWS)
        integers = values[block]
        if bits == 4:
            integers = torch.stack([integers & 15, integers >> 4], dim=2).flatten(1)
        weights = integers[:, :dim].float() * scales[block, :1] + scales[block, 1:]
        _check_range(weights)
        quant.quantize_rows_(packed[block], weights.contiguous(), format_code)
    return packed


class FloatTables(NamedTuple):
    """The tables to quantise, and how they are looked up.

    Attributes:
        specs: rows, dim and name of each table.
        tensors: rows of each table `[R, D]`, of any dtype; or a module that computes them.
        pooling: pooling of all features.
        feature_tables: table of each feature; None: feature i reads table i.
        output_dtype: dtype of the outputs of lookups.
        device: device of the source; of several matrices, the device of the first.
    """

    specs: list[TableSpec]
    tensors: list[Tensor] | TableBatchedTTEmbeddingBags
    pooling: Pooling
    feature_tables: Sequence[int] | None
    output_dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_source(cls, source: Any) -> "FloatTables":
        """Describe the tables of `source`, see `from_float`; TypeError for another source.

        Cached tables are written back to memory first. Only a `GlobalDecay` has the rows copied.
        """
        if isinstance(source, FloatTables):
            return source
        if isinstance(source, TableBatchedEmbeddingBags | TableBatchedTTEmbeddingBags):
            is_tensor_train = isinstance(source, TableBatchedTTEmbeddingBags)
            return cls(
                [TableSpec(spec.rows, spec.dim, spec.name) for spec in source.tables],
                source if is_tensor_train else optimizer_hooks.tables_as_read(source),
                source.pooling,
                source.feature_tables,
                source.output_dtype,
                source.hyperparams.device,
            )
        pooling = Pooling.SUM
        if isinstance(source, nn.Embedding | nn.EmbeddingBag) and source.max_norm is not None:
            raise TypeError(
                "max_norm changes the rows of a lookup: scale the rows with it, and set it to None"
            )
        if isinstance(source, nn.EmbeddingBag) and source.padding_idx is not None:
            raise TypeError(
                f"padding_idx={source.padding_idx} is left out of bags, which quantised tables do "
                "not do: set it to None in a copy of the module, and remove the id from batches "
                "with emblib.jagged.drop_padding_from_bags"
            )
        if isinstance(source, nn.Embedding):
            pooling, source = Pooling.NONE, source.weight
        elif isinstance(source, nn.EmbeddingBag):
            if source.mode not in ("sum", "mean"):
                raise TypeError(f"an EmbeddingBag must have mode sum or mean, got {source.mode!r}")
            pooling, source = Pooling(source.mode), source.weight
        sources_by_name = {"": source} if isinstance(source, Tensor) else source
        if not isinstance(sources_by_name, Mapping) or not sources_by_name:
            raise TypeError(
                "source must be TableBatchedEmbeddingBags, TableBatchedTTEmbeddingBags, "
                "nn.EmbeddingBag, nn.Embedding, a matrix or matrices by name, got "
                f"{type(source).__name__}; of a model convert each module of tables, and with "
                "for_inference each collection"
            )
        for name, tensor in sources_by_name.items():
            is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
            if not is_dense or tensor.dim() != 2:
                raise TypeError(f"table {name!r} must be a dense matrix [R, D], got {tensor!r}")
        specs = [TableSpec(len(t), t.size(1), name) for name, t in sources_by_name.items()]
        tensors = list(sources_by_name.values())
        return cls(specs, tensors, pooling, None, torch.float32, tensors[0].device)

    def dtypes(self) -> list[torch.dtype]:
        """Return the dtype of the rows of each table; tensor trains compute them in float32."""
        if isinstance(self.tensors, list):
            return [rows.dtype for rows in self.tensors]
        return [torch.float32] * len(self.specs)

    def blocks(self, table: int) -> Iterator[Tensor]:
        """Yield the rows of a table in blocks `[n, dim]`, in order, in the dtype of `dtypes`."""
        if isinstance(self.tensors, list):
            yield from self.tensors[table].split(_BLOCK_ROWS)
        else:
            yield from self.tensors.dense_blocks(table)
