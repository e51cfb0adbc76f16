"""The measurements that README.md and docs/benchmarks.md quote: their plan, their age, the machine.

`python run.py reference measure` measures the parts of the plan one after the other: `CPU_PARTS`,
in about half an hour, and on a machine with a GPU `GPU_PARTS`. A part is an experiment or a program
of tests.bench. How busy other programs were before and during a part is stored with it, in
machine.json. With `timing=smoke` the parts run at sizes that mean nothing, and nothing is stored.

A stored measurement has digests of the code that it measured (experiments/machine/sources.py). If
that code has changed since, the generated text says so, and a test compares the text. So a change
of a kernel requires no new measurement, but readers see that the stored one is older.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml

from experiments.config.schema import UsageError
from experiments.machine import sources
from experiments.machine.cpu import BUSY_CORES, MAX_STOLEN_SHARE, CpuTime
from experiments.paths import REFERENCE, ROOT
from experiments.report import text

if TYPE_CHECKING:
    import torch

PROCESSES = 5  # processes per cell of the CPU's matrix and of experiments
STATE = "machine.json"  # file with the load of other programs, see `run_watched`
# Beginning of a contender's name -> area of the code that it runs besides dense tables.
AREA_OF_PREFIX = {
    "tt": "tensor trains",
    "scored": "hash tables",
    "dynamic": "hash tables",
    "tiered": "hash tables",
    "evicting": "hash tables",
    "cached": "caches",
    "disk": "caches",
}
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
ORPHAN_SECONDS = 10.0  # maximum time to wait for orphans to end
LOOK_SECONDS = 1.0  # time to watch other processes before a part
SAMPLE_SECONDS = 5.0  # period of samples of the load during a part


@dataclass(frozen=True)
class Part:
    """One measurement of the plan: an experiment, or a program of tests.bench, with its settings.

    Attributes:
        name: name of the experiment, or of the folder and the file of a program's results.
        settings: words of the command line.
        program: words after `python -m`; "" for an experiment.
        smoke: further words for a program in a smoke run, at sizes that mean nothing.
    """

    name: str
    settings: Sequence[str] = ()
    program: str = ""
    smoke: Sequence[str] = ()

    def command(self, *, smoke: bool, out: Path) -> list[str]:
        """Return the words of the command that measures the part.

        Args:
            smoke: True for sizes that mean nothing.
            out: folder to which a program writes. An experiment ignores it, and writes its run
                below report.folder.
        """
        if self.program:
            words = [*self.settings, *(self.smoke if smoke else ())]
            return [sys.executable, "-m", *self.program.split(), *words, "--out", str(out)]
        words = [f"timing.replicates={PROCESSES}", *self.settings]
        if smoke:
            words = ["timing=smoke", *(word for word in self.settings if word.startswith("device"))]
        return [sys.executable, "run.py", f"+experiment={self.name}", *words]


CPU_PARTS = (
    Part(
        "cpu_matrix",
        ("--curated", "--pages", "small", "--processes", str(PROCESSES)),
        program="tests.bench.cpu_matrix",
        smoke=("--processes", "1", "--seconds", "0.01", "--points", "T1", "D16", "B1"),
    ),
    Part("cpu_peers", program="tests.bench.cpu_peers", smoke=("--rounds", "1", "--cases", "B")),
    Part(
        "optimizer_steps",
        program="tests.bench.optimizer_steps",
        smoke=("--seconds", "0.01", "--cases", "B", "--options", "rowwise adagrad"),
    ),
    Part("peers", ("device=cpu", "device.threads=1", "timing.total_seconds=300")),
    Part(
        "hash_load_factor",
        ("device=cpu", "device.threads=1", "sweep.D=[]", "timing.total_seconds=180"),
    ),
)
GPU_PARTS = (
    Part(
        "matrix",
        ("--device", "cuda", "--seconds", "150"),
        program="tests.bench.gpu matrix",
        smoke=("--tiny", "--seconds", "1"),
    ),
    Part("peers", ("device=cuda", "timing.total_seconds=240")),
    Part("tt_vs_tbe", ("device=cuda", "timing.total_seconds=240")),
)


def measure(keep_run: Callable[[str], Path], names: Sequence[str] = (), *, smoke: bool) -> int:
    """Measure parts of the plan and store those that succeed; return 1 if a part failed, else 0.

    Args:
        keep_run: function that stores the newest run of an experiment and returns its folder.
        names: names of the parts to measure, each on every device of the plan; () for all.
        smoke: True for sizes that mean nothing; then nothing is stored.

    Raises:
        UsageError: the plan of this machine has no part of a name.
    """
    import torch  # here, because programs that only write pages need no torch

    plan = (*CPU_PARTS, *(GPU_PARTS if torch.cuda.is_available() else ()))
    part_names = dict.fromkeys(part.name for part in plan)
    if unknown := [name for name in names if name not in part_names]:
        raise UsageError(
            f"{unknown[0]} is not part of the plan, which has {text.listed([*part_names])}"
        )
    exit_status = 0
    for part in (part for part in plan if not names or part.name in names):
        device = torch.device("cuda" if part in GPU_PARTS else "cpu")
        parent = ROOT / "reports" / "runs" / "smoke" if smoke else program_folder(device)
        folder = parent / part.name
        command = part.command(smoke=smoke, out=folder)
        print("$ " + shlex.join(["python", *command[1:]]), flush=True)
        status, state = run_watched(command)
        print(f"{part.name}: {describe_load(state)}", flush=True)
        if status:
            print(f"{part.name}: did not finish well and is not kept", file=sys.stderr)
            exit_status = 1
        elif not smoke:
            stored_folder = folder if part.program else keep_run(part.name)
            (stored_folder / STATE).write_text(json.dumps(state, indent=1) + "\n")
            print(f"kept {os.path.relpath(stored_folder, ROOT)}")
    return exit_status


def program_folder(device: torch.device) -> Path:
    """Return the folder of reports/reference for results of programs on a device."""
    from experiments.machine import environment  # as in `measure`

    return REFERENCE / device_folder(environment.device_name(device))


def device_folder(device: str) -> str:
    """Return the name of the folder in reports/reference of a device, given by its full name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def run_watched(command: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Run a command in the root of the repository; watch the machine meanwhile.

    Returns:
        The exit status, and the content of STATE: `load_before` (load average) and `load_during`
        ([min, median, max] of load averages); `others_before` and `others_during`, the cores that
        other programs used; `stolen`, the share of the time that other virtual machines took;
        `seconds`, the duration. Children of the command do not count as other programs. If the
        system counts nothing, `others_before` is None, and `others_during` and `stolen` are 0.
    """
    time_before = CpuTime()
    time.sleep(LOOK_SECONDS)
    state = {
        "load_before": round(psutil.getloadavg()[0], 2),
        "others_before": time_before.usage_by_others()[1],
    }
    time_during, child_s_before, start = CpuTime(), _child_seconds(), time.monotonic()
    loads: list[float] = []
    with _adopt_orphans():
        process = subprocess.Popen(command, cwd=ROOT)
        status: int | None = None
        while status is None:
            loads.append(round(psutil.getloadavg()[0], 2))
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(SAMPLE_SECONDS)
    seconds = max(time.monotonic() - start, 1e-3)
    stolen, used_cores = time_during.usage_by_others()
    cores_of_others = max(0.0, (used_cores or 0.0) - (_child_seconds() - child_s_before) / seconds)
    return status, state | {
        "load_during": [min(loads), statistics.median(loads), max(loads)],
        "others_during": round(cores_of_others, 2),
        "stolen": round(stolen or 0.0, 4),
        "seconds": round(seconds),
    }


@contextlib.contextmanager
def _adopt_orphans() -> Iterator[None]:
    """Return a context in which this process becomes the parent of orphaned descendants (Linux).

    At its end this process waits for them, up to ORPHAN_SECONDS. An experiment measures in children
    of a fork server, which outlives the experiment. Unless this process adopts them, their
    processor time looks like that of other programs.
    """
    if sys.platform != "linux":
        yield
        return
    prctl, this_process = ctypes.CDLL(None).prctl, psutil.Process()
    pids_before = {child.pid for child in this_process.children()}
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
        deadline = time.monotonic() + ORPHAN_SECONDS
        for pid in {child.pid for child in this_process.children()} - pids_before:
            with contextlib.suppress(ChildProcessError):  # it has been waited for
                while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                    time.sleep(0.05)
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _child_seconds() -> float:
    """Return the processor time of the children that have ended."""
    return os.times().children_user + os.times().children_system


def describe_load(state: Mapping[str, Any]) -> str:
    """Return a text that says whether the machine was idle before and during a part.

    `state` is the second result of `run_watched`; {} if it was not recorded.
    """
    if not state:
        return "what else the machine did was not recorded"
    cores_of_others = max(state["others_before"] or 0.0, state["others_during"])
    if cores_of_others <= BUSY_CORES and state["stolen"] <= MAX_STOLEN_SHARE:
        return "on an idle machine"
    low, median, high = state["load_during"]
    stolen, load_before = text.percent(state["stolen"]), state["load_before"]
    return (
        f"the machine was not idle: others used {cores_of_others:.1f} cores, {stolen} of the time "
        f"was stolen, the load was {load_before:.1f} before and {low:.1f} to {high:.1f} (median "
        f"{median:.1f}) meanwhile"
    )


@dataclass(frozen=True)
class StoredEvidence:
    """The origin of a stored measurement: its code, date and machine.

    Attributes:
        commit: commit of the code; "" if it was not recorded.
        date: date of the measurement, ISO 8601; "" if it was not recorded.
        device: "cpu" or "cuda".
        areas: areas of the measured code (`sources.AREAS`): "dense tables", and for a run those of
            its contenders by AREA_OF_PREFIX.
        measured: digest of the code of each area, see `sources.digests`; {} if not recorded.
        state: content of STATE, see `run_watched`; {} if it was not recorded.
    """

    commit: str
    date: str
    device: str
    areas: Sequence[str]
    measured: Mapping[str, str]
    state: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> StoredEvidence:
        """Read the folder of a run, or the folder <name> of a program, with its <name>.json."""
        facts, contenders = _environment_and_contenders(folder)
        areas = {
            area
            for name in contenders
            for prefix, area in AREA_OF_PREFIX.items()
            if name.startswith(prefix)
        }
        state = folder / STATE
        return cls(
            commit=str((facts.get("git") or {}).get("sha") or ""),
            date=str(facts.get("time_utc", ""))[:10],
            device="cuda" if facts.get("gpu") else "cpu",
            areas=["dense tables", *sorted(areas)],
            measured=facts.get("sources") or {},
            state=json.loads(state.read_text()) if state.is_file() else {},
        )

    def changed(self) -> list[str]:
        """Return the areas whose code has changed since, or whose digest is missing."""
        now = sources.digests(self.device)
        return [area for area in self.areas if self.measured.get(area) != now.get(area)]

    def age(self) -> str:
        """Return e.g. 'commit 1a2b3c, 2026-11-26, before changes of dense tables'."""
        code = f"commit {self.commit}" if self.commit else "of a commit that was not recorded"
        date_note = f", {self.date}" if self.date else ""
        changed = self.changed()
        since = f", before changes of {text.listed(changed)}" if changed else ", of this code"
        return f"{code}{date_note}{since}"


def _environment_and_contenders(folder: Path) -> tuple[dict[str, Any], set[str]]:
    """Return the environment of a measurement and the names of its contenders."""
    path = folder / "environment.json"
    if path.is_file():
        config = yaml.safe_load((folder / "config.yaml").read_text())
        cases = [case for case in (config.get("cases") or {}).values() if case]
        contender_lists = [part.get("contenders") or () for part in (config, *cases)]
        return json.loads(path.read_text()), {name for names in contender_lists for name in names}
    content = json.loads((folder / f"{folder.name}.json").read_text())
    return content.get("environment") or {}, set()
