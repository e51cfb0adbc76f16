"""The parts of pipelines: batches of any shape, loaders that end, the loop, rates."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from emblib.jagged import JaggedTensor, KeyedJaggedTensor
from emblib.sharding import pipelines
from emblib.sharding.pipelines import (
    AssumeEqual,
    DrainAll,
    Progress,
    StopAtShortest,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from emblib.sharding.pipelines.batches import (
    empty_batch,
    is_same_input,
    item_at,
    num_examples,
    path_to,
    to_device,
)
from emblib.sharding.pipelines.loading import RATE_WINDOW, ExampleCount, Loader, Meter
from emblib.sharding.ranks import RankGroup
from tests.sharding import worlds


def keyed(batch: int = 2) -> KeyedJaggedTensor:
    lengths = torch.tensor([1, 2, 0, 1])[: 2 * batch]
    return KeyedJaggedTensor(["f", "g"], torch.arange(4), weights=torch.ones(4), lengths=lengths)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    ids: Any
    label: Tensor
    note: str = "kept"


class Dense:
    def __init__(self) -> None:
        self.ids, self.scale = keyed(), torch.tensor(2.0)


class Slotted:
    __slots__ = ("ids",)

    def __init__(self) -> None:
        self.ids = keyed()


class Labelled(Slotted):
    __slots__ = "label"

    def __init__(self) -> None:
        super().__init__()
        self.label = torch.ones(2)


class Moving:
    """A batch with a `to` of its own."""

    def __init__(self, ids: Any) -> None:
        self.ids, self.moved = ids, 0

    def to(self, device: torch.device) -> "Moving":
        moved = Moving(self.ids)
        moved.moved = self.moved + 1
        return moved


NESTS = {
    "keyed": (lambda: keyed(), ()),
    "named tuple": (lambda: Pair(torch.ones(2), keyed()), (1,)),
    "list": (lambda: [keyed(), torch.ones(2)], (0,)),
    "dict": (lambda: {"x": torch.ones(2), "ids": keyed()}, ("ids",)),
    "frozen dataclass": (lambda: Frozen(keyed(), torch.ones(2)), ("ids",)),
    "object": (lambda: Dense(), ("ids",)),
    "inherited slots": (lambda: Labelled(), ("ids",)),
    "nested": (lambda: ({"a": Frozen(keyed(), torch.ones(2))},), (0, "a", "ids")),
}


@pytest.mark.parametrize("name", NESTS)
def test_any_nest_is_a_batch(name: str) -> None:
    make, path = NESTS[name]
    batch = make()
    ids = item_at(batch, path)
    assert path_to(batch, ids) == path
    assert path_to(batch, keyed()) is None
    assert num_examples(batch) == 2
    assert to_device(batch, torch.device("cpu")) is batch  # nothing to copy

    empty = empty_batch(batch)
    assert type(empty) is type(batch)
    assert num_examples(empty) == 0
    emptied = item_at(empty, path)
    assert emptied.keys() == ["f", "g"]
    assert (emptied.stride(), emptied.values().numel(), emptied.weights().numel()) == (0, 0, 0)
    assert emptied.values().dtype == ids.values().dtype
    assert num_examples(batch) == 2  # the batch itself is as it was


def test_what_an_empty_batch_keeps() -> None:
    scalar = torch.tensor(3.0)
    batch = Frozen((scalar, 7, None), torch.ones(4, 5))
    empty = empty_batch(batch)
    assert empty.ids == (scalar, 7, None)
    assert empty.label.shape == (0, 5)
    assert empty.note == "kept"
    jagged = empty_batch(JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2])))
    assert (jagged.values().numel(), jagged.lengths().numel()) == (0, 0)
    assert num_examples("nothing") == 0


def test_examples_of_a_jagged_tensor_are_its_bags() -> None:
    jagged = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))
    assert num_examples((torch.tensor(3.0), jagged)) == 2
    assert num_examples((jagged, torch.ones(5, 1))) == 2
    assert num_examples((jagged, keyed(), torch.ones(5, 1))) == keyed().stride()


def test_an_empty_batch_of_features_of_different_size() -> None:
    inverse = (["f", "g"], torch.tensor([[0, 1, 1], [0, 0, 0]]))
    kjt = KeyedJaggedTensor(
        ["f", "g"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=inverse,
    )
    assert num_examples(kjt) == 3
    empty = empty_batch(kjt)
    assert empty.stride_per_key() == [0, 0]
    assert empty.inverse_indices_or_none()[1].shape == (2, 0)


def test_a_batch_moves_by_its_own_method() -> None:
    moved = to_device(Moving(keyed()), torch.device("cpu"))
    assert moved.moved == 1


def test_copies_of_the_object_are_the_same_input() -> None:
    kjt = keyed()
    twin = KeyedJaggedTensor(kjt.keys(), kjt.values(), kjt.weights(), kjt.lengths())
    assert is_same_input(kjt, twin)
    assert not is_same_input(kjt, keyed())
    # Of the same ids, but weighted otherwise, as feature processors make them.
    other = KeyedJaggedTensor(kjt.keys(), kjt.values(), kjt.weights() * 2, kjt.lengths())
    assert not is_same_input(kjt, other)


# Loaders


def _read(
    ranks: RankGroup, counts: list[int], uneven_inputs: Any
) -> list[tuple[list[int], ExampleCount]]:
    """What a rank trains, with loaders of different lengths."""
    loader = Loader(ranks, uneven_inputs, torch.device("cpu"))
    loader.set_iterator(iter([torch.full((ranks.rank + 1,), i) for i in range(counts[ranks.rank])]))
    found = []
    while True:
        slot = loader.fetch()
        if not loader.decide_to_run(slot):
            return found
        assert slot.batch is not None
        found.append((slot.batch.take().tolist(), slot.count_examples()))


@pytest.mark.parametrize("counts", [[2, 2], [1, 3], [0, 2], [2, 0, 1], [0, 0]])
def test_the_longest_loader_decides(counts: list[int]) -> None:
    found = worlds.run(len(counts), _read, counts, DrainAll())
    for rank, steps in enumerate(found):
        assert [batch for batch, _ in steps] == [
            [i] * (rank + 1) if i < counts[rank] else [] for i in range(max(counts))
        ]
        assert [counted.total for _, counted in steps] == [
            sum(r + 1 for r, count in enumerate(counts) if i < count) for i in range(max(counts))
        ]


def test_the_shortest_loader_decides() -> None:
    found = worlds.run(3, _read, [3, 2, 4], StopAtShortest())
    assert [[batch[0] for batch, _ in steps] for steps in found] == [[0, 1]] * 3


def test_equal_loaders_are_not_asked() -> None:
    found = worlds.run(2, _read, [2, 2], AssumeEqual())
    assert [[counted for _, counted in steps] for steps in found] == [
        [ExampleCount(rank + 1, None)] * 2 for rank in range(2)
    ]


def _two_empties(batch: Tensor) -> Tensor:
    return batch.new_full((2,), -1)


def test_an_empty_batch_of_ones_own_making() -> None:
    found = worlds.run(2, _read, [0, 1], DrainAll(_two_empties))
    assert found[0][0][0] == [-1, -1]
    assert found[0][0][1] == ExampleCount(0, 2)


# The loop


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.weight * batch).sum()


def line(**options: Any) -> tuple[Line, TrainPipelineBase]:
    model = Line()
    return model, TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.5), **options)


def test_one_batch_a_call() -> None:
    model, pipeline = line()
    batches = iter(torch.tensor([[1.0], [2.0]]))
    assert pipeline.progress(batches).item() == 1.0
    assert model.weight.item() == 0.5
    assert pipeline.progress(batches).item() == 1.0
    assert model.weight.item() == -0.5
    for _ in range(2):
        with pytest.raises(StopIteration):
            pipeline.progress(batches)
    assert pipeline.steps == 2
    assert [out.item() for out in pipeline.run([torch.ones(1)])] == [-0.5]


def test_what_was_read_ahead_comes_before_another_iterator() -> None:
    _, pipeline = line(forward=lambda batch: (batch.sum() * 0, batch.item()))
    pipeline.model.eval()
    first = iter(torch.arange(4.0))
    assert pipeline.progress(first) == 0.0
    second = iter(torch.arange(10.0, 12.0))
    assert [pipeline.progress(second) for _ in range(3)] == [1.0, 10.0, 11.0]
    with pytest.raises(StopIteration):
        pipeline.progress(second)
    # One that was not known to be drained when another came is not an end of that one.
    third = iter(torch.arange(20.0, 21.0))
    assert pipeline.progress(third) == 20.0
    assert pipeline.progress(iter(torch.arange(30.0, 31.0))) == 30.0
    with pytest.raises(StopIteration):
        pipeline.progress(third)


class SameIterator:
    """A loader whose epochs are all read from one object, as those of persistent workers are."""

    def __init__(self, count: int) -> None:
        self.count = self.next = count

    def __iter__(self) -> Iterator[Tensor]:
        self.next = 0
        return self

    def __next__(self) -> Tensor:
        if self.next == self.count:
            raise StopIteration
        self.next += 1
        return torch.full((1,), float(self.next))


def test_every_epoch_of_a_loader_that_returns_the_same_iterator() -> None:
    for name in ("TrainPipelineBase", "TrainPipelineSparseDist"):
        pipeline = getattr(pipelines, name)(Line().eval(), None)
        loader = SameIterator(6)
        assert [len(list(pipeline.run(loader))) for _ in range(3)] == [6, 6, 6]
        for _ in range(2):
            iterator = iter(loader)
            for _ in range(6):
                pipeline.progress(iterator)
            with pytest.raises(StopIteration):
                pipeline.progress(iterator)
        # Left where the end has been read ahead: what is left of that epoch comes first.
        running = pipeline.run(loader)
        assert [next(running).item() for _ in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]
        later = [6.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert [out.item() for out in pipeline.run(loader)] == later


def test_every_epoch_of_persistent_workers() -> None:
    loader = DataLoader(torch.ones(6, 1), 1, num_workers=1, persistent_workers=True)
    _, pipeline = line()
    assert [len(list(pipeline.run(loader))) for _ in range(3)] == [6, 6, 6]


def _stopped(pipeline: TrainPipelineBase, loader: Any, steps: int, epochs: int = 3) -> list[float]:
    """The outputs of epochs that are left after some steps."""
    found = []
    for _ in range(epochs):
        iterator = iter(loader)
        for _ in range(steps):
            try:
                found.append(pipeline.progress(iterator).nan_to_num().item())
            except StopIteration:
                break
    return found


class Wrapper:
    """Another iterator around the same one; state is deeper than its own attributes."""

    def __init__(self, inner: SameIterator) -> None:
        self.inner, self.itself = inner, self

    def __iter__(self) -> Iterator[Tensor]:
        iter(self.inner)
        return self

    def __next__(self) -> Tensor:
        return next(self.inner)


# Of epochs of 1.0 to 6.0 that are left after 5 steps, with 1 to 3 batches read ahead.
STOPPED = {
    "TrainPipelineBase": [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 1, 2, 3, 4],
    "TrainPipelineSparseDist": [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3],
    "PrefetchTrainPipelineSparseDist": [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3],
}


@pytest.mark.parametrize("uneven_inputs", [DrainAll(), StopAtShortest(), AssumeEqual()])
@pytest.mark.parametrize("name", STOPPED)
def test_epochs_of_one_iterator_that_are_left_where_the_end_was_read_ahead(
    name: str, uneven_inputs: Any
) -> None:
    for loader in (SameIterator(6), Wrapper(SameIterator(6))):
        pipeline = getattr(pipelines, name)(Line().eval(), None, uneven_inputs=uneven_inputs)
        assert _stopped(pipeline, loader, 5) == STOPPED[name]


def test_epochs_of_persistent_workers_that_are_left_where_the_end_was_read_ahead() -> None:
    values = torch.arange(1.0, 7.0)[:, None]
    loader = DataLoader(values, 1, num_workers=1, persistent_workers=True)
    name = "TrainPipelineSparseDist"
    pipeline = getattr(pipelines, name)(Line().eval(), None)
    assert _stopped(pipeline, loader, 5) == STOPPED[name]


class RestartsItself(SameIterator):
    """Begins again after StopIteration, as NVIDIA DALI's iterators may."""

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        try:
            return super().__next__()
        except StopIteration:
            self.next = 0
            raise


class EndsOnce(SameIterator):
    """Reads a queue: who asks after the end waits forever, here for an error."""

    def __next__(self) -> Tensor:
        if self.next > self.count:
            raise AssertionError("asked after the end")
        try:
            return super().__next__()
        except StopIteration:
            self.next += 1
            raise


def test_an_iterator_is_not_asked_again_after_its_end() -> None:
    for loader in (RestartsItself(4), EndsOnce(4)):
        loader.next = 0
        for name in STOPPED:
            pipeline = getattr(pipelines, name)(Line().eval(), None)
            assert _stopped(pipeline, loader, 99, epochs=1) == [1, 2, 3, 4]
            loader.next = 0


# By rank, of 4 and 7 batches of which 3 are trained per epoch; 0: an empty batch. Where the end of
# rank 0 was read ahead, rank 1 trains what it has read until then, or drops it (`StopAtShortest`).
LEFT = [
    [
        [1, 2, 3, 4, 1, 2, 3, 1, 2],
        [1, 2, 3, 4, 0, 1, 2, 3, 1],
        [1, 2, 3, 4, 0, 0, 1, 2, 3],
        [1, 2, 3, 4, 1, 2, 3, 1, 2],
        [1, 2, 3, 4, 1, 2, 3, 4, 1],
        [1, 2, 3, 4, 1, 2, 3, 4, 1],
    ],
    [
        [1, 2, 3, 4, 1, 2, 3, 1, 2],
        [1, 2, 3, 4, 5, 1, 2, 3, 1],
        [1, 2, 3, 4, 5, 6, 1, 2, 3],
        [1, 2, 3, 4, 1, 2, 3, 1, 2],
        [1, 2, 3, 4, 1, 2, 3, 4, 1],
        [1, 2, 3, 4, 1, 2, 3, 4, 1],
    ],
]


def _left_epochs_over_ranks(ranks: RankGroup) -> list[list[float]]:
    """Rank 0 reads the end ahead before the others do, and alone sees its iterator reset."""
    found = []
    for uneven_inputs in (DrainAll(), StopAtShortest()):
        for name in STOPPED:
            pipeline = getattr(pipelines, name)(
                Line().eval(), None, uneven_inputs=uneven_inputs, ranks=ranks
            )
            found.append(_stopped(pipeline, SameIterator(4 + 3 * ranks.rank), 3))
    return found


def test_left_epochs_over_ranks_of_unlike_lengths() -> None:
    assert worlds.run(2, _left_epochs_over_ranks) == LEFT


def _epochs_of_one_iterator(ranks: RankGroup) -> list[list[int]]:
    loader = SameIterator(2 + ranks.rank)
    counts = []
    for uneven_inputs in (DrainAll(), StopAtShortest(), AssumeEqual()):
        loader.count = 2 if isinstance(uneven_inputs, AssumeEqual) else loader.count
        pipeline = TrainPipelineBase(Line().eval(), None, uneven_inputs=uneven_inputs, ranks=ranks)
        counts.append([len(list(pipeline.run(loader))) for _ in range(3)])
    return counts


def test_every_epoch_of_one_iterator_over_ranks() -> None:
    assert worlds.run(2, _epochs_of_one_iterator) == [[[3] * 3, [2] * 3, [2] * 3]] * 2


def test_eval_mode_only_runs_forward() -> None:
    model, pipeline = line()
    model.eval()
    assert [out.item() for out in pipeline.run(torch.ones(3, 2))] == [2.0] * 3
    assert model.weight.item() == 1.0


def test_wrong_use_is_told() -> None:
    with pytest.raises(TypeError, match=r"iter\(loader\), got list"):
        line()[1].progress([torch.ones(1)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"iter\(loader\), got NoneType"):
        line()[1].progress(None)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"DrainAll\(\), StopAtShortest\(\) or AssumeEqual\(\), got 'longest'"
    ):
        line(uneven_inputs="longest")
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got int"):
        TrainPipelineBase(3, None)  # type: ignore[arg-type]
    functions: Any = {"forward": 3, "on_progress": 3, "inputs": {"bags": "batch"}}
    for name, value in functions.items():
        with pytest.raises(TypeError, match=f"{name} must be a function"):
            TrainPipelineSparseDist(torch.nn.Linear(1, 1), None, **{name: value})
    with pytest.raises(TypeError, match="must have zero_grad and step"):
        TrainPipelineBase(torch.nn.Linear(1, 1), 0.1)
    with pytest.raises(TypeError, match="must have zero_grad and step"):
        TrainPipelineBase(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))  # has zero_grad alone
    with pytest.raises(TypeError, match="empty must be a function of a batch, got 0"):
        DrainAll(0)  # type: ignore[arg-type]
    alone = TrainPipelineBase(torch.nn.Linear(1, 1), None, forward=lambda batch: batch)
    batches = iter(torch.arange(3))
    with pytest.raises(ValueError, match="a model in training needs an optimizer"):
        alone.progress(batches)
    alone.model.eval()
    assert alone.progress(batches) == 0  # no batch is lost
    with pytest.raises(TypeError, match=r"must give \(loss, output\).*got dict"):
        next(line(forward=lambda batch: {"loss": batch})[1].run([torch.ones(1)]))
    outputs = line()[1].run([torch.ones(1), None, torch.ones(1)])
    with pytest.raises(TypeError, match="returned None, which is not a batch"):
        list(outputs)


# Rates


def _ticks(monkeypatch: pytest.MonkeyPatch, times_s: Iterator[float]) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: next(times_s))


def test_rates_are_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    _ticks(monkeypatch, iter([100.0, 101.0, 103.0]))
    meter.begin()
    assert meter.end(ExampleCount(4, 10)) == Progress(1, 4, 10, 1.0, 1.0, 4.0, 10.0)
    meter.begin()
    assert meter.end(ExampleCount(2, 2)) == Progress(2, 6, 12, 3.0, 2 / 3, 2.0, 4.0)
    _ticks(monkeypatch, iter(float(t) for t in range(104, 200)))
    for _ in range(RATE_WINDOW + 3):
        meter.begin()
        last = meter.end(ExampleCount(5, None))
    assert (last.steps_per_s, last.own_examples_per_s) == (1.0, 5.0)
    assert (last.examples, last.examples_per_s) == (None, None)
    assert str(last) == (
        f"step {RATE_WINDOW + 5}: {6 + 5 * (RATE_WINDOW + 3)} examples in {RATE_WINDOW + 6:.1f} s, "
        "1.00 steps/s, 5 examples/s (this rank)"
    )


def test_time_between_loaders_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    _ticks(monkeypatch, iter([0.0, 1.0, 1000.0, 1002.0]))
    meter.begin()
    meter.end(ExampleCount(1, 1))
    meter.pause()
    meter.begin()
    assert meter.end(ExampleCount(1, 1)).steps_per_s == 0.5


def test_the_callback_is_told_of_every_step() -> None:
    said: list[Progress] = []
    _, pipeline = line(on_progress=said.append)
    list(pipeline.run(torch.ones(3, 2)))
    assert [(p.step, p.own_examples, p.examples) for p in said] == [(1, 2, 2), (2, 4, 4), (3, 6, 6)]
