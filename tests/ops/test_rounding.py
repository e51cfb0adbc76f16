"""Stochastic rounding: unbiased, the same bits everywhere, and never further than a neighbour."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emblib import optim
from emblib.ops.codes import OPTIMIZER, POOLING
from emblib.reference import optim as reference
from tests.ops.test_update import PLACES, run
from tests.simt.test_update import run as run_emulated
from tests.update_problem import Problem

NARROW = (torch.float16, torch.bfloat16)
# Optimizers whose arithmetic is exact on the problems' eighths: what differs is the reference.
EXACT = {
    "sgd": (optim.SGD(0.125), (0,)),
    "adagrad": (optim.Adagrad(0.125), (1,)),
    "adam": (optim.Adam(0.125, betas=(0.5, 0.5)), (1, 2)),
    "partial_rowwise_adam": (optim.PartialRowwiseAdam(0.125, betas=(0.5, 0.5)), (1,)),
}


def _neighbours(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest `dtype` number <= and the smallest >= each value."""
    near = values.to(dtype)
    below = torch.nextafter(near, torch.full_like(near, -torch.inf))
    above = torch.nextafter(near, torch.full_like(near, torch.inf))
    low = torch.where(near.float() <= values, near, below)
    return low, torch.where(near.float() >= values, near, above)


def _words(*shape: int) -> Tensor:
    return torch.randint(0, 2**32, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", NARROW)
def test_rounds_to_a_neighbour(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2**32, (300_000,), generator=torch.Generator().manual_seed(1))
    values = (bits - 2**31).to(torch.int32).view(torch.float32)
    values = values[values.isfinite()]
    got = reference.round_stochastically(values, dtype, _words(len(values)))
    low, high = _neighbours(values, dtype)
    assert bool(((got == low) | (got == high)).all())
    nearest = values.to(dtype)
    assert torch.equal(got.isinf(), got.isinf() & nearest.isinf())
    assert torch.equal(got.signbit(), values.signbit())


@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_exact_stays(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    got = reference.round_stochastically(every.float(), dtype, _words(2**16))
    assert torch.equal(got[~every.isnan()], every[~every.isnan()])
    assert torch.equal(got.isnan(), every.isnan())


@pytest.mark.parametrize("value", [1.0001, -3.14159, 1e-3, 3e-6, -4.7e-7, 2e-8, 1e-10, 65519.0])
@pytest.mark.parametrize("dtype", NARROW)
def test_is_unbiased(dtype: torch.dtype, value: float) -> None:
    n = 400_000
    values = torch.full((n,), value)
    got = reference.round_stochastically(values, dtype, _words(n)).double()
    low, high = (float(x[0]) for x in _neighbours(values[:1], dtype))
    if high == torch.inf:  # what nearest makes finite stays finite
        assert got.max() == low
        return
    deviation = (high - low) / 2 / n**0.5
    assert abs(got.mean() - values[0].double()) < 5 * deviation + 1e-12 * abs(value)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EXACT)
def test_same_bits_everywhere(name: str, place: str, dtype: torch.dtype) -> None:
    """Reference, CPU and emulated CUDA, on wide and narrow rows."""
    optimizer, exact = EXACT[name]
    problem = Problem(
        optimizer,
        (40, 7, 1),
        (70, 20, 3),
        **{"weights_dtype": dtype, "states_dtype": dtype, "rounding": 2**40 + 5, **PLACES[place]},
    )
    want, tiers = problem.expected(), len(problem.weights)
    for got in (run(problem), run_emulated(problem)):
        for kind in exact:
            for tier in range(tiers):
                states = len(problem.optimizer.states)
                at = tier if kind == 0 else tiers + tier * states + kind - 1
                assert torch.equal(got[at], want[at])
    other = run(replace(problem, rounding=7))
    assert not torch.equal(want[tiers - 1], other[tiers - 1]), "another seed, other bits"


@pytest.mark.parametrize("dtype", NARROW)
def test_rare_numbers_have_the_same_bits_everywhere(dtype: torch.dtype) -> None:
    """Too large to round up, NaN, subnormal: reference, CPU and emulated CUDA."""
    # Steps of a fraction of the spacing at the largest number, beyond it too.
    lr = 4.0 if dtype == torch.float16 else 2.0**119
    problem = Problem(  # the slots of the cache are aligned, so that kernels round four at once
        optim.SGD(lr),
        (40, 7, 1),
        (64, 20, 3),
        weights_dtype=dtype,
        rounding=2**40 + 5,
        **PLACES["all_cached"],
    )
    limits = torch.finfo(dtype)
    rare = [limits.max, -limits.max, torch.nan, limits.tiny, -limits.tiny, 1e-7, 0.0]
    for weights in problem.weights:
        weights.copy_(torch.tensor(rare).repeat(weights.numel() // len(rare) + 1)[: len(weights)])
    want = problem.expected()
    for got in (run(problem), run_emulated(problem)):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a[~a.isnan()], b[~b.isnan()])
    assert want[-1].isinf().any()
    assert (want[-1].abs() == limits.max).any()


@pytest.mark.parametrize("states", [*NARROW, torch.float32])
def test_same_bits_on_any_number_of_threads(states: torch.dtype, thread_counts: list[int]) -> None:
    problem = Problem(
        optim.Adam(0.1),
        (3000, 700, 1),
        (24, 33, 4),
        batch=500,
        longest=12,
        weights_dtype=torch.bfloat16,
        states_dtype=states,
        rounding=3,
    )
    results = []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        results.append(run(problem))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", NARROW)
def test_small_steps_add_up(dtype: torch.dtype) -> None:
    """Steps of an eighth of the spacing vanish to nearest; stochastically their mean is right."""
    rows, dim, steps = 2000, 12, 10
    spacing = torch.finfo(dtype).eps
    results = {}
    for seed in (-1.0, 11.0):
        weights = torch.full((rows * dim,), 1.5, dtype=dtype)
        features = torch.tensor([[0, 0, rows, dim, 0, 0, 0, 0]])
        hyper = optim.SGD(spacing / 8).hyperparams()
        hyper[4] = seed
        index = torch.arange(rows)
        offsets = torch.arange(rows + 1)
        groups = torch.ops.emblib.tbe_group(features, index, offsets, None, rows)
        for step in range(steps):
            hyper[1] = step + 1
            torch.ops.emblib.tbe_update_(
                [weights],
                [],
                hyper,
                OPTIMIZER["sgd"],
                torch.ones(rows, dim),
                features,
                *groups,
                offsets,
                None,
                None,
                None,
                POOLING["sum"],
            )
        results[seed] = weights.double()
    assert bool((results[-1.0] == 1.5).all())
    want, deviation = 1.5 - steps * spacing / 8, spacing * (steps / 10 / (rows * dim)) ** 0.5
    assert abs(results[11.0].mean() - want) < 5 * deviation


@settings(max_examples=50, deadline=None)
@given(st.floats(width=32), st.integers(0, 2**32 - 1), st.sampled_from(NARROW))
def test_any_value(value: float, word: int, dtype: torch.dtype) -> None:
    values = torch.tensor([value], dtype=torch.float32)
    got = reference.round_stochastically(values, dtype, torch.tensor([word]))
    if values.isnan():
        assert bool(got.isnan())
    elif values.isinf():
        assert torch.equal(got.float(), values)
    else:
        low, high = _neighbours(values, dtype)
        assert bool((got == low) | (got == high))
