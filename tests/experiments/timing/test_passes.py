"""Passes that are not timed: counters of caches, and energy."""

from __future__ import annotations

import pytest
import torch

from experiments.machine.telemetry import Nvml
from experiments.timing import passes
from tests.experiments.fake_nvml import FakeNvml

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_counters_are_read_after_every_batch_was_seen_once() -> None:
    seen: list[int] = [9, 9]
    found = passes.counting_pass(seen.append, 3, seen.clear, lambda: {"lookups": len(seen)})
    assert seen == [0, 1, 2]
    assert found == {"lookups": 3}


def test_energy_of_a_call_with_what_is_uncertain_about_it() -> None:
    time, log = [0.0], []

    def phase(number: int) -> None:
        log.append(number)
        time[0] += 0.25

    joules = iter([1000.0, 1300.0])
    found = passes.energy_pass(
        phase, 4, lambda: next(joules), lambda: None, seconds=2.0, now=lambda: time[0]
    )
    assert log == [0, 1, 2, 3] * 2
    assert found["joules_per_call"] == 300.0 / 8
    assert found["uncertainty_joules"] == pytest.approx(300.0 / 8 * 0.1 / 2.0)
    assert (found["window_s"], found["calls"]) == (2.0, 8)


@pytest.mark.parametrize("readings", [[None], [1000.0, 1000.0], [1000.0, None]])
def test_no_energy_where_the_counter_stands_still(readings: list[float | None]) -> None:
    joules, time = iter(readings), iter(range(100))
    found = passes.energy_pass(
        lambda number: None,
        1,
        lambda: next(joules),
        lambda: None,
        seconds=2,
        now=lambda: next(time),
    )
    assert found == {}


def test_energy_on_a_gpu_is_asked_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml({"GetTotalEnergyConsumption": [5_000_000, 5_600_000]})
    monkeypatch.setattr(Nvml, "open", lambda device=None: Nvml(library, 0))
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    found = passes.energy(lambda number: None, 3, CUDA, seconds=0.0)
    assert waited
    assert found == {}  # no time, no call
    library.answers["GetTotalEnergyConsumption"] = [5_000_000, 5_600_000]
    found = passes.energy(lambda number: None, 3, CUDA, seconds=1e-6)
    assert found["joules_per_call"] == pytest.approx(600 / found["calls"])
    monkeypatch.setattr(Nvml, "open", lambda device=None: None)
    assert passes.energy(lambda number: None, 3, CUDA, seconds=0.0) == {}
