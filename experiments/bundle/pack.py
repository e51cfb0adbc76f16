"""Pack runs into a bundle, a zip file: results, configuration, source, commands, checksums.

The tables and reports of a run are rendered again from its samples before they are packed, so
`verify` can rebuild the same ones. bundle.json describes the runs; REPRODUCE.md tells readers what
to do.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from experiments.bundle import archive
from experiments.bundle.archive import BundleError
from experiments.bundle.claims import RULE, TIME_TOLERANCE, Measure, claims_of
from experiments.config.schema import UsageError, folder_name
from experiments.paths import CONF, ROOT
from experiments.report import text, write_report
from experiments.report.data import Run
from experiments.report.document import template_environment
from experiments.results.store import POINTS, has_records, read_config, unpack_records

VERSION = 1
_templates = template_environment(Path(__file__).parent, keep_trailing_newline=True)
_templates.filters["seconds"] = text.seconds
TEMPLATE = _templates.get_template("REPRODUCE.md.jinja")
REQUIRED_FILES = ("config.yaml", "environment.json")
# Files of a run that are not copied: hidden ones, and those that packing renders from the samples.
NOT_COPIED = ("*.png", "index.html", "report.md", "results.csv", "hit_rates.csv", ".*")
DUPLICATE_SUFFIXES = (".svg", ".parquet")  # of files whose content is packed in another format, too


class RunEntry(TypedDict):
    """The entry of a run in bundle.json; an entry that the run did not record is None or empty."""

    folder: str  # its folder in the bundle
    experiment: str
    kind: str
    question: str
    status: str | None
    smoke: bool
    command: str  # the command line that measured it
    seconds: float | None  # duration
    device: str | None  # name of the device
    cuda: bool
    torch: str | None  # version
    code: dict[str, Any]  # commit `sha`, and whether the work tree was `dirty`; {} if unknown
    hardware_id: str | None
    claims: list[dict[str, Any]]  # see `Claim.as_json`


class BundleDescription(TypedDict):
    """The content of bundle.json."""

    bundle_version: int
    harness: str  # digest of the harness that packed it
    runs: list[RunEntry]
    notes: list[str]


@dataclass(frozen=True)
class PackResult:
    """The result of packing.

    Attributes:
        path: file of the bundle.
        bundle_id: sha256 of its checksums.
        num_runs: number of runs.
        num_claims: number of claims.
        notes: shortcomings of the bundle, such as a missing source.
    """

    path: Path
    bundle_id: str
    num_runs: int
    num_claims: int
    notes: list[str]


def pack(directories: Sequence[Path], out: Path, folder: Path) -> PackResult:
    """Pack runs into a bundle.

    Args:
        directories: directories of the runs, which are not changed.
        out: bundle to write; an older file is replaced.
        folder: empty scratch folder, in which the reports are rebuilt.

    Raises:
        BundleError: a directory is not a run, its report cannot be rebuilt, or the bundle would be
            too large.
        OSError: the bundle cannot be written.
    """
    contents: dict[str, bytes] = {}
    runs: list[RunEntry] = []
    notes: list[str] = []
    for directory in directories:
        name = _folder_in_bundle(directory, [entry["folder"] for entry in runs])
        run = _copy_rebuilt(directory, folder / name)
        files = [
            file
            for file in run.path.rglob("*")
            if file.is_file() and file.suffix not in DUPLICATE_SUFFIXES
        ]
        for path in sorted(files):
            contents[f"{name}/{path.relative_to(run.path).as_posix()}"] = path.read_bytes()
        runs.append(run_entry(name, run))
        if run.kind.reporting.special_report:
            notes.append(
                f"{name}: the kind {run.kind.name} renders its own reports, which are not rebuilt: "
                "only its checksums are verified."
            )
    for path in sorted(CONF.rglob("*.yaml")):
        contents[f"conf/{path.relative_to(CONF).as_posix()}"] = path.read_bytes()
    for sha in dict.fromkeys(entry["code"].get("sha") for entry in runs):
        has_changes = any(
            entry["code"].get("dirty") for entry in runs if entry["code"].get("sha") == sha
        )
        source = _source_archive(sha) if sha else None
        if source is not None:
            contents[f"source/{sha}.tar.gz"] = source
        if source is None or has_changes:
            notes.append(_source_note(sha, is_known=source is not None))
    contents["environment/packages.txt"] = _installed_packages().encode()
    if (ROOT / "LICENSE").is_file():
        contents["LICENSE"] = (ROOT / "LICENSE").read_bytes()
    description: BundleDescription = {
        "bundle_version": VERSION,
        "harness": harness_digest(),
        "runs": runs,
        "notes": notes,
    }
    contents["bundle.json"] = (json.dumps(description, indent=1) + "\n").encode()
    contents["REPRODUCE.md"] = reproduce(description).encode()
    bundle_id = archive.write(out, contents)
    return PackResult(out, bundle_id, len(runs), sum(len(entry["claims"]) for entry in runs), notes)


def _folder_in_bundle(directory: Path, used_names: Sequence[str]) -> str:
    """Return runs/<experiment>/<run>, followed by a number if `used_names` has it.

    For a reference, which is stored as <device>/<experiment>, <run> is the device.

    Raises:
        BundleError: the directory is not a run, its config.yaml is damaged, or its name cannot be
            that of a folder.
    """
    missing_files = [name for name in REQUIRED_FILES if not (directory / name).is_file()]
    missing_files += [] if has_records(directory) else [POINTS]
    if missing_files:
        raise BundleError(f"{directory} is not a run: it has no {', '.join(missing_files)}")
    try:
        experiment = folder_name(read_config(directory / "config.yaml").name)
    except (UsageError, ValueError) as error:
        raise BundleError(f"{directory}: {error}") from error
    folder, parent = directory.resolve().name, directory.resolve().parent.name
    base_name = f"runs/{experiment}/{folder if folder != experiment else parent}"
    name, number = base_name, 1
    while name in used_names:
        number += 1
        name = f"{base_name}-{number}"
    return name


def _copy_rebuilt(directory: Path, target: Path) -> Run:
    """Copy a run and render its tables and reports again; return the copy.

    Reports of kinds with a `special_report`, such as the gate's, are copied unchanged.

    Raises:
        BundleError: the run cannot be read, or its report cannot be rendered.
    """
    try:
        run = Run.read(directory)
        if run.kind.reporting.special_report:
            shutil.copytree(directory, target, ignore=shutil.ignore_patterns(".*"))
            unpack_records(target)
            return dataclasses.replace(run, path=target)
        shutil.copytree(directory, target, ignore=shutil.ignore_patterns(*NOT_COPIED))
        unpack_records(target)
        write_report(target)
        return Run.read(target)
    except Exception as error:
        raise BundleError(
            f"{directory}: its report cannot be rendered ({type(error).__name__}: {error}); "
            "`python run.py report` on it shows where"
        ) from error


def reproduce(description: BundleDescription) -> str:
    """Render REPRODUCE.md from bundle.json."""
    runs = description["runs"]
    claim_counts = [
        {
            measure.value: sum(claim["measure"] == measure.name for claim in run["claims"])
            for measure in Measure
        }
        for run in runs
    ]
    return TEMPLATE.render(
        runs=zip(runs, claim_counts, strict=True),
        notes=description["notes"],
        sha=next(
            (str(entry["code"]["sha"]) for entry in runs if entry["code"].get("sha")), "COMMIT"
        ),
        rule=RULE,
        tolerance=f"{100 * TIME_TOLERANCE:.0f} %",
    )


def run_entry(name: str, run: Run) -> RunEntry:
    """Return a run's entry of bundle.json; `name` is its folder in the bundle."""
    environment = run.environment
    return {
        "folder": name,
        "experiment": str(run.config.name),
        "kind": run.kind.name,
        "question": run.info.get("question", ""),
        "status": run.info.get("status"),
        "smoke": run.is_smoke,
        "command": environment.get("command", ""),
        "seconds": run.info.get("seconds"),
        "device": environment.get("device"),
        "cuda": environment.get("gpu") is not None,
        "torch": environment.get("torch"),
        "code": environment.get("git") or {},
        "hardware_id": environment.get("hardware_id"),
        "claims": [claim.as_json() for claim in claims_of(run)],
    }


def _source_archive(sha: str) -> bytes | None:
    """Return the commit as a compressed tar file; None if git fails or does not have it."""
    command = ["git", "archive", "--format=tar", f"--prefix=emblib-{sha}/", "--end-of-options", sha]
    try:
        completed = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return gzip.compress(completed.stdout, 6, mtime=0)


def _source_note(sha: str | None, *, is_known: bool) -> str:
    """Return the note about a commit whose source is missing, or (`is_known`) not all that ran."""
    if not sha:
        return "The source of some runs is not enclosed: they did not record a commit."
    if is_known:
        return (
            f"Runs at {sha} had changes that are in no commit: source/{sha}.tar.gz is the commit, "
            "not quite what ran."
        )
    return f"The source of commit {sha} is not enclosed: git does not have it here."


def _installed_packages() -> str:
    """Return the packages that are installed here, one per line."""
    versions = {
        (distribution.name or "?", distribution.version)
        for distribution in importlib.metadata.distributions()
    }
    lines = sorted(f"{name}=={version}" for name, version in versions)
    return "# Installed where the bundle was packed.\n" + "\n".join(lines) + "\n"


@cache
def harness_digest() -> str:
    """Return a hash of the sources and templates of `experiments`."""
    digest = hashlib.sha256()
    folder = ROOT / "experiments"
    sources = [
        file for suffix in ("py", "html", "md", "jinja") for file in folder.rglob(f"*.{suffix}")
    ]
    for path in sorted(sources):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder in which reports are rebuilt; leaving the context deletes it."""
    return tempfile.TemporaryDirectory(prefix="emblib-bundle-")
