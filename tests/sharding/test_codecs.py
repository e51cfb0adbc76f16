"""Codecs keep their promises: bounds, sizes, what is not finite."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emblib.sharding.codecs import BF16, FP8, FP16, FP32, INT8, Codec

CODECS = [
    FP32(),
    FP16(),
    FP16(loss_scale=1024),
    FP16(loss_scale=3.0),
    BF16(),
    INT8(),
    INT8(row_dim=4),
    INT8(row_dim=32),
    FP8(),
    FP8(8, "e4m3"),
    FP8(32, "e5m2"),
]
SPLITS = [(), (0,), (0, 0, 0), (128,), (256, 128), (1, 0, 3), (5, 127, 129, 64)]
# Magnitudes of training, and those at the ends of what the codecs can hold.
LARGE = 2.0**126
SCALES = [1.0, 1e-3, 1e-7, 1e-20, 1e-41, 3e3, 1e30]


def _values(splits: tuple[int, ...], scale: float, seed: int = 0) -> Tensor:
    """Normal, with zeros, in rows of quite different sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(splits), generator=generator)
    values *= 10 ** torch.randint(-3, 2, values.shape, generator=generator)
    values[::7] = 0
    return values * scale


def _through(codec: Codec, values: Tensor, splits: tuple[int, ...]) -> Tensor:
    payload = codec.encode(values, splits)
    assert payload.dtype == codec.payload_dtype(values.dtype)
    assert payload.shape == (sum(codec.payload_splits(splits)),)
    assert payload.is_contiguous()
    assert payload.nbytes == codec.nbytes(splits, values.dtype)
    return codec.decode(payload, splits, torch.float32)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_within_the_bound(codec: Codec) -> None:
    for splits, scale in itertools.product(SPLITS, SCALES):
        values = _values(splits, scale)
        back = _through(codec, values, splits)
        change = (back.double() - values.double()).abs()
        change[back.isinf()] = float("inf")
        assert bool((change <= codec.bound(values, splits)).all()), (splits, scale)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(-LARGE, LARGE, width=32), max_size=70),
    cut=st.integers(0, 70),
)
def test_any_values(codec: Codec, values: list[float], cut: int) -> None:
    cut = min(cut, len(values))
    splits = (cut, len(values) - cut)
    given_values = torch.tensor(values, dtype=torch.float32)
    back = _through(codec, given_values, splits)
    change = (back.double() - given_values.double()).abs()
    bound = codec.bound(given_values, splits)
    assert bool(((change <= bound) | bound.isinf()).all())
    assert bool((back.isfinite() | bound.isinf()).all())


def test_the_bound_of_values_beyond_bfloat16() -> None:
    values = torch.tensor([3.38e38, 3.39e38, 3.4e38, torch.finfo(torch.float32).max])
    back = _through(BF16(), values, (4,))
    assert bool((BF16().bound(values).isinf() == back.isinf()).all())
    assert back.isinf().tolist() == [False, False, True, True]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_bound_is_not_loose(codec: Codec) -> None:
    """Some value comes within a factor of three of it: a bound of a million is not a promise."""
    values = torch.rand(4096, generator=torch.Generator().manual_seed(1)) + 1
    change = (_through(codec, values, (4096,)).double() - values.double()).abs()
    bound = codec.bound(values, (4096,))
    if codec.is_identity:
        assert not bound.any()
    else:
        assert float((change / bound).max()) > 1 / 3


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(codec: Codec, bad: float) -> None:
    values = torch.ones(70)
    values[40] = bad
    back = _through(codec, values, (70,))
    assert not back[40].isfinite()
    values[40] = 1.0
    assert bool(_through(codec, values, (70,)).isfinite().all())


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_splits_are_on_their_own(codec: Codec) -> None:
    """A payload's split decodes to what its values would alone: ranks see only their own."""
    splits = (5, 0, 130, 64)
    values = _values(splits, 1.0)
    payload = codec.encode(values, splits)
    whole = codec.decode(payload, splits, torch.float32)
    parts = payload.split(codec.payload_splits(splits))
    for part, mine, n in zip(parts, whole.split(list(splits)), splits, strict=True):
        assert torch.equal(codec.decode(part, (n,), torch.float32), mine)
    for mine, alone in zip(whole.split(list(splits)), values.split(list(splits)), strict=True):
        assert torch.equal(_through(codec, alone, (alone.numel(),)), mine)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(codec: Codec, dtype: torch.dtype) -> None:
    values = _values((64, 30), 1.0).to(dtype)
    back = codec.decode(codec.encode(values, (64, 30)), (64, 30), dtype)
    assert back.dtype == dtype
    rounded = values.abs().double() * torch.finfo(dtype).eps  # to the dtype of the result
    assert bool(
        ((back.double() - values.double()).abs() <= codec.bound(values, (64, 30)) + rounded).all()
    )


def test_a_loss_scale_keeps_small_gradients() -> None:
    tiny = torch.full((8,), 1e-9)
    assert not _through(FP16(), tiny, (8,)).any()
    assert torch.allclose(_through(FP16(loss_scale=2.0**20), tiny, (8,)), tiny, rtol=1e-3)


def test_sizes() -> None:
    assert FP32().nbytes((3, 4)) == 28
    assert FP32().nbytes((3, 4), torch.float16) == 14
    assert FP16().nbytes((3, 4)) == 14
    assert INT8(128).nbytes((256,)) == 2 * 132
    assert INT8(128).payload_splits((0, 1, 128, 129)) == [0, 132, 132, 264]


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="multiple of 4 above 0, got 6"):
        INT8(6)
    with pytest.raises(ValueError, match="must be one of 'e4m3', 'e5m2', got 'e3m4'"):
        FP8(8, "e3m4")
    with pytest.raises(ValueError, match="loss_scale must be finite and above 0, got 0"):
        FP16(0)
    assert FP8(8, "e4m3") == FP8(8)
    assert hash(INT8(8)) == hash(INT8(8))
