"""Several machines side by side, on made-up runs: the numbers, the warnings, what is left out."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import compare, configure
from experiments.compare import confounders, figures, machines, pages
from experiments.compare.confounders import Importance
from experiments.compare.machines import Comparison, NotComparable
from experiments.compare.pages import machines_table, points_table
from experiments.config.schema import UsageError
from experiments.machine import ceilings
from experiments.machine.ceilings import MeasuredCeilings
from experiments.paths import REFERENCE
from tests.experiments import FIRST_SCHEMA, command_line
from tests.experiments.chromium import browser, executable

CPU = FIRST_SCHEMA
main = command_line(compare)
Change = Callable[[dict[str, Any]], dict[str, Any] | None]
GPU = {"name": "NVIDIA H100 80GB HBM3", "driver": "570.1", "cuda": "13.0"}
BANDWIDTH = {"copy_gb_s": 2800.0, "gather_gb_s": {"64": 800.0, "256": 2000.0, "512": 2400.0}}


def faster(times: float) -> Change:
    """A machine on which everything takes a fraction of the time."""

    def change(record: dict[str, Any]) -> dict[str, Any]:
        samples = {
            phase: [[number, seconds / times] for number, seconds in taken]
            for phase, taken in record["samples"].items()
        }
        return {**record, "samples": samples}

    return change


def make(folder: Path, change: Change = lambda r: r, **environment: Any) -> Path:
    """The committed CPU run, told again as another machine's."""
    folder.mkdir()
    for name in ("config.yaml", "run.json"):
        shutil.copy(CPU / name, folder / name)
    known = json.loads((CPU / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(known | environment))
    records = [json.loads(line) for line in (CPU / "points.jsonl").read_text().splitlines()]
    changed = [c for r in records if (c := change(r)) is not None]
    (folder / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in changed))
    return folder


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 times as fast as the CPU."""
    folder = tmp_path_factory.mktemp("compare") / "gpu"
    return make(folder, faster(20), gpu=GPU, device=GPU["name"], bandwidth=BANDWIDTH)


def test_a_machine_that_is_20_times_as_fast_is_said_to_be_that(gpu: Path) -> None:
    found = Comparison.read([CPU, gpu])
    assert found.points["same"].all()
    second = found.points[found.points["machine"] == 1]
    assert len(second) == len(found.points) / 2
    assert second["gain"].to_list() == pytest.approx([20] * len(second))
    known = second[second["gain_lo"].notna()]
    assert ((known["gain_lo"] <= 20) & (known["gain_hi"] >= 20)).all()
    said = pages.answer_sentences(found)
    assert said[0].startswith("On the Criteo-Kaggle tables, a step of TT rank 16 does 20.0× the")
    assert "its memory copies 52.8× as much" in said[0]  # 2800 GB/s ÷ 53.0 GB/s
    assert said[1].startswith("The time of TT rank 16 as a multiple of TBE's is ")


def test_shares_are_of_the_roof_for_rows_of_that_size(gpu: Path) -> None:
    rows = Comparison.read([gpu, CPU]).points
    criteo = rows[(rows["role"] == "criteo") & (rows["machine"] == 0)].iloc[0]
    assert criteo["of_gather"] == pytest.approx(criteo["distinct_gb_s"] / 800)  # rows of 64 bytes
    assert criteo["of_copy"] == pytest.approx(criteo["distinct_gb_s"] / 2800)
    assert criteo["of_theory"] == pytest.approx(criteo["distinct_gb_s"] / 3350)
    # The CPU's run is from before gathers were measured.
    assert machines.common_ceiling(rows) == "of_copy"
    assert machines.common_ceiling(rows[rows["machine"] == 0]) == "of_gather"


def test_the_nearest_row_size_is_nearest_by_ratio() -> None:
    roofs = MeasuredCeilings.from_environment({"bandwidth": BANDWIDTH})
    assert roofs.gather(64) == 800.0
    assert roofs.gather(65) == roofs.gather(256) == 2000.0  # the next size
    assert roofs.gather(4096) == 2400.0
    assert math.isnan(MeasuredCeilings.from_environment({"copy_gb_s": 10.0}).gather(64))
    assert MeasuredCeilings.from_environment({"copy_gb_s": 10.0}).copy_gb_s == 10.0


def test_bandwidths_are_divided_only_where_both_are_known(gpu: Path) -> None:
    found = Comparison.read([CPU, gpu])
    ratios = found.bandwidth_ratios(1)
    assert ratios["copy"] == pytest.approx(2800 / found.machines[0].measured_ceilings.copy_gb_s)
    assert math.isnan(ratios["gather"])
    assert math.isnan(ratios["theory"])  # the EPYC's maker is not asked: its model is not shown


def test_other_sizes_are_matched_by_their_place_and_said(gpu: Path, tmp_path: Path) -> None:
    def larger(record: dict[str, Any]) -> dict[str, Any]:
        if record["section"] != "criteo":
            return record
        params = {**record["params"], "B": 65536}
        return {**record, "params": params, "lookups": record["lookups"] * 32}

    other = make(tmp_path / "other", larger, gpu=GPU, device=GPU["name"], bandwidth=BANDWIDTH)
    found = Comparison.read([CPU, other])
    rows = found.points
    assert set(rows[~rows["same"]]["role"]) == {"criteo"}
    assert found.sizes("criteo") == "B = 2,048 on AMD EPYC, 2 threads; 65,536 on H100 80GB HBM3"
    assert "each with sizes of its own" in pages.answer_sentences(found)[0]
    points = rows[(rows["role"] == "criteo") & (rows["arm"] == "tbe") & (rows["phase"] == "step")]
    assert list(points["gain"]) == pytest.approx([1, 32])


def test_what_only_one_machine_has_is_left_out_with_its_reason(tmp_path: Path) -> None:
    def partly(record: dict[str, Any]) -> dict[str, Any] | None:
        if record["params"]["D"] == 128:
            return None
        dim = record["params"]["D"]
        if record["arm"] == "tbe" and (record["section"] == "fbtt_readme" or dim in (16, 32)):
            return {**record, "status": "oom", "reason": f"needed {dim} GiB", "samples": {}}
        return record

    other = make(tmp_path / "other", partly, device="another CPU", hardware_id="x")
    found = Comparison.read([CPU, other])
    lines = found.exclusions
    assert "sweep, D=128: not measured on another CPU" in lines
    assert "fbtt_readme, TBE: no result on another CPU (oom: needed 64 GiB)" in lines
    for dim in (16, 32):
        assert f"sweep, D={dim}, TBE: no result on another CPU (oom: needed {dim} GiB)" in lines
    rows = found.points
    assert "sweep, D=128" not in set(rows["role"])
    assert not ((rows["role"] == "fbtt_readme") & (rows["arm"] == "tbe")).any()


@pytest.mark.parametrize(
    ("environment", "what", "text"),
    [
        ({"torch": "2.11.0+cpu"}, "torch", "2.13.0 on AMD EPYC, 2 threads; 2.11.0 on another CPU"),
        (
            {"git": {"sha": "0123456789ab", "dirty": False}},
            "emblib",
            "c08ea943fc2d on AMD EPYC, 2 threads; 0123456789ab on another CPU",
        ),
        (
            {"git": {"sha": "c08ea943fc2d", "dirty": True}},
            "emblib",
            "uncommitted changes on another CPU: what ran is not a commit",
        ),
        (
            {"huge_pages": "[always] madvise never"},
            "huge pages",
            "always [madvise] never on AMD EPYC, 2 threads; [always] madvise never on another CPU",
        ),
        (
            {"variables": {"OMP_WAIT_POLICY": "PASSIVE", "EMBLIB_ISA": "scalar"}},
            "EMBLIB_ISA",
            "not set on AMD EPYC, 2 threads; scalar on another CPU",
        ),
    ],
)
def test_what_differs_besides_the_machine_is_a_red_banner(
    environment: dict[str, Any], what: str, text: str, tmp_path: Path
) -> None:
    other = make(tmp_path / "other", device="another CPU", hardware_id="x", **environment)
    found = confounders.find_differences(machines.read_machines([CPU, other]))
    assert (Importance.confounder, what, text) in [(d.importance, d.fact, d.text) for d in found]
    again = make(tmp_path / "again", device="another CPU", hardware_id="x")
    assert not [
        d
        for d in confounders.find_differences(machines.read_machines([CPU, again]))
        if d.importance is Importance.confounder
    ]


def test_another_configuration_is_a_confounder_and_sizes_are_a_remark(tmp_path: Path) -> None:
    other = make(tmp_path / "other", device="another CPU", hardware_id="x")
    config = (other / "config.yaml").read_text()
    assert "optimizer: sgd" in config
    assert "B: 2048" in config
    changed = config.replace("optimizer: sgd", "optimizer: adagrad").replace("B: 2048", "B: 4096")
    (other / "config.yaml").write_text(changed)
    (other / "run.json").unlink()
    found = {d.fact: d for d in confounders.find_differences(machines.read_machines([CPU, other]))}
    assert found["configuration"].importance is Importance.confounder
    assert found["configuration"].text == "optimizer"
    assert found["sizes chosen for the machine"].text == "cases.criteo.workload.B"
    assert found["run did not end"].text == "another CPU: killed"


def test_other_packages_batches_and_ranks_are_confounders(tmp_path: Path) -> None:
    def packed(version: str) -> Change:
        return lambda r: {**r, "packages": {"fbgemm-gpu": version}, "bench_version": version}

    one = make(tmp_path / "one", packed("1.8.0"))
    two = make(tmp_path / "two", packed("1.7.0"), device="another CPU", hardware_id="x")
    config = (two / "config.yaml").read_text()
    (two / "config.yaml").write_text(config.replace("  pool: 8", "  pool: 1"))
    found = {
        d.fact: d.importance
        for d in confounders.find_differences(machines.read_machines([one, two]))
    }
    strong = {what for what, weight in found.items() if weight is Importance.confounder}
    assert strong == {"fbgemm-gpu", "the harness's measuring code", "batches in turn"}


def test_modes_that_differ_are_said_and_a_shared_one_is_chosen(tmp_path: Path) -> None:
    cold = make(tmp_path / "cold", lambda r: {**r, "mode": "cold"}, gpu=GPU, device=GPU["name"])
    found = machines.read_machines([CPU, cold])
    assert [m.mode for m in found] == ["hot", "cold"]
    assert "mode of timing" in [d.fact for d in confounders.find_differences(found)]


def test_two_runs_of_one_machine_have_names_of_their_own(tmp_path: Path) -> None:
    other = make(tmp_path / "other", git={"sha": "0123456789ab", "dirty": False})
    found = machines.read_machines([CPU, other])
    names = ["AMD EPYC, 2 threads (c08ea94)", "AMD EPYC, 2 threads (0123456)"]
    assert [m.label for m in found] == names
    assert "hardware" in [d.fact for d in confounders.find_differences(found)]
    later = make(tmp_path / "later", time_utc="2027-01-02T03:04:05+00:00")
    names = [m.label for m in machines.read_machines([CPU, later])]
    assert names == [f"AMD EPYC, 2 threads ({t})" for t in ("2026-11-21 10:07", "2027-01-02 03:04")]
    said = pages.answer_sentences(Comparison.read([CPU, later]))
    assert "does 1.00× the lookups" in said[0]
    assert said[0].endswith("from one process of a machine, which gives no interval.")


def test_an_interval_that_contains_1_shows_no_difference(tmp_path: Path) -> None:
    runs = [make(tmp_path / name) for name in ("one", "other")]
    for run in runs:  # a second process, 2 % slower
        records = [json.loads(line) for line in (run / "points.jsonl").read_text().splitlines()]
        records += [{**faster(1 / 1.02)(r), "replicate": 1} for r in records]
        (run / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    said = pages.answer_sentences(Comparison.read(runs))
    assert said[0].endswith("the interval contains 1, so no difference is shown.")


def test_runs_that_cannot_be_compared_say_why(tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match="needs two runs"):
        machines.read_machines([CPU])
    with pytest.raises(NotComparable, match=r"different questions \(tt_vs_tbe, cache_hit_rate\)"):
        machines.read_machines([CPU, REFERENCE / "amd-epyc-2-threads" / "cache_hit_rate"])
    empty = make(tmp_path / "empty", lambda r: None)
    with pytest.raises(NotComparable, match="its run has no time of a step"):
        Comparison.read([CPU, empty])
    renamed = make(tmp_path / "renamed", lambda r: {**r, "section": f"{r['section']}_2"})
    with pytest.raises(NotComparable, match="share no case"):
        Comparison.read([CPU, renamed])


@dataclass(frozen=True)
class Written:
    """What the command left, and what it said."""

    folder: Path
    said: list[str]


@pytest.fixture(scope="module")
def written(gpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Three machines, one of them with another torch."""
    folder, said = tmp_path_factory.mktemp("written"), io.StringIO()
    other = make(folder / "other", torch="2.11.0+cpu", device="another CPU", hardware_id="x")
    out = folder / "out"
    with contextlib.redirect_stdout(said):
        assert main([str(CPU), str(gpu), str(other), "--out", str(out)]) == 0
    return Written(out, said.getvalue().splitlines())


def test_the_command_writes_a_page(written: Written) -> None:
    out = written.folder
    warning = (
        "Confounded: torch: 2.13.0 on AMD EPYC, 2 threads and H100 80GB HBM3; "
        "2.11.0 on another CPU."
    )
    assert written.said[0] == warning
    assert written.said[-1] == f"report: {out / 'index.html'}"
    page, text = (out / "index.html").read_text(), (out / "report.md").read_text()
    assert f"> **{warning}**" in text
    for name in ("generations_step", "generations_forward", "speedups", "against_baseline"):
        assert (out / f"{name}.png").stat().st_size > 10_000
        assert (out / f"{name}.svg").read_text().lstrip().startswith("<?xml")
        assert f"({name}.png)" in text
    assert page.count("<svg") >= 8
    assert not re.search(r"""(src|href)=["']?https?:""", page)  # it loads nothing
    table = pd.read_csv(out / "compare.csv")
    assert set(table["label"]) == {"AMD EPYC, 2 threads", "H100 80GB HBM3", "another CPU"}


def test_what_cannot_be_compared_is_a_line_and_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(CPU), str(REFERENCE / "amd-epyc-2-threads" / "cache_hit_rate")]) == 6
    assert "different questions" in capsys.readouterr().err
    assert main([str(CPU), str(tmp_path / "nothing")]) == 2
    assert "is not a run: it has no points.jsonl" in capsys.readouterr().err
    with pytest.raises(UsageError, match="named twice: a run is compared with other runs"):
        main([str(CPU), f"{CPU}/../{CPU.name}"])


@pytest.mark.skipif(
    executable() is None, reason="no Chromium or Chrome on the PATH: the page is not opened"
)
def test_the_page_opens_anywhere_and_its_warnings_are_red(written: Written) -> None:
    page = written.folder / "index.html"
    with browser() as tab:
        for width, scheme in ((1280, "light"), (390, "dark")):
            tab.resize(width, 844)
            tab.prefer(scheme)
            tab.open(page)
            assert tab.complaints() == []
            assert tab.requested() == [page.resolve().as_uri()]
            assert tab.run("document.documentElement.scrollWidth") == width
            red = "getComputedStyle(document.querySelector('.confounder')).backgroundColor"
            assert tab.run(red) == "rgb(179, 38, 30)"


def test_tables_have_a_column_a_machine_and_say_what_nobody_knows(gpu: Path) -> None:
    found = Comparison.read([CPU, gpu])
    table = machines_table(found.machines)
    shown = [[value.text for value in row] for row in table.rows]
    assert shown[0][:3] == ["AMD EPYC, 2 threads", "unknown", "53.0"]
    assert "not measured" in shown[0]
    assert shown[1][:3] == ["H100 80GB HBM3", "3,350", "2,800"]
    rows = points_table(found, "step")
    assert rows.headings[2] == "H100 80GB HBM3 ÷ AMD EPYC, 2 threads"
    assert len({len(row) for row in rows.rows} | {len(rows.headings)}) == 1
    assert rows.rows[0][2].sort_key == pytest.approx(20)


def test_the_size_of_the_tables_is_drawn_with_the_caches(gpu: Path, tmp_path: Path) -> None:
    """Only where E was swept: the other runs have no such figure."""
    found = Comparison.read([CPU, gpu])
    assert "working_set" not in [f.name for f in figures.figures(found)]
    base = found.points[found.points["role"] == machines.BASE_POINT]
    more = base.assign(role="sweep, E=100000", dense_bytes=base["dense_bytes"] / 10)
    both = dataclasses.replace(found, points=pd.concat([found.points, more]))
    drawn = {f.name: f for f in figures.figures(both)}
    assert next(panel.title for panel in drawn["working_set"].panels) == "TBE"


def test_every_figure_of_the_hardware_table_has_a_source_and_names_are_of_one_device() -> None:
    known = ceilings.known_devices()
    assert len(known) >= 15
    for device in known:
        assert set(device.figures) == set(device.sources)
        assert all(source.startswith("https://") for source in device.sources.values())
        assert all(value > 0 for value in device.figures.values())
    literal = [n for d in known for n in d.names if "*" not in n and "?" not in n]
    for name in literal:
        assert len([d for d in known if d.is_called(name)]) == 1, name
    h100, nvl = ceilings.find("NVIDIA H100 80GB HBM3"), ceilings.find("NVIDIA H100 NVL")
    assert h100 is not None
    assert nvl is not None
    assert (h100.key, nvl.key) == ("h100_sxm5", "h100_nvl")
    assert ceilings.find("NVIDIA H100") is None  # no guess between models


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: gpu\nname: x\nnames: [x]\ntdp_w: 300", "tdp_w must be {value: .., source: URL}"),
        ("kind: gpu\nname: x\nnames: [x]\ntdp_w: {value: 300}", "tdp_w must be"),
        ("kind: gpu\nname: x\nnames: [x]\ntdp_w: {source: a}", "tdp_w must be"),
        ("kind: gpu\nname: x\nnames: [x]\ntdp_w: {source: a, value: null}", "tdp_w must be"),
        ("kind: gpu\nname: x", "names is missing"),
        ("kind: tpu\nname: x\nnames: [x]", "kind must be gpu or cpu, got tpu"),
        ("kind: gpu\nname: x\nnames: [x]\ntdp: 300", "unknown key 'tdp'"),
    ],
)
def test_a_device_without_sources_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        ceilings.read(tmp_path / "x.yaml")


def test_the_hardware_table_is_nothing_to_choose() -> None:
    assert "hardware" not in configure.groups()
