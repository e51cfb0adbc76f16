"""Products on tensor cores and copies to shared memory, as the emulated machine has them."""

import math

import pytest
import torch
from torch import Tensor

from emblib.ops.codes import MATMUL_PRECISION
from emblib.reference import tt
from emblib.specs import MatmulPrecision
from tests.simt.library import library


def special_values() -> Tensor:
    """Return ties, halves of the last bit, large, small and non-finite values."""
    bits = torch.tensor([0, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x7FFF, 0x8000])
    bits = torch.cat([bits, bits + 0x8000])
    exponents = torch.tensor([0, 1, 100, 126, 127, 128, 200, 254, 255]) << 23
    found = (exponents[:, None] + bits).flatten()
    found = torch.cat([found, found | 0x80000000, torch.tensor([0x7FC00000, 0x7FFFFFFF])])
    return found.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("precision", [MatmulPrecision.TF32, MatmulPrecision.BF16])
def test_operands_are_rounded_as_the_reference_rounds(precision: MatmulPrecision) -> None:
    values = torch.cat([special_values(), torch.randn(1000, generator=seeded())])
    out = torch.empty(values.numel(), dtype=torch.int32)
    is_bf16 = precision is MatmulPrecision.BF16
    library().call("round", values, values.numel(), is_bf16, out)
    got, want = out.view(torch.float32), tt.matmul_operand(values, precision)
    assert torch.equal(got.isnan(), values.isnan())
    assert torch.equal(got.nan_to_num(7.0, math.inf), want.nan_to_num(7.0, math.inf))


def test_tf32_rounds_ties_away_from_zero() -> None:
    one, step = 1.0, 2.0**-10
    values = torch.tensor([one + step / 2, one + step * 1.5, -one - step / 2, one + step / 2.01])
    want = torch.tensor([one + step, one + 2 * step, -one - step, one])
    assert torch.equal(tt.matmul_operand(values, MatmulPrecision.TF32), want)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def product(a: Tensor, b: Tensor, precision: str) -> Tensor:
    out = torch.empty(16, 8)
    library().call("product", MATMUL_PRECISION[precision], a, b, a.size(1), out)
    return out.double()


def in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return the product, of which each multiplication and addition is rounded to float32."""
    total = torch.zeros(16, 8)
    for k in range(a.size(1)):
        total = total + a[:, k, None] * b[k]
    return total.double()


def error(got: Tensor, a: Tensor, b: Tensor) -> float:
    """Return the largest error, in the sum of the absolute products of its element."""
    exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    return float(((got - exact).abs() / scale).max())


@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize("depth", [1, 8, 30, 64, 1000])
def test_three_products_are_as_exact_as_float32(depth: int, is_positive: bool) -> None:
    """Also sums of a thousand positive products, where truncation would add up."""
    generator = seeded(depth)
    a, b = (torch.randn(*size, generator=generator) for size in ((16, depth), (depth, 8)))
    if is_positive:
        a, b = a.abs(), b.abs()
    mine, float32 = error(product(a, b, "float32"), a, b), error(in_float32(a, b), a, b)
    assert mine < 2.0**-21 + (float32 if depth > 1 else 0.0)
    assert depth < 8 or mine < 2 * float32 + 2.0**-22


@pytest.mark.parametrize(("precision", "bits"), [("tf32", 11), ("bf16", 8)])
@pytest.mark.parametrize("depth", [1, 8, 30, 64])
def test_one_product_has_the_error_of_its_operands(precision: str, bits: int, depth: int) -> None:
    generator = seeded(depth)
    a, b = (torch.randn(*size, generator=generator) for size in ((16, depth), (depth, 8)))
    got = product(a, b, precision)
    assert 2.0 ** -(bits + 5) < error(got, a, b) < 2 * 2.0**-bits
    rounded = [tt.matmul_operand(x, MatmulPrecision(precision)) for x in (a, b)]
    assert error(got, *rounded) < 2.0**-23 * (1 + depth / 8)


@pytest.mark.parametrize("precision", MATMUL_PRECISION)
def test_small_integers_are_exact(precision: str) -> None:
    generator = seeded()
    a = torch.randint(-9, 10, (16, 24), generator=generator).float()
    b = torch.randint(-9, 10, (24, 8), generator=generator).float()
    assert torch.equal(product(a, b, precision), a.double() @ b.double())


@pytest.mark.parametrize("precision", MATMUL_PRECISION)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(precision: str, value: float) -> None:
    """A scaler of gradients looks for it; other rows and columns do not have it."""
    for bits in (None, 0x7FFFFFFF):  # as GPUs write NaN
        a, b = torch.ones(16, 10), torch.ones(10, 8)
        a[3, 9] = value
        if bits is not None:
            a.view(torch.int32)[3, 9] = bits
        got = product(a, b, precision)
        assert not got[3].isfinite().any()
        assert (got[[r for r in range(16) if r != 3]] == 10).all()


@pytest.mark.parametrize("n", [4, 32, 60, 160])
def test_copies_arrive_when_they_are_waited_for(n: int) -> None:
    x = torch.randn(n, generator=seeded())
    out = torch.empty(32)
    library().call("pipeline", x, n, 1, out)
    padded = torch.cat([x, torch.zeros(-n % 32)]).view(-1, 32)
    torch.testing.assert_close(out, padded.sum(0))


def test_a_copy_that_is_not_waited_for_reads_as_nan() -> None:
    out = torch.empty(32)
    library().call("pipeline", torch.ones(64), 64, 0, out)
    assert out.isnan().all()


def test_a_misaligned_copy_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a copy of 16 bytes to shared memory is misaligned"):
        library().call("misaligned_copy", torch.ones(32))
