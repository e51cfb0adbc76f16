"""FastRows: the rows of the fast tier as bytes, the form in which a store has them."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from emblib.dynamic.eviction import EvictionLog, EvictionScores, Expiry
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.rows import RowLayout
from emblib.grad_mode import without_gradients
from emblib.ops import hash
from emblib.specs import DynamicSpec


class FastTier(Protocol):
    """Interface of the tables in front of a store.

    `emblib.dynamic.state.DynamicState` implements it, and describes the attributes.
    """

    specs: tuple[DynamicSpec, ...]
    table_names: list[str]
    optimizer_name: str
    index: HashIndex
    layout: RowLayout
    hyperparams: Tensor
    expiry: Expiry | None
    scores: EvictionScores | None
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

    Rows are addressed by slot. Overflow rows, which no key has, follow the slots of their table.

    Args:
        tier: the tables.
    """

    def __init__(self, tier: FastTier) -> None:
        self._tier = tier

    def buffers_of(self, table: int) -> Iterator[Tensor]:
        """Yield each row buffer of a table as `[slots + overflow rows, width]`, a view."""
        tier = self._tier
        layout = tier.layout
        num_rows = tier.specs[table].rows + layout.overflow_rows
        for index, buffer in enumerate(tier.row_buffers):
            begin, width = layout.first_element(table, index), layout.width(table, index)
            yield buffer[begin : begin + num_rows * width].view(num_rows, width)

    def gather(self, table: int, slots: Tensor) -> Tensor:
        """Return copies of rows as uint8 `[n, row_bytes]` on the CPU.

        `slots` are int64 `[n]`, on any device. Slot -1 reads zeros.
        """
        slots = slots.to(self._tier.index.tags.device)
        buffers = self.buffers_of(table)
        return as_bytes([hash.hash_read_rows(buffer, slots, 0.0) for buffer in buffers])

    def scatter(self, table: int, slots: Tensor, rows: Tensor) -> None:
        """Write rows, uint8 `[n, row_bytes]` on the CPU, into slots, int64 `[n]`, on any device.

        Slot -1 is skipped.
        """
        first_byte, slots = 0, slots.to(self._tier.index.tags.device)
        for buffer in self.buffers_of(table):
            num_bytes = buffer.shape[1] * buffer.itemsize
            # A copy even of one row: a view of another dtype needs aligned bytes.
            values = rows[:, first_byte : first_byte + num_bytes]
            values = values.clone(memory_format=torch.contiguous_format)
            hash.hash_write_rows_(buffer, slots, values.view(buffer.dtype).to(buffer.device))
            first_byte += num_bytes

    def clock_note(self) -> dict[str, Any]:
        """Return what a store notes of the clocks of its tables, for `set_clocks`.

        "tick" is the number of training batches, "steps" the scores of the next batch (where
        eviction assigns scores), and "times" the times of `Expiry` (where a ttl is a time).
        """
        tier = self._tier
        note: dict[str, Any] = {"tick": tier.index.tick}
        if tier.scores is not None:
            note["steps"] = tier.scores.values.tolist()
        if tier.expiry is not None and tier.expiry.has_timed_ttls:
            note["times"] = tier.expiry.times.tolist()
        return note

    def set_clocks(self, note: dict[str, Any]) -> None:
        """Set the clocks of the tables to those of a note that may be of an earlier version."""
        tier, tick = self._tier, int(note["tick"])
        tier.index.set_tick(tick)
        if tier.scores is not None:
            tier.scores.resume_steps(note.get("steps", [tick + 1] * len(tier.specs)))
        if tier.expiry is not None and "times" in note:
            times = torch.tensor(note["times"], device="cpu")
            if times.shape == tier.expiry.times.shape:  # else of other ttls: ages are not known
                tier.expiry.times = times

    def fallback_bytes(self, table: int) -> bytes:
        """Return the fallback rows of a table, which the store keeps apart from rows of keys."""
        views = self._tier.layout.fallback_views(self._tier.row_buffers, table).values()
        rows = torch.cat([view.detach().cpu().reshape(-1).view(torch.uint8) for view in views])
        packed_rows = bytearray(rows.numel())
        if packed_rows:  # frombuffer refuses empty memory
            torch.frombuffer(packed_rows, dtype=torch.uint8).copy_(rows)
        return bytes(packed_rows)

    @without_gradients
    def set_fallback_bytes(self, table: int, packed_rows: bytes) -> None:
        """Set the fallback rows of a table to those that `fallback_bytes` returned.

        Raises:
            ValueError: the number of bytes is not that of this table.
        """
        views = self._tier.layout.fallback_views(self._tier.row_buffers, table).values()
        nbytes = sum(view.nbytes for view in views)
        if len(packed_rows) != nbytes:
            raise ValueError(
                f"the store has fallback rows of {len(packed_rows)} bytes for table "
                f"{self._tier.table_names[table]!r}, this module {nbytes}: choose "
                "DynamicSpec.fallback_rows as there, or name another store"
            )
        first_byte = 0
        for view in views:
            if view.numel():
                # A copy, because frombuffer warns of memory that cannot be written.
                view_bytes = bytearray(packed_rows[first_byte : first_byte + view.nbytes])
                rows = torch.frombuffer(view_bytes, dtype=view.dtype)
                view.copy_(rows.view(view.shape))
            first_byte += view.nbytes
