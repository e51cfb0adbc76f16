"""FBGEMM's inference module over emblib's tables: the same names, arguments and methods.

INT8 and INT4 rows are those of `emblib.QuantizedEmbeddingBags`, whose bytes FBGEMM's have, FP16 and
FP32 rows those of `emblib.TableBatchedEmbeddingBags`. Rows are on the device of the module; tables
behind a cache and other formats raise. Ids of pruned tables are mapped to their rows before the
lookup, by an array of one row per id.
"""

# No `from __future__ import annotations`: TorchScript evaluates the annotations.

import itertools
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import (
    BoundsCheck,
    Pooling,
    Precision,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.compat.fbgemm_arguments import float_dtype
from emblib.compat.fbgemm_comms import rounded_row_size_in_bytes
from emblib.compat.fbgemm_operators import bucketize, jagged, pruning
from emblib.compat.fbgemm_types import (
    BoundsCheckMode,
    CacheAlgorithm,
    EmbeddingLocation,
    PoolingMode,
    RecordCacheMetrics,
    SparseType,
    as_member,
)
from emblib.ops import codes

_logger = logging.getLogger(__name__)

_Spec = tuple[str, int, int, SparseType, EmbeddingLocation]
_Rows = tuple[Tensor, Tensor | None]

_HEADER = 4  # bytes of scale and bias, two float16
_BITS = {SparseType.INT8: 8, SparseType.INT4: 4}
_FLOATS = {SparseType.FP16: torch.float16, SparseType.FP32: torch.float32}
_FIXED: dict[str, tuple[Any, str]] = {
    "record_cache_metrics": (None, "there is no cache"),
    "gather_uvm_cache_stats": (False, "there is no cache"),
    "fp8_exponent_bits": (None, "FP8 rows are not supported"),
    "fp8_exponent_bias": (None, "FP8 rows are not supported"),
    "scale_bias_size_in_bytes": (_HEADER, "scale and bias of a row are two float16"),
    "reverse_qparam": (False, "a row begins with scale and bias"),
}
"""The only value of each argument that has no counterpart, and why."""


class _Part(NamedTuple):
    """The tables of one number format, and the features that read them."""

    tables: list[int]
    features: list[int]
    bags: QuantizedEmbeddingBags | TableBatchedEmbeddingBags


class IntNBitTableBatchedEmbeddingBagsCodegen(nn.Module):
    """Table-batched lookups in read-only rows, with the interface of FBGEMM's class.

    Rows are zeros until `assign_embedding_weights`, or until the views of `split_embedding_weights`
    are written to. Nothing here has a gradient. The bytes of a row are FBGEMM's on a CPU. On a GPU
    FBGEMM pads rows to `row_alignment` bytes; here they end at a multiple of 4.

    Args:
        embedding_specs: name, rows, dim, format (INT8, INT4, FP16 or FP32) and location of each
            table: HOST on a CPU, else DEVICE.
        feature_table_map: the table of each feature; by default feature i reads table i.
        pooling_mode: SUM, MEAN, or NONE for one vector per lookup.
        device: device of rows and lookups; None is the current GPU.
        index_remapping: row of each id of each table, -1 for pruned ones, or None for all ids.
        bounds_check_mode: reaction to invalid input; the caller's tensors do not change.
        weight_lists: the argument of `assign_embedding_weights`, if there are rows already.
        output_dtype: FP32, FP16 or BF16.
        row_alignment: FBGEMM's alignment of rows; here they end at a multiple of 4.

    The arguments of caches have no effect without such tables; those and other formats raise
    NotImplementedError. Maps are arrays also with `use_array_for_index_remapping=False`.
    """

    index_remappings_array: Tensor
    index_remappings_array_offsets: Tensor
    original_rows_per_table: Tensor
    rows_per_table: Tensor

    def __init__(
        self,
        embedding_specs: list[_Spec],
        feature_table_map: list[int] | None = None,
        index_remapping: list[Tensor] | None = None,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        device: str | int | torch.device | None = None,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.WARNING,
        weight_lists: list[_Rows] | None = None,
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
        scale_bias_size_in_bytes: int = _HEADER,
        cacheline_alignment: bool = True,
        uvm_host_mapped: bool = False,
        reverse_qparam: bool = False,
        feature_names_per_table: list[list[str]] | None = None,
        indices_dtype: torch.dtype = torch.int32,
    ) -> None:
        _check_fixed(locals())
        super().__init__()
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
        self._output = float_dtype("output_dtype", output)
        self.output_dtype: int = output.as_int()
        self.row_alignment = (1 if self.use_cpu else 16) if row_alignment is None else row_alignment
        self.scale_bias_size_in_bytes = scale_bias_size_in_bytes
        self.enforce_hbm, self.uvm_host_mapped = enforce_hbm, uvm_host_mapped
        self.feature_names_per_table = feature_names_per_table
        self.indices_dtype = indices_dtype
        self.feature_names: list[str] = [spec[0] for spec in self.embedding_specs]
        self._dims = [self.embedding_specs[t][2] for t in self.feature_table_map]
        if self.pooling_mode is PoolingMode.NONE and len(set(self._dims)) > 1:
            raise ValueError(f"without pooling all tables must have one dim, got {self._dims}")
        self.total_D: int = sum(self._dims)
        self._parts: list[_Part] = []
        self.set_index_remappings(index_remapping or [])
        if weight_lists:
            self.assign_embedding_weights(weight_lists)

    @property
    def current_device(self) -> torch.device:
        """Return the device of the rows."""
        return self._parts[0].bags.features.device if self._parts else self._device

    @property
    def weight_initialized(self) -> bool:
        """Return whether there is memory for the rows."""
        return bool(self._parts)

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
            indices: int32 or int64 `[L]`; -1 skips.
            offsets: int32 or int64 `[F * B + 1]`, feature-major.
            per_sample_weights: `[L]`, scales each row.

        Raises:
            RuntimeError: there are no rows yet; invalid input in mode FATAL.
        """
        return self._forward_impl(indices, offsets, per_sample_weights)

    def _forward_impl(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Look up; subclasses of TorchRec call it."""
        if not self._parts:
            raise RuntimeError(
                "there are no rows yet: call initialize_weights() and assign_embedding_weights()"
            )
        if isinstance(indices, torch.fx.Proxy):
            return self._lookup_of_graphs().forward(indices, offsets, per_sample_weights)
        device = self.current_device
        is_async = device.type != "cpu"
        indices, offsets = (x.to(device, non_blocking=is_async) for x in (indices, offsets))
        weights = None
        if per_sample_weights is not None:
            weights = per_sample_weights.detach().to(device, torch.float32, non_blocking=is_async)
        with torch.no_grad():
            if self.index_remappings_array.numel():
                indices, offsets = self._map(indices, offsets)
            if len(self._parts) == 1:
                return self._parts[0].bags(indices, offsets, weights)
            return self._look_up_formats(indices, offsets, weights)

    def _map(self, indices: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of ids, after a check of the ids, and the checked offsets."""
        indices, offsets = indices.clone(), offsets.to(indices.dtype, copy=True)
        mode = BoundsCheckMode(self.bounds_check_mode_int).name.removeprefix("V2_")
        bucketize.bounds_check_indices(
            self.original_rows_per_table,
            indices,
            offsets,
            BoundsCheckMode[mode].value,
            torch.zeros(1, dtype=torch.int64, device=indices.device),
        )
        features = len(self.feature_table_map)
        batch = max((offsets.numel() - 1) // features, 1)
        table = torch.tensor(self.feature_table_map, device=indices.device).repeat_interleave(
            offsets[::batch].diff(), output_size=indices.numel()
        )
        ends = self.index_remappings_array_offsets
        first, count = ends[table], ends.diff()[table]
        return pruning.map_ids(indices, first, count, self.index_remappings_array), offsets

    def _look_up_formats(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Look up the features of each number format, and join their blocks."""
        features = len(self.feature_table_map)
        lengths = offsets.diff().view(features, -1)
        is_pooled = self.pooling_mode is not PoolingMode.NONE
        sizes = self._dims if is_pooled else lengths.sum(1).tolist()
        blocks: list[Tensor] = [indices] * features
        for part in self._parts:
            order = torch.tensor(part.features, device=indices.device)
            bags, ids, scales = jagged.permute_2d_sparse_data(order, lengths, indices, weights)
            out = part.bags(ids, jagged.complete_cumsum(bags.flatten()), scales)
            parts = out.split([sizes[f] for f in part.features], dim=1 if is_pooled else 0)
            for feature, block in zip(part.features, parts, strict=True):
                blocks[feature] = block
        return torch.cat(blocks, dim=1 if is_pooled else 0)

    def _lookup_of_graphs(self) -> "ScriptableLookup":
        """Return the lookup in ops alone, for graphs.

        Raises:
            TypeError: tables of several formats.
        """
        if not self._parts:
            raise RuntimeError("there are no rows yet: call initialize_weights() first")
        if self.index_remappings_array.numel():
            raise TypeError("pruned tables: trace with this class as a leaf module")
        if len(self._parts) > 1:
            formats = sorted({spec[3].name for spec in self.embedding_specs})
            raise TypeError(
                f"torch.fx and TorchScript take tables of one format, got {formats}: trace with "
                "this class as a leaf module"
            )
        return ScriptableLookup(self._parts[0].bags)

    def __prepare_scriptable__(self) -> nn.Module:
        return self._lookup_of_graphs()

    # Rows

    def initialize_weights(self) -> None:
        """Allocate the rows, as zeros; a second call does nothing."""
        if self._parts:
            return
        formats = dict.fromkeys(spec[3] for spec in self.embedding_specs)
        self._parts = [self._part(kind) for kind in formats]

    def _part(self, kind: SparseType) -> _Part:
        tables = [t for t, spec in enumerate(self.embedding_specs) if spec[3] is kind]
        features = [f for f, t in enumerate(self.feature_table_map) if t in tables]
        mode = BoundsCheckMode(self.bounds_check_mode_int)
        common: dict[str, Any] = {
            "tables": [TableSpec(*self.embedding_specs[t][1:3]) for t in tables],
            "pooling": Pooling(self.pooling_mode.name.lower()),
            "feature_tables": [tables.index(self.feature_table_map[f]) for f in features],
            "bounds_check": BoundsCheck(mode.name.removeprefix("V2_").lower()),
            "device": self._device,
        }
        if kind in _BITS:
            quantised = QuantizedEmbeddingBags(
                bits=_BITS[kind], output_dtype=self._output, **common
            )
            return _Part(tables, features, quantised)
        plain = TableBatchedEmbeddingBags(
            optimizer=optim.SGD(0.0),  # which has no state; lookups have no gradient
            precision=Precision(weights=_FLOATS[kind], output=self._output),
            **common,
        )
        plain.requires_grad_(False)
        with torch.no_grad():
            for rows in plain.table_weights():
                rows.zero_()
        return _Part(tables, features, plain)

    def split_embedding_weights_with_scale_bias(
        self, split_scale_bias_mode: int = 1
    ) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Return the bytes of the rows of each table, as views.

        Args:
            split_scale_bias_mode: 0 for whole rows, uint8 `[rows, bytes]`; 1 for numbers, and scale
                and bias, uint8 `[rows, 4]`; 2 for numbers, scale and bias, float16 `[rows, 1]`.
                Tables of floats have their rows only.
        """
        if split_scale_bias_mode not in (0, 1, 2):
            raise ValueError(
                f"split_scale_bias_mode must be 0, 1 or 2, got {split_scale_bias_mode}"
            )
        result: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        padded = split_scale_bias_mode == 0
        for rows, spec in zip(self._rows(padded=padded), self.embedding_specs, strict=True):
            if split_scale_bias_mode == 0 or spec[3] not in _BITS:
                result.append((rows, None, None))
                continue
            numbers, header = rows[:, _HEADER:], rows[:, :_HEADER]
            if split_scale_bias_mode == 1:
                result.append((numbers, header, None))
                continue
            scale, bias = (part.view(torch.float16) for part in header.split(_HEADER // 2, dim=1))
            result.append((numbers, scale, bias))
        return result

    def _rows(self, *, padded: bool = True) -> list[Tensor]:
        """Return the rows of each table, uint8 `[rows, bytes]`.

        With `padded` rows are filled up to `row_alignment` where emblib's own, which end at a
        multiple of 4, reach as far.
        """
        if not self._parts:
            raise RuntimeError("there are no rows yet: call initialize_weights() first")
        found: dict[int, Tensor] = {}
        for part in self._parts:
            if isinstance(part.bags, QuantizedEmbeddingBags):
                views = [view["packed"] for view in part.bags.table_views()]
            else:
                weights = part.bags.table_weights()
                views = [rows.detach().view(torch.uint8) for rows in weights]
            for table, view in zip(part.tables, views, strict=True):
                _, _, dim, kind, _ = self.embedding_specs[table]
                sizes = [rounded_row_size_in_bytes(dim, kind, n) for n in (1, self.row_alignment)]
                has_padding = padded and sizes[1] <= view.size(1)
                found[table] = view[:, : sizes[has_padding]]
        return [found[table] for table in range(len(self.embedding_specs))]

    def split_embedding_weights(self, split_scale_shifts: bool = True) -> list[_Rows]:
        """Return numbers, and scale and bias, of each table, as views; or whole rows."""
        mode = 1 if split_scale_shifts else 0
        parts = self.split_embedding_weights_with_scale_bias(mode)
        return [(rows, header) for rows, header, _ in parts]

    def assign_embedding_weights(self, q_weight_list: Sequence[_Rows]) -> None:
        """Copy into `split_embedding_weights()`; nothing is written if an entry does not fit.

        Raises:
            ValueError: another number of tables, dtype or shape.
        """
        self.initialize_weights()
        targets = self.split_embedding_weights()
        if len(q_weight_list) != len(targets):
            raise ValueError(f"expected {len(targets)} tables, got {len(q_weight_list)}")
        copies: list[tuple[Tensor, Tensor]] = []
        for (name, *_), target, given in zip(
            self.embedding_specs, targets, q_weight_list, strict=True
        ):
            for view, values in zip(target, given, strict=True):
                if view is None and values is None:
                    continue
                expected = None if view is None else list(view.shape)
                found = None if values is None else list(values.shape)
                if view is None or values is None or expected != found:
                    raise ValueError(f"table {name!r}: expected {expected}, got {found}")
                if values.dtype != torch.uint8:
                    raise ValueError(f"table {name!r}: rows must be uint8, got {values.dtype}")
                copies.append((view, values))
        for view, values in copies:
            view.copy_(values)

    def fill_random_weights(self) -> None:
        """Fill numbers, which leaves scale and bias, or the rows of floats, at random."""
        self.initialize_weights()
        for (rows, _), spec in zip(
            self.split_embedding_weights(), self.embedding_specs, strict=True
        ):
            if spec[3] in _BITS:
                rows.random_(0, 255)
            else:
                rows.view(_FLOATS[spec[3]]).uniform_(-1, 1)

    def embedding_inplace_update(
        self,
        update_table_indices: list[int],
        update_row_indices: list[list[int]],
        update_weights: list[Tensor],
    ) -> None:
        """Replace rows `update_row_indices` of tables, uint8 `[n, bytes]` with scale and bias."""
        tables = self._rows()
        for table, rows, weights in zip(
            update_table_indices, update_row_indices, update_weights, strict=True
        ):
            target = tables[table]
            index = torch.tensor(rows, dtype=torch.int64, device=target.device)
            target[index] = weights.to(target.device)

    def set_index_remappings(
        self,
        index_remapping: list[Tensor],
        pruning_hash_load_factor: float = 0.5,
        use_array_for_index_remapping: bool = True,
    ) -> None:
        """Set the row of each id of each table; -1 is a pruned one, and None maps no ids."""
        self.set_index_remappings_array(index_remapping)

    def set_index_remappings_array(self, index_remapping: list[Tensor]) -> None:
        """Set the row of each id of each table; -1 is a pruned one, and None maps no ids."""
        tables = len(self.embedding_specs)
        maps: list[Tensor | None] = list(index_remapping) or [None] * tables
        if len(maps) != tables:
            raise ValueError(f"index_remapping must have {tables} maps, got {len(maps)}")
        sizes = [0 if rows is None else rows.numel() for rows in maps]
        original = [size or spec[1] for size, spec in zip(sizes, self.embedding_specs, strict=True)]
        given = [rows.flatten().cpu() for rows in maps if rows is not None]
        buffers = {
            "index_remappings_array": torch.cat(
                [torch.empty(0, dtype=self.indices_dtype), *given]
            ).to(self.indices_dtype),
            "index_remappings_array_offsets": torch.tensor([0, *itertools.accumulate(sizes)]),
            "rows_per_table": torch.tensor(
                [self.embedding_specs[t][1] for t in self.feature_table_map]
            ),
            "original_rows_per_table": torch.tensor([original[t] for t in self.feature_table_map]),
        }
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor.to(self._device), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        for part in self._parts:
            part.bags._apply(fn, recurse)
        self._device = self.current_device
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """Describe tables and pooling."""
        formats = sorted({spec[3].name for spec in self.embedding_specs})
        return f"{len(self.embedding_specs)} tables, {', '.join(formats)}, {self.pooling_mode.name}"


class ScriptableLookup(nn.Module):
    """The lookup of tables of one format in ops alone, for `torch.fx` and TorchScript.

    It shares the memory of the tables. Invalid input is skipped without a report.
    """

    rows: Tensor
    features: Tensor

    def __init__(self, bags: QuantizedEmbeddingBags | TableBatchedEmbeddingBags) -> None:
        super().__init__()
        self.bits = 0  # for floats
        if isinstance(bags, QuantizedEmbeddingBags):
            self.bits = int(bags.bits)
        rows: Tensor = getattr(bags, "weights" if self.bits == 0 else "packed")
        self.register_buffer("rows", rows.detach(), persistent=False)
        self.register_buffer("features", bags.features, persistent=False)
        self.output_dim = int(bags.output_dim)
        self.output_dtype: torch.dtype = bags.output_dtype
        self.pooling = int(codes.POOLING[bags.pooling.value])

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return pooled rows, as the module does."""
        if self.bits == 0:
            result: Tensor = torch.ops.emblib.tbe_lookup(
                [self.rows],
                self.features,
                indices,
                offsets,
                None,
                None,
                per_sample_weights,
                self.pooling,
                self.output_dim,
                self.output_dtype,
            )
        else:
            result = torch.ops.emblib.quant_lookup(
                self.rows,
                self.features,
                indices,
                offsets,
                None,
                per_sample_weights,
                self.pooling,
                self.bits,
                self.output_dim,
                self.output_dtype,
            )
        return result


# Arguments


def _check_fixed(given: Mapping[str, Any]) -> None:
    """Raise for arguments without a counterpart."""
    for name, (only, reason) in _FIXED.items():
        value = given[name]
        if value != only:
            raise NotImplementedError(f"{name} must be {only!r}, got {value!r}: {reason}")


def _device(device: str | int | torch.device | None) -> torch.device:
    if device is None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "the device is by default the current GPU, and torch sees none; pass device='cpu'"
            )
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _specs(given: Sequence[_Spec]) -> list[_Spec]:
    """Check formats and dims; return the specs with emblib's enum members."""
    if not given:
        raise ValueError("embedding_specs must have at least one table")
    result: list[_Spec] = []
    for name, rows, dim, kind, location in given:
        kind = as_member(SparseType, kind)
        if kind not in _BITS and kind not in _FLOATS:
            formats = ", ".join(k.name for k in (*_BITS, *_FLOATS))
            raise NotImplementedError(
                f"table {name!r}: rows of {kind.name} are not supported; formats are {formats}"
            )
        if kind is SparseType.INT4 and dim % 2:
            raise ValueError(f"table {name!r}: dims of INT4 rows must be even, got {dim}")
        result.append((name, rows, dim, kind, as_member(EmbeddingLocation, location)))
    return result


def _check_locations(specs: Sequence[_Spec], device: torch.device, *, enforce: bool) -> bool:
    """Raise for rows outside the memory of the device; return whether that is a CPU's."""
    locations = {spec[4] for spec in specs}
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
