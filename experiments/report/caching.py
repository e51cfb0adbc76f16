"""What the report of traces through caches says: its answer and its tables."""

from __future__ import annotations

import math

import pandas as pd

from experiments.config.schema import AXES
from experiments.config.sweep import IDEALS, SWEEP, label_of
from experiments.report import text
from experiments.report.data import Run
from experiments.report.tables import Table, Value
from experiments.work.laws import law_words

OF = {"lookup_hit_rate": "lookups", "row_hit_rate": "distinct rows"}


def answer(run: Run) -> list[str]:
    """The headline size: what it serves, how far that is from the ideal, what a step costs."""
    rows = at_headline(run)
    if rows is None or not len(rows):
        return ["No answer yet: no trace was run before the run ended."]
    by_name = {str(r["contender"]): r for _, r in rows.iterrows()}
    missing = [label_of(n) for n in (run.subject.contender, "offline") if n not in by_name]
    if missing:
        return [f"No answer: {missing[0]} has no result at this size of the cache."]
    served = [
        f"{_policy(name)} serves {percent(row['lookup_hit_rate'])}"
        for name, row in by_name.items()
        if name not in IDEALS
    ]
    best = by_name["offline"]
    return [
        f"With {size(best)} of the rows in the cache, {' and '.join(served)} of the lookups of "
        f"{_what(run)}, where a cache that knows the future serves "
        f"{percent(best['lookup_hit_rate'])}{_cost(run)}.",
        *_rest(by_name, best),
        *_others(run),
    ]


def size(row: pd.Series) -> str:
    """The size of the cache: '1 %' of all rows."""
    return f"{100 * row['fraction']:.3g} %"


def _policy(contender: str) -> str:
    return label_of(contender).replace(" cache", "")


def _what(run: Run) -> str:
    record = next(r for r in run.records if r["section"] == SWEEP)
    p = record["params"]
    law = law_words(p) if p["law"] != "zipf" else f"zipf s={p['s']:g}" if p["s"] else "uniform ids"
    tables = "a table" if record["features"] == 1 else f"{record['features']} tables"
    return f"{tables} of {record['rows']:,} rows ({law})"


def _cost(run: Run) -> str:
    step = _timed(run, run.subject.key)
    if step is None:
        return ""
    return (
        f"; a step with {_policy(run.subject.contender)} then takes {text.times(step['ratio'])} "
        f"{text.interval(step['ratio_lo'], step['ratio_hi'])} the time of {run.baseline.label}, "
        "which has no cache"
    )


def _others(run: Run) -> list[str]:
    """The step of the other contenders with a cache of the same size."""
    rows = run.table
    if not len(rows):
        return []
    rows = rows[(rows["cache"] == run.subject.cache) & (rows["phase"] == "step")]
    rows = rows[(rows["arm"] != run.subject.key) & (rows["status"] == "ok")]
    steps = [
        f"{r['label']} {text.times(r['ratio'])} {text.interval(r['ratio_lo'], r['ratio_hi'])}"
        for _, r in rows.iterrows()
    ]
    return [f"Steps of the others: {', '.join(steps)}."] if steps else []


def _timed(run: Run, arm: str) -> pd.Series | None:
    rows = run.table
    if not len(rows):
        return None
    rows = rows[(rows["arm"] == arm) & (rows["phase"] == "step") & (rows["status"] == "ok")]
    return rows.iloc[0] if len(rows) else None


def _rest(by_name: dict[str, pd.Series], best: pd.Series) -> list[str]:
    rows = [
        f"{_policy(name)} {percent(row['row_hit_rate'])}"
        for name, row in by_name.items()
        if name not in IDEALS
    ]
    sentences = [
        f"Of the distinct rows of a batch, which are what must be moved, {', '.join(rows)} are "
        f"there; at best it could be {percent(best['row_hit_rate'])}."
    ]
    if "static_top" in by_name:
        sentences.append(
            "A cache of the most frequent rows alone serves "
            f"{percent(by_name['static_top']['lookup_hit_rate'])} of the lookups."
        )
    slack = 100 * (best["most_lookup_hit_rate"] - best["lookup_hit_rate"])
    sentences.append(
        f"No cache of this size could serve more than {text.digits(max(slack, 0.0), 2)} percentage "
        "points of the lookups beyond the offline optimum shown, which is optimal for rows."
    )
    return sentences


def at_headline(run: Run) -> pd.DataFrame | None:
    """Rows of the sweep's base point at the size nearest to the subject's."""
    rows = good(run)
    if not len(rows):
        return None
    rows = rows[rows["cell"] == rows["cell"].iloc[0]]
    wanted = float(run.config.report.subject_cache)
    near = min(rows["fraction"].unique(), key=lambda f: abs(math.log(f / wanted)))
    return rows[rows["fraction"] == near]


def good(run: Run) -> pd.DataFrame:
    """Traces that have a result."""
    rows = run.traces
    return rows[rows["status"] == "ok"] if len(rows) else rows


def percent(share: float) -> str:
    """'71.3 %'."""
    return text.NONE if text.missing(share) else f"{text.digits(100 * share)} %"


def section_table(run: Run, section: str) -> Table:
    """A row per point and size: hit rates of all policies and ideals, by lookup and by row."""
    rows = good(run)
    rows = rows[rows["section"] == section] if len(rows) else rows
    names = list(dict.fromkeys(rows["contender"])) if len(rows) else []
    heads = ["point", "cache"]
    heads += [f"{of}: {_policy(n)}" for of in ("lookups", "rows") for n in names]
    lines = []
    for (_, fraction), group in rows.groupby(["cell", "fraction"], sort=False):
        first, by_name = group.iloc[0], group.set_index("contender")
        line = [Value(point(run, first)), Value(size(first), 100 * float(fraction))]
        for column in OF:
            shares = [by_name[column].get(name, math.nan) for name in names]
            line += [Value(percent(share), 100 * share) for share in shares]
        lines.append(line)
    return Table(heads, lines)


def point(run: Run, row: pd.Series) -> str:
    """How a trace differs from the sweep's base point, or its skew."""
    axes = [a for a in AXES if run.traces[a].nunique() > 1] or ["s"]
    words = {a: "uniform" if a == "s" and row[a] == 0 else f"{a}={row[a]:g}" for a in axes}
    return ", ".join(words.values())


def readme_lines(run: Run) -> list[str]:
    """The base point in Markdown: what each size of the cache serves, and what a step costs."""
    rows = good(run)
    rows = rows[rows["cell"] == rows["cell"].iloc[0]]
    names = list(dict.fromkeys(rows["contender"]))
    heads = ["cache", *[_policy(n) for n in names], f"step ÷ {run.baseline.label}, LRU"]
    lines = [heads, ["---:"] * len(heads)]
    for fraction, group in rows.groupby("fraction"):
        by_name = group.set_index("contender")["lookup_hit_rate"]
        timed = _timed(run, f"{run.subject.contender}@{group['cache'].iloc[0]:g}")
        step = text.NONE
        if timed is not None:
            step = f"{text.times(timed['ratio'])} "
            step += text.interval(timed["ratio_lo"], timed["ratio_hi"])
        shares = [percent(by_name.get(name, math.nan)) for name in names]
        lines.append([f"{100 * float(str(fraction)):.3g} %", *shares, step])
    table = ["| " + " | ".join(line) + " |" for line in lines]
    return [f"Share of the lookups of {_what(run)} that the cache serves:", "", *table]
