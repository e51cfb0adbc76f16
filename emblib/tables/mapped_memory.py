"""Pinned host memory as CUDA tensors, which kernels read and write in place.

CUDA maps pinned memory into the addresses of every GPU. Reading a CPU tensor over such memory does
not wait for kernels, so its values may be older than the last step. `map_pinned` returns a CUDA
tensor over the same memory instead. Torch's operations on it run on the GPU in the order of its
streams, and its copies to the host wait, as with any tensor on the GPU.

Torch imports tensors of other libraries through DLPack. A capsule of the pinned tensor is exported,
its device is replaced by the GPU, and it is imported again:

    CUDA tensor and its views -> capsule -> ctypes array -> PinnedMapping -> pinned memory

Each object keeps the next one alive. Torch's allocator reuses freed pinned memory at once, because
it does not know of kernels that use the memory in place. So a `PinnedMapping`, which is deleted
after the last view, waits for its GPU before it frees the memory. A wait would invalidate the
capture of a graph, so while the current stream captures, the memory is kept until a later
`PinnedMapping` is deleted outside a capture. A capture on another stream is not noticed.
"""

import contextlib
import ctypes
import sys
from collections import deque

import torch
from torch import Tensor
from torch.utils import dlpack

_CUDA_DEVICE_TYPE = 2  # DLPack's kDLCUDA

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

# Memory of deleted mappings, and its GPU, for which the host has not waited yet.
_memory_to_free: deque[tuple[Tensor, torch.device]] = deque()


class _DLTensor(ctypes.Structure):
    """The first fields of DLPack's DLTensor, with which a DLManagedTensor begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


class PinnedMapping:
    """Keep pinned memory while a GPU uses it; the deletion waits for the GPU and frees the memory.

    During the capture of a graph, the deletion of a later `PinnedMapping` does both. `device` must
    have an index: the current GPU may be another one by then.
    """

    def __init__(self, pinned: Tensor, device: torch.device) -> None:
        self._pinned = pinned
        self._device = device

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        _memory_to_free.append((self._pinned, self._device))
        with contextlib.suppress(RuntimeError):  # an error of a kernel is raised by other calls
            _free_memory()


def _free_memory() -> None:
    """Wait for the kernels that may use the memory of deleted mappings, and free it.

    Does nothing while the current stream captures a graph.
    """
    if torch.cuda.is_current_stream_capturing():  # a wait would invalidate the capture
        return
    freed_memory = []  # on return, after the waits
    with contextlib.suppress(IndexError):  # other threads may pop some of them
        while True:
            freed_memory.append(_memory_to_free.popleft())
    for device in {device for _, device in freed_memory}:
        torch.cuda.synchronize(device)


def map_pinned(pinned: Tensor, device: torch.device) -> Tensor:
    """Return a tensor `[N]` on a GPU over the memory of a pinned tensor `[N]`.

    `pinned` must be contiguous; not checked. The result and its views keep the memory alive. When
    the last of them is deleted, the host waits for the GPU and frees the memory; during a graph
    capture, a later deletion does both. For an empty tensor the result is a new one. A `device`
    without an index is the current GPU.

    Raises:
        ValueError: the tensor has elements and is not pinned.
        RuntimeError: this torch has another version of DLPack. The host has then waited for the GPU
            as after a deletion.
    """
    if pinned.numel() == 0:
        return torch.empty(0, dtype=pinned.dtype, device=device)
    if not pinned.is_pinned():
        raise ValueError("a GPU reads only pinned host memory in place; use .pin_memory()")
    buffer = (ctypes.c_char * pinned.nbytes).from_address(pinned.data_ptr())
    index = torch.cuda.current_device() if device.index is None else device.index
    buffer.mapping = PinnedMapping(pinned, torch.device("cuda", index))  # type: ignore[attr-defined]
    capsule = dlpack.to_dlpack(torch.frombuffer(buffer, dtype=pinned.dtype))
    format_error = "this torch exports tensors in another format than DLPack's first one"
    try:
        exported = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
    except ValueError as error:  # the capsule of a later version has another name
        raise RuntimeError(format_error) from error
    if exported.data != pinned.data_ptr():
        raise RuntimeError(format_error)
    exported.device_type, exported.device_id = _CUDA_DEVICE_TYPE, index
    return dlpack.from_dlpack(capsule)
