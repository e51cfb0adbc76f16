"""Frozen files are whole, checked and shared."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from emblib.inference import frozen_file
from emblib.tables import durable_files
from emblib.tables.durable_files import ChecksumError

CONTENT = {
    "rows": torch.arange(5000, dtype=torch.uint8),
    "none": torch.zeros(0, 3, dtype=torch.int64),
    "matrix": torch.randn(7, 3).to(torch.bfloat16),
    "keys": torch.arange(9),
}
CONFIG = {"a": [1, None, "ä"], "b": {"c": True}}


def written(path: Path, content: dict[str, torch.Tensor] = CONTENT) -> bytes:
    frozen_file.write(path, "kind", CONFIG, content)
    return path.read_bytes()


def test_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a"
    written(path)
    for verify in (True, False):
        kind, config, tensors = frozen_file.read(path, verify=verify)
        assert (kind, config) == ("kind", CONFIG)
        assert list(tensors) == list(CONTENT)
        for name, tensor in CONTENT.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name], tensor)
    assert [*tmp_path.iterdir()] == [path], "nothing else is left"
    path.unlink()
    assert torch.equal(tensors["keys"], CONTENT["keys"]), "the mapping outlives the name"


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    frozen_file.write("~/file", "kind", {}, {"rows": torch.arange(3)})
    assert (tmp_path / "file").is_file()
    assert frozen_file.read("~/file").tensors["rows"].tolist() == [0, 1, 2]


def test_sections_begin_at_pages(tmp_path: Path) -> None:
    path = tmp_path / "a"
    before = written(path)
    _, _, tensors = frozen_file.read(path)
    addresses = [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
    assert all(address % frozen_file.ALIGNMENT == 0 for address in addresses)
    tensors["keys"].fill_(3)  # changes this process's copy alone
    assert path.read_bytes() == before


def test_processes_share_the_pages(tmp_path: Path) -> None:
    """Both mappings have the page of the file: what one of them would see of it, the other does."""
    path = tmp_path / "a"
    written(path)
    first, second = frozen_file.read(path).tensors, frozen_file.read(path).tensors
    assert first["rows"].data_ptr() != second["rows"].data_ptr()
    place = path.read_bytes().index(bytes(range(256)))
    with open(path, "r+b") as file:  # which users must not do: it shows where the bytes come from
        file.seek(place)
        file.write(b"\x77")
    assert first["rows"][0] == second["rows"][0] == 0x77


def test_every_altered_byte_is_found_and_its_section_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    content = written(path)
    places = {
        name: content.index(bytes(tensor.view(torch.uint8).flatten().tolist()))
        for name, tensor in CONTENT.items()
        if tensor.numel()
    }
    for name, place in places.items():
        for at in (place, place + CONTENT[name].nbytes - 1):
            path.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
            with pytest.raises(ChecksumError, match=f"the checksum of its section '{name}'"):
                frozen_file.read(path)
            frozen_file.read(path, verify=False)
    header = content.index(b"sections")
    for at, error, message in (
        (0, ValueError, "is not a frozen file of emblib"),
        (8, ValueError, "version"),
        (12, ChecksumError, "checksum of its header"),
        (18, ChecksumError, "header"),
        (header, ChecksumError, "checksum of its header"),
    ):
        path.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
        for verify in (True, False):
            with pytest.raises(error, match=message):
                frozen_file.read(path, verify=verify)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    content = written(path)
    keys = content.index(bytes(CONTENT["keys"].view(torch.uint8).tolist()))
    for size, error, message in (
        (0, ValueError, "is not a frozen file"),
        (1, ChecksumError, "truncated in its header"),
        (7, ChecksumError, "truncated in its header"),
        (10, ChecksumError, "truncated in its header"),
        (100, ChecksumError, "truncated in its header"),
        (4096 + 10, ChecksumError, "its section 'rows' ends at"),
        (keys + 8, ChecksumError, "its section 'keys' ends at"),
        (len(content) - 1, ChecksumError, "its section 'keys' ends at"),
    ):
        path.write_bytes(content[:size])
        with pytest.raises(error, match=message):
            frozen_file.read(path, verify=False)
    path.write_bytes(content + b"x")
    with pytest.raises(ChecksumError, match="bytes instead of"):
        frozen_file.read(path, verify=False)


@pytest.mark.parametrize("step", ["write", "sync", "rename"])
def test_a_failed_write_leaves_the_old_file(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    before = written(path)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "write":
        monkeypatch.setattr(frozen_file, "_write_blocks", fail)
    elif step == "sync":
        monkeypatch.setattr(durable_files, "_fsync", fail)
    else:
        monkeypatch.setattr(durable_files, "rename", fail)
    with pytest.raises(OSError, match=f"No space left.*{tmp_path}"):
        written(path, {"rows": torch.ones(3)})
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_the_bytes_of_a_file_do_not_change_between_writes(tmp_path: Path) -> None:
    assert written(tmp_path / "a") == written(tmp_path / "b")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match="cannot save x: no such folder") as caught:
        frozen_file.write(folder / "x", "kind", {}, {})
    assert caught.value.filename == str(folder)
