"""scripts/tests_of.py finds the tests of a file, and says so where there are none."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def find_tests(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "tests_of.py"), *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_module_has_its_mirror() -> None:
    found = find_tests("emblib/sharding/all_to_all.py").stdout.split()
    assert found == ["tests/sharding/test_all_to_all.py"]


def test_a_helper_has_the_tests_that_import_it() -> None:
    found = find_tests("tests/sharding/worlds.py").stdout.split()
    assert "tests/sharding/test_all_to_all.py" in found


def test_native_code_has_the_tests_of_its_ops() -> None:
    found = find_tests("csrc/tbe/lookup.cuh").stdout.split()
    assert {"tests/ops/test_tbe.py", "tests/simt/test_tbe.py"} <= set(found)


def test_every_source_file_has_tests() -> None:
    names = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "emblib").rglob("*.py"))
    done = find_tests(*names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()


def test_a_file_that_is_not_there_is_an_error() -> None:
    done = find_tests("emblib/nowhere.py")
    assert done.returncode == 1
    assert "emblib/nowhere.py does not exist" in done.stderr
