"""Several ranks on one machine: a cell measured by N processes that keep step, under torchrun.

Every rank builds the contenders and has batches of its own; `experiments.run.lockstep` keeps them
together. Rank 0 returns the records, with every rank's seconds in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.results.store import Record
from experiments.run import kinds
from experiments.run.lockstep import Elsewhere, RankGroup, told
from experiments.run.orphans import killed_with_parent
from experiments.run.process import note
from experiments.run.worker import Orders
from experiments.timing import memory

LOOK_SECONDS = 0.5
GOODBYE_SECONDS = 10.0  # for torchrun to say how its processes ended
MODULE = "experiments.run.ranks"


class TorchPeers:
    """Over gloo, on the host: keeping step puts no work on a GPU."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        """On the host as well; a device is waited for by the clock."""
        self.gather([0.0])

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """One small tensor from each."""
        mine = torch.tensor(values, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        return [tensor.tolist() for tensor in every]

    def exchange(self, value: Any) -> list[Any]:
        """Pickled; rare."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value)
        return every


# A rank


def main() -> None:
    """One process of torchrun's: measure, and tell the one that started it."""
    killed_with_parent()
    with connection.Client(sys.argv[1], "AF_UNIX") as pipe:
        pipe.send(int(os.environ["RANK"]))
        orders: Orders = pipe.recv()
        try:
            records = _measure(orders, pipe)
        except Exception as error:
            pipe.send(_Failed(*told(error)))
            raise
        pipe.send(records)
        # Torchrun ends all when one ends badly, as torch can make it, and others may still send.
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()


@dataclasses.dataclass(frozen=True)
class _Failed:
    """A rank's last words."""

    text: str
    out_of_memory: bool


def _measure(orders: Orders, pipe: Connection) -> list[Record]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config, device = orders.session.config, orders.session.device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        _keep_to_own_cores(rank, size)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    memory.keep_freed_blocks()
    patience = datetime.timedelta(seconds=config.timing.limit_seconds or 1e6)
    dist.init_process_group("gloo", timeout=patience)
    try:
        ranks = RankGroup(TorchPeers())
        session = dataclasses.replace(orders.session, device=device, note=pipe.send, team=ranks)
        cell, kind = orders.cell, orders.cell.kind
        records = kinds.function(kinds.MEASURES[kind])(cell, session, orders.seconds)
    finally:
        dist.destroy_process_group()
    return [record | _by_rank(record, ranks) for record in records]


def _keep_to_own_cores(rank: int, size: int) -> None:
    """An equal share of neighbouring cores, if there is one for each rank."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= size:
            own = cores[rank * len(cores) // size : (rank + 1) * len(cores) // size]
            os.sched_setaffinity(0, own)


def _by_rank(record: Record, ranks: RankGroup) -> Record:
    """Seconds of every rank for each sample, whose own value is that of the slowest."""
    clock = ranks.clocks.get(record["mode"])
    calls = record.get("executions", {})
    found = {
        phase: clock.seconds_of(f"{record['arm']}/{phase}", taken, calls.get(phase, 1))
        for phase, taken in record["samples"].items()
        if clock
    }
    return {"rank_samples": found, "rank_threads": torch.get_num_threads()}


# The process that starts them


def lead(pipe: Connection, orders: Orders) -> None:
    """Measure the cell on `device.ranks` ranks and send its records; a failure is raised."""
    ranks = orders.session.config.device.ranks
    note(f"|starting {ranks} ranks")
    with tempfile.TemporaryDirectory() as folder, _listening(f"{folder}/ranks") as server:
        output = Path(folder) / "output"
        with output.open("wb") as stream:
            agent = subprocess.Popen(
                [*_torchrun(ranks), f"{folder}/ranks"],
                env=_environment(orders),
                stdout=stream,
                stderr=stream,
                preexec_fn=killed_with_parent,
            )
        try:
            pipes = dict(_arrivals(server, agent, ranks, output))
            for other in pipes.values():
                other.send(orders)
            pipe.send(_converse(pipes, agent, output))
        finally:
            agent.kill()
            agent.wait()


def _torchrun(ranks: int) -> list[str]:
    single = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    return [sys.executable, "-m", "torch.distributed.run", *single, "-m", MODULE]


def _environment(orders: Orders) -> dict[str, str]:
    """The modules of this process, and as many threads as each rank gets."""
    device = orders.session.config.device
    path = os.pathsep.join(p for p in sys.path if p)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = device.threads or max(1, (cores or 1) // device.ranks)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def _listening(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    server.settimeout(LOOK_SECONDS)
    return server


def _arrivals(
    server: socket.socket, agent: subprocess.Popen[bytes], ranks: int, output: Path
) -> Iterator[tuple[int, Connection]]:
    for _ in range(ranks):
        while True:
            try:
                arrived = Connection(server.accept()[0].detach())
                break
            except TimeoutError:
                if agent.poll() is not None:
                    raise _death(None, agent, output) from None
        yield int(arrived.recv()), arrived


def _converse(
    pipes: Mapping[int, Connection], agent: subprocess.Popen[bytes], output: Path
) -> list[Record]:
    """Pass notes on until every rank has sent its records; those of rank 0.

    Ranks need not be at the same arm: of one that fails it is its own last note that stands.
    """
    open_pipes = {other: rank for rank, other in pipes.items()}
    doing = dict.fromkeys(pipes, "")
    found: list[Record] = []
    while open_pipes:
        for other in connection.wait(list(open_pipes)):
            assert isinstance(other, Connection)
            rank = open_pipes[other]
            try:
                message = other.recv()
            except (EOFError, OSError):
                note(doing[rank])
                raise _death(rank, agent, output) from None
            if isinstance(message, _Failed):
                note(doing[rank])
                text = f"rank {rank}: {message.text}"
                raise MemoryError(text) if message.out_of_memory else Elsewhere(text)
            if isinstance(message, str):
                doing[rank] = message
                if rank == 0:
                    note(message)
                continue
            found = message if rank == 0 else found
            del open_pipes[other]
    return found


def _death(rank: int | None, agent: subprocess.Popen[bytes], output: Path) -> Exception:
    """Why a rank is gone, from what torchrun says when it has cleaned up."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        agent.wait(GOODBYE_SECONDS)
    said = output.read_text(errors="replace")
    who = "torchrun" if rank is None else f"rank {rank}"
    if re.search(r"Signal 9 \(SIGKILL\)|exitcode\s*: -9", said):
        return MemoryError(f"{who} was killed from outside (SIGKILL), as by a lack of memory")
    signals = re.findall(r"Signal \d+ \((\w+)\)", said)
    if signals:
        return Elsewhere(f"{who} crashed ({signals[0]})")
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "no output")
    return Elsewhere(f"{who} ended without an answer: {last.strip()}")


if __name__ == "__main__":
    # What this process sends is unpickled by one whose own `__main__` is another module.
    from experiments.run.ranks import main as of_the_module

    of_the_module()
