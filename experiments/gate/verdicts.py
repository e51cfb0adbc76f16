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
from experiments.gate.rules import CHANGES, Rules, Ruling, decide
from experiments.results.store import Record
from experiments.timing.statistics import MIN_PROCESSES, Verdict

PEAK_SHARE, PEAK_BYTES = 0.01, 16 << 20  # tolerated growth of peak memory, which is not exact
HIT_RATE_CHANGE = 0.005  # tolerated loss of the hit rate, a share of 1
INSTRUCTIONS_SHARE = 0.01  # tolerated growth of instructions: Python's share is not exact
# Statuses of a side that failed; any other means that it does not support the point here.
BROKEN_STATUSES = ("error", "wrong", "timeout", "oom")

# Exit statuses; `pages.MEANINGS` says what they mean.
FINE, REGRESSION, UNSURE, FAILED, NOTHING = 0, 3, 4, 5, 6


@dataclass(frozen=True)
class PointFinding:
    """The finding for one point; `as_json` writes its fields to gate.json.

    Attributes:
        point: name of the point.
        words: description of the point: contender, phase and sizes.
        state: name of a `Verdict`; or MISSING (only base can run it), FAILED (head has
            an error, and base cannot run it either; or base failed after pairs that it completed),
            NEW (base cannot run it, and head can, or does not support it here), NOISY (its margin
            would exceed gate.max_margin).
        reason: why there is no verdict, or what to do about an unsure one.
        ruling: verdict with its grounds; None without a verdict.
        base_s: median seconds of base; nan without samples.
        head_s: median seconds of head; nan without samples.
        grown: sentences about counted numbers that became worse.
        shrunk: sentences about counted numbers that became better.
        counts: instructions by name and side.
    """

    point: str
    words: str
    state: str
    reason: str = ""
    ruling: Ruling | None = None
    base_s: float = math.nan
    head_s: float = math.nan
    grown: Sequence[str] = ()
    shrunk: Sequence[str] = ()
    counts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def is_regression(self) -> bool:
        """Return whether the point is slower, confirmed, or has a counted number that grew."""
        return self.state == Verdict.SLOWER.value or bool(self.grown)


@dataclass
class Findings:
    """All findings of a gate.

    Attributes:
        points: a finding per point, the worst first.
        broken: why nothing could be compared; "" if something could.
        broken_side: side that did not build.
        interrupted: True if the user ended the run; the points have what was measured by then.
    """

    points: list[PointFinding] = field(default_factory=list)
    broken: str = ""
    broken_side: Side = Side.base
    interrupted: bool = False

    def in_states(self, *states: str) -> list[PointFinding]:
        """Return the findings in one of these states."""
        return [x for x in self.points if x.state in states]

    @property
    def compared(self) -> list[PointFinding]:
        """Return the points with a verdict."""
        return self.in_states(*(v.value for v in Verdict))

    def status(self, *, strict: bool) -> int:
        """Return the exit status: 130 for an interrupted run, else that of the worst finding."""
        if self.interrupted:
            return 130
        if self.broken:
            return FAILED if self.broken_side is Side.head else NOTHING
        if any(x.is_regression for x in self.points):
            return REGRESSION
        if self.in_states("MISSING", "FAILED"):
            return FAILED
        if not self.compared:
            return UNSURE if strict and self.in_states("NOISY") else NOTHING
        if strict and self.in_states(Verdict.UNSURE.value, "NOISY"):
            return UNSURE
        return FINE


STATES_BY_SEVERITY = ("SLOWER", "MISSING", "FAILED", "UNSURE", "NOISY", "FASTER", "SAME", "NEW")


def collect_findings(
    points: Sequence[Point], trial: Trial, rules: Rules, records: Sequence[Record]
) -> Findings:
    """Return the findings of a trial, worst first, and then by the size of the effect.

    Points that an interrupted trial did not reach have no finding.
    """
    names = [p.name for p in points if p.name in rules.margins]
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

    A base that failed after pairs that it completed is no proof that it cannot run the point: as
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

    Instructions that grew are no regression if the time fell, confirmed. Their sentences then move
    to `shrunk`, which has no effect on the exit status.
    """
    weights = trial.weights.get(point.name, {})
    grown, shrunk = changed_counts(weights.get("base", {}), weights.get("head", {}))
    samples_s = (faster_samples(records, point.name, side) for side in Side)
    base_s, head_s = (statistics.median(s) if s else math.nan for s in samples_s)
    reason = advice(ruling) if ruling.verdict is Verdict.UNSURE else ""
    state = ruling.verdict.value
    if ruling.verdict is Verdict.FASTER:
        shrunk += [x for x in grown if "instructions" in x]
        grown = [x for x in grown if "instructions" not in x]
    counts = {
        key: {side: weight[key] for side, weight in weights.items()}
        for key in (TOTAL, NATIVE)
        if len(weights) == 2 and all(key in weight for weight in weights.values())
    }
    return PointFinding(
        point.name, point.description, state, reason, ruling, base_s, head_s, grown, shrunk, counts
    )


def advice(ruling: Ruling) -> str:
    """Suggest what to do about an undecided point."""
    if ruling.effect.processes < MIN_PROCESSES:
        return "one pair of processes gives no verdict; raise timing.replicates"
    if ruling.screened in CHANGES:
        verdict = ruling.screened.value.lower()
        return f"looked {verdict} at first, which new pairs did not confirm; run the gate again"
    return "the noise is too large: close other programs, raise gate.max_pairs or timing.min_rounds"


def changed_counts(
    base: Mapping[str, float], head: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Return the sentences on numbers that became worse, and those on numbers that became better.

    The numbers are those of `Bench.weigh` and counted instructions, by name. Hit rates, peak memory
    and instructions have a tolerance; other bytes are compared exactly. A hit rate that only base
    has is worse: head counts no lookups in its cache.
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
            values = f"{base_value:,.0f} → {head_value:,.0f} ({head_value / base_value:.3f}×)"
        sentence = f"{key.replace('_', ' ')} {values}"
        worse += [sentence] * (growth > tolerance)
        better += [sentence] * (growth < -tolerance)
    return worse, better


def as_json(finding: PointFinding) -> dict[str, Any]:
    """Return the entry of a point in gate.json; nan and infinite numbers are None."""
    content = dataclasses.asdict(finding)
    del content["ruling"]
    if finding.ruling:
        ruling = finding.ruling
        content |= dataclasses.asdict(ruling.effect)
        content |= {
            "margin": ruling.margin,
            "visible": ruling.visible,
            "screened": ruling.screened.value,
            "p": ruling.p,
            "first": list(ruling.first),
            "second": list(ruling.second),
        }
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()
    }
