"""Bandwidth of each table-batched op against the device's own copy bandwidth.

    python tests/bench/op_bandwidth.py [--device cuda] [--scale 1.0]

Bytes are those an op cannot avoid: every looked-up row and output once for the lookup, every
gradient row once and every unique row (and its state) read and written once for the update, keys
and results once for the grouping. Rows that many bags share may come from the cache, so a share
above 1 is possible on skewed ids. Times are medians of single calls, the ops of a round one after
the other.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import emblib
from emblib.ops.codes import OPTIMIZER, POOLING

ops = torch.ops.emblib


class Shape(NamedTuple):
    """T tables of E rows and D columns, batch B, L lookups a bag, zipf exponent (0: uniform)."""

    tables: int
    rows: int
    dim: int
    batch: int
    lookups: int
    zipf: float = 0.0


SHAPES = {
    "wide": Shape(1, 1_000_000, 128, 2048, 20),
    "clicks": Shape(26, 100_000, 64, 2048, 1),
    "clicks_large": Shape(26, 1_000_000, 64, 65536, 1),
    "zipf": Shape(10, 1_000_000, 64, 512, 20, 1.15),
    "fbgemm": Shape(32, 100_000, 128, 512, 20),
    "long": Shape(4, 1_000_000, 128, 64, 2000),
    "narrow": Shape(26, 1_000_000, 16, 16384, 4),
}


def draw_ids(shape: Shape, device: torch.device) -> Tensor:
    """Feature-major ids, `[T * B * L]`."""
    count = shape.tables * shape.batch * shape.lookups
    if shape.zipf == 0:
        return torch.randint(0, shape.rows, (count,), device=device)
    mass = torch.arange(1, shape.rows + 1, device=device, dtype=torch.float64) ** -shape.zipf
    ranks = torch.searchsorted(
        mass.cumsum(0) / mass.sum(), torch.rand(count, device=device, dtype=torch.float64)
    )
    return torch.randperm(shape.rows, device=device)[ranks.clamp(max=shape.rows - 1)]


def time_calls(
    calls: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each call; on a GPU by events around it."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            if device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                end.synchronize()
                samples[name].append(begin.elapsed_time(end) / 1e3)
            else:
                begin_s = time.perf_counter()
                call()
                samples[name].append(time.perf_counter() - begin_s)
    return {name: statistics.median(values[2:]) for name, values in samples.items()}


def measure(shape: Shape, device: torch.device, rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds and bytes of each op, copying included."""
    module = emblib.TableBatchedEmbeddingBags(
        [emblib.TableSpec(shape.rows, shape.dim)] * shape.tables, device=device
    )
    weights, features = module.weights.detach().flatten(), module.features
    ids, bags = draw_ids(shape, device), shape.tables * shape.batch
    offsets = torch.arange(bags + 1, device=device) * shape.lookups
    columns, total = shape.tables * shape.dim, shape.tables * shape.rows
    grad = torch.randn(shape.batch, columns, device=device)
    groups = ops.tbe_group(features, ids, offsets, None, total)
    unique, row = int(groups[4]), shape.dim * 4
    rowwise = [torch.zeros(total, device=device)]
    sgd, adagrad = (
        torch.tensor(values, dtype=torch.float64, device=device)
        for values in ([0.01, 1.0, 0.0, 0.0, -1.0], [0.01, 1.0, 0.0, 0.0, -1.0, 1e-8])
    )
    source = torch.empty(256 << 20 if device.type == "cuda" else 16 << 20, device=device)
    target = torch.empty_like(source)
    rest = (grad, features, *groups, offsets, None, None, None, POOLING["sum"])
    lookup = (
        [weights],
        features,
        ids,
        offsets,
        None,
        None,
        None,
        POOLING["sum"],
        columns,
        torch.float32,
    )
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "lookup": lambda: ops.tbe_lookup(*lookup),
        "group": lambda: ops.tbe_group(features, ids, offsets, None, total),
        "update sgd": lambda: ops.tbe_update_([weights], [], sgd, OPTIMIZER["sgd"], *rest),
        "update rowwise": lambda: ops.tbe_update_(
            [weights], rowwise, adagrad, OPTIMIZER["rowwise_adagrad"], *rest
        ),
    }
    count = ids.numel()
    touched = count * row + 2 * unique * row + 4 * count
    size = {
        "copy": 2 * source.numel() * 4,
        "lookup": count * (row + 8) + grad.numel() * 4,
        "group": count * (8 + 8 + 4 + 4 + 4),
        "update sgd": touched,
        "update rowwise": touched + 8 * unique,
    }
    seconds = time_calls(calls, rounds, device)
    return {name: (seconds[name], size[name]) for name in calls}


def main() -> None:
    """Print one table a shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="of rows and batch")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, emblib {emblib.__version__}")
    for label, shape in SHAPES.items():
        scaled = shape._replace(
            rows=max(1, int(shape.rows * arguments.scale)),
            batch=max(1, int(shape.batch * arguments.scale)),
        )
        results = measure(scaled, device, arguments.rounds)
        seconds, size = results["copy"]
        ceiling = size / seconds
        print(f"\n{label} {tuple(scaled)}: copy {ceiling / 1e9:.0f} GB/s")
        for op, (seconds, size) in results.items():
            share = size / seconds / ceiling
            print(
                f"  {op:15} {seconds * 1e6:10.1f} us {size / seconds / 1e9:8.1f} GB/s {share:6.2f}"
            )


if __name__ == "__main__":
    main()
