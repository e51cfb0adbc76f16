"""The calls of TorchRec's introductory tutorial, block by block, over any library of its shape.

    python -m tests.compat.torchrec_blocks ROOT DEVICE

runs all blocks in one process of a job (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set), and
prints what became of each as JSON. ROOT is `emblib.compat.torchrec`, the changed import; `install`,
for `import torchrec` after `install()`; or `torchrec`, the real one. Each block also checks its
results. Blocks use what earlier ones left, as in the tutorial.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Block = Callable[[Any], None]
BLOCKS: list[Block] = []
ROWS, DIM = 4096, 64


def block(function: Block) -> Block:
    """Add a block."""
    BLOCKS.append(function)
    return function


def expected(ebc: Any, kjt: Any) -> Tensor:
    """The sums of the rows of two features, side by side."""
    state, jagged = ebc.state_dict(), kjt.to_dict()
    columns = []
    for feature in ("product", "user"):
        table = state[f"embedding_bags.{feature}_table.weight"]
        bags = jagged[feature].to_dense()
        columns.append(torch.stack([table[ids.to(table.device).long()].sum(0) for ids in bags]))
    return torch.cat(columns, 1).detach()


# Tables of torch


@block
def weights_of_a_table(s: Any) -> None:
    s.weights = torch.rand(10, 4)
    assert s.weights.shape == (10, 4)


@block
def tables_of_torch(s: Any) -> None:
    s.table = torch.nn.Embedding(10, 4, _weight=s.weights)
    s.bag = torch.nn.EmbeddingBag(10, 4, _weight=s.weights)
    s.ids = torch.tensor([[1, 3]])


@block
def a_lookup_of_torch(s: Any) -> None:
    s.rows = s.table(s.ids)
    assert s.rows.shape == (1, 2, 4)


@block
def a_pooled_lookup_of_torch(s: Any) -> None:
    torch.testing.assert_close(s.bag(s.ids), s.rows.mean(dim=1))


# Collections and jagged tensors


@block
def the_library(s: Any) -> None:
    s.torchrec = s.module("")
    assert inspect.ismodule(s.torchrec)


@block
def a_collection(s: Any) -> None:
    rec = s.torchrec
    torch.manual_seed(0)
    tables = [
        rec.EmbeddingBagConfig(
            name=f"{feature}_table",
            embedding_dim=DIM,
            num_embeddings=ROWS,
            feature_names=[feature],
            pooling=rec.PoolingType.SUM,
        )
        for feature in ("product", "user")
    ]
    s.ebc = rec.EmbeddingBagCollection(device="cpu", tables=tables)
    assert list(s.ebc.embedding_bags) == ["product_table", "user_table"]
    assert "product_table" in str(s.ebc.embedding_bags)


@block
def the_source_of_forward(s: Any) -> None:
    source = inspect.getsource(s.ebc.forward)
    assert "KeyedJaggedTensor" in source
    assert "KeyedTensor" in source


@block
def lengths_and_values(s: Any) -> None:
    s.lengths, s.values = torch.tensor([1, 2]), torch.tensor([5, 7, 1])


@block
def offsets_of_lengths(s: Any) -> None:
    ends = torch.cumsum(s.lengths, dim=0)
    assert s.values[: ends[0]].tolist() == [5]
    assert s.values[ends[0] : ends[1]].tolist() == [7, 1]


@block
def a_jagged_tensor(s: Any) -> None:
    jt = s.torchrec.JaggedTensor(values=s.values, lengths=s.lengths)
    assert jt.offsets().tolist() == [0, 1, 3]
    assert [bag.tolist() for bag in jt.to_dense()] == [[5], [7, 1]]
    assert "JaggedTensor" in str(jt)


@block
def a_keyed_jagged_tensor(s: Any) -> None:
    rec = s.torchrec
    products = rec.JaggedTensor(
        values=torch.tensor([1, 2, 1, 5]) + s.rank, lengths=torch.tensor([3, 1])
    )
    users = rec.JaggedTensor(values=torch.tensor([2, 3, 4, 1]), lengths=torch.tensor([2, 2]))
    s.kjt = rec.KeyedJaggedTensor.from_jt_dict({"product": products, "user": users})
    assert s.kjt.keys() == ["product", "user"]
    assert s.kjt.lengths().tolist() == [3, 1, 2, 2]
    assert s.kjt.values().tolist()[4:] == [2, 3, 4, 1]
    assert list(s.kjt.to_dict()) == ["product", "user"]
    assert '"user": [[2, 3], [4, 1]]' in str(s.kjt)


@block
def a_lookup_of_the_collection(s: Any) -> None:
    result = s.ebc(s.kjt)
    assert result.keys() == ["product", "user"]
    assert result.values().shape == (2, 2 * DIM)
    assert {key: tuple(rows.shape) for key, rows in result.to_dict().items()} == {
        "product": (2, DIM),
        "user": (2, DIM),
    }
    s.expected = expected(s.ebc, s.kjt)
    torch.testing.assert_close(result.values().detach(), s.expected)


# Sharding


@block
def a_process_group(s: Any) -> None:
    backend = "cpu:gloo,cuda:nccl" if s.device.type == "cuda" else "gloo"
    dist.init_process_group(backend=backend)
    assert dist.get_world_size() == s.world


@block
def a_sharder_and_the_group(s: Any) -> None:
    s.sharder = s.module("distributed.embeddingbag").EmbeddingBagCollectionSharder()
    s.planner = s.module("distributed.planner")
    s.types = s.module("distributed.types")
    s.pg = dist.GroupMember.WORLD
    assert s.pg is not None


@block
def a_planner(s: Any) -> None:
    s.planner_of_tables = s.planner.EmbeddingShardingPlanner(
        topology=s.planner.Topology(world_size=s.world, compute_device=s.device.type)
    )


@block
def a_plan(s: Any) -> None:
    s.plan = s.planner_of_tables.collective_plan(s.ebc, [s.sharder], s.pg)
    assert set(s.plan.plan[""]) == {"product_table", "user_table"}
    assert "product_table" in f"{s.plan}"


@block
def a_sharded_collection(s: Any) -> None:
    s.env = s.types.ShardingEnv.from_process_group(s.pg)
    s.sharded = s.sharder.shard(s.ebc, s.plan.plan[""], s.env, s.device)
    assert "ShardedEmbeddingBagCollection" in f"{s.sharded}"


@block
def a_lazy_awaitable(s: Any) -> None:
    class Ones(s.types.LazyAwaitable[torch.Tensor]):  # type: ignore[name-defined, misc]
        def __init__(self, size: list[int]) -> None:
            super().__init__()
            self._size = size

        def _wait_impl(self) -> Tensor:
            return torch.ones(self._size)

    assert Ones([3, 2]).wait().sum() == 6


@block
def a_sharded_lookup(s: Any) -> None:
    s.on_device = s.kjt.to(str(s.device))
    s.output = s.sharded(s.on_device)
    assert isinstance(s.output, s.types.LazyAwaitable)
    assert f"{s.output}"


@block
def the_result_of_a_sharded_lookup(s: Any) -> None:
    kt = s.output.wait()
    assert type(kt) is s.torchrec.KeyedTensor
    assert sorted(kt.keys()) == ["product", "user"]
    assert kt.values().shape == (2, 2 * DIM)
    rows = kt.to_dict()
    if s.is_emblib:  # the real one draws the weights again
        found = torch.cat([rows["product"], rows["user"]], 1).detach().cpu()
        torch.testing.assert_close(found, s.expected)


@block
def the_parts_of_a_sharded_collection(s: Any) -> None:
    assert len(s.sharded._input_dists) >= 1
    assert len(s.sharded._output_dists) >= 1


@block
def the_lookups_of_a_sharded_collection(s: Any) -> None:
    assert len(s.sharded._lookups) >= 1


@block
def distributed_model_parallel(s: Any) -> None:
    model = s.torchrec.distributed.DistributedModelParallel(s.ebc, device=s.device)
    out = model(s.on_device)
    assert out.wait().values().shape == (2, 2 * DIM)
    assert "DistributedModelParallel" in str(model)


# Optimizers


@block
def fused_parameters(s: Any) -> None:
    fused = {
        "optimizer": s.optim_type.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.02,
        "eps": 0.002,
    }
    make = s.module("distributed.embeddingbag").EmbeddingBagCollectionSharder
    sharder = make(fused_params=fused)
    s.fused = sharder.shard(s.ebc, s.plan.plan[""], s.env, s.device)
    assert f"{s.sharded.fused_optimizer}"
    # The real 1.9 reads the rate back from a float32 tensor.
    (rate,) = {group["lr"] for group in s.fused.fused_optimizer.param_groups}
    assert abs(rate - 0.02) < 1e-8
    assert isinstance(s.fused.fused_optimizer, s.module("optim.keyed").KeyedOptimizer)


@block
def an_optimizer_in_backward(s: Any) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    s.applied = copy.deepcopy(s.ebc)
    for _, parameter in s.applied.named_parameters():
        _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
    sharded = s.sharder.shard(s.applied, s.plan.plan[""], s.env, s.device)
    rates = {group["lr"] for group in sharded.fused_optimizer.param_groups}
    assert rates == {0.5}


@block
def a_step_without_an_optimizer(s: Any) -> None:
    dense = s.module("optim.optimizers").in_backward_optimizer_filter(s.fused.named_parameters())
    if s.is_emblib:  # the real one lists the tables of a collection by itself
        assert not dict(dense)
    losses = []
    for _ in range(2):
        rows = s.fused(s.on_device).wait().values()
        loss = torch.sum(torch.ones_like(rows) - rows)
        losses.append(float(loss.detach()))
        loss.backward()
    assert losses[1] < losses[0]


# Inference


@block
def a_module_for_inference(s: Any) -> None:
    kind = s.torchrec.KeyedJaggedTensor

    class InferenceModule(torch.nn.Module):
        def __init__(self, ebc: Any) -> None:
            super().__init__()
            self.ebc_ = ebc

        def forward(self, kjt: kind) -> Any:  # type: ignore[valid-type]
            return self.ebc_(kjt)

    # The annotation itself, which the text of this file does not name at its top level.
    InferenceModule.forward.__annotations__ = {"kjt": kind}
    s.inference = InferenceModule
    found = {name: p.dtype for name, p in InferenceModule(s.ebc).named_parameters()}
    assert found == {
        f"ebc_.embedding_bags.{name}_table.weight": torch.float32 for name in ("product", "user")
    }


@block
def a_quantised_collection(s: Any) -> None:
    quant = torch.ao.quantization
    configs = s.module("modules.embedding_configs")
    quantised = s.module("quant.embedding_modules").EmbeddingBagCollection
    qconfig = configs.QuantConfig(
        activation=quant.PlaceholderObserver.with_args(dtype=torch.float),
        weight=quant.PlaceholderObserver.with_args(dtype=torch.int8),
    )
    kind = s.torchrec.EmbeddingBagCollection
    s.quantised = quant.quantize_dynamic(
        s.inference(s.ebc), qconfig_spec={kind: qconfig}, mapping={kind: quantised}, inplace=False
    )
    assert type(s.quantised.ebc_) is quantised
    s.kjt = s.kjt.to("cpu")
    s.rows = s.quantised(s.kjt)
    rows = torch.cat([s.rows["product"], s.rows["user"]], 1)
    # Three rows, each off by half a scale of 8 bits at most.
    torch.testing.assert_close(rows, s.expected, atol=3 * 2 * (1 / ROWS) ** 0.5 / 510, rtol=0)
    buffers = {buffer.dtype for _, buffer in s.quantised.named_buffers()}
    assert torch.uint8 in buffers
    assert not list(s.quantised.parameters())


@block
def a_sharded_quantised_collection(s: Any) -> None:
    shard = s.module("distributed.shard")._shard_modules
    env = s.torchrec.distributed.ShardingEnv.from_local(1, 0)
    s.over_devices = shard(module=s.quantised, device=torch.device("cpu"), env=env)
    rows = s.over_devices(s.kjt)
    assert torch.equal(rows["product"], s.rows["product"])
    assert torch.equal(rows["user"], s.rows["user"])


@block
def a_traced_and_scripted_model(s: Any) -> None:
    tracer = s.module("fx").Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"])
    graph = tracer.trace(s.over_devices)
    traced = torch.fx.GraphModule(s.over_devices, graph)
    assert "ebc_" in traced.code
    assert torch.equal(traced(s.kjt)["user"], s.rows["user"])
    scripted = torch.jit.script(traced)
    assert "ebc_" in scripted.code
    found = scripted(s.kjt)
    assert found.keys() == ["product", "user"]
    assert torch.equal(found.values(), s.over_devices(s.kjt).values())


def run(root: str, device: str) -> dict[str, str]:
    """Return by block "ok", or its error."""
    is_emblib = root != "torchrec"
    prefix = "torchrec" if root == "install" else root
    if root == "install":
        importlib.import_module("emblib.compat.torchrec").install()
    fbgemm = "emblib.compat.fbgemm_types" if is_emblib else "fbgemm_gpu.split_embedding_configs"
    state = SimpleNamespace(
        module=lambda path: importlib.import_module(f"{prefix}.{path}" if path else prefix),
        optim_type=importlib.import_module(fbgemm).EmbOptimType,
        is_emblib=is_emblib,
        device=torch.device(device),
        rank=int(os.environ["RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
    )
    found = {}
    for one in BLOCKS:
        try:
            one(state)
            found[one.__name__] = "ok"
        except Exception:
            found[one.__name__] = traceback.format_exc()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def main() -> None:
    root, device = sys.argv[1:]
    if device == "cuda":
        if not torch.cuda.is_available():
            importlib.import_module("tests.pretend.plugin")
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps(run(root, device)))


if __name__ == "__main__":
    main()
