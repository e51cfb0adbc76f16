"""Step time of every optimizer and option on the CPU, against FBGEMM and `nn.EmbeddingBag`.

    python -m tests.bench.optimizer_steps [--threads 1 2] [--cases A B C] [--options WORD ...]
                                          [--seconds 1.2] [--out FOLDER]

A step is forward, backward and update. Each option is a race in one process: our module with the
option, our module with plain SGD, and every peer that has the option. Each round gives all of them
the same new indices, in random order, after writing 64 MB to evict the caches. Ratios are taken
within a round; shown are their median over the rounds and its 95 % order-statistic interval.
Weights and states are written once before, so that no page is touched for the first time while the
clock runs. Writes optimizer_steps.csv, .json (raw samples), .md and .png to --out.
"""

import argparse
import csv
import dataclasses
import gc
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.machine import environment, memory
from experiments.timing import statistics
from tests.bench.cpu_peers import CASES, ENVIRONMENT
from tests.bench.optimizer_options import (
    OPTIONS,
    PEERS,
    Buffers,
    EmbeddingBag,
    Emblib,
    Work,
    peers_of,
)
from tests.bench.optimizer_report import FIELDS, figure, markdown

LEAST_ROUNDS, MOST_ROUNDS = 6, 25
BATCHES = 12
Row = dict[str, Any]


@dataclasses.dataclass
class Race:
    """Contenders of one option on one case, and the budget of one number of threads.

    Six rounds at least, for an interval; three where a step takes seconds.
    """

    contenders: dict[str, Emblib]
    indices: list[Tensor]
    seconds: float

    def run(self) -> dict[str, list[float]]:
        """Seconds by contender, round by round; two rounds of warm-up are not kept."""
        flush, rng = torch.zeros(16 << 20), random.Random(torch.get_num_threads())
        samples: dict[str, list[float]] = {name: [] for name in self.contenders}
        gc.collect()
        gc.disable()
        for turn in self._turns():
            for name in rng.sample(sorted(self.contenders), len(self.contenders)):
                flush.add_(1.0)
                start = time.perf_counter()
                self.contenders[name].step(self.indices[turn % len(self.indices)])
                samples[name].append(time.perf_counter() - start)
        gc.enable()
        return {name: seconds[2:] for name, seconds in samples.items()}

    def _turns(self) -> Iterator[int]:
        start = time.perf_counter()
        for turn in range(MOST_ROUNDS + 2):
            spent = time.perf_counter() - start
            enough = turn >= LEAST_ROUNDS + 2 or (spent > 4 * self.seconds and turn >= 3 + 2)
            if spent > self.seconds and enough:
                return
            yield turn


def paired_ratio(arm: Mapping[int, float], baseline: Mapping[int, float]) -> statistics.Summary:
    """Return arm / baseline: exp of the median of per-round log ratios, with its interval.

    Only rounds in which both ran count, so that what slows the machine for a moment slows both
    sides of a pair and cancels.
    """
    logs = [math.log(arm[r] / baseline[r]) for r in sorted(arm.keys() & baseline.keys())]
    s = statistics.summarise(logs)
    return statistics.Summary(
        s.n, math.exp(s.median), math.exp(s.q25), math.exp(s.q75), math.exp(s.lo), math.exp(s.hi)
    )


def contenders(
    work: Work, sgd: Emblib, buffers: Buffers
) -> tuple[dict[str, Emblib], dict[str, str]]:
    """Who takes part, in random order of allocation, and who cannot and why."""
    option = work.option
    buffers.keep(work)
    names = random.sample(["emblib", *peers_of(option)], 1 + len(peers_of(option)))
    found, missing = {"SGD": sgd}, {}
    for name in names:
        if name == "emblib" and option.name == "SGD":
            found[name] = sgd
            continue
        # Weights and two states at most; a dense gradient is as large as the weights.
        wanted, free = 3 * work.nbytes, memory.available_bytes(torch.device("cpu"))
        if wanted > free:
            missing[name] = f"needs up to {wanted / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
            continue
        try:
            found[name] = (Emblib if name == "emblib" else PEERS[name])(work, buffers)
        except Exception as error:  # a contender that cannot is a row that says so
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, missing


def measure(work: Work, sgd: Emblib, buffers: Buffers, arguments: argparse.Namespace) -> list[Row]:
    """All rows of one option on one case."""
    generator = np.random.default_rng(0)
    indices = [work.case.indices(generator) for _ in range(BATCHES)]
    found, missing = contenders(work, sgd, buffers)
    for who, contender in list(found.items()):
        try:
            contender.step(indices[0])
            if isinstance(contender, EmbeddingBag):
                contender.touch()
        except Exception as error:
            missing[who] = f"{type(error).__name__}: {error}".splitlines()[0]
            del found[who]
    rows: list[Row] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        distinct = {k: v for k, v in found.items() if k != "SGD" or found.get("emblib") is not v}
        samples = Race(distinct, indices, arguments.seconds).run()
        samples.setdefault("SGD", samples.get("emblib", []))
        where = {"case": work.case_name, "threads": threads, "option": work.option.name}
        everyone = ("emblib", *peers_of(work.option))
        rows += [{**where, **summary(who, samples)} for who in everyone if who in samples]
        rows += [{**where, "contender": w, "status": why} for w, why in missing.items()]
    return rows


def summary(who: str, samples: dict[str, list[float]]) -> Row:
    """Times of a contender, and its ratio: ours to our SGD, a peer's to ours."""
    taken = statistics.summarise(samples[who])
    base = "SGD" if who == "emblib" else "emblib"
    row: Row = {
        "contender": who,
        "status": "ok",
        "rounds": taken.n,
        "median_s": taken.median,
        "q25_s": taken.q25,
        "q75_s": taken.q75,
        "ratio_to": base,
        "samples": samples[who],
    }
    if who == "emblib":  # what the peers' ratios are to is kept with our own row
        row["base_samples"] = samples.get(base, [])
    if samples.get(base):
        ratio = paired_ratio(*(dict(enumerate(samples[k])) for k in (who, base)))
        row |= {
            "ratio": ratio.median,
            "ratio_q25": ratio.q25,
            "ratio_q75": ratio.q75,
            "ratio_lo": ratio.lo,
            "ratio_hi": ratio.hi,
        }
    return row


def line(rows: list[Row]) -> str:
    """The line that is printed for one option."""
    parts = []
    for row in rows:
        if row["status"] != "ok":
            parts.append(f"{row['contender']}: {row['status']}")
        elif row["contender"] == "emblib":
            parts.append(
                f"[{row['threads']}] {1e3 * row['median_s']:.2f} ms, {row['ratio']:.2f} SGD"
            )
        else:
            parts.append(f"{row['contender']} {row['ratio']:.2f}x")
    return " · ".join(parts)


def run(arguments: argparse.Namespace) -> list[Row]:
    """Every case and option, with a line each and an estimate of what is left."""
    words = [w.lower() for w in arguments.options]
    options = [o for o in OPTIONS.values() if not words or any(w in o.name.lower() for w in words)]
    total, done, start = len(options) * len(arguments.cases), 0, time.monotonic()
    rows: list[Row] = []
    for name in arguments.cases:
        sgd, buffers = Emblib(Work(name, OPTIONS["SGD"]), Buffers()), Buffers()
        for option in options:
            found = measure(Work(name, option), sgd, buffers, arguments)
            rows += found
            gc.collect()
            done += 1
            left = (time.monotonic() - start) / done * (total - done)
            print(
                f"[{done}/{total}, ~{left:.0f} s left] {name} {option.name}: {line(found)}",
                flush=True,
            )
        del sgd, buffers
    return rows


def write(rows: list[Row], folder: Path) -> None:
    """The table, the raw samples, the report."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "optimizer_steps.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    info = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "load": os.getloadavg(),
        "environment": environment.environment_content(
            torch.device("cpu"), sys.argv[1:], program="tests.bench.optimizer_steps"
        ),
        "rows": rows,
    }
    (folder / "optimizer_steps.json").write_text(json.dumps(info) + "\n")
    (folder / "optimizer_steps.md").write_text(markdown(rows))
    figure(rows, folder / "optimizer_steps")


def main() -> None:
    """Measure, print the table, and with --out keep everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--options", nargs="+", default=[], help="words of the options' names")
    parser.add_argument("--seconds", type=float, default=1.2, help="a race of one option")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.bench.optimizer_steps", *sys.argv[1:]],
            {**os.environ, **ENVIRONMENT},
        )
    rows = run(arguments)
    print(markdown(rows))
    if arguments.out:
        write(rows, arguments.out)


if __name__ == "__main__":
    main()
