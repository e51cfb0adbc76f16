"""State dicts of dynamic tables that are spread over ranks, and read again by any number of them.

In the state dict of a module of dynamic tables, entries that are named alike up to a last word,
`keys` among these words, have one row a key: `items.keys`, `items.stamps`, `items.weight`. That is
all these functions know, so they serve whole models, and counters of admission as well. Each rank
saves its own entries under names of its own; a rank that loads takes the keys it owns
(`emblib.dynamic.saving.routing.owner`) from those parts that may have some.

Nothing here communicates. With `torch.distributed.checkpoint`::

    dcp.save(as_part(module.state_dict(), rank, world_size), checkpoint_id=path)

    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    parts = empty_parts(metadata, rank, world_size)
    dcp.load(parts, checkpoint_id=path)
    module.load_state_dict(join_parts(parts, rank, world_size))
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.dynamic.saving import routing

_HASH_KEYS = "hash_keys"
_PART = re.compile(r"part_(\d+)_of_(\d+)\.(.*)", re.DOTALL)


def as_part(state: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """A state dict of one rank under names that no other rank uses.

    Raises:
        ValueError: it has keys that another rank owns, who would look for them in vain.
    """
    for stem in _stems(state):
        keys = state[f"{stem}keys"]
        strangers = keys[routing.owner(keys, world_size) != rank]
        if strangers.numel():
            raise ValueError(
                f"a part has the keys that its rank owns; {strangers.numel()} of {stem}keys belong "
                f"to others than rank {rank} of {world_size}, e.g. {int(strangers[0])}: send ids "
                "where emblib.checkpoints.owner says"
            )
    return {f"part_{rank}_of_{world_size}.{key}": value for key, value in state.items()}


def empty_parts(metadata: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Tensor]:
    """Room for the parts in which a rank may have keys, to be filled by the checkpoint's reader.

    Args:
        metadata: by name, objects with `size` and `properties.dtype`, as `state_dict_metadata` of
            torch.distributed.checkpoint has them.
        rank: which is loading.
        world_size: ranks that are loading, whatever the number of those that saved.
    """
    room = {}
    for key, saved in metadata.items():
        match = _PART.fullmatch(key)
        if match is None or not hasattr(saved, "properties"):
            continue
        theirs, parts = int(match[1]), int(match[2])
        # Rank r of W owns routes from r / W to (r + 1) / W of all.
        if theirs * world_size < (rank + 1) * parts and rank * parts < (theirs + 1) * world_size:
            room[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
    return room


def join_parts(state: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """The state dict of a rank from the parts of a checkpoint.

    Raises:
        ValueError: there are parts of checkpoints of different numbers of ranks, or none.
    """
    parts: dict[int, dict[str, Tensor]] = {}
    worlds = set()
    for key, value in state.items():
        match = _PART.fullmatch(key)
        if match is not None:
            worlds.add(int(match[2]))
            parts.setdefault(int(match[1]), {})[match[3]] = value
    if len(worlds) != 1:
        raise ValueError(
            f"parts must be of one checkpoint, got those of {sorted(worlds) or 'none'} ranks; save "
            "with as_part, each checkpoint to a path of its own"
        )
    return combine([parts[number] for number in sorted(parts)], rank, world_size)


def combine(parts: Sequence[Mapping[str, Tensor]], rank: int, world_size: int) -> dict[str, Tensor]:
    """What a rank has of several state dicts.

    Rows by key are those of the keys it owns. Of other integers, clocks and counts among them, the
    largest is taken, element by element: a count is never less than that of the rank which saw the
    key. Of floating-point numbers, those of the optimizer, it is the first part's; so it is of hash
    keys that are not the same in all parts, and of what lies beside them: counts by other hashes
    have nothing in common.
    """
    joined: dict[str, Tensor] = {}
    by_key = {stem for part in parts for stem in _stems(part)}
    unlike = _stems_of_unlike_hashes(parts)
    for key in dict.fromkeys(key for part in parts for key in part):
        stem = f"{key.rpartition('.')[0]}."
        found = [part for part in parts if key in part]
        if stem in by_key and all(_is_by_key(part, stem, key) for part in found):
            joined[key] = torch.cat([_owned(part, stem, key, rank, world_size) for part in found])
        elif found[0][key].dtype.is_floating_point or stem in unlike:
            joined[key] = found[0][key]
        else:
            joined[key] = _largest(part[key] for part in found)
    return joined


def _stems_of_unlike_hashes(parts: Sequence[Mapping[str, Tensor]]) -> set[str]:
    """Return the beginnings of names beside which parts have different hash keys."""
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        for key, value in part.items():
            if key.endswith(f".{_HASH_KEYS}"):
                found.setdefault(key, []).append(value)
    return {
        key.removesuffix(_HASH_KEYS)
        for key, values in found.items()
        if any(value.tolist() != values[0].tolist() for value in values)
    }


def resized(state: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with room of the saved size wherever that is another one than its own.

    For a checkpoint that one process saved: torch.distributed.checkpoint loads into tensors of the
    saved size only, and dynamic tables have another number of keys each time. Names that `state`
    lacks are left out, unless they belong to rows by key that it has.
    """
    result = dict(state)
    stems = _stems(state)
    for key, saved in metadata.items():
        if not hasattr(saved, "properties"):
            continue
        known = key in result or f"{key.rpartition('.')[0]}." in stems
        if known and (key not in result or tuple(result[key].shape) != tuple(saved.size)):
            result[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
    return result


def _stems(state: Mapping[str, Any]) -> list[str]:
    """Beginnings of the names of what has one row a key."""
    return [key.removesuffix("keys") for key in state if key.endswith(".keys")]


def _is_by_key(part: Mapping[str, Tensor], stem: str, key: str) -> bool:
    keys = part.get(f"{stem}keys")
    return keys is not None and part[key].shape[:1] == keys.shape


def _owned(part: Mapping[str, Tensor], stem: str, key: str, rank: int, world_size: int) -> Tensor:
    mine = routing.owner(part[f"{stem}keys"], world_size) == rank
    return part[key] if bool(mine.all()) else part[key][mine]


def _largest(tensors: Iterable[Tensor]) -> Tensor:
    first, *others = tensors
    for other in others:
        first = torch.maximum(first.to(other.device), other)
    return first
