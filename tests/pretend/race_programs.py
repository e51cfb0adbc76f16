"""Programs with and without races: `python -m tests.pretend.race_programs [NAMES]`.

One process runs them all, or those that are named, under every schedule and prints a line for each:
its name, the schedule and the error, or nothing, separated by tabs. `test_races.py` says what must
be there.
"""

import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from tests.pretend.mistakes import copy_on_device
from tests.pretend.torch_cuda import PretendGpu, Schedule, Settings, install

Program = Callable[[], object]
RACES: dict[str, Program] = {}
LEGAL: dict[str, Program] = {}


def race(program: Program) -> Program:
    RACES[program.__name__] = program
    return program


def legal(program: Program) -> Program:
    LEGAL[program.__name__] = program
    return program


def main_stream() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def side_stream() -> torch.cuda.Stream:
    """Return a new stream that waits for what the current stream has so far."""
    side = torch.cuda.Stream()
    side.wait_stream(main_stream())
    return side


def table() -> torch.nn.Module:
    from emblib import TableBatchedEmbeddingBags, TableSpec, optim

    return TableBatchedEmbeddingBags([TableSpec(50, 16)], optim.SGD(0.1), device="cuda")


def cached_table() -> torch.nn.Module:
    return host_table("managed_caching")


def host_table(placement: str) -> torch.nn.Module:
    from emblib import BoundsCheck, Placement, TableBatchedEmbeddingBags, TableSpec, optim

    spec = TableSpec(200, 8, placement=Placement(placement))
    return TableBatchedEmbeddingBags(
        [spec], optim.SGD(0.1), bounds_check=BoundsCheck.IGNORE, device="cuda"
    )


def batch() -> tuple[Tensor, Tensor]:
    return torch.arange(6, device="cuda"), torch.tensor([0, 2, 6], device="cuda")


def update(module: torch.nn.Module, ids: Tensor, offsets: Tensor) -> None:
    module(ids, offsets).sum().backward()


@race
def no_wait_before_a_prefetched_batch() -> object:
    module, (ids, offsets) = cached_table(), batch()
    side = side_stream()
    with torch.cuda.stream(side):
        module.prefetch(ids, offsets)
    with mock.patch("emblib.tables.cache._wait_for"):
        module(ids, offsets)
    torch.cuda.synchronize()
    return module


@race
def no_wait_for_an_input() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        x * 2


@race
def no_record_stream() -> object:
    x = torch.ones(4, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        y = x * 2
    del x
    torch.zeros(4, device="cuda")
    return y


@race
def event_recorded_too_early() -> None:
    side = side_stream()
    event = torch.cuda.Event()
    with torch.cuda.stream(side):
        event.record()
        x = torch.ones(4, device="cuda")
    main_stream().wait_event(event)
    x + 1


@race
def host_writes_what_a_copy_reads() -> object:
    source, to = torch.ones(4).pin_memory(), torch.empty(4, device="cuda")
    to.copy_(source, non_blocking=True)
    source.fill_(2)
    return source, to


@race
def host_writes_what_a_kernel_reads() -> object:
    source, to = torch.ones(4).pin_memory(), torch.empty(4, device="cuda")
    copy_on_device(to.data_ptr(), source.data_ptr(), 16)
    source.numpy()[2] = 3
    return source, to


@race
def host_reads_what_a_copy_writes() -> object:
    source, to = torch.ones(4, device="cuda"), torch.empty(4).pin_memory()
    to.copy_(source, non_blocking=True)
    to.sum()
    return source, to


@race
def host_frees_what_a_kernel_reads() -> None:
    source, to = torch.ones(4).pin_memory(), torch.empty(4, device="cuda")
    copy_on_device(to.data_ptr(), source.data_ptr(), 16)
    del source


@race
def two_streams_update_a_table() -> None:
    module, (ids, offsets) = table(), batch()
    side = side_stream()
    with torch.cuda.stream(side):
        update(module, ids, offsets)
    update(module, ids, offsets)


@race
def lookup_during_an_update() -> object:
    module, (ids, offsets) = table(), batch()
    out = module(ids, offsets).sum()
    side = side_stream()
    with torch.cuda.stream(side), torch.no_grad():
        module(ids, offsets)
    out.backward()
    return module


@race
def write_of_a_row_that_is_looked_up() -> object:
    module, (ids, offsets) = table(), batch()
    side = side_stream()
    with torch.cuda.stream(side):
        module.table_weights()[0][5].fill_(1)
    with torch.no_grad():
        module(ids, offsets)
    return module


@race
def branches_of_a_graph_without_a_wait() -> None:
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(main_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        x.mul_(2)
        main_stream().wait_stream(side)
    graph.replay()


@race
def replay_without_a_wait() -> None:
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    with torch.cuda.stream(torch.cuda.Stream()):
        x.sum()


@race
def memory_freed_before_a_replay() -> None:
    x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x)
    del x
    graph.replay()


@legal
def events_and_stream_waits() -> None:
    side, event = side_stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        x = torch.ones(4, device="cuda")
        event.record()
    main_stream().wait_event(event)
    y = x + 1
    x.record_stream(main_stream())
    third = side_stream()
    with torch.cuda.stream(third):
        (y + x).add_(1)
    torch.cuda.synchronize()


@legal
def a_recorded_stream() -> None:
    x = torch.ones(4, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        y = x * 2
    x.record_stream(side)
    del x
    torch.zeros(4, device="cuda").add_(1)
    main_stream().wait_stream(side)
    y.cpu()


@legal
def a_wait_before_memory_is_used_again() -> None:
    x = torch.ones(4, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x * 2
    del x
    main_stream().wait_stream(side)
    torch.zeros(4, device="cuda")


@legal
def memory_used_again_on_its_stream() -> None:
    for i in range(5):
        x = torch.ones(100, device="cuda")
        x.add_(i)
        del x


@legal
def host_waits() -> None:
    side, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)
    side.synchronize()
    x.add_(1)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)
        assert x.sum().item() == 16
    del x
    torch.zeros(4, device="cuda")


@legal
def a_query_that_succeeds() -> None:
    side, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)
    event = side.record_event()
    while not event.query():
        side.synchronize()
    x.add_(1)


@legal
def host_uses_pinned_memory_after_a_wait() -> None:
    source, to = torch.ones(4).pin_memory(), torch.empty(4).pin_memory()
    for i in range(3):
        source.fill_(i)
        x = source.to("cuda", non_blocking=True)
        to.copy_(x + 1, non_blocking=True)
        torch.cuda.synchronize()
        assert to.sum().item() == 4 * (i + 1)


@legal
def host_writes_the_other_slot() -> None:
    slots, to = torch.ones(2, 4).pin_memory(), torch.empty(4, device="cuda")
    for i in range(4):
        slots[i % 2].fill_(i)
        to.copy_(slots[i % 2], non_blocking=True)
        slots[1 - i % 2, 1:3] = 5
        main_stream().synchronize()


@legal
def pinned_memory_freed_during_a_copy() -> None:
    torch.ones(4).pin_memory().to("cuda", non_blocking=True)


@legal
def several_streams_read() -> None:
    x = torch.ones(4, device="cuda")
    first, second = side_stream(), side_stream()
    for stream in (first, second):
        with torch.cuda.stream(stream):
            x * 2
        x.record_stream(stream)
    x * 3


@legal
def streams_write_parts_of_a_tensor() -> None:
    x = torch.ones(7, 5, dtype=torch.int8, device="cuda")
    side = side_stream()
    with torch.cuda.stream(side):
        x[:, 2].fill_(3)
        x[0, :2] = x[0, 3:]
    x[1:, ::4].add_(1)
    main_stream().wait_stream(side)
    x.cpu()


@legal
def a_prefetched_batch() -> None:
    module, (ids, offsets) = cached_table(), batch()
    side = side_stream()
    for _ in range(3):
        side.wait_stream(main_stream())
        with torch.cuda.stream(side):
            module.prefetch(ids, offsets)
        main_stream().wait_stream(side)
        update(module, ids, offsets)
    module.flush()
    torch.cuda.synchronize()


@legal
def a_module_with_pinned_tables_dropped_while_it_trains() -> None:
    module, (ids, offsets) = cached_table(), batch()
    update(module, ids, offsets)
    del module  # which waits: the allocator does not know what kernels read in place


@legal
def a_view_of_pinned_tables_dropped_while_it_is_written() -> None:
    module, (ids, offsets) = host_table("managed"), batch()
    (weight,) = module.table_weights()
    update(module, ids, offsets)
    del module
    weight.add_(1)
    del weight  # which waits
    torch.ones(200, 8).pin_memory().fill_(2)


@legal
def managed_tables_read_and_written_between_steps() -> None:
    module, (ids, offsets) = host_table("managed"), batch()
    (weight,) = module.table_weights()
    for _ in range(2):
        update(module, ids, offsets)
        weight.mul_(0.5)
        weight.cpu().sum().item()
        module.load_state_dict(module.state_dict())


@legal
def write_of_another_row() -> None:
    module, (ids, offsets) = table(), batch()
    side = side_stream()
    with torch.cuda.stream(side):
        module.table_weights()[0][6].fill_(1)
    with torch.no_grad():
        module(ids, offsets)
    main_stream().wait_stream(side)


@legal
def streams_take_turns_with_a_table() -> None:
    module, (ids, offsets) = table(), batch()
    update(module, ids, offsets)
    side = side_stream()
    with torch.cuda.stream(side):
        update(module, ids, offsets)
    main_stream().wait_stream(side)
    update(module, ids, offsets)


@legal
def replays_of_a_graph_with_branches() -> None:
    x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(main_stream())
        with torch.cuda.stream(side):
            y.add_(x)
        z = x + 1
        main_stream().wait_stream(side)
        x.copy_(z)
    for _ in range(3):
        graph.replay()
    y.add_(x)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        graph.replay()
    side.synchronize()
    assert x.sum().item() == 16


@legal
def copies_between_devices() -> None:
    x = torch.ones(4, device="cuda:0")
    y = x.to("cuda:1")
    x.add_(1)
    y.add_(1)
    x.copy_(y)
    y.fill_(0)


def run(gpu: PretendGpu, program: Program) -> str:
    """Run a program and return the error that it caused."""
    try:
        kept = program()
        error = gpu.settle()
        del kept
    except RuntimeError as raised:
        error = str(raised)
    gpu.settle()
    return error


def main() -> None:
    gpu = install(Settings(detects_races=True))
    checks_the_host = gpu.catches_the_host()
    print("keys", "", "yes" if checks_the_host else "no", sep="\t")
    programs = {**RACES, **LEGAL}
    for name in sys.argv[1:] or programs:
        for schedule in Schedule:
            gpu.set_schedule(schedule)
            error = run(gpu, programs[name])
            print(name, schedule, " ".join(error.split()), sep="\t", flush=True)


if __name__ == "__main__":
    main()
