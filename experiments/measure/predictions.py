"""Measure a cell of kind predictions: time steps of a tensor train, and predict their times.

The predicted time of a step is a sum; each summand is a count of work times a constant in seconds.
TERMS names the counts of work on the train: steps, lookups, lookups of rows beyond a core's cache,
distinct rows, and multiply-adds (`TableBatchedTTEmbeddingBags.work`). In a module with a row cache,
TERMS count only the lookups that miss it, and CACHE_TERMS are added: steps, lookups, and distinct
ids. The constants are fitted to other steps, of uniform ids.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import emblib
from experiments.config.sweep import Cell
from experiments.contenders.registry import Unsupported, WrongResult
from experiments.measure.outcome import Outcome, make_record
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.timing import statistics
from experiments.workloads import distributions

# Names of the counts and of their constants: seconds per step, per lookup, ...
TERMS = ("step", "lookup", "lookup_beyond_cache", "row", "multiply_add")
ROW_AND_PRODUCT_TERMS = slice(TERMS.index("row"), None)  # distinct rows and multiply-adds
CACHE_TERMS = ("step", "lookup", "row")
# Bytes of computed rows that stay in a core's cache: assumed, half of a 2 MiB L2 cache.
CORE_CACHE_BYTES = 1 << 20
BATCHES_PER_KIND = 3  # distinct batches per kind of step
# Lookups of fitted steps ÷ lookups of predicted steps: three sizes, to tell the constant per step
# from the times per lookup, none larger than what is predicted.
FITTED_SHARES = (1 / 16, 1 / 4, 1.0)
# Lookups per distinct id of fitted steps: two ratios, to tell the time of a lookup from that of a
# distinct row. 1 draws from the whole table, so ids may repeat.
LOOKUPS_PER_ID = (1, 8)
LEARNING_RATE = 1e-3
# Orders of ids, as stored in records. Ids are drawn by frequency, 0 most often; a permuted train
# maps them to random rows.
BY_FREQUENCY, PERMUTED = "by frequency", "permuted"

Batch = tuple[Tensor, Tensor]
"""Ids int64 `[L]`, and offsets of their bags, int64 `[B + 1]`."""


@dataclass(eq=False)
class TimedSteps:
    """Steps of one kind: their batches, their work, and their times.

    Attributes:
        module: module whose steps are timed.
        batches: batches; each round takes the next one.
        terms: counts of TERMS per step, mean over the batches, float64 [len(TERMS)].
        cache_terms: counts of CACHE_TERMS per step, float64 [len(CACHE_TERMS)]; [0] if no cache.
        facts: entry of `points` (`_Experiment.predict`) without times; {} for fitted steps.
        samples: step times as (round, seconds).
    """

    module: Any
    batches: list[Batch]
    terms: np.ndarray
    cache_terms: np.ndarray
    facts: dict[str, Any] = field(default_factory=dict)
    samples: list[tuple[int, float]] = field(default_factory=list)

    @property
    def is_predicted(self) -> bool:
        """Return whether the steps are predicted; else constants are fitted to them."""
        return bool(self.facts)

    @property
    def seconds(self) -> float:
        """Return the median of the sampled step times."""
        return statistics.summarise([sample_s for _, sample_s in self.samples]).median


def predictions_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return the record of the only arm, in a list.

    Unless the arm failed, the record has the entries of `_Experiment.predict`. `seconds` is not
    used: the option `rounds` sets the duration.
    """
    outcome, record = Outcome(cell.arms[0]), {}
    with outcome.catching():
        if session.device.type != "cpu":
            raise Unsupported("kind=predictions measures the CPU")
        experiment = _Experiment(cell, session)
        session.note(f"{cell.arms[0].key}|timing steps")
        _time_in_turns(experiment.steps, cell.options["rounds"], session.seed)
        record = experiment.predict()
        outcome.race_result.stop_reason = "predicted"
    return [make_record(cell, outcome, session) | record]


class _Experiment:
    """The modules of a cell, and their steps: fitted steps of uniform ids, and predicted steps."""

    def __init__(self, cell: Cell, session: Session) -> None:
        torch.manual_seed(session.seed)
        self.workload, self.options = cell.workload, cell.options
        (self.rank,) = cell.options["ranks"]
        self.rng = np.random.default_rng(session.seed)
        sgd = emblib.optim.SGD(LEARNING_RATE)
        self.trains = {
            order: emblib.TableBatchedTTEmbeddingBags([self._train_spec(order)], sgd)
            for order in (BY_FREQUENCY, PERMUTED)
        }
        self.steps: list[TimedSteps] = []
        for cached_share in (0.0, *self.options["cached"]):
            session.note(f"{cell.arms[0].key}|{cached_share:g} of the rows cached")
            self._add_steps(cached_share)

    def _train_spec(self, order: str) -> emblib.TTSpec:
        ids: Any = "permuted" if order == PERMUTED else "as_given"
        ranks = (self.rank, self.rank)
        return emblib.TTSpec(self.workload.E, self.workload.D, ranks, ids=ids, seed=1).usable()

    def _add_steps(self, cached_share: float) -> None:
        """Add the fitted and the predicted steps of a module that caches a share of its rows."""
        orders = (PERMUTED,) if cached_share else (BY_FREQUENCY, PERMUTED)
        for order in orders:
            module, num_cached = self._build_module(order, cached_share)
            fitted_sizes = {  # lookups, and lookups per id
                (
                    max(1, int(fitted_share * lookups) // self.workload.L) * self.workload.L,
                    lookups_per_id,
                )
                for lookups in self.options["lookups"]
                for fitted_share in FITTED_SHARES
                for lookups_per_id in LOOKUPS_PER_ID
            }
            for lookups, lookups_per_id in sorted(fitted_sizes):
                num_ids = self.workload.E
                if lookups_per_id > 1:
                    num_ids = min(num_ids, max(1, lookups // lookups_per_id))
                batches = [
                    self._draw_batch(lookups, 0.0, num_ids, from_all_rows=True)
                    for _ in range(BATCHES_PER_KIND)
                ]
                self.steps.append(self._make_steps(order, module, num_cached, batches, {}))
            for lookups in self.options["lookups"]:
                for skew in self.options["skews"]:
                    batches = [
                        self._draw_batch(lookups, skew, self.workload.E)
                        for _ in range(BATCHES_PER_KIND)
                    ]
                    facts = {
                        "rank": self.rank,
                        "skew": skew,
                        "order": order,
                        "cached": cached_share,
                        "lookups": lookups,
                    }
                    self.steps.append(self._make_steps(order, module, num_cached, batches, facts))

    def _build_module(self, order: str, cached_share: float) -> tuple[Any, int]:
        """Return a module that caches the rows of its first ids, and their number.

        `cached_share` is their share of all rows; 0 returns a train without a cache. Raise
        WrongResult if the module caches other rows.
        """
        if not cached_share:
            return self.trains[order], 0
        num_cached = max(1, int(cached_share * self.workload.E))
        cache = emblib.TTCache(num_cached, emblib.RowEviction.DROP)
        bags = emblib.CachedTTEmbeddingBags(
            [self._train_spec(order)], cache, emblib.optim.SGD(LEARNING_RATE)
        )
        cached_ids = torch.arange(num_cached)
        _train_step(bags, (cached_ids, torch.tensor([0, num_cached])))
        bags.populate()
        if not torch.equal(bags.cached_ids(0).sort().values, cached_ids):
            raise WrongResult("the cache does not store the ids that were looked up most")
        return bags, num_cached

    def _draw_batch(
        self, num_lookups: int, skew: float, num_ids: int, *, from_all_rows: bool = False
    ) -> Batch:
        """Draw `num_lookups` ids from [0, num_ids); with `skew`, smaller ids are more frequent.

        With `from_all_rows`, the ids are drawn from `num_ids` randomly selected rows of the table.
        Bags have `workload.L` lookups; the last bag may have fewer.
        """
        ids = distributions.zipf_ranks(self.rng, num_lookups, num_ids, skew) - 1
        if from_all_rows and num_ids < self.workload.E:
            ids = self.rng.choice(self.workload.E, num_ids, replace=False)[ids]
        offsets = torch.arange(0, num_lookups + 1, self.workload.L)
        if int(offsets[-1]) < num_lookups:
            offsets = torch.cat([offsets, torch.tensor([num_lookups])])
        return torch.from_numpy(ids), offsets

    def _make_steps(
        self, order: str, module: Any, num_cached: int, batches: list[Batch], facts: dict[str, Any]
    ) -> TimedSteps:
        """Return steps on `batches` of a module that caches the rows below `num_cached`.

        Lookups that miss the cache count in `terms`, all lookups in `cache_terms`. Empty `facts`
        make fitted steps; those of predicted steps get the further entries `rows` and hit rates.
        """
        terms, cache_terms, hit_rates = [], [], []
        for ids, _ in batches:
            distinct_ids = ids.unique()
            misses = ids[ids >= num_cached]
            work = self.trains[order].work(misses, torch.tensor([0, len(misses)]))[0]
            rows_nbytes = max(1, work.rows * self.workload.D * 4)
            lookups_beyond_cache = len(misses) * max(0.0, 1.0 - CORE_CACHE_BYTES / rows_nbytes)
            multiply_adds = work.forward + work.backward
            terms.append((1, len(misses), lookups_beyond_cache, work.rows, multiply_adds))
            cache_terms.append((1, len(ids), len(distinct_ids)))
            hit_rates.append((1 - len(misses) / len(ids), 1 - work.rows / len(distinct_ids)))
        mean_cache_terms = np.mean(cache_terms, 0)
        if facts:
            hit_rate, row_hit_rate = np.mean(hit_rates, 0)
            num_rows = float(mean_cache_terms[CACHE_TERMS.index("row")])
            facts = {**facts, "hit_rate": hit_rate, "row_hit_rate": row_hit_rate, "rows": num_rows}
        mean_cache_terms = mean_cache_terms if num_cached else np.zeros(0)
        return TimedSteps(module, batches, np.mean(terms, 0), mean_cache_terms, facts)

    def predict(self) -> Record:
        """Return entries of a record: the constants and the predicted steps. Steps must be timed.

        Returns:
            `constants`: seconds by name in TERMS. `cache_constants`: by cached share, seconds by
            name in CACHE_TERMS. `points`: an entry per predicted kind of step, with rank, skew,
            order, cached (share of rows) and lookups, which identify it; rows (distinct rows per
            batch); hit_rate and row_hit_rate (shares of lookups and of distinct rows); predicted_s,
            two_terms_s (rows and products alone; nan with a cache) and by_hits_s (uncached time ×
            lookups that miss), in seconds per step; and samples, (round, seconds).
        """
        uncached_steps = [step for step in self.steps if not len(step.cache_terms)]
        fitted_steps = [step for step in uncached_steps if not step.is_predicted]
        terms = np.array([step.terms for step in fitted_steps])
        times_s = np.array([step.seconds for step in fitted_steps])
        constants = _fit_constants(terms, times_s)
        row_and_product_constants = _fit_constants(terms[:, ROW_AND_PRODUCT_TERMS], times_s)
        cache_constants: dict[Any, np.ndarray] = {}  # constants by module
        for module in dict.fromkeys(step.module for step in self.steps if len(step.cache_terms)):
            cached_steps = [
                step for step in self.steps if step.module is module and not step.is_predicted
            ]
            unexplained_s = np.array(
                [step.seconds - step.terms @ constants for step in cached_steps]
            )
            measured_s = np.array([step.seconds for step in cached_steps])
            cache_terms = np.array([step.cache_terms for step in cached_steps])
            cache_constants[module] = _fit_constants(cache_terms, unexplained_s, measured_s)

        def batch_key(steps: TimedSteps) -> tuple[Any, ...]:
            return tuple(steps.facts[name] for name in ("skew", "order", "lookups"))

        uncached_s = {batch_key(step): step.seconds for step in uncached_steps if step.is_predicted}
        points = [
            {
                **step.facts,
                "predicted_s": float(
                    step.terms @ constants
                    + step.cache_terms @ cache_constants.get(step.module, np.zeros(0))
                ),
                "two_terms_s": math.nan
                if len(step.cache_terms)
                else float(step.terms[ROW_AND_PRODUCT_TERMS] @ row_and_product_constants),
                "by_hits_s": (1 - step.facts["hit_rate"]) * uncached_s[batch_key(step)],
                "samples": step.samples,
            }
            for step in self.steps
            if step.is_predicted
        ]
        cache_constants_of_shares = [
            dict(zip(CACHE_TERMS, constants_of_share.tolist(), strict=True))
            for constants_of_share in cache_constants.values()
        ]
        return {
            "constants": dict(zip(TERMS, constants.tolist(), strict=True)),
            "cache_constants": dict(
                zip(self.options["cached"], cache_constants_of_shares, strict=True)
            ),
            "points": points,
        }


def _fit_constants(
    terms: np.ndarray, times_s: np.ndarray, divisors: np.ndarray | None = None
) -> np.ndarray:
    """Return the constants >= 0 with the least sum of (error ÷ divisor)², float64 [counts].

    Args:
        terms: counts of each kind of step, [steps, counts].
        times_s: measured seconds, [steps].
        divisors: divisors of the errors, [steps]; None for the times, which makes errors relative.
    """
    from scipy.optimize import nnls  # slow to import; few processes fit constants

    divisors = times_s if divisors is None else divisors
    scales = terms.max(0).clip(min=1e-300)  # of the columns, which differ by orders of magnitude
    constants, _ = nnls(terms / scales / divisors[:, None], times_s / divisors)
    return np.asarray(constants) / scales


def _time_in_turns(steps: Sequence[TimedSteps], rounds: int, seed: int) -> None:
    """Time each kind of step once per round, in random order; append to the `samples` of `steps`.

    Round 0 warms up and is not timed; rounds 1 to `rounds` are. Times are processor times if torch
    has one thread, else wall times.
    """
    one_thread = torch.get_num_threads() == 1
    clock: Callable[[], int] = time.process_time_ns if one_thread else time.perf_counter_ns
    rng = random.Random(seed)
    for round_number in range(rounds + 1):
        for timed_steps in rng.sample(list(steps), len(steps)):
            batch = timed_steps.batches[round_number % len(timed_steps.batches)]
            start = clock()
            _train_step(timed_steps.module, batch)
            if round_number:
                timed_steps.samples.append((round_number, (clock() - start) / 1e9))


def _train_step(module: Any, batch: Batch) -> None:
    module(*batch).sum().backward()
