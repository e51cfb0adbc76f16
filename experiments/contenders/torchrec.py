"""TorchRec's embedding bag collections, in one process and over ranks, and its hash table."""

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
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import JaggedTensor

from experiments.config.schema import Optimizer
from experiments.contenders.base import EPS, State, Task, Unsupported, optimizer_bytes, read_rows
from experiments.contenders.fbgemm import check_dims, id_type
from experiments.contenders.keys import KeyTask, SortedTable
from experiments.contenders.sharded import Block, Collection, rank_and_size, sum_over_ranks
from experiments.workloads.workload import Batch

# Building a sharded collection would log a warning about a function that TorchRec itself calls.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

OPTIMIZERS: dict[Optimizer, type[Any]] = {
    Optimizer.sgd: torch.optim.SGD,
    Optimizer.adagrad: torch.optim.Adagrad,
    Optimizer.rowwise_adagrad: RowWiseAdagrad,
}
FUSED = "fused"  # compute kernel: FBGEMM's tables with the optimizer in backward


class TorchRecCollection(Collection):
    """Base of TorchRec's collections."""

    feature_name = "f{:05}"  # state dicts sort by name; names sort like the numbers

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
        eps = {} if self.task.optimizer is Optimizer.sgd else {"eps": EPS}
        return {"lr": self.task.lr, **eps}

    def prepare(self, batch: Batch) -> tuple[torchrec.KeyedJaggedTensor, Tensor]:
        """Return a KeyedJaggedTensor with its lengths and offsets computed, and the gradient."""
        device, id_dtype = self.task.device, id_type(self.task)
        features = torchrec.KeyedJaggedTensor.from_offsets_sync(
            keys=self.keys,
            values=batch.indices.to(device, id_dtype),
            offsets=batch.offsets.to(device, id_dtype),
        )
        features.lengths()
        features.to_dict()
        return features, batch.gradient.to(device)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of weights and of the optimizer's sums, without gradients."""
        return {
            "weights": sum(block.weights.nbytes for block in self.blocks),
            "optimizer_state": optimizer_bytes(
                {
                    name: value.local_shards()[0].tensor
                    if hasattr(value, "local_shards")
                    else value
                    for name, value in state.items()
                }
                for state in self._optimizer_states()
            ),
        }

    @abstractmethod
    def _optimizer_states(self) -> Iterable[Mapping[str, Any]]:
        """Return the state of the optimizer per parameter."""


class TorchRecInProcess(TorchRecCollection):
    """Base of collections in one process, without a process group."""

    def _module(self) -> tuple[nn.Module, list[Block]]:
        module = self._collection()
        bags = module.embedding_bags.values()
        return module, [Block(table, 0, 0, bag.weight) for table, bag in enumerate(bags)]

    @abstractmethod
    def _collection(self) -> Any:
        """Build the collection on the task's device."""

    def observe(self, batch: Batch) -> State:
        return read_rows((block.weights for block in self.blocks), batch, self.task)


class TorchRecFused(TorchRecInProcess):
    """TorchRec's FusedEmbeddingBagCollection: FBGEMM's tables in one process."""

    def _collection(self) -> nn.Module:
        check_dims(self.task)
        return FusedEmbeddingBagCollection(
            tables=self._configs(),
            optimizer_type=OPTIMIZERS[self.task.optimizer],
            optimizer_kwargs=self._options(),
            device=self.task.device,
        )

    def _optimizer_states(self) -> Iterable[Mapping[str, Any]]:
        return self.module.fused_optimizer().state.values()


class TorchRecDense(TorchRecInProcess):
    """TorchRec's EmbeddingBagCollection before it is sharded: dense gradients and torch.optim.

    A step reads and writes whole tables, because every row has a gradient. TorchRec is not meant to
    be trained this way, but its class does so by itself.
    """

    def _collection(self) -> nn.Module:
        if self.task.optimizer is Optimizer.rowwise_adagrad:
            raise Unsupported("torch.optim has no row-wise Adagrad")
        module = torchrec.EmbeddingBagCollection(tables=self._configs(), device=self.task.device)
        self.optimizer: torch.optim.Optimizer = OPTIMIZERS[self.task.optimizer](
            module.parameters(), **self._options()
        )
        return module

    def step(self, prepared: tuple[torchrec.KeyedJaggedTensor, Tensor]) -> None:
        super().step(prepared)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _optimizer_states(self) -> Iterable[Mapping[str, Any]]:
        return self.optimizer.state.values()


class TorchRecSharded(TorchRecCollection):
    """TorchRec's DistributedModelParallel with the optimizer in backward, its intended use.

    Without a process group, a group of this process is created; input_dist and output_dist then run
    without sending anything.
    """

    @abstractmethod
    def _sharding(self, rank: int) -> Callable[..., Any]:
        """Return TorchRec's sharding of a table; a table that stays whole is stored on `rank`."""

    def _module(self) -> tuple[nn.Module, list[Block]]:
        """Build TorchRec's sharded collection with a fused optimizer."""
        check_dims(self.task)
        device = self.task.device
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            atexit.register(dist.destroy_process_group)
        _, ranks = rank_and_size()
        collection = torchrec.EmbeddingBagCollection(
            tables=self._configs(), device=torch.device("meta")
        )
        apply_optimizer_in_backward(
            OPTIMIZERS[self.task.optimizer], collection.parameters(), self._options()
        )
        names = [config.name for config in self._configs()]
        plan = sharding_plan.construct_module_sharding_plan(
            collection,
            {name: self._sharding(table * ranks // len(names)) for table, name in enumerate(names)},
            world_size=ranks,
            local_size=ranks,
            device_type=device.type,
        )
        # DistributedModelParallel shards the children of its module only.
        module = DistributedModelParallel(
            nn.Sequential(collection),
            device=device,
            plan=ShardingPlan({"0": plan}),
            sharders=[EmbeddingBagCollectionSharder()],
        )
        blocks = []
        for key, value in module.state_dict().items():
            table = names.index(key.split(".")[-2])
            for shard in value.local_shards():
                row, column = shard.metadata.shard_offsets
                blocks.append(Block(table, row, column, shard.tensor))
        return module, blocks

    def _optimizer_states(self) -> Iterable[Mapping[str, Any]]:
        return self.module.fused_optimizer.state.values()

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of all ranks; a collective."""
        return sum_over_ranks(super().nbytes())


class TorchRecTableWise(TorchRecSharded):
    """Whole tables; each rank holds consecutive tables, about equally many.

    TorchRec sorts features by rank, which then does not change their order.
    """

    def _sharding(self, rank: int) -> Callable[..., Any]:
        return sharding_plan.table_wise(rank=rank, compute_kernel=FUSED)


class TorchRecAlone(TorchRecTableWise):
    """TorchRecTableWise in one process, to compare with contenders that are not sharded."""

    def __init__(self, task: Task) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise Unsupported(
                "TorchRec is measured in one process here; its tables would be spread over "
                f"{dist.get_world_size()}, other contenders' are not (torchrec_fused has no group)"
            )
        super().__init__(task)


class TorchRecRowWise(TorchRecSharded):
    """The rows of every table distributed over all ranks."""

    def _sharding(self, rank: int) -> Callable[..., Any]:
        return sharding_plan.row_wise(compute_kernel=FUSED)


FEATURE = "ids"
EVICTION_INTERVAL = 10  # training calls from one eviction to the next
MIN_ROWS = 2  # one row for a known id, and the last row for all unknown ids

PreparedIds = dict[str, JaggedTensor]


class ManagedCollisions(SortedTable):
    """TorchRec's managed collision module (ZCH) as a hash table.

    Training calls record every id; every EVICTION_INTERVAL-th call also admits and evicts ids by
    frequency. A slot is a row; all absent ids share the last one. `fill` takes at most
    `task.num_resident` distinct keys. `size` does not count what training calls change.
    """

    operations = ("find_slots", "find_or_insert_slots")
    period = EVICTION_INTERVAL

    def __init__(self, task: KeyTask) -> None:
        super().__init__(task)
        self.absent = max(MIN_ROWS, task.num_resident + 1) - 1
        self.reset_after_checks()

    def reset_after_checks(self) -> None:
        """Rebuild the module, because its first training batch limits how many ids it records."""
        self.module = MCHManagedCollisionModule(
            zch_size=self.absent + 1,
            device=self.task.device,
            eviction_policy=LFU_EvictionPolicy(),
            eviction_interval=EVICTION_INTERVAL,
        )
        if len(self.keys):
            self._load()

    def _load(self) -> None:
        """Load `keys` through the state dict, each with a count of one."""
        state = self.module.state_dict()
        state["_mch_sorted_raw_ids"][: len(self.keys)] = self.keys
        state["_mch_counts"][: len(self.keys)] = 1
        self.module.load_state_dict(state)

    def prepare(self, keys: Tensor, values: Tensor) -> PreparedIds:
        ids, _ = super().prepare(keys, values)
        lengths = torch.ones(len(ids), dtype=torch.int64, device=ids.device)
        return {FEATURE: JaggedTensor(ids, lengths=lengths)}

    def find_slots(self, prepared: PreparedIds) -> Tensor:
        return self.module.remap(prepared)[FEATURE].values()

    def find_or_insert_slots(self, prepared: PreparedIds) -> Tensor:
        self.module.train()
        return self.module(prepared)[FEATURE].values()

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.module.state_dict().values())
