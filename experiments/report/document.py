"""The model of every page: one Markdown and one HTML template render it.

A `Page` is an answer, notices and sections; a `Section` is a heading with text, figures, a table,
bullet points and code, each optional. `write` draws the figures and writes report.md and a
self-contained index.html; the templates are in `templates/`.

Texts are sentences. index.html shows them as they are, and report.md passes them on as Markdown. So
Markdown in a text, e.g. a link or a `*`, takes effect in report.md only. HTML and links to scripts
become plain text in both.
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
    meaning: str  # what the value is, in a few words
    style: str = ""  # "good", "bad", "open" (undecided), or "" for none


@dataclass(frozen=True)
class Notice:
    """A warning or remark above the sections, about the trust in numbers."""

    text: str
    style: str = "notice"  # or "confounder", or "remark", which report.md does not print bold


@dataclass(frozen=True)
class Section:
    """A part of a page, shown in the order of its fields; empty sections and parts are not shown.

    A section with `code` needs a title and no `points`, because Markdown reads an indented block
    after a list as a part of the list.
    """

    title: str = ""  # "" for no heading
    paragraphs: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    table: Table | None = None
    points: Sequence[str] = ()  # bullet points
    code: str = ""  # lines of a code block
    parts: Sequence[Section] = ()  # with headings one level below
    fold_label: str = ""  # on the web page, what follows the paragraphs is folded under this label
    web_only: bool = False  # whether report.md leaves out the section and its parts

    @property
    def anchor(self) -> str:
        """Return the name of the heading in links."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to show below the heading."""
        rows = self.table is not None and bool(self.table.rows)
        content = (*self.paragraphs, *self.figures, *self.points, self.code)
        return not rows and not any(content) and all(part.is_empty for part in self.parts)


@dataclass(frozen=True)
class Page:
    """A report before it is rendered."""

    name: str
    answer: Sequence[str]  # sentences, the headline first; at least one
    sections: Sequence[Section]
    subtitle: str = ""  # machine and software, in one line
    question: str = ""
    tiles: Sequence[Tile] = ()
    notices: Sequence[Notice] = ()
    closing: str = ""  # last sentence, about the files in the page's folder; on the web page only

    @property
    def shown_sections(self) -> list[Section]:
        """Return the sections that have something to show."""
        return [section for section in self.sections if not section.is_empty]

    @property
    def figures(self) -> list[Figure]:
        """Return the figures of all sections that are shown; their names are distinct."""
        return [figure for _, section in _flatten(self.sections) for figure in section.figures]

    def markdown(self, *, figures: bool = True) -> str:
        """Return the page as Markdown, for a terminal, an issue or a repository.

        `figures` is True for links to `<name>.png` in the folder of the page; False for none.
        """
        sections = list(_flatten(self.sections, on_web=False))
        template = _MARKDOWN_TEMPLATES.get_template("page.md")
        rendered = template.render(page=self, sections=sections, with_figures=figures)
        return re.sub(r"\n{3,}", "\n\n", rendered).rstrip() + "\n"

    def html(self, drawings: Mapping[str, Sequence[str]]) -> str:
        """Return the page as one HTML file that loads no other file.

        `drawings` has the SVGs of the panels by the figure's name; a `Markup` is not escaped.
        """
        return _HTML_TEMPLATES.get_template("page.html").render(page=self, drawings=drawings)


def _flatten(
    sections: Sequence[Section], level: int = 2, *, on_web: bool = True
) -> Iterator[tuple[int, Section]]:
    """Yield every section and part that is shown, in this order, with the level of its heading."""
    for section in sections:
        if not section.is_empty and (on_web or not section.web_only):
            yield level, section
            yield from _flatten(section.parts, level + 1, on_web=on_web)


def write(folder: Path, page: Page, *, draws_figures: bool = True) -> Path:
    """Write a page's figures, report.md and index.html to a folder; return the path of index.html.

    The folder is created. A figure without a subtitle gets that of the page. Without
    `draws_figures`, only the texts of figures are written.
    """
    store = RunStore(folder)
    drawings = {figure.name: [""] * len(figure.panels) for figure in page.figures}
    if draws_figures:
        with style.theme():
            for figure in page.figures:
                panels = style.draw_files(figure, figure.subtitle or page.subtitle, folder)
                drawings[figure.name] = [Markup(svg) for svg in panels]
    store.write("report.md", page.markdown())
    return store.write("index.html", page.html(drawings))


def _escape_markdown(value: Any) -> str:
    """Return a value as safe Markdown; a `Markup`, which only `_code_block` makes, is unchanged."""
    return value if isinstance(value, Markup) else text.make_inert(str(value))


def _code_block(lines: str) -> Markup:
    """Return a Markdown code block. It must follow a heading.

    Markdown reads an indented line as code or as a part of a list, depending on the lines before
    it, and labels of other people can be among these. So only code below a heading is unescaped.
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
_HTML_TEMPLATES = template_environment(TEMPLATES, autoescape=True)
_MARKDOWN_TEMPLATES = template_environment(
    TEMPLATES, finalize=_escape_markdown, keep_trailing_newline=True
)
_MARKDOWN_TEMPLATES.filters["code"] = _code_block
