"""Run the gate: from the configuration of a run to its report and exit status.

`run` compares two revisions: it checks them out and builds them, counts instructions, measures
pairs of processes until the rules are satisfied, and writes the outputs. `rebuild` writes the
outputs of a stored run again.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.config.schema import Config
from experiments.gate import instructions, pages, revisions, setup
from experiments.gate.instructions import Counts
from experiments.gate.pairs import Side, SideFolders, Trial, TrialRunner
from experiments.gate.points import Setup, points_of
from experiments.gate.revisions import BuildError
from experiments.gate.rules import EXIT_INTERRUPTED, Rules
from experiments.gate.setup import GateStart
from experiments.gate.verdicts import Findings, collect_findings
from experiments.paths import shown_path
from experiments.results.store import RunStore, read_json, read_records
from experiments.run.progress import Display


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Compare two revisions; return the exit status (see `pages.EXIT_MEANINGS`).

    Args:
        config: configuration of the run.
        question: question of the experiment, for run.json.
        words: arguments of the command line, for environment.json.

    Raises:
        UsageError: a revision is unknown, or the run cannot start.
    """
    begin_s = time.monotonic()
    if config.dry_run:
        return setup.print_plan(config, setup.describe_pairs(config))
    base_name = revisions.default_base(config, smoke=bool(config.timing.max_rows))
    base_sha, head_sha = revisions.resolve(base_name), revisions.resolve(config.gate.head)
    commits = {"base": revisions.commit_facts(base_sha), "head": revisions.commit_facts(head_sha)}
    start = setup.start_gate(config, words)
    store = start.create()
    start.rules.save(store)
    with Display(len(start.points)) as display:
        display.say(setup.heading(start, f"{config.gate.head} against {base_name}"))
        findings, facts = _compare(
            start, store, display, base_name, is_same_revision=base_sha == head_sha
        )
    status = findings.status(strict=config.gate.strict)
    facts |= {
        "experiment": config.name,
        "seconds": round(time.monotonic() - begin_s, 1),
        "commits": commits,
        "device": start.device.type,
        "machine": start.environment["device"],
        "measured": start.environment["time_utc"],
    }
    run_status = "interrupted" if findings.interrupted else "finished"
    setup.write_info(store, config, question, run_status, begin_s, exit=status)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    answer = pages.write_outputs(store.path, findings, facts, status, summary=summary)
    for finding in findings.points:
        print(pages.format_finding(finding))
    print(f"\n{answer}\n")
    print(f"exit status {status}: {pages.EXIT_MEANINGS[status]}" if status else "no objection")
    print(f"report: {shown_path(store.path / 'index.html')}")
    return status


def _compare(
    start: GateStart,
    store: RunStore,
    display: Display,
    base_name: str,
    *,
    is_same_revision: bool,
) -> tuple[Findings, dict[str, Any]]:
    """Build, measure and decide; return the findings, and further entries of gate.json.

    If a revision does not build, or the user interrupts, the findings say so.

    Raises:
        UsageError: `revisions.checkout` raised it.
    """
    facts: dict[str, Any] = {
        "base": base_name,
        "head": start.config.gate.head,
        "notices": _notices(start),
    }
    if is_same_revision:
        facts["notices"].append("Base and head are the same revision: every effect is noise.")
    trial, rules, is_interrupted = Trial(slow=start.config.gate.inject), start.rules, False
    try:
        base, head = revisions.checkout(base_name), revisions.checkout(start.config.gate.head)
        facts |= {"base": base.description, "head": head.description}
        revisions.provide_libraries(base, head, start.device.type, display.say)
        folders = {Side.base: str(base.folder), Side.head: str(head.folder)}
        runner = TrialRunner(
            start.config, start.device, start.points, rules, folders, store, display
        )
        counts, reason = _count_instructions(start, folders, display)
        store.write_json("instructions.json", counts)
        if reason and not start.is_smoke:
            subject = "Some instructions" if counts else "Instructions"
            facts["notices"].append(f"{subject} were not counted: {reason}.")
        runner.finish(trial)
        trial.add_counts(counts)
    except BuildError as error:
        side = Side.base if str(error).startswith(facts["base"]) else Side.head
        return Findings(broken=str(error), broken_side=side), facts
    except KeyboardInterrupt:
        is_interrupted = True
    findings = collect_findings(start.points, trial, rules, read_records(store.path))
    return dataclasses.replace(findings, interrupted=is_interrupted), facts


def _count_instructions(
    start: GateStart, folders: SideFolders, display: Display
) -> tuple[Counts, str]:
    """Count the instructions of all points; return the counts, and why some are missing."""
    if reason := instructions.reason_not_to_count(
        start.config, start.device.type, smoke=start.is_smoke
    ):
        return {}, reason
    display.say("counting instructions under valgrind, both revisions at once")
    first_message = Setup(start.points, start.config, start.device.type, start.config.seed)
    return instructions.count(first_message, {side.value: path for side, path in folders.items()})


def _notices(start: GateStart) -> list[str]:
    """Return the notices of the page, which name what limits trust in the verdicts."""
    notices = []
    if start.is_smoke:
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


# Entries of gate.json that `write_outputs` derives; the others are its `facts`.
DERIVED_ENTRIES = ("status", "meaning", "answer", "points")


def rebuild(path: Path) -> str:
    """Write all files that follow from the samples of a run again; return the answer.

    A run without rules or records is not changed: its stored answer is returned, or a sentence that
    it ended before it could measure. A run that was killed has no gate.json, and counts as
    interrupted.
    """
    gate_result, records = read_json(path, "gate.json"), read_records(path)
    rules = Rules.load(path)
    if rules is None or not records:
        return str(gate_result.get("answer", "This run ended before it could measure."))
    config = setup.read_stored_config(path)
    trial = Trial()
    for record in records:
        trial.add_record(record)
    trial.add_counts(read_json(path, "instructions.json"))
    if "status" not in gate_result:
        gate_result = {
            "status": EXIT_INTERRUPTED,
            "experiment": config.name,
            "base": config.gate.base or "its default base",
            "head": config.gate.head,
            "notices": ["This run was killed: points that it did not reach are missing."],
        }
    findings = collect_findings(points_of(config), trial, rules, records)
    findings = dataclasses.replace(findings, interrupted=gate_result["status"] == EXIT_INTERRUPTED)
    run_facts = {name: value for name, value in gate_result.items() if name not in DERIVED_ENTRIES}
    return pages.write_outputs(path, findings, run_facts, gate_result["status"])
