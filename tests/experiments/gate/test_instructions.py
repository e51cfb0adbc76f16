"""Instruction counts: callgrind's dumps, requests without valgrind, what becomes a regression."""

from __future__ import annotations

import dataclasses
import platform
import signal
import subprocess
from pathlib import Path

import pytest

from experiments import configure
from experiments.config.schema import Config
from experiments.gate import instructions, pages, verdicts
from experiments.gate.instructions import NATIVE, TOTAL
from experiments.gate.pairs import Trial
from experiments.gate.points import Setup, points_of
from experiments.gate.rules import Evidence, Rules
from experiments.timing.statistics import Verdict

# Two objects: the second is defined as a callee and then named by its number.
DUMP = """\
positions: line
events: Ir
ob=(1) /usr/lib/libpython3.11.so
fl=(1) ???
fn=(1) eval
0 100
cob=(2) /tmp/emblib/libemblib_cpu.so
cfn=(2) lookup
calls=1 0
0 1000
+5 20
ob=(2)
fn=(2)
12 900
* 60
cfn=(3) pool
calls=2 0
-3 30
fn=(3)
4 30
totals: 1110
"""


def test_costs_of_callees_count_once_and_belong_to_their_library() -> None:
    assert instructions.count_dump(DUMP) == {TOTAL: 1110.0, NATIVE: 990.0}


def test_the_smallest_dump_of_a_point_counts(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("a forward\na forward\nb step")
    for number, cost in enumerate((70, 60, 5), 1):
        dump = DUMP.replace("12 900", f"12 {cost}")
        (tmp_path / f"dump.{number}").write_text(dump)
    found = instructions.read_dumps(tmp_path)
    assert {name: counts[NATIVE] for name, counts in found.items()} == {
        "a forward": 150.0,
        "b step": 95.0,
    }


def test_a_side_that_fails_ends_the_other_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would run on while the pairs are timed."""
    commands = {"base": "echo no valgrind >&2; exit 1", "head": "exec sleep 60"}
    started: dict[str, subprocess.Popen[str]] = {}

    def start(side: str, folder: str, message: Path) -> subprocess.Popen[str]:
        words = ["sh", "-c", commands[side]]
        started[side] = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        return started[side]

    monkeypatch.setattr(instructions, "_start", start)
    config = configure.load(["+experiment=gate", "device=cpu"])
    counts, reason = instructions.count(Setup((), config, "cpu", 1), {"base": "", "head": ""})
    assert (counts, reason) == ({}, "base failed under valgrind: no valgrind")
    assert started["head"].poll() == -signal.SIGKILL


def test_points_that_one_side_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure.load(["+experiment=gate", "device=cpu"])
    points = points_of(config)[:1]

    def start(side: str, folder: str, message: Path) -> subprocess.Popen[str]:
        dumps = message.parent / side
        dumps.mkdir()
        (dumps / "names").write_text(points[0].name if side == "base" else "")
        (dumps / "dump.1").write_text(DUMP)
        return subprocess.Popen(["true"], stderr=subprocess.PIPE, text=True)

    monkeypatch.setattr(instructions, "_start", start)
    counts, reason = instructions.count(Setup(points, config, "cpu", 1), {"base": "", "head": ""})
    assert list(counts[points[0].name]) == ["base"]
    assert points[0].name in reason


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code for x86-64")
def test_requests_do_nothing_without_valgrind() -> None:
    requests = instructions.ClientRequests()
    assert [requests.send(r) for r in (instructions.START, instructions.STOP)] == [0, 0]


def test_why_nothing_is_counted_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure.load(["+experiment=gate", "device=cpu"])
    monkeypatch.setattr(instructions.shutil, "which", lambda name: "/usr/bin/valgrind")
    monkeypatch.setattr(instructions.platform, "machine", lambda: "x86_64")
    assert instructions.reason_not_to_count(config, "cpu", smoke=False) == ""
    assert "on the CPU" in instructions.reason_not_to_count(config, "cuda", smoke=False)
    assert "smoke" in instructions.reason_not_to_count(config, "cpu", smoke=True)
    monkeypatch.setattr(instructions.platform, "machine", lambda: "aarch64")
    assert "not aarch64" in instructions.reason_not_to_count(config, "cpu", smoke=False)
    monkeypatch.setattr(instructions.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None)
    assert "valgrind is not installed" in instructions.reason_not_to_count(
        config, "cpu", smoke=False
    )
    off = dataclasses.replace(config, gate=dataclasses.replace(config.gate, instructions=False))
    assert instructions.reason_not_to_count(off, "cpu", smoke=False) == "gate.instructions=false"


def test_two_per_cent_more_instructions_are_a_regression() -> None:
    line = counted(1.02, time=0.0)
    assert line.state == Verdict.SAME.value
    assert line.is_regression
    assert line.worse == ["native instructions 1,000,000 → 1,020,000 (1.020×)"]
    assert pages.instructions_value(line, NATIVE).text == "1.0200 (1,020,000)"
    assert not counted(1.005, time=0.0).is_regression
    assert counted(0.9, time=0.0).better


def test_more_instructions_in_less_time_are_none() -> None:
    line = counted(1.5, time=-0.2)
    assert line.state == Verdict.FASTER.value
    assert not line.is_regression
    assert line.better


def counted(ratio: float, *, time: float) -> verdicts.PointFinding:
    """Return the finding of a point with this ratio of instructions and log ratio of times."""
    config: Config = configure.load(["+experiment=gate", "device=cpu"])
    point = points_of(config)[0]
    logs = [time + 1e-4 * k for k in range(5)]
    trial = Trial(evidence=Evidence(first={point.name: logs}, second={point.name: logs}))
    trial.add_counts({point.name: {"base": {NATIVE: 1e6}, "head": {NATIVE: 1e6 * ratio}}})
    rules = Rules(5, 9, {point.name: 0.05})
    (line,) = verdicts.collect_findings([point], trial, rules, []).points
    return line
