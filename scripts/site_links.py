"""Links of the documentation site: files outside of docs/ are links into the repository."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return a page whose links out of docs/ lead to the repository."""
    folder = PurePosixPath(page.file.src_uri).parent

    def target(link: re.Match[str]) -> str:
        parts: list[str] = []
        above = 0
        for part in (folder / link[1]).parts:
            if part == "..":
                above, parts = (above, parts[:-1]) if parts else (above + 1, parts)
            else:
                parts.append(part)
        if not above:
            return link[0]
        return f"]({config.repo_url}/blob/main/{'/'.join(parts)}{link[2] or ''})"

    return _LINK.sub(target, markdown)
