"""SlotAllocator against a dict, through removals and several sizes of its index."""

import pytest
import torch

from emblib.dynamic.tiers import slots
from emblib.dynamic.tiers.slots import SlotAllocator


@pytest.mark.parametrize("least", [256, 1 << 16])
def test_places_are_those_of_a_dict(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_MIN_CAPACITY", least)
    monkeypatch.setattr(slots, "_GROWTH_FACTOR", 4)
    random = torch.Generator().manual_seed(3)
    places, expected = SlotAllocator(), {}
    for count in (0, 1, 100, 150, 700, 3000, 9000):
        keys = torch.randint(-(2**63), 2**63 - 1, (count,), generator=random).unique()
        new = torch.tensor([k for k in keys.tolist() if k not in expected], dtype=torch.int64)
        expected |= zip(new.tolist(), places.add(new).tolist(), strict=True)
        gone = torch.tensor(list(expected)[:: 3 + count % 2], dtype=torch.int64)
        places.remove(gone)
        for key in gone.tolist():
            del expected[key]
        held = torch.tensor(list(expected), dtype=torch.int64)
        assert places.find(held).tolist() == list(expected.values())
        assert places.find(gone).tolist() == [-1] * gone.numel()
        assert places.size == len(expected) == len(set(expected.values()))
    again = SlotAllocator()
    again.restore(held, places.find(held), places.end_assigned)
    assert again.find(held).tolist() == list(expected.values())
    assert again.add(gone).max() < places.end_assigned, "freed places are given first"


def test_slots_that_were_freed_last_are_reused_first() -> None:
    places = SlotAllocator()
    assert places.add(torch.arange(3000)).tolist() == [*range(3000)]
    places.remove(torch.arange(900))
    places.remove(torch.arange(900, 2000))
    places.remove(torch.tensor([2500, 2400]))
    want = [2400, 2500, 1999, 1998]
    assert places.add(torch.arange(5000, 5004)).tolist() == want
    assert places.add(torch.arange(6000, 8000))[-3:].tolist() == [0, 3000, 3001]
    assert places.find(torch.tensor([5002, 2999, 7999, 0])).tolist() == [1999, 2999, 3001, -1]


@pytest.mark.parametrize("least", [256, 1 << 16])
def test_hidden_slots_are_not_found(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of the index nor those of the keys that found no bucket."""
    monkeypatch.setattr(slots, "_MIN_CAPACITY", least)
    monkeypatch.setattr(slots, "_MAX_LOAD", 0.99)
    monkeypatch.setattr(slots.secrets, "randbits", lambda bits: 1)  # some hashes fit all keys
    places = SlotAllocator()
    places.add(torch.arange(250))
    assert bool(places._overflow_keys) == (least == 256)
    hidden = torch.arange(250).remainder(3).eq(0).to(torch.uint8)
    keys = torch.arange(260)
    want = [key if key < 250 and key % 3 else -1 for key in keys.tolist()]
    assert places.find(keys, hidden).tolist() == want


def test_an_index_reserves_little_before_it_is_filled() -> None:
    """Limits on a process's data count address space: stores of many tables must fit below."""
    assert sum(t.nbytes for t in SlotAllocator()._index.tensors()) < 4 << 20
