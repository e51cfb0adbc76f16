"""What a step of a sharded model costs with one collection, and with its tables in four.

    python -m tests.bench.sharded_models --tables 26 --batch 2048 --dim 64 --ids 1

In turn are timed, in the same processes and over gloo: a step of one kernel with the tables of one
rank; a step of `DistributedModelParallel` with all tables in one collection, and with them in four.
Printed are medians of the time that passed, of the processor time of the training thread and of
that of the whole process, and the collectives and bytes per step of each rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import emblib
from emblib import KeyedJaggedTensor, optim
from emblib.sharding import DistributedModelParallel, RankGroup, row_wise, table_wise
from tests.bench.local_ranks import run_ranks

COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "broadcast", "all_gather_single")


class Model(nn.Module):
    """Collections side by side; the output is that of all of them."""

    def __init__(self, parts: list[list[int]], rows: int, dim: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            emblib.EmbeddingBagCollection(
                [emblib.EmbeddingBagConfig(rows, dim, f"t{t}", (f"f{t}",)) for t in part],
                optimizer=optim.SGD(0.01),
            )
            for part in parts
        )

    def forward(self, batches: list[KeyedJaggedTensor]) -> Tensor:
        """Concatenate the columns of all collections."""
        outputs = [part(batch) for part, batch in zip(self.parts, batches, strict=True)]
        return torch.cat([output.values() for output in outputs], 1)


def main() -> None:
    """Print the costs by plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        *(("tables", 26), ("batch", 2048), ("dim", 64), ("ids", 1), ("rows", 100_000)),
        *(("rounds", 60), ("ranks", 2)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    run_ranks(arguments.ranks, _rank, arguments)


def _rank(rank: int, arguments: Any) -> None:
    torch.manual_seed(rank)
    counted = _counted()
    for plan in ("table_wise", "row_wise"):
        steps = _steps(RankGroup(), plan, arguments)
        found = _timed(steps, arguments.rounds)
        for name, step in steps.items():
            counted.clear()
            step()
            nbytes = sum(counted)
            if rank == 0:
                wall, own, process = (1e3 * statistics.median(found[name][i]) for i in range(3))
                low, _, high = (1e3 * q for q in statistics.quantiles(found[name][2], n=4))
                print(
                    f"{plan} {name}: {wall:.2f} ms, thread {own:.2f}, process {process:.2f} "
                    f"[{low:.2f}, {high:.2f}]; {len(counted)} collectives, {nbytes} bytes sent"
                )


def _counted() -> list[int]:
    """Return a list that gets the bytes of every collective."""
    counted: list[int] = []
    for name in COLLECTIVES:
        plain = getattr(dist, name, None)
        if plain is None:
            continue

        def call(*args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            counted.append(args[min(1, len([a for a in args if isinstance(a, Tensor)]) - 1)].nbytes)
            return _plain(*args, **kwargs)

        setattr(dist, name, call)
    return counted


def _steps(ranks: RankGroup, plan: str, arguments: Any) -> dict[str, Callable[[], None]]:
    tables, batch, dim, rows = arguments.tables, arguments.batch, arguments.dim, arguments.rows
    numbers = list(range(tables))
    steps: dict[str, Callable[[], None]] = {}
    own = [emblib.TableSpec(rows, dim) for _ in range(tables // ranks.size)]
    kernel = emblib.TableBatchedEmbeddingBags(own, optim.SGD(0.01))
    count = len(own) * batch * ranks.size
    ids = torch.randint(0, rows, (count * arguments.ids,))
    offsets = torch.arange(0, ids.numel() + 1, arguments.ids)
    rows_grad = torch.randn(batch * ranks.size, len(own) * dim)
    steps["kernel"] = lambda: kernel(ids, offsets).backward(rows_grad)
    for parts in (1, 4):
        split = [numbers[tables * i // parts : tables * (i + 1) // parts] for i in range(parts)]
        rules = {
            f"parts.{i}": {
                f"t{t}": table_wise(t * ranks.size // tables)
                if plan == "table_wise"
                else row_wise()
                for t in part
            }
            for i, part in enumerate(split)
        }
        model = DistributedModelParallel(Model(split, rows, dim), ranks, plan=rules)
        batches = [
            KeyedJaggedTensor(
                [f"f{t}" for t in part],
                torch.randint(0, rows, (len(part) * batch * arguments.ids,)),
                lengths=torch.full((len(part) * batch,), arguments.ids),
            )
            for part in split
        ]
        grad = torch.randn(batch, tables * dim)
        steps[f"{parts} collections"] = lambda m=model, b=batches, g=grad: m(b).backward(g)
    return steps


def _timed(
    steps: dict[str, Callable[[], None]], rounds: int
) -> dict[str, tuple[list[float], list[float], list[float]]]:
    clocks = (time.perf_counter, time.thread_time, time.process_time)
    found: dict[str, Any] = {name: ([], [], []) for name in steps}
    for i in range(rounds + 10):
        for name, step in steps.items():
            dist.barrier()
            began = [clock() for clock in clocks]
            step()
            if i >= 10:
                for samples, clock, start in zip(found[name], clocks, began, strict=True):
                    samples.append(clock() - start)
    return found


if __name__ == "__main__":
    main()
