"""The log of keys that left: what it keeps, how far back it reaches, what it forgets."""

import pytest
import torch

from emblib.dynamic.eviction import EvictionLog


def test_keys_are_told_from_a_tick_on() -> None:
    log = EvictionLog(2, tick=3)
    log.record_all(torch.tensor([5, -1, 7]), [2, 3], tick=4)
    log.record_all(torch.tensor([5, 9]), [2, 2], tick=6)
    assert log.since(0, 3).tolist() == [-1, 5, 9]
    assert log.since(0, 5).tolist() == [5, 9]
    assert log.since(1, 3).tolist() == [7]
    assert log.since(1, 5).tolist() == []


def test_the_oldest_are_forgotten_and_asking_for_them_is_an_error() -> None:
    log = EvictionLog(1, tick=1, max_keys=3)
    for tick in range(1, 6):
        log.record(0, torch.tensor([tick]), tick)
    assert log.complete_from(0) == 3
    assert log.since(0, 3).tolist() == [3, 4, 5]
    with pytest.raises(ValueError, match="evictions from tick 3 on, not from 2 on"):
        log.since(0, 2)


def test_keys_are_copied() -> None:
    log, keys = EvictionLog(1, tick=0), torch.tensor([1, 2])
    log.record(0, keys, 1)
    keys.zero_()
    assert log.since(0, 1).tolist() == [1, 2]
