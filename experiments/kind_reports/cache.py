"""The report of traces of lookups through caches: hit rates, and the time of steps.

Rows are traces (`run.traces`): one per cell, policy (a contender or an ideal cache) and size of the
cache; `kinds.cache.frame` lists the columns. Rows of `run.table` are timed phases, and
`results.metrics.frame` lists their columns. UNITS names the two hit rates: per lookup, and per
distinct row of a batch.
"""

from __future__ import annotations

import math

import pandas as pd

from experiments.config.schema import AXES
from experiments.config.sweep import EXACT_CACHES, IDEAL_CACHES, SWEEP, Arm, label_of
from experiments.report import text
from experiments.report.charts import (
    DASHED,
    SHORT_DASHED,
    Curve,
    Floats,
    Mark,
    Scale,
    curves,
    percent_scale,
)
from experiments.report.data import AXIS_NAMES, Run, select
from experiments.report.figures import contender_curve
from experiments.report.style import INK, Drawing, Figure, Panel, colour_of
from experiments.report.tables import Table, Value, markdown_table, varied_axes
from experiments.results import metrics
from experiments.workloads.distributions import describe_distribution

_HIT_RATE_NOTE = (
    "A cache is probed with all distinct rows of a batch before any row moves, so that a row is a "
    "hit or a miss together with all its lookups in that batch. Hit rate per lookup: lookups of "
    "rows in the cache ÷ lookups. Hit rate per distinct row: rows in the cache ÷ distinct rows, "
    "batch by batch; it determines how many rows must be moved. Both are over the counted "
    "batches, after those that fill the cache."
)
_IDEAL_NOTES = (
    "'Offline optimum' is Belady's MIN on batches: of the rows it holds and those of the batch it "
    "keeps the ones looked up again soonest. No cache of that size that begins empty serves more "
    "distinct rows of this trace. Of rows due in the same batch it keeps those with more lookups.",
    "'Static top-k' admits the k most frequent rows of the trace and no others. Both ideal caches "
    "know the whole trace; like any cache, they can store a row only after its first lookup. The "
    "fast tier of a table in two tiers begins with the rows inserted last, so it can exceed both.",
    "The dotted line is the top-k of the distribution: the expected hit rate if the k most likely "
    "rows were always in the cache, as in an endless trace. It can lie above the others where a "
    "trace is too short for every popular row to be looked up once.",
)
NOTES = (_HIT_RATE_NOTE, *_IDEAL_NOTES, metrics.FORMULA)

# Units by column, in the plural; titles drop the final s.
UNITS = {"lookup_hit_rate": "lookups", "row_hit_rate": "distinct rows"}


def answer(run: Run) -> list[str]:
    """State hit rates and step times at the headline size, and what ideal caches serve there."""
    rows = headline_rows(run)
    if rows is None or not len(rows):
        return ["No answer yet: no trace was run before the run ended."]
    by_name = {str(row["contender"]): row for _, row in rows.iterrows()}
    absent_labels = [
        label_of(contender)
        for contender in (run.subject.contender, "offline")
        if contender not in by_name
    ]
    if absent_labels:
        return [f"No answer: {absent_labels[0]} has no result at this size of the cache."]
    served_shares = [
        f"{_policy(name)} serves {text.percent(row['lookup_hit_rate'])}"
        for name, row in by_name.items()
        if name not in IDEAL_CACHES
    ]
    optimum = by_name["offline"]
    return [
        f"With {size_of(optimum)} of the rows in the cache, {text.listed(served_shares)} of the "
        f"lookups of {_describe_workload(run)}, where a cache that knows the future serves "
        f"{text.percent(optimum['lookup_hit_rate'])}{_step_clause(run)}.",
        *_ideal_sentences(by_name, optimum),
        *_other_steps(run),
    ]


def size_of(row: pd.Series) -> str:
    """Return the size of the cache in percent of all rows, e.g. '1 %'."""
    return f"{100 * row['fraction']:.3g} %"


def _policy(contender: str) -> str:
    """Return the label of a contender without the word "cache"."""
    return label_of(contender).replace(" cache", "")


def _describe_workload(run: Run) -> str:
    """Return the tables, rows and ids of the sweep's base point in words."""
    record = next(record for record in run.records if record["section"] == SWEEP)
    params = record["params"]
    ids = describe_distribution(params)
    if params["distribution"] == "zipf":
        ids = f"zipf s={params['s']:g}" if params["s"] else "uniform ids"
    tables = "a table" if record["features"] == 1 else f"{record['features']} tables"
    return f"{tables} of {record['rows']:,} rows ({ids})"


def _step_clause(run: Run) -> str:
    """Return a clause on the step time of the subject; "" if its step has no result."""
    step = _timed_step(run, run.subject.key)
    if step is None:
        return ""
    return (
        f"; a step with {_policy(run.subject.contender)} then takes {text.ratio(step)} the time of "
        f"{run.baseline.label}, which has no cache"
    )


def _other_steps(run: Run) -> list[str]:
    """Compare the steps of the other contenders with a cache of the same size."""
    rows = select(run.table, cache=run.subject.cache, phase="step", status="ok")
    steps = [
        f"{row['label']} {text.ratio(row)}"
        for _, row in rows.iterrows()
        if row["arm"] != run.subject.key
    ]
    return [f"Steps of the others: {', '.join(steps)}."] if steps else []


def _timed_step(run: Run, arm: str) -> pd.Series | None:
    """Return the row of an arm's step in `run.table`; None without a result."""
    rows = select(run.table, arm=arm, phase="step", status="ok")
    return rows.iloc[0] if len(rows) else None


def _ideal_sentences(by_name: dict[str, pd.Series], optimum: pd.Series) -> list[str]:
    """Compare the distinct rows served with the offline optimum, and bound the lookups served.

    The optimum is optimal for distinct rows only. `most_lookup_hit_rate` is an upper bound on the
    lookups that any cache could serve; `slack` is how far it is above the optimum.
    """
    served_shares = [
        f"{_policy(name)} {text.percent(row['row_hit_rate'])}"
        for name, row in by_name.items()
        if name not in IDEAL_CACHES
    ]
    sentences = [
        f"Of the distinct rows of a batch, which determine how much is moved, "
        f"{', '.join(served_shares)} hit in the cache; the best possible is "
        f"{text.percent(optimum['row_hit_rate'])}."
    ]
    if "static_top" in by_name:
        sentences.append(
            "A cache of the most frequent rows alone serves "
            f"{text.percent(by_name['static_top']['lookup_hit_rate'])} of the lookups."
        )
    slack = 100 * (optimum["most_lookup_hit_rate"] - optimum["lookup_hit_rate"])
    sentences.append(
        f"No cache of this size could serve more than {text.digits(max(slack, 0.0), 2)} percentage "
        "points of the lookups beyond the offline optimum shown, which is optimal for rows."
    )
    return sentences


def headline_rows(run: Run) -> pd.DataFrame | None:
    """Return the rows of the first point at the cache size nearest to report.subject_cache.

    None if no trace has a result.
    """
    rows = good_traces(run)
    if not len(rows):
        return None
    rows = rows[rows["cell"] == rows["cell"].iloc[0]]
    subject_fraction = float(run.config.report.subject_cache)
    nearest_fraction = min(
        rows["fraction"].unique(), key=lambda f: abs(math.log(f / subject_fraction))
    )
    return rows[rows["fraction"] == nearest_fraction]


def good_traces(run: Run) -> pd.DataFrame:
    """Return the traces that have a result."""
    return select(run.traces, status="ok")


def section_table(run: Run, section: str) -> Table | None:
    """Return one row per cell and size of the cache: each policy's hit rates per lookup and row.

    None for a section without traces; its cells are timed.
    """
    if not len(run.traces) or not (run.traces["section"] == section).any():
        return None
    rows = select(good_traces(run), section=section)
    names = list(dict.fromkeys(rows["contender"])) if len(rows) else []
    heads = ["point", "cache"]
    heads += [f"{unit}: {_policy(name)}" for unit in ("lookups", "rows") for name in names]
    lines = []
    for (_, fraction), group in rows.groupby(["cell", "fraction"], sort=False):
        first, by_name = group.iloc[0], group.set_index("contender")
        line = [Value(describe_point(run, first)), Value(size_of(first), 100 * float(fraction))]
        for column in UNITS:
            shares = [by_name[column].get(name, math.nan) for name in names]
            line += [Value(text.percent(share), 100 * share) for share in shares]
        lines.append(line)
    return Table(heads, lines)


def describe_point(run: Run, row: pd.Series) -> str:
    """Return a trace's values of the axes that differ between traces; its skew if none does."""
    axes = varied_axes(run.traces) or ["s"]
    axis_values = {
        axis: "uniform" if axis == "s" and row[axis] == 0 else f"{axis}={row[axis]:g}"
        for axis in axes
    }
    return ", ".join(axis_values.values())


def readme_lines(run: Run, command: str, link: str) -> list[str] | None:
    """Return the base point in Markdown: hit rate and step time by size of the cache.

    None for a run without timed steps or without a trace that has a result.
    """
    rows = good_traces(run)
    if run.table.empty or rows.empty:
        return None
    rows = rows[rows["cell"] == rows["cell"].iloc[0]]
    names = list(dict.fromkeys(rows["contender"]))
    heads = ["cache", *[_policy(name) for name in names], f"step ÷ {run.baseline.label}, LRU"]
    lines = []
    for fraction, group in rows.groupby("fraction"):
        by_name = group.set_index("contender")["lookup_hit_rate"]
        step = _timed_step(run, Arm(run.subject.contender, cache=group["cache"].iloc[0]).key)
        step_ratio = text.DASH if step is None else text.ratio(step)
        shares = [text.percent(by_name.get(name, math.nan)) for name in names]
        lines.append([f"{100 * float(str(fraction)):.3g} %", *shares, step_ratio])
    caption = f"Share of the lookups of {_describe_workload(run)} that the cache serves:"
    table = markdown_table(heads, lines).splitlines()
    return [f"{command}.", caption, "", *table, "", link]


def figures(run: Run) -> list[Figure]:
    """Return the figures of hit rates by size, throughput by hit rate, skew, and filling."""
    hit_rates = _hit_rate_figures(run)
    result = [*hit_rates[:1], _throughput_figure(run), *hit_rates[1:]]
    result += [_axis_figure(run), _filling_figure(run)]
    return [figure for figure in result if figure is not None and figure.panels]


def policy_curve(contender: str, x: Floats, y: Floats) -> Curve:
    """Return the curve of a policy; ideals and exact policies are dashed."""
    if contender in EXACT_CACHES:  # often on the curve of the table that approximates it
        return contender_curve(contender, x, y, line=SHORT_DASHED, is_hollow=True, is_on_top=True)
    if contender not in IDEAL_CACHES:
        return contender_curve(contender, x, y)
    return contender_curve(contender, x, y, marker="", line=DASHED, width=1.6, is_on_top=True)


def _hit_rate_figures(run: Run) -> list[Figure]:
    """Return the figure of hit rates at the sweep's base point, then that of its other points."""
    rows = good_traces(run)
    if not len(rows):
        return []

    def axes_of(cell: str) -> tuple[float, ...]:
        first = rows[rows["cell"] == cell].iloc[0]
        return tuple(float(first[axis]) for axis in AXES)

    base_cell, *other_cells = rows["cell"].unique()
    caption = (
        "Share of the lookups, and of the distinct rows of a batch, that hit in the cache once it "
        "has been filled. Solid: measured. Dashed: ideals, which know the whole trace; per "
        "distinct row no cache that begins empty can exceed the offline optimum. Dotted: the most "
        "probable rows of the distribution of ids, in an endless trace. Higher is better."
    )
    result = []
    for name, title, cells in (
        ("hit_rate", "Hit rate against the size of the cache", [base_cell]),
        ("hit_rates", "Hit rates of the other workloads", sorted(other_cells, key=axes_of)),
    ):
        panels = [
            Panel(
                f"Per {unit[:-1]}, {describe_point(run, rows[rows['cell'] == cell].iloc[0])}",
                _draw_hit_rates(rows[rows["cell"] == cell], column, legend=cell == cells[0]),
            )
            for column, unit in UNITS.items()
            for cell in cells
        ]
        figure_caption = caption if cells == [base_cell] else "As above. Higher is better."
        columns = min(len(cells), 3) if len(cells) > 1 else 0
        result.append(
            Figure(name, title, figure_caption, run.sizes(SWEEP), panels, columns=columns)
        )
    return result


def _draw_hit_rates(rows: pd.DataFrame, column: str, *, legend: bool) -> Drawing:
    """Draw one hit rate of a cell against the size of the cache, a curve per policy."""
    lines = []
    for name, group in rows.sort_values("fraction").groupby("contender", sort=False):
        lines.append(policy_curve(str(name), 100 * group["fraction"], 100 * group[column]))
    top_rows = rows[rows["contender"] == "static_top"].sort_values("fraction")
    shares = 100 * top_rows[f"expected_{column}"]
    label = "top-k of the distribution"
    lines.append(Curve(100 * top_rows["fraction"], shares, INK, label, line=":", width=1.2))
    sizes = sorted(100 * rows["fraction"].unique())
    names = [f"{size:.2g}" for size in sizes]
    x_scale = Scale("size of the cache (% of all rows)", log=10, ticks=sizes, names=names)
    y_scale = percent_scale(f"hits, {UNITS[column]} (%)")
    return curves(lines, x_scale, y_scale, name_position="best" if legend else "")


def _throughput_figure(run: Run) -> Figure | None:
    """Return the figure of throughput and ratio of a step against the hit rate.

    None if no step with a cache was timed.
    """
    rows = select(run.table, status="ok", phase="step")
    if not len(rows) or rows["row_hit_rate"].isna().all():
        return None
    throughputs = rows.assign(
        y=rows["lookups"] / rows["median_s"] / 1e6,
        lo=rows["lookups"] / rows["q75_s"] / 1e6,
        hi=rows["lookups"] / rows["q25_s"] / 1e6,
    )
    ratios = rows.assign(y=rows["ratio"], lo=rows["ratio_lo"], hi=rows["ratio_hi"])
    baseline = run.baseline.label
    return Figure(
        "throughput",
        "Throughput against hit rate",
        "Each mark is a size of the cache (in % of all rows). The hit rate is that of the timed "
        "batches themselves. Step: forward, backward and update, with all that the cache moves. "
        f"Dashed: {baseline}, which has no cache. Ratios are paired within each round, with their "
        "95 % confidence interval.",
        run.sizes(str(rows["section"].iloc[0])),
        [
            Panel(
                "Throughput of a step", _draw_by_hit_rate(throughputs, "million lookups per second")
            ),
            Panel(f"Step time ÷ {baseline}", _draw_by_hit_rate(ratios, f"time ÷ {baseline}")),
        ],
    )


def _draw_by_hit_rate(rows: pd.DataFrame, label: str) -> Drawing:
    """Draw `y`, with bars from `lo` to `hi`, against the share of distinct rows that hit.

    Steps without a cache are level lines.
    """
    cached_rows = rows[rows["row_hit_rate"].notna()].sort_values("row_hit_rate")
    lines = [
        contender_curve(
            str(name),
            100 * group["row_hit_rate"],
            group["y"],
            low=group["lo"],
            high=group["hi"],
            names=[f"{100 * size:g}" for size in group["cache"]],
            width=1.6,
        )
        for name, group in cached_rows.groupby("contender", sort=False)
    ]
    marks = [
        Mark(row["y"], colour_of(str(row["contender"])), DASHED, 1.5, f"{row['label']}, no cache")
        for _, row in rows[rows["row_hit_rate"].isna()].iterrows()
    ]
    y_scale = Scale(label, low=0, headroom=1.3)  # room for the legend
    return curves(
        lines,
        Scale("distinct rows hit (%)"),
        y_scale,
        name_position="upper left",
        columns=2,
        marks=marks,
    )


def _axis_figure(run: Run) -> Figure | None:
    """Return the figure of hit rates along each swept axis, at the headline size."""
    rows, headline = good_traces(run), headline_rows(run)
    if headline is None:
        return None
    rows = rows[rows["cache_rows"] == headline["cache_rows"].iloc[0]]
    base_point, panels = headline.iloc[0], []
    for axis in AXES:
        fixed_axes = [axis_name for axis_name in AXES if axis_name != axis]
        axis_rows = rows[(rows[fixed_axes] == base_point[fixed_axes]).all(axis=1)].sort_values(axis)
        if axis_rows[axis].nunique() < 2:
            continue
        for column, unit in UNITS.items():
            lines = [
                policy_curve(str(name), group[axis], 100 * group[column])
                for name, group in axis_rows.groupby("contender", sort=False)
            ]
            y_scale = percent_scale(f"hits, {unit} (%)")
            panels.append(
                Panel(f"Per {unit[:-1]}", curves(lines, Scale(AXIS_NAMES[axis]), y_scale))
            )
    return Figure(
        "skew" if run.traces["s"].nunique() > 1 else "axes",
        f"Hit rate of a cache of {size_of(base_point)} of the rows",
        "As above, at one size of the cache. Higher is better.",
        run.sizes(SWEEP),
        panels,
    )


def _filling_figure(run: Run) -> Figure | None:
    """Return the figure of the hit rate of each batch, at the headline size."""
    headline = headline_rows(run)
    if headline is None:
        return None
    cell_arms = {
        (row["cell"], row["arm"])
        for _, row in headline.iterrows()
        if row["contender"] not in IDEAL_CACHES
    }
    records = [
        record
        for record in run.records
        if (record["cell"], record["arm"]) in cell_arms and record["status"] == "ok"
    ]
    records = [record for record in records if "cache_rows" in record]
    panels = []
    for column, unit_name in UNITS.items() if records else ():
        unit, lines = column.removesuffix("_hit_rate"), []
        for record in records:
            samples, name = record["samples"], record["contender"]
            hits_and_totals = zip(samples[f"{unit}_hits"], samples[f"{unit}s"], strict=True)
            shares = [100 * hits / max(total, 1) for hits, total in hits_and_totals]
            x = range(1, len(shares) + 1)
            lines.append(contender_curve(name, x, shares, marker="", width=1.6))
        num_warm = len(records[0]["samples"]["rows"]) - records[0]["batches"]
        mark = Mark(num_warm + 0.5, line=":", annotation="counted from here", is_vertical=True)
        y_scale = percent_scale("hits (%)")
        panels.append(
            Panel(f"Per {unit_name[:-1]}", curves(lines, Scale("batch"), y_scale, marks=[mark]))
        )
    return Figure(
        "filling",
        f"Batch by batch, with {size_of(headline.iloc[0])} of the rows in the cache",
        "Hit rate of each batch. Where the line is level, the cache has stopped filling.",
        run.sizes(SWEEP),
        panels,
    )
