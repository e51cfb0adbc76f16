"""Does a packed report say what its samples say? Words and tables are compared, figures are not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path

# Of report.md: the picture and the caption below it.
FIGURE = re.compile(r"^!\[[^\n]*\]\([^\n]*\.png\)\n\n\*\*[^\n]*\n\n", re.MULTILINE)
SILENT = ("figure", "svg", "style", "script")
HEADING = "Figures"  # is there only where there are figures
SHOWN = 60  # characters of a difference


class _Words(HTMLParser):
    """The text of a page, piece by piece, without its figures."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in SILENT:
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside and data.strip() and data.strip() != HEADING:
            self.pieces.append(data.strip())


def problems(packed: Path, rebuilt: Path) -> list[str]:
    """What the report of a run says and the one made of its samples does not; both without figures.

    `rebuilt` has another config.yaml, which its page quotes: that it draws no figures.
    """
    found = []
    for name in ("report.md", "index.html"):
        if not (packed / name).is_file():
            found.append(f"{name} is missing, but the samples give it")
            continue
        old, new = _pieces(packed / name), _pieces(rebuilt / name)
        config = _config(rebuilt)
        new = [_config(packed) if piece == config else piece for piece in new]
        if difference := _first(old, new):
            found.append(f"{name} does not say what the samples say: {difference}")
    return found


def _config(folder: Path) -> str:
    return (folder / "config.yaml").read_text().strip()


def _pieces(path: Path) -> list[str]:
    if path.suffix == ".md":
        lines = FIGURE.sub("", path.read_text()).splitlines()
        return [line for line in lines if line.strip()]
    reader = _Words()
    reader.feed(path.read_text())
    return reader.pieces


def _first(old: Sequence[str], new: Sequence[str]) -> str:
    for packed, rebuilt in zip_longest(old, new, fillvalue=""):
        if packed != rebuilt:
            start = next(
                (
                    i
                    for i, pair in enumerate(zip(packed, rebuilt, strict=False))
                    if len({*pair}) > 1
                ),
                min(len(packed), len(rebuilt)),
            )
            begin = max(0, start - SHOWN // 3)
            here, there = (repr(t[begin : begin + SHOWN]) for t in (packed, rebuilt))
            return f"{here}, but they give {there}"
    return ""
