"""Store runs as committed references, and update the pages that show them.

`keep` stores a finished run. `write` updates the tables of README.md, docs/benchmarks.md and
reports/README.md; `check` checks that they are up to date. `add` measures experiments on this
machine, by default those that have a reference. It stores the finished runs, compares each with the
references of other machines, and updates the pages; arguments with `=` go to every run, e.g.
timing=paper. `measure` measures what README.md and docs/benchmarks.md quote, on one commit, all of
it or the named parts, and updates the pages.
Exit status: 0 done, 1 a run failed or a page is out of date, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments import configure, evidence, front_page
from experiments.config.schema import UsageError, folder_name
from experiments.paths import REFERENCE, ROOT
from experiments.report import text
from experiments.report.data import Run
from experiments.results.store import POINTS, has_records, pack_records, runs_in

# Comments around the generated blocks of docs/benchmarks.md and reports/README.md.
RESULTS = "<!-- results:start -->", "<!-- results:end -->"
QUESTIONS = ("<!-- experiments:start -->", "<!-- experiments:end -->")
KEPT_PATTERNS = ("*.yaml", "*.json", "*.jsonl", "*.xz", "*.csv", "*.md", "*.png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `reference`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", required=True)
    commands.add_parser("keep", help="store a run as a reference").add_argument("run", type=Path)
    commands.add_parser("write", help="update the tables of the pages")
    commands.add_parser("check", help="check that these tables are up to date")
    adder = commands.add_parser("add", help="measure on this machine and store the runs")
    adder.add_argument("words", nargs="*", metavar="EXPERIMENT|KEY=VALUE")
    measured = commands.add_parser("measure", help="measure what README.md quotes, on one commit")
    measured.add_argument(
        "words", nargs="*", metavar="PART|timing=smoke", help="some parts; only try the plan"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run an action and return the exit status; see the module docstring."""
    if arguments.action == "keep":
        path = arguments.run
        if not (path / "config.yaml").is_file() or not has_records(path):
            raise UsageError(f"{path} is not a run: it has no config.yaml with a points.jsonl")
        print(keep(path).relative_to(ROOT))
        return 0
    if arguments.action == "add":
        return add(arguments.words)
    if arguments.action == "measure":
        smoke = "timing=smoke" in arguments.words
        names = [word for word in arguments.words if word != "timing=smoke"]
        exit_status = evidence.measure(lambda name: keep(latest_run(name)), names, smoke=smoke)
        return exit_status if smoke else max(exit_status, write_pages())
    return update(write=arguments.action == "write")


def update(*, write: bool) -> int:
    """Update the generated tables if `write`, else check them; return 1 if one is out of date."""
    status = 0
    for name, update_page in (
        ("README.md", front_page.front_page),
        ("docs/benchmarks.md", lambda page: front_page.benchmarks(with_results(page))),
        ("reports/README.md", with_questions),
    ):
        path = ROOT / name
        page = path.read_text()
        expected = update_page(page)
        if write:
            path.write_text(expected)
        elif page != expected:
            print(f"{name} is out of date: run `python run.py reference write`")
            status = 1
    return status


def keep(run_directory: Path, folder: Path = REFERENCE) -> Path:
    """Copy a run to <folder>/<device>/<experiment>, with compressed samples; return the copy.

    An earlier copy is replaced once the new one is complete.

    Raises:
        UsageError: the run is damaged, a smoke run or itself the stored reference, did not finish,
            or has no result.
    """
    stored_run = Run.read(run_directory)
    if stored_run.is_smoke or stored_run.info.get("status") != "finished":
        raise UsageError(f"{run_directory}: only a finished run at full size can be a reference")
    if all(record["status"] != "ok" for record in stored_run.records):
        raise UsageError(f"{run_directory}: nothing that it measured succeeded")
    device = evidence.device_folder(str(stored_run.environment["device"]))
    target = folder / device / folder_name(stored_run.config.name)
    if target.resolve() == run_directory.resolve():
        raise UsageError(f"{run_directory} is the stored reference itself")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as scratch:
        copy = Path(scratch) / "copy"
        copy.mkdir()
        for pattern in KEPT_PATTERNS:
            for source in sorted(run_directory.glob(pattern)):
                shutil.copy2(source, copy / source.name)
        if (copy / POINTS).is_file():
            pack_records(copy)
        if target.exists():
            target.rename(Path(scratch) / "earlier")
        copy.rename(target)
    return target


def results_block(folder: Path) -> str:
    """Return the Markdown of all references for docs/benchmarks.md: a table or answer of each.

    Raises:
        UsageError: a reference is damaged.
    """
    blocks, answers = [], []
    for path in runs_in(folder, "*/*"):
        stored_run = Run.read(path)
        lines = stored_run.kind.readme_lines(stored_run, _what_ran(stored_run, path), _link(path))
        if lines is None:
            answers.append(_answer_line(stored_run, path))
        else:
            blocks.append("\n".join(lines))
    blocks += ["\n".join(answers)] if answers else []
    return text.markdown_document(
        ["\n\n".join(blocks) or "No reference results are committed yet."]
    )


def _what_ran(stored_run: Run, path: Path) -> str:
    environment, stored_evidence = stored_run.environment, evidence.StoredEvidence.read(path)
    state = f"; {evidence.describe_load(stored_evidence.state)}" if stored_evidence.state else ""
    return (
        f"`{environment['command']}` on {environment['device']} "
        f"(torch {environment['torch']}, {stored_evidence.age()}{state})"
    )


def _answer_line(stored_run: Run, path: Path) -> str:
    """Return a line with the answer of a run, the bold sentence of its report."""
    answer = re.search(r"\*\*(.+?)\*\*", (path / "report.md").read_text())
    return f"- {_what_ran(stored_run, path)}: {answer[1] if answer else 'no answer.'} {_link(path)}"


def _link(path: Path) -> str:
    report = path / "report.md"
    target = f"../{report.relative_to(ROOT)}" if report.is_relative_to(ROOT) else report
    return f"[Full report]({target})"  # relative to docs/


def with_results(page: str, folder: Path = REFERENCE) -> str:
    """Return the text of docs/benchmarks.md, `page`, with the block of all references replaced.

    Raises:
        ValueError: `page` lacks the markers RESULTS.
    """
    return front_page.replace_block(page, RESULTS, results_block(folder))


def with_questions(page: str) -> str:
    """Return the text of reports/README.md, `page`, with its table of experiments up to date.

    Raises:
        ValueError: `page` lacks the markers QUESTIONS.
    """
    lines = ["| question | experiment |", "| --- | --- |"]
    lines += [
        f"| {text.capitalise(configure.question(name))} | `python run.py +experiment={name}` |"
        for name in configure.groups()["experiment"]
    ]
    return front_page.replace_block(page, QUESTIONS, "\n".join(lines))


def add(words: Sequence[str]) -> int:
    """Measure experiments, store and compare the runs, and update the pages.

    Return 1 if a run or a page failed, else 0; a comparison that fails does not count.

    Raises:
        UsageError: a word is neither an experiment nor a setting that `reference add` takes.
    """
    settings = [
        argument
        for argument in words
        if "=" in argument and not argument.startswith("+experiment=")
    ]
    for override in configure.parse(settings):  # an older run would be taken for the new one
        if override.key_or_group in ("report.folder", "dry_run", "name"):
            stored = "stores new runs of reports/runs/EXPERIMENT"
            raise UsageError(f"{override.input_line}: `reference add` {stored}")
    names = experiments_to_run([argument for argument in words if argument not in settings])
    for name in names:
        configure.load([f"+experiment={name}", *settings])
    exit_status = 0
    for name in names:
        if _run_py(f"+experiment={name}", *settings):
            print(f"{name}: the run failed and is not stored", file=sys.stderr)
            exit_status = 1
            continue
        try:
            run_folder = keep(latest_run(name))
        except UsageError as error:
            print(f"{name}: {error}", file=sys.stderr)
            exit_status = 1
            continue
        print(f"kept {os.path.relpath(run_folder, ROOT)}")
        for other_run in runs_in(REFERENCE, f"*/{name}"):
            if other_run != run_folder:
                paths = [os.path.relpath(path, ROOT) for path in (other_run, run_folder)]
                folder = f"reports/compare/{name}/{other_run.parent.name}-{run_folder.parent.name}"
                _run_py("compare", *paths, "--out", folder)
    return max(exit_status, write_pages())


def write_pages() -> int:
    """Update the pages that show references; return 1 if one failed, else 0."""
    exit_status = 0
    for page in (["reference", "write"], ["compare", "--overview", "write"]):
        if _run_py(*page):
            print(f"{' '.join(page)} failed: its page is out of date", file=sys.stderr)
            exit_status = 1
    return exit_status


def experiments_to_run(names: Sequence[str]) -> list[str]:
    """Return the named experiments; if none is named, those with a reference.

    Raises:
        UsageError: there is no experiment of a name.
    """
    experiments = configure.groups()["experiment"]
    chosen_names = [name.removeprefix("+experiment=") for name in names]
    for name in chosen_names:
        if name not in experiments:
            raise UsageError(f"no experiment '{name}'. There is: {', '.join(experiments)}")
    return chosen_names or sorted(
        {path.name for path in runs_in(REFERENCE, "*/*")} & set(experiments)
    )


def latest_run(name: str) -> Path:
    """Return the most recently changed run of an experiment in reports/runs; there must be one."""
    runs = (ROOT / "reports" / "runs" / name).iterdir()
    return max(runs, key=lambda path: path.stat().st_mtime)


def _run_py(*words: str) -> int:
    command = ["run.py", *words]
    print("$ python " + shlex.join(command), flush=True)
    return subprocess.run([sys.executable, *command], cwd=ROOT).returncode
