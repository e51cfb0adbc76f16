"""Words that processes share: set by one, awaited by others."""

import mmap
import os
import time

import pytest
import torch
from torch import Tensor

from emblib.ops.signals import signal_set_, signal_wait
from emblib.reference import signals as reference


def _shared_words(count: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, 8 * count), dtype=torch.int64)


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


@pytest.mark.parametrize("first", [0, 2**32 - 2])
def test_another_process_wakes_who_waits(first: int) -> None:
    """Each answers the other: a lost wake-up would end in the timeout."""
    words = _shared_words(2)
    words[:] = first
    rounds = 2000
    child = os.fork()
    if child == 0:
        ok = True
        for n in range(first + 1, first + rounds + 1):
            ok &= signal_wait(words, 0, n, 60.0) == n
            signal_set_(words, 1, n)
        os._exit(0 if ok else 1)
    found = []
    for n in range(first + 1, first + rounds + 1):
        if n % 500 == 0:
            time.sleep(0.002)  # long enough for the other to fall asleep
        signal_set_(words, 0, n)
        found.append(signal_wait(words, 1, n, 60.0))
    assert os.waitpid(child, 0)[1] == 0
    assert found == list(range(first + 1, first + rounds + 1))


def test_what_was_written_before_is_seen() -> None:
    words, data = _shared_words(2), _shared_words(100_000)
    child = os.fork()
    if child == 0:
        ok = True
        for n in range(1, 50):
            ok &= signal_wait(words, 0, n, 60.0) == n and bool((data == n).all())
            signal_set_(words, 1, n)
        os._exit(0 if ok else 1)
    for n in range(1, 50):
        data.fill_(n)
        signal_set_(words, 0, n)
        signal_wait(words, 1, n, 60.0)
    assert os.waitpid(child, 0)[1] == 0


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
