"""The short set of the pretend GPU passes: the part of it that every run of the tests includes."""

import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.compile_cache import ROOT, files_of
from tests.pretend import session
from tests.pretend.library import ENTRIES, FOLDERS, objects
from tests.pretend.session import MATRIX, SCHEDULES, WIDE, Room, count_outcomes, run_short
from tests.pretend.torch_cuda import Settings

# A kernel is 10 to 120 kB of code per architecture: raise this number where a new one pays.
MAX_KERNELS = 178
KERNEL = re.compile(
    r"^[0-9a-f]* [WwTt] (?:void )?emb::cuda::(\w+_kernel(?:<[^(]*>)?)\([^{\n]*$", re.M
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the plugin is off where a GPU is")
@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch built without CUDA")
def test_short_set_passes(capfd: pytest.CaptureFixture[str]) -> None:
    status = run_short([], {})
    output, errors = capfd.readouterr()
    assert status == 0, output[-20_000:] + errors[-2_000:]


def test_every_kernel_is_compiled_once() -> None:
    """Entries share kernels by `extern template`; a copy in every file would grow the library."""
    _, entries = objects()
    kernels = Counter[str]()
    for path in entries:
        command = ["nm", "--demangle", "--defined-only", str(path)]
        symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        kernels.update(set(KERNEL.findall(symbols)))
    assert not [name for name, files in kernels.items() if files > 1]
    assert 100 < len(kernels) <= MAX_KERNELS


def test_every_file_of_entries_is_compiled() -> None:
    included = {path for unit in ENTRIES for path in files_of(unit, FOLDERS)}
    assert included >= {*(ROOT / "csrc").glob("*/*_cuda.cu")}


def test_the_matrix_names_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for environment in MATRIX:
        with monkeypatch.context() as context:
            for name, value in environment.items():
                context.setenv(name, value)
            found.append(Settings.from_environment())
    # The order of threads is a setting of the emulation, the device one of the tests.
    assert len(set(found)) == len(MATRIX) - 2
    assert {f"{s.schedule}:{s.seed}" for s in found} >= {s for s in SCHEDULES if ":" in s}


def test_unknown_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBLIB_PRETEND_ALIGN", "middle")
    with pytest.raises(ValueError, match="'end' or 'start', got 'middle'"):
        Settings.from_environment()
    monkeypatch.setenv("EMBLIB_PRETEND_ALIGN", "start")
    monkeypatch.setenv("EMBLIB_PRETEND_SCHEDULE", "soon")
    with pytest.raises(ValueError, match="soon"):
        Settings.from_environment()


def test_outcomes_of_the_wide_set_are_counted() -> None:
    report = """<testsuites><testsuite>
      <testcase name="a" time="1.5"/><testcase name="b" time="2"/>
      <testcase name="c[cuda]" time="0"><skipped message="has no pages">E</skipped></testcase>
      <testcase name="d" time="1"><failure message="wrong">E</failure></testcase>
    </testsuite></testsuites>"""
    assert count_outcomes(report) == [
        "2 passed, 1 failure, 0 error, 1 skipped in 4 s",
        "skipped c[cuda]: has no pages",
    ]


def test_tests_that_are_killed_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other sets that pass do not hide it, nor does the report of an earlier run."""
    files = [tmp_path / f"test_{name}.py" for name in ("killed", "passing")]
    for path, body in zip(files, ("__import__('signal').raise_signal(9)", "pass"), strict=True):
        path.write_text(f"def test_{path.stem}():\n    {body}\n")
    rooms = {path.stem: Room((str(path), "-pno:cacheprovider"), ()) for path in files}
    monkeypatch.setattr(session, "WIDE", rooms)
    monkeypatch.setattr(session, "WIDE_SETTINGS", ({},))
    monkeypatch.setattr(session, "FOLDER", tmp_path)
    (tmp_path / "wide-test_killed-0.xml").write_text("<testsuites/>")
    assert session.run_wide([]) == 128 + signal.SIGKILL
    lines = capfd.readouterr().out.splitlines()
    assert "test_killed: no report, exit status 137" in lines
    assert any(line.startswith("test_passing: 1 passed, 0 failure") for line in lines)


def test_rooms_of_the_wide_set_exist() -> None:
    for room in WIDE.values():
        assert all((ROOT / test).exists() for test in room.tests)
