"""Emulated `group` and `group_inverse` against plain PyTorch."""

import pytest
import torch

from tests.simt import emulated

KEYS = {
    "none": torch.zeros(0),
    "one": torch.tensor([3]),
    "all_out": torch.tensor([-1, 9, 9, -7]),
    "mixed": torch.randint(-2, 14, (3000,), generator=torch.Generator().manual_seed(0)),
    "one_group": torch.full((2500,), 4),
    "distinct": torch.randperm(2100, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("wide", [False, True], ids=["keys32", "keys64"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_group(
    keys: torch.Tensor, dtype: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(emulated, "WIDE_FROM", 0)
    keys = keys.to(dtype)
    num_keys = 9 if keys.numel() != 2100 else 2100
    unique, segments, permutation, count = emulated.group(keys, num_keys)
    valid = (keys >= 0) & (keys < num_keys)
    want, lengths = keys[valid].unique(return_counts=True)
    groups, grouped = want.numel(), int(valid.sum())
    assert count.item() == groups
    assert torch.equal(unique[:groups], want)
    assert (unique[groups:] == 0).all()
    assert torch.equal(segments[:groups].long(), lengths.cumsum(0) - lengths)
    assert (segments[groups:] == grouped).all()
    sortable = torch.where(valid, keys.long(), num_keys)
    assert torch.equal(permutation.long(), sortable.argsort(stable=True))
    inverse = emulated.group_inverse(segments, permutation, count)
    assert torch.equal(inverse == -1, ~valid)
    assert torch.equal(want[inverse[valid].long()], keys[valid])
