"""Every optimizer and mode of FBGEMM's interface does what its documentation says, in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from emblib.compat import fbgemm
from emblib.compat.fbgemm import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    LearningRateMode,
    OptimType,
    StepMode,
    TailIdThreshold,
    WeightDecayMode,
)
from tests.compat import exact
from tests.compat.settings import (
    Setting,
    assert_same,
    batches_of,
    build,
    settings,
    train,
    weights_of,
)


@dataclass(frozen=True)
class Case:
    """A rule of `exact`, its states, options both sides take, and those of one side."""

    rule: exact.Rule
    states: tuple[str, ...] = ()
    common: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    exact: dict[str, Any] = field(default_factory=dict)


ROWWISE = {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD}
MOMENTS = {"eps": 1e-3, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.05}
ROW, ELEMENTS = ("row",), ("element", "element")
COUNTER = CounterBasedRegularizationDefinition(
    counter_weight_decay_mode=CounterWeightDecayMode.DECOUPLE,
    counter_halflife=7,
    adjustment_ub=0.2,
    learning_rate_mode=LearningRateMode.TAIL_ID_LR_DECREASE,
    tail_id_threshold=TailIdThreshold(1.2),
)
COWCLIP = CowClipDefinition(
    counter_weight_decay_mode=CounterWeightDecayMode.DECOUPLE,
    weight_norm_coefficient=0.1,
    lower_bound=1e-3,
)
CASES = {
    "EXACT_SGD": Case(exact.sgd),
    "EXACT_ADAGRAD": Case(
        exact.adagrad, ("element",), {"eps": 1e-2}, {"optimizer": OptimType.EXACT_ADAGRAD}
    ),
    "EXACT_ROWWISE_ADAGRAD": Case(exact.rowwise, ROW, {"eps": 1e-2}, ROWWISE),
    "L2": Case(
        exact.rowwise,
        ROW,
        {"eps": 1e-2, "weight_decay": 0.2},
        ROWWISE | {"weight_decay_mode": WeightDecayMode.L2},
        {"mode": "L2"},
    ),
    "DECOUPLE": Case(
        exact.rowwise,
        ROW,
        {"eps": 1e-2, "weight_decay": 0.2},
        ROWWISE | {"weight_decay_mode": WeightDecayMode.DECOUPLE},
        {"mode": "DECOUPLE"},
    ),
    "max_norm": Case(exact.rowwise, ROW, {"eps": 1e-2, "max_norm": 0.7}, ROWWISE),
    "COUNTER": Case(
        exact.counter,
        ("row", "row", "row"),
        {"eps": 1e-2, "weight_decay": 0.1},
        ROWWISE
        | {
            "weight_decay_mode": WeightDecayMode.COUNTER,
            "counter_based_regularization": COUNTER,
        },
        {"halflife": 7, "adjustment_ub": 0.2, "threshold": 1.2},
    ),
    "COWCLIP": Case(
        exact.cowclip,
        ("row", "row", "row"),
        {"eps": 1e-2, "weight_decay": 0.1},
        ROWWISE | {"weight_decay_mode": WeightDecayMode.COWCLIP, "cowclip_regularization": COWCLIP},
        {"coefficient": 0.1, "lower_bound": 1e-3},
    ),
    "ADAM": Case(exact.adam, ELEMENTS, MOMENTS, {"optimizer": OptimType.ADAM}),
    "PARTIAL_ROWWISE_ADAM": Case(
        exact.adam, ("element", "row"), MOMENTS, {"optimizer": OptimType.PARTIAL_ROWWISE_ADAM}
    ),
    "LAMB": Case(exact.lamb, ELEMENTS, MOMENTS, {"optimizer": OptimType.LAMB}),
    "PARTIAL_ROWWISE_LAMB": Case(
        exact.lamb, ("element", "row"), MOMENTS, {"optimizer": OptimType.PARTIAL_ROWWISE_LAMB}
    ),
    "LARS_SGD": Case(
        exact.lars,
        ("element",),
        {"momentum": 0.7, "eta": 0.3, "weight_decay": 0.1},
        {"optimizer": OptimType.LARS_SGD},
    ),
}


def check(setting: Setting, case: Case, before: exact.Before | None = None, **more: Any) -> None:
    """Our training is the rule's."""
    common = {"learning_rate": 0.1} | case.common | more
    expected = exact.train(setting, case.rule, case.states, before, **common, **case.exact)
    # Adagrad, Adam: a step is up to the learning rate wherever a gradient is almost nothing.
    assert_same(train(fbgemm, setting, **common, **case.ours), expected, rtol=1e-3, atol=1e-4)


def many(**fixed: Any) -> Callable[..., Any]:
    """Run a test over random settings."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        drawn = given(setting=settings(**fixed))(test)
        return profile(max_examples=12, deadline=None, derandomize=True)(drawn)

    return decorate


@pytest.mark.parametrize("name", CASES)
@many(steps=st.integers(1, 6))
def test_rules(name: str, setting: Setting) -> None:
    check(setting, CASES[name])


@pytest.mark.parametrize("name", ["EXACT_ADAGRAD", "ADAM", "LARS_SGD"])
@many(pooling=st.sampled_from(["SUM", "MEAN"]), ranks=st.integers(1, 3))
def test_variable_batch_sizes(name: str, setting: Setting) -> None:
    check(setting, CASES[name])


@many(pooling=st.just("MEAN"), weighted=st.just(True))
def test_weighted_means(setting: Setting) -> None:
    """Both gradients are those of the mean (FBGEMM's CPU kernels do not divide them)."""
    check(setting, CASES["EXACT_SGD"])


@pytest.mark.parametrize("name", ["EXACT_SGD", "ADAM"])
@many()
def test_gradient_clipping(name: str, setting: Setting) -> None:
    check(setting, CASES[name], gradient_clipping=True, max_gradient=0.3)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("lower_bound", [0.0, 0.97])
@many(pooling=st.sampled_from(["SUM", "MEAN"]), steps=st.just(6))
def test_global_weight_decay(start: int, lower_bound: float, setting: Setting) -> None:
    definition = GlobalWeightDecayDefinition(start_iter=start, lower_bound=lower_bound)
    mode = {
        "weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL,
        "global_weight_decay": definition,
    }
    numbers = {"start": start, "lower_bound": lower_bound}
    common = {"eps": 1e-2, "weight_decay": 0.2}
    case = Case(exact.global_decay, ("row", "row"), common, ROWWISE | mode, numbers)
    check(setting, case, exact.catch_up)


@pytest.mark.parametrize("step_mode", [StepMode.USE_ITER, StepMode.NONE])
@many(steps=st.just(6))
def test_ensemble(step_mode: StepMode, setting: Setting) -> None:
    numbers = {"step_ema": 2, "step_swap": 4, "step_start": 2, "step_ema_coef": 0.4}
    mode = {
        "optimizer": OptimType.ENSEMBLE_ROWWISE_ADAGRAD,
        "ensemble_mode": EnsembleModeDefinition(**numbers, step_mode=step_mode),
    }
    clear = {"clear": step_mode is StepMode.NONE}
    case = Case(exact.rowwise, ("row", "element"), {"eps": 1e-2}, mode, numbers | clear)
    check(setting, case, exact.ensemble)


@many(pooling=st.sampled_from(["SUM", "MEAN"]), ranks=st.integers(0, 2))
def test_no_optimizer(setting: Setting) -> None:
    """The sparse gradient that is left is the gradient, of the distinct rows of the batch."""
    setting = replace(setting, dims=setting.dims[:1] * len(setting.dims), steps=1)
    module = build(fbgemm, setting, optimizer=OptimType.NONE, learning_rate=0.01)
    (batch,) = batches_of(setting)
    rows = exact.distinct_rows(setting, batch)
    module(
        batch.indices,
        batch.offsets,
        batch.sample_weights,
        batch_size_per_feature_per_rank=batch.sizes,
        total_unique_indices=sum(map(len, rows)),
    ).backward(batch.gradient)
    found = module.weights_dev.grad
    bases = module.rows_per_table.new_tensor([0, *setting.rows]).cumsum(0)
    wanted = torch.cat([r + base for r, base in zip(rows, bases, strict=False)])
    assert torch.equal(found._indices()[0], wanted)
    expected = exact.train(setting, exact.sgd, (), learning_rate=1.0)["weights"]
    gradients = [w - new for w, new in zip(weights_of(setting), expected, strict=True)]
    torch.testing.assert_close(found.to_dense(), torch.cat(gradients), rtol=1e-4, atol=1e-5)


@many(pooling=st.sampled_from(["SUM", "MEAN"]), ranks=st.integers(0, 2), weighted=st.booleans())
def test_dense_module(setting: Setting) -> None:
    """Its gradients are those of autograd, with variable batch sizes and weighted means too."""
    setting = replace(setting, steps=1)
    module = fbgemm.DenseTableBatchedEmbeddingBagsCodegen(
        list(zip(setting.rows, setting.dims, strict=True)),
        feature_table_map=list(setting.features),
        pooling_mode=fbgemm.PoolingMode[setting.pooling],
        use_cpu=True,
    )
    for view, values in zip(module.split_embedding_weights(), weights_of(setting), strict=True):
        view.copy_(values)
    (batch,) = batches_of(setting)
    samples = batch.sample_weights
    if samples is not None:
        samples = samples.clone().requires_grad_()
    output = module(
        batch.indices, batch.offsets, samples, batch_size_per_feature_per_rank=batch.sizes
    )
    output.backward(batch.gradient)
    expected = exact.train(setting, exact.sgd, (), learning_rate=1.0)
    pairs = zip(weights_of(setting), expected["weights"], strict=True)
    gradients = torch.cat([(w - new).view(-1) for w, new in pairs])
    torch.testing.assert_close(output.detach(), expected["output"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.weights.grad, gradients, rtol=1e-4, atol=1e-5)
    if samples is not None:
        found = samples.grad
        torch.testing.assert_close(
            found, expected["sample weights' gradient"][0], rtol=1e-4, atol=1e-5
        )
