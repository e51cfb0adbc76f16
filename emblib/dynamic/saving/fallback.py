"""Fallback rows in checkpoints.

A route is a hash of a key (`emblib.dynamic.keys`). Of F fallback rows, row f serves the keys whose
routes are in the f-th of F equal ranges; shard w of W has the keys of the w-th of W equal ranges.
So if F is a multiple of W, exactly one shard uses each fallback row. All shards have memory for all
F rows.

For each fallback row, a checkpoint has one key of the row's range in `fallback.keys`. So a reader
finds the shard of a fallback row as it finds the shard of any key. It also notices the rows of a
table with another F, which has other keys.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from emblib.dynamic import keys as routing
from emblib.dynamic.saving.entries import WEIGHT
from emblib.dynamic.state import DynamicState
from emblib.grad_mode import without_gradients
from emblib.tables import state_dicts

FALLBACK = "fallback"
KEYS = "keys"
FallbackRows = Mapping[str, Tensor]
"""`keys` int64 `[n]`, and by name weights `[n, dim]` and optimizer states; {} for none."""


def rows_of(state: DynamicState, table: int) -> dict[str, Tensor]:
    """Return copies of the fallback rows of a table on the CPU; {} if it has none."""
    num_rows = state.specs[table].fallback_rows
    if not num_rows:
        return {}
    views = state.layout.fallback_views(state.row_buffers, table)
    rows = {name: view.detach().cpu().clone() for name, view in views.items()}
    return {KEYS: routing.keys_of_ranges(num_rows), **rows}


def named_rows(state: DynamicState) -> dict[str, Tensor]:
    """Return the fallback rows of all tables, by their names in dumps and state dicts."""
    return {
        f"{name}.{FALLBACK}.{key}": value
        for t, name in enumerate(state.table_names)
        for key, value in rows_of(state, t).items()
    }


def names_of(state: DynamicState, table: int) -> list[str]:
    """Return the keys of `rows_of`."""
    if not state.specs[table].fallback_rows:
        return []
    return [KEYS, *state.layout.buffer_names]


def rows_of_table(named_rows: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the fallback rows of table `name`, from tensors with the names of `named_rows`."""
    prefix = f"{name}.{FALLBACK}."
    return state_dicts.entries_under(prefix, named_rows)


def rows_of_shard(rows: FallbackRows, shard: int, num_shards: int) -> dict[str, Tensor]:
    """Return the fallback rows whose keys shard `shard` of `num_shards` owns."""
    if not rows or num_shards == 1:
        return dict(rows)
    is_owned = routing.owner(rows[KEYS], num_shards) == shard
    return {name: values[is_owned] for name, values in rows.items()}


def without_other_shards(
    named_rows: Mapping[str, Tensor], shard: int, num_shards: int
) -> dict[str, Tensor]:
    """Return named tensors, of their fallback rows only those that a shard owns."""
    owned_tensors = dict(named_rows)
    for key in named_rows:
        if key.endswith(f".{FALLBACK}.{KEYS}"):
            name = key.removesuffix(f".{FALLBACK}.{KEYS}")
            rows = rows_of_shard(rows_of_table(named_rows, name), shard, num_shards)
            owned_tensors.update({f"{name}.{FALLBACK}.{k}": v for k, v in rows.items()})
    return owned_tensors


def are_fallback_keys(keys: Tensor, num_rows: int) -> bool:
    """Return whether all keys are those that checkpoints have with `num_rows` fallback rows."""
    keys = keys.cpu()
    row_indices = routing.range_indices(keys, num_rows)
    return torch.equal(routing.keys_of_ranges(num_rows)[row_indices], keys)


def row_problems(state: DynamicState, table: int, rows: FallbackRows) -> Iterator[str]:
    """Yield messages of problems in rows that `write_rows` would write to a table.

    There are none if there are no rows, or if the table has no fallback rows.
    """
    num_rows = state.specs[table].fallback_rows
    if not rows or not num_rows:
        return
    views = state.layout.fallback_views(state.row_buffers, table)
    for name in (KEYS, WEIGHT):
        if name not in rows:
            yield f"{FALLBACK}.{name} is missing, without which the others have no meaning"
            return
    keys = rows[KEYS]
    if problem := state_dicts.tensor_problem(
        keys, torch.empty(0, dtype=torch.int64, device="cpu"), (None,)
    ):
        yield f"{FALLBACK}.{KEYS}: {problem}"
        return
    if not are_fallback_keys(keys, num_rows):
        yield (
            f"{FALLBACK}.{KEYS}: the rows are of a table with another number of fallback rows than "
            f"{num_rows}: choose DynamicSpec.fallback_rows as there, or leave these entries out"
        )
    for name, view in views.items():
        if name in rows:
            shape = (len(keys), *view.shape[1:])
            if problem := state_dicts.tensor_problem(rows[name], view, shape):
                yield f"{FALLBACK}.{name}: {problem}"


def check_rows(state: DynamicState, table: int, rows: FallbackRows) -> None:
    """Raise ValueError for rows that do not fit a table."""
    for problem in row_problems(state, table, rows):
        raise ValueError(f"{state.table_names[table]}.{problem}")


@without_gradients
def write_rows(state: DynamicState, table: int, rows: FallbackRows) -> None:
    """Overwrite fallback rows of a table, those of `keys`, by rows that `check_rows` accepts.

    Missing states get `DynamicSpec.initial_state`. Nothing happens if there are no rows, or if the
    table has no fallback rows.
    """
    if not rows or not state.specs[table].fallback_rows:
        return
    row_indices = routing.range_indices(rows[KEYS].cpu(), state.specs[table].fallback_rows)
    for name, view in state.layout.fallback_views(state.row_buffers, table).items():
        indices = row_indices.to(view.device)
        if name in rows:
            view[indices] = rows[name].to(view)
        else:
            view[indices] = state.specs[table].initial_state
