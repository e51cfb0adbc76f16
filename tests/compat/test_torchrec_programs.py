"""Habits of programs over TorchRec's names: assigned fields, lacking names, optimizers' states."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from emblib.collections.optimizers import FusedOptimizer
from emblib.compat import torchrec
from emblib.optim import Adam, Hyper


def config(**changes: Any) -> torchrec.EmbeddingBagConfig:
    given = {"name": "t", "embedding_dim": 8, "num_embeddings": 10, "feature_names": ["f"]}
    return torchrec.EmbeddingBagConfig(**{**given, **changes})


def test_fields_of_a_configuration_are_assigned_as_checked() -> None:
    made = config()
    made.embedding_dim, made.name, made.feature_names = 4, "other", ["a", "b"]
    made.init_fn = torch.nn.init.ones_
    made.data_type = torchrec.DataType.FP16
    assert (made.name, list(made.feature_names), made.num_features()) == ("other", ["a", "b"], 2)
    collection = torchrec.EmbeddingBagCollection(tables=[made])
    weight = collection.state_dict()["embedding_bags.other.weight"]
    assert weight.shape == (10, 4)
    assert weight.dtype is torch.float16
    assert weight.eq(1).all()
    with pytest.raises(ValueError, match="embedding_dim"):
        made.embedding_dim = 0
    with pytest.raises(ValueError, match="need_pos"):
        made.need_pos = True
    with pytest.raises(AttributeError, match="'feature_name', did you mean 'feature_names'"):
        made.feature_name = ["f"]  # type: ignore[attr-defined]
    assert made.embedding_dim == 4
    assert not hasattr(made, "feature_name")


def test_configurations_keep_attributes_of_programs() -> None:
    """TorchEasyRec marks frozen tables, and reads private attributes."""
    made = config()
    made.trainable = False  # type: ignore[attr-defined]
    collection = torchrec.EmbeddingBagCollection(tables=[made])
    module = torchrec.MCHManagedCollisionModule(
        10, torch.device("cpu"), torchrec.LRU_EvictionPolicy(), eviction_interval=3
    )
    managed = torchrec.ManagedCollisionEmbeddingBagCollection(
        collection, torchrec.ManagedCollisionCollection({"t": module}, [made])
    )
    assert (module._zch_size, module._eviction_interval) == (10, 3)
    for each in (collection, managed._embedding_module):
        assert each._embedding_bag_configs[0].trainable is False
    sequences = torchrec.EmbeddingCollection(tables=[torchrec.EmbeddingConfig(10, 8, "t")])
    assert sequences._embedding_configs == sequences.embedding_configs()


def test_an_assigned_data_type_changes_the_storage() -> None:
    made = config(data_type=torchrec.DataType.INT8)
    assert made.data_type is torchrec.DataType.INT8
    made.data_type = torchrec.DataType.FP16
    assert made.data_type == torchrec.DataType.FP16
    assert isinstance(made.storage, type(config().storage))
    made.data_type = torchrec.DataType.INT4
    assert made.storage.bits == 4  # type: ignore[attr-defined]


def test_bounds_of_initial_values_have_torchrecs_names() -> None:
    made = config(weight_init_min=-0.5)
    assert (made.get_weight_init_min(), made.get_weight_init_max()) == (-0.5, 0.1**0.5)


@pytest.mark.parametrize(
    ("option", "value", "way"),
    [
        ("use_virtual_table", True, r"storage=Hash\(\)"),
        ("total_num_buckets", 8, "no buckets"),
        ("num_embeddings_post_pruning", 5, "prune the table"),
        ("need_pos", True, "PositionWeightedModule"),
    ],
)
def test_options_without_an_effect_are_refused(option: str, value: Any, way: str) -> None:
    assert config(**{option: False}).name == "t"
    for use in (lambda: config(**{option: value}), lambda: setattr(config(), option, value)):
        with pytest.raises(ValueError, match=f"{way}.*EMBLIB_AS_FBGEMM=1"):
            use()


def test_names_that_the_table_lacks_raise_at_import_with_the_other_ways() -> None:
    module = importlib.import_module("emblib.compat.torchrec.distributed.comm_ops")
    assert not hasattr(module, "All2All_Pooled_Req")
    with torchrec.install():
        for line in (
            "from torchrec.distributed.comm_ops import All2All_Pooled_Req",
            "from torchrec.distributed.planner import Nothing",
            "import torchrec.modules.nowhere",
        ):
            with pytest.raises(ImportError, match=r"fallback=True.*EMBLIB_AS_FBGEMM=1"):
                exec(line)
        with pytest.raises(AttributeError, match="EMBLIB_AS_FBGEMM=1"):
            module.All2All_Pooled_Req  # noqa: B018


def wrapper(momentum: float = 0.5) -> torchrec.KeyedOptimizerWrapper:
    parameters = {name: nn.Parameter(torch.ones(2, 3)) for name in ("dense", "sparse")}
    return torchrec.KeyedOptimizerWrapper(
        parameters, lambda params: torch.optim.SGD(params, lr=0.1, momentum=momentum)
    )


def test_init_state_makes_states_of_zero() -> None:
    both = torchrec.CombinedOptimizer([wrapper()])
    both.init_state({"sparse"})
    assert both.params["sparse"].grad.is_sparse
    assert both.params["dense"].detach().eq(1).all()
    state = both.state_dict()["state"]
    assert set(state) == {"dense", "sparse"}
    assert state["dense"]["momentum_buffer"].eq(0).all()


def test_states_load_without_groups() -> None:
    source, target = wrapper(), wrapper()
    source.init_state()
    source.state[source.params["dense"]]["momentum_buffer"].fill_(3.0)
    source.save_param_groups(True)
    target.param_groups[0]["lr"] = 0.7
    target.load_state_dict({"state": source.state_dict()["state"]})
    assert target.state[target.params["dense"]]["momentum_buffer"].eq(3).all()
    assert target.param_groups[0]["lr"] == 0.7
    with pytest.raises(ValueError, match="always have param_groups"):
        source.save_param_groups(False)


def test_wrappers_of_programs_reach_the_optimizers_that_they_wrap() -> None:
    class Counted(torchrec.OptimizerWrapper):
        loaded = 0

        def step(self, closure: Any = None) -> Any:
            return self._optimizer.step(closure)

        def post_load_state_dict(self) -> None:
            super().post_load_state_dict()
            self.loaded += 1

    made = config(optimizer=Adam(0.1))
    collection = torchrec.EmbeddingBagCollection(tables=[made])
    tables, dense = FusedOptimizer.of(collection), wrapper()
    both = Counted(torchrec.CombinedOptimizer([("tables", tables), dense]))
    assert [optimizer for _, optimizer in both._optimizer._optims] == [tables, dense]
    assert isinstance(dense._optimizer, torch.optim.SGD)
    both.step()
    both.set_optimizer_step(7)
    hyper = both.state_dict()["state"]["tables.embedding_bags.t.weight"]["hyper"]
    assert hyper[Hyper.STEP] == 7
    both.load_state_dict(both.state_dict())
    assert both.loaded == 1
    with pytest.raises(ValueError, match="step must be"):
        both.set_optimizer_step(-1)


def test_the_norm_is_measured_without_clipping() -> None:
    base = wrapper(momentum=0.0)
    kinds = torchrec.GradientClipping
    made = torchrec.GradientClippingOptimizer(
        base, kinds.VALUE, 0.5, "inf", enable_global_grad_clip=True, track_grad_norm=True
    )
    for parameter in base.params.values():
        parameter.grad = torch.full_like(parameter, 4.0)
    made.step()
    assert float(made.last_total_grad_norm) == 4.0
    assert all(p.grad.eq(0.5).all() for p in base.params.values())
    assert float(made.clip_grad_norm_()) == 0.5


def test_regrouping_is_one_call_of_a_traced_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = torchrec.EmbeddingBagCollection(
                tables=[config(), config(name="u", feature_names=["g"])]
            )
            self.regroup = torchrec.KTRegroupAsDict([["g", "f"]], ["both"])

        def forward(self, features: torchrec.KeyedJaggedTensor) -> Any:
            pooled = self.ebc(features)
            by_name = torchrec.KeyedTensor.regroup_as_dict([pooled], [["f"]], ["f"])
            return self.regroup([pooled])["both"], by_name["f"]

    model = Model()
    batch = torchrec.KeyedJaggedTensor(
        ["f", "g"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 1])
    )
    traced = torchrec.symbolic_trace(model)
    for found, expected in zip(traced(batch), model(batch), strict=True):
        assert torch.equal(found, expected)


def test_kernels_that_a_plan_cannot_have_name_the_other_ways() -> None:
    kernel = torchrec.EmbeddingComputeKernel.KEY_VALUE.value
    for use in (
        lambda: torchrec.ParameterConstraints(compute_kernels=[kernel]),
        lambda: torchrec.ParameterSharding("data_parallel", kernel).to_emblib(),
        lambda: torchrec.compute_kernel_to_embedding_location(kernel),
    ):
        with pytest.raises(ValueError, match=r"got 'key_value'.*tiers\.md.*EMBLIB_AS_FBGEMM=1"):
            use()
