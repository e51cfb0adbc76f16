"""Signals between processes: int64 words `[N]` of CPU memory that they share.

`signal_set_(words, at, value)` sets `words[at]`, after everything that this process wrote before,
and wakes those who wait for it. `signal_wait(words, at, least, seconds) -> int` returns the word as
soon as it is `least` or more, and whatever it is after `seconds`, which may be 0; what was written
before it was set may then be read. Words only ever grow. On Linux who waits sleeps (a futex), after
20 microseconds in which the answer often comes; elsewhere it looks every 100.

Raises RuntimeError if `words` is not int64 `[N]` in one piece, `at` is none of them, or `seconds`
is negative. The definition is `emblib.reference.signals`.
"""

import torch
from torch import Tensor

signal_set_ = torch.ops.emblib.signal_set_.default
signal_wait = torch.ops.emblib.signal_wait.default


@torch.library.register_fake("emblib::signal_set_")
def _(words: Tensor, at: int, value: int) -> None:
    return None


@torch.library.register_fake("emblib::signal_wait")
def _(words: Tensor, at: int, least: int, seconds: float) -> int:
    return least
