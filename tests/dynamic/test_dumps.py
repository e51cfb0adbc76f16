"""Dumps in a directory: what is read is what was written, by any number of ranks, or an error."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from emblib import DynamicEmbeddingBags, DynamicSpec
from emblib.dynamic.saving import dump_tables, dumps, entries, snapshots
from emblib.dynamic.saving.dump_tables import Header
from emblib.dynamic.saving.dumps import DumpError, DumpProgress, Part, Writer
from emblib.tables.durable_files import json_checksum
from tests.dynamic import dump_kills
from tests.dynamic.entry_cases import assert_same, make, only, table
from tests.tables.kills import run_alone


def write(directory: Path, count: int = 500, part: Part = Part(), **header: object) -> None:  # noqa: B008
    found = make(count).owned(part.rank, part.world_size)
    told = Header(**{"identity": "1", "clock": 50, **header})  # type: ignore[arg-type]
    dump_tables.write(directory, [table(found)], told, part)


@pytest.mark.parametrize("count", [0, 1, 500])
@pytest.mark.parametrize("scored", ["scored", "unscored"])
def test_a_dump_is_read_as_it_was_written(count: int, scored: str, tmp_path: Path) -> None:
    given = make(count, scored=scored == "scored")
    numbers = [0.1, float("inf"), -0.0]
    dump_tables.write(tmp_path / "new" / "dump", [table(given)], Header("x", 50, None, numbers))
    dump = dump_tables.read(tmp_path / "new" / "dump")
    assert_same(only(dump), given)
    assert (dump.clock, dump.since, str(dump.numbers)) == (50, None, str(numbers))


def test_the_same_entries_make_the_same_files(tmp_path: Path) -> None:
    given = make(300, scored=True)
    shuffled = given.take(torch.randperm(300, generator=torch.Generator().manual_seed(5)))
    for name, each in (("a", given), ("b", shuffled)):
        dump_tables.write(tmp_path / name, [table(each)], Header("x", 50))
    names = sorted(os.listdir(tmp_path / "a"))
    assert names == sorted(os.listdir(tmp_path / "b"))
    assert len(names) == 9  # keys, stamps, scores, three rows, removed, manifest, lock
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("readers", [1, 2, 3, 4])
@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_any_number_of_ranks_reads_any_other(writers: int, readers: int, tmp_path: Path) -> None:
    for rank in range(writers):
        write(tmp_path, part=Part(rank, writers))
    parts = [only(dump_tables.read(tmp_path, rank, readers)) for rank in range(readers)]
    assert sum(len(part) for part in parts) == 500
    assert_same(entries.concatenate(parts), make(500))
    with pytest.raises(ValueError, match="at least one part"):
        entries.concatenate([])


def test_rows_come_in_pieces_and_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[DumpProgress] = []
    given = make(100)
    monkeypatch.setattr(dump_tables, "_BLOCK_BYTES", 10 * 6 * 4)
    dump_tables.write(tmp_path, [table(given)], Header("x", 50), report=told.append)
    assert_same(only(dump_tables.read(tmp_path)), given)
    assert told[0] == DumpProgress("items", 10, 100)
    assert [each.done for each in told].count(100) == 3


def test_a_part_that_is_missing_is_told(tmp_path: Path) -> None:
    write(tmp_path, part=Part(0, 3))
    write(tmp_path, part=Part(2, 3))
    with pytest.raises(DumpError, match=r"of 3 parts those of ranks \[1\] are missing"):
        dump_tables.read(tmp_path)
    with pytest.raises(DumpError, match="holds no whole dump"):
        dump_tables.read(tmp_path / "elsewhere")


def test_parts_of_two_dumps_are_no_dump(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, part=Part(rank, 2))
    write(tmp_path, part=Part(1, 2), identity="2")
    with pytest.raises(DumpError, match=r"different dumps, \['1', '2'\]"):
        dump_tables.read(tmp_path)


def test_every_byte_is_checked(tmp_path: Path) -> None:
    write(tmp_path, 40)
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        if not data or path.suffix == ".lock":
            continue
        position = len(data) // 2
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(DumpError, match="damaged"):
            dump_tables.read(tmp_path)
        path.write_bytes(data[:-1])
        with pytest.raises(DumpError, match="damaged"):
            dump_tables.read(tmp_path)
        path.unlink()
        with pytest.raises(DumpError, match=r"is missing|holds no whole dump"):
            dump_tables.read(tmp_path)
        path.write_bytes(data)
    assert_same(only(dump_tables.read(tmp_path)), make(40))


def test_another_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = next(tmp_path.glob("*.json"))
    saved = json.loads(path.read_text())
    saved["content"]["format"] = 99
    saved["checksum"] = json_checksum(saved["content"])
    path.write_text(json.dumps(saved))
    with pytest.raises(DumpError, match="is of format 99"):
        dump_tables.read(tmp_path)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("dear")
    with pytest.raises(ValueError, match="must be empty or hold one already"):
        write(tmp_path)
    assert os.listdir(tmp_path) == ["letters"]


def test_a_dump_of_other_ranks_is_not_written_over(tmp_path: Path) -> None:
    write(tmp_path, part=Part(0, 1))
    with pytest.raises(ValueError, match="holds a dump of 1 parts, this one has 2"):
        write(tmp_path, part=Part(0, 2))
    assert_same(only(dump_tables.read(tmp_path)), make(500))


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    told = f"one owner; these are open in process {os.getpid()}.*another directory"
    with Writer(tmp_path), pytest.raises(BlockingIOError, match=told):
        write(tmp_path)
    write(tmp_path)


def test_what_fails_leaves_the_dump_that_was_there(tmp_path: Path) -> None:
    write(tmp_path, 500)
    before = sorted(os.listdir(tmp_path))

    def fail(progress: DumpProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dump_tables.write(tmp_path, [table(make(9))], Header("2", 60), report=fail)
    assert sorted(os.listdir(tmp_path)) == before
    assert_same(only(dump_tables.read(tmp_path)), make(500))
    write(tmp_path, 9)
    assert len(os.listdir(tmp_path)) == len(before)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_a_full_disk_leaves_the_dump_that_was_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 500)
    before = sorted(os.listdir(tmp_path))

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left") as caught:
            write(tmp_path, 90, identity="2")
    assert call != "pwrite" or caught.value.filename.endswith(".bin")
    left = [name for name in os.listdir(tmp_path) if not name.endswith(".new")]
    assert sorted(left) == before
    assert_same(only(dump_tables.read(tmp_path)), make(500))
    write(tmp_path, 90)
    assert len(os.listdir(tmp_path)) == len(before)


def test_an_array_must_be_complete(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="has 40 bytes, 8 were written"),
        Writer(tmp_path) as writer,
        writer.array(torch.int64, (5,)) as array,
    ):
        array.append(torch.ones(1, dtype=torch.int64))
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []


def test_a_killed_writer_leaves_the_old_dump_or_the_new(tmp_path: Path) -> None:
    """Before, within and after every call that changes a file, with a dump there and without."""
    done = run_alone(dump_kills, "calls", tmp_path)
    for word in ("before", "within", "after", "absent", "old", "new"):
        assert f"'{word}'" in done, done


@pytest.mark.slow
def test_writers_killed_at_any_time(tmp_path: Path) -> None:
    done = run_alone(dump_kills, "random", tmp_path)
    assert "'new'" in done
    assert "'old'" in done or "'absent'" in done


def test_a_whole_dump_and_changes_are_not_parts_of_one(tmp_path: Path) -> None:
    write(tmp_path, part=Part(0, 2))
    write(tmp_path, part=Part(1, 2), since=40)
    with pytest.raises(DumpError, match="of different dumps"):
        dump_tables.read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("file", "../secret"),
        ("file", 5),
        ("dtype", "load"),
        ("dtype", "none"),
        ("shape", [-1]),
        ("shape", "all"),
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    directory = tmp_path / "dump"
    write(directory)
    (tmp_path / "secret").write_bytes(bytes(4000))
    path = directory / "part_00000_of_00001.json"
    content = json.loads(path.read_text())["content"]
    content["tables"][0]["arrays"]["keys"][key] = value
    path.write_text(json.dumps({"content": content, "checksum": json_checksum(content)}))
    with pytest.raises(DumpError, match="is damaged"):
        dump_tables.read(directory)


@pytest.mark.parametrize("key", ["part", "format", "byteorder"])
def test_a_manifest_without_its_beginning_is_refused(key: str, tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "part_00000_of_00001.json"
    content = json.loads(path.read_text())["content"]
    del content[key]
    path.write_text(json.dumps({"content": content, "checksum": json_checksum(content)}))
    with pytest.raises(DumpError, match=f"lacks {key!r}"):
        dump_tables.read(tmp_path)


def rewrite(path: Path, where: list[Any], value: object) -> None:
    """Change an entry of a manifest, and its checksum; `...` for the value deletes it."""
    saved = json.loads(path.read_text())
    tree = saved["content"]
    for step in where[:-1]:
        tree = tree[step]
    if value is ...:
        del tree[where[-1]]
    else:
        tree[where[-1]] = value
    saved["checksum"] = json_checksum(saved["content"])
    path.write_text(json.dumps(saved))


TABLE: list[Any] = ["tables", 0]
WRONG: list[tuple[list[Any], list[object]]] = [
    (["part"], [..., 3, [0], [0, 1, 2], [1, 1], [-1, 1], [0.0, 1], [True, 1], [0, "1"], [0, 2]]),
    (["format"], [..., "1", None]),
    (["byteorder"], [..., 1]),
    (["identity"], [..., 7]),
    (["clock"], [..., "5", -1, 2**62, 10**30, 1.5]),
    (["since"], [..., "5", -1, [1]]),
    (["numbers"], [..., 3, ["x"], [None]]),
    (["others"], [..., [], {"x": 3}, {"x": {}}]),
    (["tables"], [..., {}, [3], [{}]]),
    ([*TABLE, "name"], [..., 3, ["items"]]),
    ([*TABLE, "order"], [..., 3]),
    ([*TABLE, "arrays"], [..., [], {}]),
    ([*TABLE, "arrays", "keys"], [..., "x", {}]),
    ([*TABLE, "arrays", "stamps"], [...]),
    ([*TABLE, "rows"], [..., 3, {"weight": 3}]),
    ([*TABLE, "removed"], [..., 3, {}]),
]
WRONG_ARRAYS: list[tuple[str, list[object]]] = [
    ("file", [..., 3, "other.bin", "../x.bin", "part_00000_of_00001.\0"]),
    ("dtype", [..., 3, "nn", "quint8", "complex64", "float32"]),
    ("shape", [..., 3, [-1], ["x"], [10**30], [2**40, 2**40], [], [1.5], [500, 1]]),
    ("crc32", ["x", None]),
]


def test_malformed_manifests_are_refused(tmp_path: Path) -> None:
    """Whatever they say, and with the right checksum: the error names the file and the field."""
    write(tmp_path)
    path = tmp_path / "part_00000_of_00001.json"
    whole = path.read_text()
    for where, values in WRONG:
        for value in values:
            rewrite(path, where, value)
            with pytest.raises(DumpError, match=path.name) as raised:
                dump_tables.read(tmp_path)
            assert "malformed" in str(raised.value) or "is not an array" in str(raised.value)
            path.write_text(whole)
    for entry, values in WRONG_ARRAYS:
        for value in values:
            rewrite(path, [*TABLE, "arrays", "keys", entry], value)
            with pytest.raises(DumpError, match=r"part_00000_of_00001\."):
                dump_tables.read(tmp_path)
            path.write_text(whole)
    for text in ("[]", "3", '{"content": []}', '{"content": {}}', "[" * 100_000, '"' + "x" * 9):
        path.write_text(text)
        with pytest.raises(DumpError, match=path.name):
            dump_tables.read_header(tmp_path)


def test_arrays_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "part_00000_of_00001.json"
    arrays = json.loads(path.read_text())["content"]["tables"][0]
    for column, other in (("stamps", arrays["removed"]), ("keys", arrays["removed"])):
        whole = path.read_text()
        rewrite(path, [*TABLE, "arrays", column], other)
        with pytest.raises(DumpError, match="malformed: table 'items'"):
            dump_tables.read(tmp_path)
        path.write_text(whole)


def test_a_claim_of_many_parts_costs_no_memory(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "part_00000_of_00001.json"
    rewrite(path, ["part"], [0, 10**12])
    path.rename(tmp_path / f"part_00000_of_{10**12}.json")
    with pytest.raises(DumpError, match=rf"of {10**12} parts those of ranks \[1, 2"):
        dump_tables.read(tmp_path)


def test_malformed_snapshots_are_refused(tmp_path: Path) -> None:
    dumps.write(tmp_path, {"a": [torch.arange(3), None]})
    path = tmp_path / "part_00000_of_00001.json"
    whole = path.read_text()
    for where, value in (
        (["tree"], 3),
        (["tree"], {}),
        (["tree"], {"set": {}}),
        (["tree"], {"dict": []}),
        (["tree", "dict", "a"], {"list": 3}),
        (["tree", "dict", "a", "list", 0], {"tensor": 3}),
        (["tree", "dict", "a", "list", 0, "tensor"], {}),
    ):
        rewrite(path, where, value)
        with pytest.raises(DumpError, match=path.name):
            dumps.read(tmp_path)
        path.write_text(whole)
    module = DynamicEmbeddingBags([DynamicSpec(32, 4)])
    with pytest.raises(DumpError, match="the snapshot lacks"):
        snapshots.load(module, tmp_path)
