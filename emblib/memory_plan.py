"""Choose how each table is stored, so that all of them fit into a number of bytes.

For every table there are candidates: its rows as they are, 16-bit or shorter rows, tensor trains,
rows shared by a hash, quotient and remainder, or a hash table that evicts. Each has its bytes and a
*loss*: the part of what the table tells a model that is lost, 0 for the table as it is and 1 where
every id shares its row with all others. `plan_memory` picks one candidate per table so that the sum
of losses, each times the *importance* of its table, is least.

Losses come from two sources. Where ids share rows or have none, the loss follows from how often ids
are looked up (`IdSkew`). For the other methods it was measured with `python run.py
+experiment=quality` (`MEASURED`).
"""

from __future__ import annotations

import logging
import math
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from emblib.collections.configs import TableConfig
from emblib.collections.optimizers.fused import trained_configs
from emblib.optim import SGD, Optimizer
from emblib.sharding.planner.feasible import size
from emblib.sharding.shard import collections_of
from emblib.specs import Eviction, StochasticRounding, TTSpec, brief, check_count
from emblib.storage import (
    Dense,
    Hash,
    Hashed,
    Narrow,
    Quantized,
    QuotientRemainder,
    TableSlice,
    TensorTrain,
)
from emblib.storage.base import is_fused
from emblib.trace import LookupTrace
from emblib.trace.skew import ZIPF, IdSkew
from emblib.tt import shapes

_LOG = logging.getLogger(__name__)

Curve = Sequence[tuple[float, float]]
"""Points (x, loss) of a method; x is the rank of tensor trains, the share of bytes of others."""

MEASURED: dict[str, Curve] = {
    "bf16": ((0.5, 0.003),),
    "narrow": ((0.5, 0.005), (0.25, 0.057), (0.0625, 0.257)),
    "tensor_train": ((27.0, 0.14), (18.0, 0.14), (8.0, 0.21), (3.2, 0.51)),
    "quotient_remainder": ((0.5, 0.043), (0.25, 0.063), (0.0625, 0.225)),
}
"""Losses that `+experiment=quality` measured, the sums over its three data sets."""

EVICTED = 0.9  # of what a lookup tells is lost where its id has no row, measured likewise

METHODS = ("bf16", "narrow", "tensor_train", "hashed", "quotient_remainder")
"""What `plan_memory` chooses from by default, besides tables as they are."""

AS_IT_IS = "as it is"
"""The method of a table that is not changed."""

_MEASURED_ROWS = 9065  # of the largest table of MEASURED
_SHARES = tuple(2.0**-n for n in range(1, 13))  # of rows or bytes, that are tried
_RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
_NO_STATE = SGD(lr=0.0)  # of tables that are served
_UNITS = 4096  # into which the budget is divided, or more for many tables


class BudgetError(ValueError):
    """Tables do not fit into the budget, however they are stored.

    Attributes:
        short: bytes missing.
    """

    def __init__(self, message: str, short: int = 0) -> None:
        super().__init__(message)
        self.short = short

    def __reduce__(self) -> tuple[object, ...]:
        return BudgetError, (str(self), self.short)


@dataclass(frozen=True)
class MemoryChoice:
    """How one table is stored.

    Attributes:
        path: of the collection that has the table, empty for a configuration given alone.
        before: the configuration that was given.
        config: the configuration that was chosen.
        method: "as it is", or one of the methods.
        nbytes: of the table, optimizer states included, or as served.
        plain_nbytes: likewise, of the table as it was given.
        loss: of the table, 0 to 1.
        importance: of the table, by which its loss counts.
        why: the choices next to this one, in a sentence.
    """

    path: str
    before: TableConfig
    config: TableConfig
    method: str
    nbytes: int
    plain_nbytes: int
    loss: float
    importance: float
    why: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """How each of a model's tables is stored; `str()` shows it table by table.

    Attributes:
        choices: one per table, in the order given.
        budget: bytes that were allowed.
        assumptions: what the plan takes for granted, a sentence each.
    """

    choices: tuple[MemoryChoice, ...]
    budget: int
    assumptions: tuple[str, ...] = ()

    @property
    def configs(self) -> tuple[Any, ...]:
        """Return the configurations that were chosen, for collections and `Planner`."""
        return tuple(choice.config for choice in self.choices)

    def of(self, path: str) -> tuple[Any, ...]:
        """Return the configurations of the collection at a path of the model.

        Raises:
            KeyError: the plan has no table of such a collection.
        """
        found = tuple(choice.config for choice in self.choices if choice.path == path)
        if not found:
            paths = sorted({choice.path for choice in self.choices})
            raise KeyError(f"the plan has no collection at {path!r}; it has {paths}")
        return found

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tables."""
        return sum(choice.nbytes for choice in self.choices)

    @property
    def plain_nbytes(self) -> int:
        """Return the bytes of all tables as they were given."""
        return sum(choice.plain_nbytes for choice in self.choices)

    @property
    def loss(self) -> float:
        """Return the mean loss of tables, weighted by their importance."""
        total = sum(choice.importance for choice in self.choices)
        return sum(choice.importance * choice.loss for choice in self.choices) / max(total, 1e-300)

    def __str__(self) -> str:
        head = ("table", "rows x dim", "stored as", "bytes", "of plain", "loss", "why")
        lines = [head]
        for choice in self.choices:
            before = choice.before
            name = f"{choice.path}.{before.name}" if choice.path else before.name
            sizes = f"{before.num_embeddings:,} x {before.embedding_dim}"
            stored = "as it is" if choice.method == AS_IT_IS else _described(choice)
            share = f"1/{choice.plain_nbytes / choice.nbytes:.4g}" if choice.nbytes else "-"
            number = f"{choice.loss:.3f}"
            lines.append((name, sizes, stored, size(choice.nbytes), share, number, choice.why))
        widths = [max(len(line[c]) for line in lines) for c in range(len(head) - 1)]
        table = [
            "  ".join(
                [*(w.ljust(n) for w, n in zip(line, widths, strict=False)), line[-1]]
            ).rstrip()
            for line in lines
        ]
        total = (
            f"{size(self.nbytes)} of {size(self.budget)} allowed and {size(self.plain_nbytes)} as "
            f"given; mean loss {self.loss:.3f}"
        )
        return "\n".join([total, "", *table, "", *self.assumptions])


def plan_memory(
    tables: nn.Module | Sequence[TableConfig],
    budget: int,
    *,
    trace: LookupTrace | None = None,
    optimizer: Optimizer | None = None,
    serving: int | None = None,
    methods: Sequence[str] = METHODS,
    losses: Mapping[str, Curve] | None = None,
    importance: Mapping[str, float] | None = None,
    device: str = "cpu",
) -> MemoryPlan:
    """Choose how each table is stored, so that all fit into `budget` bytes and lose least.

    Tables of another storage or placement than `Dense()` stay as they are, and count.

    Args:
        tables: a model with collections, or configurations of tables.
        budget: bytes of device memory for all tables and their optimizer states.
        trace: recorded lookups; their tables are found by name, or by `path.name` as
            `TraceRecorder` calls them. Without it ids are taken to be Zipf-distributed.
        optimizer: of the tables, if `tables` is not a model and they have none.
        serving: 8 or 4: the budget is of a model that is served with rows of that many bits, where
            rows are stored; methods that compute rows keep their own. Left out: of training.
        methods: that may be chosen, of `METHODS` and "evicting", which makes a hash table by key.
        losses: measured losses of your own, by method, in place of `MEASURED`.
        importance: factors of the losses of tables, by name or `path.name`; by default 1 per table.
        device: "cpu" or "cuda", where the tables will be.

    Returns:
        A `MemoryPlan`, whose `configs` make collections.

    Raises:
        BudgetError: the smallest choice of every table takes more.
        TypeError, ValueError: wrong arguments, or a table in `importance` that is not there.

    Example:
        >>> tables = [EmbeddingBagConfig(10**7, 64, "user"), EmbeddingBagConfig(10**5, 64, "item")]
        >>> plan = emblib.plan_memory(tables, 1 << 28, optimizer=emblib.optim.SGD(lr=0.1))
        >>> [choice.method for choice in plan.choices]
        ['tensor_train', 'as it is']
    """
    budget = check_count("budget", budget)
    _check_methods(methods, losses)
    if serving not in (None, 4, 8):
        raise ValueError(f"serving must be None, 8 or 4 bits, got {serving!r}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if trace is not None and not isinstance(trace, LookupTrace):
        raise TypeError(f"trace must be a LookupTrace, as TraceRecorder.trace is, got {trace!r}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one of emblib.optim, got {optimizer!r}")
    found = _tables(tables, optimizer)
    importances = _importances(found, importance)
    curves = {**MEASURED, **(losses or {})}
    planned = frozenset(f"{path}.{config.name}" for path, config, _ in found)
    given = []
    for (path, config, trained_by), factor in zip(found, importances, strict=True):
        counts = None if trace is None else _counts(trace, path, config, planned)
        skew = IdSkew.zipf(config.num_embeddings) if counts is None else IdSkew.of_counts(counts)
        given.append(_Table(path, config, trained_by, factor, counts is None, skew, curves))
    options = [_candidates(table, methods, serving, device) for table in given]
    picked = _pick(options, budget)
    choices = tuple(_explained(some, k) for some, k in zip(options, picked, strict=True))
    return MemoryPlan(choices, budget, tuple(_assumptions(given, choices, losses, serving)))


@dataclass(frozen=True)
class _Table:
    path: str
    config: TableConfig
    optimizer: Optimizer | None
    importance: float
    is_assumed: bool  # whether the skew is
    skew: IdSkew
    curves: Mapping[str, Curve]

    @property
    def name(self) -> str:
        return f"{self.path}.{self.config.name}" if self.path else self.config.name

    @property
    def rows(self) -> int:
        return self.config.num_embeddings


Method = Callable[[_Table], Iterator[tuple[TableConfig, float]]]
"""A method to make a table smaller: yields configurations with the loss of each."""


def _half(table: _Table) -> Iterator[tuple[TableConfig, float]]:
    if not is_fused(table.optimizer):
        return  # updates by others are rounded to nearest, which was not measured
    loss = _at(table.curves["bf16"], 0.5)
    rounding = table.config.rounding or StochasticRounding()
    yield replace(table.config, data_type=torch.bfloat16, rounding=rounding), loss


def _narrow(table: _Table) -> Iterator[tuple[TableConfig, float]]:
    dim = table.config.embedding_dim
    for columns in sorted({int(share * dim) for share in _SHARES} - {0}):
        loss = _at(table.curves["narrow"], columns / dim)
        yield replace(table.config, storage=Narrow(columns)), loss


def _tensor_train(table: _Table) -> Iterator[tuple[TableConfig, float]]:
    for rank in _RANKS:
        with_ranks = TTSpec(table.rows, table.config.embedding_dim, (1, 1))
        most = shapes.most_ranks(with_ranks.row_factors, with_ranks.dim_factors)
        ranks = tuple(min(rank, top) for top in most)
        loss = _at(table.curves["tensor_train"], math.prod(ranks) ** (1 / len(ranks)))
        yield replace(table.config, storage=TensorTrain(ranks)), loss


def _hashed(table: _Table) -> Iterator[tuple[TableConfig, float]]:
    for share in _SHARES:
        rows = int(share * table.rows)
        if rows:
            yield replace(table.config, storage=Hashed(rows)), table.skew.shared(rows)


def _quotient_remainder(table: _Table) -> Iterator[tuple[TableConfig, float]]:
    for share in _SHARES:
        # The larger m for which ceil(rows / m) + m is about `share * rows`.
        half = share * table.rows / 2
        if half**2 < table.rows:
            return
        divisor = max(1, int(half + math.sqrt(half**2 - table.rows)))
        storage = QuotientRemainder(divisor)
        yield replace(table.config, storage=storage), _at(table.curves["quotient_remainder"], share)


def _evicting(table: _Table) -> Iterator[tuple[TableConfig, float]]:
    for share in _SHARES:
        rows = int(share * table.rows)
        if rows:
            storage = Hash(eviction=Eviction.LFU)
            low, high = table.config.bounds  # which follow from the number of rows
            config = replace(
                table.config,
                num_embeddings=rows,
                storage=storage,
                weight_init_min=low,
                weight_init_max=high,
            )
            yield config, EVICTED * table.skew.missed(rows)


_MAKERS: dict[str, Method] = {
    "bf16": _half,
    "narrow": _narrow,
    "tensor_train": _tensor_train,
    "hashed": _hashed,
    "quotient_remainder": _quotient_remainder,
    "evicting": _evicting,
}


def _at(curve: Curve, x: float) -> float:
    """Return the loss at x: a power of x between points and beyond them, at most 1."""
    points = sorted(curve)
    if len(points) == 1:
        return points[0][1]
    at = min(max(bisect([point for point, _ in points], x), 1), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    power = math.log(high / low) / math.log(right / left)
    return float(min(1.0, low * (x / left) ** power))


def _candidates(
    table: _Table, methods: Sequence[str], serving: int | None, device: str
) -> list[MemoryChoice]:
    """Return the choices for a table that no smaller one is as good as, the largest first."""

    def choice(config: TableConfig, method: str, loss: float) -> MemoryChoice:
        nbytes = _nbytes(config, table.optimizer, serving, device)
        return MemoryChoice(
            table.path, table.config, config, method, nbytes, plain, loss, table.importance
        )

    plain = _nbytes(table.config, table.optimizer, serving, device)
    every = [choice(table.config, AS_IT_IS, 0.0)]
    if table.config.storage == Dense():
        for method in methods:
            try:
                every += [choice(config, method, loss) for config, loss in _MAKERS[method](table)]
            except ValueError as error:  # e.g. initial values that a method cannot draw
                _LOG.info("%s cannot be stored as %s: %s", table.name, method, error)
    every.sort(key=lambda c: (c.nbytes, c.loss))
    kept: list[MemoryChoice] = []
    for one in every:
        if not kept or one.loss < kept[-1].loss:
            kept.append(one)
    return kept[::-1]


def _nbytes(
    config: TableConfig, optimizer: Optimizer | None, serving: int | None, device: str
) -> int:
    if serving is not None:
        optimizer = _NO_STATE
        if isinstance(config.storage, Dense):
            config = replace(config, storage=Quantized(serving), optimizer=None)
    return int(config.storage.nbytes(TableSlice.whole(config), optimizer, device).device)


def _pick(options: Sequence[Sequence[MemoryChoice]], budget: int) -> list[int]:
    """Return the number of a choice per table: the least sum of losses within the budget.

    A knapsack over bytes in units, rounded up; what rounding leaves is given to whoever gains most.
    """
    smallest = [len(choices) - 1 for choices in options]
    need = sum(choices[-1].nbytes for choices in options)
    if need > budget:
        largest = max(options, key=lambda choices: choices[-1].nbytes)[-1]
        raise BudgetError(
            f"the tables take at least {size(need)}, which is {size(need - budget)} more than the "
            f"budget of {size(budget)}: raise it, allow other methods, or make tables smaller; the "
            f"largest is then {largest.before.name!r} with {size(largest.nbytes)}",
            need - budget,
        )
    picked = _knapsack(options, budget) or smallest
    for uniform in _uniform(options):
        if _total(options, uniform) <= budget and _worse(options, picked, uniform):
            picked = uniform
    return _filled(options, picked, budget)


def _knapsack(options: Sequence[Sequence[MemoryChoice]], budget: int) -> list[int]:
    """Return the numbers of the best choices, empty where rounded bytes do not fit."""
    units = max(_UNITS, 16 * len(options))
    best = torch.zeros(units + 1, dtype=torch.float64)  # by units that may be used
    taken = []
    for choices in options:
        found = torch.full((len(choices), units + 1), math.inf, dtype=torch.float64)
        for k, choice in enumerate(choices):
            cost = _units(choice, units, budget)
            if cost <= units:
                found[k, cost:] = best[: units + 1 - cost] + choice.importance * choice.loss
        best, number = found.min(0)
        taken.append(number.to(torch.int16))
    if not math.isfinite(float(best[units])):
        return []
    picked, left = [], units
    for choices, number in zip(reversed(options), reversed(taken), strict=True):
        picked.append(int(number[left]))
        left -= _units(choices[picked[-1]], units, budget)
    return picked[::-1]


def _units(choice: MemoryChoice, units: int, budget: int) -> int:
    return -(-choice.nbytes * units // budget)


def _uniform(options: Sequence[Sequence[MemoryChoice]]) -> Iterator[list[int]]:
    """Yield plans that treat all tables alike: the same method at about the same share of bytes."""
    for method in {choice.method for choices in options for choice in choices}:
        for share in _SHARES:
            picked = []
            for choices in options:
                fits = [
                    k
                    for k, choice in enumerate(choices)
                    if choice.method == method and choice.nbytes <= share * choices[0].nbytes
                ]
                picked.append(fits[0] if fits else len(choices) - 1)
            yield picked


def _filled(
    options: Sequence[Sequence[MemoryChoice]], picked: Sequence[int], budget: int
) -> list[int]:
    """Spend bytes that are left on the choices that gain most per byte."""
    result, left = list(picked), budget - _total(options, picked)
    while True:
        gains = []
        for t, (choices, k) in enumerate(zip(options, result, strict=True)):
            for better in range(k):
                more = choices[better].nbytes - choices[k].nbytes
                gain = choices[k].importance * (choices[k].loss - choices[better].loss)
                if more <= left and gain > 0:
                    gains.append((gain / more, -t, better))
        if not gains:
            return result
        _, t, better = max(gains)
        left -= options[-t][better].nbytes - options[-t][result[-t]].nbytes
        result[-t] = better


def _total(options: Sequence[Sequence[MemoryChoice]], picked: Sequence[int]) -> int:
    return sum(choices[k].nbytes for choices, k in zip(options, picked, strict=True))


def _worse(
    options: Sequence[Sequence[MemoryChoice]], one: Sequence[int], other: Sequence[int]
) -> bool:
    sums = [
        sum(c[k].importance * c[k].loss for c, k in zip(options, picked, strict=True))
        for picked in (one, other)
    ]
    return sums[0] > sums[1]


def _explained(choices: Sequence[MemoryChoice], picked: int) -> MemoryChoice:
    choice, said = choices[picked], []
    if picked:
        better = choices[picked - 1]
        more = size(better.nbytes - choice.nbytes)
        said.append(f"{_described(better)} would lose {better.loss:.3f} for {more} more")
    if picked + 1 < len(choices):
        smaller = choices[picked + 1]
        less = size(choice.nbytes - smaller.nbytes)
        said.append(f"{_described(smaller)} would lose {smaller.loss:.3f} for {less} less")
    return replace(choice, why="; ".join(said) or "nothing else is possible")


def _described(choice: MemoryChoice) -> str:
    names = {AS_IT_IS: "the table as it is", "bf16": "16-bit rows"}
    return names.get(choice.method) or brief(choice.config.storage)


def _assumptions(
    tables: Sequence[_Table],
    choices: Sequence[MemoryChoice],
    losses: Mapping[str, Curve] | None,
    serving: int | None,
) -> Iterator[str]:
    """Yield what a plan takes for granted."""
    assumed = [table.name for table in tables if table.is_assumed]
    if assumed:
        yield (
            f"No lookups are known of {len(assumed)} of {len(tables)} tables ({_some(assumed)}): "
            f"their ids are taken to be Zipf-distributed, s = {ZIPF}. Record a trace "
            "(emblib.TraceRecorder)."
        )
    if not losses:
        yield (
            "Losses other than by a hash or eviction were measured with +experiment=quality on "
            f"tables of up to {_MEASURED_ROWS:,} rows (docs/memory.md); measure yours likewise."
        )
        large = [
            table.name
            for table, choice in zip(tables, choices, strict=True)
            if choice.method == "tensor_train" and table.rows > 10 * _MEASURED_ROWS
        ]
        if large:
            yield (
                f"Tensor trains of larger tables ({_some(large)}) are taken to lose what trains of "
                "their ranks lose there; so small a share of the bytes was not measured."
            )
    by_others = [table.name for table in tables if not is_fused(table.optimizer)]
    if by_others and serving is None:
        yield (
            "16-bit rows are left out where emblib makes no updates, since others round them to "
            f"nearest, which was not measured ({_some(by_others)}): give plan_memory the optimizer."
        )
    if serving:
        yield f"The loss of rows of {serving} bits is not counted."


def _some(names: Sequence[str]) -> str:
    """Return the first names."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _tables(
    tables: nn.Module | Sequence[TableConfig], optimizer: Optimizer | None
) -> list[tuple[str, TableConfig, Optimizer | None]]:
    """Return path, configuration and optimizer of each table."""
    found: list[tuple[str, TableConfig, Any]]
    if not isinstance(tables, nn.Module):
        for config in tables:
            if not isinstance(config, TableConfig):
                raise TypeError(
                    "tables must be a model, or a list of EmbeddingBagConfig or EmbeddingConfig, "
                    f"got {config!r}"
                )
        found = [("", config, config.optimizer or optimizer) for config in tables]
    else:
        found = [
            (path, config, config.optimizer or collection.optimizer)
            for path, collection in collections_of(tables).items()
            for config in trained_configs(collection)
        ]
    if not found:
        raise ValueError("there are no tables: the model has no collection, or the list is empty")
    return found


def _importances(
    found: Sequence[tuple[str, TableConfig, Optimizer | None]],
    importance: Mapping[str, float] | None,
) -> list[float]:
    """Return the importance of each table."""
    given, known = dict(importance or {}), set()
    importances = []
    for path, config, _ in found:
        own = f"{path}.{config.name}"
        known |= {own, config.name}
        importances.append(float(given.get(own, given.get(config.name, 1.0))))
    if unknown := sorted(given.keys() - known):
        raise ValueError(
            f"importance of tables that are not there: {unknown}; have {sorted(known)}"
        )
    if not all(math.isfinite(number) and number >= 0 for number in importances):
        raise ValueError(f"importance must be finite numbers >= 0, got {importance}")
    return importances


def _counts(
    trace: LookupTrace, path: str, config: TableConfig, planned: frozenset[str]
) -> Tensor | None:
    """Return how often each id was looked up, None where the trace does not have the table.

    A traced table of the same name at another path is taken where it is the only one, and not
    another planned table.
    """
    traced = {f.table for f in trace.features}
    own = f"{path}.{config.name}"
    if own not in traced:
        alike = {name for name in traced if name.rpartition(".")[2] == config.name}
        if len(alike) != 1 or alike & planned:
            return None
        (own,) = alike
    rows = config.num_embeddings
    counts = torch.zeros(rows, dtype=torch.int64)
    for ids, feature in zip(trace.ids, trace.features, strict=True):
        if feature.table == own:
            valid = ids.to(torch.int64)
            counts += torch.bincount(valid[(valid >= 0) & (valid < rows)], minlength=rows)
    return counts if counts.any() else None


def _check_methods(methods: Sequence[str], losses: Mapping[str, Curve] | None) -> None:
    if isinstance(methods, str) or any(method not in _MAKERS for method in methods):
        raise ValueError(f"methods must be a list of {', '.join(_MAKERS)}, got {methods!r}")
    for method, curve in (losses or {}).items():
        if method not in MEASURED:
            raise ValueError(f"losses are measured of {', '.join(MEASURED)}, not of {method!r}")
        points = sorted(curve)
        falls = all(a[0] < b[0] and a[1] >= b[1] for a, b in pairwise(points))
        if not points or not falls or not all(x > 0 and 0 < loss <= 1 for x, loss in points):
            raise ValueError(
                f"losses[{method!r}] must be pairs (x > 0, 0 < loss <= 1) whose losses fall as x "
                f"grows, got {curve!r}"
            )
