"""Effects: native calls that change a table once, though the Python around them may run again.

An exception can come between any two lines: Ctrl-C, a lack of memory. So a change of several native
calls is a function that can run again from its start: `Effects.once` makes a call the first time,
and only returns its result every other time. `Effects.restart` and another run of the function
complete an interrupted change, instead of making half of it twice.
"""

import itertools
from typing import Any


class Effects:
    """The results of the native calls that one change has made so far, in their order.

    One change has one `Effects`. The arguments of the change and the results of earlier calls must
    determine each call: a later run gets results by the number of the call, unchecked. Runs may be
    in different threads, but only one at a time.
    """

    def __init__(self) -> None:
        self._results: list[tuple[Any, Any]] = []  # operators and results
        self._next = 0

    def __len__(self) -> int:
        """Return the number of calls that were made, in all runs."""
        return len(self._results)

    def has_made(self, op: Any) -> bool:
        """Return whether `once` has called `op`, the same object, for this change."""
        return any(made_op is op for made_op, _ in self._results)

    def restart(self) -> None:
        """Prepare another run of the change: `once` returns the results of earlier calls."""
        self._next = 0

    @property
    def is_next_made(self) -> bool:
        """Return whether the next call was made before an interruption."""
        return self._next < len(self._results)

    def once(self, op: Any, *arguments: Any) -> Any:
        """Call an operator (an `OpOverload`) the first time; return its result every time.

        If the operator raises, nothing is stored, and the next run calls it again.

        Call and storing of the result are one bytecode, because a signal that is handled in between
        would lose the result. So the overload's native function is called, not its Python
        `__call__`.
        """
        if self._next == len(self._results):
            self._results.extend(zip((op,), itertools.starmap(op._op, (arguments,)), strict=False))
        self._next += 1
        return self._results[self._next - 1][1]
