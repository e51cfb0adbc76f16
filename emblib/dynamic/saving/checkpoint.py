"""State dicts of dynamic tables, and their entries as functions over a module.

A state dict has entries (`emblib.dynamic.saving.entries`), sorted by route, so that equal contents
are equal bytes and fit tables of any capacity, number of buckets and dtype. Stamps and scores are
among them, so the next evictions are the same after a reload: `<table>.keys`, `<table>.stamps`,
`<table>.scores` where eviction uses scores, `<table>.weight` and `<table>.<state>`, each with one
row per key, on the CPU; `hyper`, the hyperparameters of the optimizer; `clock`, the tick; and
`index.hash_keys`, by table the number on which its hash depends, so that the same keys share
buckets after a reload. Tables keep their own if it is absent.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emblib.dynamic import keys as routing
from emblib.dynamic.hash_index import HASH_KEYS, MAX_TICK
from emblib.dynamic.saving import dumps, loading
from emblib.dynamic.saving.dump_tables import rows_at_a_time
from emblib.dynamic.saving.dumps import DumpMismatchError, Report
from emblib.dynamic.saving.entries import Entries, Rows
from emblib.dynamic.saving.loading import Loaded, TableTarget
from emblib.tables import state_dicts
from emblib.tables.locks import atomic
from emblib.tables.parameters import caller_level

if TYPE_CHECKING:
    from emblib.dynamic.module import DynamicEmbeddingBags

CLOCK = "clock"
HYPER = "hyper"
INDEX_HASH_KEYS = f"index.{HASH_KEYS}"
_COLUMNS = ("keys", "stamps", "scores")
_SKETCH_HASH_KEYS = f"admission.sketches.{HASH_KEYS}"


# Entries of a table


def target_of(
    module: "DynamicEmbeddingBags", table: int, hash_key: int | None = None
) -> TableTarget:
    """Return a table of a module as a target of `emblib.dynamic.saving.loading`."""
    return TableTarget(
        index=module.index,
        table=table,
        name=module.table_names[table],
        views=module.table_rows(table),
        rows=module.slot_rows(),
        initial_state=module.tables[table].initial_state,
        hash_key=hash_key,
        complete=module.complete,
    )


@atomic
def table_entries(
    module: "DynamicEmbeddingBags", table: int | str, since: int | None = None
) -> Entries:
    """Return the entries of a table, of both tiers: all, or those used at tick `since` or later.

    Rows are copied when they are indexed, so read them before training continues.
    """
    table = module.table_number(table)
    if module.backing is None:
        return loading.export(target_of(module, table), since)
    module.backing.write_back()
    fast = loading.export(target_of(module, table), since)
    return module.backing.join_entries(table, fast, since)


@atomic
def set_table_entries(
    module: "DynamicEmbeddingBags",
    table: int | str,
    entries: Entries,
    report: Report | None = None,
    *,
    hash_key: int | None = None,
) -> Loaded:
    """Replace the entries of a table; if not all fit, keep those that would be evicted last.

    Rows are converted to the dtypes of the table; with the weight alone, states start from their
    first value. The tick becomes at least the largest stamp. With a backing store all entries go
    there, and the fast tier is empty.

    Args:
        module: module of the table.
        table: number or name of the table.
        entries: the new entries.
        report: function that is called as rows are written.
        hash_key: `index.hash_key` of the table that the entries are from, so that keys share
            buckets as they do there; None keeps that of this table.

    Raises:
        ValueError: entries that do not fit, before anything is changed.
    """
    table = module.table_number(table)
    target = target_of(module, table, hash_key)
    if module.backing is not None:
        loading.check(target, entries)

    def write() -> Loaded:
        nonlocal report
        now, report = report, None  # if it raises, the rest is loaded without it
        if module.backing is None:
            return loading.replace(target, entries, now)
        module.backing.drop_overflow_rows()
        module.backing.store.clear(table)
        module.index.empty(table, hash_key)
        return module.backing.load_entries(table, entries, now)

    return module.complete(write)


@atomic
def check_entries(module: "DynamicEmbeddingBags", table: int, entries: Entries) -> None:
    """Raise ValueError if entries do not fit a table; see `set_table_entries`."""
    loading.check(target_of(module, table), entries)


# State dicts


def write_state(module: "DynamicEmbeddingBags", destination: dict[str, Any], prefix: str) -> None:
    """Write the state of a module without that of its children (`_save_to_state_dict`)."""
    destination[prefix + HYPER] = module.hyperparams
    destination[prefix + CLOCK] = module.index.clock.cpu().clone()
    for t, name in enumerate(module.table_names):
        entries = table_entries(module, t)
        order = routing.canonical_order(entries.keys)
        columns: dict[str, Rows] = {"keys": entries.keys, "stamps": entries.stamps}
        if entries.scores is not None:
            columns["scores"] = entries.scores
        for key, rows in {**columns, **entries.rows}.items():
            destination[f"{prefix}{name}.{key}"] = _gather(rows, order)


def _gather(rows: Rows, order: Tensor) -> Tensor:
    """Copy rows in some order to the CPU, 16 MiB at a time."""
    out = torch.empty(order.numel(), *rows.shape[1:], dtype=rows.dtype)
    done = 0
    for part in order.split(rows_at_a_time(rows)):
        out[done : done + part.numel()] = rows[part].cpu()
        done += part.numel()
    return out


def state_names(module: "DynamicEmbeddingBags") -> list[str]:
    """Return the names that `write_state` writes."""
    kinds = ["keys", "stamps", *module.table_rows(0)] if module.tables else []
    if module.index.entries.shape[1] > 2:
        kinds.append("scores")
    return [HYPER, CLOCK, *(f"{name}.{kind}" for name in module.table_names for kind in kinds)]


@atomic
def child_state(module: "DynamicEmbeddingBags") -> dict[str, Tensor]:
    """Return the state of the children of a module: counters of admission, scores, hash keys."""
    names = state_names(module)
    return {
        f"{child}.{key}": value
        for child, part in module.named_children()
        for key, value in part.state_dict().items()
        if f"{child}.{key}" not in names
    }


def expected_names(
    module: "DynamicEmbeddingBags", state_dict: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the names that a strict load of a state dict requires, as keys of a dict."""
    names = dict.fromkeys([*state_names(module), *child_state(module)], module.hyperparams)
    for name in (INDEX_HASH_KEYS, _SKETCH_HASH_KEYS):
        if name not in state_dict:  # as in those of earlier versions
            names.pop(name, None)
    return names


def names_as_attributes(module: "DynamicEmbeddingBags") -> SimpleNamespace:
    """Return the names in a state dict that are no parameter or buffer, as attributes."""
    kinds = SimpleNamespace(stamps=0, keys=0, scores=0)
    for t in range(min(len(module.tables), 1)):
        kinds = SimpleNamespace(**vars(kinds), **module.table_rows(t))
    return SimpleNamespace(**{CLOCK: 0, **dict.fromkeys(module.table_names, kinds)})


def read_state(
    module: "DynamicEmbeddingBags",
    state_dict: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> None:
    """Read what `write_state` wrote (`_load_from_state_dict`); an error changes nothing."""
    if state_dicts.refuses(module, state_dict, prefix, error_messages):
        return
    state = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
    names, children = state_names(module), [name for name, _ in module.named_children()]
    missing_keys.extend(prefix + key for key in names if key not in state)
    unexpected_keys.extend(
        prefix + key for key in state if key not in names and key.split(".")[0] not in children
    )
    found = _entries_in(module, state)
    replace_tables(
        module,
        found,
        clock=int(state.get(CLOCK, 0)),
        hyperparameters=state.get(HYPER),
        hash_keys=hash_keys_in(module, found, state.get(INDEX_HASH_KEYS)),
    )


def state_problems(
    module: "DynamicEmbeddingBags", state_dict: Mapping[str, Any], prefix: str
) -> Iterator[str]:
    """Yield what is wrong with the entries of a module in a state dict, without its children."""
    state = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
    found = [
        *_tensor_problems(module, state),
        *state_dicts.number_problems(state, CLOCK, below=MAX_TICK),
        *state_dicts.entry_problems(state, {HYPER: module.hyperparams}),
    ]
    if not found:
        try:
            entries = _entries_in(module, state)
            for t, those in entries.items():
                loading.check(target_of(module, t), those)
            hash_keys_in(module, entries, state.get(INDEX_HASH_KEYS))
        except (ValueError, TypeError) as error:
            found.append(str(error))
    yield from (f"{prefix}{problem}" for problem in found)


def _tensor_problems(module: "DynamicEmbeddingBags", state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the entries by key that are no tensors of the dtype and shape of the tables'."""
    word = torch.empty(0, dtype=torch.int64)
    for t, name in enumerate(module.table_names):
        keys = state.get(f"{name}.keys")
        size = len(keys) if isinstance(keys, Tensor) and keys.dim() == 1 else None
        for kind, own in {**dict.fromkeys(_COLUMNS, word), **module.table_rows(t)}.items():
            key = f"{name}.{kind}"
            if key in state:
                problem = state_dicts.tensor_problem(state[key], own, (size, *own.shape[1:]))
                if problem:
                    yield f"{key}: {problem}"
    if INDEX_HASH_KEYS in state:
        problem = state_dicts.tensor_problem(state[INDEX_HASH_KEYS], word)
        if problem:
            yield f"{INDEX_HASH_KEYS}: {problem}"


def _entries_in(module: "DynamicEmbeddingBags", state: Mapping[str, Tensor]) -> dict[int, Entries]:
    """Return the entries of the tables whose keys a state dict has."""
    found = {}
    for t, name in enumerate(module.table_names):
        columns = {
            kind: state[f"{name}.{kind}"].detach().cpu()
            for kind in _COLUMNS
            if f"{name}.{kind}" in state
        }
        if "keys" not in columns:
            continue
        stamps = columns.get("stamps", torch.ones_like(columns["keys"]))
        rows: dict[str, Rows] = {
            kind: state[f"{name}.{kind}"]
            for kind in module.table_rows(t)
            if f"{name}.{kind}" in state
        }
        found[t] = Entries(columns["keys"], stamps, columns.get("scores"), rows)
    return found


def check_hyperparameters(module: "DynamicEmbeddingBags", hyperparameters: Tensor | None) -> None:
    """Raise ValueError if hyperparameters are of another optimizer than that of a module."""
    if hyperparameters is not None and hyperparameters.shape != module.hyperparams.shape:
        raise ValueError(
            f"hyper has {hyperparameters.numel()} numbers, this optimizer has "
            f"{module.hyperparams.numel()}: the checkpoint is of another one; without this key and "
            "with strict=False the rest can be loaded"
        )


def hash_keys_in(
    module: "DynamicEmbeddingBags", found: Mapping[int, Entries], saved: Tensor | None
) -> dict[int, int]:
    """Return the saved hash keys by table; an empty dict if none were saved.

    Saved are those of all tables of a module, or of the tables that were found.
    """
    if saved is None or not found:
        return {}
    num_tables = len(module.tables)
    tables = range(num_tables) if saved.numel() == num_tables else list(found)
    if saved.dtype != torch.int64 or saved.dim() != 1 or saved.numel() != len(tables):
        raise ValueError(
            f"{INDEX_HASH_KEYS} must be int64, one per table = [{len(tables)}], got {saved.dtype} "
            f"{list(saved.shape)}; without it tables keep their own"
        )
    return dict(zip(tables, saved.tolist(), strict=True))


@atomic
def replace_tables(
    module: "DynamicEmbeddingBags",
    found: Mapping[int, Entries],
    *,
    clock: int,
    hyperparameters: Tensor | None,
    hash_keys: Mapping[int, int],
    report: Report | None = None,
) -> dict[str, Loaded]:
    """Replace tables, clock and hyperparameters; warn of entries that found no slot."""

    def write() -> dict[str, Loaded]:
        nonlocal report
        now, report = report, None  # if it raises, the rest is loaded without it
        loaded = {
            module.table_names[t]: set_table_entries(
                module, t, entries, now, hash_key=hash_keys.get(t)
            )
            for t, entries in found.items()
        }
        newest = [entries.newest_stamp() for entries in found.values()]
        if len(found) == len(module.tables):
            module.index.set_tick(max([clock, *newest]))
            module.index.reset_stats()
        else:
            module.index.set_tick(max([clock, module.index.tick, *newest]))
        if hyperparameters is not None:
            module.load_hyperparams(hyperparameters)
        restart_eviction_log(module)
        return loaded

    loaded = module.complete(write)
    left_out = {name: done.left_out for name, done in loaded.items() if done.left_out}
    if left_out:
        warnings.warn(
            f"emblib: tables had no slot for all entries they were loaded with; left out, those "
            f"that would have been evicted first, are {left_out}",
            stacklevel=caller_level(),
        )
    return loaded


@atomic
def set_child_state(
    module: "DynamicEmbeddingBags", state: Mapping[str, Tensor], directory: str | Path
) -> None:
    """Load the children of a module; those without a saved state stay as they are.

    Raises:
        DumpError: the state in `directory` does not fit, before anything is changed.
    """
    given = check_child_state(module, state, directory)
    for child, part in module.named_children():
        if given[child]:
            part.load_state_dict(given[child])


def check_child_state(
    module: "DynamicEmbeddingBags", state: Mapping[str, Tensor], directory: str | Path
) -> dict[str, dict[str, Tensor]]:
    """Return the state of each child of a module, after checking it.

    Raises:
        DumpError: the state in `directory` does not fit.
    """
    given = {
        child: {
            key.removeprefix(f"{child}."): value
            for key, value in state.items()
            if key.startswith(f"{child}.")
        }
        for child, _ in module.named_children()
    }
    with naming(directory):
        if module.admission is not None and given["admission"]:
            module.admission.check_state_dict(given["admission"])
        if module.scores is not None and given["scores"]:
            dumps.check_state("scores", given["scores"], module.scores.state_dict())
    return given


def restart_eviction_log(module: "DynamicEmbeddingBags") -> None:
    """Clear the eviction log of a module whose tables were replaced."""
    if module.eviction_log is not None:
        module.eviction_log.restart(module.index.tick)


@contextlib.contextmanager
def naming(directory: str | Path) -> Iterator[None]:
    """Turn a ValueError of a check into an error that names the directory."""
    try:
        yield
    except ValueError as error:
        raise DumpMismatchError(f"{directory} does not fit this module: {error}") from error
