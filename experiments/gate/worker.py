"""A worker of the gate: one revision of emblib in one process, which times points on request.

This file and its top-level imports do not use emblib. So the worker can first make sure that
`import emblib` finds the revision that it was started for, and not an installed one.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class WrongRevision(Exception):
    """`import emblib` finds another package than the worker was started for."""


def serve(pipe: Connection, package: str) -> None:
    """Import emblib from the folder `package` ("" for the default), then answer messages.

    `points` describes the messages. An error of a method ends the worker.

    Raises:
        WrongRevision: `import emblib` finds another package.
    """
    import_from(package)
    from experiments.gate.bench import Bench

    bench = Bench(pipe.recv())
    pipe.send(bench.build())
    bench.stop_garbage_collection()
    while message := pipe.recv():
        method, *arguments = message
        pipe.send(getattr(bench, method)(*arguments))


def import_from(package: str) -> None:
    """Make `import emblib` find the package in the folder `package`, and import it.

    An editable install puts a finder before all folders. With that finder every worker would import
    the working tree, and the gate would compare it with itself. So this function removes finders
    that know another emblib from sys.meta_path. It does nothing for "".

    Raises:
        WrongRevision: emblib was found in another folder, for example because it was imported
            before.
    """
    if not package:
        return
    folder = str(Path(package).resolve())
    sys.meta_path[:] = [finder for finder in sys.meta_path if _is_harmless(finder, folder)]
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    import emblib

    if not _is_in(str(emblib.__file__), folder):
        raise WrongRevision(f"import emblib gives {emblib.__file__}, not the one in {folder}")


def _is_harmless(finder: Any, folder: str) -> bool:
    """Return whether a finder searches sys.path, does not know emblib, or knows the right one."""
    if finder is PathFinder or not hasattr(finder, "find_spec"):
        return True
    spec = finder.find_spec("emblib", None)
    return spec is None or _is_in(str(spec.origin), folder)


def _is_in(file: str, folder: str) -> bool:
    return Path(file).resolve().is_relative_to(folder)
