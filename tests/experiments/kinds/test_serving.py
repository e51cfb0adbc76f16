"""The kind serving: its percentiles, its loads, its checks, its numbers, and wrong options."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from experiments import configure
from experiments.config.schema import Config, TimingConfig, UsageError, WorkloadConfig
from experiments.config.sweep import Arm, Cell
from experiments.contenders import registry
from experiments.contenders.registry import WrongResult
from experiments.contenders.served import Int8
from experiments.kinds.serving import cold_starts, latencies
from experiments.measure import serving
from experiments.measure.serving import (
    LoadPoint,
    arrival_times_ns,
    cold_start,
    send_closed_block,
    send_open_block,
    verify_served,
)
from experiments.measure.session import Session
from experiments.results.store import read_records
from experiments.timing.latencies import CLOSED, bucket_of, counts_of, latency_quantile_s
from experiments.workloads.workload import Batch, TableShape, make_pool
from tests.compat.peer import skip_without_peers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SHAPES = (TableShape(40, 8), TableShape(300, 8))
WORK = WorkloadConfig(T=2, E=300, D=8, B=5, L=4)
BATCH = make_pool(WORK, SHAPES, 1, seed=2).batches[0]
SERVED = [name for name, entry in registry.entries().items() if entry.served]


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s.rows, s.dim, generator=generator) for s in SHAPES]


@pytest.mark.parametrize("name", SERVED)
def test_tables_agree_with_float_rows_also_from_their_file(name: str, tmp_path: Path) -> None:
    skip_without_peers(name)
    served = registry.build(name, SHAPES)
    served.fill(weights())
    verify_served(served, weights(), BATCH)
    assert served.nbytes() <= (served.bits + 8) * 340 + 128
    prepared = served.prepare(BATCH)
    served.save(tmp_path / "tables")
    opened = registry.build(name, SHAPES)
    opened.open(tmp_path / "tables")
    assert torch.equal(opened.lookup(prepared), served.lookup(prepared))
    start = cold_start(served, prepared)
    assert start["bytes"] == (tmp_path / "tables").stat().st_size
    assert min(start["memory"], start["disk"]) > 0


def test_wrong_sums_are_found() -> None:
    served = Int8(SHAPES)
    changed = weights()
    changed[1][int(BATCH.feature(1)[0][0])] += 0.2
    served.fill(changed)
    with pytest.raises(WrongResult, match="table 1 differs from float32 rows"):
        verify_served(served, weights(), BATCH)


class RefusesFullBatches(Int8):
    """Prepares one batch, that of the check, and no further one."""

    num_prepared = 0

    def prepare(self, batch: Batch) -> Any:
        self.num_prepared += 1
        if self.num_prepared > 1:
            raise ValueError("this batch cannot be prepared")
        return super().prepare(batch)


class LacksAFile(Int8):
    """Answers requests, but cannot be saved."""

    def save(self, path: Path) -> None:
        raise OSError("no space left")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (RefusesFullBatches, "ValueError: this batch cannot be prepared"),
        (LacksAFile, "OSError: no space left"),
    ],
)
def test_an_arm_that_cannot_be_measured_fails_alone(
    monkeypatch: pytest.MonkeyPatch, broken: type[Int8], reason: str
) -> None:
    def build(name: str, shapes: Any) -> Any:
        return broken(shapes) if name == "served_int8" else registry.build(name, shapes)

    monkeypatch.setattr(serving, "build", build)
    config = Config(name="x", timing=TimingConfig(pool=2))
    cell = Cell(
        "sweep",
        "",
        WORK,
        (Arm("served_int8"), Arm("served_fp32")),
        options={"clients": [1], "loads": [], "rounds": 1},
    )
    session = Session(config, torch.device("cpu"), "run")
    records = {r["arm"]: r for r in serving.serving_cell(cell, session, 0.01)}
    failed = records["served_int8"]
    assert failed["status"] == "error"
    assert failed["reason"].startswith(reason)
    assert (failed["points"], failed["cold_start"]) == ([], {})
    assert records["served_fp32"]["status"] == "ok"


def test_percentiles_of_buckets_are_those_of_the_latencies() -> None:
    drawn = np.random.default_rng(0).lognormal(11, 1, 5000).astype(int)
    point = {"latencies": Counter(bucket_of(int(ns)) for ns in drawn).items()}
    for share in (0.5, 0.99):
        exact = np.quantile(drawn, share) / 1e9
        assert latency_quantile_s(counts_of([point]), share) == pytest.approx(exact, rel=0.02)
    assert np.isnan(latency_quantile_s({}, 0.5))


def test_each_client_of_a_closed_block_waits_for_its_answer() -> None:
    running: list[int] = []
    most = [0]

    def request(number: int) -> None:
        running.append(number)
        most[0] = max(most[0], len(running))
        time.sleep(0.001)
        running.remove(number)

    with ThreadPoolExecutor(3) as threads:
        block = send_closed_block(threads, request, 3, 0.02)
        assert most[0] <= 3
        assert len(block.latencies_ns) >= 3
        assert min(block.latencies_ns) >= 1_000_000
        # Without time, each client sends one request.
        assert len(send_closed_block(threads, request, 2, 0.0).latencies_ns) == 2


def test_latency_of_an_open_block_begins_with_the_arrival() -> None:
    """Three requests arrive at once at one client: the last one waits for the two before it."""
    answered: list[int] = []

    def request(number: int) -> None:
        time.sleep(0.002)
        answered.append(number)

    with ThreadPoolExecutor(2) as threads:
        block = send_open_block(threads, request, 1, [0, 0, 0])
        assert answered == [0, 1, 2]
        assert [ns >= 2_000_000 * (n + 1) for n, ns in enumerate(block.latencies_ns)] == [True] * 3
        together = threading.Barrier(2)  # two clients answer two requests at the same time
        both = send_open_block(threads, lambda _: together.wait(5), 2, [0, 0])
        assert len(both.latencies_ns) == 2


def test_no_client_is_left_behind_when_another_one_fails() -> None:
    numbers: list[int] = []

    def request(number: int) -> None:
        if number == 0:
            raise ValueError("no answer")
        numbers.append(number)

    with ThreadPoolExecutor(2) as threads:
        with pytest.raises(ValueError, match="no answer"):
            send_closed_block(threads, request, 2, 0.05)
        count = len(numbers)
        both = threading.Barrier(2)  # is passed once both threads are free
        list(threads.map(lambda _: both.wait(5), range(2)))
    assert 0 < len(numbers) == count


def test_arrivals_have_the_rate_and_do_not_depend_on_answers() -> None:
    times = arrival_times_ns(1000.0, 5.0, random.Random(3))
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] < 5e9
    assert len(times) == pytest.approx(5000, rel=0.06)
    assert np.std(np.diff(times)) == pytest.approx(1e6, rel=0.1)  # as long as the mean gap
    assert arrival_times_ns(1e-9, 0.0, random.Random(3)) == [0]


def test_open_blocks_have_a_share_of_the_rate_of_the_last_closed_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates: list[float] = []

    def recorded(rate: float, seconds: float, rng: random.Random) -> list[int]:
        rates.append(rate)
        return arrival_times_ns(rate, seconds, rng)

    monkeypatch.setattr("experiments.measure.serving.arrival_times_ns", recorded)
    with ThreadPoolExecutor(1) as threads:
        closed = LoadPoint(lambda _: time.sleep(0.001), 1, CLOSED)
        half = LoadPoint(closed.request, 1, 0.5)
        for load in (closed, half):
            load.send(threads, 0.02, random.Random(0), closed)
    assert rates == [0.5 * closed.blocks[0].per_second]
    told = half.entries()
    assert (told["clients"], told["load"]) == (1, 0.5)
    assert told["requests"] == sum(count for _, count in told["latencies"])


def record(arm: str, replicate: int, seconds: float, counts: list[list[int]]) -> dict[str, Any]:
    requests = sum(count for _, count in counts)
    point = {"clients": 2, "load": CLOSED, "requests": requests, "seconds": 2.0}
    open_point = {**point, "load": 0.5, "seconds": 4.0}
    names = {name: arm for name in ("contender", "arm", "label")}
    return {
        **names,
        **{"kind": "serving", "section": "sweep", "cell": "c", "params": {"B": 10}},
        **{"status": "ok", "reason": "", "replicate": replicate, "weights_bytes": 7},
        "samples": {"2 clients": [[0, seconds], [1, seconds]]},
        "points": [{**p, "latencies": counts} for p in (point, open_point)],
        "cold_start": {"bytes": 9, "memory": 0.25, "disk": 0.5 * (replicate + 1)},
    }


def test_numbers_of_literal_records() -> None:
    bucket = bucket_of(1_000_000)
    records = [
        record("a", n, 0.01 * (n + 1), [[bucket, 99], [bucket + 300, 1 + n]]) for n in range(2)
    ]
    records += [record("b", n, 0.02 * (n + 1), [[bucket, 100]]) for n in range(2)]
    failed = {**record("c", 0, 1.0, []), "status": "error", "points": [], "cold_start": {}}
    frame = latencies([*records, failed, {"kind": "time"}], "b")
    assert list(frame["arm"]) == ["a", "a", "b", "b", "c"]
    first, opened = frame.iloc[0], frame.iloc[1]
    assert (first["requests"], first["processes"]) == (201, 2)
    assert (first["requests_per_s"], first["bags_per_s"]) == (50.25, 502.5)
    assert opened["requests_per_s"] == 25.125
    assert first["ratio"] == pytest.approx(0.5)
    assert first["p50_s"] == pytest.approx(1e-3, rel=0.01)
    assert first["p99_s"] == pytest.approx(1.01**300 * 1e-3, rel=0.02)
    assert np.isnan(opened["ratio"])
    few = latencies(records[2:3], "b")
    assert np.isnan(few["p99_s"]).all()  # 100 requests have no p99
    starts = cold_starts([*records, failed])
    assert list(starts["pages"]) == ["memory", "disk"] * 2
    assert list(starts["median_s"]) == [0.25, 0.75] * 2
    larger = records[0] | {"cell": "D=64", "weights_bytes": 10**9}
    assert len(cold_starts([*records, larger])) == 6  # tables of another size are other tables


def test_a_smoke_run_tells_latency_memory_and_cold_start(smoke_runs: Mapping[str, Path]) -> None:
    run = smoke_runs["serving"]
    table = pd.read_csv(run / "latencies.csv")
    measured = table[table["status"] == "ok"]
    assert {"served_fp32", "served_int8", "torch_served_int4"} <= set(measured["arm"])
    assert set(measured["clients"]) == {1, 2}
    assert set(measured["load"]) == {0.0, 0.3, 0.6, 0.8}
    closed = measured[measured["load"] == 0]
    assert (closed["ratio"] > 0).all()
    assert (closed[closed["arm"] == "torch_served_fp32"]["ratio"] == 1).all()
    assert (measured["requests_per_s"] > 0).all()
    for arm in read_records(run):
        assert arm["status"] in ("ok", "missing")
        assert arm["threads"] == 1
    starts = pd.read_csv(run / "cold_starts.csv").set_index(["arm", "pages"])
    sizes = [starts["bytes"][f"served_{name}", "memory"] for name in ("fp32", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    for name in ("report.md", "index.html"):
        text = (run / name).read_text()
        assert "coordinated omission" in text
        assert "first answer after" in text
        assert "Memory and cold start" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["options.clients=[]"], "options.clients must not be empty"),
        (["options.loads=[1.5]"], "options.loads must be in"),
        (["options.rounds=0"], "options.rounds must be >= 1"),
        (["contenders=[tbe]"], "tbe has no read-only tables"),
        (["device.kind=cuda"], "measures lookups on the CPU"),
    ],
)
def test_wrong_options(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        configure.load(["+experiment=serving", "timing=smoke", *words])
    with pytest.raises(UsageError, match="served_int8 has read-only tables"):
        configure.load(["+experiment=tbe_vs_torch", "contenders=[tbe,served_int8]"])
