"""Emulated CUDA kernels of quantised tables against the reference."""

import pytest
import torch
from torch.testing import assert_close

from emblib.columns import FeatureColumn
from emblib.ops.codes import POOLING
from emblib.ops.quant import row_bytes
from emblib.reference import quant
from tests.quant_cases import expected, pack, tolerance
from tests.simt import emulated_quant
from tests.simt.cases import CASES, VARIABLE_CASES, Case, Data

BITS = pytest.mark.parametrize("bits", [8, 4])
ALL = [case for case in (*CASES, *VARIABLE_CASES) if case.weight is torch.float32]


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (5, 3), (40, 64), (9, 33), (2, 1024)])
def test_quantize_rows(bits: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = torch.full((shape[0] + 1, row_bytes(shape[1], bits)), 77, dtype=torch.uint8)
    emulated_quant.quantize_rows_(packed[:-1], weights, bits)
    assert torch.equal(packed[:-1], quant.quantize_rows(weights, bits))
    assert bool((packed[-1] == 77).all()), "nothing is written behind the last row"


@BITS
@pytest.mark.parametrize("case", ALL, ids=str)
def test_lookup(case: Case, bits: int) -> None:
    data = Data(case)
    packed = pack(data, bits)
    got = emulated_quant.quant_lookup(
        *packed,
        data.indices,
        data.repaired,
        data.bag_layout,
        data.sample_weights,
        POOLING[case.pooling.value],
        bits,
        data.columns,
        case.output,
    )
    assert_close(got.double(), expected(data, packed, bits), **tolerance(case))


@BITS
def test_row_numbers_beyond_32_bits(bits: int) -> None:
    """A table whose features claim more rows than are read: the path of 64-bit row numbers."""
    rows, dim, length = 40, 20, 11
    generator = torch.Generator().manual_seed(3)
    packed = quant.quantize_rows(torch.randn(rows, dim, generator=generator), bits)
    features = torch.zeros(1, len(FeatureColumn), dtype=torch.int64)
    features[0, FeatureColumn.ROWS], features[0, FeatureColumn.DIM] = rows, dim
    indices = torch.randint(0, rows, (6 * length,), generator=generator)
    offsets = torch.arange(0, indices.numel() + 1, length)
    rest = (None, None, POOLING["sum"], bits, dim, torch.float32)
    found = emulated_quant.quant_lookup(packed.flatten(), features, indices, offsets, *rest)
    features[0, FeatureColumn.ROWS] = 1 << 33
    large = emulated_quant.quant_lookup(packed.flatten(), features, indices, offsets, *rest)
    assert torch.equal(found, large)
    summed = quant.dequantize_rows(packed, dim, bits)[indices].view(6, length, dim).sum(1)
    assert_close(found, summed, rtol=1e-4, atol=1e-4)
