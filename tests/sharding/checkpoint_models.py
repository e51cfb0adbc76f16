"""Collections over ranks for the tests of checkpoints: made, trained, saved and loaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emblib import optim
from emblib.collections import EmbeddingBagCollection, EmbeddingCollection
from emblib.collections.configs import EmbeddingBagConfig, EmbeddingConfig
from emblib.collections.optimizers import FusedOptimizer
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import checkpoints
from emblib.sharding.checkpoints.sharded_table import gather_state
from emblib.sharding.ranks import RankGroup
from emblib.sharding.shard import construct_module_plan
from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
from emblib.sharding.sharded_sequences import ShardedEmbeddingCollection
from emblib.sharding.sharded_tables import GradientReduction
from emblib.sharding.sharding_types import (
    Rule,
    World,
    column_wise,
    data_parallel,
    grid,
    row_wise,
    table_wise,
)
from emblib.specs import CountMinSketch, Eviction, ExactCounter, FrequencyAdmission
from emblib.storage import Hash, Hashed, Narrow, QuotientRemainder, TensorTrain

BATCH = 12
CONFIGS = {
    "plain": EmbeddingBagConfig(29, 8, "plain", ["f0"], optimizer=optim.RowwiseAdagrad(0.1)),
    "moments": EmbeddingBagConfig(17, 4, "moments", ["f1"], optimizer=optim.Adam(0.1)),
    "partial": EmbeddingBagConfig(
        23, 8, "partial", ["f2"], optimizer=optim.PartialRowwiseAdam(0.1)
    ),
    "cores": EmbeddingBagConfig(
        24,
        8,
        "cores",
        ["f3"],
        storage=TensorTrain((3,), (6, 4), (4, 2)),
        optimizer=optim.RowwiseAdagrad(0.1),
    ),
    "spare": EmbeddingBagConfig(
        18,
        8,
        "spare",
        ["f7"],
        storage=TensorTrain((3,), (6, 4), (4, 2)),
        optimizer=optim.Adam(0.1),
    ),
    "keyed": EmbeddingBagConfig(256, 4, "keyed", ["f4"], storage=Hash(), optimizer=optim.Adam(0.1)),
    "counted": EmbeddingBagConfig(
        256,
        4,
        "counted",
        ["f5"],
        storage=Hash(
            eviction=Eviction.LFU,
            admission=FrequencyAdmission(2, ExactCounter(128)),
            fallback_rows=12,
        ),
        optimizer=optim.RowwiseAdagrad(0.1),
    ),
    "sketched": EmbeddingBagConfig(
        256,
        4,
        "sketched",
        ["f6"],
        storage=Hash(admission=FrequencyAdmission(2, CountMinSketch(64))),
        optimizer=optim.SGD(0.1),
    ),
    "hashed": EmbeddingBagConfig(
        31, 8, "hashed", ["f8"], storage=Hashed(7, functions=2), optimizer=optim.Adam(0.1)
    ),
    "multiplied": EmbeddingBagConfig(
        31,
        8,
        "multiplied",
        ["f9"],
        storage=QuotientRemainder(5),
        optimizer=optim.RowwiseAdagrad(0.1),
    ),
    "narrow": EmbeddingBagConfig(
        19, 8, "narrow", ["f10"], storage=Narrow(3), optimizer=optim.RowwiseAdagrad(0.1)
    ),
}
Plan = Mapping[str, tuple[str, Any]]
RULES = {
    "table": lambda rank, world: table_wise(rank % world),
    "rows": lambda ranks, world: row_wise(_those_there(ranks, world)),
    "columns": lambda ranks, world: column_wise(_those_there(ranks, world)),
    "grid": lambda nodes, world: grid(nodes),
    "copies": lambda nothing, world: data_parallel(),
}


def _those_there(ranks: Sequence[int] | None, world: int) -> Sequence[int] | None:
    return None if ranks is None else list(dict.fromkeys(rank % world for rank in ranks))


def source(plan: Plan, seed: int = 0) -> EmbeddingBagCollection:
    """The tables of a plan in one process, of values that `seed` draws."""
    torch.manual_seed(seed)
    return EmbeddingBagCollection([CONFIGS[name] for name in plan])


def make(ranks: RankGroup, plan: Plan, seed: int = 0) -> ShardedEmbeddingBagCollection:
    """The tables of a plan, of values that `seed` draws."""
    world = World(ranks.size, 2 if ranks.size % 2 == 0 else 1)
    rules: dict[str, Rule] = {
        name: RULES[rule](argument, ranks.size) for name, (rule, argument) in plan.items()
    }
    whole = source(plan, seed).to(ranks.device)
    sharding = construct_module_plan(whole, rules, world)
    return ShardedEmbeddingBagCollection(whole, sharding, ranks, gradients=GradientReduction.SUM)


def batch(ranks: RankGroup, plan: Plan, step: int) -> KeyedJaggedTensor:
    """This rank's part of batch `step`, which is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    bounds = [BATCH * r // ranks.size for r in range(ranks.size + 1)]
    start, end = bounds[ranks.rank], bounds[ranks.rank + 1]
    lengths, ids = [], []
    for name in CONFIGS:
        counts = torch.randint(0, 4, (BATCH,), generator=generator)
        is_dynamic = isinstance(CONFIGS[name].storage, Hash)
        rows = 1 << 40 if is_dynamic else CONFIGS[name].num_embeddings
        values = torch.randint(rows, (int(counts.sum()),), generator=generator)
        if is_dynamic:
            values = torch.where(values % 2 == 0, values % 50, values)
        if name in plan:
            lengths.append(counts[start:end])
            ids.append(values[int(counts[:start].sum()) : int(counts[:end].sum())])
    features = [CONFIGS[name].feature_names[0] for name in plan]
    made = KeyedJaggedTensor(features, torch.cat(ids), lengths=torch.cat(lengths))
    return made.to(ranks.device)


def train(model: Any, plan: Plan, steps: Sequence[int], ranks: RankGroup) -> None:
    for step in steps:
        out = model(batch(ranks, plan, step)).values()
        weights = torch.linspace(0.5, 1.5, out.shape[1], device=out.device)
        (out * weights).pow(2).sum().backward()


def state_of(model: ShardedEmbeddingBagCollection) -> dict[str, Any]:
    return {"model": model, "optimizer": FusedOptimizer.of(model)}


def whole(model: ShardedEmbeddingBagCollection) -> dict[str, Any]:
    """All of it on rank 0."""
    state = {"model": model.state_dict(), "optimizer": FusedOptimizer.of(model).state_dict()}
    result = gather_state(state)
    return result if model.ranks.rank == 0 else {}


def train_and_save(
    ranks: RankGroup, plan: Plan, path: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole state when it was saved after three steps, and after two more."""
    model = make(ranks, plan)
    train(model, plan, range(3), ranks)
    checkpoints.save(state_of(model), path, ranks)
    saved = whole(model)
    train(model, plan, range(3, 5), ranks)
    return saved, whole(model)


def load_again(
    ranks: RankGroup, plan: Plan, path: Path, again: Path | None = None
) -> dict[str, Any]:
    """The whole state from a checkpoint, in a model that has had other values and steps.

    What was loaded is saved again to `again`.
    """
    return _load(ranks, plan, path, again)[1]


def load_and_train(
    ranks: RankGroup, plan: Plan, path: Path, again: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same, and the state after two more steps."""
    model, loaded = _load(ranks, plan, path, again)
    train(model, plan, range(3, 5), ranks)
    return loaded, whole(model)


def _load(
    ranks: RankGroup, plan: Plan, path: Path, again: Path | None
) -> tuple[ShardedEmbeddingBagCollection, dict[str, Any]]:
    model = make(ranks, plan, seed=1)
    train(model, plan, range(7, 9), ranks)
    checkpoints.load(state_of(model), path, ranks)
    loaded = whole(model)
    if again is not None:
        checkpoints.save(state_of(model), again, ranks)
    return model, loaded


def flat(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts by dotted name."""
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    return {
        name: value
        for key, item in tree.items()
        for name, value in flat(item, f"{prefix}.{key}").items()
    }


def save_export(ranks: RankGroup, plan: Plan, path: Path) -> dict[str, Any]:
    """One file of a trained model; its state on rank 0."""
    model = make(ranks, plan)
    train(model, plan, range(2), ranks)
    checkpoints.export(state_of(model), path, ranks)
    return whole(model)


def load_export(ranks: RankGroup, plan: Plan, path: Path) -> dict[str, Any]:
    """The state on rank 0 of a model that was given whole tables."""
    model = make(ranks, plan, seed=1)
    found = torch.load(path)
    model.load_state_dict(found["model"])
    FusedOptimizer.of(model).load_state_dict(found["optimizer"])
    return whole(model)


def sequences(ranks: RankGroup | None, rule: str) -> Any:
    """A collection that does not pool, over ranks or in one process."""
    configs = [
        EmbeddingConfig(19, 8, "wide", ["f0"], optimizer=optim.RowwiseAdagrad(0.1)),
        EmbeddingConfig(23, 4, "narrow", ["f1"], optimizer=optim.Adam(0.1)),
    ]
    torch.manual_seed(0 if ranks is None else 1)
    collection = EmbeddingCollection(configs)
    if ranks is None:
        return collection
    collection = collection.to(ranks.device)
    rules = {name: RULES[rule](None, ranks.size) for name in ("wide", "narrow")}
    plan = construct_module_plan(collection, rules, World(ranks.size, ranks.size))
    return ShardedEmbeddingCollection(collection, plan, ranks)


def load_sequences(ranks: RankGroup, rule: str, path: Path, again: Path) -> dict[str, Any]:
    """The state on rank 0 of what was loaded, which is saved again."""
    model = sequences(ranks, rule)
    checkpoints.load(state_of(model), path, ranks)
    checkpoints.save(state_of(model), again, ranks)
    return whole(model)
