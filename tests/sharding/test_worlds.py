"""The processes that the tests of this folder run on."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from emblib.sharding.ranks import RankGroup, invoke_on_rank_and_broadcast_result
from tests.sharding import worlds


def _sum(ranks: RankGroup, value: Tensor) -> tuple[int, int, Tensor]:
    mine = value * (ranks.rank + 1)
    dist.all_reduce(mine, group=ranks.group)
    return ranks.rank, ranks.size, mine


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_by_rank(size: int) -> None:
    found = worlds.run(size, _sum, torch.tensor([1.0, 2.0]))
    assert [(rank, number) for rank, number, _ in found] == [(r, size) for r in range(size)]
    for _, _, total in found:
        assert total.tolist() == [size * (size + 1) / 2, size * (size + 1)]


def _fail(ranks: RankGroup) -> None:
    if ranks.rank == 1:
        raise ValueError("as asked")
    dist.barrier(ranks.group)


def _die(ranks: RankGroup) -> None:
    if ranks.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(ranks.group)


def _hang(ranks: RankGroup) -> None:
    while ranks.rank == 0:
        time.sleep(0.01)


def test_failures_name_the_rank() -> None:
    with pytest.raises(worlds.RankError, match=r"rank 1: (?s:.*)ValueError: as asked"):
        worlds.run(2, _fail)
    with pytest.raises(worlds.RankError, match="rank 2: the process died"):
        worlds.run(4, _die)
    with pytest.raises(worlds.RankError, match=r"rank 0 did not end(?s:.*)_hang"):
        worlds.run(2, _hang, patience=5.0)
    assert len(worlds.run(3, _sum, torch.ones(1))) == 3  # in a new world


def _sum_in_a_group(ranks: RankGroup) -> float:
    total = torch.ones(1)
    group = dist.new_group(list(range(ranks.size)), timedelta(seconds=10))
    dist.all_reduce(total, group=group)
    return float(total)


def test_groups_of_functions_on_fewer_ranks() -> None:
    assert worlds.run(2, _sum_in_a_group) == [2.0] * 2
    assert worlds.run(3, _sum_in_a_group) == [3.0] * 3


def test_only_functions_of_a_module() -> None:
    with pytest.raises(ValueError, match="move it to the top level"):
        worlds.run(1, lambda ranks: None)
    with pytest.raises(ValueError, match="1 to 4 ranks, not 5"):
        worlds.run(5, _sum, torch.ones(1))


def _from_rank(ranks: RankGroup, leader: int) -> int:
    return invoke_on_rank_and_broadcast_result(ranks, leader, lambda: ranks.rank * 10)


def _failing_on_rank(ranks: RankGroup, leader: int) -> str:
    def fail() -> None:
        raise KeyError("nothing there")

    with pytest.raises(KeyError) as caught:
        invoke_on_rank_and_broadcast_result(ranks, leader, fail)
    return " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_invoke_on_rank_and_broadcast_result() -> None:
    assert worlds.run(3, _from_rank, 2) == [20, 20, 20]
    assert worlds.run(1, _from_rank, 0) == [0]
    for rank, text in enumerate(worlds.run(2, _failing_on_rank, 1)):
        assert "nothing there" in text
        assert ("raised on rank 1" in text) == (rank == 0)
    with pytest.raises(ValueError, match="must be one of 0 to 0"):
        _from_rank(RankGroup.single(), 1)
