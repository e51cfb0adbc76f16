"""Contenders by name, from `contenders.yaml`: names and facts are known before torch is imported.

The environment variable EMBLIB_CONTENDERS names further folders (several: as in PATH) with a
`contenders.yaml` and the files that it names. The keys of an entry are explained at the top of this
folder's `contenders.yaml`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

HERE = Path(__file__).parent
TABLE = "contenders.yaml"
VARIANTS = ("", "rank", "cache")
SHARDED = "sharded_"  # begins the names of emblib's contenders over ranks; then the sharding type
NAME = re.compile(r"[a-z][a-z0-9_]*")
TARGET = re.compile(r"(\w+):(\w+)")
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._+!-]+)")


class RegistryError(Exception):
    """A table of contenders cannot be used; the message says which entry and why."""


class Unsupported(Exception):
    """This contender cannot do this task; the message says why, in its row of the report."""


class Missing(Unsupported):
    """This contender needs a package that is not installed; the message says what to type."""


class Wrong(Exception):
    """The contender computed something else; it is reported as wrong and not timed."""


@dataclass(frozen=True)
class Entry:
    """An entry of the table of contenders."""

    name: str
    label: str
    file: Path
    cls: str
    variants: str = ""
    keyed: bool = False
    dense: bool = False
    alone: bool = False
    cuda_only: bool = False
    requires: tuple[str, ...] = ()
    install: str = ""
    variable: str = ""  # the environment variable with the path of what a user has built
    module: str = ""  # a module that serves as well, where it can be imported
    of_torch: str = ""  # the release of torch that the versions in `requires` belong to, if to one

    def missing(self) -> str:
        """Return what is not installed and what to type; empty where it can run."""
        if self.variable and not self.built():
            return f"not built here: {self.install}"
        if all(installed(requirement) for requirement in self.requires):
            return ""
        wanted = [requirement.replace(" | ", " (or ") for requirement in self.requires]
        wanted = [w + ")" * ("(or " in w) for w in wanted]
        return f"not installed: {self.install or 'pip install ' + ' '.join(wanted)}"

    def built(self) -> Path | None:
        """Return the path of what a user has built, or of the module that serves as well."""
        if path := os.environ.get(self.variable, ""):
            return Path(path)
        spec = importlib.util.find_spec(self.module) if self.module else None
        return Path(spec.origin) if spec is not None and spec.origin else None

    def versions(self) -> dict[str, str]:
        """Return the installed version of each package it needs."""
        pairs = (installed(requirement) for requirement in self.requires)
        return dict(pair for pair in pairs if pair)

    def unknown_versions(self) -> list[str]:
        """Describe installed packages whose version is not the one known to work."""
        known = {
            name: version for text in self.requires for name, version in REQUIREMENT.findall(text)
        }
        torch = f" with torch {self.of_torch}" * bool(self.of_torch)
        return [
            f"{name} is {version}, known to work{torch} is {known[name]}"
            for name, version in self.versions().items()
            if version.partition("+")[0] != known[name]
        ]

    def load(self) -> type[Any]:
        """Import the class; raises Missing where a package is not installed or does not load."""
        if reason := self.missing():
            raise Missing(reason)
        try:
            loaded: type[Any] = getattr(_module(self.file), self.cls)
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            if self.variable:
                raise Missing(f"{self.built()} does not load here ({error})") from error
            if not self.requires:
                raise
            here = ", ".join(f"{package} {version}" for package, version in self.versions().items())
            raise Missing(
                f"{here} does not load here ({error}); known to work: {', '.join(self.requires)}"
            ) from error
        return loaded


def entries() -> dict[str, Entry]:
    """Return every contender by name, in the order of the tables."""
    extra = os.environ.get("EMBLIB_CONTENDERS", "").split(os.pathsep)
    torch = installed("torch")
    folders = (HERE, *(Path(folder) for folder in extra if folder))
    return _entries(folders, torch[1] if torch else "")


def names() -> tuple[str, ...]:
    """Return every name that `contenders` may have."""
    return tuple(entries())


def find(name: str) -> Entry:
    """Return the contender of that name; raises RegistryError where there is none."""
    if name not in entries():
        raise RegistryError(f"no contender '{name}'. There is: {', '.join(names())}")
    return entries()[name]


def label(name: str) -> str:
    """Return the label; a contender that no longer exists is called by its name."""
    return entries()[name].label if name in entries() else name


def variants(name: str) -> str:
    """Return what the contender has an arm for each of: "rank", "cache", or nothing."""
    return entries()[name].variants if name in entries() else ""


def packages(name: str) -> dict[str, str]:
    """Return the installed version of each package that the contender needs."""
    return entries()[name].versions() if name in entries() else {}


def unknown_versions(name: str) -> list[str]:
    """Describe packages of the contender whose version is not the one known to work."""
    return entries()[name].unknown_versions() if name in entries() else []


def identity(name: str) -> dict[str, str]:
    """Return what decides, besides this repository's files, which program the contender is."""
    facts = packages(name)
    built = entries()[name].built() if name in entries() and entries()[name].variable else None
    if built is not None:
        size, when = (built.stat().st_size, built.stat().st_mtime_ns) if built.exists() else (0, 0)
        facts["built"] = f"{built} {size} {when}"
    if name in entries() and entries()[name].file.parent != HERE:
        text = entries()[name].file.read_bytes()
        facts["file"] = hashlib.blake2b(text, digest_size=8).hexdigest()
    return facts


def keyed(name: str) -> bool:
    """Return whether the contender is a table of keys; an unknown one is not."""
    return name in entries() and entries()[name].keyed


def dense(name: str) -> bool:
    """Return whether the contender holds the tables uncompressed; an unknown one does not."""
    return name in entries() and entries()[name].dense


def fits(name: str, ranks: int) -> bool:
    """Return whether the contender is measured in a world of so many ranks."""
    return ranks == 1 or name not in entries() or not entries()[name].alone


def cached() -> tuple[str, ...]:
    """Return the contenders with a cache, which a trace can be run through."""
    return tuple(name for name, entry in entries().items() if entry.variants == "cache")


@functools.cache
def _entries(folders: tuple[Path, ...], torch: str) -> dict[str, Entry]:
    entries_by_name: dict[str, Entry] = {}
    for folder in folders:
        path = folder / TABLE
        try:
            table = yaml.safe_load(path.read_text()) or {}
        except FileNotFoundError as error:
            raise RegistryError(f"EMBLIB_CONTENDERS: there is no {path}") from error
        except yaml.YAMLError as error:
            raise RegistryError(f"{path}: {' '.join(str(error).split())}") from error
        words = table.get("_by_torch", {})
        for name, shared in table.items():
            if name.startswith("_"):
                continue
            facts = _of_release(shared, words, torch)
            if name in entries_by_name:
                raise RegistryError(f"{path}: the name '{name}' is taken; choose another")
            entries_by_name[name] = _entry(folder, name, facts)
    return entries_by_name


def _of_release(
    facts: Mapping[str, Any], words: Mapping[str, Mapping[str, str]], torch: str
) -> dict[str, Any]:
    """Return the facts with each word in braces replaced by its text for a version of torch."""
    facts_of = dict(facts)
    for word, texts in words.items():
        braced, release = f"{{{word}}}", _nearest(list(texts), torch)
        needed = [str(text) for text in facts_of.get("requires", ())]
        if any(braced in text for text in needed):
            facts_of["of_torch"] = release
            facts_of["requires"] = [text.replace(braced, texts[release]) for text in needed]
            if "install" in facts_of:
                facts_of["install"] = facts_of["install"].replace(braced, texts[release])
    return facts_of


def _nearest(releases: Sequence[str], version: str) -> str:
    """Return the newest release that is not newer than the version, else the oldest one.

    Without a version it is the newest: what `pip install` would give.
    """
    ordered = sorted(releases, key=_numbers)
    wanted = _numbers(version) or (math.inf,)
    return next((r for r in reversed(ordered) if _numbers(r) <= wanted), ordered[0])


def _numbers(version: str) -> tuple[float, ...]:
    """Return (2, 13) of 2.13.0+cpu; empty where the text is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (float(match[1]), float(match[2])) if match else ()


def _entry(folder: Path, name: str, facts: Mapping[str, Any]) -> Entry:
    where = f"{folder.name}/{TABLE}: {name}"
    if not NAME.fullmatch(name):
        raise RegistryError(f"{where}: a name is lower-case letters, digits and _")
    facts = dict(facts)
    target = TARGET.fullmatch(str(facts.pop("class", "")))
    if not target or not facts.get("label"):
        raise RegistryError(f"{where} needs a class, as in 'file:Class', and a label")
    facts["requires"] = tuple(facts.get("requires", ()))
    fields = {f.name: f for f in dataclasses.fields(Entry)}
    for key, value in facts.items():
        if key not in fields or key in ("name", "file", "cls"):
            raise RegistryError(f"{where}: no fact '{key}'")
        if key != "label" and type(value) is not type(fields[key].default):
            wanted = type(fields[key].default).__name__
            raise RegistryError(f"{where}: {key} must be a {wanted}, got {value!r}")
    if facts.get("variants", "") not in VARIANTS:
        raise RegistryError(f"{where}: variants must be one of {VARIANTS}")
    for text in facts["requires"]:
        if not all(REQUIREMENT.fullmatch(part) for part in str(text).split(" | ")):
            raise RegistryError(f"{where}: requires must be like ['package==1.2.3'], got {text!r}")
    return Entry(name=name, file=folder / f"{target[1]}.py", cls=target[2], **facts)


def installed(requirement: str) -> tuple[str, str] | None:
    """Return (package, version) of the first alternative that is installed."""
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
