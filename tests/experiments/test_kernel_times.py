"""The page of kernel times, without a GPU; tests/pretend runs the measurement."""

from pathlib import Path

import pytest
import torch

from experiments import cli
from experiments.kernel_times import SHAPES, KernelTimes, Shape, model_us, section, short_name


def test_the_model_counts_rows_ids_outputs_and_states() -> None:
    shape = Shape(tables=2, dim=4, batch=3, length=5)  # 30 lookups, 6 bags
    assert shape.forward_bytes() == 30 * (16 + 8) + 6 * (16 + 8)
    assert shape.update_bytes() == 6 * 16 + 30 * 2 * (16 + 4)
    assert model_us(2_770_000) == pytest.approx(1.0)


def test_a_section_has_the_model_beside_the_measured_kernels() -> None:
    shape = SHAPES[0]
    forward, update = model_us(shape.forward_bytes()), model_us(shape.update_bytes())
    times = {
        "short_bags_kernel<float>": 2 * forward,
        "update_kernel<a>": update,
        "chunk_kernel": update,
    }
    text = section(shape, KernelTimes(dict.fromkeys(times, 1.0), times, 1234.0))
    assert "A step takes 1,234 us" in text
    assert (
        "| forward: pool_kernel, short_bags_kernel, long_bags_kernel | 325 us | 650 us | 50% |"
        in text
    )
    assert "| update: update_kernel, chunk_kernel | 477 us | 955 us | 50% |" in text
    assert text.index("`short_bags_kernel<float>`") < text.index("`update_kernel<a>`")  # by time


def test_a_profiler_that_may_not_profile_is_named() -> None:
    text = section(SHAPES[1], KernelTimes({}, {}, 10.0))
    assert "not reported" in text
    assert "the profiler reported no kernel" in text


def test_names_are_short() -> None:
    name = (
        "void emb::(anonymous namespace)::update_kernel<float, emb::Float32<emb::SGD> >"
        "(emb::UpdateArgs, int)"
    )
    assert short_name(name) == "update_kernel<float, Float32<SGD> >"
    assert short_name("Memset (Device)") == "Memset "


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "  kernel_times  compare times" in cli.HELP
    assert cli.main(["kernel_times", "--out", str(tmp_path / "page.md")]) == 2
    assert "kernel_times needs a GPU" in capsys.readouterr().err
