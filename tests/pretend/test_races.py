"""The race detector names both sides of a race under every schedule, and is silent without one."""

import re
import subprocess
import sys
from functools import cache
from typing import NamedTuple

import pytest
import torch

from tests.pretend.library import ROOT
from tests.pretend.torch_cuda import Schedule

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
FILE = "tests/pretend/race_programs.py"


class Side(NamedTuple):
    """What an error must say of one side: its operation, and what is on its line of Python."""

    operation: str
    line: str


LOOKUP = Side("reads: kernel emb::cuda::short_bags_kernel", "module(ids, offsets)")
KERNEL_COPY = Side("reads: cudaMemcpyAsync", "copy_on_device(")
# Both sides, in the order of the program; which is named first depends on the schedule.
RACES = {
    "no_wait_before_a_prefetched_batch": (
        Side("(reads|writes): (allocation|a kernel|kernel)", "module.prefetch(ids, offsets)"),
        Side("(reads|writes): (allocation|a kernel|kernel)", "module(ids, offsets)"),
    ),
    "no_wait_for_an_input": (
        Side("writes: (allocation|aten::fill_)", "x = torch.ones(4"),
        Side("reads: aten::mul", "x * 2"),
    ),
    "no_record_stream": (
        Side("reads: aten::mul", "y = x * 2"),
        Side("writes: reuse of freed memory", "del x"),
    ),
    "event_recorded_too_early": (
        Side("writes: (allocation|aten::fill_)", "x = torch.ones(4"),
        Side("reads: aten::add", "x + 1"),
    ),
    "host_writes_what_a_copy_reads": (
        Side("reads: copy from pinned memory", "to.copy_(source"),
        Side("writes: the host", "source.fill_(2)"),
    ),
    "host_writes_what_a_kernel_reads": (KERNEL_COPY, Side("writes: the host", "source.numpy()[2]")),
    "host_reads_what_a_copy_writes": (
        Side("writes: copy to the host", "to.copy_(source"),
        Side("reads: the host", "to.sum()"),
    ),
    "host_frees_what_a_kernel_reads": (
        KERNEL_COPY,
        Side("writes: the host, which frees it", "del source"),
    ),
    "two_streams_update_a_table": (
        Side("reads: kernel emb::cuda::short_bags_kernel", "update(module"),
        Side("writes: kernel emb::cuda::update_kernel", ""),
    ),
    "lookup_during_an_update": (
        LOOKUP,
        Side("writes: kernel emb::cuda::update_kernel", ""),
    ),
    "write_of_a_row_that_is_looked_up": (
        Side("writes: aten::fill_", "[5].fill_(1)"),
        LOOKUP,
    ),
    "branches_of_a_graph_without_a_wait": (
        Side("writes: aten::add", "x.add_(1)"),
        Side("(reads|writes): aten::mul", "x.mul_(2)"),
    ),
    "replay_without_a_wait": (
        Side("writes: aten::add", "x.add_(1)"),
        Side("reads: aten::sum", "x.sum()"),
    ),
}
# These need protection keys of the processor.
NEED_KEYS = {"host_writes_what_a_copy_reads", "host_reads_what_a_copy_writes"}
NEED_KEYS |= {"host_writes_what_a_kernel_reads"}
USE_AFTER_FREE = r"copy, enqueued at .*: illegal memory access: byte 0 of .* FREED, .*, freed at "


@cache
def errors() -> dict[tuple[str, str], str]:
    """Run all programs in one process; return the errors by name and schedule."""
    command = [sys.executable, "-m", "tests.pretend.race_programs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (line.split("\t") for line in done.stdout.splitlines())
    return {(name, schedule): error for name, schedule, error in lines}


def source_lines(stack: str) -> str:
    """Return the text of the lines of a stack that are in the file of the programs."""
    text = (ROOT / FILE).read_text().splitlines()
    return "\n".join(text[int(n) - 1] for n in re.findall(rf"{FILE}:(\d+)", stack))


def names(error: str, side: Side) -> bool:
    return bool(re.match(side.operation, error)) and side.line in source_lines(error)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("name", RACES)
def test_both_sides_are_named(name: str, schedule: Schedule) -> None:
    if name in NEED_KEYS and errors()["keys", ""] == "no":
        pytest.skip("this processor has no protection keys")
    error = errors()[name, schedule]
    found = re.fullmatch(
        "(?:CUDA error: )?race: nothing orders two .*; one (.*); the other (.*)", error
    )
    assert found, error or "nothing noticed it"
    first, second = RACES[name]
    a, b = found.groups()
    assert (names(a, first) and names(b, second)) or (names(a, second) and names(b, first)), error


@pytest.mark.parametrize("schedule", Schedule)
def test_memory_freed_before_its_use_is_named(schedule: Schedule) -> None:
    error = errors()["memory_freed_before_a_replay", schedule]
    assert re.match(USE_AFTER_FREE, error), error
    assert "del x" in source_lines(error.split("freed at")[1])


def test_programs_without_races_are_silent() -> None:
    noisy = {"keys", "memory_freed_before_a_replay", *RACES}
    silent = {key: error for key, error in errors().items() if key[0] not in noisy}
    assert len(silent) >= 15 * len(Schedule)
    assert not any(silent.values()), silent
