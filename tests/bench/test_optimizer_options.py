"""Every option of `optimizer_steps` runs, with the peers that are installed, and is reported."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest
import torch

from tests.bench import cpu_peers, optimizer_options, optimizer_report, optimizer_steps
from tests.bench.optimizer_options import OPTIONS, Buffers, Emblib, Inputs, Work, peers_of

TINY = {"A": cpu_peers.Case(1, 50, 8, 6, 3, None), "C": cpu_peers.Case(4, 30, 4, 4, 2, 1.15)}


def _loads_fbgemm() -> bool:
    try:
        importlib.import_module("fbgemm_gpu")
    except (ImportError, OSError):
        return False
    return True


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cpu_peers, optimizer_options):
        monkeypatch.setattr(module, "CASES", TINY)
    monkeypatch.setattr(optimizer_steps, "MOST_ROUNDS", 1)


@pytest.mark.filterwarnings("ignore")  # the peers' own
@pytest.mark.parametrize(
    ("case", "name"), [*(("C", name) for name in OPTIONS), ("A", "SGD, shared tables")]
)
def test_every_option_is_a_row(case: str, name: str) -> None:
    threads = torch.get_num_threads()
    arguments = argparse.Namespace(threads=[threads], seconds=60.0)
    sgd = Emblib(Work(case, OPTIONS["SGD"]), Buffers())
    rows = optimizer_steps.measure(Work(case, OPTIONS[name]), sgd, Buffers(), arguments)
    expected = ["emblib", *peers_of(OPTIONS[name])]
    assert sorted(row["contender"] for row in rows) == sorted(expected)
    for row in rows:
        if row["contender"] == "fbgemm" and not _loads_fbgemm():
            assert row["status"] != "ok"
        else:
            assert row["status"] == "ok"
            assert row["ratio"] > 0
            assert row["rounds"] == len(row["samples"]) == 1


def test_options_with_shared_tables_have_as_many_lookups() -> None:
    for case in TINY:
        for inputs in Inputs:
            work = Work(
                case, optimizer_options.Option("x", OPTIONS["SGD"].optimizer, inputs=inputs)
            )
            lookups = TINY[case].tables * TINY[case].batch * TINY[case].pooling
            assert int(work.offsets()[-1]) == lookups
            assert max(work.feature_tables) == work.tables - 1
    assert Work("A", OPTIONS["SGD, shared tables"]).feature_tables == [0, 0]
    assert Work("C", OPTIONS["SGD, shared tables"]).feature_tables == [0, 0, 1, 1]


def test_a_contender_that_cannot_is_a_row_of_the_report(tmp_path: Path) -> None:
    common = {"case": "A", "threads": 1, "option": "SGD"}
    samples = {"SGD": [1.0] * 6, "emblib": [2.0] * 6, "fbgemm": [3.0] * 6}
    rows = [common | optimizer_steps.summary(who, samples) for who in ("emblib", "fbgemm")]
    rows.append(common | {"contender": "torch", "status": "needs 9 GB"})
    table = optimizer_report.markdown(rows)
    line = "| SGD | 2000.00 ms [2000.00, 2000.00] | 2.00 [2.00, 2.00] | 1.50 [1.50, 1.50] |"
    assert f"{line} needs 9 GB |" in table
    optimizer_steps.write(rows, tmp_path)
    written = {p.name for p in tmp_path.iterdir()}
    assert written == {f"optimizer_steps.{end}" for end in ("csv", "json", "md", "png")}
    assert len((tmp_path / "optimizer_steps.csv").read_text().splitlines()) == 4
