"""Quantised tables: native kernels against `emblib.reference.quant`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from emblib.ops.codes import BOUNDS_CHECK, POOLING
from emblib.ops.quant import (
    quant_lookup,
    quant_lookup_checked_,
    quantize_rows_,
    row_bytes,
)
from emblib.reference import quant
from emblib.specs import Pooling
from tests.quant_cases import expected, pack, scale_bound, tolerance
from tests.simt.cases import CASES, VARIABLE_CASES, Case, Data

BITS = pytest.mark.parametrize("bits", [8, 4])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALL = [case for case in (*CASES, *VARIABLE_CASES) if case.weight is torch.float32]


def quantized(weights: Tensor, bits: int) -> Tensor:
    packed = torch.full((weights.size(0), row_bytes(weights.size(1), bits)), 77, dtype=torch.uint8)
    packed = packed.to(weights.device)
    quantize_rows_(packed, weights, bits)
    return packed


def scales(packed: Tensor) -> Tensor:
    """Scale and offset `[R, 2]` as float64."""
    return packed[:, :4].contiguous().view(torch.float16).double()


def check_rows(weights: Tensor, packed: Tensor, bits: int) -> None:
    """Check values, scales and filling of packed rows against what the docs say."""
    want, dim = weights.double(), weights.size(1)
    scale, offset = scales(packed).split(1, dim=1)
    assert bool((scale <= scale_bound(weights, bits)).all())
    assert bool((offset <= want.amin(1, keepdim=True)).all())
    rows = quant.dequantize_rows(packed, dim, bits, torch.float64)
    assert bool(((rows - want).abs() <= scale * (0.5 + 1e-4)).all())
    width = -(-dim * bits // 8)
    assert not packed[:, 4 + width :].any(), "rows are filled up with zeros"
    if dim * bits % 8:
        assert not (packed[:, 3 + width] >> 4).any()


def looked_up(data: Data, bits: int, device: torch.device) -> Tensor:
    packed = pack(data, bits)
    tensors = (*packed, data.indices, data.repaired, data.bag_layout, data.sample_weights)
    moved = [None if tensor is None else tensor.to(device) for tensor in tensors]
    rest = (POOLING[data.case.pooling.value], bits, data.columns, data.case.output)
    return quant_lookup(*moved, *rest).cpu()


@BITS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (5, 3), (40, 8), (300, 33), (3, 1024)])
def test_rows_are_quantised(
    bits: int, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights[1:3] *= 1e-3
    got = quantized(weights.to(device), bits).cpu()
    if device.type == "cpu":
        assert torch.equal(got, quant.quantize_rows(weights, bits))
    check_rows(weights, got, bits)


@BITS
@pytest.mark.parametrize("exponent", range(-26, 15, 4))
@pytest.mark.parametrize("shift", [0.0, 1.0, -30.0])
def test_error_is_half_of_the_rounded_scale(bits: int, exponent: int, shift: float) -> None:
    """Scale and offset are rounded to float16 before the numbers are computed from them."""
    generator = torch.Generator().manual_seed(exponent + 100)
    weights = (torch.randn(64, 40, generator=generator) * 2.0**exponent + shift).contiguous()
    packed = quantized(weights, bits)
    check_rows(weights, packed, bits)
    assert torch.equal(packed, quant.quantize_rows(weights, bits))


@BITS
def test_extreme_rows(bits: int, device: torch.device) -> None:
    largest = torch.finfo(torch.float16).max
    rows = torch.tensor(
        [
            [0.0] * 4,
            [-0.0, 0.0, -0.0, 0.0],
            [-2.5] * 4,
            [largest] * 4,
            [-largest, largest, 0.0, 1.0],
            [1e-45, 0.0, 2e-45, 1e-40],
            [-1e-45, 3e-7, 0.0, 3e-8],
        ]
    )
    packed = quantized(rows.to(device), bits).cpu()
    check_rows(rows, packed, bits)
    back = quant.dequantize_rows(packed, 4, bits, torch.float64)
    assert torch.equal(back[:4], rows[:4].double()), "rows of one value of float16 are exact"
    assert torch.equal(packed[0], packed[1])
    beyond = torch.tensor([[-torch.inf, torch.inf, 1e6, 0.0], [1e5, 1e6, 1e7, 1e38]])
    packed = quantized(beyond.to(device), bits).cpu()
    assert bool(torch.isfinite(scales(packed)).all())
    back = quant.dequantize_rows(packed, 4, bits, torch.float64)
    assert_close(
        back[0, :3], torch.tensor([-largest, largest, largest]).double(), rtol=1e-3, atol=0
    )
    assert torch.equal(back[1], torch.full((4,), largest).double())


@BITS
@pytest.mark.parametrize("case", ALL, ids=str)
def test_lookup(case: Case, bits: int, device: torch.device) -> None:
    data = Data(case)
    got = looked_up(data, bits, device)
    want = expected(data, pack(data, bits), bits)
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
    problem, bits = Data(case), data.draw(st.sampled_from([4, 8]))
    got = looked_up(problem, bits, torch.device("cpu"))
    want = expected(problem, pack(problem, bits), bits)
    assert_close(got.double(), want, **tolerance(case))


@BITS
def test_same_bits_on_any_number_of_threads(bits: int, thread_counts: list[int]) -> None:
    data = Data(Case("threads", batch=700, dims=(33, 64, 5), weighted=True))
    weights = torch.randn(3000, 20)
    results, rows = [], []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        results.append(looked_up(data, bits, torch.device("cpu")))
        rows.append(quantized(weights, bits))
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


def test_wrong_input_is_refused() -> None:
    data = Data(Case("wrong"))
    packed, features = pack(data, 8)
    before = packed.clone()
    outside, unknown, odd = features.clone(), features.clone(), features.clone()
    outside[0, 2] = 10**6
    unknown[1, 4] = data.columns
    odd[0, 0] += 2
    good = (packed, features, data.indices, data.repaired, None, None)
    rest = (POOLING["sum"], 8, data.columns, torch.float32)
    for arguments, message in (
        ((*good, POOLING["sum"], 5, *rest[2:]), "bits must be 8 or 4, got 5"),
        ((packed.float(), *good[1:], *rest), "packed must be uint8, got float32"),
        ((packed[::2], *good[1:], *rest), "packed must be contiguous"),
        ((packed[2:], *good[1:], *rest), "packed must begin at a multiple of 4 bytes"),
        ((packed, outside, *good[2:], *rest), "feature 0 lies outside"),
        ((packed, unknown, *good[2:], *rest), "feature 1 lies outside"),
        ((packed, odd, *good[2:], *rest), "feature 0 lies outside the packed rows, not at a word"),
        ((*good, POOLING["none"], 8, 9, torch.float32), "one dim for all features, got 8 and 9"),
        ((*good, 3, *rest[1:]), "pooling must be one of .*, got 3"),
        ((*good, *rest[:3], torch.int64), "output_dtype must be float32"),
        ((*good[:5], torch.ones(3), *rest), "one entry a lookup"),
        (
            (*good[:5], torch.ones(data.indices.numel()), POOLING["none"], *rest[1:]),
            "need sum or mean",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            quant_lookup(*arguments)
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
