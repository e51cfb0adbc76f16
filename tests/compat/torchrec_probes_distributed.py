"""What each name of `torchrec.distributed` does, as small programs of one process.

See `tests/compat/torchrec_probes.py`. What several ranks do is in `test_torchrec_gaps.py` and
`test_torchrec_comms.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.torchrec_probes import bags, batch, config, plan, probe, sequences


def env(rec: Any) -> Any:
    return rec.ShardingEnv.from_local(1, 0)


# Types


@probe("Awaitable NoWait LazyAwaitable LazyNoWait")
def awaitables(rec: Any) -> None:
    ready = rec.NoWait(3)
    assert isinstance(ready, rec.Awaitable)
    ready.callbacks.append(lambda value: value + 1)
    assert ready.wait() == 4
    lazy = rec.LazyNoWait(torch.ones(2))
    assert isinstance(lazy, rec.LazyAwaitable)
    assert torch.add(lazy, 1).tolist() == [2, 2]


@probe("compute_kernel_to_embedding_location")
def locations(rec: Any) -> None:
    kernels = rec.EmbeddingComputeKernel
    named = {kernels.FUSED_UVM: "MANAGED", kernels.DENSE: "DEVICE"}
    for kernel, name in named.items():
        assert rec.compute_kernel_to_embedding_location(kernel).name == name


@probe("ShardingType EmbeddingComputeKernel ComputeKernel ParameterStorage OptimType CommOp")
def enums(rec: Any) -> None:
    assert rec.ShardingType("row_wise") is rec.ShardingType.ROW_WISE
    assert rec.EmbeddingComputeKernel.FUSED_UVM_CACHING.value == "fused_uvm_caching"
    assert rec.ComputeKernel.DEFAULT.value == "default"
    assert {one.value for one in rec.ParameterStorage} >= {"hbm", "ddr"}
    assert rec.OptimType("ROWWISE_ADAGRAD").name == "ROWWISE_ADAGRAD"
    assert len(rec.CommOp) == 3


@probe("BoundsCheckMode CacheAlgorithm CacheParams")
def options_of_tables(rec: Any) -> None:
    assert rec.BoundsCheckMode.WARNING.value == 1
    given = rec.CacheParams(algorithm=rec.CacheAlgorithm.LFU, load_factor=0.5)
    one = rec.ParameterSharding("data_parallel", "fused_uvm_caching", cache_params=given)
    cache = one.to_emblib().storage.cache
    assert (cache.policy.value, cache.load_factor) == ("lfu", 0.5)
    with pytest.raises(ValueError, match="stats of CacheParams must be None"):
        rec.CacheParams(stats=1)
    passes = SimpleNamespace(num_passes=3, min_splitable_pass_size=100)
    given = rec.CacheParams(
        reserved_memory=1000.0, precision=rec.DataType.FP16, multipass_prefetch_config=passes
    )
    cache = given.storage().cache
    assert (cache.reserved_bytes, cache.dtype) == (1000, torch.float16)
    assert (cache.passes.passes, cache.passes.min_lookups) == (3, 100)
    assert rec.CacheParams.of(cache).storage() == given.storage()
    for name, value in (("bounds_check_mode", rec.BoundsCheckMode.FATAL), ("output_dtype", 1)):
        with pytest.raises(ValueError, match=f"{name} of ParameterSharding must be left out"):
            rec.ParameterSharding("table_wise", **{name: value})


@probe("ParameterSharding EnumerableShardingSpec ShardMetadata")
def shards(rec: Any) -> None:
    halves = [rec.ShardMetadata([10 * r, 0], [10, 8], f"rank:{r}/cpu") for r in range(2)]
    one = rec.ParameterSharding("row_wise", "fused", [0, 1], rec.EnumerableShardingSpec(halves))
    assert [shard.rank for shard in one.to_emblib().shards] == [0, 1]
    assert [shard.placement.rank() for shard in one.sharding_spec.shards] == [0, 1]
    assert halves[1].placement.device() == torch.device("cpu")
    assert halves[1].placement == "rank:1/cpu"
    assert [shard.rows for shard in one.to_emblib().shards] == [(0, 10), (10, 20)]


@probe("ShardingPlan EmbeddingModuleShardingPlan ModuleShardingPlan")
def plans(rec: Any) -> None:
    tables = plan(rec, bags(rec))
    assert isinstance(tables, rec.EmbeddingModuleShardingPlan)
    assert isinstance(tables, rec.ModuleShardingPlan)
    whole = rec.ShardingPlan({"ebc": tables})
    assert whole.get_plan_for_module("ebc") is tables
    assert whole.get_plan_for_module("other") is None
    assert "table_wise" in str(whole)


@probe("GenericMeta")
def metaclass(rec: Any) -> None:
    assert isinstance(int, rec.GenericMeta)


@probe("NullShardingContext NullShardedModuleContext")
def empty_contexts(rec: Any) -> None:
    for kind in (rec.NullShardingContext, rec.NullShardedModuleContext):
        assert kind().record_stream(None) is None


@probe("rank_device placement sharder_name")
def small_functions(rec: Any) -> None:
    assert rec.rank_device("cuda", 1) == torch.device("cuda:1")
    assert rec.rank_device("cpu", 1) == torch.device("cpu")
    assert rec.placement("cpu", 3, 2) == "rank:3/cpu"
    assert rec.sharder_name(nn.Linear) == "torch.nn.modules.linear.Linear"


@probe("ShardingEnv")
def environments(rec: Any) -> None:
    one = rec.ShardingEnv.from_local(world_size=3, rank=1)
    assert (one.world_size, one.rank, one.process_group) == (3, 1, None)
    with pytest.raises(ValueError, match="ShardedTable"):
        rec.ShardingEnv(1, 0, output_dtensor=True)


# Utilities


@probe("merge_fused_params")
def fused_params(rec: Any) -> None:
    merged = rec.merge_fused_params({"learning_rate": 0.1, "eps": 1.0}, {"lr": 0.5})
    assert (merged["learning_rate"], merged["eps"]) == (0.5, 1.0)


@probe("init_parameters")
def models(rec: Any) -> None:
    collection = rec.EmbeddingBagCollection(tables=bags(rec).embedding_bag_configs(), device="meta")
    over = nn.Sequential(collection, nn.Linear(2, 2, device="meta"))
    rec.init_parameters(over, torch.device("cpu"))
    assert all(weight.abs().sum() > 0 for weight in over.parameters())


@probe("state_dict_gather state_dict_to_device ShardedTensor")
def states_of_sharded_tables(rec: Any) -> None:
    collection = bags(rec)
    sharded = rec.EmbeddingBagCollectionSharder().shard(collection, plan(rec, collection), env(rec))
    key, expected = "embedding_bags.a.weight", collection.state_dict()["embedding_bags.a.weight"]
    value = sharded.state_dict()[key]
    assert isinstance(value, rec.ShardedTensor)
    assert not isinstance(expected, rec.ShardedTensor)
    moved = rec.state_dict_to_device({key: value}, None, torch.device("cpu"))
    assert isinstance(moved[key], rec.ShardedTensor)
    whole = {key: torch.zeros(20, 8)}
    rec.state_dict_gather(moved, whole)
    assert torch.equal(whole[key], expected)
    (shard,) = value.local_shards()
    assert torch.equal(shard.tensor, expected)
    assert (shard.metadata.shard_offsets, shard.metadata.shard_sizes) == ([0, 0], [20, 8])
    assert value.metadata().shards_metadata == [shard.metadata]
    assert shard.metadata.placement.rank() == 0
    assert value.metadata().size == value.shape
    value.copy_(torch.ones(20, 8))
    assert value.local_tensor().eq(1).all()
    gathered = torch.zeros(value.size())
    value.gather(0, out=gathered)
    assert gathered.eq(1).all()
    with pytest.raises(ValueError, match="out of rank 0 must have the size"):
        value.gather()
    assert sharded.state_dict()[key].full_tensor().eq(1).all()
    with pytest.raises(ValueError, match="the whole table"):
        value.copy_(torch.ones(20, 7))


@probe("invoke_on_rank_and_broadcast_result is_leader run_on_leader")
def leaders(rec: Any) -> None:
    assert rec.is_leader(None)
    assert rec.invoke_on_rank_and_broadcast_result(None, 0, max, 2, 3) == 3

    @rec.run_on_leader(None, 0)  # type: ignore[untyped-decorator]
    def total(*numbers: int) -> int:
        return sum(numbers)

    assert total(1, 2) == 3


@probe("get_local_size get_local_rank get_group_rank get_num_groups")
def nodes(rec: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        assert rec.get_local_size(8) == 2
        assert rec.get_local_rank(8, 5) == 1
        assert rec.get_group_rank(8, 5) == 2
        assert rec.get_num_groups(8) == 4
    assert rec.get_local_size() == 1


@probe("intra_and_cross_node_pg")
def groups_of_nodes(rec: Any) -> None:
    assert rec.intra_and_cross_node_pg(torch.device("meta")) == (None, None)
    with pytest.raises(ValueError, match="all processes"):
        rec.intra_and_cross_node_pg()


# Communication


@probe("set_gradient_division get_gradient_division")
def flags(rec: Any) -> None:
    before = rec.get_gradient_division()
    rec.set_gradient_division(not before)
    assert rec.get_gradient_division() is not before
    rec.set_gradient_division(before)
    assert rec.get_gradient_division() is before


@probe(
    "alltoall_pooled variable_batch_alltoall_pooled alltoall_sequence reduce_scatter_pooled "
    "reduce_scatter_base_pooled reduce_scatter_v_pooled all_gather_base_pooled"
)
def collectives(rec: Any) -> None:
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    order = torch.tensor([1, 0])
    sequence = rec.alltoall_sequence(rows, order, order, torch.tensor([[2], [1]]), [3], [3])
    found = {
        "pooled": rec.alltoall_pooled(rows, [3], [2]),
        "scatter": rec.reduce_scatter_pooled([rows]),
        "base": rec.reduce_scatter_base_pooled(rows),
        "v": rec.reduce_scatter_v_pooled(rows, [3]),
        "gather": rec.all_gather_base_pooled(rows),
    }
    assert all(torch.equal(pending.wait(), rows) for pending in found.values())
    assert torch.equal(sequence.wait(), rows[[2, 0, 1]])
    flat = rec.variable_batch_alltoall_pooled(rows.view(-1), [[3]], [3], [[2]])
    flat.wait().sum().backward()
    assert torch.equal(rows.grad, torch.ones(3, 2))


@probe(
    "PooledEmbeddingsAllToAll PooledEmbeddingsAwaitable PooledEmbeddingsReduceScatter "
    "PooledEmbeddingsAllGather VariableBatchPooledEmbeddingsAllToAll SequenceEmbeddingsAllToAll "
    "SequenceEmbeddingsAwaitable"
)
def modules_of_collectives(rec: Any) -> None:
    rows = torch.arange(6.0).view(3, 2)
    doubled = rec.PooledEmbeddingsAllToAll(None, [2], callbacks=[lambda t: 2 * t])
    pending = doubled(rows)
    assert isinstance(pending, rec.PooledEmbeddingsAwaitable)
    assert torch.equal(pending.wait(), 2 * rows)
    assert torch.equal(rec.PooledEmbeddingsReduceScatter(None)(rows).wait(), rows)
    assert torch.equal(rec.PooledEmbeddingsAllGather(None)(rows).wait(), rows)
    varied = rec.VariableBatchPooledEmbeddingsAllToAll(None, [[2]])
    assert torch.equal(varied(rows.view(-1), [[3]], [3]).wait(), rows.view(-1))
    sent = rec.SequenceEmbeddingsAllToAll(None, features_per_rank=[1])
    back = sent(rows, torch.tensor([[3]]), [3], [3], torch.tensor([2, 1, 0]))
    assert isinstance(back, rec.SequenceEmbeddingsAwaitable)
    assert torch.equal(back.wait(), rows.flip(0))


@probe("KJTAllToAll")
def batches_to_all(rec: Any) -> None:
    found = rec.KJTAllToAll(None, splits=[2])(batch(rec)).wait().wait()
    assert found.keys() == ["a", "b"]
    assert torch.equal(found.values(), batch(rec).values())
    with pytest.raises(ValueError, match="stagger"):
        rec.KJTAllToAll(None, splits=[2], stagger=2)


@probe("KJTOneToAll KJTList ListOfKJTList")
def batches_to_devices(rec: Any) -> None:
    made = rec.KJTOneToAll([1, 1], world_size=2, device=torch.device("meta"))
    parts = made(batch(rec))
    assert isinstance(parts, rec.KJTList)
    assert [part.keys() for part in parts] == [["a"], ["b"]]
    assert len(rec.ListOfKJTList([parts, parts])) == 2


@probe("EmbeddingsAllToOne EmbeddingsAllToOneReduce SeqEmbeddingsAllToOne")
def rows_to_one_device(rec: Any) -> None:
    cpu, rows = torch.device("cpu"), [torch.ones(1, 2), torch.full((1, 2), 2.0)]
    assert rec.EmbeddingsAllToOne(cpu, 2, cat_dim=1)(rows).tolist() == [[1, 1, 2, 2]]
    assert rec.EmbeddingsAllToOneReduce(cpu, 2)(rows).tolist() == [[3, 3]]
    assert [t.tolist() for t in rec.SeqEmbeddingsAllToOne(cpu, 2)(rows)] == [[[1, 1]], [[2, 2]]]


@probe(
    "construct_output_kt embeddings_cat_empty_rank_handle fx_wrap_tensor_view2d "
    "CommOpGradientScaling"
)
def helpers_of_lookups(rec: Any) -> None:
    kt = rec.construct_output_kt([torch.ones(2, 1), torch.zeros(2, 2)], ["a", "b"], [1, 2])
    assert kt["b"].tolist() == [[0, 0], [0, 0]]
    dummy = torch.ones(1)
    assert rec.embeddings_cat_empty_rank_handle([], dummy) is dummy
    assert rec.fx_wrap_tensor_view2d(torch.arange(4), 2, 2).shape == (2, 2)
    given = torch.ones(2, requires_grad=True)
    rec.CommOpGradientScaling.apply(given, 3).backward(torch.ones(2))
    assert given.grad.tolist() == [3, 3]


@probe(
    "CommType QCommsConfig get_qcomm_codecs_registry QuantizedCommCodecs "
    "QuantizedCommCodec NoOpQuantizedCommCodec"
)
def codecs(rec: Any) -> None:
    given = rec.QCommsConfig(forward_precision=rec.CommType.FP16)
    registry = rec.get_qcomm_codecs_registry(given)
    assert set(registry) == {op.name for op in rec.CommOp}
    found = registry["POOLED_EMBEDDINGS_ALL_TO_ALL"]
    assert isinstance(found, rec.QuantizedCommCodecs)
    both = rec.QuantizedCommCodecs()
    both.forward = found.forward  # TorchRec's get_qcomm_codecs assigns them
    assert both.forward is not rec.QuantizedCommCodecs().forward
    assert isinstance(found.forward, rec.QuantizedCommCodec)
    assert isinstance(rec.NoOpQuantizedCommCodec(), rec.QuantizedCommCodec)
    for codec, dtype in ((found.forward, torch.float16), (found.backward, torch.float32)):
        context = codec.create_context()
        message = codec.encode(torch.ones(2), context)
        assert message.dtype is codec.quantized_dtype is dtype
        assert message.numel() == codec.calc_quantized_size(2, context)
        assert codec.decode(message, context).tolist() == [1.0, 1.0]


# Sharded collections


def trained(rec: Any, sharded: Any, features: Any) -> bool:
    """Whether backward changes a table."""
    before = {name: value.full_tensor() for name, value in sharded.state_dict().items()}
    before = {name: value.clone() for name, value in before.items()}
    out = sharded(features).wait()
    rows = next(iter(out.values())).values() if isinstance(out, dict) else out.values()
    rows.sum().backward()
    after = {name: value.full_tensor() for name, value in sharded.state_dict().items()}
    return any(not torch.equal(after[name], value) for name, value in before.items())


@probe(
    "EmbeddingBagCollectionSharder ShardedEmbeddingBagCollection EmbeddingBagCollectionContext "
    "ShardedModule ShardedEmbeddingModule ModuleSharder BaseEmbeddingSharder"
)
def sharded_bags(rec: Any) -> None:
    collection = bags(rec)
    sharder = rec.EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})
    assert isinstance(sharder, rec.ModuleSharder)
    assert isinstance(sharder, rec.BaseEmbeddingSharder)
    assert list(sharder.shardable_parameters(collection)) == ["a", "b"]
    used = sharder.storage_usage(collection.embedding_bags["a"].weight, "cuda", "fused_uvm")
    assert used == {"ddr": 20 * 8 * 4}
    expected = collection(batch(rec)).values().detach().clone()
    sharded = sharder.shard(collection, plan(rec, collection), env(rec))
    assert isinstance(sharded, rec.ShardedEmbeddingBagCollection)
    assert isinstance(sharded, rec.ShardedModule)
    assert isinstance(sharded, rec.ShardedEmbeddingModule)
    ctx = sharded.create_context()
    assert isinstance(ctx, rec.EmbeddingBagCollectionContext)
    received = sharded.input_dist(ctx, batch(rec)).wait().wait()
    out = sharded.output_dist(ctx, sharded.compute(ctx, received))
    torch.testing.assert_close(out.wait().values(), expected)
    again = sharded.compute_and_output_dist(sharded.create_context(), received)
    torch.testing.assert_close(again.wait().values(), expected)
    assert trained(rec, sharded, batch(rec))
    with pytest.raises(ValueError, match="the context that compute was called with"):
        sharded.output_dist(sharded.create_context(), None)


@probe(
    "EmbeddingCollectionSharder ShardedEmbeddingCollection EmbeddingCollectionContext "
    "set_ec_index_dedup get_ec_index_dedup"
)
def sharded_sequences(rec: Any) -> None:
    collection = sequences(rec)
    features = rec.KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([3, 3, 3, 1, 2, 1]),
        lengths=torch.tensor([1, 2, 0, 3]),
    )
    expected = {key: j.values().detach().clone() for key, j in collection(features).items()}
    tables = plan(rec, collection)
    for dedup in (False, True):
        sharder = rec.EmbeddingCollectionSharder(use_index_dedup=dedup)
        sharded = sharder.shard(collection, tables, env(rec))
        assert isinstance(sharded, rec.ShardedEmbeddingCollection)
        assert sharded.dedup is dedup
        ctx = sharded.create_context()
        assert isinstance(ctx, rec.EmbeddingCollectionContext)
        received = sharded.input_dist(ctx, features).wait().wait()
        assert received.batches[0].ids.numel() == (3 if dedup else 6)
        found = sharded.compute_and_output_dist(ctx, received).wait()
        assert found["b"].lengths().tolist() == [0, 3]
        assert all(torch.equal(found[key].values(), expected[key]) for key in expected)
    rec.set_ec_index_dedup(True)
    try:
        assert rec.get_ec_index_dedup()
        made = rec.EmbeddingCollectionSharder().shard(collection, tables, env(rec))
        assert made.dedup
    finally:
        rec.set_ec_index_dedup(False)


@probe("FusedEmbeddingBagCollectionSharder")
def sharded_fused(rec: Any) -> None:
    made = rec.FusedEmbeddingBagCollection([config(rec)], torch.optim.SGD, {"lr": 1.0})
    sharded = rec.FusedEmbeddingBagCollectionSharder().shard(made, plan(rec, made), env(rec))
    assert trained(rec, sharded, batch(rec, "t"))


@probe(
    "table_wise row_wise column_wise table_row_wise data_parallel apply_to_all "
    "construct_module_sharding_plan"
)
def rules(rec: Any) -> None:
    collection = bags(rec, "a")
    rules = {
        "table_wise": rec.table_wise(rank=1),
        "row_wise": rec.row_wise(),
        "column_wise": rec.column_wise(ranks=[0, 1]),
        "table_row_wise": rec.table_row_wise(host_index=1),
        "data_parallel": rec.data_parallel(),
    }
    found = {}
    for name, rule in rules.items():
        made = rec.construct_module_sharding_plan(
            collection,
            rec.apply_to_all(collection, rule),
            local_size=2,
            world_size=4,
            device_type="cpu",
        )["a"]
        assert made.sharding_type == name
        spec = made.sharding_spec
        found[name] = [] if spec is None else [tuple(s.shard_sizes) for s in spec.shards]
    assert found == {
        "table_wise": [(20, 8)],
        "row_wise": [(5, 8)] * 4,
        "column_wise": [(20, 4)] * 2,
        "table_row_wise": [(10, 8)] * 2,
        "data_parallel": [],
    }


@probe("grid_shard")
def grid(rec: Any) -> None:
    rule = rec.grid_shard(host_indexes=[0, 1])
    made = plan(rec, bags(rec, "a"), rule, local_size=2, world_size=4)["a"]
    assert [tuple(s.shard_sizes) for s in made.sharding_spec.shards] == [(10, 4)] * 4
    assert made.ranks == [0, 1, 2, 3]


@probe("table_column_wise")
def columns_of_a_host(rec: Any) -> None:
    rule = rec.table_column_wise(host_index=1)
    made = plan(rec, bags(rec, "a"), rule, local_size=2, world_size=4)["a"]
    assert (made.sharding_type, made.ranks) == ("table_column_wise", [2, 3])


@probe("shard shard_modules _shard_modules get_default_sharders get_module_to_default_sharders")
def sharding_calls(rec: Any) -> None:
    collection = bags(rec)
    expected = collection(batch(rec)).values()
    own = plan(rec, collection)
    for given in (rec.row_wise(), own, {"a": rec.row_wise(), "b": own["b"]}):
        made = rec.shard(collection, given, env(rec))
        torch.testing.assert_close(made(batch(rec)).wait().values(), expected)
    with pytest.raises(TypeError, match="no sharder of Linear"):
        rec.shard(nn.Linear(1, 1), {}, env(rec))
    whole = rec.ShardingPlan({"0": own})
    for call in (rec.shard_modules, rec._shard_modules):
        model = call(nn.Sequential(collection), env(rec), plan=whole)
        assert isinstance(model[0], rec.ShardedModule)
        only = {"a": rec.ParameterConstraints(sharding_types=["row_wise"])}
        planner = rec.EmbeddingShardingPlanner(constraints=only)
        planned = call(nn.Sequential(collection), env(rec), planner=planner)
        assert isinstance(planned[0], rec.ShardedModule)
        torch.testing.assert_close(model[0](batch(rec)).wait().values(), expected)
    assert len(rec.get_default_sharders()) == len(rec.get_module_to_default_sharders()) >= 4


@probe(
    "DistributedModelParallel DataParallelWrapper DefaultDataParallelWrapper get_module "
    "get_unwrapped_module"
)
def model_parallel(rec: Any) -> None:
    wrapper = rec.DefaultDataParallelWrapper(allreduce_comm_precision="bf16")
    assert isinstance(wrapper, rec.DataParallelWrapper)
    assert wrapper == rec.DefaultDataParallelWrapper(allreduce_comm_precision="bf16")
    assert rec.DefaultDataParallelWrapper() != rec.DefaultDataParallelWrapper(
        params_to_ignore=["over.bias"]
    )
    model = nn.ModuleDict({"ebc": bags(rec), "over": nn.Linear(16, 1)})
    parallel = rec.DistributedModelParallel(model, env(rec), data_parallel_wrapper=wrapper)
    inner = rec.get_unwrapped_module(parallel)
    assert rec.get_module(parallel) is inner is model
    assert set(dict(parallel.bare_named_parameters())) == {
        "ebc.embedding_bags.a.weight",
        "ebc.embedding_bags.b.weight",
        "over.weight",
        "over.bias",
    }
    assert parallel.plan.get_plan_for_module("ebc")["a"].ranks == [0]
    assert parallel.sparse_grad_parameter_names() == []
    with pytest.raises(ValueError, match="allreduce_comm_precision must be"):
        rec.DefaultDataParallelWrapper(allreduce_comm_precision="int8")
    with pytest.raises(ValueError, match="model_tracker_configs must be None"):
        rec.DistributedModelParallel(model, env(rec), model_tracker_configs=1)


# Planner


@probe("EmbeddingEnumerator EmbeddingPerfEstimator EmbeddingStorageEstimator")
def enumerator(rec: Any) -> None:
    topology = rec.Topology(world_size=1, compute_device="cpu", ddr_cap=1 << 20)
    given = {"a": rec.ParameterConstraints(sharding_types=["row_wise"])}
    made = rec.EmbeddingEnumerator(
        topology=topology,
        batch_size=4,
        constraints=given,
        estimator=[rec.EmbeddingPerfEstimator(topology), rec.EmbeddingStorageEstimator(topology)],
    )
    same = rec.Topology(world_size=1, compute_device="cpu", ddr_cap=1 << 20)
    found = rec.EmbeddingShardingPlanner(same, enumerator=made).plan(bags(rec), [])
    assert found.plan[""]["a"].sharding_type == "row_wise"
    with pytest.raises(ValueError, match="the same batch_size"):
        rec.EmbeddingShardingPlanner(topology, batch_size=8, enumerator=made)
    with pytest.raises(ValueError, match=r"estimator must be left out.*EMBLIB_AS_FBGEMM=1"):
        rec.EmbeddingEnumerator(topology, estimator=object())
    smaller = rec.EmbeddingPerfEstimator(rec.Topology(1, "cpu", ddr_cap=1 << 10))
    with pytest.raises(ValueError, match="the same topology"):
        rec.EmbeddingEnumerator(topology, estimator=smaller)
    constrained = rec.EmbeddingStorageEstimator(topology, given)
    assert rec.EmbeddingEnumerator(topology, estimator=constrained).constraints == given
    with pytest.raises(NotImplementedError, match="collective_plan"):
        made.enumerate(bags(rec), [])


@probe("EmbeddingShardingPlanner EmbeddingPlannerBase ShardingPlanner Topology PlannerError")
def planner(rec: Any) -> None:
    topology = rec.Topology(world_size=2, compute_device="cpu", ddr_cap=1 << 20)
    seen = []

    def changed(found: Any) -> Any:
        seen.append(found)
        return rec.ShardingPlan({"": found.plan[""]})

    made = rec.EmbeddingShardingPlanner(topology=topology, callbacks=[changed])
    assert isinstance(made, rec.EmbeddingPlannerBase)
    assert isinstance(made, rec.ShardingPlanner)
    collection = bags(rec)
    found = made.plan(collection, [rec.EmbeddingBagCollectionSharder()])
    assert found is not seen[0]
    assert set(found.plan[""]) == {"a", "b"}
    with pytest.raises(TypeError, match="must return the ShardingPlan"):
        rec.EmbeddingShardingPlanner(topology=topology, callbacks=[lambda _: None]).plan(
            collection, []
        )
    with pytest.raises(ValueError, match="proposer must be left out"):
        rec.EmbeddingShardingPlanner(topology=topology, proposer=object())
    rates = {"intra_host_bw": 6e8, "inter_host_bw": 1.3e7, "hbm_to_ddr_mem_bw": 3e7}
    found = rec.Topology(2, "cpu", **rates).native.calibration
    assert (found.link_bytes_per_s, found.network_bytes_per_s) == (6e11, 1.3e10)
    assert found.host_bytes_per_s == 3e10
    with pytest.raises(ValueError, match=r"hbm_mem_bw must be left out.*EMBLIB_AS_FBGEMM=1"):
        rec.Topology(2, "cpu", hbm_mem_bw=1.0)
    small = rec.Topology(world_size=1, compute_device="cpu", ddr_cap=100)
    with pytest.raises(rec.PlannerError):
        rec.EmbeddingShardingPlanner(topology=small).plan(collection, [])


@probe(
    "ParameterConstraints StorageReservation FixedPercentageStorageReservation "
    "FixedAbsoluteStorageReservation HeuristicalStorageReservation InferenceStorageReservation"
)
def constraints(rec: Any) -> None:
    rule = rec.ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[3.0])
    topology = rec.Topology(world_size=2, compute_device="cpu", ddr_cap=1 << 20)
    reserved = (
        rec.FixedPercentageStorageReservation(0.2),
        rec.FixedAbsoluteStorageReservation(1000),
        rec.HeuristicalStorageReservation(0.2),
        rec.InferenceStorageReservation(0.2, dense_tensor_estimate=10),
    )
    for one in reserved:
        assert isinstance(one, rec.StorageReservation)
        made = rec.EmbeddingShardingPlanner(
            topology=topology, constraints={"a": rule}, storage_reservation=one
        )
        found = made.plan(bags(rec), []).plan[""]
        assert found["a"].sharding_type == "row_wise"
    all_of_it = rec.FixedAbsoluteStorageReservation((1 << 20) - 100)
    with pytest.raises(rec.PlannerError):
        rec.EmbeddingShardingPlanner(topology=topology, storage_reservation=all_of_it).plan(
            bags(rec), []
        )
    with pytest.raises(ValueError, match="key_value_params of ParameterConstraints"):
        rec.ParameterConstraints(key_value_params=1)
    cache = rec.CacheParams(load_factor=0.5)
    with pytest.raises(ValueError, match="FUSED_UVM_CACHING"):
        rec.ParameterConstraints(cache_params=cache)
    cached = rec.ParameterConstraints(compute_kernels=["fused_uvm_caching"], cache_params=cache)
    made = rec.EmbeddingShardingPlanner(topology=topology, constraints={"a": cached})
    found = made.plan(bags(rec), []).plan[""]["a"]
    assert (found.compute_kernel, found.cache_params.load_factor) == ("fused_uvm_caching", 0.5)


# Pipelines


@probe(
    "TrainPipeline TrainPipelineBase TrainPipelineSparseDist PrefetchTrainPipelineSparseDist "
    "EvalPipelineSparseDist"
)
def pipelines(rec: Any) -> None:
    def model_and_optimizer() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"ebc": bags(rec), "over": nn.Linear(16, 1)})
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(kind: Any, **options: Any) -> list[float]:
        model, optimizer = model_and_optimizer()
        if kind is rec.EvalPipelineSparseDist:
            model.eval()

        def forward(given: Any) -> tuple[Any, Any]:
            loss = model["over"](model["ebc"](given).values()).square().mean()
            return loss, float(loss.detach())

        pipeline = kind(model, optimizer, torch.device("cpu"), custom_model_fwd=forward, **options)
        assert isinstance(pipeline, rec.TrainPipeline)
        assert pipeline._model is model
        assert pipeline._device == torch.device("cpu")
        pipeline.reset()
        left = iter([batch(rec)] * 3)
        found = [pipeline.progress(left) for _ in range(3)]
        with pytest.raises(StopIteration):
            pipeline.progress(left)
        return found

    first = losses(rec.TrainPipelineBase)
    assert first[2] < first[0]
    assert losses(rec.TrainPipelineSparseDist) == first
    assert losses(rec.PrefetchTrainPipelineSparseDist) == first
    assert losses(rec.EvalPipelineSparseDist) == [first[0]] * 3
    with pytest.raises(ValueError, match="apply_jit must be left out"):
        losses(rec.TrainPipelineSparseDist, apply_jit=True)
    with pytest.raises(ValueError, match="context_type must be left out"):
        losses(rec.PrefetchTrainPipelineSparseDist, context_type=int)


# Managed collisions


@probe(
    "MCHManagedCollisionModule ManagedCollisionCollection ManagedCollisionEmbeddingCollection "
    "ManagedCollisionEmbeddingBagCollection ManagedCollisionEmbeddingBagCollectionSharder "
    "ManagedCollisionEmbeddingCollectionSharder LFU_EvictionPolicy LRU_EvictionPolicy "
    "DistanceLFU_EvictionPolicy"
)
def managed_collisions(rec: Any) -> None:
    """Collections and sharders, see `test_torchrec_managed.py` for what they do."""
    tables = {
        "a": rec.LFU_EvictionPolicy(),
        "b": rec.LRU_EvictionPolicy(),
        "c": rec.DistanceLFU_EvictionPolicy(),
    }
    for kind in ("EmbeddingBag", "Embedding"):
        configs = [config(rec, name, f"{kind}Config") for name in tables]
        collection = getattr(rec, f"{kind}Collection")(tables=configs)
        managed = rec.ManagedCollisionCollection(
            {
                name: rec.MCHManagedCollisionModule(20, torch.device("cpu"), policy, 1)
                for name, policy in tables.items()
            },
            configs,
        )
        model = getattr(rec, f"ManagedCollision{kind}Collection")(collection, managed)
        sharder = getattr(rec, f"ManagedCollision{kind}CollectionSharder")()
        assert isinstance(model._embedding_module, sharder.module_type)
        found, remapped = model(batch(rec, *tables))
        assert remapped is None
        assert list(found.keys()) == list(tables)
