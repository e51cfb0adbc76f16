"""Quantised tables: native kernels against `emblib.reference.quant`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from emblib.columns import FeatureColumn, IndexColumn, IndexKind
from emblib.ops.codes import BOUNDS_CHECK, POOLING
from emblib.ops.quant import (
    bits_of,
    has_scale,
    hash_entries,
    map_ids,
    quant_lookup,
    quant_lookup_checked_,
    quantize_rows_,
    row_bytes,
)
from emblib.reference import quant
from emblib.specs import Pooling
from tests.compat.peer import peer_module
from tests.quant_cases import (
    FORMATS,
    KINDS_OF_INDEX,
    MIXED,
    argument,
    error_bound,
    expected,
    index_batch,
    indexed,
    pack,
    tolerance,
)
from tests.simt.cases import CASES, VARIABLE_CASES, Case, Data

EACH_FORMAT = pytest.mark.parametrize("format", FORMATS, ids=lambda code: code.name)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALL = [case for case in (*CASES, *VARIABLE_CASES) if case.weight is torch.float32]


def quantized(weights: Tensor, format: int) -> Tensor:
    width = row_bytes(weights.size(1), format)
    packed = torch.full((weights.size(0), width), 77, dtype=torch.uint8)
    packed = packed.to(weights.device)
    quantize_rows_(packed, weights, format)
    return packed


def check_rows(weights: Tensor, packed: Tensor, format: int) -> None:
    """Check values and filling of packed rows against what the docs say."""
    dim = weights.size(1)
    rows = quant.dequantize_rows(packed, dim, format, torch.float64)
    assert bool(((rows - weights.double()).abs() <= error_bound(weights, format)).all())
    bits, header = bits_of(format), 4 * has_scale(format)
    width = header - (-dim * bits // 8)
    assert not packed[:, width:].any(), "rows are filled up with zeros"
    if dim * bits % 8:
        assert not (packed[:, width - 1] >> dim * bits % 8).any()


def looked_up(data: Data, formats: int | list[int], device: torch.device) -> Tensor:
    packed = pack(data, formats)
    tensors = (*packed, data.indices, data.repaired, data.bag_layout, data.sample_weights)
    moved = [None if tensor is None else tensor.to(device) for tensor in tensors]
    pooling = POOLING[data.case.pooling.value]
    rest = (pooling, argument(formats), data.columns, data.case.output)
    return quant_lookup(*moved, *rest).cpu()


@EACH_FORMAT
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (5, 3), (40, 8), (300, 33), (3, 1024)])
def test_rows_are_quantised(
    format: int, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights[1:3] *= 1e-3
    got = quantized(weights.to(device), format).cpu()
    if device.type == "cpu":
        assert torch.equal(got, quant.quantize_rows(weights, format))
    check_rows(weights, got, format)


@EACH_FORMAT
@pytest.mark.parametrize("exponent", range(-26, 15, 4))
@pytest.mark.parametrize("shift", [0.0, 1.0, -30.0])
def test_error_is_in_its_bound(format: int, exponent: int, shift: float) -> None:
    """Scale and offset are rounded to float16 before the numbers are computed from them."""
    generator = torch.Generator().manual_seed(exponent + 100)
    weights = (torch.randn(64, 40, generator=generator) * 2.0**exponent + shift).contiguous()
    packed = quantized(weights, format)
    check_rows(weights, packed, format)
    assert torch.equal(packed, quant.quantize_rows(weights, format))


@EACH_FORMAT
def test_extreme_rows(format: int, device: torch.device) -> None:
    largest = torch.finfo(torch.float16).max
    rows = torch.tensor(
        [
            [0.0] * 4,
            [-0.0, 0.0, -0.0, 0.0],
            [-2.5] * 4,
            [0.1] * 4,
            [largest] * 4,
            [-largest, largest, 0.0, 1.0],
            [1e-45, 0.0, 2e-45, 1e-40],
            [-1e-45, 3e-7, 0.0, 3e-8],
            [1000.3, 1000.4, 1000.31, 1000.39],
        ]
    )
    packed = quantized(rows.to(device), format).cpu()
    assert torch.equal(packed, quant.quantize_rows(rows, format))
    check_rows(rows, packed, format)
    if not has_scale(format):
        return
    if format <= 8:
        assert torch.equal(packed[0], packed[1])
        back = quant.dequantize_rows(packed, 4, format, torch.float64)
        exact = rows[[0, 2, 4]].double()
        assert torch.equal(back[[0, 2, 4]], exact), "rows of one value of float16 are exact"
    beyond = torch.tensor([[-torch.inf, torch.inf, 1e6, 0.0], [1e5, 1e6, 1e7, 1e38]])
    packed = quantized(beyond.to(device), format).cpu()
    back = quant.dequantize_rows(packed, 4, format, torch.float64)
    ends = torch.tensor([-largest, largest, largest]).double()
    assert_close(back[0, :3], ends, rtol=1e-3, atol=0)
    assert_close(back[1], torch.full((4,), largest).double(), rtol=5e-3, atol=0)


def test_integers_have_the_bits_of_fbgemm() -> None:
    """Rows after quantisation by FBGEMM on a CPU, whose scale and bias are behind the numbers."""
    peer_module("fbgemm_gpu")
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(4000, 40, generator=generator)
    rows *= 2.0 ** torch.randint(-20, 12, (4000, 1), generator=generator)
    rows[::3] += torch.randn(rows[::3].size(0), 1, generator=generator) * 10
    rows[::50] = rows[::50, :1]
    for weights in (rows, rows[:1000].half().float().clamp(-60000, 60000)):
        for bits in (8, 4, 2):
            fbgemm_rows = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(
                weights, bits
            )
            fbgemm_rows = torch.cat([fbgemm_rows[:, -4:], fbgemm_rows[:, :-4]], dim=1)
            emblib_rows = quantized(weights, bits)
            assert torch.equal(emblib_rows[:, : fbgemm_rows.size(1)], fbgemm_rows)


@EACH_FORMAT
@pytest.mark.parametrize("case", ALL, ids=str)
def test_lookup(case: Case, format: int, device: torch.device) -> None:
    data = Data(case)
    got = looked_up(data, format, device)
    want = expected(data, pack(data, format), format)
    assert got.dtype == case.output
    assert_close(got.double(), want, **tolerance(case))


@pytest.mark.parametrize("formats", MIXED, ids=str)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_lookup_of_several_formats(case: Case, formats: list[int], device: torch.device) -> None:
    data = Data(case)
    got = looked_up(data, formats, device)
    want = expected(data, pack(data, formats), argument(formats))
    assert got.dtype == case.output
    assert_close(got.double(), want, **tolerance(case))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_case(data: st.DataObject) -> None:
    tables = data.draw(st.integers(1, 3), "tables")
    pooling = data.draw(st.sampled_from(list(Pooling)), "pooling")
    dims = [data.draw(st.integers(1, 150), "dim") for _ in range(tables)]
    case = Case(
        "any",
        rows=tuple(data.draw(st.integers(1, 40), "rows") for _ in range(tables)),
        dims=(dims[0],) * tables if pooling is Pooling.NONE else tuple(dims),
        tables=tuple(data.draw(st.lists(st.integers(0, tables - 1), min_size=1, max_size=4))),
        batch=data.draw(st.integers(0, 6), "batch"),
        lengths=data.draw(st.sampled_from(["mixed", "few", "none", "one", "long"])),
        broken=data.draw(st.booleans(), "broken"),
        weighted=pooling is not Pooling.NONE and data.draw(st.booleans(), "weighted"),
        pooling=pooling,
        index=data.draw(st.sampled_from([torch.int32, torch.int64])),
        offset=data.draw(st.sampled_from([torch.int32, torch.int64])),
        output=data.draw(st.sampled_from(DTYPES)),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    if not case.batch:
        case = replace(case, lengths="none")
    problem, format = Data(case), data.draw(st.sampled_from(FORMATS))
    got = looked_up(problem, format, torch.device("cpu"))
    want = expected(problem, pack(problem, format), format)
    assert_close(got.double(), want, **tolerance(case))


@EACH_FORMAT
def test_same_bits_on_any_number_of_threads(format: int, thread_counts: list[int]) -> None:
    data = Data(Case("threads", batch=700, dims=(33, 64, 5), weighted=True))
    weights = torch.randn(3000, 20)
    results, rows = [], []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        results.append(looked_up(data, format, torch.device("cpu")))
        rows.append(quantized(weights, format))
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert all(torch.equal(rows[0], other) for other in rows[1:])


@pytest.mark.parametrize("check", ["warning", None])
def test_a_checked_lookup_is_its_parts(check: str | None, device: torch.device) -> None:
    """The output for a valid batch; for an invalid one the CPU returns none."""
    data = Data(Case("checked", dims=(5, 8, 3), weighted=True, broken=False))
    packed, features = (tensor.to(device) for tensor in pack(data, 8))
    assert data.sample_weights is not None
    weights, offsets = data.sample_weights.to(device), data.repaired.to(device)
    rest = (POOLING["sum"], 8, data.columns, torch.float32)
    violations = torch.zeros(2, dtype=torch.int64, device=device)
    checked = (None if check is None else BOUNDS_CHECK[check], violations)
    for first, invalid in ((0, 0), (10**6, 1)):
        indices = data.indices.clone()
        if first:
            indices[0] = first
        indices = indices.to(device)
        outputs = quant_lookup_checked_(
            packed, features, indices, offsets, weights, *rest, *checked
        )
        if invalid and check is not None and device.type == "cpu":
            assert outputs == []
            continue
        expected = quant_lookup(packed, features, indices, offsets, None, weights, *rest)
        assert torch.equal(outputs[0], expected)
    assert violations.tolist() == [int(device.type == "cuda" and check is not None), 0]


def test_opcheck(device: torch.device) -> None:
    data = Data(Case("opcheck", dims=(5, 8, 3), weighted=True, output=torch.float16))
    packed, features = (tensor.to(device) for tensor in pack(data, 4))
    batch = [t.to(device) for t in (data.indices, data.repaired)]
    assert data.sample_weights is not None
    rest = (POOLING["sum"], 4, data.columns, torch.float16)
    arguments = (packed, features, *batch, None, data.sample_weights.to(device), *rest)
    torch.library.opcheck(quant_lookup, arguments)
    violations = torch.zeros(2, dtype=torch.int64, device=device)
    checked = (*arguments[:4], *arguments[5:], BOUNDS_CHECK["warning"], violations)
    # It returns a list and mutates: compiled code calls its parts.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(quant_lookup_checked_, checked, test_utils=checks)
    weights = torch.randn(4, 3, device=device)
    target = torch.zeros(4, 8, dtype=torch.uint8, device=device)
    torch.library.opcheck(quantize_rows_, (target, weights, 4))


def test_columns_of_no_feature_are_zeros_where_features_overlap() -> None:
    """The dims of overlapping features may add up to the columns; memory is reused from 128 KiB."""
    batch, dim = 4096, 8
    packed = quantized(torch.ones(1, dim), 8).flatten()
    features = torch.zeros(2, len(FeatureColumn), dtype=torch.int64)
    features[:, FeatureColumn.ROWS], features[:, FeatureColumn.DIM] = 1, dim
    features[1, FeatureColumn.COLUMN] = dim
    indices = torch.zeros(2 * batch, dtype=torch.int64)
    rest = (torch.arange(2 * batch + 1), None, None, POOLING["sum"], 8, 2 * dim, torch.float32)
    assert quant_lookup(packed, features, indices, *rest).eq(1).all()
    features[1, FeatureColumn.COLUMN] = 0
    assert not quant_lookup(packed, features, indices, *rest)[:, dim:].any()


def test_wrong_input_is_refused() -> None:
    data = Data(Case("wrong"))
    packed, features = pack(data, 8)
    before = packed.clone()
    outside, unknown, odd, wide = (features.clone() for _ in range(4))
    outside[0, 2] = 10**6
    wide[0, 3] = 2**59  # its bits in float32 overflow to 0
    unknown[1, 4] = data.columns
    odd[0, 0] += 2
    good = (packed, features, data.indices, data.repaired, None, None)
    layout = (torch.zeros(data.repaired.numel() - 1, 2, dtype=torch.int64), None)
    rest = (POOLING["sum"], 8, data.columns, torch.float32)
    for arguments, message in (
        ((*good, POOLING["sum"], 5, *rest[2:]), "format must be the code of a RowFormat: .* got 5"),
        ((*good, POOLING["sum"], -(1 << 5), *rest[2:]), "names unknown formats, got -32"),
        ((*good, POOLING["sum"], -(1 << 8 | 1 << 4), *rest[2:]), "feature 0 has rows of format 0"),
        ((packed.float(), *good[1:], *rest), "packed must be uint8, got float32"),
        ((packed[::2], *good[1:], *rest), "packed must be contiguous"),
        ((packed[2:], *good[1:], *rest), "packed must begin at a multiple of 4 bytes"),
        ((packed, outside, *good[2:], *rest), "feature 0 lies outside"),
        ((packed, unknown, *good[2:], *rest), "feature 1 lies outside"),
        ((packed, wide, *good[2:], POOLING["sum"], 32, *rest[2:]), "feature 0 lies outside"),
        ((packed, odd, *good[2:], *rest), "feature 0 lies outside the packed rows, not at a word"),
        ((*good, POOLING["none"], 8, 9, torch.float32), "one dim for all features, got 8 and 9"),
        ((*good, 3, *rest[1:]), "pooling must be one of .*, got 3"),
        ((*good, *rest[:2], 2**31, torch.float32), "at most .* columns of an output with 2147"),
        ((*good[:4], *layout, *rest[:2], 2**31, torch.float32), "at most .* elements of an output"),
        ((*good, *rest[:3], torch.int64), "output_dtype must be float32"),
        ((*good[:5], torch.ones(3), *rest), "one entry per lookup"),
        (
            (*good[:5], torch.ones(data.indices.numel()), POOLING["none"], *rest[1:]),
            "need sum or mean",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            quant_lookup(*arguments)
    checked = (packed, outside, *good[2:4], None, *rest, None, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="quant_lookup_checked_: feature 0 lies outside"):
        quant_lookup_checked_(*checked)
    rows = torch.randn(4, 5)
    target = torch.zeros(4, 12, dtype=torch.uint8)
    for wrong, message in (
        ((target, rows.double(), 8), "weights must be float32, float16"),
        ((target, rows.t(), 8), r"contiguous \[R, D\]"),
        ((target, rows, 4), r"packed must be \[4, 8\], the rows of weights"),
        ((target[:3], rows, 8), r"packed must be \[4, 12\], the rows of weights"),
        ((target, torch.zeros(4, 0), 8), "D >= 1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            quantize_rows_(*wrong)
    assert torch.equal(packed, before)
    assert not target.any()


# The index before the rows.


@pytest.mark.parametrize("kinds", KINDS_OF_INDEX, ids=len)
@pytest.mark.parametrize("missing", [-1, 77])
def test_ids_are_mapped(kinds: list[IndexKind], missing: int, device: torch.device) -> None:
    index, tables, ids = indexed(kinds, missing)
    features, indices, offsets = index_batch(kinds, ids)
    arguments = [t.to(device) for t in (index, tables, features, indices, offsets)]
    rows = map_ids(*arguments, None).cpu()
    for f in range(len(kinds)):
        part = slice(int(offsets[3 * f]), int(offsets[3 * f + 3]))
        assert torch.equal(rows[part], quant.map_ids(index, tables[f], indices[part]))
    empty = [*arguments[:3], arguments[3][:0], arguments[4][:1], None]
    assert map_ids(*empty).numel() == 0
    lost = torch.tensor([-1, 5, -7], dtype=indices.dtype, device=device)  # ids of no bag
    behind = [*arguments[:3], torch.cat([lost, arguments[3]]), arguments[4] + 3, None]
    assert torch.equal(map_ids(*behind).cpu(), torch.cat([lost.long().cpu(), rows]))
    torch.library.opcheck(map_ids, (*arguments, None))


def test_an_index_outside_its_memory_is_refused() -> None:
    index, tables, ids = indexed([IndexKind.HASH])
    features, indices, offsets = index_batch([IndexKind.HASH], ids)
    for column, value in (("BEGIN", 1 << 40), ("ENTRIES", 1 << 40), ("HASH_BITS", 40), ("KIND", 5)):
        wrong = tables.clone()
        wrong[0, IndexColumn[column]] = value
        with pytest.raises(RuntimeError, match="feature 0 has an index outside the memory"):
            map_ids(index, wrong, features, indices, offsets, None)
    with pytest.raises(RuntimeError, match=r"tables must be a contiguous \[F, 6\] tensor"):
        map_ids(index, tables[:, :5], features, indices, offsets, None)


def test_hash_entries_do_not_depend_on_the_order_of_keys() -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (999,)).unique()
    table, bits = hash_entries(keys, torch.arange(keys.numel()))
    order = torch.randperm(keys.numel())
    again, _ = hash_entries(keys[order], order)
    assert torch.equal(table, again)
    assert table.size(0) >= 1 << bits >= 2 * keys.numel() - 1
