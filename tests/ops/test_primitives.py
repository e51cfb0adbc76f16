"""Grouping by key against `torch.sort` and `unique_consecutive`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emblib.ops.primitives import group, group_inverse


def check(keys: Tensor, num_keys: int) -> None:
    unique, segments, permutation, count = group(keys, num_keys)
    wide = keys.long()  # an int32 tensor cannot be compared with a larger number
    valid = (wide >= 0) & (wide < num_keys)
    clamped = torch.where(valid, wide, num_keys)
    want_order = clamped.argsort(stable=True)
    assert torch.equal(permutation.long(), want_order)
    want, sizes = clamped[want_order][: int(valid.sum())].unique_consecutive(return_counts=True)
    groups = int(count)
    assert groups == want.numel()
    assert torch.equal(unique[:groups].long(), want)
    assert unique.dtype == keys.dtype
    assert not unique[groups:].any()
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    assert torch.equal(segments[: groups + 1].long(), ends)
    assert bool((segments[groups:] == segments[groups]).all())
    inverse = group_inverse(segments, permutation, count)
    want_inverse = torch.where(valid, torch.searchsorted(want, clamped), -1)
    assert torch.equal(inverse.long(), want_inverse)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_keys", [1, 2, 100, 65_536, 2_000_000_000, 3_000_000_000])
@pytest.mark.parametrize("length", [0, 1, 2, 33, 1000, 70_000])
def test_random_keys(device: torch.device, dtype: torch.dtype, num_keys: int, length: int) -> None:
    largest = min(num_keys, torch.iinfo(dtype).max)
    keys = torch.randint(0, largest, (length,), generator=torch.Generator().manual_seed(length))
    check(keys.to(device, dtype), num_keys)


@pytest.mark.parametrize("skew", [1, 3, 8])
def test_skewed_keys(device: torch.device, skew: int) -> None:
    uniform = torch.rand(50_000, generator=torch.Generator().manual_seed(skew))
    check((uniform**skew * 1_000_000).long().to(device), 1_000_000)


def test_keys_beyond_32_bits(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(0, 1 << 40, (30_000,), generator=generator)
    keys[::3] = keys[0]
    check(keys.to(device), 1 << 40)


def test_invalid_keys_belong_to_no_group(device: torch.device) -> None:
    keys = torch.tensor([5, -1, 3, 10, 3, 99, -7, 0], device=device)
    check(keys, 10)
    check(torch.full((20_000,), -1, device=device), 10)


def test_non_contiguous_keys(device: torch.device) -> None:
    keys = torch.randint(0, 50, (2000,), generator=torch.Generator().manual_seed(2)).to(device)
    strided = torch.stack([keys, keys], 1)[:, 0]
    assert not strided.is_contiguous()
    assert torch.equal(group(strided, 50)[2], group(keys, 50)[2])


def test_same_bits_on_any_number_of_threads(thread_counts: list[int]) -> None:
    keys = torch.randint(0, 5000, (100_000,), generator=torch.Generator().manual_seed(3))
    results = []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        results.append(group(keys, 5000))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-2, 40), max_size=200), st.integers(1, 40))
def test_any_small_keys(keys: list[int], num_keys: int) -> None:
    check(torch.tensor(keys, dtype=torch.int64), num_keys)


@pytest.mark.parametrize("num_keys", [50, 1 << 33])
def test_opcheck(device: torch.device, num_keys: int) -> None:
    keys = torch.randint(0, 50, (300,), generator=torch.Generator().manual_seed(4)).to(device)
    torch.library.opcheck(group, (keys, num_keys))
    torch.library.opcheck(group_inverse, group(keys, num_keys)[1:])


def test_wrong_input_is_refused() -> None:
    with pytest.raises(RuntimeError, match="keys must be int32 or int64"):
        group(torch.zeros(3), 5)
    with pytest.raises(RuntimeError, match=r"keys must have 1 dimension, got 2; use .view\(-1\)"):
        group(torch.zeros(3, 2, dtype=torch.int64), 5)
    _, segments, permutation, count = group(torch.zeros(3, dtype=torch.int64), 5)
    with pytest.raises(RuntimeError, match="must come from one call of group"):
        group_inverse(segments, permutation + (1 << 30), count)
    for first, groups in [(-4, 0), (1, 0), (1, 1)]:  # else it would write outside its result
        segments[0] = first
        with pytest.raises(RuntimeError, match="must come from one call of group"):
            group_inverse(segments, permutation, count.fill_(groups))
    int32 = torch.iinfo(torch.int32)
    segments[:3] = torch.tensor([0, int32.max, int32.min])  # their difference overflows to 1
    with pytest.raises(RuntimeError, match="must come from one call of group"):
        group_inverse(segments, permutation, count.fill_(2))
    with pytest.raises(RuntimeError, match="count must have one entry, got 2"):
        group_inverse(segments, permutation, count.repeat(2))
    with pytest.raises(RuntimeError, match="num_keys must be >= 0, got -1"):
        group(torch.zeros(3, dtype=torch.int64), -1)
