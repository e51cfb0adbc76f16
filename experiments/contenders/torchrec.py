"""TorchRec's embedding bag collections in one process, fed with its KeyedJaggedTensor."""

from __future__ import annotations

import atexit
import logging
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
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import JaggedTensor

from experiments.config.schema import Optimizer
from experiments.contenders.base import (
    Contender,
    State,
    Task,
    Unsupported,
    expect_tables,
    fill_,
    touched,
)
from experiments.contenders.fbgemm import check_dims, id_type
from experiments.contenders.keys import KeyTable, KeyTask
from experiments.contenders.sharded import Piece, fill_pieces, over_ranks, touched_rows, world
from experiments.workloads.workload import Batch

# It warns whoever builds a sharded collection of a function that TorchRec itself calls.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

Prepared = tuple[torchrec.KeyedJaggedTensor, Tensor]

OPTIMIZERS: dict[Optimizer, type[Any]] = {
    Optimizer.sgd: torch.optim.SGD,
    Optimizer.adagrad: torch.optim.Adagrad,
    Optimizer.rowwise_adagrad: RowWiseAdagrad,
}
FUSED = "fused"  # the compute kernel that is FBGEMM's tables with the optimizer in backward


class Collection(Contender):
    """The common part of TorchRec's collections: one feature per table."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.keys = [f"f{number:05}" for number in range(len(task.shapes))]  # as state dicts sort
        self.module: Any
        self.module, self.weights = self._module()
        for seed, weights in enumerate(self.weights):
            fill_(weights.data, seed)

    @abstractmethod
    def _module(self) -> tuple[nn.Module, list[Tensor]]:
        """Build the collection; return it with the weights of each table."""

    def _configs(self) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name=f"table_{key}",
                feature_names=[key],
                num_embeddings=shape.rows,
                embedding_dim=shape.dim,
            )
            for key, shape in zip(self.keys, self.task.shapes, strict=True)
        ]

    def _options(self) -> dict[str, float]:
        eps = {} if self.task.optimizer is Optimizer.sgd else {"eps": 1e-8}
        return {"lr": self.task.lr, **eps}

    def prepare(self, batch: Batch) -> Prepared:
        """Lay out a KeyedJaggedTensor whose lengths and key offsets are computed."""
        device, kind = self.task.device, id_type(self.task)
        features = torchrec.KeyedJaggedTensor.from_offsets_sync(
            keys=self.keys,
            values=batch.indices.to(device, kind),
            offsets=batch.offsets.to(device, kind),
        )
        features.lengths()
        features.to_dict()
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
        """Return the bytes of tables and of the optimizer's sums; gradients show in the peak."""
        kept = [value for state in self._states() for value in state.values()]
        local = [v.local_shards()[0].tensor if hasattr(v, "local_shards") else v for v in kept]
        return {
            "weights": sum(w.nbytes for w in self.weights),
            "optimizer_state": sum(
                v.nbytes for v in local if isinstance(v, Tensor) and v.dim() > 0
            ),
        }

    @abstractmethod
    def _states(self) -> Iterable[Mapping[str, Any]]:
        """Return the optimizer's state, table by table."""

    def observe(self, batch: Batch) -> State:
        """Return the touched rows of each table."""
        ids = touched(batch, self.task)
        return [w.detach()[i.to(w.device)].cpu() for w, i in zip(self.weights, ids, strict=True)]

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        """Compute with plain tables."""
        return expect_tables(batch, before, self.task)


class Sharded(Collection):
    """TorchRec as it is trained with: DistributedModelParallel, its optimizer in backward.

    In a process group of one. Its input and output distribution then send nothing, but run.
    """

    def _module(self) -> tuple[nn.Module, list[Tensor]]:
        check_dims(self.task)
        device = self.task.device
        _process_group(device)
        collection = torchrec.EmbeddingBagCollection(
            tables=self._configs(), device=torch.device("meta")
        )
        apply_optimizer_in_backward(
            OPTIMIZERS[self.task.optimizer], collection.parameters(), self._options()
        )
        plan = construct_module_sharding_plan(
            collection,
            {c.name: table_wise(rank=0, compute_kernel=FUSED) for c in self._configs()},
            world_size=1,
            local_size=1,
            device_type=device.type,
        )
        # DistributedModelParallel shards the modules below the one that it is given.
        module = DistributedModelParallel(
            nn.Sequential(collection),
            device=device,
            plan=ShardingPlan({"0": plan}),
            sharders=[EmbeddingBagCollectionSharder()],
        )
        shards = [value.local_shards() for value in module.state_dict().values()]
        return module, [shard.tensor for (shard,) in shards]

    def _states(self) -> Iterable[Mapping[str, Any]]:
        """Return the state of all optimizers in backward."""
        states: Iterable[Mapping[str, Any]] = self.module.fused_optimizer.state.values()
        return states


class Fused(Collection):
    """TorchRec's FusedEmbeddingBagCollection: FBGEMM's tables behind its interface, no sharding."""

    def _module(self) -> tuple[nn.Module, list[Tensor]]:
        check_dims(self.task)
        module = FusedEmbeddingBagCollection(
            tables=self._configs(),
            optimizer_type=OPTIMIZERS[self.task.optimizer],
            optimizer_kwargs=self._options(),
            device=self.task.device,
        )
        return module, [bag.weight for bag in module.embedding_bags.values()]

    def _states(self) -> Iterable[Mapping[str, Any]]:
        """Return the state of FBGEMM's modules, which are not submodules."""
        states: Iterable[Mapping[str, Any]] = self.module.fused_optimizer().state.values()
        return states


class Unsharded(Collection):
    """TorchRec's EmbeddingBagCollection before it is sharded: dense gradients, torch.optim.

    Every row of every table gets a gradient and an update, so that a step reads and writes whole
    tables. Not how TorchRec is meant to be trained, but what its class does by itself.
    """

    def _module(self) -> tuple[nn.Module, list[Tensor]]:
        if self.task.optimizer is Optimizer.rowwise_adagrad:
            raise Unsupported("torch.optim has no row-wise Adagrad")
        module = torchrec.EmbeddingBagCollection(tables=self._configs(), device=self.task.device)
        self.optimizer: torch.optim.Optimizer = OPTIMIZERS[self.task.optimizer](
            module.parameters(), **self._options()
        )
        return module, [bag.weight for bag in module.embedding_bags.values()]

    def step(self, prepared: Prepared) -> None:
        """Run autograd to dense gradients, then the optimizer."""
        super().step(prepared)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _states(self) -> Iterable[Mapping[str, Any]]:
        """Return the state of torch.optim."""
        return self.optimizer.state.values()


def _process_group(device: torch.device) -> None:
    """Create a process group of this process alone."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            raise Unsupported(
                "TorchRec is measured in one process here; its tables would be spread over "
                f"{dist.get_world_size()}, other contenders' are not (torchrec_fused has no group)"
            )
        return
    alone(device)


def alone(device: torch.device) -> None:
    """Make a process group of this process; it stays until the process ends."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)


class Spread(Collection):
    """Trained through DistributedModelParallel, the optimizer in backward, on every rank alike."""

    def __init__(self, task: Task) -> None:
        self.pieces: list[Piece] = []
        super().__init__(task)
        fill_pieces(self.pieces)

    @abstractmethod
    def _place(self, share: float, ranks: int) -> Callable[..., Any]:
        """Return TorchRec's sharding of a table; `share` in [0, 1) is its position."""

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
        """Return the state of all optimizers in backward."""
        states: Iterable[Mapping[str, Any]] = self.module.fused_optimizer.state.values()
        return states

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of all ranks."""
        return over_ranks(super().nbytes())

    def observe(self, batch: Batch) -> State:
        """Return the touched rows of all ranks."""
        return touched_rows(batch, self.task, self.pieces)


class TableWise(Spread):
    """Whole tables, an equal share of neighbours on each rank.

    So its features keep their order, which otherwise goes by the rank of their table.
    """

    def _place(self, share: float, ranks: int) -> Callable[..., Any]:
        return sharding_plan.table_wise(rank=int(share * ranks), compute_kernel=FUSED)


class RowWise(Spread):
    """Rows of every table on every rank."""

    def _place(self, share: float, ranks: int) -> Callable[..., Any]:
        return sharding_plan.row_wise(compute_kernel=FUSED)


class ColumnWise(Spread):
    """Columns of every table on every rank."""

    def _place(self, share: float, ranks: int) -> Callable[..., Any]:
        return sharding_plan.column_wise(ranks=list(range(ranks)), compute_kernel=FUSED)


# It warns whoever imports it of a function that TorchRec itself calls.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

FEATURE = "ids"
INTERVAL = 10  # iterations from one eviction to the next
FEWEST = 2  # rows: unknown ids share the last one

PreparedIds = dict[str, JaggedTensor]


class ManagedCollisions(KeyTable):
    """TorchRec's ZCH: training records every id, admits and evicts by frequency every tenth call.

    An id that is not there gets the last row, which it shares with all others that are not.
    """

    operations = ("find_slots", "find_or_insert_slots")
    period = INTERVAL

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        self.absent = max(FEWEST, task.resident + 1) - 1
        self.parts: list[Tensor] = []
        self.ready()

    def ready(self) -> None:
        """Rebuild the module: the first training batch decides how many ids it can record."""
        self.module = MCHManagedCollisionModule(
            zch_size=self.absent + 1,
            device=self.task.device,
            eviction_policy=LFU_EvictionPolicy(),
            eviction_interval=INTERVAL,
        )
        self.merged = 0

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Collect the keys until they are needed, since each merge would sort them all."""
        self.parts.append(keys.to(self.task.device))

    def _merge(self) -> None:
        """Load the keys as a checkpoint does: sorted ids, each with its row."""
        if self.merged == len(self.parts):
            return
        keys = torch.cat(self.parts).unique()
        state = self.module.state_dict()
        state["_mch_sorted_raw_ids"][: len(keys)] = keys
        state["_mch_counts"][: len(keys)] = 1
        self.module.load_state_dict(state)
        self.merged = len(self.parts)

    def prepare(self, keys: Tensor, values: Tensor) -> PreparedIds:
        """Lay out one feature."""
        self._merge()
        lengths = torch.ones(len(keys), dtype=torch.int64, device=self.task.device)
        return {FEATURE: JaggedTensor(keys.to(self.task.device), lengths=lengths)}

    def find_slots(self, prepared: PreparedIds) -> Tensor:
        """Run the remap of evaluation."""
        return self._told(self.module.remap(prepared))

    def find_or_insert_slots(self, prepared: PreparedIds) -> Tensor:
        """Run the remap of training."""
        self.module.train()
        return self._told(self.module(prepared))

    def _told(self, remapped: PreparedIds) -> Tensor:
        return remapped[FEATURE].values()

    def nbytes(self) -> int:
        """Return the bytes of ids, rows and counts."""
        return sum(t.nbytes for t in self.module.state_dict().values())
