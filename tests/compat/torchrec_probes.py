"""What each name of TorchRec's tables, batches, optimizers and inference does, as small programs.

A probe takes the names as attributes of `rec` and asserts what they do. Those whose names all work
as TorchRec's do run over the real one, too (`tests/compat/test_torchrec_names.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from emblib import BoundsCheck

Probe = Callable[[Any], None]
PROBES: dict[tuple[str, ...], Probe] = {}


def probe(names: str) -> Callable[[Probe], Probe]:
    """Register what shows that some names act."""

    def register(function: Probe) -> Probe:
        PROBES[tuple(names.split())] = function
        return function

    return register


def config(rec: Any, name: str = "t", kind: str = "EmbeddingBagConfig", **changes: Any) -> Any:
    return getattr(rec, kind)(
        **{
            "name": name,
            "embedding_dim": 8,
            "num_embeddings": 20,
            "feature_names": [name],
            **changes,
        }
    )


def bags(rec: Any, *names: str, **changes: Any) -> Any:
    tables = [config(rec, name, **changes) for name in names or ("a", "b")]
    return rec.EmbeddingBagCollection(tables=tables)


def sequences(rec: Any, *names: str) -> Any:
    tables = [config(rec, name, "EmbeddingConfig") for name in names or ("a", "b")]
    return rec.EmbeddingCollection(tables=tables)


def batch(rec: Any, *keys: str) -> Any:
    keys = keys or ("a", "b")
    count = 3 * len(keys)
    return rec.KeyedJaggedTensor(
        keys=list(keys),
        values=torch.arange(count) % 20,
        lengths=torch.tensor([1, 2] * len(keys)),
    )


def plan(rec: Any, module: Any, rule: Any = None, **sizes: Any) -> Any:
    one = rec.table_wise(rank=0) if rule is None else rule
    rules = rec.apply_to_all(module, one)
    sizes = {"world_size": 1, "local_size": 1, "device_type": "cpu", **sizes}
    return rec.construct_module_sharding_plan(module, rules, **sizes)


# Types and batches


@probe("DataType data_type_to_dtype dtype_to_data_type")
def data_types(rec: Any) -> None:
    assert rec.data_type_to_dtype(rec.DataType.FP16) is torch.float16
    assert rec.dtype_to_data_type(torch.float32) == rec.DataType.FP32


@probe("PoolingType")
def poolings(rec: Any) -> None:
    assert config(rec, pooling=rec.PoolingType.MEAN).pooling is rec.PoolingType.MEAN
    assert config(rec).pooling is rec.PoolingType.SUM


@probe("EmbeddingBagConfig EmbeddingConfig BaseEmbeddingConfig EmbeddingTableConfig")
def configurations(rec: Any) -> None:
    made = [config(rec, kind=kind) for kind in ("EmbeddingBagConfig", "EmbeddingConfig")]
    assert all(isinstance(one, rec.BaseEmbeddingConfig) for one in made)
    assert all(isinstance(one, rec.EmbeddingTableConfig) for one in made)
    assert (made[0].num_embeddings, made[0].embedding_dim) == (20, 8)


@probe("QuantConfig")
def quantisation_config(rec: Any) -> None:
    made = rec.QuantConfig(activation=int, weight=float)
    assert made == (int, float, None)


@probe("JaggedTensor jt_is_equal")
def jagged_tensor(rec: Any) -> None:
    jt = rec.JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))
    assert jt.to_padded_dense().tolist() == [[0, 0], [1, 2]]
    assert rec.jt_is_equal(jt, rec.JaggedTensor(torch.arange(3), offsets=torch.tensor([0, 1, 3])))
    assert not rec.jt_is_equal(jt, rec.JaggedTensor(torch.arange(3), lengths=torch.tensor([2, 1])))


@probe("KeyedJaggedTensor kjt_is_equal")
def keyed_jagged_tensor(rec: Any) -> None:
    first, second = batch(rec), batch(rec)
    assert rec.kjt_is_equal(first, second)
    assert not rec.kjt_is_equal(first, first.permute([1, 0]))
    known = rec.KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(6),
        lengths=torch.tensor([1, 2, 1, 2]),
        length_per_key=[3, 3],
    )
    assert known["b"].values().tolist() == [3, 4, 5]
    assert known.to(torch.device("cpu"), True).keys() == ["a", "b"]


@probe("KeyedTensor")
def keyed_tensor(rec: Any) -> None:
    first = rec.KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
    second = rec.KeyedTensor(["c"], [1], torch.ones(2, 1))
    one, other = rec.KeyedTensor.regroup([first, second], [["c", "a"], ["b"]])
    assert one.tolist() == [[1, 0], [1, 3]]
    assert other.tolist() == [[1, 2], [4, 5]]
    found = rec.KeyedTensor.regroup_as_dict(
        keyed_tensors=[first, second], groups=[["c", "a"]], keys=["g"]
    )
    assert found["g"].tolist() == [[1, 0], [1, 3]]


@probe("ComputeKJTToJTDict ComputeJTDictToKJT")
def conversions(rec: Any) -> None:
    features = batch(rec)
    jagged = rec.ComputeKJTToJTDict()(features)
    assert jagged["b"].values().tolist() == [3, 4, 5]
    assert rec.kjt_is_equal(rec.ComputeJTDictToKJT()(jagged), features)


@probe("maybe_td_to_kjt")
def nested_tensors(rec: Any) -> None:
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(3), torch.tensor([0, 1, 3]))
    found = rec.maybe_td_to_kjt({"a": nested})
    assert found["a"].lengths().tolist() == [1, 2]
    assert rec.maybe_td_to_kjt(found) is found


@probe("Multistreamable Pipelineable")
def streamable(rec: Any) -> None:
    features = batch(rec)
    assert isinstance(features, rec.Multistreamable)
    assert isinstance(features, rec.Pipelineable)
    assert not isinstance(3, rec.Multistreamable)


@probe("Batch")
def batches(rec: Any) -> None:
    made = rec.Batch(torch.ones(2, 3), batch(rec), torch.zeros(2))
    moved = made.to(torch.device("cpu"), non_blocking=True)
    assert moved.sparse_features.keys() == ["a", "b"]
    assert moved.dense_features.tolist() == [[1, 1, 1]] * 2
    assert moved.labels.tolist() == [0, 0]


# Collections


@probe("EmbeddingBagCollection EmbeddingBagCollectionInterface")
def pooled(rec: Any) -> None:
    made = bags(rec)
    assert isinstance(made, rec.EmbeddingBagCollectionInterface)
    assert not isinstance(nn.Linear(1, 1), rec.EmbeddingBagCollectionInterface)
    out = made(batch(rec))
    assert out.keys() == ["a", "b"]
    assert out.values().shape == (2, 16)


@probe("EmbeddingCollection EmbeddingCollectionInterface get_embedding_names_by_table")
def unpooled(rec: Any) -> None:
    made = sequences(rec)
    assert isinstance(made, rec.EmbeddingCollectionInterface)
    assert made(batch(rec))["b"].values().shape == (3, 8)
    assert made.embedding_dim() == 8
    assert not made.embedding_configs()[0].need_pos
    both = [config(rec, name, "EmbeddingConfig", feature_names=["f", name]) for name in "xy"]
    names = rec.get_embedding_names_by_table(both)
    assert names == [["f@x", "x"], ["f@y", "y"]]


@probe("FusedEmbeddingBagCollection FusedEmbeddingCollection FusedOptimizerModule")
def fused(rec: Any) -> None:
    for made in (
        rec.FusedEmbeddingBagCollection([config(rec)], torch.optim.SGD, {"lr": 1.0}),
        rec.FusedEmbeddingCollection(
            [config(rec, kind="EmbeddingConfig")], torch.optim.SGD, {"lr": 1.0}
        ),
    ):
        assert isinstance(made, rec.FusedOptimizerModule)
        before = {name: value.clone() for name, value in made.state_dict().items()}
        out = made(batch(rec, "t"))
        rows = out.values() if hasattr(out, "length_per_key") else out["t"].values()
        rows.sum().backward()
        after = made.state_dict()
        assert any(not torch.equal(after[name], value) for name, value in before.items())
        assert [group["lr"] for group in made.fused_optimizer().param_groups] == [1.0]
    with pytest.raises(ValueError, match="storage=Dense"):
        rec.FusedEmbeddingBagCollection([config(rec)], torch.optim.SGD, {"lr": 1.0}, location=1)


@probe("fuse_embedding_optimizer")
def fuse(rec: Any) -> None:
    model = nn.Sequential(bags(rec))
    made = rec.fuse_embedding_optimizer(model, rec.RowWiseAdagrad, {"lr": 0.5}, torch.device("cpu"))
    before = made.state_dict()["0.embedding_bags.a.weight"].clone()
    made[0](batch(rec)).values().sum().backward()
    assert not torch.equal(made.state_dict()["0.embedding_bags.a.weight"], before)
    assert isinstance(made[0], rec.FusedEmbeddingBagCollection)


@probe(
    "PositionWeightedModule PositionWeightedProcessor BaseFeatureProcessor "
    "BaseGroupedFeatureProcessor GroupedPositionWeightedModule"
)
def positions(rec: Any) -> None:
    module = rec.PositionWeightedModule(max_feature_lengths={"a": 4})
    assert isinstance(module, rec.BaseFeatureProcessor)
    weighted = module(batch(rec).to_dict())
    assert weighted["a"].weights().tolist() == [1, 1, 1]
    for kind in (rec.PositionWeightedProcessor, rec.GroupedPositionWeightedModule):
        processor = kind(max_feature_lengths={"a": 4, "b": 4})
        assert isinstance(processor, rec.BaseGroupedFeatureProcessor)
        with torch.no_grad():
            processor.position_weights["b"].copy_(torch.arange(4.0))
        assert processor(batch(rec)).weights().tolist() == [1, 1, 1, 0, 0, 1]


@probe("KTRegroupAsDict")
def regroup_as_dict(rec: Any) -> None:
    kt = rec.KeyedTensor(["a", "b"], [1, 1], torch.tensor([[1.0, 2.0]]))
    for data_type, dtype in ((None, torch.float32), (rec.DataType.BF16, torch.bfloat16)):
        made = rec.KTRegroupAsDict(groups=[["b", "a"]], keys=["g"], emb_dtype=data_type)
        found = made([kt])["g"]
        assert found.tolist() == [[2, 1]]
        assert found.dtype is dtype


@probe("MLP Perceptron")
def perceptrons(rec: Any) -> None:
    given = torch.tensor([[1.0, -2.0]])
    layer = rec.Perceptron(2, 3, activation=torch.sigmoid)
    weight = layer.state_dict()["_linear.weight"]
    expected = torch.sigmoid(given @ weight.t() + layer.state_dict()["_linear.bias"])
    torch.testing.assert_close(layer(given), expected)
    for activation in ("relu", "sigmoid", "swish_layernorm", torch.tanh, nn.Softplus):
        made = rec.MLP(2, [4, 3], activation=activation, activation_on_last=False)
        assert "_mlp.1._linear.weight" in made.state_dict()
        assert made(given).shape == (1, 3)
    assert rec.MLP(2, [3])(given).min() >= 0
    with torch.no_grad():
        swish = rec.MLP(2, [2], activation="swish_layernorm")
        out = rec.MLP(2, [2], activation=nn.Identity)
        out.load_state_dict({k: v for k, v in swish.state_dict().items() if "_linear" in k})
        norm = nn.functional.layer_norm(out(given), (2,))
        torch.testing.assert_close(swish(given), out(given) * torch.sigmoid(norm))


# Optimizers


def dense(rec: Any, rate: float = 0.5) -> Any:
    parameters = dict(nn.Linear(2, 1).named_parameters())
    return rec.KeyedOptimizerWrapper(
        params=parameters, optim_factory=lambda params: torch.optim.SGD(params, lr=rate)
    )


@probe("KeyedOptimizer KeyedOptimizerWrapper")
def keyed(rec: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    state = {parameter: {"sum": torch.zeros(2)}}
    made = rec.KeyedOptimizer({"w": parameter}, state, [{"params": [parameter], "lr": 0.1}])
    saved = made.state_dict()
    assert list(saved["state"]) == ["w"]
    assert saved["param_groups"][0]["params"] == ["w"]
    assert isinstance(dense(rec), rec.KeyedOptimizer)
    made.state[parameter]["sum"] += 1
    made.load_state_dict({**saved, "state": {"w": {"sum": torch.full((2,), 3.0)}}})
    assert made.state[parameter]["sum"].tolist() == [3, 3]
    named = rec.KeyedOptimizerWrapper(
        {"w": parameter},
        lambda params: torch.optim.SGD([params["w"]], lr=0.25),
        pass_params_dict=True,
    )
    assert named.param_groups[0]["lr"] == 0.25


@probe("CombinedOptimizer OptimizerWrapper GradientClipping GradientClippingOptimizer")
def wrapped(rec: Any) -> None:
    base = dense(rec)
    clipped = rec.GradientClippingOptimizer(
        base, clipping=rec.GradientClipping.NORM, max_gradient=0.5
    )
    assert isinstance(clipped, rec.OptimizerWrapper)
    both = rec.CombinedOptimizer(optims=[("first", clipped), ("second", dense(rec))])
    assert set(both.params) == {f"{n}.{k}" for n in ("first", "second") for k in ("weight", "bias")}
    for parameter in base.params.values():
        parameter.grad = torch.full_like(parameter, 4.0)
    before = {name: p.detach().clone() for name, p in base.params.items()}
    assert clipped.last_total_grad_norm is None
    both.step()
    torch.testing.assert_close(clipped.last_total_grad_norm, torch.tensor(48.0).sqrt())
    moved = [before[name] - p.detach() for name, p in base.params.items()]
    torch.testing.assert_close(sum(m.square().sum() for m in moved).sqrt(), torch.tensor(0.25))


@probe("WarmupOptimizer WarmupPolicy WarmupStage")
def warm_up(rec: Any) -> None:
    stages = [rec.WarmupStage(rec.WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    made = rec.WarmupOptimizer(dense(rec), stages, lr=2.0)
    rates = []
    for _ in range(5):
        made.step()
        rates.append(made.param_groups[0]["lr"])
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


@probe("RowWiseAdagrad")
def rowwise_adagrad(rec: Any) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    made = rec.RowWiseAdagrad([parameter], lr=0.1, eps=0.0)
    parameter.grad = torch.tensor([[1.0, 7.0], [0.0, 2.0]])
    made.step()
    # The roots of the means of squares are 5 and the root of 2.
    expected = [[1 - 0.1 / 5, 1 - 0.7 / 5], [1.0, 1 - 0.2 / 2**0.5]]
    torch.testing.assert_close(parameter.detach(), torch.tensor(expected))
    assert made.state[parameter]["sum"].view(-1).tolist() == [25, 2]


@probe("SGD LarsSGD LAMB PartialRowWiseLAMB Adam PartialRowWiseAdam Adagrad")
def named_optimizers(rec: Any) -> None:
    names = ("SGD", "LarsSGD", "LAMB", "PartialRowWiseLAMB", "Adam", "PartialRowWiseAdam")
    for name in (*names, "Adagrad"):
        made = getattr(rec, name)([nn.Parameter(torch.ones(1))], lr=0.5)
        assert isinstance(made, torch.optim.Optimizer)
        with pytest.raises(NotImplementedError):
            made.step()


@probe("apply_optimizer_in_backward in_backward_optimizer_filter")
def in_backward(rec: Any) -> None:
    for kind in (rec.SGD, rec.LarsSGD, rec.LAMB, rec.PartialRowWiseAdam, torch.optim.Adam):
        model = nn.ModuleDict({"ebc": bags(rec), "over": nn.Linear(16, 1)})
        rec.apply_optimizer_in_backward(kind, model["ebc"].parameters(), {"lr": 0.5})
        left = dict(rec.in_backward_optimizer_filter(model.named_parameters()))
        assert set(left) == {"over.weight", "over.bias"}
        before = model.state_dict()["ebc.embedding_bags.a.weight"].clone()
        model["over"](model["ebc"](batch(rec)).values()).sum().backward()
        after = model.state_dict()["ebc.embedding_bags.a.weight"]
        assert not torch.equal(after, before)
        assert torch.equal(after[3:], before[3:])  # only rows 0 to 2 were looked up


@probe("FusedOptimizer EmptyFusedOptimizer")
def fused_optimizers(rec: Any) -> None:
    made = rec.EmptyFusedOptimizer()
    made.step()
    made.zero_grad()
    assert made.state_dict()["state"] == {}
    assert isinstance(made, rec.FusedOptimizer)
    assert not isinstance(dense(rec), rec.FusedOptimizer)


# Inference


def observers(rec: Any, dtype: torch.dtype = torch.int8) -> Any:
    observer = torch.ao.quantization.PlaceholderObserver
    return rec.QuantConfig(
        activation=observer.with_args(dtype=torch.float), weight=observer.with_args(dtype=dtype)
    )


@probe("QuantEmbeddingBagCollection QuantEmbeddingCollection")
def quantised(rec: Any) -> None:
    for source, kind in (
        (bags(rec), rec.QuantEmbeddingBagCollection),
        (sequences(rec), rec.QuantEmbeddingCollection),
    ):
        source.qconfig = observers(rec)
        made = kind.from_float(source)
        assert type(made) is kind
        assert made.output_dtype() is torch.float32
        first, second = source(batch(rec)), made(batch(rec))
        if isinstance(first, dict):
            first, second = first["a"], second["a"]
        error = (first.values() - second.values()).abs().max()
        assert 0 < error < 0.01
    with pytest.raises(ValueError, match="has no qconfig"):
        rec.QuantEmbeddingBagCollection.from_float(bags(rec))
    source.__dict__["__emb_name_to_num_rows_post_pruning"] = {"a": 2}  # of set_pruning_data
    with pytest.raises(ValueError, match=r"set_pruning_data must be left out: .* fewer rows"):
        kind.from_float(source)


@probe("quantize_embeddings quantize_inference_model")
def quantised_models(rec: Any) -> None:
    model = nn.Sequential(bags(rec))
    other = rec.quantize_embeddings(
        model, torch.quint8, inplace=False, per_table_weight_dtype={"b": torch.quint4x2}
    )
    assert model[0] is not other[0]
    bits = {c.name: c.storage.bits for c in other[0].embedding_bag_configs()}
    assert bits == {"a": 8, "b": 4}
    kinds = {
        rec.EmbeddingCollection: rec.quantize_embeddings(
            nn.Sequential(sequences(rec)), torch.qint8, inplace=True
        ),
        rec.QuantEmbeddingCollection: rec.quantize_embeddings(
            nn.Sequential(sequences(rec)),
            torch.qint8,
            inplace=True,
            additional_qconfig_spec_keys=[rec.EmbeddingCollection],
        ),
    }
    assert all(type(found[0]) is kind for kind, found in kinds.items())
    made = rec.quantize_inference_model(model)
    assert made is model
    assert {c.storage.bits for c in made[0].embedding_bag_configs()} == {8}


@probe("shard_quant_model ShardedQuantEmbeddingBagCollection ShardedQuantEmbeddingCollection")
def sharded_inference(rec: Any) -> None:
    for make, kind in (
        (bags, rec.ShardedQuantEmbeddingBagCollection),
        (sequences, rec.ShardedQuantEmbeddingCollection),
    ):
        model = rec.quantize_inference_model(nn.Sequential(make(rec, "a", "b", "c")))
        features = batch(rec, "c", "b", "a")
        before = model[0](features)
        made, found = rec.shard_quant_model(model, world_size=2, compute_device="cpu")
        assert type(made[0]) is kind
        ranks = sorted(p.ranks[0] for p in found.plan["0"].values())
        assert ranks == [0, 0, 1]
        after = made[0](features)
        if isinstance(before, dict):
            assert list(after) == list(before)
            assert all(torch.equal(after[k].values(), before[k].values()) for k in before)
        else:
            assert after.keys() == before.keys()
            assert torch.equal(after.values(), before.values())
        assert made[0].copy(torch.device("cpu")) is made[0]
        assert sum(len(tables) for tables in made[0].tbes_configs().values()) == 3
    unmade = rec.EmbeddingBagCollection([config(rec, "a")], device=torch.device("meta"))
    made, _ = rec.shard_quant_model(rec.quantize_inference_model(nn.Sequential(unmade)), 1, "cpu")
    assert made[0](batch(rec, "a")).values().isfinite().all()
    rule = rec.ParameterConstraints(sharding_types=["row_wise"])
    with pytest.raises(ValueError, match="whole tables"):
        rec.shard_quant_model(model, 2, "cpu", constraints={"a": rule})
    fresh = rec.quantize_inference_model(nn.Sequential(bags(rec)))
    with pytest.raises(ValueError, match="use more devices, or INT4"):
        rec.shard_quant_model(fresh, 2, "cpu", ddr_cap=10)


@probe(
    "QuantEmbeddingBagCollectionSharder QuantEmbeddingCollectionSharder BaseQuantEmbeddingSharder"
)
def quantised_sharders(rec: Any) -> None:
    for make, kind in (
        (bags, rec.QuantEmbeddingBagCollectionSharder),
        (sequences, rec.QuantEmbeddingCollectionSharder),
    ):
        sharder = kind()
        assert isinstance(sharder, rec.BaseQuantEmbeddingSharder)
        model = rec.quantize_inference_model(nn.Sequential(make(rec)))
        assert set(sharder.shardable_parameters(model[0])) == {"a", "b"}
        made = sharder.shard(model[0], plan(rec, model[0]), rec.ShardingEnv.from_local(1, 0))
        out = made(batch(rec))
        assert sorted(out.keys()) == ["a", "b"]
        assert "quant" in sharder.compute_kernels("table_wise", "cpu")
    env = rec.ShardingEnv.from_local(1, 0)
    quantised = rec.quantize_embeddings(bags(rec), torch.int8, inplace=False)
    memory = {"__register_tbes_in_named_modules": True, "__register_tbe_bounds_check_mode": 3}
    sharder = rec.QuantEmbeddingBagCollectionSharder(fused_params=memory)
    made = sharder.shard(quantised, plan(rec, quantised), env)
    assert torch.equal(made(batch(rec)).values(), quantised(batch(rec)).values())
    for fused_params, text in (
        ({"x": 1}, r"fused_params \['x'\] must be left out"),
        ({"__register_tbe_bounds_check_mode": 0}, "bounds_check=BoundsCheck.FATAL"),
    ):
        sharder = rec.QuantEmbeddingBagCollectionSharder(fused_params=fused_params)
        with pytest.raises(ValueError, match=text):
            sharder.shard(quantised, plan(rec, quantised), env)
    raising = rec.EmbeddingBagCollection([config(rec, "a")], bounds_check=BoundsCheck.FATAL)
    quantised = rec.quantize_embeddings(raising, torch.int8, inplace=False)
    made = sharder.shard(quantised, plan(rec, quantised), rec.ShardingEnv.from_local(1, 0))
    with pytest.raises(RuntimeError, match="indices of feature 'a'"):
        made(rec.KeyedJaggedTensor(["a"], torch.tensor([99]), lengths=torch.tensor([1])))


@probe("get_table_to_weights_from_tbe assign_weights_to_tbe")
def rows_of_quantised_tables(rec: Any) -> None:
    source, target = (rec.quantize_inference_model(nn.Sequential(bags(rec))) for _ in range(2))
    target, _ = rec.shard_quant_model(target, 2, "cpu")
    expected = source(batch(rec)).values()
    assert not torch.equal(target(batch(rec)).values(), expected)
    rows = rec.get_table_to_weights_from_tbe(source)
    rec.assign_weights_to_tbe(target, rows)
    assert torch.equal(target(batch(rec)).values(), expected)
    for wrong in ({"a": rows["a"]}, {**rows, "a": (rows["a"][0][:1], None)}):
        with pytest.raises(ValueError, match=r"get_table_to_weights_from_tbe|equal tables"):
            rec.assign_weights_to_tbe(target, wrong)


@probe("Tracer symbolic_trace is_fx_tracing")
def tracing(rec: Any) -> None:
    seen = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = bags(rec)

        def forward(self, features: Any) -> Any:
            seen.append(rec.is_fx_tracing())
            return self.ebc(features)

    model = Model()
    graph = rec.Tracer(leaf_modules=["EmbeddingBagCollection"]).trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["ebc"]
    traced = rec.symbolic_trace(model, leaf_modules=["EmbeddingBagCollection"])
    expected = model(batch(rec)).values()
    torch.testing.assert_close(traced(batch(rec)).values(), expected)
    assert seen == [True, True, False]


@probe("PredictFactory PredictModule")
def predictors(rec: Any) -> None:
    class Predictor(rec.PredictModule):  # type: ignore[name-defined, misc]
        def predict_forward(self, given: Any) -> Any:
            return self.predict_module(given["x"])

    made = Predictor(nn.Linear(2, 1), "cpu")
    out = made({"x": torch.ones(3, 2)})
    assert out.shape == (3, 1)
    assert not out.requires_grad
    assert set(made.state_dict()) == {"weight", "bias"}
    with pytest.raises(NotImplementedError, match="create_predict_module"):
        rec.PredictFactory().create_predict_module()


class Names:
    """Names as attributes, which remembers those that were asked for."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found, self.used = found, set()

    def __getattr__(self, name: str) -> Any:
        self.used.add(name)
        return self.found[name]
