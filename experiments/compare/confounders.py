"""Differences between compared runs other than the machine; the page has a notice of each.

A difference is a *confounder* if it may explain a part of the speed-up, else a *remark*. Compared
are facts of the environments (`_facts`), configurations, and the states of single runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import pandas as pd
from omegaconf import OmegaConf

from experiments.compare.machines import Machine, group_by_value
from experiments.report.data import Run

# Keys that are not compared, by their beginnings: they depend on the machine, or determine how much
# is measured, but not what.
IGNORED_KEYS = ("device.", "report.", "timing.", "dry_run", "strict", "rerun", "seed")
# Keys whose differences are remarks: sizes and lists, which an experiment may choose for a machine.
SIZE_KEYS = re.compile(r"(workload|sweep)\.\w+$|contenders$|fractions$|\.note$")

# Environment variables that are not compared: another fact covers them, or only scripts read them.
IGNORED_VARIABLES = re.compile(r".*_NUM_THREADS$|EMBLIB_(GPU|LOCK|NOISE|PYTHON|CLOCK|CONTENDERS)")


class Importance(Enum):
    """The importance of a difference; the value is the style of its notice."""

    confounder = "confounder"  # may explain a part of the speed-up
    remark = "remark"  # has no effect on the speed-up, or should have none


@dataclass(frozen=True)
class Difference:
    """A difference between the runs."""

    importance: Importance
    fact: str  # name of the fact that differs
    text: str  # its values with their machines, or a description of the difference

    def sentence(self) -> str:
        """Return the notice: 'Confounded: torch: 2.11 on A; 2.13 on B.'."""
        prefix = "Confounded" if self.importance is Importance.confounder else "Note"
        return f"{prefix}: {self.fact}: {self.text}."


def find_differences(machines: Sequence[Machine]) -> list[Difference]:
    """Return the differences, confounders first; an unknown value never counts as a difference."""
    facts = pd.DataFrame(_facts([machine.run for machine in machines]), dtype=object)
    facts["mode of timing"] = [machine.mode for machine in machines]
    remarks = ("build of torch", "preset", "CPU threads")
    differences = [
        Difference(
            Importance.remark if name in remarks else Importance.confounder,
            str(name),
            group_by_value(machines, (None if pd.isna(value) else str(value) for value in values)),
        )
        for name, values in facts.items()
        if values.nunique() > 1
    ]
    differences += [*_configuration_differences(machines), *_state_differences(machines)]
    return sorted(differences, key=lambda difference: difference.importance is Importance.remark)


def _facts(runs: Sequence[Run]) -> Mapping[str, Sequence[object]]:
    """Return the values of each fact, one per run; None if it is unknown or has no effect there."""
    environments = [run.environment for run in runs]
    torch_builds = [str(environment.get("torch") or "") or None for environment in environments]
    versions = [build and build.partition("+")[0] for build in torch_builds]
    gpus = [environment.get("gpu") or {} for environment in environments]
    facts: dict[str, Sequence[object]] = {
        "torch": versions,
        "build of torch": torch_builds if len({*versions} - {None}) < 2 else [],
        "GPU driver": [gpu.get("driver") for gpu in gpus],
        "CUDA": [gpu.get("cuda") for gpu in gpus],
    }
    # Code ids cover native libraries, so those of a CPU and a GPU build differ even at one commit.
    # They are a fact only if commits cannot tell, because a run has none.
    code_ids = [environment.get("code_id") for environment in environments]
    commits = [(environment.get("git") or {}).get("sha") for environment in environments]
    if not all(code_ids) or len(set(code_ids)) > 1:
        facts["emblib"] = commits
        if all(code_ids) and None in commits and len({*commits}) < 3:
            facts["emblib's code"] = code_ids
    packages: list[dict[str, str]] = [{} for _ in runs]  # version by package, per run
    for run_packages, run in zip(packages, runs, strict=True):
        for record in run.records:
            run_packages |= record.get("packages") or {}
            if record.get("bench_version"):
                run_packages["the harness's measuring code"] = str(record["bench_version"])
    for name in sorted(set().union(*packages)):
        facts[name] = [run_packages.get(name) for run_packages in packages]
    facts["ranks"] = [OmegaConf.select(run.config, "device.ranks", default=1) for run in runs]
    facts["batches in turn"] = [run.config.timing.pool for run in runs]
    variables = [environment.get("variables") for environment in environments]
    for name in sorted(
        {
            name
            for run_variables in variables
            for name in run_variables or {}
            if not IGNORED_VARIABLES.match(name)
        }
    ):
        facts[name] = [
            run_variables.get(name, "not set") if run_variables is not None else None
            for run_variables in variables
        ]
    facts["preset"] = [OmegaConf.select(run.config, "timing.preset") for run in runs]
    for fact_name, key in (("CPU threads", "threads"), ("huge pages", "huge_pages")):
        facts[fact_name] = [
            None if environment.get("gpu") else environment.get(key) for environment in environments
        ]
    return {fact_name: values for fact_name, values in facts.items() if values}


def _configuration_differences(machines: Sequence[Machine]) -> list[Difference]:
    """Return the differences of configurations, by keys; those of sizes are a remark."""
    trees = [OmegaConf.to_container(machine.run.config, resolve=True) for machine in machines]
    values = pd.concat([pd.json_normalize(tree).map(repr) for tree in trees])
    keys = [
        key
        for key in sorted(values)
        if values[key].nunique() > 1 and not key.startswith(IGNORED_KEYS)
    ]
    size_keys = [key for key in keys if SIZE_KEYS.search(key)]
    other_keys = [key for key in keys if key not in size_keys]
    differences = [
        Difference(Importance.confounder, "configuration", ", ".join(other_keys)),
        Difference(Importance.remark, "sizes chosen for the machine", ", ".join(size_keys)),
    ]
    return [difference for difference in differences if difference.text]


def _state_differences(machines: Sequence[Machine]) -> list[Difference]:
    """Return the defects of single runs, and a remark if all runs are of one machine."""
    differences = []
    dirty_labels = [
        machine.label
        for machine in machines
        if (machine.run.environment.get("git") or {}).get("dirty")
    ]
    if dirty_labels:
        text = f"uncommitted changes on {', '.join(dirty_labels)}: what ran is not a commit"
        differences.append(Difference(Importance.confounder, "emblib", text))
    for machine in machines:
        run, label = machine.run, machine.label
        flags = (run.environment.get("preflight") or {}).get("flags")
        if run.is_smoke:
            text = f"{label} has capped sizes; its times mean nothing"
            differences.append(Difference(Importance.confounder, "smoke run", text))
        if run.status != "finished":
            text = f"{label}: {run.status}"
            differences.append(Difference(Importance.remark, "run did not end", text))
        if flags:
            text = f"{label}: {', '.join(flags)}"
            differences.append(Difference(Importance.remark, "state of the machine", text))
    if (
        len({machine.run.environment.get("hardware_id") or machine.name for machine in machines})
        == 1
    ):
        text = "all runs are of one machine: what differs is its state, or the software"
        differences.append(Difference(Importance.remark, "hardware", text))
    return differences
