"""What a run says about its machine, how it fits its memory, and what the terminal shows."""

from __future__ import annotations

import dataclasses
import io
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from experiments.config.schema import Config, Optimizer, WorkloadConfig
from experiments.config.sweep import Arm, Cell
from experiments.machine import environment, memory
from experiments.machine.telemetry import Nvml
from experiments.measure import timing
from experiments.measure.session import Session
from experiments.run import runner
from experiments.run.progress import Display
from tests.experiments.fake_nvml import FakeNvml, healthy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WORK = WorkloadConfig(T=1, E=1_000_000, D=25)  # 100 MB as float32


def fitted(monkeypatch: pytest.MonkeyPatch, free: int, config: Config, *names: str) -> Cell:
    monkeypatch.setattr(memory, "available_bytes", lambda _: free)
    whole = Cell("x", "x", WORK, tuple(Arm(n) for n in names))
    return runner.fit_memory(whole, Session(config, CPU, "run"))


def test_tables_shrink_only_as_far_as_memory_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.device.memory_share = 0.5
    assert fitted(monkeypatch, 400_000_000, config, "tbe", "torch").rows_scale == 1.0
    assert fitted(monkeypatch, 200_000_000, config, "tbe", "torch").rows_scale == 0.5
    assert fitted(monkeypatch, 200_000_000, config, "tbe", "tt").rows_scale == 1.0
    config.optimizer = Optimizer.adagrad  # its state is as large as the tables
    assert fitted(monkeypatch, 200_000_000, config, "tbe", "torch").rows_scale == 0.25


def test_a_state_that_git_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "0123456789ab", "status": None}
    monkeypatch.setattr(environment, "_git", lambda command, *_: answers[command])
    assert environment.git_state() == {"sha": "0123456789ab", "dirty": None}
    answers["status"] = ""
    assert environment.git_state()["dirty"] is False


def test_available_memory_is_between_nothing_and_all_of_it() -> None:
    total = environment.environment_content(CPU, [])["memory_bytes"]
    assert 0 < memory.available_bytes(CPU) <= (total or 1 << 62)


def test_the_environment_is_complete_and_names_nobody() -> None:
    found = environment.environment_content(CPU, ["+experiment=x", "exclude=[rank > D]"])
    written = json.dumps(found)
    assert found["command"] == "python run.py +experiment=x 'exclude=[rank > D]'"
    of_module = environment.environment_content(CPU, ["--out", "a b"], program="tests.bench.x")
    assert of_module["command"] == "python -m tests.bench.x --out 'a b'"
    for key in ("device", "cpu", "torch", "python", "threads", "git", "load_average", "huge_pages"):
        assert key in found
    assert found["threads"] == torch.get_num_threads()
    host = socket.gethostname()
    assert len(host) < 4 or host not in written
    assert str(Path.home()) == "/" or str(Path.home()) not in written


def test_without_a_terminal_a_finished_cell_is_one_line() -> None:
    out = io.StringIO()
    with Display(2, Console(file=out, soft_wrap=True)) as display:
        display.begin("first")
        display.finish("first [done]")
        display.begin("second")
        display.finish("second [done]")
    assert out.getvalue().splitlines() == ["[1/2] first [done]", "[2/2] second [done]"]


def test_explicit_factors_are_dropped_with_the_rows_they_were_made_for() -> None:
    config = Config()
    whole = Cell("x", "x", WORK, (Arm("tt", 4),))
    whole.tt.row_factors[:] = [100, 100, 100]
    session = Session(config, CPU, "run")
    assert timing.task_of(whole, whole.arms[0], session).row_factors == (100, 100, 100)
    shrunk = dataclasses.replace(whole, rows_scale=0.1)
    assert timing.task_of(shrunk, whole.arms[0], session).row_factors == ()


def test_what_nvml_knows_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(healthy())
    library.nvmlSystemGetDriverVersion = lambda: "580.65"  # type: ignore[attr-defined]
    monkeypatch.setattr(Nvml, "open", lambda device=None: Nvml(library, 0))
    h100 = SimpleNamespace(
        name="H100", total_memory=80, multi_processor_count=132, major=9, minor=0, uuid="1"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: h100.name)
    found = environment.environment_content(CUDA, [])["gpu"]
    assert (found["driver"], found["sm_clock_mhz"]) == ("580.65", 1980)
    assert found["power_limit_w"] == 700.0
    monkeypatch.setattr(Nvml, "open", lambda device=None: None)
    assert environment.environment_content(CUDA, [])["gpu"]["nvml"] == "unavailable"
