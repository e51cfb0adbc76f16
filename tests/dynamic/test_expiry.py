"""Scores of the STEP and CUSTOM kind, and the sweep that lets unused keys expire."""

import pickle

import pytest
import torch

from emblib.dynamic.eviction import EvictionScores, Expiry
from emblib.dynamic.hash_index import HashIndex
from emblib.ops.hash import Keys
from emblib.specs import DynamicSpec, Eviction


@pytest.mark.parametrize("ttl", [1, 5, 8, 17, 100])
@pytest.mark.parametrize("buckets", [1, 2, 7, 64])
def test_every_bucket_has_its_turn(ttl: int, buckets: int) -> None:
    """Once in an eighth of the ttl, whichever step one begins with."""
    expiry = Expiry([DynamicSpec(32, 4), DynamicSpec(32 * buckets, 4, ttl=ttl)])
    period = max(1, ttl // 8)
    for start in (0, 1, 13):
        turns = [sweep for tick in range(start, start + period) for sweep in expiry.sweeps(tick)]
        assert all(s.table == 1 and s.first_bucket + s.num_buckets <= buckets for s in turns)
        seen = [b for s in turns for b in range(s.first_bucket, s.first_bucket + s.num_buckets)]
        assert set(seen) == set(range(buckets))


def test_keys_leave_after_more_than_their_ttl() -> None:
    (sweep,) = Expiry([DynamicSpec(32, 4, ttl=10)]).sweeps(25)
    assert sweep.before == 15  # last used in step 14: not for 11 steps


def test_without_a_ttl_nothing_is_swept() -> None:
    expiry = Expiry([DynamicSpec(32, 4)])
    assert not list(expiry.sweeps(100))


SPECS = [
    DynamicSpec(32, 4, name="a", eviction=Eviction.STEP),
    DynamicSpec(32, 4, name="b", eviction=Eviction.CUSTOM),
    DynamicSpec(32, 4, name="c", eviction=Eviction.CUSTOM),
]


def test_steps_count_and_custom_scores_stay(device: torch.device) -> None:
    scores = EvictionScores(SPECS, device)
    assert scores.get() == [1, None, None]
    scores.set(7)
    scores.set({2: -3})
    given = scores.of_next_batch()
    scores.advance()
    assert given.tolist() == [1, 7, -3]
    assert scores.get() == [2, 7, -3]
    scores.set_steps({0: 40})
    scores.advance()
    assert scores.of_next_batch().tolist() == [41, 7, -3]


def test_custom_scores_must_be_set_before_the_first_batch(device: torch.device) -> None:
    scores = EvictionScores(SPECS, device)
    scores.set({1: 5})
    with pytest.raises(RuntimeError, match=r"need a score before their first batch.*'c'"):
        scores.of_next_batch()
    again = EvictionScores(SPECS, device)
    again.load_state_dict(scores.state_dict())
    with pytest.raises(RuntimeError, match=r"\['c'\]"):
        again.of_next_batch()
    again.set({2: 6})
    assert pickle.loads(pickle.dumps(again)).of_next_batch().tolist() == [1, 5, 6]


def test_scores_are_set_where_they_are_used(device: torch.device) -> None:
    scores = EvictionScores(SPECS, device)
    with pytest.raises(ValueError, match=r"only tables with Eviction.CUSTOM.*'a'"):
        scores.set({0: 3})
    with pytest.raises(TypeError, match=r"a score must be an int, got 1.5"):
        scores.set({1: 1.5})
    with pytest.raises(ValueError, match=r"\[-2\^63, 2\^63\)"):
        scores.set({1: 2**63})
    with pytest.raises(ValueError, match=r"only tables with Eviction.STEP.*'b'"):
        scores.set_steps({1: 3})
    with pytest.raises(ValueError, match="none has it"):
        EvictionScores(SPECS[:1], device).set(3)
    assert scores.get() == [1, None, None]


def test_the_sweep_keeps_its_promise(device: torch.device) -> None:
    """In training, a key stays for its ttl after its last use, and an eighth more at most."""
    ttl, spec = 16, DynamicSpec(96, 4, ttl=16)
    index, expiry = HashIndex([spec], device), Expiry([spec])
    generator = torch.Generator().manual_seed(0)
    last_used: dict[int, int] = {}
    left, ages = 0, set()
    for _ in range(80):
        drawn = (torch.randn(2, generator=generator) * 12).round().long()
        starts = torch.tensor([0, 2], device=device)
        tables = torch.zeros(1, dtype=torch.int64, device=device)
        index.insert(Keys(drawn.to(device), starts, tables))
        tick = index.tick
        last_used |= dict.fromkeys(drawn.tolist(), tick)
        for sweep in expiry.sweeps(tick):
            gone = index.expire(
                sweep.table, sweep.before, sweep.first_bucket, sweep.num_buckets
            ).tolist()
            ages |= {tick - last_used.pop(key) for key in gone}
            left += len(gone)
        assert sorted(index.export(0).keys.tolist()) == sorted(last_used)
        assert all(tick - used <= ttl + ttl // 8 for used in last_used.values())
    assert left == index.stats()[0]["expired"] > 10
    assert min(ages) > ttl
