"""Print the test files of changed or named source files: `tests_of.py [--seconds N] [FILE ...]`.

Without arguments the files are those that differ from the last commit, or, in a clean tree, those
of the last commit. The test of a test file is that file. The tests of `emblib/dynamic/keys.py` are
`tests/dynamic/test_keys.py` and `tests/dynamic/test_keys_*.py`; where there are none, those that
import the module, or all of `tests/dynamic`. C++ and CUDA files of a feature have the tests of its
ops and of its emulated kernels. The tests of any other file (a page, a script, a configuration) are
those that name it.

With --seconds the files are those that together take so much processor time, the shortest first;
standard error names the others.

Exits with 1 and a message for a named file that does not exist or has no tests.
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USUAL_SECONDS = 2  # of a file that tests/whole_files.py does not list


def main(words: list[str]) -> None:
    """Print one test file per line."""
    seconds = 0
    if words[:1] == ["--seconds"]:
        seconds, words = int(words[1]), words[2:]
    source_files = [str(Path(name).resolve().relative_to(ROOT)) for name in words]
    test_files: set[str] = set()
    for name in source_files or changed_files():
        tests = tests_of(name)
        if source_files and not (ROOT / name).exists():
            sys.exit(f"tests_of: {name} does not exist")
        if source_files and not tests:
            sys.exit(f"tests_of: no test file mirrors, imports or names {name}")
        test_files |= tests
    chosen_tests = shortest_tests(seconds, test_files) if seconds else test_files
    if test_files - chosen_tests:
        other_tests = " ".join(sorted(test_files - chosen_tests))
        print(f"tests_of: beyond {seconds} s, so left to make test: {other_tests}", file=sys.stderr)
    print("\n".join(sorted(chosen_tests)))


def shortest_tests(seconds: int, tests: set[str]) -> set[str]:
    """Return the shortest test files, as many as take at most `seconds` of processor time in all.

    Times are those that tests/whole_files.py lists, or USUAL_SECONDS.
    """
    sys.path.insert(0, str(ROOT))
    from tests.whole_files import LONG

    total_seconds, chosen_tests = 0, set()
    for cost, test in sorted(
        (LONG.get(test.removeprefix("tests/"), USUAL_SECONDS), test) for test in tests
    ):
        total_seconds += cost
        if total_seconds > seconds:
            break
        chosen_tests.add(test)
    return chosen_tests


def changed_files() -> list[str]:
    """Return the files that differ from the last commit, else those of the last commit."""
    file_names = _git("diff", "--name-only", "HEAD") + _git(
        "ls-files", "--others", "--exclude-standard"
    )
    return file_names or _git("diff", "--name-only", "HEAD~1", "HEAD")


def tests_of(name: str) -> set[str]:
    """Return the test files of one file; all paths are relative to the root of the repository."""
    path = Path(name)
    if path.parts[0] == "tests" and path.name.startswith("test_"):
        return {name} if (ROOT / name).exists() else set()
    if path.parts[0] == "csrc":
        return _tests_of_feature(path)
    if path.suffix == ".py" and path.parts[0] in {"emblib", "experiments"}:
        return _mirroring_tests(path) or _importing_tests(_module(path)) or _tests_of_room(path)
    if path.suffix == ".py" and path.parts[0] == "tests":
        return _importing_tests(_module(path))
    return {test for test in _test_files() if path.name in _text(test)}


def _mirroring_tests(path: Path) -> set[str]:
    """Return tests/<room>/test_<file>.py; rooms of `experiments` are below tests/experiments."""
    room = path.parent if path.parts[0] == "experiments" else Path(*path.parts[1:-1])
    stem = room.name if path.stem == "__init__" else path.stem
    pattern = rf"{re.escape(str(Path('tests') / room))}/test_{re.escape(stem)}(_\w+)?\.py"
    return {test for test in _test_files() if re.fullmatch(pattern, test)}


def _tests_of_room(path: Path) -> set[str]:
    """Return all tests of the room of a module, or those that name the module."""
    top = "tests/experiments" if path.parts[0] == "experiments" else "tests"
    room = path.parts[1] if len(path.parts) > 2 else path.stem
    pattern = rf"{top}/({room}/(\w+/)*test_\w+|test_{room}(_\w+)?)\.py"
    tests = {test for test in _test_files() if re.fullmatch(pattern, test)}
    return tests or {test for test in _test_files() if re.search(rf"\b{path.stem}\b", _text(test))}


def _importing_tests(module: str) -> set[str]:
    """Return the tests that import a module, a name from it, or a helper that does."""
    package, _, leaf = module.rpartition(".")
    pattern = re.compile(
        rf"^\s*(from {re.escape(module)} import|import {re.escape(module)}\b"
        rf"|from {re.escape(package)} import .*\b{leaf}\b)",
        re.MULTILINE,
    )
    # Looking for the name alone first saves most of the time.
    texts = {test: _import_lines(test) for test in (*_test_files(), *_helper_files())}
    importing = {test for test, text in texts.items() if leaf in text and pattern.search(text)}
    helpers = importing & set(_helper_files())
    tests = importing - helpers
    for helper in helpers:
        tests |= _importing_tests(_module(Path(helper)))
    return tests


def _tests_of_feature(path: Path) -> set[str]:
    """Return the tests of the ops and of the emulated kernels of a C++ or CUDA file."""
    feature = path.parts[1] if len(path.parts) > 2 else path.stem
    rooms = ("tests/ops", "tests/simt")
    names = [f"{room}/test_{feature}{end}" for room in rooms for end in (".py", "_")]
    tests = {test for test in _test_files() if test.startswith(tuple(names))}
    return tests or {"tests/test_schema.py", "tests/simt/test_compile.py"}


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def _test_files() -> tuple[str, ...]:
    return tuple(name for name in _python_tests() if Path(name).name.startswith("test_"))


@cache
def _helper_files() -> tuple[str, ...]:
    return tuple(
        name
        for name in _python_tests()
        if not Path(name).name.startswith(("test_", "__init__", "conftest"))
    )


@cache
def _python_tests() -> tuple[str, ...]:
    return tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("*.py")))


@cache
def _import_lines(name: str) -> str:
    return "\n".join(re.findall(r"^\s*(?:from|import)\b.*", _text(name), re.MULTILINE))


@cache
def _text(name: str) -> str:
    return (ROOT / name).read_text()


def _git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    return [name for name in completed.stdout.splitlines() if name]


if __name__ == "__main__":
    main(sys.argv[1:])
