"""Builds the CUDA kernels for the host (core/simt_host.h) and calls them through ctypes.

Objects are kept in build/simt and rebuilt when any source or header changes.
"""

import ctypes
import fcntl
import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(
    path
    for folder in (ROOT / "csrc", Path(__file__).parent)
    for pattern in ("**/*.h", "**/*.cuh")
    for path in folder.glob(pattern)
)
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
# Only a sanitizer reads line numbers; they take a fifth of the time of compiling.
SANITIZE = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZE += ["-fno-omit-frame-pointer"]
Word = Tensor | ctypes.Array | bool | int | None


def build(*, sanitize: bool) -> Path:
    """The shared library with every launcher, compiled if it is not there yet."""
    folder = ROOT / "build" / "simt" / ("sanitized" if sanitize else "plain")
    folder.mkdir(parents=True, exist_ok=True)
    flags = FLAGS + (SANITIZE if sanitize else [])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(max_workers=2) as pool:
            objects = list(pool.map(lambda source: _compile(source, folder, flags), SOURCES))
        digest = hashlib.sha256("".join(o.name for o in objects).encode()).hexdigest()[:16]
        library = folder / f"libsimt-{digest}.so"
        if not library.exists():
            _run([COMPILER, "-shared", *flags, *map(str, objects), "-o", str(library)])
            for old in folder.iterdir():
                if old.suffix in {".o", ".so"} and old not in {*objects, library}:
                    old.unlink()
    return library


def _compile(source: Path, folder: Path, flags: list[str]) -> Path:
    digest = hashlib.sha256(f"{COMPILER} {flags}".encode())
    for path in (source, *HEADERS):
        digest.update(path.read_bytes())
    target = folder / f"{source.stem}-{digest.hexdigest()[:16]}.o"
    if not target.exists():
        include = ["-I", str(ROOT / "csrc"), "-I", str(source.parent)]
        _run([COMPILER, *flags, *include, "-c", str(source), "-o", f"{target}.new"])
        Path(f"{target}.new").rename(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


class Library:
    """The launchers of the emulated kernels; a kernel that breaks a rule raises RuntimeError."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def call(self, launcher: str, *words: Word) -> None:
        """Call `launcher` with numbers and the addresses of tensors, in the order it reads them."""
        array = (ctypes.c_int64 * len(words))(*(_word(word) for word in words))
        function = getattr(self._library, f"simt_{launcher}")
        function.restype = ctypes.c_char_p
        error = function(array)
        if error is not None:
            raise RuntimeError(error.decode())


def _word(word: Word) -> int:
    if word is None:
        return 0
    if isinstance(word, Tensor):
        assert word.is_contiguous()
        return word.data_ptr()
    if isinstance(word, ctypes.Array):
        return ctypes.addressof(word)
    return int(word)


@cache
def library() -> Library:
    """The library of this process; the sanitized one where EMBLIB_SIMT_SANITIZE is set."""
    return Library(build(sanitize=bool(os.environ.get("EMBLIB_SIMT_SANITIZE"))))
