"""Loaded once by the process that forks children of runs: emblib, the harness, and digests.

The digests of all sources take a second of each run; children inherit them. Children measure the
ceilings of the machine in a cache, as in smoke runs: in memory that takes half a minute of
processor time of each run that is not one, and gigabytes.
"""

import errno
import socket
from multiprocessing import reduction

from experiments.machine import sources
from experiments.results import identity
from experiments.run import worker
from tests.experiments import smoke_host  # noqa: F401

sources.digests("cpu")
identity.code_id()
identity.bench_version()
worker.CEILING_SECONDS = 0.0

_receive_descriptors = reduction.recvfds


def _receive_or_abort(connection: socket.socket, size: int) -> list[int]:
    """Receive descriptors; report a client that was killed before as an aborted connection.

    The fork server ignores aborted connections. An EOFError would end it, and with it the runs of
    all other clients.
    """
    try:
        return _receive_descriptors(connection, size)
    except EOFError:
        raise ConnectionAbortedError(errno.ECONNABORTED, "the client ended") from None


reduction.recvfds = _receive_or_abort
