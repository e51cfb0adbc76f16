"""The set-up scripts: what they check first, which torch they install, what they compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.paths import ROOT

# Behaves like the Python of an empty environment: `-m venv` copies it, `-m pip install` writes down
# what it was asked for and makes torch importable, unless the text of REFUSED is among its words.
PYTHON = """\
#!/usr/bin/env bash
here=$(cd "$(dirname "$0")" && pwd)
case "$*" in
  *"sys.version_info < "*) exit "${TOO_OLD:-0}" ;;
  -V) echo "Python 3.9.2" ;;
  "- "*) exec "$REAL_PYTHON" "$@" ;; # reads pyproject.toml
  *"import ensurepip, venv"*) exit 0 ;;
  *sysconfig*) echo "$here/site" ;;
  "-m venv "*)
    echo "$*" >> "$CALLS"
    mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"
    exit "${INTERRUPTED:-0}" ;;
  *"pip --version") exit "${NO_PIP:-0}" ;;
  *"torch.version.cuda"*) printf %s "${TORCH_CUDA:-}" ;;
  *'metadata.version("torch")'*) echo torch==2.13.0 ;;
  *"import torch; v ="*) [ -e "$INSTALLED_TORCH" ] && echo 2.13.0 || exit 1 ;;
  *"install "*"torch==2.13.0"* | *"install "*.whl)
    echo "$*" >> "$CALLS"
    [[ -n "${REFUSED:-}" && "$*" == *"$REFUSED"* ]] && exit 1
    touch "$INSTALLED_TORCH" ;;
  *) echo "$*" >> "$CALLS" ;;
esac
"""
GPU = '#!/usr/bin/env bash\n[ "$1" = -L ] && echo "GPU 0: Pretended GPU (UUID: GPU-0)"\n'
NO_GPU = "#!/usr/bin/env bash\nexit 9\n"


class Machine:
    """Pretended commands before the real ones on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.calls.touch()
        self.install("python", PYTHON)
        self.install("nvidia-smi", NO_GPU)
        self.install("uv", '#!/usr/bin/env bash\necho "uv $*" >> "$CALLS"; exit 1\n')

    def install(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        state = self.folder / "state"
        ours = {"CXX", "CUDACXX", "TORCH", "EMBLIB_CUDA", "PIP_NO_INDEX", "VENV"}
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ours},
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "INSTALLED_TORCH": str(self.folder / "torch"),
            "PYTHON": str(self.folder / "python"),
            "REAL_PYTHON": sys.executable,
            "VENV": str(self.folder / "venv"),
            "TORCH_VERSION": "2.13.0",
            "EXTRAS": "",
            **variables,
        }
        return subprocess.run(
            [str(ROOT / "scripts" / script), str(state), *words],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def torch_installs(self) -> list[str]:
        """The requirement of each attempt to install torch, in order."""
        lines = self.calls.read_text().splitlines()
        return [line.split()[-1] for line in lines if "torch==" in line or ".whl" in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PYTHON": "no-such-python"}, "no 'no-such-python' on PATH"),
        ({"TOO_OLD": "1"}, "emblib needs Python >= 3.11"),
        ({"CXX": "no-such-compiler"}, "no C++ compiler 'no-such-compiler' on PATH"),
        ({"CXX": "no-such-compiler -O1"}, "no C++ compiler 'no-such-compiler -O1' on PATH"),
        ({"CXX": "env no-such-compiler"}, "'env no-such-compiler' does not compile C++20"),
        ({"CXX": " "}, "no C++ compiler '' on PATH"),
        ({"CXX": "false"}, "'false' does not compile C++20"),
        ({"EMBLIB_CUDA": "ON", "CUDACXX": "no-such-nvcc"}, "EMBLIB_CUDA=ON needs nvcc"),
        ({"EMBLIB_CUDA": "ON", "CUDACXX": "env no-such-nvcc"}, "EMBLIB_CUDA=ON needs nvcc"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_installed(
    machine: Machine, variables: dict[str, str], message: str
) -> None:
    done = machine.run("environment.sh", **variables)
    assert done.returncode == 1
    assert message in done.stderr
    assert machine.calls.read_text() == ""
    assert not (machine.folder / "venv").exists()


@pytest.mark.parametrize("compiler", ["env c++", "c++ -O1", "{folder}/my c++"])
def test_a_compiler_may_be_a_command_with_words(machine: Machine, compiler: str) -> None:
    machine.install("my c++", '#!/usr/bin/env bash\nexec c++ "$@"\n')
    machine.install("nvcc", "#!/usr/bin/env bash\n")
    done = machine.run(
        "environment.sh",
        CXX=compiler.format(folder=machine.folder),
        EMBLIB_CUDA="ON",
        CUDACXX="env nvcc -lineinfo",
    )
    assert done.returncode == 0, done.stderr


def test_an_environment_whose_creation_was_interrupted_is_created_again(machine: Machine) -> None:
    for interrupted, times in (("1", 1), ("0", 2), ("0", 2)):
        state = machine.run("environment.sh", INTERRUPTED=interrupted).returncode
        assert (state, machine.calls.read_text().count("-m venv")) == (int(interrupted), times)


@pytest.mark.parametrize("no_pip", ["0", "1"])
def test_an_environment_without_pip_gets_it(machine: Machine, no_pip: str) -> None:
    assert machine.run("environment.sh", NO_PIP=no_pip).returncode == 0
    assert ("-m ensurepip" in machine.calls.read_text()) is (no_pip == "1")


def test_a_machine_without_a_gpu_gets_a_cpu_build(machine: Machine) -> None:
    done = machine.run("environment.sh")
    assert done.returncode == 0, done.stderr
    assert machine.torch_installs() == ["torch==2.13.0+cpu"]
    assert "no NVIDIA GPU found: installing the CPU build" in done.stdout
    assert "make TORCH=" in done.stdout
    assert (machine.folder / "state" / "torch_cuda").read_text() == ""


def test_a_registry_without_cpu_builds_is_the_last_resort(machine: Machine) -> None:
    done = machine.run("environment.sh", REFUSED="+cpu")
    assert done.returncode == 0, done.stderr
    assert machine.torch_installs() == ["torch==2.13.0+cpu", "torch==2.13.0", "torch==2.13.0"]
    assert "--torch-backend=cpu" in machine.calls.read_text()  # the second of them, by uv
    assert "several GB with CUDA" in done.stdout


def test_without_a_network_only_the_given_wheels_are_tried(machine: Machine) -> None:
    machine.run("environment.sh", REFUSED="+cpu", PIP_NO_INDEX="1")
    assert "uv " not in machine.calls.read_text()


def test_a_machine_with_a_gpu_gets_the_default_build(machine: Machine) -> None:
    machine.install("nvidia-smi", GPU)
    done = machine.run("environment.sh", TORCH_CUDA="13.0")
    assert done.returncode == 0, done.stderr
    assert machine.torch_installs() == ["torch==2.13.0"]
    assert (machine.folder / "state" / "torch_cuda").read_text() == "13.0"


def test_a_torch_that_was_asked_for_is_installed_as_it_is(machine: Machine) -> None:
    done = machine.run("environment.sh", TORCH="torch-2.13.0.whl")
    assert done.returncode == 0, done.stderr
    assert machine.torch_installs() == ["torch-2.13.0.whl"]


def test_extras_wait_for_nothing_that_a_build_needs(machine: Machine) -> None:
    """What is compiled meanwhile imports torch, and torch imports numpy."""
    calls = []
    for part in ([], ["extras"]):
        machine.calls.write_text("")
        done = machine.run("environment.sh", *part, EXTRAS="harness,lint")
        assert done.returncode == 0, done.stderr
        calls.append(machine.calls.read_text())
    for need in ("scikit-build-core", "ninja", "numpy"):
        assert (need in calls[0], need in calls[1]) == (True, False)
    for need in ("pandas", "ruff"):
        assert (need in calls[0], need in calls[1]) == (False, True)


@pytest.mark.parametrize(
    ("smi", "torch_cuda", "variables", "expected"),
    [
        (GPU, "13.0", {}, "ON nvcc, torch for CUDA 13.0 and a GPU found"),
        (NO_GPU, "13.0", {}, "OFF no NVIDIA GPU found"),
        (GPU, "", {}, "OFF torch is a CPU build"),
        (GPU, "13.0", {"CUDACXX": "env nvcc"}, "ON nvcc, torch for CUDA 13.0 and a GPU found"),
        (GPU, "13.0", {"CUDACXX": "no-such-nvcc"}, "OFF no CUDA compiler (nvcc) on PATH"),
        (GPU, "13.0", {"CUDACXX": "env no-such-nvcc"}, "OFF no CUDA compiler (nvcc) on PATH"),
        (NO_GPU, "", {"EMBLIB_CUDA": "ON"}, "ON EMBLIB_CUDA=ON"),
        (GPU, "13.0", {"EMBLIB_CUDA": "OFF"}, "OFF EMBLIB_CUDA=OFF"),
    ],
)
def test_cuda_kernels_are_compiled_where_they_can_run(
    machine: Machine, smi: str, torch_cuda: str, variables: dict[str, str], expected: str
) -> None:
    machine.install("nvidia-smi", smi)
    machine.install("nvcc", "#!/usr/bin/env bash\n")
    state = machine.folder / "state"
    state.mkdir()
    (state / "torch_cuda").write_text(torch_cuda)
    done = machine.run("cuda_choice.sh", **variables)
    assert (done.returncode, done.stdout.strip()) == (0, expected)


def test_a_word_that_is_no_choice_is_refused(machine: Machine) -> None:
    done = machine.run("cuda_choice.sh", EMBLIB_CUDA="yes")
    assert done.returncode == 2
    assert "EMBLIB_CUDA must be AUTO, ON or OFF, got 'yes'" in done.stderr


def test_a_python_in_a_path_with_spaces_is_called(tmp_path: Path) -> None:
    python = tmp_path / "a b" / "python"
    (tmp_path / ".make").mkdir()
    (tmp_path / ".make" / "bin").write_text(f"{python.parent}\n")
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    call = ["make", "--no-print-directory", "-o", "native", f"VENV={tmp_path}", "run", "micro"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    lines = sorted(done.stdout.splitlines())  # make runs two targets at once
    assert lines == [f"run.py +experiment={name}" for name in ("micro", "tt_vs_tbe")]


def test_an_environment_with_a_space_in_its_name_is_refused() -> None:
    done = subprocess.run(["make", "VENV=a b", "run"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "VENV='a b' has a space" in done.stderr) == (2, True)
