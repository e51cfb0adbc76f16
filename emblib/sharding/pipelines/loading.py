"""Loading of batches: read ahead, and agree over ranks which steps run.

Every rank takes part in every collective of a step, so either all ranks compute a step or none
does. With each `Loader.fetch` a rank tells all ranks whether it has a batch, except with
`AssumeEqual`. The pipeline fetches steps ahead, so the messages of the other ranks have usually
arrived when `Loader.decide_to_run` needs them.
"""

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from emblib.sharding.all_to_all import start_all_to_all
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable, ReadyAwaitable
from emblib.sharding.headers import Content
from emblib.sharding.pipelines.batches import (
    Lane,
    Staged,
    device_of,
    empty_batch,
    leaves,
    num_examples,
    to_device,
)
from emblib.sharding.ranks import RankGroup, sends_from_hosts, subgroup


class NumberExchange:
    """Sends a few numbers of every rank to all ranks.

    The numbers stay in host memory, so that no rank waits for a GPU. If the process group sends
    only from GPUs, the constructor makes a second group over gloo. All ranks must construct it
    together.

    Among ranks on CPUs `gather` returns once all ranks have called it, because it compares headers,
    which show whether all ranks take part in the same collective. Among ranks on GPUs only these
    numbers are sent between hosts, so no headers are compared, and `gather` does not wait.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = _on_hosts(ranks)
        self._has_header = ranks.device.type == "cpu"

    def gather(self, numbers: Sequence[int]) -> Awaitable[list[list[int]]]:
        """Start to gather `numbers` of every rank; `wait` returns one list per rank.

        All ranks call this together, with equally many numbers, which must fit into int64.
        """
        if self._ranks.size == 1:
            return ReadyAwaitable([list(numbers)])
        num_ranks, sizes = self._ranks.size, [len(numbers)] * self._ranks.size
        payload = torch.tensor([*numbers] * num_ranks, dtype=torch.int64, device="cpu")
        pending = start_all_to_all(
            payload, sizes, sizes, self._ranks, content=Content.NUMBERS, has_header=self._has_header
        )
        return DeferredAwaitable(lambda: pending.wait().view(num_ranks, -1).tolist())


def _on_hosts(ranks: RankGroup) -> RankGroup:
    """Return the same ranks in a group that sends tensors in host memory."""
    if ranks.group is None or sends_from_hosts(ranks.group):
        return ranks
    return RankGroup(subgroup(ranks), local_size=ranks.local_size)


@dataclass(frozen=True)
class DrainAll:
    """Train until no rank has a batch left; a rank without one computes with empty batches.

    A rank that never had a batch gets the pickled empty batch of another rank.

    Args:
        empty: function that returns an empty batch, given any batch; by default `empty_batch`,
            which empties the first dimension of all tensors.

    Raises:
        TypeError: `empty` is not a function.

    Example:
        >>> model = torch.nn.Linear(2, 1).eval()
        >>> pipeline = emblib.sharding.TrainPipelineBase(
        ...     model,
        ...     None,
        ...     uneven_inputs=emblib.sharding.DrainAll(),
        ...     ranks=emblib.sharding.RankGroup.single(),
        ... )
        >>> len(list(pipeline.run([torch.rand(4, 2)] * 3)))
        3
    """

    empty: Callable[[Any], Any] = empty_batch

    def __post_init__(self) -> None:
        if not callable(self.empty):
            raise TypeError(f"empty must be a function of a batch, got {self.empty!r}")


@dataclass(frozen=True)
class StopAtShortest:
    """Stop when the first rank has no batch left; drop the batches that other ranks have read.

    Example:
        >>> model = torch.nn.Linear(2, 1).eval()
        >>> pipeline = emblib.sharding.TrainPipelineBase(
        ...     model,
        ...     None,
        ...     uneven_inputs=emblib.sharding.StopAtShortest(),
        ...     ranks=emblib.sharding.RankGroup.single(),
        ... )
        >>> len(list(pipeline.run([torch.rand(4, 2)] * 3)))
        3
    """


@dataclass(frozen=True)
class AssumeEqual:
    """Assume that all ranks have equally many batches; training hangs if they do not.

    Ranks send each other no numbers then, and `Progress.examples` is None.

    Example:
        >>> model = torch.nn.Linear(2, 1).eval()
        >>> pipeline = emblib.sharding.TrainPipelineBase(
        ...     model,
        ...     None,
        ...     uneven_inputs=emblib.sharding.AssumeEqual(),
        ...     ranks=emblib.sharding.RankGroup.single(),
        ... )
        >>> len(list(pipeline.run([torch.rand(4, 2)] * 3)))
        3
    """


UnevenInputs = DrainAll | StopAtShortest | AssumeEqual
"""Reaction to loaders of ranks with different numbers of batches."""


class ExampleCount(NamedTuple):
    """Number of examples of a step on this rank, and on all ranks (None for `AssumeEqual`)."""

    local: int
    total: int | None


@dataclass
class Step:
    """A step that the pipeline reads ahead: the batch of this rank, and the numbers of all ranks.

    Attributes:
        epoch: number of the epoch of this rank, see `Loader.begin_epoch`.
        batch: batch on the device; None if this rank has none.
        examples: number of examples of the batch, 0 if there is none.
        numbers_of_ranks: list of every rank's numbers, in the order of `_BatchNumber`; None for
            `AssumeEqual`.
        is_run: whether the ranks compute this step; None until that is decided.
        sent: the inputs of the batch in flight, a `SentBatch`; None before they are sent.
        error: error with which this rank failed to read the batch; None if it did not.
    """

    epoch: int
    batch: Staged[Any] | None
    examples: int
    numbers_of_ranks: Awaitable[list[list[int]]] | None
    is_run: bool | None = None
    sent: Any = None
    error: Exception | None = None

    def raise_failure(self) -> None:
        """Raise an error on all ranks if a rank failed to read its batch of this step.

        Waits for the numbers of the other ranks.

        Raises:
            Exception: this rank failed; its own error is raised.
            RuntimeError: another rank failed.
        """
        if self.error is not None:
            raise self.error
        numbers_by_rank = [] if self.numbers_of_ranks is None else self.numbers_of_ranks.wait()
        for rank, numbers in enumerate(numbers_by_rank):
            if numbers[_BatchNumber.HAS_FAILED]:
                raise RuntimeError(
                    f"rank {rank} could not read its batch, see its error: no rank ran the step"
                )

    def count_examples(self) -> ExampleCount:
        """Return the number of examples of the step; wait for the numbers of the other ranks."""
        if self.numbers_of_ranks is None:
            return ExampleCount(self.examples, None)
        return ExampleCount(
            self.examples,
            sum(numbers[_BatchNumber.EXAMPLES] for numbers in self.numbers_of_ranks.wait()),
        )


class _BatchNumber(IntEnum):
    """The numbers that a rank sends for every batch that it reads."""

    HAS_BATCH = 0
    EXAMPLES = 1
    HAS_EMPTY = 2  # whether it has an empty batch to compute with
    EPOCH = 3
    HAS_FAILED = 4  # whether it could not read its batch


class Loader:
    """Reads batches, copies them to the device, and decides with the other ranks which steps run.

    All ranks must construct it together and call its methods equally often. `fetch` sends numbers
    to all ranks; whether it waits for them depends on the device, see `NumberExchange`.
    `decide_to_run`, `is_last` and the methods of `Step` wait for the numbers of the other ranks.

    Args:
        ranks: ranks that train together.
        uneven_inputs: reaction to loaders of different lengths.
        device: device to which batches are copied.

    Raises:
        TypeError: `uneven_inputs` has another type.
    """

    def __init__(self, ranks: RankGroup, uneven_inputs: UnevenInputs, device: torch.device) -> None:
        if not isinstance(uneven_inputs, DrainAll | StopAtShortest | AssumeEqual):
            raise TypeError(
                "uneven_inputs must be DrainAll(), StopAtShortest() or AssumeEqual(), "
                f"got {uneven_inputs!r}"
            )
        self.uneven_inputs = uneven_inputs
        self.epoch = 0
        self._ranks, self._device = ranks, device
        self._number_exchange = (
            None if isinstance(uneven_inputs, AssumeEqual) else NumberExchange(ranks)
        )
        self._lane = Lane(device)
        self._batches: Iterator[Any] | None = None
        self._is_drained = False
        self._attributes_at_end: list[Any] = []  # the iterator's attributes when it was exhausted
        self._empty_batch: Any = None  # an empty batch, on the host; None until there was a batch

    def set_iterator(self, batches: Iterator[Any]) -> None:
        """Read from `batches` from now on; another or a reset iterator begins a new epoch.

        Raises:
            TypeError: `batches` is not an iterator.
        """
        is_other = self._batches is None or batches is not self._batches
        if is_other or (self._is_drained and self._was_reset()):
            self.begin_epoch(batches)

    def begin_epoch(self, batches: Iterator[Any]) -> None:
        """Begin an epoch, even if `batches` is the iterator of the previous epoch.

        `iter` of a `DataLoader` with `persistent_workers` returns the same object every time.

        Raises:
            TypeError: `batches` is not an iterator.
        """
        if not hasattr(batches, "__next__"):
            raise TypeError(
                "progress takes an iterator, and the same one until it is drained; make one "
                f"with iter(loader), got {type(batches).__name__}"
            )
        self._batches, self._is_drained = batches, False
        self.epoch += 1

    def end_epoch(self) -> None:
        """Release the iterator of an epoch that is drained on all ranks."""
        self._batches, self._attributes_at_end = None, []

    def is_last(self, step: Step, newest: Step) -> bool:
        """Return whether the epoch ends with `step`, a step that does not run.

        It does not end if a rank has begun another epoch since. Only a rank that had no batch left
        notices that its iterator was reset. So all ranks decide by the epochs that they have sent
        with `newest`, the step that was read last. With `AssumeEqual` this rank decides alone.
        """
        if step.numbers_of_ranks is None or newest.numbers_of_ranks is None:
            return step.epoch == self.epoch
        step_numbers, newest_numbers = step.numbers_of_ranks.wait(), newest.numbers_of_ranks.wait()
        return all(
            numbers[_BatchNumber.EPOCH] == newer_numbers[_BatchNumber.EPOCH]
            for numbers, newer_numbers in zip(step_numbers, newest_numbers, strict=True)
        )

    def fetch(self) -> Step:
        """Read the next batch, start its copy to the device, and send its numbers to all ranks.

        A rank without a batch sends numbers too. So does one that fails to read: all ranks raise
        when the step is next, see `Step.raise_failure`. With `AssumeEqual` no numbers are sent, and
        an error of the loader is raised here.
        """
        examples, staged, error = 0, None, None
        try:
            batch = self._next_batch()
            if batch is not None:
                examples, staged = num_examples(batch), self._start_copy(batch)
        except Exception as raised:
            if self._number_exchange is None:
                raise
            error = raised
        # In the order of `_BatchNumber`.
        numbers = (
            int(staged is not None),
            examples,
            int(self._empty_batch is not None),
            self.epoch,
            int(error is not None),
        )
        numbers_of_ranks = (
            None if self._number_exchange is None else self._number_exchange.gather(numbers)
        )
        return Step(self.epoch, staged, examples, numbers_of_ranks, error=error)

    def _next_batch(self) -> Any:
        """Return the next batch of this rank; None once it has no more.

        Raises:
            TypeError: the iterator returned None, which would end the epoch.
            Exception: the iterator or the function of `DrainAll` raised it.
        """
        assert self._batches is not None
        if self._is_drained:
            return None
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_drained, self._attributes_at_end = True, _attributes(self._batches)
            return None
        if batch is None:
            raise TypeError("the loader returned None, which is not a batch: leave it out")
        if self._empty_batch is None and isinstance(self.uneven_inputs, DrainAll):
            self._empty_batch = self.uneven_inputs.empty(batch)
        return batch

    def _was_reset(self) -> bool:
        """Return whether the iterator has changed since it was drained, as by `iter(loader)`.

        Calling `next` is not a test: some iterators do not raise StopIteration twice, but restart,
        or wait for a queue that stays empty.
        """
        attributes = _attributes(self._batches)
        return len(attributes) != len(self._attributes_at_end) or any(
            map(operator.is_not, attributes, self._attributes_at_end)
        )

    def _start_copy(self, batch: Any) -> Staged[Any]:
        """Start to copy a batch to the device, in the copy lane."""
        event = None
        if self._device.type == "cuda" and any(
            device_of(leaf).type == "cuda" for leaf in leaves(batch)
        ):
            event = torch.cuda.current_stream(self._device).record_event()
        return self._lane.run(lambda staged: to_device(staged, self._device), Staged(batch, event))

    def decide_to_run(self, step: Step) -> bool:
        """Return whether the ranks compute this step; the first call decides, for all ranks.

        If they do, a step without a batch gets an empty one. `_decide` may be a collective.
        """
        if step.is_run is None:
            step.is_run = self._decide(step)
            if step.is_run and step.batch is None:
                step.batch = self._start_copy(self._empty_batch)
        return step.is_run

    def _decide(self, step: Step) -> bool:
        """Return whether the ranks compute a step, from the numbers that all ranks have sent.

        They do not if a rank failed to read its batch. With `AssumeEqual` this rank decides by its
        own batch. With `DrainAll`, if a rank has no empty batch and another rank has a batch, the
        ranks gather their empty batches: a collective.
        """
        if step.numbers_of_ranks is None:
            return step.batch is not None
        numbers_by_rank = step.numbers_of_ranks.wait()
        if any(numbers[_BatchNumber.HAS_FAILED] for numbers in numbers_by_rank):
            return False
        num_batches = sum(numbers[_BatchNumber.HAS_BATCH] for numbers in numbers_by_rank)
        if isinstance(self.uneven_inputs, StopAtShortest):
            return num_batches == len(numbers_by_rank)
        if num_batches and not all(numbers[_BatchNumber.HAS_EMPTY] for numbers in numbers_by_rank):
            empty_batches = self._ranks.gather_objects(_on_host(self._empty_batch))
            if self._empty_batch is None:
                self._empty_batch = next(empty for empty in empty_batches if empty is not None)
        return num_batches > 0


def _attributes(iterator: Any) -> list[Any]:
    """Return the attributes of an iterator and of the iterators that it wraps."""
    attributes: list[Any] = []
    iterators_to_visit, visited = [iterator], {id(iterator)}
    while iterators_to_visit:
        values = list(getattr(iterators_to_visit.pop(), "__dict__", {}).values())
        attributes += values
        inner = [
            value
            for value in values
            if hasattr(type(value), "__next__") and id(value) not in visited
        ]
        iterators_to_visit += inner
        visited.update(map(id, inner))
    return attributes


def _on_host(batch: Any) -> Any:
    return to_device(batch, torch.device("cpu"))


class Progress(NamedTuple):
    """The argument of a pipeline's callback, which it calls after every step.

    Attributes:
        step: number of finished steps, including this one.
        own_examples: examples of this rank so far.
        examples: examples of all ranks so far; None where it is unknown (`AssumeEqual`).
        elapsed_s: seconds from the beginning of the first step to the end of this one, with the
            time between epochs.
        steps_per_s: steps per second over the last 20 steps of this epoch, or fewer.
        own_examples_per_s: examples of this rank per second, over the same steps.
        examples_per_s: examples of all ranks per second, over the same steps; None where it is
            unknown.

    Times are those of the host. Steps that are enqueued on a GPU, but not finished, count as
    finished.

    Example:
        >>> def report(progress):
        ...     print(progress.step, progress.own_examples)
        >>> model = torch.nn.Linear(2, 1).eval()
        >>> pipeline = emblib.sharding.TrainPipelineBase(
        ...     model, None, on_progress=report, ranks=emblib.sharding.RankGroup.single()
        ... )
        >>> outputs = list(pipeline.run([torch.rand(4, 2)] * 2))
        1 4
        2 8
    """

    step: int
    own_examples: int
    examples: int | None
    elapsed_s: float
    steps_per_s: float
    own_examples_per_s: float
    examples_per_s: float | None

    def __str__(self) -> str:
        is_total = self.examples_per_s is not None
        rate = self.examples_per_s if is_total else self.own_examples_per_s
        count = self.examples if is_total else self.own_examples
        scope_text = "" if is_total else " (this rank)"
        return (
            f"step {self.step}: {count} examples in {self.elapsed_s:.1f} s, "
            f"{self.steps_per_s:.2f} steps/s, {rate:.0f} examples/s{scope_text}"
        )


RATE_WINDOW = 20  # number of last steps over which rates are measured


class _MeterMark(NamedTuple):
    """The counts of a meter at one time.

    Attributes:
        time_s: time in seconds, by `time.perf_counter`.
        num_steps: number of finished steps.
        num_local: examples of this rank in these steps.
        num_total: examples of all ranks; None where it is unknown.
    """

    time_s: float
    num_steps: int
    num_local: int
    num_total: int | None


class Meter:
    """Counts steps and examples, and measures rates.

    Call `begin` before each step and `end` after it; `pause` if no step follows for now.
    """

    def __init__(self) -> None:
        self._marks: deque[_MeterMark] = deque(maxlen=RATE_WINDOW + 1)
        self._start_s = 0.0
        self._is_paused = False

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return self._marks[-1].num_steps if self._marks else 0

    def begin(self) -> None:
        """Begin a step; time between two steps counts for the later one, except after `pause`."""
        if not self._marks:
            self._start_s = time.perf_counter()
            self._marks.append(_MeterMark(self._start_s, 0, 0, 0))
        elif self._is_paused:
            last_mark = self._marks[-1]
            self._marks.clear()
            self._marks.append(last_mark._replace(time_s=time.perf_counter()))
        self._is_paused = False

    def pause(self) -> None:
        """Pause when the batches are drained: rates do not count the time until the next step."""
        self._is_paused = True

    def end(self, example_count: ExampleCount) -> Progress:
        """End a step that had these examples, and return the progress."""
        last_mark = self._marks[-1]
        num_total = (
            None
            if example_count.total is None or last_mark.num_total is None
            else last_mark.num_total + example_count.total
        )
        mark = _MeterMark(
            time.perf_counter(),
            last_mark.num_steps + 1,
            last_mark.num_local + example_count.local,
            num_total,
        )
        self._marks.append(mark)
        first_mark = self._marks[0]
        window_s = max(mark.time_s - first_mark.time_s, 1e-9)  # the clock may not have moved
        total_per_s = (
            None
            if mark.num_total is None or first_mark.num_total is None
            else (mark.num_total - first_mark.num_total) / window_s
        )
        return Progress(
            mark.num_steps,
            mark.num_local,
            mark.num_total,
            mark.time_s - self._start_s,
            (mark.num_steps - first_mark.num_steps) / window_s,
            (mark.num_local - first_mark.num_local) / window_s,
            total_per_s,
        )
