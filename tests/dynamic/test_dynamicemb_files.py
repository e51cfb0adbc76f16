"""DynamicEmb's files, written by hand as its format says and read back, and the other way round."""

import json
import struct
from pathlib import Path

import pytest
import torch

from emblib import DynamicEmbeddingBags, DynamicSpec, Eviction, optim
from emblib.dynamic.saving import dynamicemb_files
from emblib.dynamic.saving.dumps import DumpError
from emblib.dynamic.saving.dynamicemb import load_dynamicemb, save_dynamicemb
from emblib.dynamic.saving.dynamicemb_files import DynamicEmbTable, Layout
from emblib.dynamic.saving.entries import Entries, best_first
from tests.dynamic.entry_cases import assert_rows_tell_keys, make, row_of

ADAM = {"exp_avg": (6,), "exp_avg_sq": ()}


def numbers(path: Path, kind: str) -> list[float]:
    data = path.read_bytes()
    return list(struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data))


def theirs(directory: Path, ranks: dict[int, list[int]], ages: dict[int, int]) -> None:
    """What a run of some ranks leaves of a table "items" of dim 2 under its LRU strategy."""
    for rank, keys in ranks.items():
        end = f"rank_{rank}.world_size_{len(ranks)}"
        n = len(keys)
        (directory / f"items_emb_keys.{end}").write_bytes(struct.pack(f"<{n}q", *keys))
        values = [float(x) for key in keys for x in (key, -key)]
        (directory / f"items_emb_values.{end}").write_bytes(struct.pack(f"<{2 * n}f", *values))
        scores = [ages[key] for key in keys]
        (directory / f"items_emb_scores.{end}").write_bytes(struct.pack(f"<{n}q", *scores))


def test_their_files_of_two_ranks_are_read(tmp_path: Path) -> None:
    theirs(tmp_path, {0: [4, -6, 10], 1: [5]}, {4: 10**9, -6: 3, 10: 10**9, 5: 0})
    found = dynamicemb_files.read(tmp_path, "items", 2, {}, Layout("lru")).entries
    assert found.keys.tolist() == [4, -6, 10, 5]
    assert torch.as_tensor(found.rows["weight"]).tolist() == [[4, -4], [-6, 6], [10, -10], [5, -5]]
    assert found.stamps.tolist() == [1, 2, 1, 3], "the oldest has the least stamp"
    assert found.scores is None


def test_what_is_written_has_their_names_and_numbers(tmp_path: Path) -> None:
    entries = make(20)
    dynamicemb_files.write(
        tmp_path, "items", Layout("lru"), DynamicEmbTable(entries, {"lr": 0.1}), tick=60
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        "items_emb_keys.rank_0.world_size_1",
        "items_emb_values.rank_0.world_size_1",
        "items_emb_scores.rank_0.world_size_1",
        "items_emb_opt_values.rank_0.world_size_1",
        "items_opt_args.json",
    }
    assert numbers(tmp_path / "items_emb_keys.rank_0.world_size_1", "q") == entries.keys.tolist()
    ages = (60 - entries.stamps).tolist()
    assert numbers(tmp_path / "items_emb_scores.rank_0.world_size_1", "q") == ages
    values = numbers(tmp_path / "items_emb_values.rank_0.world_size_1", "f")
    assert values == row_of(entries.keys, 6).flatten().tolist()
    states = numbers(tmp_path / "items_emb_opt_values.rank_0.world_size_1", "f")
    assert len(states) == 20 * 7
    assert states[:7] == [*row_of(entries.keys, 6, 1)[0], row_of(entries.keys, 1, 2)[0, 0]]
    assert json.loads((tmp_path / "items_opt_args.json").read_text()) == {
        "dist_type": "roundrobin",
        "evict_strategy": "EvictStrategy.KLru",
        "lr": 0.1,
    }


@pytest.mark.parametrize("order", ["none", "lru", "lfu", "lru_lfu", "assigned"])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_there_and_back(order: str, count: int, tmp_path: Path) -> None:
    given = make(count, scored=order in ("lfu", "lru_lfu", "assigned"))
    counts = (given.keys[:7] + 1, torch.arange(min(count, 7)))
    dynamicemb_files.write(
        tmp_path, "items", Layout(order), DynamicEmbTable(given, {}, counts), tick=50
    )
    found = dynamicemb_files.read(tmp_path, "items", 6, ADAM, Layout(order))
    assert torch.equal(found.entries.keys, given.keys)
    assert_rows_tell_keys(found.entries)
    for name in ADAM:
        assert torch.equal(
            torch.as_tensor(found.entries.rows[name]), torch.as_tensor(given.rows[name])
        )
    if given.scores is not None:
        assert found.entries.scores is not None
        assert torch.equal(found.entries.scores, given.scores)
    if order in ("lru", "lru_lfu"):
        before = given.stamps[:, None] < given.stamps
        assert torch.equal(found.entries.stamps[:, None] < found.entries.stamps, before)
    assert found.counts is not None
    assert torch.equal(found.counts[0], counts[0])
    assert torch.equal(found.counts[1], counts[1])


def test_writing_again_replaces_all_of_a_table_and_nothing_else(tmp_path: Path) -> None:
    dynamicemb_files.write(tmp_path, "items_2", Layout("lru"), DynamicEmbTable(make(3)), tick=50)
    dynamicemb_files.write(tmp_path, "items", Layout("lru"), DynamicEmbTable(make(30)), tick=50)
    plain = make(5)
    plain = Entries(plain.keys, plain.stamps, None, {"weight": plain.rows["weight"]})
    dynamicemb_files.write(tmp_path, "items", Layout("lru"), DynamicEmbTable(plain), tick=50)
    assert list(dynamicemb_files.read(tmp_path, "items", 6, ADAM, Layout("lru")).entries.rows) == [
        "weight"
    ]
    assert len(dynamicemb_files.read(tmp_path, "items_2", 6, ADAM, Layout("lru")).entries) == 3


def test_tables_whose_names_differ_by_emb_stay_apart(tmp_path: Path) -> None:
    """`a_emb_opt_values` are states of `a`, and the earlier name of those of `a_emb`."""
    plain = make(7)
    plain = Entries(plain.keys, plain.stamps, None, {"weight": plain.rows["weight"]})
    given = {"a": make(20), "a_emb": plain}
    for _ in range(2):
        for name, entries in given.items():
            dynamicemb_files.stage(tmp_path, name, Layout("lru"), DynamicEmbTable(entries), tick=50)
        dynamicemb_files.commit([(tmp_path, name) for name in given], 1)
    dynamicemb_files.write(tmp_path, "a_emb", Layout("lru"), DynamicEmbTable(plain), tick=50)
    for name, entries in given.items():
        found = dynamicemb_files.read(tmp_path, name, 6, ADAM, Layout("lru")).entries
        assert found.keys.tolist() == entries.keys.tolist()
        assert list(found.rows) == list(entries.rows)


def test_a_padded_state_and_the_earlier_name_are_read(tmp_path: Path) -> None:
    theirs(tmp_path, {0: [4, 5]}, {4: 0, 5: 0})
    padded = struct.pack("<8f", 1, 0, 0, 0, 2, 0, 0, 0)
    (tmp_path / "items_opt_values.rank_0.world_size_1").write_bytes(padded)
    found = dynamicemb_files.read(tmp_path, "items", 2, {"sum": ()}, Layout("lru")).entries
    assert torch.as_tensor(found.rows["sum"]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("items_emb_values.rank_0.world_size_1", b"1234", "has 1 values for 2 keys"),
        ("items_emb_values.rank_0.world_size_1", b"123", "cut short"),
        ("items_emb_scores.rank_0.world_size_1", b"12345678", "has 1 scores for 2 keys"),
        ("items_opt_values.rank_0.world_size_1", b"1234", "load without states"),
        ("items_emb_keys.rank_1.world_size_3", b"", "is not whole"),
    ],
)
def test_what_is_cut_short_is_refused(file: str, data: bytes, message: str, tmp_path: Path) -> None:
    theirs(tmp_path, {0: [4, 5]}, {4: 0, 5: 0})
    (tmp_path / file).write_bytes(data)
    with pytest.raises(DumpError, match=message):
        dynamicemb_files.read(tmp_path, "items", 2, {"sum": ()}, Layout("lru"))


def test_a_table_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no keys of a table 'items'"):
        dynamicemb_files.read(tmp_path, "items", 2, {}, Layout("lru"))


@pytest.mark.parametrize("strategy", ["KLru", "KLfu", "KCustomized"])
@pytest.mark.parametrize("order", ["lru", "lfu", "lru_lfu", "assigned"])
def test_what_gave_way_first_there_does_so_here(strategy: str, order: str, tmp_path: Path) -> None:
    theirs(tmp_path, {0: [4, 5, 6]}, {4: 9, 5: 1, 6: 4})
    told = {"evict_strategy": f"EvictStrategy.{strategy}"}
    (tmp_path / "items_opt_args.json").write_text(json.dumps(told))
    found = dynamicemb_files.read(tmp_path, "items", 2, {}, Layout(order)).entries
    best = found.keys[best_first(found, order)].tolist()
    assert best == ([5, 6, 4] if strategy == "KLru" else [4, 6, 5])


@pytest.mark.parametrize("text", ["{", "[]"])
def test_arguments_that_are_damaged_are_refused(text: str, tmp_path: Path) -> None:
    theirs(tmp_path, {0: [4]}, {4: 0})
    (tmp_path / "items_opt_args.json").write_text(text)
    with pytest.raises(DumpError, match="is damaged"):
        dynamicemb_files.read(tmp_path, "items", 2, {}, Layout("lru"))


@pytest.mark.parametrize("optimizer", [optim.Adam(0.1), optim.PartialRowwiseAdam(0.1)])
@pytest.mark.parametrize("dim", [1, 4])
def test_states_of_tables_of_any_dim_are_loaded(
    optimizer: optim.Optimizer, dim: int, tmp_path: Path
) -> None:
    saved, loaded = (
        DynamicEmbeddingBags([DynamicSpec(64, dim, name="items")], optimizer) for _ in range(2)
    )
    saved(torch.arange(9), torch.tensor([0, 9])).sum().backward()
    save_dynamicemb(saved, tmp_path, "items")
    load_dynamicemb(loaded, tmp_path, "items")
    for name, rows in saved.state_dict().items():
        if name.startswith(("items.weight", "items.exp_avg")):
            assert torch.equal(rows, loaded.state_dict()[name])


def test_steps_go_on_from_their_scores(tmp_path: Path) -> None:
    """The files of one table have no count of steps; keys of later batches rank above theirs."""
    spec = DynamicSpec(64, 2, name="items", eviction=Eviction.STEP)
    trained, loaded = (DynamicEmbeddingBags([spec], optim.SGD(0.1)) for _ in range(2))
    for key in range(4):
        trained(torch.tensor([key]), torch.tensor([0, 1])).sum().backward()
    save_dynamicemb(trained, tmp_path, "items")
    load_dynamicemb(loaded, tmp_path, "items")
    assert loaded.eviction_score("items") == 5
