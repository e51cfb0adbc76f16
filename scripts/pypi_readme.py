"""Make the links of a README absolute, because PyPI shows it without the repository around it.

    python scripts/pypi_readme.py FOLDER

rewrites FOLDER/README.md in place. FOLDER is a copy of the source tree, of which packages are
built. Links to files become links into the repository, images links to their bytes, both at the tag
of the version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

# An optional "!" (of an image), [text], which may have an image in it, and (target) of a file.
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def make_links_absolute(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose relative links lead to the repository at a tag.

    `repository` is its address on GitHub. Links to headings and to other sites stay as they are.
    """
    raw_repository = repository.replace("https://github.com/", "https://raw.githubusercontent.com/")

    def replace_link(link: re.Match[str]) -> str:
        link_text = _LINK.sub(replace_link, link[2])  # an image may be the text of a link
        base = f"{raw_repository}/{tag}" if link[1] else f"{repository}/blob/{tag}"
        return f"{link[1]}[{link_text}]({base}/{link[3]})"

    return _LINK.sub(replace_link, text)


def main(folder: Path) -> None:
    """Rewrite the README of a source tree in place."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    version = re.search(r'^__version__ = "(.*)"', (folder / "emblib/__init__.py").read_text(), re.M)
    assert version
    readme, tag = folder / "README.md", f"v{version[1].partition('+')[0]}"
    readme.write_text(make_links_absolute(readme.read_text(), project["urls"]["Repository"], tag))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
