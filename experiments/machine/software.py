"""What is installed: packages the harness needs or can use, emblib's libraries, the contenders."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.machine.findings import Finding, State

if TYPE_CHECKING:
    import torch

NEEDED = ("torch", "hydra-core", "omegaconf", "numpy", "pandas", "matplotlib", "rich")
OPTIONAL = {
    "nvidia-ml-py": "watches clocks, heat and throttling of a GPU",
    "pyarrow": "writes and reads parquet",
    "hydra-joblib-launcher": "runs several experiments side by side",
    "hydra-submitit-launcher": "runs experiments on a cluster",
    "pytest": "runs the tests",
    "pytest-benchmark": "runs the micro-benchmarks",
}
TOOLS = {
    "git": "names the code that was measured",
    "nvcc": "builds the CUDA kernels",
    "nvidia-smi": "shows and locks the clocks of a GPU",
    "g++": "builds the CPU kernels",
}
FOR_GPUS = ("nvcc", "nvidia-smi")
DRIVER = Path("/proc/driver/nvidia")  # there where an NVIDIA driver is loaded
INSTALL = 'pip install -e ".[harness]"'
# What csrc/core/isa.h asks for, best first.
INSTRUCTIONS = {
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "f16c"},
}


def packages() -> list[Finding]:
    """Python, what the harness needs, and what it can use."""
    section = "Packages"
    found = [Finding(section, "python", platform.python_version())]
    for name in NEEDED:
        version = installed(name)
        found.append(
            Finding(section, name, version)
            if version
            else Finding(section, name, "not installed", State.broken, INSTALL)
        )
    for name, use in OPTIONAL.items():
        version = installed(name)
        found.append(
            Finding(section, name, version)
            if version
            else Finding(section, name, "not installed", State.note, f"pip install {name}: {use}")
        )
    return found


def installed(package: str) -> str | None:
    """Its version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def tools(*, driver: bool | None = None) -> list[Finding]:
    """Programs beside Python; none is needed to measure, and some only where there is a GPU."""
    driver = DRIVER.exists() if driver is None else driver
    found = []
    for name, use in TOOLS.items():
        if shutil.which(name):
            found.append(Finding("Tools", name, "found"))
            continue
        missed = driver or name not in FOR_GPUS
        state, advice = (State.note, use) if missed else (State.ok, "")
        found.append(Finding("Tools", name, "not on PATH", state, advice))
    return found


def contenders() -> list[Finding]:
    """Who can run here."""
    from experiments.contenders import registry

    found = []
    for entry in registry.entries().values():
        missing, odd = entry.missing(), entry.unknown_versions()
        what = f"{entry.name} ({entry.label})"
        if missing:
            reason, _, advice = missing.partition(": ")
            found.append(Finding("Contenders", what, reason, State.note, advice))
        elif odd:
            found.append(Finding("Contenders", what, "; ".join(odd), State.note))
        else:
            versions = ", ".join(f"{p} {v}" for p, v in entry.versions().items())
            where = "; runs on a GPU only" * entry.cuda_only
            here = versions or "part of this repository"
            found.append(Finding("Contenders", what, here + where))
    return found


@dataclass(frozen=True)
class Libraries:
    """emblib's native code, as it is asked about."""

    cpu_flags: frozenset[str]
    wish: str | None  # of EMBLIB_ISA

    def kernels(self) -> Finding:
        """Which CPU kernels are chosen: by the CPU, bounded by EMBLIB_ISA."""
        best = next((n for n, f in INSTRUCTIONS.items() if f <= self.cpu_flags), "baseline")
        order = ["baseline", *reversed(INSTRUCTIONS)]
        what = "CPU kernels"
        if self.wish is None:
            return Finding("emblib", what, f"{best}, the best that this CPU has")
        if self.wish not in order:
            return Finding(
                "emblib",
                what,
                f"EMBLIB_ISA={self.wish} is none of {', '.join(order)}",
                State.broken,
                "unset EMBLIB_ISA",
            )
        chosen = min(best, self.wish, key=order.index)
        if chosen == best:
            return Finding("emblib", what, f"{chosen}, as EMBLIB_ISA={self.wish} allows")
        found = f"{chosen} for EMBLIB_ISA={self.wish}, though this CPU has {best}"
        return Finding("emblib", what, found, State.note, "unset EMBLIB_ISA for full speed")


def emblib_libraries() -> list[Finding]:
    """Whether emblib loads, with which kernels, and whether they compute."""
    try:
        import torch

        import emblib
    except ImportError as error:
        return [Finding("emblib", "import", str(error), State.broken, "make native")]
    version = installed("emblib") or "of this repository, not installed"
    found = [Finding("emblib", "version", f"{version}, with libemblib_cpu")]
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    flags = re.search(r"^flags\s*:(.*)", text, re.MULTILINE)
    words = frozenset(flags[1].split() if flags else ())
    found.append(Libraries(words, os.environ.get("EMBLIB_ISA")).kernels())
    found.append(_computes(torch.device("cpu")))
    if torch.cuda.is_available():
        try:
            emblib.ops.require_kernels(torch.device("cuda"))
        except RuntimeError as error:
            return [*found, Finding("emblib", "CUDA kernels", "absent", State.broken, str(error))]
        return [*found, _computes(torch.device("cuda"))]
    spec = importlib.util.find_spec("emblib")
    folders = spec.submodule_search_locations if spec else None
    built = any(Path(folder, "libemblib_cuda.so").exists() for folder in folders or ())
    state = "built, not loaded: torch sees no GPU" if built else "not built; torch sees no GPU"
    return [*found, Finding("emblib", "CUDA kernels", state)]


def _computes(device: torch.device) -> Finding:
    """A small lookup against plain PyTorch."""
    import torch

    import emblib

    module = emblib.TableBatchedEmbeddingBags(
        [emblib.TableSpec(32, 8)], emblib.optim.SGD(lr=0.1), device=device
    )
    rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        module.table_weights()[0].copy_(rows)
    indices = torch.arange(32).repeat(2)
    offsets = torch.arange(0, 65, 16)
    expected = rows[indices].view(4, 16, 8).sum(dim=1)
    got = module(indices.to(device), offsets.to(device)).detach().cpu()
    if torch.allclose(got, expected, rtol=1e-4, atol=1e-4):
        return Finding("emblib", f"on {device}", "a lookup agrees with PyTorch")
    found = "a lookup differs from PyTorch"
    return Finding("emblib", f"on {device}", found, State.broken, "make native")
