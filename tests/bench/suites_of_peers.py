"""Runs the tests of TorchRec or FBGEMM over FBGEMM and over emblib, and compares the outcomes.

    python -m tests.bench.suites_of_peers SOURCE torchrec --path LIBRARIES --out OUTCOMES
    python -m tests.bench.suites_of_peers SOURCE test --path SOURCE/test LIBRARIES \
        --out OUTCOMES --pattern '*_test.py' --switch fallback --table

SOURCE is a checkout of the peer, or its folder `test` alone, which stays outside this repository;
the paths below it name its test files or folders of them. Each file runs in a pytest of its own,
which ends after `--timeout` seconds, two files at a time; `--pattern tests` runs each folder of
that name in one pytest. Over emblib the switch
`EMBLIB_AS_FBGEMM` is set, for child processes as well. The outcome of each test is stored per file
and backend in OUTCOMES, so that a run that was interrupted goes on; `--again fail` runs those files
again that have a test that only FBGEMM passes.
Printed at the end: the outcomes counted, and each test with another outcome over emblib.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).parents[2]
BACKENDS = ("fbgemm", "emblib")
Outcomes = dict[str, list[str]]  # test -> [outcome, message]


def switch_folder(folder: Path) -> None:
    """Lay out a folder that does for PYTHONPATH what the package's `.pth` does in site-packages."""
    compat = REPOSITORY / "emblib/compat"
    shutil.copy(compat / "fbgemm_switch.py", folder / "_emblib_as_fbgemm.py")
    shutil.copy(compat / "emblib_as_fbgemm.pth", folder)
    (folder / "sitecustomize.py").write_text(
        "import site, os\nsite.addsitedir(os.path.dirname(__file__))\n"
    )


def run_file(file: Path, backend: str, options: argparse.Namespace, switch: str) -> Outcomes:
    """Run one file of tests and return the outcome of each of its tests."""
    source = options.source
    paths = [str(source), *options.path, *([switch, str(REPOSITORY)] * (backend == "emblib"))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "EMBLIB_AS_FBGEMM": options.switch if backend == "emblib" else "0",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--rootdir", str(source), f"--junitxml={report}", str(file)]
        if options.each:
            command += [f"--timeout={options.each}"]
        with (
            Path(folder, "log").open("w+") as log,
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                process.wait(options.timeout)
                ending = f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                ending = "timeout"
        if not report.exists():
            tail = Path(folder, "log").read_text()[-600:]
            return {"(file)": ["error", f"{ending}: {tail}"]}
        return _outcomes(report)


def _outcomes(report: Path) -> Outcomes:
    """Read pytest's report: passed, failed (also in setup or at import) or skipped."""
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file_and_class = (case.get("classname") or "").split(".")[-2:]
        name = f"{'.'.join(file_and_class)}::{case.get('name')}"
        outcome, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                message = f"{child.get('message')}\n{child.text}"[-3000:]
        found[name] = [outcome, message]
    return found


def stored(file: Path, backend: str, options: argparse.Namespace) -> Path:
    """Return where the outcomes of a file are stored."""
    name = str(file.relative_to(options.source)).replace("/", ".")
    return Path(options.out, f"{name}.{backend}.json")


def _read(file: Path, backend: str, options: argparse.Namespace) -> Outcomes | None:
    path = stored(file, backend, options)
    return json.loads(path.read_text()) if path.exists() else None


def differences(file: Path, options: argparse.Namespace) -> list[tuple[str, str, str, str]]:
    """Return test, outcome over FBGEMM, outcome over emblib and message where the two differ."""
    base, ours = (_read(file, backend, options) for backend in BACKENDS)
    if base is None or ours is None:
        return []
    absent = ["absent", ""]
    rows = []
    for name in sorted({*base, *ours}):
        if base.get(name, absent)[0] != ours.get(name, absent)[0]:
            outcome, message = ours.get(name, absent)
            test = f"{file.relative_to(options.source)}::{name}"
            rows.append((test, base.get(name, absent)[0], outcome, message))
    return rows


def is_wanted(file: Path, backend: str, options: argparse.Namespace) -> bool:
    """Return whether to run a file: it has no outcomes yet, or is to run again."""
    if backend not in options.over:
        return False
    if options.again == "all" or _read(file, backend, options) is None:
        return True
    lost = [row for row in differences(file, options) if row[1] == "passed"]
    return options.again == "fail" and backend == "emblib" and bool(lost)


def files_of(options: argparse.Namespace) -> list[Path]:
    """Return the test files below the named paths, without the excluded ones."""
    files: set[Path] = set()
    for name in options.below:
        path = options.source / name
        files |= {path} if path.is_file() else set(path.rglob(options.pattern))
    return sorted(f for f in files if not any(word in str(f) for word in options.exclude))


def print_table(files: list[Path], options: argparse.Namespace) -> None:
    """Print passed, failed and skipped tests of each file over both, and of all files."""
    kinds, totals = ("passed", "failed", "skipped"), Counter[tuple[str, str]]()
    print("| file | FBGEMM: pass, fail, skip | emblib |\n| --- | ---: | ---: |")
    for file in files:
        cells = []
        for backend in BACKENDS:
            counts = Counter(o for o, _ in (_read(file, backend, options) or {}).values())
            counts["failed"] += counts.pop("error", 0)
            totals.update({(backend, kind): counts[kind] for kind in kinds})
            cells.append(", ".join(str(counts[kind]) for kind in kinds))
        print(f"| `{file.relative_to(options.source)}` | {' | '.join(cells)} |")
    cells = [", ".join(str(totals[backend, kind]) for kind in kinds) for backend in BACKENDS]
    print(f"| all | {' | '.join(cells)} |")


def main() -> None:
    """Run what is to run, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=lambda text: Path(text).resolve())
    parser.add_argument("below", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--over", nargs="*", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--path", nargs="*", default=[], help="folders of libraries")
    parser.add_argument("--pattern", default="test_*.py")
    parser.add_argument("--exclude", nargs="*", default=[])
    parser.add_argument("--again", choices=("no", "fail", "all"), default="no")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--each", type=float, default=0, help="seconds of a test")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--messages", action="store_true")
    parser.add_argument("--switch", default="1", help="value of EMBLIB_AS_FBGEMM")
    parser.add_argument("--table", action="store_true", help="print the counts of each file")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    files = files_of(options)
    with tempfile.TemporaryDirectory() as switch, ThreadPoolExecutor(options.jobs) as pool:
        switch_folder(Path(switch))

        def run(work: tuple[Path, str]) -> None:
            outcomes = run_file(*work, options, switch)
            stored(*work, options).write_text(json.dumps(outcomes, indent=1))
            counts = Counter(outcome for outcome, _ in outcomes.values())
            print(work[0].relative_to(options.source), work[1], dict(counts), flush=True)

        work = [(f, b) for f in files for b in BACKENDS if is_wanted(f, b, options)]
        list(pool.map(run, work))
    if options.table:
        print_table(files, options)
    for backend in BACKENDS:
        counts = Counter(
            outcome for f in files for outcome, _ in (_read(f, backend, options) or {}).values()
        )
        print(f"{backend}: {dict(sorted(counts.items()))}")
    for file in files:
        for test, base, ours, message in differences(file, options):
            print(f"{test}: {base} -> {ours}")
            if options.messages:
                print("   ", message[-400:].replace("\n", "\n    "))


if __name__ == "__main__":
    main()
