"""Table-batched embeddings on the CPU against their peers, interleaved in one process.

    python -m tests.bench.cpu_peers [--threads 1 2] [--rounds 21] [--cases A B C] [--out FOLDER]

Contenders: emblib, FBGEMM's CPU TBE (`pip install fbgemm-gpu-cpu==1.8.0`), `torch.nn.EmbeddingBag`
(a loop over tables and a `cat`, sparse gradients, `torch.optim.SGD`). Every round gives all of them
new indices of the same law, in random order, after writing 64 MB to evict the caches. What is
printed are ratios within a round (peer / emblib): median and quartiles over the rounds. Memory that
torch frees stays mapped (environment below), so outputs are touched before they are measured.
Also printed: the machine's own ceiling for random reads of rows of that size, writing nothing
(gather_ceiling.cpp). With one lookup a bag (B) as many bytes are written as read, so that the share
of that ceiling cannot come near one there.
"""

import argparse
import ctypes
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emblib import Pooling, Precision, TableBatchedEmbeddingBags, TableSpec, optim
from experiments.machine import environment

# Read by malloc and OpenMP when the process starts. Threads that wait passively give the core back,
# which matters to all contenders on a machine that others use.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "OMP_WAIT_POLICY": "PASSIVE",
}
LR = 0.01


@dataclass(frozen=True)
class Case:
    """T tables of E rows and dim D; B bags of L lookups in each; ids uniform or zipf."""

    tables: int
    rows: int
    dim: int
    batch: int
    pooling: int
    zipf: float | None

    def indices(self, generator: np.random.Generator) -> Tensor:
        """One batch, int64 `[T * B * L]`; zipf ids are in order of frequency."""
        size = self.tables * self.batch * self.pooling
        if self.zipf is None:
            return torch.from_numpy(generator.integers(0, self.rows, size))
        return torch.from_numpy((generator.zipf(self.zipf, size) - 1) % self.rows)


CASES = {
    "A": Case(1, 1_000_000, 128, 2048, 20, None),
    "B": Case(26, 100_000, 64, 2048, 1, None),
    "C": Case(10, 1_000_000, 64, 512, 20, 1.15),
}


OPTIMIZERS = {
    "sgd": optim.SGD(LR),
    "rowwise_adagrad": optim.RowwiseAdagrad(LR),
    "adam": optim.Adam(LR),
}


@dataclass(frozen=True)
class Variant:
    """The dtype of weights and output, and SUM or NONE."""

    dtype: torch.dtype
    pooling: Pooling


VARIANTS = {
    "fp32": Variant(torch.float32, Pooling.SUM),
    "fp16": Variant(torch.float16, Pooling.SUM),
    "sequence": Variant(torch.float32, Pooling.NONE),
}


class Emblib:
    """Our module."""

    def __init__(self, case: Case, optimizer: str, variant: Variant) -> None:
        self.module = TableBatchedEmbeddingBags(
            [TableSpec(case.rows, case.dim)] * case.tables,
            OPTIMIZERS[optimizer],
            pooling=variant.pooling,
            precision=Precision(weights=variant.dtype, output=variant.dtype),
        )

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.module(indices, offsets)

    def step(self, indices: Tensor, offsets: Tensor, grad: Tensor) -> None:
        self.forward(indices, offsets).backward(grad)


class Fbgemm(Emblib):
    """FBGEMM's SplitTableBatchedEmbeddingBagsCodegen on the host, its default bounds check."""

    def __init__(self, case: Case, optimizer: str, variant: Variant) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        spec = (case.rows, case.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
        dtype = SparseType.FP16 if variant.dtype is torch.float16 else SparseType.FP32
        types = {
            "sgd": EmbOptimType.EXACT_SGD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [spec] * case.tables,
            optimizer=types[optimizer],
            learning_rate=LR,
            weights_precision=dtype,
            output_dtype=dtype,
            pooling_mode=PoolingMode[variant.pooling.name],
        )
        self.module.init_embedding_weights_uniform(-0.01, 0.01)


class EmbeddingBag(Emblib):
    """One `torch.nn.EmbeddingBag` (or `Embedding`) a table, sparse gradients, SGD or SparseAdam."""

    def __init__(self, case: Case, optimizer: str, variant: Variant) -> None:
        dtype, self.sequence = variant.dtype, variant.pooling is Pooling.NONE
        self.tables: list[torch.nn.Module] = [
            torch.nn.Embedding(case.rows, case.dim, sparse=True, dtype=dtype)
            if self.sequence
            else torch.nn.EmbeddingBag(
                case.rows, case.dim, mode="sum", sparse=True, include_last_offset=True, dtype=dtype
            )
            for _ in range(case.tables)
        ]
        self.offsets = torch.arange(0, case.batch * case.pooling + 1, case.pooling)
        parameters = [p for table in self.tables for p in table.parameters()]
        kind = torch.optim.SparseAdam if optimizer == "adam" else torch.optim.SGD
        self.optimizer: torch.optim.Optimizer = kind(parameters, lr=LR)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        parts = indices.view(len(self.tables), -1)
        if self.sequence:
            return torch.cat([table(ids) for table, ids in zip(self.tables, parts, strict=True)])
        bags = [table(ids, self.offsets) for table, ids in zip(self.tables, parts, strict=True)]
        return torch.cat(bags, dim=1)

    def step(self, indices: Tensor, offsets: Tensor, grad: Tensor) -> None:
        self.optimizer.zero_grad()
        self.forward(indices, offsets).backward(grad)
        self.optimizer.step()

    def touch(self) -> None:
        """Write the states of the optimizer once, which it made without touching their pages."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.mul_(1)


class Ceiling:
    """Seconds to read rows at random as fast as the machine can, by gather_ceiling.cpp."""

    def __init__(self) -> None:
        source = Path(__file__).with_name("gather_ceiling.cpp")
        library = Path(tempfile.mkdtemp()) / "ceiling.so"
        command = ["g++", "-O3", "-mavx2", "-shared", "-fPIC", "-std=c++20", "-pthread"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
        self.library = ctypes.CDLL(str(library))
        self.library.ceiling_table.restype = ctypes.c_void_p
        self.library.ceiling_table.argtypes = [ctypes.c_int64, ctypes.c_int]
        self.library.ceiling_free.argtypes = [ctypes.c_void_p]
        self.library.ceiling_seconds.restype = ctypes.c_double
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.library.ceiling_seconds.argtypes = [
            pointer,
            pointer,
            integer,
            integer,
            ctypes.c_int,
            integer,
        ]

    def table(self, nbytes: int, pages: str) -> int:
        return self.library.ceiling_table(nbytes, int(pages == "huge"))

    def free(self, table: int) -> None:
        self.library.ceiling_free(table)

    def seconds(self, table: int, rows: Tensor, row_bytes: int, distance: int) -> float:
        return self.library.ceiling_seconds(
            table, rows.data_ptr(), rows.numel(), row_bytes, torch.get_num_threads(), distance
        )


def interleave(
    jobs: dict[str, Callable[[Tensor], float]], case: Case, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each job in each round; two rounds of warm-up are not kept."""
    generator = np.random.default_rng(0)
    flush = torch.zeros(16 << 20)
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 2):
        for name in random.sample(sorted(jobs), len(jobs)):
            indices = case.indices(generator)
            flush.add_(1.0)
            seconds = jobs[name](indices)
            if turn >= 2:
                samples[name].append(seconds)
    return samples


def timed(call: Callable[[Tensor], Any]) -> Callable[[Tensor], float]:
    """`call` with its wall time; what it returns is freed outside."""

    def run(indices: Tensor) -> float:
        start = time.perf_counter()
        result = call(indices)
        seconds = time.perf_counter() - start
        del result
        return seconds

    return run


def ratio(peer: list[float], ours: list[float]) -> dict[str, float]:
    """Median and quartiles of peer / ours, round by round."""
    low, middle, high = statistics.quantiles(
        [p / o for p, o in zip(peer, ours, strict=True)], n=4, method="inclusive"
    )
    return {"median": middle, "q25": low, "q75": high}


def contenders(case: Case, variant: str) -> dict[str, Emblib]:
    """By "who optimizer"; only fp32 has a second optimizer."""
    chosen = VARIANTS[variant]
    tables: dict[str, Emblib] = {}
    for optimizer in ("sgd", "rowwise_adagrad") if variant == "fp32" else ("sgd",):
        tables[f"emblib {optimizer}"] = Emblib(case, optimizer, chosen)
        tables[f"fbgemm {optimizer}"] = Fbgemm(case, optimizer, chosen)
    tables["torch sgd"] = EmbeddingBag(case, "sgd", chosen)
    return tables


def table_jobs(case: Case, variant: str) -> dict[str, Callable[[Tensor], float]]:
    """Forward and step of every contender, by "who optimizer phase"."""
    dtype, sequence = VARIANTS[variant].dtype, VARIANTS[variant].pooling is Pooling.NONE
    bags = case.tables * case.batch
    offsets = torch.arange(0, bags * case.pooling + 1, case.pooling)
    shape = (bags * case.pooling, case.dim) if sequence else (case.batch, case.tables * case.dim)
    grad = torch.randn(shape).to(dtype)
    jobs: dict[str, Callable[[Tensor], float]] = {}
    for who, table in contenders(case, variant).items():
        if who.endswith("sgd"):
            jobs[f"{who} forward"] = timed(lambda ids, t=table: t.forward(ids, offsets))
        jobs[f"{who} step"] = timed(lambda ids, t=table: t.step(ids, offsets, grad))
    return jobs


def ceiling_jobs(
    case: Case, row_bytes: int, ceiling: Ceiling, memory: dict[str, int]
) -> dict[str, Callable[[Tensor], float]]:
    """The bare gather of the same rows, by "ceiling pages distance"."""
    base = torch.arange(case.tables).repeat_interleave(case.batch * case.pooling) * case.rows
    return {
        f"ceiling {pages} {distance}": lambda ids, t=table, d=distance: ceiling.seconds(
            t, ids + base, row_bytes, d
        )
        for pages, table in memory.items()
        for distance in (4, 8, 16, 32)
    }


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """All comparisons of one case at the current number of threads."""
    case, ceiling, rows = CASES[name], Ceiling(), []
    for variant, chosen in VARIANTS.items():
        row_bytes = case.dim * chosen.dtype.itemsize
        nbytes = case.tables * case.rows * row_bytes
        memory = {pages: ceiling.table(nbytes, pages) for pages in ("huge", "small")}
        jobs = table_jobs(case, variant) | ceiling_jobs(case, row_bytes, ceiling, memory)
        rows += summarise(name, variant, interleave(jobs, case, rounds))
        for table in memory.values():
            ceiling.free(table)
    return rows


def summarise(case: str, variant: str, samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a peer and phase, with the samples it comes from."""
    rows = []
    best = {
        pages: min(
            statistics.median(seconds)
            for job, seconds in samples.items()
            if job.startswith(f"ceiling {pages}")
        )
        for pages in ("huge", "small")
    }
    for job, peer in samples.items():
        who, *what = job.split()
        if who in ("emblib", "ceiling"):
            continue
        ours = samples[" ".join(["emblib", *what])]
        row: dict[str, Any] = {
            "case": case,
            "variant": variant,
            "threads": torch.get_num_threads(),
            "peer": who,
            "optimizer": what[0],
            "phase": what[1],
            "ratio": ratio(peer, ours),
            "emblib_s": statistics.median(ours),
            "peer_s": statistics.median(peer),
        }
        if what[1] == "forward":
            row["ceiling_huge_s"], row["ceiling_small_s"] = best["huge"], best["small"]
            row["share_of_ceiling"] = best["huge"] / statistics.median(ours)
        row["samples"] = {"emblib": ours, "peer": peer}
        rows.append(row)
    return rows


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| case | variant | threads | phase | optimizer | peer | peer / emblib [quartiles] "
        "| share of gather ceiling |",
        "| --- | --- | ---: | --- | --- | --- | ---: | ---: |",
    ]
    for row in rows:
        r = row["ratio"]
        share = f"{row['share_of_ceiling']:.0%}" if "share_of_ceiling" in row else ""
        optimizer = "" if row["phase"] == "forward" else row["optimizer"]
        lines.append(
            f"| {row['case']} | {row['variant']} | {row['threads']} | {row['phase']} | {optimizer} "
            f"| {row['peer']} | {r['median']:.2f} [{r['q25']:.2f}, {r['q75']:.2f}] | {share} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the table, and with --out keep it with the raw samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.bench.cpu_peers", *sys.argv[1:]],
            {**os.environ, **ENVIRONMENT},
        )
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for name in arguments.cases:
            rows += measure(name, arguments.rounds)
            print(f"{name} on {threads} threads: done", flush=True)
    print(table_of(rows))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        info = {
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "load": os.getloadavg(),
            "environment": environment.environment_content(
                torch.device("cpu"), sys.argv[1:], program="tests.bench.cpu_peers"
            ),
            "rounds": arguments.rounds,
            "rows": rows,
        }
        (arguments.out / "cpu_peers.json").write_text(json.dumps(info, indent=1))
        (arguments.out / "cpu_peers.md").write_text(table_of(rows))


if __name__ == "__main__":
    main()
