"""Every published figure and its verdict: `python -m experiments.compare.overview [write | check]`.

Beside the committed references; `--runs RUN ...` adds runs that are not committed. `write` puts the
page into reports/published/README.md, `check` exits 1 where that is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.compare import published
from experiments.compare.published import Figure, Finding, Source, Verdict
from experiments.paths import REFERENCE
from experiments.report import text
from experiments.report.data import Run
from experiments.results.store import runs_in

PAGE = published.FOLDER / "README.md"
OPENING = """\
# Published figures

What others say of their embedding tables, where it was read, and what became of it here. This page
is made by `python -m experiments.compare.overview write` from the files beside it and from the runs
in `reports/reference/`. How to add a figure or a run:
[docs/generations.md](../../docs/generations.md).
"""


def findings(extra: Sequence[Path], folder: Path = REFERENCE) -> list[Finding]:
    """Each source beside every run of its experiment; beside none where there is none."""
    paths = runs_in(folder, "*/*")
    runs: dict[str, list[Run]] = {}
    for path in [*paths, *extra]:
        if (path / "config.yaml").is_file():
            run = Run.read(path)
            runs.setdefault(str(run.config.name), []).append(run)
    found = []
    for source in published.sources():
        beside: list[Run | None] = [*runs.get(source.experiment, [])]
        for each in beside or [None]:
            found += published.findings(each, source)
    return found


def markdown(found: Sequence[Finding]) -> str:
    """Render the whole page."""
    counts = published.counted(found)
    words = ", ".join(f"{n} {verdict.value}" for verdict, n in counts.items())
    lines = [OPENING, f"**{len(found)} figures: {words}.**", "", published.RULE, ""]
    sources = {f.source.key: f.source for f in found}
    for key, source in sources.items():
        lines += _block(source, [f for f in found if f.source.key == key])
    return text.markdown_document(lines)


def _block(source: Source, found: Sequence[Finding]) -> list[str]:
    from experiments.kinds import anchor_report

    run = f"`python run.py +experiment={source.experiment}`. " if source.experiment else ""
    told = [f for f in found if f.verdict is not Verdict.NOT_RUN or f.ours == f.ours]
    silent = [f for f in found if f not in told]
    lines = [f"## {source.title}", "", f"[{source.source}]({source.url}). {run}{source.note}", ""]
    if told:
        lines += [anchor_report.table(told).markdown(), ""]
    for reason in dict.fromkeys(f.reason for f in silent):
        same = [f.figure for f in silent if f.reason == reason]
        lines += [f"Not run here: {reason}. Theirs is of {published.theirs(same[0])}.", ""]
        lines += [*_listed(same), ""]
    return lines


def _listed(figures: Sequence[Figure]) -> list[str]:
    """Return one bullet per figure, or one for all with the same prefix up to the last colon."""
    groups: dict[tuple[str, str], list[str]] = {}
    for figure in figures:
        begin, colon, end = figure.name.rpartition(": ")
        value = published.shown(figure.value)
        place, shown = (begin, f"{end} {value}") if colon else (figure.name, value)
        groups.setdefault((place, figure.unit), []).append(shown)
    return [f"- {begin}: {' · '.join(ends)} {unit}" for (begin, unit), ends in groups.items()]


def main(arguments: Sequence[str]) -> int:
    """Print the page, write it, or say whether it is out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare.overview",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=("print", "write", "check"), default="print")
    parser.add_argument("--runs", nargs="*", type=Path, default=[])
    parsed = parser.parse_args(arguments)
    page = markdown(findings(parsed.runs))
    if parsed.command == "print":
        print(page)
    elif parsed.command == "write":
        PAGE.write_text(page)
    elif not PAGE.is_file() or PAGE.read_text() != page:
        print(
            "reports/published/README.md is out of date: run "
            "`python -m experiments.compare.overview write`"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
