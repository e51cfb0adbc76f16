"""Cells of collections that are spread over ranks: one for each world and way of scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from experiments.config.schema import Config, Scaling, ShardingConfig
from experiments.contenders import registry

if TYPE_CHECKING:
    from experiments.config.sweep import Cell


def over_ranks(cell: Cell, asked: ShardingConfig, config: Config) -> Iterator[Cell]:
    """The cell in each world; alone both ways of scaling are one, and so are equal batches.

    Contenders that know no ranks are left out of the worlds of several, and the other way round.
    """
    most = config.timing.max_ranks or max(asked.worlds)
    seen = set()
    for ranks in sorted({min(world, most) for world in asked.worlds}):
        for scaling in asked.scaling[:1] if ranks == 1 else asked.scaling:
            size = cell.workload.B
            batch = max(1, size // ranks) if scaling is Scaling.strong else size
            if (ranks, batch) in seen:
                continue
            seen.add((ranks, batch))
            arms = tuple(a for a in cell.arms if registry.fits(a.contender, ranks))
            workload = dataclasses.replace(cell.workload, B=batch)
            if arms:
                yield dataclasses.replace(
                    cell,
                    arms=arms,
                    workload=workload,
                    ranks=ranks,
                    scaling=scaling,
                    title=f"{cell.title}, {words(ranks, scaling, asked.scaling)}",
                )


def words(ranks: int, scaling: Scaling, asked: Iterable[Scaling]) -> str:
    """The world as people call it; how it was scaled where that is a question."""
    world = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{world}, {scaling.value}" if ranks > 1 and len(list(asked)) > 1 else world
