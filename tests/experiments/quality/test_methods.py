"""Methods: their rows against a plain computation, their bytes, and that they learn."""

from __future__ import annotations

import math

import pytest
import torch

import emblib
from experiments.contenders.registry import Unsupported
from experiments.quality import LABELS, methods
from experiments.quality.methods import METHODS, Rows, Task

ROWS, DIM = (3000, 900), 16
SHARES = {"plain": 1.0, "bf16": 0.5}  # where it is not an eighth
# Capacities are multiples of 32, and there is an index; caches count ids as well.
WITH_AN_INDEX = {"evicting": 1.5, "tt_cached": 2.5, "tt_cached_drop": 2.5}


def task(share: float, rate: float = 0.1) -> Task:
    count = [torch.arange(rows).flip(0) for rows in ROWS]
    plain = [torch.randn(rows, DIM) for rows in ROWS]
    return Task(ROWS, DIM, share, rate, count, lambda: plain)


def made(name: str, share: float = 0.125) -> Rows:
    torch.manual_seed(0)
    return METHODS[name](task(SHARES.get(name, share)))


def some_ids(count: int = 64) -> torch.Tensor:
    return torch.stack([torch.randint(rows, (count,)) for rows in ROWS], 1)


def test_every_method_has_a_label() -> None:
    assert list(METHODS) == list(LABELS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_rows_within_its_bytes(name: str) -> None:
    rows = made(name)
    ids = some_ids()
    out = rows(ids)
    assert out.shape == (64, 2, DIM)
    assert torch.isfinite(out).all()
    allowed = sum(ROWS) * DIM * 4 * SHARES.get(name, 0.125)
    spare = 2 * 2 * DIM * DIM * 4 if name == "projected" else 0
    assert rows.trained_bytes <= WITH_AN_INDEX.get(name, 1.0) * allowed + spare
    assert rows.trained_bytes > 0.5 * allowed
    rows.eval()
    assert torch.equal(rows(ids), rows(ids))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns(name: str) -> None:
    rows, ids = made(name), some_ids(16)
    target = torch.randn(16, 2, DIM)

    def loss() -> torch.Tensor:
        return (rows(ids) - target).square().sum()

    loss().backward()  # keys of hash tables get their rows in the first training call
    first = float(loss().detach())
    for _ in range(60):
        for optimizer in rows.optimizers:
            optimizer.zero_grad()
        loss().backward()
        for optimizer in rows.optimizers:
            optimizer.step()
    assert float(loss().detach()) < 0.92 * first  # two of 16 columns explain an eighth


def weights(bags: emblib.TableBatchedEmbeddingBags) -> list[torch.Tensor]:
    return [weight.detach() for weight in bags.table_weights()]


def test_rows_of_the_maps_of_ids() -> None:
    ids = some_ids()
    hashed = made("hashed_twice")
    places = [[int(hashed.places(ids, n)[b, t]) for n in (0, 1)] for t in (0, 1) for b in (5,)]
    for t, pair in enumerate(places):
        assert all(0 <= place < hashed.task.fewer[t] for place in pair)
        expected = weights(hashed.bags)[t][pair].sum(0)
        torch.testing.assert_close(hashed(ids)[5, t], expected)
    for name, join in (("qr_sum", torch.add), ("qr_product", lambda q, r: (1 + q) * r)):
        parts = made(name)
        for t in (0, 1):
            m = int(parts.divisors[t])
            quotient = weights(parts.quotients)[t][ids[:, t] // m]
            remainder = weights(parts.remainders)[t][ids[:, t] % m]
            torch.testing.assert_close(parts(ids)[:, t], join(quotient, remainder))


def test_hashes_spread_and_differ_by_number() -> None:
    ids = torch.arange(100_000)
    for number in (0, 1, 31):
        hashes = methods.mixed(ids, number)
        assert int(hashes.min()) >= 0
        assert len(hashes.unique()) == len(ids)
        counts = torch.bincount(hashes % 1000, minlength=1000).double()
        # Chi-square of 1000 bins: mean 999, deviation sqrt(2 * 999).
        statistic = float(((counts - 100) ** 2 / 100).sum())
        assert abs(statistic - 999) < 6 * math.sqrt(2 * 999)
    assert not torch.equal(methods.mixed(ids, 0), methods.mixed(ids, 1))


def test_frequent_ids_have_rows_of_their_own() -> None:
    rows = made("tt_hot")
    hot = rows.task.scaled(0.5).fewer
    ids = torch.tensor([[0, 0], [hot[0] - 1, hot[1] - 1], [hot[0], hot[1]]])
    place = rows.places[ids + rows.starts]
    assert (place[:2] >= 0).all()
    assert (place[2] == -1).all()
    plain = torch.stack([weights(rows.bags)[t][place[:2, t]] for t in (0, 1)], 1)
    torch.testing.assert_close(rows(ids)[:2], plain)
    trains = torch.stack([rows.others.bags.to_dense(t)[ids[2:, t]] for t in (0, 1)], 1)
    torch.testing.assert_close(rows(ids)[2:], trains)


def test_a_train_starts_from_the_plain_tables() -> None:
    share = 0.5
    torch.manual_seed(0)
    base = [torch.randn(r, 3) @ torch.randn(3, DIM) for r in ROWS]
    given = Task(ROWS, DIM, share, 0.1, task(1.0).counts, lambda: base)
    train = METHODS["tt_from_plain"](given)
    fresh = METHODS["tt_permuted"](given)
    for t, weight in enumerate(base):
        error = (train.bags.to_dense(t) - weight).norm() / weight.norm()
        assert error < (fresh.bags.to_dense(t) - weight).norm() / weight.norm()
        assert error < 0.9


@pytest.mark.parametrize(
    ("name", "share"),
    [("narrow", 0.03), ("qr_sum", 0.01), ("tt_permuted", 1e-5), ("dhe", 1e-5), ("bf16", 0.4)],
)
def test_a_share_that_a_method_cannot_have(name: str, share: float) -> None:
    with pytest.raises(Unsupported):
        METHODS[name](task(share))
