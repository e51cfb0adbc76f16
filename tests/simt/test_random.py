"""Emulated `fill_uniform_` against the reference."""

import pytest
import torch
from torch.testing import assert_close

from emblib.reference import random
from tests.simt import emulated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 7, 1024, 5001])
def test_fill_uniform(dtype: torch.dtype, numel: int) -> None:
    out = torch.full((numel + 1,), 9.0, dtype=dtype)
    emulated.fill_uniform_(out[:numel], -2.0, 1.0, 0x7123456789ABCDEF)
    want = random.uniform(numel, -2.0, 1.0, 0x7123456789ABCDEF).to(dtype)
    tolerance = 1e-6 if dtype is torch.float32 else 0.01
    assert_close(out[:numel], want, rtol=tolerance, atol=1e-6)
    assert out[numel] == 9.0, "nothing is written beyond the end"
