"""Runs that several tests look at, made once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import configure
from experiments.paths import ROOT


# As run.py does, before anything loads OpenMP or starts the fork server.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def smoke_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every experiment of conf/ at smoke size, name -> run directory; each must end well."""
    runs = {}
    for name in configure.groups()["experiment"]:
        folder = tmp_path_factory.mktemp("runs")
        words = [f"+experiment={name}", "timing=smoke", "device=cpu", f"report.folder={folder}"]
        done = subprocess.run(
            [sys.executable, "run.py", *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == f"report: {next(folder.glob('*/*/index.html'))}"
        (runs[name],) = (folder / name).iterdir()
    return runs
