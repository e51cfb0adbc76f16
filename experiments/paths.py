"""Folders of the repository, found from this file, and of the library; versions of packages."""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
REFERENCE = ROOT / "reports" / "reference"


def library_folders() -> list[Path]:
    """Return the folders of the installed emblib; [] if there is none.

    An editable install may have several.
    """
    spec = find_spec("emblib")
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def shown_path(path: Path) -> Path:
    """Return a path as a user would type it: relative to the current folder if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
