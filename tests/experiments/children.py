"""What the children of test_process.py do; a fresh process imports it by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection


def echo(pipe: Connection) -> None:
    while True:
        pipe.send(pipe.recv())


def identity(pipe: Connection) -> None:
    import torch

    import emblib

    pipe.send((os.getpid(), torch.cuda.is_initialized(), emblib.__file__))


def fail(pipe: Connection) -> None:
    raise ValueError("no such luck")


def exit_early(pipe: Connection) -> None:
    os._exit(7)


def crash(pipe: Connection) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def killed(pipe: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def silent(pipe: Connection) -> None:
    time.sleep(600)


def sleep(pipe: Connection) -> None:
    pipe.send("asleep")
    time.sleep(600)


def allocate(pipe: Connection, size: int) -> None:
    import torch

    pipe.send(torch.ones(size, dtype=torch.uint8).nbytes)


def busy(pipe: Connection) -> None:
    from experiments.measure.process import note

    for number in range(10):
        note(f"tt|step {number}")
        time.sleep(0.1)
    pipe.send("done")


# What goes wrong with a contender of a cell, by its name.


def _no_luck() -> None:
    raise ValueError("no such luck | <here>")


def _more_than_any_machine_has() -> None:
    import torch

    torch.empty(1 << 55, dtype=torch.uint8).fill_(1)


FAULTS: dict[str, Callable[[], object]] = {
    "torch": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "managed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "cached_lru": lambda: time.sleep(600),
    "cached_lfu": _more_than_any_machine_has,
    "disk_lru": _no_luck,
}


def serve_with_faults(pipe: Connection, orders: object) -> None:
    """experiments.run.worker.serve, where building some contenders ends badly."""
    from experiments.contenders.base import Contender, Task
    from experiments.measure import timing
    from experiments.run import worker

    real = timing.build

    def build(name: str, task: Task) -> Contender:
        FAULTS.get(name, lambda: None)()
        return real(name, task)

    timing.build = build
    worker.serve(pipe, orders)


def append_lines(pipe: Connection, folder: str, writer: int) -> None:
    from pathlib import Path

    from experiments.results.store import RunStore

    store = RunStore(Path(folder))
    for number in range(200):
        store.append({"writer": writer, "number": number, "filling": "x" * 2000})
    pipe.send(writer)


def append_to_a_full_disk(pipe: Connection, folder: str) -> None:
    import resource
    from pathlib import Path

    from experiments.results.store import RunStore

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    store, written = RunStore(Path(folder)), 0
    try:
        while True:
            store.append({"number": written, "filling": "x" * 700})
            written += 1
    except OSError as error:
        pipe.send((written, str(error)))
