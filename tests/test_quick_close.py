"""The quick comparison of tensors accepts and refuses what that of torch does."""

import itertools
from typing import Any

import pytest
import torch

from tests import quick_close

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.int64, torch.bool, torch.uint8, torch.complex64]


def outcome(function: Any, *args: Any, **options: Any) -> str:
    """Return the error of a comparison, "" without one."""
    try:
        function(*args, **options)
    except (AssertionError, ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_as_torch(*args: Any, **options: Any) -> str:
    """Compare the outcomes of both comparisons and return it."""
    found = outcome(torch.testing.assert_close, *args, **options)
    assert found == outcome(quick_close._assert_close, *args, **options)
    return found


def test_it_is_what_tests_call() -> None:
    assert torch.testing.assert_close is quick_close.assert_close
    assert quick_close._assert_close.__module__.startswith("torch.")


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_at_the_edge_of_the_default_tolerances(dtype: torch.dtype) -> None:
    rtol, atol = quick_close._TOLERANCES[dtype]
    expected = torch.tensor([0.0, 1.0, -3.0], dtype=torch.float64)
    outcomes = []
    for scale, sign in itertools.product((0.0, 0.5, 0.9, 1.1, 2.0, 4.0), (1, -1)):
        actual = expected + sign * scale * (atol + rtol * expected.abs())
        outcomes.append(assert_as_torch(actual.to(dtype), expected.to(dtype)))
        assert_as_torch(actual.to(dtype), expected.to(dtype), rtol=0.0, atol=2 * atol)
        assert_as_torch(actual.to(dtype), expected.to(dtype), rtol=2 * rtol, atol=0.0)
    assert "" in outcomes
    assert any("not close" in text for text in outcomes)


def test_close_values_do_not_reach_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_close, "_assert_close", None)
    x = torch.randn(4, requires_grad=True)
    torch.testing.assert_close(x + 1e-7, x)
    torch.testing.assert_close(x.detach() + 0.1, x.detach(), rtol=0.0, atol=0.2, msg="far")
    torch.testing.assert_close(torch.arange(3), torch.arange(3), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
def test_what_differs(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, dtype=dtype)
    assert assert_as_torch(x, x.clone()) == ""
    for other in (
        torch.zeros_like(x),
        x[:1],
        x.flatten(),
        torch.ones(2, 3, dtype=torch.int32),
        x.to_sparse(),
        x.tolist(),
        x.to("meta"),
        None,
    ):
        assert assert_as_torch(x, other)
        assert assert_as_torch(other, x)
    assert "one of the two" in assert_as_torch(x, torch.zeros_like(x), msg="one of the two")


def test_values_that_are_no_numbers() -> None:
    nan = torch.tensor([1.0, float("nan")])
    infinite = torch.tensor([float("inf"), -float("inf")])
    assert assert_as_torch(nan, nan)
    assert assert_as_torch(nan, nan, rtol=1.0, atol=1.0)
    assert assert_as_torch(nan, nan, equal_nan=True) == ""
    assert assert_as_torch(infinite, infinite) == ""
    assert assert_as_torch(infinite, -infinite, rtol=1.0, atol=1.0)


def test_other_arguments() -> None:
    x = torch.ones(2)
    for options in ({"rtol": 0.1}, {"atol": 0.1}, {"rtol": -1.0, "atol": 0.0}, {"unknown": 1}):
        assert_as_torch(x, x.clone(), **options)
        assert_as_torch(x, x + 0.05, **options)
    strided = torch.ones(4)[::2]
    assert assert_as_torch(strided, x, check_stride=True)
    assert assert_as_torch(x, x.double(), check_dtype=False) == ""
    for same in (torch.nn.Parameter(x.clone()), [x.clone()], {"a": x.clone()}, 1.0, "text"):
        assert assert_as_torch(same, same) == assert_as_torch(same, same)
    assert assert_as_torch([x], [x + 1])
    assert assert_as_torch(torch.ones(0), torch.ones(0)) == ""
