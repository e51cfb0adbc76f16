"""Start the ranks of a benchmark as processes of this machine."""

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run_ranks(size: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(rank, *arguments)` on each of `size` ranks of one thread, over gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ranks: Any = multiprocessing
    ranks.spawn(_join, args=(size, address, function, arguments), nprocs=size)


def _join(
    rank: int, size: int, address: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    function(rank, *arguments)
    dist.destroy_process_group()
