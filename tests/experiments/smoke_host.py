"""Command lines of run.py, each in a process of its own, but with what all load loaded once.

A smoke run measures for a second or two. Alone it loads torch twice before that, in itself and in
its fork server, and emblib in every child: for those who run all experiments, most of the time.

One process (`python -m tests.experiments.smoke_host FOLDER`) serves all that share the tests: it
forks one process per command line, and ends when the last of its clients has closed its connection.
"""

from __future__ import annotations

import copy
import fcntl
import gc
import importlib
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from experiments import cli, configure
from experiments.config.schema import Config
from experiments.measure import process
from experiments.paths import ROOT
from tests import nightly

PRELOADED = "tests.experiments.preloaded"  # by the server that forks the children of runs
# What a client of a fork server knows of it; the key is of newer versions of Python.
_SERVER_FACTS = ("_forkserver_address", "_forkserver_authkey")
_without_emblib: Any = forkserver.ForkServer()  # the children of its clients choose their emblib


class SmokeHost:
    """A client of the process, which the first client starts, and the next one where it died.

    Args:
        folder: the folder in which clients find the process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._connection: Connection | None = None
        self._ended: dict[int, int] = {}

    def start(self, words: list[str], folder: Path, variables: Mapping[str, str] = {}) -> int:
        """Start `run.py WORDS`, its output in `folder`; return the id of its process.

        Its environment, and that of its children, has `variables` too.
        """
        return int(
            self._ask((words, folder / "output.txt", folder / "errors.txt", dict(variables)))
        )

    def loaded_fork_server(self) -> dict[str, Any]:
        """Return what a client of the fork server with loaded children knows of it."""
        return dict(self._ask(None))

    def wait(self, pid: int) -> int:
        """Return the exit status of a process, negative for a signal."""
        return self._receive(pid)

    def run(
        self, words: list[str], folder: Path, variables: Mapping[str, str] = {}
    ) -> tuple[int, str, str]:
        """Return exit status, output and errors of `run.py WORDS`; see `start`."""
        try:
            status = self.wait(self.start(words, folder, variables))
        except (EOFError, OSError):
            return 1, "", "the host of the smoke runs died"
        output, errors = folder / "output.txt", folder / "errors.txt"
        return status, output.read_text(), errors.read_text()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _ask(self, message: object) -> Any:
        """Send a message and return its answer; to another process where the first has died."""
        if self._connection is None:
            self._connection = self._connect()
        try:
            self._connection.send(message)
            return self._receive(None)
        except (EOFError, OSError):
            self._connection = self._connect()
            self._connection.send(message)
            return self._receive(None)

    def _receive(self, pid: int | None) -> Any:
        """Return the answer to a message (None), or the exit status of process `pid`."""
        assert self._connection is not None
        while pid not in self._ended:
            found, status = self._connection.recv()
            if status is None:
                return found
            self._ended[found] = status
        return self._ended.pop(pid)

    def _connect(self) -> Connection:
        self.folder.mkdir(parents=True, exist_ok=True)
        address = self.folder / "address"
        with (self.folder / "host.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(OSError):
                return Client(address.read_text())
            # A pytest that an experiment starts is not a worker of this one.
            environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
            host = subprocess.Popen(
                [sys.executable, "-m", "tests.experiments.smoke_host", str(self.folder)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
            )
            assert host.stdout is not None
            host.stdout.readline()  # it listens, or died
            return Client(address.read_text())


def render_once() -> Callable[..., list[str]]:
    """Return a `style.draw_files` that renders the first figure in full, others in one form.

    Drawing takes most of the time of a smoke run: a figure is a bitmap, a file of vectors and a
    part of the page per panel, each with a layout of its own.
    """
    from experiments.report import style

    draw, drawn = style.draw_files, []

    def once(figure: style.Figure, subtitle: str, folder: Path) -> list[str]:
        drawn.append(figure.name)
        if len(drawn) == 1:
            return draw(figure, subtitle, folder)
        canvas = style.draw_sheet(figure, subtitle)
        canvas.set_layout_engine("none")
        canvas.savefig(folder / f"{figure.name}.png", dpi=80)
        (folder / f"{figure.name}.svg").touch()
        style.plt.close(canvas)
        return [""] * len(figure.panels)

    return once


def _run(words: list[str], output: Path, errors: Path, variables: Mapping[str, str]) -> None:
    from experiments.report import style

    for path, standard in (output, 1), (errors, 2):
        with path.open("wb") as file:
            os.dup2(file.fileno(), standard)
    if not nightly.IS_NIGHTLY:
        style.draw_files = render_once()
    os.environ.update(variables)
    server: Any = forkserver._forkserver
    if _load_once(words).kind in ("gate", "noise", "power"):
        vars(server).update(vars(_without_emblib))
    elif variables:
        _fork_server(server)
    # Not started by this process, and it serves it as it does the one that started it.
    server.ensure_running = lambda: None
    sys.exit(cli.main(words))


def _load_once(words: list[str]) -> Config:
    """Return the configuration of `words`, and return it to the next who asks for it."""
    load, config = configure.load, configure.load(words)

    def loaded(others: Sequence[str]) -> Config:
        return copy.deepcopy(config) if others == words else load(others)

    configure.load = loaded
    return config


def _fork_server(server: Any) -> None:
    """Start a fork server with the environment of this process, and all that it has loaded."""
    alive_read, alive_write = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # Linux chooses an abstract address
        listener.listen()
        if os.fork() == 0:
            try:
                os.close(alive_write)
                importlib.import_module(PRELOADED)
                forkserver.main(listener.detach(), alive_read, [])
            finally:
                os._exit(0)
        os.close(alive_read)
        server._forkserver_address = listener.getsockname()
        server._forkserver_alive_fd = alive_write


def serve(folder: Path) -> None:
    """Run what clients send; answer with (process, None), and with (process, exit status)."""
    for module in ("experiments.report.pages", "experiments.run.runner"):
        importlib.import_module(module)
    process._forkserver_context()
    server: Any = forkserver._forkserver
    _without_emblib.set_forkserver_preload(server._preload_modules)
    server.set_forkserver_preload([*server._preload_modules, PRELOADED])
    _ensure_fork_servers()
    gc.freeze()
    with Listener() as listener:
        (folder / "address").write_text(str(listener.address))
        print("listening", flush=True)
        _serve(listener)


def _ensure_fork_servers() -> None:
    """Start the fork servers, or one again that died.

    A fork server can die of a client that is killed between its connection and its message, as
    runs in tests of interrupts may be.
    """
    for server in (_without_emblib, forkserver._forkserver):
        server.ensure_running()


def _serve(listener: Any) -> None:
    door = listener._listener._socket
    runs: dict[int, tuple[Any, Connection]] = {}  # by sentinel
    clients = [listener.accept()]
    while clients:
        for ready in wait([door, *clients, *runs]):
            if ready is door:
                clients.append(listener.accept())
            elif isinstance(ready, int):
                run, client = runs.pop(ready)
                run.join()
                with suppress(OSError):  # the client has gone
                    client.send((run.pid, run.exitcode))
            else:
                try:
                    asked = ready.recv()
                except (EOFError, OSError):
                    clients.remove(ready)
                    continue
                _ensure_fork_servers()
                if asked is None:
                    facts = vars(forkserver._forkserver)
                    ready.send(({k: facts[k] for k in _SERVER_FACTS if k in facts}, None))
                    continue
                run = multiprocessing.get_context("fork").Process(target=_run, args=asked)
                run.start()
                runs[run.sentinel] = run, ready
                ready.send((run.pid, None))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
