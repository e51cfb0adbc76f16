"""A break in a compiled graph; importing this loads torch's compiler, see `graph_break`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


@torch.compiler.disable
def call(function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call it uncompiled, and all that it calls."""
    return function(*args, **kwargs)
