"""DynamicEmbeddingBags: T hash tables of rows with the optimizer fused into backward.

The module is made of parts: `index` maps keys to slots, `rows` describes the buffers of the rows,
`row_initializer` writes new rows, `admission` counts keys before they are inserted, `scores` are
those of the next batch, `eviction_log` records keys that left, and `backing` is the tier behind the
tables. Saving and loading are functions of `emblib.dynamic.saving`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from emblib import ops
from emblib.dynamic import training
from emblib.dynamic.admission import Admission
from emblib.dynamic.eviction import EvictionLog, EvictionScores, Expiry
from emblib.dynamic.handles import DynamicTables, ModuleTables
from emblib.dynamic.hash_index import HashIndex, RowBuffers
from emblib.dynamic.keys import LastBatch, as_keys, hash_keys_of, of_insertion
from emblib.dynamic.rows import (
    BatchReads,
    RowInitializer,
    RowLayout,
    TrainingUpdate,
    WeightGradient,
    check_capacity,
)
from emblib.dynamic.saving import checkpoint, table_dumps
from emblib.dynamic.saving.dumps import Part, Report
from emblib.dynamic.saving.loading import Loaded
from emblib.dynamic.tiers.backing_tier import BackingTier
from emblib.dynamic.tiers.store import BackingStore, TierStats, check_backing
from emblib.ops import autograd
from emblib.ops.hash import Keys
from emblib.optim import Optimizer
from emblib.specs import (
    BoundsCheck,
    DynamicSpec,
    Pooling,
    Precision,
    check_count,
)
from emblib.tables import recomputation
from emblib.tables.base import FusedTables, SpecKind, append_last_offset
from emblib.tables.changes import CompletingLock
from emblib.tables.graph_break import graph_break
from emblib.tables.locks import atomic

_R = TypeVar("_R")


class DynamicEmbeddingBags(FusedTables):
    """Look up F features in T dynamic tables and pool their rows into one `[B, sum D]` output.

    A training forward inserts every new key of the batch, evicting old keys when a table is full,
    and touches the keys that are there; backward applies `optimizer` to the rows of the batch, as
    in `TableBatchedEmbeddingBags`. A forward trains if the module is in training mode and gradients
    are enabled. Any other forward changes nothing: keys that are not in their table read
    `DynamicSpec.default_value`, and its backward changes no row.

    With `backing`, each key is in one of two tiers: `DynamicSpec.capacity` is that of the fast one,
    and evicted rows move to a store, from which they return when they are used. Outputs and updates
    are those of one large table, bit for bit (stochastic rounding excepted), until a row leaves the
    store (docs/tiers.md).

    Threads may share a module: every call is atomic, and so is every update in backward; a forked
    process may not use a store in files (docs/threads.md). The result of a batch is defined by a
    sequential program (see `emblib.ops.hash`), so the same batches give the same bytes on any
    device and any number of threads.

    Args:
        tables: capacity, dim and rules of each table; all must agree in eviction and insert_policy,
            which `backing` sets.
        optimizer: optimizer of `emblib.optim`. None leaves dense gradients for an optimizer of
            `torch.optim`.
        backing: the store behind the tables, which belongs to this module alone; None for none.
        pooling: SUM, MEAN, or NONE for one vector per lookup (needs one dim for all features).
        feature_tables: the table of each feature; by default feature i reads table i.
        precision: dtypes of weights, output and optimizer state, and how updates are rounded.
        seed: seed of the initial values of rows and of the hash of keys, in [0, 2^63). Where
            untrusted parties choose keys, a secret seed keeps them from filling a few buckets.
            None: initial values are those of seed 0, and the seed of the hash is drawn from torch's
            generator.
        device: device of the tables and their lookups; None is torch's default device.
        include_last_offset: False for offsets without their last entry, the number of indices, as
            `nn.EmbeddingBag` takes them.
        hash_seeds: seeds of the hash of keys alone, one per table; None is `seed`.

    Raises:
        BlockingIOError: the store is open elsewhere.
        ValueError: arguments that do not fit each other; the store holds other tables.

    Example:
        >>> table = emblib.DynamicSpec(capacity=1_000, dim=16, name="item")
        >>> bags = emblib.DynamicEmbeddingBags([table], emblib.optim.Adam(0.01))
        >>> ids, offsets = torch.tensor([2**62, -7, 12]), torch.tensor([0, 2, 3])
        >>> pooled = bags(ids, offsets)  # inserts 3 keys
        >>> pooled.shape, bags.size(0)
        (torch.Size([2, 16]), 3)
        >>> pooled.sum().backward()  # updates their rows
    """

    _lock: CompletingLock
    tables: ModuleTables
    feature_table: Tensor
    dropped_updates: Tensor
    """Updates of keys that were evicted between their forward and their backward, so far."""
    moves: Tensor
    spec_kind = SpecKind(
        DynamicSpec,
        "DynamicSpec(capacity=1000, dim=64)",
        "for a TableSpec use TableBatchedEmbeddingBags",
    )

    def __init__(
        self,
        tables: Sequence[DynamicSpec],
        optimizer: Optimizer | None = None,
        *,
        backing: BackingStore | None = None,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        precision: Precision | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
        hash_seeds: Sequence[int] | None = None,
    ) -> None:
        if backing is not None:
            check_backing(backing)
            tables = backing.with_insert_policy(tables)
        super().__init__(tables, optimizer, pooling, feature_tables, precision, BoundsCheck.WARNING)
        self._lock = CompletingLock()
        self.tables = ModuleTables(self.tables, self)
        self.include_last_offset = include_last_offset
        self.seed = 0 if seed is None else check_count("seed", seed, minimum=0)
        training.check_optimizer(self.optimizer, self.tables, has_backing=backing is not None)
        check_capacity(self.tables)
        device = torch.empty(0, device=device).device
        training.check_device(device)
        ops.require_kernels(device)

        overflow_rows = 0 if backing is None else backing.overflow_rows(device)
        states = self.optimizer.states
        self.rows = RowLayout(self.tables, self.table_names, states, self.precision, overflow_rows)
        self.total_rows = self.rows.total_rows
        self._layout = self._feature_rows(self.rows.feature)
        hash_keys = hash_keys_of(seed, self.table_names, hash_seeds)
        self.index = HashIndex(self.tables, device, hash_keys)
        self._register_rows(device)
        self.row_initializer = RowInitializer(self.rows, self.seed, device)
        admits = any(spec.admission is not None for spec in self.tables)
        self.admission = Admission(self.tables, device, hash_keys) if admits else None
        has_scores = self.index.order == "assigned"
        self.scores = EvictionScores(self.tables, device) if has_scores else None
        self.eviction_log: EvictionLog | None = None
        self.hooks: list[training.TrainingHook] = []
        if self.optimizer.deferred:
            self.hooks.append(training.PendingGradients(self))
        self.backing: BackingTier | None = None
        self.expiry = Expiry(self.tables)
        self.last_batch: LastBatch | None = None
        self._zeros = torch.zeros(0, dtype=torch.int32, device=device)
        features = torch.tensor(self.feature_tables, dtype=torch.int64, device=device)
        self.register_buffer("feature_table", features, persistent=False)
        dropped = torch.zeros(1, dtype=torch.int64, device=device)
        self.register_buffer("dropped_updates", dropped, persistent=False)
        self._register_common(device)
        self.reset_parameters()
        if backing is not None:
            self.backing = BackingTier(self, backing)

    def _register_rows(self, device: torch.device) -> None:
        weights, *states = self.rows.allocate(device)
        self._register_row_buffers(weights, states, persistent=False)
        self.register_buffer("moves", self.rows.moves(device), persistent=False)

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Return pooled rows `[B, sum D]`, or `[L, D]` for pooling NONE, in `precision.output`.

        Args:
            indices: int64, uint64 or int32 `[L]`, the key of each lookup: any value, none is
                reserved.
            offsets: int32 or int64 `[F * B + 1]`, feature-major: bag of feature f and sample b is
                `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`.
            per_sample_weights: float32 `[L]`, scales each row; gets a gradient if it requires one.
            batch_sizes: bags per feature and rank, as in `TableBatchedEmbeddingBags`, for features
                of unequal batch sizes.
            counts: int64 `[L]`, the number of uses that each lookup stands for, where ids were
                deduplicated before; by default 1 each. Eviction by counts and admission use it.

        Raises:
            RuntimeError: wrong dtype, device or number of offsets; offsets that would leave out
                ids or a bag, on the CPU; a key that found no slot in a table with
                `OnInsertFailure.RAISE`; a batch with more ids outside the fast tier than
                `BackingStore.max_misses`.
            TypeError: indices of another dtype.
            ValueError: `batch_sizes` that do not fit; counts below 0; weights without pooling.
        """
        if padding := training.num_padding_ids(indices, offsets):
            rest = (
                None if part is None else part[padding:] for part in (per_sample_weights, counts)
            )
            weights, uses = rest
            ids = indices[padding:]
            out = self(ids, offsets - padding, weights, batch_sizes=batch_sizes, counts=uses)
            is_pooled = self.pooling is not Pooling.NONE
            return out if is_pooled else torch.cat([out.new_zeros(padding, out.shape[1]), out])
        if autograd.updates_in_backward(self.optimizer):
            self._check_in_place([self.weights])
        ids = as_keys(indices)
        training.check_batch(ids, per_sample_weights, counts, self.pooling)
        keys, batch = self._make_batch(ids, offsets, batch_sizes)
        return self._look_up(keys, batch, per_sample_weights, counts)

    def _make_batch(
        self,
        ids: Tensor,
        offsets: Tensor,
        batch_sizes: Sequence[Sequence[int]] | None,
        *,
        is_prefetch: bool = False,
    ) -> tuple[Keys, autograd.Lookup]:
        """Return the batch as keys by table, and as bags whose rows are not known yet."""
        if not self.include_last_offset:
            offsets = append_last_offset(ids, offsets)
        bag_layout, columns = self._bag_layout(offsets, batch_sizes, ids.device)
        zeros = self._zeros_like(ids)
        offsets = training.check_offsets(self, zeros, offsets, bag_layout, is_prefetch=is_prefetch)
        starts = training.feature_starts(offsets, len(self.feature_tables), batch_sizes)
        keys = Keys(ids.contiguous(), starts, self.feature_table)
        return keys, autograd.Lookup(
            features=self.features,
            indices=ids,
            offsets=offsets,
            bag_layout=bag_layout,
            pooling=self.pooling,
            total_rows=self.total_rows,
            output_dim=columns,
            repaired=self.bounds_check is not BoundsCheck.NONE,
        )

    def _zeros_like(self, ids: Tensor) -> Tensor:
        count, zeros = ids.numel(), self._zeros
        if zeros.numel() < count or zeros.device != ids.device:
            zeros = self._zeros = torch.zeros(2 * count, dtype=torch.int32, device=ids.device)
        return zeros[:count]

    @graph_break  # an index is state, and its rows move
    @atomic
    def _look_up(
        self,
        keys: Keys,
        batch: autograd.Lookup,
        sample_weights: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        running = recomputation.running_forward(training=self.training)
        if self._frozen or not training.trains(self, running):
            return self._look_up_untrained(keys, batch, sample_weights)
        if self._untrained:
            raise RuntimeError(
                f"of the dynamic tables {self.table_names}, which are one kernel, "
                f"{[self.table_names[t] for t in sorted(self._untrained)]} are frozen: a training "
                "forward inserts the keys of all; freeze all of them, or look up in evaluation mode"
            )
        training.check_replicas(self.index.tags, self.weights)
        update = self._insert_keys(keys, counts, running)
        update.weighted = sample_weights is not None and sample_weights.requires_grad
        batch = update.reads.put_into(batch)
        if not torch.is_grad_enabled():  # a repetition will have gradients
            weights = self._tiers().weights
            return autograd.lookup_no_grad(weights, batch, sample_weights, self.output_dtype)
        update.batch = batch  # without the update, which would be a cycle
        batch = batch._replace(hooks=update)
        if not autograd.updates_in_backward(self.optimizer):
            memory, dtype = [self.weights], self.output_dtype
            self._unstepped.check(memory)
            return autograd.lookup(
                self.weights, memory, batch, self.optimizer, sample_weights, dtype
            )
        return autograd.fused_lookup(
            self.grad_anchor, self._tiers(), self.optimizer, batch, sample_weights
        )

    @torch.no_grad()  # a `with` would leave gradients disabled if its end is interrupted
    def _insert_keys(
        self, keys: Keys, counts: Tensor | None, running: recomputation.RunningForward | None
    ) -> TrainingUpdate:
        return training.insert_or_repeat(self, keys, counts, running, self._make_update)

    @torch.no_grad()
    def _find_keys(self, keys: Keys) -> BatchReads:
        slots = self.index.find(keys) if self.backing is None else self.backing.search(keys)
        return self.row_initializer.reads_of_found(keys, slots)

    def _look_up_untrained(
        self, keys: Keys, batch: autograd.Lookup, sample_weights: Tensor | None
    ) -> Tensor:
        """Look up without insertion or update; sample weights get their gradient."""
        reads = self._find_keys(keys)
        batch = reads.put_into(batch)
        memory = self._tiers()
        if sample_weights is None or not torch.is_grad_enabled():
            return autograd.lookup_no_grad(memory.weights, batch, sample_weights, self.output_dtype)
        update = self._make_update(keys, reads.indices, reads)
        batch = batch._replace(hooks=WeightGradient(batch, update))
        return autograd.fused_lookup(
            self.grad_anchor.detach(), memory, self.optimizer, batch, sample_weights
        )

    def _make_update(self, keys: Keys, slots: Tensor, reads: BatchReads) -> TrainingUpdate:
        return TrainingUpdate(
            self._lock, self.index, keys, slots, reads, self.dropped_updates, self.backing
        )

    def _tiers(self) -> autograd.Tiers:
        weights, *states = self.row_buffers()
        return autograd.Tiers([weights], states, self.hyperparams, self.output_dtype)

    @atomic
    def track_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Reset the states that `optimizer` keeps for `weights` in the rows of new keys.

        For `optim.External`: an optimizer of torch.optim knows rows, not keys, so without this a
        new key continues with the states of the key that had its row before.

        Raises:
            ValueError: the weights are not one matrix `[rows, dim]`, or not the optimizer's.
        """
        self.hooks.append(training.ExternalStates.of_module(self, optimizer))

    @atomic
    def track_evictions(self, max_keys: int = 1 << 24) -> EvictionLog:
        """Record from now on which keys leave and when, at most `max_keys` per table."""
        if self.eviction_log is None:
            self.eviction_log = EvictionLog(len(self.tables), self.index.tick, max_keys)
        return self.eviction_log

    def record_evictions(self, table: int, keys: Tensor) -> None:
        """Record keys that left a table in this step, if evictions are tracked."""
        if self.eviction_log is not None:
            self.eviction_log.record(table, keys, self.index.tick)

    @property
    def num_training_steps(self) -> int:
        """The number of training forwards (reads the device)."""
        return self.index.tick

    @atomic
    def key_status(self) -> Tensor:
        """Return the status of each id of the last training forward: uint8 `[L]` of `KeyStatus`."""
        return of_insertion(self._last().inserted)

    @atomic
    def status_of(self, table: int | str, ids: Tensor) -> Tensor:
        """Return the status of ids of a table in the last training forward: uint8 `[n]`, on CPU.

        Ids that were not in it are `KeyStatus.ABSENT`.
        """
        return self._last().status_of(self.table_number(table), as_keys(ids).cpu())

    def _last(self) -> LastBatch:
        if self.last_batch is None:
            raise RuntimeError(
                "key_status is that of the last training forward, and there was none; call the "
                "module in training mode, with gradients enabled, first"
            )
        return self.last_batch

    def table_handles(self) -> DynamicTables:
        """Return the handle of each table, by name; `tables[name]` is one of them."""
        return self.tables.handles()

    @atomic
    def set_eviction_score(self, score: int | Mapping[int, int] | Mapping[str, int]) -> None:
        """Set the score that `Eviction.CUSTOM` tables assign from the next training forward on.

        Keys used by a batch get its score; keys with the lowest scores are evicted first.

        Args:
            score: an int64 for all those tables, or by number or name of the table.

        Raises:
            KeyError, IndexError, ValueError: there is no such table, or its eviction is another.
            TypeError: not an int.
        """
        if self.scores is None:
            raise ValueError("scores are set for tables with Eviction.CUSTOM, and none has it")
        if isinstance(score, Mapping):
            score = {self.table_number(table): value for table, value in score.items()}
        self.scores.set(score)

    @atomic
    def set_eviction_step(self, table: int | str, step: int) -> None:
        """Set the step that a table with `Eviction.STEP` assigns to its next batch."""
        if self.scores is None:
            raise ValueError("steps are counted by tables with Eviction.STEP, and none has it")
        self.scores.set_steps({self.table_number(table): step})

    @atomic
    def eviction_score(self, table: int | str) -> int | None:
        """Return the score that a table assigns to its next batch, None for none (waits)."""
        number = self.table_number(table)
        return None if self.scores is None else self.scores.get()[number]

    def complete(
        self, make: Callable[[], _R], is_optional: Callable[[], bool] = lambda: True
    ) -> _R:
        """Make a change of the tables, see `CompletingLock.complete`."""
        return self._lock.complete(make, is_optional)

    # Keys and rows

    def table_number(self, table: int | str) -> int:
        """Return the number of a table given by number or name, see `RowLayout.table_number`."""
        return self.rows.table_number(table)

    def row_buffers(self) -> list[Tensor]:
        """Return weights and states as flat tensors, by slot; see `RowLayout`."""
        return [self.weights.detach().view(-1), *self._states()]

    def slot_rows(self) -> RowBuffers:
        """Return the rows that the index moves when a table grows."""
        return RowBuffers(self.row_buffers(), self.moves, self._use_rows)

    def _use_rows(self, table: int, before: int, now: int) -> None:
        self.rows.use(self.row_buffers(), table, before, now)

    def table_rows(self, table: int | str) -> dict[str, Tensor]:
        """Return views of a table's rows by slot: `weight` `[rows, dim]` and optimizer states.

        Rows of empty slots are unspecified; views are invalid once the module moves.
        """
        return self.rows.views(self.row_buffers(), self.table_number(table))

    def _keys_of(self, table: int, ids: Tensor) -> Keys:
        return Keys.of(as_keys(ids).to(self.hyperparams.device), self.table_number(table))

    @atomic
    def size(self, table: int) -> int:
        """Return the number of keys of a table, in both tiers (reads the device)."""
        table = self.table_number(table)
        if self.backing is None:
            return self.index.size(table)
        self.backing.write_back()
        return self.index.size(table) + self.backing.store.size(table)

    @atomic
    def capacity(self, table: int) -> int:
        """Return the number of rows in use of a table, as it has grown (reads the device)."""
        return self.index.capacity(self.table_number(table))

    @atomic
    def find(self, table: int, ids: Tensor) -> Tensor:
        """Return the rows of ids in `table_rows(table)`, int64, -1 for ids that are not there.

        They are valid until the next training forward.
        """
        return self.index.find(self._keys_of(table, ids))

    @atomic
    def reserve(self, table: int, rows: int) -> None:
        """Grow a table to the size that a number of keys needs, at most to its capacity."""
        self.index.reserve(self.table_number(table), rows, self.slot_rows())

    @atomic
    def erase(self, table: int, ids: Tensor) -> Tensor:
        """Remove keys with their rows; return by position whether one was there (once per key)."""
        table = self.table_number(table)
        return training.erase_keys(self, table, self._keys_of(table, ids))

    @atomic
    def stats(self) -> dict[str, dict[str, int]]:
        """Return counts by table since `reset_stats`, see `emblib.ops.hash.COUNTERS` (waits)."""
        return dict(zip(self.table_names, self.index.stats(), strict=True))

    @atomic
    def reset_stats(self) -> None:
        """Set the counts of `stats` and `tier_stats` to zero."""
        self.index.reset_stats()
        if self.backing is not None:
            self.backing.reset_stats()

    @atomic
    def nbytes(self) -> dict[str, int]:
        """Return the bytes in use of `weights`, `optimizer_state` and `index`."""
        weights, *states = self.rows.nbytes(self._capacities())
        return {
            "weights": weights,
            "optimizer_state": sum(states),
            "index": self.index.nbytes(),
        }

    def _capacities(self) -> list[int]:
        return [self.index.capacity(t) for t in range(len(self.tables))]

    @torch.no_grad()
    @atomic
    def reset_parameters(self) -> None:
        """Remove all keys and reset optimizer, counters and admission as at construction."""

        def reset() -> None:
            self._reset_common()
            self.clear()

        self.complete(reset)

    @atomic
    def clear(self) -> None:
        """Remove all keys, in both tiers; tables have their initial capacity again.

        The count of training steps restarts, unless evictions are tracked.
        """
        tick = 0
        if self.eviction_log is not None:
            tick = self.index.tick
            for t in range(len(self.tables)):
                self.record_evictions(t, checkpoint.table_entries(self, t).keys)
        self.complete(lambda: training.clear_tables(self, tick))

    # The backing store

    @graph_break
    @torch.no_grad()
    @atomic
    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Read the rows of a coming batch that are in the backing store, in another thread.

        This changes no result and moves no row between the tiers.
        """
        if self.backing is not None:
            keys, _ = self._make_batch(as_keys(indices), offsets, batch_sizes, is_prefetch=True)
            self.backing.prefetch(keys)

    @atomic
    def flush(self) -> None:
        """Commit both tiers to the backing store, if there is one, and wait until that is done."""
        if self.backing is not None:
            self.backing.flush()

    @atomic
    def close(self) -> None:
        """Close the backing store, undoing what was not flushed; the module is unusable then."""
        if self.backing is not None:
            self.backing.store.close()

    @atomic
    def tier_stats(self) -> dict[str, TierStats]:
        """Return counts of both tiers by table since `reset_stats`; {} without a backing store."""
        if self.backing is None:
            return {}
        self.backing.write_back()
        return self.backing.stats()

    # Saving and loading

    def save(
        self,
        directory: str | Path,
        *,
        since: int | None = None,
        part: Part = Part(),  # noqa: B008
        identity: str | None = None,
        report: Report | None = None,
    ) -> int:
        """Save the tables to a directory, which then holds all of this dump or its old content.

        Call it between steps, not between a forward and its backward.

        Args:
            directory: directory of the dump, created if it does not exist; an older dump in it is
                replaced.
            since: save only what changed at this tick or later: the return value of an earlier
                call. Removed keys are saved too, so call `track_evictions` before that call.
            part: rank and number of ranks; each writes its part, into one directory.
            identity: text that all parts of one dump share; None is the tick.
            report: function that is called as rows are written.

        Returns:
            The tick to pass as `since` the next time.
        """
        return table_dumps.save(self, directory, since, part, identity, report)

    def load(
        self,
        directory: str | Path,
        *,
        part: Part = Part(),  # noqa: B008
        report: Report | None = None,
    ) -> dict[str, Loaded]:
        """Load what `save` wrote; changes are applied to the present content of the tables.

        All checksums and all tables are checked before the first table is changed.

        Args:
            directory: directory of the dump.
            part: rank and number of ranks; the dump may be of another number of ranks.
            report: function that is called as rows are loaded.

        Returns:
            Per table, the numbers of entries that were loaded and that found no slot.

        Raises:
            DumpError: there is no whole dump, or it is damaged.
            ValueError: it is of other tables or another optimizer, or of changes since a tick that
                these tables have not reached.
        """
        return table_dumps.load(self, directory, part, report)

    @atomic
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        checkpoint.write_state(self, destination, prefix)

    def _expected_keys(self, state_dict: Mapping[str, Any]) -> Iterable[str]:
        return checkpoint.expected_names(self, state_dict)

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield what is wrong with the entries of the module."""
        return checkpoint.state_problems(self, state_dict, prefix)

    @atomic
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *arguments)
        checkpoint.read_state(self, state_dict, prefix, *arguments[2:])

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        """Return the names in a state dict that are no parameter or buffer, as attributes."""
        return checkpoint.names_as_attributes(self)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` where the first part of a key leads."""
        return dict.fromkeys([*self.table_names, checkpoint.CLOCK], "_names_in_checkpoints")

    # Copies, and moves to another device

    @atomic
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if self.backing is not None:
            self.backing.drop_overflow_rows()
        training.check_keeps_keys(fn)
        here = self.hyperparams.device
        there = fn(torch.empty(0, device=here)).device
        if here == there:
            return super()._apply(fn, recurse)
        training.check_device(there)
        self._move(fn, there)
        return self

    def _move(self, fn: Callable[[Tensor], Tensor], there: torch.device) -> None:
        rows = self.rows.snapshot(self.row_buffers(), self._capacities())
        self.index = self.index.copy_to(there)
        # Memory that is reserved and not in use would be taken by a copy.
        self._set_row_buffers([buffer.new_empty(0) for buffer in self.row_buffers()])
        self.last_batch = None
        super()._apply(fn)
        self._set_row_buffers(self.rows.allocate(there))
        self.rows.restore(self.row_buffers(), rows)

    def _set_row_buffers(self, buffers: Sequence[Tensor]) -> None:
        weights, *states = buffers
        if self.weights.dim() == 2:
            dim = self.weights.shape[1]
            weights = weights.view(weights.numel() // dim, dim)
        self.weights.data = weights
        for state, tensor in zip(self.optimizer.states, states, strict=True):
            setattr(self, f"state_{state.name}", tensor)

    @atomic
    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, with the rows in use only."""
        if self.backing is not None:
            raise TypeError(
                "a module with a backing store cannot be copied or pickled, as its store has one "
                "owner; make a module with another store and load the state_dict of this one"
            )
        state = dict(self.__dict__)
        names = [f"state_{s.name}" for s in self.optimizer.states]
        state["_parameters"] = {**self._parameters, "weights": None}
        state["_buffers"] = {**self._buffers, **dict.fromkeys(names)}
        state["last_batch"] = None
        state["_zeros"] = self._zeros[:0].clone()
        state["_rows_in_use"] = self.rows.snapshot(self.row_buffers(), self._capacities())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state.pop("_rows_in_use")
        super().__setstate__(state)
        self.tables = ModuleTables(self.tables, self)
        self._register_rows(self.hyperparams.device)
        self.rows.restore(self.row_buffers(), rows)

    def _size_of(self, spec: DynamicSpec) -> str:
        return f"{spec.capacity} x {spec.dim}"
