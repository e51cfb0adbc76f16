"""The table of the operators of namespace `fbgemm`, and their registration with PyTorch.

Every implementation calls operators of PyTorch and emblib only. It is registered as
`CompositeImplicitAutograd`, for all devices at once: gradients and meta kernels are those of the
operators that it calls.
"""

import inspect
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

NAMESPACE = "fbgemm"
_Function = TypeVar("_Function", bound=Callable[..., Any])

OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {}
"""Schema and implementation of each operator, by its name."""

SymInt = Annotated[int, "SymInt"]
"""Annotation of an int argument that is symbolic in a traced graph: `SymInt` in the schema."""

_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    SymInt: "SymInt",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    torch.device: "Device",
    torch.dtype: "ScalarType",
    None: "()",
}

_libraries: list[torch.library.Library] = []


def operator(schema: str, writes: str = "") -> Callable[[_Function], _Function]:
    """Return a decorator that enters a function into `OPERATORS` and returns it unchanged.

    Args:
        schema: name of the operator; the rest of its schema follows from the annotations of the
            function. Or a whole schema, `name(arguments) -> results`.
        writes: names of up to 4 tensors that the operator may change, separated by spaces; ignored
            with a whole schema.
    """

    def enter(function: _Function) -> _Function:
        full_schema = schema if "(" in schema else schema + _schema_of(function, writes.split())
        OPERATORS[full_schema.partition("(")[0]] = (full_schema, function)
        return function

    return enter


def _schema_of(function: Callable[..., Any], writes: Sequence[str]) -> str:
    """Return `(arguments) -> results` of a schema, by the annotations of a function."""
    signature = inspect.signature(function)
    arguments = []
    for name, parameter in signature.parameters.items():
        type_text = _type_text(parameter.annotation)
        if name in writes:
            type_text = type_text.replace("Tensor", f"Tensor({'abcd'[writes.index(name)]}!)")
        default = parameter.default
        arguments.append(
            f"{type_text} {name}" + ("" if default is parameter.empty else f"={default}")
        )
    return f"({', '.join(arguments)}) -> {_type_text(signature.return_annotation)}"


def _type_text(annotation: Any) -> str:
    if annotation in _TYPES:
        return _TYPES[annotation]
    inner_types = [_type_text(kind) for kind in get_args(annotation) if kind is not NoneType]
    if get_origin(annotation) is tuple:
        return f"({', '.join(inner_types)})"
    return inner_types[0] + ("?" if get_origin(annotation) in (Union, UnionType) else "[]")


def is_registered() -> bool:
    """Return whether `register` was called in this process."""
    return bool(_libraries)


def foreign_operators() -> list[str]:
    """Return the names in `OPERATORS` that other code, such as FBGEMM, registered with PyTorch.

    After `register` the result is [].
    """
    if is_registered():
        return []
    return sorted(name for name in OPERATORS if hasattr(getattr(torch.ops, NAMESPACE), name))


def register() -> None:
    """Register `OPERATORS` with PyTorch, for the rest of the process; do so only once."""
    if is_registered():
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, (schema, function) in OPERATORS.items():
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CompositeImplicitAutograd")
    _libraries.append(library)
