"""Every pipeline gives what the plain loop gives, to the bit, on every rank."""

import functools
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.collections import EmbeddingBagCollection
from emblib.collections.configs import EmbeddingBagConfig
from emblib.jagged import KeyedJaggedTensor
from emblib.optim import SGD
from emblib.sharding import DistributedModelParallel, pipelines
from emblib.sharding.awaitables import DeferredAwaitable
from emblib.sharding.pipelines import EvalPipelineSparseDist, StopAtShortest, empty_batch
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
from emblib.sharding.sharding_types import row_wise
from emblib.specs import Placement
from emblib.storage import Dense
from tests.sharding import worlds
from tests.sharding.pipeline_cases import (
    Batch,
    Case,
    batches_of,
    dense_optimizer,
    make_batch,
    plain_loop,
    to_device,
    values_of,
)

PIPELINES = (
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
)

Trained = tuple[list[Tensor], dict[Any, Tensor]]


def _plainly(ranks: RankGroup, case: Case) -> Trained:
    model = case.model(ranks)
    batches = batches_of(ranks.rank, case.counts)
    losses = list(plain_loop(model, batches, max(case.counts)))
    return losses, values_of(model)


@functools.cache
def plainly(case: Case) -> list[Trained]:
    """Return what the ranks have after the plain loop."""
    return worlds.run(len(case.counts), _plainly, case)


def _pipeline(name: str, model: Any, **options: Any) -> Any:
    kind = getattr(pipelines, name)

    def forward(batch: Batch) -> tuple[Tensor, Tensor]:
        loss, _ = model(batch)
        return loss, loss.detach()

    return kind(model, dense_optimizer(model), forward=forward, **options)


def _in_pipeline(ranks: RankGroup, case: Case, name: str) -> Trained:
    model = case.model(ranks)
    pipeline = _pipeline(name, model)
    losses = list(pipeline.run(batches_of(ranks.rank, case.counts)))
    assert pipeline.steps == max(case.counts)
    return losses, values_of(model)


def assert_same(found: list[Trained], expected: list[Trained]) -> None:
    for (losses, values), (plain_losses, plain_values) in zip(found, expected, strict=True):
        # A loss over no examples is NaN in both.
        torch.testing.assert_close(losses, plain_losses, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(values, plain_values, rtol=0, atol=0)


CASES = {
    "one rank": Case((5,)),
    "two ranks": Case((5, 5)),
    "uneven": Case((2, 5)),
    "a rank without batches": Case((0, 4)),
    "four ranks, uneven": Case((3, 1, 0, 4)),
    "copies": Case((3, 4), plan="copies"),
    "fully sharded": Case((4, 3), wrap="fully_shard"),
    "called twice": Case((4, 3), net="twice"),
    "cached": Case((5, 3), cached=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_of_the_plain_loop(case: Case) -> None:
    # The first pipeline sends nothing ahead, so that it calls the model as the plain loop does.
    names = PIPELINES if case in (CASES["uneven"], CASES["copies"]) else PIPELINES[1:]
    for name in names:
        assert_same(worlds.run(len(case.counts), _in_pipeline, case, name), plainly(case))


def _prepared(ranks: RankGroup, case: Case, name: str) -> tuple[list[str], Trained]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained = _in_pipeline(ranks, case, name)
    return [str(w.message) for w in said if "sent ahead" in str(w.message)], trained


@pytest.mark.parametrize("name", PIPELINES[1:])
@pytest.mark.parametrize(
    ("net", "path"), [("preparing", "clicks"), ("weighted", "bags.embedding_bag_collection")]
)
def test_an_input_that_the_model_makes(net: str, path: str, name: str) -> None:
    case = Case((4, 2), net=net)
    found = worlds.run(2, _prepared, case, name)
    assert_same([trained for _, trained in found], plainly(case))
    for said, _ in found:
        assert len(said) == 1
        assert f"the input of {path} is not an object of the batch" in said[0]


def test_a_first_forward_that_fails_teaches_nothing() -> None:
    ranks = RankGroup.single()
    bags = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item")])
    model = ShardedEmbeddingBagCollection(bags, {"item": row_wise()}, ranks).eval()
    failures = iter([RuntimeError("the first forward fails")])

    def forward(batch: Any) -> Tensor:
        values = model(batch).values()
        for error in failures:
            raise error
        return values

    pipeline = EvalPipelineSparseDist(model, forward=forward, ranks=ranks)
    length = torch.tensor([1])
    batches = iter(
        [KeyedJaggedTensor(["item"], torch.tensor([i]), lengths=length) for i in range(3)]
    )
    with pytest.raises(RuntimeError, match="the first forward fails"):
        pipeline.progress(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "the input is not an object of the batch"
        assert pipeline.progress(batches).shape == (1, 4)


def _bags_of(batch: dict[str, KeyedJaggedTensor]) -> dict[str, KeyedJaggedTensor]:
    return {"": batch["bags"]}


def _has_a_wrong_batch(ranks: RankGroup, name: str, lacks: str, inputs: Any, wrong: int) -> str:
    """One batch of rank 1 is wrong; its sizes are sent before the step of the batch before it."""
    keys = ["item", "shop"]
    bags = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, key) for key in keys], optimizer=SGD(1))
    model = ShardedEmbeddingBagCollection(bags, dict.fromkeys(keys, row_wise()), ranks)
    pipeline = getattr(pipelines, name)(
        model,
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]),
        inputs=inputs,
        forward=lambda batch: model(batch["bags"]).values().sum(),
        ranks=ranks,
    )
    ones = torch.ones(2).long()
    batches = [{"bags": KeyedJaggedTensor(keys, ones, lengths=ones)} for _ in range(4)]
    if ranks.rank and lacks == "feature":
        batches[wrong] = {"bags": KeyedJaggedTensor(keys[:1], ones[:1], lengths=ones[:1])}
    elif ranks.rank:
        batches[wrong] = {"no bags": batches[wrong]["bags"]}
    with pytest.raises((KeyError, RuntimeError)) as caught:
        list(pipeline.run(batches))
    return str(caught.value)


@pytest.mark.parametrize("name", PIPELINES[1:])
@pytest.mark.parametrize(
    ("lacks", "inputs", "wrong"),
    [("feature", None, 2), ("path", None, 2), ("path", _bags_of, 2), ("path", _bags_of, 0)],
    ids=["feature", "learned path", "inputs raises", "inputs raises at once"],
)
def test_no_rank_waits_for_one_whose_next_batch_is_wrong(
    name: str, lacks: str, inputs: Any, wrong: int
) -> None:
    told, raised = worlds.run(2, _has_a_wrong_batch, name, lacks, inputs, wrong)
    assert "rank 1 could not send its batch" in told
    assert ("the batch has no features ['shop']" if lacks == "feature" else "'bags'") in raised


def _reads_a_wrong_batch(ranks: RankGroup, name: str) -> tuple[int, list[str], int]:
    """The loader of rank 1 fails at its third batch, and goes on when all ranks have raised."""
    model = Case((5, 5)).model(ranks)
    batches = iter(batches_of(ranks.rank, (5, 5)))

    class Loader:
        count = 0

        def __next__(self) -> Batch:
            self.count += 1
            if self.count == 3 and ranks.rank == 1:
                raise OSError("the file of batch 2 is damaged")
            return next(batches)

    pipeline, loader = _pipeline(name, model), Loader()
    pipeline.progress(loader)
    pipeline.progress(loader)
    with pytest.raises((OSError, RuntimeError)) as caught:
        pipeline.progress(loader)
    while True:
        try:
            pipeline.progress(loader)
        except StopIteration:
            return pipeline.steps, [str(caught.value)], len(list(batches))


@pytest.mark.parametrize("name", PIPELINES)
def test_no_rank_waits_for_one_that_cannot_read_its_batch(name: str) -> None:
    told, raised = worlds.run(2, _reads_a_wrong_batch, name)
    assert told == (5, ["rank 1 could not read its batch, see its error: no rank ran the step"], 0)
    assert raised == (5, ["the file of batch 2 is damaged"], 0)


def _given_inputs(ranks: RankGroup, case: Case, name: str) -> Trained:
    model = case.model(ranks)
    seen = []

    def inputs(batch: Batch) -> dict[Any, Any]:
        seen.append(batch)
        return {"bags": batch.bags, model.module.clicks: [batch.more["clicks"]]}

    pipeline = _pipeline(name, model, inputs=inputs)
    losses = list(pipeline.run(batches_of(ranks.rank, case.counts)))
    assert len(seen) == max(case.counts)
    return losses, values_of(model)


@pytest.mark.parametrize("name", PIPELINES[1:])
def test_inputs_that_the_caller_names(name: str) -> None:
    case = Case((3, 4))
    assert_same(worlds.run(2, _given_inputs, case, name), plainly(case))


def _interleaved(ranks: RankGroup, case: Case, name: str) -> Trained:
    """Evaluates another batch with the same model between the steps, and reads the tables."""
    model = case.model(ranks)
    pipeline = _pipeline(name, model)
    losses = []
    for loss in pipeline.run(batches_of(ranks.rank, case.counts)):
        losses.append(loss)
        with torch.no_grad():
            model(to_device(make_batch(7, 2), ranks.device))
        model.state_dict()
    return losses, values_of(model)


@pytest.mark.parametrize("name", PIPELINES)
def test_the_model_may_be_used_between_steps(name: str) -> None:
    case = CASES["cached"]
    assert_same(worlds.run(2, _interleaved, case, name), plainly(case))


def _evaluated(ranks: RankGroup, case: Case) -> None:
    """Outputs and tables of the pipeline, and of the model called batch by batch."""
    model = case.model(ranks).eval()
    before = {key: value.clone() for key, value in values_of(model).items()}
    batches = batches_of(ranks.rank, case.counts)
    pipeline = pipelines.EvalPipelineSparseDist(model)
    found = list(pipeline.run(batches))
    with torch.no_grad():
        empty = empty_batch(make_batch(0, 1))
        padded = batches + [empty] * (max(case.counts) - len(batches))
        expected = [model(to_device(batch, ranks.device)) for batch in padded]
    for (loss, output), (plain_loss, plain_output) in zip(found, expected, strict=True):
        assert not output.requires_grad
        torch.testing.assert_close(loss, plain_loss, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(output, plain_output)
    assert all(torch.equal(value, before[key]) for key, value in values_of(model).items())
    with pytest.raises(ValueError, match=r"call model.eval\(\) before evaluation"):
        pipelines.EvalPipelineSparseDist(model.train()).progress(iter(batches))


@pytest.mark.parametrize("counts", [(3,), (4, 2), (0, 3)], ids=str)
def test_evaluation_gives_what_the_model_gives(counts: tuple[int, ...]) -> None:
    worlds.run(len(counts), _evaluated, Case(counts))


def _epochs(ranks: RankGroup, case: Case, name: str) -> Trained:
    """The same batches, but with a new iterator after every second."""
    model = case.model(ranks)
    pipeline = _pipeline(name, model)
    batches, losses = batches_of(ranks.rank, case.counts), []
    for start in range(0, max(case.counts), 2):
        losses += list(pipeline.run(batches[start : start + 2]))
    return losses, values_of(model)


@pytest.mark.parametrize("name", PIPELINES[1:])
def test_a_step_that_fails_before_its_lookups_stops_no_later_one(name: str) -> None:
    table = EmbeddingBagConfig(100, 4, "item", storage=Dense(Placement.MANAGED_CACHING))
    batches = [
        KeyedJaggedTensor(["item"], torch.arange(i, 8 * i + 9), lengths=torch.tensor([7 * i + 9]))
        for i in range(7)
    ]

    def train(*, fails: bool, used: Sequence[int]) -> Tensor:
        torch.manual_seed(0)
        bags = EmbeddingBagCollection([table], optimizer=SGD(0.1))
        model = DistributedModelParallel(bags, RankGroup.single(), plan={"": {"item": row_wise()}})

        def loss(batch: Any) -> Tensor:
            if fails and batch is batches[3]:
                raise ZeroDivisionError
            return model(batch).values().square().sum()

        inputs: dict[str, Any] = (
            {} if name == PIPELINES[0] else {"inputs": lambda b: {model.module: b}}
        )
        pipeline = getattr(pipelines, name)(model, model.fused_optimizer, forward=loss, **inputs)
        iterator = iter([batches[i] for i in used])
        for i in used:
            with pytest.raises(ZeroDivisionError) if fails and i == 3 else nullcontext():
                pipeline.progress(iterator)
        weight: Tensor = model.state_dict()["embedding_bags.item.weight"].full_tensor()
        return weight

    failed = train(fails=True, used=range(7))
    assert torch.equal(failed, train(fails=False, used=[0, 1, 2, 4, 5, 6]))


@pytest.mark.parametrize("name", PIPELINES[1:])
@pytest.mark.parametrize("interrupted_wait", range(1, 7))
def test_an_interrupted_wait_for_ids_loses_no_later_batch(
    name: str, interrupted_wait: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process: Ctrl-C ends a step, whichever batch it waits for; all later batches train."""
    batches = [
        KeyedJaggedTensor(["item"], torch.tensor([i]), lengths=torch.tensor([1])) for i in range(6)
    ]
    bags = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item")], optimizer=SGD(0.1))
    model = DistributedModelParallel(bags, RankGroup.single(), plan={"": {"item": row_wise()}})
    trained: list[int] = []

    def loss(batch: Any) -> Tensor:
        trained.append(int(batch.values()))
        return model(batch).values().square().sum()

    pipeline = getattr(pipelines, name)(
        model, model.fused_optimizer, forward=loss, inputs=lambda b: {model.module: b}
    )
    iterator = iter(batches)
    pipeline.progress(iterator)
    num_waits = 0
    wait = DeferredAwaitable._wait_impl

    def interrupt(awaitable: Any) -> Any:
        nonlocal num_waits
        result = wait(awaitable)
        num_waits += 1
        if num_waits == interrupted_wait:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(DeferredAwaitable, "_wait_impl", interrupt)
    interrupted: list[int] = []  # batches of interrupted steps
    for _ in batches[1:]:
        try:
            pipeline.progress(iterator)
        except KeyboardInterrupt:
            interrupted.append(pipeline.steps)
    assert len(interrupted) == 1
    assert {*trained, *interrupted} == set(range(6))


@pytest.mark.parametrize("name", PIPELINES)
def test_one_epoch_after_another(name: str) -> None:
    case = Case((4, 4))
    assert_same(worlds.run(2, _epochs, case, name), plainly(case))


def _shortest(ranks: RankGroup, case: Case, name: str) -> tuple[int, Trained]:
    model = case.model(ranks)
    pipeline = _pipeline(name, model, uneven_inputs=StopAtShortest())
    losses = list(pipeline.run(batches_of(ranks.rank, case.counts)))
    return pipeline.steps, (losses, values_of(model))


@pytest.mark.parametrize("name", PIPELINES)
def test_until_the_first_is_out(name: str) -> None:
    found = worlds.run(3, _shortest, Case((5, 2, 4)), name)
    assert [steps for steps, _ in found] == [2, 2, 2]
    assert_same([trained for _, trained in found], plainly(Case((2, 2, 2))))


def _order(name: str) -> list[str]:
    """What the pooled collection was asked, in order, with the number of the batch."""
    model = Case((6,)).model(RankGroup.single())
    batches = batches_of(0, (6,))
    bags, said = model.module.bags, []
    number = {batch.bags: i for i, batch in enumerate(batches)}
    send, look_up = bags.collection_requests, bags.compute
    prefetch = bags.prefetch

    def sending(kjt: Any) -> Any:
        said.append(f"send {number[kjt]}")
        return send(kjt)

    bags.collection_requests = sending
    bags.compute = lambda r: (said.append("look up"), look_up(r))[1]
    bags.prefetch = lambda r: (said.append("prefetch"), prefetch(r))[1]
    list(_pipeline(name, model).run(batches))
    return said


def test_what_runs_ahead() -> None:
    said = _order("TrainPipelineSparseDist")
    assert said == [
        *("send 0", "look up"),  # the first batch shows where its inputs are
        *("send 1", "send 2", "look up"),
        *("send 3", "look up", "send 4", "look up", "send 5", "look up", "look up"),
    ]
    said = _order("PrefetchTrainPipelineSparseDist")
    assert said == [
        *("send 0", "look up", "send 1", "send 2"),
        *("send 3", "prefetch", "prefetch", "look up"),
        *("send 4", "prefetch", "look up", "send 5", "prefetch", "look up"),
        *("prefetch", "look up", "look up"),
    ]


def _of_batch(batch: Batch) -> Any:
    return batch.bags


def _of_another(batch: Batch) -> Any:
    return make_batch(9, 1).bags


def _three(batch: Batch) -> Any:
    return [batch.bags] * 3


def test_caches_are_given_their_rows_ahead() -> None:
    model = Case((4,), cached=True).model(RankGroup.single())
    (info,) = model.module.bags.groups.groups
    given, prefetch = [], info.module.prefetch

    def prefetching(ids: Tensor, *others: Any, **options: Any) -> None:
        given.append(ids.tolist())
        prefetch(ids, *others, **options)

    info.module.prefetch = prefetching
    batches = batches_of(0, (4,))
    list(_pipeline("PrefetchTrainPipelineSparseDist", model).run(batches))
    assert info.module.row_cache is not None
    assert given == [batch.bags.values().tolist() for batch in batches[1:]]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("bag", _of_batch, r"sharded collections \['bags', 'clicks'\], got 'bag'"),
        ("bags", _of_another, "not the one sent ahead"),
        ("bags", _three, "2 of its inputs were sent and not used"),
    ],
)
def test_wrong_inputs_are_told(key: str, value: Any, says: str) -> None:
    model = Case((1,)).model(RankGroup.single())
    pipeline = _pipeline("TrainPipelineSparseDist", model, inputs=lambda batch: {key: value(batch)})
    with pytest.raises((ValueError, RuntimeError), match=says):
        list(pipeline.run(batches_of(0, (1,))))


@pytest.mark.parametrize("are_named", [False, True])
def test_a_model_may_pass_the_input_by_keyword(*, are_named: bool) -> None:
    ranks = RankGroup.single()
    source = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item")])
    bags = ShardedEmbeddingBagCollection(source, {"item": row_wise()}, ranks).eval()

    def forward(batch: KeyedJaggedTensor) -> Tensor:
        return bags(features=batch).values()

    batch = KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
    inputs = (lambda item: {bags: item}) if are_named else None
    pipeline = EvalPipelineSparseDist(bags, forward=forward, inputs=inputs, ranks=ranks)
    outputs = list(pipeline.run([batch] * 3))
    assert all(torch.equal(output, forward(batch)) for output in outputs)
    assert len(outputs) == 3
