"""State dicts of torch.optim in a FusedOptimizer: a model that moves keeps its moments."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.collections.optimizers import CombinedOptimizer, FusedOptimizer, KeyedOptimizerWrapper
from emblib.sharding import RankGroup, row_wise, shard

SIZES = {"a": 4, "b": 6}
DIM = 2

CLASSES: dict[str, tuple[optim.Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (optim.SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.25, weight_decay=0.125)),
    "adagrad": (
        optim.Adagrad(0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.25, initial_accumulator_value=0.5),
    ),
    "adam": (
        optim.Adam(0.1, weight_decay=optim.Decoupled(0.5)),
        lambda p: torch.optim.Adam(p, lr=0.25, betas=(0.5, 0.75), weight_decay=0.125),
    ),
    "adamw": (
        optim.Adam(0.1, weight_decay=optim.Decoupled(0.5)),
        lambda p: torch.optim.AdamW(p, lr=0.25, eps=0.125),
    ),
}


def _parameters() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(rows, DIM)) for rows in SIZES.values()]


def _grads(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(rows, DIM, generator=generator) for rows in SIZES.values()]


def _train_torch(parameters: list[nn.Parameter], optimizer: Any, *steps: int) -> None:
    for step in steps:
        for parameter, grad in zip(parameters, _grads(step), strict=True):
            parameter.grad = grad
        optimizer.step()


def _tables(optimizer: optim.Optimizer, kind: str = "plain") -> nn.Module:
    configs = [EmbeddingBagConfig(rows, DIM, name, (name,)) for name, rows in SIZES.items()]
    made = EmbeddingBagCollection(configs, optimizer=optimizer)
    if kind == "sharded":
        return shard(made, {"": {name: row_wise() for name in SIZES}}, RankGroup.single())
    return made


def _train_tables(model: nn.Module, optimizer: Any, *steps: int) -> None:
    ids = torch.cat([torch.arange(rows) for rows in SIZES.values()])
    lengths = torch.tensor([1] * 4 + [0, 0] + [1] * 6)  # 6 samples
    for step in steps:
        out = model(KeyedJaggedTensor(list(SIZES), ids, lengths=lengths)).values()
        wide = torch.zeros(6, 2 * DIM)
        wide[:4, :DIM], wide[:, DIM:] = _grads(step)
        (out * wide).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _copy(parameters: list[nn.Parameter], model: nn.Module) -> None:
    with torch.no_grad():
        for table, source in zip(model.parameters(), parameters, strict=True):
            table.copy_(source)


@pytest.mark.parametrize("kind", ["plain", "sharded"])
@pytest.mark.parametrize("named", [False, True], ids=["numbered", "named"])
@pytest.mark.parametrize("name", CLASSES)
def test_training_goes_on(name: str, named: bool, kind: str) -> None:
    ours, make = CLASSES[name]
    parameters = _parameters()
    given: Any = [(f"old.{i}", p) for i, p in enumerate(parameters)] if named else parameters
    theirs = make(given)
    _train_torch(parameters, theirs, 0, 1, 2)
    model = _tables(ours, kind)
    fused = FusedOptimizer.of(model)
    _copy(parameters, model)
    fused.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert fused.param_groups[0]["lr"] == 0.25
    _train_torch(parameters, theirs, 3, 4)
    _train_tables(model, fused, 3, 4)
    for table, wanted in zip(model.parameters(), parameters, strict=True):
        torch.testing.assert_close(table.detach(), wanted.detach())


def test_names_decide_where_they_are_the_same() -> None:
    """Parameters in another order than the tables, of shapes that would not tell."""
    configs = [EmbeddingBagConfig(4, DIM, name, (name,)) for name in "ab"]
    model = EmbeddingBagCollection(configs, optimizer=optim.Adagrad(0.1))
    fused = FusedOptimizer.of(model)
    names = fused.group_names()[0]
    parameters = [nn.Parameter(torch.zeros(4, DIM)) for _ in names]
    theirs = torch.optim.Adagrad([*zip(reversed(names), parameters, strict=True)], lr=0.5)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    theirs.step()
    fused.load_state_dict(theirs.state_dict())
    sums = [float(fused.state_dict()["state"][name]["sum"][0, 0]) for name in names]
    assert sums == [4.0, 1.0]


def test_a_model_of_tables_and_layers() -> None:
    """One optimizer of torch with two groups becomes a combined one."""
    parameters, layer = _parameters(), nn.Linear(2, 1)
    groups = [{"params": parameters}, {"params": list(layer.parameters()), "lr": 0.5}]
    theirs = torch.optim.Adam(groups, lr=0.25)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    _train_torch(parameters, theirs, 0)
    model, moved = _tables(optim.Adam(0.1)), copy.deepcopy(layer)
    dense = KeyedOptimizerWrapper(dict(moved.named_parameters()), torch.optim.Adam)
    fused = FusedOptimizer.of(model)
    CombinedOptimizer([("tables", fused), ("dense", dense)]).load_state_dict(theirs.state_dict())
    assert [group["lr"] for group in (*fused.param_groups, *dense.param_groups)] == [0.25, 0.5]
    states = fused.state_dict()["state"]["embedding_bags.b.weight"]
    assert torch.equal(states["exp_avg"], theirs.state[parameters[1]]["exp_avg"])
    bias = dense.wrapped.state[moved.bias]["exp_avg"]
    assert torch.equal(bias, theirs.state[layer.bias]["exp_avg"])


def test_a_table_that_was_never_stepped() -> None:
    parameters = _parameters()
    theirs = torch.optim.Adagrad(parameters, lr=0.25)
    fused = FusedOptimizer.of(_tables(optim.Adagrad(0.1)))
    state = theirs.state_dict()
    del state["state"][1]
    fused.load_state_dict(state)
    assert not fused.state_dict()["state"]["embedding_bags.b.weight"]["sum"].any()


def _stepped(make: Callable[..., torch.optim.Optimizer], sizes: tuple[int, ...]) -> dict[str, Any]:
    parameters = [nn.Parameter(torch.ones(rows, DIM)) for rows in sizes]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def _unequal_steps() -> dict[str, Any]:
    state = _stepped(lambda p: torch.optim.Adam(p, lr=0.1), (4, 6))
    state["state"][1]["step"] = torch.tensor(5.0)
    return state


REFUSED: dict[str, tuple[optim.Optimizer, Callable[[], dict[str, Any]], str]] = {
    "momentum": (
        optim.SGD(0.1),
        lambda: _stepped(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), (4, 6)),
        "no place for the states",
    ),
    "amsgrad": (
        optim.Adam(0.1),
        lambda: _stepped(lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), (4, 6)),
        "no place for the states",
    ),
    "lr_decay": (
        optim.Adagrad(0.1),
        lambda: _stepped(lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1), (4, 6)),
        "lr_decay=0.1 has no effect",
    ),
    "another class": (
        optim.Adam(0.1),
        lambda: _stepped(lambda p: torch.optim.RAdam(p, lr=0.1), (4, 6)),
        "does not fit Adam",
    ),
    "RMSprop": (
        optim.Adagrad(0.1),
        lambda: _stepped(lambda p: torch.optim.RMSprop(p, lr=0.1), (4, 6)),
        "does not fit Adagrad",
    ),
    "states of other rows": (
        optim.RowwiseAdagrad(0.1),
        lambda: _stepped(lambda p: torch.optim.Adagrad(p, lr=0.1), (4, 6)),
        "does not fit RowwiseAdagrad",
    ),
    "other shapes": (
        optim.Adam(0.1),
        lambda: _stepped(lambda p: torch.optim.Adam(p, lr=0.1), (6, 4)),
        "must have the shape",
    ),
    "other parameters": (
        optim.Adam(0.1),
        lambda: _stepped(lambda p: torch.optim.Adam(p, lr=0.1), (4, 6, 6)),
        r"has groups of \[3\] parameters",
    ),
    "no groups": (
        optim.Adam(0.1),
        lambda: {"state": {}, "param_groups": []},
        "has 0 groups of parameters, this optimizer 1",
    ),
    "different steps": (optim.Adam(0.1), _unequal_steps, "different numbers of steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_states_that_tables_cannot_continue(case: str) -> None:
    optimizer, make, message = REFUSED[case]
    fused = FusedOptimizer.of(_tables(optimizer))
    before = copy.deepcopy(fused.state_dict())
    with pytest.raises((KeyError, ValueError), match=message):
        fused.load_state_dict(make())
    after = fused.state_dict()
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert after["param_groups"] == before["param_groups"]


def test_a_bare_module_says_where_its_states_are() -> None:
    tables = [TableSpec(rows, DIM, name) for name, rows in SIZES.items()]
    fused = FusedOptimizer.of(TableBatchedEmbeddingBags(tables, optim.Adam(0.1)))
    with pytest.raises(KeyError, match=r"groups of \[2\] parameters"):
        fused.load_state_dict(_stepped(lambda p: torch.optim.Adam(p, lr=0.1), (4, 6)))
    with pytest.raises(ValueError, match=r"table_optimizer_states\(\)"):
        fused.load_state_dict(_stepped(lambda p: torch.optim.Adam(p, lr=0.1), (10,)))
