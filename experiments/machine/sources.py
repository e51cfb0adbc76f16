"""Digests of the code that a measurement depends on, which say later whether it has changed.

A digest is of what the compiler or the interpreter sees: comments, docstrings and the layout of the
text do not count. There is one per area and kind of device, so that a change of a CUDA kernel does
not age a measurement on a CPU, nor a change of tensor trains one of dense tables. They are compared
without git: in an archive of the sources, or a clone without history, they are the same.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from experiments.paths import ROOT

# Area -> folders and files of the code that only its measurements depend on; all depend on those of
# BASE, but not on files that an area names. Files named __init__.py only say what is exported.
AREAS = {
    "dense tables": ("csrc/tbe", "emblib/tables"),
    "tensor trains": ("csrc/tt", "emblib/tt"),
    "hash tables": ("csrc/hash", "emblib/dynamic"),
    "caches": ("csrc/cache",),
    "quantised tables": ("csrc/quant", "emblib/ops/quant.py", "emblib/tables/quantized.py"),
    "sharding": ("csrc/route", "emblib/sharding"),
}
BASE = (
    "csrc/core",
    "csrc/group",
    "csrc/memory",
    "csrc/optim",
    "csrc/random",
    "emblib/ops",
    "emblib/optim",
)
OF_DEVICE = {"cpu": ("_cpu.cpp", "_kernels.cpp"), "cuda": (".cu", ".cuh")}
SUFFIXES = (".py", ".h", ".cpp", ".cu", ".cuh")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\\n])*\")", re.DOTALL)


def digests(device: str, root: Path = ROOT) -> dict[str, str]:
    """Return the digest of each area for a kind of device; empty without the sources."""
    if not (root / "csrc").is_dir():
        return {}
    return {area: _digest(device, root, (*BASE, *own)) for area, own in AREAS.items()}


def _digest(device: str, root: Path, folders: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for path in _files(device, root, folders):
        digest.update(f"{path.relative_to(root).as_posix()}\0{_code(path)}\0".encode())
    return digest.hexdigest()


@functools.cache
def _code(path: Path) -> str:
    return (python_code if path.suffix == ".py" else cpp_code)(path.read_text())


def _files(device: str, root: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    others = tuple(end for kind, ends in OF_DEVICE.items() if kind != device for end in ends)
    named = {root / name for area in AREAS.values() for name in area}
    for folder in folders:
        yield from (path for path in (root / folder,) if path.is_file())
        for path in sorted((root / folder).rglob("*")):
            is_code = path.suffix in SUFFIXES and path.name != "__init__.py"
            if is_code and not path.name.endswith(others) and path not in named:
                yield path


def python_code(source: str) -> str:
    """Return a module without comments and docstrings, in one layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def cpp_code(source: str) -> str:
    """Return C++ without comments, all white space as single spaces; strings stay as they are."""
    return " ".join(_COMMENT.sub(lambda match: match[1] or " ", source).split())
