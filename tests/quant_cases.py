"""Inputs for quantised tables: the awkward cases of plain ones, quantised."""

from typing import NamedTuple

import torch
from torch import Tensor

from emblib.ops.quant import row_bytes
from emblib.reference import quant
from tests.simt.cases import Case, Data


class Packed(NamedTuple):
    """The tables of a case as kernels take them; rows lie as close as words allow."""

    rows: Tensor
    features: Tensor


def pack(data: Data, bits: int) -> Packed:
    """The tables of `data`, one after the other."""
    case, rows, begin, places = data.case, [], 0, []
    weights = data.weights.float().split([r * d for r, d in zip(case.rows, case.dims, strict=True)])
    for flat, count, dim in zip(weights, case.rows, case.dims, strict=True):
        packed = quant.quantize_rows(flat.view(count, dim), bits)
        assert packed.size(1) == row_bytes(dim, bits)
        places.append(begin)
        begin += packed.numel()
        rows.append(packed.flatten())
    features = data.features.clone()
    for f, table in enumerate(case.tables):
        features[f, 0] = places[table]
        assert rows_fit(features[f].tolist(), bits, begin)
    return Packed(torch.cat([torch.zeros(0, dtype=torch.uint8), *rows]), features)


def rows_fit(feature: list[int], bits: int, total: int) -> bool:
    """Whether the rows of a feature end before the tables do."""
    return feature[0] + feature[2] * row_bytes(feature[3], bits) <= total


def expected(data: Data, packed: Packed, bits: int) -> Tensor:
    """The reference's answer in float64."""
    weights = data.sample_weights
    return quant.lookup(
        quant.Packed(packed.rows, bits),
        packed.features,
        data.indices,
        data.offsets,
        None if weights is None else weights.double(),
        data.case.pooling,
        data.columns,
        data.extras,
        dtype=torch.float64,
    )


def tolerance(case: Case) -> dict[str, float]:
    """Room for rounding of the output, and of float32 sums in another order."""
    room = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[case.output]
    return {"rtol": room, "atol": room}


def scale_bound(weights: Tensor, bits: int) -> Tensor:
    """The largest scales `[R, 1]` that the docs of `emblib.ops.quant` allow for rows `[R, D]`."""
    low, high = weights.double().aminmax(dim=1, keepdim=True)
    spacing = (2**-10 * low.abs()).clamp(min=2**-24)
    return (1 + 2**-10) * (high - low + spacing) / (2**bits - 1) + 2**-24
