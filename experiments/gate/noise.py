"""The noise floor: compare every point of the gate with itself in many pairs of processes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.config.schema import Config
from experiments.gate import pages, setup
from experiments.gate.pairs import Trial, TrialRunner
from experiments.gate.rules import Request, Rules, Stage
from experiments.gate.setup import NoiseFloor
from experiments.paths import ROOT, shown_path
from experiments.report import document, tables, text
from experiments.report.charts import forest
from experiments.report.document import Section
from experiments.report.style import COLOURS, Figure
from experiments.report.tables import Table
from experiments.results.store import RunStore, read_json, read_records
from experiments.run.progress import Display
from experiments.timing import statistics

SMOKE_PAIRS = 2
HOW_TO_READ = (
    "Both processes of a pair run the same code, so every effect other than 1 is noise: of memory "
    "layout, of the core, of other load on the machine.",
    f"MAD is the median distance of log(A ÷ A) from 0. The gate's margin at a point is "
    f"{statistics.NOISE_FACTOR:g}·MAD/√pairs, but at least gate.min_effect; a point that needs "
    "more than gate.max_margin is not gated.",
)


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Measure, save noise.json and report; return the exit status.

    A run that finished at full sizes, and measured a point, also replaces the machine's floor in
    the folder gate.noise. The exit status is 0; 5 if a point failed; 130 if it was interrupted.

    Raises:
        UsageError: the run cannot start.
    """
    if config.dry_run:
        return setup.print_plan(
            config, f"{text.count(config.gate.floor_pairs, 'pair')} of processes"
        )
    start = setup.start_gate(config, words)
    side_folders, store = setup.head_on_both_sides(start, print), start.create()
    begin_s = time.monotonic()
    num_pairs = SMOKE_PAIRS if start.is_smoke else config.gate.floor_pairs
    names = [point.name for point in start.points]
    rules = Rules(num_pairs, num_pairs, dict.fromkeys(names, config.gate.min_effect))
    trial, status = Trial(), "finished"
    with Display(num_pairs) as display:
        display.say(setup.heading(start, f"{text.count(num_pairs, 'pair')} of processes"))
        runner = TrialRunner(
            config, start.device, start.points, rules, side_folders, store, display
        )
        try:
            while names_left := [name for name in names if name not in trial.evidence.lost_points]:
                if len(trial.evidence.first.get(names_left[0], [])) >= num_pairs:
                    break
                runner.measure_pair(trial, Request(Stage.first, tuple(names_left)))
                display.finish("")
        except KeyboardInterrupt:
            status = "interrupted"
    time_utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    floor = setup.noise_floor_content(start.environment, config, trial.evidence.first, time_utc)
    floor_path = store.write_json("noise.json", floor)
    # Where every point failed, an earlier floor is worth more than an empty one.
    if status == "finished" and not start.is_smoke and floor["points"]:
        floors = RunStore(ROOT / config.gate.noise)
        floor_path = floors.write_json(setup.floor_file(start.environment, config), floor)
    setup.write_info(store, config, question, status, begin_s)
    print(f"\n{write(store.path)}\n\nnoise floor: {shown_path(floor_path)}")
    print(f"report: {shown_path(store.path / 'index.html')}")
    return 130 if status == "interrupted" else 5 if trial.failures else 0


def write(path: Path) -> str:
    """Write the page from noise.json, or from a killed run's pairs; return the answer."""
    config = OmegaConf.load(path / "config.yaml")
    points: NoiseFloor = (read_json(path, "noise.json") or _floor_of_killed(path))["points"]
    failures = {
        record["point"]: record for record in read_records(path) if record["status"] != "ok"
    }
    pairs, min_effect = int(config.timing.replicates), float(config.gate.min_effect)
    margins = {
        name: statistics.gate_margin(min_effect, noise["mad"], pairs)
        for name, noise in points.items()
    }
    answer = sentence(points, margins, pairs)
    notices = []
    if config.timing.max_rows:
        notices.append("Smoke run: tiny tables and two pairs; the numbers have no meaning.")
    if read_json(path, "run.json").get("status") != "finished":
        notices.append("This run was interrupted; it is not stored as the machine's noise floor.")
    notices += [
        f"{point}: {record['status']} ({record['reason']})" for point, record in failures.items()
    ]
    section = Section(
        "Noise by point", figures=_figures(points, margins), table=table(points, margins)
    )
    report = pages.page_of(
        path, str(config.name), [answer], [section], notices=notices, how_to_read=HOW_TO_READ
    )
    document.write(path, report)
    return answer


def _figures(points: NoiseFloor, margins: Mapping[str, float]) -> list[Figure]:
    """Return the figure of the effects of points with several pairs; [] without such a point."""
    rows = []
    for name, noise in points.items():
        if noise["pairs"] > 1:
            effects, margin, colour = noise["effects"], margins[name], COLOURS["tbe"]
            effect = statistics.combine_processes(effects)
            is_hollow = effect.lo <= 1 <= effect.hi
            rows.append(pages.effect_row(name, effects, margin, colour=colour, is_hollow=is_hollow))
    if not rows:
        return []
    caption = (
        "Bars: 95 % interval of the mean over all pairs; small dots: single pairs. Grey: "
        "within the gate's margin. All of it is noise."
    )
    panel = forest("A against A", rows, "time of one ÷ time of the other")
    return [Figure("funnel", "Difference of a revision from itself", caption, "", [panel])]


def _floor_of_killed(path: Path) -> dict[str, Any]:
    """Return the content of noise.json for a run that was killed before it wrote one."""
    trial = Trial()
    for record in read_records(path):
        trial.add_record(record)
    environment, config = read_json(path, "environment.json"), setup.read_stored_config(path)
    return setup.noise_floor_content(environment, config, trial.evidence.first, "")


def sentence(points: NoiseFloor, margins: Mapping[str, float], pairs: int) -> str:
    """State the noise of the best and the worst point, and the gate's margins."""
    if not points:
        return "No point could be measured."
    noisiest_point = max(points, key=lambda point: points[point]["mad"])
    min_mad = min(noise["mad"] for noise in points.values())
    return (
        f"One pair of processes differs from itself by {100 * min_mad:.2g} to "
        f"{100 * points[noisiest_point]['mad']:.2g} % (median, best and worst point: "
        f"{noisiest_point}); with {text.count(pairs, 'pair')} "
        f"the gate's margins are {100 * min(margins.values()):.2g} to "
        f"{100 * max(margins.values()):.2g} %."
    )


def table(points: NoiseFloor, margins: Mapping[str, float]) -> Table:
    """Return the table of the noise, one row per point."""
    return Table.of(
        [{"point": name, "margin": margins[name], **noise} for name, noise in points.items()],
        {
            "point": "point",
            "pairs": lambda point: tables.count_value(point["pairs"]),
            "A ÷ A [95\u00a0%]": lambda point: pages.effect_value(
                statistics.combine_processes(point["effects"])
            ),
            "MAD": lambda point: pages.margin_value(point["mad"]),
            "95 % of pairs within": lambda point: pages.margin_value(point["p95"]),
            "margin": lambda point: pages.margin_value(point["margin"]),
        },
    )
