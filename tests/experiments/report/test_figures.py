"""What the figures of a report draw, from made-up samples whose answers are known."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import path
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from experiments import configure
from experiments.config.sweep import Arm, Cell
from experiments.kind_reports import quality, serving
from experiments.machine import ceilings
from experiments.report import Run, charts, document, figures, outcomes, ratios, style, text
from experiments.report.results import section_table
from experiments.report.style import Panel
from tests.experiments.made_up import BANDWIDTH, Recipe, make_run

GRID = ("+experiment=tt_vs_tbe", "design=grid", "sweep.D=[16,32]", "sweep.B=[256,1024,4096]")
ONE_AXIS = ("+experiment=tt_vs_tbe", "sweep.B=[]", "sweep.L=[]", "sweep.s=[]", "sweep.rank=[]")
NOTHING = ("sweep.L=[]", "sweep.s=[]", "sweep.rank=[]")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three processes, one axis, two modes, an error of the compressed tables."""
    recipe = Recipe(words=ONE_AXIS, modes=("hot", "cold"), error=0.4)
    return Run.read(make_run(tmp_path_factory.mktemp("plain"), recipe))


def _texts(panel: Panel) -> list[str]:
    _, axes = plt.subplots()
    panel.draw(axes)
    found = [t.get_text() for t in axes.texts]
    plt.close()
    return found


def test_every_figure_of_the_field_is_there_and_draws(plain: Run) -> None:
    hot = plain.in_mode("hot")
    found = figures.timed_figures(hot)
    assert [f.name for f in found] == [
        "cost_and_memory",
        "forest",
        "speedup",
        "sweep_throughput",
        "sweep_ratio",
        "sweep_memory",
        "roofline",
        "published_fbtt_readme",
        "samples",
    ]
    with style.theme():
        for figure in found:
            assert figure.caption
            assert figure.sizes
            svg = style.inline_svg(figure.panels[0])
            assert "<path" in svg


def test_a_process_by_itself_and_all_together_are_the_same_ratio(plain: Run) -> None:
    hot = plain.in_mode("hot")
    row = hot.table[(hot.table["arm"] == "tt-16") & (hot.table["phase"] == "step")].iloc[0]
    of_processes = ratios.process_ratios(hot, "step")[row["cell"], "tt-16"]
    assert len(of_processes) == 3
    mean = math.exp(sum(map(math.log, of_processes)) / 3)
    assert mean == pytest.approx(row["ratio"])
    assert row["ratio_lo"] < mean < row["ratio_hi"]


def test_the_forest_is_sorted_and_open_where_one_is_inside(plain: Run) -> None:
    (figure,) = ratios.forest_figures(plain.in_mode("hot"))
    lines = ratios.forest_rows(plain.in_mode("hot"), "step")
    assert [x.value for x in lines] == sorted(x.value for x in lines)
    assert all(len(x.dots) == 3 for x in lines)
    numbers = _texts(figure.panels[0])
    assert len(numbers) == len(lines)
    open_line = charts.Row("a", 1.01, "#000000", 0.99, 1.03, is_hollow=True)
    _, axes = plt.subplots()
    charts.forest("", [open_line], "").draw(axes)
    dot = next(x for x in axes.lines if x.get_marker() == "o")
    assert dot.get_markerfacecolor() == "none"
    plt.close()


def test_a_forest_that_is_cut_says_so(plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (figure,) = ratios.forest_figures(plain.in_mode("hot"))
    assert "the smallest and the largest" not in figure.caption
    num_ratios = len(ratios.forest_rows(plain.in_mode("hot"), "step"))
    monkeypatch.setattr(ratios, "MAX_ROWS", num_ratios)
    (figure,) = ratios.forest_figures(plain.in_mode("hot"))
    assert "the smallest and the largest" not in figure.caption
    monkeypatch.setattr(ratios, "MAX_ROWS", 2)
    (figure,) = ratios.forest_figures(plain.in_mode("hot"))
    assert "Of more than 2 ratios the smallest and the largest" in figure.caption


def test_the_heatmap_shows_axes_against_each_other_where_they_met(tmp_path: Path) -> None:
    run = Run.read(make_run(tmp_path, Recipe(words=(*GRID, *NOTHING), replicates=1)))
    (figure,) = ratios.speedup_figures(run)
    (forest,) = ratios.forest_figures(run)  # of one process per cell
    assert "gives no confidence interval" in forest.caption
    assert "Bars" not in forest.caption
    titles = [p.title for p in figure.panels]
    assert titles == [
        "TT rank 16, step",
        "TT rank 16, forward",
        "EmbeddingBag, step",
        "EmbeddingBag, forward",
    ]
    numbers = _texts(figure.panels[0])
    assert len(numbers) == 6
    assert all(0.1 < float(n.removesuffix("×")) < 0.6 for n in numbers)


def test_the_heatmap_of_points_has_a_line_per_point(plain: Run) -> None:
    (figure,) = ratios.speedup_figures(plain.in_mode("hot"))
    assert [p.title for p in figure.panels] == ["Step", "Forward"]
    _, axes = plt.subplots()
    figure.panels[0].draw(axes)
    assert [t.get_text() for t in axes.get_yticklabels()] == ["base point", "D=16", "D=32", "D=128"]
    plt.close()


@pytest.mark.parametrize(("low", "high", "hatched"), [(0.9, 1.2, True), (1.1, 1.2, False)])
def test_a_difference_that_may_be_none_is_hatched(low: float, high: float, hatched: bool) -> None:
    row = {"status": "ok", "ratio": 1.15, "ratio_lo": low, "ratio_hi": high}
    square = ratios.speedup_square(row, "column", "line")
    assert square.annotation == "0.87×"
    _, axes = plt.subplots()
    charts.squares([square])(axes)
    hatches = [p.get_hatch() for p in axes.patches if isinstance(p, Rectangle)]
    assert any(hatches) is hatched
    plt.close()


def test_the_roofs_are_drawn_with_the_theory_where_it_is_known(tmp_path: Path) -> None:
    gpu = {"gpu": {"name": "NVIDIA H100 80GB HBM3"}}
    run = Run.read(make_run(tmp_path, Recipe(words=ONE_AXIS, replicates=1, environment=gpu)))
    device = ceilings.of_environment(run.environment)
    assert device is not None
    assert device.bandwidth_gb_s is not None
    (figure,) = figures.roofline_figures(run)
    words = _texts(figure.panels[0])
    assert words == ["gather", "copy 50", f"theory {device.bandwidth_gb_s:,.4g}"]
    assert f"Dotted: theoretical bandwidth of {device.name}" in figure.caption


def test_a_table_says_how_much_of_the_gather_bandwidth_a_step_gets(plain: Run) -> None:
    hot = plain.in_mode("hot")
    table = section_table(hot, "criteo")
    rows = hot.table[(hot.table["cell"] == hot.headline_cell()) & (hot.table["phase"] == "step")]
    column = table.headings.index("of gather")
    for line, (_, row) in zip(table.rows, rows.iterrows(), strict=True):
        assert row["D"] == 16
        share = row["distinct_gb_s"] / BANDWIDTH["gather_gb_s"]["64"]
        assert line[column].sort_key == pytest.approx(100 * share)


def test_a_table_says_how_fast_trains_multiply(plain: Run) -> None:
    hot = plain.in_mode("hot")
    table = section_table(hot, "criteo")
    column, name = table.headings.index("of sgemm"), table.headings.index("contender")
    steps = hot.table[(hot.table["cell"] == hot.headline_cell()) & (hot.table["phase"] == "step")]
    median = steps.set_index("label")["median_s"]
    for line in table.rows:
        label = line[name].text
        if label.startswith("TT"):
            share = 3e6 / median[label] / 1e9 / 80.0
            assert line[column].sort_key == pytest.approx(100 * share)
        else:
            assert line[column].text == text.DASH


def test_the_roof_is_the_copy_of_an_older_run(tmp_path: Path) -> None:
    recipe = Recipe(words=ONE_AXIS, replicates=1, environment={"bandwidth": None})
    run = Run.read(make_run(tmp_path, recipe))
    assert "of gather" not in section_table(run, "criteo").headings
    (figure,) = figures.roofline_figures(run)
    assert "Limits: copy bandwidth of memory" in figure.caption
    assert "copy 50" in _texts(figure.panels[0])


def test_one_length_of_rows_has_a_limit_that_is_seen(tmp_path: Path) -> None:
    run = Run.read(make_run(tmp_path, Recipe(words=ONE_AXIS, replicates=1)))
    run.table.drop(run.table.index[run.table["D"] != 16], inplace=True)
    (figure,) = figures.roofline_figures(run)
    gather = BANDWIDTH["gather_gb_s"]["64"]
    assert f"gather {figures._format_rate(gather)}" in _texts(figure.panels[0])


def test_no_roof_no_roofline(tmp_path: Path) -> None:
    unknown = {"bandwidth": None, "copy_gb_s": None}
    run = Run.read(make_run(tmp_path, Recipe(words=ONE_AXIS, replicates=1, environment=unknown)))
    assert figures.roofline_figures(run) == []


def test_modes_never_share_a_row_or_a_ratio(plain: Run) -> None:
    assert plain.modes == ["hot", "cold"]
    hot, cold = plain.in_mode("hot"), plain.in_mode("cold")
    assert len(hot.table) == len(cold.table) == len(plain.table) // 2
    assert set(cold.table["mode"]) == {"cold"}
    assert hot.table["median_s"].median() < cold.table["median_s"].median()
    (figure,) = figures.mode_figures(plain)
    assert figure.name == "modes"
    assert figures.mode_figures(hot) == []


def _fate(arm: Arm, cell: Cell, process: int) -> tuple[str, str]:
    if arm.contender == "torch":
        return "oom", "needed 191 GiB, 139 free"
    if arm.contender == "tt" and process == 1:
        return "timeout", "silent for 120 s"
    return "ok", ""


def test_failures_are_a_map_and_a_table(tmp_path: Path) -> None:
    run = Run.read(make_run(tmp_path, Recipe(words=ONE_AXIS, fate=_fate)))
    (figure,) = outcomes.outcome_figures(run)
    marks = _texts(figure.panels[0])
    _, axes = plt.subplots()
    figure.panels[0].draw(axes)
    columns, lines = (len(labels()) for labels in (axes.get_xticklabels, axes.get_yticklabels))
    plt.close()
    assert lines >= columns  # names of rows need no tilt
    assert marks.count("oom") == (outcomes.outcome_frame(run)["label"] == "EmbeddingBag").sum()
    assert {"✓", "½", "oom"} == set(marks)
    table = outcomes.failures_table(run)
    partly = next(row for row in table.rows if row[3].text == "partly")
    assert [v.text for v in partly[4:]] == ["2 of 3", "timeout: silent for 120 s"]
    assert "oom" in outcomes.failures_sentence(run)
    assert "partly" in outcomes.failures_sentence(run)


def test_wrong_in_one_process_is_wrong(tmp_path: Path) -> None:
    def fate(arm: Arm, cell: Cell, process: int) -> tuple[str, str]:
        return ("wrong", "differs") if arm.contender == "tt" and process == 2 else ("ok", "")

    run = Run.read(make_run(tmp_path, Recipe(words=ONE_AXIS, fate=fate)))
    found = outcomes.outcome_frame(run)
    assert set(found[found["label"].str.startswith("TT")]["status"]) == {"wrong"}


def test_no_map_where_nothing_failed(plain: Run) -> None:
    assert outcomes.outcome_figures(plain) == []
    assert outcomes.failures_sentence(plain).startswith("None: all ")


def test_a_cell_alone_has_no_sweeps_and_no_map(tmp_path: Path) -> None:
    words = ("+experiment=tt_vs_tbe", "sweep.D=[]", "sweep.B=[]", *NOTHING)
    run = Run.read(make_run(tmp_path, Recipe(words=words, replicates=1)))
    assert figures.sweep_figures(run) == []
    assert ratios.speedup_figures(run) == []
    assert {f.name for f in figures.timed_figures(run)} >= {"cost_and_memory", "forest", "roofline"}


def test_the_share_of_new_keys_is_an_axis(tmp_path: Path) -> None:
    # The panels are of the base point: other batch sizes have no place on their axes.
    words = ("+experiment=new_keys", "sweep.D=[16,64]", "sweep.B=[256]")
    drawn = figures.new_key_figures(Run.read(make_run(tmp_path, Recipe(words=words))))
    assert [panel.title for panel in drawn[0].panels] == ["D = 16", "D = 64"]
    _, axes = plt.subplots()
    drawn[0].panels[1].draw(axes)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "5", "20"]
    assert max(len(line.get_xdata()) for line in axes.lines) == 4
    assert {"dynamic", "TBE"} <= {name.get_text() for name in axes.texts}
    plt.close()


def test_a_run_without_timed_cells_has_no_figures(plain: Run) -> None:
    assert figures.timed_figures(dataclasses.replace(plain, frames={}, records=[])) == []


def test_strangers_get_a_colour_that_stays() -> None:
    assert style.colour_of("fbgemm_tbe") == style.COLOURS["fbgemm"]
    first = style.colour_of("somebody_elses")
    assert first == style.colour_of("somebody_elses")
    assert first in [style.COLOURS[name] for name in style.OTHER_STYLES]
    assert style.marker_of("somebody_elses")


def test_methods_of_one_figure_are_told_apart() -> None:
    methods = [*configure.load(["+experiment=quality"]).contenders, "planned"]
    columns = ("ratio", "auc_change", "auc_change_lo", "auc_change_hi")
    rows = pd.DataFrame([dict.fromkeys(columns, 1.0)])
    colours = [to_rgb(quality._curve(name, rows, "ratio").colour) for name in methods]
    assert min(math.dist(*pair) for pair in itertools.combinations(colours, 2)) > 0.2
    markers = [options["marker"] for options in serving.STYLE_OF_FORMAT.values()]
    assert len(set(markers)) == len(markers)


def test_colours_differ_and_the_page_has_each_in_both_themes() -> None:
    variables = style.css_variables()
    assert len(variables) == len(style.COLOURS) + len(style.STATUS_COLOURS) + 4
    css = (document.TEMPLATES / "page.css").read_text()
    for name in variables.values():
        assert len(re.findall(rf"{name}: #", css)) == 2, name


def test_drawings_have_names_of_their_own_and_words_that_are_text(plain: Run) -> None:
    (figure,) = figures.cost_figures(plain.in_mode("hot"))
    with style.theme():
        drawings = [style.inline_svg(p) for p in figure.panels]
    names = [n for d in drawings for n in re.findall(r'\bid="([^"]+)"', d)]
    assert len(names) == len(set(names))
    for drawing in drawings:
        used = re.findall(r"url\(#([^)]+)\)", drawing) + re.findall(r'href="#([^"]+)"', drawing)
        assert used
        assert set(used) <= set(re.findall(r'\bid="([^"]+)"', drawing))
    assert "TT rank 16</text>" in drawings[0]
    assert style.INK not in drawings[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [0.0, 5.0])
@pytest.mark.parametrize(
    "scale",
    [
        charts.Scale("", low=0),
        charts.Scale("", low=5, high=5),
        charts.Scale("", log=2, low=64, high=64),
        charts.Scale("", log=10, reach=(3.0, 3.0)),
        charts.Scale("", log=10, reach=(math.nan, math.nan)),
        charts.Scale("", low=0, headroom=1.3),
    ],
    ids=str,
)
def test_an_axis_of_one_value_has_two_ends(scale: charts.Scale, value: float) -> None:
    value = value or 1.0 if scale.log else value
    _, axes = plt.subplots()
    axes.set_autoscale_on(False)
    axes.set_xlim(1, 2)
    lines = [charts.Curve([value], [1.0], marker="o")]
    charts.curves(lines, scale, charts.Scale(""))(axes)
    low, high = axes.get_xlim()
    assert low < high
    plt.close()


@pytest.mark.filterwarnings("error")
def test_dollars_in_names_are_no_formulas(tmp_path: Path) -> None:
    title = "$x_$ a \\frac$"
    panel = Panel(title, charts.curves([charts.Curve([1, 10], [1, 10], "k")], *_log_scales()))
    figure = style.Figure("money", title, "", title, [panel])
    with style.theme():
        (drawn,) = style.draw_files(figure, title, tmp_path)
    assert title in drawn
    assert "mathdefault" not in drawn


def _log_scales() -> tuple[charts.Scale, charts.Scale]:
    return charts.Scale("$x_$", log=10), charts.Scale("$y_$", log=10)


def test_an_axis_reaches_and_has_headroom_at_once() -> None:
    _, axes = plt.subplots()
    charts.curves(
        [charts.Curve([1.0, 2.0], [1.0, 2.0])],
        charts.Scale("", reach=(0.0, 10.0), headroom=1.5),
        charts.Scale("", low=2.0),
    )(axes)
    assert axes.get_xlim() == (0.0, 15.0)
    assert axes.get_ylim()[0] == 2.0
    plt.close()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([1.0, 1.1, 1.2, 5.0], [0.6, 1.1, 1.6, 5.0]),  # about the mean of the three
        ([9.9, 9.95], [9.5, 10.0]),  # below the upper end
        ([9.8, 12.0], [9.5, 10.0]),  # a name of a point above the panel moves the next one
        ([0.0, 0.1, 0.6], [0.0, 0.5, 1.0]),  # above the lower end
        ([2.0, 2.2, 2.75, 3.0], [1.7375, 2.2375, 2.7375, 3.2375]),  # two blocks become one
    ],
)
def test_names_move_as_little_as_keeps_them_apart(
    wanted: list[float], expected: list[float]
) -> None:
    assert charts.spread_apart(wanted, 0.5, 0.0, 10.0) == pytest.approx(expected)


def test_long_names_leave_room_for_the_plot_and_keep_their_ends(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    run_path = make_run(tmp_path, Recipe(words=(*ONE_AXIS, "sweep.D=[16,32]"), replicates=1))
    points = run_path / "points.jsonl"
    points.write_text(points.read_text().replace('"label": "', f'"label": "{"a long name " * 12}'))
    with style.theme():
        for figure in figures.timed_figures(Run.read(run_path).in_mode("hot")):
            canvas = style.draw_sheet(figure, "")
            canvas.draw_without_rendering()
            for axes in canvas.axes[: len(figure.panels)]:
                shown = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels()]
                ends = [t.get_window_extent() for t in shown if "…" in t.get_text()]
                assert axes.bbox.width > 0.25 * canvas.bbox.width / len(figure.panels), figure.name
                assert all(end.x0 > -1 for end in ends), figure.name
                assert all(end.x1 < canvas.bbox.width + 1 for end in ends), figure.name
            plt.close(canvas)
    assert not recwarn.list
    names = [charts.shorten(f"{'a' * 99} rank {rank}") for rank in (16, 32)]
    assert [name.endswith(f" rank {rank}") for name, rank in zip(names, (16, 32), strict=True)]
    assert max(map(len, names)) <= charts.MAX_NAME_LETTERS


def test_the_baseline_alone_has_no_figure_of_ratios(tmp_path: Path) -> None:
    sweep = ("sweep.T=[]", "sweep.L=[]", "sweep.s=[]", "contenders=[torch]")
    recipe = Recipe(words=("+experiment=tbe_vs_torch", *sweep), replicates=1)
    run = Run.read(make_run(tmp_path, recipe)).in_mode("hot")
    names = {figure.name for figure in figures.timed_figures(run)}
    assert "sweep_throughput" in names
    assert "sweep_ratio" not in names


def test_names_of_near_points_stay_next_to_them_and_apart() -> None:
    trains = charts.Curve([9.0, 11.0, 18.0], [2.40, 2.50, 2.60], names=["a", "b", "c"])
    other = charts.Curve([2000.0], [2.7], names=["EmbeddingBag"])
    scale = charts.Scale("", log=10)
    _, axes = plt.subplots()
    charts.curves([trains, other], scale, scale, name_position="points")(axes)
    axes.figure.canvas.draw()
    boxes = {t.get_text(): t.get_window_extent() for t in axes.texts}
    plt.close()
    tall = max(box.height for box in boxes.values())
    middles = {name: (box.y0 + box.y1) / 2 for name, box in boxes.items()}
    assert middles["a"] < middles["b"] < middles["c"]
    for line in (trains, other):
        for name, y in zip(line.names, line.y, strict=True):
            assert abs(axes.transData.transform((1, y))[1] - middles[name]) < 2 * tall
    pairs = itertools.combinations(boxes.values(), 2)
    assert not any(one.overlaps(another) for one, another in pairs)


@pytest.mark.parametrize("position", ["points", "upper left"])
@pytest.mark.parametrize("heights", [(2.4, 2.38, 2.5), (2.4, 2.41, 2.39), (2.4, 2.9, 2.4)])
def test_a_line_and_its_intervals_strike_none_of_its_names_out(
    heights: tuple[float, ...], position: str
) -> None:
    trains = charts.Curve([22.0, 59.0, 75.0], heights, names=["TT 8", "TT 16", "TT rank 32"])
    low, high = [0.7 * y for y in heights], [3.0 * y for y in heights]
    trains = dataclasses.replace(trains, low=low, high=high)
    tall = charts.Curve([65.0, 65.0], [0.5, 9.0], names=["TBE", "torch"])
    scale = charts.Scale("", log=10)
    _, axes = plt.subplots()
    charts.curves([trains, tall], scale, scale, name_position=position)(axes)
    axes.figure.canvas.draw()
    points = list(zip(trains.x, trains.y, strict=True))
    strokes = [points, *([(x, y), (x, z)] for x, y, z in zip(trains.x, low, high, strict=True))]
    lines = [axes.transData.transform_path(path.Path(stroke)) for stroke in strokes]
    boxes = [Text.get_window_extent(name) for name in axes.texts if name.get_text() in trains.names]
    plt.close()
    assert len(boxes) == 3
    assert not any(line.intersects_bbox(box, filled=False) for line in lines for box in boxes)


def test_names_of_near_ceilings_stand_apart_right_of_the_panel() -> None:
    marks = [
        charts.Mark(2961, annotation="copy 2,961"),
        charts.Mark(3350, annotation="theory 3,350"),
    ]
    scale = charts.Scale("", log=10, low=1.0, high=5000.0)
    points = charts.Curve([1, 2], [10, 20], label="points")
    gather = charts.Curve([1, 2], [2700, 2800], edge_name="gather")
    canvas, axes = plt.subplots(layout="constrained")
    charts.curves([points, gather], scale, scale, name_position="below", marks=marks)(axes)
    canvas.draw_without_rendering()
    boxes = [Text.get_window_extent(name) for name in axes.texts]  # without the thin lines
    panel, names = axes.bbox, axes.get_legend()
    assert names is not None
    legend = names.get_window_extent()
    label = axes.xaxis.label.get_window_extent()
    plt.close()
    assert len(boxes) == 3
    assert all(box.x0 > panel.x1 for box in boxes)
    assert not any(one.overlaps(another) for one, another in itertools.combinations(boxes, 2))
    assert legend.y1 < label.y0  # below the panel, so that no part of the scale is left for it


def test_a_legend_of_long_names_leaves_room_for_its_panel() -> None:
    names = [f"dynamic with {share} % new keys" for share in (1, 5, 20)]
    scale = charts.Scale("", log=10, low=1.0, high=100.0)
    curves = [charts.Curve([1, 2], [10, 20], label=name) for name in names]
    canvas, grid = plt.subplots(1, 2, figsize=(8.4, 4.0), layout="constrained")
    for axes in grid:
        charts.curves(curves, scale, scale, name_position="below", columns=3)(axes)
    canvas.draw_without_rendering()
    legend_boxes = [axes.get_legend().get_window_extent() for axes in grid]
    shares = [axes.bbox.width / canvas.bbox.width for axes in grid]
    plt.close()
    assert not legend_boxes[0].overlaps(legend_boxes[1])
    assert all(share > 0.35 for share in shares), shares


def test_the_scale_of_a_roofline_is_that_of_its_points(plain: Run) -> None:
    """No decade is left empty for a legend, and contenders of one size are next to each other."""
    (figure,) = figures.roofline_figures(plain.in_mode("hot"))
    _, axes = plt.subplots()
    figure.panels[0].draw(axes)
    drawn = [float(y) for line in axes.lines for y in np.asarray(line.get_ydata()) if y > 0]
    low, high = axes.get_ylim()
    plt.close()
    assert low > min(drawn) / 3
    assert high < 3 * max(drawn)
    shifts = [figures._shift_factor(["a", "b"], name) for name in ("a", "b")]
    assert math.prod(shifts) == pytest.approx(1)
    assert shifts[0] < 1


def test_contenders_of_the_same_memory_are_compared_by_time_alone(tmp_path: Path) -> None:
    run = Run.read(make_run(tmp_path, Recipe(words=ONE_AXIS, replicates=1)))
    run.table["weights_bytes"] = 1000.0
    (figure,) = figures.cost_figures(run)
    assert figure.title.startswith("Time on ")
    words = _texts(figure.panels[0])
    assert words
    assert all(re.fullmatch(r"[\d.]+ [mµ]s, [\d.]+×", word) for word in words)


def test_tables_of_keys_have_colours_of_their_own() -> None:
    names = ("scored", "scored_growing", "sorted_keys", "lines", "lines_huge", "cykhash")
    assert len({style.colour_of(name) for name in names}) == len(names)


@pytest.mark.parametrize(("at", "drawn"), [(1.0, False), (3.0, True)])
def test_a_line_far_from_all_points_leaves_no_empty_scale(at: float, drawn: bool) -> None:
    scale = charts.Scale("", log=10)
    _, axes = plt.subplots()
    charts.curves([charts.Curve([1, 2], [5, 7])], scale, scale, marks=[charts.Mark(at)])(axes)
    low, count = float(axes.get_ylim()[0]), len(axes.lines)
    plt.close()
    assert count == 1 + drawn
    assert (low < 3.0) is drawn


def test_almost_equal_values_have_a_scale(recwarn: pytest.WarningsRecorder) -> None:
    points = [charts.Curve([x], [1.0], names=[""]) for x in (5120.0, 5120.000001)]
    scale = charts.Scale("", log=10)
    _, axes = plt.subplots()
    charts.curves(points, scale, scale, name_position="points")(axes)
    low, high = axes.get_xlim()
    plt.close()
    assert low < 5120 < high
    assert not recwarn.list
