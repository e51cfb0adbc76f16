"""Every name of TorchRec that docs/torchrec.md lists: it works, differs as it says, or raises."""

from __future__ import annotations

import importlib
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from emblib import optim
from emblib.collections.optimizers import from_torch
from emblib.compat import torchrec, torchrec_names
from emblib.compat.torchrec_names import DIFFERS, MODULES, RAISES
from emblib.compat.torchrec_tree import TREE, iterate_names, status_of
from tests.compat import torchrec_probes_distributed
from tests.compat.peer import peer_module
from tests.compat.torchrec_probes import PROBES, Names, Probe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "torchrec.md"
PROBED = {name for names in PROBES for name in names}
ALL = {other for _, _, other in iterate_names()}


def module(path: str, root: str = TREE) -> Any:
    return importlib.import_module(f"{root}.{path}" if path else root)


def resolved(root: str = TREE) -> dict[str, Any]:
    """Each name's object, from the first module of the table that has it."""
    found: dict[str, Any] = {}
    for path, name, other in iterate_names():
        if other not in found:
            value = getattr(module(path, root), name, None)
            if value is not None:
                found[other] = value
    return found


def test_the_page_has_the_scoreboard() -> None:
    text = PAGE.read_text()
    assert torchrec_names.with_scoreboard(text) == text, (
        "write it again: python -m emblib.compat.torchrec_names docs/torchrec.md"
    )
    for _, name, _ in iterate_names():
        assert f"`{name}`" in text


def test_every_name_has_a_probe_or_raises() -> None:
    assert torchrec_probes_distributed.__name__
    assert ALL - RAISES.keys() == PROBED
    assert DIFFERS.keys() <= PROBED
    assert RAISES.keys() <= ALL
    assert not DIFFERS.keys() & RAISES.keys()


@pytest.mark.parametrize(("names", "run"), PROBES.items(), ids=lambda v: getattr(v, "__name__", ""))
def test_names_act(names: tuple[str, ...], run: Probe) -> None:
    rec = Names(resolved())
    run(rec)
    assert set(names) <= rec.used


@pytest.mark.parametrize(("names", "run"), PROBES.items(), ids=lambda v: getattr(v, "__name__", ""))
def test_names_that_work_do_what_the_real_ones_do(names: tuple[str, ...], run: Probe) -> None:
    peer_module("torchrec.sparse.jagged_tensor")
    rec = Names(resolved("torchrec"))
    if any(status_of(name) != "works" for name in names):
        pytest.skip("some of these names differ")
    run(rec)


def test_a_group_added_to_rowwise_adagrad_has_states() -> None:
    """TorchRec's raises KeyError in `step`."""
    made = torchrec.RowWiseAdagrad([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    added = nn.Parameter(torch.ones(1, 2))
    made.add_param_group({"params": [added], "initial_accumulator_value": 7.0})
    added.grad = torch.full((1, 2), 3.0)
    made.step()
    assert made.state[added]["sum"].item() == 16


ADAM_ARGUMENTS = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 0.01, "weight_decay": 0.5}
ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.01, "weight_decay": optim.Decoupled(0.5)}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("Adam", ADAM_ARGUMENTS, optim.Adam(**ADAM)),
        ("PartialRowWiseAdam", ADAM_ARGUMENTS, optim.PartialRowwiseAdam(**ADAM)),
        ("LAMB", ADAM_ARGUMENTS, optim.LAMB(**ADAM)),
        ("LAMB", {"lr": 0.1, "beta1": 0.8}, optim.LAMB(0.1, betas=(0.8, 0.999))),
        ("SGD", {"lr": 0.1, "momentum": 0, "weight_decay": 0}, optim.SGD(0.1)),
        ("RowWiseAdagrad", {"lr": 0.1, "beta1": 0.8}, optim.RowwiseAdagrad(0.1, eps=1e-10)),
    ],
)
def test_optimizers_accept_what_torchrec_hands_to_fbgemm(
    name: str, arguments: dict[str, Any], expected: optim.Optimizer
) -> None:
    """TorchRec hands them on; FBGEMM's Adam has no other decay than the decoupled one."""
    kind = getattr(torchrec, name)
    kind([nn.Parameter(torch.ones(2, 2))], **arguments)  # as torch's _apply_optimizer_in_backward
    assert from_torch(kind, arguments) == expected


@pytest.mark.parametrize("name", sorted(RAISES))
def test_names_raise_where_they_are_used(name: str) -> None:
    path, shown = next((path, n) for path, n, other in iterate_names() if other == name)
    kind = getattr(module(path), shown)
    for use in (lambda: kind(1, option=2), lambda: kind.SOMETHING, lambda: kind.apply(1)):
        with pytest.raises(NotImplementedError) as caught:
            use()
        assert RAISES[name] in str(caught.value)
        assert "EMBLIB_AS_FBGEMM=1" in str(caught.value)
    assert not isinstance(3, kind)
    assert typing.Optional[kind]  # noqa: UP045 what annotations of older code have
    assert kind[int] is kind


def test_all_names_are_in_the_root_as_well() -> None:
    for other, value in resolved().items():
        if other not in RAISES:
            assert getattr(torchrec, other) is value


def test_the_real_one_has_these_names() -> None:
    """Apart from those that the documentation of earlier versions has."""
    peer_module("torchrec.sparse.jagged_tensor")
    lacking = set()
    for path, name, _ in iterate_names():
        real = importlib.import_module(f"torchrec.{path}" if path else "torchrec")
        if not hasattr(real, name):
            lacking.add(f"{path}.{name}")
    assert lacking == {"distributed.sharding_plan.table_column_wise"}


def test_a_table_without_an_implementation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    from emblib.compat import torchrec_tree

    monkeypatch.setitem(MODULES, "optim.warmup", "WarmupOptimizer NoSuchName")
    with pytest.raises(ImportError, match=r"optim\.warmup\.NoSuchName"):
        torchrec_tree.make_modules(ModuleType("root"), {"WarmupOptimizer": object})
