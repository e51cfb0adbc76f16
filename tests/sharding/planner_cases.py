"""Problems for the planner: random tables, and what a sharded step really allocates."""

import random
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from emblib import optim
from emblib.collections import EmbeddingBagCollection, EmbeddingCollection
from emblib.collections.configs import EmbeddingBagConfig, EmbeddingConfig
from emblib.collections.groups import TableGroups
from emblib.sharding.layout import shape_of
from emblib.sharding.plan import ShardingPlan, plan_from_shapes
from emblib.sharding.planner import Planner, Reservation, TableConstraints, TableWorkload, Topology
from emblib.sharding.planner.simulate import draw_batch
from emblib.sharding.planner.workloads import workloads_of
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import (
    Rule,
    World,
    column_wise,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)

MB = 1 << 20
OPTIMIZERS = (optim.SGD(lr=0.1), optim.Adam(lr=0.1), optim.RowwiseAdagrad(lr=0.1))


def planner_of(topology: Topology, max_trials: int = 1500) -> Planner:
    """A planner that reserves nothing and tries less than it could."""
    return Planner(topology, 256, reservation=Reservation(share=0.0), max_trials=max_trials)


def random_works(seed: int, count: int, batch: int = 256) -> list[TableWorkload]:
    """Tables of 100 to a million rows, looked up once or often."""
    chance = random.Random(seed)
    works = []
    for t in range(count):
        config = EmbeddingBagConfig(
            int(10 ** chance.uniform(2, 6)), chance.choice([8, 16, 32, 64, 128]), f"t{t}"
        )
        ids = chance.choice([0.5, 1.0, 1.0, 3.0, 20.0])
        works.append(TableWorkload("", config, chance.choice(OPTIMIZERS), False, batch, ids))
    return works


def rules(world: int, tables: int, way: str) -> list[Rule]:
    """A rule for each table, by the name of the way."""
    of: dict[str, Any] = {
        "table_wise": lambda t: table_wise(t % world),
        "on_rank_0": lambda t: table_wise(0),
        "row_wise": lambda t: row_wise(),
        "column_wise": lambda t: column_wise(),
        "data_parallel": lambda t: data_parallel(),
        "table_row_wise": lambda t: table_row_wise(t % max(world // 2, 1)),
        "mixed": lambda t: [table_wise(t % world), row_wise(), column_wise()][t % 3],
    }
    return [of[way](t) for t in range(tables)]


def collection(tables: int, rows: int, dim: int, kind: str) -> Any:
    """Equal tables t0, t1, ... of a kind: "pooled", "weighted" (pooled too) or "sequences"."""
    optimizer = optim.RowwiseAdagrad(lr=0.01)
    if kind != "sequences":
        configs = [EmbeddingBagConfig(rows, dim, f"t{t}") for t in range(tables)]
        is_weighted = kind == "weighted"
        return EmbeddingBagCollection(configs, is_weighted=is_weighted, optimizer=optimizer)
    sequences = [EmbeddingConfig(rows, dim, f"t{t}") for t in range(tables)]
    return EmbeddingCollection(sequences, optimizer=optimizer)


def plan_of(module: Any, world: int, way: str, local_size: int | None = None) -> ShardingPlan:
    """All tables of a collection spread in one way."""
    configs = module.configs
    shapes = {config.name: shape_of(config) for config in configs}
    chosen = dict(zip(shapes, rules(world, len(configs), way), strict=True))
    size = World(world, local_size or world)
    return ShardingPlan({"": plan_from_shapes(shapes, chosen, size)}, size)


def step_bytes(
    ranks: RankGroup, way: str, pooling_factor: float, dim: int, kind: str, local_size: int = 0
) -> tuple[int, float]:
    """Most bytes that are there at a time in a step, tables and batch included; and predicted."""
    tables, batch, pooled = 6, 512, kind != "sequences"
    module = collection(tables, 2000, dim, kind)
    constraints = {f"t{t}": TableConstraints(pooling_factor=pooling_factor) for t in range(tables)}
    if local_size:
        ranks = RankGroup(ranks.group, local_size=local_size, device=ranks.device)
    topology = Topology(ranks.size, ranks.local_size, memory=1 << 33)
    planner = Planner(topology, batch, constraints, reservation=Reservation(share=0.0))
    plan = plan_of(module, ranks.size, way, ranks.local_size)
    kjt = draw_batch(workloads_of(module, batch, constraints), ranks.rank)
    sharded = _sharded(module, plan, ranks, pooled=pooled)
    gradients = [torch.ones_like(out) for out in _tensors(sharded(kjt))]
    torch.autograd.backward(_tensors(sharded(kjt)), gradients)
    given = [kjt.values(), kjt.lengths(), *gradients]
    given += [kjt.weights()] if kind == "weighted" else []
    measured = _most_bytes(lambda: _tensors(sharded(kjt)), gradients)
    whole = held_bytes(sharded) + measured + sum(t.nbytes for t in given)
    return whole, planner.predict(module, plan).ranks[ranks.rank].nbytes.device


def _sharded(module: Any, plan: ShardingPlan, ranks: RankGroup, *, pooled: bool) -> Any:
    from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
    from emblib.sharding.sharded_sequences import ShardedEmbeddingCollection

    kind: Any = ShardedEmbeddingBagCollection if pooled else ShardedEmbeddingCollection
    return kind(module, plan[""], ranks)


def _tensors(result: Any) -> list[torch.Tensor]:
    if hasattr(result, "length_per_key"):
        return [result.values()]
    return [jagged.values() for jagged in result.values()]


def _most_bytes(forward: Any, gradients: list[torch.Tensor]) -> int:
    """Measure a step whose memory all came back: the profiler misses what gloo's threads free.

    Every rank makes as many steps, whatever its profiler missed.
    """
    steps = [_profiled(forward, gradients) for _ in range(8)]
    # gloo's threads free the small headers of exchanges, and sometimes a message, unseen.
    complete = [most for most, left in steps if abs(left) <= most // 100]
    assert complete, "no profile was complete"
    return max(complete)


def _profiled(forward: Any, gradients: list[torch.Tensor]) -> tuple[int, int]:
    """Most bytes at a time in one step, and those that were left."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        outputs = forward()
        torch.autograd.backward(outputs, gradients)
        del outputs
        time.sleep(0.02)  # until gloo's threads have freed what they sent
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most, now


def held_bytes(sharded: Any) -> int:
    """Memory of a sharded collection's tables."""
    groups = [module for module in sharded.modules() if isinstance(module, TableGroups)]
    return sum(allocated(table_module) for group in groups for table_module in group._table_modules)


def allocated(module: Any) -> int:
    """Bytes of all memory that a module of tables has: in tensors, in host memory, in files."""
    tensors = [*module.parameters(), *module.buffers()]
    memory = getattr(module, "_memory", None)
    if memory is not None:
        cpu = torch.device("cpu")
        tensors += [t for tier in (1, 2) for t in memory._tensors_of_tier(tier, cpu) if t.numel()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
