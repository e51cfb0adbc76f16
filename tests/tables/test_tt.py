"""TTEmbeddingBag against the reference: pooling, optimizers, bounds, state."""

import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emblib
from emblib import CachedTTEmbeddingBags, TTCache, optim, storage
from emblib.ops import autograd
from emblib.reference import tt
from emblib.specs import BoundsCheck, Pooling, Precision, TTSpec
from emblib.tables import TTEmbeddingBag
from tests.saved import saved_and_loaded

SPEC = TTSpec(110, 8, (3, 4), (4, 5, 6), (2, 2, 2))
OPTIMIZERS = [
    optim.SGD(0.1),
    optim.Adagrad(0.1, eps=0.0),
    optim.RowwiseAdagrad(0.1),
    optim.Adam(0.05),
]


pytestmark = pytest.mark.usefixtures("seeded_on_device")


def batch(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Empty bags first, inside and last; duplicates; pruned and surplus ids."""
    indices = torch.tensor([3, 3, 109, -1, 7, 50, 50, 50, 0, 108], dtype=dtype)
    return indices, torch.tensor([0, 0, 3, 3, 4, 9, 10, 10], dtype=dtype)


def expected(
    table: TTEmbeddingBag,
    cores: list[Tensor],
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    spec = table.spec
    return tt.lookup(
        cores,
        spec.rows,
        spec.row_factors,
        spec.dim_factors,
        indices,
        offsets,
        weights,
        table.pooling,
    )


def copies(table: TTEmbeddingBag) -> list[Tensor]:
    return [core.detach().clone().double().requires_grad_() for core in table.cores]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("weighted", [False, True])
def test_forward_and_gradients(dtype: torch.dtype, pooling: Pooling, weighted: bool) -> None:
    if weighted and pooling is Pooling.NONE:
        pytest.skip("sample weights need sum or mean")
    table = TTEmbeddingBag(SPEC, optim.External(), pooling=pooling)
    indices, offsets = batch(dtype)
    weights = torch.rand(10, requires_grad=True) if weighted else None
    out = table(indices, offsets, weights)
    cores = copies(table)
    want_weights = weights.detach().double().requires_grad_() if weighted else None
    want = expected(table, cores, indices, offsets, want_weights)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(out)
    out.backward(grad)
    want.backward(grad.double())
    for core, wanted in zip(table.cores, cores, strict=True):
        torch.testing.assert_close(core.grad.double(), wanted.grad, rtol=1e-4, atol=1e-6)
    if weighted:
        torch.testing.assert_close(weights.grad.double(), want_weights.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("pooling", Pooling)
def test_fused_update_matches_the_reference(optimizer: optim.Optimizer, pooling: Pooling) -> None:
    table = TTEmbeddingBag(SPEC, optimizer, pooling=pooling)
    cores = copies(table)
    states = [
        [torch.zeros(core.size(0) if s.per_row else core.shape) for s in optimizer.states]
        for core in cores
    ]
    states = [[s.double() for s in group] for group in states]
    for step in range(1, 4):
        indices, offsets = batch()
        indices = (indices + step).clamp(max=109)
        out = table(indices, offsets)
        grad = torch.randn_like(out)
        out.backward(grad)
        expected(table, cores, indices, offsets).backward(grad.double())
        hyper = optimizer.hyperparams()
        hyper[1] = step
        with torch.no_grad():
            for core, state in zip(cores, states, strict=True):
                tt.update_rows_(core, state, hyper, optimizer.name, core.grad)
                core.grad = None
    assert table.step == 3
    # Adam divides by the root of tiny second moments, which magnifies rounding.
    tolerance = 2e-3 if optimizer.name == "adam" else 1e-5
    for core, wanted in zip(table.cores, cores, strict=True):
        torch.testing.assert_close(core.double(), wanted.detach(), rtol=1e-4, atol=tolerance)
        assert core.requires_grad
        assert core.grad is None


def test_every_touched_core_row_moves_where_rows_outnumber_columns() -> None:
    """TT-Rec's kernels leave rows beyond the width of a core as they were."""
    spec = TTSpec(300 * 4 * 300, 4, (2, 2), (300, 4, 300), (1, 4, 1))
    table = TTEmbeddingBag(spec, optim.SGD(1.0))
    before = [core.clone() for core in table.cores]
    indices = torch.arange(300) * (4 * 300) + torch.arange(300) % 4 * 300 + torch.arange(300)
    table(indices, torch.arange(301)).backward(torch.randn(300, 4))
    for core, old in zip(table.cores, before, strict=True):
        assert (core != old).any(1).all()


def test_expanded_and_strided_output_gradients() -> None:
    results = []
    for make in (
        lambda out: torch.ones(()).expand_as(out),
        lambda out: torch.ones(out.size(1), out.size(0)).t(),
        torch.ones_like,
    ):
        torch.manual_seed(1)
        table = TTEmbeddingBag(SPEC, optim.SGD(0.5))
        out = table(*batch())
        out.backward(make(out))
        results.append([core.clone() for core in table.cores])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_non_contiguous_indices_and_weights() -> None:
    table = TTEmbeddingBag(SPEC)
    indices, offsets = batch()
    weights = torch.rand(10)
    spread = torch.stack([indices, indices], 1)[:, 0]
    spread_weights = torch.stack([weights, weights], 1)[:, 0]
    assert torch.equal(table(spread, offsets, spread_weights), table(indices, offsets, weights))


def test_same_bits_on_any_number_of_threads() -> None:
    spec = TTSpec(60_000, 32, (16, 16))
    indices = torch.randint(0, 60_000, (5000,))
    indices[:2000] = 17  # a hot id
    offsets = torch.arange(0, 5001, 10)
    threads, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            torch.manual_seed(3)
            table = TTEmbeddingBag(spec, optim.Adagrad(0.1))
            out = table(indices, offsets)
            out.backward(torch.sin(torch.arange(out.numel()).view_as(out).float()))
            results.append([out.detach(), *table.cores])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_two_forwards_before_two_backwards_use_the_cores_of_their_time() -> None:
    indices, offsets = batch()
    table = TTEmbeddingBag(SPEC, optim.SGD(0.3))
    cores = copies(table)
    outs = [table(indices, offsets) for _ in range(2)]
    for out in outs:
        out.backward(torch.ones_like(out))
        expected(table, cores, indices, offsets).sum().backward()
        with torch.no_grad():
            for core in cores:
                core -= 0.3 * core.grad
                core.grad = None
    for core, wanted in zip(table.cores, cores, strict=True):
        torch.testing.assert_close(core.double(), wanted.detach(), rtol=1e-5, atol=1e-6)


def test_empty_inputs() -> None:
    table = TTEmbeddingBag(SPEC, optim.Adam(0.1))
    before = [core.clone() for core in table.cores]
    none = torch.empty(0, dtype=torch.int64)
    out = table(none, torch.zeros(4, dtype=torch.int64))
    assert torch.equal(out, torch.zeros(3, 8))
    out.sum().backward()
    assert table(none, torch.zeros(1, dtype=torch.int64)).shape == (0, 8)
    assert all(torch.equal(a, b) for a, b in zip(table.cores, before, strict=True))


@pytest.mark.parametrize("mode", BoundsCheck)
def test_bounds_are_those_of_the_table_not_of_its_cores(mode: BoundsCheck) -> None:
    on_gpu = torch.get_default_device().type == "cuda"
    if on_gpu and mode is BoundsCheck.FATAL:
        pytest.skip("the error of a kernel ends the CUDA context of the process")
    table = TTEmbeddingBag(SPEC, bounds_check=mode)
    surplus = torch.tensor([115, 4, -7])  # 110 <= 115 < 4 * 5 * 6
    offsets = torch.tensor([0, 1, 3])
    before = [core.clone() for core in table.cores]
    if mode is BoundsCheck.FATAL:
        with pytest.raises(RuntimeError, match=r"must be in \[0, 110\)"):
            table(surplus, offsets)
        assert all(torch.equal(a, b) for a, b in zip(table.cores, before, strict=True))
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = table(surplus, offsets)
    assert len(caught) == (1 if mode is BoundsCheck.WARNING and not on_gpu else 0)
    dense = table.to_dense()
    torch.testing.assert_close(out[0], dense[0])
    torch.testing.assert_close(out[1], dense[4] + dense[0])


def test_surplus_rows_are_never_trained() -> None:
    """Rows 110 .. 119 have cores, but an id there is out of bounds and trains row 0."""
    table = TTEmbeddingBag(SPEC, optim.SGD(1.0), bounds_check=BoundsCheck.IGNORE)
    cores = copies(table)
    table(torch.tensor([119]), torch.tensor([0, 1])).sum().backward()
    expected(table, cores, torch.tensor([0]), torch.tensor([0, 1])).sum().backward()
    for core, wanted in zip(table.cores, cores, strict=True):
        torch.testing.assert_close(core.double(), (wanted - wanted.grad).detach())


def test_broken_offsets_are_repaired() -> None:
    table = TTEmbeddingBag(SPEC, bounds_check=BoundsCheck.IGNORE)
    indices = torch.tensor([1, 2, 3, 4])
    offsets = torch.tensor([0, 3, 2, 99])
    want = expected(table, copies(table), indices, offsets)
    torch.testing.assert_close(
        table(indices, offsets).double(), want.detach(), rtol=1e-5, atol=1e-6
    )
    if indices.is_cuda:
        return
    strict = TTEmbeddingBag(SPEC, bounds_check=BoundsCheck.FATAL)
    with pytest.raises(RuntimeError):
        strict(indices, offsets)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_dtype(dtype: torch.dtype) -> None:
    table = TTEmbeddingBag(SPEC, optim.SGD(0.1), precision=Precision(output=dtype))
    out = table(*batch())
    assert out.dtype == dtype
    want = expected(table, copies(table), *batch())
    torch.testing.assert_close(out.double(), want.detach(), rtol=1e-2, atol=1e-3)
    out.sum().backward()
    assert table.step == 1


@pytest.mark.parametrize("ranks", [(8,), (4, 6), (3, 5, 4)], ids=str)
def test_to_dense_and_sizes(ranks: tuple[int, ...]) -> None:
    table = TTEmbeddingBag(TTSpec(100, 24, ranks), optim.RowwiseAdagrad(0.1))
    spec = table.spec
    dense = table.to_dense()
    want = tt.to_dense(copies(table), 100, spec.row_factors, spec.dim_factors)
    assert dense.shape == (100, 24)
    torch.testing.assert_close(dense.double(), want.detach(), rtol=1e-5, atol=1e-6)
    values = sum(core.numel() for core in table.cores)
    assert table.nbytes() == {"weights": 4 * values, "optimizer_state": 4 * sum(spec.row_factors)}
    assert table.compression == pytest.approx(2400 / values)


def test_no_grad_forward_makes_no_graph() -> None:
    table = TTEmbeddingBag(SPEC)
    with torch.no_grad():
        out = table(*batch())
    assert not out.requires_grad
    assert torch.equal(out, table(*batch()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_state_dict_round_trip_continues_bit_for_bit(optimizer: optim.Optimizer) -> None:
    def train(table: TTEmbeddingBag) -> None:
        out = table(*batch())
        out.backward(torch.cos(torch.arange(out.numel()).view_as(out).float()))

    first = TTEmbeddingBag(SPEC, optimizer)
    train(first)
    second = TTEmbeddingBag(SPEC, optimizer)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    assert second.step == 1
    for table in (first, second):
        table.set_learning_rate(0.02)
        train(table)
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    names = [state.name for state in optimizer.states]
    assert [list(states) for states in first.core_optimizer_states()] == [names] * 3


@pytest.mark.parametrize("optimizer", [optim.Adagrad(0.1), optim.External()], ids=repr)
@pytest.mark.parametrize("on_meta", [False, True], ids=["made", "meta"])
def test_assign_copies_and_training_goes_on(
    optimizer: optim.Optimizer, on_meta: bool, device: torch.device
) -> None:
    saved = TTEmbeddingBag(SPEC, optimizer)
    saved(*batch()).sum().backward()
    with torch.device("meta" if on_meta else device):
        loaded = nn.ModuleList([TTEmbeddingBag(SPEC, optimizer)])
    before = [*loaded.parameters(), loaded[0].hyperparams]
    state = {f"0.{key}": value.clone() for key, value in saved.state_dict().items()}
    loaded.load_state_dict(state, assign=True)
    table = loaded[0]
    assert on_meta or all(map(operator.is_, before, [*loaded.parameters(), table.hyperparams]))
    for module in (saved, table):
        module.zero_grad()
        module(*batch()).sum().backward()
    assert table.step == saved.step
    for key, value in saved.state_dict().items():
        assert torch.equal(value, table.state_dict()[key]), key
        assert value.device == table.state_dict()[key].device
    if isinstance(optimizer, optim.External):
        for core, other in zip(saved.cores, table.cores, strict=True):
            assert torch.equal(core.grad, other.grad)
    elif on_meta:
        assert not any(torch.equal(state[f"0.cores.{k}"], table.cores[k]) for k in range(2))


@pytest.mark.parametrize("key", ["cores.2", "of_another_module"])
def test_a_strict_load_with_other_keys_changes_nothing(key: str) -> None:
    table, saved = TTEmbeddingBag(SPEC), TTEmbeddingBag(SPEC).state_dict()
    before = [core.detach().clone() for core in table.cores]
    if saved.pop(key, None) is None:
        saved[key] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=key):
        table.load_state_dict(saved)
    assert all(map(torch.equal, before, table.cores))


def test_a_refused_load_with_assign_leaves_a_table_that_trains() -> None:
    first, second = (
        TTEmbeddingBag(TTSpec(1000, 64, ranks, (10, 10, 10), dims), optim.Adagrad(0.1))
        for ranks, dims in (((2, 8), (8, 4, 2)), ((4, 4), (4, 4, 4)))
    )
    before = [core.detach().clone() for core in second.cores]
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="another tensor train"):
            second.load_state_dict(first.state_dict(), strict=strict, assign=True)
    assert all(map(torch.equal, before, second.cores))
    second(*batch()).sum().backward()
    assert not all(map(torch.equal, before, second.cores))


@pytest.mark.filterwarnings("ignore:for .*cores:UserWarning")  # torch's, of copies to meta
def test_parts_of_a_state_dict_leave_a_table_on_meta() -> None:
    saved = TTEmbeddingBag(SPEC, optim.Adagrad(0.1)).state_dict()
    with torch.device("meta"):
        table = TTEmbeddingBag(SPEC, optim.Adagrad(0.1))
    del saved["cores.1"]
    with pytest.raises(RuntimeError, match=r"missing are \['cores.1'\]"):
        table.load_state_dict(saved, assign=True)
    assert table.hyperparams.is_meta
    assert table.cores[0].is_meta


def test_half_and_double_keep_the_dtype_of_cores() -> None:
    table = TTEmbeddingBag(SPEC, optim.Adagrad(0.1)).half().double()
    assert all(core.dtype == torch.float32 for core in table.cores)
    assert table.hyperparams.dtype == torch.float64
    table(*batch()).sum().backward()


def test_external_optimizer_trains() -> None:
    table = TTEmbeddingBag(SPEC, optim.External())
    external = torch.optim.Adam(table.parameters(), lr=0.05)
    target = torch.randn(7, 8)
    losses = []
    for _ in range(60):
        external.zero_grad()
        loss = (table(*batch()) - target).square().mean()
        loss.backward()
        external.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("optimizer", [optim.SGD(0.1), optim.External()], ids=lambda o: o.name)
def test_compiles_without_graph_breaks(optimizer: optim.Optimizer) -> None:
    tables = []
    for make in (
        lambda table: table,
        lambda t: torch.compile(t, backend="aot_eager", fullgraph=True),
    ):
        torch.manual_seed(5)
        table = TTEmbeddingBag(SPEC, optimizer)
        make(table)(*batch()).sum().backward()
        tables.append(table)
    for eager, compiled in zip(tables[0].cores, tables[1].cores, strict=True):
        assert torch.equal(eager, compiled)
        assert (eager.grad is None) == autograd.is_fused(optimizer)


WRONG = {
    "ranks": (lambda: TTEmbeddingBag(TTSpec(100, 8, (900, 2))), "ranks\\[0\\] must be in"),
    "zero rank": (lambda: TTEmbeddingBag(TTSpec(100, 8, (0, 2))), "rank must be >= 1"),
    "negative dim": (lambda: TTEmbeddingBag(TTSpec(100, -8, (2, 2))), "dim must be >= 1"),
    "too large a dim": (lambda: TTSpec(100, 2**29, (2, 2)), "dim must be at most"),
    "five cores": (lambda: TTEmbeddingBag(TTSpec(100, 8, (2, 2, 2, 2))), "2 to 4 cores"),
    "few rows": (lambda: TTEmbeddingBag(TTSpec(100, 8, (2, 2), (4, 5, 4))), "< rows 100"),
    "wrong dim": (lambda: TTEmbeddingBag(TTSpec(90, 9, (2, 2), None, (2, 2, 2))), "to dim 9"),
    "name with a dot": (lambda: TTSpec(90, 8, (2, 2), name="a.b"), "without dots"),
    "init": (lambda: TTEmbeddingBag(SPEC, init="xavier"), "init must be one of gaussian"),
    "output": (
        lambda: TTEmbeddingBag(SPEC, precision=Precision(output=torch.int8)),
        "output must be",
    ),
    "nan rate": (
        lambda: TTEmbeddingBag(SPEC, optim.SGD(0.1)).set_learning_rate(math.nan),
        "finite",
    ),
    "negative rate": (
        lambda: TTEmbeddingBag(SPEC, optim.SGD(0.1)).set_learning_rate(-0.1),
        "finite",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("make", [lambda **k: TTSpec(90, 8, **k), storage.TensorTrain])
@pytest.mark.parametrize("name", ["ranks", "row_factors", "dim_factors"])
def test_what_is_no_sequence_is_refused(make: Callable[..., Any], name: str) -> None:
    for value in (16, "16", torch.tensor(16)):
        with pytest.raises(TypeError, match=f"{name} must be a sequence, e.g. "):
            make(**{"ranks": (2, 2), name: value})


def test_wrong_learning_rate_leaves_the_old_one() -> None:
    table = TTEmbeddingBag(SPEC, optim.SGD(0.25))
    with pytest.raises(ValueError, match="finite"):
        table.set_learning_rate(math.inf)
    assert table.learning_rate == 0.25


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [
        (torch.rand(3), torch.tensor([0, 3]), "int32 or int64"),
        (torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), "offsets"),
        (torch.tensor([[[1], [2]]]), torch.tensor([0, 2]), "1 dimension"),
    ],
)
def test_wrong_batches(indices: Tensor, offsets: Tensor, message: str) -> None:
    for mode in (BoundsCheck.WARNING, BoundsCheck.NONE):
        table = TTEmbeddingBag(SPEC, bounds_check=mode)
        on = table.features.device
        with pytest.raises(RuntimeError, match=message):
            table(indices.to(on), offsets.to(on))


@pytest.mark.parametrize("shape", [(2, 3), (6,), (3, 1)])
def test_weights_of_bags_in_rows_must_have_their_shape(shape: tuple[int, ...]) -> None:
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(shape)
    cached = CachedTTEmbeddingBags([SPEC], TTCache(rows=32))
    for table in (TTEmbeddingBag(SPEC), cached):
        on = table.features.device
        with pytest.raises(ValueError, match=r"shape of 2-dimensional indices, \(3, 2\)"):
            table(ids.to(on), None, weights.to(on))


def test_extra_repr_names_the_choices() -> None:
    text = repr(TTEmbeddingBag(SPEC, optim.Adagrad(0.1), pooling=Pooling.MEAN))
    for part in ("110 x 8", "ranks=(3, 4)", "Adagrad(lr=0.1", "pooling=mean", "x smaller"):
        assert part in text


def test_public_name() -> None:
    assert emblib.TTEmbeddingBag is TTEmbeddingBag
