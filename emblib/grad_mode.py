"""The gradient mode for one call, restored however the call ends."""

from __future__ import annotations  # the compiler cannot guard annotations of inner functions

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C import DisableTorchFunction as _DisableTorchFunction
from torch._C import _set_grad_enabled

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_grad_mode(function: Callable[_P, _R], *, enabled: bool) -> Callable[_P, _R]:
    """Return a function that calls another one with gradients enabled or disabled.

    However the call ends, the mode is then as before. `torch.no_grad` and `torch.enable_grad` do
    not ensure this, because they enter and leave in Python. If a signal is handled in between, the
    changed mode stays for the rest of the process; e.g. training continues without updates.

    Here a C call sets the mode. Python handles signals only between calls, so a signal comes inside
    the `try`, or after the mode is as before. The C call bypasses the function modes of
    `torch.device(...)` and `torch.set_default_device`, which are Python. `function` must not be a
    generator.

    Example:
        >>> from emblib.grad_mode import in_grad_mode
        >>> in_grad_mode(torch.is_grad_enabled, enabled=False)(), torch.is_grad_enabled()
        (False, True)
    """

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        was_enabled = torch.is_grad_enabled()
        entering, leaving = _DisableTorchFunction(), _DisableTorchFunction()  # each is used once
        try:
            with entering:
                _set_grad_enabled(enabled)
            return function(*args, **kwargs)
        finally:
            with leaving:
                _set_grad_enabled(was_enabled)

    return call


def without_gradients(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function to run without gradients; see `in_grad_mode`."""
    return functools.wraps(function)(in_grad_mode(function, enabled=False))
