"""Digests of the code that a measurement depends on: they show later whether it has changed.

A digest covers what the compiler or the interpreter sees, without comments, docstrings and layout.
Each area of the code has a digest per kind of device. So a changed CUDA kernel does not outdate CPU
measurements, and changed tensor trains do not outdate measurements of dense tables. Digests need no
git, so archives and clones without history have the same digests. Stored references contain
digests: another way to compute them would make every reference look outdated.

Parsing all sources takes a second. To save that second, CACHE_FILE maps hashes of the files' bytes
to digests: a run hashes the files, and parses them only after a change.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from experiments.paths import ROOT

# Area -> folders and files on which only measurements of the area depend. All measurements depend
# on BASE, without the files in it that an area names. Files named __init__.py do not count, because
# they only state what is exported.
AREAS = {
    "dense tables": ("csrc/tbe", "emblib/tables"),
    "tensor trains": (
        "csrc/tt",
        "emblib/tt",
        *(f"emblib/ops/{name}.py" for name in ("tt", "tt_fakes", "tt_layout")),
        *(f"emblib/tables/{name}.py" for name in ("tt", "tt_calls", "tt_svd")),
    ),
    "hash tables": ("csrc/hash", "emblib/dynamic", "emblib/ops/hash.py"),
    "caches": (
        "csrc/cache",
        "emblib/ops/cache.py",
        *(f"emblib/tables/{name}.py" for name in ("cache", "disk", "row_cache")),
    ),
    "quantised tables": ("csrc/quant", "emblib/ops/quant.py", "emblib/tables/quantized.py"),
    "sharding": ("csrc/route", "emblib/sharding", "emblib/ops/route.py"),
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
ENDINGS_OF_DEVICE = {"cpu": ("_cpu.cpp", "_kernels.cpp"), "cuda": (".cu", ".cuh")}
SUFFIXES = (".py", ".h", ".cpp", ".cu", ".cuh")
CACHE_FILE = Path("build", "source_digests.json")  # below the root; deleting it is harmless
ALGORITHM = 2  # raised with every change of `python_code` and `cpp_code`
MAX_CACHED = 120  # number of digests in the file: of the last ten states of the sources
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\\n])*\")", re.DOTALL)


def digests(device: str, root: Path = ROOT) -> dict[str, str]:
    """Return the digest of each area of AREAS for a device, "cpu" or "cuda"; {} without sources.

    Digests of files that did not change are read from CACHE_FILE below `root`; new ones are
    written to it, if that is possible.
    """
    if not (root / "csrc").is_dir():
        return {}
    files = {
        area: list(_files(device, root, (*BASE, *area_files))) for area, area_files in AREAS.items()
    }
    keys = {area: _content_key(root, paths) for area, paths in files.items()}
    cached_digests = _read_cache(root)
    areas_to_digest = [area for area, key in keys.items() if key not in cached_digests]
    for area in areas_to_digest:
        cached_digests[keys[area]] = _digest(root, files[area])
    if areas_to_digest:
        _write_cache(root, cached_digests)
    return {area: cached_digests[key] for area, key in keys.items()}


def _content_key(root: Path, paths: list[Path]) -> str:
    """Return a hash of the names and bytes of files, of ALGORITHM and of the Python version."""
    key = hashlib.blake2b(repr((ALGORITHM, sys.version_info[:2])).encode(), digest_size=16)
    for path in paths:
        content = hashlib.blake2b(path.read_bytes()).hexdigest()
        key.update(f"{path.relative_to(root).as_posix()}\0{content}\0".encode())
    return key.hexdigest()


def _read_cache(root: Path) -> dict[str, str]:
    """Return {content key: digest}; {} where there is no readable file."""
    try:
        cached_digests = json.loads((root / CACHE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return cached_digests if isinstance(cached_digests, dict) else {}


def _write_cache(root: Path, cached_digests: dict[str, str]) -> None:
    """Replace the file by the newest entries; if several runs write at once, one of them wins."""
    cache_file = root / CACHE_FILE
    temporary_file = cache_file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # a folder that cannot be written only costs time
        cache_file.parent.mkdir(exist_ok=True)
        temporary_file.write_text(
            json.dumps(dict(list(cached_digests.items())[-MAX_CACHED:]), indent=0)
        )
        temporary_file.replace(cache_file)


def _digest(root: Path, paths: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for path in paths:
        digest.update(f"{path.relative_to(root).as_posix()}\0{_code(path)}\0".encode())
    return digest.hexdigest()


@functools.cache
def _code(path: Path) -> str:
    return (python_code if path.suffix == ".py" else cpp_code)(path.read_text())


def _files(device: str, root: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    """Yield the sources for a device in folders (or files), without files that an area names."""
    endings_of_others = tuple(
        ending
        for device_kind, endings in ENDINGS_OF_DEVICE.items()
        if device_kind != device
        for ending in endings
    )
    files_of_areas = {root / name for area in AREAS.values() for name in area}
    for folder in folders:
        yield from (path for path in (root / folder,) if path.is_file())
        for path in sorted((root / folder).rglob("*")):
            is_code = path.suffix in SUFFIXES and path.name != "__init__.py"
            if is_code and not path.name.endswith(endings_of_others) and path not in files_of_areas:
                yield path


def python_code(source: str) -> str:
    """Return a module's code without comments and docstrings, in a uniform layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(_FStringParts().visit(tree))


class _FStringParts(ast.NodeTransformer):
    """Replaces f-strings by tuples of their parts: Python 3.12 quotes f-strings in another way."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        self.generic_visit(node)
        return ast.Tuple([ast.Constant("f"), *node.values], ast.Load())

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        self.generic_visit(node)
        spec = node.format_spec or ast.Constant(None)
        return ast.Tuple([node.value, ast.Constant(node.conversion), spec], ast.Load())


def cpp_code(source: str) -> str:
    """Return C++ code without comments, with single spaces for white space outside of strings."""
    return " ".join(_COMMENT.sub(lambda match: match[1] or " ", source).split())
