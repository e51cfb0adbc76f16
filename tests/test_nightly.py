"""The lists of what only `make nightly` runs are complete, and each entry is of a test."""

import re
import runpy
from pathlib import Path

import pytest

from tests import nightly
from tests.nightly import COMMANDS, HERE, LEFT_OUT, MORE

LISTED = LEFT_OUT | MORE
OF_THE_LISTS = '-m "nightly or more"'  # the command that runs what they name


def test_each_entry_has_a_reason() -> None:
    for entry, reason in (LISTED | COMMANDS).items():
        assert len(reason.split()) >= 4, f"{entry}: why?"


def test_each_entry_is_of_a_test(request: pytest.FixtureRequest) -> None:
    matched = set()
    for path in sorted({_file_of(entry) for entry in LISTED}):
        assert path.exists(), f"{path}: there is no such file"
        for item in _tests_of(path, request.session):
            names = set(nightly.names(item))
            assert (item.get_closest_marker("nightly") is not None) == bool(names & LEFT_OUT.keys())
            assert (item.get_closest_marker("more") is not None) == bool(names & MORE.keys())
            matched |= names
    assert LISTED.keys() <= matched, f"no such tests: {sorted(LISTED.keys() - matched)}"


def test_each_command_of_the_night_is_listed() -> None:
    makefile = (HERE.parent / "Makefile").read_text()
    (recipe,) = re.findall(r"^nightly:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    commands = [part for part in recipe.replace("\\\n", " ").split(";") if "||" in part]
    found = [[name for name in (OF_THE_LISTS, *COMMANDS) if name in part] for part in commands]
    assert sorted(found) == sorted([name] for name in (OF_THE_LISTS, *COMMANDS))


def test_an_hour_of_fuzzing_is_within_the_limit_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBLIB_FUZZ_SECONDS", "3600")
    fuzz = runpy.run_path(str(HERE / "fuzz" / "test_fuzz.py"))
    marks = {mark.name: mark.args for mark in fuzz["test_calls_right_and_wrong"].pytestmark}
    groups = list(marks["parametrize"][1])
    assert marks["timeout"][0] > 3600 / len(groups) + fuzz["PATIENCE_SECONDS"]


def test_no_file_has_a_list_of_its_own() -> None:
    """Only this list decides what `make test` leaves out, and where it makes fewer cases."""
    here = {"nightly.py", "test_nightly.py"}
    counted = set()
    for path in sorted(HERE.rglob("*.py")):
        name, text = path.relative_to(HERE).as_posix(), path.read_text()
        if name in here:
            continue
        assert "EMBLIB_NIGHTLY" not in text, f"{name}: use tests/nightly.yaml"
        if "nightly.number(" in text:
            counted.add(name)
    assert counted == {entry.partition("::")[0] for entry in MORE}


def _file_of(entry: str) -> Path:
    return HERE / entry.removesuffix(" (slow)").partition("::")[0]


def _tests_of(path: Path, session: pytest.Session) -> list[pytest.Item]:
    """Collect the tests of a file, which need not be among those of this session."""
    items = list(session.genitems(pytest.Module.from_parent(session, path=path)))
    nightly.mark(items)
    return items
