"""The gate around its decisions: workers in turns, revisions, findings, exit status, files."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

from experiments import configure
from experiments.config.schema import Config, UsageError
from experiments.gate import noise, pages, pairs, power, setup, verdicts
from experiments.gate import runner as gate_runner
from experiments.gate.pairs import PairJob, Side, Trial, run_pair
from experiments.gate.points import (
    BuildResult,
    Point,
    Setup,
    points_of,
)
from experiments.gate.rules import Evidence, Rules
from experiments.gate.verdicts import Findings, PointFinding, collect_findings
from experiments.measure.process import ChildDied
from experiments.results.store import RunStore
from experiments.timing.statistics import Verdict

FOLDERS = dict.fromkeys(Side, "")  # the installed package on both sides


@pytest.fixture(scope="module")
def config() -> Config:
    return configure.load(["+experiment=gate", "device=cpu"])


@pytest.fixture(scope="module")
def points(config: Config) -> list[Point]:
    return points_of(config)


class Pretender:
    """A worker with a pretended clock: head takes `ratio` times as long as base."""

    def __init__(self, side: Side, log: list[tuple[Side, Any]], traits: Mapping[str, Any]) -> None:
        self.side, self.log, self.traits = side, log, traits
        self.message: Any = None
        self.note = ""
        self.count = itertools.count()

    def __enter__(self) -> Pretender:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.log.append((self.side, "closed"))

    def send(self, message: Any) -> None:
        if message is None and self.traits.get("leaves") is self.side:
            raise ChildDied("error", "the process crashed (SIGSEGV)")
        self.message = message
        self.log.append((self.side, message))

    def receive(self) -> Any:
        message, bad = self.message, self.traits.get("bad", {}).get(self.side, {})
        match message:
            case Setup():
                if self.traits.get("stillborn") is self.side:
                    raise ChildDied("error", "ImportError: no kernels")
                return {p.name: bad.get(p.name, BuildResult()) for p in message.points}
            case "warm", _:
                return self.traits.get("execution", 1e-3)
            case "take_samples", point, batches, _:
                if self.traits.get("dies") == (self.side, point):
                    raise ChildDied("oom", "killed")
                factor = self.traits.get("ratio", 1.0) if self.side is Side.head else 1.0
                # Every fourth sample is disturbed ninefold.
                return [1e-3 * factor * (9 if next(self.count) % 4 == 3 else 1) for _ in batches]
            case "count_resources", _:
                return {"weights_bytes": 10.0}
        raise AssertionError(message)


def fake_workers(log: list[tuple[Side, Any]], **traits: Any) -> pairs.WorkerFactory:
    return lambda side, package: Pretender(side, log, traits)


def calls(message: Any, method: str) -> bool:
    """Return whether a message calls a method of `Bench`."""
    return isinstance(message, tuple) and message[0] == method


def points_warmed(log: list[tuple[Side, Any]]) -> list[str]:
    """Return the points that were warmed up, in order."""
    return [message[1] for _, message in log if calls(message, "warm")]


def test_turns_are_abba_on_the_same_batches(config: Config, points: list[Point]) -> None:
    log: list[tuple[Side, Any]] = []
    found = run_pair(PairJob(points[:1], config, "cpu", 3), FOLDERS, fake_workers(log, ratio=1.1))
    turns = [(side, m[2]) for side, m in log if calls(m, "take_samples")]
    blocks = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert len(blocks) == config.timing.min_rounds
    for first, middle, last in blocks:
        assert first[0] is last[0] is not middle[0]
        assert first[1] + last[1] == middle[1]
    assert {b[0][0] for b in blocks} == set(Side)  # both orders happen
    taken = found.samples[points[0].name]
    assert taken.effect == pytest.approx(0.0953, abs=1e-3)
    assert len(taken.seconds[Side.base]) == len(taken.seconds[Side.head]) == len(blocks)


def test_order_and_first_come_are_random(config: Config, points: list[Point]) -> None:
    starts, orders = set(), set()
    for number in range(8):
        log: list[tuple[Side, Any]] = []
        run_pair(PairJob(points, config, "cpu", number), FOLDERS, fake_workers(log))
        starts.add(next(side for side, m in log if isinstance(m, Setup)))
        orders.add(tuple(dict.fromkeys(points_warmed(log))))
    assert starts == set(Side)
    assert len(orders) > 4


def test_short_calls_share_a_sample(config: Config, points: list[Point]) -> None:
    log: list[tuple[Side, Any]] = []
    run_pair(PairJob(points[:1], config, "cpu", 0), FOLDERS, fake_workers(log, execution=70e-6))
    assert {m[3] for _, m in log if calls(m, "take_samples")} == {5}


def test_a_slowed_head_and_an_idle_base(config: Config, points: list[Point]) -> None:
    log: list[tuple[Side, Any]] = []
    run_pair(PairJob(points[:1], config, "cpu", 0, slow=1.1), FOLDERS, fake_workers(log))
    setups = {side: m for side, m in log if isinstance(m, Setup)}
    assert (setups[Side.head].slow, setups[Side.head].idle) == (1.1, 1.0)
    assert (setups[Side.base].slow, setups[Side.base].idle) == (1.0, 1.1)


def test_a_crash_costs_one_point(config: Config, points: list[Point]) -> None:
    log: list[tuple[Side, Any]] = []
    job = PairJob(points, config, "cpu", 0)
    run_pair(job, FOLDERS, fake_workers(log))
    first = points_warmed(log)[0]
    log.clear()
    found = run_pair(job, FOLDERS, fake_workers(log, dies=(Side.head, first)))
    assert set(found.samples) == {p.name for p in points} - {first}
    assert found.failures == {first: {Side.head: BuildResult("oom", "killed")}}
    assert sum(1 for _, m in log if isinstance(m, Setup)) == 4  # two pairs of processes


def test_a_worker_that_never_works_costs_all(config: Config, points: list[Point]) -> None:
    log: list[tuple[Side, Any]] = []
    job = PairJob(points, config, "cpu", 0)
    found = run_pair(job, FOLDERS, fake_workers(log, stillborn=Side.base))
    assert not found.samples
    assert {side for sides in found.failures.values() for side in sides} == {Side.base}
    assert len(found.failures) == len(points)


@pytest.mark.parametrize("side", list(Side))
def test_a_crash_after_the_last_point_costs_nothing(
    config: Config, points: list[Point], side: Side
) -> None:
    log: list[tuple[Side, Any]] = []
    job = PairJob(points, config, "cpu", 0)
    found = run_pair(job, FOLDERS, fake_workers(log, leaves=side))
    assert set(found.samples) == {p.name for p in points}
    assert not found.failures
    assert sum(message == "closed" for _, message in log) == 2


def test_a_point_that_one_side_cannot_do_is_not_measured(
    config: Config, points: list[Point]
) -> None:
    name = points[1].name
    bad = {Side.base: {name: BuildResult("unsupported", "too old")}}
    found = run_pair(PairJob(points, config, "cpu", 0), FOLDERS, fake_workers([], bad=bad))
    assert name not in found.samples
    assert len(found.samples) == len(points) - 1


def test_points_must_exist(config: Config) -> None:
    for text, words in (
        ("gate.points=[]", "is empty"),
        ("gate.points=[{case: wide, phase: backward}]", "no phase 'backward'"),
        ("gate.points=[{case: broad, phase: step}]", "no case 'broad'"),
        ("gate.points=[{case: tt, phase: step}, {case: tt, phase: step}]", "is there twice"),
    ):
        with pytest.raises(UsageError, match=words):
            points_of(configure.load(["+experiment=gate", "device=cpu", text]))
    config = configure.load(["+experiment=gate", "device=cpu"])
    config.cases["wide"].contenders, config.cases["wide"].keys.loads = ["scored"], [0.5]
    with pytest.raises(UsageError, match="'wide' is of kind=keys; the gate times forward and step"):
        points_of(config)


# Findings


def line(state: str, **traits: Any) -> PointFinding:
    return PointFinding("p", "words", state, **traits)


@pytest.mark.parametrize(
    ("lines", "strict", "status"),
    [
        ([line("SAME"), line("FASTER")], True, 0),
        ([line("SAME"), line("UNSURE")], False, 0),
        ([line("SAME"), line("UNSURE")], True, 4),
        ([line("SAME"), line("NOISY")], True, 4),
        ([line("SLOWER"), line("MISSING"), line("UNSURE")], True, 3),
        ([line("SAME", worse=("weights bytes 1 → 2",))], False, 3),
        ([line("SAME"), line("MISSING")], False, 5),
        ([line("SAME"), line("FAILED")], False, 5),
        ([line("NEW"), line("NEW")], False, 6),
        ([], False, 6),
    ],
)
def test_exit_status(lines: list[PointFinding], status: int, strict: bool) -> None:
    assert Findings(lines).status(strict=strict) == status


def test_builds_that_fail_have_a_status_of_their_own() -> None:
    assert Findings(broken="no compiler", broken_side=Side.base).status(strict=False) == 6
    assert Findings(broken="no compiler", broken_side=Side.head).status(strict=False) == 5
    assert Findings([line("SLOWER")], interrupted=True).status(strict=False) == 130


def test_bytes_are_exact_and_peaks_nearly_so() -> None:
    base = {"weights_bytes": 1000.0, "peak_bytes": 1e9, "hit_rate": 0.9}
    assert verdicts.changed_resources(base, dict(base)) == ([], [])
    worse, better = verdicts.changed_resources(
        base, {**base, "weights_bytes": 1001.0, "peak_bytes": 1.02e9}
    )
    assert [w.split()[0] for w in worse] == ["weights"]
    assert not better
    worse, _ = verdicts.changed_resources(base, {**base, "peak_bytes": 1.03e9, "hit_rate": 0.89})
    assert [w.split()[0] for w in worse] == ["hit", "peak"]
    _, better = verdicts.changed_resources(base, {**base, "weights_bytes": 900.0, "hit_rate": 0.95})
    assert [b.split()[0] for b in better] == ["hit", "weights"]
    # Without an instruction in emblib's library there is no ratio to print.
    not_native = {"instructions": 100.0, "native_instructions": 0.0}
    assert verdicts.changed_resources(not_native, not_native) == ([], [])
    without_hits = {key: value for key, value in base.items() if key != "hit_rate"}
    assert verdicts.changed_resources(base, without_hits) == (["hit rate 0.9 → not counted"], [])
    assert verdicts.changed_resources(without_hits, base) == ([], [])


def made_up(points: list[Point]) -> tuple[Findings, Rules]:
    """Slower, faster, same, unsure, missing, new, and one that is too noisy."""
    slow, fast, same, unsure, missing, new, noisy = (p.name for p in points[:7])
    rules = Rules(3, 3, {p.name: 0.05 for p in points[:7] if p.name != noisy})
    first = {slow: [0.2, 0.21, 0.19], fast: [-0.2, -0.21, -0.19], same: [0.0, 0.01, -0.01]}
    first[unsure] = [0.3, -0.3, 0.1]
    failed = {
        missing: {Side.head: BuildResult("wrong", "differs")},
        new: {Side.base: BuildResult("error", "old")},
    }
    trial = Trial(
        evidence=Evidence(first, {slow: first[slow], fast: first[fast]}, {missing, new}),
        failures=failed,
    )
    return collect_findings(points[:7], trial, rules, []), rules


def test_findings_begin_with_what_is_worst(points: list[Point]) -> None:
    found, _ = made_up(points)
    assert [x.state for x in found.points] == [
        "SLOWER",
        "MISSING",
        "UNSURE",
        "NOISY",
        "FASTER",
        "SAME",
        "NEW",
    ]
    assert found.status(strict=False) == 3
    assert all(x.reason for x in found.in_states("MISSING", "UNSURE", "NOISY", "NEW"))


@pytest.mark.parametrize(
    ("base", "says"), [("error", "on both sides (oom: killed)"), ("missing", "base cannot run it")]
)
def test_a_failure_names_the_sides(points: list[Point], base: str, says: str) -> None:
    point = points[0]
    failed = {Side.head: BuildResult("oom", "killed"), Side.base: BuildResult(base, "old")}
    trial = Trial(evidence=Evidence({}, {}, {point.name}), failures={point.name: failed})
    (finding,) = collect_findings([point], trial, Rules(3, 3, {}), []).points
    assert finding.state == "FAILED"
    assert says in finding.reason


def test_a_base_that_fails_later_is_not_new(points: list[Point]) -> None:
    slow, same = points[0].name, points[1].name
    first = {slow: [0.2, 0.21], same: [0.0, 0.01, -0.01]}
    died = {slow: {Side.base: BuildResult("timeout", "silent")}}
    trial = Trial(evidence=Evidence(first, {}, {slow}), failures=died)
    found = collect_findings(points[:2], trial, Rules(3, 3, {slow: 0.05, same: 0.05}), [])
    assert found.status(strict=False) == 5
    (finding,) = found.in_states("FAILED")
    assert "base ran it in earlier pairs" in finding.reason


def test_the_report_of_a_killed_run_is_written(
    points: list[Point], config: Config, tmp_path: Path
) -> None:
    store = RunStore(tmp_path)
    store.write_config(config)
    store.write_json("environment.json", ENVIRONMENT)
    Rules(3, 3, {points[0].name: 0.05}).save(store)
    effect = {"point": points[0].name, "stage": "first", "effect": 0.01}
    store.append({**effect, "status": "ok", "base_ns": [[1, 2]], "head_ns": [[1, 2]]})
    assert "WORKTREE against" in gate_runner.rebuild(tmp_path)
    assert json.loads((tmp_path / "gate.json").read_text())["status"] == 130
    assert "nan" not in (tmp_path / "gate.md").read_text()
    assert "One pair of processes differs from itself" in noise.write(tmp_path)


def test_files_of_a_gate(points: list[Point], config: Config, tmp_path: Path) -> None:
    found, _ = made_up(points)
    (tmp_path / "config.yaml").write_text("name: gate\n")
    (tmp_path / "environment.json").write_text(json.dumps({"device": "a CPU", "torch": "2"}))
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    facts = {"base": "main", "head": "WORKTREE", "experiment": "gate", "notices": ["a notice"]}
    answer = pages.write_outputs(tmp_path, found, facts, 3, summary=str(summary))
    assert "is worse at" in answer
    assert "1.221× [" in answer
    assert (tmp_path / "index.html").read_text().startswith("<!doctype html>")
    text = (tmp_path / "gate.md").read_text()
    assert "SLOWER" in text
    assert "a notice" in text
    assert summary.read_text() == "before\n" + text + "\n"
    told = json.loads((tmp_path / "gate.json").read_text())
    assert told["status"] == 3
    assert told["points"][0]["second"] == [0.2, 0.21, 0.19]
    suite = ElementTree.fromstring((tmp_path / "junit.xml").read_text())
    assert suite.get("failures") == "2"
    kinds = [next(c.tag for c in case) for case in suite]
    assert kinds == [
        "failure",
        "failure",
        "skipped",
        "skipped",
        "system-out",
        "system-out",
        "skipped",
    ]


# Noise floor and power


ENVIRONMENT = {"hardware_id": "h", "torch": "2", "threads": 1, "device": "a CPU"}


def test_a_floor_serves_its_own_machine_and_measuring(config: Config, tmp_path: Path) -> None:
    found = setup.noise_floor_content(
        ENVIRONMENT, config, {"a": [0.1, -0.2, 0.12], "b": [0.001]}, "today"
    )
    (tmp_path / setup.floor_file(ENVIRONMENT, config)).write_text(json.dumps(found))
    known = setup.find_noise_floor(tmp_path, ENVIRONMENT, config)
    assert known is not None
    assert setup.margin(known, "a", 0.05, 5) == pytest.approx(3 * 0.12 / 5**0.5)
    assert setup.margin(known, "b", 0.05, 5) == setup.margin(known, "unknown", 0.05, 5) == 0.05
    assert setup.find_noise_floor(tmp_path, {**ENVIRONMENT, "torch": "3"}, config) is None
    other = configure.load(["+experiment=gate", "device=cpu", "timing.min_rounds=7"])
    assert setup.find_noise_floor(tmp_path, ENVIRONMENT, other) is None
    partial_floors = [
        {key: value for key, value in found.items() if key != "key"},
        {key: value for key, value in found.items() if key != "points"},
        {**found, "points": ["a"]},
        {**found, "points": {"a": {"pairs": 3}}},
        {**found, "points": {"a": {"mad": None}}},
    ]
    damaged = ["{", "[]", *map(json.dumps, partial_floors)]
    for content in (b"\xff", *(text.encode() for text in damaged)):
        (tmp_path / setup.floor_file(ENVIRONMENT, config)).write_bytes(content)
        assert setup.find_noise_floor(tmp_path, ENVIRONMENT, config) is None


@pytest.mark.parametrize("fails", [True, False])
def test_a_run_without_a_measured_point_replaces_no_floor(
    fails: bool, points: list[Point], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure.load(
        [
            "+experiment=selftest_aa",
            "device=cpu",
            f"gate.noise={tmp_path / 'floors'}",
            f"report.folder={tmp_path / 'runs'}",
            "gate.floor_pairs=2",
        ]
    )
    environment = {**ENVIRONMENT, "context_id": "c"}
    start = setup.GateStart(config, torch.device("cpu"), points[:1], environment, None)
    monkeypatch.setattr(setup, "start_gate", lambda config, words: start)
    monkeypatch.setattr(setup, "head_on_both_sides", lambda start, say: FOLDERS)
    bad = {Side.head: {points[0].name: BuildResult("oom", "killed")}} if fails else {}

    def measure(job: PairJob, folders: pairs.SideFolders) -> pairs.PairResult:
        return run_pair(job, folders, fake_workers([], bad=bad))

    monkeypatch.setattr(noise, "TrialRunner", partial(pairs.TrialRunner, measure=measure))
    assert noise.run(config, question="?", words=[]) == (5 if fails else 0)
    assert (tmp_path / "floors").exists() != fails


def test_slowed_trials_are_spread_among_the_others() -> None:
    config = configure.load(["+experiment=gate_power", "gate.trials=20", "gate.slowed_trials=4"])
    slows = power.schedule(config)
    assert slows.count(1.1) == 4
    assert slows.count(1.0) == 20
    assert 1.1 in slows[:6]
    assert 1.1 in slows[-6:]


def test_trials_are_replayed_from_what_is_stored() -> None:
    rules = Rules(3, 3, {"a": 0.05})
    shared = {"status": "ok", "point": "a", "weight": {}}
    records = [
        {**shared, "trial": trial, "slow": slow, "stage": stage, "pair": n, "effect": effect}
        for n, (trial, slow, stage, effect) in enumerate(
            [(0, 1.0, "first", e) for e in (0.0, 0.01, -0.01)]
            + [(1, 1.1, "first", e) for e in (0.1, 0.11, 0.09)]
            + [(1, 1.1, "second", e) for e in (0.1, 0.11, 0.09)]
        )
    ]
    trials = power.replay(records)
    outcomes = [power.trial_outcome(t, ["a"], rules) for t in trials.values()]
    rates = power.compute_rates(outcomes)
    assert rates["false_alarms"]["hits"] == 0
    assert rates["false_alarms"]["of"] == 1
    assert rates["caught"] == power.error_rate(1, 1)
    assert rates["points"]["a"]["caught"]["of"] == 1
    assert "ALARM" in power.format_trial(outcomes[1])
    lost = {"status": "error", "reason": "gone", "side": "head", "point": "a", "pair": 9}
    again = power.replay([*records, {**lost, "trial": 1, "slow": 1.1, "stage": "second"}])
    assert (again[1].attempt, again[1].slow, again[1].evidence.first) == (2, 1.1, {})
    assert again[0].evidence == trials[0].evidence
    assert Verdict.SAME.value.lower() in power.format_trial(outcomes[0])
