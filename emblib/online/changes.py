"""The rows of a model that changed since the last entry of its log, and their copies.

Hooks on the lookups note the ids of training forwards, so no rows are compared. Only tables with a
backing store are scanned, for keys that were used since the last entry. An eviction log records the
keys that left. `collect` returns a change again until `commit` is called, so an error between the
two calls loses no change.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.columns import HashEntryColumn
from emblib.dynamic.dynamic_tables import tables_of
from emblib.dynamic.eviction import EvictionLog
from emblib.dynamic.handles import ShardLocation
from emblib.dynamic.keys import as_keys
from emblib.dynamic.saving import fallback
from emblib.dynamic.saving.checkpoint import table_entries
from emblib.dynamic.saving.entries import LAST_USES, Entries
from emblib.dynamic.saving.table_dumps import removed_since
from emblib.dynamic.state import DynamicState, of_state
from emblib.online.records import TableChange
from emblib.online.tables import ModelTables, PlainTable
from emblib.optim import EnsembleRowwiseAdagrad, External, Optimizer, description
from emblib.reference.tbe import repair_offsets
from emblib.tables import TableBatchedEmbeddingBags
from emblib.tables.batches import append_last_offset
from emblib.tables.graph_break import run_uncompiled
from emblib.tables.optimizer_hooks import find_global_decay

ChangesByName = dict[str, list[TableChange]]  # by name of the table, one per shard on this rank
Identity = tuple[int, int]  # of a table: `id` of its module, and the table's number there
_MAX_BATCHES = 64  # batches that are noted before they are reduced to distinct rows; not measured


def check_optimizer(optimizer: Optimizer, name: str) -> None:
    """Raise ValueError for an optimizer that changes rows without a lookup."""
    if isinstance(optimizer, External):
        reason = "leaves the update to an optimizer of torch, which may change any row at any time"
    elif isinstance(optimizer, EnsembleRowwiseAdagrad):
        reason = "rewrites whole tables from time to time"
    elif find_global_decay(optimizer) is not None:
        reason = "has a GlobalDecay, which changes what rows read without a lookup"
    else:
        return
    raise ValueError(
        f"a change log has the rows that lookups train, and the optimizer of table {name!r}, "
        f"{description(optimizer)}, {reason}; use a fused optimizer, e.g. emblib.optim.Adam(0.01)"
    )


class LookupHook:
    """Note the ids of the training forwards of a module; copied or unpickled, it does nothing.

    Args:
        tables: the table of each feature of the module; none, to note nothing.

    Attributes:
        tables: the argument `tables`, as a list.
        num_forwards: number of noted forwards since the last `forget`.
    """

    def __init__(self, tables: Sequence[PlainTable]) -> None:
        self.tables = list(tables)
        self._batches: list[tuple[Tensor, Tensor, Any]] = []  # ids, offsets, batch sizes
        self._ids: dict[Identity, Tensor] = {}  # distinct ids of earlier batches, by table
        self.num_forwards = 0

    @run_uncompiled
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note a forward of the module that did not raise, if gradients are enabled."""
        if not self.tables or not torch.is_grad_enabled():
            return
        ids: Tensor = args[0] if args else kwargs["indices" if "indices" in kwargs else "ids"]
        offsets: Tensor = args[1] if len(args) > 1 else kwargs["offsets"]
        if not getattr(module, "include_last_offset", True):
            offsets = append_last_offset(ids, offsets)
        # Copies, because the caller may overwrite these tensors once the forward is done.
        batch = ids.detach().clone(), offsets.detach().clone(), kwargs.get("batch_sizes")
        self._batches.append(batch)
        self.num_forwards += 1
        if len(self._batches) >= _MAX_BATCHES:
            self._make_distinct()

    def _make_distinct(self) -> None:
        """Replace the recorded batches by the distinct ids of each table."""
        ids_by_table = {identity: [ids] for identity, ids in self._ids.items()}
        for ids, offsets, batch_sizes in self._batches:
            valid_offsets = repair_offsets(offsets, ids.numel())
            num_bags = (valid_offsets.numel() - 1) // len(self.tables)
            sizes = [sum(s) for s in batch_sizes] if batch_sizes else [num_bags] * len(self.tables)
            begins = valid_offsets[[0, *accumulate(sizes)]].tolist()
            for table, begin, end in zip(self.tables, begins, begins[1:], strict=False):
                table_ids = as_keys(ids[begin:end])
                if not table.is_keyed:
                    table_ids = _trained_rows(table_ids, table.num_rows)
                ids_by_table.setdefault(table.identity, []).append(table_ids)
        self._ids = {key: torch.cat(tensors).unique() for key, tensors in ids_by_table.items()}
        self._batches = []

    def ids(self, identity: Identity) -> list[Tensor]:
        """Return the distinct rows or keys of a table that were looked up, in a list.

        The list is empty if the module has not looked up the table, else it has one int64 tensor.
        """
        self._make_distinct()
        return [self._ids[identity]] if identity in self._ids else []

    def forget(self) -> None:
        """Forget all lookups."""
        self._batches, self._ids, self.num_forwards = [], {}, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return LookupHook, ([],)


def _trained_rows(ids: Tensor, num_rows: int) -> Tensor:
    """Return the rows that lookups of ids, int64 `[n]`, train: row 0 for an invalid id."""
    if not num_rows:
        return ids[:0]
    ids = ids[ids != -1]  # -1 is no lookup
    return ids.where((ids >= 0) & (ids < num_rows), 0)


class Lookups:
    """The ids of a model's training forwards since the last entry of a log, noted by hooks.

    `PlainChanges` and `KeyedChanges` copy the rows of these ids; `commit` forgets them.
    """

    def __init__(self, model_tables: ModelTables) -> None:
        self._hooks = [(module, LookupHook(tables)) for module, tables in model_tables.calls]
        self._hook_handles = [
            module.register_forward_hook(hook, with_kwargs=True) for module, hook in self._hooks
        ]
        tables = [table for _, hook in self._hooks for table in hook.tables]
        self._modules = {id(table.module): table.module for table in tables}
        self._steps = self._current_steps()

    def _current_steps(self) -> dict[int, int]:
        return {key: module.step for key, module in self._modules.items()}

    def ids_of(self, module: Any, number: int) -> Tensor:
        """Return the distinct rows or keys of a table that were looked up, int64, ascending.

        They are on the device of the table.
        """
        empty = torch.empty(0, dtype=torch.int64, device=module.hyperparams.device)
        identity = id(module), number
        ids = [ids for _, hook in self._hooks for ids in hook.ids(identity)]
        return torch.cat([empty, *ids]).unique()

    def check(self) -> None:
        """Raise RuntimeError if rows may have changed that no hook has seen."""
        for key, module in self._modules.items():
            num_steps = module.step - self._steps[key]
            hooks = [
                hook
                for _, hook in self._hooks
                if any(table.module is module for table in hook.tables)
            ]
            num_forwards = sum(hook.num_forwards for hook in hooks)
            if not 0 <= num_steps <= num_forwards:
                raise RuntimeError(
                    f"tables {module.table_names} made {num_steps} steps since the last entry of "
                    f"the log, which saw {num_forwards} training forwards: after a checkpoint was "
                    "loaded or a CUDA graph was replayed, call snapshot(step), which has all rows"
                )

    def commit(self) -> None:
        """Forget the ids, except for those whose update is still due.

        The steps are counted from now on before any ids are forgotten: after an interrupt between
        the two, ids are recorded once more.
        """
        steps, previous_steps = self._current_steps(), self._steps
        self._steps = steps
        for _, hook in self._hooks:
            modules = {id(table.module): table.module for table in hook.tables}
            unstepped_modules = [
                module for key, module in modules.items() if steps[key] == previous_steps[key]
            ]
            if not any(module.optimizer.deferred for module in unstepped_modules):
                hook.forget()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hook_handles:
            hook.remove()


class PlainChanges:
    """The changed rows of the tables of a model whose ids are row numbers.

    Args:
        model_tables: the tables.
        states: whether optimizer states are copied too.

    Raises:
        TypeError: a table is quantised.
        ValueError: an optimizer changes rows without a lookup; or `states` is set, and a table is
            sharded by columns.
    """

    def __init__(self, model_tables: ModelTables, *, states: bool) -> None:
        self._tables, self._has_states = model_tables.tables, states
        for table in self._tables:
            if not isinstance(table.module, TableBatchedEmbeddingBags):
                raise TypeError(
                    f"table {table.name!r} is quantised, so nothing trains it: log the tables that "
                    "it was made of"
                )
            check_optimizer(table.module.optimizer, table.name)
            if states and table.num_columns < table.dim:
                raise ValueError(
                    f"table {table.name!r} is sharded by columns, so each of its shards has other "
                    "states for a row: leave states out, or shard it by rows"
                )

    def collect(self, lookups: Lookups | None) -> ChangesByName:
        """Copy the rows of these lookups; None copies all rows. Waits for the device."""
        changes: ChangesByName = {}
        for table in self._tables:
            if lookups is None:
                row_ids = torch.arange(table.num_rows, device="cpu")
            else:
                row_ids = lookups.ids_of(table.module, table.number)
            changes.setdefault(table.name, []).append(self._copy(table, row_ids))
        return changes

    def _copy(self, table: PlainTable, row_ids: Tensor) -> TableChange:
        """Return the change of a table: copies of its rows `row_ids`, int64 `[n]`, on the host."""
        module = table.module
        module.flush()
        views = module.table_views()[table.number]
        copied_rows = {name: view[row_ids.to(view.device)].cpu() for name, view in views.items()}
        weight = copied_rows.pop("weight")
        return TableChange(
            row_ids.cpu() + table.first_row,
            weight,
            torch.empty(0, dtype=torch.int64, device="cpu"),
            copied_rows if self._has_states else {},
            table.first_column,
            table.dim,
            hyperparams=module.hyperparams.cpu().clone() if self._has_states else None,
        )


# Dynamic tables


class WatchedEvictions(EvictionLog):
    """An eviction log that counts how often the content of its tables was replaced."""

    num_replacements = 0  # of all tables of the module
    num_users = 0  # change logs that are not closed

    def restart(self, tick: int) -> None:
        """Clear the log after the tables were replaced."""
        super().restart(tick)
        self.num_replacements += 1


class _LoggedShard(NamedTuple):
    """Shard `number` of the `num_shards` of table `name`, at `location`."""

    name: str
    location: ShardLocation
    number: int
    num_shards: int


class KeyedChanges:
    """The changed entries of the dynamic tables of a model, on this rank.

    Tables whose evictions are not tracked get a `WatchedEvictions`; logs of one model share it.

    Args:
        model: the model.
        states: whether optimizer states are copied too.

    Raises:
        ValueError: an optimizer changes rows without a lookup, or the evictions of a table are
            tracked already.
    """

    def __init__(self, model: nn.Module, *, states: bool) -> None:
        self._has_states = states
        self._shards = [
            _LoggedShard(name, location, number, len(table.owners))
            for name, table in tables_of(model).items()
            for number, location in table.shards.items()
        ]
        for name, location, *_ in self._shards:
            check_optimizer(location.module.optimizer, name)
            log = location.module.state.eviction_log
            if log is not None and not isinstance(log, WatchedEvictions):
                raise ValueError(
                    f"evictions from table {name!r} are tracked already: make the change log "
                    "before track_evictions(), which then returns its record"
                )
        shard_states: list[DynamicState] = [shard.location.module.state for shard in self._shards]
        self._tracked_states = [*{id(state): state for state in shard_states}.values()]
        for state in self._tracked_states:
            if state.eviction_log is None:
                state.eviction_log = WatchedEvictions(len(state.specs), state.index.tick)
            assert isinstance(state.eviction_log, WatchedEvictions)
            state.eviction_log.num_users += 1
        self.commit()

    def close(self) -> None:
        """Stop tracking evictions, unless another log or the program needs them."""
        while self._tracked_states:
            state = self._tracked_states.pop()
            log = state.eviction_log
            assert isinstance(log, WatchedEvictions)
            log.num_users -= 1
            if not log.num_users and not log.is_returned:
                state.eviction_log = None

    def commit(self) -> None:
        """Record that the copied changes are in the log; later copies begin here."""
        states = [shard.location.module.state for shard in self._shards]
        self._ticks = [state.index.tick for state in states]
        self._num_replacements = [state.eviction_log.num_replacements for state in states]

    def check(self) -> None:
        """Raise RuntimeError if a table was replaced since the last commit."""
        for shard, num_replacements in zip(self._shards, self._num_replacements, strict=True):
            if shard.location.module.state.eviction_log.num_replacements != num_replacements:
                raise RuntimeError(
                    f"the content of table {shard.name!r} was replaced since the last entry of the "
                    "log (load, load_state_dict, set_entries): call snapshot(step), which has all "
                    "rows"
                )

    def collect(self, lookups: Lookups | None) -> ChangesByName:
        """Copy the entries of these lookups, and the keys that left since the last commit.

        Of a table with a backing store, entries used since the last commit are copied. If `lookups`
        is None, all entries are, and no keys that left. Waits for the device.

        Raises:
            ValueError: the eviction log does not reach back to the last commit.
        """
        changes: ChangesByName = {}
        for shard, tick in zip(self._shards, self._ticks, strict=True):
            name, location, number, num_shards = shard
            module, index = location.module, location.index
            removed_keys = torch.empty(0, dtype=torch.int64, device="cpu")
            if lookups is not None:
                removed_keys = removed_since(module.state, index, tick)
            if lookups is not None and module.state.backing is None:
                entries = _entries_of(module.state, index, lookups.ids_of(module, index))
            else:
                first_tick = None if lookups is None else tick + 1
                entries = table_entries(module.state, index, first_tick)
            rows = fallback.rows_of_shard(fallback.rows_of(module.state, index), number, num_shards)
            if not self._has_states:
                rows = {key: rows[key] for key in ("keys", "weight") if key in rows}
            change = self._copy(location, entries, removed_keys)._replace(fallback=rows)
            changes.setdefault(name, []).append(change)
        return changes

    def _copy(self, location: ShardLocation, entries: Entries, removed_keys: Tensor) -> TableChange:
        """Return the change of a hash table: its entries on the host, and `removed_keys`, `[n]`."""
        module = location.module
        rows = {
            name: rows[torch.arange(len(entries), device="cpu")].cpu()
            for name, rows in entries.rows.items()
        }
        weight = rows.pop("weight")
        rows.pop(LAST_USES, None)  # a follower lets no key expire
        return TableChange(
            entries.keys,
            weight,
            removed_keys,
            rows if self._has_states else {},
            0,
            weight.size(1),
            entries.stamps,
            entries.scores,
            module.state.index.tick,
            module.state.index.hash_key(location.index),
            module.hyperparams.cpu().clone() if self._has_states else None,
        )


@of_state
def _entries_of(state: DynamicState, table: int, keys: Tensor) -> Entries:
    """Return copies of the entries of those keys, int64 `[n]`, that are in a table."""
    slots = state.index.find(state.keys_of(table, keys))
    keys, slots = keys[slots >= 0], slots[slots >= 0]
    columns = state.index.table_entries(table)[slots].cpu()
    has_scores = columns.shape[1] > HashEntryColumn.SCORE
    return Entries(
        keys.cpu(),
        columns[:, HashEntryColumn.STAMP].clone(),
        columns[:, HashEntryColumn.SCORE].clone() if has_scores else None,
        {name: view.detach()[slots].cpu() for name, view in state.table_rows(table).items()},
    )
