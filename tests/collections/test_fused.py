"""Optimizers in backward and others: rates, states by name, and the parameters of each."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.collections.optimizers import (
    CombinedOptimizer,
    FusedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    from_fused_params,
    from_torch,
    in_backward_optimizer_filter,
)
from emblib.columns import Hyper
from tests.collections.cases import bag_configs, batch, dense, features_of

KINDS = ("plain", "tt", "dynamic", "plain")


class Model(nn.Module):
    """Tables and a dense layer."""

    def __init__(self, optimizer: optim.Optimizer | None, kinds: tuple[str, ...] = KINDS) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection(bag_configs(kinds), optimizer=optimizer)
        columns = self.sparse.groups.output_dim
        self.over = nn.Linear(columns, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """The mean of the layer's outputs."""
        return self.over(self.sparse(features).values()).square().mean()


def _batch() -> KeyedJaggedTensor:
    return batch(features_of(bag_configs(KINDS)), 4)


def _dense_part(model: Model) -> dict[str, nn.Parameter]:
    return dict(in_backward_optimizer_filter(model.named_parameters()))


def _combined(model: Model) -> CombinedOptimizer:
    over = KeyedOptimizerWrapper(_dense_part(model), partial(torch.optim.Adam, lr=0.01))
    return CombinedOptimizer([FusedOptimizer.of(model), over])


def _same(one: Model, two: Model) -> None:
    features = _batch()
    assert torch.equal(one.eval()(features), two.eval()(features))
    one.train()
    two.train()


def test_schedulers_change_the_rate_of_the_next_backward() -> None:
    """As many steps with the rate of each made by hand, on a copy."""
    model = Model(optim.SGD(0.5), ("plain", "plain"))
    other = copy.deepcopy(model)
    fused = FusedOptimizer.of(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(fused, 0.5)
    for step in range(3):
        features = batch(["f0", "g0", "f1"], 4)
        fused.zero_grad()
        model(features).backward()
        fused.step()
        scheduler.step()
        other.sparse.groups.groups[0].module.set_learning_rate(0.5 * 0.5**step)
        other(features).backward()
    for name in ("t0", "t1"):
        assert torch.equal(dense(model.sparse, name), dense(other.sparse, name))
    assert fused.param_groups[0]["lr"] == 0.5**4
    fused.zero_grad()
    assert model.sparse.groups.groups[0].module.learning_rate == 0.5**4


def test_numbers_other_than_the_rate() -> None:
    collection = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")], optimizer=optim.Adam(0.1))
    fused = FusedOptimizer.of(collection)
    assert fused.param_groups[0]["betas"] == (0.9, 0.999)
    fused.param_groups[0].update(betas=(0.8, 0.99), lr=torch.tensor(0.25))
    fused.step()
    module = collection.groups.groups[0].module
    assert module.optimizer == optim.Adam(0.25, betas=(0.8, 0.99))
    assert module.learning_rate == 0.25


@pytest.mark.parametrize(
    "optimizer", [optim.SGD(0.1), optim.Adam(0.1), optim.RowwiseAdagrad(0.1), optim.Adagrad(0.1)]
)
def test_saved_and_loaded_training_goes_on_as_if_nothing_had_been(
    optimizer: optim.Optimizer,
) -> None:
    one = Model(optimizer)
    step = _combined(one)
    for _ in range(2):
        step.zero_grad()
        one(_batch()).backward()
        step.step()
    step.param_groups[0]["lr"] = 0.3
    step.step()
    two = Model(optimizer)
    other = _combined(two)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    other.load_state_dict(copy.deepcopy(step.state_dict()))
    assert other.param_groups[0]["lr"] == pytest.approx(0.3)
    for _ in range(2):
        features = _batch()
        for model, stepper in ((one, step), (two, other)):
            stepper.zero_grad()
            model(features).backward()
            stepper.step()
        _same(one, two)


def test_states_by_name() -> None:
    model = Model(optim.RowwiseAdagrad(0.1))
    model(_batch()).backward()
    state = FusedOptimizer.of(model).state_dict()
    names = [
        "sparse.embedding_bags.t0.weight",
        *(f"sparse.embedding_bags.t1.cores.{k}" for k in range(3)),
        "sparse.embedding_bags.t2.weight",
        "sparse.embedding_bags.t3.weight",
    ]
    assert list(state["state"]) == names
    assert [group["params"] for group in state["param_groups"]] == [names]
    assert {k: set(v) for k, v in state["state"].items()} == {
        name: {"hyper"} if "t2" in name else {"sum", "hyper"} for name in names
    }
    assert state["state"][names[0]]["sum"].any()
    fused = FusedOptimizer.of(Model(optim.RowwiseAdagrad(0.1)))
    missing = {**state, "state": {k: v for k, v in state["state"].items() if "t1" not in k}}
    with pytest.raises(KeyError, match=r"lacks embedding_bags.t1.cores.0"):
        fused.load_state_dict(missing)
    wrong = copy.deepcopy(state)
    wrong["state"][names[-1]]["sum"] = torch.zeros(3)
    with pytest.raises(ValueError, match="must have the shape"):
        fused.load_state_dict(wrong)
    wrong = copy.deepcopy(state)
    wrong["state"][names[-1]]["hyper"].fill_(-1.0)
    with pytest.raises(ValueError, match="learning rate"):
        fused.load_state_dict(wrong)
    assert not any(v["sum"].any() for v in fused.state_dict()["state"].values() if "sum" in v)
    with pytest.raises(KeyError, match="other parameters or groups"):
        FusedOptimizer.of(nn.Linear(2, 2)).load_state_dict(state)


def test_a_group_for_equal_optimizers() -> None:
    configs = [
        EmbeddingBagConfig(9, 4, "a", optimizer=optim.SGD(1.0)),
        EmbeddingBagConfig(9, 4, "b", data_type=torch.float16),
        EmbeddingBagConfig(9, 4, "c"),
    ]
    fused = FusedOptimizer.of(EmbeddingBagCollection(configs, optimizer=optim.SGD(0.5)))
    assert fused.group_names() == [
        ["embedding_bags.a.weight"],
        ["embedding_bags.b.weight", "embedding_bags.c.weight"],
    ]
    assert [group["lr"] for group in fused.param_groups] == [1.0, 0.5]


def test_filter_parts_tables_from_the_rest() -> None:
    model = Model(optim.SGD(0.1))
    assert set(_dense_part(model)) == {"over.weight", "over.bias"}
    fused = dict(in_backward_optimizer_filter(model.named_parameters(), include=True))
    assert set(fused) == set(dict(model.named_parameters())) - {"over.weight", "over.bias"}
    assert set(_dense_part(Model(None))) == {n for n, _ in Model(None).named_parameters()}


@pytest.mark.parametrize(
    ("given", "arguments", "wanted"),
    [
        (torch.optim.SGD, {"lr": 0.02}, optim.SGD(0.02)),
        (torch.optim.Adam, {"lr": 0.02, "betas": [0.8, 0.9]}, optim.Adam(0.02, (0.8, 0.9))),
        (torch.optim.AdamW, {}, optim.Adam(1e-3, weight_decay=optim.Decoupled(0.01))),
        (
            torch.optim.Adagrad,
            {"weight_decay": 0.1},
            optim.Adagrad(0.01, 1e-10, weight_decay=optim.L2(0.1)),
        ),
        (optim.LAMB, {"lr": 0.02}, optim.LAMB(0.02)),
    ],
)
def test_classes_of_torch(given: type, arguments: dict, wanted: optim.Optimizer) -> None:
    assert from_torch(given, arguments) == wanted


def test_classes_of_torch_with_what_tables_do_not_have() -> None:
    with pytest.raises(ValueError, match=r"'momentum': 0.9"):
        from_torch(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    with pytest.raises(TypeError, match=r"torch.optim.SGD, Adagrad"):
        from_torch(torch.optim.RMSprop, {})


@pytest.mark.parametrize("before", [None, optim.Adam(0.1)])
def test_applied_in_backward(before: optim.Optimizer | None) -> None:
    """Tables and other parameters; weights and parameters stay what they were."""
    model, twin = Model(before), Model(optim.SGD(0.05))
    model(_batch())  # dynamic tables take in keys
    # Dynamic tables save the states of their optimizer as well, which is another one here.
    twin.load_state_dict({k: v for k, v in model.state_dict().items() if "exp_avg" not in k})
    steps = torch.optim.Adam(_dense_part(twin).values(), lr=0.05)
    parameters = dict(model.named_parameters())
    apply_optimizer_in_backward(torch.optim.SGD, model.sparse.parameters(), {"lr": 0.05})
    apply_optimizer_in_backward(torch.optim.Adam, model.over.parameters(), {"lr": 0.05})
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert not _dense_part(model)
    for _ in range(3):
        features = _batch()
        model(features).backward()
        twin(features).backward()
        steps.step()
        steps.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        _same(model, twin)
    with pytest.raises(TypeError, match="already has an optimizer"):
        apply_optimizer_in_backward(torch.optim.SGD, model.over.parameters(), {"lr": 0.1})


def test_applied_in_backward_before_there_is_memory() -> None:
    collection = EmbeddingBagCollection(bag_configs(KINDS), "meta")
    assert len(list(collection.parameters())) == 6
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.5})
    with pytest.raises(RuntimeError, match="tables on meta cannot be read"):
        FusedOptimizer.of(collection)
    saved = EmbeddingBagCollection(bag_configs(("plain",))).state_dict()
    with pytest.raises(RuntimeError, match="the table is on meta"):
        collection.load_state_dict(saved, strict=False)
    collection.to_empty(device="cpu").reset_parameters()
    collection(_batch()).values().sum().backward()
    assert all(p.grad is None for p in collection.parameters())
    assert len(FusedOptimizer.of(collection).params) == 6


def test_applied_in_backward_to_one_table() -> None:
    collection = EmbeddingCollection([EmbeddingConfig(9, 4, "a"), EmbeddingConfig(9, 4, "b")])
    handles = collection.embeddings
    apply_optimizer_in_backward(optim.SGD(0.5), [handles["a"].weight])
    out = collection(KeyedJaggedTensor(["a", "b"], torch.arange(4), None, torch.tensor([2, 2])))
    sum(jagged.values().sum() for jagged in out.values()).backward()
    assert handles["a"].weight.grad is None
    assert handles["b"].weight.grad is not None
    with pytest.raises(TypeError, match="for other parameters give a class"):
        apply_optimizer_in_backward(optim.SGD(0.5), nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match="are for a class, got the optimizer SGD"):
        apply_optimizer_in_backward(optim.SGD(0.5), [handles["b"].weight], {"lr": 0.1})
    parameters = list(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match="optimizer must be a class"):
        apply_optimizer_in_backward(torch.optim.SGD(parameters, 0.1), parameters)
    with pytest.raises(KeyError, match="there are no tables"):
        collection.set_optimizers({"c": optim.SGD(0.5)})
    with pytest.raises(TypeError, match="optimizers must be a dict"):
        collection.set_optimizers([optim.SGD(0.5)])


def test_a_refused_call_gives_no_parameter_an_optimizer() -> None:
    collection, layer = EmbeddingCollection([EmbeddingConfig(9, 4, "a")]), nn.Linear(1, 1)
    parameters = [layer.bias, layer.weight, *collection.parameters(), layer.weight]
    with pytest.raises(TypeError, match="already has an optimizer in backward"):
        apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})
    named = [*layer.named_parameters(), *collection.named_parameters()]
    assert len(list(in_backward_optimizer_filter(named))) == 3


def test_init_state_makes_no_gradients_of_tables_that_backward_updates() -> None:
    model = Model(optim.SGD(0.1), ("plain",))
    dense_part = KeyedOptimizerWrapper(_dense_part(model), torch.optim.Adam)
    CombinedOptimizer([FusedOptimizer.of(model), dense_part]).init_state()
    assert model.over.weight.grad is not None
    assert all(parameter.grad is None for parameter in model.sparse.parameters())


def test_states_of_bare_tables_that_are_missing() -> None:
    tables = TableBatchedEmbeddingBags([TableSpec(9, 4)], optimizer=optim.Adagrad(0.1))
    optimizer = FusedOptimizer.of(nn.ModuleDict({"tables": tables}))
    with pytest.raises(KeyError, match="the state of the optimizer lacks weights"):
        optimizer.load_keyed_state({})


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, optim.SGD(0.01)),
        ({"optimizer": "EXACT_ROWWISE_ADAGRAD", "eps": 1e-6}, optim.RowwiseAdagrad(0.01, 1e-6)),
        ({"optimizer": "exact_row_wise_adagrad"}, optim.RowwiseAdagrad(0.01)),
        (
            {"optimizer": "adam", "learning_rate": 0.1, "beta1": 0.5, "weight_decay": 0.1},
            optim.Adam(0.1, (0.5, 0.999), weight_decay=optim.Decoupled(0.1)),
        ),
        (
            {"optimizer": "exact_sgd", "gradient_clipping": True, "max_gradient": 2.0},
            optim.SGD(0.01, max_gradient=2.0),
        ),
        (
            {"optimizer": "exact_adagrad", "weight_decay": 0.1, "weight_decay_mode": 2},
            optim.Adagrad(0.01, weight_decay=optim.Decoupled(0.1)),
        ),
        ({"optimizer": "lars_sgd", "momentum": 0.5}, optim.LARS(0.01, momentum=0.5)),
        (
            {"optimizer": "lars_sgd", "weight_decay": 0.5},
            optim.LARS(0.01, weight_decay=optim.L2(0.5)),
        ),
        (
            {"optimizer": "exact_row_wise_adagrad", "weight_decay": 0.1, "weight_decay_mode": "L2"},
            optim.RowwiseAdagrad(0.01, weight_decay=optim.L2(0.1)),
        ),
        ({"optimizer": optim.LAMB(0.5), "learning_rate": 0.1}, optim.LAMB(0.1)),
    ],
)
def test_fused_params(params: dict, wanted: optim.Optimizer) -> None:
    made = from_fused_params({**params, "cache_load_factor": 0.1})
    assert made.optimizer == wanted
    assert made.table_arguments == {"cache_load_factor": 0.1}


def test_fused_params_that_are_refused() -> None:
    with pytest.raises(TypeError, match="gradient_clipping must be True or False, got 'no'"):
        from_fused_params({"gradient_clipping": "no"})
    with pytest.raises(ValueError, match="optimizer must be one of"):
        from_fused_params({"optimizer": "madgrad"})
    with pytest.raises(ValueError, match="momentum would have no effect on exact_sgd"):
        from_fused_params({"momentum": 0.5})
    with pytest.raises(ValueError, match="weight_decay_mode must be"):
        from_fused_params({"weight_decay": 0.1, "weight_decay_mode": "cowclip"})
    for optimizer in ("exact_sgd", "exact_adagrad", "exact_row_wise_adagrad"):
        with pytest.raises(ValueError, match=r"weight_decay=0.1 would have no effect on \w+ with"):
            from_fused_params({"optimizer": optimizer, "weight_decay": 0.1})
    with pytest.raises(ValueError, match="LARS has no decoupled weight decay"):
        from_fused_params({"optimizer": "lars_sgd", "weight_decay": 0.1, "weight_decay_mode": 2})
    with pytest.raises(ValueError, match=r"eps would have no effect on Adam\(lr=0.1\)"):
        from_fused_params({"optimizer": optim.Adam(0.1), "eps": 1e-3})


def test_warm_up_of_tables_goes_on_where_it_was_saved() -> None:
    stages = [WarmupStage(WarmupPolicy.LINEAR, 2, 0.0), WarmupStage("step", 4, 0.5)]
    made = [FusedOptimizer.of(Model(optim.SGD(0.1))) for _ in range(2)]
    warms = [WarmupOptimizer(optimizer, stages) for optimizer in made]
    for _ in range(3):
        warms[0].step()
    state = warms[0].state_dict()
    assert isinstance(warms[0], KeyedOptimizer)
    warms[1].load_state_dict(state)
    assert warms[1].param_groups[0]["lr"] == warms[0].param_groups[0]["lr"]
    for warm in warms:
        warm.step()
    assert warms[1].param_groups[0]["lr"] == warms[0].param_groups[0]["lr"] == 0.1 * 0.5**4
    given = WarmupOptimizer(FusedOptimizer.of(Model(optim.SGD(0.3))), stages[1:], lr=2.0)
    assert given.param_groups[0]["lr"] == 2.0
    both = CombinedOptimizer([warms[0]])
    keyed_state = warms[0].keyed_state()
    assert keyed_state.keys() == made[0].keyed_state().keys() == both.keyed_state().keys()
    both.load_keyed_state(keyed_state)
    assert keyed_state
    both.load_state_dict(both.state_dict())
    with pytest.raises(ValueError, match="must be > 0 and ascend"):
        WarmupOptimizer(warms[0], [stages[1], stages[0]])
    with pytest.raises(ValueError, match="INTERPOLATE needs"):
        WarmupStage("interpolate", 2)


SPOILT = {
    "state": {"sum": torch.zeros(2, 2)},
    "state on meta": {"sum": torch.zeros(9, 4, device="meta")},
    "lr": {"hyper": (Hyper.LEARNING_RATE, -1.0)},
    "step": {"hyper": (Hyper.STEP, float("nan"))},
}


@pytest.mark.parametrize(
    ("spoilt", "last"),
    [*((name, "collection") for name in SPOILT), ("lr", "bare"), ("step", "bare")],
)
def test_a_state_that_one_module_refuses_is_loaded_by_none(spoilt: str, last: str) -> None:
    """The last of a dense layer, a collection and another module of tables refuses its own."""

    def make() -> CombinedOptimizer:
        first, second = (
            EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")], optimizer=optim.Adagrad(0.1))
            for _ in range(2)
        )
        bare = TableBatchedEmbeddingBags([TableSpec(9, 4)], optim.Adagrad(0.1))
        modules = nn.ModuleDict({"a": first, "b": second if last == "collection" else bare})
        layer = dict(nn.Linear(2, 2).named_parameters())
        over = KeyedOptimizerWrapper(layer, partial(torch.optim.Adam, lr=0.5))
        over.init_state()
        return CombinedOptimizer([over, FusedOptimizer.of(modules)])

    optimizer, saved = make(), copy.deepcopy(make().state_dict())
    saved["param_groups"][0]["lr"] = 2.0
    for states in saved["state"].values():
        for name, value in states.items():
            value[...] = 3.0 if name != "hyper" else value
    last_states = list(saved["state"].values())[-1]
    for name, value in SPOILT[spoilt].items():
        if name == "hyper":
            last_states[name][value[0]] = value[1]
        else:
            last_states[name] = value
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"must (be|have)"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for name, states in after["state"].items():
        for key, value in states.items():
            assert torch.equal(value, before["state"][name][key]), (name, key)
