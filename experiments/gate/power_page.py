"""The report of a power experiment: both rates with their intervals, and every trial's effect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from omegaconf import OmegaConf

from experiments.gate import page, power
from experiments.report.palette import COLOURS, GRID, INK
from experiments.report.style import Drawing, Figure, Panel
from experiments.report.tables import Table, Value
from experiments.results.store import RunStore, read_json

STILL, SLOWED = COLOURS["tbe"], COLOURS["tt"]


def write(path: Path, info: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """All files that follow from the stored pairs; (answer, place of the page)."""
    store, trials = RunStore(path), power.complete(path)
    kept = dict(info or read_json(path, "run.json"))
    rates = power.rates(trials)
    store.write_json("power.json", {"rates": rates, "trials": trials})
    store.write_json("run.json", {"experiment": "gate_power", **kept, "trials": len(trials)})
    answer = sentence(rates, trials)
    return answer, page.write(path, _page(path, answer, rates, trials, kept))


def sentence(rates: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> str:
    """Both rates."""
    if not trials:
        return "No trial came to its end."
    slow = max((t["slow"] for t in trials), default=1.0)
    parts = []
    if rates["false_alarms"]["of"]:
        parts.append(f"{in_words(rates['false_alarms'])} gates of unchanged code raised an alarm")
    if rates["caught"]["of"]:
        parts.append(
            f"points slowed by {100 * (slow - 1):.3g} % were caught in {in_words(rates['caught'])}"
        )
    return "; ".join(parts) + "."


def in_words(rate: Mapping[str, Any]) -> str:
    """'0 of 200 (0 %, 95 % interval 0 to 1.9 %)'."""
    if not rate["of"]:
        return "0 of 0"
    lo, hi = (f"{100 * rate[k]:.3g}" for k in ("lo", "hi"))
    share = f"{100 * rate['rate']:.3g} %, 95 % interval {lo} to {hi} %"
    return f"{rate['hits']} of {rate['of']} ({share})"


def _page(
    path: Path,
    answer: str,
    rates: Mapping[str, Any],
    trials: Sequence[Mapping[str, Any]],
    info: Mapping[str, Any],
) -> page.Page:
    config = OmegaConf.load(path / "config.yaml")
    rules = power.kept_rules(RunStore(path))
    assert rules is not None
    slow = max((t["slow"] for t in trials), default=1.0)
    more = [
        f"A first set of pairs alone, without confirmation, would have raised one in "
        f"{in_words(rates['false_screened'])}.",
        f"Unsure of a point in {in_words(rates['unsure'])} cases without a change.",
        f"At least one point caught in {in_words(rates['caught_by_gate'])} slowed gates.",
    ]
    pairs = f"{rules.pairs} pairs of processes, up to {rules.most_pairs} where unsure"
    notices = []
    if config.timing.max_rows:
        notices.append("Smoke run: tiny tables, one pair: nothing here means anything.")
    if info.get("status") != "finished":
        notices.append("This run is not complete; the same command goes on with it.")
    tiles = [
        _tile(rates["false_alarms"], "of gates without a change raised an alarm"),
        _tile(rates["caught"], f"of points slowed by {100 * (slow - 1):.3g} % were caught"),
        (str(len(trials)), "trials of the whole gate", ""),
    ]
    words = [
        f"Every trial is a whole gate ({pairs}; then as many again to confirm) whose processes "
        "no other trial uses. In slowed trials every point of head takes "
        f"{slow:g} times its own time, by waiting inside of what is timed.",
        "That all are slowed at once makes it no easier to be caught: each is judged on its own, "
        "and the correction for many points is then at its strictest.",
    ]
    sections = [
        page.Section("Rates by point", words, rate_table(rates)),
        page.Section("Every trial", figures=[figure(trials, rules.margins)] if trials else []),
    ]
    return page.Page("gate_power", answer, more, tiles, notices, sections)


def _tile(rate: Mapping[str, Any], what: str) -> tuple[str, str, str]:
    share = "–" if rate["rate"] is None else f"{100 * rate['rate']:.3g} %"
    return share, f"{what} ({rate['hits']} of {rate['of']})", ""


def rate_table(rates: Mapping[str, Any]) -> Table:
    """A row per point."""
    rows = [
        [Value(name), *_cells(found["false_alarms"]), *_cells(found["caught"])]
        for name, found in rates["points"].items()
    ]
    heads = ["point", "false alarms", "[95\u00a0%]", "caught when slowed", "[95\u00a0%]"]
    return Table(heads, rows)


def _cells(rate: Mapping[str, Any]) -> list[Value]:
    bounds = f"{100 * rate['lo']:.3g} – {100 * rate['hi']:.3g} %"
    known = math.nan if rate["rate"] is None else rate["rate"]
    return [Value(f"{rate['hits']} of {rate['of']}", known), Value(bounds)]


def figure(trials: Sequence[Mapping[str, Any]], margins: Mapping[str, float]) -> Figure:
    """A strip per point: the effect that each trial's first set found."""
    panel = Panel("First set of pairs", _strips(trials, margins), 8.0, 0.55 * len(margins) + 1.2)
    return Figure(
        "trials",
        "What every trial measured",
        "A dot is the mean over the first set of pairs of one trial: blue without a change, orange "
        "slowed. Grey: within the margin. The tick is the truth.",
        f"{len(trials)} trials",
        [panel],
    )


def _strips(trials: Sequence[Mapping[str, Any]], margins: Mapping[str, float]) -> Drawing:
    def draw(axes: Axes) -> None:
        for place, (name, margin) in enumerate(margins.items()):
            axes.fill_betweenx(
                (place - 0.45, place + 0.45), 1 / (1 + margin), 1 + margin, color=GRID, lw=0
            )
            for trial in trials:
                effects = trial["effects"].get(name, {}).get("first")
                if effects:
                    slowed = trial["slow"] > 1
                    shift = 0.18 if slowed else -0.18
                    jitter = ((trial["trial"] * 0.618) % 1 - 0.5) * 0.28
                    axes.plot(
                        math.exp(statistics.fmean(effects)), place + shift + jitter, ".",
                        color=SLOWED if slowed else STILL, ms=4, alpha=0.75,
                    )  # fmt: skip
        for slow in {t["slow"] for t in trials}:
            axes.axvline(slow, color=INK, lw=0.9, ls="-" if slow == 1 else (0, (4, 3)))
        axes.set_yticks(range(len(margins)), list(margins))
        axes.set_ylim(len(margins) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time of head ÷ time of base")

    return draw
