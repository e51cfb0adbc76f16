"""The error rates of the gate: whole gates of a revision against itself, and against a slowed copy.

Every trial is the gate's whole procedure in processes of its own; no pair is used twice, so trials
are as independent as the machine permits. An interrupted run can be resumed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from omegaconf import OmegaConf

from experiments.config.schema import Config, UsageError
from experiments.gate import pages, setup
from experiments.gate import rules as judge
from experiments.gate.pairs import Conductor, Trial
from experiments.gate.rules import RULES, Rules
from experiments.report.document import Page, Section, Tile
from experiments.report.style import COLOURS, GRID, INK, Drawing, Figure, Panel
from experiments.report.tables import Table, Value
from experiments.results.store import Record, RunStore, read_json, read_records
from experiments.run.progress import Display
from experiments.timing import statistics as comparison
from experiments.timing.statistics import Verdict


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Run all trials, then the report; return the exit status."""
    try:
        if config.dry_run:
            trials = f"{len(schedule(config))} trials of a gate"
            return setup.plan(config, f"{trials} of {setup.pairs_of(config)}")
        start = setup.start(config, words)
        if config.gate.inject <= 1 and config.gate.slowed_trials:
            raise UsageError("gate.slowed_trials need gate.inject, e.g. gate.inject=1.10")
        both = setup.one_revision(start, print)
        store, records = setup.unfinished(start) or (start.create(), [])
    except UsageError as error:
        return setup.refuse(error)
    began = time.monotonic()
    wanted = schedule(config)
    rules = kept_rules(store) or start.rules
    store.write_json(RULES, dataclasses.asdict(rules))
    with Display(len(wanted)) as display:
        display.say(setup.heading(start, f"{len(wanted)} trials of the gate"))
        if records:
            display.say(f"going on with {store.path.name}")
        conductor = Conductor(
            config,
            start.device,
            start.points,
            rules,
            both,
            store,
            display,
            pairs=1 + max((r["pair"] for r in records), default=-1),
        )
        status = _trials(conductor, replay(records))
    return _finish(store, status, question, began)


def schedule(config: Config) -> list[float]:
    """Return how much each trial slows head; slowed trials are spread evenly among the others."""
    gate, smoke = config.gate, bool(config.timing.max_rows)
    still, slow = (min(n, 1) if smoke else n for n in (gate.trials, gate.slowed_trials))
    total = still + slow
    slowed = {(2 * n + 1) * total // (2 * slow) for n in range(slow)}
    return [gate.inject if n in slowed else 1.0 for n in range(total)]


def kept_rules(store: RunStore) -> Rules | None:
    """Return the rules that a run began with, which apply until its end."""
    kept = read_json(store.path, RULES)
    return (
        Rules(kept["pairs"], int(kept.get("max_pairs") or kept["most_pairs"]), kept["margins"])
        if kept
        else None
    )


def complete(path: Path) -> list[dict[str, Any]]:
    """Return the outcomes of the completed trials of a run directory."""
    rules = kept_rules(RunStore(path))
    if rules is None:
        return []
    names = list(rules.margins)
    trials = replay(read_records(path)).values()
    whole = [t for t in trials if judge.next_request(names, t.evidence, rules) is None]
    return [outcome(t, names, rules) for t in sorted(whole, key=lambda t: t.number)]


def _trials(conductor: Conductor, done: dict[int, Trial]) -> str:
    """Return 'finished', 'interrupted', or 'incomplete': a process failed, the trial is void."""
    display, rules, failures = conductor.display, conductor.rules, 0
    names = list(rules.margins)
    try:
        for number, slow in enumerate(schedule(conductor.config)):
            known = done.get(number)
            trial = known or Trial(number, slow)
            was_done = known and judge.next_request(names, known.evidence, rules) is None
            conductor.finish(trial)
            if trial.failed:
                failures += 1
                name, sides = next(iter(trial.failed.items()))
                reason = next(iter(sides.values())).reason
                display.finish(f"failed at {name}: {reason}")
            else:
                display.finish("" if was_done else line(outcome(trial, names, rules)))
    except KeyboardInterrupt:
        display.say("interrupted: the same command goes on here")
        return "interrupted"
    if failures:
        display.say(f"{failures} trials failed; the same command does them again")
    return "incomplete" if failures else "finished"


def replay(records: Sequence[Record]) -> dict[int, Trial]:
    """Return the trials of stored records, without those in which a process failed."""
    trials: dict[int, Trial] = {}
    for record in records:
        number, attempt = record["trial"], record.get("attempt", 1)
        trial = trials.get(number)
        if trial is None or trial.attempt < attempt:
            trial = trials[number] = Trial(number, record["slow"], attempt)
        trial.remember(record)
    for number, trial in trials.items():
        if trial.failed:  # started again, with other pairs
            trials[number] = Trial(number, trial.slow, trial.attempt + 1)
    return trials


def outcome(trial: Trial, names: Sequence[str], rules: Rules) -> dict[str, Any]:
    """Return the decision of one gate."""
    rulings = judge.rule(names, trial.evidence, rules)
    by_verdict: dict[str, list[str]] = defaultdict(list)
    for name, ruling in rulings.items():
        by_verdict[ruling.verdict.value].append(name)
    effects = {
        name: {"first": list(r.first), "second": list(r.second)} for name, r in rulings.items()
    }
    return {
        "trial": trial.number,
        "slow": trial.slow,
        "alarm": bool(by_verdict[Verdict.SLOWER.value]),
        **{v.value.lower(): by_verdict[v.value] for v in Verdict},
        "screened": [n for n, r in rulings.items() if r.screened is Verdict.SLOWER],
        "failed": sorted(trial.failed),
        "effects": effects,
    }


def line(found: Mapping[str, Any]) -> str:
    """Format a trial for the terminal."""
    slowed = f"slowed {found['slow']:g}×" if found["slow"] > 1 else "A/A"
    counts = ", ".join(
        f"{len(found[v.value.lower()])} {v.value.lower()}"
        for v in Verdict
        if found[v.value.lower()]
    )
    pairs = max((len(e["first"]) + len(e["second"]) for e in found["effects"].values()), default=0)
    return f"{slowed:<12} {'ALARM' if found['alarm'] else 'quiet':<6} {counts} ({pairs} pairs)"


def compute_rates(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return false-alarm and detection rates of complete trials, with Wilson intervals."""
    still = [t for t in trials if t["slow"] == 1]
    slowed = [t for t in trials if t["slow"] > 1]
    seen = [n for t in slowed for n in t["effects"]]
    caught = [n for t in slowed for n in t["slower"]]
    by_point = {
        name: {
            "false_alarms": rate(
                sum(name in t["slower"] for t in still), sum(name in t["effects"] for t in still)
            ),
            "caught": rate(caught.count(name), seen.count(name)),
        }
        for name in sorted({n for t in trials for n in t["effects"]})
    }
    return {
        "false_alarms": rate(sum(t["alarm"] for t in still), len(still)),
        "false_screened": rate(sum(bool(t["screened"]) for t in still), len(still)),
        "false_faster": rate(sum(bool(t["faster"]) for t in still), len(still)),
        "caught": rate(len(caught), len(seen)),
        "caught_by_gate": rate(sum(t["alarm"] for t in slowed), len(slowed)),
        "unsure": rate(sum(len(t["unsure"]) for t in still), sum(len(t["effects"]) for t in still)),
        "points": by_point,
    }


def rate(hits: int, trials: int) -> dict[str, Any]:
    """Return a rate with its 95 % interval."""
    lo, hi = comparison.wilson(hits, trials)
    share = hits / trials if trials else None
    return {"hits": hits, "of": trials, "rate": share, "lo": lo, "hi": hi}


def _finish(store: RunStore, status: str, question: str, began: float) -> int:
    pass

    info = {"question": question, "status": status, "seconds": round(time.monotonic() - began, 1)}
    answer, page = write(store.path, info)
    print(f"\n{answer}\n")
    print(f"report: {page}")
    return {"interrupted": 130, "incomplete": 5}.get(status, 0)


STILL, SLOWED = COLOURS["tbe"], COLOURS["tt"]


def write(path: Path, info: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """Write all files that follow from the stored pairs; return (answer, path of the page)."""
    store, trials = RunStore(path), complete(path)
    kept = dict(info or read_json(path, "run.json"))
    rates = compute_rates(trials)
    store.write_json("power.json", {"rates": rates, "trials": trials})
    store.write_json("run.json", {"experiment": "gate_power", **kept, "trials": len(trials)})
    answer = sentence(rates, trials)
    return answer, pages.write(path, _page(path, answer, rates, trials, kept))


def sentence(rates: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> str:
    """State both rates."""
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
    """Format '0 of 200 (0 %, 95 % interval 0 to 1.9 %)'."""
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
) -> Page:
    config = OmegaConf.load(path / "config.yaml")
    rules = kept_rules(RunStore(path))
    assert rules is not None
    slow = max((t["slow"] for t in trials), default=1.0)
    more = [
        f"A first set of pairs alone, without confirmation, would have raised one in "
        f"{in_words(rates['false_screened'])}.",
        f"Unsure of a point in {in_words(rates['unsure'])} cases without a change.",
        f"At least one point caught in {in_words(rates['caught_by_gate'])} slowed gates.",
    ]
    pairs = f"{rules.pairs} pairs of processes, up to {rules.max_pairs} where unsure"
    notices = []
    if config.timing.max_rows:
        notices.append("Smoke run: tiny tables, one pair: nothing here means anything.")
    if info.get("status") != "finished":
        notices.append("This run is not complete; the same command goes on with it.")
    tiles = [
        _tile(rates["false_alarms"], "of gates without a change raised an alarm"),
        _tile(rates["caught"], f"of points slowed by {100 * (slow - 1):.3g} % were caught"),
        Tile(str(len(trials)), "trials of the whole gate"),
    ]
    words = [
        f"Every trial is a whole gate ({pairs}; then as many again to confirm) whose processes "
        "no other trial uses. In slowed trials every point of head takes "
        f"{slow:g} times its own time, by waiting inside of what is timed.",
        "That all are slowed at once makes it no easier to be caught: each is judged on its own, "
        "and the correction for many points is then at its strictest.",
    ]
    sections = [
        Section("Rates by point", words, table=rate_table(rates)),
        Section("Every trial", figures=[figure(trials, rules.margins)] if trials else []),
    ]
    return pages.page_of(
        path, "gate_power", [answer, *more], sections, tiles=tiles, notices=notices
    )


def _tile(rate: Mapping[str, Any], what: str) -> Tile:
    share = "–" if rate["rate"] is None else f"{100 * rate['rate']:.3g} %"
    return Tile(share, f"{what} ({rate['hits']} of {rate['of']})")


def rate_table(rates: Mapping[str, Any]) -> Table:
    """Return one row per point."""
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
    """Draw a strip per point: the effect that each trial's first set found."""
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
                        math.exp(statistics.fmean(effects)),
                        place + shift + jitter,
                        ".",
                        color=SLOWED if slowed else STILL,
                        ms=4,
                        alpha=0.75,
                    )
        for slow in {t["slow"] for t in trials}:
            axes.axvline(slow, color=INK, lw=0.9, ls="-" if slow == 1 else (0, (4, 3)))
        axes.set_yticks(range(len(margins)), list(margins))
        axes.set_ylim(len(margins) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time of head ÷ time of base")

    return draw
