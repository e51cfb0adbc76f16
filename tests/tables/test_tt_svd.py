"""Tensor trains of dense tables: exact where the ranks allow it, else no worse than theory says."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from emblib import optim
from emblib.reference import tt as reference
from emblib.specs import TTSpec
from emblib.tables import TTEmbeddingBag
from emblib.tables import tt_svd as module
from emblib.tables.tt_svd import Decomposition, decompose
from emblib.tt import shapes

SPECS = [
    TTSpec(120, 8, (3, 4), (4, 5, 6), (2, 2, 2)),
    TTSpec(110, 8, (3, 4), (4, 5, 6), (2, 2, 2)),
    TTSpec(90, 12, (5,), (9, 10), (3, 4)),
    TTSpec(200, 16, (3, 7, 4), (3, 4, 5, 4), (2, 2, 2, 2)),
]
# The second cut is a tall matrix, of full rank; the third is not.
TALL = TTSpec(60, 8, (6, 8, 1), (3, 5, 2, 2), (2, 2, 2, 1))


pytestmark = pytest.mark.usefixtures("seeded_on_device")


def expanded(made: Decomposition) -> Tensor:
    spec = made.spec
    cores = [core.double() for core in made.cores]
    return reference.to_dense(cores, spec.rows, spec.row_factors, spec.dim_factors)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_tensor_train_is_found_again(spec: TTSpec) -> None:
    """Rows that only the factors make are not in the table, and cost no rank where it is full."""
    weight = TTEmbeddingBag(spec).to_dense()
    if math.prod(spec.row_factors) == spec.rows:
        made = decompose(weight, spec)
        assert made.error < 1e-4
        assert distance(expanded(made), weight) == pytest.approx(made.error, abs=1e-5)
        assert made.hot_error is None
        assert decompose(weight, spec, error=1e-3).spec.ranks == spec.ranks
    most = shapes.max_ranks(spec.row_factors, spec.dim_factors)
    assert decompose(weight, spec, ranks=[9999] * len(most)).error < 1e-4


@pytest.mark.parametrize("spec", [*SPECS, TALL], ids=str)
def test_the_error_is_at_most_that_of_all_cuts(spec: TTSpec) -> None:
    weight = torch.randn(spec.rows, spec.dim)
    made = decompose(weight, spec)
    assert distance(expanded(made), weight) == pytest.approx(made.error, rel=1e-3)
    p, q = spec.row_factors, spec.dim_factors
    padded = torch.zeros(math.prod(p), spec.dim)
    padded[: spec.rows] = weight
    axes = padded.view(*p, *q)
    lost = []
    for k, rank in enumerate(spec.ranks, start=1):
        left = [*range(k), *range(len(p), len(p) + k)]
        right = [i for i in range(2 * len(p)) if i not in left]
        matrix = axes.permute(*left, *right).reshape(math.prod(p[:k]) * math.prod(q[:k]), -1)
        lost.append(float(torch.linalg.svdvals(matrix.double())[rank:].square().sum()))
    norm = float(weight.double().square().sum())
    assert max(lost) <= made.error**2 * norm * (1 + 1e-4)
    assert made.error**2 * norm <= sum(lost) * (1 + 1e-4)


@pytest.mark.parametrize("error", [0.7, 0.3, 0.05])
def test_ranks_follow_from_an_error(error: float) -> None:
    weight = torch.randn(500, 16) @ torch.diag(0.5 ** torch.arange(16.0))
    made = decompose(weight, error=error)
    assert made.error <= error
    assert decompose(weight, error=error / 3).spec.nbytes >= made.spec.nbytes
    assert made.spec.usable() is made.spec


def test_ranks_follow_from_bytes() -> None:
    weight = torch.randn(500, 16)
    for nbytes in (2_000, 8_000, 20_000):
        made = decompose(weight, nbytes=nbytes)
        assert sum(core.nbytes for core in made.cores) == made.spec.nbytes <= nbytes
        larger = TTSpec(500, 16, tuple(rank + 1 for rank in made.spec.ranks)).usable()
        assert larger.nbytes > nbytes or larger.ranks == made.spec.ranks
    with pytest.raises(ValueError, match="takes at least"):
        decompose(weight, nbytes=10)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_counted_rows_come_closer(spec: TTSpec) -> None:
    weight = torch.randn(spec.rows, spec.dim)
    counts = torch.zeros(spec.rows, dtype=torch.int64)
    counts[torch.randperm(spec.rows)[: spec.rows // 3]] = torch.randint(1, 50, (spec.rows // 3,))
    plain, fitted = decompose(weight, spec), decompose(weight, spec, counts=counts)

    def weighted(made: Decomposition) -> float:
        return float(((expanded(made) - weight).square().sum(1) * counts).sum())

    assert weighted(fitted) < 0.97 * weighted(plain)
    hottest = counts.argsort(descending=True)[: max(1, spec.rows // 100)]
    wanted = distance(expanded(fitted)[hottest], weight[hottest])
    assert fitted.hot_error == pytest.approx(wanted, rel=1e-3)
    assert decompose(weight, spec, counts=torch.zeros(spec.rows)).error == plain.error


def test_small_pieces_give_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, counts = torch.randn(110, 8), torch.arange(110)
    whole = decompose(weight, SPECS[1], counts=counts)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 700)
    pieces = decompose(weight, SPECS[1], counts=counts)
    assert pieces.error == pytest.approx(whole.error, rel=1e-4)
    torch.testing.assert_close(expanded(pieces), expanded(whole), rtol=1e-3, atol=1e-4)


def test_a_bag_of_a_trained_table(caplog: pytest.LogCaptureFixture) -> None:
    trained = torch.nn.EmbeddingBag(300, 8, mode="sum", dtype=torch.float64)
    with caplog.at_level(logging.INFO):
        bag = TTEmbeddingBag.from_dense(trained.weight, optim.Adagrad(0.1), ranks=(40, 40))
    assert "tensor train of ranks (16, 14)" in caplog.text or "relative error" in caplog.text
    indices, offsets = torch.tensor([3, 7, 299, 0]), torch.tensor([0, 2, 2, 4])
    want = trained(indices, offsets[:-1])
    torch.testing.assert_close(bag(indices, offsets).double(), want, rtol=1e-4, atol=1e-4)
    bag(indices, offsets).sum().backward()
    assert bag.step == 1
    torch.testing.assert_close(
        TTEmbeddingBag.from_dense(bag.to_dense(), spec=bag.spec).to_dense(),
        bag.to_dense(),
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_permuted_ids_keep_their_rows(spec: TTSpec) -> None:
    weight, counts = torch.randn(spec.rows, spec.dim), torch.arange(spec.rows)
    spec = replace(spec, ids="permuted", seed=2)
    made = decompose(weight, spec, counts=counts)
    rows = reference.permuted(torch.arange(spec.rows), spec.rows, spec.permutation)
    dense = expanded(made)[rows]
    assert distance(dense, weight) == pytest.approx(made.error, rel=1e-3)
    hottest = counts.argsort(descending=True)[: max(1, spec.rows // 100)]
    wanted = distance(dense[hottest], weight[hottest])
    assert made.hot_error == pytest.approx(wanted, rel=1e-3)
    bag = TTEmbeddingBag.from_dense(weight, spec=spec, counts=counts)
    torch.testing.assert_close(bag.to_dense().double(), dense, rtol=1e-4, atol=1e-5)


def test_zeros_have_no_error() -> None:
    made = decompose(torch.zeros(50, 8), ranks=(2, 2))
    assert made.error == 0.0
    assert not expanded(made).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say once how large"),
        ({"ranks": (2, 2), "error": 0.1}, "ranks, error"),
        ({"error": 1.5}, r"in \(0, 1\)"),
        ({"ranks": (2, 2), "counts": torch.ones(3)}, "counts must be 50 finite numbers"),
        ({"spec": TTSpec(51, 8, (2, 2))}, "must be 51 x 8"),
    ],
)
def test_wrong_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decompose(torch.ones(50, 8), **options)
    with pytest.raises(ValueError, match="floating-point matrix"):
        decompose(torch.ones(50, 8).long(), ranks=(2, 2))


def test_values_that_are_not_finite_are_refused() -> None:
    weight, counts = torch.randn(60, 8), torch.ones(60)
    with pytest.raises(ValueError, match=r"cores exceed the range of torch\.float16"):
        decompose(weight * 1e30, ranks=(3, 3), dtype=torch.float16)
    for value in (math.nan, math.inf):
        counts[2] = value
        with pytest.raises(ValueError, match="counts must be 60 finite numbers"):
            decompose(weight, ranks=(3, 3), counts=counts)
        weight[3, 2] = value
        with pytest.raises(ValueError, match="weight must be finite"):
            decompose(weight, error=0.1)


def test_ranks_are_lowered_to_those_of_use(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        spec = TTSpec(60, 8, (100, 3), (3, 4, 5), (2, 2, 2)).usable()
    assert spec.ranks == (6, 3)
    assert "are (6, 3) now" in caplog.text
    TTEmbeddingBag(spec)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spec": SPECS[0], "ranks": (2, 2, 2)}, "one number per cut between cores, 2, got"),
        ({"spec": SPECS[0], "ranks": ()}, "one number per cut between cores, 2, got"),
        ({"ranks": ()}, "one number per cut between cores, at least 1, got"),
        ({"ranks": (2, -1)}, "each of ranks must be >= 1, got -1"),
        ({"ranks": (0, 2)}, "each of ranks must be >= 1, got 0"),
        ({"ranks": (2, 2), "nbytes": 0}, "say once how large"),
    ],
)
def test_ranks_that_no_train_has_raise(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decompose(torch.randn(120, 8), **arguments)  # type: ignore[arg-type]
