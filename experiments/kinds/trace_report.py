"""What the report of looked-at lookups says: its answer, its table, how to read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator
from omegaconf import OmegaConf

from experiments.config.schema import Distribution
from experiments.config.sweep import SWEEP
from experiments.kinds import trace
from experiments.report import text
from experiments.report.data import Run
from experiments.report.style import COLOURS, INK, Drawing, Figure, Panel
from experiments.report.tables import Table, Value
from experiments.results.store import Record
from experiments.workloads import production
from experiments.workloads.distributions import describe_distribution, zipf_probabilities

NOTES = (
    "'Distinct' rows are those looked up at all. A batch's distinct share is its distinct rows ÷ "
    "its lookups, which is what a table that acts once per row has to move.",
    "Skew: P(rank) ~ (rank + q)^-s by maximum likelihood. Ranks come from the even batches and "
    "the likelihood from the odd ones, because rows that are ranked by the counts one fits show "
    "skew in pure chance. 'Misfit' is the largest difference between the cumulative shares of the "
    "law and of the lookups; where rows have few lookups each, ranks are uncertain, and a true "
    "zipf law has a misfit of a few percent too.",
    "Reuse distance: distinct other rows looked up between two lookups of the same row, lookup "
    "by lookup (a cache of C rows that replaces the least recently used one serves exactly the "
    "lookups with a distance below C).",
    "Hit rates are of caches that probe all rows of a batch before any row moves, as emblib's do, "
    "over the batches after those that fill the cache; sizes are fractions of the distinct rows of "
    "the whole trace. 'Offline optimum' (Belady's MIN on batches) and 'static top-k' know the "
    "future; 'LRU' keeps the most recently used rows, in any place.",
    f"Published histograms: {production.SOURCE}; one batch of {production.SAMPLES:,} samples, "
    f"{production.TABLES} tables, {production.LOOKUPS:,} lookups, {production.DISTINCT:,} distinct "
    "rows. 'Production-like' ids are drawn from a mixture of Poisson rates under which counts like "
    "the published ones are expected.",
)


def subject(run: Run) -> Record | None:
    """What the answer is about: the user's own trace, else the headline case."""
    sections = [SWEEP] if _names_a_file(run) else [SWEEP, str(run.config.report.headline)]
    for section in sections:
        for record in trace.looked_at(run.records):
            if record["section"] == section:
                return record
    return None


def _names_a_file(run: Run) -> bool:
    return (
        str(OmegaConf.select(run.config, "workload.distribution", default=""))
        == Distribution.trace.value
    )


def answer(run: Run) -> list[str]:
    """Repetition, concentration and what a cache could serve; then the fit, then the others."""
    record = subject(run)
    if record is None and _names_a_file(run):
        failed = next((r for r in run.failures() if r["section"] == SWEEP), None)
        reason = failed["reason"] if failed else "the run ended before"
        return [f"No answer: the trace {run.config.workload.file} was not analysed ({reason})."]
    if record is None:
        return ["No answer: no lookups were looked at before the run ended."]
    return [_headline(run, record), *_skew(record), *_others(run, record)]


def _headline(run: Run, record: Record) -> str:
    found, size = record["analysis"], fraction(run)
    samples = record["samples"]
    total = sum(samples["lookups"])
    best, recent = (_at(record, policy, size) for policy in ("offline", "lru"))
    half = concentration(record, "0.5")
    return (
        f"Of the {name(record)} ({text.count(record['features'], 'table')}, {total:,} lookups "
        f"into {found['distinct']:,} distinct rows), {percent(sum(samples['rows']) / total)} are "
        f"distinct rows of their batch; {percent(half)} of the rows have half of the lookups, and "
        f"a cache of {100 * size:g} % of the rows could at best serve {percent(best)} of them "
        f"(keeping the most recently used rows: {percent(recent)})."
    )


def name(record: Record) -> str:
    """The lookups, as people call them."""
    p = record["params"]
    if p["distribution"] == Distribution.zipf.value:
        offset = f", q={p['q']:g}" if p["q"] else ""
        return f"zipf lookups (s={p['s']:g}{offset})"
    if p["distribution"] == Distribution.trace.value:
        return f"lookups of the trace {p['file']}"
    return describe_distribution(p).replace(" ids", " lookups")


def fraction(run: Run) -> float:
    """The size of the cache that the answer is about."""
    return float(run.config.report.subject_cache)


def concentration(record: Record, share: str) -> float:
    """Fewest rows with that share of the lookups ÷ rows looked up; means over the tables."""
    rows = sum(own["rows_of"][share] for own in record["tables"])
    return rows / max(1, sum(own["distinct"] for own in record["tables"]))


def _at(record: Record, policy: str, size: float) -> float:
    """Hit rate per lookup at the size nearest to a fraction of the distinct rows."""
    points = record["analysis"]["hit_rates"][policy]
    wanted = size * record["analysis"]["hit_rates"]["distinct"]
    nearest = min(points, key=lambda p: abs(math.log(p["cache_rows"] / max(wanted, 1))))
    return float(nearest["lookups"])


def _skew(record: Record) -> list[str]:
    own = busiest(record)
    fit = own["fit"]
    if fit is None:
        return ["There are too few lookups to say how skewed they are."]
    of = f" of the busiest table, {own['name']}," if record["features"] > 1 else ""
    return [
        f"The zipf law nearest to the lookups{of} has s={fit['s']:.2f} and q={fit['q']:.3g}; it "
        f"puts up to {percent(fit['misfit'])} of them at other ranks."
    ]


def busiest(record: Record) -> dict[str, Any]:
    """The table with most lookups."""
    tables: list[dict[str, Any]] = record["tables"]
    return tables[record["analysis"]["busiest"]["table"]]


def _others(run: Run, record: Record) -> list[str]:
    size = fraction(run)
    others = [r for r in trace.looked_at(run.records) if r["cell"] != record["cell"]]
    if not others:
        return []
    parts = [f"{percent(_at(r, 'offline', size))} of {name(r)}" for r in others]
    return [f"For comparison, at best it would serve {', '.join(parts)}."]


def percent(share: float) -> str:
    """'71.3 %'."""
    return text.NONE if text.missing(share) else f"{text.digits(100 * share)} %"


def section_table(run: Run, section: str) -> Table:
    """A row per table."""
    heads = ["table", "lookups", "distinct rows", "distinct in a batch", "once", "have 50 %"]
    heads += ["have 90 %", "ids per bag", "s", "q", "misfit", "LRU 10 %", "best 10 %"]
    lines = []
    for record in trace.looked_at(run.records):
        if record["section"] == section:
            several = sum(r["section"] == section for r in trace.looked_at(run.records)) > 1
            prefix = f"{_point(record)} · " if several else ""
            lines += [_line(own, prefix) for own in record["tables"]]
    return Table(heads, lines)


def _point(record: Record) -> str:
    p = record["params"]
    return f"E={p['E']:,} B={p['B']:,} L={p['L']} s={p['s']:g}"


def _line(own: dict[str, Any], prefix: str) -> list[Value]:
    fit = own["fit"] or {"s": math.nan, "q": math.nan, "misfit": math.nan}
    distinct = max(1, own["distinct"])
    known = own["rows"] if own["rows_known"] else 0
    of = f" of {known:,}" if known else ""
    half, ninety = (own["rows_of"][share] for share in ("0.5", "0.9"))
    shares = [own["batch_distinct_share"], own["once"], half / distinct, ninety / distinct]
    return [
        Value(prefix + own["name"]),
        Value(f"{own['lookups']:,}", own["lookups"]),
        Value(f"{own['distinct']:,}{of}", own["distinct"]),
        *(_share(value) for value in shares),
        Value(text.digits(own["bag_mean"]), own["bag_mean"]),
        Value(text.NONE if text.missing(fit["s"]) else f"{fit['s']:.2f}", fit["s"]),
        Value(text.digits(fit["q"]), fit["q"]),
        *(_share(value) for value in (fit["misfit"], own["lru"], own["offline"])),
    ]


def _share(value: float) -> Value:
    return Value(percent(value), 100 * value)


# Lookups are no contenders: they take the colours in order.
ORDER = ("tbe", "tt", "torch", "reference_tt", "cached_lru", "cached_lfu", "managed", "disk_lru")
COMPARABLE = 1.5  # a window of up to so many times the published one, or its inverse, is like it


def figures(run: Run) -> list[Figure]:
    """Every figure; the first is the main one."""
    records = trace.looked_at(run.records)
    if not records:
        return []
    sizes = _sizes(records)
    parts = [_caches, _popularity, _repetition, _reuse, _working_set]
    found = [part(records, sizes) for part in parts]
    return found + ([_tables(records, sizes)] if any(r["features"] > 1 for r in records) else [])


def _sizes(records: Sequence[Record]) -> str:
    """What all of them share, in one line."""
    found = {
        f"{text.count(r['features'], 'table')}, B={r['params']['B']:,}, "
        f"{text.count(len(r['samples']['lookups']), 'batch', 'batches')}, "
        f"{sum(r['samples']['lookups']):,} lookups"
        for r in records
    }
    return found.pop() if len(found) == 1 else "Sizes differ: see the tables"


def _lines(records: Sequence[Record]) -> list[tuple[Record, str, str]]:
    """Each with its colour and its name."""
    return [(r, COLOURS[ORDER[i % len(ORDER)]], _short(r, records)) for i, r in enumerate(records)]


def _short(record: Record, among: Sequence[Record]) -> str:
    words = name(record).removeprefix("lookups of the ").replace(" lookups", "")
    alike = sum(name(r) == name(record) for r in among) > 1
    p = record["params"]
    return f"{words} E={p['E']:,} B={p['B']:,}" if alike else words


def _caches(records: Sequence[Record], sizes: str) -> Figure:
    what = {"lookups": "Per lookup", "rows": "Per distinct row"}
    return Figure(
        "ideal_hit_rate",
        "What a cache could serve",
        "Share of the lookups, and of the distinct rows of a batch, that a cache of a given size "
        "has once it has been filled. Solid: it keeps the most recently used rows. Dashed, with "
        "marks: offline optimum, which no cache can exceed per distinct row. Dotted: the most "
        "frequent rows of the trace and no others. Higher is better.",
        sizes,
        [Panel(title, _cache_curves(records, key)) for key, title in what.items()],
    )


def _cache_curves(records: Sequence[Record], of: str) -> Drawing:
    def draw(axes: Axes) -> None:
        for record, colour, label in _lines(records):
            found = record["analysis"]["hit_rates"]
            styles = {"lru": "-", "offline": (0, (4, 2)), "static_top": ":"}
            for policy, style in styles.items():
                x = [100 * p["cache_rows"] / found["distinct"] for p in found[policy]]
                y = [100 * p[of] for p in found[policy]]
                axes.plot(
                    x, y, color=colour, ls=style, lw=2.0 if policy == "lru" else 1.4,
                    marker="o" if policy == "offline" else None, ms=4,
                    label=label if policy == "lru" else None,
                )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlim(0.1, 110)
        axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axes.set_xlabel("size of the cache (% of the distinct rows)")
        axes.set_ylabel("served (%)")
        axes.set_ylim(0, 102)
        axes.legend(fontsize=8, loc="upper left")

    return draw


def _popularity(records: Sequence[Record], sizes: str) -> Figure:
    return Figure(
        "popularity",
        "How popular rows are",
        "Share of the lookups that a row has, by its rank, in the busiest table; dashed: the zipf "
        "law nearest to it. Beside it the share of the lookups that the most popular rows have "
        "together. Ranks are by the counts shown, which makes the rarest rows look a little more "
        "different than they are.",
        sizes,
        [
            Panel("Lookups of a row, by rank", _ranked(records)),
            Panel("Most popular rows together", _together(records)),
        ],
    )


def _ranked(records: Sequence[Record]) -> Drawing:
    def draw(axes: Axes) -> None:
        for record, colour, label in _lines(records):
            own, points = busiest(record), record["analysis"]["busiest"]["ranked"]
            ranks = np.array([rank for rank, _ in points])
            axes.loglog(ranks, [share for _, share in points], color=colour, label=label)
            if own["fit"]:
                law = zipf_probabilities(own["rows"], own["fit"]["s"], own["fit"]["q"])
                at = np.unique(np.rint(ranks).astype(int))
                axes.loglog(at, law[at - 1], color=colour, ls=(0, (4, 2)), lw=1.2)
        axes.set_xlabel("rank of the row")
        axes.set_ylabel("share of the lookups")
        axes.legend(fontsize=8, loc="lower left")

    return draw


def _together(records: Sequence[Record]) -> Drawing:
    def draw(axes: Axes) -> None:
        for record, colour, label in _lines(records):
            own = record["tables"]
            distinct = sum(t["distinct"] for t in own)
            shares = {float(k): sum(t["rows_of"][k] for t in own) for k in own[0]["rows_of"]}
            x = [100 * rows / distinct for rows in shares.values()]
            axes.plot(x, [100 * s for s in shares], color=colour, marker="o", label=label)
        axes.set_xscale("log")
        axes.set_xlabel("rows, most popular first (% of the distinct rows)")
        axes.set_ylabel("their lookups (%)")
        axes.set_ylim(0, 102)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.legend(fontsize=8, loc="upper left")

    return draw


def _repetition(records: Sequence[Record], sizes: str) -> Figure:
    like = [r for r in records if _like_published(r)]
    beside = (
        " Stars: the published production trace; in its last bins a smaller table has few rows."
    )
    beside = beside if like else ""
    return Figure(
        "repetition",
        "How often rows are looked up",
        "Rows by how many lookups they have in the whole trace: the share of the rows in each bin, "
        f"and the share of all lookups that go to them.{beside} Only traces with as many lookups "
        "per row can be compared.",
        sizes,
        [
            Panel("Rows", _spectrum(records, "rows", published=bool(like))),
            Panel("Lookups", _spectrum(records, "lookups", published=bool(like))),
        ],
    )


def _like_published(record: Record) -> bool:
    window = record.get("published_window")
    if not window:
        return False
    return 1 / COMPARABLE < sum(record["samples"]["lookups"]) / window < COMPARABLE


def _spectrum(records: Sequence[Record], of: str, *, published: bool) -> Drawing:
    names = [*(_binary(e) for e in production.EDGES[1:]), "more"]

    def draw(axes: Axes) -> None:
        places = np.arange(len(names))
        for record, colour, label in _lines(records):
            share = 100 * np.array(record["analysis"]["spectrum"][of])
            axes.plot(places, share, color=colour, marker="o", ms=3, lw=1.5, label=label)
        if published:
            shares = production.ROWS_SHARE if of == "rows" else production.LOOKUPS_SHARE
            axes.plot(
                places, 100 * np.array(shares), color=INK, marker="*", ls="", ms=7,
                label="published, 2022",
            )  # fmt: skip
        axes.set_xticks(places[::2], names[::2], fontsize=8)
        axes.set_xlabel("lookups of the row, at most")
        axes.set_ylabel(f"share of the {of} (%)")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, loc="best")

    return draw


def _reuse(records: Sequence[Record], sizes: str) -> Figure:
    return Figure(
        "reuse_distance",
        "How soon rows come back",
        "Distinct other rows between two lookups of the same row. Left: share of all lookups by "
        "distance, in bins that double. Right: the share with at most that distance; what is "
        "missing to 100 % at the right end are first lookups, which no cache can have.",
        sizes,
        [
            Panel("Reuse distance", _reuse_curve(records, lambda shares: shares, "lookups (%)")),
            Panel("At most that far", _reuse_curve(records, np.cumsum, "lookups, cumulated (%)")),
        ],
    )


def _reuse_curve(
    records: Sequence[Record], of: Callable[[np.ndarray], np.ndarray], ylabel: str
) -> Drawing:
    def draw(axes: Axes) -> None:
        for record, colour, label in _lines(records):
            found = record["analysis"]["distances"]
            y = 100 * of(np.array(found["reuse"]))
            axes.plot(found["edges"][1:], y, color=colour, marker="o", ms=3, label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _binary(v)))
        axes.set_xlabel("reuse distance (rows), below")
        axes.set_ylabel(ylabel)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, loc="upper left")

    return draw


def _working_set(records: Sequence[Record], sizes: str) -> Figure:
    return Figure(
        "working_set",
        "How the working set grows",
        "Left: rows that have been looked up at least once, after so many lookups; the thin line "
        "is a new row at every lookup. Right: of the distinct rows of each batch, how many no "
        "batch before has had.",
        sizes,
        [
            Panel("Rows looked up so far", _growth(records)),
            Panel("New rows of a batch", _new_rows(records)),
        ],
    )


def _growth(records: Sequence[Record]) -> Drawing:
    def draw(axes: Axes) -> None:
        most = 1
        for record, colour, label in _lines(records):
            x = np.cumsum(record["samples"]["lookups"])
            y = np.cumsum(record["samples"]["new"])
            most = max(most, int(y[-1]))
            axes.loglog(x, y, color=colour, marker="o", ms=3, label=label)
        first = min(r["samples"]["lookups"][0] for r in records)
        axes.plot([first, max(most, first)], [first, max(most, first)], color=INK, lw=0.7)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = axis.get_view_interval()
            subs = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_major_formatter(FuncFormatter(lambda v, _: _whole(v)))
        axes.minorticks_off()
        axes.set_xlabel("lookups")
        axes.set_ylabel("distinct rows")
        axes.legend(fontsize=8, loc="lower right")

    return draw


def _whole(value: float) -> str:
    """'4 k', '2 M': thousands and millions in short."""
    for unit, factor in ((" M", 1e6), (" k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:g}"


def _binary(value: float) -> str:
    """'4 Ki': powers of two in short."""
    return f"{value / 1024:,.3g} Ki" if value >= 1024 else f"{value:g}"


def _new_rows(records: Sequence[Record]) -> Drawing:
    def draw(axes: Axes) -> None:
        for record, colour, label in _lines(records):
            new, rows = (np.array(record["samples"][k]) for k in ("new", "rows"))
            axes.plot(1 + np.arange(len(new)), 100 * new / rows, color=colour, label=label)
        axes.set_xlabel("batch")
        axes.set_ylabel("of its distinct rows (%)")
        axes.set_ylim(0, 102)
        axes.legend(fontsize=8, loc="upper right")

    return draw


def _tables(records: Sequence[Record], sizes: str) -> Figure:
    return Figure(
        "per_table",
        "Table by table",
        "Each mark is a table. Left: the skew s of the zipf law nearest to its lookups. Right: "
        "what the best possible cache of a tenth of its distinct rows would serve.",
        sizes,
        [
            Panel("Skew", _by_table(records, lambda t: (t["fit"] or {}).get("s"), "zipf s")),
            Panel(
                "Best cache of 10 %",
                _by_table(records, lambda t: 100 * t["offline"], "lookups served (%)"),
            ),
        ],
    )


def _by_table(
    records: Sequence[Record], value: Callable[[dict], float | None], ylabel: str
) -> Drawing:
    def draw(axes: Axes) -> None:
        for record, colour, label in _lines(records):
            points = [(t["distinct"], value(t)) for t in record["tables"]]
            known = [(x, y) for x, y in points if y is not None]
            axes.plot(
                [x for x, _ in known], [y for _, y in known], color=colour, ls="", marker="o",
                ms=5, alpha=0.7, label=label,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlabel("distinct rows of the table")
        axes.set_ylabel(ylabel)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, loc="best")

    return draw
