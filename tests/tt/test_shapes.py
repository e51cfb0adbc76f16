"""How a table is cut into factors, and which ranks fit them."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from emblib.specs import TTSpec
from emblib.tt import shapes


@pytest.mark.parametrize("cores", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 7, 10, 1009, 2**20, 10_131_227, 11_000_000, 10**9])
def test_row_factors_cover_the_table(rows: int, cores: int) -> None:
    factors = shapes.row_factors(rows, cores)
    assert len(factors) == cores
    assert math.prod(factors) >= rows
    if rows > 10_000:
        assert math.prod(factors) <= 1.02 * rows
        assert max(factors) - min(factors) <= 2


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_dim_factors_are_exact_and_balanced(cores: int) -> None:
    for dim in range(1, 300):
        factors = shapes.dim_factors(dim, cores)
        assert math.prod(factors) == dim
        assert list(factors) == sorted(factors)
    expected = {2: (8, 16), 3: (4, 4, 8), 4: (2, 4, 4, 4)}
    assert shapes.dim_factors(128, cores) == expected[cores]
    assert shapes.dim_factors(13, cores) == (1,) * (cores - 1) + (13,)


@pytest.mark.parametrize("function", [shapes.row_factors, shapes.dim_factors])
def test_wrong_sizes_are_refused(function: Any) -> None:
    for sizes in ((0, 3), (-4, 3), (4, 0), (4, -1)):
        with pytest.raises(ValueError, match="must be >= 1, got"):
            function(*sizes)


def test_ranks_that_do_not_fit() -> None:
    shapes.check_ranks((8, 6), (4, 5, 3), (2, 2, 2))
    for ranks in ((9, 6), (8, 7), (0, 2), (-1, 2)):
        with pytest.raises(ValueError, match=r"must be in \[1, "):
            shapes.check_ranks(ranks, (4, 5, 3), (2, 2, 2))


def test_the_documentation_has_the_sizes_of_cores() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/tensor_trains.md").read_text()
    found = re.findall(r"\| ([\d,]+) × (\d+) \| ([\d,]+)× \| ([\d,]+)× \| ([\d,]+)× \|", text)
    assert len(found) == 2
    for row in found:
        rows, dim, *shown = (int(number.replace(",", "")) for number in row)
        specs = [TTSpec(rows, dim, (rank, rank)).usable() for rank in (8, 16, 32)]
        assert shown == [round(4 * rows * dim / spec.nbytes) for spec in specs]


@pytest.mark.parametrize(
    ("rows", "percent"), [(range(10_000, 20_000, 7), 5), (range(100_000, 200_000, 77), 2.2)]
)
def test_three_row_factors_pad_little(rows: range, percent: float) -> None:
    padding = max(math.prod(shapes.row_factors(n, 3)) / n - 1 for n in rows)
    assert 100 * padding <= percent
