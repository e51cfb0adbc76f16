"""The findings of a gate on times, bytes, hit rates and instructions, and its exit status."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.gate.instructions import NATIVE, TOTAL
from experiments.gate.pairs import Side, Trial, faster_samples
from experiments.gate.points import BuildResult, Point
from experiments.gate.rules import (
    CHANGES,
    EXIT_FAILED,
    EXIT_FINE,
    EXIT_INTERRUPTED,
    EXIT_NOTHING,
    EXIT_REGRESSION,
    EXIT_UNSURE,
    Rules,
    Ruling,
    decide,
)
from experiments.results.store import Record
from experiments.timing.statistics import MIN_PROCESSES, Verdict

# Tolerated growth of peak memory, which is not exact: a share of base's, plus bytes.
PEAK_SHARE, PEAK_BYTES = 0.01, 16 << 20
HIT_RATE_CHANGE = 0.005  # tolerated loss of the hit rate, a share of 1
INSTRUCTIONS_SHARE = 0.01  # tolerated growth of instructions: Python's share is not exact
# Statuses of a side that failed; any other means that it does not support the point here.
BROKEN_STATUSES = ("error", "wrong", "timeout", "oom")


@dataclass(frozen=True)
class PointFinding:
    """The finding for one point; `as_json` writes its fields to gate.json.

    Attributes:
        point: name of the point.
        description: contender, phase, optimizer and sizes of the point in words.
        state: name of a `Verdict`; or MISSING (only base can run it), FAILED (head has
            an error, and base cannot run it either; or base failed after pairs that it completed),
            NEW (base cannot run it, and head can, or does not support it here), NOISY (its margin
            would exceed gate.max_margin).
        reason: why there is no verdict, or what to do about an unsure one.
        ruling: verdict with its grounds; None without a verdict.
        base_s: median seconds of base; nan without samples.
        head_s: median seconds of head; nan without samples.
        worse: sentences about bytes, hit rates and instructions that became worse.
        better: sentences about bytes, hit rates and instructions that became better.
        counts: instructions by name (TOTAL, NATIVE) and side; {} unless both sides counted them.
    """

    point: str
    description: str
    state: str
    reason: str = ""
    ruling: Ruling | None = None
    base_s: float = math.nan
    head_s: float = math.nan
    worse: Sequence[str] = ()
    better: Sequence[str] = ()
    counts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def is_regression(self) -> bool:
        """Return whether the point is slower, confirmed, or has a number that became worse."""
        return self.state == Verdict.SLOWER.value or bool(self.worse)


@dataclass
class Findings:
    """All findings of a gate.

    Attributes:
        points: a finding per point, the worst first.
        broken: why a side did not build, so that nothing could be compared; "" if both did.
        broken_side: side that did not build; without meaning if both did.
        interrupted: True if the user ended the run; the points have what was measured by then.
    """

    points: list[PointFinding] = field(default_factory=list)
    broken: str = ""
    broken_side: Side = Side.base
    interrupted: bool = False

    def in_states(self, *states: str) -> list[PointFinding]:
        """Return the findings in one of these states, see `PointFinding.state`."""
        return [point for point in self.points if point.state in states]

    @property
    def compared(self) -> list[PointFinding]:
        """Return the points with a verdict."""
        return self.in_states(*(verdict.value for verdict in Verdict))

    def status(self, *, strict: bool) -> int:
        """Return the exit status: 130 for an interrupted run, else that of the worst finding.

        With `strict`, points that are UNSURE or NOISY give EXIT_UNSURE instead of EXIT_FINE or
        EXIT_NOTHING.
        """
        if self.interrupted:
            return EXIT_INTERRUPTED
        if self.broken:
            return EXIT_FAILED if self.broken_side is Side.head else EXIT_NOTHING
        if any(point.is_regression for point in self.points):
            return EXIT_REGRESSION
        if self.in_states("MISSING", "FAILED"):
            return EXIT_FAILED
        if not self.compared:
            return EXIT_UNSURE if strict and self.in_states("NOISY") else EXIT_NOTHING
        if strict and self.in_states(Verdict.UNSURE.value, "NOISY"):
            return EXIT_UNSURE
        return EXIT_FINE


STATES_BY_SEVERITY = ("SLOWER", "MISSING", "FAILED", "UNSURE", "NOISY", "FASTER", "SAME", "NEW")


def collect_findings(
    points: Sequence[Point], trial: Trial, rules: Rules, records: Sequence[Record]
) -> Findings:
    """Return the findings of a trial, worst first, and then by the size of the effect.

    Points that an interrupted trial did not reach have no finding.

    Args:
        points: all points of the run.
        trial: results of the trial.
        rules: rules of the trial; a point without a margin is NOISY.
        records: records of the trial, for the seconds of each side.
    """
    names = [point.name for point in points if point.name in rules.margins]
    rulings = decide(names, trial.evidence, rules)
    findings = []
    for point in points:
        failures = trial.failures.get(point.name)
        if failures:
            findings.append(_failure_finding(point, failures, trial))
        elif point.name not in rules.margins:
            reason = "its noise on this machine requires a margin beyond gate.max_margin"
            findings.append(PointFinding(point.name, point.description, "NOISY", reason))
        elif point.name in rulings:
            findings.append(_verdict_finding(point, rulings[point.name], trial, records))

    def sort_key(finding: PointFinding) -> tuple[bool, int, float]:
        effect = abs(math.log(finding.ruling.effect.ratio)) if finding.ruling else 0.0
        return not finding.is_regression, STATES_BY_SEVERITY.index(finding.state), -effect

    return Findings(sorted(findings, key=sort_key))


def _failure_finding(
    point: Point, failures: Mapping[Side, BuildResult], trial: Trial
) -> PointFinding:
    """Return a finding in the state MISSING, FAILED or NEW, see `PointFinding`.

    A base that failed after pairs that it completed is not a proof that it cannot run the point: as
    NEW the point would count for nothing, even where head looked slower in these pairs.
    """
    head, base = failures.get(Side.head), failures.get(Side.base)
    build_result = head or base or BuildResult("error", "no reason was given")
    state, explanation = "NEW", "neither side can run it here"
    if head is None and trial.evidence.first.get(point.name):
        state, explanation = "FAILED", "base ran it in earlier pairs, and then failed"
    elif head is None:
        explanation = "base cannot run it"
    elif base is None:
        state, explanation = "MISSING", "base can run it, head cannot"
    elif head.status in BROKEN_STATUSES:
        state, explanation = "FAILED", "base cannot run it, head fails"
        if base.status in BROKEN_STATUSES:
            explanation = "on both sides"
    reason = f"{explanation} ({build_result.status}: {build_result.reason})"
    return PointFinding(point.name, point.description, state, reason)


def _verdict_finding(
    point: Point, ruling: Ruling, trial: Trial, records: Sequence[Record]
) -> PointFinding:
    """Return the finding for a point that both sides ran.

    More instructions are not a regression if the time fell, confirmed. Their sentences then move to
    `better`, which has no effect on the exit status.
    """
    resources = trial.resources.get(point.name, {})
    worse, better = changed_resources(resources.get("base", {}), resources.get("head", {}))
    samples_s = (faster_samples(records, point.name, side) for side in Side)
    base_s, head_s = (statistics.median(s) if s else math.nan for s in samples_s)
    reason = advice(ruling) if ruling.verdict is Verdict.UNSURE else ""
    state = ruling.verdict.value
    if ruling.verdict is Verdict.FASTER:
        better += [x for x in worse if "instructions" in x]
        worse = [x for x in worse if "instructions" not in x]
    counts = {
        key: {side: numbers[key] for side, numbers in resources.items()}
        for key in (TOTAL, NATIVE)
        if len(resources) == 2 and all(key in numbers for numbers in resources.values())
    }
    return PointFinding(
        point.name, point.description, state, reason, ruling, base_s, head_s, worse, better, counts
    )


def advice(ruling: Ruling) -> str:
    """Suggest what to do about an undecided point."""
    if ruling.effect.processes < MIN_PROCESSES:
        return "one pair of processes gives no verdict; raise timing.replicates"
    if ruling.screened in CHANGES:
        verdict = ruling.screened.value.lower()
        return f"looked {verdict} at first, which new pairs did not confirm; run the gate again"
    return "the noise is too large: close other programs, raise gate.max_pairs or timing.min_rounds"


def changed_resources(
    base: Mapping[str, float], head: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Return the sentences on numbers that became worse, and those on numbers that became better.

    The numbers are those of `Trial.resources` of one point and side, by name. Hit rates, peak
    memory and instructions have a tolerance; other bytes are compared exactly. A number that only
    one side has is not compared, except that a hit rate that only base has is worse: head counts no
    lookups in its cache.
    """
    worse, better = [], []
    if "hit_rate" in base and "hit_rate" not in head:
        worse.append(f"hit rate {base['hit_rate']:,.4g} → not counted")
    for key in sorted(base.keys() & head.keys()):
        base_value, head_value = base[key], head[key]
        growth = base_value - head_value if key == "hit_rate" else head_value - base_value
        values = f"{base_value:,.4g} → {head_value:,.4g}"
        tolerance = 0.0
        if key == "hit_rate":
            tolerance = HIT_RATE_CHANGE
        elif key == "peak_bytes":
            tolerance = PEAK_SHARE * base_value + PEAK_BYTES
        elif key in (TOTAL, NATIVE):
            tolerance = INSTRUCTIONS_SHARE * base_value
            values = f"{base_value:,.0f} → {head_value:,.0f}"
            if base_value:  # 0 native instructions, if the contender does not use emblib
                values += f" ({head_value / base_value:.3f}×)"
        sentence = f"{key.replace('_', ' ')} {values}"
        worse += [sentence] * (growth > tolerance)
        better += [sentence] * (growth < -tolerance)
    return worse, better


def as_json(finding: PointFinding) -> dict[str, Any]:
    """Return the entry of a point in gate.json; nan and infinite numbers are None.

    The entries `words`, `grown` and `shrunk` are the fields `description`, `worse` and `better`.
    """
    content = dataclasses.asdict(finding)
    for entry, name in (("words", "description"), ("grown", "worse"), ("shrunk", "better")):
        content[entry] = content.pop(name)
    del content["ruling"]
    if finding.ruling:
        ruling = finding.ruling
        content |= dataclasses.asdict(ruling.effect)
        content |= {
            "margin": ruling.margin,
            "visible": ruling.visible,
            "screened": ruling.screened.value,
            "p": ruling.p_value,
            "first": list(ruling.first),
            "second": list(ruling.second),
        }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in content.items()
    }
