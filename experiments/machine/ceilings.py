"""What a machine's memory can do, as its own run measured it: the roofs under its contenders."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from experiments.paths import CONF


@dataclass(frozen=True)
class Roofs:
    """Measured bandwidth in GB/s, bytes read plus bytes written; gathers by the bytes of a row."""

    copy_gb_s: float = math.nan
    gather_gb_s: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> Roofs:
        """From environment.json; runs from before gathers were measured have the copy only."""
        found = environment.get("bandwidth") or {}
        copied = found.get("copy_gb_s") or environment.get("copy_gb_s")
        gathered = {int(k): float(v) for k, v in (found.get("gather_gb_s") or {}).items()}
        return cls(float(copied) if copied else math.nan, tuple(sorted(gathered.items())))

    def gather(self, row_bytes: float) -> float:
        """For rows of about that size: the nearest that was measured, by ratio."""
        if not self.gather_gb_s:
            return math.nan
        _, found = min(self.gather_gb_s, key=lambda pair: abs(math.log(pair[0] / row_bytes)))
        return found


FOLDER = CONF / "hardware"
FIGURES = {
    "bandwidth_gb_s": "memory bandwidth, GB/s",
    "cache_mb": "last-level cache, MB",
    "memory_gb": "memory, GB",
    "tdp_w": "power, W",
}
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Device:
    """One model of a GPU or CPU; a figure that no source gives is absent, never another model's."""

    key: str  # the file's name
    name: str
    kind: str  # "gpu" or "cpu"
    names: tuple[str, ...]  # as drivers write it: regular expressions for the whole name
    figures: Mapping[str, float]
    sources: Mapping[str, str]
    note: str = ""
    _patterns: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        compiled = tuple(re.compile(text, re.IGNORECASE) for text in self.names)
        object.__setattr__(self, "_patterns", compiled)

    @property
    def bandwidth_gb_s(self) -> float | None:
        """Of its memory, in theory."""
        return self.figures.get("bandwidth_gb_s")

    @property
    def cache_bytes(self) -> float | None:
        """Of its last cache before memory."""
        size = self.figures.get("cache_mb")
        return None if size is None else 1e6 * size

    def is_called(self, name: str) -> bool:
        """Whether a driver's name means this device."""
        return any(pattern.fullmatch(name.strip()) for pattern in self._patterns)


def read(path: Path) -> Device:
    """One file of the table; raises ValueError that says what is wrong with it."""
    raw = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
    unknown = sorted(set(raw) - {"name", "kind", "names", "note", *FIGURES})
    if unknown:
        raise ValueError(f"{path.name}: unknown key '{unknown[0]}'; there is {', '.join(FIGURES)}")
    if raw.get("kind") not in ("gpu", "cpu"):
        raise ValueError(f"{path.name}: kind must be gpu or cpu, got {raw.get('kind')}")
    figures, sources = {}, {}
    for key in FIGURES:
        entry = raw.get(key, UNKNOWN)
        if entry == UNKNOWN:
            continue
        if not isinstance(entry, dict) or not entry.get("source"):
            raise ValueError(
                f"{path.name}: {key} must be {{value: .., source: URL}} or unknown, got {entry}"
            )
        figures[key], sources[key] = float(entry["value"]), str(entry["source"])
    return Device(
        path.stem, raw["name"], raw["kind"], tuple(raw["names"]), figures, sources,
        str(raw.get("note", "")).strip(),
    )  # fmt: skip


@cache
def table(folder: Path = FOLDER) -> tuple[Device, ...]:
    """Every device, GPUs first, by name."""
    found = [read(path) for path in sorted(folder.glob("*.yaml"))]
    return tuple(sorted(found, key=lambda d: (d.kind != "gpu", d.name)))


def find(name: str, folder: Path = FOLDER) -> Device | None:
    """The device that a driver calls `name`, if the table has it."""
    return next((device for device in table(folder) if device.is_called(name)), None)


def of_environment(environment: Mapping[str, Any], folder: Path = FOLDER) -> Device | None:
    """The device that a run was measured on, from its environment.json."""
    gpu, cpu = environment.get("gpu") or {}, environment.get("cpu") or {}
    name = gpu.get("name") or cpu.get("model")
    return find(str(name), folder) if name else None
