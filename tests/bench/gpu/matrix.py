"""The matrix on a GPU, as `cpu_matrix` is on a CPU: lookups and steps against peers.

Every shape is measured forward and as a training step of four optimizers, fp32 and fp16 (rows
rounded stochastically), eager and replayed as a CUDA graph, by emblib, FBGEMM and
`nn.EmbeddingBag`. Three times are apart: *host*, until the call returns on an idle device;
*elapsed*, until the device is idle again; *device*, between events behind a spin, without launches.
Contenders of a point run in random order within a round on the same batches; ratios (peer ÷ emblib)
are medians over the rounds. A point is host-bound where the device takes less than 80 % of the
host's time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any, NamedTuple

from experiments.results.metrics import is_host_bound
from tests.bench.gpu.bench import Bench, Shape, sized
from tests.bench.gpu.peers import CONTENDERS, DTYPES, PASSES, STATES, Emblib, NotOffered
from tests.bench.gpu.watch import Call, Times, ratio

SHAPES = (
    Shape(26, 1_000_000, 64, 65_536),
    Shape(10, 1_000_000, 128, 4096, 20),
    Shape(10, 1_000_000, 64, 8192, 20, 1.15),
    Shape(26, 1_000_000, 64, 4096),
    Shape(26, 1_000_000, 16, 16_384),
    Shape(26, 100_000, 64, 512),
    Shape(1, 1_000_000, 64, 512),
    Shape(100, 100_000, 128, 128, 2),
)

UNCAPTURED: dict[str, str] = {}  # contender -> reason; a failed capture can harm what follows it


def run(bench: Bench) -> None:
    """Measure every point: all shapes of a dtype and pass, then the next pass."""
    for (dtype, work), shape in itertools.product(itertools.product(DTYPES, PASSES), SHAPES):
        name = f"{shape.name} {dtype} {work}"
        bench.attempt(name, functools.partial(point, bench, shape, dtype, work))


class Point(NamedTuple):
    """What the rows of a point have in common."""

    shape: str
    dtype: str
    work: str


def point(bench: Bench, full: Shape, dtype: str, work: str) -> None:
    """Measure the contenders of a point, eager and captured: a row for each."""
    key, shape = Point(full.name, dtype, work), sized(bench, [full])[0]
    width = 2 if dtype == "fp16" else 4
    per_row = shape.tables * shape.dim * (width + 4 * STATES[work]) * len(CONTENDERS)
    rows = bench.fit_rows(shape.rows, per_row)
    shape = dataclasses.replace(shape, rows=rows)
    batches, grad = shape.batches(bench.device), shape.gradient(bench.device)
    eager: dict[str, Call] = {}
    for contender in random.sample(sorted(CONTENDERS), len(CONTENDERS)):
        try:
            tables = CONTENDERS[contender](shape, work, dtype, bench.device)
        except NotOffered as error:
            _row(bench, key, contender, "eager", Times(error=str(error)), None)
            continue
        eager[contender] = _call(tables, work, batches, grad)
    _rows(bench, key, "eager", bench.race(eager, share=0.05))
    captured: dict[str, Call] = {}
    for contender, call in eager.items():
        reason = UNCAPTURED.get(contender, "")
        if contender == "torch" and work != "forward":
            reason = "sparse gradients wait for the device"
        if reason:
            _row(bench, key, contender, "captured", Times(error=reason), None)
            continue
        try:
            captured[contender] = bench.watch.captured(call)
        except Exception as error:  # what waits for the device cannot be captured
            message = str(error).strip().partition("\n")[0][:120]
            if contender != "emblib":
                UNCAPTURED[contender] = message
            _row(bench, key, contender, "captured", Times(error=message), None)
    if captured:
        _rows(bench, key, "captured", bench.race(captured, share=0.03))


def _call(tables: Emblib, work: str, batches: Any, grad: Any) -> Call:
    if work == "forward":
        return lambda number: tables.forward(*batches[number % len(batches)])
    return lambda number: tables.step(*batches[number % len(batches)], grad)


def _rows(bench: Bench, key: Point, mode: str, results: dict[str, Times]) -> None:
    for contender in CONTENDERS:
        if contender in results:
            _row(bench, key, contender, mode, results[contender], results.get("emblib"))
    for peer in ("fbgemm", "torch"):
        if peer in results and "emblib" in results:
            value = ratio(results[peer], results["emblib"])
            bench.figure(f"{' '.join(key)} {mode}: {peer} ÷ emblib, device", value)


def _row(
    bench: Bench,
    key: Point,
    contender: str,
    mode: str,
    times: Times,
    base: Times | None,
) -> None:
    host, elapsed, device = (times.median_us(kind) for kind in ("host", "elapsed", "device"))
    bound_by = None
    if host and device and bench.device.type == "cuda":
        bound_by = "host" if is_host_bound("hot", device, host) else "GPU"
    bench.row(
        **key._asdict(),
        contender=contender,
        mode=mode,
        host_us=host,
        elapsed_us=elapsed,
        device_us=device,
        bound_by=bound_by,
        elapsed_ratio=ratio(times, base, "elapsed") if base and contender != "emblib" else None,
        device_ratio=ratio(times, base, "device") if base and contender != "emblib" else None,
        status=times.error or "ok",
    )
