"""The command `bundle`: pack results into an archive that others can verify; verify archives."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.bundle import pack
from experiments.bundle.archive import BundleError
from experiments.bundle.claims import RULE, TIME_TOLERANCE, CheckedClaim, ClaimOutcome
from experiments.config.schema import UsageError
from experiments.report import text

EXIT_STATUS_HELP = """\
exit status of verify: 0 everything holds; 1 internal error; 2 wrong usage; 3 the bundle is damaged,
or a number does not follow from its samples; 130 interrupted. With --rerun also: 4 a claim does not
hold; 5 some claims could not be measured again, and the others hold; 6 no claim could be measured
again, or there is none.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `bundle`."""
    parser.epilog = f"{EXIT_STATUS_HELP}\n{textwrap.fill(RULE, 100)}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", required=True, metavar="{pack,verify}")
    packer = commands.add_parser("pack", help="put runs, configuration and source into one file")
    packer.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs")
    packer.add_argument(
        "-o", "--out", type=Path, required=True, metavar="X.zip", help="its folder is created"
    )
    checker = commands.add_parser(
        "verify",
        help="check the sums, rebuild every number from its samples",
        epilog=EXIT_STATUS_HELP,
    )
    checker.add_argument("bundle", type=Path, metavar="X.zip")
    checker.add_argument(
        "--rerun",
        action="store_true",
        help="also measure the claims again; the options below need it",
    )
    checker.add_argument(
        "--only", nargs="+", default=[], metavar="EXPERIMENT", help="measure only these again"
    )
    checker.add_argument(
        "--tolerance",
        type=float,
        default=TIME_TOLERANCE,
        help="relative tolerance of ratios of times",
    )
    checker.add_argument(
        "--timing", default="", metavar="PRESET", help="timing preset, instead of the runs' own"
    )
    measure_parser = commands.add_parser("measure")  # started by `verify --rerun`
    measure_parser.add_argument("config", type=Path)
    measure_parser.add_argument("folder", type=Path)
    measure_parser.add_argument("timing", nargs="?", default="")


def run(arguments: argparse.Namespace) -> int:
    """Run an action; return the exit status, see EXIT_STATUS_HELP.

    A BundleError is printed; the status is then 3 for `verify`, and 2 for the other actions.

    Raises:
        UsageError: an option has a wrong value, a file is missing, or this machine cannot measure.
        OSError: the bundle cannot be written.
    """
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
    """Pack runs, print notes and the bundle's id; return exit status 0."""
    with pack.scratch_folder() as folder:
        result = pack.pack(parsed.runs, parsed.out, Path(folder))
    for note in result.notes:
        print(f"note: {note}")
    size = text.size(result.path.stat().st_size)
    numbers = f"{text.count(result.num_runs, 'run')}, {text.count(result.num_claims, 'claim')}"
    print(f"{result.path}: {numbers}, {size}")
    print(f"bundle {result.bundle_id}")
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
        verification = check(parsed.bundle, unpacked)
        for note in verification.notes:
            print(f"note: {note}")
        for problem in verification.problems:
            print(f"WRONG {problem}")
        runs = verification.description["runs"]
        num_runs = text.count(len(runs), "run")
        if verification.problems:
            print(f"{text.count(len(verification.problems), 'problem')} in {num_runs}")
            return 3
        numbers = text.count(verification.num_compared, "number")
        print(f"checksums hold; {numbers} of {num_runs} follow from samples")
        if not parsed.rerun:
            return 0
        return _rerun(runs, unpacked, Path(folder) / "again", parsed)


def _rerun(
    runs: Sequence[pack.RunEntry], unpacked: Path, folder: Path, parsed: argparse.Namespace
) -> int:
    """Measure the runs of --only, or all, again; print the outcomes; return the exit status.

    `unpacked` is the folder of the unpacked bundle; the new runs go into `folder`, which does not
    exist yet.

    Raises:
        UsageError: the bundle lacks an experiment of --only.
    """
    from experiments.bundle.rerun import measure_again

    names = {str(entry["experiment"]) for entry in runs}
    if unknown_names := sorted(set(parsed.only) - names):
        raise UsageError(f"--only {unknown_names[0]}: the bundle has {', '.join(sorted(names))}")
    chosen_runs = [entry for entry in runs if not parsed.only or entry["experiment"] in parsed.only]
    checked_claims: list[CheckedClaim] = []
    for index, entry in enumerate(chosen_runs):
        if not entry["claims"]:
            print(f"\n{entry['folder']}: claims nothing that could be compared")
            continue
        duration = f"it took {entry['seconds']} s on {entry['device']}"
        print(f"\n{entry['folder']}: measuring again ({duration})")
        result = measure_again(
            entry,
            unpacked / entry["folder"],
            folder / str(index),
            tolerance=parsed.tolerance,
            preset=parsed.timing,
        )
        if result.run is not None:
            _print_machine_changes(entry, result.run.environment)
        if not result.findings:
            print("  it claims nothing that could be compared")
        _print_findings(result.findings)
        checked_claims += result.findings
    if checked_claims:
        print(f"\n{text.count(len(checked_claims), 'claim')}: {_count_outcomes(checked_claims)}")
    return _exit_status(checked_claims)


def _print_machine_changes(entry: pack.RunEntry, environment: dict[str, Any]) -> None:
    """Print the differences of device, torch and commit between the packed run and the new one."""
    facts = {  # (of the packed run, of the new run)
        "device": (entry["device"], environment.get("device")),
        "torch": (entry["torch"], environment.get("torch")),
        "commit": (entry["code"].get("sha"), (environment.get("git") or {}).get("sha")),
    }
    for name, (packed_fact, new_fact) in facts.items():
        if packed_fact != new_fact:
            print(f"  {name}: {packed_fact} then, {new_fact} now")


def _print_findings(checked_claims: Sequence[CheckedClaim]) -> None:
    """Print the claims that differ, the reasons of unmeasured ones, and the counts of outcomes."""
    for checked_claim in checked_claims:
        claim, new_claim = checked_claim.claim, checked_claim.new_claim
        if checked_claim.outcome is ClaimOutcome.differs and new_claim is not None:
            print(
                f"  DIFFERS {claim.about}: {claim.what} {_format_number(claim.value)} "
                f"{text.interval(claim.lo, claim.hi)}, now {_format_number(new_claim.value)} "
                f"{text.interval(new_claim.lo, new_claim.hi)}"
            )
    reasons = Counter(
        checked_claim.reason
        for checked_claim in checked_claims
        if checked_claim.outcome is ClaimOutcome.unmeasured
    )
    for reason, count in reasons.most_common():
        print(f"  not measured, {text.count(count, 'claim')}: {reason}")
    print(f"  {_count_outcomes(checked_claims)}")


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else text.digits(value)


def _count_outcomes(checked_claims: Sequence[CheckedClaim]) -> str:
    """Return the number of claims of each outcome, such as '3 holds, 1 not measured'."""
    counts = Counter(checked_claim.outcome for checked_claim in checked_claims)
    return ", ".join(
        f"{counts[outcome]} {outcome.value}" for outcome in ClaimOutcome if counts[outcome]
    )


def _exit_status(checked_claims: Sequence[CheckedClaim]) -> int:
    """Return the exit status of `verify --rerun`, see EXIT_STATUS_HELP."""
    outcomes = Counter(checked_claim.outcome for checked_claim in checked_claims)
    if outcomes[ClaimOutcome.differs]:
        return 4
    if not outcomes[ClaimOutcome.holds]:
        return 6
    return 5 if outcomes[ClaimOutcome.unmeasured] else 0
