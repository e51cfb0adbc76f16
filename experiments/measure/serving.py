"""Measure a cell of kind serving: requests of concurrent clients to read-only tables.

Contenders take turns; a turn is a block of requests. In a *closed* block each client sends a
request as soon as its last one was answered. That measures the highest rate of answers, but no
request waits for another one. In an *open* block requests arrive at random times that do not depend
on the answers. The latency of a request begins with its arrival, so that it includes the wait for a
free client. If a client measured from the start of the call, it would omit that wait ("coordinated
omission").
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.config.sweep import Arm, Cell
from experiments.contenders.base import fill_, pool_rows
from experiments.contenders.registry import WrongResult, build
from experiments.contenders.served import ServedTables
from experiments.machine.telemetry import telemetry_for
from experiments.measure.outcome import Outcome, build_arms, make_record, pool_entries
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.timing.latencies import CLOSED, bucket_of, phase_of
from experiments.workloads.workload import Batch, Pool, TableShape, make_pool, table_shapes

NS_PER_S = 1_000_000_000
SPIN_NS = 100_000  # time to poll the clock before a due time: a sleeping thread wakes up late
HEAD_START_NS = 1_000_000  # time from the start of a block to its first arrival, to start threads
CHECKED_BAGS = 32  # bags per table that are compared with the reference
ROUNDING = 1e-5  # error of float32 sums ÷ largest element
MAX_STEPS_OFF = 0.6  # error of a quantised value ÷ the difference of two neighbouring values

Request = Callable[[int], object]  # makes the request of a number; numbers count from 0 on


@dataclass
class RequestBlock:
    """The requests of one turn: the latency of each, and the time from the first to the last."""

    latencies_ns: list[int]
    seconds: float

    @property
    def per_second(self) -> float:
        """Return the requests that were answered per second."""
        return len(self.latencies_ns) / self.seconds


@dataclass
class LoadPoint:
    """The requests to one contender with a number of clients and a load, over all blocks.

    Attributes:
        request: function that makes the request of a number.
        clients: number of threads.
        load: rate of arrival ÷ rate of answers in the last closed block; CLOSED for closed blocks.
        blocks: blocks of requests.
    """

    request: Request
    clients: int
    load: float
    blocks: list[RequestBlock] = field(default_factory=list)

    def send(
        self, threads: ThreadPoolExecutor, seconds: float, rng: random.Random, closed: LoadPoint
    ) -> None:
        """Send a block of requests, and add it to `blocks`.

        `closed` is the point with as many clients and load CLOSED. An open block needs the rate of
        the last block of `closed`, to which its load is relative.
        """
        if self.load == CLOSED:
            self.blocks.append(send_closed_block(threads, self.request, self.clients, seconds))
            return
        rate = self.load * closed.blocks[-1].per_second
        times_ns = arrival_times_ns(rate, seconds, rng)
        self.blocks.append(send_open_block(threads, self.request, self.clients, times_ns))

    def entries(self) -> Record:
        """Return an entry of a record's `points`.

        Its entries are clients, load, requests (number in all blocks), seconds (of all blocks), and
        latencies, a list of (bucket, number of requests), see `timing.latencies`.
        """
        counts = Counter(bucket_of(ns) for block in self.blocks for ns in block.latencies_ns)
        return {
            "clients": self.clients,
            "load": self.load,
            "requests": sum(len(block.latencies_ns) for block in self.blocks),
            "seconds": sum(block.seconds for block in self.blocks),
            "latencies": sorted(counts.items()),
        }


def serving_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return one record per arm; `seconds` is the budget for the requests of all arms.

    A record has `points` (a list of `LoadPoint.entries`) and `cold_start` (the result of
    `cold_start`); they are empty if the status is not "ok". Its samples are the seconds per request
    of closed blocks.
    """
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    pool = make_pool(cell.workload, shapes, session.config.timing.pool, session.pool_seed)
    outcomes, tables = _build_tables(cell, shapes, pool, session)
    prepared_of_arm: dict[str, list[Any]] = {}
    request_of_arm: dict[str, Request] = {}
    for key, served in tables.items():
        with outcomes[key].catching():
            session.note(f"{key}|preparing requests")
            prepared_of_arm[key] = [served.prepare(batch) for batch in pool.batches]
            request_of_arm[key] = _warm_request(served, prepared_of_arm[key])
    with telemetry_for(session.device) as telemetry:
        points_of_arm = _serve(request_of_arm, cell.options, outcomes, session, seconds)
    records = []
    for arm in cell.arms:
        outcome = outcomes[arm.key]
        outcome.race_result.conclude(telemetry.flags(), telemetry.summary())
        record: Record = {"points": [], "cold_start": {}}
        if outcome.status == "ok":
            session.note(f"{arm.key}|starting from its file")
            with outcome.catching():
                outcome.nbytes = {"weights": tables[arm.key].nbytes()}
                record["cold_start"] = cold_start(tables[arm.key], prepared_of_arm[arm.key][0])
                record["points"] = [point.entries() for point in points_of_arm[arm.key]]
        records.append(make_record(cell, outcome, session) | pool_entries(pool) | record)
    return records


# Tables


def _build_tables(
    cell: Cell, shapes: Sequence[TableShape], pool: Pool, session: Session
) -> tuple[dict[str, Outcome], dict[str, ServedTables]]:
    """Build, fill and check the tables, see `build_arms`."""
    weights = [fill_(torch.empty(shape.rows, shape.dim), seed) for seed, shape in enumerate(shapes)]

    def build_filled(arm: Arm) -> ServedTables:
        served: ServedTables = build(arm.contender, shapes)
        served.fill(weights)
        session.note(f"{arm.key}|checking")
        verify_served(served, weights, pool.batches[0])
        return served

    return build_arms(cell, session, build_filled)


def verify_served(served: ServedTables, weights: Sequence[Tensor], batch: Batch) -> None:
    """Compare a lookup with sums of the float32 rows `weights`, [rows, dim] per table.

    At most CHECKED_BAGS bags per table are compared. The error of a value may be MAX_STEPS_OFF
    quantisation steps of its row: half a step because it is rounded to the nearest number, the rest
    because scale and offset are rounded to 16 bits.

    Raises:
        WrongResult: a shape differs, or an error is larger than the format explains.
    """
    output, column = served.lookup(served.prepare(batch)).float(), 0
    for table_index, rows in enumerate(weights):
        ids, offsets = batch.feature(table_index)
        offsets = offsets[: CHECKED_BAGS + 1]
        ids = ids[: int(offsets[-1])]
        expected_rows = pool_rows(rows, ids, offsets)
        served_rows = output[: len(expected_rows), column : column + rows.size(1)]
        column += rows.size(1)
        tolerances = ROUNDING * float(rows.abs().max()) * torch.ones(len(rows), 1)
        if served.bits < 32:
            step_sizes = (rows.amax(1) - rows.amin(1)).unsqueeze(1) / (2**served.bits - 1)
            tolerances = tolerances + MAX_STEPS_OFF * step_sizes
        if served_rows.shape != expected_rows.shape:
            raise WrongResult(
                f"lookup: table {table_index} has rows of shape {tuple(served_rows.shape)}, "
                f"the reference has {tuple(expected_rows.shape)}"
            )
        error, max_errors = (served_rows - expected_rows).abs(), pool_rows(tolerances, ids, offsets)
        if not (error <= max_errors).all():
            raise WrongResult(
                f"lookup: table {table_index} differs from float32 rows by up to "
                f"{float(error.max()):.3g}, allowed is {float(max_errors.max()):.3g}"
            )


def _warm_request(served: ServedTables, prepared: Sequence[Any]) -> Request:
    """Make each prepared request once, to warm up; return a function that makes request n.

    Request n is the prepared one of number n modulo their number.
    """
    lookup, num_requests = served.lookup, len(prepared)
    for request in prepared:
        lookup(request)
    return lambda request_number: lookup(prepared[request_number % num_requests])


# Load


def _serve(
    request_of_arm: Mapping[str, Request],
    options: Mapping[str, Any],
    outcomes: Mapping[str, Outcome],
    session: Session,
    seconds: float,
) -> dict[str, list[LoadPoint]]:
    """Send requests of all arms, the arms in turns; return the points of each arm.

    Set stop reason and samples of the outcomes; samples are the seconds per request of closed
    blocks. An error of an arm becomes its outcome, and ends its blocks.

    Args:
        request_of_arm: request of each arm.
        options: options of the kind, of which `clients`, `loads` and `rounds` are used.
        outcomes: outcomes of the arms.
        session: run and process.
        seconds: budget of all blocks.
    """
    loads = (CLOSED, *options["loads"])
    clients_and_loads = [(clients, load) for clients in options["clients"] for load in loads]
    points_of_arm = {
        arm: {pair: LoadPoint(request, *pair) for pair in clients_and_loads}
        for arm, request in request_of_arm.items()
    }
    block_s = seconds / max(1, options["rounds"] * len(clients_and_loads) * len(request_of_arm))
    rng = random.Random(session.seed)
    with ThreadPoolExecutor(max(options["clients"])) as threads:
        for clients, load in clients_and_loads * options["rounds"]:
            for key in rng.sample(list(request_of_arm), len(request_of_arm)):
                if outcomes[key].status != "ok":
                    continue
                session.note(f"{key}|{clients} clients, load {load:g}")
                points = points_of_arm[key]
                with outcomes[key].catching():
                    points[clients, load].send(threads, block_s, rng, points[clients, CLOSED])
    for key, points in points_of_arm.items():
        outcomes[key].race_result.stop_reason = "budget"
        outcomes[key].race_result.samples = {
            phase_of(clients): [
                (number, 1 / block.per_second)
                for number, block in enumerate(points[clients, CLOSED].blocks)
            ]
            for clients in options["clients"]
        }
    return {key: list(points.values()) for key, points in points_of_arm.items()}


def send_closed_block(
    threads: ThreadPoolExecutor, request: Request, clients: int, seconds: float
) -> RequestBlock:
    """Let every client send requests for `seconds`, the next as soon as the last was answered.

    Each client sends one at least. `threads` must have `clients` idle workers, because the clients
    start together. An exception of a request is raised once all clients have ended.
    """
    start_barrier = threading.Barrier(clients)

    def client(first_number: int) -> tuple[int, int, list[int]]:
        with torch.inference_mode():  # the mode of a thread
            start_barrier.wait()
            latencies_ns: list[int] = []
            start_ns = sent_ns = time.perf_counter_ns()
            end_ns, request_number = start_ns + int(seconds * NS_PER_S), first_number
            while sent_ns < end_ns or not latencies_ns:
                request(request_number)
                answered_ns = time.perf_counter_ns()
                latencies_ns.append(answered_ns - sent_ns)
                sent_ns, request_number = answered_ns, request_number + clients
            return start_ns, sent_ns, latencies_ns

    return _run_clients(threads, client, clients)


def arrival_times_ns(rate: float, seconds: float, rng: random.Random) -> list[int]:
    """Return times of random arrivals in ns: 0, then a Poisson process up to `seconds`.

    `rate` > 0 is the mean number of arrivals per second.
    """
    times_s = [0.0]
    while (next_time_s := times_s[-1] + rng.expovariate(rate)) < seconds:
        times_s.append(next_time_s)
    return [int(time_s * NS_PER_S) for time_s in times_s]


def send_open_block(
    threads: ThreadPoolExecutor, request: Request, clients: int, times_ns: Sequence[int]
) -> RequestBlock:
    """Let requests arrive at the times `times_ns`, ascending; each goes to the next free client.

    Latencies begin with the arrivals. An exception of a request is raised once all clients ended.
    """
    request_numbers = itertools.count()
    begin_ns = time.perf_counter_ns() + HEAD_START_NS

    def client(_: int) -> tuple[int, int, list[int]]:
        with torch.inference_mode():
            latencies_ns: list[int] = []
            answered_ns = begin_ns
            while (request_number := next(request_numbers)) < len(times_ns):
                arrival_ns = begin_ns + times_ns[request_number]
                _wait_until(arrival_ns)
                request(request_number)
                answered_ns = time.perf_counter_ns()
                latencies_ns.append(answered_ns - arrival_ns)
            return begin_ns, answered_ns, latencies_ns

    return _run_clients(threads, client, clients)


def _wait_until(due_ns: int) -> None:
    """Sleep until SPIN_NS before a time, then poll the clock and yield to other threads."""
    while (remaining_ns := due_ns - time.perf_counter_ns()) > 0:
        time.sleep(max(0, remaining_ns - SPIN_NS) / NS_PER_S)


def _run_clients(
    threads: ThreadPoolExecutor, client: Callable[[int], tuple[int, int, list[int]]], clients: int
) -> RequestBlock:
    """Run the clients, each of which returns (start, end, latencies) in ns.

    Wait for all of them, even if one fails: a client that still runs would disturb the next block.
    """
    futures = [threads.submit(client, number) for number in range(clients)]
    wait(futures)
    starts_ns, ends_ns, latencies_ns = zip(*(future.result() for future in futures), strict=True)
    return RequestBlock(
        list(itertools.chain(*latencies_ns)), (max(ends_ns) - min(starts_ns)) / NS_PER_S
    )


# Cold start


def cold_start(served: ServedTables, prepared: Any) -> Record:
    """Save the tables, and measure the time from opening their file to the first answer.

    Returns:
        `bytes` (of the file); `memory`, the seconds if the file is in the system's page cache;
        `disk`, the seconds after the system was asked to drop the file's pages, which some file
        systems do not do.
    """
    with tempfile.TemporaryDirectory(prefix="emblib-") as folder, torch.inference_mode():
        path = Path(folder) / "tables"
        served.save(path)
        return {
            "bytes": path.stat().st_size,
            "disk": _seconds_to_answer(served, path, prepared, drop_pages=True),
            "memory": _seconds_to_answer(served, path, prepared, drop_pages=False),
        }


def _seconds_to_answer(
    served: ServedTables, path: Path, prepared: Any, *, drop_pages: bool
) -> float:
    if drop_pages:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    reopened = type(served)(served.shapes)
    start = time.perf_counter_ns()
    reopened.open(path)
    reopened.lookup(prepared)
    return (time.perf_counter_ns() - start) / NS_PER_S
