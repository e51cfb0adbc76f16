"""What the harness knows of a contender without importing it, and says of one it cannot use."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from experiments import configure
from experiments.config.schema import Config, Optimizer, UsageError, WorkloadConfig
from experiments.config.sweep import Arm, Cell
from experiments.contenders import registry
from experiments.contenders.base import Contender, Task
from experiments.contenders.dynamic import DynamicNew
from experiments.contenders.keys import KeyTable
from experiments.contenders.registry import REQUIREMENT, MissingLibrary, RegistryError, build
from experiments.contenders.served import ServedTables
from experiments.measure.outcome import Outcome, make_record
from experiments.measure.session import Session
from experiments.measure.timing import task_of
from experiments.paths import ROOT
from experiments.results.identity import point_key
from experiments.workloads.workload import TableShape, make_pool
from tests.compat.peer import skip_without_peers

# What peers call of torch that is deprecated is not for this suite to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PYTEST = importlib.metadata.version("pytest")
TASK = Task((TableShape(9, 4),), Optimizer.sgd, 0.1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _versions_are_looked_up_again() -> Iterator[None]:
    registry.find_installed.cache_clear()
    yield
    registry.find_installed.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody's own contenders."""
    monkeypatch.setenv("EMBLIB_CONTENDERS", str(tmp_path))
    return tmp_path


def write(folder: Path, facts: str, *, bases: str = "", top: str = "") -> None:
    """Write a contender and its table; the registry remembers a folder, so one table per test."""
    (folder / "mine.py").write_text(f'{top}\nclass Mine({bases}):\n    """First line."""\n')
    (folder / "contenders.yaml").write_text(facts)


def entry(facts: str = "") -> str:
    """Return a table with one usable contender and further facts of it."""
    return f'mine: {{class: "mine:Mine", label: "My own"{facts and ", " + facts}}}'


OTHER_PYTEST = entry('requires: ["pytest==0.1"]')


def test_names_are_known_without_torch() -> None:
    program = (
        "import sys; from experiments.contenders import registry; print(*registry.names()); "
        "sys.exit(bool({'torch', 'emblib', 'fbgemm_gpu', 'torchrec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"tbe", "tt", "torch", "fbgemm", "torchrec", "tensorly"} <= set(done.stdout.split())


@pytest.mark.parametrize("name", registry.names())
def test_every_class_of_the_table_is_what_the_table_says(name: str) -> None:
    skip_without_peers(name)
    entry = registry.find(name)
    base = KeyTable if entry.keyed else ServedTables if entry.served else Contender
    assert issubclass(entry.load(), base)


def test_contenders_insert_the_share_of_new_keys_that_the_table_says() -> None:
    session = Session(Config(), torch.device("cpu"), "run")
    work = WorkloadConfig(T=1, E=400, D=4, B=100, L=1)
    (batch,) = make_pool(work, (TableShape(400, 4),), 1, seed=1).batches
    shares = {name: e.new_keys for name, e in registry.entries().items() if e.new_keys}
    assert shares
    for name, share in shares.items():
        arm = Arm(name)
        contender = build(name, task_of(Cell("sweep", "", work, (arm,)), arm, session))
        assert isinstance(contender, DynamicNew)
        first_new = contender.next_key
        prepared = contender.prepare(batch)
        for new_keys in (0, 100 * share):  # the first step with a batch uses it as it is
            contender.step(prepared)
            assert contender.next_key - first_new == new_keys


def test_arms_follow_what_the_table_says() -> None:
    assert registry.find("tensorly").variants == "rank"
    with_cache = {name for name, e in registry.entries().items() if e.variants == "cache"}
    assert {"cached_lru", "disk_lru", "fbgemm_lru"} <= with_cache
    assert not {"tbe", "tt", "fbgemm"} & with_cache


def test_a_contender_of_an_old_run_is_still_called_something() -> None:
    assert registry.entry_of("gone_since").label == "gone_since"
    assert registry.entry_of("gone_since").variants == ""
    with pytest.raises(RegistryError, match="no contender 'gone_since'"):
        registry.find("gone_since")


def test_a_folder_of_ones_own_is_read_too(folder: Path) -> None:
    top = "from experiments.contenders.tables import BatchedTables"
    write(folder, entry("dense: true"), bases="BatchedTables", top=top)
    mine = registry.find("mine")
    assert (mine.label, mine.dense) == ("My own", True)
    assert type(build("mine", TASK)).__name__ == "Mine"
    assert Arm("mine").label == "My own"


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ('mine: {class: "mine:Mine"}', "contenders.yaml: mine needs a class.*and a label"),
        ('mine: {class: "Mine", label: "x"}', "mine needs a class"),
        ('Mine-1: {class: "mine:Mine", label: "x"}', "lower-case letters"),
        ('tbe: {class: "mine:Mine", label: "x"}', "the name 'tbe' is taken"),
        (entry("dense: 1"), "mine: dense must be a bool, got 1"),
        (entry("heavy: true"), "mine: no fact 'heavy'"),
        (entry('variants: "size"'), "variants must be one of"),
        (entry('requires: ["numpy>=1"]'), "requires must be like"),
        (entry("requires: null"), "mine: requires must be a list, got None"),
        (entry("requires: 3"), "mine: requires must be a list, got 3"),
        (entry("new_keys: 2.0"), "new_keys must be in"),
        ('mine: {class: "mine:Mine", label: [x]}', "label must be a str"),
        ("_by_torch: {word: 3}", "_by_torch: word must be like"),
        ("_by_torch: {word: {2.10: '1'}}", "_by_torch: word must be like"),
        ("mine: {", "contenders.yaml: while parsing"),
        ("[mine]", "contenders.yaml: it must have an entry"),
        ('mine: "mine:Mine"', "contenders.yaml: it must have an entry"),
        (entry("").replace("mine", "7", 1), "7: a name is lower-case letters"),
    ],
)
def test_a_table_that_cannot_be_used_is_an_error_with_its_place(
    folder: Path, facts: str, complaint: str
) -> None:
    write(folder, facts)
    with pytest.raises(UsageError, match=complaint):
        configure.load(["+experiment=tbe_vs_torch"])


def test_a_folder_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBLIB_CONTENDERS", "no/such/folder")
    with pytest.raises(RegistryError, match="EMBLIB_CONTENDERS: there is no no/such/folder"):
        registry.entries()


@pytest.mark.parametrize(
    ("requires", "install", "says"),
    [
        ("['not-here==1.2']", "", "not installed: pip install not-here==1.2"),
        ("['a-b==1 | c==2']", "", "not installed: pip install a-b==1 (or c==2)"),
        ("['a-b==1']", "conda install a-b", "not installed: conda install a-b"),
    ],
)
def test_a_missing_package_is_a_row_with_what_to_type(
    folder: Path, requires: str, install: str, says: str
) -> None:
    write(folder, entry(f'requires: {requires}, install: "{install}"'))
    with pytest.raises(MissingLibrary) as error:
        build("mine", TASK)
    assert str(error.value) == says
    outcome = Outcome(Arm("mine"))
    outcome.fail(error.value)
    assert (outcome.status, outcome.reason) == ("missing", says)


def test_one_of_two_alternatives_is_enough(folder: Path) -> None:
    write(folder, entry(f'requires: ["a-b==1 | pytest=={PYTEST}"]'))
    mine = registry.find("mine")
    assert (mine.missing(), mine.versions()) == ("", {"pytest": PYTEST})


def test_a_package_that_does_not_load_is_said_with_the_version_that_does(folder: Path) -> None:
    write(folder, OTHER_PYTEST, top="raise ImportError('undefined symbol')")
    with pytest.raises(
        MissingLibrary,
        match=rf"pytest {PYTEST} does not load here \(undefined symbol\).*pytest==0.1",
    ):
        build("mine", TASK)


def test_an_error_of_ones_own_file_is_no_missing_package(folder: Path) -> None:
    write(folder, entry(), top="import not_here_at_all")
    with pytest.raises(ModuleNotFoundError, match="not_here_at_all"):
        build("mine", TASK)


def test_another_version_is_measured_and_said(folder: Path) -> None:
    write(folder, OTHER_PYTEST)
    cell = Cell("sweep", "", Config().workload, (Arm("mine"),))
    record = make_record(cell, Outcome(Arm("mine")), Session(Config(), torch.device("cpu"), "run"))
    assert record["packages"] == {"pytest": PYTEST}
    assert record["flags"] == [f"pytest is {PYTEST}, known to work is 0.1"]


@pytest.mark.parametrize(
    ("torch", "fbgemm", "of"),
    [
        ("2.10.0", "1.5.0", "2.10"),
        ("2.11.0+cu130", "1.6.0", "2.11"),
        ("2.12.1", "1.7.0", "2.12"),
        ("2.13.0+cpu", "1.8.0", "2.13"),
        ("2.14.0a0", "1.9.0", "2.14"),
        ("2.99.0", "1.9.0", "2.14"),
        ("", "1.9.0", "2.14"),  # what pip would install
        ("2.9.1", "1.5.0", "2.10"),
    ],
)
def test_each_torch_has_its_own_fbgemm(
    torch: str, fbgemm: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"torch": torch, "fbgemm-gpu": fbgemm, "torchrec": "1.8.0"}

    def version(name: str) -> str:
        if not here.get(name):
            raise importlib.metadata.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    entry = registry.find("fbgemm")
    assert entry.requires == (f"fbgemm-gpu-cpu=={fbgemm} | fbgemm-gpu=={fbgemm}",)
    assert entry.unknown_versions() == registry.find("torchrec").unknown_versions() == []
    assert f"fbgemm-gpu-cpu=={fbgemm} " in registry.find("torchrec").install
    here["fbgemm-gpu"] = "1.4.2"
    registry.find_installed.cache_clear()
    (said,) = entry.unknown_versions()
    assert said == f"fbgemm-gpu is 1.4.2, known to work with torch {of} is {fbgemm}"


def test_the_page_has_the_same_table() -> None:
    page = (ROOT / "docs" / "peers.md").read_text()
    rows = [
        re.findall(r"[\d.]+", row) for row in re.findall(r"^\| (?:torch|FBGEMM) \|(.*)", page, re.M)
    ]
    table = yaml.safe_load((registry.THIS_FOLDER / registry.TABLE).read_text())["_by_torch"][
        "fbgemm"
    ]
    assert dict(zip(*rows, strict=True)) == table


def test_a_point_is_another_with_another_version_or_another_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> str:
        return point_key(Cell("sweep", "", Config().workload, (Arm("mine"),)), Config())

    write(folder, OTHER_PYTEST)
    first = key()
    assert key() == first
    (folder / "mine.py").write_text((folder / "mine.py").read_text() + "\n# edited\n")
    edited = key()
    assert edited != first
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    registry.find_installed.cache_clear()
    assert key() not in {first, edited}


@pytest.mark.parametrize(
    "other", ['mine: {class: "mine:Other", label: "My own"}', entry("new_keys: 0.2")]
)
def test_a_point_is_another_with_another_class_or_other_new_keys(folder: Path, other: str) -> None:
    write(folder, entry())
    first = registry.identity("mine")
    write(folder, other)
    registry._read_entries.cache_clear()
    assert registry.identity("mine") != first
    write(folder, entry('label: "Another label"').replace('label: "My own", ', ""))
    registry._read_entries.cache_clear()
    assert registry.identity("mine") == first


def test_the_extras_have_the_versions_that_are_known_to_work() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pinned = {*extras["peers"], *extras["peers-cuda"]}
    # The extras are for the torch that the Makefile installs.
    torch = re.search(r"^TORCH_VERSION := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    needed = {
        f"{name}=={version}"
        for entry in registry._read_entries((registry.THIS_FOLDER,), torch[1]).values()
        for requirement in entry.requires
        for name, version in REQUIREMENT.findall(requirement)
    }
    assert needed <= pinned
    known = dict(REQUIREMENT.findall(" ".join(needed)))
    every = dict(REQUIREMENT.findall(" ".join(pinned)))
    assert {name: every[name] for name in known} == known
    # FBGEMM's builds are one package under two names, of which one process can have one.
    assert not [text for text in extras["peers"] if text.startswith(("fbgemm-gpu=", "torchrec"))]
