"""Train a small DLRM with tables of any method, and score its predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from experiments.config.sweep import PLAIN
from experiments.quality.data import Clicks, counts
from experiments.quality.methods import METHODS, NETWORK_RATE, Method, MethodTask

HIDDEN = 64  # width of the network's hidden layer
CHUNK_SIZE = 8192  # samples per prediction
SEED_STEP = 1000  # seed of the order of an epoch: SEED_STEP * plan.seed + epoch


@dataclass(frozen=True)
class TrainingPlan:
    """The training of a model.

    Attributes:
        dim: columns of a row.
        batch: samples per step.
        epochs: maximum number of epochs, at least 1. Training ends after the first epoch that does
            not lower the validation loss; the epoch before it counts.
        rates: learning rates of tables, at least one; the one with the least validation loss
            counts.
        large: minimum share of all rows of a table that is compressed.
        seed: seed of the order of samples, and of torch's generator when a model is built.
    """

    dim: int
    batch: int
    epochs: int
    rates: tuple[float, ...]
    large: float
    seed: int


@dataclass(frozen=True)
class Scores:
    """Scores of predictions: area under the ROC curve, and mean log loss in nats."""

    auc: float
    loss: float


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, its scores on test and validation samples, and its rate and epoch.

    Scores are those of `epoch`, counted from 1. If the next epoch was not better, `model` has
    trained it too.
    """

    test: Scores
    valid: Scores
    rate: float
    epoch: int
    model: Model


class Model(nn.Module):
    """A DLRM: rows and a projection of the numbers, products of all pairs, a network on top.

    A method stores the large tables; the others are plain.

    Attributes:
        rows: method of the large tables.
        large: fields of the large tables.
        small: fields of the other tables.
        others: plain tables of these; None without any.
        optimizers: optimizers of everything that backward does not update.
    """

    pairs: Tensor

    def __init__(self, data: Clicks, plan: TrainingPlan, rows: Method) -> None:
        super().__init__()
        self.rows: Method = rows
        self.large = data.large(plan.large)
        self.small = [f for f in range(len(data.rows)) if f not in self.large]
        plain_task = MethodTask(
            tuple(data.rows[f] for f in self.small), plan.dim, 1.0, rows.task.learning_rate
        )
        self.others = METHODS[PLAIN](plain_task) if self.small else None
        self.numbers = nn.Linear(data.numbers.size(1), plan.dim)
        count = 1 + len(data.rows)
        self.register_buffer("pairs", torch.triu_indices(count, count, 1), persistent=False)
        inputs = plan.dim + count * (count - 1) // 2
        self.top = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        network = [*self.numbers.parameters(), *self.top.parameters()]
        self.optimizers = [torch.optim.Adam(network, NETWORK_RATE)]

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return the log-odds `[B]` of ids `[B, F]` and numbers `[B, C]`."""
        dense = self.numbers(numbers)
        fields = [dense[:, None], self.rows(ids[:, self.large])]
        if self.others is not None:
            fields.append(self.others(ids[:, self.small]))
        vectors = torch.cat(fields, 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        first_fields, second_fields = self.pairs.unbind()
        odds: Tensor = self.top(torch.cat([dense, products[:, first_fields, second_fields]], 1))
        return odds.squeeze(1)

    def step(self, ids: Tensor, numbers: Tensor, labels: Tensor) -> None:
        """Train on a batch."""
        loss = nn.functional.binary_cross_entropy_with_logits(self(ids, numbers), labels)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


def task_of(data: Clicks, plan: TrainingPlan, share: float, rate: float) -> MethodTask:
    """Return the large tables of the data as the task of a method."""
    large = data.large(plan.large)
    rows = tuple(data.rows[f] for f in large)
    return MethodTask(rows, plan.dim, share, rate, counts(data, large))


def build(data: Clicks, plan: TrainingPlan, method: str, task: MethodTask) -> Model:
    """Return an untrained model; equal plans start with equal networks. Seeds torch's generator.

    `task` is that of `task_of` for the same data and plan.
    """
    torch.manual_seed(plan.seed)
    rows = METHODS[method](task)
    torch.manual_seed(plan.seed + 1)
    return Model(data, plan, rows)


def fit(
    data: Clicks, plan: TrainingPlan, make: Callable[[float], Model], note: Callable[[str], object]
) -> TrainedModel:
    """Train a model per learning rate; return the one with the least validation loss.

    Args:
        data: samples.
        plan: training.
        make: function that returns an untrained model for a learning rate of tables.
        note: function that is called with the present activity.
    """
    trained = []
    for rate in plan.rates:
        note(f"training, rate {rate:g}")
        trained.append(_fit_once(data, plan, make(rate), rate))
    # Nothing is less than nan, the loss after a rate that was too high.
    return min(trained, key=lambda one: (math.isnan(one.valid.loss), one.valid.loss))


def _fit_once(data: Clicks, plan: TrainingPlan, model: Model, rate: float) -> TrainedModel:
    best: TrainedModel | None = None
    for epoch in range(plan.epochs):
        model.train()
        for batch in batches(data, plan, epoch):
            model.step(data.ids[batch], data.numbers[batch], data.labels[batch])
        valid = scores(data, data.valid, predict(model, data, data.valid))
        if best is not None and not valid.loss < best.valid.loss:
            break
        test = scores(data, data.test, predict(model, data, data.test))
        best = TrainedModel(test, valid, rate, epoch + 1, model)
    assert best is not None
    return best


def batches(data: Clicks, plan: TrainingPlan, epoch: int) -> Iterator[Tensor]:
    """Yield the indices of the training samples of each step of an epoch; the last may be shorter.

    Their order depends on `plan.seed` and `epoch`, not on the model.
    """
    generator = torch.Generator().manual_seed(SEED_STEP * plan.seed + epoch)
    order = torch.randperm(data.ends[0], generator=generator)
    yield from order.split(plan.batch)


@torch.no_grad()
def predict(model: Model, data: Clicks, part: slice) -> Tensor:
    """Return the log-odds of the samples of a part."""
    model.eval()
    ids, numbers = data.ids[part].split(CHUNK_SIZE), data.numbers[part].split(CHUNK_SIZE)
    return torch.cat([model(i, n) for i, n in zip(ids, numbers, strict=True)])


def scores(data: Clicks, part: slice, odds: Tensor) -> Scores:
    """Return the scores of log-odds `odds` [samples of the part] for the samples of a part."""
    labels = data.labels[part]
    loss = nn.functional.binary_cross_entropy_with_logits(odds.double(), labels.double())
    return Scores(auc(labels.cpu().numpy(), odds.cpu().numpy()), float(loss))


def auc(labels: np.ndarray, odds: np.ndarray) -> float:
    """Return the share of (positive, negative) pairs in the right order; ties count as half.

    `labels` are 0 and 1; the result is nan without one of both.
    """
    ranks = stats.rankdata(odds)
    positive = int((labels == 1).sum())
    negative = len(labels) - positive
    if not positive or not negative:
        return float("nan")
    pairs = ranks[labels == 1].sum() - positive * (positive + 1) / 2
    return float(pairs / positive / negative)


def oracle(data: Clicks) -> Scores | None:
    """Return the scores of the true probabilities on the test samples; None if unknown."""
    if data.chances is None:
        return None
    return scores(data, data.test, torch.logit(data.chances[data.test]))


def step_samples(
    models: Sequence[Model], data: Clicks, plan: TrainingPlan, rounds: int, clock: Callable[[], int]
) -> list[list[tuple[int, float]]]:
    """Return [(round, seconds), ...] per model; all models step on the batch of a round.

    `clock` is in nanoseconds; a first round warms up.
    """
    generator = torch.Generator().manual_seed(plan.seed)
    samples: list[list[tuple[int, float]]] = [[] for _ in models]
    for model in models:
        model.train()
    stream = _endless_batches(data, plan)
    for number in range(rounds + 1):
        batch = next(stream)
        inputs = data.ids[batch], data.numbers[batch], data.labels[batch]
        for model_index in torch.randperm(len(models), generator=generator).tolist():
            start = clock()
            models[model_index].step(*inputs)
            if number:
                samples[model_index].append((number, (clock() - start) / 1e9))
    return samples


def _endless_batches(data: Clicks, plan: TrainingPlan) -> Iterator[Tensor]:
    epoch = 0
    while True:
        yield from (
            b for b in batches(data, plan, epoch) if len(b) == min(plan.batch, data.ends[0])
        )
        epoch += 1
