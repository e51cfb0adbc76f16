"""Lookup, grouping and bounds check of rows in memory tiers and caches, and of variable batches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from emblib.ops import tbe
from emblib.ops.codes import BOUNDS_CHECK, POOLING
from emblib.reference import tbe as reference
from emblib.specs import Pooling
from tests.simt.cases import CASES, VARIABLE_CASES, Case, Data, with_cache_dtypes
from tests.tiers import Spread, spread

ops = torch.ops.emblib
BATCHES = pytest.mark.parametrize("case", [*CASES, *VARIABLE_CASES], ids=str)
VARIABLE = pytest.mark.parametrize("case", VARIABLE_CASES, ids=str)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    assert_close(got.cpu(), want.to(got.dtype), rtol=tolerance, atol=tolerance)


def placed(there: Spread, device: torch.device) -> tuple[list[Tensor], Tensor, Tensor]:
    """The tiers where they belong for a module on `device`, features, slots."""
    weights = [tier.to(device) for tier in there.weights]
    if device.type == "cuda":
        weights[1] = there.weights[1].pin_memory()
    return weights, there.features.to(device), there.slots.to(device)


def look_up(
    data: Data, weights: Sequence[Tensor], features: Tensor, slots: Tensor | None
) -> Tensor:
    on = features.device
    layout, scales = data.bag_layout, data.sample_weights
    return ops.tbe_lookup(
        weights,
        features,
        data.indices.to(on),
        data.repaired.to(on),
        slots,
        None if layout is None else layout.to(on),
        None if scales is None else scales.to(on),
        POOLING[data.case.pooling.value],
        data.columns,
        data.case.output,
    )


def sample_weight_grad(
    data: Data, weights: Sequence[Tensor], features: Tensor, slots: Tensor | None
) -> Tensor:
    on, layout = features.device, data.bag_layout
    return ops.tbe_sample_weight_grad(
        data.gradient().to(on),
        weights,
        features,
        data.indices.to(on),
        data.repaired.to(on),
        slots,
        None if layout is None else layout.to(on),
        POOLING[data.case.pooling.value],
    )


@VARIABLE
def test_variable_batch(case: Case, device: torch.device) -> None:
    data = Data(case)
    weights, features = data.weights.to(device), data.features.to(device)
    want = data.lookup(data.weights.double(), data.sample_weights)
    close(look_up(data, [weights], features, None), want)
    if case.pooling is Pooling.NONE:
        return
    given = (data.weights.double(), data.features, data.indices, data.offsets)
    grad = data.gradient().double()
    want = reference.sample_weight_grad(grad, *given, case.pooling, data.extras)
    close(sample_weight_grad(data, [weights], features, None), want)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_variable_batch_of_equal_sizes_is_a_fixed_one(pooling: Pooling) -> None:
    case = Case("plain", pooling=pooling, batch=6)
    data = Data(case)
    fixed = look_up(data, [data.weights], data.features, None)
    bags = torch.arange(18)
    place = bags % 6 * data.columns + data.features[bags // 6, 4]
    data.bag_layout = torch.stack([bags // 6, place], 1)
    if pooling is not Pooling.NONE:
        data.columns *= 6
    assert torch.equal(look_up(data, [data.weights], data.features, None).view_as(fixed), fixed)


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        ([0, 64, 64, 192], "64 to 127 have several"),
        ([0, 64, 192], "128 to 191 have none"),
        ([64, 128, 192], "0 to 63 have none"),
        ([0, 64, 128], "192 to 255 have none"),
    ],
)
def test_bags_that_do_not_cover_the_output_once_are_refused(
    elements: list[int], message: str
) -> None:
    bags, weights = len(elements), [torch.ones(64 * 64)]
    ids, offsets = torch.arange(bags), torch.arange(bags + 1)
    layout = torch.stack([torch.zeros(bags, dtype=torch.int64), torch.tensor(elements)], 1)
    features = torch.tensor([[0, 0, 64, 64, 0, 0, 0, 0]])
    with pytest.raises(RuntimeError, match=message):
        ops.tbe_lookup(weights, features, ids, offsets, None, layout, None, 0, 256, torch.float32)
    fixed = features.repeat(bags, 1)
    fixed[:, 4] = torch.tensor(elements)
    with pytest.raises(RuntimeError, match=message):
        ops.tbe_lookup(weights, fixed, ids, offsets, None, None, None, 0, 256, torch.float32)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_only_columns_of_several_features_are_named(order: list[int]) -> None:
    # Feature 1 has columns 4 and 5 of the ten columns of feature 0.
    features = torch.tensor([[0, 0, 64, 10, 0, 0, 0, 0], [0, 0, 64, 2, 4, 0, 0, 0]])[order]
    ids, offsets = torch.arange(2), torch.arange(3)
    with pytest.raises(RuntimeError, match="4 to 5 have several"):
        ops.tbe_lookup(
            [torch.ones(640)], features, ids, offsets, None, None, None, 0, 10, torch.float32
        )


@VARIABLE
def test_grouping_of_a_variable_batch(case: Case, device: torch.device) -> None:
    data = Data(case)
    assert data.bag_layout is not None
    given = (data.features, data.indices, data.offsets)
    on_device = (tensor.to(device) for tensor in given)
    got = tbe.group(*on_device, data.total_rows, data.bag_layout.to(device))
    want = reference.group(*given, data.bag_layout)
    unique, grouped = want.rows.numel(), want.lookups.numel()
    assert int(got.count) == unique
    assert torch.equal(got.rows[:unique].cpu(), want.rows)
    assert torch.equal(got.segments[: unique + 1].cpu().long(), want.segments)
    assert torch.equal(got.lookups[:grouped].cpu().long(), want.lookups)
    assert torch.equal(got.bags[:grouped].cpu().long(), want.bags)


@VARIABLE
def test_bounds_of_a_variable_batch(case: Case, device: torch.device) -> None:
    data = Data(case)
    assert data.bag_layout is not None
    given = (data.indices, data.offsets, data.features, data.bag_layout)
    repaired, violations = ops.bounds_check(*(t.to(device) for t in given), BOUNDS_CHECK["warning"])
    want = reference.repair_offsets(data.offsets, data.indices.numel())
    assert torch.equal(repaired.cpu().long(), want)
    if data.indices.numel():
        bag = reference.bag_of_lookup(want, data.indices.numel())
        rows = data.features[data.bag_layout[bag.clamp(min=0), 0], 2]
        bad = ((data.indices < -1) | (data.indices >= rows)) & (bag >= 0)
        assert violations.tolist() == [int(bad.sum()), int((want != data.offsets).sum())]


@BATCHES
def test_rows_in_other_places_give_the_same_bits(case: Case, device: torch.device) -> None:
    data = Data(case)
    there = placed(spread(data.weights, data.features, data.batch, case.seed), device)
    here = ([data.weights.to(device)], data.features.to(device), None)
    assert torch.equal(look_up(data, *there), look_up(data, *here))
    if case.pooling is not Pooling.NONE:
        assert torch.equal(sample_weight_grad(data, *there), sample_weight_grad(data, *here))


def test_same_bits_on_any_number_of_threads(thread_counts: list[int]) -> None:
    case = Case("threads", rows=(900, 70, 3), dims=(20, 64, 9), sizes=(700, 0, 900), weighted=True)
    data = Data(case)
    results = []
    for cache_dtype in (None, torch.float16):
        there = spread(data.weights, data.features, data.batch, 0, cache_dtype)
        for threads in thread_counts:
            torch.set_num_threads(threads)
            results.append(look_up(data, *placed(there, torch.device("cpu"))))
        assert all(torch.equal(results[0], other) for other in results[1:])
        results = []


@pytest.mark.parametrize(
    ("case", "cache_dtype"), with_cache_dtypes([*CASES, *VARIABLE_CASES]), ids=str
)
def test_cache_of_another_dtype(case: Case, cache_dtype: torch.dtype, device: torch.device) -> None:
    data = Data(case)
    there = spread(data.weights, data.features, data.batch, case.seed, cache_dtype)
    extras = data.extras._replace(slots=there.slots)
    given = (
        *([tier.double() for tier in there.weights], there.features),
        *(data.indices, data.offsets),
    )
    on_device = placed(there, device)
    rest = (case.pooling, data.columns, extras)
    want = reference.lookup(*given, data.sample_weights, *rest)
    close(look_up(data, *on_device), want)
    if case.pooling is not Pooling.NONE and case.tables:
        grad = data.gradient().double()
        want = reference.sample_weight_grad(grad, *given, case.pooling, extras)
        close(sample_weight_grad(data, *on_device), want)


@pytest.mark.parametrize("cache_dtype", [None, torch.float16], ids=str)
def test_weights_of_skipped_lookups_do_not_matter(
    cache_dtype: torch.dtype | None, device: torch.device
) -> None:
    data = Data(Case("skipped", dims=(8, 20, 64), batch=40, weighted=True))
    data.indices[::3] = -1
    there = placed(spread(data.weights, data.features, data.batch, 0, cache_dtype), device)
    skipped, found = data.indices == -1, []
    for weight in (1.0, torch.inf, torch.nan):
        assert data.sample_weights is not None
        data.sample_weights[skipped] = weight
        found.append(look_up(data, *there))
    assert found[0].isfinite().all()
    assert all(torch.equal(found[0], other) for other in found)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_case(data: st.DataObject) -> None:
    tables = data.draw(st.integers(1, 4), "tables")
    pooling = data.draw(st.sampled_from(list(Pooling)), "pooling")
    features = tuple(data.draw(st.lists(st.integers(0, tables - 1), max_size=5), "features"))
    counts = st.lists(st.integers(0, 30), min_size=len(features), max_size=len(features))
    dims = tuple(data.draw(st.integers(1, 70), "dim") for _ in range(tables))
    case = Case(
        "random",
        rows=tuple(data.draw(st.integers(1, 40), "rows") for _ in range(tables)),
        dims=dims[:1] * tables if pooling is Pooling.NONE else dims,
        tables=features,
        batch=data.draw(st.integers(0, 8), "batch") if features else 0,
        sizes=data.draw(st.none() | counts.map(tuple), "sizes"),
        lengths=data.draw(st.sampled_from(["mixed", "few", "hot", "none"]), "lengths"),
        broken=data.draw(st.booleans(), "broken"),
        weighted=pooling is not Pooling.NONE and data.draw(st.booleans(), "weighted"),
        pooling=pooling,
        index=data.draw(st.sampled_from([torch.int32, torch.int64]), "index"),
        weight=data.draw(st.sampled_from(FLOATS), "weight"),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    test_rows_in_other_places_give_the_same_bits(case, torch.device("cpu"))
    test_cache_of_another_dtype(case, data.draw(st.sampled_from(FLOATS)), torch.device("cpu"))


def _arguments(**changes: Any) -> dict[str, Any]:
    """Of a lookup in two tables of three bags each; the first one is cached."""
    arguments = {
        "weights": [torch.zeros(40), torch.zeros(0), torch.zeros(24), torch.zeros(16)],
        "features": torch.tensor([[0, 0, 10, 4, 0, 0, 0, 8], [0, 10, 3, 8, 4, 2, 0, 0]]),
        "indices": torch.tensor([0, 1, 2, 2, 0, 1]),
        "offsets": torch.arange(7),
        "slots": torch.tensor([0, 1, -1, -1, -1, -1], dtype=torch.int32),
        "bag_layout": torch.tensor([[0, 0], [0, 4], [0, 8], [1, 12], [1, 20], [1, 28]]),
        "sample_weights": None,
        "pooling": POOLING["sum"],
        "output_dim": 36,
        "output_dtype": torch.float32,
    }
    assert not changes.keys() - arguments.keys()
    return arguments | changes


def _layout(bag: int, feature: int, element: int) -> Tensor:
    layout = _arguments()["bag_layout"].clone()
    layout[bag] = torch.tensor([feature, element])
    return layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": []}, r"list of 1 to 4 tensors \(device, host, disk, cache\), got 0"),
        ({"weights": [torch.zeros(9)] * 5}, "list of 1 to 4 tensors .*, got 5"),
        ({"weights": [torch.zeros(40)]}, "feature 1 lies outside the weights"),
        (
            {"weights": [torch.zeros(40), torch.zeros(0), torch.zeros(24).half()]},
            "one dtype, but the weights of tier 2 are float16; only the cache may",
        ),
        ({"weights": [torch.zeros(40, 2)[:, 0]]}, "weights must be contiguous"),
        (
            {"features": torch.tensor([[0, 0, 2, 4, 0, 3, 0, 0]] * 2)},
            "feature 0 must have a tier of 0 to 2",
        ),
        (
            {"features": torch.tensor([[0, 0, 2, 4, 0, 0, 0, 3]] * 2)},
            "a cache_stride of 0 or at least its dim 4, got",
        ),
        ({"slots": torch.zeros(6)}, "slots must be int32, got float32"),
        ({"slots": torch.zeros(5, dtype=torch.int32)}, "one entry per lookup = 6, got 5"),
        ({"bag_layout": torch.zeros(5, 2, dtype=torch.int64)}, "for bags = 6, one less than"),
        ({"bag_layout": torch.zeros(6, 2)}, "bag_layout must be int64"),
        ({"bag_layout": _layout(5, 2, 28)}, "features of 0 to 1 .* bag 5 has feature 2"),
        ({"bag_layout": _layout(4, 0, 20)}, "that ascend.* bag 4 has feature 0"),
        ({"bag_layout": _layout(5, 1, 29)}, "inside the 36 elements .* feature 1 is at element 29"),
        ({"bag_layout": _layout(0, 0, -1)}, "bag 0 of feature 0 is at element -1"),
        ({"bag_layout": None}, "feature 0 lies outside|output_dim"),
    ],
)
def test_wrong_places_are_refused(change: dict[str, Any], message: str) -> None:
    if change.get("bag_layout", 0) is None:
        change = change | {"output_dim": 3}
    with pytest.raises(RuntimeError, match=message):
        ops.tbe_lookup(**_arguments(**change))


def test_slots_outside_the_cache_are_none() -> None:
    weights = [torch.arange(40.0), torch.zeros(0), torch.zeros(24), torch.full((16,), -1.0)]
    slots = torch.tensor([1, 2, -(2**31), 2**31 - 1, 0, 7], dtype=torch.int32)
    out = ops.tbe_lookup(**_arguments(weights=weights, slots=slots))
    assert out[:12].tolist() == [-1, -1, -1, -1, 4, 5, 6, 7, 8, 9, 10, 11]
    assert out[12:].tolist() == [0.0] * 24


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_opcheck(pooling: str, device: torch.device) -> None:
    def on_device(**changes: Any) -> dict[str, Any]:
        arguments = _arguments(pooling=POOLING[pooling], **changes)
        for name, value in arguments.items():
            if isinstance(value, list):
                arguments[name] = [tensor.to(device) for tensor in value]
            elif isinstance(value, Tensor):
                arguments[name] = value.to(device)
        return arguments

    one_dim = torch.tensor([[0, 0, 10, 4, 0, 0, 0, 8], [0, 10, 3, 4, 4, 2, 0, 0]])
    changes = {} if pooling == "sum" else {"features": one_dim, "output_dim": 4}
    given = on_device(**changes)
    torch.library.opcheck(ops.tbe_lookup.default, tuple(given.values()))
    batch = (given["indices"], given["offsets"])
    layout, features = given["bag_layout"], given["features"]
    torch.library.opcheck(
        ops.bounds_check.default, (*batch, features, layout, BOUNDS_CHECK["warning"])
    )
    if pooling == "sum":
        grad, slots = torch.randn(36, device=device), given["slots"]
        torch.library.opcheck(
            ops.tbe_sample_weight_grad.default,
            (grad, given["weights"], features, *batch, slots, layout, POOLING["mean"]),
        )
    distinct = (torch.tensor([0, 1, 2, 0, 1, 2], device=device), given["offsets"])
    torch.library.opcheck(ops.tbe_group.default, (features, *distinct, layout, 13))
