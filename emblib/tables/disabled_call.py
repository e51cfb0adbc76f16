"""The call that breaks a compiled graph, for `emblib.tables.graph_break.run_uncompiled`.

Importing this file loads torch's compiler, because of the decorator. So `run_uncompiled` imports it
only when a program has loaded the compiler itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


@torch.compiler.disable
def call_uncompiled(function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function, and all functions that it calls, uncompiled."""
    return function(*args, **kwargs)
