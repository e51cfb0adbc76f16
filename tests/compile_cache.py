"""Compiles native helpers of tests and keeps them by content, once for all checkouts of a user.

The name of a file ends in a digest of what it is made of: the source and all headers of this
repository that it includes, however deep; flags; the versions of the compiler and of torch. Paths
are relative to the repository, so that another checkout finds the same files. They are in
$XDG_CACHE_HOME/emblib-tests, or ~/.cache/emblib-tests; those that no test has used for two weeks
are removed. Files of Inductor are there too (conftest.py), a folder per version of torch, which is
removed when that version is not used for two weeks.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "emblib-tests"
COMPILER = os.environ.get("CXX", "g++")
JOBS = 2
_DAYS = 14
_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


class Source(NamedTuple):
    """A file to compile.

    Attributes:
        path: the file.
        flags: flags that change the object.
        folders: folders of this repository that are searched for headers.
        system: flags that name folders of installed headers, whose versions are in every digest.
    """

    path: Path
    flags: Sequence[str]
    folders: Sequence[Path]
    system: Sequence[str] = ()


def build(name: str, sources: Sequence[Source]) -> list[Path]:
    """Compile sources that are not in the cache; return one object per source."""
    with _locked(name), ThreadPoolExecutor(max_workers=JOBS) as pool:
        return list(pool.map(_compile, sources))


def link(name: str, objects: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """Link a shared library that is not in the cache; return its path."""
    words = [str(path.name) for path in objects]
    target = kept(f"lib{name}", ".so", [_version(COMPILER), *words, *flags], ())
    with _locked(name):
        if not target.exists():
            _run([COMPILER, "-shared", *map(str, objects), "-o", f"{target}.new", *flags])
            Path(f"{target}.new").rename(target)
    return target


def kept(stem: str, suffix: str, words: Iterable[str], files: Iterable[Path]) -> Path:
    """Return where the cache has what is made of words and files, if it was made."""
    digest = hashlib.sha256("\n".join(words).encode())
    for path in files:
        digest.update(f"\n{path.relative_to(ROOT)}\n".encode() + _contents(path))
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = FOLDER / f"{stem}-{digest.hexdigest()[:24]}{suffix}"
    if target.exists():
        os.utime(target)
    return target


def inductor_folder() -> Path:
    """Return the folder for what Inductor compiles, after removing those of unused versions."""
    folder = FOLDER / f"inductor-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in FOLDER.glob("inductor*"):
        if other.is_dir() and other.stat().st_mtime < _oldest():
            shutil.rmtree(other, ignore_errors=True)
    return folder


def files_of(path: Path, folders: Sequence[Path]) -> list[Path]:
    """Return a source and the headers in `folders` that it includes, directly or not."""
    found = {path}
    todo = [path]
    while todo:
        for header in _includes(todo.pop(), tuple(folders)):
            if header not in found:
                found.add(header)
                todo.append(header)
    return sorted(found)


def _compile(source: Source) -> Path:
    # A header that flags include comes before the source.
    forced = [ROOT / word for word in source.flags if word.endswith(".h")]
    files = {path for root in (source.path, *forced) for path in files_of(root, source.folders)}
    words = [_version(COMPILER), torch.__version__, *source.flags]
    stem = f"{source.path.parent.name}-{source.path.stem}"
    target = kept(stem, ".o", words, sorted(files))
    if not target.exists():
        folders = [f"-I{folder.relative_to(ROOT)}" for folder in source.folders]
        path = str(source.path.relative_to(ROOT))
        new = f"{target}.{os.getpid()}"
        _run([COMPILER, *source.flags, *folders, *source.system, "-c", path, "-o", new])
        Path(new).rename(target)
    return target


@cache
def _contents(path: Path) -> bytes:
    return path.read_bytes()


@cache
def _includes(path: Path, folders: tuple[Path, ...]) -> tuple[Path, ...]:
    names = _INCLUDE.findall(_contents(path).decode())
    places = [(folder / name).resolve() for name in names for folder in (path.parent, *folders)]
    return tuple(place for place in places if place.is_file())


@cache
def _version(compiler: str) -> str:
    command = [compiler, "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Let one process build at a time and remove what is old first."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in FOLDER.iterdir():
            if path.is_file() and path.suffix != ".lock" and path.stat().st_mtime < _oldest():
                path.unlink(missing_ok=True)
        yield


def _oldest() -> float:
    return time.time() - _DAYS * 86_400


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
