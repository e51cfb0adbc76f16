"""Emulated tensor-train kernels against the reference and the CPU's plan."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from emblib.reference import tt
from tests.simt.library import Word, library


class Case(NamedTuple):
    """A table, how many ids of it are looked up, and below which id they lie (0: all rows)."""

    p: tuple[int, ...]
    q: tuple[int, ...]
    ranks: tuple[int, ...]
    lookups: int
    below: int = 0


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


def make_batch(case: Case, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    full = (1, *case.ranks, 1)
    cores = [
        torch.randn(p, full[k] * q * full[k + 1], generator=generator)
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
    return (len(case.p), *case.p, *case.q, 1, *case.ranks, 1)


def plan_of(case: Case, batch: Batch) -> list[Tensor]:
    n = case.lookups
    sizes = (n, n + 1, n, n, n + 1, n, n, 3)
    plan = [torch.full((size,), 7, dtype=torch.int32) for size in sizes]
    library().call("tt_plan", *shape_words(case), batch.keys, batch.count, n, *plan)
    return plan


def batch_words(case: Case, batch: Batch, plan: list[Tensor]) -> tuple[Word, ...]:
    return (*shape_words(case), case.lookups, *batch.cores, *plan)


def assert_near(got: Tensor, want: Tensor) -> None:
    scale = max(1e-3, float(want.abs().max()))
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("p", [(3, 4), (3, 4, 5), (3, 4, 5, 2)], ids=str)
def test_keys(p: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = math.prod(p) - 1
    ids = torch.tensor([*range(-2, math.prod(p) + 2), 2**31 - 1], dtype=dtype)
    keys = torch.full((ids.numel(),), 7)
    case = Case(p, (1,) * len(p), (1,) * (len(p) - 1), 0)
    is_int64 = dtype == torch.int64
    library().call("tt_keys", *shape_words(case), ids, is_int64, ids.numel(), rows, keys)
    assert torch.equal(keys, tt.keys(ids, rows, p))


@every_case()
def test_plan_is_that_of_the_cpu(case: Case) -> None:
    batch = make_batch(case)
    got = plan_of(case, batch)
    want = torch.ops.emblib.tt_plan(batch.keys, batch.count, case.p)
    rows, lefts, rights = want[7].tolist()
    used = (lefts, lefts + 1, rows, rights, rights + 1, rows, rows, 3)
    for mine, theirs, length in zip(got, want, used, strict=True):
        assert torch.equal(mine[:length], theirs[:length])


@every_case()
def test_passes_match_the_reference(case: Case) -> None:
    batch = make_batch(case)
    plan = plan_of(case, batch)
    words = batch_words(case, batch, plan)
    dim, count = math.prod(case.q), int(batch.count)
    lefts = min(case.lookups, math.prod(case.p[:2]))
    rank = case.ranks[0] if len(case.p) == 2 else case.ranks[1]
    left_values = torch.full((lefts, math.prod(case.q[:2]) * rank), 1e30)
    rows = torch.full((case.lookups, dim), 1e30)
    library().call("tt_rows", *words, left_values, rows)
    double = [core.double() for core in batch.cores]
    assert_near(rows[:count], tt.rows(double, batch.distinct, case.p, case.q))

    row_grads = torch.randn(case.lookups, dim, generator=torch.Generator().manual_seed(1))
    grads = [torch.zeros_like(core) for core in batch.cores]
    library().call("tt_core_grads", *words, left_values, row_grads, *grads)
    want = tt.core_grads(double, batch.distinct, row_grads[:count].double(), case.p, case.q)
    for mine, wanted in zip(grads, want, strict=True):
        assert_near(mine, wanted)


def test_an_empty_batch_has_no_halves() -> None:
    case = Case((3, 4, 5), (2, 2, 2), (3, 3), 4)
    batch = make_batch(case)._replace(
        keys=torch.zeros(4, dtype=torch.int64), count=torch.zeros(1, dtype=torch.int32)
    )
    plan = plan_of(case, batch)
    assert plan[7].tolist() == [0, 0, 0]
    words = batch_words(case, batch, plan)
    grads = [torch.zeros_like(core) for core in batch.cores]
    library().call("tt_core_grads", *words, torch.zeros(4, 12), torch.ones(4, 8), *grads)
    assert all((grad == 0).all() for grad in grads)
