"""Keys as numbers: the dtypes they come in, and their hash."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.ops.random import new_seed
from emblib.specs import check_count

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xFF51AFD7ED558CCD - (1 << 64)
_SECOND = 0xC4CEB9FE1A85EC53 - (1 << 64)


def _fold(x: Tensor, bits: int) -> Tensor:
    """`x ^ x >> bits` of unsigned numbers."""
    return x ^ (x >> bits & (1 << 64 - bits) - 1)


def hash_key_of(seed: int, name: str) -> int:
    """The number that the hash of a table's keys depends on, signed 64 bits, from seed and name.

    Who does not know the seed can make no keys that crowd into one bucket.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def hash_keys_of(
    seed: int | None, names: Sequence[str], hash_seeds: Sequence[int] | None = None
) -> list[int]:
    """Return the hash key of each table.

    Args:
        seed: of all tables; None draws one from torch's generator.
        names: of the tables.
        hash_seeds: one per table, instead of `seed`.

    Raises:
        ValueError: another number of seeds than of tables, or one below 0.
    """
    if hash_seeds is None:
        hash_seeds = [new_seed() if seed is None else seed] * len(names)
    if len(hash_seeds) != len(names):
        raise ValueError(f"hash_seeds must be one per table = {len(names)}, got {len(hash_seeds)}")
    seeds = [check_count("hash_seeds", one, least=0) for one in hash_seeds]
    return [hash_key_of(one, name) for one, name in zip(seeds, names, strict=True)]


def mix(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 behind an addition, as in csrc/core/mix.h; one to one."""
    x = _fold(x + GOLDEN, 33)
    x = _fold(x * _FIRST, 33)
    return _fold(x * _SECOND, 33)


def as_keys(keys: Tensor) -> Tensor:
    """Keys as the tables hold them: int64, uint64 bit for bit.

    Raises:
        TypeError: another dtype.
    """
    if not isinstance(keys, Tensor):
        raise TypeError(
            f"keys must be a tensor of int64, uint64 or int32, got {type(keys).__name__}; "
            "torch.tensor(keys) makes one of ints"
        )
    if keys.dtype == torch.uint64:
        return keys.view(torch.int64)
    if keys.dtype == torch.int32:
        return keys.to(torch.int64)
    if keys.dtype != torch.int64:
        raise TypeError(f"keys must be int64, uint64 or int32, got {keys.dtype}")
    return keys
