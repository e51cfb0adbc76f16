"""report.md and the self-contained index.html: the answer first, then evidence, then provenance."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from experiments.config.sweep import SWEEP
from experiments.report import caching, tables, text
from experiments.report.data import Run
from experiments.report.figures import subtitle
from experiments.report.stories import story
from experiments.report.style import Figure

HOW_TO_READ = (
    "Every contender of a cell sees the same batches in the same process. After warming up over "
    "the whole pool of distinct batches, each round runs every contender's phases in a new random "
    "order and then in reverse. CPU threads wait passively (OMP_WAIT_POLICY) unless the "
    "environment says otherwise.",
    "Times are medians over rounds; bars and bands are quartiles. A ratio is taken within each "
    "round, between each side's faster sample, so that what slows the machine for a moment does "
    "not count or slows both sides; shown are the median ratio and its 95 % order-statistic "
    "interval. The interval covers the noise of this run "
    "only: another process, another day or another machine can differ by more.",
    "emblib asks the system for huge pages for its tables; other contenders have what their "
    "allocator gives them. That is part of what is compared.",
    "'forward' is a lookup without gradients. 'step' is forward, backward and the optimizer's "
    "update. Nothing is dropped: raw samples are in points.jsonl.",
    "Before it is timed, each contender's first output and first update are checked against "
    "plain PyTorch; one that differs is listed as wrong instead.",
    "'parameters' counts weights; 'compression' divides the same tables as plain float32 by "
    "them; 'scratch' is the high-water mark of one step above what was allocated before it.",
    "Row ids are synthetic: uniform, or P(rank) ~ (rank + q)^-s sampled exactly, with ids "
    "shuffled by a seeded bijection unless the workload says 'ranked'.",
)


NOISY = 0.3  # typical distance of the quartiles, relative to the median, that deserves a warning


def notices(run: Run) -> list[str]:
    """What a reader must know before believing a number."""
    found = []
    if run.smoke:
        found.append(
            "Smoke run: tables, batches and rounds are capped to see whether everything works. "
            "The times below mean nothing."
        )
    elif (run.table["rows_scale"] < 1).any() if len(run.table) else False:
        for section in run.sections():
            scale = float(run.of(section)["rows_scale"].min())
            if scale < 1:
                found.append(
                    f"Memory: the tables of {run.title(section)} were scaled to "
                    f"{text.digits(100 * scale)} % of their rows to fit "
                    f"{100 * float(run.config.device.memory_share):.0f} % of the free memory."
                )
    spread = run.spread()
    if spread > NOISY and not run.smoke:
        found.append(
            f"Noisy run: half of the medians have quartiles more than {100 * spread:.0f} % apart. "
            "Something else used the machine; believe the intervals, not the third digit."
        )
    if run.info.get("status") == "interrupted":
        done = len({r["cell"] for r in run.records})
        found.append(f"Interrupted after {done} of {run.info.get('cells')} cells.")
    return found


def _table(run: Run, section: str) -> tables.Table:
    traced = len(run.traces) and (run.traces["section"] == section).any()
    return (caching if traced else tables).section_table(run, section)


def section_heading(run: Run, section: str) -> tuple[str, str]:
    """Title and one line on the workload."""
    title = "The sweep" if section == SWEEP else run.title(section)
    record = next(r for r in run.records if r["section"] == section)
    unique = text.digits(100 * record["unique_rows"] / record["lookups"])
    line = f"{run.sizes(section)}; {unique} % of a batch's lookups are distinct rows."
    case = run.config.cases.get(section)
    note = f" {case.note}" if case is not None and case.note else ""
    if case is not None and case.tt.row_factors and record["rows_scale"] < 1:
        note += " Scaled tables do not fit these row factors: emblib chose others."
    return title[:1].upper() + title[1:], line + note


def published_lines(run: Run, section: str) -> list[str]:
    """Published numbers with their source, apart from ours."""
    case = run.config.cases.get(section)
    return [
        f"Published, not measured here: {p.label} {p.value:g} {p.unit} ({p.source}). Another "
        "machine: compare the order of magnitude, not the ratio."
        for p in (case.published if case is not None else [])
    ]


def markdown(run: Run, figures: Sequence[Figure]) -> str:
    """The report for a terminal, an issue or a repository page."""
    sentences = story(run).answer(run)
    lines = [f"# {run.config.name}", "", f"**{sentences[0]}** {' '.join(sentences[1:])}", ""]
    lines += [f"*Question: {run.info.get('question', '')}*", ""]
    lines += [f"> **{n}**\n" for n in notices(run)]
    for number, figure in enumerate(figures):
        lines += [
            f"![{figure.title}]({figure.name}.png)",
            "",
            f"**{figure.title}.** {figure.caption}",
            "",
        ]
        if number == 0:
            lines += [x for s in run.sections() for x in _markdown_section(run, s)]
    if not figures:
        lines += [x for s in run.sections() for x in _markdown_section(run, s)]
    lines += ["## Failures", "", _failures_text(run)]
    if run.failures():
        lines += ["", tables.failures_table(run).markdown()]
    lines += ["", "## How to read this", "", *[f"- {t}" for t in (*HOW_TO_READ, *story(run).notes)]]
    lines += ["", "## Reproduce", "", f"    {run.environment.get('command', '')}", ""]
    lines += [subtitle(run), "", tables.environment_table(run).markdown(), ""]
    return "\n".join(lines)


def _markdown_section(run: Run, section: str) -> list[str]:
    title, line = section_heading(run, section)
    published = [f"- {t}" for t in published_lines(run, section)]
    table = _table(run, section).markdown()
    return [f"## {title}", "", line, "", table, "", *published, ""]


def _failures_text(run: Run) -> str:
    total = len(run.records)
    failed = len(run.failures())
    if failed:
        return f"{failed} of {total} measurements have no result:"
    if len(run.traces):
        return f"None: all {total} measurements ran, and what was timed agreed with the reference."
    return f"None: all {total} measurements ran and agreed with the reference."


def page(run: Run, figures: Sequence[Figure], drawings: Sequence[Sequence[str]]) -> str:
    """index.html; `drawings` holds each figure's panels as inline SVG."""
    assets = Path(__file__).parent
    parts = [f"<p class=eyebrow>{html.escape(str(run.config.name))}</p>"]
    sentences = story(run).answer(run)
    parts += [f"<h1>{html.escape(sentences[0])}</h1>"]
    parts += [f"<p>{html.escape(' '.join(sentences[1:]))}</p>"] if sentences[1:] else []
    question = html.escape(str(run.info.get("question", "")))
    parts += [f"<p class=question>Question: {question}</p>"]
    parts += [f"<p class=notice>{html.escape(n)}</p>" for n in notices(run)]
    parts += [f"<p class=meta>{html.escape(subtitle(run))}</p>"]
    blocks = [_figure(f, d) for f, d in zip(figures, drawings, strict=True)]
    parts += blocks[:1]
    parts += [_section(run, s) for s in run.sections()]
    parts += blocks[1:]
    parts += [f"<h2>Failures</h2><p>{_failures_text(run)}</p>"]
    if run.failures():
        parts.append(tables.failures_table(run).html())
    parts += ["<h2>How to read this</h2><ul>"]
    parts += [f"<li>{html.escape(t)}</li>" for t in (*HOW_TO_READ, *story(run).notes)]
    parts += ["</ul>", _provenance(run)]
    title = html.escape(f"{run.config.name} · emblib")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>\n{(assets / 'page.css').read_text()}</style></head>\n"
        f"<body><main>\n{chr(10).join(parts)}\n</main>\n"
        f"<script>\n{(assets / 'page.js').read_text()}</script></body></html>\n"
    )


def _figure(figure: Figure, drawings: Sequence[str]) -> str:
    panels = "\n".join(f"<div class=panel>{d}</div>" for d in drawings)
    return (
        f"<figure><h2>{html.escape(figure.title)}</h2><div class=panels>{panels}</div>"
        f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>"
    )


def _section(run: Run, section: str) -> str:
    title, line = section_heading(run, section)
    published = "".join(
        f"<p class=published>{html.escape(t)}</p>" for t in published_lines(run, section)
    )
    return (
        f"<h2>{html.escape(title)}</h2><p>{html.escape(line)}</p>"
        f"{_table(run, section).html()}{published}"
    )


def _provenance(run: Run) -> str:
    command = html.escape(str(run.environment.get("command", "")))
    config = html.escape((run.path / "config.yaml").read_text())
    machine = tables.environment_table(run).html().replace("sortable", "plain")
    return (
        f"<h2>Reproduce</h2><pre>{command}</pre>"
        f"<details><summary>Machine and software</summary>{machine}</details>"
        f"<details><summary>Configuration that ran</summary><pre>{config}</pre></details>"
        "<p class=meta>Beside this page: points.jsonl (raw samples), results.csv, report.md, "
        "figures as PNG and SVG.</p>"
    )
