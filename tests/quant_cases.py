"""Inputs for quantised tables: the awkward cases of plain ones, quantised."""

from typing import NamedTuple

import torch
from torch import Tensor

from emblib.ops.quant import row_bytes
from emblib.reference import quant
from tests.simt.cases import Case, Data


class Packed(NamedTuple):
    """The tables of a case as kernels take them; rows lie as close as bytes allow."""

    values: Tensor
    scales: Tensor
    features: Tensor


def pack(data: Data, bits: int) -> Packed:
    """The tables of `data`, one after the other."""
    case, values, scales, begin, places = data.case, [], [], 0, []
    weights = data.weights.float().split([r * d for r, d in zip(case.rows, case.dims, strict=True)])
    for flat, rows, dim in zip(weights, case.rows, case.dims, strict=True):
        packed, scale = quant.quantize_rows(flat.view(rows, dim), bits)
        places.append(begin)
        begin += packed.numel()
        values.append(packed.flatten())
        scales.append(scale)
    features = data.features.clone()
    for f, table in enumerate(case.tables):
        features[f, 0] = places[table]
        assert rows_fit(features[f].tolist(), bits, begin)
    none = torch.zeros(0, dtype=torch.uint8)
    return Packed(torch.cat([none, *values]), torch.cat([torch.zeros(0, 2), *scales]), features)


def rows_fit(feature: list[int], bits: int, total: int) -> bool:
    """Whether the rows of a feature end before the tables do."""
    return feature[0] + feature[2] * row_bytes(feature[3], bits) <= total


def expected(data: Data, packed: Packed, bits: int) -> Tensor:
    """The reference's answer in float64."""
    weights = data.sample_weights
    return quant.lookup(
        quant.Packed(packed.values, packed.scales.double(), bits),
        packed.features,
        data.indices,
        data.offsets,
        None if weights is None else weights.double(),
        data.case.pooling,
        data.columns,
        data.extras,
    )


def tolerance(case: Case) -> dict[str, float]:
    """Room for rounding of the output, and of float32 sums in another order."""
    room = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[case.output]
    return {"rtol": room, "atol": room}
