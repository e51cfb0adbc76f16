"""Verify that a bundle's tables, claims and reports follow from its samples, figures excepted.

`check` unpacks a bundle, copies each run without its tables and reports, renders these again, and
compares: tables number by number (`compare_tables`), pages text by text (`page_problems`), claims
by their keys.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import pandas as pd

from experiments.bundle import archive
from experiments.bundle.archive import BundleError
from experiments.bundle.claims import claims_of
from experiments.bundle.pack import VERSION, BundleDescription, harness_digest, reproduce, run_entry
from experiments.report import text, write_report
from experiments.report.data import Run

IGNORED_ELEMENTS = ("svg", "style", "script")  # elements of a page whose text is not compared
QUOTED_CHARACTERS = 60  # length of a quoted difference


class _PageText(HTMLParser):
    """Collect the text of a page, without IGNORED_ELEMENTS."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._ignored_elements: list[str] = []  # open ones, the innermost last

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in IGNORED_ELEMENTS:
            self._ignored_elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._ignored_elements and self._ignored_elements[-1] == tag:
            self._ignored_elements.pop()

    def handle_data(self, data: str) -> None:
        if not self._ignored_elements and data.strip():
            self.texts.append(data.strip())


def page_problems(packed: Path, rebuilt: Path) -> list[str]:
    """Return the differences between the report of a packed run and of the rebuilt one, in words.

    Both are directories. Figures are not compared, so the rebuilt run needs none.
    """
    problems = []
    for name in ("report.md", "index.html"):
        if not (packed / name).is_file():
            problems.append(f"{name} is missing, but the samples give it")
            continue
        if difference := _quote_difference(_read_texts(packed / name), _read_texts(rebuilt / name)):
            problems.append(f"{name} does not say what the samples say: {difference}")
    return problems


def _read_texts(path: Path) -> list[str]:
    """Return the lines of a Markdown file, or the texts of an HTML page, without empty ones."""
    if path.suffix == ".md":
        return [line for line in path.read_text().splitlines() if line.strip()]
    reader = _PageText()
    reader.feed(path.read_text())
    return reader.texts


def _quote_difference(packed_texts: Sequence[str], rebuilt_texts: Sequence[str]) -> str:
    """Return a sentence with the first difference of two lists of texts; "" if they are equal."""
    for packed, rebuilt in zip_longest(packed_texts, rebuilt_texts, fillvalue=""):
        if packed != rebuilt:
            pairs = enumerate(zip(packed, rebuilt, strict=False))
            position = next(
                (i for i, (left, right) in pairs if left != right), min(len(packed), len(rebuilt))
            )
            begin = max(0, position - QUOTED_CHARACTERS // 3)
            quoted = slice(begin, begin + QUOTED_CHARACTERS)
            return f"{packed[quoted]!r}, but they give {rebuilt[quoted]!r}"
    return ""


RELATIVE_TOLERANCE = 1e-9  # of a number that was written as text or summed in another order
MAX_LISTED = 5  # differences that are listed per table; others are counted
CLAIM_NUMBERS = ("value", "lo", "hi")  # numeric entries of a claim
CLAIM_ENTRIES = ("measure", "about", "what", *CLAIM_NUMBERS)
# Files of a run about which no note is written: the run itself and its reports.
CHECKED_FILES = {
    "points.jsonl",
    "config.yaml",
    "environment.json",
    "run.json",
    "report.md",
    "index.html",
}
# Entries that bundle.json must have per run, besides `folder` and `claims`.
RUN_ENTRIES = ("experiment", "device", "cuda", "torch", "code", "seconds")


@dataclass
class Verification:
    """The result of verifying a bundle.

    Attributes:
        description: content of bundle.json.
        num_compared: number of numbers of tables and of claims that were compared.
        problems: contradictions between the bundle and its samples.
        notes: notes of the bundle, and what could not be verified.
    """

    description: BundleDescription
    num_compared: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(path: Path, folder: Path) -> Verification:
    """Unpack a bundle, rebuild its runs from their samples, and compare.

    Args:
        path: bundle.
        folder: folder for the unpacked bundle. Runs are rebuilt in its sibling `rebuilt`. Neither
            may exist yet.

    Raises:
        BundleError: the bundle is damaged, of another version, or cannot be unpacked.
    """
    contents = archive.read(path)
    description = _read_description(contents)
    try:
        archive.unpack(contents, folder)
    except (OSError, ValueError) as error:
        raise BundleError(f"it cannot be unpacked: {error}") from error
    verification = Verification(description, notes=[str(note) for note in description["notes"]])
    is_same_harness = description["harness"] == harness_digest()
    if not is_same_harness:
        verification.notes.append(
            "The bundle was packed by another version of the harness. Numbers are compared where "
            "both have them; what the report says in words is not."
        )
    elif not _has_instructions_of(description, contents.get("REPRODUCE.md")):
        verification.problems.append("REPRODUCE.md does not say what bundle.json says")
    verification.problems += _unknown_files(contents, description["runs"])
    for index, entry in enumerate(description["runs"]):
        scratch = folder.with_name("rebuilt") / str(index)
        try:
            problems = _run_problems(
                entry, folder / entry["folder"], scratch, verification, is_strict=is_same_harness
            )
        except Exception as error:  # a forged run may raise any error
            problems = [f"its report cannot be rendered ({type(error).__name__}: {error})"]
        verification.problems += [f"{entry['folder']}: {problem}" for problem in problems]
    return verification


def _has_instructions_of(description: BundleDescription, instructions: bytes | None) -> bool:
    """Return whether `instructions` are the REPRODUCE.md that packing writes for a bundle.json."""
    try:
        return reproduce(description).encode() == instructions
    except Exception:  # a forged description may raise any error
        return False


def _read_description(contents: Mapping[str, bytes]) -> BundleDescription:
    """Return the content of bundle.json.

    Raises:
        BundleError: it is missing, of another version or lacks entries, or a run of it is missing.
    """
    if "bundle.json" not in contents:
        raise BundleError("it has no bundle.json: not a bundle")
    try:
        description = json.loads(contents["bundle.json"])
        version = description.get("bundle_version")
        if version != VERSION:
            raise BundleError(f"bundle_version is {version}, this harness reads {VERSION}")
        for entry in description["runs"]:
            if f"{entry['folder']}/config.yaml" not in contents:
                raise BundleError(f"the run {entry['folder']!r} is not in it")
            claims = [(claim, CLAIM_ENTRIES) for claim in entry["claims"]]
            for json_object, required_keys in [(entry, RUN_ENTRIES), *claims]:
                if missing_keys := set(required_keys) - set(json_object):
                    raise KeyError(min(missing_keys))
            if not isinstance(entry["code"], dict):
                raise TypeError(f"code is {entry['code']!r}")
        required = {"notes": list(description["notes"]), "harness": description["harness"]}
        return cast(BundleDescription, description | required)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"bundle.json cannot be read ({error!r})") from error


def _unknown_files(contents: Mapping[str, bytes], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a problem per file that belongs neither to a run nor to the bundle itself."""
    known_names = {
        archive.SUMS,
        "bundle.json",
        "REPRODUCE.md",
        "LICENSE",
        "environment/packages.txt",
    }
    known_names |= {f"source/{run['code'].get('sha')}.tar.gz" for run in runs}
    folders = ("conf/", *(f"{run['folder']}/" for run in runs))
    names = sorted(
        name for name in contents if name not in known_names and not name.startswith(folders)
    )
    return [f"{name} belongs to no run that bundle.json has" for name in names]


def _run_problems(
    entry: Mapping[str, Any],
    folder: Path,
    scratch: Path,
    verification: Verification,
    *,
    is_strict: bool,
) -> list[str]:
    """Return the contradictions between a run's results and its samples.

    Args:
        entry: entry of the run in bundle.json.
        folder: folder of the unpacked run.
        scratch: folder that does not exist yet, in which the run is rebuilt.
        verification: verification to which compared numbers and notes are added.
        is_strict: True if this harness packed the bundle, so that texts must be equal too, and no
            column, claim or report may be left out.
    """
    run = Run.read(folder)
    problems = _entry_problems(entry, run) if is_strict else []
    if run.kind.reporting.special_report:
        return problems  # a note of the bundle says that its numbers are not checked
    rebuilt_folder = _rebuild_tables(folder, scratch)
    names = {
        file.name for directory in (folder, rebuilt_folder) for file in directory.glob("*.csv")
    }
    for name in sorted(names):
        if not (folder / name).is_file():
            problems.append(f"{name} is missing, but the samples give it")
        elif not (rebuilt_folder / name).is_file():
            verification.notes.append(
                f"{entry['folder']}/{name} is not derived from the samples: not checked"
            )
        else:
            packed_table = _read_table(folder / name)
            rebuilt_table = _read_table(rebuilt_folder / name)
            differences, num_compared = compare_tables(packed_table, rebuilt_table)
            if is_strict:
                unshared_columns = sorted(set(packed_table.columns) ^ set(rebuilt_table.columns))
                differences += [
                    f"{column}: only one of packed and rebuilt has it"
                    for column in unshared_columns
                ]
            problems += [f"{name}: {difference}" for difference in differences]
            verification.num_compared += num_compared
    other_files = [
        file for file in folder.rglob("*") if file.is_file() and file.suffix not in (".csv", ".png")
    ]
    for name in sorted(
        {file.relative_to(folder).as_posix() for file in other_files} - CHECKED_FILES
    ):
        verification.notes.append(
            f"{entry['folder']}/{name} is not derived from the samples: not checked"
        )
    problems += _claim_problems(entry, run, verification, is_strict=is_strict)
    return [*problems, *(page_problems(folder, rebuilt_folder) if is_strict else [])]


def _entry_problems(entry: Mapping[str, Any], run: Run) -> list[str]:
    """Return the differences between a run's entry of bundle.json and its files, without claims."""
    rebuilt = json.loads(json.dumps(run_entry(str(entry["folder"]), run)))
    return [
        f"bundle.json says {name} is {entry.get(name)}, the run says {rebuilt.get(name)}"
        for name in sorted({*entry, *rebuilt} - {"claims"})
        if entry.get(name) != rebuilt.get(name)
    ]


def _claim_problems(
    entry: Mapping[str, Any], run: Run, verification: Verification, *, is_strict: bool
) -> list[str]:
    """Return a problem per claim that does not follow from the samples.

    Claims are counted in `verification`. With `is_strict`, claims of the samples that the bundle
    omits are a problem, too.
    """
    rebuilt_claims = {
        (c["about"], c["what"]): c for c in (claim.as_json() for claim in claims_of(run))
    }
    problems = []
    for claim in entry["claims"]:
        rebuilt = rebuilt_claims.pop((claim["about"], claim["what"]), None)
        if rebuilt is None or not all(
            _is_equal(claim[number_name], rebuilt[number_name]) for number_name in CLAIM_NUMBERS
        ):
            problems.append(f"claim '{claim['what']}' of {claim['about']} is not in the samples")
        verification.num_compared += 1
    if is_strict and rebuilt_claims:
        about, what = next(iter(rebuilt_claims))
        problems.append(
            f"{text.count(len(rebuilt_claims), 'claim')} of the samples left out: "
            f"'{what}' of {about}"
        )
    return problems


def _rebuild_tables(folder: Path, target: Path) -> Path:
    """Copy a run to `target`, with tables and pages rebuilt from its samples; return `target`."""
    shutil.copytree(
        folder, target, ignore=shutil.ignore_patterns("*.csv", "*.png", "*.md", "*.html")
    )
    write_report(target, draws_figures=False)  # drawing takes most of the time of a report
    return target


def _read_table(path: Path) -> pd.DataFrame:
    """Read a table; empty for a file without columns."""
    try:
        return pd.read_csv(path)
    except pd.errors.EmptyDataError:
        return pd.DataFrame()


def compare_tables(packed: pd.DataFrame, rebuilt: pd.DataFrame) -> tuple[list[str], int]:
    """Return the differences of two tables in words, and the number of compared numbers.

    Rows are compared by position, and only the columns that both tables have. Differences beyond
    MAX_LISTED are only counted. Tables of unequal lengths are not compared.
    """
    if len(packed) != len(rebuilt):
        return [f"{len(packed)} rows, but the samples give {len(rebuilt)}"], 0
    columns = [column for column in packed.columns if column in rebuilt.columns]
    differences = []
    num_compared = 0
    for column in columns:
        for row, (old, new) in enumerate(zip(packed[column], rebuilt[column], strict=True)):
            num_compared += isinstance(old, (int, float))
            if not _is_equal(old, new):
                differences.append(f"row {row + 1}, {column}: {old}, but the samples give {new}")
    shown_differences = differences[:MAX_LISTED]
    if len(differences) > MAX_LISTED:
        shown_differences.append(f"and {len(differences) - MAX_LISTED} more")
    return shown_differences, num_compared


def _is_equal(old: Any, new: Any) -> bool:
    """Return whether two entries are equal, numbers within RELATIVE_TOLERANCE, or both missing."""
    if text.is_missing(old) or text.is_missing(new):
        return text.is_missing(old) and text.is_missing(new)
    try:
        return math.isclose(float(old), float(new), rel_tol=RELATIVE_TOLERANCE, abs_tol=0.0)
    except ValueError:
        return bool(old == new)
