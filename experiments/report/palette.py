"""One colour and one marker per contender in every figure; inks that follow the page's theme."""

from __future__ import annotations

import zlib

INK, GRID = "#1b1f24", "#d4d7db"
SLOWER, FASTER = "#c2410f", "#1766b0"  # of a diverging scale; their opacity says how much

# Okabe & Ito's palette first: told apart with any common colour blindness, and in print.
COLOURS = {
    "tbe": "#0072b2",
    "tt": "#d55e00",
    "torch": "#009e73",
    "reference_tbe": "#56b4e9",
    "reference_tt": "#cc79a7",
    "published": "#777777",
    "managed": "#8c6d31",
    "cached_lru": "#e69f00",
    "cached_lfu": "#7b3fa0",
    "disk_lru": "#b2182b",
    "disk_lfu": "#4d4dff",
    "offline": "#30363d",
    "static_top": "#8a949e",
    "fbgemm": "#76a300",
    "torchrec": "#c51b7d",
    "tensorly": "#5c4b99",
    "other_1": "#00818a",
    "other_2": "#a0522d",
    "other_3": "#6b7a00",
    "other_4": "#a8336b",
}
# Of outcomes other than "ok"; each status is also written out, colour alone says nothing.
STATUS = {
    "ok": "#2e8540",
    "partly": "#9aa51c",
    "oom": "#b45309",
    "timeout": "#6d28d9",
    "wrong": "#be123c",
    "error": "#dc2626",
    "missing": "#64748b",
    "unsupported": "#94a3b8",
}
MARKERS = {
    "tbe": "o",
    "tt": "s",
    "torch": "^",
    "reference_tbe": "v",
    "reference_tt": "D",
    "published": "*",
    "managed": "P",
    "cached_lru": "o",
    "cached_lfu": "s",
    "disk_lru": "v",
    "disk_lfu": "X",
    "fbgemm": "D",
    "torchrec": "P",
    "tensorly": "X",
}
OTHERS = [name for name in COLOURS if name.startswith("other_")]


def known(contender: str) -> str:
    """The entry that a contender is drawn with; a stranger always gets the same one."""
    if contender in COLOURS:
        return contender
    for family in ("torchrec", "fbgemm", "tensorly", "torch"):
        if contender.startswith(family):
            return family
    return OTHERS[zlib.crc32(contender.encode()) % len(OTHERS)]


def colour_of(contender: str) -> str:
    """As '#rrggbb'."""
    return COLOURS[known(contender)]


def marker_of(contender: str) -> str:
    """A matplotlib marker."""
    return MARKERS.get(known(contender), "h")


def variables() -> dict[str, str]:
    """Colour -> name of the page's variable that replaces it; page.css has both themes."""
    named = {"ink": INK, "grid": GRID, "slower": SLOWER, "faster": FASTER, **COLOURS}
    named |= {f"status_{name}": value for name, value in STATUS.items()}
    return {value: f"--{name.replace('_', '-')}" for name, value in named.items()}
