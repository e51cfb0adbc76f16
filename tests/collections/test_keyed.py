"""Optimizers by name, alone and as one: states, stages of warm-up, clipping."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from emblib import TableBatchedEmbeddingBags, TableSpec, optim
from emblib.collections.optimizers import (
    CombinedOptimizer,
    FusedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)


def test_keyed_wrapper_is_its_optimizer() -> None:
    layer, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(layer.state_dict())
    keyed = KeyedOptimizerWrapper(dict(layer.named_parameters()), torch.optim.Adam)
    plain = torch.optim.Adam(twin.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.1) for o in (keyed, plain)]
    for _ in range(4):
        x = torch.randn(4, 3)
        for module, step, scheduler in zip((layer, twin), (keyed, plain), schedulers, strict=True):
            step.zero_grad()
            module(x).square().sum().backward()
            step.step()
            scheduler.step()
    assert torch.equal(layer.weight, twin.weight)
    state = copy.deepcopy(keyed.state_dict())
    assert set(state["state"]) == {"weight", "bias"}
    later = nn.Linear(3, 2)
    later.load_state_dict(layer.state_dict())
    loaded = KeyedOptimizerWrapper(dict(later.named_parameters()), torch.optim.Adam)
    loaded.load_state_dict(state)
    assert loaded.wrapped.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    x = torch.randn(4, 3)
    for module, step in ((later, loaded), (twin, plain)):
        step.zero_grad()
        module(x).square().sum().backward()
        step.step()
    assert torch.equal(later.weight, twin.weight)
    with pytest.raises(KeyError, match="states of parameters that are not here"):
        loaded.load_state_dict({**state, "state": {"x": {}}})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "make", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9), torch.optim.RMSprop]
)
def test_states_take_the_dtype_of_their_parameters_as_in_torch(
    make: Any, dtype: torch.dtype
) -> None:
    saved = KeyedOptimizerWrapper(dict(nn.Linear(3, 2).named_parameters()), make)
    saved.init_state()
    layer, twin = nn.Linear(3, 2, dtype=dtype), nn.Linear(3, 2, dtype=dtype)
    twin.load_state_dict(layer.state_dict())
    keyed, plain = (
        KeyedOptimizerWrapper(dict(layer.named_parameters()), make),
        make(twin.parameters()),
    )
    keyed.load_state_dict(saved.state_dict())
    plain.load_state_dict(saved.wrapped.state_dict())
    for module, optimizer in ((layer, keyed), (twin, plain)):
        module(torch.ones(4, 3, dtype=dtype)).square().sum().backward()
        optimizer.step()
    assert torch.equal(layer.weight, twin.weight)
    for name, value in keyed.wrapped.state[layer.weight].items():
        assert value.dtype == plain.state[twin.weight][name].dtype


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_step_is_loaded_to_where_the_kernel_reads_it(is_on_device: bool) -> None:
    saved = KeyedOptimizerWrapper(dict(nn.Linear(3, 2).named_parameters()), torch.optim.Adam)
    saved.init_state()
    layer = nn.Linear(3, 2, device="meta")  # as a GPU, of which there is none here
    keyed = KeyedOptimizerWrapper(
        dict(layer.named_parameters()), partial(torch.optim.Adam, capturable=is_on_device)
    )
    keyed.load_keyed_state(saved.state_dict()["state"])
    states = keyed.wrapped.state[layer.weight]
    assert states["step"].device.type == ("meta" if is_on_device else "cpu")
    assert states["exp_avg"].device.type == "meta"


def _wrapped(kind: str) -> KeyedOptimizer:
    """Return an optimizer of a layer, itself or in a wrapper."""
    names = dict(nn.Linear(3, 2).named_parameters())
    inner = KeyedOptimizerWrapper(names, partial(torch.optim.SGD, lr=0.1))
    kinds: dict[str, Any] = {
        "wrapper": lambda: inner,
        "clipping": lambda: GradientClippingOptimizer(inner),
        "warm-up": lambda: WarmupOptimizer(inner, [WarmupStage(max_iters=2)]),
        "combined": lambda: CombinedOptimizer([("a", inner)]),
        "fused": lambda: FusedOptimizer.of(
            TableBatchedEmbeddingBags([TableSpec(3, 4)], optim.SGD(0.1))
        ),
    }
    made: KeyedOptimizer = kinds[kind]()
    return made


@pytest.mark.parametrize("is_combined", [False, True])
def test_parameters_that_were_saved_without_a_state_lose_theirs(*, is_combined: bool) -> None:
    """As in torch: training that starts again from its first state has no old moments."""
    model = nn.Linear(2, 1)
    optimizer: Any = KeyedOptimizerWrapper(
        dict(model.named_parameters()), partial(torch.optim.Adam, lr=0.1)
    )
    if is_combined:
        optimizer = CombinedOptimizer([("a", optimizer)])
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    rounds = []
    for _ in range(2):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
        rounds.append(model.weight.tolist())
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("kind", ["wrapper", "clipping", "warm-up", "combined", "fused"])
def test_hooks_of_state_dicts_are_called_once_as_in_torch(kind: str) -> None:
    optimizer = _wrapped(kind)
    calls: list[str] = []

    def record(name: str, *_: Any) -> None:
        calls.append(name)

    def add_version(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "version": 2}

    def take_version(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append(f"version {state_dict.pop('version')}")
        return state_dict

    optimizer.register_state_dict_pre_hook(partial(record, "save"))
    optimizer.register_state_dict_post_hook(partial(record, "saved"))
    optimizer.register_state_dict_post_hook(add_version)
    optimizer.register_load_state_dict_pre_hook(take_version)
    optimizer.register_load_state_dict_post_hook(partial(record, "loaded"))
    state_dict = optimizer.state_dict()
    optimizer.load_state_dict(state_dict)
    assert calls == ["save", "saved", "version 2", "loaded"]
    assert state_dict["version"] == 2, "hooks get a shallow copy"
    copy.deepcopy(optimizer).state_dict()
    assert len(calls) == 4, "copies have no hooks"


def test_stages_of_an_iterator_are_used() -> None:
    layer = {"w": nn.Parameter(torch.ones(2))}
    inner = KeyedOptimizerWrapper(layer, partial(torch.optim.SGD, lr=1.0))
    stages: Any = iter([WarmupStage("constant", 2, 0.5)])
    assert WarmupOptimizer(inner, stages).param_groups[0]["lr"] == 0.5


def test_one_string_is_no_list_of_sparse_parameters() -> None:
    optimizer = KeyedOptimizerWrapper({"w": nn.Parameter(torch.ones(2))}, torch.optim.Adagrad)
    with pytest.raises(TypeError, match=r"must be names, got 'w': \['w'\]"):
        optimizer.init_state("w")


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_wrapper_has_the_groups_that_its_optimizer_loads(*, is_copied: bool) -> None:
    layer = nn.Linear(2, 1)
    saved = torch.optim.Adam(layer.parameters(), 0.5)
    layer(torch.ones(1, 2)).sum().backward()
    saved.step()
    wrapper = KeyedOptimizerWrapper(
        dict(layer.named_parameters()), partial(torch.optim.Adam, lr=0.1)
    )
    wrapper = copy.deepcopy(wrapper) if is_copied else wrapper
    combined = CombinedOptimizer([GradientClippingOptimizer(wrapper)])
    wrapper.wrapped.load_state_dict(saved.state_dict())
    assert combined.param_groups[0]["lr"] == 0.5
    assert wrapper.keyed_state()["weight"]["step"] == 1
    combined.param_groups[0]["lr"] = 0.25
    assert wrapper.wrapped.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("pair", [(), ("a",), (3, None)])
def test_combined_refuses_what_is_not_a_pair(pair: Any) -> None:
    with pytest.raises(TypeError, match=r"pairs \(prefix, optimizer\), got"):
        CombinedOptimizer([pair])


def test_combined_refuses_equal_names() -> None:
    parts = [
        KeyedOptimizerWrapper(dict(nn.Linear(1, 1).named_parameters()), torch.optim.Adam)
        for _ in range(2)
    ]
    with pytest.raises(ValueError, match="got 'weight' twice"):
        CombinedOptimizer(list(parts))
    both = CombinedOptimizer([("a", parts[0]), ("b", parts[1])])
    assert list(both.params) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    state = both.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [
        ["a.weight", "a.bias"],
        ["b.weight", "b.bias"],
    ]
    both.load_state_dict(state)
    with pytest.raises(KeyError, match="2 groups of parameters, this optimizer 1"):
        CombinedOptimizer([("a", parts[0])]).load_state_dict(state)


def test_combined_keeps_the_progress_of_each_warm_up() -> None:
    def warm() -> WarmupOptimizer:
        params = dict(nn.Linear(1, 1).named_parameters())
        inner = KeyedOptimizerWrapper(params, partial(torch.optim.SGD, lr=1.0))
        return WarmupOptimizer(inner, [WarmupStage(max_iters=9)], lr=1.0)

    first, second = warm(), warm()
    first.params = {f"first_{name}": p for name, p in first.params.items()}
    with pytest.raises(ValueError, match="got '__warmup' twice"):
        CombinedOptimizer([first, second])
    with pytest.raises(ValueError, match="in a WarmupOptimizer already"):
        WarmupOptimizer(GradientClippingOptimizer(second), [])
    first, targets = warm(), [warm(), warm()]
    first.step()
    state = CombinedOptimizer([("a", first), ("b", second)]).state_dict()
    CombinedOptimizer([("a", targets[0]), ("b", targets[1])]).load_state_dict(state)
    for source, target in zip((first, second), targets, strict=True):
        assert torch.equal(
            *(w.state_dict()["state"]["__warmup"]["warmup"] for w in (source, target))
        )


def test_combined_refuses_states_of_other_parameters() -> None:
    params = dict(nn.Linear(1, 1).named_parameters())
    inner = KeyedOptimizerWrapper(params, partial(torch.optim.SGD, lr=1.0))
    with pytest.raises(KeyError, match=r"that are not here: \['other'\]"):
        CombinedOptimizer([inner]).load_state_dict({"state": {"other": {"x": torch.ones(1)}}})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"policy": "poly", "value": -1.0}, "POLY needs value >= 0"),
        ({"value": float("nan")}, "value must be a finite number, got nan"),
        ({"max_iters": "4"}, "max_iters must be a finite number, got '4'"),
        ({"lr_scale": float("inf")}, "lr_scale must be a finite number, got inf"),
        ({"policy": "cosine_annealing_warm_restarts", "sgdr_period": 0}, "sgdr_period must be"),
    ],
)
def test_stages_without_a_rate_at_some_step(arguments: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        WarmupStage(**arguments)


def test_tracking_the_norm_does_not_change_gradients() -> None:
    layer = nn.Linear(2, 1)
    inner = KeyedOptimizerWrapper(dict(layer.named_parameters()), partial(torch.optim.SGD, lr=0.0))
    tracked = GradientClippingOptimizer(inner, track_grad_norm=True)
    layer.weight.grad, layer.bias.grad = torch.tensor([[1.0, torch.inf]]), torch.ones(1)
    tracked.step()
    assert tracked.last_total_grad_norm == torch.inf
    assert layer.weight.grad.tolist() == [[1.0, torch.inf]]
    assert layer.bias.grad.tolist() == [1.0]
    with pytest.raises(ValueError, match=r"max_gradient must be >= 0, got -1\.0"):
        GradientClippingOptimizer(inner, GradientClipping.NORM, -1.0)  # would turn gradients round
    with pytest.raises(TypeError, match="track_grad_norm must be True or False"):
        GradientClippingOptimizer(inner, track_grad_norm="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_gradient must be >= 0, got '1'"):
        GradientClippingOptimizer(inner, max_gradient="1")  # type: ignore[arg-type]
    for norm_type in (-1.0, 0.0, float("nan"), "2"):
        with pytest.raises(ValueError, match="norm_type must be above 0"):
            GradientClippingOptimizer(inner, norm_type=norm_type)


def _rates(stages: list[WarmupStage], steps: int) -> list[float]:
    layer = nn.Linear(1, 1)
    inner = KeyedOptimizerWrapper(dict(layer.named_parameters()), partial(torch.optim.SGD, lr=0.0))
    warm = WarmupOptimizer(inner, stages, lr=2.0)
    rates = [inner.param_groups[0]["lr"]]
    for _ in range(steps):
        warm.step()
        rates.append(inner.param_groups[0]["lr"])
    return rates


def test_no_optimizer_takes_groups_that_it_would_not_step() -> None:
    keyed = KeyedOptimizerWrapper(dict(nn.Linear(1, 1).named_parameters()), torch.optim.Adam)
    warm = WarmupOptimizer(keyed, [WarmupStage(max_iters=2)])
    for optimizer in (keyed, warm, CombinedOptimizer([keyed]), copy.deepcopy(keyed)):
        with pytest.raises(RuntimeError, match="KeyedOptimizerWrapper of their own"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert optimizer.group_names() == [["weight", "bias"]]


@pytest.mark.parametrize(
    ("stage", "wanted"),
    [
        (WarmupStage(WarmupPolicy.LINEAR, 2, 0.5), [1.0, 1.5, 2.0, 2.0]),
        (WarmupStage(WarmupPolicy.CONSTANT, 2, 0.25, 2.0), [1.0, 1.0, 1.0, 2.0]),
        (WarmupStage(WarmupPolicy.POLY, 2, 2.0, decay_iters=4), [2.0, 1.125, 0.5, 2.0]),
        (WarmupStage(WarmupPolicy.STEP, 3, 0.5), [2.0, 1.0, 0.5, 0.25]),
        (WarmupStage(WarmupPolicy.INVSQRT, 4), [2.0, 2.0, 2**0.5, 2 / 3**0.5]),
        (
            WarmupStage("cosine_annealing_warm_restarts", 2, 0.0, sgdr_period=2),
            [2.0, 1.0, 2.0, 2.0],
        ),
        (
            WarmupStage("interpolate", 2, 0.0, start_interpolating_iters=0, end_value=1.0),
            [0.0, 1.0, 2.0, 2.0],
        ),
        (WarmupStage("poly", 4, 0.5, decay_iters=2), [2.0, 2.0 * 0.5**0.5, 0.0, 0.0]),
        (
            WarmupStage("interpolate", 3, 0.5, start_interpolating_iters=1, end_value=1.0),
            [1.0, 1.0, 1.5, 2.0],
        ),
    ],
)
def test_stages_of_warm_up(stage: WarmupStage, wanted: list[float]) -> None:
    assert _rates([stage], 3) == pytest.approx(wanted)


def test_a_warm_up_of_other_stages_loads_nothing() -> None:
    def warm(*stages: WarmupStage) -> WarmupOptimizer:
        params = dict(nn.Linear(1, 1).named_parameters())
        inner = KeyedOptimizerWrapper(params, partial(torch.optim.SGD, lr=1.0, momentum=0.5))
        return WarmupOptimizer(GradientClippingOptimizer(inner), stages)

    saved, other = warm(WarmupStage(max_iters=1), WarmupStage(max_iters=9)), warm()
    for optimizer in (saved, other):
        optimizer.init_state()
    for _ in range(2):
        saved.step()
    saved.state[saved.params["bias"]]["momentum_buffer"].fill_(3.0)
    with pytest.raises(ValueError, match="at step 3 in stage 1, and this one has stages 0 to 0"):
        CombinedOptimizer([("a", other)]).load_state_dict(
            CombinedOptimizer([("a", saved)]).state_dict()
        )
    with pytest.raises(ValueError, match="stages 0 to 0"):
        other.load_state_dict(saved.state_dict())
    assert not other.state[other.params["bias"]]["momentum_buffer"].any()
    saved.load_state_dict(copy.deepcopy(saved.state_dict()))


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("clipping", list(GradientClipping))
def test_clipping(clipping: GradientClipping, *, by_closure: bool) -> None:
    layer = nn.Linear(2, 1, bias=False)
    inner = KeyedOptimizerWrapper(dict(layer.named_parameters()), partial(torch.optim.SGD, lr=1.0))
    clipped = GradientClippingOptimizer(inner, clipping, max_gradient=0.5)
    before = layer.weight.detach().clone()

    def compute() -> str:
        layer.weight.grad = torch.tensor([[3.0, 4.0]])
        return "loss"

    if by_closure:
        assert clipped.step(compute) == "loss"
    else:
        compute()
        clipped.step()
    bounds = {"norm": [[0.3, 0.4]], "value": [[0.5, 0.5]], "none": [[3.0, 4.0]]}
    torch.testing.assert_close(before - layer.weight.detach(), torch.tensor(bounds[clipping.value]))


def test_loading_copies_a_rate_that_is_a_tensor() -> None:
    """Schedulers write it in place, so two optimizers would share one rate."""
    one, other = (
        KeyedOptimizerWrapper(
            dict(nn.Linear(2, 2).named_parameters()), partial(torch.optim.Adam, lr=torch.tensor(lr))
        )
        for lr in (0.5, 0.25)
    )
    other.load_state_dict(one.state_dict())
    one.param_groups[0]["lr"].fill_(0.125)
    assert other.param_groups[0]["lr"] == 0.5
