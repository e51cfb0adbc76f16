"""The scripts that workflows call, with a pretended nvidia-smi, sudo and gate."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from experiments.paths import ROOT
from tests.bench.gpu.__main__ import PARTS

NVIDIA_SMI = """\
#!/usr/bin/env bash
# Two GPUs of which the second is divided; what would change something is written down.
case "$*" in
  -L) echo "GPU 0: Pretended GPU (UUID: GPU-0)"; echo "GPU 1: Pretended GPU (UUID: GPU-1)" ;;
  *--query-gpu=index*) printf '0\\n1\\n' ;;
  *--query-gpu=name*) echo "Pretended GPU" ;;
  "-i 1 --query-gpu=mig.mode.current"*) echo Enabled ;;
  *--query-gpu=mig.mode.current*) echo "[N/A]" ;;
  *--query-gpu=persistence_mode*) echo "${PERSISTENCE:-Disabled}" ;;
  *--query-gpu=clocks.max.memory*) echo 2619 ;;
  *--query-supported-clocks=graphics*) printf '%s\\n' ${CLOCKS-1980 1965 1590 1575 345} ;;
  *)
    case "${PERMIT:-all}" in
      none) echo "Insufficient Permissions"; exit "${REFUSAL_STATUS:-4}" ;;
      root) [ "${BY_SUDO:-}" ] || { echo "Insufficient Permissions"; exit 4; } ;;
      no_memory) [[ "$*" == *mc* ]] && { echo "is not supported for GPU 0"; exit 0; } ;;
    esac
    echo "$*" >> "$CHANGES" ;;
esac
"""
SUDO = '#!/usr/bin/env bash\n[ "$1" = -n ] && shift\nBY_SUDO=yes exec "$@"\n'
GATE = """\
#!/usr/bin/env bash
# python: the doctor and the gate.
echo "$*" >> "$CALLS"
[[ "$*" == *"run.py doctor"* ]] && exit "${DOCTOR_STATUS:-0}"
folder=${!#}
for word in "$@"; do
  case $word in report.folder=*) folder=$(tr -d "'" <<< "${word#*=}") ;; esac
done
if [ "${VERDICT:-}" ]; then
  mkdir -p "$folder/gate/now" && echo verdict > "$folder/gate/now/gate.md"
fi
exit "${STATUS:-0}"
"""


@dataclass
class Machine:
    """A folder of pretended commands before the real ones, and what is in the environment."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def install(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("GITHUB_", "EMBLIB_", "RUNNER_"))
        }
        environment = {
            **inherited,
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            **self.variables,
            **variables,
        }
        return subprocess.run(
            [str(ROOT / "scripts" / script), *words],
            capture_output=True,
            text=True,
            env=environment,
            cwd=self.folder,
        )

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def gpu(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.install("nvidia-smi", NVIDIA_SMI)
    machine.install("sudo", "#!/usr/bin/env bash\nexit 1\n")
    machine.variables = {
        "EMBLIB_GPU_STATE": str(tmp_path / "kept" / "state"),
        "CHANGES": str(tmp_path / "changes"),
    }
    return machine


SET = ["-i 0 -pm 1", "-i 0 -lgc 1575,1575", "-i 0 -lmc 2619,2619"]
UNSET = ["-i 0 -rmc", "-i 0 -rgc", "-i 0 -pm 0"]


def test_clocks_are_held_at_a_supported_value_and_given_back(gpu: Machine) -> None:
    done = gpu.run("tune_gpu.sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert gpu.lines("changes") == SET
    assert "SM clock held at 1575 MHz" in done.stdout
    assert "divided by MIG" in done.stdout  # and left alone
    assert gpu.run("restore_gpu.sh").returncode == 0
    assert gpu.lines("changes") == [*SET, *UNSET]
    again = gpu.run("restore_gpu.sh")
    assert (again.returncode, again.stdout) == (0, "restore: nothing to undo\n")
    assert gpu.lines("changes") == [*SET, *UNSET]


def test_what_was_set_before_stays_set(gpu: Machine) -> None:
    gpu.run("tune_gpu.sh", PERSISTENCE="Enabled", EMBLIB_CLOCK_PERCENT="100")
    gpu.run("restore_gpu.sh")
    held = ["-i 0 -lgc 1980,1980", "-i 0 -lmc 2619,2619"]
    assert gpu.lines("changes") == [*held, "-i 0 -rmc", "-i 0 -rgc"]


def test_only_the_chosen_gpus_are_touched(gpu: Machine) -> None:
    done = gpu.run("tune_gpu.sh", EMBLIB_GPUS="1")
    assert done.returncode == 0
    assert gpu.lines("changes") == []
    assert "nothing was changed" in done.stdout


@pytest.mark.parametrize("status", ["4", "0"])  # some drivers refuse with status 0
def test_without_permission_it_says_so_and_goes_on(gpu: Machine, status: str) -> None:
    done = gpu.run("tune_gpu.sh", PERMIT="none", REFUSAL_STATUS=status)
    assert done.returncode == 0
    assert done.stdout.count("was refused: Insufficient Permissions") == 3
    assert "nothing was changed" in done.stdout
    assert not (gpu.folder / "kept" / "state").exists()


def test_sudo_is_used_where_it_asks_for_no_password(gpu: Machine) -> None:
    gpu.install("sudo", SUDO)
    assert gpu.run("tune_gpu.sh", PERMIT="root").returncode == 0
    assert gpu.lines("changes") == SET


def test_what_is_not_supported_is_left_out(gpu: Machine) -> None:
    gpu.run("tune_gpu.sh", PERMIT="no_memory")
    assert gpu.lines("changes") == SET[:2]
    gpu.run("tune_gpu.sh", PERMIT="no_memory", CLOCKS="")
    assert gpu.lines("changes") == [*SET[:2], *UNSET[1:], SET[0]]


def test_a_job_that_was_killed_is_undone_by_the_next(gpu: Machine) -> None:
    gpu.run("tune_gpu.sh")
    done = gpu.run("tune_gpu.sh")
    assert "undoing that first" in done.stdout
    assert gpu.lines("changes") == [*SET, *UNSET, *SET]


def test_what_could_not_be_undone_fails_and_is_remembered(gpu: Machine) -> None:
    gpu.run("tune_gpu.sh")
    done = gpu.run("restore_gpu.sh", PERMIT="none")
    assert done.returncode == 1
    assert "could not undo: 0 memory_clock,0 sm_clock,0 persistence" in done.stderr
    assert gpu.run("restore_gpu.sh").returncode == 0
    assert gpu.lines("changes") == [*SET, *UNSET]


def test_tuning_goes_on_where_an_earlier_job_cannot_be_undone(gpu: Machine) -> None:
    gpu.run("tune_gpu.sh")
    done = gpu.run("tune_gpu.sh", PERMIT="none", PERSISTENCE="Enabled")
    assert done.returncode == 0
    assert "stays in" in done.stdout
    left = gpu.lines("kept/state")
    assert left == ["0 persistence", "0 sm_clock", "0 memory_clock"]
    gpu.run("tune_gpu.sh", PERMIT="no_memory", PERSISTENCE="Enabled")
    assert "0 memory_clock" in gpu.lines("kept/state")  # refused to be undone, so not forgotten
    assert len(gpu.lines("kept/state")) == len(set(gpu.lines("kept/state")))


def test_what_could_not_be_remembered_is_not_changed(gpu: Machine) -> None:
    done = gpu.run("tune_gpu.sh", EMBLIB_GPU_STATE=str(gpu.folder / "nvidia-smi" / "state"))
    assert done.returncode == 0
    assert "cannot be written" in done.stdout
    assert gpu.lines("changes") == []


def test_a_machine_without_a_gpu_is_no_failure(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.install(
        "nvidia-smi", "#!/usr/bin/env bash\necho failed to talk to the driver\nexit 9\n"
    )
    machine.variables = {"EMBLIB_GPU_STATE": str(tmp_path / "state")}
    assert machine.run("tune_gpu.sh").stdout == "tune: no NVIDIA GPU here, nothing to do\n"
    assert machine.run("restore_gpu.sh").stdout == "restore: nothing to undo\n"


@pytest.fixture
def gate(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """scripts/gate.sh with a gate that ends as told."""
    machine = Machine(tmp_path)
    machine.variables = {
        "EMBLIB_PYTHON": str(machine.install("python", GATE)),
        "EMBLIB_LOCK": str(tmp_path / "lock"),
        "PERF_FOLDER": str(tmp_path / "perf"),
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "CALLS": str(tmp_path / "calls"),
    }
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return lambda *words, **variables: machine.run("gate.sh", *words, **variables)


def head() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_gate_is_called_with_a_commit(
    gate: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = gate("HEAD", "timing=smoke", VERDICT="yes", DOCTOR_STATUS="1")
    assert done.returncode == 0, done.stderr
    call = (tmp_path / "calls").read_text().splitlines()[-1]
    words = f"gate.base='{head()}' gate.noise='reports/noise' report.folder='{tmp_path / 'perf'}'"
    assert call == f"run.py +experiment=gate {words} timing=smoke"
    assert not (tmp_path / "summary").exists()  # the gate wrote it


@pytest.mark.parametrize(
    ("status", "strict", "advisory", "level"),
    [
        ("0", 0, 0, None),
        ("1", 1, 1, "error"),
        ("2", 2, 2, "error"),
        ("3", 3, 0, "warning"),
        ("4", 4, 0, "warning"),
        ("5", 5, 5, "error"),
        ("6", 6, 0, "warning"),
        ("130", 130, 130, "error"),
    ],
)
def test_its_status_is_the_gates_and_advice_is_a_warning(
    gate: Callable[..., subprocess.CompletedProcess[str]],
    status: str,
    strict: int,
    advisory: int,
    level: str | None,
) -> None:
    done = gate(GATE_BASE="HEAD", STATUS=status, VERDICT="yes")
    assert done.returncode == strict
    assert ("::error title=emblib::" in done.stdout) == (strict != 0)
    done = gate("--advisory", "HEAD", STATUS=status, VERDICT="yes")
    assert done.returncode == advisory
    assert "::" not in done.stdout if level is None else f"::{level} title" in done.stdout


def test_a_gate_that_left_no_verdicts_is_on_the_jobs_page(
    gate: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert gate("HEAD", STATUS="1").returncode == 1
    assert "the gate itself failed (exit status 1)" in (tmp_path / "summary").read_text()


def test_a_runner_of_ones_own_keeps_its_noise_floor(
    gate: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert gate("HEAD", RUNNER_ENVIRONMENT="self-hosted", XDG_STATE_HOME="/state").returncode == 0
    assert "gate.noise='/state/emblib/noise'" in (tmp_path / "calls").read_text()
    assert gate("HEAD", EMBLIB_NOISE="/other").returncode == 0
    assert "gate.noise='/other'" in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("base", ["no-such-branch", "--upload-pack=x", "HEAD:README.md"])
def test_a_base_that_is_no_commit_is_wrong_usage(
    gate: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, base: str
) -> None:
    done = gate(GATE_BASE=base)
    assert done.returncode == 2
    assert "is not a commit of this repository" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_two_measurements_never_share_a_machine(
    gate: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    with subprocess.Popen(
        ["flock", lock, "sh", "-c", "echo; read -r x"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()  # it has the lock
        done = gate("HEAD", EMBLIB_LOCK_SECONDS="0")
        assert done.returncode == 1
        assert "the machine was not free" in done.stderr
        other.communicate(b"\n")
    assert gate("HEAD", EMBLIB_LOCK_SECONDS="0").returncode == 0


NIGHT = """\
#!/usr/bin/env bash
# python: names of experiments, the doctor, the gallery, and runs that end as their names say.
case "$*" in
  -) cat > /dev/null; echo "ends_0 ends_5 ends_3" ;;
  *"run.py gallery"*) echo "- an answer" ;;
  *+experiment=*)
    echo "$*" >> "$CALLS"
    name=$(tr " " "\\n" <<< "$*" | sed -n 's/^+experiment=//p')
    exit "${name#*_}" ;;
esac
"""


@pytest.fixture
def night(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.variables = {
        "EMBLIB_PYTHON": str(machine.install("python", NIGHT)),
        "EMBLIB_LOCK": str(tmp_path / "lock"),
        "PERF_FOLDER": str(tmp_path / "perf"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "CALLS": str(tmp_path / "calls"),
    }
    return machine


def test_a_night_goes_on_after_a_failure_and_ends_with_the_worst(night: Machine) -> None:
    done = night.run("nightly.sh", "timing=smoke")
    assert done.returncode == 5, done.stderr
    folder = night.folder / "perf"
    assert night.lines("calls") == [
        f"run.py +experiment=ends_{n} report.folder='{folder}' timing=smoke" for n in (0, 5, 3)
    ]
    page = "\n".join(night.lines("summary"))
    assert all(f"| ends_{n} | {n} |" in page for n in (0, 5, 3))
    assert page.rstrip().endswith("- an answer")


def test_a_night_that_is_interrupted_stops(night: Machine) -> None:
    done = night.run("nightly.sh", EXPERIMENTS="ends_130 ends_0")
    assert done.returncode == 130
    assert len(night.lines("calls")) == 1


def test_the_noise_floor_comes_first_and_has_its_folder(night: Machine) -> None:
    night.install("python", NIGHT.replace('exit "${name#*_}"', "exit 0"))
    done = night.run("nightly.sh", EXPERIMENTS="selftest_aa", EMBLIB_NOISE="/kept")
    assert done.returncode == 0
    assert "gate.noise='/kept'" in night.lines("calls")[0]


GPU_DAY = """\
#!/usr/bin/env bash
# python: tests that end as TESTS says, experiments that leave a run, everything else succeeds.
echo "$*" >> "$CALLS"
case "$*" in
  "-m pytest"*) echo "2 failed"; exit "${TESTS:-0}" ;;
  "-m tests.bench.gpu caches"*) [ -z "${SLOW:-}" ] || sleep 30 ;;
  "-m tests.bench.gpu summary"*) echo "# Aims" > "$PERF_FOLDER/aims.md" ;;
  "-m tests.bench.gpu trains"*) exit "${TRAINS:-0}" ;;
  -) cat > /dev/null ;;
  *+experiment=*)
    folder=$(tr " " "\\n" <<< "$*" | sed -n "s/^report.folder='\\(.*\\)'/\\1/p")
    mkdir -p "$folder/tbe" && echo {} > "$folder/tbe/run.json" ;;
esac
"""


@pytest.fixture
def gpu_day(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.install("compute-sanitizer", '#!/usr/bin/env bash\necho "sanitizer $2" >> "$CALLS"\n')
    machine.variables = {
        "EMBLIB_PYTHON": str(machine.install("python", GPU_DAY)),
        "EMBLIB_LOCK": str(tmp_path / "lock"),
        "PERF_FOLDER": str(tmp_path / "day"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "CALLS": str(tmp_path / "calls"),
        "EXPERIMENTS": "tbe",
    }
    return machine


def test_a_day_with_a_gpu_tests_before_it_times_and_bundles_the_runs(gpu_day: Machine) -> None:
    done = gpu_day.run("gpu_day.sh", "lr=0.1")
    assert done.returncode == 0, done.stderr
    calls, folder = gpu_day.lines("calls"), gpu_day.folder / "day"
    wanted = [
        "run.py doctor",
        "-m pytest -q -k cuda",
        f"-m tests.bench.gpu updates --out {folder} --seconds 48",
        f"-m tests.bench.gpu matrix --out {folder} --seconds 33",
        f"-m tests.bench.gpu kernels --out {folder} --seconds 18",
        f"run.py +experiment=tbe report.folder='{folder}/runs' device=cuda timing=quick "
        "timing.total_seconds=22 lr=0.1",
        "sanitizer racecheck",
        "sanitizer memcheck",
        f"run.py bundle pack {folder}/runs/tbe --out {folder}/bundle.zip",
        f"-m tests.bench.gpu summary --out {folder}",
    ]
    order = [next(n for n, call in enumerate(calls) if call.startswith(w)) for w in wanted]
    assert order == sorted(order)
    assert "# Aims" in done.stdout


def test_a_part_that_fails_or_is_too_slow_does_not_stop_the_next(gpu_day: Machine) -> None:
    parts = "trains caches quantised racecheck"
    sanitizer = "#!/usr/bin/env bash\nsleep 30\n"
    gpu_day.install("compute-sanitizer", sanitizer)
    done = gpu_day.run("gpu_day.sh", PARTS=parts, TRAINS="1", SLOW="1", MINUTES="1")
    page = gpu_day.lines("summary")
    assert done.returncode == 124
    assert any(line.startswith("| trains | 1 |") for line in page)
    assert any(line.startswith("| caches | 124 |") for line in page)
    assert any(line.startswith("| quantised | 0 |") for line in page)
    assert any(line.startswith("| racecheck | 0: nothing found until its limit") for line in page)
    assert not any(line.startswith("| updates") for line in page)


def test_the_parts_of_a_day_take_ten_minutes(gpu_day: Machine) -> None:
    done = gpu_day.run("gpu_day.sh", "--list", EXPERIMENTS="tt_vs_tbe peers")
    limits = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert sum(limits) <= 600
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert {"tests", *PARTS, "racecheck", "memcheck"} <= set(names)
    assert not (gpu_day.folder / "calls").exists()


def test_wrong_kernels_are_not_timed(gpu_day: Machine) -> None:
    done = gpu_day.run("gpu_day.sh", TESTS="1")
    assert done.returncode == 1
    assert "tests ended with exit status 1:\n2 failed" in done.stderr
    timed = ("bench.gpu kernels", "+experiment", "bench.gpu updates")
    assert not any(word in call for call in gpu_day.lines("calls") for word in timed)
    assert "| tests | 1 |" in "\n".join(gpu_day.lines("summary"))
    forced = gpu_day.run("gpu_day.sh", TESTS="1", FORCE="1")
    assert forced.returncode == 1
    assert any("bench.gpu kernels" in call for call in gpu_day.lines("calls"))


def test_only_a_whole_run_of_a_commit_joins_the_history(tmp_path: Path) -> None:
    scripts, library = tmp_path / "scripts", tmp_path / "emblib"
    for folder in (scripts, library):
        folder.mkdir()
    for name in ("trend.sh", "lib.sh"):
        shutil.copy2(ROOT / "scripts" / name, scripts)
    machine = Machine(scripts, {"EMBLIB_PYTHON": str(scripts / "python"), "HISTORY": "history"})
    machine.install(
        "gate.sh", "#!/bin/sh\nmkdir -p build/perf; echo > build/perf/gate.json; exit $STATUS\n"
    )
    machine.install("python", "#!/bin/sh\nmkdir -p build/trend; touch build/trend/trend.md\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "scripts"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    for status, is_changed, expected in (("130", False, 0), ("0", True, 0), ("3", False, 1)):
        (library / "new.py").touch() if is_changed else (library / "new.py").unlink(missing_ok=True)
        done = machine.run(str(scripts / "trend.sh"), STATUS=status)
        assert done.returncode == int(status), done.stderr
        assert len(list((tmp_path / "history").iterdir())) == expected
