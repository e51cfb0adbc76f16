"""The plain loop with one exchange per step gives what it gives with one per collection."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from emblib import KeyedJaggedTensor, optim
from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig
from emblib.sharding.model_parallel import DistributedModelParallel
from emblib.sharding.pipelines.inputs import sharded_modules
from emblib.sharding.ranks import RankGroup, subgroup
from emblib.sharding.sharding_types import row_wise, table_wise
from tests.sharding import worlds
from tests.sharding.pipeline_cases import Batch, Case, batches_of, make_batch, plain_loop, values_of

Found = tuple[list[Tensor], dict[Any, Tensor], list[str], dict[str, str]]


def _plain(ranks: RankGroup, case: Case, *, joint: bool) -> Found:
    model = case.model(ranks)
    model.joint_dist.enabled = joint
    batches = batches_of(ranks.rank, case.counts)
    losses = list(plain_loop(model, batches, max(case.counts)))
    return losses, values_of(model), model.joint_dist.joint_paths, model.joint_dist.separate_reasons


def assert_same(found: Sequence[Found], expected: Sequence[Found]) -> None:
    for (losses, values, *_), (other_losses, other_values, *_) in zip(found, expected, strict=True):
        torch.testing.assert_close(losses, other_losses, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(values, other_values, rtol=0, atol=0)


CASES = {
    "two ranks": Case((5, 5)),
    "four ranks, uneven": Case((3, 1, 0, 4)),
    "copies": Case((3, 4), plan="copies"),
    "fully sharded": Case((4, 3), wrap="fully_shard"),
    "called twice": Case((4, 3), net="twice"),
    "unfused": Case((4, 3), net="unfused"),
    "cached": Case((5, 3), cached=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_do_not_change(case: Case) -> None:
    size = len(case.counts)
    found = worlds.run(size, "tests.sharding.test_joint_dist:_jointly", case)
    assert_same(found, worlds.run(size, "tests.sharding.test_joint_dist:_apart", case))
    for _, _, together, apart in found:
        assert (together, apart) == (["bags", "clicks"], {})


def _jointly(ranks: RankGroup, case: Case) -> Found:
    return _plain(ranks, case, joint=True)


def _apart(ranks: RankGroup, case: Case) -> Found:
    return _plain(ranks, case, joint=False)


@pytest.mark.parametrize(
    ("net", "path"), [("preparing", "clicks"), ("weighted", "bags.embedding_bag_collection")]
)
def test_a_collection_whose_input_the_model_makes_exchanges_by_itself(net: str, path: str) -> None:
    case = Case((4, 2), net=net)
    found = worlds.run(2, _jointly, case)
    assert_same(found, worlds.run(2, _apart, case))
    for _, _, together, apart in found:
        assert path not in together
        assert len(together) == 1
        assert "the model makes its input" in apart[path]


class Several(nn.Module):
    """Collections of one feature each, and what a test does between their calls."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            EmbeddingBagCollection([EmbeddingBagConfig(20, 4, f"t{i}")], optimizer=optim.Adam(0.1))
            for i in range(count)
        )
        self.mode = ""

    def forward(self, batches: Any, *, other: Any = None) -> list[Tensor]:
        """Return the output of every part."""
        if self.mode == "fails":
            raise KeyError(self.mode)
        if self.mode == "changes":
            batches[0].values().remainder_(7)
        found = []
        for i, part in enumerate(self.parts):
            if self.mode == "skips" and i == 1:
                continue
            batch = other if batches[i] is None else batches[i]
            is_frozen = self.mode == "frozen" and i == 0
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_frozen):
                found.append(part(batch).values())
        return found


def _several(ranks: RankGroup, count: int = 3) -> DistributedModelParallel:
    torch.manual_seed(2)
    rules = {f"parts.{i}": {f"t{i}": row_wise() if i else table_wise(1)} for i in range(count)}
    return DistributedModelParallel(Several(count), ranks, plan=rules)


def _batches(ranks: RankGroup, step: int, count: int = 3) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(10 * step + ranks.rank)
    return [
        KeyedJaggedTensor(
            [f"t{i}"],
            torch.randint(20, (6,), generator=generator),
            lengths=torch.tensor([1, 2, 3]),
        )
        for i in range(count)
    ]


def _weights(model: DistributedModelParallel) -> list[Tensor]:
    return [
        view.clone()
        for part in sharded_modules(model).values()
        for shard in part.local_shards()
        for view in shard.groups.views(shard.index).values()
    ]


class _Counter:
    """Counts the collectives of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("all_to_all_single", "broadcast", "all_reduce"):
            monkeypatch.setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return call


def _num_collectives(ranks: RankGroup, *, joint: bool) -> list[int]:
    model, counts = _several(ranks), []
    model.joint_dist.enabled = joint
    with pytest.MonkeyPatch.context() as monkeypatch:
        counter = _Counter(monkeypatch)
        for step in range(3):
            before = counter.count
            sum(out.square().sum() for out in model(_batches(ranks, step))).backward()
            counts.append(counter.count - before)
    return counts


def _counted_apart(ranks: RankGroup) -> list[int]:
    return _num_collectives(ranks, joint=False)


def _counted_jointly(ranks: RankGroup) -> list[int]:
    return _num_collectives(ranks, joint=True)


def test_a_step_has_five_collectives_whatever_the_number_of_collections() -> None:
    # Sizes, ids, rows, the header of the gradients, and the gradients.
    assert worlds.run(2, _counted_apart) == [[15] * 3] * 2
    # The first step compares what the ranks found, which has a header of its own.
    assert worlds.run(2, _counted_jointly) == [[16, 5, 5]] * 2


MODES = ("skips", "changes", "frozen", "moved", "losses", "eval")


def _odd_steps(ranks: RankGroup, mode: str, *, joint: bool) -> Found:
    """Six steps, of which those after the first are unusual, on one rank or on all."""
    model = _several(ranks)
    model.joint_dist.enabled = joint
    losses = []
    for step in range(6):
        batches: list[Any] = _batches(ranks, step)
        model.module.mode = mode if mode in ("changes", "frozen") or step in (2, 3) else ""
        options = {}
        if mode == "moved" and step == 2 and ranks.rank == 1:
            options, batches[1] = {"other": batches[1]}, None
        model.train(mode != "eval" or step % 2 == 0)
        outputs = model(batches, **options)
        loss = sum(out.square().sum() for out in outputs)
        losses.append(loss.detach())
        if not model.training:
            continue
        if mode == "losses" and step % 2:
            outputs[step // 2].sum().backward()  # the others do not change
        elif mode == "losses":
            for output in outputs:  # a backward pass each
                output.square().sum().backward()
        else:
            loss.backward()
    exchange = model.joint_dist
    return losses, dict(enumerate(_weights(model))), exchange.joint_paths, exchange.separate_reasons


def _odd_jointly(ranks: RankGroup, mode: str) -> Found:
    return _odd_steps(ranks, mode, joint=True)


def _odd_apart(ranks: RankGroup, mode: str) -> Found:
    return _odd_steps(ranks, mode, joint=False)


@pytest.mark.parametrize("mode", MODES)
def test_unusual_steps(mode: str) -> None:
    every = ["parts.0", "parts.1", "parts.2"]
    found = worlds.run(2, _odd_jointly, mode)
    assert_same(found, worlds.run(2, _odd_apart, mode))
    for _, _, together, apart in found:
        if mode == "changes":
            assert together == every[1:]
            assert apart == {"parts.0": "the model changes its input in place"}
        elif mode == "skips":
            assert together == ["parts.0", "parts.2"]
            assert apart == {"parts.1": "a forward left it out, after its batch had been sent"}
        else:
            assert (together, apart) == (every, {})


def _changes_late(ranks: RankGroup) -> tuple[str, bool]:
    model = _several(ranks)
    model(_batches(ranks, 0))
    model.module.mode = "changes"
    with pytest.raises(RuntimeError) as raised:
        model(_batches(ranks, 1))
    model.module.mode = ""
    jointly = model(_batches(ranks, 2))
    model.joint_dist.enabled = False
    apart = model(_batches(ranks, 2))
    return str(raised.value), all(map(torch.equal, jointly, apart))


def test_an_input_that_changes_after_it_was_sent_is_told() -> None:
    for message, next_is_right in worlds.run(2, _changes_late):
        assert next_is_right
        assert "the model changed the input of parts.0 in place" in message
        assert "joint_dist.enabled = False" in message


def _fails_before_its_lookups(ranks: RankGroup, failing_ranks: tuple[int, ...]) -> str:
    """Some ranks fail in the second forward, before its lookups, and go on to the next batch."""
    ranks = RankGroup(subgroup(ranks))  # the test may leave it unfit
    model = _several(ranks)
    try:
        for step in range(4):
            model.module.mode = "fails" if step == 1 and ranks.rank in failing_ranks else ""
            with contextlib.suppress(KeyError):
                sum(out.sum() for out in model(_batches(ranks, step))).backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.skipif(worlds.ON_GPUS, reason="ranks on GPUs compare no headers")
def test_ranks_that_fail_before_their_lookups_stay_in_step_or_are_told() -> None:
    assert worlds.run(2, _fails_before_its_lookups, (0, 1)) == ["", ""]
    for message in worlds.run(2, _fails_before_its_lookups, (1,)):
        assert "an error ended the step of rank 1 before its backward" in message


def _keeps_changing(ranks: RankGroup) -> tuple[list[str], dict[str, str]]:
    model = _several(ranks)
    for step in range(10):
        batches: list[Any] = _batches(ranks, step)
        options = {}
        if step % 2:
            options, batches[1] = {"other": batches[1]}, None
        model(batches, **options)
    return model.joint_dist.joint_paths, model.joint_dist.separate_reasons


def test_a_model_whose_inputs_keep_moving_exchanges_apart() -> None:
    for together, apart in worlds.run(2, _keeps_changing):
        assert together == []
        assert set(apart.values()) == {"the inputs were not at the same paths in all forwards"}


def _alone(ranks: RankGroup) -> tuple[list[str], bool]:
    model = _several(ranks)
    batches = _batches(ranks, 0)
    outputs = [model(batches) for _ in range(2)]
    part = model.module.parts[1]
    return model.joint_dist.joint_paths, torch.equal(part(batches[1]).values(), outputs[1][1])


def test_a_collection_may_be_called_between_forwards() -> None:
    assert worlds.run(2, _alone) == [(["parts.0", "parts.1", "parts.2"], True)] * 2


def _is_silent_on_one_rank(ranks: RankGroup) -> list[str]:
    """One rank alone has batches that are elsewhere from the beginning."""
    model = _several(ranks)
    for step in range(3):
        batches: list[Any] = _batches(ranks, step)
        options = {}
        if ranks.rank == 0:
            options, batches[1] = {"other": batches[1]}, None
        sum(out.sum() for out in model(batches, **options)).backward()
    return model.joint_dist.joint_paths


def test_what_ranks_find_at_different_places_is_exchanged_apart() -> None:
    assert worlds.run(2, _is_silent_on_one_rank) == [[], []]


def test_one_rank_exchanges_nothing() -> None:
    model = Case((2,)).model(RankGroup.single())
    batch: Batch = make_batch(0, 2)
    model(batch)
    assert model.joint_dist.joint_paths == []
    assert not hasattr(model, "joint_exchange")  # the former name raised RuntimeError
