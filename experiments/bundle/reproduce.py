"""REPRODUCE.md of a bundle: what is in it, how to check it, how to measure it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.bundle.claims import RULE, TIME_TOLERANCE, Measure
from experiments.report import text

LAYOUT = """\
| place | what |
| --- | --- |
| `runs/<experiment>/<run>/` | configuration, environment, every raw sample (`points.jsonl`) |
| the same | made of these: `results.csv`, `report.md`, `index.html`, figures |
| `bundle.json` | the runs and each number they claim |
| `conf/` | the configuration tree: experiments with their questions, presets, workloads |
| `source/` | the commits that were measured |
| `environment/packages.txt` | what was installed where the bundle was packed |
| `SHA256SUMS` | of every other file: `sha256sum -c SHA256SUMS` |
"""

KICK = """\
```sh
tar xzf source/{sha}.tar.gz && cd emblib-{sha}
scripts/smoke_test.sh                        # builds, runs everything at smoke size, minutes
python -m experiments.bundle verify BUNDLE.zip           # checksums; every number from its samples
python -m experiments.bundle verify BUNDLE.zip --rerun   # measures again what is claimed
```
"""


def reproduce(description: Mapping[str, Any]) -> str:
    """The page, from bundle.json."""
    runs = description["runs"]
    sha = next((str(r["code"]["sha"]) for r in runs if r["code"].get("sha")), "COMMIT")
    lines = ["# How to check and reproduce these results", "", "## What is here", "", LAYOUT]
    lines += [f"- {note}" for note in description["notes"]]
    lines += ["", "## First: does it work at all?", ""]
    lines += [
        "Linux, Python 3.11 or later, a C++20 compiler; for the CUDA runs nvcc and an NVIDIA GPU. "
        "Results of a CPU need no GPU. In the source tree (where it is older than the script, in "
        "a newer checkout):",
        "",
        KICK.format(sha=sha),
    ]
    lines += ["## The runs", ""]
    for run in runs:
        lines += _run(run)
    lines += ["## When does a claim hold?", "", RULE, ""]
    lines += [
        f"The tolerance is {100 * TIME_TOLERANCE:.0f} % unless `--tolerance` says otherwise. "
        "Times in seconds are not compared: they belong to the machine. On other hardware ratios "
        "may truly differ; `verify --rerun` names both machines beside its result.",
        "",
    ]
    return "\n".join(lines)


def _run(run: Mapping[str, Any]) -> list[str]:
    took = text.seconds(float(run["seconds"])) if run.get("seconds") else "time not recorded"
    code = run["code"]
    commit = f"{code.get('sha') or 'no commit'}{' with changes' * bool(code.get('dirty'))}"
    counts = {m: sum(c["measure"] == m.name for c in run["claims"]) for m in Measure}
    claimed = ", ".join(f"{n} × {m.value}" for m, n in counts.items() if n) or "none"
    smoke = ["A smoke run: it shows that everything works, and claims no times.", ""]
    return [
        f"### {run['experiment']}",
        "",
        run["question"] or "",
        "",
        f"- results: `{run['folder']}/report.md`",
        f"- command: `{run['command']}`",
        f"- on: {run['device']}, torch {run['torch']}, emblib {commit}; took {took}",
        f"- claims: {claimed}",
        "",
        *(smoke if run["smoke"] else []),
    ]
