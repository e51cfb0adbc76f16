"""What the report of looked-at lookups says: its answer, its table, how to read it."""

from __future__ import annotations

import math
from typing import Any

from omegaconf import OmegaConf

from experiments.config.schema import Law
from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.data import Run
from experiments.report.tables import Table, Value
from experiments.results.store import Record
from experiments.traces import frames
from experiments.work import production
from experiments.work.laws import law_words

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
        for record in frames.looked_at(run.records):
            if record["section"] == section:
                return record
    return None


def _names_a_file(run: Run) -> bool:
    return str(OmegaConf.select(run.config, "workload.law", default="")) == Law.trace.value


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
        f"Of the {name(record)} ({text.several(record['features'], 'table')}, {total:,} lookups "
        f"into {found['distinct']:,} distinct rows), {percent(sum(samples['rows']) / total)} are "
        f"distinct rows of their batch; {percent(half)} of the rows have half of the lookups, and "
        f"a cache of {100 * size:g} % of the rows could at best serve {percent(best)} of them "
        f"(keeping the most recently used rows: {percent(recent)})."
    )


def name(record: Record) -> str:
    """The lookups, as people call them."""
    p = record["params"]
    if p["law"] == Law.zipf.value:
        offset = f", q={p['q']:g}" if p["q"] else ""
        return f"zipf lookups (s={p['s']:g}{offset})"
    if p["law"] == Law.trace.value:
        return f"lookups of the trace {p['file']}"
    return law_words(p).replace(" ids", " lookups")


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
    others = [r for r in frames.looked_at(run.records) if r["cell"] != record["cell"]]
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
    for record in frames.looked_at(run.records):
        if record["section"] == section:
            several = sum(r["section"] == section for r in frames.looked_at(run.records)) > 1
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
