"""The page of every published figure and its verdict: reports/published/README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.compare import published
from experiments.compare.published import Figure, Finding, Source, Verdict
from experiments.paths import REFERENCE, ROOT
from experiments.report import text
from experiments.report.data import Run
from experiments.results.store import runs_in

PAGE = published.FOLDER / "README.md"
COMMAND = "python -m experiments.compare --overview"
OPENING = f"""\
# Published figures

What others say of their embedding tables, where it was read, and what became of it here. This page
is made by `{COMMAND} write` from the files beside it and from the runs
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


def run(command: str, extra: Sequence[Path]) -> int:
    """Print the page, write it, or report whether it is out of date."""
    page = markdown(findings(extra))
    if command == "print":
        print(page)
    elif command == "write":
        PAGE.write_text(page)
    elif not PAGE.is_file() or PAGE.read_text() != page:
        print(f"{PAGE.relative_to(ROOT)} is out of date: run `{COMMAND} write`")
        return 1
    return 0
