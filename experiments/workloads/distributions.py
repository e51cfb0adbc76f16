"""Random row ids, uniform or Zipf-Mandelbrot, drawn in memory that does not grow with the rows.

Rank r of 1 to `num_rows` has a probability proportional to (r + q)^-s, with s >= 0 and q > -1;
neither is checked. Equal generators and counts give equal ids. `permute` then maps each rank to a
row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Reals = NDArray[np.float64]

_MAX_TABLE_ROWS = 4096


def zipf_ranks(
    rng: np.random.Generator, count: int, num_rows: int, s: float, q: float = 0.0
) -> Ids:
    """Draw `count` ranks in 1..num_rows, int64 [count], with P(rank) ~ (rank + q)^-s.

    With s = 0 they are uniform. Otherwise the method is rejection-inversion (Hörmann & Derflinger
    1996): draw from the continuous density with the same exponent, round, and accept most draws.
    Exact up to rounding of float64.
    """
    if s == 0.0 or num_rows == 1:
        return rng.integers(1, num_rows + 1, count, dtype=np.int64)
    low = integral(np.array(1.5), s, q) - _mass(np.array(1.0), s, q)
    high = integral(np.array(num_rows + 0.5), s, q)
    ranks = np.empty(count, np.int64)
    num_filled = 0
    while num_filled < count:
        draws = high + rng.random(count - num_filled) * (low - high)
        candidate_ranks = np.clip(np.rint(_integral_inverse(draws, s, q)), 1, num_rows)
        is_accepted = draws >= integral(candidate_ranks + 0.5, s, q) - _mass(candidate_ranks, s, q)
        accepted_ranks = candidate_ranks[is_accepted].astype(np.int64)
        ranks[num_filled : num_filled + len(accepted_ranks)] = accepted_ranks
        num_filled += len(accepted_ranks)
    return ranks


def zipf_probabilities(num_rows: int, s: float, q: float = 0.0) -> Reals:
    """Return the probability of each rank, float64 [num_rows], rank 1 first."""
    mass = (np.arange(1, num_rows + 1, dtype=np.float64) + q) ** -s
    return mass / mass.sum()


def _mass(x: Reals, s: float, q: float) -> Reals:
    return np.exp(-s * np.log(x + q))


def integral(x: Reals, s: float, q: float) -> Reals:
    """Return, for each x, the antiderivative of (x + q)^-s that is 0 at x = 1 - q.

    It is accurate near s = 1 too.
    """
    log = np.log(x + q)
    t = (1.0 - s) * log
    return log if s == 1.0 else log * np.where(np.abs(t) < 1e-12, 1.0, np.expm1(t) / (t + (t == 0)))


def _integral_inverse(y: Reals, s: float, q: float) -> Reals:
    if s == 1.0:
        return np.exp(y) - q
    t = np.maximum((1.0 - s) * y, -1.0 + 1e-16)
    return np.exp(np.log1p(t) / (1.0 - s)) - q


def permute(ranks: Ids, num_rows: int, seed: int) -> Ids:
    """Map ranks 1..num_rows to ids 0..num_rows-1 by a seeded bijection.

    A cycle-walked Feistel network permutes the numbers of 2 * `half_bits` bits;
    results beyond the rows are mapped again until they are row numbers. Returns a new array; the
    range of `ranks` is not checked. Only small tables use a shuffled array, of 8 bytes per row.
    """
    if num_rows <= _MAX_TABLE_ROWS:
        return _permutation(num_rows, seed)[ranks - 1]
    half_bits, keys = _network_parameters(num_rows, seed)
    ids = _feistel((ranks - 1).astype(np.uint64), half_bits, keys)
    while (is_outside := ids >= num_rows).any():
        ids[is_outside] = _feistel(ids[is_outside], half_bits, keys)
    return ids.astype(np.int64)


@functools.lru_cache(maxsize=128)
def _permutation(num_rows: int, seed: int) -> Ids:
    """Return the id of each rank, [num_rows]; with few rows this is cheaper than mapping draws."""
    half_bits, keys = _network_parameters(num_rows, seed)
    successors = _feistel(np.arange(1 << 2 * half_bits, dtype=np.uint64), half_bits, keys).astype(
        np.int64
    )
    ids = successors[:num_rows]
    while (is_outside := ids >= num_rows).any():
        ids = np.where(is_outside, successors[ids], ids)
    return ids


def _network_parameters(num_rows: int, seed: int) -> tuple[int, NDArray[np.uint64]]:
    """Return the bits of each half of a number and the keys of the rounds."""
    half_bits = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    return half_bits, np.random.default_rng(seed).integers(1, 2**63, 4, dtype=np.uint64)


def _feistel(
    values: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permute numbers of 2 * `half_bits` bits; each round mixes one half into the other."""
    mask = np.uint64((1 << half_bits) - 1)
    high_bits, low_bits = values >> np.uint64(half_bits), values & mask
    for key in keys:
        mixed_bits = (low_bits + np.uint64(1)) * (key | np.uint64(1))
        mixed_bits ^= mixed_bits >> np.uint64(29)
        mixed_bits *= np.uint64(0xBF58476D1CE4E5B9)
        high_bits, low_bits = low_bits, high_bits ^ ((mixed_bits >> np.uint64(32)) & mask)
    return (high_bits << np.uint64(half_bits)) | low_bits


def describe_distribution(params: Mapping[str, Any]) -> str:
    """Return in words the distribution of ids of a record's `params`."""
    match params["distribution"]:
        case "uniform":
            return "uniform ids"
        case "production":
            return "production-like ids"
        case "trace":
            return f"trace {Path(params['file']).name} (sha256 {params['sha256'][:12]})"
    return f"zipf s={params['s']:g} q={params['q']:g}"
