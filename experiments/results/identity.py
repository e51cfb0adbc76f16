"""The identity of a measurement: keys by which runs reuse each other's records.

Records are reused only if point_key, replicate and context_id are equal. So everything that changes
a sample must be a part of one of these.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.config.schema import Config
from experiments.config.sweep import Cell
from experiments.contenders import registry
from experiments.paths import ROOT, library_folders

# Sources that determine samples: a change of them makes earlier samples another measurement.
BENCH_SOURCES = (
    *(f"{package}/*.py" for package in ("workloads", "timing", "contenders", "measure", "quality")),
    *("run/ranks.py", "run/worker.py"),
    *(f"machine/{name}.py" for name in ("bandwidth", "cpu", "memory", "telemetry")),
)
# Keys of `timing` that determine the amount of measuring, not what is measured.
AMOUNT_KEYS = (
    "preset",
    "replicates",
    "cell_seconds",
    "total_seconds",
    "limit_seconds",
    "max_cells",
    "max_ranks",
)
# Fields of a cell that are for readers, or depend on other cells or the memory of the machine.
IGNORED_CELL_FIELDS = ("title", "note", "rows_scale", "has_exact_key")


def digest(value: Any) -> str:
    """Return a hash of the JSON of a value, 16 hexadecimal digits.

    Enums are hashed as their values, dataclasses as their fields.

    Raises:
        TypeError: a value has no JSON, and is neither.
    """

    def as_json(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        raise TypeError(f"{type(value).__name__} has no canonical form")

    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=as_json)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def point_key(cell: Cell, config: Config, packages: Sequence[str] = ()) -> str:
    """Return the key of the work of a cell: if it is equal in two runs, they measure the same.

    Args:
        cell: cell.
        config: configuration of the run.
        packages: names of packages that change a result, besides those of the contenders.
    """
    timing = dataclasses.asdict(config.timing)
    return digest(
        {
            "experiment": config.name,
            "cell": {
                name: value
                for name, value in dataclasses.asdict(cell).items()
                if name not in IGNORED_CELL_FIELDS
            },
            "optimizer": config.optimizer,
            "lr": config.lr,
            "seed": config.seed,
            "timing": {name: value for name, value in timing.items() if name not in AMOUNT_KEYS},
            "device": {"kind": config.device.kind, "ranks": config.device.ranks},
            "bench": bench_version(),
            "others": {arm.contender: registry.identity(arm.contender) for arm in cell.arms},
            "packages": [registry.find_installed(name) for name in packages],
        }
    )


def context_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return hardware_id, code_id and context_id; runs of equal context_id share measurements.

    `environment` is the content of environment.json, which describes machine and software. The
    code_id is that of the library that is installed now.
    """
    cpu, gpu = environment.get("cpu") or {}, environment.get("gpu") or {}
    hardware_id = digest(
        {
            "cpu": {name: cpu.get(name) for name in ("model", "usable_cores", "instructions")},
            "gpu": {name: gpu.get(name) for name in ("name", "memory_bytes", "multiprocessors")},
            "power_limit_w": gpu.get("power_limit_w"),
            "memory_bytes": environment.get("memory_bytes"),
        }
    )
    installed_code = code_id()
    names = ("threads", "torch", "huge_pages", "variables")
    software = {name: environment.get(name) for name in names}
    software |= {name: gpu.get(name) for name in ("driver", "cuda")}
    context_id = digest({"hardware": hardware_id, "code": installed_code, "software": software})
    return {"hardware_id": hardware_id, "code_id": installed_code, "context_id": context_id}


@cache
def bench_version() -> str:
    """Return a hash of the harness's sources that determine samples, computed once."""
    harness = ROOT / "experiments"
    return _digest_files(file for pattern in BENCH_SOURCES for file in harness.glob(pattern))


@cache
def code_id() -> str:
    """Return a hash of the library's Python sources and native libraries, computed once."""
    folders = library_folders()
    return _digest_files(
        file
        for folder in folders
        for suffix in ("py", "so")
        for file in folder.rglob(f"*.{suffix}")
    )


def _digest_files(paths: Iterable[Path]) -> str:
    """Return a hash of the names and contents of files."""
    hasher = hashlib.blake2b(digest_size=8)
    for path in sorted(paths):
        hasher.update(path.name.encode() + hashlib.blake2b(path.read_bytes()).digest())
    return hasher.hexdigest()
