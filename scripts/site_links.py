"""A hook of MkDocs: links of the site to files outside of docs/ lead to the repository."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the Markdown of a page whose links out of docs/ lead to the repository."""
    folder = PurePosixPath(page.file.src_uri).parent

    def replace_link(link: re.Match[str]) -> str:
        parts: list[str] = []
        num_above = 0  # number of folders that the link leads up from docs/
        for part in (folder / link[1]).parts:
            if part == "..":
                num_above, parts = (num_above, parts[:-1]) if parts else (num_above + 1, parts)
            else:
                parts.append(part)
        if not num_above:
            return link[0]
        return f"]({config.repo_url}/blob/main/{'/'.join(parts)}{link[2] or ''})"

    return _LINK.sub(replace_link, markdown)
