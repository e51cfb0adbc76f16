"""The fused update over all optimizers, memory tiers and dtypes, against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emblib import optim
from emblib.columns import FeatureRow, Hyper
from emblib.ops.codes import OPTIMIZER, POOLING
from emblib.reference import optim as reference
from tests.optimizer_cases import CASES
from tests.simt import emulated
from tests.update_problem import Problem

ops = torch.ops.emblib

PLACES: dict[str, dict[str, Any]] = {
    "one_tier": {},
    "three_tiers": {"tiers": (2, 0, 1)},
    "variable_batch": {"layout": True, "batch": 9},
    "cached": {"tiers": (1, 0, 1), "cached": (True, False, True), "layout": True},
    "all_cached": {"tiers": (2, 1, 1), "cached": (True, True, True)},
}
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16_bf16": (torch.float16, torch.bfloat16),
}
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3},
}


def run(problem: Problem) -> list[Tensor]:
    """Weights and states after the op."""
    weights = [w.clone() for w in problem.weights]
    states = [s.clone() for s in problem.states]
    ops.tbe_update_(*problem.arguments(weights, states))
    return [*weights, *states]


def check(problem: Problem) -> None:
    for got, want in zip(run(problem), problem.expected(), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, **TOLERANCE[got.dtype])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_update_matches_reference(name: str, place: str) -> None:
    for step in (1, 5):
        check(Problem(CASES[name], step=step, seed=step, **PLACES[place]))


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_narrow_weights_and_states(name: str, dtypes: str) -> None:
    weights, states = DTYPES[dtypes]
    problem = Problem(CASES[name], weights_dtype=weights, states_dtype=states, dims=(70, 20, 3))
    check(problem)
    check(replace(problem, tiers=(1, 1, 0), cached=(True, True, False), cache_dtype=torch.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": len(OPTIMIZER)}, "optimizer must be one of 0 .sgd., 1 .adagrad.*, got"),
        ({"states": []}, "keeps 1 state tensors for each of 2 tensors of weights, got 0"),
        ({"states": [torch.zeros(3)] * 2}, "must be contiguous with at least 43 entries, has 3"),
        ({"states": [torch.zeros(80).half()] * 2}, "one number per row must be float32"),
        ({"hyper": torch.zeros(2, dtype=torch.float64)}, "hyper vector of 6 entries"),
        ({"hyper": torch.zeros(6)}, "hyper must be float64"),
        ({"hyper": torch.zeros(12, dtype=torch.float64)[::2]}, "a contiguous hyper vector"),
        ({"weights": [torch.zeros(0)] * 2}, "feature 0 lies outside the weights"),
        (
            {"weights": [torch.zeros(999), torch.zeros(999).half()]},
            "all tables must have one dtype",
        ),
        ({"weights": [torch.zeros(999)] * 5}, "a list of 1 to 4"),
        ({"rows": torch.zeros(0, dtype=torch.int64)}, "must come from one call of tbe_group"),
        ({"rows": torch.zeros(46, dtype=torch.int32)}, "rows must be int64"),
        ({"count": torch.tensor([1 << 30], dtype=torch.int32)}, "must come from one call"),
        ({"bags": 1 << 30}, "must come from one call"),
        ({"lookups": -1}, "must come from one call"),
        ({"segments": 14}, "must come from one call"),
        ({"grad": torch.zeros(3, 39)}, "grad must have 6 rows for pooling sum, got 3"),
        ({"grad": torch.zeros(6, 20)}, "feature 1 lies outside"),
        ({"row_slots": torch.zeros(2, dtype=torch.int32)}, "one entry per group = "),
        ({"row_slots": torch.zeros(99)}, "row_slots must be int32"),
        ({"bag_layout": torch.zeros(3, 2, dtype=torch.int64)}, "contiguous .bags, 2. tensor"),
        ({"bag_layout": torch.zeros(24, 2, dtype=torch.int64)}, "a vector with bag_layout"),
        ({"pooling": 3}, "pooling must be one of .*, got 3"),
    ],
)
def test_wrong_input_changes_nothing(change: dict[str, Any], message: str) -> None:
    problem = Problem(CASES["rowwise_adagrad"], tiers=(0, 1, 0))
    weights, states = [w.clone() for w in problem.weights], [s.clone() for s in problem.states]
    names = (
        *("weights", "states", "hyper", "optimizer", "grad", "features", "rows", "segments"),
        *("lookups", "bags", "count", "offsets", "row_slots", "bag_layout", "sample_weights"),
        "pooling",
    )
    arguments = dict(zip(names, problem.arguments(weights, states), strict=True))
    for name, value in change.items():
        if isinstance(value, int) and isinstance(arguments[name], torch.Tensor):
            arguments[name] = torch.full_like(arguments[name], value)
        else:
            arguments[name] = value
    with pytest.raises(RuntimeError, match=message):
        ops.tbe_update_(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(weights, problem.weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(states, problem.states, strict=True))


def test_steps_count_from_one() -> None:
    for name in ("adam", "lamb", "global_decay", "counter"):
        with pytest.raises(RuntimeError, match="counts its steps from 1"):
            run(Problem(CASES[name], step=0))


def test_features_that_are_not_the_modules_are_refused() -> None:
    problem = Problem(CASES["sgd"])
    for column, value in ((5, 3), (5, -1), (6, -1), (6, 2**63 - 1), (7, 2)):
        other = replace(problem)
        other.features[0, column] = value
        with pytest.raises(RuntimeError, match="must have a tier of 0 to 2"):
            run(other)


def _hand_made(dims: tuple[int, int], rows: int, segments: list[int]) -> None:
    """One group of two lookups, one of each of two features with a bag each."""
    features = torch.tensor([[0, 0, 4, dims[0], 0, 0, 0, 0], [16, 4, rows, dims[1], 4, 0, 4, 0]])
    ints = [torch.tensor(x, dtype=torch.int32) for x in (segments, [0, 1], [1, 0], [1])]
    ops.tbe_update_(
        [torch.zeros(16 + rows * 4)],
        [],
        torch.tensor([0.1, 1, 0, 0, -1]).double(),
        OPTIMIZER["sgd"],
        torch.ones(1, 8),
        features,
        torch.tensor([4, 0]),
        *ints,
        torch.tensor([0, 1, 2]),
        None,
        None,
        None,
        POOLING["sum"],
    )


def test_groups_that_would_leave_gradient_or_table_are_refused() -> None:
    _hand_made((4, 4), 4, [0, 2, 2])
    for dims, rows in (((4, 2), 4), ((4, 4), 0)):
        with pytest.raises(
            RuntimeError, match="an empty table, of another table than its row, or of tables"
        ):
            _hand_made(dims, rows, [0, 2, 2])


@pytest.mark.parametrize("place", ["one_tier", "variable_batch"])
def test_groups_in_any_order_give_the_same_bits(place: str) -> None:
    problem = Problem(CASES["rowwise_adagrad"], **PLACES[place])
    weights = [w.clone() for w in problem.weights]
    states = [s.clone() for s in problem.states]
    arguments = list(problem.arguments(weights, states))
    rows, segments, lookups, bags, count = (x.clone() for x in arguments[6:11])
    num_groups = int(count)
    groups = [slice(*segments[g : g + 2].tolist()) for g in reversed(range(num_groups))]
    rows[:num_groups] = rows[:num_groups].flip(0)
    segments[1 : num_groups + 1] = torch.tensor([g.stop - g.start for g in groups]).cumsum(0)
    num_grouped = int(segments[num_groups])
    for values in (lookups, bags):
        values[:num_grouped] = torch.cat([values[g] for g in groups])
    ops.tbe_update_(*arguments[:6], rows, segments, lookups, bags, count, *arguments[11:])
    for got, want in zip([*weights, *states], run(problem), strict=True):
        assert torch.equal(got, want)


def test_segments_whose_differences_overflow_are_refused() -> None:
    problem = Problem(CASES["sgd"])
    arguments = list(problem.arguments(problem.weights, problem.states))
    segments = arguments[7].clone()
    segments[:3] = torch.tensor([0, 2**31 - 1, -5])
    arguments[7], arguments[10] = segments, torch.tensor([2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="must come from one call"):
        ops.tbe_update_(*arguments)


_NOT_FINITE = (
    "adagrad",
    "rowwise_adagrad",
    "adam",
    "partial_rowwise_adam",
    "lamb",
    "max_norm",
    "partial_rowwise_lamb",
    "lars",
    "ftrl",
    "cowclip",
    "counter",
    "global_decay",
)


@pytest.mark.parametrize("name", _NOT_FINITE)
@pytest.mark.parametrize("eps", [0.0, 1e-50])
def test_nothing_divides_by_zero(name: str, eps: float) -> None:
    """No eps, states of zeros, gradients and weights that are zero or vanish when squared."""
    optimizer = CASES[name]
    if hasattr(optimizer, "eps"):
        optimizer = replace(optimizer, eps=eps)
    for grad in (0.0, 1e-25, 1e-38):
        for weight in (0.0, 1.0, 1e-30):
            problem = Problem(optimizer, step=1)
            problem.grad.fill_(grad)
            for tensor in problem.weights:
                tensor.fill_(weight)
            for state in problem.states:
                state.zero_()
            for tensor in run(problem):
                assert bool(tensor.isfinite().all()), (grad, weight)


@pytest.mark.parametrize("name", ["lamb", "partial_rowwise_lamb", "lars"])
def test_a_row_of_zeros_can_leave_zero(name: str) -> None:
    problem = Problem(CASES[name])
    problem.weights[0].zero_()
    problem.grad.fill_(1.0)
    assert bool(run(problem)[0].ne(0).any())


@pytest.mark.parametrize("name", CASES)
def test_nan_stays_in_its_row(name: str) -> None:
    problem = Problem(CASES[name], rows=(40,), dims=(8,), tiers=(0,), features_of=(0,), batch=12)
    clean = run(problem)[0]
    problem.grad[0] = torch.nan
    rows = problem.indices[: int(problem.offsets[1])].unique()
    got = run(problem)[0]
    hit = torch.zeros(len(got), dtype=torch.bool)
    hit[5:].view(40, 8)[rows] = True
    assert torch.equal(got[~hit], clean[~hit])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounding", [-1, 5])
def test_huge_steps_saturate_as_floats_do(dtype: torch.dtype, rounding: int) -> None:
    problem = Problem(CASES["sgd"], weights_dtype=dtype, rounding=rounding)
    problem.grad.fill_(1e30)
    got = run(problem)[0]
    assert not bool(got.isnan().any())
    assert torch.equal(got, problem.expected()[0])


OPTIMIZER_NAMES = st.sampled_from(sorted(CASES))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_problem_matches_reference(data: st.DataObject) -> None:
    tables = data.draw(st.integers(1, 4), "tables")
    many = st.lists(st.integers(1, 90), min_size=tables, max_size=tables)
    cached = data.draw(st.lists(st.booleans(), min_size=tables, max_size=tables), "cached")
    tiers = data.draw(st.lists(st.integers(0, 2), min_size=tables, max_size=tables), "tiers")
    features = st.lists(st.integers(0, tables - 1), min_size=1, max_size=5)
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
    check(
        Problem(
            CASES[data.draw(OPTIMIZER_NAMES, "optimizer")],
            rows=tuple(data.draw(many, "rows")),
            dims=tuple(data.draw(many, "dims")),
            tiers=tuple(tiers),
            cached=tuple(cached),
            features_of=tuple(data.draw(features, "features")),
            batch=data.draw(st.integers(1, 12), "batch"),
            longest=data.draw(st.integers(1, 12), "longest"),
            layout=data.draw(st.booleans(), "variable"),
            weights_dtype=data.draw(dtypes, "weights"),
            states_dtype=data.draw(dtypes, "states"),
            seed=data.draw(st.integers(0, 1000), "seed"),
            step=data.draw(st.integers(1, 50), "step"),
        )
    )


@pytest.mark.parametrize("length", [1025, 5000])
def test_long_segments_of_a_variable_batch(length: int) -> None:
    check(Problem(CASES["adagrad"], rows=(2, 1, 3), batch=9, longest=length // 8, layout=True))


# Optimizers over whole matrices, on the CPU and as emulated CUDA, against the reference


UPDATES = {"cpu": torch.ops.emblib.update_rows_, "emulated": emulated.update_rows_}


def _state(kept: optim.State, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    if kept.name == "prev_iter":
        return torch.zeros(shape[0])
    return torch.rand(shape[:1] if kept.per_row else shape, generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    optimizer = CASES[name]
    for shape in ((7, 1), (30, 5), (3, 700), (0, 4), (20, 64)):
        weights = torch.randn(shape, generator=generator)
        states = [_state(kept, shape, generator) for kept in optimizer.states]
        want = [value.double() for value in (weights, *states)]
        found = {kind: [value.clone() for value in (weights, *states)] for kind in UPDATES}
        for step in (1.0, 2.0, 3.0):
            hyper = optimizer.hyperparams()
            hyper[1] = step
            grads = torch.randn(shape, generator=generator)
            grads[::3] = 0.0  # untouched: state and weights stay, even with eps 0
            for kind, (weights, *states) in found.items():
                UPDATES[kind](weights, states, hyper, OPTIMIZER[optimizer.name], grads)
            reference.update_rows_(want[0], want[1:], hyper, optimizer.name, grads.double())
        for kind, values in found.items():
            for got, expected in zip(values, want, strict=True):
                assert torch.allclose(got, expected.float(), rtol=1e-4, atol=1e-5), (kind, shape)


@pytest.mark.parametrize("kind", UPDATES)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_infinite_weights_stay_so_without_a_penalty(name: str, kind: str) -> None:
    """As in torch, which adds no penalty of 0: 0 times infinity is NaN."""
    optimizer, weights = CASES[name], torch.tensor([[1.0, torch.inf, -torch.inf, 2.0]])
    hyper = optimizer.hyperparams()
    hyper[1], hyper[Hyper.L2] = 1.0, 0.0
    states = [_state(kept, (1, 4), torch.Generator().manual_seed(1)) for kept in optimizer.states]
    want = [value.clone() for value in (weights, *states)]
    reference.update_rows_(want[0], want[1:], hyper, optimizer.name, torch.ones(1, 4))
    UPDATES[kind](weights, states, hyper, OPTIMIZER[optimizer.name], torch.ones(1, 4))
    assert torch.equal(weights.isinf(), torch.tensor([[False, True, True, False]]))
    assert torch.allclose(weights, want[0])


@pytest.mark.parametrize("rounding", [-1, 5])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtypes", [key for key in DTYPES if key != "fp32"])
def test_matrices_in_16_bits(name: str, dtypes: str, rounding: int) -> None:
    """Wide rows and narrow ones; rounded to nearest, or by the random words of their rows."""
    generator = torch.Generator().manual_seed(5)
    optimizer, (narrow, states_dtype) = CASES[name], DTYPES[dtypes]
    for shape in ((6, 5), (9, 70)):
        weights = torch.randn(shape, generator=generator).to(narrow)
        states = [_state(kept, shape, generator) for kept in optimizer.states]
        states = [s.to(states_dtype) if s.dim() == 2 else s for s in states]
        found = {kind: [value.clone() for value in (weights, *states)] for kind in UPDATES}
        hyper = optimizer.hyperparams()
        hyper[1], hyper[4] = 3.0, rounding
        grads = torch.randn(shape, generator=generator)
        grads[::3] = 0.0
        reference.update_rows_(weights, states, hyper, optimizer.name, grads, 13)
        for kind, (got, *got_states) in found.items():
            UPDATES[kind](got, got_states, hyper, OPTIMIZER[optimizer.name], grads, 13)
            for value, expected in zip((got, *got_states), (weights, *states), strict=True):
                assert value.dtype == expected.dtype
                room = TOLERANCE[value.dtype]
                torch.testing.assert_close(
                    value, expected, **room, msg=lambda m, k=kind: f"{k}: {m}"
                )


@pytest.mark.parametrize("kind", UPDATES)
def test_untouched_rows_with_eps_zero_stay_finite(kind: str) -> None:
    weights, states = torch.ones(4, 3), [torch.zeros(4, 3)]
    grads = torch.zeros(4, 3)
    grads[1, 2] = 2.0
    UPDATES[kind](
        weights, states, optim.Adagrad(0.5, eps=0.0).hyperparams(), OPTIMIZER["adagrad"], grads
    )
    want = torch.ones(4, 3)
    want[1, 2] = 0.5
    assert torch.equal(weights, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(4, 3).double()}, "weights must be float32, float16 or bfloat16"),
        ({"weights": torch.zeros(12)}, "a contiguous matrix"),
        ({"weights": torch.zeros(0, 2**31)}, "fewer than 2.31 columns"),
        ({"states": [torch.zeros(4, 3).int()]}, "optimizer state must be float32, float16 or"),
        ({"grads": torch.zeros(4, 3).half()}, "grads must be float32"),
        ({"states": []}, "keeps 1 state tensors for each of 1 tensors of weights, got 0"),
        ({"hyper": torch.zeros(5).double()}, "hyper vector of 6 entries"),
        ({"grads": torch.zeros(4, 2)}, "grads must be .4, 3. like weights"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "weights": torch.zeros(4, 3),
        "states": [torch.zeros(4, 3)],
        "hyper": optim.Adagrad(0.5).hyperparams(),
        "optimizer": OPTIMIZER["adagrad"],
        "grads": torch.ones(4, 3),
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.emblib.update_rows_(**(arguments | change))


def test_a_grouping_of_other_lookups_is_refused(device: torch.device) -> None:
    """A grouping is taken as it is, so what would read or write elsewhere raises."""
    features = torch.tensor([FeatureRow(rows=5, dim=4)], device=device)
    ids = torch.tensor([3, 1, 3], device=device)
    offsets = torch.tensor([0, 3], device=device)
    weights, hyper = torch.zeros(20, device=device), torch.zeros(5).double().to(device)
    groups = ops.tbe_group(features, ids, offsets, None, 5)
    strided = torch.stack([groups[0], groups[0]], 1)[:, 0]
    memory = [weights], [], hyper, OPTIMIZER["sgd"], torch.ones(1, 4, device=device), features
    with pytest.raises(RuntimeError, match="must be contiguous"):
        ops.tbe_update_(*memory, strided, *groups[1:], offsets, None, None, None, POOLING["sum"])
    if device.type == "cpu":  # which needs the lookups of the grouping only
        return
    located = [*groups, torch.full((3,), -1, dtype=torch.int32, device=device)]
    fewer = ids[:2], offsets.clamp(max=2)
    with pytest.raises(RuntimeError, match="one entry per lookup = 2, got 3"):
        ops.tbe_backward_(*memory, *fewer, None, POOLING["sum"], 5, True, None, located)
    assert not weights.any()
