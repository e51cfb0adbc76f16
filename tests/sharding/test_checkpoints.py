"""Checkpoints of tables that are spread over ranks: from any shards to any."""

from pathlib import Path

import pytest

from emblib.sharding.sharding_types import (
    Shard,
    TableShape,
    World,
    column_wise,
    custom,
    grid,
    row_wise,
    table_wise,
)
from tests.sharding import checkpoint_worlds, worlds

ROWS, COLUMNS = 13, 6
UNEVEN = (
    Shard(0, (0, 1), (0, 6)),
    Shard(0, (1, 7), (0, 5)),
    Shard(0, (1, 7), (5, 6)),
    Shard(0, (7, 13), (0, 2)),
    Shard(0, (7, 13), (2, 6)),
)
RULES = {
    "table_wise": lambda world: table_wise(world - 1),
    "row_wise": lambda world: row_wise(),
    "column_wise": lambda world: column_wise(),
    "grid": lambda world: grid(),
    "uneven": lambda world: custom(
        [shard._replace(rank=i % world) for i, shard in enumerate(UNEVEN)]
    ),
}


def boxes_of(rule: str, world: int) -> tuple[Shard, ...]:
    local_size = 2 if world % 2 == 0 else 1
    sharding = RULES[rule](world)(TableShape(ROWS, COLUMNS), World(world, local_size))
    sharding.check("table", TableShape(ROWS, COLUMNS), world)
    return sharding.shards


@pytest.mark.parametrize("start", RULES)
def test_any_boxes_to_any(start: str, tmp_path: Path) -> None:
    """From 4 ranks to 1, 2 or 3 by each rule, and from 3 to 4 by one."""
    first, rules = list(RULES).index(start), list(RULES)
    loads = [(4, 1 + (first + number) % 3, end) for number, end in enumerate(rules)]
    for saving in (4, 3):
        path = tmp_path / str(saving)
        before = boxes_of(start, saving)
        worlds.run(saving, checkpoint_worlds.save, path, before, ROWS, COLUMNS)
    for saving, loading, end in (*loads, (3, 4, rules[first - 1])):
        path, after = tmp_path / str(saving), boxes_of(end, loading)
        worlds.run(loading, checkpoint_worlds.load, path, after, ROWS, COLUMNS)
