"""Make the links of a README absolute: PyPI shows it without the repository around it.

python scripts/pypi_readme.py FOLDER    rewrites FOLDER/README.md, a copy that packages are built of

Files become links into the repository, images links to their bytes, both at the tag of the version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def absolute(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose relative links lead to the repository at a tag."""
    raw = repository.replace("https://github.com/", "https://raw.githubusercontent.com/")

    def target(link: re.Match[str]) -> str:
        words = _LINK.sub(target, link[2])  # an image may be the text of a link
        base = f"{raw}/{tag}" if link[1] else f"{repository}/blob/{tag}"
        return f"{link[1]}[{words}]({base}/{link[3]})"

    return _LINK.sub(target, text)


def main(folder: Path) -> None:
    """Rewrite the README of a source tree."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    stated = re.search(r'^__version__ = "(.*)"', (folder / "emblib/__init__.py").read_text(), re.M)
    assert stated
    readme, tag = folder / "README.md", f"v{stated[1].partition('+')[0]}"
    readme.write_text(absolute(readme.read_text(), project["urls"]["Repository"], tag))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
