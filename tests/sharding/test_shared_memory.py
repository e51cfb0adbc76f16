"""All-to-alls through shared memory: they bring what gloo brings, and tell what goes wrong."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from emblib.sharding import shared_memory
from emblib.sharding.exchange import Pending, start_all_gather, start_all_to_all
from emblib.sharding.failures import is_gone
from emblib.sharding.groups_of_ranks import Ranks, subgroup
from emblib.sharding.shared_memory import link_of
from tests.sharding import worlds

DTYPES = [torch.float32, torch.float16, torch.uint8, torch.int32, torch.int64, torch.bfloat16]


def _sizes(world: int, seed: int, largest: int) -> list[list[int]]:
    """What rank r sends to rank s, the same on all ranks; a third is nothing."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randint(-largest // 2, largest + 1, (world, world), generator=random)
    return found.clamp(min=0).tolist()


def _start(ranks: Ranks, seed: int, largest: int = 1000) -> Pending:
    sizes = _sizes(ranks.size, seed, largest)
    own = sizes[ranks.rank]
    random = torch.Generator().manual_seed(1000 * seed + ranks.rank)
    dtype = DTYPES[seed % len(DTYPES)]
    sent = torch.randint(0, 100, (sum(own),), generator=random).to(dtype)
    pending = start_all_to_all(sent, own, [row[ranks.rank] for row in sizes], ranks)
    if link_of(ranks) is not None:
        sent.zero_()  # it has been read
    return pending


def _both(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    over_gloo = Ranks(subgroup(ranks), shared_memory=False)
    shared = Ranks(subgroup(ranks))
    found = []
    for seed in range(40):
        largest = (10, 1000, 300_000)[seed % 3]
        pending = [_start(r, seed, largest) for r in (over_gloo, shared)]
        found.append(tuple(_as_bytes(p.wait()) for p in pending))
    assert link_of(shared) is not None
    assert link_of(over_gloo) is None
    return found


def _as_bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8).clone()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_gloo_brings(world: int) -> None:
    for found in worlds.run(world, _both):
        for over_gloo, shared in found:
            assert torch.equal(over_gloo, shared)


def _gathered(ranks: Ranks) -> list[bool]:
    """Parts of all sizes, some empty, through shared memory and over gloo."""
    right = []
    for is_shared in (True, False):
        group = Ranks(subgroup(ranks), shared_memory=is_shared)
        for seed in range(12):
            sizes = _sizes(ranks.size, seed, (10, 300_000)[seed % 2])[0]
            parts = [torch.arange(n) + 1000 * rank for rank, n in enumerate(sizes)]
            parts = [part.to(DTYPES[seed % len(DTYPES)]) for part in parts]
            sent = parts[ranks.rank].clone()
            pending = start_all_gather(sent, sizes, group)
            if is_shared:
                sent.zero_()  # it has been read
            right.append(torch.equal(pending.wait(), torch.cat(parts)))
    return right


@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_copy_for_all(world: int) -> None:
    for right in worlds.run(world, _gathered):
        assert right == [True] * 24


def _wrong_sizes_here(ranks: Ranks) -> bool:
    """Refused before memory of others is touched; then all goes on."""
    ranks = Ranks(subgroup(ranks))
    sent = torch.ones(4)
    for sizes, came in (([2, 3], [2, 2]), ([2, 2], [3, 3])):
        with pytest.raises(ValueError, match="add up"):
            start_all_to_all(sent, sizes, came, ranks)
    with pytest.raises(ValueError, match="add up"):
        start_all_to_all(sent, [2, 2], [2, 2], ranks, received=torch.empty(3))
    with pytest.raises(ValueError, match="add up"):
        start_all_gather(sent, [3, 3], ranks)
    return torch.equal(start_all_gather(sent, [4, 4], ranks).wait(), torch.ones(8))


def test_sizes_that_do_not_fit_are_refused() -> None:
    assert worlds.run(2, _wrong_sizes_here) == [True, True]


def _many_at_once(ranks: Ranks) -> tuple[bool, int]:
    """Started in order, waited for in another, some never; then as many again."""
    ranks = Ranks(subgroup(ranks))
    right = True
    for turn in range(3):
        pending = {seed: _start(ranks, seed) for seed in range(60)}
        for seed in range(0, 60, 7):
            del pending[seed]
        for seed in sorted(pending, key=lambda s: (s * (ranks.rank + 3 + turn)) % 61):
            right &= torch.equal(pending[seed].wait().float(), _expected(ranks, seed))
    link = link_of(ranks)
    assert link is not None
    ranks.barrier()
    _start(ranks, 1).wait()
    ranks.barrier()
    return right, len(link._slabs)


def _expected(ranks: Ranks, seed: int, largest: int = 1000) -> Tensor:
    sizes = _sizes(ranks.size, seed, largest)
    parts = []
    for rank, own in enumerate(sizes):
        random = torch.Generator().manual_seed(1000 * seed + rank)
        sent = torch.randint(0, 100, (sum(own),), generator=random).to(DTYPES[seed % len(DTYPES)])
        parts.append(sent.float().split(own)[ranks.rank])
    return torch.cat(parts)


def test_any_number_at_once_in_any_order() -> None:
    for right, slabs in worlds.run(4, _many_at_once):
        assert right
        assert slabs <= 2 * 60, "what was waited for, or dropped, is used again"


def _steps(ranks: Ranks) -> list[int]:
    """Slabs after 10 and 300 steps of the four all-to-alls of a step, of sizes that vary."""
    ranks = Ranks(subgroup(ranks))
    found = []
    for step in range(300):
        for nbytes in (32, 100_000 + 100 * (step % 7), 1_000_000, 1_000_000):
            sent = torch.zeros(nbytes * ranks.size, dtype=torch.uint8)
            start_all_to_all(sent, [nbytes] * ranks.size, [nbytes] * ranks.size, ranks).wait()
        if step in (9, 299):
            link = link_of(ranks)
            assert link is not None
            found.append(link.nbytes)
    return found


def test_memory_is_used_again() -> None:
    for few, many in worlds.run(2, _steps):
        assert few <= many <= 8 * 1_250_000, "not more than a few slabs of the largest size"


def _disagree(ranks: Ranks) -> str:
    ranks = Ranks(subgroup(ranks))
    _start(ranks, 1).wait()
    mine = torch.zeros(8 * ranks.size)
    expected = [8, 8 if ranks.rank == 1 else 4]
    pending = start_all_to_all(mine, [8] * ranks.size, expected, ranks)
    if ranks.rank == 1:
        return str(pending.wait().numel())
    with pytest.raises(RuntimeError) as caught:
        pending.wait()
    with pytest.raises(RuntimeError, match="the same"):
        pending.wait()
    return str(caught.value)


def test_sizes_that_do_not_agree() -> None:
    texts = worlds.run(2, _disagree)
    assert texts[1] == "16"
    assert "rank 1 sent 32 bytes where rank 0 expected 16" in texts[0]
    assert "the same collectives in the same order" in texts[0]


def _lose(ranks: Ranks, act: str) -> str:
    """What the others hear when the last rank does not come again."""
    group = subgroup(ranks)
    assert group is not None
    patience = timedelta(seconds=5 if act == "sleep" else 60)
    group._get_backend(torch.device("cpu")).options._timeout = patience
    ranks = Ranks(group)
    _start(ranks, 1).wait()
    if ranks.rank == ranks.size - 1:
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif act == "leave":
            shared_memory._links.clear()
        else:
            time.sleep(8)
        return ""
    with pytest.raises(dist.DistBackendError) as caught:
        _start(ranks, 2).wait()
    return str(caught.value)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("kill", "has ended and will not come"),
        ("leave", "has left it and will not come"),
        ("sleep", "has not come to an all-to-all within"),
    ],
)
def test_who_does_not_come_is_named(act: str, words: str) -> None:
    try:
        answers: dict[int, Any] = dict(enumerate(worlds.run(4, _lose, act, grace=30.0)))
    except worlds.RankError as error:
        print(error)
        answers = error.answers
    for rank in range(3):
        assert "rank 3 of the process group (process " in answers[rank]
        assert words in answers[rank]


def _one_refuses(ranks: Ranks) -> bool:
    ranks = Ranks(subgroup(ranks), shared_memory=ranks.rank != 1)
    right = torch.equal(_start(ranks, 6).wait().float(), _expected(ranks, 6))
    return right and link_of(ranks) is None


def _elsewhere(ranks: Ranks) -> bool:
    """A file that cannot be mapped, as where two containers do not see each other's processes."""
    ranks = Ranks(subgroup(ranks))
    if ranks.rank == 1:

        def refused(*args: Any) -> None:
            raise PermissionError

        shared_memory._open = refused  # type: ignore[assignment]
    try:
        right = torch.equal(_start(ranks, 6).wait().float(), _expected(ranks, 6))
    finally:
        shared_memory._open = _OPEN
    return right and link_of(ranks) is None


_OPEN = shared_memory._open


@pytest.mark.parametrize("function", [_one_refuses, _elsewhere])
def test_otherwise_it_is_gloo(function: Any) -> None:
    assert worlds.run(4, function) == [True] * 4


def _groups_that_go(ranks: Ranks) -> list[int]:
    """Maps that there are after each group: those of one that was destroyed go."""
    found = []
    for _ in range(4):
        group = dist.new_group(list(range(ranks.size)))
        own = Ranks(group)
        _start(own, 3, 300_000).wait()
        own.barrier()
        dist.destroy_process_group(group)
        del group, own
        found.append(Path("/proc/self/maps").read_text().count("memfd:emblib"))
    return found


def test_a_group_takes_its_memory_along() -> None:
    for found in worlds.run(4, _groups_that_go):
        assert found[-1] <= found[0]


def _last_words(ranks: Ranks) -> list[bool]:
    """What a rank sent comes also when its process has ended meanwhile."""
    ranks = Ranks(subgroup(ranks))
    pending = [_start(ranks, seed, 300_000) for seed in (0, 6, 12)]
    if ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    (other,) = link_of(ranks)._peers  # type: ignore[union-attr]
    while not is_gone(other.process):
        time.sleep(0.01)
    return [
        torch.equal(p.wait().float(), _expected(ranks, seed, 300_000))
        for p, seed in zip(pending, (0, 6, 12), strict=True)
    ]


def test_the_last_words_of_a_rank_are_heard() -> None:
    with pytest.raises(worlds.RankError) as caught:
        worlds.run(2, _last_words, grace=30.0)
    assert caught.value.answers == {1: [True] * 3}
