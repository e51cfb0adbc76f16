"""Runs that several tests look at, made once."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from experiments import configure
from experiments.measure import process
from experiments.paths import CONF
from tests import nightly
from tests.experiments.smoke_host import SmokeHost, render_once

# As run.py does, before anything loads OpenMP or starts the fork server.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

WITHOUT_FIGURES = {"tbe_vs_torch"}  # in `make nightly` with them; its numbers are looked at
# The figures of `serving` need 200 requests per point, more than fit the budget of a smoke run.
BUDGETS = {"serving": ("timing.cell_seconds=5", "timing.max_cells=2")}
SHORT = ("timing.cell_seconds=0.1",)  # where an experiment has a longer budget of its own


class SmokeRuns(Mapping[str, Path]):
    """Experiment -> run directory at smoke size; each is run, and must end well, when first asked.

    So one file of tests waits for what it looks at, and an experiment that fails fails its own
    tests only, at every one of them. Processes that share the tests share the runs.
    """

    def __init__(self, folder: Path, host: SmokeHost) -> None:
        self.folder = folder
        self.host = host

    def __getitem__(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        words = [f"+experiment={name}", "timing=smoke", "device=cpu", f"report.folder={folder}"]
        has_budget = "cell_seconds" in (CONF / "experiment" / f"{name}.yaml").read_text()
        words += BUDGETS.get(name, SHORT if has_budget and not nightly.IS_NIGHTLY else ())
        if name in WITHOUT_FIGURES and not nightly.IS_NIGHTLY:
            words.append("report.figures=false")
        with (folder / "ended.json").open("a+") as ended:
            fcntl.flock(ended, fcntl.LOCK_EX)
            ended.seek(0)
            text = ended.read()
            if not text:
                text = json.dumps(self.host.run(words, folder))
                ended.write(text)
        status, output, errors = json.loads(text)
        assert status == 0, output + errors
        assert output.splitlines()[-1] == f"report: {next(folder.glob('*/*/index.html'))}"
        (run,) = (folder / name).iterdir()
        return run

    def __iter__(self) -> Iterator[str]:
        return iter(configure.groups()["experiment"])

    def __len__(self) -> int:
        return len(list(iter(self)))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of all processes that share the tests."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def smoke_host(shared_folder: Path) -> Iterator[SmokeHost]:
    """What runs command lines of run.py in processes of their own."""
    host = SmokeHost(shared_folder / "smoke_host")
    yield host
    host.close()


@pytest.fixture(scope="session")
def smoke_runs(shared_folder: Path, smoke_host: SmokeHost) -> Mapping[str, Path]:
    """Every experiment of conf/ at smoke size."""
    return SmokeRuns(shared_folder / "smoke_runs", smoke_host)


@pytest.fixture
def figures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the figures of reports as smoke runs do, for tests that do not look at them."""
    from experiments.report import style

    if not nightly.IS_NIGHTLY:
        monkeypatch.setattr(style, "draw_files", render_once())


@pytest.fixture(scope="module")
def loaded_fork_server(smoke_host: SmokeHost) -> Iterator[None]:
    """Start children from the server of the smoke runs, which has emblib and the harness loaded.

    Else each child of a run imports both: most of the time of a small one. Only for files in which
    all children load this emblib.
    """
    server: Any = forkserver._forkserver
    process._forkserver_context()
    former = dict(vars(server))
    alive_read, alive_write = os.pipe()  # it ends with those who started it
    vars(server).update(smoke_host.loaded_fork_server())
    server._forkserver_alive_fd = alive_write
    server.ensure_running = lambda: None
    yield
    vars(server).clear()
    vars(server).update(former)
    os.close(alive_read)
    os.close(alive_write)
