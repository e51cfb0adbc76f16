"""Initial cores of TTEmbeddingBag: the rows they make have the moments they are meant to have."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emblib.specs import TTSpec
from emblib.storage import TensorTrain
from emblib.tables import TTEmbeddingBag
from emblib.tt.initializers import FBTT_INITIALIZERS, INITIALIZERS, find_initializer

SPEC = TTSpec(110, 8, (3, 4), (4, 5, 6), (2, 2, 2))


pytestmark = pytest.mark.usefixtures("seeded_on_device")


@pytest.mark.parametrize("init", INITIALIZERS)
@pytest.mark.parametrize("ranks", [(8,), (8, 16), (4, 8, 6)], ids=str)
def test_initial_rows_have_the_deviation_of_a_plain_table(
    init: str, ranks: tuple[int, ...]
) -> None:
    table = TTEmbeddingBag(TTSpec(30_000, 32, ranks), init=init)
    dense = table.to_dense()
    target = 1.0 / math.sqrt(3.0 * 30_000)
    assert float(dense.std()) == pytest.approx(target, rel=5 * deviation_spread(table))
    assert abs(float(dense.mean())) < 0.1 * target
    if init == "approx_uniform":
        assert kurtosis(dense) == pytest.approx(1.8, abs=0.15)
    assert dense.unique(dim=0).size(0) == 30_000


def deviation_spread(table: TTEmbeddingBag) -> float:
    """The relative standard error of the rows' deviation, of normal entries in small cores."""
    return math.sqrt(sum(2 / core.numel() for core in table.cores)) / 2


def effective_rank(rows: Tensor) -> float:
    """exp of the entropy of the squared singular values."""
    shares = torch.linalg.svdvals(rows.double()).square()
    shares = shares / shares.sum()
    return float((-(shares * shares.log()).sum()).exp())


@pytest.mark.parametrize("init", INITIALIZERS)
@pytest.mark.parametrize("rank", [8, 32])
def test_initial_rows_are_unlike_each_other(init: str, rank: int) -> None:
    """As those of a dense table: of full rank, and no nearer to each other than by chance."""
    dense = TTEmbeddingBag(TTSpec(30_000, 64, (rank, rank)), init=init).to_dense()
    assert effective_rank(dense) > 61
    some = torch.nn.functional.normalize(dense[torch.randperm(30_000)[:1000]], dim=1)
    cosines = (some @ some.T)[~torch.eye(1000, dtype=torch.bool)]
    assert float(cosines.abs().mean()) == pytest.approx(math.sqrt(2 / (math.pi * 64)), rel=0.1)


def big_table(init: str, rank: int) -> Tensor:
    spec = TTSpec(100_000, 64, (rank, rank), (40, 50, 50), (4, 4, 4))
    return TTEmbeddingBag(spec, init=init).to_dense()


def kurtosis(values: Tensor) -> float:
    return float(((values - values.mean()) / values.std()).pow(4).mean())


def mean_cosine(rows: Tensor) -> float:
    """Of two different rows."""
    units = torch.nn.functional.normalize(rows.double(), dim=1)
    count = len(units)
    return float((units.sum(0).square().sum() - count) / (count * (count - 1)))


def rank_by_products(rows: Tensor) -> float:
    """The effective rank, from the products of columns."""
    shares = torch.linalg.eigvalsh(rows.double().T @ rows.double()).clamp(min=1e-300)
    shares = shares / shares.sum()
    return float((-(shares * shares.log()).sum()).exp())


def documented() -> dict[str, list[str]]:
    text = (Path(__file__).resolve().parents[2] / "docs/tensor_trains.md").read_text()
    lines = re.findall(r"^\| `([\w:-]+)`[^|]*\|[^|]*\|((?: [\d.]+ \|){5})$", text, re.MULTILINE)
    return {init: re.findall(r"[\d.]+", row) for init, row in lines}


def half_a_digit(number: str) -> float:
    """How far a number may be from the rounded one."""
    return 0.5 * 10.0 ** -len(number.partition(".")[2])


@pytest.mark.parametrize("init", [*INITIALIZERS, *FBTT_INITIALIZERS])
def test_the_documentation_has_the_moments_of_initial_values(init: str) -> None:
    written = documented()[init]
    deviation, at_8, at_32, rank, cosine = map(float, written)
    rows = big_table(init, 32)
    target = 1 / math.sqrt(3 * len(rows))
    rounding = half_a_digit(written[0])
    assert abs(float(rows.std()) / target - deviation) < 0.1 * deviation + rounding
    assert kurtosis(rows) == pytest.approx(at_32, rel=0.2)
    assert rank_by_products(rows) == pytest.approx(rank, rel=0.05)
    # The fewer dimensions rows lie in, the more the mean cosine depends on the draws.
    assert mean_cosine(rows) == pytest.approx(cosine, abs=max(0.02, 0.3 / rank))
    assert kurtosis(big_table(init, 8)) == pytest.approx(at_8, rel=0.25)


def test_the_documentation_has_every_initialisation() -> None:
    assert set(documented()) == {*INITIALIZERS, *FBTT_INITIALIZERS}


def entries(init: str, ranks: tuple[int, ...]) -> tuple[TTSpec, list[Tensor]]:
    spec = TTSpec(8000, 16, ranks)
    return spec, [core.detach() for core in TTEmbeddingBag(spec, init=init).cores]


@pytest.mark.parametrize("ranks", [(8,), (8, 6), (4, 8, 6)], ids=str)
def test_unscaled_formulas_of_core_entries(ranks: tuple[int, ...]) -> None:
    num_cores = len(ranks) + 1
    inverse = 1 / math.sqrt(8000)
    spread = 1.0
    for rank in ranks:
        spread *= rank ** (-1 / (2 * num_cores))
    bounds = {
        "positive_uniform": math.sqrt(2 / 8016) ** (1 / num_cores) * spread,
        "unscaled_uniform": inverse,
    }
    for init, bound in bounds.items():
        for core in entries(init, ranks)[1]:
            count = core.numel()
            assert float(core.min()) >= 0
            # The largest of so many is below with probability e^-12.
            assert (1 - 12 / count) * bound < float(core.max()) <= bound * (1 + 1e-6)
            assert float(core.mean()) == pytest.approx(bound / 2, rel=5 / math.sqrt(3 * count))
    drawn = torch.cat([core.flatten() for core in entries("unscaled_normal", ranks)[1]])
    assert float(drawn.std()) == pytest.approx(inverse, rel=0.1)
    assert kurtosis(drawn) == pytest.approx(3, rel=0.2)
    scale = (inverse / math.sqrt(3)) ** (1 / 3)
    drawn = (
        torch.cat([core.flatten() for core in entries("unscaled_sampled_gaussian", ranks)[1]])
        / scale
    )
    assert 2 * (1 - 1e-6) <= float(drawn.abs().min()) < 2.1
    assert float(drawn.square().mean()) == pytest.approx(5.746, rel=0.1)


def test_saw_teeth_are_where_the_pattern_has_them() -> None:
    spec, (head, middle, last) = entries("saw_tooth", (8, 6))
    scale = 8000 ** (-1 / 6)
    p, q = spec.row_factors, spec.dim_factors
    level = 1 / math.sqrt(8)
    torch.testing.assert_close(head / scale, torch.full_like(head, level), rtol=0, atol=0.06)
    middle = (middle / scale).view(p[1], 8, q[1], 6).transpose(1, 2).reshape(-1, 8, 6)
    for of_row in middle:  # [8, 6]: in one even column a tooth and nearly zeros, else all one level
        quiet = [c for c in range(6) if int(((of_row[:, c] - level).abs() > 0.1).sum()) >= 7]
        assert len(quiet) == 1
        assert quiet[0] % 2 == 0
        assert int((of_row[:, quiet[0]].abs() > 0.005).sum()) <= 1
        tooth = float(of_row[:, quiet[0]].abs().max()) * level
        assert abs(15 * tooth - round(15 * tooth)) <= 0.7 / 4 + 1e-3
    teeth = (last / scale).view(p[2], 6, q[2])
    large = (teeth.abs() > 0.05).nonzero()
    assert (large[:, 1] % 2 == 1).all()
    assert len({(row, column) for row, _, column in large.tolist()}) == len(large)
    assert len(large) > 0.85 * p[2] * q[2]  # one of 29 teeth is at zero


def test_names_of_fbtt_are_refused_with_the_name_to_use() -> None:
    for bare, scaled, unscaled in (
        ("normal", "gaussian", "unscaled_normal"),
        ("naive-uniform", "uniform", "unscaled_uniform"),
        ("approx-uniform", "approx_uniform", "saw_tooth"),
        ("approx-normal", "sampled_gaussian", "unscaled_sampled_gaussian"),
    ):
        for make in (lambda: TTEmbeddingBag(SPEC, init=bare), lambda: TensorTrain((2,), init=bare)):  # noqa: B023
            with pytest.raises(ValueError, match=f"use '{scaled}' for rows.*or '{unscaled}'"):
                make()
        with pytest.raises(ValueError, match=f"'fbtt:{bare}' is now called '{unscaled}'"):
            TTEmbeddingBag(SPEC, init=f"fbtt:{bare}")
    with pytest.raises(ValueError, match=r"init must be one of gaussian, .*positive_uniform"):
        find_initializer("xavier")
    with pytest.raises(ValueError, match="needs 3 cores"):
        TTEmbeddingBag(TTSpec(100, 8, (4,)), init="saw_tooth")
    with pytest.raises(ValueError, match="second rank of at least 2"):
        TTEmbeddingBag(TTSpec(100, 8, (4, 1)), init="saw_tooth")


def test_approx_uniform_values_fill_the_interval_evenly() -> None:
    dense = TTEmbeddingBag(TTSpec(30_000, 64, (16, 16)), init="approx_uniform").to_dense()
    bound = 1 / math.sqrt(30_000)
    counts = dense.cpu().histc(20, -bound, bound)
    assert counts.sum() > 0.98 * dense.numel()
    assert float(counts.min()) > 0.85 * float(counts.max())
    rank_one = TTEmbeddingBag(TTSpec(3000, 16, (1, 1)), init="approx_uniform").to_dense()
    assert float(rank_one.std()) == pytest.approx(1 / math.sqrt(9000), rel=0.1)


def test_sampled_gaussian_entries_avoid_zero() -> None:
    table = TTEmbeddingBag(TTSpec(3000, 16, (8, 8)), init="sampled_gaussian")
    entries = torch.cat([core.detach().flatten() for core in table.cores]).abs()
    assert float(entries.min()) > 0.8 * float(entries.median()) > 0.0


def test_initial_values_follow_torchs_seed() -> None:
    for init in (*INITIALIZERS, *FBTT_INITIALIZERS):
        tables = []
        for _ in range(2):
            torch.manual_seed(11)
            tables.append(TTEmbeddingBag(SPEC, init=init))
        assert all(torch.equal(a, b) for a, b in zip(tables[0].cores, tables[1].cores, strict=True))
