"""Operations on the files of a store, which are mapped into memory, on the CPU.

`rows`, int64 `[n]`, has the row numbers in a file; negative ones are skipped. Row r occupies
`row_bytes` bytes from byte `first_byte + r * row_bytes` on. Pages have `page_bytes` bytes and are
numbered from byte 0. `marks`, uint8, has one mark per page, 0 or 1. Tensors must be contiguous
vectors of these dtypes; others raise RuntimeError.

- `page_crc32(data, pages, page_bytes)` returns the CRC-32 of the pages of `data`, uint8 `[N]`, with
  the numbers `pages`, int64 `[n]`, as zlib computes it: uint8 `[n, 4]`, each row a uint32 in the
  byte order of the machine. The last page of `data` may be short; a page that does not exist raises
  RuntimeError
- `pages_without_mark(marks, rows, row_bytes, first_byte, page_bytes)` returns the pages of rows
  that have mark 0, int64 `[m]`, in the order of the rows. A page of several rows may repeat; pages
  past the end of `marks` are left out
- `mark_pages_(marks, rows, row_bytes, first_byte, page_bytes)` sets the marks of the pages of rows
  to 1 in each tensor of the list `marks`. If one of them lacks an entry for one of these pages, it
  raises RuntimeError before any mark changes
- `file_slots(slots, file_slots, is_hidden)` returns where rows are in a file: `file_slots[s]` for
  each entry s of `slots`, int64 `[n]`. It returns -1 for slot -1, and for file slots f with
  `is_hidden[f]` (uint8) not 0; None hides none. Other slots, and file slots without an entry in
  `is_hidden`, raise RuntimeError
- `fetch_pages(data, rows, row_bytes, first_byte)` reads the pages of rows of a mapped file, here
  those of the system, into memory. It first probes some of the pages, and reads none if all of
  these are in memory. The last row may end after `data`; a row that begins after it raises
  RuntimeError. Returns the bytes of `data` at which unreadable pages begin, int64
  `[m]`, at most one per range, and the number of ranges that were read, int64 `[1]`. A range is of
  rows that follow each other in `rows` and are on the same or on adjacent pages. A page is
  unreadable if the file was cut off or the disk has failed: using it ends the process with
  `SIGBUS`. Linux before 5.14 does not report unreadable pages; other systems than Linux read pages
  only when they are used

`crc32(data)` returns the CRC-32 of a whole uint8 `[N]`.

`emblib.reference.pages` defines all ops but `fetch_pages`, which changes no value.
"""

import torch
from torch import Tensor

page_crc32 = torch.ops.emblib.page_crc32.default
pages_without_mark = torch.ops.emblib.pages_without_mark.default
mark_pages_ = torch.ops.emblib.mark_pages_.default
file_slots = torch.ops.emblib.file_slots.default
fetch_pages = torch.ops.emblib.fetch_pages.default


@torch.library.register_fake("emblib::page_crc32")
def _(data: Tensor, pages: Tensor, page_bytes: int) -> Tensor:
    return data.new_empty(pages.numel(), 4)


@torch.library.register_fake("emblib::pages_without_mark")
def _(marks: Tensor, rows: Tensor, row_bytes: int, first_byte: int, page_bytes: int) -> Tensor:
    return rows.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.register_fake("emblib::file_slots")
def _(slots: Tensor, file_slots: Tensor, is_hidden: Tensor | None) -> Tensor:
    return torch.empty_like(slots)


@torch.library.register_fake("emblib::fetch_pages")
def _(data: Tensor, rows: Tensor, row_bytes: int, first_byte: int) -> tuple[Tensor, Tensor]:
    return rows.new_empty(torch.library.get_ctx().new_dynamic_size()), rows.new_empty(1)


_FIRST_PAGE = torch.zeros(1, dtype=torch.int64, device="cpu")


def crc32(data: Tensor) -> int:
    """Return the CRC-32 of bytes, uint8 `[N]`, as `zlib.crc32` does."""
    if not data.numel():
        return 0
    return int(page_crc32(data, _FIRST_PAGE, data.numel()).view(torch.int32)) & 0xFFFFFFFF
