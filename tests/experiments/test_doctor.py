"""The doctor: what it says of healthy and of broken machines, and how it ends."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments import doctor
from experiments.doctor import CheckResult, State, run_check
from experiments.machine import preflight
from experiments.machine.cpu import Cpu, CpuTime, usable_cores
from experiments.machine.telemetry import Nvml
from experiments.paths import ROOT
from tests.experiments import command_line
from tests.experiments.fake_nvml import FakeNvml, healthy

main = command_line(doctor)

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


def named(found: Iterable[CheckResult], what: str) -> CheckResult:
    (one,) = [f for f in found if f.what == what]
    return one


def test_every_package_of_the_harness_is_checked() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", text)[0] for text in extras["optional-dependencies"]["harness"]}
    assert names <= {*doctor.NEEDED, *doctor.OPTIONAL}


def test_this_machine_is_fit_to_run_the_harness(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["broken"] == []
    sections = {f["section"] for f in found["findings"]}
    assert set(doctor.CHECKS) - {"GPU"} <= sections
    assert {"what", "found", "state", "advice"} <= found["findings"][0].keys()


def test_the_table_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [
        CheckResult("hydra-core", "not installed", State.broken, 'pip install "x[y]"'),
        CheckResult("governor", "powersave", State.note, "cpupower"),
        CheckResult("model", "a [fast] one"),
    ]
    monkeypatch.setattr(doctor, "CHECKS", {"Packages": lambda: bad})
    assert main([]) == 1
    shown = capsys.readouterr().out
    assert "✗  hydra-core" in shown
    assert 'pip install "x[y]"' in shown
    assert "a [fast] one" in shown  # what is found is text, not markup
    assert "1 of 3 findings must be repaired" in shown
    monkeypatch.setattr(doctor, "CHECKS", {"Packages": lambda: bad[1:]})
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.index("What would make measurements better") < shown.index("cpupower")
    assert "Ready to measure." in shown


def test_a_check_that_fails_is_a_finding() -> None:
    def check() -> list[CheckResult]:
        raise ValueError("no such file")

    (found,) = run_check("Tools", check)
    assert (found.state, found.found) == (State.broken, "ValueError: no such file")
    assert found.section == "Tools"


def test_a_package_that_is_missing_breaks_only_what_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = {"hydra-core", "pyarrow"}
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name in lost else "1.0")
    found = list(doctor.packages())
    assert named(found, "hydra-core").state is State.broken
    assert named(found, "pyarrow").state is State.note
    assert named(found, "pyarrow").advice.startswith("pip install pyarrow")
    assert {f.state for f in found if f.what not in lost} == {State.ok}


@pytest.mark.parametrize(
    ("flags", "wish", "found", "state"),
    [
        (AVX512, None, "avx512, the best", State.ok),
        (AVX2, None, "avx2, the best", State.ok),
        (frozenset({"sse2"}), None, "baseline, the best", State.ok),
        (AVX512, "avx512", "avx512, as EMBLIB_ISA", State.ok),
        (AVX512, "avx2", "avx2 for EMBLIB_ISA=avx2, though this CPU has avx512", State.note),
        (AVX512, "baseline", "baseline for", State.note),
        (AVX2, "avx512", "avx2, as EMBLIB_ISA=avx512 allows", State.ok),
        (AVX512, "sse", "is none of baseline, avx2, avx512", State.broken),
    ],
)
def test_kernels_are_those_that_the_library_chooses(
    flags: frozenset[str], wish: str | None, found: str, state: State
) -> None:
    finding = doctor.cpu_kernels(flags, wish)
    assert found in finding.found
    assert finding.state is state
    assert bool(finding.advice) is (state is not State.ok)


def test_the_rule_is_that_of_the_library() -> None:
    """csrc/core/isa.h chooses; what it asks of a CPU must be what is written here."""
    text = (Path(__file__).parents[2] / "csrc/core/isa.h").read_text()
    asked = {part.partition('"')[0] for part in text.split('__builtin_cpu_supports("')[1:]}
    assert asked == doctor.INSTRUCTIONS["avx512"]
    assert doctor.INSTRUCTIONS["avx2"] == asked - {f for f in asked if f.startswith("avx512")}


def test_a_lookup_is_checked_against_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = named(doctor.emblib_libraries(), "on cpu")
    assert (found.state, found.found) == (State.ok, "a lookup agrees with PyTorch")
    monkeypatch.setattr(torch, "allclose", lambda *a, **k: False)
    found = named(doctor.emblib_libraries(), "on cpu")
    assert (found.state, found.advice) == (State.broken, "make native")


def test_tools_for_a_gpu_are_missed_only_beside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    without, present = list(doctor.tools(driver=False)), list(doctor.tools(driver=True))
    assert named(without, "git").state is State.note
    assert named(without, "nvidia-smi").state is State.ok
    assert named(present, "nvidia-smi").state is State.note


def test_no_gpu_is_fine_unless_there_is_one() -> None:
    assert doctor.explain_no_gpu("2.13.0+cpu", None, driver=False).state is State.ok
    found = doctor.explain_no_gpu("2.13.0+cpu", None, driver=True)
    assert (found.state, found.advice.endswith("a torch for CUDA")) == (State.note, True)
    found = doctor.explain_no_gpu("2.13.0+cu130", "13.0", driver=True)
    assert "CUDA_VISIBLE_DEVICES" in found.advice


def test_a_gpu_is_described_with_what_would_make_it_steadier() -> None:
    h100 = SimpleNamespace(
        name="H100", major=9, minor=0, total_memory=80_000_000_000, L2_cache_size=50 << 20
    )
    nvml = Nvml.open(None, FakeNvml(healthy() | {"GetPowerManagementLimit": 500_000}))
    found = list(doctor.check_gpu(h100, nvml))
    assert {f.section for f in found} == {"GPU: H100"}
    assert named(found, "SM clock").found == "1980 MHz"
    assert named(found, "L2 cache").found == "50 MiB"
    assert named(found, "ECC").found == "on"
    assert [f.what for f in found if f.state is State.note] == ["power limit"]
    blind = doctor.check_gpu(h100, None)
    assert "nvidia-ml-py" in named(blind, "nvml absent").advice


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process uses the processors while they are watched."""
    monkeypatch.setattr(CpuTime, "usage_by_others", lambda self: (None, None))


@pytest.mark.usefixtures("still")
def test_the_processor_is_described_even_where_nothing_is_shown(tmp_path: Path) -> None:
    found = list(doctor.processor(Cpu(tmp_path), sleep=lambda seconds: None))
    assert {f.state for f in found if f.what != "last-level cache"} == {State.ok}
    assert named(found, "governor").found == "not shown"
    assert "32 MiB is assumed" in named(found, "last-level cache").advice


@pytest.mark.usefixtures("still")
def test_a_governor_that_saves_power_is_worth_a_word(tmp_path: Path) -> None:
    cpu = Cpu(tmp_path)
    file = tmp_path / f"sys/devices/system/cpu/cpu{usable_cores()[0]}/cpufreq/scaling_governor"
    file.parent.mkdir(parents=True)
    file.write_text("powersave\n")
    found = named(doctor.processor(cpu, sleep=lambda seconds: None), "governor")
    assert (found.found, found.state) == ("powersave", State.note)
    assert "cpupower" in found.advice
    assert not preflight.check(torch.device("cpu"), cpu=cpu, threads=1, sleep=lambda seconds: None)[
        "fit"
    ]
