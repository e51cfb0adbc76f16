"""Choose how each table is stored, so that all of them fit into a number of bytes.

A table with `Dense()` storage has candidates: unchanged, 16-bit or shorter rows, tensor trains,
hashed rows, quotient and remainder, a hash table that evicts, or rows in slower memory behind a
cache. Other tables stay as they are. A candidate has a size in bytes and a *loss*: the estimated
fraction of the table's information that is lost, 0 for the unchanged table and for a cached one.
`plan_memory` picks one candidate per table. It minimises the sum of losses, each times the
*importance* of its table, but its search (`selection`) may miss the minimum.

Losses have two sources. If ids share rows or have none, the loss follows from the skew of the
lookups (`IdSkew`). For the other methods it was measured with `python run.py
+experiment=quality` (`MEASURED`).
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.collections.configs import TableConfig
from emblib.memory_plan.planned import ConfiguredTable, importances_of, planned_tables
from emblib.memory_plan.selection import (
    AS_IT_IS,
    SHARES,
    Limits,
    MemoryChoice,
    select_choices,
    without_dominated,
)
from emblib.optim import SGD, Optimizer
from emblib.sharding.planner.feasible import format_bytes
from emblib.specs import (
    CacheConfig,
    Eviction,
    Placement,
    StochasticRounding,
    TTSpec,
    check_count,
    format_config,
)
from emblib.storage import (
    Dense,
    Hash,
    Hashed,
    Narrow,
    Quantized,
    QuotientRemainder,
    Storage,
    TableSlice,
    TensorTrain,
)
from emblib.storage.base import MemoryBytes, is_fused
from emblib.storage.dense import num_cached_rows
from emblib.trace import LookupTrace
from emblib.trace.skew import ZIPF, IdSkew
from emblib.tt import shapes

_LOG = logging.getLogger(__name__)

Curve = Sequence[tuple[float, float]]
"""Points (x, loss) of a method, see `_curve_x`: the loss falls, or stays, as x grows."""

MEASURED: dict[str, Curve] = {
    "bf16": ((0.5, 0.003),),
    "narrow": ((0.5, 0.005), (0.25, 0.057), (0.0625, 0.257)),
    "tensor_train": ((27.0, 0.14), (18.0, 0.14), (8.0, 0.21), (3.2, 0.51)),
    "quotient_remainder": ((0.5, 0.043), (0.25, 0.063), (0.0625, 0.225)),
}
"""Losses that `+experiment=quality` measured, the sums over its three data sets."""

EVICTED = 0.9  # share of a lookup's information that is lost if its id has no row, measured too

METHODS = ("bf16", "narrow", "tensor_train", "hashed", "quotient_remainder")
"""Methods that `plan_memory` chooses from by default, without backing memory."""

_MEASURED_ROWS = 9065  # rows of the largest table of MEASURED
_LONG_TRAIN_ROWS = 10 * _MEASURED_ROWS  # from more rows on the plan names an assumption
_BF16_SHARE = 0.5  # x of 16-bit rows on their curve
# The bytes of a train grow with the square of its ranks, so steps are at most 5/4; large ranks are
# multiples of 4, so that rows of cores fill vector registers.
_TRIED_RANKS = (*range(1, 9), *range(10, 20, 2), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
# Twice as many shares, for methods whose loss is read from a curve. None is above 1/2: no smaller
# loss was measured there.
_CURVE_SHARES = tuple(sorted({*SHARES, *(0.75 * share for share in SHARES)}, reverse=True))
_NO_STATE = SGD(lr=0.0)  # optimizer of tables that are only served


@dataclass(frozen=True)
class BackingMemory:
    """Slower memory, in which tables may be stored behind a cache in device memory.

    Args:
        nbytes: bytes for all such tables and their optimizer states: of host memory where the
            device is "cuda", of a disk where it is "cpu".
        directory: directory for the files on a disk; each table gets a subdirectory. None, for
            host memory.
        min_hit_rate: minimum share of lookups that a cache is expected to serve, 0 to 1.

    Raises:
        TypeError: `nbytes` is not an integer, or `directory` is not a path.
        ValueError: `nbytes` is below 1, or `min_hit_rate` is outside [0, 1].

    Example:
        >>> backing = emblib.BackingMemory(nbytes=1 << 33, directory="tables", min_hit_rate=0.8)
        >>> backing.nbytes
        8589934592
    """

    nbytes: int
    directory: str | Path | None = None
    min_hit_rate: float = 0.8

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", check_count("nbytes", self.nbytes))
        if self.directory is not None and not isinstance(self.directory, str | os.PathLike):
            raise TypeError(f"directory must be None or a path, got {self.directory!r}")
        if not 0.0 <= self.min_hit_rate <= 1.0:
            raise ValueError(f"min_hit_rate must be in [0, 1], got {self.min_hit_rate}")


@dataclass(frozen=True)
class MemoryPlan:
    """Plan of how each table of a model is stored; `str()` shows it table by table.

    Attributes:
        choices: one choice per table, in the order of the tables.
        budget: maximum bytes of device memory.
        assumptions: assumptions of the plan, one sentence each.
        backing: the `backing` of `plan_memory`: memory for tables behind caches, or None.

    Example:
        >>> user = emblib.EmbeddingBagConfig(1_000_000, 64, "user")
        >>> day = emblib.EmbeddingBagConfig(100, 64, "day")
        >>> plan = emblib.plan_memory([user, day], 1 << 26, optimizer=emblib.optim.SGD(0.1))
        >>> plan.nbytes <= plan.budget
        True
        >>> [config.storage.plan_name for config in plan.configs]
        ['Narrow', 'Plain']
    """

    choices: tuple[MemoryChoice, ...]
    budget: int
    assumptions: tuple[str, ...] = ()
    backing: BackingMemory | None = None

    @property
    def configs(self) -> tuple[Any, ...]:
        """Return the chosen configurations, for collections and `Planner`."""
        return tuple(choice.config for choice in self.choices)

    def of(self, path: str) -> tuple[Any, ...]:
        """Return the configurations of the collection at a path of the model.

        Raises:
            KeyError: the plan has no table of such a collection.
        """
        configs = tuple(choice.config for choice in self.choices if choice.path == path)
        if not configs:
            paths = sorted({choice.path for choice in self.choices})
            raise KeyError(f"the plan has no collection at {path!r}; it has {paths}")
        return configs

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tables in device memory, counted like `budget`."""
        return sum(choice.nbytes for choice in self.choices)

    @property
    def backing_nbytes(self) -> int:
        """Return the bytes of all tables in host memory or on disk."""
        return sum(choice.backing_nbytes for choice in self.choices)

    @property
    def plain_nbytes(self) -> int:
        """Return the bytes of all tables as they were configured, counted like `nbytes`."""
        return sum(choice.plain_nbytes for choice in self.choices)

    @property
    def loss(self) -> float:
        """Return the mean loss of tables, weighted by their importance; 0 if no table has any."""
        largest = max((choice.importance for choice in self.choices), default=0.0)
        if not largest:
            return 0.0
        # Relative to the largest, so that no sum overflows or underflows.
        weights = [choice.importance / largest for choice in self.choices]
        losses = (
            weight * choice.loss for weight, choice in zip(weights, self.choices, strict=True)
        )
        return sum(losses) / sum(weights)

    def __str__(self) -> str:
        header = ("table", "rows x dim", "stored as", "bytes", "of plain", "loss", "why")
        rows = [header]
        for choice in self.choices:
            config = choice.before
            name = f"{choice.path}.{config.name}" if choice.path else config.name
            sizes = f"{config.num_embeddings:,} x {config.embedding_dim}"
            storage_text = AS_IT_IS if choice.method == AS_IT_IS else _describe_storage(choice)
            share = f"1/{choice.plain_nbytes / choice.nbytes:.4g}" if choice.nbytes else "-"
            loss = f"{choice.loss:.3f}"
            rows.append(
                (name, sizes, storage_text, format_bytes(choice.nbytes), share, loss, choice.why)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
        lines = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
            ).rstrip()
            for row in rows
        ]
        summary = (
            f"{format_bytes(self.nbytes)} of {format_bytes(self.budget)} allowed and "
            f"{format_bytes(self.plain_nbytes)} as given; mean loss {self.loss:.3f}"
        )
        if self.backing is not None:
            summary += (
                f"\n{format_bytes(self.backing_nbytes)} of {format_bytes(self.backing.nbytes)} "
                "allowed in memory behind caches"
            )
        return "\n".join([summary, "", *lines, "", *self.assumptions])


def plan_memory(
    tables: nn.Module | Sequence[TableConfig],
    budget: int,
    *,
    trace: LookupTrace | None = None,
    optimizer: Optimizer | None = None,
    serving: int | None = None,
    methods: Sequence[str] | None = None,
    losses: Mapping[str, Curve] | None = None,
    importance: Mapping[str, float] | None = None,
    device: str = "cpu",
    backing: BackingMemory | None = None,
) -> MemoryPlan:
    """Choose how each table is stored: all fit into `budget` bytes, with as little loss as found.

    Tables with a storage other than `Dense()` are not changed, but their bytes count. The model is
    not changed.

    Args:
        tables: a model with collections, or configurations of tables.
        budget: bytes of device memory for all tables and their optimizer states. Where emblib makes
            no updates, the dense gradient counts in place of states.
        trace: recorded lookups; their tables are found by name, or by `path.name` as
            `TraceRecorder` calls them. Ids of tables without traced lookups, with None those of all
            tables, are assumed to be Zipf-distributed.
        optimizer: optimizer of tables whose configuration has none. None is that of their
            collection; for others, an optimizer of torch is assumed to train them.
        serving: 8 or 4: the budget is for serving, with this many bits per value of stored rows;
            methods that compute rows keep their dtype. None: the budget is for training.
        methods: names of the methods to choose from, besides tables as they are: any of `METHODS`,
            "evicting", which makes a hash table by key, and "cached", which `backing` needs. None
            is `METHODS`, plus "cached" if there is `backing`.
        losses: your measured losses, by method, in place of those of `MEASURED`.
        importance: factors of the losses of tables, by name or `path.name`; by default 1 per table.
        device: device of the tables, "cpu" or "cuda".
        backing: memory in which tables may be stored behind a cache; they lose nothing, but lookups
            that miss the cache take longer. Of plans with equal losses, those with fewer misses
            are preferred. None puts no table there.

    Returns:
        A `MemoryPlan`, whose `configs` make collections.

    Raises:
        BudgetError: no choices were found that fit into the budget and `backing`.
        TypeError: an argument has another type.
        ValueError: an argument has a value that is not described above; there are no tables, or two
            have the same name; or the model has `SharedTables`, which stay dense.

    Example:
        >>> user = emblib.EmbeddingBagConfig(10_000_000, 64, "user")
        >>> item = emblib.EmbeddingBagConfig(100_000, 64, "item")
        >>> plan = emblib.plan_memory([user, item], 1 << 28, optimizer=emblib.optim.SGD(lr=0.1))
        >>> [choice.method for choice in plan.choices]
        ['tensor_train', 'as it is']
    """
    budget = check_count("budget", budget)
    if isinstance(losses, Mapping):  # a curve may be an iterator, which is read once
        losses = {
            method: tuple(curve) if isinstance(curve, Iterable) else curve
            for method, curve in losses.items()
        }
    methods = _checked_methods(methods, losses, backing)
    if serving not in (None, 4, 8):
        raise ValueError(f"serving must be None, 8 or 4 bits, got {serving!r}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    _check_backing(backing, serving, device)
    if trace is not None and not isinstance(trace, LookupTrace):
        raise TypeError(f"trace must be a LookupTrace, as TraceRecorder.trace is, got {trace!r}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one of emblib.optim, got {optimizer!r}")
    model_tables = planned_tables(tables, optimizer)
    tables_with_skew = _tables_with_skew(
        model_tables, importances_of(model_tables, importance), trace, losses, backing
    )
    candidates = [_make_candidates(table, methods, serving, device) for table in tables_with_skew]
    indices = select_choices(
        candidates, Limits(budget, None if backing is None else backing.nbytes)
    )
    choices = tuple(map(_with_reason, candidates, indices))
    assumptions = tuple(_describe_assumptions(tables_with_skew, choices, losses, serving))
    return MemoryPlan(choices, budget, assumptions, backing)


def _tables_with_skew(
    tables: Sequence[ConfiguredTable],
    importances: Sequence[float],
    trace: LookupTrace | None,
    losses: Mapping[str, Curve] | None,
    backing: BackingMemory | None,
) -> list[_PlannedTable]:
    """Return the tables with importance, skew of the lookups and share of all lookups."""
    planned_names = frozenset(table.path_name for table in tables)
    curves = {**MEASURED, **(losses or {})}
    counts_by_table = [
        None if trace is None else _traced_counts(trace, table, planned_names) for table in tables
    ]
    traced_totals = [
        float(table_counts.sum()) for table_counts in counts_by_table if table_counts is not None
    ]
    mean_total = sum(traced_totals) / len(traced_totals) if traced_totals else 1.0
    lookups_by_table = [
        mean_total if table_counts is None else float(table_counts.sum())
        for table_counts in counts_by_table
    ]
    return [
        _PlannedTable(
            path=table.path,
            name=table.path_name,
            config=table.config,
            optimizer=table.optimizer,
            importance=importance,
            is_assumed=table_counts is None,
            skew=(
                IdSkew.zipf(table.config.num_embeddings)
                if table_counts is None
                else IdSkew.of_counts(table_counts)
            ),
            curves=curves,
            lookup_share=num_lookups / sum(lookups_by_table),
            backing=backing,
            max_dim=max(other.config.embedding_dim for other in tables if other.path == table.path),
        )
        for table, importance, table_counts, num_lookups in zip(
            tables, importances, counts_by_table, lookups_by_table, strict=True
        )
    ]


@dataclass(frozen=True)
class _PlannedTable:
    """A table to plan, with the data that its losses depend on."""

    path: str
    name: str  # `path.name`
    config: TableConfig
    optimizer: Any
    importance: float
    is_assumed: bool  # whether the skew is assumed, not traced
    skew: IdSkew
    curves: Mapping[str, Curve]
    lookup_share: float  # share of all lookups that read this table
    backing: BackingMemory | None
    max_dim: int  # largest dim in its collection, whose tables may share its cache

    @property
    def rows(self) -> int:
        return self.config.num_embeddings


class _Option(NamedTuple):
    """A configuration that could replace a table's: its loss, and the hit rate of its cache."""

    config: TableConfig
    loss: float
    hit_rate: float = 1.0


Method = Callable[[_PlannedTable], Iterator[_Option]]
"""A method to make a table smaller: yields configurations with the loss of each."""


def _bf16_options(table: _PlannedTable) -> Iterator[_Option]:
    """Yield 16-bit rows, whose loss was measured with stochastic rounding alone."""
    if not is_fused(table.optimizer):
        return  # torch.optim rounds updates to nearest, whose loss was not measured
    loss = _loss_at(table.curves["bf16"], _BF16_SHARE)
    rounding = table.config.rounding or StochasticRounding()
    yield _Option(replace(table.config, data_type=torch.bfloat16, rounding=rounding), loss)


def _narrow_options(table: _PlannedTable) -> Iterator[_Option]:
    """Yield narrower tables, projected to their dim."""
    dim = table.config.embedding_dim
    for columns in sorted({int(share * dim) for share in _CURVE_SHARES} - {0}):
        yield _measured_option(table, "narrow", Narrow(columns))


def _tensor_train_options(table: _PlannedTable) -> Iterator[_Option]:
    """Yield tensor trains of the ranks to try."""
    rank_one_spec = TTSpec(table.rows, table.config.embedding_dim, (1, 1))
    max_ranks = shapes.max_ranks(rank_one_spec.row_factors, rank_one_spec.dim_factors)
    # Small tables clip large ranks to equal ones.
    for ranks in dict.fromkeys(
        tuple(min(rank, max_rank) for max_rank in max_ranks) for rank in _TRIED_RANKS
    ):
        yield _measured_option(table, "tensor_train", TensorTrain(ranks))


def _hashed_options(table: _PlannedTable) -> Iterator[_Option]:
    """Yield tables whose ids share fewer rows; the loss is the share of lookups that collide."""
    for share in SHARES:
        num_rows = int(share * table.rows)
        if num_rows:
            yield _Option(
                replace(table.config, storage=Hashed(num_rows)),
                table.skew.shared_update_rate(num_rows),
            )


def _quotient_remainder_options(table: _PlannedTable) -> Iterator[_Option]:
    """Yield quotient-remainder tables of the shares to try."""
    for share in _CURVE_SHARES:
        try:
            storage = QuotientRemainder.for_share(table.rows, share)
        except ValueError:
            return  # smaller shares raise too
        yield _measured_option(table, "quotient_remainder", storage)


def _evicting_options(table: _PlannedTable) -> Iterator[_Option]:
    """Yield hash tables of fewer rows, which evict."""
    for share in SHARES:
        num_rows = int(share * table.rows)
        if num_rows:
            storage = Hash(eviction=Eviction.LFU)
            lower_bound, upper_bound = table.config.bounds  # which follow from the number of rows
            config = replace(
                table.config,
                num_embeddings=num_rows,
                storage=storage,
                weight_init_min=lower_bound,
                weight_init_max=upper_bound,
            )
            yield _Option(config, EVICTED * table.skew.miss_rate(num_rows))


def _cached_options(table: _PlannedTable) -> Iterator[_Option]:
    """Yield tables in backing memory behind a cache with a sufficient hit rate."""
    backing = table.backing
    if backing is None or not is_fused(table.optimizer):
        return  # only emblib's optimizers update rows behind a cache
    placement, directory = Placement.MANAGED_CACHING, None
    if backing.directory is not None:
        placement, directory = Placement.DISK, Path(backing.directory, table.name)
    for share in SHARES:
        cache = CacheConfig(load_factor=share, directory=directory)
        storage = Dense(placement, cache)
        hit_rate = table.skew.hit_rate(num_cached_rows(storage, table.rows))
        if hit_rate >= backing.min_hit_rate:
            yield _Option(replace(table.config, storage=storage), 0.0, hit_rate)


_OPTIONS_BY_METHOD: dict[str, Method] = {
    "bf16": _bf16_options,
    "narrow": _narrow_options,
    "tensor_train": _tensor_train_options,
    "hashed": _hashed_options,
    "quotient_remainder": _quotient_remainder_options,
    "evicting": _evicting_options,
    "cached": _cached_options,
}


def _measured_option(table: _PlannedTable, method: str, storage: Storage) -> _Option:
    """Return an option whose loss is read from the curve of its method."""
    config = replace(table.config, storage=storage)
    return _Option(config, _loss_at(table.curves[method], _curve_x(config)))


def _curve_x(config: TableConfig) -> float:
    """Return the x of a table on the curve of its method.

    It is the geometric mean of the ranks of a tensor train, columns ÷ dim of a narrow table, and
    stored rows ÷ rows of quotients and remainders. `config` must have one of these storages; the x
    of 16-bit rows is `_BF16_SHARE`.
    """
    storage, rows = config.storage, config.num_embeddings
    if isinstance(storage, TensorTrain):
        return math.prod(storage.ranks) ** (1 / len(storage.ranks))
    if isinstance(storage, Narrow):
        return storage.columns / config.embedding_dim
    assert isinstance(storage, QuotientRemainder)
    return sum(component.rows for component in storage.components(rows)) / rows


def _is_extrapolated(table: _PlannedTable, choice: MemoryChoice) -> bool:
    """Return whether the rank or share of a choice lies outside those with measured losses."""
    if choice.method not in ("tensor_train", "narrow", "quotient_remainder"):
        return False
    measured_xs, row_share = [x for x, _ in table.curves[choice.method]], 1.0 / table.rows
    # Quotients and remainders have a row more or less than their share.
    return (
        not min(measured_xs) - row_share <= _curve_x(choice.config) <= max(measured_xs) + row_share
    )


def _loss_at(curve: Curve, x: float) -> float:
    """Return the loss at x, at most 1: interpolated as a power of x, also beyond the points."""
    points = sorted(curve)
    if len(points) == 1:
        return points[0][1]
    end = min(max(bisect([point for point, _ in points], x), 1), len(points) - 1)
    (x_below, loss_below), (x_above, loss_above) = points[end - 1], points[end]
    power = math.log(loss_above / loss_below) / math.log(x_above / x_below)
    return float(min(1.0, loss_below * (x / x_below) ** power))


def _make_candidates(
    table: _PlannedTable, methods: Sequence[str], serving: int | None, device: str
) -> list[MemoryChoice]:
    """Return the Pareto-optimal choices for a table, the largest first."""

    def make_choice(method: str, option: _Option) -> MemoryChoice:
        nbytes = _memory_bytes(table, option.config, serving, device)
        return MemoryChoice(
            table.path,
            table.config,
            option.config,
            method,
            int(nbytes.device),
            plain_bytes,
            option.loss,
            table.importance,
            backing_nbytes=int(nbytes.host + nbytes.disk),
            hit_rate=option.hit_rate,
            lookups=table.lookup_share,
        )

    plain_bytes = int(_memory_bytes(table, table.config, serving, device).device)
    candidates = [make_choice(AS_IT_IS, _Option(table.config, 0.0))]
    if table.config.storage == Dense():
        for method in methods:
            try:
                candidates += [
                    make_choice(method, option) for option in _OPTIONS_BY_METHOD[method](table)
                ]
            except ValueError as error:  # e.g. initial values that a method cannot draw
                _LOG.info("%s cannot be stored as %s: %s", table.name, method, error)
    return without_dominated(candidates)


def _memory_bytes(
    table: _PlannedTable, config: TableConfig, serving: int | None, device: str
) -> MemoryBytes:
    """Return the bytes of a table that is stored as `config` says, in training or as served."""
    optimizer, storage = table.optimizer, config.storage
    if serving is not None:
        optimizer = _NO_STATE
        if isinstance(storage, Dense):
            config = replace(config, storage=Quantized(serving), optimizer=None)
    nbytes = config.storage.nbytes(TableSlice.whole(config), optimizer, device)
    on_host = isinstance(storage, Dense) and storage.placement is Placement.MANAGED_CACHING
    if device == "cuda" and on_host and serving is None:
        # Tables of one collection may share a cache, whose rows are as long as its longest row.
        widest = replace(config, embedding_dim=table.max_dim)
        shared_cache = config.storage.nbytes(TableSlice.whole(widest), optimizer, device)
        nbytes = nbytes._replace(device=shared_cache.device)
    return nbytes


def _with_reason(choices: Sequence[MemoryChoice], index: int) -> MemoryChoice:
    """Return the picked choice, with the next larger and smaller ones as its reason."""
    choice, sentences = choices[index], []
    better = next((other for other in reversed(choices[:index]) if other.cost < choice.cost), None)
    if better is not None:
        bytes_more = format_bytes(better.nbytes - choice.nbytes)
        sentences.append(
            f"{_describe_storage(better)} would lose {better.loss:.3f} for {bytes_more} more"
        )
    if index + 1 < len(choices):
        smaller = choices[index + 1]
        bytes_less = format_bytes(choice.nbytes - smaller.nbytes)
        sentences.append(
            f"{_describe_storage(smaller)} would lose {smaller.loss:.3f} for {bytes_less} less"
        )
    if not sentences:
        is_only_one = len(choices) == 1
        sentences.append(
            "nothing else is possible" if is_only_one else "larger choices would not lower the loss"
        )
    return replace(choice, why="; ".join(sentences))


def _describe_storage(choice: MemoryChoice) -> str:
    """Describe the storage of a choice for the report."""
    names = {AS_IT_IS: "the table as it is", "bf16": "16-bit rows"}
    storage = choice.config.storage
    if choice.method == "cached" and isinstance(storage, Dense) and storage.cache is not None:
        placement_text = "on disk" if storage.placement is Placement.DISK else "in host memory"
        return (
            f"{format_bytes(choice.backing_nbytes)} {placement_text}, "
            f"1/{1 / storage.cache.load_factor:g} of the rows cached, hit rate "
            f"{choice.hit_rate:.2f}"
        )
    return names.get(choice.method) or format_config(storage)


def _describe_assumptions(
    tables: Sequence[_PlannedTable],
    choices: Sequence[MemoryChoice],
    losses: Mapping[str, Curve] | None,
    serving: int | None,
) -> Iterator[str]:
    """Yield the assumptions of a plan."""
    names_without_trace = [table.name for table in tables if table.is_assumed]
    if names_without_trace:
        yield (
            f"No lookups are known of {len(names_without_trace)} of {len(tables)} tables "
            f"({_first_names(names_without_trace)}): their ids are taken to be Zipf-distributed, "
            f"s = {ZIPF}. Record a trace (emblib.TraceRecorder)."
        )
    if not losses:
        yield (
            "Losses other than by a hash or eviction were measured with +experiment=quality on "
            f"tables of up to {_MEASURED_ROWS:,} rows (docs/memory.md); measure yours likewise."
        )
        long_train_names = [
            table.name
            for table, choice in zip(tables, choices, strict=True)
            if choice.method == "tensor_train" and table.rows > _LONG_TRAIN_ROWS
        ]
        if long_train_names:
            yield (
                f"Tensor trains of larger tables ({_first_names(long_train_names)}) are taken to "
                "lose what trains of their ranks lose there; so small a share of the bytes was not "
                "measured."
            )
    extrapolated_names = [
        table.name
        for table, choice in zip(tables, choices, strict=True)
        if _is_extrapolated(table, choice)
    ]
    if extrapolated_names:
        yield (
            f"Losses of {_first_names(extrapolated_names)} are extrapolated: no rank or share of "
            "the bytes as small, or as large, was measured."
        )
    not_fused_names = [table.name for table in tables if not is_fused(table.optimizer)]
    if not_fused_names and serving is None:
        yield (
            "16-bit rows are left out where emblib makes no updates, since others round them to "
            f"nearest, which was not measured ({_first_names(not_fused_names)}): give plan_memory "
            "the optimizer."
        )
    if cached_names := [choice.before.name for choice in choices if choice.method == "cached"]:
        yield (
            f"Hit rates ({_first_names(cached_names)}) are those of a cache of the least recently "
            "used rows whose ids are drawn one after another; a step with misses takes longer, "
            "which is not weighed."
        )
    if serving:
        yield f"The loss of rows of {serving} bits is not counted."


def _first_names(names: Sequence[str]) -> str:
    """Join the first five names, and "..." if there are more."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _traced_counts(
    trace: LookupTrace, table: ConfiguredTable, planned_names: frozenset[str]
) -> Tensor | None:
    """Return the number of lookups per id, int64 `[rows]`; None if the trace has no valid one.

    Without a traced table at `path.name`, the only traced table of this name is used, unless it is
    another planned table; `planned_names` are the `path.name` of all.
    """
    traced_tables = {feature.table for feature in trace.features}
    path_name = table.path_name
    if path_name not in traced_tables:
        tables_of_name = {
            name for name in traced_tables if name.rpartition(".")[2] == table.config.name
        }
        if len(tables_of_name) != 1 or tables_of_name & planned_names:
            return None
        (path_name,) = tables_of_name
    num_rows = table.config.num_embeddings
    counts = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
    for ids, feature in zip(trace.ids, trace.features, strict=True):
        if feature.table == path_name:
            table_ids = ids.to(torch.int64)
            is_valid = (table_ids >= 0) & (table_ids < num_rows)
            counts += torch.bincount(table_ids[is_valid], minlength=num_rows)
    return counts if counts.any() else None


def _checked_methods(
    methods: Sequence[str] | None,
    losses: Mapping[str, Curve] | None,
    backing: BackingMemory | None,
) -> Sequence[str]:
    """Return the methods to choose from.

    Raises:
        TypeError: `losses` is not a dict.
        ValueError: a method is unknown, `methods` do not go with `backing`, or `losses` are of
            other methods or not points of a falling curve.
    """
    if methods is None:
        methods = METHODS if backing is None else (*METHODS, "cached")
    is_list = isinstance(methods, Iterable) and not isinstance(methods, str)
    methods = list(methods) if is_list else methods  # an iterator is read once
    if not is_list or any(method not in _OPTIONS_BY_METHOD for method in methods):
        method_names = ", ".join(_OPTIONS_BY_METHOD)
        raise ValueError(f"methods must be a list of {method_names}, got {methods!r}")
    if ("cached" in methods) is not (backing is not None):
        raise ValueError(
            "the method 'cached' and backing=BackingMemory(nbytes), the memory behind the cache, "
            f"go together, got methods={methods!r} and backing={backing!r}"
        )
    if losses is not None and not isinstance(losses, Mapping):
        raise TypeError(f"losses must be a dict of curves by method, got {losses!r}")
    for method, curve in (losses or {}).items():
        if method not in MEASURED:
            raise ValueError(f"losses are measured of {', '.join(MEASURED)}, not of {method!r}")
        try:
            points = sorted((float(x), float(loss)) for x, loss in curve)
        except (TypeError, ValueError):
            points = []
        is_falling = all(
            x < next_x and y >= next_y for (x, y), (next_x, next_y) in pairwise(points)
        )
        if not points or not is_falling or not all(x > 0 and 0 < loss <= 1 for x, loss in points):
            raise ValueError(
                f"losses[{method!r}] must be pairs (x > 0, 0 < loss <= 1) whose losses fall as x "
                f"grows, got {curve!r}"
            )
    return methods


def _check_backing(backing: BackingMemory | None, serving: int | None, device: str) -> None:
    """Raise TypeError or ValueError if backing memory does not suit the device."""
    if backing is None:
        return
    if not isinstance(backing, BackingMemory):
        raise TypeError(f"backing must be None or a BackingMemory(nbytes), got {backing!r}")
    if serving is not None:
        raise ValueError(
            f"rows of {serving} bits have no cache: leave backing out, or plan for training"
        )
    if (device == "cpu") is not (backing.directory is not None):
        raise ValueError(
            "tables are cached in the memory of a GPU from host memory, and in that of the CPU "
            "from files: give BackingMemory a directory for device='cpu', and none for 'cuda'; "
            f"got device={device!r} and {backing!r}"
        )
