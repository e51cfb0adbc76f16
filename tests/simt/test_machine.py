"""The emulated machine itself: collectives return what CUDA's do, broken kernels raise errors."""

import os
import subprocess
import sys

import pytest
import torch

from tests.simt.library import library, library_path


@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_block_sum(threads: int) -> None:
    x = torch.arange(1000.0)
    total = torch.empty(1)
    library().call("sum", x, x.numel(), total, threads)
    assert total.item() == x.sum().item()


def test_collectives() -> None:
    x = torch.tensor([3, -1, 4, 1, -5, 9, 2, 6] * 4, dtype=torch.int32)
    out = torch.empty(9, 32, dtype=torch.int32)
    library().call("collectives", x, out)
    lane = torch.arange(32)
    assert torch.equal(out[0], x[lane // 8 * 8 + (lane + 1) % 8])
    assert torch.equal(out[1], x[torch.where(lane % 16 >= 3, lane - 3, lane)])
    assert torch.equal(out[2], x[torch.where(lane + 5 < 32, lane + 5, lane)])
    assert torch.equal(out[3], x[lane ^ 4])
    bits = sum(1 << i for i in range(32) if x[i] > 0)
    assert (out[4].long() & 0xFFFFFFFF == bits).all()
    for i in range(32):
        same = sum(1 << j for j in range(32) if x[i] == x[j])
        assert out[5, i].item() & 0xFFFFFFFF == same
    assert (out[6] == x.max()).all()
    assert (out[7] == x.sum()).all()
    assert (out[8, :16] == 1).all()
    assert (out[8, 16:] == 0).all()


@pytest.mark.parametrize("threads", [1, 40, 512])
@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_clusters(blocks: int, threads: int) -> None:
    x = torch.arange(blocks * threads, dtype=torch.int32).view(blocks, threads)
    out = torch.empty_like(x)
    library().call("cluster_sums", x, out, blocks, threads)
    assert torch.equal(out, x.sum(0).int() * 10 + torch.arange(blocks).int().unsqueeze(1))


def test_all_bits_of_unwritten_shared_memory_are_set() -> None:
    out = torch.zeros(96, dtype=torch.int32)
    library().call("unwritten", out, out.numel())
    assert (out == -1).all()


@pytest.mark.parametrize("order", ["", "reverse"])
def test_threads_run_in_order_or_in_the_opposite_order(order: str) -> None:
    """The emulation reads the order once per process."""
    code = """
import ctypes, sys
count, out = ctypes.c_int32(0), (ctypes.c_int32 * 96)()
words = (ctypes.c_int64 * 3)(ctypes.addressof(count), ctypes.addressof(out), 96)
ctypes.CDLL(sys.argv[1]).simt_order(words)
print(*out)
"""
    command = [sys.executable, "-c", code, str(library_path())]
    environment = os.environ | {"EMBLIB_SIMT_ORDER": order}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    threads = range(96)
    expected = reversed(threads) if order == "reverse" else threads
    assert [int(word) for word in done.stdout.split()] == list(expected)


def test_memory_of_a_block_that_has_left_is_lost() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    library().call("late_access", out)
    assert -1 in out.tolist()


def test_atomics() -> None:
    x = torch.tensor([3, -7, 0x02010300, 5, 0], dtype=torch.int32)
    start, out = x.clone(), torch.empty(9, 5, dtype=torch.int32)
    library().call("atomics", x, 4, out, 5)
    remains = (start.clamp(max=4), start.clamp(min=4), torch.full_like(start, 4))
    for row, want in zip((0, 2, 4), remains, strict=True):
        assert torch.equal(out[row], start)
        assert torch.equal(out[row + 1], want)
    assert torch.equal(out[6], start)
    assert torch.equal(out[7], torch.where(start == 3, 4, start))
    equal = [0xFF * (a == b) for s in start.tolist() for a, b in _bytes(s, 0x02000300)]
    assert out[8].view(torch.uint8).tolist() == equal


def _bytes(*words: int) -> list[tuple[int, ...]]:
    return list(zip(*(word.to_bytes(4, "little", signed=word < 0) for word in words), strict=True))


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (0, "(left|leaves) the kernel"),
        (1, "threads meet at different __syncthreads"),
        (2, "deadlock, no thread can go on"),
        (3, "meets lane [0-9]+ in another collective"),
        (4, "address_in_block before the first cluster_sync"),
        (5, "(left|leaves) the kernel"),
        (6, "threads meet at different cluster_syncs"),
        (7, "outside the dynamic shared memory"),
        (8, "a vector load of 16 bytes is misaligned"),
    ],
)
def test_broken_kernels_are_reported(which: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        library().call("broken", which)
    test_block_sum(64)  # the machine works on
