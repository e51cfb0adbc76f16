"""Check whether the machine is fit for measurements; every fault becomes a flag of the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from experiments.config.schema import UsageError
from experiments.machine.cpu import BUSY_CORES, Cpu, CpuTime, usable_cores
from experiments.machine.flags import MINOR, explain, remedy
from experiments.machine.telemetry import Nvml
from experiments.paths import ROOT, library_folders

HOT_CELSIUS = 75  # temperature of an idle GPU that raises the flag `hot`
DEVICE_CODE = {".cu", ".cuh"}  # suffixes of sources of the CUDA library only
LOOK_SECONDS = 0.15  # time to watch the load of other processes


def check(
    device: torch.device,
    *,
    cpu: Cpu | None = None,
    nvml: Nvml | None = None,
    threads: int | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Any]:
    """Examine the machine, which takes LOOK_SECONDS.

    Args:
        device: device of the run.
        cpu: source of facts about the CPU.
        nvml: source of facts about the GPU; found by `device` unless given.
        threads: CPU threads of the run; torch's unless given.
        sleep: function that waits for some seconds.

    Returns:
        `flags` (keys of `flags.ADVICE`), `fit` (whether device.strict accepts the machine), the
        details of `cpu_flags`, and if known `newer_source` and `gpu` (the settings of the GPU).
    """
    flags, details = cpu_flags(cpu or Cpu(), threads or torch.get_num_threads(), sleep)
    if source := newer_source(device):
        flags, details = [*flags, "old_library"], details | {"newer_source": source}
    if device.type == "cuda":
        flags_of_gpu, settings = gpu_flags(nvml or Nvml.open(device))
        flags, details = flags + flags_of_gpu, details | {"gpu": settings}
    return {"flags": flags, "fit": not set(flags) - set(MINOR), **details}


def require_fit(checked: Mapping[str, Any]) -> None:
    """Raise UsageError, with remedies, if the machine is not fit.

    `checked` is the result of `check`.
    """
    if not checked["fit"]:
        reasons = [
            f"{explain(flag)} ({remedy(flag)})" for flag in checked["flags"] if flag not in MINOR
        ]
        raise UsageError(
            "device.strict=true, and this machine is not fit to measure on: "
            f"{'; '.join(reasons)}. Without device.strict=true these become flags of the results"
        )


def cpu_flags(
    cpu: Cpu, threads: int, sleep: Callable[[float], object]
) -> tuple[list[str], dict[str, Any]]:
    """Return the flags of the CPU, and the known ones of the facts behind them.

    The facts are `load` (load average of a minute), `cores_of_others` (cores that other processes
    use), `cores` (number that this process may use), `threads`, `governor`, and `quota` (limit of a
    container, in cores). `sleep` is called with LOOK_SECONDS, to watch other processes.
    """
    cpu_time = CpuTime()
    sleep(LOOK_SECONDS)
    _, cores_of_others = cpu_time.usage_by_others()
    cores, quota, governor = len(usable_cores()), cpu.quota_cores(), cpu.governor()
    flags = {
        "busy": cores_of_others is not None and cores_of_others > BUSY_CORES,
        "governor": governor not in (None, "performance"),
        "virtual": cpu.is_virtual(),
        "quota": quota is not None and quota < threads,
        "threads": threads > cores,
    }
    details = {
        "load": round(psutil.getloadavg()[0], 2),
        "cores_of_others": None if cores_of_others is None else round(cores_of_others, 2),
        "cores": cores,
        "threads": threads,
        "governor": governor,
        "quota": quota,
    }
    known_details = {key: value for key, value in details.items() if value is not None}
    return [flag for flag, is_raised in flags.items() if is_raised], known_details


def gpu_flags(nvml: Nvml | None) -> tuple[list[str], dict[str, Any]]:
    """Return the flags and settings (`Nvml.settings`) of a GPU; None is a GPU without NVML."""
    if nvml is None:
        return ["nvml_absent"], {}
    settings = nvml.settings()
    limit_w, default_w = settings.get("power_limit_w"), settings.get("power_limit_default_w")
    flags = {
        # One process may be this one, which has another number in a container.
        "other_processes": len(nvml.processes() or {}) > 1,
        "slowed": bool(settings.get("reasons")),
        "hot": settings.get("temperature_c", 0) >= HOT_CELSIUS,
        "power_limit": limit_w is not None and default_w is not None and limit_w < default_w,
        "persistence_off": settings.get("persistence") is False,
        "mig": settings.get("mig", False),
    }
    return [flag for flag, is_raised in flags.items() if is_raised], settings


def newer_source(device: torch.device, *, root: Path = ROOT) -> str | None:
    """Return the source that was changed last, relative to `root`, if it is newer than the build.

    Return None if the library of the device is up to date or absent, or if there are no sources.
    """
    name = f"libemblib_{device.type}.so"
    library = next(
        (folder / name for folder in library_folders() if (folder / name).exists()), None
    )
    if library is None:
        return None
    # `make native` does not touch a library that it finds up to date, but notes the time.
    stamps = [library, Path(sys.prefix) / ".make" / "native"]
    built_at = max(stamp.stat().st_mtime for stamp in stamps if stamp.exists())
    sources = [
        path
        for path in (root / "csrc").rglob("*")
        if path.is_file() and (device.type == "cuda" or path.suffix not in DEVICE_CODE)
    ]
    newest = max(sources, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or newest.stat().st_mtime <= built_at:
        return None
    return str(newest.relative_to(root))
