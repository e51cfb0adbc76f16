"""The error rates of the gate: whole gates of a revision against itself, and against a slowed copy.

A trial is one whole gate: all its pairs of processes, and its verdicts. No pair of processes serves
two trials, so trials are as independent as the machine permits. `run` measures the trials in the
order of `schedule`; `write` computes rates and the page from the stored records. An interrupted run
can be resumed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import pandas as pd
from matplotlib.axes import Axes
from omegaconf import OmegaConf

from experiments.config.schema import Config, UsageError
from experiments.gate import pages, setup
from experiments.gate.pairs import Trial, TrialRunner
from experiments.gate.rules import Rules, decide, next_request
from experiments.paths import shown_path
from experiments.report import document, text
from experiments.report.document import Page, Section, Tile
from experiments.report.style import COLOURS, GRID, INK, Figure, Panel
from experiments.report.tables import Table, Value
from experiments.results.store import Record, RunStore, read_json, read_records
from experiments.run.progress import Display
from experiments.timing.statistics import Verdict, wilson_interval


class ErrorRate(TypedDict):
    """The share of cases, which are trials or points of trials, with an event.

    `lo` and `hi` are the ends of Wilson's 95 % interval of `rate`.
    """

    hits: int  # number of cases with the event
    of: int  # number of all cases
    rate: float | None  # hits ÷ of; None without a case
    lo: float
    hi: float


Outcome = Mapping[str, Any]  # a complete trial, as `trial_outcome` returns it
Rates = Mapping[str, Any]  # as `compute_rates` returns them


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Run all trials, or those that an unfinished run lacks, then report; return the exit status.

    The exit status is 0; 5 if a process failed in a trial; 130 if the run was interrupted.

    Raises:
        UsageError: the run cannot start.
    """
    if config.gate.inject <= 1 and config.gate.slowed_trials:
        raise UsageError("gate.slowed_trials need gate.inject, e.g. gate.inject=1.10")
    if config.dry_run:
        trials = f"{text.count(len(schedule(config)), 'trial')} of a gate"
        return setup.print_plan(config, f"{trials} of {setup.describe_pairs(config)}")
    start = setup.start_gate(config, words)
    side_folders = setup.head_on_both_sides(start, print)
    store, records = setup.find_unfinished(start) or (start.create(), [])
    begin_s = time.monotonic()
    slowdowns = schedule(config)
    rules = Rules.load(store.path) or start.rules
    rules.save(store)
    with Display(len(slowdowns)) as display:
        display.say(setup.heading(start, f"{text.count(len(slowdowns), 'trial')} of the gate"))
        if records:
            display.say(f"continuing {store.path.name}")
        runner = TrialRunner(
            config,
            start.device,
            start.points,
            rules,
            side_folders,
            store,
            display,
            num_pairs=1 + max((record["pair"] for record in records), default=-1),
        )
        status = _run_trials(runner, replay(records))
    setup.write_info(store, config, question, status, begin_s)
    print(f"\n{write(store.path)}\n\nreport: {shown_path(store.path / 'index.html')}")
    return {"interrupted": 130, "incomplete": 5}.get(status, 0)


def schedule(config: Config) -> list[float]:
    """Return the factor by which each trial slows head, 1 for unchanged code.

    Slowed trials are spread evenly. A smoke run has one trial of each kind at most.
    """
    gate, is_smoke = config.gate, bool(config.timing.max_rows)
    num_unchanged, num_slowed = (
        min(n, 1) if is_smoke else n for n in (gate.trials, gate.slowed_trials)
    )
    num_trials = num_unchanged + num_slowed
    slowed_numbers = {(2 * n + 1) * num_trials // (2 * num_slowed) for n in range(num_slowed)}
    return [gate.inject if n in slowed_numbers else 1.0 for n in range(num_trials)]


def completed_outcomes(path: Path) -> list[dict[str, Any]]:
    """Return the outcome of each completed trial of a run directory, by number."""
    rules = Rules.load(path)
    if rules is None:
        return []
    names = list(rules.margins)
    trials = replay(read_records(path)).values()
    completed_trials = [
        trial for trial in trials if next_request(names, trial.evidence, rules) is None
    ]
    return [
        trial_outcome(trial, names, rules)
        for trial in sorted(completed_trials, key=lambda trial: trial.number)
    ]


def _run_trials(runner: TrialRunner, earlier_trials: dict[int, Trial]) -> str:
    """Run the trials of `schedule` that are not complete; return the status of the run.

    The status is "finished", "interrupted", or "incomplete" if a process failed in a trial: such a
    trial does not count. `earlier_trials` are those of an unfinished run, by number.
    """
    display, rules, num_failures = runner.display, runner.rules, 0
    names = list(rules.margins)
    try:
        for number, slow in enumerate(schedule(runner.config)):
            earlier_trial = earlier_trials.get(number)
            trial = earlier_trial or Trial(number, slow)
            was_complete = (
                earlier_trial and next_request(names, earlier_trial.evidence, rules) is None
            )
            runner.finish(trial)
            if trial.failures:
                num_failures += 1
                name, failures_by_side = next(iter(trial.failures.items()))
                reason = next(iter(failures_by_side.values())).reason
                display.finish(f"failed at {name}: {reason}")
            else:
                display.finish(
                    "" if was_complete else format_trial(trial_outcome(trial, names, rules))
                )
    except KeyboardInterrupt:
        display.say("interrupted: the same command continues here")
        return "interrupted"
    if num_failures:
        display.say(f"{text.count(num_failures, 'trial')} failed; the same command continues")
    return "incomplete" if num_failures else "finished"


def replay(records: Sequence[Record]) -> dict[int, Trial]:
    """Return the trials of stored records by number, complete or not.

    A trial in which a process failed does not count: its next attempt is returned, without
    evidence.
    """
    trials: dict[int, Trial] = {}
    for record in records:
        number, attempt = record["trial"], record.get("attempt", 1)
        trial = trials.get(number)
        if trial is None or trial.attempt < attempt:
            trial = trials[number] = Trial(number, record["slow"], attempt)
        trial.add_record(record)
    for number, trial in trials.items():
        if trial.failures:
            trials[number] = Trial(number, trial.slow, trial.attempt + 1)
    return trials


def trial_outcome(trial: Trial, names: Sequence[str], rules: Rules) -> dict[str, Any]:
    """Return the outcome of a complete trial, which is an entry of `trials` in power.json.

    `names` are the gated points, those of `rules.margins`.

    Entries: `trial` (number), `slow` (factor), `alarm` (whether a point is SLOWER), the names of
    points by verdict (`slower`, `faster`, `same`, `unsure`), `screened` (points that the first set
    alone called slower), `failed`, and `effects`, {point: {"first": [...], "second": [...]}} in
    logarithms.
    """
    rulings = decide(names, trial.evidence, rules)
    by_verdict: dict[str, list[str]] = defaultdict(list)
    for name, ruling in rulings.items():
        by_verdict[ruling.verdict.value].append(name)
    effects = {
        name: {"first": list(ruling.first), "second": list(ruling.second)}
        for name, ruling in rulings.items()
    }
    return {
        "trial": trial.number,
        "slow": trial.slow,
        "alarm": bool(by_verdict[Verdict.SLOWER.value]),
        **{verdict.value.lower(): by_verdict[verdict.value] for verdict in Verdict},
        "screened": [name for name, ruling in rulings.items() if ruling.screened is Verdict.SLOWER],
        "failed": sorted(trial.failures),
        "effects": effects,
    }


def format_trial(trial: Outcome) -> str:
    """Format a trial as a line for the terminal."""
    change = f"slowed {trial['slow']:g}×" if trial["slow"] > 1 else "A/A"
    counts = ", ".join(
        f"{len(trial[verdict.value.lower()])} {verdict.value.lower()}"
        for verdict in Verdict
        if trial[verdict.value.lower()]
    )
    num_pairs = max(
        (len(effect["first"]) + len(effect["second"]) for effect in trial["effects"].values()),
        default=0,
    )
    alarm = "ALARM" if trial["alarm"] else "quiet"
    return f"{change:<12} {alarm:<6} {counts} ({text.count(num_pairs, 'pair')})"


def compute_rates(trials: Sequence[Outcome]) -> dict[str, Any]:
    """Return false-alarm and detection rates of complete trials, an `ErrorRate` each.

    Rates of trials of unchanged code: `false_alarms`, the trials with a point that is SLOWER;
    `false_screened`, with a point that is SLOWER by the first set alone; `false_faster`, with a
    point that is FASTER; `unsure`, the points that are UNSURE. Rates of slowed trials: `caught`,
    the points that are SLOWER; `caught_by_gate`, the trials with such a point. `points` has
    `false_alarms` and `caught` of each point by name.
    """
    unchanged_trials = [trial for trial in trials if trial["slow"] == 1]
    slowed_trials = [trial for trial in trials if trial["slow"] > 1]
    slowed_points = [name for trial in slowed_trials for name in trial["effects"]]
    caught_points = [name for trial in slowed_trials for name in trial["slower"]]
    by_point = {
        name: {
            "false_alarms": error_rate(
                sum(name in trial["slower"] for trial in unchanged_trials),
                sum(name in trial["effects"] for trial in unchanged_trials),
            ),
            "caught": error_rate(caught_points.count(name), slowed_points.count(name)),
        }
        for name in sorted({name for trial in trials for name in trial["effects"]})
    }
    return {
        "false_alarms": error_rate(
            sum(trial["alarm"] for trial in unchanged_trials), len(unchanged_trials)
        ),
        "false_screened": error_rate(
            sum(bool(trial["screened"]) for trial in unchanged_trials), len(unchanged_trials)
        ),
        "false_faster": error_rate(
            sum(bool(trial["faster"]) for trial in unchanged_trials), len(unchanged_trials)
        ),
        "caught": error_rate(len(caught_points), len(slowed_points)),
        "caught_by_gate": error_rate(
            sum(trial["alarm"] for trial in slowed_trials), len(slowed_trials)
        ),
        "unsure": error_rate(
            sum(len(trial["unsure"]) for trial in unchanged_trials),
            sum(len(trial["effects"]) for trial in unchanged_trials),
        ),
        "points": by_point,
    }


def error_rate(hits: int, num_cases: int) -> ErrorRate:
    """Return the rate of `hits` events in `num_cases` cases, with its interval ((0, 1) for 0)."""
    lo, hi = wilson_interval(hits, num_cases)
    share = hits / num_cases if num_cases else None
    return {"hits": hits, "of": num_cases, "rate": share, "lo": lo, "hi": hi}


UNCHANGED_COLOUR, SLOWED_COLOUR = COLOURS["tbe"], COLOURS["tt"]


def write(path: Path) -> str:
    """Write power.json, run.json and the page of a run from its stored pairs; return the answer."""
    store, trials, run_info = RunStore(path), completed_outcomes(path), read_json(path, "run.json")
    rates = compute_rates(trials)
    store.write_json("power.json", {"rates": rates, "trials": trials})
    store.write_json("run.json", {"experiment": "gate_power", **run_info, "trials": len(trials)})
    answer = sentence(rates, trials)
    document.write(path, _page(path, answer, rates, trials, run_info))
    return answer


def sentence(rates: Rates, trials: Sequence[Outcome]) -> str:
    """State the rates of false alarms and of detection, as far as trials give them."""
    if not trials:
        return "No trial is complete."
    slow = max((trial["slow"] for trial in trials), default=1.0)
    clauses = []
    if rates["false_alarms"]["of"]:
        clauses.append(
            f"{format_rate(rates['false_alarms'])} gates of unchanged code raised an alarm"
        )
    if rates["caught"]["of"]:
        caught_share = format_rate(rates["caught"])
        clauses.append(f"points slowed by {100 * (slow - 1):.3g} % were caught in {caught_share}")
    return "; ".join(clauses) + "."


def format_rate(rate: ErrorRate) -> str:
    """Format '0 of 200 (0 %, 95 % interval 0 to 1.9 %)'; '0 of 0' without trials."""
    if rate["rate"] is None:
        return "0 of 0"
    lo, hi = (f"{100 * rate[name]:.3g}" for name in ("lo", "hi"))
    share = f"{100 * rate['rate']:.3g} %, 95 % interval {lo} to {hi} %"
    return f"{rate['hits']} of {rate['of']} ({share})"


def _page(
    path: Path, answer: str, rates: Rates, trials: Sequence[Outcome], info: Mapping[str, Any]
) -> Page:
    """Return the page of the trials: rates by point, and every trial."""
    config = OmegaConf.load(path / "config.yaml")
    rules = Rules.load(path)
    assert rules is not None
    slow = max((trial["slow"] for trial in trials), default=1.0)
    further_sentences = [
        f"A first set of pairs alone, without confirmation, would have raised one in "
        f"{format_rate(rates['false_screened'])}.",
        f"Unsure of a point in {format_rate(rates['unsure'])} cases without a change.",
        f"At least one point caught in {format_rate(rates['caught_by_gate'])} slowed gates.",
    ]
    pairs_text = (
        f"{text.count(rules.pairs, 'pair')} of processes, up to {rules.max_pairs} where unsure"
    )
    notices = []
    if config.timing.max_rows:
        notices.append("Smoke run: tiny tables and one pair; the numbers have no meaning.")
    if info.get("status") != "finished":
        notices.append("This run is not complete; the same command continues it.")
    tiles = [
        _tile(rates["false_alarms"], "of gates without a change raised an alarm"),
        _tile(rates["caught"], f"of points slowed by {100 * (slow - 1):.3g} % were caught"),
        Tile(str(len(trials)), "trials of the whole gate"),
    ]
    paragraphs = [
        f"Every trial is a whole gate ({pairs_text}; then as many again to confirm) with processes "
        f"that no other trial uses. In slowed trials every point of head takes {slow:g} times as "
        "long, by waiting inside the timed region.",
        "Slowing all points at once does not make detection easier: each point is judged on its "
        "own, and the correction for multiple comparisons is then at its strictest.",
    ]
    sections = [
        Section("Rates by point", paragraphs, table=rate_table(rates)),
        Section("Every trial", figures=[draw_trials(trials, rules.margins)] if trials else []),
    ]
    return pages.page_of(
        path, "gate_power", [answer, *further_sentences], sections, tiles=tiles, notices=notices
    )


def _tile(rate: ErrorRate, label: str) -> Tile:
    """Return the tile of a rate: its share, and `label` with the numbers of cases."""
    share = "–" if rate["rate"] is None else f"{100 * rate['rate']:.3g} %"
    return Tile(share, f"{label} ({rate['hits']} of {rate['of']})")


def rate_table(rates: Rates) -> Table:
    """Return the table of rates, a row per point."""

    def format_interval(rate: ErrorRate) -> str:
        return f"{100 * rate['lo']:.3g} – {100 * rate['hi']:.3g} %"

    rows = []
    for name, point_rates in rates["points"].items():
        row = [Value(name)]
        for rate in (point_rates["false_alarms"], point_rates["caught"]):
            share = math.nan if rate["rate"] is None else rate["rate"]
            row += [Value(f"{rate['hits']} of {rate['of']}", share), Value(format_interval(rate))]
        rows.append(row)
    heads = ["point", "false alarms", "[95\u00a0%]", "caught when slowed", "[95\u00a0%]"]
    return Table(heads, rows)


def draw_trials(trials: Sequence[Outcome], margins: Mapping[str, float]) -> Figure:
    """Draw a strip per point, with a dot per trial: the mean effect of its first set."""
    names = list(margins)
    dots = [
        {
            "row": names.index(name),
            "ratio": math.exp(statistics.fmean(effects["first"])),
            "slow": trial["slow"],
            # Multiples of the golden ratio modulo 1 keep dots of successive trials apart.
            "jitter": ((trial["trial"] * 0.618) % 1 - 0.5) * 0.28,
        }
        for trial in trials
        for name, effects in trial["effects"].items()
    ]
    frame = pd.DataFrame(dots, columns=["row", "ratio", "slow", "jitter"])

    def draw_strips(axes: Axes) -> None:
        for row, margin in enumerate(margins.values()):
            strip = (row - 0.45, row + 0.45)
            axes.fill_betweenx(strip, 1 / (1 + margin), 1 + margin, color=GRID, lw=0)
        for slow, group in frame.groupby("slow"):
            colour, shift = (UNCHANGED_COLOUR, -0.18) if slow == 1 else (SLOWED_COLOUR, 0.18)
            heights = group["row"] + shift + group["jitter"]
            axes.plot(group["ratio"], heights, ".", color=colour, ms=4, alpha=0.75)
            axes.axvline(float(str(slow)), color=INK, lw=0.9, ls="-" if slow == 1 else (0, (4, 3)))
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time of head ÷ time of base")

    return Figure(
        "trials",
        "What every trial measured",
        "A dot is the mean over the first set of pairs of one trial: blue without a change, orange "
        "slowed. Grey: within the margin. Vertical lines: the true effects.",
        text.count(len(trials), "trial"),
        [Panel("First set of pairs", draw_strips, 8.0, 0.55 * len(names) + 1.2)],
    )
