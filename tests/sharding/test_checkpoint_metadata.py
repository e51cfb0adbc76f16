"""Metadata of checkpoints that is forged or malformed: refused, and no class is changed by it."""

import copyreg
import json
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)

from emblib.sharding import checkpoints
from emblib.sharding.checkpoints import CheckpointError, checksums, unpickling
from emblib.sharding.ranks import RankGroup
from tests.sharding.checkpoint_worlds import numbers

ALONE = RankGroup.single()
MODULE = "torch.distributed.checkpoint.metadata"
EXTENSION = 0xE1


def call_of_extension() -> None:
    """Fail if a pickle calls this."""
    raise AssertionError("it was called")


def saved(path: Path) -> tuple[Path, bytes, Any]:
    """Save a tensor and a number; return the file of the metadata, its pickle, and the sums."""
    checkpoints.save({"a": numbers(3), "n": 1}, path, ALONE)
    file = path / ".metadata"
    return file, *checksums.split_footer(file.read_bytes(), file)


def load(path: Path) -> None:
    checkpoints.load({"a": torch.zeros(3), "n": 0}, path, ALONE)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def state(key: str, value: bytes) -> bytes:
    return b"}" + text(key) + value + b"s"


# Each is run, and what it leaves on the stack dropped, before the pickle of the metadata itself.
FORGED = {
    "slots of a class": named(MODULE, "MetadataIndex") + b"N" + state("x", b"I1\n") + b"\x86b",
    "method of a class": (
        named(MODULE, "Metadata") + b"N" + state("__init__", named("torch", "Size")) + b"\x86b"
    ),
    "state of a class": named(MODULE, "Metadata") + state("x", b"I1\n") + b"b",
    "state of a function": (
        named("torch.serialization", "_get_layout") + state("cache", b"I1\n") + b"b"
    ),
    "state of torch.Size": named("torch", "Size") + state("x", b"I1\n") + b"b",
    "state of a data type": named("torch", "float32") + b"N" + state("x", b"I1\n") + b"\x86b",
    "item of a class": named(MODULE, "Metadata") + b"I1\nI1\ns",
    "append to a class": named(MODULE, "Metadata") + b"I1\na",
    "persistent id": b"Px\n",
    "extension": b"\x82" + bytes([EXTENSION]) + b")R",
}


@pytest.mark.parametrize("kind", FORGED)
def test_no_opcode_changes_what_is_shared(kind: str, tmp_path: Path) -> None:
    file, pickled, sums = saved(tmp_path)
    shared = [getattr(torch_metadata, name) for name in ("Metadata", "MetadataIndex")]
    shared.append(torch.serialization._get_layout)
    before = [dict(vars(each)) for each in shared]
    copyreg.add_extension(__name__, "call_of_extension", EXTENSION)
    try:
        function = pickle.dumps(call_of_extension, 2)
        assert pickle.loads(function) is call_of_extension  # and pickle remembers it
        assert __name__.encode() not in function
        assert pickled[:1] == b"\x80"
        file.write_bytes(
            checksums.add_footer(b"\x80\x04" + FORGED[kind] + b"0" + pickled[2:], sums)
        )
        with pytest.raises(CheckpointError, match=r"\.metadata (is damaged|names tests)"):
            load(tmp_path)
        assert [dict(vars(each)) for each in shared] == before
    finally:
        copyreg.remove_extension(__name__, "call_of_extension", EXTENSION)
        for each, wanted in zip(shared, before, strict=True):
            for key in vars(each).keys() - wanted.keys():
                delattr(each, key)
            if "__init__" in wanted:
                each.__init__ = wanted["__init__"]
    checkpoints.save({"a": numbers(3)}, tmp_path, ALONE)


def test_names_are_placeholders_of_one_load(tmp_path: Path) -> None:
    """A pickle gets no class of torch, and no class that another pickle got."""
    first, second = (unpickling._MetadataUnpickler(b"", tmp_path) for _ in range(2))
    for module, names in unpickling._ADMITTED.items():
        for name in names:
            found = first.find_class(module, name)
            assert issubclass(found, unpickling._Placeholder)
            assert found is first.find_class(module, name)
            assert found is not second.find_class(module, name)


def test_metadata_is_as_torch_reads_it(tmp_path: Path) -> None:
    content = {"a": numbers(20, 4), "half": torch.ones((), dtype=torch.bfloat16), "n": [1]}
    checkpoints.save({"deep": content}, tmp_path, ALONE)
    file = tmp_path / ".metadata"
    pickled, _ = checksums.split_footer(file.read_bytes(), file)
    wanted = pickle.loads(pickled)
    assert wanted.storage_meta is not None
    wanted.storage_meta = None  # where it was saved, of which nothing depends
    wanted.version = None
    assert unpickling.read_metadata(pickled, file) == wanted


def test_fields_of_other_versions_of_torch(tmp_path: Path) -> None:
    """Older metadata lacks some fields, newer metadata may have more."""
    file, pickled, sums = saved(tmp_path)
    content = pickle.loads(pickled)
    content.new_field = {"x": torch.float16}
    del content.storage_meta, content.version
    for info in content.storage_data.values():
        assert "transform_descriptors" not in info.__getstate__()
        info.another = 1
    file.write_bytes(checksums.add_footer(pickle.dumps(content), sums))
    found: dict[str, Any] = {"a": torch.zeros(3), "n": 0}
    checkpoints.load(found, tmp_path, ALONE)
    assert torch.equal(found["a"], numbers(3))
    assert found["n"] == 1


# Metadata that is malformed


def each_info(content: Metadata, **fields: Any) -> None:
    for info in content.storage_data.values():
        vars(info).update(fields)


def tensor(content: Metadata) -> Any:
    return content.state_dict_metadata["a"]


def add(content: Metadata, name: str, size: int) -> None:
    """Add an entry of `size` bytes, whose only chunk has 3 of those of another tensor."""
    properties = torch_metadata.TensorProperties(torch.uint8)
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))]
    entry = torch_metadata.TensorStorageMetadata(properties, torch.Size([size]), chunks)
    content.state_dict_metadata[name] = entry
    content.storage_data[MetadataIndex(name, (0,))] = content.storage_data[MetadataIndex("a", (0,))]


def grow(content: Metadata) -> None:
    add(content, "emblib", 1 << 45)
    content.state_dict_metadata["emblib"].chunks[0].sizes = torch.Size([1 << 45])  # type: ignore[union-attr]


def drop_tensor(content: Metadata) -> None:
    del content.storage_data[MetadataIndex("a", (0,))]


def drop_value(content: Metadata) -> None:
    del content.storage_data[MetadataIndex("n")]


MALFORMED: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "no tree": (lambda c: vars(c).update(state_dict_metadata=None), "state_dict_metadata must be"),
    "no storage": (lambda c: vars(c).update(storage_data=5), "storage_data must be a dict"),
    "a number as name": (
        lambda c: vars(c).update(state_dict_metadata={5: BytesStorageMetadata()}),
        "name of an entry must be a str",
    ),
    "another class": (
        lambda c: c.state_dict_metadata.update(a=StorageMeta()),  # type: ignore[arg-type]
        "a StorageMeta instead of a TensorStorageMetadata",
    ),
    "a tuple": (lambda c: c.state_dict_metadata.update(a=()), "a tuple instead"),  # type: ignore[arg-type]
    "no properties": (lambda c: vars(tensor(c)).update(properties=None), "TensorProperties"),
    "no chunks": (lambda c: vars(tensor(c)).update(chunks=5), "chunks must be a list"),
    "a size that is not a number": (
        lambda c: vars(tensor(c)).update(size=(3,)),
        "instead of a Size",
    ),
    "a chunk beyond the end": (
        lambda c: vars(tensor(c)).update(size=torch.Size([2])),
        r"a of \(2,\) has the chunk",
    ),
    "dimensions": (
        lambda c: vars(tensor(c)).update(size=torch.Size([3, 1])),
        r"a of \(3, 1\) has the chunk",
    ),
    "a tensor nowhere": (drop_tensor, "does not say where the chunk .* of a is"),
    "a value nowhere": (drop_value, "does not say where n is"),
    "a number as file": (lambda c: each_info(c, relative_path=5), "name of a file must be a str"),
    "the directory above": (lambda c: each_info(c, relative_path=".."), "are in its directory"),
    "a file elsewhere": (lambda c: each_info(c, relative_path="x/y"), "are in its directory"),
    "an unknown file": (lambda c: each_info(c, relative_path="x"), "refers to byte .* of x, which"),
    "a negative offset": (lambda c: each_info(c, offset=-5), "the offset is -5"),
    "a text as length": (lambda c: each_info(c, length="1"), "the length is '1'"),
    "a long item": (lambda c: each_info(c, length=1 << 60), r"refers to byte 1152921504606\d* of"),
    "a short item": (lambda c: each_info(c, length=11), "a has 12 bytes in 11 bytes of a file"),
    "transforms": (lambda c: each_info(c, transform_descriptors=[5]), "are not names"),
    "notes larger than their chunks": (lambda c: add(c, "emblib", 1 << 45), "have all of emblib"),
    "notes larger than the file": (grow, r"emblib has 35184372088832 bytes in \d+ bytes of a file"),
    "notes that are not text": (lambda c: add(c, "emblib", 3), "'emblib' is not a note"),
    "notes that are not a tensor": (
        lambda c: (
            c.state_dict_metadata.update(emblib=BytesStorageMetadata()),
            c.storage_data.update({MetadataIndex("emblib"): c.storage_data[MetadataIndex("n")]}),
        ),
        "have all of emblib",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
@pytest.mark.filterwarnings("ignore:.*has no checksums")
def test_malformed_metadata(kind: str, tmp_path: Path) -> None:
    """With checksums and without: forged files may have them, and files of torch have none."""
    file, pickled, sums = saved(tmp_path)
    change, message = MALFORMED[kind]
    content = pickle.loads(pickled)
    change(content)
    forged = pickle.dumps(content)
    for whole in (checksums.add_footer(forged, sums), forged):
        if kind == "an unknown file" and whole is forged:
            message = "x is missing"
        file.write_bytes(whole)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)


def test_planners_may_keep_what_they_like(tmp_path: Path) -> None:
    file, pickled, sums = saved(tmp_path)
    for planner_data in (None, 5, {"a": 5}, {5: ("a",)}, {"a": [StorageMeta()]}):
        content = pickle.loads(pickled)
        content.planner_data = planner_data
        file.write_bytes(checksums.add_footer(pickle.dumps(content), sums))
        load(tmp_path)


@pytest.mark.parametrize(
    "notes",
    [
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"cuts": 5}',
        b'{"cuts": {"a": 5}}',
        b'{"cuts": {"a": ["x"]}}',
        b'{"cuts": {"a": [0, 2]}}',
        b'{"cuts": {"b": [0, 0, 4]}}',
        b'{"cuts": {"b": [1, 2, 4]}}',
        b'{"cuts": {"b": [0, 4]}}',
        b'{"cuts": {"c": [0, 2, 4]}}',
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:.*has no checksums")
def test_malformed_notes(notes: bytes, tmp_path: Path) -> None:
    content = {"a": numbers(3), "b": numbers(3, 2)}
    content["emblib"] = torch.frombuffer(bytearray(notes), dtype=torch.uint8)
    dcp.save(content, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match="the entry 'emblib' is not a note"):
        checkpoints.load({"a": torch.zeros(3)}, tmp_path, ALONE)


def footer(**changes: Any) -> bytes:
    content = {"format": "emblib.checkpoint", "version": 1, "block_bytes": checksums.BLOCK_BYTES}
    return json.dumps({**content, "files": {}, **changes}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"5",
        b"null",
        b"{}",
        b"[" * 100_000,
        b"\xff",
        footer(files=5),
        footer(files=[1]),
        footer(files={"x": {"foo": 1}}),
        footer(files={"x": {"nbytes": "1", "crc32": [1]}}),
        footer(files={"x": {"nbytes": 1, "crc32": 5}}),
        footer(files={"x": {"nbytes": 1, "crc32": []}}),
        footer(files={"x": {"nbytes": 1, "crc32": [None]}}),
        footer(files={"x": {"nbytes": -1, "crc32": []}}),
    ],
)
def test_malformed_footers(text: bytes, tmp_path: Path) -> None:
    file, pickled, _ = saved(tmp_path)
    for length in (len(text), len(pickled) + len(text) + 1, 1 << 60):
        whole = pickled + text + struct.pack("<Q", length)
        file.write_bytes(whole + struct.pack("<I8s", zlib.crc32(whole), b"emblib \n"))
        with pytest.raises(CheckpointError, match=r"damaged: what follows its metadata cannot be"):
            load(tmp_path)
