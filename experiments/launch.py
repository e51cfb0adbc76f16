"""`python run.py -m +experiment=a,b ...`: run every job as a `python run.py` of its own.

Hydra's launcher starts the jobs: one after another (basic), in a pool of processes (joblib), as
local or SLURM jobs (submitit). Each job locks the processors that it needs (`Slot`), runs, and
records its end in a file of the multirun's folder. The file is in story order: the locks, the
command line, the launch, a job, and the thread that prints the ends of jobs.
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
from contextlib import ExitStack, contextmanager, nullcontext, suppress
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
from experiments.measure.process import request_signal_at_parent_end
from experiments.paths import CONF, ROOT
from experiments.results.store import RunStore

WAIT_SECONDS = 0.5  # period of attempts to lock a processor
GPUS = "EMBLIB_GPUS"  # GPUs for jobs; a launcher may change CUDA_VISIBLE_DEVICES


class TooFewProcessors(ValueError):
    """A job needs more processors than there are."""


@dataclass(frozen=True)
class Slot:
    """A processor that a job can lock: a GPU, or the CPU.

    Attributes:
        name: name of its lock, the same for all processes on this machine.
        visible: entry of the GPU in CUDA_VISIBLE_DEVICES; "" for the CPU.
    """

    name: str
    visible: str = ""


CPU = Slot("cpu")


def list_gpus() -> list[Slot]:
    """Return the GPUs that this process may use, by nvidia-smi and environment variables.

    EMBLIB_GPUS comes before CUDA_VISIBLE_DEVICES; without both all GPUs of nvidia-smi count.
    """
    present_uuids = parse_gpu_list(_run_nvidia_smi())
    allowed_gpus = os.environ.get(GPUS, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if allowed_gpus is None:
        return [Slot(uuid, uuid) for uuid in present_uuids]
    entries = [entry.strip() for entry in allowed_gpus.split(",") if entry.strip()]
    # CUDA ignores all entries from the first negative index on: -1 hides every GPU.
    gpus = itertools.takewhile(lambda entry: not entry.startswith("-"), entries)
    return [Slot(_uuid_of_entry(gpu, present_uuids), gpu) for gpu in gpus]


def parse_gpu_list(text: str) -> list[str]:
    """Return the UUIDs in the output of `nvidia-smi -L`; for a GPU in MIG mode, of its slices."""
    uuids: list[str] = []
    for uuid in re.findall(r"UUID: ((?:GPU|MIG)-[\w/.-]+)", text):
        if uuid.startswith("MIG") and uuids and uuids[-1].startswith("GPU"):
            uuids.pop()
        uuids.append(uuid)
    return uuids


def _uuid_of_entry(gpu: str, present_uuids: Sequence[str]) -> str:
    """Return the UUID of an entry, which unlike its index is the same in containers and jobs."""
    if gpu.isdigit():
        return present_uuids[int(gpu)] if int(gpu) < len(present_uuids) else f"gpu-{gpu}"
    return next((uuid for uuid in present_uuids if uuid.startswith(gpu)), gpu)


def _run_nvidia_smi() -> str:
    try:
        completed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout if completed.returncode == 0 else ""


def lock_folder() -> Path:
    """Return the folder of the locks, one per user of this machine."""
    return Path(tempfile.gettempdir()) / f"emblib-slots-{os.getuid()}"


@contextmanager
def lock_slots(
    slots: Sequence[Slot],
    count: int,
    folder: Path,
    pause: Callable[[], object] = lambda: time.sleep(WAIT_SECONDS),
) -> Iterator[list[Slot]]:
    """Wait until `count` of the slots are free at once, lock them, and yield them.

    Unlocks them at the end of the context. All are locked at once, because two jobs that have each
    locked one of two GPUs, and wait for the other, would wait forever.

    Args:
        slots: slots to choose from.
        count: number of slots.
        folder: folder of the locks.
        pause: function that waits between two attempts.

    Raises:
        TooFewProcessors: there are fewer slots.
    """
    if count > len(slots):
        raise TooFewProcessors(
            f"the job needs {count} GPUs side by side and there are {len(slots)}"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        with ExitStack() as locks:
            locked: list[Slot] = []
            for slot in slots:
                lock = FileLock(folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', slot.name)}.lock")
                if len(locked) < count:
                    with suppress(Timeout):
                        locks.enter_context(lock.acquire(blocking=False))
                        locked.append(slot)
            if len(locked) == count:
                yield locked
                return
        pause()


# Launcher -> package of its plugin.
LAUNCHERS = {
    "basic": "",
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
}
# Exit statuses (cli.HELP), worst first; an unknown one counts as 1.
WORST_FIRST = (130, 1, 2, 3, 5, 4, 6, 0)
LOOK_SECONDS = 1.0  # period of checks for jobs that have ended
JOBS = "jobs"  # folder of the jobs' results and logs in a multirun's folder
TIMEOUT_MINUTES = 7 * 24 * 60  # submitit_local counts the time that a job waits for a processor


@dataclass(frozen=True)
class LaunchPlan:
    """A parsed command line.

    Attributes:
        launcher: name in LAUNCHERS.
        hydra_words: overrides of Hydra's settings, as typed.
        words: other overrides, as Hydra composes them.
        jobs: overrides of each job, in Hydra's order.
    """

    launcher: str
    hydra_words: tuple[str, ...]
    words: tuple[str, ...]
    jobs: tuple[tuple[str, ...], ...]


def run(arguments: Sequence[str]) -> int:
    """Run all jobs and return the worst of their exit statuses.

    Raises:
        UsageError: the command line is wrong or the folder cannot be written; no job was started.
    """
    plan = parse_command_line(arguments)
    configs = [configure.load(words) for words in plan.jobs]
    report_folder = configs[0].report.folder
    try:
        folder = RunStore.create(ROOT / report_folder, MULTIRUN).path
        (folder / JOBS).mkdir()
    except OSError as error:
        raise UsageError(f"report.folder={report_folder}: {error}") from error
    with Watcher(folder, plan) as watcher:
        status = _launch(plan, folder)
    if status and not any((folder / JOBS).iterdir()):
        return 2  # Hydra has printed its error
    watcher.print_rest()
    print(f"multirun: {folder}")
    job_results = [read_job_result(folder, number) for number in range(len(plan.jobs))]
    return worst_status([*(int(job_result["status"]) for job_result in job_results), status])


def worst_status(statuses: Sequence[int]) -> int:
    """Return the most severe of exit statuses, by WORST_FIRST."""
    known_statuses = [status if status in WORST_FIRST else 1 for status in statuses]
    return min(known_statuses, key=WORST_FIRST.index)


# The command line


def parse_command_line(arguments: Sequence[str]) -> LaunchPlan:
    """Parse the command line and check every job; raise UsageError if one of them is wrong."""
    flags = {argument for argument in arguments if argument.startswith("-")} - {"-m", "--multirun"}
    if flags:
        raise UsageError(f"-m goes with no other flag, got {' '.join(sorted(flags))}")
    overrides = [
        re.sub(r"^experiment=", "+experiment=", argument)
        for argument in arguments
        if not argument.startswith("-")
    ]
    hydra_words = [argument for argument in overrides if re.match(r"[+~]*hydra[./]", argument)]
    words = [argument for argument in overrides if argument not in hydra_words]
    if not any(word.startswith("+experiment=") for word in words):
        raise UsageError(
            "which experiments? e.g. python run.py -m +experiment=tt_vs_tbe,tbe_vs_torch"
        )
    for word in hydra_words:
        key = word.lstrip("+~").partition("=")[0]
        if re.match(r"hydra[./]sweeper", key):
            raise UsageError(f"{key} is fixed: list the values of the runs, as in key=1,2,3")
        if key.startswith(("hydra.run", "hydra.sweep", "hydra.output_subdir")):
            raise UsageError(f"{key} is fixed; report.folder moves the results")
    jobs = tuple(_job_words(words))
    for job in jobs:
        configure.check_keys(job)
    composed_words = tuple(map(configure.spell_for_hydra, configure.parse(words)))
    return LaunchPlan(_parse_launcher(hydra_words), tuple(hydra_words), composed_words, jobs)


def _job_words(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield all combinations of comma-separated values, in the order of Hydra's sweeper."""
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


def _parse_launcher(hydra_words: Sequence[str]) -> str:
    launcher_names = [
        word.partition("=")[2]
        for word in hydra_words
        if word.lstrip("+").startswith("hydra/launcher=")
    ]
    name = launcher_names[-1] if launcher_names else "basic"
    if name not in LAUNCHERS:
        raise UsageError(f"no hydra/launcher '{name}'. There is: {', '.join(LAUNCHERS)}")
    if LAUNCHERS[name] and not _is_installed(LAUNCHERS[name]):
        raise UsageError(
            f"hydra/launcher={name} is not installed: pip install '.[launchers]', "
            "or leave it out and the jobs run one after another"
        )
    return name


def _is_installed(plugin: str) -> bool:
    try:
        return importlib.util.find_spec(f"hydra_plugins.{plugin}") is not None
    except ModuleNotFoundError:
        return False


# The launch


def _launch(plan: LaunchPlan, folder: Path) -> int:
    """Start the jobs by Hydra's launcher; return 0, or another status if Hydra itself fails."""
    configure.register()
    words = [*plan.words, *plan.hydra_words, *_settings(plan, folder)]
    on_this_machine = plan.launcher != "submitit_slurm"  # another machine may have other GPUs
    gpu_variable = {GPUS: ",".join(s.visible for s in list_gpus())} if on_this_machine else {}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ |= {**gpu_variable, "PYTHONPATH": path}  # for the launcher's processes
    sys.argv = ["run.py", "-m", *words]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run_job)()
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return int(bool(end.code))
    return 0


def _settings(plan: LaunchPlan, folder: Path) -> list[str]:
    """Return settings of Hydra and its launchers that the user has not given."""
    settings = {
        "hydra.sweep.dir": str(folder),
        "hydra.sweep.subdir": ".",
        "hydra/job_logging": "none",
        "hydra/hydra_logging": "none",
    }
    if plan.launcher == "joblib":
        settings["hydra.launcher.n_jobs"] = str(max(1, len(list_gpus())))
    if plan.launcher == "submitit_local":
        settings["hydra.launcher.timeout_min"] = str(TIMEOUT_MINUTES)
    typed_keys = {word.lstrip("+").partition("=")[0] for word in plan.hydra_words}
    return [f"{key}={value}" for key, value in settings.items() if key not in typed_keys]


# A job, in the process that the launcher has started


def run_job(composed: DictConfig) -> None:
    """Wait for a processor, run a job as `python run.py`, and record its end in JOBS/<number>.json.

    The file has `words`, `status` (None while it runs or is queued again), and after its end
    `seconds`, and `waited_s` for a processor. Hydra calls this function in the process that its
    launcher has started, which for submitit may be on another machine; so the launching process
    learns everything from the file.
    """
    job_config = HydraConfig.get()
    folder, job_number = Path(job_config.runtime.output_dir) / JOBS, int(job_config.job.num)
    words = [str(word) for word in job_config.overrides.task]
    shares_terminal = job_config.runtime.choices["hydra/launcher"] == "basic"
    store, file = RunStore(folder), f"{job_number}.json"
    store.write_json(file, {"words": words, "status": None})
    wait_start_s = job_start_s = time.monotonic()
    status: int | None = 1
    try:
        with _lock_processors(composed) as environment:
            job_start_s = time.monotonic()
            status = _run_job_process(
                words, environment, None if shares_terminal else folder / f"{job_number}.log"
            )
    except TooFewProcessors as error:
        print(f"job {job_number}: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
        raise
    except SystemExit:  # submitit has queued the job again, so this is not its end
        status = None
        raise
    finally:
        job_s, waited_s = time.monotonic() - job_start_s, job_start_s - wait_start_s
        job_result = {"words": words, "status": status, "seconds": job_s, "waited_s": waited_s}
        store.write_json(file, job_result)


@contextmanager
def _lock_processors(config: DictConfig | Config) -> Iterator[dict[str, str]]:
    """Lock the processors of a job and yield its environment; smoke runs on a CPU need no lock.

    The locks are files that all processes of the user share, so that jobs of several launches, too,
    are never measured on one processor at the same time.
    """
    kind, ranks = DeviceKind(config.device.kind), _ranks(config)
    gpus = [] if kind is DeviceKind.cpu else list_gpus()
    if gpus:
        with lock_slots(gpus, ranks, lock_folder()) as slots:
            yield {"CUDA_VISIBLE_DEVICES": ",".join(s.visible for s in slots)}
    elif config.timing.max_rows:
        yield {}
    else:
        with lock_slots([CPU], 1, lock_folder()):
            yield {}


def _ranks(config: DictConfig | Config) -> int:
    """Return the maximum number of concurrent ranks; `timing.max_ranks` caps worlds."""
    if kinds.find(str(config.kind)).arms.ranks is not Ranks.OF_WORLDS:
        return int(config.device.ranks)
    settings = [config.sharding, *(case.sharding for case in config.cases.values())]
    max_world = max(int(world) for sharding in settings for world in sharding.worlds)
    return min(max_world, int(config.timing.max_ranks or max_world))


def _run_job_process(words: Sequence[str], environment: dict[str, str], log: Path | None) -> int:
    """Run `python run.py WORDS`, with its output in `log` if given; return its exit status."""
    command = [sys.executable, str(ROOT / "run.py"), *words]
    with log.open("ab") if log else nullcontext() as output:
        child = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            preexec_fn=_prepare_job_process,
        )
        try:
            return child.wait()
        except KeyboardInterrupt:  # the job has received Ctrl-C too, and writes its report
            child.wait()
            raise
        except BaseException:  # a signal of the scheduler, which the job has not received
            child.terminate()
            child.wait()
            raise


def _prepare_job_process() -> None:
    """Ignore submitit's signals, which SLURM sends to all processes of a job.

    If the launcher's process ends, SIGTERM lets the run report what it has measured.
    """
    request_signal_at_parent_end(signal.SIGTERM)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


# The ends of the jobs


def read_job_result(folder: Path, job_number: int) -> dict[str, Any]:
    """Return the end of a job: `status`, `seconds`, and `last_line`, the last line of its log.

    `waited_s` is there only if the job has ended. Otherwise the status is 1, and `last_line` states
    what is known.
    """
    file = folder / JOBS / f"{job_number}.json"
    job_result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if job_result.get("status") is None:
        last_line = "began and never ended: killed?" if job_result else "never began"
        return {"status": 1, "seconds": 0.0, "last_line": last_line}
    log = file.with_suffix(".log")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return {"last_line": next((line for line in reversed(lines) if line.strip()), ""), **job_result}


class Watcher(threading.Thread):
    """A thread that prints a line per ended job while the launcher waits for all.

    Only the thread changes `unreported`, the jobs without a line. After its end `print_rest` does.
    """

    def __init__(self, folder: Path, plan: LaunchPlan) -> None:
        super().__init__(daemon=True)
        self.folder, self.unreported = folder, dict(enumerate(plan.jobs))
        self.has_ended = threading.Event()

    def __enter__(self) -> Watcher:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.has_ended.set()
        self.join()

    def run(self) -> None:
        """Print lines about ended jobs until `has_ended` is set."""
        while not self.has_ended.wait(LOOK_SECONDS):
            for job_number in list(self.unreported):
                job_result = read_job_result(self.folder, job_number)
                if "waited_s" in job_result:
                    self._print(job_number, job_result)

    def print_rest(self) -> None:
        """Print a line for each job that has none yet, for jobs without an end too."""
        for job_number in list(self.unreported):
            self._print(job_number, read_job_result(self.folder, job_number))

    def _print(self, job_number: int, job_result: dict[str, Any]) -> None:
        words = shlex.join(self.unreported.pop(job_number))
        status, seconds = job_result["status"], job_result["seconds"]
        line = f"#{job_number} status {status}, {seconds:.0f} s: run.py {words}"
        last_line = job_result["last_line"]
        print(f"{line}\n   {last_line}" if last_line else line, flush=True)
