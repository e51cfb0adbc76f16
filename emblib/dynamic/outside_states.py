"""The states that an optimizer of `torch.optim` keeps for dynamic tables, in step with keys."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emblib.dynamic.hash_index import Inserted
from emblib.ops.hash import Keys, Misses, tables_of


class OutsideStates:
    """A follower of training steps: states of rows that go to new keys begin in zeros.

    Copies and pickles of it follow nothing: the copied module has other weights, which its own
    optimizer must be attached to.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        weights: nn.Parameter | None,
        first_rows: Sequence[int] = (),
    ) -> None:
        self._optimizer, self._weights, self._first_rows = optimizer, weights, first_rows

    def admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """All may have a row."""
        return None

    def leaving(self, keys: Keys, inserted: Inserted) -> None:
        """Nothing is kept of keys that leave."""

    def arriving(self, keys: Keys, inserted: Inserted) -> None:
        """Zeros for the states of new keys (waits for the device)."""
        if self._optimizer is None or self._weights is None:
            return
        assert inserted.misses is not None
        assert inserted.placed is not None
        new = inserted.placed.slots >= 0
        tables = tables_of(keys)[inserted.misses.first[new]]
        first = torch.tensor(self._first_rows, device=tables.device)[tables]
        rows = first + inserted.placed.slots[new]
        for state in self._optimizer.state.get(self._weights, {}).values():
            if isinstance(state, Tensor) and state.shape[:1] == self._weights.shape[:1]:
                state[rows] = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return OutsideStates, (None, None)

    def __deepcopy__(self, memo: dict[int, object]) -> "OutsideStates":
        return OutsideStates(None, None)
