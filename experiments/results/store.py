"""The directory of a run: its files, and their writers and readers.

config.yaml, environment.json and run.json describe the run, points.jsonl has its records. Other
files are derived from them.
"""

from __future__ import annotations

import datetime
import fcntl
import importlib.util
import itertools
import json
import lzma
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config.schema import MULTIRUN, Config, UsageError, folder_name
from experiments.paths import ROOT

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 2  # 1: one process per cell, no replicate, mode, point_key
POINTS = "points.jsonl"
# Present names, by the names in files of older runs.
PRESENT_NAMES = {
    "most_pairs": "max_pairs",
    "most_margin": "max_margin",
    "law": "distribution",
    "law_lookup_hit_rate": "expected_lookup_hit_rate",
    "law_row_hit_rate": "expected_row_hit_rate",
}
PACKED_POINTS = "points.jsonl.xz"  # compressed points.jsonl of committed references
Record = dict[str, Any]
"""A line of points.jsonl: the results or the failure of an arm in a job and mode.

Every kind's records have the entries of `measure.outcome.make_record`: identity (`point_key`,
`context_id`, `cell`, `arm`, `mode`, `replicate`), `params` (the workload), `status` ("ok" or a
failure) with `reason`, bytes, and `samples`, {phase: [[round, seconds], ...]}, of which none is
dropped. Kinds add entries of their own. `run.worker.measure_job` adds `job_records`, the number of
records of the job, by which an interrupted job is recognised. Readers accept records of older
versions: they read entries that older ones lack with `get` and a default. """


class RunStore:
    """The directory of a run that is written; creating the object creates the directory.

    Its methods replace files as a whole, so that there is never half a file, not even after a
    kill. Only points.jsonl grows (`append`), and may end with half a line. A run's directory must
    have one writer: `begin` claims the directory, and a program that continues a run must call
    `claim`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def create(cls, folder: Path, experiment: str) -> RunStore:
        """Create <folder>/<experiment>/<UTC time>-<pid>, with a number added if that exists.

        Raises:
            UsageError: the experiment's name is not the name of a folder.
            OSError: the directory cannot be created.
        """
        if experiment != MULTIRUN:  # a launch of several runs, whose name no experiment may have
            folder_name(experiment)
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        for attempt in itertools.count():
            path = folder / experiment / f"{stamp}-{os.getpid()}{f'-{attempt}' * (attempt > 0)}"
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                continue
        raise AssertionError("unreachable")

    @classmethod
    def begin(cls, config: Config, environment: Mapping[str, Any]) -> RunStore:
        """Create a run's directory below report.folder, with configuration and environment.

        Raises:
            UsageError: the folder cannot be written, or the run's name is not that of a folder.
        """
        try:
            folder = ROOT / config.report.folder  # an absolute folder replaces ROOT
            store = cls.create(folder, folder_name(config.name))
            store.claim()
            store.write_config(config)
            store.write_json("environment.json", environment)
        except OSError as error:
            raise UsageError(f"report.folder={config.report.folder}: {error}") from error
        return store

    def claim(self) -> bool:
        """Lock the directory while this object lives; return whether that succeeded.

        It fails if another writer, or an earlier call, has locked it. Writers that do not call
        `claim` are not stopped.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        weakref.finalize(self, os.close, descriptor)
        return True

    def write(self, name: str, text: str) -> Path:
        """Write a text file atomically; return its path."""
        target = self.path / name
        _write_atomically(target, text.encode())
        return target

    def write_json(self, name: str, value: Any) -> Path:
        """Write a JSON file atomically; return its path."""
        return self.write(name, json.dumps(value, indent=1) + "\n")

    def write_table(self, stem: str, table: pd.DataFrame) -> None:
        """Write a table as CSV, and as parquet if pyarrow is installed."""
        self.write(f"{stem}.csv", table.to_csv(index=False))
        if importlib.util.find_spec("pyarrow"):
            partial_file = self.path / f".{stem}.parquet.partial"
            table.to_parquet(partial_file, index=False)
            os.replace(partial_file, self.path / f"{stem}.parquet")

    def write_config(self, config: Config) -> Path:
        """Write a configuration, without interpolations, as config.yaml."""
        return self.write("config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))

    def append(self, *records: Record) -> None:
        """Append records, which must be JSON values, to points.jsonl.

        A kill can lose the last records and truncate a line. An incomplete last line of an earlier
        writer is removed first. If writing fails, as on a full disk, the bytes written so far are
        removed before OSError is raised.
        """
        lines = "".join(
            json.dumps({"schema_version": SCHEMA_VERSION, **record}) + "\n" for record in records
        )
        encoded_lines = lines.encode()
        descriptor = os.open(self.path / POINTS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            end = _truncate_incomplete_line(descriptor)
            try:
                while encoded_lines:  # a short write has no error: the next write raises it
                    encoded_lines = encoded_lines[os.write(descriptor, encoded_lines) :]
            except OSError:
                os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)


def _truncate_incomplete_line(descriptor: int) -> int:
    """Remove an incomplete last line; return the size of the file."""
    size = end = os.fstat(descriptor).st_size
    while end and os.pread(descriptor, 1, end - 1) != b"\n":
        num_bytes = min(4096, end)
        tail = os.pread(descriptor, num_bytes, end - num_bytes)
        end = end - num_bytes + tail.rfind(b"\n") + 1
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def has_records(path: Path) -> bool:
    """Return whether a directory has a run's records, plain or compressed."""
    return (path / POINTS).is_file() or (path / PACKED_POINTS).is_file()


def runs_in(folder: Path, pattern: str) -> list[Path]:
    """Return the directories with records that match `pattern` below `folder`, sorted."""
    return [path for path in sorted(folder.glob(pattern)) if has_records(path)]


def pack_records(path: Path) -> None:
    """Replace a finished run's points.jsonl, which must exist, by points.jsonl.xz."""
    source = path / POINTS
    _write_atomically(path / PACKED_POINTS, lzma.compress(source.read_bytes()))
    source.unlink()


def unpack_records(path: Path) -> None:
    """Replace points.jsonl.xz, if there is one, by points.jsonl."""
    packed = path / PACKED_POINTS
    if packed.is_file():
        _write_atomically(path / POINTS, lzma.decompress(packed.read_bytes()))
        packed.unlink()


def _write_atomically(target: Path, data: bytes) -> None:
    """Replace a file by a complete one: half of one would look like an interrupted run."""
    partial_file = target.with_name(f".{target.name}.partial")
    partial_file.write_bytes(data)
    os.replace(partial_file, target)


def read_records(path: Path) -> list[Record]:
    """Return the records of a run's directory in the order of the file; [] without a file.

    Keys have their present names. An incomplete last line is ignored; `append` removes it.

    Raises:
        ValueError: a line is not a JSON object or of a later schema, or points.jsonl.xz is damaged.
    """
    source = path / POINTS
    if not source.exists() and has_records(path):
        source = path / PACKED_POINTS
    records = []
    content = source.read_bytes() if source.exists() else b""
    if source.name == PACKED_POINTS:
        try:
            content = lzma.decompress(content)
        except lzma.LZMAError as error:
            raise ValueError(f"{source.name} is damaged ({error})") from error
    lines = content.decode(errors="replace").split("\n")[:-1]
    for index, line in enumerate(lines):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{source.name} line {index + 1} is damaged")
        if (version := record.get("schema_version", 1)) not in range(1, SCHEMA_VERSION + 1):
            raise ValueError(
                f"{source.name} is of schema {version}, and this harness reads up to "
                f"{SCHEMA_VERSION}: report it with the harness that measured it"
            )
        records.append(_with_present_names(record))
    return records


def _with_present_names(record: Record) -> Record:
    """Return a record with present names; its `params` are replaced in place.

    Of the entries of `params` only "law" was ever renamed, to "distribution".
    """
    if "law" in record.get("params", ()):
        record["params"] = {
            PRESENT_NAMES.get(name, name): value for name, value in record["params"].items()
        }
    return {PRESENT_NAMES.get(key, key): value for key, value in record.items()}


def read_config(path: Path) -> DictConfig:
    """Return a run's config.yaml, with present names of keys and without keys that were removed.

    Raises:
        ValueError: the file `path` is damaged, or not the configuration of a run.
        OSError: it cannot be read.
    """
    try:
        config = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name} is damaged ({' '.join(str(error).split())})") from error
    except OSError as error:
        if error.errno is not None:
            raise
        config = None  # OmegaConf refuses a number or a boolean by an OSError without a number
    if not isinstance(config, DictConfig) or "name" not in config:
        raise ValueError(f"{path.name} is not the configuration of a run: it has no name")
    try:
        _rename_settings(config)
    except (OmegaConfBaseException, ValueError) as error:  # the first for "${word}"
        raise ValueError(f"{path.name} is not the configuration of a run: {error}") from error
    return config


def _rename_settings(config: DictConfig) -> None:
    """Give the settings of an older run their present names, and remove those that are gone.

    Raises ValueError for a group that has no settings, and errors of OmegaConf.
    """
    _group(config, "timing").pop("energy_seconds", None)
    cases = config.get("cases") or OmegaConf.create({})
    groups = [(config, "gate"), (config, "workload")]
    groups += [(_group(cases, name), "workload") for name in cases]
    for parent, name in groups:
        group = _group(parent, name)
        if PRESENT_NAMES.keys() & group.keys():
            parent[name] = {PRESENT_NAMES.get(str(key), key): group[key] for key in group}


def _group(parent: DictConfig, name: Any) -> DictConfig:
    """Return a group of settings, an empty one if it is missing; else raise ValueError."""
    group = parent.get(name, OmegaConf.create({}))
    if not isinstance(group, DictConfig):
        raise ValueError(f"{name} has no settings")
    return group


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Return a JSON file of a run; {} if it is missing. Raise ValueError if it is damaged."""
    source = path / name
    try:
        content = json.loads(source.read_text()) if source.exists() else {}
    except ValueError as error:
        raise ValueError(f"{name} is damaged ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} is damaged (it is no JSON object)")
    if "device" in content:  # older files say "1 threads"
        content["device"] = re.sub(r"\b1 threads\b", "1 thread", str(content["device"]))
    return content
