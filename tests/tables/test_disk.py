"""DiskStore: what is in the files when, what is refused, and processes killed at any moment."""

import contextlib
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch

from emblib import CacheConfig, Placement, TableBatchedEmbeddingBags, TableSpec, optim
from emblib.optim import State
from emblib.sharding.ranks import RankGroup
from emblib.tables import journal
from emblib.tables.disk import DiskStore
from tests.sharding import worlds
from tests.tables import disk_kills
from tests.tables.disk_kills import ROWS, STATES, TABLES, as_bytes, open_store, write_rows
from tests.tables.kills import run_alone

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def simple(directory: Path | str, rows: int = 10, dtype: torch.dtype = torch.float32) -> DiskStore:
    return DiskStore(directory, [TableSpec(rows, 4, "t")], dtype, [], torch.float32)


def everything(store: DiskStore) -> list[torch.Tensor]:
    return [t.clone() for t in as_bytes([store.weights, *store.states])]


def same(store: DiskStore, expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, everything(store), expected))


# Opening


def test_a_new_store_is_zeros_until_its_first_commit(tmp_path: Path) -> None:
    store = simple(tmp_path / "a" / "b")
    assert store.is_new
    assert store.committed_numbers == []
    assert store.weights.shape == (40,)
    assert not store.weights.any()
    store.weights.fill_(1.0)
    store.close()
    store = simple(tmp_path / "a" / "b")
    assert store.is_new
    assert not store.weights.any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("state_dtype", FLOATS)
def test_what_was_committed_is_found(
    tmp_path: Path, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    store = DiskStore(tmp_path, TABLES, dtype, STATES, state_dtype)
    assert [t.dtype for t in (store.weights, *store.states)] == [dtype, torch.float32, state_dtype]
    write_rows([store.weights, *store.states], torch.arange(ROWS), seed=1)
    numbers = [0.1, 5e-324, -0.0, float("inf"), 2**53 + 0.0]
    store.commit(numbers)
    expected = everything(store)
    store.close()
    store = DiskStore(tmp_path, TABLES, dtype, STATES, state_dtype)
    assert not store.is_new
    assert store.committed_numbers == numbers
    assert same(store, expected)


def test_the_tensors_are_the_files(tmp_path: Path) -> None:
    """Nothing is copied: what is written to one mapping is in the file."""
    store = simple(tmp_path, dtype=torch.bfloat16)
    store.weights[5] = 3.0
    saved = torch.frombuffer(
        bytearray((tmp_path / "weights.bin").read_bytes()), dtype=torch.bfloat16
    )
    assert torch.equal(saved, store.weights)


def test_no_tables(tmp_path: Path) -> None:
    for created in (True, False):
        store = DiskStore(tmp_path, [], torch.float32, STATES, torch.float32)
        assert store.is_new is created
        assert store.weights.numel() == 0
        store.protect(torch.empty(0, dtype=torch.int64))
        with store.writing_everything():
            pass
        store.commit([])
        store.close()


def test_tables_on_disk_ignore_the_default_device_of_torch(tmp_path: Path) -> None:
    specs = [TableSpec(rows, 4, placement=Placement.DISK) for rows in (50, 70)]
    module = TableBatchedEmbeddingBags(
        specs, optim.SGD(0.5), cache=CacheConfig(sets=1, directory=tmp_path)
    )
    with torch.no_grad():
        module.table_weights()[1].fill_(1.0)
    ids, offsets = torch.arange(5).repeat(2), torch.arange(11)
    with torch.device("meta"):
        module(ids, offsets).sum().backward()
        module.flush()
    assert module.table_weights()[1][:6, 0].tolist() == [0.5] * 5 + [1.0]


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = simple("~/tables")
    assert store.directory == tmp_path / "tables"
    assert (tmp_path / "tables" / "weights.bin").exists()


def test_a_relative_directory_is_that_of_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = simple("tables")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    store.commit([1.0])
    store.close()
    assert simple(tmp_path / "tables").committed_numbers == [1.0]


def test_a_huge_store_takes_no_time_and_little_room(tmp_path: Path) -> None:
    start = time.monotonic()
    store = DiskStore(tmp_path, [TableSpec(10**7, 64)], torch.float32, STATES, torch.float32)
    store.commit([1.0])
    rows = torch.arange(0, 10**7, 10**4)
    store.protect(rows)
    store.weights.view(-1, 64)[rows] = 1.0
    store.close()
    store = DiskStore(tmp_path, [TableSpec(10**7, 64)], torch.float32, STATES, torch.float32)
    assert not store.weights.view(-1, 64)[rows].any()
    assert time.monotonic() - start < 30
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert used < 100e6, f"{used} bytes of {2 * 64 * 4e7:.0f}"


# What is refused


@pytest.mark.parametrize(
    ("tables", "dtype", "states", "state_dtype", "what"),
    [
        ([TableSpec(11, 4, "t")], torch.float32, STATES, torch.float32, "tables"),
        ([TableSpec(10, 4, "u")], torch.float32, STATES, torch.float32, "tables"),
        ([TableSpec(10, 4, "t")] * 2, torch.float32, STATES, torch.float32, "tables"),
        ([TableSpec(10, 4, "t")], torch.float16, STATES, torch.float32, "weights"),
        ([TableSpec(10, 4, "t")], torch.float32, STATES[:1], torch.float32, "states"),
        ([TableSpec(10, 4, "t")], torch.float32, STATES, torch.bfloat16, "states"),
        (
            [TableSpec(10, 4, "t")],
            torch.float32,
            [State("sum"), STATES[1]],
            torch.float32,
            "states",
        ),
    ],
)
def test_another_layout_is_refused(
    tmp_path: Path,
    tables: list[TableSpec],
    dtype: torch.dtype,
    states: list[State],
    state_dtype: torch.dtype,
    what: str,
) -> None:
    given = [TableSpec(10, 4, "t")], torch.float32, STATES, torch.float32
    store = DiskStore(tmp_path, *given)
    store.weights.fill_(2.0)
    store.commit([1.0])
    store.close()
    with pytest.raises(ValueError, match=f"another layout: their {what} are"):
        DiskStore(tmp_path, tables, dtype, states, state_dtype)
    store = DiskStore(tmp_path, *given)
    assert bool((store.weights == 2.0).all())


def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(ValueError, match=r"must be empty or hold them already.*thesis\.tex"):
        simple(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be made"):
        simple(tmp_path / "file")
    with pytest.raises(OSError, match="cannot be made"):
        simple(tmp_path / "file" / "tables")


def test_a_directory_that_cannot_be_written_to_is_refused() -> None:
    """As another user where the tests run as root, whom no mode stops."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match="need a directory that can be written to"):
                simple(name)
            with pytest.raises(PermissionError, match="cannot be made"):
                simple(Path(name) / "tables")
        finally:
            os.seteuid(user)
            os.chmod(name, 0o755)


def _refused(ranks: RankGroup, directory: Path) -> str:
    """Return the error of a rank, which is another process, that opens a store."""
    with pytest.raises(BlockingIOError) as caught:
        simple(directory)
    return str(caught.value)


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    store = simple(tmp_path)
    with pytest.raises(
        BlockingIOError, match=f"these are open in process {os.getpid()} .* another directory"
    ):
        simple(tmp_path)
    assert f"open in process {os.getpid()}" in worlds.run(1, _refused, tmp_path)[0]
    del store
    simple(tmp_path)


def test_a_fork_neither_writes_nor_keeps_the_lock(tmp_path: Path) -> None:
    store = simple(tmp_path)
    store.commit([1.0])
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            store.protect(torch.tensor([1]))
        except RuntimeError as error:
            os.write(tell, str(error).encode())
        time.sleep(20)
        os._exit(0)
    try:
        assert b"a forked process may only read" in os.read(told, 1000)
        store.close()
        simple(tmp_path).close()
        with pytest.raises(RuntimeError, match="until it is closed"):
            store.commit([2.0])
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    store = simple(tmp_path)
    store.commit([1.0])
    store.close()
    weights = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(weights[:-1])
    with pytest.raises(RuntimeError, match="has 159 bytes, its tables have 160"):
        simple(tmp_path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(RuntimeError, match=r"weights\.bin is missing"):
        simple(tmp_path)
    (tmp_path / "weights.bin").write_bytes(weights)
    (tmp_path / "store.json").write_text("{}")
    with pytest.raises(RuntimeError, match="cannot be read"):
        simple(tmp_path)


@pytest.mark.parametrize("rows", [[-1], [3, ROWS], [2**40]])
def test_rows_that_no_table_has(tmp_path: Path, rows: list[int]) -> None:
    store = open_store(tmp_path)
    with pytest.raises(IndexError, match=rf"must be in \[0, {ROWS}\)"):
        store.protect(torch.tensor(rows))


# Protecting and committing


def committed(directory: Path) -> tuple[DiskStore, list[torch.Tensor]]:
    store = open_store(directory)
    write_rows([store.weights, *store.states], torch.arange(ROWS), seed=1)
    store.commit([7.0])
    return store, everything(store)


@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([5, 3, 5, 2999, 0, 3]),
        torch.arange(ROWS - 1, -1, -1, dtype=torch.int32),
        torch.tensor([[899, 900], [2399, 2400]]),
        torch.empty(0, dtype=torch.int64),
        torch.tensor(17),
        torch.arange(ROWS)[::7],
    ],
    ids=["repeated", "all", "edges of tables", "none", "scalar", "strided"],
)
def test_what_was_not_committed_is_undone(tmp_path: Path, rows: torch.Tensor) -> None:
    store, before = committed(tmp_path)
    for seed in (2, 3):
        store.protect(rows)
        write_rows([store.weights, *store.states], rows.flatten().unique(), seed)
    assert rows.numel() == 0 or not same(store, before)
    store.close()
    for _ in range(2):
        store = open_store(tmp_path)
        assert not store.is_new
        assert store.committed_numbers == [7.0]
        assert same(store, before)
        store.close()


def test_a_row_is_journaled_once_an_epoch(tmp_path: Path) -> None:
    store, _ = committed(tmp_path)
    path = tmp_path / "journal"
    sizes = []
    for _ in range(2):
        for rows in (torch.arange(100), torch.arange(100), torch.arange(50, 101)):
            store.protect(rows)
            sizes.append(path.stat().st_size)
        store.commit([8.0])
        assert path.stat().st_size == 0
    head, hundred, one = 56, 24 + 100 * (8 + 16 + 4 + 16), 24 + 48
    assert hundred % 8 == 0
    assert sizes == 2 * [head + hundred, head + hundred, head + hundred + one]


def test_many_rows_make_many_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MAX_BODY_BYTES", 1000)
    store, before = committed(tmp_path)
    store.protect(torch.arange(ROWS))
    store.weights.zero_()
    store.close()
    assert same(open_store(tmp_path), before)


def test_writing_everything_is_not_journaled(tmp_path: Path) -> None:
    store, _ = committed(tmp_path)
    store.protect(torch.arange(10))
    with store.writing_everything():
        store.protect(torch.arange(ROWS))
        store.weights.fill_(3.0)
    store.protect(torch.arange(ROWS))
    assert (tmp_path / "journal").stat().st_size == 0
    store.commit([9.0])
    after = everything(store)
    store.protect(torch.arange(10))
    assert (tmp_path / "journal").stat().st_size > 0
    store.close()
    store = open_store(tmp_path)
    assert store.committed_numbers == [9.0]
    assert same(store, after)


def test_a_bulk_write_cut_short_is_told(tmp_path: Path) -> None:
    store, _ = committed(tmp_path)
    with contextlib.suppress(ZeroDivisionError), store.writing_everything():
        store.weights[:100].fill_(3.0)
        raise ZeroDivisionError
    store.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mix old and new rows"):
            open_store(tmp_path)


# Killed


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["random", "calls", "recovery"])
def test_killed_at_any_moment(mode: str, tmp_path: Path) -> None:
    """`disk_kills` compares bit by bit; here, that it killed what it was meant to."""
    done = run_alone(disk_kills, mode, tmp_path)
    for killed in {
        "random": [phase.name for phase in disk_kills.Phase] + ["opening again"],
        "calls": ["before", "within", "opened", "refused"],
        "recovery": ["before", "within", "opened"],
    }[mode]:
        assert f"'{killed}': " in done
