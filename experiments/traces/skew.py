"""How skewed lookups are: the zipf law P(rank) ~ (rank + q)^-s that they most likely follow.

Ranks are not known, only counts, and ranking rows by the counts one then fits finds skew in pure
chance. So one half of the batches ranks the rows, and the likelihood is that of the other half;
rows with equal counts share their ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.work.laws import Ids, Reals, integral

EXACT = 256  # masses of so many ranks are summed, those of the others integrated
MOST_S = 4.0
POINTS, ROUNDS, ZOOM = 11, 9, 0.45


@dataclass(frozen=True)
class Fit:
    """The most likely law, and by how much the lookups still differ from it."""

    s: float
    q: float
    misfit: float  # largest difference of the cumulative shares by rank, of the other half


@dataclass(frozen=True)
class Blocks:
    """Rows with equal counts in one half, most popular first: ranks, and lookups of the other."""

    last: Ids  # the block's last rank, from 1
    lookups: Ids

    @classmethod
    def of(cls, ranking: Ids, judged: Ids, rows: int) -> Blocks:
        """From each row's lookups in both halves; rows beyond those given have none in either."""
        counts, where = np.unique(-ranking, return_inverse=True)
        sizes = np.bincount(where, minlength=len(counts))
        lookups = np.bincount(where, judged, minlength=len(counts)).astype(np.int64)
        rest = rows - len(ranking)
        if rest > 0 and len(counts) and counts[-1] == 0:
            sizes[-1] += rest
        elif rest > 0:
            sizes, lookups = np.append(sizes, rest), np.append(lookups, 0)
        return cls(np.cumsum(sizes), lookups)


def fit(ranking: Ids, judged: Ids, rows: int) -> Fit | None:
    """From each row's lookups in two halves of a trace; None where there are too few to tell."""
    blocks = Blocks.of(ranking, judged, rows)
    if len(blocks.last) < 3 or blocks.lookups.sum() < 100:
        return None
    low, high = np.array([0.0, 0.0]), np.array([MOST_S, np.log1p(rows)])
    best = (0.0, 0.0)
    for _ in range(ROUNDS):
        s = np.linspace(low[0], high[0], POINTS)
        log_q = np.linspace(low[1], high[1], POINTS)
        likely = np.stack([_log_likelihood(blocks, s, float(np.expm1(t))) for t in log_q])
        at = np.unravel_index(int(likely.argmax()), likely.shape)
        best = (float(s[at[1]]), float(log_q[at[0]]))
        half = (high - low) * ZOOM / 2
        low = np.maximum(np.array(best) - half, 0.0)
        high = np.array(best) + half
    s_best, q_best = best[0], float(np.expm1(best[1]))
    mass = masses(blocks, np.array([s_best]), q_best)[0]
    seen = np.cumsum(blocks.lookups) / blocks.lookups.sum()
    return Fit(s_best, q_best, float(np.abs(np.cumsum(mass) - seen).max()))


def _log_likelihood(blocks: Blocks, s: Reals, q: float) -> Reals:
    """[s]: of the judged lookups, up to a constant; rows of a block are equally likely."""
    mass = masses(blocks, s, q)
    size = np.diff(blocks.last, prepend=0)
    return np.asarray((blocks.lookups * np.log(np.maximum(mass, 1e-300) / size)).sum(1))


def masses(blocks: Blocks, s: Reals, q: float) -> Reals:
    """[s, blocks]: what share of the law each block has."""
    ranks = np.arange(1, EXACT + 1, dtype=np.float64)
    exponent = s[:, None]
    head = np.cumsum(np.exp(-exponent * np.log(ranks + q)), axis=1)
    head = np.concatenate([np.zeros((len(s), 1)), head], axis=1)
    until = head[:, np.minimum(blocks.last, EXACT)]
    if blocks.last[-1] > EXACT:
        ends = np.maximum(blocks.last, EXACT) + 0.5
        tail = np.stack([integral(ends, float(x), q) for x in s])
        start = np.array([integral(np.array(EXACT + 0.5), float(x), q) for x in s])
        until = until + (tail - start[:, None])
    return np.diff(until, axis=1, prepend=0.0) / until[:, -1:]
