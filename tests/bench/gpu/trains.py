"""Tensor trains against FBTT and against plain tables: steps, forwards, device operations.

FBTT is what a user has built: `tt_embeddings_ops` is imported, from the folder that the
environment variable EMBLIB_FBTT names where it is set (docs/peers.md).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import emblib
from tests.bench.gpu.bench import Bench, Shape
from tests.bench.gpu.peers import LR, NotOffered
from tests.bench.gpu.watch import Call, kernels, ratio

MAX_PLAIN_BYTES = 30e9  # bytes of plain tables that are compared with
KAGGLE = (10_131_227, 8_351_593, 7_046_547, 5_461_306, 2_202_608, 286_181, 142_572)


@dataclass(frozen=True)
class Trains:
    """Tables of one dim and rank as trains; a batch of equally many lookups in each."""

    name: str
    rows: tuple[int, ...]
    dim: int
    ranks: tuple[int, int]
    batch: int
    length: int = 1
    zipf: float | None = 1.05
    row_factors: tuple[int, ...] = ()
    dim_factors: tuple[int, ...] = ()

    def specs(self) -> list[emblib.TTSpec]:
        """Return emblib's tables."""
        return [
            emblib.TTSpec(rows, self.dim, self.ranks, self.row_factors, self.dim_factors)
            for rows in self.rows
        ]

    def shape(self, table: int = -1) -> Shape:
        """Return the batch of one table, or of all with the rows of the smallest."""
        if table >= 0:
            return Shape(1, self.rows[table], self.dim, self.batch, self.length, self.zipf)
        tables, rows = len(self.rows), min(self.rows)
        return Shape(tables, rows, self.dim, self.batch, self.length, self.zipf)

    def small(self) -> Trains:
        """Return the trains at a size that a CPU does at once."""
        rows = tuple(min(rows, 500 + 100 * n) for n, rows in enumerate(self.rows[:3]))
        return replace(self, rows=rows, ranks=(4, 4), batch=8, row_factors=())


README = Trains("README", (11_000_000,), 64, (32, 32), 512, 20, None, (200, 220, 250), (4, 4, 4))
EQUAL = Trains("100 equal", (1_000_000,) * 100, 64, (12, 14), 512, 1, None)
POINTS = (
    *(Trains(f"Kaggle B {b}", KAGGLE, 16, (16, 16), b) for b in (2048, 16_384, 65_536)),
    Trains("Kaggle D 64 B 16384", KAGGLE, 64, (16, 16), 16_384),
    README,
    replace(README, name="README B 8192", batch=8192),
    EQUAL,
    replace(EQUAL, name="100 equal, rank 16", ranks=(16, 16)),
)


def run(bench: Bench) -> None:
    """Measure every shape."""
    for trains in POINTS:
        chosen = trains.small() if bench.tiny else trains
        bench.attempt(trains.name, functools.partial(point, bench, chosen))


def point(bench: Bench, trains: Trains) -> None:
    """Race emblib's trains, eager and captured, FBTT, and plain tables of emblib."""
    shape, name = trains.shape(), trains.name
    per_table = [trains.shape(table).batches(bench.device) for table in range(len(trains.rows))]
    batches = [
        (torch.cat([ids[n][0] for ids in per_table]), shape.batches(bench.device, 1)[0][1])
        for n in range(len(per_table[0]))
    ]
    grad = shape.gradient(bench.device)
    module = emblib.TableBatchedTTEmbeddingBags(
        trains.specs(), emblib.optim.SGD(LR), device=bench.device
    )
    calls: dict[str, Call] = {
        "emblib": lambda n: module(*batches[n % len(batches)]).backward(grad),
        "emblib forward": lambda n: _forward(module, batches[n % len(batches)]),
    }
    try:
        calls["emblib captured"] = bench.watch.captured(calls["emblib"])
    except Exception as error:
        bench.row(point=name, contender="emblib captured", status=str(error)[:120])
    try:
        calls |= fbtt_calls(bench, trains, module.tables, batches, grad)
    except NotOffered as error:
        bench.row(point=name, contender="FBTT", status=str(error))
    if sum(trains.rows) * trains.dim * 4 < MAX_PLAIN_BYTES:
        plain = emblib.TableBatchedEmbeddingBags(
            [emblib.TableSpec(rows, trains.dim) for rows in trains.rows],
            emblib.optim.SGD(LR),
            device=bench.device,
        )
        calls["TBE"] = lambda n: plain(*batches[n % len(batches)]).backward(grad)
    results = bench.race(calls)
    profiled = kernels(calls["emblib"])
    for contender, times in results.items():
        bench.row(
            point=name,
            contender=contender,
            **times.columns(),
            operations=sum(n for n, _ in profiled.values()) or None
            if contender == "emblib"
            else None,
            status=times.error or "ok",
        )
    if profiled:
        bench.figure(f"{name}: device operations", sum(n for n, _ in profiled.values()))
    for peer, kind in (("FBTT", "elapsed"), ("FBTT forward", "elapsed")):
        emblib_name = "emblib forward" if "forward" in peer else "emblib"
        if peer in results:
            bench.figure(
                f"{name}: {peer} ÷ emblib",
                ratio(results[peer], results[emblib_name], kind),
            )
    if "TBE" in results:
        bench.figure(f"{name}: emblib ÷ TBE, device", ratio(results["emblib"], results["TBE"]))


def _forward(module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = module(*batch)
    return out


def fbtt() -> Any:
    """Import FBTT as its contender does; raise NotOffered where it cannot be imported."""
    try:
        return importlib.import_module("experiments.contenders.fbtt").LIBRARY
    except (ImportError, OSError) as error:
        raise NotOffered(f"FBTT cannot be imported ({error}); see docs/peers.md") from error


def fbtt_calls(
    bench: Bench,
    trains: Trains,
    specs: Sequence[emblib.TTSpec],
    batches: list[tuple[Tensor, Tensor]],
    grad: Tensor,
) -> dict[str, Call]:
    """Return FBTT's step and forward: one batched module for equal tables, else one per table.

    With the factors that emblib chose: FBTT's own choice takes seconds and fails for some sizes.
    """
    if bench.device.type != "cuda":
        raise NotOffered("FBTT needs a GPU")
    library = fbtt()
    common: dict[str, Any] = {
        "optimizer": library.OptimType.SGD,
        "learning_rate": LR,
        "sparse": True,
        "use_cache": False,
        "weight_dist": "uniform",
    }
    tables = len(trains.rows)
    if len(set(trains.rows)) == 1 and tables > 1:
        sizes = _sizes(specs[0])
        module = library.TableBatchedTTEmbeddingBag(tables, *sizes, **common).cuda()
        shaped = grad.view(trains.batch, tables, trains.dim).transpose(0, 1).contiguous()

        def batched(number: int) -> Tensor:
            out: Tensor = module(*batches[number % len(batches)])
            return out

        return _both(batched, lambda out: out.backward(shaped.view(out.shape)))
    modules = [library.TTEmbeddingBag(*_sizes(spec), **common).cuda() for spec in specs]
    offsets = batches[0][1][: trains.batch + 1].clone()

    def one_by_one(number: int) -> Tensor:
        parts = batches[number % len(batches)][0].view(tables, -1)
        return torch.cat([m(p, offsets) for m, p in zip(modules, parts, strict=True)], dim=1)

    return _both(one_by_one, lambda out: out.backward(grad))


def _sizes(spec: emblib.TTSpec) -> tuple[int, int, list[int], list[int], list[int]]:
    return spec.rows, spec.dim, list(spec.ranks), list(spec.row_factors), list(spec.dim_factors)


def _both(look_up: Callable[[int], Tensor], back: Callable[[Tensor], object]) -> dict[str, Call]:
    def forward(number: int) -> None:
        with torch.no_grad():
            look_up(number)

    return {"FBTT": lambda n: back(look_up(n)), "FBTT forward": forward}
