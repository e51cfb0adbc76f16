"""The ceilings of memory that a run measures."""

from __future__ import annotations

import pytest
import torch

from experiments.machine import bandwidth

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_ceilings_are_there_for_every_row_size() -> None:
    found = bandwidth.measure_ceilings(CPU, seconds=0.0)
    assert list(found["gather_gb_s"]) == ["64", "128", "256", "512", "1024"]
    assert found["gather_by"].keys() == found["gather_gb_s"].keys()
    assert all(0.01 < x < 1e5 for x in [found["copy_gb_s"], *found["gather_gb_s"].values()])
    assert 0.01 < found["sgemm_gflop_s"] < 1e6
    assert found["threads"] == torch.get_num_threads()
    assert found["table_bytes"] == bandwidth.SMOKE_BYTES
    assert "launch_us" not in found


def test_tables_are_larger_than_the_caches_but_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bandwidth, "last_level_cache_bytes", lambda: 100 << 20)
    monkeypatch.setattr(bandwidth, "available_bytes", lambda device: 1 << 40)
    assert bandwidth.table_bytes(CPU) == 800 << 20
    monkeypatch.setattr(bandwidth, "available_bytes", lambda device: 1 << 30)
    assert bandwidth.table_bytes(CPU) == 102 << 20  # a tenth, in whole MiB
    monkeypatch.setattr(bandwidth, "available_bytes", lambda device: 1 << 20)
    assert bandwidth.table_bytes(CPU) == bandwidth.SMOKE_BYTES


def test_bandwidth_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is said to take a second."""
    monkeypatch.setattr(
        bandwidth, "shortest_wall", lambda work, device, seconds: work() is None or 1.0
    )
    flat = torch.ones(1 << 14)  # 64 KiB: 1024 rows of 64 bytes, of which 128 are gathered
    assert bandwidth.copy_bandwidth(flat) == 2 * 65536
    read, pooled = 128 * (64 + 8), 4 * (64 + 8)
    counted = {way: nbytes for way, nbytes, _ in bandwidth.gather_ways(flat, 64)}
    assert counted == {
        "index_select": read + 128 * 64,
        "embedding_bag": read + pooled,
        "emblib, bags of 1": read + 128 * 64 + 129 * 8,
        "emblib, bags of 32": read + pooled,
    }
    assert bandwidth.gather_bandwidth(flat, 64) == (read + 128 * 64 + 129 * 8, "emblib, bags of 1")


def test_every_way_gathers_the_rows_that_it_counts() -> None:
    """All rows are ones, so a bag of 32 is 32."""
    outputs = [work() for _, _, work in bandwidth.gather_ways(torch.ones(1 << 14), 64)]
    shapes = [(tuple(o.shape), float(o.min()), float(o.max())) for o in outputs]
    one, many = ((128, 16), 1.0, 1.0), ((4, 16), 32.0, 32.0)
    assert shapes == [one, many, one, many]


def test_a_table_that_is_not_drawn_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "SMOKE_BYTES", 0)
    ones = torch.ones(2, 8)
    module = bandwidth._one_table(100, 8, CPU)
    assert torch.equal(module(torch.tensor([3, 99]), torch.arange(3)), ones)


def test_the_best_of_at_least_three_counts() -> None:
    clock = iter([0.0, 0.0, 4.0, 4.0, 6.0, 6.0, 9.0, 9.0])
    calls = []
    best = bandwidth.shortest_wall(lambda: calls.append(1), CPU, 0.0, lambda: next(clock))
    assert (best, len(calls)) == (2.0, 3)


def test_as_many_runs_as_fit_in_the_time() -> None:
    clock = iter(x / 2 for x in range(100))
    calls = []
    bandwidth.shortest_wall(lambda: calls.append(1), CPU, 10.0, lambda: next(clock))
    # Half a second from reading to reading: two for each of the first three, which end at 3 s, and
    # three for each of those that begin at 3.5, 5, 6.5, 8 and 9.5 s.
    assert len(calls) == 8
