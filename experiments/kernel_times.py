"""Compare times of CUDA kernels with a model: `python run.py kernel_times --out FILE.md`.

The model divides the bytes of a kernel by a published rate of gathers; the page has both
times. `docs/cuda_performance.md` has the model alone.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import emblib
from experiments.config.schema import UsageError

GATHER_TB_S = 2.77  # TB/s of a gather on an H100, published: pytorch/FBGEMM PR 3993
_FLOAT, _ID, _OFFSET = 4, 8, 8
_POOL = 8  # distinct batches
_FORWARD = ("pool_kernel", "short_bags_kernel", "long_bags_kernel")
_UPDATE = ("update_kernel", "chunk_kernel")


class Shape(NamedTuple):
    """Sizes of a batch: tables, float32 columns, bags per table, distinct rows per bag."""

    tables: int
    dim: int
    batch: int
    length: int

    @property
    def title(self) -> str:
        """Return the sizes in words."""
        return f"{self.tables} tables, D {self.dim}, B {self.batch:,}, L {self.length}"

    def forward_bytes(self) -> int:
        """Return the bytes of a lookup: rows, ids and offsets read, outputs written."""
        lookups, bags = self.tables * self.batch * self.length, self.tables * self.batch
        row = self.dim * _FLOAT
        return lookups * (row + _ID) + bags * (row + _OFFSET)

    def update_bytes(self) -> int:
        """Return the bytes of an update: gradients read, rows and states read and written."""
        lookups, bags = self.tables * self.batch * self.length, self.tables * self.batch
        return bags * self.dim * _FLOAT + lookups * 2 * (self.dim + 1) * _FLOAT


SHAPES = (Shape(26, 64, 65_536, 1), Shape(10, 128, 4096, 20))


def model_us(nbytes: int) -> float:
    """Return the microseconds of moving `nbytes` by the model."""
    return nbytes / GATHER_TB_S / 1e6


class KernelTimes(NamedTuple):
    """Launches and microseconds per step of each kernel, and microseconds of a whole step."""

    launches: dict[str, float]
    microseconds: dict[str, float]
    step_us: float


def measure(shape: Shape, rows: int, steps: int) -> KernelTimes:
    """Time `steps` training steps on tables of `rows` rows by events, then as many by profiler."""
    device = torch.device("cuda")
    specs = [emblib.TableSpec(rows, shape.dim)] * shape.tables
    bags = emblib.TableBatchedEmbeddingBags(specs, emblib.optim.RowwiseAdagrad(0.01), device=device)
    batches = [_batch(shape, rows, seed, device) for seed in range(_POOL)]
    grad = torch.full((shape.batch, shape.tables * shape.dim), 1e-3, device=device)

    def step(number: int) -> None:
        bags(*batches[number % _POOL]).backward(grad)

    for number in range(_POOL):
        step(number)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for number, event in enumerate(events):
        event.record()
        if number < steps:
            step(number)
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
    launches: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in device_events(step, steps):
        name = short_name(event.name)
        launches[name] += 1
        microseconds[name] += event.device_time_total
    return KernelTimes(
        {name: count / steps for name, count in launches.items()},
        {name: total / steps for name, total in microseconds.items()},
        statistics.median(times),
    )


def device_events(step: Callable[[int], object], steps: int) -> list[Any]:
    """Return the profiler's events on the GPU; [] if this torch cannot profile GPUs."""
    activity = torch.profiler.ProfilerActivity.CUDA
    if activity not in torch.profiler.supported_activities():
        return []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, activity]
    ) as profile:
        for number in range(steps):
            step(number)
        torch.cuda.synchronize()
    return [e for e in profile.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]


def _batch(shape: Shape, rows: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw ids that are distinct within a table, unless it has too few rows."""
    generator = torch.Generator(device).manual_seed(seed)
    num_ids = shape.batch * shape.length
    ids_by_table = [
        torch.randperm(rows, generator=generator, device=device)[:num_ids]
        for _ in range(shape.tables)
    ]
    ids = torch.cat([d.repeat(-(-num_ids // d.numel()))[:num_ids] for d in ids_by_table])
    return ids, torch.arange(0, ids.numel() + 1, shape.length, device=device)


def short_name(kernel: str) -> str:
    """Return the name of a kernel without namespaces, arguments and return type."""
    name = re.sub(r"\(anonymous namespace\)::|\w+::", "", kernel.split("(emb::")[0])
    return name.removeprefix("void ").split("(")[0]


def section(shape: Shape, kernels_of: KernelTimes) -> str:
    """Return the section of the page about a shape, Markdown."""
    lines = [
        f"## {shape.title}",
        "",
        f"A step takes {kernels_of.step_us:,.0f} us (median, CUDA events).",
        "",
        "| part | model | measured | model ÷ measured |",
        "| --- | ---: | ---: | ---: |",
    ]
    parts = (
        ("forward", _FORWARD, shape.forward_bytes()),
        ("update", _UPDATE, shape.update_bytes()),
    )
    for part, kernels, nbytes in parts:
        us = sum(t for name, t in kernels_of.microseconds.items() if name.startswith(kernels))
        model = model_us(nbytes)
        measured = f"{us:,.0f} us | {model / us:.0%}" if us else "not reported | –"
        lines.append(f"| {part}: {', '.join(kernels)} | {model:,.0f} us | {measured} |")
    lines += ["", "| kernel | launches per step | us per step |", "| --- | ---: | ---: |"]
    order = sorted(kernels_of.microseconds, key=lambda name: -kernels_of.microseconds[name])
    lines += [
        f"| `{name}` | {kernels_of.launches[name]:.3g} | {kernels_of.microseconds[name]:,.1f} |"
        for name in order
    ]
    if not order:
        lines.append("| the profiler reported no kernel | – | – |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `kernel_times`."""
    parser.add_argument("--out", type=Path, required=True, help="the page, Markdown")
    parser.add_argument("--rows", type=int, default=2_000_000, help="of each table")
    parser.add_argument("--steps", type=int, default=20)


def run(arguments: argparse.Namespace) -> int:
    """Write the page; raise UsageError without a GPU."""
    if not torch.cuda.is_available():
        raise UsageError("kernel_times needs a GPU, and torch sees none")
    name = torch.cuda.get_device_name()
    head = (
        f"# Kernels on {name}\n\nModel: bytes at {GATHER_TB_S} TB/s, see docs/cuda_performance.md."
    )
    sections = [section(s, measure(s, arguments.rows, arguments.steps)) for s in SHAPES]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("\n\n".join([head, *sections]) + "\n")
    print(arguments.out.read_text())
    return 0
