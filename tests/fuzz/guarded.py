"""Tensors with a guard page right behind their last byte, or right before their first."""

import ctypes
import mmap

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_NONE = 0  # PROT_NONE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(tensor: Tensor, *, before: bool = False) -> Tensor:
    """A contiguous copy whose neighbours cannot be touched: the process dies of it.

    The memory is that of a mapping of its own, between two pages without access. `before` puts the
    copy at the start of it, so that a read before the first element is noticed; else the last
    element ends where the page behind begins.
    """
    tensor = tensor.contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return tensor.clone()
    room = -(-nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + PAGE + room):
        if _libc.mprotect(guard, PAGE, _NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = PAGE if before else PAGE + room - nbytes
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
    return copy.view(tensor.shape).copy_(tensor)


def guarded_view(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, a guard page behind the memory that it strides over."""
    storage = tensor.as_strided(
        (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
    )
    return guarded(storage).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
