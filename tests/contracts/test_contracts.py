"""Every cell of docs/contracts.md is what happens, and none is a silent wrong result."""

import pytest

from tests.contracts.operations import OPERATIONS
from tests.contracts.subjects import KINDS
from tests.contracts.table import PAGE, outcome, recorded

ROWS = {name: run for section in OPERATIONS.values() for name, run in section.items()}
CELLS = recorded(PAGE.read_text())


# Rows of operations that take a second each -> the kinds that are not left to `make nightly`: those
# whose lookups are part of a graph.
COMPILED = {
    "`torch.compile` (deferred)": ("plain", "tensor train", "collection"),
    "`module.compile()`": ("plain", "tensor train", "dynamic", "collection"),
}
ALL = [
    pytest.param(
        name,
        kind,
        id=f"{name}-{kind}",
        marks=() if kind in COMPILED.get(name, KINDS) else pytest.mark.slow,
    )
    for name in ROWS
    for kind in KINDS
]


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_a_cell(name: str, kind: str) -> None:
    assert outcome(ROWS[name], kind).outcome == CELLS[name][kind]


def test_the_page_has_these_rows() -> None:
    assert list(CELLS) == list(ROWS)
