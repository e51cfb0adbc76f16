"""A worker of the gate: one revision of emblib in one process, which times what it is told to.

This file and what it imports at its top know nothing of emblib: the first thing that a worker does
is to make sure that it gets the revision it was started for, and no other that is installed.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class WrongRevision(Exception):
    """`import emblib` gives another package than the worker was started for."""


def serve(pipe: Connection, package: str) -> None:
    """Import emblib from the folder `package` ("": whichever is found), then do as told."""
    prefer(package)
    from experiments.gate.bench import Bench
    from experiments.gate.points import Turn, Warm, Weigh

    bench = Bench(pipe.recv())
    pipe.send(bench.build())
    bench.settle()
    while True:
        match pipe.recv():
            case Warm(point):
                pipe.send(bench.warm(point))
            case Turn() as turn:
                pipe.send(bench.turn(turn))
            case Weigh(point):
                pipe.send(bench.weigh(point))
            case _:
                return


def prefer(package: str) -> None:
    """Have `import emblib` find the one in this folder; raises WrongRevision where it does not.

    An editable install puts a finder in front of all folders, which would give every worker the
    working tree, and the gate would compare it with itself.
    """
    if not package:
        return
    folder = str(Path(package).resolve())
    sys.meta_path[:] = [finder for finder in sys.meta_path if _yields(finder, folder)]
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    import emblib

    if not _is_in(str(emblib.__file__), folder):
        raise WrongRevision(f"import emblib gives {emblib.__file__}, not the one in {folder}")


def _yields(finder: Any, folder: str) -> bool:
    """Whether a finder of modules looks in sys.path, knows no emblib, or knows the right one."""
    if finder is PathFinder or not hasattr(finder, "find_spec"):
        return True
    spec = finder.find_spec("emblib", None)
    return spec is None or _is_in(str(spec.origin), folder)


def _is_in(file: str, folder: str) -> bool:
    return Path(file).resolve().is_relative_to(folder)
