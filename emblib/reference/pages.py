"""Pages of the files of a store: the definition of `emblib.ops.pages`.

The arguments are those of the ops. `rows`, int64, are numbers of rows of a file, -1 for none: row r
has `row_bytes` bytes from byte `first_byte + r * row_bytes` on. `marks` are uint8 by page.
`fetch_pages` has no definition here, since it changes no value.
"""

import zlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def crc32(data: Tensor, pages: Tensor, page_bytes: int) -> Tensor:
    """Return zlib's CRC-32 of pages, uint8 `[n, 4]` in the byte order of the machine.

    Args:
        data: uint8 `[N]`, the bytes of all pages; the last page may be short.
        pages: int64 `[n]`, numbers of pages.
        page_bytes: bytes per page.
    """
    content = bytes(data.tolist())
    first_bytes = [page * page_bytes for page in pages.tolist()]
    crcs = array("I", [zlib.crc32(content[first : first + page_bytes]) for first in first_bytes])
    if not crcs:
        return torch.empty(0, 4, dtype=torch.uint8)
    return torch.frombuffer(crcs, dtype=torch.uint8).view(-1, 4)


def pages_of(rows: Tensor, row_bytes: int, first_byte: int, page_bytes: int) -> Tensor:
    """Return the numbers of the pages of rows, int64, row after row; a page may repeat.

    Rows of 0 bytes have no page.
    """
    pages: list[int] = []
    for row in rows.tolist():
        if row >= 0 and row_bytes:
            begin = first_byte + row * row_bytes
            pages += range(begin // page_bytes, (begin + row_bytes - 1) // page_bytes + 1)
    return torch.tensor(pages, dtype=torch.int64)


def without_mark(
    marks: Tensor, rows: Tensor, row_bytes: int, first_byte: int, page_bytes: int
) -> Tensor:
    """Return the pages of rows whose mark is 0, int64; a page may repeat.

    Pages beyond the end of `marks` are left out.
    """
    pages = pages_of(rows, row_bytes, first_byte, page_bytes)
    pages = pages[pages < marks.numel()]
    return pages[marks[pages] == 0]


def mark_(
    marks: Sequence[Tensor], rows: Tensor, row_bytes: int, first_byte: int, page_bytes: int
) -> None:
    """Set the marks of the pages of rows to 1 in every vector of `marks`.

    The vectors must have an entry for each of these pages.
    """
    for vector in marks:
        vector[pages_of(rows, row_bytes, first_byte, page_bytes)] = 1


def file_slots(slots: Tensor, file_slots: Tensor, is_hidden: Tensor | None) -> Tensor:
    """Return the file slot of each slot, int64 `[n]`; -1 for slot -1 and for hidden file slots.

    `slots` is int64 `[n]`, `file_slots` int64 by slot, -1 for none. `is_hidden` is uint8 by file
    slot, 0 for those that are not hidden; None hides none.
    """
    entries = torch.full_like(slots, -1)
    entries[slots >= 0] = file_slots[slots[slots >= 0]]
    if is_hidden is not None:
        is_used = entries >= 0
        entries[is_used] = torch.where(is_hidden[entries[is_used]] == 0, entries[is_used], -1)
    return entries
