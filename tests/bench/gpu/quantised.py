"""Quantised lookups: bytes per second of bags of one and of pooled bags, 8 and 4 bits."""

from __future__ import annotations

import functools

import torch

import emblib
from tests.bench.gpu.bench import Bench, Shape, sized
from tests.bench.gpu.watch import kernels

SHAPES = (Shape(26, 500_000, 64, 65_536), Shape(10, 500_000, 128, 4096, 20))


def run(bench: Bench) -> None:
    """Measure both shapes with both numbers of bits."""
    for shape, small in zip(SHAPES, sized(bench, SHAPES), strict=True):
        for bits in (8, 4):
            name = f"{shape.name} {bits} bits"
            bench.attempt(name, functools.partial(point, bench, small, bits, name))


def row_bytes(dim: int, bits: int) -> int:
    """Return the bytes of a row: scale, offset and numbers, in whole 4 bytes."""
    return (4 + dim * bits // 8 + 3) // 4 * 4


def point(bench: Bench, shape: Shape, bits: int, name: str) -> None:
    """Time the call, and by the profiler the lookup's kernel alone."""
    specs = [emblib.TableSpec(shape.rows, shape.dim)] * shape.tables
    table = emblib.QuantizedEmbeddingBags(specs, bits=bits, device=bench.device)
    with torch.no_grad():
        table.packed.fill_(1)  # pages that were never written read too fast
    batches = shape.batches(bench.device)
    bags = shape.tables * shape.batch
    nbytes = shape.lookups * (row_bytes(shape.dim, bits) + 8) + bags * (shape.dim * 4 + 8)
    calls = {"emblib": lambda n: table(*batches[n % len(batches)])}
    times = bench.race(calls)["emblib"]
    profiled = kernels(calls["emblib"])
    lookup = [us for kernel, (_, us) in profiled.items() if "quant" in kernel]
    call = times.median_us("device")
    kernel_us = sum(lookup) or None
    bench.row(
        point=name,
        call_us=call,
        kernel_us=kernel_us,
        megabytes=nbytes / 1e6,
        call_tb_s=nbytes / call / 1e6 if call else None,
        kernel_tb_s=nbytes / kernel_us / 1e6 if kernel_us else None,
        status=times.error or "ok",
    )
    if kernel_us:
        bench.figure(f"{name}: kernel TB/s", nbytes / kernel_us / 1e6)
    if call:
        bench.figure(f"{name}: call TB/s", nbytes / call / 1e6)
