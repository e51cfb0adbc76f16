"""An extension of griffe, which makes docstrings fit the documentation site.

Examples and tables become code, and attributes that are functions become methods.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_TABLE = re.compile(r"^=+(?: +=+)+ *$\n(?:.*\S.*\n?)*", re.MULTILINE)
_OWNER = re.compile(r"^ +state: .*\n(?: {8,}.*\n?)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    """An extension of griffe that changes docstrings and members before they are shown.

    griffe shows a section of doctests as code if its name is "Examples". It takes "Example" for a
    remark, whose `>>>` Markdown then turns into quotations. Tables of reStructuredText are no
    Markdown. Methods that a class has by `size = functions.size` would be attributes without a
    docstring.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Name sections of examples "Examples", and put tables into blocks of code."""
        if obj.docstring:
            text = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = _TABLE.sub(
                lambda table: f"```text\n{table[0].rstrip()}\n```\n", text
            )

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Make attributes that are functions of another module methods of their class."""
        modules = [pkg]
        while modules:
            module = modules.pop()
            modules += [member for member in module.modules.values() if not member.is_alias]
            for owner in module.classes.values():
                if not owner.is_alias:
                    for name, attribute in list(owner.attributes.items()):
                        _make_method(owner, name, attribute)


def _make_method(owner: griffe.Class, name: str, attribute: griffe.Attribute) -> None:
    """Replace an attribute without a docstring by a method, if its value is a function."""
    value = attribute.value
    if attribute.docstring or not isinstance(value, griffe.ExprAttribute):
        return
    try:
        function = owner.modules_collection[value.canonical_path]
    except KeyError:
        return
    if not function.is_function or not function.docstring:
        return
    parameters = [
        parameter for parameter in function.parameters if parameter.name not in ("self", "state")
    ]
    method = griffe.Function(
        name,
        parameters=griffe.Parameters(griffe.Parameter("self"), *parameters),
        returns=function.returns,
        lineno=attribute.lineno,
        endlineno=attribute.endlineno,
        parent=owner,
    )
    text = _OWNER.sub("", function.docstring.value)
    text = re.sub(r"^Args:\n(?=\n|\Z)", "", text, flags=re.MULTILINE)
    method.docstring = griffe.Docstring(
        text,
        parent=method,
        parser=function.docstring.parser,
        parser_options=function.docstring.parser_options,
    )
    owner.members[name] = method
