"""`python -m experiments.doctor`: what is here, what works, what would make measurements better.

The exit status is 0 unless something that the harness needs is broken; a machine that could be
better is no error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.machine.cpu import BUSY, LIKELY_CACHE, Cpu, cores_of_others, own_seconds
from experiments.machine.flags import explain, remedy
from experiments.paths import ROOT

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from experiments.machine.telemetry import Nvml


class State(Enum):
    """The severity of a finding."""

    ok = "ok"
    note = "note"  # worth knowing, or could be better
    broken = "broken"  # something needed does not work


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    section: str
    what: str
    found: str
    state: State = State.ok
    advice: str = ""

    def describe(self) -> dict[str, Any]:
        """Return a dict for --json."""
        return asdict(self) | {"state": self.state.value}


Check = Callable[[], list[Finding]]


def findings_of(section: str, check: Check) -> list[Finding]:
    """Return the findings of a check; a check that fails becomes a finding."""
    try:
        return check()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return [Finding(section, "this check", text, State.broken, "report it as a bug")]


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
    """Check Python, required packages and optional ones."""
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
    """Return the version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def tools(*, driver: bool | None = None) -> list[Finding]:
    """Check external programs; none is required, and some are for GPUs only."""
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
    """Check which contenders can run here."""
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
    """emblib's native libraries."""

    cpu_flags: frozenset[str]
    wish: str | None  # of EMBLIB_ISA

    def kernels(self) -> Finding:
        """Return the selected CPU kernels: by the CPU, limited by EMBLIB_ISA."""
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
    """Check whether emblib loads, with which kernels, and whether they compute."""
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
    """Compare a small lookup with plain PyTorch."""
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


LOOK_SECONDS = 0.3  # at what other processes do
LITTLE_SPACE = 2 << 30
# What NVML tells of a GPU's settings: how to call it, and its unit; none for on or off.
SETTINGS = {
    "sm_mhz": ("SM clock", "MHz"),
    "sm_mhz_most": ("SM clock, most", "MHz"),
    "memory_mhz": ("memory clock", "MHz"),
    "memory_mhz_most": ("memory clock, most", "MHz"),
    "temperature_c": ("temperature", "°C"),
    "power_limit_w": ("power limit", "W"),
    "power_limit_default_w": ("power limit, default", "W"),
    "persistence": ("persistence", ""),
    "ecc": ("ECC", ""),
    "mig": ("MIG", ""),
}


def processor(
    cpu: Cpu | None = None, sleep: Callable[[float], object] = time.sleep
) -> list[Finding]:
    """Check the CPU, its clocks, and the load of other processes."""
    cpu = cpu or Cpu()
    before, own = cpu.ticks(), own_seconds()
    sleep(LOOK_SECONDS)
    others = cores_of_others(before, cpu.ticks(), own_seconds() - own)
    cache, mhz, load = cpu.last_level_cache(), cpu.mhz(), cpu.load()
    found = [
        _row("model", cpu.model()),
        _row("usable cores", str(len(cpu.usable_cores()))),
        _row("hyper-threads", {True: "on", False: "off", None: None}[cpu.smt()]),
        _row("last-level cache", _mib(cache))
        if cache
        else _row("last-level cache", None, f"{_mib(LIKELY_CACHE)} is assumed to empty it"),
        _row("frequency", f"{mhz:.0f} MHz" if mhz else None),
        _governor(cpu.governor()),
        _row("boost", {True: "on", False: "off", None: None}[cpu.boost()]),
        _row("load", f"{load:.2f} in the last minute" if load is not None else None),
        _others(others),
        _quota(cpu),
        _flagged("virtual", "virtual machine", "yes")
        if cpu.hypervisor()
        else _row("virtual machine", "no"),
        _counter("throttle counter", cpu.throttled()),
    ]
    return found


def _row(what: str, found: str | None, advice: str = "") -> Finding:
    """Build a finding; unknown values are noted only where something follows from them."""
    if found is not None:
        return Finding("Processor", what, found)
    return Finding("Processor", what, "not shown", State.note if advice else State.ok, advice)


def _flagged(flag: str, what: str, found: str, section: str = "Processor") -> Finding:
    return Finding(section, what, found, State.note, f"{explain(flag)}: {remedy(flag)}")


def _governor(name: str | None) -> Finding:
    if name in (None, "performance"):
        return _row("governor", name)
    return _flagged("governor", "governor", str(name))


def _others(cores: float | None) -> Finding:
    what = "other processes"
    if cores is None:
        return _row(what, None)
    found = f"{cores:.2f} cores"
    return _flagged("busy", what, found) if cores > BUSY else _row(what, found)


def _quota(cpu: Cpu) -> Finding:
    quota = cpu.quota()
    if quota is None:
        return _row("quota", "none")
    found = f"{quota:g} cores' worth of time"
    small = quota < len(cpu.usable_cores())
    return _flagged("quota", "quota", found) if small else _row("quota", found)


def _counter(what: str, count: int | None) -> Finding:
    return _row(what, None if count is None else f"{count} since the system started")


def memory(cpu: Cpu | None = None) -> list[Finding]:
    """Check the memory and its page sizes."""
    import torch

    from experiments.timing.memory import available_bytes, resettable_peak

    section, cpu = "Memory", cpu or Cpu()
    pages = cpu.huge_pages()
    found = [
        Finding(section, "free for tables", f"{available_bytes(torch.device('cpu')) / 1e9:.1f} GB"),
        Finding(section, "huge pages", pages or "not shown")
        if pages != "never"
        else Finding(
            section,
            "huge pages",
            "never",
            State.note,
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled as administrator: large "
            "tables miss the TLB less",
        ),
    ]
    if resettable_peak():
        return [*found, Finding(section, "peak of one call", "can be measured")]
    advice = "/proc/self/clear_refs cannot be written here, so peak memory is left out of reports"
    return [*found, Finding(section, "peak of one call", "hidden", State.note, advice)]


def gpus() -> list[Finding]:
    """Check the GPUs that torch sees, with what NVML reports of each."""
    import torch

    if not torch.cuda.is_available():
        return [no_gpu(torch.__version__, torch.version.cuda, driver=DRIVER.exists())]
    from experiments.machine.telemetry import Nvml

    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        found += gpu(torch.cuda.get_device_properties(device), Nvml.open(device))
    return found


def no_gpu(version: str, cuda: str | None, *, driver: bool) -> Finding:
    """Explain why torch sees no GPU: there is none, or torch is built without CUDA."""
    why = f"built for CUDA {cuda}, finds no device" if cuda else "a build for the CPU"
    found = f"{version}: {why}"
    if not driver:
        return Finding("GPU", "torch", found)
    advice = "an NVIDIA driver is loaded: " + (
        "see CUDA_VISIBLE_DEVICES, and nvidia-smi" if cuda else "install a torch built for CUDA"
    )
    return Finding("GPU", "torch", found, State.note, advice)


def gpu(properties: Any, nvml: Nvml | None) -> list[Finding]:
    """Check one GPU: model, settings, and what would make it steadier."""
    from experiments.machine.preflight import gpu_flags

    section = f"GPU: {properties.name}"
    found = [
        Finding(section, "capability", f"{properties.major}.{properties.minor}"),
        Finding(section, "memory", f"{properties.total_memory / 1e9:.0f} GB"),
        Finding(section, "L2 cache", _mib(int(properties.L2_cache_size))),
    ]
    flags, settings = gpu_flags(nvml)
    for key, (label, unit) in SETTINGS.items():
        if key in settings:
            value = settings[key]
            words = {True: "on", False: "off"}[value] if unit == "" else f"{value:g} {unit}"
            found.append(Finding(section, label, words))
    return found + [_flagged(flag, flag.replace("_", " "), "yes", section) for flag in flags]


def permissions(folder: Path = ROOT) -> list[Finding]:
    """Check permissions and free disk space."""
    section = "Permissions"
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    free = shutil.disk_usage(folder).free
    room = f"{free / 1e9:.0f} GB free"
    found = [
        Finding(section, "administrator", "yes" if root else "no")
        if root
        else Finding(
            section, "administrator", "no", State.note, "clocks can be locked by one who is"
        ),
        Finding(section, "reports", room)
        if free > LITTLE_SPACE
        else Finding(section, "reports", room, State.note, "make room, or set report.folder"),
    ]
    if not os.access(folder, os.W_OK):
        advice = "set report.folder to a folder of yours"
        found.append(Finding(section, "repository", "cannot be written", State.note, advice))
    paranoid = Path("/proc/sys/kernel/perf_event_paranoid")
    if paranoid.exists():
        level = paranoid.read_text().strip()
        found.append(Finding(section, "hardware counters (perf)", f"perf_event_paranoid={level}"))
    return found


def _mib(size: int | None) -> str:
    return f"{(size or 0) / (1 << 20):g} MiB"


MARKS = {State.ok: "[green]✓[/]", State.note: "[yellow]•[/]", State.broken: "[red]✗[/]"}
CHECKS: dict[str, Check] = {
    "Packages": packages,
    "emblib": emblib_libraries,
    "Contenders": contenders,
    "Processor": processor,
    "Memory": memory,
    "GPU": gpus,
    "Permissions": permissions,
    "Tools": tools,
}


def examine(checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Return all findings by section."""
    return [finding for section, check in checks.items() for finding in findings_of(section, check)]


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON."""
    broken = [f.what for f in findings if f.state is State.broken]
    found = {"broken": broken, "findings": [f.describe() for f in findings]}
    return json.dumps(found, indent=1, ensure_ascii=False)


def show(findings: Sequence[Finding], width: int | None = None) -> None:
    """Print one table per section, then what to do."""
    from rich.console import Console

    console = Console(highlight=False, width=width)
    for section in dict.fromkeys(f.section for f in findings):
        own = [f for f in findings if f.section == section]
        _print(console, section, [(_mark(f), f.what, f.found) for f in own])
    for state, title in (
        (State.broken, "Broken, and needed"),
        (State.note, "What would make measurements better"),
    ):
        advised = [f for f in findings if f.state is state and f.advice]
        if advised:
            _print(console, title, [(MARKS[state], f.what, f.advice) for f in advised])
    console.print(_verdict(findings))


def _print(console: Console, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print a title, and (mark, name, text) line by line."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(width=1)
    table.add_column(min_width=26)
    table.add_column(overflow="fold")
    for mark, what, words in rows:
        table.add_row(mark, Text(what), Text(words))
    console.print(Text(title, style="bold"))
    console.print(Padding(table, (0, 0, 1, 2)))


def _mark(finding: Finding) -> str:
    absent = finding.state is State.ok and finding.found.startswith("not ")
    return "[dim]–[/]" if absent else MARKS[finding.state]


def _verdict(findings: Sequence[Finding]) -> str:
    broken = sum(f.state is State.broken for f in findings)
    if broken:
        return f"[red]{broken} of {len(findings)} findings must be repaired before measuring.[/]"
    notes = sum(f.state is State.note for f in findings)
    return f"[green]Ready to measure.[/] {notes} of {len(findings)} findings could be better."


def main(words: Sequence[str] | None = None) -> int:
    """Run all checks; return 0, or 1 where something required is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.doctor",
        description="What is installed and works here, and what would make measurements better.",
    )
    parser.add_argument("--json", action="store_true", help="for other programs")
    chosen = parser.parse_args(words)
    findings = examine()
    if chosen.json:
        print(as_json(findings))
    else:
        show(findings)
    return int(any(f.state is State.broken for f in findings))


if __name__ == "__main__":
    sys.exit(main())
