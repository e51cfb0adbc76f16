"""Files whose names emblib chooses are not written through symbolic links."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from emblib import DiskRows, DynamicEmbeddingBags, DynamicSpec, optim
from emblib.dynamic.saving.dumps import Writer
from emblib.dynamic.tiers.store import StoredTable
from emblib.tables import durable_files
from emblib.tables.durable_files import MappedFile
from emblib.tables.journal import Journal


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Return a file to which links lead."""
    path = tmp_path / "precious"
    path.write_text("precious" * 100)
    return path


def test_dumps_replace_links(tmp_path: Path, precious: Path) -> None:
    """Lock, arrays and manifest of a dump, all of whose names can be known before."""
    folder = tmp_path / "dump"
    module = DynamicEmbeddingBags([DynamicSpec(64, 4, name="x")], optim.SGD(0.1))
    module(torch.arange(5), torch.arange(6)).sum().backward()
    module.save(folder)
    for name in os.listdir(folder):
        os.remove(folder / name)
    part = "part_00000_of_00001"
    for name in (f"{part}.lock", f"{part}.json", f"{part}.json.new"):
        os.symlink(precious, folder / name)
    module.save(folder)
    module.save(folder)
    with Writer(folder) as writer, writer.array(torch.int64, (0,)):
        pass
    assert precious.read_text() == "precious" * 100
    assert not any(path.is_symlink() for path in folder.iterdir())
    module.load(folder)


@pytest.mark.parametrize("name", ["journal", "heads_0.bin", "rows_0.bin", "rows_0.bin.crc"])
def test_files_of_stores_are_no_links(tmp_path: Path, precious: Path, name: str) -> None:
    store = DiskRows(tmp_path / "rows")
    store.open([StoredTable("t", 8)])
    store.close()
    os.remove(tmp_path / "rows" / name)
    os.symlink(precious, tmp_path / "rows" / name)
    with pytest.raises(OSError, match="symbolic link, which is not followed; remove the link"):
        store.open([StoredTable("t", 8)])
    assert precious.read_text() == "precious" * 100


@pytest.mark.parametrize(
    "write",
    [
        durable_files.open_file,
        lambda path: Journal(path, []),
        lambda path: MappedFile(path, "int8", 800).map(),
    ],
)
def test_links_are_refused(tmp_path: Path, precious: Path, write: Callable[[Path], object]) -> None:
    os.symlink(precious, tmp_path / "link")
    with pytest.raises(OSError, match="symbolic link"):
        write(tmp_path / "link")


@pytest.mark.parametrize("text", ["{}", "{ }\n", '{"a": 1}'])
def test_json_with_a_checksum_is_what_was_saved(tmp_path: Path, text: str) -> None:
    durable_files.save_json(tmp_path / "saved.json", text)
    assert json.loads((tmp_path / "saved.json").read_text()).keys() - json.loads(text) == {"crc32"}
    assert json.loads(durable_files.load_json(tmp_path / "saved.json")) == json.loads(text)


def test_a_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    os.symlink(tmp_path / "there", tmp_path / "here")
    store = DiskRows(tmp_path / "here")
    store.open([StoredTable("t", 8)])
    store.close()
    assert (tmp_path / "there" / "rows.json").exists()
