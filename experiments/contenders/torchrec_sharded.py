"""TorchRec's sharded embedding bag collection on as many ranks as there are, by sharding type."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from experiments.contenders.base import State, Task
from experiments.contenders.fbgemm import check_dims
from experiments.contenders.pieces import Piece, fill_pieces, over_ranks, touched_rows, world
from experiments.contenders.torchrec import FUSED, OPTIMIZERS, Collection, alone
from experiments.work.workload import Batch


class Spread(Collection):
    """Trained through DistributedModelParallel, the optimizer in backward, on every rank alike."""

    def __init__(self, task: Task) -> None:
        self.pieces: list[Piece] = []
        super().__init__(task)
        fill_pieces(self.pieces)

    @abstractmethod
    def _place(self, share: float, ranks: int) -> Callable[..., Any]:
        """TorchRec's word for where a table lies; `share` in [0, 1) is its place among them."""

    def _module(self) -> tuple[nn.Module, list[Tensor]]:
        check_dims(self.task)
        if not dist.is_initialized():
            alone(self.task.device)
        _, ranks = world()
        collection = torchrec.EmbeddingBagCollection(
            tables=self._configs(), device=torch.device("meta")
        )
        apply_optimizer_in_backward(
            OPTIMIZERS[self.task.optimizer], collection.parameters(), self._options()
        )
        names = [config.name for config in self._configs()]
        plan = sharding_plan.construct_module_sharding_plan(
            collection,
            {name: self._place(number / len(names), ranks) for number, name in enumerate(names)},
            world_size=ranks,
            local_size=ranks,
            device_type=self.task.device.type,
        )
        # DistributedModelParallel shards the modules below the one that it is given.
        module = DistributedModelParallel(
            nn.Sequential(collection),
            device=self.task.device,
            plan=ShardingPlan({"0": plan}),
            sharders=[EmbeddingBagCollectionSharder()],
        )
        for key, value in module.state_dict().items():
            table = names.index(key.split(".")[-2])
            for shard in value.local_shards():
                row, column = shard.metadata.shard_offsets
                self.pieces.append(Piece(table, row, column, shard.tensor))
        return module, [piece.weights for piece in self.pieces]

    def _states(self) -> Iterable[Mapping[str, Any]]:
        """Of the optimizers in backward, all together."""
        states: Iterable[Mapping[str, Any]] = self.module.fused_optimizer.state.values()
        return states

    def nbytes(self) -> dict[str, int]:
        """Of all ranks."""
        return over_ranks(super().nbytes())

    def observe(self, batch: Batch) -> State:
        """Touched rows, of whatever rank."""
        return touched_rows(batch, self.task, self.pieces)


class TableWise(Spread):
    """Whole tables, an equal share of neighbours on each rank.

    So its features keep their order, which otherwise goes by the rank of their table.
    """

    name = "torchrec_table_wise"
    label = "TorchRec, table-wise"

    def _place(self, share: float, ranks: int) -> Callable[..., Any]:
        return sharding_plan.table_wise(rank=int(share * ranks), compute_kernel=FUSED)


class RowWise(Spread):
    """Rows of every table on every rank."""

    name = "torchrec_row_wise"
    label = "TorchRec, row-wise"

    def _place(self, share: float, ranks: int) -> Callable[..., Any]:
        return sharding_plan.row_wise(compute_kernel=FUSED)


class ColumnWise(Spread):
    """Columns of every table on every rank."""

    name = "torchrec_column_wise"
    label = "TorchRec, column-wise"

    def _place(self, share: float, ranks: int) -> Callable[..., Any]:
        return sharding_plan.column_wise(ranks=list(range(ranks)), compute_kernel=FUSED)
