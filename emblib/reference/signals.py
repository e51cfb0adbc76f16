"""Signals between processes, as `emblib.ops.signals` describes them."""

import time

from torch import Tensor


def signal_set_(words: Tensor, at: int, value: int) -> None:
    """The word is `value` from now on."""
    words[at] = value


def signal_wait(words: Tensor, at: int, least: int, seconds: float) -> int:
    """The word, once it is large enough or there was no more time."""
    end = time.monotonic() + seconds
    while int(words[at]) < least and time.monotonic() < end:
        time.sleep(1e-4)
    return int(words[at])
