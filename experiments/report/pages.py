"""report.md and the self-contained index.html: the answer first, then evidence, then provenance."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from experiments.config.sweep import SWEEP
from experiments.report import notes, outcomes, shell, tables, text
from experiments.report.data import Run
from experiments.report.figures import subtitle
from experiments.report.style import Figure

Drawn = Sequence[tuple[Figure, Sequence[str]]]  # figures with their panels as inline SVG


SMOKE = "Smoke run: its tables, batches and rounds are too small for its numbers to mean anything."


def sentences(run: Run) -> list[str]:
    """Return the answer of a run's report; of a smoke run, first that it is none."""
    found = run.kind.answer(run)
    return [SMOKE, *found] if run.smoke else found


def section_heading(run: Run, section: str) -> tuple[str, str]:
    """Title and one line on the workload."""
    swept = section == SWEEP and not run.kind.swept_first
    title = "The sweep" if swept else run.title(section)
    record = next(r for r in run.records if r["section"] == section)
    line = run.sizes(section)
    known = next((r for r in run.records if r["section"] == section and r["unique_rows"]), None)
    if known is not None:
        unique = text.digits(100 * known["unique_rows"] / known["lookups"])
        line += f"; {unique} % of a batch's lookups are distinct rows"
    case = run.config.cases.get(section)
    note = f" {case.note}" if case is not None and case.note else ""
    if case is not None and case.tt.row_factors and record["rows_scale"] < 1:
        note += " Scaled tables do not fit these row factors: emblib chose others."
    return title[:1].upper() + title[1:], f"{line}.{note}"


def published_lines(run: Run, section: str) -> list[str]:
    """Published numbers with their source, apart from ours."""
    case = run.config.cases.get(section)
    return [
        f"Published, not measured here: {p.label} {p.value:g} {p.unit} ({p.source}). Another "
        "machine: compare the order of magnitude, not the ratio."
        for p in (case.published if case is not None else [])
    ]


def markdown(run: Run, figures: Sequence[Sequence[Figure]]) -> str:
    """The report for a terminal, an issue or a repository page; `figures` are those by mode."""
    said = sentences(run)
    lines = [f"# {run.config.name}", "", f"**{said[0]}** {' '.join(said[1:])}", ""]
    lines += [f"*Question: {run.info.get('question', '')}*", ""]
    lines += [f"> **{n}**\n" for n in notes.notices(run)]
    for title, words, table in run.kind.tables(run):
        lines += [f"## {title}", "", words, "", table.markdown(), ""]
    for mode, drawn in zip(run.modes, figures, strict=True):
        part = run.at(mode)
        if mode != run.modes[0]:
            lines += [f"# Mode: {mode}", "", notes.MODES.get(mode, ""), ""]
        lines += [x for f in drawn[:1] for x in _markdown_figure(f)]
        lines += [x for s in part.sections() for x in _markdown_section(part, s)]
        lines += [x for f in drawn[1:] for x in _markdown_figure(f)]
    lines += ["## Failures", "", outcomes.sentence(run)]
    failed = outcomes.table(run)
    lines += ["", failed.markdown()] if failed.rows else []
    lines += ["", "## How to read this", ""]
    lines += [f"- {t}" for t in (*notes.how_to_read(run), *run.kind.how_to_read())]
    lines += ["", "## Reproduce", "", text.Code(run.environment.get("command", "")), ""]
    lines += [subtitle(run), "", tables.environment_table(run).markdown(), ""]
    flags = tables.flags_table(run)
    lines += [flags.markdown(), ""] if flags.rows else []
    return text.markdown_document(lines)


def _markdown_figure(figure: Figure) -> list[str]:
    words = f"**{figure.title}.** {figure.caption}"
    return [f"![{figure.title}]({figure.name}.png)", "", words, ""]


def _markdown_section(run: Run, section: str) -> list[str]:
    table = run.kind.section_table(run, section)
    if table is None:
        return []
    title, line = section_heading(run, section)
    published = [f"- {t}" for t in published_lines(run, section)]
    return [f"## {title}", "", line, "", table.markdown(), "", *published, ""]


def page(run: Run, drawn: Sequence[Drawn]) -> str:
    """index.html; `drawn` are the figures of each mode."""
    said = sentences(run)
    parts = [shell.paragraph(str(run.config.name), "eyebrow")]
    parts += [f"<h1>{html.escape(said[0])}</h1>"]
    tiles = run.kind.tiles(run)
    parts += [shell.tiles(tiles)] if tiles else []
    parts += [shell.paragraph(" ".join(said[1:]))] if said[1:] else []
    parts += [shell.paragraph(f"Question: {run.info.get('question', '')}", "question")]
    parts += [shell.paragraph(n, "notice") for n in notes.notices(run)]
    parts += [shell.paragraph(subtitle(run), "meta"), shell.CONTENTS]
    for title, words, table in run.kind.tables(run):
        name = re.sub(r"\W+", "-", title.lower()).strip("-")
        parts += [shell.heading(title, name), shell.paragraph(words, "line"), table.html()]
    for mode, figures in zip(run.modes, drawn, strict=True):
        parts += _mode(run, mode, figures)
    parts += [shell.heading("Failures", "failures"), shell.paragraph(outcomes.sentence(run))]
    failed = outcomes.table(run)
    parts += [failed.html()] if failed.rows else []
    parts += [shell.heading("How to read this", "how-to-read"), "<ul>"]
    parts += [
        f"<li>{html.escape(t)}</li>" for t in (*notes.how_to_read(run), *run.kind.how_to_read())
    ]
    parts += ["</ul>", _provenance(run)]
    return shell.document(f"{run.config.name} · emblib", parts)


def _mode(run: Run, mode: str, figures: Drawn) -> list[str]:
    """Main figure, tables, the other figures of one mode; further modes start folded."""
    part, first = run.at(mode), mode == run.modes[0]
    suffix = "" if first else f"-{mode}"
    parts = [shell.heading("Results", "results")] if first else []
    blocks = [shell.figure(f, d) for f, d in figures]
    parts += blocks[:1]
    parts += [_section(part, s) for s in part.sections()]
    if len(blocks) > 1:
        parts += [shell.heading("Figures", f"figures{suffix}")] if first else []
        parts += blocks[1:]
    if first:
        return parts
    label = f"Mode: {mode}"
    about = shell.paragraph(notes.MODES.get(mode, ""), "meta")
    return [
        shell.heading(label, f"mode-{mode}"), about,
        f"<details><summary>Tables and figures, {html.escape(mode)}</summary>", *parts,
        "</details>",
    ]  # fmt: skip


def _section(run: Run, section: str) -> str:
    table = run.kind.section_table(run, section)
    if table is None:
        return ""
    title, line = section_heading(run, section)
    published = "".join(shell.paragraph(t, "published") for t in published_lines(run, section))
    return f"<h3>{html.escape(title)}</h3>{shell.paragraph(line, 'line')}{table.html()}{published}"


def _provenance(run: Run) -> str:
    command = html.escape(str(run.environment.get("command", "")))
    config = html.escape((run.path / "config.yaml").read_text())
    machine = tables.environment_table(run).html().replace("sortable", "plain")
    machine = machine.replace("<input type=search", "<input hidden type=search")
    flags = tables.flags_table(run)
    machine = (flags.html() if flags.rows else "") + machine
    return (
        f"{shell.heading('Reproduce', 'reproduce')}"
        f"<div class=command><pre>{command}</pre><button type=button class=copy>copy</button></div>"
        f"<details><summary>Machine and software</summary>{machine}</details>"
        f"<details><summary>Configuration that ran</summary><pre>{config}</pre></details>"
        "<p class=meta>Beside this page: points.jsonl (raw samples), results.csv, report.md, "
        "figures as PNG and SVG. <code>python -m experiments.report RUN</code> rebuilds all but "
        "the samples.</p>"
    )
