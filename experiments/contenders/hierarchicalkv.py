"""HierarchicalKV's hash table on a GPU, through the library that a user has built (docs/peers.md).

The environment variable EMBLIB_HIERARCHICALKV names the library, which is built from
hierarchicalkv.cu and HierarchicalKV's headers. LRU, all slots in device memory.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from experiments.config.schema import OPERATIONS
from experiments.contenders.keys import KeyTable, KeyTask, Unsupported

VARIABLE = "EMBLIB_HIERARCHICALKV"
Prepared = tuple[Tensor, Tensor]
ENTRY_BYTES = 17  # of a slot: a key, its score and a digest
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t


def library() -> Any:
    """Load the library; an OSError says why it does not load."""
    found = ctypes.CDLL(os.environ[VARIABLE])
    found.hkv_create.restype = POINTER
    found.hkv_create.argtypes = [SIZE, SIZE, ctypes.c_int]
    found.hkv_destroy.argtypes = [POINTER]
    found.hkv_error.restype = ctypes.c_char_p
    found.hkv_size.argtypes = [POINTER, ctypes.POINTER(SIZE), POINTER]
    rows: list[Any] = [POINTER, SIZE, POINTER, POINTER]
    found.hkv_insert_or_assign.argtypes = [*rows, POINTER]
    found.hkv_find_or_insert.argtypes = [*rows, POINTER]
    for name in ("find", "find_rows", "find_or_insert_rows"):
        getattr(found, f"hkv_{name}").argtypes = [*rows, POINTER, POINTER]
    found.hkv_insert_and_evict.argtypes = [
        *rows,
        *[POINTER] * 3,
        ctypes.POINTER(SIZE),
        POINTER,
    ]
    found.hkv_erase.argtypes = [POINTER, SIZE, POINTER, POINTER]
    return found


LIBRARY = library()  # loaded with the module, so that the registry reports what does not load


class HierarchicalKV(KeyTable):
    """HierarchicalKV with all slots from the beginning; its slots are addresses of rows."""

    operations = tuple(OPERATIONS)
    erases = True

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        if task.device.type != "cuda":
            raise Unsupported("HierarchicalKV needs a GPU")
        self.slots = 1 << (task.slots - 1).bit_length()
        index = torch.device(task.device).index or 0
        self.table = LIBRARY.hkv_create(self.slots, task.dim, index)
        if not self.table:
            raise RuntimeError(LIBRARY.hkv_error().decode())

    def __del__(self) -> None:
        if getattr(self, "table", None):
            LIBRARY.hkv_destroy(self.table)

    def _call(self, name: str, *arguments: Any) -> None:
        stream = torch.cuda.current_stream(self.task.device).cuda_stream
        if getattr(LIBRARY, f"hkv_{name}")(self.table, *arguments, stream):
            raise RuntimeError(LIBRARY.hkv_error().decode())

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Insert the keys."""
        self.insert_or_assign(self.prepare(keys, values))

    def find_slots(self, prepared: Prepared) -> Tensor:
        """Return the addresses of the rows, -1 for absent keys."""
        return self._rows("find_rows", prepared[0])

    def find_or_insert_slots(self, prepared: Prepared) -> Tensor:
        """Return the addresses of the rows; new keys have rows that nothing has written."""
        return self._rows("find_or_insert_rows", prepared[0])

    def _rows(self, name: str, keys: Tensor) -> Tensor:
        rows = torch.full_like(keys, self.absent)
        found = torch.empty_like(keys, dtype=torch.bool)
        self._call(name, len(keys), keys.data_ptr(), rows.data_ptr(), found.data_ptr())
        return rows if name == "find_or_insert_rows" else rows.masked_fill_(~found, self.absent)

    def find(self, prepared: Prepared) -> Tensor:
        """Return copies of the rows."""
        keys, _ = prepared
        rows = torch.empty(len(keys), self.task.dim, device=keys.device)
        found = torch.empty_like(keys, dtype=torch.bool)
        self._call("find", len(keys), keys.data_ptr(), rows.data_ptr(), found.data_ptr())
        return rows

    def find_or_insert(self, prepared: Prepared) -> Tensor:
        """Insert new keys with the given rows, which it overwrites with the rows of all."""
        keys, values = prepared
        self._call("find_or_insert", len(keys), keys.data_ptr(), values.data_ptr())
        return values

    def insert_or_assign(self, prepared: Prepared) -> None:
        """Assign the given rows to all keys."""
        keys, values = prepared
        self._call("insert_or_assign", len(keys), keys.data_ptr(), values.data_ptr())

    def insert_and_evict(self, prepared: Prepared) -> Tensor:
        """Insert; return the keys of the evicted rows."""
        keys, values = prepared
        evicted, rows, scores = (torch.empty_like(t) for t in (keys, values, keys))
        count = SIZE()
        tensors = (keys, values, evicted, rows, scores)
        addresses = [tensor.data_ptr() for tensor in tensors]
        self._call("insert_and_evict", len(keys), *addresses, ctypes.byref(count))
        return evicted[: count.value]

    def erase(self, keys: Tensor) -> None:
        """Take them out."""
        keys = keys.to(self.task.device)
        self._call("erase", len(keys), keys.data_ptr())

    def size(self) -> int:
        """Return the number of keys."""
        found = SIZE()
        self._call("size", ctypes.byref(found))
        return int(found.value)

    def nbytes(self) -> int:
        """Return the bytes of slots and rows."""
        return self.slots * (ENTRY_BYTES + 4 * self.task.dim)
