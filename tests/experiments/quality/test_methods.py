"""Methods: their rows against a plain computation, their bytes, and that they learn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import emblib
from experiments.config.sweep import QUALITY_METHODS
from experiments.contenders.registry import Unsupported
from experiments.quality.methods import METHODS, Method, MethodTask

ROWS, DIM = (3000, 900), 16
SHARES = {"plain": 1.0, "bf16": 0.5}  # where it is not an eighth


_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


def hash_ids(ids: Tensor, number: int) -> Tensor:
    """Hash number `number` of ids as emblib hashes rows: the finaliser of SplitMix64."""
    first, second, third = _MULTIPLIERS
    z = ids + torch.tensor(first).mul(2 * number + 1)  # int64 wraps around
    z = (z ^ _shift_right(z, 30)) * second
    z = (z ^ _shift_right(z, 27)) * third
    return _shift_right(z ^ _shift_right(z, 31), 2)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def task(share: float, rate: float = 0.1) -> MethodTask:
    count = [torch.arange(rows).flip(0) for rows in ROWS]
    plain = [torch.randn(rows, DIM) for rows in ROWS]
    return MethodTask(ROWS, DIM, share, rate, count, lambda: plain)


def made(name: str, share: float = 0.125) -> Method:
    torch.manual_seed(0)
    return METHODS[name](task(SHARES.get(name, share)))


def some_ids(count: int = 64) -> torch.Tensor:
    return torch.stack([torch.randint(rows, (count,)) for rows in ROWS], 1)


def test_every_method_has_a_label() -> None:
    assert list(METHODS) == list(QUALITY_METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_rows_within_its_bytes(name: str) -> None:
    rows = made(name)
    ids = some_ids()
    out = rows(ids)
    assert out.shape == (64, 2, DIM)
    assert torch.isfinite(out).all()
    allowed = sum(ROWS) * DIM * 4 * SHARES.get(name, 0.125)
    spare = 2 * 2 * DIM * DIM * 4 if name == "projected" else 0
    assert rows.trained_bytes <= allowed + spare
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
        loss().backward()
    assert float(loss().detach()) < 0.92 * first  # two of 16 columns explain an eighth


def placed(rows: Method) -> dict[str, torch.Tensor]:
    """Return the parameters of a method's collection."""
    return {name: p.detach().clone() for name, p in rows.bags.state_dict().items()}


def test_rows_of_the_maps_of_ids() -> None:
    ids = some_ids()
    for name, functions in (("hashed", 1), ("hashed_twice", 2)):
        rows = made(name)
        for t in (0, 1):
            weight = placed(rows)[f"embedding_bags.t{t}.weight"]
            assert len(weight) == rows.task.permitted_rows(t)
            read = [hash_ids(ids[:, t], n) % len(weight) for n in range(functions)]
            torch.testing.assert_close(rows(ids)[:, t], sum(weight[r] for r in read))
    modulo = made("modulo")
    for t in (0, 1):
        weight = placed(modulo)[f"embedding_bags.t{t}.weight"]
        torch.testing.assert_close(modulo(ids)[:, t], weight[ids[:, t] % len(weight)])
    for name, join in (("qr_sum", torch.add), ("qr_product", lambda q, r: (1 + q) * r)):
        parts = made(name)
        for t in (0, 1):
            prefix = f"embedding_bags.t{t}."
            quotients, remainders = (placed(parts)[prefix + n] for n in ("quotients", "remainders"))
            m = len(remainders)
            expected = join(quotients[ids[:, t] // m], remainders[ids[:, t] % m])
            torch.testing.assert_close(parts(ids)[:, t], expected)


def test_projected_rows_are_short_ones_times_a_matrix() -> None:
    rows, ids = made("projected"), some_ids()
    for t in (0, 1):
        short, matrix = (placed(rows)[f"embedding_bags.t{t}.cores.{k}"] for k in (0, 1))
        assert short.shape == (ROWS[t], 2)
        assert matrix.shape == (1, 2 * DIM)
        expected = short[ids[:, t]] @ matrix.view(2, DIM)
        torch.testing.assert_close(rows(ids)[:, t], expected)


def test_skipped_ids_are_zeros() -> None:
    ids = torch.full((3, 2), -1)
    for name in ("plain", "hashed", "qr_product", "tt_permuted"):
        assert not made(name)(ids).any()


def test_frequent_ids_have_rows_of_their_own() -> None:
    rows = made("tt_hot")
    half = rows.task.with_share(0.5)
    hot = [half.permitted_rows(t) for t in (0, 1)]
    ids = torch.tensor([[0, 0], [hot[0] - 1, hot[1] - 1], [hot[0], hot[1]]])
    place = rows.hot_rows[ids + rows.starts]
    assert (place[:2] >= 0).all()
    assert (place[2] == -1).all()
    own, rest = rows.hot.weights(), rows.others.weights()
    plain = torch.stack([own[t][place[:2, t]] for t in (0, 1)], 1)
    torch.testing.assert_close(rows(ids)[:2], plain)
    trains = torch.stack([rest[t][ids[2:, t]] for t in (0, 1)], 1)
    torch.testing.assert_close(rows(ids)[2:], trains)


def test_a_train_starts_from_the_plain_tables() -> None:
    share = 0.5
    torch.manual_seed(0)
    base = [torch.randn(r, 3) @ torch.randn(3, DIM) for r in ROWS]
    given = MethodTask(ROWS, DIM, share, 0.1, task(1.0).counts, lambda: base)
    train = METHODS["tt_from_plain"](given)
    fresh = METHODS["tt_permuted"](given)
    for made_from, drawn, weight in zip(train.weights(), fresh.weights(), base, strict=True):
        error = (made_from - weight).norm() / weight.norm()
        assert error < (drawn - weight).norm() / weight.norm()
        assert error < 0.9


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("narrow", 0.03),
        ("qr_sum", 0.01),
        ("tt_permuted", 1e-5),
        ("bf16", 0.4),
        ("hashed", 1e-3),
        ("evicting", 1e-3),
        ("tt_cached", 0.01),
    ],
)
def test_a_share_that_a_method_cannot_have(name: str, share: float) -> None:
    with pytest.raises(Unsupported):
        METHODS[name](task(share))


@pytest.mark.parametrize("name", ["tt_hot", "hashed_hot", "tt_from_plain"])
def test_a_task_without_counts_is_unsupported(name: str) -> None:
    with pytest.raises(Unsupported, match="counts of ids"):
        METHODS[name](
            MethodTask(ROWS, DIM, 0.5, 0.1, read_trained_rows=task(1.0).read_trained_rows)
        )


def test_methods_with_trains_state_their_ranks() -> None:
    for name in METHODS:
        has_trains = name.startswith("tt_") or name == "projected"
        assert len(made(name).ranks) == (len(ROWS) if has_trains else 0) or name == "planned"


@pytest.mark.parametrize("name", ["evicting", "tt_cached"])
def test_an_index_counts_as_permitted_bytes(name: str) -> None:
    rows = METHODS[name](MethodTask((4000,), 16, 0.25, 0.1))
    assert 0.9 * 64_000 < rows.trained_bytes <= 64_000
    for module in rows.bags.modules():
        if isinstance(module, emblib.CachedTTEmbeddingBags):
            sizes = module.nbytes()
            assert 0 <= sizes["weights"] + sizes["cache"] - rows.trained_bytes < 512  # counters
