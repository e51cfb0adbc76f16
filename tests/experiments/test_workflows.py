"""The workflows hold together: what they call exists, forks get nothing, clocks are given back."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import configure
from experiments.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
SOURCED = ("compiler.sh", "gpu.sh", "lib.sh")
# The only expressions a command or its variables may see: set by GitHub or by people who may push.
TRUSTED = re.compile(
    r"github\.(sha|ref_type|ref|repository|event_name|event\.(pull_request\.number|label\.name))"
    r"|inputs\.\w+|matrix\.\w+|vars\.\w+|needs\.\w+\.result|hashFiles\('[^']*'\)"
    r"|'[^']*'|&&|\|\||==|!=|[()!]|always|\s+"
)
# The jobs that may write, each to one thing, and none of them runs code of a pull request.
WRITERS = {
    ("cpu-perf", "keep"): {"contents": "write"},
    ("docs", "deploy"): {"pages": "write", "id-token": "write"},
    ("gpu-perf", "pages"): {"pages": "write", "id-token": "write"},
    ("packages", "publish"): {"id-token": "write"},
    ("packages", "release"): {"contents": "write"},
}
MEASURES = re.compile(r"scripts/(gate|smoke_test|nightly|dependency_test)\.sh")  # revisions

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a copy without workflows")


def load(path: Path) -> dict[str, Any]:
    """The workflow; YAML 1.1 reads the key `on` as true."""
    text = yaml.safe_load(path.read_text())
    text["on"] = text.pop(True)
    return text


def jobs() -> list[Any]:
    found = [(path, name, job) for path in WORKFLOWS for name, job in load(path)["jobs"].items()]
    return [pytest.param(path, job, id=f"{path.stem}-{name}") for path, name, job in found]


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def named(job: dict[str, Any], name: str) -> int:
    """Which step has that name."""
    return [step.get("name") for step in job["steps"]].index(name)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_nothing_runs_with_the_rights_of_the_repository_on_the_code_of_a_fork(path: Path) -> None:
    workflow = load(path)
    assert not {"pull_request_target", "workflow_run", "issue_comment"} & set(workflow["on"])
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text()
    for name, job in workflow["jobs"].items():
        assert job.get("permissions") == WRITERS.get((path.stem, name))
        if "contents" in job.get("permissions", {}):
            ref = "ref_type == 'tag'" if path.stem == "packages" else "ref == 'refs/heads/main'"
            assert job["if"] == f"github.event_name == 'push' && github.{ref}"


@pytest.mark.parametrize(("path", "job"), jobs())
def test_a_job_ends_and_its_actions_have_versions(path: Path, job: dict[str, Any]) -> None:
    assert job["timeout-minutes"] <= 360
    for step in job["steps"]:
        if "uses" in step:
            # A tag may be moved to other code; a commit cannot.
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])
    for step in job["steps"]:
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
            if MEASURES.search(" ".join(commands(job))):
                assert step["with"]["fetch-depth"] == 0  # the gate needs the base's commit


@pytest.mark.parametrize(("path", "job"), jobs())
def test_expressions_never_become_part_of_a_command(path: Path, job: dict[str, Any]) -> None:
    for command in commands(job):
        assert "${{" not in command, "give it through env: its text would be run"
    shown = yaml.safe_dump([job.get("if", ""), job.get("concurrency", ""), job["steps"]], width=999)
    if job.get("permissions") == {"contents": "write"}:
        shown = shown.replace("GH_TOKEN: ${{ github.token }}", "")  # of the release
    expressions = re.findall(r"\$\{\{(.*?)\}\}", shown)
    for expression in [*expressions, str(job.get("if", ""))]:
        assert not TRUSTED.sub("", expression.replace("''", "'")), expression


@pytest.mark.parametrize(
    "context", ["github.event.pull_request.title", "github.head_ref", "github.event.issue.body"]
)
def test_what_a_stranger_may_write_is_not_trusted(context: str) -> None:
    assert TRUSTED.sub("", f"github.sha == {context}")


@pytest.mark.parametrize(("path", "job"), jobs())
def test_what_a_job_calls_exists(path: Path, job: dict[str, Any]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(job):
        for script in re.findall(r"(?:\.ci|scripts)/[\w.]+", command):
            assert (ROOT / script).is_file()
            assert re.search("bash|python", command) or (ROOT / script).stat().st_mode & 0o111, (
                f"{script}: chmod +x"
            )
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= targets
    words = " ".join(commands(job))
    presets = {*re.findall(r"timing=(\w+)", words)}
    assert presets <= set(configure.groups()["timing"])


@pytest.mark.parametrize(("path", "job"), jobs())
def test_own_runners_are_asked_for_and_given_back(path: Path, job: dict[str, Any]) -> None:
    if "self-hosted" not in job["runs-on"]:
        runners = {job["runs-on"]}
        if runners == {"${{ matrix.runner }}"}:
            runners = {entry["runner"] for entry in job["strategy"]["matrix"]["include"]}
        assert runners <= {"ubuntu-latest", "ubuntu-24.04-arm"}
        return
    assert job["runs-on"] == ["self-hosted", "gpu", "bench"]
    assert "vars.GPU_RUNNERS == 'yes'" in job["if"]  # else jobs of forks wait for a day
    assert job["environment"].startswith("gpu-bench")
    assert "group" in job["concurrency"]
    tune, restore = named(job, "tune"), named(job, "restore clocks")
    assert restore == len(job["steps"]) - 1
    assert job["steps"][restore]["if"] == "always()"
    assert job["steps"][restore]["run"] == "scripts/restore_gpu.sh"
    upload = named(job, "upload")
    assert job["steps"][upload]["if"] == "always()"
    # Else a stuck upload would use up the time in which the clocks are restored.
    assert job["steps"][upload]["timeout-minutes"] < job["timeout-minutes"]
    measuring = [i for i, step in enumerate(job["steps"]) if "device=cuda" in step.get("run", "")]
    assert measuring
    assert all(tune < i < upload for i in measuring)


def test_no_pull_request_reaches_a_gpu() -> None:
    workflow = load(ROOT / ".github/workflows/gpu-perf.yml")
    # For `pull_request` a fork's own workflow file would decide what the runner executes.
    assert set(workflow["on"]) == {"schedule", "workflow_dispatch"}
    gate = workflow["jobs"]["gate"]
    assert "github.event_name == 'workflow_dispatch'" in gate["if"]
    check, checkout = gate["steps"][:2]
    assert checkout["with"]["ref"] == "${{ inputs.commit || github.sha }}"
    for commit, allowed in (
        ("", True),
        ("a" * 40, True),
        ("main", False),
        ("refs/pull/1/head", False),
    ):
        done = subprocess.run(
            ["bash", "-c", check["run"]], env={"COMMIT": commit}, capture_output=True
        )
        assert (done.returncode == 0) is allowed, commit


def test_one_workflow_publishes_the_site() -> None:
    build = load(ROOT / ".github/workflows/docs.yml")["jobs"]["build"]
    nightly = load(ROOT / ".github/workflows/gpu-perf.yml")["jobs"]
    assert build["if"] == "vars.DOCS_PAGES == 'yes' && vars.GPU_PAGES != 'yes'"
    assert "vars.GPU_PAGES == 'yes'" in nightly["pages"]["if"]
    assert "make docs" in " ".join(commands(nightly["nightly"]))


def test_a_tested_package_is_the_published_one() -> None:
    jobs = load(ROOT / ".github/workflows/packages.yml")["jobs"]
    assert jobs["publish"]["needs"] == "release"
    assert set(jobs["release"]["needs"]) == {"sdist", "test"}
    built = {entry["name"] for entry in jobs["wheel"]["strategy"]["matrix"]["include"]}
    assert {entry["wheel"] for entry in jobs["test"]["strategy"]["matrix"]["include"]} == built


def test_advice_blocks_nothing_and_says_its_verdict() -> None:
    gate = load(ROOT / ".github/workflows/cpu-perf.yml")["jobs"]["gate"]
    assert gate["continue-on-error"] is True
    assert any("scripts/gate.sh --advisory" in c for c in commands(gate))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse_and_say_what_they_are(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = script.read_text().splitlines()[:2]
    if script.name in SOURCED:
        assert first.startswith("# ")
        assert not script.stat().st_mode & 0o111
    else:
        assert (first, second[:2]) == ("#!/usr/bin/env bash", "# ")
        assert script.stat().st_mode & 0o111
        assert re.search(r"^set -e?uo pipefail$", script.read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_are_clean() -> None:
    command = ["shellcheck", "-S", "warning", "-x", "-P", "scripts", *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
