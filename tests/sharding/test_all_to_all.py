"""Exchanges of every dtype and size; those that ranks or threads call out of order are refused."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig
from emblib.jagged import KeyedJaggedTensor
from emblib.optim import SGD
from emblib.sharding.all_to_all import start_all_gather, start_all_to_all
from emblib.sharding.ranks import RankGroup, subgroup
from emblib.sharding.shard import shard
from emblib.sharding.sharding_types import row_wise
from tests.sharding import worlds


def in_thread(function: Callable[[], Any]) -> Any:
    """What it returned or raised in a thread of its own, which has ended."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(function())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=call, name="second")
    thread.start()
    thread.join()
    return found[0]


def _of_its_own(ranks: RankGroup) -> RankGroup:
    """The same ranks in a group that the test may leave unfit."""
    return RankGroup(subgroup(ranks))


def _two_threads(ranks: RankGroup) -> None:
    ranks = _of_its_own(ranks)
    sent, sizes = torch.arange(ranks.size), [1] * ranks.size

    def exchange() -> list[int]:
        return start_all_to_all(sent, sizes, sizes, ranks).wait().tolist()

    expected = [ranks.rank] * ranks.size
    # One after the other they may.
    assert exchange() == in_thread(exchange) == exchange() == expected
    # The exchange of a thread that has ended is never waited for.
    left = in_thread(lambda: start_all_to_all(sent, sizes, sizes, ranks))
    assert exchange() == expected
    assert left.wait().tolist() == expected
    pending = start_all_gather(sent[:1], sizes, ranks)
    for attempt in (lambda: in_thread(exchange), lambda: in_thread(exchange)):
        message = str(attempt())
        assert "threads 'MainThread' and 'second' exchange over one process group" in message
        assert "give every thread a process group of its own" in message
    assert pending.wait().tolist() == [0] * ranks.size
    # What the other thread has sent or not is unknown.
    with pytest.raises(RuntimeError, match="exchange over one process group"):
        exchange()


@pytest.mark.parametrize("size", [2, 3])
def test_two_threads_over_one_group_are_refused(size: int) -> None:
    worlds.run(size, _two_threads)


def _model(ranks: RankGroup, dim: int) -> Any:
    torch.manual_seed(dim)
    tables = EmbeddingBagCollection([EmbeddingBagConfig(20, dim, "t")], optimizer=SGD(0.1))
    return shard(tables, {"": {"t": row_wise()}}, ranks)


def _step(model: Any, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(20, (6,), generator=generator)
    return model(KeyedJaggedTensor(["t"], ids, lengths=torch.tensor([1, 2, 3]))).values()


def _trained(ranks: RankGroup, *, at_once: bool) -> list[Tensor]:
    models = [_model(_of_its_own(ranks), dim) for dim in (4, 12)]

    def train(model: Any) -> None:
        for step in range(20):
            _step(model, step, ranks.rank).square().sum().backward()

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    return [p.detach().clone() for model in models for p in model.parameters()]


def _threads_with_groups(ranks: RankGroup) -> None:
    for one, other in zip(
        _trained(ranks, at_once=True), _trained(ranks, at_once=False), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("size", [2, 3])
def test_threads_with_groups_of_their_own_train_at_once(size: int) -> None:
    worlds.run(size, _threads_with_groups)


def _left_out(ranks: RankGroup) -> str:
    ranks = _of_its_own(ranks)
    model = _model(ranks, 4)
    output = _step(model, 0, ranks.rank)

    def go_on() -> None:
        if ranks.rank == 0:
            output.sum().backward()
        else:
            _step(model, 1, ranks.rank)  # its loss had no output of the model in it

    with pytest.raises(RuntimeError) as raised:
        go_on()
    return str(raised.value)


def test_a_loss_without_the_embeddings_is_told_at_once() -> None:
    first, second = worlds.run(2, _left_out)
    assert "rank 1 sent the sizes of a batch where rank 0 expected gradients of rows" in first
    assert "rank 0 sent gradients of rows where rank 1 expected the sizes of a batch" in second
    for message in (first, second):
        assert "The last loss of rank 1 left out the output of a sharded collection" in message
        assert "Or an error ended the step of rank 1 before its backward" in message


def _out_of_step(ranks: RankGroup) -> list[str]:
    """What rank 1 makes of it that a step of rank 0 is a barrier of rank 1, or of another mode."""
    ranks = _of_its_own(ranks)
    model = _model(ranks, 4)
    told = []
    for mode in ("barrier", "eval", "no_grad"):
        is_other = ranks.rank == 1
        model.train(not (is_other and mode == "eval"))
        torch.set_grad_enabled(not (is_other and mode == "no_grad"))
        try:
            _ = ranks.barrier() if is_other and mode == "barrier" else _step(model, 0, ranks.rank)
        except RuntimeError as error:
            told.append(str(error))
    torch.set_grad_enabled(True)
    ranks.barrier()
    model.train()
    _step(model, 1, ranks.rank).sum().backward()  # nothing is left of it
    return told


def test_a_barrier_or_another_mode_on_one_rank_is_told_at_once() -> None:
    first = "rank 0 looks up in training mode with gradients, and rank 1 in"
    for barrier, mode, gradients in worlds.run(2, _out_of_step):
        assert "a barrier where" in barrier or "expected a barrier" in barrier
        assert f"{first} eval mode with gradients" in mode
        assert f"{first} training mode without gradients" in gradients


DTYPES = [torch.float32, torch.float16, torch.uint8, torch.int32, torch.int64, torch.bfloat16]


def _sizes(world: int, seed: int) -> list[list[int]]:
    """Return what rank r sends to rank s, the same on all ranks; a third is empty."""
    largest = (10, 1000, 300_000)[seed % 3]
    random = torch.Generator().manual_seed(seed)
    found = torch.randint(-largest // 2, largest + 1, (world, world), generator=random)
    return found.clamp(min=0).tolist()


def _sent(rank: int, sizes: list[list[int]], seed: int) -> Tensor:
    random = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(0, 100, (sum(sizes[rank]),), generator=random)
    return values.to(DTYPES[seed % len(DTYPES)])


def _exchange_all(ranks: RankGroup) -> None:
    """Start exchanges of all sizes and dtypes, then wait for them in reverse order."""
    pending = []
    for seed in range(18):
        sizes = _sizes(ranks.size, seed)
        sent = [_sent(rank, sizes, seed) for rank in range(ranks.size)]
        shards = [values.split(row)[ranks.rank] for values, row in zip(sent, sizes, strict=True)]
        received_sizes = [len(shard) for shard in shards]
        own = sent[ranks.rank]
        got = start_all_to_all(own, sizes[ranks.rank], received_sizes, ranks)
        pending.append((got, torch.cat(shards)))
        gathered = start_all_gather(own, [len(values) for values in sent], ranks)
        pending.append((gathered, torch.cat(sent)))
    for got, expected in reversed(pending):
        assert torch.equal(got.wait(), expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_receives_what_was_sent(size: int) -> None:
    worlds.run(size, _exchange_all)


def _disagree_about_sizes(ranks: RankGroup) -> str:
    """Rank 0 expects fewer bytes than rank 1 sends; rank 2 has no part in it."""
    sent, sizes = torch.zeros(8 * ranks.size), [8] * ranks.size
    expected = [8, 4, 8] if ranks.rank == 0 else sizes
    with pytest.raises(RuntimeError) as raised:
        start_all_to_all(sent, sizes, expected, _of_its_own(ranks))
    return str(raised.value)


def test_sizes_that_disagree_raise_on_all_ranks() -> None:
    for message in worlds.run(3, _disagree_about_sizes):
        assert "rank 1 sent 32 bytes where rank 0 expected 16" in message
        assert "the same collectives in the same order" in message
