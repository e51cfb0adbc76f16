"""FastRows: the rows of the fast tier as bytes, the form in which a store has them."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from emblib.dynamic.eviction import EvictionLog, Expiry
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.rows import RowLayout
from emblib.grad_mode import without_gradients
from emblib.ops import hash
from emblib.specs import DynamicSpec


class FastTier(Protocol):
    """The tables in front of a store, see `emblib.dynamic.state.DynamicState`."""

    specs: tuple[DynamicSpec, ...]
    table_names: list[str]
    optimizer_name: str
    index: HashIndex
    layout: RowLayout
    hyperparams: Tensor
    expiry: Expiry | None
    eviction_log: EvictionLog | None

    @property
    def row_buffers(self) -> list[Tensor]:
        """Return weights and optimizer states as flat tensors, by slot."""

    def load_hyperparams(self, values: Tensor) -> None:
        """Overwrite `hyperparams` with saved values."""

    def record_evictions(self, table: int, keys: Tensor) -> None:
        """Record keys that left a table, if evictions are tracked."""


def as_bytes(rows: Sequence[Tensor]) -> Tensor:
    """Join contiguous matrices of n rows each as uint8 `[n, bytes per row]` on the CPU."""
    return torch.cat([buffer.view(torch.uint8) for buffer in rows], dim=1).cpu()


class FastRows:
    """Read and write rows of the tables in front of a store as bytes: weights, then states.

    Args:
        fast: the tables.
    """

    def __init__(self, fast: FastTier) -> None:
        self._fast = fast

    def buffers_of(self, table: int) -> Iterator[Tensor]:
        """Yield each row buffer of a table, overflow rows included, as `[rows, width]`."""
        fast = self._fast
        layout = fast.layout
        num_rows = fast.specs[table].rows + layout.overflow_rows
        for b, buffer in enumerate(fast.row_buffers):
            begin, width = layout.first_element(table, b), layout.width(table, b)
            yield buffer[begin : begin + num_rows * width].view(num_rows, width)

    def gather(self, table: int, slots: Tensor) -> Tensor:
        """Return copies of the rows in slots, int64 `[n]`, as uint8 `[n, row_bytes]` on the CPU."""
        slots = slots.to(self._fast.index.tags.device)
        return as_bytes([hash.hash_read_rows(b, slots, 0.0) for b in self.buffers_of(table)])

    def scatter(self, table: int, slots: Tensor, values: Tensor) -> None:
        """Write rows, uint8 `[n, row_bytes]` on the CPU, into slots, int64 `[n]`."""
        first_byte, slots = 0, slots.to(self._fast.index.tags.device)
        for buffer in self.buffers_of(table):
            row_bytes = buffer.shape[1] * buffer.itemsize
            # A copy even of one row: a view of another dtype needs aligned bytes.
            rows = values[:, first_byte : first_byte + row_bytes]
            rows = rows.clone(memory_format=torch.contiguous_format)
            hash.hash_write_rows_(buffer, slots, rows.view(buffer.dtype).to(buffer.device))
            first_byte += row_bytes

    def fallback(self, table: int) -> bytes:
        """Return the bytes of a table's fallback rows, which no row of the store has."""
        views = self._fast.layout.fallback_views(self._fast.row_buffers, table).values()
        rows = torch.cat([view.detach().cpu().reshape(-1).view(torch.uint8) for view in views])
        packed_rows = bytearray(rows.numel())
        if packed_rows:
            torch.frombuffer(packed_rows, dtype=torch.uint8).copy_(rows)
        return bytes(packed_rows)

    @without_gradients
    def set_fallback(self, table: int, packed_rows: bytes) -> None:
        """Set a table's fallback rows to those of `fallback`; ValueError for another length."""
        views = self._fast.layout.fallback_views(self._fast.row_buffers, table).values()
        nbytes = sum(view.nbytes for view in views)
        if len(packed_rows) != nbytes:
            raise ValueError(
                f"the store has fallback rows of {len(packed_rows)} bytes for table "
                f"{self._fast.table_names[table]!r}, this module {nbytes}: choose "
                "DynamicSpec.fallback_rows as there, or name another store"
            )
        first_byte = 0
        for view in views:
            if view.numel():
                row_bytes = bytearray(packed_rows[first_byte : first_byte + view.nbytes])
                rows = torch.frombuffer(row_bytes, dtype=view.dtype)
                view.copy_(rows.view(view.shape))
            first_byte += view.nbytes
