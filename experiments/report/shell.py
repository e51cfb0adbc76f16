"""The frame of every page: one file with its style and script inside, that loads nothing."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from experiments.report.style import Figure, Panel

ASSETS = Path(__file__).parent


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page from pieces of HTML; headings with an id become its table of contents."""
    body = "\n".join(parts)
    heads = re.findall(r'<h2 id="?([\w-]+)"?[^>]*>(.*?)</h2>', body)
    links = "".join(f'<a href="#{name}">{text}</a>' for name, text in heads)
    nav = f'<nav aria-label="Contents">{links}</nav>' if len(heads) > 1 else ""
    body = body.replace("<!-- contents -->", nav, 1)
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title>\n"
        f"<style>\n{(ASSETS / 'page.css').read_text()}</style></head>\n"
        f"<body><main>\n{body}\n</main>\n"
        f"<script>\n{(ASSETS / 'page.js').read_text()}</script></body></html>\n"
    )


CONTENTS = "<!-- contents -->"  # where document() puts the links


def heading(text: str, name: str = "") -> str:
    """A section's heading; with a name it is linked from the top."""
    return f"<h2{f' id={name}' if name else ''}>{html.escape(text)}</h2>"


def figure(drawn: Figure, drawings: Sequence[str], level: int = 3) -> str:
    """A figure with its panels as inline SVG."""
    panels = "\n".join(
        f"<div class={_box(p)}>{d}</div>" for p, d in zip(drawn.panels, drawings, strict=True)
    )
    fixed = f' style="--columns: {drawn.columns}"' if drawn.columns else ""
    return (
        f"<figure><h{level}>{html.escape(drawn.title)}</h{level}>"
        f'<div class="panels{" fixed" * bool(fixed)}"{fixed}>{panels}</div>'
        f"<figcaption>{html.escape(drawn.caption)}</figcaption></figure>"
    )


def _box(panel: Panel) -> str:
    return '"panel wide"' if panel.width > 6 else "panel"


def paragraph(text: str, kind: str = "") -> str:
    """Escaped text in a paragraph of a class."""
    return f"<p{f' class={kind}' if kind else ''}>{html.escape(text)}</p>"


def tiles(values: Sequence[tuple[str, str, str]]) -> str:
    """The few numbers to remember: (value, what it is, kind: '', 'good', 'bad' or 'open')."""
    boxes = "".join(
        f'<div class="tile {kind}"><strong>{html.escape(value)}</strong>'
        f"<span>{html.escape(what)}</span></div>"
        for value, what, kind in values
    )
    return f"<div class=tiles>{boxes}</div>" if values else ""
