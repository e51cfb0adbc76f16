"""Table-batched embeddings: native kernels against `emblib.reference.tbe`, case by case."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from emblib import BoundsCheck, Pooling, TableBatchedEmbeddingBags, TableSpec, optim
from emblib.ops import tbe
from emblib.ops.codes import BOUNDS_CHECK, OPTIMIZER, POOLING
from emblib.reference import tbe as reference
from tests.tbe_cases import CASES, OPTIMIZERS, Case, tolerance
from tests.test_schema import CPU_ONLY

ops = torch.ops.emblib


def expected(
    module: TableBatchedEmbeddingBags, inputs: tuple[Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output of the reference in float64, and the leaves to differentiate it in."""
    indices, offsets, sample_weights = inputs
    weights = module.weights.detach().double().flatten().requires_grad_()
    scales = None if sample_weights is None else sample_weights.detach().double().requires_grad_()
    out = reference.lookup(
        weights, module.features, indices, offsets, scales, module.pooling, module.output_dim
    )
    return out, weights, scales


def train(case: Case, optimizer: optim.Optimizer, device: Any, steps: int = 3) -> None:
    """Some steps of the module and of the reference from the same state; they must agree."""
    module = case.module(optimizer, device)
    weights = module.weights.detach().double().flatten()
    states = [state.double() for state in module._states()]
    for step in range(steps):
        indices, offsets, scales = replace(case, seed=case.seed + step).batch_of(device)
        if scales is not None:
            scales.requires_grad_()
        module.weights.data.copy_(weights.view_as(module.weights))
        out = module(indices, offsets, scales)
        want, want_weights, want_scales = expected(module, (indices, offsets, scales))
        assert out.dtype == case.output_dtype
        assert_close(out.double(), want, **tolerance(case))
        # A row gets as many gradients as a bag is long: keep their sum near the weights' size.
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(step)).to(out)
        grad /= max(case.longest, 1)
        out.backward(grad)
        if want.requires_grad:  # it does not where there are no tables
            want.backward(grad.double())
        if scales is not None:
            assert_close(scales.grad.double(), want_scales.grad, **tolerance(case))
        weight_grad = want_weights.grad
        weight_grad = torch.zeros_like(want_weights) if weight_grad is None else weight_grad
        groups = reference.group(module.features, indices, offsets)
        weights = want_weights.detach()
        reference.update_(
            weights,
            states,
            module.hyperparams,
            optimizer.name,
            weight_grad,
            module.features,
            groups,
        )
        assert_close(module.weights.detach().flatten().double(), weights, **tolerance(case))
        for state, want_state in zip(module._states(), states, strict=True):
            assert_close(state.double(), want_state, **tolerance(case))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_training_matches_reference(name: str, optimizer: str, device: torch.device) -> None:
    train(CASES[name], OPTIMIZERS[optimizer], device)


@pytest.mark.parametrize("first", [0, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_a_gradient_that_is_a_view_of_columns(name: str, first: int, device: torch.device) -> None:
    """The gradient of a part of `torch.cat(..., dim=1)` gives the bits of its copy."""
    case = CASES[name]
    results = []
    for contiguous in (True, False):
        module = case.module(optim.RowwiseAdagrad(0.1), device)
        indices, offsets, scales = case.batch_of(device)
        if scales is not None:
            scales.requires_grad_()
        out = module(indices, offsets, scales)
        wide = torch.randn(len(out), first + out.size(1) + 5, generator=torch.Generator())
        grad = wide.to(out)[:, first : first + out.size(1)]
        out.backward(grad.contiguous() if contiguous else grad)
        results.append([module.weights.detach(), *([] if scales is None else [scales.grad])])
    for copied, viewed in zip(*results, strict=True):
        assert torch.equal(copied, viewed)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_case_matches_reference(data: st.DataObject) -> None:
    tables = data.draw(st.integers(1, 3), "tables")
    pooling = data.draw(st.sampled_from(list(Pooling)), "pooling")
    dim = data.draw(st.integers(1, 70), "dim")
    uniform = pooling is Pooling.NONE
    case = Case(
        rows=tuple(data.draw(st.integers(1, 40), "rows") for _ in range(tables)),
        dims=tuple(dim if uniform else data.draw(st.integers(1, 70)) for _ in range(tables)),
        feature_tables=tuple(
            data.draw(st.lists(st.integers(0, tables - 1), min_size=1, max_size=4), "features")
        ),
        batch=data.draw(st.integers(0, 6), "batch"),
        longest=data.draw(st.integers(0, 20), "longest"),
        pooling=pooling,
        weighted=not uniform and data.draw(st.booleans(), "weighted"),
        index_dtype=data.draw(st.sampled_from([torch.int32, torch.int64]), "index"),
        offset_dtype=data.draw(st.sampled_from([torch.int32, torch.int64]), "offset"),
        invalid=data.draw(st.booleans(), "invalid"),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    train(case, OPTIMIZERS[data.draw(st.sampled_from(sorted(OPTIMIZERS)))], "cpu", steps=2)


@pytest.mark.parametrize("repaired", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_grouping_matches_reference(name: str, repaired: bool, device: torch.device) -> None:
    case = CASES[name]
    module = case.module(optim.SGD(0.1), device)
    indices, offsets, _ = case.batch_of(device)
    got = tbe.group(module.features, indices, offsets, module.total_rows, repaired=repaired)
    want = reference.group(module.features, indices, offsets)
    unique, grouped = want.rows.numel(), want.lookups.numel()
    assert int(got.count) == unique
    assert torch.equal(got.rows[:unique], want.rows)
    assert torch.equal(got.segments[: unique + 1].long(), want.segments)
    assert bool((got.segments[unique:] == grouped).all())
    assert torch.equal(got.lookups[:grouped].long(), want.lookups)
    assert torch.equal(got.bags[:grouped].long(), want.bags)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if len(set(c.dims)) == 1])
def test_external_gradient_matches_reference(name: str, device: torch.device) -> None:
    case = CASES[name]
    module = case.module(optim.External(), device)
    indices, offsets, scales = case.batch_of(device)
    out = module(indices, offsets, scales)
    want, want_weights, _ = expected(module, (indices, offsets, scales))
    out.sum().backward()  # an expanded gradient: stride 0
    if want.requires_grad:
        want.sum().backward()
    grad = module.weights.grad
    assert grad.is_sparse
    assert grad._indices().unique().numel() == grad._nnz(), "one entry per distinct row"
    wanted = torch.zeros_like(want_weights) if want_weights.grad is None else want_weights.grad
    assert_close(grad.to_dense().double().flatten(), wanted, **tolerance(case))


@pytest.mark.parametrize("pooling", list(Pooling))
def test_reference_gradient_in_float64(pooling: Pooling) -> None:
    case = replace(CASES["plain"], dims=(3, 3), batch=2, longest=3, pooling=pooling)
    features = case.module(optim.SGD(0.1)).features
    indices, offsets, _ = case.batch_of()
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(57 * 3, dtype=torch.float64, generator=generator, requires_grad=True)
    scales = torch.rand(indices.numel(), dtype=torch.float64, generator=generator)
    scales.requires_grad_(pooling is not Pooling.NONE)
    columns = 3 if pooling is Pooling.NONE else 6

    def run(w: Tensor, s: Tensor) -> Tensor:
        given = s if pooling is not Pooling.NONE else None
        return reference.lookup(w, features, indices, offsets, given, pooling, columns)

    assert torch.autograd.gradcheck(run, (weights, scales))


@pytest.mark.parametrize(
    "change",
    [
        {"rows": (1, 3), "batch": 30, "longest": 400},
        {"weighted": True, "pooling": Pooling.MEAN},
        {"pooling": Pooling.NONE},
        {"dims": (16, 33)},
    ],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_same_bits_on_any_number_of_threads(
    change: dict[str, Any], optimizer: str, thread_counts: list[int]
) -> None:
    case = replace(CASES["many_lookups"], **change)
    results = []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        module = case.module(OPTIMIZERS[optimizer])
        out = module(*case.batch_of())
        out.backward(out.detach())
        results.append((out.detach(), module.weights.detach(), *module._states()))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("length", [1023, 1024, 1025, 2048, 5000])
def test_long_segments_are_cut_without_a_trace(length: int) -> None:
    case = replace(CASES["plain"], rows=(1, 3), batch=2, lengths=(length, 7, 5, 5), longest=length)
    train(case, OPTIMIZERS["adagrad"], "cpu", steps=2)


def test_more_rows_than_32_bits(device: torch.device) -> None:
    features = torch.tensor(
        [[0, 0, 1 << 40, 8, 0, 0, 0, 0], [0, 1 << 40, 1 << 41, 8, 8, 0, 0, 0]], device=device
    )
    indices = torch.randint(0, 1 << 40, (5000,), generator=torch.Generator().manual_seed(0))
    indices[::7] = indices[3]
    offsets = torch.arange(0, 5001, 50)
    got = tbe.group(features, indices.to(device), offsets.to(device), 1 << 42)
    want = reference.group(features, indices.to(device), offsets.to(device))
    unique = int(got.count)
    assert torch.equal(got.rows[:unique], want.rows)
    assert torch.equal(got.lookups.long(), want.lookups)


@pytest.mark.parametrize("eps", [0.0, 1e-50])
@pytest.mark.parametrize("optimizer", [optim.Adagrad, optim.RowwiseAdagrad, optim.Adam])
def test_no_eps_makes_no_nan(optimizer: Any, eps: float) -> None:
    case = CASES["plain"]
    module = case.module(optimizer(0.1, eps=eps))
    out = module(*case.batch_of()[:2])
    grad = torch.zeros_like(out)
    grad[:, 0], grad[:, 1] = 1.0, 1e-25  # the rest stays zero; 1e-25 squared is zero in float32
    out.backward(grad)
    assert bool(module.weights.isfinite().all())


@pytest.mark.parametrize(
    ("offsets", "repaired"),
    [
        ([0, 2, 4, 6, 8], [0, 2, 4, 6, 8]),
        ([0, 5, 3, 6, 8], [0, 5, 5, 6, 8]),
        ([-4, 2, 99, 6, 8], [0, 2, 8, 8, 8]),
        ([3, 3, 4, 6, 7], [3, 3, 4, 6, 8]),
        ([0, 2, 4, 6, -(2**63) + 2], [0, 2, 4, 6, 8]),
        ([0, 2, -(2**63) + 2, 0, 8], [0, 2, 2, 2, 8]),
    ],
)
def test_offsets_are_repaired(
    offsets: list[int], repaired: list[int], device: torch.device
) -> None:
    module = replace(CASES["plain"], batch=2).module(optim.SGD(0.1), device)
    indices = torch.tensor([1, -1, 49, 50, 6, 7, -2, 0], device=device)
    given_offsets = torch.tensor(offsets, device=device)
    before = given_offsets.clone()
    fixed, violations = ops.bounds_check(
        indices, given_offsets, module.features, None, BOUNDS_CHECK["ignore"]
    )
    assert fixed.tolist() == repaired
    assert reference.repair_offsets(given_offsets, 8).tolist() == repaired
    changed = sum(a != b for a, b in zip(offsets, repaired, strict=True))
    changed += int(reference.num_lost_ids(indices, given_offsets))
    rows = [50 if i < repaired[2] else 7 for i in range(8)]
    bad = sum(
        i >= repaired[0] and not -1 <= index < row
        for i, (index, row) in enumerate(zip(indices.tolist(), rows, strict=True))
    )
    assert violations.tolist() == [bad, changed]
    assert torch.equal(given_offsets, before), "the caller's tensor must stay as it is"
    want, _, _ = expected(module, (indices, given_offsets, None))
    module.bounds_check = BoundsCheck.IGNORE
    assert_close(module(indices, given_offsets).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bags_that_overlap_read_no_other_table(dtype: torch.dtype, device: torch.device) -> None:
    """Offsets that decrease, and were not repaired: an index beyond the table reads row 0."""
    weights = torch.cat([torch.ones(4 * 16), torch.full((1000 * 16,), 2.0)])
    features = torch.tensor([[0, 0, 4, 16, 0, 0, 0, 0], [64, 4, 1000, 16, 16, 0, 4, 0]])
    offsets = torch.tensor([0, 9, 3, 4, 5, 6, 10], dtype=dtype)
    indices = torch.tensor([0, 1, 2, 3] + 6 * [900], dtype=dtype)
    out = tbe.tbe_lookup(
        [weights.to(device)],
        features.to(device),
        indices.to(device),
        offsets.to(device),
        None,
        None,
        None,
        POOLING["sum"],
        32,
        torch.float32,
    )
    # The bags of table 0 have the lookups [0, 9), none and [3, 4).
    assert out[:, 0].tolist() == [9, 0, 1]
    assert out[:, 16].tolist() == [2, 2, 8]


@pytest.mark.parametrize("index", [2**62, -(2**63), 2**63 - 1, 50, -2])
def test_extreme_indices_are_counted(index: int, device: torch.device) -> None:
    module = replace(CASES["plain"], batch=2).module(optim.SGD(0.1), device)
    indices = torch.tensor([1, index, 2], device=device)
    offsets = torch.tensor([0, 3, 3, 3, 3], device=device)
    violations = ops.bounds_check(indices, offsets, module.features, None, BOUNDS_CHECK["warning"])[
        1
    ]
    assert violations.tolist() == [1, 0]


# A run of a table without buckets, with three passes, and one that is too long for it.
@pytest.mark.parametrize(
    ("lookups", "rows"), [(100_000, 3_000), (70_000, 5_000_000), (530_000, 40)]
)
def test_groups_of_many_lookups(lookups: int, rows: int, device: torch.device) -> None:
    specs = [TableSpec(rows, 1), TableSpec(9, 1)]
    module = TableBatchedEmbeddingBags(specs, optim.SGD(0.1), device=device)
    generator = torch.Generator().manual_seed(3)
    indices = torch.cat(
        [torch.randint(spec.rows, (lookups,), generator=generator) for spec in specs]
    ).to(device)
    offsets = torch.tensor([0, 7, lookups, lookups, 2 * lookups], device=device)
    groups = tbe.group(module.features, indices, offsets, module.total_rows)
    wanted = reference.group(module.features, indices, offsets)
    assert int(groups.count) == wanted.rows.numel()
    for found, want in zip(groups, wanted, strict=False):
        assert torch.equal(found[: want.numel()].long(), want)


def _opcheck_arguments(device: torch.device) -> dict[str, tuple[Any, ...]]:
    # So many rows that all lookups differ: opcheck compares outputs whole, padding included.
    case = replace(CASES["weighted"], rows=(100_000, 100_000))
    module = case.module(OPTIMIZERS["adam"], device)
    indices, offsets, scales = case.batch_of(device)
    weights, features = module.weights.detach(), module.features
    groups = tuple(tbe.group(features, indices, offsets, module.total_rows))
    grad = torch.randn(case.batch, module.output_dim, device=device)
    hyper = OPTIMIZERS["adam"].hyperparams(device)
    hyper[1] = 1.0
    counting = (BOUNDS_CHECK["warning"], module.bounds_violations)
    return {
        "bounds_check": (indices, offsets, features, None, BOUNDS_CHECK["warning"]),
        "bounds_check_": (indices, offsets, features, None, *counting),
        "tbe_lookup": (
            [weights],
            features,
            indices,
            offsets,
            None,
            None,
            scales,
            POOLING["sum"],
            module.output_dim,
            torch.float16,
        ),
        "tbe_lookup_checked_": (
            [weights],
            features,
            indices,
            offsets,
            scales,
            POOLING["sum"],
            module.output_dim,
            torch.float16,
            *counting,
        ),
        "tbe_group": (features, indices, offsets, None, module.total_rows),
        "tbe_row_grads": (grad, features, *groups, offsets, None, scales, POOLING["mean"], 16),
        "tbe_update_": (
            [weights],
            module._states(),
            hyper,
            OPTIMIZER["adam"],
            grad,
            features,
            *groups,
            offsets,
            None,
            None,
            scales,
            POOLING["sum"],
        ),
        "tbe_backward_": (
            [weights],
            module._states(),
            hyper,
            OPTIMIZER["adam"],
            grad,
            features,
            indices,
            offsets,
            scales,
            POOLING["sum"],
            module.total_rows,
        ),
        "tbe_sample_weight_grad": (
            grad,
            [weights],
            features,
            indices,
            offsets,
            None,
            None,
            POOLING["sum"],
        ),
        "advise_huge_pages_": (weights,),
    }


OPCHECKED = sorted(_opcheck_arguments(torch.device("cpu")))


@pytest.mark.parametrize("name", OPCHECKED)
def test_opcheck(name: str, device: torch.device) -> None:
    if name in CPU_ONLY and device.type != "cpu":
        pytest.skip(CPU_ONLY[name])
    op, arguments = getattr(ops, name).default, _opcheck_arguments(device)[name]
    if name == "tbe_lookup_checked_":  # returns a list and mutates: compiled code calls its parts
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op, arguments, test_utils=checks)
        return
    torch.library.opcheck(op, arguments)


def test_fake_shapes_of_pooling_none() -> None:
    case = CASES["none"]
    module = case.module(optim.SGD(0.1))
    indices, offsets, _ = case.batch_of()
    args = ([module.weights.detach()], module.features, indices, offsets, None, None, None)
    torch.library.opcheck(ops.tbe_lookup.default, (*args, POOLING["none"], 16, torch.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [torch.zeros(912, dtype=torch.float64)]}, "float32, float16 or bfloat16"),
        ({"indices": torch.zeros(8)}, "indices must be int32 or int64"),
        ({"indices": torch.zeros(2, 4, dtype=torch.int64)}, "indices must have 1 dimension, got 2"),
        ({"offsets": torch.zeros(4, dtype=torch.int64)}, "F.B . 1 entries for F = 2 features, got"),
        ({"offsets": torch.zeros(0, dtype=torch.int64)}, "8 indices but no bags"),
        ({"sample_weights": torch.zeros(8, 1)}, "one entry per lookup = 8, got 8 in 2 dimensions"),
        (
            {"features": torch.tensor([[0, 0, 1 << 62, 4, 0, 0, 0, 0]] * 2)},
            "feature 0 lies outside",
        ),
        (
            {"features": torch.tensor([[0, 0, 5, 4, -(1 << 33), 0, 0, 0]] * 2)},
            "feature 0 lies outside",
        ),
        ({"sample_weights": torch.zeros(3)}, "one entry per lookup = 8, got 3"),
        ({"sample_weights": torch.zeros(8).double()}, "sample_weights must be float32"),
        ({"pooling": -1}, "pooling must be one of .*, got -1"),
        ({"output_dim": 20}, "lies outside the weights"),
        ({"weights": [torch.zeros(100)]}, "lies outside the weights"),
        ({"features": torch.zeros(2, 4, dtype=torch.int64)}, r"contiguous \[F, 8\] tensor"),
    ],
)
def test_wrong_lookup_input_is_refused(change: dict[str, Any], message: str) -> None:
    module = replace(CASES["plain"], batch=2).module(optim.SGD(0.1))
    arguments: dict[str, Any] = {
        "weights": [module.weights.detach()],
        "features": module.features,
        "indices": torch.zeros(8, dtype=torch.int64),
        "offsets": torch.tensor([0, 2, 4, 6, 8]),
        "slots": None,
        "bag_layout": None,
        "sample_weights": None,
        "pooling": POOLING["sum"],
        "output_dim": 32,
        "output_dtype": torch.float32,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.tbe_lookup(**(arguments | change))
