"""The trend over commits: levels along chains of runs, what moved, what is left out, the page."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from experiments.config.schema import UsageError
from experiments.gate import revisions, trend
from experiments.gate.instructions import NATIVE, TOTAL
from experiments.gate.trend import TIME, Commit


def commit(name: str, day: int) -> dict[str, str]:
    return {"sha": name * 40, "date": f"2026-11-{day:02}T00:00:00Z", "subject": f"tbe: {name}"}


def finding(point: str, ratio: float, **more: Any) -> dict[str, Any]:
    ends = {"lo": ratio / 1.02, "hi": ratio * 1.02}
    return {"point": point, "state": "SAME", "ratio": ratio, **ends, **more}


def gate(base: str, head: str, day: int, *points: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the content of a gate.json; the base is of the day before."""
    commits = {"base": commit(base, day - 1), "head": commit(head, day)}
    where = {"device": "cpu", "machine": "a CPU", "measured": f"2026-11-{day}T01:00"}
    return {
        "status": 0,
        "answer": "nothing",
        "points": points,
        "commits": commits,
        **where,
        **more,
    }


def store(folder: Path, *runs: dict[str, Any]) -> Path:
    for number, run in enumerate(runs):
        (folder / f"{number}.json").write_text(json.dumps(run))
    return folder


def counts(base: float, head: float) -> dict[str, Any]:
    return {"counts": {TOTAL: {"base": base, "head": head}, NATIVE: {"base": base, "head": head}}}


def test_levels_multiply_along_a_chain(tmp_path: Path) -> None:
    first = gate("a", "b", 2, finding("wide", 1.1, **counts(100, 150)))
    second = gate("b", "c", 3, finding("wide", 1.2, **counts(7, 14)))
    shown, _ = trend.read_trend([store(tmp_path, second, first)])
    a, b, c = (Commit(**commit(name, day)) for day, name in enumerate("abc", 1))
    assert shown.chains() == [[a, b, c]]
    levels = shown.levels("wide")
    assert levels[a, TIME].ratio == 1
    assert levels[c, TIME].ratio == pytest.approx(1.1 * 1.2)
    assert levels[c, TIME].half_width == pytest.approx(math.sqrt(2) * math.log(1.02))
    assert levels[c, TOTAL].ratio == pytest.approx(3)
    assert levels[c, TOTAL].ends == pytest.approx((3, 3))


def test_the_latest_run_of_a_commit_counts(tmp_path: Path) -> None:
    later = gate("a", "b", 2, finding("wide", 2.0), measured="2026-12-01")
    shown, _ = trend.read_trend([store(tmp_path, later, gate("a", "b", 2, finding("wide", 1.0)))])
    (run,) = shown.runs
    assert run.points["wide"]["ratio"] == 2.0


def test_a_gap_begins_another_chain(tmp_path: Path) -> None:
    runs = gate("a", "b", 2, finding("wide", 2.0)), gate("c", "d", 5, finding("wide", 1.0))
    shown, _ = trend.read_trend([store(tmp_path, *runs)])
    assert [[one.sha[0] for one in chain] for chain in shown.chains()] == [["a", "b"], ["c", "d"]]
    assert shown.levels("wide")[shown.commits[-1], TIME].ratio == 1
    (notice,) = trend.page_of(shown).notices
    assert "2 chains of commits that begin at aaaaaaaa, cccccccc" in notice.text


def test_a_commit_older_than_its_base_is_linked_to_it(tmp_path: Path) -> None:
    on_branch = gate("b", "c", 2, finding("wide", 1.2))
    on_branch["commits"]["base"] = commit("b", 5)
    runs = on_branch, gate("a", "b", 5, finding("wide", 1.1))
    shown, _ = trend.read_trend([store(tmp_path, *runs)])
    assert [[one.sha[0] for one in chain] for chain in shown.chains()] == [["a", "b", "c"]]
    levels = {c.sha[0]: level.ratio for (c, _), level in shown.levels("wide").items()}
    assert levels == pytest.approx({"a": 1.0, "b": 1.1, "c": 1.1 * 1.2})


def test_runs_in_a_circle_begin_at_the_base_of_the_first(tmp_path: Path) -> None:
    back = gate("b", "a", 2, finding("wide", 0.5))
    back["commits"] = {"base": commit("b", 2), "head": commit("a", 1)}
    shown, _ = trend.read_trend([store(tmp_path, gate("a", "b", 2, finding("wide", 2.0)), back)])
    levels = {c.sha[0]: level.ratio for (c, _), level in shown.levels("wide").items()}
    assert levels == pytest.approx({"a": 1.0, "b": 2.0})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"commits": None}, "before the gate stored commits"),
        ({"commits": {"base": commit("a", 1), "head": {}}}, "a working tree with changes"),
        ({"commits": {"base": commit("a", 1), "head": commit("a", 1)}}, "with itself"),
        ({"points": []}, "it has no findings"),
        ({"status": 130, "commits": None}, "it was interrupted"),
        ({"commits": 5}, "it is damaged"),
        ({"commits": {"base": {"sha": "a"}, "head": {"sha": "b"}}}, "it is damaged"),
        ({"points": [{"point": "wide"}]}, "it is damaged"),
    ],
)
def test_what_has_no_place_is_left_out(change: Any, reason: str, tmp_path: Path) -> None:
    good = gate("a", "b", 2, finding("wide", 1.0))
    bad = gate("b", "c", 3, finding("wide", 1.0)) | change
    shown, exclusions = trend.read_trend([store(tmp_path, good, bad)])
    assert len(shown.runs) == 1
    assert exclusions[0].startswith("1.json: ")
    assert reason in exclusions[0]
    assert exclusions[0] in trend.page_of(shown, exclusions).notices[0].text
    (tmp_path / "0.json").unlink()
    with pytest.raises(UsageError, match="no finished run"):
        trend.read_trend([tmp_path])


def test_a_damaged_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "gate.json").write_text('{"status": 0,')
    _, exclusions = trend.read_trend([store(tmp_path, gate("a", "b", 2, finding("wide", 1.0)))])
    assert exclusions == ["gate.json: it is damaged"]


def test_devices_are_not_mixed(tmp_path: Path) -> None:
    runs = (
        gate("a", "b", 2, finding("wide", 1.0)),
        gate("b", "c", 3, finding("wide", 1.0), device="cuda"),
    )
    with pytest.raises(UsageError, match="choose with --device"):
        trend.read_trend([store(tmp_path, *runs)])
    shown, _ = trend.read_trend([tmp_path], "cuda")
    assert [run.device for run in shown.runs] == ["cuda"]


def test_a_later_run_on_another_device_replaces_none(tmp_path: Path) -> None:
    on_cpu = gate("a", "b", 2, finding("wide", 1.0))
    on_gpu = gate("a", "b", 2, finding("wide", 2.0), device="cuda", measured="2026-12-01")
    with pytest.raises(UsageError, match="choose with --device"):
        trend.read_trend([store(tmp_path, on_cpu, on_gpu)])
    shown, _ = trend.read_trend([tmp_path], "cpu")
    assert [run.points["wide"]["ratio"] for run in shown.runs] == [1.0]


def test_the_page_says_what_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = finding("wide", 1.31, **counts(100, 103)) | {"state": "SLOWER", "grown": ["more"]}
    runs = (
        gate("a", "b", 2, finding("wide", 1.0, **counts(99, 100)), finding("tt", 1.0)),
        gate("b", "c", 3, moved, finding("tt", 0.7) | {"state": "FASTER"}, finding("new", 1.0)),
    )
    arguments = argparse.Namespace(
        folders=[store(tmp_path, *runs)], out=tmp_path / "page", device=""
    )
    assert trend.run(arguments) == 0
    said = capsys.readouterr().out
    assert "3 commits from aaaaaaaa to cccccccc: 2 points moved at 1 commit." in said
    assert "Largest level of time: wide, 1.310." in said
    assert "Largest level of instructions: wide, 1.040." in said
    page = (tmp_path / "page/index.html").read_text()
    assert page.count('<svg role="img"') == 3
    text = (tmp_path / "page/trend.md").read_text()
    assert f"python run.py trend {tmp_path}\n" in text
    assert "| cccccccc | wide | SLOWER | 1.310 [1.284, 1.336] | 1.0300 | 1.0300 | more |" in text
    assert "tbe: c" in text
    arguments.folders, arguments.device = [tmp_path, tmp_path / "a folder"], "cpu"
    arguments.folders[1].mkdir()
    assert trend.run(arguments) == 0
    text = (tmp_path / "page/trend.md").read_text()
    assert f"trend {tmp_path} '{tmp_path}/a folder' --device cpu\n" in text
    arguments.folders = [tmp_path / "none"]
    with pytest.raises(UsageError, match="there is no folder"):
        trend.run(arguments)


def test_points_that_failed_are_named(tmp_path: Path) -> None:
    failed = {"point": "tall", "state": "MISSING", "reason": "head cannot run it (oom: killed)"}
    shown, _ = trend.read_trend([store(tmp_path, gate("a", "b", 2, finding("wide", 1.0), failed))])
    page = trend.page_of(shown)
    assert page.answer[0].endswith("nothing moved, 1 point failed.")
    (notice,) = page.notices
    assert notice.text == "bbbbbbbb, tall missing: head cannot run it (oom: killed)"


def test_a_working_tree_counts_as_its_commit_if_it_is_clean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = b"c0ffee\x002026-11-26\x00tbe: faster\n"

    def git(*arguments: str) -> bytes:
        return changes if arguments[0] == "status" else shown

    monkeypatch.setattr(revisions, "git", git)
    changes = b""
    expected = {"sha": "c0ffee", "date": "2026-11-26", "subject": "tbe: faster"}
    assert (
        revisions.commit_facts(revisions.WORKTREE) == revisions.commit_facts("c0ffee") == expected
    )
    changes = b" M emblib/init.py"
    assert revisions.commit_facts(revisions.WORKTREE) == {}
