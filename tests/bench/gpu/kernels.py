"""Kernels of a training step against a model: their bytes at a published rate of gathers.

All rows of a batch are distinct, rows are float32, and the optimizer is row-wise Adagrad.
`docs/cuda_performance.md` has the model of the same batches.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tests.bench.gpu.bench import Bench, Shape, sized
from tests.bench.gpu.peers import Emblib
from tests.bench.gpu.watch import kernels

GATHER_TB_S = 2.77  # TB/s of a gather on an H100, published: pytorch/FBGEMM PR 3993
FLOAT_BYTES, ID_BYTES, OFFSET_BYTES = 4, 8, 8
BATCHES = 8  # distinct batches
STEPS = 20  # profiled steps
FORWARD = ("pool_kernel", "short_bags_kernel", "long_bags_kernel")
UPDATE = ("update_kernel", "chunk_kernel")
SHAPES = (Shape(26, 2_000_000, 64, 65_536), Shape(10, 2_000_000, 128, 4096, 20))


def run(bench: Bench) -> None:
    """Measure both shapes."""
    for shape, used in zip(SHAPES, sized(bench, SHAPES), strict=True):
        bench.attempt(title(shape), functools.partial(point, bench, used, title(shape)))


def title(shape: Shape) -> str:
    """Return the sizes of a batch in words."""
    return f"{shape.tables} tables, D {shape.dim}, B {shape.batch:,}, L {shape.length}"


def forward_bytes(shape: Shape) -> int:
    """Return the bytes of a lookup: rows, ids and offsets read, outputs written."""
    row = shape.dim * FLOAT_BYTES
    bags = shape.tables * shape.batch
    return shape.lookups * (row + ID_BYTES) + bags * (row + OFFSET_BYTES)


def update_bytes(shape: Shape) -> int:
    """Return the bytes of an update: gradients read, rows and states read and written."""
    gradients = shape.tables * shape.batch * shape.dim
    return FLOAT_BYTES * (gradients + 2 * shape.lookups * (shape.dim + 1))


def model_us(nbytes: int) -> float:
    """Return the microseconds of moving `nbytes` by the model."""
    return nbytes / GATHER_TB_S / 1e6


def point(bench: Bench, shape: Shape, name: str) -> None:
    """Profile steps: a row per part of the model, then one per kernel, the slowest first."""
    tables = Emblib(shape, "rowwise_adagrad", "fp32", bench.device)
    batches = distinct_batches(shape, bench.device)
    grad = shape.gradient(bench.device)

    def step(number: int) -> None:
        tables.step(*batches[number % BATCHES], grad)

    times = bench.race({"step": step})["step"]
    bench.row(batch=name, part="step", us=times.median_us("elapsed"), status=times.error or "ok")
    if times.error:
        return
    profiled = kernels(step, STEPS)
    parts = (("forward", FORWARD, forward_bytes(shape)), ("update", UPDATE, update_bytes(shape)))
    for part, names, nbytes in parts:
        us = sum(us for kernel, (_, us) in profiled.items() if kernel.startswith(names))
        model = model_us(nbytes)
        share = model / us if us else None
        bench.row(batch=name, part=part, us=us or None, model_us=model, model_share=share)
    for kernel, (launches, us) in sorted(profiled.items(), key=lambda item: -item[1][1]):
        bench.row(batch=name, part=kernel, us=us, launches=launches)
    if not profiled:
        bench.notes.append(f"{name}: the profiler reported no kernel")


def distinct_batches(shape: Shape, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Draw ids that are distinct within a table, unless it has too few rows, and offsets."""
    num_ids = shape.batch * shape.length
    repeats = -(-num_ids // shape.rows)
    batches = []
    for seed in range(BATCHES):
        generator = torch.Generator(device).manual_seed(seed)
        ids = [
            torch.randperm(shape.rows, generator=generator, device=device).repeat(repeats)[:num_ids]
            for _ in range(shape.tables)
        ]
        offsets = torch.arange(0, shape.lookups + 1, shape.length, device=device)
        batches.append((torch.cat(ids), offsets))
    return batches
