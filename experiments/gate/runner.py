"""Run the gate from configuration to exit status: build, measure, confirm, report."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from experiments.config.schema import Config
from experiments.gate import instructions, pages, revisions, setup
from experiments.gate.instructions import Counts
from experiments.gate.pairs import Side, SideFolders, Trial, TrialRunner
from experiments.gate.points import Setup, points_of
from experiments.gate.revisions import BuildError
from experiments.gate.rules import Rules
from experiments.gate.setup import GateStart
from experiments.gate.verdicts import Findings, collect_findings
from experiments.paths import shown_path
from experiments.results.store import RunStore, read_config, read_json, read_records
from experiments.run.progress import Display


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Compare two revisions; return the exit status (see cli.HELP).

    Raises:
        UsageError: a revision is unknown, or the run cannot start.
    """
    began = time.monotonic()
    if config.dry_run:
        return setup.print_plan(config, setup.pairs_words(config))
    name = revisions.default_base(config, smoke=bool(config.timing.max_rows))
    base_sha, head_sha = revisions.resolve(name), revisions.resolve(config.gate.head)
    commits = {"base": revisions.commit_facts(base_sha), "head": revisions.commit_facts(head_sha)}
    start = setup.start_gate(config, words)
    store = start.create()
    start.rules.save(store)
    with Display(len(start.points)) as display:
        display.say(setup.heading(start, f"{config.gate.head} against {name}"))
        results, facts = _compare(start, store, display, name, alike=base_sha == head_sha)
    status = results.status(strict=config.gate.strict)
    facts |= {
        "experiment": config.name,
        "seconds": round(time.monotonic() - began, 1),
        "commits": commits,
        "device": start.device.type,
        "machine": start.environment["device"],
        "measured": start.environment["time_utc"],
    }
    ended = "interrupted" if results.interrupted else "finished"
    setup.write_info(store, config, question, ended, began, exit=status)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    answer = pages.write_outputs(store.path, results, facts, status, summary=summary)
    for line in results.points:
        print(pages.finding_line(line))
    print(f"\n{answer}\n")
    print(f"exit status {status}: {pages.MEANING[status]}" if status else "no objection")
    print(f"report: {shown_path(store.path / 'index.html')}")
    return status


def _compare(
    start: GateStart, store: RunStore, display: Display, name: str, *, alike: bool
) -> tuple[Findings, dict[str, Any]]:
    """Build, measure and decide; return the findings, and facts for gate.json.

    A revision that does not build, and Ctrl-C, become findings.
    """
    facts: dict[str, Any] = {
        "base": name,
        "head": start.config.gate.head,
        "notices": _notices(start),
    }
    if alike:
        facts["notices"].append("Base and head are the same revision: every effect is noise.")
    trial, rules, stopped = Trial(slow=start.config.gate.inject), start.rules, False
    try:
        base, head = revisions.checkout(name), revisions.checkout(start.config.gate.head)
        facts |= {"base": base.words, "head": head.words}
        revisions.provide_libraries(base, head, start.device.type, display.say)
        folders = {Side.base: str(base.folder), Side.head: str(head.folder)}
        runner = TrialRunner(
            start.config, start.device, start.points, rules, folders, store, display
        )
        counts, reason = _count_instructions(start, folders, display)
        store.write_json("instructions.json", counts)
        if reason and not start.smoke:
            facts["notices"].append(f"Instructions were not counted: {reason}.")
        runner.finish(trial)
        trial.add_counts(counts)
    except BuildError as error:
        side = Side.base if str(error).startswith(facts["base"]) else Side.head
        return Findings(broken=str(error), broken_side=side), facts
    except KeyboardInterrupt:
        stopped = True
    results = collect_findings(start.points, trial, rules, read_records(store.path))
    return dataclasses.replace(results, interrupted=stopped), facts


def _count_instructions(
    start: GateStart, folders: SideFolders, display: Display
) -> tuple[Counts, str]:
    """Count the instructions of all points; return the counts, and "" or why there are none."""
    if reason := instructions.reason_not_to_count(
        start.config, start.device.type, smoke=start.smoke
    ):
        return {}, reason
    display.say("counting instructions under valgrind, both revisions at once")
    message = Setup(start.points, start.config, start.device.type, start.config.seed)
    return instructions.count(message, {side.value: path for side, path in folders.items()})


def _notices(start: GateStart) -> list[str]:
    """Return what a reader must know about the run before believing its verdicts."""
    notices = []
    if start.smoke:
        notices.append("Smoke run: tiny tables, one pair of processes: no verdict is possible.")
    if start.floor is None:
        margin = 100 * start.config.gate.min_effect
        notices.append(
            "There is no noise floor of this machine, its software and these points, so margins "
            f"are {margin:g} % everywhere. "
            "To measure one: python run.py +experiment=selftest_aa."
        )
    if start.config.gate.inject > 1:
        notices.append(
            f"gate.inject: head was slowed to {start.config.gate.inject:g} times its time."
        )
    preflight = start.environment.get("preflight") or {}
    return notices + [f"Machine: {flag}" for flag in preflight.get("flags", [])]


DERIVED = ("status", "meaning", "answer", "points")  # of gate.json; the other entries are facts


def rebuild(path: Path) -> str:
    """Write everything that follows from the samples of a run again; return the answer.

    A run without rules or records is left as it is, and its stored answer returned.
    """
    saved, records = read_json(path, "gate.json"), read_records(path)
    rules = Rules.load(path)
    if rules is None or not records:
        return str(saved.get("answer", "This run ended before it could measure."))
    stored = OmegaConf.merge(OmegaConf.structured(Config), read_config(path / "config.yaml"))
    config = cast(Config, OmegaConf.to_object(stored))
    trial = Trial()
    for record in records:
        trial.remember(record)
    trial.add_counts(read_json(path, "instructions.json"))
    results = collect_findings(points_of(config), trial, rules, records)
    results = dataclasses.replace(results, interrupted=saved["status"] == 130)
    facts = {k: v for k, v in saved.items() if k not in DERIVED}
    return pages.write_outputs(path, results, facts, saved["status"])
