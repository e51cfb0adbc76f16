"""Migration: models train on as they would have, take the same calls, and can go back."""

import copy
import operator
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import emblib
from emblib import optim
from emblib.migration import MigratedEmbedding, MigratedEmbeddingBag, TorchWeight, Trained
from tests.interrupts import each_line

ROWS, DIM = 50, 8
IDS = torch.randint(ROWS, (12, 4), generator=torch.Generator().manual_seed(0))

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "decay": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.2),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}
FUSED = {"sgd", "adagrad"}
# Optimizers that allocate states at their first step, with all settings that add some.
WITH_LATER_STATES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adadelta, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
]


class Model(nn.Module):
    """Two tables, one of bags and one of single ids, and a linear layer."""

    def __init__(self, *, sparse: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        options: dict[str, Any] = {"sparse": sparse, "padding_idx": padding_idx}
        self.bags = nn.EmbeddingBag(ROWS, DIM, **options)
        self.items = nn.Embedding(ROWS, DIM, **options)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return one logit per line of ids."""
        return self.top(torch.cat([self.bags(ids), self.items(ids[:, 0])], 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Make training steps; the ids do not depend on the model."""
    for step in range(steps):
        optimizer.zero_grad()
        ids = IDS.roll(step, 0)[:8].to(next(model.parameters()).device)
        model(ids).square().mean().backward()
        optimizer.step()


def rows_of(model: Any) -> list[Tensor]:
    """Return the rows of both tables."""
    return [model.bags.weight.detach(), model.items.weight.detach()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_trains_on(name: str, device: torch.device) -> None:
    model = Model().to(device)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    migration = emblib.migrate(other, other_optimizer)
    assert [one.is_fused for one in migration.replaced] == [name in FUSED] * 2
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)
    for before, after in zip(rows_of(model), rows_of(other), strict=True):
        torch.testing.assert_close(after, before)
    assert all(d.output < 1e-6 and d.rows < 1e-6 for d in migration.check())
    migration.undo()
    assert type(other.bags) is nn.EmbeddingBag
    (group,) = other_optimizer.param_groups
    assert all(map(operator.is_, group["params"], other.parameters()))
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(after, before)
    with pytest.raises(RuntimeError, match="undone already"):
        migration.undo()


def test_sparse_adam_trains_on() -> None:
    """The counterpart adds eps elsewhere, so the rows are close, not equal."""
    model = Model(sparse=True)
    tables = [model.bags.weight, model.items.weight]
    optimizer, dense = (
        torch.optim.SparseAdam(tables, 0.01),
        torch.optim.SGD(model.top.parameters(), 0.0),
    )
    train(model, optimizer, 3)
    other, others = copy.deepcopy((model, [optimizer, dense]))
    migration = emblib.migrate(other, others)
    assert "eps" in migration.replaced[0].note
    assert not any(group["params"] for group in others[0].param_groups)
    train(model, optimizer, 5)
    train(other, others[1], 5)
    for before, after in zip(rows_of(model), rows_of(other), strict=True):
        torch.testing.assert_close(after, before, atol=1e-4, rtol=0)
    migration.undo()
    (state, _) = others[0].state.values()
    assert state["step"] == 8


def test_a_sparse_momentum_trains_on() -> None:
    """SGD's momentum of sparse gradients is a sparse tensor."""
    model = Model(sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, 2)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    migration = emblib.migrate(other, other_optimizer)
    assert migration.replaced[0].memory[0].states > 0
    assert all(d.output < 1e-6 and d.rows < 1e-6 for d in migration.check())
    train(model, optimizer, 2)
    train(other, other_optimizer, 2)
    migration.undo()
    train(model, optimizer, 2)
    train(other, other_optimizer, 2)
    for before, after in zip(rows_of(model), rows_of(other), strict=True):
        torch.testing.assert_close(after, before)


def test_an_optimizer_of_the_tables_is_chosen() -> None:
    """Moments of torch's Adam move into the table; `check` shows that its steps differ."""
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train(model, optimizer, 2)
    moments = optimizer.state[model.bags.weight]["exp_avg"].clone()
    migration = emblib.migrate(model, optimizer, tables=optim.Adam(0.01))
    table = model.bags.table
    assert torch.equal(table.table_optimizer_states()[0]["exp_avg"], moments)
    assert table.step == 2
    assert len(optimizer.param_groups[0]["params"]) == 2
    difference = migration.check()[0]
    assert difference.output < 1e-6
    assert difference.rows > 1e-4
    train(model, optimizer, 1)
    assert table.step == 3


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bags_take_the_same_calls(mode: str, dtype: torch.dtype, padding: int | None) -> None:
    for include_last_offset in (False, True):
        old = nn.EmbeddingBag(
            ROWS,
            DIM,
            mode=mode,
            dtype=dtype,
            padding_idx=padding,
            include_last_offset=include_last_offset,
        )
        model = nn.ModuleDict({"bags": copy.deepcopy(old)})
        emblib.migrate(model)
        new = model["bags"]
        assert isinstance(new, MigratedEmbeddingBag)
        ids = torch.tensor([3, 1, 4, 3, 3, 9])
        offsets = torch.tensor([0, 2, 2, 5, 6] if include_last_offset else [0, 2, 2, 5])
        calls: list[tuple[Any, ...]] = [
            (ids, offsets),
            (ids.view(2, 3),),
            (ids.int(), offsets.int()),
        ]
        if mode == "sum":
            calls.append((ids, offsets, torch.rand(6, dtype=dtype)))
        for call in calls:
            torch.testing.assert_close(new(*call).to(dtype), old(*call))
        with pytest.raises(ValueError, match=r"\[B, N\] without offsets"):
            new(ids)


@pytest.mark.parametrize("padding", [None, 3])
def test_embeddings_take_the_same_calls(padding: int | None) -> None:
    old = nn.Embedding(ROWS, DIM, padding_idx=padding)
    model = nn.ModuleDict({"rows": copy.deepcopy(old)})
    emblib.migrate(model)
    new = model["rows"]
    assert isinstance(new, MigratedEmbedding)
    for ids in (
        torch.tensor(5),
        torch.tensor([[3, 1], [4, 3]]),
        torch.empty(0, 2, dtype=torch.int),
    ):
        torch.testing.assert_close(new(ids), old(ids))


class Named(nn.Embedding):
    """A subclass."""


def with_hook(module: nn.Module) -> nn.Module:
    """Return a module with a hook."""
    module.register_forward_hook(lambda *_: None)
    return module


def with_gradient_hook(module: nn.Embedding) -> nn.Module:
    """Return a module whose weight has a hook, which a new table would not call."""
    module.weight.register_hook(lambda gradient: 2 * gradient)
    return module


def with_backward_pre_hook(module: nn.Module) -> nn.Module:
    """Return a module with a hook before its backward."""
    module.register_full_backward_pre_hook(lambda *_: None)
    return module


def with_padding_row(row: float) -> nn.Module:
    """Return an embedding whose padding row has been written."""
    module = nn.Embedding(ROWS, DIM, padding_idx=0)
    nn.init.constant_(module.weight, row)
    return module


def of_library(name: str, library: str) -> nn.Module:
    """Return a module with the name of a class of a library that is not installed."""
    return type(name, (nn.Module,), {"__module__": f"{library}.tables"})()


LEFT = {
    "emblib.compat.fbtt": lambda: of_library("TTEmbeddingBag", "tt_embeddings_ops"),
    "DynamicEmbLoad": lambda: of_library("BatchedDynamicEmbeddingTablesV2", "dynamicemb"),
    'mode="max"': lambda: nn.EmbeddingBag(ROWS, DIM, mode="max"),
    "max_norm": lambda: nn.Embedding(ROWS, DIM, max_norm=1.0),
    "scale_grad_by_freq": lambda: nn.Embedding(ROWS, DIM, scale_grad_by_freq=True),
    "torch.float64": lambda: nn.Embedding(ROWS, DIM, dtype=torch.float64),
    "Named is a subclass": lambda: Named(ROWS, DIM),
    "it has hooks": lambda: with_hook(nn.Embedding(ROWS, DIM)),
    "has hooks": lambda: with_gradient_hook(nn.Embedding(ROWS, DIM)),
    "hooks: remove": lambda: with_backward_pre_hook(nn.Embedding(ROWS, DIM)),
    "padding row": lambda: with_padding_row(1.0),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_has_no_counterpart_is_left(reason: str) -> None:
    module = LEFT[reason]()
    model = nn.ModuleDict({"table": module})
    weights = [*model.parameters(), nn.Parameter(torch.zeros(1))]
    migration = emblib.migrate(model, torch.optim.SGD(weights, 0.1))
    assert model["table"] is module
    (left,) = migration.left
    assert reason in left.reason
    assert f"left table: {left.reason}" in str(migration)


def test_a_tied_weight_is_left() -> None:
    model = nn.ModuleDict({"rows": nn.Embedding(ROWS, DIM), "top": nn.Linear(DIM, ROWS)})
    model["top"].weight = model["rows"].weight
    assert "tied" in emblib.migrate(model).left[0].reason


def test_a_module_that_occurs_twice_stays_one() -> None:
    shared = nn.EmbeddingBag(ROWS, DIM)
    model = nn.ModuleDict({"one": shared, "other": shared})
    migration = emblib.migrate(model)
    assert model["one"] is model["other"]
    assert migration.replaced[0].paths == ("one", "other")
    migration.undo()
    assert model["one"] is model["other"] is shared


def test_a_frozen_table_stays_frozen() -> None:
    model = Model()
    model.bags.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    before = model.bags.weight.clone()
    migration = emblib.migrate(model, optimizer)
    train(model, optimizer, 2)
    assert torch.equal(model.bags.weight, before)
    assert migration.check()[0].rows is None


def test_what_was_done_is_told() -> None:
    model = Model()
    text = str(emblib.migrate(model, torch.optim.Adagrad(model.parameters(), 0.1)))
    assert text.startswith("2 embeddings replaced, 0 left\n  bags: 50, 8; backward applies Adagrad")
    states = "1.6 kB + 1.6 kB states"
    sizes = f"4.8 kB (rows {states} + 1.6 kB gradient) -> 3.2 kB (rows {states})"
    assert sizes in text
    assert "looks all of them up in one kernel" in text


def test_an_old_state_dict_is_loaded() -> None:
    saved, model = Model(), Model()
    nn.init.normal_(saved.bags.weight)
    migration = emblib.migrate(model, torch.optim.SGD(model.parameters(), 0.1))
    assert "bags.weight" not in model.state_dict()
    migration.load_state_dict(saved.state_dict())
    assert all(map(torch.equal, rows_of(model), rows_of(saved)))
    live = Model()
    alias, before = live.state_dict(), copy.deepcopy(live.state_dict())
    its_optimizer = torch.optim.SGD(live.parameters(), 0.1)
    its = emblib.migrate(live, its_optimizer)
    train(live, its_optimizer, 1)
    its.load_state_dict(alias)
    assert torch.equal(live.bags.weight, before["bags.weight"])
    other = Model().top.state_dict(prefix="top.")
    migration.load_state_dict(other, strict=False)
    assert all(map(torch.equal, rows_of(model), rows_of(saved)))
    with pytest.raises(RuntimeError, match="Missing key"):
        migration.load_state_dict(other)
    assert isinstance(model.bags, MigratedEmbeddingBag)


def test_an_interrupted_load_leaves_the_new_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, model = Model(), Model()
    migration = emblib.migrate(model, torch.optim.SGD(model.parameters(), 0.1))
    before = copy.deepcopy(rows_of(model))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(migration.replaced[-1], "copy_values", interrupt)
        with pytest.raises(KeyboardInterrupt):
            migration.load_state_dict(saved.state_dict())
    assert all(map(torch.equal, rows_of(model), before))
    migration.load_state_dict(saved.state_dict())
    assert all(map(torch.equal, rows_of(model), rows_of(saved)))
    migration.undo()


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_a_model_loads_an_old_state_dict_itself(name: str) -> None:
    saved, model = Model(), Model()
    nn.init.normal_(saved.bags.weight)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 1)
    emblib.migrate(model, optimizer)
    states = {
        key: value.clone() for key, value in model.state_dict().items() if key.endswith(".sum")
    }
    assert len(states) == 2 * (name == "adagrad")
    result = model.load_state_dict(saved.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert all(map(torch.equal, rows_of(model), rows_of(saved)))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in states.items())


def test_a_penalty_on_the_weight_has_its_gradient() -> None:
    model, other = Model(), Model()
    optimizers = [OPTIMIZERS["adam"](one.parameters()) for one in (model, other)]
    emblib.migrate(model, optimizers[0])
    for one, optimizer in zip((model, other), optimizers, strict=True):
        (one(IDS).sum() + one.bags.weight.square().sum()).backward()
        optimizer.step()
    torch.testing.assert_close(model.bags.weight, other.bags.weight)


def test_a_migrated_module_has_the_attributes_of_its_source() -> None:
    model = Model(sparse=True, padding_idx=3)
    emblib.migrate(model)
    assert (model.bags.sparse, model.bags.max_norm, model.bags.padding_idx) == (True, None, 3)
    with pytest.raises(AttributeError, match=r"weight.data.copy_\(rows\)"):
        model.bags.weight = nn.Parameter(torch.zeros(ROWS, DIM))


def test_a_scheduler_is_warned_of() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert "a scheduler over" not in str(emblib.migrate(Model(), optimizer))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="a scheduler over SGD no longer sets the rates"):
        migration = emblib.migrate(model, optimizer)
    assert "a scheduler over SGD no longer sets the rates" in migration.warnings[1]
    fused = emblib.collections.optimizers.FusedOptimizer.of(model)
    torch.optim.lr_scheduler.StepLR(fused, 1, gamma=0.5)
    before = model.bags.weight.clone()
    for group in fused.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1)
    assert torch.equal(model.bags.weight, before)


def test_a_scheduler_without_a_mark_on_its_optimizer_is_warned_of() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.warns(UserWarning, match="a scheduler over SGD no longer sets the rates"):
        emblib.migrate(model, optimizer)
    assert scheduler.optimizer is optimizer


def test_a_scheduler_of_tables_with_gradients_reaches_them() -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emblib.migrate(model, optimizer)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("name", ["bags", "items"])
@pytest.mark.parametrize("unknown", [-1, -2, ROWS])
def test_unknown_ids_raise_as_before(unknown: int, name: str, padding: int | None) -> None:
    model = Model(padding_idx=padding)
    ids = torch.tensor([[1, unknown]])
    with pytest.raises((RuntimeError, IndexError)):
        getattr(model, name)(ids)
    emblib.migrate(model)
    module = getattr(model, name)
    with pytest.raises(RuntimeError, match=str(unknown)):
        module(ids)
    with FakeTensorMode() as mode:  # the ids cannot be read
        fake_ids = mode.from_tensor(ids)
        assert module._refuse_skipped_ids(fake_ids).shape == ids.shape
    module.table.bounds_check = emblib.BoundsCheck.IGNORE
    module(ids)


def test_what_torch_refuses_is_refused() -> None:
    bags, items = nn.EmbeddingBag(ROWS, DIM, mode="sum"), nn.Embedding(ROWS, DIM, padding_idx=3)
    modules = nn.ModuleList([bags, items])
    emblib.migrate(modules)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(ValueError, match=r"shape of the ids, got \(3, 2\) and \(2, 3\)"):
        modules[0](ids, per_sample_weights=torch.ones(3, 2))
    with pytest.raises((TypeError, RuntimeError)):
        modules[1](torch.tensor([True, False]))


def test_optimizers_in_backward_move_or_leave_the_table() -> None:
    model = Model()
    with_sgd, with_momentum = (
        torch.optim.SGD([model.bags.weight], 0.1),
        torch.optim.SGD([model.items.weight], 0.1, momentum=0.9),
    )
    model.bags.weight._in_backward_optimizers = [with_sgd]  # as torch marks it
    model.items.weight._in_backward_optimizers = [with_momentum]
    migration = emblib.migrate(model)
    assert [one.paths for one in migration.replaced] == [("bags",)]
    assert "SGD with its settings is applied in backward" in migration.left[0].reason
    assert len(with_sgd.param_groups[0]["params"]) == 1
    migration.undo()
    both = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)]
    del model.bags.weight._in_backward_optimizers
    assert "several optimizers train it" in emblib.migrate(model, both).left[0].reason


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_a_state_that_cannot_be_moved_changes_nothing(name: str) -> None:
    model = Model()
    kept, moved = (
        OPTIMIZERS[name](list(model.bags.parameters())),
        torch.optim.Adagrad(model.items.parameters(), 0.1),
    )
    moved.state[model.items.weight]["step"] = torch.tensor(-1.0)
    modules = model.bags, model.items
    with pytest.raises(ValueError, match="step must be >= 0"):
        emblib.migrate(model, [kept, moved])
    assert all(map(operator.is_, modules, (model.bags, model.items)))
    for optimizer, module in zip((kept, moved), modules, strict=True):
        assert optimizer.param_groups[0]["params"][0] is module.weight


def test_migrating_draws_no_random_numbers() -> None:
    rows = nn.Embedding(ROWS, DIM)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    emblib.migrate(nn.ModuleDict({"a": rows}))
    assert torch.equal(torch.rand(2), expected)


def test_recorded_lookups_are_measured() -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with emblib.TraceRecorder(model) as recorder:
        model(IDS)
    before = [rows.clone() for rows in rows_of(model)]
    migration = emblib.migrate(model, optimizer)
    speeds = migration.measure(recorder.trace, batch_size=4, rounds=3)
    assert [speed.path for speed in speeds] == ["bags", "items"]
    assert all(speed.lookup > 0 and speed.step is not None for speed in speeds)
    assert all(map(torch.equal, before, rows_of(model)))
    cost = migration.predict(recorder.trace, batch_size=4, rounds=2)
    assert cost.before == cost.after  # Adam of torch goes on
    assert cost.after.rows == sum(one.measured_nbytes for one in migration.replaced)
    with pytest.raises(ValueError, match="has no 99 samples"):
        migration.measure(recorder.trace, batch_size=99)
    for numbers in ({"batch_size": 0}, {"batch_size": 4, "rounds": 0}, {"batch_size": 4.0}):
        with pytest.raises((TypeError, ValueError), match=f"{[*numbers][-1]} must be"):
            migration.measure(recorder.trace, **numbers)


@pytest.mark.parametrize(
    ("old", "tables", "state"),
    [
        (torch.optim.Adagrad, optim.RowwiseAdagrad(0.1), "sum"),
        (torch.optim.Adam, optim.PartialRowwiseAdam(0.1), "exp_avg_sq"),
        (torch.optim.SparseAdam, optim.PartialRowwiseLAMB(0.1), "exp_avg_sq"),
    ],
)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_states_per_row_are_means(old: Any, tables: Any, state: str, num_steps: int) -> None:
    is_sparse = old is torch.optim.SparseAdam
    model = nn.ModuleList([nn.EmbeddingBag(10, 4, mode="sum", sparse=is_sparse)])
    optimizer = old(model.parameters(), 0.1)

    def train() -> None:
        optimizer.zero_grad()
        (model[0](torch.tensor([[1, 2]])) * torch.arange(4)).sum().backward()
        optimizer.step()

    for _ in range(num_steps):
        train()
    migration = emblib.migrate(model, optimizer, tables=tables)
    (states,) = model[0].table.table_optimizer_states()
    if num_steps:
        means = migration.replaced[0].weight.trained.state[state].mean(1)
        assert means.any()
        assert torch.equal(states[state], means)
    migration.check()
    (model[0](torch.tensor([[1, 2]])) * torch.arange(4)).sum().backward()
    means = states[state].clone()
    migration.undo()
    restored = optimizer.state[model[0].weight][state]
    assert restored.shape == (10, 4)
    assert torch.equal(restored, means[:, None].expand(10, 4))
    train()


def test_means_take_no_weights() -> None:
    model = nn.ModuleList([nn.EmbeddingBag(10, 4, mode="mean")])
    ids, weights = torch.tensor([[1, 2]]), torch.ones(1, 2)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="per_sample_weights"):
            model[0](ids, per_sample_weights=weights)
        emblib.migrate(model)


@pytest.mark.parametrize("name", ["momentum", "adagrad"])  # not fused, and fused
def test_an_interrupted_undo_is_repeated(name: str) -> None:
    def migrated() -> tuple[Model, torch.optim.Optimizer, emblib.Migration]:
        model = Model()
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, optimizer, 2)
        migration = emblib.migrate(model, optimizer)
        train(model, optimizer, 2)
        return model, optimizer, migration

    expected, optimizer, migration = migrated()
    migration.undo()
    train(expected, optimizer, 2)
    for attempt in each_line(step=17):
        model, optimizer, migration = migrated()
        with attempt:
            migration.undo()
        if not migration._is_undone:
            migration.undo()
        train(model, optimizer, 2)
        assert all(map(torch.equal, rows_of(model), rows_of(expected))), attempt.where
        assert len(optimizer.param_groups[0]["params"]) == 4


def test_undoing_keeps_the_mode() -> None:
    model = nn.ModuleList([nn.EmbeddingBag(10, 4)])
    migration = emblib.migrate(model)
    model.eval()
    migration.undo()
    assert not model[0].training


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="an embedding itself"):
        emblib.migrate(nn.Embedding(3, 2))
    with pytest.raises(TypeError, match="backward applies"):
        emblib.migrate(Model(), tables=optim.External())
    with pytest.raises(TypeError, match="backward applies"):
        emblib.migrate(Model(), tables="adam")
    with pytest.raises(TypeError, match="trace must be a LookupTrace"):
        emblib.migrate(Model()).measure("lookups.pt", batch_size=4)
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got the class Model"):
        emblib.migrate(Model)
    for wrong in (torch.optim.SGD, Model().parameters(), 0.1, [optim.SGD(0.1)]):
        with pytest.raises(TypeError, match=r"an optimizer of torch\.optim that trains the model"):
            emblib.migrate(Model(), wrong)


@pytest.mark.parametrize(("kind", "settings"), WITH_LATER_STATES)
def test_memory_has_the_states_of_the_first_step(kind: Any, settings: dict[str, Any]) -> None:
    model = Model()
    optimizer, weight = kind(model.parameters(), lr=0.01, **settings), model.bags.weight
    expected = TorchWeight(weight, Trained.of([optimizer], weight)).memory
    train(model, optimizer, 1)
    trained = Trained.of([optimizer], weight)
    assert trained is not None
    assert trained.state
    assert TorchWeight(weight, trained).memory == expected


EQUAL = re.findall(
    r"^\| `(\w+\(lr\))` \| `(optim\.\w+\(lr.*?\))`: equal",
    (Path(__file__).parents[1] / "docs/from_embedding_bag.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("size", [1.0, 1e-6], ids=str)
@pytest.mark.parametrize(("old", "new"), EQUAL, ids=[old for old, _ in EQUAL])
def test_counterparts_that_the_page_calls_equal_are(old: str, new: str, size: float) -> None:
    """With small gradients, too, which depend on `eps`."""
    bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
    table = emblib.TableBatchedEmbeddingBags(
        [emblib.TableSpec(ROWS, DIM)], eval(new, {"optim": optim, "lr": 0.1})
    )
    weight = table.table_weights()[0].copy_(bag.weight.detach())
    kind, _, _ = old.partition("(")
    optimizer = getattr(torch.optim, kind)(bag.parameters(), 0.1)
    gradient = size * torch.randn(len(IDS), DIM)
    for _ in range(3):
        optimizer.zero_grad()
        bag(IDS).backward(gradient)
        optimizer.step()
        table(IDS.flatten(), torch.arange(0, IDS.numel() + 1, IDS.shape[1])).backward(gradient)
    torch.testing.assert_close(weight, bag.weight.detach())


def test_the_page_calls_two_counterparts_equal() -> None:
    assert [old for old, _ in EQUAL] == ["SGD(lr)", "Adagrad(lr)"]
