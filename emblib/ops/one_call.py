"""Sequences of native calls that no interrupt can separate.

Python raises the exception of a signal, such as KeyboardInterrupt for Ctrl-C, between two bytecodes
of its main thread. What a bytecode calls in C runs to its end. So state that takes two native calls
to change is changed by one bytecode: the calls are made by `map` or `itertools`, in C.
"""

from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

from torch import Tensor


def native(op: Any) -> Callable[..., Any]:
    """Return the C function of an op overload, whose own `__call__` is a Python function."""
    function: Callable[..., Any] = op._op
    return function


def in_one_call(*calls: partial[Any]) -> None:
    """Make calls of C functions in order: all of them, none, or all up to one that raises."""
    list(map(call, calls))


def count_step(step: Tensor, counted: Tensor | int, *updates: partial[Any]) -> None:
    """Increment a scalar step and make the updates that read it, all or nothing.

    Args:
        step: changed in place. The updates read one more than it is, also where they change no row.
        counted: number that is added to the step: 1, or a tensor with 0 for a step that is skipped.
        updates: calls of `native` ops, which check their arguments before they write.
    """
    calls = [partial(step.add_, 1), *updates]
    if isinstance(counted, Tensor):
        calls.append(partial(step.add_, counted - 1))
    results: list[Any] = []
    try:
        results.extend(map(call, calls))
    except BaseException:
        if len(results) == 1:  # the first update raised; interrupts come before or after all
            step.sub_(1)
        raise
