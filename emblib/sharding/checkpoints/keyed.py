"""Checkpoint dynamic tables over ranks: rows sorted so that any number of shards are ranges.

Checkpoints store the entries of a dynamic table sorted by route (`emblib.dynamic.keys`), and shard
k of K owns the k-th of K equal ranges of routes. The table in a checkpoint is therefore the
concatenation of its shards, whatever plan saved it, and a rank finds its shard by bisection: it
reads a few blocks of the keys, and then its own rows.

A *stem* is the common prefix of entries that have one row per key of the same keys: "" for `keys`,
`weight` and the optimizer states, "fallback." for fallback rows.
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.dynamic import keys as routing
from emblib.dynamic.saving import fallback
from emblib.sharding.checkpoints.sharded_table import KeyedRows, ShardedTable
from emblib.sharding.checkpoints.state_trees import Leaf
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import Shard, Span
from emblib.tables import state_dicts

KEYS = "keys"
_NOT_BY_KEY = "clock"  # has the prefix of the keys, but is one number for the table


def join_shards(
    states: Mapping[int, Mapping[str, Tensor]], owners: Sequence[int], ranks: RankGroup
) -> dict[str, Tensor]:
    """Build the state dict of a dynamic table from those of its shards; a collective over `ranks`.

    `states` are the state dicts of this rank's shards by number, `owners` the rank of each shard.

    Tensors with one row per key become sharded tensors. For all others (clocks, sketch counters)
    every rank gets the element-wise maximum over the shards, so a count is at least the count of
    the shard that saw the key.
    """
    by_key = {
        number: {stem: _by_route(state, stem) for stem in _stems(state)}
        for number, state in states.items()
    }
    for number, rows_by_stem in by_key.items():
        if (stem := f"{fallback.FALLBACK}.") in rows_by_stem:
            rows_by_stem[stem] = fallback.owned(rows_by_stem[stem], number, len(owners))
    stems = {
        stem
        for stems_of_rank in ranks.gather_objects(_every_stem(by_key))
        for stem in stems_of_rank
    }
    result: dict[str, Tensor] = {}
    for stem in sorted(stems):
        shards = {number: rows[stem] for number, rows in by_key.items()}
        rows = keyed_rows(shards, owners, ranks)
        result.update({f"{stem}{name}": value for name, value in rows.items()})
    other_entries = [
        {key: value.cpu() for key, value in state.items() if key not in result}
        for state in states.values()
    ]
    for entry in (entry for local in ranks.gather_objects(other_entries) for entry in local):
        for key, value in entry.items():
            result[key] = torch.maximum(result[key], value) if key in result else value
    return result


def part_of(state: Mapping[str, Tensor], number: int, count: int) -> dict[str, Tensor]:
    """Return the entries of shard `number` of `count` shards.

    Of a full tensor with one row per key the shard gets the rows of its keys. Of `KeyedRows` it
    gets its own block, which this rank must have. All other values are returned unchanged.

    Raises:
        ValueError: `KeyedRows` of another number of shards.
    """
    owned = {}
    for stem in _stems(state):
        keys = state[f"{stem}{KEYS}"]
        if not isinstance(keys, KeyedRows):
            owned[stem] = routing.owner(keys, count) == number
    result = {}
    for key, value in state.items():
        stem = _stem_of(key)
        if isinstance(value, KeyedRows):
            if len(value.shards) != count:
                raise ValueError(
                    f"{key} is in {len(value.shards)} parts, here it has {count}: load it with "
                    "emblib.sharding.checkpoints.load"
                )
            result[key] = value.parts[number]
        elif stem in owned and key.removeprefix(stem) != _NOT_BY_KEY:
            result[key] = value[owned[stem]]
        else:
            result[key] = value
    return result


def check_whole(state: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless the full tensors in a state dict have one row per key."""
    for stem in _stems(state):
        keys = state[f"{stem}{KEYS}"]
        if isinstance(keys, KeyedRows):
            continue
        problem = state_dicts.tensor_problem(keys, torch.empty(0, dtype=torch.int64), (None,))
        if problem:
            raise ValueError(f"{name}.{stem}{KEYS}: {problem}")
        for key, value in state.items():
            is_by_key = _stem_of(key) == stem and key.removeprefix(stem) != _NOT_BY_KEY
            if is_by_key and not isinstance(value, KeyedRows):
                problem = state_dicts.tensor_problem(value, torch.empty(0))
                num_rows = value.shape[0] if not problem and value.dim() else None
                if problem or num_rows != len(keys):
                    raise ValueError(
                        f"{name}.{key}: {problem or f'must have {len(keys)} rows, got {num_rows}'}"
                    )


def _stems(state: Mapping[str, Tensor]) -> list[str]:
    """Return the name prefixes of the tensors that have one row per key."""
    return [key.removesuffix(KEYS) for key in state if key.rpartition(".")[2] == KEYS]


def _every_stem(by_key: Mapping[int, Mapping[str, Any]]) -> list[str]:
    return sorted({stem for rows in by_key.values() for stem in rows})


def _by_route(state: Mapping[str, Tensor], stem: str) -> dict[str, Tensor]:
    """Return the tensors of a name prefix that have one row per key, sorted by route."""
    order = routing.canonical_order(state[f"{stem}{KEYS}"].cpu())
    return {
        key.removeprefix(stem): value.cpu()[order]
        for key, value in state.items()
        if _stem_of(key) == stem and key.removeprefix(stem) != _NOT_BY_KEY
    }


def _stem_of(name: str) -> str:
    return name[: name.rfind(".") + 1]


def keyed_rows(
    parts: Mapping[int, Mapping[str, Tensor]], owners: Sequence[int], ranks: RankGroup
) -> dict[str, KeyedRows]:
    """Build the rows by key of one table from its shards; a collective over `ranks`.

    Args:
        parts: shards of this rank by number: `keys` `[N]` and other tensors with one row per key.
            The caller must sort them by route; not checked.
        owners: the rank of each shard.
        ranks: the ranks that store the shards.

    Raises:
        ValueError: a shard has keys that another shard owns, where lookups would not find them.
    """
    gathered = ranks.gather_objects(_descriptions(parts, len(owners)))
    columns_of_shard = {number: columns for local in gathered for number, columns in local.items()}
    first_columns, *_ = columns_of_shard.values()
    counts = [columns_of_shard[number][KEYS][1][0] for number in range(len(owners))]
    starts = [sum(counts[:number]) for number in range(len(counts))]
    result = {}
    for name, (dtype, (_, *shape)) in first_columns.items():
        shards = [
            Shard(rank, (start, start + count), (0, shape[0] if shape else 1))
            for rank, start, count in zip(owners, starts, counts, strict=True)
        ]
        local = {number: columns[name] for number, columns in parts.items()}
        result[name] = KeyedRows((sum(counts), *shape), shards, local, ranks, dtype)
    return result


def _descriptions(
    parts: Mapping[int, Mapping[str, Tensor]], count: int
) -> dict[int, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """Return dtype and shape of the columns of each part, by name.

    Raises ValueError for a part with keys of another part.
    """
    for number, columns in parts.items():
        foreign_keys = columns[KEYS][routing.owner(columns[KEYS], count) != number]
        if foreign_keys.numel():
            raise ValueError(
                f"part {number} of {count} has {foreign_keys.numel()} keys of other parts, e.g. "
                f"{int(foreign_keys[0])}: send ids where emblib.checkpoints.owner says"
            )
    return {
        number: {name: (value.dtype, tuple(value.shape)) for name, value in columns.items()}
        for number, columns in parts.items()
    }


def is_keyed(name: str, saved: Mapping[str, Any]) -> bool:
    """Return whether a saved tensor has one row per key, as many as its `keys`."""
    keys = saved.get(_keys_entry(name))
    rows = getattr(saved[name], "size", None)
    return (
        keys is not None
        and hasattr(keys, "properties")
        and name.rpartition(".")[2] != _NOT_BY_KEY
        and rows is not None
        and len(keys.size) == 1
        and keys.properties.dtype == torch.int64
        and rows[:1] == keys.size
    )


def _keys_entry(name: str) -> str:
    return f"{_stem_of(name)}{KEYS}"


class KeyReader:
    """Find the rows of a shard in a checkpoint by bisection, without reading all keys.

    Args:
        reader: `Reader` of the checkpoint.
        saved: metadata of its entries, by name.
    """

    def __init__(self, reader: Any, saved: Mapping[str, Any]) -> None:
        self._reader, self._saved = reader, saved
        # Rows by number of the shard, for each entry of keys and number of shards.
        self._spans: dict[tuple[str, int], dict[int, Span]] = {}
        # Entry, first row and keys of the block that was read last.
        self._cached_keys: tuple[str, int, Tensor] = ("", 0, torch.empty(0, dtype=torch.int64))

    def spans(self, leaf: Leaf) -> dict[int, Span]:
        """Return the range of saved rows for each shard on this rank; none without `KeyedRows`.

        Reads blocks of keys at the first call for a table and a number of shards.
        """
        if not isinstance(leaf.value, KeyedRows):
            return {}
        name, count = _keys_entry(leaf.name), len(leaf.value.shards)
        spans = self._spans.setdefault((name, count), {})
        for number in leaf.value.parts:
            if number not in spans:
                spans[number] = (
                    self._begin(name, number, count),
                    self._begin(name, number + 1, count),
                )
        return {number: spans[number] for number in leaf.value.parts}

    def _begin(self, name: str, number: int, count: int) -> int:
        """Return the first row of shard `number` of `count`."""
        rows = range(self._saved[name].size[0])
        return bisect.bisect_left(
            rows, number, key=lambda row: int(routing.owner(self._key(name, row), count))
        )

    def _key(self, name: str, row: int) -> Tensor:
        """Return one key; the block that contains it is read and cached."""
        cached_name, start, keys = self._cached_keys
        if cached_name != name or not start <= row < start + keys.numel():
            start, keys = self._read(name, row)
            self._cached_keys = name, start, keys
        return keys[row - start : row - start + 1]

    def _read(self, name: str, row: int) -> tuple[int, Tensor]:
        """Read the saved block of keys that has row `row`; return its first row and its keys."""
        from emblib.sharding.checkpoints.files import read

        chunk = next(
            chunk
            for chunk in self._saved[name].chunks
            if chunk.offsets[0] <= row < chunk.offsets[0] + chunk.sizes[0]
        )
        start, end = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
        keys = torch.empty(end - start, dtype=torch.int64)
        shard = Shard(0, (start, end), (0, 1))
        size = self._saved[name].size
        read(
            {name: ShardedTable(size, [shard], {0: keys}, RankGroup.single(), torch.int64)},
            self._reader,
            RankGroup.single(),
        )
        return start, keys
