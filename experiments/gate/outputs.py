"""What a gate leaves behind: gate.md (and the summary of a CI job), gate.json, JUnit, the page."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.gate import page
from experiments.gate.judge import Ruling
from experiments.gate.verdicts import Findings, Line, as_json
from experiments.report import forest, text
from experiments.report.palette import COLOURS, FASTER, SLOWER
from experiments.report.style import Figure
from experiments.report.tables import Table, Value
from experiments.results.store import RunStore, read_json
from experiments.timing.comparison import Verdict

MEANING = {
    0: "no slowdown was found",
    3: "a slowdown was found and confirmed",
    4: "unsure of a point, and gate.strict asks to be sure",
    5: "a point failed in head",
    6: "nothing was comparable",
    130: "interrupted",
}
SHADES = {"SLOWER": SLOWER, "FASTER": FASTER}


def write(
    path: Path,
    found: Findings,
    facts: Mapping[str, Any],
    status: int,
    *,
    summary: str | None = None,
) -> tuple[str, str]:
    """All of them, before anyone exits; (answer, place of the page). `summary` is added to."""
    store, environment = RunStore(path), read_json(path, "environment.json")
    answer = sentence(found, facts)
    report = _page(found, facts, answer, status)
    store.write("gate.md", page.markdown(report, environment, figures=False))
    store.write_json(
        "gate.json",
        {
            "status": status,
            "meaning": MEANING[status],
            "answer": answer,
            **facts,
            "points": [as_json(line) for line in found.lines],
        },
    )
    store.write("junit.xml", junit(found, answer))
    place = page.write(path, report)
    if summary:
        with open(summary, "a") as out:
            out.write((path / "gate.md").read_text() + "\n")
    return answer, place


def sentence(found: Findings, facts: Mapping[str, Any]) -> str:
    """The gate in one sentence."""
    between = f"{facts['head']} against {facts['base']}"
    if found.broken:
        return f"{between}: nothing could be compared: {found.broken}"
    bad = [x for x in found.lines if x.regression]
    if bad:
        worst = bad[0]
        what = f"{worst.point}, {_effect(worst)}" if worst.state == "SLOWER" else worst.point
        more = f" and {text.count(len(bad) - 1, 'other point')}" * (len(bad) > 1)
        return f"{between} is worse at {what}{more}."
    broken = found.having("MISSING", "FAILED")
    if broken:
        return f"{between}: {text.count(len(broken), 'point')} failed in head."
    if not found.compared:
        return f"{between}: nothing could be compared."
    unsure, total = len(found.having("UNSURE")), len(found.compared)
    faster = found.having("FASTER")
    gain = f", {text.count(len(faster), 'point')} faster" * bool(faster)
    doubt = f"; unsure of {unsure} of {total}" * bool(unsure)
    return f"{between}: no slowdown was found at {text.count(total, 'point')}{gain}{doubt}."


def _effect(line: Line) -> str:
    if line.ruling is None:
        return ""
    effect = line.ruling.effect
    return f"{effect.ratio:.3f}× [{effect.lo:.3f}, {effect.hi:.3f}]"


def describe(line: Line) -> str:
    """One line on the terminal."""
    if line.ruling is None:
        return f"{line.state:<8} {line.point}: {line.reason}"
    ruling = line.ruling
    sizes = f"{text.seconds(line.base_s)} → {text.seconds(line.head_s)}"
    known = ruling.effect.processes > 1
    effect = _effect(line) if known else f"{ruling.effect.ratio:.3f}×"
    grown = "".join(f" · {x}" for x in line.grown)
    return (
        f"{line.state:<8} {effect} m={100 * ruling.margin:.1f}% {line.point} · {sizes} · "
        f"k={_pairs(ruling)}{grown}"
    )


def _pairs(ruling: Ruling) -> str:
    return f"{len(ruling.first)}" + f"+{len(ruling.second)}" * bool(ruling.second)


def _page(found: Findings, facts: Mapping[str, Any], answer: str, status: int) -> page.Page:
    notices = [f"Exit status {status}: {MEANING[status]}."] if status else []
    notices += list(facts.get("notices", ()))
    tiles = [
        (
            str(len(found.having(v.value))),
            v.value.lower(),
            _kind(v) if found.having(v.value) else "",
        )
        for v in (Verdict.SLOWER, Verdict.UNSURE, Verdict.FASTER, Verdict.SAME)
    ]
    sections = [page.Section("Points", table=table(found.lines), figures=_figures(found.lines))]
    others = [f"{x.state.lower()}: {x.point} – {x.reason}" for x in found.lines if x.ruling is None]
    others += [f"unsure: {x.point} – {x.reason}" for x in found.having("UNSURE")]
    others += [f"{x.point}: {change}" for x in found.lines for change in (*x.grown, *x.shrunk)]
    if others:
        sections.append(page.Section("Also to know", others))
    return page.Page(str(facts["experiment"]), answer, (), tiles, notices, sections)


def _kind(verdict: Verdict) -> str:
    return {Verdict.SLOWER: "bad", Verdict.FASTER: "good", Verdict.UNSURE: "open"}.get(verdict, "")


def table(lines: Sequence[Line]) -> Table:
    """A row per point that was compared."""
    rows = []
    for line in lines:
        if line.ruling is None:
            continue
        effect = line.ruling.effect
        rows.append(
            [
                Value(line.point),
                Value(line.state + " (bytes or hits)" * (bool(line.grown))),
                page.ratio(effect.ratio, effect.lo, effect.hi),
                page.percent(line.ruling.margin),
                page.percent(line.ruling.visible),
                Value(text.seconds(line.base_s), line.base_s),
                Value(text.seconds(line.head_s), line.head_s),
                Value(_pairs(line.ruling)),
                Value(line.words),
            ]
        )
    heads = ["point", "verdict", "head ÷ base [95\u00a0%]", "margin", "visible from"]
    return Table([*heads, "base", "head", "pairs", "what"], rows)


def _figures(lines: Sequence[Line]) -> list[Figure]:
    """The funnel: every ratio, sorted, over its margin."""
    drawn = []
    for line in sorted(lines, key=lambda x: -(x.ruling.effect.ratio if x.ruling else 0)):
        if line.ruling is None:
            continue
        effect, found = line.ruling.effect, line.ruling.second or line.ruling.first
        shade = SHADES.get(line.state, COLOURS["tbe"])
        ratios = [math.exp(x) for x in found]
        drawn.append(
            forest.Line(
                f"{line.point} · {line.state}",
                effect.ratio,
                effect.lo,
                effect.hi,
                ratios,
                shade,
                line.ruling.margin,
                sure=line.state in SHADES,
            )
        )
    if not drawn:
        return []
    caption = (
        "Bars: 95 % interval over pairs of processes; small dots: single pairs. Grey: within the "
        "margin, which does not count. Filled: slower or faster, confirmed. Right of 1: slower."
    )
    panel = forest.panel("Times", drawn, "head ÷ base")
    return [Figure("funnel", "Every point", caption, f"{len(drawn)} points", [panel])]


def junit(found: Findings, answer: str) -> str:
    """One test case a point: a failure where it is worse, skipped where nothing can be said."""
    suite = ElementTree.Element("testsuite", name="performance gate", tests=str(len(found.lines)))
    failures = 0
    for line in found.lines:
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name=line.point)
        said = describe(line)
        if line.regression or line.state in ("MISSING", "FAILED"):
            failures += 1
            ElementTree.SubElement(case, "failure", message=said, type=line.state).text = line.words
        elif line.state not in ("SAME", "FASTER"):
            ElementTree.SubElement(case, "skipped", message=f"{said} {line.reason}".strip())
        ElementTree.SubElement(case, "system-out").text = said
    if found.broken:
        failures += 1
        case = ElementTree.SubElement(suite, "testcase", classname="gate", name="build")
        ElementTree.SubElement(case, "failure", message=answer, type="BUILD").text = found.broken
        suite.set("tests", str(len(found.lines) + 1))
    suite.set("failures", str(failures))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
