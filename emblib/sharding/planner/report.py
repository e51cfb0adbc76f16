"""Predict the seconds and bytes of a step under a plan, and format the prediction as a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from emblib.sharding.plan import ShardingPlan, format_ranks
from emblib.sharding.planner.enumerate import Domain, Option, ShardCosts, build_option
from emblib.sharding.planner.estimate import PHASES, CostModel
from emblib.sharding.planner.feasible import format_bytes
from emblib.sharding.planner.search import PlacedOption, RankCosts
from emblib.sharding.planner.topology import MemoryNeed
from emblib.sharding.planner.workloads import TableWorkload, any_is_weighted
from emblib.sharding.sharding_types import ParameterSharding, ShardingType
from emblib.storage import MemoryBytes


class RankPrediction(NamedTuple):
    """One rank of a predicted step.

    Attributes:
        seconds: seconds by phase, in the order of `PHASES`, with the work that all ranks do.
        nbytes: bytes that the tables and batches need.
        free_memory: bytes for tables and batches, after the reservation.
        num_tables: number of tables of which the rank stores a shard or a replica.
    """

    seconds: tuple[float, ...]
    nbytes: MemoryNeed
    free_memory: MemoryBytes
    num_tables: int


class TablePrediction(NamedTuple):
    """One table of a predicted step.

    Attributes:
        workload: the table and its lookups.
        sharding: sharding of the table in the plan.
        nbytes: bytes on all ranks together.
        step_s: seconds on the rank that it costs most.
    """

    workload: TableWorkload
    sharding: ParameterSharding
    nbytes: MemoryNeed
    step_s: float


@dataclass(frozen=True)
class Prediction:
    """The predicted step under a plan; `str()` formats it as a report.

    Attributes:
        plan: the plan.
        phases: seconds by name, which add up to `step_s`. Each of `PHASES` lasts until the slowest
            rank is done. In "arrange" every rank orders ids and rows, whatever shards it has.
            "overhead" is the time that does not depend on the batch.
        ranks: prediction of each rank.
        tables: prediction of each table, in the order of the workloads.
        source: origin of the constants.
    """

    plan: ShardingPlan
    phases: dict[str, float]
    ranks: tuple[RankPrediction, ...]
    tables: tuple[TablePrediction, ...]
    source: str

    @property
    def step_s(self) -> float:
        """Return the seconds of a step: lookups, exchanges and updates, without the dense part."""
        return sum(self.phases.values())

    @property
    def compute_s(self) -> float:
        """Return the seconds in which ranks look up and update rows, and order ids and rows."""
        return self.step_s - self.exchange_s - self.phases["overhead"]

    @property
    def exchange_s(self) -> float:
        """Return the seconds in which ranks send data, without the overhead of empty messages."""
        return self.phases["input"] + self.phases["output"]

    @property
    def fits(self) -> bool:
        """Return whether every rank has enough memory."""
        return all(
            needed_nbytes <= free_nbytes or not needed_nbytes
            for rank in self.ranks
            for needed_nbytes, free_nbytes in zip(
                (rank.nbytes.device, *rank.nbytes[2:]), rank.free_memory, strict=True
            )
        )

    def __str__(self) -> str:
        return report(self)


def option_with(workload: TableWorkload, sharding: ParameterSharding, model: CostModel) -> Option:
    """Return the option whose shards are those of a sharding, which may be any tiling."""
    shard_costs = ShardCosts(workload, model, sharding.storage)
    if sharding.is_replicated:
        return Option(
            ShardingType.DATA_PARALLEL, sharding.storage, (), shard_costs.replicated_cost()
        )
    return build_option(shard_costs, sharding.type, sharding.shards, Domain.WORLD, 0)


def predict(
    workloads: Sequence[TableWorkload],
    plan: ShardingPlan,
    model: CostModel,
    free_memory: Sequence[MemoryBytes],
) -> Prediction:
    """Predict a step under a plan, whether or not it fits.

    Args:
        workloads: the tables and their lookups.
        plan: the sharding of each table; other tables in it are ignored.
        model: cost model for the workloads and a topology.
        free_memory: memory for tables and batches, by rank.

    Raises:
        ValueError: the plan is for another world, or lacks a table.
    """
    if plan.world != model.topology.world:
        raise ValueError(
            f"the plan is for {plan.world}, the topology has {model.topology.world}: plan again"
        )
    rank_costs = RankCosts(model, free_memory, is_weighted=any_is_weighted(workloads))
    tables = []
    for workload in workloads:
        sharding = plan.modules.get(workload.path, {}).get(workload.config.name)
        if sharding is None:
            raise ValueError(f"the plan has no table {workload.name}")
        option = option_with(workload, sharding, model)
        rank_costs.add(PlacedOption(option, (0,) * len(option.groups)))
        tables.append(_predict_table(workload, sharding, option, model.topology.world_size))
    return _prediction(plan, rank_costs, tuple(tables), model)


def _predict_table(
    workload: TableWorkload, sharding: ParameterSharding, option: Option, world_size: int
) -> TablePrediction:
    """Predict the bytes and seconds of one table."""
    loads = (load for group in option.groups for load in group.loads)
    # Loads of the domain WORLD are differences from the common cost, and may be negative.
    groups_s = max((sum(load.seconds) for load in loads), default=0.0)
    common_s = sum(option.common_cost.seconds) + option.common_cost.arrange_s
    step_s = max(groups_s, 0.0) + common_s
    return TablePrediction(workload, sharding, option.nbytes(world_size), step_s)


def _prediction(
    plan: ShardingPlan, rank_costs: RankCosts, tables: tuple[TablePrediction, ...], model: CostModel
) -> Prediction:
    """Return the prediction of a plan from the costs of all ranks."""
    topology = model.topology
    # Ranks that share a core do the work of every rank one after the other.
    ranks_per_core = topology.local_world_size / topology.ranks_at_once
    phases = {name: rank_costs.phase_s(phase) for phase, name in enumerate(PHASES)}
    phases["arrange"] = rank_costs.arrange_s * ranks_per_core
    phases["overhead"] = rank_costs.overhead_s
    num_tables = [0] * topology.world_size
    for table in tables:
        for rank in table.sharding.ranks or range(topology.world_size):
            num_tables[rank] += 1
    ranks = tuple(
        RankPrediction(
            tuple(
                seconds[rank] + common_s
                for seconds, common_s in zip(
                    rank_costs.seconds, rank_costs.common_seconds, strict=True
                )
            ),
            MemoryNeed(
                *(
                    shard_nbytes[rank] + common_nbytes
                    for shard_nbytes, common_nbytes in zip(
                        rank_costs.nbytes, rank_costs.common_nbytes, strict=True
                    )
                )
            ),
            MemoryBytes(*rank_costs.free_memory[rank][1:]),  # device memory is there twice
            num_tables[rank],
        )
        for rank in range(topology.world_size)
    )
    return Prediction(plan, phases, ranks, tables, topology.costs.source)


_MAX_TABLES, _MAX_RANKS = 40, 16  # rows of a report, so that it fits on a screen or two


def report(prediction: Prediction) -> str:
    """Format a prediction: lines per table and per rank, the phases, and whether the plan fits."""
    world = prediction.plan.world
    nodes = -(-world.size // world.local_size)
    lines = [
        f"{_format_count(len(prediction.tables), 'table')} on {_format_count(world.size, 'rank')} "
        f"({_format_count(nodes, 'node')} of {world.local_size}); predicted step "
        f"{_format_ms(prediction.step_s)} ms, without the dense part",
        "",
        *_format_columns(_table_rows(prediction.tables)),
        "",
        *_format_columns(_rank_rows(prediction)),
        "",
        *_describe_phases(prediction),
        f"Constants: {prediction.source}.",
    ]
    return "\n".join(lines)


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _format_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows in columns: the first two aligned left, numbers aligned right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row_number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
        if row_number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return lines


def _table_rows(tables: Sequence[TablePrediction]) -> list[list[str]]:
    """Return the header and a row of cells per table; if there are many, of the slowest only."""
    rows = [["table", "sharding", "ranks", "rows", "dim", "ids/example", "memory", "ms"]]
    slowest = sorted(tables, key=lambda table: -table.step_s)[:_MAX_TABLES]
    tables_shown = (
        [table for table in tables if table in slowest] if len(tables) > _MAX_TABLES else tables
    )
    for table in tables_shown:
        config, sharding = table.workload.config, table.sharding
        kind = "" if sharding.storage is None else f" as {type(sharding.storage).__name__}"
        rows.append(
            [
                table.workload.name,
                sharding.type.value + kind,
                format_ranks(sharding.ranks, max_ranges=4) if sharding.shards else "all",
                f"{config.num_embeddings:,}",
                str(config.embedding_dim),
                f"{sum(reader.ids_per_example for reader in table.workload.by_reader):g}",
                format_bytes(table.nbytes.device + table.nbytes.host + table.nbytes.disk),
                _format_ms(table.step_s),
            ]
        )
    if len(tables_shown) < len(tables):
        rows.append([f"... {len(tables) - len(tables_shown)} faster ones", *[""] * 7])
    return rows


def _rank_rows(prediction: Prediction) -> list[list[str]]:
    """Return the header and a row of cells per rank; if there are many, of the slowest only."""
    fields = [
        field
        for field in ("host", "disk")
        if any(getattr(rank.nbytes, field) for rank in prediction.ranks)
    ]
    first_cells = ["rank", "tables", "memory", "of", *fields]
    rows = [[*first_cells, *(f"{name} ms" for name in PHASES)]]
    ranks_shown = list(range(len(prediction.ranks)))
    if len(ranks_shown) > _MAX_RANKS:
        ranks_shown.sort(key=lambda rank: -sum(prediction.ranks[rank].seconds))
        ranks_shown = sorted(ranks_shown[:_MAX_RANKS])
    for number in ranks_shown:
        rank = prediction.ranks[number]
        host_and_disk = [format_bytes(getattr(rank.nbytes, field)) for field in fields]
        rows.append(
            [
                str(number),
                str(rank.num_tables),
                format_bytes(rank.nbytes.device),
                format_bytes(rank.free_memory.device),
                *host_and_disk,
                *map(_format_ms, rank.seconds),
            ]
        )
    num_omitted = len(prediction.ranks) - len(ranks_shown)
    if num_omitted:
        rows.append([f"... {num_omitted} faster ones", *[""] * (len(rows[0]) - 1)])
    return rows


def _describe_phases(prediction: Prediction) -> list[str]:
    """Return lines about all phases, the longest phase, and the rank with least free memory."""
    phase_times = ", ".join(
        f"{name} {_format_ms(seconds)}" for name, seconds in prediction.phases.items()
    )
    longest_phase = max(prediction.phases, key=prediction.phases.__getitem__)
    lines = [f"Phases, ms: {phase_times}."]
    if longest_phase in PHASES:
        phase_seconds = [rank.seconds[PHASES.index(longest_phase)] for rank in prediction.ranks]
        slowest_rank = phase_seconds.index(max(phase_seconds))
        lines.append(f"Longest: {longest_phase}, where rank {slowest_rank} is the slowest.")
    else:
        lines.append(f"Longest: {longest_phase}, on all ranks alike.")
    shares = [rank.nbytes.device / max(rank.free_memory.device, 1.0) for rank in prediction.ranks]
    fullest_rank = shares.index(max(shares))
    free_memory = format_bytes(prediction.ranks[fullest_rank].free_memory.device)
    lines.append(
        f"Fullest: rank {fullest_rank}, {max(shares):.0%} of {free_memory} after the reservation."
    )
    if not prediction.fits:
        lines.append("The plan does NOT fit.")
    return lines
