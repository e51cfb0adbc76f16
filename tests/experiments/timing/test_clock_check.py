"""The check of the clocks, as `doctor --clocks` shows it."""

from __future__ import annotations

import json

import pytest
import torch

from experiments import doctor
from experiments.timing import clock, clock_check
from tests.experiments import command_line
from tests.experiments.fake_gpu import FakeGpu, kernels


def test_the_clock_check_times_a_gather_after_every_flush(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clock_check, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(clock, "last_level_cache_bytes", lambda: 1 << 20)
    main = command_line(doctor)
    assert main(["--clocks", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line["setting"] for line in found] == [
        "hot",
        *(f"flush of {x}x the cache" for x in ("0.25", "0.5", "1", "2", "4")),
    ]
    assert {line["work"] for line in found} == {"gather of 0.125 MiB"}
    assert all(0 < line["low_us"] <= line["median_us"] <= line["high_us"] for line in found)
    assert main(["--clocks", "cpu"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_the_clock_check_tries_every_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(clock_check, "TorchGpu", lambda device: gpu)
    work = kernels(gpu, 4e-6, count=4).call
    monkeypatch.setattr(clock_check, "_gather", lambda device, size: (work, f"{size}"))
    found = clock_check.spins(torch.device("cuda"))
    short = {line.setting: line for line in found if line.work == str(1 << 16)}
    bare = short["spin of 0 µs at first"]
    assert bare.exposed > 0.9
    # Four launches of 5 µs and the last kernel, less what was left to do of the sample before.
    assert bare.median_us == pytest.approx(20.0)
    assert short["spin of 50 µs at first"].median_us == pytest.approx(4.0)
    assert short["spin of 50 µs at first"].exposed == 0.0
    assert short["graph"].median_us == pytest.approx(4.0)
    assert short["wall"].median_us > bare.median_us
