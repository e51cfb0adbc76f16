"""What the pages of all three kinds share: figures, sentences, provenance, how to read them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.paths import ROOT
from experiments.report import shell, text
from experiments.report.style import Figure
from experiments.report.tables import Table, Value
from experiments.results.store import RunStore, read_json

HOW = (
    "Two processes, one with each revision, take turns: base head head base, or the other way "
    "round, by coin. Each sample follows an execution that is not timed, because the other process "
    "has just had the caches. Of the two samples of a block the faster counts; a pair of processes "
    "says the median over its blocks of the logarithm of head ÷ base.",
    "Both processes of a pair stay on one core, chosen at random, where they have one thread each; "
    "which of the two starts first is random as well, and so is the order of the points.",
    "Interval: 95 % Student-t over pairs of processes. SLOWER or FASTER: it leaves out 1 and the "
    "effect is beyond the margin. SAME: all of it is within the margin. UNSURE: neither, even "
    "after the most pairs that are allowed.",
    "What looks slower or faster is measured again by as many new pairs, and counts only if they "
    "say the same, at 5 % over all such points together (Holm). The effect shown is then that of "
    "the second set: the first was chosen for its effect.",
    "'visible from' is the smallest effect that would have been called: the margin and half the "
    "interval.",
)


@dataclass
class Section:
    """A heading, words, a table, figures; each may be missing."""

    title: str
    words: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[Figure] = ()


@dataclass
class Page:
    """A report before it is rendered, once as HTML and once as Markdown."""

    name: str
    answer: str
    more: Sequence[str] = ()
    tiles: Sequence[tuple[str, str, str]] = ()
    notices: Sequence[str] = ()
    sections: Sequence[Section] = field(default_factory=list)
    how: Sequence[str] = HOW


def write(path: Path, page: Page) -> str:
    """index.html, report.md and the figures; returns the page's place as a user would type it."""
    store, environment = RunStore(path), read_json(path, "environment.json")
    drawn = {f.name: _draw(path, f, environment) for s in page.sections for f in s.figures}
    store.write("report.md", markdown(page, environment))
    store.write("index.html", _html(path, page, drawn, environment))
    place = path / "index.html"
    return str(place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place)


def subtitle(environment: dict[str, Any]) -> str:
    """Machine and software, in one line."""
    git = environment.get("git") or {}
    code = f"{git.get('sha', '')}{'-dirty' * bool(git.get('dirty'))}"
    parts = [environment.get("device"), f"torch {environment.get('torch')}", code]
    return " · ".join(str(p) for p in parts if p)


def _draw(path: Path, figure: Figure, environment: dict[str, Any]) -> list[str]:
    from experiments.report import style

    with style.theme():
        return style.draw(figure, subtitle(environment), path)


def markdown(page: Page, environment: dict[str, Any], *, figures: bool = True) -> str:
    """For a terminal, a pull request, a job's summary."""
    lines = [f"# {page.name}", "", f"**{page.answer}** {' '.join(page.more)}", ""]
    lines += [f"> **{n}**\n" for n in page.notices]
    for section in page.sections:
        lines += [f"## {section.title}", ""] + [x for w in section.words for x in (w, "")]
        lines += [section.table.markdown(), ""] if section.table and section.table.rows else []
        for figure in section.figures if figures else ():
            lines += [f"![{figure.title}]({figure.name}.png)", "", figure.caption, ""]
    lines += ["## How to read this", "", *(f"- {t}" for t in page.how), ""]
    lines += ["## Reproduce", "", text.Code(environment.get("command", "")), ""]
    return text.markdown_document([*lines, subtitle(environment), ""])


def _html(path: Path, page: Page, drawn: dict[str, list[str]], environment: dict[str, Any]) -> str:
    parts = [shell.paragraph(page.name, "eyebrow"), f"<h1>{html.escape(page.answer)}</h1>"]
    parts += [shell.tiles(page.tiles)]
    parts += [shell.paragraph(" ".join(page.more))] if page.more else []
    parts += [shell.paragraph(n, "notice") for n in page.notices]
    parts += [shell.paragraph(subtitle(environment), "meta"), shell.CONTENTS]
    for number, section in enumerate(page.sections):
        parts += [shell.heading(section.title, f"part-{number}")]
        parts += [shell.paragraph(w) for w in section.words]
        parts += [section.table.html()] if section.table and section.table.rows else []
        parts += [shell.figure(f, drawn[f.name]) for f in section.figures]
    parts += [shell.heading("How to read this", "how-to-read"), "<ul>"]
    parts += [f"<li>{html.escape(t)}</li>" for t in page.how]
    command = html.escape(str(environment.get("command", "")))
    config = html.escape((path / "config.yaml").read_text())
    parts += [
        "</ul>",
        shell.heading("Reproduce", "reproduce"),
        f"<div class=command><pre>{command}</pre>"
        "<button type=button class=copy>copy</button></div>",
        f"<details><summary>Configuration that ran</summary><pre>{config}</pre></details>",
        shell.paragraph(
            "Beside this page: points.jsonl (raw samples), report.md, figures.", "meta"
        ),
    ]
    return shell.document(f"{page.name} · emblib", parts)


def ratio(value: float, lo: float, hi: float) -> Value:
    """'1.083 [1.061, 1.106]': three decimals, for effects of a few per cent."""
    if text.missing(value):
        return Value(text.NONE)
    return Value(f"{value:.3f} [{lo:.3f}, {hi:.3f}]", value)


def percent(value: float | None) -> Value:
    """'5.2 %'."""
    if value is None or text.missing(value) or abs(value) == float("inf"):
        return Value(text.NONE)
    return Value(f"{100 * value:.3g} %", value)


def folder_name(path: Path) -> str:
    """Short where it is in the repository."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
