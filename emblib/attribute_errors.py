"""Decorator for properties of modules, whose AttributeErrors `nn.Module` would replace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

_M = TypeVar("_M")
_R = TypeVar("_R")


def shows_attribute_errors(getter: Callable[[_M], _R]) -> Callable[[_M], _R]:
    """Wrap the getter of a property so that an AttributeError in it becomes a RuntimeError.

    When a property raises AttributeError, Python calls `__getattr__` instead. `nn.Module` then
    reports that the property itself does not exist, and the real error is lost. Put this decorator
    below `property` or `cached_property` where a getter of a module does more than return a field.
    `hasattr`, and `getattr` with a default, raise this RuntimeError too.

    Example:
        >>> from emblib.attribute_errors import shows_attribute_errors
        >>> class Model(torch.nn.Module):
        ...     @property
        ...     @shows_attribute_errors
        ...     def rows(self) -> int:
        ...         return self.tabel.rows
        >>> Model().rows
        Traceback (most recent call last):
        RuntimeError: Model.rows raised AttributeError: 'Model' object has no attribute 'tabel'
    """

    @functools.wraps(getter)
    def wrapped_getter(module: _M) -> _R:
        try:
            return getter(module)
        except AttributeError as error:
            name = f"{type(module).__name__}.{getter.__name__}"
            raise RuntimeError(f"{name} raised AttributeError: {error}") from error

    return wrapped_getter
