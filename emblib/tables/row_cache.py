"""The row cache of a module: cached rows in fast memory, their optimizer states, and counters.

The cache is 32-way set-associative: a row hashes to a set, and is stored in one of its 32 ways;
slot `set * 32 + way` holds it. A batch is in flight from `enter` to `release`: `fetch` plans and
fetches its rows, lookups read and updates write them by slot, and none is evicted in between.
`prefetch` enters and fetches in one op.

`emblib.ops.cache` defines the ops on these tensors. `emblib.tables.cache` tracks the batches in
flight.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, starmap, tee, zip_longest
from operator import call
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.columns import FeatureColumn
from emblib.ops import cache as cache_ops
from emblib.ops import codes
from emblib.ops.autograd import Lookup, Tiers
from emblib.ops.one_call import c_function, in_one_call
from emblib.ops.tbe import Groups
from emblib.optim import State
from emblib.specs import CacheConfig, CachePolicy, Precision
from emblib.tables.bounds_report import BatchCheck
from emblib.tables.memory import TableLayout
from emblib.tables.parameters import loses_values

_prefetch_ = c_function(cache_ops.prefetch_)
_PREFETCH_TENSORS = ("tags", "stamps", "counts", "counters", "clock", "conflicts")
_MAX_SETS = (2**31 - 1) // cache_ops.WAYS  # since slots are int32
TAG_AND_STAMP_BYTES = 16  # per slot: two int64


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache since construction or the last reset.

    A batch counts when its rows are fetched, by `prefetch` or else by `forward`; a batch that is
    fetched in several passes counts once per pass. Skipped lookups (index -1) and lookups of tables
    without a cache do not count. Names in brackets are those of FBGEMM's `uvm_cache_stats`.

    Attributes:
        calls: number of batches [num_calls]; for a table, of those that looked it up.
        lookups: lookups of cached tables [num_requested_indices].
        unique: distinct rows of a batch, summed over batches [num_unique_indices].
        unique_misses: distinct rows that were not in the cache when their batch was planned
            [num_unique_misses]. All but the conflicting ones were then fetched.
        conflict_unique_misses: distinct rows that were not in the cache and got no way, because
            their set was full of rows in flight or, with LFU, of more frequently used rows
            [num_conflict_unique_misses]. They are read and updated in place.
        conflict_misses: lookups of such rows [num_conflict_misses].
        lookup_misses: lookups of all rows that were not in the cache when their batch was planned.
        write_backs: evicted rows, which were written back; for a table, its own.
        tables: the counters of each cached table by name; {} in the counters of a table.
    """

    calls: int
    lookups: int
    unique: int
    unique_misses: int
    conflict_unique_misses: int
    conflict_misses: int
    lookup_misses: int
    write_backs: int
    tables: Mapping[str, "CacheStats"] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Return the fraction of lookups that hit the cache; NaN without lookups."""
        return _fraction(self.lookups - self.lookup_misses, self.lookups)

    @property
    def unique_hit_rate(self) -> float:
        """Return the fraction of distinct rows that hit the cache; NaN without lookups."""
        return _fraction(self.unique - self.unique_misses, self.unique)

    def events(self) -> Iterator[tuple[str, int]]:
        """Yield (name, value) of each counter, then of the tables', named `table.counter`."""
        for name in cache_ops.COUNTERS:
            yield name, getattr(self, name)
        for table_name, stats in self.tables.items():
            for name in cache_ops.COUNTERS:
                yield f"{table_name}.{name}", getattr(stats, name)


assert tuple(f.name for f in fields(CacheStats))[:-1] == cache_ops.COUNTERS


def _fraction(count: int, total: int) -> float:
    return count / total if total else math.nan


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of a cache: `num_sets` sets of 32 rows, with their optimizer states.

    Attributes:
        num_sets: number of sets.
        policy: rule by which rows are evicted.
        table_features: row of `features` of each table, by ascending linear row; tables with a
            cache_stride are cached, the others are not.
        table_names: names of the tables, in the same order.
        weights_dtype: dtype of the cached weights.
        states: optimizer states, in the order of the optimizer.
        state_dtype: dtype of the states that are as long as a row.
    """

    num_sets: int
    policy: CachePolicy
    table_features: tuple[tuple[int, ...], ...]
    table_names: tuple[str, ...]
    weights_dtype: torch.dtype
    states: tuple[State, ...]
    state_dtype: torch.dtype

    @property
    def stride(self) -> int:
        """Return the number of elements between rows of the cache."""
        return max(features[FeatureColumn.CACHE_STRIDE] for features in self.table_features)

    @property
    def num_cached_rows(self) -> int:
        """Return the number of rows of all cached tables."""
        return sum(
            features[FeatureColumn.ROWS]
            for features in self.table_features
            if features[FeatureColumn.CACHE_STRIDE]
        )

    def state_dtypes(self) -> list[torch.dtype]:
        """Return the dtype of each state; states of one number per row are float32."""
        return [torch.float32 if state.per_row else self.state_dtype for state in self.states]

    @property
    def bytes_per_set(self) -> int:
        """Return the bytes of rows, states, tags and stamps per set."""
        slot_bytes = self.stride * self.weights_dtype.itemsize + TAG_AND_STAMP_BYTES
        for state, dtype in zip(self.states, self.state_dtypes(), strict=True):
            slot_bytes += dtype.itemsize * (1 if state.per_row else self.stride)
        return slot_bytes * cache_ops.WAYS


class PostponedRows(NamedTuple):
    """The rows of a prefetched batch that a GPU fetches only when the batch is looked up.

    Attributes:
        rows: int64 `[L]`, linear rows; only the first `num_rows` are valid.
        slots: int32 `[L]`, slot of each row.
        num_rows: int32 `[1]`, number of valid rows, on the device.
    """

    rows: Tensor
    slots: Tensor
    num_rows: Tensor


class RowCache(nn.Module):
    """Rows of the cached tables of a module, with their optimizer state, in fast memory.

    The cache has no parameters and is not saved: its rows belong to their tables, and `flush`
    writes them back.

    A batch is in flight from `enter` (or `prefetch`) to `release`. Rows that it or a later batch
    uses are not evicted in between, so the cache eventually admits no rows if a batch is never
    released. A batch has two numbers: its ticket, in Python, by which it is entered and released,
    and its number in `clock`, on the device, which also advances when a captured graph is replayed.
    So the host need not read the device. The caller must hold the lock of the module; not checked.
    """

    weights: Tensor  # `[slots * stride]`, rows by slot
    tags: Tensor  # int64 `[sets, 32]`, see `emblib.ops.cache`
    stamps: Tensor  # int64 `[sets, 32]`, when or how often each slot was used
    counts: Tensor  # int32 `[cached rows]` for LFU, else `[0]`
    counters: Tensor  # int64 `[T + 1, 8]`, see `CacheCounter`
    clock: Tensor  # int64 `[2]`, number of the newest batch, number of the oldest in flight
    conflicts: Tensor  # int64 `[sets]`, last batch with a row without a slot
    no_rows: Tensor  # int64 `[0]`
    table_features: Tensor  # int64 `[T, 8]`, see `FeatureColumn`

    def __init__(self, layout: CacheLayout, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.layout = layout
        self._policy = codes.CACHE_POLICY[layout.policy.value]
        device = torch.empty(0, device=device).device
        shape = (layout.num_sets, cache_ops.WAYS)
        num_slots = layout.num_sets * cache_ops.WAYS
        is_lfu = layout.policy is CachePolicy.LFU
        tensors = {
            "weights": ops.empty_table((num_slots * layout.stride,), layout.weights_dtype, device),
            "tags": ops.empty_table(shape, torch.int64, device),
            "stamps": ops.empty_table(shape, torch.int64, device),
            "counts": torch.empty(
                layout.num_cached_rows if is_lfu else 0, dtype=torch.int32, device=device
            ),
            "counters": torch.empty(
                (len(layout.table_features) + 1, len(cache_ops.COUNTERS)),
                dtype=torch.int64,
                device=device,
            ),
            "clock": torch.empty(2, dtype=torch.int64, device=device),
            "conflicts": torch.empty(layout.num_sets, dtype=torch.int64, device=device),
            "no_rows": torch.empty(0, dtype=torch.int64, device=device),
            "table_features": torch.empty(
                (len(layout.table_features), len(FeatureColumn)), dtype=torch.int64, device=device
            ),
        }
        for state, dtype in zip(layout.states, layout.state_dtypes(), strict=True):
            num_elements = num_slots if state.per_row else num_slots * layout.stride
            tensors[f"state_{state.name}"] = ops.empty_table((num_elements,), dtype, device)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self._initialise()

    @classmethod
    def from_options(
        cls,
        tables: TableLayout,
        names: Sequence[str],
        states: Sequence[State],
        options: CacheConfig,
        precision: Precision,
        device: torch.device | str | None = None,
    ) -> "RowCache":
        """Make the cache of a module from the options of the user.

        Args:
            tables: layout of the tables.
            names: names of the tables, in the order of the module.
            states: optimizer states of the rows.
            options: size, policy and dtype of the cache.
            precision: dtypes of weights and states.
            device: device of the cache; None is torch's default device.
        """
        device = torch.empty(0, device=device).device
        table_order = sorted(
            range(len(tables.offsets)),
            key=lambda t: (tables.offsets[t].row_base, tables.offsets[t].rows),
        )
        layout = CacheLayout(
            num_sets=1,
            policy=options.policy,
            table_features=tuple(tables.offsets[t].feature(0) for t in table_order),
            table_names=tuple(names[t] for t in table_order),
            weights_dtype=precision.weights if options.dtype is None else options.dtype,
            states=tuple(states),
            state_dtype=precision.states,
        )
        num_sets = number_of_sets(options, layout, device)
        return cls(replace(layout, num_sets=num_sets), device)

    def _initialise(self) -> None:
        """Initialise all tensors but weights and states, also of a cache that left `meta`."""
        self._last_ticket, self._in_flight = 0, set[int]()  # tickets of the batches in flight
        features = torch.tensor(self.layout.table_features, dtype=torch.int64, device="cpu").view(
            -1, len(FeatureColumn)
        )
        self.table_features.copy_(features)
        self.clock.copy_(torch.tensor([0, 1], device="cpu"))
        self.reset()
        self.reset_stats()

    @property
    def states(self) -> list[Tensor]:
        """Return the optimizer states of the cached rows, in the order of the optimizer."""
        return [getattr(self, f"state_{state.name}") for state in self.layout.states]

    @property
    def last_ticket(self) -> int:
        """Return the ticket of the newest batch; 0 before the first."""
        return self._last_ticket

    def new_ticket(self) -> int:
        """Return the ticket of a new batch, for `enter`, `prefetch` and `release`."""
        self._last_ticket += 1
        return self._last_ticket

    def cancel_ticket(self) -> None:
        """Take the newest ticket back, because its batch was not fetched."""
        self.release(self._last_ticket)
        self._last_ticket -= 1

    def enter(self, ticket: int) -> None:
        """Start a batch: the next plans are for it, and its rows are not evicted."""
        self._in_flight.add(ticket)
        batch_number, oldest = self.clock[0], self.clock[1]
        # The oldest batch is given by its distance to the clock, which stays valid when a captured
        # graph is replayed. It also corrects the clock after an interrupt since `new_ticket`.
        distance = self._last_ticket - min(self._in_flight)
        in_one_call(
            partial(batch_number.add_, 1), partial(torch.sub, batch_number, distance, out=oldest)
        )

    def release(self, ticket: int) -> None:
        """End a batch: plans of batches that enter later may evict its rows."""
        self._in_flight.discard(ticket)

    def oldest_in_flight(self) -> Tensor:
        """Return the number in `clock` of the oldest batch in flight, a scalar on the device.

        If none is in flight, that of the next batch.
        """
        oldest = min(self._in_flight, default=self._last_ticket + 1)
        return self.clock[0] - (self._last_ticket - oldest)

    def empty_postponed_rows(self, num_lookups: int) -> PostponedRows:
        """Return lists without rows, which `fetch` fills, for a batch of `num_lookups` lookups."""
        clock = self.clock  # int64, on the device of the cache
        return PostponedRows(
            rows=clock.new_empty(num_lookups),
            slots=clock.new_empty(num_lookups, dtype=torch.int32),
            num_rows=clock.new_zeros(1, dtype=torch.int32),
        )

    def prefetch(
        self, ticket: int, tiers: Tiers, batch: Lookup, check: BatchCheck, *, postpones: bool
    ) -> partial[list[Tensor]]:
        """Return the call that starts a batch and fetches its rows: `enter` and `fetch` in one op.

        The batch is in flight when this method returns, before the call.

        Args:
            ticket: ticket of the batch, from `new_ticket`.
            tiers: the memory of the tables.
            batch: the lookups.
            check: the bounds check that the op makes.
            postpones: whether the op, on a GPU, lists rows that the update of an earlier batch in
                flight may still write, for `fetch_postponed`, instead of fetching them.

        Returns:
            partial: a call of `cache_prefetch_`, see `emblib.ops.cache` for its results; it returns
                [] for an invalid batch on the CPU.
        """
        self._in_flight.add(ticket)
        buffers = self._buffers  # faster than attributes of a module, each of which is a call
        return partial(
            _prefetch_,
            tiers.weights,
            tiers.states,
            tiers.hyperparams,
            [buffers[name] for name in _PREFETCH_TENSORS],
            buffers["table_features"],
            self._policy,
            self._last_ticket - min(self._in_flight),
            postpones,
            batch.features,
            batch.indices,
            batch.offsets,
            batch.bag_layout,
            batch.total_rows,
            batch.repaired,
            check.mode,
            check.violations,
        )

    def fetch(
        self, tiers: Tiers, passes: Sequence[Groups], postponed: Sequence[PostponedRows] = ()
    ) -> list[Tensor]:
        """Fetch the rows of the batch that entered last, pass by pass.

        Each pass assigns slots to its rows, writes evicted rows back and fetches missing ones. All
        passes run in one native call, so that no interrupt can separate tags from rows.

        Args:
            tiers: the memory of the tables.
            passes: grouped lookups of each pass.
            postponed: `empty_postponed_rows` of each pass, on a GPU. The op lists there the rows
                that the update of an earlier batch in flight may still write in their tables, for
                `fetch_postponed`. () fetches all rows now.

        Returns:
            Slot of each distinct row of each pass, int32 `[L]`; -1 for a row that got none.
        """
        # Iterators of C functions: nothing runs until `deque` drains them in one native call, pass
        # by pass, each plan before its move.
        moves, plan_results = [], []
        conflicts = [self.clock, self.conflicts] if self.clock.is_cuda else []
        for groups, postponed_rows in zip_longest(passes, postponed):
            plan = partial(c_function(cache_ops.plan_), *self._plan_arguments(groups))
            # The move asks for the plan's results, which runs the plan. `tee` gives a second
            # iterator over these results, which are returned below.
            results_to_move, results = tee(map(call, (plan,)))
            move = partial(
                c_function(cache_ops.move_),
                tiers.weights,
                tiers.states,
                tiers.hyperparams,
                self.table_features,
                groups.rows,
                groups.count,
                postponed=[*conflicts, *(postponed_rows or ())],
            )
            moves.append(starmap(move, results_to_move))
            plan_results.append(results)
        deque(chain.from_iterable(moves), maxlen=0)
        return [next(results)[0] for results in plan_results]

    def fetch_postponed(self, tiers: Tiers, postponed: PostponedRows) -> partial[Any]:
        """Return the call that fetches the rows which `fetch` or `prefetch` postponed."""
        return partial(
            c_function(cache_ops.move_),
            tiers.weights,
            tiers.states,
            tiers.hyperparams,
            self.table_features,
            postponed.rows,
            postponed.num_rows,
            postponed.slots,
            self.no_rows,
            [],
        )

    def evictions(self, groups: Groups) -> Tensor:
        """Return the rows that `fetch` would write back for one pass, int64; only on the CPU.

        Negative entries (-1 and -2) are not rows. Nothing changes.
        """
        return cache_ops.evictions(*self._plan_arguments(groups))

    def _plan_arguments(self, groups: Groups) -> tuple[Any, ...]:
        """Return the arguments of `cache_plan_` for grouped lookups."""
        return (
            self.tags,
            self.stamps,
            self.counts,
            self.counters,
            self.clock,
            self.table_features,
            groups.rows,
            groups.segments,
            groups.count,
            self._policy,
        )

    def find(self, groups: Groups) -> Tensor:
        """Return the current slot of each distinct row, int32 `[L]`; -1 for a row without slot."""
        return cache_ops.locate(self.tags, self.table_features, groups.rows, groups.count)

    def slots_of_lookups(self, groups: Groups, row_slots: Tensor) -> Tensor:
        """Return the slot of every lookup, int32 `[L]`; -1 for a row that is not in the cache."""
        return cache_ops.lookup_slots(row_slots, groups.segments, groups.lookups, groups.count)

    def flush(self, tiers: Tiers) -> None:
        """Write all cached rows and their states back to their tables; they stay in the cache."""
        cache_ops.flush_(
            tiers.weights, tiers.states, tiers.hyperparams, self.table_features, self.tags
        )

    def reset(self) -> None:
        """Empty the cache without writing it back; forget batches in flight and usage counts."""
        filled_tensors = (self.tags, self.stamps, self.conflicts)
        resets = [partial(tensor.fill_, cache_ops.EMPTY) for tensor in filled_tensors]
        in_one_call(*resets, partial(self.counts.zero_))
        self._in_flight.clear()

    def stats(self) -> CacheStats:
        """Return the counters (reads the device)."""
        *table_counters, total_counters = (
            dict(zip(cache_ops.COUNTERS, counters, strict=True))
            for counters in self.counters.tolist()
        )
        named_counters = zip(
            self.layout.table_names, self.layout.table_features, table_counters, strict=True
        )
        stats_by_table = {
            name: CacheStats(**counters)
            for name, features, counters in named_counters
            if features[FeatureColumn.CACHE_STRIDE]
        }
        return CacheStats(**total_counters, tables=stats_by_table)

    def reset_stats(self) -> None:
        """Reset all counters to zero."""
        self.counters.zero_()

    def nbytes(self) -> int:
        """Return the bytes of all buffers: rows, states, tags, counters and more."""
        return sum(tensor.nbytes for tensor in self.buffers())

    def extra_repr(self) -> str:
        """Describe size and policy."""
        num_slots = self.layout.num_sets * cache_ops.WAYS
        return f"{num_slots} slots in {self.layout.num_sets} sets, {self.layout.policy.value}"

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Load nothing: keys with this prefix belong to a table of the same name."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        is_lost = self.tags.is_meta or loses_values(fn)
        super()._apply(ops.keep_dtype(fn), recurse)
        if is_lost and not self.tags.is_meta:
            self._initialise()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Batches in flight belong to the original; nothing would release them here.
        self._in_flight = set()


def number_of_sets(options: CacheConfig, layout: CacheLayout, device: torch.device) -> int:
    """Return `options.sets`, or the number of sets for `options.load_factor`; at least 1.

    The number is lowered to one set per cached row, to what fits into the free memory of a GPU less
    `options.reserved_bytes`, and to what int32 slots can number. `layout.num_sets` is not read.
    """
    num_sets = options.sets or math.ceil(
        options.load_factor * layout.num_cached_rows / cache_ops.WAYS
    )
    num_sets = min(
        num_sets, layout.num_cached_rows, _MAX_SETS
    )  # a row is in one set, so more would be empty
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0] - options.reserved_bytes
        num_sets = min(num_sets, free_bytes // layout.bytes_per_set)
    return max(num_sets, 1)
