"""The noise floor: compare every point of the gate with itself in many pairs of processes."""

from __future__ import annotations

import datetime
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.config.schema import Config, UsageError
from experiments.gate import pages, setup
from experiments.gate.pairs import Conductor, Trial
from experiments.gate.rules import Request, Rules, Stage
from experiments.paths import ROOT
from experiments.report import text
from experiments.report.charts import Row, forest
from experiments.report.document import Section
from experiments.report.style import COLOURS, Figure
from experiments.report.tables import Table, Value
from experiments.results.store import RunStore, read_json, read_records
from experiments.run.progress import Display
from experiments.timing import statistics

SMOKE_PAIRS = 2
HOW = (
    "Both processes of a pair run the same code, so every effect but 1 is noise: of memory, "
    "of the core, of what else the machine did.",
    f"MAD is the median distance from no effect. The gate's margin at a point is "
    f"{statistics.NOISE_FACTOR:g}·MAD/√pairs, but no less than gate.min_effect; a point that needs "
    "more than gate.max_margin is not gated.",
)


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Measure, save noise.json and report; return the exit status."""
    try:
        if config.dry_run:
            return setup.plan(config, f"{config.gate.floor_pairs} pairs of processes")
        start = setup.start(config, words)
        both, store = setup.one_revision(start, print), start.create()
    except UsageError as error:
        return setup.refuse(error)
    began = time.monotonic()
    count = SMOKE_PAIRS if start.smoke else config.gate.floor_pairs
    names = [p.name for p in start.points]
    rules = Rules(count, count, dict.fromkeys(names, config.gate.min_effect))
    trial, status = Trial(), "finished"
    with Display(count) as display:
        display.say(setup.heading(start, f"{count} pairs of processes"))
        conductor = Conductor(config, start.device, start.points, rules, both, store, display)
        try:
            while left := [n for n in names if n not in trial.evidence.lost]:
                if len(trial.evidence.first.get(left[0], [])) >= count:
                    break
                conductor.step(trial, Request(Stage.first, tuple(left)))
                display.finish("")
        except KeyboardInterrupt:
            status = "interrupted"
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = setup.content(start.environment, config, trial.evidence.first, when)
    place = store.write_json("noise.json", found)
    if status == "finished" and not start.smoke:
        kept = RunStore(ROOT / config.gate.noise)
        place = kept.write_json(setup.name(start.environment, config), found)
    seconds = round(time.monotonic() - began, 1)
    store.write_json(
        "run.json",
        {"experiment": config.name, "question": question, "status": status, "seconds": seconds},
    )
    answer, where = write(store.path)
    print(f"\n{answer}\n\nnoise floor: {pages.folder_name(place)}\nreport: {where}")
    return 130 if status == "interrupted" else 5 if trial.failed else 0


def write(path: Path) -> tuple[str, str]:
    """Write all files that follow from the stored pairs; return (answer, path of the page)."""
    config = OmegaConf.load(path / "config.yaml")
    points: Mapping[str, Mapping[str, Any]] = json.loads((path / "noise.json").read_text())[
        "points"
    ]
    failed = {r["point"]: r for r in read_records(path) if r["status"] != "ok"}
    pairs, least = int(config.timing.replicates), float(config.gate.min_effect)
    margins = {n: statistics.margin(least, p["mad"], pairs) for n, p in points.items()}
    answer = sentence(points, margins, pairs)
    notices = []
    if config.timing.max_rows:
        notices.append("Smoke run: tiny tables, two pairs: nothing here means anything.")
    if read_json(path, "run.json").get("status") != "finished":
        notices.append("This run was interrupted; it is not kept as the machine's noise floor.")
    notices += [f"{n}: {r['status']} ({r['reason']})" for n, r in failed.items()]
    lines = [
        _row(name, p["effects"], margins[name]) for name, p in points.items() if p["pairs"] > 1
    ]
    drawn = []
    if lines:
        caption = (
            "Bars: 95 % interval of the mean over all pairs; small dots: single pairs. Grey: "
            "within the gate's margin. All of it is noise."
        )
        panel = forest("A against A", lines, "time of one ÷ time of the other")
        title = "What one revision seems to differ from itself"
        drawn.append(Figure("funnel", title, caption, "", [panel]))
    sections = [Section("Noise by point", figures=drawn, table=table(points, margins))]
    report = pages.page_of(path, str(config.name), [answer], sections, notices=notices, how=HOW)
    return answer, pages.write(path, report)


def sentence(
    points: Mapping[str, Mapping[str, Any]], margins: Mapping[str, float], pairs: int
) -> str:
    """Describe the noise floor and what it means for the gate."""
    if not points:
        return "No point could be measured."
    worst = max(points, key=lambda n: points[n]["mad"])
    low = min(p["mad"] for p in points.values())
    return (
        f"One pair of processes differs from itself by {100 * low:.2g} to "
        f"{100 * points[worst]['mad']:.2g} % (median, best and worst point: {worst}); with {pairs} "
        f"pairs the gate's margins are {100 * min(margins.values()):.2g} to "
        f"{100 * max(margins.values()):.2g} %."
    )


def table(points: Mapping[str, Mapping[str, Any]], margins: Mapping[str, float]) -> Table:
    """Return one row per point."""
    rows = []
    for name, p in points.items():
        effect = statistics.combine(p["effects"])
        rows.append(
            [
                Value(name),
                Value(str(p["pairs"]), p["pairs"]),
                pages.ratio(effect.ratio, effect.lo, effect.hi),
                pages.percent(p["mad"]),
                pages.percent(p["p95"]),
                pages.percent(margins[name]),
            ]
        )
    heads = ["point", "pairs", "A ÷ A [95\u00a0%]", "MAD", "95 % of pairs within", "margin"]
    return Table(heads, rows)


def _row(name: str, effects: Sequence[float], margin: float) -> Row:
    effect = statistics.combine(effects)
    return Row(
        name,
        effect.ratio,
        COLOURS["tbe"],
        effect.lo,
        effect.hi,
        dots=[math.exp(x) for x in effects],
        margin=margin,
        hollow=effect.lo <= 1 <= effect.hi,
        words=text.times(effect.ratio),
    )
