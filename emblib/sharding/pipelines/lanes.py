"""Work beside the training step: on a CUDA stream of its own; on the CPU where it is called."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from emblib.sharding.pipelines.batches import device_of, leaves

T = TypeVar("T")
S = TypeVar("S")


class Staged(NamedTuple, Generic[T]):
    """A value, and the event after which it may be used; None if it may be at once."""

    value: T
    ready: torch.cuda.Event | None = None

    def take(self) -> T:
        """The value, for use on the current stream."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.ready.device)
            stream.wait_event(self.ready)
            _keep_for(self.value, stream)
        return self.value


class Lane:
    """Runs one stage of a pipeline, in order, beside the others.

    It waits for nothing but what it is given: a stage that waited for the current stream would run
    after the step that it should run beside.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[S], T], given: Staged[S]) -> Staged[T]:
        """`work(given.value)`, as soon as that is ready."""
        if self._stream is None:
            return Staged(work(given.value))
        with torch.cuda.stream(self._stream):
            value = work(given.take())
            return Staged(value, self._stream.record_event())


def _keep_for(value: Any, stream: torch.cuda.Stream) -> None:
    """Memory of another stream must not be given away before this one has used it."""
    for leaf in leaves(value):
        if device_of(leaf).type == "cuda":
            leaf.record_stream(stream)
