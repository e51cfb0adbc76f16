"""Copies of modules with keys for other processes.

`torch.multiprocessing` sends a tensor as shared memory, so that both processes change the same
values. A table with keys also has an index, a lock and counts, which are those of one process, so
sharing some of its tensors would damage it. It is sent as a complete copy, by value.
"""

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor


class SentAsCopy:
    """Mixin of modules that `torch.multiprocessing` sends as copies, and of their subclasses."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ForkingPickler.register(cls, _as_bytes)


def _as_bytes(module: Any) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    """Return the function that unpickles a module, and its argument, bytes with all tensors.

    Tensors in shared memory would have to live until the new process has started. Copies that a
    module makes while it is pickled do not live so long.
    """
    return pickle.loads, (pickle.dumps(module, pickle.HIGHEST_PROTOCOL),)


def check_not_shared(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise RuntimeError for a function of `nn.Module._apply` that moves tensors to shared memory.

    This is `share_memory()`.
    """
    moved = fn(torch.empty(1, device="cpu"))
    if moved.is_cpu and moved.untyped_storage().is_shared():
        raise RuntimeError(
            "hash tables and tensor trains with a cache cannot be shared between processes: leave "
            "share_memory() out and pass the module to the process, which gets a copy "
            "(docs/threads.md); other tables can be shared, in a collection without these"
        )
