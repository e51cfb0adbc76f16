"""Pipelines that send the ids of later batches to their ranks while a batch is computed."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from emblib.sharding.groups_of_ranks import Ranks
from emblib.sharding.pipelines.base import TrainPipelineBase
from emblib.sharding.pipelines.inputs import Ahead, FoundInputs, GivenInputs, Inputs
from emblib.sharding.pipelines.lanes import Lane
from emblib.sharding.pipelines.loading import Ends, Slot
from emblib.sharding.pipelines.reporting import Progress


class TrainPipelineSparseDist(TrainPipelineBase):
    """Trains a batch a call, while ids of the next are on their way and the one after is copied.

    While batch i is computed: before its forward the sizes of batch i + 1 are sent, before its
    backward the ids, and batch i + 2 is copied to the device. Lookups never run ahead, so every
    step sees the tables as the plain loop does.

    Args:
        model: as of `TrainPipelineBase`, likewise `optimizer`, `device`, `forward`, `ends`,
            `on_progress` and `ranks`.
        inputs: gives {path of a sharded collection: its jagged tensor} of a batch. Left out, the
            first batch shows it: an input that is an object of the batch (an attribute, an item)
            is found again at the same place.
    """

    ahead: ClassVar[int] = 2
    _sent_ahead: ClassVar[int] = 1  # batches whose ids are sent before their step

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        *,
        inputs: Inputs | None = None,
        forward: Callable[[Any], Any] | None = None,
        ends: Ends | None = None,
        on_progress: Callable[[Progress], object] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            forward=forward,
            ends=ends,
            on_progress=on_progress,
            ranks=ranks,
        )
        self._lane = Lane(self.device)
        self._inputs: FoundInputs | GivenInputs = (
            FoundInputs(model) if inputs is None else GivenInputs(model, inputs)
        )

    def _run_forward(self, slot: Slot, batch: Any) -> Any:
        if isinstance(self._inputs, FoundInputs) and not self._inputs.is_known:
            with self._inputs.watching(batch):
                return self._forward(batch)
        with self._sent(slot).taken():
            return self._forward(batch)

    def _before_forward(self, slot: Slot) -> None:
        if self._inputs.is_known:
            self._sent(slot)
            self._send_sizes_of_next()

    def _after_forward(self, slot: Slot) -> None:
        self._send_sizes_of_next()
        for later in self._next_to_send():
            self._sent(later).send_ids()

    def _next_to_send(self) -> list[Slot]:
        """The slots whose ids are sent during this step, as far as they will be computed."""
        later = list(self._slots)[: self._sent_ahead]
        return [slot for slot in later if self._loader.settle(slot)]

    def _send_sizes_of_next(self) -> None:
        for slot in self._next_to_send():
            self._sent(slot)

    def _sent(self, slot: Slot) -> Ahead:
        """What of a slot was sent ahead; sent now, if it was not."""
        if slot.sent is None:
            assert slot.batch is not None
            slot.sent = Ahead(self._inputs(slot.batch.value), self._lane, slot.batch)
        sent: Ahead = slot.sent
        return sent


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist):
    """A `TrainPipelineSparseDist` that also brings rows into the caches one batch ahead.

    While batch i is computed: the rows of batch i + 1 that are not in the cache of their table
    (`Placement.MANAGED_CACHING`) are brought in, the ids of batch i + 2 are sent, and batch i + 3
    is copied. A row that is in the cache is updated there, so what was brought in before an update
    has it. Without cached tables there is nothing to bring in, and `TrainPipelineSparseDist` does
    the same with a batch less in memory.
    """

    ahead: ClassVar[int] = 3
    _sent_ahead: ClassVar[int] = 2

    @cached_property
    def _prefetch_lane(self) -> Lane:
        return Lane(self.device)

    def _before_forward(self, slot: Slot) -> None:
        super()._before_forward(slot)
        if self._inputs.is_known:
            # In the order of the steps: caches are given their batches as they are looked up.
            for one in (slot, *self._next_to_send()[:1]):
                self._sent(one).prefetch(self._prefetch_lane)
