"""Which rows of a model changed since the last entry of its log, and their copies.

Rows by number: hooks on the lookups note the ids of training forwards, so nothing is compared and
no table is scanned. Dynamic tables: the keys that were used since a tick, as dumps of changes have
them, and the keys that an eviction log has seen leave. Both name each change until `commit`, so an
entry that could not be made is part of the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from emblib.dynamic.eviction import EvictionLog
from emblib.dynamic.handles import DynamicTable, tables_of
from emblib.online.records import TableChange
from emblib.online.tables import ModelTables, PlainTable
from emblib.optim import EnsembleRowwiseAdagrad, External, Optimizer, description
from emblib.reference.tbe import repair_offsets
from emblib.tables import TableBatchedEmbeddingBags
from emblib.tables.base import append_last_offset
from emblib.tables.graph_break import graph_break
from emblib.tables.optimizer_hooks import global_decay

Changes = dict[str, list[TableChange]]
_MAX_BATCHES = 64  # that are noted before they are made distinct rows


def check_optimizer(optimizer: Optimizer, name: str) -> None:
    """Raise ValueError for an optimizer that changes rows without a lookup."""
    if isinstance(optimizer, External):
        reason = "leaves the update to an optimizer of torch, which may change any row at any time"
    elif isinstance(optimizer, EnsembleRowwiseAdagrad):
        reason = "rewrites whole tables from time to time"
    elif global_decay(optimizer) is not None:
        reason = "has a GlobalDecay, which changes what rows read without a lookup"
    else:
        return
    raise ValueError(
        f"a change log has the rows that lookups train, and the optimizer of table {name!r}, "
        f"{description(optimizer)}, {reason}; use a fused optimizer, e.g. emblib.optim.Adam(0.01)"
    )


# Tables by row number


class LookupHook:
    """Notes the ids of the training forwards of a module; copied or unpickled, it does nothing."""

    def __init__(self, tables: Sequence[PlainTable]) -> None:
        self.tables = list(tables)
        self._batches: list[tuple[Tensor, Tensor, Any]] = []
        self._rows: dict[tuple[int, int], Tensor] = {}
        self.num_forwards = 0

    @graph_break
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of the module, if gradients are enabled."""
        if not torch.is_grad_enabled():
            return
        ids: Tensor = args[0] if args else kwargs["indices" if "indices" in kwargs else "ids"]
        offsets: Tensor = args[1] if len(args) > 1 else kwargs["offsets"]
        if not getattr(module, "include_last_offset", True):
            offsets = append_last_offset(ids, offsets)
        # The caller may overwrite them once the forward is done.
        batch = ids.detach().clone(), offsets.detach().clone(), kwargs.get("batch_sizes")
        self._batches.append(batch)
        self.num_forwards += 1
        if len(self._batches) >= _MAX_BATCHES:
            self._make_distinct()

    def _make_distinct(self) -> None:
        parts: dict[tuple[int, int], list[Tensor]] = {k: [r] for k, r in self._rows.items()}
        for ids, offsets, batch_sizes in self._batches:
            ends = repair_offsets(offsets, ids.numel())
            bags = (ends.numel() - 1) // max(len(self.tables), 1)
            sizes = [sum(s) for s in batch_sizes] if batch_sizes else [bags] * len(self.tables)
            begins = ends[[0, *accumulate(sizes)]].tolist()
            for table, begin, end in zip(self.tables, begins, begins[1:], strict=False):
                rows = ids[begin:end].long()
                rows = rows[(rows >= 0) & (rows < table.num_rows)]
                parts.setdefault(table.identity, []).append(rows)
        self._rows = {key: torch.cat(rows).unique() for key, rows in parts.items()}
        self._batches = []

    def rows(self, table: PlainTable) -> list[Tensor]:
        """Return the distinct rows of a table that were looked up."""
        self._make_distinct()
        return [self._rows[table.identity]] if table.identity in self._rows else []

    def forget(self) -> None:
        """Forget all lookups."""
        self._batches, self._rows, self.num_forwards = [], {}, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _ignore_call


def _ignore_call(*arguments: Any) -> None:
    pass


class PlainChanges:
    """The changed rows of the tables by row number of a model."""

    def __init__(self, found: ModelTables, *, states: bool) -> None:
        self._tables, self._states = found.tables, states
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
        self._hooks = [(module, LookupHook(tables)) for module, tables in found.calls]
        self._registered = [
            module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in self._hooks
        ]
        self._modules = {id(table.module): table.module for table in self._tables}
        self._steps = self._current_steps()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._registered:
            hook.remove()

    def _current_steps(self) -> dict[int, int]:
        return {key: module.step for key, module in self._modules.items()}

    def _is_waiting(self, module: TableBatchedEmbeddingBags) -> bool:
        """Return whether the gradients of the lookups so far were not applied yet."""
        return module.optimizer.deferred and module.step == self._steps[id(module)]

    def check(self) -> None:
        """Raise RuntimeError if rows may have changed that no hook has seen."""
        for table in self._tables:
            done = table.module.step - self._steps[id(table.module)]
            seen = sum(
                hook.num_forwards
                for _, hook in self._hooks
                if any(t.module is table.module for t in hook.tables)
            )
            if not 0 <= done <= seen:
                raise RuntimeError(
                    f"table {table.name!r} made {done} steps since the last entry of the log, "
                    f"which saw {seen} training forwards: after a checkpoint was loaded or a CUDA "
                    "graph was replayed, call snapshot(step), which has all rows"
                )

    def collect(self) -> Changes:
        """Copy the rows that may have changed."""
        self.check()
        changes: Changes = {}
        for table in self._tables:
            rows = [torch.empty(0, dtype=torch.int64, device=table.module.hyperparams.device)]
            rows += [part for _, hook in self._hooks for part in hook.rows(table)]
            changes.setdefault(table.name, []).append(self._copy(table, torch.cat(rows).unique()))
        return changes

    def whole(self) -> Changes:
        """Copy all rows."""
        changes: Changes = {}
        for table in self._tables:
            rows = torch.arange(table.num_rows)
            changes.setdefault(table.name, []).append(self._copy(table, rows))
        return changes

    def commit(self) -> None:
        """Forget the rows that were copied, except for those whose update is still due."""
        for _, hook in self._hooks:
            if not any(self._is_waiting(table.module) for table in hook.tables):
                hook.forget()
        self._steps = self._current_steps()

    def _copy(self, table: PlainTable, rows: Tensor) -> TableChange:
        module = table.module
        module.flush()
        views = module.table_views()[table.number]
        copies = {name: view[rows.to(view.device)].cpu() for name, view in views.items()}
        weight = copies.pop("weight")
        return TableChange(
            rows.cpu() + table.first_row,
            weight,
            torch.empty(0, dtype=torch.int64),
            copies if self._states else {},
            table.first_column,
            table.dim,
            hyperparams=module.hyperparams.cpu().clone() if self._states else None,
        )


# Dynamic tables


class WatchedEvictions(EvictionLog):
    """An eviction log that counts how often the content of its tables was replaced."""

    num_replacements = 0

    def restart(self, tick: int) -> None:
        """Clear the log after the tables were replaced."""
        super().restart(tick)
        self.num_replacements += 1


class KeyedChanges:
    """The changed entries of the dynamic tables of a model, on this rank."""

    def __init__(self, model: nn.Module, *, states: bool) -> None:
        self._states = states
        self._tables = {name: handle.local for name, handle in tables_of(model).items()}
        for name, table in self._tables.items():
            for location in table.shards.values():
                check_optimizer(location.module.optimizer, name)
                _watch(location.module.state, name)
        self._ticks = {name: table.step() for name, table in self._tables.items()}
        self._steps = {name: _updates(table) for name, table in self._tables.items()}
        self._marks = {name: _replacements(table) for name, table in self._tables.items()}

    @property
    def names(self) -> list[str]:
        """Return the names of the tables."""
        return list(self._tables)

    def check(self) -> None:
        """Raise RuntimeError if a table was replaced."""
        for name, table in self._tables.items():
            if _replacements(table) != self._marks[name]:
                raise RuntimeError(
                    f"the content of table {name!r} was replaced since the last entry of the log "
                    "(load, load_state_dict, set_entries): call snapshot(step), which has all rows"
                )

    def collect(self) -> Changes:
        """Copy the entries that were used since the last entry, and name the keys that left."""
        self.check()
        changes = {}
        for name, table in self._with_shards():
            tick = self._ticks[name]
            changes[name] = [self._copy(table, tick + 1, table.evicted(tick))]
        return changes

    def whole(self) -> Changes:
        """Copy all entries."""
        none = torch.empty(0, dtype=torch.int64)
        return {name: [self._copy(table, None, none)] for name, table in self._with_shards()}

    def commit(self) -> None:
        """Go on from here, except for rows whose update is still due."""
        for name, table in self._tables.items():
            self._marks[name], steps = _replacements(table), _updates(table)
            if not _is_deferred(table) or steps != self._steps[name]:
                self._ticks[name], self._steps[name] = table.step(), steps

    def _with_shards(self) -> Iterator[tuple[str, DynamicTable]]:
        return ((name, table) for name, table in self._tables.items() if table.shards)

    def _copy(self, table: DynamicTable, since: int | None, removed: Tensor) -> TableChange:
        entries = table.entries(since)
        rows = {name: rows[torch.arange(len(entries))] for name, rows in entries.rows.items()}
        weight = rows.pop("weight")
        locations = list(table.shards.values())
        module, index = locations[0].module, locations[0].index
        return TableChange(
            entries.keys,
            weight,
            removed,
            rows if self._states else {},
            0,
            weight.size(1),
            entries.stamps,
            entries.scores,
            table.step(),
            module.state.index.hash_key(index) if len(locations) == 1 else None,
            module.hyperparams.cpu().clone() if self._states else None,
        )


def _watch(state: Any, name: str) -> None:
    log = state.eviction_log
    if log is not None and not isinstance(log, WatchedEvictions):
        raise ValueError(
            f"evictions from table {name!r} are tracked already: make the change log before "
            "track_evictions(), which then returns its record"
        )
    if log is None:
        state.eviction_log = WatchedEvictions(len(state.specs), state.index.tick)


def _replacements(table: DynamicTable) -> list[int]:
    logs = (location.module.state.eviction_log for location in table.shards.values())
    return [log.num_replacements for log in logs]


def _updates(table: DynamicTable) -> int:
    """Return the number of updates of a table's modules."""
    return sum(location.module.step for location in table.shards.values())


def _is_deferred(table: DynamicTable) -> bool:
    return any(location.module.optimizer.deferred for location in table.shards.values())
