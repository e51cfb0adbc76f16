"""The part `kernels` of the GPU benchmarks; its times mean nothing on the pretend GPU."""

from pathlib import Path

import pytest
import torch

from experiments.timing.clock import TorchGpu
from tests.bench.gpu import __main__, kernels

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU or the pretend GPU"),
]


def test_the_page_has_the_model_of_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(torch._C, "_cuda_sleep"):  # the pretend GPU has no spinning kernel
        monkeypatch.setattr(TorchGpu, "spin", lambda self, cycles: None)
    assert __main__.main(["kernels", "--tiny", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "kernels.md").read_text()
    for shape in kernels.SHAPES:
        for part in ("step", "forward", "update"):
            assert f"| {kernels.title(shape)} | {part} |" in page
