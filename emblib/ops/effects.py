"""Effects: native calls that change a table once, though the Python around them may run again.

An exception, such as Ctrl-C or a lack of memory, can interrupt Python between any two lines. So a
change of several native calls is a function that can run again from its start. `Effects.call_once`
makes a call in the first run, and only returns its result in later runs. `Effects.restart` and
another run of the function complete an interrupted change; no completed call is made again.
"""

import itertools
from typing import Any


class Effects:
    """The results of the native calls that one change has made so far, in their order.

    One change has one `Effects`. Each run must make the same calls in the same order, because a
    later run gets results by the number of the call, unchecked. Runs may be in different threads,
    but only one at a time.
    """

    def __init__(self) -> None:
        self._results: list[tuple[Any, Any]] = []  # operators and results
        self._next_call = 0  # index in `_results`

    def __len__(self) -> int:
        """Return the number of calls that all runs together have made."""
        return len(self._results)

    def has_called(self, op: Any) -> bool:
        """Return whether a call of `op`, the same object, has completed in this change."""
        return any(called_op is op for called_op, _ in self._results)

    def restart(self) -> None:
        """Prepare another run of the change: `call_once` returns the results of earlier calls."""
        self._next_call = 0

    @property
    def has_next_result(self) -> bool:
        """Return whether an earlier run has made the next call."""
        return self._next_call < len(self._results)

    def call_once(self, op: Any, *arguments: Any) -> Any:
        """Call an operator (an `OpOverload`) the first time; return its result every time.

        If the operator raises, nothing is stored, and the next run calls it again.

        One bytecode makes the call and stores its result, because an interrupt between the two
        would lose the result. So the overload's native function is called, not its Python
        `__call__`.
        """
        if self._next_call == len(self._results):
            self._results.extend(zip((op,), itertools.starmap(op._op, (arguments,)), strict=False))
        self._next_call += 1
        return self._results[self._next_call - 1][1]
