"""The descriptions of optimizers: what they refuse, what they pack, and their helpers."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from emblib import EmbeddingBagConfig, StochasticRounding, TTSpec, optim
from emblib.columns import Hyper
from emblib.init import TruncatedNormal, Uniform
from emblib.ops import autograd
from emblib.ops.codes import OPTIMIZER
from emblib.optim.adagrad import LAST_STEP
from emblib.reference import optim as reference
from emblib.specs import format_config
from emblib.storage import TensorTrain
from tests.optimizer_cases import CASES


def test_functors_references_and_descriptions_are_the_same_set() -> None:
    with pytest.raises(RuntimeError, match="optimizer must be one of") as error:
        torch.ops.emblib.update_rows_(
            torch.ones(1, 1), [], torch.zeros(5).double(), -1, torch.ones(1, 1)
        )
    numbered = re.findall(r"(\d+) \((\w+)\)", str(error.value))
    assert {name: int(code) for code, name in numbered} == OPTIMIZER
    functors = set(OPTIMIZER)
    assert functors == set(reference.OPTIMIZERS)
    assert functors == {case.name for case in CASES.values()}


def test_ftrl_is_the_algorithm_of_the_paper() -> None:
    """Algorithm 1 of McMahan et al., 2013, per coordinate from zero weights, in plain Python."""
    lr, beta, l1, l2 = 0.3, 0.7, 0.4, 0.2
    optimizer = optim.FTRL(lr, beta=beta, l1=l1, l2=l2)
    gradients = torch.randn(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w = torch.zeros(1, 5, dtype=torch.float64)
    states = [torch.zeros_like(w), torch.zeros_like(w)]
    z, n = [0.0] * 5, [0.0] * 5
    zeros = 0
    for row in gradients:
        for i, g in enumerate(row.tolist()):
            sign = math.copysign(1.0, z[i])
            root = math.sqrt(n[i])
            weight = 0.0 if abs(z[i]) <= l1 else -(z[i] - sign * l1) / ((beta + root) / lr + l2)
            assert math.isclose(float(w[0, i]), weight, rel_tol=1e-12, abs_tol=1e-15)
            zeros += weight == 0.0
            sigma = (math.sqrt(n[i] + g * g) - root) / lr
            z[i] += g - sigma * weight
            n[i] += g * g
        w, states = reference.step_rows("ftrl", w, row[None], states, optimizer.hyperparams())
    assert 5 < zeros < 90  # l1 holds some weights at zero beyond the first step


@pytest.mark.parametrize("name", CASES)
def test_states_and_numbers_fit_the_reference(name: str) -> None:
    optimizer = CASES[name]
    rule = reference.OPTIMIZERS[optimizer.name]
    assert tuple(state.per_row for state in optimizer.states) == rule.per_row
    assert sorted(rule.per_row) == list(rule.per_row), "states as long as the row come first"
    hyper = optimizer.hyperparams()
    assert hyper[:2].tolist() == [optimizer.lr, 0.0]
    assert hyper[Hyper.SEED] == -1
    assert len(hyper) == Hyper.OPTIMIZER_ARGS + len(optimizer.parameters())
    assert optimizer == replace(optimizer)
    hash(optimizer)


WRONG: dict[str, Callable[[], object]] = {
    "learning rate must be": lambda: optim.SGD(-0.1),
    "finite number": lambda: optim.Adagrad(0.1, eps=1e300),
    "betas must be": lambda: optim.Adam(0.1, betas=(0.9, 1.0)),
    "LAMB must be None or Decoupled.rate.": lambda: optim.LAMB(0.1, weight_decay=optim.L2(0.1)),
    "LARS must be None or L2.rate.": lambda: optim.LARS(0.1, weight_decay=optim.Decoupled(0.1)),
    "SGD must be None or L2.rate. or Dec": lambda: optim.SGD(0.1, weight_decay=optim.AdagradW(1)),
    "External must be None: it has none": lambda: optim.External(weight_decay=optim.L2(0.1)),
    "rate of L2 must": lambda: optim.L2(-1.0),
    "rate of Decoupled must": lambda: optim.Decoupled(float("nan")),
    "max_gradient must": lambda: optim.SGD(0.1, max_gradient=-1.0),
    "AdagradW counts": lambda: optim.RowwiseAdagrad(0.1, weight_decay=optim.AdagradW(0.1)),
    "global_decay is the weight decay": lambda: optim.RowwiseAdagrad(
        0.1, weight_decay=optim.L2(0.1), global_decay=optim.GlobalDecay(0.1)
    ),
    "momentum must": lambda: optim.LARS(0.1, momentum=1.0),
    "momentum must be in .*, got '0.9'": lambda: optim.LARS(0.1, momentum="0.9"),  # type: ignore[arg-type]
    "betas must be .*None": lambda: optim.Adam(0.1, betas=(0.9, None)),  # type: ignore[arg-type]
    "start must be a finite": lambda: optim.EnsembleRowwiseAdagrad(0.1, start=None),  # type: ignore[arg-type]
    "start must be .*'soon'": lambda: optim.GlobalDecay(0.1, start="soon"),  # type: ignore[arg-type]
    "bound must be": lambda: optim.Counter(bound=10**400),
    "swap_every must": lambda: optim.EnsembleRowwiseAdagrad(0.1, swap_every=0),
    "keep must": lambda: optim.EnsembleRowwiseAdagrad(0.1, keep=1.5),
    "learning rate must be a finite number >= 0, got True": lambda: optim.SGD(True),
    "learning rate must be a finite number >= 0, got None": lambda: optim.SGD(None),  # type: ignore[arg-type]
    "max_norm must be a finite number": lambda: optim.RowwiseAdagrad(0.1, max_norm=10**400),
    "halflife must be": lambda: optim.Counter(halflife=math.nan),
    "threshold must be": lambda: optim.Counter(threshold=optim.RelativeThreshold(math.inf)),
    "TailRate must be one of": lambda: optim.Counter(tail="faster"),
    "SGD has 5 hyperparameters, got 0": lambda: optim.SGD(0.1).with_hyperparams([]),
    "Gradient must be one of": lambda: optim.External(gradient="none"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_numbers_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


@pytest.mark.parametrize("name", ["deferred", "maximize"])
def test_what_is_no_bool_is_refused(name: str) -> None:
    """A string from a configuration file, such as "False", is true in Python."""
    for value in ("False", 0, None):
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            optim.SGD(0.1, **{name: value})
    assert getattr(optim.SGD(0.1, **{name: np.bool_(True)}), name) is True


def test_other_types_of_variants_are_refused() -> None:
    with pytest.raises(TypeError, match=r"counter must be None or Counter\(\.\.\.\) or CowClip"):
        optim.RowwiseAdagrad(0.1, counter="count")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"global_decay must be None or GlobalDecay"):
        optim.RowwiseAdagrad(0.1, global_decay=0.1)  # type: ignore[arg-type]


def test_weight_decay_has_its_place_in_hyper() -> None:
    assert optim.SGD(1, weight_decay=optim.L2(0.5)).hyperparams()[2:4].tolist() == [0.5, 0.0]
    assert optim.SGD(1, weight_decay=optim.Decoupled(0.5)).hyperparams()[2:4].tolist() == [0.0, 0.5]
    assert optim.LAMB(1, weight_decay=optim.Decoupled(0.5)).hyperparams()[[2, 3, 8]].tolist() == [
        0,
        0,
        0.5,
    ]
    assert optim.LARS(1, weight_decay=optim.L2(0.5)).hyperparams()[[2, 3, 7]].tolist() == [
        0,
        0,
        0.5,
    ]


def test_global_decay_scale() -> None:
    decay = optim.GlobalDecay(0.5, start=4, lower_bound=0.6)
    previous = torch.tensor([0.0, 9.0, 8.0, 7.0, 1.0])
    got = decay.scale(previous, 10, 0.2)
    torch.testing.assert_close(got, torch.tensor([1.0, 1.0, 0.9, 0.81, 0.6]))
    assert got.dtype == torch.float32
    assert bool((decay.scale(previous, 3, 0.2) == 1).all())
    on_device = decay.scale(previous, torch.tensor(10.0), torch.tensor(0.2, dtype=torch.float64))
    assert torch.equal(on_device, got)


def test_ensemble_averages_and_swaps() -> None:
    optimizer = optim.EnsembleRowwiseAdagrad(0.1, average_every=2, swap_every=4, start=2, keep=0.5)
    weights, slow = [torch.full((2, 3), 4.0)], [torch.zeros(2, 3)]
    optim.ensemble_(optimizer, 1, weights, slow)
    assert not slow[0].any()
    optim.ensemble_(optimizer, 2, weights, slow)  # not after `start`: a copy
    assert bool((slow[0] == 4).all())
    weights[0].fill_(8.0)
    optim.ensemble_(optimizer, 4, weights, slow)
    assert bool((slow[0] == 6).all())
    assert bool((weights[0] == 6).all())
    cleared = replace(optimizer, slow=optim.EmaReset.CLEAR)
    optim.ensemble_(cleared, 4, weights, slow)
    assert not slow[0].any()


def test_a_counter_without_bound_or_threshold() -> None:
    counter = optim.Counter(bound=math.inf, threshold=math.inf)
    assert optim.Counter().with_parameters(counter.parameters(None)) == counter


def test_largest_count_goes_to_hyper() -> None:
    optimizer = optim.RowwiseAdagrad(0.1, counter=optim.Counter(update_every=5))
    hyper = optimizer.hyperparams()
    counters = [torch.tensor([1.0, 7.0]), torch.tensor([3.0]), torch.zeros(0)]
    optim.count_largest_(optimizer, 4, hyper, counters)
    assert hyper[-1] == 1.0
    optim.count_largest_(optimizer, 5, hyper, counters)
    assert hyper[-1] == 8.0


def test_beyond_the_last_step_rows_are_read_as_they_are() -> None:
    decay, previous = optim.GlobalDecay(0.5), optim.encode_steps(torch.tensor([LAST_STEP] * 2))
    previous[1] = 0.0
    for step in (LAST_STEP, LAST_STEP + 1, LAST_STEP + 2, 2**30, 2**52):
        assert decay.scale(previous, step, 0.2).tolist() == [1.0, 1.0]
    waited = optim.encode_steps(torch.tensor([LAST_STEP - 3]))
    torch.testing.assert_close(decay.scale(waited, 2**30, 0.2), torch.tensor([0.9**2]))
    starts_later = optim.GlobalDecay(0.5, start=2**30)
    assert starts_later.scale(waited, 2**30 - 1, 0.2).item() == 1.0
    torch.testing.assert_close(starts_later.scale(waited, 2**30, 0.2), torch.tensor([0.9**2]))


STEPS = [0, 1, 2**24 - 1, 2**24, 2**24 + 1, 2**29, LAST_STEP - 1, LAST_STEP]


def test_steps_of_rows_are_exact_beyond_2_to_the_24() -> None:
    steps = torch.tensor(STEPS)
    codes = optim.encode_steps(steps)
    assert codes.dtype == torch.float32
    assert bool(codes.isfinite().all())
    assert codes[:4].tolist() == [float(step) for step in STEPS[:4]], "as checkpoints have them"
    assert optim.decode_steps(codes).tolist() == STEPS
    assert optim.decode_steps(optim.encode_steps(steps[-1:] + 9)).tolist() == STEPS[-1:]


@pytest.mark.parametrize("start", [2**24 + 1, LAST_STEP - 1, LAST_STEP + 1000])
@pytest.mark.parametrize("name", ["adagradw_-1.0", "cowclip", "global_decay"])
def test_rows_know_their_last_step_however_late(name: str, start: int) -> None:
    torch.manual_seed(0)
    optimizer = CASES[name]
    weights, grads = torch.randn(4, 3), torch.randn(4, 3)
    states = [torch.rand(4) for _ in optimizer.states]
    states[1] = optim.encode_steps(min(start, LAST_STEP) - torch.tensor([1, 2, 3, 7]))
    want_weights, want_states = weights.double(), [state.double() for state in states]
    hyper = optimizer.hyperparams()
    for step in (start, start + 1):
        hyper[1] = step
        torch.ops.emblib.update_rows_(weights, states, hyper, OPTIMIZER[optimizer.name], grads)
        want_weights, want_states = reference.step_rows(
            optimizer.name, want_weights, grads.double(), want_states, hyper
        )
        assert optim.decode_steps(states[1]).tolist() == [min(step, LAST_STEP)] * 4
        torch.testing.assert_close(weights.double(), want_weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bound", [0.1, 0.3, 1.0, 3.3, 0.0, 1e-42, 1e30])
def test_no_clipped_gradient_exceeds_its_bound(dtype: torch.dtype, bound: float) -> None:
    grad = torch.tensor([-5.0, -0.05, 0.0, 0.05, 5.0, float("inf")], dtype=dtype)
    clipped = autograd.clip_gradient(
        grad, autograd.UpdateRule.from_optimizer(optim.SGD(0.1, max_gradient=bound))
    )
    assert clipped.dtype == dtype
    assert float(clipped.double().abs().max()) <= bound
    inside = grad.double().abs() <= bound
    assert torch.equal(clipped[inside], grad[inside])
    largest = torch.tensor(min(bound, torch.finfo(dtype).max)).to(dtype).double()
    info = torch.finfo(dtype)
    assert (
        float(clipped[-1].double())
        >= float(largest) * (1 - info.eps) - info.smallest_normal * info.eps
    )


def test_a_config_is_formatted_without_its_defaults() -> None:
    @dataclass(frozen=True)
    class Config:
        rate: float
        names: list[str] = field(default_factory=list)
        rounds: int = 3

    assert format_config(Config(0.5)) == "Config(rate=0.5)"
    assert format_config(Config(0.5, ["a"], 4)) == "Config(rate=0.5, names=['a'], rounds=4)"


def test_numbers_of_numpy_and_torch_become_python_numbers() -> None:
    """Parameter groups have them, which `torch.load` reads with `weights_only`."""
    numpy_betas = (np.float64(0.5), np.float32(0.75))
    decay = optim.Decoupled(np.float32(0.5))
    made = optim.Adam(0.1, eps=torch.tensor(0.25), betas=numpy_betas, weight_decay=decay)
    assert made == optim.Adam(0.1, betas=(0.5, 0.75), eps=0.25, weight_decay=optim.Decoupled(0.5))
    numbers = (made.eps, *made.betas, made.weight_decay.rate)
    assert {type(number) for number in numbers} == {float}
    assert type(optim.AdagradW(np.float32(0.5)).rate) is float


def test_numbers_of_numpy_in_specs_become_python_numbers() -> None:
    """Headers of frozen files have them, in JSON."""
    factor, bound = np.int64(10), np.float32(0.5)
    trains = TTSpec(1000, 16, (np.int64(4), factor), (factor,) * 3, (np.int64(2), 2, 4))
    storage = TensorTrain((factor, factor))
    ints = (*trains.ranks, *trains.row_factors, *trains.dim_factors, *storage.ranks)
    assert {type(number) for number in (*ints, StochasticRounding(factor).seed)} == {int}
    config = EmbeddingBagConfig(3, 4, "t", weight_init_min=-bound, weight_init_max=bound)
    floats = (Uniform(-bound, bound).low, TruncatedNormal(high=bound).high, *config.bounds)
    assert {type(number) for number in floats} == {float}
