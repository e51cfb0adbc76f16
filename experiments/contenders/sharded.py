"""emblib's embedding bag collections: in one process, and over ranks by each sharding type."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig, TableGroups
from emblib.jagged import KeyedJaggedTensor
from emblib.optim import Optimizer
from emblib.sharding import (
    ParameterSharding,
    RankGroup,
    ShardedEmbeddingBagCollection,
    World,
    construct_module_plan,
    sharding_types,
)
from emblib.sharding.sharding_types import Rule
from experiments.config.schema import Optimizer as Kind
from experiments.contenders.base import (
    Contender,
    State,
    Task,
    Unsupported,
    expect_tables,
    fill_,
    touched,
)
from experiments.contenders.tables import OPTIMIZERS
from experiments.workloads.workload import Batch


@dataclass(frozen=True)
class Piece:
    """Rows and columns of a table on this rank; `weights` is a view of its memory."""

    table: int
    first_row: int
    first_column: int
    weights: Tensor  # [rows, columns]
    copy: bool = False  # every rank holds the same: one of them speaks for all


def world() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def fill_pieces(pieces: Sequence[Piece]) -> None:
    """Fill with noise; replicas of a table get the same."""
    for piece in pieces:
        fill_(piece.weights, piece.table)


def touched_rows(batch: Batch, task: Task, pieces: Sequence[Piece]) -> State:
    """Gather the rows of each table that `batch` touches on every rank; a collective."""
    rank, size = world()
    rows = []
    for number, (ids, shape) in enumerate(zip(touched(batch, task), task.shapes, strict=True)):
        whole = torch.zeros(len(ids), shape.dim)
        for piece in (p for p in pieces if p.table == number):
            if piece.copy and rank:
                continue
            local = ids - piece.first_row
            here = (local >= 0) & (local < piece.weights.size(0))
            columns = slice(piece.first_column, piece.first_column + piece.weights.size(1))
            found = piece.weights.detach()[local[here].to(piece.weights.device)]
            whole[here, columns] = found.float().cpu()
        if size > 1:
            dist.all_reduce(whole)
        rows.append(whole)
    return rows


def over_ranks(nbytes: Mapping[str, int]) -> dict[str, int]:
    """Sum over all ranks; a collective."""
    _, size = world()
    if size == 1:
        return dict(nbytes)
    total = torch.tensor(list(nbytes.values()), dtype=torch.int64)
    dist.all_reduce(total)
    return dict(zip(nbytes, total.tolist(), strict=True))


Prepared = tuple[KeyedJaggedTensor, Tensor]
NODE = 2  # ranks that count as one node, where a sharding type asks for nodes


class Bags(Contender):
    """The common part of emblib's collections."""

    module: Any

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.keys = [f"f{number}" for number in range(len(task.shapes))]
        self.optimizer = self.optimizer_of(task)
        self.module, self.pieces = self._module()
        fill_pieces(self.pieces)

    @abstractmethod
    def _module(self) -> tuple[Any, list[Piece]]:
        """Build the module on the task's device; return it with its weights."""

    @staticmethod
    def configs(task: Task) -> list[EmbeddingBagConfig]:
        """Return a table configuration per feature."""
        return [
            EmbeddingBagConfig(shape.rows, shape.dim, f"t{number}", (f"f{number}",))
            for number, shape in enumerate(task.shapes)
        ]

    @staticmethod
    def optimizer_of(task: Task) -> Optimizer:
        """Return the optimizer of all tables."""
        return OPTIMIZERS[task.optimizer](task.lr)

    def prepare(self, batch: Batch) -> Prepared:
        """Lay out a KeyedJaggedTensor that knows its lengths and offsets."""
        device = self.task.device
        features = KeyedJaggedTensor(
            self.keys,
            batch.indices.to(device),
            lengths=batch.offsets.diff().to(device),
            offsets=batch.offsets.to(device),
        )
        return features, batch.gradient.to(device)

    def forward(self, prepared: Prepared) -> Tensor:
        """Look up with one call; return the values of the KeyedTensor."""
        with torch.no_grad():
            output: Tensor = self.module(prepared[0]).values()
        return output

    def step(self, prepared: Prepared) -> None:
        """Run forward and backward(), which updates the tables."""
        self.module(prepared[0]).values().backward(prepared[1])

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of all ranks."""
        found: dict[str, int] = {"weights": 0, "optimizer_state": 0}
        for groups in self.groups():
            for group in groups.groups:
                own = group.module.nbytes()
                found = {name: found[name] + own.get(name, 0) for name in found}
        return over_ranks(found)

    @abstractmethod
    def groups(self) -> list[TableGroups]:
        """Return the groups that hold this rank's tables."""

    def observe(self, batch: Batch) -> State:
        """Return the touched rows of all ranks."""
        return touched_rows(batch, self.task, self.pieces)

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        """Compute with plain tables."""
        return expect_tables(batch, before, self.task)


class WholeBags(Bags):
    """Not sharded: every table in this process."""

    def _module(self) -> tuple[Any, list[Piece]]:
        module = EmbeddingBagCollection(
            self.configs(self.task), device=self.task.device, optimizer=self.optimizer
        )
        groups = module.groups
        count = len(self.task.shapes)
        return module, [Piece(t, 0, 0, groups.views(t)["weight"]) for t in range(count)]

    def groups(self) -> list[TableGroups]:
        """Return the collection's groups."""
        return [self.module.groups]


class Spread(Bags):
    """One sharding type for every table, over all ranks."""

    cuts_rows = False  # whether a row may be on several ranks

    def _module(self) -> tuple[Any, list[Piece]]:
        ranks = ranks_of(self.task.device)
        if self.cuts_rows and ranks.size > 1 and self.task.optimizer is Kind.rowwise_adagrad:
            raise Unsupported(
                "row-wise Adagrad has one sum for each part of a row: parts by columns train "
                "otherwise than whole rows"
            )
        source = EmbeddingBagCollection(
            self.configs(self.task), device="meta", optimizer=self.optimizer
        )
        plan = self.plan(self.task, World(ranks.size, ranks.local_size))
        module = ShardedEmbeddingBagCollection(source, plan, ranks, optimizer=self.optimizer)
        names = list(plan)
        pieces = [
            Piece(
                names.index(part.table),
                part.shard.rows[0],
                part.shard.columns[0],
                part.groups.views(part.index)["weight"],
                copy=plan[part.table].is_replicated,
            )
            for part in module.local_shards()
        ]
        return module, pieces

    @classmethod
    def plan(cls, task: Task, world: World) -> dict[str, ParameterSharding]:
        """Return the sharding of each table by name."""
        tables = EmbeddingBagCollection(cls.configs(task), device="meta")
        names = [config.name for config in tables.embedding_bag_configs()]
        share = 1 / len(names)
        rules = {name: cls.place(number * share, world) for number, name in enumerate(names)}
        return construct_module_plan(tables, rules, world)

    @staticmethod
    def node_of(size: int) -> int:
        """Return how many ranks of a world count as one node."""
        return NODE if size % NODE == 0 else size

    @staticmethod
    @abstractmethod
    def place(share: float, world: World) -> Rule:
        """Return the sharding rule of a table; `share` in [0, 1) is its position."""

    def parts(self, prepared: Prepared) -> dict[str, Callable[[], object]]:
        """Return the parts of a step: input_dist, lookup and update, output_dist."""
        module, features = self.module, prepared[0]
        received = module.input_dist(features).wait().wait()
        rows = module.rows(received)
        gradient = torch.randn_like(rows) / len(features.keys())
        with torch.no_grad():
            found = module.compute(received)

        def local() -> None:
            out = module.rows(received)
            if out.requires_grad:
                out.backward(gradient)

        def output() -> object:
            with torch.no_grad():
                return module.output_dist(found, received).values()

        return {
            "input": lambda: module.input_dist(features).wait().wait(),
            "local": local,
            "output": output,
        }

    def groups(self) -> list[TableGroups]:
        """Return the sharded module's groups, replicated tables included."""
        found = {id(part.groups): part.groups for part in self.module.local_shards()}
        return list(found.values())


def ranks_of(device: torch.device) -> RankGroup:
    """Return the group of all ranks; where there are enough, as nodes of NODE."""
    _, size = world()
    if size == 1:
        return RankGroup.single(device)
    return RankGroup(local_size=Spread.node_of(size), device=device)


class DataParallel(Spread):
    """Every table replicated on every rank."""

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """Replicate on all ranks."""
        return sharding_types.data_parallel()


class TableWise(Spread):
    """Whole tables, an equal share of neighbours on each rank."""

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """Assign whole tables to ranks."""
        return sharding_types.table_wise(int(share * world.size))


class RowWise(Spread):
    """Rows of every table on every rank."""

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """Split over all ranks."""
        return sharding_types.row_wise()


class ColumnWise(Spread):
    """Columns of every table on every rank."""

    cuts_rows = True

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """Split over all ranks."""
        return sharding_types.column_wise()


class TableRowWise(Spread):
    """Rows of a table on the ranks of one node each."""

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """Assign each table to a node."""
        return sharding_types.table_row_wise(int(share * (world.size // world.local_size)))


class TableColumnWise(Spread):
    """Columns of a table on the ranks of one node each."""

    cuts_rows = True

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """Assign each table to a node."""
        return sharding_types.table_column_wise(int(share * (world.size // world.local_size)))


class Grid(Spread):
    """Columns of a table on the nodes, and of each its rows on the node's ranks."""

    cuts_rows = True

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """Split over all nodes."""
        return sharding_types.grid()
