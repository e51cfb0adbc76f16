"""Gradients off for a function, and back on however it ends."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C import DisableTorchFunction as _DisableTorchFunction
from torch._C import _set_grad_enabled

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_gradients(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function without gradients, as `torch.no_grad` does, safely under Ctrl-C.

    `torch.no_grad` enters and leaves in Python: a signal that is handled there leaves gradients
    disabled for the rest of the process, and training goes on without updates. Here a signal comes
    inside the `try` or after gradients are as before, because Python handles signals only between
    calls, and the mode is set in C: without the function modes of `torch.device(...)` and
    `torch.set_default_device`, which are Python. It is for functions that return a value, not for
    generators.

    Example:
        >>> from emblib.tables.grad_mode import without_gradients
        >>> without_gradients(torch.is_grad_enabled)(), torch.is_grad_enabled()
        (False, True)
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        was_enabled = torch.is_grad_enabled()
        in_c, again_in_c = _DisableTorchFunction(), _DisableTorchFunction()
        try:
            with in_c:
                _set_grad_enabled(False)
            return function(*args, **kwargs)
        finally:
            with again_in_c:
                _set_grad_enabled(was_enabled)

    return call
