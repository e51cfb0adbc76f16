"""Cells: one workload and the contenders measured on it, expanded from cases and sweep."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.config.schema import (
    AXES,
    CacheConfig,
    CaseConfig,
    Config,
    Design,
    Distribution,
    KeysConfig,
    Scaling,
    TTConfig,
    UsageError,
    WorkloadConfig,
)
from experiments.contenders import registry

SWEEP = "sweep"  # section of the cells that come from `sweep:`; cases use their own names

# Computed from a trace; they are no programs to time.
IDEALS = {"offline": "offline optimum (ideal)", "static_top": "static top-k (ideal)"}
# Computed as well: the same policies without sets, for which an experiment asks by name.
EXACT = {"exact_lru": "exact LRU", "exact_lfu": "exact LFU"}
COMPUTED = IDEALS | EXACT
LOOKUPS = {"lookups": "the lookups"}  # the one arm of a trace that is only looked at
CALIBRATED = {"constants": "constants of the cost model"}  # the one arm of a calibration
PREDICTED = {"trains": "tensor trains"}  # the one arm of kind=predictions
PLAIN = "plain"
TRAINED = {  # methods of kind=quality, in the order in which they are tried
    "plain": "plain",
    "bf16": "16-bit rows",
    "narrow": "narrower",
    "projected": "narrower, projected",
    "hashed": "hashed",
    "modulo": "remainder",
    "hashed_twice": "hashed twice",
    "qr_sum": "quotient + remainder",
    "qr_product": "quotient × remainder",
    "tt_permuted": "tensor train",
    "tt_as_given": "tensor train, ids as given",
    "tt_from_plain": "tensor train from plain",
    "tt_hot": "hot rows + tensor train",
    "tt_cached": "cached tensor train",
    "tt_cached_drop": "cached tensor train, dropping",
    "hashed_hot": "hot rows + hashed",
    "evicting": "dynamic, evicting",
    "planned": "planned per table",
    "robe": "ROBE",
    "dhe": "DHE",
}
Condition = Callable[[dict[str, Any]], bool]


def label_of(contender: str) -> str:
    """Return the label of a contender or of a computed arm."""
    computed = COMPUTED | LOOKUPS | CALIBRATED | PREDICTED | TRAINED
    return computed.get(contender) or registry.facts_of(contender).label


def variants_of(contender: str) -> str:
    """Return what there is an arm for each of: "rank", "cache", or nothing."""
    if contender in LOOKUPS | CALIBRATED | PREDICTED:
        return ""
    return "cache" if contender in COMPUTED else registry.facts_of(contender).variants


@dataclass(frozen=True, order=True)
class Arm:
    """One contender of a cell with its variant.

    A TT contender has a rank, one with a cache that cache's size, and a table of keys its load.
    """

    contender: str
    rank: int = 0
    cache: float = 0.0  # fraction of all rows
    load: float = 0.0

    @property
    def key(self) -> str:
        """Return a short name, unique within a cell."""
        if self.cache:
            return f"{self.contender}@{self.cache:g}"
        if self.load:
            return f"{self.contender}@{self.load:g}"
        return f"{self.contender}-{self.rank}" if self.rank else self.contender

    @property
    def label(self) -> str:
        """Return the name in reports."""
        name = label_of(self.contender)
        if self.cache:
            return f"{name} {100 * self.cache:g} %"
        if self.load:
            return f"{name}, load {self.load:g}"
        return f"{name} rank {self.rank}" if self.rank else name


@dataclass(frozen=True)
class Cell:
    """One workload; all its arms are measured interleaved, on the same batches."""

    section: str
    title: str
    workload: WorkloadConfig
    arms: tuple[Arm, ...]
    tt: TTConfig = field(default_factory=TTConfig)
    rows_scale: float = 1.0  # < 1 where memory or a smoke run asked for smaller tables
    note: str = ""
    cache: CacheConfig = field(default_factory=CacheConfig)
    kind: str = "time"
    keys: KeysConfig = field(default_factory=KeysConfig)
    ranks: int = 0  # 0: those of the run
    scaling: Scaling = Scaling.weak
    options: dict[str, Any] = field(default_factory=dict)  # of its kind

    def with_arms(self, *arms: Arm) -> Cell:
        """Return the cell with other arms."""
        return replace(self, arms=arms)

    @property
    def key(self) -> str:
        """Return what identifies the cell within its run."""
        values = " ".join(f"{a}={getattr(self.workload, a):g}" for a in AXES)
        world = f" W={self.ranks} {self.scaling.value}" * bool(self.ranks)
        return f"{self.section} {values}{world}"


def arms_of(
    contenders: Sequence[str],
    ranks: Sequence[int],
    fractions: Sequence[float],
    loads: Sequence[float] = (),
) -> tuple[Arm, ...]:
    """Return one arm per contender and, where it has them, rank, cache size or table load."""

    def variants(name: str) -> list[Arm]:
        if loads:
            return [Arm(name, load=load) for load in loads]
        match variants_of(name):
            case "cache":
                return [Arm(name, cache=fraction) for fraction in fractions]
            case "rank":
                return [Arm(name, rank) for rank in ranks]
        return [Arm(name)]

    return tuple(arm for name in contenders for arm in variants(name))


def case_cells(config: Config, kind_of: Callable[[CaseConfig], str]) -> list[Cell]:
    """Return a cell per case; `kind_of` says of which kind."""
    return [
        Cell(
            key,
            c.title or key,
            c.workload,
            arms_of(c.contenders, c.tt.ranks, c.cache.fractions, c.keys.loads),
            c.tt,
            note=c.note,
            cache=c.cache,
            kind=kind_of(c),
            keys=c.keys,
            options=c.options,
        )
        for key, c in config.cases.items()
    ]


def axes_of(config: Config) -> dict[str, list[Any]]:
    """Return the axes that are swept, with their values."""
    values = {a: list(getattr(config.sweep, a)) for a in (*AXES, "rank")}
    return {axis: v for axis, v in values.items() if v}


def swept_cells(
    config: Config, kind: str, names: Sequence[str], loads: Sequence[float]
) -> Iterator[Cell]:
    """Yield the cells of the sweep; `names` are the contenders, `loads` those of hash tables."""
    axes = axes_of(config)
    # A named trace is measured in addition to the cases.
    if not axes and config.cases and config.workload.distribution is not Distribution.trace:
        return
    ranks = sorted({*axes.pop("rank", []), *config.tt.ranks})
    base = config.workload
    if config.design is Design.one_at_a_time:  # only the base point meets every rank
        lone = [{axis: v} for axis, values in axes.items() for v in values]
        base_first: list[tuple[dict[str, Any], list[int]]] = [({}, ranks)]
        points_ranks = base_first + [(point, list(config.tt.ranks)) for point in lone]
    elif config.design is Design.grid:
        points = [dict(zip(axes, v, strict=True)) for v in itertools.product(*axes.values())]
        points_ranks = [(point, ranks) for point in points]
    else:
        points_ranks = [(point, ranks) for point in _zipped(axes)]
    seen: set[str] = set()
    keep = [condition(text) for text in config.where]
    drop = [condition(text) for text in config.exclude]
    for point, cell_ranks in points_ranks:
        workload = dataclasses.replace(base, **point)
        arms = tuple(
            arm
            for arm in arms_of(names, cell_ranks, config.cache.fractions, loads)
            if _kept({**_values(workload), "rank": arm.rank}, keep, drop)
        )
        cell = Cell(
            SWEEP,
            title_of(workload),
            workload,
            arms,
            config.tt,
            cache=config.cache,
            kind=kind,
            keys=config.keys,
        )
        if arms and cell.key not in seen:
            seen.add(cell.key)
            yield cell


def _zipped(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Combine the first values, the second values, ...; raises UsageError unless equally many."""
    if len({len(values) for values in axes.values()}) > 1:
        counts = ", ".join(f"{len(values)} of {axis}" for axis, values in axes.items())
        raise UsageError(f"design=zip needs equally many values of every axis; there are {counts}")
    return [dict(zip(axes, v, strict=True)) for v in zip(*axes.values(), strict=True)]


def _kept(values: dict[str, Any], keep: Sequence[Condition], drop: Sequence[Condition]) -> bool:
    return all(test(values) for test in keep) and not any(test(values) for test in drop)


def title_of(w: WorkloadConfig) -> str:
    """Return the workload as the end of a sentence."""
    tables = "a table" if w.T == 1 else f"{w.T} tables"
    if w.distribution is Distribution.trace:
        return f"{tables} of the trace {Path(w.file).name} (D={w.D}, B={w.B:,}, L≈{w.L})"
    return f"{tables} of {w.E:,} rows (D={w.D}, B={w.B:,}, L={w.L})"


def _values(workload: WorkloadConfig) -> dict[str, Any]:
    return {axis: getattr(workload, axis) for axis in AXES}


_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def condition(text: str) -> Condition:
    """Parse a rule of `where` or `exclude` such as "rank <= D or L == 1"."""
    try:
        tree = ast.parse(text, mode="eval").body
        _evaluate(tree, dict.fromkeys((*AXES, "rank"), 1))
    except (SyntaxError, TypeError, KeyError, ZeroDivisionError) as error:
        names = ", ".join((*AXES, "rank"))
        raise UsageError(
            f"where, exclude: cannot read '{text}' ({error}); it may use {names}"
        ) from error
    return lambda values: bool(_evaluate(tree, values))


def _evaluate(node: ast.AST, values: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            if name not in values:
                raise KeyError(f"no axis {name}")
            return values[name]
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_evaluate(p, values) for p in parts)
        case ast.BoolOp(op=ast.Or(), values=parts):
            return any(_evaluate(p, values) for p in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(
            type(o) in _COMPARE for o in ops
        ):
            chain = [_evaluate(n, values) for n in (left, *rights)]
            pairs = zip(chain, ops, chain[1:], strict=False)
            return all(_COMPARE[type(op)](a, b) for a, op, b in pairs)
        case _:
            raise TypeError(f"{type(node).__name__} is not allowed")
