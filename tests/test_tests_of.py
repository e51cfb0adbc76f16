"""scripts/tests_of.py finds the tests of a file, and says so where there are none."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import tests_of

ROOT = Path(__file__).resolve().parents[1]


def test_a_module_has_its_mirror() -> None:
    """The script from the command line."""
    command = [sys.executable, "scripts/tests_of.py", "emblib/sharding/all_to_all.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "tests/sharding/test_all_to_all.py\n")


def test_a_helper_has_the_tests_that_import_it() -> None:
    found = tests_of.tests_of("tests/sharding/worlds.py")
    assert "tests/sharding/test_all_to_all.py" in found


def test_native_code_has_the_tests_of_its_ops() -> None:
    found = tests_of.tests_of("csrc/tbe/lookup.cuh")
    assert {"tests/ops/test_tbe.py", "tests/simt/test_tbe.py"} <= found


def test_every_source_file_has_tests() -> None:
    names = [str(path.relative_to(ROOT)) for path in (ROOT / "emblib").rglob("*.py")]
    assert [name for name in names if not tests_of.tests_of(name)] == []


def test_a_file_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=r"emblib/nowhere\.py does not exist"):
        tests_of.main(["emblib/nowhere.py"])


def test_what_takes_longer_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    names = ["tests/test_trace.py", "tests/test_columns.py", "tests/pretend/test_short_set.py"]
    tests_of.main(["--seconds", str(2 * tests_of.USUAL_SECONDS), *names])
    shown = capsys.readouterr()
    assert shown.out.split() == sorted(names[:2])
    assert shown.err.split()[-1] == names[2]
