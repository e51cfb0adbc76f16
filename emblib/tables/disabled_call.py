"""The call that breaks a compiled graph, for `emblib.tables.graph_break.run_uncompiled`.

It has a file of its own, since its decorator loads torch's compiler when the file is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


@torch.compiler.disable
def call(function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function, and all functions that it calls, uncompiled."""
    return function(*args, **kwargs)
