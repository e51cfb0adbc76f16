"""Tensor-train ops against the reference: shapes of every kind, determinism, errors, opcheck."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from emblib.ops import tbe, tt
from emblib.ops.codes import OPTIMIZER
from emblib.reference import tt as reference
from emblib.specs import Pooling

ops = torch.ops.emblib


@pytest.fixture(autouse=True)
def _on_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)


class Case(NamedTuple):
    """A table and how many ids of it are looked up."""

    p: tuple[int, ...]
    q: tuple[int, ...]
    ranks: tuple[int, ...]
    lookups: int
    id_range: int = 0  # 0: all rows

    def cores(self, generator: torch.Generator) -> list[Tensor]:
        full = (1, *self.ranks, 1)
        return [
            torch.randn(p, full[k] * q * full[k + 1], generator=generator)
            for k, (p, q) in enumerate(zip(self.p, self.q, strict=True))
        ]

    def ids(self, generator: torch.Generator, dtype: torch.dtype = torch.int64) -> Tensor:
        high = self.id_range or math.prod(self.p)
        return torch.randint(0, high, (self.lookups,), generator=generator, dtype=dtype)


CASES = {
    "readme_small": Case((20, 22, 25), (4, 4, 4), (32, 32), 700),
    "two_cores": Case((30, 40), (8, 8), (16,), 500),
    "two_cores_odd": Case((7, 9), (3, 5), (11,), 64),
    "four_cores": Case((6, 7, 8, 9), (2, 4, 4, 4), (8, 16, 8), 600),
    "four_cores_odd": Case((3, 2, 5, 4), (3, 1, 2, 5), (2, 7, 3), 90),
    "ranks_one": Case((5, 6, 7), (2, 2, 4), (1, 1), 40),
    "ranks_odd": Case((9, 8, 7), (4, 4, 4), (17, 33), 200),
    "ranks_forty": Case((12, 12, 12), (4, 4, 8), (40, 40), 300),
    "dim_prime": Case((9, 8, 7), (1, 1, 13), (3, 5), 100),
    "dim_one": Case((4, 4, 4), (1, 1, 1), (2, 2), 30),
    "dim_wide": Case((4, 4, 4), (8, 8, 16), (8, 8), 30),
    "lanes_along_right": Case((6, 6, 6), (1, 2, 32), (4, 12), 80),
    "one_row": Case((1, 1, 1), (2, 2, 2), (2, 2), 10),
    "p_of_one": Case((1, 50, 1), (2, 4, 2), (2, 2), 40),
    "no_lookups": Case((5, 5, 5), (2, 2, 2), (3, 3), 0),
    "one_lookup": Case((5, 5, 5), (2, 2, 2), (3, 3), 1),
    "hot_ids": Case((20, 20, 20), (4, 4, 4), (16, 16), 2000, id_range=3),
    "hot_prefix": Case((20, 20, 90), (4, 4, 4), (16, 16), 2000, id_range=180),
    "many_waves": Case((60, 60, 30), (8, 8, 4), (4, 64), 3000),
}


def every_case() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Run(NamedTuple):
    """What a pass over one batch made, with the ids of its distinct rows."""

    made: tt.Made
    count: int
    ids: Tensor


def make(cores: list[Tensor], case: Case, ids: Tensor, num_saved: int) -> Run:
    total = math.prod(case.p)
    features = torch.tensor([[0, 0, total, math.prod(case.q), 0, 0, 0, 0]])
    batch = tt.TTLookup(
        total,
        case.p,
        case.q,
        features,
        ids,
        torch.arange(ids.numel() + 1),
        Pooling.NONE,
        torch.float32,
    )
    made = tt.make_rows(cores, batch, num_saved)
    count = int(made.groups.count)
    return Run(made, count, reference.ids_of_keys(made.groups.rows[:count], case.p))


def assert_near(got: Tensor, want: Tensor) -> None:
    """Relative to the largest value: sums of many products lose digits where they cancel."""
    scale = max(1e-3, float(want.abs().max()) if want.numel() else 0.0)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5 * scale)


@every_case()
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_and_gradients_match_the_reference(case: Case, dtype: torch.dtype) -> None:
    generator = seeded(1)
    cores, ids = case.cores(generator), case.ids(generator, dtype)
    num_saved = 0 if len(case.p) == 2 else 37
    made, count, distinct = make(cores, case, ids, num_saved)
    assert torch.equal(distinct.sort().values, ids.long().unique())
    double = [core.double() for core in cores]
    assert_near(made.rows[:count], reference.rows(double, distinct, case.p, case.q))
    assert torch.equal(distinct[made.inverse.long()], ids.long())

    grads = torch.randn(ids.numel(), math.prod(case.q), generator=generator)
    got = ops.tt_core_grads(cores, made.plan, made.prefixes, grads, case.p, case.q)
    want = reference.core_grads(double, distinct, grads[:count].double(), case.p, case.q)
    for core_grad, wanted in zip(got, want, strict=True):
        assert_near(core_grad, wanted)


@every_case()
def test_same_bits_for_any_threads_and_any_kept(case: Case) -> None:
    generator = seeded(2)
    cores, ids = case.cores(generator), case.ids(generator)
    grads = torch.randn(ids.numel(), math.prod(case.q), generator=generator)
    results = []
    threads = torch.get_num_threads()
    try:
        for num_threads, num_saved in ((1, 0), (2, 0), (1, 5), (2, ids.numel())):
            torch.set_num_threads(num_threads)
            made, count, _ = make(cores, case, ids, 0 if len(case.p) == 2 else num_saved)
            core_grads = ops.tt_core_grads(cores, made.plan, made.prefixes, grads, case.p, case.q)
            results.append((made.rows[:count], *core_grads))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    cores = draw(st.integers(2, 4))
    p = draw(st.lists(st.integers(1, 9), min_size=cores, max_size=cores))
    q = draw(st.lists(st.integers(1, 6), min_size=cores, max_size=cores))
    ranks = draw(st.lists(st.integers(1, 20), min_size=cores - 1, max_size=cores - 1))
    lookups = draw(st.sampled_from([0, 1, 2, 3, 17, 60]))
    return Case(tuple(p), tuple(q), tuple(ranks), lookups)


@given(small_cases(), st.integers(0, 20), st.integers(0, 2**31))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_shape(case: Case, num_saved: int, seed: int) -> None:
    generator = seeded(seed)
    cores, ids = case.cores(generator), case.ids(generator)
    made, count, distinct = make(cores, case, ids, 0 if len(case.p) == 2 else num_saved)
    double = [core.double() for core in cores]
    assert_near(made.rows[:count], reference.rows(double, distinct, case.p, case.q))
    grads = torch.randn(ids.numel(), math.prod(case.q), generator=generator)
    got = ops.tt_core_grads(cores, made.plan, made.prefixes, grads, case.p, case.q)
    want = reference.core_grads(double, distinct, grads[:count].double(), case.p, case.q)
    for core_grad, wanted in zip(got, want, strict=True):
        assert_near(core_grad, wanted)


@pytest.mark.parametrize("p", [(3, 4), (3, 4, 5), (3, 4, 5, 2)], ids=str)
def test_keys_are_a_bijection_that_repairs(p: tuple[int, ...]) -> None:
    total = math.prod(p)
    ids = torch.arange(total)
    keys = ops.tt_keys(ids, total, p)
    assert torch.equal(keys, reference.keys(ids, total, p))
    assert torch.equal(keys.sort().values, ids)
    assert torch.equal(reference.ids_of_keys(keys, p), ids)
    odd = torch.tensor([-1, -2, total - 3, total - 2, total, 2**31 - 1], dtype=torch.int32)
    want = reference.keys(torch.tensor([-1, 0, total - 3, 0, 0, 0]), total - 2, p)
    assert torch.equal(ops.tt_keys(odd, total - 2, p), want)


def test_keys_group_the_middle_core_then_prefixes() -> None:
    p = (3, 4, 5)
    order = reference.ids_of_keys(torch.arange(60), p)
    first, middle, _ = reference.digits(order, p)
    assert torch.equal(middle, middle.sort().values)
    assert torch.equal((middle * 3 + first).sort().values, middle * 3 + first)


def test_gradcheck_through_the_reference() -> None:
    generator = seeded(3)
    case = Case((3, 4, 2), (2, 1, 3), (2, 3), 6)
    cores = [core.double().requires_grad_() for core in case.cores(generator)]
    weights = torch.rand(6, dtype=torch.float64, generator=generator).requires_grad_()
    ids, offsets = torch.tensor([5, 5, -1, 23, 0, 99]), torch.tensor([0, 2, 2, 6])

    def pooled(sample_weights: Tensor, *leaves: Tensor) -> Tensor:
        return reference.lookup(
            leaves, 24, case.p, case.q, ids, offsets, sample_weights, Pooling.MEAN
        )

    assert torch.autograd.gradcheck(pooled, (weights, *cores))


def sample_calls() -> dict[str, tuple]:
    """One call of every op, all of whose outputs are fully defined."""
    generator = seeded(4)
    case = Case((5, 6, 7), (2, 2, 4), (3, 5), 0)
    cores, ids = case.cores(generator), torch.randperm(210, generator=generator)[:40]
    made, _, _ = make(cores, case, ids, num_saved=8)
    p, q = list(case.p), list(case.q)
    grads = torch.randn(40, 16, generator=generator)
    hyper = torch.tensor([0.1, 1.0, 0.0, 0.0, -1.0, 0.9, 0.99, 1e-8], dtype=torch.float64)
    core, states = cores[0].clone(), [torch.zeros_like(cores[0]) for _ in range(2)]
    groups = ops.group(ids, 210)
    return {
        "tt_keys": (ids, 210, p),
        "tt_plan": (made.groups.rows, made.groups.count, p),
        "tt_rows": (cores, list(made.plan), p, q, 8),
        "tt_core_grads": (cores, list(made.plan), made.prefixes, grads, p, q),
        "update_rows_": (core, states, hyper, OPTIMIZER["adam"], torch.randn_like(core)),
        "group_inverse": (*groups[1:],),
    }


@pytest.mark.parametrize(
    "name",
    ["tt_keys", "tt_plan", "tt_rows", "tt_core_grads", "update_rows_", "group_inverse"],
)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(ops, name).default, sample_calls()[name])


@pytest.mark.parametrize("num_keys", [5, 1000])
def test_group_inverse(num_keys: int) -> None:
    generator = seeded(6)
    keys = torch.randint(-1, num_keys + 1, (500,), generator=generator)
    unique, segments, permutation, count = ops.group(keys, num_keys)
    inverse = ops.group_inverse(segments, permutation, count)
    inside = (keys >= 0) & (keys < num_keys)
    assert torch.equal(inverse >= 0, inside)
    assert torch.equal(unique[inverse[inside].long()], keys[inside])


def test_group_inverse_of_nothing() -> None:
    _, segments, permutation, count = ops.group(torch.empty(0, dtype=torch.int64), 3)
    assert ops.group_inverse(segments, permutation, count).numel() == 0


WRONG = {
    "row_factors must have 2 to 4": lambda c: ops.tt_keys(torch.arange(3), 3, [3]),
    "rows must be in": lambda c: ops.tt_keys(torch.arange(3), 61, [3, 4, 5]),
    "row factors must be >= 1": lambda c: ops.tt_keys(torch.arange(3), 1, [3, -4, 5]),
    "less than 2\\^62": lambda c: ops.tt_keys(torch.arange(3), 1, [2**40, 2**40, 1]),
    "less than 2\\^31": lambda c: ops.tt_keys(torch.arange(3), 1, [2**32, 1]),
    "must be int32 or int64": lambda c: ops.tt_keys(torch.rand(3), 3, [3, 4, 5]),
    "must have row_factors": lambda c: ops.tt_rows(c.cores, c.plan, [3, 4, 6], [2, 2, 2], 0),
    "no multiple of rank": lambda c: ops.tt_rows(c.cores, c.plan, [3, 4, 5], [2, 5, 2], 0),
    "must have one length": lambda c: ops.tt_rows(c.cores, c.plan, [3, 4, 5], [2, 2], 0),
    "the 8 tensors that tt_plan": lambda c: ops.tt_rows(c.cores, [], [3, 4, 5], [2, 2, 2], 0),
    "each core must be float32": lambda c: ops.tt_rows(
        [core.double() for core in c.cores], c.plan, [3, 4, 5], [2, 2, 2], 0
    ),
    "row_grads must be": lambda c: ops.tt_core_grads(
        c.cores, c.plan, c.prefixes, torch.zeros(9, 7), [3, 4, 5], [2, 2, 2]
    ),
    "prefixes must be what": lambda c: ops.tt_core_grads(
        c.cores, c.plan, torch.zeros(2, 3), torch.zeros(9, 8), [3, 4, 5], [2, 2, 2]
    ),
    "grads must be": lambda c: ops.update_rows_(
        c.cores[0], [], torch.zeros(2, dtype=torch.float64), OPTIMIZER["sgd"], torch.zeros(1, 1)
    ),
    "optimizer must be one of": lambda c: ops.update_rows_(
        c.cores[0], [], torch.zeros(2, dtype=torch.float64), -1, torch.ones(3, 6)
    ),
    "keeps 1 state tensors": lambda c: ops.update_rows_(
        c.cores[0], [], torch.zeros(6, dtype=torch.float64), OPTIMIZER["adagrad"], torch.ones(3, 6)
    ),
}


class Small(NamedTuple):
    """Arguments that are right, for calls that get one of them wrong."""

    cores: list[Tensor]
    plan: list[Tensor]
    prefixes: Tensor


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_says_what_and_changes_nothing(message: str) -> None:
    case = Case((3, 4, 5), (2, 2, 2), (3, 3), 9)
    generator = seeded(7)
    cores = case.cores(generator)
    made, _, _ = make(cores, case, case.ids(generator), num_saved=2)
    before = [core.clone() for core in cores]
    with pytest.raises(RuntimeError, match=message):
        WRONG[message](Small(cores, list(made.plan), made.prefixes))
    assert all(torch.equal(core, old) for core, old in zip(cores, before, strict=True))


def test_plan_groups_rows_by_both_halves() -> None:
    case = Case((4, 3, 6), (2, 2, 2), (2, 2), 50)
    generator = seeded(8)
    made, count, distinct = make(case.cores(generator), case, case.ids(generator), num_saved=0)
    plan = made.plan
    rows, lefts, rights = plan.counts.tolist()
    first, middle, last = reference.digits(distinct, case.p)
    assert rows == count
    assert torch.equal(plan.lefts[plan.row_lefts[:rows].long()].long(), middle * 4 + first)
    assert torch.equal(plan.rights[plan.row_rights[:rows].long()].long(), last)
    assert lefts == (middle * 4 + first).unique().numel()
    assert rights == last.unique().numel()
    segments = plan.left_segments[: lefts + 1].long()
    assert torch.equal(segments.diff(), plan.row_lefts[:rows].bincount())
    for v in range(rights):
        mine = plan.right_rows[plan.right_segments[v] : plan.right_segments[v + 1]]
        assert torch.equal(mine.long(), (plan.row_rights[:rows] == v).nonzero().squeeze(1))


def test_groups_skip_pruned_lookups() -> None:
    features = torch.tensor([[0, 0, 60, 8, 0, 0, 0, 0]])
    keys = ops.tt_keys(torch.tensor([-1, 3, 3, -1]), 60, [3, 4, 5])
    groups = tbe.group(features, keys, torch.tensor([0, 2, 4]), 60)
    inverse = ops.group_inverse(groups.segments, groups.lookups, groups.count)
    assert inverse.tolist() == [-1, 0, 0, -1]


# Which tensor of a plan, which entry of it, and what it says instead.
WRONG_PLANS = [
    *((k, 0, value) for k in range(7) for value in (-1, 1 << 29, 2**31 - 1, -(2**31))),
    *((k, 1, value) for k in range(8) for value in (-1, 1 << 29)),
    *((7, k, value) for k in range(3) for value in (0, 3, 99)),
]


@pytest.mark.parametrize("factors", [([3, 4, 5], [2, 2, 2]), ([3, 2, 2, 3], [2, 2, 2, 1])])
def test_plans_that_no_batch_has_are_refused(factors: tuple[list[int], list[int]]) -> None:
    p, q = factors
    case = Case(tuple(p), tuple(q), (2,) * (len(p) - 1), 12)
    cores, ids = case.cores(seeded(8)), torch.randperm(math.prod(p), generator=seeded(9))[:12]
    made, _, _ = make(cores, case, ids, num_saved=2)
    grads = torch.ones(12, math.prod(q))
    right = ops.tt_core_grads(cores, list(made.plan), made.prefixes, grads, p, q)
    for tensor, entry, value in WRONG_PLANS:
        plan = [part.clone() for part in made.plan]
        if plan[tensor][entry] == value:
            continue
        plan[tensor][entry] = value
        for call in (
            lambda plan=plan: ops.tt_rows(cores, plan, p, q, 2),
            lambda plan=plan: ops.tt_core_grads(cores, plan, made.prefixes, grads, p, q),
        ):
            with pytest.raises(RuntimeError, match="plan must be what tt_plan returned"):
                call()
    again = ops.tt_core_grads(cores, list(made.plan), made.prefixes, grads, p, q)
    assert all(torch.equal(a, b) for a, b in zip(right, again, strict=True))


def test_keys_out_of_order_are_refused() -> None:
    for keys in ([5, 3, 40], [5, 5, 6], [-1, 2, 3], [1, 2, 60]):
        with pytest.raises(RuntimeError, match="distinct and ascending"):
            ops.tt_plan(torch.tensor(keys), torch.tensor([3], dtype=torch.int32), [3, 4, 5])


def test_factors_that_overflow_are_refused() -> None:
    core, plan = (
        torch.ones(1, 65_536),
        ops.tt_plan(torch.zeros(1).long(), torch.ones(1).int(), [1, 1]),
    )
    with pytest.raises(RuntimeError, match="multiply to at most"):
        ops.tt_rows([core, core], plan, [1, 1], [65_536, 65_536], 0)
    ranks = [torch.ones(1, 4), torch.ones(1, 4)]
    with pytest.raises(RuntimeError, match="no multiple of rank"):
        ops.tt_rows(ranks, plan, [1, 1], [1, 2**62], 0)
