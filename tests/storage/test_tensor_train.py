"""Storage as tensor trains: factors that follow from the table, and rows that are projected."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, optim
from emblib.storage import TableSlice, TensorTrain

ROWS, DIM, WIDTH = 50, 8, 3


def collection(optimizer: Any, *, rows: int = ROWS, **changes: Any) -> EmbeddingBagCollection:
    kind = TensorTrain.projected(WIDTH)
    table = EmbeddingBagConfig(rows, DIM, "t", storage=kind, **changes)
    return EmbeddingBagCollection([table], optimizer=optimizer)


def parts(model: EmbeddingBagCollection) -> tuple[Tensor, Tensor]:
    """Return the short rows `[rows, width]` and the matrix `[width, dim]`."""
    short, matrix = (p.detach() for p in model.parameters())
    return short, matrix.view(WIDTH, DIM)


@pytest.mark.parametrize(
    ("fused", "make_torch"),
    [
        (optim.SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
        (optim.Adagrad(lr=0.2), lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-8)),
    ],
)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_projected_rows_train_as_short_rows_and_a_linear_layer(
    pooling: str, fused: Any, make_torch: Any
) -> None:
    model = collection(fused, pooling=pooling)
    short, matrix = (nn.Parameter(part.clone()) for part in parts(model))
    theirs = make_torch([short, matrix])
    for step in range(5):
        chance = torch.Generator().manual_seed(step)
        lengths = torch.randint(0, 4, (7,), generator=chance)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=chance)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        out = model(KeyedJaggedTensor(["t"], ids, lengths=lengths)).values()
        bags = nn.functional.embedding_bag(
            ids, short, offsets, mode=pooling, include_last_offset=True
        )
        expected = bags @ matrix
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        target = torch.linspace(-1, 1, out.numel()).view(out.shape)
        theirs.zero_grad()
        (out * target).sum().backward()
        (expected * target).sum().backward()
        theirs.step()
    for found, wanted in zip(parts(model), (short, matrix), strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)


def test_projected_rows_start_as_dense_ones_and_the_matrix_keeps_their_length() -> None:
    rows, dim, width = 20_000, 64, 16
    kind = TensorTrain.projected(width)
    table = EmbeddingBagConfig(rows, dim, "t", storage=kind)
    model = EmbeddingBagCollection([table], optimizer=optim.SGD(lr=0.1))
    short, matrix = (p.detach() for p in model.parameters())
    made = short @ matrix.view(width, dim)
    deviation = 1 / math.sqrt(3 * rows)
    assert float(made.std()) == pytest.approx(deviation, rel=0.05)
    assert float(short.std()) == pytest.approx(deviation, rel=0.02)
    assert float(matrix.std()) == pytest.approx(1 / math.sqrt(width), rel=0.1)


@pytest.mark.parametrize("optimizer", [optim.RowwiseAdagrad(lr=0.1), optim.Adam(lr=0.1)])
def test_the_planner_knows_the_bytes(optimizer: Any) -> None:
    model = collection(optimizer)
    (config,) = model.configs
    sizes = model.groups.nbytes()
    counted = config.storage.nbytes(TableSlice.whole(config), optimizer, "cpu").device
    assert counted == sizes["weights"] + sizes["optimizer_state"]
    assert sizes["weights"] == 4 * (ROWS * WIDTH + WIDTH * DIM)


def test_projected_rows_are_cut_anywhere_and_share_their_matrix() -> None:
    (config,) = collection(None).configs
    units = config.storage.cut_units(config)
    assert units == (1, DIM)
    piece = TableSlice(config, (7, 18), (0, DIM)).spec
    assert (piece.rows, piece.row_factors, piece.ranks) == (11, (11, 1), (WIDTH,))


def test_storage_goes_through_a_plan() -> None:
    kind = TensorTrain.projected(WIDTH)
    values = {f.name: getattr(kind, f.name) for f in dataclasses.fields(kind)}
    as_json = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    assert TensorTrain.from_plan(as_json) == kind


@pytest.mark.parametrize(
    ("rows", "factors", "expected"),
    [(100, (-1, 7), (15, 7)), (7, (-1, 7), (1, 7)), (100, (4, -1), (4, 25)), (9, (3, 3), (3, 3))],
)
def test_a_factor_follows_from_the_others(
    rows: int, factors: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    kind = TensorTrain((2,), factors, (2, -1))
    spec = kind.spec(rows, 8, "t")
    assert spec.row_factors == expected
    assert spec.dim_factors == (2, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorTrain((2, 2), (-1, -1, 4)), "one of row_factors and one of dim_factors"),
        (lambda: TensorTrain((2,), (), (-1, -1)), "but dim_factors is"),
        (lambda: TensorTrain((-1,)), "but ranks is"),
        (lambda: TensorTrain.projected(0), "columns must be"),
        (lambda: TensorTrain((2,), (-1, 0)), "each of row_factors"),
        (lambda: TensorTrain((2,), (-2, -1)), "each of row_factors"),
        (lambda: TensorTrain((0, 4)), "each rank must be >= 1, got 0"),
        (lambda: TensorTrain(()), "ranks must have 1 to 3 entries"),
        (lambda: TensorTrain((2, 2), (3, 3)), "row_factors must have one entry per core = 3"),
        (lambda: TensorTrain((2, 2), seed=-1), "seed must be >= 0"),
        (lambda: TensorTrain((2,), (), (3, -1)).spec(9, 8, "t"), "must multiply to dim 8"),
        (
            lambda: EmbeddingBagCollection(
                [EmbeddingBagConfig(9, 8, "t", storage=TensorTrain.projected(9))]
            ),
            r"must be in \[1, 8\]",
        ),
    ],
)
def test_wrong_factors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("ranks", ["a", (2.5,), 4])
def test_ranks_are_ints(ranks: Any) -> None:
    with pytest.raises(TypeError):
        TensorTrain(ranks)
