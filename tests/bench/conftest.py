"""How micro-benchmarks time: whole passes over distinct batches, and the device waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

EXECUTIONS = 8  # calls a sample, each on a batch of its own: what a call left in caches is stale


@dataclass
class Latency:
    """Times one operation through pytest-benchmark; see `latency`."""

    benchmark: Any
    device: torch.device

    def __call__(
        self, group: str, work: Callable[[int], object], *, lookups: int, **facts: object
    ) -> None:
        """A sample is `work(0)` to `work(7)` and then one synchronisation; `lookups` are a call's.

        So on CUDA the time of a call is that of its launches or of its kernels, whichever is more.
        """
        self.benchmark.group = group
        self.benchmark.extra_info.update(
            device=self.device.type, executions=EXECUTIONS, lookups=lookups, **facts
        )
        for _ in range(3):
            self._sample(work)
        self.benchmark(self._sample, work)

    def _sample(self, work: Callable[[int], object]) -> None:
        for number in range(EXECUTIONS):
            work(number)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@pytest.fixture
def latency(benchmark: Any, device: torch.device) -> Latency:
    """Without it a benchmark on CUDA would time launches without waiting for them."""
    return Latency(benchmark, device)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]
) -> None:
    """The machine as every run of the harness describes it, in the place of a host name."""
    from experiments.machine import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    described = environment.environment_content(device, ["+experiment=micro"])
    output_json["emblib"] = described
    output_json["machine_info"] = {"cpu": described["cpu"], "node": "", "system": "Linux"}
