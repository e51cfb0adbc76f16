"""Models with shared tables over ranks, step by step against the same model in one process."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import emblib
from emblib import KeyedJaggedTensor, optim, sharding
from emblib.collections.optimizers import FusedOptimizer
from emblib.sharding import GradientReduction, sharding_types
from emblib.sharding.dense import unwrapped
from emblib.sharding.pipelines.inputs import sharded_modules
from emblib.sharding.ranks import RankGroup
from emblib.specs import Pooling
from tests.sharding.sharded_cases import WORDS, compare_tables, joined

KEYS = ("f0", "f1", "f2", "f3", "f4", "f5")
ROWS = {"item": 13, "user": 7, "own": 9, "seen": 5}
DIMS = {"item": 8, "user": 4, "own": 8, "seen": 4}
TABLES = {
    "sums": ("item", "own"),
    "scaled": ("item", "user"),
    "history": ("user", "item", "seen"),
}
STEPS = 3


@dataclass(frozen=True)
class Shared:
    """A case: `plan` has a word or shards by table, `joint` is for one exchange per forward."""

    plan: dict[str, Any]
    optimizer: Any = field(default_factory=lambda: optim.SGD(0.5))
    batches: tuple[int, ...] = (4, 3, 2, 3)
    storage: Any = field(default_factory=emblib.storage.Dense)
    gradients: str = "sum"
    joint: bool = False
    tolerance: float = 1e-5


class Model(nn.Module):
    """Sums, weighted means and vectors of two shared tables, and tables of their own."""

    def __init__(self, case: Shared, device: Any = None) -> None:
        super().__init__()
        shared = emblib.SharedTables(
            [
                emblib.EmbeddingConfig(ROWS[name], DIMS[name], name, storage=case.storage)
                for name in ("item", "user")
            ],
            device,
            optimizer=case.optimizer,
        )
        own = emblib.EmbeddingBagConfig(ROWS["own"], DIMS["own"], "own", ["f2"])
        seen = emblib.EmbeddingConfig(ROWS["seen"], DIMS["seen"], "seen", ["f2"])
        with_own: Any = {"device": device, "shared": shared, "optimizer": case.optimizer}
        self.sums = emblib.EmbeddingBagCollection(
            [shared.pooled("item", ["f0", "f1"]), own], **with_own
        )
        self.scaled = emblib.EmbeddingBagCollection(
            [
                shared.pooled("item", ["f3"], Pooling.MEAN),
                shared.pooled("user", ["f4"], Pooling.MEAN),
            ],
            device,
            shared=shared,
            is_weighted=True,
        )
        self.history = emblib.EmbeddingCollection(
            [shared.unpooled("user", ["f1"]), shared.unpooled("item", ["f5", "f0"]), seen],
            **with_own,
        )

    def forward(self, batch: KeyedJaggedTensor) -> dict[str, Tensor]:
        sums, scaled, history = self.sums(batch), self.scaled(batch), self.history(batch)
        vectors = {name: jagged.values() for name, jagged in dict(history.items()).items()}
        return {"sums": sums.values(), "scaled": scaled.values(), **vectors}


def make(case: Shared, device: Any = None) -> Model:
    """The model of a case; the same on every rank."""
    torch.manual_seed(3)
    return Model(case).to(device)


def batch_of(number: int, size: int) -> KeyedJaggedTensor:
    """Of `size` examples; the same for a number on every rank."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=generator)
    count = int(lengths.sum())
    ids = torch.randint(0, min(ROWS.values()), (count,), generator=generator)
    weights = torch.rand(count, generator=generator) + 0.5
    return KeyedJaggedTensor.from_lengths_sync(list(KEYS), ids, lengths, weights)


def batch_on(ranks: RankGroup, case: Shared, number: int) -> KeyedJaggedTensor:
    """The batch of this rank, on its device."""
    return batch_of(number, case.batches[ranks.rank]).to(ranks.device)


def gradient(name: str, number: int, out: Tensor) -> Tensor:
    """Of an output, for a number of a batch."""
    generator = torch.Generator().manual_seed(number * 1000 + sum(map(ord, name)))
    return torch.randn(out.shape, generator=generator).to(out.device)


def plan_of(case: Shared, ranks: RankGroup) -> dict[str, Any]:
    """Rules by collection and table: a shared table has the same in all of them."""
    world = sharding_types.World(ranks.size, ranks.local_size)
    rules = {
        name: WORDS[word](world, i) if isinstance(word, str) else sharding_types.custom(word)
        for i, (name, word) in enumerate(case.plan.items())
    }
    return {path: {name: rules[name] for name in names} for path, names in TABLES.items()}


def make_sharded(case: Shared, ranks: RankGroup, source: Any) -> Any:
    """The model over ranks."""
    how, plan = GradientReduction(case.gradients), plan_of(case, ranks)
    if case.joint:
        return sharding.DistributedModelParallel(source, ranks, plan=plan, gradients=how)
    return sharding.shard(source, plan, ranks, gradients=how)


def backward(outputs: dict[str, Tensor], number: int) -> None:
    """Of all outputs in one pass."""
    grads = [gradient(name, number, out) for name, out in outputs.items()]
    torch.autograd.backward(list(outputs.values()), grads)


def step_of_all(case: Shared, oracle: Model, numbers: list[int]) -> list[dict[str, Tensor]]:
    """One step of the model in one process with the batches of all ranks; outputs by rank."""
    device = oracle.sums.device
    batches = [batch_of(n, case.batches[r]).to(device) for r, n in enumerate(numbers)]
    outputs = [{k: v.detach() for k, v in oracle(one).items()} for one in batches]
    together = oracle(joined(batches))
    scale = 1.0 / len(numbers) if case.gradients == "mean" else 1.0
    grads = [
        scale
        * torch.cat([gradient(name, n, o[name]) for n, o in zip(numbers, outputs, strict=True)])
        for name in together
    ]
    torch.autograd.backward(list(together.values()), grads)
    return outputs


def train(ranks: RankGroup, case: Shared) -> str:
    """Several steps, compared with one process after each."""
    oracle = make(case, ranks.device)
    model = make_sharded(case, ranks, copy.deepcopy(oracle))
    for step in range(STEPS):
        numbers = [10 * step + r for r in range(ranks.size)]
        expected = step_of_all(case, oracle, numbers)[ranks.rank]
        outputs = model(batch_on(ranks, case, numbers[ranks.rank]))
        for name, out in outputs.items():
            torch.testing.assert_close(
                out.detach(), expected[name], rtol=case.tolerance, atol=case.tolerance
            )
        backward(outputs, numbers[ranks.rank])
        compare(model, oracle, case.tolerance)
    check_listed_once(model, oracle)
    check_replicas(ranks, model)
    return "equal"


def compare(model: Any, oracle: Model, tolerance: float) -> None:
    """Weights, optimizer states and steps of the shards on this rank."""
    for path, part in sharded_modules(model).items():
        whole = oracle.get_submodule(path)
        compare_tables(part, whole, tolerance)
        for shard in part.local_shards():
            module: Any = shard.groups.module_of(shard.index)[0]
            theirs: Any = whole.handles()[shard.table].module  # type: ignore[operator]
            if hasattr(module, "step"):
                ours, expected = module.step, theirs.step
                assert ours == expected, f"{path}.{shard.table}: step {ours}, not {expected}"


def check_listed_once(model: Any, oracle: Model) -> None:
    """A shared table has one memory, and one name in state dicts and optimizers."""
    handles: dict[Any, set[int]] = {}
    for part in sharded_modules(model).values():
        for shard in part.local_shards():
            key = (shard.table, shard.shard.rows, shard.shard.columns)
            pointer = shard.groups.views(shard.index)["weight"].data_ptr()
            handles.setdefault(key, set()).add(pointer)
    assert all(len(pointers) == 1 for pointers in handles.values())
    assert list(model.state_dict()) == list(oracle.state_dict())
    names = [name for group in FusedOptimizer.of(unwrapped(model)).group_names() for name in group]
    expected = [name for group in FusedOptimizer.of(oracle).group_names() for name in group]
    assert sorted(names) == sorted(expected)
    listed = [re.sub(r"#\d+", "", name) for name, _ in model.named_parameters()]
    assert set(listed) <= set(oracle.state_dict())


def check_replicas(ranks: RankGroup, model: Any) -> None:
    """Replicas have the same bits on all ranks."""
    for part in sharded_modules(model).values():
        replicated = [name for name, how in part.plan.items() if how.is_replicated]
        own = {
            shard.table: {k: v.clone() for k, v in shard.groups.views(shard.index).items()}
            for shard in part.local_shards()
            if shard.table in replicated
        }
        every = ranks.gather_objects(
            {t: {k: v.cpu() for k, v in s.items()} for t, s in own.items()}
        )
        for table, states in every[0].items():
            for other in every[1:]:
                assert all(torch.equal(value, other[table][k]) for k, value in states.items())
