"""The options of FBGEMM's interface: their effect, and those that raise."""

import inspect
from typing import Any

import pytest
import torch

from emblib import Placement
from emblib.compat import fbgemm as ours
from emblib.compat import fbgemm_arguments
from emblib.compat.fbgemm import (
    ComputeDevice,
    CounterWeightDecayMode,
    CowClipDefinition,
    EmbeddingLocation,
    GlobalWeightDecayDefinition,
    OptimType,
    SparseType,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from tests.compat.peer import fbgemm
from tests.compat.small import CACHED, HOST, INDICES, OFFSETS, make, step


def test_weights_are_zero_until_initialised() -> None:
    specs = [(3, 4, HOST, ComputeDevice.CPU), (5, 6, HOST, ComputeDevice.CPU)]
    module = SplitTableBatchedEmbeddingBagsCodegen(specs)
    assert [tuple(w.shape) for w in module.split_embedding_weights()] == [(3, 4), (5, 6)]
    assert all((w == 0).all() for w in module.split_embedding_weights())
    assert module.D_offsets.tolist() == [0, 4, 10]
    assert module.hash_size_cumsum.tolist() == [0, 3, 8]
    assert (module.total_D, module.max_D, module.dims) == (10, 6, [4, 6])


def test_an_unknown_argument_raises() -> None:
    with pytest.raises(TypeError, match="cache_size"):
        make(cache_size=3)
    with pytest.raises(TypeError, match="weights_scale"):
        make()(INDICES, OFFSETS, weights_scale=None)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tbe_input_multiplexer_config": object()}, NotImplementedError, "multiplexer"),
        ({"enable_raw_embedding_streaming": True}, NotImplementedError, "streaming"),
        ({"is_qr_tbe": True}, NotImplementedError, "is_qr_tbe"),
        ({"weights_precision": SparseType.INT4}, NotImplementedError, "weights_precision"),
        ({"output_dtype": SparseType.INT8}, NotImplementedError, "output_dtype"),
        ({"optimizer": OptimType.SHAMPOO}, NotImplementedError, "SHAMPOO"),
        ({"weight_decay": 0.1}, ValueError, "weight_decay"),
        (
            {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.1},
            ValueError,
            "no part in EXACT_ROWWISE_ADAGRAD with weight_decay_mode=WeightDecayMode.NONE",
        ),
        ({"optimizer": OptimType.ADAM, "max_norm": 1.0}, ValueError, "max_norm"),
        ({"weight_decay_mode": WeightDecayMode.L2}, ValueError, "weight_decay_mode"),
        (
            {
                "optimizer": OptimType.EXACT_ROWWISE_ADAGRAD,
                "weight_decay_mode": WeightDecayMode.COWCLIP,
                "cowclip_regularization": CowClipDefinition(CounterWeightDecayMode.ADAGRADW),
            },
            ValueError,
            "counter_weight_decay_mode ADAGRADW goes with weight_decay_mode=WeightDecayMode.COUN",
        ),
        (
            {"optimizer": OptimType.ADAM, "weight_decay_mode": WeightDecayMode.L2},
            ValueError,
            "weight_decay_mode",
        ),
        (
            {
                "optimizer": OptimType.EXACT_ROWWISE_ADAGRAD,
                "weight_decay_mode": WeightDecayMode.COUNTER,
            },
            ValueError,
            "counter_based_regularization",
        ),
        (
            {"global_weight_decay": GlobalWeightDecayDefinition()},
            ValueError,
            "global_weight_decay",
        ),
        ({"ensemble_mode": ours.EnsembleModeDefinition()}, ValueError, "ensemble_mode"),
        (
            {
                "optimizer": OptimType.ADAM,
                "extra_optimizer_config": ours.UserEnabledConfigDefinition(
                    use_rowwise_bias_correction=True
                ),
            },
            NotImplementedError,
            "bias_correction",
        ),
        (
            {
                "optimizer": OptimType.ADAM,
                "extra_optimizer_config": ours.UserEnabledConfigDefinition(
                    use_writeback_bwd_prehook=True
                ),
            },
            ValueError,
            "EXACT_SGD",
        ),
        ({"embedding_table_index_type": torch.int16}, ValueError, "int16"),
        ({"table_names": ["a"]}, ValueError, "table_names"),
        ({"table_names": "ab"}, TypeError, "table_names must be a sequence"),
        ({"stochastic_rounding": "no"}, TypeError, "stochastic_rounding must be True or False"),
        (
            {"record_cache_metrics": ours.RecordCacheMetrics("no", False)},  # type: ignore[arg-type]
            TypeError,
            "record_cache_miss_counter must be True or False",
        ),
        ({"device": "cuda"}, ValueError, "device"),
        (
            {
                "optimizer": OptimType.EMAINPLACE_ROWWISE_ADAGRAD,
                "emainplace_mode": ours.EmainplaceModeDefinition(step_ema=0),
            },
            ValueError,
            "step_ema must be >= 1",
        ),
    ],
)
def test_what_has_no_meaning_raises(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make(**options)


def test_places_that_do_not_exist_raise() -> None:
    with pytest.raises(NotImplementedError, match="MTIA"):
        SplitTableBatchedEmbeddingBagsCodegen([(3, 4, HOST, ComputeDevice.MTIA)])
    swapped: Any = (3, 4, ComputeDevice.CPU, EmbeddingLocation.DEVICE)
    with pytest.raises(ValueError, match=r"ComputeDevice\.CPU.* is not a valid EmbeddingLocation"):
        SplitTableBatchedEmbeddingBagsCodegen([swapped])
    with pytest.raises(ValueError, match="HOST"):
        SplitTableBatchedEmbeddingBagsCodegen([(3, 4, HOST, ComputeDevice.CUDA)])
    with pytest.raises(ValueError, match="same ComputeDevice"):
        SplitTableBatchedEmbeddingBagsCodegen(
            [(3, 4, HOST, ComputeDevice.CPU), (3, 4, HOST, ComputeDevice.CUDA)]
        )
    with pytest.raises(ValueError, match="at least one table"):
        SplitTableBatchedEmbeddingBagsCodegen([])
    with pytest.raises(ValueError, match="at least one table"):
        ours.DenseTableBatchedEmbeddingBagsCodegen([], use_cpu=True)


def test_numbers_without_a_part_are_told() -> None:
    with pytest.warns(UserWarning, match="momentum=0.5 has no part in EXACT_SGD"):
        make(momentum=0.5)
    with pytest.warns(UserWarning, match="weight_decay=0.1 has no part in counter_weight_decay"):
        make(
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
            weight_decay=0.1,
            weight_decay_mode=WeightDecayMode.COUNTER,
            counter_based_regularization=ours.CounterBasedRegularizationDefinition(),
        )


def test_placements() -> None:
    module = make(CACHED)
    assert {spec.placement for spec in module.bags.tables} == {Placement.MANAGED_CACHING}
    module = make(CACHED, enforce_hbm=True)
    assert {spec.placement for spec in module.bags.tables} == {Placement.DEVICE}
    for option in ("uvm_host_mapped", "uvm_non_rowwise_momentum", "prefetch_pipeline"):
        torch.testing.assert_close(
            step(make(CACHED, optimizer=OptimType.ADAM, **{option: True})),
            step(make(CACHED, optimizer=OptimType.ADAM)),
        )


def test_state_that_leaves_the_gpu_takes_its_rows_along() -> None:
    """The arguments of a module on a GPU, where there is none."""
    parameters = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters
    defaults = {name: p.default for name, p in parameters.items()}
    places = [EmbeddingLocation.DEVICE, CACHED]
    specs = [(6, 8, place, ComputeDevice.CUDA) for place in places]
    given = defaults | {"embedding_specs": specs, "device": "meta"}
    expected = {
        OptimType.EXACT_ROWWISE_ADAGRAD: [Placement.DEVICE, Placement.MANAGED_CACHING],
        OptimType.ADAM: [Placement.MANAGED, Placement.MANAGED_CACHING],
    }
    for optimizer, placements in expected.items():
        options = {"optimizer": optimizer, "uvm_non_rowwise_momentum": True}
        tables = fbgemm_arguments.tables(fbgemm_arguments.normalise(given | options))
        assert [spec.placement for spec in tables] == placements
        nearby = fbgemm_arguments.normalise(given | options | {"enforce_hbm": True})
        assert {spec.placement for spec in fbgemm_arguments.tables(nearby)} == {Placement.DEVICE}
    for option, location in (("enforce_hbm", 0), ("uvm_non_rowwise_momentum", 1)):
        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(6, 8, places[1 - location], ComputeDevice.CUDA)],
            device="meta",
            optimizer=OptimType.ADAM,
            **{option: True},
        )
        *memories, locations, _ = module.get_states("weights")
        assert [tensor.numel() for tensor in memories] == [[48, 0, 0], [0, 0, 48]][location]
        assert locations.tolist() == [location]


def test_names() -> None:
    module = make(table_names=["user.id", "user.id"])
    assert [spec.name for spec in module.bags.tables] == ["user_id", "user_id_1"]
    assert module.logging_table_name == "user.id"
    specs = [(3, 4, HOST, ComputeDevice.CPU)] * 4
    module = SplitTableBatchedEmbeddingBagsCodegen(specs, table_names=["a", "a", "a_3", "a_1"])
    assert [spec.name for spec in module.bags.tables] == ["a", "a_2", "a_3", "a_1"]
    for library in (ours, fbgemm()):
        name = library.SplitTableBatchedEmbeddingBagsCodegen.get_table_name_for_logging
        assert [name(None), name(["a", "a"]), name([])] == ["<Unknown>", "a", "<0 tables>: []"]
        assert name(["b", "a", "b"]) == "<2 tables>: ['a', 'b']"


def test_state_dtypes() -> None:
    dtypes = {"momentum1": SparseType.BF16}
    module = make(optimizer=OptimType.PARTIAL_ROWWISE_ADAM, optimizer_state_dtypes=dtypes)
    first, second = module.split_optimizer_states()[0]
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float32)
    with pytest.warns(UserWarning, match="EXACT_ROWWISE_ADAGRAD has no state momentum1"):
        make(optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, optimizer_state_dtypes=dtypes)
    with pytest.raises(NotImplementedError, match="one dtype"):
        make(optimizer=OptimType.ADAM, optimizer_state_dtypes=dtypes)


def test_members_and_objects_of_fbgemm_are_taken() -> None:
    theirs = fbgemm()
    specs = [(6, 8, theirs.EmbeddingLocation.HOST, theirs.ComputeDevice.CPU)] * 2
    module = SplitTableBatchedEmbeddingBagsCodegen(
        specs,
        optimizer=theirs.OptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=theirs.PoolingMode.MEAN,
        weights_precision=theirs.SparseType.FP16,
        output_dtype=theirs.SparseType.BF16,
        weight_decay_mode=theirs.WeightDecayMode.COUNTER,
        counter_based_regularization=theirs.CounterBasedRegularizationDefinition(),
        bounds_check_mode=theirs.BoundsCheckMode.V2_FATAL,
    )
    assert module(INDICES, OFFSETS).dtype is torch.bfloat16
    assert module.bags.weights.dtype is torch.float16
