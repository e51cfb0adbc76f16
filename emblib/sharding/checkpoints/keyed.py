"""State dicts of dynamic tables over ranks, whose rows are sorted so that every shard is a range.

Every key has a *route*, a 64-bit hash (`emblib.dynamic.keys`). Shard k of K owns the keys in the
k-th of K equal ranges of routes, and checkpoints store the entries of a table sorted by route. So
the table in a checkpoint is the concatenation of its shards, whatever plan saved it. A rank finds
the rows of its shard by bisection: it reads a few blocks of the keys, and then these rows.

The state dict of a table has two sets of keys, each with tensors of one row per key. The first is
`keys` with `weight` and the optimizer states, the second `fallback.keys` with those of the fallback
rows. All names of a set begin with its *stem*, "" or "fallback.".
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
_CLOCK = "clock"  # an entry with the stem of the keys that is one number for the table


def join_shards(
    states: Mapping[int, Mapping[str, Tensor]], owners: Sequence[int], ranks: RankGroup
) -> dict[str, Tensor]:
    """Build the state dict of a dynamic table from those of its shards; a collective over `ranks`.

    Tensors with one row per key become `KeyedRows` on the CPU. For every other tensor all ranks get
    the element-wise maximum over the shards, on the CPU. So a clock is the latest, and a count of a
    sketch is at least that of the shard that counted the key. Hash keys are equal in all shards of
    a table, which get them from one seed. Each shard has all fallback rows; it saves those whose
    keys it owns.

    Args:
        states: the state dicts of this rank's shards, by number.
        owners: the rank of each shard.
        ranks: the ranks that store the shards.

    Raises:
        ValueError: a shard has keys that another shard owns, where lookups would not find them; on
            every rank. Keys of fallback rows do not count.
    """
    rows_by_shard = {
        number: {stem: _sort_by_route(state, stem) for stem in _stems(state)}
        for number, state in states.items()
    }
    for number, rows_by_stem in rows_by_shard.items():
        if (stem := f"{fallback.FALLBACK}.") in rows_by_stem:
            rows_by_stem[stem] = fallback.rows_of_shard(rows_by_stem[stem], number, len(owners))
    stems = {
        stem
        for stems_of_rank in ranks.gather_objects(_stems_of_shards(rows_by_shard))
        for stem in stems_of_rank
    }
    entries: dict[str, Tensor] = {}
    for stem in sorted(stems):
        shards = {number: rows[stem] for number, rows in rows_by_shard.items()}
        rows = make_keyed_rows(shards, owners, ranks)
        entries.update({f"{stem}{name}": value for name, value in rows.items()})
    other_entries = [
        {key: value.cpu() for key, value in state.items() if key not in entries}
        for state in states.values()
    ]
    for entry in (
        entry for rank_entries in ranks.gather_objects(other_entries) for entry in rank_entries
    ):
        for key, value in entry.items():
            entries[key] = torch.maximum(entries[key], value) if key in entries else value
    return entries


def entries_of_shard(
    state: Mapping[str, Tensor], number: int, num_shards: int, name: str
) -> dict[str, Tensor]:
    """Return the entries of shard `number` of `num_shards` from the state dict of table `name`.

    From a full tensor with one row per key the shard gets copies of the rows of its keys, from
    `KeyedRows` the local tensor of shard `number`. All other values are returned unchanged.

    Raises:
        ValueError: `KeyedRows` have another number of shards, or their shard `number` is on another
            rank, or has keys that other shards own.
    """
    is_owned_by_stem = {}
    for stem in _stems(state):
        keys = state[f"{stem}{KEYS}"]
        if not isinstance(keys, KeyedRows):
            is_owned_by_stem[stem] = routing.owner(keys, num_shards) == number
    entries = {}
    for key, value in state.items():
        stem = _stem_of(key)
        if isinstance(value, KeyedRows):
            if len(value.shards) != num_shards or number not in value.parts:
                raise ValueError(
                    f"{name}.{key} is {value!r}, but the table here has {num_shards} shards, of "
                    f"which this rank has number {number}: load it with "
                    "emblib.sharding.checkpoints.load"
                )
            entries[key] = value.parts[number]
            if key == f"{stem}{KEYS}":
                _check_owner(entries[key], number, num_shards, f"{name}.{key}")
        elif stem in is_owned_by_stem and key.removeprefix(stem) != _CLOCK:
            entries[key] = value[is_owned_by_stem[stem]]
        else:
            entries[key] = value
    return entries


def _check_owner(keys: Tensor, number: int, num_shards: int, name: str) -> None:
    """Raise ValueError for keys of other shards, as torch.distributed.checkpoint may read them.

    It cuts the saved rows where those of the model are cut now.
    """
    num_foreign_keys = int((routing.owner(keys, num_shards) != number).sum())
    if num_foreign_keys:
        raise ValueError(
            f"{name} has {num_foreign_keys} keys in shard {number} of {num_shards} that other "
            "shards own: load the checkpoint with emblib.sharding.checkpoints.load, which sends "
            "each key to its shard; torch.distributed.checkpoint.load does not"
        )


def check_row_counts(state: Mapping[str, Any], name: str) -> None:
    """Raise ValueError unless full tensors by key in a state dict have one row per key.

    `name` is that of the table, for messages. `KeyedRows` and other values are not checked.
    """
    for stem in _stems(state):
        keys = state[f"{stem}{KEYS}"]
        if isinstance(keys, KeyedRows):
            continue
        problem = state_dicts.tensor_problem(
            keys, torch.empty(0, dtype=torch.int64, device="cpu"), (None,)
        )
        if problem:
            raise ValueError(f"{name}.{stem}{KEYS}: {problem}")
        for key, value in state.items():
            is_by_key = _stem_of(key) == stem and key.removeprefix(stem) != _CLOCK
            if is_by_key and not isinstance(value, KeyedRows):
                problem = state_dicts.tensor_problem(value, torch.empty(0, device="cpu"))
                num_rows = value.shape[0] if not problem and value.dim() else None
                if problem or num_rows != len(keys):
                    raise ValueError(
                        f"{name}.{key}: {problem or f'must have {len(keys)} rows, got {num_rows}'}"
                    )


def _stems(state: Mapping[str, Tensor]) -> list[str]:
    """Return the stems of a state dict, one per entry `keys`."""
    return [key.removesuffix(KEYS) for key in state if key.rpartition(".")[2] == KEYS]


def _stems_of_shards(rows_by_shard: Mapping[int, Mapping[str, Any]]) -> list[str]:
    return sorted({stem for rows in rows_by_shard.values() for stem in rows})


def _sort_by_route(state: Mapping[str, Tensor], stem: str) -> dict[str, Tensor]:
    """Return the tensors of a stem without it in their names, on the CPU and sorted by route."""
    order = routing.canonical_order(state[f"{stem}{KEYS}"].cpu())
    return {
        key.removeprefix(stem): value.cpu()[order]
        for key, value in state.items()
        if _stem_of(key) == stem and key.removeprefix(stem) != _CLOCK
    }


def _stem_of(name: str) -> str:
    return name[: name.rfind(".") + 1]


class _ShardDescription(NamedTuple):
    """Description of a shard for other ranks.

    Attributes:
        columns: dtype and shape of each tensor, by name; the shape begins with the number of keys.
        num_foreign_keys: number of its keys that other shards own.
        foreign_key: one of these keys; 0 if there are none.
    """

    columns: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    num_foreign_keys: int
    foreign_key: int


def make_keyed_rows(
    local_shards: Mapping[int, Mapping[str, Tensor]], owners: Sequence[int], ranks: RankGroup
) -> dict[str, KeyedRows]:
    """Build the rows by key of one table from its shards; a collective over `ranks`.

    Args:
        local_shards: shards of this rank by number: `keys` int64 `[N]` and other tensors with one
            row per key, on the CPU; the result refers to their memory. The caller must sort them
            by route; not checked.
        owners: the rank of each shard.
        ranks: the ranks that store the shards.

    Raises:
        ValueError: a shard has keys that another shard owns, where lookups would not find them; on
            every rank.
    """
    shards = _gather_descriptions(local_shards, owners, ranks)
    counts = [shard.columns[KEYS][1][0] for shard in shards]
    starts = [sum(counts[:number]) for number in range(len(counts))]
    rows_by_name = {}
    for name, (dtype, (_, *shape)) in shards[0].columns.items():
        blocks = [
            Shard(rank, (start, start + count), (0, shape[0] if shape else 1))
            for rank, start, count in zip(owners, starts, counts, strict=True)
        ]
        local_columns = {number: columns[name] for number, columns in local_shards.items()}
        rows_by_name[name] = KeyedRows((sum(counts), *shape), blocks, local_columns, ranks, dtype)
    return rows_by_name


def _gather_descriptions(
    local_shards: Mapping[int, Mapping[str, Tensor]], owners: Sequence[int], ranks: RankGroup
) -> list[_ShardDescription]:
    """Return the descriptions of all shards, by number; ValueError if one has foreign keys."""
    local_descriptions = {}
    for number, columns in local_shards.items():
        keys = columns[KEYS]
        foreign_keys = keys[routing.owner(keys, len(owners)) != number]
        num_foreign = foreign_keys.numel()
        local_descriptions[number] = _ShardDescription(
            {name: (value.dtype, tuple(value.shape)) for name, value in columns.items()},
            num_foreign,
            int(foreign_keys[0]) if num_foreign else 0,
        )
    descriptions_by_number = {
        number: shard
        for shards_of_rank in ranks.gather_objects(local_descriptions)
        for number, shard in shards_of_rank.items()
    }
    shards = [descriptions_by_number[number] for number in range(len(owners))]
    # Raise only after the collective, in which the other ranks would wait for this rank.
    for number, shard in enumerate(shards):
        if shard.num_foreign_keys:
            raise ValueError(
                f"shard {number} of {len(owners)} has {shard.num_foreign_keys} keys of other "
                f"shards, e.g. {shard.foreign_key}: send ids where emblib.checkpoints.owner says"
            )
    return shards


def has_row_per_key(name: str, saved_metadata: Mapping[str, Any]) -> bool:
    """Return whether the saved tensor `name` has as many rows as the `keys` of its stem.

    `saved_metadata` is that of a checkpoint, by name.
    """
    keys = saved_metadata.get(_keys_entry(name))
    size = getattr(saved_metadata[name], "size", None)
    return (
        keys is not None
        and hasattr(keys, "properties")
        and name.rpartition(".")[2] != _CLOCK
        and size is not None
        and len(keys.size) == 1
        and keys.properties.dtype == torch.int64
        and size[:1] == keys.size
    )


def is_of_saved_keys(
    name: str, state: Mapping[str, Any], saved_metadata: Mapping[str, Any]
) -> bool:
    """Return whether value `name` of a state has one row per key, and the keys are saved.

    `state` has values by name, `saved_metadata` that of a checkpoint by name.
    """
    keys, value = state.get(_keys_entry(name)), state[name]
    return (
        _keys_entry(name) in saved_metadata
        and isinstance(keys, Tensor)
        and isinstance(value, Tensor)
        and (keys.dim(), keys.dtype) == (1, torch.int64)
        and name.rpartition(".")[2] != _CLOCK
        and value.size()[:1] == keys.size()
    )


def _keys_entry(name: str) -> str:
    return f"{_stem_of(name)}{KEYS}"


class KeyReader:
    """Find the rows of a shard in a checkpoint by bisection, without reading all keys.

    Args:
        reader: `Reader` of the checkpoint.
        saved_metadata: metadata of its entries, by name.
    """

    def __init__(self, reader: Any, saved_metadata: Mapping[str, Any]) -> None:
        self._reader, self._saved_metadata = reader, saved_metadata
        # Rows by number of the shard, for each entry of keys and number of shards.
        self._spans_of_keys: dict[tuple[str, int], dict[int, Span]] = {}
        # Entry, first row and keys of the block that was read last.
        self._cached_keys: tuple[str, int, Tensor] = (
            "",
            0,
            torch.empty(0, dtype=torch.int64, device="cpu"),
        )

    def spans(self, leaf: Leaf) -> dict[int, Span]:
        """Return the range of saved rows for each shard on this rank; none without `KeyedRows`.

        Reads blocks of keys at the first call for a set of keys and a number of shards.

        Raises:
            CheckpointError: a file of keys is damaged; on this rank alone.
        """
        if not isinstance(leaf.value, KeyedRows):
            return {}
        name, num_shards = _keys_entry(leaf.name), len(leaf.value.shards)
        spans_by_shard = self._spans_of_keys.setdefault((name, num_shards), {})
        for number in leaf.value.parts:
            if number not in spans_by_shard:
                spans_by_shard[number] = (
                    self._first_row(name, number, num_shards),
                    self._first_row(name, number + 1, num_shards),
                )
        return {number: spans_by_shard[number] for number in leaf.value.parts}

    def _first_row(self, name: str, number: int, num_shards: int) -> int:
        """Return the first row of shard `number`; the number of rows if it is `num_shards`."""
        rows = range(self._saved_metadata[name].size[0])
        return bisect.bisect_left(
            rows, number, key=lambda row: int(routing.owner(self._key(name, row), num_shards))
        )

    def _key(self, name: str, row: int) -> Tensor:
        """Return one key; the block that contains it is read and cached."""
        cached_name, start, keys = self._cached_keys
        if cached_name != name or not start <= row < start + keys.numel():
            start, keys = self._read_block(name, row)
            self._cached_keys = name, start, keys
        return keys[row - start : row - start + 1]

    def _read_block(self, name: str, row: int) -> tuple[int, Tensor]:
        """Read the saved block of keys that has row `row`; return its first row and its keys."""
        from emblib.sharding.checkpoints.files import read

        chunk = next(
            chunk
            for chunk in self._saved_metadata[name].chunks
            if chunk.offsets[0] <= row < chunk.offsets[0] + chunk.sizes[0]
        )
        start, end = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
        keys = torch.empty(end - start, dtype=torch.int64, device="cpu")
        shard = Shard(0, (start, end), (0, 1))
        size = self._saved_metadata[name].size
        read(
            {name: ShardedTable(size, [shard], {0: keys}, RankGroup.single(), torch.int64)},
            self._reader,
            RankGroup.single(),
        )
        return start, keys
