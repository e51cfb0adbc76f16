"""Pages of mapped files: the ops against their definition, and reads ahead of use."""

import mmap
import os
import platform
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.ops import pages
from emblib.reference import pages as reference

ROOT = Path(__file__).parents[2]
PAGE = mmap.PAGESIZE
# Lengths around the steps of both ways to compute: 16 bytes by tables, 64 and 16 by folding.
LENGTHS = (1, 3, 8, 15, 16, 17, 63, 64, 65, 79, 80, 81, 127, 128, 129, 192, 207, 4096, 5001)


def draw_bytes(count: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=draw, dtype=torch.uint8)


@pytest.mark.parametrize("page_bytes", LENGTHS)
def test_checksums_are_those_of_zlib(page_bytes: int, thread_counts: list[int]) -> None:
    for length in {1, page_bytes, 3 * page_bytes, 5 * page_bytes + page_bytes // 2 + 1}:
        data = draw_bytes(length, page_bytes)
        numbers = torch.arange(-(-length // page_bytes)).flip(0).contiguous().repeat(2)
        want = reference.page_crc32(data, numbers, page_bytes)
        for threads in thread_counts:
            torch.set_num_threads(threads)
            assert torch.equal(pages.page_crc32(data, numbers, page_bytes), want)
        unaligned = torch.cat([data[:1], data])[1:]
        assert torch.equal(pages.page_crc32(unaligned, numbers, page_bytes), want)


@pytest.mark.parametrize("data", [b"", b"a", bytes(4096), b"\xff" * 777])
def test_the_checksum_of_all_bytes(data: bytes) -> None:
    assert pages.crc32(torch.tensor([*data], dtype=torch.uint8)) == zlib.crc32(data)


def test_many_pages_are_divided_over_threads(thread_counts: list[int]) -> None:
    data, numbers = draw_bytes(100 * 4096 + 1), torch.arange(101)
    want = reference.page_crc32(data, numbers, 4096)
    for threads in thread_counts:
        torch.set_num_threads(threads)
        assert torch.equal(pages.page_crc32(data, numbers, 4096), want)


def test_checksums_without_special_instructions() -> None:
    script = (
        "import torch, zlib\n"
        "from emblib.ops.pages import crc32\n"
        f"for n in {LENGTHS}:\n"
        "    data = torch.randint(0, 256, (n,), dtype=torch.uint8)\n"
        "    assert crc32(data) == zlib.crc32(bytes(data.tolist())), n\n"
    )
    environment = {**os.environ, "EMBLIB_ISA": "baseline", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


# Widths and first bytes of rows, bytes of a page.
SHAPES = [(1, 0, 1), (32, 0, 4096), (260, 12, 4096), (4096, 0, 4096), (9000, 5, 4096), (0, 0, 64)]


def draw_marks(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Return marks of the pages of 200 rows, half of them 0, and some of the rows."""
    row_bytes, first_byte, page_bytes = shape
    draw = torch.Generator().manual_seed(seed)
    num_pages = -(-(first_byte + 200 * row_bytes) // page_bytes)
    marks = torch.randint(0, 2, (num_pages,), generator=draw, dtype=torch.uint8)
    rows = torch.randint(-1, 200, (90,), generator=draw)
    return marks, rows


@pytest.mark.parametrize("shape", SHAPES)
def test_marks_are_those_of_the_reference(shape: tuple[int, int, int]) -> None:
    for seed in range(5):
        marks, rows = draw_marks(shape, seed)
        for num_marks in (marks.numel(), marks.numel() // 2, 0):
            got = pages.pages_without_mark(marks[:num_marks], rows, *shape)
            want = reference.pages_without_mark(marks[:num_marks], rows, *shape)
            # The op leaves out repetitions of neighbours.
            assert torch.equal(got.unique(), want.unique())
            assert got.tolist() == torch.unique_consecutive(want).tolist()
        marked, wanted = [marks.clone(), marks.flip(0)], [marks.clone(), marks.flip(0)]
        pages.mark_pages_(marked, rows, *shape)
        reference.mark_pages_(wanted, rows, *shape)
        assert all(torch.equal(one, other) for one, other in zip(marked, wanted, strict=True))
        assert pages.pages_without_mark(marked[0], rows, *shape).numel() == 0


def test_entries_of_slots_are_those_of_the_reference() -> None:
    draw = torch.Generator().manual_seed(1)
    for count in (0, 1, 100):
        slots = torch.randint(-1, 300, (count,), generator=draw)
        entries = torch.randint(-1, 50, (300,), generator=draw)
        hidden = torch.randint(0, 2, (50,), generator=draw, dtype=torch.uint8)
        for is_hidden in (None, hidden):
            got = pages.file_slots(slots, entries, is_hidden)
            assert torch.equal(got, reference.file_slots(slots, entries, is_hidden))


def mapped_file(path: Path, nbytes: int) -> tuple[int, Tensor]:
    """Return a handle of a new file on the disk, and the file as mapped."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(handle, bytes(draw_bytes(nbytes).tolist()))
    os.fsync(handle)
    return handle, torch.frombuffer(mmap.mmap(handle, nbytes), dtype=torch.uint8)


def in_memory(data: Tensor, rows: Tensor, row_bytes: int) -> bool:
    return int(pages.fetch_pages(data, rows, row_bytes, 0)[1]) == 0


linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are read at their use")


def kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])


@linux
def test_pages_that_are_not_in_memory_are_read(tmp_path: Path) -> None:
    nbytes = 64 * PAGE + 100
    handle, data = mapped_file(tmp_path / "file", nbytes)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    rows = torch.tensor([60, -1, 3, 4, 30, 64])  # 3 and 4 are neighbours, 64 is cut short
    unreadable, num_ranges = pages.fetch_pages(data, rows, PAGE, 0)
    assert unreadable.numel() == 0
    if not num_ranges:
        pytest.skip("this file system keeps all pages in memory")
    assert num_ranges == 4
    assert in_memory(data, rows, PAGE)
    assert not in_memory(data, torch.arange(40, 50), PAGE)
    assert bytes(data.tolist()) == (tmp_path / "file").read_bytes()
    os.close(handle)


@linux
@pytest.mark.parametrize(
    ("rows", "row_bytes", "warm"),
    [
        # One row in 4000 is stored: the others are not looked for.
        (torch.where(torch.arange(4000) == 3999, 50, -1), PAGE, None),
        # The first page of the row is in memory, its last one is not.
        (torch.tensor([0]), 128 * PAGE, 0),
    ],
    ids=["absent", "long"],
)
def test_a_probe_looks_at_rows_and_their_ends(
    rows: torch.Tensor, row_bytes: int, warm: int | None, tmp_path: Path
) -> None:
    handle, data = mapped_file(tmp_path / "file", 256 * PAGE)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    if warm is not None:
        pages.fetch_pages(data, torch.tensor([warm]), PAGE, 0)
    num_ranges = int(pages.fetch_pages(data, rows, row_bytes, 0)[1])
    if in_memory(data, torch.tensor([255]), PAGE):
        pytest.skip("this file system keeps all pages in memory")
    assert num_ranges == 1
    os.close(handle)


@linux
def test_a_long_range_is_read_whole(tmp_path: Path) -> None:
    """The system reads only the first 128 KiB for one advice."""
    handle, data = mapped_file(tmp_path / "file", 1 << 20)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    rows = torch.arange(data.numel() // 1000)
    if in_memory(data, rows, 1000):
        pytest.skip("this file system keeps all pages in memory")
    for row in rows:
        assert in_memory(data, row.view(1), 1000)
    assert bytes(data.tolist()) == (tmp_path / "file").read_bytes()
    os.close(handle)


@linux
@pytest.mark.skipif(kernel() < (5, 14), reason="an earlier kernel cannot say so")
def test_pages_that_a_file_has_lost_are_named(tmp_path: Path) -> None:
    """Copying from them would end the process with SIGBUS."""
    handle, data = mapped_file(tmp_path / "file", 8 * PAGE)
    os.ftruncate(handle, 5 * PAGE)
    rows = torch.tensor([7, 0, 4, 5, 1])
    unreadable, _ = pages.fetch_pages(data, rows, PAGE, 0)
    assert unreadable.tolist() == [7 * PAGE, 5 * PAGE]
    assert pages.fetch_pages(data, rows[1:3], PAGE, 0)[0].numel() == 0
    os.close(handle)


def test_rows_in_memory_are_not_read() -> None:
    data = draw_bytes(10000)
    assert in_memory(data, torch.tensor([-1, 0, 99]), 100)
    assert in_memory(data, torch.tensor([], dtype=torch.int64), 100)
    assert in_memory(data, torch.tensor([5]), 0)


def arguments() -> dict[str, tuple[Any, ...]]:
    """Return right arguments of every op."""
    marks, rows = draw_marks((260, 12, 4096), 0)
    data = draw_bytes(200 * 260 + 12)
    return {
        "page_crc32": (data, torch.tensor([3, 0]), 4096),
        "pages_without_mark": (marks, rows, 260, 12, 4096),
        "mark_pages_": ([marks], rows, 260, 12, 4096),
        "file_slots": (torch.tensor([1, -1]), torch.tensor([4, 3]), torch.zeros(5).byte()),
        "fetch_pages": (data, rows, 260, 12),
    }


@pytest.mark.parametrize(
    ("name", "number", "value", "message"),
    [
        ("page_crc32", 0, torch.zeros(9), "data must be uint8, got float32"),
        ("page_crc32", 0, torch.zeros(9, 2).byte(), "data must be a contiguous vector"),
        ("page_crc32", 1, torch.tensor([0, 13]), r"pages must be in \[0, 13\), got 13"),
        ("page_crc32", 1, torch.tensor([-1]), r"pages must be in \[0, 13\), got -1"),
        ("page_crc32", 2, 0, "page_bytes must be positive, got 0"),
        ("pages_without_mark", 1, torch.zeros(3), "rows must be int64, got float32"),
        ("pages_without_mark", 2, -1, "must not be negative .* got -1, 12 and 4096"),
        (
            "pages_without_mark",
            1,
            torch.tensor([2**62]),
            "at most 2.60 bytes after row 0, got row 46116860",
        ),
        ("mark_pages_", 2, 2**61, "must be at most 2.60, got 2305843009213693952 and 12"),
        ("fetch_pages", 3, 2**61, "must be at most 2.60, got 260 and 2305843009213693952"),
        ("mark_pages_", 1, torch.tensor([0, 1000]), "on the first 13 pages, got row 1000"),
        ("file_slots", 0, torch.tensor([2]), r"slots must be in \[-1, 2\), got 2"),
        ("file_slots", 2, torch.zeros(3).byte(), "an entry per file slot, got 3 for slot 3"),
        ("file_slots", 2, torch.zeros(0).byte(), "an entry per file slot, got 0 for slot 3"),
        ("fetch_pages", 1, torch.tensor([200]), "rows must begin in data of 52012 bytes, got row"),
    ],
)
def test_wrong_arguments_raise_before_anything_is_written(
    name: str, number: int, value: object, message: str
) -> None:
    wrong = [*arguments()[name]]
    wrong[number] = value
    with pytest.raises(RuntimeError, match=message):
        getattr(pages, name)(*wrong)
    if name == "mark_pages_":
        assert torch.equal(wrong[0][0], arguments()[name][0][0])


def test_opcheck() -> None:
    for name, case in arguments().items():
        torch.library.opcheck(getattr(torch.ops.emblib, name).default, case)
