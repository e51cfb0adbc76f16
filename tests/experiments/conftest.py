"""Runs that several tests look at, made once."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from experiments import configure
from experiments.measure import process
from experiments.paths import ROOT

# As run.py does, before anything loads OpenMP or starts the fork server.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class SmokeHost:
    """The process that runs them (smoke_host.py); started when first needed, or where it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, words: list[str], folder: Path) -> tuple[int, str, str]:
        """Exit status, output and errors of `run.py WORDS`."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        output, errors = folder / "output.txt", folder / "errors.txt"
        try:
            self._pipe.send((words, output, errors))
            status = self._pipe.recv()
        except (EOFError, OSError):
            return 1, "", "the host of the smoke runs died"
        return status, output.read_text(), errors.read_text()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        # A pytest that an experiment starts is no worker of this one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        module = "tests.experiments.smoke_host"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            cwd=ROOT,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def close(self) -> None:
        """It ends when nothing more can come."""
        if self._process is not None:
            self._pipe.close()
            self._process.wait()


class SmokeRuns(Mapping[str, Path]):
    """Experiment -> run directory at smoke size; each is run, and must end well, when first asked.

    So one file of tests waits for what it looks at, and an experiment that fails fails its own
    tests only, at every one of them. Processes that share the tests share the runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = SmokeHost()

    def __getitem__(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        words = [f"+experiment={name}", "timing=smoke", "device=cpu", f"report.folder={folder}"]
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
def smoke_runs(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Iterator[Mapping[str, Path]]:
    """Every experiment of conf/ at smoke size."""
    base = tmp_path_factory.getbasetemp()
    runs = SmokeRuns((base if worker_id == "master" else base.parent) / "smoke_runs")
    yield runs
    runs.host.close()


@pytest.fixture(scope="module")
def loaded_fork_server() -> Iterator[None]:
    """Start children from a server that has emblib and the harness loaded.

    Else each child of a run imports both: most of the time of a small one. Only for files in which
    all children load this emblib; the server ends with the file.
    """
    server: Any = forkserver._forkserver
    server._stop()
    process._context()
    server.set_forkserver_preload([*server._preload_modules, "experiments.run.worker"])
    server.ensure_running()
    yield
    server._stop()
