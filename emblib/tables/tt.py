"""Tables stored as tensor-train cores, with the optimizer fused into backward.

A row is the product of a left and a right half, which are products of core slices that the digits
of its id select. A forward maps ids to keys, which number the rows of all tables, groups the batch,
computes each distinct row from its halves, and pools. Backward forms the gradients of the distinct
rows, then of the halves, then of the cores; with a fused optimizer it updates every core row that
contributed. The ops are in `emblib.ops.tt`. `TTEmbeddingBag` is a module of one table.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.attribute_errors import shows_attribute_errors
from emblib.columns import FeatureRow, TTTableColumn
from emblib.grad_mode import in_grad_mode, without_gradients
from emblib.ops import autograd, tt
from emblib.ops.derivatives import refuse_transforms
from emblib.optim import Optimizer
from emblib.specs import (
    BoundsCheck,
    MatmulPrecision,
    Pooling,
    Precision,
    TTSpec,
    check_bool,
    format_config,
)
from emblib.tables import optimizer_hooks, parameters, state_dicts
from emblib.tables.base import FusedTables, SpecKind
from emblib.tables.batches import (
    append_last_offset,
    check_bounds,
    check_tensor,
    flatten_equal_bags,
    missing_offsets_error,
)
from emblib.tables.tt_calls import ShortTTCalls
from emblib.tables.tt_svd import decompose
from emblib.tt import layout_entry
from emblib.tt.initializers import CoreLayout, dense_row_std, find_initializer
from emblib.tt.shapes import check_ranks
from emblib.tt.work import TTWork

_LOG = logging.getLogger(__name__)
_BLOCK_ROWS = 1 << 16  # rows per block of `dense_blocks`


class Cores(nn.ParameterList):
    """The cores as a `ParameterList`. Loading copies values into them, also with `assign=True`."""

    _names: Sequence[str] = ()

    def __init__(self, cores: Iterable[Tensor]) -> None:
        super().__init__(cores)
        self._names = list(self._parameters)

    def as_list(self) -> list[nn.Parameter]:
        """Return the cores as a list, which is faster than iterating over a `ParameterList`."""
        named_cores: Any = self._parameters
        # Cores that a parametrization or pruning computes are not there; once it is removed, the
        # order of names is another.
        is_plain = list(named_cores) == self._names
        return list(named_cores.values()) if is_plain else list(self)

    def are_computed(self) -> bool:
        """Return whether a parametrization or pruning computes a core."""
        return any(name not in self._parameters for name in self._names)

    @ops.keeping_parameters()
    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *arguments: Any
    ) -> None:
        if not state_dicts.refuse_invalid(self, state_dict, prefix, arguments[-1]):
            super()._load_from_state_dict(
                state_dict, prefix, _without_assign(local_metadata), *arguments
            )

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the cores in a state dict."""
        return state_dicts.entry_problems(state_dict, state_dicts.loadable_tensors(self, prefix))


def _without_assign(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a load without the option `assign`, so that values are copied."""
    return {key: value for key, value in metadata.items() if key != state_dicts.ASSIGN}


class TableBatchedTTEmbeddingBags(FusedTables):
    """Look up F features in T tensor-train tables at once, and pool them into `[B, sum D]`.

    Tables may differ in rows, dim, ranks, factors and number of cores. Every distinct row of the
    batch is computed once from the 2 to 4 small cores of its table; the CPU divides a large batch
    into chunks and computes a row once per chunk. Backward forms the gradients of the cores. It
    applies a fused `optimizer` to every core row that contributed; with `optim.External()`, without
    an optimizer or with `deferred=True` it leaves dense gradients on `cores` instead. A table has
    the same bits as in a module of its own (except with stochastic rounding, whose random numbers
    depend on the tables before it).

    Args:
        tables: rows, dim, ranks, factors and name of each table.
        optimizer: optimizer of `emblib.optim`; its "row" is the row of a core. None leaves dense
            gradients for an optimizer of `torch.optim`.
        pooling: SUM, MEAN, or NONE for one vector per lookup (needs one dim for all tables).
        feature_tables: the table of each feature; by default feature i reads table i.
        init: "gaussian", "first_core", "uniform", "sampled_gaussian" (TT-Rec's) or
            "approx_uniform"; all give rows the standard deviation 1/sqrt(3 * rows), which a dense
            table's initial rows have. "positive_uniform", "unscaled_uniform", "unscaled_normal",
            "saw_tooth" and "unscaled_sampled_gaussian" are FBTT-Embedding's, with its scales, to
            compare runs. `emblib.tt.initializers` describes them.
        precision: dtypes of cores (`weights`), output and optimizer state, rounding of updates of
            cores, and precision of products on a GPU (`matmul`); None is `Precision()`. Rows and
            sums are float32 in any case, and on the CPU products too; another `matmul` is logged.
        bounds_check: reaction to invalid indices and offsets, see `BoundsCheck`.
        device: device of the cores; None is torch's default device.
        include_last_offset: False for offsets without their last entry, the number of indices, as
            `nn.EmbeddingBag` takes them.

    Raises:
        TypeError: an argument has another class.
        ValueError: there are no tables, a feature reads a missing table, table names are equal,
            dims differ without pooling, the factors do not allow the ranks, `pooling`, `init` or
            `bounds_check` is unknown, or the optimizer needs rows of dense tables.

    Threads may read a module at the same time; simultaneous updates may be lost (docs/threads.md).

    `cores` has the cores of all tables, table after table; `table_cores` returns the cores of one
    table, which cover `prod(row_factors) >= rows` rows. The surplus is never read, computed or
    trained.

    Tables may be slices of tables whose other slices are in other modules: `shared_gradients` has,
    by table number, the `ShareGradients` that sums the gradients of cores that slices share.

    Example:
        >>> tables = [emblib.TTSpec(1_000_000, 64, (16, 16)), emblib.TTSpec(20_000, 32, (8, 8))]
        >>> bags = emblib.TableBatchedTTEmbeddingBags(tables, emblib.optim.Adagrad(0.1))
        >>> bags(torch.tensor([3, 14, 15, 92]), torch.tensor([0, 2, 3, 3, 4])).shape
        torch.Size([2, 96])
    """

    cores: Cores
    tables: tuple[TTSpec, ...]
    spec_kind = SpecKind(TTSpec, "TTSpec(1000, 64, ranks=(8, 8))", "use TableBatchedEmbeddingBags")
    has_row_gradients = False
    has_matrix_products = True
    fixed_buffers = ("features", layout_entry.NAME, "table_ids", "feature_table_ids")
    table_ids: Tensor  # int64 `[T, 10]`, see `TTTableColumn`
    feature_table_ids: Tensor  # int64 `[F, 10]`, the same by feature
    frozen_cores: frozenset[int] = frozenset()  # indices in `cores`
    _calls: ShortTTCalls | None = None

    @torch.inference_mode(mode=False)  # tensors of inference mode could not be trained later
    def __init__(
        self,
        tables: Sequence[TTSpec],
        optimizer: Optimizer | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        init: str = "gaussian",
        precision: Precision | None = None,
        output_dtype: None = None,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
    ) -> None:
        _refuse_output_dtype(output_dtype)
        precision = Precision() if precision is None else precision
        super().__init__(tables, optimizer, pooling, feature_tables, precision, bounds_check)
        check_bool("include_last_offset", include_last_offset)
        self.include_last_offset = include_last_offset
        if not self.tables:
            raise ValueError("tables must have at least one TTSpec, got none")
        if optimizer_hooks.is_periodic(self.optimizer) or optimizer_hooks.find_global_decay(
            self.optimizer
        ):
            raise ValueError(
                f"{self.optimizer} reads rows of a dense table; a tensor-train table has none: "
                "use TableBatchedEmbeddingBags, or RowwiseAdagrad without counter and global_decay"
            )
        self.init = init
        self.shared_gradients: dict[int, tt.ShareGradients] = {}
        self._check_ranks()
        find_initializer(init)  # raises before memory is allocated
        self.core_layout = tt.layout_of(self.tables)
        device = torch.empty(0, device=device).device
        ops.require_kernels(device)
        matmul = self.precision.matmul
        if device.type == "cpu" and matmul is not MatmulPrecision.FLOAT32:
            _LOG.info(
                "products of cores are float32 on the CPU, matmul=%r is for GPUs", matmul.value
            )
        self._allocate(device)
        self.reset_parameters()

    def _check_ranks(self) -> None:
        for spec in self.tables:
            check_ranks(spec.ranks, spec.row_factors, spec.dim_factors)

    def _allocate(self, device: torch.device) -> None:
        """Allocate cores and buffers on a device."""
        shapes = [shape for spec in self.tables for shape in _core_layout(spec, device).shapes()]
        self._allocate_cores(shapes, device)
        self._mark_parameters()
        feature_makers = (self._key_feature, self._id_feature, self._row_feature)
        self._layout = [row for make in feature_makers for row in self._feature_rows(make)]
        self.register_buffer(layout_entry.NAME, layout_entry.from_specs(self.tables).to(device))
        for name, ids in self._table_id_buffers().items():
            self.register_buffer(name, ids.to(device), persistent=False)
        self._register_common(device)

    def _allocate_cores(self, shapes: Sequence[tuple[int, int]], device: torch.device) -> None:
        """Set `cores` and register the optimizer states of cores of these shapes."""
        dtype = self.precision.weights
        self.cores = Cores(
            nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape in shapes
        )
        for k, (p, core_row_length) in enumerate(shapes):
            for state in self.optimizer.states:
                size = (p,) if state.per_row else (p, core_row_length)
                state_dtype = torch.float32 if state.per_row else self.precision.states
                values = torch.zeros(size, dtype=state_dtype, device=device)
                self.register_buffer(f"state_{state.name}_{k}", values)
        self._state_names = [
            [f"state_{state.name}_{k}" for state in self.optimizer.states]
            for k in range(len(shapes))
        ]

    def _key_feature(self, table: int, column: int) -> FeatureRow:
        """Return the row of `features` of a feature of `table`, for ops that take keys."""
        spec = self.tables[table]
        first_key = self.core_layout.tables[table][TTTableColumn.FIRST_KEY]
        rows = math.prod(spec.row_factors)
        return FeatureRow(row_base=first_key, rows=rows, dim=spec.dim, column=column)

    def _id_feature(self, table: int, column: int) -> FeatureRow:
        """Return the row of `features` of a feature of `table`, for bounds checks of ids."""
        spec = self.tables[table]
        return FeatureRow(rows=spec.rows, dim=spec.dim, column=column)

    def _row_feature(self, table: int, column: int) -> FeatureRow:
        """Return the row of `features` of a feature of `table`, for computed rows on a GPU."""
        return tt.row_feature(self.core_layout, self.tables[table].dim, column)

    def _table_id_buffers(self) -> dict[str, Tensor]:
        """Return the buffers `table_ids` and `feature_table_ids`, which map row ids to keys."""
        ids = torch.tensor(self.core_layout.tables, dtype=torch.int64, device="cpu")
        by_feature = ids[torch.tensor(self.feature_tables, dtype=torch.int64, device="cpu")]
        return {"table_ids": ids, "feature_table_ids": by_feature}

    def id_features(self) -> Tensor:
        """Return the rows of `features` that describe ids, int64 `[F, 8]`, for bounds checks."""
        num_features = len(self.feature_tables)
        return self.features[num_features : 2 * num_features]

    def _restore(self) -> None:
        self._calls = None  # they would keep the memory of the module on another device alive
        super()._restore()
        device = self.hyperparams.device
        setattr(self, layout_entry.NAME, layout_entry.from_specs(self.tables).to(device))
        for name, ids in self._table_id_buffers().items():
            buffer = getattr(self, name)
            if buffer.device == device and not buffer.is_meta:
                buffer.copy_(ids)  # a captured CUDA graph has its address
            else:
                setattr(self, name, ids.to(device))
        self._store_fixed_buffers()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load the optimizer states; torch then loads the cores, which are checked here as well.

        Values are copied, also with `assign=True`: a module on `meta` moves to their device.
        """
        metadata, *other_arguments = arguments
        _, missing_names, _, errors = other_arguments
        if state_dicts.refuse_invalid(self, state_dict, prefix, errors):
            return
        keys = [f"{prefix}cores.{k}" for k in range(len(self.cores))]
        if (
            self.hyperparams.is_meta
            and metadata.get(state_dicts.ASSIGN)
            and all(key in state_dict for key in keys)
        ):
            self.to_empty(device=state_dict[keys[0]].device)
        super()._load_from_state_dict(
            state_dict, prefix, _without_assign(metadata), *other_arguments
        )
        if f"{prefix}cores.0" in state_dict and f"{prefix}{layout_entry.NAME}" in missing_names:
            # The shapes of the cores identify the layout.
            missing_names.remove(f"{prefix}{layout_entry.NAME}")

    def _expected_keys(self, state_dict: Mapping[str, Any]) -> Iterable[str]:
        if layout_entry.describe_mismatch(state_dict, "", self.tables, self.cores):
            return state_dict.keys()  # of other tensor trains: the load says so, and writes nothing
        optional = {layout_entry.NAME} - state_dict.keys()  # older state dicts have none
        return self.state_dict().keys() - optional

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the module in a state dict."""
        problem = layout_entry.describe_mismatch(state_dict, prefix, self.tables, self.cores)
        if problem:
            yield problem
        else:
            yield from super().state_problems(state_dict, prefix)

    def set_trained(self, parameter: nn.Parameter, *, trained: bool) -> None:
        """Train a core from the next forward on, or freeze it.

        A forward raises RuntimeError if only some cores of a table are frozen.
        """
        numbers = self._numbers_of(parameter)
        self.frozen_cores = self.frozen_cores - numbers if trained else self.frozen_cores | numbers
        self._frozen_tables = frozenset(
            t for t in range(len(self.tables)) if self.frozen_cores >= set(self.core_numbers(t))
        )
        self._frozen = len(self._frozen_tables) == len(self.tables)

    def _numbers_of(self, parameter: nn.Parameter) -> frozenset[int]:
        """Return the indices in `cores` of a parameter: one core, or none."""
        return frozenset(k for k, core in enumerate(self.cores) if core is parameter)

    def core_numbers(self, table: int) -> range:
        """Return the indices in `cores` of a table."""
        return range(len(self.cores))[self.core_layout.cores_of(table)]

    def _check_frozen(self) -> None:
        if not self.frozen_cores:
            return
        for t in range(len(self.tables)):
            numbers = self.core_numbers(t)
            frozen = [k - numbers[0] for k in numbers if k in self.frozen_cores]
            if frozen and t not in self._frozen_tables:
                raise RuntimeError(
                    f"cores {frozen} of {len(numbers)} are frozen in table "
                    f"{self.table_names[t]!r}: a tensor train is trained whole, so call "
                    "requires_grad_ for all its cores"
                )

    @without_gradients
    def reset_parameters(self) -> None:
        """Redraw the cores, zero optimizer state and step; the learning rate is `optimizer.lr`."""
        for t in range(len(self.tables)):
            for core, value in zip(self.table_cores(t), self._draw(t), strict=True):
                core.copy_(value)
        for states in self.core_states():
            for state in states:
                state.zero_()
        self._reset_common()

    def _draw(self, table: int) -> Sequence[Tensor]:
        """Draw the initial values of the cores of a table."""
        spec = self.tables[table]
        layout = _core_layout(spec, self.features.device)
        return find_initializer(self.init)(layout, dense_row_std(spec.rows))

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Pool embeddings to `[B, sum D]`, or `[L, D]` for pooling NONE, in `output_dtype`.

        Args:
            indices: int32 or int64 `[L]`, row of each lookup in the table of its feature; -1 skips.
            offsets: int32 or int64 `[F * B + 1]`, feature-major: bag of feature f and sample b is
                `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`. `[F * B]` without
                `include_last_offset`.
            per_sample_weights: float32 `[L]`, scales each row; gets a gradient if it requires one.
            batch_sizes: `[F][ranks]` if features differ in batch size, as in
                `TableBatchedEmbeddingBags`; the output is one vector then.

        Raises:
            TypeError: indices, offsets or weights are not tensors, or `batch_sizes` are not ints.
            RuntimeError: as for `TableBatchedEmbeddingBags`, or only some cores of a table are
                frozen.
            ValueError: `batch_sizes` do not fit.
        """
        cores = self._all_cores()
        refuse_transforms(
            "per_sample_weights and cores",
            per_sample_weights,
            indices,
            offsets,
            *cores,
            module=self,
        )
        if not self.include_last_offset:
            offsets = append_last_offset(indices, offsets)
        if not torch.compiler.is_compiling():
            self.check_layout()
            calls = self._calls
            if calls is None or not calls.matches(self, cores):
                calls = self._prepare_calls(cores)
            if calls.can_serve(self, indices, offsets, per_sample_weights):
                return calls(self, indices, offsets, per_sample_weights, batch_sizes)
        self._check_frozen()
        if per_sample_weights is not None:
            check_tensor("per_sample_weights", per_sample_weights)
        batch = self._batch(indices, offsets, batch_sizes)
        wants_sample_grad = per_sample_weights is not None and per_sample_weights.requires_grad
        if not torch.is_grad_enabled():
            return tt.lookup(cores, batch, per_sample_weights)
        if self._frozen and not wants_sample_grad:
            return tt.lookup([core.detach() for core in cores], batch, per_sample_weights)
        rule = autograd.UpdateRule.from_optimizer(self.optimizer)
        if not autograd.updates_in_backward(self.optimizer):
            self._unstepped_gradients.check(cores)
            return tt.DenseTTLookup.apply(
                batch, per_sample_weights, rule, self.shared_gradients, *cores
            )
        self._check_not_wrapped(cores)
        return tt.FusedTTLookup.apply(
            self.grad_anchor.detach() if self._frozen else self.grad_anchor,
            cores,
            self.core_states(),
            self.hyperparams,
            rule,
            batch,
            per_sample_weights,
            self.shared_gradients,
            self.frozen_cores,
        )

    def _prepare_calls(self, cores: list[Any]) -> ShortTTCalls:
        """Make the shared arguments of calls from the module's current tensors and options."""
        if autograd.is_fused(self.optimizer) and torch.is_grad_enabled():
            self._check_cores(cores)
        self._calls = ShortTTCalls(self, cores)
        return self._calls

    def _check_cores(self, cores: list[Any]) -> None:
        """Raise RuntimeError for cores that a wrapper has replaced or replicated."""
        if autograd.updates_in_backward(self.optimizer):
            self._check_not_wrapped(cores)
        elif self.cores.are_computed():
            parameters.refuse_replacement("cores")

    def _apply_gradients(self) -> None:
        """Apply the gradients that are on the cores of deferred tables."""
        cores = self._all_cores()
        if all(core.grad is None for core in cores):
            return
        gradients = [
            torch.zeros_like(core, dtype=torch.float32) if core.grad is None else core.grad.float()
            for core in cores
        ]
        rule = autograd.UpdateRule.from_optimizer(self.optimizer)
        detached = [core.detach() for core in cores]
        first_rows = self.core_layout.first_core_rows()
        tt.update_cores(detached, self.core_states(), self.hyperparams, rule, gradients, first_rows)

    def _batch(
        self, indices: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> tt.TTLookup:
        """Check a batch and return it as ops take it, with repaired offsets and bag layout.

        Arguments are those of `forward`.
        """
        bag_layout, output_dim = self.lay_out_bags(offsets, batch_sizes)
        return tt.TTLookup(
            self.core_layout,
            self.table_ids,
            self.feature_table_ids,
            self.features,
            indices,
            check_bounds(self, indices, offsets, self.id_features(), bag_layout),
            bag_layout,
            self.pooling,
            output_dim,
            self.output_dtype,
            repaired=self.bounds_check is not BoundsCheck.NONE,
            matmul=self.precision.matmul,
        )

    def _all_cores(self) -> list[nn.Parameter]:
        """Return the cores as lookups read them."""
        return self.cores.as_list()

    def core_states(self) -> list[list[Tensor]]:
        """Return the optimizer states of each core, table after table."""
        buffers: Any = self._buffers
        return [[buffers[name] for name in names] for names in self._state_names]

    def table_cores(self, table: int | str) -> list[nn.Parameter]:
        """Return the cores of a table; see `table_number` for errors."""
        return [self.cores[k] for k in self.core_numbers(self.table_number(table))]

    def core_optimizer_states(self, table: int | str | None = None) -> list[dict[str, Tensor]]:
        """Return per core of a table, or of all tables if None, its optimizer states by name.

        A state is core-shaped, or has one entry per row of the core. Writing to one writes to the
        module.
        """
        names = [state.name for state in self.optimizer.states]
        numbers = range(len(self.cores))
        if table is not None:
            numbers = self.core_numbers(self.table_number(table))
        all_states = self.core_states()
        return [dict(zip(names, all_states[k], strict=True)) for k in numbers]

    def to_dense(self, table: int | str) -> Tensor:
        """Return a table as a dense float32 `[rows, D]` matrix, with products in float32.

        Raises:
            KeyError, IndexError, TypeError: there is no such table, see `table_number`.
        """
        spec = self.tables[self.table_number(table)]
        return join_blocks(self.dense_blocks(table), spec.rows, spec.dim, self.features.device)

    def dense_blocks(self, table: int | str) -> Iterator[Tensor]:
        """Yield the rows of `to_dense` in blocks `[n, D]`, in order."""
        spec, device = self.tables[self.table_number(table)], self.features.device
        layout = tt.layout_of([spec])
        ids = torch.tensor(layout.tables, dtype=torch.int64, device=device)
        keys = FeatureRow(rows=layout.num_keys, dim=spec.dim)
        feature_rows = [keys, keys, tt.row_feature(layout, spec.dim, 0)]
        features = torch.tensor(feature_rows, dtype=torch.int64, device=device)
        cores = [core.detach() for core in self.table_cores(table)]
        for start in range(0, spec.rows, _BLOCK_ROWS):
            rows = torch.arange(start, min(start + _BLOCK_ROWS, spec.rows), device=device)
            offsets = torch.arange(rows.numel() + 1, device=device)
            batch = tt.TTLookup(
                layout,
                ids,
                ids,
                features,
                rows,
                offsets,
                None,
                Pooling.NONE,
                spec.dim,
                torch.float32,
            )
            yield tt.lookup(cores, batch)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of `weights` (all cores) and `optimizer_state`."""
        return {
            "weights": sum(core.nbytes for core in self.cores),
            "optimizer_state": sum(
                state.nbytes for states in self.core_states() for state in states
            ),
        }

    @without_gradients
    def work(
        self,
        indices: Tensor,
        offsets: Tensor,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> list[TTWork]:
        """Return the work of a batch per table: distinct rows and halves, and multiply-adds.

        Nothing is looked up. Arguments and errors are those of `forward`; invalid input counts and
        warns as there. The host waits for a GPU.
        """
        if not self.include_last_offset:
            offsets = append_last_offset(indices, offsets)
        batch = self._batch(indices, offsets, batch_sizes)
        keys = torch.ops.emblib.tt_keys(
            batch.indices, batch.offsets, batch.bag_layout, batch.feature_tables
        )
        num_features, work_by_table = len(self.feature_tables), []
        equal_sizes = [[(batch.offsets.numel() - 1) // num_features]] * num_features
        first_bags = [0, *accumulate(map(sum, batch_sizes or equal_sizes))]
        keys_by_feature = keys.split(batch.offsets[first_bags].diff().tolist())
        for t, spec in enumerate(self.tables):
            feature_numbers = [f for f, table in enumerate(self.feature_tables) if table == t]
            table_keys = torch.cat([keys[:0], *(keys_by_feature[f] for f in feature_numbers)])
            table_keys = table_keys[table_keys >= 0].unique()
            first_right_core = 1 if len(spec.row_factors) == 2 else 2
            num_rights = math.prod(spec.row_factors[first_right_core:])  # right halves of a table
            work_by_table.append(
                TTWork.of(
                    spec.dim_factors,
                    spec.full_ranks,
                    rows=table_keys.numel(),
                    lefts=(table_keys // num_rights).unique().numel(),
                    rights=(table_keys % num_rights).unique().numel(),
                )
            )
        return work_by_table

    @property
    @shows_attribute_errors
    def compression(self) -> float:
        """Return (values of the dense tables) / (values of the cores)."""
        dense = sum(spec.rows * spec.dim for spec in self.tables)
        return dense / sum(core.numel() for core in self.cores)

    def _describe_size(self, spec: TTSpec) -> str:
        return f"{spec.rows} x {spec.dim}, ranks={spec.ranks}"

    def extra_repr(self) -> str:
        """Describe tables, optimizer and options."""
        return f"{super().extra_repr()}, {self.compression:.1f}x smaller"


def _refuse_output_dtype(output_dtype: torch.dtype | None) -> None:
    """Raise TypeError for an argument of earlier versions."""
    if output_dtype is not None:
        raise TypeError(
            f"output_dtype is part of the precision: write precision=Precision(output="
            f"{output_dtype}) instead of output_dtype={output_dtype}"
        )


def _core_layout(spec: TTSpec, device: torch.device) -> CoreLayout:
    return CoreLayout(spec.row_factors, spec.dim_factors, spec.full_ranks, device)


class TTEmbeddingBag(TableBatchedTTEmbeddingBags):
    """One tensor-train table, with the inputs of `nn.EmbeddingBag`.

    Args:
        spec: rows, dim, ranks and factors.
        optimizer, pooling, init, precision, bounds_check, device, include_last_offset: arguments of
            `TableBatchedTTEmbeddingBags`.

    Example:
        >>> bag = emblib.TTEmbeddingBag(emblib.TTSpec(1_000_000, 64, (16, 16)))
        >>> bag(torch.tensor([[3, 14], [15, 92]])).shape
        torch.Size([2, 64])
    """

    spec_kind = TableBatchedTTEmbeddingBags.spec_kind._replace(
        advice="for several tables use TableBatchedTTEmbeddingBags, for dense ones "
        "TableBatchedEmbeddingBags"
    )

    def __init__(
        self,
        spec: TTSpec,
        optimizer: Optimizer | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        init: str = "gaussian",
        precision: Precision | None = None,
        output_dtype: None = None,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
    ) -> None:
        super().__init__(
            [spec],
            optimizer,
            pooling=pooling,
            init=init,
            precision=precision,
            output_dtype=output_dtype,
            bounds_check=bounds_check,
            device=device,
            include_last_offset=include_last_offset,
        )

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        optimizer: Optimizer | None = None,
        *,
        spec: TTSpec | None = None,
        ranks: Sequence[int] | None = None,
        error: float | None = None,
        nbytes: int | None = None,
        counts: Tensor | None = None,
        **options: Any,
    ) -> TTEmbeddingBag:
        """Return the table of a tensor train that approximates a dense table.

        The errors, of all rows and of the most accessed, are logged at level INFO;
        `emblib.tables.tt_svd.decompose` returns them.

        Args:
            weight: `[rows, dim]`, of any floating dtype, e.g. of a trained `nn.EmbeddingBag`.
            optimizer: optimizer, as the constructor takes it.
            spec: factors of rows and dim; with none of the next three its ranks as well.
            ranks: the inner ranks.
            error: the largest relative error of the cuts, see `decompose`.
            nbytes: maximum bytes of the cores; the largest ranks that fit are chosen.
            counts: number of accesses of each row `[rows]`, which weights the errors of rows.
            options: further arguments of the constructor; by default `device` is `weight.device`.
                Cores in 16 bits (`precision.weights`) are rounded to nearest; the logged errors
                include the rounding.

        Raises:
            TypeError, ValueError: see `decompose` and the constructor.

        Example:
            >>> trained = torch.nn.EmbeddingBag(1_000, 16)
            >>> bag = emblib.TTEmbeddingBag.from_dense(trained.weight, ranks=(16, 16))
            >>> bag(torch.tensor([[3, 14]])).shape
            torch.Size([1, 16])
        """
        dtype = getattr(options.get("precision"), "weights", torch.float32)
        decomposed = decompose(
            weight,
            spec,
            ranks=ranks,
            error=error,
            nbytes=nbytes,
            counts=counts,
            dtype=dtype,
        )
        options = {"device": weight.device, **options}
        device = torch.get_default_device() if options["device"] is None else options["device"]
        cuda = [device] if torch.device(device).type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):  # the cores that it draws are overwritten
            bag = cls(decomposed.spec, optimizer, **options)
        for core, value in zip(bag.cores, decomposed.cores, strict=True):
            in_grad_mode(core.copy_, enabled=False)(value)
        return bag

    @property
    def spec(self) -> TTSpec:
        """Return rows, dim, ranks and factors."""
        return self.tables[0]

    def forward(  # type: ignore[override]  # one table has no batch sizes
        self,
        indices: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pool embeddings to `[B, D]`, or `[L, D]` for pooling NONE, in `output_dtype`.

        Args:
            indices: int32 or int64, row of each lookup; -1 skips. `[L]`, or `[B, N]` for B bags of
                N lookups.
            offsets: int32 or int64 `[B + 1]`: bag b is `indices[offsets[b] : offsets[b + 1]]`.
                `[B]` without `include_last_offset`, and None for 2-dimensional indices.
            per_sample_weights: float32 in the shape of `indices`, scales each row; gets a gradient
                if it requires one.

        Raises:
            TypeError: indices, offsets or weights are not tensors.
            RuntimeError: a dtype, a device or the number of offsets is wrong; an index or offset is
                invalid, in mode FATAL; there are weights without pooling; or only some cores are
                frozen.
            ValueError: indices that are not 2-dimensional have no offsets, or 2-dimensional ones
                have offsets or weights of another shape.
        """
        check_tensor("indices", indices)
        if indices.dim() == 2:
            indices, offsets, per_sample_weights = flatten_equal_bags(
                indices, offsets, per_sample_weights
            )
            offsets = offsets if self.include_last_offset else offsets[:-1]
        elif offsets is None:
            raise missing_offsets_error(indices)
        return super().forward(indices, offsets, per_sample_weights)

    def to_dense(self, table: int | str = 0) -> Tensor:
        """Return the table as a dense float32 `[rows, D]` matrix."""
        return super().to_dense(table)

    def extra_repr(self) -> str:
        """Describe sizes, optimizer and options."""
        spec = self.spec
        name = f"{spec.name}: " if spec.name else ""
        return (
            f"{name}{spec.rows} x {spec.dim}, ranks={spec.ranks}, row_factors={spec.row_factors}, "
            f"dim_factors={spec.dim_factors}, {self.compression:.1f}x smaller, "
            f"{format_config(self.optimizer)}, pooling={self.pooling.value}"
        )


def join_blocks(blocks: Iterable[Tensor], rows: int, dim: int, device: torch.device) -> Tensor:
    """Copy blocks of rows into one float32 matrix `[rows, dim]`, block by block."""
    dense, first_row = torch.empty(rows, dim, dtype=torch.float32, device=device), 0
    for block in blocks:
        dense[first_row : first_row + len(block)] = block
        first_row += len(block)
    return dense
