"""Pages of the files of a store: the definition of `emblib.ops.pages`.

Names and arguments are those of the ops. The ops also check their arguments, and raise RuntimeError
before they write; here arguments must be valid. `rows`, int64 `[n]`, has the row numbers in a file;
-1 is skipped. Row r occupies `row_bytes` bytes from byte `first_byte + r * row_bytes` on. `marks`,
uint8, has one mark per page, 0 or 1. Tensors are on the CPU. `fetch_pages` has no definition here,
since it changes no value.
"""

import zlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def page_crc32(data: Tensor, pages: Tensor, page_bytes: int) -> Tensor:
    """Return zlib's CRC-32 of pages, uint8 `[n, 4]` in the byte order of the machine.

    Args:
        data: uint8 `[N]`, the bytes of all pages; the last page may be short.
        pages: int64 `[n]`, numbers of pages that begin in `data`.
        page_bytes: bytes per page.
    """
    content = bytes(data.tolist())
    first_bytes = [page * page_bytes for page in pages.tolist()]
    crcs = array("I", [zlib.crc32(content[first : first + page_bytes]) for first in first_bytes])
    if not crcs:
        return torch.empty(0, 4, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(crcs, dtype=torch.uint8).view(-1, 4)


def pages_of(rows: Tensor, row_bytes: int, first_byte: int, page_bytes: int) -> Tensor:
    """Return the numbers of the pages of rows, int64 `[m]`, in the order of the rows.

    A page of several rows appears several times. Rows of 0 bytes have no page.
    """
    pages: list[int] = []
    for row in rows.tolist():
        if row >= 0 and row_bytes:
            begin = first_byte + row * row_bytes
            pages += range(begin // page_bytes, (begin + row_bytes - 1) // page_bytes + 1)
    return torch.tensor(pages, dtype=torch.int64, device="cpu")


def pages_without_mark(
    marks: Tensor, rows: Tensor, row_bytes: int, first_byte: int, page_bytes: int
) -> Tensor:
    """Return the pages of rows that have mark 0, int64 `[m]`, in the order of the rows.

    A page of several rows appears several times; the op may leave out repetitions. Pages beyond the
    end of `marks` are left out.
    """
    pages = pages_of(rows, row_bytes, first_byte, page_bytes)
    pages = pages[pages < marks.numel()]
    return pages[marks[pages] == 0]


def mark_pages_(
    marks: Sequence[Tensor], rows: Tensor, row_bytes: int, first_byte: int, page_bytes: int
) -> None:
    """Set the marks of the pages of rows to 1 in every vector of `marks`.

    The vectors must have an entry for each of these pages.
    """
    for vector in marks:
        vector[pages_of(rows, row_bytes, first_byte, page_bytes)] = 1


def file_slots(slots: Tensor, file_slots: Tensor, is_hidden: Tensor | None) -> Tensor:
    """Look up the file slot of each entry of `slots`.

    Args:
        slots: int64 `[n]`, -1 for none.
        file_slots: int64, one entry per slot, -1 for none.
        is_hidden: uint8, one entry per file slot, not 0 if it is hidden; None hides none.

    Returns:
        int64 `[n]`, -1 for slot -1, for slots without a file slot and for hidden file slots.
    """
    entries = torch.full_like(slots, -1)
    entries[slots >= 0] = file_slots[slots[slots >= 0]]
    if is_hidden is not None:
        is_used = entries >= 0
        entries[is_used] = torch.where(is_hidden[entries[is_used]] == 0, entries[is_used], -1)
    return entries
