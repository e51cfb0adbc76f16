"""What the harness knows of a contender without importing it, and says of one it cannot use."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from experiments.config import configure
from experiments.config.schema import Config, Optimizer, UsageError
from experiments.config.sweep import Arm, Cell
from experiments.contenders import Missing, Task, build, registry
from experiments.contenders.registry import REQUIREMENT, RegistryError
from experiments.measure.outcome import Outcome, describe
from experiments.paths import ROOT
from experiments.results.identity import point_key
from experiments.run.session import Session
from experiments.workloads.workload import TableShape

# What peers call of torch that is deprecated is not for this suite to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PYTEST = importlib.metadata.version("pytest")
TASK = Task((TableShape(9, 4),), Optimizer.sgd, 0.1, torch.device("cpu"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody's own contenders."""
    monkeypatch.setenv("EMBLIB_CONTENDERS", str(tmp_path))
    return tmp_path


def write(folder: Path, body: str, *, bases: str = "", top: str = "") -> None:
    """A contender in a file of its own; the registry remembers a folder, so one file a test."""
    lines = [
        f"class Mine({bases}):",
        '    """First line."""',
        *(f"    {x}" for x in body.split("; ")),
    ]
    (folder / "mine.py").write_text("\n".join([top, *lines, ""]))


def test_names_are_known_without_torch() -> None:
    program = (
        "import sys; from experiments.contenders import registry; print(*registry.names()); "
        "sys.exit(bool({'torch', 'emblib', 'fbgemm_gpu', 'torchrec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"tbe", "tt", "torch", "fbgemm", "torchrec", "tensorly"} <= set(done.stdout.split())


@pytest.mark.parametrize("name", registry.names())
def test_what_is_read_from_a_file_is_what_its_class_has(name: str) -> None:
    entry = registry.find(name)
    if missing := entry.missing():
        pytest.skip(missing)
    cls = entry.load()
    read = (entry.name, entry.label, entry.variants, entry.dense, entry.requires, entry.install)
    own = (cls.name, cls.label, cls.variants, cls.dense, cls.requires, cls.install)
    assert read == own


def test_facts_are_inherited_but_a_name_and_a_label_are_not() -> None:
    assert registry.find("disk_lfu").variants == registry.find("cached_lru").variants == "cache"
    assert registry.find("disk_lfu").dense
    assert registry.find("torchrec").requires == registry.find("torchrec_fused").requires
    assert "Collection" not in {entry.cls for entry in registry.entries().values()}


def test_arms_follow_what_the_files_say() -> None:
    assert registry.variants("tensorly") == "rank"
    assert {"cached_lru", "disk_lfu", "fbgemm_lru"} <= set(registry.cached())
    assert not {"tbe", "tt", "fbgemm"} & set(registry.cached())


def test_a_contender_of_an_old_run_is_still_called_something() -> None:
    assert registry.label("gone_since") == "gone_since"
    assert registry.variants("gone_since") == ""
    with pytest.raises(RegistryError, match="no contender 'gone_since'"):
        registry.find("gone_since")


def test_a_folder_of_ones_own_is_read_too(folder: Path) -> None:
    top = "from experiments.contenders.tables import BatchedTables"
    write(folder, 'name = "mine"; label = "My own"', bases="BatchedTables", top=top)
    entry = registry.find("mine")
    assert (entry.label, entry.dense) == ("My own", True)
    assert type(build("mine", TASK)).__name__ == "Mine"
    assert Arm("mine").label == "My own"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('name = "mine"', "mine.py:2 Mine has a name but no label"),
        ('name = "Mine-1"; label = "x"', "lower-case letters"),
        ('name = "tbe"; label = "x"', "'tbe' is taken by BatchedTables in tables.py"),
        ('name = "mi" + "ne"; label = "x"', r"mine.py:4 Mine.name must be a literal"),
        ('name = "mine"; label = "x"; dense = 1', "Mine.dense must be a bool, got 1"),
        ('name = "mine"; label = "x"; variants = "size"', "variants must be one of"),
        ('name = "mine"; label = "x"; requires = ("numpy>=1",)', "requires must be like"),
        ("name = = 1", "mine.py:4: invalid syntax"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_with_its_place(
    folder: Path, body: str, complaint: str
) -> None:
    write(folder, body)
    with pytest.raises(UsageError, match=complaint):
        configure.load(["+experiment=tbe_vs_torch"])


def test_a_folder_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBLIB_CONTENDERS", "no/such/folder")
    with pytest.raises(RegistryError, match="EMBLIB_CONTENDERS: no folder no/such/folder"):
        registry.entries()


@pytest.mark.parametrize(
    ("requires", "install", "says"),
    [
        ("('not-here==1.2', )", "", "not installed: pip install not-here==1.2"),
        ("('a-b==1 | c==2', )", "", "not installed: pip install a-b==1 (or c==2)"),
        ("('a-b==1', )", "conda install a-b", "not installed: conda install a-b"),
    ],
)
def test_a_missing_package_is_a_row_with_what_to_type(
    folder: Path, requires: str, install: str, says: str
) -> None:
    write(folder, f'name = "mine"; label = "x"; requires = {requires}; install = "{install}"')
    with pytest.raises(Missing) as error:
        build("mine", TASK)
    assert str(error.value) == says
    outcome = Outcome(Arm("mine"))
    outcome.fail(error.value)
    assert (outcome.status, outcome.reason) == ("missing", says)


def test_one_of_two_alternatives_is_enough(folder: Path) -> None:
    write(folder, f'name = "mine"; label = "x"; requires = ("a-b==1 | pytest=={PYTEST}",)')
    entry = registry.find("mine")
    assert (entry.missing(), entry.versions()) == ("", {"pytest": PYTEST})


def test_a_package_that_does_not_load_is_said_with_the_version_that_does(folder: Path) -> None:
    body = 'name = "mine"; label = "x"; requires = ("pytest==0.1",)'
    write(folder, body, top="raise ImportError('undefined symbol')")
    with pytest.raises(
        Missing, match=rf"pytest {PYTEST} does not load here \(undefined symbol\).*pytest==0.1"
    ):
        build("mine", TASK)


def test_an_error_of_ones_own_file_is_no_missing_package(folder: Path) -> None:
    write(folder, 'name = "mine"; label = "x"', top="import not_here_at_all")
    with pytest.raises(ModuleNotFoundError, match="not_here_at_all"):
        build("mine", TASK)


def test_another_version_is_measured_and_said(folder: Path) -> None:
    write(folder, 'name = "mine"; label = "x"; requires = ("pytest==0.1",)')
    cell = Cell("sweep", "", Config().workload, (Arm("mine"),))
    record = describe(cell, Outcome(Arm("mine")), Session(Config(), torch.device("cpu"), "run"))
    assert record["packages"] == {"pytest": PYTEST}
    assert record["flags"] == [f"pytest is {PYTEST}, known to work is 0.1"]


def test_a_point_is_another_with_another_version_or_another_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> str:
        return point_key(Cell("sweep", "", Config().workload, (Arm("mine"),)), Config())

    body = 'name = "mine"; label = "x"; requires = ("pytest==0.1",)'
    write(folder, body)
    first = key()
    assert key() == first
    (folder / "mine.py").write_text((folder / "mine.py").read_text() + "\n# edited\n")
    edited = key()
    assert edited != first
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    assert key() not in {first, edited}


def test_the_extras_have_the_versions_that_are_known_to_work() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pinned = {*extras["peers"], *extras["peers-cuda"]}
    needed = {
        f"{name}=={version}"
        for entry in registry.entries().values()
        for requirement in entry.requires
        for name, version in REQUIREMENT.findall(requirement)
    }
    assert needed <= pinned
    known = dict(REQUIREMENT.findall(" ".join(needed)))
    every = dict(REQUIREMENT.findall(" ".join(pinned)))
    assert {name: every[name] for name in known} == known
    # FBGEMM's builds are one package under two names, of which one process can have one.
    assert not [text for text in extras["peers"] if text.startswith(("fbgemm-gpu=", "torchrec"))]
