"""HierarchicalKV's hash table as a contender: LRU, all slots in device memory.

The user builds a shared library from hierarchicalkv.cu and HierarchicalKV's headers and names it in
the environment variable EMBLIB_HIERARCHICALKV (docs/peers.md).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from experiments.config.schema import OPERATIONS
from experiments.contenders.keys import KeyTable, KeyTask, Prepared, Unsupported

LIBRARY_VARIABLE = "EMBLIB_HIERARCHICALKV"
ENTRY_BYTES = 17  # bytes per slot: key, score and digest
C_POINTER, C_SIZE = ctypes.c_void_p, ctypes.c_size_t


def load_library() -> Any:
    """Load the user's library and declare its functions.

    Functions other than hkv_create, hkv_destroy and hkv_error return 0, or 1 after an error.

    Raises:
        KeyError: EMBLIB_HIERARCHICALKV is not set.
        OSError: the library does not load.
        AttributeError: it lacks a function.
    """
    library = ctypes.CDLL(os.environ[LIBRARY_VARIABLE])
    library.hkv_create.restype = C_POINTER
    library.hkv_create.argtypes = [C_SIZE, C_SIZE, ctypes.c_int]
    library.hkv_destroy.argtypes = [C_POINTER]
    library.hkv_error.restype = ctypes.c_char_p
    library.hkv_size.argtypes = [C_POINTER, ctypes.POINTER(C_SIZE), C_POINTER]
    row_arguments: list[Any] = [C_POINTER, C_SIZE, C_POINTER, C_POINTER]  # table, count, keys, rows
    library.hkv_insert_or_assign.argtypes = [*row_arguments, C_POINTER]
    library.hkv_find_or_insert.argtypes = [*row_arguments, C_POINTER]
    for name in ("find", "find_rows", "find_or_insert_rows"):
        getattr(library, f"hkv_{name}").argtypes = [*row_arguments, C_POINTER, C_POINTER]
    library.hkv_insert_and_evict.argtypes = [
        *row_arguments,
        *[C_POINTER] * 3,  # evicted keys, rows and scores
        ctypes.POINTER(C_SIZE),
        C_POINTER,
    ]
    library.hkv_erase.argtypes = [C_POINTER, C_SIZE, C_POINTER, C_POINTER]
    return library


# Loaded at import, so that the registry reports a failure.
LIBRARY = load_library()


class HierarchicalKV(KeyTable):
    """HierarchicalKV with all its slots from the beginning, rounded up to a power of two.

    The slot of a key is the address of its row.
    """

    operations = tuple(OPERATIONS)
    has_erase = True

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        if task.device.type != "cuda":
            raise Unsupported("HierarchicalKV needs a GPU")
        self.num_slots = 1 << (task.slots - 1).bit_length()
        self.table = LIBRARY.hkv_create(self.num_slots, task.dim, task.device.index or 0)
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
        self.insert_or_assign(self.prepare(keys, values))

    def find_slots(self, prepared: Prepared) -> Tensor:
        return self._call_for_slots("find_rows", prepared[0])

    def find_or_insert_slots(self, prepared: Prepared) -> Tensor:
        """Return the addresses of the rows; rows of new keys are not initialised."""
        return self._call_for_slots("find_or_insert_rows", prepared[0])

    def _call_for_slots(self, name: str, keys: Tensor) -> Tensor:
        slots = torch.full_like(keys, self.absent)
        is_present = torch.empty_like(keys, dtype=torch.bool)
        self._call(name, len(keys), keys.data_ptr(), slots.data_ptr(), is_present.data_ptr())
        if name == "find_or_insert_rows":
            return slots
        return slots.masked_fill_(~is_present, self.absent)

    def find(self, prepared: Prepared) -> Tensor:
        keys, _ = prepared
        values = torch.empty(len(keys), self.task.dim, device=keys.device)
        is_present = torch.empty_like(keys, dtype=torch.bool)
        self._call("find", len(keys), keys.data_ptr(), values.data_ptr(), is_present.data_ptr())
        return values

    def find_or_insert(self, prepared: Prepared) -> Tensor:
        """Insert absent keys with the given values; return that tensor with the values of all."""
        keys, values = prepared
        self._call("find_or_insert", len(keys), keys.data_ptr(), values.data_ptr())
        return values

    def insert_or_assign(self, prepared: Prepared) -> None:
        keys, values = prepared
        self._call("insert_or_assign", len(keys), keys.data_ptr(), values.data_ptr())

    def insert_and_evict(self, prepared: Prepared) -> Tensor:
        keys, values = prepared
        evicted, evicted_values, scores = (
            torch.empty_like(tensor) for tensor in (keys, values, keys)
        )
        num_evicted = C_SIZE()
        tensors = (keys, values, evicted, evicted_values, scores)
        addresses = [tensor.data_ptr() for tensor in tensors]
        self._call("insert_and_evict", len(keys), *addresses, ctypes.byref(num_evicted))
        return evicted[: num_evicted.value]

    def erase(self, keys: Tensor) -> None:
        self._call("erase", len(keys), keys.data_ptr())

    def size(self) -> int:
        num_keys = C_SIZE()
        self._call("size", ctypes.byref(num_keys))
        return int(num_keys.value)

    def nbytes(self) -> int:
        return self.num_slots * (ENTRY_BYTES + 4 * self.task.dim)
