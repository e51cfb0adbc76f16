"""Docstrings of the documentation site: examples and tables keep their lines."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_TABLE = re.compile(r"^=+(?: +=+)+ *$\n(?:.*\S.*\n?)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrite docstrings to what griffe shows as code.

    It knows a section of doctests as "Examples", and takes "Example" for a remark, whose `>>>`
    Markdown then turns into quotations. Tables of reStructuredText are no Markdown.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Name the section of examples as griffe does, and fence tables."""
        if obj.docstring:
            text = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
            obj.docstring.value = _TABLE.sub(
                lambda table: f"```text\n{table[0].rstrip()}\n```\n", text
            )
