"""The emulated update kernel over all optimizers, memory tiers and dtypes."""

import pytest
import torch
from torch import Tensor

from emblib.columns import Hyper
from tests.ops.test_update import DTYPES, PLACES, TOLERANCE
from tests.optimizer_cases import CASES
from tests.simt import emulated
from tests.update_problem import Problem


def run(problem: Problem) -> list[Tensor]:
    """Weights and states after the emulated op."""
    weights = [w.clone() for w in problem.weights]
    states = [s.clone() for s in problem.states]
    emulated.tbe_update_(*problem.arguments(weights, states))
    return [*weights, *states]


def check(problem: Problem) -> None:
    for got, want in zip(run(problem), problem.expected(), strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE[got.dtype])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_update_matches_reference(name: str, place: str) -> None:
    check(Problem(CASES[name], **PLACES[place]))


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_narrow_weights_and_states(name: str, dtypes: str) -> None:
    weights, states = DTYPES[dtypes]
    dims = (70, 20, 300)  # wide ones are gone through twice
    check(Problem(CASES[name], weights_dtype=weights, states_dtype=states, dims=dims))


@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize(
    ("rows", "dims", "batch", "longest"),
    [
        ((1200, 7, 1), (8, 20, 3), 700, 2),
        ((1200, 7, 1), (8, 20, 3), 100, 20),
        ((400, 7, 1), (300, 20, 3), 200, 2),
        ((400, 7, 1), (300, 20, 3), 60, 6),
    ],
    ids=str,
)
def test_tiles_of_several_rows(
    name: str, rows: tuple[int, ...], dims: tuple[int, ...], batch: int, longest: int
) -> None:
    """A group of lanes holds several rows where a batch has many: narrow, wide, used often."""
    check(Problem(CASES[name], rows, dims, batch=batch, longest=longest))


@pytest.mark.parametrize("layout", [False, True])
@pytest.mark.parametrize("dims", [(8, 20, 3), (1100, 20, 3)], ids=str)
def test_long_segments(*, layout: bool, dims: tuple[int, ...]) -> None:
    """Segments of several chunks; rows wider than the chunk sums of a variable batch stay whole."""
    check(Problem(CASES["adagrad"], (2, 1, 3), dims, batch=4, longest=900, layout=layout))


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_infinite_weights_stay_so_without_a_penalty(name: str) -> None:
    problem = Problem(CASES[name])
    problem.hyperparams[Hyper.L2] = 0.0
    for weights in problem.weights:
        weights[::7] = torch.inf
    check(problem)
    assert not any(bool(values.isnan().any()) for values in run(problem))
