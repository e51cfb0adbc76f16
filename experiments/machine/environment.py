"""Describe the machine and the software of a run."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from experiments.machine import sources
from experiments.machine.cpu import CORES, Cpu, usable_cores
from experiments.machine.telemetry import Nvml
from experiments.paths import ROOT, installed_version

INSTRUCTIONS = ("avx2", "fma", "f16c", "avx512f", "avx512vl", "amx_tile")
PACKAGES = ("numpy", "pandas", "matplotlib", "hydra-core")
# Environment variables that decide on threads, memory, instructions or launches.
VARIABLES = (
    r"(OMP|GOMP|KMP|MKL|DNNL|ATEN|MALLOC|PYTORCH|EMBLIB)_"
    r"|CUDA_(LAUNCH_BLOCKING|MODULE_LOADING|DEVICE_MAX_CONNECTIONS)$|NVIDIA_TF32_OVERRIDE$"
)


def environment_content(
    device: torch.device, words: Sequence[str], *, program: str = "run.py"
) -> dict[str, Any]:
    """Return the content of environment.json: machine and software, without host name and user.

    `words` are the words of the command line of `program`, "run.py" or a module. They and the
    values of environment variables that match VARIABLES are copied as they are, with the paths in
    them. A fact that the system does not state is None.
    """
    started = [program] if program.endswith(".py") else ["-m", program]
    cpu = Cpu()
    flags = cpu.instructions()
    return {
        "time_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *started, *words]),
        "device": device_name(device),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(usable_cores()),
            "instructions": [name for name in INSTRUCTIONS if name in flags],
            "last_level_cache": cpu.read_text(f"{CORES}/cpu0/cache/index3/size"),
            "governor": cpu.governor(),
        },
        "gpu": _gpu_facts(device) if device.type == "cuda" else None,
        "memory_bytes": psutil.virtual_memory().total,
        "huge_pages": cpu.read_text("sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "emblib": version_of("emblib"),
        "git": git_state(),
        "sources": sources.digests(device.type),
        "packages": {package: version_of(package) for package in PACKAGES},
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if re.match(VARIABLES, name)
        },
    }


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_model()}, {threads} thread{'s' * (threads > 1)}"


def git_state() -> dict[str, Any]:
    """Return the commit (`sha`) and whether the working tree differs from it (`dirty`).

    Both are None without git, and `dirty` if `git status` fails. Untracked files and changed
    results do not count: storing one run as a reference must not make the next run dirty.
    """
    sha = _git("rev-parse", "--short=12", "HEAD")
    changed_files = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ":(exclude,top)reports"
    )
    return {
        "sha": sha or None,
        "dirty": None if None in (sha, changed_files) else bool(changed_files),
    }


def version_of(package: str) -> str | None:
    """Return the version of an installed package, else that of the imported module, else None."""
    module = sys.modules.get(package)
    return installed_version(package) or getattr(module, "__version__", None)


def _cpu_model() -> str:
    return Cpu().cpuinfo("model name") or platform.processor() or platform.machine()


def _gpu_facts(device: torch.device) -> dict[str, Any]:
    """Return the facts about a GPU: model, memory, driver and clocks."""
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }
    nvml = Nvml.open(device)
    if nvml is None:
        return facts | {"nvml": "unavailable"}
    settings = nvml.settings()
    return facts | {
        "driver": nvml.driver(),
        "sm_clock_mhz": settings.pop("sm_mhz", None),
        **settings,
    }


def _git(*arguments: str) -> str | None:
    try:
        completed = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
        return completed.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
