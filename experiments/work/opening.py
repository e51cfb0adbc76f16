"""Opening trace files: text or torch's, packed or not. What goes wrong there is a TraceError."""

from __future__ import annotations

import csv
import gzip
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch


class TraceError(ValueError):
    """The file is not what it was said to be; the message says what it is and what to do."""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What libraries say of a damaged file, as a TraceError."""
    try:
        yield
    except (EOFError, OSError, UnicodeError, csv.Error, zlib.error) as error:
        raise TraceError(
            f"{path.name} is damaged, or not in the format that it was said to be in ({error})"
        ) from error


def text(path: Path) -> IO[str]:
    """Lines of a file, packed or not; spreadsheets begin theirs with a mark, which is left out."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", newline="", encoding="utf-8-sig")
    return open(path, newline="", encoding="utf-8-sig")


def torch_load(path: Path) -> Any:
    """Tensors stay on disk until they are used; what is packed is unpacked to a temporary file."""
    if path.suffix != ".gz":
        return _mapped(path, path.name)
    with tempfile.NamedTemporaryFile(suffix=".pt") as whole, gzip.open(path) as packed:
        while block := packed.read(1 << 22):
            whole.write(block)
        whole.flush()
        return _mapped(Path(whole.name), path.name)  # the mapping outlives the file's name


def _mapped(path: Path, name: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # written before torch's files were archives: those cannot be mapped
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise _no_tensors(name, error) from error
    except Exception as error:
        raise _no_tensors(name, error) from error


def _no_tensors(name: str, error: Exception) -> TraceError:
    said = str(error).partition("\n")[0].partition(". ")[0]  # then torch advises to trust the file
    return TraceError(f"{name} is not a file of torch.save with tensors ({said or 'it is empty'})")
