"""Runs of a comparison, of which some may be in bundles: which are compared with which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.bundle import archive
from experiments.compare.machines import NotComparable
from experiments.results.store import has_records, read_config, runs_in

CONFIG = "config.yaml"


def comparisons(paths: Sequence[Path], scratch: Path) -> list[tuple[str, list[Path]]]:
    """Return the name and the runs of each comparison, in the order of the first path.

    Directories without a bundle among them are one comparison. With bundles there is one per
    experiment that every path has a run of; of an experiment that a bundle has several runs of, the
    last counts. Bundles are checked and unpacked into `scratch`.

    Raises:
        BundleError: A bundle is missing, damaged, or differs from what was packed.
        NotComparable: The paths share no experiment.
    """
    if not any(path.suffix == ".zip" for path in paths):
        return [("", list(paths))]
    offered = [_runs(path, scratch / str(number)) for number, path in enumerate(paths)]
    shared = [name for name in offered[0] if all(name in runs for runs in offered)]
    if not shared:
        words = "; ".join(
            f"{path.name}: {', '.join(runs) or 'no run'}"
            for path, runs in zip(paths, offered, strict=True)
        )
        raise NotComparable(f"these share no experiment ({words})")
    return [(name, [runs[name] for runs in offered]) for name in shared]


def _runs(path: Path, folder: Path) -> dict[str, Path]:
    """Return the runs of a bundle or of one run's directory, by experiment."""
    if path.suffix != ".zip":
        return {str(read_config(path / CONFIG).name): path} if has_records(path) else {}
    archive.unpack(archive.read(path), folder)
    return {str(read_config(run / CONFIG).name): run for run in runs_in(folder, "runs/*/*")}
