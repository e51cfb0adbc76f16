"""Runs whose kind writes its report itself are bundled as they are, and the bundle says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.bundle import archive
from experiments.bundle.__main__ import main
from tests.experiments import FIRST_SCHEMA


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
    assert main(["pack", str(run), "-o", str(bundle)]) == 0
    assert "only its checksums are verified" in capsys.readouterr().out
    contents = archive.read(bundle)
    assert contents["runs/gate/1/gate.md"] == b"a verdict"
    assert contents["runs/gate/1/index.html"] == b"a page"
    assert main(["verify", str(bundle)]) == 0
    assert main(["verify", str(bundle), "--rerun"]) == 6
    assert "claims nothing that could be compared" in capsys.readouterr().out
