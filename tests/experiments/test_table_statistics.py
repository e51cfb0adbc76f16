"""The figure of a series of table statistics, from training whose course is known."""

import math
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot as plt

from emblib import DynamicEmbeddingBags, DynamicSpec, optim, telemetry
from experiments import cli, table_statistics


def write_series(path: Path, *, steps: int = 12, first_second: int = 0) -> None:
    """Two tables: "few" hits always after its first batch, "many" has new keys only."""
    specs = [DynamicSpec(64, 4, name=name) for name in ("few", "many")]
    bags = DynamicEmbeddingBags(specs, optim.SGD(0.1), seed=1)
    bags.track_statistics(remember=1000)
    for step in range(steps):
        ids = torch.cat([torch.arange(20), torch.arange(20 * step, 20 * step + 20)])
        bags(ids, torch.tensor([0, 20, 40])).sum().backward()
        telemetry.append_csv(bags, path, {"rank": "0"}, float(first_second + step))


def test_the_curves_are_those_of_the_training(tmp_path: Path) -> None:
    write_series(tmp_path / "a.csv")
    series, _ = table_statistics.read([tmp_path / "a.csv"])
    assert list(series) == ["few", "many"]
    figure = table_statistics.figure(series)
    titles = [panel.title for panel in figure.panels]
    assert titles == [
        "Hit rate",
        "Load",
        "Age at eviction",
        "Inserted keys that had been evicted",
    ]
    _, axes = plt.subplots()
    figure.panels[0].draw(axes)
    few, many = axes.get_lines()
    assert (few.get_label(), many.get_label()) == ("few", "many")
    assert list(few.get_xdata()) == list(range(2, 13))
    assert set(few.get_ydata()) == {100.0}
    assert set(many.get_ydata()) == {0.0}
    plt.close()
    _, axes = plt.subplots()
    figure.panels[2].draw(axes)
    (ages,) = axes.get_lines()  # of "many" alone
    assert sum(ages.get_ydata()) == pytest.approx(100.0)
    plt.close()


def test_counts_that_restart_are_those_since_then(tmp_path: Path) -> None:
    """A process that begins again appends steps 1, 2, ... to the same file."""
    write_series(tmp_path / "once.csv", steps=6)
    (once, _), path = table_statistics.read([tmp_path / "once.csv"]), tmp_path / "twice.csv"
    for first in (0, 100):
        write_series(path, steps=6, first_second=first)
    twice, _ = table_statistics.read([path])
    assert list(twice["few"]["step"]) == [*range(1, 7), *range(1, 7)]
    rates = [table_statistics._rates(series, "hits", "lookups") for series in (once, twice)]
    for line, of_both in zip(*rates, strict=True):
        assert of_both.y[: len(line.y)] == line.y
        assert math.isnan(of_both.y[len(line.y)])
        assert of_both.y[len(line.y) + 1 :] == [0.0, *line.y]  # the first batch has no hits
    ages = [table_statistics._ages(series) for series in (once, twice)]
    assert ages[0] == ages[1]


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write_series(path, steps=3)
    path.write_text(path.read_text()[:-100])  # within the last line, of "many"
    write_series(path, steps=3, first_second=100)
    series, _ = table_statistics.read([path])
    assert {name: list(rows["step"]) for name, rows in series.items()} == {
        "few": [1, 2, 3, 1, 2, 3],
        "many": [1, 2, 1, 2, 3],
    }


def test_names_stay_text_and_tables_left_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["01", "1", "1e0", "nan", "$a$", "_a", *"bcd"]
    bags = DynamicEmbeddingBags([DynamicSpec(32, 4, name=n) for n in names], optim.SGD(0.1))
    for step in range(2):
        lengths = torch.tensor([0, *([3] * 8), 1]).cumsum(0)  # "d" has the fewest lookups
        bags(torch.arange(25) + step, lengths).sum().backward()
        telemetry.append_csv(bags, tmp_path / "a.csv", time_s=float(step))
    series, left_out = table_statistics.read([tmp_path / "a.csv"])
    assert (sorted(series), left_out) == (sorted(names[:-1]), ["d"])
    command = ["statistics", str(tmp_path / "a.csv"), "--out", str(tmp_path)]
    assert cli.main(command) == 0
    assert "left out are ['d']" in capsys.readouterr().out
    _, axes = plt.subplots()
    table_statistics.figure(series).panels[0].draw(axes)
    labels = axes.get_legend_handles_labels()[1]
    assert [label.strip() for label in labels] == sorted(names[:-1])
    plt.close()


def test_the_command_draws_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_series(tmp_path / "a.csv", steps=4)
    text = (tmp_path / "a.csv").read_text()
    (tmp_path / "b.csv").write_text(text.replace("rank=0", "rank=1"))
    series = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    names, _ = table_statistics.read([Path(path) for path in series])
    assert list(names) == ["few rank=0", "few rank=1", "many rank=0", "many rank=1"]
    assert cli.main(["statistics", *series, "--out", str(tmp_path / "out")]) == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "table_statistics.png",
        "table_statistics.svg",
    }
    assert "table_statistics.png" in capsys.readouterr().out


def test_wrong_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert cli.main(["statistics", str(tmp_path / "other.csv")]) == 2
    assert "is not a series of table statistics" in capsys.readouterr().err
    assert cli.main(["statistics", str(tmp_path / "missing.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    header = ",".join(telemetry.csv_columns())
    (tmp_path / "empty.csv").write_text(f"{header}\n")
    assert cli.main(["statistics", str(tmp_path / "empty.csv")]) == 2
    assert "no snapshots" in capsys.readouterr().err
