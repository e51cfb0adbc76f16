"""What the adaptors of TorchRec's names refuse, and what they keep of its habits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from emblib.compat import torchrec

CPU = torch.device("cpu")
NO: Any = "no"  # for a flag


def collection() -> torchrec.EmbeddingBagCollection:
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=8, num_embeddings=10, feature_names=[name]
        )
        for name in ("a", "b")
    ]
    return torchrec.EmbeddingBagCollection(tables=configs)


def dense(rate: float = 0.5) -> torchrec.KeyedOptimizerWrapper:
    parameters = dict(nn.Linear(1, 1).named_parameters())
    return torchrec.KeyedOptimizerWrapper(parameters, partial(torch.optim.SGD, lr=rate))


def by_hand(rules: dict[str, Any]) -> torchrec.EmbeddingModuleShardingPlan:
    return torchrec.construct_module_sharding_plan(
        collection(), rules, world_size=1, local_size=1, device_type="cpu"
    )


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (
            lambda: by_hand({"a": torchrec.row_wise, "b": torchrec.row_wise()}),
            "table a: a sharding is the result of a call.*got row_wise",
        ),
        (
            lambda: torchrec.DistributedModelParallel(collection(), plan={"": {}}),  # type: ignore[arg-type]
            "plan must be a ShardingPlan of emblib.compat.torchrec",
        ),
        (lambda: torchrec.QCommsConfig(forward_precision="int3"), "int3"),  # type: ignore[arg-type]
        (
            lambda: torchrec.quantize_embeddings(
                collection(),
                torch.int8,
                False,
                per_table_weight_dtype={"a": torchrec.DataType.INT2},
            ),
            "INT2 is quantised or an integer",
        ),
        (
            lambda: torchrec.quantize_embeddings(
                collection(), torch.int8, False, additional_qconfig_spec_keys=[nn.Linear]
            ),
            "additional_mapping must have the quantised class of each of .*Linear",
        ),
        (
            lambda: torchrec.quantize_inference_model(
                nn.Sequential(collection()), quantization_mapping={"a": nn.Linear}
            ),
            "quantization_mapping must be left out: quantize_embeddings takes one",
        ),
        (
            lambda: torchrec.CombinedOptimizer([dense().wrapped]),  # type: ignore[list-item]
            "a KeyedOptimizer, got SGD: .*KeyedOptimizerWrapper",
        ),
        (
            lambda: torchrec.EmbeddingBagConfig(9, 4, "t", feature_names="user"),
            r"feature_names must be a sequence of names, got 'user'; write \['user'\]",
        ),
        (
            lambda: torchrec.apply_optimizer_in_backward(
                torch.optim.SGD, collection().parameters(), {"learning_rate": 0.1}
            ),
            r"which take \['lr', 'weight_decay'\]",
        ),
        (
            lambda: torchrec.EmbeddingBagCollectionSharder({"bounds_check_mode": 0}),
            r"make the collection with bounds_check=BoundsCheck.FATAL",
        ),
        (
            lambda: torchrec.QCommsConfig(backward_precision=torchrec.CommType.MX4),
            "MX4 must be left out: messages have FP16, BF16, INT8 or FP8",
        ),
        (lambda: torchrec.QCommsConfig(mx4_quantize_dim=32), "mx4_quantize_dim must be left out"),  # type: ignore[arg-type]
        (
            lambda: torchrec.row_wise(num_buckets=4),
            r"num_buckets .*storage=Hash\(\) has no buckets",
        ),  # type: ignore[arg-type]
        (
            lambda: by_hand(
                {
                    "a": torchrec.column_wise([0], device_types=["cpu"]),
                    "b": torchrec.column_wise([0, 0], device_types=["cuda", "cpu"]),
                }
            ),
            r"table b: .* cpu of their ranks, got devices \['cuda', 'cpu'\]; .*MANAGED",
        ),
        (
            lambda: by_hand(
                {"a": torchrec.table_wise(0, "cuda:0"), "b": torchrec.row_wise(([3], "cpu"))}
            ),
            r"table a: .* got devices \['cuda:0'\]",
        ),
        (
            lambda: torchrec.EmbeddingShardingPlanner(plan_loader=object()),  # type: ignore[arg-type]
            r"plan_loader must be left out: .*DistributedModelParallel\(plan=\)",
        ),
        (
            lambda: torchrec.EmbeddingStorageEstimator(
                torchrec.Topology(1, "cpu"), is_inference=True
            ),
            "is_inference must be left out: .*shard_quant_model",
        ),
        (
            lambda: torchrec.ManagedCollisionEmbeddingBagCollectionSharder(
                torchrec.EmbeddingBagCollectionSharder(), fused_params={"learning_rate": 0.5}
            ),
            "fused_params must be those of ebc_sharder",
        ),
        (lambda: torchrec.placement("cuda", 0, 0), "local_size must be >= 1"),
        (lambda: torchrec.get_num_groups(0), "world_size must be >= 1"),
        (lambda: torchrec.EmbeddingsAllToOneReduce(CPU, 0)([]), "at least one tensor"),
        (
            lambda: torchrec.EmbeddingCollectionSharder(use_index_dedup=NO),
            "use_index_dedup must be T",
        ),
        (
            lambda: torchrec.EmbeddingBagCollectionSharder({"gradient_clipping": NO}),
            "gradient_clipping must be True or False",
        ),
        (
            lambda: torchrec.DefaultDataParallelWrapper(params_to_ignore="over"),
            "params_to_ignore must be a sequence of names",
        ),
        (
            lambda: torchrec.ParameterConstraints(sharding_types="row_wise"),
            "sharding_types must be a sequence of names",
        ),
        (
            lambda: torchrec.QuantEmbeddingBagCollectionSharder(shardable_params="t"),
            "shardable_params must be a sequence of names",
        ),
        (lambda: torchrec.Tracer(leaf_modules=NO), "leaf_modules must be a sequence of names"),
        (lambda: torchrec.maybe_td_to_kjt({}, "ab"), "keys must be a sequence of names"),
        (lambda: torchrec.set_ec_index_dedup(NO), "val must be True or False"),
        (lambda: torchrec.set_gradient_division(NO), "val must be True or False"),
        (lambda: torchrec.QCommsConfig(fp8_bwd_uses_143=NO), "fp8_bwd_uses_143 must be True"),
        (lambda: torchrec.MLP(2, [2], bias=NO), "bias must be True or False"),
        (
            lambda: torchrec.quantize_embeddings(collection(), torch.int8, NO),
            "inplace must be True",
        ),
        (
            lambda: torchrec.DistributedModelParallel(collection(), init_data_parallel=NO),
            "init_data_parallel must be True or False",
        ),
    ],
)
def test_refused(call: Callable[[], object], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        call()


def test_words_for_precisions_are_not_dropped() -> None:
    config = torchrec.QCommsConfig(backward_precision="bf16")  # type: ignore[arg-type]
    assert config.backward_precision is torchrec.CommType.BF16


def test_a_warm_up_has_the_rate_of_torchrec() -> None:
    stages = [torchrec.WarmupStage(torchrec.WarmupPolicy.CONSTANT, max_iters=2, value=0.5)]
    assert torchrec.WarmupOptimizer(dense(), stages).param_groups[0]["lr"] == 0.1 * 0.5
    assert torchrec.WarmupOptimizer(dense(), stages, lr=2.0).param_groups[0]["lr"] == 1.0


def test_names_of_arguments_are_those_of_torchrec() -> None:
    batch = torchrec.KeyedJaggedTensor(["a"], torch.tensor([3]), lengths=torch.tensor([1]))
    target = torchrec.KeyedJaggedTensor.empty_like(kjt=batch, device="cpu")
    assert target.copy_(kjt=batch).values().tolist() == [3]
    target = torchrec.JaggedTensor.empty_like(jt=batch["a"], device="cpu")
    assert target.copy_(jt=batch["a"]).values().tolist() == [3]
    assert torchrec.NoWait(obj=1).wait() == torchrec.LazyNoWait(obj=1).wait() == 1
    model = nn.Linear(1, 1)
    pipeline = torchrec.TrainPipelineBase(
        model, dense(), torch.device("cpu"), custom_model_fwd=lambda batch: (model(batch).sum(), 7)
    )
    assert pipeline.progress(dataloader_iter=iter([torch.ones(1, 1)])) == 7
    marked = nn.Embedding(2, 2)
    torchrec.apply_optimizer_in_backward(torch.optim.SGD, marked.parameters(), {"lr": 0.1})
    names = [
        dict(torchrec.in_backward_optimizer_filter(marked.named_parameters(), include))
        for include in (True, False)
    ]
    assert [list(found) for found in names] == [["weight"], []]


def test_the_state_of_a_warm_up_has_a_name() -> None:
    stages = [torchrec.WarmupStage(torchrec.WarmupPolicy.LINEAR, 9, 0.5)]
    inner = torchrec.WarmupOptimizer(dense(), stages)
    outer = torchrec.WarmupOptimizer(inner, stages, param_name="__outer")
    outer.step()
    state = outer.state_dict()["state"]
    assert state["__warmup"]["warmup"].tolist() == state["__outer"]["warmup"].tolist() == [1, 0]
    loaded = torchrec.WarmupOptimizer(
        torchrec.WarmupOptimizer(dense(), stages), stages, param_name="__outer"
    )
    loaded.load_state_dict(outer.state_dict())
    assert loaded.param_groups[0]["lr"] == outer.param_groups[0]["lr"]
    for taken, text in (("__warmup", "another param_name"), ("weight", "name of a parameter")):
        with pytest.raises(ValueError, match=text):
            torchrec.WarmupOptimizer(inner, stages, param_name=taken)


def test_records_have_the_default_range_of_initial_weights() -> None:
    record = torchrec.EmbeddingTableConfig(num_embeddings=25, embedding_dim=4)
    assert (record.get_weight_init_min(), record.get_weight_init_max()) == (-0.2, 0.2)
    record.weight_init_min, record.weight_init_max = 0.0, 1.0
    assert (record.get_weight_init_min(), record.get_weight_init_max()) == (0.0, 1.0)


def test_plans_take_members_of_enums_and_shardings_of_emblib() -> None:
    config = torchrec.EmbeddingBagConfig(10, 4, "t", feature_names=["a"])
    collection = torchrec.EmbeddingBagCollection(tables=[config])
    kernels, types = torchrec.EmbeddingComputeKernel, torchrec.ShardingType
    rules = {"t": torchrec.table_wise(rank=0)}
    sizes = {"local_size": 1, "world_size": 1}
    spec = torchrec.construct_module_sharding_plan(collection, rules, **sizes)["t"].sharding_spec
    cache = torchrec.CacheParams(load_factor=0.5)
    cached = torchrec.ParameterSharding(
        types.TABLE_WISE, kernels.FUSED_UVM_CACHING, [0], spec, cache
    )
    assert (cached.sharding_type, cached.compute_kernel) == ("table_wise", "fused_uvm_caching")
    assert cached.to_emblib().storage.cache.load_factor == 0.5
    dense = torchrec.ParameterSharding(types.TABLE_WISE, kernels.DENSE, [0], spec)
    sharder = torchrec.EmbeddingBagCollectionSharder({"learning_rate": 0.1})
    with pytest.raises(ValueError, match="the plan says DENSE"):
        sharder.shard(collection, {"t": dense}, torchrec.ShardingEnv.from_local(1, 0))
    sharded = torchrec.shard(collection, {"t": dense.to_emblib()})
    assert isinstance(sharded, torchrec.ShardedEmbeddingBagCollection)


def test_a_plan_for_gpus_needs_none() -> None:
    topology = torchrec.Topology(world_size=2, compute_device="cuda", hbm_cap=1 << 30)
    assert torchrec.FixedAbsoluteStorageReservation.from_gb(0.5).reservation.nbytes == 1 << 29
    assert topology.native.device == "cuda"
    assert topology.native.memory == 1 << 30
    assert topology.native.host_memory == torchrec.Topology(2, "cpu").native.memory
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="32 GiB of GPU memory per rank.*; pass hbm_cap"):
            topology = torchrec.Topology(world_size=2, compute_device="cuda")
        assert topology.native.memory == 32 << 30


def test_plans_have_the_types_that_a_sharder_of_the_program_allows() -> None:
    class ByColumns(torchrec.EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [torchrec.ShardingType.COLUMN_WISE.value]

    class InHostMemory(torchrec.EmbeddingBagCollectionSharder):
        def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
            return [torchrec.EmbeddingComputeKernel.FUSED_UVM.value]

    collection = torchrec.EmbeddingBagCollection([torchrec.EmbeddingBagConfig(100, 64, name="t")])
    topology = torchrec.Topology(world_size=2, compute_device="cpu")
    made = torchrec.EmbeddingShardingPlanner(topology).plan(collection, [ByColumns()])
    assert made.plan[""]["t"].sharding_type == "column_wise"
    with pytest.raises(ValueError, match=r"compute_kernels=\['fused_uvm'\]"):
        torchrec.EmbeddingShardingPlanner(topology).plan(collection, [InHostMemory()])
    by_rows = torchrec.ParameterConstraints(sharding_types=["row_wise"])
    planner = torchrec.EmbeddingShardingPlanner(topology, constraints={"t": by_rows})
    with pytest.raises(ValueError, match=r"sharding_types\(\) of ByColumns have no"):
        planner.plan(collection, [ByColumns()])
