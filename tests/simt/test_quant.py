"""Emulated CUDA kernels of quantised tables against the reference."""

import pytest
import torch
from torch.testing import assert_close

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
