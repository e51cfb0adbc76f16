"""Every cell of docs/contracts.md is what happens, and none is a silent wrong result."""

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.contracts.operations import OPERATIONS
from tests.contracts.subjects import KINDS, Subject
from tests.contracts.table import PAGE, RAISES, WORKS, outcome, recorded

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


# The page is of torch 2.13; this row has sparse gradients, whose norm torch computes from 2.14 on.
SPARSE_NORM = "`torch.nn.utils.clip_grad_norm_` (deferred)"


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_a_cell(name: str, kind: str) -> None:
    found, expected = outcome(ROWS[name], kind), CELLS[name][kind]
    if name == SPARSE_NORM and expected == RAISES and TorchVersion(torch.__version__) >= (2, 14):
        assert found.outcome == WORKS or "deferred=True" in found.reason
    else:
        assert found.outcome == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_device_of_torch_does_not_matter(kind: str) -> None:
    subject, other = Subject(kind), Subject(kind)
    use = Subject.step if subject.kind.is_trained else Subject.rows
    with torch.device("meta"):
        use(other)
    use(subject)
    assert torch.equal(other.rows(), subject.rows())


def test_the_page_has_these_rows() -> None:
    assert list(CELLS) == list(ROWS)
