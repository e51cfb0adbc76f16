"""Activation checkpointing around sharded collections: one step per batch, on every rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import emblib
from emblib import Eviction, optim
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import DistributedModelParallel, RankGroup, row_wise, table_wise
from emblib.sharding.pipelines import TrainPipelineSparseDist
from emblib.storage import Hash
from tests.sharding import worlds

STEPS = 4
FEATURES = ["f", "g"]


class Model(nn.Module):
    """Two collections, each in a region with what follows it.

    `way` is "plain" for no checkpointing, "reentrant" or "not reentrant"; with "bare" the regions
    have no dense part, with "alone" nothing but the lookup, so that a rank without tables saves no
    tensor of its own; with "to the end" repetitions do not stop early.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.way = way
        for name in ("first", "second"):
            counted = Hash(eviction=Eviction.LFU, seed=1)
            configs = [
                emblib.EmbeddingBagConfig(64, 4, f"{name}_t", ("f",), storage=counted),
                emblib.EmbeddingBagConfig(20, 4, f"{name}_u", ("g",)),
            ]
            setattr(self, name, emblib.EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1)))
        self.over = nn.Linear(8, 3)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the loss."""
        x = torch.ones((), requires_grad=True)
        parts = [self.part(one, batch, x) for one in (self.first, self.second)]
        return torch.stack(parts).sum()

    def part(self, collection: Any, batch: KeyedJaggedTensor, x: Tensor) -> Tensor:
        """Return the sum over a collection."""

        def look_up(x: Tensor) -> Tensor:
            values: Tensor = collection(batch).values()
            return values if "alone" in self.way else values * x

        def run(x: Tensor) -> Tensor:
            return self.over(look_up(x)).square()

        if self.way == "plain":
            return run(x).sum()
        reentrant = self.way.startswith("reentrant")
        with set_checkpoint_early_stop("to the end" not in self.way):
            if "bare" in self.way or "alone" in self.way:
                rows = checkpoint(look_up, x, use_reentrant=reentrant)
                return self.over(rows).square().sum()
            return checkpoint(run, x, use_reentrant=reentrant).sum()


def batch_of(rank: int, step: int) -> KeyedJaggedTensor:
    """Return two features of three bags."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 5, (6,), generator=generator)
    draws = torch.rand(int(lengths.sum()), generator=generator)
    return KeyedJaggedTensor(["f", "g"], (draws.square() * 12).long(), lengths=lengths)


def trained(ranks: RankGroup, plan: str, way: str, loop: str) -> list[Any]:
    """Train some steps; return the losses, the dense gradients and the hash tables."""
    rule = row_wise() if plan == "row-wise" else table_wise(0)
    rules = {name: {f"{name}_{table}": rule for table in "tu"} for name in ("first", "second")}
    wrap = "ddp" if loop == "loop in DDP" else "none"
    model = DistributedModelParallel(Model(way), ranks, plan=rules, wrap=wrap)
    batches = [batch_of(ranks.rank, step) for step in range(STEPS)]
    if loop == "pipeline":
        pipeline = TrainPipelineSparseDist(model, model.fused_optimizer)
        losses = [loss.detach() for loss in pipeline.run(batches)]
    else:
        losses = []
        for batch in batches:
            loss = model(batch)
            loss.backward()
            losses.append(loss.detach())
    results: list[Any] = [losses]
    for name in ("first_t", "second_t"):
        table = model.tables[name].entries()
        order = table.keys.argsort()
        assert table.scores is not None
        results += [table.keys[order], table.scores[order]]
    results += [one.grad for name, one in model.named_parameters() if "over" in name]
    return results


_expected: dict[tuple[int, str, bool], list[Any]] = {}


def both(ranks: RankGroup, plan: str, way: str, loop: str) -> None:
    """Compare with training without checkpointing, which a rank does once."""
    key = ranks.size, plan, loop == "loop in DDP"
    if key not in _expected:
        _expected[key] = trained(ranks, plan, "plain", loop if key[2] else "loop")
    torch.testing.assert_close(trained(ranks, plan, way, loop), _expected[key])


WAYS = ["reentrant", "not reentrant", "not reentrant, to the end", "not reentrant, bare"]
WAYS += ["reentrant, bare", "not reentrant, alone", "not reentrant, alone, to the end"]


CASES = [
    *((2, plan, way, "loop") for plan in ("row-wise", "table-wise") for way in WAYS),
    *((2, "row-wise", way, "pipeline") for way in WAYS),
    *((2, plan, "not reentrant", "loop in DDP") for plan in ("row-wise", "table-wise")),
    *((1, "row-wise", way, loop) for way in WAYS[:2] for loop in ("loop", "pipeline")),
]


@pytest.mark.parametrize(("size", "plan", "way", "loop"), CASES)
def test_checkpointed_collections(size: int, plan: str, way: str, loop: str) -> None:
    worlds.run(size, both, plan, way, loop)
