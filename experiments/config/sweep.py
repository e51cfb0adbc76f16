"""Cells: one workload and the contenders measured on it, expanded from cases and sweep."""

from __future__ import annotations

import ast
import dataclasses
import itertools
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
    Tables,
    TTConfig,
    UsageError,
    WorkloadConfig,
)
from experiments.contenders import registry

SWEEP = "sweep"  # section of the cells of `sweep:`; the section of a case is its name

# Arms that are computed from a trace instead of measured.
IDEAL_CACHES = {"offline": "offline optimum (ideal)", "static_top": "static top-k (ideal)"}
# Computed arms that an experiment asks for by name: fully associative caches.
EXACT_CACHES = {"exact_lru": "exact LRU", "exact_lfu": "exact LFU"}
COMPUTED_ARMS = IDEAL_CACHES | EXACT_CACHES
# The only arms of the kinds trace, calibration and predictions.
ONLY_ARMS = {
    "lookups": "the lookups",
    "constants": "constants of the cost model",
    "trains": "tensor trains",
}
PLAIN = "plain"
# Methods of kind=quality; `PLAIN` is trained first, because some methods start from it.
QUALITY_METHODS = {
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
}
Rule = Callable[[dict[str, Any]], bool]


def exact(number: float) -> str:
    """Return a number with six digits if these are all it has, else with all digits."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def label_of(contender: str) -> str:
    """Return the name in reports of a contender, a computed arm or a method.

    A contender that no longer exists is its own label.
    """
    computed = COMPUTED_ARMS | ONLY_ARMS | QUALITY_METHODS
    return computed.get(contender) or registry.entry_of(contender).label


def variants_of(contender: str) -> str:
    """Return "rank" or "cache" if the contender has an arm per rank or cache size, else "".

    A computed arm has an arm per cache size.
    """
    if contender in ONLY_ARMS:
        return ""
    return "cache" if contender in COMPUTED_ARMS else registry.entry_of(contender).variants


@dataclass(frozen=True, order=True)
class Arm:
    """A contender of a cell with its variant.

    Attributes:
        contender: name of the contender, computed arm or method.
        rank: rank of a tensor train; 0 for others.
        cache: cached rows ÷ all rows (in kind=quality bytes ÷ bytes of plain tables); 0 for others.
        load: keys ÷ slots of a hash table; 0 for others.
    """

    contender: str
    rank: int = 0
    cache: float = 0.0
    load: float = 0.0

    @property
    def key(self) -> str:
        """Return a short name, unique within a cell."""
        if self.cache or self.load:
            return f"{self.contender}@{exact(self.cache or self.load)}"
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
    """A workload with the arms that are measured on its batches, interleaved."""

    section: str  # name of the case, or SWEEP
    title: str  # workload in words
    workload: WorkloadConfig
    arms: tuple[Arm, ...]
    tt: TTConfig = field(default_factory=TTConfig)
    rows_scale: float = 1.0  # rows of the tables ÷ rows in the workload; < 1 if shrunk or capped
    note: str = ""  # remark in the report
    cache: CacheConfig = field(default_factory=CacheConfig)
    kind: str = "time"  # a name in experiments/kinds
    keys: KeysConfig = field(default_factory=KeysConfig)
    ranks: int = 0  # processes that measure the cell together; 0: device.ranks
    scaling: Scaling = Scaling.weak
    options: dict[str, Any] = field(default_factory=dict)  # options that its kind defines
    has_exact_key: bool = False  # whether another cell of the run has values of the same six digits

    def with_arms(self, *arms: Arm) -> Cell:
        """Return the cell with other arms."""
        return replace(self, arms=arms)

    @property
    def key(self) -> str:
        """Return a text that identifies the cell within a run, from the values of its axes.

        Values have six digits, unless `has_exact_key`. Stored records are joined by the key, so its
        form must not change.
        """
        spell = exact if self.has_exact_key else "{:g}".format
        values = " ".join(f"{axis}={spell(getattr(self.workload, axis))}" for axis in AXES)
        world = f" W={self.ranks} {self.scaling.value}" * bool(self.ranks)
        return f"{self.section} {values}{world}"


def arms_of(
    contenders: Sequence[str],
    ranks: Sequence[int],
    fractions: Sequence[float],
    loads: Sequence[float] = (),
) -> tuple[Arm, ...]:
    """Return an arm per contender and rank, cache size or load.

    Args:
        contenders: names of contenders, computed arms or methods.
        ranks: ranks of tensor trains.
        fractions: cache sizes ÷ all rows.
        loads: keys ÷ slots; if there are any, all contenders are hash tables.
    """

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
    """Return a cell per case; `kind_of` returns the kind of a case."""
    return [
        Cell(
            name,
            case.title or name,
            case.workload,
            arms_of(case.contenders, case.tt.ranks, case.cache.fractions, case.keys.loads),
            case.tt,
            note=case.note,
            cache=case.cache,
            kind=kind_of(case),
            keys=case.keys,
            options=case.options,
        )
        for name, case in config.cases.items()
    ]


def axes_of(config: Config) -> dict[str, list[Any]]:
    """Return {axis: values} of the axes that have values, `rank` included."""
    values = {axis: list(getattr(config.sweep, axis)) for axis in (*AXES, "rank")}
    return {axis: value for axis, value in values.items() if value}


def swept_cells(
    config: Config, kind: str, names: Sequence[str], loads: Sequence[float]
) -> Iterator[Cell]:
    """Yield the distinct cells of the sweep that have an arm after `where` and `exclude`.

    If there are cases but no axes, no cell is yielded unless the workload is a trace.

    Args:
        config: configuration of the run.
        kind: kind of the cells.
        names: contenders and computed arms.
        loads: keys ÷ slots, if the contenders are hash tables.

    Raises:
        UsageError: a rule cannot be read, or zipped axes differ in length.
    """
    axes = axes_of(config)
    # Without axes, only a trace of the user is measured in addition to cases.
    if not axes and config.cases and config.workload.distribution is not Distribution.trace:
        return
    ranks = sorted({*axes.pop("rank", []), *config.tt.ranks})
    base = config.workload
    if config.design is Design.one_at_a_time:  # only the base point has every rank
        points = [{}, *({axis: value} for axis, values in axes.items() for value in values)]
    else:
        points = [dict(zip(axes, values, strict=True)) for values in _combined(config.design, axes)]
    workloads: list[WorkloadConfig] = []
    where_rules = [compile_rule(text) for text in config.where]
    exclude_rules = [compile_rule(text) for text in config.exclude]
    for point in points:
        is_off_base = config.design is Design.one_at_a_time and point
        workload = dataclasses.replace(base, **point)
        arms = []
        fractions = config.cache.fractions
        for arm in arms_of(names, config.tt.ranks if is_off_base else ranks, fractions, loads):
            values = {"rank": arm.rank} | {axis: getattr(workload, axis) for axis in AXES}
            # `exclude` last: `where` may keep its rules from dividing by zero.
            is_included = all(rule(values) for rule in where_rules)
            if is_included and not any(rule(values) for rule in exclude_rules):
                arms.append(arm)
        cell = Cell(SWEEP, title_of(workload), workload, tuple(arms), config.tt)
        cell = replace(cell, cache=config.cache, kind=kind, keys=config.keys)
        if arms and workload not in workloads:
            workloads.append(workload)
            yield cell


def _combined(design: Design, axes: dict[str, list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Combine every value with every other (grid), or values of the same position (zip).

    Without axes there is one point, the base.
    """
    if design is Design.grid:
        return itertools.product(*axes.values())
    if len({len(values) for values in axes.values()}) > 1:
        counts = ", ".join(f"{len(values)} of {axis}" for axis, values in axes.items())
        raise UsageError(f"design=zip needs equally many values of every axis; there are {counts}")
    return zip(*axes.values(), strict=True) if axes else iter([()])


def title_of(workload: WorkloadConfig) -> str:
    """Return the workload in words, such as "26 tables of 1,000 rows (D=64, B=512, L=20)"."""
    tables = "a table" if workload.T == 1 else f"{workload.T} tables"
    sizes = f"D={workload.D}, B={workload.B:,}"
    if workload.distribution is Distribution.trace:
        return f"{tables} of the trace {Path(workload.file).name} ({sizes}, L≈{workload.L})"
    if workload.tables is Tables.criteo_kaggle:
        tables = "the tables of Criteo-Kaggle"
    elif workload.sizes:
        tables = f"tables of {', '.join(f'{rows:,}' for rows in workload.sizes)} rows"
    else:
        tables += f" of {workload.E:,} rows"
    return f"{tables} ({sizes}, L={workload.L})"


# The syntax of a rule: arithmetic and comparisons of axes and numbers, `and`, `or`, `not`. Other
# expressions, such as calls and attributes, must not reach `eval`.
_RULE_SYNTAX = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE),
    *(ast.Gt, ast.GtE, ast.Name, ast.Load, ast.Constant),
)


def compile_rule(text: str) -> Rule:
    """Compile a rule of `where` or `exclude`, such as "rank <= D or L == 1".

    Returns:
        Function that takes {axis: value} of AXES and rank, and returns whether they meet the rule.
        It raises UsageError if the rule divides by zero or overflows.

    Raises:
        UsageError: the rule is not an expression of axes and numbers.
    """
    names = (*AXES, "rank")
    try:
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            if not isinstance(node, _RULE_SYNTAX):
                raise TypeError(f"{type(node).__name__} is not allowed")
            if isinstance(node, ast.Name) and node.id not in names:
                raise TypeError(f"no axis {node.id}")
            if isinstance(node, ast.Constant) and not isinstance(node.value, int | float):
                raise TypeError(f"{node.value!r} is not a number")
        code = compile(tree, "<rule>", "eval")
    except (SyntaxError, TypeError) as error:
        raise UsageError(
            f"where, exclude: cannot read '{text}' ({error}); it may use {', '.join(names)}"
        ) from error

    def meets(values: dict[str, Any]) -> bool:
        try:
            return bool(eval(code, {"__builtins__": {}}, values))
        except ArithmeticError as error:
            raise UsageError(f"where, exclude: '{text}' of {values}: {error}") from error

    return meets
