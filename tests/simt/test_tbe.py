"""Emulated CUDA kernels of table-batched embeddings against the reference."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emblib.ops.codes import BOUNDS_CHECK, OPTIMIZER, POOLING
from emblib.reference import tbe
from emblib.specs import Pooling
from tests.simt import emulated
from tests.simt.cases import (
    CASES,
    HYPER,
    OPTIMIZERS,
    VARIABLE_CASES,
    Case,
    Data,
    with_cache_dtypes,
)
from tests.tiers import spread

TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}
ALL = pytest.mark.parametrize("case", CASES, ids=str)
POOLED = pytest.mark.parametrize(
    "case", [c for c in (*CASES, *VARIABLE_CASES) if c.pooling is not Pooling.NONE], ids=str
)
BATCHES = pytest.mark.parametrize("case", [*CASES, *VARIABLE_CASES], ids=str)


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.to(got.dtype), **TOLERANCE[got.dtype])


def look_up(
    data: Data, weights: Sequence[Tensor], features: Tensor, slots: Tensor | None
) -> Tensor:
    return emulated.tbe_lookup(
        weights,
        features,
        data.indices,
        data.repaired,
        slots,
        data.bag_layout,
        data.sample_weights,
        POOLING[data.case.pooling.value],
        data.columns,
        data.case.output,
    )


@BATCHES
def test_lookup(case: Case) -> None:
    data = Data(case)
    got = look_up(data, [data.weights], data.features, None)
    assert_close(got, data.lookup(data.weights.double(), data.sample_weights))


@BATCHES
def test_rows_in_other_places_give_the_same_bits(case: Case) -> None:
    data = Data(case)
    there = spread(data.weights, data.features, data.batch, case.seed)
    got = look_up(data, there.weights, there.features, there.slots)
    assert torch.equal(got, look_up(data, [data.weights], data.features, None))
    if case.pooling is Pooling.NONE:
        return
    grad, rest = data.gradient(), (data.bag_layout, POOLING[case.pooling.value])
    batch = (data.indices, data.repaired)
    got = emulated.tbe_sample_weight_grad(
        grad, there.weights, there.features, *batch, there.slots, *rest
    )
    want = emulated.tbe_sample_weight_grad(grad, [data.weights], data.features, *batch, None, *rest)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("case", "cache_dtype"), with_cache_dtypes([*CASES, *VARIABLE_CASES]), ids=str
)
def test_cache_of_another_dtype(case: Case, cache_dtype: torch.dtype) -> None:
    data = Data(case)
    there = spread(data.weights, data.features, data.batch, case.seed, cache_dtype)
    got = look_up(data, there.weights, there.features, there.slots)
    extras = data.extras._replace(slots=there.slots)
    doubles = [tier.double() for tier in there.weights]
    given = (doubles, there.features, data.indices, data.offsets)
    rest = (case.pooling, data.columns, extras)
    assert_close(got, tbe.lookup(*given, data.sample_weights, *rest))
    if case.pooling is Pooling.NONE or not case.tables:
        return
    grad = data.gradient()
    got = emulated.tbe_sample_weight_grad(
        grad,
        there.weights,
        there.features,
        data.indices,
        data.repaired,
        there.slots,
        data.bag_layout,
        POOLING[case.pooling.value],
    )
    assert_close(got, tbe.sample_weight_grad(grad.double(), *given, case.pooling, extras))


@pytest.mark.parametrize("case", [c for c in CASES if c.broken], ids=str)
def test_offsets_nobody_repaired(case: Case) -> None:
    """Any answer, but no access outside the arrays (the sanitized run looks at that)."""
    data = Data(case)
    pooling, scales = POOLING[case.pooling.value], data.sample_weights
    given = ([data.weights], data.features, data.indices, data.offsets, None, None)
    out = emulated.tbe_lookup(*given, scales, pooling, data.columns, case.output)
    groups = emulated.tbe_group(data.features, data.indices, data.offsets, None, data.total_rows)
    hyper = torch.tensor(HYPER["sgd"], dtype=torch.float64)
    emulated.tbe_update_(
        [data.weights],
        [],
        hyper,
        OPTIMIZER["sgd"],
        out,
        data.features,
        *groups,
        data.offsets,
        None,
        None,
        scales,
        pooling,
    )


@BATCHES
@pytest.mark.parametrize("path", ["keys32", "keys64", "block", "cluster"])
def test_tbe_group(case: Case, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "keys64":
        monkeypatch.setattr(emulated, "WIDE_FROM", 0)
    monkeypatch.setattr(emulated, "MAX_CLUSTER", {"block": 1, "cluster": 8}.get(path, 0))
    data = Data(case)
    given = (data.features, *data.batch)
    rows, segments, lookups, bags, count = emulated.tbe_group(*given, data.total_rows)
    want = tbe.group(*given)
    unique, grouped = want.rows.numel(), want.lookups.numel()
    assert count.item() == unique
    assert torch.equal(rows[:unique], want.rows)
    assert (rows[unique:] == 0).all()
    assert torch.equal(segments[: unique + 1].long(), want.segments)
    assert (segments[unique:] == grouped).all()
    assert torch.equal(lookups[:grouped].long(), want.lookups)
    assert torch.equal(lookups.long().sort().values, torch.arange(lookups.numel()))
    assert torch.equal(bags[:grouped].long(), want.bags)


def _groups(data: Data) -> tuple[Tensor, ...]:
    given = (data.features, *data.batch)
    return emulated.tbe_group(*given, data.total_rows)


def _states(data: Data, optimizer: str) -> list[Tensor]:
    return [
        torch.rand(data.total_rows if kept.per_row else data.weights.numel())
        for kept in OPTIMIZERS[optimizer].states
    ]


@BATCHES
@pytest.mark.parametrize("optimizer", HYPER)
def test_update(case: Case, optimizer: str) -> None:
    torch.manual_seed(case.seed)
    data = Data(case)
    grad, hyper = data.gradient(), torch.tensor(HYPER[optimizer], dtype=torch.float64)
    states = _states(data, optimizer)
    want, want_states = data.weights.double(), [s.double() for s in states]
    groups = tbe.group(data.features, *data.batch)
    tbe.update_(want, want_states, hyper, optimizer, data.weight_grad(grad), data.features, groups)
    weights, before = data.weights.clone(), data.weights.clone()
    emulated.tbe_update_(
        [weights],
        states,
        hyper,
        OPTIMIZER[optimizer],
        grad,
        data.features,
        *_groups(data),
        data.repaired,
        None,
        data.bag_layout,
        data.sample_weights,
        POOLING[case.pooling.value],
    )
    assert_close(weights, want)
    for got, expected in zip(states, want_states, strict=True):
        assert_close(got, expected)
    untouched = data.weights.double() == want
    assert torch.equal(weights[untouched], before[untouched])


@BATCHES
def test_row_grads(case: Case) -> None:
    if len(set(case.dims)) > 1:
        pytest.skip("needs one dim")
    data, dim = Data(case), (*case.dims, 8)[0]
    grad, groups = data.gradient(), _groups(Data(case))
    got = emulated.tbe_row_grads(
        grad,
        data.features,
        *groups,
        data.repaired,
        data.bag_layout,
        data.sample_weights,
        POOLING[case.pooling.value],
        dim,
    )
    rows, count = groups[0], groups[-1].item()
    dense = data.weight_grad(grad).view(-1, dim)
    assert_close(got[:count], dense[rows[:count]])
    assert (got[count:] == 0).all()


@POOLED
def test_sample_weight_grad(case: Case) -> None:
    data = Data(case)
    grad = data.gradient()
    want = torch.zeros(data.indices.numel())
    if data.features.numel() > 0:
        given = (data.weights.double(), data.features, data.indices, data.offsets)
        want = tbe.sample_weight_grad(grad.double(), *given, case.pooling, data.extras)
    batch = (data.indices, data.repaired, None, data.bag_layout)
    got = emulated.tbe_sample_weight_grad(
        grad, [data.weights], data.features, *batch, POOLING[case.pooling.value]
    )
    assert_close(got, want)


CHECKS = pytest.mark.parametrize("launches", ["bounds_check", "check_batch"])


@CHECKS
@BATCHES
def test_bounds_check(case: Case, launches: str) -> None:
    data = Data(case)
    given = (data.indices, data.offsets, data.features, data.bag_layout)
    repaired, violations = emulated.bounds_check(*given, BOUNDS_CHECK["warning"], launches)
    want = tbe.repair_offsets(data.offsets, data.indices.numel())
    assert torch.equal(repaired.long(), want)
    lost = tbe.num_lost_ids(data.indices, data.offsets)
    assert violations[1] == (want != data.offsets).sum() + lost
    if want.numel() < 2:
        return
    bag = tbe.bag_of_lookup(want, data.indices.numel())
    feature = tbe.feature_of_bag(data.features, want, data.bag_layout)
    rows = data.features[feature[bag.clamp(min=0)], 2]
    index = data.indices.long()
    bad = ((index < -1) | (index >= rows)) & (bag >= 0)
    assert violations[0] == bad.sum()
    if violations[1] > 0:
        with pytest.raises(RuntimeError, match="bounds_check: offsets must start at 0"):
            emulated.bounds_check(*given, BOUNDS_CHECK["fatal"], launches)
    if violations[0] > 0:
        given = (data.indices, data.repaired, data.features, data.bag_layout)
        with pytest.raises(RuntimeError, match="bounds_check: indices must be in"):
            emulated.bounds_check(*given, BOUNDS_CHECK["fatal"], launches)


@CHECKS
def test_bounds_check_many_bags(launches: str) -> None:
    """Offsets over many tiles, with a peak early on that all later ones must keep to."""
    features = torch.tensor([[0, 0, 10, 4, 0, 0, 0, 0]])
    indices = torch.randint(0, 10, (9000,))
    offsets = torch.randint(-50, 9100, (5001,))
    offsets[:3000] //= 8
    repaired, violations = emulated.bounds_check(
        indices, offsets, features, None, BOUNDS_CHECK["ignore"], launches
    )
    want = tbe.repair_offsets(offsets, 9000)
    assert torch.equal(repaired.long(), want)
    assert violations.tolist() == [0, (want != offsets).sum() + tbe.num_lost_ids(indices, offsets)]


@CHECKS
@pytest.mark.parametrize(("padding", "first", "bad"), [(0, 0, 0), (1, 3, 2), (3, 3, 0), (0, -1, 1)])
def test_bounds_check_counts_ids_before_the_first_bag(
    padding: int, first: int, bad: int, launches: str
) -> None:
    features = torch.tensor([[0, 0, 10, 4, 0, 0, 0, 0]])
    indices = torch.arange(8)
    indices[:padding] = -1
    given = (indices, torch.tensor([first, 4, 8]), features, None)
    assert emulated.bounds_check(*given, BOUNDS_CHECK["warning"], launches)[1].tolist() == [0, bad]
    if bad:
        with pytest.raises(RuntimeError, match="bounds_check: offsets must start at 0"):
            emulated.bounds_check(*given, BOUNDS_CHECK["fatal"], launches)


def test_hot_row_of_many_chunks_is_deterministic() -> None:
    """Far more lookups of one row than a chunk holds: the same bits whatever else there is."""
    torch.manual_seed(0)
    features = torch.tensor([[0, 0, 6, 24, 0, 0, 0, 0]])
    grad = torch.randn(40, 24)
    hot = torch.zeros(300_000, dtype=torch.int64)
    hyper = torch.tensor(HYPER["sgd"], dtype=torch.float64)
    results = []
    for rest in (0, 900):
        indices = torch.cat([hot, torch.full((rest,), 3)])
        offsets = torch.cat([torch.arange(40) * 7500, torch.tensor([300_000 + rest])])
        offsets[-1] = indices.numel()
        indices = indices[torch.cat([torch.arange(300_000, 300_000 + rest), torch.arange(300_000)])]
        offsets[1:] += rest
        offsets[-1] = indices.numel()
        weights = torch.zeros(6 * 24)
        groups = emulated.tbe_group(features, indices, offsets, None, 6)
        emulated.tbe_update_(
            [weights],
            [],
            hyper,
            OPTIMIZER["sgd"],
            grad,
            features,
            *groups,
            offsets,
            None,
            None,
            None,
            POOLING["sum"],
        )
        results.append(weights[:24].clone())
        want = -0.1 * 7500 * grad.double().sum(0)
        torch.testing.assert_close(weights[:24].double(), want, rtol=1e-4, atol=1e-2)
    assert torch.equal(*results)


DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Any tables and bags; NONE pooling needs one dim and takes no sample weights."""
    tables = draw(st.integers(1, 4))
    pooling = draw(st.sampled_from(Pooling))
    dims = draw(st.lists(st.integers(1, 160), min_size=tables, max_size=tables))
    features = tuple(draw(st.lists(st.integers(0, tables - 1), min_size=1, max_size=5)))
    sizes = st.lists(st.integers(0, 40), min_size=len(features), max_size=len(features))
    return Case(
        "random",
        rows=tuple(draw(st.lists(st.integers(1, 60), min_size=tables, max_size=tables))),
        dims=tuple(dims[:1] * tables if pooling is Pooling.NONE else dims),
        tables=features,
        batch=draw(st.integers(0, 40)),
        sizes=draw(st.none() | sizes.map(tuple)),
        lengths=draw(st.sampled_from(["mixed", "few", "one", "hot", "none"])),
        broken=draw(st.booleans()),
        weighted=pooling is not Pooling.NONE and draw(st.booleans()),
        pooling=pooling,
        index=draw(INDEX_DTYPES),
        offset=draw(INDEX_DTYPES),
        weight=draw(DTYPES),
        output=draw(DTYPES),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=random_cases(), optimizer=st.sampled_from(sorted(HYPER)))
def test_random_cases(case: Case, optimizer: str) -> None:
    test_bounds_check(case, "bounds_check")
    test_bounds_check(case, "check_batch")
    test_lookup(case)
    test_rows_in_other_places_give_the_same_bits(case)
    test_update(case, optimizer)
