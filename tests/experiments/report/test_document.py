"""The model of a page, rendered as Markdown and as HTML."""

from __future__ import annotations

import re

import pandas as pd

from experiments.report.document import Notice, Page, Section, Tile
from experiments.report.style import Figure, Panel
from experiments.report.tables import Table, Value

DRAWN = Figure("f", "A figure", "What it shows.", "", [Panel("p", lambda axes: None, width=8.0)])
PAGE = Page(
    name="a & b",
    answer=["The headline.", "The rest."],
    sections=[
        Section("First", ["Words."], figures=[DRAWN], parts=[Section("Inside", points=["one"])]),
        Section("Second", table=Table(["x", "y"], [[Value("a|b"), Value("<1>", 1.0)]])),
        Section("Empty", figures=[], table=Table(["x"], [])),
        Section("Folded", ["Before."], fold_label="Open me", code="x < y"),
        Section("Configuration", code="key: value", web_only=True),
    ],
    question="Is it so?",
    tiles=[Tile("2×", "as fast", "good")],
    notices=[Notice("Careful."), Notice("By the way.", "remark")],
    closing="Files.",
)


def test_the_web_page_links_its_sections_and_escapes_words() -> None:
    page = PAGE.html({"f": ["<svg></svg>"]})
    links = re.findall(r'<a href="#([\w-]+)">(\w+)</a>', page)
    assert links == [(t.lower(), t) for t in ("First", "Second", "Folded", "Configuration")]
    assert "<title>a &amp; b · emblib</title>" in page
    assert 'class="panel wide"' in page
    assert "&lt;svg" in page  # only what was marked as drawn is not escaped
    assert 'data-key="1">&lt;1&gt;</td>' in page
    assert "<details><summary>Open me</summary>" in page
    assert page.index("Before.") < page.index("<details>") < page.index("<pre>x &lt; y</pre>")
    assert "Empty" not in page


def test_markdown_has_the_same_parts_in_the_same_order() -> None:
    lines = PAGE.markdown().splitlines()
    assert lines[:5] == ["# a & b", "", "**The headline.** The rest.", "", "*Question: Is it so?*"]
    assert [x for x in lines if x.startswith(("#", "!", "- ", ">"))] == [
        "# a & b",
        "> **Careful.**",
        "> By the way.",
        "## First",
        "![A figure](f.png)",
        "### Inside",
        "- one",
        "## Second",
        "## Folded",
    ]
    assert "| a\\|b | &lt;1> |" in lines
    assert "    x < y" in lines
    assert "\n\n\n" not in PAGE.markdown()
    assert "![" not in PAGE.markdown(figures=False)


def test_markdown_leaves_out_empty_parts_and_those_of_web_only_sections() -> None:
    sections = [
        Section("First", ["Words."], parts=[Section("Nothing", [""])]),
        Section("Web", parts=[Section("Inside", points=["one"])], web_only=True),
    ]
    page = Page("a", ["The headline."], sections)
    assert re.findall(r"^##.*", page.markdown(), re.MULTILINE) == ["## First"]
    assert "Inside" in page.html({})


def test_a_column_is_a_function_of_the_row() -> None:
    rows = [{"name": "a", "n": 3.0, "status": "ok"}, {"name": "b", "status": "oom"}]
    columns = {"name": lambda r: r["name"], "n": lambda r: Value.of(r["n"], str), "m": lambda r: ""}
    table = Table.of(rows, columns, num_label_columns=1)
    from_frame = Table.of(pd.DataFrame(rows), {**columns, "name": "name"}, num_label_columns=1)
    assert repr(from_frame) == repr(table)  # keys of words are nan, which equals nothing
    assert [[v.text for v in row] for row in table.rows] == [["a", "3.0", ""], ["b", "oom", "–"]]
    assert [table.is_text(column) for column in range(3)] == [True, False, True]
