"""TorchRec's embedding bag collections in one process, fed with its KeyedJaggedTensor."""

from __future__ import annotations

import atexit
import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

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
from experiments.work.workload import Batch

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
    """What TorchRec's collections have in common: one feature for each table."""

    dense = True
    requires = ("torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0 | fbgemm-gpu==1.8.0")
    install = (
        "pip install torchrec==1.8.0, or without CUDA: pip install --no-deps torchrec==1.8.0 && "
        "pip install fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics==1.0.3 tqdm pyre-extensions"
    )

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.keys = [f"f{number:05}" for number in range(len(task.shapes))]  # as state dicts sort
        self.module: Any
        self.module, self.weights = self._module()
        for seed, weights in enumerate(self.weights):
            fill_(weights.data, seed)

    @abstractmethod
    def _module(self) -> tuple[nn.Module, list[Tensor]]:
        """The collection, and the weights of each table."""

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
        """A KeyedJaggedTensor that has already worked out its lengths and where each key begins."""
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
        """One call; the values of its KeyedTensor."""
        with torch.no_grad():
            output: Tensor = self.module(prepared[0]).values()
        return output

    def step(self, prepared: Prepared) -> None:
        """backward() updates the tables."""
        self.module(prepared[0]).values().backward(prepared[1])

    def nbytes(self) -> dict[str, int]:
        """Tables, and the optimizer's sums; dense gradients show in the peak."""
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
        """What its optimizer keeps, table by table."""

    def observe(self, batch: Batch) -> State:
        """Touched rows of each table."""
        ids = touched(batch, self.task)
        return [w.detach()[i.to(w.device)].cpu() for w, i in zip(self.weights, ids, strict=True)]

    def expect(self, batch: Batch, before: State) -> tuple[Tensor, State]:
        """Plain tables."""
        return expect_tables(batch, before, self.task)


class Sharded(Collection):
    """TorchRec as it is trained with: DistributedModelParallel, its optimizer in backward.

    In a process group of one. Its input and output distribution then send nothing, but run.
    """

    alone = True
    name = "torchrec"
    label = "TorchRec"

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
        """Of the optimizers in backward, all together."""
        states: Iterable[Mapping[str, Any]] = self.module.fused_optimizer.state.values()
        return states


class Fused(Collection):
    """TorchRec's FusedEmbeddingBagCollection: FBGEMM's tables behind its interface, no sharding."""

    alone = True
    name = "torchrec_fused"
    label = "TorchRec fused EBC"

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
        """Of FBGEMM's modules, which are not among its submodules."""
        states: Iterable[Mapping[str, Any]] = self.module.fused_optimizer().state.values()
        return states


class Unsharded(Collection):
    """TorchRec's EmbeddingBagCollection before it is sharded: dense gradients, torch.optim.

    Every row of every table gets a gradient and an update, so that a step reads and writes whole
    tables. Not how TorchRec is meant to be trained, but what its class does by itself.
    """

    alone = True
    name = "torchrec_unsharded"
    label = "TorchRec EBC, unsharded"

    def _module(self) -> tuple[nn.Module, list[Tensor]]:
        if self.task.optimizer is Optimizer.rowwise_adagrad:
            raise Unsupported("torch.optim has no row-wise Adagrad")
        module = torchrec.EmbeddingBagCollection(tables=self._configs(), device=self.task.device)
        self.optimizer: torch.optim.Optimizer = OPTIMIZERS[self.task.optimizer](
            module.parameters(), **self._options()
        )
        return module, [bag.weight for bag in module.embedding_bags.values()]

    def step(self, prepared: Prepared) -> None:
        """Autograd to dense gradients, then the optimizer."""
        super().step(prepared)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _states(self) -> Iterable[Mapping[str, Any]]:
        """Of torch.optim."""
        return self.optimizer.state.values()


def _process_group(device: torch.device) -> None:
    """One of this process alone."""
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
