"""Lookups and steps on the CPU over a matrix of shapes, against FBGEMM and `nn.EmbeddingBag`.

    python -m tests.bench.cpu_matrix [--threads 1 2] [--pages small huge] [--out FOLDER]
                                     [--seconds 0.2] [--processes 3] [--points WORD ...] [--curated]

Every shape and dtype is measured forward and as a training step (forward, backward and update) of
three optimizers. The contenders of a point run in one process, in random order within a round, on
the same indices of uniform law. A sample is the mean of as many calls as fill 1 ms. Ratios (peer /
emblib) are taken within a round. Weights and states are written once before, so that no page is
touched for the first time while the clock runs. How fast memory is depends on the pages that a
process gets, so every point is measured in several processes: shown are the median of their medians
over the rounds, and in brackets the lowest and the highest.

Each number of threads and each page size has its processes: pages are `small` (4 KiB) or `huge`,
which malloc asks for by GLIBC_TUNABLES, for all contenders alike. (emblib asks for huge pages
itself for its tables, and for outputs of 32 MB and more, in both.) fp16 is measured with small
pages. FBGEMM has no Adam on the CPU and torch no row-wise Adagrad. `--curated` leaves out batches
of 32, and fp16 but for 64 columns: a third of the time. Writes cpu_matrix.json, with the commit and
the machine, and cpu_matrix.md to --out.
"""

import argparse
import gc
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emblib import Pooling
from experiments.machine import environment
from tests.bench.cpu_peers import ENVIRONMENT, Case, EmbeddingBag, Emblib, Fbgemm, Variant

BATCHES, LENGTHS, TABLES, DIMS = (1, 32, 512, 4096), (1, 20), (1, 26), (16, 64, 128)
ROWS = {1: 1_000_000, 26: 50_000}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
PASSES = ("forward", "sgd", "rowwise_adagrad", "adam")
CONTENDERS: dict[str, type[Emblib]] = {
    "emblib": Emblib,
    "fbgemm": Fbgemm,
    "torch": EmbeddingBag,
}
WITHOUT_PEER = {("torch", "rowwise_adagrad"), ("fbgemm", "adam")}
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
SAMPLE_SECONDS = 1e-3
MOST_LOOKUPS = 26 * 4096  # of a point: batches of more take seconds and tell nothing new
CURATED_FP16_DIM, CURATED_WITHOUT_BATCH = 64, 32
LEAST_ROUNDS, MOST_ROUNDS = 3, 11
Row = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Points that are measured on the same tables."""

    tables: int
    dim: int
    dtype: str
    work: str

    def cases(self) -> list[Case]:
        """Return the shapes of the batches."""
        return [
            Case(self.tables, ROWS[self.tables], self.dim, batch, length, None)
            for length, batch in itertools.product(LENGTHS, BATCHES)
            if self.tables * length * batch <= MOST_LOOKUPS
        ]

    def contenders(self) -> dict[str, Emblib]:
        """Make the tables of every contender, in random order of allocation."""
        torch.manual_seed(0)
        optimizer = "sgd" if self.work == "forward" else self.work
        variant = Variant(DTYPES[self.dtype], Pooling.SUM)
        return {
            who: CONTENDERS[who](self.cases()[0], optimizer, variant)
            for who in random.sample(sorted(CONTENDERS), len(CONTENDERS))
            if (who, self.work) not in WITHOUT_PEER
        }


def name_of(case: Case) -> str:
    """The name of a shape, e.g. `T26 L1 D16 B4096`."""
    return f"T{case.tables} L{case.pooling} D{case.dim} B{case.batch}"


def drawn(case: Case, generator: torch.Generator) -> Tensor:
    """Uniform indices of one batch."""
    size = (case.tables * case.batch * case.pooling,)
    return torch.randint(case.rows, size, generator=generator)


def repeated(call: Callable[[Tensor], Any], batches: list[Tensor]) -> Callable[[int], float]:
    """Seconds per call, over as many calls as fill a sample; the argument is the round."""
    begin = time.perf_counter()
    call(batches[0])
    call(batches[1])
    count = int(min(64, max(1, SAMPLE_SECONDS * 2 / (time.perf_counter() - begin))))

    def sample(turn: int) -> float:
        chosen = [batches[(turn + i) % len(batches)] for i in range(count)]
        start = time.perf_counter()
        for batch in chosen:
            call(batch)
        return (time.perf_counter() - start) / count

    return sample


def jobs(case: Case, group: Group, tables: dict[str, Emblib]) -> dict[str, Callable[[int], float]]:
    """The samples of each contender."""
    generator = torch.Generator().manual_seed(1)
    batches = [drawn(case, generator) for _ in range(64 if case.batch < 512 else 8)]
    bags = case.tables * case.batch
    offsets = torch.arange(0, bags * case.pooling + 1, case.pooling)
    grad = torch.randn(case.batch, case.tables * case.dim).to(DTYPES[group.dtype])
    found = {}
    for who, table in tables.items():
        if isinstance(table, EmbeddingBag):
            table.offsets = offsets[: case.batch + 1].clone()
        if group.work == "forward":
            found[who] = repeated(partial(table.forward, offsets=offsets), batches)
        else:
            found[who] = repeated(partial(table.step, offsets=offsets, grad=grad), batches)
            if isinstance(table, EmbeddingBag):
                table.touch()
    return found


def race(calls: dict[str, Callable[[int], float]], seconds: float) -> dict[str, list[float]]:
    """Samples by contender and round; the first round is not kept."""
    samples: dict[str, list[float]] = {who: [] for who in calls}
    begin = time.perf_counter()
    for turn in range(MOST_ROUNDS + 1):
        if turn > LEAST_ROUNDS and time.perf_counter() - begin > seconds:
            break
        for who in random.sample(sorted(calls), len(calls)):
            samples[who].append(calls[who](turn))
    return {who: values[1:] for who, values in samples.items()}


def rows_of(
    case: Case, group: Group, tables: dict[str, Emblib], pages: str, seconds: float
) -> list[Row]:
    """The comparisons of one point: a row per peer."""
    gc.collect()
    samples = race(jobs(case, group, tables), seconds)
    ours = samples.pop("emblib")
    return [
        {
            "shape": name_of(case),
            "dtype": group.dtype,
            "pass": group.work,
            "pages": pages,
            "threads": torch.get_num_threads(),
            "peer": peer,
            "ratio": statistics.median(t / o for t, o in zip(theirs, ours, strict=True)),
            "emblib_s": statistics.median(ours),
        }
        for peer, theirs in samples.items()
    ]


def points(pages: str, *, curated: bool) -> dict[Group, list[Case]]:
    """The shapes of each group at one page size."""
    dtypes = DTYPES if pages == "small" else ("fp32",)
    groups = [Group(*four) for four in itertools.product(TABLES, DIMS, dtypes, PASSES)]
    if not curated:
        return {group: group.cases() for group in groups}
    return {
        group: [case for case in group.cases() if case.batch != CURATED_WITHOUT_BATCH]
        for group in groups
        if group.dtype == "fp32" or group.dim == CURATED_FP16_DIM
    }


def measure(pages: str, arguments: argparse.Namespace) -> list[Row]:
    """All points at one page size and number of threads."""
    groups = points(pages, curated=arguments.curated)
    rows: list[Row] = []
    start = time.monotonic()
    for done, (group, shapes) in enumerate(groups.items()):
        cases = [case for case in shapes if _is_chosen(case, group, arguments.points)]
        tables = group.contenders() if cases else {}
        for case in cases:
            found = rows_of(case, group, tables, pages, arguments.seconds)
            rows += found
            left = (time.monotonic() - start) / (done + 0.5) * (len(groups) - done)
            ratios = " ".join(f"{row['peer']} {row['ratio']:.2f}x" for row in found)
            print(
                f"[{done + 1}/{len(groups)}, ~{left:.0f} s left] {pages} "
                f"{torch.get_num_threads()} {name_of(case)} {group.dtype} {group.work}: "
                f"{1e6 * found[0]['emblib_s']:.0f} us, {ratios}",
                file=sys.stderr,
                flush=True,
            )
    return rows


def _is_chosen(case: Case, group: Group, words: list[str]) -> bool:
    return set(words) <= {*name_of(case).split(), group.dtype, group.work}


def table_of(rows: list[Row]) -> str:
    """The rows as Markdown, a line per shape and dtype."""
    points: dict[tuple[str, ...], dict[tuple[str, ...], Row]] = {}
    for row in rows:
        where = (row["threads"], row["pages"], row["dtype"], row["shape"])
        points.setdefault(where, {})[row["pass"], row["peer"]] = row
    columns = [
        (work, peer)
        for work in PASSES
        for peer in ("fbgemm", "torch")
        if (peer, work) not in WITHOUT_PEER
    ]
    heads = [f"{work} {peer}" for work, peer in columns]
    lines = [
        "Time of the peer / time of emblib: median [lowest, highest] over the processes.",
        "",
        f"| threads | pages | dtype | shape | {' | '.join(heads)} |",
        f"| ---: | --- | --- | --- |{' ---: |' * len(heads)}",
    ]
    for row_key, found in points.items():
        cells = [_cell(found.get(column)) for column in columns]
        lines.append(f"| {' | '.join(map(str, row_key))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    ratios = row["ratios"]
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def as_json(info: Row, rows: list[Row]) -> str:
    """The result file: a line per row, three digits per figure."""
    lines = [json.dumps(row, default=str) for row in map(_rounded, rows)]
    return json.dumps(info)[:-1] + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n"


def _rounded(row: Row) -> Row:
    figures = {key: [float(f"{x:.3g}") for x in row[key]] for key in ("ratios", "emblib_s")}
    return {**row, **figures}


def in_processes(arguments: argparse.Namespace) -> list[Row]:
    """Run each number of threads and page size in processes with its environment."""
    points: dict[tuple[Any, ...], Row] = {}
    kinds = itertools.product(arguments.threads, arguments.pages)
    for _, (threads, pages) in itertools.product(range(arguments.processes), list(kinds)):
        environment = {**os.environ, **ENVIRONMENT, **(HUGE if pages == "huge" else {})}
        environment |= {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "tests.bench.cpu_matrix", "--only", str(threads), pages]
        command += ["--seconds", str(arguments.seconds), "--points", *arguments.points]
        command += ["--curated"] * arguments.curated
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        for row in json.loads(done.stdout):
            ratio, seconds = row.pop("ratio"), row.pop("emblib_s")
            point = points.setdefault(tuple(row.values()), {**row, "ratios": [], "emblib_s": []})
            point["ratios"].append(ratio)
            point["emblib_s"].append(seconds)
    return list(points.values())


def main() -> None:
    """Measure, print the table, and with --out keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pages", nargs="+", choices=("small", "huge"), default=["small", "huge"])
    parser.add_argument("--seconds", type=float, default=0.2, help="per point")
    parser.add_argument("--processes", type=int, default=3, help="per point")
    parser.add_argument("--points", nargs="*", default=[], help="words of the points to measure")
    parser.add_argument("--curated", action="store_true", help="fewer shapes, for the front page")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.only:
        threads, pages = arguments.only
        torch.set_num_threads(int(threads))
        json.dump(measure(pages, arguments), sys.stdout)
        return
    rows = in_processes(arguments)
    print(table_of(rows))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        info = {
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "load": os.getloadavg(),
            "environment": environment.environment_content(
                torch.device("cpu"), sys.argv[1:], program="tests.bench.cpu_matrix"
            ),
        }
        (arguments.out / "cpu_matrix.json").write_text(as_json(info, rows))
        (arguments.out / "cpu_matrix.md").write_text(table_of(rows))


if __name__ == "__main__":
    main()
