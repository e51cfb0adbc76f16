"""Gradients off for a function, and back on however it ends."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_gradients(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function without gradients, as `torch.no_grad` does, safely under Ctrl-C.

    `torch.no_grad` enters and leaves in Python: a signal that is handled there leaves gradients
    disabled for the rest of the process, and training goes on without updates. Here a signal comes
    inside the `try` or after gradients are as before, because Python handles signals only between
    calls. It is for functions that return a value, not for generators.

    Example:
        >>> from emblib.tables.grad_mode import without_gradients
        >>> without_gradients(torch.is_grad_enabled)(), torch.is_grad_enabled()
        (False, True)
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        was_enabled = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # noqa: SLF001 (a module of torch)
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(was_enabled)  # noqa: SLF001 (a module of torch)

    return call
