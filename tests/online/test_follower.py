"""Followers of change logs: equal to the leader at every boundary, and what they refuse."""

from pathlib import Path

import pytest
import torch

import emblib
from emblib import optim
from emblib.online import ChangeLog, DirectorySink, LogFollower
from tests.online import traffic

LEADERS = {
    "lru": lambda: traffic.dynamic(),
    "lfu": lambda: traffic.dynamic(eviction=emblib.Eviction.LFU),
    "ttl": lambda: traffic.dynamic(ttl=4),
    "plain": lambda: traffic.plain(),
    "sgd": lambda: traffic.plain(optim.SGD(0.1)),
    "cached": lambda: traffic.plain(placement=emblib.Placement.MANAGED_CACHING),
}


def _run(name: str, directory: Path, steps: int, compact_every: int = 7) -> None:
    leader = LEADERS[name]()
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        leader.step(generator)
    log = ChangeLog(leader.model, DirectorySink(directory), step=3, compact_every=compact_every)
    followers = {
        form: LogFollower(make(), DirectorySink(directory))
        for form, make in leader.followers.items()
    }
    late = LogFollower(leader.followers["live"](), DirectorySink(directory))
    last = 3 + steps
    for step in range(4, last + 1):
        leader.step(generator)
        if step % 3 == 0 and step < last:
            continue  # two steps in one entry
        assert log.record(step)
        log.flush()
        for form, follower in followers.items():
            if form == "live" or step % 5 == 0:  # the others get several entries at once
                assert follower.apply() == step
                assert follower.lag.steps == 0
                traffic.assert_equal(follower, leader.followers[form], leader.keys)
    log.close()
    assert late.lag.steps is None
    assert late.apply() == last
    traffic.assert_equal(late, leader.followers["live"], leader.keys)


@pytest.mark.parametrize("name", LEADERS)
def test_equal_at_every_boundary(name: str, tmp_path: Path) -> None:
    _run(name, tmp_path, 20)


def test_an_hour_of_traffic(tmp_path: Path) -> None:
    """Thousands of steps in every kind of tables, with compaction and growth on the way."""
    for name in LEADERS:
        _run(name, tmp_path / name, 600, compact_every=90)
