"""The outputs of the gate: its page, gate.json, gate.md, junit.xml and lines for the terminal.

`write_outputs` writes all files of a comparison of two revisions. The kinds noise and power also
use `page_of`, `effect_row` and the `*_value` functions for their pages.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.gate import rules
from experiments.gate.instructions import NATIVE, TOTAL
from experiments.gate.rules import Ruling
from experiments.gate.verdicts import Findings, PointFinding, as_json
from experiments.report import document, tables, text
from experiments.report.charts import Row, forest
from experiments.report.document import Notice, Page, Section, Tile
from experiments.report.style import COLOURS, FASTER, SLOWER, Figure
from experiments.report.tables import Table, Value
from experiments.results.store import RunStore, read_json
from experiments.timing.statistics import Effect, Verdict, combine_processes

HOW_TO_READ = (
    "Two processes, one per revision, alternate: base head head base, or head base base head, "
    "chosen at random. An untimed execution precedes each sample, because the other process has "
    "just used the caches. Of the two samples of a block the faster one counts; the effect of a "
    "pair of processes is the median over its blocks of log(head ÷ base).",
    "With one thread each, both processes of a pair stay on one core, chosen at random. The "
    "process that starts first and the order of the points are random as well.",
    "Interval: 95 % Student-t over pairs of processes. SLOWER or FASTER: the interval excludes 1 "
    "and the effect is beyond the margin. SAME: the whole interval is within the margin. UNSURE: "
    "neither, even after the largest number of pairs allowed.",
    "A point that looks slower or faster is measured again with as many new pairs, and counts only "
    "if these agree, at 5 % over all such points together (Holm). The effect shown is then that of "
    "the second set, because the first was selected for its effect.",
    "Instructions: of one call, counted by callgrind, head ÷ base and the count of head: all of "
    "them, and those within emblib's library. They do not depend on the machine's load; over 1 % "
    "more is a regression, unless the point is FASTER.",
    "Smallest detectable: the smallest effect that would have been called, i.e. the margin plus "
    "half the interval.",
)


def page_of(
    path: Path,
    name: str,
    answer: Sequence[str],
    sections: Sequence[Section],
    *,
    tiles: Sequence[Tile] = (),
    notices: Sequence[str] = (),
    how_to_read: Sequence[str] = HOW_TO_READ,
) -> Page:
    """Return the page of a run of the kinds gate, noise or power.

    Args:
        path: directory of the run.
        name: name of the experiment.
        answer: sentences that answer its question.
        sections: sections with the results; how to read them and how to repeat the run follow.
        tiles: numbers to show first.
        notices: texts of notices.
        how_to_read: paragraphs of "How to read this".
    """
    environment = read_json(path, "environment.json")
    machine = (environment.get("device"), f"torch {environment.get('torch')}")
    return Page(
        name=name,
        answer=answer,
        sections=[
            *sections,
            Section("How to read this", points=how_to_read),
            Section("Reproduce", code=str(environment.get("command", ""))),
            Section(
                "Configuration",
                fold_label="Configuration that ran",
                code=(path / "config.yaml").read_text(),
                web_only=True,
            ),
        ],
        subtitle=" · ".join(str(word) for word in (*machine, text.commit(environment)) if word),
        tiles=tiles,
        notices=[Notice(line) for line in notices],
        closing="In the folder of this page: points.jsonl (raw samples), report.md, figures.",
    )


def effect_value(effect: Effect) -> Value:
    """Format an effect as '1.083 [1.061, 1.106]'; without the interval if there is none."""
    interval = "" if math.isnan(effect.lo) else f" [{effect.lo:.3f}, {effect.hi:.3f}]"
    return Value.of(effect.ratio, lambda value: f"{value:.3f}{interval}")


def margin_value(value: float | None) -> Value:
    """Format a share, such as a margin, as '5.2 %'; a dash for None and infinity."""
    finite_value = None if value is None or math.isinf(value) else value
    return Value.of(finite_value, lambda value: f"{100 * value:.3g} %")


def instructions_value(finding: PointFinding, name: str) -> Value:
    """Format head ÷ base and the count of head, '1.0310 (2,113,402)'; a dash if not counted."""
    counts = finding.counts.get(name)
    head_per_base = counts["head"] / counts["base"] if counts and counts["base"] else None
    return Value.of(
        head_per_base, lambda value: f"{value:.4f} ({counts['head']:,.0f})" if counts else ""
    )


EXIT_MEANINGS = {
    rules.EXIT_FINE: "no slowdown was found",
    rules.EXIT_REGRESSION: "a slowdown was found and confirmed",
    rules.EXIT_UNSURE: "a point is unsure or too noisy, which gate.strict does not accept",
    rules.EXIT_FAILED: "head does not build, or a point failed",
    rules.EXIT_NOTHING: "nothing was comparable",
    rules.EXIT_INTERRUPTED: "interrupted",
}
STATE_COLOURS = {"SLOWER": SLOWER, "FASTER": FASTER}
TILE_STYLES = {"SLOWER": "bad", "FASTER": "good", "UNSURE": "open"}


def write_outputs(
    path: Path,
    findings: Findings,
    facts: Mapping[str, Any],
    status: int,
    *,
    summary: str | None = None,
) -> str:
    """Write gate.json, gate.md, junit.xml and the page of a gate; return the answer.

    Args:
        path: directory of the run.
        findings: findings of the gate.
        facts: further entries of gate.json: experiment, base and head (in words) and notices. A
            complete run also has commits, device, machine, measured and seconds, for `trend`.
        status: exit status, a key of EXIT_MEANINGS.
        summary: file to which gate.md is appended, such as a GitHub job's; None or "" for none.
    """
    store = RunStore(path)
    answer = sentence(findings, facts)
    report = _page(path, findings, facts, answer, status)
    store.write("gate.md", report.markdown(figures=False))
    store.write_json(
        "gate.json",
        {
            "status": status,
            "meaning": EXIT_MEANINGS[status],
            "answer": answer,
            **facts,
            "points": [as_json(finding) for finding in findings.points],
        },
    )
    store.write("junit.xml", junit(findings, answer))
    document.write(path, report)
    if summary:
        with open(summary, "a") as out:
            out.write((path / "gate.md").read_text() + "\n")
    return answer


def sentence(findings: Findings, facts: Mapping[str, Any]) -> str:
    """State the result of the gate in one sentence."""
    revisions = f"{facts['head']} against {facts['base']}"
    if findings.broken:
        return f"{revisions}: nothing could be compared: {findings.broken}"
    regressions = [finding for finding in findings.points if finding.is_regression]
    if regressions:
        worst = regressions[0]
        headline = worst.point
        if worst.state == "SLOWER":
            headline += f", {_format_effect(worst)}"
        others_note = ""
        if len(regressions) > 1:
            others_note = f" and {text.count(len(regressions) - 1, 'other point')}"
        return f"{revisions} is worse at {headline}{others_note}."
    failures = findings.in_states("MISSING", "FAILED")
    if failures:
        return f"{revisions}: {text.count(len(failures), 'point')} failed."
    if not findings.compared:
        return f"{revisions}: nothing could be compared."
    num_unsure, num_compared = len(findings.in_states("UNSURE")), len(findings.compared)
    num_faster = len(findings.in_states("FASTER"))
    faster_note = f", {text.count(num_faster, 'point')} faster" if num_faster else ""
    unsure_note = f"; unsure of {num_unsure} of {num_compared}" if num_unsure else ""
    compared_points = text.count(num_compared, "point")
    return f"{revisions}: no slowdown was found at {compared_points}{faster_note}{unsure_note}."


def _format_effect(finding: PointFinding) -> str:
    """Format the effect of a point as '1.083× [1.061, 1.106]'; return "" without a ruling."""
    if finding.ruling is None:
        return ""
    effect = finding.ruling.effect
    return f"{effect.ratio:.3f}× [{effect.lo:.3f}, {effect.hi:.3f}]"


def format_finding(finding: PointFinding) -> str:
    """Format one finding as a line for the terminal."""
    if finding.ruling is None:
        return f"{finding.state:<8} {finding.point}: {finding.reason}"
    ruling = finding.ruling
    times = f"{text.seconds(finding.base_s)} → {text.seconds(finding.head_s)}"
    has_interval = ruling.effect.processes > 1
    effect = _format_effect(finding) if has_interval else f"{ruling.effect.ratio:.3f}×"
    worse_note = "".join(f" · {change}" for change in finding.worse)
    return (
        f"{finding.state:<8} {effect} m={100 * ruling.margin:.1f}% {finding.point} · {times} · "
        f"k={_format_pairs(ruling)}{worse_note}"
    )


def _format_pairs(ruling: Ruling) -> str:
    """Return the number of pairs of the first set, and of the second if any: '5' or '5+5'."""
    return "+".join(str(len(pairs)) for pairs in (ruling.first, ruling.second) if pairs)


def _page(
    path: Path, findings: Findings, facts: Mapping[str, Any], answer: str, status: int
) -> Page:
    """Return the page of a comparison of two revisions."""
    notices = [f"Exit status {status}: {EXIT_MEANINGS[status]}."] if status else []
    notices += list(facts.get("notices", ()))
    tiles = [
        Tile(
            str(len(findings.in_states(verdict.value))),
            verdict.value.lower(),
            TILE_STYLES.get(verdict.value, "") if findings.in_states(verdict.value) else "",
        )
        for verdict in (Verdict.SLOWER, Verdict.UNSURE, Verdict.FASTER, Verdict.SAME)
    ]
    sections = [Section("Points", table=table(findings.points), figures=_figures(findings.points))]
    remarks = [
        f"{point.state.lower()}: {point.point} – {point.reason}"
        for point in findings.points
        if point.ruling is None
    ]
    remarks += [f"unsure: {point.point} – {point.reason}" for point in findings.in_states("UNSURE")]
    remarks += [
        f"{point.point}: {change}"
        for point in findings.points
        for change in (*point.worse, *point.better)
    ]
    if remarks:
        sections.append(Section("Remarks", remarks))
    name = str(facts["experiment"])
    return page_of(path, name, [answer], sections, tiles=tiles, notices=notices)


def table(findings: Sequence[PointFinding]) -> Table:
    """Return the table of the points with a ruling, one row per point."""

    def ruling_of(finding: PointFinding) -> Ruling:
        assert finding.ruling is not None
        return finding.ruling

    columns: dict[str, Callable[[PointFinding], Value | str]] = {
        "point": lambda f: f.point,
        "verdict": lambda f: f.state + " (counted)" * bool(f.worse),
        "head ÷ base [95\u00a0%]": lambda f: effect_value(ruling_of(f).effect),
        "margin": lambda f: margin_value(ruling_of(f).margin),
        "smallest detectable": lambda f: margin_value(ruling_of(f).visible),
        "instructions": lambda f: instructions_value(f, TOTAL),
        "of them in emblib": lambda f: instructions_value(f, NATIVE),
        "base": lambda f: tables.time_value(f.base_s),
        "head": lambda f: tables.time_value(f.head_s),
        "pairs": lambda f: _format_pairs(ruling_of(f)),
        "what": lambda f: f.description,
    }
    return Table.of([finding for finding in findings if finding.ruling], columns)


def effect_row(
    name: str, effects: Sequence[float], margin: float, *, colour: str, is_hollow: bool
) -> Row:
    """Return a row of a forest plot: the mean effect over pairs, its interval, the single pairs.

    `effects` are log ratios, one per pair, at least one; `margin` is a relative effect.
    """
    effect = combine_processes(effects)
    return Row(
        name,
        effect.ratio,
        colour,
        effect.lo,
        effect.hi,
        dots=[math.exp(log) for log in effects],
        margin=margin,
        is_hollow=is_hollow,
        annotation=text.times(effect.ratio),
    )


def _figures(findings: Sequence[PointFinding]) -> list[Figure]:
    """Return the figure of all ratios with their margins, largest first; [] without a verdict."""
    compared_findings = [(finding, finding.ruling) for finding in findings if finding.ruling]
    compared_findings.sort(key=lambda finding: -finding[1].effect.ratio)
    rows = [
        effect_row(
            f"{finding.point} · {finding.state}",
            ruling.second or ruling.first,
            ruling.margin,
            colour=STATE_COLOURS.get(finding.state, COLOURS["tbe"]),
            is_hollow=finding.state not in STATE_COLOURS,
        )
        for finding, ruling in compared_findings
    ]
    if not rows:
        return []
    caption = (
        "Bars: 95 % interval over pairs of processes; small dots: single pairs. Grey: within the "
        "margin, which does not count. Filled: slower or faster, confirmed. Right of 1: slower."
    )
    panel = forest("Times", rows, "head ÷ base")
    return [Figure("funnel", "Every point", caption, text.count(len(rows), "point"), [panel])]


def junit(findings: Findings, answer: str) -> str:
    """Return JUnit's XML: a test case per point, and a failed one if a revision does not build.

    The case of a point fails if the point is worse in head, or could not be measured there. It
    passes for SAME and FASTER, and is skipped for all other states.
    """
    suite = ElementTree.Element(
        "testsuite", name="performance gate", tests=str(len(findings.points))
    )
    num_failures = 0
    for finding in findings.points:
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name=finding.point)
        line = format_finding(finding)
        if finding.is_regression or finding.state in ("MISSING", "FAILED"):
            num_failures += 1
            ElementTree.SubElement(
                case, "failure", message=line, type=finding.state
            ).text = finding.description
        elif finding.state not in ("SAME", "FASTER"):
            ElementTree.SubElement(case, "skipped", message=f"{line} {finding.reason}".strip())
        ElementTree.SubElement(case, "system-out").text = line
    if findings.broken:
        num_failures += 1
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name="build")
        ElementTree.SubElement(case, "failure", message=answer, type="BUILD").text = findings.broken
        suite.set("tests", str(len(findings.points) + 1))
    suite.set("failures", str(num_failures))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
