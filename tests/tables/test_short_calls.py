"""The short path of calls: the bits of the long path, and when it is not taken."""

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

from emblib import (
    BoundsCheck,
    CacheConfig,
    CachePolicy,
    DynamicEmbeddingBags,
    DynamicSpec,
    Placement,
    Pooling,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTEmbeddingBag,
    TTSpec,
    optim,
    report_bounds_violations,
)
from emblib.ops import autograd
from emblib.tables import optimizer_hooks, quantized, short_calls
from emblib.tables.short_calls import ShortCalls
from tests.optimizer_cases import CASES as OPTIMIZER_CASES
from tests.tbe_cases import CASES, Case

BATCH = (torch.tensor([3, 1, 4, 1]), torch.tensor([0, 1, 3, 4, 4]))


def _module(**options: Any) -> TableBatchedEmbeddingBags:
    torch.manual_seed(0)
    tables = [TableSpec(9, 4), TableSpec(5, 8)]
    return TableBatchedEmbeddingBags(tables, optim.Adam(0.1), **options)


def _is_short(out: Tensor) -> bool:
    assert out.grad_fn is not None
    return out.grad_fn.name() == "ShortLookupBackward"


def _without_short_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShortCalls, "can_serve", lambda *_: False)


def _assert_same_bits(trained: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `trained` returns the same tensors with and without short calls."""
    short = trained()
    _without_short_calls(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(short, trained(), strict=True))


def _tensors(module: TableBatchedEmbeddingBags) -> list[Tensor]:
    """All that a step changes, copied."""
    changed = (module.weights, *module._states(), module.hyperparams, module.bounds_violations)
    return [tensor.detach().clone() for tensor in changed]


def _trained(
    case: Case,
    optimizer: optim.Optimizer,
    path: str,
    device: torch.device,
    check: BoundsCheck = BoundsCheck.IGNORE,
) -> list[Tensor]:
    """Outputs of some steps, and what they leave behind."""
    module = case.module(optimizer, device)
    module.bounds_check = check
    outputs = []
    for step in range(3):
        out = module(*replace(case, seed=case.seed + step).batch_of(device))
        assert out.grad_fn is None or out.grad_fn.name() == f"{path}LookupBackward"
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(step)).to(out))
        outputs.append(out.detach())
    with torch.no_grad():
        outputs.append(module(*case.batch_of(device)))
    return [*outputs, *_tensors(module)]


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("name", CASES)
def test_bits_of_any_batch(
    name: str, optimizer: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = _trained(CASES[name], OPTIMIZER_CASES[optimizer], "Short", device)
    _without_short_calls(monkeypatch)
    long = _trained(CASES[name], OPTIMIZER_CASES[optimizer], "Fused", device)
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


@pytest.mark.parametrize("check", [BoundsCheck.NONE, BoundsCheck.WARNING])
def test_bits_of_other_checks(
    check: BoundsCheck, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, optimizer = CASES["mixed_dims"], OPTIMIZER_CASES["adam"]
    short = _trained(case, optimizer, "Short", device, check)
    _without_short_calls(monkeypatch)
    long = _trained(case, optimizer, "Fused", device, check)
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


def test_bits_of_a_large_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More bags than one launch checks, one of them long enough to be summed in chunks."""
    lengths = torch.ones(40_000, dtype=torch.int64)
    lengths[[3, 17]] = torch.tensor([5000, 400])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    offsets[[20_000, 30_001]] = torch.tensor([-4, 10**9])
    indices = (torch.arange(int(lengths.sum())) * 7919) % 300 - 5
    indices[:4000] = 2

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        module = TableBatchedEmbeddingBags(
            [TableSpec(300, 3), TableSpec(40, 2)],
            optim.RowwiseAdagrad(0.1),
            bounds_check=BoundsCheck.IGNORE,
            device=device,
        )
        out = module(indices.to(device), offsets.to(device))
        out.backward(torch.arange(out.numel(), device=device).view_as(out) / out.numel())
        return [out.detach(), *_tensors(module)]

    _assert_same_bits(trained, monkeypatch)


def _is_plain(optimizer: optim.Optimizer) -> bool:
    decay = optimizer_hooks.find_global_decay(optimizer)
    return decay is None and not optimizer_hooks.is_periodic(optimizer)


@pytest.mark.parametrize("name", [n for n, o in OPTIMIZER_CASES.items() if _is_plain(o)])
def test_bits_of_any_optimizer(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = OPTIMIZER_CASES[name]
    short = _trained(CASES["mixed_dims"], optimizer, "Short", device)
    _without_short_calls(monkeypatch)
    long = _trained(CASES["mixed_dims"], optimizer, "Fused", device)
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


@pytest.mark.parametrize("offsets", [[0, 1, 3, 4, 4], [0, 3, 1, 9, 4]])
@pytest.mark.parametrize("mode", list(BoundsCheck))
def test_invalid_batches(
    mode: BoundsCheck, offsets: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is repaired, counted, warned of and raised is that of the long path."""
    if device.type == "cuda" and mode is BoundsCheck.FATAL:
        pytest.skip("it would end the CUDA context of the process")
    invalid = (torch.tensor([3, -1, 99, -7], device=device), torch.tensor(offsets, device=device))

    def observed() -> tuple[list[str], list[Tensor]]:
        module = _module(bounds_check=mode, device=device)
        module(*(tensor.to(device) for tensor in BATCH)).sum().backward()
        said = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                module(*invalid).sum().backward()
                report_bounds_violations(module)
            except RuntimeError as error:
                said = [str(error)]
        assert all(warning.filename == __file__ for warning in caught)
        return said + [str(warning.message) for warning in caught], _tensors(module)

    said, changed = observed()
    _without_short_calls(monkeypatch)
    said_long, changed_long = observed()
    assert said == said_long
    assert len(said) == (mode in (BoundsCheck.FATAL, BoundsCheck.WARNING))
    assert all(torch.equal(a, b) for a, b in zip(changed, changed_long, strict=True))


def _cached(policy: CachePolicy, device: torch.device, **options: Any) -> TableBatchedEmbeddingBags:
    """Tables of which one is in memory and two of 300 rows share a cache of 64."""
    torch.manual_seed(0)
    cached = Placement.MANAGED_CACHING
    tables = [TableSpec(9, 4), TableSpec(200, 8, "", cached), TableSpec(100, 4, "", cached)]
    cache = CacheConfig(policy, sets=2)
    return TableBatchedEmbeddingBags(tables, optim.Adam(0.1), cache=cache, device=device, **options)


def _batch_of_cached(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    parts = [torch.randint(rows, (50,), generator=generator) for rows in (9, 200, 100)]
    return torch.cat(parts).to(device), torch.arange(0, 151, 5, device=device)


def _trained_with_cache(
    policy: CachePolicy, device: torch.device, *, ahead: int, **options: Any
) -> list[Tensor]:
    """Outputs of steps that prefetch `ahead`, and what they leave behind."""
    module, outputs = _cached(policy, device, **options), []
    batches = [_batch_of_cached(step, device) for step in range(6)]
    batches[3][0][60] = 10**6
    for step, batch in enumerate(batches):
        last = step + ahead + 1
        for later in batches[step + ahead if step else 0 : last] if ahead else []:
            module.prefetch(*later)
        weights = torch.linspace(0.5, 2, 150, device=device) if step % 2 else None
        out = module(*batch, weights)
        (out * torch.linspace(-1, 1, out.numel(), device=device).view_as(out)).sum().backward()
        outputs.append(out.detach())
    with torch.no_grad():
        outputs.append(module(*batches[1]))
    assert module.row_cache is not None
    plan = ("tags", "stamps", "counts", "counters", "clock")
    cache = [getattr(module.row_cache, name).clone() for name in plan]
    return [*outputs, *cache, *(t.clone() for t in module.state_dict().values())]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("policy", list(CachePolicy))
def test_bits_of_cached_tables(
    policy: CachePolicy, ahead: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"ahead": ahead, "bounds_check": BoundsCheck.IGNORE}
    short = _trained_with_cache(policy, device, **options)
    _without_short_calls(monkeypatch)
    long = _trained_with_cache(policy, device, **options)
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


def test_prefetched_batches_have_an_order(device: torch.device) -> None:
    """Equal tensors are the prefetched batch; others are refused where gradients are wanted."""
    module = _cached(CachePolicy.LRU, device)
    module.prefetch(*_batch_of_cached(0, device))
    assert module.row_cache is not None
    if device.type == "cpu":  # a GPU asserts it, which ends the context of the process
        with pytest.raises(RuntimeError, match="in the order they were prefetched"):
            module(*_batch_of_cached(1, device))
    with torch.no_grad():
        module(*_batch_of_cached(1, device))
    calls = module.cache_stats().calls
    assert _is_short(module(*_batch_of_cached(0, device)))
    assert module.cache_stats().calls == calls == 2


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_invalid_batches_of_cached_tables(is_prefetched: bool, device: torch.device) -> None:
    """An invalid id is reported once, by the lookup; it reads the first row."""
    module = _cached(CachePolicy.LRU, device)
    (indices, offsets), repaired = _batch_of_cached(0, device), _batch_of_cached(0, device)
    indices[60], repaired[0][60] = 10**6, 0
    expected = _cached(CachePolicy.LRU, device)(*repaired)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if is_prefetched:
            module.prefetch(indices, offsets)
        out = module(indices, offsets)
        out.sum().backward()
        report_bounds_violations(module)
    assert _is_short(out)
    assert torch.equal(out, expected)
    assert [str(warning.message)[:40] for warning in caught] == [
        "emblib: 1 indices and 0 offsets out of b"
    ]
    assert module.bounds_violations.tolist() == [1, 0]
    assert module.step == 1


@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_scaled_gradients_of_cached_tables(gradient: float, device: torch.device) -> None:
    """A gradient that overflows is not a step."""
    module = _cached(CachePolicy.LRU, device)
    before = [t.clone() for t in module.state_dict().values()]
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    out = module(*_batch_of_cached(0, device))
    assert _is_short(out)
    scaler.scale((out * gradient).sum()).backward()
    assert module.step == int(gradient == 1.0)
    is_same = [torch.equal(a, b) for a, b in zip(before, module.state_dict().values(), strict=True)]
    assert all(is_same) == (gradient != 1.0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("check", list(BoundsCheck))
def test_bits_of_quantised_tables(
    check: BoundsCheck, bits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _module(device=device)
    module = QuantizedEmbeddingBags.from_float(source, bits, bounds_check=check)
    indices, offsets = (tensor.to(device) for tensor in BATCH)
    weights = torch.linspace(0.5, 2, 4, device=device)
    short = [module(indices, offsets), module(indices, offsets, weights)]
    monkeypatch.setattr(quantized, "can_serve_inputs", lambda *_: False)
    long = [module(indices, offsets), module(indices, offsets, weights)]
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


def test_an_invalid_batch_of_quantised_tables(device: torch.device) -> None:
    module = QuantizedEmbeddingBags.from_float(_module(device=device))
    indices, offsets = (tensor.clone().to(device) for tensor in BATCH)
    indices[0] = 10**6
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = module(indices, offsets)
        report_bounds_violations(module)
    assert ["1 indices and 0 offsets" in str(warning.message) for warning in caught] == [True]
    indices[0] = 0
    assert torch.equal(out, module(indices, offsets))
    assert module.bounds_violations.tolist() == [1, 0]


def _weights_with_gradient(module: TableBatchedEmbeddingBags) -> Tensor:
    return module(*BATCH, torch.ones(4, requires_grad=True))


def _one_table_frozen(module: TableBatchedEmbeddingBags) -> Tensor:
    module.set_table_trained(0, trained=False)
    return module(*BATCH)


def _for_update(module: TableBatchedEmbeddingBags) -> Tensor:
    return autograd.for_update(module)(*BATCH)


def _reported(module: TableBatchedEmbeddingBags) -> Tensor:
    class Reporter:
        def should_report(self, iteration: int) -> bool:
            return True

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments, **options: None

    module.set_stats_reporter(Reporter())
    return module(*BATCH)


def _sizes_of_batches(module: TableBatchedEmbeddingBags) -> Tensor:
    return module(*BATCH, batch_sizes=[[2], [2]])


LONG_CALLS = [
    _weights_with_gradient,
    _one_table_frozen,
    _for_update,
    _reported,
    _sizes_of_batches,
]


@pytest.mark.parametrize("call", LONG_CALLS, ids=lambda call: call.__name__.strip("_"))
def test_calls_that_need_more(call: Callable[[TableBatchedEmbeddingBags], Tensor]) -> None:
    module = _module()
    assert _is_short(module(*BATCH))
    assert not _is_short(call(module))


class _Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_ops_of_the_long_path() -> None:
    module = _module()
    assert _is_short(module(*BATCH))
    with _Recorder() as recorder:
        module(*BATCH)
    assert "emblib.tbe_lookup.default" in recorder.ops


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13), reason="torch refuses it (docs/building.md)"
)
def test_fake_tensors_after_real_ones() -> None:
    module = _module()
    assert _is_short(module(*BATCH))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = (torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
        assert module(*fake).shape == (2, 12)
    before = _tensors(module)
    module(*BATCH)
    assert all(torch.equal(a, b) for a, b in zip(before, _tensors(module), strict=True))


def _replace_data(module: TableBatchedEmbeddingBags) -> TableBatchedEmbeddingBags:
    module.weights.data = torch.ones_like(module.weights)
    return module


def _change_numbers(module: TableBatchedEmbeddingBags) -> TableBatchedEmbeddingBags:
    module.set_hyperparameters(lr=0.5, max_gradient=0.25)
    return module


def _load(module: TableBatchedEmbeddingBags) -> TableBatchedEmbeddingBags:
    state = {k: v if k == "hyper" else v * 0.5 for k, v in module.state_dict().items()}
    module.load_state_dict(state)
    return module


def _move(module: TableBatchedEmbeddingBags) -> TableBatchedEmbeddingBags:
    module.to("meta").to_empty(device="cpu").reset_parameters()
    return module


def _omit_last_offset(module: TableBatchedEmbeddingBags) -> TableBatchedEmbeddingBags:
    module.include_last_offset = False
    return module


def _replace_buffer(module: TableBatchedEmbeddingBags) -> TableBatchedEmbeddingBags:
    module.state_exp_avg = torch.ones_like(module.state_exp_avg)
    return module


CHANGES: list[Callable[[TableBatchedEmbeddingBags], Any]] = [
    _replace_data,
    _change_numbers,
    _load,
    _move,
    _omit_last_offset,
    _replace_buffer,
    lambda module: copy.deepcopy(module),
    lambda module: copy.copy(module),
    lambda module: pickle.loads(pickle.dumps(module)),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_what_changes_between_calls_is_seen(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        module = _module()
        module(*BATCH).sum().backward()
        torch.manual_seed(1)
        changed = CHANGES[number](module)
        batch = BATCH if changed.include_last_offset else (BATCH[0], BATCH[1][:-1])
        outputs = []
        for _ in range(2):
            out = changed(*batch)
            out.square().sum().backward()
            outputs.append(out.detach())
        return [*outputs, *_tensors(changed), *_tensors(module)]

    _assert_same_bits(trained, monkeypatch)


def test_memory_that_a_module_left_is_given_back() -> None:
    module = _module()
    module(*BATCH)
    assert isinstance(module._calls, ShortCalls)
    module.to("meta")
    assert module._calls is None


def test_gradients_of_an_output_that_requires_them() -> None:
    """A gradient of the gradient is refused, as on the long path; nothing is updated twice."""
    module = _module()
    out = module(*BATCH)
    weight = torch.ones_like(out, requires_grad=True)
    (out * weight).sum().backward(create_graph=True)
    assert module.step == 1
    assert torch.equal(weight.grad, out)


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
def test_saved_tensors_are_protected(pooling: Pooling) -> None:
    module = _module(pooling=pooling)
    indices, offsets = (tensor.clone() for tensor in BATCH)
    module(*BATCH)
    out = module(indices, offsets)
    indices.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert module.step == 0


def test_an_update_that_raises_counts_as_no_step(device: torch.device) -> None:
    module, batch = _module(device=device), [tensor.to(device) for tensor in BATCH]
    grad = torch.zeros(1, 1, device=device)
    arguments = ([module.weights.detach()], module._states(), module.hyperparams, 3, grad)
    with pytest.raises(RuntimeError, match="grad"):
        torch.ops.emblib.tbe_backward_(
            *arguments, module.features, *batch, None, 0, module.total_rows
        )
    assert module.step == 0


def test_in_a_model(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lookups in one loss, and a backward that is repeated, are updates each."""
    ids, offsets = (tensor.to(device) for tensor in BATCH)

    def trained() -> list[Tensor]:
        module = _module(device=device)
        torch.manual_seed(2)
        head = nn.Linear(12, 1).to(device)
        loss = head(module(ids, offsets)).sum() + head(module(ids.flip(0), offsets)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [*_tensors(module), *(p.grad for p in head.parameters() if p.grad is not None)]

    _assert_same_bits(trained, monkeypatch)


def test_weights_that_a_parametrization_computes() -> None:
    module = _module()
    doubled = 2.0 * module(*BATCH).detach()

    class Twice(nn.Module):
        def forward(self, weights: Tensor) -> Tensor:
            return 2.0 * weights

    nn.utils.parametrize.register_parametrization(module, "weights", Twice())
    with torch.no_grad():
        assert torch.equal(module(*BATCH), doubled)
        module.parametrizations.weights.original.mul_(4.0)
        assert torch.equal(module(*BATCH), 4.0 * doubled)


@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_scaled_gradients(
    gradient: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that overflows is not a step; the scaler finds it."""

    def trained() -> list[Tensor]:
        module = _module(device=device)
        head = nn.Linear(12, 1, device=device)
        nn.init.constant_(head.weight, gradient)
        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        for _ in range(2):
            out = head(module(*(tensor.to(device) for tensor in BATCH)))
            scaler.scale(out.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert module.step == (2 if gradient == 1.0 else 0)
        return [torch.tensor(scaler.get_scale()), *_tensors(module)]

    _assert_same_bits(trained, monkeypatch)


def test_a_step_without_lookups_counts(device: torch.device) -> None:
    module = _module(device=device)
    offsets = torch.zeros(5, dtype=torch.int64, device=device)
    module(offsets[:0], offsets).sum().backward()
    assert module.step == 1


@pytest.mark.parametrize("kind", ["dense", "quantised", "tensor train", "dynamic"])
def test_a_pooling_that_changes_after_a_call(kind: str) -> None:
    tables = [TableSpec(9, 4)]
    modules: dict[str, Callable[[], Any]] = {
        "dense": lambda: TableBatchedEmbeddingBags(tables, optim.SGD(0.1)),
        "quantised": lambda: QuantizedEmbeddingBags.from_float(torch.randn(9, 4)),
        "tensor train": lambda: TTEmbeddingBag(TTSpec(9, 4, (2, 2)), optim.SGD(0.1)),
        "dynamic": lambda: DynamicEmbeddingBags([DynamicSpec(9, 4)], optim.SGD(0.1)),
    }
    module, batch = modules[kind](), (BATCH[0], torch.tensor([0, 4]))
    pooled = module(*batch)
    module.pooling = Pooling.MEAN
    assert torch.equal(module(*batch), pooled / 4)


@pytest.mark.parametrize("is_short", [False, True])
def test_rows_that_are_scaled_at_rate_zero_have_a_new_version(*, is_short: bool) -> None:
    rule = optim.RowwiseAdagrad(0.0, max_norm=0.01)
    module = TableBatchedEmbeddingBags([TableSpec(9, 4)], rule)
    before, version = module.weights.detach().clone(), module.weights._version
    sizes = None if is_short else [[1]]
    module(torch.tensor([1]), torch.tensor([0, 1]), batch_sizes=sizes).sum().backward()
    assert not torch.equal(module.weights, before)
    assert module.weights._version > version


@pytest.mark.parametrize("is_short", [False, True])
def test_momentum_at_rate_zero_is_noticed_by_other_uses_of_the_rows(*, is_short: bool) -> None:
    module = TableBatchedEmbeddingBags([TableSpec(9, 4)], optim.LARS(0.1))
    batch, sizes = (torch.tensor([1]), torch.tensor([0, 1])), None if is_short else [[1]]
    module(*batch, batch_sizes=sizes).sum().backward()
    module.set_learning_rate(0.0)
    x = torch.ones(module.weights.numel(), requires_grad=True)
    scores = (module.weights.detach() * x).sum()  # saves the rows, e.g. as a tied output layer
    module(*batch, batch_sizes=sizes).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.backward()


def test_an_interrupt_behind_an_update_leaves_a_new_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd notices by the version that the weights have changed."""
    module = _module()
    out, version, update = module(*BATCH), module.weights._version, short_calls._backward_

    def interrupted(*arguments: Any) -> None:
        update(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(short_calls, "_backward_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        out.sum().backward()
    assert module.weights._version > version
