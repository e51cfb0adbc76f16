"""The lists of what only `make nightly` runs are complete, and each entry is of a test."""

import pytest

from tests import nightly
from tests.nightly import HERE, LEFT_OUT, MORE

LISTED = LEFT_OUT | MORE


def test_each_entry_has_a_reason() -> None:
    for entry, reason in LISTED.items():
        assert len(reason.split()) >= 4, f"{entry}: why?"


def test_each_entry_is_of_a_test(request: pytest.FixtureRequest) -> None:
    """Of the files of this session, where nothing selects some of their tests."""
    config, items = request.config, request.session.items
    selected = config.getoption("keyword") or config.getoption("markexpr")
    if selected or any("::" in word for word in config.args):
        pytest.skip("tests of a file are selected")
    paths = {item.path for item in items}
    matched = {name for item in items for name in nightly.names(item)}
    for entry in LISTED:
        path = HERE / entry.removesuffix(" (slow)").partition("::")[0]
        assert path.exists(), f"{entry}: there is no such file"
        assert entry in matched or path not in paths, f"{entry}: there is no such test"


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


def test_marks_follow_the_lists(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        named = set(nightly.names(item))
        assert (item.get_closest_marker("nightly") is not None) == bool(named & LEFT_OUT.keys())
        assert (item.get_closest_marker("more") is not None) == bool(named & MORE.keys())
