"""scripts/environment.sh with real pips and real environments, over distributions made up here.

The fake torch is a package whose `torch.__version__` has a local version that its distribution may
lack, as on PyPI; `needs-torch` stands for torchmetrics and all others that require torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from experiments.paths import ROOT

PROJECT = """\
[build-system]
requires = ["needs-torch"]
[project]
dependencies = ["torch>=2.10"]
[project.optional-dependencies]
test = ["wants>=1"]
"""


def make_wheel(folder: Path, name: str, version: str, module: str, requires: str = "") -> Path:
    """Write a wheel of one module and return its path."""
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    path = folder / f"{package}-{version}-py3-none-any.whl"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    files = {
        f"{package}/__init__.py": module,
        f"{info}/METADATA": "\n".join(lines + ([f"Requires-Dist: {requires}"] if requires else [])),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return path


def make_torch(folder: Path, distribution: str, version: str) -> Path:
    """Write a wheel of torch whose `torch.__version__` is `version`."""
    cuda = version.partition("+cu")[2] or None
    module = (
        f"__version__ = {version!r}\nclass version:\n    cuda = {cuda!r}\n"
        "import torch\ntorch.version = version\n"
    )
    return make_wheel(folder, "torch", distribution, module)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels: what a project needs, and a newer torch that must never be taken."""
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "needs-torch", "1.0", "", requires="torch>=2.0")
    make_wheel(folder, "wants", "1.0", "", requires="torch")
    make_torch(folder, "2.99.0", "2.99.0+cu130")
    return folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but the pip that Python brings."""
    folder = tmp_path_factory.mktemp("empty") / "environment"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


class Setup:
    """A project of its own with copies of an environment, in which the script runs."""

    def __init__(self, folder: Path, empty: Path, wheels: Path) -> None:
        self.folder, self.wheels = folder, wheels
        self.python = folder / "environment" / "bin" / "python"
        shutil.copytree(empty, folder / "environment", symlinks=True)
        (folder / "pyproject.toml").write_text(PROJECT)

    def unpack(self, wheel: Path) -> None:
        """Put what a wheel of one module has into the environment that is there before, as pip."""
        (folder,) = self.python.parents[1].glob("lib/python*/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)

    def pip_install(self, *words: str | Path) -> int:
        """Return the exit status of an installation into the environment that is there before."""
        command = [self.python, "-m", "pip", "--disable-pip-version-check", "install", *words]
        return subprocess.run(command, capture_output=True).returncode

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run both parts of the script, the second if the first ends well."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
            "PYTHON": str(self.python),
            "VENV": str(self.folder / "venv"),
            "TORCH_VERSION": "2.13.0",
            "EXTRAS": "test",
            **variables,
        }
        for part in ([], ["extras"]):
            done = subprocess.run(
                [str(ROOT / "scripts" / "environment.sh"), "state", *part],
                capture_output=True,
                text=True,
                env=environment,
                cwd=self.folder,
            )
            if done.returncode != 0:
                break
        return done

    def state(self, name: str) -> str:
        return (self.folder / "state" / name).read_text().strip()

    def installed(self) -> dict[str, str]:
        """Return the version of each distribution that the set-up environment sees."""
        code = (
            "import importlib.metadata as metadata\n"
            "print(*[f'{d.name}={d.version}' for d in metadata.distributions()])"
        )
        python = Path(self.state("bin")) / "python"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        return dict(pair.split("=") for pair in done.stdout.split())


@pytest.fixture
def setup(tmp_path: Path, empty: Path, wheels: Path) -> Setup:
    return Setup(tmp_path, empty, wheels)


PYPI = ("2.13.0", "2.13.0+cu130")


@pytest.mark.parametrize(
    ("torch", "variables"),
    [
        (PYPI, {}),
        # An environment takes seconds to make, and is the same for every version.
        pytest.param(  # PyTorch's own index
            ("2.13.0+cpu", "2.13.0+cpu"), {"VENV": ""}, marks=pytest.mark.slow
        ),
        (("2.11.0a0+5f1", "2.11.0a0+5f1.nv25"), {"VENV": ""}),  # a vendor's build of no release
    ],
)
def test_an_existing_torch_stays(
    setup: Setup, torch: tuple[str, str], variables: dict[str, str]
) -> None:
    distribution, version = torch
    setup.unpack(make_torch(setup.folder, distribution, version))
    # With a new environment a second time too, over what the first has made.
    for _ in range(1 if variables else 2):
        done = setup.run(**variables)
        assert done.returncode == 0, done.stderr
    assert setup.state("constraints") == f"torch=={distribution}"
    assert setup.state("torch_cuda") == version.partition("+cu")[2]
    versions = setup.installed()
    assert (versions["torch"], versions["needs-torch"], versions["wants"]) == (
        distribution,
        "1.0",
        "1.0",
    )


@pytest.mark.slow
def test_the_newest_pip_leaves_an_existing_torch(setup: Setup) -> None:
    if setup.pip_install("--upgrade", "pip"):
        pytest.skip("no registry to take the newest pip from")
    setup.unpack(make_torch(setup.folder, *PYPI))
    done = setup.run(VENV="")
    assert done.returncode == 0, done.stderr
    assert setup.installed()["torch"] == "2.13.0"


def test_a_torch_of_the_registry_is_installed_and_stays(setup: Setup) -> None:
    torch = make_torch(setup.folder, *PYPI)
    done = setup.run(PIP_FIND_LINKS=f"{setup.wheels} {setup.folder}")
    assert done.returncode == 0, done.stderr
    assert torch.name == "torch-2.13.0-py3-none-any.whl"
    assert setup.state("constraints") == "torch==2.13.0"
    assert setup.installed()["torch"] == "2.13.0"


def test_a_torch_that_pip_does_not_know_is_named(setup: Setup) -> None:
    setup.unpack(make_torch(setup.folder, *PYPI))
    (info,) = (setup.folder / "environment").glob("lib/python*/site-packages/torch-*.dist-info")
    shutil.rmtree(info)
    done = setup.run(VENV="")
    assert done.returncode == 1
    assert "imports a torch that pip does not know" in done.stderr
    assert "pip install torch==2.13.0" in done.stderr
    assert not (setup.folder / "state" / "constraints").exists()
