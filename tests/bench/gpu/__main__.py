"""Run a part of the GPU benchmarks, list the parts, or compare what was found with the aims.

    python -m tests.bench.gpu PART [--out FOLDER] [--seconds N] [--device cpu] [--tiny]
    python -m tests.bench.gpu list
    python -m tests.bench.gpu summary --out FOLDER

A part writes PART.json and PART.md to the folder, also when some of its points fail or its time is
up; `summary` writes aims.md. Exit status: 0 done, 1 no point of the part has a result, 2 usage.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch

from tests.bench.gpu import summary
from tests.bench.gpu.bench import Bench

PARTS = {
    "updates": "kernels of steps: updates and grouping, against FBGEMM",
    "host": "what the host needs for forwards and steps",
    "trains": "tensor trains against FBTT",
    "hash": "hash tables against HierarchicalKV, dynamic steps against dense ones",
    "caches": "cached tables against FBGEMM, prefetch, the bus",
    "quantised": "quantised lookups",
    "kernels": "kernels of a step against a model of their bytes",
    "matrix": "forward and step of every optimizer against FBGEMM and nn.EmbeddingBag",
}


def main(words: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=[*PARTS, "list", "summary"])
    parser.add_argument("--out", type=Path, default=Path("build/gpu-day"))
    parser.add_argument("--seconds", type=float, default=60.0, help="points begin until then")
    parser.add_argument("--device", default="", help="cuda or cpu; default: a GPU if there is one")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: does the part run?")
    arguments = parser.parse_args(words)
    if arguments.part == "list":
        print("\n".join(f"{name:<10} {what}" for name, what in PARTS.items()))
        return 0
    if arguments.part == "summary":
        print(summary.write(arguments.out))
        return 0
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and not arguments.tiny:
        parser.error("without a GPU only --tiny makes sense")
    bench = Bench(arguments.part, device, tiny=arguments.tiny, seconds=arguments.seconds)
    try:
        importlib.import_module(f"tests.bench.gpu.{arguments.part}").run(bench)
    finally:
        bench.write(arguments.out)
    return 0 if any(row.get("status", "ok") == "ok" for row in bench.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
