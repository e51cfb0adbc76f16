"""Every cell of docs/contracts.md is what happens, and none is a silent wrong result."""

import ast
import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import emblib
from emblib.sharding import checkpoints
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


# The page is of torch 2.13. One row has sparse gradients, whose norm torch computes from 2.14 on;
# before 2.13 torch refuses some kinds of another row (docs/building.md).
SPARSE_NORM = "`torch.nn.utils.clip_grad_norm_` (deferred)"
FAKE_FORWARD = "`FakeTensorMode` forward"


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_a_cell(name: str, kind: str) -> None:
    found, expected = outcome(ROWS[name], kind), CELLS[name][kind]
    if name == SPARSE_NORM and expected == RAISES and TorchVersion(torch.__version__) >= (2, 14):
        assert found.outcome == WORKS or "deferred=True" in found.reason
    elif name == FAKE_FORWARD and TorchVersion(torch.__version__) < (2, 13):
        assert found.outcome in (expected, RAISES)
    else:
        assert found.outcome == expected


MOVED = (
    "`.to(device)`, `.cpu()`",
    "`.half()`",
    "`.to('meta')`, then `to_empty` and `load_state_dict`",
)


@pytest.mark.parametrize("option", ["swap", "overwrite"])
@pytest.mark.parametrize("kind", KINDS)
def test_how_torch_converts_parameters_does_not_matter(
    kind: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"_{option}_module_params_on_conversion"
    monkeypatch.setattr(torch.__future__, name, True)
    for operation in MOVED:
        found, expected = outcome(ROWS[operation], kind), CELLS[operation][kind]
        assert (found.outcome, operation) == (expected, operation), found.reason
    assert getattr(torch.__future__, name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_device_of_torch_does_not_matter(kind: str, tmp_path: Path) -> None:
    subject, other, loaded, restored = (Subject(kind) for _ in range(4))
    use = Subject.step if subject.kind.is_trained else Subject.rows
    with torch.device("meta"):
        use(other)
        loaded.module.load_state_dict(other.module.state_dict())
        checkpoints.save({"model": other.module}, tmp_path / "step")
        checkpoints.load({"model": restored.module}, tmp_path / "step")
        copies = []
        if kind != "disk":  # files have one owner
            copies = [copy.deepcopy(other.module), pickle.loads(pickle.dumps(other.module))]
    use(subject)
    for each in (other, loaded, restored, *map(other.of, copies)):
        assert torch.equal(each.rows(), subject.rows())


def test_constructors_of_tensors_name_a_device() -> None:
    """Without one they follow torch's default device, where a user has set a GPU."""
    names = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"}
    names |= {"as_tensor", "asarray", "randperm", "tensor", "zeros"}
    package = Path(emblib.__file__).parent
    bad = []
    for file in package.rglob("*.py"):
        # Oracles compute where their arguments are; a metric has the device of torch's modules.
        if file.parent.name == "reference" or file.name == "metrics.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and (node.func.value.id, node.func.attr in names) == ("torch", True)
                and not {keyword.arg for keyword in node.keywords} & {"device", "out", None}
            ):
                bad.append(f"{file.relative_to(package)}:{node.lineno} {ast.unparse(node)}")
    assert not bad, "\n".join(bad)


def test_the_page_has_these_rows() -> None:
    assert list(CELLS) == list(ROWS)
