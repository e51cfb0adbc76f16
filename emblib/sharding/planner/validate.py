"""Predictions beside measurements: steps of real collections under plans, in turns.

All ranks call `compare`. A step is lookup, exchange, backward and update of every collection of the
model, on uniform ids with the pooling factors that the planner was told. Plans take turns within a
round, so that what else runs on the machine meets all of them, and a step takes as long as its
slowest rank.
"""

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.jagged import KeyedJaggedTensor
from emblib.sharding.groups_of_ranks import Ranks
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.planner.planner import Planner
from emblib.sharding.planner.work import Work, works_of


class Point(NamedTuple):
    """One plan: seconds of a step as predicted, and as measured in each round."""

    name: str
    predicted_s: float
    samples_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        """The least: what the machine does, not what else ran on it."""
        return min(self.samples_s)


def compare(
    planner: Planner,
    module: nn.Module,
    plans: Mapping[str, ShardingPlan],
    ranks: Ranks,
    *,
    rounds: int = 30,
    seed: int = 0,
) -> list[Point]:
    """Measure steps of a model's collections under plans; the same on every rank."""
    steps = {}
    for name, plan in plans.items():
        steps[name] = _steps(planner, module, plan, ranks, seed)
    samples: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(rounds + 2):
        for name, step in steps.items():
            seconds = _one(step, ranks)
            if number >= 2:  # the first ones warm up
                samples[name].append(seconds)
    predicted = {name: planner.predict(module, plan).step_s for name, plan in plans.items()}
    return [Point(name, predicted[name], tuple(own)) for name, own in samples.items()]


def rank_correlation(points: Sequence[Point]) -> float:
    """Spearman's, of predictions with measurements."""
    predicted = _ranked([point.predicted_s for point in points])
    measured = _ranked([point.measured_s for point in points])
    return statistics.correlation(predicted, measured)


def batch_of(works: Sequence[Work], seed: int) -> KeyedJaggedTensor:
    """Uniform ids for the tables of one collection, as many as they were said to get."""
    generator = torch.Generator().manual_seed(seed)
    keys, values, lengths = [], [], []
    for work in works:
        each = work.ids / work.num_features
        for key in work.config.feature_names:
            if key in keys:
                continue  # one feature of several tables
            length = _lengths(each, work.batch, generator)
            keys.append(key)
            lengths.append(length)
            size = (int(length.sum()),)
            values.append(torch.randint(work.config.num_embeddings, size, generator=generator))
    ids = torch.cat(values)
    weights = torch.ones(ids.numel()) if any(work.is_weighted for work in works) else None
    return KeyedJaggedTensor(keys, ids, weights, lengths=torch.cat(lengths))


def _lengths(mean: float, batch: int, generator: torch.Generator) -> Tensor:
    """`mean` ids a bag: where that is no whole number, some bags have one more."""
    whole = int(mean)
    more = torch.rand(batch, generator=generator) < mean - whole
    return whole + more.long()


class _Step(NamedTuple):
    """One collection under one plan, its batch, and the gradient of its output."""

    collection: Any
    batch: KeyedJaggedTensor
    gradients: list[Tensor]


def _steps(
    planner: Planner, module: nn.Module, plan: ShardingPlan, ranks: Ranks, seed: int
) -> list[_Step]:
    works = works_of(module, planner.batch_size, planner.constraints)
    steps = []
    for path in dict.fromkeys(work.path for work in works):
        own = [work for work in works if work.path == path]
        source = copy.deepcopy(module.get_submodule(path))
        collection = _sharded(source, plan[path], ranks, pooled=own[0].config.pooled)
        batch = batch_of(own, seed + ranks.rank).to(ranks.device)
        outputs = [torch.ones_like(out) * 1e-3 for out in _outputs(collection(batch))]
        steps.append(_Step(collection, batch, outputs))
    return steps


def _sharded(source: Any, plan: Any, ranks: Ranks, *, pooled: bool) -> Any:
    if pooled:
        from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection

        return ShardedEmbeddingBagCollection(source, plan, ranks)
    from emblib.sharding.sharded_sequences import ShardedEmbeddingCollection

    return ShardedEmbeddingCollection(source, plan, ranks)


def _outputs(result: Any) -> list[Tensor]:
    """The tensors of a KeyedTensor, or of a dict of JaggedTensors."""
    if hasattr(result, "length_per_key"):
        return [result.values()]
    return [jagged.values() for jagged in result.values()]


def _one(steps: Sequence[_Step], ranks: Ranks) -> float:
    """Seconds of a step, of the slowest rank."""
    ranks.barrier()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    start = time.perf_counter()
    for step in steps:
        outputs = _outputs(step.collection(step.batch))
        torch.autograd.backward(outputs, step.gradients)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    own = time.perf_counter() - start
    return max(ranks.gather_objects(own))


def _ranked(values: Sequence[float]) -> list[float]:
    """Positions in order, equal values sharing theirs."""
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]
