"""The figures of contenders timed together; `timed_figures` returns those of one mode.

A `*_figures` function returns the figures of one topic. If the run lacks their data, it returns
none, or figures without panels, which `timed_figures` drops. `mode_figures` compares the modes. A
function that returns a `Drawing` prepares one panel; `report.style` calls the drawing later.

A data frame `rows` has rows of `Run.table`; `results.metrics.frame` lists its columns.
`run.results_along` adds the column `x`, the value of the swept axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd

from experiments.config.sweep import SWEEP, label_of
from experiments.contenders import registry
from experiments.machine import ceilings
from experiments.machine.ceilings import MeasuredCeilings
from experiments.report import charts, ratios, text
from experiments.report.charts import DASHED, SHORT_DASHED, Curve, Mark, Row, Scale, curves
from experiments.report.data import AXIS_NAMES, Run, select
from experiments.report.style import HEIGHT, WIDTH, Drawing, Figure, Panel, colour_of, marker_of
from experiments.results.metrics import WEIGHT_BYTES, replicate_of, seconds
from experiments.results.store import Record
from experiments.timing.statistics import summarise

LOOKUP_UNIT = "us per lookup"  # published numbers in this unit share an axis with ours
PHASE_TITLES = {"step": "forward + backward + update", "forward": "forward"}
LOG_AXES = ("T", "E", "D", "B", "L", "rank")  # swept axes that are drawn logarithmically
BAR_HEIGHT = 0.4  # inches
# End of the scale ÷ the longest bar, which leaves room for the words at its end.
LINEAR_SCALE_END, LOG_SCALE_END = 1.35, 1.6
PUBLISHED = "published"  # style of numbers that others measured
SAME_MEMORY_FACTOR = 1.05  # memories within this factor count as the same


def timed_figures(run: Run) -> list[Figure]:
    """Return every figure for which this run of one mode has data, the main figure first."""
    candidates = [
        *cost_figures(run),
        *ratios.forest_figures(run),
        *ratios.speedup_figures(run),
        *new_key_figures(run),
        *sweep_figures(run),
        *roofline_figures(run),
        *published_figures(run),
        *sample_figures(run),
    ]
    return [figure for figure in candidates if figure.panels]


def subtitle(run: Run) -> str:
    """Describe machine, software, modes and processes in one line, below the titles of figures."""
    environment = run.environment
    driver = (environment.get("gpu") or {}).get("driver")
    parts = [environment.get("device"), f"torch {environment.get('torch')}"]
    parts += [f"driver {driver}"] if driver else []
    parts += [f"emblib {text.commit(environment) or 'no git'}", run.config.optimizer]
    parts += ["+".join(run.modes)]
    processes = sorted(set(run.processes_per_cell().values()))
    if processes:
        counts = f"{processes[0]}–{processes[-1]}" if len(processes) > 1 else f"{processes[0]}"
        parts.append(f"{counts} process{'es' * (processes[-1] > 1)} per cell")
    return " · ".join(str(part) for part in (*parts, f"timing {run.config.timing.preset}"))


def contender_curve(name: str, x: charts.Floats, y: charts.Floats, **options: Any) -> Curve:
    """Return a curve with the colour, marker and label of a contender.

    Args:
        name: contender, without its rank or cache.
        x: horizontal positions of the points.
        y: vertical positions of the points.
        options: other fields of `Curve`, or another marker or label.
    """
    options = {"marker": marker_of(name), "label": label_of(name), **options}
    return Curve(x, y, colour_of(name), **options)


def _headline_rows(run: Run) -> pd.DataFrame:
    """Return the rows of the headline's cell that have a result."""
    return select(run.table, cell=run.headline_cell(), status="ok")


def cost_figures(run: Run) -> list[Figure]:
    """Return the figure of time against memory; of time alone if all contenders need the same."""
    rows = _headline_rows(run)
    if not len(rows):
        return []
    weights_bytes = rows["weights_bytes"]
    draw, height, quantity = _time_by_memory_drawing, HEIGHT, "Time against memory"
    caption = (
        "Each mark is one contender: parameters on the horizontal axis, median time of one "
        "batch on the vertical axis, with quartiles. Left and down is better."
    )
    if weights_bytes.max() <= SAME_MEMORY_FACTOR * weights_bytes.min():
        draw, quantity = _time_bars_drawing, "Time"
        height = 1.3 + BAR_HEIGHT * rows["arm"].nunique()
        caption = (
            "Bars: median time of one batch; lines: quartiles; then the time ÷ that of "
            f"{run.baseline.label}. All need {text.size(weights_bytes.max())}. Shorter is better."
        )
    panels = [
        Panel(f"Time of {title}", draw(rows[rows["phase"] == phase]), height=height)
        for phase, title in PHASE_TITLES.items()
    ]
    title = f"{quantity} on {run.title(run.headline)}"
    return [Figure("cost_and_memory", title, caption, run.sizes(run.headline), panels)]


def _time_by_memory_drawing(rows: pd.DataFrame) -> Drawing:
    """Return a drawing of the time of each contender against the bytes of its parameters."""
    contender_curves = [
        contender_curve(
            str(name),
            group["weights_bytes"] / 1e6,
            1e3 * group["median_s"],
            width=1.2,
            low=1e3 * group["q25_s"],
            high=1e3 * group["q75_s"],
            names=list(group["label"]),
        )
        for name, unsorted in rows.groupby("contender", sort=False)
        for group in [unsorted.sort_values("weights_bytes")]
    ]
    x_scale, y_scale = Scale("parameters (MB)", log=10), Scale("time per batch (ms)", log=10)
    return curves(contender_curves, x_scale, y_scale, name_position="points")


def _time_bars_drawing(rows: pd.DataFrame) -> Drawing:
    """Return a drawing of the time of each contender as a bar, the fastest first."""
    bars = [
        Row(
            str(row["label"]),
            1e3 * row["median_s"],
            colour_of(str(row["contender"])),
            1e3 * row["q25_s"],
            1e3 * row["q75_s"],
            is_bar=True,
            annotation=f"{text.seconds(row['median_s'])}, {text.times(row['ratio'])}",
        )
        for _, row in rows.sort_values("median_s").iterrows()
    ]
    longest = max(max(bar.value, bar.high) for bar in bars)
    x_scale = Scale("time per batch (ms)", low=0, reach=(0, LINEAR_SCALE_END * longest))
    return charts.row_chart(bars, x_scale)


MODE_WIDTH = 0.6  # width of the marks of one mode ÷ the distance between modes


def mode_figures(run: Run) -> list[Figure]:
    """Return the figure of the headline's times by mode; none if only one mode was measured.

    `run` must have the records of all modes, which `in_mode` drops.
    """
    rows = _headline_rows(run)
    if len(run.modes) < 2 or not len(rows):
        return []
    panels, num_modes = [], len(run.modes)
    x_scale = Scale("", ticks=range(num_modes), names=run.modes, low=-0.5, high=num_modes - 0.5)
    for phase in PHASE_TITLES:
        groups = list(rows[rows["phase"] == phase].groupby("arm", sort=False))
        contender_curves = [
            contender_curve(
                group["contender"].iloc[0],
                group["mode"].map(run.modes.index)
                + MODE_WIDTH * ((group_index + 0.5) / len(groups) - 0.5),
                1e3 * group["median_s"],
                line="",
                low=1e3 * group["q25_s"],
                high=1e3 * group["q75_s"],
                label=group["label"].iloc[0],
            )
            for group_index, (_, group) in enumerate(groups)
        ]
        drawing = curves(
            contender_curves, x_scale, Scale("time per batch (ms)", log=10), name_position="ends"
        )
        panels.append(Panel(phase.capitalize(), drawing))
    return [
        Figure(
            "modes",
            f"What the mode changes on {run.title(run.headline)}",
            "The same work, measured in different ways (see 'How to read this'). Numbers of "
            "different modes are not divided by each other. Bars are quartiles; lower is better.",
            run.sizes(run.headline),
            panels,
        )
    ]


def published_figures(run: Run) -> list[Figure]:
    """Return a figure for each case that has a published time per lookup."""
    published = []
    for section in run.sections():
        case = run.config.cases.get(section)
        steps = select(run.results_of(section), phase="step", status="ok")
        numbers = (
            [figure for figure in case.published if figure["unit"].startswith(LOOKUP_UNIT)]
            if case
            else []
        )
        if not numbers or not len(steps):
            continue
        bars = [
            _lookup_bar(row["label"], row["contender"], row["ns_per_lookup"] / 1e3)
            for _, row in steps.sort_values("ns_per_lookup").iterrows()
        ]
        for number in numbers:
            name = f"{number['label']}\npublished, other machine"
            bars.append(_lookup_bar(name, PUBLISHED, float(number["value"])))
        longest = max(bar.value for bar in bars)
        reach = (longest, LOG_SCALE_END * longest)
        scale = Scale("µs per lookup of a step (log scale)", log=10, reach=reach)
        published.append(
            Figure(
                f"published_{section}",
                text.capitalise(run.title(section)),
                "Solid bars were measured here. Hatched bars were published, of another machine, "
                "so the two kinds are not divided by each other. Shorter is better.",
                run.sizes(section),
                [Panel("Time per lookup", charts.row_chart(bars, scale), 1.2 * WIDTH)],
            )
        )
    return published


def _lookup_bar(name: str, style: str, time_us: float) -> Row:
    """Return the bar of a time per lookup; `style` is a contender, or PUBLISHED (hatched)."""
    is_hollow = style == PUBLISHED
    return Row(
        name,
        time_us,
        colour_of(style),
        is_bar=True,
        is_hollow=is_hollow,
        annotation=f"{time_us:.3g}",
    )


CONTENDER_SHIFT = 0.055  # half the shift between contenders of one size, in powers of two
SIZE_MARGIN = 1.6  # factor from the first and the last size to the ends of the axis
BANDWIDTH_SCALE_END = 1.3  # top of the axis ÷ the highest limit


def roofline_figures(run: Run) -> list[Figure]:
    """Return the roofline figure: GB/s of every contender and cell, against the memory's limits.

    A contender has two dots per cell: a hollow one that counts all lookups, and a filled one that
    counts each distinct row once. [] without a measured limit.
    """
    rows = select(run.table, status="ok")
    measured_ceilings = MeasuredCeilings.from_environment(run.environment)
    rows = rows[rows["useful_gb_s"].notna()] if len(rows) else rows
    if not len(rows) or not (
        math.isfinite(measured_ceilings.copy_gb_s) or measured_ceilings.gather_gb_s
    ):
        return []
    limit_names = "copy and random gather" if measured_ceilings.gather_gb_s else "copy"
    method = f" Gather: {measured_ceilings.gather_method}." if measured_ceilings.gather_gb_s else ""
    device = ceilings.of_environment(run.environment)
    theory = device.bandwidth_gb_s if device else None
    theory_note = f" Dotted: theoretical bandwidth of {device.name}." if device and theory else ""
    return [
        Figure(
            "roofline",
            "Achieved bandwidth and the memory's limits",
            f"Limits: {limit_names} bandwidth of memory, measured in the same run.{method}"
            f"{theory_note} Hollow dots count every lookup, as most papers do; caches can lift "
            "them above the limit. Filled dots count each distinct row of a batch once, which is "
            "nearer to what memory must deliver. For every contender, the bytes are those of plain "
            "rows (formula below). A compressed table computes its rows, so its dots are low. "
            "Higher is better.",
            run.sizes(run.sections()[0]),
            [
                Panel(
                    phase.capitalize(),
                    _roofline_drawing(rows[rows["phase"] == phase], measured_ceilings, theory),
                )
                for phase in ("forward", "step")
                if (rows["phase"] == phase).any()
            ],
        )
    ]


def _roofline_drawing(
    rows: pd.DataFrame, measured_ceilings: MeasuredCeilings, theory: float | None
) -> Drawing:
    """Return a drawing of GB/s against bytes per row, with the measured limits.

    `theory` is the theoretical bandwidth in GB/s; None if it is unknown.
    """
    rows = rows.assign(row_bytes=WEIGHT_BYTES * rows["D"])
    sizes = sorted(int(size) for size in rows["row_bytes"].unique())
    low, high = sizes[0] / SIZE_MARGIN, sizes[-1] * SIZE_MARGIN
    names_at_size = rows.groupby("row_bytes")["contender"].unique()
    dots_and_limits = []
    for name, group in rows.groupby("contender", sort=False):
        shifts = [_shift_factor(list(names_at_size[size]), name) for size in group["row_bytes"]]
        points = contender_curve(
            str(name), group["row_bytes"] * shifts, group["distinct_gb_s"], line="", size=5
        )
        dots_and_limits.append(
            dataclasses.replace(points, y=group["useful_gb_s"], is_hollow=True, label="")
        )
        dots_and_limits.append(points)
    gather_by_size = {s: v for s, v in measured_ceilings.gather_gb_s if low <= s <= high}
    marks = []
    if len(gather_by_size) == 1:  # a curve of one point would not be seen
        (rate,) = gather_by_size.values()
        marks.append(Mark(rate, line=DASHED, annotation=f"gather {_format_rate(rate)}"))
    elif gather_by_size:
        rates = list(gather_by_size.values())
        dots_and_limits.append(Curve(list(gather_by_size), rates, line=DASHED, edge_name="gather"))
    if math.isfinite(measured_ceilings.copy_gb_s):
        marks.append(
            Mark(
                measured_ceilings.copy_gb_s,
                width=1.4,
                annotation=f"copy {_format_rate(measured_ceilings.copy_gb_s)}",
            )
        )
    if theory:
        marks.append(Mark(theory, line=":", annotation=f"theory {_format_rate(theory)}"))
    limits = (measured_ceilings.copy_gb_s, theory, *gather_by_size.values())
    highest_limit = max((limit for limit in limits if limit and limit > 0), default=1.0)
    x_scale = Scale("bytes per row (4·D)", log=2, ticks=sizes, low=low, high=high)
    y_scale = Scale("GB/s", log=10, reach=(highest_limit, BANDWIDTH_SCALE_END * highest_limit))
    return curves(dots_and_limits, x_scale, y_scale, name_position="below", columns=3, marks=marks)


def _shift_factor(names: Sequence[str], name: str) -> float:
    """Return the factor on the x of `name` that separates it from the other `names`."""
    return 2.0 ** (CONTENDER_SHIFT * (2 * names.index(name) - len(names) + 1))


def _format_rate(gb_s: float) -> str:
    """Format a bandwidth: three digits, or a whole number from 100 GB/s on."""
    return f"{gb_s:,.0f}" if gb_s >= 100 else f"{gb_s:.3g}"


MAX_LARGE_DOTS = 60  # a contender with more samples has small dots
CONTENDER_WIDTH = 0.86  # width of a contender's samples ÷ the distance between contenders
PROCESS_GAP = 0.06  # gap between two processes ÷ the width of one


def sample_figures(run: Run) -> list[Figure]:
    """Return the figure of every sample of the headline's cell, a panel per phase."""
    cell = run.headline_cell()
    records = [
        record
        for record in run.records
        if record["cell"] == cell and record["status"] == "ok" and "step" in record["samples"]
    ]
    if not records:
        return []
    return [
        Figure(
            "samples",
            f"Every sample on {run.title(run.headline)}",
            "One dot is one timed execution, or the mean of a few if one is too short to time, in "
            "the order of measurement. Each column is a new process; its line is the median. Steps "
            "and drifts mean that the machine changed during the measurement. All samples are "
            "shown.",
            run.sizes(run.headline),
            [Panel(phase.capitalize(), _samples_drawing(records, phase)) for phase in PHASE_TITLES],
        )
    ]


def _samples_drawing(records: Sequence[Record], phase: str) -> Drawing:
    """Return a drawing of every sample of a phase, one column of dots per contender and process."""
    labels = {record["arm"]: _break_label(record["label"]) for record in records}
    process_curves = []
    for arm_index, arm in enumerate(labels):
        processes = sorted((record for record in records if record["arm"] == arm), key=replicate_of)
        width = CONTENDER_WIDTH / len(processes)
        for process_index, record in enumerate(processes):
            samples_ms = [1e3 * sample_s for sample_s in seconds(record, phase)]
            x_begin = arm_index - CONTENDER_WIDTH / 2 + process_index * width
            x_width = width * (1 - PROCESS_GAP)
            x = [x_begin + x_width * (i + 0.5) / len(samples_ms) for i in range(len(samples_ms))]
            size = 3.2 if len(samples_ms) * len(processes) > MAX_LARGE_DOTS else 6
            colour = colour_of(record["contender"])
            process_curves.append(
                Curve(x, samples_ms, colour, marker=".", line="", size=size, opacity=0.65)
            )
            process_curves.append(
                Curve([x_begin, x_begin + x_width], [summarise(samples_ms).median] * 2, width=1.2)
            )
    x_scale = Scale("", ticks=range(len(labels)), names=list(labels.values()))
    return curves(process_curves, x_scale, Scale("time (ms)", log=10))


def _break_label(label: str) -> str:
    """Break a label of at least 9 letters at the space nearest to its middle, if it has a space."""
    spaces = [i for i, letter in enumerate(label) if letter == " "]
    if len(label) < 9 or not spaces:
        return label
    break_position = min(spaces, key=lambda i: abs(i - len(label) / 2))
    return f"{label[:break_position]}\n{label[break_position + 1 :]}"


MEMORY_PANELS = (  # (title, swept axis, column of the memory)
    ("Parameters by dimension", "D", "weights_bytes"),
    ("Parameters by TT rank", "rank", "weights_bytes"),
    ("Scratch memory of a step by batch size", "B", "peak_bytes"),
)


def sweep_figures(run: Run) -> list[Figure]:
    """Return the figures of throughput, ratio and memory, a panel per swept axis.

    The figure of ratios has no panels without another contender than the baseline, and that of
    memory has none if none of its axes was swept.
    """
    axes = run.swept_axes()
    if not axes:
        return []
    sizes, baseline = run.sizes(SWEEP), run.baseline.label
    has_ratios = run.table.loc[run.table["arm"] != run.baseline.key, "ratio"].notna().any()

    def panels(draw: Callable[[Run, str], Drawing]) -> list[Panel]:
        return [Panel(text.capitalise(AXIS_NAMES[axis]), draw(run, axis)) for axis in axes]

    return [
        Figure(
            "sweep_throughput",
            "Throughput of a step, one axis at a time",
            "Lookups per second through forward, backward and update: lookups of a batch ÷ median "
            "time. The band spans the quartiles. Higher is better.",
            sizes,
            panels(_throughput_drawing),
        ),
        Figure(
            "sweep_ratio",
            f"Time ÷ {baseline}, paired",
            f"How many times the time of {baseline}, from the ratios within each round, with "
            "the 95 % confidence interval. Solid: step. Dashed: forward. Below 1 the contender is "
            "faster.",
            sizes,
            panels(_ratio_drawing) if has_ratios else [],
        ),
        Figure(
            "sweep_memory",
            "Memory",
            "Scratch memory is the maximum that a step needs besides parameters. " * ("B" in axes)
            + "Lower is better.",
            sizes,
            [
                Panel(title, _memory_drawing(run, axis, column))
                for title, axis, column in MEMORY_PANELS
                if axis in axes and run.table[column].notna().any()
            ],
        ),
    ]


def new_key_figures(run: Run) -> list[Figure]:
    """Return the figure of step time against the share of new keys, a panel per swept dimension.

    [] without two shares, or if the baseline is one of the hash tables.
    """
    rows = select(run.results_along("D"), phase="step")
    if not len(rows):
        return []
    rows = rows[rows["ratio"].notna()]
    new_key_shares = {"dynamic": 0.0}  # by contender
    new_key_shares |= {
        name: entry.new_keys for name, entry in registry.entries().items() if entry.new_keys
    }
    rows = rows[rows["contender"].isin(new_key_shares)]
    rows = rows.assign(x=[100 * new_key_shares[name] for name in rows["contender"]])
    if rows["x"].nunique() < 2 or run.baseline.contender in new_key_shares:
        return []
    panels = [
        Panel(f"D = {dim}", _new_keys_drawing(run, rows_of_dim.sort_values("x")))
        for dim, rows_of_dim in rows.groupby("D")
    ]
    baseline = run.baseline.label
    return [
        Figure(
            "new_keys",
            f"Time of a step ÷ {baseline}, against the share of new keys",
            f"How many times the time of {baseline}, which inserts no keys, from the ratios within "
            "each round, with the 95 % confidence interval. Every new key evicts another one.",
            run.sizes(SWEEP),
            panels,
        )
    ]


def _new_keys_drawing(run: Run, rows: pd.DataFrame) -> Drawing:
    """Return a drawing of time ÷ baseline against `x`, the new keys in percent of the lookups."""
    x, baseline = rows["x"], run.baseline.contender
    bounds = {"low": rows["ratio_lo"], "high": rows["ratio_hi"]}
    contender_curves = [
        contender_curve("dynamic", x, rows["ratio"], **bounds),
        contender_curve(baseline, x, [1.0] * len(rows), marker="", line=DASHED),
    ]
    x_scale = Scale("new keys (% of the lookups)", ticks=sorted({float(v) for v in x}))
    return curves(
        contender_curves,
        x_scale,
        Scale(f"time ÷ {run.baseline.label}", log=10),
        name_position="ends",
    )


def _throughput_drawing(run: Run, axis: str) -> Drawing:
    """Return a drawing of a step's lookups per second along `axis`, with quartiles as a band."""
    rows = run.results_along(axis)
    rows = rows[rows["phase"] == "step"]
    contender_curves = [
        contender_curve(
            name,
            group["x"],
            group["lookups_per_s"] / 1e6,
            low=group["lookups"] / group["q75_s"] / 1e6,
            high=group["lookups"] / group["q25_s"] / 1e6,
            is_band=True,
        )
        for name, group in _by_contender(rows, axis)
    ]
    contender_curves += _constant_curves(rows, axis, "lookups_per_s")
    return _axis_chart(contender_curves, rows, axis, "million lookups per second")


def _ratio_drawing(run: Run, axis: str) -> Drawing:
    """Return a drawing of time ÷ baseline along `axis`: step solid, forward dashed, intervals."""
    rows = run.results_along(axis)
    rows = rows[(rows["arm"] != run.baseline.key) & rows["ratio"].notna()]
    contender_curves = []
    for name, group in _by_contender(rows, axis):
        for phase, line in (("step", "-"), ("forward", SHORT_DASHED)):
            phase_rows = group[group["phase"] == phase]
            if axis == "rank":
                phase_rows = phase_rows[phase_rows["rank"] > 0]
            if len(phase_rows):
                bounds = {"low": phase_rows["ratio_lo"], "high": phase_rows["ratio_hi"]}
                curve_style = {"label": f"{label_of(name)} {phase}", "line": line, "width": 1.8}
                x, y = phase_rows["x"], phase_rows["ratio"]
                contender_curves.append(contender_curve(name, x, y, **curve_style, **bounds))
    return _axis_chart(
        contender_curves, rows, axis, f"time ÷ {run.baseline.label}", marks=[Mark(1.0)]
    )


def _memory_drawing(run: Run, axis: str, column: str) -> Drawing:
    """Return a drawing of the memory in a column of the steps along `axis`, in MB."""
    rows = run.results_along(axis)
    rows = rows[(rows["phase"] == "step") & (pd.to_numeric(rows[column]) > 0)]
    contender_curves = []
    for name, group in _by_contender(rows, axis):
        # Parameters of torch take the bytes of TBE's: dashes show the curve below.
        line = DASHED if name == "torch" and column == "weights_bytes" else "-"
        contender_curves.append(contender_curve(name, group["x"], group[column] / 1e6, line=line))
    return _axis_chart([*contender_curves, *_constant_curves(rows, axis, column)], rows, axis, "MB")


def _axis_chart(
    axis_curves: Sequence[Curve],
    rows: pd.DataFrame,
    axis: str,
    label: str,
    marks: Sequence[Mark] = (),
) -> Drawing:
    """Return a drawing of curves along a swept axis, named at their ends.

    `rows` has the measured values of the axis in the column `x`; `label` names the vertical axis.
    """
    values = sorted({float(value) for value in rows["x"] if axis != "rank" or value > 0})
    x_scale = Scale(AXIS_NAMES[axis], log=2 if axis in LOG_AXES else 0, ticks=values)
    return curves(axis_curves, x_scale, Scale(label, log=10), name_position="ends", marks=marks)


def _by_contender(rows: pd.DataFrame, axis: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each contender with its rows in the order of `x`; for "rank" only those with a rank."""
    for name, group in rows.groupby("contender", sort=False):
        if axis != "rank" or (group["rank"] > 0).any():
            yield str(name), group.sort_values("x")


def _constant_curves(rows: pd.DataFrame, axis: str, column: str) -> list[Curve]:
    """Return a horizontal line of a column ÷ 1e6 per contender without a rank.

    [] for any axis but "rank".
    """
    if axis != "rank":
        return []
    x_ends = [float(rows.loc[rows["rank"] > 0, "rank"].min()), float(rows["rank"].max())]
    return [
        contender_curve(
            row["contender"], x_ends, [row[column] * 1e-6] * 2, marker="", line=DASHED, width=1.5
        )
        for _, row in rows[rows["rank"] == 0].iterrows()
    ]
