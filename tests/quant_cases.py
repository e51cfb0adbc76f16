"""Inputs for quantised tables: the awkward cases of plain ones, quantised."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import FeatureColumn, IndexKind, RowFormatCode
from emblib.ops.quant import bits_of, format_argument, has_scale, hash_entries, row_bytes
from emblib.reference import quant
from tests.simt.cases import Case, Data

FORMATS = [*RowFormatCode]
MIXED = ([8, 4], [2, 16, 9], [32, 17, 10, 8])


class Packed(NamedTuple):
    """The tables of a case as kernels take them; rows lie as close as words allow."""

    rows: Tensor
    features: Tensor


def pack(data: Data, formats: int | Sequence[int]) -> Packed:
    """The tables of `data`, one after the other, in one format or in those given in turn."""
    case, rows, begin, places = data.case, [], 0, []
    in_turn = [formats] if isinstance(formats, int) else formats
    codes = [in_turn[t % len(in_turn)] for t in range(len(case.rows))]
    weights = data.weights.float().split([r * d for r, d in zip(case.rows, case.dims, strict=True)])
    for flat, count, dim, code in zip(weights, case.rows, case.dims, codes, strict=True):
        packed = quant.quantize_rows(flat.view(count, dim), code)
        assert packed.size(1) == row_bytes(dim, code)
        places.append(begin)
        begin += packed.numel()
        rows.append(packed.flatten())
    features = data.features.clone()
    for f, table in enumerate(case.tables):
        features[f, 0] = places[table]
        if not isinstance(formats, int):
            features[f, FeatureColumn.TIER] = codes[table]
        assert rows_fit(features[f].tolist(), codes[table], begin)
    return Packed(torch.cat([torch.zeros(0, dtype=torch.uint8), *rows]), features)


def argument(formats: int | Sequence[int]) -> int:
    """The argument `format` of a lookup in tables of `pack`."""
    return formats if isinstance(formats, int) else format_argument([*formats, *formats])


def rows_fit(feature: list[int], format: int, total: int) -> bool:
    """Whether the rows of a feature end before the tables do."""
    return feature[0] + feature[2] * row_bytes(feature[3], format) <= total


def expected(data: Data, packed: Packed, format: int) -> Tensor:
    """The reference's answer in float64; `format` is the argument of the lookup."""
    weights = data.sample_weights
    return quant.lookup(
        quant.Packed(packed.rows, format),
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


def error_bound(weights: Tensor, format: int) -> Tensor:
    """The largest errors that the docs of `emblib.ops.quant` allow for values `[R, D]`."""
    values, half = weights.double(), 0.5 + 1e-4  # and rounding of float32
    if not has_scale(format):
        dtype = {16: torch.float16, 17: torch.bfloat16, 32: torch.float32}[format]
        return (weights.to(dtype).double() - values).abs()
    packed = quant.quantize_rows(weights, format)[:, :2].contiguous()
    scale = packed.view(torch.float16).double().abs()
    if format in (RowFormatCode.FP8_E4M3, RowFormatCode.FP8_E5M2):
        relative, least = (2**-4, 2**-10) if format == RowFormatCode.FP8_E4M3 else (2**-3, 2**-17)
        return torch.maximum(values.abs() * relative, scale * least) * (2 * half)
    low, high = values.aminmax(dim=1, keepdim=True)
    offset_error = 2**-11 * low.abs() + 2**-25
    levels = 2.0 ** bits_of(format) - 1
    reach = 2**-11 * (high - low + offset_error) + 2**-25 * levels
    bound = torch.maximum(scale * half, reach) + offset_error
    return bound.expand_as(values)


# The index before the rows.


def indexed(kinds: list[IndexKind], missing: int = -1) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return `index` and `tables` of features of these kinds, and the ids that each has."""
    generator = torch.Generator().manual_seed(len(kinds))
    parts, tables, ids, begin = [torch.zeros(0, dtype=torch.int64)], [], [], 0
    for number, kind in enumerate(kinds):
        keys = torch.randint(-(2**63), 2**63 - 1, (50 * number,), generator=generator)
        entries = bits = 0
        part = parts[0]
        if kind == IndexKind.HASH:
            keys = torch.cat([keys, torch.tensor([0, -1, 2**63 - 1, -(2**63)])]).unique()
            table, bits = hash_entries(keys, torch.arange(keys.numel()))
            entries, part = table.size(0), table.flatten()
        elif kind == IndexKind.ARRAY:
            keys = torch.arange(31)
            rows = torch.full((32,), -1, dtype=torch.int32)
            rows[:31:2] = torch.arange(16, dtype=torch.int32)
            entries, part = 31, rows.view(torch.int64)
        num_ids = keys.numel() if kind == IndexKind.ARRAY else -1
        tables.append([int(kind), begin, entries, bits, num_ids, missing])
        begin += part.numel()
        parts.append(part)
        ids.append(keys)
    return torch.cat(parts), torch.tensor(tables, dtype=torch.int64).view(-1, 6), ids


def index_batch(kinds: list[IndexKind], ids: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, indices and offsets of 3 bags per feature."""
    generator = torch.Generator().manual_seed(9)
    features = torch.zeros(len(kinds), len(FeatureColumn), dtype=torch.int64)
    lengths = torch.randint(0, 150, (len(kinds) * 3,), generator=generator)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    indices = torch.randint(-40, 90, (int(offsets[-1]),), generator=generator)
    for f, keys in enumerate(ids):
        part = indices[offsets[3 * f] : offsets[3 * f + 3]]
        chosen = torch.randint(0, max(len(keys), 1), part.shape, generator=generator)
        if keys.numel() and part.numel():
            part[::2] = keys[chosen[::2]]
    return features, indices, offsets


KINDS_OF_INDEX = (
    [IndexKind.HASH],
    [IndexKind.NONE, IndexKind.HASH, IndexKind.ARRAY, IndexKind.HASH, IndexKind.ARRAY],
    [IndexKind.HASH] * 7,
)
