"""Measure a bundle's runs again from their configurations, and compare their claims."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments import configure
from experiments.bundle.archive import BundleError
from experiments.bundle.claims import CheckedClaim, Claim, ClaimOutcome, check_claims, claims_of
from experiments.config.schema import (
    Config,
    DeviceKind,
    Rerun,
    UsageError,
    device_kind,
    folder_name,
)
from experiments.paths import CONF, ROOT
from experiments.report.data import Run
from experiments.results.store import read_config


@dataclass(frozen=True)
class Remeasurement:
    """The claims of a packed run, checked by a new run.

    Attributes:
        findings: a checked claim per claim of the packed run, measured or not.
        run: the new run; None if nothing was measured.
    """

    findings: list[CheckedClaim]
    run: Run | None = None


def check_preset(preset: str) -> None:
    """Raise UsageError if there is no such timing preset; "" is always accepted."""
    presets = configure.groups()["timing"]
    if preset and preset not in presets:
        raise UsageError(f"no timing '{preset}'. There is: {', '.join(presets)}")


def load_packed_config(path: Path, folder: Path, preset: str = "") -> Config:
    """Return the configuration of a packed run, to be measured again.

    Args:
        path: config.yaml of the run.
        folder: `report.folder` of the new configuration.
        preset: timing preset to use instead of the run's; "" for none.

    Raises:
        BundleError: this version of the harness cannot run the configuration.
        UsageError: there is no such timing preset.
    """
    check_preset(preset)
    configure.register()
    try:
        packed_config = read_config(path)
        folder_name(packed_config.name)
    except (UsageError, ValueError) as error:
        raise BundleError(f"its configuration: {error}") from error
    packed_config.report.folder = str(folder)
    packed_config.rerun = Rerun.all.value
    if preset:
        packed_config.timing = _with_preset(packed_config.timing, preset)
    try:
        merged_config = OmegaConf.merge(OmegaConf.structured(Config), packed_config)
        assert isinstance(merged_config, DictConfig)
        return configure.to_config(merged_config)
    except (OmegaConfBaseException, UsageError) as error:
        raise BundleError(
            f"this version of the harness cannot run it: {str(error).splitlines()[0]}. Use the "
            "source that is enclosed"
        ) from error


def _with_preset(timing: DictConfig, preset: str) -> DictConfig:
    """Return the amounts of a timing preset for what `timing`, of a packed run, measures.

    Batches and modes are those of the run, because others would be other claims. Its budgets are
    scaled from its preset to this one, as for an experiment (`configure.load`).
    """
    folder = CONF / "timing"
    settings = cast(DictConfig, OmegaConf.load(folder / f"{preset}.yaml"))
    kept = {name: timing[name] for name in ("pool", "modes", "limit_seconds") if name in timing}
    own_preset = folder / f"{timing.preset}.yaml"
    if own_preset.is_file():
        own_settings = cast(DictConfig, OmegaConf.load(own_preset))
        for name in configure.BUDGETS:
            if own_settings[name]:  # 0 is no budget
                kept[name] = timing[name] * settings[name] / own_settings[name]
    return cast(DictConfig, OmegaConf.merge(settings, kept))


def measure_again(
    entry: Mapping[str, Any], packed: Path, folder: Path, *, tolerance: float, preset: str
) -> Remeasurement:
    """Measure one run in a new process and compare its claims with the packed ones.

    A run without claims is not measured. Neither is a run of a GPU if there is no GPU.

    Args:
        entry: the run's entry of bundle.json.
        packed: directory of the packed run.
        folder: folder that does not exist yet, for `run.py bundle measure` to write the run into.
        tolerance: relative tolerance of ratios of times.
        preset: timing preset to use instead of the run's; "" for none.

    Raises:
        KeyboardInterrupt: the new process was interrupted.
    """
    packed_run = Run.read(packed)
    claims = claims_of(packed_run)
    if not claims:
        return Remeasurement([])
    device = DeviceKind[str(packed_run.config.device.kind)]  # auto is cuda only if there is a GPU
    if entry["cuda"] and device_kind(device) != "cuda":
        return Remeasurement(_mark_unmeasured(claims, "measured on a GPU, and there is none here"))
    words = ["bundle", "measure", str(packed / "config.yaml"), str(folder), preset]
    completed = subprocess.run([sys.executable, "run.py", *words], cwd=ROOT)
    if completed.returncode == 130:
        raise KeyboardInterrupt
    run_files = sorted((folder / str(packed_run.config.name)).glob("*/run.json"))
    if not run_files:
        return Remeasurement(
            _mark_unmeasured(claims, f"the run ended with exit status {completed.returncode}")
        )
    new_run = Run.read(run_files[-1].parent)
    other_cells = cells_with_other_batches(packed_run, new_run)
    comparable_claims = [
        claim for claim in claims if claim.about.partition(" · ")[0] not in other_cells
    ]
    findings = check_claims(
        comparable_claims, claims_of(new_run), missing_reasons(new_run), tolerance
    )
    findings += _mark_unmeasured(
        [claim for claim in claims if claim not in comparable_claims],
        "its batches were not the same",
    )
    return Remeasurement(findings, new_run)


def _mark_unmeasured(claims: Sequence[Claim], reason: str) -> list[CheckedClaim]:
    return [CheckedClaim(claim, ClaimOutcome.unmeasured, None, reason) for claim in claims]


def missing_reasons(run: Run) -> dict[str, str]:
    """Return the reasons of a run's failures, by `Claim.about` of the claims that lack a number."""
    reasons = {}
    for record in run.failures():
        reason = f"{record['status']}: {record['reason']}"
        reasons[f"{record['cell']} · {record['label']}"] = reason
        reasons[f"{record['cell']} · {record['label']} · {record.get('mode', 'hot')}"] = reason
    return reasons


def cells_with_other_batches(packed_run: Run, new_run: Run) -> set[str]:
    """Return the cells whose batches differ between two runs although the seed is the same."""
    packed_digests = {
        (record["cell"], record["seed"]): record["pool_sha256"]
        for record in packed_run.records
        if record.get("pool_sha256")
    }
    return {
        record["cell"]
        for record in new_run.records
        if record.get("pool_sha256")
        and packed_digests.get((record["cell"], record["seed"]), record["pool_sha256"])
        != record["pool_sha256"]
    }


def measure_packed(path: Path, folder: Path, preset: str) -> int:
    """Measure one packed configuration; return the exit status of the run.

    The arguments are those of `load_packed_config`.

    Raises:
        BundleError, UsageError: see `load_packed_config`.
        UsageError: this machine cannot run the configuration.
    """
    config = load_packed_config(path, folder, preset)
    from experiments.run import runner

    words = ["(from a bundle)", f"+experiment={config.name}"]
    return runner.run(config, question=f"does {config.name} repeat?", words=words)
