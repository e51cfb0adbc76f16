"""Where FBGEMM's CPU build leaves its documentation, and what emblib does there.

Each test shows what the CPU build of the version in `pyproject.toml` does, and that emblib follows
the documented formula in float64. A test that fails in its first half after an update of FBGEMM is
good news.
"""

import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from emblib.compat import fbgemm as ours
from emblib.compat.fbgemm import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    LearningRateMode,
    OptimType,
    WeightDecayMode,
)
from tests.compat import exact
from tests.compat.peer import fbgemm
from tests.compat.settings import Setting, assert_same, batches_of, build, train

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
ROWWISE: dict[str, Any] = {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, "eps": 1e-2}
SETTING = Setting(features=(0, 1, 1), weighted=True, seed=3)


def differs(setting: Setting, **options: Any) -> bool:
    """Whether training with the two libraries gives different tables."""
    pairs = zip(
        train(ours, setting, **options)["weights"],
        train(fbgemm(), setting, **options)["weights"],
        strict=True,
    )
    return not all(torch.allclose(a, b, **CLOSE) for a, b in pairs)


@pytest.mark.parametrize("mode", [WeightDecayMode.L2, WeightDecayMode.DECOUPLE])
def test_weight_decay_is_ignored(mode: WeightDecayMode) -> None:
    """By the kernel for tables that one feature reads; tables that several read do decay."""
    decay = {"weight_decay": 0.2, "weight_decay_mode": mode}
    theirs = fbgemm()
    with_decay, without = (
        train(theirs, SETTING, **ROWWISE, **decay),
        train(theirs, SETTING, **ROWWISE),
    )
    torch.testing.assert_close(with_decay["weights"][0], without["weights"][0])
    assert not torch.allclose(with_decay["weights"][1], without["weights"][1], **CLOSE)
    numbers = {"learning_rate": 0.1, "eps": 1e-2, "weight_decay": 0.2, "mode": mode.name}
    expected = exact.train(SETTING, exact.rowwise, ("row",), **numbers)
    assert_same(train(ours, SETTING, **ROWWISE, **decay), expected, **CLOSE)


def test_max_norm_is_ignored() -> None:
    theirs = fbgemm()
    limited = train(theirs, SETTING, **ROWWISE, max_norm=0.5)
    assert_same(limited, train(theirs, SETTING, **ROWWISE))
    numbers = {"learning_rate": 0.1, "eps": 1e-2, "max_norm": 0.5}
    expected = exact.train(SETTING, exact.rowwise, ("row",), **numbers)
    assert_same(train(ours, SETTING, **ROWWISE, max_norm=0.5), expected, **CLOSE)


def test_gradients_of_weighted_means_are_not_divided() -> None:
    setting = replace(SETTING, pooling="MEAN", steps=1)
    expected = exact.train(setting, exact.sgd, (), learning_rate=0.1)
    found = train(fbgemm(), setting)
    torch.testing.assert_close(found["output"], expected["output"], **CLOSE)
    key = "sample weights' gradient"
    assert not torch.allclose(found[key][0], expected[key][0], **CLOSE)
    assert not torch.allclose(found["weights"][0], expected["weights"][0], **CLOSE)
    assert_same(train(ours, setting), expected, **CLOSE)


def test_weighted_means_in_half_precision_are_not_divided() -> None:
    setting = replace(SETTING, pooling="MEAN", output="FP16", steps=1)
    expected = exact.train(setting, exact.sgd, (), learning_rate=0.1)["output"]
    tolerance = {"rtol": 2e-3, "atol": 2e-3}
    assert not torch.allclose(train(fbgemm(), setting)["output"][0], expected[0], **tolerance)
    torch.testing.assert_close(train(ours, setting)["output"], expected, **tolerance)


def test_features_out_of_order_break_it() -> None:
    """The CPU kernels take the size of a table from where the next feature's begins."""
    setting = Setting(features=(1, 0, 1), steps=1, seed=3)
    options = {"optimizer": OptimType.EXACT_ADAGRAD, "eps": 1e-2}
    numbers = {"learning_rate": 0.1, "eps": 1e-2}
    expected = exact.train(setting, exact.adagrad, ("element",), **numbers)
    assert_same(train(ours, setting, **options), expected, **CLOSE)
    try:
        found = train(fbgemm(), setting, **options)
    except RuntimeError:
        return
    pairs = zip(found["weights"], expected["weights"], strict=True)
    assert not all(torch.allclose(a, b, **CLOSE) for a, b in pairs)


def test_the_largest_count_is_never_found() -> None:
    """It looks at the counters on the GPU, of which a CPU module has none."""
    counter = CounterBasedRegularizationDefinition(
        counter_weight_decay_mode=CounterWeightDecayMode.DECOUPLE,
        counter_halflife=3,
        learning_rate_mode=LearningRateMode.TAIL_ID_LR_DECREASE,
        max_counter_update_freq=1,
    )
    options = ROWWISE | {
        "weight_decay": 0.1,
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "counter_based_regularization": counter,
    }
    setting = replace(SETTING, steps=3)
    for library, largest in ((fbgemm(), 1.0), (ours, None)):
        module = build(library, setting, **options)
        for batch in batches_of(setting):
            seen = max(float(states[2].max()) for states in module.split_optimizer_states())
            module(batch.indices, batch.offsets).backward(batch.gradient)
            found = float(module.max_counter)
            assert found == pytest.approx(largest or seen + 1.0)


def _lookup(library: Any, indices: list[int], **options: Any) -> tuple[torch.Tensor, list[int]]:
    """The output for four bags of one lookup in a table of ten rows, and the indices afterwards."""
    module = build(library, Setting(rows=(10,), dims=(4,), features=(0,), seed=1), **options)
    given = torch.tensor(indices)
    return module(given, torch.arange(len(indices) + 1)), given.tolist()


def test_the_callers_indices_are_rewritten() -> None:
    mode = {"bounds_check_mode": ours.BoundsCheckMode.IGNORE}
    wrong = [1, 99, 2, -5]
    theirs, after = _lookup(fbgemm(), wrong, **mode)
    assert after == [1, 0, 2, 0]
    mine, unchanged = _lookup(ours, wrong, **mode)
    assert unchanged == wrong
    torch.testing.assert_close(mine, theirs)


def test_a_skipped_lookup_raises() -> None:
    """The bounds check lets index -1 pass, as one to skip; then the lookup raises."""
    with pytest.raises(RuntimeError, match="out of bounds"):
        _lookup(fbgemm(), [1, -1])
    output, _ = _lookup(ours, [1, -1])
    assert output[1].abs().sum() == 0
    assert output[0].abs().sum() > 0


def test_weights_without_pooling_are_dropped() -> None:
    def run(library: types.ModuleType) -> torch.Tensor:
        setting = Setting(rows=(10,), dims=(4,), features=(0,), pooling="NONE", seed=1)
        module = build(library, setting)
        return module(torch.tensor([1, 2]), torch.tensor([0, 2]), torch.tensor([2.0, 3.0]))

    assert run(fbgemm()).shape == (2, 4)
    with pytest.raises((RuntimeError, ValueError), match="pooling"):
        run(ours)


def test_stochastic_rounding_is_ignored() -> None:
    """A step of 1/16 of a unit in the last place: rounded to nearest it never moves a weight."""

    def mean_after(library: Any) -> float:
        setting = Setting(rows=(2000,), dims=(8,), features=(0,), weights="FP16")
        module = build(library, setting, learning_rate=2.0**-15, stochastic_rounding=True)
        module.split_embedding_weights()[0].fill_(1.5)
        module(torch.arange(2000), torch.arange(2001)).sum().backward()
        return float(module.split_embedding_weights()[0].double().mean())

    assert mean_after(fbgemm()) == 1.5
    assert mean_after(ours) == pytest.approx(1.5 - 2.0**-15, abs=2.0**-17)


@pytest.mark.filterwarnings("ignore:fbgemm.*autograd kernel was not registered")
def test_the_dense_modules_output_dtype_is_ignored() -> None:
    for library, dtype in ((fbgemm(), torch.float32), (ours, torch.float16)):
        module = library.DenseTableBatchedEmbeddingBagsCodegen(
            [(5, 4)], use_cpu=True, output_dtype=library.SparseType.FP16
        )
        assert module(torch.tensor([1]), torch.tensor([0, 1])).dtype == dtype


@pytest.mark.parametrize(
    "kind", ["ADAM", "LAMB", "LARS_SGD", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB", "NONE"]
)
def test_most_optimizers_are_missing(kind: str) -> None:
    with pytest.raises(AssertionError):
        build(fbgemm(), Setting(), optimizer=OptimType[kind])
    build(ours, Setting(dims=(4, 4)), optimizer=OptimType[kind], learning_rate=0.01)


def test_random_settings_do_differ_when_they_should() -> None:
    """The comparison sees a difference where there is one."""
    assert not differs(SETTING, **ROWWISE)
    assert differs(SETTING, **ROWWISE, max_norm=0.3)
