"""Sequences of native calls that no interrupt can separate.

Python raises the exception of a signal, such as KeyboardInterrupt for Ctrl-C, between two bytecodes
of its main thread; a C function that a bytecode calls runs to its end. So a change of state that
needs two native calls makes both in one bytecode, by `map` or `itertools`, which are C code.
"""

from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

from torch import Tensor


def c_function(op: Any) -> Callable[..., Any]:
    """Return the C function of an op overload, whose own `__call__` is a Python function."""
    function: Callable[..., Any] = op._op
    return function


def in_one_call(*calls: partial[Any]) -> None:
    """Make calls of C functions in order; an interrupt comes before or after all of them.

    If a call raises, the later calls are not made.
    """
    list(map(call, calls))


def count_step(step: Tensor, increment: Tensor | int, *updates: partial[Any]) -> None:
    """Increment a scalar step and make the updates that read it.

    An interrupt comes before the increment or after the last update. If the first update raises,
    `step` is unchanged; if a later one raises, `step` and the earlier updates stay changed.

    Args:
        step: float64 scalar to increment in place, before the updates; undone after them if
            `increment` is a tensor 0.
        increment: 1, or a scalar tensor 1 or 0 on the device of `step`. The updates run for 0 too.
        updates: calls of functions of `c_function`, which check their arguments before they write.
    """
    calls = [partial(step.add_, 1), *updates]
    if isinstance(increment, Tensor):
        calls.append(partial(step.add_, increment - 1))
    results: list[Any] = []
    try:
        results.extend(map(call, calls))
    except BaseException:
        if len(results) == 1:  # the first update raised; interrupts come before or after all
            step.sub_(1)
        raise
