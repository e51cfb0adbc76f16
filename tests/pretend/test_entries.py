"""The short set of the pretend GPU calls every CUDA entry of csrc."""

import os

import pytest

from tests.pretend import torch_cuda


@pytest.mark.cuda
def test_every_entry_is_called() -> None:
    if torch_cuda.gpu is None or "EMBLIB_PRETEND_COUNT" not in os.environ:
        pytest.skip("counts at the end of `make pretend-test`")
    calls = torch_cuda.gpu.entry_calls()
    assert len(calls) > 30
    never = sorted(name for name, count in calls.items() if count == 0)
    assert not never, f"{len(never)} of {len(calls)} entries are never called: {', '.join(never)}"
