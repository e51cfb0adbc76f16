"""Every typo is an error with a suggestion and exit status 2, before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import cli, configure, kinds
from experiments.bundle import pack
from experiments.config.schema import Mode
from experiments.paths import ROOT
from experiments.run import runner
from tests.experiments import FIRST_SCHEMA

OK = "+experiment=tt_vs_tbe"
CASES, SWEPT = "+experiment=anchor_tt_rec", "+experiment=tbe_vs_torch"

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
    (OK, "sweep.D=64"): "write sweep.D=[64]",
    (OK, "sweep.D=16,32"): "write sweep.D=[16,32]",
    (OK, "cases.criteo.tt.ranks=8"): "write cases.criteo.tt.ranks=[8]",
    (OK, "workload.D=16,32"): "with -m before the other words",
    (OK, "sweep.D=null"): "write sweep.D=[]",
    (OK, "cases={}"): "'cases={}' changes nothing, because other keys of a group are kept; cases.",
    (OK, "sweep={}"): "'sweep={}' changes nothing",
    (OK, "cases.criteo.workload={E:3}"): "'cases.criteo.workload.E=3' changes nothing: it says",
    (OK, "cases={criteo:{workload:{B:7,b:3}}}"): "Did you mean 'cases.criteo.workload.B=3'?",
    (OK, "seed={a:1}"): "unknown key 'seed.a': seed has a value, and no keys",
    (OK, "sweep.D=[[1]]"): "sweep.D takes single values, as in sweep.D=[A,B]",
    (OK, "where=[D > 8]"): "in two kinds of quotes, as in \"where=['D > 16']\"",
    ("+experiment=serving", "options={clints:[1]}"): "Did you mean 'options.clients'?",
    (OK, "sweep.D=[x]"): "sweep.D[0]: Value 'x'",
    (OK, "tt.tables=0"): "tt.tables must be in [1, 2**63), got 0",
    (OK, "tt.row_factors=[0]"): "tt.row_factors must be in [1, 2**63), got [0]",
    ("+experiment=gate", "device=cpu", "gate.inject=nan"): "gate.inject must be >= 1, got nan",
    (OK, "workload.B=0"): "workload.B must be in [1, 2**63), got 0",
    (OK, "workload.E=99999999999999999999"): "workload.E must be in [1, 2**63), got 9999",
    (OK, "sweep.E=[99999999999999999999]"): "sweep.E must be in [1, 2**63), got [9999",
    (OK, "lr=-1"): "lr must be > 0 and finite, got -1.0",
    (OK, "lr=inf"): "lr must be > 0 and finite, got inf",
    (OK, "workload.s=nan"): "workload.s and .q must be >= 0 and finite, got nan, 0.0",
    (OK, "sweep.s=[0.0,-1]"): "sweep.s must be >= 0 and finite, got [0.0, -1.0]",
    (OK, "sweep.q=[nan]"): "sweep.q must be >= 0 and finite, got [nan]",
    (OK, "seed=-1"): "seed must be in [0, 2**32), got -1",
    (OK, "timing.cell_seconds=inf"): "timing.cell_seconds must be > 0 and finite, got inf",
    (OK, "report.subject=tbee"): "report.subject: no contender 'tbee'. Did you mean 'tbe'?",
    (OK, "report.baseline=nope"): "report.baseline: no contender 'nope'",
    (OK, "timing.replicates=0"): "timing.replicates must be >= 1, got 0",
    (OK, "timing.cell_seconds=0"): "timing.cell_seconds must be > 0 and finite, got 0",
    (OK, "timing.limit_seconds=-1"): "timing.limit_seconds must be >= 0, got -1",
    (OK, "device.memory_share=2"): "device.memory_share must be in (0, 1], got 2",
    (OK, "device.threads=100000"): "device.threads must be in [0, 1024], got 100000",
    (OK, "device.ranks=100000"): "device.ranks must be in [1, 1024], got 100000",
    (OK, "sharding.worlds=[1,5000]"): "sharding.worlds must be in [1, 1024], got [1, 5000]",
    ("+experiment=serving", "options.clients=[9999]"): "options.clients must be in [1, 1024], got",
    (
        "+experiment=quality",
        "report.subject_cache=0",
    ): "report.subject_cache must be in (0, 1], got",
    (OK, "contenders=[nope]"): "no contender 'nope'",
    (OK, "-cd", "conf"): "no flag -cd: there is --help, --cfg job and -m",
    ("+experiment=tbe_vs_torch", "device=cpu", "contenders=[]"): "nothing to measure",
    (OK, "contenders=[tbe,torhc]"): "Did you mean 'torch'?",
    ("+experiment=selftest_aa", "gate.floor_pairs=0"): "gate.floor_pairs must be >= 1, got 0",
    (
        "+experiment=trace_analysis",
        "cache.batches=1",
        "cache.warm_batches=2",
    ): "must be >= 4, got 3",
    ("+experiment=gate_power", "gate.trials=-1"): "gate.trials must be >= 0, got -1",
    ("+experiment=gate", "gate.min_effect=0"): "gate.min_effect must be > 0, got 0",
    (OK, "report.headline=criteoo"): "no case 'criteoo'",
    (OK, "~timing"): "keys cannot be removed",
    (OK, "name=../.."): "name='../..' cannot name the folder of a run",
    (OK, "name=/tmp/elsewhere"): "name='/tmp/elsewhere' cannot name",
    (OK, "name=a/b"): "name='a/b' cannot name",
    (OK, "name='café'"): "use up to 100 letters of ASCII",
    (OK, "name=.."): "report.folder moves the results",
    (OK, "name=''"): "name='' cannot name",
    (OK, "name=multirun"): "name='multirun' cannot name",
    (OK, "report.folder=''"): "report.folder must name a folder",
    (OK, "hydra.run.dir=../elsewhere"): "unknown key 'hydra.run.dir'",
    (OK, "++hydra.output_subdir=../x"): "unknown key 'hydra.output_subdir'",
    (OK, "--cfg", "hydra"): "no flag --cfg: there is --help, --cfg job and -m",
    (OK, "foo["): "cannot read the arguments",
    ("frobnicate",): "'frobnicate' is not a command, experiment or group",
    ("lst",): "no command 'lst'. Did you mean 'list'?",
    ("galery", "runs", "--out", "x"): "no command 'galery'. Did you mean 'gallery'?",
    ("experiment",): "'experiment' needs a value: write +experiment=NAME. There is: anchor_",
    (OK, "timing"): "'timing' needs a value: write timing=NAME. There is: gate, paper, quick",
    (OK, "where=['__import__(\"os\")']"): "where, exclude: cannot read",
    (OK, "where=['rnk > 3']"): "where, exclude: cannot read",
    (CASES, "contenders=[tbe]"): "only cases are measured, and cases.NAME.contenders sets theirs",
    (CASES, "workload.B=8"): "'workload.B=8' changes nothing: only cases are measured",
    (CASES, "where=['D > 8']"): "changes nothing: anchor_tt_rec does not read where",
    ("+experiment=quality", "sweep.D=[8]"): "quality does not read sweep.D",
    ("+experiment=growth_latency", "timing.modes=[cold]"): "does not read timing.modes",
    ("+experiment=calibration", "contenders=[tbe]"): "does not read contenders",
    ("+experiment=calibration", "sweep.D=[77]"): "calibration does not read sweep.D",
    ("+experiment=calibration", "workload.B=7"): "calibration does not read workload.B",
    ("+experiment=calibration", "sharding.scaling=[strong]"): "not read sharding.scaling",
    ("+experiment=eviction_quality", "lr=1"): "eviction_quality does not read lr",
    ("+experiment=hash_load_factor", "optimizer=adagrad"): "does not read optimizer (cases:",
    ("+experiment=growth_latency", "sweep.s=[1.1]"): "growth_latency does not read sweep.s",
    ("+experiment=serving", "lr=1"): "serving does not read lr",
    ("+experiment=trace_analysis", "optimizer=adagrad"): "does not read optimizer (cases:",
    ("+experiment=tt_predictions", "workload.B=3"): "tt_predictions does not read workload.B",
    ("+experiment=quality", "workload.E=3"): "quality does not read workload.E",
    ("+experiment=micro", "workload.B=3"): "micro does not read workload.B",
    ("+experiment=gate", "device=cpu", "optimizer=adagrad"): "gate does not read optimizer",
    ("+experiment=gate", "device=cpu", "cases.wide.tt.ranks=[8]"): "wide does not read tt.ranks",
    ("+experiment=gate", "device=cpu", "timing.modes=[hot,cold]"): "modes must be one mode, got",
    ("+experiment=hash_load_factor", "workload.T=2"): "workload.T must be 1 for hash tables, got 2",
    ("+experiment=growth_latency", "workload.sizes=[5,6]"): "workload.T must be 1 for hash",
    (SWEPT, "report.baseline=fbgemm"): "nothing that is measured has it",
    (OK, "report.subject_rank=77"): "nothing that is measured has it",
    (SWEPT, "keys.hits=0.3"): "tbe_vs_torch does not read keys.hits",
    (SWEPT, "workload=uniform", "sweep.s=[]", "workload.s=2"): "nothing about uniform ids",
    (OK, "cases.criteo.workload.E=3"): "it says nothing about the tables of Criteo-Kaggle",
    (SWEPT, "workload.columns=[a]"): "workload.columns is read by workload=trace only; give both",
    (SWEPT, "workload.sha256=ab"): "workload.sha256 is read by workload=trace only; give both",
    (SWEPT, "workload.ids=fold"): "workload.ids is read by workload=trace only; give both",
    (SWEPT, "timing.min_rounds=80"): "min_rounds must be <= timing.max_rounds=50, got 80",
    (SWEPT, "timing.warmup_seconds=9"): "warmup_seconds must be <= timing.warmup_cap=1, got 9",
    ("+experiment=trace_analysis", "timing.replicates=2"): "does not read timing.replicates",
    ("+experiment=trace_analysis", "cases.zipf.cache.fractions=[0.1]"): "the cache of the run",
    ("+experiment=quality", "timing.precision=0.1"): "quality does not read timing.precision",
    ("+experiment=quality", "workload=uniform"): "does not read workload.distribution",
    ("+experiment=tt_predictions", "workload=uniform"): "does not read workload.distribution",
    ("+experiment=growth_latency", "timing.min_rounds=7"): "does not read timing.min_rounds",
    ("+experiment=serving", "timing.warmup=2"): "serving does not read timing.warmup",
    ("+experiment=micro", "timing.pool=2"): "micro does not read timing.pool",
    ("+experiment=gate", "device=cpu", "gate.max_pairs=4"): "must be >= timing.replicates=5, got 4",
    ("+experiment=gate", "device=cpu", "gate.trials=2"): "gate does not read gate.trials",
    ("+experiment=selftest_aa", "device=cpu", "gate.max_pairs=4"): "not read gate.max_pairs",
    ("+experiment=gate_power", "device=cpu", "rerun=all"): "gate_power does not read rerun",
    (SWEPT, "tt.ranks=[8]"): "'tt.ranks=[8]' changes nothing: tbe_vs_torch does not read tt.ranks",
    (OK, "contenders=[tbe,torch]", "sweep.rank=[4,8]"): "tt_vs_tbe does not read sweep.rank",
    (SWEPT, "sharding.worlds=[2]"): "does not read sharding.worlds",
    (SWEPT, "gate.base=HEAD"): "does not read gate.base",
    (SWEPT, "workload=uniform"): "sweep.s changes nothing about uniform ids: leave it out with",
    (SWEPT, "workload.sizes=[3,4]"): "sweep.T changes nothing about tables of workload.sizes",
    (SWEPT, "workload.tables=criteo_kaggle"): "sweep.T changes nothing about the tables of Crit",
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
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 36  # one screen
    assert lines[-1].startswith("error: which experiment? e.g. python run.py +experiment=tt_vs_tbe")
    for name in configure.groups()["experiment"]:
        (line,) = {line for line in lines if line.split()[:1] == [name]}
        assert " ".join(line.split()).removesuffix(" …") in f"{name} {configure.question(name)}"


def test_help_names_every_group_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for group, options in configure.groups().items():
        assert all(option in shown for option in options), group
    assert len(shown.splitlines()) <= 60


def test_help_of_an_experiment_is_what_its_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["+experiment=serving", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# Question: how long do requests for embeddings wait")
    assert "options: {clients:" in shown
    assert cli.main(["+experiment=servin", "--help"]) == 2
    assert "Did you mean '+experiment=serving'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+experimnt=tt_vs_tbe"], "error: unknown key 'experimnt'"),
        ([], "error: which experiment?"),  # prints texts of the YAML files
    ],
)
def test_the_process_exits_with_the_status_in_any_locale(words: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "run.py", *words],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        env=os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stdout == ""


def test_a_gpu_that_is_not_there_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    if configure.device_kind(configure.DeviceKind.auto) == "cuda":
        pytest.skip("there is a GPU here")
    assert cli.main([OK, "device=cuda", "timing=smoke"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_command_line_values_win_over_the_experiment() -> None:
    options = "cases.quality.options={epochs:7,data:['planted']}"  # no file of conf/ states epochs
    config = configure.load(
        [OK, "device=cpu", "sweep={D:[48]}", "cases.criteo.workload.B=7", "lr=0.5", options]
    )
    assert config.sweep.D == [48]
    assert config.cases["quality"].options["epochs"] == 7
    assert config.cases["criteo"].workload.B == 7
    assert config.lr == 0.5
    assert config.cases["criteo"].workload.tables.value == "criteo_kaggle"


@pytest.mark.parametrize(
    ("words", "budgets"),
    [
        (["+experiment=serving"], (20.0, 300.0)),  # its own, for the preset `standard`
        (["+experiment=serving", "timing=quick"], (4.0, 90.0)),
        (["+experiment=serving", "timing=paper"], (120.0, 0.0)),
        (["+experiment=serving", "timing=quick", "timing.cell_seconds=7"], (7.0, 90.0)),
        (["+experiment=tt_vs_tbe", "timing=quick"], (0.5, 30.0)),  # the preset's
        (["+experiment=quality", "timing=quick"], (0.5, 0.0)),  # no limit stays none
        (["+experiment=gate"], (2.0, 0.0)),
    ],
)
def test_presets_scale_the_budgets_of_experiments(
    words: list[str], budgets: tuple[float, float]
) -> None:
    timing = configure.load(words).timing
    assert (timing.cell_seconds, timing.total_seconds) == pytest.approx(budgets)


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


def test_a_run_says_what_it_does_before_it_loads_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        assert capsys.readouterr().out.endswith("this machine; nothing is measured yet\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    assert cli.main([OK]) == 130


def test_a_command_ends_silently_where_nobody_reads_its_output(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert cli.main(["gallery", str(tmp_path), "--out", str(tmp_path / "x")]) == 141
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [
        ("gallery", str(FIRST_SCHEMA)),
        ("bundle", "pack", str(FIRST_SCHEMA)),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.usefixtures("figures_once")
def test_a_folder_that_cannot_be_written_is_wrong_usage(
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pack, "_source_archive", lambda sha: None)
    (tmp_path / "file").touch()
    assert cli.main([*words, "--out", str(tmp_path / "file" / "x" / "y")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: [Errno 20] Not a directory: '{tmp_path / 'file' / 'x'}")


def test_the_bare_name_of_an_experiment_is_told_how_to_be_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["tt_vs_tbe"]) == 2
    assert capsys.readouterr().err == (
        "error: 'tt_vs_tbe' is an experiment: write +experiment=tt_vs_tbe\n"
    )


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: run.py {name}")
    assert len(shown.split()) > 20


def test_the_wrong_usage_of_a_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reference", "keep", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: /nowhere is not a run")


def test_a_mode_that_is_named_twice_is_measured_once() -> None:
    config = configure.load([OK, "device=cpu", "timing.modes=[hot,cold,hot]"])
    assert config.timing.modes == [Mode.hot, Mode.cold]


def test_values_that_a_cap_leaves_out_are_named() -> None:
    words = ["+experiment=tbe_vs_torch", "device=cpu", "timing=smoke", "sweep.D=[16,32]"]
    config = configure.load(words)
    left_out = runner.values_left_out(kinds.expand(config), config)
    assert {"D=16", "D=32"} <= set(left_out)
    alone = configure.load([*words, "sweep.T=[]", "sweep.L=[]", "sweep.s=[]"])
    assert runner.values_left_out(kinds.expand(alone), alone) == []


def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("experiments.configure")
    monkeypatch.delitem(sys.modules, "experiments.configure")
    monkeypatch.setitem(sys.modules, "hydra", None)
    assert cli.main([OK]) == 2
    assert "needs hydra" in (said := capsys.readouterr().err)
    assert "pip install -e '.[harness]'" in said
