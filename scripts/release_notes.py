"""Print the notes of a release: its section of CHANGELOG.md, then its files.

    python scripts/release_notes.py v0.1.0 [FOLDER]

The version stands once, in `emblib/__init__.py`. The tag, the changelog and every file in the
folder of packages must name the same one; otherwise nothing is printed and the status is 1.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version() -> str:
    """Return the version that `emblib/__init__.py` states."""
    match = re.search(r'^__version__ = "(.+)"$', (ROOT / "emblib/__init__.py").read_text(), re.M)
    assert match
    return match[1]


def notes(tag: str, changelog: str, files: list[str]) -> str:
    """Return the notes of a release as Markdown.

    Args:
        tag: tag of the release, "v" and the version.
        changelog: text of CHANGELOG.md.
        files: names of the files of the release.

    Raises:
        ValueError: tag, source, changelog and files do not state the same version.
    """
    number = version()
    if tag != f"v{number}":
        raise ValueError(f"the tag is {tag}, but emblib/__init__.py says {number}: tag v{number}")
    pattern = rf"^## \[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)"
    section = re.search(pattern, changelog, re.M | re.S)
    if section is None:
        raise ValueError(f"CHANGELOG.md has no section '## [{number}] - YYYY-MM-DD'")
    for file in files:
        if not re.match(rf"emblib-{re.escape(number)}(\+cu\d+)?(-|\.tar\.gz)", file):
            raise ValueError(f"{file} is not of version {number}")
    lists = "".join(f"- `{file}`\n" for file in files)
    return section[1].strip() + (f"\n\n### Files\n\n{lists}" if files else "\n")


def main(arguments: list[str]) -> int:
    """Print the notes of the tag in the arguments, [tag, folder]; return the exit status.

    The folder, which may be left out, has the files of the release.
    """
    files = sorted(path.name for path in Path(arguments[1]).iterdir()) if arguments[1:] else []
    try:
        print(notes(arguments[0], (ROOT / "CHANGELOG.md").read_text(), files), end="")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
