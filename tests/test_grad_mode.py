"""Functions without gradients: gradients are back on however they end."""

import signal
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from emblib.grad_mode import in_grad_mode, without_gradients


@without_gradients
def _modes(count: int) -> list[bool]:
    """Return whether gradients are enabled here, after as many nested calls."""
    return [torch.is_grad_enabled(), *(_modes(count - 1) if count else ())]


def test_gradients_are_off_inside_alone() -> None:
    assert _modes(3) == [False] * 4
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert _modes(0) == [False]
        assert not torch.is_grad_enabled()


def test_a_function_runs_in_the_mode_it_is_given() -> None:
    with torch.no_grad():
        assert in_grad_mode(torch.is_grad_enabled, enabled=True)()
        assert not torch.is_grad_enabled()
    assert not in_grad_mode(torch.is_grad_enabled, enabled=False)()
    assert torch.is_grad_enabled()


def test_compiled_code_may_set_the_mode() -> None:
    weights = torch.ones(3, requires_grad=True)

    def function(values: torch.Tensor) -> torch.Tensor:
        return in_grad_mode(lambda x: x * 2, enabled=False)(values) + values

    compiled = torch.compile(function, backend="eager")
    assert torch.equal(compiled(weights), function(weights))
    compiled(weights).sum().backward()
    assert torch.equal(weights.grad, torch.ones(3))


def test_an_exception_leaves_gradients_as_they_were() -> None:
    @without_gradients
    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("mode", [nullcontext, lambda: torch.device("cpu")])
def test_signals_leave_gradients_as_they_were(mode: Any) -> None:
    """A thousand interrupts; `torch.no_grad` leaves gradients off after some of them.

    A device as a context is a mode that handles torch's functions in Python.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def change_modes() -> None:
        # A function, since Python 3.13.0 does not catch an interrupt at the end of a loop in a try.
        end = time.monotonic() + 60
        while time.monotonic() < end:
            _modes(5)

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupts = 0
    try:
        while interrupts < 1000:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002)
                with mode():
                    change_modes()
            except KeyboardInterrupt:
                interrupts += 1
            assert torch.is_grad_enabled()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
