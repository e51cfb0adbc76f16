"""What differs between runs besides the machine: each is said, in red where it matters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import OmegaConf

from experiments.compare.machines import Machine

# Of a configuration: what a machine decides, or what says how much is measured and not what.
FREE = ("device.", "report.", "timing.", "dry_run", "strict", "rerun", "seed")
SIZES = re.compile(r"(workload|sweep)\.\w+$|contenders$|fractions$|\.note$")

# Of the environment's variables: threads, and where the scripts keep their files.
ELSEWHERE = re.compile(r".*_NUM_THREADS$|EMBLIB_(GPU|LOCK|NOISE|PYTHON|CLOCK|CONTENDERS)")


class Weight(Enum):
    """How much a difference matters."""

    confounder = "confounder"  # part of the speed-up may be this and not the machine
    remark = "remark"


@dataclass(frozen=True)
class Difference:
    """One of them, for people."""

    weight: Weight
    what: str
    text: str

    def sentence(self) -> str:
        """'Confounded: torch 2.11 against 2.13 ...'."""
        begin = "Confounded" if self.weight is Weight.confounder else "Note"
        return f"{begin}: {self.what}: {self.text}."


def find(machines: Sequence[Machine]) -> list[Difference]:
    """All differences, those that matter most first."""
    found = [
        *_software(machines),
        *_code(machines),
        *_packages(machines),
        *_settings(machines),
        *_configuration(machines),
        *_quality(machines),
    ]
    return sorted(found, key=lambda d: d.weight is Weight.remark)


def _environments(machines: Sequence[Machine]) -> list[Mapping[str, Any]]:
    return [m.run.environment for m in machines]


def _differs(
    machines: Sequence[Machine], what: str, values: Sequence[Any], weight: Weight
) -> list[Difference]:
    """One difference when the known values are not all alike."""
    if len({v for v in values if v is not None}) < 2:
        return []
    there: dict[str, list[str]] = {}
    for machine, value in zip(machines, values, strict=True):
        if value is not None:
            there.setdefault(str(value), []).append(machine.label)
    shown = (f"{value} on {' and '.join(labels)}" for value, labels in there.items())
    return [Difference(weight, what, "; ".join(shown))]


def _software(machines: Sequence[Machine]) -> list[Difference]:
    environments = _environments(machines)
    torch = [str(e.get("torch") or "") or None for e in environments]
    public = [t.partition("+")[0] if t else None for t in torch]
    found = _differs(machines, "torch", public, Weight.confounder)
    if not found:
        found = _differs(machines, "build of torch", torch, Weight.remark)
    for key, name in (("driver", "GPU driver"), ("cuda", "CUDA")):
        values = [(e.get("gpu") or {}).get(key) for e in environments]
        found += _differs(machines, name, values, Weight.confounder)
    return found


def _code(machines: Sequence[Machine]) -> list[Difference]:
    environments = _environments(machines)
    ids = [e.get("code_id") for e in environments]
    commits = [(e.get("git") or {}).get("sha") for e in environments]
    if all(ids):
        # Native libraries are part of the id, and a CPU build never equals a GPU build.
        if len(set(ids)) == 1 or (len(set(commits)) == 1 and None not in commits):
            found = []
        else:
            found = _differs(machines, "emblib", commits, Weight.confounder) or _differs(
                machines, "emblib's code", ids, Weight.confounder
            )
    else:
        found = _differs(machines, "emblib", commits, Weight.confounder)
    dirty = [m.label for m in machines if (m.run.environment.get("git") or {}).get("dirty")]
    if dirty:
        text = f"uncommitted changes on {', '.join(dirty)}: what ran is no commit"
        found.append(Difference(Weight.confounder, "emblib", text))
    return found


def _settings(machines: Sequence[Machine]) -> list[Difference]:
    timing = [m.run.config.timing for m in machines]
    presets = [str(OmegaConf.select(t, "preset", default="")) or None for t in timing]
    cpus = [m.run.environment.get("gpu") is None for m in machines]
    threads = [
        m.run.environment.get("threads") if cpu else None
        for m, cpu in zip(machines, cpus, strict=True)
    ]
    pages = [
        m.run.environment.get("huge_pages") if cpu else None
        for m, cpu in zip(machines, cpus, strict=True)
    ]
    ranks = [int(OmegaConf.select(m.run.config, "device.ranks", default=1)) for m in machines]
    return [
        *_differs(machines, "ranks", ranks, Weight.confounder),
        *_differs(machines, "batches in turn", [t.pool for t in timing], Weight.confounder),
        *_variables(machines),
        *_differs(machines, "mode of timing", [m.mode for m in machines], Weight.confounder),
        *_differs(machines, "preset", presets, Weight.remark),
        *_differs(machines, "CPU threads", threads, Weight.remark),
        *_differs(machines, "huge pages", pages, Weight.confounder),
    ]


def _variables(machines: Sequence[Machine]) -> list[Difference]:
    """Environment variables that were recorded; how many threads there are is said elsewhere."""
    there = [m.run.environment.get("variables") for m in machines]
    names = {n for v in there for n in v or {} if not ELSEWHERE.match(n)}
    return [
        difference
        for name in sorted(names)
        for difference in _differs(
            machines,
            name,
            [v.get(name, "not set") if v is not None else None for v in there],
            Weight.confounder,
        )
    ]


def _packages(machines: Sequence[Machine]) -> list[Difference]:
    """Versions of what contenders are made of, and of the code that takes the samples."""
    there: list[dict[str, str]] = []
    for machine in machines:
        found: dict[str, str] = {}
        for record in machine.run.records:
            found |= record.get("packages") or {}
            if record.get("bench_version"):
                found["the harness's measuring code"] = str(record["bench_version"])
        there.append(found)
    return [
        difference
        for name in sorted(set().union(*there))
        for difference in _differs(machines, name, [v.get(name) for v in there], Weight.confounder)
    ]


def _configuration(machines: Sequence[Machine]) -> list[Difference]:
    """Keys of the configuration; sizes are the comparison's own business and only remarked."""
    trees = [_flat(OmegaConf.to_container(m.run.config, resolve=True)) for m in machines]
    keys = sorted(set().union(*trees))
    differing = [
        k for k in keys if not k.startswith(FREE) and len({repr(t[k]) for t in trees if k in t}) > 1
    ]
    hard = [k for k in differing if not SIZES.search(k)]
    sizes = [k for k in differing if SIZES.search(k)]
    found = []
    if hard:
        found.append(Difference(Weight.confounder, "configuration", ", ".join(hard)))
    if sizes:
        found.append(Difference(Weight.remark, "sizes chosen for the machine", ", ".join(sizes)))
    return found


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.")
    return found


def _quality(machines: Sequence[Machine]) -> list[Difference]:
    found = []
    for machine in machines:
        run, flags = machine.run, (machine.run.environment.get("preflight") or {}).get("flags")
        if run.smoke:
            text = f"{machine.label} has capped sizes; its times mean nothing"
            found.append(Difference(Weight.confounder, "smoke run", text))
        if run.info.get("status") not in (None, "finished"):
            text = f"{machine.label}: {run.info['status']}"
            found.append(Difference(Weight.remark, "run did not end", text))
        if flags:
            text = f"{machine.label}: {', '.join(flags)}"
            found.append(Difference(Weight.remark, "state of the machine", text))
    ids = [m.run.environment.get("hardware_id") or m.name for m in machines]
    if len(set(ids)) == 1:
        text = "all runs are of one machine: what differs is its state, or the software"
        found.append(Difference(Weight.remark, "hardware", text))
    return found
