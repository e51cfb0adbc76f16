"""Train a small DLRM whose large tables are stored by a method, and score its predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from experiments.config.sweep import PLAIN
from experiments.quality.data import Clicks, count_ids
from experiments.quality.methods import METHODS, NETWORK_RATE, Method, MethodTask

HIDDEN = 64  # width of the network's hidden layer
CHUNK_SIZE = 8192  # samples per prediction
SEED_STEP = 1000  # the seed of an epoch's order is SEED_STEP * plan.seed + epoch


@dataclass(frozen=True)
class TrainingPlan:
    """The training of a model.

    Attributes:
        dim: columns of a row.
        batch: samples per step.
        epochs: maximum number of epochs, at least 1. Training ends after the first epoch that does
            not lower the validation loss; the epoch before it counts.
        rates: learning rates of tables, at least one; the rate with the least validation loss
            counts.
        large: minimum number of rows of a compressed table ÷ rows of all tables.
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
    """The scores of predictions on some samples."""

    auc: float  # area under the ROC curve
    loss: float  # mean log loss in nats


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, its scores on test and validation samples, and its rate and epoch.

    Scores are those after `epoch`, counted from 1. If training ended early, `model` was also
    trained in the next epoch, which was not better.
    """

    test: Scores
    valid: Scores
    rate: float
    epoch: int
    model: Model


class Model(nn.Module):
    """A DLRM: a row per field, a projection of the numbers, products of all pairs, then a network.

    A method stores the large tables; the small ones are plain. `step` trains it.

    Args:
        data: samples, whose numbers of rows and of numbers are used.
        plan: training, of which `dim` and `large` are used.
        large_tables: method of the large tables, `Clicks.large_fields(plan.large)`.

    Attributes:
        large_tables: method of the large tables.
        large_fields: fields of the large tables.
        small_tables: plain tables of the other fields; None without any.
        small_fields: the other fields.
        optimizers: optimizers of the network's parameters; the backward pass updates tables.
        pairs: first and second vector of each product, int64 [2, pairs].
    """

    pairs: Tensor

    def __init__(self, data: Clicks, plan: TrainingPlan, large_tables: Method) -> None:
        super().__init__()
        self.large_tables: Method = large_tables
        self.large_fields = data.large_fields(plan.large)
        self.small_fields = [
            field for field in range(len(data.num_ids)) if field not in self.large_fields
        ]
        num_small_rows = tuple(data.num_ids[field] for field in self.small_fields)
        plain_task = MethodTask(num_small_rows, plan.dim, 1.0, large_tables.task.learning_rate)
        self.small_tables = METHODS[PLAIN](plain_task) if self.small_fields else None
        self.numbers = nn.Linear(data.numbers.size(1), plan.dim)
        num_vectors = 1 + len(data.num_ids)
        pairs = torch.triu_indices(num_vectors, num_vectors, 1)
        self.register_buffer("pairs", pairs, persistent=False)
        num_inputs = plan.dim + num_vectors * (num_vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(num_inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        network_parameters = [*self.numbers.parameters(), *self.top.parameters()]
        self.optimizers = [torch.optim.Adam(network_parameters, NETWORK_RATE)]

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return the log-odds `[B]` of ids `[B, F]` and numbers `[B, C]`."""
        dense_vector = self.numbers(numbers)
        vectors_by_source = [dense_vector[:, None], self.large_tables(ids[:, self.large_fields])]
        if self.small_tables is not None:
            vectors_by_source.append(self.small_tables(ids[:, self.small_fields]))
        vectors = torch.cat(vectors_by_source, 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        first, second = self.pairs.unbind()
        log_odds: Tensor = self.top(torch.cat([dense_vector, products[:, first, second]], 1))
        return log_odds.squeeze(1)

    def step(self, ids: Tensor, numbers: Tensor, labels: Tensor) -> None:
        """Train on a batch: ids int64 `[B, F]`, numbers float32 `[B, C]`, labels float32 `[B]`."""
        loss = nn.functional.binary_cross_entropy_with_logits(self(ids, numbers), labels)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


def task_of(data: Clicks, plan: TrainingPlan, share: float, rate: float) -> MethodTask:
    """Return the large tables of the data as the task of a method.

    `share` is the permitted share of their bytes, `rate` the learning rate of tables.
    """
    fields = data.large_fields(plan.large)
    num_rows = tuple(data.num_ids[field] for field in fields)
    return MethodTask(num_rows, plan.dim, share, rate, count_ids(data, fields))


def build(data: Clicks, plan: TrainingPlan, method: str, task: MethodTask) -> Model:
    """Return an untrained model on the CPU; equal plans lead to equal networks.

    `method` is a key of METHODS. `task` must be that of `task_of` for the same data and plan, but
    may have `read_trained_rows` too. The function seeds torch's generator.

    Raises:
        Unsupported: the method cannot do the task.
    """
    torch.manual_seed(plan.seed)
    large_tables = METHODS[method](task)
    torch.manual_seed(plan.seed + 1)
    return Model(data, plan, large_tables)


def fit(
    data: Clicks,
    plan: TrainingPlan,
    make_model: Callable[[float], Model],
    note: Callable[[str], object],
) -> TrainedModel:
    """Train a model per learning rate; return the one with the least validation loss.

    Args:
        data: samples.
        plan: training.
        make_model: function that returns an untrained model, on the device of the samples, for a
            learning rate of tables.
        note: function that is called with the present activity.
    """
    candidates = []
    for rate in plan.rates:
        note(f"training, rate {rate:g}")
        candidates.append(_fit_at_rate(data, plan, make_model(rate), rate))
    # Losses of nan, which follow from rates that are too high, come last.
    return min(candidates, key=lambda trained: (math.isnan(trained.valid.loss), trained.valid.loss))


def _fit_at_rate(data: Clicks, plan: TrainingPlan, model: Model, rate: float) -> TrainedModel:
    """Train a model until the validation loss does not fall; return the best epoch."""
    best_model: TrainedModel | None = None
    for epoch in range(plan.epochs):
        model.train()
        for batch in batches(data, plan, epoch):
            model.step(data.ids[batch], data.numbers[batch], data.labels[batch])
        valid = score(data, data.valid, predict(model, data, data.valid))
        if best_model is not None and not valid.loss < best_model.valid.loss:
            break
        test = score(data, data.test, predict(model, data, data.test))
        best_model = TrainedModel(test, valid, rate, epoch + 1, model)
    assert best_model is not None
    return best_model


def batches(data: Clicks, plan: TrainingPlan, epoch: int) -> Iterator[Tensor]:
    """Yield the indices of the training samples of each step of an epoch, int64, on the CPU.

    The last batch may be shorter. The order depends on `plan.seed`, `epoch` and the number of
    samples only, so that it is the same for every model.
    """
    generator = torch.Generator().manual_seed(SEED_STEP * plan.seed + epoch)
    order = torch.randperm(data.split_ends[0], generator=generator)
    yield from order.split(plan.batch)


@torch.no_grad()
def predict(model: Model, data: Clicks, samples: slice) -> Tensor:
    """Return the log-odds of a slice of the samples, float32 `[samples]`; set the model to eval."""
    model.eval()
    ids, numbers = data.ids[samples].split(CHUNK_SIZE), data.numbers[samples].split(CHUNK_SIZE)
    return torch.cat(
        [
            model(chunk_ids, chunk_numbers)
            for chunk_ids, chunk_numbers in zip(ids, numbers, strict=True)
        ]
    )


def score(data: Clicks, samples: slice, log_odds: Tensor) -> Scores:
    """Return the scores of predicted log-odds, one per sample of the slice."""
    labels = data.labels[samples]
    loss = nn.functional.binary_cross_entropy_with_logits(log_odds.double(), labels.double())
    return Scores(auc(labels.cpu().numpy(), log_odds.cpu().numpy()), float(loss))


def auc(labels: np.ndarray, log_odds: np.ndarray) -> float:
    """Return the share of (positive, negative) pairs in the right order; ties count as half.

    `labels` [samples] are 0 and 1; the result is nan if all are equal.
    """
    from scipy.stats import rankdata  # slow to import; `Scores` and the models do not need it

    ranks = rankdata(log_odds)
    num_positive = int((labels == 1).sum())
    num_negative = len(labels) - num_positive
    if not num_positive or not num_negative:
        return float("nan")
    num_ordered_pairs = ranks[labels == 1].sum() - num_positive * (num_positive + 1) / 2
    return float(num_ordered_pairs / num_positive / num_negative)


def oracle_scores(data: Clicks) -> Scores | None:
    """Return the scores of the true probabilities on the test samples; None if unknown."""
    if data.probabilities is None:
        return None
    return score(data, data.test, torch.logit(data.probabilities[data.test]))


def step_samples(
    models: Sequence[Model], data: Clicks, plan: TrainingPlan, rounds: int, clock: Callable[[], int]
) -> list[list[tuple[int, float]]]:
    """Return [(round, seconds), ...] per model; in a round all models step on the same batch.

    `clock` is in nanoseconds. Round 0 warms up and is not returned.
    """
    generator = torch.Generator().manual_seed(plan.seed)
    samples: list[list[tuple[int, float]]] = [[] for _ in models]
    for model in models:
        model.train()
    batch_stream = _endless_batches(data, plan)
    for round_number in range(rounds + 1):
        batch = next(batch_stream)
        inputs = data.ids[batch], data.numbers[batch], data.labels[batch]
        for model_index in torch.randperm(len(models), generator=generator).tolist():
            begin_ns = clock()
            models[model_index].step(*inputs)
            if round_number:
                samples[model_index].append((round_number, (clock() - begin_ns) / 1e9))
    return samples


def _endless_batches(data: Clicks, plan: TrainingPlan) -> Iterator[Tensor]:
    """Yield the full batches of epoch after epoch."""
    epoch = 0
    while True:
        yield from (
            batch
            for batch in batches(data, plan, epoch)
            if len(batch) == min(plan.batch, data.split_ends[0])
        )
        epoch += 1
