"""`python run.py -m +experiment=a,b ...`: run every job as its own `python run.py`.

Hydra's launcher decides where and when: one after another (basic), in a pool of processes (joblib),
as local or SLURM jobs (submitit). The multirun's folder records how each job ended.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments import configure, kinds
from experiments.config.schema import MULTIRUN, Config, DeviceKind, UsageError
from experiments.kinds.base import Ranks
from experiments.measure.process import asked_to_end_with_parent
from experiments.paths import CONF, ROOT
from experiments.results.store import RunStore

WAIT_SECONDS = 0.5
GPUS = "EMBLIB_GPUS"  # devices that jobs may use, where the launcher changes CUDA_VISIBLE_DEVICES


class NotEnough(ValueError):
    """A job needs more processors than there are."""


@dataclass(frozen=True)
class Slot:
    """One processor."""

    name: str  # of its lock: the same for everybody on this machine
    visible: str = ""  # its entry in CUDA_VISIBLE_DEVICES


CPU = Slot("cpu")


def list_gpus() -> list[Slot]:
    """Return the GPUs that this process may use, by nvidia-smi and the environment."""
    listed = listed_by(_nvidia_smi())
    allowed = os.environ.get(GPUS, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if allowed is None:
        return [Slot(uuid, uuid) for uuid in listed]
    entries = [e.strip() for e in allowed.split(",") if e.strip()]
    return [Slot(_name(entry, listed), entry) for entry in entries]


def listed_by(text: str) -> list[str]:
    """Parse the UUIDs in `nvidia-smi -L`; for a GPU split by MIG those of its instances."""
    uuids: list[str] = []
    for uuid in re.findall(r"UUID: ((?:GPU|MIG)-[\w/.-]+)", text):
        if uuid.startswith("MIG") and uuids and uuids[-1].startswith("GPU"):
            uuids.pop()
        uuids.append(uuid)
    return uuids


def _name(entry: str, listed: Sequence[str]) -> str:
    """Return the UUID of an entry: unlike indices, UUIDs are the same in containers and jobs."""
    if entry.isdigit():
        return listed[int(entry)] if int(entry) < len(listed) else f"gpu-{entry}"
    return next((uuid for uuid in listed if uuid.startswith(entry)), entry)


def _nvidia_smi() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def lock_folder() -> Path:
    """Return the folder of the locks, one per user and machine."""
    return Path(tempfile.gettempdir()) / f"emblib-slots-{os.getuid()}"


@contextmanager
def hold(
    slots: Sequence[Slot],
    count: int,
    folder: Path,
    pause: Callable[[], object] = lambda: time.sleep(WAIT_SECONDS),
) -> Iterator[list[Slot]]:
    """Lock any `count` of the slots as soon as that many are free at once; `pause` waits.

    All or none: a job that held one of two GPUs while waiting could wait forever.
    """
    if count > len(slots):
        raise NotEnough(f"the job needs {count} GPUs side by side and there are {len(slots)}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    while len(held := _take(slots, count, folder)) < count:
        _give_back(held)
        pause()
    try:
        yield list(held)
    finally:
        _give_back(held)


def _take(slots: Sequence[Slot], count: int, folder: Path) -> dict[Slot, FileLock]:
    """Lock slots that are free, at most `count` of them."""
    held: dict[Slot, FileLock] = {}
    for slot in slots:
        if len(held) < count:
            lock = FileLock(folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', slot.name)}.lock")
            with suppress(Timeout):
                lock.acquire(blocking=False)
                held[slot] = lock
    return held


def _give_back(held: dict[Slot, FileLock]) -> None:
    for lock in held.values():
        lock.release()


# Launcher -> the package that brings it.
LAUNCHERS = {
    "basic": "",
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
}
# Exit statuses (cli.HELP), worst first; any other is as bad as a tool that broke.
WORST_FIRST = (130, 1, 2, 3, 5, 4, 6, 0)
LOOK_SECONDS = 1.0
JOBS = "jobs"  # in the folder of a multirun: a result and a log for each
PATIENCE_MINUTES = 7 * 24 * 60  # submitit_local counts the time that a job waits for its processor


@dataclass(frozen=True)
class LaunchPlan:
    """A parsed command line."""

    launcher: str
    hydra_words: tuple[str, ...]  # as typed, the launcher's own settings among them
    words: tuple[str, ...]
    jobs: tuple[tuple[str, ...], ...]  # the words of each, in Hydra's order


def run(arguments: Sequence[str]) -> int:
    """Start the jobs and wait for all; return the worst of their exit statuses."""
    plan = read(arguments)
    configs = [configure.load(words) for words in plan.jobs]
    folder = RunStore.create(ROOT / configs[0].report.folder, MULTIRUN).path
    (folder / JOBS).mkdir()
    with Watcher(folder, plan) as watcher:
        status = _launch(plan, folder)
    if status and not any((folder / JOBS).iterdir()):
        return 2  # Hydra has said what it could not do
    watcher.tell_rest()
    print(f"multirun: {folder}")
    ends = [read_end(folder, number) for number in range(len(plan.jobs))]
    return worst([*(int(end["status"]) for end in ends), status])


def worst(statuses: Sequence[int]) -> int:
    """Return the most severe exit status."""
    known = [s if s in WORST_FIRST else 1 for s in statuses]
    return min(known, key=WORST_FIRST.index)


# The command line


def read(arguments: Sequence[str]) -> LaunchPlan:
    """Parse the command line; every usage error is raised before the first job starts."""
    flags = {a for a in arguments if a.startswith("-")} - {"-m", "--multirun"}
    if flags:
        raise UsageError(f"-m goes with no other flag, got {' '.join(sorted(flags))}")
    typed = [re.sub(r"^experiment=", "+experiment=", a) for a in arguments if not a.startswith("-")]
    of_hydra = [a for a in typed if re.match(r"[+~]*hydra[./]", a)]
    words = [a for a in typed if a not in of_hydra]
    if not any(w.startswith("+experiment=") for w in words):
        raise UsageError(
            "which experiments? e.g. python run.py -m +experiment=tt_vs_tbe,tbe_vs_torch"
        )
    configure.check_hydra(of_hydra)
    jobs = tuple(_jobs(words))
    for job in jobs:
        configure.check_keys(job)
    return LaunchPlan(_launcher(of_hydra), tuple(of_hydra), tuple(words), jobs)


def _jobs(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Return all combinations of comma-separated values, as Hydra's sweeper makes them."""
    choices = []
    for override in configure.parse(words):
        key = override.get_key_element()
        if not override.is_sweep_override():
            choices.append([f"{key}={override.get_value_element_as_str()}"])
        elif override.is_discrete_sweep():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            raise UsageError(f"'{override.input_line}': list the values, as in key=1,2,3")
    yield from itertools.product(*choices)


def _launcher(of_hydra: Sequence[str]) -> str:
    chosen = [w.partition("=")[2] for w in of_hydra if w.lstrip("+").startswith("hydra/launcher=")]
    name = chosen[-1] if chosen else "basic"
    if name not in LAUNCHERS:
        raise UsageError(f"no hydra/launcher '{name}'. There is: {', '.join(LAUNCHERS)}")
    if LAUNCHERS[name] and not _installed(LAUNCHERS[name]):
        raise UsageError(
            f"hydra/launcher={name} is not installed: pip install 'emblib[launchers]', "
            "or leave it out and the jobs run one after another"
        )
    return name


def _installed(plugin: str) -> bool:
    try:
        return importlib.util.find_spec(f"hydra_plugins.{plugin}") is not None
    except ModuleNotFoundError:
        return False


# The launch


def _launch(plan: LaunchPlan, folder: Path) -> int:
    """Run Hydra's part; return a status of its own where Hydra fails."""
    configure.register()
    words = [*plan.words, *plan.hydra_words, *_settings(plan, folder)]
    local = plan.launcher != "submitit_slurm"  # elsewhere other GPUs may be there
    allowed = {GPUS: ",".join(s.visible for s in list_gpus())} if local else {}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    before = sys.argv
    sys.argv = ["run.py", "-m", *words]
    try:
        with _environment({**allowed, "PYTHONPATH": path}):
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run_job)()
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return int(bool(end.code))
    finally:
        sys.argv = before
    return 0


def _settings(plan: LaunchPlan, folder: Path) -> list[str]:
    """Return defaults of launchers that were not typed."""
    settings = {
        "hydra.sweep.dir": str(folder),
        "hydra.sweep.subdir": ".",
        "hydra/job_logging": "none",
        "hydra/hydra_logging": "none",
    }
    if plan.launcher == "joblib":
        settings["hydra.launcher.n_jobs"] = str(max(1, len(list_gpus())))
    if plan.launcher == "submitit_local":
        settings["hydra.launcher.timeout_min"] = str(PATIENCE_MINUTES)
    typed = {word.lstrip("+").partition("=")[0] for word in plan.hydra_words}
    return [f"{key}={value}" for key, value in settings.items() if key not in typed]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key)
            if value is not None:
                os.environ[key] = value


# A job, in whatever process the launcher chose


def run_job(composed: DictConfig) -> None:
    """Wait for a processor, run, and record how the job ended."""
    at = HydraConfig.get()
    folder, number = Path(at.runtime.output_dir) / JOBS, int(at.job.num)
    words = [str(word) for word in at.overrides.task]
    alone = at.runtime.choices["hydra/launcher"] == "basic"
    store, file = RunStore(folder), f"{number}.json"
    store.write_json(file, {"words": words, "status": None})
    began = started = time.monotonic()
    status: int | None = 1
    try:
        with _processors(composed) as environment:
            started = time.monotonic()
            status = _run(words, environment, None if alone else folder / f"{number}.log")
    except NotEnough as error:
        print(f"job {number}: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
        raise
    except SystemExit:  # submitit queues the job again, and this is not its end
        status = None
        raise
    finally:
        seconds, waited = time.monotonic() - started, started - began
        end = {"words": words, "status": status, "seconds": seconds, "waited_s": waited}
        store.write_json(file, end)


@contextmanager
def _processors(config: DictConfig | Config) -> Iterator[dict[str, str]]:
    """Return the environment of a job that has processors to itself; smoke runs may share them."""
    kind, ranks = DeviceKind(config.device.kind), _ranks(config)
    gpus = [] if kind is DeviceKind.cpu else list_gpus()
    if gpus:
        with hold(gpus, ranks, lock_folder()) as held:
            yield {"CUDA_VISIBLE_DEVICES": ",".join(s.visible for s in held)}
    elif config.timing.max_rows:
        yield {}
    else:
        with hold([CPU], 1, lock_folder()):
            yield {}


def _ranks(config: DictConfig | Config) -> int:
    """Return the largest number of concurrent ranks."""
    if kinds.find(str(config.kind)).arms.ranks is not Ranks.OF_WORLDS:
        return int(config.device.ranks)
    asked = [config.sharding, *(case.sharding for case in config.cases.values())]
    return max(int(world) for sharding in asked for world in sharding.worlds)


def _run(words: Sequence[str], environment: dict[str, str], log: Path | None) -> int:
    """Run `python run.py WORDS` to its end; with `log`, its output goes there."""
    command = [sys.executable, str(ROOT / "run.py"), *words]
    with log.open("ab") if log else nullcontext() as output:
        child = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            preexec_fn=_as_a_job,
        )
        try:
            return child.wait()
        except KeyboardInterrupt:  # the job has had its Ctrl-C as well, and reports what it has
            child.wait()
            raise
        except BaseException:  # a scheduler's signal, of which only the launcher knows
            child.terminate()
            child.wait()
            raise


def _as_a_job() -> None:
    """Set up signal handling: SLURM warns all processes of a job with submitit's signal."""
    asked_to_end_with_parent()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


# What became of the jobs


def read_end(folder: Path, number: int) -> dict[str, Any]:
    """Return how a job ended; a job without a record counts as a failure of the tool."""
    file = folder / JOBS / f"{number}.json"
    end: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if end.get("status") is None:
        last_line = "began and never ended: killed?" if end else "never began"
        return {"status": 1, "seconds": 0.0, "said": last_line}
    log = file.with_suffix(".log")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return {"said": next((line for line in reversed(lines) if line.strip()), ""), **end}


class Watcher(threading.Thread):
    """Print a line for every job that has ended while the launcher waits for all."""

    def __init__(self, folder: Path, plan: LaunchPlan) -> None:
        super().__init__(daemon=True)
        self.folder, self.left = folder, dict(enumerate(plan.jobs))
        self.over = threading.Event()

    def __enter__(self) -> Watcher:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.join()

    def run(self) -> None:
        """Look once per second."""
        while not self.over.wait(LOOK_SECONDS):
            for number in list(self.left):
                end = read_end(self.folder, number)
                if "waited_s" in end:
                    self._tell(number, end)

    def tell_rest(self) -> None:
        """Print lines for the jobs that were not reported yet."""
        for number in list(self.left):
            self._tell(number, read_end(self.folder, number))

    def _tell(self, number: int, end: dict[str, Any]) -> None:
        words = shlex.join(self.left.pop(number))
        line = f"#{number} status {end['status']}, {end['seconds']:.0f} s: run.py {words}"
        print(f"{line}\n   {end['said']}" if end["said"] else line, flush=True)
