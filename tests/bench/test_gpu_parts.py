"""The GPU benchmarks at tiny size on a CPU: every part runs, and has the figures of the aims."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.gpu import (
    __main__,
    caches,
    hash,
    host,
    kernels,
    matrix,
    peers,
    quantised,
    summary,
    trains,
    updates,
    watch,
)
from tests.bench.gpu.bench import Bench, Shape
from tests.bench.gpu.summary import Aim

CPU = torch.device("cpu")
KERNELS = {
    "pool_kernel": (1.0, 100.0),
    "quant_pool_kernel<8>": (1.0, 100.0),
    "update_kernel": (1.0, 500.0),
    "radix": (3.0, 120.0),
}


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what only a GPU has: kernels' times, and peers that are emblib under another name."""

    def profiled(call: watch.Call, steps: int = 1) -> dict[str, tuple[float, float]]:
        call(0)
        return KERNELS

    for module in (updates, host, trains, quantised, kernels):
        monkeypatch.setattr(module, "kernels", profiled)
    monkeypatch.setattr(updates, "Fbgemm", peers.Emblib)
    monkeypatch.setattr(host, "Fbgemm", peers.Emblib)
    monkeypatch.setitem(peers.CONTENDERS, "fbgemm", peers.Emblib)
    monkeypatch.setattr(
        caches, "_fbgemm", lambda shape, policy, device: caches.cached(shape, policy, 0.5, device)
    )
    monkeypatch.setattr(
        trains,
        "fbtt_calls",
        lambda *arguments: {"FBTT": lambda n: None, "FBTT forward": lambda n: None},
    )


def ran(part: str, run: Callable[[Bench], None], tmp_path: Path) -> dict[str, Any]:
    """Run a part; return what it wrote."""
    bench = Bench(part, CPU, tiny=True, seconds=1000.0)
    run(bench)
    bench.write(tmp_path)
    found: dict[str, Any] = json.loads((tmp_path / f"{part}.json").read_text())
    return found


@pytest.mark.parametrize("part", sorted({*__main__.PARTS} - {"kernels", "matrix"}))
def test_a_part_has_the_figures_of_its_aims(part: str, tmp_path: Path) -> None:
    module = {m.__name__.rpartition(".")[2]: m for m in (updates, host, trains, hash, caches)}
    found = ran(part, {**module, "quantised": quantised}[part].run, tmp_path)
    wanted = {aim.figure for aim in summary.aims() if aim.part == part}
    assert wanted
    assert wanted <= found["figures"].keys()
    failed = [row for row in found["rows"] if "Error" in str(row.get("status"))]
    assert not failed
    page = (tmp_path / f"{part}.md").read_text()
    assert page.count("\n| ") >= len(found["rows"])


def test_the_matrix_has_the_figures_of_its_aims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "SHAPES", matrix.SHAPES[:3])
    monkeypatch.setattr(matrix, "PASSES", ("forward", "rowwise_adagrad"))
    found = ran("matrix", matrix.run, tmp_path)
    wanted = {aim.figure for aim in summary.aims() if aim.part == "matrix"}
    assert wanted
    assert wanted <= found["figures"].keys()
    eager = [row for row in found["rows"] if row["mode"] == "eager"]
    assert len(eager) == 3 * 2 * 2 * 3  # shapes, dtypes, passes, contenders
    assert {row["status"] for row in eager if row["contender"] == "emblib"} == {"ok"}
    without = [row for row in eager if "no row-wise" in row["status"]]
    assert len(without) == 3 * 2


def test_the_model_counts_rows_ids_outputs_and_states() -> None:
    shape = Shape(tables=2, rows=9, dim=4, batch=3, length=5)  # 30 lookups, 6 bags
    assert kernels.forward_bytes(shape) == 30 * (16 + 8) + 6 * (16 + 8)
    assert kernels.update_bytes(shape) == 6 * 16 + 30 * 2 * (16 + 4)
    assert kernels.model_us(2_770_000) == pytest.approx(1.0)


def test_steps_that_fail_are_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(peers.Emblib, "step", fail)
    words = ["kernels", "--tiny", "--out", str(tmp_path), "--device", "cpu"]
    assert __main__.main(words) != 0


def test_kernels_are_listed_with_the_model(tmp_path: Path) -> None:
    found = ran("kernels", kernels.run, tmp_path)
    rows = [row for row in found["rows"] if row["batch"] == kernels.title(kernels.SHAPES[0])]
    by_part = {row["part"]: row for row in rows}
    assert [*by_part][3:] == ["update_kernel", "radix", "pool_kernel", "quant_pool_kernel<8>"]
    model = kernels.model_us(kernels.update_bytes(kernels.SHAPES[0].small()))
    assert by_part["update"]["us"] == 500.0
    assert by_part["update"]["model_share"] == pytest.approx(model / 500.0)
    assert by_part["radix"]["launches"] == 3.0


def test_ids_are_distinct_within_a_table() -> None:
    ids, offsets = kernels.distinct_batches(Shape(2, 30, 4, 3, 5), CPU)[0]
    assert [len(part.unique()) for part in ids.view(2, -1)] == [15, 15]
    assert offsets.tolist() == list(range(0, 31, 5))
    few, _ = kernels.distinct_batches(Shape(1, 4, 4, 3, 5), CPU)[0]
    assert sorted(few.bincount().tolist()) == [3, 4, 4, 4]


def test_names_of_kernels_are_short() -> None:
    name = (
        "void emb::(anonymous namespace)::update_kernel<float, emb::Float32<emb::SGD> >"
        "(emb::UpdateArgs, int)"
    )
    assert watch.short_name(name) == "update_kernel<float, Float32<SGD> >"
    assert watch.short_name("Memset (Device)") == "Memset "


def test_a_point_that_fails_or_comes_too_late_does_not_end_the_part(tmp_path: Path) -> None:
    bench = Bench("updates", CPU, tiny=True, seconds=1000.0)
    bench.attempt("bad", lambda: 1 // 0)
    bench.attempt("good", lambda: bench.row(point="good", status="ok"))
    bench.seconds = 0.0
    bench.attempt("late", lambda: bench.row(point="late", status="ok"))
    bench.write(tmp_path)
    page = (tmp_path / "updates.md").read_text()
    assert "| bad | ZeroDivisionError: integer division or modulo by zero |" in page
    assert "| good | ok |" in page
    assert "- late: not reached" in page


def test_a_contender_that_raises_has_an_error_and_the_others_times() -> None:
    found = watch.race(
        watch.Watch(CPU), {"bad": lambda n: 1 // 0, "good": lambda n: None}, rounds=3, seconds=9.0
    )
    assert found["bad"].error.startswith("ZeroDivisionError")
    assert len(found["good"].device) == 3
    assert watch.ratio(found["bad"], found["good"]) is None


def test_an_aim_is_met_from_its_side(tmp_path: Path) -> None:
    assert Aim("p", "f", 10.0, "lower").met(10.0)
    assert not Aim("p", "f", 10.0, "lower").met(11.0)
    assert Aim("p", "f", 10.0, "higher").met(11.0)
    assert "not measured" in summary.page(tmp_path)
    bench = Bench("updates", CPU, seconds=1.0)
    first = next(aim for aim in summary.aims() if aim.part == "updates")
    bench.figure(first.figure, first.aim + 1)
    bench.write(tmp_path)
    text = summary.write(tmp_path)
    assert f"{first.aim + 1:,.0f} | MISSED |" in text
    assert text == (tmp_path / "aims.md").read_text()


def test_names_and_sizes_of_a_shape() -> None:
    shape = Shape(3, 1000, 8, 5, 2, 1.15)
    assert (shape.name, shape.lookups) == ("T3 D8 B5 L2 s1.15", 30)
    for ids, offsets in shape.batches(CPU, 2):
        assert ids.shape == (30,)
        assert 0 <= int(ids.min()) <= int(ids.max()) < 1000
        assert offsets.tolist() == list(range(0, 31, 2))
    assert shape.gradient(CPU).shape == (5, 24)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["list"]) == 0
    assert all(part in capsys.readouterr().out for part in ["matrix"])
    words = ["quantised", "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert __main__.main(words) == 0
    assert (tmp_path / "quantised.md").is_file()
    assert __main__.main(["summary", "--out", str(tmp_path)]) == 0
    assert "Tiny sizes" in (tmp_path / "aims.md").read_text()
    with pytest.raises(SystemExit):
        __main__.main(["updates", "--device", "cpu"])
