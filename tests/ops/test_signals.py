"""Words that processes share: set by one, awaited by others."""

import mmap
import struct
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emblib.ops.signals import signal_set_, signal_wait
from emblib.reference import signals as reference
from emblib.sharding.groups_of_ranks import Ranks
from tests.sharding import worlds


def _words_of(path: Path) -> Tensor:
    """The words of a file, shared by all processes that map it."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.int64)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("value", [1, 5, 2**31, 2**40 + 7])
def test_matches_the_reference(at: int, value: int) -> None:
    words, expected = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    signal_set_(words, at, value)
    reference.signal_set_(expected, at, value)
    assert torch.equal(words, expected)
    for least in (0, value, value + 1):
        seconds = 0.01 if least > value else 0.0
        found = signal_wait(words, at, least, seconds)
        assert found == reference.signal_wait(expected, at, least, seconds) == value


def _ping_pong(ranks: Ranks, path: Path, first: int) -> bool:
    words, right = _words_of(path), True
    for n in range(first + 1, first + 2001):
        if ranks.rank == 0:
            if n % 500 == 0:
                time.sleep(0.002)  # long enough for the other to fall asleep
            signal_set_(words, 0, n)
        right &= signal_wait(words, 1 - ranks.rank, n, 60.0) == n
        if ranks.rank == 1:
            signal_set_(words, 1, n)
    return right


@pytest.mark.parametrize("first", [0, 2**32 - 1000])
def test_another_process_wakes_who_waits(first: int, tmp_path: Path) -> None:
    """Each answers the other: a lost wake-up would end in the timeout."""
    path = tmp_path / "words"
    path.write_bytes(struct.pack("=2q", first, first))
    assert worlds.run(2, _ping_pong, path, first) == [True, True]


def _read_what_was_written(ranks: Ranks, path: Path) -> bool:
    words, right = _words_of(path), True
    signals, data = words[:2], words[2:]
    for n in range(1, 100):
        if ranks.rank == 0:
            data.fill_(n)
            signal_set_(signals, 0, n)
            right &= signal_wait(signals, 1, n, 60.0) == n
        else:
            right &= signal_wait(signals, 0, n, 60.0) == n and bool((data == n).all())
            signal_set_(signals, 1, n)
    return right


def test_what_was_written_before_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_bytes(bytes(8 * 100_002))
    assert worlds.run(2, _read_what_was_written, path) == [True, True]


def test_opcheck() -> None:
    words = torch.ones(2, dtype=torch.int64)
    torch.library.opcheck(signal_set_, (words, 1, 5))
    torch.library.opcheck(signal_wait, (words, 0, 1, 0.0))


@pytest.mark.parametrize(
    ("words", "at", "seconds", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), 0, 0.0, r"words must be int64 \[N\].*got int32"),
        (torch.zeros(2, 2, dtype=torch.int64), 0, 0.0, "of 2 dimensions"),
        (torch.zeros(4, dtype=torch.int64)[::2], 0, 0.0, "contiguous"),
        (torch.zeros(2, dtype=torch.int64), 2, 0.0, "a word of the 2 there are, got 2"),
        (torch.zeros(0, dtype=torch.int64), 0, 0.0, "a word of the 0 there are, got 0"),
        (torch.zeros(2, dtype=torch.int64), -1, 0.0, "got -1"),
        (torch.zeros(2, dtype=torch.int64), 0, -1.0, "seconds must be 0 to a million"),
    ],
)
def test_wrong_use(words: Tensor, at: int, seconds: float, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        signal_wait(words, at, 0, seconds)
    if seconds == 0.0:
        with pytest.raises(RuntimeError, match=message):
            signal_set_(words, at, 1)
