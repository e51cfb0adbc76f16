"""A workload: its tables, and a seeded pool of batches of lookups."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.config.schema import Distribution, Ids, Order, Tables, WorkloadConfig
from experiments.workloads import distributions, production, trace_files

# Rows of the 26 categorical features of Criteo-Kaggle ("Display Advertising Challenge") as the
# public DLRM preprocessing counts them; together 33,762,577.
_CRITEO_KAGGLE = """
1460 583 10131227 2202608 305 24 12517 633 3 93145 5683 8351593 3194 27 14992 5461306 10 5652
2173 4 7046547 18 15 286181 105 142572
"""
CRITEO_KAGGLE = tuple(int(rows) for rows in _CRITEO_KAGGLE.split())
WAYS = 32  # rows per set of emblib's cache


@dataclass(frozen=True)
class TableShape:
    """Rows and columns of a table, which has one feature."""

    rows: int
    dim: int


@dataclass(frozen=True)
class Batch:
    """A batch of lookups, on the host: bag f*B + b is sample b of feature f.

    Attributes:
        indices: ids of all bags, int64 [lookups].
        offsets: first lookup of each bag, and the end, int64 [F*B + 1].
        gradient: gradient of the output, float32 [B, sum D].
    """

    indices: Tensor
    offsets: Tensor
    gradient: Tensor

    def feature(self, feature: int) -> tuple[Tensor, Tensor]:
        """Return the ids [lookups] and offsets [B + 1] of one feature; offsets start at 0."""
        batch_size = self.gradient.size(0)
        offsets = self.offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        start, end = int(offsets[0]), int(offsets[-1])
        return self.indices[start:end], offsets - start


@dataclass(frozen=True)
class Pool:
    """The batches that a cell uses in turns, and facts about them.

    Attributes:
        batches: the batches; on tiny tables some may be equal.
        lookups_per_batch: mean number of lookups per batch, rounded.
        unique_rows_per_batch: mean number of distinct rows per batch, counted per table.
        fingerprint: sha256 of all ids, and of the offsets of a trace.
        num_folded: number of lookups of a trace outside their table, in all batches.
    """

    batches: tuple[Batch, ...]
    lookups_per_batch: int
    unique_rows_per_batch: float
    fingerprint: str
    num_folded: int = 0


def table_rows(workload: WorkloadConfig) -> tuple[int, ...]:
    """Return the rows of each table: as in Criteo-Kaggle, as in `sizes`, or E each."""
    if workload.tables is Tables.criteo_kaggle:
        return CRITEO_KAGGLE
    return tuple(workload.sizes) or (workload.E,) * workload.T


def table_shapes(workload: WorkloadConfig, *, scale: float = 1.0) -> tuple[TableShape, ...]:
    """Return the tables with their rows multiplied by `scale` <= 1, at least one row each.

    A table of a trace has 0 rows if their number is unknown, which is enough to analyse the trace.
    """
    rows = table_rows(workload)
    return tuple(
        TableShape(max(1, int(num_rows * scale)) if num_rows else 0, workload.D)
        for num_rows in rows
    )


def dense_bytes(shapes: tuple[TableShape, ...]) -> int:
    """Return the bytes of uncompressed float32 tables of these shapes."""
    return sum(4 * shape.rows * shape.dim for shape in shapes)


def cache_sets(shapes: tuple[TableShape, ...], fraction: float) -> int:
    """Return the number of sets, of WAYS rows each, of a cache for `fraction` of all tables' rows.

    It is rounded up, and at least 1.
    """
    return max(1, math.ceil(fraction * sum(shape.rows for shape in shapes) / WAYS))


def make_pool(
    workload: WorkloadConfig, shapes: tuple[TableShape, ...], num_batches: int, seed: int
) -> Pool:
    """Make the batches of a workload; equal arguments give equal batches.

    Ids are in [0, rows) of their table, except those of a trace whose table has 0 rows (unknown).
    For a trace, the lookups are those of its first batches, a short file has fewer batches, and ids
    outside shrunk tables are folded.

    Args:
        workload: workload; a trace must be resolved (`trace_files.resolve`).
        shapes: tables, which may have fewer rows than those of `workload`.
        num_batches: maximum number of batches, at least 1.
        seed: seed of ids and gradients; for a trace of the gradients only.

    Raises:
        TraceError: the trace is missing, damaged, has no complete batch, or, with ids=exact, an id
            outside its table.
    """
    digest = hashlib.sha256()
    batches, num_unique, num_folded = [], 0, 0
    for batch_number, bags_of_tables in enumerate(_lookups(workload, shapes, num_batches, seed)):
        indices = np.concatenate([bags.ids for bags in bags_of_tables])
        num_unique += sum(len(np.unique(bags.ids)) for bags in bags_of_tables)
        num_folded += sum(bags.num_folded for bags in bags_of_tables)
        offsets = np.cumsum(np.concatenate([[0], *(bags.lengths for bags in bags_of_tables)]))
        digest.update(indices.tobytes())
        if workload.distribution is Distribution.trace:
            digest.update(offsets.tobytes())
        num_columns = sum(shape.dim for shape in shapes)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + batch_number)
        # Small gradients keep the weights near their initial values, however many steps are timed.
        gradient = torch.randn(workload.B, num_columns, generator=generator) / workload.B
        batches.append(Batch(torch.from_numpy(indices), torch.from_numpy(offsets), gradient))
    if not batches:
        raise trace_files.TraceError(
            f"{Path(workload.file).name} has fewer than {workload.B:,} samples, one batch: lower "
            "workload.B"
        )
    mean_lookups = round(sum(batch.indices.numel() for batch in batches) / len(batches))
    return Pool(
        tuple(batches), mean_lookups, num_unique / len(batches), digest.hexdigest(), num_folded
    )


def _lookups(
    workload: WorkloadConfig, shapes: tuple[TableShape, ...], num_batches: int, seed: int
) -> Iterator[list[trace_files.TableBags]]:
    """Yield the batches, each a list of the bags of every table; arguments as for `make_pool`."""
    if workload.distribution is Distribution.trace:
        are_tables_shrunk = [shape.rows for shape in shapes] != list(table_rows(workload))
        if are_tables_shrunk:  # ids beyond the shrunk tables are expected
            workload = dataclasses.replace(workload, ids=Ids.fold)
        yield from trace_files.batches(workload, [shape.rows for shape in shapes], num_batches)
        return
    lengths = np.full(workload.B, workload.L, np.int64)
    for batch_number in range(num_batches):
        rng = np.random.default_rng([seed, batch_number])
        ids_by_feature = [
            _feature_ids(rng, workload, shape, seed + table) for table, shape in enumerate(shapes)
        ]
        yield [trace_files.TableBags(ids, lengths) for ids in ids_by_feature]


def _feature_ids(
    rng: np.random.Generator, workload: WorkloadConfig, shape: TableShape, seed: int
) -> distributions.Ids:
    num_lookups = workload.B * workload.L
    if workload.distribution is Distribution.uniform:
        return rng.integers(0, shape.rows, num_lookups, dtype=np.int64)
    if workload.distribution is Distribution.production:
        ranks = production.draw_ranks(rng, num_lookups, shape.rows)
    else:
        ranks = distributions.zipf_ranks(rng, num_lookups, shape.rows, workload.s, workload.q)
    if workload.order is Order.ranked:
        return ranks - 1
    return distributions.permute(ranks, shape.rows, seed)


def probabilities(workload: WorkloadConfig, num_rows: int) -> distributions.Reals | None:
    """Return the probability of each row, float64 [num_rows], the most popular row first.

    None for a trace.
    """
    match workload.distribution:
        case Distribution.uniform:
            return distributions.zipf_probabilities(num_rows, 0.0)
        case Distribution.zipf:
            return distributions.zipf_probabilities(num_rows, workload.s, workload.q)
        case Distribution.production:
            return production.probabilities(num_rows)
    return None
