"""Measure a cell of kind predictions: time steps of a tensor train, and predict them.

The predicted time of a step is a sum of terms; each is a count times a constant. TERMS count the
work on the train: steps, lookups, lookups of rows beyond a core's cache, distinct rows, and
multiply-adds (`TableBatchedTTEmbeddingBags.work`). A module that caches rows counts only lookups
that miss its cache in TERMS, and adds CACHE_TERMS: steps, lookups, and distinct ids. The constants
are fitted to separate steps of uniform ids.
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
from scipy.optimize import nnls
from torch import Tensor

import emblib
from experiments.config.sweep import Cell
from experiments.contenders.registry import Unsupported, Wrong
from experiments.measure.outcome import Outcome, make_record
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.timing import statistics
from experiments.workloads import distributions

# Names of the constants: seconds per step, per lookup, ...
TERMS = ("step", "lookup", "lookup_beyond_cache", "row", "multiply_add")
TWO_TERMS = slice(TERMS.index("row"), None)  # distinct rows and multiply-adds
CACHE_TERMS = ("step", "lookup", "row")
CORE_CACHE_BYTES = 1 << 20  # bytes of computed rows that stay in a core's cache
BATCHES_PER_STEP = 3  # distinct batches per kind of step
FITTED_SHARES = (1 / 16, 1 / 4, 1.0)  # lookups of fitted steps ÷ lookups of predicted steps
# Lookups per distinct id of fitted steps; 1 draws from the whole table, so ids may repeat.
LOOKUPS_PER_ID = (1, 8)
SGD_RATE = 1e-3  # learning rate of the steps
AS_GIVEN, PERMUTED = "by frequency", "permuted"

Batch = tuple[Tensor, Tensor]
"""Ids int64 `[L]` and offsets."""


@dataclass(eq=False)
class TimedSteps:
    """Steps of one kind: their batches, their work, and their times.

    Attributes:
        module: module whose steps are timed.
        batches: batches, which are taken in turns.
        terms: work of a batch on the cores, mean over the batches; columns as `TERMS`.
        cache_terms: work of a batch on the cache, mean over the batches; columns as `CACHE_TERMS`,
            empty without a cache.
        point: facts that identify a predicted step; empty for a fitted one.
        samples: samples of the step time: (round, seconds).
    """

    module: Any
    batches: list[Batch]
    terms: np.ndarray
    cache_terms: np.ndarray
    point: dict[str, Any] = field(default_factory=dict)
    samples: list[tuple[int, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Return the median of the sampled step times."""
        return statistics.summarise([s for _, s in self.samples]).median


def predictions_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return the record of the only arm; `seconds` is not used.

    Unless the arm failed, it has the entries of `_Experiment.predict`.
    """
    outcome, record = Outcome(cell.arms[0]), {}
    with outcome.catching():
        if session.device.type != "cpu":
            raise Unsupported("kind=predictions measures the CPU")
        experiment = _Experiment(cell, session)
        session.note(f"{cell.arms[0].key}|timing steps")
        _time_in_turns(experiment.steps, cell.options["rounds"], session.seed)
        record = experiment.predict()
        outcome.measured.stop_reason = "predicted"
    return [make_record(cell, outcome, session) | record]


class _Experiment:
    """The modules of a cell and their steps: fitted ones of uniform ids, and predicted ones."""

    def __init__(self, cell: Cell, session: Session) -> None:
        torch.manual_seed(session.seed)
        self.workload, self.options = cell.workload, cell.options
        (self.rank,) = cell.options["ranks"]
        self.rng = np.random.default_rng(session.seed)
        sgd = emblib.optim.SGD(SGD_RATE)
        self.trains = {
            order: emblib.TableBatchedTTEmbeddingBags([self._train_spec(order)], sgd)
            for order in (AS_GIVEN, PERMUTED)
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
        orders = (PERMUTED,) if cached_share else (AS_GIVEN, PERMUTED)
        for order in orders:
            module, num_cached = self._build_module(order, cached_share)
            batch_sizes = {
                (
                    max(1, int(fitted_share * lookups) // self.workload.L) * self.workload.L,
                    lookups_per_id,
                )
                for lookups in self.options["lookups"]
                for fitted_share in FITTED_SHARES
                for lookups_per_id in LOOKUPS_PER_ID
            }
            for lookups, lookups_per_id in sorted(batch_sizes):
                num_ids = self.workload.E
                if lookups_per_id > 1:
                    num_ids = min(num_ids, max(1, lookups // lookups_per_id))
                batches = [
                    self._draw_batch(lookups, 0.0, num_ids, from_all_rows=True)
                    for _ in range(BATCHES_PER_STEP)
                ]
                self.steps.append(self._make_steps(order, module, num_cached, batches, {}))
            for lookups in self.options["lookups"]:
                for skew in self.options["skews"]:
                    batches = [
                        self._draw_batch(lookups, skew, self.workload.E)
                        for _ in range(BATCHES_PER_STEP)
                    ]
                    point = {
                        "rank": self.rank,
                        "skew": skew,
                        "order": order,
                        "cached": cached_share,
                    }
                    point["lookups"] = len(batches[0][0])
                    self.steps.append(self._make_steps(order, module, num_cached, batches, point))

    def _build_module(self, order: str, cached_share: float) -> tuple[Any, int]:
        """Return a module that caches the first `cached_share` of its rows, and their number.

        Raise Wrong if the module caches other rows.
        """
        if not cached_share:
            return self.trains[order], 0
        num_cached = max(1, int(cached_share * self.workload.E))
        cache = emblib.TTCache(num_cached, emblib.RowEviction.DROP)
        bags = emblib.CachedTTEmbeddingBags(
            [self._train_spec(order)], cache, emblib.optim.SGD(SGD_RATE)
        )
        cached_ids = torch.arange(num_cached)
        for _ in range(2):
            _train_step(bags, (cached_ids, torch.tensor([0, num_cached])))
        bags.populate()
        if not torch.equal(bags.cached_ids(0).sort().values, cached_ids):
            raise Wrong("the cache does not store the ids that were looked up most")
        return bags, num_cached

    def _draw_batch(
        self, num_lookups: int, skew: float, num_ids: int, *, from_all_rows: bool = False
    ) -> Batch:
        """Draw `num_lookups` ids from [0, num_ids); with `skew`, smaller ids are more frequent.

        With `from_all_rows`, they are drawn from `num_ids` randomly selected rows of the table.
        """
        ids_drawn = distributions.zipf_ranks(self.rng, num_lookups, num_ids, skew) - 1
        if from_all_rows and num_ids < self.workload.E:
            ids_drawn = self.rng.choice(self.workload.E, num_ids, replace=False)[ids_drawn]
        offsets = torch.arange(0, num_lookups + 1, self.workload.L)
        if int(offsets[-1]) < num_lookups:
            offsets = torch.cat([offsets, torch.tensor([num_lookups])])
        return torch.from_numpy(ids_drawn), offsets

    def _make_steps(
        self, order: str, module: Any, num_cached: int, batches: list[Batch], point: dict[str, Any]
    ) -> TimedSteps:
        """Return steps on `batches` of a module that caches the rows below `num_cached`.

        Lookups that miss the cache count in `terms`, all lookups in `cache_terms`. An empty `point`
        makes fitted steps. Any other makes predicted steps; their `rows` and hit rates are added.
        """
        terms, cache_terms, hit_rates = [], [], []
        for ids, _ in batches:
            distinct_ids = ids.unique()
            misses = ids[ids >= num_cached]
            work = self.trains[order].work(misses, torch.tensor([0, len(misses)]))[0]
            nbytes = max(1, work.rows * self.workload.D * 4)
            far_misses = len(misses) * max(0.0, 1.0 - CORE_CACHE_BYTES / nbytes)
            multiply_adds = work.forward + work.backward
            terms.append((1, len(misses), far_misses, work.rows, multiply_adds))
            cache_terms.append((1, len(ids), len(distinct_ids)))
            hit_rates.append((1 - len(misses) / len(ids), 1 - work.rows / len(distinct_ids)))
        mean_cache_terms = np.mean(cache_terms, 0)
        if point:
            hit_rate, row_hit_rate = np.mean(hit_rates, 0)
            num_rows = float(mean_cache_terms[CACHE_TERMS.index("row")])
            point |= {"hit_rate": hit_rate, "row_hit_rate": row_hit_rate, "rows": num_rows}
        mean_cache_terms = mean_cache_terms if num_cached else np.zeros(0)
        return TimedSteps(module, batches, np.mean(terms, 0), mean_cache_terms, point)

    def predict(self) -> Record:
        """Return the constants, and a point per predicted kind of step; the steps must be timed.

        Returns:
            `constants` in seconds by name in TERMS, `cache_constants` by cached share, `points`.
        """
        uncached_steps = [s for s in self.steps if not len(s.cache_terms)]
        fitted_steps = [s for s in uncached_steps if not s.point]
        terms = np.array([s.terms for s in fitted_steps])
        times_s = np.array([s.seconds for s in fitted_steps])
        constants = _fit_constants(terms, times_s)
        two_constants = _fit_constants(terms[:, TWO_TERMS], times_s)
        cache_constants: dict[Any, np.ndarray] = {}  # constants by module
        for module in dict.fromkeys(s.module for s in self.steps if len(s.cache_terms)):
            fitted_steps = [s for s in self.steps if s.module is module and not s.point]
            remaining_s = np.array([s.seconds - s.terms @ constants for s in fitted_steps])
            weights = np.array([s.seconds for s in fitted_steps])
            terms = np.array([s.cache_terms for s in fitted_steps])
            cache_constants[module] = _fit_constants(terms, remaining_s, weights)

        def batch_of(steps: TimedSteps) -> tuple[Any, ...]:
            return tuple(steps.point[name] for name in ("skew", "order", "lookups"))

        uncached_s = {batch_of(s): s.seconds for s in uncached_steps if s.point}
        points = [
            {
                **s.point,
                "predicted_s": float(
                    s.terms @ constants + s.cache_terms @ cache_constants.get(s.module, np.zeros(0))
                ),
                "two_terms_s": math.nan
                if len(s.cache_terms)
                else float(s.terms[TWO_TERMS] @ two_constants),
                "by_hits_s": (1 - s.point["hit_rate"]) * uncached_s[batch_of(s)],
                "samples": s.samples,
            }
            for s in self.steps
            if s.point
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
    terms: np.ndarray, times: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Return the constants >= 0 with the least sum of (error ÷ weight)²; None: times as weights."""
    weights = times if weights is None else weights
    scale = terms.max(0).clip(min=1e-300)
    constants, _ = nnls(terms / scale / weights[:, None], times / weights)
    return np.asarray(constants) / scale


def _time_in_turns(steps: Sequence[TimedSteps], rounds: int, seed: int) -> None:
    """Time each kind of step once per round, in random order, and add the samples.

    A first round warms up. Times are processor times if torch has one thread, else wall times.
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
