"""Zero-collision hashing, equal to FBGEMM's, and pruning, against loops by its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.compat.fbgemm_operators import remapping
from tests.compat.peer import peer_module

IDS = torch.randint(-(2**62), 2**62, (300,), generator=torch.Generator().manual_seed(0))


def find(ids: Tensor, slots: Tensor, max_probe: int, **options: Any) -> Tensor:
    return remapping.zero_collision_hash(ids, slots, max_probe, True, -1, True, **options)[0]


def filled(ids: Tensor, size: int, dtype: torch.dtype, **parts: Tensor) -> Tensor:
    """Return slots that have most ids, some of them after others."""
    slots, metadata = remapping.create_zch_buffer(size, long_type=dtype is torch.int64)
    assert metadata is None
    keys = ids if dtype is ids.dtype else ids.fmod(2**31 - 1)
    for position, slot in enumerate(find(ids, slots, 1, **parts).tolist()):
        if position % 3:
            slots[(slot + position % 4) % size] = keys[position].to(dtype)
    return slots


def test_an_id_is_found_where_it_is() -> None:
    slots = filled(IDS, 1000, torch.int64)
    flat = slots.flatten()
    found = find(IDS, slots, 4, disable_fallback=True)
    is_there = found >= 0
    assert 100 < int(is_there.sum()) < 300
    assert torch.equal(flat[found[is_there]], IDS[is_there])
    first = find(IDS, torch.full_like(slots, -1), 0)
    assert torch.equal(find(IDS, slots, 4)[~is_there], first[~is_there])
    assert find(IDS[:0], slots, 4).tolist() == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [7, 200, 1000])
@pytest.mark.parametrize("reserved", [-1, 3])
@pytest.mark.parametrize("is_split", [False, True])
def test_slots_are_those_of_fbgemm(
    dtype: torch.dtype, size: int, reserved: int, is_split: bool
) -> None:
    peer_module("fbgemm_gpu.sparse_ops")
    parts, half = {}, (size + 1) // 2
    if is_split:
        part = torch.arange(300) % 2
        parts = {"local_sizes": torch.where(part == 0, half, size - half), "offsets": part * half}
        reserved = min(reserved, size - half - 1)
    options = {"opt_in_prob": -1 if reserved == -1 else 100, "num_reserved_slots": reserved}
    slots = filled(IDS, size, dtype, **parts)
    for probes in (0, 1, 5, 200):
        for fallback in ({}, {"disable_fallback": True}):
            expected, _ = torch.ops.fbgemm.zero_collision_hash(
                IDS, slots, probes, True, -1, True, **options, **parts, **fallback
            )
            assert torch.equal(find(IDS, slots, probes, **options, **parts, **fallback), expected)
    if dtype is torch.int32:
        few = IDS.fmod(2**31).int()
        expected, _ = torch.ops.fbgemm.zero_collision_hash(few, slots, 5, True, -1, True)
        assert torch.equal(find(few, slots, 5), expected)


def test_hashing_refuses_to_insert() -> None:
    slots, metadata = remapping.create_zch_buffer(8, support_evict=True)
    assert metadata is not None
    assert slots.dtype == metadata.dtype == torch.int32
    before = slots.clone()
    with pytest.raises(NotImplementedError, match=r"storage\.Hash"):
        remapping.zero_collision_hash(IDS, slots, 4, True)
    with pytest.raises(NotImplementedError, match="readonly=True"):
        remapping.zero_collision_hash(IDS, slots, 4, True, 1, True)
    with pytest.raises(RuntimeError, match="circular_probe"):
        remapping.zero_collision_hash(IDS, slots, 4, readonly=True)
    with pytest.raises(RuntimeError, match="local_sizes and offsets"):
        find(IDS, slots, 4, offsets=IDS)
    with pytest.raises(RuntimeError, match="_modulo_identity_DPRECATED must be False"):
        find(IDS, slots, 4, _modulo_identity_DPRECATED=True)
    assert torch.equal(slots, before)


def test_rows_move_to_the_ids_of_use() -> None:
    ends, rows = torch.tensor([0, 60, 70]), torch.tensor([20, 4])
    lookup = torch.full((70,), -1)
    remapping.init_address_lookup(lookup, ends, rows)
    assert lookup.tolist() == [*range(20), *[0] * 40, *range(4), *[0] * 6]
    use = torch.arange(70.0)
    before = lookup.clone()
    moved, offsets, total = remapping.prune_embedding_tables(5, 4, lookup, use, ends, rows)
    torch.testing.assert_close(use, torch.arange(70.0) * 0.98)
    assert total == len(moved) == int(offsets[-1])
    for table, (first, last) in enumerate(((0, 60), (60, 70))):
        sample = use[first:last]
        if table == 0:  # 2 samples, of which the second is the threshold
            sample = sample[[5, 28]]
            threshold = sample[1]
        else:
            threshold = sample[6]
        takers = [i for i in range(first, last) if use[i] > threshold and before[i] == 0]
        givers = [i for i in range(first, last) if use[i] <= threshold and before[i] != 0]
        expected, given = before.clone(), []
        for taker, giver in zip(takers, givers, strict=False):
            expected[taker], expected[giver] = before[giver], 0
            given.append(int(before[giver]))
        assert torch.equal(lookup[first:last], expected[first:last])
        assert moved[offsets[table] : offsets[table + 1]].tolist() == given
    assert total > 0
    moved, offsets, total = remapping.prune_embedding_tables(1, 4, lookup, use * 0, ends, rows)
    assert (moved.tolist(), offsets.tolist(), total) == ([0], [0, 0, 0], 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_are_remapped_and_counted(dtype: torch.dtype) -> None:
    ends, lookup = torch.tensor([0, 4, 7]), torch.tensor([3, 2, 1, 0, 5, 6, 4])
    values = torch.tensor([9, 1, 1, 3, 2, 0], dtype=dtype)
    features = (torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3, 2]), torch.tensor([1, 4]))
    use = torch.zeros(7)
    found = remapping.remap_indices_update_utils(50, *features, values, lookup, use, ends)
    assert found.dtype == dtype
    assert found.tolist() == [9, 2, 2, 0, 4, 5]
    assert values.tolist() == [9, 1, 1, 3, 2, 0]
    assert not use.any()
    remapping.remap_indices_update_utils(0, *features, values, lookup, use, ends)
    assert use.tolist() == [0, 2, 0, 1, 1, 0, 1]
    repeated = [torch.tensor([1, 1, 1]), torch.tensor([2])]
    remapping.remap_indices_update_utils(
        50, *features, values, lookup, use, ends, full_values_list=repeated, update_util=True
    )
    assert use.tolist() == [0, 5, 0, 1, 1, 0, 2]
