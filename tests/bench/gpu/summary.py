"""Compare the figures of the parts with the aims of `aims.yaml`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

AIMS = Path(__file__).with_name("aims.yaml")


@dataclass(frozen=True)
class Aim:
    """A figure of a part, and what it ought to be."""

    part: str
    figure: str
    aim: float
    better: str  # lower or higher
    before: float | None = None  # measured on an H100 before the work that has the aim

    def met(self, value: float) -> bool:
        """Return whether a measured value reaches the aim."""
        return value <= self.aim if self.better == "lower" else value >= self.aim


def aims(path: Path = AIMS) -> list[Aim]:
    """Read the aims; raise ValueError for one that is neither lower nor higher."""
    found = []
    for part, figures in yaml.safe_load(path.read_text()).items():
        for figure, facts in figures.items():
            (better,) = set(facts) - {"before"}
            if better not in ("lower", "higher"):
                raise ValueError(f"{part}: {figure}: lower or higher, not {better}")
            found.append(Aim(part, figure, facts[better], better, facts.get("before")))
    return found


def measured(folder: Path) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Return the figures by part, and facts of the parts' runs, of the files that are there."""
    figures, facts = {}, {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and "part" in found:
            figures[found["part"]] = found["figures"]
            facts[found["part"]] = found
    return figures, facts


def page(folder: Path) -> str:
    """Return the table of aims and what was measured."""
    figures, facts = measured(folder)
    every = aims()
    lines = ["# Aims and what was measured", ""]
    devices = sorted({f"{f['device']}, torch {f['torch']}" for f in facts.values()})
    lines += [f"Measured on {'; '.join(devices) or 'nothing yet'}."]
    if any(f["tiny"] for f in facts.values()):
        lines += ["", "Tiny sizes: these numbers mean nothing."]
    known = [a for a in every if a.figure in figures.get(a.part, {})]
    good = sum(a.met(figures[a.part][a.figure]) for a in known)
    lines += [
        "",
        f"{good} of {len(every)} aims met, {len(known) - good} missed, "
        f"{len(every) - len(known)} not measured.",
        "",
        "| part | figure | before, H100 | aim | measured | |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for a in every:
        value = figures.get(a.part, {}).get(a.figure)
        word = "not measured" if value is None else "met" if a.met(value) else "MISSED"
        sign = "≤" if a.better == "lower" else "≥"
        cells = [a.part, a.figure, _shown(a.before), f"{sign} {_shown(a.aim)}", _shown(value), word]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(folder: Path) -> str:
    """Write aims.md to the folder and return it."""
    text = page(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "aims.md").write_text(text)
    return text


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
