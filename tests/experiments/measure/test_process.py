"""Children: fresh, limited, and unable to take their parent with them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.measure import process
from experiments.measure.process import Child, ChildDied, Limits
from experiments.paths import ROOT

CHILDREN = "tests.experiments.children"


def child(name: str, *arguments: object, **limits: float) -> Child:
    return Child(f"{CHILDREN}:{name}", arguments, limits=Limits(**limits))  # type: ignore[arg-type]


def test_messages_go_both_ways() -> None:
    with child("echo") as one:
        one.send({"number": 1})
        assert one.receive() == {"number": 1}
        one.send([2])
        assert one.receive() == [2]


def test_every_child_is_a_fresh_process_that_left_the_gpu_alone() -> None:
    found = []
    for _ in range(2):
        with child("identity") as one:
            found.append(one.receive())
    (first, cuda, package), (second, *_) = found
    assert len({first, second, os.getpid()}) == 3
    assert not cuda
    assert Path(package).is_relative_to(ROOT)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("fail", "error", r"ValueError: no such luck \(children.py:\d+\)"),
        ("exit_early", "error", "ended with status 7"),
        ("crash", "error", "crashed .SIGSEGV"),
        ("killed", "oom", "SIGKILL"),
    ],
)
def test_a_death_has_a_status_and_a_reason(name: str, status: str, reason: str) -> None:
    with child(name) as one, pytest.raises(ChildDied, match=reason) as death:
        one.receive()
    assert death.value.status == status


def test_silence_is_a_timeout_and_ends_the_child() -> None:
    with child("sleep", seconds=0.2) as one:
        assert one.receive() == "asleep"
        with pytest.raises(ChildDied, match=r"no sign of life for 0.2 s") as death:
            one.receive()
        assert death.value.status == "timeout"
        assert not one.process.is_alive()


def test_silence_from_the_start_has_the_time_that_was_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "START_SECONDS", 0.4)
    with child("silent", seconds=0.2) as one, pytest.raises(ChildDied, match=r"life for 0\.4 s"):
        one.receive()


def test_a_changing_note_is_a_sign_of_life() -> None:
    with child("busy", seconds=0.3) as one:
        seen: list[str] = []
        assert one.receive(seen.append) == "done"
    assert seen
    assert set(seen) <= {"", *(f"tt|step {n}" for n in range(10))}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of data memory are Linux's")
def test_memory_beyond_the_limit_is_an_oom_of_the_child() -> None:
    limit = 256 << 20
    with child("allocate", limit // 2, memory_bytes=limit) as one:
        assert one.receive() == limit // 2
    with child("allocate", 2 * limit, memory_bytes=limit) as one, pytest.raises(ChildDied) as death:
        one.receive()
    assert death.value.status == "oom"


@pytest.mark.skipif(sys.platform != "linux", reason="parents' deaths are told on Linux")
def test_children_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        "import sys, time\n"
        "from experiments.measure.process import Child\n"
        "if __name__ == '__main__':\n"
        f"    with Child('{CHILDREN}:sleep') as child:\n"
        "        child.receive()\n"
        "        print(child.process.pid, flush=True)\n"
        "        time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while _runs(orphan) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(orphan)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
