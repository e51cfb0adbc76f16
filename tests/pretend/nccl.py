"""gloo in the place of NCCL: `torch.distributed` as ranks on pretend GPUs use it.

`collectives.cpp` lets gloo work on copies in host memory. What ranks with the NCCL of a real GPU
may do, they may do here, with one exception: outputs are written by the wait for a collective, a
synchronization of the device alone does not write them.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


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


def install() -> None:
    """Let process groups of the backend "nccl" be made."""
    distributed_c10d._NCCL_AVAILABLE = True
    for module in (distributed_c10d, dist):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    distributed_c10d.default_pg_nccl_timeout = timedelta(minutes=10)
