"""Reports of many runs as one folder of pages: `python -m experiments.gallery FOLDER --out OUT`.

Every report is self-contained, so that any web server, or none, shows them. Prints the answers as
Markdown.
"""

from __future__ import annotations

import argparse
import html
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.report import text
from experiments.results.store import read_json

TITLE = "<title>emblib: measurements</title>"
PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>emblib: measurements</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 1rem; }}
li {{ margin: 0 0 1rem; list-style: none; }}
ul {{ padding: 0; }}
small {{ opacity: .7; }}
.bad {{ color: light-dark(#a40000, #ff8a80); }}
</style></head><body>
<h1>emblib: measurements</h1>
<ul>
{items}
</ul>
</body></html>
"""


@dataclass(frozen=True)
class Page:
    """One run's report, and what a list says of it."""

    directory: Path
    experiment: str
    status: str
    answer: str
    device: str
    time: str
    commit: str

    @property
    def place(self) -> str:
        """Where its page is in the gallery."""
        name, device = self.directory.name, self.directory.resolve().parent.name
        # References are named by their experiment, in a folder a device.
        return f"{self.experiment}/{device if name == self.experiment else name}/index.html"


def pages(folder: Path) -> list[Page]:
    """Every run under `folder` that has a report, by experiment, the latest first."""
    found = [_page(path.parent) for path in folder.rglob("index.html")]
    known = [page for page in found if page is not None]
    latest = sorted(known, key=lambda page: (page.time, page.directory.name), reverse=True)
    return sorted(latest, key=lambda page: page.experiment)


def _page(directory: Path) -> Page | None:
    if not (directory / "run.json").is_file():
        return None  # some other page
    info, environment = read_json(directory, "run.json"), read_json(directory, "environment.json")
    code = environment.get("git") or {}
    dirty = " with changes" * bool(code.get("dirty"))
    return Page(
        directory,
        str(info.get("experiment")),
        str(info.get("status")),
        _answer(directory / "report.md"),
        str(environment.get("device")),
        str(environment.get("time_utc")),
        f"{code.get('sha') or 'no commit'}{dirty}",
    )


def _answer(report: Path) -> str:
    """The first sentence of the report, which answers its question."""
    lines = report.read_text().splitlines() if report.is_file() else []
    bold = next((line for line in lines if line.startswith("**")), "")
    return bold.partition("**")[2].partition("**")[0]


def write(found: Sequence[Page], out: Path) -> None:
    """The pages and their list in place of an older gallery; raises ValueError for other places."""
    if any(page.directory.resolve().is_relative_to(out.resolve()) for page in found):
        raise ValueError(f"{out} has the runs themselves in it: choose another folder")
    if out.exists():
        if not out.is_dir() or (any(out.iterdir()) and not _is_gallery(out)):
            raise ValueError(f"{out} is not empty and no gallery: choose another folder")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    for page in found:
        target = out / page.place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(page.directory / "index.html", target)
    items = "\n".join(map(_item, found)) or "<li>No run has a report.</li>"
    (out / "index.html").write_text(PAGE.format(items=items))


def _is_gallery(folder: Path) -> bool:
    """Reports have an index.html too, and samples beside it."""
    index = folder / "index.html"
    return index.is_file() and TITLE in index.read_text(errors="replace")


def _item(page: Page) -> str:
    name, answer, place = (html.escape(t) for t in (page.experiment, page.answer, page.place))
    about = html.escape(f"{page.time} · {page.device} · {page.commit}")
    ended = html.escape(page.status)
    note = "" if page.status == "finished" else f' <span class="bad">{ended}</span>'
    return (
        f'<li><a href="{place}"><b>{name}</b></a>{note}<br>{answer}<br><small>{about}</small></li>'
    )


def markdown(found: Sequence[Page]) -> str:
    """The same for the page of a job."""
    lines = [
        f"- **{page.experiment}**"
        + (f" ({page.status})" if page.status != "finished" else "")
        + f": {page.answer}"
        for page in found
    ]
    return text.markdown_document(
        ["### Measurements", "", *(lines or ["No run has a report."]), ""]
    )


def main(arguments: Sequence[str]) -> int:
    """Exit status 2 where there is nothing to show, or the place is taken."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gallery", description=__doc__)
    parser.add_argument("folder", type=Path, help="with runs in it, at any depth")
    parser.add_argument("--out", type=Path, required=True)
    parsed = parser.parse_args(arguments)
    if not parsed.folder.is_dir():
        print(f"error: there is no folder {parsed.folder}", file=sys.stderr)
        return 2
    found = pages(parsed.folder)
    try:
        write(found, parsed.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
