"""Metrics of models that predict clicks, over all ranks: normalized entropy and grouped AUC.

They complement the metrics of torchmetrics, e.g. `BinaryAUROC`. Call `update` with each batch, then
`compute` on all ranks, which includes the batches of all ranks of the default process group.

Needs torchmetrics: `pip install torchmetrics`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from emblib.specs import check_bool

try:
    from torchmetrics import Metric
except ImportError as error:  # pragma: no cover - depends on the environment
    raise ImportError(
        "emblib.metrics needs torchmetrics, which is not installed: pip install torchmetrics"
    ) from error

__all__ = ["GroupedAUC", "NormalizedEntropy"]


class NormalizedEntropy(Metric):
    """Mean cross entropy of predictions ÷ the mean cross entropy of always predicting the mean.

    A model that predicts the mean label has 1; lower is better. `compute` returns a float64 scalar,
    NaN without examples or if all labels are 0 or all are 1.

    Args:
        from_logits: True if predictions are logits, False if they are probabilities.
        options: arguments of `torchmetrics.Metric`.

    Source: He et al., Practical Lessons from Predicting Clicks on Ads at Facebook (ADKDD 2014).

    Example:
        >>> from emblib.metrics import NormalizedEntropy
        >>> metric = NormalizedEntropy()
        >>> metric.update(torch.tensor([0.5, 0.5, 0.5, 0.5]), torch.tensor([0, 1, 1, 0]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    cross_entropy: Tensor  # float64 scalar, weighted sum over examples
    positive: Tensor  # float64 scalar, weighted sum of the labels
    total: Tensor  # float64 scalar, sum of the weights

    def __init__(self, *, from_logits: bool = False, **options: Any) -> None:
        check_bool("from_logits", from_logits)
        super().__init__(**options)
        self.from_logits = from_logits
        for name in ("cross_entropy", "positive", "total"):
            zero = torch.zeros((), dtype=torch.float64)
            self.add_state(name, zero, dist_reduce_fx="sum")

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch; waits for the device.

        Args:
            predictions: float `[N]`, logits or probabilities.
            labels: `[N]`, 0 or 1, or the share of clicks.
            weights: float `[N]`, weight of each example, not negative; None is 1.

        Raises:
            ValueError: `predictions` is not a vector, shapes differ, or a label or probability is
                outside of [0, 1] or NaN. NaN logits and negative weights are not checked.
        """
        _check_shapes(predictions, labels=labels, weights=weights)
        values, targets = predictions.detach().double(), labels.detach().double()
        if not bool(((targets >= 0) & (targets <= 1)).all()):
            raise ValueError("labels must be in [0, 1]: 0 or 1, or the share of clicks")
        if self.from_logits:
            losses = _cross_entropy_of_logits(values, targets)
        else:
            if not bool(((values >= 0) & (values <= 1)).all()):
                raise ValueError(
                    "predictions must be probabilities in [0, 1]; for logits make "
                    "NormalizedEntropy(from_logits=True)"
                )
            losses = functional.binary_cross_entropy(values, targets, reduction="none")
        scales = torch.ones_like(values) if weights is None else weights.detach().double()
        # An infinite loss times a weight of 0 would be NaN.
        self.cross_entropy += torch.where(scales == 0, 0.0, losses * scales).sum()
        self.positive += (targets * scales).sum()
        self.total += scales.sum()

    def compute(self) -> Tensor:
        """Return the normalized entropy of all examples so far, a scalar tensor."""
        rate = self.positive / self.total
        mean_label_entropy = torch.special.entr(rate) + torch.special.entr(1.0 - rate)
        cross_entropy = self.cross_entropy / self.total
        return torch.where(mean_label_entropy > 0, cross_entropy / mean_label_entropy, torch.nan)


class GroupedAUC(Metric):
    """Mean over groups, such as users, of the AUC within each group.

    Groups whose labels are all equal have no AUC and are left out. Tied predictions count half.
    All examples are stored until `reset`, 20 bytes each. `compute` returns a float64 scalar, NaN if
    no group has both labels.

    Args:
        by_examples: True weights each group by its number of examples in the mean, False all groups
            equally.
        options: arguments of `torchmetrics.Metric`.

    Source: Zhou et al., Deep Interest Network for Click-Through Rate Prediction (KDD 2018).

    Example:
        >>> from emblib.metrics import GroupedAUC
        >>> metric = GroupedAUC()
        >>> scores, labels = torch.tensor([0.1, 0.9, 0.4, 0.3]), torch.tensor([0, 1, 0, 1])
        >>> metric.update(scores, labels, torch.tensor([7, 7, 8, 8]))  # two users
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    predictions: list[Tensor]
    labels: list[Tensor]
    groups: list[Tensor]

    def __init__(self, *, by_examples: bool = True, **options: Any) -> None:
        check_bool("by_examples", by_examples)
        super().__init__(**options)
        self.by_examples = by_examples
        for name in _DTYPES:
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, labels: Tensor, groups: Tensor) -> None:
        """Add a batch.

        Args:
            predictions: float `[N]`, any scores.
            labels: `[N]`, 0 or 1; any number above 0 counts as 1.
            groups: integers `[N]`, the group of each example.

        Raises:
            ValueError: `predictions` is not a vector, shapes differ, or groups are not integers.
        """
        _check_shapes(predictions, labels=labels, groups=groups)
        if groups.is_floating_point() or groups.is_complex():
            raise ValueError(f"groups must be integers, got {groups.dtype}")
        self.predictions.append(predictions.detach().to(_DTYPES["predictions"]))
        self.labels.append(labels.detach().to(_DTYPES["labels"]))
        self.groups.append(groups.detach().to(_DTYPES["groups"]))

    def sync(self, *arguments: Any, **options: Any) -> None:
        """Gather the examples of all ranks, some of which may have none."""
        for name, dtype in _DTYPES.items():
            batches = getattr(self, name)
            if isinstance(batches, list) and not batches:
                batches.append(torch.empty(0, dtype=dtype, device=self.device))
        super().sync(*arguments, **options)

    def compute(self) -> Tensor:
        """Return the mean AUC of the groups, a scalar tensor.

        Raises:
            ValueError: a prediction is NaN, which has no rank, or a label is.
        """
        predictions, labels, groups = (_concatenate(getattr(self, name)) for name in _DTYPES)
        if bool(predictions.isnan().any()):
            raise ValueError("predictions must not be NaN")
        if bool(labels.isnan().any()):
            raise ValueError("labels must not be NaN: leave out examples without a label")
        order = predictions.argsort(stable=True)
        order = order[groups[order].argsort(stable=True)]
        predictions, is_positive, groups = predictions[order], labels[order] > 0, groups[order]
        _, group_of, sizes = groups.unique_consecutive(return_inverse=True, return_counts=True)
        ranks = _tied_ranks(predictions, group_of, sizes)
        num_positives, rank_sums = (
            torch.zeros(len(sizes), dtype=torch.float64, device=ranks.device).index_add_(
                0, group_of, values
            )
            for values in (is_positive.double(), ranks * is_positive)
        )
        pairs = num_positives * (sizes - num_positives)
        has_both = pairs > 0
        auc = (rank_sums - num_positives * (num_positives + 1) / 2)[has_both] / pairs[has_both]
        weights = sizes[has_both].double() if self.by_examples else torch.ones_like(auc)
        return (auc * weights).sum() / weights.sum()


_DTYPES = {"predictions": torch.float64, "labels": torch.float32, "groups": torch.int64}


def _cross_entropy_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each example; an infinite logit of the right sign has none.

    `binary_cross_entropy_with_logits` multiplies that logit by 0, which is NaN.
    """
    positive = torch.where(labels > 0, labels * functional.logsigmoid(logits), 0.0)
    negative = torch.where(labels < 1, (1.0 - labels) * functional.logsigmoid(-logits), 0.0)
    return -(positive + negative)


def _concatenate(batches: Tensor | list[Tensor]) -> Tensor:
    """Concatenate the batches; after a sync they are one tensor already."""
    if isinstance(batches, Tensor):
        return batches
    return torch.cat(batches) if batches else torch.empty(0, device="cpu")


def _tied_ranks(predictions: Tensor, group_of: Tensor, sizes: Tensor) -> Tensor:
    """Return the rank of each prediction in its group, from 1; ties get their mean rank.

    `predictions` `[n]`, of any dtype, must be sorted by group, then by value. `group_of` `[n]` is
    the number of the group from 0 on, `sizes` the predictions per group; ranks are float64 `[n]`.
    """
    is_first_of_tie = torch.ones_like(predictions, dtype=torch.bool)
    is_first_of_tie[1:] = (predictions[1:] != predictions[:-1]) | (group_of[1:] != group_of[:-1])
    tie_of = is_first_of_tie.cumsum(0) - 1
    counts = torch.bincount(tie_of)
    last_ranks = counts.cumsum(0)  # 1 + the position of the last of a tie
    starts = (sizes.cumsum(0) - sizes)[group_of]
    return (last_ranks - (counts - 1) / 2)[tie_of].double() - starts


def _check_shapes(predictions: Tensor, **optional_tensors: Tensor | None) -> None:
    """Raise ValueError unless predictions are a vector, and the tensors None or of its shape."""
    if predictions.dim() != 1:
        raise ValueError(
            f"predictions must be a vector [N], got {tuple(predictions.shape)}; flatten them"
        )
    for name, tensor in optional_tensors.items():
        if tensor is not None and tensor.shape != predictions.shape:
            raise ValueError(
                f"{name} must have the shape of predictions, {tuple(predictions.shape)}, got "
                f"{tuple(tensor.shape)}"
            )
