"""Checkpoints of dynamic tables: entries in and out, state dicts, snapshots slot by slot.

A state dict has entries (`emblib.dynamic.saving.entries`), sorted by route, so that equal contents
are the same bytes and fit tables of any capacity, number of buckets and dtype. Stamps and scores
are among them, so what would be evicted next is the same after a reload: `<table>.keys`,
`<table>.stamps`, `<table>.scores` where the order of eviction has any, `<table>.weight` and
`<table>.<state>`, each with one row a key, on the CPU; `hyper`, the numbers of the optimizer, and
`clock`, the tick; `index.hash_keys`, the number by table that its hash depends on, so that the
same keys evict each other after a reload. Without it tables keep their own.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from emblib.dynamic.hash_index import HASH_KEYS
from emblib.dynamic.saving import loading, routing, snapshots
from emblib.dynamic.saving.dump_tables import rows_at_a_time
from emblib.dynamic.saving.dumps import DumpMismatchError, Report
from emblib.dynamic.saving.entries import Entries, Rows
from emblib.dynamic.saving.loading import Loaded, Target
from emblib.dynamic.saving.removals import RemovalLog
from emblib.dynamic.state import DynamicState
from emblib.tables import checkpoint
from emblib.tables.bounds import caller_level
from emblib.tables.locks import atomic

_CLOCK, _HYPER, _HASH_KEYS = "clock", "hyper", f"index.{HASH_KEYS}"
_SKETCH_HASH_KEYS = f"admission.sketches.{HASH_KEYS}"


class DynamicCheckpoint(DynamicState):
    """Dynamic tables that can be saved and loaded."""

    removals: RemovalLog | None = None

    def _target(self, table: int, hash_key: int | None = None) -> Target:
        return Target(
            index=self.index,
            table=table,
            name=self.table_names[table],
            views=self.table_rows(table),
            rows=self.value_rows(),
            initial_state=self.tables[table].initial_state,
            hash_key=hash_key,
        )

    @atomic
    def table_entries(self, table: int | str, since: int | None = None) -> Entries:
        """Keys, stamps, scores and rows of a table, or of what was used at `since` or later.

        Rows are copied when they are asked for, so training must not go on before that.
        """
        return loading.export(self._target(self.table_number(table)), since)

    @atomic
    def set_table_entries(
        self,
        table: int | str,
        entries: Entries,
        report: Report | None = None,
        *,
        hash_key: int | None = None,
    ) -> Loaded:
        """Let a table have these entries and no others; the best of them where not all fit.

        Rows are converted to the dtypes of the table; entries with the weight alone leave states at
        their first value. The clock goes on from the largest stamp at least.

        Args:
            table: its number or name.
            entries: what it has then.
            report: called as rows are written.
            hash_key: `index.hash_key` of the table that the entries are of, so that keys evict each
                other here as they would there; None keeps that of this table.

        Raises:
            ValueError: entries that do not fit, before anything is changed.
        """
        return loading.replace(self._target(self.table_number(table), hash_key), entries, report)

    def _restart_removals(self) -> None:
        if self.removals is not None:
            self.removals.restart(self.index.tick)

    # State dicts

    @atomic
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + _HYPER] = self.hyper
        destination[prefix + _CLOCK] = self.index.clock.cpu().clone()
        for t, name in enumerate(self.table_names):
            entries = self.table_entries(t)
            order = routing.canonical_order(entries.keys)
            for key, rows in _columns(entries).items():
                destination[f"{prefix}{name}.{key}"] = _gathered(rows, order)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of any module; where `strict` refuses keys, it does before anything is written."""
        if strict:
            names = dict.fromkeys([*self._state_names(), *self._others()], self.hyper)
            for name in (_HASH_KEYS, _SKETCH_HASH_KEYS):
                if name not in state_dict:  # as in those of earlier versions
                    names.pop(name, None)
            checkpoint.check_keys(names, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    @atomic
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *arguments)
        missing_keys, unexpected_keys, error_messages = arguments[2:]
        given = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        names = self._state_names()
        missing_keys.extend(prefix + key for key in names if key not in given)
        unexpected_keys.extend(
            prefix + key
            for key in given
            if key not in names and key.split(".")[0] not in self._modules
        )
        try:
            found = self._entries_of(given)
            self._check_numbers(given.get(_HYPER))
            for t, entries in found.items():
                loading.check(self._target(t), entries)
            hash_keys = self._hash_keys_of(found, given.get(_HASH_KEYS))
        except (ValueError, TypeError) as error:
            error_messages.append(f"{prefix}: {error}")
            return
        self._take(found, int(given.get(_CLOCK, 0)), given.get(_HYPER), hash_keys=hash_keys)

    def _state_names(self) -> list[str]:
        kinds = ["keys", "stamps", *self.table_rows(0)] if self.tables else []
        if self.index.entries.shape[1] > 2:
            kinds.append("scores")
        return [_HYPER, _CLOCK, *(f"{name}.{kind}" for name in self.table_names for kind in kinds)]

    def _entries_of(self, state: Mapping[str, Tensor]) -> dict[int, Entries]:
        """The entries of those tables whose keys a state dict has."""
        found = {}
        for t, name in enumerate(self.table_names):
            columns = {
                kind: state[f"{name}.{kind}"].detach().cpu()
                for kind in ("keys", "stamps", "scores")
                if f"{name}.{kind}" in state
            }
            if "keys" not in columns:
                continue
            stamps = columns.get("stamps", torch.ones_like(columns["keys"]))
            rows: dict[str, Rows] = {
                kind: state[f"{name}.{kind}"]
                for kind in self.table_rows(t)
                if f"{name}.{kind}" in state
            }
            found[t] = Entries(columns["keys"], stamps, columns.get("scores"), rows)
        return found

    def _check_numbers(self, numbers: Tensor | None) -> None:
        if numbers is not None and numbers.shape != self.hyper.shape:
            raise ValueError(
                f"hyper has {numbers.numel()} numbers, this optimizer has {self.hyper.numel()}: "
                "the checkpoint is of another one; without this key and with strict=False the rest "
                "can be loaded"
            )

    def _hash_keys_of(self, found: Mapping[int, Entries], saved: Tensor | None) -> dict[int, int]:
        """The hash keys of tables, of those that were saved; none where none were.

        They are those of all tables of a module, or of the tables that were found.
        """
        if saved is None or not found:
            return {}
        tables = range(len(self.tables)) if saved.numel() == len(self.tables) else list(found)
        if saved.dtype != torch.int64 or saved.dim() != 1 or saved.numel() != len(tables):
            raise ValueError(
                f"{_HASH_KEYS} must be int64, one a table = [{len(tables)}], got {saved.dtype} "
                f"{list(saved.shape)}; without it tables keep their own"
            )
        return dict(zip(tables, saved.tolist(), strict=True))

    @atomic
    def _take(
        self,
        found: Mapping[int, Entries],
        clock: int,
        numbers: Tensor | None,
        report: Report | None = None,
        *,
        hash_keys: Mapping[int, int] | None = None,
    ) -> dict[str, Loaded]:
        """Replace tables, clock and numbers; says what was left out."""
        keys = {} if hash_keys is None else hash_keys
        loaded = {
            self.table_names[t]: self.set_table_entries(t, entries, report, hash_key=keys.get(t))
            for t, entries in found.items()
        }
        newest = [entries.newest_stamp() for entries in found.values()]
        if len(found) == len(self.tables):
            self.index.set_tick(max([clock, *newest]))
            self.index.reset_stats()
        else:
            self.index.set_tick(max([clock, self.index.tick, *newest]))
        if numbers is not None:
            self.hyper.copy_(numbers)
        self._restart_removals()
        left_out = {name: done.left_out for name, done in loaded.items() if done.left_out}
        if left_out:
            warnings.warn(
                f"emblib: tables had no place for all entries they were loaded with; left out, "
                f"those that would have been evicted first, are {left_out}",
                stacklevel=caller_level(),
            )
        return loaded

    @atomic
    def _others(self) -> dict[str, Tensor]:
        """What the modules within this one save: counters of admission, scores."""
        names = self._state_names()
        return {
            f"{child}.{key}": value
            for child, module in self.named_children()
            for key, value in module.state_dict().items()
            if f"{child}.{key}" not in names
        }

    @atomic
    def _set_others(self, others: Mapping[str, Tensor], directory: str | Path) -> None:
        """Load the modules within this one; those that a dump has nothing of stay as they are.

        Raises:
            DumpError: what the dump in `directory` has does not fit, before anything is changed.
        """
        given = {
            child: {
                key.removeprefix(f"{child}."): value
                for key, value in others.items()
                if key.startswith(f"{child}.")
            }
            for child, _ in self.named_children()
        }
        with _naming(directory):
            if self.admission is not None and given["admission"]:
                self.admission.check_state_dict(given["admission"])
            if self.scores is not None and given["scores"]:
                snapshots.check_state("scores", given["scores"], self.scores.state_dict())
        for child, module in self.named_children():
            if given[child]:
                module.load_state_dict(given[child])

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        """What a state dict has that is no parameter or buffer, as attributes."""
        kinds = SimpleNamespace(stamps=0, keys=0, scores=0)
        for t in range(min(len(self.tables), 1)):
            kinds = SimpleNamespace(**vars(kinds), **self.table_rows(t))
        return SimpleNamespace(**{_CLOCK: 0, **dict.fromkeys(self.table_names, kinds)})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells `torch.distributed.checkpoint.state_dict` where the first part of a key leads."""
        return dict.fromkeys([*self.table_names, _CLOCK], "_names_in_checkpoints")

    # Snapshots

    @atomic
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become what `snapshot` was taken of, byte for byte.

        Raises:
            ValueError: it is of tables of other dims, capacities, loads or eviction, of another
                optimizer, precision or admission, or malformed; nothing is changed.
        """
        super().restore(snapshot)
        self._restart_removals()

    def dump_snapshot(self, directory: str | Path) -> None:
        """Write `snapshot()` to a directory, which then holds all of it or what it held."""
        snapshots.write(directory, self.snapshot())

    def load_snapshot(self, directory: str | Path) -> None:
        """Become what `dump_snapshot` was called of, byte for byte.

        Raises:
            DumpError: there is no whole snapshot, it is damaged, or it is of another module (then
                the error is a ValueError too); nothing is changed.
        """
        snapshot = snapshots.read(directory)
        with _naming(directory):
            self.restore(snapshot)


@contextlib.contextmanager
def _naming(directory: str | Path) -> Iterator[None]:
    """Turn a ValueError of a check into an error that names the directory."""
    try:
        yield
    except ValueError as error:
        raise DumpMismatchError(f"{directory} does not fit this module: {error}") from error


def _columns(entries: Entries) -> dict[str, Rows]:
    columns: dict[str, Rows] = {"keys": entries.keys, "stamps": entries.stamps}
    if entries.scores is not None:
        columns["scores"] = entries.scores
    return {**columns, **entries.rows}


def _gathered(rows: Rows, order: Tensor) -> Tensor:
    """Rows in some order, on the CPU."""
    out = torch.empty(order.numel(), *rows.shape[1:], dtype=rows.dtype)
    done = 0
    for part in order.split(rows_at_a_time(rows)):
        out[done : done + part.numel()] = rows[part].cpu()
        done += part.numel()
    return out
