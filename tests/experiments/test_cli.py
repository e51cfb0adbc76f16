"""Every typo is an error with a suggestion and exit status 2, before anything runs."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments import cli, kinds, launch
from experiments.config import configure
from experiments.contenders import registry
from experiments.paths import ROOT
from experiments.run import runner

OK = "+experiment=tt_vs_tbe"

PROBES = {
    ("+experimnt=tt_vs_tbe",): "Did you mean '+experiment=tt_vs_tbe'?",
    ("experiment=tt_vs_tbee",): "Did you mean '+experiment=tt_vs_tbe'?",
    ("+experiment=nonsense",): "no experiment 'nonsense'",
    (OK, "timing.warmpu=3"): "Did you mean 'timing.warmup=3'?",
    (OK, "+timing.warmpu=3"): "Did you mean 'timing.warmup=3'?",
    (OK, "+timing.warmup=3"): "write 'timing.warmup=3' without '+'",
    (OK, "+foo=1"): "unknown key 'foo'. Did you mean one of:",
    (OK, "++foo.bar=1"): "unknown key 'foo.bar'",
    (OK, "timing=stndard"): "Did you mean 'timing=standard'?",
    (OK, "B=64"): "Did you mean 'workload.B=64'?",
    (OK, "D=[32,64]"): "Did you mean 'sweep.D=[32,64]'?",
    (OK, "sweep.dim=[64]"): "Did you mean one of: sweep.B, sweep.D",
    (OK, "cases.crieto.workload.B=1"): "Did you mean 'cases.criteo.workload.B=1'?",
    (OK, "cases.criteo.workload.b=1"): "Did you mean 'cases.criteo.workload.B=1'?",
    (OK, "workload.B=abc"): "workload.B: Value 'abc'",
    (OK, "workload.distribution=zpf"): "Did you mean 'workload.distribution=zipf'?",
    (OK, "sweep.D=64"): "sweep.D: ",
    (OK, "sweep.D=[x]"): "sweep.D[0]: Value 'x'",
    (OK, "tt.tables=0"): "tt.tables must be >= 1, got 0",
    (OK, "workload.B=0"): "workload.B must be >= 1, got 0",
    (OK, "lr=-1"): "lr must be > 0, got -1.0",
    (OK, "timing.replicates=0"): "timing.replicates must be >= 1, got 0",
    (OK, "timing.cell_seconds=0"): "timing.cell_seconds must be > 0, got 0",
    (OK, "timing.limit_seconds=-1"): "timing.limit_seconds must be >= 0, got -1",
    (OK, "device.memory_share=2"): "device.memory_share must be in (0, 1], got 2",
    (OK, "contenders=[nope]", "-cd", "conf"): "no contender 'nope'",
    ("-cd", "conf"): "which experiment?",
    ("+experiment=tbe_vs_torch", "device=cpu", "contenders=[]"): "nothing to measure",
    (OK, "contenders=[tbe,torhc]"): "Did you mean 'torch'?",
    (OK, "report.headline=criteoo"): "no case 'criteoo'",
    (OK, "~timing"): "keys cannot be removed",
    (OK, "foo["): "cannot read the arguments",
    (OK, "where=['__import__(\"os\")']"): "where, exclude: cannot read",
    (OK, "where=['rnk > 3']"): "where, exclude: cannot read",
}


@pytest.mark.parametrize("words", PROBES, ids=" ".join)
def test_a_typo_ends_in_status_2_and_a_suggestion(
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner.RunStore, "create", None)  # nothing may be written
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert PROBES[words] in error
    assert len(error.strip().splitlines()) == 1


def test_without_an_experiment_the_questions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    error = " ".join(capsys.readouterr().err.split())  # however the lines are broken
    for name in configure.groups()["experiment"]:
        assert f"{name} {configure.question(name)}" in error


def test_help_names_every_group_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for group, options in configure.groups().items():
        assert all(option in shown for option in options), group


def test_the_process_exits_with_the_status() -> None:
    done = subprocess.run(
        [sys.executable, "run.py", "+experimnt=tt_vs_tbe"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown key 'experimnt'")
    assert done.stdout == ""


def test_a_gpu_that_is_not_there_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    if configure.device_kind(configure.DeviceKind.auto) == "cuda":
        pytest.skip("there is a GPU here")
    assert cli.main([OK, "device=cuda", "timing=smoke"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_command_line_values_win_over_the_experiment() -> None:
    config = configure.load(
        [OK, "device=cpu", "sweep.D=[48]", "cases.criteo.workload.B=7", "lr=0.5"]
    )
    assert config.sweep.D == [48]
    assert config.cases["criteo"].workload.B == 7
    assert config.lr == 0.5
    assert config.cases["criteo"].workload.tables.value == "criteo_kaggle"


def test_sizes_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = configure.load([OK, "device=cpu"])
    gpu = configure.load([OK, "device=cuda"])
    assert max(gpu.sweep.B) > max(cpu.sweep.B)
    assert gpu.workload.E > cpu.workload.E


def test_what_hydra_itself_refuses_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([OK, "workload.B=abc", "--cfg", "job"]) == 2
    assert "workload.B" in capsys.readouterr().err


def test_ctrl_c_before_anything_was_measured_is_status_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(configure, "load", interrupted)
    assert cli.main([OK]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_bare_name_of_an_experiment_is_told_how_to_be_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["tt_vs_tbe"]) == 2
    assert capsys.readouterr().err == (
        "error: 'tt_vs_tbe' is an experiment: write +experiment=tt_vs_tbe\n"
    )


def shown(*names: str, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    assert cli.show(names, console) == 0
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_experiment_has_its_question_and_cells() -> None:
    rows = {row[0].partition("\n")[0]: row for row in cli.experiments().rows}
    assert list(rows) == configure.groups()["experiment"]
    for name, (text, kind, cells, seconds) in rows.items():
        config = configure.load([f"+experiment={name}", "device=cpu"])
        assert configure.question(name) in text
        assert kind == config.kind
        if kinds.find(config.kind).leads:
            assert (cells, seconds) == ("–", "–")
        else:
            assert int(cells) == len(kinds.expand(config))
            assert float(seconds.split()[0]) > 0


def test_the_time_follows_the_preset() -> None:
    words = ["+experiment=tbe_vs_torch", "device=cpu", "timing.modes=[hot]"]
    own = [*words, "timing.replicates=4", "timing.cell_seconds=8.5", "timing.total_seconds=0"]
    cells = len(kinds.expand(configure.load(own)))
    assert cli.extent(configure.load(own)) == (str(cells), f"{cells * 40 / 60:.0f} min")
    limited = configure.load([*own, "timing.total_seconds=30"])
    assert cli.extent(limited) == (str(cells), "30 s")


def test_an_experiment_that_cannot_be_composed_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    load = configure.load

    def broken(words: list[str]) -> object:
        if "+experiment=tt_vs_tbe" in words:
            raise configure.UsageError("workload.B must be >= 1, got 0")
        return load(words)

    monkeypatch.setattr(configure, "load", broken)
    monkeypatch.setattr(configure, "groups", lambda: {"experiment": ["tbe_vs_torch", "tt_vs_tbe"]})
    rows = {row[0].partition("\n")[0]: row for row in cli.experiments().rows}
    assert rows["tt_vs_tbe"][0].endswith("workload.B must be >= 1, got 0")
    assert rows["tt_vs_tbe"][1:] == ("broken", "–", "–")
    assert rows["tbe_vs_torch"][1] == "time"


def test_contenders_say_whether_they_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(requirement: str) -> tuple[str, str] | None:
        return None if requirement.startswith("torchrec") else (requirement.split("==")[0], "0.1")

    monkeypatch.setattr(registry, "_installed", installed)
    rows = {row[0]: row for row in cli.contenders().rows}
    assert set(rows) == set(registry.names())
    assert rows["tbe"][3] == "yes"
    assert rows["tt"][1:3] == (registry.label("tt"), "rank")
    assert rows["torchrec"][3].startswith("not installed: ")
    assert "0.1" in rows["fbgemm"][3]
    assert "known to work" in rows["fbgemm"][3]


def test_groups_are_told_in_their_own_words() -> None:
    presets = dict(cli.presets().rows)
    assert set(presets) == set(configure.groups()["timing"])
    assert presets["quick"].startswith("A first look")
    assert all(presets.values())
    assert all(text for _, text in cli.workloads().rows)


def test_references_are_found_with_where_they_come_from(tmp_path: Path) -> None:
    assert cli.references(tmp_path).rows == []
    run = tmp_path / "some-gpu" / "tt_vs_tbe"
    run.mkdir(parents=True)
    (run / "points.jsonl").write_text("")
    (run / "environment.json").write_text(
        '{"device": "Some GPU", "torch": "2.10", "git": {"sha": "abc"}, "time_utc": "2026-01-02"}'
    )
    expected = ("Some GPU", "tt_vs_tbe", "2.10", "abc", "2026-01-02")
    assert cli.references(tmp_path).rows == [expected]


@pytest.mark.parametrize("width", [80, 160])
def test_it_fits_the_terminal(width: int) -> None:
    text = shown("contenders", "presets", "hardware", "references", width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.index("Contenders") < text.index("Hardware") < text.index("Committed results")


def test_both_ways_to_ask_and_a_wrong_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list", "presets"]) == 0
    by_flag = capsys.readouterr().out
    assert cli.show_list(["presets"]) == 0
    assert capsys.readouterr().out == by_flag
    assert "standard" in by_flag
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--list", "nonsense"])
    assert "nonsense" in capsys.readouterr().err


def test_torch_is_not_loaded() -> None:
    program = (
        "import sys; from experiments import cli as l; "
        "l.show_list(['experiments', 'contenders', 'hardware']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tt_vs_tbe" in done.stdout


def test_what_needs_a_gpu_is_not_said_to_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.Entry, "missing", lambda _: "")
    monkeypatch.setattr(launch, "list_gpus", lambda: [])
    here = {row[0]: row[3] for row in cli.contenders().rows}
    assert here["fbgemm_lru"] == here["fbgemm_managed"] == "needs a GPU"
    assert here["tbe"] == "yes"


def test_a_section_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.show_list(["experimentz"])
    assert end.value.code == 2
    assert "no section 'experimentz'. There is: experiments, contenders" in capsys.readouterr().err
