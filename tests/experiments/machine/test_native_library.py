"""A native library that is older than its sources is not taken for the code of the commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from experiments.machine import preflight
from experiments.machine.cpu import Cpu
from experiments.machine.preflight import newer_source

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose libraries were built at time 1000."""
    monkeypatch.setattr(preflight, "library_folders", lambda: [tmp_path / "emblib"])
    monkeypatch.setattr(preflight.sys, "prefix", str(tmp_path / "venv"))
    for name in ("libemblib_cpu.so", "libemblib_cuda.so"):
        write(tmp_path / "emblib" / name, 1000)
    return tmp_path


def write(path: Path, time: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (time, time))


def test_a_source_that_was_changed_after_the_build_is_named(checkout: Path) -> None:
    write(checkout / "csrc/tbe/lookup.h", 999)
    assert newer_source(CPU, root=checkout) is None
    write(checkout / "csrc/tt/plan.h", 1001)
    assert newer_source(CPU, root=checkout) == "csrc/tt/plan.h"


def test_code_of_a_gpu_does_not_make_the_library_of_the_cpu_old(checkout: Path) -> None:
    write(checkout / "csrc/tbe/lookup_cuda.cu", 1001)
    assert newer_source(CPU, root=checkout) is None
    assert newer_source(CUDA, root=checkout) == "csrc/tbe/lookup_cuda.cu"


def test_make_native_settles_it_where_nothing_had_to_be_built(checkout: Path) -> None:
    write(checkout / "csrc/tt/plan.h", 1001)
    write(checkout / "venv/.make/native", 1002)
    assert newer_source(CPU, root=checkout) is None


def test_an_installed_wheel_has_no_sources(checkout: Path) -> None:
    assert newer_source(CPU, root=checkout) is None
    (checkout / "emblib/libemblib_cpu.so").unlink()
    assert newer_source(CPU, root=checkout) is None


def test_the_machine_is_not_fit_then(cpu: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "newer_source", lambda device: "csrc/tt/plan.h")
    found = preflight.check(CPU, cpu=cpu, threads=2, sleep=lambda seconds: None)
    assert (found["flags"], found["fit"]) == (["old_library"], False)
    assert found["newer_source"] == "csrc/tt/plan.h"
