"""Worlds of 1 to 4 ranks for tests: four processes over gloo, started once and kept.

`run(3, function, *args)` calls `function(ranks, *args)` on three ranks and returns what they
returned, by rank. The function is one of a module (also the test's own), since the processes import
it; arguments and results are pickled, and the seed is the same on all ranks. An error of a rank is
raised with its traceback. Functions may set the limits of the input_dist, which are restored. The
processes are forked by one that has imported torch and emblib, for all that share the tests, so
that another world costs a tenth of a second; one is made whenever a test has left the last one
unfit. That process imports the module for which a world is made before it forks, so that the ranks
need not each import it. `run_module` runs a program in such a fork.

With EMBLIB_TEST_RANKS=cuda the device of a rank is a GPU, which the functions find in
`ranks.device`: one of its own, or one of the two pretend GPUs (docs/pretend_gpu.md), over NCCL or
what is in its place.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from experiments.measure.process import request_signal_at_parent_end

RANKS = 4
PATIENCE_SECONDS = 120.0  # for a whole call; the machine of a test may be busy
COLLECTIVE_SECONDS = 60.0
GRACE_SECONDS = 1.0  # for the others to fail too, once a rank has
START_SECONDS = 120.0
GROUPS_PER_RUN = 1000  # process groups that a function may make, at most
ON_GPUS = os.environ.get("EMBLIB_TEST_RANKS") == "cuda"
SHARED = "EMBLIB_TEST_WORLDS"  # names the run of the processes that share the tests (conftest.py)


class RankError(AssertionError):
    """What the ranks of a world said when it failed; `answers` are of those that did not."""

    def __init__(self, message: str, answers: dict[int, Any]) -> None:
        super().__init__(message)
        self.answers = answers


class World(NamedTuple):
    """An order to fork ranks.

    Attributes:
        number: the number of the world among those of a client.
        module: the module that all ranks need.
    """

    number: int
    module: str


class Program(NamedTuple):
    """An order to run a module as the main program in a fork.

    Attributes:
        name: the module.
        words: the arguments of the command line.
        outputs: the files of the standard output and of errors.
    """

    name: str
    words: Sequence[str]
    outputs: Sequence[Path]


# In the test's process


class Pool:
    """The processes of this test run."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="worlds"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._folder / "pool"))
        self._server.listen()
        self._server.settimeout(START_SECONDS)
        self._orders = _connect(self._folder)
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        self._worlds = self._runs = 0

    def run(
        self, size: int, name: str, args: tuple[Any, ...], patience: float, grace: float
    ) -> list[Any]:
        """See `run` of the module."""
        if not self._pipes:
            self._start(name.partition(":")[0])
        self._runs += 1
        order = pickle.dumps((self._runs, size, name, args))
        for pipe in self._pipes[:size]:
            pipe.send_bytes(order)
        answers, problems = self._collect(size, patience, grace)
        if problems:
            self.stop()
            raise RankError("\n".join([f"{name} on {size} ranks failed", *problems]), answers)
        return [answers[rank] for rank in range(size)]

    def run_module(self, name: str, words: Sequence[str], patience: float) -> tuple[bool, str, str]:
        """See `run_module` of the module."""
        outputs = [self._folder / "stdout", self._folder / "stderr"]
        succeeded = False
        self._orders.send((self._folder, Program(name, words, outputs)))
        pid = self._orders.recv()
        with self._accept() as pipe, contextlib.suppress(EOFError, OSError):
            succeeded = pipe.poll(patience) and bool(pipe.recv())
        if not succeeded:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        output, errors = (path.read_text() for path in outputs)
        return succeeded, output, errors

    def _collect(
        self, size: int, patience: float, grace: float
    ) -> tuple[dict[int, Any], list[str]]:
        """Results by rank, and what went wrong, the first first."""
        answers: dict[int, Any] = {}
        problems: list[str] = []
        open_pipes = {self._pipes[rank]: rank for rank in range(size)}
        end = time.monotonic() + patience
        while open_pipes:
            ready = connection.wait(list(open_pipes), max(0.0, end - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                try:
                    failed, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    failed, value = True, "the process died"
                if failed:
                    problems.append(f"rank {rank}: {value}")
                    end = min(end, time.monotonic() + grace)
                else:
                    answers[rank] = value
            if not ready:
                late = sorted(open_pipes.values())
                problems += [
                    f"rank {rank} did not end; it was at\n{self._at(rank)}" for rank in late
                ]
                break
        return answers, problems

    def _at(self, rank: int) -> str:
        """The stack of a rank that hangs."""
        stack = self._folder / f"stack{self._worlds}.{rank}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.2)
        return stack.read_text() if stack.exists() else "?"

    def _start(self, module: str) -> None:
        """Start the ranks of a world whose first function is of `module`."""
        self._worlds += 1
        self._orders.send((self._folder, World(self._worlds, module)))
        self._pids = self._orders.recv()
        arrived = dict(_first_word(self._accept()) for _ in range(RANKS))
        self._pipes = [arrived[rank] for rank in range(RANKS)]

    def _accept(self) -> Connection:
        return Connection(self._server.accept()[0].detach())

    def stop(self) -> None:
        """End the world; the next call makes another."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._pids = []

    def close(self) -> None:
        """End the ranks; the process that forks them ends with its last client."""
        self.stop()
        self._orders.close()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _connect(folder: Path) -> Connection:
    """Connect to the process that forks ranks; start it if it is not there.

    Processes that share the tests share it. One alone has its own, in `folder`.
    """
    if SHARED in os.environ:
        folder = Path(tempfile.gettempdir(), f"worlds-{os.environ[SHARED]}-{ON_GPUS}")
    address = folder / "host"
    with _locked(folder), socket.socket(socket.AF_UNIX) as door:
        with contextlib.suppress(OSError):
            return connection.Client(str(address), "AF_UNIX")
        address.unlink(missing_ok=True)
        door.bind(str(address))
        door.listen()
        environment = {
            "PYTHONPATH": os.pathsep.join(p for p in [os.getcwd(), *sys.path] if p),
            "OMP_NUM_THREADS": "1",
            "EMBLIB_KEEP_OUTPUTS": "0",  # for tests that measure the memory of a step
        }
        _hosts.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.sharding.worlds", str(folder), str(door.fileno())],
                env=os.environ | environment,
                pass_fds=[door.fileno()],
            )
        )
        return connection.Client(str(address), "AF_UNIX")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made where another process has removed it."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            lock = (folder / "lock").open("w")
        except FileNotFoundError:
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_in_place(lock):
                yield
                return


def _is_in_place(file: TextIO) -> bool:
    """Return whether an open file is still the one of its name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    return False


def _first_word(pipe: Connection) -> tuple[int, Connection]:
    return int(pipe.recv()), pipe


_pool: Pool | None = None
_hosts: list[subprocess.Popen[bytes]] = []  # that this process has started; they end by themselves


def run(
    size: int,
    function: Callable[..., Any] | str,
    *args: Any,
    patience: float = PATIENCE_SECONDS,
    grace: float = GRACE_SECONDS,
) -> list[Any]:
    """What `function(ranks, *args)` returned on each of `size` ranks (1 to 4), by rank.

    `function` is a function of a module, or its name as "module:function". Tensors in the results
    are copies on the CPU. Fails with `RankError` if a rank raises, dies, or takes more than
    `patience` s; once one has, the others are given `grace` s.
    """
    if not 1 <= size <= RANKS:
        raise ValueError(f"a world has 1 to {RANKS} ranks, not {size}")
    name = function if isinstance(function, str) else _name(function)
    return _the_pool().run(size, name, args, patience, grace)


def run_module(name: str, words: Sequence[str], patience: float) -> tuple[bool, str, str]:
    """Run `python -m name words` in a process of one thread that need not import torch.

    Returns:
        Whether it ended well within `patience` s, its output, and what it said of errors.
    """
    return _the_pool().run_module(name, words, patience)


def rest() -> None:
    """End the ranks; the next call starts others."""
    if _pool is not None:
        _pool.stop()


def _the_pool() -> Pool:
    global _pool
    if _pool is None:
        _pool = Pool()
        atexit.register(_pool.close)
    return _pool


def _name(function: Callable[..., Any]) -> str:
    if "<" in function.__qualname__ or "." in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__} is not a function of a module, so that the ranks cannot "
            "import it: move it to the top level of its file"
        )
    return f"{function.__module__}:{function.__qualname__}"


# In the processes


def main(folder: str, number: str) -> None:
    """Import what the ranks need, then fork them whenever a world is asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are not waited for
    import torch

    from tests import quick_close

    if ON_GPUS:
        importlib.import_module("tests.pretend.plugin")  # before emblib is imported
    # Optimizers and DDP import dynamo when they are first used: once here, or in each rank.
    for name in ("torch._dynamo", "pytest", "emblib.sharding", "emblib.collections"):
        importlib.import_module(name)
    quick_close.install()
    torch.set_num_threads(1)
    gc.freeze()  # a collection of a rank would look through all that torch has loaded, and copy it
    door = socket.socket(fileno=int(number))
    clients = [Connection(door.accept()[0].detach())]
    while clients or not _close_door(Path(folder), door):
        for ready in connection.wait([door, *clients]):
            if ready is door:
                clients.append(Connection(door.accept()[0].detach()))
                continue
            assert isinstance(ready, Connection)
            try:
                asked, what = ready.recv()
            except (EOFError, OSError):
                clients.remove(ready)
                ready.close()
                continue
            if isinstance(what, World):
                _import_once(what.module)
            children = []
            for rank in range(RANKS if isinstance(what, World) else 1):
                child = os.fork()
                if child == 0:
                    for other in (door, *clients):
                        other.close()
                    if isinstance(what, World):
                        _be_rank(asked, what.number, rank)
                    _be_program(asked, *what)
                children.append(child)
            with contextlib.suppress(OSError):  # the client has gone
                ready.send(children if isinstance(what, World) else children[0])


def _import_once(module: str) -> None:
    """Import a module for all ranks that are forked from now on."""
    if module in sys.modules:
        return
    # The ranks raise it again, with the traceback.
    with contextlib.suppress(BaseException):
        importlib.import_module(module)
    gc.freeze()


def _close_door(folder: Path, door: socket.socket) -> bool:
    """Let no client in any more; False if one has come since the last one left."""
    with _locked(folder):  # nothing connects meanwhile
        if connection.wait([door], 0):
            return False
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _be_rank(folder: Path, number: int, rank: int) -> None:
    """Run what is requested until requests end; does not return."""
    import torch

    try:
        request_signal_at_parent_end(signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stack = open(f"{folder}/stack{number}.{rank}", "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        # After a fork torch replaces its pool of threads at the first use, without a lock: if two
        # threads use it at once, one may raise "Invalid thread pool".
        torch.set_num_threads(1)
        worlds = _meet(f"{folder}/meeting{number}", rank)
        with connection.Client(f"{folder}/pool", "AF_UNIX") as pipe:
            pipe.send(rank)
            _serve(pipe, rank, worlds)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        # Nothing of the process that forked may run again here.
        os._exit(0)


def _be_program(folder: Path, name: str, words: Sequence[str], outputs: Sequence[Path]) -> None:
    """Run a module as the main program; does not return."""
    try:
        request_signal_at_parent_end(signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with connection.Client(f"{folder}/pool", "AF_UNIX") as pipe:
            for path, standard in zip(outputs, (1, 2), strict=True):
                with path.open("wb") as file:
                    os.dup2(file.fileno(), standard)
            sys.argv = [name, *words]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
            sys.stdout.flush()
            pipe.send(True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _meet(meeting: str, rank: int) -> Sequence[Any]:
    """The first `size` ranks as `RankGroup`, for each size that this one is of."""
    import torch
    import torch.distributed as dist

    from emblib.sharding.ranks import RankGroup

    patience = timedelta(seconds=COLLECTIVE_SECONDS)
    if ON_GPUS:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if ON_GPUS else "gloo"
    dist.init_process_group(
        backend, f"file://{meeting}", rank=rank, world_size=RANKS, timeout=patience
    )
    groups = [dist.new_group(list(range(size)), patience) for size in range(1, RANKS + 1)]
    return [RankGroup(group) if rank < size else None for size, group in enumerate(groups, 1)]


def _serve(pipe: Connection, rank: int, worlds: Sequence[Any]) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_map_only

    while True:
        try:
            order = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            number, size, name, args = pickle.loads(order)
            # Groups are named by a count, in which ranks differ if the last world had fewer.
            dist.distributed_c10d._world.group_count = GROUPS_PER_RUN * number
            module, function = name.split(":")
            torch.manual_seed(0)
            with _limits_restored():
                value = getattr(importlib.import_module(module), function)(worlds[size - 1], *args)
            if ON_GPUS:
                torch.cuda.synchronize()  # raises what no call has raised
                value = tree_map_only(torch.Tensor, torch.Tensor.cpu, value)
            answer = pickle.dumps((False, value))
        except BaseException as error:
            answer = pickle.dumps((True, "".join(traceback.format_exception(error))))
        pipe.send_bytes(answer)


@contextlib.contextmanager
def _limits_restored() -> Iterator[None]:
    """Undo changes of the sizes from which messages are sent otherwise."""
    from emblib.sharding import input_dist, input_messages

    limits = ((input_dist, "_MIN_SAVED_ELEMENTS"), (input_messages, "_MAX_MERGED_NBYTES"))
    before = [getattr(module, name) for module, name in limits]
    try:
        yield
    finally:
        for (module, name), value in zip(limits, before, strict=True):
            setattr(module, name, value)


if __name__ == "__main__":
    # Orders are pickled: their classes are those of this module, not of `__main__`.
    importlib.import_module("tests.sharding.worlds").main(*sys.argv[1:])
