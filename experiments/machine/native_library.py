"""Compare the native library with its sources: a result names a commit, but a build is older."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import emblib
from experiments.paths import ROOT

DEVICE_CODE = {".cu", ".cuh"}  # of the CUDA library only


def newer_source(device: torch.device, *, root: Path = ROOT) -> str | None:
    """Return the source file that was changed last, if that was after the library was built.

    None without sources, as where a wheel is installed.
    """
    library = _library(f"libemblib_{device.type}.so")
    if library is None:
        return None
    # `make native` does not touch a library that it finds up to date, but notes the time.
    stamps = [library, Path(sys.prefix) / ".make" / "native"]
    built = max(stamp.stat().st_mtime for stamp in stamps if stamp.exists())
    sources = [
        path
        for path in (root / "csrc").rglob("*")
        if path.is_file() and (device.type == "cuda" or path.suffix not in DEVICE_CODE)
    ]
    last = max(sources, key=lambda path: path.stat().st_mtime, default=None)
    if last is None or last.stat().st_mtime <= built:
        return None
    return str(last.relative_to(root))


def _library(name: str) -> Path | None:
    found = [Path(folder) / name for folder in emblib.__path__]
    return next((path for path in found if path.exists()), None)
