"""The list of what there is: complete, in the words of the configuration, without torch."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments import cli, configure, kinds, launch, listing
from experiments.config.schema import Config
from experiments.contenders import registry
from experiments.kinds.base import Repetition
from experiments.paths import ROOT


def shown(*names: str, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    listing.show(names, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def check_every_experiment() -> None:
    """Compare the list of experiments with each of them."""
    load, loaded = configure.load, {}

    def remember(words: list[str]) -> Config:
        loaded[words[0]] = load(words)
        return loaded[words[0]]

    configure.load = remember  # type: ignore[assignment]
    rows = {row[0].partition("\n")[0]: row for row in listing.experiments().rows}
    assert list(rows) == configure.groups()["experiment"]
    for name, (text, kind, cells, seconds) in rows.items():
        config = loaded[f"+experiment={name}"]
        assert configure.question(name) in text
        assert kind == config.kind
        if kinds.find(config.kind).runner:
            assert (cells, seconds) == ("–", "–")
        else:
            expanded = kinds.expand(config)
            assert int(cells) == len(expanded)
            unlimited = all(
                kinds.find(c.kind).measurement.repetition is Repetition.TRAINED for c in expanded
            )
            assert seconds == "–" if unlimited else float(seconds.split()[0]) > 0


def test_every_experiment_has_its_question_and_cells_and_torch_is_not_loaded() -> None:
    """In one process, because the list composes every experiment, which takes seconds."""
    program = (
        "import sys; from tests.experiments import test_listing as tests; "
        "print(tests.shown('contenders', 'hardware')); tests.check_every_experiment(); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contenders" in done.stdout


def test_the_time_follows_the_preset() -> None:
    words = ["+experiment=tbe_vs_torch", "device=cpu", "timing.modes=[hot]"]
    own = [*words, "timing.replicates=4", "timing.cell_seconds=8.5", "timing.total_seconds=0"]
    cells = len(kinds.expand(configure.load(own)))
    assert listing.cells_and_time(configure.load(own)) == (str(cells), f"{cells * 40 / 60:.0f} min")
    limited = configure.load([*own, "timing.total_seconds=30"])
    assert listing.cells_and_time(limited) == (str(cells), "30 s")


def test_an_experiment_that_cannot_be_composed_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    load = configure.load
    groups = configure.groups() | {"experiment": ["tbe_vs_torch", "tt_vs_tbe"]}

    def broken(words: list[str]) -> object:
        if "+experiment=tt_vs_tbe" in words:
            raise configure.UsageError("workload.B must be in [1, 2**63), got 0")
        return load(words)

    monkeypatch.setattr(configure, "load", broken)
    monkeypatch.setattr(configure, "groups", lambda: groups)
    rows = {row[0].partition("\n")[0]: row for row in listing.experiments().rows}
    assert rows["tt_vs_tbe"][0].endswith("workload.B must be in [1, 2**63), got 0")
    assert rows["tt_vs_tbe"][1:] == ("broken", "–", "–")
    assert rows["tbe_vs_torch"][1] == "time"


def test_contenders_say_whether_they_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(requirement: str) -> tuple[str, str] | None:
        return None if requirement.startswith("torchrec") else (requirement.split("==")[0], "0.1")

    monkeypatch.setattr(registry, "find_installed", installed)
    rows = {row[0]: row for row in listing.contenders().rows}
    assert set(rows) == set(registry.names())
    assert rows["tbe"][3] == "yes"
    assert rows["tt"][1:3] == (registry.find("tt").label, "rank")
    assert rows["torchrec"][3].startswith("not installed: ")
    assert "0.1" in rows["fbgemm"][3]
    assert "known to work" in rows["fbgemm"][3]


def test_groups_are_told_in_their_own_words() -> None:
    presets = {row[0]: row[1] for row in listing.SECTIONS["presets"]().rows}
    assert set(presets) == set(configure.groups()["timing"])
    assert presets["quick"].startswith("A first look")
    assert all(presets.values())
    assert all(text for _, text in listing.SECTIONS["workloads"]().rows)


def test_references_are_found_with_where_they_come_from(tmp_path: Path) -> None:
    assert listing.references(tmp_path).rows == []
    run = tmp_path / "some-gpu" / "tt_vs_tbe"
    run.mkdir(parents=True)
    (run / "points.jsonl").write_text("")
    (run / "environment.json").write_text(
        '{"device": "Some GPU", "torch": "2.10", "git": {"sha": "abc"}, "time_utc": "2026-01-02"}'
    )
    expected = ("Some GPU", "tt_vs_tbe", "2.10", "abc", "2026-01-02")
    assert listing.references(tmp_path).rows == [expected]


@pytest.mark.parametrize("width", [80, 160])
def test_it_fits_the_terminal(width: int) -> None:
    text = shown("contenders", "presets", "hardware", "references", width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.index("Contenders") < text.index("Hardware") < text.index("Committed results")


def test_what_needs_a_gpu_is_not_said_to_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.Entry, "missing", lambda _: "")
    monkeypatch.setattr(launch, "list_gpus", lambda: [])
    here = {row[0]: row[3] for row in listing.contenders().rows}
    assert here["fbgemm_lru"] == here["fbgemm_managed"] == "needs a GPU"
    assert here["tbe"] == "yes"


def test_sections_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "presets"]) == 0
    assert "standard" in capsys.readouterr().out
    assert cli.main(["list", "experimentz"]) == 2
    assert "no section 'experimentz'. There is: experiments, contenders" in capsys.readouterr().err
