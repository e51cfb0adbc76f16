"""Command lines of run.py, each in a process of its own, but with what all load loaded once.

A smoke run measures for a second or two. Alone it loads torch twice before that, in itself and in
its fork server, and emblib in every child: for those who run all experiments, most of the time.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from experiments import cli, configure
    from experiments.measure import process
    from experiments.report import pages, style  # noqa: F401
    from experiments.run import runner  # noqa: F401


def _run(words: list[str], output: Path, errors: Path) -> None:
    for path, standard in (output, 1), (errors, 2):
        with path.open("wb") as file:
            os.dup2(file.fileno(), standard)
    server: Any = forkserver._forkserver
    if configure.load(words).kind in ("gate", "noise", "power"):
        server.__init__()  # one of its own: the gate's children choose which emblib they load
    else:  # not started by this process, and it serves it as it does the one that started it
        server.ensure_running = lambda: None
    sys.exit(cli.main(words))


def serve(pipe: Connection) -> None:
    """Run what is sent, one after another; answers with exit statuses."""
    process._context()
    server: Any = forkserver._forkserver
    server.set_forkserver_preload([*server._preload_modules, "experiments.run.worker"])
    server.ensure_running()
    gc.freeze()
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        run = multiprocessing.get_context("fork").Process(target=_run, args=asked)
        run.start()
        run.join()
        pipe.send(run.exitcode)


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    serve(Connection(int(sys.argv[1])))
