"""One run, one directory, one writer: configuration, environment and every raw sample."""

from __future__ import annotations

import datetime
import itertools
import json
import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.config.schema import Config

SCHEMA_VERSION = 1
Record = dict[str, Any]


class RunStore:
    """A run's directory while it is being written; what is in it is readable at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def create(cls, folder: Path, experiment: str) -> RunStore:
        """A fresh directory <folder>/<experiment>/<time>-<pid>."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        for attempt in itertools.count():
            path = folder / experiment / f"{stamp}-{os.getpid()}{f'-{attempt}' * (attempt > 0)}"
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                continue
        raise AssertionError("unreachable")

    def write(self, name: str, text: str) -> Path:
        """A derived file, whole or not at all."""
        target = self.path / name
        partial = target.with_name(f".{name}.partial")
        partial.write_text(text)
        os.replace(partial, target)
        return target

    def write_json(self, name: str, value: Any) -> Path:
        """The same for JSON."""
        return self.write(name, json.dumps(value, indent=1, sort_keys=False) + "\n")

    def write_config(self, config: Config) -> Path:
        """The configuration that ran, every interpolation resolved."""
        return self.write("config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))

    def append(self, record: Record) -> None:
        """One line, one write call: a kill leaves whole lines, and at worst half of the last."""
        line = json.dumps({"schema_version": SCHEMA_VERSION, **record}) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(self.path / "points.jsonl", flags, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def read_records(path: Path) -> list[Record]:
    """All complete lines of a run's points.jsonl; a torn last line is ignored."""
    source = path / "points.jsonl"
    records = []
    lines = source.read_text().split("\n") if source.exists() else []
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                raise ValueError(f"{source.name} line {number + 1} is damaged") from None
    return records


def read_json(path: Path, name: str) -> dict[str, Any]:
    """environment.json or run.json of a run; empty where it is missing."""
    source = path / name
    return json.loads(source.read_text()) if source.exists() else {}
