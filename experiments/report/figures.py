"""The figures of contenders timed together, in the order in which they argue."""

from __future__ import annotations

from experiments.report import costs, forest, heatmap, roofline, spread, sweeps
from experiments.report.data import Run
from experiments.report.style import Figure


def figures(run: Run) -> list[Figure]:
    """Every figure this run of one mode has the data for; the first is the main one."""
    found = [*costs.figures(run), *forest.figures(run), *heatmap.figures(run)]
    found += [*sweeps.figures(run), *roofline.figures(run), *costs.published(run)]
    return [f for f in (*found, *spread.figures(run)) if f.panels]


def subtitle(run: Run) -> str:
    """Machine, software and sizes: what a figure must say when it stands alone."""
    e = run.environment
    git = (e.get("git") or {}).get("sha") or "no git"
    dirty = "-dirty" if (e.get("git") or {}).get("dirty") else ""
    driver = (e.get("gpu") or {}).get("driver")
    parts = [e.get("device"), f"torch {e.get('torch')}", *([f"driver {driver}"] if driver else [])]
    parts += [f"emblib {git}{dirty}", str(run.config.optimizer), "+".join(run.modes)]
    processes = sorted(set(run.passes().values()))
    if processes:
        most = f"{processes[0]}–{processes[-1]}" if len(processes) > 1 else f"{processes[0]}"
        parts.append(f"{most} process{'es' * (processes[-1] > 1)} per cell")
    return " · ".join(str(p) for p in (*parts, f"timing {run.config.timing.preset}"))
