"""Builds the CUDA kernels for the host (core/simt_host.h) and calls them through ctypes.

Objects are kept by content (tests/compile_cache.py).
"""

import ctypes
import os
from functools import cache
from pathlib import Path

from torch import Tensor

from tests import compile_cache
from tests.compile_cache import ROOT, Source

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
# Only a sanitizer reads line numbers; they take a fifth of the time of compiling.
SANITIZE = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZE += ["-fno-omit-frame-pointer"]
Word = Tensor | ctypes.Array | bool | int | None


def build(*, sanitize: bool) -> Path:
    """Return the shared library with every launcher, compiled if it is not in the cache."""
    flags = FLAGS + (SANITIZE if sanitize else [])
    name = "simt_sanitized" if sanitize else "simt"
    sources = [Source(path, flags, (ROOT / "csrc",)) for path in SOURCES]
    return compile_cache.link(name, compile_cache.build(name, sources), flags)


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


def library_path() -> Path:
    """Build what this process tests: the sanitized library where EMBLIB_SIMT_SANITIZE is set."""
    return build(sanitize=bool(os.environ.get("EMBLIB_SIMT_SANITIZE")))


@cache
def library() -> Library:
    """Load the library that this process tests."""
    return Library(library_path())
