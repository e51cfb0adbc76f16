"""Step times of an unmodified TorchRec over FBGEMM and over emblib, interleaved, on two ranks.

    python -m tests.bench.torchrec_over [--rounds 15] [--steps 5] [--profile]

Two groups of two processes over gloo, one per library, wait for orders; they take turns, `--steps`
steps at a time, so both see the same machine. A step is forward and backward of a sharded pooled
collection of 26 tables with row-wise Adagrad, on batches drawn before. TorchRec must be installed.
`--profile` adds the operators in which rank 0 of each group spends its time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

TABLES, DIM, WORLD = 26, 64, 2
LIBRARIES = ("fbgemm", "emblib")


class Case(NamedTuple):
    """A sharding type and the shape of a batch of one rank."""

    sharding: str
    batch: int
    lookups: int  # the largest number per bag; 1 for bags of one


CASES = [
    Case(sharding, batch, lookups)
    for sharding, (batch, lookups) in itertools.product(
        ("table_wise", "row_wise"), ((2048, 1), (512, 20))
    )
]


# A rank


def _model(case: Case) -> Any:
    """Return the sharded collection."""
    import torchrec
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, device: str) -> list[str]:
            return ["table_wise", "row_wise"]

    configs = [
        torchrec.EmbeddingBagConfig(
            name=f"t{n}", embedding_dim=DIM, num_embeddings=100_000, feature_names=[f"f{n}"]
        )
        for n in range(TABLES)
    ]
    collection = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.02})
    plan = plans.construct_module_sharding_plan(
        collection,
        {
            f"t{n}": plans.row_wise()
            if case.sharding == "row_wise"
            else plans.table_wise(rank=n % WORLD, compute_kernel="fused")
            for n in range(TABLES)
        },
        sharder=Sharder(),
        local_size=WORLD,
        world_size=WORLD,
        device_type="cpu",
    )
    return DistributedModelParallel(
        torch.nn.ModuleDict({"ebc": collection}),
        env=ShardingEnv.from_process_group(torch.distributed.GroupMember.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[Sharder()],
    )


def _batches(case: Case, rank: int) -> list[Any]:
    import torchrec

    generator = torch.Generator().manual_seed(rank)
    result = []
    for _ in range(8):
        bags = TABLES * case.batch
        if case.lookups == 1:
            lengths = torch.ones(bags, dtype=torch.int64)
        else:
            lengths = torch.randint(0, case.lookups + 1, (bags,), generator=generator)
        ids = torch.randint(0, 100_000, (int(lengths.sum()),), generator=generator)
        keys = [f"f{n}" for n in range(TABLES)]
        result.append(torchrec.KeyedJaggedTensor(keys=keys, lengths=lengths, values=ids))
    return result


def _serve(library: str, rank: int, path: str) -> None:
    """Obey the orders of the parent: a case to make, a number of steps to time, or a profile."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    torch.set_num_threads(1)
    if library == "emblib":
        from emblib.compat import fbgemm

        fbgemm.install()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD
    )
    model: Any = None
    batches: Any = None
    for order in sys.stdin:
        verb, _, argument = order.strip().partition(" ")
        if verb == "case":
            case = CASES[int(argument)]
            model, batches = _model(case), itertools.cycle(_batches(case, rank))
            answer: Any = "ready"
        elif verb == "steps":
            torch.distributed.barrier()
            begin = time.perf_counter()
            for _ in range(int(argument)):
                _step(model, next(batches))
            torch.distributed.barrier()
            answer = (time.perf_counter() - begin) / int(argument)
        else:
            answer = _profile(model, batches, int(argument))
        print(json.dumps(answer), file=out, flush=True)
    torch.distributed.destroy_process_group()


def _step(model: Any, batch: Any) -> None:
    found = model.module["ebc"](batch)
    if hasattr(found, "wait"):
        found = found.wait()
    found.values().sum().backward()


def _profile(model: Any, batches: Any, steps: int) -> list[tuple[str, float, int]]:
    """Return name, share of the time of steps, and calls per step of the longest operators."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with (
        torch.profiler.profile(activities=[cpu]) as profile,
        torch.profiler.record_function("steps"),
    ):
        for _ in range(steps):
            _step(model, next(batches))
    events = profile.key_averages()
    whole = next(event.cpu_time_total for event in events if event.key == "steps")
    rows = [
        (event.key, event.cpu_time_total / whole, event.count // steps)
        for event in events
        if event.key != "steps" and event.cpu_time_total > 0.002 * whole
    ]
    return sorted(rows, key=lambda row: -row[1])


# The parent


class Ranks:
    """The processes of one library."""

    def __init__(self, library: str, folder: str) -> None:
        self._processes = [_started(library, rank, folder) for rank in range(WORLD)]

    def order(self, text: str) -> list[Any]:
        """Send an order to all ranks, and return their answers."""
        for process in self._processes:
            _pipe(process.stdin).write(f"{text}\n")
            _pipe(process.stdin).flush()
        answers = [_pipe(process.stdout).readline().strip() for process in self._processes]
        if not all(answers):
            raise RuntimeError(f"a rank ended at order {text!r}")
        return [json.loads(answer) for answer in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            _pipe(process.stdin).close()
        for process in self._processes:
            process.wait(timeout=60)


def _started(library: str, rank: int, folder: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.torchrec_over", "--serve"]
    with Path(folder, f"{library}{rank}.log").open("w") as log:
        return subprocess.Popen(
            [*command, library, str(rank), f"{folder}/{library}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def main() -> None:
    """Measure every case and print a line each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve[0], int(options.serve[1]), options.serve[2])
        return
    with tempfile.TemporaryDirectory() as folder:
        groups = {library: Ranks(library, folder) for library in LIBRARIES}
        try:
            _measure(groups, options)
        except RuntimeError:
            for log in sorted(Path(folder).glob("*.log")):
                print(log.name, log.read_text()[-2000:], file=sys.stderr)
            raise
        for group in groups.values():
            group.close()


def _measure(groups: dict[str, Ranks], options: argparse.Namespace) -> None:
    for number, case in enumerate(CASES):
        for group in groups.values():
            group.order(f"case {number}")
            group.order("steps 3")
        ratios, times = [], {library: [] for library in LIBRARIES}
        for turn in range(options.rounds):
            order = LIBRARIES if turn % 2 else LIBRARIES[::-1]
            taken = {name: max(groups[name].order(f"steps {options.steps}")) for name in order}
            ratios.append(taken["fbgemm"] / taken["emblib"])
            for name, value in taken.items():
                times[name].append(value * 1e3)
        low, _, high = statistics.quantiles(ratios, n=4)
        ms = ", ".join(f"{name} {statistics.median(times[name]):.1f} ms" for name in LIBRARIES)
        print(
            f"{case.sharding} B {case.batch} L {case.lookups}: FBGEMM's time ÷ emblib's "
            f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}] ({ms})",
            flush=True,
        )
        if options.profile:
            for name, group in groups.items():
                for row in group.order("profile 5")[0][:28]:
                    print(f"    {name:7s} {row[1]:6.1%} {row[2]:5d}  {row[0]}")


if __name__ == "__main__":
    main()
