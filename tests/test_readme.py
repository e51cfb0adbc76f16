"""README.md says what is true: its example runs, its sizes hold, its links lead somewhere."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

import emblib
from emblib.sharding import DistributedModelParallel, checkpoints
from experiments import evidence, front_page
from tests.bench import cpu_matrix, cpu_peers
from tests.compat.peer import hide_modules

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
PAGES = (
    "README.md",
    "examples/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "reports/README.md",
    *DOCS,
)


def examples() -> list[str]:
    """Return the three examples of the README, which are short."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for example in found:
        statements = [s for s in example.splitlines() if s.strip() and not s.startswith("#")]
        assert len(statements) <= 12
    return found


def test_the_example_runs_and_is_short() -> None:
    first, more, _ = examples()
    names: dict[str, object] = {}
    exec(first, names)
    exec(more, names)
    assert names["output"].shape == (2, 96)
    table, plain = names["compressed"], names["spec"]
    assert isinstance(table, emblib.TTEmbeddingBag)
    claimed = re.search(r"take ([\d.]+) GB, kept in ([\d.]+) MB", more)
    assert float(claimed[1]) == pytest.approx(4 * plain.rows * plain.dim / 1e9, rel=0.05)
    keyed = names["keyed"]
    assert isinstance(keyed, emblib.DynamicEmbeddingBags)
    assert keyed.size(0) == 3
    assert float(claimed[2]) == pytest.approx(table.nbytes()["weights"] / 1e6, rel=0.05)


def test_the_sharded_example_runs_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    *_, example = examples()
    names: dict[str, object] = {}
    exec(example, names)
    pooled = names["pooled"]
    assert isinstance(pooled, torch.Tensor)
    assert pooled.shape == (2, 128)
    assert checkpoints.latest("run") == Path("run/step_1")
    rows = torch.tensor([3, 99_999, 7])
    model = names["model"]
    assert isinstance(model, DistributedModelParallel)
    (weight,) = (
        w.full_tensor() for key, w in model.state_dict().items() if key.endswith("item.weight")
    )
    # The rows of the batch have been updated: bag 0 of "seen" is no longer what was pooled.
    assert not torch.allclose(weight[rows[:2]].sum(0), pooled[0, :64])


@pytest.mark.parametrize(
    "page", ["dynamic", "from_embedding_bag", "from_peers", "getting_started", "tables", "torchrec"]
)
def test_the_examples_of_a_page_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of other pages are run by the tests of their area."""
    names: dict[str, object] = {}
    hide_modules("torchrec", monkeypatch)  # `install()` raises if another page has imported it
    for example in re.findall(
        r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL
    ):
        peers = set(re.findall(r"^from (fbgemm_gpu|torchrec)", example, re.MULTILINE))
        if all(is_importable(peer) for peer in peers):
            exec(example, names)


def is_importable(peer: str) -> bool:
    """Return whether another library is installed and loads."""
    try:
        importlib.import_module(peer)
    except (ImportError, OSError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_named_files_and_modules_exist(page: str) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    code = re.findall(r"`([^`\n]+)`", text)
    paths = {
        path
        for words in code
        for path in re.findall(rf"^(?:{'|'.join(ROOMS)})/[\w./]+\.\w+$", words)
        if path not in MADE_UP
    }
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]
    for words in code:
        for name in re.findall(r"\bemblib(?:\.\w+)+", words):
            assert resolves(name), name


def test_the_files_of_the_architecture_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    paths = re.findall(r"`([\w./]+\.(?:py|cpp|cuh|cu|jsonl|md|html))`", text)
    assert len(paths) > 30
    written = {"points.jsonl", "report.md", "index.html"}  # by a run
    rooms = ("", "emblib/", "experiments/", "csrc/", "csrc/tbe/", "emblib/tables/")
    missing = [
        path
        for path in paths
        if path not in written and not any((ROOT / room / path).exists() for room in rooms)
    ]
    assert not missing


ROOMS = ("emblib", "experiments", "tests", "csrc", "conf", "scripts", "docs", "reports", "examples")
# Files that a page tells its reader to write.
MADE_UP = {"experiments/contenders/one_matrix.py", "conf/experiment/stacking.yaml"}


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_anchors_are_headings(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / page).read_text())
    targets = [
        (((ROOT / page).parent / link) if link else ROOT / page, name) for link, name in links
    ]
    missing = [name for path, name in targets if path.suffix == ".md" and name not in anchors(path)]
    assert not missing


def test_the_index_links_to_every_page() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "docs/README.md").read_text())
    assert {f"docs/{link}" for link in links} >= set(DOCS) - {"docs/README.md"}
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()


def test_the_pages_show_the_committed_ratios() -> None:
    for name, updated in {
        "README.md": front_page.front_page,
        "docs/benchmarks.md": front_page.benchmarks,
    }.items():
        page = (ROOT / name).read_text()
        assert updated(page) == page, "update it: python run.py reference write"
    with pytest.raises(ValueError, match="once each"):
        front_page.benchmarks("no markers")


def test_a_row_of_speed_has_the_median_the_worst_and_the_best() -> None:
    row = {"shape": "x", "dtype": "fp32", "pass": "sgd", "peer": "fbgemm", "pages": "small"}
    rows = [{**row, "threads": 1, "ratios": [ratio] * 3} for ratio in (0.5, 2.0, 4.0)]
    table = front_page.speed_table(rows, {"A GPU": {("fbgemm", "sgd", "fp32"): [0.8]}})
    assert "| FBGEMM, training step, SGD | **2.00×** (0.50–4.00) | – | **0.80×** |" in table
    assert "| FBGEMM, lookup | – | – | – |" in table


def test_ratios_on_a_gpu_are_those_of_its_matrix(tmp_path: Path) -> None:
    """Of eager calls: on the device, or whole."""
    row = {"contender": "fbgemm", "work": "sgd", "dtype": "fp32", "mode": "eager", "shape": "x"}
    rows = [
        {**row, "device_ratio": 1.25, "elapsed_ratio": 1.5},
        {**row, "device_ratio": 9.0, "elapsed_ratio": 9.0, "mode": "captured"},
        {**row, "device_ratio": None, "elapsed_ratio": None, "contender": "emblib"},
        {"point": "one that failed", "status": "OutOfMemoryError"},
    ]
    folder = tmp_path / "nvidia-x" / "matrix"
    folder.mkdir(parents=True)
    (folder / "matrix.json").write_text(json.dumps({"device": "X", "rows": rows}))
    key = ("fbgemm", "sgd", "fp32")
    assert front_page.gpu_ratios(tmp_path) == {"X": {key: [1.25]}}
    assert front_page.gpu_ratios(tmp_path, front_page.CALL_TIME) == {"X": {key: [1.5]}}


def test_the_front_page_names_the_measured_shapes() -> None:
    for name, case in cpu_peers.CASES.items():
        distribution = "uniform" if case.zipf is None else f"Zipf {case.zipf}"
        numbers = (case.tables, case.rows, case.dim, case.batch, case.pooling)
        found = re.findall(
            r"\d[\d,]*(?= (?:table|rows|columns|bags|ids?\b))", front_page.SHAPES[name]
        )
        assert tuple(int(n.replace(",", "")) for n in found) == numbers
        assert front_page.SHAPES[name].endswith(distribution)


def test_the_matrix_has_every_shape_of_its_benchmark() -> None:
    rows = front_page.matrix_rows()
    planned = cpu_matrix.points("small", curated=True)
    shapes = {cpu_matrix.name_of(case) for cases in planned.values() for case in cases}
    assert {row["shape"] for row in rows} == shapes
    found = {(row["pass"], row["dtype"]) for row in rows}
    assert found == set(front_page.TITLE_OF_MATRIX_WORK) == {(g.work, g.dtype) for g in planned}
    assert {(row["peer"], row["threads"]) for row in rows} == set(front_page.MATRIX_COLUMNS)
    assert {row["pages"] for row in rows} == {"small"}
    assert all(len(row["ratios"]) == evidence.PROCESSES for row in rows)


def test_a_lost_shape_is_listed() -> None:
    row = {"shape": "T1 L1 D16 B1", "dtype": "fp32", "pass": "sgd", "threads": 1, "pages": "small"}
    won, lost = (
        {**row, "peer": "fbgemm", "ratios": ratios} for ratios in ([2, 3, 4], [0.5, 0.8, 2])
    )
    lost["shape"] = "T26 L1 D16 B1"
    table = front_page.matrix_table([won, lost])
    assert "**1.90×** (0.80–3.00), 1 of 2" in table
    assert "step, SGD, fp32; FBGEMM, 1 thread: T26 L1 D16 B1 0.80×" in table
    assert "- nowhere" in front_page.matrix_table([won])


def test_a_tie_and_a_loss_are_marked() -> None:
    tie, loss, win = ([0.9] * 10 + [1.1] * 11, [0.8] * 21, [2.0] * 21)
    cells = [front_page.format_ratio(front_page.summarise(ratios)) for ratios in (tie, loss, win)]
    assert cells == ["1.10× (tie)", "0.80× (slower)", "2.00×"]
