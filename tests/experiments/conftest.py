"""Runs that several tests look at, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import cli, configure

EXPERIMENTS = configure.groups()["experiment"]


@pytest.fixture(scope="session")
def smoke_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every experiment of conf/ at smoke size, name -> run directory; each must end well."""
    runs = {}
    for name in EXPERIMENTS:
        folder = tmp_path_factory.mktemp("runs")
        status = cli.main(
            [f"+experiment={name}", "timing=smoke", "device=cpu", f"report.folder={folder}"]
        )
        assert status == 0, name
        (runs[name],) = (folder / name).iterdir()
    return runs
