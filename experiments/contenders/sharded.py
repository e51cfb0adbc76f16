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
    """Rows and columns of a table that this rank holds; `weights` is a view of its memory."""

    table: int
    first_row: int
    first_column: int
    weights: Tensor  # [rows, columns]
    copy: bool = False  # every rank holds the same: one of them speaks for all


def world() -> tuple[int, int]:
    """This rank, and how many there are."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def fill_pieces(pieces: Sequence[Piece]) -> None:
    """Noise; copies of a table get the same."""
    for piece in pieces:
        fill_(piece.weights, piece.table)


def touched_rows(batch: Batch, task: Task, pieces: Sequence[Piece]) -> State:
    """Copies of the rows of each table that `batch` touches, whole on every rank; a collective."""
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
    """The sum of what all ranks hold; a collective."""
    _, size = world()
    if size == 1:
        return dict(nbytes)
    total = torch.tensor(list(nbytes.values()), dtype=torch.int64)
    dist.all_reduce(total)
    return dict(zip(nbytes, total.tolist(), strict=True))


Prepared = tuple[KeyedJaggedTensor, Tensor]
NODE = 2  # ranks that count as one node, where a sharding type asks for nodes


class Bags(Contender):
    """What the collections have in common."""

    module: Any

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.keys = [f"f{number}" for number in range(len(task.shapes))]
        self.optimizer = self.optimizer_of(task)
        self.module, self.pieces = self._module()
        fill_pieces(self.pieces)

    @abstractmethod
    def _module(self) -> tuple[Any, list[Piece]]:
        """On the device of the task, and where its tables are."""

    @staticmethod
    def configs(task: Task) -> list[EmbeddingBagConfig]:
        """A table for each feature."""
        return [
            EmbeddingBagConfig(shape.rows, shape.dim, f"t{number}", (f"f{number}",))
            for number, shape in enumerate(task.shapes)
        ]

    @staticmethod
    def optimizer_of(task: Task) -> Optimizer:
        """Of all tables."""
        return OPTIMIZERS[task.optimizer](task.lr)

    def prepare(self, batch: Batch) -> Prepared:
        """A KeyedJaggedTensor that knows its lengths and offsets."""
        device = self.task.device
        features = KeyedJaggedTensor(
            self.keys,
            batch.indices.to(device),
            lengths=batch.offsets.diff().to(device),
            offsets=batch.offsets.to(device),
        )
        return features, batch.gradient.to(device)

    def forward(self, prepared: Prepared) -> Tensor:
        """One call; the values of its KeyedTensor."""
        with torch.no_grad():
            output: Tensor = self.module(prepared[0]).values()
        return output

    def step(self, prepared: Prepared) -> None:
        """backward() updates the tables."""
        self.module(prepared[0]).values().backward(prepared[1])

    def nbytes(self) -> dict[str, int]:
        """Of all ranks."""
        found: dict[str, int] = {"weights": 0, "optimizer_state": 0}
        for groups in self.groups():
            for group in groups.groups:
                own = group.module.nbytes()
                found = {name: found[name] + own.get(name, 0) for name in found}
        return over_ranks(found)

    @abstractmethod
    def groups(self) -> list[TableGroups]:
        """What holds the tables that are here."""

    def observe(self, batch: Batch) -> State:
        """Touched rows, of whatever rank."""
        return touched_rows(batch, self.task, self.pieces)

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        """Plain tables."""
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
        """The collection's."""
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
        """The sharding of each table by name."""
        tables = EmbeddingBagCollection(cls.configs(task), device="meta")
        names = [config.name for config in tables.embedding_bag_configs()]
        share = 1 / len(names)
        rules = {name: cls.place(number * share, world) for number, name in enumerate(names)}
        return construct_module_plan(tables, rules, world)

    @staticmethod
    def node_of(size: int) -> int:
        """How many ranks of a world count as one node."""
        return NODE if size % NODE == 0 else size

    @staticmethod
    @abstractmethod
    def place(share: float, world: World) -> Rule:
        """The rule of a table; `share` in [0, 1) is where it is among the tables."""

    def parts(self, prepared: Prepared) -> dict[str, Callable[[], object]]:
        """Ids on their way; lookup and update for ids that are there; outputs on their way back."""
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
        """The sharded module's, copies of whole tables among them."""
        found = {id(part.groups): part.groups for part in self.module.local_shards()}
        return list(found.values())


def ranks_of(device: torch.device) -> RankGroup:
    """All ranks; where there are enough, as nodes of NODE."""
    _, size = world()
    if size == 1:
        return RankGroup.single(device)
    return RankGroup(local_size=Spread.node_of(size), device=device)


class DataParallel(Spread):
    """A copy of every table on every rank."""

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """Everywhere."""
        return sharding_types.data_parallel()


class TableWise(Spread):
    """Whole tables, an equal share of neighbours on each rank."""

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """A share on each."""
        return sharding_types.table_wise(int(share * world.size))


class RowWise(Spread):
    """Rows of every table on every rank."""

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """On all."""
        return sharding_types.row_wise()


class ColumnWise(Spread):
    """Columns of every table on every rank."""

    cuts_rows = True

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """On all."""
        return sharding_types.column_wise()


class TableRowWise(Spread):
    """Rows of a table on the ranks of one node each."""

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """A share on each node."""
        return sharding_types.table_row_wise(int(share * (world.size // world.local_size)))


class TableColumnWise(Spread):
    """Columns of a table on the ranks of one node each."""

    cuts_rows = True

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """A share on each node."""
        return sharding_types.table_column_wise(int(share * (world.size // world.local_size)))


class Grid(Spread):
    """Columns of a table on the nodes, and of each its rows on the node's ranks."""

    cuts_rows = True

    @staticmethod
    def place(share: float, world: World) -> Rule:
        """On all nodes."""
        return sharding_types.grid()
