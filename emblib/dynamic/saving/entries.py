"""Entries of a dynamic table independent of their slots: the content of checkpoints.

An entry is a key, the tick of its last use, its score where the order of eviction has one, and its
rows: the weight and every optimizer state. It does not contain its slot, so entries fit tables of
any capacity, number of buckets and number of ranks.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.dynamic import keys as routing

WEIGHT = "weight"  # name of the weights among the rows of an entry
LAST_USES = "last_uses"  # name of the last uses by level, see `emblib.dynamic.last_uses`


class SelectedRows:
    """A selection of rows of a tensor or of other rows; only indexing copies.

    It is indexed by int64 positions `[n]` on any device, and returns rows on the device of `rows`.

    Args:
        rows: rows that are selected from.
        positions: int64 `[N]`, positions of the selected rows.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __init__(self, rows: "Rows", positions: Tensor) -> None:
        self._rows, self._positions = rows, positions
        self.dtype = rows.dtype
        self.shape = (positions.numel(), *rows.shape[1:])

    def __getitem__(self, index: Tensor) -> Tensor:
        return self._rows[self._positions[index.to(self._positions.device)]].detach()


class ConcatenatedRows:
    """A concatenation of rows; only indexing, by int64 positions `[n]`, copies, to the CPU.

    Args:
        parts: rows to concatenate, at least one, of equal width; copies have the first part's
            dtype.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __init__(self, parts: Sequence["Rows"]) -> None:
        self._parts = parts
        self.dtype = parts[0].dtype
        part_lengths = [part.shape[0] for part in parts]
        self._part_ends = torch.tensor(part_lengths, dtype=torch.int64, device="cpu").cumsum(0)
        self.shape = (sum(part_lengths), *parts[0].shape[1:])

    def __getitem__(self, index: Tensor) -> Tensor:
        index = index.to("cpu")
        part_of_position = torch.bucketize(index, self._part_ends, right=True)
        rows = torch.empty(index.numel(), *self.shape[1:], dtype=self.dtype, device="cpu")
        for part_index, part in enumerate(self._parts):
            positions = (part_of_position == part_index).nonzero().view(-1)
            if positions.numel():
                begin = int(self._part_ends[part_index]) - part.shape[0]
                rows[positions] = part[index[positions] - begin].to(rows)
        return rows


Rows = Tensor | SelectedRows | ConcatenatedRows
"""Rows `[N, ...]` with `dtype` and `shape`; indexing by int64 positions copies some of them."""


@dataclass(frozen=True)
class Entries:
    """Entries of one table.

    Args:
        keys: int64 `[N]`, distinct; uint64 keys are viewed as int64.
        stamps: int64 `[N]`, tick of the last use.
        scores: int64 `[N]`, or None where the order of eviction has none.
        rows: `weight` `[N, D]` and the states of the optimizer, `[N, D]` or `[N]`; with several
            times to live also `last_uses`, int64 `[N, levels - 1]`. They may be on another device.

    Raises:
        ValueError: stamps or scores are not int64, one per key, or rows are not one per key.
        TypeError: the keys are not int64, uint64 or int32.
    """

    keys: Tensor
    stamps: Tensor
    scores: Tensor | None
    rows: Mapping[str, Rows]

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", routing.as_keys(self.keys))
        num_keys = self.keys.numel()
        columns = {"stamps": self.stamps, "scores": self.scores}
        for name, column in columns.items():
            if column is not None and (column.dtype, tuple(column.shape)) != (
                torch.int64,
                (num_keys,),
            ):
                raise ValueError(
                    f"{name} must be int64, one per key = [{num_keys}], got {column.dtype} "
                    f"{list(column.shape)}"
                )
        for name, rows in self.rows.items():
            if rows.shape[0] != num_keys:
                raise ValueError(
                    f"{name} must have one row per key = {num_keys}, got shape {list(rows.shape)}"
                )

    def __len__(self) -> int:
        return self.keys.numel()

    def take(self, index: Tensor) -> "Entries":
        """Return copies of the entries at `index`, int64 `[n]`."""
        return Entries(
            self.keys[index],
            self.stamps[index],
            None if self.scores is None else self.scores[index],
            {name: rows[index] for name, rows in self.rows.items()},
        )

    def on_cpu(self) -> "Entries":
        """Return the entries with rows as tensors on the CPU."""
        all_positions = torch.arange(len(self), device="cpu")
        rows = {name: rows[all_positions].cpu() for name, rows in self.rows.items()}
        return Entries(self.keys, self.stamps, self.scores, rows)

    def view(self, index: Tensor) -> "Entries":
        """Return the entries at `index`, int64 `[n]`; rows are copied when they are indexed."""
        all_positions = torch.arange(len(self), device="cpu")
        if index.numel() == len(self) and bool((index.cpu() == all_positions).all()):
            return self
        return Entries(
            self.keys[index],
            self.stamps[index],
            None if self.scores is None else self.scores[index],
            {name: SelectedRows(rows, index) for name, rows in self.rows.items()},
        )

    def sorted(self) -> "Entries":
        """Return the entries sorted by route, so that equal contents are equal bytes."""
        return self.take(routing.canonical_order(self.keys))

    def owned(self, rank: int, world_size: int) -> "Entries":
        """Return the entries whose keys a rank owns."""
        if world_size == 1:
            return self
        is_owned = routing.owner(self.keys, world_size) == rank
        return self.view(is_owned.nonzero().view(-1))

    def newest_stamp(self) -> int:
        """Return the largest stamp, 0 if there are no entries."""
        return int(self.stamps.max()) if len(self) else 0

    def check_distinct(self) -> None:
        """Raise ValueError if a key occurs twice."""
        sorted_keys = self.keys.sort().values
        repeated_keys = sorted_keys[1:][sorted_keys[1:] == sorted_keys[:-1]]
        if repeated_keys.numel():
            raise ValueError(
                f"the keys of a table must be distinct; {repeated_keys.numel()} come again, "
                f"e.g. {int(repeated_keys[0])}"
            )


class Changes(NamedTuple):
    """The changes of a table since a tick.

    Attributes:
        upserts: entries that were used or written since.
        removed: int64 `[n]`, keys that left since and are not in the table.
    """

    upserts: Entries
    removed: Tensor


def concatenate(all_entries: Sequence[Entries]) -> Entries:
    """Concatenate entries, at least one; rows are copied, to the CPU, when they are indexed.

    A single one is returned itself. Keys are not checked to be distinct.

    Raises:
        ValueError: there are none, or some have scores or states and others do not.
    """
    if not all_entries:
        raise ValueError("entries of at least one part are needed, got none")
    if len(all_entries) == 1:
        return all_entries[0]
    scores = [entries.scores for entries in all_entries if entries.scores is not None]
    names = {tuple(entries.rows) for entries in all_entries}
    if len(scores) not in (0, len(all_entries)) or len(names) > 1:
        raise ValueError(
            "parts of one table must have the same rows and all of them scores or none; got rows "
            f"{sorted(names)} and scores in {len(scores)} of {len(all_entries)}"
        )
    return Entries(
        torch.cat([entries.keys for entries in all_entries]),
        torch.cat([entries.stamps for entries in all_entries]),
        torch.cat(scores) if scores else None,
        {
            name: ConcatenatedRows([entries.rows[name] for entries in all_entries])
            for name in all_entries[0].rows
        },
    )


def best_first(entries: Entries, order: str) -> Tensor:
    """Return the permutation, int64 `[N]`, from the entry evicted last to the entry evicted first.

    `order` is the table's eviction order: none, lru, lfu, lru_lfu or assigned; none sorts like lru.
    Raises ValueError if the order needs scores and the entries have none.
    """
    columns = [entries.keys]
    if order != "lfu":
        columns.append(entries.stamps)
    if order in ("lfu", "lru_lfu", "assigned"):
        if entries.scores is None:
            raise ValueError(
                f"a table whose order is {order!r} needs a score for every key, and these entries "
                "have none; give them with dataclasses.replace(entries, scores=...)"
            )
        columns.append(entries.scores)
    permutation = torch.arange(len(entries), device=entries.keys.device)
    for column in columns:
        column_order = torch.argsort(column[permutation], descending=True, stable=True)
        permutation = permutation[column_order]
    return permutation


_HASH_KEYS = "hash_keys"
_FALLBACK = ".fallback."  # see `emblib.dynamic.saving.fallback`
_PART = re.compile(r"part_(\d+)_of_(\d+)\.(.*)", re.DOTALL)


def as_part(state: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Rename the tensors of one rank's state dict to names that no other rank uses.

    Fallback rows of other ranks are left out.

    Raises:
        ValueError: it has keys that another rank owns, where lookups would not find them.
    """
    part = dict(state)
    for stem in _stems(state):
        keys = state[f"{stem}keys"]
        if stem.endswith(_FALLBACK):  # every rank has all fallback rows, and uses some
            names = [key for key in state if _is_by_key(state, stem, key) and key.startswith(stem)]
            part |= {key: _owned(state, stem, key, rank, world_size) for key in names}
            continue
        foreign_keys = keys[routing.owner(keys, world_size) != rank]
        if foreign_keys.numel():
            raise ValueError(
                f"a part has the keys that its rank owns; {foreign_keys.numel()} of {stem}keys "
                f"belong to others than rank {rank} of {world_size}, e.g. {int(foreign_keys[0])}: "
                "send ids where emblib.checkpoints.owner says"
            )
    return {f"part_{rank}_of_{world_size}.{key}": value for key, value in part.items()}


def empty_parts(metadata: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Tensor]:
    """Allocate the parts in which a rank may have keys, on the CPU, for a reader to fill.

    Args:
        metadata: objects with `size` and `properties.dtype` by name, as `state_dict_metadata` of
            torch.distributed.checkpoint has them.
        rank: the rank that is loading.
        world_size: the number of ranks that are loading; it may differ from the saved one.
    """
    parts = {}
    for key, tensor_metadata in metadata.items():
        match = _PART.fullmatch(key)
        if match is None or not hasattr(tensor_metadata, "properties"):
            continue
        part_rank, num_parts = int(match[1]), int(match[2])
        # Rank r of W owns routes from r / W to (r + 1) / W of all.
        if (
            part_rank * world_size < (rank + 1) * num_parts
            and rank * num_parts < (part_rank + 1) * world_size
        ):
            parts[key] = torch.empty(
                tensor_metadata.size, dtype=tensor_metadata.properties.dtype, device="cpu"
            )
    return parts


def join_parts(state: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Build the state dict of a rank from the parts of a checkpoint.

    Raises:
        ValueError: there are parts of checkpoints of different numbers of ranks, or none.
    """
    part_by_rank: dict[int, dict[str, Tensor]] = {}
    world_sizes = set()
    for key, value in state.items():
        match = _PART.fullmatch(key)
        if match is not None:
            world_sizes.add(int(match[2]))
            part_by_rank.setdefault(int(match[1]), {})[match[3]] = value
    if len(world_sizes) != 1:
        raise ValueError(
            f"parts must be of one checkpoint, got those of {sorted(world_sizes) or 'none'} ranks; "
            "save with as_part, each checkpoint to a path of its own"
        )
    return combine(
        [part_by_rank[part_rank] for part_rank in sorted(part_by_rank)], rank, world_size
    )


def combine(
    states: Sequence[Mapping[str, Tensor]], rank: int, world_size: int
) -> dict[str, Tensor]:
    """Combine several state dicts into the state dict of one rank.

    The result has the rows of the keys that the rank owns. Other integers, e.g. clocks and counts,
    are the element-wise maximum, so a count is at least the count on the rank that saw the key.
    Floating-point values, e.g. hyperparameters, are from the first part that has them. Hash keys
    that differ between parts, and the counters that depend on them, are from the first part too,
    because counts under different hashes cannot be combined.
    """
    combined_state: dict[str, Tensor] = {}
    row_stems = {stem for state in states for stem in _stems(state)}
    unlike_stems = _stems_of_unlike_hashes(states)
    for key in dict.fromkeys(key for state in states for key in state):
        stem = f"{key.rpartition('.')[0]}."
        states_with_key = [state for state in states if key in state]
        if stem in row_stems and all(_is_by_key(state, stem, key) for state in states_with_key):
            combined_state[key] = torch.cat(
                [_owned(state, stem, key, rank, world_size) for state in states_with_key]
            )
        elif states_with_key[0][key].dtype.is_floating_point or stem in unlike_stems:
            combined_state[key] = states_with_key[0][key]
        else:
            combined_state[key] = _elementwise_max(state[key] for state in states_with_key)
    return combined_state


def _stems_of_unlike_hashes(states: Sequence[Mapping[str, Tensor]]) -> set[str]:
    """Return the name prefixes whose hash keys differ between the states."""
    values_by_key: dict[str, list[Tensor]] = {}
    for state in states:
        for key, value in state.items():
            if key.endswith(f".{_HASH_KEYS}"):
                values_by_key.setdefault(key, []).append(value)
    return {
        key.removesuffix(_HASH_KEYS)
        for key, values in values_by_key.items()
        if any(value.tolist() != values[0].tolist() for value in values)
    }


def resized(state: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with memory of the saved size for tensors whose size differs.

    Use it for a checkpoint that one process saved: torch.distributed.checkpoint loads only into
    tensors of the saved size, but the number of keys of a dynamic table varies. Names that `state`
    lacks are left out, unless they belong to rows by key that it has.
    """
    resized_state = dict(state)
    stems = _stems(state)
    for key, tensor_metadata in metadata.items():
        if not hasattr(tensor_metadata, "properties"):
            continue
        is_expected = key in resized_state or f"{key.rpartition('.')[0]}." in stems
        if is_expected and (
            key not in resized_state
            or tuple(resized_state[key].shape) != tuple(tensor_metadata.size)
        ):
            resized_state[key] = torch.empty(
                tensor_metadata.size, dtype=tensor_metadata.properties.dtype, device="cpu"
            )
    return resized_state


def _stems(state: Mapping[str, Any]) -> list[str]:
    """Return the name prefixes of the tensors that have one row per key."""
    return [key.removesuffix("keys") for key in state if key.endswith(".keys")]


def _is_by_key(state: Mapping[str, Tensor], stem: str, key: str) -> bool:
    keys = state.get(f"{stem}keys")
    return keys is not None and state[key].shape[:1] == keys.shape


def _owned(state: Mapping[str, Tensor], stem: str, key: str, rank: int, world_size: int) -> Tensor:
    is_owned = routing.owner(state[f"{stem}keys"], world_size) == rank
    return state[key] if bool(is_owned.all()) else state[key][is_owned]


def _elementwise_max(tensors: Iterable[Tensor]) -> Tensor:
    """Return the element-wise maximum of tensors of equal shapes."""
    maximum, *other_tensors = tensors
    for other in other_tensors:
        maximum = torch.maximum(maximum.to(other.device), other)
    return maximum
