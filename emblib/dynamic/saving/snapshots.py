"""Nested dicts and lists of tensors in a directory, whole or absent, byte for byte."""

from pathlib import Path
from typing import Any

from torch import Tensor

from emblib.dynamic.saving.dumps import DumpError, PartReader, Writer, field, read_parts


def write(directory: str | Path, tree: Any) -> None:
    """Write a tree; the directory then holds all of it, or what it held before."""
    with Writer(directory) as writer:
        written = _write(writer, tree)
        writer.commit({"identity": "snapshot", "tree": written})


def _write(writer: Writer, tree: Any) -> Any:
    if isinstance(tree, dict):
        return {"dict": {name: _write(writer, branch) for name, branch in tree.items()}}
    if isinstance(tree, list):
        return {"list": [_write(writer, branch) for branch in tree]}
    if tree is None:
        return {"none": None}
    assert isinstance(tree, Tensor)
    with writer.array(tree.dtype, tuple(tree.shape)) as array:
        array.append(tree)
    return {"tensor": array.description}


def read(directory: str | Path) -> Any:
    """The tree that a directory holds; its tensors are mapped, private copies of the files.

    Raises:
        DumpError: there is none, or it is damaged, or it is a dump of another kind.
    """
    part = read_parts(directory)[0]
    if "tree" not in part.content:
        raise DumpError(f"{directory} holds a dump of entries, not a snapshot; use load_dump")
    part.verify()
    return _read(part, part.content["tree"])


def _read(part: PartReader, tree: Any) -> Any:
    kind = next(iter(tree)) if isinstance(tree, dict) and len(tree) == 1 else ""
    if kind == "dict":
        branches = field(part.path, tree, kind, dict)
        return {name: _read(part, branch) for name, branch in branches.items()}
    if kind == "list":
        return [_read(part, branch) for branch in field(part.path, tree, kind, list)]
    if kind == "none":
        return None
    return part.array(field(part.path, tree, "tensor", dict))
