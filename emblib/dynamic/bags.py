"""T tables for keys of any value, in bounded memory, with the optimizer fused into backward."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from emblib import ops
from emblib.dynamic.admission import Admission
from emblib.dynamic.arguments import check_batch, check_replicas
from emblib.dynamic.expiry import Expiry
from emblib.dynamic.first_rows import FirstRows
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.keys import as_keys, hash_keys_of
from emblib.dynamic.lookup import Reading, Reads
from emblib.dynamic.rows import check_capacity
from emblib.dynamic.scores import Scores
from emblib.dynamic.state import check_device
from emblib.dynamic.training import DynamicTraining
from emblib.dynamic_specs import SLOTS, DynamicSpec
from emblib.ops import lookups
from emblib.ops.hash import SCORED, Keys
from emblib.optim import External, Optimizer
from emblib.specs import BoundsCheck, Pooling, Precision, brief, check_count
from emblib.tables import periodic
from emblib.tables.features import SpecKind
from emblib.tables.locks import atomic
from emblib.tables.outside import outside_graphs


class DynamicEmbeddingBags(DynamicTraining):
    """Looks up F features in T dynamic tables at once and pools them into one `[B, sum D]` output.

    A training forward gives every new key of the batch a row, as far as there is room or something
    gives way, and counts the use of those that were there; backward applies `optimizer` to the rows
    of the batch, as in `TableBatchedEmbeddingBags`. It is one if the module is in training mode and
    gradients are enabled. Any other forward changes nothing: ids that are not there read
    `DynamicSpec.missing`, and no backward of it changes a row.

    Threads may share a module: every call is atomic, and so is every update in backward
    (docs/threads.md).

    What one batch does is defined as a sequential program (see `emblib.ops.hash`), so the same
    batches lead to the same bytes on any device and any number of threads.

    Args:
        tables: capacity, dim and rules of each table; all must agree in eviction and newcomer.
        optimizer: one of `emblib.optim`.
        pooling: SUM, MEAN, or NONE for one vector a lookup (needs one dim for all features).
        feature_tables: the table of each feature; left out, feature i reads table i.
        precision: dtypes of weights, output and optimizer state, and how updates are rounded.
        seed: of the first values of rows and of the hash of keys, in [0, 2^63). Where strangers
            choose the keys, one that they do not know keeps them from crowding into few buckets.
            None: first values are those of seed 0, and the hash is by a seed that is drawn from
            torch's generator.
        device: where the kernels run.
        include_last_offset: False for offsets without their last entry, the number of indices, as
            `nn.EmbeddingBag` takes them.
        hash_seeds: of the hash of keys alone, one per table; left out, `seed`.
    """

    tables: tuple[DynamicSpec, ...]
    spec_kind = SpecKind(
        *(DynamicSpec, "DynamicSpec(capacity=1000, dim=64)"),
        "for a TableSpec use TableBatchedEmbeddingBags",
    )

    def __init__(
        self,
        tables: Sequence[DynamicSpec],
        optimizer: Optimizer | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        precision: Precision | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
        hash_seeds: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            *(tables, optimizer, pooling, feature_tables, precision, BoundsCheck.WARNING)
        )
        self.include_last_offset = include_last_offset
        self.seed = 0 if seed is None else check_count("seed", seed, least=0)
        self._check_arguments()
        device = torch.empty(0, device=device).device
        check_device(device)
        ops.require_kernels(device)

        self.rows = self._row_layout()
        self._layout = self._feature_rows(self.rows.feature)
        self._make_parts(device, hash_keys_of(seed, self.table_names, hash_seeds))
        self.reset_parameters()

    def _check_arguments(self) -> None:
        check_capacity(self.tables)
        if periodic.is_periodic(self.optimizer) or periodic.global_decay(self.optimizer):
            raise ValueError(
                f"{brief(self.optimizer)} looks at whole tables from time to time, which a dynamic "
                "table has not; choose an optimizer without that part"
            )
        grows = any(spec.buckets < spec.most_buckets for spec in self.tables)
        if isinstance(self.optimizer, External) and grows:
            raise ValueError("optim.External keeps its state outside, where it would not move with "
                             "the rows of a table that grows: leave initial_capacity out, or use a "
                             "fused optimizer")  # fmt: skip

    def _make_parts(self, device: torch.device, hash_keys: list[int]) -> None:
        self.index = HashIndex(self.tables, device, hash_keys)
        self._register_rows(device)
        self.first_rows = FirstRows(self.rows, self.seed, device)
        admits = any(spec.admission is not None for spec in self.tables)
        self.admission = Admission(self.tables, device, hash_keys) if admits else None
        self.scores = Scores(self.tables, device) if self._by_scores else None
        self._expiry = Expiry(self.tables)
        self._may_grow = any(spec.buckets < spec.most_buckets for spec in self.tables)
        self.followers = []
        self.removals = None
        self.last = None
        self._zeros = torch.zeros(0, dtype=torch.int32, device=device)
        features = torch.tensor(self.feature_tables, dtype=torch.int64, device=device)
        self.register_buffer("feature_table", features, persistent=False)
        lost = torch.zeros(1, dtype=torch.int64, device=device)
        self.register_buffer("lost", lost, persistent=False)
        self._register_common(device)

    feature_table: Tensor

    @property
    def _by_scores(self) -> bool:
        orders = {spec.eviction.order for spec in self.tables}
        return "assigned" in orders & set(SCORED)

    @atomic
    def reset_parameters(self) -> None:
        """Forget all keys; optimizer, counters and what admission counted as at construction."""
        with torch.no_grad():
            self._reset_common()
            self.clear()

    @atomic
    def clear(self) -> None:
        """Forget all keys; tables have their initial capacity again.

        Ticks begin anew, unless removals are tracked: copies that follow are told.
        """
        tick = 0
        if self.removals is not None:
            tick = self.index.tick
            for t in range(len(self.tables)):
                self.removals.tell(t, self.table_entries(t).keys, tick)
        self.index.clear()
        self.index.set_tick(tick)
        if self.admission is not None:
            self.admission.clear()
        if self.scores is not None:
            self.scores.clear()
        for t, spec in enumerate(self.tables):
            self._use(t, 0, spec.buckets * SLOTS)

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Pooled embeddings `[B, sum D]`, or `[L, D]` for pooling NONE, in `precision.output`.

        Args:
            indices: int64, uint64 or int32 `[L]`, the key of each lookup: any value, none is
                reserved.
            offsets: int32 or int64 `[F * B + 1]`, feature-major: bag of feature f and sample b is
                `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`.
            per_sample_weights: float32 `[L]`, scales each row; gets a gradient if it requires one.
            batch_sizes: as in `TableBatchedEmbeddingBags`, for features of unequal batch sizes.
            counts: int64 `[L]`, for how many uses each lookup stands where ids were made distinct
                before; left out, 1 each. Eviction by counts and admission see it.

        Raises:
            RuntimeError: wrong dtype, device or number of offsets; offsets that would leave out
                ids or a bag, on the CPU; a key that found no place in a table with
                `KeyCheck.ERROR`.
            TypeError: indices of another dtype.
            ValueError: `batch_sizes` that do not fit; counts below 0; weights without pooling.
        """
        if lookups.is_fused(self.optimizer):
            self._check_in_place(self.weights)
        ids = as_keys(indices)
        check_batch(ids, per_sample_weights, counts, self.pooling)
        keys, batch = self._batch(ids, offsets, batch_sizes)
        return self._look_up(keys, batch, per_sample_weights, counts)

    def _batch(
        self, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> tuple[Keys, lookups.Lookup]:
        """The batch as keys by table, and as bags whose rows are not known yet."""
        offsets = self._with_last_offset(ids, offsets)
        bag_layout, columns = self._bag_layout(offsets, batch_sizes, ids.device)
        features = len(self.feature_tables)
        offsets = self._check_bounds(self._no_indices(ids), offsets, self.features, bag_layout)
        if batch_sizes is not None:
            starts = offsets[[0, *itertools.accumulate(sum(sizes) for sizes in batch_sizes)]]
        elif offsets.numel() > 1:
            starts = offsets[:: (offsets.numel() - 1) // features]
        else:
            starts = offsets.expand(features + 1)
        keys = Keys(ids.contiguous(), starts.long().contiguous(), self.feature_table)
        return keys, lookups.Lookup(
            *(self.features, ids, offsets, bag_layout, self.pooling),
            *(self.rows.total_rows, columns),
        )

    def _told_of_bounds(self, bad_indices: int, bad_offsets: int) -> str:
        return (
            f"emblib: {bad_offsets} offsets out of bounds, which are clamped: they must begin with "
            "0, not decrease and end with the number of indices (are they offsets, not lengths?)"
        )

    def _no_indices(self, ids: Tensor) -> Tensor:
        """Valid indices for what checks them: any id is one, only offsets can be wrong."""
        count, zeros = ids.numel(), self._zeros
        if zeros.numel() < count or zeros.device != ids.device:
            zeros = self._zeros = torch.zeros(2 * count, dtype=torch.int32, device=ids.device)
        return zeros[:count]

    @outside_graphs
    @atomic
    def _look_up(
        self,
        keys: Keys,
        batch: lookups.Lookup,
        sample_weights: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        """A break in a compiled graph: an index is state, and its rows move."""
        if not (self.training and torch.is_grad_enabled()) or self._frozen:
            with torch.no_grad():
                reads = self.first_rows.searched(keys, self._search(keys))
            return self._read(keys, batch, reads, sample_weights)
        if self._untrained:
            raise RuntimeError(
                f"of the dynamic tables {self.table_names}, which are one kernel, "
                f"{[self.table_names[t] for t in sorted(self._untrained)]} are frozen: a training "
                "forward inserts the keys of all; freeze all of them, or look up in evaluation mode"
            )
        check_replicas(self.index.tags, self.weights)
        with torch.no_grad():
            inserted = self._train(keys, counts)
            reads = self.first_rows.reads(keys, inserted)
            step = self._step(keys, inserted.slots, reads)
            step.weighted = sample_weights is not None and sample_weights.requires_grad
        batch = batch._replace(
            indices=reads.indices, slots=reads.slots, beside=reads.beside, session=step
        )
        step.batch = batch._replace(session=None)  # no cycle: it ends with the graph
        if isinstance(self.optimizer, External):
            return lookups.lookup(
                self.weights, batch, self.optimizer, sample_weights, self.output_dtype
            )
        return lookups.fused_lookup(
            self.anchor, self._tiers(), self.optimizer, batch, sample_weights
        )

    def _read(
        self, keys: Keys, batch: lookups.Lookup, reads: Reads, sample_weights: Tensor | None
    ) -> Tensor:
        """A lookup that trains no row; sample weights get their gradient."""
        batch = batch._replace(indices=reads.indices, slots=reads.slots, beside=reads.beside)
        if sample_weights is not None and torch.is_grad_enabled():
            batch = batch._replace(session=Reading(batch, self._step(keys, reads.indices, reads)))
            return lookups.fused_lookup(
                self.anchor.detach(), self._tiers(), self.optimizer, batch, sample_weights
            )
        return lookups.lookup_only(self._tiers().weights, batch, sample_weights, self.output_dtype)

    def _tiers(self) -> lookups.Tiers:
        weights, *states = self.planes()
        return lookups.Tiers([weights], states, self.hyper, self.output_dtype)

    def _size_of(self, spec: DynamicSpec) -> str:
        return f"{spec.capacity} x {spec.dim}"
