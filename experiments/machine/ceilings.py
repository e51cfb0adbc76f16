"""The ceilings of a machine: those that a run measured, and theoretical ones of conf/hardware.

`bandwidth` measures the former; this file reads both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from experiments.paths import CONF

FIGURES = {
    "bandwidth_gb_s": "memory bandwidth, GB/s",
    "cache_mb": "last-level cache, MB",
    "memory_gb": "memory, GB",
    "tdp_w": "power, W",
}
UNKNOWN = "unknown"


@dataclass(frozen=True)
class MeasuredCeilings:
    """The measured ceilings of a run; bandwidth is in GB/s, read plus written.

    Attributes:
        copy_gb_s: bandwidth of copies; nan if unknown.
        gather_gb_s: pairs of bytes per row and bandwidth of gathers, ascending; () if unknown.
        sgemm_gflop_s: rate of a product of square float32 matrices in GFLOP/s; nan if unknown.
        gather_by: fastest ways to gather; () for early runs, which tried torch's only.
    """

    copy_gb_s: float = math.nan
    gather_gb_s: tuple[tuple[int, float], ...] = ()
    sgemm_gflop_s: float = math.nan
    gather_by: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, Any]) -> MeasuredCeilings:
        """Read the ceilings from environment.json; early runs have the copy bandwidth only."""
        entries = environment.get("bandwidth") or {}
        copy_gb_s = entries.get("copy_gb_s") or environment.get("copy_gb_s")
        gather_gb_s = {
            int(row_bytes): float(gb_s)
            for row_bytes, gb_s in (entries.get("gather_gb_s") or {}).items()
        }
        return cls(
            float(copy_gb_s) if copy_gb_s else math.nan,
            tuple(sorted(gather_gb_s.items())),
            float(entries.get("sgemm_gflop_s") or math.nan),
            tuple(dict.fromkeys((entries.get("gather_by") or {}).values())),
        )

    def gather(self, row_bytes: float) -> float:
        """Return the bandwidth of gathering rows of `row_bytes`, in GB/s; nan if unknown.

        It is that of the smallest measured size >= `row_bytes`: larger rows gather faster, so it is
        an upper bound. For rows larger than all measured sizes it is that of the largest size.
        """
        larger = [rate for size, rate in self.gather_gb_s if size >= row_bytes]
        rates = larger or [rate for _, rate in self.gather_gb_s[-1:]]
        return rates[0] if rates else math.nan

    @property
    def gather_method(self) -> str:
        """Return in words how gathers were measured, as the end of a sentence."""
        if not self.gather_by:
            return (
                "torch's index_select or embedding_bag, whichever was better; emblib's lookup was "
                "not tried, and ids were not counted, so a lookup from memory can exceed it"
            )
        ways = ", ".join(self.gather_by)
        return f"the best of torch's and emblib's ways to read random rows (here: {ways})"


@dataclass(frozen=True)
class Device:
    """A model of a GPU or CPU, from a file of conf/hardware.

    Attributes:
        key: name of the file.
        name: name of the model.
        kind: "gpu" or "cpu".
        names: regular expressions of the whole name as drivers write it.
        figures: values by the keys of FIGURES; figures without a source are absent.
        sources: URLs of the figures.
    """

    key: str
    name: str
    kind: str
    names: tuple[str, ...]
    figures: Mapping[str, float]
    sources: Mapping[str, str]

    @property
    def bandwidth_gb_s(self) -> float | None:
        """Return the theoretical memory bandwidth in GB/s, or None."""
        return self.figures.get("bandwidth_gb_s")

    @property
    def cache_bytes(self) -> float | None:
        """Return the bytes of the last-level cache, or None."""
        size = self.figures.get("cache_mb")
        return None if size is None else 1e6 * size

    def is_called(self, name: str) -> bool:
        """Return whether a driver's name means this device."""
        return any(re.fullmatch(text, name.strip(), re.IGNORECASE) for text in self.names)


def read(path: Path) -> Device:
    """Read a file of conf/hardware.

    Raises:
        ValueError: a key or kind is unknown, `name` or `names` is missing, or a figure has no
            source, no value, or a value that is not a number.
    """
    content = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
    unknown_keys = sorted(set(content) - {"name", "kind", "names", "note", *FIGURES})
    if unknown_keys:
        raise ValueError(
            f"{path.name}: unknown key '{unknown_keys[0]}'; there is {', '.join(FIGURES)}"
        )
    if content.get("kind") not in ("gpu", "cpu"):
        raise ValueError(f"{path.name}: kind must be gpu or cpu, got {content.get('kind')}")
    missing_keys = [key for key in ("name", "names") if key not in content]
    if missing_keys:
        raise ValueError(f"{path.name}: {missing_keys[0]} is missing")
    figures, sources = {}, {}
    for key in FIGURES:
        entry = content.get(key, UNKNOWN)
        if entry == UNKNOWN:
            continue
        is_sourced = isinstance(entry, dict) and bool(entry.get("source"))
        if not is_sourced or not isinstance(entry.get("value"), int | float):
            raise ValueError(
                f"{path.name}: {key} must be {{value: .., source: URL}} or unknown, got {entry}"
            )
        figures[key], sources[key] = float(entry["value"]), str(entry["source"])
    names = tuple(content["names"])
    return Device(path.stem, content["name"], content["kind"], names, figures, sources)


@cache
def known_devices() -> tuple[Device, ...]:
    """Return every device of conf/hardware, GPUs first, sorted by name; files are read once.

    Raises:
        ValueError: a file is wrong, see `read`.
    """
    devices = [read(path) for path in sorted((CONF / "hardware").glob("*.yaml"))]
    return tuple(sorted(devices, key=lambda device: (device.kind != "gpu", device.name)))


def find(name: str) -> Device | None:
    """Return the device that a driver calls `name`; None if conf/hardware has none."""
    return next((device for device in known_devices() if device.is_called(name)), None)


def of_environment(environment: Mapping[str, Any]) -> Device | None:
    """Return the device of a run by its environment.json: GPU, else CPU; None if unknown."""
    gpu, cpu = environment.get("gpu") or {}, environment.get("cpu") or {}
    name = gpu.get("name") or cpu.get("model")
    return find(str(name)) if name else None
