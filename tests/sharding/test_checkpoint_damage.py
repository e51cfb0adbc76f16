"""Checkpoints that are damaged, or that name code: refused, and nothing of them runs."""

import itertools
import os
import pickle
import random
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from emblib.sharding import checkpoints
from emblib.sharding.checkpoints import CheckpointError, checksums
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import Shard
from tests.sharding import worlds
from tests.sharding.checkpoint_worlds import assert_is, numbers, spread

ALONE = RankGroup.single()


class Runs:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path, function: Callable[..., Any] = os.mkdir) -> None:
        self.path, self.function = path, function

    def __reduce__(self) -> Any:
        return self.function, (str(self.path),)


@dataclass(frozen=True)
class Choice:
    """A value of a class of its own; enums are pickled in other ways by Python 3.11.2."""

    number: int


def content() -> dict[str, Any]:
    return {"a": numbers(20, 4), "b": numbers(30), "deep": {"step": 7, "names": ["x", "y"]}}


def room() -> dict[str, Any]:
    return {"a": torch.zeros(20, 4), "b": torch.zeros(30), "deep": {"step": 0, "names": []}}


def is_loaded(state: dict[str, Any]) -> bool:
    wanted = content()
    return (
        torch.equal(state["a"], wanted["a"])
        and torch.equal(state["b"], wanted["b"])
        and state["deep"] == wanted["deep"]
    )


def flipped(path: Path, count: int) -> Iterator[int]:
    """Flip one bit of a file after the other, `count` in all; afterwards the file is as before."""
    data = path.read_bytes()
    drawn = random.Random(0)
    for place in sorted(drawn.sample(range(len(data)), min(count, len(data)))):
        changed = bytearray(data)
        changed[place] ^= 1 << drawn.randrange(8)
        path.write_bytes(changed)
        yield place
    path.write_bytes(data)


def error_of_load(path: Path) -> str:
    """What a load says, or nothing."""
    try:
        checkpoints.load(room(), path, ALONE)
    except CheckpointError as error:
        return str(error)
    return ""


# Code in checkpoints


@pytest.mark.parametrize("function", [os.mkdir, eval, torch.load, pickle.loads])
def test_metadata_that_names_code_is_refused(function: Callable[..., Any], tmp_path: Path) -> None:
    checkpoints.save(content(), tmp_path / "c", ALONE)
    metadata = tmp_path / "c" / ".metadata"
    metadata.write_bytes(pickle.dumps(Runs(tmp_path / "ran", function)))
    named = f"{function.__module__}.{function.__name__}"
    with pytest.raises(CheckpointError, match=rf"\.metadata names {named}, which metadata"):
        checkpoints.load(room(), tmp_path / "c", ALONE)
    assert not (tmp_path / "ran").exists()


def test_metadata_with_checksums_that_names_code_is_refused(tmp_path: Path) -> None:
    checkpoints.save(content(), tmp_path / "c", ALONE)
    metadata = tmp_path / "c" / ".metadata"
    _, sums = checksums.split_footer(metadata.read_bytes(), metadata)
    assert sums is not None
    metadata.write_bytes(checksums.add_footer(pickle.dumps(Runs(tmp_path / "ran")), sums))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir"):
        checkpoints.load(room(), tmp_path / "c", ALONE)
    assert not (tmp_path / "ran").exists()


def test_files_outside_the_directory_are_refused(tmp_path: Path) -> None:
    checkpoints.save(content(), tmp_path / "c", ALONE)
    metadata = tmp_path / "c" / ".metadata"
    pickled, _ = checksums.split_footer(metadata.read_bytes(), metadata)
    found = pickle.loads(pickled)
    for info in found.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    metadata.write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match="all files of a checkpoint are in its directory"):
        checkpoints.load(room(), tmp_path / "c", ALONE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_values_that_name_code_are_refused(tmp_path: Path) -> None:
    saved = {"a": numbers(20, 4), "deep": {"step": Runs(tmp_path / "ran")}}
    dcp.save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    state = {"deep": {"step": 0}}
    with (
        pytest.warns(UserWarning, match="no checksums"),
        pytest.raises(CheckpointError, match=r"deep\.step is not loaded: it names posix\.mkdir"),
    ):
        checkpoints.load(state, tmp_path / "c", ALONE)
    assert not (tmp_path / "ran").exists()


def test_values_that_would_not_be_loaded_are_refused_when_they_are_saved(tmp_path: Path) -> None:
    state = {"a": numbers(3), "deep": {"choice": Choice(1)}}
    for save in (checkpoints.save, checkpoints.async_save, checkpoints.export):
        with pytest.raises(TypeError, match=r"deep\.choice is a Choice and needs .*\.Choice"):
            save(state, tmp_path / "c", ALONE)
    assert not (tmp_path / "c").exists()
    with torch.serialization.safe_globals([Choice]):
        checkpoints.save(state, tmp_path / "c", ALONE)
    found: dict[str, Any] = {"a": torch.zeros(3), "deep": {"choice": None}}
    with pytest.raises(CheckpointError, match=r"call torch\.serialization\.add_safe_globals first"):
        checkpoints.load(found, tmp_path / "c", ALONE)
    with torch.serialization.safe_globals([Choice]):
        checkpoints.load(found, tmp_path / "c", ALONE)
    assert found["deep"]["choice"] == Choice(1)


def test_values_of_plain_kinds(tmp_path: Path) -> None:
    values = {
        "none": None,
        "flag": True,
        "text": "t",
        "bytes": b"b",
        "tuple": (1, (2.5, "x")),
        "list": [1, [2, None]],
        "set": {1, 2},
        "complex": 1j,
        "dtype": torch.float16,
        "tensors": (torch.ones(2), 1),
    }
    checkpoints.save({"v": values}, tmp_path / "c", ALONE)
    state: dict[str, Any] = {"v": dict.fromkeys(values, 0)}
    checkpoints.load(state, tmp_path / "c", ALONE)
    assert torch.equal(state["v"].pop("tensors")[0], values.pop("tensors")[0])  # type: ignore[index]
    assert state["v"] == values


# Checksums


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    checkpoints.save(content(), tmp_path, ALONE)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for path in files:
        for place in flipped(path, 60):
            assert f"{path.name} is damaged" in error_of_load(tmp_path), f"byte {place}"
    state = room()
    checkpoints.load(state, tmp_path, ALONE)
    assert is_loaded(state)


def test_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks per item; only those of what is read are compared."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    checkpoints.save(content(), tmp_path, ALONE)
    state = room()
    checkpoints.load(state, tmp_path, ALONE)
    assert is_loaded(state)
    (path,) = tmp_path.glob("*.distcp")
    data = path.read_bytes()
    place = data.index(numbers(20, 4)[10:12].numpy().tobytes())
    path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
    other = {"b": torch.zeros(30)}
    checkpoints.load(other, tmp_path, ALONE)
    assert torch.equal(other["b"], numbers(30))
    start = place // 64 * 64
    with pytest.raises(CheckpointError, match=f"bytes {start} to {start + 64} have another"):
        checkpoints.load({"a": torch.zeros(20, 4)}, tmp_path, ALONE)


def test_blocks_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order a state has its tensors, and where these span several blocks."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 1 << 16)
    # Torch reads in the order of names, and writes in the order of the state.
    order = random.Random(0).sample(range(200), 200)
    wanted = {f"t{i}": numbers(3000 if i % 10 else 100_000) + i for i in order}
    checkpoints.save(wanted, tmp_path, ALONE)
    (path,) = tmp_path.glob("*.distcp")
    blocks = path.stat().st_size / checksums.BLOCK_BYTES
    read = []
    crc32 = zlib.crc32

    def counted(data: Any, value: int = 0) -> int:
        read.append(len(data))
        return crc32(data, value)

    monkeypatch.setattr(zlib, "crc32", counted)
    found = {name: torch.zeros_like(value) for name, value in wanted.items()}
    checkpoints.load(found, tmp_path, ALONE)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert blocks > 100
    # A tensor that spans more blocks than are remembered has its last ones read twice.
    assert len(read) < 1.3 * blocks


def test_files_that_are_missing_or_cut_short(tmp_path: Path) -> None:
    checkpoints.save(content(), tmp_path, ALONE)
    (path,) = tmp_path.glob("*.distcp")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    size = rf"has {len(data) - 1} bytes, {len(data)} were saved; load another checkpoint"
    with pytest.raises(CheckpointError, match=size):
        checkpoints.load(room(), tmp_path, ALONE)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name} is missing"):
        checkpoints.load(room(), tmp_path, ALONE)
    metadata = tmp_path / ".metadata"
    whole = metadata.read_bytes()
    for size_left in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        metadata.write_bytes(whole[:size_left])
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
            checkpoints.load(room(), tmp_path, ALONE)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b'"version": 1', b'"version": 2', "version 2, this emblib reads version 1"),
        (b'"block_bytes": 4', b'"block_bytes": 8', "checksums of blocks of 8194304 bytes"),
    ],
)
def test_newer_checkpoints_are_refused(
    before: bytes, after: bytes, message: str, tmp_path: Path
) -> None:
    checkpoints.save(content(), tmp_path, ALONE)
    metadata = tmp_path / ".metadata"
    whole = metadata.read_bytes()
    changed = whole[:-12].replace(before, after)
    assert changed != whole[:-12]
    metadata.write_bytes(changed + struct.pack("<I", zlib.crc32(changed)) + whole[-8:])
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(room(), tmp_path, ALONE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoints_without_checksums_are_loaded_with_a_warning(tmp_path: Path) -> None:
    dcp.save(content(), checkpoint_id=tmp_path / "torch", no_dist=True)
    state = room()
    with pytest.warns(UserWarning, match="has no checksums, so damage to it is not noticed"):
        checkpoints.load(state, tmp_path / "torch", ALONE)
    assert is_loaded(state)
    checkpoints.save(state, tmp_path / "ours", ALONE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.load(room(), tmp_path / "ours", ALONE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_loads_what_is_saved_with_checksums(tmp_path: Path) -> None:
    checkpoints.save(content(), tmp_path, ALONE)
    state = room()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert is_loaded(state)


def save_and_damage(ranks: RankGroup, path: Path) -> str:
    """Every rank has a file of its own; that of rank 1 is damaged, and all ranks say so."""
    shards = [Shard(r, (r * 3, r * 3 + 3), (0, 4)) for r in range(ranks.size)]
    whole = numbers(3 * ranks.size, 4)
    checkpoints.save({"t": spread(whole, shards, ranks)}, path, ranks)
    checkpoints.save({"n": numbers(3)}, path / "one", ranks)  # one rank writes it
    assert len(list((path / "one").iterdir())) == 2
    found = {"t": spread(torch.zeros(3 * ranks.size, 4), shards, ranks)}
    checkpoints.load(found, path, ranks)
    assert_is(found["t"], whole)
    if ranks.rank == 1:
        (damaged,) = path.glob("*__1_0.distcp")
        next(itertools.islice(flipped(damaged, 3), 1, None))
    ranks.barrier()
    try:
        checkpoints.load(found, path, ranks)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_all_ranks_tell_of_damage_to_the_file_of_one(tmp_path: Path) -> None:
    told = worlds.run(3, save_and_damage, tmp_path)
    assert all("__1_0.distcp is damaged" in text for text in told), told
    assert len(set(told)) == 1


# Exports


def test_every_flipped_bit_of_an_export_is_noticed(tmp_path: Path) -> None:
    """Bytes that are not content, as those between parts, may be anything."""
    path = tmp_path / "whole.pt"
    checkpoints.export(content(), path, ALONE)
    assert is_loaded(checkpoints.load_export(path))
    noticed = 0
    for place in flipped(path, 150):
        try:
            assert is_loaded(checkpoints.load_export(path)), f"byte {place}"
        except CheckpointError:
            noticed += 1
    assert noticed > 50


def test_a_flipped_bit_in_each_part_of_an_export_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    checkpoints.export(content(), path, ALONE)
    data = path.read_bytes()
    for tensor in (content()["a"], content()["b"]):
        place = data.index(tensor.numpy().tobytes())
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=r"whole\.pt is damaged: the checksum of its"):
            checkpoints.load_export(path)


def test_exports_that_name_code_are_refused(tmp_path: Path) -> None:
    torch.save({"a": Runs(tmp_path / "ran")}, tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match=r"cannot be loaded"):
        checkpoints.load_export(tmp_path / "whole.pt")
    assert not (tmp_path / "ran").exists()


def test_exports_have_checksums_whatever_torch_is_told(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        checkpoints.export(content(), tmp_path / "whole.pt", ALONE)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert is_loaded(checkpoints.load_export(tmp_path / "whole.pt"))


# Versions of torch


def test_saving_needs_nothing_of_how_torch_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions of torch differ in which metadata they fill: that of the caller, or a copy."""
    monkeypatch.setattr(dcp.FileSystemWriter, "finish", lambda *arguments: None)
    for _ in range(2):
        checkpoints.save(content(), tmp_path, ALONE)
    assert len(list(tmp_path.iterdir())) == 2
    state = room()
    checkpoints.load(state, tmp_path, ALONE)
    assert is_loaded(state)
