"""Updates and grouping: microseconds of the kernels of a step, and the step against FBGEMM's.

Kernels are timed by the profiler: *lookup* are the lookup's, *update* those that write rows, and
*grouping* is the rest of a step, checks of ids included. Where there is no profiler, a step's
device time without the forward's counts as update and grouping together.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from tests.bench.gpu.bench import Bench, Shape, sized
from tests.bench.gpu.peers import STATES, Emblib, Fbgemm, NotOffered
from tests.bench.gpu.watch import Call, kernels, ratio

LOOKUP = re.compile(r"pool|bags_kernel|lookup_kernel")
UPDATE = re.compile(r"update|chunk|apply_")
WIDE, LONG, SKEWED = (
    Shape(26, 1_000_000, 64, 65_536),
    Shape(10, 1_000_000, 128, 4096, 20),
    Shape(10, 1_000_000, 64, 8192, 20, 1.15),
)
ALL = ("rowwise_adagrad", "sgd", "adagrad", "adam")
POINTS: tuple[tuple[Shape, str, tuple[str, ...]], ...] = (
    (WIDE, "fp32", ALL),
    (LONG, "fp32", ALL),
    (SKEWED, "fp32", ("rowwise_adagrad",)),
    (WIDE, "fp16", ("rowwise_adagrad",)),
    (LONG, "fp16", ("rowwise_adagrad",)),
    (replace(WIDE, rows=250_000, dim=256, batch=16_384), "fp32", ("rowwise_adagrad",)),
    (replace(WIDE, rows=125_000, dim=512, batch=8192), "fp32", ("rowwise_adagrad",)),
    (replace(WIDE, dim=50), "fp32", ("rowwise_adagrad",)),
    (replace(WIDE, dim=16), "fp32", ("sgd",)),
    (Shape(1, 1_000_000, 64, 512), "fp32", ("sgd",)),
    (Shape(1, 1_000_000, 64, 2048), "fp32", ("sgd",)),
    (Shape(4, 1_000_000, 64, 4095), "fp32", ("sgd",)),
)


def run(bench: Bench) -> None:
    """Measure every shape, dtype and optimizer."""
    for shape, dtype, optimizers in POINTS:
        for work in optimizers:
            chosen = sized(bench, [shape])[0]
            bench.attempt(
                f"{shape.name} {dtype} {work}",
                functools.partial(point, bench, chosen, shape.name, dtype, work),
            )


def point(bench: Bench, shape: Shape, title: str, dtype: str, work: str) -> None:
    """Measure the kernels of emblib's step, then the step against FBGEMM's."""
    width = 2 if dtype == "fp16" else 4
    per_row = 2 * shape.tables * shape.dim * (width + 4 * STATES[work])
    shape = replace(shape, rows=bench.fit_rows(shape.rows, per_row))
    batches, grad = shape.batches(bench.device), shape.gradient(bench.device)
    name = f"{title} {dtype} {work}"
    calls: dict[str, Call] = {}
    for contender, kind in (("emblib", Emblib), ("fbgemm", Fbgemm)):
        try:
            tables = kind(shape, work, dtype, bench.device)
        except (NotOffered, NotImplementedError, RuntimeError, AssertionError, ValueError) as error:
            bench.row(point=name, contender=contender, status=str(error).partition("\n")[0][:120])
            continue
        calls[contender] = lambda n, t=tables: t.step(*batches[n % len(batches)], grad)
        calls[f"{contender} forward"] = lambda n, t=tables: t.forward(*batches[n % len(batches)])
    results = bench.race(calls, share=0.1)
    step, forward = (results[n].median_us("device") for n in ("emblib", "emblib forward"))
    parts = _parts(calls["emblib"])
    peer = results.get("fbgemm")
    bench.row(
        point=name,
        contender="emblib",
        lookups=shape.lookups,
        forward_us=forward,
        step_us=step,
        update_us=parts.get("update"),
        grouping_us=parts.get("grouping"),
        fbgemm_step_us=peer.median_us("device") if peer else None,
        step_ratio=ratio(peer, results["emblib"]) if peer else None,
        status=results["emblib"].error or "ok",
    )
    if peer and not peer.error and "fbgemm forward" in results:
        fbgemm_us, lookup_us = (
            peer.median_us("device"),
            results["fbgemm forward"].median_us("device"),
        )
        if fbgemm_us and lookup_us and step and forward and step > forward:
            value = (fbgemm_us - lookup_us) / (step - forward)
            bench.figure(f"{name}: backward, FBGEMM ÷ emblib", value)
    bench.figure(f"{name}: update us", parts.get("update"))
    bench.figure(f"{name}: grouping us", parts.get("grouping"))
    if not parts and step and forward:
        bench.figure(f"{name}: step less forward us", step - forward)


def _parts(step: Call) -> dict[str, float]:
    """Return microseconds of lookup, update and grouping; empty without a profiler."""
    profiled = kernels(step)
    if not profiled:
        return {}
    total = {"lookup": 0.0, "update": 0.0, "grouping": 0.0}
    for name, (_, us) in profiled.items():
        part = "update" if UPDATE.search(name) else "lookup" if LOOKUP.search(name) else "grouping"
        total[part] += us
    return total
