"""Every cell of docs/contracts.md is what happens, and none is a silent wrong result."""

import pytest

from tests.contracts.operations import OPERATIONS, Operation
from tests.contracts.subjects import KINDS
from tests.contracts.table import PAGE, outcome, recorded

ROWS = {name: run for section in OPERATIONS.values() for name, run in section.items()}
CELLS = recorded(PAGE.read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "operation"), ROWS.items(), ids=list(ROWS))
def test_a_cell(name: str, operation: Operation, kind: str) -> None:
    assert outcome(operation, kind).outcome == CELLS[name][kind]


def test_the_page_has_these_rows() -> None:
    assert list(CELLS) == list(ROWS)
