"""Ranks that die, stop, fail or go: what the others say of it."""

import logging
import os
import signal
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from emblib.sharding import collectives, failures
from emblib.sharding.failures import RankFailure, detect_rank_failures
from emblib.sharding.ranks import RankGroup
from tests.sharding import worlds

CULPRIT = 2
GRACE_SECONDS = 60.0  # what the others say is what is tested, however busy the machine is
QUICK = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 1.5}
# For the busy machine on which a survivor is late, and must not be named for that.
PATIENT = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 4.0}


def _train(ranks: RankGroup, steps: int = 10**9) -> None:
    """Steps of collectives, forward and backward."""
    for _ in range(steps):
        rows = torch.ones(2 * ranks.size, 3, requires_grad=True)
        collectives.reduce_scatter_base_pooled(rows, ranks).wait().sum().backward()


def _train_with_timeout(ranks: RankGroup, seconds: float) -> None:
    """Train for ever; from the fourth step on collectives wait for others only so long."""
    _train(ranks, 3)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), ranks.group)
    _train(ranks)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _told(
    ranks: RankGroup, act: str, limits: dict[str, float], seconds: float = 12.0
) -> tuple[str, tuple[int, ...]]:
    """What a rank hears when CULPRIT does `act` after three steps.

    Ranks that exchange with a survivor, which stays here, wait for the timeout of the collective:
    `seconds`, which the steps before, and the connections of the group, may exceed.
    """
    ranks = RankGroup(dist.new_group(list(range(ranks.size)), timedelta(seconds=GRACE_SECONDS)))
    if ranks.rank == CULPRIT:
        with suppress(ValueError), detect_rank_failures(ranks, **limits):
            _train(ranks, 3)
            _ACTS[act]()
        if act == "fail":
            os._exit(1)  # as any program with an uncaught error
        return act, ()
    with pytest.raises(RankFailure) as caught, detect_rank_failures(ranks, **limits):
        _train_with_timeout(ranks, seconds)
    assert isinstance(caught.value.__cause__, RuntimeError)  # that of the collective
    if _store().add("told", 1) == ranks.size - 1 and act == "stop":
        _end_stopped()
    return str(caught.value), caught.value.ranks


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    """Until `_end_stopped`, when the others have said what they think of it."""
    _store().set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def _end_stopped() -> None:
    os.kill(int(_store().get("stopped")), signal.SIGKILL)


def _fail() -> None:
    raise ValueError("a bad batch")


def _dawdle() -> None:
    """Until the three others have said what they think of it."""
    while _store().add("told", 0) < 3:
        time.sleep(0.05)


def _leave() -> None:
    pass


_ACTS = {"kill": _kill, "stop": _stop, "fail": _fail, "dawdle": _dawdle, "leave": _leave}


def _answers(function: Any, *args: Any, size: int = 4) -> dict[int, Any]:
    """Of the ranks that gave one."""
    try:
        return dict(enumerate(worlds.run(size, function, *args, grace=GRACE_SECONDS)))
    except worlds.RankError as error:
        print(error)  # pytest shows it where a test fails
        return error.answers


@pytest.mark.parametrize(
    ("act", "words"),
    [("kill", "died"), ("fail", "failed with ValueError: a bad batch")],
)
def test_the_culprit_is_named_at_once(act: str, words: str) -> None:
    answers = _answers(_told, act, QUICK)
    assert set(answers) == {0, 1, 3}
    for text, ranks in answers.values():
        assert ranks == (CULPRIT,)
        assert "rank 2 of 4 (process " in text
        assert words in text
        assert "from its last checkpoint" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("stop", "wrote no heartbeat for 4 s"),
        ("dawdle", "is alive, but did not call the collective"),
        ("leave", "had left detect_rank_failures before the others"),
    ],
)
def test_the_culprit_is_named_after_the_timeout(act: str, words: str) -> None:
    timeout = 1.0
    answers = _answers(_told, act, PATIENT, timeout)
    told = {rank: answer for rank, answer in answers.items() if answer[1]}
    assert set(told) == {0, 1, 3}
    for text, ranks in told.values():
        assert ranks == (CULPRIT,)
        assert words in text


def _store_of_rank_zero(ranks: RankGroup, port: int) -> str:
    """The process group that torch makes without torchrun: rank 0 holds its store."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        f"tcp://127.0.0.1:{port}",
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=8),
    )
    own = RankGroup()
    _train(own, 3)
    with pytest.raises(RankFailure) as caught, detect_rank_failures(own, **QUICK):
        _train(own, 3) if own.rank > 0 else _kill()
    assert caught.value.ranks == (0,)
    return str(caught.value)


def test_the_store_is_lost_with_rank_zero() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = _answers(_store_of_rank_zero, port, size=3)
    assert set(answers) == {1, 2}
    for text in answers.values():
        assert "rank 0 of all processes" in text


def _loses_the_store(ranks: RankGroup) -> tuple[int, ...]:
    """The store is lost between the search for faults and the names of the ranks at fault."""

    def name_of(rank: int) -> str:
        raise dist.DistNetworkError("lost")

    board = failures._StatusBoard(ranks, "emblib/test")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(board, "_faults", lambda timeout_s: {1: "died"})
        monkeypatch.setattr(board, "name_of", name_of)
        failure = board.find_failure(1.0)
    assert failure is not None
    assert "rank 0 of all processes, which serves the store" in str(failure)
    return failure.ranks


def _loses_the_store_in_a_group(ranks: RankGroup) -> tuple[int, ...]:
    """Rank 0 of the group is another process than the one that serves the store."""
    group = dist.new_group([1, 2])
    return _loses_the_store(RankGroup(group)) if ranks.rank else ()


def test_a_store_that_is_lost_while_faults_are_named() -> None:
    assert worlds.run(2, _loses_the_store) == [(0,)] * 2
    assert worlds.run(3, _loses_the_store_in_a_group) == [()] * 3


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _watch(ranks: RankGroup) -> list[str]:
    """No rank is in a collective when a rank stops: the previous rank reports it."""
    records = _Records()
    failures._LOG.addHandler(records)
    with detect_rank_failures(ranks, **QUICK):
        ranks.barrier()
        if ranks.rank == CULPRIT:
            time.sleep(0.5)  # its part of the barrier may still be on its way
            _stop()
        end = time.monotonic() + 20
        while not records.texts and ranks.rank == CULPRIT - 1 and time.monotonic() < end:
            time.sleep(0.05)
        if ranks.rank == CULPRIT - 1:
            _end_stopped()
    return records.texts


@pytest.mark.slow
def test_a_silent_rank_is_logged() -> None:
    answers = _answers(_watch, size=3)
    assert answers[0] == []
    (text,) = answers[1]
    assert "rank 2 of 3 (process " in text
    assert "has written no heartbeat for " in text


def _nobody(ranks: RankGroup) -> list[str]:
    with (
        pytest.raises(RuntimeError, match="by our own doing") as caught,
        detect_rank_failures(ranks, **QUICK),
    ):
        raise RuntimeError("gloo: by our own doing")
    with pytest.raises(KeyError), detect_rank_failures(ranks, **QUICK):
        raise KeyError("as before")
    with detect_rank_failures(ranks, **QUICK), detect_rank_failures(ranks, **QUICK):
        _train(ranks, 2)
    return caught.value.__notes__


def test_nobody_at_fault() -> None:
    for notes in worlds.run(3, _nobody):
        assert notes == [notes[0]]
        assert "no rank is at fault by itself" in notes[0]


def test_which_errors_are_of_a_collective() -> None:
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert failures.is_collective_error(closed)
    assert failures.is_collective_error(dist.DistBackendError("any"))
    assert not failures.is_collective_error(RuntimeError("mat1 and mat2 cannot be multiplied"))
    assert not failures.is_collective_error(ValueError("gloo"))
    wrapped = ValueError("in my loop")
    wrapped.__cause__ = closed
    assert failures.is_collective_error(wrapped)


def test_a_process_nobody_waited_for_is_gone() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        end = time.monotonic() + 10
        while not failures.has_ended(child) and time.monotonic() < end:
            time.sleep(0.01)
        assert failures.has_ended(child)
    finally:
        os.waitpid(child, 0)
    assert failures.has_ended(child)
    assert not failures.has_ended(os.getpid())


def test_one_rank_and_wrong_use() -> None:
    with pytest.raises(RuntimeError, match="gloo"), detect_rank_failures(RankGroup.single()):
        raise RuntimeError("gloo")
    with pytest.raises(
        ValueError, match=r"at least two heartbeat intervals, got 1\.0 s and intervals of 1\.0 s"
    ):
        detect_rank_failures(RankGroup.single(), heartbeat_interval_s=1.0, heartbeat_timeout_s=1.0)
