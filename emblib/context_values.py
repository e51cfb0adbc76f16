"""The value of a context variable for one call, restored however the call ends."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def with_value(variable: ContextVar[_T], value: _T, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that calls another one while a context variable has a value.

    The variable must have a value or a default. However the call ends, even by a signal, it is then
    as before. A context manager does not ensure this: a signal that is handled as it is entered or
    left keeps the value for the rest of the process. See `emblib.grad_mode.in_grad_mode`.

    Example:
        >>> from contextvars import ContextVar
        >>> from emblib.context_values import with_value
        >>> depth = ContextVar("depth", default=0)
        >>> with_value(depth, 1, depth.get)(), depth.get()
        (1, 0)
    """

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        previous_value = variable.get()
        try:
            variable.set(value)
            return function(*args, **kwargs)
        finally:
            variable.set(previous_value)

    return call
