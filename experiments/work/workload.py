"""The work itself: which tables, and a seeded pool of distinct batches of lookups into them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.config.schema import Law, Order, Tables, WorkloadConfig
from experiments.work import laws

# Rows of the 26 categorical features of Criteo-Kaggle ("Display Advertising Challenge") as the
# public DLRM preprocessing counts them; together 33,762,577.
CRITEO_KAGGLE: tuple[int, ...] = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


WAYS = 32  # rows of a set of emblib's cache


@dataclass(frozen=True)
class TableShape:
    """One table, and so one feature, of a workload."""

    rows: int
    dim: int


@dataclass(frozen=True)
class Batch:
    """Feature-major lookups: bag f*B+b is indices[offsets[f*B+b]:offsets[f*B+b+1]]."""

    indices: Tensor  # [L] int64
    offsets: Tensor  # [F*B+1] int64
    gradient: Tensor  # [B, sum D] float32, what the model would send back

    def feature(self, feature: int) -> tuple[Tensor, Tensor]:
        """Ids and bag starts (with the end) of one feature, offsets from 0."""
        size = self.gradient.size(0)
        offsets = self.offsets[feature * size : (feature + 1) * size + 1]
        start, end = int(offsets[0]), int(offsets[-1])
        return self.indices[start:end], offsets - start


@dataclass(frozen=True)
class Pool:
    """The batches a cell cycles through, and what they contain."""

    batches: tuple[Batch, ...]
    lookups: int  # per batch
    unique_rows: float  # mean per batch, counted per table
    fingerprint: str  # sha256 of all ids


def table_shapes(workload: WorkloadConfig, *, scale: float = 1.0) -> tuple[TableShape, ...]:
    """The tables; `scale` < 1 shrinks every table's rows by that factor, to no less than one."""
    criteo = workload.tables is Tables.criteo_kaggle
    rows = CRITEO_KAGGLE if criteo else (workload.E,) * workload.T
    return tuple(TableShape(max(1, int(r * scale)), workload.D) for r in rows)


def dense_bytes(shapes: tuple[TableShape, ...]) -> int:
    """Bytes of the same tables as plain float32."""
    return sum(4 * s.rows * s.dim for s in shapes)


def cache_sets(shapes: tuple[TableShape, ...], fraction: float) -> int:
    """Sets of WAYS rows of a cache that holds `fraction` of all rows, rounded up."""
    return max(1, math.ceil(fraction * sum(s.rows for s in shapes) / WAYS))


def make_pool(
    workload: WorkloadConfig, shapes: tuple[TableShape, ...], count: int, seed: int
) -> Pool:
    """`count` distinct batches; equal arguments give equal batches on every machine."""
    digest = hashlib.sha256()
    batches, unique = [], 0
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        parts = [_feature_ids(rng, workload, s, seed + f) for f, s in enumerate(shapes)]
        indices = np.concatenate(parts)
        unique += sum(len(np.unique(p)) for p in parts)
        digest.update(indices.tobytes())
        bags = len(shapes) * workload.B
        width = sum(s.dim for s in shapes)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        # Small gradients keep the weights near their start however many steps are timed.
        gradient = torch.randn(workload.B, width, generator=generator) / workload.B
        offsets = torch.arange(bags + 1, dtype=torch.int64) * workload.L
        batches.append(Batch(torch.from_numpy(indices), offsets, gradient))
    lookups = len(shapes) * workload.B * workload.L
    return Pool(tuple(batches), lookups, unique / count, digest.hexdigest())


def _feature_ids(
    rng: np.random.Generator, workload: WorkloadConfig, shape: TableShape, seed: int
) -> laws.Ids:
    count = workload.B * workload.L
    if workload.law is Law.uniform:
        return rng.integers(0, shape.rows, count, dtype=np.int64)
    ranks = laws.zipf_ranks(rng, count, shape.rows, workload.s, workload.q)
    if workload.order is Order.ranked:
        return ranks - 1
    return laws.permute(ranks, shape.rows, seed)
