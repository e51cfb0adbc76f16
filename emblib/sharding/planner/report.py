"""A prediction as tables that people read."""

from collections.abc import Sequence

from emblib.sharding.plan import ranges
from emblib.sharding.planner.errors import size
from emblib.sharding.planner.estimate import PHASES
from emblib.sharding.planner.predict import Prediction, TablePrediction
from emblib.sharding.planner.topology import Need

_MOST_TABLES = 40
_MOST_RANKS = 16


def report(prediction: Prediction) -> str:
    """The plan, table by table and rank by rank, and what limits it."""
    world = prediction.plan.world
    nodes = -(-world.size // world.local_size)
    lines = [
        f"{_count(len(prediction.tables), 'table')} on {_count(world.size, 'rank')} "
        f"({_count(nodes, 'node')} of {world.local_size}); predicted step "
        f"{_ms(prediction.step_s)} ms, dense part apart",
        "",
        *_grid(_table_rows(prediction.tables)),
        "",
        *_grid(_rank_rows(prediction)),
        "",
        *_phases(prediction),
        f"Constants: {prediction.source}.",
    ]
    return "\n".join(lines)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side, the first two to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    told = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        told.append("  ".join(cells).rstrip())
        if number == 0:
            told.append("  ".join("-" * w for w in widths))
    return told


def _table_rows(tables: Sequence[TablePrediction]) -> list[list[str]]:
    rows = [["table", "sharding", "ranks", "rows", "dim", "ids/example", "memory", "ms"]]
    slowest = sorted(tables, key=lambda table: -table.step_s)[:_MOST_TABLES]
    shown = (
        [table for table in tables if table in slowest] if len(tables) > _MOST_TABLES else tables
    )
    for table in shown:
        config, sharding = table.work.config, table.sharding
        kind = "" if sharding.kind is None else f" as {type(sharding.kind).__name__}"
        rows.append(
            [
                table.work.name,
                sharding.type.value + kind,
                ranges(sharding.ranks, most=4) if sharding.boxes else "all",
                f"{config.num_embeddings:,}",
                str(config.embedding_dim),
                f"{table.work.ids:g}",
                size(table.nbytes.device + table.nbytes.host + table.nbytes.disk),
                _ms(table.step_s),
            ]
        )
    if len(shown) < len(tables):
        rows.append([f"... {len(tables) - len(shown)} faster ones", *[""] * 7])
    return rows


def _rank_rows(prediction: Prediction) -> list[list[str]]:
    used = [i for i in (2, 3) if any(rank.nbytes[i] for rank in prediction.ranks)]
    heads = ["rank", "tables", "memory", "of", *(Need._fields[i] for i in used)]
    rows = [[*heads, *(f"{name} ms" for name in PHASES)]]
    order = list(range(len(prediction.ranks)))
    if len(order) > _MOST_RANKS:
        order.sort(key=lambda r: -sum(prediction.ranks[r].seconds))
        order = sorted(order[:_MOST_RANKS])
    for r in order:
        rank = prediction.ranks[r]
        far = [size(rank.nbytes[i]) for i in used]
        rows.append(
            [
                *(str(r), str(rank.tables), size(rank.nbytes.device), size(rank.room.device)),
                *far,
                *map(_ms, rank.seconds),
            ]
        )
    left = len(prediction.ranks) - len(order)
    if left:
        rows.append([f"... {left} faster ones", *[""] * (len(rows[0]) - 1)])
    return rows


def _phases(prediction: Prediction) -> list[str]:
    told = ", ".join(f"{name} {_ms(s)}" for name, s in prediction.phases.items())
    longest = max(prediction.phases, key=prediction.phases.__getitem__)
    lines = [f"Phases, ms: {told}."]
    if longest in PHASES:
        number = PHASES.index(longest)
        slowest = max(
            range(len(prediction.ranks)), key=lambda r: prediction.ranks[r].seconds[number]
        )
        lines.append(f"Longest: {longest}, where rank {slowest} is the slowest.")
    else:
        lines.append(f"Longest: {longest}, on all ranks alike.")
    fullest = max(
        range(len(prediction.ranks)),
        key=lambda r: prediction.ranks[r].nbytes.device / max(prediction.ranks[r].room.device, 1.0),
    )
    rank = prediction.ranks[fullest]
    share = rank.nbytes.device / max(rank.room.device, 1.0)
    lines.append(
        f"Fullest: rank {fullest}, {share:.0%} of {size(rank.room.device)} after the reservation."
    )
    if not prediction.fits:
        lines.append("The plan does NOT fit.")
    return lines
