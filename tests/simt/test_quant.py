"""Emulated CUDA kernels of quantised tables against the reference."""

import pytest
import torch
from torch.testing import assert_close

from emblib.columns import FeatureColumn, IndexKind
from emblib.ops.codes import POOLING
from emblib.ops.quant import row_bytes
from emblib.reference import quant
from tests.quant_cases import (
    FORMATS,
    KINDS_OF_INDEX,
    MIXED,
    argument,
    expected,
    index_batch,
    indexed,
    pack,
    tolerance,
)
from tests.simt import emulated_quant
from tests.simt.cases import CASES, VARIABLE_CASES, Case, Data

EACH_FORMAT = pytest.mark.parametrize("format", FORMATS, ids=lambda code: code.name)
ALL = [case for case in (*CASES, *VARIABLE_CASES) if case.weight is torch.float32]


@EACH_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (5, 3), (40, 64), (9, 33), (2, 1024)])
def test_quantize_rows(format: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = torch.full((shape[0] + 1, row_bytes(shape[1], format)), 77, dtype=torch.uint8)
    emulated_quant.quantize_rows_(packed[:-1], weights, format)
    assert torch.equal(packed[:-1], quant.quantize_rows(weights, format))
    assert bool((packed[-1] == 77).all()), "nothing is written behind the last row"


@pytest.mark.parametrize("formats", [*FORMATS, *MIXED], ids=str)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_lookup(case: Case, formats: int | list[int]) -> None:
    data = Data(case)
    packed, format = pack(data, formats), argument(formats)
    got = emulated_quant.quant_lookup(
        *packed,
        data.indices,
        data.repaired,
        data.bag_layout,
        data.sample_weights,
        POOLING[case.pooling.value],
        format,
        data.columns,
        case.output,
    )
    assert_close(got.double(), expected(data, packed, format), **tolerance(case))


@EACH_FORMAT
def test_row_numbers_beyond_32_bits(format: int) -> None:
    """A table whose features claim more rows than are read: the path of 64-bit row numbers."""
    rows, dim, length = 40, 20, 11
    generator = torch.Generator().manual_seed(3)
    packed = quant.quantize_rows(torch.randn(rows, dim, generator=generator), format)
    features = torch.zeros(1, len(FeatureColumn), dtype=torch.int64)
    features[0, FeatureColumn.ROWS], features[0, FeatureColumn.DIM] = rows, dim
    indices = torch.randint(0, rows, (6 * length,), generator=generator)
    offsets = torch.arange(0, indices.numel() + 1, length)
    rest = (None, None, POOLING["sum"], format, dim, torch.float32)
    found = emulated_quant.quant_lookup(packed.flatten(), features, indices, offsets, *rest)
    features[0, FeatureColumn.ROWS] = 1 << 33
    large = emulated_quant.quant_lookup(packed.flatten(), features, indices, offsets, *rest)
    assert torch.equal(found, large)
    summed = quant.dequantize_rows(packed, dim, format)[indices].view(6, length, dim).sum(1)
    assert_close(found, summed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kinds", KINDS_OF_INDEX, ids=len)
def test_ids_are_mapped(kinds: list[IndexKind]) -> None:
    index, tables, ids = indexed(kinds, 77)
    features, indices, offsets = index_batch(kinds, ids)
    rows = emulated_quant.map_ids(index, tables, features, indices, offsets)
    for f in range(len(kinds)):
        part = slice(int(offsets[3 * f]), int(offsets[3 * f + 3]))
        assert torch.equal(rows[part], quant.map_ids(index, tables[f], indices[part]))
    lost = torch.tensor([-1, 5, -7], dtype=indices.dtype)  # ids of no bag
    behind = torch.cat([lost, indices]), offsets + 3
    assert torch.equal(
        emulated_quant.map_ids(index, tables, features, *behind), torch.cat([lost.long(), rows])
    )
