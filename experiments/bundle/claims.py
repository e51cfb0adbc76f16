"""The claims of a run, which another machine can confirm: ratios, hit rates and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from experiments.report.data import Run, select

HIT_RATE_TOLERANCE = 0.005  # absolute tolerance of a hit rate, a share of 1; equal to the gate's
TIME_TOLERANCE = 0.25  # relative tolerance of a ratio of times by default
NO_INTERVAL = "one process gives no interval: measure in more of them (--timing standard)"
RULE = (
    "A ratio of times holds if the interval measured again meets the claimed one widened by the "
    "tolerance on both sides, and does not say the opposite (slower where the claim, with its "
    "interval, says faster). A hit rate holds within half a percentage point. Bytes are exact. "
    "Claims are compared only where the batches were the same, and a ratio only if it has an "
    "interval when it is measured again, which takes two processes or more."
)


class Measure(Enum):
    """The kind of a claim's number; bundle.json has its name, reports have its value."""

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
    """A claimed number of an arm in a cell.

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
        """Return the key of the claim, unique within a run."""
        return self.about, self.what

    def as_json(self) -> dict[str, Any]:
        """Return the entry of the claim in bundle.json; nan becomes None."""
        values = asdict(self) | {"measure": self.measure.name}
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in values.items()
        }


@dataclass(frozen=True)
class CheckedClaim:
    """A claim of a bundle, and the result of measuring it again.

    Attributes:
        claim: claim of the bundle.
        outcome: result of measuring it again.
        new_claim: the same claim of the new run; None if that has no such number or other batches.
        reason: why it could not be compared; "" if it was.
    """

    claim: Claim
    outcome: ClaimOutcome
    new_claim: Claim | None = None
    reason: str = ""


def claims_of(run: Run) -> list[Claim]:
    """Return the claims of a run; a smoke run has capped sizes and claims bytes only."""
    byte_claims = _byte_claims(run)
    return (
        byte_claims if run.is_smoke else [*_ratio_claims(run), *_hit_rate_claims(run), *byte_claims]
    )


def _ratio_claims(run: Run) -> list[Claim]:
    """Return a claim per arm, phase and mode of a cell that has a ratio to the baseline."""
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


def _hit_rate_claims(run: Run) -> list[Claim]:
    """Return the hit rates per lookup and per row of each trace through a cache."""
    rows = select(run.traces, status="ok")
    return [
        Claim(
            Measure.hit_rate, f"{row['cell']} · {row['label']}", f"hit rate per {unit}", *[rate] * 3
        )
        for _, row in rows.iterrows()
        for unit in ("lookup", "row")
        if not math.isnan(rate := float(row[f"{unit}_hit_rate"]))
    ]


def _byte_claims(run: Run) -> list[Claim]:
    """Return the bytes of weights, optimizer state and cache of each arm, without zeros."""
    claims: dict[tuple[str, str], Claim] = {}
    for record in run.records:
        for name in ("weights_bytes", "optimizer_state_bytes", "cache_bytes"):
            if record.get("status") == "ok" and record.get(name):
                about, number = f"{record['cell']} · {record['label']}", float(record[name])
                claim = Claim(Measure.nbytes, about, name.replace("_", " "), *[number] * 3)
                claims.setdefault(claim.key, claim)
    return list(claims.values())


def check_claims(
    packed_claims: Sequence[Claim],
    new_claims: Sequence[Claim],
    missing_reasons: Mapping[str, str],
    tolerance: float,
) -> list[CheckedClaim]:
    """Check each packed claim against the new one of the same key, in the order of the packed ones.

    Args:
        packed_claims: claims of the bundle.
        new_claims: claims of the new run.
        missing_reasons: why the new run lacks a claim, by `Claim.about`.
        tolerance: relative tolerance of ratios of times.
    """
    new_by_key = {claim.key: claim for claim in new_claims}
    checked_claims = []
    for claim in packed_claims:
        new_claim, reason = new_by_key.get(claim.key), ""
        if new_claim is None:
            outcome = ClaimOutcome.unmeasured
            reason = missing_reasons.get(claim.about, "it was not reached")
        elif claim.measure is Measure.ratio and math.isnan(new_claim.lo):
            outcome, reason = ClaimOutcome.unmeasured, NO_INTERVAL
        else:
            is_confirmed = holds(claim, new_claim, tolerance)
            outcome = ClaimOutcome.holds if is_confirmed else ClaimOutcome.differs
        checked_claims.append(CheckedClaim(claim, outcome, new_claim, reason))
    return checked_claims


def holds(claim: Claim, new_claim: Claim, tolerance: float) -> bool:
    """Return whether a claim holds by RULE.

    `new_claim` must have the same key, and an interval if it is a ratio. If a claimed ratio has no
    interval, its value serves as both ends. `tolerance` has an effect on ratios only.
    """
    if claim.measure is Measure.nbytes:
        return claim.value == new_claim.value
    if claim.measure is Measure.hit_rate:
        return abs(claim.value - new_claim.value) <= HIT_RATE_TOLERANCE
    has_interval = not (math.isnan(claim.lo) or math.isnan(claim.hi))
    lo, hi = (claim.lo, claim.hi) if has_interval else (claim.value, claim.value)
    if hi < 1 < new_claim.lo or new_claim.hi < 1 < lo:
        return False
    return new_claim.lo <= hi * (1 + tolerance) and lo / (1 + tolerance) <= new_claim.hi
