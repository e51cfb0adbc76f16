"""Emulated tensor-train kernels against the reference and the CPU's plan."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from emblib.columns import TTTableColumn
from emblib.ops.codes import MATMUL_PRECISION
from emblib.ops.tt import layout_of
from emblib.reference import tt
from emblib.specs import TTSpec
from tests.simt.emulated import DTYPES
from tests.simt.library import Word, library


class Case(NamedTuple):
    """A table, how many ids of it are looked up, and below which id they lie (0: all rows)."""

    p: tuple[int, ...]
    q: tuple[int, ...]
    ranks: tuple[int, ...]
    lookups: int
    below: int = 0

    @property
    def spec(self) -> TTSpec:
        return TTSpec(math.prod(self.p), math.prod(self.q), self.ranks, self.p, self.q)


CASES = {
    "three_cores": Case((9, 8, 7), (4, 4, 4), (16, 12), 150),
    "ranks_odd": Case((5, 6, 7), (3, 2, 5), (7, 9), 90),
    "ranks_one": Case((5, 3, 7), (2, 2, 4), (1, 1), 30),
    "rank_wide": Case((3, 2, 4), (2, 4, 4), (33, 70), 20),
    "two_cores": Case((12, 15), (4, 8), (10,), 80),
    "two_cores_odd": Case((3, 5), (3, 7), (5,), 15),
    "four_cores": Case((4, 3, 5, 6), (2, 2, 4, 2), (6, 8, 5), 100),
    "four_cores_odd": Case((2, 3, 2, 3), (3, 1, 2, 3), (5, 3, 7), 30),
    "dim_prime": Case((4, 5, 6), (1, 1, 13), (2, 3), 40),
    "dim_one": Case((4, 5, 6), (1, 1, 1), (2, 3), 40),
    "dim_wide": Case((3, 3, 3), (4, 8, 8), (4, 4), 20),
    "one_row": Case((1, 1, 1), (2, 2, 2), (2, 2), 5),
    "many_inner_rows": Case((2, 150, 3), (2, 2, 2), (3, 3), 120),
    "long_right_segments": Case((40, 12, 2), (2, 2, 2), (4, 4), 700),
    "hot_ids": Case((9, 8, 7), (4, 4, 4), (8, 8), 300, below=4),
    "one_lookup": Case((5, 5, 5), (2, 2, 2), (3, 3), 1),
}


def every_case() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Batch(NamedTuple):
    """Inputs of the passes: cores, distinct keys padded to the lookups, how many, their ids."""

    cores: list[Tensor]
    keys: Tensor
    count: Tensor
    distinct: Tensor


def make_batch(case: Case, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    full = (1, *case.ranks, 1)
    cores = [
        torch.randn(p, full[k] * q * full[k + 1], generator=generator).to(dtype)
        for k, (p, q) in enumerate(zip(case.p, case.q, strict=True))
    ]
    high = case.below or math.prod(case.p)
    ids = torch.randint(0, high, (case.lookups,), generator=generator)
    unique = tt.keys(ids, math.prod(case.p), case.p).unique()
    keys = torch.zeros(case.lookups, dtype=torch.int64)
    keys[: unique.numel()] = unique
    count = torch.tensor([unique.numel()], dtype=torch.int32)
    return Batch(cores, keys, count, tt.ids_of_keys(unique, case.p))


def shape_words(case: Case) -> tuple[Word, ...]:
    return (1, len(case.p), *case.p, *case.q, 1, *case.ranks, 1)


def plan_of(case: Case, batch: Batch) -> list[Tensor]:
    n = case.lookups
    sizes = (n, n + 1, n, n, n + 1, n, n, 6)
    plan = [torch.full((size,), 7, dtype=torch.int32) for size in sizes]
    layout = layout_of([case.spec])
    tables = torch.tensor(layout.tables)
    ids = (tables, 1, layout.left_ids, layout.right_ids)
    library().call("tt_plan", *ids, batch.keys, batch.count, n, *plan)
    return plan


def batch_words(
    case: Case, batch: Batch, plan: list[Tensor], precision: str = "float32"
) -> tuple[Word, ...]:
    dtype = DTYPES[batch.cores[0].dtype]
    products = MATMUL_PRECISION[precision]
    return (*shape_words(case), case.lookups, products, dtype, *batch.cores, *plan)


def assert_near(got: Tensor, want: Tensor) -> None:
    scale = max(1e-3, float(want.abs().max()))
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("p", [(3, 4), (3, 4, 5), (3, 4, 5, 2)], ids=str)
def test_keys(p: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = math.prod(p) - 1
    ids = torch.tensor([*range(-2, math.prod(p) + 2), 2**31 - 1], dtype=dtype)
    keys = torch.full((ids.numel(),), 7)
    spec = TTSpec(rows, 2 ** len(p), (1,) * (len(p) - 1), p)
    tables, offsets = torch.tensor(layout_of([spec]).tables), torch.arange(ids.numel() + 1)
    lookups = (ids, dtype == torch.int64, ids.numel(), offsets, 1, ids.numel())
    library().call("tt_keys", tables, 1, *lookups, None, keys)
    assert torch.equal(keys, tt.keys(ids, rows, p))


@every_case()
def test_plan_is_that_of_the_cpu(case: Case) -> None:
    batch = make_batch(case)
    got = plan_of(case, batch)
    layout = layout_of([case.spec])
    tables, ids = torch.tensor(layout.tables), (layout.left_ids, layout.right_ids)
    want = torch.ops.emblib.tt_plan(batch.keys, batch.count, tables, *ids)
    rows, lefts, rights = want[7].view(3, 2)[:, 1].tolist()
    used = (lefts, lefts + 1, rows, rights, rights + 1, rows, rows, 6)
    for mine, theirs, length in zip(got, want, used, strict=True):
        assert torch.equal(mine[:length], theirs[:length])


class Passes(NamedTuple):
    """What the forward and the backward pass write."""

    rows: Tensor
    row_grads: Tensor
    grads: list[Tensor]


def run_passes(
    case: Case,
    batch: Batch,
    plan: list[Tensor],
    precision: str = "float32",
    row_grads: Tensor | None = None,
) -> Passes:
    words = batch_words(case, batch, plan, precision)
    dim = math.prod(case.q)
    lefts = min(case.lookups, math.prod(case.p[:2]))
    rank = case.ranks[0] if len(case.p) == 2 else case.ranks[1]
    left_values = torch.full((lefts, math.prod(case.q[:2]) * rank), 1e30)
    rows = torch.full((case.lookups, dim), 1e30)
    library().call("tt_rows", *words, left_values, rows)
    if row_grads is None:
        row_grads = torch.randn(case.lookups, dim, generator=torch.Generator().manual_seed(1))
    grads = [torch.zeros(core.shape) for core in batch.cores]
    library().call("tt_core_grads", *words, left_values, row_grads, *grads)
    return Passes(rows, row_grads, grads)


@every_case()
def test_passes_match_the_reference(case: Case) -> None:
    batch = make_batch(case)
    count = int(batch.count)
    made = run_passes(case, batch, plan_of(case, batch))
    double = [core.double() for core in batch.cores]
    assert_near(made.rows[:count], tt.rows(double, batch.distinct, case.p, case.q))
    grads = made.row_grads[:count].double()
    want = tt.core_grads(double, batch.distinct, grads, case.p, case.q)
    for mine, wanted in zip(made.grads, want, strict=True):
        assert_near(mine, wanted)


def magnitudes(case: Case, batch: Batch, row_grads: Tensor) -> list[Tensor]:
    """Return the sums of absolute products of rows and of the gradients of cores."""
    cores = [core.double().abs() for core in batch.cores]
    grads = row_grads.double().abs()
    rows = tt.rows(cores, batch.distinct, case.p, case.q)
    return [rows, *tt.core_grads(cores, batch.distinct, grads, case.p, case.q)]


def errors(case: Case, batch: Batch, made: Passes) -> list[float]:
    """Return the largest error of rows, and of the gradients of each core, in these magnitudes."""
    count, cores = int(batch.count), [core.double() for core in batch.cores]
    row_grads = made.row_grads[:count]
    exact = [
        tt.rows(cores, batch.distinct, case.p, case.q),
        *tt.core_grads(cores, batch.distinct, row_grads.double(), case.p, case.q),
    ]
    got = [made.rows[:count], *made.grads]
    found = []
    for mine, want, scale in zip(got, exact, magnitudes(case, batch, row_grads), strict=True):
        assert (mine[scale == 0] == 0).all()
        found.append(float(((mine - want).abs() / scale.clamp_min(1e-300)).max()))
    return found


@every_case()
def test_tensor_cores_are_as_exact_as_float32(case: Case) -> None:
    """Each pass is a chain of up to four products, each of which may err by 2^-21."""
    batch = make_batch(case)
    assert max(errors(case, batch, run_passes(case, batch, plan_of(case, batch)))) < 4 * 2.0**-21


@every_case()
@pytest.mark.parametrize(("precision", "bits"), [("tf32", 11), ("bf16", 8)])
def test_lower_precision_has_the_error_of_its_operands(
    case: Case, precision: str, bits: int
) -> None:
    """Two operands of each of up to four products in a chain are rounded."""
    batch = make_batch(case)
    found = errors(case, batch, run_passes(case, batch, plan_of(case, batch), precision))
    assert max(found) < 8 * 2.0**-bits
    if len(case.p) > 2 or case.ranks[0] % 4 == 0:  # else all products are in float32
        assert max(found) > 2.0 ** -(bits + 6)


@every_case()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cores_in_16_bits_have_the_bits_of_float_ones(case: Case, dtype: torch.dtype) -> None:
    batch = make_batch(case, dtype=dtype)
    plan, count = plan_of(case, batch), int(batch.count)
    mine = run_passes(case, batch, plan)
    wide = batch._replace(cores=[core.float() for core in batch.cores])
    want = run_passes(case, wide, plan)
    assert torch.equal(mine.rows[:count], want.rows[:count])
    for got, wanted in zip(mine.grads, want.grads, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("words", [1, 480, 481, 4000, 4001, 9000])
def test_arguments_of_any_size_reach_the_device(words: int) -> None:
    """In one launch of few words, of many, or in several; nothing is written beyond them."""
    values = torch.randint(-(2**62), 2**62, (words,), generator=torch.Generator().manual_seed(0))
    copy = torch.full((words + 1,), 7)
    library().call("upload", values, words, copy, 0, 0, 0, 0, 0)
    assert torch.equal(copy[:words], values)
    assert copy[words] == 7


@pytest.mark.parametrize("words", [0, 12, 9001])
@pytest.mark.parametrize("finite", [None, True, False])
def test_an_update_begins_with_zeros_and_its_step(words: int, finite: bool | None) -> None:
    """Without a finite gradient no step is counted, and the words of the step are 0."""
    values, copy = torch.arange(1, words + 1), torch.full((words,), -1)
    zeros, step, first = torch.ones(1004), torch.tensor(3.0, dtype=torch.float64), 2 * words // 3
    is_finite = 0 if finite is None else torch.tensor(finite)
    library().call("upload", values, words, copy, zeros, 1000, step, is_finite, first)
    expected = values.clone()
    if finite is False:
        expected[first:] = 0
    assert torch.equal(copy, expected)
    assert step == (3.0 if finite is False else 4.0)
    assert zeros.count_nonzero() == 4


def test_an_empty_batch_has_no_halves() -> None:
    case = Case((3, 4, 5), (2, 2, 2), (3, 3), 4)
    batch = make_batch(case)._replace(
        keys=torch.zeros(4, dtype=torch.int64), count=torch.zeros(1, dtype=torch.int32)
    )
    plan = plan_of(case, batch)
    assert plan[7].tolist() == [0] * 6
    words = batch_words(case, batch, plan)
    grads = [torch.zeros_like(core) for core in batch.cores]
    library().call("tt_core_grads", *words, torch.zeros(4, 12), torch.ones(4, 8), *grads)
    assert all((grad == 0).all() for grad in grads)


def test_halves_of_a_table_may_have_more_than_2_31_columns() -> None:
    outer_rows, columns = 2**19, 2**11  # inner rows 0 and 1 have 2^30 outer columns each
    grads, inner = torch.arange(float(columns)), torch.tensor([5.0, 7.0, 2.0])
    made = torch.empty(columns)
    library().call("outer_grads", 2 * outer_rows, outer_rows, columns, grads, inner, made)
    assert torch.equal(made, 2 * grads)


MIXED = [CASES[name] for name in ("two_cores_odd", "three_cores", "four_cores_odd", "dim_one")]
MIXED += [CASES["three_cores"], CASES["one_row"]]
# Values, rows and gradients of the second table begin where four neighbours are not aligned.
ODD_STRIDES = [CASES["two_cores_odd"], Case((5, 6, 7), (1, 2, 4), (4, 4), 60)]


@pytest.mark.parametrize("mixed", [MIXED, ODD_STRIDES], ids=["mixed", "odd strides"])
def test_a_batch_of_several_tables(mixed: list[Case]) -> None:
    """Keys, plan, rows and gradients of tables of different shapes, with the bits of each alone."""
    layout = layout_of([case.spec for case in mixed])
    batches = [make_batch(case, seed) for seed, case in enumerate(mixed)]
    tables, firsts = (
        torch.tensor(layout.tables),
        [row[TTTableColumn.FIRST_KEY] for row in layout.tables],
    )
    n = sum(case.lookups for case in mixed)
    count = sum(int(batch.count) for batch in batches)
    keys = torch.zeros(n, dtype=torch.int64)
    distinct = zip(batches, firsts, strict=True)
    keys[:count] = torch.cat([batch.keys[: int(batch.count)] + first for batch, first in distinct])
    sizes = (n, n + 1, n, n, n + 1, n, n, 3 * (len(mixed) + 1))
    plan = [torch.full((size,), 7, dtype=torch.int32) for size in sizes]
    ids, counts = (layout.left_ids, layout.right_ids), torch.tensor([count], dtype=torch.int32)
    library().call("tt_plan", tables, len(mixed), *ids, keys, counts, n, *plan)
    want = torch.ops.emblib.tt_plan(keys, counts, tables, *ids)
    rows, lefts, rights = want[7].view(3, -1)[:, -1].tolist()
    used = (lefts, lefts + 1, rows, rights, rights + 1, rows, rows, plan[7].numel())
    for mine, theirs, length in zip(plan, want, used, strict=True):
        assert torch.equal(mine[:length], theirs[:length])

    shapes = [word for case in mixed for word in shape_words(case)[1:]]
    cores = [core for batch in batches for core in batch.cores]
    products = MATMUL_PRECISION["float32"]
    words = (len(mixed), *shapes, n, products, DTYPES[torch.float32], *cores, *plan)
    widest = max(_left_size(case) for case in mixed)
    left_values = torch.full((min(n, layout.left_ids), widest), 1e30)
    out = torch.full((n, layout.dim), 1e30)
    library().call("tt_rows", *words, left_values, out)
    row_grads = torch.randn(n, layout.dim, generator=torch.Generator().manual_seed(1))
    grads = [torch.zeros_like(core) for core in cores]
    library().call("tt_core_grads", *words, left_values, row_grads, *grads)

    flat, _ = torch.ops.emblib.tt_rows(cores, want, *layout[:3], 0)
    first, grad = 0, iter(grads)
    for case, batch in zip(mixed, batches, strict=True):
        dim, last = math.prod(case.q), first + int(batch.count)
        double = [core.double() for core in batch.cores]
        exact = tt.rows(double, batch.distinct, case.p, case.q)
        assert_near(out[first:last, :dim], exact)
        assert_near(flat[first:last, :dim], exact)
        mine = row_grads[first:last, :dim].double()
        found = [next(grad) for _ in case.p]
        for got, wanted in zip(
            found, tt.core_grads(double, batch.distinct, mine, case.p, case.q), strict=True
        ):
            assert_near(got, wanted)
        own_grads = torch.zeros(case.lookups, dim)
        own_grads[: last - first] = row_grads[first:last, :dim]
        alone = run_passes(case, batch, plan_of(case, batch), row_grads=own_grads)
        assert torch.equal(alone.rows[: last - first], out[first:last, :dim])
        assert all(torch.equal(a, b) for a, b in zip(alone.grads, found, strict=True))
        first = last


def _left_size(case: Case) -> int:
    rank = case.ranks[0] if len(case.p) == 2 else case.ranks[1]
    return math.prod(case.q[: 1 if len(case.p) == 2 else 2]) * rank


@pytest.mark.parametrize("rows", [60, 3_000_000_019, 9_000_000_000_000])
def test_keys_of_permuted_ids(rows: int) -> None:
    spec = TTSpec(rows, 8, (1, 1), ids="permuted", seed=3)
    ids = torch.tensor([0, 1, 2, rows // 2, rows - 1, -1, rows])
    tables, keys = torch.tensor(layout_of([spec]).tables), torch.full((7,), 7)
    library().call("tt_keys", tables, 1, ids, 1, 7, torch.arange(8), 1, 7, None, keys)
    assert torch.equal(keys, tt.keys(ids, rows, spec.row_factors, spec.permutation))


@pytest.mark.parametrize("variable", [False, True])
def test_keys_of_several_features(variable: bool) -> None:
    """Feature by feature, also where features differ in batch size or have no lookups."""
    specs = [CASES["two_cores"].spec, CASES["four_cores"].spec, CASES["three_cores"].spec]
    ids = torch.tensor([0, 5, 170, 3, -1, 9, 10**6, 1, 2])
    counts = [2, 0, 3] if variable else [2, 2, 2]
    offsets = torch.tensor([0, 1, 4, 4, 6, 9] if variable else [0, 1, 4, 4, 4, 6, 9])
    features = torch.arange(3).repeat_interleave(torch.tensor(counts))
    bag_layout = torch.stack([features, torch.zeros_like(features)], 1) if variable else None
    tables = torch.tensor(layout_of(specs).tables)
    keys = torch.full((9,), 7)
    bags = (offsets, 1, offsets.numel() - 1, bag_layout)
    library().call("tt_keys", tables, 3, ids, 1, 9, *bags, keys)
    lengths = offsets.diff()
    of_lookup = features.repeat_interleave(lengths)
    for i, f in enumerate(of_lookup.tolist()):
        spec = specs[f]
        assert keys[i] == tt.keys(ids[i : i + 1], spec.rows, spec.row_factors)
    got = torch.ops.emblib.tt_keys(ids, offsets, bag_layout, tables)
    assert torch.equal(got, keys)
