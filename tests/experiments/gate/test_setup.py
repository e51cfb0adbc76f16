"""The start of a run of the gate's kinds: dry runs, and resuming an interrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import cli, configure
from experiments.config.schema import UsageError
from experiments.gate import setup
from experiments.gate.setup import GateStart


def start(folder: Path, context: str = "here") -> GateStart:
    config = configure.load(["+experiment=gate_power", "device=cpu", f"report.folder={folder}"])
    return GateStart(config, torch.device("cpu"), [], {"context_id": context}, None)


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ("gate", "8 points, 5 to 9 pairs of processes, and as many again"),
        ("selftest_aa", "8 points, 24 pairs of processes"),
        ("gate_power", "8 points, 240 trials of a gate of 5 to 9 pairs"),
    ],
)
def test_a_dry_run_measures_nothing(
    experiment: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [f"+experiment={experiment}", "device=cpu", f"report.folder={tmp_path}"]
    assert cli.main([*typed, "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    assert words in shown
    assert "Nothing was measured" in shown
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"report.folder=.*file/runs: "):
        start(tmp_path / "file" / "runs").create()


def test_what_was_not_finished_goes_on_unless_somebody_is_at_it(tmp_path: Path) -> None:
    store = start(tmp_path).create()
    store.append({"pair": 0})
    path = store.path
    assert setup.find_unfinished(start(tmp_path)) is None  # its writer is alive
    del store
    found = setup.find_unfinished(start(tmp_path))
    assert found is not None
    assert found[0].path == path
    assert [record["pair"] for record in found[1]] == [0]
    assert setup.find_unfinished(start(tmp_path, "elsewhere")) is None
    (path / "run.json").write_text("")  # as after a loss of power
    assert setup.find_unfinished(start(tmp_path)) is None
    found[0].write_json("run.json", {"status": "finished"})
    del found
    assert setup.find_unfinished(start(tmp_path)) is None
