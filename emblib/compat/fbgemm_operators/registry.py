"""The operators of namespace `fbgemm`: a table of schemas and implementations, and registration.

Every implementation is made of operators of PyTorch and emblib and registered as
`CompositeImplicitAutograd`: for all devices at once, with the gradients and the meta kernels of
what it calls.
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
"""Annotation of an argument that may be symbolic in a traced graph."""

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
    """Enter the decorated function into `OPERATORS`.

    Args:
        schema: name of the operator, whose schema is then made of the function's annotations; or
            a whole schema.
        writes: names of the tensors that the operator may change, up to 4, separated by spaces;
            without effect if `schema` is a whole one.
    """

    def enter(function: _Function) -> _Function:
        full_schema = schema if "(" in schema else schema + _schema_of(function, writes.split())
        OPERATORS[full_schema.partition("(")[0]] = (full_schema, function)
        return function

    return enter


def _schema_of(function: Callable[..., Any], writes: Sequence[str]) -> str:
    """Return arguments and results of a schema, made of the annotations of a function."""
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
    inner = [_type_text(kind) for kind in get_args(annotation) if kind is not NoneType]
    if get_origin(annotation) is tuple:
        return f"({', '.join(inner)})"
    return inner[0] + ("?" if get_origin(annotation) in (Union, UnionType) else "[]")


def is_registered() -> bool:
    """Return whether `register` was called in this process."""
    return bool(_libraries)


def foreign_operators() -> list[str]:
    """Return the names in the table that other code registered with PyTorch; [] after `register`.

    An installed FBGEMM is such code.
    """
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
