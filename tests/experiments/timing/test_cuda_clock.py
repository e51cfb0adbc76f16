"""Clocks, telemetry, memory and ceilings on a real GPU, where there is one. No times are judged."""

from __future__ import annotations

import math

import pytest
import torch

from experiments.config.schema import Mode, TimingConfig
from experiments.machine import bandwidth, environment, memory, preflight
from experiments.machine.telemetry import telemetry_for
from experiments.timing.clock import SampleTask, clock_for
from experiments.timing.race import Race

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_takes_samples(mode: Mode) -> None:
    x = torch.ones(1 << 20, device=CUDA)
    clock = clock_for(CUDA, mode)
    phase = clock.adapt(lambda number: x.mul_(1.0), 2)
    for _ in range(3):
        readings = clock.read([SampleTask(lambda n=n: phase(n % 2), "x") for n in range(70)])
    assert len(readings) == 70
    assert all(r.cost_s >= r.seconds > 0 for r in readings)


def test_a_replayed_graph_does_what_the_call_did() -> None:
    count = torch.zeros(2, device=CUDA)
    phase = clock_for(CUDA, Mode.graph).adapt(lambda number: count[number].add_(1.0), 2)
    before = count.clone()  # the capture itself called it on a side stream
    phase(0)
    phase(0)
    phase(1)
    assert (count - before).tolist() == [2.0, 1.0]


def test_a_short_kernel_is_hidden_from_its_launch() -> None:
    x = torch.ones(256, device=CUDA)
    clock = clock_for(CUDA)
    for _ in range(4):
        readings = clock.read([SampleTask(lambda: x.add_(1.0), "x") for _ in range(20)])
    assert sum(r.is_exposed for r in readings) < len(readings)


def test_a_race_is_watched() -> None:
    x = torch.ones(1 << 22, device=CUDA)
    phases = {"forward": lambda number: x.sum(), "step": lambda number: x.mul_(1.0)}
    race = Race(
        {"a": phases, "b": phases},
        TimingConfig(pool=2, max_rounds=6),
        clock_for(CUDA, Mode.cold),
        telemetry=telemetry_for(CUDA),
    )
    found = race.run()["a"]
    assert found.error is None
    assert len(found.samples["step"]) == 12
    described = found.entries()
    assert set(described["hardware"]) <= {
        *("sm_mhz", "memory_mhz", "temperature_c", "power_w", "throttle"),
        "throttled_rounds",
    }
    assert len(described["wall_samples"]["step"]) == 12


def test_memory_of_a_call_is_seen() -> None:
    peak = memory.peak_bytes(lambda: torch.ones(16 << 20, device=CUDA).sum(), CUDA)
    assert peak is not None
    assert peak >= 64 << 20


def test_the_machine_is_described() -> None:
    found = bandwidth.measure_ceilings(CUDA, seconds=0.0)
    every = [found["copy_gb_s"], *found["gather_gb_s"].values(), found["launch_us"]]
    assert all(math.isfinite(x) and x > 0 for x in every)
    assert environment.environment_content(CUDA, [])["gpu"]["name"] == torch.cuda.get_device_name(
        CUDA
    )
    assert "gpu" in preflight.check(CUDA)
