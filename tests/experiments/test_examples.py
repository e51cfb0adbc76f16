"""Every command that a help text, page, docstring or comment shows is run, or at least read.

`examples.py` finds them, so a new one is covered. Experiments make a dry run in this process: it
composes and checks the configuration, expands the cells and estimates them. What takes a cluster, a
GPU, a network or more than seconds is parsed by what would run it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import emblib
from experiments import cli, configure, launch
from experiments.paths import ROOT
from tests.experiments import examples

# What texts write for something of the reader's -> a word that stands for it here.
PLACEHOLDERS = {
    "+experiment=NAME": ["+experiment=tbe_vs_torch"],
    "+experiment=A,B": ["+experiment=tbe_vs_torch,tt_vs_tbe"],
    "+experiment=a,b": ["+experiment=tbe_vs_torch,tt_vs_tbe"],
    "gate.base=REV": ["gate.base=HEAD"],
    "gate.base=$sha^": ["gate.base=HEAD"],
    "gate.head=$sha": ["gate.head=HEAD"],
    "COMMAND": ["list"],
}
# Keys that change neither the cells nor how their cost is estimated.
UNSEEN = ("device", "device.threads", "dry_run", "rerun", "timing", "timing.total_seconds")
# Commands that are only parsed, and why.
PARSED = {
    "doctor": "looks at the machine: test_doctor.py",
    "compare": "takes runs of several machines: compare/test_machines.py",
    "reference": "writes into the repository, or measures for hours: test_reference.py",
    "bundle": "packs and verifies runs: bundle/test_verify.py",
    "statistics": "draws files of a training program: test_table_statistics.py",
    "gallery": "copies reports: test_gallery.py",
    "list": "test_listing.py",
    "report": "draws figures: report/test_pages.py",
    "trend": "draws a page of runs: gate/test_trend.py",
}
ELSEWHERE = {
    "+experiment=stacking": "docs/peers.md writes its files: test_new_contender.py",
    "+experiment=micro": "asks a pytest of its own: kinds/test_micro.py",
    "+experiment=": "the start of a message",
    "WORDS": "a name for what was typed",
    "--help": "prints the help",
}

COMMANDS = {command: examples.words_of(command) for command in examples.commands()}
EXPERIMENTS: dict[tuple[str, ...], str] = {}  # what is different to a dry run -> a command
LAUNCHES, PROGRAMS, MODULES = [], [], []
for _command, (_program, *_words) in COMMANDS.items():
    if _program == "-m":
        MODULES.append(_command)
    elif "-m" in _words:
        LAUNCHES.append(_command)
    elif _words and _words[0] in (*cli.COMMANDS, "COMMAND"):
        PROGRAMS.append(_command)
    else:
        EXPERIMENTS.setdefault(examples.without(_words, *UNSEEN), _command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that examples name, in a working directory of their own."""
    path = tmp_path_factory.mktemp("examples")
    model = nn.Sequential(nn.EmbeddingBag(50, 4))
    with emblib.TraceRecorder(model) as recorder:
        model((torch.arange(8192) % 50).view(4096, 2))
    recorder.save(path / "lookups.pt")
    line = "\t".join(["1", *("2" for _ in range(13)), *("1a" for _ in range(26))]) + "\n"
    (path / "day_0.tsv").write_text(4096 * line)
    (path / "train.txt").write_text(64 * line)
    (path / "views.csv").write_text("user,item,time\n" + "1,2,3\n4,5,6\n")
    return path


def filled(words: list[str]) -> list[str]:
    """Return the words of an experiment with something for every placeholder."""
    words = [w.replace("file=PATH", "file=lookups.pt") for w in words if w != "$(ARGS"]
    found = [word for w in words for word in PLACEHOLDERS.get(w, [w])]
    named = any("experiment=" in word for word in found)
    return found if named else ["+experiment=tbe_vs_torch", *found]


def test_examples_are_found_everywhere() -> None:
    assert len(EXPERIMENTS) > 40
    assert len(LAUNCHES) > 4
    assert {words[1] for words in map(COMMANDS.get, PROGRAMS) if words} >= set(PARSED) - {"gallery"}
    wheres = set(examples.commands().values())
    assert {"run.py --help", "README.md", "docs/scale.md", "Makefile"} <= wheres
    assert any(where.startswith("conf/") for where in wheres)


@pytest.mark.parametrize("command", EXPERIMENTS.values())
def test_an_experiment_makes_a_dry_run(
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = COMMANDS[command][1:]
    if typed and (reason := ELSEWHERE.get(typed[0])):
        pytest.skip(reason)
    words = filled(typed)
    monkeypatch.chdir(folder)
    shown = "Nothing was measured"
    if "--cfg" in words:
        shown = "kind: time"
    elif "--help" in words:
        shown = "# Question: "
    else:
        words = [*examples.without(words, "device", "dry_run"), "device=cpu", "dry_run=true"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("command", LAUNCHES)
def test_the_jobs_of_a_launch_are_read(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not started: some take a cluster, all take minutes."""
    monkeypatch.setattr(launch, "_is_installed", lambda plugin: True)
    plan = launch.parse_command_line(filled(COMMANDS[command][1:]))
    assert len(plan.jobs) > 1
    for words in plan.jobs:
        assert configure.load(words).kind


@pytest.mark.parametrize("command", PROGRAMS)
def test_a_command_is_parsed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *words = [w for word in COMMANDS[command][1:] for w in PLACEHOLDERS.get(word, [word])]
    assert name in PARSED, "run it here, or say where it is run"
    program = importlib.import_module(cli.COMMANDS[name][0])
    parser = argparse.ArgumentParser(prog=f"run.py {name}")
    program.add_arguments(parser)
    if "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            cli.main([name, *words])
    elif words or name in ("list", "doctor"):  # else a sentence has the name alone
        parser.parse_args(words)


@pytest.mark.parametrize("command", MODULES)
def test_a_module_exists_and_knows_its_flags(command: str) -> None:
    """They take minutes, a GPU, torchrun or nvcc; most are helpers of tests that run them."""
    _, name, *words = COMMANDS[command]
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    program = Path(spec.origin)
    if program.name == "__init__.py":  # a package runs its __main__
        program = program.with_name("__main__.py")
    source = program.read_text()
    assert '__name__ == "__main__"' in source
    for flag in (word for word in words if word.startswith("--")):
        assert flag in source


VARIABLES = {
    "SETS",
    "ARGS",
    "FILES",
    "BASE",
    "VENV",
    "PYTHON",
    "TORCH",
    "EXTRAS",
    "EMBLIB_CUDA",
    "WORKERS",
    "JOBS",
}


@pytest.mark.parametrize("command", examples.make_commands())
def test_a_target_of_make_exists(command: str) -> None:
    _, target, *variables = command.split(" ", 2)
    text = (ROOT / "Makefile").read_text()
    if target not in ("faster",):  # a verb
        assert re.search(rf"^{target}:.*##", text, re.MULTILINE)
    for name in re.findall(r"([A-Z_]+)=", " ".join(variables)):
        assert name in VARIABLES
        assert re.search(rf"\b{name}\b", text)
