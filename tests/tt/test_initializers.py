"""Initial cores of TTEmbeddingBag: the rows they make have the moments they are meant to have."""

import math
from collections.abc import Iterator

import pytest
import torch

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
