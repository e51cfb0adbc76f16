"""gloo in the place of NCCL: `torch.distributed` as ranks on pretend GPUs use it.

`collectives.cpp` lets gloo work on copies in host memory. What ranks with the NCCL of a real GPU
may do, they may do here, with one exception: outputs are written by the wait for a collective, a
synchronization of the device alone does not write them.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Options:
    """torch.distributed.ProcessGroupNCCL.Options."""

    is_high_priority_stream = False
    _timeout: timedelta = timedelta(minutes=10)


class ProcessGroupNCCL(dist.ProcessGroupGloo):
    """torch.distributed.ProcessGroupNCCL."""

    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)

    def _shutdown(self) -> None:
        """Do nothing: gloo's connections end with the group."""

    def abort(self) -> None:
        """Do nothing: gloo's connections end with the group."""


def _keep_sharded_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Keep the gradients of `fully_shard` until the current stream has read them.

    PyTorch allocates them on a stream of its own and frees them with reads pending here. That is no
    fault: the stream waits for this one before it allocates again. Here freed memory is gone.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter.grad, DTensor):
                shard = parameter.grad.to_local()
                if shard.is_cuda:
                    shard.record_stream(torch.cuda.current_stream(shard.device))


def install() -> None:
    """Let process groups of the backend "nccl" be made, and keep what `fully_shard` frees."""
    distributed_c10d._NCCL_AVAILABLE = True
    for module in (distributed_c10d, dist):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    register_optimizer_step_pre_hook(_keep_sharded_gradients)
