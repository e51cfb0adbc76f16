"""Every op survives what callers pass by mistake; valid calls do what the references say.

EMBLIB_FUZZ_SECONDS=3600 pytest tests/fuzz    how long, over all ops; not set: one batch per op
EMBLIB_FUZZ_SEED=7                            other calls; the same seed draws the same ones
"""

import os
import random
import time

import pytest
import torch

from tests.fuzz.batch import readable_tensors
from tests.fuzz.calls import CALLS
from tests.fuzz.mutations import broken
from tests.sharding import worlds

SECONDS = float(os.environ.get("EMBLIB_FUZZ_SECONDS", "0"))
SEED = os.environ.get("EMBLIB_FUZZ_SEED", "0")
BATCH = 60
GROUPS = 3  # ops per test
PATIENCE_SECONDS = 800.0


def test_every_op_has_calls() -> None:
    names = [n.partition("::") for n in torch._C._dispatch_get_all_op_names()]
    loaded = {name.partition(".")[0] for namespace, _, name in names if namespace == "emblib"}
    assert set(CALLS) == loaded


def test_broken_calls_are_between_guard_pages() -> None:
    """All arguments, the right ones too: an op that believes a wrong plan writes beyond those."""
    for op in sorted(CALLS):
        for number in range(5):
            draw = random.Random(f"{op} {number}")
            torch.manual_seed(number)
            for argument in broken(draw, CALLS[op](draw).arguments):
                for tensor in readable_tensors(argument):
                    malloced = tensor.untyped_storage().resizable()
                    assert tensor.numel() == 0 or not malloced, f"{op} {number}"


@pytest.mark.timeout(SECONDS / GROUPS + PATIENCE_SECONDS + 100)  # an hour exceeds the default
@pytest.mark.parametrize("group", range(GROUPS))
def test_calls_right_and_wrong(group: int) -> None:
    ops = sorted(CALLS)[group::GROUPS]
    end, first = time.monotonic() + SECONDS / GROUPS, 0
    while first == 0 or time.monotonic() < end:
        words = [",".join(ops), SEED, str(first), str(BATCH)]
        succeeded, _, errors = worlds.run_module("tests.fuzz.batch", words, PATIENCE_SECONDS)
        if not succeeded:
            lines = [line for line in errors.splitlines() if line.startswith("call ")]
            op, seed, number = lines[-1].split()[1:]
            again = f"python -m tests.fuzz.batch {op} {seed} {number} 1"
            pytest.fail(f"to see it again: {again}\n{errors[-4000:]}", pytrace=False)
        first += BATCH
