"""Check this machine: what is installed, what works, and what would improve measurements.

A check is a function of CHECKS that yields results. The exit status is 1 if a result is broken,
which means that something that the harness needs does not work, or that a check raised an error.
Checks import packages inside of functions, so that a missing package becomes a result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.machine.flags import explain, remedy
from experiments.paths import ROOT, installed_version

if TYPE_CHECKING:
    import torch

    from experiments.machine.cpu import Cpu
    from experiments.machine.telemetry import Nvml

NEEDED = (
    "torch",
    "hydra-core",
    "omegaconf",
    "filelock",
    "jinja2",
    "matplotlib",
    "numpy",
    "pandas",
    "psutil",
    "rich",
    "scipy",
)
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
DRIVER = Path("/proc/driver/nvidia")  # exists if an NVIDIA driver is loaded
LITTLE_SPACE_BYTES = 2 << 30
# Instructions that each set of CPU kernels needs (csrc/core/isa.h), best set first.
INSTRUCTIONS = {
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "f16c"},
}
# Setting of a GPU in NVML -> label and unit; "" for on or off.
SETTINGS = {
    "sm_mhz": ("SM clock", "MHz"),
    "sm_mhz_most": ("SM clock, maximum", "MHz"),
    "memory_mhz": ("memory clock", "MHz"),
    "memory_mhz_most": ("memory clock, maximum", "MHz"),
    "temperature_c": ("temperature", "°C"),
    "power_limit_w": ("power limit", "W"),
    "power_limit_default_w": ("power limit, default", "W"),
    "persistence": ("persistence", ""),
    "ecc": ("ECC", ""),
    "mig": ("MIG", ""),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `doctor`."""
    parser.description = (
        "What is installed and works here, and what would make measurements better."
    )
    parser.add_argument("--json", action="store_true", help="for other programs")


def run(arguments: argparse.Namespace) -> int:
    """Run all checks and print the results; return 1 if one is broken, else 0."""
    results = [result for section, check in CHECKS.items() for result in run_check(section, check)]
    if arguments.json:
        broken_names = [result.what for result in results if result.state is State.broken]
        report = {"broken": broken_names, "findings": [asdict(result) for result in results]}
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        show(results)
    return int(any(result.state is State.broken for result in results))


class State(StrEnum):
    """The severity of a result: "ok", "note" (could be better) or "broken" (does not work)."""

    ok = "ok"
    note = "note"
    broken = "broken"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check, a line of the report; `doctor --json` prints its fields.

    Attributes:
        what: name of the thing that was checked.
        found: value of the thing, in words.
        state: severity.
        advice: remedy; "" for none.
        section: heading to show it under; "" for the heading of the check.
    """

    what: str
    found: str
    state: State = State.ok
    advice: str = ""
    section: str = ""


Check = Callable[[], Iterable[CheckResult]]


def run_check(section: str, check: Check) -> list[CheckResult]:
    """Return the results of a check; if it raises, its only result is that error, as broken."""
    try:
        return [replace(result, section=result.section or section) for result in check()]
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return [CheckResult("this check", text, State.broken, "report it as a bug", section)]


def packages() -> Iterator[CheckResult]:
    """Check Python and the packages, required and optional ones."""
    yield CheckResult("python", platform.python_version())
    for name in (*NEEDED, *OPTIONAL):
        if version := installed_version(name):
            yield CheckResult(name, version)
        elif name in NEEDED:
            yield CheckResult(name, "not installed", State.broken, 'pip install -e ".[harness]"')
        else:
            advice = f"pip install {name}: {OPTIONAL[name]}"
            yield CheckResult(name, "not installed", State.note, advice)


def emblib_libraries() -> Iterator[CheckResult]:
    """Check whether emblib loads, which kernels it uses, and whether they compute correctly."""
    try:
        import torch

        import emblib
    except ImportError as error:
        yield CheckResult("import", str(error), State.broken, "make native")
        return
    from experiments.machine.cpu import Cpu
    from experiments.machine.preflight import newer_source

    version = installed_version("emblib") or "of this repository, not installed"
    yield CheckResult("version", f"{version}, with libemblib_cpu")
    if source := newer_source(torch.device("cpu")):
        yield CheckResult("build", f"older than {source}", State.note, remedy("old_library"))
    yield cpu_kernels(Cpu().instructions(), os.environ.get("EMBLIB_ISA"))
    yield _compare_with_torch(torch.device("cpu"))
    if torch.cuda.is_available():
        try:
            emblib.ops.require_kernels(torch.device("cuda"))
        except RuntimeError as error:
            yield CheckResult("CUDA kernels", "absent", State.broken, str(error))
        else:
            yield _compare_with_torch(torch.device("cuda"))
        return
    has_cuda_library = Path(str(emblib.__file__)).with_name("libemblib_cuda.so").exists()
    build = "built, not loaded:" if has_cuda_library else "not built;"
    yield CheckResult("CUDA kernels", f"{build} torch sees no GPU")


def cpu_kernels(cpu_flags: frozenset[str], isa_limit: str | None) -> CheckResult:
    """Return the result that names the CPU kernels in use.

    Args:
        cpu_flags: instruction sets of the CPU, as Linux names them.
        isa_limit: value of EMBLIB_ISA, which limits the kernels; None if it is not set.
    """
    best_isa = next(
        (name for name, function in INSTRUCTIONS.items() if function <= cpu_flags), "baseline"
    )
    isa_order = ["baseline", *reversed(INSTRUCTIONS)]
    if isa_limit is None:
        return CheckResult("CPU kernels", f"{best_isa}, the best that this CPU has")
    if isa_limit not in isa_order:
        message = f"EMBLIB_ISA={isa_limit} is none of {', '.join(isa_order)}"
        return CheckResult("CPU kernels", message, State.broken, "unset EMBLIB_ISA")
    isa = min(best_isa, isa_limit, key=isa_order.index)
    if isa == best_isa:
        return CheckResult("CPU kernels", f"{isa}, as EMBLIB_ISA={isa_limit} allows")
    message = f"{isa} for EMBLIB_ISA={isa_limit}, though this CPU has {best_isa}"
    return CheckResult("CPU kernels", message, State.note, "unset EMBLIB_ISA for full speed")


def _compare_with_torch(device: torch.device) -> CheckResult:
    """Return the result of comparing a small lookup on a device with plain PyTorch."""
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
    actual = module(indices.to(device), offsets.to(device)).detach().cpu()
    if torch.allclose(actual, expected, rtol=1e-4, atol=1e-4):
        return CheckResult(f"on {device}", "a lookup agrees with PyTorch")
    return CheckResult(
        f"on {device}", "a lookup differs from PyTorch", State.broken, advice="make native"
    )


def processor(
    cpu: Cpu | None = None, sleep: Callable[[float], object] = time.sleep
) -> Iterator[CheckResult]:
    """Check the CPU, its clocks, and the load of other processes.

    A fact that the system does not state has the result "not shown".

    Args:
        cpu: CPU to check; None for this machine's.
        sleep: function that waits while the load of other processes is measured.
    """
    from experiments.machine.cpu import CORES, LIKELY_CACHE_BYTES, Cpu, mean_mhz, usable_cores
    from experiments.machine.preflight import cpu_flags

    cpu = cpu or Cpu()
    flags, details = cpu_flags(cpu, len(usable_cores()), sleep)
    cache_bytes, mhz, quota = cpu.last_level_cache(), mean_mhz(), cpu.quota_cores()
    smt, num_throttled = cpu.read_number(f"{CORES}/smt/active"), cpu.num_throttled()
    cores_of_others = details.get("cores_of_others")
    on_off = {True: "on", False: "off", None: None}
    values = {  # None for what the system does not state
        "model": cpu.cpuinfo("model name") or None,
        "usable cores": str(details["cores"]),
        "hyper-threads": on_off[None if smt is None else smt == 1],
        "last-level cache": _mib(cache_bytes) if cache_bytes else None,
        "frequency": f"{mhz:.0f} MHz" if mhz else None,
        "governor": cpu.governor(),
        "boost": on_off[cpu.has_boost()],
        "load": f"{details['load']:.2f} in the last minute",
        "other processes": None if cores_of_others is None else f"{cores_of_others:.2f} cores",
        "quota": "none" if quota is None else f"{quota:g} cores' worth of time",
        "virtual machine": "yes" if cpu.is_virtual() else "no",
        "throttle counter": None
        if num_throttled is None
        else f"{num_throttled} since the system started",
    }
    label_of = {"busy": "other processes", "virtual": "virtual machine"}
    flag_of = {label_of.get(flag, flag): flag for flag in flags}
    for label, value in values.items():
        if label in flag_of:
            yield _flagged(flag_of[label], label, str(value))
        elif label == "last-level cache" and value is None:
            advice = f"{_mib(LIKELY_CACHE_BYTES)} is assumed to empty it"
            yield CheckResult(label, "not shown", State.note, advice)
        else:
            yield CheckResult(label, value or "not shown")


def memory() -> Iterator[CheckResult]:
    """Check the memory and its page sizes."""
    import torch

    from experiments.machine.cpu import Cpu
    from experiments.machine.memory import available_bytes, reset_peak

    yield CheckResult("free for tables", f"{available_bytes(torch.device('cpu')) / 1e9:.1f} GB")
    setting = "sys/kernel/mm/transparent_hugepage/enabled"
    pages = re.search(r"\[(\w+)\]", Cpu().read_text(setting) or "")
    if pages and pages[1] == "never":
        advice = f"echo madvise > /{setting} as administrator: large tables miss the TLB less"
        yield CheckResult("huge pages", "never", State.note, advice)
    else:
        yield CheckResult("huge pages", pages[1] if pages else "not shown")
    if reset_peak():
        yield CheckResult("peak of one call", "can be measured")
    else:
        advice = "/proc/self/clear_refs cannot be written, so reports leave out peak memory"
        yield CheckResult("peak of one call", "hidden", State.note, advice)


def gpus() -> Iterator[CheckResult]:
    """Check the GPUs that torch sees, with what NVML reports of each."""
    import torch

    from experiments.machine.telemetry import Nvml

    if not torch.cuda.is_available():
        yield explain_no_gpu(torch.__version__, torch.version.cuda, driver=DRIVER.exists())
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        yield from check_gpu(torch.cuda.get_device_properties(device), Nvml.open(device))


def explain_no_gpu(version: str, cuda: str | None, *, driver: bool) -> CheckResult:
    """Return the result that says why torch finds no GPU.

    Args:
        version: version of torch.
        cuda: version of CUDA that torch was built for; None for a build for the CPU.
        driver: whether an NVIDIA driver is loaded.
    """
    build = f"built for CUDA {cuda}, finds no device" if cuda else "a build for the CPU"
    if not driver:
        return CheckResult("torch", f"{version}: {build}")
    remedies = "see CUDA_VISIBLE_DEVICES, and nvidia-smi" if cuda else "install a torch for CUDA"
    advice = f"an NVIDIA driver is loaded: {remedies}"
    return CheckResult("torch", f"{version}: {build}", State.note, advice)


def check_gpu(properties: Any, nvml: Nvml | None) -> Iterator[CheckResult]:
    """Check one GPU: model, settings, and what would make it steadier.

    Args:
        properties: result of torch.cuda.get_device_properties.
        nvml: NVML's handle of the GPU; None where NVML does not work.
    """
    from experiments.machine.preflight import gpu_flags

    section = f"GPU: {properties.name}"
    flags, settings = gpu_flags(nvml)
    rows = {
        "capability": f"{properties.major}.{properties.minor}",
        "memory": f"{properties.total_memory / 1e9:.0f} GB",
        "L2 cache": _mib(int(properties.L2_cache_size)),
    }
    for key, (label, unit) in SETTINGS.items():
        if key in settings:
            value = settings[key]
            rows[label] = f"{value:g} {unit}" if unit else {True: "on", False: "off"}[value]
    for row_label, value_shown in rows.items():
        yield CheckResult(row_label, value_shown, section=section)
    for flag in flags:
        yield replace(_flagged(flag, flag.replace("_", " "), "yes"), section=section)


def permissions() -> Iterator[CheckResult]:
    """Check permissions, and the free disk space of the repository."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        yield CheckResult("administrator", "yes")
    else:
        advice = "only an administrator can lock clocks"
        yield CheckResult("administrator", "no", State.note, advice)
    free_bytes = shutil.disk_usage(ROOT).free
    is_low = free_bytes <= LITTLE_SPACE_BYTES
    yield CheckResult(
        "reports",
        f"{free_bytes / 1e9:.0f} GB free",
        State.note if is_low else State.ok,
        "make room, or set report.folder" * is_low,
    )
    if not os.access(ROOT, os.W_OK):
        advice = "set report.folder to a folder of yours"
        yield CheckResult("repository", "cannot be written", State.note, advice)
    paranoid = Path("/proc/sys/kernel/perf_event_paranoid")
    if paranoid.exists():
        level = paranoid.read_text().strip()
        yield CheckResult("hardware counters (perf)", f"perf_event_paranoid={level}")


def tools(*, driver: bool | None = None) -> Iterator[CheckResult]:
    """Check external programs, which are all optional.

    Args:
        driver: True if an NVIDIA driver is loaded: only then are missing programs for GPUs noted.
            None looks for one.
    """
    driver = DRIVER.exists() if driver is None else driver
    for name, use in TOOLS.items():
        if shutil.which(name):
            yield CheckResult(name, "found")
        elif driver or name not in FOR_GPUS:
            yield CheckResult(name, "not on PATH", State.note, use)
        else:
            yield CheckResult(name, "not on PATH")


CHECKS: dict[str, Check] = {
    "Packages": packages,
    "emblib": emblib_libraries,
    "Processor": processor,
    "Memory": memory,
    "GPU": gpus,
    "Permissions": permissions,
    "Tools": tools,
}


def _flagged(flag: str, label: str, value: str) -> CheckResult:
    return CheckResult(label, value, State.note, f"{explain(flag)}: {remedy(flag)}")


def _mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB"


def show(results: Sequence[CheckResult]) -> None:
    """Print a table per section, then the advice, then the verdict."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    marks = {State.ok: "[green]✓[/]", State.note: "[yellow]•[/]", State.broken: "[red]✗[/]"}
    console = Console(highlight=False)

    def show_table(title: str, rows: Iterable[tuple[str, str, str]]) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(width=1)
        table.add_column(min_width=26)
        table.add_column(overflow="fold")
        for mark, label, text in rows:
            table.add_row(mark, Text(label), Text(text))
        console.print(Text(title, style="bold"))
        console.print(Padding(table, (0, 0, 1, 2)))

    def mark_of(result: CheckResult) -> str:
        is_absent = result.state is State.ok and result.found.startswith("not ")
        return "[dim]–[/]" if is_absent else marks[result.state]

    for section in dict.fromkeys(r.section for r in results):
        show_table(
            section, [(mark_of(r), r.what, r.found) for r in results if r.section == section]
        )
    titles = {State.broken: "Broken, and needed", State.note: "What would make measurements better"}
    for state, title in titles.items():
        advised = [r for r in results if r.state is state and r.advice]
        if advised:
            show_table(title, [(marks[state], r.what, r.advice) for r in advised])
    num_broken = sum(r.state is State.broken for r in results)
    num_notes = sum(r.state is State.note for r in results)
    if num_broken:
        verdict = (
            f"[red]{num_broken} of {len(results)} findings must be repaired before measuring.[/]"
        )
    else:
        verdict = (
            f"[green]Ready to measure.[/] {num_notes} of {len(results)} findings could be better."
        )
    console.print(verdict)
