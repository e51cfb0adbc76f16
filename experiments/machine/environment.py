"""Describe the machine and the software: everything needed to interpret a number."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from experiments.machine.telemetry import Nvml
from experiments.paths import ROOT

# What libraries read to decide on threads, memory, instructions and launches.
VARIABLES = (
    r"(OMP|GOMP|KMP|MKL|DNNL|ATEN|MALLOC|PYTORCH|EMBLIB)_"
    r"|CUDA_(LAUNCH_BLOCKING|MODULE_LOADING|DEVICE_MAX_CONNECTIONS)$|NVIDIA_TF32_OVERRIDE$"
)


def describe(device: torch.device, words: list[str]) -> dict[str, Any]:
    """Describe machine and software; no host name, no user, no absolute path."""
    return {
        "time_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python run.py " + " ".join(words),
        "device": device_name(device),
        "cpu": _cpu(),
        "gpu": _gpu(device),
        "memory_bytes": _meminfo("MemTotal"),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": _load(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "emblib": _version("emblib"),
        "git": git_state(),
        "packages": {p: _version(p) for p in ("numpy", "pandas", "matplotlib", "hydra-core")},
        "variables": {k: v for k, v in sorted(os.environ.items()) if re.match(VARIABLES, k)},
    }


def device_name(device: torch.device) -> str:
    """Return the name of the processor that computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu()['model']}, {threads} thread{'s' * (threads > 1)}"


def git_state() -> dict[str, Any]:
    """Return the commit, and whether the working tree differs from it."""
    sha = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {"sha": sha or None, "dirty": None if sha is None else bool(changed)}


def _cpu() -> dict[str, Any]:
    text = _read("/proc/cpuinfo") or ""
    model = re.search(r"model name\s*: (.*)", text)
    flags = set((re.search(r"flags\s*: (.*)", text) or [""])[0].split())
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512vl", "amx_tile")
    return {
        "model": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "instructions": [f for f in wanted if f in flags],
        "last_level_cache": _read("/sys/devices/system/cpu/cpu0/cache/index3/size"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    }


def _gpu(device: torch.device) -> dict[str, Any] | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        **_nvml(device),
    }


def _nvml(device: torch.device) -> dict[str, Any]:
    """Return driver, clocks, temperature and limits where NVML is available."""
    nvml = Nvml.open(device)
    if nvml is None:
        return {"nvml": "unavailable"}
    settings = nvml.settings()
    driver, clock = nvml.driver(), settings.pop("sm_mhz", None)
    return {"driver": driver, "sm_clock_mhz": clock, **settings}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _meminfo(key: str) -> int | None:
    found = re.search(rf"{key}:\s*(\d+) kB", _read("/proc/meminfo") or "")
    return int(found[1]) << 10 if found else None


def _load() -> list[float] | None:
    try:
        return [round(x, 2) for x in os.getloadavg()]
    except OSError:
        return None
