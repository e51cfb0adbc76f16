"""The parts of `make gpu-day` run on a GPU; their times mean nothing on the pretend GPU."""

import importlib
from pathlib import Path

import pytest
import torch

from experiments.timing.clock import TorchGpu
from tests.bench.gpu import peers
from tests.bench.gpu.bench import Bench
from tests.bench.gpu.peers import NotOffered

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU or the pretend GPU"),
]


def _no_fbgemm() -> None:
    raise NotOffered("not measured here")


@pytest.mark.parametrize(
    "part", ["updates", "host", "trains", "hash", "caches", "quantised", "matrix"]
)
def test_every_point_of_a_part_has_a_result(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(torch._C, "_cuda_sleep"):  # the pretend GPU has no spinning kernel
        monkeypatch.setattr(TorchGpu, "spin", lambda self, cycles: None)
    module = importlib.import_module(f"tests.bench.gpu.{part}")
    monkeypatch.setattr(peers, "fbgemm", _no_fbgemm)
    for name in ("SHAPES", "POINTS"):
        if part in ("host", "trains", "updates", "matrix") and hasattr(module, name):
            monkeypatch.setattr(module, name, getattr(module, name)[:1])
    if part == "caches":
        monkeypatch.setattr(module, "fbgemm", _no_fbgemm)
    bench = Bench(part, torch.device("cuda"), tiny=True, seconds=1000.0)
    module.run(bench)
    bench.write(tmp_path)
    assert bench.rows
    own = [row for row in bench.rows if str(row.get("contender", "emblib")).startswith("emblib")]
    assert [row for row in own if row["status"] != "ok"] == []
    assert not [row for row in bench.rows if "Error" in str(row["status"])]
