"""Schedulers of torch on tables: the rates that updates use are those of torch.optim.

The oracle is the optimizer of torch on a parameter with the same rows, all of which are in every
batch, so that its dense updates and those of the rows of the batch are the same.
"""

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.collections.optimizers import (
    CombinedOptimizer,
    FusedOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)

ROWS, DIM, STEPS = 5, 2, 8
FEATURES = KeyedJaggedTensor(["f"], torch.arange(ROWS), lengths=torch.ones(ROWS, dtype=torch.int64))

OPTIMIZERS: dict[str, tuple[optim.Optimizer, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (optim.SGD(0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    "adam": (
        optim.Adam(0.5, weight_decay=optim.L2(0.1)),
        lambda p: torch.optim.Adam(p, lr=0.5, weight_decay=0.1),
    ),
    "adamw": (
        optim.Adam(0.5, weight_decay=optim.Decoupled(0.1)),
        lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.1),
    ),
    "adagrad": (optim.Adagrad(0.5, eps=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.5)),
}
SCHEDULERS: dict[str, Callable[..., Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.7),
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 4], 0.3),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.25, 3),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.2, 1.0, 5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5, 0.01),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 6, 2.0),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 0.5, 3, cycle_momentum=_cycles(o)),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.5, 20, cycle_momentum=_cycles(o)),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.6)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.6)], o
    ),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=4),
}
ORDERS = ("zbsS", "bsSz", "bszS", "bsS", "bS")
"""Of a step: zero_grad (z), backward (b), step (s), step of the scheduler (S)."""


def _cycles(optimizer: Any) -> bool:
    return "betas" in optimizer.param_groups[0]


class Run:
    """A table and its oracle, with the same gradients and schedule."""

    def __init__(self, name: str, scheduler: str, *, deferred: bool) -> None:
        ours, theirs = OPTIMIZERS[name]
        torch.manual_seed(0)
        self.model = EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, DIM, "t", ("f",))],
            optimizer=replace(ours, deferred=deferred),
        )
        self.rows = next(self.model.parameters())
        self.oracle = nn.Parameter(self.rows.detach().clone())
        self.optimizers = [FusedOptimizer.of(self.model), theirs([self.oracle])]
        self.schedules = [SCHEDULERS[scheduler](optimizer) for optimizer in self.optimizers]

    def resume(self, model: Any, optimizer: Any, schedule: Any) -> None:
        """Continue from the state dicts of another run of the tables."""
        self.model.load_state_dict(model)
        self.optimizers[0].load_state_dict(optimizer)
        self.schedules[0].load_state_dict(schedule)

    def state(self) -> tuple[Any, Any, Any]:
        parts = (self.model, self.optimizers[0], self.schedules[0])
        return copy.deepcopy(tuple(part.state_dict() for part in parts))

    def step(self, number: int, order: str) -> None:
        generator = torch.Generator().manual_seed(number)
        grad = torch.randn(ROWS, DIM, generator=generator)
        for what in order:
            if what == "b":
                (self.model(FEATURES).values() * grad).sum().backward()
            else:
                self._do(0, what, number)
        self.oracle.grad = grad
        self._do(1, "s", number)
        self._do(1, "S", number)

    def _do(self, side: int, what: str, number: int) -> None:
        optimizer, schedule = self.optimizers[side], self.schedules[side]
        if what == "S":
            metric = (float(number % 3),) if "Plateau" in type(schedule).__name__ else ()
            schedule.step(*metric)
        elif what == "s":
            optimizer.step()
        else:
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about the order of calls
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_use_the_rates_of_torch(name: str, scheduler: str) -> None:
    for deferred in (False, True):
        orders = ORDERS[:3] if deferred else ORDERS
        for order in orders if name == "sgd" else orders[-1:]:
            run = Run(name, scheduler, deferred=deferred)
            for number in range(STEPS):
                run.step(number, order)
            assert torch.allclose(run.rows, run.oracle, atol=1e-5), (order, deferred)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_resumed_run_uses_the_same_rates(scheduler: str) -> None:
    for name, order in (("adam", "bsS"), ("sgd", "zbsS"), ("adagrad", "bS")):
        one = Run(name, scheduler, deferred=False)
        for number in range(STEPS // 2):
            one.step(number, order)
        two = Run(name, scheduler, deferred=False)
        two.resume(*one.state())
        for number in range(STEPS // 2, STEPS):
            one.step(number, order)
            two.step(number, order)
        assert torch.allclose(one.rows, one.oracle, atol=1e-5)
        assert torch.equal(one.rows, two.rows)
        assert two.optimizers[0].param_groups[0]["lr"] == one.optimizers[0].param_groups[0]["lr"]


def test_a_momentum_that_tables_do_not_have() -> None:
    """The default of the scheduler warns once; the group does not claim a momentum."""
    optimizer = FusedOptimizer.of(_bags(optim.SGD(0.5)))
    with pytest.warns(UserWarning, match="SGD of tables has no momentum"):
        schedule = schedulers.OneCycleLR(optimizer, 0.5, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["momentum"] == 0.0
    with pytest.raises(ValueError, match=r"momentum=0.9 has no effect on tables with SGD"):
        optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        schedulers.CyclicLR(FusedOptimizer.of(_bags(optim.Adagrad(0.5))), 0.1, 0.5)
    lars = FusedOptimizer.of(_bags(optim.LARS(0.5)))
    schedulers.CyclicLR(lars, 0.1, 0.5, base_momentum=0.7)
    assert lars.param_groups[0]["momentum"] == 0.9


def _bags(optimizer: optim.Optimizer, rows: int = ROWS) -> TableBatchedEmbeddingBags:
    return TableBatchedEmbeddingBags([TableSpec(rows, DIM, "t")], optimizer)


def _used(bags: TableBatchedEmbeddingBags) -> float:
    """Return the rate of one backward, with SGD."""
    before = bags.weights.detach().clone()
    bags(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
    return round(float((before - bags.weights.detach()).view(-1, DIM)[1, 0]), 4)


def test_groups_show_what_modules_have() -> None:
    """Set or loaded before or after the optimizer is made, in several optimizers at once."""
    bags = _bags(optim.SGD(0.5))
    one, two = FusedOptimizer.of(bags), FusedOptimizer.of(bags)
    bags.set_learning_rate(0.25)
    rates = [o.param_groups[0]["lr"] for o in (one, two)]
    assert rates == [0.25, 0.25]
    two.param_groups[0]["lr"] = 0.125
    assert (one.param_groups[0]["lr"], _used(bags)) == (0.125, 0.125)
    other = _bags(optim.SGD(0.5))
    other.set_learning_rate(0.0625)
    bags.load_state_dict(other.state_dict())
    assert (one.param_groups[0]["lr"], _used(bags)) == (0.0625, 0.0625)
    bags.reset_parameters()
    assert (one.param_groups[0]["lr"], _used(bags)) == (0.5, 0.5)


def test_loaded_numbers_stay_when_another_is_set() -> None:
    """Not only the rate: eps, betas and the decay of the checkpoint act, and are shown."""
    saved = _bags(optim.Adam(0.5, (0.5, 0.75), 0.25, weight_decay=optim.Decoupled(0.125)))
    bags = _bags(optim.Adam(0.1))
    optimizer = FusedOptimizer.of(bags)
    bags.load_state_dict(saved.state_dict())
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert group.pop("maximize") is False
    assert group == {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.25, "weight_decay": 0.125}
    optimizer.param_groups[0]["betas"] = (0.25, 0.75)
    assert bags.hyperparams.tolist() == [*saved.hyperparams.tolist()[:5], 0.25, 0.75, 0.25]


def test_modules_of_one_group_that_were_set_one_by_one() -> None:
    model = nn.ModuleList([_bags(optim.SGD(0.5)), _bags(optim.SGD(0.5))])
    optimizer = FusedOptimizer.of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bags in model:
            bags.set_learning_rate(0.25)  # as loading does, module by module
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.25
        model[1].set_learning_rate(0.125)
    with pytest.warns(UserWarning, match=r"different hyperparameters, {'lr': \[0.125, 0.25\]}"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    assert [_used(bags) for bags in model] == [0.25, 0.25]


def test_ways_to_write_a_group() -> None:
    bags = _bags(optim.SGD(0.5))
    optimizer = FusedOptimizer.of(bags)
    group = optimizer.param_groups[0]
    group.update(lr=0.25)
    assert _used(bags) == 0.25
    group |= {"lr": torch.tensor(0.125)}
    assert _used(bags) == group["lr"] == 0.125
    assert type(group["lr"]) is float
    assert group.setdefault("note", "kept") == group.pop("note") == "kept"
    for change in (lambda: group.pop("lr"), lambda: group.clear(), group.popitem):
        with pytest.raises(ValueError, match="cannot be removed"):
            change()
    with pytest.raises(ValueError, match="finite number >= 0"):
        group.update(weight_decay=0.5, lr=-1.0)
    assert (group["lr"], group["weight_decay"], bags.optimizer.weight_decay) == (0.125, 0.0, None)
    optimizer.param_groups = [{**group, "lr": 0.0625}]  # connected again by step and zero_grad
    optimizer.step()
    assert _used(bags) == 0.0625
    optimizer.param_groups[0]["lr"] = 0.5
    assert _used(bags) == 0.5


def test_combined_with_warm_up() -> None:
    bags, layer = _bags(optim.SGD(0.5)), nn.Linear(DIM, 1)
    warm = WarmupOptimizer(FusedOptimizer.of(bags), [WarmupStage(WarmupPolicy.LINEAR, 2, 0.0)])
    dense = KeyedOptimizerWrapper(
        dict(layer.named_parameters()), lambda p: torch.optim.SGD(p, lr=1.0)
    )
    both = CombinedOptimizer([("tables", warm), ("dense", dense)])
    used = []
    for _ in range(3):
        used.append(_used(bags))
        both.step()
    assert used == [0.0, 0.25, 0.5]
    for group in both.param_groups:
        group["lr"] = 0.125
    assert _used(bags) == 0.125
    adams = CombinedOptimizer([("a", FusedOptimizer.of(_bags(optim.Adam(0.5))))])
    schedulers.OneCycleLR(adams, 0.5, 10)  # finds betas


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_copies_of_an_optimizer_act_on_copies_of_its_tables() -> None:
    bags = _bags(optim.SGD(0.5))
    model, both = bags, CombinedOptimizer([FusedOptimizer.of(bags)])
    schedulers.ExponentialLR(both, 0.5)
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        twin, optimizer = copied((model, both))
        optimizer.param_groups[0]["lr"] = 0.125
        assert (_used(twin), _used(bags)) == (0.125, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        twin.set_learning_rate(0.25)
        assert optimizer.param_groups[0]["lr"] == 0.25
    assert both.param_groups[0]["lr"] == 0.5
    plain = copy.deepcopy(both.state_dict()["param_groups"][0])
    plain["lr"] = 1.0  # of no tables
    assert _used(bags) == 0.5


ACTING = {
    "weight_decay of SGD": ("weight_decay", 0.25, optim.SGD(0.5), torch.optim.SGD, {}),
    "weight_decay of Adam": ("weight_decay", 0.25, optim.Adam(0.5), torch.optim.Adam, {}),
    "weight_decay of AdamW": (
        "weight_decay",
        0.25,
        optim.Adam(0.5, weight_decay=optim.Decoupled(0.5)),
        torch.optim.AdamW,
        {"weight_decay": 0.5},
    ),
    "weight_decay of Adagrad": (
        "weight_decay",
        0.25,
        optim.Adagrad(0.5, 1e-10),
        torch.optim.Adagrad,
        {},
    ),
    "eps": ("eps", 0.25, optim.Adam(0.5), torch.optim.Adam, {}),
    "betas": ("betas", (0.25, 0.5), optim.Adam(0.5), torch.optim.Adam, {}),
    "maximize of SGD": (
        "maximize",
        True,
        optim.SGD(0.5, weight_decay=optim.L2(0.25)),
        torch.optim.SGD,
        {"weight_decay": 0.25},
    ),
    "maximize of Adam": ("maximize", True, optim.Adam(0.5), torch.optim.Adam, {}),
    "decoupled_weight_decay": (
        "decoupled_weight_decay",
        True,
        optim.Adam(0.5, weight_decay=optim.L2(0.25)),
        torch.optim.Adam,
        {"weight_decay": 0.25},
    ),
}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("case", ACTING)
def test_entries_act_as_in_torch(case: str, deferred: bool) -> None:
    name, value, ours, make, arguments = ACTING[case]
    bags = _bags(replace(ours, deferred=deferred))
    oracle = nn.Parameter(bags.weights.detach().clone().view(ROWS, DIM))
    fused, theirs = FusedOptimizer.of(bags), make([oracle], lr=0.5, **arguments)
    for number in range(4):
        if number == 2:
            fused.param_groups[0][name] = theirs.param_groups[0][name] = value
        grad = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(number))
        (bags(torch.arange(ROWS), torch.arange(ROWS + 1)) * grad).sum().backward()
        fused.step()
        fused.zero_grad()
        oracle.grad = grad
        theirs.step()
    torch.testing.assert_close(bags.weights.detach().view(ROWS, DIM), oracle.detach())


REFUSED: dict[str, tuple[optim.Optimizer, Any]] = {
    "lr_decay": (optim.Adagrad(0.5), 0.1),
    "amsgrad": (optim.Adam(0.5), True),
    "nesterov": (optim.SGD(0.5), True),
    "dampening": (optim.SGD(0.5), 0.1),
    "centered": (optim.SGD(0.5), True),
    "differentiable": (optim.SGD(0.5), True),
    "eta": (optim.SGD(0.5), 0.1),
    "l1": (optim.Adam(0.5), 0.1),
    "betas": (optim.SGD(0.5), (0.5, 0.5)),
    "weight_decay": (optim.FTRL(0.5), 0.1),
    "deferred": (optim.SGD(0.5), True),
    "rho": (optim.SGD(0.5), 0.9),
    "max_norm": (optim.RowwiseAdagrad(0.5), 0.1),
    "params": (optim.SGD(0.5), []),
}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("lr", "0.2", ValueError),
        ("lr", True, ValueError),
        ("lr", None, ValueError),
        ("decoupled_weight_decay", "yes", TypeError),
    ],
)
def test_texts_are_refused_as_numbers(name: str, value: Any, error: Any) -> None:
    bags = _bags(optim.Adam(0.5))
    hyper = bags.hyperparams.clone()
    with pytest.raises(error, match=rf"must be .*, got {value!r}"):
        FusedOptimizer.of(bags).param_groups[0].update({name: value})
    assert torch.equal(bags.hyperparams, hyper)


@pytest.mark.parametrize("name", REFUSED)
def test_entries_that_tables_cannot_follow_raise(name: str) -> None:
    optimizer, value = REFUSED[name]
    bags = _bags(optimizer)
    fused = FusedOptimizer.of(bags)
    before, hyper = dict(fused.param_groups[0]), bags.hyperparams.clone()
    with pytest.raises(ValueError, match=r"has no effect|kind of optimizer|deferred|parameters"):
        fused.param_groups[0].update({"lr": 0.25, name: value})
    assert dict(fused.param_groups[0]) == before
    assert torch.equal(bags.hyperparams, hyper)


def test_entries_as_tensors_and_of_wrong_classes() -> None:
    fused = FusedOptimizer.of(_bags(optim.Adam(0.5)))
    group = fused.param_groups[0]
    group["betas"] = torch.tensor([0.25, 0.5])
    assert group["betas"] == (0.25, 0.5)
    with pytest.raises(ValueError, match="weight_decay of Adam must be"):
        group["weight_decay"] = "heavy"


def test_entries_that_ask_for_nothing() -> None:
    """What torch's groups have too, and what users and schedulers note."""
    fused = FusedOptimizer.of(_bags(optim.Adam(0.5)))
    idle = {"foreach": True, "fused": None, "capturable": True, "maximize": False, "amsgrad": False}
    fused.param_groups[0].update(idle, differentiable=False, name="tables", initial_lr=0.5)
    assert fused.param_groups[0]["name"] == "tables"


def test_every_field_of_an_optimizer_acts() -> None:
    bags = _bags(optim.EnsembleRowwiseAdagrad(0.5))
    fused = FusedOptimizer.of(bags)
    fused.param_groups[0].update(swap_every=7, keep=0.25, max_gradient=0.5)
    assert bags.optimizer == optim.EnsembleRowwiseAdagrad(
        0.5, swap_every=7, keep=0.25, max_gradient=0.5
    )


def test_a_schedule_may_end_below_zero_by_a_rounding_error() -> None:
    bags = _bags(optim.SGD(0.1))
    fused = FusedOptimizer.of(bags)
    schedule = schedulers.LinearLR(fused, 1 / 3, 0.0, 22)
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    torch_schedule = schedulers.LinearLR(plain, 1 / 3, 0.0, 22)
    for _ in range(22):
        for optimizer, its_schedule in ((fused, schedule), (plain, torch_schedule)):
            optimizer.step()
            its_schedule.step()
    assert plain.param_groups[0]["lr"] < 0.0  # what tables refuse, were it the rate of a user
    assert fused.param_groups[0]["lr"] == bags.learning_rate == 0.0
    bags.set_learning_rate(-1e-17)
    assert bags.learning_rate == 0.0
    with pytest.raises(ValueError, match="learning rate must be a finite number >= 0, got -0"):
        fused.param_groups[0]["lr"] = -0.001


def test_a_group_shows_the_bound_of_gradients_that_its_module_sets() -> None:
    bags = _bags(optim.SGD(0.5))
    fused = FusedOptimizer.of(bags)
    assert "max_gradient" not in fused.param_groups[0]
    bags.set_hyperparameters(max_gradient=0.25)
    saved = fused.state_dict()
    assert saved["param_groups"][0]["max_gradient"] == 0.25
    bags.set_hyperparameters(max_gradient=None)
    assert fused.param_groups[0]["max_gradient"] is None
    fused.load_state_dict(saved)
    assert bags.optimizer.max_gradient == 0.25


def test_the_device_is_not_read_for_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycled betas and rates would wait for a GPU in every step."""
    bags = _bags(optim.Adam(0.5))
    fused = FusedOptimizer.of(bags)
    rate = property(lambda module: pytest.fail("the learning rate is read"))
    monkeypatch.setattr(TableBatchedEmbeddingBags, "learning_rate", rate)
    fused.param_groups[0].update(betas=(0.5, 0.75), lr=0.25)
    fused.param_groups[0]["eps"] = 0.5
    fused.step()
    fused.zero_grad()


def test_rates_in_a_compiled_step() -> None:
    """A graph reads rate, betas and decay from the module: none recompiles it."""
    bags = _bags(optim.Adam(0.5))
    twin, grad = copy.deepcopy(bags), torch.randn(ROWS, DIM)
    fused, eager = FusedOptimizer.of(bags), FusedOptimizer.of(twin)
    torch._dynamo.reset()
    from torch._dynamo.testing import CompileCounterWithBackend  # imports networkx

    counts = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(bags, backend=counts)
    for number in range(3):
        for optimizer, module in ((fused, compiled), (eager, twin)):
            change = {"lr": 0.5 / (1 + number), "betas": (0.1 * number, 0.9), "weight_decay": 0.1}
            optimizer.param_groups[0].update(change)
            (module(torch.arange(ROWS), torch.arange(ROWS + 1)) * grad).sum().backward()
    assert torch.equal(bags.weights, twin.weights)
    assert counts.frame_count == 1
