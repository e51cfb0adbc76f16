"""Nested dicts and lists of tensors in a directory, whole or absent, byte for byte; their checks.

The functions that check raise ValueError where a part of a snapshot is not what a module takes.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
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


def check_entries(name: str, tree: Any, wanted: Collection[str]) -> Mapping[str, Any]:
    """Return `tree`; raise ValueError unless it is a dict with the `wanted` entries."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{name} must be a dict, got {type(tree).__name__}")
    if missing := sorted(set(wanted) - tree.keys()):
        raise ValueError(f"{name} lacks {missing}")
    return tree


def check_list(name: str, tree: Any, length: int, of: str) -> Sequence[Any]:
    """Return `tree`; raise ValueError unless it is a list of one entry for each of something."""
    if not isinstance(tree, list | tuple) or len(tree) != length:
        found = len(tree) if isinstance(tree, list | tuple) else type(tree).__name__
        raise ValueError(f"{name} must be a list of {length}, one per {of}, got {found}")
    return tree


def check_presence(name: str, tree: Any, own: Any) -> None:
    """Raise ValueError unless a snapshot and a module both have something, or neither has it."""
    if (tree is None) != (own is None):
        theirs, ours = ("none" if each is None else "some" for each in (tree, own))
        raise ValueError(f"{name}: there is {theirs} in the snapshot, {ours} in this module")


def check_tensor(name: str, value: Any, dtype: torch.dtype, shape: Sequence[int | None]) -> Tensor:
    """Return `value`; raise ValueError unless it is a tensor of a dtype and shape.

    None is any size. What restores a snapshot writes the tensor to one of equal dtype and shape.
    """
    found = type(value).__name__
    if isinstance(value, Tensor):
        fits = value.dtype == dtype and value.dim() == len(shape)
        sizes = zip(shape, value.shape, strict=False)
        if fits and all(want in (size, None) for want, size in sizes):
            return value
        found = f"{value.dtype} {list(value.shape)}"
    raise ValueError(
        f"{name} must be {dtype} {list(shape)}, got {found}; it is of other tables, of another "
        "optimizer or precision, or damaged"
    )


def check_state(name: str, state: Any, wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a state dict has exactly the `wanted` keys, dtypes and shapes."""
    check_entries(name, state, wanted)
    if unknown := sorted(state.keys() - wanted.keys()):
        raise ValueError(f"{name} has {unknown}, which this module has not")
    for key, tensor in wanted.items():
        check_tensor(f"{name}.{key}", state[key], tensor.dtype, tensor.shape)
