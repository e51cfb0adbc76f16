"""Lengths to offsets and back."""

import pytest
import torch

from emblib.jagged import lengths_from_offsets, offsets_from_lengths


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_are_running_sums(dtype: torch.dtype) -> None:
    lengths = torch.tensor([[2, 0, 1], [3, 0, 4]], dtype=dtype)
    offsets = offsets_from_lengths(lengths)
    assert offsets.dtype == dtype
    assert offsets.tolist() == [0, 2, 2, 3, 6, 6, 10]
    assert torch.equal(lengths_from_offsets(offsets), lengths.flatten())


def test_no_bags_have_one_offset() -> None:
    assert offsets_from_lengths(torch.zeros(0, dtype=torch.int64)).tolist() == [0]


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"int32 or int64, got torch\.float32"):
        offsets_from_lengths(torch.ones(2))
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        offsets_from_lengths(torch.tensor([1, -1]))
