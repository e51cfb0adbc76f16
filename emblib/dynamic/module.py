"""T tables for keys of any value, in bounded memory, with the optimizer fused into backward."""

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from emblib import ops
from emblib.dynamic.admission import Admission
from emblib.dynamic.hash_index import HashIndex, Inserted
from emblib.dynamic.keys import as_keys, hash_keys_of
from emblib.dynamic.rows import Reading, Reads, RowInitializer, TrainingHook, check_capacity
from emblib.dynamic.saving.checkpoint import DynamicDumps
from emblib.dynamic.saving.entries import RemovalLog
from emblib.dynamic.state import Scores, check_device
from emblib.ops import autograd, hash
from emblib.ops.hash import SCORED, Keys, Misses, tables_of
from emblib.optim import External, Optimizer
from emblib.specs import (
    SLOTS,
    BoundsCheck,
    DynamicSpec,
    OnInsertFailure,
    Pooling,
    Precision,
    brief,
    check_count,
)
from emblib.tables import optimizer_hooks
from emblib.tables.base import SpecKind
from emblib.tables.graph_break import graph_break
from emblib.tables.locks import atomic
from emblib.tables.parameters import caller_level


def check_batch(
    ids: Tensor, sample_weights: Tensor | None, counts: Tensor | None, pooling: Pooling
) -> None:
    """Raise what the kernels would, and for counts below 0 (not read on CUDA).

    Raises:
        RuntimeError: wrong shape, dtype or device.
        ValueError: negative counts; weights without pooling.
    """
    if ids.dim() != 1:
        raise RuntimeError(
            f"indices must have 1 dimension, got {ids.dim()}; bags are given by offsets, so "
            "flatten the indices and pass where they start"
        )
    for name, tensor, dtype in (
        ("per_sample_weights", sample_weights, torch.float32),
        ("counts", counts, torch.int64),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
            came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise RuntimeError(f"{name} must be a tensor of {dtype}, got {came}")
        if tensor.shape != ids.shape or tensor.device != ids.device:
            raise RuntimeError(
                f"{name} must have one entry a lookup = {ids.numel()} on {ids.device}, got "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    if sample_weights is not None and pooling is Pooling.NONE:
        raise ValueError(
            "per_sample_weights need pooling SUM or MEAN, got none; multiply the output"
        )
    if counts is not None and not counts.is_cuda and counts.numel() and int(counts.min()) < 0:
        raise ValueError(f"counts must be >= 0, got {int(counts.min())}")


def check_replicas(tags: Tensor, weights: Tensor) -> None:
    """Raise RuntimeError where `DistributedDataParallel` would mix the tables of its ranks.

    Ranks see other keys, so a row of one is another key's on the next: buffers must not be
    broadcast, gradients of rows not be added up.
    """
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None:
        return
    # Newer versions of torch have another name for it.
    synced = getattr(ddp, "forward_sync_buffers", None)
    if synced is None:
        synced = ddp.broadcast_buffers
    if synced and any(buffer is tags for buffer in ddp.modules_buffers):
        raise RuntimeError(
            "DistributedDataParallel overwrites the keys of dynamic tables with those of rank 0, "
            "while rows stay those of each rank; pass broadcast_buffers=False"
        )
    if weights.requires_grad and any(p is weights for p in ddp._module_parameters):
        raise RuntimeError(
            "DistributedDataParallel adds up gradients by row, and a row of dynamic tables is "
            "another key on each rank; use a fused optimizer, or name the weights in "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
        )


_SHARE = 8  # of a ttl, in which every bucket is looked at once


class Sweep(NamedTuple):
    """The buckets of one table that a step looks at; keys last used before `before` leave."""

    table: int
    first_bucket: int
    num_buckets: int
    before: int


class Expiry:
    """What to sweep in which step, a function of the step's number alone.

    A key of a table with `ttl` stays for at least that many steps after the step that used it last,
    and for at most an eighth more: every bucket has its turn once in max(1, ttl // 8) steps. Until
    then it is found as ever, and use renews it. A step is a training batch, as for LRU.
    """

    def __init__(self, specs: Sequence[DynamicSpec]) -> None:
        self._tables = [(t, s.ttl, s.max_buckets) for t, s in enumerate(specs) if s.ttl]

    def __bool__(self) -> bool:
        """Whether any key ever expires."""
        return bool(self._tables)

    def sweeps(self, tick: int) -> Iterator[Sweep]:
        """Of the step with this number; run them once its keys have their places."""
        for table, ttl, max_buckets in self._tables:
            part = math.ceil(max_buckets / max(1, ttl // _SHARE))
            first = tick % math.ceil(max_buckets / part) * part
            yield Sweep(table, first, min(part, max_buckets - first), tick - ttl)


class OutsideStates:
    """A follower of training steps: states of rows that go to new keys begin in zeros.

    Copies and pickles of it follow nothing: the copied module has other weights, which its own
    optimizer must be attached to.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        weights: nn.Parameter | None,
        first_rows: Sequence[int] = (),
    ) -> None:
        self._optimizer, self._weights, self._first_rows = optimizer, weights, first_rows

    def admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """All may have a row."""
        return None

    def leaving(self, keys: Keys, inserted: Inserted) -> None:
        """Nothing is kept of keys that leave."""

    def arriving(self, keys: Keys, inserted: Inserted) -> None:
        """Zeros for the states of new keys (waits for the device)."""
        if self._optimizer is None or self._weights is None:
            return
        assert inserted.misses is not None
        assert inserted.placed is not None
        new = inserted.placed.slots >= 0
        tables = tables_of(keys)[inserted.misses.first[new]]
        first = torch.tensor(self._first_rows, device=tables.device)[tables]
        rows = first + inserted.placed.slots[new]
        for state in self._optimizer.state.get(self._weights, {}).values():
            if isinstance(state, Tensor) and state.shape[:1] == self._weights.shape[:1]:
                state[rows] = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return OutsideStates, (None, None)

    def __deepcopy__(self, memo: dict[int, object]) -> "OutsideStates":
        return OutsideStates(None, None)


class DynamicTraining(DynamicDumps):
    """Dynamic tables that take in the keys of batches."""

    first_rows: RowInitializer
    admission: Admission | None
    scores: Scores | None
    followers: list[TrainingHook]
    removals: RemovalLog | None
    last: Inserted | None
    _expiry: Expiry
    _may_grow: bool

    def _search(self, keys: Keys) -> Tensor:
        """The slots of keys as they are; -1 for those that are not there."""
        return self.index.find(keys)

    def _train(self, keys: Keys, counts: Tensor | None) -> Inserted:
        """One batch of training as far as keys are concerned: everyone who can has a row then."""
        given = None if self.scores is None else self.scores.given()
        filtered = self.admission is not None or bool(self.followers)
        inserted = self.index.insert(
            keys,
            counts,
            given=given,
            admit=self._admit if filtered else None,
            rows=self.value_rows() if self._may_grow else None,
        )
        if self.scores is not None:
            self.scores.advance()
        if inserted.misses is not None:
            self._fill(keys, inserted)
        if self._expiry:
            self._expire()
        self.last = inserted
        if inserted.misses is not None and any(
            spec.check is not OnInsertFailure.IGNORE for spec in self.tables
        ):
            self._tell_refused(inserted)
        return inserted

    def _admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """Which of the missing keys may have a row; None for all."""
        admitted = self._decide(keys, misses)
        for follower in self.followers:
            also = follower.admit(keys, misses)
            if also is not None:
                admitted = also if admitted is None else admitted & also
        return admitted

    def _decide(self, keys: Keys, misses: Misses) -> Tensor | None:
        """What admission says of the missing keys; None for all."""
        return None if self.admission is None else self.admission.admit(keys, misses)

    def _fill(self, keys: Keys, inserted: Inserted) -> None:
        """What keys that came and went mean for their rows."""
        self._log_evicted(inserted)
        for follower in self.followers:
            follower.leaving(keys, inserted)
        self.first_rows.write_(self.planes(), keys, inserted)
        for follower in self.followers:
            follower.arriving(keys, inserted)

    @atomic
    def track_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the states that `optimizer` keeps for `weights` begin in zeros with every new key.

        For `optim.External`: an optimizer of torch.optim knows rows, not keys, so without this a
        new key goes on with the states of the one that had its row before.

        Raises:
            ValueError: the weights are not one matrix `[rows, dim]`, or not the optimizer's.
        """
        if self.weights.dim() != 2:
            raise ValueError(
                "an optimizer is attached to tables with optim.External and one dim, got "
                f"{brief(self.optimizer)} and dims {sorted({s.dim for s in self.tables})}"
            )
        groups = optimizer.param_groups
        if not any(p is self.weights for group in groups for p in group["params"]):
            raise ValueError("the optimizer must have the weights of this module among its own")
        firsts = [self.rows.first_row(t) for t in range(len(self.tables))]
        self.followers.append(OutsideStates(optimizer, self.weights, firsts))

    @atomic
    def track_evictions(self, most: int = 1 << 24) -> RemovalLog:
        """From now on keep which keys left and when, up to `most` of them a table."""
        if self.removals is None:
            self.removals = RemovalLog(len(self.tables), self.index.tick, most)
        return self.removals

    def _log_evicted(self, inserted: Inserted) -> None:
        if self.removals is None:
            return
        assert inserted.misses is not None
        assert inserted.placed is not None
        left = inserted.placed.status == hash.EVICTING
        before = torch.cat([left.new_zeros(1, dtype=torch.int64), left.cumsum(0)])
        ends = before[inserted.misses.ends[1:]].tolist()
        self.removals.tell_all(inserted.placed.evicted[left, 0], ends, self.index.tick)

    def _expire(self) -> None:
        tick = self.index.tick
        for sweep in self._expiry.sweeps(tick):
            keys = self.index.expire(
                *(sweep.table, sweep.before, sweep.first_bucket, sweep.num_buckets)
            )
            if self.removals is not None:
                self.removals.tell(sweep.table, keys, tick)

    @atomic
    def erase(self, table: int, ids: Tensor) -> Tensor:
        """Remove keys with their rows; bool by position, where one was there (once a key)."""
        keys = self.keys_of(table, ids)
        erased = self.index.erase(keys) >= 0
        if self.removals is not None:
            self.removals.tell(table, keys.ids[erased], self.index.tick)
        return erased

    def _tell_refused(self, inserted: Inserted) -> None:
        """Warns or raises for keys that found no place, as the tables ask (waits for CUDA)."""
        assert inserted.misses is not None
        assert inserted.placed is not None
        refused = inserted.placed.status == hash.REFUSED
        if not bool(refused.any()):
            return
        ends = inserted.misses.ends.tolist()
        for t, spec in enumerate(self.tables):
            count = int(refused[ends[t] : ends[t + 1]].sum())
            if not count or spec.check is OnInsertFailure.IGNORE:
                continue
            told = (
                f"emblib: {count} keys found no place in table {self.table_names[t]!r} of capacity "
                f"{spec.rows} (eviction {spec.eviction.value}): they read {spec.missing} and are "
                "not trained; choose a larger capacity, or smaller batches"
            )
            if spec.check is OnInsertFailure.ERROR:
                raise RuntimeError(told)
            warnings.warn(told, stacklevel=caller_level())


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
        self.seed = 0 if seed is None else check_count("seed", seed, minimum=0)
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
        if optimizer_hooks.is_periodic(self.optimizer) or optimizer_hooks.global_decay(
            self.optimizer
        ):
            raise ValueError(
                f"{brief(self.optimizer)} looks at whole tables from time to time, which a dynamic "
                "table has not; choose an optimizer without that part"
            )
        grows = any(spec.buckets < spec.max_buckets for spec in self.tables)
        if isinstance(self.optimizer, External) and grows:
            raise ValueError("optim.External keeps its state outside, where it would not move with "
                             "the rows of a table that grows: leave initial_capacity out, or use a "
                             "fused optimizer")  # fmt: skip

    def _make_parts(self, device: torch.device, hash_keys: list[int]) -> None:
        self.index = HashIndex(self.tables, device, hash_keys)
        self._register_rows(device)
        self.first_rows = RowInitializer(self.rows, self.seed, device)
        admits = any(spec.admission is not None for spec in self.tables)
        self.admission = Admission(self.tables, device, hash_keys) if admits else None
        self.scores = Scores(self.tables, device) if self._by_scores else None
        self._expiry = Expiry(self.tables)
        self._may_grow = any(spec.buckets < spec.max_buckets for spec in self.tables)
        self.followers = []
        self.removals = None
        self.last = None
        self._zeros = torch.zeros(0, dtype=torch.int32, device=device)
        features = torch.tensor(self.feature_tables, dtype=torch.int64, device=device)
        self.register_buffer("feature_table", features, persistent=False)
        lost = torch.zeros(1, dtype=torch.int64, device=device)
        self.register_buffer("dropped_updates", lost, persistent=False)
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
                `OnInsertFailure.ERROR`.
            TypeError: indices of another dtype.
            ValueError: `batch_sizes` that do not fit; counts below 0; weights without pooling.
        """
        if autograd.is_fused(self.optimizer):
            self._check_in_place(self.weights)
        ids = as_keys(indices)
        check_batch(ids, per_sample_weights, counts, self.pooling)
        keys, batch = self._batch(ids, offsets, batch_sizes)
        return self._look_up(keys, batch, per_sample_weights, counts)

    def _batch(
        self, ids: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> tuple[Keys, autograd.Lookup]:
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
        return keys, autograd.Lookup(
            *(self.features, ids, offsets, bag_layout, self.pooling),
            *(self.rows.total_rows, columns),
        )

    def _bounds_message(self, bad_indices: int, bad_offsets: int) -> str:
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

    @graph_break
    @atomic
    def _look_up(
        self,
        keys: Keys,
        batch: autograd.Lookup,
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
            indices=reads.indices, slots=reads.slots, default_rows=reads.beside, hooks=step
        )
        step.batch = batch._replace(hooks=None)  # no cycle: it ends with the graph
        if isinstance(self.optimizer, External):
            return autograd.lookup(
                self.weights, batch, self.optimizer, sample_weights, self.output_dtype
            )
        return autograd.fused_lookup(
            self.grad_anchor, self._tiers(), self.optimizer, batch, sample_weights
        )

    def _read(
        self, keys: Keys, batch: autograd.Lookup, reads: Reads, sample_weights: Tensor | None
    ) -> Tensor:
        """A lookup that trains no row; sample weights get their gradient."""
        batch = batch._replace(indices=reads.indices, slots=reads.slots, default_rows=reads.beside)
        if sample_weights is not None and torch.is_grad_enabled():
            batch = batch._replace(hooks=Reading(batch, self._step(keys, reads.indices, reads)))
            return autograd.fused_lookup(
                self.grad_anchor.detach(), self._tiers(), self.optimizer, batch, sample_weights
            )
        return autograd.lookup_no_grad(
            self._tiers().weights, batch, sample_weights, self.output_dtype
        )

    def _tiers(self) -> autograd.Tiers:
        weights, *states = self.planes()
        return autograd.Tiers([weights], states, self.hyperparams, self.output_dtype)

    def _size_of(self, spec: DynamicSpec) -> str:
        return f"{spec.capacity} x {spec.dim}"
