"""Registry of contenders, read from `contenders.yaml` without importing torch.

The environment variable EMBLIB_CONTENDERS names further folders (several: as in PATH) with a
`contenders.yaml` and the files that it names. The keys of an entry are explained at the top of this
folder's `contenders.yaml`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
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

from experiments.paths import installed_version

THIS_FOLDER = Path(__file__).parent
TABLE = "contenders.yaml"
VARIANTS = ("", "rank", "cache")
SHARDED = "sharded_"  # begins the names of emblib's contenders over ranks; then the sharding type
NAME = re.compile(r"[a-z][a-z0-9_]*")
TARGET = re.compile(r"(\w+):(\w+)")
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._+!-]+)")


class RegistryError(Exception):
    """A name is not that of a contender, or a contenders.yaml is missing or wrong."""


class Unsupported(Exception):
    """A contender cannot do a task; its row of the report shows the message."""


class MissingLibrary(Unsupported):
    """A contender needs a package or library that is not installed or does not load."""


class WrongResult(Exception):
    """A contender's results differ from the reference; the message says where."""


@dataclass(frozen=True)
class Entry:
    """One contender of a contenders.yaml.

    Attributes:
        name: key of the entry, as `contenders=[NAME]` has it.
        label: name in reports.
        file: Python file of the class.
        class_name: name of the class.
        variants: "rank" or "cache" for one arm per rank or per cache size; "" for one arm.
        new_keys: share of the lookups of a step that are new keys, for contenders that differ from
            `dynamic` only in that.
        keyed: True for a hash table of keys.
        served: True for read-only tables. A contender that is neither keyed nor served looks up
            bags and is trained.
        dense: True if it holds all tables uncompressed; free memory must then suffice for them.
        alone: True if it is measured in worlds of one rank only.
        cuda_only: True if it needs a GPU.
        requires: pip requirements "package==version", alternatives separated by " | ".
        install: how to install `requires` or build the user's library; "" for `pip install`.
        variable: environment variable with the path of a library that the user has built.
        module: importable module that serves in place of `variable`.
        torch_release: release of torch that the versions in `requires` belong to; "" for any.
    """

    name: str
    label: str
    file: Path
    class_name: str
    variants: str = ""
    new_keys: float = 0.0
    keyed: bool = False
    served: bool = False
    dense: bool = False
    alone: bool = False
    cuda_only: bool = False
    requires: tuple[str, ...] = ()
    install: str = ""
    variable: str = ""
    module: str = ""
    torch_release: str = ""

    def missing(self) -> str:
        """Return what is not installed and the command for it; "" if nothing is missing.

        Nothing is imported: `load` may still raise MissingLibrary.
        """
        if self.variable and not self.library_path():
            return f"not built here: {self.install}"
        if all(find_installed(requirement) for requirement in self.requires):
            return ""
        requirements = [text.replace(" | ", " (or ") for text in self.requires]
        requirements = [text + ")" * ("(or " in text) for text in requirements]
        return f"not installed: {self.install or 'pip install ' + ' '.join(requirements)}"

    def library_path(self) -> Path | None:
        """Return the path of the user's library, or of `module`; None without either."""
        if path := os.environ.get(self.variable, ""):
            return Path(path)
        spec = importlib.util.find_spec(self.module) if self.module else None
        return Path(spec.origin) if spec is not None and spec.origin else None

    def versions(self) -> dict[str, str]:
        """Return {package: version} of the installed packages among `requires`, as installed."""
        pairs = (find_installed(requirement) for requirement in self.requires)
        return dict(pair for pair in pairs if pair)

    def unknown_versions(self) -> list[str]:
        """Return a sentence per installed package whose version is not known to work."""
        tested_versions = {
            name: version for text in self.requires for name, version in REQUIREMENT.findall(text)
        }
        torch = f" with torch {self.torch_release}" * bool(self.torch_release)
        return [
            f"{name} is {version}, known to work{torch} is {tested_versions[name]}"
            for name, version in self.versions().items()
            if version.partition("+")[0] != tested_versions[name]
        ]

    def load(self) -> type[Any]:
        """Import the class.

        Raises:
            MissingLibrary: a package of `requires` or the user's library is not installed or not
                loadable.
            ImportError, OSError, AttributeError: the file cannot be imported, and the entry
                requires nothing.
        """
        if reason := self.missing():
            raise MissingLibrary(reason)
        try:
            return getattr(_import_file(self.file), self.class_name)
        # A shared library that does not load, or another version that lacks a function.
        except (ImportError, OSError, AttributeError) as error:
            if self.variable:
                raise MissingLibrary(
                    f"{self.library_path()} does not load here ({error})"
                ) from error
            if not self.requires:
                raise
            versions = ", ".join(
                f"{package} {version}" for package, version in self.versions().items()
            )
            raise MissingLibrary(
                f"{versions} does not load here ({error}); known to work: "
                f"{', '.join(self.requires)}"
            ) from error


def entries() -> dict[str, Entry]:
    """Return every contender by name, in the order of the files.

    Raises:
        RegistryError: a file is missing or wrong.
    """
    extra_folders = os.environ.get("EMBLIB_CONTENDERS", "").split(os.pathsep)
    torch = find_installed("torch")
    folders = (THIS_FOLDER, *(Path(folder) for folder in extra_folders if folder))
    return _read_entries(folders, torch[1] if torch else "")


def names() -> tuple[str, ...]:
    """Return the names of all contenders."""
    return tuple(entries())


def find(name: str) -> Entry:
    """Return the entry of a contender.

    Raises:
        RegistryError: the name is unknown, or `entries` raises it.
    """
    if name not in entries():
        raise RegistryError(f"no contender '{name}'. There is: {', '.join(names())}")
    return entries()[name]


def build(name: str, task: Any) -> Any:
    """Build a contender by name.

    Args:
        name: name of the contender.
        task: argument of its class: a `base.Task`, of a hash table a `keys.KeyTask`, of read-only
            tables their shapes, a sequence of TableShape.

    Raises:
        RegistryError: the name is unknown.
        Unsupported: the contender cannot do the task, or (MissingLibrary) a package is not
            installed.
    """
    return find(name).load()(task)


def entry_of(name: str) -> Entry:
    """Return the entry of a contender; for an unknown name, an entry with the defaults.

    Runs that are stored may have contenders that no longer exist.
    """
    return entries().get(name) or Entry(name, name, THIS_FOLDER / TABLE, "")


def identity(name: str) -> dict[str, str]:
    """Return the facts of an entry, and of what it needs, that decide which program is measured.

    The sources in this folder are not among them, see `results.identity.BENCH_SOURCES`.
    """
    entry = entry_of(name)
    facts = {**entry.versions(), "class": f"{entry.file.stem}:{entry.class_name}"}
    facts |= {"new_keys": f"{entry.new_keys:g}"} if entry.new_keys else {}
    if entry.variable and (library := entry.library_path()):
        size, modified_ns = (
            (library.stat().st_size, library.stat().st_mtime_ns) if library.exists() else (0, 0)
        )
        facts["built"] = f"{library} {size} {modified_ns}"
    if entry.file.parent != THIS_FOLDER:
        facts["file"] = hashlib.blake2b(entry.file.read_bytes(), digest_size=8).hexdigest()
    return facts


@functools.cache
def _read_entries(folders: tuple[Path, ...], torch: str) -> dict[str, Entry]:
    """Read the entries of all folders; raise RegistryError for a file that is missing or wrong.

    `torch` is the installed version, or "". The result is cached per pair of arguments, because
    tests change both; a later change of a file is not noticed.
    """
    entries_by_name: dict[str, Entry] = {}
    for folder in folders:
        path = folder / TABLE
        try:
            table = yaml.safe_load(path.read_text()) or {}
        except FileNotFoundError as error:
            raise RegistryError(f"EMBLIB_CONTENDERS: there is no {path}") from error
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RegistryError(f"{path}: {' '.join(str(error).split())}") from error
        if not isinstance(table, dict) or not all(
            isinstance(value, dict) for value in table.values()
        ):
            raise RegistryError(f"{path}: it must have an entry 'name: {{class: ..., ...}}' each")
        versions_of_word = _parse_versions(path, table.get("_by_torch", {}))
        for name, yaml_facts in ((str(key), facts) for key, facts in table.items()):
            if name.startswith("_"):
                continue
            requires = yaml_facts.get("requires", [])
            if not isinstance(requires, list):
                raise RegistryError(f"{path}: {name}: requires must be a list, got {requires!r}")
            facts = _fill_versions(yaml_facts, versions_of_word, torch)
            if name in entries_by_name:
                raise RegistryError(f"{path}: the name '{name}' is taken; choose another")
            entries_by_name[name] = _parse_entry(folder, name, facts)
    return entries_by_name


def _parse_versions(path: Path, by_word: Mapping[Any, Any]) -> dict[str, dict[str, str]]:
    """Check `_by_torch` of a contenders.yaml; return {word: {release of torch: version}}."""
    for word, versions in by_word.items():
        is_map = isinstance(versions, dict) and bool(versions)
        # Without quotes, YAML reads 2.10 as the number 2.1.
        if not is_map or not all(
            isinstance(text, str) for pair in versions.items() for text in pair
        ):
            raise RegistryError(
                f"{path}: _by_torch: {word} must be like {{'2.10': '1.5.0'}}, got {versions!r}"
            )
    return {str(word): versions for word, versions in by_word.items()}


def _fill_versions(
    facts: Mapping[str, Any], versions_of_word: Mapping[str, Mapping[str, str]], torch: str
) -> dict[str, Any]:
    """Return the facts with each {word} replaced by its version for the installed torch.

    `versions_of_word` is the result of `_parse_versions`.
    """
    filled = dict(facts)
    for word, version_of_release in versions_of_word.items():
        braced, release = f"{{{word}}}", _nearest_release(list(version_of_release), torch)
        requires = [str(text) for text in filled.get("requires", ())]
        if any(braced in text for text in requires):
            version = version_of_release[release]
            filled["torch_release"] = release
            filled["requires"] = [text.replace(braced, version) for text in requires]
            if "install" in filled:
                filled["install"] = str(filled["install"]).replace(braced, version)
    return filled


def _nearest_release(releases: Sequence[str], version: str) -> str:
    """Return the newest release up to `version`, else the oldest; for "" return the newest."""
    ordered_releases = sorted(releases, key=_version_numbers)
    version_numbers = _version_numbers(version) or (math.inf,)
    return next(
        (
            release
            for release in reversed(ordered_releases)
            if _version_numbers(release) <= version_numbers
        ),
        ordered_releases[0],
    )


def _version_numbers(version: str) -> tuple[float, ...]:
    """Return (2, 13) for "2.13.0+cpu"; () for text that is not a version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (float(match[1]), float(match[2])) if match else ()


def _parse_entry(folder: Path, name: str, facts: Mapping[str, Any]) -> Entry:
    """Check the facts of one entry and return it; raise RegistryError, which names the fact."""
    location = f"{folder.name}/{TABLE}: {name}"
    if not NAME.fullmatch(name):
        raise RegistryError(f"{location}: a name is lower-case letters, digits and _")
    facts = dict(facts)
    target = TARGET.fullmatch(str(facts.pop("class", "")))
    if not target or not facts.get("label"):
        raise RegistryError(f"{location} needs a class, as in 'file:Class', and a label")
    facts["requires"] = tuple(facts.get("requires", ()))
    fields = {field.name: field for field in dataclasses.fields(Entry)}
    for key, value in facts.items():
        if key not in fields or key in ("name", "file", "class_name"):
            raise RegistryError(f"{location}: no fact '{key}'")
        fact_type = str if key == "label" else type(fields[key].default)
        if type(value) is not fact_type:
            raise RegistryError(f"{location}: {key} must be a {fact_type.__name__}, got {value!r}")
    if facts.get("variants", "") not in VARIANTS:
        raise RegistryError(f"{location}: variants must be one of {VARIANTS}")
    if not 0 <= facts.get("new_keys", 0.0) <= 1:
        raise RegistryError(f"{location}: new_keys must be in [0, 1], got {facts['new_keys']}")
    for text in facts["requires"]:
        if not all(REQUIREMENT.fullmatch(part) for part in str(text).split(" | ")):
            raise RegistryError(
                f"{location}: requires must be like ['package==1.2.3'], got {text!r}"
            )
    return Entry(name=name, file=folder / f"{target[1]}.py", class_name=target[2], **facts)


@functools.cache  # a lookup reads files, and every cell asks for the version of torch
def find_installed(requirement: str) -> tuple[str, str] | None:
    """Return (package, version) of the first installed alternative of a requirement, or None.

    A requirement is "package==version", alternatives separated by " | "; only the package counts.
    """
    for alternative in requirement.split(" | "):
        package = alternative.partition("==")[0]
        if version := installed_version(package):
            return package, version
    return None


def _import_file(file: Path) -> ModuleType:
    """Import the file of a contender; one of another folder gets a module name of its own."""
    if file.parent == THIS_FOLDER:
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
