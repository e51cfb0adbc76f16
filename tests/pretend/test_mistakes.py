"""The pretend GPU catches mistakes that a GPU punishes, and the process goes on after each."""

import re
import subprocess
import sys
from functools import cache

import pytest
import torch

from tests.pretend.library import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")

PLACE = r"of allocation #\d+ \(\d+ bytes on cuda:\d, stream 0, {}, tests/pretend/mistakes.py:\d+\)"
IN_USE, FREED = PLACE.format("in use"), PLACE.format("FREED")
ENQUEUED = r"enqueued at tests/pretend/mistakes.py:\d+: illegal memory access"
CAPTURING = "operation not permitted when stream is capturing"

# What an error must say: the operation, the thread, the allocation and its owner.
ERRORS = {
    "host_reads_device_memory": rf"host code \(thread \d+\) touches device memory: byte 0 {IN_USE}",
    "kernel_reads_past_a_gradient": r"kernel emb::cuda::\w+<.*>, enqueued at .*: simt: block "
    r"\(0, 0, 0\), thread \d+: illegal memory access: past the end, at byte \d+ of allocation",
    "kernel_reads_freed_memory": rf"cudaMemcpyAsync, {ENQUEUED}: byte 0 {FREED}",
    "stream_without_a_wait": r"wrong result \[nan",
    "result_without_a_wait": r"wrong result \[nan",
    "memory_without_record_stream": rf"aten::mul.*, {ENQUEUED}: byte 0 {FREED}",
    "pinned_memory_freed_early": rf"cudaMemcpyAsync, {ENQUEUED}: 0x\w+ is not device memory",
    "scratch_one_byte_short": "CUB got 8511 bytes of scratch and needs 8512",
    "scratch_smaller_than_it_says": rf"SortPairs, {ENQUEUED}: past the end, at byte \d+ {IN_USE}",
    "write_into_the_rest_of_a_page": r"bytes outside allocation #\d+ of 12 bytes, made at tests/",
    "stream_of_another_device": "the stream is of cuda:1, the current device is cuda:0",
    "memory_of_another_device": rf"cudaMemcpyAsync, {ENQUEUED}: byte 0 {IN_USE}",
    "grid_of_zero_blocks": r"invalid configuration argument: grid \(0, 1, 1\)",
    "grid_too_large_in_y": r"invalid configuration argument: grid \(1, 65536, 1\)",
    "block_of_too_many_threads": r"invalid configuration argument: .* block \(1025, 1, 1\)",
    "capture_of_a_wait": f"{CAPTURING}: item",
    "capture_of_a_copy_from_pageable_memory": f"{CAPTURING}: a copy from pageable memory",
    "capture_of_an_unjoined_stream": "operations not joined to original stream",
    "replay_of_freed_memory": rf"copy, {ENQUEUED}: byte 0 {FREED}",
    "wait_in_a_step": r"synchronizing CUDA operation: item, at tests/pretend/mistakes.py:\d+",
}
# These need protection keys of the processor.
NEED_KEYS = {"host_reads_device_memory", "memory_of_another_device"}


@cache
def errors() -> dict[str, str]:
    """Make all mistakes in one process; return the errors by name."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.pretend.mistakes"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split("\t", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", ERRORS)
def test_mistake_is_caught(name: str) -> None:
    if name in NEED_KEYS and errors()["keys"] == "no":
        pytest.skip("this processor has no protection keys")
    assert re.search(ERRORS[name], errors()[name]), errors()[name] or "nothing noticed it"


def test_every_mistake_has_an_error() -> None:
    assert errors().keys() - {"keys"} == ERRORS.keys()
