"""Evidence knows its code without git, says when it is old, and what else the machine did."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from experiments import evidence, front_page, reference
from experiments.config.schema import UsageError
from experiments.evidence import StoredEvidence
from experiments.machine import sources
from experiments.paths import REFERENCE, ROOT
from experiments.results.store import runs_in

PAGES = ("README.md", "docs/benchmarks.md")
IDLE = {"load_before": 0.1, "others_before": 0.0, "others_during": 0.1, "stolen": 0.0}
CPP = 'int a = 1;  // why\nconst char* s = "// no comment";\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree with a file per area and device."""
    for name, code in {
        "csrc/tbe/lookup.h": CPP,
        "csrc/tbe/lookup_cpu.cpp": "int cpu;",
        "csrc/tbe/lookup_cuda.cu": "int cuda;",
        "csrc/tt/rows.h": "int tt;",
        "emblib/ops/tbe.py": '"""What."""\n\n\ndef f(x):\n    """Why."""\n    return x  # so\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "changed"),
    [
        ("csrc/tbe/lookup.h", "/* how */ int a = 1;\n" + CPP.splitlines()[1], set()),
        ("csrc/tbe/lookup.h", CPP.replace("1", "2"), {"dense tables"}),
        ("csrc/tbe/lookup.h", CPP.replace("no comment", "other"), {"dense tables"}),
        ("csrc/tbe/lookup_cuda.cu", "int other;", set()),
        ("csrc/tbe/lookup_cpu.cpp", "int other;", {"dense tables"}),
        ("csrc/tt/rows.h", "int other;", {"tensor trains"}),
        ("emblib/ops/tbe.py", "def f(x):\n    return (x)\n", set()),
        ("emblib/ops/tbe.py", "def f(x):\n    return -x\n", set(sources.AREAS)),
        ("emblib/ops/quant.py", "def f(x):\n    return -x\n", {"quantised tables"}),
        ("emblib/ops/hash.py", "def f(x):\n    return -x\n", {"hash tables"}),
        ("emblib/ops/__init__.py", "from emblib.ops import tbe\n", set()),
        ("csrc/group/new.h", "int new;", set(sources.AREAS)),
    ],
)
def test_a_digest_is_of_the_code_of_its_area_and_device(
    tree: Path, name: str, code: str, changed: set[str]
) -> None:
    before = sources.digests("cpu", tree)
    sources._code.cache_clear()
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text(code)
    after = sources.digests("cpu", tree)
    assert {area for area in after if after[area] != before[area]} == changed


def test_digests_do_not_depend_on_how_python_quotes() -> None:
    """Python 3.12 and newer unparse f-strings in another way, so their parts are written."""
    code = sources.python_code("x = f'{a!r:>{w}} \\'b\\''  # text")
    assert code == """x = ('f', (a, 114, ('f', '>', (w, -1, None))), " 'b'")"""


def test_there_are_no_digests_without_the_sources(tmp_path: Path) -> None:
    assert sources.digests("cpu", tmp_path) == {}


def test_areas_are_folders_of_this_tree() -> None:
    for folder in (*sources.BASE, *(f for own in sources.AREAS.values() for f in own)):
        assert (ROOT / folder).is_file() or any((ROOT / folder).glob("*")), folder


def _stored(folder: Path, measured: dict[str, str]) -> Path:
    facts = {"git": {"sha": "1a2b3c"}, "time_utc": "2026-11-26T01:02", "sources": measured}
    (folder / "config.yaml").write_text("contenders: [tbe, tt]\n")
    (folder / "environment.json").write_text(json.dumps(facts))
    return folder


def test_evidence_says_which_code_has_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"dense tables": "a", "tensor trains": "b", "hash tables": "c"}
    monkeypatch.setattr(sources, "digests", lambda device: now)
    assert (
        StoredEvidence.read(_stored(tmp_path, now)).age()
        == "commit 1a2b3c, 2026-11-26, of this code"
    )
    old = now | {"tensor trains": "old", "hash tables": "old"}  # no hash table was measured
    assert (
        StoredEvidence.read(_stored(tmp_path, old))
        .age()
        .endswith(", before changes of tensor trains")
    )
    unknown = StoredEvidence.read(_stored(tmp_path, {}))
    assert unknown.age().endswith(", before changes of dense tables and tensor trains")


def test_a_machine_that_did_something_else_is_named() -> None:
    assert evidence.describe_load(IDLE) == "on an idle machine"
    busy = IDLE | {"others_before": 1.6, "load_during": [1.0, 2.0, 9.0]}
    words = evidence.describe_load(busy)
    assert "not idle: others used 1.6 cores" in words
    assert "1.0 to 9.0" in words
    assert "not idle" in evidence.describe_load(busy | {"others_before": None, "stolen": 0.02})
    assert "not recorded" in evidence.describe_load({})


def test_a_command_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "LOOK_SECONDS", 0.0)
    status, state = evidence.run_watched([sys.executable, "-c", "raise SystemExit(3)"])
    assert status == 3
    assert state["others_during"] >= 0
    assert len(state["load_during"]) == 3
    assert "idle" in evidence.describe_load(state)


LEAVES_A_CHILD = """
import os, time
if os.fork() == 0:
    while time.process_time() < 0.5: pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux")
def test_the_work_of_a_child_that_outlives_its_parent_is_the_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evidence, "LOOK_SECONDS", 0.0)
    before = evidence._child_seconds()
    evidence.run_watched([sys.executable, "-c", LEAVES_A_CHILD])
    assert evidence._child_seconds() - before >= 0.5


def test_the_plan_has_its_processes_and_a_part_that_fails_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def watched(command: list[str]) -> tuple[int, dict[str, float]]:
        commands.append(command)
        for name in (part.name for part in evidence.CPU_PARTS if part.program):
            (tmp_path / name).mkdir(exist_ok=True)
        return int("=peers" in " ".join(command)), IDLE

    kept: list[str] = []

    def keep(name: str) -> Path:
        kept.append(name)
        return tmp_path

    monkeypatch.setattr(evidence, "run_watched", watched)
    monkeypatch.setattr(evidence, "program_folder", lambda device: tmp_path)
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    assert evidence.measure(keep, smoke=False) == 1
    assert kept == ["hash_load_factor"]
    assert json.loads((tmp_path / evidence.STATE).read_text()) == IDLE
    assert "peers: did not finish well" in capsys.readouterr().err
    words = [" ".join(command) for command in commands]
    processes = [re.search(r"(replicates=|--processes )5\b", word) is not None for word in words]
    assert processes == [True, False, False, True, True]
    budget = sum(int(n) for word in words for n in re.findall(r"total_seconds=(\d+)", word))
    assert budget <= 480  # and the programs take some 20 minutes
    commands.clear()
    assert evidence.measure(keep, smoke=True) == 1
    assert kept == ["hash_load_factor"]  # nothing more
    assert all("smoke" in " ".join(command) for command in commands)
    commands.clear()
    evidence.measure(keep, ["hash_load_factor"], smoke=True)
    assert ["hash_load_factor" in " ".join(command) for command in commands] == [True]
    with pytest.raises(UsageError, match=r"peer is not part of the plan, which has cpu_matrix"):
        evidence.measure(keep, ["peer"], smoke=True)


def test_every_part_of_the_plan_is_an_experiment_that_fits_its_schema() -> None:
    for part in (*evidence.CPU_PARTS, *evidence.GPU_PARTS):
        if not part.program:
            reference.configure.load([f"+experiment={part.name}", *part.settings])


def test_every_reference_says_how_old_it_is() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    for run in runs_in(REFERENCE, "*/*"):
        known = StoredEvidence.read(run)
        assert known.commit in page
        assert known.age() in page


def test_every_ratio_that_a_page_states_is_measured() -> None:
    """A ratio of README and benchmarks is in a committed reference; one of docs there or in LOG."""
    stored = " ".join(path.read_text() for path in REFERENCE.rglob("*.md"))
    generated = "".join(m[0] for name in PAGES for m in BLOCK.finditer((ROOT / name).read_text()))
    logged = " ".join(p.read_text() for p in (ROOT / "reports").glob("*.md"))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        quoted = str(path.relative_to(ROOT)) in PAGES
        known = set(re.findall(DECIMAL, stored + generated + ("" if quoted else logged)))
        written = BLOCK.sub("", path.read_text())
        ratios = set(RATIO.findall(written)) | set(FRACTION.findall(written) if quoted else ())
        assert ratios <= known, path.name


BLOCK = re.compile(r"<!-- (?:speed|peers|matrix|results):start -->.*?<!-- \w+:end -->", re.DOTALL)
RATIO = re.compile(r"(\d+\.\d+)(?:×| of emblib's time| times )")
FRACTION = re.compile(r"\b1/(\d{2,})\b")
DECIMAL = r"\d+\.\d+|(?<=1/)\d{2,}"


def test_the_source_of_the_speed_table_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for line in front_page.speed_sources(front_page.matrix_rows()):
        assert line in readme
