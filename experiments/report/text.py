"""Formatting: numbers in engineering units, ratios with intervals, text made safe for Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

NONE = "–"  # what is shown for an unknown value

# A link that leads neither to a file next to the page nor to the web, e.g. javascript:.
_UNSAFE_LINK = re.compile(r"\]\((?!(?:[\w./-]+|https?://[^\s()]*)\))")


def markdown_document(lines: Iterable[str]) -> str:
    """Join the lines of a Markdown page so that no label can put HTML into it.

    Labels, error messages and commands come from configurations and other people's runs. The pages
    themselves use no HTML. So every `<` is written as `&lt;`, and links to anything but files and
    web addresses are made plain text.
    """
    return "\n".join(map(inert, lines))


def inert(line: str) -> str:
    """Return a line of Markdown without HTML, link definitions and links to scripts."""
    return _UNSAFE_LINK.sub(r"]\\(", line.replace("<", "&lt;").replace("]:", r"]\:"))


def one_line(label: str) -> str:
    """Return a label without line breaks, with which it could open lists or headings."""
    return " ".join(line.strip() for line in label.splitlines())


def missing(value: Any) -> bool:
    """Return whether a scalar is None or NaN."""
    return bool(pd.isna(value))


def digits(value: float, significant: int = 3) -> str:
    """Return a finite number rounded to `significant` digits, but not before its decimal point.

    Thousands are separated; NaN gives NONE.
    """
    if missing(value):
        return NONE
    if value == 0:
        return "0"
    decimals = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def seconds(value: float | None) -> str:
    """Return a time, e.g. '1.23 ms'."""
    return _scaled(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)))


def size(value: float | None) -> str:
    """Return a number of bytes in decimal units, e.g. '2.16 GB'."""
    return _scaled(value, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def _scaled(value: float | None, units: tuple[tuple[str, float], ...]) -> str:
    if value is None or missing(value):
        return NONE
    for unit, factor in units:
        if abs(value) >= factor:
            return f"{digits(value / factor)} {unit}"
    return f"{digits(value / units[-1][1])} {units[-1][0]}"


def times(value: float) -> str:
    """Return a factor, e.g. '2.10×'."""
    return NONE if missing(value) else f"{digits(value)}×"


def percent(share: float, significant: int = 3) -> str:
    """Return a share of 1 in percent, e.g. '71.3 %'."""
    return NONE if missing(share) else f"{digits(100 * share, significant)} %"


def interval(lo: float, hi: float) -> str:
    """Return '[1.9, 2.3]', or that a single process gives no interval."""
    if missing(lo) or missing(hi):
        return "[one process]"
    return f"[{digits(lo)}, {digits(hi)}]"


def ratio(row: Mapping[str, Any]) -> str:
    """Return the ratio of a row with its confidence interval, e.g. '2.10× [1.90, 2.30]'."""
    return f"{times(row['ratio'])} {interval(row['ratio_lo'], row['ratio_hi'])}"


def fraction(value: float) -> str:
    """Return a compression ratio x > 0 as a share: '1/16.0' for 16, '2.00×' for 0.5."""
    return f"1/{digits(value)}" if value >= 1 else times(1 / value)


def listed(words: Sequence[str]) -> str:
    """Return 'a, b and c'."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def count(amount: float, one: str, many: str = "") -> str:
    """Return '1 cell' or '3 cells'; `many` is for plurals that are not `one` and an s."""
    return f"{amount:,.0f} {one if amount == 1 else many or one + 's'}"


def number(value: float) -> str:
    """Return a whole number in full, e.g. 1,000,000, others with up to six digits, e.g. 1.05."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def capitalised(words: str) -> str:
    """Return words with a capital first letter, the others as they are."""
    return words[:1].upper() + words[1:]


def verdict(value: Any) -> str:
    """Return 'slower', 'faster', 'same' or 'unsure'; empty where there were too few processes."""
    return "" if missing(value) else str(getattr(value, "value", value)).lower()


def commit(environment: Mapping[str, Any]) -> str:
    """Return the commit that ran, marked where the tree had changes; empty outside git."""
    git = environment.get("git") or {}
    return f"{git.get('sha') or ''}{'-dirty' * bool(git.get('dirty'))}"
