"""Production-like row ids, drawn from a distribution fitted to published counts of a 2022 trace.

Meta's dlrm_datasets has a trace of 788 tables with one batch of 131,072 samples. Its statistics
(embedding_bag/2022/locality_stats.txt) state the number of rows that were looked up once, twice, 3
to 4 times, ..., and their share of the lookups. Counts depend on chance too: a row with two lookups
may be twice as popular as a row with one, or only luckier. So the distribution is the mixture of
Poisson rates under which such counts are expected. Batches of any size and number can be drawn from
it; they keep looking up new rows, as the trace does (a third of its rows were looked up once).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments.workloads.distributions import Ids, Reals

SOURCE = "dlrm_datasets, embedding_bag/2022/locality_stats.txt, fbgemm_t788_bs131072_0.pt"
NUM_TABLES, NUM_SAMPLES = 788, 131_072
NUM_LOOKUPS, NUM_DISTINCT_ROWS = 1_405_163_864, 110_259_238
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

# Classes of equally popular rows, the least popular first. LOOKUP_RATES are the expected lookups of
# a row per published batch, from 0.5 to NUM_SAMPLES in half octaves. The histograms leave both ends
# open: here a row with less than one lookup in two batches is never used, and no row occurs twice
# in a sample. (Then the 7.6 % of the lookups in the last bin belong to about 1,400 rows.)
# CLASS_ROWS are the rows of a class ÷ distinct rows of the published batch: the most likely ones
# for the published shares, which tests/experiments/workloads/test_production.py fits again.
CLASS_ROWS: Reals = np.array(
    [
        *(0.813359, 0.124555, 0.0261172, 0.0133917, 0.0255478, 0.105733, 0.164378, 0.0524245),
        *(0.0379646, 0.0761201, 0.0517614, 0.0305486, 0.0233998, 0.0150049, 0.00577124),
        *(0.00602862, 0.00244184, 0.00166524, 0.00230554, 0.00071336, 0.000513544, 0.000292815),
        *(0.000324438, 0.000353231, 0.000234341, 0.000132852, 9.29009e-05, 5.12125e-05),
        *(2.72457e-05, 8.62464e-06, 6.82362e-06, 4.41365e-06, 3.56783e-06),
        *(2.71136e-06, 2.71136e-06, 2.71136e-06, 2.71136e-06),
    ]
)
LOOKUP_RATES: Reals = 0.5 * 2.0 ** (np.arange(len(CLASS_ROWS)) / 2)
ROWS_PER_DISTINCT = float(CLASS_ROWS.sum())  # rows of a table ÷ distinct rows of a published batch


@dataclass(frozen=True)
class RankSteps:
    """The distribution of ranks of a table, the most popular rank first, as a step function.

    Attributes:
        last_ranks: last rank of each step, counted from 1.
        masses: probability of all ranks of a step, which are equally likely.
    """

    last_ranks: Ids
    masses: Reals


@cache
def rank_steps(num_rows: int) -> RankSteps:
    """Return the distribution of ranks of a table of `num_rows` >= 1 rows.

    Sort the rows of all classes by popularity and divide them into `num_rows` equal groups: rank r
    is as popular as group r, but that a class ends with a whole rank. So on a small table one rank
    may cover several classes. Results are cached: do not change them.
    """
    row_share = np.cumsum((CLASS_ROWS / CLASS_ROWS.sum())[::-1])
    lookups = (CLASS_ROWS * LOOKUP_RATES)[::-1]
    lookup_share = np.cumsum(lookups / lookups.sum())
    last_rank = np.rint(row_share * num_rows).astype(np.int64)
    last_rank[-1] = num_rows
    last_rank = np.unique(last_rank[last_rank > 0])
    lookups_up_to = np.interp(
        last_rank / num_rows, np.append(0.0, row_share), np.append(0.0, lookup_share)
    )
    return RankSteps(last_rank, np.diff(lookups_up_to / lookups_up_to[-1], prepend=0.0))


def draw_ranks(rng: np.random.Generator, count: int, num_rows: int) -> Ids:
    """Draw `count` independent ranks in 1..rows, int64 [count]."""
    table_steps = rank_steps(num_rows)
    mass_up_to = np.cumsum(table_steps.masses)
    draws = rng.random(count) * mass_up_to[-1]
    step_of_draw = np.minimum(np.searchsorted(mass_up_to, draws, side="right"), len(mass_up_to) - 1)
    ranks_before = np.concatenate([[0], table_steps.last_ranks[:-1]])
    mass_of_step = table_steps.masses[step_of_draw]
    position_in_step = (draws - (mass_up_to[step_of_draw] - mass_of_step)) / mass_of_step
    ranks_in_step = table_steps.last_ranks[step_of_draw] - ranks_before[step_of_draw]
    return (
        ranks_before[step_of_draw]
        + 1
        + np.clip((position_in_step * ranks_in_step).astype(np.int64), 0, ranks_in_step - 1)
    )


def probabilities(num_rows: int) -> Reals:
    """Return the probability of each rank, float64 [rows], rank 1 first."""
    table_steps = rank_steps(num_rows)
    ranks_in_step = np.diff(table_steps.last_ranks, prepend=0)
    return np.repeat(table_steps.masses / ranks_in_step, ranks_in_step)


def published_lookups(num_rows: int) -> int:
    """Return the number of lookups of the published batch, scaled to a table of `num_rows` rows."""
    return round(num_rows / ROWS_PER_DISTINCT * NUM_LOOKUPS / NUM_DISTINCT_ROWS)


def histograms(counts: Ids) -> tuple[Reals, Reals]:
    """Return the shares of rows and of lookups in each bin, float64 [bins] each.

    `counts` are the lookups of each row, int64 [rows], > 0.
    """
    bin_of_row = np.searchsorted(EDGES, counts) - 1
    row_shares = np.bincount(bin_of_row, minlength=len(EDGES)) / max(1, len(counts))
    lookup_shares = np.bincount(bin_of_row, counts, minlength=len(EDGES)) / max(
        1, int(counts.sum())
    )
    return row_shares, lookup_shares
