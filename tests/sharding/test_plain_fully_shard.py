"""Plain `fully_shard` (FSDP2) over tables: it trains them, leaves them alone, or is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from emblib import TableBatchedEmbeddingBags, TableSpec, optim
from tests.storage.test_handles import (
    BATCH,
    FEATURES,
    MODULES,
    changed,
    collection,
    either,
    state_of,
)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@either
def test_fully_shard_of_a_collection_is_refused(optimizer: Any) -> None:
    model = nn.Sequential(collection(optimizer))
    with pytest.raises(RuntimeError, match="DistributedModelParallel"):
        fully_shard(model)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["plain", "tt"])
def test_fully_shard_of_fused_tables_is_refused(name: str) -> None:
    module = MODULES[name]()
    fully_shard(module)
    with pytest.raises(RuntimeError, match="DistributedModelParallel"):
        module(*BATCH)


@pytest.mark.usefixtures("one_rank")
def test_fully_shard_trains_a_module_with_dense_gradients() -> None:
    external = optim.External(gradient=optim.Gradient.DENSE)
    module = TableBatchedEmbeddingBags([TableSpec(10, 8)], external)
    want = module.weights.detach().clone()
    fully_shard(module)
    sgd = torch.optim.SGD(module.parameters(), 1.0)
    module(*BATCH).sum().backward()
    sgd.step()
    want -= torch.tensor([0.0, 2, 1, 1, 1, 0, 0, 0, 0, 0]).unsqueeze(1)
    weights: Any = module.weights
    torch.testing.assert_close(weights.full_tensor(), want)


@pytest.mark.usefixtures("one_rank")
def test_fully_shard_leaves_ignored_tables_alone() -> None:
    tables = collection()
    model = nn.Sequential(tables)
    before = state_of(tables)
    fully_shard(model, ignored_params=set(tables.parameters()))
    model(FEATURES).values().sum().backward()
    assert changed(before, tables)
