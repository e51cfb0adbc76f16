"""T plain tables in one kernel, with the optimizer fused into the backward pass."""

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from emblib import ops
from emblib.ops import lookups
from emblib.optim import External, Gradient, Optimizer
from emblib.specs import BoundsCheck, Cache, Placement, Pooling, Precision, TableSpec, brief
from emblib.tables import periodic
from emblib.tables.features import SpecKind
from emblib.tables.memory import Memory
from emblib.tables.outside import outside_graphs
from emblib.tables.prefetch import Given, Prefetcher
from emblib.tables.row_cache import RowCache
from emblib.tables.tiered import TieredTables


class _Wants(NamedTuple):
    """What the caller of forward asks for beside the batch."""

    sample_weights: Tensor | None
    feature_requires_grad: Tensor | None
    unique: int | None


class TableBatchedEmbeddingBags(TieredTables):
    """Looks up F features in T tables at once and pools them into one `[B, sum D]` output.

    Backward groups the lookups by row and applies `optimizer` to every distinct row of the batch,
    reading and writing it once; no gradient of the weights is ever stored. Every backward is a
    step of its own: two forwards in one loss are two updates, and gradients do not accumulate.
    With `optim.External()` it leaves a gradient on `weights` instead, sparse or dense, for any
    optimizer of `torch.optim`.

    Tables may be larger than the device: `TableSpec.placement` says where each one is kept, and
    `cache` what stands before those that are far away. Where a row is does not change a result
    (stochastic rounding aside, whose random numbers follow the placement).

    Threads may share a module: with a cached table every call is atomic, without one updates of the
    same row at the same time may be lost (docs/threads.md).

    Args:
        tables: rows, dim, name and placement of each table.
        optimizer: one of `emblib.optim`.
        pooling: SUM, MEAN, or NONE for one vector a lookup (needs one dim for all features).
        feature_tables: the table of each feature; left out, feature i reads table i.
        precision: dtypes of weights, output and optimizer state, and how updates are rounded.
        bounds_check: what happens to invalid indices and offsets, see `BoundsCheck`.
        cache: of the MANAGED_CACHING and DISK tables; where there are none it has no part.
        device: where the kernels run.
        include_last_offset: False for offsets without their last entry, the number of indices, as
            `nn.EmbeddingBag` takes them.

    Weights start uniform in +-1/sqrt(rows) of their table, as DLRM's do; DISK tables that are there
    already start as their last `flush` left them.
    """

    tables: tuple[TableSpec, ...]
    spec_kind = SpecKind(
        TableSpec, "TableSpec(rows=1000, dim=64)", "for a TTSpec use TTEmbeddingBag"
    )

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: Optimizer | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        precision: Precision | None = None,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        cache: Cache | None = None,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
    ) -> None:
        super().__init__(tables, optimizer, pooling, feature_tables, precision, bounds_check)
        self.include_last_offset = include_last_offset
        self.cache = Cache() if cache is None else cache
        self._check_arguments()
        periodic.check(self.optimizer, self.tables, self.pooling)
        self._is_periodic = periodic.is_periodic(self.optimizer)
        device = torch.empty(0, device=device).device
        ops.require_kernels(device)

        self._memory = Memory(self.tables, self.optimizer, self.precision, self.cache, device)
        places, self.total_rows = self._memory.layout.places, self._memory.layout.total_rows
        self._layout = self._feature_rows(lambda t, column: places[t].feature(column))
        self._register_memory(device)
        self._make_cache(device)
        self._reporting = None
        self.reset_parameters()

    def _check_arguments(self) -> None:
        if not isinstance(self.cache, Cache):
            raise TypeError(f"cache must be a Cache, e.g. Cache(sets=1024), got {self.cache!r}")
        if not isinstance(self.optimizer, External):
            return
        if any(spec.placement not in (Placement.DEVICE, Placement.HOST) for spec in self.tables):
            raise ValueError("optim.External leaves its gradient on a parameter, so all tables "
                             "must be on the device; use a fused optimizer for others")  # fmt: skip

    def _register_memory(self, device: torch.device) -> None:
        """The device tier as parameter and buffers, so that they move with the module."""
        self._register_planes(*self._memory.allocate_device(device))
        self._register_common(device)

    def _make_cache(self, device: torch.device) -> None:
        layout = self._memory.layout
        self.row_cache = self._prefetcher = None
        if layout.cached_rows:
            self.row_cache = RowCache.of(
                *(layout, self.table_names, self.optimizer.states, self.cache),
                *(self.precision, device),
            )
            self._prefetcher = Prefetcher(self._memory, self.row_cache, self.cache, self._lock)

    def reset_parameters(self) -> None:
        """Draw the weights anew; optimizer state, step and learning rate as at construction.

        Also what makes a module usable that was made on `meta` and moved by `to_empty`. DISK tables
        that were opened with rows in them keep those at construction, and are drawn anew when this
        is called again.
        """
        opened = self._memory.take_opened()
        # Opening changes nothing on disk, so a process that ends meanwhile spoils nothing.
        writing = self._writing() if opened is None else contextlib.nullcontext()
        with torch.no_grad(), writing:
            self._reset_common()
            if opened is not None:
                self.hyper[: len(opened)] = torch.tensor(opened, dtype=torch.float64)
            for t, (spec, views) in enumerate(zip(self.tables, self._views(), strict=True)):
                if opened is not None and spec.placement is Placement.DISK:
                    continue
                weight, *states = views.values()
                self._draw(t, weight)
                for state in states:
                    state.zero_()

    def _draw(self, table: int, weight: Tensor) -> None:
        """First values of a table."""
        bound = 1.0 / math.sqrt(max(self.tables[table].rows, 1))
        ops.random.fill_uniform_(weight, -bound, bound, ops.random.new_seed())

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
        feature_requires_grad: Tensor | None = None,
        total_unique_indices: int | None = None,
    ) -> Tensor:
        """Pooled embeddings `[B, sum D]`, or `[L, D]` for pooling NONE, in `precision.output`.

        Args:
            indices: int32 or int64 `[L]`, row of each lookup in the table of its feature; -1 skips.
            offsets: int32 or int64 `[F * B + 1]`, feature-major: bag of feature f and sample b is
                `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`.
            per_sample_weights: float32 `[L]`, scales each row; gets a gradient if it requires one.
            batch_sizes: where features differ in batch size, `[F][ranks]`: the bags of feature f
                from rank r, rank after rank. `offsets` then has one entry a bag and one more, and
                the output is one vector: rank after rank, feature after feature, bag after bag.
            feature_requires_grad: `[F]`; features with 0 give `per_sample_weights` no gradient.
                Their rows are trained all the same.
            total_unique_indices: for External(SPARSE), the number of distinct rows of the batch,
                if it is known: the gradient is then made without asking the device for it.

        Raises:
            RuntimeError: wrong dtype, device or number of offsets; out of bounds in mode FATAL.
            ValueError: `batch_sizes` that do not fit; weights without pooling.
        """
        if "weights" in self._parameters and lookups.is_fused(self.optimizer):
            self._check_in_place(self._parameters["weights"])
        wants = _Wants(per_sample_weights, feature_requires_grad, total_unique_indices)
        if torch.compiler.is_compiling() and self._breaks_graphs():
            return self._look_up_eagerly(Given(indices, offsets), batch_sizes, wants)
        if self._reporting is None or torch.compiler.is_compiling():
            return self._look_up(Given(indices, offsets), batch_sizes, wants)
        with self._reporting.timed("tbe.forward_time", indices.device):
            out = self._look_up(Given(indices, offsets), batch_sizes, wants)
        self._report(indices)
        return out

    def _batch(
        self, indices: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> lookups.Lookup:
        """The batch as the kernels take it: repaired offsets, and the layout of its bags."""
        offsets = self._with_last_offset(indices, offsets)
        bag_layout, columns = self._bag_layout(offsets, batch_sizes, indices.device)
        offsets = self._check_bounds(indices, offsets, self.features, bag_layout)
        return lookups.Lookup(
            self.features, indices, offsets, bag_layout, self.pooling, self.total_rows, columns
        )

    def _look_up(
        self, given: Given, batch_sizes: Sequence[Sequence[int]] | None, wants: _Wants
    ) -> Tensor:
        batch = self._batch(*given, batch_sizes)
        if wants.feature_requires_grad is not None:
            masked = self._masked_features(wants.feature_requires_grad)
            batch = batch._replace(sample_features=masked)
        sample_weights, tiers = wants.sample_weights, self._tiers()
        if self._is_periodic and torch.is_grad_enabled() and not self._frozen:
            with self._lock:
                self._before_forward(tiers)
        if isinstance(self.optimizer, External):
            return lookups.lookup(
                *(self._trained_weights(), batch, self.optimizer, sample_weights),
                *(self.output_dtype, wants.unique),
            )
        if self._prefetcher is not None:
            with self._lock:  # until the slots that a batch was given have been read
                batch = self._prefetcher.take(batch, tiers, given)
                return self._read(tiers, batch, sample_weights)
        return self._read(tiers, batch, sample_weights)

    def _read(
        self, tiers: lookups.Tiers, batch: lookups.Lookup, sample_weights: Tensor | None
    ) -> Tensor:
        """Look a batch up whose rows are where `batch.slots` says, or in their tables."""
        decay, factors = periodic.global_decay(self.optimizer), None
        if decay is not None:
            batch, factors = periodic.decay_rows(decay, batch, self.hyper, self.state_prev_iter)
        trains = torch.is_grad_enabled() and not self._frozen
        weighted = sample_weights is not None and sample_weights.requires_grad
        if trains or (weighted and torch.is_grad_enabled()):
            if trains and self._untrained:
                batch = batch._replace(trained_features=self._trained_features())
            anchor = self.anchor if trains else self.anchor.detach()
            return lookups.fused_lookup(
                anchor, tiers, self.optimizer, batch, sample_weights, factors
            )
        weights = lookups.scaled(sample_weights, factors)
        out = lookups.lookup_only(tiers.weights, batch, weights, self.output_dtype)
        if batch.session is not None:
            batch.session.after_update()
        return out

    def _trained_weights(self) -> Tensor:
        """What gets the gradient of `optim.External`."""
        return self.weights

    def _breaks_graphs(self) -> bool:
        """Whether a lookup is more than tensor code of static shapes: see `_look_up_eagerly`."""
        sparse = isinstance(self.optimizer, External) and (
            self.optimizer.gradient is Gradient.SPARSE
        )
        return self._prefetcher is not None or self._is_periodic or sparse

    @outside_graphs
    def _look_up_eagerly(
        self, given: Given, batch_sizes: Sequence[Sequence[int]] | None, wants: _Wants
    ) -> Tensor:
        """A break in a compiled graph: a cache has state in Python, and moves rows of tables.

        In one graph with the update, Inductor would copy whole tables: both change them. Optimizers
        with a periodic part count forwards in Python; a sparse gradient is as long as the batch has
        rows, which no graph knows.
        """
        return self._look_up(given, batch_sizes, wants)

    def _before_forward(self, tiers: lookups.Tiers) -> None:
        if self.hyper.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has a periodic part that counts forwards in "
                "Python, where the replay of a CUDA graph does not pass; capture what is around "
                "this module, or choose an optimizer without one"
            )
        self._forwards += 1
        self._memory.verify()  # it looks at whole tables
        periodic.before_forward(self.optimizer, self._forwards, tiers, self._views())

    state_prev_iter: Tensor  # of GlobalDecay

    def _trained_features(self) -> Tensor:
        """The features with no rows where a table is frozen: its lookups are not grouped."""
        trained = [float(t not in self._untrained) for t in self.feature_tables]
        return self._masked_features(torch.tensor(trained, device=self.features.device))

    def _masked_features(self, requires_grad: Tensor) -> Tensor:
        """The features with no rows where no gradient is wanted: lookups there are skipped."""
        if requires_grad.shape != (len(self.feature_tables),):
            raise ValueError(
                "feature_requires_grad must have one entry a feature = "
                f"{len(self.feature_tables)}, got shape {tuple(requires_grad.shape)}"
            )
        masked = self.features.clone()
        masked[:, 2] *= (requires_grad != 0).to(masked)
        return masked

    def _size_of(self, spec: TableSpec) -> str:
        place = "" if spec.placement is Placement.DEVICE else f" ({spec.placement.value})"
        return f"{spec.rows} x {spec.dim}{place}"

    def extra_repr(self) -> str:
        """Tables, optimizer and choices."""
        parts = [super().extra_repr()]
        if self.row_cache is not None:
            parts.append(brief(self.cache))
        return ", ".join(parts)
