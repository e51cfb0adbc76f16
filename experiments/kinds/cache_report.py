"""What the report of traces through caches says: its answer and its tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from experiments.config.schema import AXES
from experiments.config.sweep import IDEALS, SWEEP, label_of
from experiments.report import text
from experiments.report.data import AXIS_NAMES, Run
from experiments.report.style import INK, Figure, Panel, colour_of, marker_of
from experiments.report.tables import Table, Value
from experiments.workloads.distributions import describe_distribution

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
    law = (
        describe_distribution(p)
        if p["distribution"] != "zipf"
        else f"zipf s={p['s']:g}"
        if p["s"]
        else "uniform ids"
    )
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


Drawing = Callable[[Axes], None]
BESIDE = ((0, 7), (0, -14), (13, -3), (-13, -3))  # where sizes are written, line by line


def figures(run: Run) -> list[Figure]:
    """Hit rates against size, point by point; throughput against hit rate; skew; filling."""
    found = [_hit_rates(run), _throughput(run), _along(run), _filling(run)]
    return [f for f in found if f is not None and f.panels]


def _hit_rates(run: Run) -> Figure | None:
    rows = good(run)
    if not len(rows):
        return None
    cells = sorted(rows["cell"].unique(), key=lambda c: _place(rows, c))
    panels = [
        Panel(
            f"Per {of[:-1]}, {point(run, rows[rows['cell'] == c].iloc[0])}",
            _curves(rows[rows["cell"] == c], k, legend=c == cells[0]),
        )
        for k, of in OF.items()
        for c in cells
    ]
    return Figure(
        "hit_rate",
        "Hit rate against the size of the cache",
        "Share of the lookups, and of the distinct rows of a batch, that the cache serves once it "
        "has been filled. Solid: measured. Dashed: ideals, which know the whole trace; per "
        "distinct row no cache can be above the offline optimum. Dotted: top-k of the law itself, "
        "in an endless trace. Higher is better.",
        run.sizes(SWEEP),
        panels,
        columns=len(cells),
    )


def _place(rows: pd.DataFrame, cell: str) -> tuple[float, ...]:
    first = rows[rows["cell"] == cell].iloc[0]
    return tuple(float(first[a]) for a in AXES)


def _curves(own: pd.DataFrame, column: str, *, legend: bool) -> Drawing:
    def draw(axes: Axes) -> None:
        for name, line in own.groupby("contender", sort=False):
            line = line.sort_values("fraction")
            ideal = name in IDEALS
            axes.plot(
                100 * line["fraction"], 100 * line[column], color=colour_of(str(name)),
                marker=None if ideal else marker_of(str(name)), ls=(0, (4, 2)) if ideal else "-",
                lw=1.6 if ideal else 2.0, label=label_of(str(name)),
                zorder=3 if ideal else 2,
            )  # fmt: skip
        law = own[own["contender"] == "static_top"].sort_values("fraction")
        axes.plot(
            100 * law["fraction"], 100 * law[f"expected_{column}"], color=INK, ls=":", lw=1.2,
            label="top-k of the law",
        )  # fmt: skip
        _percent_axes(axes, list(100 * own["fraction"].unique()))
        axes.set_ylabel(f"{OF[column]} served (%)")
        if legend:
            axes.legend(fontsize=8, loc="best", handlelength=2.4)

    return draw


def _percent_axes(axes: Axes, sizes: list[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(sorted(sizes), [f"{s:.2g}" for s in sorted(sizes)])
    axes.minorticks_off()
    axes.set_xlabel("size of the cache (% of all rows)")
    axes.set_ylim(0, 102)


def _throughput(run: Run) -> Figure | None:
    rows = run.table
    rows = rows[(rows["status"] == "ok") & (rows["phase"] == "step")] if len(rows) else rows
    if not len(rows) or rows["row_hit_rate"].isna().all():
        return None
    section = str(rows["section"].iloc[0])
    return Figure(
        "throughput",
        "Throughput against hit rate",
        "Each mark is a size of the cache (in % of all rows). The hit rate is that of the timed "
        "batches themselves. Step: forward, backward and update, with all that the cache moves. "
        f"Dashed: {run.baseline.label}, which has no cache. Ratios are paired within each round, "
        "with their 95 % interval.",
        run.sizes(section),
        [
            Panel("Throughput of a step", _against(run, rows, "throughput")),
            Panel(f"Step time ÷ {run.baseline.label}", _against(run, rows, "ratio")),
        ],
    )


def _against(run: Run, rows: pd.DataFrame, what: str) -> Drawing:
    def value(row: pd.DataFrame | pd.Series) -> pd.Series | float:
        return row["lookups"] / row["median_s"] / 1e6 if what == "throughput" else row["ratio"]

    def draw(axes: Axes) -> None:
        cached = rows[rows["row_hit_rate"].notna()]
        lines = cached.groupby("contender", sort=False)
        for (name, own), beside in zip(lines, itertools.cycle(BESIDE), strict=False):
            own = own.sort_values("row_hit_rate")
            y = value(own)
            spread = [y - own["ratio_lo"], own["ratio_hi"] - y]
            if what == "throughput":
                spread = [y - own["lookups"] / own["q75_s"] / 1e6,
                          own["lookups"] / own["q25_s"] / 1e6 - y]  # fmt: skip
            colour = colour_of(str(name))
            axes.errorbar(
                100 * own["row_hit_rate"], y, yerr=None if spread[0].isna().any() else spread,
                color=colour, marker=marker_of(str(name)), capsize=3, lw=1.6,
                label=label_of(str(name)),
            )  # fmt: skip
            for _, row in own.iterrows():
                axes.annotate(
                    f"{100 * row['cache']:g}", (100 * row["row_hit_rate"], value(row)), beside,
                    textcoords="offset points", color=colour, fontsize=8, ha="center",
                )  # fmt: skip
        for _, row in rows[rows["row_hit_rate"].isna()].iterrows():
            axes.axhline(value(row), color=colour_of(str(row["contender"])), ls=(0, (5, 2)), lw=1.5,
                         label=f"{row['label']}, no cache")  # fmt: skip
        axes.set_xlabel("distinct rows served (%)")
        throughput = "lookups per second (millions)"
        axes.set_ylabel(throughput if what == "throughput" else f"time ÷ {run.baseline.label}")
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
        axes.margins(x=0.08)
        axes.legend(fontsize=8, loc="upper left", ncols=2)

    return draw


def _along(run: Run) -> Figure | None:
    """Hit rates along each swept axis at the headline size."""
    rows, headline = good(run), at_headline(run)
    if headline is None:
        return None
    rows = rows[rows["cache_rows"] == headline["cache_rows"].iloc[0]]
    base = headline.iloc[0]
    panels = []
    for axis in AXES:
        others = [a for a in AXES if a != axis]
        own = rows[(rows[others] == base[others]).all(axis=1)]
        if own[axis].nunique() > 1:
            panels += [Panel(f"Per {of[:-1]}", _line(own, axis, k)) for k, of in OF.items()]
    return Figure(
        "skew" if run.traces["s"].nunique() > 1 else "axes",
        f"Hit rate of a cache of {size(base)} of the rows",
        "As above, at one size of the cache. Higher is better.",
        run.sizes(SWEEP),
        panels,
    )


def _line(rows: pd.DataFrame, axis: str, column: str) -> Drawing:
    def draw(axes: Axes) -> None:
        for name, own in rows.groupby("contender", sort=False):
            own, ideal = own.sort_values(axis), name in IDEALS
            axes.plot(
                own[axis], 100 * own[column], color=colour_of(str(name)), label=label_of(str(name)),
                marker=None if ideal else marker_of(str(name)), ls=(0, (4, 2)) if ideal else "-",
                lw=1.6 if ideal else 2.0, zorder=3 if ideal else 2,
            )  # fmt: skip
        axes.set_xlabel(AXIS_NAMES[axis])
        axes.set_ylabel(f"{OF[column]} served (%)")
        axes.set_ylim(0, 102)
        axes.legend(fontsize=8, loc="best")

    return draw


def _filling(run: Run) -> Figure | None:
    """Hit rate batch by batch from an empty cache, at the headline size of the base point."""
    headline = at_headline(run)
    if headline is None:
        return None
    keys = {(r["cell"], r["arm"]) for _, r in headline.iterrows() if r["contender"] not in IDEALS}
    records = [r for r in run.records if (r["cell"], r["arm"]) in keys and r["status"] == "ok"]
    records = [r for r in records if "cache_rows" in r]

    def draw(of: str) -> Drawing:
        def lines(axes: Axes) -> None:
            for record in records:
                samples, name = record["samples"], record["contender"]
                every = zip(samples[f"{of}_hits"], samples[f"{of}s"], strict=True)
                shares = [100 * hits / max(total, 1) for hits, total in every]
                axes.plot(range(1, len(shares) + 1), shares, color=colour_of(name), lw=1.6,
                          label=label_of(name))  # fmt: skip
            warm = len(records[0]["samples"]["rows"]) - records[0]["batches"]
            axes.axvline(warm + 0.5, color=INK, lw=1.0, ls=":")
            axes.annotate(
                "counted from here", (warm + 0.5, 0), (4, 5), xycoords=("data", "axes fraction"),
                textcoords="offset points", fontsize=8, color=INK,
            )  # fmt: skip
            axes.set_xlabel("batch")
            axes.set_ylabel("served (%)")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            axes.set_ylim(0, 102)
            axes.legend(fontsize=8, loc="best")

        return lines

    panels = [Panel(f"Per {title[:-1]}", draw(k[: -len("_hit_rate")])) for k, title in OF.items()]
    return Figure(
        "filling",
        f"From an empty cache of {size(headline.iloc[0])} of the rows",
        "Hit rate of each batch. Where the line is level, the cache is as full as it gets.",
        run.sizes(SWEEP),
        panels if records else [],
    )
