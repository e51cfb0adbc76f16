"""Where things are in the repository, relative to this file."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
REFERENCE = ROOT / "reports" / "reference"
