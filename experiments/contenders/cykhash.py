"""cykhash's Int64toInt64Map: khash behind Cython, one thread, buffers in and out."""

from __future__ import annotations

import numpy as np
import torch
from cykhash import Int64toInt64Map, Int64toInt64Map_from_buffers, Int64toInt64Map_to
from torch import Tensor

from experiments.contenders.keys import KeyTable, KeyTask, Prepared, Unsupported

SLOT_BYTES = 16.25  # bytes per slot: key, value and two bits; the number of slots is a power of 2
MAX_LOAD = 0.77  # keys per slot at which khash doubles its slots


class Cykhash(KeyTable):
    """cykhash's map from keys to slots, which are numbered in the order of insertion; no values."""

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        if task.device.type != "cpu":
            raise Unsupported("cykhash is for the CPU")
        self.map = Int64toInt64Map()

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Build a map of the given keys, then merge it into `self.map`."""
        num_filled = len(self.map)
        slots = np.arange(num_filled, num_filled + len(keys))
        new_map = Int64toInt64Map_from_buffers(keys.numpy(), slots)
        if num_filled:
            self.map.update(new_map)
        else:
            self.map = new_map

    def find_slots(self, prepared: Prepared) -> Tensor:
        keys, _ = prepared
        slots = np.empty(len(keys), np.int64)
        Int64toInt64Map_to(self.map, keys.numpy(), slots, False, self.absent)
        return torch.from_numpy(slots)

    def size(self) -> int:
        return len(self.map)

    def nbytes(self) -> int:
        """Compute the bytes from khash's layout, because the map does not report them."""
        num_slots = 4
        while num_slots * MAX_LOAD < max(1, len(self.map)):
            num_slots *= 2
        return int(num_slots * SLOT_BYTES)
