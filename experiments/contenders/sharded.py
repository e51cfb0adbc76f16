"""emblib's embedding bag collections: in one process, and over ranks by each sharding type."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig, TableGroups
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import (
    ParameterSharding,
    RankGroup,
    ShardedEmbeddingBagCollection,
    World,
    construct_module_plan,
    sharding_types,
)
from emblib.sharding.sharding_types import Rule
from experiments.config.schema import Optimizer
from experiments.contenders.base import Contender, State, Task, Unsupported, fill_, touched_ids
from experiments.contenders.tables import optimizer_of
from experiments.workloads.workload import Batch


@dataclass(frozen=True)
class Block:
    """Rows and columns of a table on this rank.

    Attributes:
        table: position of the table.
        first_row: first row of the block.
        first_column: first column of the block.
        weights: view of the block's memory, [rows, columns].
        is_replicated: True if every rank holds the block; only rank 0 reports it.
    """

    table: int
    first_row: int
    first_column: int
    weights: Tensor
    is_replicated: bool = False


class Collection(Contender):
    """A collection of embedding bags that takes a KeyedJaggedTensor, with one feature per table.

    Attributes:
        module: the collection.
        feature_name: format of a feature's name, from the number of its table.
        keys: names of the features, in the order of the tables.
        blocks: parts of the tables on this rank.
    """

    module: Any
    feature_name: ClassVar[str] = "f{}"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.keys = [self.feature_name.format(number) for number in range(len(task.shapes))]
        self.module, self.blocks = self._module()
        for block in self.blocks:  # the seed is the table's, so replicas have equal values
            fill_(block.weights.data, block.table)

    @abstractmethod
    def _module(self) -> tuple[Any, list[Block]]:
        """Build the module on the task's device; return it and this rank's blocks."""

    def forward(self, prepared: tuple[Any, Tensor]) -> Tensor:
        features, _ = prepared
        with torch.no_grad():
            return self.module(features).values()

    def step(self, prepared: tuple[Any, Tensor]) -> None:
        features, gradient = prepared
        self.module(features).values().backward(gradient)

    def observe(self, batch: Batch) -> State:
        """Return the touched rows of each table, gathered from all ranks.

        This is a collective: every rank passes the same batch.
        """
        rank, size = rank_and_size()
        ids = touched_ids(batch, self.task)
        rows = [
            torch.zeros(len(table_ids), shape.dim)
            for table_ids, shape in zip(ids, self.task.shapes, strict=True)
        ]
        for block in self.blocks:
            if block.is_replicated and rank:
                continue
            block_rows = ids[block.table] - block.first_row
            is_local = (block_rows >= 0) & (block_rows < block.weights.size(0))
            columns = slice(block.first_column, block.first_column + block.weights.size(1))
            values = block.weights.detach()[block_rows[is_local].to(block.weights.device)]
            rows[block.table][is_local, columns] = values.float().cpu()
        if size > 1:
            for table in rows:
                dist.all_reduce(table)
        return rows


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def sum_over_ranks(nbytes: Mapping[str, int]) -> dict[str, int]:
    """Return each number of bytes summed over all ranks; a collective, with equal keys on each."""
    if rank_and_size()[1] == 1:
        return dict(nbytes)
    total = torch.tensor(list(nbytes.values()), dtype=torch.int64)
    dist.all_reduce(total)
    return dict(zip(nbytes, total.tolist(), strict=True))


class EmblibCollection(Collection):
    """Base of emblib's collections, sharded or not."""

    @staticmethod
    def configs(task: Task) -> list[EmbeddingBagConfig]:
        """Return the configuration of each table; tables are named t0, t1, ..."""
        return [
            EmbeddingBagConfig(
                shape.rows, shape.dim, f"t{number}", (EmblibCollection.feature_name.format(number),)
            )
            for number, shape in enumerate(task.shapes)
        ]

    def prepare(self, batch: Batch) -> tuple[KeyedJaggedTensor, Tensor]:
        device = self.task.device
        features = KeyedJaggedTensor(
            self.keys,
            batch.indices.to(device),
            lengths=batch.offsets.diff().to(device),
            offsets=batch.offsets.to(device),
        )
        return features, batch.gradient.to(device)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of all ranks; a collective."""
        sizes = [group.module.nbytes() for groups in self._groups() for group in groups.groups]
        names = ("weights", "optimizer_state")
        return sum_over_ranks({name: sum(size.get(name, 0) for size in sizes) for name in names})

    @abstractmethod
    def _groups(self) -> list[TableGroups]:
        """Return the groups that hold this rank's tables."""


class UnshardedCollection(EmblibCollection):
    """emblib.EmbeddingBagCollection: all tables in this process."""

    def _module(self) -> tuple[Any, list[Block]]:
        task = self.task
        module = EmbeddingBagCollection(
            self.configs(task), device=task.device, optimizer=optimizer_of(task)
        )
        views = (module.groups.views(table)["weight"] for table in range(len(task.shapes)))
        return module, [Block(table, 0, 0, weights) for table, weights in enumerate(views)]

    def _groups(self) -> list[TableGroups]:
        return [self.module.groups]


RANKS_PER_NODE = 2  # ranks that sharding types by node treat as one node


class ShardedCollection(EmblibCollection):
    """A collection over all ranks; the subclass gives every table the same sharding type.

    Attributes:
        splits_rows: True if the columns of a row may be on several ranks.
        rule: function of (rank, node) that returns the sharding rule of a table. Its arguments are
            the rank and the node of the table: each has about equally many consecutive tables.
    """

    splits_rows = False
    rule: Callable[[int, int], Rule]

    def _module(self) -> tuple[Any, list[Block]]:
        """Build emblib's sharded collection by the plan of the contender."""
        ranks = ranks_of(self.task.device)
        if self.splits_rows and ranks.size > 1 and self.task.optimizer is Optimizer.rowwise_adagrad:
            raise Unsupported(
                "row-wise Adagrad keeps one sum per shard of a row, so rows that are sharded by "
                "columns train differently from whole rows"
            )
        optimizer = optimizer_of(self.task)
        source = EmbeddingBagCollection(self.configs(self.task), device="meta", optimizer=optimizer)
        plan = self.plan(source, World(ranks.size, ranks.local_size))
        module = ShardedEmbeddingBagCollection(source, plan, ranks, optimizer=optimizer)
        names = list(plan)
        return module, [
            Block(
                names.index(local.table),
                local.shard.rows[0],
                local.shard.columns[0],
                local.groups.views(local.index)["weight"],
                is_replicated=plan[local.table].is_replicated,
            )
            for local in module.local_shards()
        ]

    @classmethod
    def plan(cls, tables: EmbeddingBagCollection, world: World) -> dict[str, ParameterSharding]:
        """Return the sharding of each table by name."""
        names = [config.name for config in tables.embedding_bag_configs()]
        num_nodes = world.size // world.local_size
        rules = {
            name: cls.rule(table * world.size // len(names), table * num_nodes // len(names))
            for table, name in enumerate(names)
        }
        return construct_module_plan(tables, rules, world)

    @staticmethod
    def ranks_per_node(size: int) -> int:
        """Return RANKS_PER_NODE if that divides `size`, the number of all ranks, else `size`."""
        return RANKS_PER_NODE if size % RANKS_PER_NODE == 0 else size

    def parts(self, prepared: tuple[KeyedJaggedTensor, Tensor]) -> dict[str, Callable[[], object]]:
        """Return input_dist ("input"), lookup and update ("local"), and output_dist ("output")."""
        module, features = self.module, prepared[0]
        received = module.input_dist(features).wait().wait()
        gradient = torch.randn_like(module.look_up_rows(received)) / len(features.keys())
        with torch.no_grad():
            local_rows = module.compute(received)

        def look_up_and_update() -> None:
            rows = module.look_up_rows(received)
            if rows.requires_grad:
                rows.backward(gradient)

        def run_output_dist() -> object:
            with torch.no_grad():
                return module.output_dist(local_rows, received).values()

        return {
            "input": lambda: module.input_dist(features).wait().wait(),
            "local": look_up_and_update,
            "output": run_output_dist,
        }

    def _groups(self) -> list[TableGroups]:
        groups = {id(local.groups): local.groups for local in self.module.local_shards()}
        return list(groups.values())


def ranks_of(device: torch.device) -> RankGroup:
    """Return the group of all ranks, in nodes of `ShardedCollection.ranks_per_node`.

    A process without a process group, or alone in it, is a group of one.
    """
    size = rank_and_size()[1]
    if size == 1:
        return RankGroup.single(device)
    return RankGroup(local_size=ShardedCollection.ranks_per_node(size), device=device)


class DataParallel(ShardedCollection):
    """Every table replicated on every rank."""

    rule = staticmethod(lambda rank, node: sharding_types.data_parallel())


class TableWise(ShardedCollection):
    """Whole tables, each on its rank."""

    rule = staticmethod(lambda rank, node: sharding_types.table_wise(rank))


class RowWise(ShardedCollection):
    """The rows of every table distributed over all ranks."""

    rule = staticmethod(lambda rank, node: sharding_types.row_wise())


class ColumnWise(ShardedCollection):
    """The columns of every table distributed over all ranks."""

    splits_rows = True
    rule = staticmethod(lambda rank, node: sharding_types.column_wise())


class TableRowWise(ShardedCollection):
    """The rows of each table distributed over the ranks of its node."""

    rule = staticmethod(lambda rank, node: sharding_types.table_row_wise(node))


class TableColumnWise(ShardedCollection):
    """The columns of each table distributed over the ranks of its node."""

    splits_rows = True
    rule = staticmethod(lambda rank, node: sharding_types.table_column_wise(node))


class Grid(ShardedCollection):
    """The columns of each table distributed over the nodes, their rows over a node's ranks."""

    splits_rows = True
    rule = staticmethod(lambda rank, node: sharding_types.grid())
