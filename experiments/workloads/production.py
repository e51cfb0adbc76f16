"""Production-like row ids: a distribution fitted to published counts of a 2022 trace.

Meta's dlrm_datasets has a trace of 788 tables with one batch of 131,072 samples. Its statistics
(embedding_bag/2022/locality_stats.txt) state the number of rows that were looked up once, twice, 3
to 4 times, ..., and their share of the lookups. Counts show the popularity of rows up to chance: a
row with two lookups may be twice as popular as a row with one, or only luckier. So the distribution
is the mixture of Poisson rates under which such counts are expected. Batches of any size and number
can be drawn from it; they keep looking up new rows, as the trace does (a third of its rows were
looked up once).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments.workloads.distributions import Ids, Reals

SOURCE = "dlrm_datasets, embedding_bag/2022/locality_stats.txt, fbgemm_t788_bs131072_0.pt"
TABLES, SAMPLES = 788, 131_072
LOOKUPS, DISTINCT = 1_405_163_864, 110_259_238
# Per bin: the edge (rows with more lookups than it, up to the next edge), the share of these rows
# among all rows, and their share of the lookups.
BINS: tuple[tuple[int, float, float], ...] = (
    (0, 0.342, 0.027),
    (1, 0.144, 0.023),
    (2, 0.149, 0.040),
    (4, 0.138, 0.068),
    (8, 0.112, 0.105),
    (16, 0.068, 0.120),
    (32, 0.029, 0.099),
    (64, 0.010, 0.070),
    (128, 0.004, 0.059),
    (256, 0.002, 0.054),
    (512, 0.001, 0.040),
    (1024, 0.001, 0.072),
    (2048, 0.000, 0.064),
    (4096, 0.000, 0.047),
    (8192, 0.000, 0.021),
    (16384, 0.000, 0.017),
    (32768, 0.000, 0.076),
)
EDGES = tuple(edge for edge, _, _ in BINS)
ROWS_SHARE = tuple(rows for _, rows, _ in BINS)
LOOKUPS_SHARE = tuple(lookups for _, _, lookups in BINS)

# Rates are expected lookups per published batch: from MIN_RATE to SAMPLES (0.5 · 2^18), in half
# octaves: 37 classes. The histograms leave both ends open: here a row with less than one lookup in
# two batches is never used, and no row occurs twice in a sample. (Then the 7.6 % of the lookups in
# the last bin belong to about 1,400 rows.)
MIN_RATE = 0.5
NUM_CLASSES = 1 + round(2 * math.log2(SAMPLES / MIN_RATE))
MIN_ROWS_SHARE = 0.004  # smaller published shares of rows have one digit only
FIT_ROUNDS = 4000


@dataclass(frozen=True)
class PopularityClasses:
    """Classes of equally popular rows, the least popular first.

    Attributes:
        rate: expected lookups of a row per published batch, [classes].
        rows: number of rows of the class ÷ distinct rows of the published batch, [classes].
    """

    rate: Reals
    rows: Reals

    @property
    def rows_per_distinct(self) -> float:
        """Return the rows of a table ÷ the distinct rows that a published batch looks up."""
        return float(self.rows.sum())


@cache
def popularity_classes() -> PopularityClasses:
    """Fit the rates: maximise the likelihood of the published shares (Richardson-Lucy steps)."""
    rates = MIN_RATE * 2.0 ** (np.arange(NUM_CLASSES) / 2)
    bins = np.stack(
        [expected_bins(float(r)) for r in rates], axis=2
    )  # [rows or lookups, bins, classes]
    # Per distinct row of the published batch; times class sizes, these are shares as published.
    rows, lookups = bins[0], bins[1] / (LOOKUPS / DISTINCT)
    has_two_digits = np.array(ROWS_SHARE) >= MIN_ROWS_SHARE
    expected_shares = np.concatenate([rows[has_two_digits], lookups])
    published_shares = np.concatenate(
        [np.array(ROWS_SHARE)[has_two_digits], np.array(LOOKUPS_SHARE)]
    )
    class_sizes = np.full(NUM_CLASSES, 1e-3)
    for _ in range(FIT_ROUNDS):
        class_sizes *= (
            (published_shares / (expected_shares * class_sizes).sum(1))
            @ expected_shares
            / expected_shares.sum(0)
        )
    # Six digits, so that machines that add up in another order still draw the same ids.
    return PopularityClasses(rates, np.array([float(f"{w:.6g}") for w in class_sizes]))


def expected_bins(rate: float) -> Reals:
    """Return, for a row of this rate, what its count contributes to each bin.

    The result is [2, bins]: probability that the row's count is in the bin, and expected lookups
    there.
    """
    radius = 12 * rate**0.5 + 12
    counts = np.arange(max(1, int(rate - radius)), int(rate + radius) + 1)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, counts[-1] + 1)))])
    probabilities_of_counts = np.exp(counts * np.log(rate) - rate - log_factorials[counts])
    bin_of_count = np.searchsorted(EDGES, counts) - 1
    num_bins = len(EDGES)
    return np.stack(
        [
            np.bincount(bin_of_count, probabilities_of_counts, num_bins),
            np.bincount(bin_of_count, probabilities_of_counts * counts, num_bins),
        ]
    )


@dataclass(frozen=True)
class RankSteps:
    """The distribution of ranks of a table, the most popular rank first, as a step function.

    Attributes:
        last: last rank of each step, counted from 1.
        mass: probability of all ranks of a step, which are equally likely.
    """

    last: Ids
    mass: Reals


@cache
def rank_steps(rows: int) -> RankSteps:
    """Return the distribution of ranks on a table of `rows` rows.

    Sort all rows by popularity and cut them into `rows` equal parts: rank r is as popular as part
    r. So on a small table a rank may stand for several classes.
    """
    classes = popularity_classes()
    row_share = np.cumsum((classes.rows / classes.rows.sum())[::-1])
    lookups = (classes.rows * classes.rate)[::-1]
    lookup_share = np.cumsum(lookups / lookups.sum())
    last_rank = np.rint(row_share * rows).astype(np.int64)
    last_rank[-1] = rows
    last_rank = np.unique(last_rank[last_rank > 0])
    lookups_up_to = np.interp(
        last_rank / rows, np.append(0.0, row_share), np.append(0.0, lookup_share)
    )
    return RankSteps(last_rank, np.diff(lookups_up_to / lookups_up_to[-1], prepend=0.0))


def draw_ranks(rng: np.random.Generator, count: int, rows: int) -> Ids:
    """Draw `count` independent ranks in 1..rows, int64."""
    table_steps = rank_steps(rows)
    mass_up_to = np.cumsum(table_steps.mass)
    draws = rng.random(count) * mass_up_to[-1]
    step = np.minimum(np.searchsorted(mass_up_to, draws, side="right"), len(mass_up_to) - 1)
    ranks_before = np.concatenate([[0], table_steps.last[:-1]])
    mass = table_steps.mass[step]
    position_in_step = (draws - (mass_up_to[step] - mass)) / mass
    ranks_in_step = table_steps.last[step] - ranks_before[step]
    return (
        ranks_before[step]
        + 1
        + np.clip((position_in_step * ranks_in_step).astype(np.int64), 0, ranks_in_step - 1)
    )


def probabilities(rows: int) -> Reals:
    """Return the probability of each rank, [rows], rank 1 first."""
    table_steps = rank_steps(rows)
    ranks_in_step = np.diff(table_steps.last, prepend=0)
    return np.repeat(table_steps.mass / ranks_in_step, ranks_in_step)


def published_lookups(rows: int) -> int:
    """Return the lookups of the published batch, scaled to a table of `rows` rows."""
    return round(rows / popularity_classes().rows_per_distinct * LOOKUPS / DISTINCT)


def histograms(counts: Ids) -> tuple[Reals, Reals]:
    """Return the share of rows and of lookups per bin, for rows with `counts` > 0 lookups each."""
    bin_of_row = np.searchsorted(EDGES, counts) - 1
    rows = np.bincount(bin_of_row, minlength=len(EDGES)) / max(1, len(counts))
    lookups = np.bincount(bin_of_row, counts, minlength=len(EDGES)) / max(1, int(counts.sum()))
    return rows, lookups
