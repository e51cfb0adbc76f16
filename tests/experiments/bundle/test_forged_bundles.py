"""Bundles that somebody tampered with, mended sums and all: `verify` finds it and keeps inside."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments import cli
from experiments.bundle import archive
from experiments.bundle.archive import BundleError
from experiments.results.store import read_records
from tests.experiments import FIRST_SCHEMA
from tests.experiments.bundle.test_verify import changed, of, write_points

Forge = Callable[[dict[str, bytes]], object]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first cell of a committed reference, without figures."""
    source = FIRST_SCHEMA
    target = tmp_path_factory.mktemp("reference") / "tt_vs_tbe" / "1"
    target.mkdir(parents=True)
    for name in ("environment.json", "run.json"):
        shutil.copy(source / name, target)
    config = OmegaConf.load(source / "config.yaml")
    config.report.figures = False
    OmegaConf.save(config, target / "config.yaml")
    records = read_records(source)
    write_points(target, [r for r in records if r["cell"] == records[0]["cell"]])
    return target


@pytest.fixture(scope="module")
def bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "x.zip"
    assert cli.main(["bundle", "pack", str(run), "-o", str(path)]) == 0
    return path


def without(ending: str) -> Forge:
    return lambda contents: contents.__delitem__(of(contents, ending))


def told(change: Callable[[dict[str, Any]], object]) -> Forge:
    """A change of what bundle.json says of the first run."""

    def forge(contents: dict[str, bytes]) -> None:
        description = json.loads(contents["bundle.json"])
        change(description["runs"][0])
        contents["bundle.json"] = json.dumps(description).encode()

    return forge


def replaced(ending: str, old: str, new: str) -> Forge:
    """The first match of a pattern in one file, replaced."""

    def forge(contents: dict[str, bytes]) -> None:
        name = of(contents, ending)
        text, count = re.subn(old, new, contents[name].decode(), count=1)
        assert count == 1
        contents[name] = text.encode()

    return forge


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("report.md"), "report.md is missing, but the samples give it"),
        (without("index.html"), "index.html is missing, but the samples give it"),
        (without("points.jsonl"), "but the samples give 0"),
        (without("environment.json"), "bundle.json says device is"),
        (without("/1/config.yaml"), "is not in it"),
        (lambda c: c.update({"runs/more/1/report.md": b"x"}), "belongs to no run"),
        (lambda c: c.update({"REPRODUCE.md": b"curl"}), "REPRODUCE.md does not say"),
        (lambda c: c.update({"bundle.json": b"["}), "bundle.json cannot be read"),
        (
            lambda c: c.update({of(c, "points.jsonl"): b'{"a": 1}\n'}),
            "its report cannot be rendered",
        ),
        (replaced("report.md", r"\d ms \|", "99 ms |"), "report.md does not say"),
        (replaced("index.html", r"\d ms<", "99 ms<"), "index.html does not say"),
        (replaced("index.html", "<h1>", "<h1>Free: "), "index.html does not say"),
        (replaced("results.csv", ",ratio,", ",ratio_of,"), "ratio: only one of packed and"),
        (told(lambda run: run.update(device="H100")), "bundle.json says device is H100"),
        (told(lambda run: run.update(code="x")), "bundle.json cannot be read (TypeError"),
        (told(lambda run: run.pop("command")), "REPRODUCE.md does not say"),
        (told(lambda run: run["claims"].pop()), "1 claim of the samples left out"),
        (told(lambda run: run.pop("claims")), "bundle.json cannot be read (KeyError('claims'))"),
    ],
)
def test_what_is_missing_added_or_told_otherwise_is_found(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Forge,
    said: str,
) -> None:
    assert (
        cli.main(["bundle", "verify", str(changed(bundle, tmp_path / "forged.zip", change))]) == 3
    )
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


@pytest.mark.parametrize("absolute", [True, False])
def test_a_run_outside_of_the_bundle_is_not_touched(
    bundle: Path, run: Path, tmp_path: Path, absolute: bool
) -> None:
    place = str(run) if absolute else "../" * 30 + str(run).lstrip("/")
    forged = changed(bundle, tmp_path / "y.zip", told(lambda entry: entry.update(folder=place)))
    assert cli.main(["bundle", "verify", str(forged)]) == 3
    assert [p.name for p in run.parent.iterdir()] == [run.name]


def test_a_changed_byte_is_an_error_of_the_bundle(bundle: Path, tmp_path: Path) -> None:
    """Or of what is never read, such as the time of day at which a file was packed."""
    data, whole, refused = bundle.read_bytes(), archive.read(bundle), 0
    for place in range(40, len(data), len(data) // 40):
        (tmp_path / "y.zip").write_bytes(
            data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
        )
        try:
            assert archive.read(tmp_path / "y.zip") == whole
        except BundleError:
            refused += 1
    assert refused > 30


def test_what_would_fill_the_memory_is_refused(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 1000)
    with pytest.raises(BundleError, match="would unpack to more than"):
        archive.read(bundle)
    with pytest.raises(BundleError, match="pack fewer runs"):
        archive.write(tmp_path / "y.zip", {"a": b"0" * 1001})
