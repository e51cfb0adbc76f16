"""DynamicEmb's functions over whole models: files, scores, and what changed since a score."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from emblib import DynamicEmbeddingBags
from emblib.checkpoints import table_entries
from emblib.compat import dynamicemb_dump
from emblib.compat.dynamicemb import (
    BatchedDynamicEmbeddingTablesV2,
    DynamicEmbDump,
    DynamicEmbLoad,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    EmbOptimType,
    FrequencyAdmissionStrategy,
    KVCounter,
    get_score,
    incremental_dump,
    set_score,
)
from emblib.compat.dynamicemb_functions import arguments_in_dumps
from emblib.dynamic.saving import dynamicemb_files
from emblib.dynamic.saving.dumps import DumpError
from emblib.sharding.ranks import RankGroup
from tests.compat.dynamicemb_cases import keys_of, look_up, one_table, options, rows_of
from tests.sharding import worlds

Score = DynamicEmbScoreStrategy


class Model(nn.Module):
    """Two modules of tables within others, and something else."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.over = nn.Linear(4, 1)
        self.sparse = nn.Module()
        self.sparse.users = one_table(table_names=["u"], **changes)
        self.sparse.items = one_table(table_names=["i"], **changes)


def train(module: BatchedDynamicEmbeddingTablesV2, ids: Any) -> None:
    rows = look_up(module, ids)
    rows.backward(torch.arange(rows.numel()).view_as(rows) / 16)


def trained(**changes: Any) -> Model:
    model = Model(**changes)
    for step in range(4):
        train(model.sparse.users, [step, -step, 7])
        train(model.sparse.items, [100 + step, 7])
    return model


def numbers(path: Path, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype)


def test_a_dump_has_their_files(tmp_path: Path) -> None:
    """Raw numbers by rank, and what the optimizer is; rowwise Adagrad has one number per row."""
    model = trained(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, eps=0.25)
    DynamicEmbDump(str(tmp_path), model, optim=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model.sparse.items",
        "model.sparse.users",
    ]
    folder = tmp_path / "model.sparse.users"
    part = "rank_0.world_size_1"
    assert sorted(p.name for p in folder.iterdir()) == [
        *(f"u_emb_{kind}.{part}" for kind in ("keys", "opt_values", "scores", "values")),
        "u_opt_args.json",
    ]
    keys = numbers(folder / f"u_emb_keys.{part}", torch.int64)
    assert sorted(keys.tolist()) == keys_of(model.sparse.users)
    rows = numbers(folder / f"u_emb_values.{part}", torch.float32).view(-1, 4)
    assert torch.equal(rows, rows_of(model.sparse.users, keys))
    ages = numbers(folder / f"u_emb_scores.{part}", torch.int64)
    assert dict(zip(keys.tolist(), ages.tolist(), strict=True)) == {
        0: 3,
        1: 2,
        -1: 2,
        2: 1,
        -2: 1,
        3: 0,
        -3: 0,
        7: 0,
    }
    assert numbers(folder / f"u_emb_opt_values.{part}", torch.float32).numel() == keys.numel()
    saved = json.loads((folder / "u_opt_args.json").read_text())
    assert saved.pop("emblib_dump")["tables"] == ["model.sparse.users/u", "model.sparse.items/i"]
    assert saved == {
        "opt_type": "exact_row_wise_adagrad",
        "lr": 0.01,
        "eps": 0.25,
        "initial_accumulator_value": 0.0,
        "evict_strategy": "EvictStrategy.KLru",
        "dist_type": "roundrobin",
    }


@pytest.mark.parametrize("kind", [EmbOptimType.ADAM, EmbOptimType.EXACT_ADAGRAD])
def test_training_goes_on_from_a_dump(kind: EmbOptimType, tmp_path: Path) -> None:
    """In a model that began differently and whose tables are larger."""
    arguments: dict[str, Any] = {"optimizer": kind, "eps": 1e-3}
    if kind is EmbOptimType.ADAM:
        arguments |= {"weight_decay": 0.1, "beta1": 0.5}
    first = trained(learning_rate=0.25, **arguments)
    DynamicEmbDump(str(tmp_path), first, optim=True)
    second = Model(optimizer=kind, max_capacity=640)
    DynamicEmbLoad(str(tmp_path), second, optim=True)
    for model in (first, second):
        train(model.sparse.users, [7, 1, 50])
        train(model.sparse.items, [7, 51])
    for a, b in zip(first.sparse.children(), second.sparse.children(), strict=True):
        assert keys_of(a) == keys_of(b)
        assert_close(rows_of(a, keys_of(a)), rows_of(b, keys_of(a)))


def test_states_are_loaded_if_they_are_asked_for(tmp_path: Path) -> None:
    first = trained(optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=0.25)
    DynamicEmbDump(str(tmp_path), first, optim=True)
    second = Model(optimizer=EmbOptimType.EXACT_ADAGRAD, initial_accumulator_value=2.0)
    DynamicEmbLoad(str(tmp_path), second)
    users = second.sparse.users
    assert keys_of(users) == keys_of(first.sparse.users)
    slots = users.bags.find(0, torch.tensor([7]))
    assert users.bags.table_rows(0)["sum"][slots].tolist() == [[2.0] * 4]
    assert users.bags.learning_rate == 0.01


def test_counts_of_admission_go_along(tmp_path: Path) -> None:
    def model() -> Model:
        return Model(admit_strategy=FrequencyAdmissionStrategy(3), admission_counter=KVCounter(64))

    first, second, third = model(), model(), model()
    look_up(first.sparse.users, [5, 5, 6])
    DynamicEmbDump(str(tmp_path), first, counter=True)
    names = {p.name for p in (tmp_path / "model.sparse.users").iterdir()}
    assert {f"u_counter_{k}.rank_0.world_size_1" for k in ("keys", "frequencies")} <= names
    DynamicEmbLoad(str(tmp_path), second, counter=True)
    DynamicEmbLoad(str(tmp_path), third)
    for loaded, there in ((second, [5]), (third, [])):
        look_up(loaded.sparse.users, [5, 6])
        assert keys_of(loaded.sparse.users) == there


def test_single_tables_may_be_dumped_and_loaded(tmp_path: Path) -> None:
    """Modules are called by name, as DynamicEmb does, or by path."""
    first, second = trained(), Model()
    DynamicEmbDump(str(tmp_path), first, {"users": ["u"]})
    assert [p.name for p in tmp_path.iterdir()] == ["model.sparse.users"]
    DynamicEmbLoad(str(tmp_path), second, {"model.sparse.users": ["u"]})
    assert keys_of(second.sparse.users) == keys_of(first.sparse.users)
    assert keys_of(second.sparse.items) == []
    with pytest.raises(ValueError, match=r"has no tables \['x'\]"):
        DynamicEmbLoad(str(tmp_path), second, {"users": ["x"]})
    for call in (DynamicEmbDump, DynamicEmbLoad):
        with pytest.raises(ValueError, match=r"no modules \['user'\] with dynamic tables"):
            call(str(tmp_path), second, {"user": ["u"]})


def test_dumps_of_continuous_tables_have_whole_keys(tmp_path: Path) -> None:
    first, second = trained(dist_type="continuous"), Model(dist_type="continuous")
    DynamicEmbDump(str(tmp_path), first)
    DynamicEmbLoad(str(tmp_path), second)
    assert keys_of(second.sparse.users) == keys_of(first.sparse.users)


def test_dumps_are_not_written_over(tmp_path: Path) -> None:
    model = trained()
    DynamicEmbDump(str(tmp_path), model)
    with pytest.raises(FileExistsError, match="allow_overwrite=True"):
        DynamicEmbDump(str(tmp_path), model)
    with pytest.raises(TypeError, match="allow_overwrite must be True or False, got 'no'"):
        DynamicEmbDump(str(tmp_path), model, allow_overwrite="no")  # type: ignore[arg-type]
    train(model.sparse.users, [20])
    DynamicEmbDump(str(tmp_path), model, allow_overwrite=True)
    second = Model()
    DynamicEmbLoad(str(tmp_path), second)
    assert 20 in keys_of(second.sparse.users)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="is not a directory"):
        DynamicEmbDump(str(tmp_path / "file"), model)


def test_dumps_of_other_tables_are_refused(tmp_path: Path) -> None:
    """Before the first table is changed."""
    DynamicEmbDump(str(tmp_path), trained(optimizer=EmbOptimType.ADAM), optim=True)
    wrong = trained(score_strategy=Score.LFU)
    before = keys_of(wrong.sparse.users)
    with pytest.raises(ValueError, match=r"evict_strategy of table 'u' is EvictStrategy.KLru"):
        DynamicEmbLoad(str(tmp_path), wrong)
    other = trained(optimizer=EmbOptimType.EXACT_ADAGRAD)
    with pytest.raises(ValueError, match=r"opt_type of table 'u' is adam .* or with optim=False"):
        DynamicEmbLoad(str(tmp_path), other, optim=True)
    assert keys_of(wrong.sparse.users) == keys_of(other.sparse.users) == before
    for folder in tmp_path.iterdir():
        (file,) = folder.glob("*.json")
        file.write_text(file.read_text().replace("roundrobin", "continuous"))
    with pytest.raises(ValueError, match="remainders of keys"):
        DynamicEmbLoad(str(tmp_path), trained())


def test_files_of_several_ranks_are_joined(tmp_path: Path) -> None:
    """As four ranks of theirs write them: the owner of a key is its remainder."""
    folder = tmp_path / "model"
    folder.mkdir()
    for rank in range(4):
        keys = torch.arange(rank, 32, 4)
        part = f"rank_{rank}.world_size_4"
        for name, values in (
            ("keys", keys),
            ("values", keys[:, None].expand(-1, 4).float() / 2),
            ("scores", 1000 - keys),
        ):
            data = bytes(values.contiguous().view(torch.uint8).flatten().tolist())
            (folder / f"t0_emb_{name}.{part}").write_bytes(data)
    module = one_table()
    DynamicEmbLoad(str(tmp_path), module)
    assert_close(rows_of(module, range(32))[:, 0], torch.arange(32) / 2)
    look_up(module, [100, 101])
    assert 0 not in keys_of(module)  # the oldest
    assert 1 not in keys_of(module)


def test_steps_go_on_after_a_reload(tmp_path: Path) -> None:
    first, second = trained(score_strategy=Score.STEP), Model(score_strategy=Score.STEP)
    DynamicEmbDump(str(tmp_path), first)
    DynamicEmbLoad(str(tmp_path), second)
    assert (
        get_score(second)
        == get_score(first)
        == {
            "model.sparse.users": {"u": 5},
            "model.sparse.items": {"i": 5},
        }
    )


# Ranks


def _model(**changes: Any) -> Model:
    return Model(optimizer=EmbOptimType.EXACT_ADAGRAD, max_capacity=128, **changes)


def _of_rank(ranks: RankGroup, keys: Any) -> list[int]:
    """The keys that DynamicEmb's "roundrobin" sends to a rank."""
    return [key for key in keys if key % 2**64 % ranks.size == ranks.rank]


def _group(ranks: RankGroup) -> Any:
    """Their group; None where they are all processes, as it means."""
    return None if ranks.size in (1, worlds.RANKS) else ranks.group


def _content(model: Model) -> dict[str, list[Any]]:
    """Keys, rows and optimizer states of both tables."""
    content = {}
    for name, module in model.sparse.named_children():
        keys = keys_of(module)
        slots = module.bags.find(0, torch.tensor(keys, dtype=torch.int64))
        rows = module.bags.table_rows(0)
        content[name] = [keys, *(rows[kind][slots].tolist() for kind in ("weight", "sum"))]
    return content


def dumps(ranks: RankGroup, path: str, rounds: int) -> dict[str, list[Any]]:
    """Dump over the same path so often; what the last dump had of this rank."""
    model = _model(learning_rate=0.25)
    for number in range(rounds):
        train(model.sparse.users, _of_rank(ranks, range(-20, 20 + number)))
        train(model.sparse.items, _of_rank(ranks, range(100, 120 + number)))
        DynamicEmbDump(path, model, optim=True, pg=_group(ranks), allow_overwrite=number > 0)
    found, _ = incremental_dump(model, 0, _group(ranks))
    assert found["model.sparse.users"]["u"][0].tolist() == list(range(-20, 20 + rounds - 1))
    return _content(model)


def loads(ranks: RankGroup, path: str) -> dict[str, list[Any]]:
    model = _model()
    train(model.sparse.users, [500 + ranks.rank])
    DynamicEmbLoad(path, model, optim=True, pg=_group(ranks))
    assert model.sparse.users.bags.learning_rate == 0.25
    return _content(model)


def refuses(ranks: RankGroup, path: str, message: str) -> None:
    """No rank changes any table."""
    model = _model()
    train(model.sparse.users, [500])
    train(model.sparse.items, [501])
    before = _content(model)
    with pytest.raises((DumpError, RuntimeError), match=message):
        DynamicEmbLoad(path, model, optim=True, pg=_group(ranks))
    assert _content(model) == before
    assert model.sparse.users.bags.learning_rate == 0.01


def names_what_only_one_has(ranks: RankGroup, path: str) -> None:
    """Every rank raises, where the others would wait for the one with the wrong name."""
    names = {"users": ["u" if ranks.rank == 0 else "x"]}
    error, message = (RuntimeError, "rank 1") if ranks.rank == 0 else (ValueError, "no tables")
    for function in (DynamicEmbDump, DynamicEmbLoad):
        with pytest.raises(error, match=message):
            function(path, _model(), names, pg=_group(ranks))


def test_a_wrong_name_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    worlds.run(2, names_what_only_one_has, str(tmp_path / "dump"))
    assert not (tmp_path / "dump").exists()


def test_a_path_in_the_home_directory_is_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    DynamicEmbDump("~/dump", trained())
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]
    with pytest.raises(FileExistsError, match="has files in it"):
        DynamicEmbDump("~/dump", trained())
    DynamicEmbLoad("~/dump", trained())


@pytest.mark.parametrize("size", [2, worlds.RANKS])
def test_every_rank_has_its_files(size: int, tmp_path: Path) -> None:
    """Also where a dump is written over; any number of ranks finds every key once."""
    path = str(tmp_path / "dump")
    dumped = worlds.run(size, dumps, path, 2)
    folder = tmp_path / "dump" / "model.sparse.users"
    assert sorted(p.name for p in folder.iterdir()) == [
        *(
            f"u_emb_{kind}.rank_{rank}.world_size_{size}"
            for kind in ("keys", "opt_values", "scores", "values")
            for rank in range(size)
        ),
        "u_opt_args.json",
    ]
    assert worlds.run(size, loads, path) == dumped
    wanted = {
        name: {key: rest for part in dumped for key, *rest in zip(*part[name], strict=True)}
        for name in ("users", "items")
    }
    for parts in (worlds.run(3, loads, path), [loads(RankGroup.single(), path)]):
        for name, rows in wanted.items():
            found = {key: rest for part in parts for key, *rest in zip(*part[name], strict=True)}
            assert found == rows
            assert sum(len(part[name][0]) for part in parts) == len(rows)
        for rank, part in enumerate(parts):
            assert {key % 2**64 % len(parts) for key in part["users"][0]} == {rank}


def test_what_one_rank_lacks_no_rank_loads(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    worlds.run(2, dumps, str(path), 1)
    for item in ("opt_values", "scores", "values", "keys"):
        lacking = path / "model.sparse.items" / f"i_emb_{item}.rank_1.world_size_2"
        data = lacking.read_bytes()
        lacking.unlink()
        message = "the dump is not whole" if item == "keys" else rf"{lacking.name} is missing"
        worlds.run(2, refuses, str(path), message)
        lacking.write_bytes(data[:-8])
        worlds.run(2, refuses, str(path), "cut short|load without states")
        lacking.write_bytes(data)
    worlds.run(2, loads, str(path))


def test_a_damaged_table_leaves_all_as_they_are(tmp_path: Path) -> None:
    dumps(RankGroup.single(), str(tmp_path), 1)
    values = tmp_path / "model.sparse.items" / "i_emb_values.rank_0.world_size_1"
    values.write_bytes(values.read_bytes()[:-4])
    refuses(RankGroup.single(), str(tmp_path), "has 79 values for 20 keys of 'i'")
    values.unlink()
    refuses(RankGroup.single(), str(tmp_path), "has 0 values for 20 keys of 'i'")


def fails_to_write_over(ranks: RankGroup, path: str, before: list[Any]) -> None:
    """The disk of the last rank is full once it has written some files."""
    model = _model()
    train(model.sparse.users, [7])
    write = dynamicemb_files._write_rows

    def full(path: Path, *arguments: Any) -> None:
        if ranks.rank == ranks.size - 1 and "i_emb_opt_values" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *arguments)

    discard, discarded = dynamicemb_files.discard, []

    def counts(*table: Any) -> None:
        discarded.append(table)
        discard(*table)

    dynamicemb_files._write_rows, dynamicemb_files.discard = full, counts
    try:
        with pytest.raises((OSError, RuntimeError), match="No space left on device"):
            DynamicEmbDump(path, model, optim=True, pg=_group(ranks), allow_overwrite=True)
    finally:
        dynamicemb_files._write_rows, dynamicemb_files.discard = write, discard
    assert loads(ranks, path) == before[ranks.rank]
    assert bool(discarded) == (ranks.rank == 0)  # others do not know whether files are moved


def test_a_full_disk_leaves_the_old_dump(tmp_path: Path) -> None:
    alone, by_two = tmp_path / "1", tmp_path / "2"
    one, two = [dumps(RankGroup.single(), str(alone), 1)], worlds.run(2, dumps, str(by_two), 1)
    files = sorted(tmp_path.rglob("*"))
    fails_to_write_over(RankGroup.single(), str(alone), one)
    worlds.run(2, fails_to_write_over, str(by_two), two)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_rename_that_fails_leaves_the_old_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dumps(RankGroup.single(), str(tmp_path), 1)
    files, rename = sorted(tmp_path.rglob("*")), os.rename

    def fails(source: Path, goal: Path) -> None:
        if goal.name.startswith("u_emb_values") and source.parent.name == ".u.new":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, goal)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="Input/output error"):
        DynamicEmbDump(str(tmp_path), Model(), allow_overwrite=True)
    monkeypatch.undo()
    assert sorted(tmp_path.rglob("*")) == files
    assert loads(RankGroup.single(), str(tmp_path)) == before


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["before", "after"])
def test_tables_are_replaced_together(
    when: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file cannot be moved, or is the last one before an interrupt."""
    dumps(RankGroup.single(), str(tmp_path), 1)
    next(tmp_path.rglob("u_emb_opt_values*")).unlink()  # the new dump has a file more
    before = loads(RankGroup.single(), str(tmp_path))
    files, rename, model = contents(tmp_path), os.rename, _model(learning_rate=0.25)
    train(model.sparse.items, [3])
    moves, failing = 0, -1

    def fails(source: Path, goal: Path) -> None:
        nonlocal moves
        moves += 1
        if moves == failing and when == "before":
            raise error
        rename(source, goal)
        if moves == failing and when == "after":
            raise error

    monkeypatch.setattr(os, "rename", fails)
    for number in range(1, 1 + 4 + 5 + 2 * 5):  # out of two tables and in
        moves, failing = 0, number
        with pytest.raises(error):
            DynamicEmbDump(str(tmp_path), model, optim=True, allow_overwrite=True)
        assert contents(tmp_path) == files
    assert loads(RankGroup.single(), str(tmp_path)) == before
    moves, failing = 0, -1
    DynamicEmbDump(str(tmp_path), model, optim=True, allow_overwrite=True)
    assert moves == 4 + 5 + 2 * 5
    assert loads(RankGroup.single(), str(tmp_path)) == _content(model)


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() if p.is_file() else b"" for p in path.rglob("*")
    }


def test_a_kill_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every move, what a process that is killed there leaves is looked at."""
    before = dumps(RankGroup.single(), str(tmp_path / "dump"), 1)
    rename, model, left = os.rename, _model(learning_rate=0.25), []
    train(model.sparse.users, range(30))
    train(model.sparse.items, range(110, 130))

    def copies(source: Path, goal: Path) -> None:
        left.append(tmp_path / str(len(left)))
        shutil.copytree(tmp_path / "dump", left[-1])
        rename(source, goal)

    monkeypatch.setattr(os, "rename", copies)
    DynamicEmbDump(str(tmp_path / "dump"), model, optim=True, allow_overwrite=True)
    monkeypatch.undo()
    assert loads(RankGroup.single(), str(left[0])) == before
    for path in left[1:]:
        refuses(RankGroup.single(), str(path), r"has no keys of a table .* cut short")
    assert loads(RankGroup.single(), str(tmp_path / "dump")) == _content(model)


def test_files_of_two_dumps_are_refused(tmp_path: Path) -> None:
    """Tables that one call wrote are loaded with each other, or one at a time."""
    first, second = tmp_path / "1", tmp_path / "2"
    dumps(RankGroup.single(), str(first), 1)
    dumps(RankGroup.single(), str(second), 2)
    shutil.copytree(second / "model.sparse.items", first / "model.sparse.items", dirs_exist_ok=True)
    refuses(RankGroup.single(), str(first), r"u_opt_args.json and .* are of different dumps")
    model = _model()
    for names in ({"users": ["u"]}, {"items": ["i"]}):
        DynamicEmbLoad(str(first), model, names)
    assert len(keys_of(model.sparse.items)) == 21
    file = first / "model.sparse.items" / "i_opt_args.json"
    saved = json.loads(file.read_text())
    for entry, message in (
        (3, "'emblib_dump' must be dict"),
        ({"tables": []}, "lacks 'id'"),
        ({"id": "1"}, "lacks 'tables'"),
        ({"id": "1", "tables": [["i"]]}, "must be names"),
    ):
        file.write_text(json.dumps({**saved, "emblib_dump": entry}))
        refuses(RankGroup.single(), str(first), message)
    del saved["emblib_dump"]  # as DynamicEmb writes it, but next to the table of another dump
    file.write_text(json.dumps(saved))
    refuses(RankGroup.single(), str(first), "are of different dumps")


def test_tables_may_be_dumped_one_after_the_other(tmp_path: Path) -> None:
    """Also one of them over a dump of all, and all without an id, as DynamicEmb has it."""
    model = _model(learning_rate=0.25)
    for number in range(2):
        for names in ({"users": ["u"]}, {"items": ["i"]}, None)[number:]:
            train(model.sparse.users, [number])
            DynamicEmbDump(str(tmp_path), model, names, optim=True, allow_overwrite=True)
            if names != {"users": ["u"]}:
                assert loads(RankGroup.single(), str(tmp_path))["items"] == _content(model)["items"]
    train(model.sparse.items, [77])
    DynamicEmbDump(str(tmp_path), model, {"items": ["i"]}, optim=True, allow_overwrite=True)
    assert loads(RankGroup.single(), str(tmp_path)) == _content(model)
    for file in tmp_path.rglob("*.json"):
        saved = json.loads(file.read_text())
        del saved["emblib_dump"]
        file.write_text(json.dumps(saved))
    assert loads(RankGroup.single(), str(tmp_path)) == _content(model)


@pytest.mark.parametrize("missing", [["weight_decay"], ["beta1", "beta2"], ["eps", "lr", "iters"]])
def test_missing_numbers_stay_as_they_are(missing: list[str], tmp_path: Path) -> None:
    DynamicEmbDump(str(tmp_path), trained(optimizer=EmbOptimType.ADAM), optim=True)
    for file in tmp_path.glob("*/*_opt_args.json"):
        saved = json.loads(file.read_text())
        file.write_text(json.dumps({name: saved[name] for name in saved.keys() - set(missing)}))
    own = {"learning_rate": 0.5, "eps": 0.25, "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.125}
    model = Model(optimizer=EmbOptimType.ADAM, **own)
    before = arguments_in_dumps(model.sparse.users.bags, 0, options())
    DynamicEmbLoad(str(tmp_path), model, optim=True)
    after = arguments_in_dumps(model.sparse.users.bags, 0, options())
    assert {name for name in after if after[name] == before[name]} >= set(missing)
    assert len({name for name in after if after[name] != before[name]}) == 6 - len(missing)


def test_another_initial_state_than_in_the_dump_warns(tmp_path: Path) -> None:
    arguments = {"optimizer": EmbOptimType.EXACT_ADAGRAD}
    DynamicEmbDump(str(tmp_path), trained(initial_accumulator_value=0.5, **arguments), optim=True)
    with pytest.warns(UserWarning, match=r"of table 'u' is 0.5 in the dump and stays 0.0") as told:
        DynamicEmbLoad(str(tmp_path), Model(**arguments), optim=True)
    assert all(warning.filename == __file__ for warning in told)
    DynamicEmbLoad(str(tmp_path), Model(**arguments))
    DynamicEmbLoad(str(tmp_path), Model(initial_accumulator_value=0.5, **arguments), optim=True)


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"lr": None}, "'lr'"),
    ({"lr": "abc"}, "'lr'"),
    ({"lr": -1}, "'lr'"),
    ({"lr": 10**400}, "'lr'"),
    ({"lr": float("nan")}, "'lr'"),
    ({"lr": True}, "'lr'"),
    ({"eps": [1]}, "'eps'"),
    ({"eps": -1.0}, "'eps'"),
    ({"iters": -5}, "'iters'"),
    ({"iters": None}, "'iters'"),
    ({"iters": 1.5}, "'iters'"),
    ({"iters": 2**60}, "'iters'"),
    ({"beta1": 2.0}, "'beta1'"),
    ({"beta1": ...}, "'beta1'"),
    ({"beta2": ...}, "'beta2'"),
    ({"weight_decay": -1}, "'weight_decay'"),
    ({"weight_decay": {}}, "'weight_decay'"),
    ({"step_score": "x"}, "'step_score'"),
    ({"step_score": 2**62}, "'step_score'"),
    ({"dist_type": 5}, "'dist_type'"),
    ({"opt_type": None}, "'opt_type'"),
    ({"evict_strategy": 7}, "'evict_strategy'"),
]


@pytest.mark.parametrize(("damage", "field"), DAMAGED, ids=[str(d)[:40] for d, _ in DAMAGED])
def test_damaged_numbers_leave_all_as_they_are(
    damage: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """Those of the last table, whose file and entry the error names."""
    arguments: dict[str, Any] = {"optimizer": EmbOptimType.ADAM, "score_strategy": Score.STEP}
    DynamicEmbDump(str(tmp_path), trained(learning_rate=0.5, **arguments), optim=True)
    file = tmp_path / "model.sparse.items" / "i_opt_args.json"
    saved = {**json.loads(file.read_text()), **damage}
    file.write_text(json.dumps({key: value for key, value in saved.items() if value is not ...}))
    model = Model(**arguments)
    train(model.sparse.users, [500])
    states = {key: value.clone() for key, value in model.state_dict().items()}
    rules = [module.bags.optimizer for module in model.sparse.children()]
    with pytest.raises(DumpError, match=rf"i_opt_args.json is malformed: .*{field}"):
        DynamicEmbLoad(str(tmp_path), model, optim=True)
    assert [module.bags.optimizer for module in model.sparse.children()] == rules
    for key, value in model.state_dict().items():
        assert torch.equal(value, states[key]), key
    if field != "'step_score'" and field[1:-1] not in ("dist_type", "evict_strategy"):
        DynamicEmbLoad(str(tmp_path), model)  # what is not wanted may be whatever it is


def fails_to_take(ranks: RankGroup, path: str) -> None:
    """The last rank runs out of memory when it writes to its second table."""
    model = _model()
    items, replace = model.sparse.items.bags, dynamicemb_dump.set_dynamicemb

    def full(bags: DynamicEmbeddingBags, *arguments: Any) -> Any:
        if bags is items and ranks.rank == ranks.size - 1:
            raise MemoryError("no memory")
        return replace(bags, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamicemb_dump, "set_dynamicemb", full)
        _fails_to_load(ranks, path, model)


def _fails_to_load(ranks: RankGroup, path: str, model: nn.Module) -> None:
    with pytest.raises((MemoryError, RuntimeError), match=r"no memory") as told:
        DynamicEmbLoad(path, model, pg=_group(ranks))
    if ranks.rank < ranks.size - 1:
        assert "rank 1 failed, some tables were changed already: load again" in str(told.value)


def test_what_one_rank_cannot_write_all_ranks_are_told(tmp_path: Path) -> None:
    worlds.run(2, dumps, str(tmp_path), 1)
    worlds.run(2, fails_to_take, str(tmp_path))


def test_ranks_that_dump_other_tables_are_told(tmp_path: Path) -> None:
    with pytest.raises(worlds.RankError, match="must give the same path and tables"):
        worlds.run(2, dumps_by_rank, str(tmp_path))
    with pytest.raises(TypeError, match="process group"):
        DynamicEmbDump(str(tmp_path), trained(), pg="group")


def dumps_by_rank(ranks: RankGroup, path: str) -> None:
    DynamicEmbDump(f"{path}/{ranks.rank}", Model(), pg=_group(ranks))


@pytest.mark.parametrize("first", [Score.TIMESTAMP, Score.LFU])
def test_columns_of_scores_are_in_the_order_of_the_strategy(first: Score, tmp_path: Path) -> None:
    second = Score.LFU if first is Score.TIMESTAMP else Score.TIMESTAMP
    strategy = (first, second)
    model = Model(score_strategy=strategy)
    for ids in ([1, 2, 2], [3], [4]):
        look_up(model.sparse.users, ids)
    DynamicEmbDump(str(tmp_path), model)
    folder = tmp_path / "model.sparse.users"
    keys = numbers(folder / "u_emb_keys.rank_0.world_size_1", torch.int64)
    scores = numbers(folder / "u_emb_scores.rank_0.world_size_1", torch.int64).view(-1, 2)
    uses, time = scores.unbind(1) if first is Score.LFU else scores.flip(1).unbind(1)
    assert dict(zip(keys.tolist(), uses.tolist(), strict=True)) == {1: 1, 2: 2, 3: 1, 4: 1}
    assert dict(zip(keys.tolist(), time.tolist(), strict=True)) == {1: 1, 2: 1, 3: 2, 4: 3}
    other = Model(score_strategy=strategy)
    DynamicEmbLoad(str(tmp_path), other)
    for a, b in zip(model.sparse.children(), other.sparse.children(), strict=True):
        ours, theirs = table_entries(a.bags, 0).sorted(), table_entries(b.bags, 0).sorted()
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.scores, theirs.scores)
        assert torch.equal(ours.stamps, theirs.stamps)


def test_a_model_without_tables_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no BatchedDynamicEmbeddingTablesV2"):
        DynamicEmbDump(str(tmp_path), nn.Linear(2, 2))
    assert get_score(nn.Linear(2, 2)) is None


# Scores


def test_scores_of_a_model() -> None:
    model = Model(score_strategy=Score.CUSTOMIZED)
    assert get_score(model) == {"model.sparse.users": {}, "model.sparse.items": {}}
    set_score(model, 3)
    set_score(model, {"users": {"u": 5}})
    set_score(model, {"model.sparse.items": {"i": 7}})
    assert get_score(model) == {"model.sparse.users": {"u": 5}, "model.sparse.items": {"i": 7}}
    with pytest.raises(ValueError, match=r"has no modules \['sparse'\]"):
        set_score(model, {"sparse": {"u": 1}})
    with pytest.raises(TypeError, match="must be an int, or ints by module"):
        set_score(model, "5")


SINCE: list[tuple[Any, list[int]]] = [
    (Score.TIMESTAMP, [2, 3]),
    (Score.STEP, [2, 3]),
    ((Score.TIMESTAMP, Score.LFU), [2, 3]),
    (Score.NO_EVICTION, [2, 3]),
]


@pytest.mark.parametrize(("strategy", "want"), SINCE, ids=[str(s) for s, _ in SINCE])
def test_what_was_used_since(strategy: Any, want: list[int]) -> None:
    """The scores that one call returns are the thresholds of the next."""
    model = nn.ModuleDict({"t": one_table(score_strategy=strategy, table_names=["a"])})
    train(model["t"], [1, 2])
    found, scores = incremental_dump(model, 0)
    assert found["model.t"]["a"][0].tolist() == [1, 2]
    train(model["t"], [3, 2])
    found, later = incremental_dump(model, scores)
    keys, rows = found["model.t"]["a"]
    assert keys.tolist() == want
    assert torch.equal(rows, rows_of(model["t"], want))
    found, _ = incremental_dump(model, later)
    assert found["model.t"]["a"][0].tolist() == []


def test_scores_that_are_no_times_are_compared_as_they_are() -> None:
    used_often = one_table(score_strategy=Score.LFU, table_names=["a"])
    look_up(used_often, [1, 2, 2, 3, 3, 3])
    found, scores = incremental_dump(used_often, 2)
    assert found["model"]["a"][0].tolist() == [2, 3]
    assert scores == {"model": {"a": 1}}
    given = one_table(score_strategy=Score.CUSTOMIZED, table_names=["a"])
    for score in (10, 20):
        given.set_score({"a": score})
        look_up(given, [score])
    found, scores = incremental_dump(given, {"model": {"a": 15}})
    assert found["model"]["a"][0].tolist() == [20]
    assert scores == {"model": {"a": 20}}


def test_pooled_tables_are_dumped_too() -> None:
    module = BatchedDynamicEmbeddingTablesV2(
        [options(), options(dim=3)], pooling_mode=DynamicEmbPoolingMode.SUM
    )
    module(torch.tensor([4, 4]), torch.arange(3))
    found, _ = module.incremental_dump({"t1": 0})
    assert found["t1"][1].tolist() == [[4.0, 4.0, 4.0]]
    with pytest.raises(ValueError, match="no table is called 'x'"):
        module.incremental_dump({"x": 0})


def test_requests_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    model = Model(score_strategy=Score.CUSTOMIZED)
    with pytest.raises(TypeError, match=r"by module, a dict of lists, got \['u'\]"):
        DynamicEmbDump(str(tmp_path), model, ["u"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"table_names\['model.sparse.users'\] must be"):
        DynamicEmbDump(str(tmp_path), model, {"users": "u"})
    for call in (DynamicEmbDump, DynamicEmbLoad):
        with pytest.raises(TypeError, match="optim must be True or False, got 'no'"):
            call(str(tmp_path), model, optim="no")
    with pytest.raises(TypeError, match="table_names must be a sequence"):
        model.sparse.users.dump(str(tmp_path), table_names="users")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="scores must be ints by name of a table, got 5"):
        model.sparse.users.set_score(5)
