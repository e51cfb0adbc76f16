"""Calls of the ops on pages of mapped files, see `tests.fuzz.calls`."""

import random
from collections.abc import Callable
from typing import Any

import torch

from emblib.reference import pages
from tests.fuzz.call import Arguments, Call, same
from tests.ops import test_pages


def _page_crc32(draw: random.Random) -> Call:
    length, page_bytes = draw.choice([1, 100, 9000]), draw.choice([1, 64, 4096])
    data = test_pages.draw_bytes(length, draw.randrange(100))
    numbers = torch.tensor([draw.randrange(-(-length // page_bytes)) for _ in range(20)])
    want = pages.page_crc32(data, numbers, page_bytes)
    return Call("page_crc32", (data, numbers, page_bytes), lambda _, got: same(got, want))


def _pages_without_mark(draw: random.Random) -> Call:
    shape = draw.choice(test_pages.SHAPES)
    marks, rows = test_pages.draw_marks(shape, draw.randrange(100))
    want = pages.pages_without_mark(marks, rows, *shape).unique()

    def check(_: Arguments, got: Any) -> None:
        same(got.unique(), want)

    return Call("pages_without_mark", (marks, rows, *shape), check)


def _mark_pages(draw: random.Random) -> Call:
    shape = draw.choice(test_pages.SHAPES)
    marks, rows = test_pages.draw_marks(shape, draw.randrange(100))
    want = marks.clone()
    pages.mark_pages_([want], rows, *shape)

    def check(arguments: Arguments, _: Any) -> None:
        same(arguments[0][0], want)
        same(arguments[0][1], want)

    return Call("mark_pages_", ([marks, marks.clone()], rows, *shape), check)


def _file_slots(draw: random.Random) -> Call:
    slots = torch.tensor([draw.randrange(-1, 30) for _ in range(draw.choice([0, 1, 50]))]).long()
    entries = torch.tensor([draw.randrange(-1, 9) for _ in range(30)])
    hidden = draw.choice([None, torch.tensor([0, 1, 0, 0, 1, 1, 0, 1, 0]).to(torch.uint8)])
    want = pages.file_slots(slots, entries, hidden)
    return Call("file_slots", (slots, entries, hidden), lambda _, got: same(got, want))


def _fetch_pages(draw: random.Random) -> Call:
    row_bytes = draw.choice([0, 1, 100])
    data = test_pages.draw_bytes(100 * max(row_bytes, 1), draw.randrange(100))
    rows = torch.tensor([draw.randrange(-1, 100) for _ in range(draw.choice([0, 1, 50]))]).long()

    def check(_: Arguments, got: Any) -> None:
        assert got[0].numel() == 0

    return Call("fetch_pages", (data, rows, row_bytes, 0), check)


PAGE_CALLS: dict[str, Callable[[random.Random], Call]] = {
    "page_crc32": _page_crc32,
    "pages_without_mark": _pages_without_mark,
    "mark_pages_": _mark_pages,
    "file_slots": _file_slots,
    "fetch_pages": _fetch_pages,
}
