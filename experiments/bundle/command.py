"""Pack results into an archive that others can verify, and verify such archives."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.bundle import pack
from experiments.bundle.archive import BundleError
from experiments.bundle.claims import RULE, TIME_TOLERANCE, CheckedClaim, ClaimOutcome
from experiments.config.schema import UsageError
from experiments.report import text

STATUS = """\
exit status of verify: 0 everything holds; 1 internal error; 2 wrong usage; 3 the bundle is damaged,
or a number does not follow from its samples; with --rerun: 4 a
claim did not hold; 5 some claims could not be measured again, the others hold; 6 none could, or
there are none; 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `bundle`."""
    parser.epilog = f"{STATUS}\n{RULE}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", required=True, metavar="{pack,verify}")
    packer = commands.add_parser("pack", help="put runs, configuration and source into one file")
    packer.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs")
    packer.add_argument(
        "-o", "--out", type=Path, required=True, metavar="X.zip", help="its folder is created"
    )
    checker = commands.add_parser(
        "verify", help="check the sums, rebuild every number from its samples", epilog=STATUS
    )
    checker.add_argument("bundle", type=Path, metavar="X.zip")
    checker.add_argument(
        "--rerun",
        action="store_true",
        help="measure again what is claimed; the options below are of this",
    )
    checker.add_argument(
        "--only", nargs="+", default=[], metavar="EXPERIMENT", help="measure these again"
    )
    checker.add_argument(
        "--tolerance",
        type=float,
        default=TIME_TOLERANCE,
        help="largest relative change of a time ratio that still holds",
    )
    checker.add_argument(
        "--timing", default="", metavar="PRESET", help="timing preset used for rerun"
    )
    measure_parser = commands.add_parser("measure")  # started by `verify --rerun`
    measure_parser.add_argument("config", type=Path)
    measure_parser.add_argument("folder", type=Path)
    measure_parser.add_argument("timing", nargs="?", default="")


def run(arguments: argparse.Namespace) -> int:
    """Run an action; return the exit status: 3 for a BundleError of `verify`, 2 of the others."""
    try:
        if arguments.action == "pack":
            return _pack(arguments)
        if arguments.action == "verify":
            return _verify(arguments)
        from experiments.bundle.rerun import measure_packed

        return measure_packed(arguments.config, arguments.folder, arguments.timing)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if arguments.action == "verify" else 2


def _pack(parsed: argparse.Namespace) -> int:
    with pack.scratch_folder() as folder:
        packed = pack.pack(parsed.runs, parsed.out, Path(folder))
    for note in packed.notes:
        print(f"note: {note}")
    size = text.size(packed.path.stat().st_size)
    print(f"{packed.path}: {packed.runs} runs, {packed.claims} claims, {size}")
    print(f"bundle {packed.bundle_id}")
    return 0


def _verify(parsed: argparse.Namespace) -> int:
    """Check a bundle and, with --rerun, measure it again; return the exit status.

    Raises:
        BundleError: the bundle is damaged.
        UsageError: an option has a wrong value, or there is no such file.
    """
    from experiments.bundle.rerun import check_preset
    from experiments.bundle.verify import check

    check_preset(parsed.timing)
    if not parsed.tolerance >= 0:  # nan too
        raise UsageError(f"--tolerance must be >= 0, got {parsed.tolerance}")
    if not parsed.bundle.is_file():
        raise UsageError(f"there is no file {parsed.bundle}")
    with pack.scratch_folder() as folder:
        unpacked = Path(folder) / "bundle"
        checked = check(parsed.bundle, unpacked)
        for note in checked.notes:
            print(f"note: {note}")
        for problem in checked.problems:
            print(f"WRONG {problem}")
        runs = checked.description["runs"]
        if checked.problems:
            print(f"{len(checked.problems)} problem(s) in {len(runs)} runs")
            return 3
        print(f"checksums hold; {checked.numbers} numbers of {len(runs)} runs follow from samples")
        if not parsed.rerun:
            return 0
        return _rerun(runs, unpacked, Path(folder) / "again", parsed)


def _rerun(
    runs: Sequence[pack.RunEntry], unpacked: Path, folder: Path, parsed: argparse.Namespace
) -> int:
    """Measure the chosen runs again, print what differs, and return the exit status."""
    from experiments.bundle.rerun import measure_again

    names = [str(entry["experiment"]) for entry in runs]
    if unknown := sorted(set(parsed.only) - set(names)):
        raise UsageError(f"--only {unknown[0]}: the bundle has {', '.join(sorted(set(names)))}")
    chosen_runs = [entry for entry in runs if not parsed.only or entry["experiment"] in parsed.only]
    findings: list[CheckedClaim] = []
    for number, entry in enumerate(chosen_runs):
        if not entry["claims"]:
            print(f"\n{entry['folder']}: claims nothing that could be compared")
            continue
        duration = f"it took {entry['seconds']} s on {entry['device']}"
        print(f"\n{entry['folder']}: measuring again ({duration})")
        result = measure_again(
            entry,
            unpacked / entry["folder"],
            folder / str(number),
            tolerance=parsed.tolerance,
            preset=parsed.timing,
        )
        if result.run is not None:
            _print_machine_changes(entry, result.run.environment)
        if not result.findings:
            print("  it claims nothing that could be compared")
        _print_findings(result.findings)
        findings += result.findings
    if findings:
        print(f"\n{len(findings)} claims: {_outcome_words(findings)}")
    return _exit_status(findings)


def _print_machine_changes(entry: pack.RunEntry, environment: dict[str, Any]) -> None:
    """Print how the two machines differ."""
    pairs = {
        "device": (entry["device"], environment.get("device")),
        "torch": (entry["torch"], environment.get("torch")),
        "commit": (entry["code"].get("sha"), (environment.get("git") or {}).get("sha")),
    }
    for name, (then, now) in pairs.items():
        if then != now:
            print(f"  {name}: {then} then, {now} now")


def _print_findings(findings: Sequence[CheckedClaim]) -> None:
    for finding in findings:
        claim, new_claim = finding.claim, finding.again
        if finding.outcome is ClaimOutcome.differs and new_claim is not None:
            print(
                f"  DIFFERS {claim.about}: {claim.what} {_shown_number(claim.value)} "
                f"{text.interval(claim.lo, claim.hi)}, now {_shown_number(new_claim.value)} "
                f"{text.interval(new_claim.lo, new_claim.hi)}"
            )
    reasons = Counter(f.reason for f in findings if f.outcome is ClaimOutcome.unmeasured)
    for reason, count in reasons.most_common():
        print(f"  not measured, {count} claims: {reason}")
    print(f"  {_outcome_words(findings)}")


def _shown_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else text.digits(value)


def _outcome_words(findings: Sequence[CheckedClaim]) -> str:
    counts = Counter(f.outcome for f in findings)
    return ", ".join(f"{counts[o]} {o.value}" for o in ClaimOutcome if counts[o])


def _exit_status(findings: Sequence[CheckedClaim]) -> int:
    outcomes = Counter(f.outcome for f in findings)
    if outcomes[ClaimOutcome.differs]:
        return 4
    if not outcomes[ClaimOutcome.holds]:
        return 6
    return 5 if outcomes[ClaimOutcome.unmeasured] else 0
