"""Errors inside properties of modules, which `nn.Module.__getattr__` would hide."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

_M = TypeVar("_M")
_R = TypeVar("_R")


def shows_attribute_errors(getter: Callable[[_M], _R]) -> Callable[[_M], _R]:
    """Return the getter of a property that raises RuntimeError for an AttributeError inside.

    Python calls `__getattr__` after a property that raised AttributeError, and that of `nn.Module`
    says that the module has no such property, whatever was missing. Getters of modules that call
    functions or methods of emblib need this decorator, below `property` or `cached_property`.

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
    def get(module: _M) -> _R:
        try:
            return getter(module)
        except AttributeError as error:
            name = f"{type(module).__name__}.{getter.__name__}"
            raise RuntimeError(f"{name} raised AttributeError: {error}") from error

    return get
