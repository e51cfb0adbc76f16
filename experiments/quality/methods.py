"""Methods that compress the large tables of a model to a share of their bytes.

A method is a module that maps ids of K fields to rows, `[B, K] -> [B, K, dim]`, and trains itself.
Most methods are collections of emblib with another storage: a function that returns the
configuration of a table. Others are classes. A new method is either, and a line in METHODS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import emblib
from emblib import EmbeddingBagConfig, storage
from experiments.contenders.registry import Unsupported

FLOAT_BYTES = 4  # bytes of a float32
QUANTISED = storage.Quantized(8)  # storage of dense rows when they are served
PERMUTED = "permuted"  # order of ids of tensor trains
NETWORK_RATE = 1e-3  # learning rate of Adam for all parameters outside tables


@dataclass(frozen=True)
class MethodTask:
    """The tables that a method compresses, and their training.

    Attributes:
        rows: number of rows of each table.
        dim: dim of a row.
        share: permitted bytes ÷ bytes of the plain table, for each table.
        rate: learning rate of Adagrad.
        counts: number of training samples with each id, per table.
        trained: function that returns the rows of the plain tables after training.
    """

    rows: tuple[int, ...]
    dim: int
    share: float
    rate: float
    counts: Sequence[Tensor] = ()
    trained: Callable[[], Sequence[Tensor]] | None = None

    @property
    def permitted_rows(self) -> list[int]:
        """Return the number of rows per table that fit into the permitted bytes."""
        return [max(1, int(self.share * rows)) for rows in self.rows]

    def nbytes(self, table: int) -> int:
        """Return the permitted bytes of a table."""
        return int(self.share * self.rows[table] * self.dim * FLOAT_BYTES)

    def scaled(self, share: float) -> MethodTask:
        """Return the task with `share` of its permitted bytes."""
        return replace(self, share=share * self.share)

    def optimizer(self) -> emblib.optim.Adagrad:
        """Return the optimizer of tables."""
        return emblib.optim.Adagrad(self.rate)


class Method(nn.Module):
    """Base of the methods: maps ids of K fields to rows.

    Attributes:
        task: tables to compress.
        optimizers: optimizers of the parameters that backward does not update.
        trained_bytes: bytes of the parameters, without optimizer states.
        served_bytes: bytes of the parameters with dense rows quantised to 8 bits.
        ranks: rank of each table's tensor train; [] for methods without trains.
    """

    def __init__(self, task: MethodTask) -> None:
        super().__init__()
        self.task = task
        self.optimizers: list[torch.optim.Optimizer] = []
        self.trained_bytes = 0
        self.served_bytes = 0
        self.ranks: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows `[B, K, dim]` of ids `[B, K]`."""
        raise NotImplementedError

    def count_bytes(self, nbytes: int) -> None:
        """Add bytes of parameters that are served as they are trained."""
        self.trained_bytes += nbytes
        self.served_bytes += nbytes


class StoredTables(Method):
    """An emblib collection with a table per field."""

    def __init__(self, task: MethodTask, tables: Sequence[EmbeddingBagConfig]) -> None:
        super().__init__(task)
        self.bags = emblib.EmbeddingBagCollection(tables, optimizer=task.optimizer())
        self.names = [config.name for config in tables]
        for config in tables:
            self._count_table(config)
        trains = [config.storage for config in tables]
        self.ranks = [kind.ranks[0] for kind in trains if isinstance(kind, storage.TensorTrain)]

    def _count_table(self, config: EmbeddingBagConfig) -> None:
        """Count the bytes of a table, without optimizer states."""
        table_slice = storage.TableSlice.whole(config)
        nbytes = int(config.storage.nbytes(table_slice, _NO_STATES, "cpu").device)
        self.count_bytes(nbytes)
        if isinstance(config.storage, storage.Dense):
            served = int(QUANTISED.nbytes(table_slice, None, "cpu").device)
            self.served_bytes += served - nbytes

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the ids; id -1 gives zeros. Training inserts keys into hash tables."""
        flat = ids.t().reshape(-1)
        batch = emblib.KeyedJaggedTensor(self.names, flat, lengths=torch.ones_like(flat))
        rows: Tensor = self.bags(batch).values()
        return rows.view(*ids.shape, -1)

    def weights(self) -> list[Tensor]:
        """Return the dense rows of each table, float32 [rows, dim]."""
        handles = self.bags.handles()
        return [handles[name].dense_rows().detach() for name in self.names]


_NO_STATES = emblib.optim.SGD(1.0)  # an optimizer without states, for counting bytes

ConfigureTable = Callable[[MethodTask, int], EmbeddingBagConfig]
"""Function of a task and the number of a table that returns the table's configuration."""


def build_stored(choose: ConfigureTable, task: MethodTask) -> StoredTables:
    """Return a collection with the tables that `choose` configures."""
    return StoredTables(task, [choose(task, t) for t in range(len(task.rows))])


def plain(task: MethodTask, table: int, **changes: Any) -> EmbeddingBagConfig:
    """Store every row; `changes` are further arguments of the configuration."""
    return EmbeddingBagConfig(task.rows[table], task.dim, f"t{table}", **changes)


def half_precision(task: MethodTask, table: int) -> EmbeddingBagConfig:
    """Store every row in bfloat16, with stochastic rounding."""
    if task.share < 0.5:
        raise Unsupported("16-bit rows are half of the bytes")
    rounding = emblib.StochasticRounding(seed=1)
    return plain(task, table, data_type=torch.bfloat16, rounding=rounding)


def narrow(task: MethodTask, table: int) -> EmbeddingBagConfig:
    """Store narrower rows, padded with zeros."""
    width = _width(task)
    kind = storage.Narrow(width) if width < task.dim else storage.Dense()
    return plain(task, table, storage=kind)


def projected(task: MethodTask, table: int) -> EmbeddingBagConfig:
    """Store narrower rows, and per table a learned matrix that projects them to `dim`."""
    return plain(task, table, storage=storage.TensorTrain.projected(_width(task)))


def _width(task: MethodTask) -> int:
    width = int(task.share * task.dim)
    if not width:
        raise Unsupported(f"{task.share:g} of {task.dim} columns is less than one")
    return width


def hashed(task: MethodTask, table: int, **choices: Any) -> EmbeddingBagConfig:
    """Hash ids to fewer rows; `choices` are further arguments of `storage.Hashed`."""
    return plain(task, table, storage=storage.Hashed(task.permitted_rows[table], **choices))


def quotient_remainder(
    task: MethodTask, table: int, combine: storage.Combine
) -> EmbeddingBagConfig:
    """Combine two rows, one by the quotient and one by the remainder of the id."""
    try:
        kind = storage.QuotientRemainder.for_share(task.rows[table], task.share, combine)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    return plain(task, table, storage=kind)


def train_spec(task: MethodTask, table: int, ids: Any) -> emblib.TTSpec:
    """Return the tensor train of the largest ranks that fit into the permitted bytes."""
    rows = task.rows[table]
    one_rank_spec = emblib.TTSpec(rows, task.dim, (1, 1), ids=ids, seed=table)
    try:
        return emblib.TTSpec.for_bytes(rows, task.dim, task.nbytes(table), like=one_rank_spec)
    except ValueError as error:
        raise Unsupported(str(error)) from error


def tensor_train(task: MethodTask, table: int, ids: Any = PERMUTED) -> EmbeddingBagConfig:
    """Store a tensor train; by default in a random order of ids."""
    spec = train_spec(task, table, ids)
    kind = storage.TensorTrain(spec.ranks, ids=spec.ids, seed=spec.seed)
    return plain(task, table, storage=kind)


def evicting(task: MethodTask, table: int) -> EmbeddingBagConfig:
    """Store rows by key in a hash table that evicts the least frequently used ids."""
    kind = storage.Hash(eviction=emblib.Eviction.LFU)
    return EmbeddingBagConfig(task.permitted_rows[table], task.dim, f"t{table}", storage=kind)


def train_from_plain(task: MethodTask) -> StoredTables:
    """Return tensor trains that start from the trained plain tables."""
    if task.trained is None:
        raise Unsupported("plain tables were not trained: add plain to contenders")
    trains = build_stored(tensor_train, task)
    handles: Any = trains.bags.handles()
    for t, weight in enumerate(task.trained()):
        cores = emblib.TTEmbeddingBag.from_dense(
            weight, spec=train_spec(task, t, PERMUTED), counts=task.counts[t].clamp(min=1)
        )
        with torch.no_grad():
            for core, value in zip(handles[f"t{t}"].cores, cores.cores, strict=True):
                core.copy_(value)
    return trains


def planned(task: MethodTask) -> StoredTables:
    """Return tables stored as `emblib.plan_memory` plans, within the permitted bytes of all."""
    tables = [plain(task, t) for t in range(len(task.rows))]
    nbytes = sum(task.rows) * task.dim * FLOAT_BYTES
    try:
        plan = emblib.plan_memory(
            tables,
            max(1, int(task.share * nbytes)),
            trace=_trace([config.name for config in tables], task.counts),
            optimizer=_NO_STATES,
        )
    except emblib.BudgetError as error:
        raise Unsupported(str(error)) from error
    return StoredTables(task, plan.configs)


class HotRows(Method):
    """Plain tables of the most frequent ids in half of the bytes, another method for the rest.

    Attributes:
        hot: tables of the frequent ids.
        others: tables of the other ids, by another method.
        hot_rows: row in `hot` per id of all tables, -1 for the other ids.
        starts: first entry of each table in `hot_rows`.
    """

    hot_rows: Tensor
    starts: Tensor

    def __init__(self, task: MethodTask, rest: ConfigureTable) -> None:
        super().__init__(task)
        half = task.scaled(0.5)
        sizes = half.permitted_rows
        tables = [EmbeddingBagConfig(rows, task.dim, f"t{t}") for t, rows in enumerate(sizes)]
        self.hot, self.others = StoredTables(half, tables), build_stored(rest, half)
        self.trained_bytes = self.hot.trained_bytes + self.others.trained_bytes
        self.served_bytes = self.hot.served_bytes + self.others.served_bytes
        hot_rows = []
        for rows, hot, count in zip(task.rows, sizes, task.counts, strict=True):
            hot_row = torch.full((rows,), -1)
            hot_row[count.argsort(descending=True, stable=True)[:hot]] = torch.arange(hot)
            hot_rows.append(hot_row)
        self.register_buffer("hot_rows", torch.cat(hot_rows))
        self.register_buffer("starts", torch.tensor([0, *task.rows[:-1]]).cumsum(0))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up each id in the collection that has it; the other one gets -1: zeros."""
        hot_rows = self.hot_rows[ids + self.starts]
        rows: Tensor = self.hot(hot_rows) + self.others(torch.where(hot_rows < 0, ids, -1))
        return rows


class CachedTensorTrain(Method):
    """Tensor trains with a cache of the most used rows, in half of the permitted bytes.

    Attributes:
        eviction: fate of a row that leaves the cache.
        every: number of training lookups between two choices of the cached rows.
    """

    eviction = emblib.RowEviction.PROJECT
    every = 50

    def __init__(self, task: MethodTask) -> None:
        super().__init__(task)
        half = task.scaled(0.5)
        specs = [train_spec(half, t, PERMUTED) for t in range(len(task.rows))]
        cache = emblib.TTCache(half.permitted_rows, self.eviction, every=self.every)
        self.bags = emblib.CachedTTEmbeddingBags(specs, cache, task.optimizer())
        sizes = self.bags.nbytes()
        self.count_bytes(sizes["weights"] + sizes["cache"])

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.t().reshape(-1)  # table by table, a bag of one id per sample
        rows: Tensor = self.bags(flat, torch.arange(len(flat) + 1, device=ids.device))
        return rows.view(*ids.shape, -1)


class DroppingTensorTrain(CachedTensorTrain):
    """Cached tensor trains whose rows lose their updates when they leave the cache, as in FBTT."""

    eviction = emblib.RowEviction.DROP


def _trace(names: Sequence[str], counts: Sequence[Tensor]) -> emblib.LookupTrace | None:
    """Return a trace in which ids occur as often as in training; None without counts."""
    if not counts:
        return None
    ids = [torch.arange(len(count)).repeat_interleave(count) for count in counts]
    features = [
        emblib.TracedFeature(name, name, len(count))
        for name, count in zip(names, counts, strict=True)
    ]
    return emblib.LookupTrace(
        tuple(features), tuple(ids), tuple(torch.ones(len(i), dtype=torch.int64) for i in ids)
    )


METHODS: dict[str, Callable[[MethodTask], Method]] = {
    "plain": partial(build_stored, plain),
    "bf16": partial(build_stored, half_precision),
    "narrow": partial(build_stored, narrow),
    "projected": partial(build_stored, projected),
    "hashed": partial(build_stored, hashed),
    "modulo": partial(build_stored, partial(hashed, hash=storage.RowHash.REMAINDER)),
    "hashed_twice": partial(build_stored, partial(hashed, functions=2)),
    "qr_sum": partial(build_stored, partial(quotient_remainder, combine=storage.Combine.ADD)),
    "qr_product": partial(
        build_stored, partial(quotient_remainder, combine=storage.Combine.MULTIPLY)
    ),
    "tt_permuted": partial(build_stored, tensor_train),
    "tt_as_given": partial(build_stored, partial(tensor_train, ids="as_given")),
    "tt_from_plain": train_from_plain,
    "tt_hot": partial(HotRows, rest=tensor_train),
    "tt_cached": CachedTensorTrain,
    "tt_cached_drop": DroppingTensorTrain,
    "hashed_hot": partial(HotRows, rest=hashed),
    "evicting": partial(build_stored, evicting),
    "planned": planned,
}
