"""What the lookups of a dynamic batch read and update, and what backward finds of it later."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from emblib.dynamic.hash_index import HashIndex, Inserted
from emblib.ops import lookups, tbe
from emblib.ops.hash import Keys, Misses
from emblib.tables.locks import ModuleLock


class Follower(Protocol):
    """What takes part in the training steps of a module, beside its index and its rows.

    `admit` comes before keys get places, `leaving` when they have them, with the rows of keys that
    gave way as they were, and `arriving` once all new rows hold their first values.
    """

    def admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """Which of the missing keys may have a place, bool `[L]` by miss, or None for all."""

    def leaving(self, keys: Keys, inserted: Inserted) -> None:
        """Keys gave way (`inserted.placed.evicted`); the rows of new keys are still theirs."""

    def arriving(self, keys: Keys, inserted: Inserted) -> None:
        """New keys have their first values, which may be overwritten."""


class Reads(NamedTuple):
    """What the lookups of a batch read: rows of their tables, or rows beside them.

    `indices` int64 `[L]` with -1 for nothing (zeros); where `slots` int32 `[L]` is not -1, that row
    of `beside` is read in its place.
    """

    indices: Tensor
    slots: Tensor | None = None
    beside: Tensor | None = None


class Step:
    """A batch from its forward to its backward (a session of `emblib.ops.lookups`).

    Rows move when a table grows, and keys leave. So what forward found is looked up again if the
    index has changed since: what has left in between is not updated, even if it has come again, and
    counted in `lost`. It watches the index while its graph exists, which may go backward again.
    """

    def __init__(
        self,
        lock: ModuleLock,
        index: HashIndex,
        keys: Keys,
        slots: Tensor,
        reads: Reads,
        lost: Tensor,
    ) -> None:
        self.lock = lock
        self._index, self._keys, self._slots, self._reads = index, keys, slots, reads
        self._version, self._lost = index.version, lost
        index.watch(self)
        self.batch: lookups.Lookup | None = None
        self.weighted = False  # whether sample weights get a gradient

    def is_stale(self) -> bool:
        """Whether rows may be elsewhere than forward found them."""
        return self._index.version != self._version

    def find(self) -> Tensor:
        """Where the rows are now."""
        return self._index.find(self._keys)

    def before_update(self) -> lookups.RowPlaces:
        """The rows that are updated, and those that are read."""
        batch = self.batch
        assert batch is not None
        slots, indices = self.locate()
        groups = tbe.group(batch.features, slots, batch.offsets, batch.total_rows, batch.bag_layout)
        return lookups.RowPlaces(groups, None, self._reads.slots, indices)

    def locate(self) -> tuple[Tensor, Tensor]:
        """Return where the rows of forward are now, -1 for none, and what its lookups read.

        Raises:
            RuntimeError: sample weights get a gradient, which needs a row that has left.
        """
        if not self.is_stale():
            return self._slots, self._reads.indices
        found = self.find()
        left = self._index.has_left(self._keys, found, self._version)
        slots = torch.where((self._slots < 0) | left, -1, found)
        lost = (self._slots >= 0) & (slots < 0)
        if self._reads.slots is not None:
            lost &= self._reads.slots < 0  # others were read beside the table
        if self.weighted and bool(lost.any()):
            raise RuntimeError(
                "the gradient of per_sample_weights needs the rows that forward read, but keys of "
                "the batch have left the table since; run backward before the next training forward"
            )
        self._lost += lost.sum()
        return slots, slots if self._reads.slots is None else self._where_read(slots)

    def _where_read(self, slots: Tensor) -> Tensor:
        assert self._reads.slots is not None
        return torch.where(self._reads.slots < 0, slots, 0)

    def after_update(self) -> None:
        """Nothing is left to do."""


class Reading:
    """A batch whose rows are read again in backward, and not updated."""

    def __init__(self, batch: lookups.Lookup, step: Step) -> None:
        self.lock = step.lock
        self._batch, self._step = batch, step
        step.weighted = True

    def before_update(self) -> lookups.RowPlaces:
        """The rows that forward read, where they are now."""
        _, indices = self._step.locate()
        return lookups.RowPlaces(lookups.groups_of(self._batch), None, self._batch.slots, indices)

    def after_update(self) -> None:
        """Nothing is left to do."""
