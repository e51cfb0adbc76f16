"""Loaded once by the process that forks children of runs: emblib, the harness, and digests.

The digests of all sources take a second of each run; children inherit them.
"""

import errno
from multiprocessing import reduction
from socket import socket

from experiments.machine import sources
from experiments.results import identity
from experiments.run import worker  # noqa: F401
from tests.experiments import smoke_host  # noqa: F401

sources.digests("cpu")
identity.code_id()
identity.bench_version()

_recvfds = reduction.recvfds


def recvfds(connection: socket, size: int) -> list[int]:
    """Receive file descriptors of a run; one that was killed before it sent them is ignored.

    The server of the standard library ends with EOFError then, and with it all later runs fail.
    """
    try:
        return _recvfds(connection, size)
    except EOFError as error:
        raise OSError(errno.ECONNABORTED, "a run was killed") from error


reduction.recvfds = recvfds
