"""Numbers as people read them: engineering units, three digits, ratios with intervals."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from typing import Any

NONE = "–"


# A link that is not to a file beside the page or to the web, e.g. javascript:.
_UNSAFE_LINK = re.compile(r"\]\((?!(?:[\w./-]+|https?://[^\s()]*)\))")


class Code(str):
    """Code in a Markdown page, to follow a heading: it is shown as it is.

    Only what the page itself marks is code. Whether a line of a label would be, by its indentation,
    depends on the lists and paragraphs that other labels open.
    """

    __slots__ = ()


def markdown_document(lines: Iterable[str]) -> str:
    """Join the lines of a Markdown page so that no label can put HTML into it.

    Labels, error messages and commands come from configurations and other people's runs. The pages
    use no HTML of their own, so every `<` outside `Code` is written as `&lt;`, however it is
    indented, and links to anything but files and web addresses are broken.
    """
    return "\n".join(
        textwrap.indent(line, "    ") if isinstance(line, Code) else inert(line) for line in lines
    )


def inert(line: str) -> str:
    """Return a line of Markdown without HTML, link definitions and links to scripts."""
    return _UNSAFE_LINK.sub(r"]\\(", line.replace("<", "&lt;").replace("]:", r"]\:"))


def one_line(label: str) -> str:
    """Return a label without line breaks, with which it could open lists or headings."""
    return " ".join(line.strip() for line in label.splitlines())


def missing(value: Any) -> bool:
    """None and NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def digits(value: float, significant: int = 3) -> str:
    """Plain decimal notation with `significant` digits, thousands separated."""
    if missing(value):
        return NONE
    if value == 0:
        return "0"
    decimals = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def seconds(value: float) -> str:
    """'1.23 ms'."""
    return _scaled(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)))


def size(value: float | None) -> str:
    """'2.16 GB', decimal units."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
    return NONE if value is None else _scaled(float(value), units)


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if missing(value):
        return NONE
    for unit, factor in units:
        if abs(value) >= factor:
            return f"{digits(value / factor)} {unit}"
    return f"{digits(value / units[-1][1])} {units[-1][0]}"


def times(value: float) -> str:
    """'2.1×'."""
    return NONE if missing(value) else f"{digits(value)}×"


def interval(lo: float, hi: float) -> str:
    """'[1.9, 2.3]', or that one process gives none."""
    if missing(lo) or missing(hi):
        return "[one process]"
    return f"[{digits(lo)}, {digits(hi)}]"


def fraction(value: float) -> str:
    """1/x for a compression ratio x >= 1."""
    return f"1/{digits(value)}" if value >= 1 else times(1 / value)


def count(number: int, one: str, many: str = "") -> str:
    """'1 cell', '3 cells'; `many` where an s is not enough."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def verdict(value: Any) -> str:
    """'slower', 'faster', 'same' or 'unsure'; nothing where too few processes were asked."""
    if missing(value) or value is None:
        return ""
    word = str(getattr(value, "value", value)).lower()
    return "" if word in ("nan", "none", "<na>") else word


def several(count: float, one: str, many: str = "") -> str:
    """'1 process', '3 processes'."""
    return f"{count:,.0f} {one if count == 1 else many or one + 's'}"
