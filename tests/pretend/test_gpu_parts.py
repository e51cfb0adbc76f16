"""The benchmarks behind `make gpu-day` run on a GPU; their times mean nothing on the pretend GPU."""

import importlib
from pathlib import Path

import pytest
import torch

from tests.bench.gpu.bench import Bench

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU or the pretend GPU"),
]


@pytest.mark.parametrize("part", ["updates", "host", "trains", "hash", "caches", "quantised"])
def test_every_point_of_a_part_has_a_result(part: str, tmp_path: Path) -> None:
    bench = Bench(part, torch.device("cuda"), tiny=True, seconds=1000.0)
    module = importlib.import_module(f"tests.bench.gpu.{part}")
    if part == "updates":
        module.POINTS = module.POINTS[:1]
    if part in ("host", "trains"):
        name = "SHAPES" if part == "host" else "POINTS"
        setattr(module, name, getattr(module, name)[:1])
    module.run(bench)
    bench.write(tmp_path)
    assert bench.rows
    failed = [
        row
        for row in bench.rows
        if "Error" in str(row.get("status")) or (row.get("contender") == "emblib" and not _ok(row))
    ]
    assert not failed


def _ok(row: dict[str, object]) -> bool:
    return row.get("status", "ok") == "ok"
