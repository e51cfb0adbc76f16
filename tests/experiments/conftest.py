"""Runs that several tests look at, made once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from experiments.config import configure
from experiments.paths import ROOT

# As run.py does, before anything loads OpenMP or starts the fork server.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class SmokeRuns(Mapping[str, Path]):
    """Experiment -> run directory at smoke size; each is run, and must end well, when first asked.

    So one file of tests waits for what it looks at, and an experiment that fails fails its own
    tests only, at every one of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended: dict[str, subprocess.CompletedProcess[str]] = {}

    def __getitem__(self, name: str) -> Path:
        folder = self.folder / name
        if name not in self.ended:
            words = [f"+experiment={name}", "timing=smoke", "device=cpu", f"report.folder={folder}"]
            self.ended[name] = subprocess.run(
                [sys.executable, "run.py", *words], cwd=ROOT, capture_output=True, text=True
            )
        done = self.ended[name]
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == f"report: {next(folder.glob('*/*/index.html'))}"
        (run,) = (folder / name).iterdir()
        return run

    def __iter__(self) -> Iterator[str]:
        return iter(configure.groups()["experiment"])

    def __len__(self) -> int:
        return len(list(iter(self)))


@pytest.fixture(scope="session")
def smoke_runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Every experiment of conf/ at smoke size."""
    return SmokeRuns(tmp_path_factory.mktemp("runs"))
