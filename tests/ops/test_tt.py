"""Tensor-train ops against the reference: shapes of every kind, determinism, errors, opcheck."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from emblib import optim
from emblib.ops import tbe, tt
from emblib.ops.codes import OPTIMIZER, POOLING
from emblib.reference import tt as reference
from emblib.specs import Pooling, TTSpec
from emblib.tt.shapes import inverse

ops = torch.ops.emblib


pytestmark = pytest.mark.usefixtures("on_device")


NOT_CHECKED = "values of tensors on a GPU are not checked, which would wait for it"


def skip_on_gpu(reason: str) -> None:
    if torch.get_default_device().type != "cpu":
        pytest.skip(reason)


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

    @property
    def layout(self) -> tt.TTLayout:
        total, dim = math.prod(self.p), math.prod(self.q)
        return tt.layout_of([TTSpec(total, dim, self.ranks, self.p, self.q)])

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
    "more_than_a_wave_per_inner_row": Case((100, 5, 12), (8, 8, 4), (4, 64), 3000),
}


def every_case() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Run(NamedTuple):
    """What a pass over one batch made, with the ids of its distinct rows."""

    made: tt.ComputedRows
    count: int
    ids: Tensor


def batch_of(case: Case, ids: Tensor) -> tt.TTLookup:
    """Return a batch of one table, each id in a bag of its own."""
    total, dim, layout = math.prod(case.p), math.prod(case.q), case.layout
    features = torch.tensor([[0, 0, total, dim, 0, 0, 0, 0]] * 3)
    tables = torch.tensor(layout.tables)
    offsets = torch.arange(ids.numel() + 1)
    lookups = (features, ids, offsets, None, Pooling.NONE, dim, torch.float32)
    return tt.TTLookup(layout, tables, tables, *lookups)


def make(cores: list[Tensor], case: Case, ids: Tensor, num_saved: int) -> Run:
    made = tt.compute_rows(cores, batch_of(case, ids), num_saved)
    count = int(made.groups.count)
    return Run(made, count, reference.ids_of_keys(made.groups.rows[:count], case.p))


def keys_of(ids: Tensor, rows: int, p: Sequence[int]) -> Tensor:
    """`tt_keys` of one table, each id in a bag of its own."""
    spec = TTSpec(rows, 2 ** len(p), (1,) * (len(p) - 1), tuple(p))
    tables = torch.tensor(tt.layout_of([spec]).tables)
    return ops.tt_keys(ids, torch.arange(ids.numel() + 1), None, tables)


def plan_of(keys: Tensor, count: Tensor, p: Sequence[int]) -> list[Tensor]:
    """`tt_plan` of one table."""
    spec = TTSpec(math.prod(p), 2 ** len(p), (1,) * (len(p) - 1), tuple(p))
    layout = tt.layout_of([spec])
    return ops.tt_plan(keys, count, torch.tensor(layout.tables), layout.left_ids, layout.right_ids)


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
    got = ops.tt_core_grads(cores, made.plan, made.left_values, grads, *case.layout[:3])
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
            core_grads = ops.tt_core_grads(
                cores, made.plan, made.left_values, grads, *case.layout[:3]
            )
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
    got = ops.tt_core_grads(cores, made.plan, made.left_values, grads, *case.layout[:3])
    want = reference.core_grads(double, distinct, grads[:count].double(), case.p, case.q)
    for core_grad, wanted in zip(got, want, strict=True):
        assert_near(core_grad, wanted)


@pytest.mark.parametrize("p", [(3, 4), (3, 4, 5), (3, 4, 5, 2)], ids=str)
def test_keys_are_a_bijection_that_repairs(p: tuple[int, ...]) -> None:
    total = math.prod(p)
    ids = torch.arange(total)
    keys = keys_of(ids, total, p)
    assert torch.equal(keys, reference.keys(ids, total, p))
    assert torch.equal(keys.sort().values, ids)
    assert torch.equal(reference.ids_of_keys(keys, p), ids)
    odd = torch.tensor([-1, -2, total - 3, total - 2, total, 2**31 - 1], dtype=torch.int32)
    want = reference.keys(torch.tensor([-1, 0, total - 3, 0, 0, 0]), total - 2, p)
    assert torch.equal(keys_of(odd, total - 2, p), want)


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 60, 997, 3_000_000_019, 9_000_000_000_000])
@pytest.mark.parametrize("seed", [0, 1])
def test_permuted_ids_are_a_bijection(rows: int, seed: int) -> None:
    spec = TTSpec(rows, 4, (1, 1), ids="permuted", seed=seed)
    ids = torch.tensor(sorted({*range(min(rows, 1000)), rows // 2, rows - 2, rows - 1} - {-1}))
    tables, offsets = torch.tensor(tt.layout_of([spec]).tables), torch.arange(ids.numel() + 1)
    keys = ops.tt_keys(ids, offsets, None, tables)
    assert torch.equal(keys, reference.keys(ids, rows, spec.row_factors, spec.permutation))
    found = reference.ids_of_keys(keys, spec.row_factors)
    assert found.unique().numel() == ids.numel()
    assert int(found.max()) < rows
    back = inverse(spec.permutation, rows)
    assert torch.equal(reference.permuted(found, rows, back), ids)
    if rows >= 60:
        other = TTSpec(rows, 4, (1, 1), ids="permuted", seed=seed + 1)
        assert other.permutation != spec.permutation
        # Neighbours no longer share all cores but the last.
        first = found // math.prod(spec.row_factors[1:])
        assert first[:10].unique().numel() > 1


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


def whole_lookup(
    cores: list[Tensor], batch: tt.TTLookup, weights: Tensor | None = None, num_saved: int = 9
) -> list[Tensor]:
    """`tt_lookup_checked_` of a batch, without a check."""
    return ops.tt_lookup_checked_(
        cores,
        batch.tables,
        batch.tables,
        batch.features,
        batch.indices,
        batch.offsets,
        batch.bag_layout,
        weights,
        POOLING[batch.pooling.value],
        batch.output_dim,
        batch.output_dtype,
        *batch.layout[:3],
        num_saved,
        None,
        torch.zeros(2, dtype=torch.int64),
    )


def sample_calls() -> dict[str, tuple]:
    """One call of every op, all of whose outputs are fully defined."""
    generator = seeded(4)
    case = Case((5, 6, 7), (2, 2, 4), (3, 5), 0)
    cores, ids = case.cores(generator), torch.randperm(210, generator=generator)[:40]
    made, _, _ = make(cores, case, ids, num_saved=8)
    p, q, tables = list(case.p), list(case.q), torch.tensor(case.layout.tables)
    grads = torch.randn(40, 16, generator=generator)
    hyper = torch.tensor([0.1, 1.0, 0.0, 0.0, -1.0, 0.9, 0.99, 1e-8], dtype=torch.float64)
    core, states = cores[0].clone(), [torch.zeros_like(cores[0]) for _ in range(2)]
    moments = [torch.zeros_like(c) for c in cores for _ in range(2)]
    groups = ops.group(ids, 210)
    counters = torch.zeros(1, 4, dtype=torch.int64)
    batch = batch_of(case, ids)
    lookups = (batch.features, ids, batch.offsets, None, None, POOLING["none"], 16, torch.float32)
    return {
        "tt_lookup_checked_": (
            cores,
            tables,
            tables,
            *lookups,
            p,
            q,
            [3],
            8,
            None,
            tables.new_zeros(2),
        ),
        "tt_backward_": (
            *([core.clone() for core in cores], moments, hyper, OPTIMIZER["adam"], grads),
            *(batch.features, ids, batch.offsets, None, None, POOLING["none"]),
            *(whole_lookup(cores, batch)[1:], p, q, [3]),
        ),
        "tt_keys": (ids, torch.tensor([0, 20, 40]), None, tables.expand(2, -1).contiguous()),
        "tt_stored": (ids, ids, ids, ids % 3 - 1, torch.tensor([4, -1])),
        "tt_count_": (ids, ids, *torch.tensor([[0, 20, 40]]), torch.tensor([0, 0]), counters),
        "tt_plan": (made.groups.rows, made.groups.count, tables, *case.layout[5:7]),
        "tt_rows": (cores, list(made.plan), p, q, [3], 8),
        "tt_core_grads": (cores, list(made.plan), made.left_values, grads, p, q, [3]),
        "tt_update_": (
            *([core.clone() for core in cores], moments, hyper, OPTIMIZER["adam"]),
            *(list(made.plan), made.left_values, grads, p, q, [3]),
        ),
        "update_rows_": (core, states, hyper, OPTIMIZER["adam"], torch.randn_like(core)),
        "group_inverse": (*groups[1:],),
    }


@pytest.mark.parametrize(
    "name",
    [
        "tt_lookup_checked_",
        "tt_backward_",
        "tt_keys",
        "tt_stored",
        "tt_count_",
        "tt_plan",
        "tt_rows",
        "tt_core_grads",
        "tt_update_",
        "update_rows_",
        "group_inverse",
    ],
)
def test_opcheck(name: str) -> None:
    op, arguments = getattr(ops, name).default, sample_calls()[name]
    is_cuda = any(isinstance(a, Tensor) and a.is_cuda for a in tree_leaves(arguments))
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    # The one returns a list and mutates: compiled code calls its parts. The others leave ends of
    # tensors unspecified, which on a GPU is old memory.
    unequal = ("tt_lookup_checked_", *(("tt_plan", "tt_rows") if is_cuda else ()))
    if name not in unequal:
        checks.append("test_aot_dispatch_dynamic")
    if is_cuda and name in ("tt_lookup_checked_", "tt_core_grads"):
        # On a GPU the one returns other tensors than the fake's, which are the CPU's, and the
        # gradients of the other are parts of one tensor.
        checks.remove("test_faketensor")
    torch.library.opcheck(op, arguments, test_utils=checks)
    if name == "tt_lookup_checked_":  # -1: nothing is saved for backward
        torch.library.opcheck(op, (*arguments[:-3], -1, *arguments[-2:]), test_utils=checks)


@every_case()
@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adam"])
def test_an_update_is_that_of_dense_gradients(case: Case, name: str) -> None:
    """Bit for bit, and rows that the batch does not use keep weights and states."""
    generator = seeded(5)
    cores, ids = case.cores(generator), case.ids(generator)
    made, _, _ = make(cores, case, ids, 0 if len(case.p) == 2 else 9)
    grads = torch.randn(ids.numel(), math.prod(case.q), generator=generator)
    grads[::3] = 0.0
    hyper = torch.tensor([0.1, 3.0, 0.0, 0.0, -1.0, 0.9, 0.99, 1e-8], dtype=torch.float64)
    if name == "rowwise_adagrad":
        hyper = optim.RowwiseAdagrad(0.1).hyperparams()
    if name == "sgd":
        hyper = optim.SGD(0.1).hyperparams()
    count = {"sgd": 0, "rowwise_adagrad": 1, "adam": 2}[name]
    states = [
        torch.rand(core.size(0) if name == "rowwise_adagrad" else core.shape, generator=generator)
        for core in cores
        for _ in range(count)
    ]
    mine, mine_states = ([t.clone() for t in tensors] for tensors in (cores, states))
    rest = (list(made.plan), made.left_values, grads, *case.layout[:3])
    dense = ops.tt_core_grads(cores, *rest)
    ops.tt_update_(mine, mine_states, hyper, OPTIMIZER[name], *rest)
    for k, (core, grad) in enumerate(zip(cores, dense, strict=True)):
        ops.update_rows_(core, states[k * count : (k + 1) * count], hyper, OPTIMIZER[name], grad)
        assert torch.equal(core, mine[k])
    assert all(torch.equal(a, b) for a, b in zip(states, mine_states, strict=True))


@every_case()
def test_an_update_has_the_same_bits_for_any_threads_and_any_kept(case: Case) -> None:
    """The optimizer runs inside the waves of a pass, whose ends depend on both."""
    generator = seeded(6)
    cores, ids = case.cores(generator), case.ids(generator)
    grads = torch.randn(ids.numel(), math.prod(case.q), generator=generator)
    hyper = optim.SGD(0.1).hyperparams()
    results = []
    threads = torch.get_num_threads()
    try:
        for num_threads, num_saved in (
            (1, 0),
            (1, 7),
            (1, 150),
            (2, 0),
            (2, 150),
            (2, ids.numel()),
        ):
            torch.set_num_threads(num_threads)
            made, _, _ = make(cores, case, ids, 0 if len(case.p) == 2 else num_saved)
            updated = [core.clone() for core in cores]
            rest = (list(made.plan), made.left_values, grads, *case.layout[:3])
            ops.tt_update_(updated, [], hyper, OPTIMIZER["sgd"], *rest)
            results.append(updated)
    finally:
        torch.set_num_threads(threads)
    assert not ids.numel() or any(
        not torch.equal(before, after) for before, after in zip(cores, results[0], strict=True)
    )
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


@every_case()
@pytest.mark.parametrize("weighted", [False, True])
def test_whole_passes_have_the_bits_of_their_parts(case: Case, weighted: bool) -> None:
    generator = seeded(7)
    cores, ids = case.cores(generator), case.ids(generator)
    batch = batch_of(case, ids)._replace(pooling=Pooling.SUM)
    weights = torch.rand(ids.numel(), generator=generator) if weighted else None
    num_saved = 0 if len(case.p) == 2 else 9
    made = tt.compute_rows(cores, batch, num_saved)
    whole_lookup([torch.full_like(core, torch.nan) for core in cores], batch, weights)  # in scratch
    out, *kept = whole_lookup(cores, batch, weights, num_saved)
    assert torch.equal(out, tt.pool(made, batch, weights))
    assert len(whole_lookup(cores, batch, weights, -1)) == 1

    grad = torch.randn(out.shape, generator=generator)
    hyper = optim.SGD(0.1).hyperparams()
    bags = (batch.offsets, None, weights, POOLING["sum"])
    row_grads = ops.tbe_row_grads(grad, batch.key_features(), *made.groups, *bags, out.size(-1))
    sgd, shape = OPTIMIZER["sgd"], case.layout[:3]

    def compare(
        cores: list[Tensor], is_finite: Tensor | None = None, *, is_stale: bool = False
    ) -> None:
        """Compare the two after one more step from `cores`."""
        parts, fused = [c.clone() for c in cores], [c.clone() for c in cores]
        numbers, is_made = hyper.clone(), is_finite is None or bool(is_finite)
        if is_made:
            left_values = ops.tt_rows(cores, made.plan, *shape, num_saved)[1]
            ops.tt_update_(parts, [], hyper, sgd, made.plan, left_values, row_grads, *shape)
        rest = (grad, batch.features, ids, *bags, kept, *shape, is_stale, 0, is_finite)
        ops.tt_backward_(fused, [], numbers, sgd, *rest)
        assert all(torch.equal(a, b) for a, b in zip(parts, fused, strict=True))
        assert numbers[1] == hyper[1] + is_made

    compare(cores)
    compare(cores, torch.tensor(True))
    compare(cores, torch.tensor(False))
    compare([core * 2 for core in cores], is_stale=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("lookups", "padding"), [(0, 0), (1, 0), (40, 7), (5000, 100)])
def test_stored_rows_and_their_counts(lookups: int, padding: int, dtype: torch.dtype) -> None:
    """Of three features of two tables, after padding."""
    generator = seeded(9)
    indices = torch.randint(-1, 60, (lookups,), generator=generator, dtype=dtype)
    ids = torch.where(indices < 50, indices.long(), 0)
    keys = torch.where(ids >= 0, ids + 3, -1)
    slots = torch.randint(-1, 20, (lookups,), generator=generator)
    row_of_slot = torch.randint(-1, 9, (20,), generator=generator)
    middle = torch.randint(padding, lookups + 1, (2,), generator=generator).sort().values
    starts = torch.cat([torch.tensor([padding]), middle, torch.tensor([lookups])])
    starts = starts.clamp(max=lookups)
    tables = torch.tensor([1, 0, 1])
    for known in (None, slots):
        found = ops.tt_stored(indices, ids, keys, known, row_of_slot)
        want = reference.split_stored(indices, ids, keys, known, row_of_slot)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        counters, counts = (torch.arange(8).view(2, 4) for _ in range(2))
        ops.tt_count_(found[2], found[1], starts, tables, counters)
        reference.count_lookups_(want[2], want[1], starts, tables, counts)
        assert torch.equal(counters, counts)


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


def _tables(*rows: Sequence[int]) -> Tensor:
    """`tables` of the shape (3, 4, 5), or with other numbers in it."""
    return torch.tensor(rows or [(60, 1, 0, 3, 4, 5, 1, 0, 0, 0)])


def _keys(
    *,
    ids: Tensor | None = None,
    tables: Tensor | None = None,
    bags: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:
    ids = torch.arange(3) if ids is None else ids
    bags = (torch.arange(ids.numel() + 1), None) if bags is None else bags
    return ops.tt_keys(ids, *bags, _tables() if tables is None else tables)


def _no_bags(*, variable: bool) -> tuple[Tensor, Tensor | None]:
    """Offsets and bag layout of a batch without bags."""
    return torch.zeros(1, dtype=torch.int64), _numbers(0)[0].view(0, 2) if variable else None


def _plan(tables: Tensor, left_ids: int = 12, right_ids: int = 5) -> list[Tensor]:
    return ops.tt_plan(torch.arange(3), torch.ones(1).int(), tables, left_ids, right_ids)


def _gradients(small: "Small") -> tuple[object, ...]:
    """The arguments from `plan` on of an op that takes gradients of rows."""
    return small.plan, small.left_values, torch.zeros(9, 8), [3, 4, 5], [2, 2, 2], [3]


def _look_up(
    small: "Small",
    p: list[int],
    features: Tensor | None = None,
    bags: tuple[Tensor, Tensor | None] | None = None,
) -> object:
    """`tt_lookup_checked_` of tables (3, 4, 5) with cores of other row factors."""
    batch = batch_of(Case((3, 4, 5), (2, 2, 2), (2, 2), 0), torch.arange(3))
    cores = [torch.zeros(p[k], core.size(1)) for k, core in enumerate(small.cores)]
    features = batch.features if features is None else features
    bags = (batch.offsets, None) if bags is None else bags
    lookups = (features, batch.indices, *bags, None, POOLING["none"], 8)
    shape = (torch.float32, p, [2, 2, 2], [3], 0, None, torch.zeros(2, dtype=torch.int64))
    return ops.tt_lookup_checked_(cores, batch.tables, batch.tables, *lookups, *shape)


def _backward(small: "Small", kept: list[Tensor], hyper: Tensor | None = None) -> object:
    batch = batch_of(Case((3, 4, 5), (2, 2, 2), (2, 2), 0), torch.arange(9))
    hyper = torch.zeros(2, dtype=torch.float64) if hyper is None else hyper
    bags = (batch.indices, batch.offsets, None, None, POOLING["none"])
    rest = (kept, [3, 4, 5], [2, 2, 2], [3])
    grad = torch.zeros(9, 8)
    return ops.tt_backward_(
        small.cores, [], hyper, OPTIMIZER["sgd"], grad, batch.features, *bags, *rest
    )


def _numbers(*sizes: int) -> list[Tensor]:
    return [torch.zeros(size, dtype=torch.int64) for size in sizes]


WRONG = {
    "num_cores must be 2 to 4": lambda c: ops.tt_rows(
        c.cores, c.plan, [3, 4, 5], [2, 2, 2], [2], 0
    ),
    "num_cores must be 2 to 4 ": lambda c: ops.tt_rows(
        c.cores, c.plan, [3, 4, 5], [2, 2, 2], [1, 2], 0
    ),
    "must have rows in": lambda c: _keys(tables=_tables((61, 1, 0, 3, 4, 5, 1, 0, 0, 0))),
    "must have rows in ": lambda c: _keys(tables=_tables((1, 1, 0, 3, -4, 5, 1, 0, 0, 0))),
    "must have rows  *": lambda c: _keys(tables=_tables((1, 1, 0, 2**40, 2**40, 1, 1, 0, 0, 0))),
    "must be a contiguous": lambda c: _keys(tables=torch.zeros(1, 7, dtype=torch.int64)),
    "must follow each other": lambda c: _plan(_tables((60, 1, 0, 3, 4, 5, 1, 7, 0, 0))),
    "left_ids and right_ids must be 12 and 5": lambda c: _plan(_tables(), 13),
    "tables must not be empty": lambda c: _plan(_tables()[:0], 0, 0),
    "must be int32 or int64": lambda c: _keys(ids=torch.rand(3)),
    "must have row_factors": lambda c: ops.tt_rows(c.cores, c.plan, [3, 4, 6], [2, 2, 2], [3], 0),
    "a multiple of rank": lambda c: ops.tt_rows(c.cores, c.plan, [3, 4, 5], [2, 5, 2], [3], 0),
    "must have one length": lambda c: ops.tt_rows(c.cores, c.plan, [3, 4, 5], [2, 2], [3], 0),
    "the 8 tensors that tt_plan": lambda c: ops.tt_rows(c.cores, [], [3, 4, 5], [2, 2, 2], [3], 0),
    "each core must be float32": lambda c: ops.tt_rows(
        [core.double() for core in c.cores], c.plan, [3, 4, 5], [2, 2, 2], [3], 0
    ),
    "at most 4e18": lambda c: ops.tt_rows(c.cores, c.plan, [2**40, 2**40, 1], [2, 2, 2], [3], 0),
    "less than 2\\^31": lambda c: ops.tt_rows(c.cores[:2], c.plan, [2**32, 1], [2, 2], [2], 0),
    "row_grads must be": lambda c: ops.tt_core_grads(
        c.cores, c.plan, c.left_values, torch.zeros(9, 7), [3, 4, 5], [2, 2, 2], [3]
    ),
    "left_values must be what": lambda c: ops.tt_core_grads(
        c.cores, c.plan, torch.zeros(2, 3), torch.zeros(9, 8), [3, 4, 5], [2, 2, 2], [3]
    ),
    "the same number of tensors for each": lambda c: ops.tt_update_(
        c.cores, c.cores[:2], torch.zeros(6).double(), OPTIMIZER["adagrad"], *_gradients(c)
    ),
    "but no bags": lambda c: _keys(bags=_no_bags(variable=False)),
    "indices but no bags": lambda c: _keys(bags=_no_bags(variable=True)),
    "3 indices but no bags": lambda c: _look_up(c, [3, 4, 5], bags=_no_bags(variable=True)),
    "tables must be those of row_factors": lambda c: _look_up(c, [4, 3, 5]),
    "features must have a row per feature for keys": lambda c: _look_up(
        c, [3, 4, 5], features=torch.zeros(1, 8, dtype=torch.int64)
    ),
    "hyper must be contiguous": lambda c: _backward(c, [], hyper=torch.zeros(1).double()),
    "kept must be the": lambda c: _backward(c, kept=[]),
    "one entry per index": lambda c: ops.tt_stored(*_numbers(3, 2, 3), None, *_numbers(1)),
    "starts must have 2 entries": lambda c: ops.tt_count_(
        *_numbers(3, 3, 3, 1), torch.zeros(1, 4, dtype=torch.int64)
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


# The host reads these numbers where the tensor is on the CPU; on a GPU it would have to wait.
OF_VALUES = {
    "tables must be those of row_factors",
    "must have rows in",
    "must have rows in ",
    "must have rows  *",
    "must follow each other",
    "left_ids and right_ids must be 12 and 5",
}


class Small(NamedTuple):
    """Arguments that are right, for calls that get one of them wrong."""

    cores: list[Tensor]
    plan: list[Tensor]
    left_values: Tensor


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_says_what_and_changes_nothing(message: str) -> None:
    if message in OF_VALUES:
        skip_on_gpu(NOT_CHECKED)
    case = Case((3, 4, 5), (2, 2, 2), (3, 3), 9)
    generator = seeded(7)
    cores = case.cores(generator)
    made, _, _ = make(cores, case, case.ids(generator), num_saved=2)
    before = [core.clone() for core in cores]
    with pytest.raises(RuntimeError, match=message):
        WRONG[message](Small(cores, list(made.plan), made.left_values))
    assert all(torch.equal(core, old) for core, old in zip(cores, before, strict=True))


def test_plan_groups_rows_by_both_halves() -> None:
    case = Case((4, 3, 6), (2, 2, 2), (2, 2), 50)
    generator = seeded(8)
    made, count, distinct = make(case.cores(generator), case, case.ids(generator), num_saved=0)
    plan = made.plan
    rows, lefts, rights = plan.starts.view(3, 2)[:, 1].tolist()
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
    keys = keys_of(torch.tensor([-1, 3, 3, -1]), 60, [3, 4, 5])
    groups = tbe.group(features, keys, torch.tensor([0, 2, 4]), 60)
    inverse = ops.group_inverse(groups.segments, groups.lookups, groups.count)
    assert inverse.tolist() == [-1, 0, 0, -1]


# Which tensor of a plan, which entry of it, and what it says instead.
WRONG_PLANS = [
    *((k, 0, value) for k in range(7) for value in (-1, 1 << 29, 2**31 - 1, -(2**31))),
    *((k, 1, value) for k in range(8) for value in (-1, 1 << 29)),
    *((7, k, value) for k in range(6) for value in (0, 3, 99, -1)),
]


@pytest.mark.parametrize("factors", [([3, 4, 5], [2, 2, 2]), ([3, 2, 2, 3], [2, 2, 2, 1])])
def test_plans_that_no_batch_has_are_refused(factors: tuple[list[int], list[int]]) -> None:
    skip_on_gpu(NOT_CHECKED)
    p, q = factors
    case = Case(tuple(p), tuple(q), (2,) * (len(p) - 1), 12)
    cores, ids = case.cores(seeded(8)), torch.randperm(math.prod(p), generator=seeded(9))[:12]
    made, _, _ = make(cores, case, ids, num_saved=2)
    grads = torch.ones(12, math.prod(q))
    right = ops.tt_core_grads(cores, list(made.plan), made.left_values, grads, p, q, [len(p)])
    for tensor, entry, value in WRONG_PLANS:
        plan = [part.clone() for part in made.plan]
        if plan[tensor][entry] == value:
            continue
        plan[tensor][entry] = value
        for call in (
            lambda plan=plan: ops.tt_rows(cores, plan, p, q, [len(p)], 2),
            lambda plan=plan: ops.tt_core_grads(
                cores, plan, made.left_values, grads, p, q, [len(p)]
            ),
        ):
            with pytest.raises(RuntimeError, match="plan must be what tt_plan returned"):
                call()
    again = ops.tt_core_grads(cores, list(made.plan), made.left_values, grads, p, q, [len(p)])
    assert all(torch.equal(a, b) for a, b in zip(right, again, strict=True))


def test_keys_out_of_order_are_refused() -> None:
    skip_on_gpu(NOT_CHECKED)
    for keys in ([5, 3, 40], [5, 5, 6], [-1, 2, 3], [1, 2, 60]):
        with pytest.raises(RuntimeError, match="distinct and ascending"):
            plan_of(torch.tensor(keys), torch.tensor([3], dtype=torch.int32), [3, 4, 5])


def test_factors_that_overflow_are_refused() -> None:
    core, plan = (
        torch.ones(1, 65_536),
        plan_of(torch.zeros(1).long(), torch.ones(1).int(), [1, 1]),
    )
    with pytest.raises(RuntimeError, match="multiply to at most"):
        ops.tt_rows([core, core], plan, [1, 1], [65_536, 65_536], [2], 0)
    ranks = [torch.ones(1, 4), torch.ones(1, 4)]
    with pytest.raises(RuntimeError, match="a multiple of rank"):
        ops.tt_rows(ranks, plan, [1, 1], [1, 2**62], [2], 0)
    plan = plan_of(torch.zeros(1).long(), torch.ones(1).int(), [1, 1, 1])
    large = [torch.ones(1, width) for width in (2**20, 2**11, 2**10)]
    with pytest.raises(RuntimeError, match="half times its rank must multiply to at most 2"):
        ops.tt_rows(large, plan, [1] * 3, [2**20, 2, 1], [3], 0)
    wide = [torch.ones(1, width) for width in (1, 2**21, 2**21)]
    with pytest.raises(RuntimeError, match="sides of an inner core"):
        ops.tt_rows(wide, plan, [1] * 3, [1] * 3, [3], 0)
