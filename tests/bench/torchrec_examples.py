"""TorchRec's own training examples over FBGEMM and over emblib: loss curves and times of steps.

    python -m tests.bench.torchrec_examples SOURCES [--ranks 1 2] [--steps 40] [--rounds 3]

SOURCES is a checkout of TorchRec at the tag of the release to run, with its `examples`; what it
imports must be installed. Every example runs unmodified, but for the devices of the quickstart, in
processes of its own, started by torchrun over gloo; the libraries take turns. Tables of sharded
models have the same first values over both, and batches are drawn alike. A step's loss is the
tensor of its `backward()`, and its time that between two of them; the first tenth of the steps is
not timed. Prints a Markdown table:
per example and number of ranks the first and the last loss over each library, the largest
difference between the two curves, and the median over the rounds of FBGEMM's median step ÷
emblib's.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.suites_of_peers import switch_folder

LIBRARIES = ("fbgemm", "emblib")
RANK = "EMBLIB_TORCHREC_EXAMPLE"  # what a rank is to run: name, steps, file of the curve
Curve = list[tuple[float, float]]  # loss and time of every step


def _golden(module: str, steps: int) -> None:
    sizes: dict[str, Any] = {"num_embeddings": 10_000, "embedding_dim": 64}
    importlib.import_module(f"examples.golden_training.{module}").train(
        **sizes, num_iterations=steps
    )


def _bert4rec(mode: str, steps: int) -> None:
    sys.path.insert(0, str(Path("examples/bert4rec").resolve()))
    words = ["--dataset_name", "random", "--mode", mode, "--emb_dim", "64", "--max_len", "20"]
    sizes = ["--random_user_count", "100", "--random_item_count", "500", "--random_size", "4000"]
    batch = ["--train_batch_size", "32", "--num_epochs", str(max(1, steps // 10))]
    importlib.import_module("bert4rec_main").main([*words, *sizes, *batch])


QUICKSTART = "examples/cloud_deployment/quickstart/train_torchrec_quickstart.py"


def _quickstart(steps: int) -> None:
    """Run the quickstart with gloo and CPUs in place of NCCL and GPUs, sharded on one rank, too.

    Its enumerator gets the batch size, without which TorchRec 1.8.0 raises.
    """
    source = Path(QUICKSTART).read_text()
    for before, after in {
        '"nccl"': '"gloo"',
        'torch.device(f"cuda:{local_rank}")': 'torch.device("cpu")',
        "torch.cuda.set_device(device)": "pass",
        'compute_device="cuda"': 'compute_device="cpu"',
        "if world_size > 1:": "if world_size > 0:",
        "enumerator=EmbeddingEnumerator(": "enumerator=EmbeddingEnumerator(batch_size=256, ",
    }.items():
        if before not in source:
            raise SystemExit(f"Error: {QUICKSTART} has no {before}")
        source = source.replace(before, after)
    words = ["--num_embeddings", "10000", "--num_sparse_features", "8", "--batch_size", "256"]
    sys.argv = [QUICKSTART, *words, "--num_epochs", "1", "--num_batches_per_epoch", str(steps)]
    exec(compile(source, QUICKSTART, "exec"), {"__name__": "__main__"})


EXAMPLES: dict[str, Callable[[int], None]] = {
    "golden_training/train_dlrm.py": lambda steps: _golden("train_dlrm", steps),
    "golden_training/train_dlrm_data_parallel.py": lambda steps: _golden(
        "train_dlrm_data_parallel", steps
    ),
    "cloud_deployment/quickstart": _quickstart,
    "bert4rec --mode ddp": lambda steps: _bert4rec("ddp", steps),
    "bert4rec --mode dmp": lambda steps: _bert4rec("dmp", steps),
}


def _draw_tables_by_name() -> None:
    """Give tables of sharded models first values that do not depend on the library."""
    import torch
    from torchrec.distributed import model_parallel

    construct = model_parallel.DistributedModelParallel.__init__

    def constructed(self: Any, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        for key, value in self.state_dict().items():
            if hasattr(value, "local_shards"):
                parts = {str(p.metadata.shard_offsets): p.tensor for p in value.local_shards()}
            else:
                parts = {"": value} if "embedding" in key else {}
            for part, rows in parts.items():
                generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {part}".encode()))
                rows.detach().uniform_(-0.01, 0.01, generator=generator)
        torch.manual_seed(int(os.environ["RANK"]))  # for the batches that are drawn from now on

    model_parallel.DistributedModelParallel.__init__ = constructed


def run_rank(name: str, steps: int, out: str) -> None:
    """Run an example in this rank; rank 0 writes the curve."""
    import numpy as np
    import torch

    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    np.random.seed(0)  # the examples draw their samples by these two
    random.seed(0)
    torch.set_num_threads(1)
    curve: Curve = []
    backward = torch.Tensor.backward

    def recorded(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        curve.append((float(loss.detach().sum()), time.perf_counter()))
        backward(loss, *arguments, **options)

    torch.Tensor.backward = recorded  # type: ignore[method-assign]
    sys.path.insert(0, os.getcwd())
    served = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    kind = served.SplitTableBatchedEmbeddingBagsCodegen
    if kind.__module__.startswith("emblib") != (os.environ["EMBLIB_AS_FBGEMM"] == "1"):
        raise SystemExit(
            f"Error: {kind} is of the other library: install emblib, a path is too little"
        )
    _draw_tables_by_name()
    EXAMPLES[name](steps)
    if rank == 0:
        Path(out).write_text(json.dumps(curve))


def run(name: str, library: str, ranks: int, options: argparse.Namespace) -> Curve | str:
    """Run an example over a library; return its curve, or the last line of its error."""
    environment = {**os.environ, "EMBLIB_AS_FBGEMM": "1" if library == "emblib" else "0"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "curve.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment[RANK] = json.dumps([name, options.steps, str(out)])
        switch_folder(Path(folder))
        paths = [folder, os.getcwd(), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        done = subprocess.run(
            [sys.executable, *launch, "--module", "tests.bench.torchrec_examples"],
            env=environment,
            cwd=options.sources,
            capture_output=True,
            text=True,
        )
        if out.exists():
            return [tuple(step) for step in json.loads(out.read_text())]
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return errors[0].partition("]:")[2] if errors else done.stderr[-200:]


def seconds_of(curve: Curve) -> float:
    """Return the median time of a step."""
    times = [time for _, time in curve[len(curve) // 10 :]]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def row(name: str, ranks: int, options: argparse.Namespace) -> list[str]:
    """Return the cells of an example."""
    curves: dict[str, Curve] = {}
    times: list[float] = []
    for turn in range(options.rounds):
        order = LIBRARIES if turn % 2 else LIBRARIES[::-1]
        results = {library: run(name, library, ranks, options) for library in order}
        failed = [f"over {who}: {what}" for who, what in results.items() if isinstance(what, str)]
        curves |= {who: what for who, what in results.items() if not isinstance(what, str)}
        if failed:
            return [name, str(ranks), *(_ends(curves.get(who, [])) for who in LIBRARIES), *failed]
        times.append(seconds_of(curves["fbgemm"]) / seconds_of(curves["emblib"]))
    apart = max(abs(a[0] - b[0]) for a, b in zip(*curves.values(), strict=True))
    spread = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
    return [name, str(ranks), *(_ends(curves[who]) for who in LIBRARIES), f"{apart:.1e}", spread]


def _ends(curve: Curve) -> str:
    return f"{curve[0][0]:.4f} → {curve[-1][0]:.4f}" if curve else "–"


def main(words: Sequence[str] | None = None) -> None:
    """Run every example over both libraries and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of the names of the examples")
    options = parser.parse_args(words)
    print("| example | ranks | loss over FBGEMM | over emblib | apart at most | FBGEMM ÷ emblib |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in (name for name in EXAMPLES if options.only in name):
        for ranks in options.ranks:
            print(f"| {' | '.join(row(name, ranks, options))} |", flush=True)


if __name__ == "__main__":
    if RANK in os.environ:
        run_rank(*json.loads(os.environ[RANK]))
    else:
        main()
