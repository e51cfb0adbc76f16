"""Step time (forward, backward, SGD) of tensor-train tables at TT-Rec's README configuration.

    python tests/bench/tt_step.py [--rounds 9] [--threads 1] [--clock wall]

11,000,000 rows of 64, cores 200 x 220 x 250 with ranks 32 and 32, 512 bags of 20 ids, uniform
and zipf 1.2 (randomly permuted ids). Contenders run interleaved in one process, in random order
each round: emblib, the chain of `torch.bmm` that defines the table, and TensorLy-Torch's block-TT.
Prints medians with quartiles, the ratio to emblib within each round, and the scratch memory of one
emblib step, measured as growth of resident memory in a process that has made none before. On a
machine that is not idle, `--clock cpu` counts the processor time of one thread instead.
"""

import argparse
import random
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor

import emblib

ROWS, DIM, RANKS = 11_000_000, 64, (32, 32)
P, Q = (200, 220, 250), (4, 4, 4)
BATCH, POOLING_FACTOR = 512, 20
LEARNING_RATE = 1e-3

Step = Callable[[Tensor], None]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def ids_of(law: str) -> Tensor:
    """One batch of ids, uniform or zipf 1.2 over randomly permuted ids."""
    generator = torch.Generator().manual_seed(0)
    count = BATCH * POOLING_FACTOR
    if law == "uniform":
        return torch.randint(0, ROWS, (count,), generator=generator)
    weights = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -1.2
    cumulative = weights.cumsum(0)
    draws = torch.rand(count, dtype=torch.float64, generator=generator) * cumulative[-1]
    ranks = torch.searchsorted(cumulative, draws).clamp(max=ROWS - 1)
    return torch.randperm(ROWS, generator=generator)[ranks]


def emblib_step() -> Step:
    """TTEmbeddingBag with fused SGD."""
    spec = emblib.TTSpec(ROWS, DIM, RANKS, P, Q)
    table = emblib.TTEmbeddingBag(spec, emblib.optim.SGD(LEARNING_RATE))
    offsets = torch.arange(0, BATCH * POOLING_FACTOR + 1, POOLING_FACTOR)
    ones = torch.ones(BATCH, DIM)
    return lambda ids: table(ids, offsets).backward(ones)


def bmm_step() -> Step:
    """Gather core rows, two batched products, sum, autograd, torch.optim.SGD."""
    full = (1, *RANKS, 1)
    cores = [
        (torch.randn(p, full[k] * q * full[k + 1]) * 0.1).requires_grad_()
        for k, (p, q) in enumerate(zip(P, Q, strict=True))
    ]
    optimizer = torch.optim.SGD(cores, LEARNING_RATE)
    ones = torch.ones(BATCH, DIM)

    def step(ids: Tensor) -> None:
        high, last = ids // P[2], ids % P[2]
        first, middle = high // P[1], high % P[1]
        a = functional.embedding(first, cores[0]).view(-1, Q[0], RANKS[0])
        b = functional.embedding(middle, cores[1]).view(-1, RANKS[0], Q[1] * RANKS[1])
        c = functional.embedding(last, cores[2]).view(-1, RANKS[1], Q[2])
        rows = torch.bmm(torch.bmm(a, b).view(-1, Q[0] * Q[1], RANKS[1]), c)
        optimizer.zero_grad()
        rows.view(BATCH, POOLING_FACTOR, DIM).sum(1).backward(ones)
        optimizer.step()

    return step


def tensorly_step() -> Step | None:
    """TensorLy-Torch's FactorizedEmbedding (block-TT), or None where it is not installed."""
    try:
        import tltorch
    except ImportError:
        return None
    table = tltorch.FactorizedEmbedding(
        ROWS,
        DIM,
        auto_tensorize=False,
        tensorized_num_embeddings=P,
        tensorized_embedding_dim=Q,
        factorization="blocktt",
        rank=(1, *RANKS, 1),
    )
    optimizer = torch.optim.SGD(table.parameters(), LEARNING_RATE)
    ones = torch.ones(BATCH, DIM)

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        table(ids).view(BATCH, POOLING_FACTOR, DIM).sum(1).backward(ones)
        optimizer.step()

    return step


def measure(
    steps: dict[str, Step], ids: Tensor, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each contender in each round, contenders interleaved in random order."""
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step(ids)
    for _ in range(rounds):
        names = list(steps)
        order.shuffle(names)
        for name in names:
            # The first call after another contender finds its caches; the second one is timed.
            steps[name](ids)
            start = clock()
            steps[name](ids)
            times[name].append(clock() - start)
    return times


def report(law: str, times: dict[str, list[float]]) -> None:
    """Median and quartiles of the times, and of the ratios to emblib round by round."""
    for name, seconds in times.items():
        low, middle, high = statistics.quantiles([1e3 * s for s in seconds], n=4)
        ratios = [s / own for s, own in zip(seconds, times["emblib"], strict=True)]
        low_ratio, ratio, high_ratio = statistics.quantiles(ratios, n=4)
        per_lookup = middle * 1e3 / (BATCH * POOLING_FACTOR)
        print(
            f"{law:8} {name:8} {middle:8.2f} ms [{low:.2f}, {high:.2f}]  "
            f"{per_lookup:6.2f} us/lookup  {ratio:6.1f}x [{low_ratio:.1f}, {high_ratio:.1f}]"
        )


def scratch_bytes() -> int:
    """Growth of this process's peak resident memory over one step; its first real one."""
    step = emblib_step()
    ids = ids_of("uniform")
    step(torch.full_like(ids, -1))  # loads code and starts threads, but makes no row
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    step(ids)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--scratch", action="store_true", help="only print scratch bytes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    if arguments.scratch:
        print(scratch_bytes())
        return
    steps = {"emblib": emblib_step(), "bmm": bmm_step()}
    tensorly = tensorly_step()
    if tensorly is not None:
        steps["tensorly"] = tensorly
    for law in ("uniform", "zipf"):
        clock = CLOCKS[arguments.clock]
        report(law, measure(steps, ids_of(law), arguments.rounds, clock))
    command = [sys.executable, __file__, "--scratch", "--threads", str(arguments.threads)]
    scratch = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"scratch of one uniform step: {scratch / 1e6:.1f} MB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak resident memory of all contenders: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
