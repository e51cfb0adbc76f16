"""What waits for what on a GPU, told by stand-ins for its streams and events."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from emblib.sharding.pipelines import batches
from emblib.sharding.pipelines.batches import Lane, Staged


class Event:
    device = "the device"

    def __init__(self, name: str) -> None:
        self.name = name


class Stream:
    """Says what it is asked to do."""

    count = 0

    def __init__(self, device: Any = None, name: str = "") -> None:
        Stream.count += not name
        self.name, self.events = name or f"lane {Stream.count}", 0

    def wait_event(self, event: Event) -> None:
        SAID.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.events += 1
        return Event(f"{self.name}'s event {self.events}")


class Leaf:
    """Something that is kept for the streams that use it."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, torch.device("cuda")

    def record_stream(self, stream: Stream) -> None:
        SAID.append(f"{self.name} is kept for {stream.name}")


SAID: list[str] = []


@pytest.fixture
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    SAID.clear()
    Stream.count = 0
    current = [Stream(name="step")]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def current_stream(device: Any = None) -> Stream:
        assert device == Event.device  # never that of whatever device is current
        return current[-1]

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(batches, "leaves", lambda value: [value])
    monkeypatch.setattr(batches, "device_of", lambda leaf: leaf.device)


@pytest.mark.usefixtures("_streams")
def test_a_stage_waits_for_the_one_before_it_alone() -> None:
    copying, sending = Lane(torch.device("cuda")), Lane(torch.device("cuda"))
    batch = copying.run(lambda given: Leaf("batch"), Staged(Leaf("host batch")))
    assert SAID == []  # a copy of pinned memory waits for nothing
    ids = sending.run(lambda given: Leaf("ids"), batch)
    assert SAID == ["lane 2 waits for lane 1's event 1", "batch is kept for lane 2"]
    SAID.clear()
    assert ids.take().name == "ids"
    assert SAID == ["step waits for lane 2's event 1", "ids is kept for step"]


def test_on_the_cpu_a_lane_is_a_call() -> None:
    staged = Lane(torch.device("cpu")).run(lambda given: given + 1, Staged(1))
    assert (staged.take(), staged.ready_event) == (2, None)
