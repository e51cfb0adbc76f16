"""What `emblib.tables.graph_break` needs of torch's compiler.

Importing this file loads the compiler, because of the decorators. So `graph_break` imports it only
when a program has loaded the compiler itself.
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


@torch.compiler.assume_constant_result
def can_read_numbers() -> bool:
    """Return whether the graph being traced may read numbers; Dynamo calls it while it traces."""
    fake_mode = torch._guards.TracingContext.get().fake_mode  # noqa: SLF001
    shape_env = None if fake_mode is None else fake_mode.shape_env
    return shape_env is not None and bool(shape_env.allow_scalar_outputs)
