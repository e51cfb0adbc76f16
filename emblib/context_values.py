"""Values of context variables and attributes for one call, restored however the call ends."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from operator import call as call_it
from typing import Any, ParamSpec, TypeVar

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


def with_attribute(
    name: str, values: Mapping[Any, Any], function: Callable[_P, _R]
) -> Callable[_P, _R]:
    """Return a function that calls another one while objects have an attribute of their own.

    However the call ends, even by a signal, the objects then have the attribute as before: one call
    of C code restores all of them.

    Args:
        name: name of the attribute.
        values: value of the attribute of each object.
        function: function to call.

    Example:
        >>> from emblib.context_values import with_attribute
        >>> model = torch.nn.Linear(1, 1)
        >>> with_attribute("forward", {model: torch.neg}, model)(torch.ones(1)), vars(model).keys()
        ... # doctest: +ELLIPSIS
        (tensor([-1.]), dict_keys(['training', ...]))
    """

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        attributes_and_values = [(vars(owner), value) for owner, value in values.items()]
        restoring_calls: list[Callable[[], Any]] = [
            partial(attributes.__setitem__, name, attributes[name])
            if name in attributes
            else partial(attributes.pop, name, None)
            for attributes, _ in attributes_and_values
        ]
        restore = map(call_it, restoring_calls)
        try:
            for attributes, value in attributes_and_values:
                attributes[name] = value
            return function(*args, **kwargs)
        finally:
            list(restore)

    return call
