"""The short path of dynamic tables: the bits of the long path, and when it is not taken."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import (
    CountMinSketch,
    DynamicEmbeddingBags,
    DynamicSpec,
    ExactCounter,
    FrequencyAdmission,
    Pooling,
    Precision,
    optim,
)
from emblib.dynamic import BackingStore, HostRows, one_op
from emblib.dynamic.short_calls import KeyedCalls
from emblib.ops import autograd
from tests.optimizer_cases import CASES as OPTIMIZER_CASES


def admits(keys: Tensor, counts: Tensor) -> Tensor:
    return (counts >= 2) | (keys % 3 == 0)


OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {},
    "mean": {"pooling": Pooling.MEAN},
    "none": {"pooling": Pooling.NONE},
    "half": {"precision": Precision(weights=torch.float16, output=torch.bfloat16)},
    "two features of a table": {"feature_tables": [0, 1, 0]},
    "default value": {"default_value": 3.0},
    "growth": {"initial_capacity": 32},
    "store": {"backing": BackingStore},
    "ttl": {"ttl": 2},
    "fallback rows": {"fallback_rows": 5, "eviction": "none"},
    "exact counts": {"admission": FrequencyAdmission(2, ExactCounter(100)), "fallback_rows": 5},
    "sketches": {"admission": FrequencyAdmission(2, CountMinSketch(300, halve_every=4)), "ttl": 2},
    "rule": {"admission": FrequencyAdmission(2, ExactCounter(100), rule=admits), "eviction": "lfu"},
}
FIELDS = ("default_value", "initial_capacity", "ttl", "fallback_rows", "eviction", "admission")


def make(device: torch.device, optimizer: optim.Optimizer, **options: Any) -> DynamicEmbeddingBags:
    fields = {name: options.pop(name) for name in FIELDS if name in options}
    if "backing" in options:
        options["backing"] = BackingStore(HostRows([500, 500]))
    specs = [DynamicSpec(96, 8, name=name, **fields) for name in ("a", "b")]
    return DynamicEmbeddingBags(specs, optimizer, seed=1, device=device, **options)


def is_short(out: Tensor) -> bool:
    assert out.grad_fn is not None
    return out.grad_fn.name() == "KeyedLookupBackward"


def trained(module: DynamicEmbeddingBags, *, short: bool) -> list[Tensor]:
    """Return outputs of pairs of forwards with their backwards after both, and what they leave."""
    device, results = module.hyperparams.device, []
    some = torch.Generator().manual_seed(3)
    bags = 5 * len(module.feature_tables)
    offsets = torch.arange(0, 4 * bags + 1, 4, device=device)
    for _ in range(3):
        outputs = []
        for _ in range(2):
            ids = torch.randint(0, 150, (4 * bags,), generator=some).to(device)
            weights = None
            if module.pooling is not Pooling.NONE:
                weights = torch.rand(4 * bags, generator=some).to(device)
            outputs.append(module(ids, offsets, weights))
            assert is_short(outputs[-1]) == short
        for out in outputs:
            out.backward(torch.randn(out.shape, generator=some).to(out))
        results += [out.detach() for out in outputs]
    results += [module.hyperparams.clone(), module.dropped_updates.clone()]
    return [*results, *(buffer.clone() for buffer in module.state.row_buffers)]


def successes_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets one entry per call of a function: whether it served the batch."""
    successes, function = list[bool](), getattr(one_op, name)

    def call(*arguments: Any) -> one_op.OneOpBatch | None:
        result: one_op.OneOpBatch | None = function(*arguments)
        successes.append(result is not None)
        return result

    monkeypatch.setattr(one_op, name, call)
    return successes


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_the_long_path(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = OPTIMIZER_CASES["rowwise_adagrad"]
    inserted = successes_of("insert_in_one_op", monkeypatch)
    at_once = trained(make(device, optimizer, **OPTIONS[name]), short=True)
    assert any(inserted) or device.type == "cuda"
    assert all(inserted) or name == "growth"
    monkeypatch.setattr(KeyedCalls, "can_insert", lambda *_: False)
    short = trained(make(device, optimizer, **OPTIONS[name]), short=True)
    monkeypatch.setattr(KeyedCalls, "can_serve", lambda *_: False)
    long = trained(make(device, optimizer, **OPTIONS[name]), short=False)
    assert all(torch.equal(a, b) for a, b in zip(at_once, long, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


def served(module: DynamicEmbeddingBags) -> list[Tensor]:
    """Return outputs of lookups without insertion between training steps, and what they leave."""
    device, results = module.hyperparams.device, []
    some = torch.Generator().manual_seed(4)
    bags = 5 * len(module.feature_tables)
    offsets = torch.arange(0, 4 * bags + 1, 4, device=device)
    for step in range(8):
        ids = torch.randint(0, 150, (4 * bags,), generator=some).to(device)
        weights = None
        if module.pooling is not Pooling.NONE and step % 2:
            weights = torch.rand(4 * bags, generator=some).to(device)
        pending = module(ids, offsets, weights)
        with torch.set_grad_enabled(step % 4 == 0):
            if step % 3:
                module.eval()
            elif step % 4 == 0:
                module.weights.requires_grad_(False)
            results.append(module((ids + 40) % 200, offsets, weights))
        module.weights.requires_grad_(True)
        module.train()
        pending.sum().backward()
    return [*results, module.hyperparams.clone(), module.weights.detach().clone()]


@pytest.mark.parametrize("name", OPTIONS)
def test_lookups_without_training_have_the_bits_of_the_long_path(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = successes_of("find_in_one_op", monkeypatch)
    short = served(make(device, optim.SGD(0.5), **OPTIONS[name]))
    assert found == [True] * (0 if device.type == "cuda" else 8)
    monkeypatch.setattr(KeyedCalls, "can_find", lambda *_: False)
    long = served(make(device, optim.SGD(0.5), **OPTIONS[name]))
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


def test_long_path_where_more_is_asked(device: torch.device) -> None:
    module = make(device, optim.SGD(1.0))
    ids, offsets = torch.arange(6, device=device), torch.tensor([0, 3, 6], device=device)
    assert is_short(module(ids, offsets))
    weights = torch.ones(6, device=device, requires_grad=True)
    assert not is_short(module(ids, offsets, weights))
    assert not is_short(module(ids, offsets, batch_sizes=[[1], [1]]))
    assert not is_short(autograd.for_update(module)(ids, offsets))
    external = make(device, optim.External())
    assert not is_short(external(ids, offsets))


def test_an_insertion_writes_detached_rows(device: torch.device) -> None:
    """The op of a training forward runs with gradients enabled."""
    module = make(device, optim.SGD(1.0))
    ids, offsets = torch.arange(6, device=device), torch.tensor([0, 3, 6], device=device)
    assert module(ids, offsets).requires_grad
    assert module._calls is not None
    buffers = module._calls.shared.row_buffers
    assert buffers[0].data_ptr() == module.weights.data_ptr()
    assert not any(buffer.requires_grad for buffer in buffers)


def test_calls_follow_the_module(device: torch.device) -> None:
    """Another rate, clipping, sign, dtype of output or memory, from the next forward on."""
    module = make(device, optim.SGD(1.0))
    ids, offsets = torch.arange(6, device=device), torch.tensor([0, 3, 6], device=device)

    def step() -> float:
        before = module.weights.detach().clone()
        out = module(ids, offsets)
        assert is_short(out)
        out.backward(torch.full_like(out, 0.5))
        return float((module.weights.detach() - before).abs().max())

    module(ids, offsets)
    assert step() == pytest.approx(0.5, abs=1e-5)
    module.set_hyperparameters(lr=2.0)
    assert step() == pytest.approx(1.0, abs=1e-5)
    module.set_hyperparameters(max_gradient=0.25)
    assert step() == pytest.approx(0.5, abs=1e-5)
    module.output_dtype = torch.float16
    assert module(ids, offsets).dtype == torch.float16
    module.output_dtype = torch.float32
    other = copy.deepcopy(module)
    before = other.weights.detach().clone()
    assert step() == pytest.approx(0.5, abs=1e-5)
    assert torch.equal(other.weights, before), "a copy has calls of its own"
    module.weights.data = module.weights.data.clone()
    assert step() == pytest.approx(0.5, abs=1e-5)
    assert module.step == 5


def test_a_scaled_gradient_that_overflowed_is_no_step(device: torch.device) -> None:
    module = make(device, optim.SGD(1.0))
    ids, offsets = torch.arange(6, device=device), torch.tensor([0, 3, 6], device=device)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    module(ids, offsets)
    for factor, moved in ((float("inf"), 0.0), (1.0, 1.0)):
        before = module.weights.detach().clone()
        out = module(ids, offsets)
        assert is_short(out)
        scaler.scale((out * factor).sum()).backward()
        change = (before - module.weights.detach()).nan_to_num(9.0).max()
        assert float(change) == pytest.approx(moved, abs=1e-5)
        assert module.grad_anchor.grad is not None
        assert bool(module.grad_anchor.grad.isinf()) == (moved == 0.0)
        module.grad_anchor.grad = None
    assert module.step == 1
