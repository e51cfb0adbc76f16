"""Programs with one mistake each that a GPU may punish: `python -m tests.pretend.mistakes`.

One process runs them all, or those that are named, and prints a line for each: its name, a tab and
the error, or nothing where the mistake went unnoticed. `test_mistakes.py` says what must be there.
"""

import ctypes
import sys
from collections.abc import Callable

import torch

from tests.pretend import torch_cuda
from tests.pretend.torch_cuda import PretendGpu, Schedule, Settings, install

MISTAKES: dict[str, Callable[[PretendGpu], object]] = {}


def mistake(program: Callable[[PretendGpu], object]) -> Callable[[PretendGpu], object]:
    MISTAKES[program.__name__] = program
    return program


def copy_on_device(to: int, source: int, nbytes: int, stream: int = 0) -> None:
    """Start a kernel's copy between two addresses, whatever is there."""
    copy = gpu_library().pretend_cudaMemcpyAsync
    copy.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    _check(copy(to, source, nbytes, 3, stream or None))


def launch_nothing(grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
    """Launch an empty kernel."""
    _check(gpu_library().pretend_launch_nothing(*grid, *block))


def sort(n: int, scratch: int, nbytes: int) -> int:
    """Sort `n` keys with CUB; return the bytes of scratch that it wants."""
    wanted = ctypes.c_size_t(nbytes)
    function = gpu_library().pretend_sort
    size = ctypes.POINTER(ctypes.c_size_t)
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, size]
    keys = torch.arange(4 * n, dtype=torch.int32, device="cuda")
    _check(function(keys.data_ptr(), n, scratch or None, ctypes.byref(wanted)))
    return wanted.value


def gpu_library() -> ctypes.CDLL:
    assert torch_cuda.gpu is not None
    return torch_cuda.gpu.library


def _check(error: int) -> None:
    if error != 0:
        message = gpu_library().pretend_cudaGetErrorString
        message.restype = ctypes.c_char_p
        raise RuntimeError(message(error).decode())


def check_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise RuntimeError if the result is not what a correct program computes."""
    if not torch.equal(got.cpu(), want):
        raise RuntimeError(f"wrong result {got.cpu().tolist()}")


@mistake
def host_reads_device_memory(_: PretendGpu) -> None:
    x = torch.ones(4, device="cuda")
    assert ctypes.c_float.from_address(x.data_ptr()).value == 1
    torch.cuda.synchronize()


@mistake
def kernel_reads_past_a_gradient(_: PretendGpu) -> None:
    features = torch.tensor([[0, 0, 50, 16, 0, 0, 0, 0]], device="cuda")
    row, segments, lookup = torch.tensor([3]), torch.tensor([0, 1]).int(), torch.tensor([0]).int()
    bag = torch.tensor([1]).int()  # the gradient has one bag, number 0
    group = [x.cuda() for x in (row, segments, lookup, bag, torch.tensor([1]).int())]
    grad, offsets = torch.ones(1, 128, device="cuda"), torch.tensor([0, 1], device="cuda")
    torch.ops.emblib.tbe_row_grads(grad, features, *group, offsets, None, None, 0, 16).cpu()


@mistake
def kernel_reads_freed_memory(_: PretendGpu) -> None:
    freed, kept = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    address = freed.data_ptr()
    del freed
    copy_on_device(kept.data_ptr(), address, 16)
    kept.cpu()


@mistake
def stream_without_a_wait(gpu: PretendGpu) -> None:
    gpu.set_schedule(Schedule.SIDES_EARLY)
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        y = x * 2
    side.synchronize()
    with torch.cuda.stream(side):
        check_equal(y, torch.full((4,), 2.0))


@mistake
def result_without_a_wait(gpu: PretendGpu) -> None:
    gpu.set_schedule(Schedule.SIDES_LATE)
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    check_equal(y, torch.full((4,), 2.0))


@mistake
def memory_without_record_stream(gpu: PretendGpu) -> None:
    gpu.set_schedule(Schedule.SIDES_LATE)
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    del x
    side.synchronize()
    with torch.cuda.stream(side):
        check_equal(y, torch.full((4,), 2.0))


@mistake
def pinned_memory_freed_early(gpu: PretendGpu) -> None:
    gpu.set_schedule(Schedule.LAZY)
    source = torch.ones(4).pin_memory()
    out = torch.zeros(4, device="cuda")
    copy_on_device(out.data_ptr(), source.data_ptr(), 16)
    del source
    torch.cuda.synchronize()


@mistake
def scratch_one_byte_short(_: PretendGpu) -> None:
    needed = sort(1000, 0, 0)
    scratch = torch.empty(needed - 1, dtype=torch.uint8, device="cuda")
    sort(1000, scratch.data_ptr(), needed - 1)


@mistake
def scratch_smaller_than_it_says(_: PretendGpu) -> None:
    needed = sort(1000, 0, 0)
    scratch = torch.empty(needed - 64, dtype=torch.uint8, device="cuda")
    sort(1000, scratch.data_ptr(), needed)
    torch.cuda.synchronize()


@mistake
def write_into_the_rest_of_a_page(_: PretendGpu) -> None:
    x = torch.zeros(3, device="cuda")
    copy_on_device(x.data_ptr() + 12, x.data_ptr(), 4)
    del x
    torch.cuda.synchronize()


@mistake
def stream_of_another_device(_: PretendGpu) -> None:
    x = torch.zeros(4, device="cuda:1")
    stream = torch.cuda.Stream(1)
    copy_on_device(x.data_ptr(), x.data_ptr(), 16, stream=stream.cuda_stream)


@mistake
def memory_of_another_device(_: PretendGpu) -> None:
    x, y = torch.zeros(4, device="cuda:0"), torch.zeros(4, device="cuda:1")
    copy_on_device(x.data_ptr(), y.data_ptr(), 16)
    torch.cuda.synchronize()


@mistake
def grid_of_zero_blocks(_: PretendGpu) -> None:
    launch_nothing((0, 1, 1), (32, 1, 1))


@mistake
def grid_too_large_in_y(_: PretendGpu) -> None:
    launch_nothing((1, 65_536, 1), (32, 1, 1))


@mistake
def block_of_too_many_threads(_: PretendGpu) -> None:
    launch_nothing((1, 1, 1), (1025, 1, 1))


@mistake
def capture_of_a_wait(_: PretendGpu) -> None:
    x = torch.ones(4, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        int(x[0])


@mistake
def capture_of_a_copy_from_pageable_memory(_: PretendGpu) -> None:
    x = torch.ones(4, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.copy_(torch.zeros(4), non_blocking=True)


@mistake
def capture_of_an_unjoined_stream(_: PretendGpu) -> None:
    x = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)


@mistake
def replay_of_freed_memory(_: PretendGpu) -> None:
    x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x)
    del x
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()


@mistake
def wait_in_a_step(_: PretendGpu) -> None:
    x = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    x.sum().item()


def run(gpu: PretendGpu, name: str) -> str:
    """Make one mistake and return the error that came of it; the device works afterwards."""
    try:
        MISTAKES[name](gpu)
        error = gpu.settle()
    except RuntimeError as raised:
        error = str(raised)
    gpu.set_schedule(Schedule.EAGER)
    torch.cuda.set_sync_debug_mode("default")
    gpu.settle()
    check_equal(torch.ones(3, device="cuda").add(1), torch.full((3,), 2.0))
    return error


def main() -> None:
    gpu = install(Settings())
    print("keys", "yes" if gpu.catches_the_host() else "no", sep="\t")
    for name in sys.argv[1:] or MISTAKES:
        print(name, " ".join(run(gpu, name).split()), sep="\t", flush=True)


if __name__ == "__main__":
    main()
