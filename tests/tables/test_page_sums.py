"""Checksums of tables in files: whatever is not as the last commit left it is refused."""

import gc
import json
import mmap
import os
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from emblib import CacheConfig, Placement, TableBatchedEmbeddingBags, TableSpec, Verify, optim
from emblib.optim import State
from emblib.tables import cache
from emblib.tables.disk import DiskStore
from emblib.tables.durable_files import ChecksumError
from emblib.tables.page_sums import PageSums

TABLES = [TableSpec(900, 8, "a"), TableSpec(300, 8, "b"), TableSpec(5, 3000, "c")]
STATES = [State("sum", per_row=True), State("m")]
FILES = ["weights.bin", "state_sum.bin", "state_m.bin"]


def open_store(directory: Path, verify: Verify = Verify.TOUCH) -> DiskStore:
    return DiskStore(directory, TABLES, torch.float32, STATES, torch.float16, verify)


def tensors(store: DiskStore) -> list[torch.Tensor]:
    return [store.weights, *store.states]


def fill(store: DiskStore) -> None:
    """The first commit: other bytes everywhere."""
    generator = torch.Generator().manual_seed(0)
    with store.writing_everything():
        for tensor in tensors(store):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    store.commit([0.1])


def write_store(directory: Path) -> None:
    """Write a filled store."""
    store = open_store(directory)
    fill(store)
    store.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 8
    path.write_bytes(data)


def train(store: DiskStore, rows: list[int]) -> None:
    """Change rows of the first two tables, as a step does."""
    numbers = torch.tensor(rows)
    store.verify(numbers)
    store.protect(numbers)
    store.weights[: 1200 * 8].view(-1, 8)[numbers] += 1
    store.states[0][numbers] += 1


def verify_all(directory: Path, verify: Verify) -> None:
    store = open_store(directory, verify)
    try:
        store.verify_all()
    finally:
        store.close()


@pytest.mark.parametrize("verify", [Verify.TOUCH, Verify.OPEN])
@pytest.mark.parametrize("name", [*FILES, *(f"{file}.crc" for file in FILES), "store.json"])
def test_a_flipped_bit_anywhere_is_refused(name: str, verify: Verify, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    train(store, [1, 899, 1000])
    store.commit([0.2])
    store.close()
    path = tmp_path / name
    size = path.stat().st_size
    for at in [0, size - 1, *range(0, size, max(size // 8, 1))]:
        flip(path, at)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            verify_all(tmp_path, verify)
        assert str(path) in str(caught.value) or "another layout" in str(caught.value)
        flip(path, at)
    verify_all(tmp_path, verify)


def test_a_number_that_changed_in_the_manifest_is_refused(tmp_path: Path) -> None:
    """It is JSON as before, and a learning rate of another module would not be noticed."""
    write_store(tmp_path)
    path = tmp_path / "store.json"
    path.write_text(path.read_text().replace("0.1", "0.5"))
    with pytest.raises(RuntimeError, match=r"store\.json cannot be read.* match its checksum"):
        open_store(tmp_path)


def test_an_error_names_file_page_rows_and_ways_out(tmp_path: Path) -> None:
    write_store(tmp_path)
    flip(tmp_path / "weights.bin", 900 * 32 + 5)  # of the first row of b; its page begins in a
    for at in (0, 4096, 12000):
        flip(tmp_path / "state_sum.bin", min(at, 4819))
    with pytest.raises(
        ChecksumError,
        match=r"weights\.bin is damaged: page 7 \(bytes 28672 to 32767, rows 896 to 899 of table "
        r"'a', rows 0 to 123 of table 'b'\) is not as the last flush left it; restore .* "
        r'verify="off"',
    ):
        open_store(tmp_path, Verify.OPEN)
    store = open_store(tmp_path)
    with pytest.raises(ChecksumError, match=r"state_sum\.bin .*page 0 .*, and 1 more pages\)? is"):
        store._sums[1].verify_all()


def test_by_touch_only_what_is_used_is_verified(tmp_path: Path) -> None:
    write_store(tmp_path)
    flip(tmp_path / "weights.bin", 300 * 32)
    store = open_store(tmp_path)
    train(store, [5, 600])
    with pytest.raises(ChecksumError, match=r"rows 256 to 383 of table 'a'"):
        store.verify(torch.tensor([[299]]))
    before = tensors(store)[0].clone()
    for rows in ([299], [5, 383]):
        with pytest.raises(ChecksumError, match="page 2 "):  # else it would get a checksum
            store.protect(torch.tensor(rows))
    assert torch.equal(tensors(store)[0], before)
    store.commit([0.3])
    store.close()
    store = open_store(tmp_path)
    store.verify(torch.tensor([5, 600]))
    with pytest.raises(ChecksumError, match="page 2 "):
        store.verify_all()


def test_a_row_of_several_pages(tmp_path: Path) -> None:
    write_store(tmp_path)
    begin = 1200 * 8 * 4
    for at in (begin, begin + 6000, begin + 11999):
        flip(tmp_path / "weights.bin", at)
        store = open_store(tmp_path)
        with pytest.raises(ChecksumError):
            store.verify(torch.tensor([1200]))
        store.verify(torch.tensor([1204]))
        store.close()
        flip(tmp_path / "weights.bin", at)


def test_what_changed_gets_new_checksums_and_nothing_else_is_journaled(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    old = (tmp_path / "weights.bin.crc").read_bytes()
    for rows in ([0, 127], [128], [0], list(range(1200))):
        train(store, rows)
        store.commit([0.3])
        new = (tmp_path / "weights.bin.crc").read_bytes()
        changed = {at // 4 for at in range(len(new)) if new[at] != old[at]}
        assert changed == {row * 32 // 4096 for row in rows}
        old = new
        copy = tmp_path.with_name(f"{tmp_path.name}_copy")
        shutil.copytree(tmp_path, copy, ignore=lambda *_: ["lock"])
        open_store(copy, Verify.OPEN).close()
        shutil.rmtree(copy)


def test_off_takes_what_is_there_and_the_next_commit_makes_it_good(tmp_path: Path) -> None:
    write_store(tmp_path)
    flip(tmp_path / "weights.bin", 300 * 32)
    flip(tmp_path / "state_m.bin.crc", 3)
    (tmp_path / "state_sum.bin.crc").unlink()
    for _ in range(2):
        store = open_store(tmp_path, Verify.OFF)
        found = [tensor.clone() for tensor in tensors(store)]
        store.close()
        with pytest.raises(RuntimeError):
            open_store(tmp_path, Verify.OPEN)
    store = open_store(tmp_path, Verify.OFF)
    store.commit([0.4])
    store.close()
    store = open_store(tmp_path, Verify.OPEN)
    assert all(map(torch.equal, tensors(store), found))


def without_checksums(directory: Path) -> None:
    """Make a store one of the format before."""
    path = directory / "store.json"
    content = json.loads(path.read_text())
    del content["checksum"], content["checksums"]
    content["layout"]["format"] = 1
    for key in ("page_bytes", "page_checksum"):
        del content["layout"][key]
    path.write_text(json.dumps(content))
    for file in directory.glob("*.crc"):
        file.unlink()


def test_files_of_the_format_without_checksums_get_them_when_asked_to(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    found = [tensor.clone() for tensor in tensors(store)]
    store.protect(torch.arange(40))
    store.weights[:8] = 5.0  # undone by a journal of that format
    store.close()
    without_checksums(tmp_path)
    for verify in (Verify.TOUCH, Verify.OPEN):
        with pytest.raises(ValueError, match=r'without checksums.*once with verify="off"'):
            open_store(tmp_path, verify)
    store = open_store(tmp_path, Verify.OFF)
    assert all(map(torch.equal, tensors(store), found))
    store.close()
    store = open_store(tmp_path, Verify.OFF)
    store.commit([0.4])
    store.close()
    store = open_store(tmp_path, Verify.OPEN)
    assert store.committed_numbers == [0.4]
    assert all(map(torch.equal, tensors(store), found))


# Modules


def module_on_disk(directory: Path, verify: str = "touch") -> TableBatchedEmbeddingBags:
    return TableBatchedEmbeddingBags(
        [TableSpec(4000, 16, "item", Placement.DISK)],
        optim.RowwiseAdagrad(lr=0.1),
        cache=CacheConfig(sets=2, directory=directory, verify=Verify(verify)),
    )


def look_up(module: TableBatchedEmbeddingBags, *rows: int) -> torch.Tensor:
    return module(torch.tensor(rows), torch.arange(len(rows) + 1))


@pytest.mark.parametrize("train", [True, False])
def test_a_module_reads_no_damaged_row(train: bool, tmp_path: Path) -> None:
    module = module_on_disk(tmp_path)
    module.flush()
    rows = module.table_weights()[0].clone()
    del module
    flip(tmp_path / "weights.bin", 1000 * 64 + 3)
    module = module_on_disk(tmp_path)
    with torch.set_grad_enabled(train):
        out = look_up(module, 3, 2000)
        assert torch.equal(out, rows[[3, 2000]])
        for batch in ((1000,), (3, 1005), tuple(range(900, 1010))):
            with pytest.raises(ChecksumError, match=r"page 15 .*rows 960 to 1023 of table 'item'"):
                look_up(module, *batch)
        assert torch.equal(look_up(module, 3, 2001), rows[[3, 2001]])
    for read in (module.table_weights, module.table_optimizer_states, module.state_dict):
        with pytest.raises(ChecksumError, match="page 15 "):
            read()
    del module, read, out
    gc.collect()  # what was raised holds it
    with pytest.raises(ChecksumError, match="page 15 "):
        module_on_disk(tmp_path, "open")
    with pytest.raises(ValueError, match="Verify must be one of 'touch', 'open', 'off'"):
        module_on_disk(tmp_path, "never")


def test_a_checkpoint_restores_damaged_tables(tmp_path: Path) -> None:
    module = module_on_disk(tmp_path)
    saved = {key: value.clone() for key, value in module.state_dict().items()}
    del module
    flip(tmp_path / "weights.bin", 1000 * 64 + 3)
    module = module_on_disk(tmp_path)
    module.load_state_dict(saved)
    del module
    module = module_on_disk(tmp_path, "open")
    assert torch.equal(module.table_weights()[0], saved["item.weight"])


def test_what_users_write_to_tables_is_in_the_next_checksums(tmp_path: Path) -> None:
    """Through every tensor of a module that is one of its tables, with torch's operations."""
    module = module_on_disk(tmp_path)
    parameter = torch.nn.Parameter(module.table_weights()[0])
    writes = [
        lambda: module.table_weights()[0][17].fill_(3.0),
        lambda: next(iter(module.table_optimizer_states()[0].values()))[5:9].fill_(2.0),
        lambda: module.state_dict()["item.weight"].view(-1)[70:80].zero_(),
        lambda: parameter.detach()[100].normal_(),
        lambda: module._tables_by_name.item.weight[3999].fill_(1.0),
    ]
    for write in writes:
        with torch.no_grad():
            write()
        look_up(module, 1, 2, 3).sum().backward()
        module.flush()
        weights, states = module.table_weights()[0].clone(), module.table_optimizer_states()[0]
        states = {key: state.clone() for key, state in states.items()}
        copy = tmp_path.with_name(f"{tmp_path.name}_copy")
        shutil.copytree(tmp_path, copy, ignore=lambda *_: ["lock"])
        other = module_on_disk(copy, "open")
        assert torch.equal(other.table_weights()[0], weights)
        for key, state in other.table_optimizer_states()[0].items():
            assert torch.equal(state, states[key])
        del other
        shutil.rmtree(copy)


def test_a_file_that_has_lost_pages_is_told_by_a_fetch(tmp_path: Path) -> None:
    """Reading them through the mapping would end the process."""
    write_store(tmp_path)
    store = open_store(tmp_path, Verify.OFF)
    os.truncate(tmp_path / "weights.bin", 3 * 4096)
    assert not store.fetch(torch.tensor([], dtype=torch.int64))
    with pytest.raises(OSError, match=r"bytes at 12288 cannot be read: .* cut off .*weights\.bin"):
        store.fetch(torch.tensor([500, 384, 1204, 3]))
    with pytest.raises(IndexError):
        store.fetch(torch.tensor([1205]))


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_fetch_reads_weights_and_states(
    is_cold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, list[int], int, int]] = []

    def fetch(sums: PageSums, rows: torch.Tensor, width: int, first_byte: int = 0) -> bool:
        calls.append((sums.path.name, rows.tolist(), width, first_byte))
        return is_cold

    store = open_store(tmp_path)
    monkeypatch.setattr(PageSums, "fetch", fetch)
    assert store.fetch(torch.tensor([1203, 7, 1000, 0, 1200])) == is_cold
    # Tables a and b have one width, so they are one block of 1200 rows; c begins after it.
    weights = [("weights.bin", [0, 7, 1000], 32, 0), ("weights.bin", [0, 3], 12000, 4800 * 8)]
    states = [
        ("state_sum.bin", [0, 7, 1000], 4, 0),
        ("state_m.bin", [0, 7, 1000], 16, 0),
        ("state_sum.bin", [0, 3], 4, 4800),
        ("state_m.bin", [0, 3], 6000, 4800 * 4),
    ]
    assert sorted(calls) == sorted([*weights, *states])


def test_holes_of_a_file_count_as_zeros_without_being_read(tmp_path: Path) -> None:
    """The last page is shorter, so it has another checksum even if it is a hole."""
    path, length = tmp_path / "file", 3 * 4096 + 100
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(handle, length)
    os.pwrite(handle, b"some", 4096)
    os.fsync(handle)
    content = path.read_bytes()
    want = [zlib.crc32(content[page * 4096 : (page + 1) * 4096]) for page in range(4)]
    for skip_holes in (True, False):
        sums = PageSums(path, lambda begin, end: "")
        sums.resize(mmap.mmap(handle, length), mmap.mmap(-1, 16))
        sums.accept_all()
        pages, found = zip(*sums.outdated_sums(length, skip_holes=skip_holes), strict=True)
        assert torch.cat(pages).tolist() == [0, 1, 2, 3]
        words = torch.cat(found).view(torch.int32).view(-1).tolist()
        assert [word & 0xFFFFFFFF for word in words] == want
    os.close(handle)


def test_rows_between_cache_and_disk_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[set[int]] = []
    evicted: set[int] = set()
    is_cold = True

    def fetch(store: DiskStore, rows: torch.Tensor) -> bool:
        fetched.append({*rows.tolist()})
        return is_cold and bool(rows.numel())

    def protect(store: DiskStore, rows: torch.Tensor) -> None:
        evicted.update(rows.tolist())

    monkeypatch.setattr(DiskStore, "fetch", fetch)
    monkeypatch.setattr(DiskStore, "protect", protect)
    monkeypatch.setattr(cache, "_SAMPLED_ROWS", 8)
    monkeypatch.setattr(cache, "_FETCHES_PER_PROBE", 3)
    module = TableBatchedEmbeddingBags(
        [TableSpec(500, 4, "warm"), TableSpec(4000, 4, "a", Placement.DISK)],
        optim.SGD(0.1),
        cache=CacheConfig(load_factor=0.032, directory=tmp_path),  # 128 rows
    )

    def look_up(first: int) -> list[set[int]]:
        fetched.clear()
        evicted.clear()
        rows = torch.cat([torch.arange(50), torch.arange(first, first + 128)])
        with torch.no_grad():
            module(rows, torch.tensor([0, 50, 178]))
        return fetched[:]

    sample, moved = look_up(0)
    assert 3 < len(sample) < 40
    assert sample < moved == {*range(128)}
    assert not evicted
    sample, moved = look_up(64)
    assert sample < moved
    assert evicted
    # Some of the rows that were looked up before had found their set of the cache full.
    assert {*range(128, 192)} <= moved - evicted < {*range(64, 192)}
    assert evicted < moved
    assert len(moved) < 200
    is_cold = False
    assert [len(look_up(first)) for first in range(1000, 1800, 100)] == [1, 0, 0, 1, 0, 0, 1, 0]
    is_cold = True
    assert [len(look_up(first)) for first in range(2000, 2400, 100)] == [0, 2, 2, 2]
