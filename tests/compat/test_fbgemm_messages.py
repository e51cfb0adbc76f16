"""Messages in FP8, HFP8 and MX4: by their definitions, and bit-equal to FBGEMM's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.compat import fbgemm_comms as ours
from emblib.compat.fbgemm import SparseType
from emblib.compat.fbgemm_operators import messages
from tests.compat.peer import peer_module

HFP8 = [(4, 15, 0.9375), (5, 31, 0.875), (4, 7, 240.0), (5, 15, 57344.0)]


def values(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    drawn = torch.randn(shape, generator=generator) * scale
    drawn.view(-1)[::7] = 0
    drawn.view(-1)[3::11] *= -0.0
    return drawn


@pytest.mark.parametrize(("ebits", "bias", "largest"), HFP8)
def test_every_byte_survives(ebits: int, bias: int, largest: float) -> None:
    codes = torch.arange(256).byte().view(2, 128)
    found = messages.hfp8_to_float(codes, ebits, bias)
    exponents, fractions = 2 ** (ebits) - 1, 2 ** (7 - ebits)
    for code, value in zip(codes.flatten().tolist(), found.flatten().tolist(), strict=True):
        exponent, fraction = code // fractions & exponents, code % fractions / fractions
        size = (
            2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction
        )
        assert value == math.copysign(size, -1 if code > 127 else 1)
    again = messages.to_hfp8(found, ebits, bias, largest)
    assert torch.equal(again, torch.where(found.abs() <= largest, codes, again))
    assert messages.hfp8_to_float(again, ebits, bias).abs().max() == largest


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("dim", [1, 4, 30, 0])
def test_fp8_rows(forward: bool, dim: int) -> None:
    rows = values(6, dim, scale=100.0)
    found = messages.to_fp8_rows(rows, forward)
    assert found.shape == (6, dim + -dim % 4 + 8)
    decoded = messages.fp8_rows_to_float(found, forward)
    assert not decoded[:, dim:].any()
    if dim:
        largest = rows.abs().amax(1, keepdim=True)
        step = 2.0 ** (-4 if forward else -3)
        assert bool(((decoded[:, :dim] - rows).abs() <= largest * step).all())
    half = messages.fp8_rows_to_float(found, forward, output_dtype=1)
    assert torch.equal(half, decoded.half())


def test_mx4_groups() -> None:
    exact = torch.tensor([[0.0, 0.5, -1, 1.5, 2, -3, 4, 6], [0.0] * 8]) * 2.0**-20
    packed = messages.to_mx4(exact, 8)
    assert packed.shape == (2, 5)
    assert torch.equal(messages.mx4_to_float(packed, 8), exact)
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]])
    away = torch.tensor([[0.5, 1, 1.5, 2, 3, 4, 6, 6]])
    assert torch.equal(messages.mx4_to_float(messages.to_mx4(ties, 8), 8), away)
    assert messages.to_mx4(values(3, 10), 8).shape == (3, 10)
    largest = torch.full((1, 2), torch.finfo(torch.float32).max)
    assert messages.mx4_to_float(messages.to_mx4(largest, 2), 2).tolist() == [[6 * 2.0**125] * 2]


@pytest.mark.parametrize("group_size", [7, 0, -2])
def test_mx4_refuses_groups_that_do_not_fill_bytes(group_size: int) -> None:
    with pytest.raises(RuntimeError, match="group_size must be even and positive"):
        messages.to_mx4(values(3, 14), group_size)
    with pytest.raises(RuntimeError, match="group_size must be even and positive"):
        messages.mx4_to_float(values(3, 15).byte(), group_size)


@pytest.mark.parametrize(
    "convert",
    [messages.to_mx4, messages.mx4_to_float, lambda x: messages.to_hfp8(x, 4, 14, 1.5)],
    ids=["to_mx4", "mx4_to_float", "to_hfp8"],
)
def test_a_number_without_dimensions_has_no_rows(convert: Any) -> None:
    with pytest.raises(RuntimeError, match=r"must be rows \[..., D\], got \[\]"):
        convert(torch.tensor(1.5))


def test_mx4_refuses_an_unknown_rounding() -> None:
    with pytest.raises(ValueError, match="5 is not a valid RoundingMode"):
        messages.to_mx4(values(3, 14), 2, rounding=5)


@pytest.mark.parametrize("rows", [torch.zeros(2, 7, dtype=torch.uint8), torch.zeros(2, 12)])
def test_fp8_rows_are_bytes_with_a_scale(rows: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="input must be uint8 rows of at least 8 bytes"):
        messages.fp8_rows_to_float(rows, True)


def test_mx4_refuses_rows_that_are_not_whole_groups() -> None:
    packed = messages.to_mx4(values(34, 2), 2)
    with pytest.raises(RuntimeError, match="whole groups of 17 bytes"):
        messages.mx4_to_float(packed, 32)


@pytest.mark.parametrize(("ebits", "bias", "largest"), HFP8)
def test_hfp8_is_that_of_fbgemm(ebits: int, bias: int, largest: float) -> None:
    peer_module("fbgemm_gpu.sparse_ops")
    rows = values(200, 33) * torch.logspace(-12, 6, 200).unsqueeze(1)
    rows[1, :4] = torch.tensor([math.inf, -math.inf, math.nan, -0.0])
    theirs = torch.ops.fbgemm.FloatToHFP8Quantized(rows, ebits, bias, largest)
    assert torch.equal(messages.to_hfp8(rows, ebits, bias, largest), theirs)
    decoded = torch.ops.fbgemm.HFP8QuantizedToFloat(theirs, ebits, bias)
    assert torch.equal(messages.hfp8_to_float(theirs, ebits, bias), decoded)


@pytest.mark.parametrize("rounding", list(ours.RoundingMode))
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-3, 7.0, 1e20])
def test_mx4_is_that_of_fbgemm(rounding: ours.RoundingMode, scale: float) -> None:
    theirs = peer_module("fbgemm_gpu.quantize_utils")
    for shape in ((4, 64), (5, 40), (96,), (2, 3, 64), (0, 32)):
        drawn, group = values(*shape, scale=scale), 16
        torch.manual_seed(0)
        expected = theirs.fp32_to_mx4(drawn, group, rounding_mode=rounding)
        torch.manual_seed(0)
        found = ours.fp32_to_mx4(drawn, group, rounding_mode=rounding)
        assert torch.equal(found, expected)
        decoded = theirs.mx4_to_float(found, group)
        assert torch.equal(ours.mx4_to_float(found, group), decoded)


@pytest.mark.parametrize("precision", ["FP32", "FP16", "BF16", "INT8", "FP8", "MX4"])
def test_codecs_are_those_of_fbgemm(precision: str) -> None:
    comm = peer_module("fbgemm_gpu.quantize_comm")
    configs = peer_module("fbgemm_gpu.split_embedding_configs")
    kind, drawn = configs.SparseType[precision], values(8, 64, scale=1e3)
    drawn = drawn.flatten() if precision == "INT8" else drawn
    codecs = [comm.QuantizedCommCodec(kind), ours.QuantizedCommCodec(SparseType[precision])]
    contexts = [codec.create_context() for codec in codecs]
    encoded = [c.encode(drawn, ctx) for c, ctx in zip(codecs, contexts, strict=True)]
    assert torch.equal(*encoded)
    assert encoded[0].numel() == codecs[1].calc_quantized_size(drawn.numel(), contexts[1])
    decoded = [c.decode(x, ctx) for c, x, ctx in zip(codecs, encoded, contexts, strict=True)]
    if precision == "INT8":  # FBGEMM's compiler fuses the multiplication with the addition
        torch.testing.assert_close(*decoded, rtol=1e-6, atol=1e-4)
    else:
        assert torch.equal(*decoded)
    columns = values(3, 20)
    padded = [c.padded_size(columns, [7, 20], 1, x) for c, x in zip(codecs, contexts, strict=True)]
    assert padded[0] == padded[1]
    assert len({str(ctx.padded_dim_sum_per_rank) for ctx in contexts}) == 1


def test_fp8_rows_with_a_scale_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM's CPU build has no such messages: only sizes are compared."""
    codec = ours.QuantizedCommCodec(SparseType.FP8, row_dim=6)
    context, drawn = codec.create_context(), values(4, 12)
    encoded = codec.encode(drawn, context)
    assert encoded.numel() == codec.calc_quantized_size(48, context) == 8 * (8 + 8)
    assert (codec.decode(encoded, context) - drawn.flatten()).abs().max() < 0.2
    with pytest.raises(AssertionError, match="rows of 6 values, got 7"):
        codec.calc_quantized_size(7, context)
    assert codec.padded_size(values(2, 8), [8, 5], 0, context) == (8, 0)
    monkeypatch.setenv("TORCHREC_ENABLE_FP8_ROWWISE_PADDING", "1")
    assert codec.padded_size(values(2, 8), [8, 5], 0, context) == (12, 4)
    assert context.padded_dim_sum_per_rank == [12, 6]
    with pytest.raises(ValueError, match=r"my_rank must be in \[0, 2\), got 2"):
        codec.padded_size(values(2, 8), [8, 5], 2, context)


def test_formats_that_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="INT4 are not supported"):
        ours.QuantizedCommCodec(SparseType.INT4)
    with pytest.raises(NotImplementedError, match="ebits=3"):
        ours.fp32_to_mx4(values(32), ebits=3, mbits=0)
    with pytest.raises(ValueError, match="FP32 or BF16"):
        ours.mx4_to_float(values(34).byte(), output_dtype=SparseType.FP16)
