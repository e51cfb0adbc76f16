"""Optimizers over whole matrices, on the CPU and as emulated CUDA, against the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import optim
from emblib.ops.codes import OPTIMIZER
from emblib.reference import optim as reference
from tests.optimizer_cases import CASES
from tests.simt import emulated

UPDATES = {"cpu": torch.ops.emblib.update_rows_, "emulated": emulated.update_rows_}


def _state(kept: optim.State, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    if kept.name == "prev_iter":
        return torch.zeros(shape[0])
    return torch.rand(shape[:1] if kept.per_row else shape, generator=generator)


@pytest.mark.parametrize("kind", UPDATES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(7, 1), (30, 5), (3, 700), (0, 4), (20, 64)], ids=str)
def test_matches_the_reference(kind: str, name: str, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(5)
    optimizer = CASES[name]
    weights = torch.randn(shape, generator=generator)
    states = [_state(kept, shape, generator) for kept in optimizer.states]
    want, want_states = weights.double(), [s.double() for s in states]
    for step in (1.0, 2.0, 3.0):
        hyper = optimizer.hyperparams()
        hyper[1] = step
        grads = torch.randn(shape, generator=generator)
        grads[::3] = 0.0  # untouched: state and weights stay, even with eps 0
        UPDATES[kind](weights, states, hyper, OPTIMIZER[optimizer.name], grads)
        reference.update_rows_(want, want_states, hyper, optimizer.name, grads.double())
    torch.testing.assert_close(weights, want.float(), rtol=1e-4, atol=1e-5)
    for got, expected in zip(states, want_states, strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", UPDATES)
def test_untouched_rows_with_eps_zero_stay_finite(kind: str) -> None:
    weights, states = torch.ones(4, 3), [torch.zeros(4, 3)]
    grads = torch.zeros(4, 3)
    grads[1, 2] = 2.0
    UPDATES[kind](
        weights, states, optim.Adagrad(0.5, eps=0.0).hyperparams(), OPTIMIZER["adagrad"], grads
    )
    want = torch.ones(4, 3)
    want[1, 2] = 0.5
    assert torch.equal(weights, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(4, 3).half()}, "weights must be float32"),
        ({"weights": torch.zeros(12)}, "a contiguous matrix"),
        ({"states": [torch.zeros(4, 3).half()]}, "optimizer state must be float32"),
        ({"states": []}, "keeps 1 state tensors for each of 1 tensors of weights, got 0"),
        ({"hyper": torch.zeros(5).double()}, "hyper vector of 6 entries"),
        ({"grads": torch.zeros(4, 2)}, "grads must be .4, 3. like weights"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "weights": torch.zeros(4, 3),
        "states": [torch.zeros(4, 3)],
        "hyper": optim.Adagrad(0.5).hyperparams(),
        "optimizer": OPTIMIZER["adagrad"],
        "grads": torch.ones(4, 3),
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.emblib.update_rows_(**(arguments | change))
