"""Initial cores of TTEmbeddingBag: the rows they make have the moments they are meant to have."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emblib.specs import TTSpec
from emblib.tables import TTEmbeddingBag
from emblib.tt.initializers import INITIALIZERS

SPEC = TTSpec(110, 8, (3, 4), (4, 5, 6), (2, 2, 2))


@pytest.fixture(autouse=True)
def _seeded_on_device(device: torch.device) -> Iterator[None]:
    torch.manual_seed(0)
    with device:
        yield


@pytest.mark.parametrize("init", INITIALIZERS)
@pytest.mark.parametrize("ranks", [(8,), (8, 16), (4, 8, 6)], ids=str)
def test_initial_rows_have_the_deviation_of_a_plain_table(
    init: str, ranks: tuple[int, ...]
) -> None:
    table = TTEmbeddingBag(TTSpec(30_000, 32, ranks), init=init)
    dense = table.to_dense()
    target = 1.0 / math.sqrt(3.0 * 30_000)
    assert float(dense.std()) == pytest.approx(target, rel=0.1)
    assert abs(float(dense.mean())) < 0.1 * target
    if init == "approx_uniform":
        kurtosis = float((dense / dense.std()).pow(4).mean())
        assert kurtosis == pytest.approx(1.8, abs=0.15)
    assert dense.unique(dim=0).size(0) == 30_000


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


def test_the_documentation_has_the_kurtosis_of_initial_values() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/tensor_trains.md").read_text()
    found = re.findall(r"\| `(\w+)`[^|]*\| ([\d.]+) \| ([\d.]+) \|", text)
    assert [init for init, *_ in found] == [
        "gaussian",
        "uniform",
        "sampled_gaussian",
        "approx_uniform",
    ]
    for init, *shown in found:
        for rank, number in zip((8, 32), shown, strict=True):
            dense = TTEmbeddingBag(TTSpec(30_000, 64, (rank, rank)), init=init).to_dense()
            kurtosis = float((dense / dense.std()).pow(4).mean())
            assert kurtosis == pytest.approx(float(number), rel=0.12)


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
    for init in INITIALIZERS:
        tables = []
        for _ in range(2):
            torch.manual_seed(11)
            tables.append(TTEmbeddingBag(SPEC, init=init))
        assert all(torch.equal(a, b) for a, b in zip(tables[0].cores, tables[1].cores, strict=True))
