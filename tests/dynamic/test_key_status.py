"""The status of keys by position, against what the index says of them one by one."""

import pytest
import torch
from torch import Tensor

from emblib.dynamic import keys
from emblib.dynamic.admission import Admission
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.keys import KeyStatus
from emblib.ops.hash import Keys
from emblib.specs import DynamicSpec, Eviction, ExactCounter, FrequencyAdmission, InsertPolicy


def batch(ids: list[int], device: torch.device) -> Keys:
    return Keys(
        torch.tensor(ids, dtype=torch.int64, device=device),
        torch.tensor([0, len(ids)], device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )


def names(statuses: Tensor) -> list[str]:
    assert statuses.dtype == torch.uint8
    return [KeyStatus(value).name for value in statuses.tolist()]


def test_every_status_is_told(device: torch.device) -> None:
    spec = DynamicSpec(32, 4, admission=FrequencyAdmission(2, ExactCounter(64)))
    index, admission = HashIndex([spec], device), Admission([spec], device)

    def insert(ids: list[int]) -> list[str]:
        inserted = index.insert(batch(ids, device), admit=admission.admit)
        return names(keys.status_by_position(inserted))

    assert insert([5, 6, 5]) == ["NEW", "NOT_ADMITTED", "NEW"]
    assert insert([5, 6, 7]) == ["HIT", "NEW", "NOT_ADMITTED"]
    assert insert([5, 5]) == ["HIT", "HIT"]
    assert insert([*range(100, 130)] * 2) == ["NEW"] * 60
    assert insert([200, 200, 7]) == ["EVICTING", "EVICTING", "EVICTING"]
    ids = [*range(300, 340)] * 2
    statuses = insert(ids)
    assert statuses[:40] == statuses[40:]
    assert (statuses[:40].count("EVICTING"), statuses[:40].count("REFUSED")) == (32, 8)
    assert insert([]) == []


@pytest.mark.parametrize("eviction", [Eviction.NONE, Eviction.LFU])
def test_full_tables_refuse(eviction: Eviction, device: torch.device) -> None:
    """Where none is evicted, and where a newcomer must have been used more often than another."""
    index = HashIndex(
        [DynamicSpec(32, 4, eviction=eviction, insert_policy=InsertPolicy.EVICT_IF_LOWER)], device
    )
    index.insert(batch([*range(32)] * 2, device))
    statuses = names(keys.status_by_position(index.insert(batch([50, 3], device))))
    assert statuses == ["REFUSED", "HIT"]
