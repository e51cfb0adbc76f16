"""How every figure looks: a colour per contender, inks that follow the page's theme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

INK, GRID = "#1b1f24", "#d4d7db"

# Okabe & Ito's palette: told apart with any common colour blindness, and in print.
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
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class Figure:
    """Panels that belong together; `caption` says what is shown and which way is better."""

    name: str
    title: str
    caption: str
    sizes: str
    panels: Sequence[Panel]
    columns: int = 0  # of the sheet; 0: as many as look well


@contextmanager
def theme() -> Iterator[None]:
    """Matplotlib settings of the whole report."""
    settings: dict[str, Any] = {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "lines.linewidth": 2.0,
        "lines.markersize": 6,
        "legend.frameon": False,
        "svg.fonttype": "path",
        "svg.hashsalt": "emblib",  # equal data give equal files
        "figure.dpi": 100,
    }
    with plt.rc_context(cast(Any, settings)):
        yield


def inline_svg(panel: Panel) -> str:
    """One panel for the web page: transparent, its inks replaced by the page's own variables."""
    canvas, axes = plt.subplots(figsize=(4.6, 3.5), layout="constrained")
    panel.draw(axes)
    axes.set_title(panel.title)
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    plt.close(canvas)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = svg.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name.replace('_', '-')})")
    label = panel.title.replace('"', "'").replace("&", "and").replace("<", "less than ")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def sheet(figure: Figure, subtitle: str) -> Canvas:
    """All panels on one white sheet, for the PNG and SVG files; the caller closes it."""
    count = len(figure.panels)
    columns = figure.columns or (count if count <= 3 else (2 if count in (2, 4) else 3))
    rows = -(-count // columns)
    canvas, grid = plt.subplots(
        rows,
        columns,
        figsize=(max(6.5, 4.2 * columns), 3.5 * rows + 1.0),
        layout="constrained",
        squeeze=False,
    )
    for axes, panel in zip(grid.flat, figure.panels, strict=False):
        panel.draw(axes)
        axes.set_title(panel.title)
    for axes in list(grid.flat)[count:]:
        axes.set_visible(False)
    # The empty lines of the title keep room for the subtitle, which the layout does not know.
    canvas.suptitle(f"{figure.title}\n\n", fontsize=14, fontweight="bold", x=0.01, ha="left")
    below = 1 - 0.38 / canvas.get_figheight()
    canvas.text(0.01, below, f"{figure.sizes}\n{subtitle}", fontsize=9, va="top")
    return canvas
