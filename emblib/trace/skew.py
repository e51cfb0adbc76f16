"""Skew of the lookups of a table, and the rates of a cache or a smaller table that follow from it.

`IdSkew` has groups of ids of about equal frequency, so that a table of any number of rows takes
some hundred numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ZIPF = 1.05  # exponent of the assumed skew of ids without a trace
_NUM_SINGLES = 128  # first ids, or counts, that are a group each; not measured
_NUM_STEPS = 128  # steps in the logarithm of an id that are a group each; not measured
_STEPS_PER_E = 16  # steps in the logarithm of a count, so that a group spans some 6 %; not measured
_NUM_GRID_POINTS = 120  # of the numerical integration, evenly spaced in log t; not measured
_LOG_BEFORE, _LOG_AFTER = 9, 4  # log t from 9 below -log(max share) to 4 above -log(min share)
_NUM_BISECTIONS = 60  # halvings of an interval: more than a float64 resolves
_MIN_FACTOR = 1e-60  # products of smaller factors are denormal numbers, which are slow


@dataclass(frozen=True, eq=False)
class IdSkew:
    """Distribution of the lookups of a table over its ids.

    Args:
        shares: share of all lookups of one id of each group, float64 `[G]`, descending. So
            `shares @ sizes` is 1, or 0 without lookups.
        sizes: number of ids in each group, float64 `[G]`.
    """

    shares: Tensor
    sizes: Tensor

    @classmethod
    def of_counts(cls, counts: Tensor) -> IdSkew:
        """Return the skew of ids that were looked up `counts` >= 0 times, `[rows]`; rows >= 1."""
        values, sizes = counts.detach().cpu().double().unique(return_counts=True)
        # Each small count is a group; larger counts that differ by a few per cent form one.
        steps = (_STEPS_PER_E * values.clamp(min=1e-9).log()).round()
        group_numbers = steps.unique(return_inverse=True)[1]
        group_numbers = torch.where(
            values <= _NUM_SINGLES, values, _NUM_SINGLES + 1.0 + group_numbers
        )
        group_numbers = group_numbers.unique(return_inverse=True)[1]
        group_sizes = torch.zeros(int(group_numbers[-1]) + 1, dtype=torch.float64, device="cpu")
        lookups = group_sizes.index_add(0, group_numbers, values * sizes)
        group_sizes.index_add_(0, group_numbers, sizes.double())
        shares = lookups / group_sizes / max(float(lookups.sum()), 1.0)
        return cls(shares.flip(0), group_sizes.flip(0))

    @classmethod
    def zipf(cls, rows: int, exponent: float = ZIPF) -> IdSkew:
        """Return the skew of `rows` >= 1 ids; id n has a share proportional to n^-exponent.

        Ids above some 128 have the share of the middle id of their group.
        """
        single_ids = torch.arange(1, min(rows, _NUM_SINGLES) + 1, dtype=torch.float64, device="cpu")
        min_log_id, max_log_id = math.log(len(single_ids) + 1), math.log(rows + 1)
        steps = (
            torch.linspace(min_log_id, max_log_id, _NUM_STEPS, dtype=torch.float64, device="cpu")
            .exp()
            .round()
        )
        bounds = torch.cat([single_ids, steps]).unique()  # first id of each group, then rows + 1
        sizes = bounds.diff()
        weights = (bounds[:-1] + (sizes - 1) / 2) ** -exponent
        return cls(weights / (weights @ sizes), sizes)

    def miss_rate(self, rows: int) -> float:
        """Return the share of lookups of other ids than the `rows` most used; 1 without lookups.

        So it is the miss rate of a cache that always has the most used rows; `hit_rate` is that of
        an LRU cache, and the two do not add up to 1.
        """
        num_before = self.sizes.cumsum(0) - self.sizes
        num_cached = (rows - num_before).clamp(min=0.0).minimum(self.sizes)
        return max(0.0, 1.0 - float(num_cached @ self.shares))

    def hit_rate(self, rows: int) -> float:
        """Estimate the hit rate of a warm LRU cache of `rows` rows; 1 without lookups.

        This is Che's approximation. An id of share s is in the cache if it was looked up in the
        last t lookups, which has the probability 1 - exp(-s t). The number t is chosen so that
        `rows` ids are expected to be in the cache.
        """
        is_used = self.shares > 0
        shares, sizes = self.shares[is_used], self.sizes[is_used]
        if not len(shares) or rows >= float(sizes.sum()):
            return 1.0
        min_lookups, max_lookups = 0.0, 1.0
        while float(sizes @ -torch.expm1(-shares * max_lookups)) < rows:
            min_lookups, max_lookups = max_lookups, 2.0 * max_lookups
        for _ in range(_NUM_BISECTIONS):
            num_lookups = (min_lookups + max_lookups) / 2
            is_below = float(sizes @ -torch.expm1(-shares * num_lookups)) < rows
            min_lookups, max_lookups = (
                (num_lookups, max_lookups) if is_below else (min_lookups, num_lookups)
            )
        return float((sizes * shares) @ -torch.expm1(-shares * max_lookups))

    def shared_update_rate(self, rows: int) -> float:
        """Estimate the share of a row's updates that are by other ids, if ids hash to `rows` rows.

        `rows` is at least 1; without lookups the result is 0. The result is the expectation, over
        lookups and hashes, of o / (s + o), where s is the share of an id, and o the sum of the
        shares of the other ids in its row. Here 1 / (s + o) is the integral of exp(-(s + o) t) over
        t. The expectation of exp(-o t) is a product over all other ids, each of which is in the row
        with probability 1 / rows.
        """
        is_used = self.shares > 0
        if not is_used.any():
            return 0.0
        decay, steps = self._decay
        shares, sizes = self.shares[is_used], self.sizes[is_used]
        factors = decay.log() if rows == 1 else torch.log1p((decay - 1.0) / rows)
        # The expected value of exp(-o t), then that of s / (s + o).
        mean_decay = (sizes @ factors - factors).clamp(min=math.log(_MIN_FACTOR)).exp()
        unshared = (decay * mean_decay) @ steps * shares  # s / (s + o) by group
        return min(max(0.0, 1.0 - float((sizes * shares) @ unshared)), 1.0)

    @cached_property
    def _decay(self) -> tuple[Tensor, Tensor]:
        """Return exp(-s t) on a grid of T values t, `[used groups, T]`, and the steps dt, `[T]`.

        Values below `_MIN_FACTOR` are raised to it.
        """
        shares = self.shares[self.shares > 0]
        min_log_t = -math.log(float(shares.max())) - _LOG_BEFORE
        max_log_t = -math.log(float(shares.min())) + _LOG_AFTER
        grid = torch.linspace(
            min_log_t, max_log_t, _NUM_GRID_POINTS, dtype=torch.float64, device="cpu"
        ).exp()
        decay = torch.outer(-shares, grid).exp().clamp(min=_MIN_FACTOR)
        return decay, grid * (max_log_t - min_log_t) / (_NUM_GRID_POINTS - 1)
