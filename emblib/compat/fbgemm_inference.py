"""FBGEMM's inference module over emblib's tables: the same names, arguments and methods.

The tables are one `emblib.QuantizedEmbeddingBags`, whose rows have the bytes of FBGEMM's rows. FP8
rows have a scale before these bytes, which FBGEMM's rows lack. The scale converts from torch's
exponent bias to that of the module. Ids of pruned tables are mapped to their rows by the indexes of
`emblib.inference.InferenceEmbeddingBags`. Rows are in the memory of the device. Tables behind a
cache raise NotImplementedError, unless `enforce_hbm` puts their rows there.
"""

# No `from __future__ import annotations`: TorchScript evaluates the annotations.

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import BoundsCheck, Pooling, QuantizedEmbeddingBags, RowFormat, TableSpec
from emblib.compat.fbgemm_arguments import float_dtype
from emblib.compat.fbgemm_comms import rounded_row_size_in_bytes
from emblib.compat.fbgemm_int8 import refuse_weights_without_pooling
from emblib.compat.fbgemm_types import (
    BoundsCheckMode,
    CacheAlgorithm,
    EmbeddingLocation,
    PoolingMode,
    RecordCacheMetrics,
    SparseType,
    as_member,
)
from emblib.inference import InferenceEmbeddingBags, RowIndex
from emblib.ops import codes, quant, tbe

_logger = logging.getLogger(__name__)


class QuantizedSpec(NamedTuple):
    """An entry of `embedding_specs`, with emblib's enum members."""

    name: str
    rows: int
    dim: int
    format: SparseType
    location: EmbeddingLocation


_NumbersAndHeader = tuple[Tensor, Tensor | None]
"""The numbers in the rows of a table, and scale and bias or None; or whole rows and None."""

_HEADER_BYTES = 4  # bytes of scale and bias, two float16
_DTYPE_OF_FORMAT = {
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
    SparseType.FP32: torch.float32,
}


class _FP8Format(NamedTuple):
    """The properties of an FP8 format of torch."""

    row_format: RowFormat
    bias: int  # of the exponent
    largest_byte: int  # byte of the largest finite number


_FP8_FORMAT_OF_BITS = {  # by exponent bits
    4: _FP8Format(RowFormat.FP8_E4M3, 7, 0x7E),
    5: _FP8Format(RowFormat.FP8_E5M2, 15, 0x7B),
}
_MAX_SCALE_EXPONENT = 15  # of a float16, which holds the scale of a row

_ONLY_VALUES: dict[str, tuple[Any, str]] = {
    "record_cache_metrics": (None, "there is no cache"),
    "gather_uvm_cache_stats": (False, "there is no cache"),
    "scale_bias_size_in_bytes": (_HEADER_BYTES, "scale and bias of a row are two float16"),
    "reverse_qparam": (False, "a row begins with scale and bias"),
}
"""The only value that each argument without a counterpart may have, and the reason."""


class IntNBitTableBatchedEmbeddingBagsCodegen(nn.Module):
    """Table-batched lookups in read-only rows, with the interface of FBGEMM's class.

    Rows are zeros until `assign_embedding_weights`, or until the views of `split_embedding_weights`
    are written to. Nothing here has a gradient. The bytes of a row are FBGEMM's on a CPU. On a GPU
    FBGEMM pads rows to `row_alignment` bytes; here they end at a multiple of 4.

    Args:
        embedding_specs: name, rows, dim, format (INT8, INT4, INT2, FP8, FP16, BF16 or FP32) and
            location of each table: HOST on a CPU, else DEVICE. Rows must fill whole bytes.
        feature_table_map: the table of each feature, each table at least once; by default feature i
            reads table i.
        pooling_mode: SUM, MEAN, or NONE for one vector per lookup.
        device: device of rows and lookups; None is the current GPU.
        index_remapping: row of each id of each table, -1 for pruned ones, or None for all ids; see
            `set_index_remappings`, which takes `pruning_hash_load_factor` and
            `use_array_for_index_remapping`, too.
        bounds_check_mode: reaction to invalid input; the caller's tensors do not change.
        weight_lists: the argument of `assign_embedding_weights`, if there are rows already.
        output_dtype: FP32, FP16 or BF16; or, without pooling, INT8 or INT4 for the bytes of the
            rows of tables that all have this format.
        fp8_exponent_bits: 4 or 5, the exponent bits of FP8 rows.
        fp8_exponent_bias: the exponent bias of FP8 rows.
        row_alignment: FBGEMM's alignment of rows; here they end at a multiple of 4.
        enforce_hbm: whether MANAGED and MANAGED_CACHING tables on a GPU are in its memory; without
            it they raise.

    `uvm_host_mapped`, `feature_names_per_table` and `indices_dtype` are stored without effect; ids
    may be int32 or int64. Arguments whose names begin with cache have no effect.
    `record_cache_metrics`, `gather_uvm_cache_stats`, `scale_bias_size_in_bytes` and
    `reverse_qparam` must be their defaults.

    Raises:
        NotImplementedError: emblib does not have a location, a format or the value of an argument.
        RuntimeError: no device is passed, and torch sees no GPU.
        ValueError: there is no table, or arguments do not fit each other.
    """

    def __init__(
        self,
        embedding_specs: list[tuple[str, int, int, SparseType, EmbeddingLocation]],
        feature_table_map: list[int] | None = None,
        index_remapping: list[Tensor] | None = None,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        device: str | int | torch.device | None = None,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.WARNING,
        weight_lists: list[_NumbersAndHeader] | None = None,
        pruning_hash_load_factor: float = 0.5,
        use_array_for_index_remapping: bool = True,
        output_dtype: SparseType = SparseType.FP16,
        cache_algorithm: CacheAlgorithm = CacheAlgorithm.LRU,
        cache_load_factor: float = 0.2,
        cache_sets: int = 0,
        cache_reserved_memory: float = 0.0,
        enforce_hbm: bool = False,
        record_cache_metrics: RecordCacheMetrics | None = None,
        gather_uvm_cache_stats: bool | None = False,
        row_alignment: int | None = None,
        fp8_exponent_bits: int | None = None,
        fp8_exponent_bias: int | None = None,
        cache_assoc: int = 32,
        scale_bias_size_in_bytes: int = _HEADER_BYTES,
        cacheline_alignment: bool = True,
        uvm_host_mapped: bool = False,
        reverse_qparam: bool = False,
        feature_names_per_table: list[list[str]] | None = None,
        indices_dtype: torch.dtype = torch.int32,
    ) -> None:
        _check_fixed(locals())
        super().__init__()
        self.fp8_exponent_bits = 4 if fp8_exponent_bits is None else fp8_exponent_bits
        self.fp8_exponent_bias = 7 if fp8_exponent_bias is None else fp8_exponent_bias
        _check_fp8(self.fp8_exponent_bits, self.fp8_exponent_bias)
        self.uuid = str(uuid.uuid4())
        self._device = _device(device)
        self.embedding_specs = _specs(embedding_specs)
        self.use_cpu = _check_locations(self.embedding_specs, self._device, enforce=enforce_hbm)
        tables = range(len(self.embedding_specs))
        self.feature_table_map = list(tables if feature_table_map is None else feature_table_map)
        if set(self.feature_table_map) != set(tables):
            raise ValueError(
                f"feature_table_map must name every one of {len(tables)} tables and no other, got "
                f"{self.feature_table_map}"
            )
        self.pooling_mode = as_member(PoolingMode, pooling_mode)
        mode = as_member(BoundsCheckMode, bounds_check_mode)
        self.bounds_check_mode_int: int = mode.value
        output = as_member(SparseType, output_dtype)
        self._returns_bytes = _returns_bytes(output, self.embedding_specs, self.pooling_mode)
        self._output_dtype = float_dtype(
            "output_dtype", SparseType.FP32 if self._returns_bytes else output
        )
        self.output_dtype: int = output.as_int()
        self.row_alignment = (1 if self.use_cpu else 16) if row_alignment is None else row_alignment
        self.scale_bias_size_in_bytes = scale_bias_size_in_bytes
        self.enforce_hbm, self.uvm_host_mapped = enforce_hbm, uvm_host_mapped
        self.feature_names_per_table = feature_names_per_table
        self.indices_dtype = indices_dtype
        self.feature_names: list[str] = [spec.name for spec in self.embedding_specs]
        self._dims = [self.embedding_specs[t].dim for t in self.feature_table_map]
        if self.pooling_mode is PoolingMode.NONE and len(set(self._dims)) > 1:
            raise ValueError(f"without pooling all tables must have one dim, got {self._dims}")
        self.total_D: int = sum(self._dims)
        # One module once there are rows, else none; a list keeps it from becoming a submodule.
        self._lookup_modules: list[QuantizedEmbeddingBags | InferenceEmbeddingBags] = []
        self._index_of_table: list[RowIndex | None] = []
        self.set_index_remappings(
            index_remapping or [], pruning_hash_load_factor, use_array_for_index_remapping
        )
        if weight_lists:
            self.assign_embedding_weights(weight_lists)

    @property
    def current_device(self) -> torch.device:
        """Return the device of the rows."""
        return self._quantized_bags().packed.device if self._lookup_modules else self._device

    @property
    def weight_initialized(self) -> bool:
        """Return whether there is memory for the rows."""
        return bool(self._lookup_modules)

    def log(self, msg: str) -> None:
        """Log at level INFO with the module's id."""
        _logger.info("[TBE=%s] %s", self.uuid, msg)

    def get_feature_num_per_table(self) -> list[int]:
        """Return the number of features of each table."""
        return [self.feature_table_map.count(t) for t in range(len(self.embedding_specs))]

    # Lookups

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pool rows to `[B, sum D]`, or `[L, D]` for pooling NONE, in the output dtype.

        Args:
            indices: int32 or int64 `[L]`; -1 is skipped.
            offsets: int32 or int64 `[F * B + 1]`, feature-major.
            per_sample_weights: `[L]`, scales each row.

        Raises:
            RuntimeError: there are no rows yet; there are weights without pooling; or the input is
                invalid, in mode FATAL.
        """
        return self._forward_impl(indices, offsets, per_sample_weights)

    def _forward_impl(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Look up; subclasses of TorchRec call it."""
        if not self._lookup_modules:
            raise RuntimeError(
                "there are no rows yet: call initialize_weights() and assign_embedding_weights()"
            )
        if isinstance(indices, torch.fx.Proxy):
            return self._make_graph_lookup().forward(indices, offsets, per_sample_weights)
        device = self.current_device
        is_async = device.type != "cpu"
        indices, offsets = (x.to(device, non_blocking=is_async) for x in (indices, offsets))
        weights = None
        if per_sample_weights is not None:
            weights = per_sample_weights.detach().to(device, torch.float32, non_blocking=is_async)
        with torch.no_grad():
            if self._returns_bytes:
                refuse_weights_without_pooling(self.pooling_mode, weights)
                return self._look_up_bytes(indices, offsets)
            return self._lookup_modules[0](indices, offsets, weights)

    def _look_up_bytes(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Return the bytes of a row per lookup, zeros for pruned ids; waits for a GPU."""
        lookup_module, quantized_bags = self._lookup_modules[0], self._quantized_bags()
        if isinstance(lookup_module, InferenceEmbeddingBags):
            indices = quant.map_ids(
                lookup_module.index,
                lookup_module.index_tables,
                quantized_bags.features,
                indices,
                offsets,
                None,
            )
        if (mode := quantized_bags.bounds_check) is not BoundsCheck.NONE:
            given_offsets, mode_code = offsets, codes.BOUNDS_CHECK[mode.value]
            offsets, violations = tbe.check_bounds(
                indices, given_offsets, quantized_bags.features, None, mode_code
            )
            if mode is BoundsCheck.WARNING and bool(violations.any()):
                quantized_bags(indices, given_offsets)  # counts and warns
        num_features = len(self.feature_table_map)
        bags_per_feature = (offsets.numel() - 1) // num_features
        id_ends = offsets[
            torch.arange(num_features + 1, device=offsets.device) * bags_per_feature
        ].tolist()
        tables = self._row_views()
        # the first block is for lookups before the first bag
        row_blocks = [tables[0].new_zeros(id_ends[0], tables[0].size(1))]
        for table, begin, end in zip(self.feature_table_map, id_ends, id_ends[1:], strict=False):
            ids = indices[begin:end]
            row_ids = ids.where((ids >= 0) & (ids < len(tables[table])), 0)  # as in float lookups
            row_blocks.append(tables[table][row_ids] * (ids != -1).unsqueeze(1))
        return torch.cat(row_blocks)

    def _make_graph_lookup(self) -> "ScriptableLookup":
        """Return a module that looks up by calls of operators only, for graphs."""
        if not self._lookup_modules:
            raise RuntimeError("there are no rows yet: call initialize_weights() first")
        if self._returns_bytes:
            raise TypeError("outputs of bytes: trace with this class as a leaf module")
        return ScriptableLookup(self._lookup_modules[0])

    def __prepare_scriptable__(self) -> nn.Module:
        return self._make_graph_lookup()

    # Rows

    def initialize_weights(self) -> None:
        """Allocate the rows, with values of zero; a second call does nothing.

        FP8 rows get the scale of the module's exponent bias, which is not among their bytes.
        """
        if self._lookup_modules:
            return
        mode = BoundsCheckMode(self.bounds_check_mode_int)
        quantized_bags = QuantizedEmbeddingBags(
            [TableSpec(*spec[1:3]) for spec in self.embedding_specs],
            formats=[
                _FP8_FORMAT_OF_BITS[self.fp8_exponent_bits].row_format
                if row_format is SparseType.FP8
                else RowFormat[row_format.name]
                for _, _, _, row_format, _ in self.embedding_specs
            ],
            pooling=Pooling(self.pooling_mode.name.lower()),
            feature_tables=self.feature_table_map,
            output_dtype=self._output_dtype,
            bounds_check=BoundsCheck(mode.name.removeprefix("V2_").lower()),
            device=self._device,
        )
        scale_exponent = _FP8_FORMAT_OF_BITS[self.fp8_exponent_bits].bias - self.fp8_exponent_bias
        for view, spec in zip(quantized_bags.table_views(), self.embedding_specs, strict=True):
            if spec.format is SparseType.FP8:
                view["packed"][:, : _HEADER_BYTES // 2].view(torch.float16).fill_(
                    2.0**scale_exponent
                )
        self._set_rows(quantized_bags)

    def _set_rows(self, quantized_bags: QuantizedEmbeddingBags) -> None:
        """Look up in `quantized_bags` from now on; ids of pruned tables are mapped first."""
        is_pruned = any(index is not None for index in self._index_of_table)
        self._lookup_modules = [
            InferenceEmbeddingBags(quantized_bags, self._index_of_table)
            if is_pruned
            else quantized_bags
        ]

    def _quantized_bags(self) -> QuantizedEmbeddingBags:
        """Return the tables, without the indexes of pruned ids."""
        module = self._lookup_modules[0]
        return module.rows if isinstance(module, InferenceEmbeddingBags) else module

    def split_embedding_weights_with_scale_bias(
        self, split_scale_bias_mode: int = 1
    ) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Return the bytes of the rows of each table, as views.

        Args:
            split_scale_bias_mode: 0 for whole rows, uint8 `[rows, bytes]`; 1 for numbers, and scale
                and bias, uint8 `[rows, 4]`; 2 for numbers, scale and bias, float16 `[rows, 1]`.
                Tables of floats and of FP8 have their rows only.

        Raises:
            RuntimeError: there are no rows yet.
            ValueError: the mode is unknown.
        """
        if split_scale_bias_mode not in (0, 1, 2):
            raise ValueError(
                f"split_scale_bias_mode must be 0, 1 or 2, got {split_scale_bias_mode}"
            )
        result: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        padded = split_scale_bias_mode == 0
        for rows, spec in zip(self._row_views(padded=padded), self.embedding_specs, strict=True):
            if split_scale_bias_mode == 0 or not _has_header(spec.format):
                result.append((rows, None, None))
                continue
            numbers, header = rows[:, _HEADER_BYTES:], rows[:, :_HEADER_BYTES]
            if split_scale_bias_mode == 1:
                result.append((numbers, header, None))
                continue
            scale, bias = (
                part.view(torch.float16) for part in header.split(_HEADER_BYTES // 2, dim=1)
            )
            result.append((numbers, scale, bias))
        return result

    def _row_views(self, *, padded: bool = True) -> list[Tensor]:
        """Return the rows of each table, uint8 `[rows, bytes]`.

        The stored rows end at a multiple of 4 bytes. With `padded` a view includes the padding
        up to `row_alignment`, if the stored rows are that long.
        """
        if not self._lookup_modules:
            raise RuntimeError("there are no rows yet: call initialize_weights() first")
        views = [view["packed"] for view in self._quantized_bags().table_views()]
        row_views = []
        for view, (_, _, dim, row_format, _) in zip(views, self.embedding_specs, strict=True):
            view = view[:, _HEADER_BYTES:] if row_format is SparseType.FP8 else view
            row_bytes = [
                rounded_row_size_in_bytes(dim, row_format, n) for n in (1, self.row_alignment)
            ]
            has_padding = padded and row_bytes[1] <= view.size(1)
            row_views.append(view[:, : row_bytes[has_padding]])
        return row_views

    def split_embedding_weights(self, split_scale_shifts: bool = True) -> list[_NumbersAndHeader]:
        """Return the bytes of the rows of each table, as views.

        With `split_scale_shifts` an entry is numbers, and scale and bias or None; without it whole
        rows and None. See `split_embedding_weights_with_scale_bias`, modes 1 and 0.
        """
        mode = 1 if split_scale_shifts else 0
        parts = self.split_embedding_weights_with_scale_bias(mode)
        return [(rows, header) for rows, header, _ in parts]

    def assign_embedding_weights(self, q_weight_list: Sequence[_NumbersAndHeader]) -> None:
        """Copy into `split_embedding_weights()`; nothing is written if an entry does not fit.

        A tensor may be one row, without the dimension of rows: it is copied into each row.

        Raises:
            ValueError: the number of tables, a dtype or a shape is wrong; or FP8 rows are not
                finite.
        """
        self.initialize_weights()
        targets = self.split_embedding_weights()
        if len(q_weight_list) != len(targets):
            raise ValueError(f"expected {len(targets)} tables, got {len(q_weight_list)}")
        copies: list[tuple[Tensor, Tensor]] = []
        for (name, _, _, row_format, _), target, sources in zip(
            self.embedding_specs, targets, q_weight_list, strict=True
        ):
            for view, values in zip(target, sources, strict=True):
                if view is None and values is None:
                    continue
                expected_shape = None if view is None else list(view.shape)
                shape = None if values is None else list(values.shape)
                is_one_row = expected_shape is not None and shape == expected_shape[1:]
                if view is None or values is None or not (expected_shape == shape or is_one_row):
                    raise ValueError(f"table {name!r}: expected {expected_shape}, got {shape}")
                if values.dtype != torch.uint8:
                    raise ValueError(f"table {name!r}: rows must be uint8, got {values.dtype}")
                if row_format is SparseType.FP8:
                    largest_byte = _FP8_FORMAT_OF_BITS[self.fp8_exponent_bits].largest_byte
                    if values.numel() and int((values & 0x7F).max()) > largest_byte:
                        raise ValueError(
                            f"table {name!r}: FP8 rows have bytes up to {largest_byte:#x}"
                        )
                copies.append((view, values))
        for view, values in copies:
            view.copy_(values)

    def fill_random_weights(self) -> None:
        """Fill the numbers of rows at random, rows of floats from [-1, 1); scale and bias stay."""
        self.initialize_weights()
        for (rows, _), spec in zip(
            self.split_embedding_weights(), self.embedding_specs, strict=True
        ):
            if spec.format in _DTYPE_OF_FORMAT:
                rows.view(_DTYPE_OF_FORMAT[spec.format]).uniform_(-1, 1)
            else:  # of FP8, bytes that are finite in both formats
                rows.random_(0, 0x78 if spec.format is SparseType.FP8 else 0xFF)

    def embedding_inplace_update(
        self,
        update_table_indices: list[int],
        update_row_indices: list[list[int]],
        update_weights: list[Tensor],
    ) -> None:
        """Replace rows of tables, in place.

        Args:
            update_table_indices: numbers of the tables.
            update_row_indices: numbers of the rows of each of these tables.
            update_weights: the new rows of each, as `split_embedding_weights(False)` has them.

        Raises:
            RuntimeError: there are no rows yet.
            ValueError: the lists differ in length; nothing is changed.
        """
        tables = self._row_views()
        updates = list(zip(update_table_indices, update_row_indices, update_weights, strict=True))
        for table, rows, weights in updates:
            target = tables[table]
            index = torch.tensor(rows, dtype=torch.int64, device=target.device)
            target[index] = weights.to(target.device)

    def set_index_remappings(
        self,
        index_remapping: list[Tensor],
        pruning_hash_load_factor: float = 0.5,
        use_array_for_index_remapping: bool = True,
    ) -> None:
        """Set the map from ids to rows of each table; it replaces the earlier maps.

        Entry i of a map is the row of id i, or -1 if the id is pruned. The ids of a table whose map
        is None are its rows; an empty list is None for all tables. With
        `use_array_for_index_remapping=False` a map is stored as a hash table of the ids that have
        rows. It is at most half full; `pruning_hash_load_factor` is ignored.

        Raises:
            ValueError: the numbers of maps and tables differ.
        """
        num_tables = len(self.embedding_specs)
        maps: list[Tensor | None] = list(index_remapping) or [None] * num_tables
        if len(maps) != num_tables:
            raise ValueError(f"index_remapping must have {num_tables} maps, got {len(maps)}")
        self._index_of_table = [
            None if rows is None else index_of_map(rows, is_array=use_array_for_index_remapping)
            for rows in maps
        ]
        if self._lookup_modules:
            self._set_rows(self._quantized_bags())

    def set_index_remappings_array(self, index_remapping: list[Tensor]) -> None:
        """Set the maps from ids to rows as arrays, see `set_index_remappings`."""
        self.set_index_remappings(index_remapping)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        for lookup_module in self._lookup_modules:
            lookup_module._apply(fn, recurse)
        self._device = self.current_device
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """Describe tables and pooling."""
        formats = sorted({spec.format.name for spec in self.embedding_specs})
        return f"{len(self.embedding_specs)} tables, {', '.join(formats)}, {self.pooling_mode.name}"


class ScriptableLookup(nn.Module):
    """The lookup of quantised tables by calls of operators only, for `torch.fx` and TorchScript.

    It shares the memory of the tables. Invalid ids read row 0, without a report.
    """

    packed: Tensor
    features: Tensor
    index: Tensor
    index_tables: Tensor

    def __init__(self, lookup_module: QuantizedEmbeddingBags | InferenceEmbeddingBags) -> None:
        super().__init__()
        self.is_pruned = isinstance(lookup_module, InferenceEmbeddingBags)
        bags: Any = (
            lookup_module.rows
            if isinstance(lookup_module, InferenceEmbeddingBags)
            else lookup_module
        )
        for owner, names in (
            (bags, ("packed", "features")),
            (lookup_module, ("index", "index_tables")),
        ):
            for name in names:
                tensor = getattr(owner, name, torch.empty(0, dtype=torch.int64, device="cpu"))
                self.register_buffer(name, tensor, persistent=False)
        self.format, self.output_dim = int(bags.format_code), int(bags.output_dim)
        self.output_dtype: torch.dtype = bags.output_dtype
        self.pooling = int(codes.POOLING[bags.pooling.value])
        self.check = int(codes.BOUNDS_CHECK["ignore"])

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return pooled rows, as `IntNBitTableBatchedEmbeddingBagsCodegen.forward` does."""
        if self.is_pruned:
            indices = torch.ops.emblib.map_ids(
                self.index, self.index_tables, self.features, indices, offsets, None
            )
        checked = torch.ops.emblib.bounds_check(indices, offsets, self.features, None, self.check)
        result: Tensor = torch.ops.emblib.quant_lookup(
            self.packed,
            self.features,
            indices,
            checked[0],
            None,
            per_sample_weights,
            self.pooling,
            self.format,
            self.output_dim,
            self.output_dtype,
        )
        return result


def index_of_map(rows: Tensor, *, is_array: bool) -> RowIndex:
    """Return the index of a table whose id i has row `rows[i]`, or none where that is -1.

    With `is_array` it is an array with an entry per id, else a hash table of the ids with a row.
    """
    rows, num_ids = rows.flatten(), rows.numel()
    if is_array:
        entries = torch.nn.functional.pad(rows.int(), (0, num_ids % 2), value=-1).view(torch.int64)
        return replace(RowIndex.of_mask(rows >= 0), entries=entries)
    kept_ids = (rows >= 0).nonzero().view(-1)
    entries, _ = quant.hash_entries(kept_ids, rows[kept_ids].long())
    return replace(RowIndex.of_keys(kept_ids, num_ids=num_ids), entries=entries.flatten())


# Arguments


def _check_fixed(arguments: Mapping[str, Any]) -> None:
    """Raise for arguments without a counterpart."""
    for name, (only_value, reason) in _ONLY_VALUES.items():
        value = arguments[name]
        if value != only_value:
            raise NotImplementedError(f"{name} must be {only_value!r}, got {value!r}: {reason}")


def _device(device: str | int | torch.device | None) -> torch.device:
    """Return the device; None is the current GPU, an int the GPU of that number."""
    if device is None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "the device is by default the current GPU, and torch sees none; pass device='cpu'"
            )
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _specs(embedding_specs: Sequence[tuple[Any, ...]]) -> list[QuantizedSpec]:
    """Check formats and dims; return the specs with emblib's enum members."""
    if not embedding_specs:
        raise ValueError("embedding_specs must have at least one table")
    specs: list[QuantizedSpec] = []
    for name, rows, dim, row_format, location in embedding_specs:
        row_format = as_member(SparseType, row_format)
        headerless_formats = (*_DTYPE_OF_FORMAT, SparseType.FP8)
        if row_format not in headerless_formats and not _has_header(row_format):
            raise NotImplementedError(
                f"table {name!r}: rows of {row_format.name} are not supported; formats are INT8, "
                f"INT4, INT2, {', '.join(k.name for k in headerless_formats)}"
            )
        if dim * row_format.bit_rate() % 8:
            raise ValueError(
                f"table {name!r}: rows of {row_format.name} must fill whole bytes, got dim {dim}"
            )
        location = as_member(EmbeddingLocation, location)
        specs.append(QuantizedSpec(name, rows, dim, row_format, location))
    return specs


def _check_fp8(bits: int, bias: int) -> None:
    """Raise for FP8 rows that no float16 scale converts to a format of torch."""
    if (
        bits not in _FP8_FORMAT_OF_BITS
        or abs(_FP8_FORMAT_OF_BITS[bits].bias - bias) > _MAX_SCALE_EXPONENT
    ):
        raise NotImplementedError(
            "FP8 rows have 4 or 5 exponent bits, and a bias within 15 of 7 or 15, got "
            f"fp8_exponent_bits={bits}, fp8_exponent_bias={bias}"
        )


def _has_header(row_format: SparseType) -> bool:
    """Return whether rows begin with scale and bias."""
    return row_format in (SparseType.INT8, SparseType.INT4, SparseType.INT2)


def _returns_bytes(
    output: SparseType, specs: Sequence[QuantizedSpec], pooling: PoolingMode
) -> bool:
    """Return whether lookups return the bytes of rows.

    Raises:
        NotImplementedError: the output is bytes, and rows are pooled or have another format.
    """
    if not _has_header(output):
        return False
    other_formats = {spec.format.name for spec in specs if spec.format is not output}
    if pooling is not PoolingMode.NONE or other_formats:
        raise NotImplementedError(
            f"output_dtype {output.name} returns the bytes of rows of that format, with "
            f"PoolingMode.NONE; got {pooling.name} and rows of "
            f"{sorted(other_formats or {output.name})}"
        )
    return True


def _check_locations(
    specs: Sequence[QuantizedSpec], device: torch.device, *, enforce: bool
) -> bool:
    """Raise for rows outside the memory of the device; return whether that is a CPU's."""
    locations = {spec.location for spec in specs}
    is_cpu = device.type == "cpu" or (
        device.type == "meta" and locations == {EmbeddingLocation.HOST}
    )
    allowed = {EmbeddingLocation.HOST if is_cpu else EmbeddingLocation.DEVICE}
    if enforce and not is_cpu:
        allowed |= {EmbeddingLocation.MANAGED, EmbeddingLocation.MANAGED_CACHING}
    if not locations <= allowed:
        raise NotImplementedError(
            f"tables on {device} must have location {sorted(x.name for x in allowed)}, got "
            f"{sorted(x.name for x in locations)}: quantised tables are on the device"
        )
    return is_cpu
