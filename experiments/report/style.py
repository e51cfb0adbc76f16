"""The style of figures, and their output: files of all panels, and each panel for the web page."""

from __future__ import annotations

import hashlib
import io
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

INK, GRID = "#1b1f24", "#d4d7db"
SLOWER, FASTER = "#c2410f", "#1766b0"  # ends of a diverging scale; the opacity says how much

# Colour and marker of each style. The first colours are Okabe & Ito's palette, which stays distinct
# with any common colour blindness and in print.
STYLES = {
    "tbe": ("#0072b2", "o"),
    "tt": ("#d55e00", "s"),
    "torch": ("#009e73", "^"),
    "sky": ("#56b4e9", "v"),
    "reference_tt": ("#cc79a7", "D"),
    "published": ("#777777", "*"),
    "managed": ("#8c6d31", "P"),
    "cached_lru": ("#e69f00", "o"),
    "cached_lfu": ("#7b3fa0", "s"),
    "disk_lru": ("#b2182b", "v"),
    "offline": ("#30363d", "h"),
    "static_top": ("#8a949e", "h"),
    "fbgemm": ("#76a300", "D"),
    "torchrec": ("#c51b7d", "P"),
    "tensorly": ("#5c4b99", "X"),
    "other_1": ("#00818a", "h"),
    "other_2": ("#a0522d", "h"),
    "other_3": ("#6b7a00", "h"),
    "other_4": ("#a8336b", "h"),
}
COLOURS = {name: colour for name, (colour, _) in STYLES.items()}
# Colours of outcomes. Each status is also written out, for readers who cannot tell colours apart.
STATUS_COLOURS = {
    "ok": "#2e8540",
    "partly": "#9aa51c",
    "oom": "#b45309",
    "timeout": "#6d28d9",
    "wrong": "#be123c",
    "error": "#dc2626",
    "missing": "#64748b",
    "unsupported": "#94a3b8",
}
# Styles of contenders without their own. Contenders of one figure must have different styles.
ALIASES = {
    "dynamic": "other_1",
    "dynamic_new_20": "other_2",
    "scored": "tbe",
    "scored_growing": "tt",
    "scored_lru": "cached_lru",
    "scored_lfu": "cached_lfu",
    "sorted_keys": "torch",
    "lines": "published",
    "lines_huge": "offline",
    "cykhash": "reference_tt",
    "hierarchicalkv": "fbgemm",
    "fbtt": "other_4",
    **dict.fromkeys(("served_fp32", "served_int8", "served_int4"), "tbe"),
}
OTHER_STYLES = [name for name in COLOURS if name.startswith("other_")]


def style_name(contender: str) -> str:
    """Return the key of STYLES for a contender.

    A contender without a style gets that of its family, else one of OTHER_STYLES that depends on
    its name alone, so that it has one colour in all reports.
    """
    contender = ALIASES.get(contender, contender)
    if contender in COLOURS:
        return contender
    for family in ("torchrec", "fbgemm", "tensorly", "torch"):
        if contender.startswith(family):
            return family
    return OTHER_STYLES[zlib.crc32(contender.encode()) % len(OTHER_STYLES)]


def colour_of(contender: str) -> str:
    """Return a contender's colour as '#rrggbb'."""
    return COLOURS[style_name(contender)]


def marker_of(contender: str) -> str:
    """Return a contender's marker in the notation of matplotlib."""
    return STYLES[style_name(contender)][1]


def css_variables() -> dict[str, str]:
    """Return {colour "#rrggbb": name of its CSS variable}; page.css sets each in both themes."""
    colours_by_name = {"ink": INK, "grid": GRID, "slower": SLOWER, "faster": FASTER, **COLOURS}
    colours_by_name |= {f"status_{name}": colour for name, colour in STATUS_COLOURS.items()}
    return {colour: f"--{name.replace('_', '-')}" for name, colour in colours_by_name.items()}


mpl.use("Agg")

Drawing = Callable[[Axes], None]
WIDTH, HEIGHT = 4.6, 3.5  # inches of a panel
SUBTITLE_LINE = 0.17  # height in inches of a line below a sheet's title
SUBTITLE_LETTERS = 14  # letters per inch of a line below the title
TITLE_LINE = 0.26  # height in inches of a line of a sheet's title
TITLE_LETTERS = 8.5  # letters per inch of a line of the title
SUBTITLE_GAP = 0.12  # inches between the title and the lines below it


@dataclass(frozen=True)
class Panel:
    """One plot of a figure: its title, drawing and size."""

    title: str
    draw: Drawing  # plots on the axes; called once for the sheet and once for the web page
    width: float = WIDTH  # inches
    height: float = HEIGHT  # inches


@dataclass(frozen=True)
class Figure:
    """Panels with a common title and caption."""

    name: str  # name of its files, unique within a page
    title: str
    caption: str  # what the panels show, and whether lower or higher is better
    sizes: str  # the workload in one line, written below the title
    panels: Sequence[Panel]
    columns: int = 0  # columns of panels; 0: chosen by the number of panels
    subtitle: str = ""  # machine and software; "": the subtitle of the page


SETTINGS: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # fixed: finding a height takes a fifth of the time of a drawing
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # names of users may have "$", which is not a formula
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "hatch.color": INK,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "emblib",  # equal data give equal files
    "figure.dpi": 100,
}
theme = partial(plt.rc_context, SETTINGS)  # context with the settings of all figures


def draw_files(figure: Figure, subtitle: str, folder: Path) -> list[str]:
    """Write <name>.png and <name>.svg to `folder`, which must exist; return the inline SVGs.

    The SVGs are those of `inline_svg`, one per panel. Call it within `theme()`.
    """
    canvas = draw_sheet(figure, subtitle)
    canvas.savefig(folder / f"{figure.name}.png", dpi=150)
    canvas.set_layout_engine("none")  # the SVG reuses the layout that was computed for the PNG
    canvas.savefig(folder / f"{figure.name}.svg", metadata={"Date": None})
    plt.close(canvas)
    return [inline_svg(panel) for panel in figure.panels]


def inline_svg(panel: Panel) -> str:
    """Return a panel as SVG for the web page: transparent, its colours replaced by CSS variables.

    Call it within `theme()`.
    """
    with plt.rc_context({"svg.fonttype": "none"}):  # text stays text
        canvas, axes = plt.subplots(figsize=(panel.width, panel.height), layout="constrained")
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
    svg = _make_ids_unique(svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", svg)
    for colour, name in css_variables().items():
        svg = svg.replace(colour, f"var({name})")
    label = panel.title.replace('"', "'").replace("&", "and").replace("<", "less than ")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _make_ids_unique(svg: str) -> str:
    """Prefix the ids of a drawing with its hash, because all drawings share the page's document."""
    digest = hashlib.blake2b(svg.encode(), digest_size=4).hexdigest()
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{digest}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{digest}-\1"', svg)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{digest}-\1)", svg)


def draw_sheet(figure: Figure, subtitle: str) -> Canvas:
    """Draw the panels, at least one, on a white sheet with title, sizes and `subtitle`.

    Call it within `theme()`. The caller closes the sheet, with `plt.close`.
    """
    num_panels = len(figure.panels)
    columns = figure.columns or (2 if num_panels == 4 else min(num_panels, 3))
    rows = -(-num_panels // columns)
    width = max(6.5, (max(panel.width for panel in figure.panels) - 0.4) * columns)
    subtitle_lines = [
        line
        for text in (figure.sizes, subtitle)
        for line in wrap(text, int(SUBTITLE_LETTERS * width))
    ]
    title_lines = wrap(figure.title, int(TITLE_LETTERS * width)) or [""]
    title_height = TITLE_LINE * len(title_lines)
    subtitle_height = SUBTITLE_LINE * len(subtitle_lines)
    panel_height = max(panel.height for panel in figure.panels)
    canvas, grid = plt.subplots(
        rows,
        columns,
        figsize=(width, panel_height * rows + 0.4 + title_height + subtitle_height),
        layout="constrained",
        squeeze=False,
    )
    # Blank lines of the title reserve room for the subtitle, of which the layout knows nothing.
    blank_lines = "\n" * max(2, math.ceil(0.75 * len(subtitle_lines)))
    title = "\n".join(title_lines) + blank_lines
    canvas.suptitle(title, fontsize=14, fontweight="bold", x=0.01, ha="left")
    for axes, panel in zip(grid.flat, figure.panels, strict=False):
        axes.set_title(panel.title)
        panel.draw(axes)
    for axes in list(grid.flat)[num_panels:]:
        axes.set_visible(False)
    title_bottom = 1 - (SUBTITLE_GAP + title_height) / canvas.get_figheight()
    canvas.text(0.01, title_bottom, "\n".join(subtitle_lines), fontsize=9, va="top")
    return canvas
