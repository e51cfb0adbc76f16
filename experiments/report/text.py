"""Format numbers in engineering units and ratios with intervals; make text safe for Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

DASH = "–"  # stands in place of an unknown value

# A link to anything but a file next to the page or a web address, e.g. to javascript:.
_UNSAFE_LINK = re.compile(r"\]\((?!(?:[\w./-]+|https?://[^\s()]*)\))")


def markdown_document(lines: Iterable[str]) -> str:
    """Join the lines of a Markdown page so that no label can put HTML into it.

    Labels, error messages and commands come from configurations and other people's runs. The pages
    themselves use no HTML. So every `<` is written as `&lt;`, and links to anything but files and
    web addresses are made plain text.
    """
    return "\n".join(map(make_inert, lines))


def make_inert(line: str) -> str:
    """Return a line of Markdown without HTML, link definitions and links to scripts."""
    return _UNSAFE_LINK.sub(r"]\\(", line.replace("<", "&lt;").replace("]:", r"]\:"))


def one_line(label: str) -> str:
    """Return a label without line breaks, after which it could begin a list or a heading."""
    return " ".join(line.strip() for line in label.splitlines())


def is_missing(value: Any) -> bool:
    """Return whether a scalar is None or NaN."""
    return bool(pd.isna(value))


def digits(value: float, significant: int = 3) -> str:
    """Return a finite number rounded to `significant` digits; DASH for NaN.

    Digits before the decimal point are all written, with the thousands separated.
    """
    if is_missing(value):
        return DASH
    if value == 0:
        return "0"
    decimals = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def seconds(value: float | None) -> str:
    """Return a time, e.g. '1.23 ms'."""
    return _in_largest_unit(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)))


def size(value: float | None) -> str:
    """Return a number of bytes in decimal units, e.g. '2.16 GB'."""
    return _in_largest_unit(value, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def _in_largest_unit(value: float | None, units: tuple[tuple[str, float], ...]) -> str:
    """Return a number in the first unit (name, factor) not above it, else in the last; or DASH."""
    if value is None or is_missing(value):
        return DASH
    for unit, factor in units:
        if abs(value) >= factor:
            return f"{digits(value / factor)} {unit}"
    return f"{digits(value / units[-1][1])} {units[-1][0]}"


def times(value: float) -> str:
    """Return a factor, e.g. '2.10×'."""
    return DASH if is_missing(value) else f"{digits(value)}×"


def percent(share: float, significant: int = 3) -> str:
    """Return a share of 1 in percent, e.g. '71.3 %'."""
    return DASH if is_missing(share) else f"{digits(100 * share, significant)} %"


def interval(lo: float, hi: float) -> str:
    """Return an interval, e.g. '[1.90, 2.30]'; '[one process]' for a missing end."""
    if is_missing(lo) or is_missing(hi):
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


def count(amount: float, singular: str, plural: str = "") -> str:
    """Return '1 cell' or '3 cells'; `plural` is for words whose plural does not just add an s."""
    return f"{amount:,.0f} {singular if amount == 1 else plural or singular + 's'}"


def number(value: float) -> str:
    """Return a whole number in full, e.g. 1,000,000, others with up to six digits, e.g. 1.05."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def point(row: Mapping[Any, Any], axes: Iterable[str]) -> str:
    """Return the values of a row on some axes, e.g. "E=1,000,000, D=64"."""
    return ", ".join(f"{axis}={number(row[axis])}" for axis in axes)


def capitalise(words: str) -> str:
    """Return words with a capital first letter; the other letters stay as they are."""
    return words[:1].upper() + words[1:]


def verdict(value: Any) -> str:
    """Return 'slower', 'faster', 'same' or 'unsure'; "" for None or NaN (too few processes)."""
    return "" if is_missing(value) else str(getattr(value, "value", value)).lower()


def commit(environment: Mapping[str, Any]) -> str:
    """Return the commit that ran, with '-dirty' if the tree had changes; "" outside git."""
    git = environment.get("git") or {}
    return f"{git.get('sha') or ''}{'-dirty' * bool(git.get('dirty'))}"
