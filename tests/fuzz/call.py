"""A call of an op: valid arguments, and a check of what became of them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
Check = Callable[[Arguments, Any], None]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Call:
    """Valid arguments of an op; `check` raises unless arguments and result are right afterwards."""

    op: str
    arguments: Arguments
    check: Check


def close(got: Tensor, want: Tensor) -> None:
    """Equal up to rounding in the dtype of `got` and the order of sums."""
    room = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(got.dtype, 3e-4)
    torch.testing.assert_close(got, want.to(got.dtype), rtol=room, atol=room)


def same(got: Tensor, want: Tensor) -> None:
    """Equal as numbers."""
    assert got.tolist() == want.tolist()


def drawn_seed(draw: random.Random) -> int:
    """For torch's generators."""
    return draw.randrange(2**31)
