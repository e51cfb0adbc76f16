"""Methods that compress the large tables of a model to a share of their bytes.

A method is a module, built on the CPU, that maps ids of K fields to rows, `[B, K] -> [B, K, dim]`;
the backward pass updates its tables. Most methods are a `StoredTables` whose tables a function
`configure_*` describes. Others are a class, or a function `build_*`. To add a method, write one of
these and a line in METHODS. Building a method raises Unsupported for a task that it cannot do, for
example with too few bytes.
"""

from __future__ import annotations

from bisect import bisect_right
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
LOOKUPS_PER_CHOICE = 50  # training lookups between two choices of the rows in a cache
NETWORK_RATE = 1e-3  # learning rate of Adam for the parameters outside of methods


@dataclass(frozen=True)
class MethodTask:
    """The tables that a method compresses, and their training.

    Attributes:
        num_rows: number of rows of each table.
        dim: number of columns of a row.
        share: permitted bytes ÷ bytes of the plain float32 table, for each table.
        learning_rate: learning rate of Adagrad.
        counts: number of training samples with each id, int64 [rows] per table; () if unknown, for
            which `HotRows` and `build_from_plain` raise Unsupported.
        read_trained_rows: function that returns the rows of the trained plain tables, float32
            [rows, dim] per table; None if they were not trained. `build_from_plain` needs it.
    """

    num_rows: tuple[int, ...]
    dim: int
    share: float
    learning_rate: float
    counts: Sequence[Tensor] = ()
    read_trained_rows: Callable[[], Sequence[Tensor]] | None = None

    def permitted_rows(self, table: int) -> int:
        """Return the number of float32 rows that fit into the permitted bytes of a table (number).

        Raises:
            Unsupported: not one row fits.
        """
        num_rows = int(self.share * self.num_rows[table])
        if not num_rows:
            raise Unsupported(f"{self.share:g} of {self.num_rows[table]} rows is less than one")
        return num_rows

    def permitted_bytes(self, table: int) -> int:
        """Return the permitted bytes of a table, given by its number."""
        return int(self.share * self.num_rows[table] * self.dim * FLOAT_BYTES)

    def check_counts(self) -> None:
        """Raise Unsupported if the task has no `counts`."""
        if not self.counts:
            raise Unsupported("the method needs the counts of ids")

    def with_share(self, share: float) -> MethodTask:
        """Return the task with `share` times its permitted bytes."""
        return replace(self, share=share * self.share)

    def optimizer(self) -> emblib.optim.Adagrad:
        """Return the optimizer of tables."""
        return emblib.optim.Adagrad(self.learning_rate)


class Method(nn.Module):
    """Base of the methods: maps ids of K fields to rows.

    Attributes:
        task: tables to compress.
        trained_bytes: bytes of parameters and indices, without optimizer states.
        served_bytes: the same with tables of `storage.Dense` quantised to 8 bits.
        ranks: first rank of each table that is a tensor train, in order; a projected table is one.
    """

    def __init__(self, task: MethodTask) -> None:
        super().__init__()
        self.task = task
        self.trained_bytes = 0
        self.served_bytes = 0
        self.ranks: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows `[B, K, dim]`, float32, of ids `[B, K]` that lie in their tables."""
        raise NotImplementedError


class StoredTables(Method):
    """An emblib collection with a table per field."""

    def __init__(self, task: MethodTask, tables: Sequence[EmbeddingBagConfig]) -> None:
        super().__init__(task)
        self.bags = emblib.EmbeddingBagCollection(tables, optimizer=task.optimizer())
        self.names = [config.name for config in tables]
        for config in tables:
            nbytes = _table_bytes(config)
            is_dense = isinstance(config.storage, storage.Dense)
            self.trained_bytes += nbytes
            self.served_bytes += _table_bytes(config, QUANTISED) if is_dense else nbytes
        storages = [config.storage for config in tables]
        self.ranks = [
            table_storage.ranks[0]
            for table_storage in storages
            if isinstance(table_storage, storage.TensorTrain)
        ]

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the ids. The row of id -1 is zeros, except in hash tables, where -1 is a key.

        In training, keys are inserted into hash tables.
        """
        flat_ids = ids.t().reshape(-1)
        batch = emblib.KeyedJaggedTensor(self.names, flat_ids, lengths=torch.ones_like(flat_ids))
        rows: Tensor = self.bags(batch).values()
        return rows.view(*ids.shape, -1)

    def weights(self) -> list[Tensor]:
        """Return the rows of each table as floats [rows, dim]; all tables must have dense rows."""
        handles = self.bags.handles()
        return [handles[name].dense_rows().detach() for name in self.names]


_STATELESS_OPTIMIZER = emblib.optim.SGD(1.0)  # for counting bytes


def _table_bytes(config: EmbeddingBagConfig, other: storage.Storage | None = None) -> int:
    """Return the bytes of a table and its index, as configured or in another storage."""
    table_slice, table_storage = storage.TableSlice.whole(config), other or config.storage
    return int(table_storage.nbytes(table_slice, _STATELESS_OPTIMIZER, "cpu").device)


def _max_rows(task: MethodTask, table: int, configure: Callable[[int], EmbeddingBagConfig]) -> int:
    """Return the maximum number of rows with which a table and its index fit into its bytes.

    Args:
        task: the tables.
        table: number of the table, whose rows are the upper bound.
        configure: function of a number of rows that returns the configuration; more rows must not
            need fewer bytes.

    Raises:
        Unsupported: not one row fits, with its index.
    """
    row_counts, permitted_bytes = range(1, task.num_rows[table] + 1), task.permitted_bytes(table)
    num_rows = bisect_right(
        row_counts, permitted_bytes, key=lambda num_rows: _table_bytes(configure(num_rows))
    )
    if not num_rows:
        raise Unsupported(f"rows by key and their index need more than {permitted_bytes} bytes")
    return num_rows


ConfigureTable = Callable[[MethodTask, int], EmbeddingBagConfig]
"""Function of a task and the number of a table that returns the table's configuration."""


def build_stored(configure: ConfigureTable, task: MethodTask) -> StoredTables:
    """Return a collection with the tables that `configure` returns."""
    return StoredTables(task, [configure(task, table) for table in range(len(task.num_rows))])


def configure_plain(task: MethodTask, table: int, **changes: Any) -> EmbeddingBagConfig:
    """Store every row, whatever the share; `changes` are further arguments of the configuration."""
    return EmbeddingBagConfig(task.num_rows[table], task.dim, f"t{table}", **changes)


def configure_half_precision(task: MethodTask, table: int) -> EmbeddingBagConfig:
    """Store every row in bfloat16, with stochastic rounding."""
    if task.share < 0.5:
        raise Unsupported("16-bit rows are half of the bytes")
    rounding = emblib.StochasticRounding(seed=1)
    return configure_plain(task, table, data_type=torch.bfloat16, rounding=rounding)


def configure_narrow(task: MethodTask, table: int) -> EmbeddingBagConfig:
    """Store narrower rows, padded with zeros at lookup."""
    num_columns = _permitted_columns(task)
    is_narrow = num_columns < task.dim
    table_storage = storage.Narrow(num_columns) if is_narrow else storage.Dense()
    return configure_plain(task, table, storage=table_storage)


def configure_projected(task: MethodTask, table: int) -> EmbeddingBagConfig:
    """Store narrower rows and a learned matrix that widens them.

    The matrix is in addition to the permitted bytes.
    """
    table_storage = storage.TensorTrain.projected(_permitted_columns(task))
    return configure_plain(task, table, storage=table_storage)


def _permitted_columns(task: MethodTask) -> int:
    """Return the number of columns whose bytes are permitted; raise Unsupported if it is 0."""
    num_columns = int(task.share * task.dim)
    if not num_columns:
        raise Unsupported(f"{task.share:g} of {task.dim} columns is less than one")
    return num_columns


def configure_hashed(task: MethodTask, table: int, **choices: Any) -> EmbeddingBagConfig:
    """Hash ids to fewer rows; `choices` are further arguments of `storage.Hashed`."""
    return configure_plain(
        task, table, storage=storage.Hashed(task.permitted_rows(table), **choices)
    )


def configure_quotient_remainder(
    task: MethodTask, table: int, combine: storage.Combine
) -> EmbeddingBagConfig:
    """Store two small tables, whose rows for the quotient and the remainder of an id are combined.

    Raises:
        Unsupported: the tables do not fit into the permitted bytes.
    """
    try:
        table_storage = storage.QuotientRemainder.for_share(
            task.num_rows[table], task.share, combine
        )
    except ValueError as error:
        raise Unsupported(str(error)) from error
    return configure_plain(task, table, storage=table_storage)


def tensor_train_spec(task: MethodTask, table: int, ids: Any) -> emblib.TTSpec:
    """Return the tensor train of the largest ranks that fit into the permitted bytes.

    `ids` is the order of ids, see `emblib.TTSpec`.

    Raises:
        Unsupported: no rank fits.
    """
    rows = task.num_rows[table]
    one_rank_spec = emblib.TTSpec(rows, task.dim, (1, 1), ids=ids, seed=table)
    try:
        return emblib.TTSpec.for_bytes(
            rows, task.dim, task.permitted_bytes(table), like=one_rank_spec
        )
    except ValueError as error:
        raise Unsupported(str(error)) from error


def configure_tensor_train(task: MethodTask, table: int, ids: Any = PERMUTED) -> EmbeddingBagConfig:
    """Store a tensor train of the largest ranks that fit, by default in a random order of ids."""
    spec = tensor_train_spec(task, table, ids)
    table_storage = storage.TensorTrain(spec.ranks, ids=spec.ids, seed=spec.seed)
    return configure_plain(task, table, storage=table_storage)


def configure_evicting(task: MethodTask, table: int) -> EmbeddingBagConfig:
    """Store rows by key in a hash table that evicts the least frequently used ids."""
    table_storage = storage.Hash(eviction=emblib.Eviction.LFU)

    def configure(num_rows: int) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(num_rows, task.dim, f"t{table}", storage=table_storage)

    return configure(_max_rows(task, table, configure))


def configure_cached_train(
    task: MethodTask, table: int, eviction: emblib.RowEviction
) -> EmbeddingBagConfig:
    """Store a tensor train in at most half of the permitted bytes, and cached rows in the rest.

    The cache has the most frequently used rows, their index and the counts of ids. `eviction` is
    what happens to the updates of a row that leaves the cache; with DROP they are lost, as in FBTT.
    """
    train_config = configure_tensor_train(task.with_share(0.5), table)
    train_storage = train_config.storage
    assert isinstance(train_storage, storage.TensorTrain)

    def configure(num_rows: int) -> EmbeddingBagConfig:
        cache = emblib.TTCache(num_rows, eviction, every=LOOKUPS_PER_CHOICE)
        return replace(train_config, storage=replace(train_storage, cache=cache))

    return configure(_max_rows(task, table, configure))


def build_from_plain(task: MethodTask) -> StoredTables:
    """Return tensor trains that start as approximations of the trained plain tables.

    Raises:
        Unsupported: the task has no `counts` or no `read_trained_rows`, or no rank fits.
    """
    task.check_counts()
    if task.read_trained_rows is None:
        raise Unsupported("plain tables were not trained: add plain to contenders")
    trains = build_stored(configure_tensor_train, task)
    handles: Any = trains.bags.handles()
    for table, weight in enumerate(task.read_trained_rows()):
        approximation = emblib.TTEmbeddingBag.from_dense(
            weight,
            spec=tensor_train_spec(task, table, PERMUTED),
            counts=task.counts[table].clamp(min=1),
        )
        with torch.no_grad():
            for core, value in zip(handles[f"t{table}"].cores, approximation.cores, strict=True):
                core.copy_(value)
    return trains


def build_planned(task: MethodTask) -> StoredTables:
    """Return tables stored by a plan of `emblib.plan_memory`, within the permitted bytes of all.

    Raises:
        Unsupported: there is no such plan.
    """
    tables = [configure_plain(task, table) for table in range(len(task.num_rows))]
    plain_bytes = sum(task.num_rows) * task.dim * FLOAT_BYTES
    try:
        plan = emblib.plan_memory(
            tables,
            max(1, int(task.share * plain_bytes)),
            trace=_make_trace([config.name for config in tables], task.counts),
            optimizer=_STATELESS_OPTIMIZER,
        )
    except emblib.BudgetError as error:
        raise Unsupported(str(error)) from error
    return StoredTables(task, plan.configs)


class HotRows(Method):
    """Plain tables of the most frequent ids, and tables of another method for the other ids.

    The plain rows and the other tables have half of the permitted bytes each. The bytes of
    `hot_rows` are not counted, because ids numbered in order of frequency would not need it.

    Args:
        task: the tables.
        configure: function that configures the other tables; not as hash tables, because there -1
            is a key.

    Attributes:
        hot: tables of the frequent ids.
        others: tables of the other ids, by another method.
        hot_rows: row in `hot` of each id, -1 for the other ids; int64 [rows of all tables], one
            table after the other.
        starts: first entry of each table in `hot_rows`, int64 [K].
    """

    hot_rows: Tensor
    starts: Tensor

    def __init__(self, task: MethodTask, configure: ConfigureTable) -> None:
        super().__init__(task)
        task.check_counts()
        half_task = task.with_share(0.5)
        num_hot = [half_task.permitted_rows(table) for table in range(len(task.num_rows))]
        tables = [
            EmbeddingBagConfig(num_rows, task.dim, f"t{table}")
            for table, num_rows in enumerate(num_hot)
        ]
        self.hot, self.others = StoredTables(half_task, tables), build_stored(configure, half_task)
        self.trained_bytes = self.hot.trained_bytes + self.others.trained_bytes
        self.served_bytes = self.hot.served_bytes + self.others.served_bytes
        self.ranks = self.others.ranks
        hot_rows = []
        for num_rows, num_hot_rows, counts in zip(task.num_rows, num_hot, task.counts, strict=True):
            hot_ids = counts.argsort(descending=True, stable=True)[:num_hot_rows]
            row_of_id = torch.full((num_rows,), -1)
            row_of_id[hot_ids] = torch.arange(num_hot_rows)
            hot_rows.append(row_of_id)
        self.register_buffer("hot_rows", torch.cat(hot_rows))
        self.register_buffer("starts", torch.tensor([0, *task.num_rows[:-1]]).cumsum(0))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up each id in one of the two collections; in the other -1, whose row is zeros."""
        hot_rows = self.hot_rows[ids + self.starts]
        rows: Tensor = self.hot(hot_rows) + self.others(torch.where(hot_rows < 0, ids, -1))
        return rows


def _make_trace(names: Sequence[str], counts: Sequence[Tensor]) -> emblib.LookupTrace | None:
    """Return a trace in which ids occur as often as in training; None without counts."""
    if not counts:
        return None
    ids = [torch.arange(len(count)).repeat_interleave(count) for count in counts]
    features = [
        emblib.TracedFeature(name, name, len(count))
        for name, count in zip(names, counts, strict=True)
    ]
    return emblib.LookupTrace(
        tuple(features),
        tuple(ids),
        tuple(torch.ones(len(table_ids), dtype=torch.int64) for table_ids in ids),
    )


METHODS: dict[str, Callable[[MethodTask], Method]] = {
    "plain": partial(build_stored, configure_plain),
    "bf16": partial(build_stored, configure_half_precision),
    "narrow": partial(build_stored, configure_narrow),
    "projected": partial(build_stored, configure_projected),
    "hashed": partial(build_stored, configure_hashed),
    "modulo": partial(build_stored, partial(configure_hashed, hash=storage.RowHash.REMAINDER)),
    "hashed_twice": partial(build_stored, partial(configure_hashed, functions=2)),
    "qr_sum": partial(
        build_stored, partial(configure_quotient_remainder, combine=storage.Combine.ADD)
    ),
    "qr_product": partial(
        build_stored, partial(configure_quotient_remainder, combine=storage.Combine.MULTIPLY)
    ),
    "tt_permuted": partial(build_stored, configure_tensor_train),
    "tt_as_given": partial(build_stored, partial(configure_tensor_train, ids="as_given")),
    "tt_from_plain": build_from_plain,
    "tt_hot": partial(HotRows, configure=configure_tensor_train),
    "tt_cached": partial(
        build_stored, partial(configure_cached_train, eviction=emblib.RowEviction.PROJECT)
    ),
    "tt_cached_drop": partial(
        build_stored, partial(configure_cached_train, eviction=emblib.RowEviction.DROP)
    ),
    "hashed_hot": partial(HotRows, configure=configure_hashed),
    "evicting": partial(build_stored, configure_evicting),
    "planned": build_planned,
}
