"""Measure a cell of kind serving: requests of concurrent clients to read-only tables.

Contenders take turns, a block of requests each. In closed blocks each client sends a request as
soon as its last one was answered: the rate is what the contender can answer, but no request ever
waits behind another one. In open blocks requests arrive at random times that do not depend on the
answers, and the latency of a request begins with its arrival, so that it includes the wait for a
free client. A client that measured from its own start would omit that wait ("coordinated
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
from experiments.contenders.registry import Wrong, build
from experiments.contenders.served import Served
from experiments.machine.telemetry import telemetry_for
from experiments.measure.outcome import Outcome, build_arms, describe, facts
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.timing.latencies import CLOSED, bucket_of, phase_of
from experiments.workloads.workload import Batch, Pool, TableShape, make_pool, table_shapes

NS = 1_000_000_000
SPIN_NS = 100_000  # a thread that sleeps wakes up about this late at worst
HEAD_START_NS = 1_000_000  # from the start of a block to its first arrival: threads start meanwhile
CHECKED_BAGS = 32  # bags per table that are compared with the reference
ROUNDING = 1e-5  # error of float32 sums ÷ largest element
MAX_STEPS_OFF = 0.6  # error of a quantised value ÷ the difference of two neighbouring values

Request = Callable[[int], object]


@dataclass
class RequestBlock:
    """Requests that were sent in one go: the latency of each, and the seconds of all."""

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
        load: rate of arrival ÷ rate of the last closed block; CLOSED for closed blocks.
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

        `closed` is the point of as many clients with load CLOSED. An open block needs one of its
        blocks, whose rate is what the clients can answer.
        """
        if self.load == CLOSED:
            self.blocks.append(closed_block(threads, self.request, self.clients, seconds))
            return
        rate = self.load * closed.blocks[-1].per_second
        times = arrivals(rate, seconds, rng)
        self.blocks.append(open_block(threads, self.request, self.clients, times))

    def describe(self) -> Record:
        """Return a point of the record: clients, load, requests, seconds of all blocks.

        `latencies` are [bucket, requests] pairs, see `timing.latencies`.
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
    """Return a record per arm; `seconds` is the budget for the requests of all arms.

    A record has `points` (of `LoadPoint.describe`) and `cold_start` (of that function), empty if
    the status is not "ok"; its samples are the seconds per request of closed blocks.
    """
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    pool = make_pool(cell.workload, shapes, session.config.timing.pool, session.pool_seed)
    outcomes, tables = _build(cell, shapes, pool, session)
    prepared: dict[str, list[Any]] = {}
    requests: dict[str, Request] = {}
    for key, served in tables.items():
        with outcomes[key].catching():
            session.note(f"{key}|preparing requests")
            prepared[key] = [served.prepare(batch) for batch in pool.batches]
            requests[key] = _requests(served, prepared[key])
    with telemetry_for(session.device) as telemetry:
        points = _serve(requests, cell.options, outcomes, session, seconds)
    records = []
    for arm in cell.arms:
        outcome = outcomes[arm.key]
        outcome.measured.conclude(telemetry.flags(), telemetry.summary())
        record: Record = {"points": [], "cold_start": {}}
        if outcome.status == "ok":
            session.note(f"{arm.key}|starting from its file")
            with outcome.catching():
                outcome.nbytes = {"weights": tables[arm.key].nbytes()}
                record["cold_start"] = cold_start(tables[arm.key], prepared[arm.key][0])
                record["points"] = [point.describe() for point in points[arm.key]]
        records.append(describe(cell, outcome, session) | facts(pool) | record)
    return records


# Tables


def _build(
    cell: Cell, shapes: Sequence[TableShape], pool: Pool, session: Session
) -> tuple[dict[str, Outcome], dict[str, Served]]:
    """Build, fill and check the tables, see `build_arms`."""
    weights = [fill_(torch.empty(s.rows, s.dim), seed) for seed, s in enumerate(shapes)]

    def build_filled(arm: Arm) -> Served:
        served: Served = build(arm.contender, shapes)
        served.fill(weights)
        session.note(f"{arm.key}|checking")
        verify_served(served, weights, pool.batches[0])
        return served

    return build_arms(cell, session, build_filled)


def verify_served(served: Served, weights: Sequence[Tensor], batch: Batch) -> None:
    """Compare a lookup with sums of the float32 rows; raise Wrong beyond the error of the format.

    At most CHECKED_BAGS bags per table are compared. A value may be off by MAX_STEPS_OFF steps of
    its row: rounding to the nearest number takes a half, the rounding of scale and offset to 16
    bits the rest.
    """
    output, column = served.lookup(served.prepare(batch)).float(), 0
    for f, rows in enumerate(weights):
        ids, offsets = batch.feature(f)
        offsets = offsets[: CHECKED_BAGS + 1]
        ids = ids[: int(offsets[-1])]
        expected_rows = pool_rows(rows, ids, offsets)
        served_rows = output[: len(expected_rows), column : column + rows.size(1)]
        column += rows.size(1)
        tolerances = ROUNDING * float(rows.abs().max()) * torch.ones(len(rows), 1)
        if served.bits < 32:
            steps = (rows.amax(1) - rows.amin(1)).unsqueeze(1) / (2**served.bits - 1)
            tolerances = tolerances + MAX_STEPS_OFF * steps
        if served_rows.shape != expected_rows.shape:
            raise Wrong(
                f"lookup: table {f} has rows of shape {tuple(served_rows.shape)}, the reference "
                f"has {tuple(expected_rows.shape)}"
            )
        error, allowed = (served_rows - expected_rows).abs(), pool_rows(tolerances, ids, offsets)
        if not (error <= allowed).all():
            raise Wrong(
                f"lookup: table {f} differs from float32 rows by up to {float(error.max()):.3g}, "
                f"allowed is {float(allowed.max()):.3g}"
            )


def _requests(served: Served, prepared: Sequence[Any]) -> Request:
    """Return a function that makes the request of a number; each was made once, to warm up."""
    lookup, count = served.lookup, len(prepared)
    for request in prepared:
        lookup(request)
    return lambda number: lookup(prepared[number % count])


# Load


def _serve(
    requests: Mapping[str, Request],
    options: Mapping[str, Any],
    outcomes: Mapping[str, Outcome],
    session: Session,
    seconds: float,
) -> dict[str, list[LoadPoint]]:
    """Send all requests, the arms in turns; return the points of each arm.

    Samples are the seconds per request of closed blocks.
    """
    loads = (CLOSED, *options["loads"])
    kinds = [(clients, load) for clients in options["clients"] for load in loads]
    points = {key: {k: LoadPoint(call, *k) for k in kinds} for key, call in requests.items()}
    block_s = seconds / max(1, options["rounds"] * len(kinds) * len(requests))
    rng = random.Random(session.seed)
    with ThreadPoolExecutor(max(options["clients"])) as threads:
        for clients, load in kinds * options["rounds"]:
            for key in rng.sample(list(requests), len(requests)):
                if outcomes[key].status != "ok":
                    continue
                session.note(f"{key}|{clients} clients, load {load:g}")
                by_kind = points[key]
                with outcomes[key].catching():
                    by_kind[clients, load].send(threads, block_s, rng, by_kind[clients, CLOSED])
    for key, by_kind in points.items():
        outcomes[key].measured.stop_reason = "budget"
        outcomes[key].measured.samples = {
            phase_of(clients): [
                (number, 1 / block.per_second)
                for number, block in enumerate(by_kind[clients, CLOSED].blocks)
            ]
            for clients in options["clients"]
        }
    return {key: list(by_kind.values()) for key, by_kind in points.items()}


def closed_block(
    threads: ThreadPoolExecutor, request: Request, clients: int, seconds: float
) -> RequestBlock:
    """Let every client send a request as soon as its last one was answered, each at least once.

    `threads` must have `clients` idle workers, because the clients start together.
    """
    start_barrier = threading.Barrier(clients)

    def client(first: int) -> tuple[int, int, list[int]]:
        with torch.inference_mode():  # the mode of a thread
            start_barrier.wait()
            latencies: list[int] = []
            start = now = time.perf_counter_ns()
            end, number = start + int(seconds * NS), first
            while now < end or not latencies:
                request(number)
                answered = time.perf_counter_ns()
                latencies.append(answered - now)
                now, number = answered, number + clients
            return start, now, latencies

    return _gather(threads, client, clients)


def arrivals(rate: float, seconds: float, rng: random.Random) -> list[int]:
    """Return times in ns of random arrivals: 0, then a Poisson process of `rate` > 0 per second."""
    times = [0.0]
    while (next_one := times[-1] + rng.expovariate(rate)) < seconds:
        times.append(next_one)
    return [int(time_s * NS) for time_s in times]


def open_block(
    threads: ThreadPoolExecutor, request: Request, clients: int, times_ns: Sequence[int]
) -> RequestBlock:
    """Answer requests that arrive at given times, in order; each goes to the next free client."""
    numbers = itertools.count()
    begin = time.perf_counter_ns() + HEAD_START_NS

    def client(_: int) -> tuple[int, int, list[int]]:
        with torch.inference_mode():
            latencies: list[int] = []
            answered = begin
            while (number := next(numbers)) < len(times_ns):
                arrival = begin + times_ns[number]
                _wait_until(arrival)
                request(number)
                answered = time.perf_counter_ns()
                latencies.append(answered - arrival)
            return begin, answered, latencies

    return _gather(threads, client, clients)


def _wait_until(due_ns: int) -> None:
    """Sleep until shortly before a time, then let other threads run until it has come."""
    while (remaining_ns := due_ns - time.perf_counter_ns()) > 0:
        time.sleep(max(0, remaining_ns - SPIN_NS) / NS)


def _gather(
    threads: ThreadPoolExecutor, client: Callable[[int], tuple[int, int, list[int]]], clients: int
) -> RequestBlock:
    """Run clients, each of which returns (start, end, latencies); wait for all, also if one fails.

    Otherwise clients that still run would disturb the block of the next contender.
    """
    futures = [threads.submit(client, number) for number in range(clients)]
    wait(futures)
    starts, ends, latencies = zip(*(future.result() for future in futures), strict=True)
    return RequestBlock(list(itertools.chain(*latencies)), (max(ends) - min(starts)) / NS)


# Cold start


def cold_start(served: Served, prepared: Any) -> Record:
    """Return the `bytes` of a file of the tables, and the seconds from opening it to an answer.

    Once with the file in the system's page cache ("memory"), once after the system was asked to
    drop its pages ("disk"), which not every file system does.
    """
    with tempfile.TemporaryDirectory(prefix="emblib-") as folder, torch.inference_mode():
        path = Path(folder) / "tables"
        served.save(path)
        return {
            "bytes": path.stat().st_size,
            "disk": _seconds_to_answer(served, path, prepared, drop=True),
            "memory": _seconds_to_answer(served, path, prepared, drop=False),
        }


def _seconds_to_answer(served: Served, path: Path, prepared: Any, *, drop: bool) -> float:
    if drop:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    opened = type(served)(served.shapes)
    start = time.perf_counter_ns()
    opened.open(path)
    opened.lookup(prepared)
    return (time.perf_counter_ns() - start) / NS
