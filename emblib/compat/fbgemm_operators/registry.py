"""The operators of namespace `fbgemm`: a table of schemas and implementations, and registration.

Every implementation is made of operators of PyTorch and emblib and registered as
`CompositeImplicitAutograd`: for all devices at once, with the gradients and the meta kernels of
what it calls.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

NAMESPACE = "fbgemm"
_Function = TypeVar("_Function", bound=Callable[..., Any])

OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {}
"""Schema and implementation of each operator, by its name."""

_libraries: list[torch.library.Library] = []


def operator(schema: str) -> Callable[[_Function], _Function]:
    """Enter the decorated function into the table under `schema`."""

    def enter(function: _Function) -> _Function:
        OPERATORS[schema.partition("(")[0]] = (schema, function)
        return function

    return enter


def is_registered() -> bool:
    """Return whether `register` was called in this process."""
    return bool(_libraries)


def foreign() -> list[str]:
    """Return the operators of the table that something else has registered."""
    if is_registered():
        return []
    return sorted(name for name in OPERATORS if hasattr(getattr(torch.ops, NAMESPACE), name))


def register() -> None:
    """Register the table with PyTorch, for the rest of the process; a second call does nothing."""
    if is_registered():
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, (schema, function) in OPERATORS.items():
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CompositeImplicitAutograd")
    _libraries.append(library)
