"""The TBE module: state, errors, bounds modes and what users do with a module."""

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import emblib
from emblib import (
    BoundsCheck,
    Placement,
    Pooling,
    Precision,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.ops import autograd
from emblib.reference import tbe
from emblib.tables.batches import make_variable_layout
from tests.saved import saved_and_loaded
from tests.tbe_cases import OPTIMIZERS

INDICES = torch.tensor([0, 2, 1, 4, 4])
OFFSETS = torch.tensor([0, 1, 3, 3, 5])


def small(optimizer: optim.Optimizer | None = None, **options: Any) -> TableBatchedEmbeddingBags:
    torch.manual_seed(0)
    return TableBatchedEmbeddingBags([TableSpec(3, 4), TableSpec(5, 8)], optimizer, **options)


def one_step(module: TableBatchedEmbeddingBags) -> None:
    device = module.weights.device
    out = module(INDICES.to(device), OFFSETS.to(device))
    out.backward(torch.ones_like(out))


def test_output_is_one_row_a_sample(device: torch.device) -> None:
    module = small(device=device)
    out = module(INDICES.to(device), OFFSETS.to(device))
    first, second = module.table_weights()
    want = torch.cat(
        [torch.stack([first[0], first[2] + first[1]]), torch.stack([second[0] * 0, second[4] * 2])],
        dim=1,
    )
    assert_close(out.detach(), want)


def test_backward_updates_only_touched_rows(device: torch.device) -> None:
    module = small(optim.SGD(0.5), device=device)
    before = [table.clone() for table in module.table_weights()]
    one_step(module)
    after = module.table_weights()
    assert_close(after[0], before[0] - 0.5)
    assert torch.equal(after[1][:4], before[1][:4])
    assert_close(after[1][4], before[1][4] - 2 * 0.5)
    assert module.weights.grad is None
    assert module.step == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_dict_round_trip_resumes_exactly(optimizer: str, device: torch.device) -> None:
    module, other = (small(OPTIMIZERS[optimizer], device=device) for _ in range(2))
    one_step(module)
    other.load_state_dict(saved_and_loaded(module.state_dict(), weights_only=True))
    for copied in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.step == 1
        expected = copy.deepcopy(module)
        one_step(copied)
        one_step(expected)
        assert torch.equal(copied.weights, expected.weights)
        for state, want in zip(copied._states(), expected._states(), strict=True):
            assert torch.equal(state, want)


def test_copies_are_independent() -> None:
    module = small(optim.Adagrad(0.1))
    twin = copy.deepcopy(module)
    before = module.weights.detach().clone()
    one_step(twin)
    assert torch.equal(module.weights, before)
    assert not module.table_optimizer_states()[0]["sum"].any()


def test_views_share_memory_and_shape() -> None:
    module = small(optim.RowwiseAdagrad(0.1))
    module.table_weights()[1].fill_(7.0)
    assert module.weights.detach()[12:].eq(7.0).all()
    module.weights.data.zero_()
    one_step(module)
    states = module.table_optimizer_states()
    assert [state["sum"].shape for state in states] == [(3,), (5,)]
    assert states[0]["sum"].tolist() == [1.0, 1.0, 1.0]
    assert states[1]["sum"].tolist() == [0.0, 0.0, 0.0, 0.0, 4.0]
    elementwise = small(optim.Adam(0.1)).table_optimizer_states()
    assert elementwise[1]["exp_avg_sq"].shape == (5, 8)


def test_learning_rate_takes_effect_at_once() -> None:
    module = small(optim.SGD(0.5))
    module.set_learning_rate(0.0)
    before = module.weights.detach().clone()
    one_step(module)
    assert torch.equal(module.weights, before)
    assert module.learning_rate == 0.0


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -0.1, None, [0.1]])
def test_bad_learning_rate_changes_nothing(lr: Any) -> None:
    module = small(optim.SGD(0.5))
    with pytest.raises(ValueError, match="finite number >= 0"):
        module.set_learning_rate(lr)
    assert module.learning_rate == 0.5
    with pytest.raises(ValueError, match="finite number >= 0"):
        optim.SGD(lr)


@pytest.mark.parametrize(
    ("fused_optimizer", "torch_optimizer", "tolerance"),
    [
        (optim.SGD(0.1), torch.optim.SGD, {}),
        (optim.Adam(0.1), torch.optim.SparseAdam, {"rtol": 1e-4, "atol": 1e-6}),
    ],
    ids=("sgd", "adam"),
)
def test_external_optimizer_equals_fused(
    fused_optimizer: optim.Optimizer, torch_optimizer: Any, tolerance: dict[str, float]
) -> None:
    tables = [TableSpec(30, 4), TableSpec(5, 4)]
    torch.manual_seed(0)
    external = TableBatchedEmbeddingBags(tables, optim.External())
    fused = TableBatchedEmbeddingBags(tables, fused_optimizer)
    fused.weights.data.copy_(external.weights.detach().view(-1))
    optimizer = torch_optimizer([external.weights], lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        one_step(external)
        optimizer.step()
        one_step(fused)
    assert_close(external.weights.detach().view(-1), fused.weights.detach(), **tolerance)


def test_fatal_raises_before_anything_is_written() -> None:
    module = small(optim.SGD(0.5), bounds_check=BoundsCheck.FATAL)
    before = module.weights.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"feature 0, .* must be in \[0, 3\).*got 3 at position 1"
    ):
        module(torch.tensor([0, 3, 1, 4, 4]), OFFSETS)
    with pytest.raises(RuntimeError, match=r"not decrease.*got 3 at position 2 \(are they offsets"):
        module(INDICES, torch.tensor([0, 5, 3, 3, 5]))
    with pytest.raises(RuntimeError, match="got 4 at position 4"):
        module(INDICES, torch.tensor([0, 1, 3, 3, 4]))
    assert torch.equal(module.weights, before)
    assert module(torch.tensor([-1, 2, 1, 4, 4]), OFFSETS)[0, :4].eq(0).all()


def test_warning_warns_counts_and_repairs() -> None:
    module = small(optim.SGD(0.5), bounds_check=BoundsCheck.WARNING)
    bad = torch.tensor([0, 99, 1, -5, 4])
    with pytest.warns(UserWarning, match="2 indices and 0 offsets out of bounds"):
        out = module(bad, OFFSETS)
    assert torch.equal(out, module(torch.tensor([0, 0, 1, 0, 4]), OFFSETS))
    assert module.bounds_violations.tolist() == [2, 0]
    assert bad.tolist() == [0, 99, 1, -5, 4]


@pytest.mark.parametrize("mode", [BoundsCheck.IGNORE, BoundsCheck.NONE])
def test_silent_modes_never_read_out_of_bounds(mode: BoundsCheck) -> None:
    module = small(optim.SGD(0.5), bounds_check=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = module(torch.tensor([2**40, -(2**40), 1, 7, -1]), torch.tensor([-9, 50, 1, 3, 3]))
        out.sum().backward()
    assert bool(out.isfinite().all())
    assert bool(module.weights.isfinite().all())


def test_dtype_is_chosen_once_and_device_moves(device: torch.device) -> None:
    module = (
        small(optim.Adagrad(0.1), precision=Precision(torch.float16))
        .half()
        .to(device)
        .to(torch.bfloat16)
    )
    assert module.weights.dtype == torch.float16
    assert module.state_sum.dtype == torch.float32
    assert module.hyperparams.dtype == torch.float64
    assert module.weights.device.type == device.type
    one_step(module)


def _filled_with_nan(tensor: Tensor, device: torch.device) -> Tensor:
    """Return what `torch.empty_like`, which `to_empty` calls, may return."""
    return torch.zeros_like(tensor, device=device).fill_(
        math.nan if tensor.is_floating_point() else 7
    )


@pytest.mark.parametrize("start", ["meta", "cpu"])
def test_to_empty_reads_no_uninitialized_memory(
    start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = small(optim.Adagrad(0.1), device=start)
    monkeypatch.setattr(torch, "empty_like", _filled_with_nan)
    module.to_empty(device="cpu")
    if start == "meta":
        assert (module.step, module.learning_rate) == (0, 0.1)
    module.reset_parameters()
    assert (module.step, module.learning_rate) == (0, 0.1)
    one_step(module)


@pytest.mark.parametrize("mode", BoundsCheck)
@pytest.mark.parametrize("optimizer", [optim.Adam(0.1), None])
def test_trains_on_meta_as_embedding_bag(
    mode: BoundsCheck, optimizer: optim.Optimizer | None
) -> None:
    module = small(optimizer, device="meta", bounds_check=mode)
    indices = torch.empty(4, dtype=torch.int64, device="meta")
    out = module(indices, torch.empty(5, dtype=torch.int64, device="meta"))
    assert out.is_meta
    assert out.shape == (2, 12)
    out.sum().backward()


def test_moves_from_meta() -> None:
    module = small(optim.Adagrad(0.1), device="meta").to_empty(device="cpu")
    module.reset_parameters()
    one_step(module)
    assert module.features.tolist() == [[0, 0, 3, 4, 0, 0, 0, 0], [12, 3, 5, 8, 4, 0, 3, 0]]
    assert module.step == 1
    saved = small(optim.Adagrad(0.1))
    one_step(saved)
    for assign in (False, True):
        other = small(optim.Adagrad(0.1), device="meta")
        if not assign:
            other = other.to_empty(device="cpu")
        other.load_state_dict(saved.state_dict(), assign=assign)
        want = copy.deepcopy(saved)
        one_step(other)
        one_step(want)
        assert torch.equal(other.weights, want.weights)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ([TableSpec(3, 4), TableSpec(5, 8)], {"pooling": Pooling.NONE}, ValueError, "one dim"),
        ([TableSpec(3, 4)], {"feature_tables": [1]}, ValueError, r"in \[0, 1\)"),
        ([TableSpec(3, 4)], {"precision": torch.float16}, TypeError, "must be a Precision"),
        ([TableSpec(3, 4)], {"cache": 0.2}, TypeError, "must be a Cache"),
        ([TableSpec(3, 4)], {"pooling": "max"}, ValueError, "max"),
        (
            [TableSpec(3, 4), TableSpec(5, 8)],
            {"optimizer": optim.External()},
            ValueError,
            "needs one dim",
        ),
    ],
)
def test_bad_choices_are_refused(
    arguments: list[TableSpec], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TableBatchedEmbeddingBags(arguments, **options)


@pytest.mark.parametrize(
    ("rows", "dim", "error"),
    [
        (-1, 4, ValueError),
        (3, 0, ValueError),
        (3, -1, ValueError),
        (3.0, 4, TypeError),
        (True, 4, TypeError),
    ],
)
def test_bad_specs_are_refused(rows: Any, dim: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="must be"):
        TableSpec(rows, dim)


def test_wrong_forward_input_is_refused() -> None:
    module = small()
    with pytest.raises(RuntimeError, match=r"1 entries for F = 2 features, got 4"):
        module(INDICES, torch.tensor([0, 1, 3, 5]))
    with pytest.raises(RuntimeError, match="indices must be int32 or int64"):
        module(INDICES.float(), OFFSETS)
    with pytest.raises(RuntimeError, match="one entry per lookup = 5, got 2"):
        module(INDICES, OFFSETS, torch.ones(2))


def test_repr_and_sizes() -> None:
    module = small(optim.RowwiseAdagrad(0.1))
    assert "3 x 4" in repr(module)
    assert "RowwiseAdagrad(lr=0.1" in repr(module)
    assert module.nbytes() == {
        "weights": 4 * (12 + 40),
        "optimizer_state": 4 * 8,
        "cache": 0,
    }


def test_initial_weights_are_uniform_by_table() -> None:
    torch.manual_seed(0)
    module = TableBatchedEmbeddingBags([TableSpec(10_000, 8), TableSpec(100, 8)])
    for table, rows in zip(module.table_weights(), (10_000, 100), strict=True):
        bound = rows**-0.5
        assert table.abs().max() <= bound
        assert_close(table.std().item(), bound / 3**0.5, rtol=0.05, atol=0)
        assert abs(table.mean().item()) < 0.1 * bound


# Further arguments of forward: variable batch sizes, gradients wanted, known row counts


TABLES = [TableSpec(30, 4), TableSpec(7, 6), TableSpec(20, 3)]
FEATURES = (0, 1, 1, 2)
SIZES = [[2, 0, 3], [1, 1, 1], [0, 0, 0], [4, 2, 0]]


def module(optimizer: optim.Optimizer, device: torch.device, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"feature_tables": FEATURES, "bounds_check": BoundsCheck.WARNING, **options}
    return TableBatchedEmbeddingBags(TABLES, optimizer, device=device, **options)


def variable(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    bags = [sum(sizes) for sizes in SIZES]
    lengths = torch.randint(0, 4, (sum(bags),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    parts, first = [], 0
    for f, count in enumerate(bags):
        size = int(lengths[first : first + count].sum())
        parts.append(torch.randint(0, TABLES[FEATURES[f]].rows, (size,), generator=generator))
        first += count
    return torch.cat(parts), offsets


def by_bag(weights: list[Tensor], indices: Tensor, offsets: Tensor, pooling: Pooling) -> Tensor:
    """The output written as its definition says: rank, feature, bag."""
    first_bag, bag = {}, 0
    for f, sizes in enumerate(SIZES):
        for r, size in enumerate(sizes):
            first_bag[f, r] = bag
            bag += size
    pieces = []
    for r in range(len(SIZES[0])):
        for f, sizes in enumerate(SIZES):
            for b in range(first_bag[f, r], first_bag[f, r] + sizes[r]):
                rows = weights[FEATURES[f]][indices[offsets[b] : offsets[b + 1]]]
                total = rows.sum(0)
                mean = pooling is Pooling.MEAN and rows.size(0) > 0
                pieces.append(total / rows.size(0) if mean else total)
    return torch.cat(pieces)


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
def test_variable_batch_output_and_update(pooling: Pooling, device: torch.device) -> None:
    table = module(optim.SGD(0.1), device, pooling=pooling)
    indices, offsets = (t.to(device) for t in variable())
    weights = [w.clone().requires_grad_() for w in table.table_weights()]
    want = by_bag(weights, indices, offsets, pooling)
    out = table(indices, offsets, batch_sizes=SIZES)
    assert_close(out.detach(), want.detach())
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    out.backward(grad)
    want.backward(grad)
    for got, weight in zip(table.table_weights(), weights, strict=True):
        assert_close(got, (weight - 0.1 * weight.grad).detach())


def test_variable_batch_with_weights_and_without_gradient(device: torch.device) -> None:
    table = module(optim.Adagrad(0.1), device)
    indices, offsets = (t.to(device) for t in variable(3))
    scales = torch.rand(indices.numel(), device=device, requires_grad=True)
    out = table(indices, offsets, scales, batch_sizes=SIZES)
    weights = table.weights.detach().clone()
    layout = make_variable_layout(SIZES, [4, 6, 6, 3], offsets.numel() - 1, device).bag_layout
    extras = tbe.Extras(bag_layout=layout)
    wanted = scales.detach().clone().requires_grad_()
    want = tbe.lookup(
        weights, table.features, indices, offsets, wanted, output_dim=out.numel(), extras=extras
    )
    assert_close(out.detach(), want.detach())
    out.sum().backward()
    want.sum().backward()
    assert_close(scales.grad, wanted.grad)
    with torch.no_grad():
        for sizes in (SIZES, torch.tensor(SIZES), torch.tensor(SIZES).numpy()):
            assert table(indices, offsets, batch_sizes=sizes).shape == out.shape


def test_equal_variable_batches_are_a_fixed_one(device: torch.device) -> None:
    fixed, varying = (module(optim.RowwiseAdagrad(0.1), device) for _ in range(2))
    offsets = torch.arange(0, 4 * 5 * 2 + 1, 2, device=device)
    indices = torch.randint(0, 7, (40,), generator=torch.Generator().manual_seed(0)).to(device)
    out = fixed(indices, offsets)
    other = varying(indices, offsets, batch_sizes=[[5]] * 4)
    dims = [4, 6, 6, 3]
    blocks = other.split([5 * d for d in dims])
    other_out = torch.cat([b.view(5, d) for b, d in zip(blocks, dims, strict=True)], dim=1)
    assert torch.equal(out, other_out)
    out.sum().backward()
    other.sum().backward()
    assert torch.equal(fixed.weights, varying.weights)


def test_sequences_in_a_variable_batch(device: torch.device) -> None:
    tables = [TableSpec(30, 4), TableSpec(7, 4)]
    table = TableBatchedEmbeddingBags(tables, optim.SGD(0.1), pooling=Pooling.NONE, device=device)
    indices = torch.tensor([3, 4, 5, 6, 1], device=device)
    offsets = torch.tensor([0, 1, 3, 5], device=device)
    out = table(indices, offsets, batch_sizes=[[1], [2]])
    first, second = table.table_weights()
    assert_close(out.detach(), torch.cat([first[[3]], second[[4, 5, 6, 1]]]))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([[1]], "one list per feature = 4"),
        ([[1], [2, 3], [1], [1]], "same number of ranks"),
        ([[1], [-1], [1], [1]], ">= 0"),
        ([[1], [1], [1], [1]], "add up to 4 bags, but offsets has 14"),
    ],
)
def test_wrong_batch_sizes_are_refused(sizes: list[list[int]], message: str) -> None:
    table = module(optim.SGD(0.1), torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        table(*variable(), batch_sizes=sizes)


def test_batches_of_wrong_types_are_refused() -> None:
    table = module(optim.SGD(0.1), torch.device("cpu"))
    indices, offsets = variable()
    with pytest.raises(TypeError, match="must be one list of ints per feature, got"):
        table(indices, offsets, batch_sizes=[sum(sizes) for sizes in SIZES])
    with pytest.raises(TypeError, match="batch_sizes must be ints"):
        table(indices, offsets, batch_sizes=[[*sizes[:-1], float(sizes[-1])] for sizes in SIZES])
    for dtype in (torch.float32, torch.float64):
        sizes_of_floats = [torch.tensor(sizes, dtype=dtype) for sizes in SIZES]
        with pytest.raises(TypeError, match="batch_sizes must be ints"):
            table(indices, offsets, batch_sizes=sizes_of_floats)
        with pytest.raises(TypeError, match="batch_sizes must be ints"):
            table(indices, offsets, batch_sizes=[sizes.numpy() for sizes in sizes_of_floats])
    with pytest.raises(TypeError, match="indices must be a tensor, got list"):
        table(indices.tolist(), offsets)
    spec = TableSpec(9, 4, placement=Placement.MANAGED_CACHING)
    cached = TableBatchedEmbeddingBags([spec], optim.SGD(0.1))
    with pytest.raises(TypeError, match="offsets must be a tensor, got list"):
        cached.prefetch(indices, offsets.tolist())


TRAIN = emblib.TTSpec(40, 8, (2, 2))
MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "fused": lambda **o: TableBatchedEmbeddingBags([TableSpec(9, 4)], optim.SGD(0.1), **o),
    "dense gradients": lambda **o: TableBatchedEmbeddingBags([TableSpec(9, 4)], **o),
    "train": lambda **o: emblib.TTEmbeddingBag(TRAIN, optim.SGD(0.1), **o),
    "trains": lambda **o: emblib.TableBatchedTTEmbeddingBags([TRAIN], **o),
    "quantised": lambda **o: emblib.QuantizedEmbeddingBags([TableSpec(9, 4)], **o),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("include_last_offset", [True, False])
@pytest.mark.parametrize("name", ["indices", "offsets", "per_sample_weights"])
def test_arguments_that_are_no_tensors_are_named(
    kind: str, name: str, include_last_offset: bool
) -> None:
    batch = {
        "indices": torch.tensor([1, 2]),
        "offsets": torch.tensor([0, 2] if include_last_offset else [0]),
        "per_sample_weights": torch.ones(2),
    }
    table = MODULES[kind](include_last_offset=include_last_offset)
    table(**batch)
    with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
        table(**{**batch, name: batch[name].tolist()})


@pytest.mark.parametrize("sizes", [None, SIZES])
@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [(Pooling.SUM, False), (Pooling.SUM, True), (Pooling.MEAN, True), (Pooling.NONE, False)],
)
def test_lookups_for_the_sake_of_their_update(
    pooling: Pooling, weighted: bool, sizes: list[list[int]] | None, device: torch.device
) -> None:
    tables = TABLES if pooling is not Pooling.NONE else [replace(t, dim=4) for t in TABLES]
    indices, offsets = (t.to(device) for t in variable())
    if sizes is None:
        offsets = offsets[: 4 * (len(offsets) // 4) + 1]
        indices = indices[: int(offsets[-1])] % 7
    found = []
    for for_update in (False, True):
        torch.manual_seed(0)
        table = TableBatchedEmbeddingBags(
            tables, optim.Adagrad(0.1), feature_tables=FEATURES, pooling=pooling, device=device
        )
        weights = torch.linspace(0, 1, indices.numel(), device=device).requires_grad_()
        given = weights if weighted else None
        look_up = autograd.for_update(table) if for_update else table
        out = look_up(indices, offsets, given, batch_sizes=sizes)
        if for_update:
            assert out.untyped_storage().nbytes() == out.element_size()
        grad = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)
        out.backward(grad)
        found.append((out.shape, out.dtype, weights.grad, table.weights))
    (*first, of_weights, trained), (*second, of_weights_too, trained_too) = found
    assert first == second
    assert (of_weights is None) == (of_weights_too is None) == (not weighted)
    if weighted:
        assert torch.equal(of_weights, of_weights_too)
    assert torch.equal(trained, trained_too)


def test_known_number_of_rows(device: torch.device) -> None:
    tables = [TableSpec(30, 4), TableSpec(7, 4)]
    table = TableBatchedEmbeddingBags(tables, optim.External(), device=device)
    indices, offsets = torch.tensor([3, 3, 5, 1], device=device), torch.arange(5, device=device)
    table.num_distinct_rows = 3
    table(indices, offsets).sum().backward()
    known = table.weights.grad
    table.weights.grad = table.num_distinct_rows = None
    table(indices, offsets).sum().backward()
    assert torch.equal(known.to_dense(), table.weights.grad.to_dense())
    if device.type == "cpu":
        table.num_distinct_rows = 5
        with pytest.raises(ValueError, match="number of distinct rows of the batch, 3, got 5"):
            table(indices, offsets).sum().backward()


@pytest.mark.parametrize("torch_optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_dense_gradient_equals_embedding_bag(torch_optimizer: Any, device: torch.device) -> None:
    specs = [replace(spec, name=f"t{t}") for t, spec in enumerate(TABLES)]
    dense = TableBatchedEmbeddingBags(
        specs, optim.External(gradient=optim.Gradient.DENSE), device=device
    )
    bags = [torch.nn.EmbeddingBag(s.rows, s.dim, mode="sum", device=device) for s in specs]
    for bag, table in zip(bags, dense.table_weights(), strict=True):
        bag.weight.data.copy_(table)
    first = torch_optimizer(dense.parameters(), lr=0.1)
    second = torch_optimizer([bag.weight for bag in bags], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = [torch.randint(0, s.rows, (10,), generator=generator).to(device) for s in specs]
        starts = torch.arange(0, 10, 2, device=device)
        offsets = torch.arange(0, 31, 2, device=device)
        out = dense(torch.cat(ids), offsets)
        want = torch.cat([bag(i, starts) for bag, i in zip(bags, ids, strict=True)], dim=1)
        assert_close(out, want)
        for optimizer, result in ((first, out), (second, want)):
            optimizer.zero_grad()
            (result**2).sum().backward()
            optimizer.step()
    for bag, table in zip(bags, dense.table_weights(), strict=True):
        assert_close(table, bag.weight.detach())
