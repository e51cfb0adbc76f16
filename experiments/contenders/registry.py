"""Contenders by name, read from their files without importing them: a typo is found before torch.

A contender is a class in a file of this folder, or of a folder named in EMBLIB_CONTENDERS, with a
`name` of its own. What else the harness must know before it is built, the class states as literals:

    label       what people call it
    variants    "rank": one arm for each of tt.ranks; "cache": one for each of cache.fractions
    cuda_only   whether it has no way to run on a CPU
    keyed       whether it is a table of keys (key_table.py), which the kinds `keys`, `growth` and
                `cache` measure, not one of bags
    alone       whether it knows no ranks, so that experiments over ranks measure it without others
    together    whether it is the same as another one in a world of one rank, and left out of it
    dense       whether it holds the tables uncompressed, so that their size must fit in memory
    requires    the packages it needs, exactly as known to work: ("fbgemm-gpu-cpu==1.8.0",);
                "a==1 | b==1" where either will do
    install     what to type, where `pip install` of those is not it
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
VARIANTS = ("", "rank", "cache")
FACTS: dict[str, type] = {
    "name": str,
    "label": str,
    "variants": str,
    "keyed": bool,
    "dense": bool,
    "alone": bool,
    "together": bool,
    "cuda_only": bool,
    "requires": tuple,
    "install": str,
}
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._+!-]+)")


class RegistryError(Exception):
    """A contender's file says something that the harness cannot use; the message says where."""


@dataclass(frozen=True)
class Entry:
    """What a contender's file says of it."""

    name: str
    label: str
    file: Path
    cls: str
    variants: str = ""
    keyed: bool = False
    dense: bool = False
    alone: bool = False
    together: bool = False
    cuda_only: bool = False
    requires: tuple[str, ...] = ()
    install: str = ""

    def missing(self) -> str:
        """Why it cannot run here and what to type, or nothing."""
        if all(_installed(requirement) for requirement in self.requires):
            return ""
        wanted = [requirement.replace(" | ", " (or ") for requirement in self.requires]
        wanted = [w + ")" * ("(or " in w) for w in wanted]
        return f"not installed: {self.install or 'pip install ' + ' '.join(wanted)}"

    def versions(self) -> dict[str, str]:
        """Installed version of each package it needs."""
        found = (_installed(requirement) for requirement in self.requires)
        return dict(pair for pair in found if pair)

    def unknown_versions(self) -> list[str]:
        """Installed packages whose version is not the one that is known to work, for people."""
        known = {
            name: version for text in self.requires for name, version in REQUIREMENT.findall(text)
        }
        return [
            f"{name} is {version}, known to work is {known[name]}"
            for name, version in self.versions().items()
            if version.partition("+")[0] != known[name]
        ]

    def load(self) -> type[Any]:
        """The class itself; imports its file, and so whatever that imports."""
        module = _module(self.file)
        found: type[Any] = getattr(module, self.cls)
        return found


def folders() -> list[Path]:
    """Where contenders are: here, and in the folders named in EMBLIB_CONTENDERS."""
    extra = os.environ.get("EMBLIB_CONTENDERS", "").split(os.pathsep)
    return [HERE, *(Path(folder) for folder in extra if folder)]


def entries() -> dict[str, Entry]:
    """Every contender by name, in the order of the files."""
    return _entries(tuple(folders()))


def names() -> tuple[str, ...]:
    """Every name that `contenders:` may have."""
    return tuple(entries())


def find(name: str) -> Entry:
    """The contender of that name."""
    if name not in entries():
        raise RegistryError(f"no contender '{name}'. There is: {', '.join(names())}")
    return entries()[name]


def label(name: str) -> str:
    """For people; a contender that is not here any more is called by its name."""
    return entries()[name].label if name in entries() else name


def variants(name: str) -> str:
    """Of what it has several arms: "rank", "cache", or nothing."""
    return entries()[name].variants if name in entries() else ""


def packages(name: str) -> dict[str, str]:
    """Installed version of each package that the contender needs."""
    return entries()[name].versions() if name in entries() else {}


def unknown_versions(name: str) -> list[str]:
    """Packages of the contender whose version is not the one that is known to work."""
    return entries()[name].unknown_versions() if name in entries() else []


def identity(name: str) -> dict[str, str]:
    """What else than the repository's own files decides what the contender is."""
    found = packages(name)
    if name in entries() and entries()[name].file.parent != HERE:
        text = entries()[name].file.read_bytes()
        found["file"] = hashlib.blake2b(text, digest_size=8).hexdigest()
    return found


def keyed(name: str) -> bool:
    """Whether it is a table of keys; what is not known is not."""
    return name in entries() and entries()[name].keyed


def fits(name: str, ranks: int) -> bool:
    """Whether it is measured in a world of so many ranks; what is not known is."""
    entry = entries().get(name)
    return entry is None or not (entry.together if ranks == 1 else entry.alone)


def of_bags() -> tuple[str, ...]:
    """Those that look bags up, which the kind `time` measures."""
    return tuple(name for name, entry in entries().items() if not entry.keyed)


def cached() -> tuple[str, ...]:
    """Those with a cache, which a trace can be run through."""
    return tuple(name for name, entry in entries().items() if entry.variants == "cache")


@functools.cache
def _entries(places: tuple[Path, ...]) -> dict[str, Entry]:
    classes: dict[str, _Class] = {}
    for folder in places:
        if not folder.is_dir():
            raise RegistryError(f"EMBLIB_CONTENDERS: no folder {folder}")
        for file in sorted(folder.glob("*.py")):
            for found in _classes(file):
                # The first of a name wins as a base, and only a class with a `name` is listed.
                classes.setdefault(found.key, found)
    by_name: dict[str, Entry] = {}
    for found in classes.values():
        if "name" not in found.facts:
            continue
        entry = _entry(found, classes)
        if entry.name in by_name:
            other = by_name[entry.name]
            raise RegistryError(
                f"{found.place}: the name '{entry.name}' is taken by {other.cls} in "
                f"{other.file.name}; choose another"
            )
        by_name[entry.name] = entry
    return by_name


@dataclass(frozen=True)
class _Class:
    """A class as its source has it."""

    file: Path
    line: int
    name: str
    bases: tuple[str, ...]
    facts: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.file}:{self.name}"

    @property
    def place(self) -> str:
        return f"{self.file.parent.name}/{self.file.name}:{self.line} {self.name}"


def _classes(file: Path) -> list[_Class]:
    try:
        tree = ast.parse(file.read_text(), str(file))
    except SyntaxError as error:
        place = f"{file.parent.name}/{file.name}:{error.lineno}"
        raise RegistryError(f"{place}: {error.msg}") from error
    return [
        _Class(
            file,
            node.lineno,
            node.name,
            tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases),
            _facts(file, node),
        )
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]


def _facts(file: Path, node: ast.ClassDef) -> dict[str, Any]:
    facts = {}
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=key)], value=value) if key in FACTS:
                pass
            case ast.AnnAssign(target=ast.Name(id=key), value=ast.expr() as value) if key in FACTS:
                pass
            case _:
                continue
        place = f"{file.parent.name}/{file.name}:{statement.lineno} {node.name}.{key}"
        try:
            facts[key] = ast.literal_eval(value)
        except ValueError as error:
            raise RegistryError(
                f"{place} must be a literal: it is read without running the file"
            ) from error
        if not isinstance(facts[key], FACTS[key]):
            raise RegistryError(f"{place} must be a {FACTS[key].__name__}, got {facts[key]!r}")
    return facts


def _entry(found: _Class, classes: dict[str, _Class]) -> Entry:
    facts = _inherited(found, classes) | {"name": found.facts["name"]}
    if not re.fullmatch(r"[a-z][a-z0-9_]*", facts["name"]):
        raise RegistryError(
            f"{found.place}: name must be lower-case letters, digits and _, got {facts['name']!r}"
        )
    if "label" not in found.facts:
        raise RegistryError(f"{found.place} has a name but no label, which people read")
    if facts.get("variants", "") not in VARIANTS:
        raise RegistryError(
            f"{found.place}: variants must be one of {VARIANTS}, got {facts['variants']!r}"
        )
    for text in facts.get("requires", ()):
        if not all(REQUIREMENT.fullmatch(part) for part in str(text).split(" | ")):
            raise RegistryError(
                f"{found.place}: requires must be like ('package==1.2.3',), got {text!r}"
            )
    return Entry(file=found.file, cls=found.name, **facts)


def _inherited(found: _Class, classes: dict[str, _Class]) -> dict[str, Any]:
    """Its facts over those of its bases, which are looked for in its own file first."""
    facts: dict[str, Any] = {}
    for base in reversed(found.bases):
        same = [c for c in classes.values() if c.name == base and c.key != found.key]
        own = [c for c in same if c.file == found.file]
        for parent in (own or same)[:1]:
            facts |= _inherited(parent, classes)
    return facts | found.facts


def _installed(requirement: str) -> tuple[str, str] | None:
    """(package, version) of the first alternative that is installed."""
    for alternative in requirement.split(" | "):
        package = alternative.partition("==")[0]
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _module(file: Path) -> ModuleType:
    if file.parent == HERE:
        return importlib.import_module(f"experiments.contenders.{file.stem}")
    name = f"emblib_contender_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up while they are made
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
