"""The measurement behind `make gpu-day` runs; its times mean nothing on the pretend GPU."""

from pathlib import Path

import pytest
import torch

from experiments import cli, kernel_times

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU or the pretend GPU"),
]


def test_the_page_has_a_section_per_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = (kernel_times.Shape(2, 8, 4, 1), kernel_times.Shape(1, 4, 3, 5))
    monkeypatch.setattr(kernel_times, "SHAPES", shapes)
    out = tmp_path / "kernels.md"
    words = ["kernel_times", "--out", str(out), "--rows", "20", "--steps", "2"]
    assert cli.main(words) == 0
    page = out.read_text()
    assert page in capsys.readouterr().out
    assert all(f"## {shape.title}" in page for shape in shapes)
    assert page.count("| forward: pool_kernel, short_bags_kernel, long_bags_kernel |") == 2
