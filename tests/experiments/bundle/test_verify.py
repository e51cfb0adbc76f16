"""Bundles: the same bytes each time, nothing changed goes unseen, claims are measured again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments import cli
from experiments.bundle import archive, pack, rerun
from experiments.bundle.archive import BundleError
from experiments.bundle.claims import Claim, ClaimOutcome, Measure, check_claims, holds
from experiments.config.schema import Mode
from experiments.paths import ROOT
from experiments.results.store import pack_records, read_records
from tests.experiments import FIRST_SCHEMA
from tests.experiments.report.test_pages import REPORTED, one_per_kind

CELLS = 3
NAN = float("nan")
MEASURED = ("tables", "samples", "calibration", "points")  # entries of a record, of some kinds
Record = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few cells of a committed reference; without figures, which take seconds."""
    target = tmp_path_factory.mktemp("reference") / "tt_vs_tbe" / "20200101-000000-1"
    target.mkdir(parents=True)
    for name in ("environment.json", "run.json", "report.md"):
        shutil.copy(FIRST_SCHEMA / name, target)
    config = OmegaConf.load(FIRST_SCHEMA / "config.yaml")
    config.report.figures = False
    OmegaConf.save(config, target / "config.yaml")
    cells = list(dict.fromkeys(r["cell"] for r in read_records(FIRST_SCHEMA)))[:CELLS]
    records = [r for r in read_records(FIRST_SCHEMA) if r["cell"] in cells]
    write_points(target, [*records, *(as_second_process(r) for r in records)])
    return target


def as_second_process(record: Record) -> Record:
    """The first schema has one process per cell, and an interval takes two that differ."""
    factor = 1.02 if record["contender"] == "tt" else 1.0
    taken = {k: [[n, factor * s] for n, s in v] for k, v in record["samples"].items()}
    return {**record, "replicate": 1, "samples": taken}


def write_points(folder: Path, records: list[Record]) -> None:
    (folder / "points.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture(scope="module")
def bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "x.zip"
    assert cli.main(["bundle", "pack", str(run), "-o", str(path)]) == 0
    return path


def changed(bundle: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A bundle with other contents and sums that fit them: what a careful forger would make."""
    contents = archive.read(bundle)
    contents.pop(archive.SUMS)
    change(contents)
    archive.write(target, contents)
    return target


def of(contents: dict[str, bytes], ending: str) -> str:
    return next(name for name in contents if name.endswith(ending))


# What is in it


def test_a_bundle_has_what_a_stranger_needs(bundle: Path, run: Path) -> None:
    contents = archive.read(bundle)
    assert set(contents) >= {
        *("REPRODUCE.md", "bundle.json", "SHA256SUMS", "LICENSE", "environment/packages.txt"),
        *("conf/config.yaml", "conf/experiment/tt_vs_tbe.yaml"),
    }
    folder = f"runs/tt_vs_tbe/{run.name}"
    packed = {n.removeprefix(folder + "/") for n in contents if n.startswith(folder)}
    assert packed == {
        *("config.yaml", "environment.json", "run.json", "points.jsonl"),
        *("results.csv", "report.md", "index.html"),
    }
    assert contents[f"{folder}/points.jsonl"] == (run / "points.jsonl").read_bytes()
    page = contents["REPRODUCE.md"].decode()
    assert "python run.py +experiment=tt_vs_tbe" in page
    assert "38.8 s" in page
    assert "ratio of times" in page
    text = b"".join(v for k, v in contents.items() if not k.startswith("source/")).decode()
    assert str(ROOT) not in text  # nothing of the machine that packed it
    assert str(Path.home()) + "/" not in text


def test_the_same_runs_make_the_same_bytes(bundle: Path, run: Path, tmp_path: Path) -> None:
    assert cli.main(["bundle", "pack", str(run), "-o", str(tmp_path / "y.zip")]) == 0
    assert (tmp_path / "y.zip").read_bytes() == bundle.read_bytes()


def test_compressed_samples_make_the_same_bundle(bundle: Path, run: Path, tmp_path: Path) -> None:
    packed = tmp_path / run.name
    shutil.copytree(run, packed)
    pack_records(packed)
    assert cli.main(["bundle", "pack", str(packed), "-o", str(tmp_path / "y.zip")]) == 0
    assert (tmp_path / "y.zip").read_bytes() == bundle.read_bytes()


def test_the_sums_are_what_sha256sum_reads(bundle: Path, tmp_path: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("no sha256sum")
    with zipfile.ZipFile(bundle) as file:
        file.extractall(tmp_path)
    done = subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stdout


def test_the_enclosed_source_is_the_commit_that_ran(
    run: Path, bundle: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sha = json.loads((run / "environment.json").read_text())["git"]["sha"]
    known = subprocess.run(["git", "cat-file", "-e", sha], cwd=ROOT, capture_output=True)
    assert (f"source/{sha}.tar.gz" in archive.read(bundle)) == (known.returncode == 0)
    other = tmp_path / "tt_vs_tbe" / "1"
    shutil.copytree(run, other)
    environment = json.loads((run / "environment.json").read_text())
    environment["git"] = {"sha": "0123456789ab", "dirty": True}
    (other / "environment.json").write_text(json.dumps(environment))
    capsys.readouterr()
    assert cli.main(["bundle", "pack", str(other), "-o", str(tmp_path / "y.zip")]) == 0
    assert "commit 0123456789ab is not enclosed" in capsys.readouterr().out
    assert "is not enclosed" in archive.read(tmp_path / "y.zip")["REPRODUCE.md"].decode()


def test_two_runs_of_one_name_stay_apart(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "elsewhere" / run.name)
    words = [str(run), str(tmp_path / "elsewhere" / run.name)]
    assert cli.main(["bundle", "pack", *words, "-o", str(tmp_path / "y.zip")]) == 0
    description = json.loads(archive.read(tmp_path / "y.zip")["bundle.json"])
    folder = f"runs/tt_vs_tbe/{run.name}"
    assert [r["folder"] for r in description["runs"]] == [folder, f"{folder}-2"]


def test_a_run_without_a_commit_is_noted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / run.parent.name / run.name
    shutil.copytree(run, copy)
    environment = json.loads((copy / "environment.json").read_text()) | {"git": None}
    (copy / "environment.json").write_text(json.dumps(environment))
    assert cli.main(["bundle", "pack", str(copy), "--out", str(tmp_path / "y.zip")]) == 0
    assert "note: The source of some runs is not enclosed" in capsys.readouterr().out


def test_what_is_no_run_is_not_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bundle", "pack", str(tmp_path), "-o", str(tmp_path / "y.zip")]) == 2
    assert "is not a run: it has no config.yaml" in capsys.readouterr().err
    assert not (tmp_path / "y.zip").exists()


# Checking it


def test_every_number_follows_from_the_samples(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bundle", "verify", str(bundle)]) == 0
    said = capsys.readouterr().out
    assert "numbers of 1 run follow from samples" in said
    number = said.partition("checksums hold; ")[2].split()[0]
    assert int(number.replace(",", "")) > 100


@pytest.mark.parametrize(
    ("ending", "old", "new", "said"),
    [
        ("points.jsonl", b'{"forward": [[0, 0.', b'{"forward": [[0, 9.', "results.csv"),
        ("results.csv", b",ok,", b",oom,", "status: oom, but the samples give ok"),
        ("bundle.json", b'"value": 4.', b'"value": 1.', "is not in the samples"),
        ("report.md", b"of the memory", b"of the time", "report.md does not say"),
    ],
)
def test_a_forger_who_mends_the_sums_is_found(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ending: str,
    old: bytes,
    new: bytes,
    said: str,
) -> None:
    def forge(contents: dict[str, bytes]) -> None:
        name = of(contents, ending)
        assert old in contents[name]
        contents[name] = contents[name].replace(old, new)

    forged = changed(bundle, tmp_path / "forged.zip", forge)
    assert cli.main(["bundle", "verify", str(forged)]) == 3
    assert said in capsys.readouterr().out


def with_another_sample(contents: dict[str, bytes]) -> None:
    """Triple what the first record that was measured has: times, shares, or lookups."""
    name = of(contents, "points.jsonl")
    records = [json.loads(line) for line in contents[name].splitlines()]
    record, entry = next((r, e) for r in records for e in MEASURED if r.get(e))
    record[entry] = tripled(record[entry])
    contents[name] = "".join(json.dumps(r) + "\n" for r in records).encode()


def tripled(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("lookups"), list):
        return {**value, "lookups": [3 * n for n in value["lookups"]]}
    if isinstance(value, dict):
        return {key: tripled(v) for key, v in value.items()}
    if isinstance(value, list):
        return list(map(tripled, value))
    return 3 * value if isinstance(value, float) else value


@pytest.mark.parametrize("name", one_per_kind(REPORTED))
@pytest.mark.usefixtures("figures_once")
def test_a_run_of_every_kind_is_verified_figures_and_all(
    name: str,
    smoke_runs: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pack, "_source_archive", lambda sha: None)  # seconds and 20 MB
    bundle = tmp_path / "x.zip"
    assert cli.main(["bundle", "pack", str(smoke_runs[name]), "-o", str(bundle)]) == 0
    assert cli.main(["bundle", "verify", str(bundle)]) == 0, capsys.readouterr().out
    forged = changed(bundle, tmp_path / "y.zip", with_another_sample)
    assert cli.main(["bundle", "verify", str(forged)]) == 3
    assert re.search("but (the samples|they) give", capsys.readouterr().out)


def test_damage_is_found_before_anything_is_read(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bundle.read_bytes()
    (tmp_path / "half.zip").write_bytes(data[: len(data) // 2])
    assert cli.main(["bundle", "verify", str(tmp_path / "half.zip")]) == 3
    assert "is damaged, or no zip file" in capsys.readouterr().err
    with zipfile.ZipFile(bundle) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    name = of(contents, "run.json")
    for change, said in (
        ({name: b"{}"}, "run.json has another checksum"),
        ({"extra.txt": b""}, "extra.txt is not in SHA256SUMS"),
        ({name: None}, "run.json is missing"),
    ):
        wanted = {k: v for k, v in {**contents, **change}.items() if v is not None}
        with zipfile.ZipFile(tmp_path / "y.zip", "w") as file:
            for key, value in wanted.items():
                file.writestr(key, value)
        assert cli.main(["bundle", "verify", str(tmp_path / "y.zip")]) == 3
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "a\\..\\out", "folder/"])
def test_nothing_is_written_outside(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, b"")
    with pytest.raises(BundleError, match=r"outside the bundle|not a plain file"):
        archive.read(path)


def test_links_and_doubles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(link, b"/etc/hostname")
    with pytest.raises(BundleError, match="not a plain file"):
        archive.read(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", b"")
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("a", b"")
    with pytest.raises(BundleError, match="twice"):
        archive.read(path)


def test_a_bundle_of_the_future_is_refused(bundle: Path, tmp_path: Path) -> None:
    def age(contents: dict[str, bytes]) -> None:
        contents["bundle.json"] = contents["bundle.json"].replace(
            b'"bundle_version": 1', b'"bundle_version": 99'
        )

    assert cli.main(["bundle", "verify", str(changed(bundle, tmp_path / "y.zip", age))]) == 3


def test_wrong_usage(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bundle", "verify", str(tmp_path / "none.zip")]) == 2
    assert cli.main(["bundle", "verify", str(bundle), "--rerun", "--only", "tt_vs_tb"]) == 2
    assert "the bundle has tt_vs_tbe" in capsys.readouterr().err
    assert cli.main(["bundle", "verify", str(bundle), "--tolerance", "-1"]) == 2
    assert cli.main(["bundle", "verify", str(bundle), "--tolerance", "nan"]) == 2
    assert cli.main(["bundle", "verify", str(bundle), "--rerun", "--timing", "swift"]) == 2
    assert "no timing 'swift'" in capsys.readouterr().err


# Claims


def ratio(value: float, lo: float, hi: float) -> Claim:
    return Claim(Measure.ratio, "cell · arm · hot", "step", value, lo, hi)


@pytest.mark.parametrize(
    ("claim", "again", "expected"),
    [
        (ratio(2, 1.9, 2.1), ratio(2.2, 2.15, 2.3), True),
        (ratio(2, 1.9, 2.1), ratio(2.8, 2.62, 3), True),  # 2.1 · 1.25 = 2.625
        (ratio(2, 1.9, 2.1), ratio(2.8, 2.63, 3), False),
        (ratio(2, 1.9, 2.1), ratio(1.4, 1.3, 1.53), True),  # 1.9 ÷ 1.25 = 1.52
        (ratio(2, 1.9, 2.1), ratio(1.4, 1.3, 1.51), False),
        (ratio(1.1, 1.05, 1.15), ratio(0.95, 0.9, 0.99), False),  # near, but the opposite
        (ratio(1.1, 0.99, 1.2), ratio(0.95, 0.9, 0.99), True),  # claimed no direction
        (ratio(2, NAN, NAN), ratio(2.4, 2.3, 2.5), True),
        (ratio(2, NAN, NAN), ratio(2.6, 2.51, 2.7), False),
    ],
)
def test_when_a_ratio_holds(claim: Claim, again: Claim, expected: bool) -> None:
    assert holds(claim, again, 0.25) == expected


def test_when_other_numbers_hold() -> None:
    rate = Claim(Measure.hit_rate, "cell · arm", "hit rate per row", 0.8, 0.8, 0.8)
    assert holds(rate, replace(rate, value=0.8049), 0.25)
    assert not holds(rate, replace(rate, value=0.794), 0.25)
    size = Claim(Measure.nbytes, "cell · arm", "weights bytes", 1000.0, 1000.0, 1000.0)
    assert holds(size, size, 0.0)
    assert not holds(size, replace(size, value=1001.0), 9.0)


def test_what_was_not_measured_says_why() -> None:
    found = check_claims([ratio(2, 1.9, 2.1)], [], {"cell · arm · hot": "oom: too large"}, 0.25)
    assert [(f.outcome, f.reason) for f in found] == [(ClaimOutcome.unmeasured, "oom: too large")]
    # One number without an interval neither confirms nor refutes.
    for value in (2.0, 9.0):
        (finding,) = check_claims([ratio(2, 1.9, 2.1)], [ratio(value, NAN, NAN)], {}, 0.25)
        assert finding.outcome is ClaimOutcome.unmeasured
        assert finding.reason.startswith("one process gives no interval")


# Measuring again


def pretend(
    monkeypatch: pytest.MonkeyPatch, run: Path, change: Callable[[Record], Record]
) -> list[list[str]]:
    """The process that measures leaves the old samples, changed."""
    commands: list[list[str]] = []

    def measure(command: list[str], **ignored: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        target = Path(command[-2]) / "tt_vs_tbe" / "now"
        shutil.copytree(run, target)
        write_points(target, [change(r) for r in read_records(run)])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(rerun.subprocess, "run", measure)
    return commands


def slower(record: Record) -> Record:
    if record["contender"] != "tt":
        return record
    taken = {k: [[n, 2 * s] for n, s in v] for k, v in record["samples"].items()}
    return {**record, "samples": taken}


def failed(record: Record) -> Record:
    if record["contender"] != "tt":
        return record
    return {**record, "status": "oom", "reason": "too large", "samples": {}}


@pytest.mark.parametrize(
    ("change", "words", "status", "said"),
    [
        (lambda r: r, [], 0, "holds"),
        (slower, [], 4, "DIFFERS"),
        (slower, ["--tolerance", "1.0"], 0, "holds"),
        (failed, [], 5, "oom: too large"),
        (lambda r: {**r, "pool_sha256": "another"}, [], 6, "its batches were not the same"),
        (lambda r: {**r, "weights_bytes": 1}, [], 4, "weights bytes"),
    ],
)
def test_claims_are_measured_again(
    bundle: Path,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Record], Record],
    words: list[str],
    status: int,
    said: str,
) -> None:
    commands = pretend(monkeypatch, run, change)
    assert cli.main(["bundle", "verify", str(bundle), "--rerun", *words]) == status
    assert said in capsys.readouterr().out
    assert len(commands) == 1


def test_results_of_a_gpu_wait_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    copy = tmp_path / run.parent.name / run.name
    shutil.copytree(run, copy)
    environment = copy / "environment.json"
    environment.write_text(json.dumps(json.loads(environment.read_text()) | {"gpu": {"name": "x"}}))
    packed = str(tmp_path / "y.zip")
    assert cli.main(["bundle", "pack", str(copy), "--out", packed]) == 0
    commands = pretend(monkeypatch, run, lambda r: r)
    monkeypatch.setattr(rerun.configure, "device_kind", lambda kind: "cpu")
    assert (cli.main(["bundle", "verify", packed, "--rerun"]), commands) == (6, [])


def test_the_packed_configuration_is_what_is_measured(run: Path, tmp_path: Path) -> None:
    config = rerun.load_packed_config(run / "config.yaml", tmp_path)
    assert (config.timing.preset, config.report.folder) == ("standard", str(tmp_path))
    assert config.cases["criteo"].workload.B == 2048
    quick = rerun.load_packed_config(run / "config.yaml", tmp_path, "quick")
    assert (quick.timing.preset, quick.timing.pool) == ("quick", config.timing.pool)
    old = OmegaConf.load(run / "config.yaml")
    own = {"modes": ["cold"], "cell_seconds": 20.0, "limit_seconds": 600.0}
    OmegaConf.save(OmegaConf.merge(old, {"timing": own}), tmp_path / "config.yaml")
    quick = rerun.load_packed_config(tmp_path / "config.yaml", tmp_path, "quick")
    assert (quick.timing.modes, quick.timing.limit_seconds) == ([Mode.cold], 600)
    assert quick.timing.cell_seconds == pytest.approx(20 * 0.5 / 2.5)
    old.name = "../elsewhere"
    OmegaConf.save(old, tmp_path / "config.yaml")
    with pytest.raises(BundleError, match="cannot name the folder of a run"):
        rerun.load_packed_config(tmp_path / "config.yaml", tmp_path)
    old.name = "tt_vs_tbe"
    old.timing.forgotten = 1
    OmegaConf.save(old, tmp_path / "config.yaml")
    with pytest.raises(BundleError, match=r"cannot run it.*forgotten.*source"):
        rerun.load_packed_config(tmp_path / "config.yaml", tmp_path)


@pytest.mark.slow
def test_a_smoke_run_from_the_command_line_to_measured_again(tmp_path: Path) -> None:
    """Nothing pretended; bytes are all that a smoke run claims."""
    words = ["+experiment=tbe_vs_torch", "timing=smoke", "device=cpu", "report.figures=false"]
    python = [sys.executable, "run.py", "bundle"]
    commands = (
        [sys.executable, "run.py", *words, f"report.folder={tmp_path}"],
        [*python, "pack", "RUN", "-o", str(tmp_path / "x.zip")],
        [*python, "verify", str(tmp_path / "x.zip"), "--rerun"],
    )
    for command in commands:
        runs = [str(p.parent) for p in tmp_path.glob("*/*/run.json")]
        real = [word if word != "RUN" else runs[0] for word in command]
        done = subprocess.run(real, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    counts = done.stdout.splitlines()[-1]
    assert counts.endswith(" holds")
    assert not counts.startswith("0 ")


def test_a_gate_is_packed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "gate" / "1"
    run.mkdir(parents=True)
    for name in ("environment.json", "run.json"):
        shutil.copy(FIRST_SCHEMA / name, run)
    config = OmegaConf.load(FIRST_SCHEMA / "config.yaml")
    config.name = config.kind = "gate"
    OmegaConf.save(config, run / "config.yaml")
    (run / "points.jsonl").touch()
    (run / "gate.md").write_text("a verdict")
    (run / "index.html").write_text("a page")
    bundle = tmp_path / "x.zip"
    assert cli.main(["bundle", "pack", str(run), "-o", str(bundle)]) == 0
    assert "only its checksums are verified" in capsys.readouterr().out
    contents = archive.read(bundle)
    assert contents["runs/gate/1/gate.md"] == b"a verdict"
    assert contents["runs/gate/1/index.html"] == b"a page"
    assert cli.main(["bundle", "verify", str(bundle)]) == 0
    assert cli.main(["bundle", "verify", str(bundle), "--rerun"]) == 6
    assert "claims nothing that could be compared" in capsys.readouterr().out
