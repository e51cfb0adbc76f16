"""Check before measuring whether the machine is fit; what is not becomes a flag of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.config.schema import UsageError
from experiments.machine.cpu import BUSY, Cpu, cores_of_others, own_seconds
from experiments.machine.flags import MINOR, explain, remedy
from experiments.machine.telemetry import Nvml

HOT = 75  # degrees Celsius of an idle GPU
LOOK_SECONDS = 0.15  # at what other processes do


@dataclass(frozen=True)
class Preflight:
    """The result of the check."""

    flags: tuple[str, ...]
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def fit(self) -> bool:
        """Return whether a strict run may start."""
        return not any(flag not in MINOR for flag in self.flags)

    def describe(self) -> dict[str, Any]:
        """Return a dict for environment.json."""
        return {"flags": list(self.flags), "fit": self.fit, **self.details}


def demand(found: Mapping[str, Any]) -> None:
    """Raise UsageError with remedies where a `describe()` reports an unfit machine."""
    if not found["fit"]:
        reasons = [f for f in found["flags"] if f not in MINOR]
        told = "; ".join(f"{explain(f)} ({remedy(f)})" for f in reasons)
        raise UsageError(
            f"device.strict=true, and this machine is not fit to measure on: {told}. "
            "Without device.strict=true these become flags of the results"
        )


def check(
    device: torch.device,
    *,
    cpu: Cpu | None = None,
    nvml: Nvml | None = None,
    threads: int | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> Preflight:
    """Check the CPU, and the GPU where it is the device."""
    flags, details = _cpu(cpu or Cpu(), threads or torch.get_num_threads(), sleep)
    if device.type == "cuda":
        nvml = nvml or Nvml.open(device)
        of_gpu, settings = gpu_flags(nvml)
        flags, details = flags + of_gpu, details | {"gpu": settings}
    return Preflight(tuple(flags), details)


def _cpu(
    cpu: Cpu, threads: int, sleep: Callable[[float], object]
) -> tuple[list[str], dict[str, Any]]:
    before, own = cpu.ticks(), own_seconds()
    sleep(LOOK_SECONDS)
    others = cores_of_others(before, cpu.ticks(), own_seconds() - own)
    cores, quota, governor = len(cpu.usable_cores()), cpu.quota(), cpu.governor()
    found = {
        "busy": others is not None and others > BUSY,
        "governor": governor not in (None, "performance"),
        "virtual": cpu.hypervisor(),
        "quota": quota is not None and quota < threads,
        "threads": threads > cores,
    }
    details = {
        "load": cpu.load(),
        "cores_of_others": None if others is None else round(others, 2),
        "cores": cores,
        "threads": threads,
        "governor": governor,
        "quota": quota,
    }
    details = {key: value for key, value in details.items() if value is not None}
    return [flag for flag, is_so in found.items() if is_so], details


def gpu_flags(nvml: Nvml | None) -> tuple[list[str], dict[str, Any]]:
    """Return the flags and settings of a GPU."""
    if nvml is None:
        return ["nvml_absent"], {}
    found = nvml.settings()
    limit, default = found.get("power_limit_w"), found.get("power_limit_default_w")
    others = nvml.processes() or {}
    # In a container the driver's process numbers are not ours, so one process may be this one.
    flags = {
        "other_processes": len(others) > 1,
        "slowed": bool(found.get("reasons")),
        "hot": found.get("temperature_c", 0) >= HOT,
        "power_limit": limit is not None and default is not None and limit < default,
        "persistence_off": found.get("persistence") is False,
        "mig": found.get("mig", False),
    }
    return [flag for flag, is_so in flags.items() if is_so], found
