"""Graph breaks that do not import the compiler of torch, and whether torch.export runs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def is_in_export() -> bool:
    """Return whether `torch.export` runs.

    `torch.compiler.is_exporting` of torch 2.10 is also true in every graph of `torch.compile`.
    """
    return torch.compiler._is_exporting_flag


def can_read_numbers() -> bool:
    """Return whether the graph that is being traced may read numbers from tensors.

    It may with fullgraph=True or `torch._dynamo.config.capture_scalar_outputs`; else it breaks. The
    numbers have no values while the graph is traced.
    """
    from emblib.tables import disabled_call

    return disabled_call.can_read_numbers()


def run_uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function so that it runs uncompiled, without importing the compiler.

    This decorator has the effect of `torch.compiler.disable`: in a function compiled with
    fullgraph=True the call raises. But `disable` imports the compiler, which takes longer than all
    other imports of emblib together. A program that has not imported the compiler compiles nothing,
    so nothing needs to be disabled.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            from emblib.tables import disabled_call

            return disabled_call.call_uncompiled(function, *args, **kwargs)
        return function(*args, **kwargs)

    _skip_own_frames(call)
    return call


def _skip_own_frames(function: Any) -> None:
    """Let the compiler run a frame of `function` as it is, but trace it as part of a caller.

    All wrapped functions have one code object. The compiler would compile its frames once per
    wrapped function, and soon warn of too many recompilations.
    """
    # Of torch: `torch.compiler` has no such function, and its private one imports the compiler.
    with contextlib.suppress(AttributeError):  # another torch, which may warn
        frames: Any = torch._C._dynamo.eval_frame  # noqa: SLF001
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT  # noqa: SLF001
        strategy = frames._FrameExecStrategy(skip, default)  # noqa: SLF001
        frames.set_code_exec_strategy(function.__code__, strategy)
