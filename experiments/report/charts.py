"""The drawings of reports: curves against two scales, rows along a scale, squares of a map.

`curves`, `row_chart` and `squares` take data and return a `Drawing`: a function that plots on axes.
A `Panel` calls it once for the sheet and once for the web page. Names that are too long for a panel
are shortened (`shorten`), because they would leave no width for the plot.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis, YAxis
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import Bbox, Transform, offset_copy

from experiments.report import text
from experiments.report.style import GRID, INK, WIDTH, Drawing, Panel

LineStyle = str | tuple[int, tuple[float, ...]]
DASHED: LineStyle = (0, (5, 2))
DOTTED: LineStyle = (0, (1, 2))
SHORT_DASHED: LineStyle = (0, (2, 1.5))
Floats = Iterable[float]  # a list, range or Series, not an iterator: it is read several times
MAX_NAME_LETTERS = 36  # maximum length of the name of a curve, tick or column
MAX_POINT_LETTERS = 27  # maximum length of the name of a point, which is inside the panel
MAX_ROW_LETTERS = 46  # maximum length of the name of a row
MAX_LEVEL_TICK_LETTERS = 56  # names of ticks that need more letters in all are tilted
TILT: dict[str, Any] = {"rotation": 25, "ha": "right"}  # options of tilted names below an axis
NAME_LIFT = 9.0  # typographic points from a line to the middle of a name above or below it
NAME_POINTS = 12.0  # height of a line of 9-point letters, in typographic points
LETTER_POINTS = 5.4  # mean width of such a letter
MIN_LOG_SPAN = 2.0  # ratio of the ends of an axis below which its ticks are at equal distances
MAX_SHORT_TICKS = 5  # maximum number of intervals between these ticks
NEARLY_EQUAL = 1e-4  # relative distance of values that count as one
EDGE_GAP = 11.0  # points from the panel to names right of it: room for lines to moved names
END_GAP = 12.0  # typographic points from the end of a curve to its name
POINT_GAP = 9.0  # typographic points from a point to its name


def shorten(name: str, max_letters: int = MAX_NAME_LETTERS) -> str:
    """Return a name of at most `max_letters` per line: the ends of a longer line, around "…".

    The end is as long as the beginning, because contenders of one family differ at their ends.
    """
    num_kept = (max_letters - 1) // 2
    return "\n".join(
        line if len(line) <= max_letters else f"{line[:num_kept]}…{line[-num_kept:]}"
        for line in name.split("\n")
    )


@dataclass(frozen=True)
class Scale:
    """The scale of an axis: label, limits, ticks and the format of numbers.

    `begin` and `finish` change the axis; a drawing calls them before and after it plots.

    Attributes:
        label: name of the quantity, with its unit.
        log: base of a logarithmic scale; 0 for a linear one.
        ticks: values with a tick; () for values that matplotlib chooses.
        names: one name per tick, instead of its number; () for the numbers.
        low: lower end of the axis; None for the lowest of the plotted values and `reach`.
        high: upper end of the axis; None for `headroom` times the highest of these.
        format_tick: function that formats the numbers at ticks; None for numbers in full.
        reach: two values that the axis includes, whatever is plotted; one that is not finite is
            ignored.
        headroom: factor on the highest value, which leaves room above it.
    """

    label: str
    log: int = 0
    ticks: Sequence[float] = ()
    names: Sequence[str] = ()
    low: float | None = None
    high: float | None = None
    format_tick: Callable[[float], str] | None = None
    reach: tuple[float, float] | None = None
    headroom: float = 1.0

    def begin(self, axis: XAxis | YAxis) -> None:
        """Make the axis linear or logarithmic; call it before anything is plotted."""
        if self.log:
            getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=self.log)

    def finish(self, axis: XAxis | YAxis) -> None:
        """Set limits, ticks and label; call it when everything is plotted."""
        data_ends = [float(end) for end in axis.get_data_interval()]
        # For almost equal values matplotlib would choose equal ends, between which is no scale.
        is_one_value = math.isclose(data_ends[0], data_ends[1], rel_tol=NEARLY_EQUAL)
        getattr(axis.axes, f"set_autoscale{axis.axis_name}_on")(not is_one_value)
        ends = data_ends if is_one_value else axis.get_view_interval()
        getattr(axis.axes, f"set_{axis.axis_name}lim")(*self._limits(*map(float, ends)))
        if self.ticks:
            names = [shorten(n) for n in self.names] or [text.number(t) for t in self.ticks]
            lengths = [max(map(len, name.split("\n"))) for name in names]
            # The nearest neighbours decide, with a gap of about two letters between them.
            longest_pair = max(map(sum, itertools.pairwise(lengths)), default=0)
            num_letters = len(names) * (longest_pair / 2 + 2)
            is_tilted = isinstance(axis, XAxis) and num_letters > MAX_LEVEL_TICK_LETTERS
            options = TILT if is_tilted else {}
            axis.set_ticks(self.ticks, names, fontsize=8 if self.names else None, **options)
            axis.set_minor_formatter(NullFormatter())
            axis.set_minor_locator(NullLocator())
        elif self.log:
            set_plain_ticks(axis)
        if (format_tick := self.format_tick) is not None:
            axis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
        axis.set_label_text(self.label)

    def _limits(self, low: float, high: float) -> tuple[float, float]:
        """Return the ends of the axis; `low` and `high` are the extremes of the plotted data."""
        reach = [end for end in self.reach or () if math.isfinite(end)]
        low, high = min([low, *reach]), self.headroom * max([high, *reach])
        low, high = low if self.low is None else self.low, high if self.high is None else self.high
        if not math.isclose(low, high, rel_tol=NEARLY_EQUAL):
            return low, high
        return (low / self.log, low * self.log) if self.log and low > 0 else (low - 0.5, low + 0.5)


def percent_scale(label: str) -> Scale:
    """Return a scale from 0 to 100 %, with a small margin above."""
    return Scale(label, low=0, high=102)


def set_plain_ticks(axis: Axis) -> None:
    """Put ticks on a logarithmic axis, denser on a short one, and write numbers in full."""
    low, high = axis.get_view_interval()
    span = high / max(low, 1e-12)
    ticks_by_max_span = (  # the ticks of a decade
        (4, (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0, 8.0, 9.0)),
        (12, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)),
        (200, (1.0, 2.0, 5.0)),
    )
    decade_ticks = next((ticks for max_span, ticks in ticks_by_max_span if span < max_span), (1.0,))
    # In less than an octave a LogLocator chooses ticks for a linear scale, too many of them.
    is_short = span < MIN_LOG_SPAN
    axis.set_major_locator(
        MaxNLocator(MAX_SHORT_TICKS, steps=[1, 2, 2.5, 5, 10])
        if is_short
        else LogLocator(subs=decade_ticks)
    )
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")
    )
    axis.set_minor_locator(NullLocator())


@dataclass(frozen=True)
class Curve:
    """Points with a line through them, and an interval around each.

    Attributes:
        x: horizontal positions of the points.
        y: vertical positions, one per point.
        colour: colour of points, line and names, as "#rrggbb".
        label: name of the curve; "" for none.
        marker: marker of the points in matplotlib's notation; "" for none.
        line: style of the line; "" for points without a line.
        width: width of the line in typographic points.
        size: size of the markers in typographic points.
        opacity: opacity of points and line, from 0 to 1.
        is_hollow: whether the markers are outlines.
        low: lower ends of the intervals, one per point; None for no intervals. If one of `low` and
            `high` is nan, no interval of the curve is drawn.
        high: upper ends of the intervals; needed with `low`.
        is_band: whether the intervals form a band; else each is a bar.
        names: names of the first points, written next to them.
        is_on_top: whether the curve is drawn over other curves.
        edge_name: name right of the panel, at the height of the last point; "" for none.
    """

    x: Floats
    y: Floats
    colour: str = INK
    label: str = ""
    marker: str = ""
    line: LineStyle = "-"
    width: float = 2.0
    size: float = 6.0
    opacity: float = 1.0
    is_hollow: bool = False
    low: Floats | None = None
    high: Floats | None = None
    is_band: bool = False
    names: Sequence[str] = ()
    is_on_top: bool = False
    edge_name: str = ""


@dataclass(frozen=True)
class Mark:
    """A straight line across the whole panel, horizontal or vertical."""

    value: float  # y of a horizontal line, x of a vertical one
    colour: str = INK
    line: LineStyle = "-"
    width: float = 1.0  # typographic points
    label: str = ""  # name in the legend; "" for none
    annotation: str = ""  # text right of the panel; for a vertical line at its lower end
    is_vertical: bool = False


def curves(
    lines: Sequence[Curve],
    x: Scale,
    y: Scale,
    *,
    name_position: str = "best",
    columns: int = 1,
    marks: Sequence[Mark] = (),
) -> Drawing:
    """Return a drawing of curves.

    Args:
        lines: curves. Those with a label are named, except with `name_position="points"`.
        x: horizontal scale.
        y: vertical scale.
        name_position: position of the names: a location of a legend, "outside" (a legend right of
            the panel), "below" (a legend below it), "ends" (at the right end of each curve),
            "points" (only the names of points, with room for them) or "" (nowhere).
        columns: number of columns of the legend; fewer if they are wider than the panel.
        marks: lines across the panel. On a logarithmic vertical scale, a horizontal line far from
            all points is left out, unless it has an annotation or a label.
    """

    def draw(axes: Axes) -> None:
        x.begin(axes.xaxis)
        y.begin(axes.yaxis)
        for line in lines:
            _draw_curve(axes, line)
        _draw_marks(axes, _marks_near_points(marks, lines) if y.log else marks)
        if name_position == "points":
            axes.margins(x=POINT_MARGIN_X, y=POINT_MARGIN_Y)
        x.finish(axes.xaxis)
        y.finish(axes.yaxis)
        _annotate_vertical_marks(axes, marks)
        if any(line.names for line in lines):
            _lay_out(axes)
        names = _edge_names(lines, marks) + _point_names(axes, lines, marks)
        if name_position == "ends":
            labelled_lines = [line for line in lines if line.label]
            right_end = max((max(line.x) for line in labelled_lines), default=0.0)
            names += [
                PointName(
                    shorten(line.label),
                    (list(line.x)[-1], list(line.y)[-1]),
                    right_end,
                    line.colour,
                    END_GAP,
                )
                for line in labelled_lines
            ]
        elif name_position not in ("", "points") and axes.get_legend_handles_labels()[1]:
            _draw_legend(axes, name_position, columns)
        _write_names(axes, names)

    return draw


def _marks_near_points(marks: Sequence[Mark], lines: Sequence[Curve]) -> list[Mark]:
    """Return the marks without distant horizontal lines, which would leave the panel mostly empty.

    Marks with an annotation or a label stay, however far away they are.
    """
    heights = [value for line in lines for value in line.y if value > 0]
    if not heights:
        return list(marks)
    low, high = min(heights) / MAX_MARK_DISTANCE, MAX_MARK_DISTANCE * max(heights)
    return [
        mark
        for mark in marks
        if mark.is_vertical or mark.annotation or mark.label or low <= mark.value <= high
    ]


MAX_MARK_DISTANCE = 3.0  # ratio of a mark to the nearest point; farther marks are left out
# Shares of the range that stay free on both sides of named points. Names go towards the middle.
POINT_MARGIN_X, POINT_MARGIN_Y = 0.12, 0.25
LEGEND_DEPTH = 36.0  # typographic points from the panel down to a legend below it


def _draw_legend(axes: Axes, position: str, columns: int) -> None:
    """Draw a legend at a position of `curves`, or at a location of matplotlib's."""
    canvas = cast(Canvas, axes.figure)
    options: dict[str, Any] = {"loc": position}
    if position == "outside":
        options = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    elif position == "below":
        below_panel = offset_copy(axes.transAxes, canvas, y=-LEGEND_DEPTH, units="points")
        options = {
            "loc": "upper center",
            "bbox_to_anchor": (0.5, 0.0),
            "bbox_transform": below_panel,
        }
    grid = axes.get_gridspec()
    width = canvas.bbox.width / (grid.ncols if grid else 1)
    while axes.legend(fontsize=8, ncols=columns, **options).get_window_extent().width > width:
        if columns == 1:
            break
        columns -= 1
    if position == "below":
        _lay_out(axes)  # the legend makes the panel lower


def _lay_out(axes: Axes) -> None:
    """Give the panel about its final size, by which names are placed."""
    canvas = cast(Canvas, axes.figure)
    if (engine := canvas.get_layout_engine()) is not None:
        engine.execute(canvas)


def _draw_curve(axes: Axes, line: Curve) -> None:
    """Draw one curve with its error bars or band."""
    x, y = list(line.x), list(line.y)
    style: dict[str, Any] = {
        "color": line.colour,
        "marker": line.marker or None,
        "ls": line.line or "none",
        "lw": line.width,
        "ms": line.size,
        "alpha": line.opacity,
        "mfc": "none" if line.is_hollow else line.colour,
        "label": shorten(line.label) or None,
        "zorder": 3 if line.is_on_top else 2,
    }
    low = [] if line.low is None else list(line.low)
    high = [] if line.high is None else list(line.high)
    has_interval = bool(low) and not any(map(math.isnan, (*low, *high)))
    if has_interval and line.is_band:
        axes.fill_between(x, low, high, color=line.colour, alpha=0.2, lw=0)
    if has_interval and not line.is_band:
        errors_below = [max(0.0, b - a) for a, b in zip(low, y, strict=True)]
        errors_above = [max(0.0, b - a) for a, b in zip(y, high, strict=True)]
        axes.errorbar(x, y, yerr=[errors_below, errors_above], capsize=3, **style)
    else:
        axes.plot(x, y, **style)


def _draw_marks(axes: Axes, marks: Sequence[Mark]) -> None:
    """Draw the lines of marks, without their annotations."""
    for mark in marks:
        draw = axes.axvline if mark.is_vertical else axes.axhline
        draw(mark.value, color=mark.colour, ls=mark.line, lw=mark.width, label=mark.label or None)


def _annotate_vertical_marks(axes: Axes, marks: Sequence[Mark]) -> None:
    """Write the annotations of vertical marks at the lower ends of their lines."""
    for mark in marks:
        if mark.annotation and mark.is_vertical:
            axes.annotate(
                mark.annotation,
                (mark.value, 0),
                (3, 4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                fontsize=8,
                color=mark.colour,
            )


@dataclass(frozen=True)
class PointName:
    """A name next to a point. Positions are in the units of the data."""

    label: str
    point: tuple[float, float]
    x: float  # horizontal position from which `shift` counts
    colour: str
    shift: float  # typographic points from `x` to the name; negative: the name is left of `x`
    lift: float = 0.0  # typographic points from the height of the point to that of the name
    is_at_edge: bool = False  # True: horizontal positions are shares of the panel's width

    def transform(self, axes: Axes) -> Transform:
        """Return the transform of the name's positions."""
        return axes.get_yaxis_transform() if self.is_at_edge else axes.transData


def _edge_names(lines: Sequence[Curve], marks: Sequence[Mark]) -> list[PointName]:
    """Return the names right of the panel: of horizontal marks, and of curves with `edge_name`."""
    heights = [
        (mark.annotation, mark.value, mark.colour)
        for mark in marks
        if mark.annotation and not mark.is_vertical
    ]
    heights += [(c.edge_name, list(c.y)[-1], c.colour) for c in lines if c.edge_name]
    return [
        PointName(shorten(label), (1.0, y), 1.0, colour, EDGE_GAP, is_at_edge=True)
        for label, y, colour in heights
    ]


def _point_names(axes: Axes, lines: Sequence[Curve], marks: Sequence[Mark]) -> list[PointName]:
    """Return the names of points, each where it crosses the fewest lines, markers and other names.

    If several places are as good, names are written towards the middle of the panel.
    """
    low, high = axes.get_xlim()
    panel_middle = math.sqrt(low * high) if axes.get_xscale() == "log" else (low + high) / 2
    obstacles = _obstacles(axes, lines, marks)

    def num_crossed(name: PointName) -> int:
        return sum(path.intersects_bbox(_name_box(axes, name), filled=False) for path in obstacles)

    names = []
    for line in lines:
        for x, y, name in zip(line.x, line.y, line.names, strict=False):
            inward_gap = POINT_GAP if x < panel_middle else -POINT_GAP
            places = [  # the best first
                PointName(
                    shorten(name, MAX_POINT_LETTERS), (x, y), x, line.colour, gap, lift * NAME_LIFT
                )
                for lifts in ((0, 1, -1), (2, -2))
                for gap in (inward_gap, -inward_gap)
                for lift in lifts
            ]
            names.append(min(places, key=num_crossed))
            obstacles.append(_outline(_name_box(axes, names[-1])))
    return names


def _obstacles(axes: Axes, lines: Sequence[Curve], marks: Sequence[Mark]) -> list[Path]:
    """Return what a name should not cross, in pixels: lines, intervals, markers, marks, sides."""
    sides = (Path([(x, 0), (x, 1)]) for x in (0, 1))
    obstacles = [axes.transAxes.transform_path(side) for side in sides]
    for mark in marks:
        if not mark.is_vertical:
            ends = Path([(0, mark.value), (1, mark.value)])
            obstacles.append(axes.get_yaxis_transform().transform_path(ends))
    for line in lines:
        strokes = [points] if (points := list(zip(line.x, line.y, strict=True))) else []
        if line.low is not None and line.high is not None:
            ends_of_intervals = zip(line.x, line.low, line.high, strict=True)
            strokes += [[(x, bottom), (x, top)] for x, bottom, top in ends_of_intervals]
        obstacles += [axes.transData.transform_path(Path(stroke)) for stroke in strokes]
        half = line.size / 2 * axes.figure.dpi / 72
        obstacles += [
            _outline(Bbox([[x - half, y - half], [x + half, y + half]]))
            for x, y in (axes.transData.transform(points) if points else ())
        ]
    return obstacles


def _outline(box: Bbox) -> Path:
    return Path([*box.corners()[[0, 1, 3, 2]], box.min])


def _name_box(axes: Axes, name: PointName) -> Bbox:
    """Return the box of a name before names are spread apart, in pixels, by a mean letter width."""
    pixels_per_point = axes.figure.dpi / 72
    x, _ = name.transform(axes).transform((name.x, 1.0))
    near = x + name.shift * pixels_per_point
    far = near + math.copysign(LETTER_POINTS * len(name.label), name.shift) * pixels_per_point
    middle, half = _height(axes, name) * pixels_per_point, NAME_POINTS / 2 * pixels_per_point
    return Bbox([[min(near, far), middle - half], [max(near, far), middle + half]])


def _write_names(axes: Axes, names: Sequence[PointName]) -> None:
    """Write names at the heights of their points, moved no farther than needed to keep them apart.

    A thin line joins a name that had to move with its point. All positions are in the units of the
    data: names stay at their points when the layout resizes the panel.
    """
    canvas = cast(Canvas, axes.figure)
    points_per_pixel = 72 / canvas.dpi
    low, high = axes.bbox.y0 * points_per_pixel, axes.bbox.y1 * points_per_pixel
    for group in _groups_side_by_side(axes, names):
        names_by_height = [(_height(axes, name), name) for name in group]
        names_by_height.sort(key=lambda pair: pair[0])
        wanted_heights = [height for height, _ in names_by_height]
        for (wanted_height, name), height in zip(
            names_by_height, spread_apart(wanted_heights, NAME_POINTS, low, high), strict=True
        ):
            is_spread = abs(height - wanted_height) > NAME_POINTS / 3
            is_moved = is_spread or abs(name.lift) > NAME_LIFT
            y = float(axes.transData.inverted().transform((0.0, height / points_per_pixel))[1])
            name_transform = name.transform(axes)
            axes.annotate(
                name.label,
                name.point,
                (name.x, y),
                xycoords=name_transform,
                textcoords=offset_copy(name_transform, canvas, x=name.shift, units="points"),
                color=name.colour,
                ha="left" if name.shift > 0 else "right",
                va="center",
                fontsize=8 if name.is_at_edge else 9,
                annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-",
                    "color": name.colour,
                    "lw": 0.6,
                    "relpos": (0.0 if name.shift > 0 else 1.0, 0.5),
                }
                if is_moved
                else None,
            )


def _height(axes: Axes, name: PointName) -> float:
    """Return the height at which a name would be written if alone, in typographic points."""
    return float(name.transform(axes).transform(name.point)[1]) * 72 / axes.figure.dpi + name.lift


def _groups_side_by_side(axes: Axes, names: Sequence[PointName]) -> list[list[PointName]]:
    """Return the names in groups, where names of two groups never overlap at any height."""
    groups: list[list[PointName]] = []
    right_end = -math.inf
    for box, name in sorted(((_name_box(axes, n), n) for n in names), key=lambda p: p[0].xmin):
        if box.xmin > right_end:
            groups.append([])
        groups[-1].append(name)
        right_end = max(right_end, box.xmax)
    return groups


def spread_apart(
    wanted_heights: Sequence[float], gap: float, low: float, high: float
) -> list[float]:
    """Return ascending heights at least `gap` apart, as near to the wanted heights as possible.

    Neighbours that would overlap form a block around the mean of their wanted heights; blocks merge
    until none overlap. All heights stay between `low` and `high` where these leave enough room;
    else the uppermost exceed `high`. All arguments have one unit.
    """
    # Member i of a block is i * gap above the block's base. So a member that is not moved needs a
    # base i * gap below its wanted height. A block is [sum of these bases, number of members]; the
    # mean of these bases is the base with the least sum of squared moves.
    blocks: list[list[float]] = []
    for height in sorted(wanted_heights):
        blocks.append([height, 1.0])
        while len(blocks) > 1:
            (lower_sum, lower_count), (upper_sum, upper_count) = blocks[-2:]
            if upper_sum / upper_count - lower_sum / lower_count >= lower_count * gap:
                break
            merged_sum = lower_sum + upper_sum - upper_count * lower_count * gap
            blocks[-2:] = [[merged_sum, lower_count + upper_count]]
    heights = [base_sum / count + i * gap for base_sum, count in blocks for i in range(int(count))]
    last = len(heights) - 1
    return [
        max(low + i * gap, min(height, high - (last - i) * gap)) for i, height in enumerate(heights)
    ]


@dataclass(frozen=True)
class Row:
    """One row of a `row_chart`: a dot or a bar, with its interval.

    Attributes:
        name: text left of the panel.
        value: position of the dot, or length of the bar, on the horizontal scale.
        colour: colour of the dot or bar, as "#rrggbb".
        low: lower end of the interval; nan for no interval.
        high: upper end of the interval.
        dots: values of single processes, drawn below the row's dot if there are two or more; not
            for a bar.
        margin: half-width of a grey band around 1, from 1 / (1 + margin) to 1 + margin; nan for
            none; not for a bar.
        is_hollow: whether the dot is an outline, or the bar is hatched.
        marker: marker of the dot in matplotlib's notation.
        is_bar: whether the row is a bar.
        rest_length: length of a hatched bar that continues the bar; nan for none; not for a dot.
        annotation: text right of the panel; for a bar at its end.
        label: name of the dot in the legend of `shares_labels`; "" for none; not for a bar.
    """

    name: str
    value: float
    colour: str
    low: float = math.nan
    high: float = math.nan
    dots: Sequence[float] = ()
    margin: float = math.nan
    is_hollow: bool = False
    marker: str = "o"
    is_bar: bool = False
    rest_length: float = math.nan
    annotation: str = ""
    label: str = ""


def row_chart(
    rows: Sequence[Row], x: Scale, *, marks: Sequence[Mark] = (), shares_labels: bool = False
) -> Drawing:
    """Return a drawing of rows in the given order, the first at the top.

    With `shares_labels`, rows of the same name are drawn close together around one label, and a
    legend names the rows with a `label`.
    """
    names = [row.name for row in rows]
    heights: Sequence[float] = range(len(names))
    if shares_labels:
        names = list(dict.fromkeys(names))
        heights = _spread_around_labels([names.index(row.name) for row in rows])

    def draw(axes: Axes) -> None:
        x.begin(axes.xaxis)
        for y, row in zip(heights, rows, strict=True):
            (_draw_bar if row.is_bar else _draw_dot)(axes, row, y)
        _draw_marks(axes, marks)
        x.finish(axes.xaxis)
        _annotate_vertical_marks(axes, marks)
        axes.set_yticks(range(len(names)), _shorten_rows(names), fontsize=8)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        if shares_labels:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)

    return draw


def _shorten_rows(names: Iterable[str]) -> list[str]:
    return [shorten(name, MAX_ROW_LETTERS) for name in names]


MAX_ROW_GAP = 0.16  # maximum distance of rows that share a label ÷ the distance of labels
LABEL_HEIGHT = 0.64  # maximum height of all rows that share a label ÷ the distance of labels


def _spread_around_labels(label_indices: Sequence[int]) -> list[float]:
    """Return a height per row, from the index of its label; rows of a label surround it."""
    counts, num_placed = Counter(label_indices), Counter[int]()
    heights = []
    for index in label_indices:
        count = counts[index]
        gap = min(MAX_ROW_GAP, LABEL_HEIGHT / count)
        heights.append(index + gap * (num_placed[index] - (count - 1) / 2))
        num_placed[index] += 1
    return heights


def _draw_dot(axes: Axes, row: Row, y: float) -> None:
    """Draw one row of a row chart at height `y`: interval, value, and small dots of processes."""
    if math.isfinite(row.margin):
        edges = (1 / (1 + row.margin), 1 + row.margin)
        axes.fill_betweenx((y - 0.5, y + 0.5), *edges, color=GRID, alpha=0.6, lw=0)
    if math.isfinite(row.low):
        axes.plot([row.low, row.high], [y, y], color=row.colour, lw=2.2, solid_capstyle="butt")
    axes.plot(
        row.value,
        y,
        row.marker,
        color=row.colour,
        mfc="none" if row.is_hollow else row.colour,
        ms=5,
        mew=1.2,
        label=shorten(row.label) or None,
    )
    if len(row.dots) > 1:
        axes.plot(row.dots, [y + 0.27] * len(row.dots), ".", color=row.colour, ms=3.5, alpha=0.7)
    if row.annotation:
        axes.annotate(
            row.annotation,
            (1.0, y),
            (4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8,
            annotation_clip=False,
        )


def _draw_bar(axes: Axes, row: Row, y: float) -> None:
    """Draw one row of a row chart at height `y`: bar, its rest, interval and annotation."""
    hatched: dict[str, Any] = {"color": "none", "edgecolor": row.colour, "hatch": "///"}
    style = hatched if row.is_hollow else {"color": row.colour, "edgecolor": row.colour}
    axes.barh(y, row.value, height=0.65, **style)
    if math.isfinite(row.rest_length):
        axes.barh(y, row.rest_length, left=row.value, height=0.65, **hatched)
    if math.isfinite(row.low):
        axes.plot([row.low, row.high], [y, y], color=INK, lw=1.2)
    if row.annotation:
        end = row.high if row.high > row.value else row.value  # the line must not cross the text
        axes.annotate(row.annotation, (end, y), (4, 0), textcoords="offset points", va="center")


def forest(title: str, rows: Sequence[Row], label: str) -> Panel:
    """Return a panel of ratios with their intervals and a line at 1, as high as its rows need.

    `label` is that of the horizontal axis, which is logarithmic: ratios must be positive.
    """
    height = max(2.0, 0.235 * len(rows) + 1.0)
    drawing = row_chart(rows, Scale(label, log=10), marks=[Mark(1.0, is_vertical=True)])
    return Panel(title, drawing, WIDTH + 0.8, height)


MAX_LEVEL_LETTERS = 34  # names of columns with more letters in all are tilted


@dataclass(frozen=True)
class Square:
    """One entry of a map: a square, which may be coloured, with text in it."""

    column: str  # name of its column
    row: str  # name of its row
    annotation: str  # text in it
    colour: str = ""  # colour of its background, as "#rrggbb"; "" for none
    opacity: float = 1.0  # opacity of the background, from 0 to 1
    is_hatched: bool = False


def squares(entries: Sequence[Square], xlabel: str = "", ylabel: str = "") -> Drawing:
    """Return a drawing of a map: squares in columns and rows, in the order of first entries.

    Two entries of one column and row are drawn on top of each other. The labels are those of the
    axes; "" for none.
    """
    columns = list(dict.fromkeys(entry.column for entry in entries))
    rows = list(dict.fromkeys(entry.row for entry in entries))

    def draw(axes: Axes) -> None:
        for entry in entries:
            x, y = columns.index(entry.column), rows.index(entry.row)
            corner = (x - 0.48, y - 0.46)
            if entry.colour:
                fill: dict[str, Any] = {"color": entry.colour, "alpha": entry.opacity, "lw": 0}
                axes.add_patch(Rectangle(corner, 0.96, 0.92, **fill))
            if entry.is_hatched:
                hatch: dict[str, Any] = {"fill": False, "hatch": "///", "lw": 0, "alpha": 0.45}
                axes.add_patch(Rectangle(corner, 0.96, 0.92, **hatch))
            axes.text(x, y, entry.annotation, ha="center", va="center", fontsize=8, in_layout=False)
        tilt = TILT if len("".join(columns)) > MAX_LEVEL_LETTERS else {}
        axes.set_xticks(range(len(columns)), map(shorten, columns), fontsize=8, **tilt)
        axes.set_yticks(range(len(rows)), _shorten_rows(rows), fontsize=8)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)

    return draw
