"""Where things are in the repository, relative to this file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
REFERENCE = ROOT / "reports" / "reference"


def library_folders() -> list[Path]:
    """Return the folders of emblib; native libraries of an editable install have their own."""
    spec = find_spec("emblib")
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
