"""Metrics against their definitions in plain Python, on one rank and over several."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchmetrics.classification import BinaryAUROC

from emblib.metrics import GroupedAUC, NormalizedEntropy
from emblib.sharding import RankGroup
from tests.sharding import worlds


def examples(seed: int, count: int = 200) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Predictions with ties, labels, groups of which some have one label only, and weights."""
    generator = torch.Generator().manual_seed(seed)
    predictions = torch.randint(0, 12, (count,), generator=generator) / 12
    labels = (torch.rand(count, generator=generator) < 0.3).long()
    groups = torch.randint(-5, 30, (count,), generator=generator) * 10**12
    return predictions, labels, groups, torch.rand(count, generator=generator)


def entropy(predictions: Tensor, labels: Tensor, weights: Tensor) -> float:
    total = sum(weights.tolist())
    rate = sum(w * y for w, y in zip(weights.tolist(), labels.tolist(), strict=True)) / total
    loss = sum(
        -w * math.log(p if y else 1 - p)
        for p, y, w in zip(predictions.tolist(), labels.tolist(), weights.tolist(), strict=True)
    )
    return loss / total / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def grouped_auc(predictions: Tensor, labels: Tensor, groups: Tensor, *, by_examples: bool) -> float:
    weighted, weights = 0.0, 0.0
    for group in groups.unique():
        own = groups == group
        clicked, others = predictions[own & (labels == 1)], predictions[own & (labels == 0)]
        if not len(clicked) or not len(others):
            continue
        wins = (clicked[:, None] > others).sum() + 0.5 * (clicked[:, None] == others).sum()
        weight = float(own.sum()) if by_examples else 1.0
        weighted += weight * float(wins) / (len(clicked) * len(others))
        weights += weight
    return weighted / weights


@pytest.mark.parametrize("weighted", ["weighted", "equal"])
@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_normalized_entropy(kind: str, weighted: str) -> None:
    metric = NormalizedEntropy(from_logits=kind == "logits")
    predictions, labels, _, weights = examples(0)
    predictions = predictions.clamp(0.01, 0.99)
    if weighted == "equal":
        weights = torch.ones(len(labels))
    given = predictions.logit() if kind == "logits" else predictions
    for part in torch.arange(len(labels)).split(64):
        scales = weights[part] if weighted == "weighted" else None
        metric.update(given[part], labels[part], scales)
    want = entropy(predictions, labels, weights)
    assert float(metric.compute()) == pytest.approx(want, rel=1e-6)


def test_infinite_logits() -> None:
    """The loss is 0 for the right sign, and infinite for the wrong one unless its weight is 0."""
    infinite, rest = [math.inf, -math.inf], [0.0, 0.0]
    logits, labels = torch.tensor(infinite + rest), torch.tensor([1.0, 0.0, 1.0, 0.0])
    metric = NormalizedEntropy(from_logits=True)
    metric.update(logits, labels)
    assert float(metric.compute()) == pytest.approx(0.5)
    metric.update(-logits, labels, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert float(metric.compute()) == pytest.approx(4 / 6)
    metric.update(-logits, labels)
    assert float(metric.compute()) == math.inf
    metric.update(torch.tensor([math.nan]), torch.ones(1))
    assert metric.compute().isnan()


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_equal_labels_have_no_entropy(label: float) -> None:
    metric = NormalizedEntropy()
    metric.update(torch.tensor([0.2, 0.4]), torch.full((2,), label))
    assert metric.compute().isnan()


@pytest.mark.parametrize("by_examples", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_grouped_auc(seed: int, by_examples: bool) -> None:
    metric = GroupedAUC(by_examples=by_examples)
    predictions, labels, groups, _ = examples(seed)
    for part in torch.arange(len(labels)).split(64):
        metric.update(predictions[part], labels[part], groups[part])
    metric.update(predictions[:0], labels[:0], groups[:0])
    want = grouped_auc(predictions, labels, groups, by_examples=by_examples)
    assert float(metric.compute()) == pytest.approx(want, rel=1e-12)


def test_one_group_has_the_auc_of_torchmetrics() -> None:
    metric, (predictions, labels, _, _) = GroupedAUC(), examples(7)
    metric.update(predictions, labels, torch.zeros_like(labels))
    want = BinaryAUROC()(predictions, labels)
    assert float(metric.compute()) == pytest.approx(float(want), rel=1e-6)


def test_groups_with_one_label_have_no_auc() -> None:
    metric = GroupedAUC()
    metric.update(torch.rand(4), torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 2, 2]))
    assert metric.compute().isnan()


def test_wrong_input_is_refused() -> None:
    scores, labels = torch.rand(3), torch.zeros(3)
    with pytest.raises(ValueError, match=r"labels must have the shape of predictions, \(3,\)"):
        NormalizedEntropy().update(scores, labels[:2])
    with pytest.raises(ValueError, match="must be a vector"):
        GroupedAUC().update(scores[None], labels[None], labels[None])
    with pytest.raises(ValueError, match=r"groups must be integers, got torch\.float32"):
        GroupedAUC().update(scores, labels, labels)
    with pytest.raises(ValueError, match=r"groups must be integers, got torch\.complex64"):
        GroupedAUC().update(scores, labels, labels.to(torch.complex64))
    with pytest.raises(ValueError, match="from_logits=True"):
        NormalizedEntropy().update(scores + 2, labels)
    with pytest.raises(ValueError, match=r"labels must be in \[0, 1\]"):
        NormalizedEntropy(from_logits=True).update(scores, labels + 5)
    metric = GroupedAUC()
    metric.update(scores * torch.nan, labels, labels.long())
    with pytest.raises(ValueError, match="predictions must not be NaN"):
        metric.compute()
    metric = GroupedAUC()
    metric.update(scores, labels * torch.nan, labels.long())
    with pytest.raises(ValueError, match="labels must not be NaN"):
        metric.compute()


def _over_ranks(ranks: RankGroup, sizes: list[int]) -> tuple[float, float, float]:
    """Metrics where rank r has sizes[r] examples; without any it never calls `update`."""
    first, count = sum(sizes[: ranks.rank]), sizes[ranks.rank]
    predictions, labels, groups, weights = (
        column[first : first + count] for column in examples(3, sum(sizes))
    )
    entropies = NormalizedEntropy(process_group=ranks.group)
    grouped = GroupedAUC(process_group=ranks.group)
    if count:
        entropies.update(predictions.clamp(0.01, 0.99), labels, weights)
        grouped.update(predictions, labels, groups)
    results = float(entropies.compute()), float(grouped.compute())
    return *results, float(grouped.compute())  # computing again changes nothing


@pytest.mark.parametrize("sizes", [[120, 80], [200, 0], [1, 149, 50]], ids=str)
def test_ranks_have_the_metrics_of_all_examples(sizes: list[int]) -> None:
    predictions, labels, groups, weights = examples(3, sum(sizes))
    want = (
        entropy(predictions.clamp(0.01, 0.99), labels, weights),
        grouped_auc(predictions, labels, groups, by_examples=True),
    )
    for found in worlds.run(len(sizes), _over_ranks, sizes):
        assert found == pytest.approx((*want, want[1]), rel=1e-6)
