"""Train a small DLRM with tables of any method, and say how well it predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from experiments.config.sweep import PLAIN
from experiments.quality.data import Clicks, counts
from experiments.quality.methods import METHODS, NETWORK_RATE, MethodTask, Rows

HIDDEN = 64  # of the network's hidden layer
CHUNK_SIZE = 8192  # samples predicted at a time


@dataclass(frozen=True)
class TrainingPlan:
    """How a model is trained.

    Attributes:
        dim: dim of rows.
        batch: samples of a step.
        epochs: maximum number of epochs; the epoch with the least loss on the validation samples
            counts.
        rates: learning rates of tables to choose from, likewise.
        large: share of all rows from which on a table is made smaller.
        seed: seed of initial values and of the order of samples.
    """

    dim: int
    batch: int
    epochs: int
    rates: tuple[float, ...]
    large: float
    seed: int


@dataclass(frozen=True)
class Scores:
    """How well a model predicts: area under the ROC curve, and mean loss in nats."""

    auc: float
    loss: float


@dataclass(frozen=True)
class TrainedModel:
    """A trained model: its scores on the test samples, and the choices that led to them."""

    test: Scores
    valid: Scores
    rate: float
    epoch: int
    model: Model


class Model(nn.Module):
    """A DLRM: rows and numbers, products of all pairs of them, and a network on top.

    Large tables are those of a method; all others are plain.
    """

    pairs: Tensor

    def __init__(self, data: Clicks, plan: TrainingPlan, rows: Rows) -> None:
        super().__init__()
        self.rows: Rows = rows
        self.large = data.large(plan.large)
        self.small = [f for f in range(len(data.rows)) if f not in self.large]
        rest = MethodTask(tuple(data.rows[f] for f in self.small), plan.dim, 1.0, rows.task.rate)
        self.others = METHODS[PLAIN](rest) if self.small else None
        self.numbers = nn.Linear(data.numbers.size(1), plan.dim)
        count = 1 + len(data.rows)
        self.register_buffer("pairs", torch.triu_indices(count, count, 1), persistent=False)
        inputs = plan.dim + count * (count - 1) // 2
        self.top = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        network = [*self.numbers.parameters(), *self.top.parameters()]
        self.optimizers = [torch.optim.Adam(network, NETWORK_RATE), *rows.optimizers]

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return the log-odds `[B]`."""
        dense = self.numbers(numbers)
        fields = [dense[:, None], self.rows(ids[:, self.large])]
        if self.others is not None:
            fields.append(self.others(ids[:, self.small]))
        vectors = torch.cat(fields, 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        one, other = self.pairs.unbind()
        odds: Tensor = self.top(torch.cat([dense, products[:, one, other]], 1))
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
    """Return what a method has to make small."""
    large = data.large(plan.large)
    rows = tuple(data.rows[f] for f in large)
    return MethodTask(rows, plan.dim, share, rate, counts(data, large))


def build(data: Clicks, plan: TrainingPlan, method: str, task: MethodTask) -> Model:
    """Return a model with fresh tables; equal plans start with equal networks."""
    torch.manual_seed(plan.seed)
    rows = METHODS[method](task)
    torch.manual_seed(plan.seed + 1)
    return Model(data, plan, rows)


def fit(
    data: Clicks, plan: TrainingPlan, make: Callable[[float], Model], note: Callable[[str], object]
) -> TrainedModel:
    """Train once per learning rate, and return the model of the least loss in validation."""
    fits = []
    for rate in plan.rates:
        note(f"training, rate {rate:g}")
        fits.append(_fit_once(data, plan, make(rate), rate))
    return min(fits, key=lambda one: one.valid.loss)


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
    """Yield the samples of each step of an epoch, the same for all models of a seed."""
    chance = torch.Generator().manual_seed(1000 * plan.seed + epoch)
    order = torch.randperm(data.ends[0], generator=chance)
    yield from order.split(plan.batch)


@torch.no_grad()
def predict(model: Model, data: Clicks, part: slice) -> Tensor:
    """Return the log-odds of samples."""
    model.eval()
    ids, numbers = (data.ids[part].split(CHUNK_SIZE), data.numbers[part].split(CHUNK_SIZE))
    return torch.cat([model(i, n) for i, n in zip(ids, numbers, strict=True)])


def scores(data: Clicks, part: slice, odds: Tensor) -> Scores:
    """Return how well log-odds predict the labels of samples."""
    labels = data.labels[part]
    loss = nn.functional.binary_cross_entropy_with_logits(odds.double(), labels.double())
    return Scores(auc(labels.cpu().numpy(), odds.cpu().numpy()), float(loss))


def auc(labels: np.ndarray, odds: np.ndarray) -> float:
    """Return the share of (positive, negative) pairs in the right order; ties count half."""
    ranks = stats.rankdata(odds)
    positive = int((labels == 1).sum())
    negative = len(labels) - positive
    if not positive or not negative:
        return float("nan")
    pairs = ranks[labels == 1].sum() - positive * (positive + 1) / 2
    return float(pairs / positive / negative)


def oracle(data: Clicks) -> Scores | None:
    """Return the scores of the probabilities that made the labels, where they are known."""
    if data.chances is None:
        return None
    return scores(data, data.test, torch.logit(data.chances[data.test]))


def step_samples(
    models: Sequence[Model], data: Clicks, plan: TrainingPlan, rounds: int, clock: Callable[[], int]
) -> list[list[tuple[int, float]]]:
    """Return (round, seconds) of steps of each model, one after another on the same batches."""
    chance = torch.Generator().manual_seed(plan.seed)
    taken: list[list[tuple[int, float]]] = [[] for _ in models]
    for model in models:
        model.train()
    stream = _endless(data, plan)
    for number in range(rounds + 1):
        batch = next(stream)
        inputs = data.ids[batch], data.numbers[batch], data.labels[batch]
        for which in torch.randperm(len(models), generator=chance).tolist():
            start = clock()
            models[which].step(*inputs)
            if number:  # the first round warms up
                taken[which].append((number, (clock() - start) / 1e9))
    return taken


def _endless(data: Clicks, plan: TrainingPlan) -> Iterator[Tensor]:
    epoch = 0
    while True:
        yield from (
            b for b in batches(data, plan, epoch) if len(b) == min(plan.batch, data.ends[0])
        )
        epoch += 1
