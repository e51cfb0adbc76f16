"""The claims of a run that another machine can confirm: ratios, hit rates and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from experiments.report.data import Run, select

HIT_RATE_POINTS = 0.005  # tolerance of a hit rate, the same as the gate's
TIME_TOLERANCE = 0.25  # tolerance of a ratio of times by default
TOO_FEW = "one process gives no interval: measure in more of them (--timing standard)"
RULE = (
    "A ratio of times holds if the interval measured again meets the claimed one widened by the "
    "tolerance on both sides, and does not say the opposite (slower where the claim, with its "
    "interval, says faster). A hit rate holds within half a percentage point. Bytes are exact. "
    "Claims are compared only where the batches were the same, and a ratio only if it has an "
    "interval when it is measured again, which takes two processes or more."
)


class Measure(Enum):
    """The kind of number of a claim."""

    ratio = "ratio of times"
    hit_rate = "hit rate"
    nbytes = "bytes"


class ClaimOutcome(Enum):
    """The result of measuring a claim again."""

    holds = "holds"
    differs = "differs"
    unmeasured = "not measured"


@dataclass(frozen=True)
class Claim:
    """A number of an arm in a cell.

    Attributes:
        measure: kind of number.
        about: "cell · label of the arm", and for a ratio " · mode".
        what: name of the number.
        value: value.
        lo: lower end of a ratio's interval, nan if it has none; `value` of other measures.
        hi: upper end of a ratio's interval, nan if it has none; `value` of other measures.
    """

    measure: Measure
    about: str
    what: str
    value: float
    lo: float
    hi: float

    @property
    def key(self) -> tuple[str, str]:
        """Return the key that identifies a claim among those of a run."""
        return self.about, self.what

    def plain(self) -> dict[str, Any]:
        """Return the claim as a JSON object; nan becomes null."""
        values = asdict(self) | {"measure": self.measure.name}
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


@dataclass(frozen=True)
class CheckedClaim:
    """A claim of a bundle and what measuring it again gave.

    Attributes:
        claim: claim of the bundle.
        outcome: whether it holds.
        again: the same claim of the new run; None if that has no such number, or other batches.
        reason: why it could not be compared; "" if it was.
    """

    claim: Claim
    outcome: ClaimOutcome
    again: Claim | None = None
    reason: str = ""


def claims_of(run: Run) -> list[Claim]:
    """Return the claims of a run; a smoke run has capped sizes and claims bytes only."""
    return _bytes(run) if run.smoke else [*_ratios(run), *_hit_rates(run), *_bytes(run)]


def _ratios(run: Run) -> list[Claim]:
    rows = select(run.table, status="ok")
    return [
        Claim(
            Measure.ratio,
            f"{row['cell']} · {row['label']} · {row['mode']}",
            f"{row['phase']} time ÷ {run.baseline.label}",
            *(float(row[name]) for name in ("ratio", "ratio_lo", "ratio_hi")),
        )
        for _, row in rows.iterrows()
        if row["arm"] != run.baseline.key and not math.isnan(row["ratio"])
    ]


def _hit_rates(run: Run) -> list[Claim]:
    rows = select(run.traces, status="ok")
    return [
        Claim(
            Measure.hit_rate, f"{row['cell']} · {row['label']}", f"hit rate per {unit}", *[rate] * 3
        )
        for _, row in rows.iterrows()
        for unit in ("lookup", "row")
        if not math.isnan(rate := float(row[f"{unit}_hit_rate"]))
    ]


def _bytes(run: Run) -> list[Claim]:
    claims: dict[tuple[str, str], Claim] = {}
    for record in run.records:
        for name in ("weights_bytes", "optimizer_state_bytes", "cache_bytes"):
            if record.get("status") == "ok" and record.get(name):
                about, number = f"{record['cell']} · {record['label']}", float(record[name])
                claim = Claim(Measure.nbytes, about, name.replace("_", " "), *[number] * 3)
                claims.setdefault(claim.key, claim)
    return list(claims.values())


def compare(
    old: Sequence[Claim], new: Sequence[Claim], why_not: Mapping[str, str], tolerance: float
) -> list[CheckedClaim]:
    """Check each old claim against the new one of the same key, in the order of `old`.

    Args:
        old: claims of the bundle.
        new: claims of the new run.
        why_not: reasons of missing claims, by `Claim.about`.
        tolerance: relative tolerance of ratios of times.
    """
    new_by_key = {claim.key: claim for claim in new}
    checked = []
    for claim in old:
        new_claim, reason = new_by_key.get(claim.key), ""
        if new_claim is None:
            outcome = ClaimOutcome.unmeasured
            reason = why_not.get(claim.about, "it was not reached")
        elif claim.measure is Measure.ratio and math.isnan(new_claim.lo):
            outcome, reason = ClaimOutcome.unmeasured, TOO_FEW
        else:
            is_confirmed = holds(claim, new_claim, tolerance)
            outcome = ClaimOutcome.holds if is_confirmed else ClaimOutcome.differs
        checked.append(CheckedClaim(claim, outcome, new_claim, reason))
    return checked


def holds(claim: Claim, new_claim: Claim, tolerance: float) -> bool:
    """Return whether a claim holds by RULE.

    `new_claim` has the same key, and an interval if it is a ratio. A claimed ratio without an
    interval counts as the interval from its value to its value. `tolerance` is of ratios alone.
    """
    if claim.measure is Measure.nbytes:
        return claim.value == new_claim.value
    if claim.measure is Measure.hit_rate:
        return abs(claim.value - new_claim.value) <= HIT_RATE_POINTS
    missing = math.isnan(claim.lo) or math.isnan(claim.hi)
    lo, hi = (claim.value, claim.value) if missing else (claim.lo, claim.hi)
    if hi < 1 < new_claim.lo or new_claim.hi < 1 < lo:
        return False
    return new_claim.lo <= hi * (1 + tolerance) and lo / (1 + tolerance) <= new_claim.hi
