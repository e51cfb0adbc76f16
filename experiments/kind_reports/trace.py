"""The report of traces of lookups: repetition, skew, reuse, and hit rates of ideal caches.

A record is one trace; its "analysis" has the numbers that the figures draw. Every figure has a
curve per record.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from experiments.config.schema import Distribution
from experiments.config.sweep import SWEEP
from experiments.kinds import trace
from experiments.kinds.trace import TraceRecord
from experiments.report import text
from experiments.report.charts import DASHED, Curve, Scale, curves, percent_scale
from experiments.report.data import Run
from experiments.report.style import COLOURS, INK, Figure, Panel
from experiments.report.tables import Column, Table, Value, count_value, number_value, percent_value
from experiments.workloads import production
from experiments.workloads.distributions import describe_distribution, zipf_probabilities
from experiments.workloads.trace_analysis import TableNumbers

NOTES = (
    "'Distinct' rows are those looked up at least once. A batch's distinct share is its distinct "
    "rows ÷ its lookups: the share that a table moves if it acts once per row.",
    "Skew: P(rank) ~ (rank + q)^-s by maximum likelihood. Ranks come from the even batches and "
    "the likelihood from the odd ones, because rows ranked by the same counts that are fitted look "
    "skewed even if all are equally popular. 'Misfit' is the largest difference between the "
    "cumulative shares of the distribution and of the lookups; where rows have few lookups each, "
    "ranks are uncertain, and a true zipf distribution has a misfit of a few percent too.",
    "Reuse distance: distinct other rows looked up between two lookups of the same row, lookup "
    "by lookup (a cache of C rows that replaces the least recently used one serves exactly the "
    "lookups with a distance below C).",
    "Hit rates are of caches that probe all rows of a batch before any row moves, as emblib's do, "
    "over the batches after those that fill the cache; sizes are fractions of the distinct rows of "
    "the whole trace. 'Offline optimum' (Belady's MIN on batches) and 'static top-k' know the "
    "future; 'LRU' is fully associative and keeps the most recently used rows.",
    f"Published histograms: {production.SOURCE}; one batch of {production.NUM_SAMPLES:,} samples, "
    f"{production.NUM_TABLES} tables, {production.NUM_LOOKUPS:,} lookups, "
    f"{production.NUM_DISTINCT_ROWS:,} distinct "
    "rows. 'Production-like' ids are drawn from a mixture of Poisson rates under which counts like "
    "the published ones are expected.",
)


def answer_record(run: Run) -> TraceRecord | None:
    """Return the record that the answer describes; None if it was not measured.

    If the workload is a trace file, it is the record of the sweep, which reads that file. Otherwise
    it is that of the sweep or, without one, of the headline.
    """
    sections = [SWEEP] if _has_trace_file(run) else [SWEEP, str(run.config.report.headline)]
    for section in sections:
        for record in trace.good_records(run.records):
            if record["section"] == section:
                return record
    return None


def _has_trace_file(run: Run) -> bool:
    """Return whether the workload of the run is a trace from a file."""
    distribution = OmegaConf.select(run.config, "workload.distribution", default="")
    return str(distribution) == Distribution.trace.value


def answer(run: Run) -> list[str]:
    """State repetition, concentration and the best hit rate; then the fit, then other lookups."""
    record = answer_record(run)
    if record is None and _has_trace_file(run):
        failure = next((record for record in run.failures() if record["section"] == SWEEP), None)
        reason = failure["reason"] if failure else "the run ended before"
        return [f"No answer: the trace {run.config.workload.file} was not analysed ({reason})."]
    if record is None:
        return ["No answer: no lookups were analysed before the run ended."]
    return [
        _headline_sentence(run, record),
        *_skew_sentence(record),
        *_comparison_sentence(run, record),
    ]


def _headline_sentence(run: Run, record: TraceRecord) -> str:
    """State repetition and concentration, and the hit rates of an ideal and of an LRU cache."""
    analysis, size = record["analysis"], answer_cache_size(run)
    samples = record["samples"]
    num_lookups = sum(samples["lookups"])
    optimum, lru = (_hit_rate_at(record, policy, size) for policy in ("offline", "lru"))
    share_of_half = concentration(record, "0.5")
    return (
        f"Of the {name_of(record)} ({text.count(record['features'], 'table')}, "
        f"{num_lookups:,} lookups into {analysis['distinct']:,} distinct rows), "
        f"{text.percent(sum(samples['rows']) / num_lookups)} are distinct rows of their batch; "
        f"{text.percent(share_of_half)} of the rows have half of the lookups, and a cache of "
        f"{100 * size:g} % of the rows could at best serve {text.percent(optimum)} of them "
        f"(keeping the most recently used rows: {text.percent(lru)})."
    )


def name_of(record: TraceRecord) -> str:
    """Return the name of the lookups: their distribution, or the file of the trace."""
    params = record["params"]
    if params["distribution"] == Distribution.zipf.value:
        offset = f", q={params['q']:g}" if params["q"] else ""
        return f"zipf lookups (s={params['s']:g}{offset})"
    if params["distribution"] == Distribution.trace.value:
        return f"lookups of the trace {params['file']}"
    return describe_distribution(params).replace(" ids", " lookups")


def answer_cache_size(run: Run) -> float:
    """Return the cache size of the answer, as a share of the distinct rows."""
    return float(run.config.report.subject_cache)


def concentration(record: TraceRecord, share: str) -> float:
    """Return the fewest rows with that share of the lookups ÷ distinct rows, over all tables."""
    num_rows = sum(table["rows_of"][share] for table in record["tables"])
    return num_rows / max(1, sum(table["distinct"] for table in record["tables"]))


def _hit_rate_at(record: TraceRecord, policy: str, size: float) -> float:
    """Return the hit rate per lookup at the cache size nearest to `size`, a share of the rows."""
    points = record["analysis"]["hit_rates"][policy]
    wanted_rows = size * record["analysis"]["hit_rates"]["distinct"]
    nearest_point = min(
        points, key=lambda point: abs(math.log(point["cache_rows"] / max(wanted_rows, 1)))
    )
    return float(nearest_point["lookups"])


def _skew_sentence(record: TraceRecord) -> list[str]:
    """State the zipf distribution that was fitted to the busiest table."""
    table = busiest_table(record)
    fit = table["fit"]
    if fit is None:
        return ["There are too few lookups to say how skewed they are."]
    table_note = f" of the busiest table, {table['name']}," if record["features"] > 1 else ""
    return [
        f"The zipf distribution nearest to the lookups{table_note} has s={fit['s']:.2f} and "
        f"q={fit['q']:.3g}; it puts up to {text.percent(fit['misfit'])} of them at other ranks."
    ]


def busiest_table(record: TraceRecord) -> TableNumbers:
    """Return the table with the most lookups."""
    return record["tables"][record["analysis"]["busiest"]["table"]]


def _comparison_sentence(run: Run, record: TraceRecord) -> list[str]:
    """State the best hit rates of the other lookups at the same size of the cache; [] without."""
    size = answer_cache_size(run)
    other_records = [
        other for other in trace.good_records(run.records) if other["cell"] != record["cell"]
    ]
    if not other_records:
        return []
    optima = [
        f"{text.percent(_hit_rate_at(other, 'offline', size))} of {name_of(other)}"
        for other in other_records
    ]
    return [f"For comparison, at best it would serve {', '.join(optima)}."]


def section_table(run: Run, section: str) -> Table:
    """Return one row per table of the section's records."""
    records = [record for record in trace.good_records(run.records) if record["section"] == section]
    rows = [
        {
            **table,
            "label": (f"{_describe_point(record)} · " if len(records) > 1 else "") + table["name"],
        }
        for record in records
        for table in record["tables"]
    ]
    columns: dict[str, Column] = {
        "table": "label",
        "lookups": lambda table: count_value(table["lookups"]),
        "distinct rows": _distinct_value,
        "distinct in a batch": lambda table: percent_value(table["batch_distinct_share"]),
        "once": lambda table: percent_value(table["once"]),
        "rows with 50 %": lambda table: percent_value(
            table["rows_of"]["0.5"] / max(1, table["distinct"])
        ),
        "rows with 90 %": lambda table: percent_value(
            table["rows_of"]["0.9"] / max(1, table["distinct"])
        ),
        "ids per bag": lambda table: number_value(table["bag_mean"]),
        "s": lambda table: Value.of(_fit_parameter(table, "s"), lambda s: f"{s:.2f}"),
        "q": lambda table: number_value(_fit_parameter(table, "q")),
        "misfit": lambda table: percent_value(_fit_parameter(table, "misfit")),
        "LRU 10 %": lambda table: percent_value(table["lru"]),
        "best 10 %": lambda table: percent_value(table["offline"]),
    }
    return Table.of(rows, columns)


def _describe_point(record: TraceRecord) -> str:
    params = record["params"]
    return f"E={params['E']:,} B={params['B']:,} L={params['L']} s={params['s']:g}"


def _distinct_value(table: TableNumbers) -> Value:
    """Return an entry for the distinct rows, with the number of all rows where it is known."""
    total_note = f" of {table['rows']:,}" if table["rows_known"] and table["rows"] else ""
    return Value(f"{table['distinct']:,}{total_note}", table["distinct"])


def _fit_parameter(table: dict[str, Any], name: str) -> float | None:
    """Return a parameter of the fitted zipf distribution; None for too few lookups."""
    return table["fit"][name] if table["fit"] else None


COLOUR_ORDER = (  # names of colours, for the records in their order
    "tbe",
    "tt",
    "torch",
    "reference_tt",
    "cached_lru",
    "cached_lfu",
    "managed",
    "disk_lru",
)
MAX_LENGTH_RATIO = 1.5  # between the lookups of a trace and of the published one, to compare them


def figures(run: Run) -> list[Figure]:
    """Return every figure, the main one first."""
    records = trace.good_records(run.records)
    if not records:
        return []
    sizes = {
        f"{text.count(record['features'], 'table')}, B={record['params']['B']:,}, "
        f"{text.count(len(record['samples']['lookups']), 'batch', 'batches')}, "
        f"{sum(record['samples']['lookups']):,} lookups"
        for record in records
    }
    common_sizes = sizes.pop() if len(sizes) == 1 else "Sizes differ: see the tables"
    draw_functions = [_draw_caches, _draw_popularity, _draw_repetition, _draw_reuse]
    draw_functions.append(_draw_working_set)
    if any(record["features"] > 1 for record in records):
        draw_functions.append(_draw_tables)
    return [dataclasses.replace(draw(records), sizes=common_sizes) for draw in draw_functions]


def _with_styles(records: Sequence[TraceRecord]) -> Iterator[tuple[TraceRecord, str, str]]:
    """Yield each record with its colour and label; equal names are told apart by sizes."""
    for i, record in enumerate(records):
        label = name_of(record).removeprefix("lookups of the ").replace(" lookups", "")
        if sum(name_of(other) == name_of(record) for other in records) > 1:
            label += f" E={record['params']['E']:,} B={record['params']['B']:,}"
        yield record, COLOURS[COLOUR_ORDER[i % len(COLOUR_ORDER)]], label


def _draw_caches(records: Sequence[TraceRecord]) -> Figure:
    """Draw the hit rates of ideal caches against their size, per lookup and per distinct row."""

    def panel(title: str, unit: str) -> Panel:
        lines = []
        for record, colour, label in _with_styles(records):
            rates = record["analysis"]["hit_rates"]
            curve_of_policy = {
                policy: Curve(
                    [100 * point["cache_rows"] / rates["distinct"] for point in rates[policy]],
                    [100 * point[unit] for point in rates[policy]],
                    colour,
                )
                for policy in ("lru", "offline", "static_top")
            }
            lines += [
                dataclasses.replace(curve_of_policy["lru"], label=label),
                dataclasses.replace(
                    curve_of_policy["offline"], line=DASHED, width=1.4, marker="o", size=4
                ),
                dataclasses.replace(curve_of_policy["static_top"], line=":", width=1.4),
            ]
        x_scale = Scale(
            "size of the cache (% of the distinct rows)",
            log=10,
            ticks=[0.1, 1, 10, 100],
            low=0.1,
            high=110,
        )
        return Panel(
            title, curves(lines, x_scale, percent_scale("hits (%)"), name_position="upper left")
        )

    return Figure(
        "ideal_hit_rate",
        "Hit rates of ideal caches",
        "Share of the lookups, and of the distinct rows of a batch, that hit in a cache of a given "
        "size once it has been filled. Solid: it keeps the most recently used rows. Dashed, with "
        "marks: offline optimum, which no cache can exceed per distinct row. Dotted: the most "
        "frequent rows of the trace and no others. Higher is better.",
        "",
        [panel("Per lookup", "lookups"), panel("Per distinct row", "rows")],
    )


def _draw_popularity(records: Sequence[TraceRecord]) -> Figure:
    """Draw the lookups per row by rank, and the lookups of the most popular rows together."""
    rank_curves, cumulative_curves = [], []
    for record, colour, label in _with_styles(records):
        table, points = busiest_table(record), record["analysis"]["busiest"]["ranked"]
        ranks = np.array([rank for rank, _ in points])
        rank_curves.append(Curve(ranks, [share for _, share in points], colour, label))
        if fit := table["fit"]:
            fitted_shares = zipf_probabilities(table["rows"], fit["s"], fit["q"])
            fitted_ranks = np.unique(np.rint(ranks).astype(int))
            rank_curves.append(
                Curve(fitted_ranks, fitted_shares[fitted_ranks - 1], colour, line=DASHED, width=1.2)
            )
        tables = record["tables"]
        distinct = sum(table["distinct"] for table in tables)
        shares = {
            float(k): sum(table["rows_of"][k] for table in tables) for k in tables[0]["rows_of"]
        }
        x = [100 * rows / distinct for rows in shares.values()]
        cumulative_curves.append(Curve(x, [100 * share for share in shares], colour, label, "o"))
    rank_scale = Scale("rank of the row", log=10)
    share_scale = Scale("share of the lookups", log=10)
    row_scale = Scale("rows, most popular first (% of the distinct rows)", log=10)
    lookup_scale = percent_scale("their lookups (%)")
    return Figure(
        "popularity",
        "Popularity of rows",
        "Left: share of the lookups that a row has, by its rank, in the busiest table; dashed: the "
        "nearest zipf distribution. Right: the share of the lookups that the most popular rows "
        "have together. Ranks are by the counts shown, which makes the rarest rows look a little "
        "more different than they are.",
        "",
        [
            Panel(
                "Lookups per row, by rank",
                curves(rank_curves, rank_scale, share_scale, name_position="lower left"),
            ),
            Panel(
                "Most popular rows",
                curves(cumulative_curves, row_scale, lookup_scale, name_position="upper left"),
            ),
        ],
    )


def _draw_repetition(records: Sequence[TraceRecord]) -> Figure:
    """Draw rows and their lookups by the number of lookups per row."""
    shows_published = any(_is_like_published(record) for record in records)
    names = [*(_format_binary(edge) for edge in production.EDGES[1:]), "more"]

    def panel(unit: str, published: Sequence[float]) -> Panel:
        positions = range(len(names))
        lines = [
            Curve(
                positions,
                100 * np.array(record["analysis"]["spectrum"][unit]),
                colour,
                label,
                "o",
                size=3,
            )
            for record, colour, label in _with_styles(records)
        ]
        if shows_published:
            published_shares = 100 * np.array(published)
            lines.append(
                Curve(positions, published_shares, INK, "published, 2022", "*", line="", size=7)
            )
        x_scale = Scale("lookups per row, at most", ticks=positions[::2], names=names[::2])
        y_scale = Scale(f"share of the {unit} (%)", low=0)
        return Panel(text.capitalise(unit), curves(lines, x_scale, y_scale))

    star_note = (
        " Stars: the published production trace; in its last bins a smaller table has few rows."
        if shows_published
        else ""
    )
    return Figure(
        "repetition",
        "Lookups per row",
        "Rows by how many lookups they have in the whole trace: the share of the rows in each "
        f"bin, and the share of all lookups that go to them.{star_note} Only "
        "traces with as many lookups per row can be compared.",
        "",
        [panel("rows", production.ROWS_SHARE), panel("lookups", production.LOOKUPS_SHARE)],
    )


def _is_like_published(record: TraceRecord) -> bool:
    """Return whether a trace is production-like, and about as long as the published one."""
    window = record.get("published_window")
    if not window:
        return False
    return 1 / MAX_LENGTH_RATIO < sum(record["samples"]["lookups"]) / window < MAX_LENGTH_RATIO


def _draw_reuse(records: Sequence[TraceRecord]) -> Figure:
    """Draw the reuse distances of lookups, and their cumulative share."""

    def panel(title: str, transform: Callable[[np.ndarray], np.ndarray], label: str) -> Panel:
        lines = []
        for record, colour, name in _with_styles(records):
            distances = record["analysis"]["distances"]
            y = 100 * transform(np.array(distances["reuse"]))
            lines.append(Curve(distances["edges"][1:], y, colour, name, "o", size=3))
        x_scale = Scale("reuse distance (rows), below", log=2, format_tick=_format_binary)
        return Panel(title, curves(lines, x_scale, Scale(label, low=0), name_position="upper left"))

    return Figure(
        "reuse_distance",
        "Reuse distance",
        "Distinct other rows between two lookups of the same row. Left: share of all lookups by "
        "distance, in bins that double. Right: the share with at most that distance; what is "
        "missing to 100 % at the right end are first lookups, which miss in every cache.",
        "",
        [
            panel("Reuse distance", lambda shares: shares, "lookups (%)"),
            panel("Cumulative", np.cumsum, "lookups, cumulative (%)"),
        ],
    )


def _draw_working_set(records: Sequence[TraceRecord]) -> Figure:
    """Draw the distinct rows over the lookups, and the new rows of each batch."""
    growth_curves, new_row_curves = [], []
    max_rows, min_lookups = 1, min(record["samples"]["lookups"][0] for record in records)
    for record, colour, label in _with_styles(records):
        x, y = (np.cumsum(record["samples"][name]) for name in ("lookups", "new"))
        max_rows = max(max_rows, int(y[-1]))
        growth_curves.append(Curve(x, y, colour, label, "o", size=3))
        shares = 100 * np.array(record["samples"]["new"]) / np.array(record["samples"]["rows"])
        new_row_curves.append(Curve(1 + np.arange(len(shares)), shares, colour, label))
    ends = [min_lookups, max(max_rows, min_lookups)]
    growth_curves.append(Curve(ends, ends, INK, width=0.7))
    lookup_scale = Scale("lookups", log=10, format_tick=_format_decimal)
    row_scale = Scale("distinct rows", log=10, format_tick=_format_decimal)
    share_scale = percent_scale("of its distinct rows (%)")
    return Figure(
        "working_set",
        "Growth of the working set",
        "Left: rows that have been looked up at least once, after so many lookups; the thin line "
        "is a new row at every lookup. Right: share of the distinct rows of each batch that occur "
        "in no earlier batch.",
        "",
        [
            Panel(
                "Rows looked up so far",
                curves(growth_curves, lookup_scale, row_scale, name_position="lower right"),
            ),
            Panel(
                "New rows per batch",
                curves(new_row_curves, Scale("batch"), share_scale, name_position="upper right"),
            ),
        ],
    )


def _format_decimal(value: float) -> str:
    """Return a number with a decimal prefix from 1,000 on, e.g. '4 k' or '2 M'."""
    for unit, factor in ((" M", 1e6), (" k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:g}"


def _format_binary(value: float) -> str:
    """Return a number with a binary prefix from 1,024 on, e.g. '4 Ki'."""
    return f"{value / 1024:,.3g} Ki" if value >= 1024 else f"{value:g}"


def _draw_tables(records: Sequence[TraceRecord]) -> Figure:
    """Draw the skew and the best hit rate of each table against its distinct rows."""

    def panel(title: str, value_of: Callable[[TableNumbers], float | None], label: str) -> Panel:
        lines = []
        for record, colour, name in _with_styles(records):
            values = [(table["distinct"], value_of(table)) for table in record["tables"]]
            points = [(x, y) for x, y in values if y is not None]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            lines.append(Curve(xs, ys, colour, name, "o", line="", size=5, opacity=0.7))
        x_scale = Scale("distinct rows of the table", log=10)
        return Panel(title, curves(lines, x_scale, Scale(label, low=0)))

    return Figure(
        "per_table",
        "Table by table",
        "Each mark is a table. Left: the skew s of the zipf distribution nearest to its lookups. "
        "Right: the hit rate of the best possible cache of a tenth of its distinct rows.",
        "",
        [
            panel("Skew", lambda table: (table["fit"] or {}).get("s"), "zipf s"),
            panel("Best cache of 10 %", lambda table: 100 * table["offline"], "hits (%)"),
        ],
    )
