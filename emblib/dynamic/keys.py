"""Keys of dynamic tables: dtypes, hash keys, status, and the rank that owns a key.

A key is an int64, of any value. Its *route*, a 64-bit hash without a seed, orders keys in
checkpoints and divides them into equal ranges over ranks (`owner`). The *hash key* of a table, from
seed and name, selects the buckets of keys within the table.
"""

import hashlib
import operator
from collections.abc import Mapping, Sequence, Set
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.ops import hash
from emblib.ops.hash import InsertedBatch, Keys
from emblib.ops.primitives import new_seed
from emblib.reference.random import mix, unmix
from emblib.specs import check_count
from emblib.tables.parameters import version_of

_INT64_RANGE = (-(2**63), 2**63 - 1)


def hash_key_of(seed: int, name: str) -> int:
    """Return the signed 64-bit hash key of a table, from seed and name.

    Keys that collide in one bucket cannot be constructed without the seed.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def hash_keys_of(
    seed: int | None, names: Sequence[str], hash_seeds: Sequence[int] | None = None
) -> list[int]:
    """Return the hash key of each table.

    Args:
        seed: seed of all tables; None draws one from torch's generator.
        names: names of the tables.
        hash_seeds: seeds, one per table, which replace `seed`; None uses `seed`.

    Raises:
        TypeError: a seed is not an int.
        ValueError: the numbers of seeds and tables differ, or a seed is outside [0, 2^63).
    """
    if hash_seeds is None:
        hash_seeds = [new_seed() if seed is None else seed] * len(names)
    if len(hash_seeds) != len(names):
        raise ValueError(f"hash_seeds must be one per table = {len(names)}, got {len(hash_seeds)}")
    seeds = [check_count("hash_seeds", table_seed, minimum=0) for table_seed in hash_seeds]
    return [hash_key_of(table_seed, name) for table_seed, name in zip(seeds, names, strict=True)]


def as_keys(keys: Tensor) -> Tensor:
    """Return keys, int64, uint64 or int32, as int64; uint64 keeps its bits.

    Only int32 is copied; else the result shares the memory of `keys`.

    Raises:
        TypeError: `keys` is not a tensor, or has another dtype.
    """
    if not isinstance(keys, Tensor):
        raise TypeError(
            f"keys must be a tensor of int64, uint64 or int32, got {type(keys).__name__}; "
            "torch.tensor(keys) makes one of ints"
        )
    dtype = keys.dtype
    if dtype == torch.int64:
        return keys
    if dtype == torch.uint64:
        return keys.view(torch.int64)
    if dtype == torch.int32:
        return keys.to(torch.int64)
    raise TypeError(f"keys must be int64, uint64 or int32, got {dtype}")


def checked_score(score: Any) -> int:
    """Return a score as an int; raise TypeError for another type, ValueError beyond int64."""
    if isinstance(score, bool) or not hasattr(score, "__index__"):
        raise TypeError(f"a score must be an int, got {score!r}")
    number = operator.index(score)
    if not _INT64_RANGE[0] <= number <= _INT64_RANGE[1]:
        raise ValueError(f"a score must be in [-2^63, 2^63), got {number}")
    return number


def as_scores(scores: Any) -> Tensor:
    """Return one score or several as an int64 tensor, in their shape.

    Tensors of uint64 keep their bits, so scores of 2^63 and above rank lowest.

    Raises:
        TypeError: scores are not integers, so that int64 would lose their order; or a dict or set.
        ValueError: an int is not in the range of int64.
    """
    if isinstance(scores, Mapping | Set):
        raise TypeError(f"scores must be an int, a sequence or a tensor of ints, got {scores!r}")
    if not hasattr(scores, "__len__"):  # an int
        return torch.tensor(checked_score(scores), device="cpu")
    checked_scores = _checked_scores(scores)
    try:
        values = (
            checked_scores
            if isinstance(checked_scores, Tensor)
            else torch.tensor(checked_scores, device="cpu")
        )
    except RuntimeError as error:  # torch's error for items that are not numbers
        raise TypeError(f"scores must be integers, got {scores!r}") from error
    if values.numel() and (values.dtype == torch.bool or not _is_integral(values.dtype)):
        raise TypeError(
            f"scores must be integers, got {values.dtype}; scale and round fractions, e.g. "
            "(scores * 2**32).long()"
        )
    return values.to(torch.int64)


def _checked_scores(scores: Any) -> Any:
    """Return scores, one or nested lists, after `checked_score` of those that are ints."""
    if isinstance(scores, list | tuple):
        return [_checked_scores(score) for score in scores]
    return checked_score(scores) if isinstance(scores, int | str) else scores


def _is_integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


class KeyStatus(IntEnum):
    """Status of a key after a training forward.

    ============  =================================================================
    HIT           in the table, or in the store behind it, before the batch
    NEW           inserted into an empty slot, or into the store behind the table
    EVICTING      inserted into the slot of an evicted key
    REFUSED       rejected: all slots of its buckets hold keys of this batch, keys
                  that rank above it, or keys that are never evicted
    NOT_ADMITTED  rejected by `DynamicSpec.admission`
    ABSENT        not in the batch, in queries of given keys
    ============  =================================================================

    All positions of a batch that hold one key have the same status.

    Example:
        >>> bags = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(100, 4)])
        >>> for ids in ([3, 1], [3, 4]):
        ...     pooled = bags(torch.tensor(ids), torch.tensor([0, 2]))
        ...     print([emblib.KeyStatus(int(status)).name for status in bags.key_status()])
        ['NEW', 'NEW']
        ['HIT', 'NEW']
    """

    HIT = hash.HIT
    NEW = hash.NEW
    EVICTING = hash.EVICTING
    REFUSED = hash.REFUSED
    NOT_ADMITTED = hash.NOT_ADMITTED
    ABSENT = 255


def status_by_position(inserted: InsertedBatch) -> Tensor:
    """Return the `KeyStatus` of each position of an inserted batch, uint8 `[L]`."""
    hits = torch.full_like(inserted.slots, KeyStatus.HIT, dtype=torch.uint8)
    if inserted.misses is None or inserted.result is None or not inserted.slots.numel():
        status = inserted.status
        return hits if status is None else torch.where(status == hash.STORED, hits, status)
    groups = inserted.misses.groups
    return torch.where(groups < 0, hits, inserted.result.status[groups.clamp(min=0).long()])


class LastBatch(NamedTuple):
    """The last training batch.

    Attributes:
        inserted: result of its insertion.
        keys: the batch; its `ids` may be the caller's tensor.
        version: version of `ids` at the insertion, see `parameters.version_of`.
    """

    inserted: InsertedBatch
    keys: Keys
    version: int

    def status_of(self, table: int, keys: Tensor) -> Tensor:
        """Return the `KeyStatus` of keys of one table, int64 `[n]` on the CPU, as uint8 `[n]`.

        Raises:
            RuntimeError: the ids of the batch were overwritten.
        """
        if version_of(self.keys.ids) != self.version:
            raise RuntimeError(
                "the ids of the last training batch were changed in place since, so it is not "
                "known which keys they were; ask before, or pass the batch a copy"
            )
        is_of_table = hash.tables_of(self.keys) == table
        ids = self.keys.ids[is_of_table].cpu()
        status = status_by_position(self.inserted)[is_of_table].cpu()
        status_of_keys = torch.full(keys.shape, KeyStatus.ABSENT, dtype=torch.uint8, device="cpu")
        if not ids.numel() or not keys.numel():
            return status_of_keys
        sorted_ids, order = ids.sort()
        indices = torch.searchsorted(sorted_ids, keys).clamp_(max=sorted_ids.numel() - 1)
        is_in_batch = sorted_ids[indices] == keys
        status_of_keys[is_in_batch] = status[order[indices[is_in_batch]]]
        return status_of_keys


_SIGN_BIT = -(1 << 63)  # flips the order of signed numbers to that of unsigned ones, and back


def route(keys: Tensor) -> Tensor:
    """Return the route of each key, a bijective hash, as int64 `[n]`.

    The sign bit is flipped, so that the order of the results is that of the routes as unsigned
    numbers.
    """
    return mix(mix(as_keys(keys))) ^ _SIGN_BIT


def owner(keys: Tensor, world_size: int) -> Tensor:
    """Return the rank in `[0, world_size)` that owns each key, int64, ascending with its route.

    Raises:
        TypeError: see `as_keys`.
        ValueError: `world_size` is not in [1, 2^31).
    """
    if not 0 < world_size < 1 << 31:
        raise ValueError(f"world_size must be in [1, 2^31), got {world_size}")
    return range_indices(keys, world_size)


def range_indices(keys: Tensor, num_ranges: int | Tensor) -> Tensor:
    """Return the index of the range of routes of each key, among `num_ranges` equal ranges.

    The result is int64 `[n]` in `[0, num_ranges)`. `num_ranges` is one number, or int64 `[n]`, one
    per key; below 2^31. For 0 ranges the result is 0.
    """
    # The upper 32 bits of the unsigned route, scaled to [0, num_ranges).
    return ((route(keys) ^ _SIGN_BIT) >> 32 & (1 << 32) - 1) * num_ranges >> 32


def keys_of_ranges(num_ranges: int) -> Tensor:
    """Return one key in each of `num_ranges` equal ranges of routes, int64 `[num_ranges]`.

    The upper half of the route of a key is the first in its range. The lower half is `num_ranges`,
    so that another number of ranges has other keys.
    """
    range_indices = torch.arange(num_ranges, device="cpu")
    scaled_indices = (range_indices << 32) + num_ranges - 1
    upper_halves = scaled_indices.div(max(num_ranges, 1), rounding_mode="floor")
    return unmix(unmix(upper_halves << 32 | num_ranges))


def canonical_order(keys: Tensor) -> Tensor:
    """Return the permutation, int64 `[n]`, that sorts keys by route, the order of checkpoints."""
    return torch.argsort(route(keys), stable=True)
