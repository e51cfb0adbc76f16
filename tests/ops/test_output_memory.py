"""Memory of outputs on the CPU: kept when a tensor dies, and used again by the next step."""

import copy
import ctypes
import os
import platform
import resource
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from emblib import (
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableBatchedTTEmbeddingBags,
    TableSpec,
    TTSpec,
)
from emblib.ops import tbe
from emblib.ops.codes import POOLING
from emblib.optim import SGD, RowwiseAdagrad
from emblib.specs import Pooling

TABLES, ROWS, DIM, BATCH, LENGTH = 8, 500, 32, 2048, 3
needs_blocks = pytest.mark.skipif(
    torch.__version__.startswith("2.10."), reason="torch 2.10 makes no tensor over a block"
)
needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="malloc_trim is of glibc"
)


def batch(batch_size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return indices and offsets; an output of this batch has two megabytes."""
    indices = torch.randint(ROWS, (TABLES * batch_size * LENGTH,))
    return indices, torch.arange(TABLES * batch_size + 1) * LENGTH


def tables(pooling: Pooling = Pooling.SUM) -> TableBatchedEmbeddingBags:
    """Return tables that train with row-wise Adagrad."""
    specs = [TableSpec(ROWS, DIM)] * TABLES
    return TableBatchedEmbeddingBags(specs, optimizer=RowwiseAdagrad(lr=0.1), pooling=pooling)


def trains() -> TableBatchedTTEmbeddingBags:
    """Return tensor trains that train with SGD."""
    return TableBatchedTTEmbeddingBags(
        [TTSpec(ROWS, DIM, ranks=(4, 4))] * TABLES, optimizer=SGD(lr=0.1)
    )


def quantized() -> QuantizedEmbeddingBags:
    """Return tables that only look up."""
    return QuantizedEmbeddingBags.from_float(tables())


KINDS: dict[str, Callable[[], torch.nn.Module]] = {
    "sum": tables,
    "mean": lambda: tables(Pooling.MEAN),
    "none": lambda: tables(Pooling.NONE),
    "trains": trains,
    "quantized": quantized,
}


@needs_blocks
@needs_glibc
@pytest.mark.parametrize("kind", KINDS)
def test_a_steady_loop_has_no_page_faults(kind: str) -> None:
    """Although the heap gives all free memory back to the system before each step."""
    module, arguments = KINDS[kind](), batch()
    libc = ctypes.CDLL("libc.so.6")
    grad: Tensor | None = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faults are counted in this thread
    try:
        faults = []
        for _ in range(5):
            libc.malloc_trim(0)
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            out = module(*arguments)
            if out.requires_grad:
                grad = torch.ones_like(out) if grad is None else grad
                out.backward(grad)
            faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
            del out
    finally:
        torch.set_num_threads(threads)
    output_pages = BATCH * TABLES * DIM * 4 // 4096
    # Small allocations of torch and Python remain; the first steps fill the blocks.
    assert min(faults[2:]) < output_pages // 4, faults


def test_outputs_that_live_are_not_used_again() -> None:
    module, (indices, offsets) = tables(), batch()
    with torch.no_grad():
        outputs = [module(indices.roll(i), offsets) for i in range(4)]
        copies = [out.clone() for out in outputs]
        views = [out[1:] for out in outputs]
        del outputs
        arrays = [view.numpy() for view in views]
        del views
        for i in range(4):
            module(indices.roll(-i), offsets)
    for array, values in zip(arrays, copies, strict=True):
        assert torch.equal(torch.from_numpy(array), values[1:])


def test_an_output_behaves_like_any_tensor() -> None:
    out = tables()(*batch()).detach()
    assert out.device == torch.device("cpu")
    assert out.untyped_storage().nbytes() == out.numel() * 4
    assert torch.equal(copy.deepcopy(out), out)
    values = out.clone()
    assert torch.equal(out.share_memory_(), values)
    assert out.is_shared()


def test_outputs_die_in_other_threads() -> None:
    module, arguments = tables(), batch()
    expected = module(*arguments).detach().clone()

    def look_up() -> None:
        for _ in range(20):
            with torch.no_grad():
                results.append(torch.equal(module(*arguments), expected))

    results: list[bool] = []
    threads = [threading.Thread(target=look_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


def test_outputs_of_a_batch_of_another_size() -> None:
    module = tables()
    with torch.no_grad():
        for size in (1024, 900, 300, 2048, 1024):
            indices, offsets = batch(size)
            out = module(indices, offsets)
            rows = [t.reshape(ROWS, DIM) for t in module.weights.reshape(TABLES, -1)]
            for t, table in enumerate(rows):
                bags = indices.reshape(TABLES, size, LENGTH)[t]
                expected = torch.nn.functional.embedding_bag(bags, table, mode="sum")
                torch.testing.assert_close(out[:, t * DIM : (t + 1) * DIM], expected)


def test_an_output_whose_size_overflows_raises() -> None:
    """Modulo 2^64 the output would have a megabyte."""
    features, offsets = torch.tensor([[0, 0, ROWS, DIM, 0, 0, 0, 0]]), torch.arange(5)
    groups = tbe.group(features, torch.zeros(4, dtype=torch.int64), offsets, ROWS)
    batch_of_grad = (torch.ones(4, DIM), features, *groups, offsets, None, None)
    with pytest.raises(RuntimeError, match="tbe_row_grads: can't allocate memory for a tensor"):
        tbe.tbe_row_grads(*batch_of_grad, POOLING["sum"], 2**62 + 2**16)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_looks_up() -> None:
    module, arguments = tables(), batch()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child has no other threads of torch
    try:
        with torch.no_grad():
            expected = module(*arguments)
            child = os.fork()
            if child == 0:
                same = torch.equal(module(*arguments), expected)
                os._exit(0 if same else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(threads)
