"""Add this machine to the references: `python -m experiments.compare.add_machine [EXPERIMENT ...]`.

Runs the experiments (by default those that have a reference), stores the finished runs as
references, updates README.md and reports/published/README.md, and compares each with the references
of other machines. Arguments with `=` go to every run, e.g. timing=paper.
Exit status: 0 done, 1 a run or a page failed, 2 wrong usage.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.config import configure, schema
from experiments.paths import REFERENCE, ROOT
from experiments.results.store import runs_in

Command = Callable[[list[str]], int]


def experiments_to_run(words: Sequence[str], folder: Path = REFERENCE) -> list[str]:
    """Return the named experiments, or other machines'; raise UsageError for unknown ones."""
    known = configure.groups()["experiment"]
    named = [word.removeprefix("+experiment=") for word in words]
    for name in named:
        if name not in known:
            raise schema.UsageError(f"no experiment '{name}'. There is: {', '.join(known)}")
    there = sorted({path.name for path in runs_in(folder, "*/*")})
    found = named or [name for name in there if name in known]
    if not found:
        raise schema.UsageError(f"which experiments? There is: {', '.join(known)}")
    return found


def others(kept: Path, folder: Path = REFERENCE) -> list[Path]:
    """Return references of the same experiment on other machines, by device name."""
    return [path for path in runs_in(folder, f"*/{kept.name}") if path != kept]


def _python(words: list[str]) -> int:
    command = [sys.executable, *words]
    print("$ " + " ".join(["python", *words]), flush=True)
    return subprocess.run(command, cwd=ROOT).returncode


def newest(name: str, runs: Path) -> Path:
    """Return the run that was started last."""
    return max((runs / name).iterdir(), key=lambda path: path.stat().st_mtime)


def add(names: Sequence[str], settings: Sequence[str], call: Command = _python) -> int:
    """Run, store and compare; return the worst exit status."""
    from experiments import reference

    runs, worst = ROOT / "reports" / "runs", 0
    for name in names:
        if call(["run.py", f"+experiment={name}", *settings]):
            print(f"{name}: did not finish well and is not kept", file=sys.stderr)
            worst = 1
            continue
        try:
            kept = reference.keep(newest(name, runs))
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            worst = 1
            continue
        print(f"kept {os.path.relpath(kept, ROOT)}")
        for other in others(kept):
            paths = [os.path.relpath(path, ROOT) for path in (other, kept)]
            folder = f"reports/compare/{name}/{other.parent.name}-{kept.parent.name}"
            call(["-m", "experiments.compare", *paths, "--out", folder])
    for words in (["experiments.reference"], ["experiments.compare", "--overview"]):
        if call(["-m", *words, "write"]):
            print(f"{' '.join(words)} write failed: its page is out of date", file=sys.stderr)
            worst = 1
    return worst


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    settings = [a for a in arguments if "=" in a and not a.startswith("+experiment=")]
    names = [a for a in arguments if a not in settings]
    try:
        chosen = experiments_to_run(names)
        for name in chosen:
            configure.load([f"+experiment={name}", *settings])
    except schema.UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return add(chosen, settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
