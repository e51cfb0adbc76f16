"""Tensor trains with a cache: the most used rows are stored dense, outside the cores.

A hash table from ids to stored rows splits a batch: hits are looked up in the stored rows, misses
in the tensor train, and the two outputs are added. Backward updates stored rows and cores
separately. Training lookups count ids in a second hash table. `populate` chooses the most used ids.
It moves the values of rows that leave into the cores, or drops or spills them (see `RowEviction`),
and computes newly stored rows from the cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.columns import Hyper
from emblib.dynamic import tt_projection
from emblib.dynamic.hash_table import HashTable, TableRows
from emblib.dynamic.sent_copies import SentAsCopy, check_not_shared
from emblib.dynamic.stored_rows import StoredTables
from emblib.dynamic.training import feature_starts, num_padding_ids
from emblib.dynamic.tt_cache import (
    TT_COUNTERS,
    RowEviction,
    TTCache,
    TTCacheStats,
    check_arguments,
    least_used_first,
)
from emblib.grad_mode import without_gradients
from emblib.ops.autograd import updates_in_backward
from emblib.ops.cache import COUNTERS
from emblib.ops.derivatives import refuse_transforms
from emblib.ops.hash import Keys
from emblib.ops.one_call import c_function, in_one_call
from emblib.ops.route import is_captured
from emblib.ops.tt_layout import id_table_row
from emblib.optim import Optimizer
from emblib.specs import (
    BoundsCheck,
    MatmulPrecision,
    Pooling,
    Precision,
    TableSpec,
    TTSpec,
    check_bool,
)
from emblib.tables import (
    TableBatchedEmbeddingBags,
    TableBatchedTTEmbeddingBags,
    parameters,
    state_dicts,
)
from emblib.tables.base import warn_of_dtype
from emblib.tables.batches import (
    append_last_offset,
    check_bounds,
    check_tensor,
    flatten_equal_bags,
    lay_out_bags,
    missing_offsets_error,
)
from emblib.tables.graph_break import run_uncompiled
from emblib.tables.recomputation import checkpointed_forward
from emblib.tables.tt import join_blocks

_ops = torch.ops.emblib
_count_ = c_function(_ops.tt_count_.default)


class _Lookups(NamedTuple):
    """A batch split into lookups of cores and of stored rows.

    Attributes:
        core_ids: int64 `[L]`, ids whose rows are computed from the cores, -1 for the others.
        row_indices: int64 `[L]`, index of the id's stored row in its table, -1 for ids without
            one; empty if no table has stored rows.
        counted_keys: keys to count, -1 for lookups that are not counted, one segment per feature.
    """

    core_ids: Tensor
    row_indices: Tensor
    counted_keys: Keys


class CachedTTEmbeddingBags(SentAsCopy, nn.Module):
    """Look up tensor-train tables whose most used rows are stored dense.

    A stored row replaces the row of the cores: lookups and `to_dense` read the stored row alone,
    and backward updates it alone. `state_dict` has both. Training lookups, those in training mode
    with gradients enabled, count ids in a hash table; `populate` stores the rows of the most used
    ids. Newly stored rows start with the cores' values and zero optimizer states. If stored rows
    are added, removed or loaded between a lookup and its backward, backward raises RuntimeError.

    A *key* is an id plus the first key of its table, so that one hash table serves all. Threads may
    look up at the same time while none chooses rows; one thread trains (docs/threads.md). Methods
    take tables by number or name, and raise KeyError, IndexError or TypeError for any other.

    Args:
        tables: rows, dim, ranks, factors and name of each tensor train.
        cache: rows to store and when to choose them again, see `TTCache`.
        optimizer: optimizer of `emblib.optim`, for cores and stored rows. None leaves dense
            gradients for an optimizer of `torch.optim`, which cannot reset states of stored rows.
        pooling: SUM, MEAN, or NONE for one vector per lookup.
        feature_tables: the table of each feature; by default feature i reads table i.
        init: initializer of the cores, as in `TableBatchedTTEmbeddingBags`.
        precision: dtypes of cores and stored rows (`weights`), output and optimizer state, rounding
            of updates, and precision of products of cores on a GPU (`matmul`). Values that move
            between rows and cores are rounded to nearest.
        bounds_check: reaction to invalid indices and offsets, see `BoundsCheck`.
        device: device of cores, cache and hash tables, not meta; None is torch's default device.
            Spilled rows are in host memory.
        include_last_offset: False for offsets without their last entry, the number of indices, as
            `nn.EmbeddingBag` takes them.

    State dicts load into modules with another number of stored rows, if the saved rows fit.

    Attributes:
        trains: module of the cores.
        rows: module of the stored rows, one table per tensor train.
        index: hash table of the keys of stored rows; its values are not used.
        counts: hash table that counts the keys of training lookups; its values are not used.
        cache_rows: maximum number of rows that one choice stores, by table.
        stored_rows: maximum number of stored rows, cached or spilled, by table.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: `cache` has another number of tables, the optimizer is deferred, the device is
            meta, or the cache spills and the optimizer leaves gradients; or see
            `TableBatchedTTEmbeddingBags`.

    Example:
        >>> tables = [emblib.TTSpec(1_000_000, 64, (16, 16))]
        >>> bags = emblib.CachedTTEmbeddingBags(tables, emblib.TTCache(10_000, every=1000))
        >>> bags(torch.tensor([3, 14, 15]), torch.tensor([0, 2, 3])).shape
        torch.Size([2, 64])
    """

    key_bases: Tensor  # int64 `[F]`, first key of the feature's table
    id_tables: Tensor  # int64 `[F, 10]`, see `TTTableColumn`
    segment_tables: Tensor  # int64 `[F]` of zeros
    row_of_slot: Tensor  # int64 `[slots + 1]`, row by slot of `index`, in the key's table; -1: none
    key_of_row: Tensor  # int64 `[stored rows]`, of all tables, -1 for a free row
    counters: Tensor  # int64 `[T, n]`, see `TT_COUNTERS`
    changes: Tensor  # float64 `[T, 2]`, squared differences of evicted rows and cores
    since: Tensor  # int64 `[T]`, `_lookups_since` in state dicts, else out of date
    features: Tensor  # int64 `[F, 8]`, see `FeatureColumn`
    rows_of_features: Tensor  # int64 `[F]`, number of rows of the feature's table
    tables_of_features: Tensor  # int64 `[F]`
    bounds_violations: Tensor  # int64 `[2]`, invalid indices and offsets so far
    breaks_graphs = True  # choosing rows and the hash table run uncompiled

    def __init__(
        self,
        tables: Sequence[TTSpec],
        cache: TTCache,
        optimizer: Optimizer | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        init: str = "gaussian",
        precision: Precision | None = None,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
    ) -> None:
        super().__init__()
        self.precision = Precision() if precision is None else precision
        if not isinstance(self.precision, Precision):
            raise TypeError(f"precision must be a Precision, got {precision!r}")
        self.cache, self.tables = cache, tuple(tables)
        self.bounds_check = BoundsCheck(bounds_check)
        check_bool("include_last_offset", include_last_offset)
        self.include_last_offset = include_last_offset
        options: dict[str, Any] = {
            "pooling": pooling,
            "feature_tables": feature_tables,
            # The sum with the stored rows is rounded once.
            "precision": replace(self.precision, output=torch.float32),
            "bounds_check": BoundsCheck.NONE,  # this module checks, once for both
            "device": device,
        }
        self.trains = self._make_trains(optimizer, init, options)
        check_arguments(cache, self.trains.optimizer, device)
        self.optimizer, self.pooling = self.trains.optimizer, self.trains.pooling
        self.cache_rows = cache.rows_of(self.tables)
        self.stored_rows = cache.stored_rows_of(self.tables)
        self._spills = cache.eviction is RowEviction.SPILL
        self.rows = self._make_rows(optimizer, options)
        self.index, self.counts = (
            HashTable(spec, device=device, seed=0) for spec in cache.index_specs(self.tables)
        )
        self._first_keys = [0, *accumulate(spec.rows for spec in self.tables)]
        self._first_rows = [0, *accumulate(self.stored_rows)]
        self._register_buffers(device)
        self._lookups_since = [0] * len(self.tables)  # training lookups since the last choice
        self._choice_number = 0  # counts changes of `key_of_row`; backward checks it
        self._index_is_current = True  # whether `index` and `row_of_slot` agree with `key_of_row`
        self._choice_with_rows = (0, False)  # a choice number, and whether it has any stored rows
        self._step_offset: Tensor | None = None  # step of stored rows less that of cores, or None
        self.register_load_state_dict_post_hook(_finish_load)

    def _make_trains(
        self, optimizer: Optimizer | None, init: str, options: dict[str, Any]
    ) -> TableBatchedTTEmbeddingBags:
        return TableBatchedTTEmbeddingBags(self.tables, optimizer, init=init, **options)

    def _make_rows(
        self, optimizer: Optimizer | None, options: dict[str, Any]
    ) -> TableBatchedEmbeddingBags:
        """Make the module of the stored rows, one table per tensor train."""
        specs = [
            TableSpec(rows, spec.dim, spec.name, placement=self.cache.placement)
            for rows, spec in zip(self.stored_rows, self.tables, strict=True)
        ]
        cache = self.cache.row_cache(self.tables)
        precision = replace(options["precision"], matmul=MatmulPrecision.FLOAT32)
        options = {**options, "precision": precision}
        return TableBatchedEmbeddingBags(specs, optimizer, cache=cache, **options)

    def _feature_buffers(self) -> dict[str, list[Any]]:
        """Return the values of the int64 buffers that follow from the constructor's arguments."""
        feature_tables = self.trains.feature_tables
        return {
            "key_bases": [self._first_keys[t] for t in feature_tables],
            "rows_of_features": [self.tables[t].rows for t in feature_tables],
            "tables_of_features": list(feature_tables),
            "segment_tables": [0 for _ in feature_tables],  # index and counts have one table each
            "id_tables": [id_table_row(self.tables[t].rows) for t in feature_tables],
        }

    @property
    def feature_tables(self) -> tuple[int, ...]:
        """Return the table of each feature."""
        return self.trains.feature_tables

    @property
    def table_names(self) -> list[str]:
        """Return the name of each table."""
        return self.trains.table_names

    def _fill_layout(self) -> None:
        """Recompute the buffers that are not saved, after a move from meta."""
        self.features.copy_(self.trains.id_features())
        self.bounds_violations.zero_()
        for name, values in self._feature_buffers().items():
            getattr(self, name).copy_(torch.tensor(values, device="cpu"))

    def _register_buffers(self, device: torch.device | str | None) -> None:
        self.register_buffer("features", self.trains.id_features().clone(), persistent=False)
        for name, values in self._feature_buffers().items():
            tensor = torch.tensor(values, dtype=torch.int64, device=device)
            self.register_buffer(name, tensor, persistent=False)
        rows = torch.full((self.index.capacity() + 1,), -1, device=device)  # the last is no slot
        self.register_buffer("row_of_slot", rows, persistent=False)
        key_of_row = torch.full((self._first_rows[-1],), -1, device=device)
        self.register_buffer("key_of_row", key_of_row)
        num_tables, zeros = len(self.tables), partial(torch.zeros, dtype=torch.int64, device=device)
        self.register_buffer("bounds_violations", zeros(2), persistent=False)
        self.register_buffer("counters", zeros((num_tables, len(TT_COUNTERS))))
        self.register_buffer("changes", zeros((num_tables, 2), dtype=torch.float64))
        self.register_buffer("since", zeros(num_tables))

    @run_uncompiled
    def forward(
        self,
        indices: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Pool embeddings to `[B, sum D]`, or `[L, D]` for pooling NONE, in `precision.output`.

        Args:
            indices: int32 or int64, row of each lookup; -1 skips. `[L]`, or `[F * B, N]` for bags
                of N lookups, the bags of feature 0 first.
            offsets: int32 or int64 `[F * B + 1]`, feature-major; none with 2-dimensional indices.
            per_sample_weights: float32 in the shape of `indices`, scales each row; gets a gradient
                if it requires one.
            batch_sizes: `[F][ranks]`, bags per feature and rank, if features differ in batch size;
                pooled output is then flat, as in `TableBatchedEmbeddingBags`. None: B for each.

        Raises:
            RuntimeError: a dtype, a device or the number of offsets is wrong; an index or offset is
                out of bounds in mode FATAL; there are weights without pooling, or weights have
                another dtype or number; checkpointing repeats the lookup after stored rows have
                changed; or a CUDA graph captures a lookup that `TTCache.every` counts.
            TypeError: indices or offsets are not tensors, or `batch_sizes` are not ints.
            ValueError: `batch_sizes` do not fit; indices that are not 2-dimensional have no
                offsets; 2-dimensional indices have offsets, or weights of another shape.
        """
        check_tensor("indices", indices)
        refuse_transforms("per_sample_weights", per_sample_weights, indices, offsets)
        if indices.dim() == 2:
            indices, offsets, per_sample_weights = flatten_equal_bags(
                indices, offsets, per_sample_weights
            )
        elif offsets is None:
            raise missing_offsets_error(indices)
        elif not self.include_last_offset:
            offsets = append_last_offset(indices, offsets)
        if num_padding := num_padding_ids(indices, offsets):  # which would be counted as an id
            weights = None if per_sample_weights is None else per_sample_weights[num_padding:]
            offsets = (offsets if self.include_last_offset else offsets[:-1]) - num_padding
            out: Tensor = self.forward(
                indices[num_padding:], offsets, weights, batch_sizes=batch_sizes
            )
            is_pooled = self.trains.pooling is not Pooling.NONE
            return out if is_pooled else torch.cat([out.new_zeros(num_padding, out.shape[1]), out])
        offsets = self._checked_offsets(indices, offsets, batch_sizes)
        is_counted = self._is_counted()
        batch = self._split_lookups(indices, offsets, batch_sizes)
        skips_rows = self._skips_rows()
        out = self.trains(batch.core_ids, offsets, per_sample_weights, batch_sizes=batch_sizes)
        num_spilled_before = self._num_spilled_lookups()
        if not skips_rows:
            rows = batch.row_indices
            if not self._has_stored_rows():
                rows = torch.full_like(batch.core_ids, -1)
            out = out + self.rows(rows, offsets, per_sample_weights, batch_sizes=batch_sizes)
        out = out.to(self.precision.output)
        if is_counted:
            self._count_ids(batch, num_spilled_before)
        if out.requires_grad:
            out.register_hook(partial(self._check_choice, self._choice_number))
        return out

    def _is_counted(self) -> bool:
        """Return whether this lookup counts its ids; populate first if `every` lookups have passed.

        Raises:
            RuntimeError: see `forward`: a repetition after a change, or a captured lookup.
        """
        forward = checkpointed_forward(training=self.training)
        if forward is not None and forward.is_recomputation:
            self._check_choice(forward.recall(self))
            return False
        with_grad = torch.is_grad_enabled() or (forward is not None and forward.trains_without_grad)
        is_counted = self.training and with_grad
        if is_counted:
            if self.cache.every and is_captured(self.counters):
                raise RuntimeError(
                    f"a cache with every={self.cache.every} chooses its rows in Python, which the "
                    "replay of a CUDA graph does not run: use every=None, call populate() between "
                    "steps, and capture again afterwards"
                )
            self._populate_due_tables()
        if forward is not None:
            forward.note(self, self._choice_number)
        return is_counted

    def _has_stored_rows(self) -> bool:
        """Return whether any table has stored rows; reads the device once per choice."""
        if self._choice_with_rows[0] != self._choice_number:
            self._choice_with_rows = (self._choice_number, bool((self.key_of_row >= 0).any()))
        return self._choice_with_rows[1]

    def _skips_rows(self) -> bool:
        """Return whether a lookup reads only the cores, because no rows are stored.

        Its backward then counts a step of the cores only. So this method stores the difference of
        the steps, with which `_count_skipped_steps` later sets the step of the stored rows. If the
        lookup reads stored rows with gradients, that is done now.
        """
        skips_rows = not self._spills and not self._has_stored_rows()
        if not torch.is_grad_enabled():
            return skips_rows
        skips_rows = skips_rows and updates_in_backward(self.optimizer)
        is_frozen = self.trains.is_frozen or self.rows.is_frozen
        if not skips_rows or is_frozen or self.trains.frozen_tables or self.rows.frozen_tables:
            self._count_skipped_steps()
            return False
        if self._step_offset is None:
            steps = self.trains.hyperparams[Hyper.STEP]
            self._step_offset = self.rows.hyperparams[Hyper.STEP] - steps
        return True

    @without_gradients
    def _count_skipped_steps(self) -> None:
        """Advance the optimizer step of the stored rows by the steps that left them out."""
        if self._step_offset is not None:
            steps = self.trains.hyperparams[Hyper.STEP]
            self.rows.hyperparams[Hyper.STEP].copy_(steps + self._step_offset.to(steps))
            if self._step_offset.is_cuda:  # its memory may belong to the stream of a captured step
                self._step_offset.record_stream(torch.cuda.current_stream(self._step_offset.device))
            self._step_offset = None

    def _checked_offsets(
        self, indices: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """Check a batch, and return its offsets, `[bags + 1]`, repaired as `bounds_check` says."""
        check_tensor("offsets", offsets)
        num_features, num_bags = len(self.rows_of_features), offsets.numel() - 1
        if batch_sizes is None and (num_bags < 0 or num_bags % num_features):
            raise RuntimeError(
                f"offsets must have F * B + 1 entries for {num_features} features, got "
                f"{num_bags + 1}"
            )
        bag_layout = self._bag_layout(offsets, batch_sizes)
        return check_bounds(self, indices, offsets, self.features, bag_layout)

    def _bag_layout(
        self, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> Tensor | None:
        """Return `bag_layout`, int64 `[bags, 2]`; None if all features have B bags."""
        dims = [self.tables[t].dim for t in self.feature_tables]
        return lay_out_bags(self.pooling, dims, offsets, batch_sizes, offsets.device)[0]

    def _check_choice(self, choice: int | None, gradient: Tensor | None = None) -> None:
        """Raise RuntimeError if stored rows have changed since `choice`; also a gradient hook."""
        if choice is not None and choice != self._choice_number:
            raise RuntimeError(
                "rows of the cache were replaced between a lookup and its backward: call "
                "populate() after backward; with TTCache(every=...), make one lookup per "
                "backward, or use every=None and call populate()"
            )

    @without_gradients
    def _split_lookups(
        self, indices: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> _Lookups:
        """Split a batch into lookups of the cores, lookups of stored rows, and keys to count."""
        num_features = len(self.rows_of_features)
        bag_layout = self._bag_layout(offsets, batch_sizes)
        ids: Tensor = _ops.tt_keys(indices, offsets, bag_layout, self.id_tables)
        starts = feature_starts(offsets, num_features, batch_sizes)
        keys = ids
        if num_features > 1 or self.trains.feature_tables[0] != 0:  # else its keys are its ids
            keys = self._to_keys(ids, starts)
        segments = Keys(keys, starts, self.segment_tables)
        if not self._index_is_current:
            self._rebuild_index()
        slots = self.index.slots_of_batch(segments) if self._has_stored_rows() else None
        core_ids, rows, counted_ids = _ops.tt_stored(indices, ids, keys, slots, self.row_of_slot)
        core_ids = ids if slots is None else core_ids
        return _Lookups(core_ids, rows, segments._replace(ids=counted_ids))

    def _to_keys(self, ids: Tensor, starts: Tensor) -> Tensor:
        """Return keys, int64 `[L]`: each id plus the first key of its table; -1 stays."""
        positions = torch.arange(ids.numel(), device=ids.device)
        feature_of_id = torch.bucketize(positions, starts[1:-1], right=True)
        return torch.where(ids >= 0, ids + self.key_bases[feature_of_id], -1)

    @without_gradients
    def _count_ids(self, batch: _Lookups, num_spilled_before: Tensor | None) -> None:
        """Count the ids and the hits of a training lookup; invalid ids and -1 do not count.

        `num_spilled_before` is the result of `_num_spilled_lookups` before the lookup.
        """
        keys, tables, counters = batch.counted_keys, self.tables_of_features, self.counters
        calls = [partial(_count_, keys.ids, batch.row_indices, keys.starts, tables, counters)]
        num_spilled = self._num_spilled_lookups()
        if num_spilled is not None and num_spilled_before is not None:
            num_spilled -= num_spilled_before
            calls.append(partial(counters[:, TT_COUNTERS.index("spill_hits")].add_, num_spilled))
        self.counts.count_uses(keys)
        in_one_call(*calls)
        if self.cache.every:
            self._lookups_since = [since + 1 for since in self._lookups_since]

    def _num_spilled_lookups(self) -> Tensor | None:
        """Return the number of lookups of spilled rows so far, int64 `[T]`; None without SPILL."""
        cache = self.rows.row_cache
        column = COUNTERS.index("lookup_misses")
        return None if cache is None else cache.counters[:-1, column].clone()

    def populate(self, table: int | str | None = None) -> None:
        """Choose the most used rows of a table, or (None) of every table, and store them.

        Rows that are stored already keep their values. The host waits for the device. If stored
        rows change, backward of an earlier lookup raises.
        """
        self._populate(self._table_numbers(table))

    def table_number(self, table: int | str) -> int:
        """Return the number of a table that is given by number or name."""
        return self.trains.table_number(table)

    def _table_numbers(self, table: int | str | None) -> Sequence[int]:
        """Return the number of a table in a list; None returns all."""
        return range(len(self.tables)) if table is None else [self.table_number(table)]

    def _populate_due_tables(self) -> None:
        """Choose rows of the tables with `every` lookups since their choice, except frozen ones."""
        period = self.cache.every or math.inf
        due_tables = {t for t, since in enumerate(self._lookups_since) if since >= period}
        due_tables -= self.trains.frozen_tables
        if due_tables:
            self._populate(sorted(due_tables))

    @without_gradients
    def _populate(self, tables: Iterable[int]) -> None:
        """Store the most used rows of some tables, by the uses counted so far."""
        counted_batches = list(self.counts.export())
        keys = torch.cat([self.key_of_row[:0], *(rows.keys for rows in counted_batches)])
        uses = torch.cat([self.key_of_row[:0], *(rows.scores for rows in counted_batches)])
        for table in tables:
            first_key, end_key = self._first_keys[table : table + 2]
            is_of_table = (keys >= first_key) & (keys < end_key)
            self._populate_table(table, keys[is_of_table], uses[is_of_table])
            self._lookups_since[table] = 0
        if self._has_stored_rows():  # read it now: lookups in a CUDA graph cannot
            self._count_skipped_steps()

    def _populate_table(self, table: int, keys: Tensor, uses: Tensor) -> None:
        """Store the rows of the keys with the most uses; `keys` and `uses` are int64 `[n]`."""
        keys, order = keys.sort()  # among equal uses the smaller id is first
        uses = uses[order]
        top_keys = keys[uses.argsort(descending=True, stable=True)[: self.cache_rows[table]]]
        stored_keys = self._stored_keys(table)
        new_keys = top_keys[~torch.isin(top_keys, stored_keys)]
        is_leaving = (stored_keys >= 0) & ~torch.isin(stored_keys, top_keys)
        leaving_rows = is_leaving.nonzero().squeeze(1)
        if self._spills:  # only as many rows leave as host memory has no room for
            num_excess = max(len(new_keys) - int((stored_keys < 0).sum()), 0)
            leaving_rows = least_used_first(stored_keys, leaving_rows, keys, uses)[:num_excess]
        self._replace_rows(table, leaving_rows, new_keys)

    def _stored_keys(self, table: int) -> Tensor:
        """Return the keys of a table's rows, a view int64 `[stored rows]`, -1 for free rows."""
        begin, end = self._first_rows[table : table + 2]
        return self.key_of_row[begin:end]

    def _replace_rows(self, table: int, leaving_rows: Tensor, new_keys: Tensor) -> None:
        """Remove stored rows, given by index in a table; then store `new_keys`, which must fit.

        One native call changes cores, stored rows and their keys. The index is derived from the
        keys, so after an interrupt before its update the next lookup rebuilds it.
        """
        if not len(leaving_rows) and not len(new_keys):
            return
        if not self._index_is_current:  # the update below is of this table alone
            self._rebuild_index()
        stored_keys = self._stored_keys(table)
        keys_after, removed_keys = stored_keys.clone(), stored_keys[leaving_rows]
        cores = [core.detach().float() for core in self.trains.table_cores(table)]
        calls: list[partial[Any]] = []
        if len(leaving_rows):
            cores, calls = self._plan_eviction(table, leaving_rows, cores)
            keys_after[leaving_rows] = -1
        free_rows = (keys_after < 0).nonzero().squeeze(1)[: len(new_keys)]
        keys_after[free_rows] = new_keys
        ids = new_keys - self._first_keys[table]
        self.rows.flush_and_empty()  # `overwriting` would drop newer rows in the row cache
        if len(new_keys):
            new_rows = tt_projection.compute_rows(self.tables[table], cores, ids)
            for name, view in self.rows.table_views()[table].items():
                device_rows = free_rows.to(view.device)
                is_weight = name == "weight"
                values = new_rows.to(view) if is_weight else torch.zeros_like(view[device_rows])
                calls.append(partial(view.index_copy_, 0, device_rows, values))
        self._invalidate_choice()
        with self.rows.overwriting():
            in_one_call(*calls, partial(stored_keys.copy_, keys_after))
        if len(removed_keys):
            self.row_of_slot[self.index.slots(removed_keys)] = -1
            self.index.erase(removed_keys)
        if len(new_keys):
            slots = self.index.find_or_insert_slots(new_keys).slots
            self.row_of_slot[slots] = free_rows
        self._index_is_current = True

    def _invalidate_choice(self) -> None:
        """Begin a choice, before `key_of_row` is written: the index and lookups are out of date."""
        self._choice_number, self._index_is_current = self._choice_number + 1, False

    def _plan_eviction(
        self, table: int, rows: Tensor, cores: list[Tensor]
    ) -> tuple[list[Tensor], list[partial[Any]]]:
        """Return the float32 cores after `rows` have left, and the calls that make the change."""
        spec, ids = self.tables[table], self._stored_keys(table)[rows] - self._first_keys[table]
        values, calls = self._row_values(table, rows), []
        core_rows = tt_projection.compute_rows(spec, cores, ids)
        squared_change = float((values - core_rows).double().square().sum())
        if self.cache.eviction is not RowEviction.DROP:
            projected_cores = tt_projection.project(spec, cores, ids, values)
            pairs = [*zip(self.trains.table_cores(table), projected_cores, strict=True)]
            calls = [partial(core.copy_, projected_core) for core, projected_core in pairs]
            cores = [projected_core.to(core.dtype).float() for core, projected_core in pairs]
            core_rows = tt_projection.compute_rows(spec, cores, ids)
        squared_loss = float((values - core_rows).double().square().sum())
        sums = torch.tensor([squared_change, squared_loss], device=self.changes.device)
        calls.append(partial(self.changes[table].add_, sums))
        calls.append(partial(self.counters[table, TT_COUNTERS.index("evicted")].add_, len(rows)))
        return cores, calls

    def _row_values(self, table: int, rows: Tensor) -> Tensor:
        """Return the values of stored rows as float32, read from the cache if they are in it."""
        weight = self.rows.table_weights()[table].detach()
        return weight[rows.to(weight.device)].to(rows.device).float()

    @without_gradients
    def to_dense(self, table: int | str) -> Tensor:
        """Return a table as a new float32 `[rows, D]` matrix on its device, with stored rows."""
        table = self.table_number(table)
        spec = self.tables[table]
        return join_blocks(self.dense_blocks(table), spec.rows, spec.dim, self.features.device)

    def dense_blocks(self, table: int | str) -> Iterator[Tensor]:
        """Yield the rows of `to_dense` in blocks, in order; do not train or populate meanwhile."""
        table = self.table_number(table)
        keys = self._stored_keys(table)
        rows = (keys >= 0).nonzero().squeeze(1)
        ids, first_id = keys[rows] - self._first_keys[table], 0
        for block in self.trains.dense_blocks(table):
            is_in_block = (ids >= first_id) & (ids < first_id + len(block))
            values = self._row_values(table, rows[is_in_block])
            block[ids[is_in_block] - first_id] = values.to(block)
            yield block
            first_id += len(block)

    def cached_ids(self, table: int | str) -> Tensor:
        """Return the ids of stored rows, cached or spilled, int64 `[n]`, in the order of rows."""
        table = self.table_number(table)
        keys = self._stored_keys(table)
        return keys[keys >= 0] - self._first_keys[table]

    def spilled_ids(self, table: int | str) -> Tensor:
        """Return the ids of rows stored but not in the cache, int64 `[n]`; empty without SPILL."""
        table = self.table_number(table)
        keys = self._stored_keys(table)
        return keys[(keys >= 0) & self._is_spilled(table)] - self._first_keys[table]

    def _is_spilled(self, table: int) -> Tensor:
        """Return which of a table's stored rows are not in the cache, bool `[stored rows]`."""
        begin, end = self._first_rows[table : table + 2]
        cache = self.rows.row_cache
        if cache is None:
            return torch.zeros(end - begin, dtype=torch.bool, device=self.key_of_row.device)
        rows = torch.arange(begin, end, device=cache.tags.device)
        return ~torch.isin(rows, cache.tags)

    def cache_stats(self) -> TTCacheStats:
        """Return counts since the last reset (reads the device)."""
        names = [field.name for field in fields(TTCacheStats)][:-1]
        sums = zip(self.counters.tolist(), self.changes.tolist(), strict=True)
        values_of_tables = [
            dict(zip(names, (*counts, *changes, self.spilled_ids(t).numel()), strict=True))
            for t, (counts, changes) in enumerate(sums)
        ]
        tables = [TTCacheStats(**values) for values in values_of_tables]
        totals = {name: sum(values[name] for values in values_of_tables) for name in names}
        return TTCacheStats(**totals, tables=dict(zip(self.rows.table_names, tables, strict=True)))

    def reset_cache_stats(self, table: int | str | None = None) -> None:
        """Set the counts of `cache_stats` to zero, of one table or (None) of all.

        `spilled` is the current number of spilled rows and does not change.
        """
        table_numbers = list(self._table_numbers(table))
        self.counters[table_numbers] = 0
        self.changes[table_numbers] = 0.0

    @without_gradients
    def empty_cache(self, table: int | str | None = None) -> None:
        """Remove all stored rows and forget all counts, of one table or (None) of all.

        With `DROP` their values are lost. Otherwise the values of all stored rows, spilled ones
        included, move into the cores as with `PROJECT`.
        """
        for t in self._table_numbers(table):
            rows = (self._stored_keys(t) >= 0).nonzero().squeeze(1)
            self._replace_rows(t, rows, self.key_of_row[:0])
            self._forget_counts(t)
        if table is None:
            self.counts.clear()  # including counts of ids that belong to no table

    def _forget_counts(self, table: int) -> None:
        """Remove the counted ids of a table."""
        self.counts.erase(self._counted_ids(table).keys)

    def _counted_ids(self, table: int) -> TableRows:
        """Return the counted ids of a table as keys, with their number of uses as scores."""
        entries = self.counts.index.export(0)
        first_key, end_key = self._first_keys[table : table + 2]
        is_of_table = (entries.keys >= first_key) & (entries.keys < end_key)
        keys, stamps, uses = entries.keys[is_of_table], entries.stamps[is_of_table], entries.scores
        assert uses is not None
        return TableRows(
            keys, torch.zeros(len(keys), 1, device=keys.device), stamps, uses[is_of_table]
        )

    def _rebuild_index(self) -> None:
        """Rebuild the index from the keys of the stored rows."""
        self._index_is_current = False
        self.index.clear()
        self.row_of_slot.fill_(-1)
        for table in range(len(self.tables)):
            keys = self._stored_keys(table)
            rows = (keys >= 0).nonzero().squeeze(1)
            self.row_of_slot[self.index.find_or_insert_slots(keys[rows]).slots] = rows
        self._index_is_current = True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._count_skipped_steps()
        self.since.copy_(torch.tensor(self._lookups_since, device="cpu"))
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load a state dict, also of a module with another number of stored rows.

        If a table has more stored rows than fit, or an entry is invalid, this module stays as it
        is, and `load_state_dict` raises RuntimeError.
        """
        self._count_skipped_steps()
        self.since.copy_(torch.tensor(self._lookups_since, device="cpu"))
        since = state_dict.get(f"{prefix}since")
        if isinstance(since, Tensor) and not since.dim():  # earlier versions had one for all tables
            state_dict[f"{prefix}since"] = since.expand(len(self.tables)).clone()
        views = self.rows.table_views()
        stored_tables = StoredTables(self.rows.table_names, self._first_keys, views)
        problems = [*stored_tables.problems(state_dict, prefix)]
        if not problems:
            state_dict.update(stored_tables.resized_entries(state_dict, prefix))
        if not state_dicts.refuse_invalid(self, state_dict, prefix, arguments[-1], problems):
            self._invalidate_choice()
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry; the saved number of stored rows must be this one."""
        counts = (f"{prefix}{name}" for name in ("counters", "changes", "since"))
        tensors = state_dicts.loadable_tensors(self, prefix)
        yield from state_dicts.count_problems(
            state_dict, {name: tensors.pop(name) for name in counts}
        )
        yield from state_dicts.entry_problems(state_dict, tensors)

    def __setstate__(self, state: dict[str, Any]) -> None:
        parameters.refuse_averages()
        super().__setstate__(state)
        self._rebuild_index()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        check_not_shared(fn)
        warn_of_dtype(fn, "precision=Precision(weights=...)")
        super()._apply(ops.keep_dtype(fn), recurse)
        if parameters.loses_values(fn) and not self.features.is_meta:
            self._fill_layout()
            self._forget_rows()
        return self

    def finish_load(self) -> None:
        """Rebuild the index after a state dict was loaded; do nothing if it was refused."""
        if not self._index_is_current:
            self._lookups_since = self.since.tolist()
            self._rebuild_index()

    def reset_parameters(self) -> None:
        """Redraw the cores, reset optimizer states, remove stored rows and forget all counts."""
        self.trains.reset_parameters()
        self.rows.reset_parameters()
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Remove the stored rows without a projection onto the cores, and forget all counts."""
        self._step_offset = None
        self._invalidate_choice()
        self.key_of_row.fill_(-1)
        self._rebuild_index()
        self.counts.clear()
        self.reset_cache_stats()
        self._lookups_since = [0] * len(self.tables)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of cores and stored rows; raise as `trains.set_learning_rate`."""
        self.trains.set_learning_rate(lr)
        self.rows.set_learning_rate(lr)

    def load_hyperparams(self, values: Tensor) -> None:
        """Load saved `trains.hyperparams`, for both; raise ValueError if they do not fit."""
        self.trains.load_hyperparams(values)
        self.rows.load_hyperparams(values)

    def nbytes(self) -> dict[str, int]:
        """Return bytes by use.

        `weights` are the cores, `cache` the stored rows and both hash tables, `optimizer_state` the
        states of cores and stored rows, and `spill` is 0. With `SPILL`, `spill` has the stored rows
        and their states in host memory, `cache` the rows in the cache and both hash tables, and
        `optimizer_state` the states of the cores.
        """
        train_bytes, row_bytes = self.trains.nbytes(), self.rows.nbytes()
        tensors = [*self.index.index.tensors(), *self.counts.index.tensors()]
        index_bytes = sum(tensor.nbytes for tensor in (self.row_of_slot, self.key_of_row, *tensors))
        nbytes = {use: train_bytes[use] for use in ("weights", "optimizer_state")}
        if self._spills:
            spill_bytes = row_bytes["weights"] + row_bytes["optimizer_state"]
            return {**nbytes, "cache": row_bytes["cache"] + index_bytes, "spill": spill_bytes}
        nbytes["optimizer_state"] += row_bytes["optimizer_state"]
        return {**nbytes, "cache": row_bytes["weights"] + index_bytes, "spill": 0}


def _finish_load(module: Any, incompatible: Any) -> None:
    """Finish a load; the hook of `load_state_dict`."""
    module.finish_load()
