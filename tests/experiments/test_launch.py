"""Many runs from one command: the launchers for real, exit statuses, one processor per job."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments import cli, configure, launch
from experiments.launch import Slot
from experiments.paths import ROOT
from experiments.results.store import read_records
from tests.experiments.smoke_host import SmokeHost

A, B = "+experiment=tbe_vs_torch", "+experiment=tt_vs_tbe"
SMOKE = ("timing=smoke", "device=cpu", "report=tables", "timing.max_cells=1")


# The command line


def test_jobs_are_all_combinations_in_hydras_order() -> None:
    plan = launch.parse_command_line(
        ["-m", "experiment=tbe_vs_torch,tt_vs_tbe", "seed=1,2", "sweep.D=[32,64]"]
    )
    assert plan.launcher == "basic"
    assert plan.jobs == tuple(
        (f"+experiment={name}", f"seed={seed}", "sweep.D=[32,64]")
        for name, seed in itertools.product(("tbe_vs_torch", "tt_vs_tbe"), (1, 2))
    )


PROBES = {
    (A, "--cfg", "job"): "-m goes with no other flag, got --cfg",
    ("timing=smoke",): "which experiments? e.g. python run.py -m",
    ("+experiment=tbe_vs_torch,tt_vs_tbee",): "Did you mean '+experiment=tt_vs_tbe'?",
    (A, "timing=smoke,stndard"): "Did you mean 'timing=standard'?",
    (A, "workload.B=8,0"): "workload.B must be in [1, 2**63), got 0",
    (A, "workload.B=interval(1,2)"): "list the values",
    (A, "hydra/launcher=jobliv"): "There is: basic, joblib, submitit_local, submitit_slurm",
    (A, "++hydra.sweep.dir=elsewhere"): "hydra.sweep.dir is fixed",
    (A, "hydra.output_subdir=../elsewhere"): "hydra.output_subdir is fixed",
    (A, "hydra/sweeper=x"): "hydra/sweeper is fixed: list the values",
    (A, "name=../.."): "cannot name the folder of a run",
    (A, "hydra.sweep.dir=elsewhere"): "hydra.sweep.dir is fixed; report.folder moves the results",
}


@pytest.mark.parametrize("words", PROBES, ids=" ".join)
def test_what_is_wrong_is_wrong_before_the_first_job(
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "run_job", None)  # nothing may be started
    assert cli.main(["-m", *words, f"report.folder={tmp_path}/runs"]) == 2
    assert PROBES[words] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "run_job", None)  # nothing may be started
    assert cli.main(["-m", A, "report.folder=/dev/null"]) == 2
    assert "report.folder=/dev/null: [Errno 20] Not a directory" in capsys.readouterr().err


def test_a_launcher_that_is_not_installed_says_what_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_is_installed", lambda plugin: False)
    assert cli.main(["-m", A, "hydra/launcher=joblib"]) == 2
    assert "pip install '.[launchers]'" in capsys.readouterr().err


def test_the_worst_status_is_what_a_script_must_know_of() -> None:
    assert launch.worst_status([0, 0]) == 0
    assert launch.worst_status([0, 6, 4]) == 4
    assert launch.worst_status([5, 3, 0]) == 3
    assert launch.worst_status([3, 1]) == 1
    assert launch.worst_status([0, -9]) == 1  # killed
    assert launch.worst_status([1, 130]) == 130


def test_a_job_that_never_said_how_it_ended_is_a_broken_one(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "0.json").write_text(json.dumps({"words": [], "status": None}))
    assert launch.read_job_result(tmp_path, 0) == {
        "status": 1,
        "seconds": 0.0,
        "last_line": "began and never ended: killed?",
    }
    assert launch.read_job_result(tmp_path, 1)["last_line"] == "never began"


# Processors

LISTED = """\
GPU 0: NVIDIA H100 (UUID: GPU-aaaa-1)
GPU 1: NVIDIA H100 (UUID: GPU-bbbb-2)
  MIG 1g.10gb     Device  0: (UUID: MIG-cccc-3)
  MIG 1g.10gb     Device  1: (UUID: MIG-dddd-4)
"""


def test_gpus_are_known_by_uuid_and_split_ones_by_their_parts() -> None:
    assert launch.parse_gpu_list(LISTED) == ["GPU-aaaa-1", "MIG-cccc-3", "MIG-dddd-4"]
    assert launch.parse_gpu_list("") == []


@pytest.mark.parametrize(
    ("variables", "names", "visible"),
    [
        ({}, ["GPU-aaaa-1", "GPU-bbbb-2"], ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-bbbb-2"], ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}, ["GPU-bbbb-2"], ["GPU-bbbb"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [], []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, [], []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["GPU-bbbb-2"], ["1"]),
        # submitit's local executor hides all GPUs; what the launching process saw counts
        ({"CUDA_VISIBLE_DEVICES": "", "EMBLIB_GPUS": "1"}, ["GPU-bbbb-2"], ["1"]),
    ],
)
def test_which_gpus_may_be_used(
    variables: dict[str, str],
    names: list[str],
    visible: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "EMBLIB_GPUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = "\n".join(LISTED.splitlines()[:2])
    monkeypatch.setattr(launch, "_run_nvidia_smi", lambda: text)
    assert [s.name for s in launch.list_gpus()] == names
    assert [s.visible for s in launch.list_gpus()] == visible


class Busy(Exception):
    """Every slot is locked."""


def is_free(slots: list[Slot], folder: Path) -> bool:
    """Return whether one of the slots could be locked."""

    def pause() -> None:
        raise Busy

    try:
        with launch.lock_slots(slots, 1, folder, pause):
            return True
    except Busy:
        return False


def test_a_slot_is_held_by_one_and_given_back(tmp_path: Path) -> None:
    two = [Slot("a", "0"), Slot("b", "1")]
    with (
        launch.lock_slots(two, 1, tmp_path) as first,
        launch.lock_slots(two, 1, tmp_path) as second,
    ):
        assert {first[0], second[0]} == set(two)
        assert not is_free(two, tmp_path)
    with launch.lock_slots(two, 2, tmp_path) as both:
        assert both == two


def test_who_needs_two_keeps_none_while_it_waits(tmp_path: Path) -> None:
    two = [Slot("a"), Slot("b")]
    waited = 0
    busy = contextlib.ExitStack()
    busy.enter_context(launch.lock_slots(two[1:], 1, tmp_path))

    def pause() -> None:
        nonlocal waited
        waited += 1
        with launch.lock_slots(two[:1], 1, tmp_path):  # the other is free meanwhile
            pass
        if waited == 3:
            busy.close()

    with launch.lock_slots(two, 2, tmp_path, pause) as held:
        assert held == two
    assert waited == 3
    with pytest.raises(launch.TooFewProcessors, match="needs 3 GPUs side by side and there are 2"):
        launch.lock_slots(two, 3, tmp_path, pause).__enter__()


def test_a_killed_holder_gives_its_slot_back(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.lock"
    program = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert not is_free([launch.CPU], tmp_path)
    holder.kill()
    holder.wait()
    with lock.open("a") as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)


def processors(*words: str) -> tuple[dict[str, str], list[Slot]]:
    """The environment a job gets, and the slots that are taken while it runs."""
    config = configure.load([A, *words])
    taken = []
    every = [*launch.list_gpus(), launch.CPU]
    with launch._lock_processors(config) as environment:
        for slot in every:
            taken += [] if is_free([slot], launch.lock_folder()) else [slot]
    return environment, taken


def test_a_job_is_alone_on_what_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "lock_folder", lambda: tmp_path)
    two = [Slot("GPU-a", "0"), Slot("GPU-b", "1")]
    monkeypatch.setattr(launch, "list_gpus", lambda: two)
    assert processors("device=cuda") == ({"CUDA_VISIBLE_DEVICES": "0"}, two[:1])
    assert processors("device=cuda", "device.ranks=2") == ({"CUDA_VISIBLE_DEVICES": "0,1"}, two)
    assert processors("device=cpu") == ({}, [launch.CPU])
    assert processors("device=cpu", "timing=smoke") == ({}, [])


def test_a_job_locks_as_many_gpus_as_its_largest_world_has_ranks() -> None:
    words = ["+experiment=sharding_scaling", "sharding.worlds=[1,4]"]
    assert launch._ranks(configure.load(words)) == 4
    assert launch._ranks(configure.load([*words, "timing=smoke"])) == 2  # timing.max_ranks
    assert launch._ranks(configure.load([*words, "timing.max_ranks=8"])) == 4


# Launchers for real


def launch_runs(folder: Path, *words: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "run.py", "-m", *words, *SMOKE, f"report.folder={folder}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **popen)


def test_a_launch_runs_its_jobs_one_after_another(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    smoke_host: SmokeHost,
) -> None:
    """Each job is a `python run.py` of its own, here forked from a process that has its imports."""

    def run_job(words: Sequence[str], environment: object, log: object) -> int:
        return smoke_host.run(list(words), tmp_path)[0]

    monkeypatch.setattr(launch, "_run_job_process", run_job)
    monkeypatch.setattr(sys, "argv", sys.argv)  # a launch sets these for its processes
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.delenv(launch.GPUS, raising=False)
    words = [A, *SMOKE, "seed=1,2", "contenders=[tbe]", f"report.folder={tmp_path}"]
    assert cli.main(["-m", *words]) == 0
    assert capsys.readouterr().out.count("status 0") == 2
    (multi,) = (tmp_path / "multirun").iterdir()
    for number in range(2):
        assert launch.read_job_result(multi, number)["words"][-1] == f"report.folder={tmp_path}"
        assert f"seed={number + 1}" in launch.read_job_result(multi, number)["words"]
    pages = list((tmp_path / "tbe_vs_torch").glob("*/index.html"))
    assert len(pages) == 2
    assert all("How to read this" in page.read_text() for page in pages)


def installed(launcher: str) -> bool:
    plugin = launch.LAUNCHERS[launcher]
    return not plugin or importlib.util.find_spec(f"hydra_plugins.{plugin}") is not None


def check_jobs(folder: Path, expected: Sequence[tuple[int, str]]) -> None:
    """Each has its result, its log and a run of its own; nothing lies where two would write."""
    (multi,) = (folder / "multirun").iterdir()
    for number, (status, experiment) in enumerate(expected):
        end = json.loads((multi / "jobs" / f"{number}.json").read_text())
        assert end["status"] == status
        assert f"+experiment={experiment}" in end["words"]
        log = (multi / "jobs" / f"{number}.log").read_text()
        assert ("report: " in log) == (status == 0)
    assert {p.name for p in folder.iterdir()} == {"multirun", *(e for s, e in expected if not s)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("joblib", "hydra.launcher.n_jobs=2"), ("submitit_local",)], ids=lambda w: w[0]
)
def test_jobs_of_a_launcher_side_by_side(words: tuple[str, ...], tmp_path: Path) -> None:
    if not installed(words[0]):
        pytest.skip(f"pip install '.[launchers]' for {words[0]}")
    done = launch_runs(tmp_path, f"{A},tt_vs_tbe", f"hydra/launcher={words[0]}", *words[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    check_jobs(tmp_path, [(0, "tbe_vs_torch"), (0, "tt_vs_tbe")])
    assert done.stdout.count("status 0") == 2
    for points in tmp_path.glob("t*/*/points.jsonl"):
        assert all(r["status"] in ("ok", "unsupported") for r in read_records(points.parent))
        command = json.loads((points.parent / "environment.json").read_text())["command"]
        assert command.startswith(f"python run.py +experiment={points.parents[1].name} ")


SCHEDULER = {
    "sbatch": """\
cp "$1" "$(dirname "$0")/submitted.sh"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
for task in $(seq 0 "$last"); do
  SLURM_JOB_ID=$((500 + task)) SLURM_ARRAY_JOB_ID=500 SLURM_ARRAY_TASK_ID=$task \\
    SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_JOB_NODELIST=here \\
    bash "$1" > /dev/null 2>&1 < /dev/null &
done
echo "Submitted batch job 500"
""",
    "srun": """\
while [ "$1" != "${1#--}" ]; do
  case "$1" in --output | --error) shift ;; esac
  shift
done
SLURM_PROCID=0 SLURM_LOCALID=0 exec "$@"
""",
    "sacct": """\
echo 'JobID|State|NodeList'
for task in 0 1; do echo "500_$task|RUNNING|here"; done
""",
}


@pytest.mark.slow
def test_slurm_gets_an_array_of_jobs(tmp_path: Path) -> None:
    """Against a pretended scheduler, which starts what it is given on this machine."""
    if not installed("submitit_slurm"):
        pytest.skip("pip install '.[launchers]'")
    programs, runs = tmp_path / "bin", tmp_path / "runs"
    programs.mkdir()
    for name, text in SCHEDULER.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}")
        (programs / name).chmod(0o755)
    launcher = {"partition": "gpu", "gpus_per_node": "1", "timeout_min": "240"}
    words = [f"hydra.launcher.{key}={value}" for key, value in launcher.items()]
    words.append("+hydra.launcher.additional_parameters.exclusive=true")
    done = launch_runs(
        runs,
        f"{A},tt_vs_tbe",
        "hydra/launcher=submitit_slurm",
        *words,
        env=os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_jobs(runs, [(0, "tbe_vs_torch"), (0, "tt_vs_tbe")])
    submitted = (programs / "submitted.sh").read_text().splitlines()
    wanted = ["partition=gpu", "gpus-per-node=1", "time=240", "array=0-1%2", "exclusive"]
    assert {f"#SBATCH --{word}" for word in wanted} <= set(submitted)


FAILING = '''"""A contender whose every step fails."""

from experiments.contenders.torch_bag import TorchBags


class Failing(TorchBags):
    """A bad one."""

    def step(self, prepared):
        raise ValueError("always")
'''


@pytest.mark.slow
def test_the_exit_status_is_the_worst_of_the_jobs(tmp_path: Path) -> None:
    """And those behind a failed one run nevertheless."""
    (tmp_path / "contenders").mkdir()
    (tmp_path / "contenders" / "failing.py").write_text(FAILING)
    entry = 'failing: {class: "failing:Failing", label: failing}'
    (tmp_path / "contenders" / "contenders.yaml").write_text(entry)
    environment = os.environ | {"EMBLIB_CONTENDERS": str(tmp_path / "contenders")}
    words = ["contenders=[tbe,failing],[tbe,torch]", A]
    done = launch_runs(tmp_path / "runs", *words, env=environment)
    assert done.returncode == 5, done.stdout + done.stderr
    (multi,) = (tmp_path / "runs" / "multirun").iterdir()
    ends = [launch.read_job_result(multi, number)["status"] for number in range(2)]
    assert ends == [5, 0]
    saved = OmegaConf.load(multi / "multirun.yaml")
    assert saved is not None


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A launch of an experiment of several cells; returns when the first of them is measured."""
    words = (A, "timing=quick", "device=cpu", "report=tables", "timing.max_rows=1000", *words)
    child = subprocess.Popen(
        [sys.executable, "run.py", "-m", *words, f"report.folder={folder}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # What a shell starts in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not list(folder.glob("t*/*/points.jsonl")):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return child


@pytest.mark.slow
def test_ctrl_c_ends_the_jobs_and_is_said(tmp_path: Path) -> None:
    """What was measured is kept and reported."""
    child = start(tmp_path)
    os.killpg(child.pid, signal.SIGINT)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 130, output
    (multi,) = (tmp_path / "multirun").iterdir()
    assert launch.read_job_result(multi, 0)["status"] == 130
    assert list(tmp_path.glob("t*/*/index.html")), output


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds the process in /proc")
def test_a_job_that_is_preempted_goes_on_where_it_was(tmp_path: Path) -> None:
    """As SLURM preempts: a signal to all processes of the job; submitit queues it again."""
    if not installed("submitit_local"):
        pytest.skip("pip install '.[launchers]'")
    child = start(tmp_path, "timing.max_cells=3", "hydra/launcher=submitit_local")
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_text()
        except OSError:
            continue
        is_job = "submitit.core._submit" in command or "run.py\0+experiment" in command
        if is_job and str(tmp_path) in command:
            os.kill(int(file.parent.name), signal.SIGUSR2)
    output, _ = child.communicate(timeout=240)
    assert child.returncode == 0, output
    assert output.count("status ") == 1
    first, second = sorted(tmp_path.glob("t*/*/run.json"))
    assert json.loads(first.read_text())["status"] == "interrupted"
    assert json.loads(second.read_text())["status"] == "finished"
    assert json.loads(second.read_text())["reused"] >= 1
