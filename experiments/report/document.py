"""The model of every page: one Markdown and one HTML template render it.

A `Page` is an answer, notices and sections; a `Section` is a heading with text, figures, a table,
bullet points and code, each optional. `write` draws the figures and writes report.md and a
self-contained index.html; the templates are in `templates/`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from experiments.report import style, text
from experiments.report.style import Figure
from experiments.report.tables import Table
from experiments.results.store import RunStore

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Tile:
    """A number to remember, at the top of a page."""

    value: str
    meaning: str
    style: str = ""  # good, bad or open


@dataclass(frozen=True)
class Notice:
    """What a reader must know before believing a number."""

    text: str
    style: str = "notice"  # or confounder, remark


@dataclass(frozen=True)
class Section:
    """A part of a page, shown in the order of its fields; texts are Markdown without HTML."""

    title: str = ""
    words: Sequence[str] = ()  # paragraphs
    figures: Sequence[Figure] = ()
    table: Table | None = None
    points: Sequence[str] = ()  # bullet points
    code: str = ""  # lines of a code block
    parts: Sequence[Section] = ()  # with headings one level below
    folded: str = ""  # on the web page, what follows `words` is folded under these words
    web_only: bool = False  # whether report.md leaves it out

    @property
    def anchor(self) -> str:
        """Return the name of the heading in links."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to show below the heading."""
        rows = self.table is not None and bool(self.table.rows)
        content = (*self.words, *self.figures, *self.points, self.code)
        return not rows and not any(content) and all(part.is_empty for part in self.parts)


@dataclass(frozen=True)
class Page:
    """A report before it is rendered."""

    name: str
    answer: Sequence[str]  # sentences, the headline first
    sections: Sequence[Section]
    subtitle: str = ""  # machine and software, in one line
    question: str = ""
    tiles: Sequence[Tile] = ()
    notices: Sequence[Notice] = ()
    closing: str = ""  # which files are in the page's folder; on the web page only

    @property
    def shown(self) -> list[Section]:
        """Return the sections that have something to show."""
        return [section for section in self.sections if not section.is_empty]

    @property
    def figures(self) -> list[Figure]:
        """Return the figures of all sections."""
        return [figure for _, section in flatten(self.sections) for figure in section.figures]

    def markdown(self, *, figures: bool = True) -> str:
        """Return the page for a terminal, an issue or a repository."""
        flat = [(n, s) for n, s in flatten(self.shown) if not s.web_only]
        template = _MARKDOWN.get_template("page.md")
        rendered = template.render(page=self, sections=flat, with_figures=figures)
        return re.sub(r"\n{3,}", "\n\n", rendered).rstrip() + "\n"

    def html(self, drawings: Mapping[str, Sequence[str]]) -> str:
        """Return the page as one file that loads nothing; `drawings`: inline SVG of each panel."""
        return _HTML.get_template("page.html").render(page=self, drawings=drawings)


def flatten(sections: Sequence[Section], level: int = 2) -> Iterator[tuple[int, Section]]:
    """Yield every section and its parts in the order of the page, with the heading's level."""
    for section in sections:
        yield level, section
        yield from flatten(section.parts, level + 1)


def write(folder: Path, page: Page) -> Path:
    """Draw the figures, write report.md and index.html; return the path of the latter."""
    store = RunStore(folder)
    with style.theme():
        drawings = {
            figure.name: [
                Markup(svg) for svg in style.draw(figure, figure.subtitle or page.subtitle, folder)
            ]
            for figure in page.figures
        }
    store.write("report.md", page.markdown())
    return store.write("index.html", page.html(drawings))


def _inert(value: Any) -> str:
    """Return a value as it may stand in Markdown; code that the page marks stays as it is."""
    return value if isinstance(value, Markup) else text.inert(str(value))


def _code(lines: str) -> Markup:
    """Return a Markdown code block. It must follow a heading.

    Markdown reads an indented line as code or as a part of a list, depending on the lines before
    it, which labels of other people may have changed. So only code that the page itself marks stays
    unescaped.
    """
    return Markup(textwrap.indent(lines, "    "))


def template_environment(folder: Path, **options: Any) -> jinja2.Environment:
    """Return the environment of the templates in a folder; an unknown name is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


# Labels, error messages and commands come from configurations and other people's runs: every
# expression of a template is escaped.
_HTML = template_environment(TEMPLATES, autoescape=True)
_MARKDOWN = template_environment(TEMPLATES, finalize=_inert, keep_trailing_newline=True)
_MARKDOWN.filters["code"] = _code
