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
    aims_of_parts = []
    for part, figures in yaml.safe_load(path.read_text()).items():
        for figure, facts in figures.items():
            (better,) = set(facts) - {"before"}
            if better not in ("lower", "higher"):
                raise ValueError(f"{part}: {figure}: lower or higher, not {better}")
            aims_of_parts.append(Aim(part, figure, facts[better], better, facts.get("before")))
    return aims_of_parts


def measured(folder: Path) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Return the figures by part, and facts of the parts' runs, of the files that are there."""
    figures, facts = {}, {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and "part" in content:
            figures[content["part"]] = content["figures"]
            facts[content["part"]] = content
    return figures, facts


def page(folder: Path) -> str:
    """Return the table of aims and what was measured."""
    figures, facts = measured(folder)
    all_aims = aims()
    lines = ["# Aims and what was measured", ""]
    devices = sorted({f"{f['device']}, torch {f['torch']}" for f in facts.values()})
    lines += [f"Measured on {'; '.join(devices) or 'nothing yet'}."]
    if any(f["tiny"] for f in facts.values()):
        lines += ["", "Tiny sizes: these numbers mean nothing."]
    measured_aims = [a for a in all_aims if a.figure in figures.get(a.part, {})]
    num_met = sum(a.met(figures[a.part][a.figure]) for a in measured_aims)
    lines += [
        "",
        f"{num_met} of {len(all_aims)} aims met, {len(measured_aims) - num_met} missed, "
        f"{len(all_aims) - len(measured_aims)} not measured.",
        "",
        "| part | figure | before, H100 | aim | measured | |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for a in all_aims:
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
