"""The trainers of sharded change logs: functions that ranks run."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import emblib
from emblib import optim
from emblib.online import ChangeLog, DirectorySink, LogError, LogFollower
from emblib.sharding import (
    RankGroup,
    ReplicatedModelParallel,
    column_wise,
    data_parallel,
    row_wise,
    shard,
    table_wise,
)
from emblib.storage import Hash

RULES = {
    "rows": row_wise(),
    "columns": column_wise(),
    "table": table_wise(1),
    "copies": data_parallel(),
    "any_key": row_wise(),
}
STEPS, ROWS = 9, 24


def collection() -> emblib.EmbeddingBagCollection:
    """One table per kind of sharding."""
    tables = [
        emblib.EmbeddingBagConfig(
            512 if name == "any_key" else ROWS,
            8,
            name,
            [name],
            storage=Hash(seed=3) if name == "any_key" else emblib.storage.Dense(),
        )
        for name in RULES
    ]
    return emblib.EmbeddingBagCollection(tables, optimizer=optim.Adagrad(0.1))


def batch(seed: int) -> emblib.KeyedJaggedTensor:
    """Bags of all features."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4 * len(RULES),), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return emblib.KeyedJaggedTensor(list(RULES), ids, lengths=lengths)


def everything() -> emblib.KeyedJaggedTensor:
    """Each row of each table alone."""
    ids = torch.arange(ROWS).repeat(len(RULES))
    return emblib.KeyedJaggedTensor(list(RULES), ids, lengths=torch.ones_like(ids))


def fallback_collection() -> emblib.EmbeddingBagCollection:
    """One table that admits no key, so all keys read and train fallback rows."""
    storage = Hash(
        seed=3,
        fallback_rows=8,
        admission=emblib.FrequencyAdmission(1_000, emblib.ExactCounter(64)),
    )
    table = emblib.EmbeddingBagConfig(64, 8, "item", ["item"], storage=storage)
    return emblib.EmbeddingBagCollection([table], optimizer=optim.Adagrad(0.1))


def each_id() -> emblib.KeyedJaggedTensor:
    """Ids of the one feature of `fallback_collection`, each in a bag of its own."""
    ids = torch.arange(ROWS)
    return emblib.KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))


def train_fallback(ranks: RankGroup, directory: str) -> torch.Tensor:
    """Train and log the fallback rows of a sharded table; return what all ids read."""
    torch.manual_seed(0)
    model: Any = shard(fallback_collection(), {"": {"item": row_wise()}}, ranks)
    with ChangeLog(model, DirectorySink(f"{directory}/{ranks.rank}"), compact_every=1) as log:
        for step in (1, 2):
            model(each_id()).values().square().sum().backward()
            log.record(step)
    with torch.no_grad():
        values: torch.Tensor = model(each_id()).values()
    return values


def train(
    ranks: RankGroup, directory: str, missing: Sequence[int], compact_every: int
) -> list[torch.Tensor]:
    """Train and log on each rank; return what all rows read after each step."""
    torch.manual_seed(0)
    model: Any = shard(collection(), {"": dict(RULES)}, ranks)
    log = ChangeLog(model, DirectorySink(f"{directory}/{ranks.rank}"), compact_every=compact_every)
    outputs = []
    for step in range(1, STEPS + 1):
        model(batch(10 * step + ranks.rank)).values().square().sum().backward()
        if step not in missing or ranks.rank == 0:
            log.record(step)
        with torch.no_grad():
            outputs.append(model(everything()).values())
    log.close()
    with pytest.raises(TypeError, match="give it the unsharded model"):
        LogFollower(model, DirectorySink(directory))
    return outputs


def begin_at_other_steps(ranks: RankGroup, directory: str) -> None:
    """Try to log from another step on each rank, and into a sink that one rank cannot read."""
    model = shard(collection(), {"": dict(RULES)}, ranks)
    sink = DirectorySink(f"{directory}/{ranks.rank}")
    with pytest.raises(ValueError, match=r"the change log: step is 0 on rank 0 and 1 on rank 1"):
        ChangeLog(model, sink, step=ranks.rank)
    if ranks.rank == 1:
        sink.append(b"x" * 100)
        sink.close()
    with pytest.raises((LogError, RuntimeError), match="is damaged"):
        ChangeLog(model, sink)


def log_replicas(ranks: RankGroup, directory: str) -> None:
    """Try to log replicas that are averaged now and then."""
    names = ("replicas", "shards")
    mesh = torch.distributed.init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=names)
    tables = [emblib.EmbeddingBagConfig(ROWS, 8, "item", ["f"])]
    bags = emblib.EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1))
    model = ReplicatedModelParallel(
        nn.ModuleDict({"bags": bags}), mesh, plan={"bags": {"item": row_wise()}}
    )
    with pytest.raises(TypeError, match="averages its replicas"):
        ChangeLog(model, DirectorySink(directory))
