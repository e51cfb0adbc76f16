"""Tensor-train modules with cores in 16 bits: training, state, and what torch expects of them."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import emblib
from emblib import optim
from emblib.ops import tt_layout
from emblib.ops.autograd import HAS_GRAD_DTYPE
from emblib.specs import Pooling, Precision, StochasticRounding, TTSpec
from emblib.tables import TableBatchedTTEmbeddingBags, TTEmbeddingBag
from emblib.tables.tt_svd import decompose
from tests.saved import saved_and_loaded

SPECS = [
    TTSpec(110, 8, (3, 4), (4, 5, 6), (2, 2, 2)),
    TTSpec(90, 12, (5,)),
    TTSpec(200, 16, (2, 3, 2), (3, 4, 5, 4), (2, 2, 2, 2)),
]
DTYPES = (torch.float16, torch.bfloat16)
ROUNDED = StochasticRounding(seed=5)


pytestmark = pytest.mark.usefixtures("seeded_on_device")


def batch() -> tuple[Tensor, Tensor]:
    """Bags of three features, with duplicates, an empty bag and a skipped id."""
    indices = torch.tensor([3, 3, 109, -1, 7, 50, 50, 50, 0, 89, 13, 199, 5, 5])
    return indices, torch.tensor([0, 0, 3, 5, 9, 11, 14])


def tables(
    optimizer: optim.Optimizer | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> TableBatchedTTEmbeddingBags:
    precision = options.pop("precision", Precision(weights=dtype))
    return TableBatchedTTEmbeddingBags(
        SPECS, optimizer or optim.SGD(0.25), precision=precision, **options
    )


def wide_copy(module: TableBatchedTTEmbeddingBags, **options: Any) -> TableBatchedTTEmbeddingBags:
    """Return a module of float32 cores with the same values."""
    other = TableBatchedTTEmbeddingBags(module.tables, module.optimizer, **options)
    with torch.no_grad():
        for core, value in zip(other.cores, module.cores, strict=True):
            core.copy_(value)
    return other


def steps(module: TableBatchedTTEmbeddingBags, count: int = 3) -> list[Tensor]:
    """Return the outputs of training steps."""
    outputs = []
    for step in range(count):
        indices, offsets = batch()
        out = module((indices + step).clamp(min=-1, max=89), offsets)
        out.float().backward(torch.sin(torch.arange(out.numel()).view_as(out).float()))
        outputs.append(out.detach())
    return outputs


def values(module: TableBatchedTTEmbeddingBags) -> list[Tensor]:
    states = [s.clone() for core in module.core_optimizer_states() for s in core.values()]
    return [*(core.detach().clone() for core in module.cores), *states]


def assert_equal(some: list[Tensor], others: list[Tensor]) -> None:
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
def test_a_step_is_that_of_float_cores_rounded(dtype: torch.dtype, pooling: Pooling) -> None:
    module = tables(optim.Adagrad(0.1), dtype, pooling=pooling)
    assert {core.dtype for core in module.cores} == {dtype}
    for _ in range(4):
        before = [core.detach().clone() for core in module.cores]
        other = wide_copy(module, pooling=pooling)
        for mine, state in zip(
            other.core_optimizer_states(), module.core_optimizer_states(), strict=True
        ):
            mine["sum"].copy_(state["sum"])
        (out,), (want,) = steps(module, 1), steps(other, 1)
        assert out.dtype == torch.float32
        assert torch.equal(out, want)
        for core, wanted, old in zip(module.cores, other.cores, before, strict=True):
            touched = (wanted.detach() != old.float()).any(1)
            assert torch.equal(core[touched], wanted[touched].to(dtype))
            assert torch.equal(core[~touched], old[~touched])
    assert module.step == 4


def test_states_have_their_own_dtype_and_row_wise_ones_are_float32() -> None:
    precision = Precision(torch.bfloat16, states=torch.float16, stochastic_rounding=ROUNDED)
    module = tables(optim.Adam(0.1), precision=precision)
    assert {s.dtype for c in module.core_optimizer_states() for s in c.values()} == {torch.float16}
    steps(module)
    assert all(bool(s.isfinite().all()) for s in values(module))
    rows = tables(optim.RowwiseAdagrad(0.1), precision=precision)
    assert {s.dtype for c in rows.core_optimizer_states() for s in c.values()} == {torch.float32}
    half = sum(core.numel() for core in module.cores) * 2
    assert module.nbytes() == {"weights": half, "optimizer_state": 2 * half}
    assert half == sum(spec.nbytes for spec in SPECS) // 2


@pytest.mark.parametrize("output", [*DTYPES, torch.float32])
def test_output_dtype_is_that_of_the_precision(output: torch.dtype) -> None:
    indices, offsets = batch()
    assert tables(precision=Precision(output=output))(indices, offsets).dtype == output
    for kind, specs in ((TableBatchedTTEmbeddingBags, SPECS), (TTEmbeddingBag, SPECS[0])):
        with pytest.raises(TypeError, match=r"write precision=Precision\(output=torch.*\) instead"):
            kind(specs, output_dtype=output)
    with pytest.raises(TypeError, match="precision must be a Precision"):
        TTEmbeddingBag(SPECS[0], precision=output)  # type: ignore[arg-type]


def test_the_same_seed_on_any_number_of_threads() -> None:
    precision = Precision(torch.bfloat16, stochastic_rounding=ROUNDED)
    threads, results = torch.get_num_threads(), []
    spec = TTSpec(60_000, 32, (16, 16))
    indices, offsets = torch.randint(0, 60_000, (5000,)), torch.arange(0, 5001, 10)
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            torch.manual_seed(3)
            table = TTEmbeddingBag(spec, optim.SGD(0.1), precision=precision)
            for _ in range(2):
                out = table(indices, offsets)
                out.backward(torch.sin(torch.arange(out.numel()).view_as(out).float()))
            results.append([out.detach(), *table.cores])
    finally:
        torch.set_num_threads(threads)
    assert_equal(*results)


def test_nearest_rounding_gives_a_table_the_bits_of_a_module_of_its_own() -> None:
    batched = tables(optim.Adam(0.1))
    alone = [
        TTEmbeddingBag(spec, optim.Adam(0.1), precision=Precision(torch.bfloat16)) for spec in SPECS
    ]
    with torch.no_grad():
        for t, table in enumerate(alone):
            for core, value in zip(table.cores, batched.table_cores(t), strict=True):
                core.copy_(value)
    indices, offsets = batch()
    for _ in range(3):
        out = batched(indices, offsets)
        grad = torch.sin(torch.arange(out.numel()).view_as(out).float())
        out.backward(grad)
        column = 0
        for t, table in enumerate(alone):
            own = offsets[2 * t : 2 * t + 3]
            part = table(indices[int(own[0]) : int(own[-1])], own - own[0])
            part.backward(grad[:, column : column + table.spec.dim])
            column += table.spec.dim
    for t, table in enumerate(alone):
        assert_equal(list(table.cores), batched.table_cores(t))


def test_rounding_differs_by_core_and_table() -> None:
    """Rows of equal values and gradients in different places have other random numbers."""
    precision = Precision(torch.bfloat16, stochastic_rounding=ROUNDED)
    specs = [TTSpec(16, 64, (8,), (4, 4), (8, 8), name) for name in "ab"]
    module = TableBatchedTTEmbeddingBags(specs, optim.SGD(1e-4), precision=precision)
    with torch.no_grad():
        for core in module.cores:
            core.fill_(1.0)
    out = module(torch.arange(16).repeat(2), torch.arange(33))
    out.backward(torch.ones_like(out))
    first, second = module.table_cores(0), module.table_cores(1)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0][0], first[0][1])


def test_large_batches_are_those_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.get_default_device().type != "cpu":
        pytest.skip("batches are divided on the CPU")
    precision = Precision(torch.bfloat16)
    results = []
    for chunk in (None, 5):
        if chunk:
            monkeypatch.setattr(tt_layout, "_max_chunk_lookups", lambda *_: 5)
        torch.manual_seed(2)
        module = tables(optim.SGD(0.25), precision=precision)
        results.append([*steps(module, 2), *module.cores])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


def test_gradients_that_others_apply() -> None:
    """External() leaves them in the dtype of the cores, as torch does."""
    module = tables(optim.External())
    other = wide_copy(module)
    steps(module, 1), steps(other, 1)
    for core, wanted in zip(module.cores, other.cores, strict=True):
        assert core.grad.dtype == core.dtype
        assert torch.equal(core.grad, wanted.grad.to(core.dtype))
    before = [core.detach().clone() for core in module.cores]
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert any(not torch.equal(a, b) for a, b in zip(before, module.cores, strict=True))


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="gradients have the dtype of their parameter")
@pytest.mark.parametrize("rounding", [None, ROUNDED])
def test_deferred_updates_are_those_of_backward(rounding: StochasticRounding | None) -> None:
    precision = Precision(torch.bfloat16, stochastic_rounding=rounding)
    torch.manual_seed(4)
    module = tables(optim.Adagrad(0.1), precision=precision)
    torch.manual_seed(4)
    deferred = tables(optim.Adagrad(0.1, deferred=True), precision=precision)
    for _ in range(3):
        steps(module, 1), steps(deferred, 1)
        assert {core.grad.dtype for core in deferred.cores} == {torch.float32}
        deferred.apply_gradients()
        deferred.zero_grad()
    assert_equal(values(module), values(deferred))


@pytest.mark.parametrize("rounding", [None, ROUNDED])
def test_scaled_gradients_and_frozen_tables(rounding: StochasticRounding | None) -> None:
    """Both form gradients of whole cores; the rows that they update are rounded alike."""
    precision = Precision(torch.bfloat16, stochastic_rounding=rounding)
    modules = []
    for _ in range(3):
        torch.manual_seed(4)
        modules.append(tables(optim.Adagrad(0.1), precision=precision))
    plain, scaled, frozen = modules
    for core in frozen.table_cores(0):
        core.requires_grad_(False)
    kept = [core.detach().clone() for core in frozen.table_cores(0)]
    indices, offsets = batch()
    for _ in range(2):
        for module in (plain, frozen):
            module(indices, offsets).square().sum().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        scaler.scale(scaled(indices, offsets).square().sum()).backward()
    assert_equal(values(plain), values(scaled))
    assert_equal(kept, frozen.table_cores(0))
    assert_equal(plain.table_cores(2), frozen.table_cores(2))
    before = values(scaled)
    out = scaled(indices, offsets)
    scaler.scale((out * torch.inf).sum()).backward()
    assert_equal(before, values(scaled))


def test_state_dict_round_trip_and_loads_of_another_dtype() -> None:
    precision = Precision(torch.bfloat16, states=torch.float16, stochastic_rounding=ROUNDED)
    module, other = (tables(optim.Adam(0.1), precision=precision) for _ in range(2))
    steps(module)
    other.load_state_dict(saved_and_loaded(module.state_dict()))
    assert_equal(values(module), values(other))
    assert_equal(steps(module), steps(other))
    assert_equal(values(module), values(other))
    # Of other dtypes, values are copied as `Tensor.copy_` does.
    wide = wide_copy(module)
    steps(wide)
    other.load_state_dict(wide.state_dict(), strict=False)
    assert_equal(list(other.cores), [core.detach().bfloat16() for core in wide.cores])
    wide.load_state_dict(module.state_dict(), strict=False)
    assert_equal(list(wide.cores), [core.detach().float() for core in module.cores])


def test_copies_and_moves_keep_the_dtype() -> None:
    module = tables(optim.Adagrad(0.1))
    steps(module)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copies.append(copy.deepcopy(module).to(torch.float64))
    assert any("tables keep their dtypes" in str(w.message) for w in caught)
    for other in copies:
        assert_equal(values(module), values(other))
        assert_equal(steps(copy.deepcopy(module)), steps(other))
    meta = tables(device="meta")
    empty = meta.to_empty(device=torch.get_default_device())
    empty.reset_parameters()
    assert {core.dtype for core in empty.cores} == {torch.bfloat16}
    assert "bfloat16" in repr(module)


def test_a_compiled_step_is_the_eager_one() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(6)
        precision = Precision(torch.bfloat16, stochastic_rounding=ROUNDED)
        module = tables(optim.Adagrad(0.1), precision=precision)
        call = torch.compile(module, backend="aot_eager") if compiled else module
        indices, offsets = batch()
        for _ in range(2):
            out = call(indices, offsets)
            out.backward(torch.ones_like(out))
        results.append([out.detach(), *values(module)])
    assert_equal(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_dense_and_back(dtype: torch.dtype) -> None:
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(3)
    weight = torch.randn(120, 8, generator=generator)
    options = {"spec": TTSpec(120, 8, (1, 1), (4, 5, 6), (2, 2, 2)), "ranks": (8, 12)}
    exact = TTEmbeddingBag.from_dense(weight, **options)
    made = TTEmbeddingBag.from_dense(weight, **options, precision=Precision(dtype))
    assert_equal(list(made.cores), [core.detach().to(dtype) for core in exact.cores])
    dense = made.to_dense()
    assert dense.dtype == torch.float32
    error = float((dense - weight).norm() / weight.norm())
    got = decompose(weight, options["spec"], ranks=(8, 12), dtype=dtype).error
    assert error == pytest.approx(got, rel=1e-3)
    assert got > decompose(weight, options["spec"], ranks=(8, 12)).error


def test_bytes_buy_more_ranks_in_16_bits() -> None:
    narrow = TTSpec.for_bytes(1_000_000, 64, 1 << 20, dtype=torch.bfloat16)
    assert narrow == TTSpec.for_bytes(1_000_000, 64, 1 << 21)
    assert 2 * narrow.numel <= 1 << 20 < narrow.nbytes
    with pytest.raises(ValueError, match="at least 3328 bytes with 3 cores, more than 10"):
        TTSpec.for_bytes(1_000_000, 64, 10, dtype=torch.float16, like=_smallest())
    other_size = TTSpec.for_bytes(900_000, 64, 1 << 20, like=_smallest())
    assert (other_size.rows, other_size.row_factors) == (900_000, _smallest().row_factors)
    with pytest.raises(ValueError, match="must multiply to dim 32"):
        TTSpec.for_bytes(1_000_000, 32, 1 << 20, like=_smallest())
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16"):
        TTSpec.for_bytes(1_000_000, 64, 1 << 20, dtype=torch.float64)
    bag = TTEmbeddingBag.from_dense(
        torch.randn(300, 16), nbytes=4000, precision=Precision(torch.bfloat16)
    )
    assert bag.nbytes()["weights"] <= 4000 < 2 * bag.nbytes()["weights"]


def _smallest() -> TTSpec:
    return TTSpec(1_000_000, 64, (1, 1), (64, 128, 128), (2, 4, 8))


def test_sample_weights_get_their_gradient() -> None:
    module = tables(optim.SGD(0.1))
    other = wide_copy(module)
    indices, offsets = batch()
    found = []
    for each in (module, other):
        weights = torch.linspace(0.5, 1.5, indices.numel()).requires_grad_()
        out = each(indices, offsets, weights)
        out.backward(torch.cos(torch.arange(out.numel()).view_as(out).float()))
        found.append(weights.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_a_collection(dtype: torch.dtype) -> None:
    """The dtype of the configuration is that of the cores, and tables of one dtype share calls."""
    storage = emblib.storage.TensorTrain((3, 4))
    configs = [
        emblib.EmbeddingBagConfig(40, 8, "a", ("f",), storage=storage, data_type=dtype),
        emblib.EmbeddingBagConfig(50, 16, "b", ("g",), storage=storage, data_type=dtype),
        emblib.EmbeddingBagConfig(60, 8, "c", ("h",), storage=storage),
    ]
    optimizer = optim.Adagrad(0.1)
    collection = emblib.EmbeddingBagCollection(configs, optimizer=optimizer)
    found = {name: p.dtype for name, p in collection.named_parameters()}
    assert len(found) == 9
    assert all((d == dtype) == (".c." not in name) for name, d in found.items())
    assert len(collection.groups.groups) == 2
    keys = ["f", "g", "h"]
    ids = torch.randint(0, 40, (18,))
    features = emblib.KeyedJaggedTensor(keys, ids, lengths=torch.full((9,), 2))
    other = emblib.EmbeddingBagCollection(configs, optimizer=optimizer)
    collection(features).values().sum().backward()
    other.load_state_dict(collection.state_dict())
    assert torch.equal(collection(features).values(), other(features).values())
