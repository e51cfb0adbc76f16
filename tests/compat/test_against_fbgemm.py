"""emblib against FBGEMM's CPU build: the same code over both gives the same training.

Random tables, features, batches and options that FBGEMM's CPU kernels support; several steps; the
outputs, the gradients of sample weights, the tables and the optimizer states must agree. What the
CPU kernels drop or do otherwise is in `test_fbgemm_differences.py`.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from emblib.compat import fbgemm as ours
from emblib.compat.fbgemm import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    EmainplaceModeDefinition,
    LearningRateMode,
    OptimType,
    TailIdThreshold,
    WeightDecayMode,
)
from tests.compat.peer import fbgemm
from tests.compat.settings import Setting, assert_same, batches_of, build, settings, train

FLOAT32 = {"rtol": 1e-4, "atol": 2e-5}
FLOAT16 = {"rtol": 4e-3, "atol": 4e-3}
EXAMPLES = 12

ADAGRAD = {"eps": 1e-2}
ROWWISE = {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, **ADAGRAD}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": OptimType.EXACT_SGD},
    "adagrad": {"optimizer": OptimType.EXACT_ADAGRAD, **ADAGRAD},
    "rowwise": ROWWISE,
    "emainplace": {
        "optimizer": OptimType.EMAINPLACE_ROWWISE_ADAGRAD,
        "emainplace_mode": EmainplaceModeDefinition(step_ema=2, step_start=1, step_ema_coef=0.3),
        **ADAGRAD,
    },
}


def in_order(setting: Setting) -> Setting:
    """With the features of a table side by side: FBGEMM's CPU kernels take table sizes from it."""
    return replace(setting, features=tuple(sorted(setting.features)))


def compare(setting: Setting, tolerance: dict[str, float], **options: Any) -> None:
    """Train with both and compare everything."""
    expected = train(fbgemm(), setting, **options)
    assert_same(train(ours, setting, **options), expected, **tolerance)


def many(**fixed: Any) -> Callable[..., Any]:
    """Run a test over random settings."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        drawn = given(setting=settings(**fixed).map(in_order))(test)
        return profile(max_examples=EXAMPLES, deadline=None, derandomize=True)(drawn)

    return decorate


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@many()
def test_every_optimizer(optimizer: str, setting: Setting) -> None:
    compare(setting, FLOAT32, **OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise"])
@many(
    pooling=st.sampled_from(["SUM", "MEAN"]),
    ranks=st.integers(1, 3),
    index_dtype=st.just(torch.int64),  # with int32 FBGEMM aborts the process
)
def test_variable_batch_sizes(optimizer: str, setting: Setting) -> None:
    compare(setting, FLOAT32, **OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise"])
@many(weights=st.just("FP16"))
def test_half_precision_weights(optimizer: str, setting: Setting) -> None:
    compare(setting, FLOAT16, **OPTIMIZERS[optimizer])


@many(
    weights=st.sampled_from(["FP32", "FP16"]),
    output=st.just("FP16"),
    pooling=st.sampled_from(["SUM", "MEAN"]),
)
def test_half_precision_output(setting: Setting) -> None:
    compare(setting, FLOAT16, **ROWWISE)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise"])
@many()
def test_gradient_clipping(optimizer: str, setting: Setting) -> None:
    compare(setting, FLOAT32, gradient_clipping=True, max_gradient=0.25, **OPTIMIZERS[optimizer])


COUNTED = {**ROWWISE, "weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.COUNTER}
COUNTERS = st.builds(
    CounterBasedRegularizationDefinition,
    counter_weight_decay_mode=st.sampled_from(
        [
            CounterWeightDecayMode.NONE,
            CounterWeightDecayMode.L2,
            CounterWeightDecayMode.DECOUPLE,
        ]
    ),
    counter_halflife=st.sampled_from([3, 20]),
    adjustment_iter=st.sampled_from([-1, 2]),
    adjustment_ub=st.sampled_from([0.1, 1.0]),
    learning_rate_mode=st.sampled_from(LearningRateMode),
    tail_id_threshold=st.builds(
        TailIdThreshold, val=st.sampled_from([0.5, 1.5]), is_ratio=st.booleans()
    ),
    # With a smaller one the largest count is looked up; FBGEMM's CPU build never finds it.
    max_counter_update_freq=st.just(1000),
)


@profile(max_examples=3 * EXAMPLES, deadline=None, derandomize=True)
@given(setting=settings(steps=st.just(5)).map(in_order), counter=COUNTERS)
def test_counters(setting: Setting, counter: CounterBasedRegularizationDefinition) -> None:
    compare(setting, FLOAT32, counter_based_regularization=counter, **COUNTED)


ADAGRADW = st.builds(
    CounterBasedRegularizationDefinition,
    counter_weight_decay_mode=st.just(CounterWeightDecayMode.ADAGRADW),
    counter_halflife=st.sampled_from([-1, -2]),
    adjustment_iter=st.sampled_from([-1, 2]),
    adjustment_ub=st.sampled_from([0.1, 1.0]),
)


@profile(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(setting=settings(steps=st.just(5)).map(in_order), counter=ADAGRADW)
def test_adagradw(setting: Setting, counter: CounterBasedRegularizationDefinition) -> None:
    compare(setting, FLOAT32, counter_based_regularization=counter, **COUNTED)


CLIPS = st.builds(
    CowClipDefinition,
    counter_weight_decay_mode=st.sampled_from(
        [
            CounterWeightDecayMode.NONE,
            CounterWeightDecayMode.L2,
            CounterWeightDecayMode.DECOUPLE,
        ]
    ),
    counter_halflife=st.sampled_from([-1, 0, 3]),
    weight_norm_coefficient=st.sampled_from([0.0, 0.1]),
    lower_bound=st.sampled_from([1e-3, 0.2]),
)


@profile(max_examples=2 * EXAMPLES, deadline=None, derandomize=True)
@given(setting=settings(steps=st.just(4)).map(in_order), clip=CLIPS)
def test_cowclip(setting: Setting, clip: CowClipDefinition) -> None:
    compare(
        setting,
        FLOAT32,
        weight_decay=0.1,
        weight_decay_mode=WeightDecayMode.COWCLIP,
        cowclip_regularization=clip,
        **ROWWISE,
    )


@many(weighted=st.just(True), pooling=st.just("SUM"))
def test_features_without_sample_gradient(setting: Setting) -> None:
    wanted = torch.arange(len(setting.features), dtype=torch.int32) % 2
    results = []
    for library in (ours, fbgemm()):
        module = build(library, setting)
        (batch, *_) = batches_of(setting)
        samples = batch.sample_weights.clone().requires_grad_()
        module(batch.indices, batch.offsets, samples, wanted).backward(batch.gradient)
        results.append([samples.grad, *module.split_embedding_weights()])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, **FLOAT32)


@pytest.mark.filterwarnings("ignore:fbgemm.*autograd kernel was not registered")
@many(pooling=st.sampled_from(["SUM", "MEAN"]), index_dtype=st.just(torch.int64))
def test_dense_module(setting: Setting) -> None:
    results = []
    for library in (ours, fbgemm()):
        module = library.DenseTableBatchedEmbeddingBagsCodegen(
            list(zip(setting.rows, setting.dims, strict=True)),
            feature_table_map=list(setting.features),
            pooling_mode=library.PoolingMode[setting.pooling],
            use_cpu=True,
        )
        torch.manual_seed(setting.seed)
        module.init_embedding_weights_uniform(-1.0, 1.0)
        (batch, *_) = batches_of(setting)
        samples = None
        if batch.sample_weights is not None:
            samples = batch.sample_weights.clone().requires_grad_()
        out = module(batch.indices, batch.offsets, samples)
        out.backward(batch.gradient)
        gradients = [] if samples is None else [samples.grad]
        results.append([out.detach(), module.weights.grad, *gradients])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, **FLOAT32)


def test_both_live_in_one_process() -> None:
    """Both register operators; loading one leaves those of the other as they were."""
    before = set(dir(torch.ops.emblib))
    fbgemm()
    assert before <= set(dir(torch.ops.emblib))
    compare(Setting(), FLOAT32)


@pytest.mark.slow
def test_fbgemm_may_come_first() -> None:
    fbgemm()
    text = (
        "import fbgemm_gpu, emblib, torch\n"
        "bags = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(5, 4)], emblib.optim.SGD(0.1))\n"
        "bags(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).sum().backward()\n"
        "assert bags.step == 1 and torch.ops.fbgemm.bounds_check_indices is not None\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", text], check=True)
