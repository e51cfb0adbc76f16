"""Effects: native calls that change a table once, though the Python around them may run again.

An exception can come between any two lines: Ctrl-C, a lack of memory. A change that takes several
native calls is therefore written as a function that can run again from its start: `Effects.once`
makes a call the first time and returns the result of that call every other time. So running the
function again after an interruption completes it, instead of making half of the change twice.
"""

import itertools
from typing import Any


class Effects:
    """The results of the native calls that one change has made so far, in their order.

    The calls of a change must follow from its arguments and from the results of earlier calls.
    """

    def __init__(self) -> None:
        self._results: list[tuple[Any, Any]] = []  # operators and results
        self._next = 0

    def __len__(self) -> int:
        """Return the number of calls that were made."""
        return len(self._results)

    def has_made(self, op: Any) -> bool:
        """Return whether an operator was called."""
        return any(made_op is op for made_op, _ in self._results)

    def restart(self) -> None:
        """Run the change again from its start: calls that were made return their results."""
        self._next = 0

    @property
    def is_next_made(self) -> bool:
        """Return whether the next call was made before an interruption."""
        return self._next < len(self._results)

    def once(self, op: Any, *arguments: Any) -> Any:
        """Return the result of an operator (an `OpOverload`), which is called the first time only.

        The result is stored without a step of the interpreter after the call: a signal that is
        handled between the two would lose it. So the overload's native function is called, not its
        `__call__`, which is Python.
        """
        if self._next == len(self._results):
            self._results.extend(zip((op,), itertools.starmap(op._op, (arguments,)), strict=False))
        self._next += 1
        return self._results[self._next - 1][1]
