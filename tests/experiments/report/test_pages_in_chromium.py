"""The page in a real browser: it opens from a file, asks for nothing, sorts and filters, fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.config.sweep import Arm, Cell
from experiments.report import style, write_report
from tests.experiments.chromium import Browser, browser, executable
from tests.experiments.made_up import Recipe, make_run

pytestmark = pytest.mark.skipif(
    executable() is None, reason="no Chromium or Chrome on the PATH: the page is not opened"
)
WORDS = ("+experiment=tt_vs_tbe", "sweep.L=[]", "sweep.s=[]", "sweep.D=[16]", "sweep.B=[256]")


def _fate(arm: Arm, cell: Cell, process: int) -> tuple[str, str]:
    if arm.contender == "torch" and cell.workload.B == 256:
        return "oom", "needed 191 GiB, 139 free: " + "a reason that goes on for a while " * 5
    return "ok", ""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with everything on it: modes, processes, failures, an early end."""
    path = tmp_path_factory.mktemp("page")
    recipe = Recipe(
        words=WORDS, modes=("hot", "cold"), fate=_fate, short=(1,), error=0.2, status="interrupted"
    )
    with pytest.MonkeyPatch.context() as patch:
        # Without the files of the figures, which the page does not show.
        patch.setattr(style, "draw_files", lambda f, *_: [style.inline_svg(p) for p in f.panels])
        write_report(make_run(path, recipe))
    return path / "index.html"


@pytest.fixture(scope="module")
def tab(page: Path) -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def test_it_opens_from_a_file_and_asks_for_nothing(tab: Browser, page: Path) -> None:
    tab.resize(1280, 900)
    tab.open(page)
    assert tab.complaints() == []
    assert tab.requested() == [page.resolve().as_uri()]
    assert "of the memory of TBE" in tab.run("document.querySelector('h1').textContent")
    assert tab.run("document.querySelectorAll('figure svg').length") > 20


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_no_width_needs_sideways_scrolling(tab: Browser, page: Path, width: int) -> None:
    tab.resize(width, 844)
    tab.open(page)
    tab.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert tab.run("document.documentElement.scrollWidth") == width
    outside = tab.run(
        "[...document.querySelectorAll('main > *')]"
        ".filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML)"
    )
    assert outside == []


COLUMN = "[...document.querySelectorAll('table.sortable')[{table}].tBodies[0].rows]"


def test_a_click_sorts_by_number_and_another_reverses(tab: Browser, page: Path) -> None:
    tab.resize(1280, 900)
    tab.open(page)
    rows = COLUMN.format(table=0)
    keys = f"{rows}.map((r) => Number(r.cells[2].dataset.key ?? NaN)).filter((x) => x === x)"
    click = (
        "document.querySelector('table.sortable').tHead.rows[0].cells[2]"
        ".querySelector('button').click()"
    )
    tab.run(click)
    up = tab.run(keys)
    assert up == sorted(up)
    assert len(set(up)) > 2
    tab.run(click)
    assert tab.run(keys) == up[::-1]
    sort = "document.querySelector('table.sortable').tHead.rows[0].cells[2].ariaSort"
    assert tab.run(sort) == "descending"
    assert tab.complaints() == []


def test_a_filter_keeps_the_rows_that_have_every_word(tab: Browser, page: Path) -> None:
    tab.open(page)
    typed = (
        "(() => { const f = document.querySelector('input.filter'); f.value = '%s';"
        "f.dispatchEvent(new Event('input'));"
        "return [...f.parentElement.querySelectorAll('tbody tr')].filter((r) => !r.hidden)"
        ".map((r) => r.textContent); })()"
    )
    every = tab.run(typed % "")
    some = tab.run(typed % "d=16 tt")
    assert 0 < len(some) < len(every)
    assert all("D=16" in row and "TT rank" in row for row in some)
    assert tab.run(typed % "no such row") == []
    assert tab.run(typed % "") == every


def test_a_dark_page_is_dark_and_so_are_its_figures(tab: Browser, page: Path) -> None:
    tab.resize(1280, 900)
    brightness = (
        "((c) => c.reduce((a, b) => a + b) / 3)"
        "(getComputedStyle({what}).{name}.match(/\\d+/g).slice(0, 3).map(Number))"
    )
    paper = brightness.format(what="document.body", name="backgroundColor")
    words = brightness.format(what="document.querySelector('figure svg text')", name="fill")
    tab.prefer("dark")
    tab.open(page)
    assert tab.run(paper) < 60
    assert tab.run(words) > 180
    tab.prefer("light")
    tab.open(page)
    assert tab.run(paper) > 240
    assert tab.run(words) < 60


def test_a_link_to_a_folded_part_opens_it(tab: Browser, page: Path) -> None:
    tab.open(page)
    folded = "document.querySelector('details')"
    assert tab.run(f"{folded}.open") is False
    tab.run(f"{folded}.querySelector('h3').id = 'inside'; location.hash = '#inside'")
    assert tab.run(f"new Promise((r) => setTimeout(() => r({folded}.open), 50))") is True


def test_a_picture_of_the_page_has_something_on_it(
    tab: Browser, page: Path, tmp_path: Path
) -> None:
    tab.open(page)
    tab.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000
