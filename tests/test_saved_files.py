"""Files that users name - traces, plans, calibrations, exports: whole or as before, and checked."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import emblib
from emblib.sharding import checkpoints
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.planner.calibration import CPU
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ParameterSharding, Shard, ShardingType, World
from emblib.tables.durable_files import saving
from emblib.trace.file import LookupTrace, TracedFeature
from tests.sync_calls import record_syncs


def plan(rows: int) -> ShardingPlan:
    shards = (Shard(0, (0, rows), (0, 4)), Shard(1, (rows, 100), (0, 4)))
    return ShardingPlan({"": {"t": ParameterSharding(ShardingType.ROW_WISE, shards)}}, World(2, 2))


def trace(first: int) -> LookupTrace:
    ids = torch.arange(first, first + 50, dtype=torch.uint8)
    lengths = torch.tensor([20, 30], dtype=torch.uint8)
    return LookupTrace((TracedFeature("f", "t", 200, 4),), (ids,), (lengths,))


class Format(NamedTuple):
    """How content number 1 or 2 is saved, and told from a file."""

    save: Callable[[int, Path], Any]
    load: Callable[[Path], int]


def _load_trace(path: Path) -> int:
    found = LookupTrace.load(path)
    wanted = {1: trace(1), 2: trace(2)}
    return next(
        (
            n
            for n, t in wanted.items()
            if torch.equal(t.ids[0], found.ids[0])
            and torch.equal(t.lengths[0], found.lengths[0])
            and t.features == found.features
        ),
        0,
    )


def _load_export(path: Path) -> int:
    found = checkpoints.load_export(path)
    return int(found["n"]) if torch.equal(found["t"], torch.full((50,), int(found["n"]))) else 0


FORMATS = {
    "trace": Format(lambda n, path: trace(n).save(path), _load_trace),
    "plan": Format(
        lambda n, path: plan(n).save(path),
        lambda path: {plan(1).to_json(): 1, plan(2).to_json(): 2}.get(
            ShardingPlan.load(path).to_json(), 0
        ),
    ),
    "calibration": Format(
        lambda n, path: _calibration(n).save(path),
        lambda path: {_calibration(n): n for n in (1, 2)}.get(type(CPU).load(path), 0),
    ),
    "export": Format(
        lambda n, path: checkpoints.export({"n": n, "t": torch.full((50,), n)}, path, ALONE),
        _load_export,
    ),
}
ALONE = RankGroup.single()


def _calibration(n: int) -> Any:
    values = {**CPU.__dict__, "step_s": float(n)}
    return type(CPU)(**values)


@pytest.mark.parametrize("name", FORMATS)
def test_whole_or_as_before(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every call by which the file changes, the disk is full once."""
    save, load = FORMATS[name]
    path = tmp_path / "file"
    save(1, path)
    assert load(path) == 1
    for function in ("fsync", "replace"):

        def full(*args: Any, **options: Any) -> None:
            assert load(path) == 1
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patched:
            patched.setattr(os, function, full)
            with pytest.raises(OSError, match="no space left"):
                save(2, path)
        assert load(path) == 1
        assert [file.name for file in tmp_path.iterdir()] == ["file"]
    save(2, path)
    assert load(path) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_on_the_disk_before_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content reaches the disk, then the name is given, then that reaches the disk."""
    save, load = FORMATS[name]
    calls = record_syncs(monkeypatch)
    save(1, tmp_path / "file")
    size = (tmp_path / "file").stat().st_size
    assert calls == [f"file of {size}", "replace", "directory"]
    assert load(tmp_path / "file") == 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_flipped_bit_never_gives_other_content(name: str, tmp_path: Path) -> None:
    """It is an error, or in what is not content, such as white space or padding."""
    save, load = FORMATS[name]
    path = tmp_path / "file"
    save(1, path)
    data, drawn, errors = path.read_bytes(), random.Random(0), 0
    for _ in range(100):
        changed = bytearray(data)
        changed[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
        path.write_bytes(changed)
        try:
            assert load(path) == 1
        except (ValueError, RuntimeError):
            errors += 1
    assert errors > 20


@pytest.mark.parametrize("name", ["plan", "calibration"])
def test_text_that_was_edited(name: str, tmp_path: Path) -> None:
    save, load = FORMATS[name]
    path = tmp_path / "file"
    save(1, path)
    before, after = ("[0, 1]", "[0, 2]") if name == "plan" else ('"step_s": 1.0', '"step_s": 2.0')
    text = path.read_text().replace("[0, 0, 1, 0, 4]", "[0, 0, 2, 0, 4]")
    text = text.replace("[1, 1, 100, 0, 4]", "[1, 2, 100, 0, 4]").replace(before, after)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"its checksum is wrong; .* delete its entry 'crc32'"):
        load(path)
    path.write_text(text[: text.rindex(",")] + "}")
    assert load(path) == 2


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """The last one wins, and a link stays one."""
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    with saving(path) as first, saving(link) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"
    assert link.is_symlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "link"]


def test_an_error_of_what_is_saved_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(TypeError), saving(path) as file:
        torch.save([torch.ones(5), (x for x in [1])], file)
    assert path.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_traces_tell_of_damage(tmp_path: Path) -> None:
    path = tmp_path / "trace.pt"
    trace(1).save(path)
    data = path.read_bytes()
    place = data.index(bytes(range(1, 51)))
    path.write_bytes(data[:place] + b"\x7f" + data[place + 1 :])
    with pytest.raises(ValueError, match=r"trace\.pt is damaged: the checksum of its part"):
        emblib.LookupTrace.load(path)
