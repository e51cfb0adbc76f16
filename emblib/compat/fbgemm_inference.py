"""FBGEMM's inference module, implemented by emblib's, with the same names, arguments and methods.

The tables are one `emblib.QuantizedEmbeddingBags`, whose rows have the bytes of FBGEMM's rows. An
FP8 row has a scale before these bytes, which FBGEMM's do not have: it converts from torch's
exponent bias to that of the module. Ids of pruned tables are mapped to their rows by the indexes of
`emblib.inference.InferenceEmbeddingBags`. Rows are in the memory of the device: tables in host
memory or behind a cache raise NotImplementedError on a GPU, unless `enforce_hbm` is set.
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
from emblib.compat.checks import check_flags
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
"""Codes of a table's rows, and scale and bias; or whole rows, and None."""

_HEADER_BYTES = 4  # bytes of scale and bias, two float16
_DTYPE_OF_FORMAT = {
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
    SparseType.FP32: torch.float32,
}


class _FP8Format(NamedTuple):
    """The properties of an FP8 format of torch."""

    row_format: RowFormat
    bias: int  # bias of the exponent
    largest_byte: int  # byte of the largest finite number


_FP8_FORMAT_OF_BITS = {  # by exponent bits
    4: _FP8Format(RowFormat.FP8_E4M3, 7, 0x7E),
    5: _FP8Format(RowFormat.FP8_E5M2, 15, 0x7B),
}
_MAX_SCALE_EXPONENT = 15  # largest exponent of a float16, which stores the scale of a row

_ONLY_VALUES: dict[str, tuple[Any, str]] = {
    "record_cache_metrics": (None, "there is no cache"),
    "gather_uvm_cache_stats": (False, "there is no cache"),
    "scale_bias_size_in_bytes": (_HEADER_BYTES, "scale and bias of a row are two float16"),
    "reverse_qparam": (False, "a row begins with scale and bias"),
}
"""The only supported value of some arguments, and the reason."""


class IntNBitTableBatchedEmbeddingBagsCodegen(nn.Module):
    """Table-batched lookups in read-only rows, with the interface of FBGEMM's class.

    Rows are zeros until `assign_embedding_weights`, or until the views of `split_embedding_weights`
    are written to. There are no gradients. On a CPU the bytes of a row are those of FBGEMM; on a
    GPU FBGEMM pads rows to `row_alignment` bytes, and emblib to a multiple of 4. As in FBGEMM,
    `state_dict` does not have the rows, and nothing else here: save `split_embedding_weights()`,
    and the maps of pruned ids, or the module itself, which `torch.save` and `copy.deepcopy` take.

    Args:
        embedding_specs: name, rows, dim, format (INT8, INT4, INT2, FP8, FP16, BF16 or FP32) and
            location of each table: HOST on a CPU, else DEVICE. Rows must fill whole bytes.
        feature_table_map: the table of each feature, each table at least once; by default feature i
            reads table i.
        pooling_mode: SUM, MEAN, or NONE for one vector per lookup.
        device: device of rows and lookups; None is the current GPU.
        index_remapping: map from ids to rows of each table, see `set_index_remappings`, which has
            the arguments `pruning_hash_load_factor` and `use_array_for_index_remapping`, too.
        bounds_check_mode: reaction to invalid input; the caller's tensors are not written to.
        weight_lists: rows, as for `assign_embedding_weights`; None for zeros.
        output_dtype: format of the output: FP32, FP16 or BF16; or without pooling INT8, INT4 or
            INT2, for the bytes of rows of tables that all have this format.
        fp8_exponent_bits: number of exponent bits of FP8 rows, 4 or 5; None is 4.
        fp8_exponent_bias: exponent bias of FP8 rows; None is 7.
        row_alignment: FBGEMM's alignment of rows in bytes; None is 1 on a CPU, 16 on a GPU.
        enforce_hbm: whether MANAGED and MANAGED_CACHING tables are in the memory of the GPU; if
            not, they raise.

    `uvm_host_mapped`, `feature_names_per_table` and `indices_dtype` are stored without effect; ids
    may be int32 or int64. Arguments whose names begin with cache have no effect.
    `record_cache_metrics`, `gather_uvm_cache_stats`, `scale_bias_size_in_bytes` and
    `reverse_qparam` must be their defaults.

    Raises:
        NotImplementedError: a location, a format or the value of an argument is not supported.
        RuntimeError: `device` is None, and torch sees no GPU.
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
        check_flags(enforce_hbm=enforce_hbm, uvm_host_mapped=uvm_host_mapped)
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
        """Device of the rows."""
        return self._quantized_bags().packed.device if self._lookup_modules else self._device

    @property
    def weight_initialized(self) -> bool:
        """True if the rows are allocated."""
        return bool(self._lookup_modules)

    def log(self, msg: str) -> None:
        """Log `msg` and the module's id, `uuid`, at level INFO."""
        _logger.info("[TBE=%s] %s", self.uuid, msg)

    def get_feature_num_per_table(self) -> list[int]:
        """Return the number of features of each table."""
        return [self.feature_table_map.count(t) for t in range(len(self.embedding_specs))]

    # Lookups

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Look up and pool.

        Args:
            indices: int32 or int64 `[L]`; index -1 is skipped.
            offsets: int32 or int64 `[F * B + 1]`, feature after feature.
            per_sample_weights: factor of each row, `[L]`; None for ones.

        Returns:
            `[B, sum D]`, or for pooling NONE `[L, D]`, in the output dtype; with an output of bytes
            whole rows, uint8 `[L, row bytes]`.

        Raises:
            RuntimeError: there are no rows yet, there are weights without pooling, or the input is
                invalid in mode FATAL.
        """
        return self._forward_impl(indices, offsets, per_sample_weights)

    def _forward_impl(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Look up; TorchRec's subclasses call this."""
        if not self._lookup_modules:
            raise RuntimeError(
                "there are no rows yet: call initialize_weights() and assign_embedding_weights()"
            )
        if isinstance(indices, torch.fx.Proxy):
            return self._make_graph_lookup().forward(indices, offsets, per_sample_weights)
        device = self.current_device
        is_async = device.type != "cpu"
        indices = indices.to(device, non_blocking=is_async)
        offsets = offsets.to(device, non_blocking=is_async)
        weights = None
        if per_sample_weights is not None:
            weights = per_sample_weights.detach().to(device, torch.float32, non_blocking=is_async)
        with torch.no_grad():
            if self._returns_bytes:
                refuse_weights_without_pooling(self.pooling_mode, weights)
                return self._look_up_bytes(indices, offsets)
            return self._lookup_modules[0](indices, offsets, weights)

    def _look_up_bytes(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Return the bytes of the row of each lookup, zeros for pruned ids. Waits for a GPU."""
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
            unchecked_offsets, mode_code = offsets, codes.BOUNDS_CHECK[mode.value]
            offsets, violations = tbe.check_bounds(
                indices, unchecked_offsets, quantized_bags.features, None, mode_code
            )
            if mode is BoundsCheck.WARNING and bool(violations.any()):
                quantized_bags(indices, unchecked_offsets)  # counts and warns
        num_features = len(self.feature_table_map)
        bags_per_feature = (offsets.numel() - 1) // num_features
        id_ends = offsets[
            torch.arange(num_features + 1, device=offsets.device) * bags_per_feature
        ].tolist()
        tables = self._row_views()
        # Zeros for lookups before the first bag come first.
        row_blocks = [tables[0].new_zeros(id_ends[0], tables[0].size(1))]
        for table, begin, end in zip(self.feature_table_map, id_ends, id_ends[1:], strict=False):
            ids = indices[begin:end]
            # As in other lookups, invalid ids read row 0, and -1 reads zeros.
            row_ids = ids.where((ids >= 0) & (ids < len(tables[table])), 0)
            row_blocks.append(tables[table][row_ids] * (ids != -1).unsqueeze(1))
        return torch.cat(row_blocks)

    def _make_graph_lookup(self) -> "ScriptableLookup":
        """Return a module that looks up with calls of operators only, for graphs.

        Raises:
            RuntimeError: there are no rows yet.
            TypeError: the output is bytes.
        """
        if not self._lookup_modules:
            raise RuntimeError("there are no rows yet: call initialize_weights() first")
        if self._returns_bytes:
            raise TypeError("outputs of bytes: trace with this class as a leaf module")
        return ScriptableLookup(self._lookup_modules[0])

    def __prepare_scriptable__(self) -> nn.Module:
        return self._make_graph_lookup()

    # Rows

    def initialize_weights(self) -> None:
        """Allocate the rows, with values of 0; a second call does nothing.

        FP8 rows also get their scale, which the views of this module do not show.
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
        """Make `quantized_bags` the tables of all lookups; map the ids of pruned ones before."""
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
        """Return the rows of each table as views; entries that a mode does not have are None.

        Args:
            split_scale_bias_mode: 0 for whole rows, uint8 `[rows, row bytes]`; 1 for codes, and
                scale and bias together, uint8 `[rows, 4]`; 2 for codes, scale and bias, both
                float16 `[rows, 1]`. Tables of floats and of FP8 have whole rows in every mode.

        Raises:
            RuntimeError: there are no rows yet.
            ValueError: `split_scale_bias_mode` is not 0, 1 or 2.
        """
        if split_scale_bias_mode not in (0, 1, 2):
            raise ValueError(
                f"split_scale_bias_mode must be 0, 1 or 2, got {split_scale_bias_mode}"
            )
        views: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        row_views = self._row_views(with_padding=split_scale_bias_mode == 0)
        for rows, spec in zip(row_views, self.embedding_specs, strict=True):
            if split_scale_bias_mode == 0 or not _has_header(spec.format):
                views.append((rows, None, None))
                continue
            row_codes, header = rows[:, _HEADER_BYTES:], rows[:, :_HEADER_BYTES]
            if split_scale_bias_mode == 1:
                views.append((row_codes, header, None))
                continue
            scale, bias = (
                part.view(torch.float16) for part in header.split(_HEADER_BYTES // 2, dim=1)
            )
            views.append((row_codes, scale, bias))
        return views

    def _row_views(self, *, with_padding: bool = True) -> list[Tensor]:
        """Return views of the rows of each table, uint8 `[rows, row bytes]`.

        Stored rows are padded to a multiple of 4 bytes. `with_padding`: a view has the padding up
        to `row_alignment`, if the stored rows are long enough.
        """
        if not self._lookup_modules:
            raise RuntimeError("there are no rows yet: call initialize_weights() first")
        views = [view["packed"] for view in self._quantized_bags().table_views()]
        row_views = []
        for view, (_, _, dim, row_format, _) in zip(views, self.embedding_specs, strict=True):
            view = view[:, _HEADER_BYTES:] if row_format is SparseType.FP8 else view
            row_bytes = [
                rounded_row_size_in_bytes(dim, row_format, alignment)
                for alignment in (1, self.row_alignment)
            ]
            has_padding = with_padding and row_bytes[1] <= view.size(1)
            row_views.append(view[:, : row_bytes[has_padding]])
        return row_views

    def split_embedding_weights(self, split_scale_shifts: bool = True) -> list[_NumbersAndHeader]:
        """Return the rows of each table as views.

        With `split_scale_shifts` an entry is the codes, and scale and bias or None; without it the
        whole rows, and None: modes 1 and 0 of `split_embedding_weights_with_scale_bias`.
        """
        check_flags(split_scale_shifts=split_scale_shifts)
        mode = 1 if split_scale_shifts else 0
        parts = self.split_embedding_weights_with_scale_bias(mode)
        return [(rows, header) for rows, header, _ in parts]

    def assign_embedding_weights(self, q_weight_list: Sequence[_NumbersAndHeader]) -> None:
        """Set the rows of all tables.

        Args:
            q_weight_list: rows of each table, uint8, in the form of `split_embedding_weights()`. A
                tensor of one row, without the dimension of rows, is copied into every row.

        Raises:
            ValueError: the number of tables, a dtype or a shape is wrong, or FP8 rows have
                infinite values; nothing is written.
        """
        self.initialize_weights()
        targets = self.split_embedding_weights()
        if len(q_weight_list) != len(targets):
            raise ValueError(f"expected {len(targets)} tables, got {len(q_weight_list)}")
        views_and_values: list[tuple[Tensor, Tensor]] = []
        for (name, _, _, row_format, _), target, sources in zip(
            self.embedding_specs, targets, q_weight_list, strict=True
        ):
            if len(sources) != len(target):
                raise ValueError(f"table {name!r}: expected 2 tensors or None, got {len(sources)}")
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
                views_and_values.append((view, values))
        for view, values in views_and_values:
            view.copy_(values)

    def fill_random_weights(self) -> None:
        """Fill rows with random codes, or rows of floats with values from [-1, 1).

        Scale and bias stay as they are.
        """
        self.initialize_weights()
        for (rows, _), spec in zip(
            self.split_embedding_weights(), self.embedding_specs, strict=True
        ):
            if spec.format in _DTYPE_OF_FORMAT:
                rows.view(_DTYPE_OF_FORMAT[spec.format]).uniform_(-1, 1)
            else:  # bytes below 0x78 are finite in both FP8 formats
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
            update_weights: new rows of each of these tables, uint8 `[rows, row bytes]`, in the form
                of `split_embedding_weights(False)`.

        Raises:
            IndexError: a table or a row does not exist; nothing is changed.
            RuntimeError: there are no rows yet.
            ValueError: the lists differ in length, or new rows have another dtype or shape; nothing
                is changed.
        """
        tables = self._row_views()
        lengths = [len(update_table_indices), len(update_row_indices), len(update_weights)]
        if len(set(lengths)) > 1:
            raise ValueError(
                "update_table_indices, update_row_indices and update_weights must have one entry "
                f"per update, got {lengths}"
            )
        updates = list(zip(update_table_indices, update_row_indices, update_weights, strict=True))
        for table, rows, weights in updates:
            if not 0 <= table < len(tables):
                raise IndexError(f"table {table} does not exist, there are {len(tables)}")
            num_rows, row_bytes = tables[table].shape
            if not all(0 <= row < num_rows for row in rows):  # torch would count -1 from the end
                raise IndexError(f"table {table}: rows must be in [0, {num_rows}), got {rows}")
            expected_shape = (len(rows), row_bytes)
            # An assignment would broadcast one row, and wrap numbers beyond a byte.
            is_fitting = weights.dtype == torch.uint8 and tuple(weights.shape) == expected_shape
            if rows and not is_fitting:
                raise ValueError(
                    f"table {table}: new rows must be uint8 {list(expected_shape)}, got "
                    f"{weights.dtype} {list(weights.shape)}"
                )
        for table, rows, weights in updates:
            if not rows:
                continue
            target = tables[table]
            index = torch.tensor(rows, dtype=torch.int64, device=target.device)
            target[index] = weights.to(target.device)

    def set_index_remappings(
        self,
        index_remapping: list[Tensor],
        pruning_hash_load_factor: float = 0.5,
        use_array_for_index_remapping: bool = True,
    ) -> None:
        """Set the map from ids to rows of each table, which replaces the earlier one.

        Args:
            index_remapping: map of each table: entry i is the row of id i, or -1 if the id is
                pruned. The ids of a table whose map is None are its rows. An empty list is None
                for all tables.
            pruning_hash_load_factor: ignored: hash tables are at most half full.
            use_array_for_index_remapping: whether a map is stored as an array, not as a hash table
                of the ids that have rows.

        Raises:
            ValueError: the numbers of maps and tables differ.
        """
        check_flags(use_array_for_index_remapping=use_array_for_index_remapping)
        num_tables = len(self.embedding_specs)
        remappings: list[Tensor | None] = list(index_remapping) or [None] * num_tables
        if len(remappings) != num_tables:
            raise ValueError(f"index_remapping must have {num_tables} maps, got {len(remappings)}")
        self._index_of_table = [
            None if rows is None else index_of_map(rows, is_array=use_array_for_index_remapping)
            for rows in remappings
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
        """Return a text with the number of tables, their formats and the pooling."""
        formats = sorted({spec.format.name for spec in self.embedding_specs})
        return f"{len(self.embedding_specs)} tables, {', '.join(formats)}, {self.pooling_mode.name}"


class ScriptableLookup(nn.Module):
    """Lookups in quantised tables with calls of operators only, for `torch.fx` and TorchScript.

    The module shares the memory of the tables. Invalid ids read row 0, without a warning.

    Args:
        lookup_module: the tables, with or without indexes of pruned ids.
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
        """Look up and pool, see `IntNBitTableBatchedEmbeddingBagsCodegen.forward`."""
        if self.is_pruned:
            indices = torch.ops.emblib.map_ids(
                self.index, self.index_tables, self.features, indices, offsets, None
            )
        repaired = torch.ops.emblib.bounds_check(indices, offsets, self.features, None, self.check)
        output: Tensor = torch.ops.emblib.quant_lookup(
            self.packed,
            self.features,
            indices,
            repaired[0],
            None,
            per_sample_weights,
            self.pooling,
            self.format,
            self.output_dim,
            self.output_dtype,
        )
        return output


def index_of_map(rows: Tensor, *, is_array: bool) -> RowIndex:
    """Return the index of a table whose id i has row `rows[i]`, or no row if that is -1.

    Args:
        rows: integers of any shape, one per id.
        is_array: whether the index is an array of all ids, not a hash table of those with a row.
    """
    rows, num_ids = rows.flatten(), rows.numel()
    if is_array:
        entries = torch.nn.functional.pad(rows.int(), (0, num_ids % 2), value=-1).view(torch.int64)
        return replace(RowIndex.of_mask(rows >= 0), entries=entries)
    ids_with_rows = (rows >= 0).nonzero().view(-1)
    entries, _ = quant.hash_entries(ids_with_rows, rows[ids_with_rows].long())
    return replace(RowIndex.of_keys(ids_with_rows, num_ids=num_ids), entries=entries.flatten())


# Arguments


def _check_fixed(arguments: Mapping[str, Any]) -> None:
    """Raise NotImplementedError unless the arguments in `_ONLY_VALUES` have their only value."""
    for name, (only_value, reason) in _ONLY_VALUES.items():
        value = arguments[name]
        if value != only_value:
            raise NotImplementedError(f"{name} must be {only_value!r}, got {value!r}: {reason}")


def _device(device: str | int | torch.device | None) -> torch.device:
    """Return the device; None is the current GPU, an int the GPU of that number.

    Raises:
        RuntimeError: `device` is None, and torch sees no GPU.
    """
    if device is None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "the device is by default the current GPU, and torch sees none; pass device='cpu'"
            )
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _specs(embedding_specs: Sequence[tuple[Any, ...]]) -> list[QuantizedSpec]:
    """Return the specs with emblib's enum members.

    Raises:
        NotImplementedError: a format is not supported.
        ValueError: there is no table, or rows do not fill whole bytes.
    """
    if not embedding_specs:
        raise ValueError("embedding_specs must have at least one table")
    specs: list[QuantizedSpec] = []
    for name, rows, dim, row_format, location in embedding_specs:
        row_format = as_member(SparseType, row_format)
        headerless_formats = (*_DTYPE_OF_FORMAT, SparseType.FP8)
        if row_format not in headerless_formats and not _has_header(row_format):
            raise NotImplementedError(
                f"table {name!r}: rows of {row_format.name} are not supported; formats are INT8, "
                f"INT4, INT2, {', '.join(each.name for each in headerless_formats)}"
            )
        if dim * row_format.bit_rate() % 8:
            raise ValueError(
                f"table {name!r}: rows of {row_format.name} must fill whole bytes, got dim {dim}"
            )
        location = as_member(EmbeddingLocation, location)
        specs.append(QuantizedSpec(name, rows, dim, row_format, location))
    return specs


def _check_fp8(bits: int, bias: int) -> None:
    """Raise NotImplementedError if no float16 scale converts the FP8 rows to a format of torch."""
    if (
        bits not in _FP8_FORMAT_OF_BITS
        or abs(_FP8_FORMAT_OF_BITS[bits].bias - bias) > _MAX_SCALE_EXPONENT
    ):
        raise NotImplementedError(
            "FP8 rows have 4 or 5 exponent bits, and a bias within 15 of 7 or 15, got "
            f"fp8_exponent_bits={bits}, fp8_exponent_bias={bias}"
        )


def _has_header(row_format: SparseType) -> bool:
    """Return whether rows of a format begin with a scale and a bias."""
    return row_format in (SparseType.INT8, SparseType.INT4, SparseType.INT2)


def _returns_bytes(
    output: SparseType, specs: Sequence[QuantizedSpec], pooling: PoolingMode
) -> bool:
    """Return whether lookups return the bytes of rows: whether `output` is INT8, INT4 or INT2.

    Raises:
        NotImplementedError: they do, but rows are pooled or have another format.
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
    """Return whether the tables are on a CPU.

    Raises:
        NotImplementedError: a table is not in the memory of `device`; `enforce` moves those of a
            GPU in host memory there.
    """
    locations = {spec.location for spec in specs}
    is_cpu = device.type == "cpu" or (
        device.type == "meta" and locations == {EmbeddingLocation.HOST}
    )
    allowed_locations = {EmbeddingLocation.HOST if is_cpu else EmbeddingLocation.DEVICE}
    if enforce and not is_cpu:
        allowed_locations |= {EmbeddingLocation.MANAGED, EmbeddingLocation.MANAGED_CACHING}
    if not locations <= allowed_locations:
        raise NotImplementedError(
            f"tables on {device} must have location "
            f"{sorted(each.name for each in allowed_locations)}, got "
            f"{sorted(each.name for each in locations)}: quantised tables are on the device"
        )
    return is_cpu
