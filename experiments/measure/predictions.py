"""Measure a cell of kind predictions: time steps of a tensor train, and predict them.

The time of a step without a cache is a linear function of TERMS: a constant, the lookups, the
lookups of rows beyond a core's cache, the distinct rows, and the multiply-adds, which
`TableBatchedTTEmbeddingBags.work` counts from distinct rows and prefixes. With a cache of rows, the
lookups that miss it form such a step; the cache adds a constant, a time per lookup and a time per
distinct id (CACHE_TERMS). All constants are fitted to steps of uniform ids.
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
from experiments.measure.outcome import Outcome, describe
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.timing import statistics
from experiments.workloads import distributions

TERMS = ("step", "lookup", "lookup_beyond_cache", "row", "multiply_add")
TWO_TERMS = slice(TERMS.index("row"), None)  # distinct rows and multiply-adds
CACHE_TERMS = ("step", "lookup", "row")
NEAR_BYTES = 1 << 20  # bytes of computed rows that stay in a core's cache
BATCHES = 3  # distinct batches per kind of step
FITTED = (1 / 16, 1 / 4, 1.0)  # lookups of fitted steps ÷ lookups of predicted steps
REPEATS = (1, 8)  # lookups per id of fitted steps
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
        """Return the median of the samples."""
        return statistics.summarise([s for _, s in self.samples]).median


def predictions_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return the record of the only arm; `seconds` is not used.

    Unless the arm failed, it has the entries of `_Experiment.predicted`.
    """
    outcome, record = Outcome(cell.arms[0]), {}
    with outcome.catching():
        if session.device.type != "cpu":
            raise Unsupported("kind=predictions measures the CPU")
        experiment = _Experiment(cell, session)
        session.note(f"{cell.arms[0].key}|timing steps")
        _time_in_turns(experiment.steps, cell.options["rounds"], session.seed)
        record = experiment.predicted()
        outcome.measured.stop_reason = "predicted"
    return [describe(cell, outcome, session) | record]


class _Experiment:
    """The modules of a cell and their steps; steps of uniform ids predict the others."""

    def __init__(self, cell: Cell, session: Session) -> None:
        torch.manual_seed(session.seed)
        self.work, self.options = cell.workload, cell.options
        (self.rank,) = cell.options["ranks"]
        self.draw = np.random.default_rng(session.seed)
        sgd = emblib.optim.SGD(SGD_RATE)
        self.trains = {
            order: emblib.TableBatchedTTEmbeddingBags([self._spec(order)], sgd)
            for order in (AS_GIVEN, PERMUTED)
        }
        self.steps: list[TimedSteps] = []
        for share in (0.0, *self.options["cached"]):
            session.note(f"{cell.arms[0].key}|{share:g} of the rows cached")
            self._add(share)

    def _spec(self, order: str) -> emblib.TTSpec:
        ids: Any = "permuted" if order == PERMUTED else "as_given"
        ranks = (self.rank, self.rank)
        return emblib.TTSpec(self.work.E, self.work.D, ranks, ids=ids, seed=1).usable()

    def _add(self, share: float) -> None:
        """Add the fitted and the predicted steps of a module that caches a share of its rows."""
        orders = (PERMUTED,) if share else (AS_GIVEN, PERMUTED)
        for order in orders:
            module, num_cached = self._module(order, share)
            sizes = {
                (max(1, int(part * count) // self.work.L) * self.work.L, repeats)
                for count in self.options["lookups"]
                for part in FITTED
                for repeats in REPEATS
            }
            for lookups, repeats in sorted(sizes):
                ids = max(1, self.work.E if repeats == 1 else lookups // repeats)
                batches = [self._batch(lookups, 0.0, ids, spread=True) for _ in range(BATCHES)]
                self.steps.append(self._steps(order, module, num_cached, batches, {}))
            for lookups in self.options["lookups"]:
                for skew in self.options["skews"]:
                    batches = [self._batch(lookups, skew, self.work.E) for _ in range(BATCHES)]
                    point = {"rank": self.rank, "skew": skew, "order": order, "cached": share}
                    point["lookups"] = len(batches[0][0])
                    self.steps.append(self._steps(order, module, num_cached, batches, point))

    def _module(self, order: str, share: float) -> tuple[Any, int]:
        """Return trains that cache `share` of their rows, the first ones, and the number of these.

        Raises Wrong if other rows are cached.
        """
        if not share:
            return self.trains[order], 0
        num_cached = max(1, int(share * self.work.E))
        cache = emblib.TTCache(num_cached, emblib.RowEviction.DROP)
        bags = emblib.CachedTTEmbeddingBags([self._spec(order)], cache, emblib.optim.SGD(SGD_RATE))
        cached_ids = torch.arange(num_cached)
        for _ in range(2):
            _step(bags, (cached_ids, torch.tensor([0, num_cached])))
        bags.populate()
        if not torch.equal(bags.cached_ids(0).sort().values, cached_ids):
            raise Wrong("the cache does not store the ids that were looked up most")
        return bags, num_cached

    def _batch(self, lookups: int, skew: float, ids: int, *, spread: bool = False) -> Batch:
        """Draw `lookups` ids among `ids` different ones: [0, ids), of which 0 is the most frequent.

        With `spread`, the different ones are a random selection of all rows instead.
        """
        ids_drawn = distributions.zipf_ranks(self.draw, lookups, ids, skew) - 1
        if spread and ids < self.work.E:
            ids_drawn = self.draw.choice(self.work.E, ids, replace=False)[ids_drawn]
        offsets = torch.arange(0, lookups + 1, self.work.L)
        if int(offsets[-1]) < lookups:
            offsets = torch.cat([offsets, torch.tensor([lookups])])
        return torch.from_numpy(ids_drawn), offsets

    def _steps(
        self, order: str, module: Any, num_cached: int, batches: list[Batch], point: dict[str, Any]
    ) -> TimedSteps:
        """Return steps on `batches` of a module that caches the rows below `num_cached`.

        Their work is counted here: `terms` of the lookups that miss the cache, `cache_terms` of
        all. A `point` with facts makes them predicted steps, an empty one fitted steps.
        """
        terms, cache_terms, hits = [], [], []
        for ids, _ in batches:
            distinct = ids.unique()
            misses = ids[ids >= num_cached]
            work = self.trains[order].work(misses, torch.tensor([0, len(misses)]))[0]
            nbytes = max(1, work.rows * self.work.D * 4)
            far_misses = len(misses) * max(0.0, 1.0 - NEAR_BYTES / nbytes)
            products = work.forward + work.backward
            terms.append((1, len(misses), far_misses, work.rows, products))
            cache_terms.append((1, len(ids), len(distinct)))
            hits.append((1 - len(misses) / len(ids), 1 - work.rows / len(distinct)))
        costs = np.mean(cache_terms, 0)
        if point:
            hit_rate, row_hit_rate = np.mean(hits, 0)
            rows = float(costs[CACHE_TERMS.index("row")])
            point |= {"hit_rate": hit_rate, "row_hit_rate": row_hit_rate, "rows": rows}
        costs = costs if num_cached else np.zeros(0)
        return TimedSteps(module, batches, np.mean(terms, 0), costs, point)

    def predicted(self) -> Record:
        """Return the constants, and a point per predicted kind of step."""
        uncached_steps = [s for s in self.steps if not len(s.cache_terms)]
        fitted_steps = [s for s in uncached_steps if not s.point]
        terms = np.array([s.terms for s in fitted_steps])
        times = np.array([s.seconds for s in fitted_steps])
        constants = _fit(terms, times)
        two_constants = _fit(terms[:, TWO_TERMS], times)
        caches: dict[Any, np.ndarray] = {}  # constants by module
        for module in dict.fromkeys(s.module for s in self.steps if len(s.cache_terms)):
            fitted_steps = [s for s in self.steps if s.module is module and not s.point]
            remaining_s = np.array([s.seconds - s.terms @ constants for s in fitted_steps])
            weights = np.array([s.seconds for s in fitted_steps])
            terms = np.array([s.cache_terms for s in fitted_steps])
            caches[module] = _fit(terms, remaining_s, weights)

        def batch(steps: TimedSteps) -> tuple[Any, ...]:
            return tuple(steps.point[name] for name in ("skew", "order", "lookups"))

        uncached = {batch(s): s.seconds for s in uncached_steps if s.point}
        points = [
            {
                **s.point,
                "predicted_s": float(
                    s.terms @ constants + s.cache_terms @ caches.get(s.module, np.zeros(0))
                ),
                "two_terms_s": math.nan
                if len(s.cache_terms)
                else float(s.terms[TWO_TERMS] @ two_constants),
                "by_hits_s": (1 - s.point["hit_rate"]) * uncached[batch(s)],
                "samples": s.samples,
            }
            for s in self.steps
            if s.point
        ]
        by_share = [dict(zip(CACHE_TERMS, c.tolist(), strict=True)) for c in caches.values()]
        return {
            "constants": dict(zip(TERMS, constants.tolist(), strict=True)),
            "cache_constants": dict(zip(self.options["cached"], by_share, strict=True)),
            "points": points,
        }


def _fit(terms: np.ndarray, times: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return constants >= 0 of the least squared error ÷ `weights`, by default the times."""
    weights = times if weights is None else weights
    scale = terms.max(0).clip(min=1e-300)
    constants, _ = nnls(terms / scale / weights[:, None], times / weights)
    return np.asarray(constants) / scale


def _time_in_turns(steps: Sequence[TimedSteps], rounds: int, seed: int) -> None:
    """Time the steps in turns, in random order, after a round that warms up; add the samples.

    With one thread, times are processor times, else wall times.
    """
    one_thread = torch.get_num_threads() == 1
    clock: Callable[[], int] = time.process_time_ns if one_thread else time.perf_counter_ns
    order = random.Random(seed)
    for number in range(rounds + 1):
        for timed_steps in order.sample(list(steps), len(steps)):
            batch = timed_steps.batches[number % len(timed_steps.batches)]
            start = clock()
            _step(timed_steps.module, batch)
            if number:
                timed_steps.samples.append((number, (clock() - start) / 1e9))


def _step(module: Any, batch: Batch) -> None:
    module(*batch).sum().backward()
