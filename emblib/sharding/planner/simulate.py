"""Predict steps of larger and smaller clusters, and compare predictions with measurements.

The constants come from `Topology.calibration`. For other world sizes than the calibrated one it is
assumed that the latency of an exchange grows with the number of ranks, and that the bandwidth per
rank stays the same.
"""

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.jagged import KeyedJaggedTensor
from emblib.optim import Optimizer
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.planner.planner import Planner
from emblib.sharding.planner.report import Prediction
from emblib.sharding.planner.workloads import TableConstraints, TableWorkload, workloads_of
from emblib.sharding.ranks import RankGroup
from emblib.sharding.shard import shard
from emblib.sharding.sharding_types import ShardingType
from emblib.specs import OptionEnum, check_count


class Scaling(OptionEnum):
    """Quantity that stays constant as ranks are added.

    It is the batch of all ranks together (STRONG) or the batch per rank (WEAK).
    """

    STRONG = "strong"
    WEAK = "weak"


class SimulatedWorld(NamedTuple):
    """A predicted world: number of ranks, examples per rank, and the prediction of a step."""

    world_size: int
    batch_size: int
    prediction: Prediction

    @property
    def examples_per_s(self) -> float:
        """Return the examples of all ranks per second, for steps without the dense part."""
        return self.world_size * self.batch_size / self.prediction.step_s


def simulate(
    planner: Planner,
    module: nn.Module,
    world_sizes: Sequence[int],
    *,
    scaling: Scaling = Scaling.WEAK,
    sharding: ShardingType | None = None,
    optimizer: Optimizer | None = None,
) -> list[SimulatedWorld]:
    """Predict steps of a model in other worlds of the same machines.

    Each world is planned separately. The arguments are not changed.

    Args:
        planner: planner of the measured world, whose settings are used.
        module: model to plan.
        world_sizes: numbers of ranks, one per prediction.
        scaling: quantity that stays constant: WEAK keeps the examples per rank, STRONG those of all
            ranks; so for tables with a `batch_size` of their own too.
        sharding: sharding type of all tables; None lets the planner choose. CUSTOM is refused.
        optimizer: optimizer of tables whose configuration has none, as for `Planner.plan`.

    Raises:
        TypeError: see `Planner.plan`.
        ValueError: ranks do not fill whole nodes; with STRONG, they do not divide a batch; a table
            cannot have the type `sharding`; or see `Planner.plan`.
        PlanError: the tables do not fit.
    """
    return [
        _simulate_world(planner, module, world_size, Scaling(scaling), sharding, optimizer)
        for world_size in world_sizes
    ]


def _simulate_world(
    planner: Planner,
    module: nn.Module,
    world_size: int,
    scaling: Scaling,
    sharding: ShardingType | None,
    optimizer: Optimizer | None,
) -> SimulatedWorld:
    """Plan the model for one world size, and return the prediction; arguments as `simulate`."""
    topology = planner.topology.of_size(world_size)
    batch_size, constraints = planner.batch_size, dict(planner.constraints)
    if scaling is Scaling.STRONG:
        measured_size = planner.topology.world_size
        batch_size = _divide_batch(batch_size, measured_size, world_size)
        for name, constraint in constraints.items():
            if constraint.batch_size is not None:
                table_batch_size = _divide_batch(constraint.batch_size, measured_size, world_size)
                constraints[name] = replace(constraint, batch_size=table_batch_size)
    if sharding is not None:
        for workload in workloads_of(module, batch_size, constraints):
            for reader in workload.by_reader:
                old_constraint = constraints.get(reader.name, constraints.get(reader.config.name))
                constraints[reader.name] = replace(
                    old_constraint or TableConstraints(), sharding_types=(sharding,)
                )
    planner_of_size = Planner(
        topology,
        batch_size,
        constraints,
        reservation=planner.reservation,
        comm_precision=planner.comm_precision,
        max_trials=planner.max_trials,
    )
    return SimulatedWorld(
        world_size, batch_size, planner_of_size.solve(module, optimizer=optimizer)
    )


def _divide_batch(batch_size: int, old_size: int, new_size: int) -> int:
    """Return the examples per rank of `new_size` ranks, if `old_size` ranks have `batch_size` each.

    Raises:
        ValueError: the ranks do not divide the global batch.
    """
    global_batch = batch_size * old_size
    if global_batch % new_size:
        raise ValueError(
            f"the number of ranks must divide the global batch = {global_batch}, got {new_size}; "
            "choose another, or Scaling.WEAK"
        )
    return global_batch // new_size


def format_simulated(simulated: Sequence[SimulatedWorld]) -> str:
    """Format predicted worlds as a table with one line per world."""
    rows = [("ranks", "examples/rank", "step ms", "exchange ms", "examples/s")]
    for simulated_world in simulated:
        rows.append(
            (
                str(simulated_world.world_size),
                str(simulated_world.batch_size),
                f"{simulated_world.prediction.step_s * 1e3:.3f}",
                f"{simulated_world.prediction.exchange_s * 1e3:.3f}",
                f"{simulated_world.examples_per_s:,.0f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join([*lines, "Predicted, not measured."])


_WARM_UP_ROUNDS = 2


class PlanTiming(NamedTuple):
    """A plan's predicted seconds per step, and the measured seconds of one step in each round."""

    name: str
    predicted_s: float
    seconds_per_round: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        """Return the minimum over rounds, to exclude other load on the machine."""
        return min(self.seconds_per_round)


def compare(
    planner: Planner,
    module: nn.Module,
    plans: Mapping[str, ShardingPlan],
    ranks: RankGroup,
    *,
    rounds: int = 30,
    seed: int = 0,
) -> list[PlanTiming]:
    """Measure steps of a model's collections under plans, and predict them.

    A collective: all ranks call it with the same arguments, and get the same results. It copies and
    shards `module` once per plan, and keeps all copies until it returns. A step looks up one batch
    of random ids in every collection and runs backward; the dense part of the model does not run.

    Args:
        planner: planner with the constants of this machine.
        module: model whose collections are measured, with their own optimizers; not changed.
        plans: plans by name; the results have these names.
        ranks: the ranks that measure.
        rounds: number of measured rounds, after two rounds of warm-up; each round runs one step
            of every plan in turn.
        seed: seed of the ids; each rank adds its rank number.

    Raises:
        TypeError: `rounds` is not an int, or a plan is not a `ShardingPlan`.
        ValueError: `rounds` is below 1, a plan does not fit the model (see `shard`), or `ranks` are
            not the world of the planner.
    """
    check_count("rounds", rounds)
    predicted = {name: planner.predict(module, plan).step_s for name, plan in plans.items()}
    steps_by_plan = {}
    for name, plan in plans.items():
        steps_by_plan[name] = _prepare_steps(planner, module, plan, ranks, seed)
    seconds_by_plan: dict[str, list[float]] = {name: [] for name in plans}
    for round_number in range(_WARM_UP_ROUNDS + rounds):
        for name, collection_steps in steps_by_plan.items():
            seconds = _time_step(collection_steps, ranks)
            if round_number >= _WARM_UP_ROUNDS:
                seconds_by_plan[name].append(seconds)
    return [
        PlanTiming(name, predicted[name], tuple(seconds))
        for name, seconds in seconds_by_plan.items()
    ]


def rank_correlation(timings: Sequence[PlanTiming]) -> float:
    """Return Spearman's rank correlation of predicted with measured seconds, -1 to 1.

    Raises:
        statistics.StatisticsError: there are fewer than two timings, or all predictions or all
            measurements are equal.
    """
    predicted_ranks = _mean_ranks([timing.predicted_s for timing in timings])
    measured_ranks = _mean_ranks([timing.measured_s for timing in timings])
    return statistics.correlation(predicted_ranks, measured_ranks)


def draw_batch(workloads: Sequence[TableWorkload], seed: int) -> KeyedJaggedTensor:
    """Draw a batch of uniform ids for the tables of one collection, sized by their workloads.

    There must be at least one workload. The tensors are on the CPU: int64 ids and lengths, float32
    weights. A feature of several tables gets ids that are valid in all of them. Weights are ones;
    the batch has none if no workload is weighted. The batch has as many examples as the largest
    workload; in features of smaller ones several examples share a bag, by `inverse_indices`.
    """
    generator = torch.Generator().manual_seed(seed)
    min_rows_by_key: dict[str, int] = {}  # of the tables that a feature reads
    for workload in workloads:
        for key in workload.config.feature_names:
            num_rows = workload.config.num_embeddings
            min_rows_by_key[key] = min(min_rows_by_key.get(key, num_rows), num_rows)
    keys, values, lengths = [], [], []
    for workload in workloads:
        ids_per_feature = workload.ids_per_example / workload.num_features
        for key in workload.config.feature_names:
            if key in keys:
                continue  # drawn for another of its tables
            length = _draw_lengths(ids_per_feature, workload.batch_size, generator)
            keys.append(key)
            lengths.append(length)
            shape = (int(length.sum()),)
            values.append(
                torch.randint(min_rows_by_key[key], shape, generator=generator, device="cpu")
            )
    ids = torch.cat(values)
    weights = None
    if any(workload.is_weighted for workload in workloads):
        weights = torch.ones(ids.numel(), dtype=torch.float32, device="cpu")
    sizes = [length.numel() for length in lengths]
    if len(set(sizes)) <= 1:
        return KeyedJaggedTensor(keys, ids, weights, lengths=torch.cat(lengths))
    bags = torch.stack([torch.arange(max(sizes), device="cpu") % size for size in sizes])
    return KeyedJaggedTensor(
        keys,
        ids,
        weights,
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(keys, bags),
    )


def _draw_lengths(mean: float, batch_size: int, generator: torch.Generator) -> Tensor:
    """Return int64 bag lengths whose expected value is `mean`: its floor, or one more."""
    floor = int(mean)
    has_one_more = torch.rand(batch_size, generator=generator, device="cpu") < mean - floor
    return floor + has_one_more.long()


class _CollectionStep(NamedTuple):
    """The part of a step for one sharded collection: its batch, and gradients of its outputs."""

    collection: Any
    batch: KeyedJaggedTensor
    gradients: list[Tensor]


def _prepare_steps(
    planner: Planner, module: nn.Module, plan: ShardingPlan, ranks: RankGroup, seed: int
) -> list[_CollectionStep]:
    """Shard a copy of the model; draw a batch and gradients for each of its collections."""
    table_workloads = workloads_of(module, planner.batch_size, planner.constraints)
    workloads = [reader for workload in table_workloads for reader in workload.by_reader]
    sharded_model = shard(copy.deepcopy(module), plan, ranks)
    steps = []
    for path in dict.fromkeys(workload.path for workload in workloads):
        collection_tables = [workload for workload in workloads if workload.path == path]
        collection = sharded_model.get_submodule(path)
        batch = draw_batch(collection_tables, seed + ranks.rank).to(ranks.device)
        gradients = [
            torch.ones_like(output) * 1e-3 for output in _output_tensors(collection(batch))
        ]
        steps.append(_CollectionStep(collection, batch, gradients))
    return steps


def _output_tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a KeyedTensor, or of a dict of JaggedTensors."""
    if hasattr(result, "length_per_key"):
        return [result.values()]
    return [jagged.values() for jagged in result.values()]


def _time_step(steps: Sequence[_CollectionStep], ranks: RankGroup) -> float:
    """Run one step, and return its seconds on the slowest rank.

    A collective. Backward may update the tables.
    """
    ranks.barrier()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    start = time.perf_counter()
    outputs = [output for step in steps for output in _output_tensors(step.collection(step.batch))]
    torch.autograd.backward(outputs, [gradient for step in steps for gradient in step.gradients])
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    seconds = time.perf_counter() - start
    return max(ranks.gather_objects(seconds))


def _mean_ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 0; equal values get the mean of their ranks."""
    sorted_values = sorted(values)
    return [sorted_values.index(value) + (sorted_values.count(value) - 1) / 2 for value in values]
