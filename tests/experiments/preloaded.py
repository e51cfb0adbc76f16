"""Loaded once by the process that forks children of runs: emblib, the harness, and digests.

The digests of all sources take a second of each run; children inherit them.
"""

from experiments.machine import sources
from experiments.results import identity
from experiments.run import worker  # noqa: F401
from tests.experiments import smoke_host  # noqa: F401

sources.digests("cpu")
identity.code_id()
identity.bench_version()
