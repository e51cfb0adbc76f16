"""What the host needs for a forward and a step that the device does at once, and a graph's replay.

The aims: a forward of 26 tables in 60 us and a step in 250, and a step of one table in less than
`nn.EmbeddingBag` with `optim.SGD` takes. Launches and kernels per step are counted too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import emblib
from tests.bench.gpu.bench import Bench, Shape, sized
from tests.bench.gpu.peers import LR, EmbeddingBag, Emblib, Fbgemm, NotOffered
from tests.bench.gpu.watch import Call, kernels

SHAPES = (
    Shape(26, 100_000, 64, 512),
    Shape(1, 1_000_000, 64, 512),
    Shape(100, 10_000, 64, 128),
    Shape(8, 100_000, 64, 256),
)


def run(bench: Bench) -> None:
    """Measure plain tables against peers, then the other kinds of tables alone."""
    for shape, small in zip(SHAPES, sized(bench, SHAPES), strict=True):
        bench.attempt(shape.name, functools.partial(plain, bench, small, shape.name))
    shape = sized(bench, [Shape(4, 100_000, 64, 512)])[0]
    for name, make in KINDS.items():
        bench.attempt(name, functools.partial(other, bench, name, shape, make))


def plain(bench: Bench, shape: Shape, title: str) -> None:
    """Measure forward and steps of emblib, FBGEMM and `nn.EmbeddingBag`."""
    batches, grad = shape.batches(bench.device), shape.gradient(bench.device)
    calls: dict[str, Call] = {}
    points = [("emblib", Emblib, "sgd"), ("emblib", Emblib, "rowwise_adagrad")]
    points += [("fbgemm", Fbgemm, "rowwise_adagrad"), ("torch", EmbeddingBag, "sgd")]
    for contender, kind, work in points:
        try:
            tables = kind(shape, work, "fp32", bench.device)
        except NotOffered as error:
            bench.row(shape=title, contender=contender, work=work, status=str(error))
            continue
        calls[f"{contender} {work}"] = lambda n, t=tables: t.step(*batches[n % len(batches)], grad)
        if work == "rowwise_adagrad" or contender == "torch":
            calls[f"{contender} forward"] = lambda n, t=tables: t.forward(
                *batches[n % len(batches)]
            )
    emblib_step = calls["emblib rowwise_adagrad"]
    try:
        calls["emblib captured"] = bench.watch.captured(emblib_step)
    except Exception as error:
        bench.row(shape=title, contender="emblib captured", status=str(error)[:120])
    results = bench.race(calls)
    for name, times in results.items():
        profiled = {} if times.error else kernels(calls[name])
        bench.row(
            shape=title,
            contender=name,
            **times.columns(),
            kernels=sum(count for count, _ in profiled.values()) or None,
            status=times.error or "ok",
        )
        bench.figure(f"{title}: {name}, host us", times.median_us("host"))
    emblib_us, torch_us = (results[name].median_us("host") for name in ("emblib sgd", "torch sgd"))
    if emblib_us and torch_us:
        bench.figure(f"{title}: step SGD, emblib ÷ torch, host", emblib_us / torch_us)


def other(bench: Bench, name: str, shape: Shape, make: Callable[[Shape, Any], Any]) -> None:
    """Measure forward and step of one kind of tables."""
    module = make(shape, bench.device)
    batches, grad = shape.batches(bench.device), shape.gradient(bench.device)

    def forward(number: int) -> None:
        with torch.no_grad():
            module(*batches[number % len(batches)])

    def step(number: int) -> None:
        module(*batches[number % len(batches)]).backward(grad)

    calls: dict[str, Call] = {"forward": forward}
    if not isinstance(module, emblib.QuantizedEmbeddingBags):
        calls["step"] = step
    for work, times in bench.race(calls).items():
        profiled = {} if times.error else kernels(calls[work])
        bench.row(
            shape=shape.name,
            contender=f"emblib {name}",
            work=work,
            **times.columns(),
            kernels=sum(count for count, _ in profiled.values()) or None,
            status=times.error or "ok",
        )
        bench.figure(f"{name}: {work}, host us", times.median_us("host"))


def _trains(shape: Shape, device: torch.device) -> Any:
    specs = [emblib.TTSpec(shape.rows, shape.dim, (16, 16))] * shape.tables
    return emblib.TableBatchedTTEmbeddingBags(specs, emblib.optim.SGD(LR), device=device)


def _dynamic(shape: Shape, device: torch.device) -> Any:
    specs = [emblib.DynamicSpec(2 * shape.rows, shape.dim)] * shape.tables
    return emblib.DynamicEmbeddingBags(specs, emblib.optim.SGD(LR), device=device)


def _cached(shape: Shape, device: torch.device) -> Any:
    placement = emblib.Placement.MANAGED_CACHING
    specs = [emblib.TableSpec(shape.rows, shape.dim, placement=placement)] * shape.tables
    return emblib.TableBatchedEmbeddingBags(specs, emblib.optim.SGD(LR), device=device)


def _quantised(shape: Shape, device: torch.device) -> Any:
    specs = [emblib.TableSpec(shape.rows, shape.dim)] * shape.tables
    return emblib.QuantizedEmbeddingBags(specs, bits=8, device=device)


KINDS = {"trains": _trains, "dynamic": _dynamic, "cached": _cached, "quantised": _quantised}
