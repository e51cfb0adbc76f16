"""Clocks: what is inside a sample and what is not, on a machine and a GPU that only pretend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from experiments.config.schema import Config, DeviceKind, Mode, UsageError
from experiments.machine.cpu import last_level_cache_bytes
from experiments.run.runner import device_of
from experiments.timing.clock import (
    CACHES_FLUSHED,
    MAX_VAIN_SPINS,
    SAMPLES_PER_CHUNK,
    Clock,
    ColdClock,
    CudaClock,
    Phase,
    SampleTask,
    TorchGpu,
    UnsupportedMode,
    clock_for,
)
from tests.experiments.fake_gpu import FakeGpu, kernels

CPU = torch.device("cpu")


def test_each_mode_of_the_cpu_has_its_clock() -> None:
    assert type(clock_for(CPU)) is Clock
    assert type(clock_for(CPU, Mode.wall)) is Clock
    assert isinstance(clock_for(CPU, Mode.cold), ColdClock)
    assert [clock_for(CPU, m).mode for m in (Mode.hot, Mode.cold, Mode.wall)] == [
        Mode.hot,
        Mode.cold,
        Mode.wall,
    ]
    with pytest.raises(UnsupportedMode, match="device is cpu; use hot, cold or wall"):
        clock_for(CPU, Mode.graph)


def test_a_mode_that_the_device_lacks_is_a_usage_error() -> None:
    config = Config()
    config.device.kind, config.timing.modes = DeviceKind.cpu, [Mode.hot, Mode.graph]
    with pytest.raises(UsageError, match="device is cpu; choose from hot, cold, wall"):
        device_of(config)
    config.timing.modes = [Mode.hot, Mode.cold, Mode.wall]
    assert device_of(config) == CPU


def test_a_cold_sample_begins_after_the_caches_were_emptied() -> None:
    log = []
    ticks: Iterator[int] = iter([0, 7_000_000_000, 9_000_000_000])
    clock = ColdClock(lambda: log.append("flush"), lambda: next(ticks))
    (reading,) = clock.read([SampleTask(lambda: log.append("work"))])
    assert log == ["flush", "work"]
    assert (reading.seconds, reading.cost_s) == (2.0, 9.0)


def test_the_flush_is_larger_than_the_cache_and_touches_all_of_it() -> None:
    clock = ColdClock(now=lambda: 0)
    buffer = clock.flush()
    assert isinstance(buffer, torch.Tensor)
    assert buffer.nbytes == CACHES_FLUSHED * last_level_cache_bytes() >= 2 << 20
    assert buffer.min() == buffer.max() == 1.0  # every element was read and written


def test_behind_a_spin_launches_are_outside_the_time() -> None:
    gpu = FakeGpu()
    clock = CudaClock(gpu)
    readings = clock.read([kernels(gpu, 8e-6, count=4) for _ in range(10)])
    assert [r.seconds for r in readings] == pytest.approx([8e-6] * 10)
    assert not any(r.is_exposed for r in readings)
    assert [r.wall_s for r in readings] == pytest.approx([4 * gpu.launch] * 10)


def test_without_a_spin_they_are_inside() -> None:
    gpu = FakeGpu()
    (reading,) = CudaClock(gpu, Mode.wall).read([kernels(gpu, 8e-6, count=4)])
    assert reading.seconds == pytest.approx(4 * gpu.launch + 2e-6)  # the last kernel ends it
    assert "spin" not in gpu.log
    assert gpu.log[0] == "synchronise"  # begins on an idle GPU


def test_a_short_spin_is_seen_and_made_longer() -> None:
    gpu = FakeGpu(launch=40e-6)
    clock = CudaClock(gpu)
    clock.cycles_per_second()
    readings = [clock.read([kernels(gpu, 20e-6, count=5)])[0] for _ in range(3)]
    assert [r.is_exposed for r in readings] == [True, False, False]
    assert readings[0].seconds > 25e-6
    assert readings[1].seconds == pytest.approx(20e-6)
    assert clock.next_spin_s == {"a": pytest.approx(300e-6)}


def test_work_that_waits_for_the_gpu_is_not_spun_for() -> None:
    gpu = FakeGpu()
    clock = CudaClock(gpu)

    def call() -> None:
        gpu.kernel(30e-6)
        gpu.synchronise()

    readings = [clock.read([SampleTask(call, "a")])[0] for _ in range(MAX_VAIN_SPINS + 3)]
    assert all(r.is_exposed for r in readings)
    assert clock.next_spin_s["a"] == 0.0
    # No spin to wait for any more: the launch and the kernel.
    assert readings[-1].seconds == pytest.approx(30e-6 + gpu.launch)
    assert clock.read([SampleTask(lambda: gpu.kernel(1e-6), "b")])[0].seconds == pytest.approx(1e-6)


def test_the_caches_are_emptied_before_each_cold_sample_outside_its_time() -> None:
    gpu = FakeGpu()
    clock = CudaClock(gpu, Mode.cold)
    clock.cycles_per_second()
    gpu.log.clear()
    readings = clock.read([kernels(gpu, 10e-6) for _ in range(3)])
    assert [r.seconds for r in readings] == pytest.approx([10e-6] * 3)
    assert gpu.log == ["flush", "spin"] * 3 + ["synchronise"]
    assert all(r.cost_s > gpu.flush_seconds for r in readings)


def test_a_chunk_is_waited_for_once() -> None:
    gpu = FakeGpu()
    clock = CudaClock(gpu)
    clock.cycles_per_second()
    gpu.log.clear()
    readings = clock.read([kernels(gpu, (1 + i) * 1e-6) for i in range(SAMPLES_PER_CHUNK + 5)])
    assert gpu.log.count("synchronise") == 2
    assert [r.seconds for r in readings] == pytest.approx(
        [(1 + i) * 1e-6 for i in range(SAMPLES_PER_CHUNK + 5)]
    )


def test_costs_of_a_chunk_are_the_time_it_took() -> None:
    gpu = FakeGpu()
    clock = CudaClock(gpu, Mode.cold)
    clock.cycles_per_second()
    before = gpu.host
    readings = clock.read([kernels(gpu, 1e-3), kernels(gpu, 1e-6)])
    assert sum(r.cost_s for r in readings) == pytest.approx(gpu.host - before)
    assert readings[0].cost_s > 1e-3 > readings[1].cost_s


def test_the_spin_is_calibrated_by_the_gpu_and_not_by_the_host() -> None:
    clock = CudaClock(FakeGpu(launch=1e-3, cycles_per_second=1.5e9))
    assert clock.cycles_per_second() == pytest.approx(1.5e9)


def test_graph_mode_captures_every_batch_once_and_replays_it() -> None:
    gpu = FakeGpu()
    clock = CudaClock(gpu, Mode.graph)
    phase = clock.adapt(lambda number: [gpu.kernel(1e-6 * (1 + number)) for _ in range(3)], 4)
    assert len(gpu.captured) == 4
    readings = clock.read([SampleTask(lambda n=n: phase(n)) for n in range(4)])
    assert [r.seconds for r in readings] == pytest.approx([3e-6, 6e-6, 9e-6, 12e-6])
    assert [r.wall_s for r in readings] == pytest.approx([gpu.launch] * 4)  # one launch each
    assert len(gpu.captured) == 4


def test_what_cannot_be_captured_is_unsupported_but_memory_is_memory() -> None:
    def raising(error: Exception) -> Phase:
        def phase(number: int) -> None:
            raise error

        return phase

    clock = CudaClock(FakeGpu(), Mode.graph)
    stuck = RuntimeError("operation not permitted when stream is capturing\nCompile with ...")
    with pytest.raises(UnsupportedMode, match=r"captured as a CUDA graph: .* is capturing$"):
        clock.adapt(raising(stuck), 2)
    with pytest.raises(torch.OutOfMemoryError):
        clock.adapt(raising(torch.OutOfMemoryError("needed 9 GiB")), 2)


def test_other_modes_leave_the_phase_as_it_is() -> None:
    def phase(number: int) -> None:
        del number

    for mode in (Mode.hot, Mode.cold, Mode.wall):
        assert CudaClock(FakeGpu(), mode).adapt(phase, 4) is phase


def test_a_clock_asks_for_work_as_late_as_it_can() -> None:
    """A contender that fails is then not called again within a round."""
    gpu, asked = FakeGpu(), []

    def tasks() -> Iterator[SampleTask]:
        for number in range(3):
            asked.append(number)
            yield SampleTask(lambda: asked.append("called"))

    for each in (CudaClock(gpu), Clock(), ColdClock(flush=lambda: None)):
        asked.clear()
        each.read(tasks())
        assert asked == [0, "called", 1, "called", 2, "called"]


class FakeTorchCuda:
    """torch.cuda as far as TorchGpu uses it; every call is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        log = self.log

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                log.append("record")

            def query(self) -> bool:
                return False

            def elapsed_time(self, end: Event) -> float:
                assert isinstance(end, Event)
                return 2.5

        class Stream:
            def __init__(self, device: object = None) -> None:
                log.append("stream")

            def wait_stream(self, other: Stream) -> None:
                log.append("wait")

        class Graph:
            def replay(self) -> None:
                log.append("replay")

        @contextmanager
        def region(name: str) -> Iterator[None]:
            log.append(f"<{name}>")
            yield
            log.append(f"</{name}>")

        answers = {
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": Stream,
            "stream": lambda stream: region("side"),
            "graph": lambda graph: region("graph"),
            "_sleep": lambda cycles: log.append(f"sleep {cycles}"),
            "synchronize": lambda device: log.append("synchronize"),
            "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1024),
        }
        for name, answer in answers.items():
            assert hasattr(torch.cuda, name)  # torch has what is replaced here
            monkeypatch.setattr(torch.cuda, name, answer)


def test_the_real_gpu_is_asked_as_torch_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTorchCuda(monkeypatch)
    gpu = TorchGpu(CPU)  # where its buffer can be made
    start, end = gpu.record_event(), gpu.record_event()
    assert gpu.seconds_between(start, end) == 0.0025  # elapsed_time is in milliseconds
    assert not gpu.has_reached(start)
    gpu.spin(7)
    gpu.synchronise()
    assert fake.log == ["record", "record", "sleep 7", "synchronize"]
    gpu.flush()
    buffer = gpu._buffer
    assert buffer is not None
    assert (buffer.nbytes, int(buffer.max())) == (2048, 0)
    gpu.flush()
    assert gpu._buffer is buffer


def test_a_capture_follows_three_calls_on_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTorchCuda(monkeypatch)
    replay = TorchGpu(CPU).capture(lambda: fake.log.append("work"))
    assert [e for e in fake.log if e not in ("stream", "wait")] == [
        *("<side>", "work", "work", "work", "</side>"),
        *("<graph>", "work", "</graph>"),
    ]
    assert fake.log.count("wait") == 2
    replay()
    assert fake.log[-1] == "replay"
