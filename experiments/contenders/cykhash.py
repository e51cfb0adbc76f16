"""cykhash's Int64toInt64Map: khash behind Cython, one thread, buffers in and out."""

from __future__ import annotations

import numpy as np
import torch
from cykhash import Int64toInt64Map, Int64toInt64Map_from_buffers, Int64toInt64Map_to
from torch import Tensor

from experiments.contenders.keys import KeyTable, KeyTask, Unsupported

Prepared = tuple[Tensor, Tensor]
ABSENT = -1
SLOT_BYTES = 16.25  # bytes per slot: key, value and two bits; the number of slots is a power of 2
MAX_LOAD = 0.77  # keys per slot at which khash doubles its slots


class Cykhash(KeyTable):
    """cykhash's map from keys to slots; the slot of a key is the number of keys before it."""

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        if task.device.type != "cpu":
            raise Unsupported("cykhash is for the CPU")
        self.map = Int64toInt64Map()

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Build a map of the new keys, then merge it into the map."""
        begin = len(self.map)
        numbers = np.arange(begin, begin + len(keys))
        added = Int64toInt64Map_from_buffers(keys.numpy(), numbers)
        if begin:
            self.map.update(added)
        else:
            self.map = added

    def find_slots(self, prepared: Prepared) -> Tensor:
        out = np.empty(len(prepared[0]), np.int64)
        Int64toInt64Map_to(self.map, prepared[0].numpy(), out, False, ABSENT)
        return torch.from_numpy(out)

    def size(self) -> int:
        return len(self.map)

    def nbytes(self) -> int:
        """Compute the bytes from khash's layout, because the map does not report them."""
        slots = 4
        while slots * MAX_LOAD < max(1, len(self.map)):
            slots *= 2
        return int(slots * SLOT_BYTES)
